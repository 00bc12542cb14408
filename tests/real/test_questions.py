"""The questions of docs/how-to/queries.md, answered by Prometheus, each compared with the truth.

Two simulated clusters whose nodes have the same names, and a node of Slurm, through one stream and one sink; and a node
whose GPUs are split, as the stream would write it. Beside them stand kube-state-metrics' series of the first cluster,
once with labels renamed to ours and once as they are.
"""

import asyncio
import json
import re
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cramjam
import msgspec
import pytest

from delivery import topic_admin
from delivery.connection import Connection
from delivery.instruments import Instruments
from delivery.sender import Sender
from producers.publisher import INSTRUMENTS, NodePublisher
from sinks.remote_write import encode_v1
from sinks.series.model import Row, SampleGroup, SeriesSet
from tests.eventually import LIMIT_S, eventually_sync
from tests.real.conftest import need
from tests.real.pipeline import Gpustream, Truth, lag, read_all, sender_to
from tests.real.servers import KafkaServer, PrometheusServer, Series, find_prometheus
from tests.sinks.alerts import alert
from topics.topic import node_key

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "queries.md"
CLUSTERS = ("prod-us-east-1", "prod-eu-west-1")
OUR_CLUSTER = CLUSTERS[0]
NODES = 10
TICKS = 3
"""So many ticks of each node are enough for every query."""

JOB = {"id": "12345", "user": "ada", "partition": "gpu"}
IDLE = 0.05
QUANTITIES = {
    "utilization_ratio": "gpu_utilization_ratio",
    "memory_used_bytes": "memory_used_bytes",
    "power_watts": "power_watts",
}
"""What a device is split by, and the key of the whole."""

OTHERS: list[tuple[Hashable, float]] = [((None,), 0.5), *[((None,), 0.6)] * 3]
"""The utilization of the devices that are not the fleets': they are no one pod's."""

SPLIT_NODE = "split-1"
NOT_RENAMED = "kube_pod_labels_as_they_are"
"""Where the test keeps those that were not renamed: a Prometheus has one form of them."""

Device = dict[str, Any]
Labels = Mapping[str, str]


@dataclass(frozen=True)
class AnsweredQuestions:
    """A Prometheus with all samples, the time of queries, and the truth of the first cluster at that time."""

    prometheus: PrometheusServer
    at_ms: int
    devices: list[Device]
    last: list[tuple[str, Device]]
    """The cluster and the record of every device in the last tick of its node."""

    def ask(self, query: str) -> list[Series]:
        if "label_replace" in query:
            query = query.replace("kube_pod_labels", NOT_RENAMED)
        return self.prometheus.query(query, self.at_ms)

    def held(self) -> list[tuple[Device, dict[str, Any]]]:
        """The devices that exactly one pod holds, and that pod."""
        pods = [
            (device, {(holder["namespace"], holder["pod"]): holder for holder in device["reported"]})
            for device in self.devices
        ]
        return [(device, next(iter(by_pod.values()))) for device, by_pod in pods if len(by_pod) == 1]


