"""The delivery of one partition of gpu.attributed: which records are unfinished, and the outcome of each.

In: records, in order. Out: records to the queue, dead letters, and the offset before which all records are finished.
State: the unfinished records; and the outcomes of finished ones that are behind an unfinished one, because outcomes are
counted in the order of offsets.
With a resolution, a node's ticks are put into a window as they are read. The window is closed, and waits to be sent,
when the node's next tick is past it or none has come for long: by the clock while the partition is read to
its end, and by log time while a backlog is read. Ticks in an open window are unfinished.

If the process ends after a request was accepted and before its commit, the records are sent again, perhaps in other
requests. Such a tick may be refused as out of order. It counts as stored if it is later than all ticks of its node that
are known to be accepted: only a later sample of its node could make it out of order, and none was sent before it.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakMethod, proxy

import msgspec

from delivery.dead_letters import DeadLetters, Record
from delivery.instruments import Instruments
from delivery.ledger import Ledger, Partition, Slot
from delivery.tasks import Turns, set_within
from sinks.outcomes import Outcome, Outcomes, Undecodable, decoded
from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.remote_write.policy import THERE, UNTIMELY
from sinks.remote_write.queue import MAX_OPEN_S, Lane, Progress, Queue, ReadRecord, Sent
from sinks.remote_write.refusals import LEFT_OUT, Delivered, Deliverer
from sinks.series.model import primaries, samples_of
from sinks.series.tick import SeriesTick, decode
from topics.attributed import TOPIC

AHEAD_RECORDS = 2000
"""The most unfinished records of a partition, give or take a batch."""

AHEAD_BYTES = 64 << 20
"""The most bytes of unfinished records in all partitions together, give or take a batch of each."""

_IN_DOUBT_RECORDS = 3 * AHEAD_RECORDS
_COUNT_EVERY_S = 0.25
_LOG_GAP_S = 1.0
"""When nothing was logged for longer, Kafka was away, and no node was silent: only so much counts as their silence."""
_SILENT_NODES = 64

Counts = Mapping[tuple[str, ...], int]
"""What a record adds to counters, by their names and label values."""


class RemoteWriteShared(NamedTuple):
    """What all partitions of a sink share. ``slots`` limits the requests of alerts that are in flight."""

    deliverer: Deliverer
    letters: DeadLetters
    outcomes: Outcomes
    instruments: Instruments
    slots: asyncio.Semaphore
    max_samples: int
    stale_after_s: float
    turns: Turns


class RemoteWritePartition:
    """The handler of a partition. If ``series`` has a resolution, ticks are not written one by one, but in windows."""

    def __init__(self, number: int, series: OpenSeries, shared: RemoteWriteShared, queue: Queue) -> None:
        self._tp = Partition(TOPIC.name, number)
        self._series, self._shared, self._queue = series, shared, queue
        self._open: dict[bytes | None, ReadRecord] = {}  # the last record of each open window, in the order of the log
        self._log_s = 0.0  # log time, without gaps
        self._logged_ms = 0
        self._newest: dict[bytes | None, SeriesTick] = {}
        self._enqueued = 0
        self._progress = Progress(queue.clock_s())
        queue.partitions.add(self._progress)
        self._ledger = Ledger()
        self._lanes: dict[bytes | None, Lane] = {}
        self._finished: dict[int, tuple[Outcome, str, SeriesTick | None, Counts]] = {}  # by offset; not counted yet
        self._abandon = asyncio.Event()  # that of the assignment by which the unfinished records were read
        self._moved = asyncio.Event()
        self._in_doubt_before = 0
        self._counted_s = -math.inf

    def recall(self, record: Record) -> None:
        """Restore the open series of a record that was sent before."""
        with contextlib.suppress(Undecodable):  # its dead letter has been written before
            self._series.recall(decoded(record, decode, TOPIC.name), time.monotonic())

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Put the records into the queue, and yield the offsets to commit. Waits only if too much is unfinished.

        When ``abandon`` is set, it waits for the requests in flight.
        """
        if records and abandon is not self._abandon:
            self._forget()
            self._abandon = abandon
            self._in_doubt_before = records[0].offset + _IN_DOUBT_RECORDS  # what was not committed may have been sent
            self._ledger.begin({self._tp: records[0].offset})
            self._series.distrust()
            self._progress.at_end = True  # until a record of it is settled; requests in flight have their own progress
        for record in records:
            await self._shared.turns.next()  # all partitions may have got many at the same time
            if abandon.is_set():
                break  # the rest is read again by the next owner
            self._put(record)
        self._queue.pump()
        while True:
            self._moved.clear()
            if self._queue.failure is not None:
                raise self._queue.failure
            leaving = abandon.is_set()
            sending = leaving and any(lane.busy for lane in self._lanes.values())
            position = self._ledger.position(self._tp) or 0
            finished = sorted([offset for offset in self._finished if offset < position])
            now_s = self._queue.clock_s()
            if finished and not sending and (leaving or now_s - self._counted_s >= _COUNT_EVERY_S):
                self._counted_s = now_s
                for offset in finished:
                    outcome, why, sample, counts = self._finished.pop(offset)
                    for (name, *labels), number in counts.items():
                        self._shared.instruments.counter(name, *labels).inc(number)
                    self._shared.outcomes.finish(outcome, why, sample)
                yield finished[-1] + 1
            elif sending or (self._is_full() and not leaving):
                await set_within(self._moved, _COUNT_EVERY_S)
                self._queue.pump()
            else:
                return

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Close the windows of silent nodes, and end the series of those that have nothing unfinished."""
        self._progress.at_end |= not self._enqueued
        now_s, after_s = time.monotonic(), self._shared.stale_after_s
        for key in [key for key, read in self._open.items() if now_s - read.read_s >= read.open_for_s(after_s)]:
            self._enqueue(self._open.pop(key))
        self._queue.pump()
        # a node with an open window, or with records that wait or are in flight, is not silent
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane.busy or lane.waiting}
        unfinished = dict.fromkeys((*self._open, *self._lanes))
        self._newest = {key: tick for key, tick in self._newest.items() if key in unfinished}
        parts = [(key or b"").decode(errors="replace").partition("/") for key in unfinished]
        silences = self._series.silences(now_s, after_s, {(cluster, node) for cluster, _, node in parts})
        for start in range(0, len(silences), _SILENT_NODES):
            batch = silences[start : start + _SILENT_NODES]
            results = await self._shared.deliverer.deliver([silence.groups for silence in batch], abandon)
            for silence, result in zip(batch, results, strict=True):
                self._series.ended(silence)
                self._shared.deliverer.leave_out(result)
                refused = samples_of(group for group, _ in (*result.refused, *result.left_out))
                markers = self._shared.instruments.counter("gpustream_remote_write_markers_total")
                markers.inc(samples_of(silence.groups) - refused)

    def reset(self) -> None:
        self._series.clear()
        self._forget()
        self._finished.clear()

    def _forget(self) -> None:
        """Forget the unfinished records: another process may have the partition now."""
        for lane in self._lanes.values():
            lane.waiting.clear()
        self._lanes.clear()
        self._open.clear()
        self._newest.clear()
        self._enqueued = 0
        self._ledger.forget()
        self._abandon = asyncio.Event()

    def _put(self, record: Record) -> None:
        """Put a record into its node's lane, unless it was finished before the partition was revoked."""
        slot = self._ledger.admit(self._tp, record.offset, len(record.value or b""))
        if record.offset in self._finished:
            self._ledger.finish(slot)
            return
        read = ReadRecord(record, slot, in_doubt=record.offset < self._in_doubt_before)
        if self._series.resolution is None:
            self._enqueue(read)
            return
        self._log_s += min(max(0.0, (record.timestamp - self._logged_ms) / 1000), _LOG_GAP_S)
        self._logged_ms, read.log_s = record.timestamp, self._log_s
        self._fold(read)
        after_s, due = min(self._shared.stale_after_s, MAX_OPEN_S), list[bytes | None]()
        for key, oldest in self._open.items():
            if self._log_s - oldest.log_s <= after_s:
                break
            if self._log_s - oldest.log_s > oldest.open_for_s(after_s):
                due.append(key)
        for key in due:  # a window that stays open in a backlog would keep all that is read after it unfinished
            self._enqueue(self._open.pop(key))

    def _enqueue(self, read: ReadRecord) -> None:
        """Put a record into the lane of its node."""
        lane = self._lanes.get(read.record.key)
        if lane is None:
            lane = Lane(proxy(self._series), WeakMethod(self._settle), self._moved, self._abandon)
            self._lanes[read.record.key] = lane
        lane.waiting.append(read)
        self._enqueued += 1
        if len(lane.waiting) == 1 and not lane.busy:
            self._queue.ready(lane)

    def _fold(self, read: ReadRecord) -> None:
        """Put a tick into its node's window, or close that and open the next one if the tick is past it."""
        key = read.record.key
        try:
            sample = decoded(read.record, decode, TOPIC.name)
        except Undecodable as error:
            read.error = str(error)
            self._enqueue(read)
            return
        verdict = self._series.verdict(sample, self._newest.get(key))
        if verdict == "replay":
            self._finish(read.slot, "duplicate", "", sample, {})
            return
        last = self._open.get(key)
        if last is not None and last.window and (verdict == "new_log" or not last.window.includes(sample.ts_ms)):
            self._enqueue(self._open.pop(key))
            last = None
        read.window, read.read_s = self._series.fold(sample, last.window if last else None), time.monotonic()
        read.sample = self._newest[key] = msgspec.structs.replace(sample, devices=())
        if last is not None and last.sample is not None:
            read.earlier, read.in_doubt = last.earlier, last.in_doubt or read.in_doubt
            read.earlier.append((last.slot, last.sample))
        self._ledger.set_aside(read.slot)
        self._open.pop(key, None)
        self._open[key] = read

    def _is_full(self) -> bool:
        """Whether no more records should be read before some are finished."""
        if self._series.resolution is not None:
            return self._enqueued >= AHEAD_RECORDS  # open windows do not count: they close only when more is read
        ahead = (self._ledger.expected(self._tp) or 0) - (self._ledger.position(self._tp) or 0)
        return ahead >= AHEAD_RECORDS or self._ledger.open_bytes >= AHEAD_BYTES // len(self._queue.partitions)

    async def _settle(self, sent: Sequence[Sent]) -> None:
        """Settle records of a node whose ticks were sent: write dead letters and note the outcomes."""
        for read, result in sent:
            tick, abandon = read.tick, self._abandon
            if read.slot.epoch != self._ledger.epoch:
                return
            if tick and result and (read.in_doubt or result.in_doubt) and self._series.is_newest(tick):
                result.refused = [refused for refused in result.refused if refused[1].reason not in THERE]
                result.written = 0
            outcome, why = _outcome(read, result)
            if outcome == "delivered" and read.sample:
                self._shared.outcomes.delay(read.sample)
            if outcome == "dead_lettered":
                await self._shared.letters.write(read.record, why, abandon)
                if read.slot.epoch != self._ledger.epoch:
                    return
            counts: Counts = {}
            if tick and result:
                self._shared.deliverer.leave_out(result)
                if self._series.verdict(tick.sample) == "new_log":
                    self._shared.outcomes.new_log(self._tp.partition)
                whole, accepted = not (result.refused or result.left_out), not result.nothing_of(tick.groups)
                self._series.settle(tick, read.read_s or time.monotonic(), accepted=accepted, whole=whole)
                counts = _counts(tick, result)
            self._enqueued -= 1
            of_earlier: Outcome = "delivered" if outcome == "dead_lettered" else outcome
            for slot, sample in read.earlier:
                self._finish(slot, of_earlier, why, sample, {})
            self._finish(read.slot, outcome, why, read.sample, counts)
            self._progress.move(read, self._queue.clock_s())

    def _finish(self, slot: Slot, outcome: Outcome, why: str, sample: SeriesTick | None, counts: Counts) -> None:
        """Note that a record is finished. It is counted when all before it are."""
        bare = sample and msgspec.structs.replace(sample, devices=())
        self._finished[slot.offset] = outcome, why, bare, counts
        self._ledger.finish(slot)


def _counts(tick: NodeTick, result: Delivered) -> Counts:
    """What a tick adds to the counters: its primary values by outcome, and how many of its series ended."""
    counts: Counter[tuple[str, ...]] = Counter()
    for group, refusal in result.refused:
        counts["gpustream_remote_write_values_refused_total", refusal.reason] += primaries([group])
    if result.written:
        untimely = [group for group, refusal in result.refused if refusal.reason in UNTIMELY]
        most = samples_of(untimely) - result.written
        counts = Counter({key: min(count, most) if key[1] in UNTIMELY else count for key, count in counts.items()})
    for group, refusal in result.left_out:
        counts["gpustream_remote_write_values_left_out_total", refusal.reason] += primaries([group])
    delivered = tick.size.primaries - counts.total()
    for reason, number in tick.withheld.items():
        counts["gpustream_remote_write_samples_withheld_total", reason] = number
    counts["gpustream_remote_write_values_delivered_total",] = delivered
    counts["gpustream_remote_write_markers_total",] = 0 if result.refused or result.left_out else tick.markers
    return counts


def _outcome(read: ReadRecord, result: Delivered | None) -> tuple[Outcome, str]:
    """The outcome of a record and the reason: the one to count by, or the text of its dead letter."""
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
