"""The fleet now and in the last minutes, as ``gpustream top`` shows it. Pure.

In:       ticks of gpu.attributed (:mod:`gpustream.ticks`).
Out:      devices, nodes, pods and workloads as rows; for each device its last minutes and who held it.
State:    for each device the last tick, a ring of ``slots`` means, and at most :data:`MAX_TENURES` tenures. A device
          is forgotten if a tick of its node lacks it, a node if it was silent for :data:`FORGOTTEN_S`.
"""

import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick
from gpustream.ticks import Metrics, Tick, TickDevice
from topics.attributed import Parts, by_pod, team_of
from topics.idleness import (
    IDLE_BELOW,
    Activity,
    activity_of,
    activity_of_parts,
    beside_parts,
    is_idle,
    most_work_of,
    work_of,
)
from topics.samples import Process, silent_after_ms, silent_after_s

SILENT_S = 15.0
"""A node that has sent no tick for this long, and for three of its intervals, is silent: its values are old, and are
marked as old."""

FORGOTTEN_S = 600.0
"""A node that has sent no tick for this long is left out."""

MAX_TENURES = 64
XID_SHOWN_S = 300.0
"""For how long a device that had an XID error is marked."""

_RATE_S = 5.0

Status = Activity | Literal["silent"]
"""What a device does, in a word; ``silent``: its node sends no ticks."""

STATUSES: tuple[Status, ...] = ("busy", "held", "idle", "free", "failing", "silent")

METRICS = ("used_ratio", "memory_used_bytes", "power_watts", "temperature_celsius")
"""The attributes of :class:`gpustream.ticks.Metrics` whose last minutes are kept."""

_values_of_metrics = attrgetter(*METRICS)


