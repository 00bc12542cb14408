"""Alerts of several GPUs: what is true of many for one reason is one alert. Pure.

In: the reports of nodes, in the order of their log, each of the alerts of single GPUs that began, went on or ended in a
tick; the group as of the report before. Out: the group after it, and its alert if that is to be written.

A group is a pod's workload, a pod, or a node. Its alert fires with the first of its parts and is resolved with the last
one. If its GPUs, how many its workload holds, or the severity change meanwhile, it is written again with the next
revision. A report that says nothing new renews the figures. Nodes report how many GPUs a workload holds whenever that
changes, also when none of them is idle: such a group has no alert.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, get_args

import msgspec

from streams.alerts.reports import DELETE_MS
from streams.alerts.rules.rule import ALL_GPUS_KINDS, Rule, Rules
from streams.alerts.stragglers import compare
from streams.alerts.text.grouped import grouped, kind_of, labels_of
from topics.alerts import Alert, AlertGpu, AlertGroup, AlertReport, Member, Seen, Severity, milliseconds, time
from topics.topic import decoder

_MOST_ENDED = 1000  # of the parts of a group that goes on; those that ended first are forgotten
_SENT_MS = 24 * 3_600_000  # a node that has nothing in the group sends nothing again from before that
_SEVERITIES = get_args(Severity)  # the worst last

decode_report, decode_group = decoder(AlertReport), decoder(AlertGroup)
_replace = msgspec.structs.replace


class GroupStep(NamedTuple):
    """The group after a report, and what to write to gpu.alerts, in this order; ``news``: it is no repeat."""

    group: AlertGroup
    alerts: tuple[Alert, ...] = ()
    news: bool = True


def step(group: AlertGroup | None, report: AlertReport, offset: int, rules: Rules) -> GroupStep:
    """What a report makes of a group. A report that the group has seen changes nothing."""
    if group is None:
        group = AlertGroup(schema=1, group=report.group, cluster=report.cluster, node=report.node, offset=-1)
    last = group.seen.get(report.node)
    sent_again = last is not None and (
        (report.position, report.phase) <= (last.position, last.phase) and report.logged_ms <= last.logged_ms
    )
    if offset <= group.offset or sent_again:
        return GroupStep(group)
    held = report.held if report.held is not None or last is None else last.held
    seen = {**group.seen, report.node: Seen(report.position, report.phase, report.logged_ms, held)}
    group = _replace(group, others=_others(group, report, seen)) if report.others or group.others else group
    removed = group.alert is not None and group.alert.name not in rules.by_name
    compared = compare(group, report, seen, "rule_removed" if removed else "pod_ended")
    only_ranks = report.held is None and not (report.alerts or report.others or compared.alerts)
    if report.ranks and only_ranks:  # nothing began or ended
        if compared.group is group:
            return GroupStep(group)
        return GroupStep(_replace(compared.group, node=report.node, offset=offset, seen=seen))
    group = _replace(compared.group, node=report.node, offset=offset, seen=seen)
    return _with_parts(group, _replace(report, alerts=(*report.alerts, *compared.alerts)), rules)


def _with_parts(group: AlertGroup, report: AlertReport, rules: Rules) -> GroupStep:
    """The group with the parts that a report has, and whether its alert fires, goes on or ends with that."""
    kept, began, ended = _parts(group.members, report.alerts)
    was, now = group.alert, None
    began = began or ((group.part or was) if any(member.ended_ms is None for member in kept) else None)
    of = began or was
    group = _replace(group, members=tuple(kept))
    is_open = of is not None and _is_open(rules.by_name.get(of.name), group, rules)
    if was is not None and was.is_open:
        now = _going_on(was, group, report, rules) if is_open else _resolved(was, group, report, ended, rules)
    elif is_open and began is not None and (began in report.alerts or _is_of_all(rules.by_name.get(began.name))):
        kept = [_replace(m, before_s=0.0) for m in kept if m.ended_ms is None]  # the rest is of an earlier firing
        group = _replace(group, members=tuple(kept))
        now = _fired(began, group, report, rules)
    nodes = {member.gpu.node for member in kept} | {report.node}
    seen = {
        node: one
        for node, one in group.seen.items()
        if node in nodes or one.held or report.logged_ms - one.logged_ms < _SENT_MS
    }
    waits = not is_open or (now is None and (was is None or not was.is_open))
    part = began if began is not None and (waits or _is_of_all(rules.by_name.get(began.name))) else None
    after = _replace(group, alert=now or was, seen=seen, part=part)
    if now is None:
        return GroupStep(after)
    is_repeat = was is not None and (was.state, was.revision, was.starts_at) == (now.state, now.revision, now.starts_at)
    return GroupStep(after, (now,), news=not is_repeat)


def _parts(before: Sequence[Member], alerts: Sequence[Alert]) -> tuple[list[Member], Alert | None, Alert | None]:
    """The parts of a group after alerts of single GPUs, the first of these that is open, and the last that ended."""
    members = {member.fingerprint: member for member in before}
    began: Alert | None = None
    ended: Alert | None = None
    for alert in alerts:
        member = members.get(alert.fingerprint)
        if member is not None and member.ended_ms is not None and milliseconds(alert.starts_at) == member.starts_ms:
            continue  # after a crash it is reported again
        if member is not None or alert.is_open:
            members[alert.fingerprint] = _member(alert, member)
        began = began or (alert if alert.is_open else None)
        ended = ended if alert.is_open else alert
    over = sorted([m.ended_ms for m in members.values() if m.ended_ms is not None])[:-_MOST_ENDED]
    return [m for m in members.values() if m.ended_ms is None or not over or m.ended_ms > over[-1]], began, ended


def is_over(group: AlertGroup, now_ms: int) -> bool:
    """Whether a group's alert is to be deleted or, if it has none, whether nothing of the group has to be kept."""
    if any(member.ended_ms is None for member in group.members):
        return False
    alert = group.alert
    if alert is None:
        return not any(one.held for one in group.seen.values())
    return alert.ends_at is None or now_ms - milliseconds(alert.ends_at) >= DELETE_MS


