"""The alerts of a node, from all of its ticks, by docs/reference/alerts.md ("How a rule is judged").

Written from that page alone, to be held against the stream: each condition is found again in every tick from the whole
history, slowly, and nothing is remembered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streams.alerts.rules.rule import Rule, Rules, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.xids import of_code
from topics.alerts import fingerprint
from topics.attributed import Holder

MINUTE_MS = 60_000
STEP_MS = 5_000
MISSING_SAYS_NOTHING_MS = 600_000
WINDOW_STEP_MS = 300_000
IDLE_MS = 900_000
CAUSES = ("crash_loop", "held_idle", "memory_hoarded", "underused")
OF_PODS = ("held_idle", "stalled", "underused", "memory_hoarded", "crash_loop")

COUNTERS = {
    "": ("ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total"),
    "crc": ("nvlink_crc_errors_total",),
    "replay": ("nvlink_replay_errors_total",),
    "recovery": ("nvlink_recovery_errors_total",),
}
MEASURES = ("gpu_utilization_ratio", "gpu_utilization_max_ratio", "graphics_engine_active_ratio", "sm_active_ratio")
VIDEO = ("encoder_utilization_ratio", "decoder_utilization_ratio")


class Subject(NamedTuple):
    """What a condition is about."""

    name: str
    device: str = ""
    pod_uid: str = ""
    key: str = ""


class Verdict(NamedTuple):
    """Whether it holds in a tick; since when at the soonest; for how long it must; and the value that measures it."""

    holds: bool | None
    since_ms: int = 0
    for_ms: int | None = None
    value: float | None = None


class Spell(NamedTuple):
    """A firing of a condition, by the numbers of the node's ticks: from its first to the one in which it is over, if it
    ever is, and the one from which on it is critical. ``value``: of counted errors."""

    subject: Subject
    first: int
    starts_ms: int
    value: float | None = None
    critical: int | None = None
    last: int | None = None
    ends_ms: int | None = None


class Transition(NamedTuple):
    """An alert that fired, or was resolved. ``value``: of counted errors."""

    name: str
    fingerprint: str
    state: str
    at_ms: int
    value: float | None = None


@dataclass
class Firing:
    """An alert that fires since a time; ``ceased_ms``: since when its condition has not held."""

    since_ms: int | None = None
    ceased_ms: int | None = None

    def not_held_ms(self, now_ms: int, holds: bool | None, *, event: bool) -> int | None:
        """For how long its condition has not held by a tick; None if the tick says that it does, or nothing."""
        if holds:
            self.ceased_ms = now_ms if event else None
        if holds is not False:
            return None
        self.ceased_ms = now_ms if self.ceased_ms is None else min(self.ceased_ms, now_ms)
        return now_ms - self.ceased_ms


@dataclass
class Pending:
    """A condition that may fire: since when it has held, and when it was last known to, if it is not known now."""

    since_ms: int | None = None
    doubt_ms: int | None = None

    def held_ms(self, now_ms: int, before_ms: int, verdict: Verdict) -> int | None:
        """For how long it has held by a tick, ``before_ms`` being the tick before; None if the tick does not say so."""
        if verdict.holds is False or (self.since_ms is None and not verdict.holds):
            self.since_ms = self.doubt_ms = None
            return None
        if verdict.holds is None and self.doubt_ms is None:
            self.doubt_ms = before_ms
        gap = not 0 <= now_ms - before_ms <= MINUTE_MS
        starts_again = gap or (self.doubt_ms is not None and now_ms - self.doubt_ms > MINUTE_MS)
        if verdict.holds is None:
            if starts_again:
                self.since_ms = self.doubt_ms = None
            return None
        begins_ms = verdict.since_ms if before_ms < verdict.since_ms else now_ms
        since_ms = begins_ms if self.since_ms is None else self.since_ms
        self.since_ms, self.doubt_ms = max(now_ms if starts_again else since_ms, verdict.since_ms), None
        return now_ms - self.since_ms


NO, UNKNOWN, YES = Verdict(False), Verdict(None), Verdict(True)


def transitions(rules: Rules, ticks: Sequence[Tick]) -> list[Transition]:
    """All transitions of a node's ticks, in no order."""
    history = History(rules, ticks)
    lives = [life for subject in history.subjects() for life in history.life(subject)]
    return lives + [silence for rule in rules.of("node_silent") for silence in history.silences(rule)]


