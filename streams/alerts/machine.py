"""The alert state machine: turns the findings of a node's tick into alerts that fire, are updated or are resolved.

In: a node's state, and a tick or the absence of one. Out: the next state, and the records to write. Pure.
All times are those of the ticks, so that a replay gives the same alerts. A few decisions are made without a tick, by
the worker's clock, and a replay may not make them again. They are written to the state first, and their alerts after
that (:func:`announce`).

A condition is identified by rule, device, pod and the rule's own key. It is inactive, then pending, then firing, then
resolved:

- It fires in the tick in which it has held for the rule's ``for``. An event fires at once.
- A pending condition ends with the first tick in which it does not hold. Without evidence it neither fires nor ends.
  After a minute without evidence or without a tick, its ``for`` starts again.
- A firing condition is resolved in the tick in which it has not held for the rule's ``keep_firing_for``. Without
  evidence it keeps firing. It is resolved at once if its pod has ended or its rule was removed.
- Two firings of one alert never start at the same time, even if the node's clock is set back.
- Conditions of several devices with one cause are one alert. The conditions of single devices are then reported to
  ``streams/alerts/groups.py``, which makes that alert.
- For a pod on a device only one cause is reported: the first in ``CAUSES`` of ``streams/alerts/rules/rule.py``. The
  later ones wait, or are resolved if they fire.
- While a node is in maintenance, nothing fires, not even its silence, and firing alerts are resolved.
- An alert that has held for ``critical_after`` becomes critical, which is an update of it.
"""

import operator
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from streams.alerts.conditions import evaluate
from streams.alerts.conditions.finding import Finding, uid_and_key
from streams.alerts.memory import Identity, Memory, NodeAlerts, identity, with_known_uids
from streams.alerts.reports import (
    Step,
    Write,
    alert_write,
    finish_step,
    firing_alert,
    rank_reports,
    report_holdings,
    reports_to_other_rules,
    resolved_alert,
    scope_of_pod,
    with_holdings,
)
from streams.alerts.rules.rule import CAUSES, OF_NODES, WASTE, Rules
from streams.alerts.text.describe import api_status, describe, describe_silence
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS
from topics.alerts import Alert, Tracked, fingerprint
from topics.samples import silent_after_ms
from topics.times import epoch_ms
from topics.workloads import MAINTENANCE

MAX_GAP_MS = 60_000  # after longer without evidence the ``for`` of a pending condition starts again
REPEAT_MS = 24 * 3_600_000  # how often an open alert is written again
REPORT_MS = 3_600_000  # how often a part of a group is reported again, to update the group's figures
FORGET_MS = 24 * 3_600_000  # after so long without a tick a node counts as removed
MOST_POD_EVENTS = 1000
"""While a node has so many conditions, nothing fires that happened to a single pod, such as an error of its program:
pods may come and go all the time, and the state of a node has to fit in a record."""

LEAVING_MS = 120_000  # for so long a node that was removed from the cluster may still send ticks
_replace = msgspec.structs.replace


class LogPosition(NamedTuple):
    """The offset of a tick in its partition of gpu.attributed, and the tick's log time."""

    position: int
    logged_ms: int


PodOnDevice = tuple[str, str, str]  # the device's UUID, and the uid and the key of a pod on it (one of them is empty)


class _Context(NamedTuple):
    """A tick, and the state before it.

    ``firing_priority`` has for each pod on a device the priority of its first cause that fires (0 is the first).
    ``pending_causes`` has the priorities of its causes that are pending, and when each would fire.
    """

    tick: Tick
    rules: Rules
    state: NodeAlerts
    findings: list[Finding]
    memory: Memory
    firing_priority: dict[PodOnDevice, int]
    pending_causes: dict[PodOnDevice, list[tuple[int, int]]]


# -- a tick


def initial_state(tick: Tick, log_position: LogPosition) -> NodeAlerts:
    """The state of a node before its first tick."""
    empty = NodeAlerts(schema=1, cluster=tick.cluster, node=tick.node, offset=0, position=0, last_ts_ms=0, logged_ms=0)
    return after_tick(empty, tick, log_position, empty.memory)


def after_tick(state: NodeAlerts, tick: Tick, log_position: LogPosition, memory: Memory) -> NodeAlerts:
    """The state with a new last tick and a new memory; its alerts are those of before."""
    return _replace(
        state,
        offset=tick.offset,
        run_id=tick.run_id,
        seq=tick.seq,
        newest_ts_ms=max(state.newest_ts_ms, tick.ts_ms),
        position=log_position.position,
        last_ts_ms=tick.ts_ms,
        logged_ms=log_position.logged_ms,
        interval_ms=tick.interval_ms,
        silent=False,
        maintenance=tick.node_labels.get(MAINTENANCE),
        memory=memory,
    )


