"""Makes, starts and closes aiokafka's clients, as :mod:`delivery.aiokafka_patches` changes them.

In: a connection. Out: consumers, producers and admin clients, of which none creates a topic.
On failure: a client is tried again for as long as no broker answers.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    RequestTimedOutError,
    StaleMetadata,
    TransactionalIdAuthorizationFailed,
    for_code,
)

from delivery import aiokafka_patches as aiokafka_patches  # for what it changes in aiokafka
from delivery import opening
from delivery.connection import Connection
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.log_throttle import LogThrottle
from delivery.quotas import QUOTAS

log = logging.getLogger(__name__)

SILENCE = (KafkaConnectionError, NodeNotReadyError, RequestTimedOutError, StaleMetadata, OSError, TimeoutError)
"""What the client raises if no broker answers."""

_CLOSE_TIMEOUT_S = 2.0
_CANCELLATIONS = 20
_PEEK_POLLS = 10
_PEEK_BACK_RECORDS = 8
_PEEK_BYTES = 256 << 10
_NO_GROUP: dict[str, Any] = {"group_id": None, "auto_offset_reset": "earliest"}


def consumer(connection: Connection, *topics: str, **options: Any) -> AIOKafkaConsumer:
    """A consumer that is not started yet. It reads committed records only, and commits nothing by itself."""
    defaults = {"enable_auto_commit": False, "isolation_level": "read_committed"}
    return AIOKafkaConsumer(*topics, **_options(connection, defaults | options))


def producer(connection: Connection, **options: Any) -> AIOKafkaProducer:
    """A producer that is not started yet. It never gives up a batch, however long its partition has no leader.

    aiokafka would give up after ``request_timeout_ms``, even a batch that was stored and whose answer was lost. Only
    this producer can send such a batch again without a duplicate, by its sequence number. For room for another record
    of that partition it would wait as long, and then raise an error, for which all its partitions would have to wait.
    """
    compression = None if connection.compression == "none" else connection.compression
    client = AIOKafkaProducer(compression_type=compression, **_options(connection, options))
    client._message_accumulator._batch_ttl = math.inf  # noqa: SLF001 - there is no option
    client._request_timeout_ms = math.inf  # noqa: SLF001 - likewise; its other parts have their own
    return client


def refusal(producer: Any, topic: str) -> str | None:
    """Why Kafka does not store records of a topic now, as far as it says; None if it does, or says nothing."""
    client, cluster = producer.client, producer.client.cluster
    for (name, number), code in getattr(client, "refused", {}).items():
        if name == topic:
            return f"{topic} partition {number}: {describe(for_code(code)())}"
    partitions = cluster.partitions_for_topic(topic) or set()
    if leaderless := partitions.difference(cluster.available_partitions_for_topic(topic) or ()):
        return f"{topic} partition {min(leaderless)} has no leader: `gpustream doctor` says more"
    return None


def admin(connection: Connection, **options: Any) -> AIOKafkaAdminClient:
    """An admin client that is not started yet."""
    return AIOKafkaAdminClient(**_options(connection, options))


def _options(connection: Connection, options: Mapping[str, Any]) -> dict[str, Any]:
    client_id = {"client_id": connection.client_id} if connection.client_id is not None else {}
    return {**opening.options(connection), **options, **client_id}


def explain(error: BaseException, connection: Connection) -> str:
    """Why a request to Kafka failed, in a line."""
    if not isinstance(error, SILENCE):
        return f"Kafka at {connection}: {describe(error)}"
    return opening.trouble(connection) or (
        f"no Kafka broker answers at {connection} ({type(error).__name__}):"
        f" {QUOTAS.problem() or 'is one up there, for clients?'}"
    )


def backoff(delays_s: Sequence[float]) -> Iterator[float]:
    """The delays to wait after each failure: these, and then the last of them for ever."""
    return itertools.chain(delays_s, itertools.repeat(delays_s[-1]))


async def connect_consumer(connection: Connection, *, within_s: float | None = None, **options: Any) -> Any:
    """Start a :func:`consumer`, for as long as that takes; cancel to give up. Raises KafkaConnectionError if no broker
    has answered after ``within_s``."""
    try:
        async with asyncio.timeout(within_s) as limit:
            return await start_client(lambda: consumer(connection, **options), connection)
    except TimeoutError:
        if not limit.expired():
            raise
        raise KafkaConnectionError(f"no answer within {within_s:.0f} s") from None


async def start_client(make: Callable[[], Any], connection: Connection, backoff_s: Sequence[float] = (0.5,)) -> Any:
    """Start a client from ``make``, with a new one for each attempt, until a broker answers; cancel to give up.

    Raises TransactionalIdAuthorizationFailed if it may not use its transactional id.
    """
    throttle = LogThrottle()
    for delay_s in backoff(backoff_s):
        client = make()
        try:
            await client.start()
            break
        except BaseException as error:
            await close(client)
            if not isinstance(error, KafkaError) or isinstance(error, TransactionalIdAuthorizationFailed):
                raise
            if throttle.is_due(reason := explain(error, connection)):
                log.warning("%s; trying again", reason)
            await asyncio.sleep(delay_s)
    return client


async def close(client: Any) -> None:
    """Stop a client within four seconds, although it would wait for an unavailable broker, and close its connections.
    None: there is no client yet. If this is cancelled once, the client is stopped nevertheless."""
    if client is None:
        return
    try:
        # aiokafka cancels its fetch task only once: while that lets go of partitions it swallows it, and never ends
        fetch_task: asyncio.Task[None] | None = getattr(getattr(client, "_fetcher", None), "_fetch_task", None)
        for _ in range(_CANCELLATIONS):
            if fetch_task is None or fetch_task.done():
                break
            fetch_task.cancel()
            await asyncio.wait((fetch_task,), timeout=_CLOSE_TIMEOUT_S / _CANCELLATIONS)
    finally:
        stopping = asyncio.ensure_future((client.stop if hasattr(client, "stop") else client.close)())
        try:
            await asyncio.wait((stopping,), timeout=_CLOSE_TIMEOUT_S)
        finally:
            if not stopping.done():
                stopping.cancel()
            elif not stopping.cancelled() and stopping.exception() is not None:
                log.warning("not closed in good order: %s", stopping.exception())
            if isinstance(client, AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient):
                opening.close(client.client if isinstance(client, AIOKafkaProducer) else client._client)  # noqa: SLF001


class Offsets:
    """The offsets of logs, by a consumer that is connected. Raises KafkaError if the broker does not answer."""

    def __init__(self, connection: Connection, consumer: Any) -> None:
        self._connection, self._consumer = connection, consumer

    async def beginnings(self, tps: list[Partition]) -> dict[Partition, int]:
        """The first offset of each partition."""
        offsets = await self._consumer.beginning_offsets([to_kafka(self._connection, tp) for tp in tps]) if tps else {}
        return {from_kafka(self._connection, tp): offset for tp, offset in offsets.items()}

    async def ends(self, tps: list[Partition]) -> dict[Partition, int]:
        """The offset after the last readable record of each partition."""
        offsets = await self._consumer.end_offsets([to_kafka(self._connection, tp) for tp in tps]) if tps else {}
        return {from_kafka(self._connection, tp): offset for tp, offset in offsets.items()}

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time in ms; None: there is none, or the broker can't tell."""
        times_by_tp = {to_kafka(self._connection, tp): time_ms for tp, time_ms in times_ms.items()}
        found = (await self._consumer.offsets_for_times(times_by_tp)).items()
        return {from_kafka(self._connection, tp): None if at is None else at.offset for tp, at in found}


