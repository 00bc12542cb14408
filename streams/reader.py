"""Reads inputs and state without losing a record, whatever the group does.

In: the records of assigned partitions. Out: batches for an agent, and commits of finished prefixes.
State: a ledger of the records that were read and are not finished, and how far this process has read the state topics.

- One loop alone sets the positions, each partition explicitly. No record is read before that.
- The same loop seeks and fetches, so if offsets are missing before a record, they are missing in the log: a hole (ends
  of transactions, compaction), or records that were deleted, which are counted. If a log continues below an offset that
  was read, it is another log, and positions are set again.
- Inputs wait until the state of their partition has been read to where it ended at the assignment.
- Only finished prefixes are committed, and no commit outlives the assignment that it was made for. The commit of an
  input is where reading resumes; an input without a commit gets one at the start, even if it is empty, so that its lag
  is known. State is read again at each start: its commit is where dead-lettering resumes, so that a malformed record
  gets one dead letter only.
- Whatever is awaited may return in another epoch. Then its result is not used.

On failure: a request that the broker may yet answer is repeated; any other failure ends the process, which reads again
when it is restarted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiokafka.errors import KafkaError

from delivery import positions
from delivery.group import ConsumerGroup
from delivery.kafka_errors import describe
from delivery.ledger import Ledger, Partition, Slot
from delivery.watchdog import Deadlines

log = logging.getLogger(__name__)
Batch = list[tuple[Slot, Any]]  # records of one partition in offset order, each with its slot
NOT_OURS = (KafkaError, AssertionError)  # the partition was revoked, or the broker has no answer yet
_FETCH_S = 0.5
_COMMIT_ON_REVOKE_S = 5.0
_ACKNOWLEDGED_S = 1.0
_RETRY_S = 0.2
_IDLE_S = 0.05
_CHECK_POSITIONS_EVERY_S = 0.2


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reads: its inputs, whose offsets are committed, and its states, which each process reads again.

    ``compacted`` are the states that are read from the beginning. ``watched`` are topics that are not read: the broker
    is only asked where their partitions end, for the partition numbers whose inputs are read. ``partitions`` is the
    number of partitions of each topic, as checked at the start. ``max_open_bytes`` limits the bytes of records that are
    read and not finished.
    """

    inputs: tuple[str, ...]
    states: tuple[str, ...]
    compacted: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    partitions: Mapping[str, int] = {}
    max_open_bytes: int = 128 * 1024 * 1024
    deadlines: Deadlines = Deadlines()


class Stage(Protocol):
    """What processes the records. It is notified of everything that ends or limits its work."""

    def forget(self) -> None:
        """Drop what is unfinished: the partitions were revoked, or are read again."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop the state of these partition numbers."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """The broker has committed these offsets."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Where assigned and watched partitions end. The broker was asked at ``asked_s`` of the monotonic clock."""


