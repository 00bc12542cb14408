"""One partition of gpu.attributed on its way to the receiver: requests, and what became of each record.

In: records, in order. Out: requests, dead letters, the offset after each request.
State, per node: the last sample's identity, and the open series. It changes only when a tick is settled.
A request holds at most one tick of a node. So what is sent twice, after a crash, a timeout or a refusal, is an exact
duplicate of the newest sample of its series, and receivers take that silently.
A series that is missing from a tick ends with a staleness marker at the tick's time. The series of a node that went
silent end 1 ms after its last tick, so that a tick that still comes is later than the marker.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delivery import replays
from delivery.dead_letters import DeadLetters, Record
from delivery.instruments import Instruments
from delivery.replays import Last, Verdict
from sinks.outcomes import Outcome, Outcomes, Undecodable, decoded
from sinks.remote_write.policy import UNTIMELY
from sinks.remote_write.refusals import LEFT_OUT, Delivered, Deliverer, Refused
from sinks.series.model import STALE, SampleGroup, SeriesSet, primaries, samples_of
from sinks.series.translation import Cache, Translator
from topics.attributed import TOPIC, AttributedSample
from topics.topic import decoder

_MAX_MS = 2**63 - 1
_FORGET_AFTER_S = 24 * 3600
_SILENT_NODES = 64
_decode = decoder(AttributedSample)

NodeKey = tuple[str, str]


@dataclass(slots=True)
class _Node:
    """What is known of a node. ``last`` is its last sample, ``heard_s`` the clock's time when that was settled."""

    last: Last
    heard_s: float
    ts_ms: int | None = None
    open: tuple[SeriesSet, ...] = ()
    cache: Cache = field(default_factory=Cache)


class NodeTick(NamedTuple):
    """What a record writes. ``clashes`` counts values that are left out because another device has the same labels."""

    sample: AttributedSample
    groups: list[SampleGroup]
    open: tuple[SeriesSet, ...]
    markers: int
    clashes: int

    @property
    def node(self) -> NodeKey:
        """Whose tick it is."""
        return self.sample.cluster, self.sample.node


class Silence(NamedTuple):
    """The end of all open series of a node that was not heard of for long."""

    node: NodeKey
    groups: list[SampleGroup]


class OpenSeries:
    """The series that the nodes of a partition have written so far. ``now_s`` is a clock that never steps back."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._nodes: dict[NodeKey, _Node] = {}
        self._unsettled: dict[NodeKey, Cache] = {}

    def verdict(self, sample: AttributedSample) -> Verdict:
        """Whether this record is its node's next one, was settled before, or is the first of a new log."""
        node = self._nodes.get((sample.cluster, sample.node))
        return replays.verdict(node.last if node else None, sample)

    def tick(self, sample: AttributedSample) -> NodeTick:
        """What a record writes: its series, each once, and an end for those that are gone."""
        key = (sample.cluster, sample.node)
        node = self._nodes.get(key)
        cache = node.cache if node else self._unsettled.setdefault(key, Cache())
        _, groups = self._translator.translate(sample, cache)
        written = tuple([group.series for group in groups])
        if node is not None and written == node.open:
            return NodeTick(sample, groups, written, 0, 0)
        kept = list({group.series.identity: group for group in reversed(groups)}.values())[::-1]  # the first of equals
        there = {group.series.identity: frozenset(group.series.rows) for group in kept}
        markers: list[SampleGroup] = []
        for series in node.open if node is not None else ():
            rows = tuple([row for row in series.rows if row not in there.get(series.identity, ())])
            if rows:  # all of a set, as a rule, and then it is the one that was written
                gone = series if len(rows) == len(series.rows) else SeriesSet(series.labels, rows, series.subject)
                markers.append(SampleGroup(gone, sample.ts_ms, [STALE] * len(rows)))
        clashes = samples_of(groups) - samples_of(kept)
        open_ = tuple([group.series for group in kept])
        return NodeTick(sample, [*kept, *markers], open_, samples_of(markers), clashes)

    def settle(self, tick: NodeTick, now_s: float, *, accepted: bool) -> None:
        """A tick was finished. One that was refused leaves the open series as they were before it."""
        sample = tick.sample
        node = self._nodes.get(tick.node)
        if node is None:
            cache = self._unsettled.pop(tick.node, None) or Cache()
            node = self._nodes[tick.node] = _Node(replays.after(None, sample), now_s, cache=cache)
        node.last, node.heard_s = replays.after(node.last, sample), now_s
        if accepted:
            node.ts_ms, node.open = sample.ts_ms, tick.open

    def recall(self, sample: AttributedSample, now_s: float) -> None:
        """A record that an earlier life settled: know it, and write nothing."""
        if self.verdict(sample) != "replay":
            self.settle(self.tick(sample), now_s, accepted=True)

    def silent(self, now_s: float, stale_after_s: float) -> list[Silence]:
        """The ends of the nodes that were not heard of for so long. They are open until :meth:`ended`."""
        for key in [key for key, node in self._nodes.items() if now_s - node.heard_s > _FORGET_AFTER_S]:
            del self._nodes[key]
        found = []
        for key, node in self._nodes.items():
            if node.open and node.ts_ms is not None and now_s - node.heard_s >= stale_after_s:
                ts_ms = min(node.ts_ms + 1, _MAX_MS)
                ends = [SampleGroup(series, ts_ms, [STALE] * len(series.rows)) for series in node.open]
                found.append(Silence(key, ends))
        return found

    def ended(self, silence: Silence) -> None:
        """A node's silence was written, or refused for good."""
        self._nodes[silence.node].open = ()

    def clear(self) -> None:
        """The topic was created again: offsets start again."""
        self._nodes.clear()
        self._unsettled.clear()


