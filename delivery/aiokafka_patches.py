"""Changes aiokafka, for the whole process, where it has no option. It is enough to import this module.

A client requests metadata of its topics by name. A broker with ``auto.create.topics.enable``, which is Kafka's default,
creates a topic that is requested, with the broker's own number of partitions and settings. Only the request itself can
forbid that. So the request is replaced in every module that makes one.

While a partition has no leader, aiokafka requests metadata again as soon as it has the answer, or none. While a broker
refuses to give records, it fetches again at once. So a client waits after each of these.

A broker that holds a client up by a quota says so in its answers, and aiokafka does not look at that. So it is noted.
While a broker does not store a batch, aiokafka tries again, and tells nobody why. So a client has ``refused``: the code
of the error by topic and partition number.

aiokafka may drop a connection that the broker has ended, and not close it. Then its descriptor stays open until the
garbage collector finds it. So such a connection is closed before.

An answer to OffsetFetch may have an error of the whole group, such as that the broker is not its coordinator any more,
and then it has no partitions. aiokafka ignores that error, and would take the answer for "there are no commits".

The name of a record's header may be any bytes, and aiokafka raises an error if they are not UTF-8: one such record
would end each of its readers, again and again. So a fetch with such a name is read again, with what is no UTF-8
replaced.

A few kilobytes may unpack to gigabytes: one such batch would end each of its readers, too, for lack of memory. So no
batch is unpacked further than ``MAX_UNPACKED_BYTES``; a single malformed record takes the place of one that is larger.

A producer compresses at zstd's level 1: our records become no larger than at level 3, in 0.8 of the time.

In another release of aiokafka, what is changed here may be different. Then the import of this module raises
ImportError, because a change without effect would show only by topics that nobody made, or by records that are lost.

Source: Kafka's protocol, Metadata from version 4 on (``allow_auto_topic_creation``).
"""

import asyncio
import inspect
import mmap
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import aiokafka
import aiokafka.admin.client
import aiokafka.client
import aiokafka.consumer.fetcher
import aiokafka.record.default_records
import cramjam
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.codec import zstd_encode
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import Fetcher, MemoryRecords, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import GroupCoordinatorNotAvailableError, NotCoordinatorForGroupError, for_code
from aiokafka.producer.message_accumulator import MessageAccumulator
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder, _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy
from aiokafka.structs import ConsumerRecord

from delivery.quotas import QUOTAS

MAX_UNPACKED_BYTES = 32 << 20
"""Four times the largest batch that a producer of ours makes."""

_OFFSETS_RETRY_S = 0.5
_OTHER_COORDINATOR = (GroupCoordinatorNotAvailableError.errno, NotCoordinatorForGroupError.errno)
_BATCHES: Any = sys.modules[DefaultRecordBatchBuilder.__module__]  # compiled, or in Python

_CHANGED: tuple[tuple[Any, str, str], ...] = (
    (aiokafka.client, "MetadataRequest", "topics, allow_auto_topic_creation"),
    (aiokafka.admin.client, "MetadataRequest", "topics, allow_auto_topic_creation"),
    (AIOKafkaClient, "_metadata_update", "self, cluster_metadata, topics"),
    (AIOKafkaClient, "send", "self, node_id, request, group"),
    (AIOKafkaClient, "_get_conn", "self, node_id, group, no_hint"),
    (GroupCoordinator, "_send_req", "self, request"),
    (GroupCoordinator, "_do_commit_offsets", "self, assignment, offsets"),
    (_BATCHES, "zstd_encode", "payload, level"),
    (_BATCHES, "gzip_decode", "payload"),
    (_BATCHES, "lz4_decode", "payload"),
    (_BATCHES, "zstd_decode", "payload"),
    (PartitionRecords, "_unpack_records", "self"),
    (_MemoryRecordsPy, "next_batch", "self, _min_slice, _magic_offset"),
    (_DefaultRecordBatchPy, "_maybe_uncompress", "self"),
)
"""What is replaced or extended below: where it is, its name, and its parameters."""

_SET = (
    (MessageAccumulator, "_batch_ttl"),
    (aiokafka.AIOKafkaProducer, "_request_timeout_ms"),
    (Fetcher, "_fetch_min_bytes"),
    (GroupCoordinator, "_group_instance_id"),
    (PartitionRecords, "_records"),
    (PartitionRecords, "_aborted_transactions"),
    (PartitionRecords, "_aborted_producers"),
    (_MemoryRecordsPy, "_next_slice"),
    (_DefaultRecordBatchPy, "_buffer"),
)
"""Private attributes that this module, :mod:`delivery.clients` and :mod:`delivery.group` read or set."""

