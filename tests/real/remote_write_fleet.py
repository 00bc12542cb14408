"""Shared by the real tests of the remote-write sink: a fleet's records, sinks to run, and the points in Prometheus."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer

from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from tests.real.servers import KafkaServer, PrometheusServer
from topics.topic import node_key

PARTITIONS = 3
METRICS = {"gpu_utilization_ratio": 0.5, "memory_used_bytes": 1 << 30, "temperature_celsius": 0, "power_watts": None}
VALUES = 3
"""How many of them are known."""

SERIES = VALUES + 2
"""Of a device that a pod holds: its values, gpu_holders, and the pod's gpu_pod_info."""

Points = dict[str, list[tuple[int, float]]]


class Fleet:
    """Nodes of one GPU, in a cluster of the test's own, as records of gpu.attributed."""

    def __init__(self) -> None:
        self.cluster = f"c-{uuid.uuid4().hex[:12]}"
        self.records: list[dict[str, Any]] = []

    def tick(self, node: int, seq: int, ts_ms: int, pod: str | None = "pod", **fields: Any) -> dict[str, Any]:
        """A tick; its offset is its number, as if the node were alone in its partition of the samples."""
        owner = {"job": "train", "workload": {"kind": "Job", "name": "train"}}
        device = {
            "uuid": f"GPU-{node}",
            "index": 0,
            "model": "H100",
            "metrics": {**METRICS, "gpu_utilization_ratio": seq / 1000},
            "holders": [{"namespace": "ml", "pod": pod, "container": "c", **owner}] if pod else [],
        }
        header = {"schema": 1, "cluster": self.cluster, "node": f"node-{node}", "run_id": 1, "seq": seq, "ts_ms": ts_ms}
        return {**header, "offset": seq, "attribution": "exact", "devices": [device], **fields}

    def history(self, last_ms: int, ticks: int, nodes: int, first: int = 1) -> list[dict[str, Any]]:
        """Ticks of nodes by turns, a second apart, and the last at that time."""
        return [
            self.tick(node, seq, last_ms - (ticks - seq) * 1000, f"pod-{node}")
            for seq in range(first, ticks + 1)
            for node in range(nodes)
        ]

    async def stored(self, prometheus: PrometheusServer, name: str) -> Points:
        """The stored points of a metric by node and pod, staleness markers left out."""
        series_list = await asyncio.to_thread(prometheus.query, f'{name}{{k8s_cluster_name="{self.cluster}"}}[2h]')
        return {
            f"{series.labels['host_name']} {series.labels.get('k8s_pod_name', '-')}": list(series.points)
            for series in series_list
        }

    async def now(self, prometheus: PrometheusServer, name: str, at_ms: int) -> dict[str, float]:
        """The answer of an instant query, by node and pod."""
        query = f'{name}{{k8s_cluster_name="{self.cluster}"}}'
        series_list = await asyncio.to_thread(prometheus.query, query, at_ms)
        return {
            f"{series.labels['host_name']} {series.labels.get('k8s_pod_name', '-')}": series.value
            for series in series_list
        }


def expected(records: Iterable[Mapping[str, Any]]) -> Points:
    """The points of gpu_utilization that Prometheus must have."""
    points: Points = {}
    for record in records:
        holders = record["devices"][0]["holders"]
        key = f"{record['node']} {holders[0]['pod'] if holders else '-'}"
        points.setdefault(key, []).append((record["ts_ms"], record["seq"] / 1000))
    return points


async def write(kafka: KafkaServer, records: Iterable[dict[str, Any] | bytes]) -> None:
    """Puts records onto gpu.attributed, each in its node's partition, bytes in partition 0."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, linger_ms=5) as producer:
        for record in records:
            value = record if isinstance(record, bytes) else json.dumps(record).encode()
            cluster, node = ("c", "node-0") if isinstance(record, bytes) else (record["cluster"], record["node"])
            partition = int(node.removeprefix("node-")) % PARTITIONS
            await producer.send("gpu.attributed", value, key=node_key(cluster, node), partition=partition)


def sink(kafka: KafkaServer, url: str, **options: Any) -> RemoteWriteSink:
    """A sink that starts at the beginning, with 1.0 unless said otherwise."""
    on_outcome = options.pop("on_outcome", None)
    fixed: dict[str, Any] = {"from_": "earliest", "protocol": "1.0", **options}
    return RemoteWriteSink(RemoteWriteSettings(kafka=kafka.address, url=url, **fixed), on_outcome)


@asynccontextmanager
async def running(*sinks: RemoteWriteSink) -> AsyncIterator[None]:
    """Runs sinks, and stops them in good order."""
    stop = asyncio.Event()
    tasks = [asyncio.ensure_future(sink_.run(stop)) for sink_ in sinks]
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)


def count(sink_: RemoteWriteSink, name: str) -> float:
    """One of the sink's own counters, over all its labels."""
    counter = f"gpustream_remote_write_{name}"
    return sum(
        sample.value for metric in sink_.registry.collect() for sample in metric.samples if sample.name == counter
    )


ENDS = ("delivered", "duplicate", "dropped", "dead_lettered")


def ends(sink_: RemoteWriteSink) -> dict[str, int]:
    """The number of records by outcome, without outcomes of none."""
    counts = {end: int(count(sink_, f"records_{end}_total")) for end in ENDS}
    return {end: number for end, number in counts.items() if number}
