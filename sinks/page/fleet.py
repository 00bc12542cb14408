"""The fleet that the page shows: now, and each device in the last hour. Pure.

In:       ticks, alerts and hours of usage; times of arrival in seconds on a clock that never steps back.
Out:      what :mod:`sinks.page.frames` writes for browsers.
State:    each node's last tick; for an hour, each device's holders, and a reading every 15 s, also of one that is
          missing from the last tick; the open alerts; the usage of the last day by team. A node without a tick for 30 s
          and for three of its intervals is silent, and is forgotten after an hour.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick, Verdict
from topics.alerts import Alert
from topics.attributed import AttributedDevice, AttributedSample, by_pod, team_of
from topics.idleness import activity_of_parts, device_activity
from topics.samples import silent_after_ms, silent_after_s
from topics.times import epoch_ms
from topics.topic import Number
from topics.usage import HOUR_MS, Usage

IDLE_AFTER_MS = 10_000
"""A device that has worked within this time is not idle: a tick without work is a pause."""

SILENT_S = 30.0
FORGET_S = 3600.0

STEP_MS = 15_000
STEPS = HOUR_MS // STEP_MS
WAITED_MS = 5 * 60_000
"""After a node's clock was set back by more than this, the history of its devices begins again."""

MAX_SPANS = 120
"""The most changes of holders that are kept of a device."""

MAX_MISSING = 64
"""The most devices of a node that are kept though they are missing from its last tick."""

HISTORY_METRICS = ("gpu_utilization_ratio", "memory_used_bytes", "power_watts", "temperature_celsius")
"""The metrics whose readings are kept."""

USAGE_HOURS = 24
NO_TEAM = "(no team)"
ZONE = "topology.kubernetes.io/zone"

_RANKS = {"critical": 0, "warning": 1, "info": 2}
_NO_READING = math.nan
_SIGNS = {"busy": b"b", "idle": b"i", "held": b"h", "free": b"f", "failing": b"x"}
"""The sign of each :data:`topics.idleness.Activity`."""

SILENT = "s"
"""The sign of the devices of a silent node."""


_description = attrgetter("index", "model", "mig")
"""What a frame says of a device itself, and seldom changes."""


class ShownHolder(NamedTuple):
    """A pod or batch job that holds a device. A field that is not known is empty."""

    namespace: str
    pod: str
    workload: str
    team: str


class Span(NamedTuple):
    """The holders of a device from one time to another, by the node's clock. ``to_ms`` None: until now."""

    holders: tuple[ShownHolder, ...]
    from_ms: int
    to_ms: int | None


def _no_readings() -> "array[float]":
    return array("f", [_NO_READING]) * (STEPS * len(HISTORY_METRICS))


@dataclass(slots=True)
class ShownDevice:
    """A device of a node's last tick, and its last hour. A GPU that is cut has the holders and the activity of its MIG
    devices.

    ``sign``: its activity in that tick; ``worked_ms``: the last tick in which it was busy. ``since_ms``: when its
    holders began to hold it; ``spans``: the holders before them. ``readings`` has a row for each of
    ``HISTORY_METRICS``, ``signs`` the activity at each reading. Both are rings, in which ``step`` is the last one.
    """

    last: AttributedDevice
    holders: tuple[ShownHolder, ...]
    since_ms: int
    sign: bytes = b"f"
    worked_ms: int = 0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    step: int = 0
    signs: bytearray = field(default_factory=lambda: bytearray(b" " * STEPS))
    readings: "array[float]" = field(default_factory=_no_readings)

    def update(
        self, device: AttributedDevice, parts: Sequence[AttributedDevice], ts_ms: int, interval_ms: int | None
    ) -> bool:
        """Update all but the holders from a tick. The first tick of each 15 s is kept as a reading; that of a node that
        is read less often also stands for the time since its last tick. ``parts`` are the MIG devices of the GPU.

        Returns whether the history begins again, and ``since_ms`` with it.
        """
        activity = device_activity(device)
        if parts and activity != "failing":
            activity = activity_of_parts({device_activity(part) for part in parts})
        if activity == "busy":
            self.worked_ms = ts_ms
        elif activity == "idle" and 0 <= ts_ms - self.worked_ms < IDLE_AFTER_MS:
            activity = "busy"
        self.last, self.sign = msgspec.structs.replace(device, holders=(), processes=None), _SIGNS[activity]
        step = ts_ms // STEP_MS
        begins_again = (self.step - step) * STEP_MS > WAITED_MS
        if begins_again:  # what is known is of a time that the node's clock has not reached yet
            self.step, self.signs, self.readings = 0, bytearray(b" " * STEPS), _no_readings()
            self.since_ms = ts_ms
            self.spans.clear()
        if step <= self.step:
            return begins_again
        is_gap = (step - self.step) * STEP_MS > silent_after_ms(interval_ms, STEP_MS)
        sign, metrics = (b" ", {}) if is_gap else (self.sign, self.last.metrics)
        for missing in range(max(self.step + 1, step - STEPS + 1), step) if self.step else ():
            self._set_reading(missing % STEPS, sign, metrics)
        self._set_reading(step % STEPS, self.sign, self.last.metrics)
        self.step = step
        return begins_again

    def _set_reading(self, index: int, sign: bytes, metrics: Mapping[str, Number | None]) -> None:
        self.signs[index : index + 1] = sign
        for row, key in enumerate(HISTORY_METRICS):
            value = metrics.get(key)
            self.readings[row * STEPS + index] = _NO_READING if value is None else value

    def set_holders(self, holders: tuple[ShownHolder, ...], ts_ms: int) -> None:
        """Set the holders of a tick. The same pods, of which more is known now, begin no new span."""
        if [holder[:2] for holder in holders] == [holder[:2] for holder in self.holders]:
            self.holders = holders
            return
        self.spans.append(Span(self.holders, self.since_ms, max(ts_ms, self.since_ms)))
        while self.spans and (self.spans[0].to_ms or 0) < ts_ms - HOUR_MS:
            self.spans.popleft()
        self.holders, self.since_ms, self.worked_ms = holders, ts_ms, 0

    def metric_history(self) -> Iterator[list[float | None]]:
        """The readings of each of ``HISTORY_METRICS``, the oldest first."""
        oldest = (self.step + 1) % STEPS
        for row in range(len(HISTORY_METRICS)):
            ring = self.readings[row * STEPS : (row + 1) * STEPS]
            yield [None if math.isnan(value) else value for value in ring[oldest:] + ring[:oldest]]

    def sign_history(self) -> str:
        """The signs of the readings, the oldest first."""
        oldest = (self.step + 1) % STEPS
        return (self.signs[oldest:] + self.signs[:oldest]).decode()


