"""What the records mean, worked out the slow way from complete logs: every question looks at everything.

Nothing here is shared with the join: no state, no pruning, no order of arrival but that of each log.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from topics.allocations import Allocations
from topics.attributed import AttributedSample, Holder
from topics.samples import Device, Sample
from topics.workloads import NodeWorkloads, Pod

TOLERANCE_MS = 2_000
LISTED_MS = 10_000


class Holding(NamedTuple):
    """A container on a device; the pod's uid and labels where the pod is known."""

    namespace: str
    pod: str
    container: str | None
    uid: str | None
    labels: tuple[tuple[str, str], ...]
    observed: bool = False


class Answer(NamedTuple):
    """What a sample is given."""

    attribution: str
    node_labels: dict[str, str]
    holders: dict[str, tuple[Holding, ...]]
    conflicts: dict[str, str | None]
    events: tuple[tuple[str, tuple[Holding, ...]], ...] = ()

    def without_labels(self) -> "Answer":
        """What does not rest on the workloads."""
        given = {uuid: [h for h in held if not h.observed] for uuid, held in self.holders.items()}
        bare = {uuid: _bare(held) for uuid, held in given.items()}
        events = tuple((rests_on, _bare(held)) for rests_on, held in self.events)
        return Answer(self.attribution, {}, bare, {}, events)


def _bare(held: Iterable[Holding]) -> tuple[Holding, ...]:
    return tuple(h._replace(uid=None, labels=()) for h in held if not h.observed)


class Logs(NamedTuple):
    """The complete logs of a partition; ``runs`` are each node's runs in the order in which they ran."""

    samples: Sequence[Sample]
    allocations: Sequence[Allocations]
    workloads: Sequence[NodeWorkloads]
    runs: dict[str, list[int]]


def answer(logs: Logs, sample: Sample) -> Answer:
    """What the sample must be given."""
    snapshots = [a for a in logs.allocations if a.node == sample.node]
    workloads = accepted([w for w in logs.workloads if w.node == sample.node])
    attribution, snapshot = _snapshot(snapshots, sample, sample.allocations_seq, logs.runs[sample.node])
    holders = _held(workloads, snapshot, sample, sample.ts_ms)
    conflicts: dict[str, str | None] = {device.uuid: None for device in sample.devices}
    for device in sample.devices if snapshot else ():
        conflicts[device.uuid] = _conflict(workloads, device, holders[device.uuid], sample.ts_ms)
        holders[device.uuid] += _observed(workloads, device, holders[device.uuid], sample.ts_ms)
    events = []
    for device in sample.devices:
        for event in device.events or ():
            rests_on, held = attribution, holders[device.uuid]
            if event.allocations_seq not in (None, sample.allocations_seq):
                rests_on, before = _snapshot(snapshots, sample, event.allocations_seq, logs.runs[sample.node])
                own = _held(workloads, before, sample, _as_of_ms(sample, event.allocations_seq))[device.uuid]
                given_now = [h[:4] for h in held if not h.observed]
                held = held if [h[:4] for h in own] == given_now else own
            events.append((rests_on, held))
    return Answer(attribution, node_labels(workloads, sample.ts_ms), holders, conflicts, tuple(events))


def _as_of_ms(sample: Sample, named: int | None) -> int:
    """The time of the last event that names a snapshot: within the minute before the tick."""
    times = [e.ts_ms or 0 for d in sample.devices for e in d.events or () if e.allocations_seq == named]
    return max(sample.ts_ms - 60_000, min(sample.ts_ms, max(times)))


def _held(
    workloads: Sequence[NodeWorkloads], snapshot: Allocations | None, sample: Sample, ts_ms: int
) -> dict[str, tuple[Holding, ...]]:
    """Who holds each device of a sample by a snapshot, as of a time."""
    holders: dict[str, tuple[Holding, ...]] = {device.uuid: () for device in sample.devices}
    for c in snapshot.containers if snapshot else ():
        if is_over(workloads, (c.namespace, c.pod), ts_ms):
            continue
        found = pod_at(workloads, (c.namespace, c.pod), ts_ms)
        holding = Holding(c.namespace, c.pod, c.container, found.uid if found else None, _labels(found))
        for uuid in {device_id.split("::")[0] for device_id in c.device_ids} & holders.keys():
            if not any(held[:3] == holding[:3] for held in holders[uuid]):
                holders[uuid] = (*holders[uuid], holding)
    return holders


def _shown(device: Device) -> set[str | None]:
    return {p.pod_uid for p in device.processes or () if p.memory_used_bytes and p.service != "mps"}


def _conflict(workloads: Sequence[NodeWorkloads], device: Device, held: Sequence[Holding], ts_ms: int) -> str | None:
    """What the processes on a device say otherwise than the kubelet."""
    if _observed(workloads, device, held, ts_ms):
        return "unallocated_process"
    unknown = [uid for uid in _shown(device) if uid and pod_of(workloads, uid, ts_ms) is None]
    if workloads and unknown and all(h.uid for h in held):
        return "unallocated_process"
    return "no_pod" if held and None in _shown(device) else None


