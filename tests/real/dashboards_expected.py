"""The expected values of the panels of the dashboards, query by query, computed from the truth of the fleet.

A row has no numbers: it is for the devices and the alerts that are chosen, whichever these are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.real import dashboards_truth
from tests.real.dashboards_truth import (
    SERIES,
    Answer,
    DeviceState,
    Truth,
    grouped,
    holding,
    mean,
    number,
    of_pods,
    quantile,
    values_of,
)
from topics.profiles import PROFILES

IDLE_MS, RATE_MS, RANGE_MS = 5_000, 8_000, 16_000
"""The windows of what idles, of a rate and of the time shown."""

GPU = "k8s_cluster_name, k8s_node_name, gpu_uuid"
DEVICE = f"{GPU}, gpu_mig_uuid"
POD = "k8s_namespace_name, k8s_pod_name"
WORKLOAD = "k8s_cluster_name, k8s_namespace_name, k8s_workload_kind, k8s_workload_name"
NODE = "k8s_cluster_name, k8s_node_name"

UTILIZATION = ("gpu_utilization gpu_gr_engine_active", "utilization_ratio")
MEMORY = ("gpu_memory_used", "memory_used_bytes")
POWER = ("gpu_power_draw", "power_watts")


def count(rows: Any, by: str) -> Answer:
    return grouped(((labels, 1.0) for labels, _ in rows), by)


def distinct(rows: Any, by: str) -> float:
    """How many different values these labels have."""
    return len(grouped(rows, by))


def present(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [(state.labels, 1.0) for state in truth.now()]


def holders_of_devices(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [(state.labels, float(len(state.pods))) for state in truth.now() if state.pods]


def pods(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [({**state.labels, **pod.labels}, 1.0) for state in truth.now() for pod in state.pods]


def busy(rows: Sequence[DeviceState]) -> float | None:
    """The highest utilization of a device in these ticks."""
    names = ("gpu_utilization", "gpu_gr_engine_active", "gpu_encode_utilization", "gpu_decode_utilization")
    return max((value for row in rows for name in names if (value := row.value(name)) is not None), default=None)


def idle(truth: Truth) -> list[DeviceState]:
    """Devices that were held all the time, and were idle."""
    before = {state.key for state in truth.now(IDLE_MS) if state.pods}
    idle_rows = []
    for state in truth.now():
        ticks = truth.within(IDLE_MS)[state.key]
        most = busy(ticks)
        if all(tick.pods for tick in ticks) and state.key in before and most is not None and most < 0.01:
            idle_rows.append(state)
    return idle_rows


def idle_pods(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    """Pods on devices that they held all the time without using them."""
    before = {
        (state.key, named(pod)) for state in truth.now(IDLE_MS) for pod in state.pods if is_sole(pod) or parted(pod)
    }
    idle_rows: list[tuple[Mapping[str, str], float]] = []
    for state in truth.now():
        ticks = truth.within(IDLE_MS)[state.key]
        for pod in state.pods:
            own_ticks = [tick for tick in ticks if any(named(other) == named(pod) for other in tick.pods)]
            did = parts_of(own_ticks).get(named(pod), [])
            lone = busy([tick for tick in own_ticks if len(tick.pods) == 1])
            did += [] if lone is None else [lone]
            held = (is_sole(pod) or parted(pod)) and (state.key, named(pod)) in before
            if held and did and max(did) < 0.01 and not nobodys_work(ticks):
                idle_rows.append(({**state.labels, **pod.labels}, 1.0))
    return idle_rows


def parts_of(ticks: Sequence[DeviceState]) -> dict[tuple[str, str], list[float]]:
    """The parts of each pod in a device's utilization."""
    parts: dict[tuple[str, str], list[float]] = {}
    for pod in (pod for tick in ticks for pod in tick.pods if parted(pod)):
        parts.setdefault(named(pod), []).append(pod.parts["utilization_ratio"])
    return parts


def nobodys_work(ticks: Sequence[DeviceState]) -> bool:
    """Whether a device did work that is in no pod's part: with video engines, or at least half of what pods did."""
    names = ("gpu_encode_utilization", "gpu_decode_utilization")
    video = [value for tick in ticks for name in names if (value := tick.value(name)) is not None]
    rests = [tick.device.unattributed.utilization_ratio for tick in ticks if tick.device.unattributed is not None]
    rest = max([rest for rest in rests if rest is not None], default=0.0)
    half = sum(max(values) for values in parts_of(ticks).values()) / 2
    return max(video, default=0.0) >= 0.01 or (rest >= 0.01 and rest >= half)


