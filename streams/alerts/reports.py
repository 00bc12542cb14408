"""What a node writes: its own alerts, and its reports to the alerts of several GPUs. Pure.

In: the conditions of a node, and what has become of them. Out: records of gpu.alerts and gpu.alert-members. To the
latter go what is a part of an alert of several GPUs, how many GPUs each workload holds, and what its GPUs did in the
step that has ended, by which they are compared.
"""

from collections import Counter
from typing import Literal, NamedTuple

import msgspec

from delivery.values import milliseconds as duration_ms
from streams.alerts.conditions import evaluate
from streams.alerts.conditions.finding import Facts, Finding, is_silenced, sole_pod, uid_and_key
from streams.alerts.memory import NodeAlerts
from streams.alerts.rules.rule import WASTE, Kind, Rule, Rules
from streams.alerts.text.describe import Described, describe, in_the_end
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, closed
from topics.alerts import Alert, AlertReport, Limits, Rank, Scope, Tracked, fingerprint, milliseconds, time
from topics.attributed import JOB

DELETE_MS = 7 * 24 * 3_600_000  # how long a resolved alert stays
_OTHERS: dict[Kind, tuple[Kind, ...]] = {  # the alerts of one workload that know of each other's GPUs
    "crash_loop": ("held_idle", "stalled", "straggler"),
    "held_idle": ("stalled", "straggler"),
    "stalled": ("held_idle",),
}
_OF_RANKS = ("ranks", "limits", "pattern")  # the fields of a report by which GPUs are compared
_replace = msgspec.structs.replace


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


# -- alerts


def firing(rule: Rule, one: Tracked, state: NodeAlerts, now_ms: int, value: float, described: Described) -> Alert:
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


def resolved_alert(alert: Alert, one: Tracked, at_ms: int, because: str) -> Alert:
    ends_at = max(time(at_ms), alert.starts_at)
    resolved = _replace(alert, state="resolved", ends_at=ends_at, resolved_because=because)
    held_until_ms = at_ms if one.ceased_ms is None else one.ceased_ms
    return in_the_end(resolved, held_until_ms - one.since_ms - one.paused_ms)


def step_of(state: NodeAlerts, writes: list[Write], now_ms: int) -> Step:
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


# -- reports to the alerts of several GPUs


def scope_of_pod(alert: Alert) -> Scope:
    return "workload" if {"k8s_workload_name", "job_id"} & alert.labels.keys() else "pod"


def group_of(alert: Alert, scope: Scope) -> str:
    """The fingerprint of the alert that another one is a part of."""
    whose = {
        "workload": ("k8s_namespace_name", "k8s_workload_kind", "k8s_workload_name", "job_id"),
        "pod": ("k8s_node_name", "k8s_namespace_name", "k8s_pod_name", "k8s_pod_uid"),
        "node": ("k8s_node_name",),
    }[scope]
    key = "/".join((scope, *[alert.labels.get(name, "") for name in whose]))
    return fingerprint(alert.name, alert.cluster, "", key=key)


def written(alert: Alert, one: Tracked, now_ms: int, *, repeat: bool = False) -> Write:
    """The record of an alert that has changed. If it is a part of another alert, that is a report, which also has how
    long the condition has held and when the device last worked."""
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
    group = group_of(alert, one.scope)
    report = AlertReport(
        schema=1, group=group, scope=one.scope, cluster=alert.cluster, node=alert.node, ts_ms=now_ms, alerts=(alert,)
    )
    return Write("renewal" if repeat else "report", group, report)


def for_others(alert: Alert, one: Tracked, now_ms: int, rules: Rules) -> list[Write]:
    """The reports of a GPU to the alerts of other kinds that depend on it or name it. If its rule is gone, its end is
    reported to all of them."""
    if one.scope not in ("workload", "pod"):
        return []
    others = _OTHERS.get(rules.by_name[alert.name].kind, ()) if alert.name in rules.by_name else _OTHERS["crash_loop"]
    reports = [
        AlertReport(
            schema=1, group=group_of(_replace(alert, name=rule.name), one.scope), scope=one.scope,
            cluster=alert.cluster, node=alert.node, ts_ms=now_ms, others=(alert,),
        )
        for other in others
        for rule in rules.of(other)
    ]  # fmt: skip
    return [Write("report", report.group, report) for report in reports]


def holdings_of(state: NodeAlerts, rules: Rules) -> dict[str, int]:
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


def with_holdings(state: NodeAlerts, holdings: dict[str, int]) -> tuple[NodeAlerts, list[Write]]:
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


def reports_of_ranks(before: NodeAlerts, after: NodeAlerts, tick: Tick, rules: Rules) -> list[Write]:
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
                or is_silenced(rules, holder, after.memory.devices[device.uuid], tick)
            ):
                continue
            ruled = rules.in_force(rule, holder)
            if ruled is None:
                continue
            uid, key = uid_and_key(holder)
            finding = Finding(ruled, device.uuid, uid, key, facts=Facts(device, None, device.holders))
            one = Tracked(name=rule.name, device=device.uuid, pod_uid=uid, key=key, since_ms=tick.ts_ms)
            described = describe(finding, tick, tick.ts_ms, rules.wording)
            pattern = firing(ruled, one, after, tick.ts_ms, 0.0, described)
            scope = scope_of_pod(pattern)
            group = group_of(pattern, scope)
            ranks.setdefault(group, []).append(Rank(device.uuid, device.index, holder.pod, figures, device.model))
            limits = Limits(ruled.for_ms, ruled.keep_firing_ms, ruled.peers, ruled.deviations)
            reports[group] = AlertReport(
                schema=1, group=group, scope=scope, cluster=after.cluster, node=after.node, ts_ms=tick.ts_ms,
                pattern=pattern, limits=limits,
            )  # fmt: skip
    return [Write("report", key, _replace(one, ranks=tuple(ranks[key]))) for key, one in reports.items()]
