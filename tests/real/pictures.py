"""Pictures of the page, from the running program: ``python -m tests.real.pictures FOLDER``.

It starts `gpustream run --simulate 24x8 --story` and looks at it in Chromium after two minutes, when the first minute
of usage is closed. In the folder there are then page.webp, page-dark.webp and page-phone.webp. Times and values differ
from run to run, the fleet does not.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.real.chromium import Chromium, Page, chromium

FLEET = "24x8"
PAGE = "http://127.0.0.1:9402/"
AFTER_S = 135.0


async def take_page(browser: Chromium, folder: Path) -> None:
    """The fleet with one GPU of it; the same in the dark by a metric; a phone."""
    async with browser.page() as page:
        await page.open(PAGE, 1360, 880)
        await chosen(page)
        await page.value("document.activeElement.blur()")
        (folder / "page.webp").write_bytes(await page.picture())
    async with browser.page() as page:
        await page.open(PAGE, 1360, 880, dark=True)
        await page.wait_until("document.querySelectorAll('#metric option').length > 1")
        for control, value in (("metric", "power_watts"), ("group", "team")):
            script = f"document.getElementById('{control}').value = '{value}';"
            await page.value(script + f"document.getElementById('{control}').dispatchEvent(new Event('change'))")
        await page.wait_until("!document.getElementById('scale').hidden")
        await asyncio.sleep(3)
        (folder / "page-dark.webp").write_bytes(await page.picture())
    async with browser.page() as page:
        await page.open(PAGE, 390, 844, dark=True, phone=True)
        await page.wait_until("document.body?.dataset.painted")
        await asyncio.sleep(2)
        (folder / "page-phone.webp").write_bytes(await page.picture(quality=70))


async def chosen(page: Page) -> None:
    """A GPU that had several holders, or at least one, is looked at."""
    await page.wait_until("document.querySelectorAll('#alerts button').length > 0")
    await page.value("document.querySelector('#alerts li:last-child button')?.click()")
    await page.shows("#detail h2", "GPU")
    await asyncio.sleep(2)


async def main(folder: Path) -> None:
    run = (sys.executable, "-m", "gpustream", "run", "--simulate", FLEET, "--story", "--plain", "--duration", "10m")
    process = await asyncio.create_subprocess_exec(*run, "--page-listen", "127.0.0.1:9402", "--listen", "off")
    try:
        await asyncio.sleep(AFTER_S)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as files:
            async with chromium(Path(files)) as browser:
                await take_page(browser, folder)
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
