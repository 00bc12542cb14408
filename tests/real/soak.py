"""A pipeline under faults, and the exact count of what became of every sample.

A :class:`Pipeline` is all of it, process by process: fleets, workers of attribution and usage, and sinks, half of them
with instance ids, between real brokers and a Prometheus behind a :class:`~tests.real.proxy.FaultyReceiver`. What ends
is started again, as Kubernetes would. :func:`soak` does to it, round after round, what the table of
:mod:`tests.real.faults` has. Then :func:`count` compares the truth with Kafka and Prometheus by identity, and
:func:`count_usage` compares gpu.usage with integer sums over gpu.attributed.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from delivery import topic_admin
from delivery.connection import Connection
from tests.eventually import eventually
from tests.real.accounting import books, unaccounted
from tests.real.pipeline import Gpustream, Tick, Truth, differences, lag, records_of, sender_to, stored, usage_of
from tests.real.proxy import FaultyReceiver
from tests.real.resolver import Resolver
from tests.real.servers import KafkaServer, PrometheusServer
from tests.usage_sums import UsageSums
from topics.topic import node_key
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

CLUSTER, SKEWED = "soak", "skewed"
NODES, GPUS = 24, 4
PARTITIONS = 6
WHOLE_S = 900.0
"""How long a round may take until all is well again, on a machine that is busy with other things."""

DRAIN_S = 900.0
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
POISON_KEY = b"soak/poison"
POISON_EVERY_S = 4.0
VALUES = (("gpu_memory_used", "memory_used_bytes"), ("gpu_utilization", "utilization_ratio"))
POISONS = (b"", b"{", b'{"schema":1}', b"\xff\xfe", b"null", b'{"schema":1,"cluster":"soak","node":"","run_id":1}')

RecordPlace = tuple[str, int, int]
"""A record's topic, partition and offset."""


Part = Literal["workers", "sinks", "usage", "producers", "brokers", "receiver", "clocks"]
Strike = Callable[["Pipeline", random.Random], Awaitable[float]]


class Fault(NamedTuple):
    """A row. ``back_s`` is the promised time until every node is in Prometheus again, if nothing else fails."""

    name: str
    part: Part
    strike: Strike
    back_s: float | None = None


class Needs(NamedTuple):
    """The resources that a process used at a time."""

    at_s: float
    memory_mib: float
    descriptors: int


def needs(pid: int) -> Needs:
    """The resources that a process uses now. Raises OSError if it has ended."""
    proc = Path(f"/proc/{pid}")
    memory_mib = int((proc / "statm").read_text().split()[1]) * PAGE_MIB
    return Needs(time.time(), memory_mib, len(list((proc / "fd").iterdir())))


class Round(NamedTuple):
    """The faults at one time, and how long after the last was undone every node was in Prometheus again."""

    faults: tuple[Fault, ...]
    back_s: float


