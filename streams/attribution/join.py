"""The join of one node: ticks wait for the snapshot that they name and for the workloads, and are given their holders.

In: the node's samples, snapshots and workloads in the order of their logs, and what the reader learns about time and
offsets. Out: attributed ticks, in the order of the samples. State: one immutable :class:`NodeState` per node. Pure: no
clock, no network, no log. Times called ``_s`` are seconds of the reader's monotonic clock, ``logged_ms`` is the log
time of a record, ``ts_ms`` the time in it.

A tick is **pending** for two reasons, one after the other:

1. It waits for the snapshots that it and its events name. They are named by number, within one run of the producer, so
   no clocks are compared. When the **grace** has passed since the sample was read, the broker is asked where the
   allocations end. If they have been read to that end and a snapshot is still missing, it never comes.
2. It waits for the **watermark** of the workloads: :mod:`streams.attribution.log_time` has the rule.

A node that waited in vain, or that has too many pending ticks, gets no grace until its next snapshot comes: the end of
the allocations is asked for at once. That is no guess either, because a snapshot is acknowledged by the broker before
the first sample that names it is sent.
"""

from collections.abc import Iterable

import msgspec

from streams.attribution.attribute import (
    EVENT_MS,
    Joined,
    Memo,
    ResolvedSnapshot,
    attribute,
    event_snapshots,
    event_span_ms,
    facts_of,
)
from streams.attribution.log_time import HORIZON_MS, IndexedSnapshot, LookupTime, Unresolved, index_snapshot, resolve
from streams.attribution.workloads import EMPTY, KnownWorkloads, add_record, forget_before
from topics.allocations import Allocations
from topics.attributed import Attribution
from topics.samples import Sample
from topics.workloads import NodeWorkloads

MAX_PENDING = 64  # if a node has more pending ticks, the end of its allocations is asked for at once
_MAX_RUNS = 8
_MARK_EVERY_MS = 10_000
_replace = msgspec.structs.replace
SnapshotId = tuple[int, int]  # a snapshot's run_id and seq


# -- what arrives


class PendingTick(msgspec.Struct, frozen=True):
    """A sample that was read: its offset, when it was read, when it was logged, and the watermark at that time."""

    sample: Sample
    offset: int
    read_s: float
    logged_ms: int
    watermark_ms: float


class LoggedWorkloads(msgspec.Struct, frozen=True):
    """A record of gpu.workloads that was read, and its log time, never less than that of the previous record."""

    record: NodeWorkloads
    logged_ms: int


class WatermarkRaised(msgspec.Struct, frozen=True):
    """All workloads of the partition have been read that were logged at or before a time."""

    ms: float


class AllocationsRead(msgspec.Struct, frozen=True):
    """The allocations have been read to the end that the broker was asked for at ``asked_s``."""

    asked_s: float


class Committed(msgspec.Struct, frozen=True):
    """Samples below ``offset`` are finished for good and will not be read again."""

    offset: int


class Forget(msgspec.Struct, frozen=True):
    """Drop the pending ticks; they are read again."""


Record = PendingTick | Allocations | LoggedWorkloads | AllocationsRead | WatermarkRaised | Committed | Forget


# -- what is remembered


class Mark(msgspec.Struct, frozen=True):
    """From this offset on samples are at or after ``ts_ms`` and ``logged_ms``, and have ``snapshot`` or a later one."""

    offset: int
    ts_ms: int
    logged_ms: int
    snapshot: SnapshotId | None


class NodeState(msgspec.Struct, frozen=True):
    """All that the join remembers of a node.

    ``snapshot_runs`` and ``sample_runs`` are the producer's runs that snapshots and samples came from, oldest first.
    ``skip_grace``: pending ticks get no grace. ``allocations_read_s``: the allocations have been read to an end that
    was asked for at this time. ``needed_ms`` is the watermark that the first pending tick needs; None: that tick waits
    for its snapshot, or there is none. ``marks`` say what has to be kept for samples that may be read again, and
    ``event_span_ms`` how long before them their events may have come.
    """

    snapshots: dict[SnapshotId, IndexedSnapshot] = {}
    snapshot_runs: tuple[int, ...] = ()
    sample_runs: tuple[int, ...] = ()
    workloads: KnownWorkloads | None = None
    pending: tuple[PendingTick, ...] = ()
    skip_grace: bool = False
    allocations_read_s: float = float("-inf")
    watermark_ms: float = float("-inf")
    needed_ms: int | None = None
    marks: tuple[Mark, ...] = ()
    event_span_ms: int = EVENT_MS
    memo: Memo | None = None


