"""Stragglers: GPUs of a workload that lag behind the others. Pure.

In: the reports of nodes, with the figures of the workload's GPUs there in the five minutes that have ended. Out: alerts
of single GPUs, which ``streams/alerts/groups.py`` makes one alert of.

The GPUs of a workload are compared when all nodes that hold some have reported, or when one has reported twice. Of each
measure the median over all GPUs is computed, and the median of the deviations from it (MAD): neither moves much if less
than half of the GPUs are slow. A GPU is an outlier if it differs from the median by several deviations, and by the
least difference that matters.

- A slow clock, and time in which the GPU is throttled, are the GPU's own: only the worse side counts.
- In synchronous training all GPUs wait for the slowest. If its host is slow, it does less than its peers, which wait in
  a kernel. If it computes slowly, it does more than they do while they wait. So both sides of activity count, but only
  if the GPUs work together: the load of replicas that serve requests may differ.
- GPUs are compared with those of the same model. MIG devices are not compared.
- A GPU that is idle by another alert is not compared.
- If more than a third of the GPUs are outliers by a measure, that is how the workload is made, and no lag.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from streams.alerts.uses import FIGURES, STEP_MS
from topics.alerts import Alert, AlertGroup, AlertReport, Limits, Rank, Seen, Suspect, fingerprint
from topics.times import rfc3339, time_of

_MAD_TO_DEVIATION = 1.4826  # the standard deviation of normal values, divided by their MAD
_BUSY_UTILIZATION = 0.2  # utilization from which on a GPU, and a workload, counts as working
_SERVING = ("Deployment", "ReplicaSet", "DaemonSet")
_MAX_OUTLIER_SHARE = 1 / 3
_replace = msgspec.structs.replace


class Measure(NamedTuple):
    """A measure to compare GPUs by.

    ``figure`` is one of :data:`FIGURES`. ``side`` is the side that lags: -1 low, 1 high, 0 both. ``least`` is the least
    difference from the median that matters, and ``share`` the same as a share of the median. ``text`` is its format in
    the evidence, of the value times ``scale``.
    """

    figure: str
    side: int
    least: float
    share: float
    text: str
    scale: float = 1.0


OWN_MEASURES = (
    Measure("sm_clock_hz", -1, 0.0, 0.1, "SM clock {:.0f} MHz", 1e-6),
    Measure("throttled", 1, 0.1, 0.0, "slowed down for {:.0%} of the time"),
    Measure("violation", 1, 0.2, 0.0, "power or temperature violated for {:.0%} of the time"),
)
"""The measures that show that a busy GPU is slow itself."""

ACTIVITY_MEASURES = (
    Measure("utilization", 0, 0.2, 0.0, "utilization {:.0%}"),
    Measure("sm_active", 0, 0.15, 0.0, "SMs active {:.0%}"),
    Measure("tensor_active", 0, 0.1, 0.25, "tensor cores {:.0%}"),
    Measure("power_watts", 0, 0.0, 0.25, "{:.0f} W"),
)
"""The measures that show that other GPUs wait for it, if they work together."""


class Compared(NamedTuple):
    """The group with its new ranks and suspects, and the alerts of the ranks that began or ceased to lag."""

    group: AlertGroup
    alerts: tuple[Alert, ...] = ()


def compare_ranks(group: AlertGroup, report: AlertReport, seen: Mapping[str, Seen], departure_reason: str) -> Compared:
    """The group after a report of a node's ranks. ``departure_reason``: why alerts end if the workload has left the
    node. If its ranks are not compared, they end for the reason in the report's pattern."""
    ranks_by_node, suspects, alerts = dict(group.ranks), dict(group.suspects), list[Alert]()
    idle = {state.gpu.uuid for state in group.others}
    for uuid in [uuid for uuid in suspects if uuid in idle]:
        alerts += _resolved_alerts(group, suspects.pop(uuid), uuid, report.ts_ms, "superseded")
    if report.held == 0:  # the workload has left the node
        ranks_by_node.pop(report.node, None)
    not_compared = report.pattern.resolved_because if report.pattern is not None else None
    if report.held == 0 or not_compared is not None:
        for uuid in [uuid for uuid, suspect in suspects.items() if suspect.node == report.node]:
            reason = not_compared or departure_reason
            alerts += _resolved_alerts(group, suspects.pop(uuid), uuid, report.ts_ms, reason)
    if report.limits is not None and report.pattern is not None:
        complete_rounds = [ranks_by_node] if report.node in ranks_by_node else []
        ranks = tuple([rank for rank in report.ranks if rank.uuid not in idle])
        ranks_by_node = {report.node: ranks} if complete_rounds else {**ranks_by_node, report.node: ranks}
        if {node for node, node_seen in seen.items() if node_seen.held} <= ranks_by_node.keys():
            complete_rounds, ranks_by_node = [*complete_rounds, ranks_by_node], {}
        for complete in complete_rounds:
            suspects, transitions = _update_suspects(group, complete, suspects, report, report.limits, report.pattern)
            alerts += transitions
    if ranks_by_node == group.ranks and suspects == group.suspects:
        return Compared(group)
    return Compared(_replace(group, ranks=ranks_by_node, suspects=suspects), tuple(alerts))