class History:
    """The ticks of a node, and the verdicts that follow from them."""

    def __init__(self, rules: Rules, ticks: Sequence[Tick]) -> None:
        self.rules = rules
        self.ticks: list[Tick] = []
        self._rule = {rule.name: rule for rule in rules.rules}
        self._devices: list[dict[str, Device]] = []
        self._present_cache: dict[tuple[str, int], bool] = {}
        self._spells: dict[Subject, list[Spell]] = {}
        self._due_ms: dict[tuple[Subject, int], int] = {}  # in how long what is pending in a tick would fire
        for tick in ticks:
            devices = {device.uuid: self._with_known_uids(device) for device in tick.devices}
            self.ticks.append(msgspec.structs.replace(tick, devices=tuple(devices.values())))
            self._devices.append(devices)

    def _with_known_uids(self, device: Device) -> Device:
        """The device of the next tick. A pod whose uid is not known there has the one that it had on it before."""
        uids: dict[tuple[str, str], str | None] = {}
        for i in reversed(range(len(self.ticks))):
            before = self._present(device.uuid, i)
            if not self._was_there(device.uuid, i):
                break
            if before is not None and self.ticks[i].attribution != "none":
                pods = dict.fromkeys((holder.namespace, holder.pod, holder.pod_uid) for holder in before.holders)
                uids = {(namespace, pod): uid for namespace, pod, uid in pods}
                break
        known = {(holder.namespace, holder.pod) for holder in device.holders if holder.pod_uid}
        holders = [
            holder
            if (name := (holder.namespace, holder.pod)) in known
            else msgspec.structs.replace(holder, pod_uid=uids.get(name))
            for holder in device.holders
        ]
        return msgspec.structs.replace(device, holders=tuple(holders))

    # -- what may be judged

    def subjects(self) -> set[Subject]:
        """Everything that held in some tick."""
        holding = set[Subject]()
        for i in range(len(self.ticks)):
            holding |= {subject for subject in self._possible(i) if self.verdict(subject, i).holds}
        return holding

    def _possible(self, i: int) -> Iterable[Subject]:
        uuids = {device.uuid for tick in self.ticks[: i + 1] for device in tick.devices}
        for rule in self.rules.rules:
            if rule.kind == "policy_invalid":
                for holder in [holder for device in self.ticks[i].devices for holder in device.holders]:
                    for error in policy_of(holder).errors:
                        uid, name = _identity(holder)
                        yield Subject(rule.name, "", uid, f"{name} {error.name}".strip())
            for uuid in uuids if rule.kind not in ("policy_invalid", "node_silent") else ():
                yield from self._of_device(rule, uuid, i)

    def _of_device(self, rule: Rule, uuid: str, i: int) -> Iterable[Subject]:
        device = self._present(uuid, i)
        if rule.kind in OF_PODS:
            for holder in device.holders if device is not None else ():
                yield Subject(rule.name, uuid, *_identity(holder))
        elif rule.kind == "attribution_conflict":
            yield from (Subject(rule.name, uuid, key=key) for key in ("unallocated_process", "no_pod"))
        elif rule.kind == "nvlink_errors":
            yield from (Subject(rule.name, uuid, key=key) for key in ("crc", "replay", "recovery"))
        elif rule.kind == "xid":
            for code in ("13", "79") if device is not None else ():
                yield Subject(rule.name, uuid, self._xid_pod(device, code), code)
        else:
            yield Subject(rule.name, uuid)

    # -- what a tick says

    def verdict(self, subject: Subject, i: int) -> Verdict:
        tick, kind = self.ticks[i], self._rule[subject.name].kind
        if kind == "policy_invalid":
            return self._policy(subject, tick)
        device = self._present(subject.device, i)
        if kind == "xid":
            return self._xid(subject, i)
        if kind == "missing":
            return Verdict(device is None and self._was_there(subject.device, i) and not self._is_mig(subject.device))
        if device is None:
            return self._gone_verdict(subject, i)
        if kind in ("lost", "not_answering"):
            parent = self._present(device.mig.parent_uuid, i) if device.mig is not None else None
            if parent is not None and parent.state == device.state:
                return NO
            if kind == "lost":
                return {"lost": YES, "timeout": UNKNOWN}.get(device.state, NO)
            return Verdict(device.state == "timeout")
        if kind in OF_PODS:
            return self._of_pods(subject, device, i)
        if device.state != "ok":
            return UNKNOWN
        judges: dict[str, Callable[[Subject, Device, int], Verdict]] = {
            "used_unallocated": self._used,
            "attribution_conflict": self._conflict,
            "ecc_uncorrectable": self._errors,
            "nvlink_errors": self._errors,
        }
        return judges[kind](subject, device, i) if kind in judges else _by_value(kind, device)

    def _policy(self, subject: Subject, tick: Tick) -> Verdict:
        for holder in [holder for device in tick.devices for holder in device.holders]:
            uid, name = _identity(holder)
            names = [f"{name} {error.name}".strip() for error in policy_of(holder).errors]
            if uid == subject.pod_uid and subject.key in names:
                return YES
        return UNKNOWN if tick.attribution == "none" else NO

    def _gone_verdict(self, subject: Subject, i: int) -> Verdict:
        """A device that is not in the tick."""
        if self._was_there(subject.device, i):
            first_ms = min(tick.ts_ms for tick in self.ticks[self._last(subject.device, i) + 1 : i + 1])
            if self.ticks[i].ts_ms - first_ms <= MISSING_SAYS_NOTHING_MS:
                is_held = self._rule[subject.name].kind not in OF_PODS or self._since(subject, i) is not None
                return UNKNOWN if is_held else self._of_no_snapshot(i)
        return NO

    def _of_no_snapshot(self, i: int) -> Verdict:
        return UNKNOWN if self.ticks[i].attribution == "none" else NO

    def _of_pods(self, subject: Subject, device: Device, i: int) -> Verdict:
        """What a pod does with a device."""
        tick, since_ms, rule = self.ticks[i], self._since(subject, i), self._rule[subject.name]
        if device.state != "ok":
            return UNKNOWN if since_ms is not None else self._of_no_snapshot(i)
        if tick.attribution == "none":
            works = rule.kind == "held_idle" and _work(device) >= rule.idle_below
            return NO if works and not device.holders and since_ms is not None else UNKNOWN
        holder = _of_pod(device, subject)
        if holder is None or holder.observed or since_ms is None or policy_of(holder).off:
            return NO
        if rule.kind == "crash_loop":
            return Verdict(holder.waiting == "CrashLoopBackOff" and (holder.restarts or 0) >= rule.restarts)
        if rule.kind == "stalled":
            return _is_stalled(rule, device)
        if rule.kind in ("underused", "memory_hoarded"):
            return self._hardly_used(subject, device, holder, i)
        idle = _is_idle(rule.idle_below, device, holder)
        from_ms = since_ms + rule.grace_ms
        if idle is not False and tick.ts_ms < from_ms:
            idle = None
        return Verdict(idle, from_ms, policy_of(holder).idle_after_ms)

    def _hardly_used(self, subject: Subject, device: Device, holder: Holder, i: int) -> Verdict:
        rule, tick = self._rule[subject.name], self.ticks[i]
        mean, worked_ms = self._use(subject, i, rule.window_ms)
        if tick.ts_ms - (self._since(subject, i) or 0) < max(rule.window_ms, policy_of(holder).idle_after_ms or 0):
            mean = None
        if rule.kind == "underused":
            idles = mean is not None and tick.ts_ms - worked_ms >= IDLE_MS
            return Verdict(mean < rule.used_below and not idles) if mean is not None else UNKNOWN
        total, used = device.metrics.memory_total_bytes, _memory_of(device, holder)
        if mean is None or not total:
            return UNKNOWN
        if mean >= rule.used_below:
            return NO
        return UNKNOWN if used is None else Verdict(used >= rule.memory_above * total)

    def _use(self, subject: Subject, i: int, window_ms: int) -> tuple[float | None, int]:
        """The mean of what a pod did in the last whole steps of a window, if that is known, and when it worked last."""
        readings: list[tuple[int, int, float]] = []  # the step of each, for how long it is, and what it says
        before_ms = worked_ms = 0
        for j in range(i + 1):
            tick, device = self.ticks[j], self._present(subject.device, j)
            if not self._was_there(subject.device, j):
                readings = []
            if device is None or tick.attribution == "none" or device.state != "ok":
                continue
            holder = _of_pod(device, subject)
            if holder is None or holder.observed:
                readings = []
                continue
            used = _used_by(device, holder)
            if used is None:
                continue
            step = tick.ts_ms // WINDOW_STEP_MS
            if readings and step < readings[-1][0] - 1:
                readings = []
            if not readings:
                worked_ms, before_ms = 0, tick.ts_ms
            passed_ms = tick.ts_ms - before_ms
            step = max([step, *(length for length, _, _ in readings)])
            readings.append((step, passed_ms if 0 < passed_ms <= MINUTE_MS else 0, used))
            before_ms, worked_ms = tick.ts_ms, tick.ts_ms if used >= 0.01 else worked_ms
        steps = window_ms // WINDOW_STEP_MS
        if not readings or readings[-1][0] - readings[0][0] < steps:
            return None, worked_ms
        within = [(ms, used) for step, ms, used in readings if readings[-1][0] - steps <= step < readings[-1][0]]
        measured_ms = sum(ms for ms, _ in within)
        if measured_ms * 2 < window_ms:
            return None, worked_ms
        return sum(ms * used for ms, used in within) / measured_ms, worked_ms

    def _since(self, subject: Subject, i: int) -> int | None:
        """The first tick in which the pod had the device that it has now, as far as is known."""
        since_ms: int | None = None
        for j in range(i + 1):
            tick, device = self.ticks[j], self._present(subject.device, j)
            if not self._was_there(subject.device, j):
                since_ms = None
            if device is None or tick.attribution == "none":
                continue
            holder = _of_pod(device, subject)
            if holder is None or holder.observed:
                since_ms = None
            elif since_ms is None or since_ms > tick.ts_ms:
                since_ms = tick.ts_ms
        return since_ms

    def _used(self, subject: Subject, device: Device, i: int) -> Verdict:
        tick = self.ticks[i]
        cut = any(other.mig is not None and other.mig.parent_uuid == device.uuid for other in tick.devices)
        in_mig_mode = device.mig is None and (cut or device.info.mig_mode == "enabled")
        if in_mig_mode or device.jobs or not all(holder.observed for holder in device.holders):
            return NO
        if tick.attribution == "none":
            return UNKNOWN
        if _work(device) >= self._rule[subject.name].used_above:
            return YES
        return NO if _is_measured(device) else UNKNOWN

    def _conflict(self, subject: Subject, device: Device, i: int) -> Verdict:
        hidden = device.processes is None or device.info.processes_visible == "false"
        if hidden or self.ticks[i].attribution == "none":
            return UNKNOWN
        return Verdict(device.conflict == subject.key)

    def _errors(self, subject: Subject, _device: Device, i: int) -> Verdict:
        rule = self._rule[subject.name]
        count = max([self._within(subject.device, name, i) for name in COUNTERS[subject.key]])
        return Verdict(count >= (rule.recoveries if subject.key == "recovery" else rule.at_least), value=count)

    def _within(self, uuid: str, name: str, i: int) -> float:
        """The errors of a counter within a minute."""
        increases: list[tuple[int, float]] = []
        last: float | None = None
        for j in range(i + 1):
            device, now_ms = self._present(uuid, j), self.ticks[j].ts_ms
            if not self._was_there(uuid, j):
                increases, last = [], None
            if device is None:
                continue
            begins_ms = now_ms // STEP_MS * STEP_MS - MINUTE_MS
            increases = [(min(at_ms, now_ms), errors) for at_ms, errors in increases if at_ms >= begins_ms]
            value = getattr(device.metrics, name)
            if value is not None:
                if last is not None:
                    increases.append((now_ms, value - last if value >= last else value))
                last = value
        return sum(errors for _, errors in increases)

    def _xid(self, subject: Subject, i: int) -> Verdict:
        device = self._present(subject.device, i)
        if device is not None and self._xid_errors(device, subject.key, i) > 0:
            of_program = of_code(int(subject.key)).kind == "application"
            sole_holder = _sole_holder(device) if of_program else None
            if self._xid_pod(device, subject.key) == subject.pod_uid and not (
                sole_holder and policy_of(sole_holder).off
            ):
                return YES
        return NO

    def _xid_errors(self, device: Device, code: str, i: int) -> float:
        events = sum(1 for event in device.events or () if event.kind == "xid" and str(event.code) == code)
        count = device.xids.get(code)
        if count is None or i == 0:
            return events
        before: int | None = None
        for j in range(i):
            earlier = self._present(device.uuid, j)
            if self.ticks[j].run_id != self.ticks[i].run_id:
                before = None
            elif earlier is not None and code in earlier.xids:
                before = earlier.xids[code]
            elif earlier is not None and j == 0:
                before = None
        if before is None:
            return count
        return count - before if count >= before else count

    def _xid_pod(self, device: Device | None, code: str) -> str:
        """The uid of the pod that an error of a program is about."""
        if device is None or of_code(int(code)).kind != "application":
            return ""
        pod = _sole_holder(device)
        return (pod.pod_uid or "") if pod is not None else ""

    # -- where devices are

    def _present(self, uuid: str, i: int) -> Device | None:
        return self._devices[i].get(uuid)

    def _is_mig(self, uuid: str) -> bool:
        return any(device.mig is not None for tick in self.ticks for device in tick.devices if device.uuid == uuid)

    def _last(self, uuid: str, i: int) -> int:
        """The last tick that had the device, -1: none."""
        return next((j for j in range(i, -1, -1) if self._present(uuid, j) is not None), -1)

    def _was_there(self, uuid: str, i: int) -> bool:
        """Whether the node has the device, or had it and it is not forgotten."""
        if (uuid, i) not in self._present_cache:
            self._present_cache[uuid, i] = self._is_remembered(uuid, i)
        return self._present_cache[uuid, i]

    def _is_remembered(self, uuid: str, i: int) -> bool:
        last = self._last(uuid, i)
        if last in (-1, i):
            return last == i
        first_ms = self.ticks[last + 1].ts_ms
        before = self._present(uuid, last)
        assert before is not None
        for tick in self.ticks[last + 1 : i + 1]:
            first_ms = min(first_ms, tick.ts_ms)
            if before.mig is not None:
                parent = next((device for device in tick.devices if device.uuid == before.mig.parent_uuid), None)
                if parent is not None and parent.state == "ok":
                    return False
            elif any(device.mig is None and device.pci_bus_id == before.pci_bus_id for device in tick.devices):
                return False
            if tick is not self.ticks[last + 1] and tick.ts_ms - first_ms >= self.rules.forget_ms:
                return False
        return True

    # -- what becomes of it

    def life(self, subject: Subject) -> Iterable[Transition]:
        """The alerts of a condition."""
        for spell in self.spells(subject):
            yield _transition(subject, self.ticks[spell.first], "firing", spell.starts_ms, spell.value)
            if spell.last is not None and spell.ends_ms is not None:
                yield _transition(subject, self.ticks[spell.last], "resolved", spell.ends_ms)

    def spells(self, subject: Subject) -> list[Spell]:
        """The firings of a condition."""
        if subject not in self._spells:
            self._spells[subject] = list(self._life(subject))
        return self._spells[subject]

    def _comes_first(self, subject: Subject, i: int) -> tuple[bool, bool]:
        """Whether another cause fires in a tick, and whether an earlier cause keeps this one from firing."""
        rule = self._rule[subject.name]
        earlier = CAUSES[: CAUSES.index(rule.kind)] if rule.kind in CAUSES else ()
        fires = waits = False
        for name in [other.name for other in self.rules.rules if other.kind in earlier]:
            cause = subject._replace(name=name)
            spells = [spell for spell in self.spells(cause) if spell.first <= i]
            waits |= self._due_ms.get((cause, i), rule.keep_firing_ms) < rule.keep_firing_ms
            if not spells:
                continue
            if spells[-1].last is None or spells[-1].last >= i or spells[-1].ends_ms is None:
                fires = True
            else:
                waits |= 0 <= self.ticks[i].ts_ms - spells[-1].ends_ms < rule.keep_firing_ms
        return fires, fires or waits

    def _life(self, subject: Subject) -> Iterable[Spell]:
        rule, before_ms = self._rule[subject.name], self.ticks[0].ts_ms
        pending, firing, ended_ms, spell = Pending(), Firing(), -1, Spell(subject, 0, 0)
        for i, tick in enumerate(self.ticks):
            verdict, event = self.verdict(subject, i), rule.kind == "xid"
            superseded, waits = self._comes_first(subject, i)
            if firing.since_ms is not None:
                held_ms = firing.not_held_ms(tick.ts_ms, verdict.holds, event=event)
                ceased = held_ms is not None and held_ms >= rule.keep_firing_ms
                if superseded or ceased or (held_ms is not None and self._is_over(subject, i, event=event)):
                    ended_ms = max(tick.ts_ms, firing.since_ms)
                    yield spell._replace(last=i, ends_ms=ended_ms)
                    pending, firing = Pending(), Firing()
            else:
                held_ms = pending.held_ms(tick.ts_ms, before_ms, verdict)
                for_ms = rule.for_ms if verdict.for_ms is None else verdict.for_ms
                if held_ms is not None and held_ms < for_ms:
                    self._due_ms[subject, i] = for_ms - held_ms
                if held_ms is not None and (event or held_ms >= for_ms) and not waits:
                    firing = Firing(max(tick.ts_ms, ended_ms + 1), tick.ts_ms if event else None)
                    spell = Spell(subject, i, firing.since_ms or 0, verdict.value)
            lasted_ms = tick.ts_ms - (pending.since_ms or 0)
            if firing.since_ms is not None and verdict.holds and 0 < rule.critical_ms <= lasted_ms:
                spell = spell._replace(critical=i if spell.critical is None else spell.critical)
            before_ms = tick.ts_ms
        if firing.since_ms is not None:
            yield spell

    def _is_over(self, subject: Subject, i: int, *, event: bool) -> bool:
        """Whether an exact tick shows that the pod is gone, or a tick with holders that it has silenced the rule."""
        tick = self.ticks[i]
        if not (subject.pod_uid or self._rule[subject.name].kind in OF_PODS):
            return False
        devices = [device for device in tick.devices if subject.device in ("", device.uuid)]
        if subject.device and not devices:
            return False
        pods = [holder for device in devices if (holder := _of_pod(device, subject)) is not None]
        if not pods:
            return not event and tick.attribution == "exact"
        return tick.attribution != "none" and policy_of(pods[0]).off

    def silences(self, rule: Rule) -> Iterable[Transition]:
        """The silences of a node: from when it had sent nothing for long until its next tick."""
        ended_ms, subject = -1, Subject(rule.name)
        for before, tick in zip(self.ticks, self.ticks[1:], strict=False):
            if tick.ts_ms - before.ts_ms >= rule.for_ms:
                fired_ms = max(before.ts_ms + rule.for_ms, ended_ms + 1)
                yield _transition(subject, tick, "firing", fired_ms)
                ended_ms = max(tick.ts_ms, fired_ms)
                yield _transition(subject, tick, "resolved", ended_ms)


