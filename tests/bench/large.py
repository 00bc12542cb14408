"""10,000 nodes of 8 GPUs at once, each with a tick a minute, through every component: whether they keep up, and what
each takes.

    python -m tests.bench.large [--write]

One process of each component, Apache Kafka with 32 partitions a topic, and a receiver that only counts are on this
machine; so is the load, which replays records of a simulated fleet, with processes and shared GPUs. First each
component sees every node, which costs it the most. Then all that was logged is read, and the figures are of the minutes
after that. NODES=2000 in the environment: a smaller fleet.

Memory is the resident set. CPU is user and system time, all threads. How late a loop is, is what the component's own
metrics say.
"""

import asyncio
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from delivery import topic_admin
from delivery.connection import Connection
from tests.bench.aims import Figure, report
from tests.bench.attribution import cpu_s
from tests.bench.load import Replay, fleet
from tests.bench.node import memory_bytes
from tests.bench.remote_write import null_receiver
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer

NODES, PARTITIONS, INTERVAL_S = int(os.environ.get("NODES", "10000")), 32, 60.0
MEASURE_S, CATCH_UP_S = 180, 1800
LAST = Path(__file__).with_suffix(".json")

IN_FILES = "Parquet"
"""It finishes records when it writes a file, every few minutes: its lag is no backlog."""

COMPONENTS: dict[str, tuple[str, ...]] = {
    "attribution": ("stream", "attribution"),
    "alerts": ("stream", "alerts"),
    "usage": ("stream", "usage"),
    "remote write": ("sink", "remote-write", "--from", "earliest"),
    "scrape": ("sink", "scrape"),
    "page": ("sink", "page", "--page-listen", "127.0.0.1:0"),
    IN_FILES: ("sink", "parquet"),
    "metrics API": ("sink", "metrics-api", "--metrics-listen", "127.0.0.1:0"),
}
_LAG = re.compile(r"^gpustream_\w+_lag_records(?:{.*})? (.*)", re.MULTILINE)
_LATE = re.compile(r"^gpustream_\w+_loop_late_seconds (.*)", re.MULTILINE)


def lag(process: Gpustream) -> float:
    """How many records a component has not finished, of all topics; infinity if it does not say."""
    lags = _LAG.findall(process.get("/metrics") or "")
    return sum(map(float, lags)) if lags or process.ready() else float("inf")


def catch_up(processes: dict[str, Gpustream]) -> float:
    """Waits until every component has all that was logged, but for what comes in a second; returns how long."""
    began_s, readers = time.monotonic(), {name: of for name, of in processes.items() if name != IN_FILES}
    behind = list(readers)
    while behind:
        behind = [name for name, reader in readers.items() if lag(reader) > NODES / INTERVAL_S]
        if time.monotonic() - began_s > CATCH_UP_S:
            raise TimeoutError(f"{', '.join(behind)}: still behind after {CATCH_UP_S} s")
        time.sleep(1)
    return time.monotonic() - began_s


def figures() -> Iterator[Figure]:
    """All rows, in the order of the table."""
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        kafka = running.enter_context(KafkaServer(folder / "kafka", heap="1g"))
        url = running.enter_context(null_receiver())
        asyncio.run(topic_admin.create(Connection(kafka.address), partitions=PARTITIONS, replication_factor=1))
        (folder / "files").mkdir()
        more = {"remote write": ("--url", url), IN_FILES: ("--path", str(folder / "files"))}
        processes = {
            name: running.enter_context(
                Gpustream(folder / name, *command, "--kafka", kafka.address, *more.get(name, ()))
            )
            for name, command in COMPONENTS.items()
        }
        replay, stop = Replay(kafka.address, "", asyncio.run(fleet(NODES, interval_s=INTERVAL_S))), threading.Event()
        load = threading.Thread(target=replay.steadily, args=(stop, INTERVAL_S))
        load.start()
        running.callback(load.join)
        running.callback(stop.set)
        time.sleep(2 * INTERVAL_S)
        yield Figure("until all is read", 2 * INTERVAL_S + catch_up(processes), "s")
        before_s, late_s = (
            {name: cpu_s(process.pid) for name, process in processes.items()},
            dict.fromkeys(processes, 0.0),
        )
        began_s = time.monotonic()
        while time.monotonic() - began_s < MEASURE_S:
            time.sleep(1)
            for name, process in processes.items():
                late_s[name] = max([late_s[name], *map(float, _LATE.findall(process.get("/metrics") or ""))])
        took_s = time.monotonic() - began_s
        for name, process in processes.items():
            yield Figure(f"{name}, memory", memory_bytes(process.pid)["Rss"] / 1e6, "MB")
            yield Figure(f"{name}, CPU", (cpu_s(process.pid) - before_s[name]) / took_s, "cores")
            if late_s[name]:
                yield Figure(f"{name}, loop late", late_s[name], "s", 1.0)
            if name != IN_FILES:
                yield Figure(f"{name}, lag", lag(process), "records")


if __name__ == "__main__":
    report(figures(), LAST, write="--write" in sys.argv)
