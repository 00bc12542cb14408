"""A simulated fleet: what runs on its nodes, what their GPUs answer, what their kubelets and the API server say.

In: how many nodes and GPUs, a seed, how long pods live; and times that only go forward. Out: ticks.
State: of each node the pods that ran lately, and each GPU since its last redraw.
All times are milliseconds since the fleet's start; the records have them as time of day.
Everything is a function of the seed and of the time since the start, however often it is read.
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
    """How late one node's kubelet is: it wanders between the shortest and the longest, and never leaps.
    It changes by less than a millisecond per millisecond, so what the kubelet says never goes back in time."""

    cluster: str
    seed: int
    node: int

    def seen_ms(self, at_ms: int) -> int:
        """The time of which the kubelet's answer at ``at_ms`` is true."""
        knot, rest = divmod(at_ms, _KNOT_MS)
        chances = (names.fraction("lag", *self, number) for number in (knot, knot + 1))
        before, after = (SHORTEST_LAG_MS + (LONGEST_LAG_MS - SHORTEST_LAG_MS) * chance for chance in chances)
        return at_ms - round(before + (after - before) * rest / _KNOT_MS)


class KnownPods(NamedTuple):
    """What the API server knows of a node's pods from ``at_ms`` on."""

    at_ms: int
    pods: list[JsonDict]


class NodeReading(NamedTuple):
    """A tick: the devices and the kubelet's answer as records have them, and, by device, who held it (``holders``) and
    who the kubelet said held it (``reported``). ``at_events``: the kubelet's answer at the time of each event."""

    devices: list[JsonDict]
    containers: list[JsonDict]
    holders: tuple[Holders, ...]
    reported: tuple[Holders, ...]
    at_events: dict[int, list[JsonDict]]


