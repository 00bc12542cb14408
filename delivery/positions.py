"""The offset from which a partition is read: the first record that the group has not finished, or some way before it.

In: what the group has committed, and where the log begins and ends. Out: a :class:`Start` of each partition.

    begin ............ position ............ resume ............ end
             gone by            known again          to be done

A sink reads the last records that it finished again, so that it knows what it has delivered. A stream reads its state
topics from ten minutes of log time before its first unfinished input. A snapshot of a node is sent again every five
minutes, so ten minutes of them hold every node's state. If a partition's newest record is older than that, it is read
from ten minutes before that record. If the broker can't find offsets by time, or a topic has no times, it is read from
the beginning. So is a compacted state topic, because each of its records may be the last of its key.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal, NamedTuple

import msgspec

from delivery.group import ConsumerGroup
from delivery.ledger import Partition

STATE_WINDOW_MS = 10 * 60 * 1000

StartFrom = Literal["earliest", "latest"] | float
"""Where a group without offsets starts: at an end of the log, or at a time, as seconds ago."""

WHOLE_LOG = math.inf  # read back the whole log: of a compacted topic, whose older records are as true as its newest
_ANY_TIME_MS = 1


class Start(NamedTuple):
    """Where the log began and ended when it was asked, where it is read from, and the first unfinished record.

    ``committed`` is the group's offset, None if it had none.
    """

    begin: int
    position: int
    resume: int
    end: int
    committed: int | None

    @property
    def is_torn(self) -> bool:
        """Whether the log does not have the record that is next to the group: it was deleted, or the log is another."""
        return self.committed is not None and self.committed != self.resume

    @property
    def expired(self) -> int:
        """How many unfinished records were gone."""
        return max(0, self.resume - self.committed) if self.committed is not None else 0


class ReadState(msgspec.Struct, frozen=True):
    """What a process already holds: how far it has read each state partition, and the inputs' last commits.

    State is pruned behind the commits, so a group that was set back makes it useless.
    """

    states: dict[Partition, int] = {}
    commits: dict[Partition, int] = {}


async def commit_start(group: ConsumerGroup, from_: Mapping[str, StartFrom]) -> frozenset[str]:
    """Commit where a group begins in each topic of which it has committed nothing. Gives the topics that it has begun.

    All partitions are committed at once, before any is read. So a partition without an offset in a topic that was begun
    was added later, whenever a process was killed. A topic that is read from its beginning needs no such commit. A
    group that has members was begun by them. Raises KafkaError if the broker does not answer: ask again.
    """
    commits = await group.committed_offsets()
    begun = frozenset(tp.topic for tp, committed in commits.items() if committed is not None)
    new = from_.keys() - begun - {topic for topic, start in from_.items() if start == "earliest"}
    starts: dict[Partition, Start] = {}
    for topic in new:
        starts |= await _resume(group, dict.fromkeys(tp for tp in commits if tp.topic == topic), from_[topic])
    if not starts or await group.commit_before_join({tp: start.resume for tp, start in starts.items()}):
        return begun | new
    return frozenset(tp.topic for tp, committed in (await group.committed_offsets()).items() if committed is not None)


async def find_start(
    group: ConsumerGroup, tp: Partition, from_: StartFrom, recall_s: float, *, known: int | None = None
) -> Start:
    """Where a sink starts: ``recall_s`` before the last finished record, or there if that is the offset ``known``.

    ``known`` is where the last assignment of this reader ended, if it had the partition. Raises KafkaError if the
    broker does not answer: ask again.
    """
    committed = await group.committed(tp)
    if committed is not None and committed == known:
        return Start(committed, committed, committed, committed, committed)
    (start,) = (await _resume(group, {tp: committed}, from_)).values()
    if recall_s == WHOLE_LOG:
        return start._replace(position=start.begin)
    if committed is None or start.is_torn or committed == start.begin:
        return start
    found = await _before(group, {tp: {tp: committed - 1}}, int(recall_s * 1000))
    if tp not in found:  # nothing but what no reader is given
        return start
    return start._replace(position=max(start.begin, min(found[tp] or start.begin, committed)))


async def find_start_with_state(
    group: ConsumerGroup,
    inputs: Collection[Partition],
    states: Collection[Partition],
    held: ReadState,
    compacted: frozenset[str] = frozenset(),
) -> tuple[dict[Partition, Start], frozenset[int]]:
    """Where a stream starts, and the partition numbers whose state is read again: drop what is held of them.

    ``compacted`` topics are read whole. If a state's topic was deleted and created again, what is held of it stays
    true, and its new log is read as well. A state's ``resume`` says before which offset the group has finished its
    records once, dead letters included: they are read again for what they say, and not dead-lettered again.
    """
    tps = [*inputs, *states]
    commits = dict(zip(tps, await asyncio.gather(*(group.committed(tp) for tp in tps)), strict=True))
    starts = await _resume(group, commits)
    renewed = {tp for tp in states if held.states.get(tp, 0) > starts[tp].end}
    fresh = {tp.partition for tp in states if tp not in renewed and held.states.get(tp, -1) < starts[tp].begin}
    fresh |= {tp.partition for tp in inputs if starts[tp].resume < held.commits.get(tp, 0)}
    unread = [tp for tp in states if tp.partition in fresh or tp in renewed]
    anchors = {
        tp: {
            other: starts[other].resume
            for other in inputs
            if other.partition == tp.partition and starts[other].resume < starts[other].end
        }
        | {tp: starts[tp].end - 1}
        for tp in unread
        if tp.topic not in compacted and starts[tp].begin < starts[tp].end
    }
    found = await _before(group, anchors, STATE_WINDOW_MS)
    for tp in states:
        position = (found.get(tp) or starts[tp].begin) if tp in unread else held.states[tp]
        starts[tp] = starts[tp]._replace(position=position)
    return starts, frozenset(fresh)


async def initial_offset(
    offsets_at: Callable[[Mapping[Partition, int]], Awaitable[Mapping[Partition, int | None]]],
    tp: Partition,
    from_: StartFrom,
    begin: int,
    end: int,
) -> int:
    """Where a reader starts that has no offset, between the ends of the log.

    ``offsets_at`` asks for the first offset at or after a time in ms; None: there is none, or the broker can't tell.
    """
    if isinstance(from_, str):
        return begin if from_ == "earliest" else end
    found = (await offsets_at({tp: int((time.time() - from_) * 1000)}))[tp]
    if found is None:  # all is older, or this broker does not know offsets by time
        return begin if (await offsets_at({tp: _ANY_TIME_MS}))[tp] is None else end
    return found


async def _resume(
    group: ConsumerGroup, commits: Mapping[Partition, int | None], from_: StartFrom = "earliest"
) -> dict[Partition, Start]:
    """Where the group goes on in each partition: at what it has committed, as far as the log has it."""
    tps = list(commits)
    begins, ends = await asyncio.gather(group.offsets.beginnings(tps), group.offsets.ends(tps))
    starts = {}
    for tp, committed in commits.items():
        begin, end = begins[tp], ends[tp]
        if committed is None:
            resume = await initial_offset(group.offsets.offsets_at, tp, from_, begin, end)
        else:
            resume = committed if begin <= committed <= end else begin
        starts[tp] = Start(begin, resume, resume, end, committed)
    return starts


async def _before(
    group: ConsumerGroup, anchors: Mapping[Partition, Mapping[Partition, int]], window_ms: int
) -> Mapping[Partition, int | None]:
    """For each partition, its first offset in the time before the earliest of its anchors, which are records anywhere.

    None if the broker can't tell. A partition of which an anchor's time is not known is left out.
    """
    records: dict[Partition, int] = {}
    for some in anchors.values():
        records |= some
    times = await group.offsets.times(records) if records else {}
    since = {}
    for tp, some in anchors.items():
        known = [at for at in (times[record] for record in some) if at is not None]
        if len(known) == len(some):
            since[tp] = max(_ANY_TIME_MS, min(known) - window_ms)
    return await group.offsets.offsets_at(since) if since else {}