@dataclass
class Pipeline:
    """Everything between some nodes and Prometheus. ``at``: the options with which its processes reach the brokers."""

    brokers: Sequence[KafkaServer]
    at: Sequence[str]
    prometheus: PrometheusServer
    make: Callable[..., Gpustream]
    folder: Path
    nodes: int = NODES
    gpus: int = GPUS
    receiver: FaultyReceiver = field(init=False)
    wanted: list[Gpustream] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    poisoned: set[RecordPlace] = field(default_factory=set)
    lives: dict[tuple[str, int], list[Needs]] = field(default_factory=dict)
    quiet: list[tuple[float, float]] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.receiver = FaultyReceiver(self.prometheus.write_url)
        self.resolver = Resolver(self.folder)
        self.truth, self.skewed_truth = self.folder / "truth.jsonl", self.folder / "skewed.jsonl"
        self.shift = self.folder / "shift"
        self.set_clock(0)
        self.fleet = self._fleet("fleet", CLUSTER, f"{self.nodes}x{self.gpus}", self.truth, "--seed", "1")
        self.skewed = self._fleet("skewed", SKEWED, "2x1", self.skewed_truth, "--seed", "2")
        self.skewed.python = [str(Path(__file__).parent / "skewed_clock.py"), str(self.shift)]
        stream, sink = ("stream", "attribution"), ("sink", "remote-write", "--url", self.receiver.url)
        self.workers = [self._member(f"worker-{number}", *stream, fixed=number % 2 == 0) for number in range(4)]
        self.sinks = [self._member(f"sink-{number}", *sink, fixed=number % 2 == 0) for number in range(2)]
        self.usage = [self._member(f"usage-{number}", "stream", "usage", fixed=number % 2 == 0) for number in range(3)]

    @property
    def kafka(self) -> str:
        """The bootstrap servers, for clients of the test."""
        return ",".join(broker.address for broker in self.brokers)

    def _fleet(self, name: str, cluster: str, size: str, truth: Path, *options: str) -> Gpustream:
        named = ("--cluster", cluster, "--fleet", size, "--truth", str(truth), "--pod-life", "1m")
        return self._process(name, "produce", "simulated", *named, *options)

    def _member(self, name: str, *arguments: str, fixed: bool) -> Gpustream:
        return self._process(name, *arguments, *(("--instance-id", name) if fixed else ()))

    def _process(self, name: str, *arguments: str) -> Gpustream:
        return self.make(name, *arguments, *self.at, environment=self.resolver.environment)

    def set_clock(self, by_s: float) -> None:
        """Let the clock of the nodes of the cluster ``skewed`` be wrong by so many seconds."""
        new = self.shift.with_suffix(".new")
        new.write_text(f"{by_s}")
        new.replace(self.shift)  # at once: a file that is being written is empty for a moment

    # -- life

    async def supervise(self) -> None:
        """Start again every wanted process that has ended; for ever."""
        while True:
            for process in self.wanted:
                if not process.running:
                    self.launches[process.name] += 1
                    await asyncio.to_thread(process.begin)
            await asyncio.sleep(0.1)

    async def want(self, *processes: Gpustream) -> None:
        """Run these processes and no others; the others are stopped in good order."""
        to_stop, self.wanted = [process for process in self.wanted if process not in processes], list(processes)
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in to_stop))

    async def poison(self) -> None:
        """Now and then write a malformed record to each input; for ever."""
        chance = random.Random(5)
        async with sender_to(Connection(self.kafka)) as sender:
            while True:
                topic, partition = chance.choice(["gpu.samples", "gpu.allocations"]), chance.randrange(PARTITIONS)
                future = await sender.send(topic, chance.choice(POISONS), key=POISON_KEY, partition=partition)
                self.poisoned.add((topic, partition, await future))
                await asyncio.sleep(POISON_EVERY_S)

    async def watch(self) -> None:
        """Every few seconds record the resources of every process, and whether its records add up; for ever."""
        while True:
            for process in [wanted_process for wanted_process in self.wanted if wanted_process.running]:
                with contextlib.suppress(OSError):  # it has just ended
                    self.lives.setdefault((process.name, process.pid), []).append(needs(process.pid))
                metrics = await asyncio.to_thread(process.get, "/metrics")
                self.unaccounted += [f"{process.name}: {entry}" for entry in unaccounted(books(metrics or ""))]
            await asyncio.sleep(5)

    async def wait_until_healthy(self, since_s: float) -> None:
        """Wait until Prometheus has a tick of every node that was read since then."""

        def behind() -> list[str]:
            newest = self.receiver.newest_ms
            nodes = [f"{CLUSTER}/sim-{number:04}" for number in range(self.nodes)]
            return [node for node in nodes if newest.get(node, 0) < since_s * 1000]

        try:
            await eventually(lambda: not behind(), within_s=WHOLE_S, every_s=0.05)
        except AssertionError:
            states = {process.name: process.get("/readyz") or "not ready" for process in self.wanted}
            raise AssertionError(f"still without news in Prometheus: {behind()}; {states}") from None

    async def drain(self) -> None:
        """Stop sampling, and wait until both groups have committed all there is."""
        await self.want(*(process for process in self.wanted if process not in (self.fleet, self.skewed)))

        async def all_read() -> bool:
            lag_records = await lag(self.kafka, "gpustream-attribution", ["gpu.samples"])
            return lag_records + await lag(self.kafka, "gpustream-sink-remote-write", ["gpu.attributed"]) == 0

        await eventually(all_read, "both groups have committed all there is", within_s=DRAIN_S, every_s=1)

    # -- what it was like

    def latencies_s(self) -> list[float]:
        """From each reading to its accepted write, while nothing failed."""
        return [
            (accepted_request.at_ms - accepted_request.ts_ms) / 1000
            for accepted_request in self.receiver.accepted
            if accepted_request.node.startswith(f"{CLUSTER}/")
            and any(
                begin_s * 1000 <= accepted_request.ts_ms and accepted_request.at_ms <= end_s * 1000
                for begin_s, end_s in self.quiet
            )
        ]

    def alone_s(self, *, min_times: int = 1) -> dict[Fault, float]:
        """How long each fault took to be overcome when it came alone, if that often: the median, in seconds."""
        times: dict[Fault, list[float]] = {}
        for done in self.rounds:
            if len(done.faults) == 1:
                times.setdefault(done.faults[0], []).append(done.back_s)
        return {fault: statistics.median(seconds) for fault, seconds in times.items() if len(seconds) >= min_times}

    def lifetimes(self) -> dict[str, str]:
        """The resources of the longest life of each process, after its first two minutes: the most, and the growth."""
        summary = {}
        for (name, _), life in sorted(self.lives.items(), key=lambda item: len(item[1])):
            settled = [sample for sample in life if sample.at_s >= life[0].at_s + 120]
            if len(settled) >= 12:
                times = [sample.at_s / 3600 for sample in settled]
                memory, descriptors = (
                    [sample.memory_mib for sample in settled],
                    [sample.descriptors for sample in settled],
                )
                grew = [statistics.linear_regression(times, values).slope for values in (memory, descriptors)]
                summary[name] = (
                    f"{(life[-1].at_s - life[0].at_s) / 60:.0f} minutes, at most {max(memory):.0f} MiB and "
                    f"{max(descriptors)} descriptors, {grew[0]:+.0f} MiB and {grew[1]:+.1f} descriptors an hour"
                )
        return summary


