"""What every stream does beside its own work: decoding, dead letters, nodes in the wrong place, counts, its one agent.

Source: murmur2 is the partitioner of Kafka's Java clients.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec
from aiokafka.partitioner import murmur2

from delivery.dead_letters import send_letter
from delivery.instruments import Instrument, Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from delivery.settings import MemberSettings
from delivery.topic_admin import TopicCheck
from delivery.watchdog import fail_stop, lateness_instrument
from streams import STREAMS, reader
from streams.app import ReaderApp
from streams.caught_up import Ends, PartitionState
from streams.reader import Batch, Reader, Reads
from topics.dead_letters import Origin
from topics.topic import MAX_MESSAGE_BYTES, node_key

log = logging.getLogger(__name__)

ATTRIBUTED, SAMPLES = "gpu.attributed", "gpu.samples"
_LOOK_EVERY_S = 1.0


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
    lateness_instrument("")._replace(name="loop_late_seconds"),
)  # fmt: skip
"""What every stream says of itself; the names are in full where a stream lists its own."""

Reason = Literal["undecodable", "key", "oversized", "unsendable"]


class OfNode(Protocol):
    @property
    def cluster(self) -> str: ...
    @property
    def node(self) -> str: ...


R = TypeVar("R", bound=OfNode)
T = TypeVar("T")
S = TypeVar("S", bound=MemberSettings)


class Malformed(Exception):
    """A record that can never be used: ``reason`` is its class, the message says what is wrong. Dead-letter it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def decode_value(decode: Callable[[bytes], T], value: bytes | None) -> T:
    """The record that a value is. Raises Malformed."""
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


def instruments(*names: str) -> tuple[Instrument, ...]:
    """The instruments that every stream has, under the names that they have in this one: one for each of ``COMMON``."""
    return tuple(row._replace(name=name) for row, name in zip(COMMON, names, strict=True))


class Housekeeping:
    """One stream's books; ``stage`` is what it is called, ``partitions`` how many its topics have."""

    def __init__(self, instruments: Instruments, *, stage: str, partitions: int) -> None:
        self._instruments, self._stage, self._partitions = instruments, stage, partitions
        self._counted: Counter[tuple[str, ...]] = Counter()

    def check_place(self, partition: int, key: bytes) -> None:
        """Once a node: whether its key belongs here, or another partitioner put it here."""
        if (murmur2(key) & 0x7FFFFFFF) % self._partitions != partition:
            self._instruments.counter(f"gpustream_{self._stage}_misplaced_nodes_total").inc()
            node = key.decode("utf-8", "replace")
            log.warning("%s: it is in partition %s, where murmur2 would not put it", node, partition)

    async def dead_letter(self, app: ReaderApp, slot: Slot, record: Any, reason: Reason, error: str) -> None:
        """Send a record to the dead letters; its slot is finished when that is acknowledged.
        State is read again at each start: a record of it that has its dead letter gets no other."""
        if app.reader.is_settled(slot):
            slot.end = ("duplicate",)
            app.finish(slot)
            return
        slot.end = ("dead_lettered", reason)
        place = f"{record.topic} partition {record.partition}"
        log.warning("%s: dead-lettered at offset %s: %s: %.300s", place, slot.offset, reason, error)
        origin = Origin(record.topic, record.partition, slot.offset)
        sent = await send_letter(app.sender, record, origin, stage=self._stage, error=f"{reason}: {error}")
        app.finish_when(slot, [sent])

    def observe(self, reader: Reader) -> None:
        """Take over what the reader and its ledger have counted, all of it as of one moment."""
        ledger, made, prefix = reader.ledger, self._instruments, f"gpustream_{self._stage}"
        made.gauge(f"{prefix}_open_bytes").set(ledger.open_bytes)
        made.gauge(f"{prefix}_loop_late_seconds").set(reader.loop_late_s)
        for topic, held in ledger.held.items():
            made.gauge(f"{prefix}_records_held", topic).set(held)
        counts = {(f"records_{end}", topic, *why): count for (topic, end, *why), count in ledger.counts.items()}
        counts |= {("rebalances",): reader.rebalances, ("holes",): reader.holes, ("lost_offsets",): reader.lost}
        for (name, *labels), count in counts.items():
            made.counter(f"{prefix}_{name}_total", *labels).inc(count - self._counted[name, *labels])
            self._counted[name, *labels] = count


