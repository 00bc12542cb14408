"""gpu_usage_*, between a real Kafka and a real Prometheus: sums over time are the integer sums of the records."""

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from gpustream.usage.table import Table
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.remote_write_fleet import count, ends, running, sink
from tests.real.servers import KafkaServer, PrometheusServer
from topics.usage import HOUR_MS, HOURS, Usage

PARTITIONS = 2
MINUTE_MS = 60_000
BY = {"namespace": ("k8s_namespace_name",), "workload": ("k8s_workload_kind", "k8s_workload_name"), "team": ("team",)}
OF_RECORD = {"held_seconds": ("device_ms", 1_000), "used_seconds": ("used_us", 1_000_000)} | {
    "idle_seconds": ("idle_ms", 1_000),
    "energy_joules": ("energy_mj", 1_000),
}
"""The field of each series, and how many of its unit are one of the series'."""

By = Literal["namespace", "workload", "team"]


@pytest.fixture
def kafka_of_usage(empty_kafka: KafkaServer) -> KafkaServer:
    """Kafka with the topics that the sink uses."""
    topics = ("gpu.attributed", "gpu.alerts", "gpu.usage")
    empty_kafka.create_ours({"gpu.dead-letters": 1, **dict.fromkeys(topics, PARTITIONS)})
    return empty_kafka


