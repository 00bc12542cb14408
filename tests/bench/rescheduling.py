"""How long each partition waits when a worker goes: stopped, drained, scaled in, killed, or gone with its node.

python -m tests.bench.rescheduling [MEMBERSHIP ...]

Three attribution workers share 12 partitions of a simulated fleet. A partition's wait is the longest time from when one
of its samples was logged until its record in gpu.attributed was. Every sample is counted at the end, by its identity.
"""

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from delivery import topic_admin
from tests.real.pipeline import Gpustream, Tick, records_of
from tests.real.servers import KafkaServer

PARTITIONS = 12
WORKERS = 3
IN_PLACE_S = 1.0
"""From a pod's end to its next process, where a container is started again on its node, with its image there."""
ELSEWHERE_S = 20.0
"""The same where the pod is put on another node: it is scheduled, and the image is pulled."""
SETTLED_S = 5.0

MEMBERSHIPS: dict[str, tuple[float, bool, bool]] = {
    "leaves, 10 s": (10, True, True),
    "leaves, 30 s": (30, True, True),
    "no instance id, 10 s": (10, False, True),
    "stays, 10 s": (10, True, False),
    "stays, 30 s": (30, True, False),
    "stays, 60 s": (60, True, False),
}
"""The session timeout, whether there are instance ids, and whether a worker that is stopped leaves."""


class Identity(msgspec.Struct):
    """Which tick a record is of."""

    cluster: str
    node: str
    run_id: int
    seq: int

    def tick(self) -> Tick:
        """To be compared."""
        return self.cluster, self.node, self.run_id, self.seq


class Event(NamedTuple):
    """What was done to the workers, from when until when, in ms since the epoch."""

    name: str
    from_ms: float
    to_ms: float


def main(memberships: Sequence[str]) -> None:
    """Prints a row for each event under each membership."""
    sys.stdout.write("| membership | event | partitions that waited > 1 s | median s | longest s | all together s |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for membership in memberships or MEMBERSHIPS:
        with ExitStack() as servers:
            directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
            kafka = servers.enter_context(KafkaServer(directory / "kafka"))
            asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
            at = ("--kafka", kafka.address)
            ticks = ("--fleet", "48x1", "--interval", "500ms")
            fleet = Gpustream(directory / "fleet", "produce", "simulated", *at, *ticks)
            servers.callback(fleet.close)
            workers = [Gpustream(directory / f"w{n}", *worker(membership, n, *at)) for n in range(WORKERS)]
            for one in workers:
                servers.callback(one.close)
                one.begin()
            for one in workers:
                one.start()
            fleet.start()
            time.sleep(SETTLED_S)
            events = go_through(workers, MEMBERSHIPS[membership][0])
            fleet.stop()
            time.sleep(SETTLED_S)
            for one in workers:
                one.stop()
            asyncio.run(report(membership, kafka.address, events))


def worker(membership: str, number: int, *at: str) -> list[str]:
    """The command of a worker."""
    timeout_s, static, leaves = MEMBERSHIPS[membership]
    more = ["--instance-id", f"attribution-{number}"] if static else []
    more += ["--leave-on-stop"] if static and leaves else []
    return ["stream", "attribution", *at, "--session-timeout", f"{timeout_s:.0f}s", *more]


def go_through(workers: Sequence[Gpustream], timeout_s: float) -> list[Event]:
    """Do to the workers what a cluster does, one after the other."""
    last, events = workers[-1], []

    def event(name: str, *steps: Callable[[], object]) -> None:
        from_ms = time.time() * 1000
        for step in steps:
            step()
        time.sleep(SETTLED_S)
        events.append(Event(name, from_ms, time.time() * 1000))

    def wait(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds)

    rolled = [step for one in reversed(workers) for step in (one.stop, wait(IN_PLACE_S), one.start, wait(3.0))]
    event("rolling restart of all", *rolled)
    event(f"drained, back after {ELSEWHERE_S:.0f} s", last.stop, wait(ELSEWHERE_S), last.start)
    event("killed, back at once", last.kill9, wait(IN_PLACE_S), last.start)
    event("scaled in", last.stop, wait(timeout_s))
    event("scaled out", last.start)
    event("its node is gone", last.kill9, wait(timeout_s))
    return events


async def report(membership: str, kafka: str, events: Sequence[Event]) -> None:
    """Print how long partitions waited in each event, and count the samples."""
    decode = msgspec.json.Decoder(Identity).decode
    logged = {
        decode(record.value).tick(): (record.partition, record.timestamp)
        async for record in records_of(kafka, "gpu.samples")
    }
    attributed: dict[Tick, int] = {}
    records = 0
    async for record in records_of(kafka, "gpu.attributed"):
        attributed.setdefault(decode(record.value).tick(), record.timestamp)
        records += 1
    for event in events:
        longest: dict[int, float] = defaultdict(float)
        for tick, (partition, at_ms) in logged.items():
            if event.from_ms - 1000 <= at_ms <= event.to_ms - 2000 and tick in attributed:
                longest[partition] = max(longest[partition], (attributed[tick] - at_ms) / 1000)
        waits = [wait for wait in longest.values() if wait > 1.0]
        middle = f"{median(waits):.1f}" if waits else "-"
        row = (membership, event.name, f"{len(waits)} of {PARTITIONS}", middle, f"{max(longest.values()):.1f}")
        sys.stdout.write(f"| {' | '.join(row)} | {sum(waits):.0f} |\n")
    lost, twice = len(logged.keys() - attributed.keys()), records - len(attributed)
    sys.stdout.write(f"\n{membership}: {len(logged)} samples, {lost} lost, {twice} records twice\n\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