_missing = [
    f"{owner.__name__}.{name}({parameters})"
    for owner, name, parameters in _CHANGED
    if not hasattr(owner, name) or ", ".join(inspect.signature(getattr(owner, name)).parameters) != parameters
] + [f"{owner.__name__}.{name}" for owner, name in _SET if name not in owner.__init__.__code__.co_names]
if _missing:
    raise ImportError(
        f"aiokafka {aiokafka.__version__} does not have {' and '.join(_missing)}, which gpustream changes:"
        " aiokafka 0.14.0 is the one to install"
    )


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
    """aiokafka's own request to a node. Notes what is refused; after a fetch with an error of a partition it pauses."""
    response = await _send(client, node_id, request, **options)
    delay_ms: int = getattr(response, "throttle_time_ms", 0)  # the oldest versions of some answers lack it
    QUOTAS.note(client._client_id, type(request).__name__, delay_ms / 1000)  # noqa: SLF001 - likewise
    if request.API_KEY == ProduceRequest.API_KEY:
        codes = {(topic, number): code for topic, partitions in response.topics for number, code, *_ in partitions}
        client.refused = {tp: code for tp, code in (getattr(client, "refused", {}) | codes).items() if code}
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
_log_of_shield: Callable[[asyncio.Task[Any]], None] | None = getattr(asyncio.tasks, "_log_on_exception", None)
"""In Python 3.14 and later: what ``asyncio.shield`` has a task do at its end if the caller was cancelled."""


async def _commit_offsets(coordinator: GroupCoordinator, *args: Any) -> None:
    """aiokafka's own commit, in a task that goes on if its caller is cancelled: then nobody needs its error."""
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    try:
        await _do_commit_offsets(coordinator, *args)
    finally:
        if task is not None and _log_of_shield is not None:
            task.remove_done_callback(_log_of_shield)


GroupCoordinator._do_commit_offsets = _commit_offsets  # noqa: SLF001 - likewise


_ZSTD_LEVEL = 1
_BATCHES.zstd_encode = partial(zstd_encode, level=_ZSTD_LEVEL)


class _BatchTooLarge(Exception):
    """A batch does not fit into the room for what is unpacked."""


_room = mmap.mmap(-1, MAX_UNPACKED_BYTES)  # it takes no more memory than the largest batch needed
_room_lock = threading.Lock()


def _bounded(unpack_into: Callable[[Any, Any], int]) -> Callable[[Any], bytes]:
    """A decode function of aiokafka that raises :class:`_BatchTooLarge`. ``unpack_into`` is cramjam's."""

    def decode(payload: Any) -> bytes:
        with _room_lock:
            try:
                return _room[: unpack_into(payload, _room)]
            except cramjam.DecompressionError as error:
                if "whole buffer" in str(error):
                    raise _BatchTooLarge from None
                raise

    return decode


for _module in (_BATCHES, aiokafka.record.default_records):
    _module.gzip_decode = _bounded(cramjam.gzip.decompress_into)
    _module.lz4_decode = _bounded(cramjam.lz4.decompress_into)
    _module.zstd_decode = _bounded(cramjam.zstd.decompress_into)
# snappy's blocks say how large they are, and become 21 times as large at most


class _NamesInUtf8(bytearray):
    """The content of a batch. What is decoded of it, the names of headers, is UTF-8 with replacements."""

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return _NamesInUtf8(item) if isinstance(index, slice) else item

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, errors)


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc] # likewise
    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer: bytearray = _NamesInUtf8(self._buffer)


class _LenientRecords(_MemoryRecordsPy):  # type: ignore[misc] # likewise
    def next_batch(self, *args: Any) -> Any:
        content, self.batch = self._next_slice, super().next_batch(*args)
        if isinstance(self.batch, DefaultRecordBatch):
            self.batch = _LenientBatch(content)
        return self.batch


class _KeptRecords:
    """What was fetched of a partition: aiokafka's own records, their bytes, and the last ``batch`` that was read."""

    def __init__(self, bytes_data: bytes) -> None:
        self._records, self.content = MemoryRecords(bytes_data), bytes_data
        self.has_next, self.size_in_bytes = self._records.has_next, self._records.size_in_bytes

    def next_batch(self) -> Any:
        self.batch = self._records.next_batch()
        return self.batch


_unpack_records: Callable[..., Iterator[Any]] = PartitionRecords._unpack_records  # noqa: SLF001 - likewise


def _unpack_bounded_records(partition: Any) -> Iterator[Any]:
    """aiokafka's own iterator over what was fetched; instead of a batch that is too large, a record that says so."""
    while True:
        try:
            yield from _unpack_records(partition)
        except _BatchTooLarge:
            batch, tp = partition._records.batch, partition._tp  # noqa: SLF001 - likewise
            last = batch.next_offset - 1
            text = f"offsets {batch.base_offset} to {last}: more than {MAX_UNPACKED_BYTES} bytes when they are unpacked"
            when, value = (batch.max_timestamp, batch.timestamp_type), text.encode()
            partition.next_fetch_offset = batch.next_offset
            yield ConsumerRecord(tp.topic, tp.partition, last, *when, None, value, None, -1, len(value), ())
        else:
            return


def _unpack_all_records(partition: Any) -> Iterator[Any]:
    """As :func:`_unpack_bounded_records`. If the name of a header is no UTF-8, it goes on with another iterator."""
    aborted = partition._aborted_transactions.copy()  # noqa: SLF001 - likewise
    try:
        yield from _unpack_bounded_records(partition)
    except UnicodeDecodeError:
        next_offset = partition.next_fetch_offset
        partition._records = _LenientRecords(partition._records.content)  # noqa: SLF001 - likewise
        partition._aborted_transactions, partition._aborted_producers = aborted, set()  # noqa: SLF001 - likewise
        yield from (record for record in _unpack_bounded_records(partition) if record.offset >= next_offset)


aiokafka.consumer.fetcher.MemoryRecords = _KeptRecords
PartitionRecords._unpack_records = _unpack_all_records  # noqa: SLF001 - likewise
