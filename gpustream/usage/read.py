"""Reads the usage records of a time range from Kafka: for each key the record that counts.

In:       a time range, in whole minutes.
Out:      the part of it that Kafka still has, notes on what is missing, and the records, a partition at a time.
Whole hours are read from gpu.usage, the rest at both ends from gpu.usage-minutes. A record is chosen by its own
window, and found in the log by time: it is not written before its window begins, except by nodes whose clocks are
ahead. A replay may write it again at any later time, so each log is read to its end.
On failure: BrokerError with a sentence. A record that can't be decoded is logged and left out.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from delivery.ledger import Partition
from gpustream import history
from gpustream.history import History, Span, utc
from topics.topic import Topic, UInt, decoder
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

log = logging.getLogger(__name__)

MAX_AHEAD_MS = 10 * MINUTE_MS
"""How far before its window a record may be logged: more than a node's clock may be ahead for its ticks to count."""


class Range(NamedTuple):
    """A time range: [``from_ms``, ``to_ms``)."""

    from_ms: int
    to_ms: int

    @property
    def hours(self) -> "Range":
        """The whole hours in it; empty (``to_ms`` is not above ``from_ms``) if there is none."""
        return Range(-(-self.from_ms // HOUR_MS) * HOUR_MS, self.to_ms // HOUR_MS * HOUR_MS)

    @property
    def partial_hours(self) -> list["Range"]:
        """The parts of it, at its start and end, that are not whole hours."""
        hours = self.hours
        if hours.from_ms > hours.to_ms:
            return [self]
        return [end for end in (Range(self.from_ms, hours.from_ms), Range(hours.to_ms, self.to_ms)) if end.is_nonempty]

    def until(self, now_ms: int) -> "Range":
        """The part of it before the current hour."""
        return Range(self.from_ms, min(self.to_ms, now_ms // HOUR_MS * HOUR_MS))

    @property
    def is_nonempty(self) -> bool:
        return self.from_ms < self.to_ms


class Plan(NamedTuple):
    """What to read for a time range. ``range`` is the part that Kafka still has; ``notes`` say what is missing."""

    range: Range
    spans: Mapping[Partition, Span]
    notes: list[str]


async def plan(reader: History, time_range: Range, now_ms: int) -> Plan:
    """Finds what Kafka still has of a time range, and the offsets of that."""
    notes = []
    hours, is_cut = await _spans(reader, HOURS, time_range, now_ms)
    if is_cut:
        notes.append(
            f"{HOURS.name} may not go back to {utc(time_range.from_ms)} any more: of that time, only what is still"
            " there is counted. `gpustream sink parquet` keeps it for longer."
        )
    minutes: dict[Partition, Span] = {}
    hours_range, asked_from_ms = time_range.hours, time_range.from_ms
    for part in time_range.partial_hours:
        spans, is_cut = await _spans(reader, MINUTES, part, now_ms)
        if is_cut:
            if part.from_ms == asked_from_ms:
                time_range = time_range._replace(from_ms=hours_range.from_ms)
            else:
                time_range = time_range._replace(to_ms=hours_range.to_ms)
            notes.append(
                f"{MINUTES.name} does not have {utc(part.from_ms)} to {utc(part.to_ms)} any more, and {HOURS.name} has"
                " whole hours only: that time is not counted."
            )
        else:
            minutes = {tp: Span(min(span.start, minutes.get(tp, span).start), span.end) for tp, span in spans.items()}
    return Plan(time_range, {**(hours if time_range.hours.is_nonempty else {}), **minutes}, notes)


async def _spans(reader: History, topic: Topic, time_range: Range, now_ms: int) -> tuple[dict[Partition, Span], bool]:
    """The spans of a topic that hold a time range, and whether older records of it may have been deleted."""
    spans = await reader.spans(topic.name, max(0, time_range.from_ms - MAX_AHEAD_MS))
    kept_ms = reader.kept_ms.get(topic.name, (topic.retention_hours or 0) * HOUR_MS)
    if kept_ms < 0 or time_range.from_ms >= now_ms - kept_ms:
        return spans, False
    full_spans = await reader.spans(topic.name)
    return spans, any(0 < span.start == full_spans[tp].start for tp, span in spans.items())


async def records(reader: History, plan: Plan) -> AsyncIterator[Iterator[Usage]]:
    """The records that count: those of one partition of both topics at a time. If some of them are deleted before they
    are read, that is another note."""

    def on_deleted(tp: Partition, _: int) -> None:
        note = f"records of {tp.topic} were deleted while this was read: what only they had is not counted."
        if note not in plan.notes:
            plan.notes.append(note)

    with history.progress("reading usage", plan.spans) as advanced:
        for partition in sorted({tp.partition for tp in plan.spans}):
            latest = LatestRecords(plan.range)
            spans = {tp: span for tp, span in plan.spans.items() if tp.partition == partition}
            async for batch in reader.records(spans, advanced, on_deleted=on_deleted):
                latest.add(batch)
            yield latest.records()


class _Header(msgspec.Struct, frozen=True):
    """The fields that decide whether a record counts. Most do not, and are not decoded further."""

    start_ms: UInt
    end_ms: UInt
    generation: UInt
    revision: UInt


_decode, _decode_header = decoder(Usage), decoder(_Header)


class LatestRecords:
    """The latest record of each key: of the highest generation and, in that, the highest revision.

    Hours count if they are whole; minutes count for the rest.
    """

    def __init__(self, time_range: Range) -> None:
        self._ranges = {HOURS.name: [time_range.hours], MINUTES.name: time_range.partial_hours}
        self._latest: dict[tuple[str, bytes], tuple[int, int, bytes]] = {}

    def add(self, records: Iterable[Any]) -> None:
        """Adds records in any order."""
        for record in records:
            topic = HOURS.name if record.topic.endswith(HOURS.name) else MINUTES.name
            try:
                header = _decode_header(record.value or b"")
            except msgspec.DecodeError as error:
                if record.value is not None:
                    log.warning("%s partition %d offset %d: %s", topic, record.partition, record.offset, error)
                continue
            if any(
                time_range.from_ms <= header.start_ms < header.end_ms <= time_range.to_ms
                for time_range in self._ranges[topic]
            ):
                key = topic, record.key or b""
                latest = self._latest.get(key)
                if latest is None or (header.generation, header.revision) > latest[:2]:
                    self._latest[key] = header.generation, header.revision, record.value

    def records(self) -> Iterator[Usage]:
        """The records that count, without those of which nothing is left. A row ``unobserved`` may have energy only,
        and that of a pod that was not given the device only what it used."""
        for (topic, key), (*_, value) in self._latest.items():
            try:
                usage = _decode(value)
            except msgspec.DecodeError as error:
                log.warning("%s, key %r: %s", topic, key, error)
                continue
            if usage.slice_ms or usage.energy_mj or usage.used_us:
                yield usage
