"""The alert state machine: from what the conditions find in a node's tick to what becomes of its alerts.

In: a node's state and a tick, or that none came. Out: the state after it, and the alerts to write. Pure.
All times are the ticks' own, so that a replay gives the same alerts. Some things are decided without a tick, by the
worker's clock, and a replay may not find them again. So they are written to the state first, and then their alerts
(:func:`announce`).

A condition is identified by rule, device, pod and the rule's own key. It is inactive, pending since a tick, firing, and
then resolved:

- It fires in the tick in which it has held for the rule's ``for``. An event fires at once.
- A pending one ends with the first tick in which it does not hold. Without evidence it neither fires nor
  ends; after a minute without any, or without a tick, it begins again.
- A firing one is resolved in the tick in which it has not held for the rule's ``keep_firing``; without evidence it
  fires on. It is resolved at once when the pod that it is about is gone, or the rule is.
- Two firings of one alert never start at the same time, whatever the node's clock does.
- What is true of several devices for one reason is one alert (:func:`_scope`). Then the conditions of single devices
  are reported to ``streams/alerts/groups.py``, which makes that alert.
- Of a pod on a device one cause is reported, the first in ``CAUSES`` of ``streams/alerts/rules/rule.py``. The later
  ones wait, or are resolved if they fire.
- While a node is in maintenance, nothing fires, not even its silence, and what fired is resolved.
- An alert that fires for ``critical_after`` becomes critical, which is an update of it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from streams.alerts.conditions import evaluate
from streams.alerts.conditions.finding import Finding, uid_and_key
from streams.alerts.memory import Identity, Memory, NodeAlerts, identity
from streams.alerts.reports import (
    Step,
    Write,
    firing,
    for_others,
    holdings_of,
    reports_of_ranks,
    resolved_alert,
    scope_of_pod,
    step_of,
    with_holdings,
    written,
)
from streams.alerts.rules.rule import CAUSES, WASTE, Kind, Rules
from streams.alerts.text.describe import describe, silent, status_of
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS
from topics.alerts import MAX_TIME_MS, Alert, Scope, Tracked, fingerprint, milliseconds
from topics.workloads import MAINTENANCE

MAX_GAP_MS = 60_000  # a pending condition of which nothing is known for longer begins again
REPEAT_MS = 24 * 3_600_000  # how often an open alert is written again
REPORT_MS = 3_600_000  # how often what is a part of an alert is reported again, for its figures
FORGET_MS = 24 * 3_600_000  # after so long without a tick a node is taken to be removed
LEAVING_MS = 120_000  # for how long a node that was removed from the cluster may send ticks before its machine is off
YOUNG_MS = 10_000  # what was pending for less is not written yet; rising counters are written once in so long
YOUNG_USES_MS = 20_000  # sums of use, which every tick changes, are written once in so long
_TOGETHER: tuple[Kind, ...] = ("missing", "lost", "not_answering")  # of several GPUs of a node, of one cause
_replace = msgspec.structs.replace


class LogPosition(NamedTuple):
    """Where in its partition of gpu.attributed a tick stands, and when it was logged."""

    position: int
    logged_ms: int


OnDevice = tuple[str, str, str]  # the device, and the uid or the name of a pod on it


class _Now(NamedTuple):
    """A tick, and the state before it. ``first``: of each pod on a device the place of the first cause that fires;
    ``due``: the places of those that hold and do not fire yet, and when they would."""

    tick: Tick
    rules: Rules
    state: NodeAlerts
    findings: list[Finding]
    memory: Memory
    first: dict[OnDevice, int]
    due: dict[OnDevice, list[tuple[int, int]]]


# -- a tick


def begin(tick: Tick, place: LogPosition) -> NodeAlerts:
    """The state of a node before its first tick, which this is."""
    nothing = NodeAlerts(
        schema=1, cluster=tick.cluster, node=tick.node, offset=0, position=0, last_ts_ms=0, logged_ms=0
    )
    return arrived(nothing, tick, place, nothing.memory)


def arrived(state: NodeAlerts, tick: Tick, place: LogPosition, memory: Memory) -> NodeAlerts:
    """The state after a tick that changes nothing but which tick is the last one, and the memory."""
    return _replace(
        state,
        offset=tick.offset,
        run_id=tick.run_id,
        seq=tick.seq,
        newest_ts_ms=max(state.newest_ts_ms, tick.ts_ms),
        position=place.position,
        last_ts_ms=tick.ts_ms,
        logged_ms=place.logged_ms,
        silent=False,
        maintenance=tick.node_labels.get(MAINTENANCE),
        memory=memory,
    )


def step(state: NodeAlerts, tick: Tick, place: LogPosition, rules: Rules) -> Step:
    """What a tick makes of a node's alerts."""
    state, announced = announce(state)
    findings, memory = evaluate.evaluate(rules, tick, state.memory)
    after = arrived(state, tick, place, memory)
    reports: list[Write] = []
    step_ends = tick.ts_ms // STEP_MS != state.last_ts_ms // STEP_MS  # then other rules are found, too
    some_missing = len(memory.devices) != len(tick.devices)  # what is held of those goes by the time
    if state.holdings is None or memory.devices is not state.memory.devices or some_missing or step_ends:
        after, reports = with_holdings(after, holdings_of(after, rules))
    if after.maintenance is not None:
        findings = []
    reports += reports_of_ranks(state, after, tick, rules)
    if not (findings or state.tracked or state.resolved or reports):
        return Step(after, announced)
    now = _Now(tick, rules, state, findings, memory, {}, {})
    for one in state.tracked:
        if one.alert is not None and one.name in rules.causes:
            _fires(one, now)
    found: dict[Identity, Finding] = {(f.rule.name, f.device, f.pod_uid, f.key): f for f in findings}
    known = {identity(one) for one in state.tracked}
    new = [
        Tracked(name=name, device=device, pod_uid=uid, key=key, since_ms=max(tick.ts_ms, f.since_ms), event=f.event)
        for (name, device, uid, key), f in found.items()
        if f.holds and (name, device, uid, key) not in known
    ]
    conditions: Iterable[Tracked] = state.tracked
    if new:  # what comes first is judged first
        conditions = sorted((*conditions, *new), key=lambda one: rules.causes.get(one.name, -1))
    tracked: list[Tracked] = []
    writes = [*announced, *reports]
    for one in conditions:
        later, alert, ended = _after(one, found.get(identity(one)), now)
        writes += ended
        if later is not None:
            tracked.append(later)
        if alert is not None:
            writes.append(written(alert, later or one, tick.ts_ms, repeat=alert is one.alert))
            writes += for_others(alert, later or one, tick.ts_ms, rules)
    unchanged = len(tracked) == len(state.tracked) and all(a is b for a, b in zip(tracked, state.tracked, strict=True))
    return step_of(after if unchanged else _replace(after, tracked=tuple(tracked)), writes, tick.ts_ms)