@pytest.fixture(scope="module")
def fleet_answers(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnsweredQuestions]:
    """The fleets for some seconds, through everything, until all is in Prometheus."""
    need(find_prometheus)
    kafka.empty()
    directory = tmp_path_factory.mktemp("questions")
    with ExitStack() as servers:
        prometheus = servers.enter_context(PrometheusServer(directory / "prometheus"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        yield _collect_answers(servers, directory, kafka.address, prometheus)


def _collect_answers(
    servers: ExitStack, directory: Path, kafka: str, prometheus: PrometheusServer
) -> AnsweredQuestions:
    def process(name: str, *arguments: str) -> Gpustream:
        gpustream = servers.enter_context(Gpustream(directory / name, *arguments, "--kafka", kafka))
        servers.callback(gpustream.stop)  # it leaves its group
        return gpustream

    process("stream", "stream", "attribution")
    # dcgm-exporter's names beside ours: gpu_holders and the like then have both label sets
    names = ("--names", "otel,dcgm")
    process("sink", "sink", "remote-write", "--url", prometheus.write_url, "--from", "earliest", *names)
    fleets = [
        process(cluster, *_fleet(cluster, seed, directory / f"{cluster}.jsonl"))
        for seed, cluster in enumerate(CLUSTERS)
    ]
    asyncio.run(_slurm(kafka))
    asyncio.run(_split(kafka))
    asyncio.run(_alerts(kafka))
    truths = [directory / f"{cluster}.jsonl" for cluster in CLUSTERS]
    eventually_sync(lambda: len(Truth.read(*truths).ticks) >= TICKS * NODES * len(CLUSTERS), every_s=0.5)
    for fleet in fleets:
        fleet.stop()
    eventually_sync(lambda: _behind(kafka) == 0, "all is delivered", every_s=0.5)
    records = [json.loads(record.value) for record in asyncio.run(read_all(kafka, "gpu.attributed"))]
    devices = _devices(directory / f"{OUR_CLUSTER}.jsonl", records)
    at_ms = max(device["ts_ms"] for device in devices)
    _kube_state_metrics(prometheus, at_ms, devices)
    return AnsweredQuestions(prometheus, at_ms, devices, _last(records, at_ms))


def _fleet(cluster: str, seed: int, truth: Path) -> tuple[str, ...]:
    size = ("--fleet", f"{NODES}x8", "--seed", str(seed), "--pod-life", "10m")
    return ("produce", "simulated", "--cluster", cluster, *size, "--truth", str(truth))


async def _slurm(kafka: str) -> None:
    """A node without Kubernetes, one of whose two GPUs runs a job."""
    async with sender_to(Connection(kafka)) as sender:
        instruments = Instruments(INSTRUMENTS)
        now_ms = time.time_ns() // 1_000_000
        publisher = NodePublisher(sender, instruments, cluster=OUR_CLUSTER, node="slurm-1", run_id=now_ms)
        running = asyncio.create_task(publisher.run())
        for number, share in enumerate((0.25, 0.5)):
            devices: list[Device] = [
                {"uuid": "GPU-slurm-0", "index": 0, "metrics": {"gpu_utilization_ratio": share}, "jobs": [JOB]},
                {"uuid": "GPU-slurm-1", "index": 1, "metrics": {"temperature_celsius": 41}},
            ]
            publisher.publish(now_ms + number, devices, None)
        assert await publisher.drain(20) == 0
        running.cancel()


async def _split(kafka: str) -> None:
    """Three ticks of a node of whose three devices, the second a MIG device, pods share: one has XID errors, on one
    runs a pod that was not given it, and one is scaled.
    """
    async with sender_to(Connection(kafka)) as sender:
        now_ms = time.time_ns() // 1_000_000
        for seq in (1, 2, 3):
            value = json.dumps(_split_tick(seq, now_ms - 3000 + 1000 * seq)).encode()
            await (await sender.send("gpu.attributed", value, key=node_key(OUR_CLUSTER, SPLIT_NODE)))


def _split_tick(seq: int, ts_ms: int) -> dict[str, Any]:
    mig = {"uuid": "MIG-split-1", "parent_uuid": "GPU-split-1", "gpu_instance": 7, "profile": "1g.10gb"}
    xids = {"79": seq} | ({"48": 1} if seq == 3 else {})
    events = [{"kind": "xid", "code": 79, "holders": [{"namespace": "shared", "pod": "before"}]}]
    devices = [
        _split_device("GPU-split-0", seq, {"alone": (0.1, 0.2), "beside": (0.3,)}, xids=xids, events=events),
        _split_device(
            "MIG-split-1", seq, {"alone": (0.5,), "beside": (0.25,)}, mig=mig, conflict="unallocated_process"
        ),
        _split_device("GPU-split-2", seq, {"alone": (0.6,), "beside": (0.4,)}, split_scaled=True),
    ]
    header = {"schema": 1, "cluster": OUR_CLUSTER, "node": SPLIT_NODE, "run_id": 1, "seq": seq, "ts_ms": ts_ms}
    return {**header, "offset": seq, "attribution": "exact", "devices": devices}


def _split_device(uuid: str, seq: int, shares: Mapping[str, Iterable[float]], **fields: Any) -> Device:
    """A device of which the containers of these pods have these shares."""
    metrics = {"gpu_utilization_ratio": 0.6, "memory_used_bytes": (64 << 30) + seq, "power_watts": 600.0 + seq}
    holders = [
        {
            "namespace": "shared",
            "pod": pod,
            "pod_uid": f"uid-{pod}",
            "container": f"c{number}",
            "parts": {quantity: share * metrics[key] for quantity, key in QUANTITIES.items()},
        }
        for pod, shares_of_pod in shares.items()
        for number, share in enumerate(shares_of_pod)
    ]
    given_shares = sum(share for shares_of_pod in shares.values() for share in shares_of_pod)
    rest = {quantity: max(0.0, 1 - given_shares) * metrics[key] for quantity, key in QUANTITIES.items()}
    info = {"driver_version": "570.124.06", "processes_visible": "false"}
    return {"uuid": uuid, "metrics": metrics, "holders": holders, "unattributed": rest, "info": info, **fields}


async def _alerts(kafka: str) -> None:
    """Two alerts that have fired for five minutes, one of them updated ten times, and one that did for two minutes,
    until eight minutes ago."""
    sender, now_ms = Sender(Connection(kafka), client_id="alerts"), time.time_ns() // 1_000_000
    await sender.start()
    minutes = {("ml", "a"): (5, None), ("ml", "b"): (5, None), ("search", "c"): (10, 8)}
    for (namespace, pod), (began_min, over) in minutes.items():
        labels = {"k8s_cluster_name": OUR_CLUSTER, "k8s_namespace_name": namespace, "k8s_pod_name": pod}
        ends_ms = None if over is None else now_ms - over * 60_000
        firing = alert(pod, now_ms - began_min * 60_000, ends_ms, labels=labels)
        for revision in range(11 if pod == "a" else 1):
            value = msgspec.json.encode(msgspec.structs.replace(firing, revision=revision))
            await (await sender.send("gpu.alerts", value, key=firing.fingerprint.encode()))
    await sender.stop()


def _last(records: Iterable[Mapping[str, Any]], at_ms: int) -> list[tuple[str, Device]]:
    """Every device as its node's last tick until then has it, and its node's name."""
    ticks = {(tick["cluster"], tick["node"]): tick for tick in records if tick["ts_ms"] <= at_ms}
    return [
        (cluster, {**device, "node": node}) for (cluster, node), tick in ticks.items() for device in tick["devices"]
    ]


def _behind(kafka: str) -> int:
    pairs = (
        ("gpustream-attribution", ["gpu.samples"]),
        ("gpustream-sink-remote-write", ["gpu.attributed", "gpu.alerts"]),
    )
    return sum(asyncio.run(lag(kafka, group, topics)) for group, topics in pairs)


def _devices(truth: Path, records: Iterable[Mapping[str, Any]]) -> list[Device]:
    """Each device of the fleet in its last tick, by the truth and by its record."""
    described = {
        (tick["node"], tick["run_id"], tick["seq"], device["uuid"]): device
        for tick in records
        if tick["cluster"] == OUR_CLUSTER
        for device in tick["devices"]
    }
    last: dict[tuple[str, str], Device] = {}
    for row in map(json.loads, truth.read_text().splitlines()):
        record = described[row["node"], row["run_id"], row["seq"], row["uuid"]]
        last[row["node"], row["uuid"]] = {**row, "index": record["index"], "metrics": record["metrics"]}
    return list(last.values())


def _kube_state_metrics(prometheus: PrometheusServer, at_ms: int, devices: Iterable[Device]) -> None:
    """The metrics of kube-state-metrics about the cluster's pods: as they are, and renamed by the scrape."""
    pods = {(h["namespace"], h["pod"]): h["labels"]["app"] for device in devices for h in device["reported"]}
    groups = []
    for (namespace, pod), app in pods.items():
        renamed = (("k8s_namespace_name", namespace), ("k8s_pod_label_app", f"ksm-{app}"), ("k8s_pod_name", pod))
        own_labels = (("label_app", f"ksm-{app}"), ("namespace", namespace), ("pod", pod))
        groups.append(SampleGroup(SeriesSet(renamed, (Row("kube_pod_labels"),)), at_ms, [1.0]))
        groups.append(SampleGroup(SeriesSet(own_labels, (Row(NOT_RENAMED),)), at_ms, [1.0]))
    body = bytes(cramjam.snappy.compress_raw(b"".join(encode_v1.pieces(groups))))
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "snappy"}
    request = urllib.request.Request(prometheus.write_url, body, headers)  # noqa: S310 - http, and ours
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
        assert answer.status in (200, 204)


def _queries() -> list[str]:
    """The page's queries, in order."""
    return [block.strip() for block in re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)]


