"""The offset from which a partition is read: the first record that the group has not finished, or some way before it.

In: the group's commits, and where the log begins and ends. Out: the :class:`Start` of each partition.

    begin ............ position ............ resume ............ end
            not read           read again         unfinished

A sink reads the last records that it finished again, so that it knows what it has delivered. A stream reads its state
topics from ten minutes of log time before its first unfinished input. A snapshot of a node is sent again every five
minutes, so ten minutes of them hold every node's state. If a partition's newest record is older than that, it is read
from ten minutes before that record. If the broker can't find offsets by time, or a topic has no times, it is read from
the beginning. So is a compacted state topic, because each of its records may be the last of its key.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal, NamedTuple

import msgspec

from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.values import duration_words

log = logging.getLogger(__name__)

STATE_WINDOW_MS = 10 * 60 * 1000


class Back(NamedTuple):
    """How far back a log is read: for so long, and at least so many records of each partition, because the last one of
    a node that is read seldom is older."""

    seconds: float
    records: int = 0


StartFrom = Literal["earliest", "latest"] | float | Back
"""Where a reader without offsets starts: at an end of the log, that many seconds ago, or :class:`Back`."""

NOTHING, WHOLE_LOG = Back(0.0), Back(math.inf)
"""Read no record, or all of them, as of a compacted topic, whose oldest records still count."""
_ANY_TIME_MS = 1


class Start(NamedTuple):
    """Where a partition is read from.

    ``begin`` and ``end`` are those of the log when the broker was asked. Reading starts at ``position``; ``resume`` is
    the first unfinished record. ``committed`` is the group's offset, None if it had none.
    """

    begin: int
    position: int
    resume: int
    end: int
    committed: int | None

    @property
    def is_torn(self) -> bool:
        """Whether the group's committed offset is outside the log: records were deleted, or the log was replaced."""
        return self.committed is not None and self.committed != self.resume

    @property
    def expired(self) -> int:
        """How many unfinished records were deleted before the group read them."""
        return max(0, self.resume - self.committed) if self.committed is not None else 0


class ReadState(msgspec.Struct, frozen=True):
    """How far a process has read each state partition, and the last commits of its inputs.

    State is pruned behind the commits, so it is useless if the group was set back to an earlier offset.
    """

    states: dict[Partition, int] = {}
    commits: dict[Partition, int] = {}


async def commit_start(group: ConsumerGroup, from_: Mapping[str, StartFrom]) -> frozenset[str]:
    """Commit where a group begins in each topic without a commit. Returns the topics that have one now.

    All partitions of a topic are committed at once, before any is read. So if one of them has no offset later, it was
    added later, even if a process was killed in between. A topic that is read from its beginning needs no such commit.
    If the group has members, one of them has done it. Raises KafkaError if the broker does not answer: try again.
    """
    commits = await group.committed_offsets()
    started = frozenset(tp.topic for tp, committed in commits.items() if committed is not None)
    if begins := [f"{topic} {_in_words(from_[topic])}" for topic in sorted(from_.keys() - started)]:
        log.info("group %s: it has no offsets yet, and begins in %s", group.name, ", in ".join(begins))
    new = from_.keys() - started - {topic for topic, start in from_.items() if start == "earliest"}
    starts: dict[Partition, Start] = {}
    for topic in new:
        starts |= await _resume(group, dict.fromkeys(tp for tp in commits if tp.topic == topic), from_[topic])
    if not starts or await group.commit_before_join({tp: start.resume for tp, start in starts.items()}):
        return started | new
    return frozenset(tp.topic for tp, committed in (await group.committed_offsets()).items() if committed is not None)


def _in_words(from_: StartFrom) -> str:
    """Where a reader without offsets starts, for logs."""
    if isinstance(from_, str):
        return "at its beginning" if from_ == "earliest" else "at its end"
    seconds = from_.seconds if isinstance(from_, Back) else from_
    return f"{duration_words(seconds * 1000)} ago" if seconds else "at its end"


async def find_start(
    group: ConsumerGroup, tp: Partition, from_: StartFrom, recall: Back, *, last_end: int | None
) -> Start:
    """Where a sink starts: ``recall`` before the last finished record, or at the commit if that is ``last_end``.

    ``last_end`` is where the last assignment of this reader ended, if it had the partition. Raises KafkaError if the
    broker does not answer: try again.
    """
    committed = await group.committed(tp)
    if committed is not None and committed == last_end:
        return Start(committed, committed, committed, committed, committed)
    (start,) = (await _resume(group, {tp: committed}, from_)).values()
    if recall == WHOLE_LOG:
        return start._replace(position=start.begin)
    if committed is None or start.is_torn or committed == start.begin:
        return start
    offsets = await _offsets_before(group, {tp: {tp: committed - 1}}, int(recall.seconds * 1000))
    if tp not in offsets:  # there are only markers that no reader is given
        return start
    return start._replace(position=max(start.begin, min(offsets[tp] or start.begin, committed - recall.records)))


