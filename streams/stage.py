"""The base of the workers of all streams: decoding, dead letters, misplaced nodes, and metrics.

Source: murmur2 is the partitioner of Kafka's Java clients.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from delivery.clock import now_ms
from delivery.dead_letters import send_letter
from delivery.instruments import Instrument, Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable, partition_of
from delivery.tasks import Turns
from delivery.watchdog import LATENESS
from streams.app import ReaderApp
from streams.caught_up import Ends, PartitionState
from streams.reader import Batch
from topics.dead_letters import Origin
from topics.topic import MAX_MESSAGE_BYTES, node_key

log = logging.getLogger(__name__)

ATTRIBUTED, SAMPLES = "gpu.attributed", "gpu.samples"
_WATCH_EVERY_S = 1.0
_MANY_WRITES = 256

COMMON: tuple[Instrument, ...] = (
    Instrument("records_read_total", "counter", "Records read; a worker that has lost a partition and has it again"
               " reads some of them again.", ("topic",)),
    Instrument("records_delivered_total", "counter", "Records that need nothing more: the broker has what came of"
               " them, or they are state that is known now.", ("topic",)),
    Instrument("records_duplicate_total", "counter", "Records that say nothing new: replays, and malformed state that"
               " has its dead letter.", ("topic",)),
    Instrument("records_dead_lettered_total", "counter", "Records that went to gpu.dead-letters, by why: undecodable,"
               " key, oversized or unsendable.", ("topic", "reason")),
    Instrument("records_released_total", "counter", "Records given back unfinished when partitions went, for whoever"
               " reads them next.", ("topic",)),
    Instrument("records_held", "gauge", "Records read and not finished.", ("topic",)),
    Instrument("open_bytes", "gauge", "Bytes of records that were read and are not finished."),
    Instrument("nodes", "gauge", "Nodes whose state is held."),
    Instrument("lag_records", "gauge", "Records not yet finished, by topic.", ("topic",)),
    Instrument("misplaced_nodes_total", "counter", "Nodes whose key does not belong in their partition: another"
               " partitioner wrote them."),
    Instrument("rebalances_total", "counter", "Times that partitions were taken away."),
    Instrument("holes_total", "counter", "Gaps in the offsets of a log: ends of transactions, records that were"
               " aborted, compacted or deleted."),
    Instrument("lost_offsets_total", "counter", "Offsets that retention, or somebody, deleted before they were read."),
    LATENESS,
)  # fmt: skip
"""The metrics of every stream, without their prefix: each stream lists them with their full names."""

Reason = Literal["undecodable", "key", "oversized", "unsendable"]


class HasNode(Protocol):
    @property
    def cluster(self) -> str: ...
    @property
    def node(self) -> str: ...


R = TypeVar("R", bound=HasNode)
T = TypeVar("T")
P = TypeVar("P")


class Malformed(Exception):
    """A record that can never be used; dead-letter it. ``reason`` is the label of its metric, the message says more."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def decode_value(decode: Callable[[bytes], T], value: bytes | None) -> T:
    """The record in a value. Raises Malformed."""
    if value is None:
        raise Malformed("undecodable", "no value")
    if len(value) > MAX_MESSAGE_BYTES:
        raise Malformed("oversized", f"{len(value)} bytes, and a record may have {MAX_MESSAGE_BYTES}")
    try:
        return decode(value)
    except msgspec.DecodeError as error:
        raise Malformed("undecodable", str(error)) from error


def decode_record(decode: Callable[[bytes], R], key: bytes | None, value: bytes | None) -> R:
    """The record of a topic that is keyed by node. Raises Malformed."""
    record = decode_value(decode, value)
    if key != node_key(record.cluster, record.node):
        raise Malformed("key", f"the key {key!r:.300} is not {record.cluster}/{record.node}")
    return record


def name_record(error: Exception, slot: Slot) -> None:
    """Add to the traceback at which record a stage failed: somebody may have to skip that record."""
    error.add_note(f"{slot.tp.topic}, partition {slot.tp.partition}, offset {slot.offset}")


