"""What Kafka has of gpu.usage for a time: of each key the record that counts.

In:       a time, in whole minutes.
Out:      the part of it that can be answered, what can't be and why, and the records, a partition at a time.
Whole hours are read from gpu.usage, what is left at both ends from gpu.usage-minutes. A window is chosen by what its
record says. Where it may be in the log is found by time. Nothing of a window is written before it begins, except by
nodes whose clocks are ahead. A replay may write it again at any later time, so each log is read to its end.
On failure: BrokerError with a sentence. A record that can't be decoded is logged and left out.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from delivery.connection import Connection
from delivery.ledger import Partition
from gpustream import history
from gpustream.history import History, Span
from gpustream.history import utc as utc
from topics.topic import Topic, UInt, decoder
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

log = logging.getLogger(__name__)

AHEAD_MS = 10 * MINUTE_MS
"""More than a node's clock may be ahead of the log, for its ticks to count."""


class Range(NamedTuple):
    """A time: [``from_ms``, ``to_ms``)."""

    from_ms: int
    to_ms: int

    @property
    def hours(self) -> "Range":
        """The whole hours in it; empty (``to_ms`` is not above ``from_ms``) if there is none."""
        return Range(-(-self.from_ms // HOUR_MS) * HOUR_MS, self.to_ms // HOUR_MS * HOUR_MS)

    @property
    def ends(self) -> list["Range"]:
        """What of it is in no whole hour."""
        hours = self.hours
        if hours.from_ms > hours.to_ms:
            return [self]
        return [end for end in (Range(self.from_ms, hours.from_ms), Range(hours.to_ms, self.to_ms)) if end.is_some]

    def until(self, now_ms: int) -> "Range":
        """What of it is not in an hour that goes on."""
        return Range(self.from_ms, min(self.to_ms, now_ms // HOUR_MS * HOUR_MS))

    @property
    def is_some(self) -> bool:
        """Whether there is any time in it."""
        return self.from_ms < self.to_ms


class Answer(NamedTuple):
    """What is read for a time: ``range`` is the part that can be read, ``notes`` say what can't be."""

    range: Range
    spans: Mapping[Partition, Span]
    notes: list[str]


async def plan(past: History, wanted: Range, now_ms: int) -> Answer:
    """Find what can be answered, and where in the logs that is."""
    notes = []
    hours, is_cut = await _spans(past, HOURS, wanted, now_ms)
    if is_cut:
        notes.append(
            f"{HOURS.name} may not go back to {utc(wanted.from_ms)} any more: of that time, only what is still there is"
            " counted. `gpustream sink parquet` keeps it for longer."
        )
    minutes: dict[Partition, Span] = {}
    for end in wanted.ends:
        spans, is_cut = await _spans(past, MINUTES, end, now_ms)
        if is_cut:
            inner, is_first = wanted.hours, end.from_ms == wanted.from_ms
            wanted = wanted._replace(from_ms=inner.from_ms) if is_first else wanted._replace(to_ms=inner.to_ms)
            notes.append(
                f"{MINUTES.name} does not have {utc(end.from_ms)} to {utc(end.to_ms)} any more, and {HOURS.name} has"
                " whole hours only: that time is not counted."
            )
        else:
            minutes = {tp: Span(min(span.start, minutes.get(tp, span).start), span.end) for tp, span in spans.items()}
    return Answer(wanted, {**(hours if wanted.hours.is_some else {}), **minutes}, notes)


async def _spans(past: History, topic: Topic, wanted: Range, now_ms: int) -> tuple[dict[Partition, Span], bool]:
    """Where a topic has a time, and whether it may have had more of it: it is older than what the topic keeps."""
    spans = await past.spans(topic.name, max(0, wanted.from_ms - AHEAD_MS))
    kept_ms = past.kept_ms.get(topic.name, (topic.retention_hours or 0) * HOUR_MS)
    if kept_ms < 0 or wanted.from_ms >= now_ms - kept_ms:
        return spans, False
    begins = await past.spans(topic.name)
    return spans, any(0 < span.start == begins[tp].start for tp, span in spans.items())


async def records(past: History, answer: Answer) -> AsyncIterator[Iterator[Usage]]:
    """The records that count, of a partition of both topics at a time."""
    with history.progress("reading usage", answer.spans) as advanced:
        for number in sorted({tp.partition for tp in answer.spans}):
            counting = Counting(answer.range)
            spans = {tp: span for tp, span in answer.spans.items() if tp.partition == number}
            async for some in past.records(spans, advanced):
                counting.take(some)
            yield counting.records()


class _Head(msgspec.Struct, frozen=True):
    """What says whether a record counts; most do not, and are not decoded further."""

    start_ms: UInt
    end_ms: UInt
    generation: UInt
    revision: UInt


_decode, _decode_head = decoder(Usage), decoder(_Head)


class Counting:
    """The records of some partitions: of each key the highest generation and, in that, the highest revision.

    Hours count if they are whole; minutes count for the rest.
    """

    def __init__(self, range: Range) -> None:  # noqa: A002 - it is one
        self._in = {HOURS.name: [range.hours], MINUTES.name: range.ends}
        self._found: dict[tuple[str, bytes], tuple[int, int, bytes]] = {}

    def take(self, records: Iterable[Any]) -> None:
        """Look at records as they are read."""
        for record in records:
            topic = HOURS.name if record.topic.endswith(HOURS.name) else MINUTES.name
            try:
                head = _decode_head(record.value or b"")
            except msgspec.DecodeError as error:
                if record.value is not None:
                    log.warning("%s partition %d offset %d: %s", topic, record.partition, record.offset, error)
                continue
            if any(some.from_ms <= head.start_ms and head.end_ms <= some.to_ms for some in self._in[topic]):
                key = topic, record.key or b""
                known = self._found.get(key)
                if known is None or (head.generation, head.revision) > known[:2]:
                    self._found[key] = head.generation, head.revision, record.value

    def records(self) -> Iterator[Usage]:
        """The records that count, without those that say that there was nothing."""
        for (topic, key), (*_, value) in self._found.items():
            try:
                usage = _decode(value)
                if not usage.of:
                    raise msgspec.ValidationError("of is 0")
            except msgspec.DecodeError as error:
                log.warning("%s, key %r: %s", topic, key, error)
                continue
            if usage.slice_ms or usage.device_ms:
                yield usage


def opened(connection: Connection) -> Any:
    """A connection that reads both topics of usage."""
    return history.opened(connection, [HOURS.name, MINUTES.name])
