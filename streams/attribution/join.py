"""The join of one node: ticks wait for the snapshot that they name and for the workloads, and are given their holders.

In: the node's samples, snapshots and workloads in the order of their logs, and what the reader learns about time and
offsets. Out: attributed ticks, in the order of the samples. State: one immutable :class:`NodeState` a node. Pure: no
clock, no network, no log. Times called ``_s`` are seconds of the reader's monotonic clock, ``logged_ms`` is the log
time of a record, ``ts_ms`` the time in it.

A tick is **pending** for two reasons, one after the other:

1. It waits for the snapshots that it and its events name. They are named by number, within one run of the producer, so
   no clocks are compared. Its **patience** is ``grace``: so long after the sample was read, the broker is asked where
   the allocations end. If they have been read to there and a snapshot is still missing, it never comes.
2. It waits for the **watermark** of the workloads: :mod:`streams.attribution.log_time` has the rule.

A node that waited in vain, or that has too many pending ticks, has no patience until its next snapshot comes: the end
of the allocations is asked at once. That is no guess either, because a snapshot is acknowledged by the broker before
the first sample that names it is sent.
"""

from collections.abc import Iterable

import msgspec

from streams.attribution.attribute import EVENT_MS, Joined, Memo, Named, attribute, named_snapshots, see
from streams.attribution.log_time import HORIZON_MS, Listing, NotYet, When, listing, resolve
from streams.attribution.workloads import Knowledge, forget_before, learn
from topics.allocations import Allocations
from topics.attributed import Attribution
from topics.samples import Sample
from topics.workloads import NodeWorkloads

MAX_PENDING = 64  # how many pending ticks a node may have before the end of its allocations is asked at once
_RUNS = 8
_MARK_EVERY_MS = 10_000
_replace = msgspec.structs.replace
SnapshotId = tuple[int, int]  # a snapshot's run_id and seq


# -- what arrives


class PendingTick(msgspec.Struct, frozen=True):
    """A sample that was read: its offset, when it was read, when it was logged, and the watermark by then."""

    sample: Sample
    offset: int
    read_s: float
    logged_ms: int
    watermark_ms: float


class LoggedWorkloads(msgspec.Struct, frozen=True):
    """A record of gpu.workloads that was read, and its log time, which is never less than that of the one before."""

    record: NodeWorkloads
    logged_ms: int


class WatermarkRaised(msgspec.Struct, frozen=True):
    """The workloads of the partition have been read as far as they were logged at or before a time."""

    ms: float


class AllocationsRead(msgspec.Struct, frozen=True):
    """The allocations have been read to an end that was asked of the broker at ``asked_s``."""

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
    """All that the join remembers of a node. ``wanted_ms`` is what the watermark has to reach for the first pending
    tick; None: that one waits for its snapshot, or there is none."""

    snapshots: dict[SnapshotId, Listing] = {}
    snapshot_runs: tuple[int, ...] = ()
    sample_runs: tuple[int, ...] = ()
    workloads: Knowledge | None = None
    pending: tuple[PendingTick, ...] = ()
    impatient: bool = False
    allocations_read_s: float = float("-inf")
    watermark_ms: float = float("-inf")
    wanted_ms: int | None = None
    marks: tuple[Mark, ...] = ()
    memo: Memo | None = None


NEW = NodeState()


