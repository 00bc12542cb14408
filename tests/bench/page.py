"""How fast the page is with a fleet of 20,000 GPUs, in a real Chromium: ``python -m tests.bench.page [NODES]``.

The nodes of a small simulated fleet are repeated under other names, and each has a tick a second with new values and,
now and then, new holders. No Kafka is needed: the page's server is given the ticks as it would decode them.
"""

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from producers.simulated.fleet import Fleet as SimulatedFleet
from tests.real.chromium import chromium
from tests.sinks.page.bench import Bench
from topics.attributed import AttributedSample

NODES, GPUS, PATTERNS, SECONDS = 2500, 8, 50, 10
START_MS = 1_795_219_200_000


def ticks(fleet: SimulatedFleet, second: int, nodes: int) -> list[AttributedSample]:
    """A tick of each node; those that are made are repeated with other UUIDs."""
    patterns: list[list[dict[str, object]]] = []
    for index in range(PATTERNS):
        node = fleet.node(index)
        reading = node.read(second * 1000)
        rows = zip(reading.devices, reading.reported, strict=True)
        devices = [{**device, "holders": list(holders)} for device, holders in rows]
        patterns.append(devices)
    return [_tick(patterns[index % PATTERNS], index, second) for index in range(nodes)]


def _tick(devices: list[dict[str, object]], index: int, second: int) -> AttributedSample:
    named = []
    for device in devices:
        mig = device.get("mig")
        cut = {"mig": {**mig, "parent_uuid": f"{mig['parent_uuid']}-{index}"}} if isinstance(mig, dict) else {}
        named.append({**device, "uuid": f"{device['uuid']}-{index}", **cut})
    identity = {"cluster": "bench", "node": f"node-{index:04d}", "run_id": 1, "seq": second, "offset": second}
    fields = {"schema": 1, **identity, "ts_ms": START_MS + second * 1000, "attribution": "exact", "devices": named}
    return msgspec.convert(fields, AttributedSample)


async def main(nodes: int) -> None:
    bench, fleet = Bench(), SimulatedFleet(PATTERNS, GPUS, cluster="bench", seed=1, pod_life_s=300)
    takes, beats, sizes, updates = [], [], [], []
    for tick in ticks(fleet, 1, nodes):
        bench.fleet.add_tick(tick, 1.0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with bench.serving(), chromium(Path(folder)) as browser, browser.page() as page:
            await page.open(bench.url + "/")
            painted = float(await page.wait_until("Number(document.body?.dataset.painted ?? 0)"))
            for second in range(2, 2 + SECONDS):
                second_ticks = ticks(fleet, second, nodes)
                began_s = time.perf_counter()
                for tick in second_ticks:
                    bench.fleet.add_tick(tick, float(second))
                took_s = time.perf_counter()
                bench.pages.make_frames(START_MS + second * 1000)
                beats.append(time.perf_counter() - took_s)
                takes.append(took_s - began_s)
                sizes.append(len(bench.pages._changes[""].gzip))
                await asyncio.sleep(1)
                updates.append(float(await page.value("document.body.dataset.updateMs")))
            drawn = float(await page.value("document.body.dataset.drawMs"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = {
        "first paint, from the navigation on": f"{painted:.0f} ms",
        "an update in the browser, median and worst": f"{statistics.median(updates):.0f} ms, {max(updates):.0f} ms",
        "of that, to draw": f"{drawn:.0f} ms more",
        "a frame, compressed": f"{statistics.median(sizes) / 1024:.0f} KiB",
        "to make it, for all pages that show the same metric": f"{statistics.median(beats) * 1000:.0f} ms",
        "to take the ticks of a second, decoded": f"{statistics.median(takes) * 1000:.0f} ms",
        "memory of the process, with the bench": f"{memory:.0f} MB",
    }
    devices = sum(len(node.devices) for node in bench.fleet.nodes.values())
    sys.stdout.write(f"{nodes} nodes, {devices} GPUs and MIG devices\n\n| what | figure |\n|---|---|\n")
    sys.stdout.writelines(f"| {title} | {figure} |\n" for title, figure in rows.items())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else NODES))
