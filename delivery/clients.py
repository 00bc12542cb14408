"""aiokafka's clients, which never make a topic: import them from here. How they are connected, let go, and asked.

A client asks for metadata of the topics that it uses by name, and a broker with ``auto.create.topics.enable``, which is
Kafka's default, makes a topic that is asked for, with the broker's own number of partitions and settings. Only the
request itself can forbid that, and aiokafka has no option for it: so the request is replaced in every module that
makes one, for the whole process.

While a partition has no leader and no broker answers, a producer of aiokafka asks for metadata thousands of times a
second. So a client waits after it has asked in vain. And it closes a connection that a broker has ended: aiokafka may
forget one that it has not closed yet, and then the descriptor stays open until the garbage collector finds it.

A producer compresses at zstd's level 1, for which aiokafka has no option: records as ours are no larger by it than at
level 3, and take 0.8 of the time.

Source: Kafka's protocol, Metadata from version 4 on (``allow_auto_topic_creation``).
"""

import asyncio
import itertools
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import aiokafka.admin.client
import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.codec import zstd_encode
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError, NodeNotReadyError, RequestTimedOutError, StaleMetadata
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from delivery import opening
from delivery.connection import Connection
from delivery.kafka_errors import describe
from delivery.ledger import Partition

log = logging.getLogger(__name__)

SILENCE = (KafkaConnectionError, NodeNotReadyError, RequestTimedOutError, StaleMetadata, OSError, TimeoutError)
"""What the client raises if nobody answers."""

_CLOSE_S = 2.0
_CANCELLATIONS = 20
_REMIND_S = 60.0
_PEEKS = 10
_PEEK_BACK = 8
_PEEK_BYTES = 256 << 10
_NO_GROUP: dict[str, Any] = {"group_id": None, "auto_offset_reset": "earliest"}


class _MakesNoTopic(MetadataRequest):  # type: ignore[misc] # aiokafka has no types
    """A request for metadata that leaves a topic missing that is missing."""

    def __init__(self, topics: list[str] | None = None) -> None:
        super().__init__(topics, allow_auto_topic_creation=False)


for _module in (aiokafka.client, aiokafka.admin.client):
    _module.MetadataRequest = _MakesNoTopic


_ASKS_AGAIN_S = 0.1
_ask_once: Callable[..., Awaitable[bool]] = AIOKafkaClient._metadata_update  # noqa: SLF001 - there is no option


async def _ask(client: AIOKafkaClient, *given: Any) -> bool:
    """aiokafka's own request for metadata; if nobody has answered, the next one is not made at once."""
    answered = await _ask_once(client, *given)
    if not answered:
        await asyncio.sleep(_ASKS_AGAIN_S)
    return answered


AIOKafkaClient._metadata_update = _ask  # noqa: SLF001 - likewise
_get_conn: Callable[..., Awaitable[Any]] = AIOKafkaClient._get_conn  # noqa: SLF001 - likewise


async def _get_open_conn(client: AIOKafkaClient, node_id: Any, **options: Any) -> Any:
    """aiokafka's own connection to a node; one that has ended is closed before it is forgotten."""
    known = client._conns.get((node_id, options.get("group", ConnectionGroup.DEFAULT)))  # noqa: SLF001 - likewise
    if known is not None and not known.connected():
        known.close(reason=CloseReason.CONNECTION_BROKEN)
    return await _get_conn(client, node_id, **options)


AIOKafkaClient._get_conn = _get_open_conn  # noqa: SLF001 - likewise


_ZSTD_LEVEL = 1
sys.modules[DefaultRecordBatchBuilder.__module__].zstd_encode = partial(  # type: ignore[attr-defined] # likewise
    zstd_encode, level=_ZSTD_LEVEL
)


def consumer(connection: Connection, *topics: str, **options: Any) -> AIOKafkaConsumer:
    """A consumer that is not started. It reads committed records only, and commits nothing by itself."""
    defaults = {"enable_auto_commit": False, "isolation_level": "read_committed"}
    return AIOKafkaConsumer(*topics, **_options(connection, defaults | options))


