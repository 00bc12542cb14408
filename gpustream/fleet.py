"""What gpu.attributed says of a fleet right now: nodes, GPUs, who uses them and who only holds them. Pure.

In:       ticks, and the time of their arrival in seconds on one clock that never steps back. A device that no pod holds
          is its processes'.
Out:      a :class:`View` to draw.
State:    the last tick of each node, and a utilization per device smoothed over some seconds while its pods stay.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from topics.attributed import AttributedDevice, AttributedSample, Holder, Parts

SILENT_S = 60.0
"""A node that has said nothing for this long is left out."""

IDLE_RATIO = 0.05
"""A pod whose GPUs are used less than this is idle."""

_SMOOTHING_S = 10.0
_WINDOW_S = 5.0

Who = tuple[str, str]
"""A pod's namespace and name; a process has no namespace, and is named by its PID."""

CommandOf = Callable[[str, int], str]
"""The command of a process by its node and PID; empty where it is not known."""


class Use(NamedTuple):
    """A pod (or a process), the top of its owner chain (or its command), and what it does with the GPUs that it alone
    or with others holds."""

    namespace: str
    name: str
    workload: str
    gpus: int
    utilization_ratio: float
    memory_used_bytes: float

    @property
    def who(self) -> str:
        """How it is called."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class View(NamedTuple):
    """The fleet at one time. ``latency_s`` is the median of tick read to tick arrived, None before the first."""

    nodes: int
    gpus: int
    held: int
    ticks: int
    ticks_per_s: float
    values_per_s: float
    latency_s: float | None
    uses: list[Use]

    @property
    def idle(self) -> list[Use]:
        """Those who hold GPUs and hardly use them, those with most GPUs first."""
        idle = [use for use in self.uses if use.utilization_ratio < IDLE_RATIO]
        return sorted(idle, key=lambda use: (-use.gpus, use.utilization_ratio))


class _Held(NamedTuple):
    """What one pod or process has of a device: its own part where that is known, else all of it (None)."""

    who: Who
    workload: str
    utilization_ratio: float | None
    memory_used_bytes: float | None


class _Device(NamedTuple):
    """A device of a node's last tick; ``gpu`` is the UUID of the physical one."""

    gpu: str
    utilization_ratio: float | None
    held: tuple[_Held, ...]

    @property
    def users(self) -> tuple[Who, ...]:
        """Who holds it."""
        return tuple(held.who for held in self.held)


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

    def __init__(self, command_of: CommandOf = lambda _node, _pid: "") -> None:
        self._command_of = command_of
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._ticks = 0

    def observe(self, tick: AttributedSample, at_s: float, wall_ms: int) -> None:
        """Takes a tick in that arrived at ``at_s``, when the wall clock said ``wall_ms``."""
        key = (tick.cluster, tick.node)
        before = self._nodes.get(key, _Node(at_s, {}))
        weight = min(1.0, (at_s - before.at_s) / _SMOOTHING_S)
        devices = {device.uuid: self._device(tick.node, device, before, weight) for device in tick.devices}
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
            uses=_uses(devices),
        )

    def _device(self, node: str, device: AttributedDevice, before: _Node, weight: float) -> _Device:
        held = _holders(device) if device.holders else _processes(device, lambda pid: self._command_of(node, pid))
        used, last = device.metrics.get("gpu_utilization_ratio"), before.devices.get(device.uuid)
        same = last is not None and last.users == tuple(one.who for one in held)
        if used is not None and last is not None and same and last.utilization_ratio is not None:
            used = last.utilization_ratio + (used - last.utilization_ratio) * weight
        memory = device.metrics.get("memory_used_bytes") or 0.0
        return _Device(
            device.mig.parent_uuid if device.mig else device.uuid,
            used,
            tuple(_whole(one, used, memory) for one in held),
        )

    def _forget(self, now_s: float) -> None:
        while self._arrivals and now_s - self._arrivals[0].at_s > _WINDOW_S:
            self._arrivals.popleft()
        for key in [key for key, node in self._nodes.items() if now_s - node.at_s > SILENT_S]:
            del self._nodes[key]


def _holders(device: AttributedDevice) -> list[_Held]:
    """Each pod that holds the device, once."""
    pods = [  # of a pod's containers one has its parts
        (pod, next((one for one in holders if one.parts is not None), holders[0]))
        for pod, holders in device.pods().items()
    ]
    return [_held((pod.namespace, pod.pod), holder) for pod, holder in pods]


def _held(pod: Who, holder: Holder) -> _Held:
    workload = f"{holder.workload.kind}/{holder.workload.name}" if holder.workload else ""
    parts = holder.parts or Parts()
    return _Held(pod, workload, parts.utilization_ratio, parts.memory_used_bytes)


def _processes(device: AttributedDevice, command_of: Callable[[int], str]) -> list[_Held]:
    """Each process on a device that no pod holds."""
    return [
        _Held(("", f"pid {one.pid}"), command_of(one.pid), one.sm_utilization_ratio, one.memory_used_bytes)
        for one in device.processes or ()
    ]


def _whole(held: _Held, used: float | None, memory: float) -> _Held:
    """The device's own figures where the part is not known."""
    return held._replace(
        utilization_ratio=used if held.utilization_ratio is None else held.utilization_ratio,
        memory_used_bytes=memory if held.memory_used_bytes is None else held.memory_used_bytes,
    )


def _uses(devices: Iterable[_Device]) -> list[Use]:
    """Everyone who holds a device, the busiest first. Devices that do not say how busy they are don't count."""
    held: dict[Who, list[tuple[str, _Held]]] = {}
    for device in devices:
        for one in device.held:
            held.setdefault(one.who, []).append((device.gpu, one))
    known = [use for of in held.values() if (use := _use(of)) is not None]
    return sorted(known, key=lambda use: (-use.utilization_ratio, use.who))


def _use(of: list[tuple[str, _Held]]) -> Use | None:
    ratios = [held.utilization_ratio for _, held in of if held.utilization_ratio is not None]
    if not ratios:
        return None
    first = of[0][1]
    gpus = len({gpu for gpu, _ in of})
    memory = sum(held.memory_used_bytes or 0.0 for _, held in of)
    return Use(*first.who, first.workload, gpus, sum(ratios) / len(ratios), memory)
