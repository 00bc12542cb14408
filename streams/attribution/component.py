"""The attribution stream: ticks join the snapshot that they name and the workload that owns each GPU.

In: gpu.samples, gpu.allocations, gpu.workloads. Out: gpu.attributed, in the partition that the sample came from.
State: one :class:`~streams.attribution.join.NodeState` a node, by partition, read from the allocations and workloads
themselves; the slots of the pending ticks; the watermark of each partition.
On failure: what can't be decoded or sent goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from delivery.instruments import Instrument, Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from streams.app import ReaderApp
from streams.attribution import join
from streams.attribution.log_time import Watermark
from streams.reader import Batch, Reads
from streams.settings import AttributionSettings
from streams.stage import Housekeeping, Malformed, Stream, decode_record, instruments
from topics.allocations import Allocations
from topics.samples import Sample
from topics.topic import decoder
from topics.workloads import NodeWorkloads

log = logging.getLogger(__name__)

SAMPLES, ALLOCATIONS, WORKLOADS = "gpu.samples", "gpu.allocations", "gpu.workloads"
OUTPUT = "gpu.attributed"

_LOOK_EVERY_S = 0.2
_ASK_AHEAD_MS = 1_100
_ASK_AHEAD_EVERY_S = 0.25
_FORGET_AFTER_MS = 48 * 3_600_000
_FORGET_EVERY_MS = 600_000

NodeRecord = Sample | Allocations | NodeWorkloads

_DECODERS: Mapping[str, Callable[[bytes], NodeRecord]] = {
    "gpu.samples": decoder(Sample),
    "gpu.allocations": decoder(Allocations),
    "gpu.workloads": decoder(NodeWorkloads),
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
    *instruments(
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
        reads = Reads(inputs=(SAMPLES,), states=(ALLOCATIONS, WORKLOADS), partitions=partitions)
        return Joiner(self.instruments, grace_s=self.settings.grace_s, partitions=partitions[SAMPLES]), reads


class Joiner:
    """Carries out the join: gives it its records, sends what it lets go, and finishes what is acknowledged.
    Records of a node are joined and sent under one lock, so that its outputs keep their order whatever is awaited."""

    app: ReaderApp

    def __init__(
        self, instruments: Instruments, *, grace_s: float, partitions: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._instruments, self._grace_s, self._clock = instruments, grace_s, clock
        self._housekeeping = Housekeeping(instruments, stage="attribution", partitions=partitions)
        self._states: dict[int, dict[bytes, join.NodeState]] = defaultdict(dict)
        self._pending: dict[int, dict[bytes, None]] = defaultdict(dict)
        self._slots: dict[tuple[int, int], tuple[Slot, Any]] = {}
        self._asked: dict[int, deque[tuple[float, int]]] = defaultdict(deque)
        self._watermarks: dict[int, Watermark] = defaultdict(Watermark)
        self._wake = asyncio.Event()
        self._asked_ahead_s = float("-inf")
        self._heard_ms: dict[int, dict[bytes, int]] = defaultdict(dict)
        self._forgot_ms = 0
        self._lock = asyncio.Lock()
        self._encoder = msgspec.json.Encoder()
        self._letters: set[asyncio.Task[None]] = set()
        self._attributed: Counter[str] = Counter()

    # -- records

    async def handle(self, batch: Batch) -> None:
        """Join a batch of one partition. Nothing is raised: a fault here ends the process."""
        try:
            async with self._lock:
                for slot, record in batch:
                    if not self.app.is_current(slot):
                        return
                    await self._take(slot, record)
                if batch and batch[0][0].tp.topic == WORKLOADS and self._pending.get(batch[0][0].tp.partition):
                    self._wake.set()
        except Exception as error:
            log.exception("the join failed")
            self.app.fail(f"the join failed: {error!r}")

    async def _take(self, slot: Slot, record: Any) -> None:
        """Decode a record, and give it to the join of its node. If it has no log time, it has the time of reading."""
        try:
            decoded = decode(slot.tp.topic, record.key, record.value)
        except Malformed as error:
            await self._housekeeping.dead_letter(self.app, slot, record, error.reason, str(error))
            return
        partition, stamped, now_s = slot.tp.partition, record.timestamp, self._clock()
        logged_ms: int = stamped if stamped is not None and stamped >= 0 else time.time_ns() // 1_000_000
        watermark = self._watermarks[partition]
        self._forget_old_nodes(partition, record.key, logged_ms)
        if isinstance(decoded, Sample):
            self._slots[partition, slot.offset] = (slot, record)
            watermark.sample(slot.offset, logged_ms, now_s)
            if watermark.asked:
                watermark.reached(self._learned(WORKLOADS, partition))
            tick = join.PendingTick(decoded, slot.offset, now_s, logged_ms, watermark.ms)
            await self._step(partition, record.key, tick)
            if record.key in self._pending[partition]:
                self._ask_for_workloads(partition, record.key, now_s)
            if watermark.ms < logged_ms - _ASK_AHEAD_MS and now_s - self._asked_ahead_s > _ASK_AHEAD_EVERY_S:
                self._asked_ahead_s = now_s  # asked for before a tick has to wait for it
                self.app.ask_ends()
            return
        if isinstance(decoded, NodeWorkloads):
            decoded_at = join.LoggedWorkloads(decoded, watermark.workloads(slot.offset, logged_ms))
            await self._step(partition, record.key, decoded_at)
        else:
            await self._step(partition, record.key, decoded)
            self._ask_for_workloads(partition, record.key, self._clock())
        self.app.finish(slot)

    def _forget_old_nodes(self, partition: int, key: bytes, logged_ms: int) -> None:
        """Forget, now and then, the nodes that no record was about for longer than any sample is kept."""
        self._heard_ms[partition][key] = logged_ms
        if logged_ms - self._forgot_ms < _FORGET_EVERY_MS:
            return
        self._forgot_ms = logged_ms
        for number, nodes in self._heard_ms.items():
            for gone in [node for node, heard_ms in nodes.items() if logged_ms - heard_ms > _FORGET_AFTER_MS]:
                if gone not in self._pending[number]:
                    del nodes[gone]
                    self._states[number].pop(gone, None)

    async def _step(self, partition: int, key: bytes, record: join.Record) -> None:
        """The next state of a node; the ticks that it lets go are sent."""
        states = self._states[partition]
        state = states.get(key)
        if state is None:
            self._housekeeping.check_place(partition, key)
            state = join.NEW
        states[key], joined = join.step(state, record, self._grace_s)
        if states[key].pending:
            self._pending[partition][key] = None
        elif state.pending:
            self._pending[partition].pop(key, None)
        for one in joined:
            sample, unknown_ids = one.sample, one.unknown_ids
            slot, read = self._slots.pop((partition, sample.offset), (None, None))
            if slot is None or not self.app.is_current(slot):
                continue
            if unknown_ids:
                self._instruments.counter("gpustream_attribution_unknown_device_ids_total").inc(len(unknown_ids))
                node = f"{sample.cluster}/{sample.node}"
                log.warning("%s: device ids in no known grammar: %.300s", node, unknown_ids)
            sent = await self.app.sender.send(OUTPUT, self._encoder.encode(sample), key=key, partition=partition)
            sent.add_done_callback(partial(self._on_acknowledged, slot, read, sample.attribution))

    def _on_acknowledged(self, slot: Slot, record: Any, attribution: str, sent: "asyncio.Future[int]") -> None:
        """The broker has a tick, or it never will: then it is a dead letter."""

        def written(writing: "asyncio.Task[None]") -> None:
            self._letters.discard(writing)
            if not writing.cancelled() and writing.exception() is not None:
                self.app.fail(f"no dead letter could be written: {writing.exception()!r}")

        if sent.cancelled():
            return
        error = sent.exception()
        if isinstance(error, Unsendable):
            letter = self._housekeeping.dead_letter(self.app, slot, record, "unsendable", str(error))
            writing = asyncio.ensure_future(letter)
            self._letters.add(writing)
            writing.add_done_callback(written)
        elif error is not None:
            self.app.fail(f"{slot.tp} offset {slot.offset}: output not acknowledged: {error!r}")
        elif self.app.is_current(slot):
            self._attributed[attribution] += 1
            self.app.finish(slot)

    # -- time

    async def watch(self) -> None:
        """Let go, again and again, what waits for time to pass or for the end of a state partition. Never returns."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_EVERY_S)
            self._wake.clear()
            await self.check_pending()

    async def check_pending(self) -> None:
        """Let go the ticks that have waited long enough, and ask the broker for what the others wait for.
        The newest end of the allocations counts that was asked for and has been read to."""
        async with self._lock:
            for partition in list(self._pending):
                asked_s, asked, watermark = None, self._asked[partition], self._watermarks[partition]
                read = self._learned(ALLOCATIONS, partition)
                while asked and read >= asked[0][1]:
                    asked_s = asked.popleft()[0]
                watermark.reached(self._learned(WORKLOADS, partition))
                now_s = self._clock()
                for key in list(self._pending[partition]):
                    if asked_s is not None and key in self._pending[partition]:
                        await self._step(partition, key, join.AllocationsRead(asked_s))
                    wanted_ms = self._state(partition, key).wanted_ms
                    if wanted_ms is not None and watermark.ms >= wanted_ms:
                        await self._step(partition, key, join.WatermarkRaised(watermark.ms))
                    self._ask_for_workloads(partition, key, now_s)
                    if join.wants_end(self._state(partition, key), now_s, self._grace_s):
                        self.app.ask_ends()
        self.observe()

    def observe(self) -> None:
        """Set the metrics that follow from the state."""
        gauge = self._instruments.gauge
        pending = sum(len(self._states[p][key].pending) for p, keys in self._pending.items() for key in keys)
        gauge("gpustream_attribution_pending_ticks").set(pending)
        for attribution, ticks in self._attributed.items():
            self._instruments.counter("gpustream_attribution_ticks_total", attribution).inc(ticks)
        self._attributed.clear()
        for watermark in self._watermarks.values():
            if watermark.misordered:
                self._instruments.counter("gpustream_attribution_misordered_workloads_total").inc(watermark.misordered)
                watermark.misordered = 0
        gauge("gpustream_attribution_nodes").set(sum(len(states) for states in self._states.values()))
        self._housekeeping.observe(self.app.reader)

    def _ask_for_workloads(self, partition: int, key: bytes, now_s: float) -> None:
        """Ask where the workloads end, as soon as the answer lets a node's first pending tick go."""
        wanted_ms = self._state(partition, key).wanted_ms
        if wanted_ms is not None and self._watermarks[partition].if_asked_at(now_s) >= wanted_ms:
            self.app.ask_ends()

    def _learned(self, topic: str, partition: int) -> int:
        return self.app.reader.ledger.position(Partition(topic, partition)) or 0

    def _state(self, partition: int, key: bytes) -> join.NodeState:
        return self._states[partition].get(key, join.NEW)

    # -- what the reader knows of offsets

    def forget(self) -> None:
        """Drop the pending ticks: they are read again."""
        self._slots.clear()
        self._asked.clear()
        for watermark in self._watermarks.values():
            watermark.forget()
        for partition, pending in self._pending.items():
            for key in pending:
                self._states[partition][key], _ = join.step(self._states[partition][key], join.Forget(), self._grace_s)
        self._pending.clear()

    def drop(self, partitions: frozenset[int]) -> None:
        for partition in partitions:
            self._states.pop(partition, None)
            self._heard_ms.pop(partition, None)
            self._watermarks.pop(partition, None)

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Forget what only finished samples could ask for."""
        for tp, offset in offsets.items():
            states = self._states[tp.partition]
            for key, state in states.items():
                if len(state.marks) > 1:
                    states[key], _ = join.step(state, join.Committed(offset), self._grace_s)

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        lags: dict[str, int] = defaultdict(int)
        for tp, end in ends.items():
            learned = self.app.reader.ledger.position(tp)
            lags[tp.topic] += max(0, end - learned) if learned is not None else 0
            if tp.topic == ALLOCATIONS and self._pending.get(tp.partition):
                self._asked[tp.partition].append((asked_s, end))
            if tp.topic == WORKLOADS and (samples_end := ends.get(Partition(SAMPLES, tp.partition))) is not None:
                self._watermarks[tp.partition].ends(asked_s, end, samples_end)
                self._watermarks[tp.partition].reached(self._learned(WORKLOADS, tp.partition))
        if any(self._pending.values()):
            self._wake.set()
        for topic, lag in lags.items():
            self._instruments.gauge("gpustream_attribution_lag_records", topic).set(lag)
