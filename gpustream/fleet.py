"""The fleet as it is now, and as it was in the last minutes: what a person looks at. Pure.

In:       ticks of gpu.attributed (:mod:`gpustream.ticks`).
Out:      devices, nodes, pods and workloads as rows; of a device its last minutes and who held it.
State:    of each device the last tick, a ring of ``slots`` means, and at most :data:`MOST_TENURES` holders. What ended
          is forgotten: a device that a tick lacks, a node that was silent for :data:`FORGOTTEN_S`.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick
from gpustream.ticks import Tick, TickDevice, TickHolder, TickParts
from topics.attributed import by_pod
from topics.idleness import IDLE_BELOW, Activity, activity_of, work_of
from topics.samples import Process

SILENT_S = 15.0
"""A node is silent if it has sent no tick for so long: what is shown of it is old, and marked as such."""

FORGOTTEN_S = 600.0
"""A node is left out if it has sent no tick for so long."""

MOST_TENURES = 64
XID_SHOWN_S = 300.0
"""For how long a device that had an XID error is marked."""

_RATE_S = 5.0

Status = Activity | Literal["silent"]
"""What a device does, in a word; ``silent``: its node says nothing."""

STATUSES: tuple[Status, ...] = ("busy", "held", "idle", "free", "failing", "silent")

METRICS = ("used_ratio", "memory_used_bytes", "power_watts", "temperature_celsius")
"""What is kept of the last minutes, by the attributes of :class:`Device`."""


class Held(NamedTuple):
    """A pod on a device, and its own part; None of it is not known. A process without a pod has no namespace."""

    namespace: str
    pod: str
    workload: str
    team: str
    used_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None

    @property
    def name(self) -> str:
        """How it is called."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod


class Tenure(NamedTuple):
    """Who held a device, from a time to another. ``to_ms`` None: it still does. ``pods`` empty: nobody."""

    from_ms: int
    to_ms: int | None
    pods: tuple[str, ...]


class RecentMeans:
    """The means of the last ``slots`` times ``slot_ms`` of each of :data:`METRICS`; NaN where nothing was measured."""

    __slots__ = ("_counted", "_rings", "_slot", "_slot_ms")

    def __init__(self, slot_ms: int, slots: int) -> None:
        self._slot_ms, self._slot, self._counted = slot_ms, -1, 0
        self._rings = tuple(array("f", [math.nan]) * slots for _ in METRICS)

    def add(self, ts_ms: int, values: tuple[float | None, ...]) -> None:
        """Takes in what was measured at a time. What is older than the last slot is left out."""
        slot = ts_ms // self._slot_ms
        slots = len(self._rings[0])
        if slot < self._slot:
            return
        if slot > self._slot:
            for ring in self._rings:
                for gone in range(max(self._slot + 1, slot - slots + 1), slot + 1):
                    ring[gone % slots] = math.nan
            self._slot, self._counted = slot, 0
        self._counted += 1
        at = slot % slots
        for ring, value in zip(self._rings, values, strict=True):
            if value is not None:
                mean = ring[at]
                ring[at] = value if mean != mean else mean + (value - mean) / self._counted

    def of(self, metric: str, now_ms: int) -> list[float | None]:
        """The means of a metric up to ``now_ms``, the oldest first; None where nothing was measured."""
        ring = self._rings[METRICS.index(metric)]
        last, slots = now_ms // self._slot_ms, len(ring)
        numbers = range(last - slots + 1, last + 1)
        values = [ring[n % slots] if self._slot - slots < n <= self._slot else math.nan for n in numbers]
        return [None if math.isnan(value) else value for value in values]

    @property
    def span_ms(self) -> int:
        """How far back it goes."""
        return self._slot_ms * len(self._rings[0])