class SimulatedNode:
    """The node number ``index`` of a fleet, whose pods live ``pod_life_ms`` on average. Its times must not go back."""

    def __init__(
        self,
        cluster: str,
        seed: int,
        index: int,
        gpus: int,
        pod_life_ms: int,
        roles: tuple[Role, ...] = (),
        *,
        story: bool = False,
    ) -> None:
        self._story = story
        self._falls: SimulatedGpu | None = None
        self.name = f"sim-{index:04d}"
        self.machine = machine(cluster, seed, index, gpus)
        self._schedule = Schedule(cluster, seed, index, self.machine, pod_life_ms, roles)
        self._lag = KubeletLag(cluster, seed, index)
        devices = self.machine.devices
        parents = [None if one.slice_of is None else devices[one.slice_of].uuid for one in devices]
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
        self._news: list[tuple[int, int]] = []
        self._order = 0
        self._redraw_ms = 0

    def read(self, at_ms: int, start_ms: int = 0) -> NodeReading:
        """What a producer on the node would read at ``at_ms``, for a fleet that began at ``start_ms`` since the epoch.
        It depends on the time alone, except the events: those are the ones since the last reading."""
        self._advance(at_ms)
        devices = [self._device(position, at_ms, start_ms) for position in range(len(self._identities))]
        times = {event["ts_ms"] for device in devices for event in device.get("events", ())}
        at_events = {ts_ms: self._containers(self._lag.seen_ms(ts_ms - start_ms)) for ts_ms in times}
        seen_ms = self._lag.seen_ms(at_ms)
        self._recent = [pod for pod in self._recent if pod.end_ms > seen_ms]
        holders, reported = self._holders(at_ms), self._holders(seen_ms)
        return NodeReading(devices, self._containers(seen_ms), holders, reported, at_events)

    def news(self, until_ms: int, start_ms: int) -> Iterator[KnownPods]:
        """What the API server came to know up to ``until_ms``, each time it did, for a fleet that started at
        ``start_ms`` since the epoch. What it knew before the start comes at 0."""
        self._take(until_ms)
        while self._news and self._news[0][0] <= until_ms:
            at_ms = max(0, heapq.heappop(self._news)[0])
            while self._news and self._news[0][0] <= at_ms:
                heapq.heappop(self._news)
            self._api = [pod for pod in self._api if pod.end_ms + ENDED_KEPT_MS > at_ms]
            yield KnownPods(at_ms, [pod.known(at_ms, start_ms) for pod in self._api if pod.known_ms <= at_ms])

    def next_news_ms(self) -> int | None:
        """A time before which :meth:`news` has nothing new; None if it never will."""
        candidates = [self._news[0][0]] if self._news else []
        coming = self._schedule.next_ms()
        return min([*candidates, coming]) if coming is not None else min(candidates, default=None)

    def _take(self, until_ms: int) -> None:
        """Take up the pods that start by then."""
        for pod in self._schedule.advance(until_ms):
            self._order += 1
            self._recent.append(pod)
            self._api.append(pod)
            if pod.works_ms < pod.end_ms:
                heapq.heappush(self._changes, (pod.works_ms, 2 * self._order, pod, True))
                heapq.heappush(self._changes, (pod.end_ms, 2 * self._order + 1, pod, False))
            for at_ms in (*pod.changes_ms(), pod.end_ms + ENDED_KEPT_MS):
                heapq.heappush(self._news, (at_ms, self._order))

    def _advance(self, until_ms: int) -> None:
        """Let the GPUs live through what happens up to ``until_ms``, in the order in which it does: they are redrawn,
        and pods' processes come or go. Before the start nothing is drawn: the GPUs begin with who is there at 0."""
        self._take(until_ms)
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
                    self._tell(at_ms)
            for gpu in touched:
                gpu.redraw(at_ms)

    def _tell(self, at_ms: int) -> None:
        """What the story has at that time, on GPUs that work: a program fails, and later a GPU falls off the bus."""
        working = [gpu for gpu in self._gpus if gpu.occupied() and not gpu.device.mig_mode]
        if working and at_ms == STORY_XID_MS:
            working[0].parts[0].fail(at_ms, PAGE_FAULT)
        elif working and at_ms == STORY_FALLS_MS:
            self._falls = working[-1]
            self._falls.parts[0].fail(at_ms, OFF_THE_BUS)

    def _device(self, position: int, at_ms: int, start_ms: int) -> JsonDict:
        gpu, part = self._owner[position]
        identity = self._identities[position]
        if gpu is self._falls and STORY_LOST_MS[0] <= at_ms < STORY_LOST_MS[1]:
            return {**identity, "state": "lost", "metrics": {}}
        if part is None:
            return {**identity, "metrics": gpu.common(at_ms), "processes": []}
        whole = part.device.slice is None
        metrics = (
            {**gpu.unshared(), **part.memory(), **gpu.common(at_ms)} if whole else {**part.memory(), **part.profile}
        )
        processes = [load.process(utilization=whole) for load in part.running]
        found = {**identity, "metrics": metrics, "processes": processes}
        if part.worked:
            found["info"] = {**identity["info"], "processes_visible": "true"}
        if part.xids:
            found |= {"xids": part.xids, "events": part.events(start_ms)}
        return found

    def behaviours(self, at_ms: int, start_ms: int = 0) -> list[list[JsonDict]]:
        """Of each device, what each pod that held it at ``at_ms`` did; for the time that was read last."""
        found: list[list[JsonDict]] = [[] for _ in self._identities]
        for pod in self._recent:
            if pod.start_ms <= at_ms < pod.end_ms:
                for container, position in pod.places():
                    label = pod.label(container, position, at_ms)
                    row: JsonDict = {"namespace": pod.namespace, "pod": pod.name, "pod_uid": pod.uid}
                    row |= {"behaviour": label.behaviour, "since_ms": max(0, start_ms + label.since_ms)}
                    part = self._owner[position][1]
                    row["use"] = sum(load.activity for load in part.loads if load.pod is pod) if part else 0.0
                    found[position].append({**row, "cause": label.cause} if label.cause else row)
        return found

    def _containers(self, seen_ms: int) -> list[JsonDict]:
        """The containers of the pods that ran at ``seen_ms``, as the kubelet lists them."""
        return [row for pod in self._recent if pod.start_ms <= seen_ms < pod.end_ms for row in pod.allocated]

    def _holders(self, at_ms: int) -> tuple[Holders, ...]:
        """Who held each device at ``at_ms``: each container once, in the order of their names."""
        found: list[list[JsonDict]] = [[] for _ in self._identities]
        for pod in self._recent:
            if pod.start_ms <= at_ms < pod.end_ms:
                for container, position in pod.places():
                    found[position].append(pod.holders[container.name])
        return tuple(
            tuple(sorted(rows, key=lambda row: (row["namespace"], row["pod"], row["container"]))) for rows in found
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """``nodes`` nodes of ``gpus`` GPUs; pods live ``pod_life_s`` seconds on average. In every ten nodes each of the
    ``behaviours`` is there once. A ``story`` has an XID error and a lost GPU on the first node, in the first minute.
    The same seed and cluster give the same pods, values and turnover; another gives other names, UUIDs and uids."""

    nodes: int
    gpus: int
    cluster: str = "default"
    seed: int = 1
    pod_life_s: float = 300.0
    behaviours: tuple[Behaviour, ...] = ()
    story: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if there is no such fleet."""
        checked_name("cluster", self.cluster)
        if self.nodes < 1 or not 1 <= self.gpus <= MAX_GPUS:
            raise ValueError(f"a fleet has at least one node, and 1 to {MAX_GPUS} GPUs on each")
        if not self.pod_life_s > 0:
            raise ValueError(f"pods that live {self.pod_life_s} s: it must be above 0")
        given = {role.behaviour for roles in self._cast(0).values() for role in roles} if self.behaviours else set()
        if left := [behaviour for behaviour in self.behaviours if behaviour not in given]:
            size, names_left = f"{self.nodes}x{self.gpus}", ", ".join(left)
            raise ValueError(f"--behaviours {names_left}: {size} has no GPUs for that; a fleet of 4x8 has for all")

    def node(self, index: int) -> SimulatedNode:
        life_ms, roles = max(1, int(self.pod_life_s * 1000)), self._cast(index // BLOCK).get(index, ())
        story = self.story and index == 0
        return SimulatedNode(self.cluster, self.seed, index, self.gpus, life_ms, roles, story=story)

    def _cast(self, block: int) -> dict[int, tuple[Role, ...]]:
        if not self.behaviours:
            return {}
        return cast(self.cluster, self.seed, self.nodes, self.gpus, self.behaviours, block)

    def order(self, interval_ms: int) -> list[tuple[int, int]]:
        """When within the interval each node reads, and its index: not all nodes of a fleet read at once."""
        phases = (names.fraction("phase", self.cluster, self.seed, index) for index in range(self.nodes))
        return sorted((int(phase * interval_ms), index) for index, phase in enumerate(phases))


def parse_size(text: str) -> tuple[int, int]:
    """Nodes and GPUs of ``NODESxGPUS``, such as ``100x8``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]?)", text)
    if match is None or int(match[2]) > MAX_GPUS:
        raise ValueError(f"fleet {text!r}: write NODESxGPUS, such as 100x8, with at most {MAX_GPUS} GPUs")
    return int(match[1]), int(match[2])
