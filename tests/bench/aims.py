"""What each step costs, beside its aim, what else could do it, and the last committed run: one table, in minutes.

    python -m tests.bench [--write]

One Apache Kafka holds some logs, each read as a backlog by one process after the other. The first is a simulated
fleet's samples, 200 ticks a node of 8 whole GPUs of up to 27 values, with processes, infos and pods that change, a
quarter of the held GPUs by several. The attribution stream joins them, and what it writes is read by remote write, the
alert stream and the usage stream. The others are made for remote write: in ``warm`` a pod holds each of eight GPUs of
27 values, in ``shared`` two of the eight are held by four pods each, and in ``cold`` each tick finds other pods. CPU is
user and system time of a process, all threads, less that of its start on empty topics.

Yardsticks, in the same run: a loop of aiokafka that decodes nothing; and the messages that protoc made of the official
definitions, filled with the labels and values of a tick, serialized and compressed, which is what remote write 1.0 does
last of all.

Memory is that of 2,000 nodes' ticks, less that of a start, times what makes them 10,000 nodes or 2,000,000 series.

It is compared with ``tests/bench/aims.json``, which ``--write`` writes. Of two machines, or two hours of a busy one,
compare the ratios to the bare loop.
"""

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
from cramjam import snappy

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from sinks.remote_write.nodes import OpenSeries
from sinks.series.tick import decode
from sinks.series.translation import Translator
from tests.bench import attribution
from tests.bench.attribution import GPUS, bare, cpu_s
from tests.bench.node import memory_bytes
from tests.bench.remote_write import log, null_receiver
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import KafkaServer
from tests.sinks.remote_write.wire import messages
from topics.profiles import PROFILES

TICKS, PARTITIONS, NODES, WIDE_NODES = 12_800, 4, 64, 2000
MADE_TICKS = 3200
MADE: dict[str, dict[str, bool]] = {"warm.": {}, "shared.": {"shared": True}, "cold.": {"cold": True}}
MANY_NODES, SERIES_AIMED = 10_000, 2_000_000
ATTRIBUTED, PER_TICK = "gpu.attributed", "us/tick"
SETTLED_S, HELPS = 3.0, 10
LAST = Path(__file__).with_suffix(".json")


class Figure(NamedTuple):
    """A row: what was measured, its unit, and what it should be. ``more`` is better, or less is."""

    what: str
    value: float
    unit: str
    aim: float | None = None
    more: bool = False


def main(*, write: bool) -> None:
    """Prints the table, a row as soon as it is known."""
    last = {one.what: one for one in msgspec.json.decode(LAST.read_bytes(), type=list[Figure])} if LAST.exists() else {}
    sys.stdout.write(
        "| what | figure | aim | x the bare loop | last committed run, x its bare loop |\n|---|---|---|---|---|\n"
    )
    found: list[Figure] = []
    for one in figures():
        found.append(one)
        aim = "" if one.aim is None else f"{one.aim:,.6g}"
        cells = [
            one.what,
            f"{one.value:,.4g} {one.unit}",
            aim,
            beside(one, found),
            beside(last.get(one.what), last.values()),
        ]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    if write:
        LAST.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def beside(one: Figure | None, all_of_it: Iterable[Figure]) -> str:
    """A figure as a multiple of the bare loop of its run, if it is a time for each tick."""
    if one is None:
        return ""
    bare_us = next((other.value for other in all_of_it if other.what == BARE), None)
    ratio = f" ({one.value / bare_us:.1f})" if bare_us and one.unit == PER_TICK else ""
    return f"{one.value:,.4g}{ratio}"


BARE = "bare aiokafka loop"
"""The yardstick of every row that is a time for each tick."""


def figures() -> Iterator[Figure]:
    """All rows, in the order of the table."""
    with ExitStack() as servers:
        bench = Bench(servers)
        asyncio.run(bench.fill())
        yield from bench.steps()
    yield from without_kafka()