def without_alert(group: AlertGroup) -> AlertGroup | None:
    """What is kept of a group that is over: how many GPUs its workload holds, if any."""
    left = _replace(group, alert=None, members=())
    return None if is_over(left, 0) else left


def _member(alert: Alert, before: Member | None) -> Member:
    labels, figures = alert.labels, alert.annotations
    pod, job = labels.get("k8s_pod_name"), labels.get("job_id")
    gpu = AlertGpu(
        uuid=labels.get("gpu_mig_uuid") or labels.get("gpu_uuid", ""),
        node=alert.node,
        index=int(labels["gpu_index"]) if labels.get("gpu_index", "").isdigit() else None,
        pod=f"{labels.get('k8s_namespace_name', '')}/{pod}" if pod else f"job {job}" if job else None,
    )
    starts_ms, before_s = milliseconds(alert.starts_at), 0.0
    if before is not None:
        before_s = before.before_s + (before.seconds or 0.0 if before.starts_ms != starts_ms else 0.0)
    return Member(
        fingerprint=alert.fingerprint,
        gpu=gpu,
        severity=alert.severity,
        model=labels.get("gpu_model"),
        starts_ms=starts_ms,
        ended_ms=None if alert.ends_at is None else milliseconds(alert.ends_at),
        seconds=alert.value,
        before_s=before_s,
        share=float(figures["gpu_share"]) if "gpu_share" in figures else None,
        price=figures.get("gpu_hour_price"),
        last_active=figures.get("last_active"),
        held=alert.held or 0,
        evidence=figures.get("evidence"),
        since=datetime.fromisoformat(figures["since"]) if "since" in figures else None,
    )


def _others(group: AlertGroup, report: AlertReport, seen: dict[str, Seen]) -> tuple[Member, ...]:
    """The GPUs of the workload that alerts of other kinds are about, without those that it gave back."""
    others = {one.fingerprint: one for one in group.others}
    for alert in report.others:
        others.pop(alert.fingerprint, None)
        if alert.is_open:
            others[alert.fingerprint] = _replace(_member(alert, None), name=alert.name)
    return tuple([one for one in others.values() if one.gpu.node not in seen or seen[one.gpu.node].held != 0])