class WriteTasks:
    """The tasks in which a worker writes to Kafka; if one fails, ``fail`` ends the process. ``leftover`` are those that
    began before the last :meth:`forget`.

    ``room`` is set while fewer than ``_MANY_WRITES`` of them run. While it is not set, no further record is used: that
    may need one more.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self.running: set[asyncio.Task[object]] = set()
        self.leftover: set[asyncio.Task[object]] = set()
        self.room = asyncio.Event()
        self.room.set()

    def start(self, work: Coroutine[Any, Any, object], *, failure: str = "not written") -> None:
        """Start to write. If it fails, the process ends with ``failure`` and the error."""

        def on_done(task: "asyncio.Task[object]") -> None:
            self.running.discard(task)
            self.leftover.discard(task)
            if len(self.running) < _MANY_WRITES:
                self.room.set()
            if not task.cancelled() and task.exception() is not None:
                self._fail(f"{failure}: {task.exception()!r}")

        task = asyncio.create_task(work)
        self.running.add(task)
        if len(self.running) >= _MANY_WRITES:
            self.room.clear()
        task.add_done_callback(on_done)

    def forget(self) -> None:
        """The records are read again. They may be used only when the writes that are still running have ended."""
        self.leftover |= self.running


class Worker(ABC, Generic[P]):
    """The base of all workers: it processes batches, keeps the state of each partition number, dead-letters malformed
    records, looks for misplaced nodes, and counts. ``stage`` is the stream's name; ``partitions`` is how many
    partitions its topics have.

    A worker defines ``new_partition``, which makes the state of a partition; and ``batch_failure``, what is logged if a
    batch fails and the process ends.
    """

    app: ReaderApp
    new_partition: Callable[[int], P]
    batch_failure: str

    def __init__(self, instruments: Instruments, *, stage: str, partitions: int) -> None:
        self._instruments, self._stage, self._partition_count = instruments, stage, partitions
        self._partitions: dict[int, P] = {}
        self._counted: Counter[tuple[str, ...]] = Counter()
        self._write_tasks, self._turns = WriteTasks(lambda reason: self.app.fail(reason)), Turns()

    async def handle(self, batch: Batch) -> None:
        """Process a batch of one partition. Raises nothing: a failure here ends the process."""
        if not batch:
            return
        try:
            await self.process(batch)
        except Exception as error:
            log.exception("%s", self.batch_failure)
            self.app.fail(f"{self.batch_failure}: {error!r}")

    @abstractmethod
    async def process(self, batch: Batch) -> None:
        """Process the records of a batch of one partition."""

    def _partition(self, number: int) -> P:
        """The state of a partition, made at first use."""
        if number not in self._partitions:
            self._partitions[number] = self.new_partition(number)
        return self._partitions[number]

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop the state of these partitions."""
        for number in partitions:
            self._partitions.pop(number, None)

    def check_place(self, partition: int, key: bytes) -> None:
        """Count and log a new node whose key does not belong in its partition: another partitioner put it there."""
        if partition_of(key, self._partition_count) != partition:
            self._instruments.counter(f"gpustream_{self._stage}_misplaced_nodes_total").inc()
            node = key.decode("utf-8", "replace")
            log.warning("%s: it is in partition %s, where murmur2 would not put it", node, partition)

    async def dead_letter(self, slot: Slot, record: Any, reason: Reason, error: str) -> None:
        """Send a record to the dead letters; its slot is finished when the letter is acknowledged.
        State is read again at each start: a record of it that has a dead letter gets no second one."""
        if self.app.reader.is_settled(slot):
            slot.outcome = ("duplicate",)
            self.app.finish(slot)
            return
        slot.outcome = ("dead_lettered", reason)
        partition = f"{record.topic} partition {record.partition}"
        log.warning("%s: dead-lettered at offset %s: %s: %.300s", partition, slot.offset, reason, error)
        origin = Origin(record.topic, record.partition, slot.offset)
        sent = await send_letter(self.app.sender, record, origin, stage=self._stage, error=f"{reason}: {error}")

        def on_done(sent: "asyncio.Future[int]") -> None:
            if not sent.cancelled() and isinstance(sent.exception(), Unsendable):  # it would be at each restart
                log.error(
                    "%s partition %d: not even the dead letter of offset %d could be sent: %s",
                    *origin,
                    sent.exception(),
                )
                self.app.finish(slot)
            else:
                self.app.finish_when(slot, sent)

        sent.add_done_callback(on_done)

    def observe(self) -> None:
        """Set the metrics from what the reader and its ledger have counted, all as of one moment."""
        reader, instruments, prefix = self.app.reader, self._instruments, f"gpustream_{self._stage}"
        instruments.gauge(f"{prefix}_open_bytes").set(reader.ledger.open_bytes)
        instruments.gauge(f"{prefix}_loop_late_seconds").set(self.app.group.lateness.worst_s())
        for topic, held in reader.ledger.held.items():
            instruments.gauge(f"{prefix}_records_held", topic).set(held)
        ended = reader.ledger.counts.items()
        counts = {(f"records_{end}", topic, *reason): count for (topic, end, *reason), count in ended}
        counts |= {("rebalances",): reader.rebalances, ("holes",): reader.holes, ("lost_offsets",): reader.lost}
        for (name, *labels), count in counts.items():
            instruments.counter(f"{prefix}_{name}_total", *labels).inc(count - self._counted[name, *labels])
            self._counted[name, *labels] = count