class Bench:
    """A Kafka with the logs, and the processes that read them."""

    def __init__(self, servers: ExitStack) -> None:
        self.directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        self.kafka = servers.enter_context(KafkaServer(self.directory / "kafka", heap="1g"))
        self.url = servers.enter_context(null_receiver())
        self._runs = 0
        self._start: dict[tuple[str, ...], Spent] = {}

    async def fill(self) -> None:
        """Make the logs."""
        for prefix in ("", *MADE, "wide.", "empty."):
            at = Connection(self.kafka.address, topic_prefix=prefix)
            await topic_admin.create(at, partitions=PARTITIONS, replication_factor=1)
        await attribution.produce(Connection(self.kafka.address), TICKS, nodes=NODES)
        await attribution.produce(Connection(self.kafka.address, topic_prefix="wide."), WIDE_NODES, nodes=WIDE_NODES)
        for prefix, kind in MADE.items():
            sender = Sender(Connection(self.kafka.address, topic_prefix=prefix), client_id="bench")
            await sender.start()
            records = log(NODES, MADE_TICKS // NODES, **kind)
            await asyncio.gather(*[await sender.send(ATTRIBUTED, one.value, key=one.key) for one in records])
            await sender.stop()

    def steps(self) -> Iterator[Figure]:
        """What reads a log, one after the other."""
        kafka = self.kafka.address
        yield Figure(BARE, asyncio.run(bare(kafka, TICKS)) / TICKS * 1e6, PER_TICK)
        join = self.spent(("stream", "attribution"), "gpu.samples", TICKS)
        yield Figure("attribution", join.us, PER_TICK, 110)
        values = asyncio.run(values_of(kafka)) / TICKS
        writing: dict[tuple[str, str], float] = {}
        for kind in ("", *MADE):
            for protocol, aim_us in (("1.0", 130), ("2.0", 100)):
                what = ("sink", "remote-write", "--url", self.url, "--from", "earliest", "--protocol", protocol)
                us = writing[kind, protocol] = self.spent(what, ATTRIBUTED, MADE_TICKS if kind else TICKS, kind).us
                if kind == "cold.":
                    cold_us = (us - writing["warm.", protocol]) / GPUS
                    yield Figure(f"remote write {protocol}, a cold label set", cold_us, "us/GPU", 50)
                else:
                    aim = {"": None, "warm.": aim_us, "shared.": aim_us * 1.3}[kind]
                    yield Figure(f"remote write {protocol}, {kind.strip('.') or 'those ticks'}", us, PER_TICK, aim)
        yield Figure("alerts", self.spent(("stream", "alerts"), ATTRIBUTED, TICKS).us, PER_TICK, 80)
        yield Figure("usage", self.spent(("stream", "usage"), ATTRIBUTED, TICKS).us, PER_TICK, 60)
        whole_us = join.us + writing["", "1.0"]
        yield Figure("the whole way", values / whole_us, "M values a CPU-second", 0.85, more=True)
        yield Figure("catching up", 1e6 / writing["warm.", "1.0"], "ticks a CPU-second", 2500, more=True)
        worker = self.spent(("stream", "attribution"), "gpu.samples", WIDE_NODES, "wide.")
        yield Figure("a worker with 10,000 nodes", worker.mib * MANY_NODES / WIDE_NODES, "MiB", 600)
        sink = ("sink", "remote-write", "--url", self.url, "--from", "earliest")
        writer = self.spent(sink, ATTRIBUTED, WIDE_NODES, "wide.")
        yield Figure("a sink with 2,000,000 series", writer.mib * SERIES_AIMED / writer.accepted, "MiB", 1536)

    def spent(self, what: tuple[str, ...], topic: str, ticks: int, prefix: str = "") -> "Spent":
        """What a process takes for a log, less what it takes to start."""
        if what not in self._start:
            self._start[what] = self.run(what, topic, "empty.")
        start, whole = self._start[what], self.run(what, topic, prefix)
        return Spent((whole.us - start.us) / ticks, whole.mib - start.mib, whole.accepted)

    def run(self, what: tuple[str, ...], topic: str, prefix: str) -> "Spent":
        """What a process takes from its start until it has read all there is."""
        self._runs += 1
        is_stream = what[0] == "stream"
        group = f"gpustream-{what[1]}" if is_stream else f"bench-{self._runs}"
        at = ("--kafka", self.kafka.address, "--topic-prefix", prefix, *(() if is_stream else ("--group", group)))
        with Gpustream(self.directory / f"run-{self._runs}", *what, *at) as process:
            left, since_s = -1, time.monotonic()
            while time.monotonic() - since_s < (SETTLED_S if left else 0.0):
                if left != (left := asyncio.run(lag(self.kafka.address, prefix + group, [prefix + topic]))):
                    since_s = time.monotonic()
                time.sleep(0.2)
            accepted = re.search(
                r"^gpustream_remote_write_samples_accepted_total (.*)", process.get("/metrics") or "", re.MULTILINE
            )
            mib = memory_bytes(process.pid)["Rss"] / (1 << 20)
            return Spent(cpu_s(process.pid) * 1e6, mib, float(accepted[1]) if accepted else 0.0)


class Spent(NamedTuple):
    """CPU time, memory, and how many samples a receiver accepted."""

    us: float
    mib: float
    accepted: float


async def values_of(kafka: str) -> int:
    """How many values of metrics gpu.attributed has."""
    decoded = [decode(record.value) for record in await read_all(kafka, ATTRIBUTED)]
    known = [msgspec.structs.astuple(reading.metrics) for tick in decoded for reading in tick.devices]
    return sum(len(values) - values.count(None) for values in known)


# -- without Kafka


def without_kafka() -> Iterator[Figure]:
    """What needs no log."""
    yield Figure("official protobuf and snappy, 1.0", protobuf_us(), PER_TICK)
    command = [sys.executable, "-m", "gpustream", "--help"]
    took = []
    for _ in range(HELPS):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    yield Figure("gpustream --help", sorted(took)[HELPS // 2] * 1000, "ms", 150)


def protobuf_us() -> float:
    """To write the samples of a tick, once they are known, with the code that protoc makes."""
    series = OpenSeries(Translator([PROFILES["otel"]]))
    ticks = [series.tick(decode(record.value or b"")).groups for record in log(NODES, 4)]
    labels = {group.series: group.series.series() for tick in ticks for group in tick}
    made = messages("write_v1")
    began = time.process_time()
    for at in range(0, len(ticks), 32):
        request = made.WriteRequest()
        for group in [group for tick in ticks[at : at + 32] for group in tick]:
            for pairs, value in zip(labels[group.series], group.values, strict=True):
                one = request.timeseries.add()
                for name, text in pairs:
                    one.labels.add(name=name, value=text)
                one.samples.add(value=value, timestamp=group.ts_ms)
        snappy.compress_raw(request.SerializeToString())
    return (time.process_time() - began) / len(ticks) * 1e6
