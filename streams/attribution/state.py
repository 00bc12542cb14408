"""What the join remembers of a node, the records that it is given, and what it may forget.

Everything is immutable. Times called ``_s`` are seconds of the reader's monotonic clock; ``logged_ms`` is the log time
of a record, and ``ts_ms`` the time in it.
"""

import msgspec

from streams.attribution.events import EVENT_MS
from streams.attribution.holders import Held
from streams.attribution.naming import HORIZON_MS, Listing, Meant
from streams.attribution.workloads import Knowledge, forget_before
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Mig, Sample
from topics.workloads import NodeWorkloads

_MARK_EVERY_MS = 10_000

SnapshotId = tuple[int, int]
"""A snapshot's run_id and seq."""

Inventory = tuple[tuple[str, int | None, int | None, Mig | None], ...]
"""Of each device of a tick what an id may say of it: uuid, index, minor number and MIG place."""


class ReadSample(msgspec.Struct, frozen=True):
    """A sample that was read: its offset, when it was read, and when it was logged.

    ``workloads_read_ms``: the log time to which the workloads of its partition had been read by then.
    """

    sample: Sample
    offset: int
    read_s: float
    logged_ms: int
    workloads_read_ms: float


class Workloads(msgspec.Struct, frozen=True):
    """A record of gpu.workloads that was read, and its log time, which is never less than that of the one before."""

    record: NodeWorkloads
    logged_ms: int


class WorkloadsRead(msgspec.Struct, frozen=True):
    """The workloads of the partition have been read as far as they were logged at or before a time."""

    logged_ms: float


class AllocationsRead(msgspec.Struct, frozen=True):
    """The allocations have been read to an end that was asked of the broker at ``asked_s``."""

    asked_s: float


class Committed(msgspec.Struct, frozen=True):
    """Samples below ``offset`` are finished for good and will not be read again."""

    offset: int


class Forget(msgspec.Struct, frozen=True):
    """Drop the samples that wait; they are read again."""


Record = ReadSample | Allocations | Workloads | AllocationsRead | WorkloadsRead | Committed | Forget


class Joined(msgspec.Struct, frozen=True):
    """An attributed sample, and the device ids that could not be read, where its holders were worked out again."""

    sample: AttributedSample
    unknown_ids: tuple[str, ...]


class Mark(msgspec.Struct, frozen=True):
    """From this offset on, the node's samples are at or after ``ts_ms``, were logged at or after ``logged_ms``, and are
    given ``snapshot`` or a later one."""

    offset: int
    ts_ms: int
    logged_ms: int
    snapshot: SnapshotId | None


class Memo(msgspec.Struct, frozen=True):
    """The last answer, and all that it depends on."""

    snapshot: Allocations
    inventory: Inventory
    found: Meant
    held: Held


class NodeState(msgspec.Struct, frozen=True):
    """All that the join remembers of a node.

    ``wanted_ms`` is the log time to which the workloads have to be read for the first sample that is held; None: it
    waits for its snapshot, or there is none.
    """

    snapshots: dict[SnapshotId, Listing] = {}
    snapshot_runs: tuple[int, ...] = ()
    sample_runs: tuple[int, ...] = ()
    workloads: Knowledge | None = None
    held: tuple[ReadSample, ...] = ()
    impatient: bool = False
    allocations_read_s: float = float("-inf")
    workloads_read_ms: float = float("-inf")
    wanted_ms: int | None = None
    marks: tuple[Mark, ...] = ()
    memo: Memo | None = None


NEW = NodeState()

_replace = msgspec.structs.replace


def marked(marks: tuple[Mark, ...], tick: ReadSample, given: SnapshotId | None) -> tuple[Mark, ...]:
    """The marks with one for this sample, unless the last one does for it."""
    ts_ms, last = tick.sample.ts_ms, marks[-1] if marks else None
    if last and last.snapshot == given and 0 <= ts_ms - last.ts_ms < _MARK_EVERY_MS:
        return marks
    return (*marks, Mark(tick.offset, ts_ms, tick.logged_ms, given))


def pruned(state: NodeState, offset: int) -> NodeState:
    """Forget what only samples below ``offset`` could ask for."""
    marks = state.marks
    while len(marks) > 1 and marks[1].offset < offset:
        marks = marks[1:]
    if len(marks) == len(state.marks) or marks[0].offset >= offset:
        return state
    since_ms = min([mark.ts_ms for mark in marks] + [tick.sample.ts_ms for tick in state.held]) - EVENT_MS
    logged_ms = min([mark.logged_ms for mark in marks] + [tick.logged_ms for tick in state.held]) - HORIZON_MS
    workloads = forget_before(state.workloads, since_ms, logged_ms) if state.workloads else None
    state = _replace(state, marks=marks, workloads=workloads)
    return _without_older_snapshots(state, marks[0].snapshot)


def _without_older_snapshots(state: NodeState, given: SnapshotId | None) -> NodeState:
    """Keep the snapshot that the last committed sample was given, and what came or may come after it."""
    if given is None or given not in state.snapshots:
        return state
    run_id, seq = given
    gone = set(state.snapshot_runs[: state.snapshot_runs.index(run_id)])
    kept = {
        key: listing
        for key, listing in state.snapshots.items()
        if key[0] not in gone and not (key[0] == run_id and key[1] < seq)
    }
    present = {run for run, _ in kept}
    return _replace(state, snapshots=kept, snapshot_runs=tuple(run for run in state.snapshot_runs if run in present))