def _after(one: Tracked, finding: Finding | None, now: _Now) -> tuple[Tracked | None, Alert | None, list[Write]]:
    """What becomes of a condition, its alert if that is to be written, and what is written before it."""
    rule = now.rules.by_name.get(one.name)
    if rule is not None and rule.kind == "node_silent":
        return *_ended(one, now, "ticks"), []
    if MAINTENANCE in now.tick.node_labels:
        return *_ended(one, now, "maintenance"), []
    later, alert = (_pending if one.alert is None else _firing)(one, finding, now)
    if later is None or later.alert is None or later.scope is not None or rule is None or rule.kind not in WASTE:
        return later, alert, []
    # an earlier version wrote it as an alert of its own
    ended = resolved_alert(later.alert, one, now.tick.ts_ms, "grouped")
    return _replace(later, scope=scope_of_pod(later.alert)), later.alert, [Write("alert", ended.fingerprint, ended)]


def _pending(one: Tracked, finding: Finding | None, now: _Now) -> tuple[Tracked | None, Alert | None]:
    """A pending condition goes on, begins again after a minute of which nothing is known, ends, or fires."""
    now_ms, before_ms, holds = now.tick.ts_ms, now.state.last_ts_ms, _holds(one, finding, now)
    blind_ms = before_ms if one.blind_ms is None else one.blind_ms
    in_doubt = holds is None or one.blind_ms is not None
    again = not 0 <= now_ms - before_ms <= MAX_GAP_MS or (in_doubt and now_ms - blind_ms > MAX_GAP_MS)
    if holds is None and not again:
        return (one if one.blind_ms is not None else _replace(one, blind_ms=blind_ms)), None
    if finding is None or not holds:
        return None, None
    since_ms = max(now_ms if again else one.since_ms, finding.since_ms)
    if since_ms != one.since_ms or one.blind_ms is not None:
        one = _replace(one, since_ms=since_ms, blind_ms=None)
    return _fired_if_due(one, finding, now)