class Device:
    """A GPU or MIG device: what its last tick said, and its last minutes."""

    __slots__ = (
        "_doing", "attribution", "cluster", "gpu", "held", "history", "index", "memory_total_bytes",
        "memory_used_bytes", "mig", "model", "node", "parts", "power_limit_watts", "power_watts", "processes",
        "silent", "state", "temperature_celsius", "tenures", "ts_ms", "unwell", "used_ratio", "uuid", "xid",
        "xid_ms", "zone",
    )  # fmt: skip

    def __init__(self, cluster: str, node: str, uuid: str, history: RecentMeans) -> None:
        self.cluster, self.node, self.uuid, self.history = cluster, node, uuid, history
        self.gpu, self.mig, self.model, self.zone, self.state = uuid, "", "", "", "ok"
        self.index: int | None = None
        self.held: list[Held] = []
        self.parts: list[Device] = []
        self.processes: tuple[Process, ...] = ()
        self.tenures: deque[Tenure] = deque(maxlen=MOST_TENURES)
        self.used_ratio: float | None = None
        self.memory_used_bytes: float | None = None
        self.memory_total_bytes: float | None = None
        self.power_watts: float | None = None
        self.power_limit_watts: float | None = None
        self.temperature_celsius: float | None = None
        self.xid: int | None = None
        self.xid_ms = self.ts_ms = 0
        self.attribution = ""
        self.silent = self.unwell = False
        self._doing: Activity = "free"

    @property
    def where(self) -> str:
        """Its place: the node, the GPU's index there, and a MIG device's profile."""
        return " ".join(filter(None, (self.node, f"GPU {'?' if self.index is None else self.index}", self.mig)))

    @property
    def status(self) -> Status:
        """What it does. A GPU that is cut into parts does what the busiest part does."""
        if self.silent:
            return "silent"
        if self.state in ("lost", "timeout") or self.unwell:
            return "failing"
        if self.parts:
            found = {part.status for part in self.parts}
            return next((one for one in ("failing", "busy", "held", "idle") if one in found), "free")
        return self._doing

    @property
    def trouble(self) -> str:
        """What is wrong with it, in a few words; empty if nothing is known to be."""
        found = {"lost": "lost", "timeout": "does not answer"}.get(self.state, "")
        return found or ("unwell" if self.unwell else "") or (f"XID {self.xid}" if self.xid is not None else "")

    def is_idle_for(self, one: Held) -> bool:
        """Whether one does nothing with it: by its own part, if that is known."""
        if one.used_ratio is None or self.status not in ("busy", "idle"):
            return self.status == "idle"
        return one.used_ratio < IDLE_BELOW

    def held_since_ms(self, name: str) -> int:
        """When this pod got it, as far back as is known."""
        since_ms = self.ts_ms
        for tenure in reversed(self.tenures):
            if name not in tenure.pods:
                break
            since_ms = tenure.from_ms
        return since_ms

    def take(self, tick: Tick, device: TickDevice, held: list[Held]) -> None:
        """Takes in what a tick says of it."""
        of = device.metrics
        names = tuple(one.name for one in held)
        same = bool(self.tenures) and self.tenures[-1].pods == names
        if not same:
            if self.tenures:
                self.tenures[-1] = self.tenures[-1]._replace(to_ms=tick.ts_ms)
            self.tenures.append(Tenure(tick.ts_ms, None, names))
        while (ended := self.tenures[0].to_ms) is not None and ended < tick.ts_ms - self.history.span_ms:
            self.tenures.popleft()
        self.index, self.model, self.state = device.index, device.model or "", device.state
        if device.mig is not None:
            self.gpu, self.mig = device.mig.parent_uuid, device.mig.profile or "MIG"
        self.held, self.processes = held, device.processes or ()
        done = [one.used_ratio or 0.0 for one in held] + [one.sm_utilization_ratio or 0.0 for one in self.processes]
        self._doing = activity_of(device.state, work_of(of), max(done, default=0.0), held=bool(held))
        self.used_ratio, self.memory_used_bytes = of.used_ratio, of.memory_used_bytes
        self.memory_total_bytes, self.power_limit_watts = of.memory_total_bytes, of.power_limit_watts
        self.power_watts, self.temperature_celsius = of.power_watts, of.temperature_celsius
        self.ts_ms, self.attribution = tick.ts_ms, tick.attribution
        for event in device.events or ():
            if event.kind == "xid":
                self.xid, self.xid_ms = event.code, tick.ts_ms if event.ts_ms is None else event.ts_ms
        if self.xid is not None and tick.ts_ms - self.xid_ms > XID_SHOWN_S * 1000:
            self.xid = None
        self.history.add(
            tick.ts_ms, (of.used_ratio, self.memory_used_bytes, self.power_watts, self.temperature_celsius)
        )