def _transition(subject: Subject, tick: Tick, state: str, at_ms: int, value: float | None = None) -> Transition:
    key = fingerprint(subject.name, tick.cluster, tick.node, subject.device, subject.pod_uid, subject.key)
    return Transition(subject.name, key, state, at_ms, value)


def _identity(holder: Holder) -> tuple[str, str]:
    return (holder.pod_uid, "") if holder.pod_uid else ("", f"{holder.namespace}/{holder.pod}")


def _of_pod(device: Device, subject: Subject) -> Holder | None:
    pod_key = subject.pod_uid or subject.key
    return next((holder for holder in device.holders if pod_key in _identity(holder)), None)


def _sole_holder(device: Device) -> Holder | None:
    pods = {(holder.namespace, holder.pod, holder.pod_uid) for holder in device.holders}
    return device.holders[0] if len(pods) == 1 else None


def _by_value(kind: str, device: Device) -> Verdict:
    metrics = device.metrics
    if kind == "row_remap_failure":
        return UNKNOWN if metrics.row_remap_failure is None else Verdict(metrics.row_remap_failure != 0)
    if kind == "row_remap_pending":
        values = [value for value in (metrics.row_remap_pending, metrics.retired_pages_pending) if value is not None]
        return Verdict(any(values)) if values else UNKNOWN
    bits = {"thermal_slowdown": 0x20 | 0x40, "power_brake": 0x80}[kind]
    reasons = metrics.clock_event_reasons
    return UNKNOWN if reasons is None else Verdict(bool(int(reasons) & bits))


