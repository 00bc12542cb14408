"""Groups: conditions of several GPUs with one cause are one alert. Pure.

In: a group, and the reports of nodes in the order of their log. A report has the alerts of single GPUs that fire,
go on or are resolved in a tick. Out: the group after the report, and its alert if that is to be written.

A group is of a workload, a pod or a node. Its alert fires with the first of its parts, and is resolved with the last
one. If its GPUs, the number of GPUs that its workload holds, the severity, or what the API server says of the GPUs
change meanwhile, it is written again with the next revision. A report without such a change updates the figures only.
Nodes also report how many GPUs a workload holds whenever that changes, even if none of them has an alert: such a group
has no alert. Of a pod without owners they do so from its first alert on.
"""

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, NamedTuple, get_args

import msgspec

from streams.alerts.reports import DELETE_MS, scope_of_pod
from streams.alerts.rules.rule import ALL_GPUS_KINDS, Rule, Rules
from streams.alerts.stragglers import compare_ranks
from streams.alerts.text.grouped import describe_group, group_labels, kind_of_other
from topics.alerts import Alert, AlertGpu, AlertGroup, AlertReport, Member, Seen, Severity, Time
from topics.times import MAX_TIME_MS, epoch_ms, time_of
from topics.topic import decoder

_MAX_ENDED_MEMBERS = 1000  # of a group whose alert fires; the first that ended are forgotten
_REPORT_RESENT_MS = 24 * 3_600_000  # reports are not read again after so long: a node without parts is forgotten
_SEVERITIES = get_args(Severity)  # the worst last
_INDEX = re.compile(r"[0-9]{1,9}")

decode_report, _decode_group = decoder(AlertReport), decoder(AlertGroup)
_replace = msgspec.structs.replace


class _Figures(msgspec.Struct, frozen=True):
    """The annotations of an alert of a single GPU that are read again."""

    gpu_share: Annotated[float, msgspec.Meta(ge=0)] | None = None
    gpu_hour_price: Decimal | None = None
    last_active: Time | None = None
    since: Time | None = None


class GroupStep(NamedTuple):
    """The group after a report, and the alerts to write, in this order. ``is_news``: they are not just repeated."""

    group: AlertGroup
    alerts: tuple[Alert, ...] = ()
    is_news: bool = True


def decode_group(value: bytes) -> AlertGroup:
    """A group. Raises ``msgspec.DecodeError``."""
    group = _decode_group(value)
    for member in (*group.members, *group.others):
        msgspec.convert({"gpu_hour_price": member.price, "last_active": member.last_active}, _Figures, strict=False)
    return group


def order(group: AlertGroup) -> tuple[int, int]:
    """The later of two states of a group has the greater one."""
    return group.generation, group.offset


def step(group: AlertGroup | None, report: AlertReport, offset: int, rules: Rules) -> GroupStep:
    """The group after a report. A report that the group has read before changes nothing. Raises
    ``msgspec.DecodeError`` if an annotation is not what it should be."""
    if group is None:
        group = AlertGroup(schema=1, group=report.group, cluster=report.cluster, node=report.node, offset=-1)
    last = group.seen.get(report.node)
    is_resent = last is not None and (
        (report.position, report.phase) <= (last.position, last.phase) and report.logged_ms <= last.logged_ms
    )
    if offset <= group.offset or is_resent:
        return GroupStep(group)
    held = report.held if report.held is not None or last is None else last.held
    seen = {**group.seen, report.node: Seen(report.position, report.phase, report.logged_ms, held)}
    if report.others or group.others:
        others = {other.fingerprint: other for other in group.others}
        for alert in report.others:
            others.pop(alert.fingerprint, None)
            if alert.is_open:
                others[alert.fingerprint] = _replace(_member(alert, None, report.logged_ms), name=alert.name)
        left_nodes = {node for node, report_state in seen.items() if report_state.held == 0}
        group = _replace(group, others=tuple([o for o in others.values() if o.gpu.node not in left_nodes]))
    rule_removed = group.alert is not None and group.alert.name not in rules.by_name
    compared = compare_ranks(group, report, seen, "rule_removed" if rule_removed else "pod_ended")
    only_ranks = report.held is None and not (report.alerts or report.others or compared.alerts)
    if report.pattern is not None and only_ranks:  # nothing began or ended
        if compared.group is group:
            return GroupStep(group)
        return GroupStep(_replace(compared.group, node=report.node, offset=offset, seen=seen))
    group = _replace(compared.group, node=report.node, offset=offset, seen=seen)
    return _update_alert(group, _replace(report, alerts=(*report.alerts, *compared.alerts)), rules)