def _fired(first: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> Alert:
    """The alert begins with the first of its parts, and after it ended last; one of all GPUs with the last of them."""
    was, starts = group.alert, [member.starts_ms for member in group.members if member.ended_ms is None]
    starts_ms = min(starts)
    if was is not None and was.ends_at is not None:
        starts_ms = max(starts_ms, milliseconds(was.ends_at) + 1)
    if _is_of_all(rules.by_name.get(first.name)):
        starts_ms = max(starts_ms, *starts, *[one.starts_ms for one in group.others])
    elif group.part is not None:  # it has waited for another alert to end
        starts_ms = max(starts_ms, report.ts_ms)
    alert = Alert(
        schema=1, name=first.name, state="firing", fingerprint=report.group, cluster=first.cluster, node=first.node,
        starts_at=time(starts_ms), severity=first.severity, labels=labels_of(first, report.scope),
        annotations=first.annotations,
    )  # fmt: skip
    return _described(alert, group, report, rules)


def _going_on(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> Alert:
    """The alert as it is now: the next revision if more than figures changed."""
    now = _described(alert, group, report, rules)
    same = (now.gpus, now.held, now.severity) == (alert.gpus, alert.held, alert.severity)
    return now if same else _replace(now, revision=alert.revision + 1)


def _resolved(alert: Alert, group: AlertGroup, report: AlertReport, last: Alert | None, rules: Rules) -> Alert:
    """The alert has ended. Its end is that of its last part. If parts of it still hold (it is of all GPUs, or another
    alert comes before it), its end is this report. Its GPUs stay as they were."""
    ends_at = max((time(report.ts_ms) if last is None or last.ends_at is None else last.ends_at), alert.starts_at)
    because = last.resolved_because if last is not None else "condition"
    if not _is_of_all(rules.by_name.get(alert.name)) and any(member.ended_ms is None for member in group.members):
        ends_at, because = max(time(report.ts_ms), alert.starts_at), "superseded"
    ended = _replace(alert, state="resolved", ends_at=ends_at, resolved_because=because)
    annotations, value = grouped(ended, group, report, rules)
    return _replace(ended, annotations=annotations, value=value)


def _held(group: AlertGroup) -> int:
    """How many GPUs the workload holds. Nodes that never reported it are known by their parts alone."""
    going = [member for member in group.members if member.ended_ms is None]
    of_pods = Counter[str]()
    for (node, _), count in {(m.gpu.node, m.gpu.pod): m.held for m in going}.items():
        of_pods[node] += count
    reported = {node: one.held for node, one in group.seen.items() if one.held is not None}
    held = Counter({**of_pods, **reported}) | Counter(m.gpu.node for m in going)  # a missing GPU is not reported
    return sum(held.values())


def _is_open(rule: Rule | None, group: AlertGroup, rules: Rules) -> bool:
    """Whether the alert goes on. For most rules one GPU is enough. A rule about all GPUs needs each that the workload
    holds: some may be idle instead, but no more than half. While it goes on, there is no alert about the idle ones."""
    going = {member.gpu.uuid for member in group.members if member.ended_ms is None}
    if not going or rule is None or rule.kind not in ("held_idle", *ALL_GPUS_KINDS):
        return bool(going)
    stalled = {one.gpu.uuid for one in group.others if kind_of(one, rule, rules) in ALL_GPUS_KINDS}
    idle = {one.gpu.uuid for one in group.others} - stalled
    stalled, idle = (stalled | going, idle - going) if rule.kind in ALL_GPUS_KINDS else (stalled - going, idle | going)
    all_stall = bool(stalled) and len(idle) <= len(stalled) and len(stalled) + len(idle) >= _held(group)
    return all_stall if rule.kind in ALL_GPUS_KINDS else not all_stall


def _is_of_all(rule: Rule | None) -> bool:
    return rule is not None and rule.kind in ALL_GPUS_KINDS


def _described(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> Alert:
    """The alert with what its parts say now."""
    going = [member for member in group.members if member.ended_ms is None]
    going.sort(key=lambda m: (m.gpu.node, m.gpu.index or 0, m.gpu.uuid))
    if going:
        severities = [m.severity for m in going] + ([alert.severity] if alert.gpus else [])
        severity = max(severities, key=_rank)
        alert = _replace(
            alert,
            gpus=tuple(m.gpu for m in going),
            severity=severity,
            labels={**alert.labels, "severity": severity},
            node=going[0].gpu.node if not alert.gpus else alert.node,
            held=_held(group) or None if report.scope != "node" else None,
            idle=len(going) if report.scope != "node" else None,
        )
    annotations, value = grouped(alert, group, report, rules)
    return _replace(alert, annotations=annotations, value=value)


def _rank(severity: str) -> int:
    return _SEVERITIES.index(severity) if severity in _SEVERITIES else -1