def _query(*substrings: str) -> str:
    """The page's only query that has all of these words."""
    (query,) = [query for query in _queries() if all(word in query for word in substrings)]
    return query


def _mean(values: Iterable[tuple[Hashable, float]]) -> dict[Hashable, Any]:
    """The mean of each key, to be compared by approximation."""
    by: dict[Hashable, list[float]] = defaultdict(list)
    for key, value in values:
        by[key].append(value)
    return {key: pytest.approx(sum(values) / len(values), abs=1e-9) for key, values in by.items()}


def _by(answer: Iterable[Series], *names: str) -> dict[Hashable, float]:
    """An answer by these labels; a series without one of them has None there."""
    return {tuple(series.labels.get(name) for name in names): series.value for series in answer}


def _used(device: Device) -> float | None:
    value: float | None = device["metrics"].get("gpu_utilization_ratio")
    return value


def _workload(kind: str) -> Callable[[dict[str, Any]], str | None]:
    return lambda pod: pod["workload"]["name"] if pod["workload"]["kind"] == kind else None


def _utilization(
    fleet_answers: AnsweredQuestions, key: Callable[[dict[str, Any]], Hashable]
) -> list[tuple[Hashable, float]]:
    """The utilization of every device that has it, by ``key`` of its sole pod, or None without one."""
    pods = {device["uuid"]: pod for device, pod in fleet_answers.held()}
    rows = [(device, pods.get(device["uuid"])) for device in fleet_answers.devices]
    return [((key(pod) if pod else None,), used) for device, pod in rows if (used := _used(device)) is not None]


