"""aiokafka's clients, patched so that they never create a topic: make, start and close them with these functions.

A client requests metadata of its topics by name. A broker with ``auto.create.topics.enable``, which is Kafka's default,
creates a topic that is requested, with the broker's own number of partitions and settings. Only the request itself can
forbid that, and aiokafka has no option for it. So the request is replaced in every module that makes one, for the whole
process.

While a partition has no leader, aiokafka requests metadata again as soon as it has the answer, or none. While a broker
refuses to give records, it fetches again at once. So a client waits after each of these.

aiokafka may drop a connection that the broker has ended without closing it, and then its descriptor stays open until
the garbage collector finds it. So such a connection is closed before.

An answer to OffsetFetch may have an error of the whole group, such as that the broker is not its coordinator any more,
and then it has no partitions. aiokafka ignores that error, and would take the answer for "there are no commits".

A producer compresses at zstd's level 1, for which aiokafka has no option: our records become no larger than at level 3,
in 0.8 of the time.

Source: Kafka's protocol, Metadata from version 4 on (``allow_auto_topic_creation``).
"""

import asyncio
import itertools
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import aiokafka.admin.client
import aiokafka.client
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.codec import zstd_encode
from aiokafka.conn import CloseReason
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    NotCoordinatorForGroupError,
    RequestTimedOutError,
    StaleMetadata,
    for_code,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from delivery import opening
from delivery.connection import Connection
from delivery.kafka_errors import describe
from delivery.ledger import Partition

log = logging.getLogger(__name__)

SILENCE = (KafkaConnectionError, NodeNotReadyError, RequestTimedOutError, StaleMetadata, OSError, TimeoutError)
"""What the client raises if no broker answers."""

_OFFSETS_RETRY_S = 0.5
_OTHER_COORDINATOR = (GroupCoordinatorNotAvailableError.errno, NotCoordinatorForGroupError.errno)
_CLOSE_TIMEOUT_S = 2.0
_CANCELLATIONS = 20
_LOG_AGAIN_S = 60.0
_PEEK_POLLS = 10
_PEEK_BACK_RECORDS = 8
_PEEK_BYTES = 256 << 10
_NO_GROUP: dict[str, Any] = {"group_id": None, "auto_offset_reset": "earliest"}


class _NoNewTopics(MetadataRequest):  # type: ignore[misc] # aiokafka has no types
    """A request for metadata that does not create a missing topic."""

    def __init__(self, topics: list[str] | None = None) -> None:
        super().__init__(topics, allow_auto_topic_creation=False)


for _module in (aiokafka.client, aiokafka.admin.client):
    _module.MetadataRequest = _NoNewTopics


_METADATA_RETRY_S = 0.1
_metadata_update: Callable[..., Awaitable[bool]] = AIOKafkaClient._metadata_update  # noqa: SLF001 - there is no option


async def _paced_metadata_update(client: AIOKafkaClient, cluster: Any, topics: Iterable[str] | None) -> bool:
    """aiokafka's own request for metadata, with a pause if there is none, or if it lacks a topic or a leader."""
    answered = await _metadata_update(client, cluster, topics)
    if not answered:
        await asyncio.sleep(_METADATA_RETRY_S)
    elif any(
        not (partitions := cluster.partitions_for_topic(topic))
        or cluster.available_partitions_for_topic(topic) != partitions
        for topic in topics or cluster.topics()
    ):
        await asyncio.sleep(client._retry_backoff)  # noqa: SLF001 - likewise
    return answered


AIOKafkaClient._metadata_update = _paced_metadata_update  # noqa: SLF001 - likewise
_send: Callable[..., Awaitable[Any]] = AIOKafkaClient.send


async def _paced_send(client: AIOKafkaClient, node_id: Any, request: Any, **options: Any) -> Any:
    """aiokafka's own request to a node, with a pause after a fetch for which a partition got an error."""
    response = await _send(client, node_id, request, **options)
    if request.API_KEY == FetchRequest.API_KEY and any(
        error_code for _, partitions in response.topics for _, error_code, *_ in partitions
    ):
        await asyncio.sleep(client._retry_backoff)  # noqa: SLF001 - likewise
    return response


AIOKafkaClient.send = _paced_send
_get_conn: Callable[..., Awaitable[Any]] = AIOKafkaClient._get_conn  # noqa: SLF001 - likewise


