"""The current GPU metrics of pods, workloads and namespaces, from the last tick of each node. Pure.

In:       ticks, each with its age when it was read; times in seconds on a clock that never steps back.
Out:      the pods that hold a device, with their values; a metric of one pod, or of several together.
State:    each node's identity and the holdings of its namespaces, until its tick is :data:`STALE_S` and three of the
          node's intervals old. A pod that is missing from its node's next tick is removed then, or an autoscaler would
          still count it.

A pod that alone holds a GPU or a MIG device has all its metrics. Pods that share a device each have their parts of its
utilization, memory and power, and none of its other metrics. NVML has no utilization of a MIG device: the share of time
in which its engines were busy stands for it. :data:`SERVED` says how values of several devices or pods are combined.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick, Verdict
from topics.attributed import DIVIDED, Parts, Workload, pods_of
from topics.catalogue import CATALOGUE
from topics.samples import Mig, silent_after_s
from topics.topic import Name, Number, UInt, Version, decoder

STALE_S = 30.0
"""Older values are not served, because an autoscaler does not look at timestamps."""

Combination = Literal["mean", "sum", "max"]

_BY_UNIT: dict[str, Combination] = {
    "ratio": "mean",
    "hertz": "mean",
    "bytes": "sum",
    "bytes_per_second": "sum",
    "watts": "sum",
    "celsius": "max",
}

SERVED: dict[str, Combination] = {
    key: _BY_UNIT[metric.unit]
    for key, metric in CATALOGUE.items()
    if metric.kind == "gauge" and metric.unit in _BY_UNIT
}
"""The metrics that are served, and how several values are combined: all gauges but states and bitmasks."""

SUMMED = frozenset(key for key in SERVED if CATALOGUE[key].unit not in {"celsius", "hertz"})
"""The metrics of which a sum over pods has a meaning: that of a ratio is how many GPUs are used in all."""

_MOST = 2.0**63
"""A larger value counts as this one: sums of values stay finite, and a producer may write any number."""

_NODE = "k8s_node_name"
_COMBINE: dict[Combination, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
}


# -- the part of a tick that is decoded


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
    interval_ms: UInt | None = None
    devices: tuple[TickDevice, ...] = ()


decode = decoder(HoldingsTick)


# -- holdings


class Holding(NamedTuple):
    """A pod on a device. ``labels``: those of the device. ``workloads``: the kind and name of each owner of the pod."""

    pod: str
    pod_uid: str | None
    workloads: frozenset[tuple[str, str]]
    labels: Mapping[str, str]
    values: Mapping[str, float]
    ts_ms: int


def pod_value(holdings: Iterable[Holding], metric: str) -> float | None:
    """The metric of a pod, combined from its devices that have it; None if none has."""
    values = [holding.values[metric] for holding in holdings if metric in holding.values]
    return _COMBINE[SERVED[metric]](values) if values else None


def combined_value(pods: Mapping[str, Iterable[Holding]], metric: str) -> float | None:
    """The metric of several pods, combined from those that have it; None if none has."""
    values = [value for holdings in pods.values() if (value := pod_value(holdings, metric)) is not None]
    return _COMBINE[SERVED[metric]](values) if values else None


def holdings_by_namespace(tick: HoldingsTick) -> dict[str, list[Holding]]:
    """The holdings of all pods of a tick, by namespace. A batch job is none: its partition is no namespace."""
    by_namespace: dict[str, list[Holding]] = {}
    for device in {device.uuid: device for device in tick.devices}.values():
        device_labels = {
            _NODE: tick.node,
            "gpu_uuid": device.mig.parent_uuid if device.mig else device.uuid,
            "gpu_model": "-".join((device.model or "").split()),  # a label of Kubernetes may have no spaces
        }
        if device.mig is not None:
            profile = (device.mig.profile or "").replace("+", ".")
            device_labels |= {"gpu_mig_uuid": device.uuid, "gpu_mig_profile": profile}
        labels = {name: value for name, value in device_labels.items() if value}
        pods = pods_of(device.holders)
        for pod, containers in pods.items():
            if len(pods) == 1:
                metrics = {key: device.metrics.get(key) for key in SERVED}
                if device.mig is not None and metrics["gpu_utilization_ratio"] is None:
                    metrics["gpu_utilization_ratio"] = metrics["graphics_engine_active_ratio"]
            else:
                parts = next((holder.parts for holder in containers if holder.parts is not None), Parts())
                metrics = {key: getattr(parts, name) for name, key in DIVIDED.items()}
            values = {key: float(max(-_MOST, min(value, _MOST))) for key, value in metrics.items() if value is not None}
            owners = {(top.kind, top.name) for holder in containers if (top := holder.workload) is not None}
            for holder in containers:
                named = (("Job", holder.job), ("StatefulSet", holder.statefulset), ("Deployment", holder.deployment))
                owners |= {(kind, name) for kind, name in named if name is not None}
            holding = Holding(pod.pod, pod.pod_uid, frozenset(owners), labels, values, tick.ts_ms)
            by_namespace.setdefault(pod.namespace, []).append(holding)
    return by_namespace


# -- the fleet


@dataclass(slots=True)
class _NodeHoldings:
    """A node's last tick: its identity, when it expires, and the holdings of each namespace."""

    last: LastTick
    expires_s: float
    namespaces: dict[str, list[Holding]]