class RemoteWriteShared(NamedTuple):
    """What all partitions of a sink use together."""

    deliverer: Deliverer
    letters: DeadLetters
    outcomes: Outcomes
    instruments: Instruments
    slots: asyncio.Semaphore
    max_samples: int
    stale_after_s: float


class _TickRecord(NamedTuple):
    """A record and what it says: a tick, an error, or neither if it is a replay."""

    record: Record
    sample: AttributedSample | None = None
    tick: NodeTick | None = None
    error: str = ""


class RemoteWritePartition:
    """The handler of a partition."""

    def __init__(self, series: OpenSeries, shared: RemoteWriteShared) -> None:
        self._series, self._shared = series, shared

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                self._series.recall(decoded(record, _decode, TOPIC.name), time.monotonic())
            except Undecodable:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, request by request; dead letters first, so that nothing is counted that may be repeated."""
        shared = self._shared
        for batch in self._requests(records):
            async with shared.slots:
                ticks = [read.tick.groups for read in batch if read.tick]
                results = iter(await shared.deliverer.deliver(ticks, abandon))
            ends = []
            for read in batch:
                result = next(results) if read.tick else None
                outcome, why = _outcome(read, result)
                if outcome == "delivered" and read.sample is not None:
                    shared.outcomes.delay(read.sample)
                if outcome == "dead_lettered":
                    await shared.letters.bury(read.record, why, abandon)
                ends.append((read, result, outcome, why))
            now_s = time.monotonic()
            for read, result, outcome, why in ends:
                if read.tick is not None and result is not None:
                    self._series.settle(read.tick, now_s, accepted=not result.nothing_of(read.tick.groups))
                    self._count(read.tick, result)
                shared.outcomes.finish(outcome, why, read.sample)
            yield batch[-1].record.offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """End the series of nodes that went silent."""
        silences = self._series.silent(time.monotonic(), self._shared.stale_after_s)
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

    def _requests(self, records: Sequence[Record]) -> Iterator[list[_TickRecord]]:
        """Cut the records into requests: full, or before a node's second tick. Made only when the last is settled."""
        batch: list[_TickRecord] = []
        nodes: set[NodeKey] = set()
        samples = 0
        for record in records:
            try:
                sample = decoded(record, _decode, TOPIC.name)
            except Undecodable as error:
                batch.append(_TickRecord(record, error=str(error)))
                continue
            if (sample.cluster, sample.node) in nodes:
                yield batch
                batch, nodes, samples = [], set(), 0
            verdict = self._series.verdict(sample)
            if verdict == "replay":
                batch.append(_TickRecord(record, sample))
                continue
            if verdict == "new_log":
                self._shared.outcomes.new_log(record.partition)
            tick = self._series.tick(sample)
            batch.append(_TickRecord(record, sample, tick))
            nodes.add(tick.node)
            samples += samples_of(tick.groups)
            if samples >= self._shared.max_samples:
                yield batch
                batch, nodes, samples = [], set(), 0
        if batch:
            yield batch

    def _count(self, tick: NodeTick, result: Delivered) -> None:
        """Count a tick's values by what became of them."""
        made = self._shared.instruments
        refused, left_out = _values(result.refused), _values(result.left_out)
        if result.written:
            untimely = [group for group, refusal in result.refused if refusal.reason in UNTIMELY]
            most = samples_of(untimely) - result.written
            refused = Counter({why: min(of, most) if why in UNTIMELY else of for why, of in refused.items()})
        delivered = primaries(tick.groups) - refused.total() - left_out.total()
        made.counter("gpustream_remote_write_values_delivered_total").inc(delivered)
        for reason, values in refused.items():
            made.counter("gpustream_remote_write_values_refused_total", reason).inc(values)
        for reason, values in left_out.items():
            made.counter("gpustream_remote_write_values_left_out_total", reason).inc(values)
        if tick.clashes:
            made.counter("gpustream_remote_write_values_clashing_total").inc(tick.clashes)
        if tick.markers and not result.refused and not result.left_out:
            made.counter("gpustream_remote_write_markers_total").inc(tick.markers)


def _values(refused: Iterable[Refused]) -> Counter[str]:
    """How many values of metrics are refused, by reason."""
    values: Counter[str] = Counter()
    for group, refusal in refused:
        values[refusal.reason] += primaries([group])
    return values


def _outcome(read: _TickRecord, result: Delivered | None) -> tuple[Outcome, str]:
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
