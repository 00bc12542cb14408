"""docker-compose.yml without Docker: its commands and its Prometheus as processes, and what every panel then shows.

Each query of each dashboard is asked at one moment, and its answer held against the simulated truth, by number. Beside
the fleet is a node with every fault, which the alert stream judges as any other; and hours of usage of two teams.
"""

import asyncio
import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from delivery.connection import Connection
from delivery.sender import Sender
from tests.docs.page import blocks
from tests.eventually import LIMIT_S, eventually_sync
from tests.k8s import dashboard
from tests.k8s.dashboard import Query
from tests.real import dashboards_truth, receivers
from tests.real.conftest import need
from tests.real.dashboards_expected import (
    EXPECTED,
    GPU,
    NODE,
    OF_DEVICE,
    PROMETHEUS_ALERTS,
    RANGE_MS,
    RATE_MS,
    UTILIZATION,
    WORKLOAD,
    count,
    grouped_rows,
    holders_of_devices,
    metric_of,
    named,
    pods,
    present,
)
from tests.real.dashboards_truth import (
    SERIES,
    Answer,
    DeviceState,
    Truth,
    grouped,
    holding,
    number,
    of_pods,
)
from tests.real.pipeline import Gpustream, read_all, sender_to
from tests.real.servers import KafkaServer, PrometheusServer, find_java, find_kafka, find_prometheus
from tests.test_compose import OURS, config
from topics import catalogue
from topics.alerts import Alert
from topics.profiles import PROFILES
from topics.times import epoch_ms
from topics.topic import node_key
from topics.usage import Usage

STAYING = ("producer", "attribution", "alerts", "usage", "remote-write")
NODES = 4
CLUSTER, FAULTY = "compose", "faulty"
WINDOWS = {"idle": "5s", "__rate_interval": "8s", "__range": "16s"}
ALL = {"cluster": ".+", "namespace": ".*", "node": ".*", "workload": ".*", "job": ".*", "instance": ".*", "team": ".*"}
"""The variables as Grafana fills them for All."""


