"""docker-compose.yml without Docker: its commands and its Prometheus as processes, and what every panel then shows.

Each query of each dashboard is asked at one moment, and its answer held against the simulated truth, by number. Beside
the fleet is a node with every fault, which the alert stream judges as any other; and hours of usage of two teams.
"""

import asyncio
import importlib.metadata
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
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from delivery.connection import Connection
from delivery.sender import Sender
from tests.eventually import eventually_sync
from tests.k8s import dashboard
from tests.k8s.dashboard import Query
from tests.real import dashboards_truth
from tests.real.conftest import need
from tests.real.dashboards_truth import (
    SERIES,
    Answer,
    At,
    Truth,
    each,
    grouped,
    holding,
    mean,
    number,
    of_pods,
    quantile,
)
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import KafkaServer, PrometheusServer, find_java, find_kafka, find_prometheus
from tests.test_compose import OURS, config
from topics import catalogue
from topics.profiles import PROFILES
from topics.topic import node_key
from topics.usage import Usage

STAYING = ("producer", "attribution", "alerts", "usage", "remote-write")
NODES, GPUS = 4, 4 * 8
CLUSTER, FAULTY = "compose", "faulty"
WINDOWS = {"idle": "5s", "__rate_interval": "8s", "__range": "16s"}
IDLE_MS, RATE_MS, RANGE_MS = 5_000, 8_000, 16_000
ALL = {"cluster": ".*", "namespace": ".*", "node": ".*", "workload": ".*", "job": ".*", "instance": ".*", "team": ".*"}
"""The variables as Grafana fills them for All."""

GPU = "k8s_cluster_name, k8s_node_name, gpu_uuid"
DEVICE = f"{GPU}, gpu_mig_uuid"
POD = "k8s_namespace_name, k8s_pod_name"
WORKLOAD = "k8s_cluster_name, k8s_namespace_name, k8s_workload_kind, k8s_workload_name"
NODE = "k8s_cluster_name, k8s_node_name"

UTILIZATION = ("gpu_utilization gpu_gr_engine_active", "utilization_ratio")
MEMORY = ("gpu_memory_used", "memory_used_bytes")
POWER = ("gpu_power_draw", "power_watts")


class ComposePrometheus(PrometheusServer):
    """Prometheus in the configuration of the compose file, with the processes' addresses for the services' names."""

    def __init__(self, directory: Path, targets: Sequence[str]) -> None:
        super().__init__(directory)
        self.targets = list(targets)

    def prepare(self) -> None:
        """Writes the configuration, with everything looked at each second and no Alertmanager."""
        settings: dict[str, Any] = config("prometheus")
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(dashboard.PROMETHEUS / Path(name).name) for name in settings["rule_files"]]
        del settings["alerting"]
        (job,) = settings["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": self.targets}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its health and its state."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=10) as answer:  # noqa: S310 - http, and ours
            groups = json.load(answer)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


class Seen(NamedTuple):
    """What runs, the time to ask of, what is true of it then, and which alerts fire."""

    processes: dict[str, Gpustream]
    prometheus: ComposePrometheus
    truth: Truth
    alerts: list[dict[str, str]]

    def ask(self, query: Query, chosen: dict[str, str]) -> Answer:
        """What the query answers with these variables."""
        expr = dashboard.filled(query.expr, ALL | WINDOWS | {"price": "2.50"} | chosen)
        return dashboards_truth.answer(self.prometheus.query(expr, self.truth.at_ms))


class Network:
    """The names of the compose file's network, as addresses of this machine."""

    def __init__(self, kafka: KafkaServer, prometheus: PrometheusServer) -> None:
        self._addresses = {"kafka:29092": kafka.address, "http://prometheus:9090": prometheus.url}

    def arguments(self, service: str) -> list[str]:
        """The service's command."""
        return [self._here(word) for word in OURS[service]["command"]]

    def environment(self, service: str) -> dict[str, str]:
        """What the service is given as environment."""
        return {name: self._here(value) for name, value in OURS[service]["environment"].items()}

    def _here(self, text: str) -> str:
        for name, address in self._addresses.items():
            text = text.replace(name, address)
        return text