def _update_suspects(
    group: AlertGroup,
    ranks_by_node: Mapping[str, Sequence[Rank]],
    suspects_before: Mapping[str, Suspect],
    report: AlertReport,
    limits: Limits,
    pattern: Alert,
) -> tuple[dict[str, Suspect], list[Alert]]:
    """The suspects after all ranks of a step were compared, and the alerts that fire or are resolved by that."""
    rank_by_uuid = {rank.uuid: (node, rank) for node, ranks in ranks_by_node.items() for rank in ranks}
    now_ms = report.ts_ms
    step_ms = now_ms - now_ms % STEP_MS  # a lag lasts for whole steps, whenever the last node's report came
    workload_kind = pattern.labels.get("k8s_workload_kind", "")
    evidence_by_uuid = outliers([rank for _, rank in rank_by_uuid.values()], limits, workload_kind)
    suspects, alerts = dict(suspects_before), list[Alert]()
    for uuid, text in evidence_by_uuid.items():
        node, rank = rank_by_uuid[uuid]
        node_ranks = ranks_by_node[node]
        all_lag = all(peer.uuid in evidence_by_uuid for peer in node_ranks)
        is_whole_node = len(ranks_by_node) > 1 and len(node_ranks) > 1 and all_lag
        evidence = f"{text}, as all of {node}" if is_whole_node else text
        before = suspects.get(uuid, Suspect(node, max(step_ms - STEP_MS, 0), evidence))
        lasted_ms = step_ms - before.since_ms
        starts_ms = now_ms if before.starts_ms is None and lasted_ms >= limits.for_ms else before.starts_ms
        critical = before.critical or (starts_ms is not None and 0 < limits.critical_ms <= lasted_ms)
        suspects[uuid] = _replace(before, evidence=evidence, starts_ms=starts_ms, ceased_ms=None, critical=critical)
        if (starts_ms, critical) != (before.starts_ms, before.critical):
            alerts.append(_firing_alert(group, pattern, node, rank, suspects[uuid]))
    for uuid, suspect in list(suspects.items()):
        if suspect.node not in ranks_by_node or uuid in evidence_by_uuid:
            continue
        ceased_ms = step_ms if suspect.ceased_ms is None else suspect.ceased_ms
        suspects[uuid] = _replace(suspect, ceased_ms=ceased_ms)
        if suspect.starts_ms is None or uuid not in rank_by_uuid or step_ms - ceased_ms >= limits.keep_ms:
            reason = "condition" if uuid in rank_by_uuid else "pod_ended"
            alerts += _resolved_alerts(group, suspects.pop(uuid), uuid, now_ms, reason)
    return suspects, alerts