class ComposePrometheus(PrometheusServer):
    """Prometheus in the configuration of the compose file, with the processes' addresses for the services' names.

    It sends all that it has to ``receiver``.
    """

    def __init__(self, directory: Path, targets: Sequence[str], receiver: PrometheusServer | None = None) -> None:
        super().__init__(directory)
        self.targets, self.receiver = list(targets), receiver

    def prepare(self) -> None:
        """Writes the configuration, with everything looked at each second and no Alertmanager."""
        settings: dict[str, Any] = config("prometheus")
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(dashboard.PROMETHEUS / Path(name).name) for name in settings["rule_files"]]
        del settings["alerting"]
        (job,) = settings["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": self.targets}]
        if self.receiver is not None:
            in_order = {"min_shards": 1, "max_shards": 1, "batch_send_deadline": "1s"}
            settings["remote_write"] = [{"url": self.receiver.write_url, "queue_config": in_order}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its health and its state."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
            groups = json.load(answer)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


class Fleet(NamedTuple):
    """The processes, what answers queries, the truth of the time that they are about, and which alerts fire.

    ``by_pod``: what has the fleet's series as ``--parts-by-pod`` writes them, and dcgm-exporter's beside them.
    """

    processes: dict[str, Gpustream]
    prometheus: ComposePrometheus
    receiver: PrometheusServer
    by_pod: PrometheusServer
    truth: Truth
    alerts: list[dict[str, str]]

    def ask(self, query: Query, chosen: dict[str, str], at_ms: int | None = None) -> Answer:
        """What the query answers with these variables, at that time or at the one of the truth."""
        expr = dashboard.filled(query.expr, ALL | WINDOWS | {"price": "2.50"} | chosen)
        return dashboards_truth.answer(self.receiver.query(expr, self.truth.at_ms if at_ms is None else at_ms))


class Network:
    """The names of the compose file's network, as addresses of this machine."""

    def __init__(self, kafka: KafkaServer, prometheus: PrometheusServer) -> None:
        self._addresses = {"kafka:29092": kafka.address, "http://prometheus:9090": prometheus.url}

    def arguments(self, service: str) -> list[str]:
        """The service's command."""
        return [self._rewrite(word) for word in OURS[service]["command"]]

    def environment(self, service: str) -> dict[str, str]:
        """What the service is given as environment."""
        return {name: self._rewrite(value) for name, value in OURS[service]["environment"].items()}

    def _rewrite(self, text: str) -> str:
        for name, address in self._addresses.items():
            text = text.replace(name, address)
        return text


@pytest.fixture(scope="module")
def fleet(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The compose file's fleet in its Prometheus, for long enough that every window is full."""
    need(find_java, find_kafka, find_prometheus)
    kafka.empty()
    folder = tmp_path_factory.mktemp("dashboards")
    processes = {name: Gpustream(folder / name) for name in STAYING}
    targets = [f"127.0.0.1:{process.ports[0].number}" for process in processes.values()]
    with ExitStack() as running:
        other = None
        if receivers.chosen() is not PrometheusServer:
            other = running.enter_context(receivers.chosen()(folder / "receiver"))
        prometheus = running.enter_context(ComposePrometheus(folder / "prometheus", targets, other))
        by_pod = running.enter_context(PrometheusServer(folder / "by-pod"))
        network = Network(kafka, prometheus)
        create_topics(network)
        for name, process in processes.items():
            process.arguments, process.environment = network.arguments(name), network.environment(name)
        processes["producer"].arguments += ["--truth", str(folder / "truth.jsonl")]
        second = ("--group", "by-pod", "--parts-by-pod", "--names", "otel,dcgm", "--url", by_pod.write_url)
        sink = Gpustream(folder / "by-pod-sink", "sink", "remote-write", "--kafka", kafka.address, *second)
        for process in (*processes.values(), sink):
            running.enter_context(process)
        prometheus.wait_until(lambda: len(prometheus.query("gpustream_ready == 1")) == len(STAYING))
        asyncio.run(letters(kafka.address))
        fires = 'ALERTS{alertname="GpustreamDeadLetters"}'
        eventually_sync(lambda: prometheus.query(fires), fires)
        at_ms = asyncio.run(faults(kafka.address))
        asyncio.run(usage(kafka.address, at_ms))
        newest = f"max by (k8s_node_name) (timestamp(gpu_power_draw)) > {at_ms / 1000}"
        servers = (prometheus, by_pod)
        eventually_sync(lambda: all(len(server.query(newest)) == NODES + 1 for server in servers), newest)
        hours = "count(gpu_usage_held_seconds) + count(gpu_usage_free_seconds)"
        eventually_sync(
            lambda: [series.value for series in prometheus.query(hours, at_ms)] == [len(HELD_BY) + 1], hours
        )
        records = [record.value for record in asyncio.run(read_all(kafka.address, "gpu.attributed"))]
        judged = f'gpustream_alerts_records_delivered_total{{topic="gpu.attributed"}} >= {len(records)}'
        eventually_sync(lambda: prometheus.query(judged), judged)
        truth = dashboards_truth.read_truth(records, folder / "truth.jsonl", at_ms, "sim-")
        firing = asyncio.run(alerts(kafka.address, at_ms))
        fires = "count(gpu_alert_firing)"
        eventually_sync(lambda: any(series.value >= len(firing) for series in prometheus.query(fires, at_ms)), fires)
        receiver = other or prometheus
        later = f"timestamp(gpustream_ready) > {at_ms / 1000 + 1}"
        eventually_sync(lambda: receiver.query(later), later)
        yield Fleet(processes, prometheus, receiver, by_pod, truth, firing)


def create_topics(network: Network) -> None:
    """Runs the service `topics` to its end."""
    command = [sys.executable, "-m", "gpustream", *network.arguments("topics")]
    environment = os.environ | network.environment("topics")
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert process.returncode == 0, process.stderr


HOLDER = {
    "namespace": "ml",
    "pod": "bert-0",
    "pod_uid": "uid-bert",
    "container": "main",
    "workload": {"kind": "Job", "name": "bert"},
}
LETTERS = 3


async def letters(kafka: str) -> None:
    """Records that can't be decoded."""
    async with sender_to(Connection(kafka)) as sender:
        for letter in range(LETTERS):
            await (await sender.send("gpu.samples", b"not JSON", key=node_key(CLUSTER, f"broken-{letter}")))


async def faults(kafka: str) -> int:
    """Ticks of a node with every fault; the time of the last but one.

    When no more come, the sink ends the node's series after the last one: they are there at that time, however late it
    is when they are asked for.
    """
    sender, began_ms = Sender(Connection(kafka), client_id="faults"), time.time_ns() // 1_000_000
    await sender.start()
    for seq in range(1, RANGE_MS // 1000 + 1):
        await asyncio.sleep(max(0.0, (began_ms + seq * 1000) / 1000 - time.time()))
        ts_ms = began_ms + seq * 1000
        tick = {"schema": 1, "cluster": CLUSTER, "node": FAULTY, "run_id": 1, "seq": seq, "ts_ms": ts_ms}
        tick |= {"offset": seq, "attribution": "exact", "devices": [faulty_device(seq, ts_ms)]}
        await (await sender.send("gpu.attributed", json.dumps(tick).encode(), key=node_key(CLUSTER, FAULTY)))
    await sender.stop()
    return began_ms + RANGE_MS - 1000


def faulty_device(seq: int, ts_ms: int) -> dict[str, Any]:
    """A GPU of a pod, with more errors from the third tick on."""
    metrics = {
        "gpu_utilization_ratio": 0.5,
        "gpu_utilization_mean_ratio": 0.4,
        "graphics_engine_active_ratio": 0.45,
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 1 << 36,
        "power_watts": 300.0,
        "temperature_celsius": 91,
        "clock_event_reasons": 0x44,
        "ecc_corrected_volatile_total": 10 + seq,
        "ecc_uncorrected_volatile_total": 0 if seq < 3 else 2,
        "row_remap_pending": 1,
        "row_remap_failure": 1,
        "retired_pages_pending": 1,
        "retired_pages_double_bit_total": 2,
        "nvlink_crc_errors_total": 5 * seq,
        "nvlink_replay_errors_total": 7 * seq,
        "nvlink_recovery_errors_total": 2 * seq,
        "power_violation_seconds_total": 0.25 * seq,
        "nvlink_tx_bytes_per_second": 1e9,
    }
    xids = {} if seq < 3 else {"79": seq - 2, "13": 1}
    codes = [] if seq < 3 else [79, *([13] if seq == 3 else [])]
    events = [{"kind": "xid", "code": code, "ts_ms": ts_ms, "holders": [HOLDER]} for code in codes]
    info = {"driver_version": "570.124.06", "serial": "1"}
    return {
        "uuid": "GPU-faulty", "index": 0, "vendor": "nvidia", "model": "NVIDIA H100 80GB HBM3", "state": "ok",
        "info": info, "metrics": metrics, "holders": [HOLDER], "conflict": "no_pod", "xids": xids, "events": events,
    }  # fmt: skip


async def alerts(kafka: str, at_ms: int) -> list[dict[str, str]]:
    """The labels of the alerts that fire at a time, as gpu.alerts has them."""
    last: dict[bytes, Alert] = {}
    for record in await read_all(kafka, "gpu.alerts"):
        alert = msgspec.json.decode(record.value, type=Alert) if record.value else None
        if alert is not None and epoch_ms(alert.starts_at) <= at_ms:
            last[record.key] = alert
    return [alert.labels for alert in last.values() if alert.ends_at is None or epoch_ms(alert.ends_at) > at_ms]


HELD_BY = {
    ("ml", "Job", "bert", "research"): (7200, 5400, 900, 3_600_000),
    ("web", "Deployment", "llm", "platform"): (3600, 900, 1800, 900_000),
    ("ml", "Job", "cut", "research"): (700, 350, 70, 50_000),
    ("a100", "SlurmJob", "4242", "physics"): (3600, 3000, 0, 700_000),
}
"""Seconds held, used and idle, and joules, of an hour, by namespace, workload and team."""

SLICES = {"cut": 2}
"""How many of the 7 slices of its GPU a workload's device has, if not all."""

FREE_S = 1800


async def usage(kafka: str, at_ms: int) -> None:
    """An hour of gpu.usage, which ended a second before, on its way through the sink."""
    records = [
        hour(at_ms - 1000, "held", devices, namespace=namespace, pod=f"{name}-0", team=team)
        | {"workload": {"kind": kind, "name": name}, "slice_ms": devices[0] * 1000 * SLICES.get(name, 7)}
        for (namespace, kind, name, team), devices in HELD_BY.items()
    ]
    records.append(hour(at_ms - 1000, "free", (FREE_S, 0, 0, 400_000)))
    async with sender_to(Connection(kafka)) as sender:
        for record in (msgspec.convert(record, Usage) for record in records):
            await (await sender.send("gpu.usage", msgspec.json.encode(record), key=record.key.encode()))


def hour(end_ms: int, category: str, amounts: tuple[int, int, int, int], **fields: Any) -> dict[str, Any]:
    """A record of an hour: seconds, of them used and idle, and joules."""
    device_s, used_s, idle_s, joules = amounts
    return {
        "schema": 1, "cluster": CLUSTER, "node": "sim-0000", "gpu_uuid": "GPU-used", "uuid": "GPU-used", "of": 7,
        "start_ms": end_ms - 3_600_000, "end_ms": end_ms, "category": category, "policy": "used",
        "generation": 0, "revision": 1, "final": True,
        "device_ms": device_s * 1000, "slice_ms": device_s * 7000, "exact_ms": device_s * 1000,
        "late_ms": 0, "none_ms": 0, "used_us": used_s * 1_000_000, "idle_ms": idle_s * 1000, "energy_mj": joules * 1000,
        "tensor_us": 0, "memory_byte_ms": 0, **fields,
    }  # fmt: skip


CASES = [
    query
    for query in dashboard.queries()
    if query.board in {"gpu-fleet", "gpu-node", "gpu-workload", "gpu-idle", "gpu-health"}
]


@pytest.mark.parametrize("query", CASES, ids=str)
def test_a_panel_shows_what_is_true(fleet: Fleet, query: Query) -> None:
    answers, expected = {"all nodes": fleet.ask(query, {})}, {"all nodes": truly(query, fleet.truth, fleet.alerts)}
    for node in ("sim-0001", "sim-0003", FAULTY) if "node" in dashboard.variables(query.board) else ():
        alerts = [alert for alert in fleet.alerts if alert["k8s_node_name"] == node]
        answers[node] = fleet.ask(query, {"node": node})
        expected[node] = truly(query, fleet.truth.only(partial(_is_on, node)), alerts)
    assert answers == expected


def truly(query: Query, truth: Truth, alerts: list[dict[str, str]]) -> Any:
    """What the query has to answer."""
    try:
        expected = EXPECTED[str(query)](truth, alerts)
    except (ValueError, ZeroDivisionError):  # a maximum or a mean of nothing is nothing
        expected = {}
    return pytest.approx(expected, rel=1e-6)


def _is_on(node: str, state: DeviceState) -> bool:
    return state.labels["k8s_node_name"] == node


DIVIDED = re.compile(r"\bgpu_(utilization|memory_used|power_draw)\b")
"""What each pod of a shared device has its part of, with ``--parts-by-pod``."""


def assert_same_by_pod(fleet: Fleet, query: Query, chosen: dict[str, str]) -> None:
    """With ``--parts-by-pod`` the answer is the same, but that each MIG device has a utilization, too."""
    whole, by_pod = fleet.ask(query, chosen), fleet._replace(receiver=fleet.by_pod).ask(query, chosen)
    of_mig = {labels for labels in by_pod.keys() - whole.keys() if "gpu_mig_uuid" in dict(labels)}
    assert not of_mig or re.search(r"\bgpu_utilization\b", query.expr)
    assert {labels: value for labels, value in by_pod.items() if labels not in of_mig} == pytest.approx(whole, rel=1e-6)


def test_pods_that_share_a_gpu_have_series_with_parts_by_pod_alone(fleet: Fleet) -> None:
    of_sharing = 'gpu_utilization{k8s_pod_name!=""} and on (gpu_uuid) gpu_holders{k8s_cluster_name!=""} > 1'
    assert fleet.by_pod.query(of_sharing, fleet.truth.at_ms)
    assert not fleet.receiver.query(of_sharing, fleet.truth.at_ms)


@pytest.mark.parametrize("query", [query for query in CASES if DIVIDED.search(query.expr)], ids=str)
def test_a_panel_shows_the_same_with_parts_by_pod(fleet: Fleet, query: Query) -> None:
    assert_same_by_pod(fleet, query, {})


QUESTIONS = [
    block.text.replace("prod-us-east-1", CLUSTER).replace('name="bert-finetune-v3"', 'name=~".+"')
    for block in blocks("how-to/queries.md", "promql")
]
OF_PARTS = re.compile(r"avg by .* \(gpu_utilization\{[^}]*\}\)|group_left")
"""Those that have the parts in their answer, as the page says."""


@pytest.mark.parametrize(
    "text",
    [text for text in QUESTIONS if DIVIDED.search(text) and not OF_PARTS.search(text)],
    ids=lambda text: text[:60],
)
def test_a_question_is_answered_alike_with_parts_by_pod(fleet: Fleet, text: str) -> None:
    assert_same_by_pod(fleet, Query("", text, "", text, ""), {})


@pytest.mark.parametrize("query", [query for query in CASES if query.board == "gpu-workload"], ids=str)
def test_a_panel_shows_the_pods_that_are_chosen(fleet: Fleet, query: Query) -> None:
    answers, expected = {}, {}
    for variable in ("namespace", "workload"):
        label = f"k8s_{variable}_name"
        most = Counter(labels[label] for labels, _ in pods(fleet.truth) if label in labels).most_common(1)[0][0]
        truth = replace(fleet.truth, rows=[_of_pods(row, label, most) for row in fleet.truth.rows])
        alerts = [alert for alert in fleet.alerts if alert.get(label) == most]
        answers[variable], expected[variable] = fleet.ask(query, {variable: most}), truly(query, truth, alerts)
    assert answers == expected


def _of_pods(row: DeviceState, label: str, value: str) -> DeviceState:
    """The device with the pods that have this label alone, and their errors; how many share it stays."""
    own_pods = {named(pod) for pod in row.pods if pod.labels.get(label) == value}
    events = [
        event
        for event in row.device.events or ()
        if {(holder.namespace, holder.pod) for holder in event.held_by(row.device.holders)} <= own_pods
    ]
    return row._replace(
        pods=[pod for pod in row.pods if named(pod) in own_pods],
        device=msgspec.structs.replace(row.device, events=tuple(events)),
    )


# -- one GPU


def of_gpu(truth: Truth, kind: str) -> str:
    """A GPU of this kind: held by one pod for the window of a rate, shared, cut into MIG devices, or the faulty one."""
    ticks_by_device = truth.within(RATE_MS + 1000)
    for state in truth.now():
        pods = [{named(pod) for pod in tick.pods} for tick in ticks_by_device[state.key]]
        steady = all(pod_set == pods[0] for pod_set in pods)
        is_kind = {"cut": state.cut, "alone": len(state.pods) == 1, "shared": len(state.pods) > 1, "faulty": True}[kind]
        if (
            is_kind
            and steady
            and (state.labels["k8s_node_name"] == FAULTY) == (kind == "faulty")
            and state.device.mig is None
        ):
            return state.device.uuid
    raise AssertionError(f"no {kind} GPU")


@pytest.mark.parametrize("query", [query for query in dashboard.queries() if query.board == "gpu-device"], ids=str)
def test_a_panel_of_a_gpu_shows_what_is_true(fleet: Fleet, query: Query) -> None:
    kinds = {kind: of_gpu(fleet.truth, kind) for kind in ("alone", "shared", "cut", "faulty")}
    answers = {kind: fleet.ask(query, {"gpu": uuid}) for kind, uuid in kinds.items()}
    assert answers == {kind: truly_of_gpu(query, fleet, uuid) for kind, uuid in kinds.items()}


def truly_of_gpu(query: Query, fleet: Fleet, uuid: str) -> Any:
    """What the query has to answer if this GPU is chosen."""
    truth = fleet.truth.only(lambda state: state.labels["gpu_uuid"] == uuid)
    alerts = [alert for alert in fleet.alerts if alert.get("gpu_uuid") == uuid]
    metric = re.search(r"(gpu_\w+)\{", query.expr)
    assert metric is not None
    try:
        judge = OF_DEVICE.get(f"{query.panel}/{query.ref}")
        expected = judge(truth, alerts) if judge else metric_of(truth, metric[1])
    except (ValueError, ZeroDivisionError):
        expected = {}
    return pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    "query",
    [query for query in dashboard.queries() if query.board == "gpu-device" and DIVIDED.search(query.expr)],
    ids=str,
)
def test_a_panel_of_a_gpu_shows_the_same_with_parts_by_pod(fleet: Fleet, query: Query) -> None:
    for kind in ("shared", "cut"):
        assert_same_by_pod(fleet, query, {"gpu": of_gpu(fleet.truth, kind)})


def test_every_metric_of_a_gpu_is_on_its_dashboard() -> None:
    on_it = {
        name
        for query in dashboard.queries()
        if query.board == "gpu-device"
        for name in re.findall(r"gpu_\w+(?={)", query.expr)
    }
    all_names = {name for name, _ in SERIES} | {ratio.name for ratio in PROFILES["otel"].ratios}
    beside = {info.name for info in catalogue.FURTHER} - {catalogue.POD_XID_ERRORS.name}
    assert all_names | beside <= on_it


# -- who used what


def used(field: int, by: str = "") -> Answer:
    """Seconds of whole GPUs, or joules, of the hour, by some of these. A batch job has no namespace there."""
    rows = []
    for (namespace, kind, name, team), devices in HELD_BY.items():
        labels = {"k8s_cluster_name": CLUSTER, "k8s_workload_kind": kind, "k8s_workload_name": name, "team": team}
        labels |= {} if kind == "SlurmJob" else {"k8s_namespace_name": namespace}
        rows.append((labels, float(devices[field] * (1 if field == 3 else SLICES.get(name, 7) / 7))))
    return grouped(rows, by)


def hours(field: int, by: str = "", *, price: float = 1) -> Answer:
    return {labels: value / 3600 * price for labels, value in used(field, by).items()}


def share(top: int, bottom: int, by: str = "") -> Answer:
    below = used(bottom, by)
    return {labels: value / below[labels] for labels, value in used(top, by).items()}


def columns(by: str) -> list[Answer]:
    return [hours(0, by), hours(1, by), hours(2, by), share(1, 0, by), hours(3, by), hours(0, by, price=2.5)]


NAMESPACE = "k8s_cluster_name, k8s_namespace_name"
USAGE: dict[str, Answer] = {
    "Held/A": hours(0),
    "Used/A": hours(1),
    "Wasted/A": hours(2),
    "Free/A": number(FREE_S / 3600),
    "Energy/A": hours(3),
    "Cost/A": hours(0, price=2.5),
    "Used of what was held/A": share(1, 0),
    "Wasted of what was held/A": share(2, 0),
    "Cost of what was wasted/A": hours(2, price=2.5),
    "Held by team/A": hours(0, "team"),
    "Used by team/A": hours(1, "team"),
    "Wasted by team/A": hours(2, "team"),
    "Cost by team/A": hours(0, "team", price=2.5),
    **{f"Teams/{ref}": expression for ref, expression in zip("ABCDEF", columns("team"), strict=True)},
    **{f"Namespaces/{ref}": expression for ref, expression in zip("ABCDEF", columns(NAMESPACE), strict=True)},
    **{f"Workloads/{ref}": expression for ref, expression in zip("ABCDEF", columns(WORKLOAD), strict=True)},
}


@pytest.mark.parametrize("query", [query for query in dashboard.queries() if query.board == "gpu-usage"], ids=str)
def test_a_panel_of_usage_shows_who_used_what(fleet: Fleet, query: Query) -> None:
    assert fleet.ask(query, {}) == pytest.approx(USAGE[f"{query.panel}/{query.ref}"])


# -- gpustream itself


def between(low: float, high: float, **labels: str) -> Any:
    """A value that depends on the machine."""
    return {frozenset(labels.items()): pytest.approx((low + high) / 2, abs=(high - low) / 2)}


NO_ANSWER: Answer = {}
RUN = ("attribution", "alerts", "usage", "remote-write")
FLOW = between(NODES / 2, NODES * 2)
PIPELINE: dict[str, Any] = {
    "Processes/": number(len(STAYING)),
    "Not ready/": number(0),
    "Ticks that wait/": between(0, 30 * NODES),
    "Dead letters/": number(LETTERS),
    "Ticks dropped/": number(0),
    "Receivers that fail/": number(0),
    "Ticks per second/made": FLOW,
    "Ticks per second/sent": FLOW,
    "Ticks per second/attributed": FLOW,
    "Ticks per second/remote-write": between(NODES / 2, NODES * 3),
    **{f"Records that wait/{name}": between(0, 30 * NODES) for name in RUN},
    "Delay/alerts": between(0, 60),
    "Delay/remote-write": between(0, 60),
    "Age of the newest reading/oldest": between(0, 60),
    "Age of the newest reading/median": between(0, 60),
    "Dead letters by component/attribution": number(0),
    "Dead letters by component/remote-write": number(0),
    "How ticks are attributed/{{attribution}}": between(NODES / 2, NODES * 2, attribution="exact"),
    "Deleted before it was read/attribution": number(0),
    "Deleted before it was read/alerts": number(0),
    "Deleted before it was read/usage": number(0),
    "Deleted before it was read/remote-write": number(0),
    "Requests/remote-write: {{result}}": between(0.1, 50, result="accepted"),
    "Series left out/series": number(0),
    "Buffers of producers/ticks": between(0, 30 * NODES),
    "Buffers of producers/bytes": between(0, 1e7),
    **{f"Event loops/{name}": between(0, 60) for name in RUN},
    "Rebalances of streams/attribution": between(0, 2),
    "Rebalances of streams/alerts": between(0, 2),
    "Rebalances of streams/usage": between(0, 2),
    "Versions/": {frozenset({("version", importlib.metadata.version("gpustream"))}): float(len(STAYING))},
}
"""By panel and legend. What is not here does not run, and shows nothing."""


@pytest.mark.parametrize("query", [query for query in dashboard.queries() if query.board == "gpu-pipeline"], ids=str)
def test_a_panel_of_the_pipeline_shows_what_runs(fleet: Fleet, query: Query) -> None:
    expected = PIPELINE.get(f"{query.panel}/{query.legend}", NO_ANSWER)
    times_ms = itertools.chain([fleet.truth.at_ms], iter(lambda: int(time.time() * 1000), None))

    def all_shown() -> bool:
        answer = fleet.ask(query, {"__range": "10m"}, next(times_ms))
        numbers = {labels: value for labels, value in answer.items() if not math.isnan(value)}
        return numbers == expected or (query.panel == "Delay" and not numbers)  # no alert fired in the time of a point

    eventually_sync(all_shown, f"{query}: {expected}", every_s=1)


# -- all of them


@pytest.mark.parametrize("query", dashboard.label_queries(), ids=str)
def test_a_variable_has_values(fleet: Fleet, query: Query) -> None:
    assert {value for labels in fleet.ask(query, {}) for name, value in labels if name == query.ref}


def test_every_expected_value_has_a_query() -> None:
    named = {str(query) for query in dashboard.queries()}
    assert EXPECTED.keys() <= named
    assert {f"gpu-usage/{name}" for name in USAGE} <= named
    assert PIPELINE.keys() <= {
        f"{query.panel}/{query.legend}" for query in dashboard.queries() if query.board == "gpu-pipeline"
    }


def test_every_rule_is_evaluated_and_finds_what_is_wrong_and_no_more(fleet: Fleet) -> None:
    fleet.prometheus.wait_until(lambda: {rule["health"] for rule in fleet.prometheus.rules()} == {"ok"})
    firing = fleet.prometheus.query('ALERTS{alertstate="firing"}', fleet.truth.at_ms)
    assert {series.labels["alertname"] for series in firing} == PROMETHEUS_ALERTS.keys()


def recorded(name: str) -> str:
    """The expression of a recording rule, with the rules in it expanded."""
    rules = {rule["record"]: rule["expr"] for rule in dashboard.rules() if "record" in rule}
    return re.sub(r"\w+:\w+:\w+", lambda match: f"({recorded(match[0])})", rules[name])


def in_gpus(rows: Any) -> list[tuple[Mapping[str, str], float]]:
    """The values in GPUs: a MIG device counts by its slices."""
    return [(labels, value * int(labels.get("gpu_mig_profile", "7g")[0]) / 7) for labels, value in rows]


RECORDED: dict[str, Callable[[Truth], Answer]] = {
    "namespace:gpu_held:sum": lambda t: grouped(in_gpus(holding(t.now())), NAMESPACE),
    "workload:gpu_held:sum": lambda t: grouped(in_gpus(holding(t.now())), WORKLOAD),
    "node:gpu_held:sum": lambda t: grouped(in_gpus((labels, 1.0) for labels, _ in holders_of_devices(t)), NODE),
    "fleet:gpu_held:sum": lambda t: grouped(
        in_gpus((labels, 1.0) for labels, _ in holders_of_devices(t)), "k8s_cluster_name"
    ),
    "namespace:gpu_used:sum": lambda t: grouped(in_gpus(of_pods(t.now(), *UTILIZATION)), NAMESPACE),
    "workload:gpu_used:sum": lambda t: grouped(in_gpus(of_pods(t.now(), *UTILIZATION)), WORKLOAD),
    "fleet:gpu:count": lambda t: count(grouped_rows(present(t), GPU), "k8s_cluster_name"),
    "node:gpu:count": lambda t: count(grouped_rows(present(t), GPU), NODE),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_series_are_true(fleet: Fleet, name: str) -> None:
    query = Query("", name, "", recorded(name), "")
    assert fleet.ask(query, {}) == pytest.approx(RECORDED[name](fleet.truth), rel=1e-6)


@pytest.mark.parametrize(
    "name", ["device:gpu_used:ratio", "device:gpu_idle:ratio", "pod:gpu_used:ratio", "pod:gpu_idle:ratio"]
)
def test_recorded_series_are_the_same_with_parts_by_pod(fleet: Fleet, name: str) -> None:
    assert_same_by_pod(fleet, Query("", name, "", recorded(name), ""), {})


def test_a_component_that_ends_is_seen(fleet: Fleet) -> None:
    fleet.processes["producer"].stop()
    down = next(rule for rule in fleet.prometheus.rules() if rule["name"] == "GpustreamDown")
    fleet.prometheus.wait_until(lambda: bool(fleet.prometheus.query(down["query"])))
    (silent,) = fleet.prometheus.query(down["query"])
    assert silent.labels["instance"] == fleet.prometheus.targets[STAYING.index("producer")]