def named(pod: dashboards_truth.Holding) -> tuple[str, str]:
    return pod.labels["k8s_namespace_name"], pod.labels["k8s_pod_name"]


def is_sole(pod: dashboards_truth.Holding) -> bool:
    return pod.of == 1


def parted(pod: dashboards_truth.Holding) -> bool:
    return "utilization_ratio" in pod.parts


def of_idle(truth: Truth, name: str, part: str) -> list[tuple[Mapping[str, str], float]]:
    """A quantity of pods on the devices on which they are idle."""
    by = [name.strip() for name in f"{DEVICE}, {POD}".split(",")]
    idling = {tuple(labels.get(label) for label in by) for labels, _ in idle_pods(truth)}
    return [row for row in of_pods(truth.now(), name, part) if tuple(row[0].get(label) for label in by) in idling]


def usable(truth: Truth) -> list[DeviceState]:
    """Devices, without the GPUs that are cut into MIG devices."""
    return [state for state in truth.now() if not state.cut]


def memory_of_gpus(truth: Truth, name: str) -> list[tuple[Mapping[str, str], float]]:
    """Each GPU's memory; of one that does not report it, its MIG devices'."""
    reporting = {state.device.uuid for state in truth.now() if state.value(name) is not None}
    counted = [state for state in truth.now() if not state.device.mig or state.device.mig.parent_uuid not in reporting]
    return list(values_of(counted, name))


def working(truth: Truth) -> list[float]:
    return [value for _, value in values_of([state for state in truth.now() if state.pods], "gpu_utilization")]