def _update_alert(group: AlertGroup, report: AlertReport, rules: Rules) -> GroupStep:
    """The group with the parts of a report; its alert fires, is updated, or is resolved by that."""
    members, open_part, ended_part = _update_members(group.members, report)
    before, after = group.alert, None
    group = _replace(group, members=tuple(members))
    open_part = open_part or ((group.part or before) if group.firing_members else None)
    part_or_alert = open_part or before
    is_open = part_or_alert is not None and _is_open(rules.by_name.get(part_or_alert.name), group, rules)
    needs_all = open_part is not None and _needs_all_gpus(rules.by_name.get(open_part.name))
    if before is not None and before.is_open and is_open:
        after = _described(before, group, report, rules)
        if _revised_parts(after) != _revised_parts(before):
            after = _replace(after, revision=before.revision + 1)
    elif before is not None and before.is_open:
        after = _resolve(before, group, report, ended_part, rules)
    elif is_open and open_part is not None and (open_part in report.alerts or needs_all):
        # the parts that ended are of an earlier firing
        members = [_replace(member, before_s=0.0) for member in group.firing_members]
        group = _replace(group, members=tuple(members))
        after = _fire(open_part, group, report, rules)
    nodes = {member.gpu.node for member in members} | {report.node}
    seen = {
        node: report_state
        for node, report_state in group.seen.items()
        if node in nodes or report_state.held or report.logged_ms - report_state.logged_ms < _REPORT_RESENT_MS
    }
    is_waiting = not is_open or (after is None and (before is None or not before.is_open))
    part = open_part if is_waiting or needs_all else None
    group_after = _replace(group, alert=after or before, seen=seen, part=part)
    if after is None:
        return GroupStep(group_after)
    transition = (after.state, after.revision, after.starts_at)
    is_repeat = before is not None and transition == (before.state, before.revision, before.starts_at)
    return GroupStep(group_after, (after,), is_news=not is_repeat)


def _revised_parts(alert: Alert) -> tuple[object, ...]:
    """What makes an alert that fires a new revision if it changes. Other changes are of figures only."""
    return alert.gpus, alert.held, alert.severity, alert.annotations.get("api_status")


def _update_members(
    members_before: Sequence[Member], report: AlertReport
) -> tuple[list[Member], Alert | None, Alert | None]:
    """The parts of a group after a report, the first alert of a single GPU in it that is open, and the last that is
    resolved."""
    members = {member.fingerprint: member for member in members_before}
    first_open: Alert | None = None
    last_ended: Alert | None = None
    for alert in report.alerts:
        member = members.get(alert.fingerprint)
        if member is not None and member.ended_ms is not None and epoch_ms(alert.starts_at) == member.starts_ms:
            continue  # it was reported again after a crash
        if member is not None or alert.is_open:
            members[alert.fingerprint] = _member(alert, member, report.logged_ms)
        first_open = first_open or (alert if alert.is_open else None)
        last_ended = last_ended if alert.is_open else alert
    ends_ms = sorted([member.ended_ms for member in members.values() if member.ended_ms is not None])
    too_many = ends_ms[:-_MAX_ENDED_MEMBERS]
    forget_until_ms = too_many[-1] if too_many else -1
    kept = [member for member in members.values() if member.ended_ms is None or member.ended_ms > forget_until_ms]
    return kept, first_open, last_ended


