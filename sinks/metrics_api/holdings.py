"""What each pod, workload and namespace does with its GPUs now: the last tick of every node. Pure.

In:       ticks, each with its age on arrival; times in seconds on a clock that never steps back.
Out:      the pods that hold a device, with what each did; a metric of one pod, or of several together.
State:    of each node its identity and what each namespace holds there, until the tick is :data:`STALE_S` old. A pod
          is gone with its node's next tick, an autoscaler would count it otherwise.

A whole GPU or a MIG device is its pod's. Of a device that several pods hold each has its part, which is known of
utilization, memory and power: other metrics of such a device are nobody's. NVML has no utilization of a MIG device: it
is the share of the time in which its engines were busy. What several devices of a pod make together
is :data:`SERVED`'s to say, and so is what the pods of a workload make together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick, Verdict
from topics.attributed import Parts, Workload, by_pod
from topics.catalogue import CATALOGUE
from topics.samples import Mig
from topics.topic import Name, Number, UInt, Version, decoder

STALE_S = 30.0
"""A value that is older is no value: an autoscaler never looks at timestamps."""

Together = Literal["mean", "sum", "max"]

_BY_UNIT: dict[str, Together] = {
    "ratio": "mean",
    "hertz": "mean",
    "bytes": "sum",
    "bytes_per_second": "sum",
    "watts": "sum",
    "celsius": "max",
}

SERVED: dict[str, Together] = {
    key: _BY_UNIT[metric.unit]
    for key, metric in CATALOGUE.items()
    if metric.kind == "gauge" and metric.unit in _BY_UNIT
}
"""The metrics that are served, and what several values make: the catalogue's gauges, without states and bitmasks."""

SUMMED = frozenset(key for key in SERVED if CATALOGUE[key].unit not in {"celsius", "hertz"})
"""Those of which a sum over pods says something: of a ratio it is how many GPUs are used in all."""

_SHARED = {
    "gpu_utilization_ratio": "utilization_ratio",
    "memory_used_bytes": "memory_used_bytes",
    "power_watts": "power_watts",
}
"""What of a shared device is known of each pod, and its name in the pod's parts."""

_COMBINE: dict[Together, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
}


# -- a tick, as far as it is looked at


class TickHolder(msgspec.Struct, frozen=True):
    """See :class:`topics.attributed.Holder`."""

    namespace: str
    pod: str
    pod_uid: str | None = None
    workload: Workload | None = None
    job: str | None = None
    statefulset: str | None = None
    deployment: str | None = None
    parts: Parts | None = None


class TickDevice(msgspec.Struct, frozen=True):
    """See :class:`topics.attributed.AttributedDevice`."""

    uuid: str
    model: str | None = None
    mig: Mig | None = None
    metrics: dict[str, Number | None] = {}
    holders: tuple[TickHolder, ...] = ()


class HoldingsTick(msgspec.Struct, frozen=True):
    """See :class:`topics.attributed.AttributedSample`."""

    schema: Version
    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    offset: UInt
    devices: tuple[TickDevice, ...] = ()


decode = decoder(HoldingsTick)


# -- what it says of pods


class Holding(NamedTuple):
    """What a pod has of one device. ``labels`` are the device's; ``workloads`` are (kind, name) of the pod's owners."""

    pod: str
    pod_uid: str | None
    workloads: frozenset[tuple[str, str]]
    labels: Mapping[str, str]
    values: Mapping[str, float]
    ts_ms: int


def of_pod(holdings: Iterable[Holding], metric: str) -> float | None:
    """The metric of a pod, from its devices that have it; None if none has."""
    values = [one.values[metric] for one in holdings if metric in one.values]
    return _COMBINE[SERVED[metric]](values) if values else None


def combined(pods: Mapping[str, Iterable[Holding]], metric: str) -> float | None:
    """The metric of several pods together, from those that have it; None if none has."""
    values = [value for some in pods.values() if (value := of_pod(some, metric)) is not None]
    return _COMBINE[SERVED[metric]](values) if values else None