async def find_start_with_state(
    group: ConsumerGroup,
    inputs: Collection[Partition],
    states: Collection[Partition],
    previous: ReadState,
    compacted: frozenset[str] = frozenset(),
) -> tuple[dict[Partition, Start], frozenset[int]]:
    """Where a stream starts, and the partition numbers whose state is read again: drop the state of those.

    ``previous`` is how far this process has read. ``compacted`` topics are read whole. If a state topic was deleted and
    created again, the state stays true, and the new log is read as well. State records before ``resume`` were finished
    once: they are read again for their content, and not dead-lettered again.
    """
    tps = [*inputs, *states]
    commits = dict(zip(tps, await asyncio.gather(*(group.committed(tp) for tp in tps)), strict=True))
    starts = await _resume(group, commits)
    recreated = {tp for tp in states if previous.states.get(tp, 0) > starts[tp].end}
    fresh = {tp.partition for tp in states if previous.states.get(tp, -1) < starts[tp].begin}
    fresh |= {tp.partition for tp in inputs if starts[tp].resume < previous.commits.get(tp, 0)}
    unread = [tp for tp in states if tp.partition in fresh or tp in recreated]
    anchors = {
        tp: {
            source: starts[source].resume
            for source in inputs
            if source.partition == tp.partition and starts[source].resume < starts[source].end
        }
        | {tp: starts[tp].end - 1}
        for tp in unread
        if tp.topic not in compacted and starts[tp].begin < starts[tp].end
    }
    offsets = await _offsets_before(group, anchors, STATE_WINDOW_MS)
    for tp in states:
        position = (offsets.get(tp) or starts[tp].begin) if tp in unread else previous.states[tp]
        starts[tp] = starts[tp]._replace(position=position)
    return starts, frozenset(fresh)


OffsetsAt = Callable[[Mapping[Partition, int]], Awaitable[Mapping[Partition, int | None]]]
"""Asks for the first offset at or after a time in ms; None: there is none, or the broker can't tell."""


async def initial_offset(offsets_at: OffsetsAt, tp: Partition, from_: StartFrom, begin: int, end: int) -> int:
    """Where a reader without an offset starts, between ``begin`` and ``end`` of the log."""
    if isinstance(from_, str):
        return begin if from_ == "earliest" else end
    seconds, records = from_ if isinstance(from_, Back) else (from_, 0)
    since = await offset_since(offsets_at, tp, int((time.time() - seconds) * 1000), begin, end)
    return max(begin, min(since, end - records))


async def offset_since(offsets_at: OffsetsAt, tp: Partition, since_ms: int, begin: int, end: int) -> int:
    """The offset of the first record that was logged at ``since_ms`` or later, between ``begin`` and ``end``."""
    offset = (await offsets_at({tp: since_ms}))[tp]
    if offset is None:  # every record is older, or this broker does not find offsets by time
        return begin if (await offsets_at({tp: _ANY_TIME_MS}))[tp] is None else end
    return offset


async def _resume(
    group: ConsumerGroup, commits: Mapping[Partition, int | None], from_: StartFrom = "earliest"
) -> dict[Partition, Start]:
    """Where the group goes on in each partition: at its commit if the log has that offset.

    A commit may be behind an open transaction: ``kafka-consumer-groups.sh --to-latest`` puts it there.
    """
    tps = list(commits)
    begins, ends = await asyncio.gather(group.offsets.beginnings(tps), group.offsets.ends(tps))
    ahead = [tp for tp, committed in commits.items() if committed is not None and committed > ends[tp]]
    log_ends = await group.offsets.log_ends(ahead) if ahead else {}
    starts = {}
    for tp, committed in commits.items():
        begin, end = begins[tp], ends[tp]
        if committed is None:
            resume = await initial_offset(group.offsets.offsets_at, tp, from_, begin, end)
        else:
            resume = committed if begin <= committed <= log_ends.get(tp, end) else begin
        starts[tp] = Start(begin, resume, resume, end, committed)
    return starts


async def _offsets_before(
    group: ConsumerGroup, anchors: Mapping[Partition, Mapping[Partition, int]], window_ms: int
) -> Mapping[Partition, int | None]:
    """For each partition, the first offset from ``window_ms`` before the earliest of its anchors on.

    An anchor is the offset of a record in any partition. The offset is None if the broker can't tell. A partition is
    left out if the time of one of its anchors is not known.
    """
    records: dict[Partition, int] = {}
    for offsets in anchors.values():
        records |= offsets
    times = await group.offsets.times(records) if records else {}
    since_ms = {}
    for tp, offsets in anchors.items():
        known_ms = [time_ms for time_ms in (times[anchor] for anchor in offsets) if time_ms is not None]
        if len(known_ms) == len(offsets):
            since_ms[tp] = max(_ANY_TIME_MS, min(known_ms) - window_ms)
    return await group.offsets.offsets_at(since_ms) if since_ms else {}