NEW = NodeState()


def step(state: NodeState, record: Record, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """The state after a record, and the ticks that need to wait no longer."""
    if isinstance(record, PendingTick):
        runs, run_id = state.sample_runs, record.sample.run_id
        state = _replace(
            state,
            pending=(*state.pending, record),
            sample_runs=runs if run_id in runs else (*runs, run_id)[-_MAX_RUNS:],
            watermark_ms=max(state.watermark_ms, record.watermark_ms),
            event_span_ms=event_span_ms(record.sample),
        )
        first = state.pending[0].sample
        if len(state.pending) > MAX_PENDING and not _has_snapshots(state, first, event_snapshots(first)):
            state = _replace(state, skip_grace=True)
    elif isinstance(record, Allocations):
        key, runs, snapshots = (record.run_id, record.seq), state.snapshot_runs, state.snapshots
        if key not in snapshots:  # it may come again unchanged; then the first record counts
            if record.run_id in runs:
                previous = _latest(state, record.run_id, below=record.seq)
            else:
                previous, runs = _latest(state, runs[-1]) if runs else None, (*runs, record.run_id)
            snapshots = {**snapshots, key: index_snapshot(record, previous)}
        state = _replace(state, snapshots=snapshots, snapshot_runs=runs, skip_grace=False)
    elif isinstance(record, LoggedWorkloads):
        # What was logged before the record has been read; another one may be logged in the same millisecond.
        watermark_ms = max(state.watermark_ms, record.logged_ms - 1)
        workloads = add_record(state.workloads, record.record, record.logged_ms)
        state = _replace(state, workloads=workloads, watermark_ms=watermark_ms)
    elif isinstance(record, AllocationsRead):
        state = _replace(state, allocations_read_s=max(state.allocations_read_s, record.asked_s))
    elif isinstance(record, WatermarkRaised):
        state = _replace(state, watermark_ms=max(state.watermark_ms, record.ms))
    elif isinstance(record, Committed):
        return _pruned(state, record.offset), []
    else:
        return _replace(state, pending=(), marks=(), needed_ms=None), []
    return _release(state, grace_s)


def needs_end(state: NodeState, now_s: float, grace_s: float) -> bool:
    """Whether the broker has to be asked for the end of the allocations, so that the first pending tick can go on."""
    if not state.pending:
        return False
    tick = state.pending[0]
    if _has_snapshots(state, tick.sample, event_snapshots(tick.sample)):
        return False
    grace_ends_s = tick.read_s + (0.0 if state.skip_grace else grace_s)
    return now_s >= grace_ends_s > state.allocations_read_s


# -- which ticks wait no longer


def _release(state: NodeState, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """Attribute the pending ticks in order, up to the first one that has to wait."""
    released: list[Joined] = []
    needed_ms: int | None = None
    while state.pending:
        tick = state.pending[0]
        sample = tick.sample
        event_times_ms = event_snapshots(sample)
        if not _has_snapshots(state, sample, event_times_ms):
            if state.allocations_read_s < tick.read_s + (0.0 if state.skip_grace else grace_s):
                break
            state = _replace(state, skip_grace=True)  # the snapshot never comes
        facts = facts_of(sample.devices, state.memo)
        current = _resolve(state, tick, sample.allocations_seq, sample.ts_ms, facts.uids)
        by_event = {seq: _resolve(state, tick, seq, ts_ms) for seq, ts_ms in event_times_ms.items()}
        resolved = {seq: answer for seq, answer in by_event.items() if isinstance(answer, ResolvedSnapshot)}
        if isinstance(current, Unresolved) or len(resolved) < len(by_event):
            answers = (current, *by_event.values())
            needed_ms = max([answer.watermark_ms for answer in answers if isinstance(answer, Unresolved)])
            break
        joined, memo = attribute(sample, facts, tick.offset, tick.logged_ms, current, resolved, state.memo)
        released.append(joined)
        marks, last = state.marks, state.marks[-1] if state.marks else None
        used = (current.snapshot.snapshot.run_id, current.snapshot.snapshot.seq) if current.snapshot else None
        if not (last and last.snapshot == used and 0 <= sample.ts_ms - last.ts_ms < _MARK_EVERY_MS):
            marks = (*marks, Mark(tick.offset, sample.ts_ms, tick.logged_ms, used))
        state = _replace(state, pending=state.pending[1:], marks=marks, memo=memo)
    return (state if state.needed_ms == needed_ms else _replace(state, needed_ms=needed_ms)), released


def _has_snapshots(state: NodeState, sample: Sample, event_seqs: Iterable[int]) -> bool:
    """Whether all snapshots have been read that a tick and its events name."""
    seq = sample.allocations_seq
    if seq is not None and (sample.run_id, seq) not in state.snapshots:
        return False
    return all((sample.run_id, seq) in state.snapshots for seq in event_seqs)


def _resolve(
    state: NodeState, tick: PendingTick, seq: int | None, ts_ms: int, uids: frozenset[str] = EMPTY
) -> ResolvedSnapshot | Unresolved:
    """The snapshot that a tick or its events name by ``seq``, else the last one known before it; with its pods at a
    time. ``uids`` are those that processes show: they count for the tick's own snapshot only."""
    sample = tick.sample
    snapshot = None if seq is None else state.snapshots.get((sample.run_id, seq))
    attribution: Attribution = "exact"
    if snapshot is None:
        snapshot = None if seq is None else _last_before(state, sample, seq)
        attribution = "late" if snapshot else "none"
    time = LookupTime(ts_ms, tick.logged_ms, state.watermark_ms)
    pods = resolve(state.workloads, snapshot, uids, time, state.memo.pods if state.memo else None)
    return pods if isinstance(pods, Unresolved) else ResolvedSnapshot(snapshot, attribution, pods)


def _last_before(state: NodeState, sample: Sample, seq: int) -> IndexedSnapshot | None:
    """The last known snapshot before the one that a sample names: of the same run, else of the previous run.

    If no snapshot of the sample's own run is known, the snapshots may have been read far ahead. Then only those runs
    count that had samples before, or whose snapshots are of an earlier time.
    """
    if (snapshot := _latest(state, sample.run_id, below=seq)) is not None:
        return snapshot
    runs = state.snapshot_runs
    if sample.run_id in runs:
        earlier = runs[: runs.index(sample.run_id)]
    else:
        sampled = state.sample_runs  # a run that is no longer in them is older than all of them
        sampled = sampled[: sampled.index(sample.run_id)] if sample.run_id in sampled else ()
        by_time = {run_id for (run_id, _), s in state.snapshots.items() if s.snapshot.ts_ms <= sample.ts_ms}
        earlier = tuple(run_id for run_id in runs if run_id in sampled or run_id in by_time)
    return _latest(state, earlier[-1]) if earlier else None


def _latest(state: NodeState, run_id: int, *, below: int | None = None) -> IndexedSnapshot | None:
    """The snapshot of a run with the highest seq, or the highest below one."""
    seqs = [seq for run, seq in state.snapshots if run == run_id and (below is None or seq < below)]
    return state.snapshots[run_id, max(seqs)] if seqs else None


# -- what may be forgotten


def _pruned(state: NodeState, offset: int) -> NodeState:
    """The state without what only samples below ``offset`` could need.
    Of the snapshots it keeps the one that the last committed sample was joined with, and all that may come after it."""
    marks = state.marks
    while len(marks) > 1 and marks[1].offset < offset:
        marks = marks[1:]
    if len(marks) == len(state.marks):
        return state
    ts_ms = min([mark.ts_ms for mark in marks] + [tick.sample.ts_ms for tick in state.pending]) - state.event_span_ms
    logged_ms = min([mark.logged_ms for mark in marks] + [tick.logged_ms for tick in state.pending]) - HORIZON_MS
    workloads = forget_before(state.workloads, ts_ms, logged_ms) if state.workloads else None
    snapshots, runs, first = state.snapshots, state.snapshot_runs, marks[0].snapshot
    if first is not None and first in snapshots:
        first_run_id, first_seq = first
        older_runs = runs[: runs.index(first_run_id)]
        snapshots = {
            (run_id, seq): snapshot
            for (run_id, seq), snapshot in snapshots.items()
            if run_id not in older_runs and (run_id != first_run_id or seq >= first_seq)
        }
        runs = tuple([run for run in runs if any(run == run_id for run_id, _ in snapshots)])
    return _replace(state, marks=marks, workloads=workloads, snapshots=snapshots, snapshot_runs=runs)
