"""Whether a tick costs the same for 100 nodes and 10,000, for one worker and two, and how fast an hour is made up for.

    python -m tests.bench.growth [--write]

The logs are of a fleet of 8 whole GPUs a node, with processes and shared GPUs. Each node's first ticks are not counted:
they make what is kept of a node. All others are written at once, at least 12 of each node: with fewer, what a process
does once in a while counts more. CPU is user and system time of each process, all threads.

Catching up: on 500 nodes' ticks of an hour, the attribution stream first and then remote write, to a receiver that only
counts; with MINUTES=5 in the environment, of five minutes. The figure is how many times faster than real time one core
is.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.bench.aims import PER_TICK, Figure, report
from tests.bench.attribution import cpu_s
from tests.bench.live import GROUPS, Pipeline
from tests.bench.load import WARM, Replay, fleet
from tests.bench.remote_write import null_receiver
from tests.real.servers import KafkaServer

SIZES = (100, 300, 1000, 3000, 10_000)
TICKS, ROUNDS = 60_000, 12
WORKERS, SHARED_NODES = (1, 2), 1000
LATE_NODES = 500
MINUTES = int(os.environ.get("MINUTES", "60"))
LAST = Path(__file__).with_suffix(".json")


def cost(kafka: KafkaServer, url: str, nodes: int, ticks: int, workers: int = 1) -> tuple[float, float]:
    """CPU us a tick of attribution, all workers together, and of remote write, after each node's first ticks."""
    prefix, rounds = f"{nodes}-{ticks}-{workers}.", WARM + max(ROUNDS, ticks // nodes)
    with ExitStack() as running:
        pipeline = Pipeline(running, kafka, prefix, url, workers)
        replay = Replay(kafka.address, prefix, asyncio.run(fleet(nodes)))
        replay.ticks(range(1, WARM + 1), rounds)
        pipeline.finish()
        before_s = pipeline.cpu_s()
        replay.ticks(range(WARM + 1, rounds + 1), rounds)
        pipeline.finish()
        spent_s = zip(before_s, pipeline.cpu_s(), strict=True)
        join_us, write_us = ((after - before) / nodes / (rounds - WARM) * 1e6 for before, after in spent_s)
        return join_us, write_us


def late(kafka: KafkaServer, url: str, seconds: int) -> Iterator[Figure]:
    """How fast each process reads what has been written while it was away."""
    with ExitStack() as running:
        pipeline = Pipeline(running, kafka, "late.", url)
        for process in pipeline.processes.values():
            process.stop()
        Replay(kafka.address, "late.", asyncio.run(fleet(LATE_NODES))).ticks(range(1, seconds + 1), seconds)
        for name, process in zip(GROUPS, pipeline.processes.values(), strict=True):
            process.start()
            pipeline.finish([name])
            times = seconds / cpu_s(process.pid)
            yield Figure(f"catching up, {name}", times, "x real time on a core", 5, more=True)
            process.stop()


def figures() -> Iterator[Figure]:
    """All rows, in the order of the table."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka", heap="1g"))
        url = servers.enter_context(null_receiver())
        for nodes in SIZES:
            join_us, write_us = cost(kafka, url, nodes, TICKS)
            yield Figure(f"attribution, {nodes} nodes", join_us, PER_TICK)
            yield Figure(f"remote write, {nodes} nodes", write_us, PER_TICK)
        for workers in WORKERS:
            join_us, _ = cost(kafka, url, SHARED_NODES, 2 * TICKS, workers)
            yield Figure(f"attribution, {workers} workers", join_us, PER_TICK)
        yield from late(kafka, url, MINUTES * 60)


if __name__ == "__main__":
    report(figures(), LAST, write="--write" in sys.argv)