async def _get_open_conn(client: AIOKafkaClient, node_id: Any, **options: Any) -> Any:
    """aiokafka's own connection to a node; one that the broker has ended is closed before it is dropped."""
    cached = client._conns.get((node_id, options.get("group", ConnectionGroup.DEFAULT)))  # noqa: SLF001 - likewise
    if cached is not None and not cached.connected():
        cached.close(reason=CloseReason.CONNECTION_BROKEN)
    return await _get_conn(client, node_id, **options)


AIOKafkaClient._get_conn = _get_open_conn  # noqa: SLF001 - likewise


_send_to_coordinator: Callable[..., Awaitable[Any]] = GroupCoordinator._send_req  # noqa: SLF001 - likewise


async def _send_checked(coordinator: GroupCoordinator, request: Any) -> Any:
    """aiokafka's own request to a group's coordinator. Raises the group's error in an answer to OffsetFetch."""
    response = await _send_to_coordinator(coordinator, request)
    if response.API_KEY == OffsetFetchRequest.API_KEY and (code := getattr(response, "error_code", 0)):
        if code in _OTHER_COORDINATOR:
            coordinator.coordinator_dead()
        await asyncio.sleep(_OFFSETS_RETRY_S)  # aiokafka repeats the request of each partition after 0.1 s
        raise for_code(code)(coordinator.group_id)
    return response


GroupCoordinator._send_req = _send_checked  # noqa: SLF001 - likewise
_do_commit_offsets: Callable[..., Awaitable[None]] = GroupCoordinator._do_commit_offsets  # noqa: SLF001 - likewise


async def _commit_offsets(coordinator: GroupCoordinator, *args: Any) -> None:
    """aiokafka's own commit, in a task that goes on if its caller is cancelled: then nobody retrieves its error."""
    if (task := asyncio.current_task()) is not None:
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    await _do_commit_offsets(coordinator, *args)


GroupCoordinator._do_commit_offsets = _commit_offsets  # noqa: SLF001 - likewise


_ZSTD_LEVEL = 1
sys.modules[DefaultRecordBatchBuilder.__module__].zstd_encode = partial(  # type: ignore[attr-defined] # likewise
    zstd_encode, level=_ZSTD_LEVEL
)


def consumer(connection: Connection, *topics: str, **options: Any) -> AIOKafkaConsumer:
    """A consumer that is not started yet. It reads committed records only, and commits nothing by itself."""
    defaults = {"enable_auto_commit": False, "isolation_level": "read_committed"}
    return AIOKafkaConsumer(*topics, **_options(connection, defaults | options))


def producer(connection: Connection, **options: Any) -> AIOKafkaProducer:
    """A producer that is not started yet. It never gives up a batch, however long its partition has no leader.

    aiokafka would give up after ``request_timeout_ms``, even a batch that was stored and whose answer was lost. Only
    this producer can send such a batch again without a duplicate, by its sequence number.
    """
    compression = None if connection.compression == "none" else connection.compression
    client = AIOKafkaProducer(compression_type=compression, **_options(connection, options))
    client._message_accumulator._batch_ttl = math.inf  # noqa: SLF001 - there is no option
    return client


def admin(connection: Connection, **options: Any) -> AIOKafkaAdminClient:
    """An admin client that is not started yet."""
    return AIOKafkaAdminClient(**_options(connection, options))


def _options(connection: Connection, options: Mapping[str, Any]) -> dict[str, Any]:
    client_id = {"client_id": connection.client_id} if connection.client_id is not None else {}
    return {**opening.options(connection), **options, **client_id}