class Holder(NamedTuple):
    """A pod on a device, and its own part of the device; a part that is not known is None.

    ``idle``: it does nothing with the device, as alerts judge that in a tick. A process without a pod has no namespace,
    and ``pod`` is then its PID.
    """

    namespace: str
    pod: str
    workload: str
    team: str
    used_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None
    idle: bool = False

    @property
    def name(self) -> str:
        """``namespace/pod``, or only the name of a process without a pod."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod


class Tenure(NamedTuple):
    """Who held a device, from a time to another. ``to_ms`` None: it still does. ``pods`` empty: nobody.

    ``or_before``: it was so at the first reading already.
    """

    from_ms: int
    to_ms: int | None
    pods: tuple[str, ...]
    or_before: bool


class RecentMeans:
    """Each of :data:`METRICS` as a ring of ``slots`` means over ``slot_ms`` each; NaN if nothing was measured."""

    __slots__ = ("_counts", "_rings", "_slot", "slot_ms")

    def __init__(self, slot_ms: int, slots: int) -> None:
        self.slot_ms, self._slot, self._counts = slot_ms, -1, array("I", [0]) * len(METRICS)
        self._rings = tuple(array("f", [math.nan]) * slots for _ in METRICS)

    def add(self, ts_ms: int, values: tuple[float | None, ...], interval_ms: int | None = None) -> None:
        """Adds the values of :data:`METRICS` at a time. Values older than the last slot are left out. Those of a node
        that is read less often than once a slot also stand for the time since its last tick."""
        slot = ts_ms // self.slot_ms
        slots = len(self._rings[0])
        if self._slot - slot >= slots:  # the node's clock was set back: what is here is of a time that is to come
            self._slot = slot - slots
        if slot < self._slot:
            return
        if slot > self._slot:
            is_gap = self._slot < 0 or (slot - self._slot) * self.slot_ms > silent_after_ms(interval_ms, 0)
            for ring, value in zip(self._rings, values, strict=True):
                for missed in range(max(self._slot + 1, slot - slots + 1), slot):
                    ring[missed % slots] = math.nan if is_gap or value is None else value
                ring[slot % slots] = math.nan
            self._slot, self._counts = slot, array("I", [0]) * len(METRICS)
        index = slot % slots
        for number, (ring, value) in enumerate(zip(self._rings, values, strict=True)):
            if value is not None:
                self._counts[number] += 1
                mean = ring[index]
                ring[index] = value if mean != mean else mean + (value - mean) / self._counts[number]

    def of(self, metric: str, now_ms: int) -> list[float | None]:
        """The means of a metric up to ``now_ms``, the oldest first; None if nothing was measured."""
        ring = self._rings[METRICS.index(metric)]
        last, slots = now_ms // self.slot_ms, len(ring)
        slot_numbers = range(last - slots + 1, last + 1)
        values = [
            ring[number % slots] if self._slot - slots < number <= self._slot else math.nan for number in slot_numbers
        ]
        return [None if math.isnan(value) else value for value in values]

    @property
    def slots(self) -> int:
        return len(self._rings[0])

    @property
    def span_ms(self) -> int:
        """The time that all slots cover together."""
        return self.slot_ms * self.slots


class Device:
    """A GPU or MIG device: its state in the last tick, and its last minutes."""

    __slots__ = (
        "_activity", "attribution", "cluster", "gpu", "history", "holders", "index", "metrics", "mig", "model", "node",
        "parts", "processes", "silent", "state", "tenures", "ts_ms", "unwell", "uuid", "xid", "xid_ms", "zone",
    )  # fmt: skip

    def __init__(self, cluster: str, node: str, uuid: str, history: RecentMeans) -> None:
        self.cluster, self.node, self.uuid, self.history = cluster, node, uuid, history
        self.gpu, self.mig, self.model, self.zone, self.state = uuid, "", "", "", "ok"
        self.index: int | None = None
        self.holders: list[Holder] = []
        self.parts: list[Device] = []
        self.processes: tuple[Process, ...] = ()
        self.tenures: deque[Tenure] = deque(maxlen=MAX_TENURES)
        self.metrics = Metrics()
        self.xid: int | None = None
        self.xid_ms = self.ts_ms = 0
        self.attribution = ""
        self.silent = self.unwell = False
        self._activity: Activity = "free"

    @property
    def where(self) -> str:
        """Its place: the node, the GPU's index there, and a MIG device's profile."""
        return " ".join(filter(None, (self.node, f"GPU {'?' if self.index is None else self.index}", self.mig)))

    @property
    def status(self) -> Status:
        """What the device does. A GPU that is cut into MIG devices does what the busiest of them does."""
        if self.silent:
            return "silent"
        if self.state in ("lost", "timeout") or self.unwell:
            return "failing"
        if self.parts:
            return activity_of_parts({part.status for part in self.parts})
        return self._activity

    @property
    def trouble(self) -> str:
        """What is wrong with the device, in a few words; empty if nothing is."""
        trouble = {"lost": "lost", "timeout": "does not answer"}.get(self.state, "")
        return trouble or ("unwell" if self.unwell else "") or (f"XID {self.xid}" if self.xid is not None else "")

    def first_tenure_of(self, name: str) -> Tenure:
        """The tenure with which the pod of this name, which holds the device, began."""
        return list(itertools.takewhile(lambda tenure: name in tenure.pods, reversed(self.tenures)))[-1]

    def update(self, tick: Tick, device: TickDevice, holders: list[Holder]) -> None:
        """Updates the device from its part of a tick. ``holders`` are the pods and processes that hold it."""
        names = tuple(holder.name for holder in holders)
        if tick.ts_ms < self.ts_ms - self.history.span_ms:  # the node's clock was set back
            self.tenures.clear()
        if not self.tenures or self.tenures[-1].pods != names:
            if self.tenures:
                self.tenures[-1] = self.tenures[-1]._replace(to_ms=tick.ts_ms)
            self.tenures.append(Tenure(tick.ts_ms, None, names, or_before=not self.tenures))
        while (ended := self.tenures[0].to_ms) is not None and ended < tick.ts_ms - self.history.span_ms:
            self.tenures.popleft()
        self.index, self.model, self.state = device.index, device.model or "", device.state
        if device.mig is not None:
            self.gpu, self.mig = device.mig.parent_uuid, device.mig.profile or "MIG"
        self.holders, self.processes, self.metrics = holders, device.processes or (), device.metrics
        utilizations = [holder.used_ratio or 0.0 for holder in holders]
        holder_work = max([most_work_of(device.holders, self.processes), *utilizations])
        self._activity = activity_of(device.state, work_of(device.metrics), holder_work, held=bool(holders))
        self.ts_ms, self.attribution = tick.ts_ms, tick.attribution_of(device)
        for event in device.events or ():
            if event.kind == "xid":
                self.xid, self.xid_ms = event.code, tick.ts_ms if event.ts_ms is None else event.ts_ms
        if self.xid is not None and tick.ts_ms - self.xid_ms > XID_SHOWN_S * 1000:
            self.xid = None
        self.history.add(tick.ts_ms, _values_of_metrics(device.metrics), tick.interval_ms)


class Node:
    """A node and its devices, in the order of its last tick. ``gpus`` are the physical ones."""

    __slots__ = ("at_s", "cluster", "devices", "interval_ms", "last", "name", "zone")

    def __init__(self, cluster: str, name: str) -> None:
        self.cluster, self.name, self.zone = cluster, name, ""
        self.at_s = 0.0
        self.interval_ms: int | None = None
        self.last: LastTick | None = None
        self.devices: dict[str, Device] = {}

    @property
    def gpus(self) -> list[Device]:
        return [device for device in self.devices.values() if not device.mig]


class Use(NamedTuple):
    """A pod, a workload or a process without a pod, and what it does with the GPUs that it holds, alone or with others.

    ``used_ratio`` is the mean over its devices, memory and power are sums over them; None if none reports it.
    ``devices`` are those that it holds, and ``since`` is the tenure with which it got the first of them.
    ``gpus`` and ``idle`` count each GPU once.
    """

    namespace: str
    name: str
    workload: str
    team: str
    pods: int
    gpus: int
    idle: int
    used_ratio: float | None
    memory_used_bytes: float | None
    power_watts: float | None
    since: Tenure
    devices: tuple[Device, ...]

    @property
    def who(self) -> str:
        """``namespace/pod``, or only the name of a process without a pod."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Flow(NamedTuple):
    """The rate of ticks. ``latency_s`` is the median time from a tick's making to its arrival; None without ticks."""

    ticks: int
    ticks_per_s: float
    latency_s: float | None