@dataclass(slots=True)
class ShownNode:
    """A node as of its last tick, which was read at ``read_s``.

    ``version``: the fleet's version when anything of the node changed. ``shaped``: the same for its devices and their
    holders. ``missing``: the devices of its ticks of the last hour that the last one lacks.
    """

    slot: int
    last: LastTick
    tick: AttributedSample
    read_s: float
    devices: dict[str, ShownDevice]
    version: int
    shaped: int
    missing: dict[str, ShownDevice]
    silent: bool = False

    @property
    def zone(self) -> str:
        return self.tick.node_labels.get(ZONE, "")

    @property
    def signs(self) -> str:
        """The sign of each device."""
        if self.silent:
            return SILENT * len(self.devices)
        return b"".join([device.sign for device in self.devices.values()]).decode()

    def values(self, metric: str) -> list[Number | None]:
        """A metric of each device, rounded to the six digits that are shown."""
        if self.silent:
            return [None] * len(self.devices)
        values = [device.last.metrics.get(metric) for device in self.devices.values()]
        return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


class _UsageHour(NamedTuple):
    """A record of gpu.usage. Of several with the same key, the one with the highest ``order`` counts."""

    order: tuple[int, int]
    start_ms: int
    team: str
    held_ms: int
    idle_ms: int