def test_every_query_of_the_page_is_answered(fleet_answers: AnsweredQuestions) -> None:
    queries = [
        re.sub("bert-finetune-v3", ".+", query).replace('k8s_job_name=".+"', 'k8s_job_name=~".+"')
        for query in _queries()
    ]

    assert len(queries) == 23
    assert [query for query in queries if not fleet_answers.ask(query)] == []


def test_what_a_namespace_uses_on_average(fleet_answers: AnsweredQuestions) -> None:
    answer = fleet_answers.ask(
        _query('avg by (k8s_namespace_name) (gpu_utilization{k8s_cluster_name="prod-us-east-1"}')
    )
    assert _by(answer, "k8s_namespace_name") == _mean(
        [*_utilization(fleet_answers, lambda pod: pod["namespace"]), *OTHERS]
    )
    assert len(answer) > 4

    alone = _by(fleet_answers.ask(_query("avg by (k8s_namespace_name)", "unless")), "k8s_namespace_name")
    assert {key: value for key, value in alone.items() if key != (None,)} == _mean(
        [row for row in _utilization(fleet_answers, lambda pod: pod["namespace"]) if row[0] != (None,)]
    )


def test_what_an_app_uses_on_average(fleet_answers: AnsweredQuestions) -> None:
    answer = fleet_answers.ask(_query("avg by (k8s_pod_label_app)"))
    assert _by(answer, "k8s_pod_label_app") == _mean(
        [*_utilization(fleet_answers, lambda pod: pod["labels"]["app"]), *OTHERS]
    )
    assert len(answer) > 4


