"""Reads inputs and state without losing a record, whatever the group does.

In: the records of assigned partitions. Out: batches for an agent, and commits of finished prefixes.
State: a ledger of the records that were read and are not finished, and how far this process has read the state topics.

- One loop alone sets the positions, each partition explicitly. Nothing is taken before that.
- The same loop seeks and fetches, so if offsets are missing before a record, they are missing in the log: a hole (ends
  of transactions, compaction), or records that were deleted, which are counted. If a log goes on before an offset that
  was read, it is another log, and positions are set again.
- Inputs wait until the state of their partition has been read to where it ended at the assignment.
- Only finished prefixes are committed, and no commit outlives the assignment that it was made for. The commit of an
  input says where to go on; one without gets it at the start, also if it is empty: then its lag is known. State is read
  again at each start: its commit says up to where each malformed record has its dead letter.
- Whatever is awaited may return in another epoch. Then its result is not used.

On failure: a request that the broker may yet answer is repeated; anything else ends the process, and reading again is
the recovery.
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
NOT_OURS = (KafkaError, AssertionError)  # of a partition that was taken away, or a broker without an answer yet
_FETCH_S = 0.5
_COMMIT_ON_REVOKE_S = 5.0
_ACKNOWLEDGED_S = 1.0
_RETRY_S = 0.2
_IDLE_S = 0.05
_SKIP_EVERY_S = 0.2


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reads: its inputs, whose offsets count, and the states, which each process reads for itself.

    ``compacted`` are the states that are read whole. ``watched`` are topics that are not read: only where their
    partitions end is asked, of those numbers whose inputs are read. ``partitions`` is how many each topic has, as
    checked at the start. ``max_open_bytes`` bounds what is read and not finished.
    """

    inputs: tuple[str, ...]
    states: tuple[str, ...]
    compacted: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    partitions: Mapping[str, int] = {}
    max_open_bytes: int = 128 * 1024 * 1024
    deadlines: Deadlines = Deadlines()


class Stage(Protocol):
    """What works on the records. It is notified of everything that ends or bounds that work."""

    def forget(self) -> None:
        """Drop what is unfinished: the partitions are taken away, or read again."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop the state of these partition numbers."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """The broker has committed these offsets."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Where assigned and watched partitions end, asked of the broker at ``asked_s`` of the monotonic clock."""


