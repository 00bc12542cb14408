"""The join of one node: samples wait for the snapshot that they name, and are given its holders.

In: the node's samples, snapshots and workloads in the order of their logs, and what the reader learns about time and
offsets. Out: attributed samples, in the order of the samples. State: one immutable :class:`NodeState` a node.
Pure: no clock, no network, no log. Times called ``_s`` are seconds of the reader's monotonic clock.

A sample names the snapshot in force by number, within one run of its producer, so no clock is compared. It waits until
that snapshot is there, or until it is certain that it never comes: the allocations partition has been read to an end
that was asked of the broker at least ``grace`` after the sample was read. A node that waited in vain once, or holds too
many, is not made to wait that long again: any end asked after the sample was read will do, because a snapshot is
acknowledged before the first sample that names it. The snapshots that a sample's events name are waited for alike.

Then it waits until the workloads have been read far enough; :mod:`streams.attribution.naming` has the rule.

A pod that a snapshot names holds nothing if gpu.workloads says that it ended long before the sample, and if no pod of
that name may still run: kubelets go on listing pods that ended until their devices are needed again. Nor does a pod
hold what it has by a claim for administration, as monitoring does.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from streams.attribution.events import Then, attributed_events, named_snapshots
from streams.attribution.evidence import PodOf, observe, shown
from streams.attribution.holders import hold
from streams.attribution.naming import Listing, Meant, Unread, When, listing, meant
from streams.attribution.split import split
from streams.attribution.state import (
    NEW,
    AllocationsRead,
    Committed,
    Forget,
    Joined,
    Mark,
    Memo,
    NodeState,
    ReadSample,
    Record,
    Workloads,
    WorkloadsRead,
    marked,
    pruned,
)
from streams.attribution.workloads import PodName, learn
from topics.allocations import Allocations, Claim, Container
from topics.attributed import AttributedDevice, AttributedSample, Attribution
from topics.samples import Device, Sample

__all__ = [
    "MAX_HELD",
    "NEW",
    "AllocationsRead",
    "Committed",
    "Forget",
    "Joined",
    "Mark",
    "NodeState",
    "ReadSample",
    "Record",
    "Workloads",
    "WorkloadsRead",
    "step",
    "wants_end",
]

MAX_HELD = 64
"""How many samples a node may hold before the end of its allocations is asked at once."""

_RUNS = 8
_replace = msgspec.structs.replace


def step(state: NodeState, record: Record, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """The state after a record, and the samples that it lets go."""
    if isinstance(record, ReadSample):
        runs = state.sample_runs
        state = _replace(
            state,
            held=(*state.held, record),
            sample_runs=runs if (run_id := record.sample.run_id) in runs else (*runs, run_id)[-_RUNS:],
            workloads_read_ms=max(state.workloads_read_ms, record.workloads_read_ms),
        )
        if len(state.held) > MAX_HELD and not state.impatient and not _has_snapshots(state, state.held[0].sample):
            state = _replace(state, impatient=True)
        return _release(state, grace_s)
    if isinstance(record, Allocations):
        return _release(_with_snapshot(state, record), grace_s)
    if isinstance(record, Workloads):
        # What was logged before the record has been read; another one may be logged in the same millisecond.
        read_ms = max(state.workloads_read_ms, record.logged_ms - 1)
        workloads = learn(state.workloads, record.record, record.logged_ms)
        return _release(_replace(state, workloads=workloads, workloads_read_ms=read_ms), grace_s)
    if isinstance(record, AllocationsRead):
        read_s = max(state.allocations_read_s, record.asked_s)
        return _release(_replace(state, allocations_read_s=read_s), grace_s)
    if isinstance(record, WorkloadsRead):
        read_ms = max(state.workloads_read_ms, record.logged_ms)
        return _release(_replace(state, workloads_read_ms=read_ms), grace_s)
    if isinstance(record, Committed):
        return pruned(state, record.offset), []
    return _replace(state, held=(), marks=(), wanted_ms=None), []


def wants_end(state: NodeState, now_s: float, grace_s: float) -> bool:
    """Whether the end of the node's allocations has to be asked for its samples to go on."""
    if not state.held:
        return False
    head = state.held[0]
    wait_s = 0.0 if state.impatient else grace_s
    return not _has_snapshots(state, head.sample) and now_s >= head.read_s + wait_s > state.allocations_read_s


# -- what arrives


