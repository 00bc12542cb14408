"""A simulated fleet: the pods of its nodes, the readings of their GPUs, and what kubelets and the API server report.

In: the number of nodes and GPUs, a seed, the mean life of a pod; and times that only go forward. Out: ticks.
State: the recent pods of each node, and each GPU since its last redraw.
All times are milliseconds since the fleet's start; records have them as time of day.
Everything depends only on the seed and on the time since the start, however often it is read.
"""

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from producers.records import checked_name
from producers.simulated import names
from producers.simulated.behaviours import BLOCK, Behaviour, Role, cast
from producers.simulated.hardware import machine
from producers.simulated.physics import REDRAW_MS, SimulatedGpu, SimulatedInstance
from producers.simulated.pods import SimulatedPod
from producers.simulated.schedule import Schedule

MAX_GPUS = 16
ENDED_KEPT_MS = 30 * 60_000  # how long the API server's record of a node keeps a pod that has ended
SHORTEST_LAG_MS = 200
LONGEST_LAG_MS = 1_900  # below the tolerance with which readers look a pod up by name and time
_KNOT_MS = 10_000

STORY_XID_MS, STORY_FALLS_MS, STORY_LOST_MS = 25_000, 34_000, (35_000, 75_000)
PAGE_FAULT, OFF_THE_BUS = 31, 79  # XID errors

JsonDict = dict[str, Any]
Holders = tuple[JsonDict, ...]


class KubeletLag(NamedTuple):
    """How late a node's kubelet is: between the shortest and the longest lag, changing slowly.
    It changes by less than a millisecond per millisecond, so the kubelet's answers never go back in time."""

    cluster: str
    seed: int
    node: int

    def seen_ms(self, at_ms: int) -> int:
        """The time whose state the kubelet reports at ``at_ms``."""
        knot, rest = divmod(at_ms, _KNOT_MS)
        chances = (names.fraction("lag", *self, number) for number in (knot, knot + 1))
        before, after = (SHORTEST_LAG_MS + (LONGEST_LAG_MS - SHORTEST_LAG_MS) * chance for chance in chances)
        return at_ms - round(before + (after - before) * rest / _KNOT_MS)


class KnownPods(NamedTuple):
    """The pods of a node, as the API server reports them from ``at_ms`` on."""

    at_ms: int
    pods: list[JsonDict]


class NodeReading(NamedTuple):
    """A tick: the devices and the kubelet's answer, as in records. ``holders``: who held each device in truth;
    ``reported``: who held it according to the kubelet. ``at_events``: the kubelet's answer at the time of each
    event."""

    devices: list[JsonDict]
    containers: list[JsonDict]
    holders: tuple[Holders, ...]
    reported: tuple[Holders, ...]
    at_events: dict[int, list[JsonDict]]


