"""Faust's consumer with our own drain loop and our own offsets.

Faust keeps membership, the co-partitioning assignor and its thread. What is replaced, because it loses records whenever
members come and go: how positions are set after an assignment, how records reach the agents, and what is committed.

- Positions are set by the drain loop alone, each partition explicitly, and until then nothing is taken.
- A record out of sequence is not believed the first time: it may have been fetched before a seek.
- Inputs wait until the state of their partition has been learned to where it ended at the assignment.
- Only finished prefixes are committed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from aiokafka.errors import KafkaError
from faust.transport.drivers import aiokafka as driver

from streams.reader import start
from streams.reader.ledger import Ledger, Partition, Slot
from streams.reader.log import BrokerLog

log = logging.getLogger(__name__)

Batch = list[tuple[Slot, Any]]
"""Records of one partition in offset order, each with its slot."""

_FETCH_S = 0.5
_COMMIT_S = 5.0


class Stage(Protocol):
    """What works on the records, told of everything that ends or bounds that work."""

    def forget(self) -> None:
        """Drop what is unfinished: the partitions go, or are read again."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop the state of these partition numbers."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """The broker has committed these offsets."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Where the assigned partitions end, asked of the broker at ``asked_s`` of the monotonic clock."""


class Reading:
    """What the consumer shares with the application around it.

    The topics of ``inputs`` are committed, those of ``states`` are read again by each process. ``deliver`` takes a
    batch, waiting for room; ``answered`` is called whenever the broker has answered; ``fail`` ends the process.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        inputs: frozenset[str],
        states: frozenset[str],
        deliver: Callable[[Batch], Awaitable[None]],
        fail: Callable[[str], None],
        max_open_bytes: int,
    ) -> None:
        self.stage, self.inputs, self.states = stage, inputs, states
        self.deliver, self.fail, self.max_open_bytes = deliver, fail, max_open_bytes
        self.ledger = Ledger()
        self.state_ends: dict[Partition, int] = {}
        self.commits: dict[Partition, int] = {}
        self.answers = 0
        self.holes = 0
        self.lost = 0
        self.rebalances = 0

    def answered(self) -> None:
        """The broker has answered."""
        self.answers += 1

    def pending_states(self) -> list[Partition]:
        """The state partitions that are not learned to where they ended at the assignment."""
        positions = self.ledger.positions()
        return [tp for tp, end in self.state_ends.items() if positions.get(tp, end) < end]


class LosslessConsumer(driver.Consumer):  # type: ignore[misc]  # faust has no types that pass strict
    """Reads for a :class:`Reading`, which the application sets on the class."""

    reading: Reading
    kafka: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: start.Held = start.Held()
        self._waiting: set[int] = set()
        self._full = False
        self._doubted: set[tuple[Partition, int]] = set()
        self._committing: asyncio.Task[bool] | None = None
        self.log_of_broker = BrokerLog(self._thread, self.kafka, self.reading.answered)

    # -- offsets

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Commit every input's finished prefix. One at a time; a second caller waits for the first."""
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_prefixes())
        await asyncio.wait([self._committing])
        return not self._committing.cancelled() and self._committing.exception() is None and self._committing.result()

    async def _commit_prefixes(self) -> bool:
        reading, epoch = self.reading, self.reading.ledger.epoch
        offsets = {
            tp: offset
            for tp, offset in reading.ledger.positions().items()
            if tp.topic in reading.inputs and reading.commits.get(tp) != offset
        }
        if not offsets or not await self.log_of_broker.commit(offsets):
            return False
        if epoch == reading.ledger.epoch:
            reading.commits |= offsets
            reading.stage.committed(offsets)
        return True

    # -- assignment

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:
        """Commit what is finished, in bounded time, and let everything else go."""
        committing = asyncio.ensure_future(self.commit())
        await asyncio.wait([committing], timeout=_COMMIT_S)
        self.reading.rebalances += 1
        self._end_epoch()
        await super().on_partitions_revoked(revoked)

    async def perform_seek(self) -> None:
        """Faust has an assignment: positions are unknown until the drain loop has set them."""
        self._end_epoch()

    def verify_event_path(self, now: float, tp: Any) -> None:
        """Faust's own stall detector looks at agents that never see a record here."""

    def _end_epoch(self) -> None:
        reading = self.reading
        if reading.ledger.ready:
            states = {tp: at for tp, at in reading.ledger.positions().items() if tp.topic in reading.states}
            self._held = start.Held(states, dict(reading.commits))
        reading.ledger.forget()
        reading.stage.forget()

    # -- the loop

    async def _drain_messages(self, fetcher: Any) -> None:
        while not (self.should_stop or fetcher.should_stop):
            await asyncio.sleep(0)
            try:
                await self._turn()
            except asyncio.CancelledError:
                raise
            except self.consumer_stopped_errors:
                if not self.app.should_stop:
                    raise
                return
            except Exception as error:
                log.exception("the reader failed")
                self.reading.fail(f"the reader failed: {error!r}")
                return

    async def _turn(self) -> None:
        if not self.flow_active:
            await asyncio.sleep(0.05)
        elif not self.reading.ledger.ready:
            await self._position()
        else:
            await self._read()

    async def _position(self) -> None:
        """Set every position, or none: an assignment that changes meanwhile is positioned anew."""
        reading = self.reading
        epoch = reading.ledger.epoch
        assigned = {Partition(tp.topic, tp.partition) for tp in self.assignment()}
        inputs = {tp for tp in assigned if tp.topic in reading.inputs}
        states = {tp for tp in assigned if tp.topic in reading.states}
        try:
            found = await start.find(self.log_of_broker, inputs, states, self._held)
            if epoch != reading.ledger.epoch or assigned != {Partition(*tp) for tp in self.assignment()}:
                return
            await self.log_of_broker.seek(found.positions)
        except (KafkaError, AssertionError) as error:
            log.info("positions not set, trying again: %r", error)
            await asyncio.sleep(0.2)
            return
        if epoch == reading.ledger.epoch:
            self._begin(found, states)

    def _begin(self, found: start.Start, states: set[Partition]) -> None:
        reading = self.reading
        for tp, offset in found.lost.items():
            reading.lost += max(0, found.positions[tp] - offset)
            log.error(
                "%s: committed %s is not in the log any more; reading on from %s", tp, offset, found.positions[tp]
            )
        held = {tp.partition for tp in self._held.states}
        reading.stage.drop(found.fresh | (held - {tp.partition for tp in states}))
        reading.ledger.begin(found.positions)
        reading.commits = {tp: offset for tp, offset in found.positions.items() if tp.topic in reading.inputs}
        reading.state_ends = dict(found.state_ends)
        self._doubted.clear()
        self._waiting = {tp.partition for tp in states}
        log.info("reading %s input and %s state partitions", len(found.positions) - len(states), len(states))

    async def _read(self) -> None:
        self._release()
        active = self._active()
        if not active:
            await asyncio.sleep(0.05)
            return
        epoch = self.reading.ledger.epoch
        records = await self._getmany(active, _FETCH_S)
        if self._waiting and not records:
            await self._step_over_markers()
        ordered = sorted(records, key=lambda tp: tp.topic not in self.reading.states)  # state first
        for tp in ordered:
            if epoch != self.reading.ledger.epoch:
                return
            await self._take(Partition(tp.topic, tp.partition), records[tp])

    def _active(self) -> set[driver.TopicPartition]:
        """What is to be fetched: state always, an input once its state is learned and there is room."""
        reading = self.reading
        return {
            driver.TopicPartition(*tp)
            for tp in reading.ledger.positions()
            if tp.topic in reading.states or not (self._full or tp.partition in self._waiting)
        }

    def _release(self) -> None:
        """Let inputs flow whose state is learned; hold all back while too many bytes are open."""
        reading = self.reading
        if self._waiting:
            self._waiting &= {tp.partition for tp in reading.pending_states()}
        limit = reading.max_open_bytes // 2 if self._full else reading.max_open_bytes
        self._full = reading.ledger.open_bytes >= limit

    async def _step_over_markers(self) -> None:
        """A partition may end in markers that no reader is given: the client's position tells that nothing is left."""
        for tp in self.reading.pending_states():
            try:
                position = await self.log_of_broker.position(tp)
            except (KafkaError, AssertionError):
                return
            if position >= self.reading.state_ends.get(tp, 0) and not self.reading.ledger.open_in(tp):
                self.reading.state_ends.pop(tp, None)

    async def _take(self, tp: Partition, records: Iterable[Any]) -> None:
        ledger, batch = self.reading.ledger, []
        for record in records:
            expected = ledger.expected(tp)
            if expected is None:
                break
            if record.offset < expected:
                continue
            if record.offset > expected and not await self._believe(tp, expected, record.offset):
                break
            size = len(record.value or b"") + len(record.key or b"")
            batch.append((ledger.admit(tp, record.offset, size), record))
        if batch:
            await self.reading.deliver(batch)

    async def _believe(self, tp: Partition, expected: int, offset: int) -> bool:
        """Whether a hole is real. The first time, look again: the records may have been fetched before a seek."""
        if (tp, expected) in self._doubted:
            self.reading.holes += 1
            self._doubted.discard((tp, expected))
            log.warning("%s: no records from %s to %s", tp, expected, offset - 1)
            return True
        self._doubted.add((tp, expected))
        try:
            await self.log_of_broker.seek({tp: expected})
        except (KafkaError, AssertionError):
            self._end_epoch()  # not ours any more
        return False
