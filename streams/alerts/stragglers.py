"""Which GPUs of a workload lag behind the others. Pure.

In: the reports of nodes, each of what the workload's GPUs there did in the five minutes that have ended. Out: alerts of
single GPUs, which ``streams/alerts/groups.py`` makes one alert of.

The GPUs of a workload are compared when all nodes that hold some have reported, or when one has reported twice. Of each
measure the median of all is found, and the median of the deviations from it (MAD): both stay what they are if less than
half of the GPUs are slow. A GPU is an outlier if it is far from the median by the deviations and by what counts at all.

- A slow clock, and time in which it is slowed down, are the GPU's own: only the worse side counts.
- In synchronous training all wait for the slowest. A GPU whose host is slow does less than its peers, which wait in a
  kernel; one that computes slowly does more than its peers, which wait. So of activity both sides count, but only where
  GPUs work together: replicas that serve have what load they get.
- GPUs of different models differ anyway: those of one model are compared. MIG devices are not.
- A GPU of which another alert says that it is idle is not compared.
- What is true of more than a third of the GPUs is how the workload is made, and no lag.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from streams.alerts.uses import FIGURES, STEP_MS
from topics.alerts import Alert, AlertGroup, AlertReport, Limits, Rank, Seen, Suspect, fingerprint, time

_TO_DEVIATION = 1.4826  # the MAD of normal values, to their standard deviation
_BUSY = 0.2  # utilization from which on a GPU, and a workload, counts as working
_SERVING = ("Deployment", "ReplicaSet", "DaemonSet")
_MOST = 1 / 3
_replace = msgspec.structs.replace


class Measure(NamedTuple):
    """A figure, which of its sides lags (-1 low, 1 high, 0 both), what difference counts, as it is or as a share of the
    median, and how it is written."""

    figure: int
    side: int
    least: float
    share: float
    words: str
    scale: float = 1.0


def _measure(name: str, side: int, least: float, share: float, words: str, scale: float = 1.0) -> Measure:
    return Measure(FIGURES.index(name), side, least, share, words, scale)


OWN = (
    _measure("sm_clock_hz", -1, 0.0, 0.1, "SM clock {:.0f} MHz", 1e-6),
    _measure("throttled", 1, 0.1, 0.0, "slowed down for {:.0%} of the time"),
    _measure("violation", 1, 0.2, 0.0, "power or temperature violated for {:.0%} of the time"),
)
"""What says of a GPU that works that it is slow itself."""

ACTIVITY = (
    _measure("utilization", 0, 0.2, 0.0, "utilization {:.0%}"),
    _measure("sm_active", 0, 0.15, 0.0, "SMs active {:.0%}"),
    _measure("tensor_active", 0, 0.1, 0.25, "tensor cores {:.0%}"),
    _measure("power_watts", 0, 0.0, 0.25, "{:.0f} W"),
)
"""What says that others wait for it, where GPUs work together."""


class Compared(NamedTuple):
    """The group with what is known of its ranks now, and the alerts of those that began or ceased to lag."""

    group: AlertGroup
    alerts: tuple[Alert, ...] = ()


def compare(group: AlertGroup, report: AlertReport, seen: Mapping[str, Seen], gone: str = "pod_ended") -> Compared:
    """What a report of a node's ranks makes of a group; ``gone``: why alerts end if the node has no ranks any more."""
    known, suspects, alerts = dict(group.ranks), dict(group.suspects), list[Alert]()
    idle = {one.gpu.uuid for one in group.others}
    for uuid in [uuid for uuid in suspects if uuid in idle]:
        alerts += _ended(group, suspects.pop(uuid), uuid, report.ts_ms, "superseded")
    if report.held == 0:  # the workload has left the node
        known.pop(report.node, None)
        for uuid in [uuid for uuid, one in suspects.items() if one.node == report.node]:
            alerts += _ended(group, suspects.pop(uuid), uuid, report.ts_ms, gone)
    if report.ranks and report.limits is not None and report.pattern is not None:
        rounds = [known] if report.node in known else []
        ranks = tuple([rank for rank in report.ranks if rank.uuid not in idle])
        known = {report.node: ranks} if rounds else {**known, report.node: ranks}
        if {node for node, one in seen.items() if one.held} <= known.keys():
            rounds, known = [*rounds, known], {}
        for one in rounds:
            suspects, began_or_ended = _judged(group, one, suspects, report, report.limits, report.pattern)
            alerts += began_or_ended
    if known == group.ranks and suspects == group.suspects:
        return Compared(group)
    return Compared(_replace(group, ranks=known, suspects=suspects), tuple(alerts))