class SimulatedNode:
    """The node number ``index`` of a fleet, whose pods live ``pod_life_ms`` on average. Its times must not go back."""

    def __init__(
        self, cluster: str, seed: int, index: int, gpus: int, pod_life_ms: int, roles: tuple[Role, ...], *, story: bool
    ) -> None:
        self._story = story
        self._failing_gpu: SimulatedGpu | None = None
        self.name = f"sim-{index:04d}"
        self.machine = machine(cluster, seed, index, gpus)
        self._schedule = Schedule(cluster, seed, index, self.machine, pod_life_ms, roles)
        self._lag = KubeletLag(cluster, seed, index)
        devices = self.machine.devices
        parents = [None if device.slice_of is None else devices[device.slice_of].uuid for device in devices]
        self._identities = [device.identity(parent) for device, parent in zip(devices, parents, strict=True)]
        chance = names.generator("physics", cluster, seed, index)
        self._gpus = [
            SimulatedGpu([device, *(part for part in devices if part.slice_of == position)], chance)
            for position, device in enumerate(devices)
            if device.slice_of is None
        ]
        self._owner: list[tuple[SimulatedGpu, SimulatedInstance | None]] = [
            (gpu, part) for gpu in self._gpus for part in ([None] if gpu.device.mig_mode else []) + list(gpu.parts)
        ]
        self._changes: list[tuple[int, int, SimulatedPod, bool]] = []
        self._recent: list[SimulatedPod] = []
        self._api: list[SimulatedPod] = []
        self._pod_changes: list[int] = []
        self._order = 0
        self._redraw_ms = 0

    def read(self, at_ms: int, start_ms: int = 0) -> NodeReading:
        """The reading of a producer on the node at ``at_ms``, for a fleet that started at ``start_ms`` since the epoch.
        It depends on the time alone, except for its events, which are those since the last reading."""
        self._advance(at_ms)
        devices = [self._device(position, at_ms, start_ms) for position in range(len(self._identities))]
        times = {event["ts_ms"] for device in devices for event in device.get("events", ())}
        at_events = {ts_ms: self._containers(self._lag.seen_ms(ts_ms - start_ms)) for ts_ms in times}
        seen_ms = self._lag.seen_ms(at_ms)
        self._recent = [pod for pod in self._recent if pod.end_ms > seen_ms]
        holders, reported = self._holders(at_ms), self._holders(seen_ms)
        return NodeReading(devices, self._containers(seen_ms), holders, reported, at_events)

    def pod_changes(self, until_ms: int, start_ms: int) -> Iterator[KnownPods]:
        """The pods at the API server after each change up to ``until_ms``, for a fleet that started at ``start_ms``
        since the epoch. Changes before the start come at 0."""
        self._start_pods(until_ms)
        while self._pod_changes and self._pod_changes[0] <= until_ms:
            at_ms = max(0, heapq.heappop(self._pod_changes))
            while self._pod_changes and self._pod_changes[0] <= at_ms:
                heapq.heappop(self._pod_changes)
            self._api = [pod for pod in self._api if pod.end_ms + ENDED_KEPT_MS > at_ms]
            yield KnownPods(at_ms, [pod.api_object(at_ms, start_ms) for pod in self._api if pod.known_ms <= at_ms])

    def next_change_ms(self) -> int | None:
        """A time before which :meth:`pod_changes` has no change; None if there will be none."""
        times = self._pod_changes[:1]
        if (coming_ms := self._schedule.next_ms()) is not None:
            times.append(coming_ms)
        return min(times, default=None)

    def _start_pods(self, until_ms: int) -> None:
        """Add the pods that start by then."""
        for pod in self._schedule.advance(until_ms):
            self._order += 1
            self._recent.append(pod)
            self._api.append(pod)
            if pod.works_ms < pod.end_ms:
                heapq.heappush(self._changes, (pod.works_ms, 2 * self._order, pod, True))
                heapq.heappush(self._changes, (pod.end_ms, 2 * self._order + 1, pod, False))
            for at_ms in (*pod.changes_ms(), pod.end_ms + ENDED_KEPT_MS):
                heapq.heappush(self._pod_changes, at_ms)

    def _advance(self, until_ms: int) -> None:
        """Apply everything that happens up to ``until_ms``, in order: redraws, and pods' processes that begin and end.
        Before the start nothing is drawn: the GPUs begin with the pods that run at 0."""
        self._start_pods(until_ms)
        while True:
            change_ms = self._changes[0][0] if self._changes else until_ms + 1
            at_ms = min(change_ms, self._redraw_ms)
            if at_ms > until_ms:
                return
            touched: dict[SimulatedGpu, None] = {}
            if change_ms <= self._redraw_ms:
                _, _, pod, begins = heapq.heappop(self._changes)
                for container, position in pod.places():
                    gpu, part = self._owner[position]
                    assert part is not None  # noqa: S101 - a GPU in MIG mode is never given away
                    if begins:
                        part.begin(pod, container, position)
                    else:
                        part.end(pod)
                    if at_ms > 0:
                        touched[gpu] = None
            else:
                self._redraw_ms += REDRAW_MS
                touched = dict.fromkeys(self._gpus)
                if self._story:
                    self._play_story(at_ms)
            for gpu in touched:
                gpu.redraw(at_ms)

    def _play_story(self, at_ms: int) -> None:
        """The events of the story at this time: a program fails; later a GPU falls off the bus. Both happen on whole
        GPUs that work, if there are any."""
        whole = [gpu for gpu in self._gpus if not gpu.device.mig_mode] or self._gpus
        working = [gpu for gpu in whole if gpu.occupied()] or whole
        if at_ms == STORY_XID_MS:
            working[0].parts[0].fail(at_ms, PAGE_FAULT)
        elif at_ms == STORY_FALLS_MS:
            self._failing_gpu = working[-1]
            self._failing_gpu.parts[0].fail(at_ms, OFF_THE_BUS)

    def _device(self, position: int, at_ms: int, start_ms: int) -> JsonDict:
        gpu, part = self._owner[position]
        identity = self._identities[position]
        if gpu is self._failing_gpu and STORY_LOST_MS[0] <= at_ms < STORY_LOST_MS[1]:
            return {**identity, "state": "lost", "metrics": {}}
        if part is None:
            return {**identity, "metrics": gpu.common(at_ms), "processes": []}
        whole = part.device.slice is None
        metrics = (
            {**gpu.unshared(), **part.memory(), **gpu.common(at_ms)} if whole else {**part.memory(), **part.profile}
        )
        processes = [load.process(utilization=whole) for load in part.running]
        row = {**identity, "metrics": metrics, "processes": processes}
        if part.worked:
            row["info"] = {**identity["info"], "processes_visible": "true"}
        if part.xids:
            row |= {"xids": part.xids, "events": part.events(start_ms)}
        return row

    def behaviours(self, at_ms: int, start_ms: int = 0) -> list[list[JsonDict]]:
        """The behaviour of each pod that held a device at ``at_ms``, the time that was read last; a list per device."""
        by_device: list[list[JsonDict]] = [[] for _ in self._identities]
        for pod in self._recent:
            if pod.start_ms <= at_ms < pod.end_ms:
                for container, position in pod.places():
                    label = pod.label(container, position, at_ms)
                    row: JsonDict = {"namespace": pod.namespace, "pod": pod.name, "pod_uid": pod.uid}
                    row |= {"behaviour": label.behaviour, "since_ms": max(0, start_ms + label.since_ms)}
                    part = self._owner[position][1]
                    row["use"] = sum(load.activity for load in part.loads if load.pod is pod) if part else 0.0
                    by_device[position].append({**row, "cause": label.cause} if label.cause else row)
        return by_device

    def _containers(self, seen_ms: int) -> list[JsonDict]:
        """The containers of the pods that ran at ``seen_ms``, as the kubelet lists them."""
        return [row for pod in self._recent if pod.start_ms <= seen_ms < pod.end_ms for row in pod.allocated]

    def _holders(self, at_ms: int) -> tuple[Holders, ...]:
        """The holders of each device at ``at_ms``: each container once, in the order of their names."""
        by_device: list[list[JsonDict]] = [[] for _ in self._identities]
        for pod in self._recent:
            if pod.start_ms <= at_ms < pod.end_ms:
                for container, position in pod.places():
                    by_device[position].append(pod.holders[container.name])
        return tuple(
            tuple(sorted(rows, key=lambda row: (row["namespace"], row["pod"], row["container"]))) for rows in by_device
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """``nodes`` nodes of ``gpus`` GPUs; pods live ``pod_life_s`` seconds on average. Every ten nodes have each of the
    ``behaviours`` once. With ``story`` the first node has an XID error and a lost GPU in its first minute.
    The same seed and cluster give the same pods and values; another seed gives other names, UUIDs and uids."""

    nodes: int
    gpus: int
    cluster: str = "default"
    seed: int = 1
    pod_life_s: float = 300.0
    behaviours: tuple[Behaviour, ...] = ()
    story: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if the values are invalid."""
        checked_name("cluster", self.cluster)
        if self.nodes < 1 or not 1 <= self.gpus <= MAX_GPUS:
            raise ValueError(f"a fleet has at least one node, and 1 to {MAX_GPUS} GPUs on each")
        if not self.pod_life_s > 0:
            raise ValueError(f"pods that live {self.pod_life_s} s: it must be above 0")
        cast_behaviours = (
            {role.behaviour for roles in self._cast(0).values() for role in roles} if self.behaviours else set()
        )
        if missing := [behaviour for behaviour in self.behaviours if behaviour not in cast_behaviours]:
            size, missing_names = f"{self.nodes}x{self.gpus}", ", ".join(missing)
            raise ValueError(f"--behaviours {missing_names}: {size} has no GPUs for that; a fleet of 4x8 has for all")

    def node(self, index: int) -> SimulatedNode:
        life_ms, roles = max(1, int(self.pod_life_s * 1000)), self._cast(index // BLOCK).get(index, ())
        story = self.story and index == 0
        return SimulatedNode(self.cluster, self.seed, index, self.gpus, life_ms, roles, story=story)

    def _cast(self, block: int) -> dict[int, tuple[Role, ...]]:
        if not self.behaviours:
            return {}
        return cast(self.cluster, self.seed, self.nodes, self.gpus, self.behaviours, block)

    def order(self, interval_ms: int) -> list[tuple[int, int]]:
        """When within the interval each node reads, and its index. The nodes of a fleet do not all read at once."""
        phases = (names.fraction("phase", self.cluster, self.seed, index) for index in range(self.nodes))
        return sorted((int(phase * interval_ms), index) for index, phase in enumerate(phases))


def parse_size(text: str) -> tuple[int, int]:
    """Nodes and GPUs of ``NODESxGPUS``, such as ``100x8``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]?)", text)
    if match is None or int(match[2]) > MAX_GPUS:
        raise ValueError(f"fleet {text!r}: write NODESxGPUS, such as 100x8, with at most {MAX_GPUS} GPUs")
    return int(match[1]), int(match[2])
