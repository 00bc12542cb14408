"""What each step costs, beside its aim, what else could do it, and the last committed run: one table, in minutes.

    python -m tests.bench [--write]

One Apache Kafka holds some logs, each read as a backlog by one process after the other. The first is a simulated
fleet's samples, 200 ticks a node of 8 whole GPUs of up to 27 values, with processes, infos and pods that change, a
quarter of the held GPUs by several; each has the log time that it would have had live. The attribution stream joins
them, and what it writes is read by remote write, the alert stream and the usage stream. The others are made for remote
write: in ``warm`` a pod holds each of eight GPUs of 27 values, in ``shared`` two of the eight are held by four pods
each, and in ``cold`` each tick finds other pods. CPU is user and system time of a process, all threads, less that of
its start on empty topics.

Yardsticks, in the same run: a loop of aiokafka that decodes nothing; the messages that protoc made of the official
definitions, filled with the labels and values of a tick, serialized and compressed, which is what remote write 1.0 does
last of all; and the OpenTelemetry Collector if it is built, which reads the series of these ticks as OTLP and writes
them: values and labels are ready made for it, nothing is joined, and no series is ended.

Memory of a worker is that after a tick of each of 2,000 nodes, and for each further one of the 10,000 what each of the
second thousand took: what is on its way does not grow with the nodes. That of a sink is what 2,000 nodes' ticks took
more than a start, times what makes them 2,000,000 series.

Bytes are those of a tick on the broker's disk in a batch of its own, as a node's are while it is up to date.

It is compared with ``tests/bench/aims.json``, which ``--write`` writes. Of two machines, or two hours of a busy one,
compare the ratios to the yardsticks.
"""

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
from cramjam import snappy, zstd

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from sinks.remote_write import encode_v1, encode_v2
from sinks.remote_write.nodes import OpenSeries
from sinks.remote_write.send import compressed
from sinks.series.model import SampleGroup
from sinks.series.tick import decode
from sinks.series.translation import Translator
from tests.bench import attribution
from tests.bench.attribution import GPUS, bare, cpu_s
from tests.bench.collector import TOPIC, CollectorServer, Otlp
from tests.bench.node import memory_bytes
from tests.bench.remote_write import log, null_receiver
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import KafkaServer, Missing
from tests.sinks.remote_write.wire import messages
from topics.profiles import PROFILES

TICKS, PARTITIONS, NODES, FEW_NODES, WIDE_NODES = 12_800, 4, 64, 1000, 2000
VARIANT_TICKS = 3200
VARIANTS: dict[str, dict[str, bool]] = {"warm.": {}, "shared.": {"shared": True}, "cold.": {"cold": True}}
MANY_NODES, SERIES_AIMED = 10_000, 2_000_000
SAMPLES, ATTRIBUTED = "gpu.samples", "gpu.attributed"
PER_TICK, RATE = "us/tick", "M values a CPU-second"
SETTLED_S, HELPS, COLLECTED, REQUEST_TICKS = 3.0, 10, 1600, 29
BATCH_BYTES = 61 + 30
"""Around a record that is alone in its batch: Kafka's header of a batch and of a record, and the key."""

LAST = Path(__file__).with_suffix(".json")

