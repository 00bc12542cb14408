"""Reads topics from a time to their current end, in no group and without commits.

Commands also decode records with it, show their progress and write records again.

In:       the names of existing topics, and a time.
Out:      the offsets of that time in each partition, and the records from there to the end, in batches.
On failure: BrokerError with a sentence, also if the broker stops answering in the middle.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.progress import Progress

from delivery import topic_admin
from delivery.clients import Offsets, close, connect_consumer, explain, from_kafka, to_kafka
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError, BrokerUnavailable
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.sender import Headers, Sender, Unsendable
from delivery.topic_watch import TopicWatch, other_partitions
from topics.times import time_of
from topics.topic import Topic

R = TypeVar("R")

STALLED_S = 30.0
"""A broker that sends no record for this long, although there are some, does not answer."""

_WAIT_MS = 500
_METADATA_MS = 20_000
_ANY_TIME_MS = 1
_UNACKNOWLEDGED = 2000


class Span(NamedTuple):
    """A range of offsets in a partition: the first, and the one after the last."""

    start: int
    end: int


OnDeleted = Callable[[Partition, int], None]
"""What is called if records of a partition were deleted, from an offset on, before they were read."""


def refuse_deleted(tp: Partition, offset: int) -> None:
    """For readers that need all records. Raises BrokerError."""
    raise BrokerError(
        f"{tp.topic} partition {tp.partition}: records from offset {offset} on were deleted before they were read: run"
        " this again for a later time"
    )


class History:
    """An open connection; see :func:`opened`.

    ``partitions`` is the number of partitions of each topic, by its name without a prefix. ``kept_ms`` is its
    retention, if the broker reports it; below zero means for ever.
    """

    def __init__(
        self,
        connection: Connection,
        consumer: Any,
        partitions: Mapping[str, int],
        kept_ms: Mapping[str, int] = MappingProxyType({}),
        without: Collection[Partition] = (),
    ) -> None:
        self.connection, self.partitions, self.kept_ms = connection, partitions, kept_ms
        self._consumer, self._offsets, self._without = consumer, Offsets(connection, consumer), without

    async def ends(self, topic: str) -> dict[Partition, int]:
        """The current end of each partition of a topic, as far as it can be read."""
        return await self._offsets.ends(self.partitions_of(topic))

    async def spans(self, topic: str, since_ms: int = 0) -> dict[Partition, Span]:
        """The offsets of what was logged at or after a time, up to the current end.

        If the broker knows no offsets by time, it is the whole topic.
        """
        tps = self.partitions_of(topic)
        ends = await self.ends(topic)
        starts = await self._offsets.beginnings(tps)
        if since_ms > _ANY_TIME_MS:
            offsets = await self._offsets.offsets_at(dict.fromkeys(tps, since_ms))
            without_offset = [tp for tp, offset in offsets.items() if offset is None]
            any_time = dict.fromkeys(without_offset, _ANY_TIME_MS)
            any_offsets = await self._offsets.offsets_at(any_time) if without_offset else {}
            starts |= {tp: offset for tp, offset in offsets.items() if offset is not None}
            starts |= {tp: ends[tp] for tp, offset in any_offsets.items() if offset is not None}  # all is older
        return {tp: Span(min(starts[tp], ends[tp]), ends[tp]) for tp in tps}

    async def records(
        self,
        spans: Mapping[Partition, Span],
        advanced: Callable[[int], None] = lambda _: None,
        *,
        on_deleted: OnDeleted | None = None,
    ) -> AsyncIterator[Sequence[Any]]:
        """The records of these spans, in order per partition. ``advanced`` gets the number of offsets read.

        What retention deletes before it is read is left out, and ``on_deleted`` is called. Raises BrokerError if a
        topic was deleted, or created again, meanwhile.
        """
        remaining = {to_kafka(self.connection, tp): span for tp, span in spans.items() if span.start < span.end}
        self._consumer.assign(list(remaining))
        positions = {tp: span.start for tp, span in remaining.items()}
        for tp, offset in positions.items():
            self._consumer.seek(tp, offset)
        loop = asyncio.get_running_loop()
        progress_s = loop.time()
        while remaining:
            read = positions.copy()
            for tp, records in (await self._consumer.getmany(*remaining, timeout_ms=_WAIT_MS)).items():
                await self._require_log(tp, read[tp], records[0].offset, on_deleted)
                read[tp] = records[-1].offset + 1
                yield [record for record in records if record.offset < remaining[tp].end]
            for tp, span in list(remaining.items()):
                position = min(await self._position(tp, positions[tp]), span.end)
                await self._require_log(tp, min(read[tp], span.end), position, on_deleted)
                if position != positions[tp]:
                    advanced(position - positions[tp])
                    positions[tp], progress_s = position, loop.time()
                if position >= span.end:
                    self._consumer.pause(tp)
                    del remaining[tp]
            if remaining and loop.time() - progress_s > STALLED_S:
                stalled = next(iter(remaining))
                raise self._stall(stalled, positions[stalled])

    async def _position(self, tp: TopicPartition, offset: int) -> int:
        """The offset that is read next. While the client looks for where the log begins, it waits for the broker."""
        try:
            async with asyncio.timeout(STALLED_S):
                return int(await self._consumer.position(tp))
        except TimeoutError:
            raise self._stall(tp, offset) from None

    async def _require_log(
        self, tp: TopicPartition, offset: int, next_offset: int, on_deleted: OnDeleted | None
    ) -> None:
        """Raises BrokerError if the log at ``next_offset`` is not the one that was read up to ``offset``. Calls
        ``on_deleted`` if records between them were deleted."""
        if next_offset < offset:
            raise BrokerError(f"{tp.topic} was deleted and created again while it was read: run this again")
        if on_deleted is not None and next_offset > offset:  # or a compaction or a transaction has left no record there
            begins = await self._offsets.beginnings([partition := from_kafka(self.connection, tp)])
            if begins[partition] > offset:
                on_deleted(partition, offset)

    def _stall(self, tp: TopicPartition, offset: int) -> BrokerError:
        """Why no record comes of a partition."""
        cluster = self._consumer._client.cluster  # noqa: SLF001 - no public way
        if tp.topic not in cluster.unauthorized_topics and not cluster.partitions_for_topic(tp.topic):
            return BrokerError(f"{tp.topic} was deleted while it was read: run this again when it is back")
        where = f"{tp.topic} partition {tp.partition} offset {offset}"
        return BrokerUnavailable(f"{self.connection}: no record for {STALLED_S:.0f} s at {where}")

    async def after(self, spans: Mapping[Partition, Span], every_s: float = 0.0) -> AsyncIterator[Sequence[Any]]:
        """The records after these spans, as they come, or those of each ``every_s`` together. Never ends.

        A topic that is created again is read from its beginning. Raises BrokerError if it has other partitions.
        """
        ends = {to_kafka(self.connection, tp): span.end for tp, span in spans.items()}
        self._consumer.assign(list(ends))
        for tp, offset in ends.items():
            self._consumer.seek(tp, offset)
        topic_watch = TopicWatch({tp.topic for tp in ends})
        cluster = self._consumer._client.cluster  # noqa: SLF001 - no public way
        cluster.add_listener(topic_watch.note)
        topic_watch.note(cluster)
        while True:
            batches = await self._consumer.getmany(timeout_ms=_WAIT_MS)
            missing = topic_watch.missing.copy()
            for tp, records in batches.items():
                if tp.topic not in missing:
                    yield records
            if (changed := other_partitions(self._consumer, ends)) is not None:
                raise BrokerError(f"{changed} before: run this again")
            for topic in [topic for topic in missing if self._consumer.partitions_for_topic(topic)]:
                for tp in [tp for tp in ends if tp.topic == topic]:
                    self._consumer.seek(tp, 0)
                topic_watch.missing.discard(topic)
            await asyncio.sleep(every_s)

    async def record(self, tp: Partition, offset: int) -> Any | None:
        """The record at an offset; None if there is none any more."""
        begin, end = (await self.spans(tp.topic))[tp]
        if not begin <= offset < end:
            return None
        async for records in self.records({tp: Span(offset, offset + 1)}):
            for record in records:
                return record
        return None

    def partitions_of(self, topic: str) -> list[Partition]:
        """The partitions of a topic that can be read."""
        partitions = [Partition(topic, number) for number in range(self.partitions[topic])]
        return [tp for tp in partitions if tp not in self._without]


def decoded(
    records: Iterable[Any], decode: Callable[[bytes], R], log: logging.Logger | None = None
) -> Iterator[tuple[Any, R]]:
    """Each record with its decoded value. One that can't be decoded is left out, and logged if there is a ``log``."""
    for record in records:
        try:
            value = decode(record.value or b"")
        except msgspec.DecodeError as error:
            if log is not None:
                at = {"partition": record.partition, "offset": record.offset}
                log.warning("%s: a record is left out: %s", record.topic, error, extra=at)
        else:
            yield record, value


