"""The records that a node's step writes: its own alerts, and its reports to alerts of several GPUs. Pure.

In: the conditions of a node, and the transitions of their alerts. Out: records of gpu.alerts and gpu.alert-members.
The latter has the parts of alerts of several GPUs, and how many GPUs each workload holds. It also has the figures by
which the GPUs of a workload are compared, of the step that has ended.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from delivery.values import milliseconds as duration_ms
from streams.alerts.conditions import evaluate
from streams.alerts.conditions.finding import Facts, Finding, is_silenced, sole_pod, uid_and_key
from streams.alerts.memory import NodeAlerts
from streams.alerts.rules.rule import WASTE, Kind, Rule, Rules
from streams.alerts.text.describe import Described, clean, describe, with_final_figures
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, means_of_closed_step
from topics.alerts import Alert, AlertReport, Limits, Rank, Scope, Tracked, fingerprint
from topics.attributed import JOB
from topics.times import epoch_ms, rfc3339, time_of

DELETE_MS = 7 * 24 * 3_600_000  # how long a resolved alert stays
MOST_RESOLVED = 2000  # of a node: pods that come and go all the time may each have an alert
_DEPENDENT_KINDS: dict[Kind, tuple[Kind, ...]] = {  # the alerts of a workload that depend on its GPUs of this kind
    "crash_loop": ("held_idle", "stalled", "straggler"),
    "held_idle": ("stalled", "straggler"),
    "stalled": ("held_idle",),
}
_replace = msgspec.structs.replace


class Write(NamedTuple):
    """A record of gpu.alerts or gpu.alert-members, by ``kind``.

    To gpu.alerts: ``alert`` is a transition or an update, ``repeat`` an open alert that is written again unchanged,
    ``deletion`` a tombstone. To gpu.alert-members: ``report`` has transitions and updates, ``renewal`` has open
    alerts again, for their figures.
    """

    kind: Literal["alert", "repeat", "deletion", "report", "renewal"]
    fingerprint: str
    alert: Alert | AlertReport | None


class Step(NamedTuple):
    """The state after a step, and the records to write, in this order."""

    state: NodeAlerts
    writes: tuple[Write, ...] = ()

    @property
    def alerts(self) -> list[Alert]:
        """The transitions and updates, also those of alerts that are parts of a group."""
        alerts: list[Alert] = []
        for kind, _, record in self.writes:
            if isinstance(record, AlertReport):
                alerts += record.alerts if kind == "report" else ()
            elif record is not None and kind == "alert":
                alerts.append(record)
        return alerts

    @property
    def reports(self) -> list[AlertReport]:
        return [record for _, _, record in self.writes if isinstance(record, AlertReport)]


# -- alerts


def firing_alert(
    rule: Rule, condition: Tracked, state: NodeAlerts, now_ms: int, value: float, described: Described
) -> Alert:
    """A new firing alert. It starts now or, if the clock was set back, just after its last firing was resolved."""
    key = fingerprint(rule.name, state.cluster, state.node, condition.device, condition.pod_uid, condition.key)
    labels, annotations = described
    return Alert(
        schema=1,
        name=rule.name,
        state="firing",
        fingerprint=key,
        cluster=state.cluster,
        node=state.node,
        starts_at=time_of(max(now_ms, state.resolved.get(key, -1) + 1)),
        severity=rule.severity,
        value=value,
        labels=labels,
        annotations=annotations,
    )


def resolved_alert(alert: Alert, condition: Tracked, at_ms: int, reason: str) -> Alert:
    """The alert, resolved at a time, with its final figures."""
    ends_at = max(time_of(at_ms), alert.starts_at)
    resolved = _replace(alert, state="resolved", ends_at=ends_at, resolved_because=reason)
    held_until_ms = at_ms if condition.ceased_ms is None else condition.ceased_ms
    return with_final_figures(resolved, held_until_ms - condition.since_ms - condition.paused_ms)


def finish_step(state: NodeAlerts, writes: list[Write], now_ms: int) -> Step:
    """The step with the reports to each group as one record, and with deletions of alerts resolved a week ago, or that
    are too many. The state keeps which alerts are resolved until they are deleted or fire again."""
    resolved = dict(state.resolved)
    reports: dict[tuple[str, bool], AlertReport] = {}
    other_writes: list[Write] = []
    for write in writes:
        record = write.alert
        alerts: tuple[Alert, ...] = () if record is None else (record,) if isinstance(record, Alert) else record.alerts
        for alert in alerts:
            resolved.pop(alert.fingerprint, None)
            if alert.ends_at is not None:
                resolved[alert.fingerprint] = epoch_ms(alert.ends_at)
        if isinstance(record, AlertReport):
            phase = 2 * state.silent + (write.kind == "renewal")
            record = _replace(record, position=state.position, logged_ms=state.logged_ms, phase=phase)
            key = (record.group, write.kind == "renewal")
            merged = reports.get(key)
            if merged is not None:
                with_ranks = record if record.pattern is not None else merged  # its limits and pattern, too
                record = _replace(
                    record,
                    held=merged.held if record.held is None else record.held,
                    alerts=(*merged.alerts, *record.alerts),
                    others=(*merged.others, *record.others),
                    ranks=with_ranks.ranks,
                    limits=with_ranks.limits,
                    pattern=with_ranks.pattern,
                )
            reports[key] = record
        else:
            other_writes.append(write)
    by_phase = sorted(reports.items(), key=lambda item: item[1].phase)
    report_writes = [Write("renewal" if renewal else "report", group, record) for (group, renewal), record in by_phase]
    writes = [*other_writes, *report_writes]
    expired = [key for key, ended_ms in resolved.items() if now_ms - ended_ms >= DELETE_MS]
    if len(resolved) - len(expired) > MOST_RESOLVED:
        expired = sorted(resolved, key=lambda key: (resolved[key], key))[:-MOST_RESOLVED]
    for gone in expired:
        del resolved[gone]
        writes.append(Write("deletion", gone, None))
    return Step(state if resolved == state.resolved else _replace(state, resolved=resolved), tuple(writes))


# -- reports to the alerts of several GPUs


def scope_of_pod(alert: Alert) -> Scope:
    """The scope of the group of an alert about a pod: its workload or, if it has none, the pod."""
    return "workload" if {"k8s_workload_name", "job_id"} & alert.labels.keys() else "pod"


def group_of(alert: Alert, scope: Scope) -> str:
    """The fingerprint of the alert of several GPUs that an alert is a part of."""
    label_names = {
        "workload": ("k8s_namespace_name", "k8s_workload_kind", "k8s_workload_name", "job_id"),
        "pod": ("k8s_node_name", "k8s_namespace_name", "k8s_pod_name", "k8s_pod_uid"),
        "node": ("k8s_node_name",),
    }[scope]
    key = "/".join((scope, *[alert.labels.get(name, "") for name in label_names]))
    return fingerprint(alert.name, alert.cluster, "", key=key)


def alert_write(alert: Alert, condition: Tracked, now_ms: int, *, repeat: bool = False) -> Write:
    """The record of a transition or, with ``repeat``, of an open alert. If the alert is a part of a group, that is a
    report, which also has since when the condition holds and when the device last worked."""
    if condition.scope is None:
        return Write("repeat" if repeat else "alert", alert.fingerprint, alert)
    if alert.is_open and condition.scope != "node":
        annotations = dict(alert.annotations)
        if condition.again_ms or "last_active" in annotations:
            annotations["last_active"] = rfc3339(time_of(condition.again_ms or condition.since_ms))
        annotations["since"] = rfc3339(time_of(condition.since_ms))
        alert = _replace(alert, annotations=annotations)
    if alert.is_open and "gpu_share" in alert.annotations:
        until_ms = now_ms if condition.ceased_ms is None else condition.ceased_ms
        window_ms = duration_ms(alert.annotations["window"]) if "window" in alert.annotations else 0
        alert = _replace(alert, value=(max(until_ms - condition.since_ms - condition.paused_ms, 0) + window_ms) / 1000)
    group = group_of(alert, condition.scope)
    report = AlertReport(
        schema=1,
        group=group,
        scope=condition.scope,
        cluster=alert.cluster,
        node=alert.node,
        ts_ms=now_ms,
        alerts=(alert,),
    )
    return Write("renewal" if repeat else "report", group, report)


def reports_to_other_rules(alert: Alert, condition: Tracked, now_ms: int, rules: Rules) -> list[Write]:
    """The reports of a GPU's alert to the workload's alerts of other kinds that depend on it or name it. If its rule
    was removed, its end is reported to all of them."""
    if condition.scope not in ("workload", "pod"):
        return []
    rule = rules.by_name.get(alert.name)
    dependent_kinds = _DEPENDENT_KINDS.get(rule.kind, ()) if rule is not None else _DEPENDENT_KINDS["crash_loop"]
    reports = [
        AlertReport(
            schema=1, group=group_of(_replace(alert, name=dependent.name), condition.scope), scope=condition.scope,
            cluster=alert.cluster, node=alert.node, ts_ms=now_ms, others=(alert,),
        )
        for kind in dependent_kinds
        for dependent in rules.of(kind)
    ]  # fmt: skip
    return [Write("report", report.group, report) for report in reports]


def with_holdings(
    state: NodeAlerts, rules: Rules, writes: Iterable[Write], *, may_hold_others: bool
) -> tuple[NodeAlerts, list[Write]]:
    """The state with how many devices each workload holds on the node now, and the reports of the numbers that have
    changed. A pod without owners is on no other node, so its number is reported from the first other report about it
    on. Nothing is counted unless ``may_hold_others``, or ``writes`` has such a report."""
    before = state.holdings or {}
    new_groups = {write.fingerprint for write in writes if isinstance(write.alert, AlertReport)} - before.keys()
    if not (may_hold_others or new_groups):
        return state, []
    holdings = {
        group: count
        for owner, count in _count_devices(state).items()
        for rule in rules.rules
        if rule.kind in WASTE and (rule.enabled or rule.overrides)
        for group in [fingerprint(rule.name, state.cluster, "", key="/".join(owner))]
        if (owner[0] == "workload" and owner[2] != "Pod") or group in before or group in new_groups
    }
    return report_holdings(state, holdings)


def _count_devices(state: NodeAlerts) -> Counter[tuple[str, ...]]:
    """How many devices of the node each workload holds, or pod without one, by the key of its groups."""
    counts = Counter[tuple[str, ...]]()
    for device in state.memory.devices.values():
        if evaluate.is_gone(device, state.last_ts_ms):
            continue
        for pod in [pod for pod in device.pods if not pod.observed]:  # each as in :func:`group_of`
            if not pod.workload_name:
                owner: tuple[str, ...] = ("pod", state.node, pod.namespace, pod.pod, pod.pod_uid or "")
            elif pod.workload_kind == JOB:
                owner = ("workload", "", "", "", clean(pod.pod))
            else:
                owner = ("workload", pod.namespace, clean(pod.workload_kind or ""), clean(pod.workload_name), "")
            counts[owner] += 1
    return counts


def report_holdings(state: NodeAlerts, holdings: dict[str, int]) -> tuple[NodeAlerts, list[Write]]:
    """The state with these numbers of held devices, by group, and the reports of those that have changed."""
    before = state.holdings or {}
    changed = {group: holdings.get(group, 0) for group in before | holdings}
    reports = [
        AlertReport(
            schema=1, group=group, scope="workload", cluster=state.cluster, node=state.node, ts_ms=state.last_ts_ms,
            held=count,
        )
        for group, count in changed.items()
        if count != before.get(group, 0)
    ]  # fmt: skip
    return _replace(state, holdings=holdings), [Write("report", report.group, report) for report in reports]


def rank_reports(before: NodeAlerts, after: NodeAlerts, tick: Tick, rules: Rules) -> list[Write]:
    """The reports of what the GPUs of each workload did in the step that a tick has ended: groups compare them. If the
    rule is not for the workload here, its report has no ranks, and its pattern has the reason."""
    if tick.ts_ms // STEP_MS == before.last_ts_ms // STEP_MS:
        return []
    reports: dict[str, AlertReport] = {}
    for rule in rules.of("straggler"):
        for device in tick.devices:
            holder = sole_pod(device.holders) if device.holders else None
            if holder is None or holder.observed or device.mig is not None:
                continue
            uses_before, uses_after = (state.memory.uses.get(device.uuid, ()) for state in (before, after))
            figures = means_of_closed_step(uses_before, uses_after, tick.interval_ms)
            effective_rule, reason = rules.in_force(rule, holder), None
            if after.maintenance is not None:
                reason = "maintenance"
            elif effective_rule is None or is_silenced(rules, holder, after.memory.devices[device.uuid], tick):
                reason = "policy"
            elif figures is None:
                continue
            in_force, (uid, key) = effective_rule or rule, uid_and_key(holder)
            finding = Finding(in_force, device.uuid, uid, key, facts=Facts(device, None, device.holders))
            condition = Tracked(name=in_force.name, device=device.uuid, pod_uid=uid, key=key, since_ms=tick.ts_ms)
            described = describe(finding, tick, tick.ts_ms, rules.wording)
            limits = Limits(
                in_force.for_ms, in_force.keep_firing_ms, in_force.peers, in_force.deviations, in_force.critical_ms
            )
            pattern = firing_alert(in_force, condition, after, tick.ts_ms, 0.0, described)  # if it lags
            scope = scope_of_pod(pattern)
            group = group_of(pattern, scope)
            ranks = reports[group].ranks if group in reports else ()
            if reason is None and figures is not None:
                ranks += (Rank(device.uuid, device.index, holder.pod, figures, device.model),)
            elif ranks:
                continue
            reports[group] = AlertReport(
                schema=1, group=group, scope=scope, cluster=after.cluster, node=after.node, ts_ms=tick.ts_ms,
                pattern=_replace(pattern, resolved_because=reason), limits=limits, ranks=ranks,
            )  # fmt: skip
    return [Write("report", group, report) for group, report in reports.items()]