def _firing(one: Tracked, finding: Finding | None, now: _Now) -> tuple[Tracked | None, Alert | None]:
    """A firing condition goes on, its alert written again now and then, or it has not held for long enough and ends."""
    now_ms, holds = now.tick.ts_ms, _holds(one, finding, now)
    if now.first.get(_place(one), len(CAUSES)) < now.rules.causes.get(one.name, -1):
        return _ended(one, now, "superseded")
    if finding is not None and holds:
        one = _held(one, finding, now)
        if one.alert is not None:
            one = _with_status(one, one.alert, status_of(finding, now.tick))
    elif holds is not None:
        ceased_ms = now_ms if one.ceased_ms is None else min(one.ceased_ms, now_ms)
        because = evaluate.because(now.rules, now.tick, one, now.memory)
        # What can't hold again ends at once. What happened to a pod outlives the pod.
        pod_ended = because == "pod_ended" and not one.event and now.tick.attribution == "exact"
        if pod_ended or because in ("rule_removed", "policy") or now_ms - ceased_ms >= one.keep_ms:
            return _ended(one, now, because)
        if one.ceased_ms != ceased_ms:
            one = _replace(one, ceased_ms=ceased_ms)
    critical_ms = finding.rule.critical_ms if finding is not None and holds else 0
    if one.alert is not None and critical_ms and now_ms - one.since_ms >= critical_ms:
        one = _escalated(one, one.alert)
    every_ms = REPEAT_MS if one.scope is None else REPORT_MS
    if one.written_ms is not None and 0 <= now_ms - one.written_ms < every_ms:
        return one, None
    return _replace(one, written_ms=now_ms), one.alert


def _with_status(one: Tracked, alert: Alert, status: dict[str, str]) -> Tracked:
    """The API server says something else of its device than before, which is to be written."""
    if status.items() <= alert.annotations.items():
        return one
    alert = _replace(alert, annotations={**alert.annotations, **status}, revision=alert.revision + 1)
    return _replace(one, alert=alert, written_ms=None)


def _escalated(one: Tracked, alert: Alert) -> Tracked:
    """It fires for so long that it is critical, which is to be written."""
    if alert.severity == "critical":
        return one
    labels = {**alert.labels, "severity": "critical"}
    alert = _replace(alert, severity="critical", labels=labels, revision=alert.revision + 1)
    return _replace(one, alert=alert, written_ms=None)


def _holds(one: Tracked, finding: Finding | None, now: _Now) -> bool | None:
    """Whether a condition holds; None: it is not known."""
    if finding is not None:
        return finding.holds
    return False if evaluate.is_known(now.rules, now.tick, one, now.memory) else None


def _fired_if_due(one: Tracked, finding: Finding, now: _Now) -> tuple[Tracked, Alert | None]:
    """A condition that holds fires at once if it is an event, else when it has held for long enough."""
    now_ms = now.tick.ts_ms
    if not finding.event and now_ms - one.since_ms < finding.rule.for_ms:
        if one.name in now.rules.causes:
            due = now.rules.causes[one.name], one.since_ms + finding.rule.for_ms
            now.due.setdefault(_place(one), []).append(due)
        return one, None
    if one.name in now.rules.causes and _waits(one, finding.rule.keep_firing_ms, now):
        return one, None
    described = describe(finding, now.tick, one.since_ms, now.rules.wording)
    value = finding.value if finding.value is not None else (now_ms - one.since_ms) / 1000
    alert = firing(finding.rule, one, now.state, now_ms, float(value), described)
    if 0 < finding.rule.critical_ms <= now_ms - one.since_ms:  # it waited for another one
        alert = _replace(alert, severity="critical", labels={**alert.labels, "severity": "critical"})
    if finding.rule.kind in WASTE:  # how many devices of the node the pod was given
        pods = [(device.uuid, uid_and_key(holder)) for device in now.tick.devices for holder in device.holders]
        alert = _replace(alert, held=len({uuid for uuid, pod in pods if pod == (finding.pod_uid, finding.key)}))
    if one.name in now.rules.causes:
        _fires(one, now)
    scope = _scope(finding, alert, now)
    return _held(_replace(one, alert=alert, written_ms=now_ms, scope=scope), finding, now), alert