@dataclass(slots=True)
class Holdings:
    """The current holdings of all pods."""

    _nodes: dict[str, _NodeHoldings] = field(default_factory=dict)
    _by_namespace: dict[str, set[str]] = field(default_factory=dict)

    def add_tick(self, tick: HoldingsTick, now_s: float, age_s: float) -> Verdict:
        """Add a node's next tick, which was ``age_s`` old when it was read. A replay changes nothing."""
        before = self._nodes.get(tick.node)
        last = before.last if before else None
        verdict = replays.verdict(last, tick)
        if verdict != "replay":
            self._remove(tick.node)
            expires_s = now_s + silent_after_s(tick.interval_ms, STALE_S) - max(0.0, age_s)
            node = _NodeHoldings(replays.after(last, tick), expires_s, holdings_by_namespace(tick))
            self._nodes[tick.node] = node
            for namespace in node.namespaces:
                self._by_namespace.setdefault(namespace, set()).add(tick.node)
        return verdict

    def expire(self, now_s: float) -> None:
        """Remove the nodes whose last tick is too old."""
        for name in [name for name, node in self._nodes.items() if node.expires_s <= now_s]:
            self._remove(name)

    def namespaces(self) -> list[str]:
        """The namespaces in which a pod holds a device."""
        return sorted(self._by_namespace)

    def pods(
        self, namespace: str, now_s: float, select: Callable[[Mapping[str, str]], bool] = lambda _: True
    ) -> dict[str, list[Holding]]:
        """The holdings of each pod of a namespace, on the devices whose labels ``select`` accepts.

        A pod is on one node: if two nodes name it, the one with the latest tick counts. They do after the pod was made
        again elsewhere, and while a node has another name than before. A holding without a UID is of the pod of its
        name with a UID, if there is one.
        """
        holdings_by_pod: dict[str, list[Holding]] = {}
        for name in self._by_namespace.get(namespace, ()):
            node = self._nodes[name]
            for holding in node.namespaces[namespace] if node.expires_s > now_s else ():
                holdings_by_pod.setdefault(holding.pod, []).append(holding)
        for holdings in holdings_by_pod.values():
            newest = max(holdings, key=lambda held: (held.ts_ms, held.labels[_NODE], held.pod_uid is not None))
            holdings[:] = [
                holding
                for holding in holdings
                if holding.labels[_NODE] == newest.labels[_NODE]
                and holding.pod_uid in (newest.pod_uid, None)
                and select(holding.labels)
            ]
        return {pod: holdings for pod, holdings in holdings_by_pod.items() if holdings}

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self._nodes)

    def _remove(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        for namespace in node.namespaces if node else ():
            nodes = self._by_namespace[namespace]
            nodes.discard(name)
            if not nodes:
                del self._by_namespace[namespace]