def _work(device: Device) -> float:
    return max([getattr(device.metrics, name) or 0.0 for name in (*MEASURES, *VIDEO)])


def _is_stalled(rule: Rule, device: Device) -> Verdict:
    metrics = device.metrics
    if device.mig is not None or _sole_holder(device) is None:
        return NO
    power, limit = metrics.power_watts, metrics.power_limit_watts
    share = power / limit if power is not None and limit else None
    little = [
        None if metrics.gpu_utilization_ratio is None else metrics.gpu_utilization_ratio >= rule.used_above,
        None if share is None else share < rule.power_below,
        None if metrics.sm_active_ratio is None else metrics.sm_active_ratio < rule.sm_active_below,
        None if metrics.tensor_active_ratio is None else metrics.tensor_active_ratio < rule.tensor_active_below,
    ]
    if False in little:
        return NO
    return UNKNOWN if None in little[:2] or little[2:] == [None, None] else YES


def _used_by(device: Device, holder: Holder) -> float | None:
    """What a pod does with a device, by the means of its activity."""
    if _sole_holder(device) is None:
        return holder.parts.utilization_ratio if holder.parts is not None else None
    ratios = [getattr(device.metrics, name) for name in MEASURES if "max" not in name]
    present = [ratio for ratio in ratios if ratio is not None]
    return max([*present, *(getattr(device.metrics, name) or 0.0 for name in VIDEO)]) if present else None