class Writer:
    """Writes records, and limits how many are not acknowledged yet.

    It raises BrokerError if an earlier record was refused, or none is acknowledged for too long.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._waiting: list[asyncio.Future[int]] = []

    async def write(
        self, topic: str, value: bytes, key: bytes, partition: int | None = None, headers: Headers = ()
    ) -> None:
        """Writes a record. Without a ``partition`` its key decides."""
        acknowledged = None
        while acknowledged is None:
            try:
                async with asyncio.timeout(STALLED_S):
                    acknowledged = await self._sender.send(topic, value, key=key, partition=partition, headers=headers)
            except TimeoutError:
                if not self._waiting:
                    raise self._stall() from None
                await self.settle()  # the sender may be sending these again, one at a time
        self._waiting.append(acknowledged)
        if len(self._waiting) >= _UNACKNOWLEDGED:
            await self.settle()

    async def settle(self) -> None:
        """Waits until all records are acknowledged."""
        while pending := [acknowledged for acknowledged in self._waiting if not acknowledged.done()]:
            done, _ = await asyncio.wait(pending, timeout=STALLED_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise self._stall()
        try:
            await asyncio.gather(*self._waiting)
        except Unsendable as error:
            raise BrokerError(f"Kafka has refused a record: {error}") from error
        self._waiting.clear()

    def _stall(self) -> BrokerUnavailable:
        """Why no record is acknowledged."""
        reasons = self._sender.not_ready() or ["run this again when it takes them"]
        return BrokerUnavailable(f"Kafka has taken no record for {STALLED_S:.0f} s: {'; '.join(reasons)}")


def utc(at_ms: int) -> str:
    """A time as people read it: ``2026-11-22 13:00Z``."""
    return f"{time_of(at_ms):%Y-%m-%d %H:%MZ}"


async def check_retention(
    reader: History,
    topic: Topic,
    spans: Mapping[Partition, Span],
    from_ms: int,
    *,
    before_ms: int = 0,
    step_ms: int = 60_000,
) -> None:
    """Raises BrokerError if a partition no longer has the records from ``before_ms`` before ``from_ms`` on.

    The message names the earliest time that can be given, a multiple of ``step_ms``.
    """
    all_spans = await reader.spans(topic.name)
    truncated = [tp for tp, span in spans.items() if 0 < span.start == all_spans[tp].start < span.end]
    oldest = [
        record.timestamp for tp in truncated if (record := await reader.record(tp, all_spans[tp].start)) is not None
    ]
    too_late = [at_ms for at_ms in oldest if at_ms > from_ms - before_ms]
    if too_late:
        earliest_ms = -(-(max(too_late) + before_ms) // step_ms) * step_ms
        reason = f"{before_ms // 60_000} minutes before the first hour are needed, so" if before_ms else "So"
        raise BrokerError(
            f"{topic.name} has nothing before {utc(max(too_late))} any more: unless set otherwise, it keeps"
            f" {topic.retention_hours} hours. {reason} --from can be {utc(earliest_ms)} at the earliest"
        )


@contextlib.contextmanager
def progress(title: str, spans: Mapping[Partition, Span]) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal. Call what it gives with each number of offsets read."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(title, total=sum(span.end - span.start for span in spans.values()))
        yield lambda steps: bars.advance(bar, steps)


@contextlib.asynccontextmanager
async def opened(
    connection: Connection, topics: Sequence[str], *, without: Collection[Partition] = (), fetch_wait_ms: int = _WAIT_MS
) -> AsyncIterator[History]:
    """A connection that reads these topics, ``without`` some partitions. ``fetch_wait_ms``: how long a broker may wait
    for records before it answers that there are none. Raises BrokerError if a topic is missing."""
    descriptions, _ = await topic_admin.inspect(connection, topics)
    if missing := [name for topic in topics if (name := connection.prefixed(topic)) not in descriptions]:
        command = topic_admin.command(connection)
        raise BrokerError(f"there is no topic {missing[0]} at {connection}: `{command}` makes it")
    options = {"max_poll_records": None, "metadata_max_age_ms": _METADATA_MS, "fetch_max_wait_ms": fetch_wait_ms}
    try:
        consumer = await connect_consumer(connection, within_s=STALLED_S, auto_offset_reset="earliest", **options)
    except KafkaError as error:
        raise BrokerUnavailable(explain(error, connection)) from error
    try:
        partitions = {connection.unprefixed(name): description.partitions for name, description in descriptions.items()}
        kept_ms = {
            connection.unprefixed(name): int(description.settings["retention.ms"])
            for name, description in descriptions.items()
            if description.settings is not None and "retention.ms" in description.settings
        }
        yield History(connection, consumer, partitions, kept_ms, without)
    except KafkaError as error:
        raise BrokerUnavailable(f"{connection}: not all partitions can be read: {describe(error)}") from error
    finally:
        await close(consumer)
