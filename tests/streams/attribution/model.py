"""The meaning of the records, computed the slow way from complete logs: every question reads all records.

Nothing here is shared with the join: no state, no pruning, no order of arrival but that of each log.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from topics.allocations import Allocations
from topics.attributed import AttributedSample, Holder
from topics.samples import Device, Sample
from topics.workloads import NodeWorkloads, Pod

TOLERANCE_MS = 2_000
LISTED_MS = 10_000
NEW_MS = 10_000
GONE_MS = 300_000
ENDED, UNKNOWN = "over", "unknown"


class Holding(NamedTuple):
    """A container on a device; the pod's uid and labels where the pod is known."""

    namespace: str
    pod: str
    container: str | None
    uid: str | None
    labels: tuple[tuple[str, str], ...]
    observed: bool = False
    unknown: bool = False


class Answer(NamedTuple):
    """The attribution of a sample."""

    attribution: str
    node_labels: dict[str, str]
    holders: dict[str, tuple[Holding, ...]]
    conflicts: dict[str, str | None]
    events: tuple[tuple[str, tuple[Holding, ...]], ...] = ()


class Logs(NamedTuple):
    """The complete logs of a partition, when each sample and each record of the workloads was logged, and each node's
    runs in the order in which they ran."""

    samples: Sequence[Sample]
    allocations: Sequence[Allocations]
    workloads: Sequence[NodeWorkloads]
    runs: dict[str, list[int]]
    samples_logged_ms: Sequence[int]
    workloads_logged_ms: Sequence[int]

    def workloads_by(self, node: str, until_ms: int) -> list[NodeWorkloads]:
        """The records of a node that were logged until then."""
        return [record for at_ms, record in self.logged(node) if at_ms <= until_ms]

    def logged(self, node: str) -> list[tuple[int, NodeWorkloads]]:
        """The records of a node that count, with their log times. Each is logged 1 ms after the last one or later."""
        logged: list[tuple[int, NodeWorkloads]] = []
        for at_ms, record in zip(self.workloads_logged_ms, self.workloads, strict=True):
            counted = [known for _, known in logged]
            if record.node == node and len(accepted([*counted, record])) > len(counted):
                logged.append((max(at_ms, logged[-1][0] + 1 if logged else 0), record))
        return logged


def answer(logs: Logs, offset: int) -> Answer:
    """The attribution that the join must give to a sample."""
    sample, logged_ms = logs.samples[offset], logs.samples_logged_ms[offset]
    snapshots = [a for a in logs.allocations if a.node == sample.node]
    later_ms = [ms for ms, _ in logs.logged(sample.node) if abs(ms - logged_ms) <= 2_000]
    versions = [logs.workloads_by(sample.node, ms) for ms in (logged_ms - 2_000, *later_ms)]
    attribution, snapshot = _snapshot(snapshots, sample, sample.allocations_seq, logs.runs[sample.node])
    listed = {(c.namespace, c.pod) for c in snapshot.containers} if snapshot else set()
    uids = _uids(sample) if versions[0] else set()
    by_uid = {uid: first_version_of(uid, versions, sample.ts_ms, listed) for uid in uids}
    holders = _holdings_of(versions, snapshots, snapshot, sample, sample.ts_ms, by_uid)
    conflicts: dict[str, str | None] = {device.uuid: None for device in sample.devices}
    for device in sample.devices if snapshot else ():
        conflicts[device.uuid] = _conflict(bool(versions[0]), by_uid, device, holders[device.uuid])
        holders[device.uuid] += _observed(by_uid, device, holders[device.uuid])
    events = []
    for device in sample.devices:
        for event in device.events or ():
            rests_on, holding = attribution, holders[device.uuid]
            if event.allocations_seq not in (None, sample.allocations_seq):
                rests_on, before = _snapshot(snapshots, sample, event.allocations_seq, logs.runs[sample.node])
                as_of_ms = _as_of_ms(sample, event.allocations_seq)
                own_holdings = _holdings_of(versions, snapshots, before, sample, as_of_ms, {})[device.uuid]
                given_now = [h[:4] for h in holding if not h.observed]
                holding = holding if [h[:4] for h in own_holdings] == given_now else own_holdings
            events.append((rests_on, holding))
    return Answer(attribution, node_labels(versions[0], sample.ts_ms), holders, conflicts, tuple(events))


def _as_of_ms(sample: Sample, named: int | None) -> int:
    """The time of the last event that names a snapshot: within the minute before the tick, or 10 s after it."""
    times = [e.ts_ms or 0 for d in sample.devices for e in d.events or () if e.allocations_seq == named]
    return max(sample.ts_ms - 60_000, min(sample.ts_ms + 10_000, max(times)))