class WriteTasks:
    """What a worker is writing, each a task. What was begun before the last :meth:`forget` is ``leftover``."""

    def __init__(self) -> None:
        self.under_way: set[asyncio.Task[None]] = set()
        self.leftover: set[asyncio.Task[None]] = set()

    def start(self, app: ReaderApp, work: Coroutine[Any, Any, None]) -> None:
        """Begin to write. What can't be written ends the process."""

        def ended(writing: "asyncio.Task[None]") -> None:
            self.under_way.discard(writing)
            self.leftover.discard(writing)
            if not writing.cancelled() and writing.exception() is not None:
                app.fail(f"not written: {writing.exception()!r}")

        writing = asyncio.create_task(work)
        self.under_way.add(writing)
        writing.add_done_callback(ended)

    def forget(self) -> None:
        """The records are read again: nothing may be done with them before what is on its way has arrived."""
        self.leftover |= self.under_way


class Clocks:
    """The worker's own clocks, which judge silence and nothing else."""

    def monotonic_s(self) -> float:
        """Seconds of the clock that is never set."""
        return time.monotonic()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class StreamWorker(reader.Stage, Protocol):
    """What works on the batches of a stream."""

    app: ReaderApp

    async def handle(self, batch: Batch) -> None:
        """Work on a batch of one partition."""

    async def watch(self) -> None:
        """See to what waits for time to pass. Never returns."""


P = TypeVar("P", bound=PartitionState)