def _judged(
    group: AlertGroup,
    ranks: Mapping[str, Sequence[Rank]],
    before: Mapping[str, Suspect],
    report: AlertReport,
    limits: Limits,
    pattern: Alert,
) -> tuple[dict[str, Suspect], list[Alert]]:
    """Who lags after all ranks were compared, and what began or ended with that."""
    now_ms, places = report.ts_ms, {rank.uuid: (node, rank) for node, some in ranks.items() for rank in some}
    step_ms = now_ms - now_ms % STEP_MS  # a lag is as long as its steps, whenever the last node's report came
    lag = outliers([rank for _, rank in places.values()], limits, pattern.labels.get("k8s_workload_kind", ""))
    suspects, alerts = dict(before), list[Alert]()
    for uuid, words in lag.items():
        node, rank = places[uuid]
        whole = len(ranks) > 1 and len(ranks[node]) > 1 and all(one.uuid in lag for one in ranks[node])
        evidence = f"{words}, as all of {node}" if whole else words
        known = suspects.get(uuid, Suspect(node, max(step_ms - STEP_MS, 0), evidence))
        known = _replace(known, evidence=evidence, ceased_ms=None)
        if known.starts_ms is None and step_ms - known.since_ms >= limits.for_ms:
            known = _replace(known, starts_ms=now_ms)
            alerts.append(_alert(group, pattern, node, rank, known))
        suspects[uuid] = known
    for uuid, known in [(uuid, one) for uuid, one in suspects.items() if one.node in ranks and uuid not in lag]:
        ceased_ms = step_ms if known.ceased_ms is None else known.ceased_ms
        suspects[uuid] = _replace(known, ceased_ms=ceased_ms)
        if known.starts_ms is None or uuid not in places or step_ms - ceased_ms >= limits.keep_ms:
            because = "condition" if uuid in places else "pod_ended"
            alerts += _ended(group, suspects.pop(uuid), uuid, now_ms, because)
    return suspects, alerts


def outliers(ranks: Sequence[Rank], limits: Limits, kind: str = "") -> dict[str, str]:
    """The ranks that lag behind the others of their model, by UUID, each with the measures that say so."""
    models = dict.fromkeys(rank.model for rank in ranks)
    if len(models) > 1:
        of_models = [outliers([rank for rank in ranks if rank.model == model], limits, kind) for model in models]
        return {uuid: words for found in of_models for uuid, words in found.items()}
    found: dict[str, list[str]] = {}
    used = [rank.figures[0] for rank in ranks if rank.figures[0] is not None]
    works = [rank for rank in ranks if rank.figures[0] is None or rank.figures[0] >= _BUSY]
    together = kind not in _SERVING and (not used or median(used) >= _BUSY)
    for measure in (*OWN, *(ACTIVITY if together else ())):
        of = works if measure in OWN else ranks
        far = _far(measure, of, limits)
        if len(far) <= len(of) * _MOST:
            for uuid, words in far.items():
                found.setdefault(uuid, []).append(words)
    return {uuid: ", ".join(words) for uuid, words in found.items()}


def _far(measure: Measure, ranks: Sequence[Rank], limits: Limits) -> dict[str, str]:
    """The ranks that are outliers by one measure, and its words."""
    known = [(rank.uuid, value) for rank in ranks if (value := rank.figures[measure.figure]) is not None]
    if len(known) <= limits.peers:
        return {}
    middle = median([value for _, value in known])
    deviation = _TO_DEVIATION * median([abs(value - middle) for _, value in known])
    least = max(limits.deviations * deviation, measure.least, measure.share * middle)
    others = f"its peers {measure.words.format(middle * measure.scale)}"
    return {
        uuid: f"{measure.words.format(value * measure.scale)} ({others})"
        for uuid, value in known
        if abs(value - middle) > least and (value - middle) * measure.side >= 0
    }


def _alert(group: AlertGroup, pattern: Alert, node: str, rank: Rank, suspect: Suspect) -> Alert:
    """The alert of one rank that begins to lag."""
    labels = {**pattern.labels, "k8s_node_name": node, "gpu_uuid": rank.uuid}
    if rank.index is not None:
        labels["gpu_index"] = str(rank.index)
    if "k8s_pod_name" in labels:
        labels["k8s_pod_name"] = rank.pod
    return _replace(
        pattern,
        node=node,
        fingerprint=fingerprint(pattern.name, group.cluster, node, rank.uuid),
        starts_at=time(suspect.starts_ms or 0),
        value=((suspect.starts_ms or 0) // STEP_MS * STEP_MS - suspect.since_ms) / 1000,
        labels=labels,
        annotations={
            **pattern.annotations,
            "evidence": suspect.evidence,
            "since": f"{time(suspect.since_ms):%Y-%m-%dT%H:%M:%SZ}",
        },
    )


def _ended(group: AlertGroup, suspect: Suspect, uuid: str, at_ms: int, because: str) -> list[Alert]:
    """The end of the alert of a rank, if it had one."""
    mine = next((one for one in group.members if one.gpu.uuid == uuid and one.ended_ms is None), None)
    if suspect.starts_ms is None or mine is None or group.alert is None:
        return []
    labels = {"gpu_uuid": uuid, "gpu_index": str(mine.gpu.index)}
    return [
        _replace(
            group.alert, state="resolved", node=suspect.node, fingerprint=mine.fingerprint, revision=0, gpus=(),
            starts_at=time(suspect.starts_ms), ends_at=time(max(at_ms, suspect.starts_ms)), value=0.0,
            labels={**group.alert.labels, **labels}, held=None, idle=None, resolved_because=because,
        )
    ]  # fmt: skip
