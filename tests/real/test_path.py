"""Fleet -> Kafka -> attribution -> remote write -> Prometheus, and every answer compared with the truth.

One fleet, run once, through one attribution stream into a sink for each protocol and kind of receiver; each Prometheus
runs in its default configuration, without an out-of-order window.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from delivery import topic_admin
from tests.eventually import eventually_sync
from tests.real.conftest import need
from tests.real.pipeline import Expected, Gpustream, Point, Truth, differences, lag, read_all, stored
from tests.real.servers import (
    KafkaServer,
    Missing,
    PrometheusServer,
    find_prometheus,
    find_prometheus_2,
)

NODES, GPUS, TICKS = 12, 8, 15
CLUSTER = "path"
METRICS = (("gpu_utilization", "utilization_ratio"), ("gpu_memory_used", "memory_used_bytes"))
SINKS = {"1.0": "1.0", "2.0": "2.0", "auto": "auto", "older-1.0": "1.0", "older-auto": "auto"}


@dataclass(frozen=True)
class Run:
    """The results: the truth, the records of gpu.attributed, and the receiver of each sink."""

    truth: Truth
    attributed: list[Any]
    receivers: dict[str, PrometheusServer]
    exits: dict[str, int | None]


@pytest.fixture(scope="module")
def path(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The fleet for some seconds, through everything, until all is committed; every process ends in good order."""
    need(find_prometheus)
    kafka.empty()
    directory = tmp_path_factory.mktemp("path")
    with ExitStack() as servers:
        receivers = {
            name: servers.enter_context(PrometheusServer(directory / name, program=program))
            for name in SINKS
            if (program := _program(name)) is not None
        }
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        yield _run(servers, directory, kafka, receivers)


def _program(name: str) -> Path | None:
    if not name.startswith("older"):
        return find_prometheus()
    try:
        return find_prometheus_2()
    except Missing:
        return None


def _run(servers: ExitStack, directory: Path, kafka: KafkaServer, receivers: dict[str, PrometheusServer]) -> Run:
    def process(name: str, *arguments: str) -> Gpustream:
        return servers.enter_context(Gpustream(directory / name, *arguments, "--kafka", kafka.address))

    truth = directory / "truth.jsonl"
    size = ("--fleet", f"{NODES}x{GPUS}", "--seed", "3", "--pod-life", "3m")
    fleet = ("--cluster", CLUSTER, *size, "--truth", str(truth))
    processes = {"stream": process("stream", "stream", "attribution")}
    for name, receiver in receivers.items():
        to = ("--url", receiver.write_url, "--protocol", SINKS[name], "--group", f"sink-{name}", "--from", "earliest")
        processes[name] = process(f"sink-{name}", "sink", "remote-write", *to)
    processes["fleet"] = process("fleet", "produce", "simulated", *fleet)
    eventually_sync(lambda: len(Truth.read(truth).ticks) >= NODES * TICKS, "all have ticked so often", every_s=1)
    processes["fleet"].stop()
    eventually_sync(lambda: _behind(kafka.address, [f"sink-{name}" for name in receivers]) == 0, "all is delivered")
    for running in processes.values():
        running.stop()
    attributed = asyncio.run(read_all(kafka.address, "gpu.attributed"))
    return Run(
        Truth.read(truth), attributed, receivers, {name: process.returncode for name, process in processes.items()}
    )


def _behind(kafka: str, sinks: Iterable[str]) -> int:
    behind = asyncio.run(lag(kafka, "gpustream-attribution", ["gpu.samples"]))
    return behind + sum(asyncio.run(lag(kafka, group, ["gpu.attributed"])) for group in sinks)


def test_every_process_ends_in_good_order(path: Run) -> None:
    assert set(path.exits.values()) == {0}, path.exits


def test_every_tick_is_attributed_once_to_the_containers_that_the_kubelet_reported(path: Run) -> None:
    ticks = [json.loads(record.value) for record in path.attributed]
    tick_by_id = {(t["cluster"], t["node"], t["run_id"], t["seq"]): t for t in ticks}
    assert tick_by_id.keys() == path.truth.ticks
    assert len(ticks) == len(tick_by_id)
    assert {tick["attribution"] for tick in ticks} == {"exact"}
    for point, expected in path.truth.readings.items():
        devices = tick_by_id[path.truth.of_tick[point]]["devices"]
        device = next(d for d in devices if d["uuid"] == point[2])
        holders = {(h["namespace"], h["pod"], h["container"]) for h in device.get("holders", [])}
        assert holders == expected.containers, point
    assert sum(len(expected.holders) for expected in path.truth.readings.values()) > len(path.truth.readings) / 4


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize(("metric", "value"), METRICS)
def test_prometheus_has_each_sample_under_its_holder_at_its_time(path: Run, name: str, metric: str, value: str) -> None:
    expected, stored_samples = path.truth.points(value), stored(_receiver(path, name), metric, CLUSTER, "5m")
    assert len(expected) > 1000
    assert differences(expected, stored_samples, value) == []


@pytest.mark.parametrize("name", SINKS)
def test_prometheus_answers_which_pod_holds_how_much_memory(path: Run, name: str) -> None:
    at_ms = max(point[3] for point in path.truth.readings)
    latest = _latest(path.truth, at_ms)
    by_pod: dict[tuple[str, str], float] = defaultdict(float)
    for expected in latest.values():
        if len(expected.holders) == 1:
            by_pod[next(iter(expected.holders))] += expected.values["memory_used_bytes"]
    held_selector = f'gpu_memory_used{{k8s_cluster_name="{CLUSTER}",k8s_pod_name!=""}}'
    answer = _receiver(path, name).query(f"sum by (k8s_namespace_name, k8s_pod_name) ({held_selector})", at_ms)
    count = _receiver(path, name).query(f'count(gpu_memory_used{{k8s_cluster_name="{CLUSTER}"}})', at_ms)
    assert {(s.labels["k8s_namespace_name"], s.labels["k8s_pod_name"]): s.value for s in answer} == by_pod
    assert [series.value for series in count] == [len(latest)]
    assert len(by_pod) > 5


def _receiver(path: Run, name: str) -> PrometheusServer:
    if name not in path.receivers:
        pytest.skip("OPTIONAL REAL SERVER MISSING: a Prometheus that takes remote write 1.0 only")
    return path.receivers[name]


def _latest(truth: Truth, at_ms: int) -> dict[tuple[str, str], Expected]:
    """The expected answer of an instant query at that time: each device's last reading at or before it."""
    newest: dict[tuple[str, str], Point] = {}
    for point in sorted(truth.readings, key=lambda point: point[3]):
        if point[3] <= at_ms and "memory_used_bytes" in truth.readings[point].values:
            newest[point[1], point[2]] = point
    return {device: truth.readings[point] for device, point in newest.items()}