def step(state: NodeAlerts, tick: Tick, log_position: LogPosition, rules: Rules) -> Step:
    """The state after a tick, and what to write: alerts of the node, and reports to alerts of several GPUs."""
    state, announced = announce(state)
    tick = with_known_uids(tick, state.memory)
    findings, memory = evaluate.evaluate(rules, tick, state.memory)
    after = after_tick(state, tick, log_position, memory)
    step_ends = tick.ts_ms // STEP_MS != state.last_ts_ms // STEP_MS  # the rules may be new: report it regularly
    some_missing = len(memory.devices) != len(tick.devices)  # a missing device stops being held after some time
    may_hold_others = state.holdings is None or memory.devices is not state.memory.devices or some_missing or step_ends
    if after.maintenance is not None:
        findings = []
    reports = rank_reports(state, after, tick, rules)
    if not (findings or state.tracked or state.resolved or reports or may_hold_others):
        return Step(after, announced)
    context = _Context(tick, rules, state, findings, memory, {}, {})
    for condition in state.tracked:
        if condition.alert is not None and condition.name in rules.causes:
            _note_firing_cause(condition, context)
    finding_by_identity: dict[Identity, Finding] = {(f.rule.name, f.device, f.pod_uid, f.key): f for f in findings}
    tracked_identities = {identity(condition) for condition in state.tracked}
    new_conditions = [
        Tracked(name=name, device=device, pod_uid=uid, key=key, since_ms=_begins_ms(f, state, tick), event=f.event)
        for (name, device, uid, key), f in finding_by_identity.items()
        if f.holds and (name, device, uid, key) not in tracked_identities
        if len(state.tracked) < MOST_POD_EVENTS or not (uid and f.event)
    ]
    conditions: Iterable[Tracked] = state.tracked
    if new_conditions:  # the first cause is judged first: the others may wait for it
        conditions = sorted((*conditions, *new_conditions), key=lambda condition: rules.causes.get(condition.name, -1))
    tracked: list[Tracked] = []
    writes = [*announced, *reports]
    for condition in conditions:
        updated, alert, earlier_writes = _advance(condition, finding_by_identity.get(identity(condition)), context)
        writes += earlier_writes
        if updated is not None:
            tracked.append(updated)
        if alert is not None:
            writes.append(alert_write(alert, updated or condition, tick.ts_ms, repeat=alert is condition.alert))
            writes += reports_to_other_rules(alert, updated or condition, tick.ts_ms, rules)
    after, holding_reports = with_holdings(after, rules, writes, may_hold_others=may_hold_others)
    writes += holding_reports
    unchanged = len(tracked) == len(state.tracked) and all(map(operator.is_, tracked, state.tracked))
    return finish_step(after if unchanged else _replace(after, tracked=tuple(tracked)), writes, tick.ts_ms)


def _begins_ms(finding: Finding, state: NodeAlerts, tick: Tick) -> int:
    """Since when a condition holds that did not before: since it can, if no tick was between, else since the tick."""
    return finding.since_ms if state.last_ts_ms < finding.since_ms else tick.ts_ms


def _advance(
    condition: Tracked, finding: Finding | None, context: _Context
) -> tuple[Tracked | None, Alert | None, list[Write]]:
    """The condition after the tick (None: it ended), its alert if that is to be written, and the writes before it."""
    rule = context.rules.by_name.get(condition.name)
    if MAINTENANCE in context.tick.node_labels:
        return *_resolve(condition, context, "maintenance"), []
    updated, alert = (_pending if condition.alert is None else _firing)(condition, finding, context)
    if updated is None or updated.alert is None or updated.scope is not None or rule is None or rule.kind not in WASTE:
        return updated, alert, []
    # an earlier version wrote it as an alert of its own: resolve that one, and report it to the group
    previous = resolved_alert(updated.alert, condition, context.tick.ts_ms, "grouped")
    return (
        _replace(updated, scope=scope_of_pod(updated.alert)),
        updated.alert,
        [Write("alert", previous.fingerprint, previous)],
    )


