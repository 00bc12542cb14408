"""One partition of gpu.attributed on its way to the receiver: what is read and not finished, and what became of it.

In: records, in order. Out: the records to the queue; dead letters; the offset before which all is finished.
State: the records that are read and not finished; of those that are finished and counted only later, because one before
them is not, what became of them.
With a resolution, a node's ticks are put into a window as they are read. It waits to be sent when it is over: the
node's next tick lies past it, or the node was silent for long. What is in a window that is not over is not finished.

A request that was accepted and not yet committed when the process ended is sent again, perhaps in other pieces. So a
tick that may have been sent before, is later than all that its node had accepted, and is refused as out of order, is in
already: only a later sample of its node makes it so, and that was never sent before it.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from delivery.dead_letters import DeadLetters, Record
from delivery.instruments import Instruments
from delivery.ledger import Ledger, Partition, Slot
from sinks.outcomes import Outcome, Outcomes, Undecodable, decoded
from sinks.remote_write.nodes import NodeKey, NodeTick, OpenSeries
from sinks.remote_write.policy import THERE, UNTIMELY
from sinks.remote_write.queue import Ended, Lane, Progress, Queue, ReadRecord
from sinks.remote_write.refusals import LEFT_OUT, Delivered, Deliverer, Refused
from sinks.series.model import primaries, samples_of
from sinks.series.relabel import Withheld
from sinks.series.tick import SeriesTick, decode
from topics.attributed import TOPIC

AHEAD_RECORDS = 2000
"""So many records of a partition are read and not finished, and at most a batch more."""

AHEAD_BYTES = 64 << 20
"""So many bytes of records are read and not finished in all partitions together, and at most a batch more of each."""

_DOUBT_RECORDS = 3 * AHEAD_RECORDS
_COUNT_EVERY_S = 0.25
_SILENT_NODES = 64


class RemoteWriteShared(NamedTuple):
    """What all partitions of a sink use together. ``slots`` bounds the requests of alerts that are under way."""

    deliverer: Deliverer
    letters: DeadLetters
    outcomes: Outcomes
    instruments: Instruments
    slots: asyncio.Semaphore
    max_samples: int
    stale_after_s: float


class RemoteWritePartition:
    """The handler of a partition. ``windows``: ticks are not written one by one, but by the window."""

    def __init__(self, series: OpenSeries, shared: RemoteWriteShared, queue: Queue, *, windows: bool = False) -> None:
        self._series, self._shared, self._queue, self._windows = series, shared, queue, windows
        self._open: dict[bytes | None, ReadRecord] = {}  # the last record of each window that is not over
        self._newest: dict[bytes | None, SeriesTick] = {}
        self._unsettled: Counter[NodeKey] = Counter()
        self._closed = 0
        self._progress = Progress(queue.clock_s())
        queue.partitions.add(self._progress)
        self._ledger = Ledger()
        self._lanes: dict[bytes | None, Lane] = {}
        self._ends: dict[int, Callable[[], None]] = {}
        self._abandon: asyncio.Event | None = None
        self._moved = asyncio.Event()
        self._tp = Partition(TOPIC.name, -1)
        self._doubt_before = 0
        self._counted_s = -math.inf

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                self._series.recall(decoded(record, decode, TOPIC.name), time.monotonic())
            except Undecodable:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Put the records into the queue, and finish what was sent; it waits only if too much is unfinished.

        When ``abandon`` is set, it waits for what is under way.
        """
        if records:
            self._put(records, abandon)
        self._queue.pump()
        while True:
            self._moved.clear()
            if self._queue.failure is not None:
                raise self._queue.failure
            leaving = abandon.is_set()
            sending = leaving and any(lane.busy for lane in self._lanes.values())
            position = self._ledger.position(self._tp) or 0
            finished = sorted([offset for offset in self._ends if offset < position])
            now_s = self._queue.clock_s()
            if finished and not sending and (leaving or now_s - self._counted_s >= _COUNT_EVERY_S):
                self._counted_s = now_s
                for offset in finished:
                    self._ends.pop(offset)()
                yield finished[-1] + 1
            elif sending or (self._is_full() and not leaving):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_COUNT_EVERY_S):
                        await self._moved.wait()
                self._queue.pump()
            else:
                return

    async def quiet(self, abandon: asyncio.Event) -> None:
        """End the windows of nodes that went silent, and their series when those are sent."""
        self._progress.at_end = True
        now_s, after_s = time.monotonic(), self._shared.stale_after_s
        for key in [key for key, read in self._open.items() if now_s - read.heard_s >= after_s]:
            self._close(key)
        self._queue.pump()
        silences = self._series.silent(now_s, after_s, +self._unsettled)
        for start in range(0, len(silences), _SILENT_NODES):
            some = silences[start : start + _SILENT_NODES]
            delivered = await self._shared.deliverer.deliver([one.groups for one in some], abandon)
            for silence, result in zip(some, delivered, strict=True):
                self._series.ended(silence)
                refused = samples_of(group for group, _ in (*result.refused, *result.left_out))
                ended = self._shared.instruments.counter("gpustream_remote_write_markers_total")
                ended.inc(samples_of(silence.groups) - refused)

    def reset(self) -> None:
        """The topic was created again."""
        self._series.clear()
        self._forget()
        self._ends.clear()

    def _forget(self) -> None:
        """What is read and not finished is not ours to send any more."""
        for lane in self._lanes.values():
            lane.waiting.clear()
        self._lanes.clear()
        self._open.clear()
        self._newest.clear()
        self._unsettled.clear()
        self._closed = 0
        self._ledger.forget()
        self._abandon = None

    def _put(self, records: Sequence[Record], abandon: asyncio.Event) -> None:
        """Put records into the lanes of their nodes, but what was finished before the partition was taken away."""
        tp = Partition(records[0].topic, records[0].partition)
        if abandon is not self._abandon:
            self._forget()
            self._ledger.begin({tp: records[0].offset})
            self._series.doubt()
            self._progress.at_end = True  # until something of it is settled; what is under way has progress of its own
            self._tp, self._abandon, self._doubt_before = tp, abandon, records[0].offset + _DOUBT_RECORDS
        for record in records:
            slot = self._ledger.admit(tp, record.offset, len(record.value or b""))
            if record.offset in self._ends:
                self._ledger.finish(slot)
                continue
            read = ReadRecord(record, slot, in_doubt=record.offset < self._doubt_before)
            if self._windows:
                self._fold(read, abandon)
            else:
                self._wait(read, abandon)

    def _wait(self, read: ReadRecord, abandon: asyncio.Event) -> None:
        """Let a record wait for its turn in the lane of its node."""
        lane = self._lanes.get(read.record.key)
        if lane is None:
            lane = self._lanes[read.record.key] = Lane(self._series, self._settle, self._moved, abandon)
        lane.waiting.append(read)
        self._closed += 1
        if len(lane.waiting) == 1 and not lane.busy:
            self._queue.ready(lane)

    def _fold(self, read: ReadRecord, abandon: asyncio.Event) -> None:
        """Put a tick into its node's window; one that lies past it is the first of the next."""
        key = read.record.key
        try:
            sample = decoded(read.record, decode, TOPIC.name)
        except Undecodable as error:
            read.error = str(error)
            self._wait(read, abandon)
            return
        verdict = self._series.verdict(sample, self._newest.get(key))
        if verdict == "replay":
            self._finish(read.slot, "duplicate", "", sample, _Values())
            return
        was = self._open.get(key)
        if was is not None and was.window and (verdict == "new_log" or not was.window.includes(sample.ts_ms)):
            self._close(key)
            was = None
        read.window, read.heard_s = self._series.fold(sample, was.window if was else None), time.monotonic()
        read.sample = self._newest[key] = msgspec.structs.replace(sample, devices=())
        if was is None:
            self._unsettled[sample.cluster, sample.node] += 1
        elif was.sample is not None:
            read.before, read.in_doubt = was.before, was.in_doubt or read.in_doubt
            read.before.append((was.slot, was.sample))
        self._ledger.set_aside(read.slot)
        self._open[key] = read

    def _close(self, key: bytes | None) -> None:
        """A window is over: it waits to be sent."""
        over = self._open.pop(key)
        if self._abandon is not None:
            self._wait(over, self._abandon)

    def _is_full(self) -> bool:
        """Whether no more is to be read before something is finished."""
        if self._windows:
            return self._closed >= AHEAD_RECORDS  # what is in open windows would wait for what is not read
        ahead = (self._ledger.expected(self._tp) or 0) - (self._ledger.position(self._tp) or 0)
        return ahead >= AHEAD_RECORDS or self._ledger.open_bytes >= AHEAD_BYTES // len(self._queue.partitions)

    async def _settle(self, ended: Sequence[Ended]) -> None:
        """Records of a node were sent, if they have a tick: write dead letters, and note what became of each."""
        for read, result in ended:
            tick, abandon = read.tick, self._abandon
            if abandon is None or read.slot.epoch != self._ledger.epoch:
                return
            if tick and result and (read.in_doubt or result.in_doubt) and self._series.is_newest(tick):
                result.refused = [one for one in result.refused if one[1].reason not in THERE]
                result.written = 0
            outcome, why = _outcome(read, result)
            if outcome == "delivered" and read.sample:
                self._shared.outcomes.delay(read.sample)
            if outcome == "dead_lettered":
                await self._shared.letters.write(read.record, why, abandon)
                if read.slot.epoch != self._ledger.epoch:
                    return
            values = self._settled(tick, result, read.heard_s) if tick and result else _Values()
            self._closed -= 1
            if read.window is not None and read.sample is not None:
                self._unsettled[read.sample.cluster, read.sample.node] -= 1
            others: Outcome = "delivered" if outcome == "dead_lettered" else outcome
            for slot, sample in read.before:
                self._finish(slot, others, why, sample, _Values())
            self._finish(read.slot, outcome, why, read.sample, values)
            self._progress.move(read, self._queue.clock_s())

    def _settled(self, tick: NodeTick, result: Delivered, heard_s: float) -> "_Values":
        """What a tick wrote is the node's now; gives what became of its values."""
        if self._series.verdict(tick.sample) == "new_log":
            self._shared.outcomes.new_log(self._tp.partition)
        whole = not (result.refused or result.left_out)
        accepted = not result.nothing_of(tick.groups)
        self._series.settle(tick, heard_s or time.monotonic(), accepted=accepted, whole=whole)
        return _values(tick, result)

    def _finish(self, slot: Slot, outcome: Outcome, why: str, sample: SeriesTick | None, values: "_Values") -> None:
        """A record is finished; it is counted when all before it are."""
        who = sample and msgspec.structs.replace(sample, devices=())
        self._ends[slot.offset] = partial(self._count, outcome, why, who, values)
        self._ledger.finish(slot)

    def _count(self, outcome: Outcome, why: str, sample: SeriesTick | None, values: "_Values") -> None:
        """Count a record, and its values, by what became of them."""
        made = self._shared.instruments
        made.counter("gpustream_remote_write_values_delivered_total").inc(values.delivered)
        for reason, number in values.refused.items():
            made.counter("gpustream_remote_write_values_refused_total", reason).inc(number)
        for reason, number in values.left_out.items():
            made.counter("gpustream_remote_write_values_left_out_total", reason).inc(number)
        for reason, number in values.withheld.items():
            made.counter("gpustream_remote_write_samples_withheld_total", reason).inc(number)
        if values.markers:
            made.counter("gpustream_remote_write_markers_total").inc(values.markers)
        self._shared.outcomes.finish(outcome, why, sample)


