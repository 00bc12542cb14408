"""Fleet -> Kafka -> attribution -> remote write -> Prometheus, and its answers held against the truth.

Prometheus runs in its default configuration, without an out-of-order window.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.pipeline import Expected, Gpustream, Point, Truth, differences, lag, stored
from tests.real.servers import KafkaServer, PrometheusServer
from topics import broker

FLEET_S = 25.0
METRICS = (("gpu_utilization", "utilization_ratio"), ("gpu_memory_used", "memory_used_bytes"))


async def run_fleet(
    kafka: KafkaServer, gpustream: Callable[..., Gpustream], truth: Path, cluster: str, *sink: str
) -> None:
    """A fleet for some seconds, through everything, until all is committed; every process ends in good order."""
    await broker.create(kafka.address, partitions=4, replication_factor=1)
    at = ("--kafka", kafka.address)
    group = f"sink-{cluster}"
    processes = [
        gpustream("stream", "stream", "attribution", *at),
        gpustream("sink", "sink", "remote-write", *at, *sink, "--group", group, "--from", "earliest"),
        gpustream("fleet", "produce", "simulated", *at, "--cluster", cluster, "--fleet", "12x8", "--truth", str(truth)),
    ]
    for process in processes:
        await asyncio.to_thread(process.start)
    await asyncio.sleep(FLEET_S)
    await asyncio.to_thread(processes.pop().stop)
    for _ in range(60):
        behind = await lag(kafka.address, "gpustream-attribution", ["gpu.samples"])
        if behind + await lag(kafka.address, group, ["gpu.attributed"]) == 0:
            break
        await asyncio.sleep(0.5)
    for process in processes:
        await asyncio.to_thread(process.stop)
        assert process.returncode == 0, process.log_tail()


def check_answers(prometheus: PrometheusServer, truth: Truth, cluster: str) -> None:
    """Raw samples per series and timestamp, and what an operator would ask."""
    for metric, value in METRICS:
        expected, found = truth.points(value), stored(prometheus, metric, cluster, "5m")
        assert len(expected) > 1000
        assert differences(expected, found, value) == []
    at_ms = max(point[3] for point in truth.readings)
    latest = latest_readings(truth, at_ms)
    by_pod: dict[tuple[str, str], float] = defaultdict(float)
    for expected_one in latest.values():
        if len(expected_one.holders) == 1:
            by_pod[next(iter(expected_one.holders))] += expected_one.values["memory_used_bytes"]
    query = (
        f'sum by (k8s_namespace_name, k8s_pod_name) (gpu_memory_used{{k8s_cluster_name="{cluster}",k8s_pod_name!=""}})'
    )
    answer = prometheus.query(query, at_ms)
    assert {(s.labels["k8s_namespace_name"], s.labels["k8s_pod_name"]): s.value for s in answer} == by_pod
    assert len(by_pod) > 5
    count = prometheus.query(f'count(gpu_memory_used{{k8s_cluster_name="{cluster}"}})', at_ms)
    assert [series.value for series in count] == [len(latest)]


def latest_readings(truth: Truth, at_ms: int) -> dict[tuple[str, str], Expected]:
    """What an instant query at that time should see: each device's last reading at or before it."""
    newest: dict[tuple[str, str], Point] = {}
    for point in sorted(truth.readings, key=lambda point: point[3]):
        if point[3] <= at_ms and "memory_used_bytes" in truth.readings[point].values:
            newest[point[1], point[2]] = point
    return {device: truth.readings[point] for device, point in newest.items()}


@pytest.mark.parametrize("protocol", ["1.0", "2.0", "auto"])
async def test_prometheus_answers_what_the_fleet_did(
    empty_kafka: KafkaServer,
    prometheus: PrometheusServer,
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
    protocol: str,
) -> None:
    cluster, truth = f"prometheus-{protocol}", tmp_path / "truth.jsonl"
    sink = ("--url", prometheus.write_url, "--protocol", protocol)
    await run_fleet(empty_kafka, gpustream, truth, cluster, *sink)
    await asyncio.to_thread(check_answers, prometheus, Truth.read(truth), cluster)


@pytest.mark.parametrize("protocol", ["1.0", "auto"])
async def test_an_older_prometheus_answers_the_same(
    empty_kafka: KafkaServer,
    prometheus_2_42: PrometheusServer,
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
    protocol: str,
) -> None:
    cluster, truth = f"older-{protocol}", tmp_path / "truth.jsonl"
    sink = ("--url", prometheus_2_42.write_url, "--protocol", protocol)
    await run_fleet(empty_kafka, gpustream, truth, cluster, *sink)
    await asyncio.to_thread(check_answers, prometheus_2_42, Truth.read(truth), cluster)