def _pending(condition: Tracked, finding: Finding | None, context: _Context) -> tuple[Tracked | None, Alert | None]:
    """A pending condition after the tick: it stays pending, starts again after a gap, ends, or fires.
    It fires if it is an event or has held for the rule's ``for``, and no other cause is first."""
    now_ms, before_ms, holds = context.tick.ts_ms, context.state.last_ts_ms, _holds(condition, finding, context)
    blind_ms = before_ms if condition.blind_ms is None else condition.blind_ms
    in_doubt = holds is None or condition.blind_ms is not None
    gap_ms = silent_after_ms(context.tick.interval_ms, MAX_GAP_MS)
    restarts = not 0 <= now_ms - before_ms <= gap_ms or (in_doubt and now_ms - blind_ms > gap_ms)
    if holds is None and not restarts:
        return (condition if condition.blind_ms is not None else _replace(condition, blind_ms=blind_ms)), None
    if finding is None or not holds:
        return None, None
    since_ms = max(now_ms if restarts else condition.since_ms, finding.since_ms)
    if since_ms != condition.since_ms or condition.blind_ms is not None:
        condition = _replace(condition, since_ms=since_ms, blind_ms=None)
    is_cause = condition.name in context.rules.causes
    if not finding.event and now_ms - since_ms < finding.rule.for_ms:
        if is_cause:
            due = context.rules.causes[condition.name], since_ms + finding.rule.for_ms
            context.pending_causes.setdefault(_pod_on_device(condition), []).append(due)
        return condition, None
    if is_cause and _waits_for_other_cause(condition, finding.rule.keep_firing_ms, context):
        return condition, None
    return _fire(condition, finding, context)


def _firing(condition: Tracked, finding: Finding | None, context: _Context) -> tuple[Tracked | None, Alert | None]:
    """A firing condition after the tick: it keeps firing, or is resolved. Its alert is written if it was updated, and
    again at an interval; ``written_ms`` is None after an update."""
    now_ms, holds = context.tick.ts_ms, _holds(condition, finding, context)
    own_priority = context.rules.causes.get(condition.name, -1)
    if context.firing_priority.get(_pod_on_device(condition), len(CAUSES)) < own_priority:
        return _resolve(condition, context, "superseded")
    if finding is not None and holds:
        condition, status = _still_holding(condition, finding, context), api_status(finding, context.tick)
        alert = condition.alert
        if alert is not None and not status.items() <= alert.annotations.items():  # the API server reports more
            alert = _replace(alert, annotations={**alert.annotations, **status}, revision=alert.revision + 1)
            condition = _replace(condition, alert=alert, written_ms=None)
    elif holds is not None:
        ceased_ms = now_ms if condition.ceased_ms is None else min(condition.ceased_ms, now_ms)
        reason = evaluate.resolve_reason(context.rules, context.tick, condition, context.memory)
        # A condition that can't hold again ends at once. An event that happened to a pod outlives the pod.
        pod_ended = reason == "pod_ended" and not condition.event and context.tick.attribution == "exact"
        if pod_ended or reason in ("rule_removed", "policy") or now_ms - ceased_ms >= condition.keep_ms:
            return _resolve(condition, context, reason)
        if condition.ceased_ms != ceased_ms:
            condition = _replace(condition, ceased_ms=ceased_ms)
    critical_ms = finding.rule.critical_ms if finding is not None and holds else 0
    alert, escalates = condition.alert, bool(critical_ms) and now_ms - condition.since_ms >= critical_ms
    if alert is not None and alert.severity != "critical" and escalates:
        alert = _replace(_critical(alert), revision=alert.revision + 1)
        condition = _replace(condition, alert=alert, written_ms=None)
    every_ms = REPEAT_MS if condition.scope is None else REPORT_MS
    if condition.written_ms is not None and 0 <= now_ms - condition.written_ms < every_ms:
        return condition, None
    if condition.written_ms is not None and condition.scope in ("workload", "pod") and not holds:
        return condition, None  # only a tick that shows it confirms a part of an alert of several GPUs
    return _replace(condition, written_ms=now_ms), condition.alert


def _holds(condition: Tracked, finding: Finding | None, context: _Context) -> bool | None:
    """Whether a condition holds in the tick; None if the tick has no evidence."""
    if finding is not None:
        return finding.holds
    return False if evaluate.is_known_not_to_hold(context.rules, context.tick, condition, context.memory) else None