def is_over(group: AlertGroup, now_ms: int) -> bool:
    """Whether a group's alert is old enough to be deleted. A group without an alert is over if its workload holds no
    GPUs."""
    if group.firing_members:
        return False
    alert = group.alert
    if alert is None:
        return not any(report_state.held for report_state in group.seen.values())
    if alert.ends_at is None:
        return True
    last_ms = max([report_state.logged_ms for report_state in group.seen.values()], default=MAX_TIME_MS)
    return now_ms - min(epoch_ms(alert.ends_at), last_ms) >= DELETE_MS  # the clock of its node may be ahead


def without_alert(group: AlertGroup) -> AlertGroup | None:
    """The group without its alert, to keep how many GPUs its workload holds; None if it holds none."""
    remaining = _replace(group, alert=None, members=())
    return None if is_over(remaining, 0) else remaining


def _member(alert: Alert, before: Member | None, logged_ms: int) -> Member:
    """The part that an alert of a single GPU is; ``before`` is the same part as reported before. ``logged_ms``: when
    the tick of the report was logged."""
    labels, annotations = alert.labels, alert.annotations
    figures = msgspec.convert(annotations, _Figures, strict=False)
    pod, job = labels.get("k8s_pod_name"), labels.get("job_id")
    holders = f"job {job}" if job else annotations.get("pods")
    gpu = AlertGpu(
        uuid=labels.get("gpu_mig_uuid") or labels.get("gpu_uuid", ""),
        node=alert.node,
        index=int(labels["gpu_index"]) if _INDEX.fullmatch(labels.get("gpu_index", "")) else None,
        pod=f"{labels.get('k8s_namespace_name', '')}/{pod}" if pod else holders,
    )
    starts_ms, before_s = epoch_ms(alert.starts_at), 0.0
    if before is not None:
        before_s = before.before_s + (before.seconds or 0.0 if before.starts_ms != starts_ms else 0.0)
    return Member(
        fingerprint=alert.fingerprint,
        gpu=gpu,
        severity=alert.severity,
        model=labels.get("gpu_model"),
        starts_ms=starts_ms,
        ended_ms=None if alert.ends_at is None else epoch_ms(alert.ends_at),
        seconds=alert.value,
        confirmed_ms=logged_ms,
        before_s=before_s,
        share=figures.gpu_share,
        price=annotations.get("gpu_hour_price"),
        last_active=annotations.get("last_active"),
        held=alert.held or 0,
        evidence=annotations.get("evidence") or annotations.get("api_status"),
        since=figures.since,
    )


