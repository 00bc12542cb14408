"""The fleet now, and what became of each device within the last hour. Pure.

In:       ticks, open alerts and hours of usage; times of arrival in seconds on a clock that never steps back.
Out:      what :mod:`sinks.page.frames` writes for browsers.
State:    of each node its last tick; of each device who held it when, and one reading in 15 s, for an hour; which
          alerts are open; who had how much of the last day. A node without a tick for 30 s is silent, for an hour gone.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from delivery import replays
from delivery.replays import LastTick, Verdict
from topics.alerts import Alert, milliseconds
from topics.attributed import AttributedDevice, AttributedSample, by_pod
from topics.idleness import device_activity
from topics.topic import Number
from topics.usage import HOUR_MS, Usage

IDLE_AFTER_MS = 10_000
"""Whoever has worked within so long is not idle: one tick without work is a pause."""

SILENT_S = 30.0
FORGET_S = 3600.0

STEP_MS = 15_000
STEPS = HOUR_MS // STEP_MS
SPANS = 120
"""So many changes of holders are known of a device."""

READ = ("gpu_utilization_ratio", "memory_used_bytes", "power_watts", "temperature_celsius")
"""Of these metrics a device has readings."""

USAGE_HOURS = 24
NO_TEAM = "(no team)"
ZONE = "topology.kubernetes.io/zone"

_RANKS = {"critical": 0, "warning": 1, "info": 2}
_NO_READING = math.nan
_WORDS = {"busy": b"b", "idle": b"i", "held": b"h", "free": b"f", "failing": b"x"}
SILENT = "s"
"""What stands for each word of :data:`topics.idleness.Activity` in a line of words, and for that of a silent node."""


class Who(NamedTuple):
    """A pod that holds a device, or a batch job. What is not known is empty."""

    namespace: str
    pod: str
    workload: str
    team: str


class Span(NamedTuple):
    """Who held a device from one time to another, by the node's clock; None: until now."""

    who: tuple[Who, ...]
    from_ms: int
    to_ms: int | None


@dataclass(slots=True)
class ShownDevice:
    """A device of a node's last tick. ``readings`` has a row for each of ``READ``, ``words`` each reading's sign."""

    last: AttributedDevice
    who: tuple[Who, ...]
    since_ms: int
    word: bytes = b"f"
    worked_ms: int = 0
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=SPANS))
    step: int = 0
    words: bytearray = field(default_factory=lambda: bytearray(b" " * STEPS))
    readings: "array[float]" = field(default_factory=lambda: array("f", [_NO_READING]) * (STEPS * len(READ)))

    def take(self, device: AttributedDevice, ts_ms: int) -> None:
        """What a tick says of it, without its holders."""
        said = device_activity(device)
        if said == "busy":
            self.worked_ms = ts_ms
        elif said == "idle" and 0 <= ts_ms - self.worked_ms < IDLE_AFTER_MS:
            said = "busy"
        self.last, self.word = msgspec.structs.replace(device, holders=(), processes=None), _WORDS[said]
        # a reading is kept if this is the first tick of its 15 s; those for which there was no tick are none
        step = ts_ms // STEP_MS
        if step <= self.step:
            return
        for missing in range(max(self.step + 1, step - STEPS + 1), step) if self.step else ():
            self._keep(missing % STEPS, b" ", {})
        self._keep(step % STEPS, self.word, self.last.metrics)
        self.step = step

    def _keep(self, place: int, word: bytes, metrics: Mapping[str, Number | None]) -> None:
        self.words[place : place + 1] = word
        for row, key in enumerate(READ):
            value = metrics.get(key)
            self.readings[row * STEPS + place] = _NO_READING if value is None else value

    def hold(self, who: tuple[Who, ...], ts_ms: int) -> None:
        """These hold it now. The same pods, of which more is known, hold it on."""
        if [one[:2] for one in who] == [one[:2] for one in self.who]:
            self.who = who
            return
        self.spans.append(Span(self.who, self.since_ms, max(ts_ms, self.since_ms)))
        while self.spans and (self.spans[0].to_ms or 0) < ts_ms - HOUR_MS:
            self.spans.popleft()
        self.who, self.since_ms, self.worked_ms = who, ts_ms, 0

    def history(self) -> Iterator[list[float | None]]:
        """The readings of each of ``READ``, the oldest first."""
        first = (self.step + 1) % STEPS
        for row in range(len(READ)):
            rows = self.readings[row * STEPS : (row + 1) * STEPS]
            yield [None if math.isnan(value) else value for value in rows[first:] + rows[:first]]

    def words_since(self) -> str:
        """The signs of the readings, the oldest first."""
        first = (self.step + 1) % STEPS
        return (self.words[first:] + self.words[:first]).decode()


@dataclass(slots=True)
class ShownNode:
    """A node, as of its last tick. ``version`` and ``shaped`` are the fleet's when it changed, and when something of it
    changed beside values: its devices, or who holds them."""

    slot: int
    last: LastTick
    tick: AttributedSample
    heard_s: float
    devices: dict[str, ShownDevice]
    version: int
    shaped: int
    silent: bool = False

    @property
    def zone(self) -> str:
        return self.tick.node_labels.get(ZONE, "")

    @property
    def words(self) -> str:
        """A sign for each device."""
        if self.silent:
            return SILENT * len(self.devices)
        return b"".join([device.word for device in self.devices.values()]).decode()

    def values(self, metric: str) -> list[Number | None]:
        """A metric of each device, with the six digits that are shown."""
        if self.silent:
            return [None] * len(self.devices)
        found = [device.last.metrics.get(metric) for device in self.devices.values()]
        return [float(f"{value:.6g}") if isinstance(value, float) else value for value in found]