def _fire(condition: Tracked, finding: Finding, context: _Context) -> tuple[Tracked, Alert]:
    """The condition, firing, and its alert. That is a part of a group if it is about how a pod uses its GPUs, or if
    other GPUs of the node have the same fault now; else it is an alert of its own, as long as it fires."""
    now_ms, rule, scope = context.tick.ts_ms, finding.rule, None
    described = describe(finding, context.tick, condition.since_ms, context.rules.wording)
    value = finding.value if finding.value is not None else (now_ms - condition.since_ms) / 1000
    alert = firing_alert(rule, condition, context.state, now_ms, float(value), described)
    if 0 < rule.critical_ms <= now_ms - condition.since_ms:  # it waited for another cause
        alert = _critical(alert)
    if rule.kind in WASTE:
        scope = scope_of_pod(alert)
        pods = [(device.uuid, uid_and_key(holder)) for device in context.tick.devices for holder in device.holders]
        alert = _replace(alert, held=len({uuid for uuid, pod in pods if pod == (finding.pod_uid, finding.key)}))
    elif rule.kind in OF_NODES:
        firing_devices = {
            tracked.device
            for tracked in context.state.tracked
            if tracked.name == rule.name and tracked.alert is not None and tracked.scope is None
        }
        holding_devices = {other.device for other in context.findings if other.holds and other.rule.name == rule.name}
        scope = "node" if holding_devices - firing_devices - {finding.device} else None
    if condition.name in context.rules.causes:
        _note_firing_cause(condition, context)
    return _still_holding(_replace(condition, alert=alert, written_ms=now_ms, scope=scope), finding, context), alert


def _critical(alert: Alert) -> Alert:
    return _replace(alert, severity="critical", labels={**alert.labels, "severity": "critical"})


def _pod_on_device(condition: Tracked) -> PodOnDevice:
    return condition.device, condition.pod_uid, condition.key


def _note_firing_cause(condition: Tracked, context: _Context) -> None:
    """Note that a cause fires for its pod on its device."""
    key, priority = _pod_on_device(condition), context.rules.causes[condition.name]
    context.firing_priority[key] = min(priority, context.firing_priority.get(key, len(CAUSES)))


def _waits_for_other_cause(condition: Tracked, keep_ms: int, context: _Context) -> bool:
    """Whether an earlier cause fires for the same pod and device, will fire within ``keep_ms``, or was resolved less
    than ``keep_ms`` ago."""
    causes, state, now_ms = context.rules.causes, context.state, context.tick.ts_ms
    key, own_priority = _pod_on_device(condition), causes[condition.name]
    if context.firing_priority.get(key, len(CAUSES)) < own_priority:
        return True
    pending = context.pending_causes.get(key, ())
    if any(priority < own_priority and due_ms - now_ms < keep_ms for priority, due_ms in pending):
        return True
    earlier_rules = [name for name, priority in causes.items() if priority < own_priority]
    fingerprints = [fingerprint(name, state.cluster, state.node, *key) for name in earlier_rules]
    ends_ms = [state.resolved[earlier] for earlier in fingerprints if earlier in state.resolved]
    return any(0 <= now_ms - end_ms < keep_ms for end_ms in ends_ms)


def _still_holding(condition: Tracked, finding: Finding, context: _Context) -> Tracked:
    """A firing condition that holds in this tick. An event ceases in its own tick."""
    now_ms, keep_ms = context.tick.ts_ms, finding.rule.keep_firing_ms
    paused_ms, again_ms = condition.paused_ms, condition.again_ms
    ceased_ms = now_ms if finding.event else None
    if condition.ceased_ms == ceased_ms and condition.keep_ms == keep_ms:
        return condition
    if condition.ceased_ms is not None and not finding.event:
        paused_ms, again_ms = paused_ms + max(now_ms - condition.ceased_ms, 0), now_ms
    return _replace(condition, ceased_ms=ceased_ms, keep_ms=keep_ms, paused_ms=paused_ms, again_ms=again_ms)


def _resolve(condition: Tracked, context: _Context, reason: str) -> tuple[None, Alert | None]:
    return None, None if condition.alert is None else resolved_alert(
        condition.alert, condition, context.tick.ts_ms, reason
    )


# -- without a tick


def step_without_tick(state: NodeAlerts, rules: Rules, *, now_ms: int, removed_ms: int | None) -> Step:
    """The state of a node of which no tick came: it has left, or its silence fires, or old alerts are deleted.

    It has left if the cluster removed it (at ``removed_ms``, in log time), or after a day without ticks; that is a day
    later if a rule about silent nodes waits so long. If it has not, alerts of removed rules are resolved.
    Alerts in the state that are not written yet are written first: the worker that decided them has ended.
    """
    if has_unwritten(state):
        return announce(state)
    longest_ms = max([rule.for_ms for rule in rules.of("node_silent")], default=0)
    forget_ms = FORGET_MS if longest_ms < FORGET_MS else longest_ms + FORGET_MS
    if removed_ms is not None and removed_ms + LEAVING_MS >= state.logged_ms:
        after = retire(state, state.last_ts_ms)
    elif now_ms - state.logged_ms >= forget_ms:
        after = retire(state, state.last_ts_ms + forget_ms)
    else:  # a part of a workload's alert waits for a tick, by which the workload's other alerts get its end, too
        tracked = tuple(
            _ended(condition, now_ms, "rule_removed")
            if condition.name not in rules.by_name and condition.alert and condition.scope not in ("workload", "pod")
            else condition
            for condition in state.tracked
        )
        unchanged = all(map(operator.is_, tracked, state.tracked))
        after = state if unchanged else _replace(state, silent=True, tracked=tracked)
        after = fire_node_silent(after, rules, now_ms - state.logged_ms)
    if after is not state:
        return Step(after)
    resolved = {key: min(ended_ms, now_ms) for key, ended_ms in state.resolved.items()}  # its clock may be ahead
    return finish_step(state if resolved == state.resolved else _replace(state, resolved=resolved), [], now_ms)