class NodeWorker(ABC, Generic[P]):
    """What workers that read gpu.attributed have alike: each record is worked on in its order, what can't be used is
    dead-lettered, what is sent is acknowledged, and each partition is looked at each second.

    A worker gives ``new``, of which what it knows of a partition is made; ``inputs``, which wait for what an earlier
    epoch has sent; ``lagging``, the topics whose lag is shown; and how it calls a fault that ends the process.
    """

    app: ReaderApp
    new_partition: Callable[[int], P]
    inputs: tuple[str, ...]
    lag_topics: tuple[str, ...]
    batch_failure: str

    def __init__(self, instruments: Instruments, *, stage: str, partitions: int, clocks: Clocks | None) -> None:
        self._instruments, self._stage, self._clocks = instruments, stage, clocks or Clocks()
        self._housekeeping = Housekeeping(instruments, stage=stage, partitions=partitions)
        self._write_tasks = WriteTasks()
        self._partitions: dict[int, P] = {}

    @abstractmethod
    def handle_record(self, topic: str, partition: P, slot: Slot, record: Any) -> None:
        """Work on a record. Raises Malformed."""

    @abstractmethod
    def check_partition(self, number: int) -> None:
        """See to what waits in a partition for time to pass."""

    @abstractmethod
    def close_silent(self, partition: P) -> None:
        """The log of a partition has come further: see which of its nodes are silent."""

    async def handle(self, batch: Batch) -> None:
        """Work on a batch of one partition. Nothing is raised: a fault here ends the process."""
        if not batch:
            return
        topic, number = batch[0][0].tp
        try:
            if topic in self.inputs and self._write_tasks.leftover:
                await asyncio.wait(self._write_tasks.leftover)
            await self.handle_batch(topic, self._partition(number), batch)
        except Exception as error:
            log.exception("%s", self.batch_failure)
            self.app.fail(f"{self.batch_failure}: {error!r}")

    async def handle_batch(self, topic: str, partition: P, batch: Batch) -> None:
        """Work on each record of a batch, unless the partition is taken away meanwhile."""
        for slot, record in batch:
            if not self.app.is_current(slot):
                return
            try:
                self.handle_record(topic, partition, slot, record)
            except Malformed as error:
                await self._housekeeping.dead_letter(self.app, slot, record, error.reason, str(error))
        if topic == ATTRIBUTED:
            self.close_silent(partition)

    def _partition(self, number: int) -> P:
        """What is known of a partition, from now on if not before."""
        if number not in self._partitions:
            self._partitions[number] = self.new_partition(number)
        return self._partitions[number]

    async def _await_acks(self, what: str, sent: Iterable["asyncio.Future[int]"]) -> int:
        """Wait for all, and say how many the broker took. What can never be sent is left out: to stop for it would stop
        for ever."""
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        for error in outcomes:
            if isinstance(error, Unsendable):
                self._instruments.counter(f"gpustream_{self._stage}_unsendable_total", what).inc()
                log.error("a record of %s (%s) is left out: %s", self._stage, what, error)
            elif isinstance(error, BaseException):
                raise error
        return sum([isinstance(one, int) for one in outcomes])

    @abstractmethod
    def observe(self) -> None:
        """Set the gauges."""

    async def watch(self) -> None:
        """See to what waits for time to pass. Never returns."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            waiting = {tp.partition for tp in self.app.reader.pending_states()}
            for number in self._partitions.keys() - waiting:
                self.check_partition(number)
            self.observe()

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop what is known of these partitions."""
        for number in partitions:
            self._partitions.pop(number, None)

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing is kept for what may be read again."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Where partitions end: how far behind this is, and whether a node without a tick is silent."""
        lags: Counter[str] = Counter()
        for tp, end in ends.items():
            read = self.app.reader.ledger.expected(tp)
            lags[tp.topic] += max(0, end - read) if read is not None else 0
            if tp.topic == ATTRIBUTED:
                self._partition(tp.partition).caught_up.ends(
                    Ends(asked_s, end, ends.get(Partition(SAMPLES, tp.partition)))
                )
        for topic in self.lag_topics:
            self._instruments.gauge(f"gpustream_{self._stage}_lag_records", topic).set(lags[topic])


class Stream(Generic[S]):
    """A stream as a component: once its topics are there its one agent runs its worker, until the stop.

    A stream gives its name in the registry, its instruments, how it calls a failure of the worker's look, and the
    worker with what that reads.
    """

    name: str
    table: tuple[Instrument, ...]
    watch_failure: str

    def __init__(self, settings: S, *, fail: Callable[[str], None] = fail_stop) -> None:
        self.settings, self._fail = settings, fail
        self.instruments = Instruments(self.table)
        self.registry = self.instruments.registry
        self._check = TopicCheck(settings.connection(), STREAMS[self.name].uses)
        self._app: ReaderApp | None = None

    def make_worker(self, partitions: Mapping[str, int]) -> tuple[StreamWorker, Reads]:
        """The worker and what it reads. ``partitions``: how many each topic has."""
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for the topics, then work until ``stop`` is set. A look that fails ends the process."""
        checked = await self._check.passed(stop)
        if checked is None:
            return
        worker, reads = self.make_worker(checked.partitions)
        app = self._app = worker.app = ReaderApp(self.settings, reads, worker, fail=self._fail)

        @app.agent(app.batches, name=self.name)  # type: ignore[untyped-decorator]
        async def agent(batches: AsyncIterable[Batch]) -> None:
            async for batch in batches:
                await worker.handle(batch)

        def looked(looking: "asyncio.Task[None]") -> None:
            if not looking.cancelled():
                app.fail(f"{self.watch_failure}: {looking.exception()!r}")

        looking = asyncio.create_task(worker.watch())
        looking.add_done_callback(looked)
        try:
            await app.run(stop)
        finally:
            looking.cancel()

    def not_ready(self) -> list[str]:
        """What keeps it from working; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