@dataclass(slots=True)
class _Values:
    """How many values of metrics of a tick, by what became of them, and how many of its series ended."""

    delivered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    withheld: Mapping[Withheld, int] = field(default_factory=dict)
    markers: int = 0


def _values(tick: NodeTick, result: Delivered) -> _Values:
    """What became of a tick's values."""
    refused, left_out = _by_reason(result.refused), _by_reason(result.left_out)
    if result.written:
        untimely = [group for group, refusal in result.refused if refusal.reason in UNTIMELY]
        most = samples_of(untimely) - result.written
        refused = Counter({why: min(of, most) if why in UNTIMELY else of for why, of in refused.items()})
    delivered = tick.size.primaries - refused.total() - left_out.total()
    markers = 0 if result.refused or result.left_out else tick.markers
    return _Values(delivered, refused, left_out, tick.withheld, markers)


def _by_reason(refused: Iterable[Refused]) -> Counter[str]:
    """How many values of metrics are refused, by reason."""
    values: Counter[str] = Counter()
    for group, refusal in refused:
        values[refusal.reason] += primaries([group])
    return values


def _outcome(read: ReadRecord, result: Delivered | None) -> tuple[Outcome, str]:
    """What became of a record, and why: a reason to count by, or what its dead letter says."""
    if read.error:
        return "dead_lettered", read.error
    if read.tick is None or result is None:
        return "duplicate", ""
    if not result.refused:
        all_left_out = result.left_out and result.nothing_of(read.tick.groups)
        return ("dropped", LEFT_OUT) if all_left_out else ("delivered", "")
    reasons = {refusal.reason for _, refusal in result.refused}
    if reasons <= UNTIMELY:
        return ("delivered", "") if result.written else ("dropped", min(reasons))
    return "dead_lettered", result.describe()
