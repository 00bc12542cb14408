"""The truth of a fleet whose dashboards are tested: its devices at a time, and their holders.

Devices are as gpu.attributed has them. That their pods are those of the simulated truth is checked as they are read.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from topics.attributed import AttributedDevice, AttributedSample, pods_of
from topics.profiles import PROFILES

Labels = Mapping[str, str]
Answer = dict[frozenset[tuple[str, str]], float]
"""Values by labels."""

SERIES = {
    (series.name, series.labels): (key, series)
    for key, series_of_key in PROFILES["otel"].series.items()
    for series in series_of_key
}


class Holding(NamedTuple):
    """A pod on a device: its labels, how many hold the device, and its parts of it if it has some."""

    labels: Labels
    of: int
    parts: Mapping[str, float]


class DeviceState(NamedTuple):
    """The state of a device in a tick."""

    ts_ms: int
    labels: Labels
    device: AttributedDevice
    pods: Sequence[Holding]

    @property
    def key(self) -> tuple[str, str]:
        """Its node and UUID."""
        return self.labels["k8s_node_name"], self.device.uuid

    def value(self, name: str, **labels: str) -> float | None:
        """The value of its first series of that name with those labels."""
        for (series, series_labels), (key, catalogued) in SERIES.items():
            if series == name and labels.items() <= dict(series_labels).items():
                value = self.device.metrics.get(key)
                return None if value is None else catalogued.convert(value)
        raise KeyError(name)

    @property
    def divided(self) -> bool:
        """Whether it is split between pods."""
        return self.device.unattributed is not None or any(pod.parts for pod in self.pods)

    @property
    def cut(self) -> bool:
        """Whether it is a GPU that is cut into MIG devices."""
        return self.device.mig is None and (self.device.info or {}).get("mig_mode") == "enabled"


@dataclass(frozen=True)
class Truth:
    """Every tick up to a time."""

    at_ms: int
    rows: Sequence[DeviceState]

    def only(self, keep: Callable[[DeviceState], bool]) -> "Truth":
        """The same of some devices."""
        return replace(self, rows=[row for row in self.rows if keep(row)])

    def now(self, before_ms: int = 0) -> list[DeviceState]:
        """Every device in the last tick of its node at a time."""
        last: dict[str, int] = {}
        at_ms = self.at_ms - before_ms
        for row in self.rows:
            if row.ts_ms <= at_ms:
                node = row.labels["k8s_node_name"]
                last[node] = max(last.get(node, 0), row.ts_ms)
        return [row for row in self.rows if row.ts_ms == last.get(row.labels["k8s_node_name"])]

    def within(self, window_ms: int) -> dict[tuple[str, str], list[DeviceState]]:
        """The ticks of each device in the time before."""
        by_uuid = defaultdict(list)
        for row in self.rows:
            if self.at_ms - window_ms < row.ts_ms <= self.at_ms:
                by_uuid[row.key].append(row)
        return by_uuid


def read_truth(records: Iterable[bytes], truth: Path, at_ms: int, of_truth: str) -> Truth:
    """Reads the records of gpu.attributed up to a time; compares the pods of nodes with that prefix with the truth."""
    reported = {
        (row["node"], row["run_id"], row["seq"], row["uuid"]): {
            (holder["namespace"], holder["pod"]) for holder in row["reported"]
        }
        for row in map(json.loads, truth.read_text().splitlines())
    }
    rows = []
    for sample in (msgspec.json.decode(record, type=AttributedSample) for record in records):
        if sample.ts_ms > at_ms:
            continue
        for device in sample.devices:
            device_row = _row(sample, device)
            if sample.node.startswith(of_truth):
                reported_row = reported[sample.node, sample.run_id, sample.seq, device.uuid]
                assert {
                    (pod.labels["k8s_namespace_name"], pod.labels["k8s_pod_name"]) for pod in device_row.pods
                } == reported_row
            rows.append(device_row)
    return Truth(at_ms, sorted(rows, key=lambda row: row.ts_ms))


def _row(sample: AttributedSample, device: AttributedDevice) -> DeviceState:
    mig = device.mig
    labels = {
        "k8s_cluster_name": sample.cluster,
        "k8s_node_name": sample.node,
        "gpu_uuid": mig.parent_uuid if mig else device.uuid,
        "gpu_index": str(device.index),
        "gpu_model": device.model or "",
        **({"gpu_mig_uuid": device.uuid, "gpu_mig_profile": mig.profile or ""} if mig else {}),
    }
    pods = []
    for pod, holders in pods_of(device.holders).items():
        parts: dict[str, float] = defaultdict(float)
        for holder in holders:
            for name in ("utilization_ratio", "memory_used_bytes", "power_watts"):
                if holder.parts is not None and (value := getattr(holder.parts, name)) is not None:
                    parts[name] += value
        owner = holders[0].workload
        named = {"k8s_namespace_name": pod.namespace, "k8s_pod_name": pod.pod}
        if owner is not None:
            named |= {"k8s_workload_kind": owner.kind, "k8s_workload_name": owner.name}
        pods.append(Holding(named, len(pods_of(device.holders)), parts))
    return DeviceState(sample.ts_ms, labels, device, pods)


Row = tuple[Labels, float]


def values_of(devices: Iterable[DeviceState], name: str, **labels: str) -> Iterator[Row]:
    """A metric of each device that has it."""
    for state in devices:
        value = state.value(name, **labels)
        if value is not None:
            yield state.labels, value


def of_pods(devices: Iterable[DeviceState], name: str, part: str) -> Iterator[Row]:
    """A quantity of each pod on each device: the device's if it holds that alone, else its part of it."""
    for state in devices:
        for pod in state.pods:
            total = _total(state, name) if pod.of == 1 else None
            value = pod.parts.get(part) if total is None else total
            if value is not None:
                yield {**state.labels, **pod.labels}, value


def _total(state: DeviceState, names: str) -> float | None:
    return next((value for name in names.split() if (value := state.value(name)) is not None), None)


def holding(devices: Iterable[DeviceState]) -> Iterator[Row]:
    """Each pod on each device, as its share of it; one whose part is not known is not seen."""
    for state in devices:
        for pod in state.pods:
            if pod.of == 1 or pod.parts:
                yield {**state.labels, **pod.labels}, 1 / pod.of


def grouped(rows: Iterable[Row], by: str, aggregate: Callable[[list[float]], float] = sum) -> Answer:
    """Values by labels, as PromQL's aggregations compute them."""
    values_by_labels = defaultdict(list)
    names = [name.strip() for name in by.split(",") if name.strip()]
    for labels, value in rows:
        values_by_labels[frozenset((name, labels[name]) for name in names if labels.get(name))].append(value)
    return {labels: aggregate(values) for labels, values in values_by_labels.items()}


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def quantile(share: float) -> Callable[[list[float]], float]:
    """As in Prometheus: interpolated between the two nearest values."""

    def interpolated(values: list[float]) -> float:
        ordered, rank = sorted(values), share * (len(values) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return interpolated


def number(value: float) -> Answer:
    """One value without labels."""
    return {frozenset(): float(value)}


def answer(samples: Any) -> Answer:
    """The answer of Prometheus."""
    return {frozenset((k, v) for k, v in series.labels.items() if k != "__name__"): series.value for series in samples}