def _with_snapshot(state: NodeState, snapshot: Allocations) -> NodeState:
    """The first record of a snapshot counts: it is sent again unchanged."""
    key = (snapshot.run_id, snapshot.seq)
    if key in state.snapshots:
        return _replace(state, impatient=False) if state.impatient else state
    runs = state.snapshot_runs
    before = _latest(state, snapshot.run_id, below=snapshot.seq)
    if before is None and snapshot.run_id not in runs and runs:
        before = _latest(state, runs[-1])
    return _replace(
        state,
        snapshots={**state.snapshots, key: listing(snapshot, before)},
        snapshot_runs=runs if snapshot.run_id in runs else (*runs, snapshot.run_id),
        impatient=False,
    )


# -- what may go


def _release(state: NodeState, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """Let go the samples at the head that wait for nothing more."""
    out: list[Joined] = []
    wanted_ms: int | None = None
    while state.held:
        head = state.held[0]
        if not _has_snapshots(state, head.sample):
            wait_s = 0.0 if state.impatient else grace_s
            if state.allocations_read_s < head.read_s + wait_s:
                break  # the allocations are not yet read far enough to know that the snapshot never comes
            state = _replace(state, impatient=True)
        now = _place(state, head, head.sample.allocations_seq, head.sample.ts_ms)
        before = {seq: _place(state, head, seq, at_ms) for seq, at_ms in named_snapshots(head.sample).items()}
        known = {seq: place for seq, place in before.items() if isinstance(place, _Place)}
        if isinstance(now, Unread) or len(known) < len(before):
            wanted_ms = max([place.until_ms for place in (now, *before.values()) if isinstance(place, Unread)])
            break
        state, joined = _joined(state, head, now, known)
        out.append(joined)
        named = now.named
        given = (named.snapshot.run_id, named.snapshot.seq) if named else None
        state = _replace(state, held=state.held[1:], marks=marked(state.marks, head, given))
    return (state if state.wanted_ms == wanted_ms else _replace(state, wanted_ms=wanted_ms)), out


def _has_snapshots(state: NodeState, sample: Sample) -> bool:
    """Whether all snapshots are there that a sample and its events name."""
    own = sample.allocations_seq
    if own is not None and (sample.run_id, own) not in state.snapshots:
        return False
    return all((sample.run_id, seq) in state.snapshots for seq in named_snapshots(sample))


class _Place(NamedTuple):
    """A snapshot that a tick or its events name, how sure it is, and its pods as of a time."""

    ts_ms: int
    named: Listing | None
    attribution: Attribution
    found: Meant


def _place(state: NodeState, tick: ReadSample, seq: int | None, ts_ms: int) -> _Place | Unread:
    """The snapshot that a tick names by its ``seq``. The tick's processes count for its own snapshot only."""
    sample = tick.sample
    named, attribution = _snapshot(state, sample, seq)
    uids = {uid for d in sample.devices for uid in shown(d) if uid} if seq == sample.allocations_seq else set[str]()
    when = When(ts_ms, tick.logged_ms, state.workloads_read_ms)
    found = meant(state.workloads, named, uids, when, state.memo.found if state.memo else None)
    return found if isinstance(found, Unread) else _Place(ts_ms, named, attribution, found)


def _snapshot(state: NodeState, sample: Sample, seq: int | None) -> tuple[Listing | None, Attribution]:
    """The snapshot that a sample names by its ``seq``, else the last one known before it."""
    if seq is None:
        return None, "none"
    named = state.snapshots.get((sample.run_id, seq))
    if named is not None:
        return named, "exact"
    known = _latest(state, sample.run_id, below=seq)
    if known is None and (run_id := _run_before(state, sample)) is not None:
        known = _latest(state, run_id)
    return (known, "late") if known else (None, "none")


def _latest(state: NodeState, run_id: int, *, below: int | None = None) -> Listing | None:
    seqs = [seq for run, seq in state.snapshots if run == run_id and (below is None or seq < below)]
    return state.snapshots[run_id, max(seqs)] if seqs else None


def _run_before(state: NodeState, sample: Sample) -> int | None:
    """The last run with a snapshot that came before a sample's.

    If no snapshot of the sample's own run is known, the snapshots may have been read far ahead. Then only those runs
    count that had samples before, or whose snapshots are of an earlier time.
    """
    runs = state.snapshot_runs
    if sample.run_id in runs:
        before = runs[: runs.index(sample.run_id)]
        return before[-1] if before else None
    sampled = state.sample_runs[: state.sample_runs.index(sample.run_id)]
    earlier = {run for (run, _), known in state.snapshots.items() if known.snapshot.ts_ms <= sample.ts_ms}
    return next((run for run in reversed(runs) if run in sampled or run in earlier), None)


# -- what goes


def _joined(state: NodeState, tick: ReadSample, now: _Place, before: Mapping[int, _Place]) -> tuple[NodeState, Joined]:
    sample, labels = tick.sample, now.found.node_labels
    by_snapshot = {
        seq: Then(_memo(None, place, place.named, sample).held.holders if place.named else {}, place.attribution)
        for seq, place in before.items()
    }
    if now.named is None:
        return state, Joined(_attributed(tick, Then({}, now.attribution), labels, None, by_snapshot), ())
    memo = _memo(state.memo, now, now.named, sample)
    then = Then(memo.held.holders, now.attribution)
    shown_pods = now.found.shown
    out = _attributed(tick, then, labels, None if shown_pods is None else shown_pods.get, by_snapshot)
    if memo is state.memo:
        return state, Joined(out, ())
    worked_out = state.memo is None or memo.held is not state.memo.held
    return _replace(state, memo=memo), Joined(out, memo.held.unknown_ids if worked_out else ())


def _memo(last: Memo | None, place: _Place, named: Listing, sample: Sample) -> Memo:
    """Who holds the devices of a sample by a snapshot: the last answer, where all that it depends on is the same."""
    found, snapshot = place.found, named.snapshot
    inventory = tuple([(d.uuid, d.index, d.minor, d.mig) for d in sample.devices])
    if last is not None and last.snapshot is snapshot and last.inventory == inventory:
        if last.found is found:
            return last
        if _same_pods(last.found, found):
            return Memo(snapshot, inventory, found, last.held)
    held = hold(_without(snapshot, found.over, found.admin), sample.devices, found.pods, found.dra)
    return Memo(snapshot, inventory, found, held)


def _same_pods(a: Meant, b: Meant) -> bool:
    """Whether two answers give the devices the same holders."""
    return (
        a.dra is b.dra
        and a.admin is b.admin
        and a.over == b.over
        and a.pods.keys() == b.pods.keys()
        and all(b.pods[name] is pod for name, pod in a.pods.items())
    )


def _without(snapshot: Allocations, over: frozenset[PodName], admin: frozenset[Claim]) -> Allocations:
    """A snapshot without the containers of pods that were over, and without the claims that only look at a device."""
    if not over and not admin:
        return snapshot
    containers: list[Container] = []
    for container in snapshot.containers:
        if (container.namespace, container.pod) not in over:
            claims = tuple(claim for claim in container.claims if claim not in admin)
            unchanged = len(claims) == len(container.claims)
            containers.append(container if unchanged else _replace(container, claims=claims))
    return _replace(snapshot, containers=tuple(containers))


def _attributed(
    tick: ReadSample,
    now: Then,
    node_labels: dict[str, str],
    pod_of: PodOf | None,
    by_snapshot: Mapping[int, Then],
) -> AttributedSample:
    sample = tick.sample
    return AttributedSample(
        schema=1,
        cluster=sample.cluster,
        node=sample.node,
        run_id=sample.run_id,
        seq=sample.seq,
        ts_ms=sample.ts_ms,
        allocations_seq=sample.allocations_seq,
        offset=tick.offset,
        attribution=now.attribution,
        node_labels=node_labels,
        devices=tuple([_device(device, now, pod_of, by_snapshot) for device in sample.devices]),
    )


def _device(d: Device, now: Then, pod_of: PodOf | None, by_snapshot: Mapping[int, Then]) -> AttributedDevice:
    """The device with its holders, those that its processes show included, and their parts of it."""
    all_holders, conflict = observe(d, now.holders.get(d.uuid, ()), pod_of)
    shared = split(d, all_holders)
    events = attributed_events(d.events, d.uuid, now, by_snapshot)
    return AttributedDevice(
        d.uuid, d.index, d.vendor, d.model, d.pci_bus_id, d.minor, d.state, d.mig, d.metrics, d.processes, d.jobs,
        events, d.info, d.xids, d.read_ms, shared.holders, shared.unattributed, shared.scaled, conflict,
    )  # fmt: skip
