"""Reads what topics hold, from a time to where they end when they are asked: in no group, and without a commit.

It also has what commands do with that beside: decode, show how far it is, write records again.

In:       topics that there are, and a time.
Out:      where that is in each partition, and the records from there to the end, in batches.
On failure: BrokerError with a sentence, also if the broker stops to answer in the middle.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.progress import Progress

from delivery import clients, topic_admin
from delivery.clients import close, connect_consumer, offsets_at, to_kafka
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError, BrokerUnavailable
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.sender import Sender
from topics.topic import Topic

R = TypeVar("R")

STALLED_S = 30.0
"""A broker that gives no record for so long, though there are some, does not answer."""

_WAIT_MS = 500
_ANY_TIME_MS = 1
_UNACKNOWLEDGED = 2000


class Span(NamedTuple):
    """A part of a partition: the first offset, and the one after the last."""

    start: int
    end: int


class History:
    """An open connection; see :func:`opened`.

    By the contract's names: ``partitions`` is how many each topic has, ``kept_ms`` how long it keeps records, if the
    broker says so; below zero is for ever.
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
        self._consumer, self._without = consumer, without

    async def ends(self, topic: str) -> dict[Partition, int]:
        """Where each partition of a topic ends."""
        return await clients.ends(self.connection, self._consumer, self._of(topic))

    async def spans(self, topic: str, since_ms: int = 0) -> dict[Partition, Span]:
        """What of a topic was logged at or after a time, to where it ends now.

        A broker that knows no offsets by time gives all that there is.
        """
        tps = self._of(topic)
        ends = await self.ends(topic)
        starts = await clients.beginnings(self.connection, self._consumer, tps)
        if since_ms > _ANY_TIME_MS:
            at = await offsets_at(self.connection, self._consumer, dict.fromkeys(tps, since_ms))
            none = [tp for tp, offset in at.items() if offset is None]
            anywhere = dict.fromkeys(none, _ANY_TIME_MS)
            timed = await offsets_at(self.connection, self._consumer, anywhere) if none else {}
            starts |= {tp: offset for tp, offset in at.items() if offset is not None}
            starts |= {tp: ends[tp] for tp, offset in timed.items() if offset is not None}  # all is older
        return {tp: Span(min(starts[tp], ends[tp]), ends[tp]) for tp in tps}

    async def records(
        self, spans: Mapping[Partition, Span], advanced: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[Sequence[Any]]:
        """The records of these spans, in order per partition. ``advanced`` gets how many offsets each step took."""
        left = {to_kafka(self.connection, tp): span for tp, span in spans.items() if span.start < span.end}
        self._consumer.assign(list(left))
        at = {tp: span.start for tp, span in left.items()}
        for tp, offset in at.items():
            self._consumer.seek(tp, offset)
        loop = asyncio.get_running_loop()
        moved_s = loop.time()
        while left:
            for tp, records in (await self._consumer.getmany(*left, timeout_ms=_WAIT_MS)).items():
                yield [record for record in records if record.offset < left[tp].end]
            for tp, span in list(left.items()):
                position = min(await self._consumer.position(tp), span.end)
                if position != at[tp]:
                    advanced(position - at[tp])
                    at[tp], moved_s = position, loop.time()
                if position >= span.end:
                    self._consumer.pause(tp)
                    del left[tp]
            if left and loop.time() - moved_s > STALLED_S:
                first = next(iter(left))
                place = f"{first.topic} partition {first.partition} offset {at[first]}"
                raise BrokerUnavailable(f"{self.connection}: no record for {STALLED_S:.0f} s at {place}")

    async def after(self, spans: Mapping[Partition, Span], every_s: float = 0.0) -> AsyncIterator[Sequence[Any]]:
        """The records after these spans, as they come, or those of each ``every_s`` together. Never ends."""
        ends = {to_kafka(self.connection, tp): span.end for tp, span in spans.items()}
        self._consumer.assign(list(ends))
        for tp, offset in ends.items():
            self._consumer.seek(tp, offset)
        while True:
            for records in (await self._consumer.getmany(timeout_ms=_WAIT_MS)).values():
                yield records
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

    def _of(self, topic: str) -> list[Partition]:
        every = [Partition(topic, number) for number in range(self.partitions[topic])]
        return [tp for tp in every if tp not in self._without]


def decoded(
    records: Iterable[Any], decode: Callable[[bytes], R], log: logging.Logger | None = None
) -> Iterator[tuple[Any, R]]:
    """Each record with what it says. One that can't be decoded is left out, and written to the log if there is one."""
    for record in records:
        try:
            found = decode(record.value or b"")
        except msgspec.DecodeError as error:
            if log is not None:
                log.warning("%s", error, extra={"partition": record.partition, "offset": record.offset})
        else:
            yield record, found


class Writer:
    """Writes records again, and waits now and then until those before are acknowledged."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._waiting: list[asyncio.Future[int]] = []

    async def write(self, topic: str, value: bytes, key: bytes, partition: int) -> None:
        """Write a record. Raises what became of one before it."""
        self._waiting.append(await self._sender.send(topic, value, key=key, partition=partition))
        if len(self._waiting) >= _UNACKNOWLEDGED:
            await self.settle()

    async def settle(self) -> None:
        """Wait until all is acknowledged."""
        await asyncio.gather(*self._waiting)
        self._waiting.clear()


def utc(at_ms: int) -> str:
    """A time as people read it: ``2026-11-22 13:00Z``."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%MZ}"


async def refuse_what_is_gone(
    past: History,
    topic: Topic,
    spans: Mapping[Partition, Span],
    from_ms: int,
    *,
    before_ms: int = 0,
    step_ms: int = 60_000,
) -> None:
    """Raises BrokerError if a partition of the topic does not reach back to ``before_ms`` before a time.

    ``step_ms`` is what a time that can be given is a whole number of.
    """
    begins = await past.spans(topic.name)
    cut = [tp for tp, span in spans.items() if 0 < span.start == begins[tp].start < span.end]
    oldest = [record.timestamp for tp in cut if (record := await past.record(tp, begins[tp].start)) is not None]
    gone = [at_ms for at_ms in oldest if at_ms > from_ms - before_ms]
    if gone:
        earliest_ms = -(-(max(gone) + before_ms) // step_ms) * step_ms
        needed = f"{before_ms // 60_000} minutes before the first hour are needed, so" if before_ms else "So"
        raise BrokerError(
            f"{topic.name} has nothing before {utc(max(gone))} any more: unless set otherwise, it keeps"
            f" {topic.retention_hours} hours. {needed} --from can be {utc(earliest_ms)} at the earliest"
        )


@contextlib.contextmanager
def progress(title: str, spans: Mapping[Partition, Span]) -> Iterator[Callable[[int], None]]:
    """Says on standard error, if that is a terminal, how far the reading of these spans has come: give it each step."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(title, total=sum(span.end - span.start for span in spans.values()))
        yield lambda steps: bars.advance(bar, steps)


@contextlib.asynccontextmanager
async def opened(
    connection: Connection, topics: Sequence[str], *, without: Collection[Partition] = ()
) -> AsyncIterator[History]:
    """A connection that reads these topics, ``without`` some partitions. Raises BrokerError if a topic is missing."""
    found, _ = await topic_admin.inspect(connection, topics)
    if missing := [name for topic in topics if (name := connection.prefixed(topic)) not in found]:
        command = topic_admin.command(connection)
        raise BrokerError(f"there is no topic {missing[0]} at {connection}: `{command}` makes it")
    consumer = await connect_consumer(connection, auto_offset_reset="earliest", max_poll_records=None)
    try:
        partitions = {connection.unprefixed(name): one.partitions for name, one in found.items()}
        kept_ms = {
            connection.unprefixed(name): int(one.settings["retention.ms"])
            for name, one in found.items()
            if one.settings is not None and "retention.ms" in one.settings
        }
        yield History(connection, consumer, partitions, kept_ms, without)
    except KafkaError as error:
        raise BrokerUnavailable(f"{connection}: not all partitions can be read: {describe(error)}") from error
    finally:
        await close(consumer)