def _holdings_of(
    versions: Sequence[list[NodeWorkloads]],
    snapshots: Sequence[Allocations],
    snapshot: Allocations | None,
    sample: Sample,
    ts_ms: int,
    by_uid: dict[str, Pod | None],
) -> dict[str, tuple[Holding, ...]]:
    """Who holds each device of a sample by a snapshot, as of a time. Their uids are added to those that are known."""
    holders: dict[str, tuple[Holding, ...]] = {device.uuid: () for device in sample.devices}
    names = {(c.namespace, c.pod) for c in snapshot.containers} if snapshot and versions[0] else set()
    pods = {name: _pod_meant(name, snapshots, snapshot, by_uid, versions, ts_ms) for name in names}
    by_uid |= {pod.uid: pod for pod in pods.values() if isinstance(pod, Pod)}
    for c in snapshot.containers if snapshot else ():
        name = (c.namespace, c.pod)
        match = pods.get(name)
        if match == ENDED:
            continue
        pod = match if isinstance(match, Pod) else None
        holding = Holding(*name, c.container, pod.uid if pod else None, _labels(pod), unknown=match == UNKNOWN)
        for uuid in {device_id.split("::")[0] for device_id in c.device_ids} & holders.keys():
            if not any(other[:3] == holding[:3] for other in holders[uuid]):
                holders[uuid] = (*holders[uuid], holding)
    return holders


def _pod_meant(
    name: tuple[str, str],
    snapshots: Sequence[Allocations],
    snapshot: Allocations | None,
    by_uid: dict[str, Pod | None],
    versions: Sequence[list[NodeWorkloads]],
    ts_ms: int,
) -> Pod | str:
    """The pod that a name means, by the records that arrived in time, then by those that arrived a little later."""
    appeared_ms, missing_ms, was_alone = _appeared(name, snapshots, snapshot)
    new = appeared_ms is not None and ts_ms - appeared_ms < NEW_MS
    listed_since_ms, missing_if_new_ms = (appeared_ms, missing_ms) if new else (None, None)
    lately = appeared_ms is not None and ts_ms - appeared_ms < GONE_MS
    missing_lately_ms = missing_ms if lately and not was_alone else None
    by_time = pod_at(versions[0], name, ts_ms, new=new, missing_ms=missing_if_new_ms)
    if by_time is not None and by_time.uid in by_uid:
        return by_time
    by_process = [pod for pod in by_uid.values() if pod and (pod.namespace, pod.name) == name]
    if by_process:
        return max(by_process, key=lambda pod: (pod.started_ms or 0, pod.uid))
    if by_time is None and not new and has_ended(versions[0], name, ts_ms, missing_lately_ms):
        return ENDED
    for records in versions:
        if (pod := pod_at(records, name, ts_ms, new=new, missing_ms=missing_if_new_ms)) is not None:
            return pod
    if (pod := pod_at(versions[0], name, ts_ms, listed_since_ms=listed_since_ms)) is not None:
        return pod
    return ENDED if has_ended(versions[0], name, ts_ms, missing_lately_ms) else UNKNOWN


def _appeared(
    name: tuple[str, str], snapshots: Sequence[Allocations], snapshot: Allocations | None
) -> tuple[int | None, int | None, bool]:
    """When a name appeared in the snapshots (None: always there), since when it had been missing (None: never), and
    whether it was the only name when it appeared."""
    first = {(a.run_id, a.seq): a for a in reversed(snapshots)}
    chain = [a for i, a in enumerate(snapshots) if a is first[a.run_id, a.seq] and a not in snapshots[:i]]
    appeared_ms: int | None = None
    missing_ms: int | None = None
    came_back_ms: int | None = None
    was_alone = False
    for i, current in enumerate(chain):
        is_listed = any((c.namespace, c.pod) == name for c in current.containers)
        was_listed = i > 0 and any((c.namespace, c.pod) == name for c in chain[i - 1].containers)
        if i and is_listed and not was_listed:
            appeared_ms, came_back_ms, missing_ms, was_alone = (
                current.ts_ms,
                missing_ms,
                None,
                not chain[i - 1].containers,
            )
        elif i and was_listed and not is_listed:
            missing_ms = current.ts_ms
        if current is snapshot or (snapshot and (current.run_id, current.seq) == (snapshot.run_id, snapshot.seq)):
            break
    return appeared_ms, came_back_ms, was_alone


def _uids(sample: Sample) -> set[str]:
    return {uid for device in sample.devices for uid in _process_uids(device) if uid is not None}


def first_version_of(
    uid: str, versions: Sequence[list[NodeWorkloads]], ts_ms: int, listed: Collection[tuple[str, str]]
) -> Pod | None:
    """The pod of a uid, by the first records that have it."""
    for records in versions:
        if any(pod.uid == uid for record in records for pod in record.pods):
            return pod_of(records, uid, ts_ms, listed)
    return None


