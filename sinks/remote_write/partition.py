"""One partition of gpu.attributed on its way to the receiver: requests, and what became of each record.

In: records, in order. Out: requests, dead letters, the offset after each request.
A request holds at most one tick of a node, so that whatever is sent twice, after a crash, a timeout or a refusal, is an
exact duplicate of the newest sample of its series, which receivers take silently.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from sinks.blocks import Group, primaries
from sinks.dead_letters import DeadLetters, Record
from sinks.outcomes import Outcome, Outcomes
from sinks.remote_write.deliver import Deliverer, Fate
from sinks.remote_write.left_out import LEFT_OUT, Refused
from sinks.remote_write.policy import UNTIMELY
from sinks.remote_write.series import NodeKey, Series, Tick
from topics.attributed import TOPIC, AttributedSample
from topics.decoding import decoder
from topics.instruments import Instruments

OnOutcome = Callable[[str, str, int, int, Outcome], None]
"""Told the cluster, node, run_id and seq of each tick, and what became of it."""

_SERIES_NAMED = 3
_decode = decoder(AttributedSample)


class Shared(NamedTuple):
    """What all partitions of a sink use together."""

    deliverer: Deliverer
    letters: DeadLetters
    outcomes: Outcomes
    instruments: Instruments
    slots: asyncio.Semaphore
    max_samples: int
    stale_after_s: float
    on_outcome: OnOutcome | None = None


class _Read(NamedTuple):
    """A record and what it says: a tick, an error, or neither where it is a replay."""

    record: Record
    sample: AttributedSample | None = None
    tick: Tick | None = None
    error: str = ""


class RemoteWritePartition:
    """The handler of a partition."""

    def __init__(self, series: Series, shared: Shared) -> None:
        self._series = series
        self._shared = shared

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                self._series.recall(_decode(record.value or b""), time.monotonic())
            except msgspec.DecodeError:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, request by request."""
        for batch in self._requests(records):
            async with self._shared.slots:
                fates = await self._shared.deliverer.deliver([read.tick.groups for read in batch if read.tick], abandon)
            await self._finish(batch, fates, abandon)
            yield batch[-1].record.offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """End the series of nodes that went silent."""
        silences = self._series.silent(time.monotonic(), self._shared.stale_after_s)
        for start in range(0, len(silences), 64):
            some = silences[start : start + 64]
            fates = await self._shared.deliverer.deliver([one.groups for one in some], abandon)
            for silence, fate in zip(some, fates, strict=True):
                self._series.ended(silence)
                self._count_markers(silence.groups, fate)

    def forget(self) -> None:
        """The topic was made anew."""
        self._series.forget()

    def _requests(self, records: Sequence[Record]) -> Iterator[list[_Read]]:
        """Cut the records into requests: full, or before a node's second tick. Made only when the last is settled."""
        batch: list[_Read] = []
        nodes: set[NodeKey] = set()
        samples = 0
        for record in records:
            sample = self._decode(record)
            if isinstance(sample, AttributedSample) and (sample.cluster, sample.node) in nodes:
                yield batch
                batch, nodes, samples = [], set(), 0
            read = self._interpret(record, sample)
            batch.append(read)
            if read.tick is not None:
                nodes.add(read.tick.node)
                samples += sum(len(group.values) for group in read.tick.groups)
            if samples >= self._shared.max_samples:
                yield batch
                batch, nodes, samples = [], set(), 0
        if batch:
            yield batch

    def _decode(self, record: Record) -> AttributedSample | str:
        try:
            return _decode(record.value or b"")
        except msgspec.DecodeError as error:
            return f"not a record of {TOPIC.name}: {error}"

    def _interpret(self, record: Record, sample: AttributedSample | str) -> _Read:
        if isinstance(sample, str):
            return _Read(record, error=sample)
        verdict = self._series.verdict(sample)
        if verdict == "replay":
            return _Read(record, sample)
        if verdict == "new_log":
            self._shared.outcomes.new_log(record.partition)
        return _Read(record, sample, self._series.tick(sample))

    async def _finish(self, batch: Sequence[_Read], fates: Sequence[Fate], abandon: asyncio.Event) -> None:
        """Settle a request's records: dead letters first, so that nothing is counted that may be repeated."""
        of = dict(zip((read.record.offset for read in batch if read.tick), fates, strict=True))
        ends = [(read, *_end(read, of.get(read.record.offset))) for read in batch]
        for read, outcome, why in ends:
            if outcome == "dead_lettered":
                await self._shared.letters.bury(read.record, why, abandon)
        now_s = time.monotonic()
        for read, outcome, why in ends:
            if read.tick is not None:
                fate = of[read.record.offset]
                self._series.settle(read.tick, now_s, accepted=not fate.nothing_of(read.tick.groups))
                self._count(read.tick, fate)
            self._shared.outcomes.finish(outcome, why)
            if self._shared.on_outcome is not None and read.sample is not None:
                sample = read.sample
                self._shared.on_outcome(sample.cluster, sample.node, sample.run_id, sample.seq, outcome)

    def _count(self, tick: Tick, fate: Fate) -> None:
        made = self._shared.instruments
        refused, left_out = _values(fate.refused), _values(fate.left_out)
        delivered = primaries(tick.groups) - refused.total() - left_out.total()
        made.counter("gpustream_remote_write_values_delivered_total").inc(delivered)
        for reason, values in refused.items():
            made.counter("gpustream_remote_write_values_refused_total", reason).inc(values)
        for reason, values in left_out.items():
            made.counter("gpustream_remote_write_values_left_out_total", reason).inc(values)
        if tick.clashes:
            made.counter("gpustream_remote_write_values_clashing_total").inc(tick.clashes)
        if tick.markers and not fate.refused and not fate.left_out:
            made.counter("gpustream_remote_write_markers_total").inc(tick.markers)

    def _count_markers(self, groups: Sequence[Group], fate: Fate) -> None:
        refused = sum(len(group.values) for group, _ in (*fate.refused, *fate.left_out))
        ends = sum(len(group.values) for group in groups) - refused
        self._shared.instruments.counter("gpustream_remote_write_markers_total").inc(ends)


