"""Reads topics for a sink, as a member of its consumer group: a task for each assigned partition.

In: the assigned partitions and their records. Out: deliveries by a handler, with a commit after each step of them.
State: for each partition, the next offset to finish; and the assignments before the last rebalance, so that a partition
that comes back unchanged is not read back. Kafka is the buffer: nothing past an undelivered record is committed.
On failure: the group reconnects by itself. A failure of one partition ends the sink, which is then restarted. When a
partition is revoked, ``abandon`` is set, and a delivery in progress gets a limited time to end. Any await may return
after that, so ``abandon`` is checked before anything is committed or kept.
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
from delivery.dead_letters import Abandoned, DeadLetters, Record
from delivery.group import ConsumerGroup
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.positions import Back, Start, StartFrom
from delivery.settings import DEAD_LETTERS, MemberSettings, TopicAccess
from delivery.tail import Tail
from delivery.tasks import Turns, until_stopped
from delivery.topic_admin import TopicCheck
from sinks.outcomes import Outcomes

log = logging.getLogger(__name__)

BATCH_RECORDS = 250
"""The most records of a partition that are fetched at a time."""

LEAVE_S = 4.0
"""How long a delivery in progress may still take when its partition is revoked."""

_NOT_IN_LOG = "is not in the log: the topic was created again, or a broker has lost its last records"
_CANCEL_S = 0.5
_MEASURE_S = 1.0
_POLL_S = 0.5
_POLL_BUSY_S = 0.1
_RETRY_S = 0.5
_QUIET_EVERY_S = 1.0


class Handler(Protocol):
    """Delivers the records of one partition, in their order. One that keeps nothing has only :meth:`deliver`."""

    def recall(self, record: Record) -> None:
        """Restore the handler's state from a record that was finished before. Delivers nothing."""
        return

    def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Deliver the records in steps, and yield after each step the offset after the last finished record.

        That offset is committed before the next step. The handler counts the outcomes of its records. It may return
        with unfinished records; then it is called again soon, with more records or with none, and goes on with those
        that it kept. Raises Abandoned.
        """

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Called about once a second while the partition is read to its end, whether or not all records are finished.
        Raises Abandoned."""
        return

    def reset(self) -> None:
        """Forget everything: the topic was recreated, and its offsets start again."""
        return


class Source(NamedTuple):
    """A topic that a sink reads, and how to make the handler of a partition, by its number.

    ``from_``: where a group without offsets starts. ``recall``: how much of the log before the first unfinished
    record is read back to restore the handler's state; ``WHOLE_LOG``: all of it. ``holds``: the handler may keep
    records unfinished until later ones come.
    """

    topic: str
    handler: Callable[[int], Handler]
    from_: StartFrom
    recall: Back
    holds: bool = False