def test_the_memory_of_a_deployment(fleet_answers: AnsweredQuestions) -> None:
    answer = fleet_answers.ask(_query("avg by (k8s_deployment_name"))
    deployment = _workload("Deployment")
    rows = [
        ((deployment(pod), pod["namespace"]), 100.0 * m["memory_used_bytes"] / m["memory_total_bytes"])
        for device, pod in fleet_answers.held()
        if "memory_total_bytes" in (m := device["metrics"]) and deployment(pod)
    ]
    memory = {key: value for key, value in _by(answer, "k8s_deployment_name", "k8s_namespace_name").items() if key[0]}  # type: ignore[index]

    assert memory == _mean(rows)
    assert len(memory) > 1


def test_what_a_statefulset_uses(fleet_answers: AnsweredQuestions) -> None:
    answer = _by(fleet_answers.ask(_query("avg by (k8s_statefulset_name)")), "k8s_statefulset_name")
    expected = _mean(_utilization(fleet_answers, _workload("StatefulSet")))

    assert {key: value for key, value in answer.items() if key != (None,)} == {
        key: value for key, value in expected.items() if key != (None,)
    }
    assert len(answer) > 2


def test_what_a_job_does_on_each_gpu(fleet_answers: AnsweredQuestions) -> None:
    job = _workload("Job")
    name = next(job(pod) for device, pod in fleet_answers.held() if job(pod) and _used(device) is not None)
    answer = fleet_answers.ask(_query("avg by (gpu_index)").replace("bert-finetune-v3", str(name)))
    rows = [
        ((str(device["index"]),), used)
        for device, pod in fleet_answers.held()
        if job(pod) == name and (used := _used(device)) is not None
    ]

    assert _by(answer, "gpu_index") == _mean(rows)


def test_what_a_job_of_slurm_does(fleet_answers: AnsweredQuestions) -> None:
    (series,) = fleet_answers.ask(_query('job_id="12345"'))

    assert series.value == 0.5
    assert (series.labels["job_user"], series.labels["job_partition"]) == ("ada", "gpu")
    assert series.labels["gpu_uuid"] == "GPU-slurm-0"


def _memory_by_namespace(last: Iterable[tuple[str, Device]]) -> dict[Hashable, float]:
    """Our cluster's memory in use: pods' parts if a device has some, else the device's, by its sole holder."""
    by: dict[Hashable, float] = defaultdict(float)
    for cluster, device in last:
        memory = device["metrics"].get("memory_used_bytes")
        holders = device.get("holders", ())
        parts = [(holder["namespace"], holder["parts"]["memory_used_bytes"]) for holder in holders if "parts" in holder]
        pods = {(holder["namespace"], holder["pod"]) for holder in holders}
        sole_namespace = next(iter(pods))[0] if len(pods) == 1 else None
        for namespace, used in parts or [(sole_namespace, memory)]:
            if cluster == OUR_CLUSTER and used is not None:
                by[namespace,] += used
    return by


def test_the_memory_of_a_namespace_alone_and_shared(fleet_answers: AnsweredQuestions) -> None:
    memory = _by(fleet_answers.ask(_query("sum by (k8s_namespace_name)", "gpu_pod_memory")), "k8s_namespace_name")

    assert memory == pytest.approx(_memory_by_namespace(fleet_answers.last), rel=1e-9)
    assert memory["shared",] > 64 << 30


@pytest.mark.parametrize(("quantity", "key"), QUANTITIES.items())
def test_the_parts_and_the_rest_are_the_device(fleet_answers: AnsweredQuestions, quantity: str, key: str) -> None:
    query = _query("sum by (k8s_cluster_name, gpu_uuid, gpu_mig_uuid)", "unattributed").replace(
        "memory_used_bytes", quantity
    )
    expected = {
        _identity(device): device["metrics"][key]
        for cluster, device in fleet_answers.last
        if cluster == OUR_CLUSTER and any(quantity in holder.get("parts", ()) for holder in device.get("holders", ()))
    }

    assert _by(fleet_answers.ask(query), "gpu_uuid", "gpu_mig_uuid") == pytest.approx(expected, rel=1e-9)
    assert {("GPU-split-0", None), ("GPU-split-1", "MIG-split-1"), ("GPU-split-2", None)} <= expected.keys()