class Reader:
    """Reads ``reads`` for a stage. ``deliver`` accepts a batch, and waits while there is no room. ``acknowledged``
    waits until the broker has what the stage sent, for that many seconds at most.

    ``commits`` are the last commits of the inputs. ``input_ends`` and ``state_ends`` are where inputs and states ended
    at the assignment; ``torn`` are the partition numbers whose committed offset was no longer in the log then.
    ``group`` is set before the first turn.
    """

    group: ConsumerGroup

    def __init__(
        self,
        stage: Stage,
        deliver: Callable[[Batch], Awaitable[None]],
        reads: Reads,
        acknowledged: Callable[[float], Awaitable[None]],
    ) -> None:
        self.stage, self.deliver, self.reads, self._acknowledged = stage, deliver, reads, acknowledged
        self.ledger = Ledger()
        self.commits: dict[Partition, int] = {}
        self.state_ends: dict[Partition, int] = {}
        self.input_ends: dict[Partition, int] = {}
        self.torn: frozenset[int] = frozenset()
        self._state_commits: dict[Partition, int] = {}
        self.holes = self.lost = self.rebalances = self.turns = 0
        self._previous = positions.ReadState()  # what was read in the previous assignment
        self._behind: set[int] = set()  # the partition numbers whose state has not been read to its end
        self._full = False
        self._positions_checked_s = 0.0
        self._committing: asyncio.Task[bool] | None = None

    # -- offsets

    async def commit(self) -> bool:
        """Commit every input's finished prefix. One at a time: a second caller waits for the first."""
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_prefixes())
        committing = self._committing
        await asyncio.wait([committing])
        if committing.cancelled():
            return False
        if (error := committing.exception()) is not None:
            log.warning("not committed, trying again: %s", describe(error))
            return False
        return committing.result()

    async def _commit_prefixes(self) -> bool:
        epoch, inputs, states = self.ledger.epoch, dict[Partition, int](), dict[Partition, int]()
        for tp, offset in self.ledger.positions().items():
            if tp.topic in self.reads.inputs and self.commits.get(tp) != offset:
                inputs[tp] = offset
            if tp.topic in self.reads.states and self._state_commits.get(tp, offset) < offset:
                states[tp] = offset
        if not (inputs or states) or not await self.group.commit(inputs | states):
            return False
        if epoch == self.ledger.epoch:
            self.commits |= inputs
            self._state_commits |= states
            if inputs:
                self.stage.committed(inputs)
        return True

    def is_settled(self, slot: Slot) -> bool:
        """Whether the group has finished this record of a state before: then it gets no second dead letter."""
        return slot.offset < self._state_commits.get(slot.tp, 0)

    # -- assignment

    async def revoked(self) -> None:
        """The partitions are revoked: wait for what was sent and commit what is finished, in bounded time, and drop
        everything else.

        A commit that is still under way after that is cancelled: with the next assignment it would count for partitions
        that another worker may have by then.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMMIT_ON_REVOKE_S):
                await self._acknowledged(_ACKNOWLEDGED_S)
                if self._committing is not None:  # it commits less than what is finished now
                    await asyncio.wait([self._committing])
                await self.commit()
        if self._committing is not None and not self._committing.done():
            self._committing.cancel()
            await asyncio.wait([self._committing], timeout=_RETRY_S)
        self._committing = None
        self.rebalances += 1
        self.end_epoch()

    def assigned(self, tps: set[Partition]) -> None:
        """Partitions are assigned: the loop sets their positions."""
        self.end_epoch()

    def end_epoch(self) -> None:
        """Positions are unknown until the loop has set them; what is unfinished is read again."""
        if self.ledger.ready:
            positions_now = self.ledger.positions().items()
            states = {tp: offset for tp, offset in positions_now if tp.topic in self.reads.states}
            self._previous = positions.ReadState(states, dict(self.commits))
        self.ledger.forget()
        self.stage.forget()

    def pending_states(self) -> list[Partition]:
        """The state partitions that have not been read to where they ended at the assignment."""
        read_to, ends = self.ledger.positions(), dict(self.state_ends)  # copied: the watchdog's thread calls this too
        return [tp for tp, end in ends.items() if read_to.get(tp, end) < end]

    # -- the loop

    async def turn(self) -> None:
        """One turn of the loop: wait for the group, set positions, or read."""
        self.turns += 1
        if not self.group.can_fetch():
            await asyncio.sleep(_IDLE_S)
        elif not self.ledger.ready:
            await self._set_positions()
        else:
            await self._read()

    async def _set_positions(self) -> None:
        """Set all positions or none; the stage drops its state of other logs and partitions.
        If the assignment changes meanwhile, the next turn sets them again."""
        epoch, assigned = self.ledger.epoch, self.group.assignment()
        inputs = {tp for tp in assigned if tp.topic in self.reads.inputs}
        states, compacted = {tp for tp in assigned if tp.topic in self.reads.states}, frozenset(self.reads.compacted)
        try:
            starts, fresh = await positions.find_start_with_state(self.group, inputs, states, self._previous, compacted)
            if epoch != self.ledger.epoch or assigned != self.group.assignment():
                return
            self.group.seek({tp: start.position for tp, start in starts.items()})
        except NOT_OURS as error:
            log.info("positions not set, trying again: %s", describe(error))
            await asyncio.sleep(_RETRY_S)
            return
        torn = {tp: starts[tp] for tp in inputs if starts[tp].is_torn}
        for tp, start in torn.items():
            self.lost += start.expired
            name = self.group.kafka_name(tp)
            log.error("%s: offset %s is not in the log; reading on from %s", name, start.committed, start.resume)
        if new := {tp for tp in inputs if starts[tp].committed is None and starts[tp].begin < starts[tp].end}:
            topics = ", ".join(sorted({tp.topic for tp in new}))
            log.info("%s: no offset is committed in %d partitions: reading them from the beginning", topics, len(new))
        numbers = {tp.partition for tp in states}
        self.stage.drop(fresh | ({tp.partition for tp in self._previous.states} - numbers))
        self.ledger.begin({tp: start.position for tp, start in starts.items()})
        self.commits = {tp: starts[tp].resume for tp in inputs if starts[tp].committed == starts[tp].resume}
        self.input_ends, self.state_ends = {tp: starts[tp].end for tp in inputs}, {tp: starts[tp].end for tp in states}
        self.torn = frozenset(tp.partition for tp in torn)
        self._state_commits, self._behind = {tp: starts[tp].resume for tp in states}, numbers
        log.info("reading %d partitions, %d of them state", len(starts), len(states))

    async def _read(self) -> None:
        """Fetch once, and deliver the records: state first.

        State is always fetched. An input is fetched once its state has been read, but not while too many bytes are
        open. A partition without new records follows the client's position, past offsets that hold no record for a
        reader: otherwise a log that ends in such offsets would never be read to its end.
        """
        if self._behind:
            self._behind &= {tp.partition for tp in self.pending_states()}
        limit = self.reads.max_open_bytes // 2 if self._full else self.reads.max_open_bytes
        self._full = self.ledger.open_bytes >= limit
        active = {
            tp
            for tp in self.ledger.positions()
            if tp.topic in self.reads.states or not (self._full or tp.partition in self._behind)
        }
        if not active:
            await asyncio.sleep(_IDLE_S)
            return
        epoch = self.ledger.epoch
        records = await self.group.fetch(active, _FETCH_S)
        for tp in sorted(records, key=lambda tp: tp.topic not in self.reads.states):
            if epoch != self.ledger.epoch:
                return
            await self._deliver_records(tp, records[tp])
        now_s = asyncio.get_running_loop().time()
        if not self._behind and now_s - self._positions_checked_s < _CHECK_POSITIONS_EVERY_S:
            return
        self._positions_checked_s, epoch = now_s, self.ledger.epoch
        for tp, position in (await self.group.positions(active.difference(records))).items():
            expected = self.ledger.expected(tp)
            if epoch == self.ledger.epoch and expected is not None:
                await self._count_deleted(tp, expected, position)
                if epoch == self.ledger.epoch:
                    self.ledger.skip(tp, position)

    async def _deliver_records(self, tp: Partition, records: Sequence[Any]) -> None:
        """Open a slot for each record and deliver them, unless they are of another log than the records before."""
        expected, epoch = self.ledger.expected(tp), self.ledger.epoch
        if expected is None:
            return
        if records[0].offset < expected:
            name, offset = self.group.kafka_name(tp), records[0].offset
            log.error("%s: offset %d is gone, and the log goes on at %d", name, expected, offset)
            self.end_epoch()
            return
        await self._count_deleted(tp, expected, records[0].offset)
        if epoch != self.ledger.epoch:
            return
        batch: Batch = []
        for record in records:
            size = len(record.value or b"") + len(record.key or b"")
            self.holes += record.offset != self.ledger.expected(tp) and tp.topic not in self.reads.compacted
            batch.append((self.ledger.admit(tp, record.offset, size), record))
        await self.deliver(batch)

    async def _count_deleted(self, tp: Partition, expected: int, offset: int) -> None:
        """The log continues at ``offset``: count the records that were deleted before they could be read.

        These are all offsets below the beginning of the log, where the client resumes by itself. Offsets that are
        missing above it never held a record for a reader. Within one fetch nothing is deleted.
        """
        if offset <= expected or tp.topic in self.reads.compacted:
            return
        try:
            beginning = (await self.group.offsets.beginnings([tp]))[tp]
        except NOT_OURS as error:
            name = self.group.kafka_name(tp)
            log.info("%s: whether offsets %d to %d were deleted is not known: %r", name, expected, offset - 1, error)
            return
        if (deleted := min(beginning, offset) - expected) > 0:
            self.lost += deleted
            name, last = self.group.kafka_name(tp), expected + deleted - 1
            log.error("%s: offsets %d to %d were deleted before they were read", name, expected, last)