class _Booked(NamedTuple):
    """What a record of gpu.usage says; ``order`` says which of a key counts."""

    order: tuple[int, int]
    start_ms: int
    team: str
    held_ms: int
    idle_ms: int


@dataclass(slots=True)
class Fleet:
    """What the page shows. ``version`` rises with every change of a node, ``forgotten`` with every one that is gone."""

    began_ms: int
    team_label: str = "team"
    nodes: dict[tuple[str, str], ShownNode] = field(default_factory=dict)
    version: int = 0
    forgotten: int = 0
    alerts_version: int = 0
    usage_version: int = 0
    _alerts: dict[bytes, Alert] = field(default_factory=dict)
    _usage: dict[int, _Booked] = field(default_factory=dict)
    _teams: dict[str, list[int]] = field(default_factory=dict)
    _slots: int = 0

    # -- ticks

    def take(self, tick: AttributedSample, now_s: float, age_s: float = 0.0) -> Verdict:
        """A node's next tick, which was ``age_s`` old when it came; what kind of record it was."""
        key = (tick.cluster, tick.node)
        node = self.nodes.get(key)
        verdict = replays.verdict(node.last if node else None, tick)
        if verdict == "replay":
            return verdict
        self.version += 1
        last, heard_s = replays.after(node.last if node else None, tick), now_s - max(0.0, age_s)
        before = node.devices if node else {}
        reshaped = node is None or len(before) != len(tick.devices) or node.tick.node_labels != tick.node_labels
        devices: dict[str, ShownDevice] = {}
        for device in tick.devices:
            shown, who = before.get(device.uuid), self._who(device)
            if shown is None:
                shown, reshaped = ShownDevice(device, who, tick.ts_ms), True
            elif shown.who != who or shown.last.mig != device.mig:
                shown.hold(who, tick.ts_ms)
                reshaped = True
            shown.take(device, tick.ts_ms)
            devices[device.uuid] = shown
        shaped = self.version if reshaped or node is None else node.shaped
        slot = self._slots if node is None else node.slot
        self._slots += node is None
        kept = msgspec.structs.replace(tick, devices=())
        self.nodes[key] = ShownNode(slot, last, kept, heard_s, devices, self.version, shaped)
        return verdict

    def _who(self, device: AttributedDevice) -> tuple[Who, ...]:
        """Who holds a device: each pod once."""
        found = []
        for pod, (one, *_) in by_pod(device.holders).items() if device.holders else ():
            team = one.labels.get(self.team_label, one.namespace_labels.get(self.team_label, ""))
            workload = f"{one.workload.kind}/{one.workload.name}" if one.workload else ""
            found.append(Who(pod.namespace, pod.pod, workload, team))
        return tuple(found)

    def pass_time(self, now_s: float) -> None:
        """Nodes fall silent, and those that have been for an hour are forgotten."""
        for key, node in list(self.nodes.items()):
            if now_s - node.heard_s > FORGET_S:
                del self.nodes[key]
                self.forgotten += 1
            elif now_s - node.heard_s > SILENT_S and not node.silent:
                self.version += 1
                node.silent, node.version = True, self.version

    def device(self, uuid: str) -> tuple[ShownNode, ShownDevice] | None:
        """The device with this UUID, if there is one; of several, that of which was heard last."""
        found = [(node, node.devices[uuid]) for node in self.nodes.values() if uuid in node.devices]
        return max(found, key=lambda one: one[0].heard_s) if found else None

    # -- alerts

    def see(self, key: bytes, alert: Alert | None) -> None:
        """The last record of an alert's key; None: it is long over."""
        before = self._alerts.pop(key, None)
        if alert is not None and alert.is_open:
            self._alerts[key] = alert
        self.alerts_version += before is not None or key in self._alerts

    def alerts(self) -> list[Alert]:
        """Those that are open, the critical ones first, then the newest."""
        order = sorted(self._alerts.values(), key=lambda one: -milliseconds(one.starts_at))
        return sorted(order, key=lambda one: _RANKS.get(one.severity, len(_RANKS)))

    # -- usage

    def book(self, key: bytes, hour: Usage) -> bool:
        """An hour of a device. False if it says nothing new."""
        digest = hash(key)  # of 64 bits: a tenth of the key
        before = self._usage.get(digest)
        if before is not None and before.order >= hour.order:
            return False
        if hour.category == "held":
            held_ms = hour.slice_ms // hour.of
            idle_ms = held_ms * hour.idle_ms // hour.device_ms if hour.device_ms else 0
            if before is not None:
                self._add(before, -1)
            self._usage[digest] = _Booked(hour.order, hour.start_ms, hour.team or NO_TEAM, held_ms, idle_ms)
            self._add(self._usage[digest], 1)
            self.usage_version += 1
        return True

    def _add(self, hour: _Booked, times: int) -> None:
        both = self._teams.setdefault(hour.team, [0, 0])
        both[0] += times * hour.held_ms
        both[1] += times * hour.idle_ms

    def close_books(self, now_ms: int) -> None:
        """Forget the hours of more than a day ago."""
        first_ms = (now_ms // HOUR_MS - USAGE_HOURS + 1) * HOUR_MS
        old = [key for key, hour in self._usage.items() if hour.start_ms < first_ms]
        for key in old:
            self._add(self._usage.pop(key), -1)
        self._teams = {team: both for team, both in self._teams.items() if both[0]}
        self.usage_version += bool(old)

    def usage(self) -> list[tuple[str, float, float]]:
        """Each team's GPU-hours within the last day: held, and idle of them; the most first."""
        rows = [(team, held / HOUR_MS, idle / HOUR_MS) for team, (held, idle) in self._teams.items() if held]
        return sorted(rows, key=lambda row: (-row[1], row[0]))