def _identity(device: Device) -> Hashable:
    mig = device.get("mig")
    return (mig["parent_uuid"], device["uuid"]) if mig else (device["uuid"], None)


def test_devices_whose_processes_say_otherwise(fleet_answers: AnsweredQuestions) -> None:
    conflicts = _by(fleet_answers.ask(_query("gpu_attribution_conflict")), "gpu_uuid", "gpu_mig_uuid", "reason")
    expected = {
        (*_identity(device), device["conflict"]): 1.0  # type: ignore[misc]
        for cluster, device in fleet_answers.last
        if cluster == OUR_CLUSTER and device.get("conflict")
    }

    assert conflicts == expected
    assert ("GPU-split-1", "MIG-split-1", "unallocated_process") in conflicts


def test_xid_errors_of_the_last_hour_the_first_of_a_code_among_them(fleet_answers: AnsweredQuestions) -> None:
    xids = _by(fleet_answers.ask(_query("gpu_xid_errors_total")), "gpu_uuid", "gpu_mig_uuid", "xid")
    own_devices = [device for cluster, device in fleet_answers.last if cluster == OUR_CLUSTER]

    assert xids.keys() == {(*_identity(device), code) for device in own_devices for code in device.get("xids", ())}  # type: ignore[misc]
    assert xids["GPU-split-0", None, "48"] == 1.0
    assert ("GPU-split-0", None, "79") in xids


def test_xid_errors_of_the_last_hour_by_the_pod_that_held_the_gpu_then(fleet_answers: AnsweredQuestions) -> None:
    xids = _by(fleet_answers.ask(_query("gpu_pod_xid_errors")), "k8s_namespace_name", "k8s_pod_name", "xid")

    assert xids["shared", "before", "79"] == 3.0


def test_which_drivers_there_are(fleet_answers: AnsweredQuestions) -> None:
    drivers = _by(fleet_answers.ask(_query("gpu_info", "driver_version")), "driver_version", "processes_visible")
    infos = [device["info"] for cluster, device in fleet_answers.last if cluster == OUR_CLUSTER and "info" in device]

    assert drivers == Counter((info["driver_version"], info.get("processes_visible")) for info in infos)
    assert {("570.124.06", "true"), ("550.163.01", "true"), ("570.124.06", "false")} <= drivers.keys()


def test_the_memory_of_whole_gpus_is_counted_once(fleet_answers: AnsweredQuestions) -> None:
    memory = _by(fleet_answers.ask(_query("sum by (k8s_node_name) (gpu_memory_used")), "k8s_node_name")
    truth: dict[Hashable, float] = defaultdict(float)
    for node, device in _own_devices(fleet_answers):
        if "mig" not in device and "memory_used_bytes" in device["metrics"]:
            truth[(node,)] += device["metrics"]["memory_used_bytes"]

    assert memory == pytest.approx(truth)


def test_the_memory_of_what_can_be_held_is_counted_once(fleet_answers: AnsweredQuestions) -> None:
    (total,) = fleet_answers.ask(_query("sum(gpu_memory_total"))
    totals = {
        (node, device["uuid"]): device["metrics"].get("memory_total_bytes", 0.0)
        for node, device in _own_devices(fleet_answers)
        if "mig" in device or device.get("info", {}).get("mig_mode") != "enabled"
    }

    assert total.value == pytest.approx(sum(totals.values()))
    assert any("mig" in device for _, device in _own_devices(fleet_answers))


def test_the_memory_errors_of_a_day_by_node_and_type(fleet_answers: AnsweredQuestions) -> None:
    errors = _by(fleet_answers.ask(_query("increase(gpu_ecc_errors")), "k8s_node_name", "gpu_ecc_error_type")
    keys = {"correctable": "ecc_corrected_volatile_total", "uncorrectable": "ecc_uncorrected_volatile_total"}

    assert errors.keys() == {
        (node, error)
        for node, device in _own_devices(fleet_answers)
        for error, key in keys.items()
        if key in device["metrics"]
    }