def holdings(tick: HoldingsTick) -> dict[str, list[Holding]]:
    """What the pods of a tick hold, by namespace."""
    found: dict[str, list[Holding]] = {}
    for device in tick.devices:
        pods = by_pod(device.holders)
        for pod, containers in pods.items():
            if len(pods) == 1:
                known = {key: device.metrics.get(key) for key in SERVED}
                if device.mig is not None and known["gpu_utilization_ratio"] is None:
                    known["gpu_utilization_ratio"] = known["graphics_engine_active_ratio"]
            else:
                parts = next((one.parts for one in containers if one.parts is not None), Parts())
                known = {key: getattr(parts, name) for key, name in _SHARED.items()}
            values = {key: float(value) for key, value in known.items() if value is not None}
            workloads = frozenset(owner for one in containers for owner in _owners(one))
            holding = Holding(pod.pod, pod.pod_uid, workloads, _device_labels(tick, device), values, tick.ts_ms)
            found.setdefault(pod.namespace, []).append(holding)
    return found


def _owners(holder: TickHolder) -> Iterator[tuple[str, str]]:
    """The kind and the name of each owner that is known."""
    if holder.workload is not None:
        yield holder.workload.kind, holder.workload.name
    for kind, name in (("Job", holder.job), ("StatefulSet", holder.statefulset), ("Deployment", holder.deployment)):
        if name is not None:
            yield kind, name


def _device_labels(tick: HoldingsTick, device: TickDevice) -> dict[str, str]:
    """What a metric selector can ask for. A model is written as Kubernetes labels can have it, without spaces."""
    labels = {
        "k8s_node_name": tick.node,
        "gpu_uuid": device.mig.parent_uuid if device.mig else device.uuid,
        "gpu_model": "-".join((device.model or "").split()),
    }
    if device.mig is not None:
        labels |= {"gpu_mig_uuid": device.uuid, "gpu_mig_profile": (device.mig.profile or "").replace("+", ".")}
    return {name: value for name, value in labels.items() if value}


# -- the fleet


@dataclass(slots=True)
class _HeardNode:
    """A node's last tick: its identity, until when it counts, and what its namespaces hold."""

    last: LastTick
    until_s: float
    namespaces: dict[str, list[Holding]]


@dataclass(slots=True)
class Holdings:
    """What every pod holds now."""

    _nodes: dict[str, _HeardNode] = field(default_factory=dict)
    _by_namespace: dict[str, set[str]] = field(default_factory=dict)

    def take(self, tick: HoldingsTick, now_s: float, age_s: float) -> Verdict:
        """A node's next tick, which was ``age_s`` old when it came; what kind of record it was."""
        before = self._nodes.get(tick.node)
        last = before.last if before else None
        verdict = replays.verdict(last, tick)
        if verdict != "replay":
            self._drop(tick.node)
            node = _HeardNode(replays.after(last, tick), now_s + STALE_S - max(0.0, age_s), holdings(tick))
            self._nodes[tick.node] = node
            for namespace in node.namespaces:
                self._by_namespace.setdefault(namespace, set()).add(tick.node)
        return verdict

    def forget(self, now_s: float) -> None:
        """Let go of the nodes whose last tick is too old."""
        for name in [name for name, node in self._nodes.items() if node.until_s <= now_s]:
            self._drop(name)

    def namespaces(self) -> list[str]:
        """Those in which a pod holds a device."""
        return sorted(self._by_namespace)

    def pods(
        self, namespace: str, now_s: float, select: Callable[[Mapping[str, str]], bool] = lambda _: True
    ) -> dict[str, list[Holding]]:
        """The holdings of each pod of a namespace, of devices whose labels ``select`` takes.

        While two pods of one name hold devices, on two nodes, it is the one that was heard of last.
        """
        found: dict[str, list[Holding]] = {}
        for name in self._by_namespace.get(namespace, ()):
            node = self._nodes[name]
            for holding in node.namespaces[namespace] if node.until_s > now_s else ():
                found.setdefault(holding.pod, []).append(holding)
        for some in found.values():
            uid = max(some, key=lambda one: one.ts_ms).pod_uid
            some[:] = [one for one in some if one.pod_uid in (uid, None) and select(one.labels)]
        return {pod: some for pod, some in found.items() if some}

    def __len__(self) -> int:
        """How many nodes are known."""
        return len(self._nodes)

    def _drop(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        for namespace in node.namespaces if node else ():
            nodes = self._by_namespace[namespace]
            nodes.discard(name)
            if not nodes:
                del self._by_namespace[namespace]