def _fire(first: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> Alert:
    """The new alert of a group. It starts with the first of its parts, and after its last firing. An alert that needs
    all GPUs starts with the last of them."""
    before, part_starts_ms = group.alert, [member.starts_ms for member in group.firing_members]
    starts_ms = min(part_starts_ms)
    if before is not None and before.ends_at is not None:
        starts_ms = max(starts_ms, epoch_ms(before.ends_at) + 1)
    if _needs_all_gpus(rules.by_name.get(first.name)):
        starts_ms = max(starts_ms, *part_starts_ms, *[other.starts_ms for other in group.others])
    elif group.part is not None:  # it has waited until another alert was resolved
        starts_ms = max(starts_ms, report.ts_ms)
    scope = "node" if report.scope == "node" else scope_of_pod(first)  # a report of what is held always has workload
    alert = Alert(
        schema=1, name=first.name, state="firing", fingerprint=report.group, cluster=first.cluster, node=first.node,
        starts_at=time_of(starts_ms), severity=first.severity, labels=group_labels(first, scope),
        annotations=first.annotations,
    )  # fmt: skip
    return _described(alert, group, report, rules)


def _resolve(alert: Alert, group: AlertGroup, report: AlertReport, last_ended: Alert | None, rules: Rules) -> Alert:
    """The alert, resolved when its last part was. If parts still hold (it needs all GPUs, or another alert supersedes
    it), it is resolved at the time of this report. Its GPUs stay as they were."""
    ends_at = max(
        (time_of(report.ts_ms) if last_ended is None or last_ended.ends_at is None else last_ended.ends_at),
        alert.starts_at,
    )
    reason = last_ended.resolved_because if last_ended is not None else "condition"
    if group.firing_members and not _needs_all_gpus(rules.by_name.get(alert.name)):
        ends_at, reason = max(time_of(report.ts_ms), alert.starts_at), "superseded"
    resolved = _replace(alert, state="resolved", ends_at=ends_at, resolved_because=reason)
    annotations, value = describe_group(resolved, group, report, rules)
    return _replace(resolved, annotations=annotations, value=value)


def _count_held(group: AlertGroup) -> int:
    """How many GPUs the workload holds. For nodes that never reported it the parts there are counted."""
    firing_members = group.firing_members
    held_by_parts = Counter[str]()
    for (node, _), count in {(member.gpu.node, member.gpu.pod): member.held for member in firing_members}.items():
        held_by_parts[node] += count
    reported = {node: report_state.held for node, report_state in group.seen.items() if report_state.held is not None}
    at_least = Counter(member.gpu.node for member in firing_members)  # missing GPUs are not reported as held
    return sum((Counter({**held_by_parts, **reported}) | at_least).values())


def _is_open(rule: Rule | None, group: AlertGroup, rules: Rules) -> bool:
    """Whether the alert of a rule fires by the parts of the group. For most rules one GPU is enough.

    A rule that needs all GPUs needs each that the workload holds. Some of them may be idle instead, but no more than
    half. While its alert fires, there is none about the idle ones.
    """
    firing = set(map(_held_gpu, group.firing_members))
    if not firing or rule is None or rule.kind not in ("held_idle", *ALL_GPUS_KINDS):
        return bool(firing)
    stalled = {_held_gpu(other) for other in group.others if kind_of_other(other, rule, rules) in ALL_GPUS_KINDS}
    idle = set(map(_held_gpu, group.others)) - stalled
    if rule.kind in ALL_GPUS_KINDS:
        stalled, idle = stalled | firing, idle - firing
    else:
        stalled, idle = stalled - firing, idle | firing
    all_stalled = bool(stalled) and len(idle) <= len(stalled) and len(stalled) + len(idle) >= _count_held(group)
    return all_stalled if rule.kind in ALL_GPUS_KINDS else not all_stalled


def _held_gpu(member: Member) -> tuple[str, str | None]:
    """The GPU of a part, and the pod: a GPU that pods share is held once by each of them."""
    return member.gpu.uuid, member.gpu.pod


def _needs_all_gpus(rule: Rule | None) -> bool:
    return rule is not None and rule.kind in ALL_GPUS_KINDS


def _described(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> Alert:
    """The alert with the GPUs, the severity, the figures and the texts that its parts have now."""
    firing_members = sorted(group.firing_members, key=lambda part: (part.gpu.node, part.gpu.index or 0, part.gpu.uuid))
    if firing_members:
        severities = [member.severity for member in firing_members] + ([alert.severity] if alert.gpus else [])
        severity = max(severities, key=lambda name: _SEVERITIES.index(name) if name in _SEVERITIES else -1)
        about_pods = report.scope != "node"
        confirmed_ms = [member.confirmed_ms or 0 for member in firing_members]  # 0: an earlier version did not note it
        alert = _replace(
            alert,
            gpus=tuple(member.gpu for member in firing_members),
            severity=severity,
            labels={**alert.labels, "severity": severity},
            node=firing_members[0].gpu.node if not alert.gpus else alert.node,
            held=_count_held(group) or None if about_pods else None,
            idle=len(firing_members) if about_pods else None,
            confirmed_at=time_of(min(confirmed_ms)) if about_pods and all(confirmed_ms) else None,
        )
    annotations, value = describe_group(alert, group, report, rules)
    return _replace(alert, annotations=annotations, value=value)