def _own_devices(fleet_answers: AnsweredQuestions) -> list[tuple[str, Device]]:
    """Our cluster's devices in the last tick of their node, and their node."""
    return [(device["node"], device) for cluster, device in fleet_answers.last if cluster == OUR_CLUSTER]


def test_how_many_alerts_fire_in_which_namespaces(fleet_answers: AnsweredQuestions) -> None:
    firing = _by(fleet_answers.ask(_query("gpu_alert_firing", "count by")), "alertname", "k8s_namespace_name")

    assert firing == {("GPUHeldIdle", "ml"): 2.0}


def test_the_gpu_hours_that_were_held_and_idle_are_the_same_however_often_an_alert_is_updated(
    fleet_answers: AnsweredQuestions,
) -> None:
    hours = _by(fleet_answers.ask(_query("gpu_alert_firing", "sum_over_time")), "k8s_namespace_name")

    minute = 1.001 / 60
    assert hours == {("ml",): pytest.approx(2 * 5.5 / 60, abs=minute), ("search",): pytest.approx(2 / 60, abs=minute)}


@pytest.mark.parametrize(("query_words", "is_held"), [("} < 0.05", False), (") < 0.05", True)])
def test_idle_gpus_are_reported_by_whether_anybody_holds_them(
    fleet_answers: AnsweredQuestions, query_words: str, is_held: bool
) -> None:
    idle_uuids = {
        series.labels.get("gpu_mig_uuid") or series.labels["gpu_uuid"]
        for series in fleet_answers.ask(_query(query_words))
    }
    expected = {
        device["uuid"]
        for device in fleet_answers.devices
        if (used := _used(device)) is not None and used < IDLE and bool(device["reported"]) == is_held
    }

    assert idle_uuids == expected
    assert idle_uuids


def _memory(fleet_answers: AnsweredQuestions, label: Callable[[dict[str, Any]], str]) -> dict[Hashable, float]:
    return {
        (device["uuid"], label(pod)): float(device["metrics"]["memory_used_bytes"])
        for device, pod in fleet_answers.held()
        if "memory_used_bytes" in device["metrics"]
    }


def _by_device(answer: Iterable[Series], label: str) -> dict[Hashable, float]:
    return {
        (series.labels.get("gpu_mig_uuid") or series.labels["gpu_uuid"], series.labels[label]): series.value
        for series in answer
    }


def test_labels_come_from_our_own_info(fleet_answers: AnsweredQuestions) -> None:
    answer = fleet_answers.ask(_query("gpu_pod_info"))

    assert _by_device(answer, "k8s_pod_label_team") == _memory(fleet_answers, lambda pod: pod["labels"]["team"])


@pytest.mark.parametrize("query_words", [("topk", ") kube_pod_labels)"), ("topk", "label_replace")])
def test_the_ten_largest_with_labels_of_kube_state_metrics(
    fleet_answers: AnsweredQuestions, query_words: tuple[str, ...]
) -> None:
    answer = _by_device(fleet_answers.ask(_query(*query_words)), "k8s_pod_label_app")
    memory = _memory(fleet_answers, lambda pod: "ksm-" + pod["labels"]["app"])
    tenth = sorted(memory.values(), reverse=True)[9]

    assert len(answer) == 10
    assert answer.items() <= memory.items()
    assert min(answer.values()) == tenth


def test_the_other_cluster_with_nodes_of_the_same_names_is_another_one(fleet_answers: AnsweredQuestions) -> None:
    query = 'count(count by (k8s_cluster_name, k8s_node_name, gpu_uuid) (gpu_utilization{k8s_node_name="sim-0000"}))'
    nodes = fleet_answers.ask(
        "count by (k8s_cluster_name) (count by (k8s_cluster_name, k8s_node_name) (gpu_utilization))"
    )

    assert _by(nodes, "k8s_cluster_name") == {(OUR_CLUSTER,): 12, (CLUSTERS[1],): 10}
    assert fleet_answers.ask(query)[0].value == 16