class OffsetClient(Offsets):
    """Looks up offsets and log times.

    It has a connection of its own: a broker answers the requests of a connection one after the other, so each of these
    would wait behind a fetch that waits for records. The end of a log is its last stable offset: later records are of
    open transactions, and can't be read yet. With ``read_uncommitted`` they count, too.

    It connects for as long as that takes, or ``connect_within_s``: then it raises KafkaConnectionError.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        client_id: str,
        isolation_level: str = "read_committed",
        connect_within_s: float | None = None,
    ) -> None:
        super().__init__(connection, consumer=None)
        self._client_id = client_id
        self._options = {**_NO_GROUP, "isolation_level": isolation_level, "within_s": connect_within_s}

    async def connect(self) -> None:
        """Connect; cancel to give up."""
        self._consumer = await connect_consumer(
            self._connection, client_id=f"{self._client_id}-offsets", **self._options
        )

    async def close(self) -> None:
        """Close the connection, if there is one."""
        await close(self._consumer)

    async def log_ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last record of each partition, even if an open transaction hides it."""
        options = {**self._options, "isolation_level": "read_uncommitted"}
        consumer = await connect_consumer(self._connection, client_id=f"{self._client_id}-peek", **options)
        try:
            return await Offsets(self._connection, consumer).ends(tps)
        finally:
            await close(consumer)

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time in ms of the last record up to each offset, else of the next one; None: none could be read.

        At the offset itself may be a marker that no reader gets, such as the end of a transaction. So a temporary
        consumer reads a few records before it as well.
        """
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        unread = {to_kafka(self._connection, tp): offset for tp, offset in offsets.items()}
        client_id = f"{self._client_id}-peek"
        options = {"client_id": client_id, "max_partition_fetch_bytes": _PEEK_BYTES, **self._options}
        consumer = await connect_consumer(self._connection, **options)
        try:
            consumer.assign(list(unread))
            for tp, offset in unread.items():
                consumer.seek(tp, max(0, offset - _PEEK_BACK_RECORDS))
            for _ in range(_PEEK_POLLS):
                if not unread:
                    break
                for tp, records in (await consumer.getmany(*unread, timeout_ms=1000)).items():
                    partition = from_kafka(self._connection, tp)
                    for record in records:
                        if record.offset <= unread[tp] or times[partition] is None:
                            times[partition] = record.timestamp
                for tp in [tp for tp, offset in unread.items() if await consumer.position(tp) > offset]:
                    del unread[tp]
                    consumer.pause(tp)
        finally:
            await close(consumer)
        return times


def to_kafka(connection: Connection, tp: Partition) -> TopicPartition:
    """A partition under its topic's name in Kafka."""
    return TopicPartition(connection.prefixed(tp.topic), tp.partition)


def from_kafka(connection: Connection, tp: TopicPartition) -> Partition:
    """A partition of Kafka under its topic's name in the contract."""
    return Partition(connection.unprefixed(tp.topic), tp.partition)