def step(state: NodeState, record: Record, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """The state after a record, and the ticks that it lets go."""
    if isinstance(record, PendingTick):
        runs, run_id = state.sample_runs, record.sample.run_id
        state = _replace(
            state,
            pending=(*state.pending, record),
            sample_runs=runs if run_id in runs else (*runs, run_id)[-_RUNS:],
            watermark_ms=max(state.watermark_ms, record.watermark_ms),
        )
        first = state.pending[0].sample
        if len(state.pending) > MAX_PENDING and not _has_snapshots(state, first, named_snapshots(first)):
            state = _replace(state, impatient=True)
    elif isinstance(record, Allocations):
        state = _with_snapshot(state, record)
    elif isinstance(record, LoggedWorkloads):
        # What was logged before the record has been read; another one may be logged in the same millisecond.
        watermark_ms = max(state.watermark_ms, record.logged_ms - 1)
        known = learn(state.workloads, record.record, record.logged_ms)
        state = _replace(state, workloads=known, watermark_ms=watermark_ms)
    elif isinstance(record, AllocationsRead):
        state = _replace(state, allocations_read_s=max(state.allocations_read_s, record.asked_s))
    elif isinstance(record, WatermarkRaised):
        state = _replace(state, watermark_ms=max(state.watermark_ms, record.ms))
    elif isinstance(record, Committed):
        return _pruned(state, record.offset), []
    else:
        return _replace(state, pending=(), marks=(), wanted_ms=None), []
    return _release(state, grace_s)


def wants_end(state: NodeState, now_s: float, grace_s: float) -> bool:
    """Whether the end of the node's allocations has to be asked for its pending ticks to go on."""
    if not state.pending:
        return False
    first, patience_s = state.pending[0], 0.0 if state.impatient else grace_s
    there = _has_snapshots(state, first.sample, named_snapshots(first.sample))
    return not there and now_s >= first.read_s + patience_s > state.allocations_read_s


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


# -- which ticks may go


def _release(state: NodeState, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """Let go the first pending ticks that wait for nothing more."""
    out: list[Joined] = []
    wanted_ms: int | None = None
    while state.pending:
        tick = state.pending[0]
        sample = tick.sample
        events_named = named_snapshots(sample)
        if not _has_snapshots(state, sample, events_named):
            patience_s = 0.0 if state.impatient else grace_s
            if state.allocations_read_s < tick.read_s + patience_s:
                break
            state = _replace(state, impatient=True)
        seen = see(sample.devices, state.memo)
        now = _named(state, tick, sample.allocations_seq, sample.ts_ms, seen.uids)
        earlier = {seq: _named(state, tick, seq, at_ms) for seq, at_ms in events_named.items()}
        known = {seq: named for seq, named in earlier.items() if isinstance(named, Named)}
        if isinstance(now, NotYet) or len(known) < len(earlier):
            wanted_ms = max([one.watermark_ms for one in (now, *earlier.values()) if isinstance(one, NotYet)])
            break
        joined, memo = attribute(sample, seen, tick.offset, tick.logged_ms, now, known, state.memo)
        out.append(joined)
        marks, last = state.marks, state.marks[-1] if state.marks else None
        given = (now.listing.snapshot.run_id, now.listing.snapshot.seq) if now.listing else None
        if not (last and last.snapshot == given and 0 <= sample.ts_ms - last.ts_ms < _MARK_EVERY_MS):
            marks = (*marks, Mark(tick.offset, sample.ts_ms, tick.logged_ms, given))
        state = _replace(state, pending=state.pending[1:], marks=marks, memo=memo)
    return (state if state.wanted_ms == wanted_ms else _replace(state, wanted_ms=wanted_ms)), out


def _has_snapshots(state: NodeState, sample: Sample, events_named: Iterable[int]) -> bool:
    """Whether all snapshots are there that a tick and its events name."""
    own = sample.allocations_seq
    if own is not None and (sample.run_id, own) not in state.snapshots:
        return False
    return all((sample.run_id, seq) in state.snapshots for seq in events_named)


def _named(
    state: NodeState, tick: PendingTick, seq: int | None, ts_ms: int, uids: frozenset[str] = frozenset()
) -> Named | NotYet:
    """The snapshot that a tick or its events name by ``seq``, else the last one known before it, and its pods at a
    time, with those of the ``uids`` that processes show: they count for the tick's own snapshot only."""
    sample = tick.sample
    listed = None if seq is None else state.snapshots.get((sample.run_id, seq))
    attribution: Attribution = "exact"
    if listed is None:
        listed = None if seq is None else _last_before(state, sample, seq)
        attribution = "late" if listed else "none"
    when = When(ts_ms, tick.logged_ms, state.watermark_ms)
    found = resolve(state.workloads, listed, uids, when, state.memo.resolved if state.memo else None)
    return found if isinstance(found, NotYet) else Named(listed, attribution, found)


def _last_before(state: NodeState, sample: Sample, seq: int) -> Listing | None:
    """The last known snapshot before the one that a sample names: of its run, else of the run before.

    If no snapshot of the sample's own run is known, the snapshots may have been read far ahead. Then only those runs
    count that had samples before, or whose snapshots are of an earlier time.
    """
    if (known := _latest(state, sample.run_id, below=seq)) is not None:
        return known
    runs = state.snapshot_runs
    if sample.run_id in runs:
        before = runs[: runs.index(sample.run_id)]
    else:
        sampled = state.sample_runs[: state.sample_runs.index(sample.run_id)]
        earlier = {run for (run, _), listed in state.snapshots.items() if listed.snapshot.ts_ms <= sample.ts_ms}
        before = tuple(run for run in runs if run in sampled or run in earlier)
    return _latest(state, before[-1]) if before else None


def _latest(state: NodeState, run_id: int, *, below: int | None = None) -> Listing | None:
    seqs = [seq for run, seq in state.snapshots if run == run_id and (below is None or seq < below)]
    return state.snapshots[run_id, max(seqs)] if seqs else None


# -- what may be forgotten


def _pruned(state: NodeState, offset: int) -> NodeState:
    """Forget what only samples below ``offset`` could ask for.
    Of the snapshots, those stay that the last committed sample was given, and what came or may come after it."""
    marks = state.marks
    while len(marks) > 1 and marks[1].offset < offset:
        marks = marks[1:]
    if len(marks) == len(state.marks) or marks[0].offset >= offset:
        return state
    since_ms = min([mark.ts_ms for mark in marks] + [tick.sample.ts_ms for tick in state.pending]) - EVENT_MS
    logged_ms = min([mark.logged_ms for mark in marks] + [tick.logged_ms for tick in state.pending]) - HORIZON_MS
    workloads = forget_before(state.workloads, since_ms, logged_ms) if state.workloads else None
    snapshots, runs, given = state.snapshots, state.snapshot_runs, marks[0].snapshot
    if given is not None and given in snapshots:
        older = runs[: runs.index(given[0])]
        snapshots = {
            key: listed
            for key, listed in snapshots.items()
            if key[0] not in older and (key[0] != given[0] or key[1] >= given[1])
        }
        runs = tuple([run for run in runs if any(run == run_id for run_id, _ in snapshots)])
    return _replace(state, marks=marks, workloads=workloads, snapshots=snapshots, snapshot_runs=runs)