@pytest.fixture(scope="module")
def seen(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The compose file's fleet in its Prometheus, for long enough that every window is full."""
    need(find_java, find_kafka, find_prometheus)
    kafka.empty()
    folder = tmp_path_factory.mktemp("dashboards")
    processes = {name: Gpustream(folder / name) for name in STAYING}
    targets = [f"127.0.0.1:{process.ports[0].number}" for process in processes.values()]
    with ExitStack() as running:
        prometheus = running.enter_context(ComposePrometheus(folder / "prometheus", targets))
        network = Network(kafka, prometheus)
        create_topics(network)
        for name, process in processes.items():
            process.arguments, process.environment = network.arguments(name), network.environment(name)
        processes["producer"].arguments += ["--truth", str(folder / "truth.jsonl")]
        for process in processes.values():
            running.enter_context(process)
        prometheus.wait_until(lambda: len(prometheus.query("gpustream_ready == 1")) == len(STAYING))
        began_ms = asyncio.run(faults(kafka.address))
        at_ms = began_ms + RANGE_MS - 1_000
        asyncio.run(usage(kafka.address, at_ms))
        newest = 'min(max by (k8s_node_name) (timestamp(gpu_power_draw{k8s_node_name!="faulty"})))'
        eventually_sync(lambda: any(one.value * 1000 > at_ms for one in prometheus.query(newest)), "all is delivered")
        hours = "count(gpu_usage_held_seconds) + count(gpu_usage_free_seconds)"
        eventually_sync(lambda: [one.value for one in prometheus.query(hours, at_ms)] == [len(HELD) + 1], hours)
        records = [record.value for record in asyncio.run(read_all(kafka.address, "gpu.attributed"))]
        truth = dashboards_truth.read(records, folder / "truth.jsonl", at_ms, "sim-")
        firing = asyncio.run(alerts(kafka.address, at_ms))
        yield Seen(processes, prometheus, truth, firing)


def create_topics(network: Network) -> None:
    """Runs the service `topics` to its end."""
    command = [sys.executable, "-m", "gpustream", *network.arguments("topics")]
    environment = os.environ | network.environment("topics")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


HOLDER = {
    "namespace": "ml",
    "pod": "bert-0",
    "pod_uid": "uid-bert",
    "container": "main",
    "workload": {"kind": "Job", "name": "bert"},
}
LETTERS = 3


async def faults(kafka: str) -> int:
    """Ticks of a node with every fault, and records that can't be decoded; the time of the first."""
    sender, began_ms = Sender(Connection(kafka), client_id="faults"), time.time_ns() // 1_000_000
    await sender.start()
    for letter in range(LETTERS):
        await (await sender.send("gpu.samples", b"not JSON", key=node_key(CLUSTER, f"broken-{letter}")))
    for seq in range(1, 15):
        await asyncio.sleep(max(0.0, (began_ms + seq * 1000) / 1000 - time.time()))
        ts_ms = began_ms + seq * 1000
        tick = {"schema": 1, "cluster": CLUSTER, "node": FAULTY, "run_id": 1, "seq": seq, "ts_ms": ts_ms}
        tick |= {"offset": seq, "attribution": "exact", "devices": [faulty_device(seq, ts_ms)]}
        await (await sender.send("gpu.attributed", json.dumps(tick).encode(), key=node_key(CLUSTER, FAULTY)))
    await sender.stop()
    return began_ms


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
    last = {record.key: json.loads(record.value) for record in [record async for record in _alerts(kafka)]}
    return [one["labels"] for one in last.values() if one["state"] == "firing"]


async def _alerts(kafka: str) -> Any:
    for record in await read_all(kafka, "gpu.alerts"):
        if record.value:
            yield record


HELD = {
    ("ml", "Job", "bert", "research"): (7200, 5400, 900, 3_600_000),
    ("web", "Deployment", "llm", "platform"): (3600, 900, 1800, 900_000),
}
"""Seconds held, used and idle, and joules, of an hour, by namespace, workload and team."""

FREE_S = 1800


async def usage(kafka: str, at_ms: int) -> None:
    """An hour of gpu.usage, which ended a second before, on its way through the sink."""
    records = [
        hour(at_ms - 1000, "held", (held_s, used_s, idle_s, joules), namespace=namespace, pod=f"{name}-0", team=team)
        | {"workload": {"kind": kind, "name": name}}
        for (namespace, kind, name, team), (held_s, used_s, idle_s, joules) in HELD.items()
    ]
    records.append(hour(at_ms - 1000, "free", (FREE_S, 0, 0, 400_000)))
    sender = Sender(Connection(kafka), client_id="usage")
    await sender.start()
    for record in (msgspec.convert(record, Usage) for record in records):
        await (await sender.send("gpu.usage", msgspec.json.encode(record), key=record.key.encode()))
    await sender.stop()


def hour(end_ms: int, category: str, amounts: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """A record of an hour: seconds, of them used and idle, and joules."""
    device_s, used_s, idle_s, joules = amounts
    return {
        "schema": 1, "cluster": CLUSTER, "node": "sim-0000", "gpu_uuid": "GPU-used", "uuid": "GPU-used", "of": 7,
        "start_ms": end_ms - 3_600_000, "end_ms": end_ms, "category": category, "policy": "used",
        "generation": 0, "revision": 1, "final": True,
        "device_ms": device_s * 1000, "slice_ms": device_s * 7000, "exact_ms": device_s * 1000,
        "late_ms": 0, "none_ms": 0, "used_us": used_s * 1_000_000, "idle_ms": idle_s * 1000, "energy_mj": joules * 1000,
        "tensor_us": 0, "memory_byte_ms": 0, **more,
    }  # fmt: skip


# -- what must be shown, query by query


def count(rows: Any, by: str) -> Answer:
    return grouped(((labels, 1.0) for labels, _ in rows), by)


def distinct(rows: Any, by: str) -> float:
    """How many different values these labels have."""
    return len(grouped(rows, by))


def there(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [(one.labels, 1.0) for one in truth.now()]


def held(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [(one.labels, float(len(one.pods))) for one in truth.now() if one.pods]


def pods(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [({**one.labels, **pod.labels}, 1.0) for one in truth.now() for pod in one.pods]


def busy(rows: Sequence[At]) -> float | None:
    """The most that a device did in these ticks."""
    names = ("gpu_utilization", "gpu_gr_engine_active", "gpu_encode_utilization", "gpu_decode_utilization")
    return max((value for one in rows for name in names if (value := one.value(name)) is not None), default=None)


def idle(truth: Truth) -> list[At]:
    """Devices that were held all the time, and did nothing in it."""
    before = {one.key for one in truth.now(IDLE_MS) if one.pods}
    found = []
    for one in truth.now():
        ticks = truth.within(IDLE_MS)[one.key]
        most = busy(ticks)
        if all(tick.pods for tick in ticks) and one.key in before and most is not None and most < 0.01:
            found.append(one)
    return found


def idle_pods(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    """Pods on devices that they held all the time and did nothing on."""
    before = {(one.key, named(pod)) for one in truth.now(IDLE_MS) for pod in one.pods if alone(pod) or parted(pod)}
    found: list[tuple[Mapping[str, str], float]] = []
    for one in truth.now():
        ticks = truth.within(IDLE_MS)[one.key]
        for pod in one.pods:
            mine = [tick for tick in ticks if any(named(other) == named(pod) for other in tick.pods)]
            did = [
                other.parts["utilization_ratio"]
                for tick in mine
                for other in tick.pods
                if named(other) == named(pod) and parted(other)
            ]
            lone = busy([tick for tick in mine if len(tick.pods) == 1])
            nothing = (alone(pod) and lone is not None and lone < 0.01) or (parted(pod) and max(did) < 0.01)
            if nothing and (one.key, named(pod)) in before:
                found.append(({**one.labels, **pod.labels}, 1.0))
    return found


def named(pod: dashboards_truth.Holding) -> tuple[str, str]:
    return pod.labels["k8s_namespace_name"], pod.labels["k8s_pod_name"]


def alone(pod: dashboards_truth.Holding) -> bool:
    return pod.of == 1


def parted(pod: dashboards_truth.Holding) -> bool:
    return "utilization_ratio" in pod.parts


def of_idle(truth: Truth, name: str, part: str) -> list[tuple[Mapping[str, str], float]]:
    """A quantity of pods on the devices on which they do nothing."""
    by = [name.strip() for name in f"{DEVICE}, {POD}".split(",")]
    idling = {tuple(labels.get(one) for one in by) for labels, _ in idle_pods(truth)}
    return [row for row in of_pods(truth.now(), name, part) if tuple(row[0].get(one) for one in by) in idling]


def usable(truth: Truth) -> list[At]:
    """Devices, without the GPUs that are cut into MIG devices."""
    return [one for one in truth.now() if not one.cut]


def working(truth: Truth) -> list[float]:
    return [value for _, value in each([one for one in truth.now() if one.pods], "gpu_utilization")]


def slow(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    hot = 0x20 | 0x40
    return [(one.labels, 1.0) for one in truth.now() if int(one.device.metrics.get("clock_event_reasons") or 0) & hot]


def total(truth: Truth, name: str, **labels: str) -> Answer:
    return grouped(each(truth.now(), name, **labels), "")


def largest(truth: Truth, name: str) -> Answer:
    return number(max(value for _, value in each(truth.now(), name)))


def increased(truth: Truth, name: str, by: str, window_ms: int = RATE_MS, **labels: str) -> Answer:
    """How much counters rose, as Prometheus sees it: from the first to the last reading, as if to both ends."""
    rows = []
    for ticks in truth.within(window_ms).values():
        points = [(tick.ts_ms, value) for tick in ticks if (value := tick.value(name, **labels)) is not None]
        if len(points) > 1:
            slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
            rows.append(({**ticks[-1].labels, **labels}, slope * window_ms))
    return grouped(rows, by)


def xids(truth: Truth, by: str) -> Answer:
    """Errors in the time shown; a code that had none before begins with its first."""
    before = {one.key: one.device.xids for one in truth.now(RANGE_MS)}
    risen = [
        ({**one.labels, "xid": code}, float(n - before.get(one.key, {}).get(code, 0)))
        for one in truth.now()
        for code, n in one.device.xids.items()
    ]
    return grouped([row for row in risen if row[1]], by)


def pod_xids(truth: Truth, by: str) -> Answer:
    """Errors in the time shown that came while one pod held the device."""
    rows = []
    for one in (one for ticks in truth.within(RANGE_MS).values() for one in ticks):
        for event in one.device.events or ():
            then = {(pod.namespace, pod.pod) for pod in event.held_by(one.device.holders)}
            if len(then) == 1:
                ((namespace, pod),) = then
                named = {"k8s_namespace_name": namespace, "k8s_pod_name": pod, "xid": str(event.code)}
                rows.append(({**one.labels, **named}, 1.0))
    return grouped(rows, by)


def xids_risen(truth: Truth) -> Answer:
    """XID errors in the time of a point, of codes that there were before."""
    rows = []
    for ticks in truth.within(RATE_MS).values():
        for code, last in ticks[-1].device.xids.items():
            first = next((tick.ts_ms, n) for tick in ticks if (n := tick.device.xids.get(code)) is not None)
            slope = (last - first[1]) / max(1, ticks[-1].ts_ms - first[0])
            rows.append(({"xid": code}, slope * RATE_MS))
    return grouped(rows, "xid")


PROMETHEUS_ALERTS = {"GpustreamDeadLetters": 1}
"""What Prometheus itself finds: the records that can't be decoded."""

Expected = Callable[[Truth, Sequence[Mapping[str, str]]], Answer]
"""What a query must answer, by the devices and the alerts that are chosen."""


def fires(alerts: Sequence[Mapping[str, str]]) -> Answer:
    return number(len(alerts) + sum(PROMETHEUS_ALERTS.values()))


def by_alert(by: str) -> Expected:
    return lambda truth, alerts: grouped(((one, 1.0) for one in alerts), by)


def per_device(name: str, by: str, how: Callable[[list[float]], float] = max) -> Expected:
    return lambda truth, _: grouped(each(truth.now(), name), by, how)


def of_pod(what: tuple[str, str], by: str) -> Expected:
    return lambda truth, _: grouped(of_pods(truth.now(), *what), by)


def held_by(by: str) -> Expected:
    return lambda truth, _: grouped(holding(truth.now()), by)


SHORT = "gpu_index, gpu_mig_profile, gpu_mig_uuid"
LONG = "gpu_index, gpu_uuid, gpu_mig_uuid, gpu_mig_profile, gpu_model"
INDEXED = f"{GPU}, gpu_index"
PODS = f"{POD}, k8s_node_name"

GPUS_THERE: Expected = lambda t, _: number(distinct(there(t), GPU))  # noqa: E731 - a row's cell
GPUS_HELD: Expected = lambda t, _: number(distinct(held(t), GPU))  # noqa: E731
IDLE_DEVICES: Expected = lambda t, _: number(len(idle(t)))  # noqa: E731
POWER_DRAWN: Expected = lambda t, _: total(t, "gpu_power_draw")  # noqa: E731
HOTTEST: Expected = lambda t, _: largest(t, "gpu_temperature")  # noqa: E731
ALERTS_HERE: Expected = lambda _, alerts: number(len(alerts))  # noqa: E731

FLEET: dict[str, Expected] = {
    "GPUs/A": GPUS_THERE,
    "Held/A": GPUS_HELD,
    "Shared/A": lambda t, _: number(sum(len(one.pods) > 1 for one in t.now())),
    "Held and idle/A": IDLE_DEVICES,
    "Alerts/A": lambda _, alerts: fires(alerts),
    "Utilization of what is held/A": lambda t, _: number(mean(working(t))),
    "Nodes/A": lambda t, _: number(distinct(there(t), NODE)),
    "Memory used/A": lambda t, _: number(
        sum(v for _, v in each(usable(t), "gpu_memory_used")) / sum(v for _, v in each(usable(t), "gpu_memory_total"))
    ),
    "Power/A": POWER_DRAWN,
    "Hottest/A": HOTTEST,
    "Slowed down/A": lambda t, _: number(len(slow(t))),
    "Not as the kubelet says/A": lambda t, _: number(sum(one.device.conflict is not None for one in t.now())),
    "GPUs over time/A": GPUS_THERE,
    "GPUs over time/B": GPUS_HELD,
    "GPUs over time/C": IDLE_DEVICES,
    "Devices by namespace/A": held_by("k8s_namespace_name"),
    "Utilization/A": lambda t, _: number(mean(working(t))),
    "Utilization/B": lambda t, _: number(quantile(0.1)(working(t))),
    "Utilization/C": lambda t, _: number(quantile(0.9)(working(t))),
    "GPUs' worth of work by namespace/A": of_pod(UTILIZATION, "k8s_namespace_name"),
    "Power and its limit/A": POWER_DRAWN,
    "Power and its limit/B": lambda t, _: total(t, "gpu_power_limit"),
    "Memory by namespace/A": of_pod(MEMORY, "k8s_namespace_name"),
    "All nodes/A": lambda t, _: count(grouped_rows(there(t), GPU), NODE),
    "All nodes/B": lambda t, _: count(grouped_rows(held(t), GPU), NODE),
    "All nodes/C": per_device("gpu_utilization", NODE, mean),
    "All nodes/D": lambda t, _: grouped(each(usable(t), "gpu_memory_used"), NODE),
    "All nodes/E": per_device("gpu_power_draw", NODE, sum),
    "All nodes/F": per_device("gpu_temperature", NODE),
    "All nodes/G": by_alert(NODE),
    "Models/A": lambda t, _: count(
        grouped_rows(described(t), f"{GPU}, gpu_model, driver_version"), "gpu_model, driver_version"
    ),
}

ONE_NODE: dict[str, Expected] = {
    "GPUs/A": GPUS_THERE,
    "Held/A": GPUS_HELD,
    "Pods/A": lambda t, _: number(distinct(pods(t), POD)),
    "Power/A": POWER_DRAWN,
    "Hottest/A": HOTTEST,
    "Alerts/A": ALERTS_HERE,
    "Devices/A": lambda t, _: grouped(((one.labels, float(len(one.pods))) for one in t.now()), LONG),
    "Devices/B": per_device("gpu_utilization", LONG),
    "Devices/C": per_device("gpu_memory_used", LONG),
    "Devices/D": per_device("gpu_memory_total", LONG),
    "Devices/E": per_device("gpu_power_draw", LONG),
    "Devices/F": per_device("gpu_temperature", LONG),
    "Holders/A": lambda t, _: grouped(((labels, 1.0) for labels, _ in holding(t.now())), f"{SHORT}, {POD}", max),
    "Utilization/A": per_device("gpu_utilization", SHORT),
    "Memory/A": per_device("gpu_memory_used", SHORT),
    "Power by GPU/A": per_device("gpu_power_draw", SHORT),
    "Temperature/A": per_device("gpu_temperature", SHORT),
    "PCIe/A": lambda t, _: both_ways(t, "gpu_pcie_throughput"),
    "NVLink/A": lambda t, _: both_ways(t, "gpu_interconnect_throughput"),
    "What pods use/A": held_by(POD),
    "What pods use/B": of_pod(UTILIZATION, POD),
    "What pods use/C": of_pod(MEMORY, POD),
    "What pods use/D": of_pod(POWER, POD),
}

WORKLOADS: dict[str, Expected] = {
    "Workloads/A": lambda t, _: number(distinct(pods(t), WORKLOAD)),
    "Pods/A": lambda t, _: number(distinct(pods(t), f"{POD}, k8s_node_name")),
    "Devices/A": lambda t, _: number(sum(value for _, value in holding(t.now()))),
    "GPUs' worth of work/A": of_pod(UTILIZATION, ""),
    "Memory/A": of_pod(MEMORY, ""),
    "Power/A": of_pod(POWER, ""),
    "Devices by workload/A": held_by(WORKLOAD),
    "GPUs' worth of work by workload/A": of_pod(UTILIZATION, WORKLOAD),
    "Memory by workload/A": of_pod(MEMORY, WORKLOAD),
    "Power by workload/A": of_pod(POWER, WORKLOAD),
    "Tensor cores/A": lambda t, _: grouped(of_alone(t, "gpu_pipe_tensor_active"), WORKLOAD, mean),
    "Utilization/A": lambda t, _: grouped(of_alone(t, "gpu_utilization"), WORKLOAD, mean),
    "Workloads and what they hold/A": held_by(WORKLOAD),
    "Workloads and what they hold/B": of_pod(UTILIZATION, WORKLOAD),
    "Workloads and what they hold/C": of_pod(MEMORY, WORKLOAD),
    "Workloads and what they hold/D": of_pod(POWER, WORKLOAD),
    "Workloads and what they hold/E": lambda _, alerts: grouped(
        ((one, 1.0) for one in alerts if "k8s_pod_name" in one), WORKLOAD
    ),
    "Pods and what they do/A": held_by(PODS),
    "Pods and what they do/B": of_pod(UTILIZATION, PODS),
    "Pods and what they do/C": of_pod(MEMORY, PODS),
    "XID errors of its pods/A": lambda t, _: pod_xids(t, f"{POD}, xid"),
}

IDLENESS: dict[str, Expected] = {
    "Held and idle/A": IDLE_DEVICES,
    "Of what is held/A": lambda t, _: number(len(idle(t)) / len(held(t))),
    "Held by nobody/A": lambda t, _: number(sum(not one.pods for one in usable(t))),
    "Pods that idle/A": lambda t, _: number(distinct(idle_pods(t), f"{NODE}, {POD}")),
    "Memory that they block/A": lambda t, _: number(sum(v for _, v in of_idle(t, *MEMORY))),
    "Power for nothing/A": lambda t, _: number(sum(v for _, v in each(idle(t), "gpu_power_draw"))),
    "Pods that idle, by namespace/A": lambda t, _: grouped(idle_pods(t), "k8s_namespace_name"),
    "Devices/A": IDLE_DEVICES,
    "Devices/B": lambda t, _: number(len(held(t))),
    "Pods and what they block/A": lambda t, _: grouped(of_idle(t, *MEMORY), f"k8s_node_name, gpu_uuid, {POD}"),
    "Pods and what they block/B": lambda t, _: grouped(of_idle(t, *POWER), f"k8s_node_name, gpu_uuid, {POD}"),
    "Idle GPU-hours by alerts/A": lambda _, alerts: {},  # nothing has been idle for a quarter of an hour
}

HEALTH: dict[str, Expected] = {
    "Alerts/A": lambda _, alerts: fires(alerts),
    "XID errors/A": lambda t, _: number(sum(xids(t, "xid").values())),
    "Memory that failed/A": lambda t, _: number(failing(t, "gpu_ecc_errors", gpu_ecc_error_type="uncorrectable")),
    "To be reset/A": lambda t, _: number(failing(t, "gpu_row_remap_pending")),
    "To be replaced/A": lambda t, _: number(failing(t, "gpu_row_remap_failure")),
    "Slowed down by heat/A": lambda t, _: number(len(slow(t))),
    "XID errors by code/A": lambda t, _: {code: value for code, n in xids_risen(t).items() if (value := round(n))},
    "Alerts by name/A": by_alert("alertname"),
    "Alerts by name/B": lambda *_: {
        frozenset({("alertname", name)}): float(n) for name, n in PROMETHEUS_ALERTS.items()
    },
    "What fires/A": by_alert(f"alertname, severity, {INDEXED}, {POD}"),
    "XID errors by GPU/A": lambda t, _: xids(t, f"{INDEXED}, xid"),
    "XID errors by pod/A": lambda t, _: pod_xids(t, f"{POD}, xid"),
    "GPUs to look at/A": lambda t, _: findings(t),
    "Memory errors/A": lambda t, _: (
        increased(t, "gpu_ecc_errors", "gpu_ecc_error_type", gpu_ecc_error_type="correctable")
        | increased(t, "gpu_ecc_errors", "gpu_ecc_error_type", gpu_ecc_error_type="uncorrectable")
    ),
    "Link errors/A": lambda t, _: increased(t, "gpu_interconnect_crc_errors", ""),
    "Link errors/B": lambda t, _: increased(t, "gpu_interconnect_replays", ""),
    "Link errors/C": lambda t, _: increased(t, "gpu_interconnect_recoveries", ""),
    "Link errors/D": lambda t, _: increased(t, "gpu_pcie_replay_count", ""),
    "Why clocks are down/A": lambda t, _: causes(t),
    "Temperature/A": HOTTEST,
    "Temperature/B": lambda t, _: largest(t, "gpu_memory_temperature"),
    "Temperature/C": lambda t, _: number(quantile(0.5)([v for _, v in each(t.now(), "gpu_temperature")])),
}


def grouped_rows(rows: Any, by: str) -> list[tuple[Mapping[str, str], float]]:
    """One row for each set of labels."""
    return [(dict(labels), value) for labels, value in grouped(rows, by).items()]


def described(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [({**one.labels, **(one.device.info or {})}, 1.0) for one in truth.now() if one.device.info]


def both_ways(truth: Truth, name: str) -> Answer:
    rows = [
        (
            one.labels,
            sum(
                v
                for way in ("transmit", "receive")
                if (v := one.value(name, gpu_interconnect_direction=way)) is not None
            ),
        )
        for one in truth.now()
        if one.value(name, gpu_interconnect_direction="transmit") is not None
    ]
    return grouped(rows, SHORT, max)


def of_alone(truth: Truth, name: str) -> list[tuple[Mapping[str, str], float]]:
    """A metric of devices that one pod holds alone, with its labels."""
    return [
        ({**one.labels, **one.pods[0].labels}, v)
        for one in truth.now()
        if [pod.of for pod in one.pods] == [1] and (v := one.value(name)) is not None
    ]


def failing(truth: Truth, name: str, **labels: str) -> int:
    return sum(value > 0 for _, value in each(truth.now(), name, **labels))


def findings(truth: Truth) -> Answer:
    kinds = {
        "row remap failed": ("gpu_row_remap_failure", {}),
        "row remap pending": ("gpu_row_remap_pending", {}),
        "pages to retire": ("gpu_retired_pages_pending", {}),
        "uncorrectable memory errors": ("gpu_ecc_errors", {"gpu_ecc_error_type": "uncorrectable"}),
    }
    rows = [
        ({**labels, "finding": words}, v)
        for words, (name, own) in kinds.items()
        for labels, v in each(truth.now(), name, **own)
        if v > 0
    ]
    rows += [({**labels, "finding": "slowed down by heat"}, 1.0) for labels, _ in slow(truth)]
    rows += [({**one.labels, "finding": "not as the kubelet says"}, 1.0) for one in truth.now() if one.device.conflict]
    return grouped(rows, f"{INDEXED}, finding", max)


def causes(truth: Truth) -> Answer:
    found = [
        dict(one.labels)["gpu_throttle_cause"] for one in PROFILES["otel"].series["clock_event_reasons"] if one.labels
    ]
    rows = [
        ({"gpu_throttle_cause": cause}, v)
        for cause in found
        for _, v in each(truth.now(), "gpu_throttle_reason", gpu_throttle_cause=cause)
    ]
    return grouped(rows, "gpu_throttle_cause")


EXPECTED = {
    **{f"gpu-fleet/{name}": one for name, one in FLEET.items()},
    **{f"gpu-node/{name}": one for name, one in ONE_NODE.items()},
    **{f"gpu-workload/{name}": one for name, one in WORKLOADS.items()},
    **{f"gpu-idle/{name}": one for name, one in IDLENESS.items()},
    **{f"gpu-health/{name}": one for name, one in HEALTH.items()},
}
CASES = [
    query
    for query in dashboard.queries()
    if query.board in {"gpu-fleet", "gpu-node", "gpu-workload", "gpu-idle", "gpu-health"}
]


@pytest.mark.parametrize("query", CASES, ids=str)
@pytest.mark.parametrize("node", ["", "sim-0001", "sim-0003", FAULTY])
def test_a_panel_shows_what_is_true(seen: Seen, query: Query, node: str) -> None:
    truth, alerts, chosen = seen.truth, seen.alerts, {}
    if node and "node" in dashboard.variables(query.board):
        truth = truth.only(lambda one: one.labels["k8s_node_name"] == node)
        alerts = [one for one in alerts if one["k8s_node_name"] == node]
        chosen = {"node": node}
    try:
        expected = EXPECTED[str(query)](truth, alerts)
    except (ValueError, ZeroDivisionError):  # a maximum or a mean of nothing is nothing
        expected = {}
    assert seen.ask(query, chosen) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("variable", ["namespace", "workload"])
@pytest.mark.parametrize("query", [one for one in CASES if one.board == "gpu-workload"], ids=str)
def test_a_panel_shows_the_pods_that_are_chosen(seen: Seen, query: Query, variable: str) -> None:
    label = f"k8s_{variable}_name"
    most = Counter(labels[label] for labels, _ in pods(seen.truth) if label in labels).most_common(1)[0][0]
    truth = replace(seen.truth, rows=[_of_pods(row, label, most) for row in seen.truth.rows])
    alerts = [one for one in seen.alerts if one.get(label) == most]
    try:
        expected = EXPECTED[str(query)](truth, alerts)
    except (ValueError, ZeroDivisionError):
        expected = {}
    assert seen.ask(query, {variable: most}) == pytest.approx(expected, rel=1e-6)


def _of_pods(row: At, label: str, value: str) -> At:
    """The device with the pods that have this label alone, and their errors; how many share it stays."""
    mine = {named(pod) for pod in row.pods if pod.labels.get(label) == value}
    events = [
        one
        for one in row.device.events or ()
        if {(of.namespace, of.pod) for of in one.held_by(row.device.holders)} <= mine
    ]
    return row._replace(
        pods=[pod for pod in row.pods if named(pod) in mine],
        device=msgspec.structs.replace(row.device, events=tuple(events)),
    )


# -- one GPU


def of_gpu(truth: Truth, kind: str) -> str:
    """A GPU that one pod has held for as long as a rate looks back, that pods share, that is cut, or the faulty one."""
    for one in truth.now():
        pods = [{named(pod) for pod in tick.pods} for tick in truth.within(RATE_MS + 1000)[one.key]]
        steady = all(held == pods[0] for held in pods)
        is_kind = {"cut": one.cut, "alone": len(one.pods) == 1, "shared": len(one.pods) > 1, "faulty": True}[kind]
        if (
            is_kind
            and steady
            and (one.labels["k8s_node_name"] == FAULTY) == (kind == "faulty")
            and one.device.mig is None
        ):
            return one.device.uuid
    raise AssertionError(f"no {kind} GPU")


INSTANCE = "gpu_mig_uuid, gpu_mig_profile"
INFO = ("serial", "driver_version", "cuda_version", "vbios_version", "mig_mode", "processes_visible")

OF_DEVICE: dict[str, Expected] = {
    "Holders/A": lambda t, _: grouped(((labels, 1.0) for labels, _ in holding(t.now())), f"{INSTANCE}, {POD}", max),
    "Pods/A": lambda t, _: number(max(len(one.pods) for one in t.now())),
    "Alerts/A": ALERTS_HERE,
    "Temperature now/A": HOTTEST,
    "Power now/A": lambda t, _: largest(t, "gpu_power_draw"),
    "What it is/A": lambda t, _: grouped(described(t), ", ".join(["gpu_model", "gpu_index", INSTANCE, *INFO]), max),
    "Utilization by pod/A": lambda t, _: part_of_pods(t, "utilization_ratio"),
    "Utilization by pod/B": lambda t, _: nobodys(t, "utilization_ratio"),
    "Memory by pod/A": lambda t, _: part_of_pods(t, "memory_used_bytes"),
    "Memory by pod/B": lambda t, _: nobodys(t, "memory_used_bytes"),
    "Power by pod/A": lambda t, _: part_of_pods(t, "power_watts"),
    "Power by pod/B": lambda t, _: nobodys(t, "power_watts"),
    "XID errors/A": lambda t, _: xids(t, "xid"),
    "Doubts/A": lambda t, _: grouped((({"reason": c}, 1.0) for one in t.now() if (c := one.device.conflict)), "reason"),
    "Doubts/B": lambda t, _: number(max(float(one.device.split_scaled) for one in t.now() if one.divided)),
}


def part_of_pods(truth: Truth, part: str) -> Answer:
    rows = [
        ({**one.labels, **pod.labels}, pod.parts[part]) for one in truth.now() for pod in one.pods if part in pod.parts
    ]
    return grouped(rows, f"{INSTANCE}, {POD}")


def nobodys(truth: Truth, part: str) -> Answer:
    rows = [(one.labels, v) for one in truth.now() if (v := getattr(one.device.unattributed, part, None)) is not None]
    return grouped(rows, INSTANCE)


def metric_of(truth: Truth, name: str) -> Answer:
    """All series of a name: gauges as they are, counters by how far they came or how fast."""
    found: Answer = {}
    for (series, own), (of, one) in SERIES.items():
        labels = dict(own)
        by = ", ".join([INSTANCE, *labels])
        if series == name and one.kind == "counter":
            per = {"energy_joules_total": RATE_MS, "violation": RATE_MS / 1000}
            scale = (
                per["energy_joules_total"]
                if of == "energy_joules_total"
                else per["violation"]
                if "violation" in of
                else 1
            )
            found |= {k: v / scale for k, v in increased(truth, name, by, RATE_MS, **labels).items()}
        elif series == name:
            found |= grouped((({**row, **labels}, v) for row, v in each(truth.now(), name, **labels)), by, max)
    for ratio in (one for one in PROFILES["otel"].ratios if one.name == name):
        for device in truth.now():
            top, bottom = (device.device.metrics.get(key) for key in ratio.keys)
            if top is not None and bottom:
                found |= grouped([(device.labels, top / bottom * ratio.scale)], INSTANCE)
    return found


@pytest.mark.parametrize("query", [one for one in dashboard.queries() if one.board == "gpu-device"], ids=str)
@pytest.mark.parametrize("kind", ["alone", "shared", "cut", "faulty"])
def test_a_panel_of_a_gpu_shows_what_is_true(seen: Seen, query: Query, kind: str) -> None:
    uuid = of_gpu(seen.truth, kind)
    truth = seen.truth.only(lambda one: one.labels["gpu_uuid"] == uuid)
    alerts = [one for one in seen.alerts if one.get("gpu_uuid") == uuid]
    metric = re.search(r"(gpu_\w+)\{", query.expr)
    assert metric is not None
    try:
        judge = OF_DEVICE.get(f"{query.panel}/{query.ref}")
        expected = judge(truth, alerts) if judge else metric_of(truth, metric[1])
    except (ValueError, ZeroDivisionError):
        expected = {}
    assert seen.ask(query, {"gpu": uuid}) == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_every_metric_of_a_gpu_is_on_its_dashboard() -> None:
    on_it = {
        name
        for one in dashboard.queries()
        if one.board == "gpu-device"
        for name in re.findall(r"gpu_\w+(?={)", one.expr)
    }
    every = {name for name, _ in SERIES} | {one.name for one in PROFILES["otel"].ratios}
    beside = {one.name for one in catalogue.FURTHER} - {catalogue.POD_XID_ERRORS.name}
    assert every | beside <= on_it


# -- who used what


def used(field: int, by: str = "") -> Answer:
    """Seconds or joules of the hour, by some of these."""
    names = ("k8s_namespace_name", "k8s_workload_kind", "k8s_workload_name", "team")
    rows = [
        ({**dict(zip(names, who, strict=True)), "k8s_cluster_name": CLUSTER}, float(what[field]))
        for who, what in HELD.items()
    ]
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
    **{f"Teams/{ref}": one for ref, one in zip("ABCDEF", columns("team"), strict=True)},
    **{f"Namespaces/{ref}": one for ref, one in zip("ABCDEF", columns(NAMESPACE), strict=True)},
    **{f"Workloads/{ref}": one for ref, one in zip("ABCDEF", columns(WORKLOAD), strict=True)},
}


@pytest.mark.parametrize("query", [one for one in dashboard.queries() if one.board == "gpu-usage"], ids=str)
def test_a_panel_of_usage_shows_who_used_what(seen: Seen, query: Query) -> None:
    assert seen.ask(query, {}) == pytest.approx(USAGE[f"{query.panel}/{query.ref}"])


# -- gpustream itself


def between(low: float, high: float, **labels: str) -> Any:
    """One value, which is what a machine makes of it."""
    return {frozenset(labels.items()): pytest.approx((low + high) / 2, abs=(high - low) / 2)}


NOTHING: Answer = {}
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
    "Delay/alerts": between(0, 10),
    "Delay/remote-write": between(0, 10),
    "Age of the newest reading/oldest": between(0, 5),
    "Age of the newest reading/median": between(0, 5),
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
    **{f"Event loops/{name}": between(0, 5) for name in RUN},
    "Rebalances of streams/attribution": between(0, 2),
    "Rebalances of streams/alerts": between(0, 2),
    "Rebalances of streams/usage": between(0, 2),
    "Versions/": {frozenset({("version", importlib.metadata.version("gpustream"))}): float(len(STAYING))},
}
"""By panel and legend. What is not here does not run, and shows nothing."""


@pytest.mark.parametrize("query", [one for one in dashboard.queries() if one.board == "gpu-pipeline"], ids=str)
def test_a_panel_of_the_pipeline_shows_what_runs(seen: Seen, query: Query) -> None:
    found = {labels: value for labels, value in seen.ask(query, {}).items() if not math.isnan(value)}
    idle = query.panel == "Delay" and not found  # no alert fired in the time of a point
    assert idle or found == PIPELINE.get(f"{query.panel}/{query.legend}", NOTHING)


# -- all of them


@pytest.mark.parametrize("query", dashboard.label_queries(), ids=str)
def test_a_variable_has_values(seen: Seen, query: Query) -> None:
    assert {value for labels in seen.ask(query, {}) for name, value in labels if name == query.ref}


def test_what_is_expected_is_asked() -> None:
    named = {str(query) for query in dashboard.queries()}
    assert EXPECTED.keys() <= named
    assert {f"gpu-usage/{name}" for name in USAGE} <= named
    assert PIPELINE.keys() <= {
        f"{one.panel}/{one.legend}" for one in dashboard.queries() if one.board == "gpu-pipeline"
    }


def test_every_rule_is_evaluated_and_finds_what_is_wrong_and_no_more(seen: Seen) -> None:
    seen.prometheus.wait_until(lambda: {rule["health"] for rule in seen.prometheus.rules()} == {"ok"})
    firing = {rule["name"] for rule in seen.prometheus.rules() if rule.get("state") == "firing"}
    assert firing == PROMETHEUS_ALERTS.keys()


def recorded(name: str) -> str:
    """What a recording rule asks for, with all that it is made of."""
    rules = {rule["record"]: rule["expr"] for rule in dashboard.rules() if "record" in rule}
    return re.sub(r"\w+:\w+:\w+", lambda found: f"({recorded(found[0])})", rules[name])


def in_gpus(rows: Any) -> list[tuple[Mapping[str, str], float]]:
    """The same in GPUs: a MIG device counts by its slices."""
    return [(labels, value * int(labels.get("gpu_mig_profile", "7g")[0]) / 7) for labels, value in rows]


RECORDED: dict[str, Callable[[Truth], Answer]] = {
    "namespace:gpu_held:sum": lambda t: grouped(in_gpus(holding(t.now())), NAMESPACE),
    "workload:gpu_held:sum": lambda t: grouped(in_gpus(holding(t.now())), WORKLOAD),
    "node:gpu_held:sum": lambda t: grouped(in_gpus((labels, 1.0) for labels, _ in held(t)), NODE),
    "fleet:gpu_held:sum": lambda t: grouped(in_gpus((labels, 1.0) for labels, _ in held(t)), "k8s_cluster_name"),
    "namespace:gpu_used:sum": lambda t: grouped(in_gpus(of_pods(t.now(), *UTILIZATION)), NAMESPACE),
    "workload:gpu_used:sum": lambda t: grouped(in_gpus(of_pods(t.now(), *UTILIZATION)), WORKLOAD),
    "fleet:gpu:count": lambda t: count(grouped_rows(there(t), GPU), "k8s_cluster_name"),
    "node:gpu:count": lambda t: count(grouped_rows(there(t), GPU), NODE),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_true(seen: Seen, name: str) -> None:
    query = Query("", name, "", recorded(name), "")
    assert seen.ask(query, {}) == pytest.approx(RECORDED[name](seen.truth), rel=1e-6)


def test_a_component_that_ends_is_seen(seen: Seen) -> None:
    seen.processes["producer"].stop()
    down = next(rule for rule in seen.prometheus.rules() if rule["name"] == "GpustreamDown")
    seen.prometheus.wait_until(lambda: bool(seen.prometheus.query(down["query"])))
    (silent,) = seen.prometheus.query(down["query"])
    assert silent.labels["instance"] == seen.prometheus.targets[STAYING.index("producer")]