def producer(connection: Connection, **options: Any) -> AIOKafkaProducer:
    """A producer that is not started. It gives up no batch, however long its partition has no leader.

    aiokafka would after ``request_timeout_ms``, also one that was stored and whose answer was lost. It can't be sent by
    another producer without being there twice; only this one can, by its sequence number.
    """
    compression = None if connection.compression == "none" else connection.compression
    made = AIOKafkaProducer(compression_type=compression, **_options(connection, options))
    made._message_accumulator._batch_ttl = math.inf  # noqa: SLF001 - there is no option
    return made


def admin(connection: Connection, **options: Any) -> AIOKafkaAdminClient:
    """A client of the administration that is not started."""
    return AIOKafkaAdminClient(**_options(connection, options))


def _options(connection: Connection, options: Mapping[str, Any]) -> dict[str, Any]:
    named = {"client_id": connection.client_id} if connection.client_id is not None else {}
    return {**opening.options(connection), **options, **named}


class LogThrottle:
    """Which troubles are to be logged: one that is new, and again each minute while it lasts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._said_s: dict[str, float] = {}

    def is_due(self, trouble: str) -> bool:
        """Whether to log it now."""
        if self._now() - self._said_s.get(trouble, -_REMIND_S) < _REMIND_S:
            return False
        self._said_s = {one: at for one, at in self._said_s.items() if self._now() - at < _REMIND_S}
        self._said_s[trouble] = self._now()
        return True


def explain(error: BaseException, connection: Connection) -> str:
    """Why Kafka does not do what was asked of it, in a line."""
    if not isinstance(error, SILENCE):
        return f"Kafka at {connection}: {describe(error)}"
    return opening.trouble(connection) or f"no Kafka broker answers at {connection} ({type(error).__name__})"


def backoff(delays_s: Sequence[float]) -> Iterator[float]:
    """How long to wait after each failure: these delays, and then the last of them for ever."""
    return itertools.chain(delays_s, itertools.repeat(delays_s[-1]))


async def connect_consumer(connection: Connection, **options: Any) -> Any:
    """A :func:`consumer` once a broker answers; cancel to give up."""
    return await start_client(lambda: consumer(connection, **options), connection)


async def start_client(make: Callable[[], Any], connection: Connection, backoff_s: Sequence[float] = (0.5,)) -> Any:
    """A client that ``make`` makes, started once a broker answers, for as long as that takes; cancel to give up."""
    throttle = LogThrottle()
    for delay_s in backoff(backoff_s):
        client = make()
        try:
            await client.start()
        except KafkaError as error:
            await close(client)
            if throttle.is_due(why := explain(error, connection)):
                log.warning("%s; trying again", why)
            await asyncio.sleep(delay_s)
        except BaseException:
            await close(client)
            raise
        else:
            break
    return client


async def _end_fetching(client: Any) -> None:
    """End what fetches for a consumer, before it leaves its group: while it lets go of partitions it would swallow the
    one cancellation that aiokafka gives it, go on, and never end."""
    fetching: asyncio.Task[None] | None = getattr(getattr(client, "_fetcher", None), "_fetch_task", None)
    for _ in range(_CANCELLATIONS):
        if fetching is None or fetching.done():
            return
        fetching.cancel()
        await asyncio.wait((fetching,), timeout=_CLOSE_S / _CANCELLATIONS)


async def close(client: Any) -> None:
    """Stop a client, but not for ever: one whose brokers are away waits for them. No connection of it stays open."""
    await _end_fetching(client)
    stopping = asyncio.ensure_future((client.stop if hasattr(client, "stop") else client.close)())
    try:
        await asyncio.wait((stopping,), timeout=_CLOSE_S)
    finally:
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and stopping.exception() is not None:
            log.warning("not closed in good order: %s", stopping.exception())
        if isinstance(client, AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient):
            opening.close(client.client if isinstance(client, AIOKafkaProducer) else client._client)  # noqa: SLF001


class OffsetClient:
    """Asks where logs begin and end, and where a time is in them. Raises KafkaError if the broker does not answer.

    It has a connection of its own: a broker answers the requests of a connection one after the other, and behind a
    fetch that waits for records each of these would wait too. Where a log ends is its last stable offset: what comes
    after it is of transactions that are still open, and can't be read yet.
    """

    def __init__(self, connection: Connection, *, client_id: str) -> None:
        self._connection, self._client_id = connection, client_id
        self._consumer: Any = None

    async def connect(self) -> None:
        """Connect, for as long as that takes; cancel to give up."""
        self._consumer = await connect_consumer(self._connection, client_id=f"{self._client_id}-offsets", **_NO_GROUP)

    async def close(self) -> None:
        """Let go of the connection."""
        if self._consumer is not None:
            await close(self._consumer)

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The first offset of each partition."""
        return await beginnings(self._connection, self._consumer, tps)

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last one of each partition that can be read."""
        return await ends(self._connection, self._consumer, tps)

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time; None: there is none, or the broker can't tell."""
        return await offsets_at(self._connection, self._consumer, times_ms)

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time in ms of the last record up to each offset, or of the next one; None: none could be read.

        At the offset itself may be what no reader is given, such as the end of a transaction, so the records shortly
        before it are read as well, by a consumer that lives no longer than this.
        """
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        waiting = {to_kafka(self._connection, tp): offset for tp, offset in offsets.items()}
        client_id = f"{self._client_id}-peek"
        options = {"client_id": client_id, "max_partition_fetch_bytes": _PEEK_BYTES, **_NO_GROUP}
        peeking = await connect_consumer(self._connection, **options)
        try:
            peeking.assign(list(waiting))
            for tp, offset in waiting.items():
                peeking.seek(tp, max(0, offset - _PEEK_BACK))
            for _ in range(_PEEKS):
                if not waiting:
                    break
                for tp, records in (await peeking.getmany(*waiting, timeout_ms=1000)).items():
                    known = from_kafka(self._connection, tp)
                    for record in records:
                        if record.offset <= waiting[tp] or times[known] is None:
                            times[known] = record.timestamp
                for tp in [tp for tp, offset in waiting.items() if await peeking.position(tp) > offset]:
                    del waiting[tp]
                    peeking.pause(tp)
        finally:
            await close(peeking)
        return times


async def beginnings(connection: Connection, consumer: Any, tps: Sequence[Partition]) -> dict[Partition, int]:
    """What a client says is the first offset of each partition."""
    found = await consumer.beginning_offsets([to_kafka(connection, tp) for tp in tps]) if tps else {}
    return {from_kafka(connection, tp): offset for tp, offset in found.items()}


async def ends(connection: Connection, consumer: Any, tps: Sequence[Partition]) -> dict[Partition, int]:
    """What a client says is the offset after the last one of each partition that can be read."""
    found = await consumer.end_offsets([to_kafka(connection, tp) for tp in tps]) if tps else {}
    return {from_kafka(connection, tp): offset for tp, offset in found.items()}


async def offsets_at(
    connection: Connection, consumer: Any, times_ms: Mapping[Partition, int]
) -> Mapping[Partition, int | None]:
    """What a client says is the first offset at or after a time; None: there is none, or the broker can't tell."""
    found = await consumer.offsets_for_times({to_kafka(connection, tp): at for tp, at in times_ms.items()})
    return {from_kafka(connection, tp): at.offset if at is not None else None for tp, at in found.items()}


def to_kafka(connection: Connection, tp: Partition) -> TopicPartition:
    """A partition as the client knows it."""
    return TopicPartition(connection.prefixed(tp.topic), tp.partition)


def from_kafka(connection: Connection, tp: TopicPartition) -> Partition:
    """A partition that a client names, as the contract calls it."""
    return Partition(connection.unprefixed(tp.topic), tp.partition)