def _process_uids(device: Device) -> set[str | None]:
    return {p.pod_uid for p in device.processes or () if p.memory_used_bytes and p.service != "mps"}


def _conflict(is_known: bool, by_uid: dict[str, Pod | None], device: Device, held: Sequence[Holding]) -> str | None:
    """The conflict between the processes on a device and what the kubelet reports."""
    if _observed(by_uid, device, held):
        return "unallocated_process"
    named = {h.uid for h in held}
    unknown = [uid for uid in _process_uids(device) - named if uid and by_uid.get(uid) is None]
    if is_known and unknown and all(h.uid for h in held):
        return "unallocated_process"
    return "no_pod" if held and None in _process_uids(device) else None


def _observed(by_uid: dict[str, Pod | None], device: Device, held: Sequence[Holding]) -> tuple[Holding, ...]:
    """The pods that only their processes show on a device, by name."""
    uids = _process_uids(device) - {h.uid for h in held}
    pods = [pod for uid in uids if uid and (pod := by_uid.get(uid)) is not None]
    nameless = {h[:2] for h in held if h.uid is None}
    strange = [p for p in pods if (p.namespace, p.name) not in nameless]
    rows = [Holding(p.namespace, p.name, None, p.uid, _labels(p), observed=True) for p in strange]
    return tuple(sorted(rows, key=lambda row: (row.namespace, row.pod, row.uid or "")))


def _labels(pod: Pod | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pod.labels.items())) if pod else ()


def answer_of(sample: AttributedSample) -> Answer:
    """The attribution in a sample that the join has written."""
    holders = {device.uuid: _holdings(device.holders) for device in sample.devices}
    events = tuple(
        (
            event.attribution or sample.attribution,
            holders[device.uuid] if event.holders is None else _holdings(event.holders),
        )
        for device in sample.devices
        for event in device.events or ()
    )
    conflicts = {device.uuid: device.conflict for device in sample.devices}
    return Answer(sample.attribution, sample.node_labels, holders, conflicts, events)


def _holdings(holders: Iterable[Holder]) -> tuple[Holding, ...]:
    return tuple(
        Holding(h.namespace, h.pod, h.container, h.pod_uid, tuple(sorted(h.labels.items())), h.observed, h.pod_unknown)
        for h in holders
    )


def _snapshot(
    snapshots: Iterable[Allocations], sample: Sample, named: int | None, runs: Sequence[int]
) -> tuple[str, Allocations | None]:
    if named is None:
        return "none", None
    by_run: dict[int, dict[int, Allocations]] = {run: {} for run in runs}
    for s in snapshots:
        by_run[s.run_id][s.seq] = s
    chain = by_run[sample.run_id]
    if named in chain:
        return "exact", chain[named]
    below = [seq for seq in chain if seq < named]
    if below:
        return "late", chain[max(below)]
    for run in reversed(runs[: runs.index(sample.run_id)]):
        if by_run[run]:
            return "late", by_run[run][max(by_run[run])]
    return "none", None


def accepted(records: Iterable[NodeWorkloads]) -> list[NodeWorkloads]:
    """The records that count: none of an older epoch, none older within its epoch."""
    counted: list[NodeWorkloads] = []
    for record in records:
        if not counted or (record.epoch, record.seq) > (counted[-1].epoch, counted[-1].seq):
            counted.append(record)
    return counted


def node_labels(records: Sequence[NodeWorkloads], ts_ms: int) -> dict[str, str]:
    """The node's labels at a time."""
    return _version(records, ts_ms).node_labels if records else {}


def pod_at(
    records: Sequence[NodeWorkloads],
    name: tuple[str, str],
    ts_ms: int,
    *,
    new: bool = False,
    missing_ms: int | None = None,
    listed_since_ms: int | None = None,
) -> Pod | None:
    """The pod of that name at a time: of those that the kubelet may list the nearest, then the youngest; of a name that
    is new there, of those that run. A pod that ran before the name was missing is not the new one, nor is one that is
    reported to have ended before the name appeared."""
    ranked: list[tuple[int, int, str]] = []
    for uid, (started, lifetime_end_ms) in _without_overlaps(records, name).items():
        before = max(0, started - ts_ms) if started is not None else 0
        after = max(0, ts_ms - lifetime_end_ms + 1) if lifetime_end_ms is not None else 0
        may_be_listed = before <= TOLERANCE_MS and after - (not new) <= (TOLERANCE_MS if new else LISTED_MS)
        old = missing_ms is not None and started is not None and started + 999 + TOLERANCE_MS < missing_ms
        reported_end_ms = next(p.ended_ms for r in reversed(records) for p in r.pods if p.uid == uid)
        had_ended = (
            listed_since_ms is not None and reported_end_ms is not None and (lifetime_end_ms or 0) <= listed_since_ms
        )
        if may_be_listed and not old and not had_ended:
            ranked.append((max(before, after), -(started or 0), uid))
    return _version_of(records, min(ranked)[2], ts_ms) if ranked else None