def _place(one: Tracked) -> OnDevice:
    return one.device, one.pod_uid, one.key


def _fires(one: Tracked, now: _Now) -> None:
    """Note that a cause fires."""
    now.first[_place(one)] = min(now.rules.causes[one.name], now.first.get(_place(one), len(CAUSES)))


def _waits(one: Tracked, keep_ms: int, now: _Now) -> bool:
    """Whether another cause comes first: it fires, would fire within this time, or has been over for less than it."""
    causes, state = now.rules.causes, now.state
    if now.first.get(_place(one), len(CAUSES)) < causes[one.name]:
        return True
    if any(
        place < causes[one.name] and due_ms - now.tick.ts_ms < keep_ms for place, due_ms in now.due.get(_place(one), ())
    ):
        return True
    earlier = [name for name, place in causes.items() if place < causes[one.name]]
    keys = [fingerprint(name, state.cluster, state.node, *_place(one)) for name in earlier]
    ended_ms = [state.resolved[key] for key in keys if key in state.resolved]
    return any(0 <= now.tick.ts_ms - at_ms < keep_ms for at_ms in ended_ms)


def _held(one: Tracked, finding: Finding, now: _Now) -> Tracked:
    """A firing condition that holds in this tick. An event is over with its tick."""
    now_ms, keep_ms, paused_ms, again_ms = now.tick.ts_ms, finding.rule.keep_firing_ms, one.paused_ms, one.again_ms
    ceased_ms = now_ms if finding.event else None
    if one.ceased_ms == ceased_ms and one.keep_ms == keep_ms:
        return one
    if one.ceased_ms is not None and not finding.event:
        paused_ms, again_ms = paused_ms + max(now_ms - one.ceased_ms, 0), now_ms
    return _replace(one, ceased_ms=ceased_ms, keep_ms=keep_ms, paused_ms=paused_ms, again_ms=again_ms)


# -- what is a part of an alert of several devices


def _scope(finding: Finding, alert: Alert, now: _Now) -> Scope | None:
    """Whose alert this one is a part of: its pod's workload's, or the node's if other GPUs went at the same time. None:
    it is an alert of its own, and stays one."""
    if finding.rule.kind in WASTE:
        return scope_of_pod(alert)
    if finding.rule.kind not in _TOGETHER:
        return None
    name, devices = finding.rule.name, {finding.device}
    devices |= {t.device for t in now.state.tracked if t.name == name and t.alert is not None and t.scope is None}
    return "node" if any(f.holds and f.rule.name == name and f.device not in devices for f in now.findings) else None


def _ended(one: Tracked, now: _Now, because: str) -> tuple[None, Alert | None]:
    return None, None if one.alert is None else resolved_alert(one.alert, one, now.tick.ts_ms, because)


def same(durable: NodeAlerts, current: NodeAlerts) -> bool:
    """Whether the state that was written is enough for a replay to give the same. What began to be pending a moment ago
    is not written yet. Counters that rise all the time are written now and then."""
    if durable.maintenance != current.maintenance:
        return False
    if durable.silent != current.silent or durable.generation != current.generation:
        return False
    now_ms, written, memory = current.last_ts_ms, durable.memory, current.memory
    if written is not memory:
        only_uses = written.windows is memory.windows
        young = 0 <= now_ms - durable.last_ts_ms < (YOUNG_USES_MS if only_uses else YOUNG_MS)
        if not young or written.devices is not memory.devices or written.run_id != memory.run_id:
            return False
    if durable.resolved is not current.resolved and durable.resolved != current.resolved:
        return False
    if durable.tracked is current.tracked:
        return True
    known = {identity(one) for one in durable.tracked}
    worth_writing = [
        one
        for one in current.tracked
        if identity(one) in known
        or one.alert is not None
        or one.blind_ms is not None
        or not 0 <= now_ms - one.since_ms < YOUNG_MS
    ]
    return durable.tracked == tuple(worth_writing)


