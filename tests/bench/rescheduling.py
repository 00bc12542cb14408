"""How long each partition waits when a worker goes: stopped, drained, scaled in, killed, or gone with its node.

python -m tests.bench.rescheduling [--sink] [MEMBERSHIP ...]

Three workers share 12 partitions of a simulated fleet: of attribution, or remote-write sinks into Prometheus. A
partition's wait is the longest time from when one of its samples was logged until its record in gpu.attributed was; for
the sinks, from when that was logged until it was committed. Every sample is counted at the end, by its identity.
"""

import asyncio
import contextlib
import math
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition

from delivery import topic_admin
from tests.real.pipeline import Gpustream, Tick, Truth, records_of, stored
from tests.real.servers import KafkaServer, PrometheusServer

PARTITIONS = 12
WORKERS = 3
IN_PLACE_S = 1.0
"""From a pod's end to its next process, when a container is started again on its node, with its image there."""
ELSEWHERE_S = 20.0
"""The same when the pod is put on another node: it is scheduled, and the image is pulled."""
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


class Wait(NamedTuple):
    """How long a record of a partition waited that was logged at a time, in ms."""

    partition: int
    at_ms: float
    ms: float


class Event(NamedTuple):
    """What was done to the workers, from when until when, in ms since the epoch."""

    name: str
    from_ms: float
    to_ms: float


def main(sink: bool, memberships: Sequence[str]) -> None:
    """Prints a row for each event under each membership."""
    sys.stdout.write("| membership | event | partitions that waited > 1 s | median s | longest s | all together s |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for membership in memberships or MEMBERSHIPS:
        with ExitStack() as servers:
            directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
            kafka = servers.enter_context(KafkaServer(directory / "kafka"))
            asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
            options, attribution = ("--kafka", kafka.address), ["stream", "attribution"]
            prometheus = servers.enter_context(PrometheusServer(directory / "prometheus")) if sink else None
            command = ["sink", "remote-write", "--url", prometheus.write_url] if prometheus else attribution
            truth = directory / "truth"
            ticks = ("--fleet", "48x1", "--interval", "500ms", "--truth", str(truth))
            fleet = Gpustream(directory / "fleet", "produce", "simulated", *options, *ticks)
            others = [Gpustream(directory / "attribution", *attribution, *options)] if sink else []
            workers = [
                Gpustream(directory / f"w{n}", *command, *options, *membership_of(membership, n))
                for n in range(WORKERS)
            ]
            for process in (fleet, *others, *workers):
                servers.callback(process.close)
            for process in (*others, *workers):
                process.begin()
            for process in (*others, *workers, fleet):
                process.start()
            watch = servers.enter_context(Commits(kafka)) if sink else None
            time.sleep(SETTLED_S)
            events = go_through(workers, MEMBERSHIPS[membership][0])
            fleet.stop()
            time.sleep(SETTLED_S)
            for process in workers:
                process.stop()
            waits = asyncio.run(watch.waits(kafka.address) if watch else attributed(membership, kafka.address))
            report(membership, waits, events)
            if prometheus:
                expected = Truth.read(truth).points("memory_used_bytes").keys()
                stored_values = stored(prometheus, "gpu_memory_used", "default", "30m").keys()
                sys.stdout.write(
                    f"\n{membership}: {len(expected)} values, {len(expected - stored_values)} not in Prometheus\n\n"
                )
            sys.stdout.flush()


def membership_of(membership: str, number: int) -> list[str]:
    """The options of a worker."""
    timeout_s, static, leaves = MEMBERSHIPS[membership]
    more = ["--instance-id", f"worker-{number}"] if static else []
    more += ["--leave-on-stop"] if static and leaves else []
    return ["--session-timeout", f"{timeout_s:.0f}s", *more]


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

    rolled = [step for worker in reversed(workers) for step in (worker.stop, wait(IN_PLACE_S), worker.start, wait(3.0))]
    event("rolling restart of all", *rolled)
    event(f"drained, back after {ELSEWHERE_S:.0f} s", last.stop, wait(ELSEWHERE_S), last.start)
    event("killed, back at once", last.kill9, wait(IN_PLACE_S), last.start)
    event("scaled in", last.stop, wait(timeout_s))
    event("scaled out", last.start)
    event("its node is gone", last.kill9, wait(timeout_s))
    return events


class Commits:
    """What the sinks' group has committed, looked at five times a second."""

    def __init__(self, kafka: KafkaServer) -> None:
        group = {"bootstrap.servers": kafka.address, "group.id": "gpustream-sink-remote-write"}
        self._consumer, self._over = Consumer(group), threading.Event()  # it asks, and joins nothing
        self._committed: list[tuple[float, dict[int, int]]] = []
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Commits":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def _look(self) -> None:
        tps = [TopicPartition("gpu.attributed", number) for number in range(PARTITIONS)]
        while not self._over.wait(0.2):
            with contextlib.suppress(KafkaException):  # a broker that has just begun may not know its groups yet
                committed = self._consumer.committed(tps, timeout=10)
                self._committed.append((time.time() * 1000, {tp.partition: tp.offset for tp in committed}))

    async def waits(self, kafka: str) -> list[Wait]:
        """How long each record was not committed."""
        waits = []
        async for record in records_of(kafka, "gpu.attributed"):
            at_ms = next(
                (seen_ms for seen_ms, offsets in self._committed if offsets[record.partition] > record.offset), math.inf
            )
            waits.append(Wait(record.partition, record.timestamp, at_ms - record.timestamp))
        return waits


async def attributed(membership: str, kafka: str) -> list[Wait]:
    """How long each sample was not in gpu.attributed. Prints how many are lost, or there twice."""
    decode = msgspec.json.Decoder(Identity).decode
    logged = {
        decode(record.value).tick(): (record.partition, record.timestamp)
        async for record in records_of(kafka, "gpu.samples")
    }
    logged_again: dict[Tick, int] = {}
    records = 0
    async for record in records_of(kafka, "gpu.attributed"):
        logged_again.setdefault(decode(record.value).tick(), record.timestamp)
        records += 1
    lost, twice = len(logged.keys() - logged_again.keys()), records - len(logged_again)
    sys.stdout.write(f"\n{membership}: {len(logged)} samples, {lost} lost, {twice} records twice\n\n")
    return [Wait(*logged[tick], at_ms - logged[tick][1]) for tick, at_ms in logged_again.items()]


def report(membership: str, waits: Sequence[Wait], events: Sequence[Event]) -> None:
    """Print how long partitions waited in each event."""
    for event in events:
        longest: dict[int, float] = defaultdict(float)
        for wait in waits:
            if event.from_ms - 1000 <= wait.at_ms <= event.to_ms - 2000:
                longest[wait.partition] = max(longest[wait.partition], wait.ms / 1000)
        long = [wait_s for wait_s in longest.values() if wait_s > 1.0]
        middle = f"{median(long):.1f}" if long else "-"
        row = (membership, event.name, f"{len(long)} of {PARTITIONS}", middle, f"{max(longest.values()):.1f}")
        sys.stdout.write(f"| {' | '.join(row)} | {sum(long):.0f} |\n")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main("--sink" in arguments, [argument for argument in arguments if argument != "--sink"])