def outliers(ranks: Sequence[Rank], limits: Limits, kind: str) -> dict[str, str]:
    """The ranks that lag behind the others of their model: by UUID, the measures that show it, as a text."""
    models = dict.fromkeys(rank.model for rank in ranks)
    if len(models) > 1:
        by_model = [outliers([rank for rank in ranks if rank.model == model], limits, kind) for model in models]
        return {uuid: text for text_by_uuid in by_model for uuid, text in text_by_uuid.items()}
    texts_by_uuid: dict[str, list[str]] = {}
    utilizations = [rank.figures[0] for rank in ranks if rank.figures[0] is not None]
    busy_ranks = [rank for rank in ranks if rank.figures[0] is None or rank.figures[0] >= _BUSY_UTILIZATION]
    works_in_sync = kind not in _SERVING and (not utilizations or median(utilizations) >= _BUSY_UTILIZATION)
    for measure in (*OWN_MEASURES, *(ACTIVITY_MEASURES if works_in_sync else ())):
        compared = busy_ranks if measure in OWN_MEASURES else ranks
        index = FIGURES.index(measure.figure)
        values = [(rank.uuid, value) for rank in compared if (value := rank.figures[index]) is not None]
        if len(values) <= limits.peers:
            continue
        center = median([value for _, value in values])
        deviation = _MAD_TO_DEVIATION * median([abs(value - center) for _, value in values])
        threshold = max(limits.deviations * deviation, measure.least, measure.share * center)
        outlying = [
            (uuid, value)
            for uuid, value in values
            if abs(value - center) > threshold and (value - center) * measure.side >= 0
        ]
        if len(outlying) <= len(compared) * _MAX_OUTLIER_SHARE:
            peers = f"its peers {measure.text.format(center * measure.scale)}"
            for uuid, value in outlying:
                texts_by_uuid.setdefault(uuid, []).append(f"{measure.text.format(value * measure.scale)} ({peers})")
    return {uuid: ", ".join(texts) for uuid, texts in texts_by_uuid.items()}


def _firing_alert(group: AlertGroup, pattern: Alert, node: str, rank: Rank, suspect: Suspect) -> Alert:
    """The alert of a rank that has lagged for long enough."""
    labels = {**pattern.labels, "k8s_node_name": node, "gpu_uuid": rank.uuid}
    if rank.index is not None:
        labels["gpu_index"] = str(rank.index)
    if "k8s_pod_name" in labels:
        labels["k8s_pod_name"] = rank.pod
    severity = labels["severity"] = "critical" if suspect.critical else pattern.severity
    return _replace(
        pattern,
        node=node,
        severity=severity,
        fingerprint=fingerprint(pattern.name, group.cluster, node, rank.uuid),
        resolved_because=None,
        starts_at=time_of(suspect.starts_ms or 0),
        value=((suspect.starts_ms or 0) // STEP_MS * STEP_MS - suspect.since_ms) / 1000,
        labels=labels,
        annotations={
            **pattern.annotations,
            "evidence": suspect.evidence,
            "since": rfc3339(time_of(suspect.since_ms)),
        },
    )


def _resolved_alerts(group: AlertGroup, suspect: Suspect, uuid: str, at_ms: int, reason: str) -> list[Alert]:
    """The alert of a rank, resolved; no alert if none fires."""
    part = next((member for member in group.firing_members if member.gpu.uuid == uuid), None)
    if suspect.starts_ms is None or part is None or group.alert is None:
        return []
    labels = {"gpu_uuid": uuid, "gpu_index": str(part.gpu.index)}
    return [
        _replace(
            group.alert, state="resolved", node=suspect.node, fingerprint=part.fingerprint, revision=0, gpus=(),
            starts_at=time_of(suspect.starts_ms), ends_at=time_of(max(at_ms, suspect.starts_ms)), value=0.0,
            labels={**group.alert.labels, **labels}, held=None, idle=None, resolved_because=reason,
        )
    ]  # fmt: skip