class GroupReader:
    """A member of a consumer group. Its handlers write dead letters to ``letters``, and take ``turns``."""

    def __init__(
        self,
        settings: MemberSettings,
        sources: Sequence[Source],
        outcomes: Outcomes,
        letters: DeadLetters | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._settings, self._outcomes, self._letters = settings, outcomes, letters
        self._turns = turns or Turns()
        self._sources = {source.topic: source for source in sources}
        self._check = TopicCheck(settings.connection(), TopicAccess(tuple(self._sources), (DEAD_LETTERS,)))
        self._group: ConsumerGroup | None = None
        self._started_topics: frozenset[str] = frozenset()
        self._tasks: dict[Assignment, asyncio.Task[None]] = {}
        self._kept: dict[Partition, Assignment] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``. Raises what a handler raises, and MustRestart."""
        if (checked := await self._check.wait(stop)) is None:
            return
        group = self._group = ConsumerGroup(self._settings, list(self._sources), self, checked.partitions)

        from_ = {source.topic: source.from_ for source in self._sources.values()}

        async def join() -> None:
            await group.connect()
            while True:
                try:
                    self._started_topics = await positions.commit_start(group, from_)
                    break
                except KafkaError as error:
                    log.warning("group %s: where it begins is not known (%s), trying again", group.name, error)
                    await asyncio.sleep(_RETRY_S)
            group.join()

        stopping = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, self._failure, group.failed]
        try:
            await until_stopped(stop, join())
            while not any(end.done() for end in ends):
                await asyncio.wait(ends, timeout=_MEASURE_S, return_when=asyncio.FIRST_COMPLETED)
                self._outcomes.assigned((assignment.lag() for assignment in self._tasks), of=self)
                self._outcomes.late(group.lateness.worst_s())
            for failed in (end for end in ends if end.done()):
                failed.result()
        finally:
            self._failure.cancel()  # nobody awaits it any more: what is assigned while the group closes ends with it
            stopping.cancel()
            await self.revoked()
            await group.close()
            self._outcomes.assigned((), of=self)

    def not_ready(self) -> list[str]:
        """Why records are not read; empty when all assigned partitions are."""
        if self._group is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        if reasons := self._group.not_ready():
            return reasons
        opening = sorted(assignment.tp for assignment in self._tasks if assignment.lag() is None)
        reading_back = {
            self._group.connection.prefixed(topic): [str(tp.partition) for tp in opening if tp.topic == topic]
            for topic in self._sources
        }
        reasons = self._letters.not_ready() if self._letters is not None else []
        return reasons + [
            f"reading back {topic}, partitions {', '.join(tps)}" for topic, tps in reading_back.items() if tps
        ]

    async def revoked(self) -> None:
        """Give up all partitions: wait a limited time for deliveries in progress, then cancel them."""
        tasks, self._tasks = self._tasks, {}
        for assignment in tasks:
            assignment.abandon.set()
        if busy := [task for assignment, task in tasks.items() if assignment.busy]:
            await asyncio.wait(busy, timeout=LEAVE_S)
        running = [task for task in tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_S)
        for assignment in tasks:
            assignment.close()
        self._kept = {assignment.tp: assignment for assignment in tasks if assignment.next is not None}

    def assigned(self, tps: set[Partition]) -> None:
        """Start to read these partitions.

        A partition without an offset, in a topic for which the group has others, was added to the topic: it is read
        from its beginning.
        """
        if self._group is None:
            raise RuntimeError("partitions of no group")
        for tp in sorted(tps):
            source = self._sources[tp.topic]
            handler, kept = source.handler(tp.partition), self._kept.get(tp)
            assignment = Assignment(self._group, tp, handler, self._outcomes, kept, turns=self._turns)
            from_ = "earliest" if tp.topic in self._started_topics else source.from_
            task = self._tasks[assignment] = asyncio.ensure_future(
                assignment.run(from_, source.recall, holds=source.holds)
            )
            task.add_done_callback(partial(self._ended, tp))
        self._kept = {}

    def _ended(self, tp: Partition, task: "asyncio.Task[None]") -> None:
        """An assignment has ended: it was abandoned, or a failure ends the sink."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, IllegalStateError):
            log.info("%s: no longer ours: %s", tp, error)
        elif error is not None and not isinstance(error, Abandoned) and not self._failure.done():
            self._failure.set_exception(error)


async def together(
    stop: asyncio.Event, readers: Iterable[GroupReader | Tail], others: Iterable[Coroutine[Any, Any, None]] = ()
) -> None:
    """Run readers until ``stop``, or until one of them or one of ``others`` ends. Raises what any of them raises."""
    ending, stopping = asyncio.Event(), asyncio.ensure_future(stop.wait())
    reading = [asyncio.ensure_future(reader.run(ending)) for reader in readers]
    running = [asyncio.ensure_future(other) for other in others]
    try:
        await asyncio.wait((stopping, *reading, *running), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.set()
        for task in (stopping, *running):
            task.cancel()
        results = await asyncio.gather(*reading, *running, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


class Assignment:
    """An assigned partition. ``next``: the offset after the last finished record, None until it is known.

    ``busy``: a delivery is in progress that is worth waiting for. ``kept``: this process's last assignment of the same
    partition.
    """

    def __init__(
        self,
        group: ConsumerGroup,
        tp: Partition,
        handler: Handler,
        outcomes: Outcomes,
        kept: "Assignment | None",
        *,
        turns: Turns,
    ) -> None:
        self.tp, self.name = tp, group.kafka_name(tp)
        self.abandon = asyncio.Event()
        self.next: int | None = None
        self.busy = False
        self._group, self._handler, self._outcomes, self._kept = group, handler, outcomes, kept
        self._turns, self._closed = turns, False
        self._quiet_s = -_QUIET_EVERY_S
        self._unfinished: deque[int] = deque()

    async def run(self, from_: StartFrom, recall: Back, *, holds: bool = False) -> None:
        """Read and deliver until abandoned. Raises Abandoned, IllegalStateError, and whatever the handler raises."""
        start = await self._open(from_, recall)
        try:
            await self._read(start.position, start.resume, holds=holds)
            if self._unfinished:
                await self._deliver(())
        finally:
            self._give_back()

    def close(self) -> None:
        """Another member may have it now: commit nothing any more."""
        self._closed = True

    def lag(self) -> int | None:
        """The number of unfinished records, by the last end offset from the broker; None if that is not known yet."""
        with contextlib.suppress(AssertionError, AttributeError):  # between two assignments the client has no answer
            end = self._group.end(self.tp)
            return None if end is None or self.next is None else max(0, end - self.next)
        return None

    async def _open(self, from_: StartFrom, recall: Back) -> Start:
        """Find the start offset, for as long as that takes, and seek there."""
        kept, self._kept = self._kept, None
        while not self.abandon.is_set():
            try:
                start = await positions.find_start(
                    self._group, self.tp, from_, recall, last_end=kept.next if kept is not None else None
                )
            except IllegalStateError:
                raise
            except KafkaError as error:
                log.warning("%s: not opened (%s), trying again", self.name, error)
                await asyncio.sleep(_RETRY_S)
                continue
            if self.abandon.is_set():
                break
            if kept is not None and start.committed == kept.next:
                self._handler = kept._handler  # noqa: SLF001 - of this class
            self._outcomes.expired(start.expired)
            if start.is_torn and not start.expired:
                lost, begin = start.committed, start.resume
                log.warning("%s: offset %s %s; reading on from %d", self.name, lost, _NOT_IN_LOG, begin)
            if start.committed != start.resume:  # or the lag of a partition without a new record would be wrong
                await self._commit(start.resume)
            self._group.seek({self.tp: start.position})
            return start
        raise Abandoned

    async def _read(self, position: int, resume: int, *, holds: bool) -> None:
        """Read on from a position; the records before ``resume`` were finished before."""
        while not self.abandon.is_set():
            if self._unfinished:
                await self._deliver(())
            elif position >= resume:
                # no delivery commits markers: a log that ends in them would never be finished
                if position > (resume if self.next is None else self.next):
                    await self._commit(position)
                self.next = position
            if position >= resume:
                await self._be_quiet(position)
            wait_s = _POLL_BUSY_S if self._unfinished and not holds else _POLL_S
            batch = await self._group.fetch({self.tp}, wait_s, BATCH_RECORDS)
            if self.abandon.is_set():
                return
            records: Sequence[Record] = batch.get(self.tp, ())
            # the client goes past offsets without a record, such as transaction markers
            skipped_to = {} if records else await self._group.positions([self.tp])
            reached = records[0].offset if records else max(position, skipped_to.get(self.tp, position))
            if reached != position and not self.abandon.is_set():
                resume, position = await self._jump(position, resume, reached), reached
            history = [record for record in records if record.offset < resume]
            for record in history:
                await self._turns.next()
                self._handler.recall(record)
            if len(history) < len(records):
                self.next = resume if self.next is None else self.next
                await self._deliver(records[len(history) :])
            position = records[-1].offset + 1 if records else position

    async def _be_quiet(self, position: int) -> None:
        """Call the handler's ``quiet``, if the broker has just confirmed that the partition is read to its end."""
        now_s = asyncio.get_running_loop().time()
        if not self._group.is_read_to_end(self.tp, position) or now_s - self._quiet_s < _QUIET_EVERY_S:
            return
        self._quiet_s, self.busy = now_s, True
        try:
            with contextlib.suppress(Abandoned):  # what is unfinished still has its time to end
                await self._handler.quiet(self.abandon)
        finally:
            self.busy = bool(self._unfinished)

    async def _jump(self, position: int, resume: int, got: int) -> int:
        """Handle a gap in the offsets from a position on, or a recreated topic. Returns where to resume."""
        if got < position:
            log.warning("%s: offset %d %s; reading on from %d", self.name, position, _NOT_IN_LOG, got)
            self._handler.reset()
            self._give_back()
            await self._commit(got)  # or who reads it next would go on at the old offset, if the log has grown past it
            self.next = got
            return got
        resume = max(position, resume)
        try:
            begin = min(got, (await self._group.offsets.beginnings([self.tp]))[self.tp])
        except KafkaError as error:
            last = got - 1
            log.warning("%s: whether offsets %d to %d were deleted is not known: %s", self.name, position, last, error)
            return resume
        if begin > resume:
            log.warning("%s: offsets %d to %d were gone before they were read", self.name, resume, begin - 1)
            self._outcomes.expired(begin - resume)
        return resume

    async def _deliver(self, records: Sequence[Record]) -> None:
        """Deliver records, with those that the handler has kept, step by step, each committed before the next."""
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
        """Count the unfinished records as released: the partition's next owner reads them."""
        self._outcomes.release(len(self._unfinished))
        self._unfinished.clear()
        self.busy = False

    async def _commit(self, offset: int) -> None:
        """Commit an offset, for as long as that takes. Raises Abandoned."""
        while not self._closed:
            try:
                committed = await self._group.commit({self.tp: offset})
            except KafkaError as error:
                self._outcomes.committed(ok=False)
                log.warning("%s: not committed (%s), trying again", self.name, describe(error))
                if self.abandon.is_set():
                    break
                await asyncio.sleep(_RETRY_S)
                continue
            self._outcomes.committed(ok=committed)
            if committed:
                return
            break  # the group has moved on
        raise Abandoned