def _observed(
    workloads: Sequence[NodeWorkloads], device: Device, held: Sequence[Holding], ts_ms: int
) -> tuple[Holding, ...]:
    """The pods that only their processes show on a device, by name."""
    uids = _shown(device) - {h.uid for h in held}
    pods = [pod for uid in uids if uid and (pod := pod_of(workloads, uid, ts_ms)) is not None]
    nameless = {h[:2] for h in held if h.uid is None}
    strange = [p for p in pods if (p.namespace, p.name) not in nameless]
    rows = [Holding(p.namespace, p.name, None, p.uid, _labels(p), observed=True) for p in strange]
    return tuple(sorted(rows, key=lambda row: (row.namespace, row.pod, row.uid or "")))


def _labels(pod: Pod | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(pod.labels.items())) if pod else ()


def given(out: AttributedSample) -> Answer:
    """What an attributed sample was given."""
    holders = {device.uuid: _holdings(device.holders) for device in out.devices}
    events = tuple(
        (
            event.attribution or out.attribution,
            holders[device.uuid] if event.holders is None else _holdings(event.holders),
        )
        for device in out.devices
        for event in device.events or ()
    )
    conflicts = {device.uuid: device.conflict for device in out.devices}
    return Answer(out.attribution, out.node_labels, holders, conflicts, events)


def _holdings(holders: Iterable[Holder]) -> tuple[Holding, ...]:
    return tuple(
        Holding(h.namespace, h.pod, h.container, h.pod_uid, tuple(sorted(h.labels.items())), h.observed)
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
    own = by_run[sample.run_id]
    if named in own:
        return "exact", own[named]
    below = [seq for seq in own if seq < named]
    if below:
        return "late", own[max(below)]
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


def pod_at(records: Sequence[NodeWorkloads], name: tuple[str, str], ts_ms: int) -> Pod | None:
    """The pod of that name at a time: of those that ran within the tolerance the nearest, then the youngest."""
    best: tuple[int, int, str] | None = None
    for uid in {p.uid for r in records for p in r.pods if (p.namespace, p.name) == name}:
        away_ms = _away_ms(records, uid, ts_ms)
        if away_ms <= TOLERANCE_MS:
            rank = (away_ms, -(_life(records, uid)[0] or 0), uid)
            best = min(best, rank) if best else rank
    return pod_of(records, best[2], ts_ms) if best else None


def is_over(records: Sequence[NodeWorkloads], name: tuple[str, str], ts_ms: int) -> bool:
    """Whether a pod of that name was told to have ended more than 10 s before a time, and none began since."""
    uids = {p.uid for r in records for p in r.pods if (p.namespace, p.name) == name}
    told = [[p.ended_ms for r in records for p in r.pods if p.uid == uid][-1] for uid in uids]
    lives = [_life(records, uid) for uid in uids]
    begun = [ended for started, ended in lives if started is None or started <= ts_ms + TOLERANCE_MS]
    over = any(end is not None and end + LISTED_MS < ts_ms for end in told)
    return over and all(end is not None and end + LISTED_MS < ts_ms for end in begun)


def pod_of(records: Sequence[NodeWorkloads], uid: str, ts_ms: int) -> Pod | None:
    """The pod of that uid, where it ran within the tolerance of a time, as it was then."""
    having = [r for r in records if any(p.uid == uid for p in r.pods)]
    if not having or _away_ms(records, uid, ts_ms) > TOLERANCE_MS:
        return None
    return next(p for p in _version(having, ts_ms).pods if p.uid == uid)


def _away_ms(records: Sequence[NodeWorkloads], uid: str, ts_ms: int) -> int:
    """By how much a time lies outside of a pod's life."""
    started, ended = _life(records, uid)
    before = max(0, started - ts_ms) if started is not None else 0
    after = max(0, ts_ms - ended + 1) if ended is not None else 0
    return max(before, after)


def _life(records: Sequence[NodeWorkloads], uid: str) -> tuple[int | None, int | None]:
    """When a pod ran: it ended when its last record says, or by the first record after that does not have it."""
    having = [(i, p) for i, r in enumerate(records) for p in r.pods if p.uid == uid]
    i, last = having[-1]
    starts = [p.started_ms for _, p in having if p.started_ms is not None]
    ended = last.ended_ms
    if ended is None and i + 1 < len(records):
        ended = records[i + 1].ts_ms
    return (starts[-1] if starts else None), ended


def _version(records: Sequence[NodeWorkloads], ts_ms: int) -> NodeWorkloads:
    """The one with the greatest time at or before, else the earliest; of several with one time the last."""
    before = [r for r in records if r.ts_ms <= ts_ms]
    return max(enumerate(before), key=lambda ir: (ir[1].ts_ms, ir[0]))[1] if before else records[0]
