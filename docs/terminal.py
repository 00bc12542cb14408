"""Pictures of ``gpustream top``, from the running program: ``python -m docs.terminal FOLDER``.

It runs the fleet of ``make demo`` for its first minute and looks at it as ``gpustream top`` does. In the folder there
are then ``terminal-fleet.svg``, ``terminal-gpus.svg`` and ``terminal-gpu.svg``.
"""

import asyncio
import re
import sys
from pathlib import Path

from delivery.connection import Connection
from gpustream.embedded import PARTITIONS, EmbeddedBroker
from gpustream.top.app import TopApp
from gpustream.top.command import followed
from topics import TOPICS

SIZE = (110, 30)
AFTER_S = 52
"""When all of the story has happened, and the lost GPU is still away."""

PICTURES = {"fleet": ["1"], "gpus": ["3"], "gpu": ["3", "home", "enter"]}
"""The pictures, and the keys that lead to each."""

FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)


async def main(folder: Path) -> None:
    """Makes the pictures."""
    with EmbeddedBroker() as broker:
        broker.start(dict.fromkeys(TOPICS, PARTITIONS))
        run = ["run", "--kafka", broker.address, "--simulate", "4x8", "--story", "--plain", "--listen", "off"]
        options = ["--scrape-listen", "127.0.0.1:0", "--page-listen", "off", "--duration", f"{AFTER_S + 20}s"]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gpustream", *run, *options)
        try:
            async with followed(Connection(broker.address), AFTER_S, "team") as (now, _):
                await asyncio.sleep(AFTER_S)
                app = TopApp(now)
                async with app.run_test(size=SIZE) as pilot:
                    for name, keys in PICTURES.items():
                        await pilot.press(*keys)
                        await pilot.pause(0.2)
                        drawn = FONTS.sub("", app.export_screenshot(title="gpustream top"))
                        (folder / f"terminal-{name}.svg").write_text(drawn)
        finally:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
