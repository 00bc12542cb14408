"""The pictures of the docs, ``python -m tests.real.pictures [FOLDER]``: of the program while it runs.

In: nothing. Out: docs/pictures: the page as Chromium shows it (WebP), the terminal as Textual draws it (SVG). It starts
`gpustream run --simulate 24x8 --story` with a broker, and looks at it after two minutes, when the first minute of usage
is closed. Times and values differ from run to run, the fleet does not.
"""

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path

from delivery.connection import Connection
from gpustream import history
from gpustream.alerts import Seen
from gpustream.embedded import EmbeddedBroker, every_topic
from gpustream.fleet import Fleet
from gpustream.top import command
from gpustream.top.app import TopApp
from tests.eventually import eventually
from tests.real.chromium import Chromium, Page, chromium
from topics import alerts, attributed

FLEET = "24x8"
PAGE = "http://127.0.0.1:9402/"
AFTER_S = 135.0
_FETCHED_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def take_page(browser: Chromium, folder: Path) -> None:
    """The fleet with one GPU of it; the same in the dark by a metric; a phone."""
    async with browser.page() as page:
        await page.open(PAGE, 1360, 880)
        await chosen(page)
        await page.value("document.activeElement.blur()")
        (folder / "page.webp").write_bytes(await page.picture())
    async with browser.page() as page:
        await page.open(PAGE, 1360, 880, dark=True)
        await page.until("document.querySelectorAll('#metric option').length > 1")
        for control, value in (("metric", "power_watts"), ("group", "team")):
            script = f"document.getElementById('{control}').value = '{value}';"
            await page.value(script + f"document.getElementById('{control}').dispatchEvent(new Event('change'))")
        await page.until("!document.getElementById('scale').hidden")
        await asyncio.sleep(3)
        (folder / "page-dark.webp").write_bytes(await page.picture())
    async with browser.page() as page:
        await page.open(PAGE, 390, 844, dark=True, phone=True)
        await page.until("document.body?.dataset.painted")
        await asyncio.sleep(2)
        (folder / "page-phone.webp").write_bytes(await page.picture(quality=70))


async def chosen(page: Page) -> None:
    """A GPU that had several holders, or at least one, is looked at."""
    await page.until("document.querySelectorAll('#alerts button').length > 0")
    await page.value("document.querySelector('#alerts li:last-child button')?.click()")
    await page.shows("#detail h2", "GPU")
    await asyncio.sleep(2)


async def take_terminal(address: str, folder: Path) -> None:
    """The views of `gpustream top`."""
    fleet, seen, began_s = Fleet(), Seen(), time.monotonic()
    async with history.opened(Connection(address), [attributed.TOPIC.name, alerts.TOPIC.name]) as past:
        since_ms = int((time.time() - AFTER_S) * 1000)
        spans = await past.spans(attributed.TOPIC.name, since_ms) | await past.spans(alerts.TOPIC.name)
        reading = asyncio.create_task(command._read(past, spans, fleet, seen))
        app = TopApp(lambda: command.moment(fleet, seen, "gpustream top", began_s))
        async with app.run_test(size=(120, 34)) as pilot:
            await eventually(lambda: fleet.nodes and not any(one.status == "silent" for one in fleet.devices()))
            for name, keys in (("top", ["1"]), ("top-gpu", ["3", "enter"])):
                await pilot.press(*keys)
                await pilot.pause(1.5)
                svg = app.export_screenshot(title=f"gpustream top --kafka {address}")
                (folder / f"{name}.svg").write_text(_FETCHED_FONT.sub("", svg))
        reading.cancel()
        await asyncio.wait((reading,))


async def main(folder: Path) -> None:
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as files:
        broker.start(every_topic())
        run = (sys.executable, "-m", "gpustream", "run", "--kafka", broker.address, "--simulate", FLEET, "--story")
        more = ("--plain", "--duration", "10m", "--page-listen", "127.0.0.1:9402", "--listen", "off")
        process = await asyncio.create_subprocess_exec(*run, *more)
        try:
            await asyncio.sleep(AFTER_S)
            async with chromium(Path(files)) as browser:
                await take_page(browser, folder)
            await take_terminal(broker.address, folder)
        finally:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")))