class Reader:
    """Reads ``reads`` for a stage; ``deliver`` takes a batch, and waits for room; ``acknowledged`` waits until the
    broker has what the stage sent, for so many seconds at most.

    ``input_ends`` is where the inputs ended at the assignment, ``torn`` the partition numbers whose committed offset
    was no longer in the log then. ``loop_late_s`` is the most that the event loop was late in the last minute, as
    whoever runs the reader measures it. ``group`` is set before the first turn.
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
        self._settled: dict[Partition, int] = {}
        self.holes = self.lost = self.rebalances = self.turns = 0
        self.loop_late_s = 0.0
        self._held = positions.Held()
        self._waiting: set[int] = set()
        self._full = False
        self._skipped_s = 0.0
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
        epoch = self.ledger.epoch
        positions = self.ledger.positions().items()
        inputs = {tp: at for tp, at in positions if tp.topic in self.reads.inputs and self.commits.get(tp) != at}
        states = {tp: at for tp, at in positions if tp.topic in self.reads.states and self._settled.get(tp, at) < at}
        if not (inputs or states) or not await self.group.commit(inputs | states):
            return False
        if epoch == self.ledger.epoch:
            self.commits |= inputs
            self._settled |= states
            if inputs:
                self.stage.committed(inputs)
        return True

    def is_settled(self, slot: Slot) -> bool:
        """Whether the group has finished this record of a state before, its dead letter included."""
        return slot.offset < self._settled.get(slot.tp, 0)

    # -- assignment

    async def revoked(self) -> None:
        """The partitions are taken away: wait for what was sent and commit what is finished, in bounded time, and drop
        everything else.

        A commit that is still under way after that is ended: with the next assignment it would count for partitions
        that another worker may have then.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMMIT_ON_REVOKE_S):
                await self._acknowledged(_ACKNOWLEDGED_S)
                if self._committing is not None:  # it has less than what is finished now
                    await asyncio.wait([self._committing])
                await self.commit()
        if self._committing is not None and not self._committing.done():
            self._committing.cancel()
            await asyncio.wait([self._committing], timeout=_RETRY_S)
        self._committing = None
        self.rebalances += 1
        self.end_epoch()

    def assigned(self, tps: set[Partition]) -> None:
        """Partitions are ours: the loop sets their positions."""
        self.end_epoch()

    def end_epoch(self) -> None:
        """Positions are unknown until the loop has set them; what is unfinished is read again."""
        if self.ledger.ready:
            states = {tp: at for tp, at in self.ledger.positions().items() if tp.topic in self.reads.states}
            self._held = positions.Held(states, dict(self.commits))
        self.ledger.forget()
        self.stage.forget()

    def pending_states(self) -> list[Partition]:
        """The state partitions that are not learned to where they ended at the assignment."""
        positions, ends = self.ledger.positions(), dict(self.state_ends)  # copied: the watchdog's thread asks too
        return [tp for tp, end in ends.items() if positions.get(tp, end) < end]

    # -- the loop

    async def turn(self) -> None:
        """One turn of the loop: wait for the group, set positions, or read."""
        self.turns += 1
        if not self.group.flowing():
            await asyncio.sleep(_IDLE_S)
        elif not self.ledger.ready:
            await self._position()
        else:
            await self._read()

    async def _position(self) -> None:
        """Set every position, or none, and read from there; the stage drops what it holds of other logs and partitions.
        An assignment that changes meanwhile is positioned again."""
        epoch, assigned = self.ledger.epoch, self.group.assignment()
        inputs = {tp for tp in assigned if tp.topic in self.reads.inputs}
        states, whole = {tp for tp in assigned if tp.topic in self.reads.states}, frozenset(self.reads.compacted)
        try:
            starts, fresh = await positions.find_with_state(self.group, inputs, states, self._held, whole)
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
            place = self.group.place(tp)
            log.error("%s: offset %s is not in the log; reading on from %s", place, start.committed, start.resume)
        ours = {tp.partition for tp in states}
        self.stage.drop(fresh | ({tp.partition for tp in self._held.states} - ours))
        self.ledger.begin({tp: start.position for tp, start in starts.items()})
        self.commits = {tp: starts[tp].resume for tp in inputs if starts[tp].committed == starts[tp].resume}
        self.input_ends, self.state_ends = {tp: starts[tp].end for tp in inputs}, {tp: starts[tp].end for tp in states}
        self.torn = frozenset(tp.partition for tp in torn)
        self._settled, self._waiting = {tp: starts[tp].resume for tp in states}, ours
        log.info("reading %d partitions, %d of them state", len(starts), len(states))

    async def _read(self) -> None:
        """Fetch once, and take what came: state first.

        State is fetched always, an input once its state is learned, and none while too many bytes are open.
        A partition without records is followed to the client's position, past offsets that hold no record for a reader:
        a log that ends in such offsets would never be read to its end otherwise.
        """
        if self._waiting:
            self._waiting &= {tp.partition for tp in self.pending_states()}
        limit = self.reads.max_open_bytes // 2 if self._full else self.reads.max_open_bytes
        self._full = self.ledger.open_bytes >= limit
        active = {
            tp
            for tp in self.ledger.positions()
            if tp.topic in self.reads.states or not (self._full or tp.partition in self._waiting)
        }
        if not active:
            await asyncio.sleep(_IDLE_S)
            return
        epoch = self.ledger.epoch
        records = await self.group.fetch(active, _FETCH_S)
        for tp in sorted(records, key=lambda tp: tp.topic not in self.reads.states):
            if epoch != self.ledger.epoch:
                return
            await self._take(tp, records[tp])
        now_s = asyncio.get_running_loop().time()
        if not self._waiting and now_s - self._skipped_s < _SKIP_EVERY_S:
            return
        self._skipped_s, epoch = now_s, self.ledger.epoch
        for tp, position in (await self.group.positions(active.difference(records))).items():
            expected = self.ledger.expected(tp)
            if epoch == self.ledger.epoch and expected is not None and position >= expected:
                await self._pass_over(tp, expected, position)
                if epoch == self.ledger.epoch:
                    self.ledger.skip(tp, position)

    async def _take(self, tp: Partition, records: Sequence[Any]) -> None:
        """Admit the records and deliver them, unless they are of another log than those before."""
        expected, epoch = self.ledger.expected(tp), self.ledger.epoch
        if expected is None:
            return
        if records[0].offset < expected:
            place, found = self.group.place(tp), records[0].offset
            log.error("%s: offset %d is gone, and the log goes on at %d", place, expected, found)
            self.end_epoch()
            return
        await self._pass_over(tp, expected, records[0].offset)
        if epoch != self.ledger.epoch:
            return
        batch: Batch = []
        for record in records:
            size = len(record.value or b"") + len(record.key or b"")
            self.holes += record.offset != self.ledger.expected(tp) and tp.topic not in self.reads.compacted
            batch.append((self.ledger.admit(tp, record.offset, size), record))
        await self.deliver(batch)

    async def _pass_over(self, tp: Partition, expected: int, offset: int) -> None:
        """The log goes on at ``offset``: count what was deleted before it could be read.

        That is all before where the log begins now; the client goes there by itself. What is missing after that was
        never to be read. Within what was fetched at once, nothing is deleted.
        """
        if offset <= expected or tp.topic in self.reads.compacted:
            return
        try:
            begins = (await self.group.offsets.beginnings([tp]))[tp]
        except NOT_OURS as error:
            place = self.group.place(tp)
            log.info("%s: whether offsets %d to %d were deleted is not known: %r", place, expected, offset - 1, error)
            return
        if (gone := min(begins, offset) - expected) > 0:
            self.lost += gone
            last, place = expected + gone - 1, self.group.place(tp)
            log.error("%s: offsets %d to %d were deleted before they were read", place, expected, last)
