"""One partition, from when it is assigned to when it is taken away: a batch, its delivery, and only then the commit.

In: the partition's records. Out: a handler's steps, the offset committed after each.
State: the next offset to finish. Kafka is the buffer: what is not delivered is not read past.
On failure: whoever takes the partition away sets ``abandon`` and waits, bounded, for what is under way. Everything that
was awaited may come back after that, so it is looked at before anything is committed or kept.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol

from aiokafka.errors import IllegalStateError, KafkaError

from delivery import positions
from delivery.dead_letters import Abandoned, Record
from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.positions import From, Start
from sinks.outcomes import Outcomes

log = logging.getLogger(__name__)

BATCH_RECORDS = 500
"""So many records of a partition are read, and held, at a time."""

_POLL_S = 0.5
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


class Assignment:
    """A partition that is ours for now. ``next`` is the offset after the last finished record, once that is known.

    ``busy``: something is under way that is worth waiting for. ``kept``: the same partition's last assignment here.
    """

    def __init__(
        self,
        group: ConsumerGroup,
        tp: Partition,
        handler: Handler,
        outcomes: Outcomes,
        kept: "Assignment | None",
    ) -> None:
        self.tp = tp
        self.abandon = asyncio.Event()
        self.next: int | None = None
        self.busy = False
        self._group = group
        self._handler = handler
        self._outcomes = outcomes
        self._kept = kept
        self._over = False
        self._quiet_s = -_QUIET_EVERY_S
        self._unfinished: deque[int] = deque()

    async def run(self, from_: From, recall_s: float) -> None:
        """Read and deliver until abandoned. Raises Abandoned, KafkaError, and whatever the handler raises."""
        start = await self._open(from_, recall_s)
        self._kept = None
        try:
            await self._read(start.position, start.resume)
            if self._unfinished:
                await self._deliver(())
        finally:
            self._give_back()

    async def _read(self, position: int, resume: int) -> None:
        """Read on from a position; what is before ``resume`` was finished before."""
        while not self.abandon.is_set():
            if self._unfinished:
                await self._deliver(())
            elif position >= resume:
                self.next = position
                await self._when_quiet(position)
            batch = await self._group.fetch({self.tp}, _POLL_S, BATCH_RECORDS)
            if self.abandon.is_set():
                return
            records: Sequence[Record] = batch.get(self.tp, ())
            if not records:
                position = await self._skip(position, resume)
                continue
            if records[0].offset != position:
                resume = await self._jump(max(position, resume), position, records[0].offset)
            await self._process(records, resume)
            position = records[-1].offset + 1

    def close(self) -> None:
        """It is somebody else's now: nothing may be committed any more."""
        self._over = True

    def lag(self) -> int:
        """How many records are not finished, as of the last answer of the broker."""
        with contextlib.suppress(AssertionError, AttributeError):  # between two assignments the client has no answer
            end = self._group.end(self.tp)
            return max(0, end - self.next) if end is not None and self.next is not None else 0
        return 0

    async def _open(self, from_: From, recall_s: float) -> Start:
        """Find where to start, for as long as that takes, and go there."""
        known = self._kept.next if self._kept else None
        while not self.abandon.is_set():
            try:
                start = await positions.find(self._group, self.tp, from_, recall_s, known=known)
            except IllegalStateError:
                raise
            except KafkaError as error:
                log.warning("%s: not opened (%s), trying again", self.tp, error)
                await asyncio.sleep(_RETRY_S)
            else:
                await self._go(start)
                return start
        raise Abandoned

    async def _go(self, start: Start) -> None:
        if self.abandon.is_set():
            raise Abandoned
        if self._kept is not None and start.committed == self._kept.next:
            self._handler = self._kept._handler  # noqa: SLF001 - of this class
        self._outcomes.expired(start.expired)
        if start.committed is None:
            await self._commit(start.resume)
        self._group.seek({self.tp: start.position})

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
        """Records are missing, or the topic was made anew. Gives where to resume now."""
        if got < wanted:
            log.warning("%s: offsets start again at %d: the topic was made anew", self.tp, got)
            self._handler.reset()
            self._give_back()
            return got
        try:
            begin = min(got, (await self._group.offsets.beginnings([self.tp]))[self.tp])
        except KafkaError as error:
            log.warning("%s: whether offsets %d to %d were deleted is not known: %s", self.tp, wanted, got - 1, error)
            return resume
        if begin > resume:
            log.warning("%s: offsets %d to %d were gone before they were read", self.tp, resume, begin - 1)
            self._outcomes.expired(begin - resume)
        return resume

    async def _process(self, records: Sequence[Record], resume: int) -> None:
        history = [record for record in records if record.offset < resume]
        if history:
            self._handler.recall(history)
            await asyncio.sleep(0)
        if len(history) < len(records):
            self.next = resume if self.next is None else self.next
            await self._deliver(records[len(history) :])

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

    async def _when_quiet(self, position: int) -> None:
        """Tell the handler that the partition is read to its end, if the broker said so just now."""
        now_s = asyncio.get_running_loop().time()
        if not self._group.is_read_to_end(self.tp, position) or now_s - self._quiet_s < _QUIET_EVERY_S:
            return
        self._quiet_s = now_s
        with self._work():
            await self._handler.quiet(self.abandon)

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
