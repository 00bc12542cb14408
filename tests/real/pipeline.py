"""The pipeline as an operator runs it, process by process, and its answers compared with the truth."""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from delivery.connection import Connection
from delivery.sender import Sender
from gpustream.serve import Component
from tests.real.accounting import assert_accounted
from tests.real.process import HttpServer
from tests.real.servers import PrometheusServer, Series
from topics.usage import Usage

Tick = tuple[str, str, int, int]
"""A tick's identity: cluster, node, run_id, seq."""

Point = tuple[str, str, str, int]
"""A device's reading: cluster, node, device uuid, ts_ms."""


NO_AUTHORITIES = {"SSL_CERT_FILE": os.devnull}
"""No server of the tests is signed by one of the system's, and each process would read them all: 50 ms of CPU."""


class Gpustream(HttpServer):
    """One `gpustream` process; it is up when its /readyz says so."""

    health = "/readyz"

    def __init__(self, directory: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, environment=NO_AUTHORITIES | dict(environment or {}))
        self.name = directory.name
        self.arguments = list(arguments)
        self.python = ["-m", "gpustream"]

    def command(self) -> Sequence[str]:
        """The command in the foreground."""
        listen = f"127.0.0.1:{self.ports[0].number}"
        return [sys.executable, *self.python, *self.arguments, "--listen", listen]

    def why_not(self) -> str:
        """The answer of /readyz if it is not ready; empty if it is."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):  # noqa: S310 - http, and ours
                return ""
        except urllib.error.HTTPError as error:
            with error:
                message: str = error.read().decode()
                return message
        except OSError as error:
            return f"no answer: {error}"

    def stop(self) -> None:
        """Stops it in good order, after a check that it accounts for all records that it received."""
        assert_accounted(self.get("/metrics") or "")
        super().stop()

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()


@asynccontextmanager
async def running(*components: Component) -> AsyncIterator[None]:
    """Runs the components while inside."""
    stop = asyncio.Event()
    tasks = [asyncio.ensure_future(component.run(stop)) for component in components]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def sender_to(connection: Connection) -> AsyncIterator[Sender]:
    """A sender, started."""
    sender = Sender(connection, client_id="test")
    await sender.start()
    try:
        yield sender
    finally:
        await sender.stop()


@dataclass(frozen=True)
class Expected:
    """The truth of one device at one time: the pods reported to hold it, and its values."""

    holders: frozenset[tuple[str, str]]
    containers: frozenset[tuple[str, str, str]]
    values: Mapping[str, float]


@dataclass
class Truth:
    """A truth file: every tick that was sampled, and every reading in it."""

    ticks: set[Tick] = field(default_factory=set)
    readings: dict[Point, Expected] = field(default_factory=dict)
    of_tick: dict[Point, Tick] = field(default_factory=dict)

    @classmethod
    def read(cls, *paths: Path) -> "Truth":
        """The truth of these files."""
        truth = cls()
        for row in (row for path in paths for row in _rows(path)):
            truth._add(row)
        return truth

    def _add(self, row: Mapping[str, Any]) -> None:
        tick = (row["cluster"], row["node"], row["run_id"], row["seq"])
        point = (row["cluster"], row["node"], row["uuid"], row["ts_ms"])
        values = {name: row[name] for name in ("utilization_ratio", "memory_used_bytes") if row[name] is not None}
        holders = row["reported"]
        self.ticks.add(tick)
        self.of_tick[point] = tick
        self.readings[point] = Expected(
            holders=frozenset((h["namespace"], h["pod"]) for h in holders),
            containers=frozenset((h["namespace"], h["pod"], h["container"]) for h in holders),
            values=values,
        )

    def points(self, value: str) -> dict[Point, Expected]:
        """The readings that have this value."""
        return {point: expected for point, expected in self.readings.items() if value in expected.values}


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open() as lines:
        is_cut = False
        for line in lines:
            if not line.endswith("\n"):  # not written yet
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                assert not is_cut, f"{path}: {line[:200]}"
                is_cut = True
                continue
            assert not is_cut or row["seq"] == 1, f"{path}: a line was cut, and no new run begins after it"
            is_cut = False
            yield row


@dataclass(frozen=True)
class Stored:
    """One sample as the receiver has it: its value, and the pod that its labels name, if any."""

    value: float
    holder: tuple[str, str] | None


def stored(prometheus: PrometheusServer, metric: str, cluster: str, window: str) -> dict[Point, Stored]:
    """Every raw sample of a metric. Two series with a sample of one device at one time fail the test."""
    by_point: dict[Point, Stored] = {}
    for series in prometheus.query(f'{metric}{{k8s_cluster_name="{cluster}"}}[{window}]'):
        labels = series.labels
        uuid = labels.get("gpu_mig_uuid") or labels["gpu_uuid"]
        for ts_ms, value in series.points:
            point = (cluster, labels["k8s_node_name"], uuid, ts_ms)
            assert point not in by_point, f"two series say something of {point}: {labels}"
            by_point[point] = Stored(value, _holder(series))
    return by_point


def _holder(series: Series) -> tuple[str, str] | None:
    pod = series.labels.get("k8s_pod_name")
    return (series.labels["k8s_namespace_name"], pod) if pod else None


def differences(expected: Mapping[Point, Expected], actual: Mapping[Point, Stored], value: str) -> list[str]:
    """Every difference between the stored samples and the truth, by identity."""
    differing = []
    for point, truth in expected.items():
        holder = next(iter(truth.holders)) if len(truth.holders) == 1 else None
        stored_one = actual.get(point)
        if stored_one is None:
            differing.append(f"missing {point}")
        elif stored_one.holder != holder:
            differing.append(f"holder of {point}: {stored_one.holder}, not {holder}")
        elif stored_one.value != truth.values[value]:
            differing.append(f"value of {point}: {stored_one.value}, not {truth.values[value]}")
    differing += [f"never sampled: {point}" for point in actual.keys() - expected.keys()]
    return differing


async def read_all(kafka: str, topic: str) -> list[Any]:
    """Every committed record of a topic, to where it ends now."""
    return [record async for record in records_of(kafka, topic)]


async def records_of(kafka: str, topic: str) -> AsyncIterator[Any]:
    """The committed records of a topic, one after the other, to where it ends now: one that is too large to keep."""
    options = {"isolation_level": "read_committed", "max_partition_fetch_bytes": 8 << 20}
    async with AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False, **options) as consumer:
        partitions = await consumer._client.fetch_all_metadata()
        numbers = partitions.partitions_for_topic(topic) or set()
        tps = [TopicPartition(topic, number) for number in sorted(numbers)]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        begins = await consumer.beginning_offsets(tps)
        for tp in tps:
            consumer.seek(tp, begins[tp])
        unread = {tp for tp in tps if begins[tp] < ends[tp]}
        while unread:
            for batch in (await consumer.getmany(*unread, timeout_ms=100)).values():
                for record in batch:
                    yield record
            unread = {tp for tp in unread if await consumer.position(tp) < ends[tp]}


async def usage_of(kafka: str, topic: str) -> dict[bytes, Usage]:
    """The valid record of each key. A repeated record must have the same bytes and partition."""
    records_by_key: dict[bytes, Usage] = {}
    written: dict[tuple[bytes, tuple[int, int]], bytes] = {}
    nodes: dict[tuple[str, str], int] = {}
    async for record in records_of(kafka, topic):
        usage = msgspec.json.decode(record.value, type=Usage)
        before = written.setdefault((record.key, usage.order), record.value)
        assert before == record.value, f"{before!r} was written, and then {record.value!r}"
        assert record.key == usage.key.encode()
        assert nodes.setdefault((usage.cluster, usage.node), record.partition) == record.partition
        records_by_key[record.key] = max(
            records_by_key.get(record.key, usage), usage, key=lambda candidate: candidate.order
        )
    return records_by_key


async def lag(kafka: str, group: str, topics: Iterable[str]) -> int:
    """How many records of these topics the group has not committed."""
    async with AIOKafkaConsumer(bootstrap_servers=kafka, group_id=group, enable_auto_commit=False) as consumer:
        metadata = await consumer._client.fetch_all_metadata()
        tps = [TopicPartition(t, n) for t in topics for n in metadata.partitions_for_topic(t) or ()]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        return sum([ends[tp] - (await consumer.committed(tp) or 0) for tp in tps])
