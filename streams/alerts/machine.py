"""The alert state machine: from what the conditions find in a node's tick to what becomes of its alerts.

In: a node's state and a tick, or that none came. Out: the state after it, and the alerts to write. Pure.
All times are the ticks' own, so that a replay gives the same alerts. What is decided without a tick, by the worker's
clock, is in the state before its alerts are written (:func:`announce`): a replay may not find it again.

A condition, identified by rule, device, pod and the rule's own key, is inactive, pending since a tick, firing, and then
resolved:

- It fires in the tick in which it has held for the rule's ``for``. An event fires at once.
- A pending one ends with the first tick in which it does not hold. Without evidence it neither fires nor
  ends; after a minute without any, or without a tick, it begins again.
- A firing one is resolved in the tick in which it has not held for the rule's ``keep_firing``; without evidence it
  fires on. It is resolved at once when the pod that it is about is gone, or the rule is.
- Two firings of one alert never start at the same time, whatever the node's clock does.
- What is true of several devices for one reason is one alert (:func:`_scope`): then what becomes of the conditions of a
  tick is reported to ``streams/alerts/groups.py``, which makes that alert.
- Of a pod on a device one cause is reported (``CAUSES`` of ``streams/alerts/rules/rule.py``). What comes after it
  waits, and is resolved if it fires.
- While a node is in maintenance, nothing fires, not even its silence, and what fired is resolved.
- An alert that fires for ``critical_after`` becomes critical, which is an update of it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from delivery.values import milliseconds as duration_ms
from streams.alerts.conditions import evaluate
from streams.alerts.conditions.finding import Facts, Finding, sole_pod, uid_and_key
from streams.alerts.memory import Identity, Memory, NodeAlerts, identity
from streams.alerts.rules.rule import CAUSES, WASTE, Kind, Rule, Rules
from streams.alerts.text.describe import Described, describe, in_the_end, silent, status_of
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, closed
from topics.alerts import MAX_TIME_MS, Alert, AlertReport, Limits, Rank, Scope, Tracked, fingerprint, milliseconds, time
from topics.attributed import JOB
from topics.workloads import MAINTENANCE

MAX_GAP_MS = 60_000  # a pending condition of which nothing is known for longer begins again
REPEAT_MS = 24 * 3_600_000  # how often an open alert is written again
REPORT_MS = 3_600_000  # how often what is a part of an alert is reported again, for its figures
DELETE_MS = 7 * 24 * 3_600_000  # how long a resolved alert stays
FORGET_MS = 24 * 3_600_000  # after so long without a tick a node is taken to be removed
LEAVING_MS = 120_000  # for how long a node that was removed from the cluster may send ticks before its machine is off
YOUNG_MS = 10_000  # what was pending for less is not written yet; rising counters are written once in so long
YOUNG_USES_MS = 20_000  # sums of use, which every tick changes, are written once in so long
_TOGETHER: tuple[Kind, ...] = ("missing", "lost", "not_answering")  # of several GPUs of a node, of one cause
_OTHERS: dict[Kind, tuple[Kind, ...]] = {  # the alerts of one workload that know of each other's GPUs
    "crash_loop": ("held_idle", "stalled", "straggler"),
    "held_idle": ("stalled", "straggler"),
    "stalled": ("held_idle",),
}
_OF_RANKS = ("ranks", "limits", "pattern")  # the fields of a report by which GPUs are compared
_replace = msgspec.structs.replace


class LogPosition(NamedTuple):
    """Where in its partition of gpu.attributed a tick stands, and when it was logged."""

    position: int
    logged_ms: int


class Write(NamedTuple):
    """A record of gpu.alerts: a transition, an open alert as it was written before, or the end of one (None); or one of
    gpu.alert-members: a report of transitions, or of open alerts for their figures (renewal)."""

    kind: Literal["alert", "repeat", "deletion", "report", "renewal"]
    fingerprint: str
    alert: Alert | AlertReport | None


class Step(NamedTuple):
    """The state after a step, and what to write, in this order."""

    state: NodeAlerts
    writes: tuple[Write, ...] = ()

    @property
    def alerts(self) -> list[Alert]:
        """The transitions, those of alerts that are parts of another one too."""
        found: list[Alert] = []
        for kind, _, written in self.writes:
            if isinstance(written, AlertReport):
                found += written.alerts if kind == "report" else ()
            elif written is not None and kind == "alert":
                found.append(written)
        return found

    @property
    def reports(self) -> list[AlertReport]:
        return [written for _, _, written in self.writes if isinstance(written, AlertReport)]


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
        after, reports = _with_holdings(after, _holdings(after, rules))
    if after.maintenance is not None:
        findings = []
    reports += _ranks(state, after, tick, rules)
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
            writes.append(_written(alert, later or one, tick.ts_ms, repeat=alert is one.alert))
            writes += _for_others(alert, later or one, tick.ts_ms, rules)
    unchanged = len(tracked) == len(state.tracked) and all(a is b for a, b in zip(tracked, state.tracked, strict=True))
    return _closed(after if unchanged else _replace(after, tracked=tuple(tracked)), writes, tick.ts_ms)


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
    ended = _transition(_resolved(later.alert, one, now.tick.ts_ms, "grouped"))
    return _replace(later, scope=_scope_of_pod(later.alert)), later.alert, [ended]


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
    alert = _alert(finding.rule, one, now.state, now_ms, float(value), described)
    if 0 < finding.rule.critical_ms <= now_ms - one.since_ms:  # it waited for another one
        alert = _replace(alert, severity="critical", labels={**alert.labels, "severity": "critical"})
    if finding.rule.kind in WASTE:
        alert = _replace(alert, held=_devices_of(finding, now.tick))
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
    """Of what an alert is a part: of that of its pod's workload or, if other GPUs of the node went with it, of that of
    the node. None: it is an alert of its own, and stays one."""
    if finding.rule.kind in WASTE:
        return _scope_of_pod(alert)
    if finding.rule.kind not in _TOGETHER:
        return None
    name, devices = finding.rule.name, {finding.device}
    devices |= {t.device for t in now.state.tracked if t.name == name and t.alert is not None and t.scope is None}
    return "node" if any(f.holds and f.rule.name == name and f.device not in devices for f in now.findings) else None


def _scope_of_pod(alert: Alert) -> Scope:
    return "workload" if {"k8s_workload_name", "job_id"} & alert.labels.keys() else "pod"


def _holdings(state: NodeAlerts, rules: Rules) -> dict[str, int]:
    """How many devices of the node each workload holds, by the alert of several GPUs that it would have."""
    held = Counter(
        ("", "", "", pod.pod)
        if pod.workload_kind == JOB
        else (pod.namespace, pod.workload_kind or "", pod.workload_name, "")
        for seen in state.memory.devices.values()
        for pod in seen.pods
        if pod.workload_name and not pod.observed and not evaluate.is_gone(seen, state.last_ts_ms)
    )
    return {
        fingerprint(rule.name, state.cluster, "", key="/".join(("workload", *whose))): count
        for rule in rules.rules
        if rule.kind in WASTE and (rule.enabled or rule.overrides)
        for whose, count in held.items()
    }


def _with_holdings(state: NodeAlerts, holdings: dict[str, int]) -> tuple[NodeAlerts, list[Write]]:
    """The state with what workloads hold on the node now, and the reports of what is another number than before."""
    before = state.holdings or {}
    changed = {group: holdings.get(group, 0) for group in before | holdings}
    reports = [
        AlertReport(
            schema=1, group=group, scope="workload", cluster=state.cluster, node=state.node, ts_ms=state.last_ts_ms,
            held=held,
        )
        for group, held in changed.items()
        if held != before.get(group, 0)
    ]  # fmt: skip
    return _replace(state, holdings=holdings), [Write("report", report.group, report) for report in reports]


def _ranks(before: NodeAlerts, after: NodeAlerts, tick: Tick, rules: Rules) -> list[Write]:
    """The reports of what the GPUs of each workload did in the step that a tick has ended, to compare them."""
    if after.maintenance is not None or tick.ts_ms // STEP_MS == before.last_ts_ms // STEP_MS:
        return []
    ranks: dict[str, list[Rank]] = {}
    reports: dict[str, AlertReport] = {}
    for rule in rules.of("straggler"):
        for device in tick.devices:
            uses = (one.memory.uses.get(device.uuid, ()) for one in (before, after))
            holder, figures = sole_pod(device.holders) if device.holders else None, closed(*uses)
            if (
                figures is None
                or holder is None
                or holder.observed
                or device.mig is not None
                or evaluate.is_silenced(rules, holder, after.memory.devices[device.uuid], tick)
            ):
                continue
            ruled = rules.in_force(rule, holder)
            if ruled is None:
                continue
            uid, key = uid_and_key(holder)
            finding = Finding(ruled, device.uuid, uid, key, facts=Facts(device, None, device.holders))
            one = Tracked(name=rule.name, device=device.uuid, pod_uid=uid, key=key, since_ms=tick.ts_ms)
            described = describe(finding, tick, tick.ts_ms, rules.wording)
            pattern = _alert(ruled, one, after, tick.ts_ms, 0.0, described)
            scope = _scope_of_pod(pattern)
            group = _group(pattern, scope)
            ranks.setdefault(group, []).append(Rank(device.uuid, device.index, holder.pod, figures, device.model))
            limits = Limits(ruled.for_ms, ruled.keep_firing_ms, ruled.peers, ruled.deviations)
            reports[group] = AlertReport(
                schema=1, group=group, scope=scope, cluster=after.cluster, node=after.node, ts_ms=tick.ts_ms,
                pattern=pattern, limits=limits,
            )  # fmt: skip
    return [Write("report", key, _replace(one, ranks=tuple(ranks[key]))) for key, one in reports.items()]


def _devices_of(finding: Finding, tick: Tick) -> int:
    """How many devices of the node the pod of a finding was given."""
    pod = (finding.pod_uid, finding.key)
    held = [device for device in tick.devices for holder in device.holders if uid_and_key(holder) == pod]
    return len({device.uuid for device in held})


def _group(alert: Alert, scope: Scope) -> str:
    """The fingerprint of the alert that another one is a part of."""
    whose = {
        "workload": ("k8s_namespace_name", "k8s_workload_kind", "k8s_workload_name", "job_id"),
        "pod": ("k8s_node_name", "k8s_namespace_name", "k8s_pod_name", "k8s_pod_uid"),
        "node": ("k8s_node_name",),
    }[scope]
    key = "/".join((scope, *[alert.labels.get(name, "") for name in whose]))
    return fingerprint(alert.name, alert.cluster, "", key=key)


def _written(alert: Alert, one: Tracked, now_ms: int, *, repeat: bool = False) -> Write:
    """The record of what has become of an alert: its own or, if it is a part of another, a report. That one has how
    long the condition has held until now, and when the device last worked."""
    if one.scope is None:
        return Write("repeat" if repeat else "alert", alert.fingerprint, alert)
    if alert.is_open and one.scope != "node":
        since, worked = (f"{time(ms):%Y-%m-%dT%H:%M:%SZ}" for ms in (one.since_ms, one.again_ms or one.since_ms))
        active = {"last_active": worked} if one.again_ms or "last_active" in alert.annotations else {}
        alert = _replace(alert, annotations={**alert.annotations, **active, "since": since})
    if alert.is_open and "gpu_share" in alert.annotations:
        until_ms = now_ms if one.ceased_ms is None else one.ceased_ms
        window_ms = duration_ms(alert.annotations["window"]) if "window" in alert.annotations else 0
        alert = _replace(alert, value=(max(until_ms - one.since_ms - one.paused_ms, 0) + window_ms) / 1000)
    group = _group(alert, one.scope)
    report = AlertReport(
        schema=1, group=group, scope=one.scope, cluster=alert.cluster, node=alert.node, ts_ms=now_ms, alerts=(alert,)
    )
    return Write("renewal" if repeat else "report", group, report)


def _for_others(alert: Alert, one: Tracked, now_ms: int, rules: Rules) -> list[Write]:
    """The reports of a GPU to the alerts of other kinds that go by it or name it. The end of one by a rule that is gone
    is reported to all of them."""
    if one.scope not in ("workload", "pod"):
        return []
    others = _OTHERS.get(rules.by_name[alert.name].kind, ()) if alert.name in rules.by_name else _OTHERS["crash_loop"]
    reports = [
        AlertReport(
            schema=1, group=_group(_replace(alert, name=rule.name), one.scope), scope=one.scope,
            cluster=alert.cluster, node=alert.node, ts_ms=now_ms, others=(alert,),
        )
        for other in others
        for rule in rules.of(other)
    ]  # fmt: skip
    return [Write("report", report.group, report) for report in reports]


def _ended(one: Tracked, now: _Now, because: str) -> tuple[None, Alert | None]:
    return None, None if one.alert is None else _resolved(one.alert, one, now.tick.ts_ms, because)


def same(durable: NodeAlerts, current: NodeAlerts) -> bool:
    """Whether the state that was written says all that is worth writing, so that a replay gives the same. What began to
    be pending a moment ago is not written yet. Counters that rise all the time are written now and then."""
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
    """The state of a node that had no tick for so long: the rules for which that is long enough have fired in it.
    It is the same whoever finds it. Write it first, then what :func:`announce` makes of it."""
    if is_retired(state) or state.maintenance is not None:
        return state
    for rule in rules.of("node_silent"):
        tracked = Tracked(name=rule.name, since_ms=state.last_ts_ms, keep_ms=rule.keep_firing_ms)
        if lasted_ms >= rule.for_ms and all(identity(one) != identity(tracked) for one in state.tracked):
            starts_ms = min(state.last_ts_ms + rule.for_ms, MAX_TIME_MS)
            described = silent(rule, state, state.memory, rules.wording)
            alert = _alert(rule, tracked, state, starts_ms, rule.for_ms / 1000, described)
            state = _replace(quiet(state), tracked=(*state.tracked, _replace(tracked, alert=alert)))
    return state


def retire(state: NodeAlerts, at_ms: int) -> NodeAlerts:
    """The state of a node that is gone: whatever was open is resolved, and what was remembered of it forgotten.
    Write it first, then what :func:`announce` makes of it."""
    if is_retired(state):
        return state
    ended = [
        _replace(one, alert=_resolved(one.alert, one, min(at_ms, MAX_TIME_MS), "node_removed"), written_ms=None)
        for one in state.tracked
        if one.alert is not None
    ]
    return _replace(quiet(state), tracked=tuple(ended), memory=Memory())  # what was held is not, which is announced


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
        state, writes = _with_holdings(state, {})
    for one in state.tracked:
        if one.alert is not None and one.written_ms is None:
            writes.append(_written(one.alert, one, state.last_ts_ms))
            one = _replace(one, written_ms=milliseconds(one.alert.starts_at))
        if one.alert is None or one.alert.is_open:
            tracked.append(one)
    return _closed(_replace(state, tracked=tuple(tracked)), writes, state.last_ts_ms)


def has_unwritten(state: NodeAlerts) -> bool:
    """Whether a state has alerts that are to be written once the broker has the state."""
    unwritten = any(one.alert is not None and one.written_ms is None for one in state.tracked)
    return unwritten or (_holds_nothing(state) and bool(state.holdings))


def _holds_nothing(state: NodeAlerts) -> bool:
    return state.silent and state.memory == Memory()


def expire(state: NodeAlerts, now_ms: int) -> Step:
    return _closed(state, [], now_ms)


def is_retired(state: NodeAlerts) -> bool:
    """Whether all that is known of a node is which of its alerts were resolved."""
    return not state.tracked and _holds_nothing(state)


def is_over(state: NodeAlerts) -> bool:
    return is_retired(state) and not state.resolved and not state.holdings


# -- alerts


def _alert(rule: Rule, one: Tracked, state: NodeAlerts, now_ms: int, value: float, described: Described) -> Alert:
    """A firing alert: it starts now, and after the last of its kind ended."""
    key = fingerprint(rule.name, state.cluster, state.node, one.device, one.pod_uid, one.key)
    labels, annotations = described
    return Alert(
        schema=1,
        name=rule.name,
        state="firing",
        fingerprint=key,
        cluster=state.cluster,
        node=state.node,
        starts_at=time(max(now_ms, state.resolved.get(key, -1) + 1)),
        severity=rule.severity,
        value=value,
        labels=labels,
        annotations=annotations,
    )


def _resolved(alert: Alert, one: Tracked, at_ms: int, because: str) -> Alert:
    ends_at = max(time(at_ms), alert.starts_at)
    resolved = _replace(alert, state="resolved", ends_at=ends_at, resolved_because=because)
    held_until_ms = at_ms if one.ceased_ms is None else one.ceased_ms
    return in_the_end(resolved, held_until_ms - one.since_ms - one.paused_ms)


def _transition(alert: Alert) -> Write:
    return Write("alert", alert.fingerprint, alert)


def _closed(state: NodeAlerts, writes: list[Write], now_ms: int) -> Step:
    """The step's end: what is resolved is remembered until it is deleted, or fires again."""
    resolved = dict(state.resolved)
    reports: dict[tuple[str, bool], AlertReport] = {}
    alone: list[Write] = []
    for write in writes:
        one = write.alert
        alerts: tuple[Alert, ...] = () if one is None else (one,) if isinstance(one, Alert) else one.alerts
        for alert in alerts:
            resolved.pop(alert.fingerprint, None)
            if alert.ends_at is not None:
                resolved[alert.fingerprint] = milliseconds(alert.ends_at)
        if isinstance(one, AlertReport):
            phase = 2 * state.silent + (write.kind == "renewal")
            one = _replace(one, position=state.position, logged_ms=state.logged_ms, phase=phase)
            known = reports.get(place := (one.group, write.kind == "renewal"))
            held = known.held if known is not None and one.held is None else one.held
            alerts = one.alerts if known is None else (*known.alerts, *one.alerts)
            others = one.others if known is None else (*known.others, *one.others)
            compared = one if known is None or one.ranks else known
            ranks = {field: getattr(compared, field) for field in _OF_RANKS}
            reports[place] = _replace(one, held=held, alerts=alerts, others=others, **ranks)
        else:
            alone.append(write)
    by_phase = sorted(reports.items(), key=lambda item: item[1].phase)
    reported = [Write("renewal" if again else "report", group, one) for (group, again), one in by_phase]
    writes = [*alone, *reported]
    for key in [key for key, at_ms in resolved.items() if now_ms - at_ms >= DELETE_MS]:
        del resolved[key]
        writes.append(Write("deletion", key, None))
    return Step(state if resolved == state.resolved else _replace(state, resolved=resolved), tuple(writes))
