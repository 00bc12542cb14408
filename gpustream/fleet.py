"""What gpu.attributed says of a fleet right now: nodes, GPUs, who uses them and who only holds them. Pure.

In:       ticks, and the time of their arrival in seconds on one clock that never steps back.
Out:      a :class:`View` to draw.
State:    the last tick of each node, and a utilization per device smoothed over some seconds while its pods stay.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from topics.attributed import AttributedDevice, AttributedSample, Holder, Parts

SILENT_S = 60.0
"""A node that has said nothing for this long is left out."""

IDLE_RATIO = 0.05
"""A pod whose GPUs are used less than this is idle."""

_SMOOTHING_S = 10.0
_WINDOW_S = 5.0

Pod = tuple[str, str]


class PodUse(NamedTuple):
    """A pod, the top of its owner chain, and what it does with the GPUs that it alone or with others holds."""

    namespace: str
    pod: str
    workload: str
    gpus: int
    utilization_ratio: float
    memory_used_bytes: float


class View(NamedTuple):
    """The fleet at one time. ``latency_s`` is the median of tick read to tick arrived, None before the first."""

    nodes: int
    gpus: int
    held: int
    ticks: int
    ticks_per_s: float
    values_per_s: float
    latency_s: float | None
    pods: list[PodUse]

    @property
    def idle(self) -> list[PodUse]:
        """Pods that hold GPUs and hardly use them, those with most GPUs first."""
        idle = [pod for pod in self.pods if pod.utilization_ratio < IDLE_RATIO]
        return sorted(idle, key=lambda pod: (-pod.gpus, pod.utilization_ratio))


class _Held(NamedTuple):
    """What one pod has of a device: its own part where the device is split, else all of it."""

    pod: Pod
    workload: str
    utilization_ratio: float | None
    memory_used_bytes: float


class _Device(NamedTuple):
    """A device of a node's last tick; ``gpu`` is the UUID of the physical one."""

    gpu: str
    utilization_ratio: float | None
    held: tuple[_Held, ...]

    @property
    def pods(self) -> tuple[Pod, ...]:
        """Who holds it."""
        return tuple(held.pod for held in self.held)


class _Node(NamedTuple):
    """A node's last tick."""

    at_s: float
    devices: dict[str, _Device]


class _Arrival(NamedTuple):
    at_s: float
    values: int
    latency_s: float


class Fleet:
    """Takes ticks in, and gives a view of the fleet."""

    def __init__(self) -> None:
        self._nodes: dict[Pod, _Node] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._ticks = 0

    def observe(self, tick: AttributedSample, at_s: float, wall_ms: int) -> None:
        """Takes a tick in that arrived at ``at_s``, when the wall clock said ``wall_ms``."""
        key = (tick.cluster, tick.node)
        before = self._nodes.get(key, _Node(at_s, {}))
        weight = min(1.0, (at_s - before.at_s) / _SMOOTHING_S)
        devices = {device.uuid: _device(device, before.devices.get(device.uuid), weight) for device in tick.devices}
        self._nodes[key] = _Node(at_s, devices)
        values = sum(len(device.metrics) for device in tick.devices)
        self._arrivals.append(_Arrival(at_s, values, max(0.0, (wall_ms - tick.ts_ms) / 1000)))
        self._ticks += 1
        self._forget(at_s)

    def view(self, now_s: float) -> View:
        """The fleet at ``now_s``."""
        self._forget(now_s)
        devices = [device for node in self._nodes.values() for device in node.devices.values()]
        latencies = sorted(arrival.latency_s for arrival in self._arrivals)
        return View(
            nodes=len(self._nodes),
            gpus=len({device.gpu for device in devices}),
            held=len({device.gpu for device in devices if device.held}),
            ticks=self._ticks,
            ticks_per_s=len(self._arrivals) / _WINDOW_S,
            values_per_s=sum(arrival.values for arrival in self._arrivals) / _WINDOW_S,
            latency_s=latencies[len(latencies) // 2] if latencies else None,
            pods=_pods(devices),
        )

    def _forget(self, now_s: float) -> None:
        while self._arrivals and now_s - self._arrivals[0].at_s > _WINDOW_S:
            self._arrivals.popleft()
        for key in [key for key, node in self._nodes.items() if now_s - node.at_s > SILENT_S]:
            del self._nodes[key]


def _device(device: AttributedDevice, before: _Device | None, weight: float) -> _Device:
    used = device.metrics.get("gpu_utilization_ratio")
    pods = tuple(dict.fromkeys((holder.namespace, holder.pod) for holder in device.holders))
    if used is not None and before is not None and before.pods == pods and before.utilization_ratio is not None:
        used = before.utilization_ratio + (used - before.utilization_ratio) * weight
    memory = device.metrics.get("memory_used_bytes") or 0.0
    first = {(holder.namespace, holder.pod): holder for holder in reversed(device.holders)}
    held = tuple(_held(pod, first[pod], used, memory) for pod in pods)
    return _Device(device.mig.parent_uuid if device.mig else device.uuid, used, held)


def _held(pod: Pod, holder: Holder, used: float | None, memory: float) -> _Held:
    workload = f"{holder.workload.kind}/{holder.workload.name}" if holder.workload else ""
    parts = holder.parts or Parts()
    return _Held(
        pod,
        workload,
        used if parts.utilization_ratio is None else parts.utilization_ratio,
        memory if parts.memory_used_bytes is None else parts.memory_used_bytes,
    )


def _pods(devices: Iterable[_Device]) -> list[PodUse]:
    """Every pod that holds a device, the busiest first. Devices that do not say how busy they are don't count."""
    uses: dict[Pod, list[tuple[str, _Held]]] = {}
    for device in devices:
        for held in device.held:
            uses.setdefault(held.pod, []).append((device.gpu, held))
    known = [use for of in uses.values() if (use := _use(of)) is not None]
    return sorted(known, key=lambda use: (-use.utilization_ratio, use.pod))


def _use(of: list[tuple[str, _Held]]) -> PodUse | None:
    ratios = [held.utilization_ratio for _, held in of if held.utilization_ratio is not None]
    if not ratios:
        return None
    first = of[0][1]
    gpus = len({gpu for gpu, _ in of})
    return PodUse(
        *first.pod, first.workload, gpus, sum(ratios) / len(ratios), sum(held.memory_used_bytes for _, held in of)
    )