def secured(brokers: Sequence[KafkaServer], ca: Path, folder: Path) -> list[str]:
    """How the processes of a pipeline reach the brokers: by TLS and a login, as a user that may do everything."""
    broker, password = brokers[0], folder / "password"
    password.write_text("Soak-Passw0rd")
    broker.add_user("soak", password.read_text())
    for resource in ("TOPIC", "GROUP"):
        broker.allow("soak", "ALL", resource, "*")
    servers = ",".join(broker.sasl_ssl for broker in brokers)
    login = ("--kafka-sasl-mechanism", "scram-sha-512", "--kafka-username", "soak")
    security = ("--kafka-security", "sasl-ssl", "--kafka-ca", str(ca), "--kafka-password-file", str(password))
    return ["--kafka", servers, *security, *login]


@asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[None]:
    """Runs the pipeline while inside, with two workers."""
    connection, replicas = Connection(pipeline.kafka), len(pipeline.brokers)
    await topic_admin.create(connection, partitions=PARTITIONS, replication_factor=replicas)
    pipeline.wanted = [pipeline.fleet, pipeline.skewed, *pipeline.workers[:2], *pipeline.sinks, *pipeline.usage[:2]]
    beside = [asyncio.create_task(part()) for part in (pipeline.supervise, pipeline.watch)]
    try:
        await pipeline.wait_until_healthy(time.time())
        yield
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await pipeline.want()
        pipeline.receiver.close()


