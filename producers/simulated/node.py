"""One simulated node: what runs on it, what its GPUs answer, what its kubelet and the API server say.

In: a node's place in the fleet, and times that only go forward. Out: ticks.
State: the pods that ran lately, and each GPU since its last redraw.
All times are milliseconds since the fleet's start; what a reader sees carries them added to the start's own time.
"""

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

from producers.simulated import kubelet, names
from producers.simulated.hardware import machine
from producers.simulated.physics import REDRAW_MS, Gpu, Part
from producers.simulated.pods import Pod
from producers.simulated.schedule import Schedule, Turnover

ENDED_KEPT_MS = 30 * 60_000
"""How long the API server's record of a node keeps a pod that has ended."""

JsonDict = dict[str, Any]
Holders = tuple[JsonDict, ...]


class Known(NamedTuple):
    """What the API server knows from ``at_ms`` on."""

    at_ms: int
    pods: list[JsonDict]


class Reading(NamedTuple):
    """A tick: the devices and the kubelet's answer as records have them, and, by device, who held it (``holders``) and
    who the kubelet said held it (``reported``). ``at_events``: the kubelet's answer at the time of each event."""

    devices: list[JsonDict]
    containers: list[JsonDict]
    holders: tuple[Holders, ...]
    reported: tuple[Holders, ...]
    at_events: dict[int, list[JsonDict]]


class SimulatedNode:
    """The node number ``index`` of a fleet. Its times must not go back."""

    def __init__(self, cluster: str, seed: int, index: int, gpus: int, turnover: Turnover) -> None:
        self.name = f"sim-{index:04d}"
        self.machine = machine(cluster, seed, index, gpus)
        self._schedule = Schedule(cluster, seed, index, self.machine, turnover)
        self._lag = kubelet.Lag(cluster, seed, index)
        self._identities = [device.identity(self._parent(device.slice_of)) for device in self.machine.devices]
        chance = names.generator("physics", cluster, seed, index)
        self._gpus = [Gpu(list(group), chance) for group in self._groups()]
        self._owner: list[tuple[Gpu, Part | None]] = [
            (gpu, part) for gpu in self._gpus for part in ([None] if gpu.device.mig_mode else []) + list(gpu.parts)
        ]
        self._changes: list[tuple[int, int, Pod, bool]] = []
        self._recent: list[Pod] = []
        self._api: list[Pod] = []
        self._news: list[tuple[int, int]] = []
        self._order = 0
        self._redraw_ms = 0

    def read(self, at_ms: int, start_ms: int = 0) -> Reading:
        """What a producer on the node would read at ``at_ms``, for a fleet that began at ``start_ms`` since the epoch:
        a function of the time, but for the events, which are those since the reading before."""
        self._advance(at_ms)
        devices = [self._device(position, at_ms, start_ms) for position in range(len(self._identities))]
        times = {event["ts_ms"] for device in devices for event in device.get("events", ())}
        at_events = {ts_ms: kubelet.containers(self._recent, self._lag.seen_ms(ts_ms - start_ms)) for ts_ms in times}
        seen_ms = self._lag.seen_ms(at_ms)
        self._recent = [pod for pod in self._recent if pod.end_ms > seen_ms]
        return Reading(
            devices=devices,
            containers=kubelet.containers(self._recent, seen_ms),
            holders=self._holders(at_ms),
            reported=self._holders(seen_ms),
            at_events=at_events,
        )

    def news(self, until_ms: int, start_ms: int) -> Iterator[Known]:
        """What the API server came to know up to ``until_ms``, each time it did, for a fleet that started at
        ``start_ms`` since the epoch. What it knew before the start comes at 0."""
        self._take(until_ms)
        while self._news and self._news[0][0] <= until_ms:
            at_ms = max(0, heapq.heappop(self._news)[0])
            while self._news and self._news[0][0] <= at_ms:
                heapq.heappop(self._news)
            self._api = [pod for pod in self._api if pod.end_ms + ENDED_KEPT_MS > at_ms]
            yield Known(at_ms, [pod.known(at_ms, start_ms) for pod in self._api if pod.known_ms <= at_ms])

    def next_news_ms(self) -> int | None:
        """A time before which :meth:`news` has nothing new; None where it never will."""
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
            for at_ms in (pod.known_ms, pod.end_known_ms, pod.end_ms + ENDED_KEPT_MS):
                heapq.heappush(self._news, (at_ms, self._order))

    def _advance(self, until_ms: int) -> None:
        """Let the GPUs live through what happens up to ``until_ms``, in the order in which it does."""
        self._take(until_ms)
        while True:
            change_ms = self._changes[0][0] if self._changes else until_ms + 1
            at_ms = min(change_ms, self._redraw_ms)
            if at_ms > until_ms:
                return
            if change_ms <= self._redraw_ms:
                self._change(heapq.heappop(self._changes))
            else:
                self._redraw_ms += REDRAW_MS
                for gpu in self._gpus:
                    gpu.redraw(at_ms)

    def _change(self, change: tuple[int, int, Pod, bool]) -> None:
        """A pod's processes come or go. Before the start nothing is drawn: the GPUs begin with who is there at 0."""
        at_ms, _, pod, begins = change
        touched: dict[Gpu, None] = {}
        for container in pod.containers:
            for position in container.devices():
                gpu, part = self._owner[position]
                assert part is not None  # noqa: S101 - a GPU in MIG mode is never given away
                if begins:
                    part.begin(pod, container, position)
                else:
                    part.end(pod)
                touched[gpu] = None
        if at_ms > 0:
            for gpu in touched:
                gpu.redraw(at_ms)

    def _device(self, position: int, at_ms: int, start_ms: int) -> JsonDict:
        gpu, part = self._owner[position]
        identity = self._identities[position]
        if part is None:
            return {**identity, "metrics": gpu.common(at_ms), "processes": []}
        whole = part.device.slice is None
        metrics = (
            {**gpu.unshared(), **part.memory(), **gpu.common(at_ms)} if whole else {**part.memory(), **part.profile}
        )
        processes = [load.process(utilization=whole) for load in part.loads]
        found = {**identity, "metrics": metrics, "processes": processes}
        if part.worked:
            found["info"] = {**identity["info"], "processes_visible": "true"}
        if part.xids:
            found |= {"xids": part.xids, "events": part.events(start_ms)}
        return found

    def _holders(self, at_ms: int) -> tuple[Holders, ...]:
        """Who held each device at ``at_ms``: each container once, in the order of their names."""
        found: list[list[JsonDict]] = [[] for _ in self._identities]
        for pod in self._recent:
            if pod.start_ms <= at_ms < pod.end_ms:
                for container in pod.containers:
                    for position in container.devices():
                        found[position].append(pod.holders[container.name])
        return tuple(
            tuple(sorted(rows, key=lambda row: (row["namespace"], row["pod"], row["container"]))) for rows in found
        )

    def _parent(self, position: int | None) -> str | None:
        return None if position is None else self.machine.devices[position].uuid

    def _groups(self) -> Iterator[list[Any]]:
        """The node's devices by physical GPU, in order."""
        for position, device in enumerate(self.machine.devices):
            if device.slice_of is None:
                yield [device, *(d for d in self.machine.devices if d.slice_of == position)]