class Node:
    """A node and its devices, in the order of its last tick. ``gpus`` are the physical ones."""

    __slots__ = ("at_s", "cluster", "devices", "last", "name", "zone")

    def __init__(self, cluster: str, name: str) -> None:
        self.cluster, self.name, self.zone = cluster, name, ""
        self.at_s = 0.0
        self.last: LastTick | None = None
        self.devices: dict[str, Device] = {}

    @property
    def gpus(self) -> list[Device]:
        """The physical GPUs."""
        return [device for device in self.devices.values() if not device.mig]


class Use(NamedTuple):
    """A pod, a workload or a process without a pod, and what it does with the GPUs that it holds, alone or with others.

    ``used_ratio`` is the mean over its devices, None if none says it; ``devices`` are those that it holds, and
    ``since_ms`` is when it got the first of those, as far back as is known. ``nodes`` and ``gpus`` count each once.
    """

    namespace: str
    name: str
    workload: str
    team: str
    pods: int
    nodes: int
    gpus: int
    idle: int
    used_ratio: float | None
    memory_used_bytes: float
    power_watts: float
    since_ms: int
    devices: tuple[Device, ...]

    @property
    def who(self) -> str:
        """How it is called."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Flow(NamedTuple):
    """How ticks come in: ``latency_s`` is the median of tick made to tick arrived, None before the first."""

    ticks: int
    ticks_per_s: float
    latency_s: float | None


class Fleet:
    """Takes ticks in, and gives the fleet as it is.

    ``command_of`` gives the command of a process by its node and PID; empty if it is not known.
    """

    def __init__(
        self,
        command_of: Callable[[str, int], str] = lambda _node, _pid: "",
        *,
        slot_ms: int = 5_000,
        slots: int = 72,
    ) -> None:
        self._command_of, self._slot_ms, self._slots = command_of, slot_ms, slots
        self.nodes: dict[tuple[str, str], Node] = {}
        self.now_ms = 0
        self._ticks = 0
        self._arrivals: deque[tuple[float, float]] = deque()
        self._newest_s = float("-inf")

    def observe(self, tick: Tick, at_s: float, wall_ms: int) -> bool:
        """Takes a tick in that arrived at ``at_s`` of the monotonic clock, when the wall clock said ``wall_ms``.
        False for a replay."""
        node = self.nodes.get((tick.cluster, tick.node))
        if node is None:
            node = self.nodes[tick.cluster, tick.node] = Node(tick.cluster, tick.node)
        if replays.verdict(node.last, tick) == "replay":
            return False
        node.at_s, node.last = at_s, replays.after(node.last, tick)
        node.zone = tick.node_labels.get("topology.kubernetes.io/zone", "")
        unwell = {one.uuid for one in tick.unwell}
        before, node.devices = node.devices, {}
        for of in tick.devices:
            device = before.get(of.uuid)
            if device is None:
                device = Device(tick.cluster, tick.node, of.uuid, RecentMeans(self._slot_ms, self._slots))
            device.take(tick, of, self._held(tick.node, of))
            device.zone, device.unwell, device.silent, device.parts = node.zone, of.uuid in unwell, False, []
            node.devices[of.uuid] = device
            if device.mig and (parent := node.devices.get(device.gpu)) is not None:
                parent.parts.append(device)
        self.now_ms = max(self.now_ms, tick.ts_ms)
        self._ticks += 1
        self._newest_s = max(self._newest_s, at_s)
        if self._newest_s - at_s <= _RATE_S:  # else it is of the past, as of a partition that is read after another
            self._arrivals.append((at_s, max(0.0, (wall_ms - tick.ts_ms) / 1000)))
        while self._newest_s - self._arrivals[0][0] > _RATE_S:
            self._arrivals.popleft()
        return True

    def age(self, now_s: float) -> None:
        """Marks nodes that have become silent, and forgets those that were for long. Call it before you look."""
        while self._arrivals and now_s - self._arrivals[0][0] > _RATE_S:
            self._arrivals.popleft()
        for key, node in list(self.nodes.items()):
            if now_s - node.at_s > FORGOTTEN_S:
                del self.nodes[key]
            elif now_s - node.at_s > SILENT_S:
                for device in node.devices.values():
                    device.silent = True

    def flow(self) -> Flow:
        """How ticks came in, in the last seconds."""
        latencies = sorted(latency_s for _, latency_s in self._arrivals)
        median = latencies[len(latencies) // 2] if latencies else None
        return Flow(self._ticks, len(latencies) / _RATE_S, median)

    def devices(self) -> Iterator[Device]:
        """Every device of every node."""
        for node in self.nodes.values():
            yield from node.devices.values()

    def gpus(self) -> Iterator[Device]:
        """Every physical GPU."""
        return (device for device in self.devices() if not device.mig)

    def _held(self, node: str, device: TickDevice) -> list[Held]:
        """Each pod that holds the device, once; each process on a device that no pod holds."""
        if not device.holders:
            return [
                Held("", f"pid {one.pid}", self._command_of(node, one.pid), "", one.sm_utilization_ratio,
                     one.memory_used_bytes)
                for one in device.processes or ()
            ]  # fmt: skip
        if len(device.holders) == 1:
            return [_held(device.holders[0], device.holders)]
        return [_held(holders[0], holders) for holders in by_pod(device.holders).values()]


def _held(first: TickHolder, holders: Iterable[TickHolder]) -> Held:
    """A pod by its containers on a device: one of those has its parts."""
    parts = next((one.parts for one in holders if one.parts is not None), TickParts())
    workload = f"{first.workload.kind}/{first.workload.name}" if first.workload else ""
    team = first.labels.get("team") or first.namespace_labels.get("team", "")
    return Held(first.namespace, first.pod, workload, team, *msgspec.structs.astuple(parts))


def pods(devices: Iterable[Device]) -> list[Use]:
    """Every pod, and every process without one, that holds one of these devices."""
    return _uses(devices, lambda device, one: (one.namespace, one.pod, "" if one.namespace else device.node))


def workloads(devices: Iterable[Device]) -> list[Use]:
    """Every workload whose pods hold one of these devices; a pod without a known one is its own."""
    found = _uses(devices, lambda device, one: (one.namespace, one.workload or one.pod, device.cluster))
    return [use._replace(name=use.workload or use.name) for use in found]


def _uses(devices: Iterable[Device], key: Callable[[Device, Held], tuple[str, str, str]]) -> list[Use]:
    held: dict[tuple[str, str, str], list[tuple[Device, Held]]] = {}
    for device in devices:
        for one in device.held:
            held.setdefault(key(device, one), []).append((device, one))
    return [_use(of) for of in held.values()]


def _use(of: list[tuple[Device, Held]]) -> Use:
    """What one has of its devices: its own part of each, and all of a device that it has alone."""
    ratios, memory, power = list[float](), 0.0, 0.0
    for device, part in of:
        used, memory_bytes, watts = part[4:]
        if len(device.held) == 1:
            memory_bytes = device.memory_used_bytes if memory_bytes is None else memory_bytes
            watts = device.power_watts if watts is None else watts
        used = device.used_ratio if used is None else used
        ratios += [] if used is None else [used]
        memory += memory_bytes or 0.0
        power += watts or 0.0
    one = of[0][1]
    return Use(
        one.namespace,
        one.pod,
        one.workload,
        one.team,
        pods=len({(part.namespace, part.pod) for _, part in of}),
        nodes=len({device.node for device, _ in of}),
        gpus=len({device.gpu for device, _ in of}),
        idle=len({device.gpu for device, part in of if device.is_idle_for(part)}),
        used_ratio=sum(ratios) / len(ratios) if ratios else None,
        memory_used_bytes=memory,
        power_watts=power,
        since_ms=min(device.held_since_ms(part.name) for device, part in of),
        devices=tuple(device for device, _ in of),
    )
