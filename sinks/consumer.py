"""Reads topics for a sink, as a member of its consumer group: a task for each partition, commits after each delivery.

In: the partitions that are ours, and their records. Out: a handler's steps, the offset committed after each.
State: of each partition the next offset to finish, and of the last assignment, so that what comes back unchanged is not
read back. Kafka is the buffer: what is not delivered is not read past.
On failure: the group is found again by itself; a partition's own failure ends the sink, and it starts over. When a
partition is taken away, ``abandon`` is set and what is under way is waited for, bounded. Everything that was awaited
may come back after that, so ``abandon`` is looked at before anything is committed or kept.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from aiokafka.errors import IllegalStateError, KafkaError

from delivery import positions
from delivery.dead_letters import Abandoned, Record
from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.positions import Start, StartFrom
from delivery.settings import DEAD_LETTERS, MemberSettings, TopicAccess
from delivery.tail import Tail
from delivery.topic_admin import TopicCheck
from sinks.outcomes import Outcomes

log = logging.getLogger(__name__)

BATCH_RECORDS = 250
"""So many records of a partition are read, and held, at a time."""

LEAVE_S = 4.0
"""So long may what is under way in a partition take when the partition is taken away."""

_CANCEL_S = 0.5
_MEASURE_S = 1.0
_POLL_S = 0.5
_POLL_BUSY_S = 0.1
_RETRY_S = 0.5
_QUIET_EVERY_S = 1.0


class Handler(Protocol):
    """What a sink does with one partition's records, in their order."""

    def recall(self, records: Sequence[Record]) -> None:
        """Records that were finished before: know them, deliver nothing."""

    def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Finish the records in steps: gives, after each step, the offset after the last finished one.

        That is committed before the next step. Counts what became of the records it finished. Raises Abandoned.
        It may end its steps with records unfinished, to be given others meanwhile; then it is called again soon, with
        more or with none, and gives the steps of those that it kept.
        """

    async def quiet(self, abandon: asyncio.Event) -> None:
        """The partition is read to its end; called about once a second while it is. Raises Abandoned."""

    def reset(self) -> None:
        """The topic was created again: its offsets start again."""


class Source(NamedTuple):
    """A topic that a sink reads, and what makes the handler of one of its partitions, given its number.

    ``from_`` says where a group without offsets starts, ``recall_s`` how much of the log before the first unfinished
    record is read back; ``WHOLE_LOG`` is all of it. ``holds``: its handler may leave records unfinished that wait for
    later ones, and is called at the end of a partition in spite of them.
    """

    topic: str
    handler: Callable[[int], Handler]
    from_: StartFrom
    recall_s: float
    holds: bool = False


class GroupReader:
    """A member of a consumer group."""

    def __init__(self, settings: MemberSettings, sources: Sequence[Source], outcomes: Outcomes) -> None:
        self._settings, self._outcomes = settings, outcomes
        self._sources = {source.topic: source for source in sources}
        self._check = TopicCheck(settings.connection(), TopicAccess(tuple(self._sources), (DEAD_LETTERS,)))
        self._group: ConsumerGroup | None = None
        self._begun: frozenset[str] = frozenset()
        self._tasks: dict[Assignment, asyncio.Task[None]] = {}
        self._kept: dict[Partition, Assignment] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``. Raises what a handler raised, what the broker refuses us with, and MustRestart."""
        if (checked := await self._check.wait(stop)) is None:
            return
        group = self._group = ConsumerGroup(self._settings, list(self._sources), self, checked.partitions)

        from_ = {source.topic: source.from_ for source in self._sources.values()}

        async def join() -> None:
            await group.connect()
            while True:
                try:
                    self._begun = await positions.commit_start(group, from_)
                    break
                except KafkaError as error:
                    log.warning("group %s: where it begins is not known (%s), trying again", group.name, error)
                    await asyncio.sleep(_RETRY_S)
            group.join()

        joining, stopping = asyncio.ensure_future(join()), asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, self._failure, group.failed]
        try:
            await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
            while not any(end.done() for end in ends):
                await asyncio.wait(ends, timeout=_MEASURE_S, return_when=asyncio.FIRST_COMPLETED)
                self._outcomes.assigned((assignment.lag() for assignment in self._tasks), of=self)
                self._outcomes.late(group.lateness.worst_s())
            for failed in (end for end in ends if end.done()):
                failed.result()
        finally:
            stopping.cancel()
            joining.cancel()
            await asyncio.wait((joining,))
            await self.revoked()
            await group.close()
            self._outcomes.assigned((), of=self)

    def not_ready(self) -> list[str]:
        """Why nothing is read; empty when all assigned partitions are."""
        if self._group is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        if reasons := self._group.not_ready():
            return reasons
        opening = sorted(assignment.tp for assignment in self._tasks if assignment.next is None)
        back = {
            self._group.connection.prefixed(topic): [str(tp.partition) for tp in opening if tp.topic == topic]
            for topic in self._sources
        }
        return [f"reading back {topic}, partitions {', '.join(some)}" for topic, some in back.items() if some]

    async def revoked(self) -> None:
        """Let go of all partitions: wait for what is under way, bounded, then cancel it."""
        tasks, self._tasks = self._tasks, {}
        for assignment in tasks:
            assignment.abandon.set()
        if busy := [task for assignment, task in tasks.items() if assignment.busy]:
            await asyncio.wait(busy, timeout=LEAVE_S)
        left = [task for task in tasks.values() if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        for assignment in tasks:
            assignment.close()
        self._kept = {assignment.tp: assignment for assignment in tasks if assignment.next is not None}

    def assigned(self, tps: set[Partition]) -> None:
        """Start on these partitions.

        A partition without an offset, in a topic that the group has begun, was added to the topic: all of it is new.
        """
        if self._group is None:
            raise RuntimeError("partitions of no group")
        for tp in sorted(tps):
            source = self._sources[tp.topic]
            assignment = Assignment(self._group, tp, source.handler(tp.partition), self._outcomes, self._kept.get(tp))
            from_ = "earliest" if tp.topic in self._begun else source.from_
            task = self._tasks[assignment] = asyncio.ensure_future(
                assignment.run(from_, source.recall_s, holds=source.holds)
            )
            task.add_done_callback(partial(self._ended, tp))
        self._kept = {}

    def _ended(self, tp: Partition, task: "asyncio.Task[None]") -> None:
        """An assignment has ended: as it was abandoned, or of a failure that ends the sink."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, IllegalStateError):
            log.info("%s: no longer ours: %s", tp, error)
        elif error is not None and not isinstance(error, Abandoned) and not self._failure.done():
            self._failure.set_exception(error)


async def together(
    stop: asyncio.Event, readers: Iterable[GroupReader | Tail], beside: Iterable[Coroutine[Any, Any, None]] = ()
) -> None:
    """Run readers until ``stop``, or until one of them, or of what runs beside, ends. Raises what any raised."""
    ending, stopping = asyncio.Event(), asyncio.ensure_future(stop.wait())
    reading = [asyncio.ensure_future(reader.run(ending)) for reader in readers]
    others = [asyncio.ensure_future(one) for one in beside]
    try:
        await asyncio.wait((stopping, *reading, *others), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.set()
        for task in (stopping, *others):
            task.cancel()
        ends = await asyncio.gather(*reading, *others, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


class Assignment:
    """A partition that is ours for now. ``next`` is the offset after the last finished record, once that is known.

    ``busy``: something is under way that is worth waiting for. ``kept``: the same partition's last assignment here.
    """

    def __init__(
        self, group: ConsumerGroup, tp: Partition, handler: Handler, outcomes: Outcomes, kept: "Assignment | None"
    ) -> None:
        self.tp, self.place = tp, group.kafka_name(tp)
        self.abandon = asyncio.Event()
        self.next: int | None = None
        self.busy = False
        self._group, self._handler, self._outcomes, self._kept = group, handler, outcomes, kept
        self._over = False
        self._quiet_s = -_QUIET_EVERY_S
        self._unfinished: deque[int] = deque()

    async def run(self, from_: StartFrom, recall_s: float, *, holds: bool = False) -> None:
        """Read and deliver until abandoned. Raises Abandoned, KafkaError, and whatever the handler raises."""
        start = await self._open(from_, recall_s)
        try:
            await self._read(start.position, start.resume, holds=holds)
            if self._unfinished:
                await self._deliver(())
        finally:
            self._give_back()

    def close(self) -> None:
        """It is somebody else's now: nothing may be committed any more."""
        self._over = True

    def lag(self) -> int:
        """How many records are not finished, as of the last answer of the broker."""
        with contextlib.suppress(AssertionError, AttributeError):  # between two assignments the client has no answer
            end = self._group.end(self.tp)
            return max(0, end - self.next) if end is not None and self.next is not None else 0
        return 0

    async def _open(self, from_: StartFrom, recall_s: float) -> Start:
        """Find where to start, for as long as that takes, and go there."""
        kept, self._kept = self._kept, None
        while not self.abandon.is_set():
            try:
                start = await positions.find_start(
                    self._group, self.tp, from_, recall_s, known=kept.next if kept is not None else None
                )
            except IllegalStateError:
                raise
            except KafkaError as error:
                log.warning("%s: not opened (%s), trying again", self.place, error)
                await asyncio.sleep(_RETRY_S)
                continue
            if self.abandon.is_set():
                break
            if kept is not None and start.committed == kept.next:
                self._handler = kept._handler  # noqa: SLF001 - of this class
            self._outcomes.expired(start.expired)
            if start.committed is None:
                await self._commit(start.resume)
            self._group.seek({self.tp: start.position})
            return start
        raise Abandoned

    async def _read(self, position: int, resume: int, *, holds: bool) -> None:
        """Read on from a position; what is before ``resume`` was finished before."""
        while not self.abandon.is_set():
            if self._unfinished:
                await self._deliver(())
            elif position >= resume:
                self.next = position
            if position >= resume and (holds or not self._unfinished):
                await self._be_quiet(position)
            wait_s = _POLL_BUSY_S if self._unfinished and not holds else _POLL_S
            batch = await self._group.fetch({self.tp}, wait_s, BATCH_RECORDS)
            if self.abandon.is_set():
                return
            records: Sequence[Record] = batch.get(self.tp, ())
            if not records:
                position = await self._skip(position, resume)
                continue
            if records[0].offset != position:
                resume = await self._jump(max(position, resume), position, records[0].offset)
            if history := [record for record in records if record.offset < resume]:
                self._handler.recall(history)
                await asyncio.sleep(0)
            if len(history) < len(records):
                self.next = resume if self.next is None else self.next
                await self._deliver(records[len(history) :])
            position = records[-1].offset + 1

    async def _be_quiet(self, position: int) -> None:
        """Let the handler know that the partition is read to its end, if the broker said so just now."""
        now_s = asyncio.get_running_loop().time()
        if not self._group.is_read_to_end(self.tp, position) or now_s - self._quiet_s < _QUIET_EVERY_S:
            return
        self._quiet_s, self.busy = now_s, True
        try:
            await self._handler.quiet(self.abandon)
        finally:
            self.busy = bool(self._unfinished)

    async def _skip(self, position: int, resume: int) -> int:
        """Follow the client past what is no record, such as the end of a transaction; gives the position after it.

        It is committed unless records before it are unfinished, or a log that ends in it would never be finished.
        """
        reached = (await self._group.positions([self.tp])).get(self.tp, position)
        if reached <= position or self.abandon.is_set():
            return position
        await self._jump(max(position, resume), position, reached)
        if reached > resume and not self._unfinished:
            await self._commit(reached)
        return reached

    async def _jump(self, resume: int, wanted: int, got: int) -> int:
        """Records are missing, or the topic was created again. Gives where to resume now."""
        if got < wanted:
            log.warning("%s: offsets start again at %d: the topic was created again", self.place, got)
            self._handler.reset()
            self._give_back()
            return got
        try:
            begin = min(got, (await self._group.offsets.beginnings([self.tp]))[self.tp])
        except KafkaError as error:
            place, last = self.place, got - 1
            log.warning("%s: whether offsets %d to %d were deleted is not known: %s", place, wanted, last, error)
            return resume
        if begin > resume:
            log.warning("%s: offsets %d to %d were gone before they were read", self.place, resume, begin - 1)
            self._outcomes.expired(begin - resume)
        return resume

    async def _deliver(self, records: Sequence[Record]) -> None:
        """Deliver records step by step, each committed before the next; those that were kept before, too."""
        self._outcomes.read(len(records))
        self._unfinished.extend(record.offset for record in records)
        self.busy = True
        try:
            async with contextlib.aclosing(self._handler.deliver(records, self.abandon)) as steps:
                async for upto in steps:
                    while self._unfinished and self._unfinished[0] < upto:
                        self._unfinished.popleft()
                    await self._commit(upto)
                    self.next = upto
                    if self.abandon.is_set():
                        raise Abandoned
        finally:
            self.busy = bool(self._unfinished)

    def _give_back(self) -> None:
        """What is unfinished is not ours to finish any more."""
        self._outcomes.release(len(self._unfinished))
        self._unfinished.clear()
        self.busy = False

    async def _commit(self, offset: int) -> None:
        if self._over:
            raise Abandoned
        try:
            committed = await self._group.commit({self.tp: offset})
        except KafkaError:
            self._outcomes.committed(ok=False)
            raise
        self._outcomes.committed(ok=committed)
        if not committed:  # the group has moved on
            raise Abandoned