def _without_overlaps(
    records: Sequence[NodeWorkloads], name: tuple[str, str]
) -> dict[str, tuple[int | None, int | None]]:
    """When each pod of a name ran: not before the previous one had ended, or a second after its own start."""
    uids = {p.uid for r in records for p in r.pods if (p.namespace, p.name) == name}
    lifetimes = {uid: _lifetime(records, uid) for uid in uids}
    seen_ms = {uid: next(r.ts_ms for r in records if any(p.uid == uid for p in r.pods)) for uid in uids}
    seen_ms |= {uid: min(seen_ms[uid], end) for uid, (_, end) in lifetimes.items() if end is not None}
    started_ms = {uid: seen_ms[uid] if started is None else started for uid, (started, _) in lifetimes.items()}
    order = sorted(uids, key=lambda uid: (started_ms[uid], seen_ms[uid], uid))
    for uid, following in itertools.pairwise(order):
        latest_ms, ended_ms = started_ms[following] + 999, lifetimes[uid][1]
        end = min(latest_ms, latest_ms if ended_ms is None else ended_ms)
        lifetimes[uid] = lifetimes[uid][0], end
        lifetimes[following] = max(started_ms[following], end), lifetimes[following][1]
    return lifetimes


def has_ended(
    records: Sequence[NodeWorkloads], name: tuple[str, str], ts_ms: int, missing_ms: int | None = None
) -> bool:
    """Whether a pod of that name is reported to have ended more than 10 s before a time, and none started since. A pod
    that ended at most 2 s after the name went missing from the snapshots is not the one that came back."""
    uids = {p.uid for r in records for p in r.pods if (p.namespace, p.name) == name}
    reported_ends = [[p.ended_ms for r in records for p in r.pods if p.uid == uid][-1] for uid in uids]
    lifetimes = [_lifetime(records, uid) for uid in uids]
    ends_of_started = [end for started, end in lifetimes if started is None or started <= ts_ms + TOLERANCE_MS]
    is_over = any(
        end is not None and end + LISTED_MS < ts_ms and (missing_ms is None or end > missing_ms + TOLERANCE_MS)
        for end in reported_ends
    )
    return is_over and all(end is not None and end + LISTED_MS < ts_ms for end in ends_of_started)


def pod_of(records: Sequence[NodeWorkloads], uid: str, ts_ms: int, listed: Collection[tuple[str, str]]) -> Pod | None:
    """The pod of that uid, as it was at a time: if it ran then, within the tolerance, or if its name is listed and it
    ended at most 10 s before."""
    pod = _version_of(records, uid, ts_ms)
    ran = _distance_ms(records, uid, ts_ms) <= TOLERANCE_MS
    started, end = _lifetime(records, uid)
    may_run = (started is None or started - ts_ms <= TOLERANCE_MS) and (end is None or ts_ms - end <= LISTED_MS)
    return pod if ran or ((pod.namespace, pod.name) in listed and may_run) else None


def _version_of(records: Sequence[NodeWorkloads], uid: str, ts_ms: int) -> Pod:
    """A known pod, in its version at a time."""
    having = [r for r in records if any(p.uid == uid for p in r.pods)]
    return next(p for p in _version(having, ts_ms).pods if p.uid == uid)


def _distance_ms(records: Sequence[NodeWorkloads], uid: str, ts_ms: int) -> int:
    """How far a time lies outside of a pod's life."""
    started, end = _lifetime(records, uid)
    before = max(0, started - ts_ms) if started is not None else 0
    after = max(0, ts_ms - end + 1) if end is not None else 0
    return max(before, after)


def _lifetime(records: Sequence[NodeWorkloads], uid: str) -> tuple[int | None, int | None]:
    """When a pod ran: it ended when its last record says, or by the first record after that does not have it."""
    having = [(i, p) for i, r in enumerate(records) for p in r.pods if p.uid == uid]
    i, last = having[-1]
    starts = [p.started_ms for _, p in having if p.started_ms is not None]
    end = last.ended_ms
    if end is None and i + 1 < len(records):
        end = records[i + 1].ts_ms
    return (starts[-1] if starts else None), end


def _version(records: Sequence[NodeWorkloads], ts_ms: int) -> NodeWorkloads:
    """The one with the greatest time at or before, else the earliest; of several with one time the last."""
    before = [r for r in records if r.ts_ms <= ts_ms]
    return max(enumerate(before), key=lambda ir: (ir[1].ts_ms, ir[0]))[1] if before else records[0]