class LogThrottle:
    """Decides which messages are logged: a new one, and the same one again after a minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._logged_s: dict[str, float] = {}

    def is_due(self, message: str) -> bool:
        """Whether to log the message now; if so, it counts as logged."""
        now_s = self._now()
        if now_s - self._logged_s.get(message, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
            return False
        self._logged_s = {text: at_s for text, at_s in self._logged_s.items() if now_s - at_s < _LOG_AGAIN_S}
        self._logged_s[message] = now_s
        return True


def explain(error: BaseException, connection: Connection) -> str:
    """Why a request to Kafka failed, in a line."""
    if not isinstance(error, SILENCE):
        return f"Kafka at {connection}: {describe(error)}"
    return opening.trouble(connection) or (
        f"no Kafka broker answers at {connection} ({type(error).__name__}): is one up there, for clients?"
    )


def backoff(delays_s: Sequence[float]) -> Iterator[float]:
    """The delays to wait after each failure: these, and then the last of them for ever."""
    return itertools.chain(delays_s, itertools.repeat(delays_s[-1]))


async def connect_consumer(connection: Connection, **options: Any) -> Any:
    """Start a :func:`consumer`, for as long as that takes; cancel to give up."""
    return await start_client(lambda: consumer(connection, **options), connection)


async def start_client(make: Callable[[], Any], connection: Connection, backoff_s: Sequence[float] = (0.5,)) -> Any:
    """Start a client from ``make``, with a new one for each attempt, until a broker answers; cancel to give up."""
    throttle = LogThrottle()
    for delay_s in backoff(backoff_s):
        client = make()
        try:
            await client.start()
        except KafkaError as error:
            await close(client)
            if throttle.is_due(reason := explain(error, connection)):
                log.warning("%s; trying again", reason)
            await asyncio.sleep(delay_s)
        except BaseException:
            await close(client)
            raise
        else:
            break
    return client


async def close(client: Any) -> None:
    """Stop a client within two seconds, although it would wait for an unavailable broker, and close its connections."""
    # aiokafka cancels a consumer's fetch task only once. While the task lets go of partitions it swallows that, and
    # never ends. So cancel it until it ends, before the consumer leaves its group.
    fetch_task: asyncio.Task[None] | None = getattr(getattr(client, "_fetcher", None), "_fetch_task", None)
    for _ in range(_CANCELLATIONS):
        if fetch_task is None or fetch_task.done():
            break
        fetch_task.cancel()
        await asyncio.wait((fetch_task,), timeout=_CLOSE_TIMEOUT_S / _CANCELLATIONS)
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


class OffsetClient:
    """Looks up the first, the last and other offsets of logs. Raises KafkaError if the broker does not answer.

    It has a connection of its own: a broker answers the requests of a connection one after the other, so each of these
    would wait behind a fetch that waits for records. The end of a log is its last stable offset: later records are of
    open transactions, and can't be read yet.
    """

    def __init__(self, connection: Connection, *, client_id: str) -> None:
        self._connection, self._client_id = connection, client_id
        self._consumer: Any = None

    async def connect(self) -> None:
        """Connect, for as long as that takes; cancel to give up."""
        self._consumer = await connect_consumer(self._connection, client_id=f"{self._client_id}-offsets", **_NO_GROUP)

    async def close(self) -> None:
        """Close the connection."""
        if self._consumer is not None:
            await close(self._consumer)

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The first offset of each partition."""
        return await beginnings(self._connection, self._consumer, tps)

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last readable record of each partition."""
        return await ends(self._connection, self._consumer, tps)

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time in ms; None: there is none, or the broker can't tell."""
        return await offsets_at(self._connection, self._consumer, times_ms)

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time in ms of the last record up to each offset, else of the next one; None: none could be read.

        At the offset itself may be a marker that no reader gets, such as the end of a transaction. So a temporary
        consumer reads a few records before it as well.
        """
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        unread = {to_kafka(self._connection, tp): offset for tp, offset in offsets.items()}
        client_id = f"{self._client_id}-peek"
        options = {"client_id": client_id, "max_partition_fetch_bytes": _PEEK_BYTES, **_NO_GROUP}
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


async def beginnings(connection: Connection, consumer: Any, tps: Sequence[Partition]) -> dict[Partition, int]:
    """The first offset of each partition, by a consumer that is connected."""
    offsets = await consumer.beginning_offsets([to_kafka(connection, tp) for tp in tps]) if tps else {}
    return {from_kafka(connection, tp): offset for tp, offset in offsets.items()}


async def ends(connection: Connection, consumer: Any, tps: Sequence[Partition]) -> dict[Partition, int]:
    """The offset after the last readable record of each partition, by a consumer that is connected."""
    offsets = await consumer.end_offsets([to_kafka(connection, tp) for tp in tps]) if tps else {}
    return {from_kafka(connection, tp): offset for tp, offset in offsets.items()}


async def offsets_at(
    connection: Connection, consumer: Any, times_ms: Mapping[Partition, int]
) -> Mapping[Partition, int | None]:
    """The first offset at or after a time in ms; None: there is none, or the broker can't tell."""
    offsets = await consumer.offsets_for_times({to_kafka(connection, tp): time_ms for tp, time_ms in times_ms.items()})
    return {from_kafka(connection, tp): None if offset is None else offset.offset for tp, offset in offsets.items()}


def to_kafka(connection: Connection, tp: Partition) -> TopicPartition:
    """A partition under its topic's name in Kafka."""
    return TopicPartition(connection.prefixed(tp.topic), tp.partition)


def from_kafka(connection: Connection, tp: TopicPartition) -> Partition:
    """A partition of Kafka under its topic's name in the contract."""
    return Partition(connection.unprefixed(tp.topic), tp.partition)