class Fleet:
    """Final windows of GPUs that pods share, in a cluster of the test's own; the numbers are random."""

    def __init__(self, ends_ms: Sequence[int], length_ms: int) -> None:
        self.cluster, chance = f"c-{uuid.uuid4().hex[:12]}", random.Random(7)
        self.final: list[Usage] = []
        for end_ms in ends_ms:
            for node in range(4):
                cut = chance.randrange(length_ms)
                for pod, device_ms in (("train-a", cut // 3), ("train-b", cut - cut // 3), (None, length_ms - cut)):
                    self.final.append(self._record(chance, node, pod, end_ms, length_ms, device_ms))

    def _record(
        self, chance: random.Random, node: int, pod: str | None, end_ms: int, length_ms: int, device_ms: int
    ) -> Usage:
        holder = {
            "namespace": f"ns-{node % 2}",
            "pod": pod,
            "pod_uid": f"uid-{pod}-{node}",
            "container": "main",
            "workload": {"kind": "Job", "name": f"job-{node}"},
            "team": f"team-{node % 3}",
        }
        fields: dict[str, Any] = {
            **{name: value for name, value in HOURS.example.items() if name not in (*holder, "labels")},
            "cluster": self.cluster,
            "node": f"node-{node}",
            "uuid": f"GPU-{node}",
            "gpu_uuid": f"GPU-{node}",
            "start_ms": end_ms - length_ms,
            "end_ms": end_ms,
            "category": "held" if pod else "free",
            "device_ms": device_ms,
            "slice_ms": device_ms * 7,
            "used_us": chance.randrange(device_ms * 1000 + 1),
            "idle_ms": chance.randrange(device_ms + 1),
            "energy_mj": chance.randrange(device_ms * 700 + 1),
            **(holder if pod else {}),
        }
        return msgspec.convert(fields, Usage)

    def sums(self, field: str, by: By | None = None) -> Counter[tuple[str, ...]]:
        """The integer sums of the records that somebody held; ``by`` None: of those that nobody did."""
        totals: Counter[tuple[str, ...]] = Counter()
        for record in self.final:
            if (record.category == "held") is (by is not None):
                key = {"namespace": (record.namespace or "",), "team": (record.team or "",), None: ()}.get(by)
                workload = record.workload
                key = ((workload.kind, workload.name) if workload else ()) if key is None else key
                totals[key] += getattr(record, field)
        return +totals

    async def stored(self, prometheus: PrometheusServer, name: str, range_: str, by: Sequence[str]) -> dict[Any, float]:
        """The sums over time in Prometheus."""
        query = (
            f'sum by ({",".join(by)}) (sum_over_time(gpu_usage_{name}{{k8s_cluster_name="{self.cluster}"}}[{range_}]))'
        )
        series_list = await asyncio.to_thread(prometheus.query, query)
        return {tuple(series.labels.get(label, "") for label in by): series.value for series in series_list}

    async def assert_equal(self, prometheus: PrometheusServer, range_: str) -> None:
        """Asserts that the sums in Prometheus are those of the records, to the last millisecond and microsecond."""
        for name, (field, scale) in OF_RECORD.items():
            for by, labels in BY.items():
                stored_sums = await self.stored(prometheus, f"{name}", range_, labels)
                held_sums = {key: round(value * scale) for key, value in stored_sums.items() if any(key) and value}
                assert held_sums == self.sums(field, by), (name, by)  # type: ignore[arg-type]
        stored_sums = await self.stored(prometheus, "free_seconds", range_, ())
        assert {key: round(value * 1000) for key, value in stored_sums.items()} == self.sums("device_ms")


async def write(kafka: KafkaServer, records: Iterable[Usage | bytes]) -> None:
    """Puts records onto gpu.usage, each in its node's partition."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, linger_ms=5) as producer:
        for record in records:
            value, key = (
                (record, b"x") if isinstance(record, bytes) else (msgspec.json.encode(record), record.key.encode())
            )
            partition = 0 if isinstance(record, bytes) else int(record.node.removeprefix("node-")) % PARTITIONS
            await producer.send(HOURS.name, value, key=key, partition=partition)


def growing(final: Iterable[Usage]) -> Iterable[Usage]:
    """The records of windows before they are final."""
    for record in final:
        yield msgspec.structs.replace(
            record, final=False, revision=record.revision - 1, device_ms=record.device_ms // 2
        )


@pytest.mark.parametrize("protocol", ["1.0", "auto"])
async def test_sums_over_time_are_those_of_the_records_through_a_restart_of_the_sink(
    kafka_of_usage: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    now_ms = int(time.time() * 1000)
    fleet = Fleet([now_ms - after * MINUTE_MS for after in (50, 40, 30, 20)], 10 * MINUTE_MS)
    half = len(fleet.final) // 2
    replayed = [msgspec.structs.replace(record, generation=1, device_ms=7) for record in fleet.final[:5]]
    first = sink(kafka_of_usage, prometheus.write_url, protocol=protocol)
    async with running(first):
        await write(kafka_of_usage, [*growing(fleet.final[:half]), *fleet.final[:half], b"none"])
        await eventually(lambda: sum(ends(first).values()) == 2 * half + 1, "half of it written")
    second = sink(kafka_of_usage, prometheus.write_url, protocol=protocol)
    async with running(second):
        await write(kafka_of_usage, [*fleet.final[half - 6 : half], *replayed, *fleet.final[half:]])
        await eventually(lambda: sum(ends(second).values()) == 6 + 5 + half, "the rest written")

    assert ends(first) == {"delivered": half, "duplicate": half, "dead_lettered": 1}
    assert ends(second) == {"delivered": half + 6, "dropped": 5}
    assert_accounted(first.registry)
    assert_accounted(second.registry)
    await fleet.assert_equal(prometheus, "1h")
    assert await fleet.stored(prometheus, "held_seconds", "10m", ()) == {}
    instant = f'gpu_usage_held_seconds{{k8s_cluster_name="{fleet.cluster}"}}'
    assert await asyncio.to_thread(prometheus.query, instant) == []

    async def last_are_there() -> bool:
        return len(await asyncio.to_thread(prometheus.query, instant, now_ms - 20 * MINUTE_MS)) == 8

    await eventually(last_are_there)  # Thanos asks every 5 s how old what it has is, and looks no further back


async def test_what_is_older_than_an_hour_is_dropped_by_default_and_stored_with_an_out_of_order_window(
    kafka_of_usage: KafkaServer, prometheus: PrometheusServer, start_prometheus: Callable[..., PrometheusServer]
) -> None:
    now_ms = int(time.time() * 1000)
    fleet = Fleet([now_ms - (23 - number) * HOUR_MS for number in range(24)], HOUR_MS)
    newest = fleet.final[-12:]
    await write(kafka_of_usage, [*newest, *fleet.final])
    default = sink(kafka_of_usage, prometheus.write_url, group="default")
    patient_prometheus = await asyncio.to_thread(
        start_prometheus, config="storage: {tsdb: {out_of_order_time_window: 24h}}\n"
    )
    patient = sink(kafka_of_usage, patient_prometheus.write_url, group="patient")
    records = len(fleet.final) + 12
    async with running(default, patient):
        await eventually(lambda: sum(ends(default).values()) == sum(ends(patient).values()) == records)

    assert ends(patient) == {"delivered": records}
    await fleet.assert_equal(patient_prometheus, "24h")
    table = Table("team")
    for record in fleet.final:
        table.add(record)
    for name, (field, scale) in OF_RECORD.items():
        stored_sums = await fleet.stored(patient_prometheus, name, "24h", BY["team"])
        rows = {(row.by,): getattr(row.sums, field) for row in table.rows() if row.category == "held"}
        assert {key: round(value * scale) for key, value in stored_sums.items() if any(key)} == rows
    assert ends(default)["dropped"] >= 22 * 12
    refused = count(default, "usage_samples_refused_total")
    assert refused >= 22 * 4 * 8
    assert_accounted(default.registry)