class Fleet:
    """Every node and device, kept up to date from ticks.

    ``command_of`` gives the command of a process by its node and PID; empty if it is not known. ``team_label`` is the
    label that names a pod's team. ``now_ms`` is the time of the newest tick, but not later than when a tick came last.
    """

    def __init__(
        self,
        command_of: Callable[[str, int], str] = lambda _node, _pid: "",
        *,
        team_label: str = "team",
        slot_ms: int = 5_000,
        slots: int = 72,
    ) -> None:
        self._command_of, self._team_label, self._slot_ms, self._slots = command_of, team_label, slot_ms, slots
        self.nodes: dict[tuple[str, str], Node] = {}
        self.now_ms = 0
        self._ticks = 0
        self._arrivals: deque[tuple[float, float]] = deque()
        self._newest_s = float("-inf")

    def observe(self, tick: Tick, at_s: float, wall_ms: int) -> None:
        """Updates the fleet from a tick that arrived at ``at_s`` (monotonic clock), which is ``wall_ms`` (wall clock).
        A replay changes nothing."""
        node = self.nodes.get((tick.cluster, tick.node))
        if node is None:
            node = self.nodes[tick.cluster, tick.node] = Node(tick.cluster, tick.node)
        if replays.verdict(node.last, tick) == "replay":
            return
        node.at_s, node.interval_ms, node.last = at_s, tick.interval_ms, replays.after(node.last, tick)
        node.zone = tick.node_labels.get("topology.kubernetes.io/zone", "")
        unwell = {entry.device_id for entry in tick.unwell}
        previous, node.devices = node.devices, {}
        for tick_device in tick.devices:
            device = previous.get(tick_device.uuid)
            if device is None:
                device = Device(tick.cluster, tick.node, tick_device.uuid, RecentMeans(self._slot_ms, self._slots))
            device.update(tick, tick_device, self._holders(tick.node, tick_device))
            device.zone, device.unwell, device.silent, device.parts = node.zone, tick_device.uuid in unwell, False, []
            node.devices[tick_device.uuid] = device
        for device in node.devices.values():
            parent = node.devices.get(device.gpu)
            if device.mig and parent is not None and not parent.mig:  # none is a part of itself, whatever a record says
                parent.parts.append(device)
        self.now_ms = min(max(self.now_ms, tick.ts_ms), wall_ms)  # a node's clock may be ahead
        self._ticks += 1
        self._newest_s = max(self._newest_s, at_s)
        if self._newest_s - at_s <= _RATE_S:  # else it is old: its partition was read after another one
            self._arrivals.append((at_s, max(0.0, (wall_ms - tick.ts_ms) / 1000)))
        while self._arrivals and self._newest_s - self._arrivals[0][0] > _RATE_S:
            self._arrivals.popleft()

    def age(self, now_s: float) -> None:
        """Marks nodes that have become silent, and forgets those silent for long. Call it before you read."""
        while self._arrivals and now_s - self._arrivals[0][0] > _RATE_S:
            self._arrivals.popleft()
        for key, node in list(self.nodes.items()):
            silent_s = silent_after_s(node.interval_ms, SILENT_S)
            if now_s - node.at_s > max(FORGOTTEN_S, silent_s):
                del self.nodes[key]
            elif now_s - node.at_s > silent_s:
                for device in node.devices.values():
                    device.silent = True

    def flow(self) -> Flow:
        """The rate and the latency of the ticks of the last seconds."""
        latencies = sorted(latency_s for _, latency_s in self._arrivals)
        median = latencies[len(latencies) // 2] if latencies else None
        return Flow(self._ticks, len(latencies) / _RATE_S, median)

    def devices(self) -> Iterator[Device]:
        for node in self.nodes.values():
            yield from node.devices.values()

    def gpus(self) -> Iterator[Device]:
        return (device for device in self.devices() if not device.mig)

    def _holders(self, node: str, device: TickDevice) -> list[Holder]:
        """Each pod that holds the device, once; each process on a device that no pod holds. A holder that was not given
        the device is not idle."""
        held: list[tuple[Holder, str | None, bool]] = []  # each with its pod's UID, and whether it was only observed
        for pod, (first, *others) in by_pod(device.holders).items():
            parts = next((container.parts for container in (first, *others) if container.parts is not None), Parts())
            workload = f"{first.workload.kind}/{first.workload.name}" if first.workload else ""
            team = team_of(first.labels, first.namespace_labels, self._team_label) or ""
            part_values = msgspec.structs.astuple(parts)
            held.append((Holder(pod.namespace, pod.pod, workload, team, *part_values), pod.pod_uid, first.observed))
        processes = device.processes if held else ()  # without a pod the part of a process is its work
        for process in () if held else device.processes or ():
            part_values = process.sm_utilization_ratio, process.memory_used_bytes
            name = f"pid {process.pid}"
            held.append((Holder("", name, self._command_of(node, process.pid), "", *part_values), None, False))
        work = work_of(device.metrics)
        uids_and_parts = [(uid, holder.used_ratio) for holder, uid, _ in held]
        work_of_processes, rest = beside_parts(work, device.unattributed, processes, uids_and_parts)
        with_idleness = []
        for (holder, _, observed), process_work in zip(held, work_of_processes, strict=True):
            is_known_idle = is_idle(IDLE_BELOW, work, holder.used_ratio, process_work, rest) is True
            with_idleness.append(holder._replace(idle=is_known_idle and not observed))
        return with_idleness


def pods(devices: Iterable[Device]) -> list[Use]:
    """Every pod, and every process without one, that holds one of these devices."""
    return _uses(
        devices,
        lambda device, holder: (holder.namespace, holder.pod, device.cluster, "" if holder.namespace else device.node),
    )


def workloads(devices: Iterable[Device]) -> list[Use]:
    """Every workload whose pods hold one of these devices; a pod without a known one is its own."""
    uses = _uses(devices, lambda device, holder: (holder.namespace, holder.workload or holder.pod, device.cluster, ""))
    return [use._replace(name=use.workload or use.name) for use in uses]


def _uses(devices: Iterable[Device], key: Callable[[Device, Holder], tuple[str, ...]]) -> list[Use]:
    """The sums over the devices of each holder: its part of each, and the whole of a device that a pod holds alone."""
    pairs_by_key: dict[tuple[str, ...], list[tuple[Device, Holder]]] = {}
    for device in devices:
        for holder in device.holders:
            pairs_by_key.setdefault(key(device, holder), []).append((device, holder))
    uses = []
    for pairs in pairs_by_key.values():
        ratios, memory, power = list[float](), list[float](), list[float]()
        used_devices = set[Device]()
        for device, holder in pairs:
            part = holder.used_ratio, holder.memory_used_bytes, holder.power_watts
            if holder.namespace and len(device.holders) == 1:
                metrics = device.metrics
                part = metrics.used_ratio, metrics.memory_used_bytes, metrics.power_watts
            for values, value in zip((ratios, memory, power), part, strict=True):
                values += [] if value is None else [value]
            used_devices |= set() if part[0] is None else {device}
        first, gpus = pairs[0][1], {device.gpu for device, _ in pairs}
        not_idle = {device.gpu for device, holder in pairs if not holder.idle or device.status not in ("busy", "idle")}
        use = Use(
            first.namespace,
            first.pod,
            first.workload,
            first.team,
            pods=len({(holder.namespace, holder.pod) for _, holder in pairs}),
            gpus=len(gpus),
            idle=len(gpus - not_idle),
            used_ratio=sum(ratios) / len(used_devices) if used_devices else None,
            memory_used_bytes=sum(memory) if memory else None,
            power_watts=sum(power) if power else None,
            since=min(
                (device.first_tenure_of(holder.name) for device, holder in pairs), key=lambda since: since.from_ms
            ),
            devices=tuple(dict.fromkeys(device for device, _ in pairs)),
        )
        uses.append(use)
    return uses