def slow(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    hot = 0x20 | 0x40
    return [
        (state.labels, 1.0) for state in truth.now() if int(state.device.metrics.get("clock_event_reasons") or 0) & hot
    ]


def total(truth: Truth, name: str, **labels: str) -> Answer:
    return grouped(values_of(truth.now(), name, **labels), "")


def largest(truth: Truth, name: str) -> Answer:
    return number(max(value for _, value in values_of(truth.now(), name)))


def increased(truth: Truth, name: str, by: str, window_ms: int = RATE_MS, **labels: str) -> Answer:
    """How much counters rose, as Prometheus sees it: from the first to the last reading, as if to both ends.

    If an end is further away than a reading usually is, it is half of that; and no counter has come from below zero.
    """
    rows = []
    for ticks in truth.within(window_ms).values():
        points = [(tick.ts_ms, value) for tick in ticks if (value := tick.value(name, **labels)) is not None]
        if len(points) > 1:
            (first_ms, first), (last_ms, last) = points[0], points[-1]
            lasted_ms, rise = last_ms - first_ms, last - first
            every_ms = lasted_ms / (len(points) - 1)
            ends_ms = first_ms - (truth.at_ms - window_ms), truth.at_ms - last_ms
            before_ms, after_ms = (ms if ms < 1.1 * every_ms else every_ms / 2 for ms in ends_ms)
            if rise > 0:
                before_ms = min(before_ms, lasted_ms * first / rise)
            rows.append(({**ticks[-1].labels, **labels}, rise * (lasted_ms + before_ms + after_ms) / lasted_ms))
    return grouped(rows, by)


def xids(truth: Truth, by: str) -> Answer:
    """Errors in the time shown; a code that had none before begins with its first."""
    before = {earlier.key: earlier.device.xids for earlier in truth.now(RANGE_MS)}
    risen = [
        ({**state.labels, "xid": code}, float(n - before.get(state.key, {}).get(code, 0)))
        for state in truth.now()
        for code, n in state.device.xids.items()
    ]
    return grouped([row for row in risen if row[1]], by)


def pod_xids(truth: Truth, by: str) -> Answer:
    """Errors in the time shown that came while one pod held the device."""
    rows = []
    for device_row in (past_state for ticks in truth.within(RANGE_MS).values() for past_state in ticks):
        for event in device_row.device.events or ():
            then_holders = {(pod.namespace, pod.pod) for pod in event.held_by(device_row.device.holders)}
            if len(then_holders) == 1:
                ((namespace, pod),) = then_holders
                named = {"k8s_namespace_name": namespace, "k8s_pod_name": pod, "xid": str(event.code)}
                rows.append(({**device_row.labels, **named}, 1.0))
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
    return lambda truth, alerts: grouped(((alert, 1.0) for alert in alerts), by)


def per_device(name: str, by: str, aggregate: Callable[[list[float]], float] = max) -> Expected:
    return lambda truth, _: grouped(values_of(truth.now(), name), by, aggregate)


def of_pod(label_pair: tuple[str, str], by: str) -> Expected:
    return lambda truth, _: grouped(of_pods(truth.now(), *label_pair), by)


def held_by(by: str) -> Expected:
    return lambda truth, _: grouped(holding(truth.now()), by)


SHORT_LABELS = "gpu_index, gpu_mig_profile, gpu_mig_uuid"
LONG_LABELS = "gpu_index, gpu_uuid, gpu_mig_uuid, gpu_mig_profile, gpu_model"
INDEXED = f"{GPU}, gpu_index"
PODS = f"{POD}, k8s_node_name"

GPUS_THERE: Expected = lambda t, _: number(distinct(present(t), GPU))  # noqa: E731 - a row's cell
GPUS_HELD: Expected = lambda t, _: number(distinct(holders_of_devices(t), GPU))  # noqa: E731
IDLE_DEVICES: Expected = lambda t, _: number(len(idle(t)))  # noqa: E731
POWER_DRAWN: Expected = lambda t, _: total(t, "gpu_power_draw")  # noqa: E731
HOTTEST: Expected = lambda t, _: largest(t, "gpu_temperature")  # noqa: E731
ALERTS_HERE: Expected = lambda _, alerts: number(len(alerts))  # noqa: E731

FLEET: dict[str, Expected] = {
    "GPUs/A": GPUS_THERE,
    "Held/A": GPUS_HELD,
    "Shared/A": lambda t, _: number(sum(len(state.pods) > 1 for state in t.now())),
    "Held and idle/A": IDLE_DEVICES,
    "Alerts/A": lambda _, alerts: fires(alerts),
    "Utilization of what is held/A": lambda t, _: number(mean(working(t))),
    "Nodes/A": lambda t, _: number(distinct(present(t), NODE)),
    "Memory used/A": lambda t, _: number(
        sum(v for _, v in memory_of_gpus(t, "gpu_memory_used"))
        / sum(v for _, v in memory_of_gpus(t, "gpu_memory_total"))
    ),
    "Power/A": POWER_DRAWN,
    "Hottest/A": HOTTEST,
    "Slowed down/A": lambda t, _: number(len(slow(t))),
    "Not as the kubelet says/A": lambda t, _: number(sum(state.device.conflict is not None for state in t.now())),
    "GPUs over time/A": GPUS_THERE,
    "GPUs over time/B": GPUS_HELD,
    "GPUs over time/C": IDLE_DEVICES,
    "Devices by namespace/A": held_by("k8s_namespace_name"),
    "Utilization/A": lambda t, _: number(mean(working(t))),
    "Utilization/B": lambda t, _: number(quantile(0.1)(working(t))),
    "Utilization/C": lambda t, _: number(quantile(0.9)(working(t))),
    "Devices' worth of work by namespace/A": of_pod(UTILIZATION, "k8s_namespace_name"),
    "Power and its limit/A": POWER_DRAWN,
    "Power and its limit/B": lambda t, _: total(t, "gpu_power_limit"),
    "Memory by namespace/A": of_pod(MEMORY, "k8s_namespace_name"),
    "All nodes/A": lambda t, _: count(grouped_rows(present(t), GPU), NODE),
    "All nodes/B": lambda t, _: count(grouped_rows(holders_of_devices(t), GPU), NODE),
    "All nodes/C": per_device("gpu_utilization", NODE, mean),
    "All nodes/D": lambda t, _: grouped(memory_of_gpus(t, "gpu_memory_used"), NODE),
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
    "Devices/A": lambda t, _: grouped(((state.labels, float(len(state.pods))) for state in t.now()), LONG_LABELS),
    "Devices/B": per_device("gpu_utilization", LONG_LABELS),
    "Devices/C": per_device("gpu_memory_used", LONG_LABELS),
    "Devices/D": per_device("gpu_memory_total", LONG_LABELS),
    "Devices/E": per_device("gpu_power_draw", LONG_LABELS),
    "Devices/F": per_device("gpu_temperature", LONG_LABELS),
    "Holders/A": lambda t, _: grouped(((labels, 1.0) for labels, _ in holding(t.now())), f"{SHORT_LABELS}, {POD}", max),
    "Utilization/A": per_device("gpu_utilization", SHORT_LABELS),
    "Memory/A": per_device("gpu_memory_used", SHORT_LABELS),
    "Power by GPU/A": per_device("gpu_power_draw", SHORT_LABELS),
    "Temperature/A": per_device("gpu_temperature", SHORT_LABELS),
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
    "Devices' worth of work/A": of_pod(UTILIZATION, ""),
    "Memory/A": of_pod(MEMORY, ""),
    "Power/A": of_pod(POWER, ""),
    "Devices by workload/A": held_by(WORKLOAD),
    "Devices' worth of work by workload/A": of_pod(UTILIZATION, WORKLOAD),
    "Memory by workload/A": of_pod(MEMORY, WORKLOAD),
    "Power by workload/A": of_pod(POWER, WORKLOAD),
    "Tensor cores/A": lambda t, _: grouped(of_alone(t, "gpu_pipe_tensor_active"), WORKLOAD, mean),
    "Utilization/A": lambda t, _: grouped(of_alone(t, "gpu_utilization"), WORKLOAD, mean),
    "Workloads and what they hold/A": held_by(WORKLOAD),
    "Workloads and what they hold/B": of_pod(UTILIZATION, WORKLOAD),
    "Workloads and what they hold/C": of_pod(MEMORY, WORKLOAD),
    "Workloads and what they hold/D": of_pod(POWER, WORKLOAD),
    "Workloads and what they hold/E": lambda _, alerts: grouped(
        ((alert, 1.0) for alert in alerts if "k8s_pod_name" in alert), WORKLOAD
    ),
    "Pods and what they do/A": held_by(PODS),
    "Pods and what they do/B": of_pod(UTILIZATION, PODS),
    "Pods and what they do/C": of_pod(MEMORY, PODS),
    "XID errors of its pods/A": lambda t, _: pod_xids(t, f"{POD}, xid"),
}

IDLENESS: dict[str, Expected] = {
    "Held and idle/A": IDLE_DEVICES,
    "Of what is held/A": lambda t, _: number(len(idle(t)) / len(holders_of_devices(t))),
    "Held by nobody/A": lambda t, _: number(sum(not state.pods for state in usable(t))),
    "Pods that idle/A": lambda t, _: number(distinct(idle_pods(t), f"{NODE}, {POD}")),
    "Memory that they block/A": lambda t, _: number(sum(v for _, v in of_idle(t, *MEMORY))),
    "Power for nothing/A": lambda t, _: number(sum(v for _, v in values_of(idle(t), "gpu_power_draw"))),
    "Pods that idle, by namespace/A": lambda t, _: grouped(idle_pods(t), "k8s_namespace_name"),
    "Devices/A": IDLE_DEVICES,
    "Devices/B": lambda t, _: number(len(holders_of_devices(t))),
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
    "Temperature/C": lambda t, _: number(quantile(0.5)([v for _, v in values_of(t.now(), "gpu_temperature")])),
}


def grouped_rows(rows: Any, by: str) -> list[tuple[Mapping[str, str], float]]:
    """One row for each set of labels."""
    return [(dict(labels), value) for labels, value in grouped(rows, by).items()]


def described(truth: Truth) -> list[tuple[Mapping[str, str], float]]:
    return [({**state.labels, **(state.device.info or {})}, 1.0) for state in truth.now() if state.device.info]


def both_ways(truth: Truth, name: str) -> Answer:
    rows = [
        (
            state.labels,
            sum(
                v
                for direction in ("transmit", "receive")
                if (v := state.value(name, gpu_interconnect_direction=direction)) is not None
            ),
        )
        for state in truth.now()
        if state.value(name, gpu_interconnect_direction="transmit") is not None
    ]
    return grouped(rows, SHORT_LABELS, max)


def of_alone(truth: Truth, name: str) -> list[tuple[Mapping[str, str], float]]:
    """A metric of devices that one pod holds alone, with its labels."""
    return [
        ({**state.labels, **state.pods[0].labels}, v)
        for state in truth.now()
        if [pod.of for pod in state.pods] == [1] and (v := state.value(name)) is not None
    ]


def failing(truth: Truth, name: str, **labels: str) -> int:
    return sum(value > 0 for _, value in values_of(truth.now(), name, **labels))


def findings(truth: Truth) -> Answer:
    kinds = {
        "row remap failed": ("gpu_row_remap_failure", {}),
        "row remap pending": ("gpu_row_remap_pending", {}),
        "pages to retire": ("gpu_retired_pages_pending", {}),
        "uncorrectable memory errors": ("gpu_ecc_errors", {"gpu_ecc_error_type": "uncorrectable"}),
    }
    rows = [
        ({**labels, "finding": finding}, v)
        for finding, (name, series_labels) in kinds.items()
        for labels, v in values_of(truth.now(), name, **series_labels)
        if v > 0
    ]
    rows += [({**labels, "finding": "slowed down by heat"}, 1.0) for labels, _ in slow(truth)]
    rows += [
        ({**state.labels, "finding": "not as the kubelet says"}, 1.0) for state in truth.now() if state.device.conflict
    ]
    return grouped(rows, f"{INDEXED}, finding", max)


def causes(truth: Truth) -> Answer:
    cause_names = [
        dict(series.labels)["gpu_throttle_cause"]
        for series in PROFILES["otel"].series["clock_event_reasons"]
        if series.labels
    ]
    rows = [
        ({"gpu_throttle_cause": cause}, v)
        for cause in cause_names
        for _, v in values_of(truth.now(), "gpu_throttle_reason", gpu_throttle_cause=cause)
    ]
    return grouped(rows, "gpu_throttle_cause")


EXPECTED = {
    **{f"gpu-fleet/{name}": expected for name, expected in FLEET.items()},
    **{f"gpu-node/{name}": expected for name, expected in ONE_NODE.items()},
    **{f"gpu-workload/{name}": expected for name, expected in WORKLOADS.items()},
    **{f"gpu-idle/{name}": expected for name, expected in IDLENESS.items()},
    **{f"gpu-health/{name}": expected for name, expected in HEALTH.items()},
}

# -- one GPU

INSTANCE = "gpu_mig_uuid, gpu_mig_profile"
INFO = ("serial", "driver_version", "cuda_version", "vbios_version", "mig_mode", "processes_visible")

OF_DEVICE: dict[str, Expected] = {
    "Holders/A": lambda t, _: grouped(((labels, 1.0) for labels, _ in holding(t.now())), f"{INSTANCE}, {POD}", max),
    "Pods/A": lambda t, _: number(max(len(state.pods) for state in t.now())),
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
    "Doubts/A": lambda t, _: grouped(
        (({"reason": c}, 1.0) for state in t.now() if (c := state.device.conflict)), "reason"
    ),
    "Doubts/B": lambda t, _: number(max(float(state.device.split_scaled) for state in t.now() if state.divided)),
}


def part_of_pods(truth: Truth, part: str) -> Answer:
    rows = [
        ({**state.labels, **pod.labels}, pod.parts[part])
        for state in truth.now()
        for pod in state.pods
        if part in pod.parts
    ]
    return grouped(rows, f"{INSTANCE}, {POD}")


def nobodys(truth: Truth, part: str) -> Answer:
    rows = [
        (state.labels, v) for state in truth.now() if (v := getattr(state.device.unattributed, part, None)) is not None
    ]
    return grouped(rows, INSTANCE)


def metric_of(truth: Truth, name: str) -> Answer:
    """All series of a name: gauges by value, counters by increase or rate."""
    answers: Answer = {}
    for (series, series_labels), (key, catalogued) in SERIES.items():
        labels = dict(series_labels)
        by = ", ".join([INSTANCE, *labels])
        if series == name and catalogued.kind == "counter":
            per = {"energy_joules_total": RATE_MS, "violation": RATE_MS / 1000}
            scale = (
                per["energy_joules_total"]
                if key == "energy_joules_total"
                else per["violation"]
                if "violation" in key
                else 1
            )
            answers |= {k: v / scale for k, v in increased(truth, name, by, RATE_MS, **labels).items()}
        elif series == name:
            answers |= grouped((({**row, **labels}, v) for row, v in values_of(truth.now(), name, **labels)), by, max)
    for ratio in (ratio for ratio in PROFILES["otel"].ratios if ratio.name == name):
        for state in truth.now():
            top, bottom = (state.device.metrics.get(key) for key in ratio.keys)
            if top is not None and bottom:
                answers |= grouped([(state.labels, top / bottom * ratio.scale)], INSTANCE)
    return answers