def _values(refused: Iterable[Refused]) -> Counter[str]:
    """How many values of metrics are refused, by reason."""
    values: Counter[str] = Counter()
    for group, refusal in refused:
        values[refusal.reason] += primaries([group])
    return values


def _end(read: _Read, fate: Fate | None) -> tuple[Outcome, str]:
    """What became of a record, and why: a reason to count by, or what its dead letter says."""
    if read.error:
        return "dead_lettered", read.error
    if read.tick is None or fate is None:
        return "duplicate", ""
    if not fate.refused:
        return ("dropped", LEFT_OUT) if fate.left_out and fate.nothing_of(read.tick.groups) else ("delivered", "")
    reasons = {refusal.reason for _, refusal in fate.refused}
    if reasons <= UNTIMELY:
        return "dropped", min(reasons)
    return "dead_lettered", describe(fate)


def describe(fate: Fate) -> str:
    """One line on what was refused: what was said, and which series, the first few of them by name and labels."""
    refusal = fate.refused[0][1]
    names = [_name(group, row) for group, _ in fate.refused for row in range(len(group.values))]
    more = f" and {len(names) - _SERIES_NAMED} more series" if len(names) > _SERIES_NAMED else ""
    return f"{refusal.reason}: {refusal.text}: {', '.join(names[:_SERIES_NAMED])}{more}"


def _name(group: Group, number: int) -> str:
    row = group.block.rows[number]
    pairs = ",".join(f'{name}="{value[:64]}"' for name, value in sorted((*group.block.labels, *row.labels)))
    return f"{row.name}{{{pairs}}}"
