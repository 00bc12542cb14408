"""The attribution stream: ticks join the snapshot that they name and the workload that owns each GPU.

In: gpu.samples, gpu.allocations, gpu.workloads. Out: gpu.attributed, in the partition that the sample came from.
State: one :class:`~streams.attribution.join.NodeState` per node, by partition, read from the allocations and workloads
themselves; the slots of the pending ticks; the watermark of each partition.
On failure: what can't be decoded or sent goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Any

import msgspec
from msgspec.structs import replace

from delivery.clock import now_ms
from delivery.instruments import Instrument, Instruments, named
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from delivery.tasks import set_within
from delivery.watchdog import Deadlines
from streams.app import Stream
from streams.attribution import join
from streams.attribution.log_time import Watermark
from streams.reader import Batch, Reads
from streams.settings import AttributionSettings
from streams.stage import COMMON, Malformed, Worker, decode_record, name_record
from topics.allocations import Allocations
from topics.samples import Sample
from topics.topic import decoder
from topics.workloads import NodeWorkloads

log = logging.getLogger(__name__)

SAMPLES, ALLOCATIONS, WORKLOADS = "gpu.samples", "gpu.allocations", "gpu.workloads"
OUTPUT = "gpu.attributed"

_WATCH_EVERY_S = 0.2
_ASK_AHEAD_MS = 1_100
_ASK_AHEAD_EVERY_S = 0.25
_FORGET_AFTER_S = 48 * 3600.0
_FORGET_EVERY_S = 600.0

NodeRecord = Sample | Allocations | NodeWorkloads

_DECODERS: Mapping[str, Callable[[bytes], NodeRecord]] = {
    SAMPLES: decoder(Sample),
    ALLOCATIONS: decoder(Allocations),
    WORKLOADS: decoder(NodeWorkloads),
}

INSTRUMENTS = (
    Instrument("gpustream_attribution_ticks_total", "counter", "Node ticks attributed: exact by the snapshot they"
               " name, late by the last one known, none without one.", ("attribution",)),
    Instrument("gpustream_attribution_pending_ticks", "gauge", "Node ticks that wait for a snapshot or a pod."),
    Instrument("gpustream_attribution_unknown_device_ids_total", "counter", "Device ids of a snapshot in no known"
               " grammar."),
    Instrument("gpustream_attribution_misordered_workloads_total", "counter", "Records of gpu.workloads that were"
               " logged before a time to which they were taken as read: the clocks of two brokers are more than half"
               " a second apart, and a replay may name other pods."),
    *named(
        COMMON,
        "gpustream_attribution_records_read_total", "gpustream_attribution_records_delivered_total",
        "gpustream_attribution_records_duplicate_total", "gpustream_attribution_records_dead_lettered_total",
        "gpustream_attribution_records_released_total", "gpustream_attribution_records_held",
        "gpustream_attribution_open_bytes", "gpustream_attribution_nodes", "gpustream_attribution_lag_records",
        "gpustream_attribution_misplaced_nodes_total", "gpustream_attribution_rebalances_total",
        "gpustream_attribution_holes_total", "gpustream_attribution_lost_offsets_total",
        "gpustream_attribution_loop_late_seconds"),
)  # fmt: skip


def decode(topic: str, key: bytes | None, value: bytes | None) -> NodeRecord:
    """The record of a node topic. Raises :class:`streams.stage.Malformed`."""
    return decode_record(_DECODERS[topic], key, value)


class Attribution(Stream[AttributionSettings]):
    name = "attribution"
    table = INSTRUMENTS
    watch_failure = "the join failed"

    def make_worker(self, partitions: Mapping[str, int]) -> tuple["Joiner", Reads]:
        grace_s, deadlines = self.settings.grace_s, Deadlines()
        deadlines = replace(deadlines, progress=deadlines.progress + ceil(grace_s))  # all ticks may wait so long
        states = (ALLOCATIONS, WORKLOADS)
        reads = Reads(inputs=(SAMPLES,), states=states, partitions=partitions, deadlines=deadlines)
        return Joiner(self.instruments, grace_s=grace_s, partitions=partitions[SAMPLES]), reads


class PartitionJoin:
    """The nodes of one partition, by key: their states, and when a record of each was last read.

    ``waiting`` are those with pending ticks, in order; ``slots`` has the slot and the record of each such tick, by its
    offset. ``allocations_ends`` are where the allocations ended, and when the broker was asked for that.
    """

    def __init__(self, number: int) -> None:
        self.number, self.watermark = number, Watermark()
        self.states: dict[bytes, join.NodeState] = {}
        self.last_read_s: dict[bytes, float] = {}
        self.waiting: dict[bytes, None] = {}
        self.slots: dict[int, tuple[Slot, Any]] = {}
        self.allocations_ends: deque[tuple[float, int]] = deque()

    def state(self, key: bytes) -> join.NodeState:
        return self.states.get(key, join.NEW)


class Joiner(Worker[PartitionJoin]):
    """Carries out the join: passes it the records, sends the ticks that it releases, and finishes the samples whose
    ticks are acknowledged. Records are joined and sent under one lock, so that a node's outputs keep their order
    whatever is awaited."""

    new_partition = PartitionJoin
    batch_failure = "the join failed"

    def __init__(
        self, instruments: Instruments, *, grace_s: float, partitions: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(instruments, stage="attribution", partitions=partitions)
        self._grace_s, self._clock = grace_s, clock
        self._wake = asyncio.Event()
        self._asked_ahead_s = float("-inf")
        self._forgot_s = float("-inf")
        self._lock = asyncio.Lock()
        self._encoder = msgspec.json.Encoder()
        self._attributed: Counter[str] = Counter()

    # -- records

    async def process(self, batch: Batch) -> None:
        """Join the records of a batch of one partition."""
        topic, number = batch[0][0].tp
        async with self._lock:
            for slot, record in batch:
                await self._turns.next()
                if not self.app.is_current(slot):
                    return
                try:
                    await self._handle_record(slot, record)
                except Exception as error:
                    name_record(error, slot)
                    raise
            if topic == WORKLOADS and self._partition(number).waiting:
                self._wake.set()

    async def _handle_record(self, slot: Slot, record: Any) -> None:
        """Decode a record, and pass it to the join of its node. Without a log time it gets the time of reading."""
        try:
            decoded = decode(slot.tp.topic, record.key, record.value)
        except Malformed as error:
            await self.dead_letter(slot, record, error.reason, str(error))
            return
        partition, timestamp, now_s = self._partition(slot.tp.partition), record.timestamp, self._clock()
        logged_ms: int = timestamp if timestamp is not None and timestamp >= 0 else now_ms()
        watermark = partition.watermark
        self._forget_old_nodes(partition, record.key, now_s)
        if isinstance(decoded, Sample):
            partition.slots[slot.offset] = (slot, record)
            watermark.sample_read(slot.offset, logged_ms, now_s)
            if watermark.ends_ahead:
                watermark.read_to(self._position(WORKLOADS, partition))
            tick = join.PendingTick(decoded, slot.offset, now_s, logged_ms, watermark.ms)
            await self._step(partition, record.key, tick)
            if record.key in partition.waiting:
                self._ask_for_workloads_end(partition, record.key, now_s)
            if watermark.ms < logged_ms - _ASK_AHEAD_MS and now_s - self._asked_ahead_s > _ASK_AHEAD_EVERY_S:
                self._asked_ahead_s = now_s  # asked for before a tick has to wait for it
                self.app.ask_ends()
            return
        if isinstance(decoded, NodeWorkloads):
            logged = join.LoggedWorkloads(decoded, watermark.workloads_read(slot.offset, logged_ms))
            await self._step(partition, record.key, logged)
        else:
            await self._step(partition, record.key, decoded)
            self._ask_for_workloads_end(partition, record.key, self._clock())
        self.app.finish(slot)

    def _forget_old_nodes(self, partition: PartitionJoin, key: bytes, now_s: float) -> None:
        """Now and then, forget the nodes without a record for longer than any sample is kept. Log times are not
        used: partitions are not read equally far, and if the broker writes no log times, they are the nodes' own."""
        partition.last_read_s[key] = now_s
        if now_s - self._forgot_s < _FORGET_EVERY_S:
            return
        self._forgot_s = now_s
        for other in self._partitions.values():
            for node in [node for node, read_s in other.last_read_s.items() if now_s - read_s > _FORGET_AFTER_S]:
                if node not in other.waiting:
                    del other.last_read_s[node]
                    other.states.pop(node, None)

    async def _step(self, partition: PartitionJoin, key: bytes, record: join.Record) -> None:
        """Take a node to its next state, and send the ticks that the join releases."""
        state = partition.states.get(key)
        if state is None:
            self.check_place(partition.number, key)
            state = join.NEW
        after, released = join.step(state, record, self._grace_s)
        partition.states[key] = after
        if after.pending:
            partition.waiting[key] = None
        elif state.pending:
            partition.waiting.pop(key, None)
        for joined in released:
            sample, unknown_ids = joined.sample, joined.unknown_ids
            slot, read = partition.slots.pop(sample.offset, (None, None))
            if slot is None or not self.app.is_current(slot):
                continue
            if unknown_ids:
                self._instruments.counter("gpustream_attribution_unknown_device_ids_total").inc(len(unknown_ids))
                node = f"{sample.cluster}/{sample.node}"
                log.warning("%s: device ids in no known grammar: %.300s", node, unknown_ids)
            sent = await self.app.sender.send(OUTPUT, self._encoder.encode(sample), key=key, partition=partition.number)
            sent.add_done_callback(partial(self._on_acknowledged, slot, read, sample.attribution))

    def _on_acknowledged(self, slot: Slot, record: Any, attribution: str, sent: "asyncio.Future[int]") -> None:
        """The broker has taken a tick: finish its sample. If it can never take it, the sample is a dead letter."""
        if sent.cancelled():
            return
        error = sent.exception()
        if isinstance(error, Unsendable):
            letter = self.dead_letter(slot, record, "unsendable", str(error))
            self._write_tasks.start(letter, failure="no dead letter could be written")
        elif error is not None:
            self.app.fail(f"{slot.tp} offset {slot.offset}: output not acknowledged: {error!r}")
        elif self.app.is_current(slot):
            self._attributed[attribution] += 1
            self.app.finish(slot)

    # -- time

    async def watch(self) -> None:
        """Check the pending ticks again and again, at once if something has changed. Never returns."""
        while True:
            await set_within(self._wake, _WATCH_EVERY_S)
            self._wake.clear()
            await self.check_pending()

    async def check_pending(self) -> None:
        """Pass to the join how far the state has been read, and ask the broker for the ends that pending ticks need.
        Of the ends of the allocations that have been reached, the one counts that was asked for last."""
        async with self._lock:
            for partition in list(self._partitions.values()):
                asked_s, ends, watermark = None, partition.allocations_ends, partition.watermark
                position = self._position(ALLOCATIONS, partition)
                while ends and position >= ends[0][1]:
                    asked_s = ends.popleft()[0]
                watermark.read_to(self._position(WORKLOADS, partition))
                now_s = self._clock()
                for key in list(partition.waiting):
                    if asked_s is not None and key in partition.waiting:
                        await self._step(partition, key, join.AllocationsRead(asked_s))
                    needed_ms = partition.state(key).needed_ms
                    if needed_ms is not None and watermark.ms >= needed_ms:
                        await self._step(partition, key, join.WatermarkRaised(watermark.ms))
                    self._ask_for_workloads_end(partition, key, now_s)
                    if join.needs_end(partition.state(key), now_s, self._grace_s):
                        self.app.ask_ends()
        self.observe()

    def observe(self) -> None:
        """Set the metrics that follow from the state."""
        gauge = self._instruments.gauge
        partitions = self._partitions.values()
        pending = sum(len(partition.states[key].pending) for partition in partitions for key in partition.waiting)
        gauge("gpustream_attribution_pending_ticks").set(pending)
        for attribution, ticks in self._attributed.items():
            self._instruments.counter("gpustream_attribution_ticks_total", attribution).inc(ticks)
        self._attributed.clear()
        for watermark in [partition.watermark for partition in partitions]:
            if watermark.misordered:
                self._instruments.counter("gpustream_attribution_misordered_workloads_total").inc(watermark.misordered)
                watermark.misordered = 0
        gauge("gpustream_attribution_nodes").set(sum(len(partition.states) for partition in partitions))
        super().observe()

    def _ask_for_workloads_end(self, partition: PartitionJoin, key: bytes, now_s: float) -> None:
        """Ask where the workloads end, as soon as the answer would release a node's first pending tick."""
        needed_ms = partition.state(key).needed_ms
        if needed_ms is not None and partition.watermark.if_end_asked_at(now_s) >= needed_ms:
            self.app.ask_ends()

    def _position(self, topic: str, partition: PartitionJoin) -> int:
        return self.app.reader.ledger.position(Partition(topic, partition.number)) or 0

    # -- what the reader knows of offsets

    def forget(self) -> None:
        """Drop the pending ticks: they are read again."""
        for partition in self._partitions.values():
            partition.slots.clear()
            partition.allocations_ends.clear()
            partition.watermark.forget()
            for key in partition.waiting:
                partition.states[key], _ = join.step(partition.states[key], join.Forget(), self._grace_s)
            partition.waiting.clear()

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Forget what only finished samples could need."""
        for tp, offset in offsets.items():
            states = self._partition(tp.partition).states
            for key, state in states.items():
                if len(state.marks) > 1:
                    states[key], _ = join.step(state, join.Committed(offset), self._grace_s)

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        lags = dict.fromkeys((SAMPLES, ALLOCATIONS, WORKLOADS), 0)
        for tp, end in ends.items():
            position = self.app.reader.ledger.position(tp)
            lags[tp.topic] += max(0, end - position) if position is not None else 0
            partition = self._partition(tp.partition)
            if tp.topic == ALLOCATIONS and partition.waiting:
                partition.allocations_ends.append((asked_s, end))
            if tp.topic == WORKLOADS and (samples_end := ends.get(Partition(SAMPLES, tp.partition))) is not None:
                partition.watermark.add_ends(asked_s, end, samples_end)
                partition.watermark.read_to(self._position(WORKLOADS, partition))
        if any(partition.waiting for partition in self._partitions.values()):
            self._wake.set()
        for topic, lag in lags.items():
            self._instruments.gauge("gpustream_attribution_lag_records", topic).set(lag)