@dataclass(slots=True)
class Fleet:
    """What the page shows. ``version`` counts the changes of nodes, ``forgotten`` the nodes that were forgotten."""

    began_ms: int
    team_label: str = "team"
    nodes: dict[tuple[str, str], ShownNode] = field(default_factory=dict)
    version: int = 0
    forgotten: int = 0
    alerts_version: int = 0
    usage_version: int = 0
    _alerts: dict[bytes, Alert] = field(default_factory=dict)
    _usage: dict[int, _UsageHour] = field(default_factory=dict)
    _ms_by_team: dict[str, list[int]] = field(default_factory=dict)
    _usage_from_ms: int = 0
    _slots: int = 0

    # -- ticks

    def add_tick(self, tick: AttributedSample, now_s: float, age_s: float = 0.0) -> Verdict:
        """Show a node's next tick, which was ``age_s`` old when it was read. A replay changes nothing."""
        key = (tick.cluster, tick.node)
        node = self.nodes.get(key)
        verdict = replays.verdict(node.last if node else None, tick)
        if verdict == "replay":
            return verdict
        self.version += 1
        last, read_s = replays.after(node.last if node else None, tick), now_s - max(0.0, age_s)
        before = node.devices if node else {}
        reshaped = node is None or node.tick.node_labels != tick.node_labels
        known, devices = (node.missing | before if node else {}), dict[str, ShownDevice]()
        parts_of: dict[str, list[AttributedDevice]] = {}
        for device in tick.devices:
            if device.mig is not None:
                parts_of.setdefault(device.mig.parent_uuid, []).append(device)
        for device in tick.devices:
            parts = parts_of.get(device.uuid, ())
            shown, holders = known.get(device.uuid), self._holders(device, parts)
            if shown is None:
                shown, reshaped = ShownDevice(device, holders, tick.ts_ms), True
            elif shown.holders != holders or _description(shown.last) != _description(device):
                shown.set_holders(holders, tick.ts_ms)
                reshaped = True
            reshaped |= shown.update(device, parts, tick.ts_ms, tick.interval_ms)
            devices[device.uuid] = shown
        reshaped |= list(before) != list(devices)
        shaped = self.version if reshaped or node is None else node.shaped
        slot = self._slots if node is None else node.slot
        self._slots += node is None
        bare = msgspec.structs.replace(tick, devices=())
        gone = [(uuid, shown) for uuid, shown in known.items() if uuid not in devices]
        recent = [(uuid, shown) for uuid, shown in gone if abs(tick.ts_ms - shown.step * STEP_MS) < HOUR_MS]
        missing = dict(recent[-MAX_MISSING:])
        self.nodes[key] = ShownNode(slot, last, bare, read_s, devices, self.version, shaped, missing)
        return verdict

    def _holders(self, device: AttributedDevice, parts: Sequence[AttributedDevice]) -> tuple[ShownHolder, ...]:
        """The holders of a device and of its parts, each pod once."""
        holders, all_holders = [], device.holders
        for part in parts:
            all_holders += part.holders
        for pod, (holder, *_) in by_pod(all_holders).items() if all_holders else ():
            team = team_of(holder.labels, holder.namespace_labels, self.team_label) or ""
            workload = f"{holder.workload.kind}/{holder.workload.name}" if holder.workload else ""
            holders.append(ShownHolder(pod.namespace, pod.pod, workload, team))
        return tuple(holders)

    def expire(self, now_s: float) -> None:
        """Mark silent nodes, and forget those that have been silent for an hour."""
        for key, node in list(self.nodes.items()):
            silent_s = silent_after_s(node.tick.interval_ms, SILENT_S)
            if now_s - node.read_s > max(FORGET_S, silent_s):
                del self.nodes[key]
                self.forgotten += 1
            elif now_s - node.read_s > silent_s and not node.silent:
                self.version += 1
                node.silent, node.version = True, self.version

    def device(self, uuid: str) -> tuple[ShownNode, ShownDevice] | None:
        """The device with this UUID and its node; if several nodes have it, the one that was read last."""
        candidates = [(node, node.devices[uuid]) for node in self.nodes.values() if uuid in node.devices]
        return max(candidates, key=lambda candidate: candidate[0].read_s, default=None)

    # -- alerts

    def set_alert(self, key: bytes, alert: Alert | None) -> None:
        """Show the last record of an alert's key, if it is open. None: the record was deleted."""
        before = self._alerts.pop(key, None)
        if alert is not None and alert.is_open:
            self._alerts[key] = alert
        self.alerts_version += before is not None or key in self._alerts

    def clear_alerts(self) -> None:
        """Show no alert any more."""
        self._alerts.clear()
        self.alerts_version += 1

    def alerts(self) -> list[Alert]:
        """The open alerts, the critical ones first, then the newest."""
        newest_first = sorted(self._alerts.values(), key=lambda alert: -epoch_ms(alert.starts_at))
        return sorted(newest_first, key=lambda alert: _RANKS.get(alert.severity, len(_RANKS)))

    # -- usage

    def add_usage(self, key: bytes, hour: Usage) -> bool:
        """Add an hour of a device. False if it is not newer than the one that is known, or more than a day old."""
        if hour.start_ms < self._usage_from_ms:
            return False
        digest = hash(key)  # 64 bits, a tenth of the key
        before = self._usage.get(digest)
        if before is not None and before.order >= hour.order:
            return False
        if hour.category == "held":
            held_ms = hour.slice_ms // hour.of
            idle_ms = held_ms * hour.idle_ms // hour.device_ms if hour.device_ms else 0
            if before is not None:
                self._add(before, -1)
            self._usage[digest] = _UsageHour(hour.order, hour.start_ms, hour.team or NO_TEAM, held_ms, idle_ms)
            self._add(self._usage[digest], 1)
            self.usage_version += 1
        return True

    def _add(self, hour: _UsageHour, times: int) -> None:
        held_and_idle_ms = self._ms_by_team.setdefault(hour.team, [0, 0])
        held_and_idle_ms[0] += times * hour.held_ms
        held_and_idle_ms[1] += times * hour.idle_ms

    def expire_usage(self, now_ms: int) -> None:
        """Forget the hours that are more than a day old."""
        self._usage_from_ms = (now_ms // HOUR_MS - USAGE_HOURS + 1) * HOUR_MS
        expired = [key for key, hour in self._usage.items() if hour.start_ms < self._usage_from_ms]
        for key in expired:
            self._add(self._usage.pop(key), -1)
        self._ms_by_team = {team: pair for team, pair in self._ms_by_team.items() if pair[0]}
        self.usage_version += bool(expired)

    def usage(self) -> list[tuple[str, float, float]]:
        """Each team's GPU-hours within the last day: held, and those of them idle. Most first."""
        rows = [(team, held / HOUR_MS, idle / HOUR_MS) for team, (held, idle) in self._ms_by_team.items() if held]
        return sorted(rows, key=lambda row: (-row[1], row[0]))