def fire_node_silent(state: NodeAlerts, rules: Rules, lasted_ms: int) -> NodeAlerts:
    """The state in which the rules about silent nodes fire, if the silence has lasted for their ``for``, and for three
    of the node's intervals. They are critical after their ``critical_after``. Every worker makes the same state. Write
    it before what :func:`announce` makes of it."""
    if is_retired(state) or state.maintenance is not None:
        return state
    for rule in rules.of("node_silent"):
        for_ms = silent_after_ms(state.interval_ms, rule.for_ms)
        if lasted_ms < for_ms:
            continue
        new = Tracked(name=rule.name, since_ms=state.last_ts_ms, keep_ms=rule.keep_firing_ms)
        before = next((condition for condition in state.tracked if identity(condition) == identity(new)), new)
        alert = before.alert
        if alert is None:
            described = describe_silence(rule, state, state.memory, rules.wording)
            alert = firing_alert(rule, new, state, state.last_ts_ms + for_ms, for_ms / 1000, described)
        if alert.severity != "critical" and 0 < rule.critical_ms <= lasted_ms:
            alert = _replace(_critical(alert), revision=alert.revision + (before.alert is not None))
        if alert is not before.alert or before.ceased_ms is not None:
            written_ms = before.written_ms if alert is before.alert else None
            after = _replace(before, alert=alert, written_ms=written_ms, ceased_ms=None)
            others = [condition for condition in state.tracked if condition is not before]
            state = _replace(state, silent=True, tracked=(*others, after))
    return state


def retire(state: NodeAlerts, at_ms: int) -> NodeAlerts:
    """The state of a node that was removed: its alerts are resolved, and its memory is empty.
    Write it before what :func:`announce` makes of it, which also reports that workloads hold nothing there."""
    if is_retired(state):
        return state
    ended = [_ended(condition, at_ms, "node_removed") for condition in state.tracked if condition.alert is not None]
    return _replace(state, silent=True, tracked=tuple(ended), memory=Memory())


def _ended(condition: Tracked, at_ms: int, reason: str) -> Tracked:
    """The condition with its alert resolved, and still to be written."""
    alert = None if condition.alert is None else resolved_alert(condition.alert, condition, at_ms, reason)
    return _replace(condition, alert=alert, written_ms=None)


def announce(state: NodeAlerts) -> Step:
    """Write the alerts in the state that are not written yet.

    The worker's clock has decided them. After a crash ticks are read again and give the same alerts; a silence may not
    be found again, because the node may send ticks by then.
    """
    if not has_unwritten(state):
        return Step(state)
    tracked: list[Tracked] = []
    writes: list[Write] = []
    if _has_no_memory(state):
        state, writes = report_holdings(state, {})
    for condition in state.tracked:
        if condition.alert is not None and condition.written_ms is None:
            writes.append(alert_write(condition.alert, condition, state.last_ts_ms))
            condition = _replace(condition, written_ms=epoch_ms(condition.alert.starts_at))
        if condition.alert is None or condition.alert.is_open:
            tracked.append(condition)
    return finish_step(_replace(state, tracked=tuple(tracked)), writes, state.last_ts_ms)


def has_unwritten(state: NodeAlerts) -> bool:
    """Whether the state has alerts that are written as soon as the broker has acknowledged the state."""
    unwritten = any(condition.alert is not None and condition.written_ms is None for condition in state.tracked)
    return unwritten or (_has_no_memory(state) and bool(state.holdings))


def _has_no_memory(state: NodeAlerts) -> bool:
    return state.silent and state.memory == Memory()


def is_retired(state: NodeAlerts) -> bool:
    """Whether a state has nothing but resolved alerts that are not deleted yet."""
    return not state.tracked and _has_no_memory(state)


def is_over(state: NodeAlerts) -> bool:
    """Whether a state has nothing at all, so that it can be deleted."""
    return is_retired(state) and not state.resolved and not state.holdings