class Clocks:
    """The worker's own clocks; tests replace them."""

    def monotonic_s(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return now_ms()


N = TypeVar("N", bound=PartitionState)


class NodeWorker(Worker[N], Generic[N]):
    """The base of all workers that read gpu.attributed: it processes records in order, waits for acknowledgements, and
    checks each partition once a second.

    A worker defines ``inputs``, the topics that wait for the writes of an earlier epoch; and ``lag_topics``, the topics
    whose lag is a metric.
    """

    inputs: tuple[str, ...]
    lag_topics: tuple[str, ...]

    def __init__(self, instruments: Instruments, *, stage: str, partitions: int, clocks: Clocks | None) -> None:
        super().__init__(instruments, stage=stage, partitions=partitions)
        self._clocks = clocks or Clocks()

    @property
    def epoch(self) -> int:
        """The number of the reader's epoch. What was awaited in an earlier one is not used."""
        return self.app.reader.ledger.epoch

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the brokers' clock, as far as acknowledgements show how this one differs."""
        return self._clocks.now_ms() - (self.app.sender.ahead_ms or 0)

    @abstractmethod
    def handle_record(self, topic: str, partition: N, slot: Slot, record: Any) -> None:
        """Process a record. Raises Malformed."""

    @abstractmethod
    def check_clock(self, partition: N) -> None:
        """Do what has to be done in a partition because time passes."""

    @abstractmethod
    def close_silent(self, partition: N) -> None:
        """The log of a partition has advanced: find the nodes that are silent."""

    async def process(self, batch: Batch) -> None:
        topic, number = batch[0][0].tp
        if topic in self.inputs and self._write_tasks.leftover:
            await asyncio.wait(self._write_tasks.leftover)
        await self.handle_batch(topic, self._partition(number), batch)

    async def handle_batch(self, topic: str, partition: N, batch: Batch) -> None:
        """Process each record of a batch, until the partition is revoked."""
        for slot, record in batch:
            await self._write_tasks.room.wait()
            await self._turns.next()
            if not self.app.is_current(slot):
                return
            try:
                self.handle_record(topic, partition, slot, record)
            except Malformed as error:
                await self.dead_letter(slot, record, error.reason, str(error))
            except Exception as error:
                name_record(error, slot)
                raise
        if topic == ATTRIBUTED:
            partition.caught_up.handled = batch[-1][0].offset
            self.close_silent(partition)

    async def _await_acks(self, kind: str, sent: Iterable["asyncio.Future[int]"]) -> list[int | None]:
        """Wait for all acknowledgements of a kind of record, and return the offset of each. A record that can never be
        sent is counted and has none: to fail because of it would fail again after each restart."""
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        for error in outcomes:
            if isinstance(error, Unsendable):
                self._instruments.counter(f"gpustream_{self._stage}_unsendable_total", kind).inc()
                log.error("a record of %s (%s) is left out: %s", self._stage, kind, error)
            elif isinstance(error, BaseException):
                raise error
        return [outcome if isinstance(outcome, int) else None for outcome in outcomes]

    async def watch(self) -> None:
        """Once a second, check each partition whose state has been read. Never returns."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            unready = {tp.partition for tp in self.app.reader.pending_states()}
            for number in self._partitions.keys() - unready:
                self.check_partition(number)
            self.observe()

    def check_partition(self, number: int) -> None:
        """Note how far an assigned partition was read, and do what has to be done in it because time passes."""
        ledger, tp = self.app.reader.ledger, Partition(ATTRIBUTED, number)
        if (position := ledger.expected(tp)) is not None:
            partition = self._partition(number)
            partition.caught_up.read(position, ledger.last_unfinished(tp))
            self.check_clock(partition)

    def forget(self) -> None:
        """Go back to the states that the broker has: the later records are read again, once all writes have ended."""
        for partition in self._partitions.values():
            partition.forget()
        self._write_tasks.forget()

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing to do: no state is kept for records that may be read again."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Set the lag from where partitions end. Whether a node without a tick is silent follows from it, too."""
        lags: Counter[str] = Counter()
        for tp, end in ends.items():
            position = self.app.reader.ledger.expected(tp)
            lags[tp.topic] += max(0, end - position) if position is not None else 0
            if tp.topic == ATTRIBUTED:
                self._partition(tp.partition).caught_up.ends(
                    Ends(asked_s, end, ends.get(Partition(SAMPLES, tp.partition)))
                )
        for topic in self.lag_topics:
            self._instruments.gauge(f"gpustream_{self._stage}_lag_records", topic).set(lags[topic])