async def soak(
    pipeline: Pipeline, faults: Sequence[Fault], *, seed: int, duration_s: float, at_once: Sequence[int]
) -> None:
    """Round after round until the time is over, so many faults at once, each in another part of the pipeline.

    Every fault has its turn before any comes again.
    """
    chance = random.Random(seed)
    ends_s, poison = time.monotonic() + duration_s, asyncio.create_task(pipeline.poison())
    deck: list[Fault] = []
    while time.monotonic() < ends_s:
        if not deck:
            deck = chance.sample(list(faults), len(faults))
        fault_count, hand = chance.choice(at_once), dict[str, Fault]()
        for fault in deck:
            if len(hand) < fault_count:
                hand.setdefault(fault.part, fault)
        deck = [fault for fault in deck if fault not in hand.values()]
        undone_s = max(await asyncio.gather(*(fault.strike(pipeline, chance) for fault in hand.values())))
        await pipeline.wait_until_healthy(undone_s)
        finished = Round(tuple(hand.values()), time.time() - undone_s)
        pipeline.rounds.append(finished)
        say(f"{' + '.join(fault.name for fault in finished.faults)}: back after {finished.back_s:.1f} s")
        assert not poison.done(), f"nothing is poisoned any more: {poison}"
        await pause(pipeline, 2 + 4 * chance.random())
    poison.cancel()
    await asyncio.gather(poison, return_exceptions=True)