BARE, PROTOBUF, COLLECTOR = "bare aiokafka loop", "official protobuf and snappy, 1.0", "OpenTelemetry Collector"
"""The yardsticks."""


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row: what was measured, its unit, and what it should be; ``more`` is better, or less is. ``beside`` are the
    yardsticks that it is a multiple of."""

    what: str
    value: float
    unit: str
    aim: float | None = None
    more: bool = False
    beside: tuple[str, ...] = ()


def report(figures: Iterable[Figure], path: Path, *, write: bool) -> None:
    """Prints the table, a row as soon as it is known, beside the figures of a file; writes them to it."""
    last = load(path) if path.exists() else {}
    sys.stdout.write("| what | figure | aim | x the yardsticks | last committed run |\n|---|---|---|---|---|\n")
    by_title: dict[str, Figure] = {}
    for figure in figures:
        by_title[figure.what] = figure
        aim = "" if figure.aim is None else f"{figure.aim:,.6g}"
        before = last.get(figure.what)
        since = f"{before.value:,.4g}, {ratios(before, last)}".rstrip(", ") if before else ""
        sys.stdout.write(
            f"| {figure.what} | {figure.value:,.4g} {figure.unit} | {aim} | {ratios(figure, by_title)} | {since} |\n"
        )
        sys.stdout.flush()
    if write:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(list(by_title.values()))) + b"\n")


def load(path: Path) -> dict[str, Figure]:
    """The figures of a file, by what they are of."""
    return {figure.what: figure for figure in msgspec.json.decode(path.read_bytes(), type=list[Figure])}


def ratios(figure: Figure, run: Mapping[str, Figure]) -> str:
    """A figure as a multiple of the yardsticks of its run that are there."""
    return ", ".join(
        f"{figure.value / run[name].value:,.3g} x {name.split()[0]}" for name in figure.beside if name in run
    )


def figures() -> Iterator[Figure]:
    """All rows, in the order of the table."""
    yield Figure(PROTOBUF, protobuf_us(), PER_TICK)
    with ExitStack() as servers:
        bench = Bench(servers)
        asyncio.run(bench.fill())
        yield from bench.steps()
    yield Figure("gpustream --help", help_ms(), "ms", 150)


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
        for prefix in ("", *VARIANTS, "few.", "wide.", "empty."):
            connection = Connection(self.kafka.address, topic_prefix=prefix)
            await topic_admin.create(connection, partitions=PARTITIONS, replication_factor=1)
        await attribution.produce(Connection(self.kafka.address), TICKS, nodes=NODES)
        for prefix, nodes in (("few.", FEW_NODES), ("wide.", WIDE_NODES)):
            await attribution.produce(Connection(self.kafka.address, topic_prefix=prefix), nodes, nodes=nodes)
        for prefix, kind in VARIANTS.items():
            sender = Sender(Connection(self.kafka.address, topic_prefix=prefix), client_id="bench")
            await sender.start()
            records = log(NODES, VARIANT_TICKS // NODES, **kind)
            await asyncio.gather(*[await sender.send(ATTRIBUTED, record.value, key=record.key) for record in records])
            await sender.stop()

    def steps(self) -> Iterator[Figure]:
        """What reads a log, one after the other."""
        yield Figure(BARE, asyncio.run(bare(self.kafka.address, TICKS)) / TICKS * 1e6, PER_TICK)
        join = self.spent(("stream", "attribution"), SAMPLES, TICKS)
        yield Figure("attribution", join.us, PER_TICK, 110, beside=(BARE,))
        records = [record.value for record in asyncio.run(read_all(self.kafka.address, ATTRIBUTED))]
        writing: dict[tuple[str, str], Spent] = {}
        for kind in ("", *VARIANTS):
            for protocol, aim_us in (("1.0", 130), ("2.0", 100)):
                arguments = ("sink", "remote-write", "--url", self.url, "--from", "earliest", "--protocol", protocol)
                spent = writing[kind, protocol] = self.spent(
                    arguments, ATTRIBUTED, VARIANT_TICKS if kind else TICKS, kind
                )
                if kind == "cold.":
                    cold_us = (spent.us - writing["warm.", protocol].us) / GPUS
                    yield Figure(f"remote write {protocol}, a cold label set", cold_us, "us/GPU", 50)
                else:
                    aim = {"": None, "warm.": aim_us, "shared.": aim_us * 1.3}[kind]
                    name = f"remote write {protocol}, {kind.strip('.') or 'those ticks'}"
                    yield Figure(name, spent.us, PER_TICK, aim, beside=(BARE, PROTOBUF))
        yield Figure("alerts", self.spent(("stream", "alerts"), ATTRIBUTED, TICKS).us, PER_TICK, 80, beside=(BARE,))
        yield Figure("usage", self.spent(("stream", "usage"), ATTRIBUTED, TICKS).us, PER_TICK, 60, beside=(BARE,))
        if collector_us := self.collector_us(records[:COLLECTED]):
            yield Figure(COLLECTOR, values_of(records[:COLLECTED]) / collector_us, RATE, more=True)
        whole_us = join.us + writing["", "1.0"].us
        yield Figure("the whole way", values_of(records) / whole_us, RATE, 0.85, more=True, beside=(COLLECTOR,))
        yield Figure("catching up", 1e6 / writing["warm.", "1.0"].us, "ticks a CPU-second", 2500, more=True)
        few, wide = (self.run(("stream", "attribution"), SAMPLES, prefix).mib for prefix in ("few.", "wide."))
        further = (wide - few) / (WIDE_NODES - FEW_NODES) * (MANY_NODES - WIDE_NODES)
        yield Figure("a worker with 10,000 nodes", wide + further, "MiB", 600)
        sink = ("sink", "remote-write", "--url", self.url, "--from", "earliest")
        writer = self.spent(sink, ATTRIBUTED, WIDE_NODES, "wide.")
        yield Figure("a sink with 2,000,000 series", writer.mib * SERIES_AIMED / writer.accepted, "MiB", 1536)
        samples = [record.value for record in asyncio.run(read_all(self.kafka.address, SAMPLES))]
        for topic, logged in ((SAMPLES, samples[:COLLECTED]), (ATTRIBUTED, records[:COLLECTED])):
            size = sum(len(zstd.compress(value, level=1)) + BATCH_BYTES for value in logged) / len(logged)
            yield Figure(f"{topic} on disk", size, "bytes/tick")
        for protocol, wire_bytes in on_the_wire(records[:COLLECTED]).items():
            yield Figure(f"remote write {protocol} on the wire", wire_bytes, "bytes/tick")
            sent_bytes = writing["", protocol].sent_bytes / TICKS
            yield Figure(f"remote write {protocol} on the wire, in a backlog", sent_bytes, "bytes/tick")
        yield Figure("samples written", writing["", "1.0"].accepted / TICKS, "samples/tick")

    def collector_us(self, records: Sequence[bytes]) -> float | None:
        """CPU time of the Collector for each of these ticks; nothing if it is not built."""
        try:
            server = CollectorServer(self.directory / "collector", self.kafka.address, self.url)
        except Missing:
            return None
        otlp = Otlp(records)
        self.kafka.create_topics({TOPIC: PARTITIONS})
        with server:
            asyncio.run(otlp.send(self.kafka.address))
            return server.cpu_s_of(otlp.points) / len(records) * 1e6

    def spent(self, arguments: tuple[str, ...], topic: str, ticks: int, prefix: str = "") -> "Spent":
        """What a process takes for a log, less what it takes to start."""
        if arguments not in self._start:
            self._start[arguments] = self.run(arguments, topic, "empty.")
        start, whole = self._start[arguments], self.run(arguments, topic, prefix)
        return whole._replace(us=(whole.us - start.us) / ticks, mib=whole.mib - start.mib)

    def run(self, arguments: tuple[str, ...], topic: str, prefix: str) -> "Spent":
        """What a process takes from its start until it has read all there is."""
        self._runs += 1
        is_stream = arguments[0] == "stream"
        group = f"gpustream-{arguments[1]}" if is_stream else f"bench-{self._runs}"
        options = ("--kafka", self.kafka.address, "--topic-prefix", prefix, *(() if is_stream else ("--group", group)))
        with Gpustream(self.directory / f"run-{self._runs}", *arguments, *options) as process:
            behind, since_s = -1, time.monotonic()
            while time.monotonic() - since_s < (SETTLED_S if behind else 0.0):
                if behind != (behind := asyncio.run(lag(self.kafka.address, prefix + group, [prefix + topic]))):
                    since_s = time.monotonic()
                time.sleep(0.2)
            counted = dict(COUNTED.findall(process.get("/metrics") or ""))
            accepted, sent = (float(counted.get(name, 0)) for name in ("samples_accepted", "request_bytes"))
            mib = memory_bytes(process.pid)["Rss"] / (1 << 20)
            return Spent(cpu_s(process.pid) * 1e6, mib, accepted, sent)


COUNTED = re.compile(r"^gpustream_remote_write_(\w+)_total (.*)", re.MULTILINE)


class Spent(NamedTuple):
    """CPU time, memory, how many samples a receiver accepted, and the bytes sent to it."""

    us: float
    mib: float
    accepted: float
    sent_bytes: float


def values_of(records: Sequence[bytes]) -> float:
    """How many values of metrics these ticks have, on average."""
    values_of_metrics = [
        msgspec.structs.astuple(reading.metrics) for record in records for reading in decode(record).devices
    ]
    return sum(len(values) - values.count(None) for values in values_of_metrics) / len(records)


def on_the_wire(records: Sequence[bytes]) -> dict[str, float]:
    """The bytes of a tick in the requests of a sink that keeps up, by protocol: each tick there is of another node."""
    series, encoder = OpenSeries(Translator([PROFILES["otel"]])), encode_v2.Encoder()
    by_node: dict[tuple[str, str], list[Sequence[SampleGroup]]] = {}
    for record in records:
        tick = series.tick(decode(record))
        series.settle(tick, 0.0, accepted=True)
        by_node.setdefault(tick.node, []).append(tick.groups)
    ticks = list(chain.from_iterable(zip(*by_node.values(), strict=False)))
    sent = dict.fromkeys(("1.0", "2.0"), 0)
    for start in range(0, len(ticks), REQUEST_TICKS):
        request = list(chain.from_iterable(ticks[start : start + REQUEST_TICKS]))
        sent["1.0"] += len(compressed(encode_v1.pieces(request)))
        sent["2.0"] += len(compressed([encoder.encode(request)]))
    return {protocol: size / len(ticks) for protocol, size in sent.items()}


def help_ms() -> float:
    """How long ``gpustream --help`` takes, in the median."""
    command = [sys.executable, "-m", "gpustream", "--help"]
    took = []
    for _ in range(HELPS):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return sorted(took)[HELPS // 2] * 1000


def protobuf_us() -> float:
    """To write the samples of a tick, once they are known, with the code that protoc makes."""
    series = OpenSeries(Translator([PROFILES["otel"]]))
    ticks = [series.tick(decode(record.value or b"")).groups for record in log(NODES, 4)]
    labels = {group.series: group.series.series() for tick in ticks for group in tick}
    protobuf = messages("write_v1")
    began = time.process_time()
    for start in range(0, len(ticks), 32):
        request = protobuf.WriteRequest()
        for group in [group for tick in ticks[start : start + 32] for group in tick]:
            for pairs, value in zip(labels[group.series], group.values, strict=True):
                entry = request.timeseries.add()
                for name, text in pairs:
                    entry.labels.add(name=name, value=text)
                entry.samples.add(value=value, timestamp=group.ts_ms)
        snappy.compress_raw(request.SerializeToString())
    return (time.process_time() - began) / len(ticks) * 1e6