# -- no tick


def quiet(state: NodeAlerts) -> NodeAlerts:
    return _replace(state, silent=True)


def without_ticks(state: NodeAlerts, rules: Rules, *, now_ms: int, removed_ms: int | None) -> Step:
    """What becomes of a node of which no tick came: it has left, or its silence fires.

    It has left if the cluster removed it (``removed_ms``, in log time), or after a day. Alerts that the state has as
    not written go first: the worker that decided them has ended.
    """
    if has_unwritten(state):
        return announce(state)
    if removed_ms is not None and removed_ms + LEAVING_MS >= state.logged_ms:
        after = retire(state, state.last_ts_ms)
    elif now_ms - state.logged_ms >= FORGET_MS:
        after = retire(state, state.last_ts_ms + FORGET_MS)
    else:
        after = silence(state, rules, now_ms - state.logged_ms)
    return Step(after) if after is not state else expire(state, now_ms)


def silence(state: NodeAlerts, rules: Rules, lasted_ms: int) -> NodeAlerts:
    """The state of a node after a silence: the rules for which that is long enough have fired. Every worker finds the
    same. Write it first, then what :func:`announce` makes of it."""
    if is_retired(state) or state.maintenance is not None:
        return state
    for rule in rules.of("node_silent"):
        tracked = Tracked(name=rule.name, since_ms=state.last_ts_ms, keep_ms=rule.keep_firing_ms)
        if lasted_ms >= rule.for_ms and all(identity(one) != identity(tracked) for one in state.tracked):
            starts_ms = min(state.last_ts_ms + rule.for_ms, MAX_TIME_MS)
            described = silent(rule, state, state.memory, rules.wording)
            alert = firing(rule, tracked, state, starts_ms, rule.for_ms / 1000, described)
            state = _replace(quiet(state), tracked=(*state.tracked, _replace(tracked, alert=alert)))
    return state


def retire(state: NodeAlerts, at_ms: int) -> NodeAlerts:
    """The state of a node that is gone: whatever was open is resolved, and what was remembered of it forgotten.
    Write it first, then what :func:`announce` makes of it."""
    if is_retired(state):
        return state
    ended = [
        _replace(one, alert=resolved_alert(one.alert, one, min(at_ms, MAX_TIME_MS), "node_removed"), written_ms=None)
        for one in state.tracked
        if one.alert is not None
    ]
    return _replace(quiet(state), tracked=tuple(ended), memory=Memory())  # that nothing is held any more is announced


def announce(state: NodeAlerts) -> Step:
    """Write the alerts that a state has as not written yet.

    These are what the worker's clock has decided. Ticks are read again after a crash, and decide the same again; a
    silence may not be found again, since the node may have come back.
    """
    if not has_unwritten(state):
        return Step(state)
    tracked: list[Tracked] = []
    writes: list[Write] = []
    if _holds_nothing(state):
        state, writes = with_holdings(state, {})
    for one in state.tracked:
        if one.alert is not None and one.written_ms is None:
            writes.append(written(one.alert, one, state.last_ts_ms))
            one = _replace(one, written_ms=milliseconds(one.alert.starts_at))
        if one.alert is None or one.alert.is_open:
            tracked.append(one)
    return step_of(_replace(state, tracked=tuple(tracked)), writes, state.last_ts_ms)


def has_unwritten(state: NodeAlerts) -> bool:
    """Whether a state has alerts that are to be written once the broker has the state."""
    unwritten = any(one.alert is not None and one.written_ms is None for one in state.tracked)
    return unwritten or (_holds_nothing(state) and bool(state.holdings))


def _holds_nothing(state: NodeAlerts) -> bool:
    return state.silent and state.memory == Memory()


def expire(state: NodeAlerts, now_ms: int) -> Step:
    return step_of(state, [], now_ms)


def is_retired(state: NodeAlerts) -> bool:
    """Whether all that is known of a node is which of its alerts were resolved."""
    return not state.tracked and _holds_nothing(state)


def is_over(state: NodeAlerts) -> bool:
    return is_retired(state) and not state.resolved and not state.holdings