def say(line: str) -> None:
    """Write a line to the terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def pause(pipeline: Pipeline, for_s: float) -> None:
    """Leave the pipeline alone for a while; this shows how it works without faults."""
    began_s = time.time()
    await asyncio.sleep(for_s)
    pipeline.quiet.append((began_s, time.time()))


# -- the count


@dataclass
class Count:
    """The outcome of every sample, by identity. ``wrong`` has a line for every error."""

    sampled: int = 0
    killed: int = 0
    twice: int = 0
    points: int = 0
    wrong: list[str] = field(default_factory=list)


async def count(pipeline: Pipeline) -> Count:
    """Compare the truth with both topics, the dead letters and Prometheus."""
    counted, kafka = Count(wrong=list(pipeline.unaccounted)), pipeline.kafka
    sent_ticks = Counter([tick async for tick in ticks_of(kafka, "gpu.samples")])
    attributed: Counter[Tick] = Counter()
    newest: dict[tuple[str, str, int], int] = {}
    async for tick in ticks_of(kafka, "gpu.attributed"):
        run, seq = tick[:3], tick[3]
        if tick not in attributed and seq < newest.get(run, 0):
            counted.wrong.append(f"{tick} was attributed after {newest[run]}")
        newest[run] = max(seq, newest.get(run, 0))
        attributed[tick] += 1
    counted.wrong += [f"{tick} is in gpu.samples {times} times" for tick, times in sent_ticks.items() if times > 1]
    counted.wrong += [f"{tick} was not attributed" for tick in sent_ticks.keys() - attributed.keys()]
    counted.wrong += [f"{tick} was attributed, and never sent" for tick in attributed.keys() - sent_ticks.keys()]
    counted.twice = attributed.total() - len(attributed)
    letters = {origin_of(record.headers) async for record in records_of(kafka, "gpu.dead-letters") if not ahead(record)}
    poisoned = {
        (topic, record.partition, record.offset)
        for topic in ("gpu.samples", "gpu.allocations")
        async for record in records_of(kafka, topic)
        if record.key == POISON_KEY
    }
    counted.wrong += [f"{offset} was acknowledged, and is not there" for offset in pipeline.poisoned - poisoned]
    counted.wrong += [f"{origin} is no record, and no dead letter" for origin in poisoned - letters]
    counted.wrong += [f"{letter} is a dead letter" for letter in letters - poisoned]
    for cluster, file in ((CLUSTER, pipeline.truth), (SKEWED, pipeline.skewed_truth)):
        truth = await asyncio.to_thread(Truth.read, file)
        lost_ticks = truth.ticks - sent_ticks.keys()
        counted.sampled += len(truth.ticks)
        counted.killed += len(lost_ticks)
        counted.wrong += in_the_middle(truth.ticks, lost_ticks)
        await compare(pipeline, cluster, truth, lost_ticks, counted)
    return counted


async def compare(pipeline: Pipeline, cluster: str, truth: Truth, lost_ticks: set[Tick], counted: Count) -> None:
    """What Prometheus has, against the truth without the ticks that were lost before Kafka.

    Of the cluster whose clock was wrong nothing may be wrong; but what its clock made unacceptable may be missing.
    """
    began_s = min(begin_s for begin_s, _ in pipeline.quiet)
    window = f"{int(time.time() - began_s) + 3600}s"
    for metric, value in VALUES:
        actual = await asyncio.to_thread(stored, pipeline.prometheus, metric, cluster, window)
        expected = {
            point: expected_value
            for point, expected_value in truth.points(value).items()
            if truth.of_tick[point] not in lost_ticks
        }
        differing = differences(expected, actual, value)
        counted.points += len(actual)
        counted.wrong += [
            f"{metric}: {difference}"
            for difference in differing
            if cluster == CLUSTER or not difference.startswith("missing")
        ]


def in_the_middle(sampled: set[Tick], lost_ticks: set[Tick]) -> list[str]:
    """The lost ticks that are not the end of a run: a producer that is killed loses what Kafka had not yet, no more."""
    runs = {
        run: [tick in lost_ticks for tick in ticks]
        for run, ticks in itertools.groupby(sorted(sampled), key=lambda tick: tick[:3])
    }
    last = {run[:2]: run for run in sorted(runs)}
    return [
        f"{run}: lost ticks {missing}"
        for run, missing in runs.items()
        if any(missing) and (missing != sorted(missing) or last[run[:2]] == run)
    ]


async def count_usage(pipeline: Pipeline) -> tuple[int, list[str]]:
    """How many records of usage there are, and in what they differ from integer sums over gpu.attributed.

    First a tick of another node in each partition lets the log go on until every hour is final.
    """
    await pipeline.want(*pipeline.usage[:2])
    end_ms = int((time.time() + 60) * 1000) // HOUR_MS * HOUR_MS + HOUR_MS
    head = {"schema": 1, "cluster": "silence", "run_id": 1, "seq": 1, "offset": 1 << 40}
    ts_ms = end_ms + HOUR_MS // 2
    tick = {**head, "ts_ms": ts_ms, "logged_ms": ts_ms, "attribution": "exact", "devices": []}
    async with sender_to(Connection(pipeline.kafka)) as sender:
        for number in range(PARTITIONS):
            value = json.dumps({**tick, "node": f"p{number}"}).encode()
            await (await sender.send("gpu.attributed", value, key=node_key("silence", f"p{number}"), partition=number))
    sums = UsageSums()
    async for record in records_of(pipeline.kafka, "gpu.attributed"):
        tick = json.loads(record.value)
        sums.add(tick, tick["logged_ms"])
    expected = {(row.gpu_uuid, row.start_ms) for row in sums.windows(HOUR_MS)}

    async def final() -> list[Usage]:
        records = list((await usage_of(pipeline.kafka, HOURS.name)).values())
        return records if {(record.gpu_uuid, record.start_ms) for record in records if record.final} >= expected else []

    hours = await eventually(final, "every hour is final", within_s=DRAIN_S, every_s=1)
    minutes = list((await usage_of(pipeline.kafka, MINUTES.name)).values())
    return len(hours) + len(minutes), [*sums.differences(hours, HOUR_MS), *sums.differences(minutes, MINUTE_MS)]


async def ticks_of(kafka: str, topic: str) -> AsyncIterator[Tick]:
    """The ticks of a topic in the order of each partition, without malformed records."""
    async for record in records_of(kafka, topic):
        try:
            value = json.loads(record.value)
            yield value["cluster"], value["node"], value["run_id"], value["seq"]
        except (ValueError, KeyError, TypeError):
            continue


def ahead(letter: Any) -> bool:
    """Whether it is a tick of a clock that is too far ahead for Prometheus."""
    return f'"cluster":"{SKEWED}"'.encode() in letter.value and b"too_far_ahead" in dict(letter.headers)["error"]


def origin_of(headers: list[tuple[str, bytes]]) -> RecordPlace:
    """The origin of the record of a dead letter."""
    named = {name: value.decode() for name, value in headers}
    return named["topic"], int(named["partition"]), int(named["offset"])


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of them is at most."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0