def _memory_of(device: Device, holder: Holder) -> float | None:
    if holder.parts is not None and holder.parts.memory_used_bytes is not None:
        return holder.parts.memory_used_bytes
    return device.metrics.memory_used_bytes if _sole_holder(device) is not None else None


def _is_measured(device: Device) -> bool:
    return any(getattr(device.metrics, name) is not None for name in MEASURES)


def _is_idle(below: float, device: Device, holder: Holder) -> bool | None:
    part = holder.parts.utilization_ratio if holder.parts is not None else None
    own_ratios = [
        process.sm_utilization_ratio or 0.0 for process in device.processes or () if process.pod_uid == holder.pod_uid
    ]
    if (part or 0.0) >= below or (holder.pod_uid is not None and sum(own_ratios) >= below):
        return False
    if _work(device) < below:
        return True if _is_measured(device) else None
    if _sole_holder(device) is not None:
        return False
    unattributed = device.unattributed.utilization_ratio if device.unattributed is not None else None
    parts = [holder.parts.utilization_ratio or 0.0 for holder in device.holders if holder.parts is not None]
    nobodys = unattributed if unattributed is not None else _work(device) - sum(parts)
    video = max([getattr(device.metrics, name) or 0.0 for name in VIDEO])
    theirs = {holder.pod_uid for holder in device.holders if holder.pod_uid is not None}
    only_theirs = all(process.pod_uid in theirs for process in device.processes or ())
    little = nobodys < below or (only_theirs and 2 * nobodys < sum(parts))
    return True if part is not None and little and video < below else None
