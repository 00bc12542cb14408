"""Sends records to Kafka: each once, in order, acknowledged by every replica in sync.

In: a topic, a value, and a key or a partition. Out: a future of the record's offset.
State: the records that were sent and are not acknowledged yet, in order; and how this clock differs from the brokers'.
On failure: the sender waits for an unavailable broker for as long as it takes. A record that the broker refuses breaks
an idempotent producer: every later record of its partition is out of sequence. So the producer is replaced, and what it
had not delivered is sent again one record at a time. A record that is refused even alone is ``Unsendable``.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from aiokafka.errors import (
    CorruptRecordException,
    InvalidMessageError,
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    UnknownError,
)
from aiokafka.partitioner import murmur2

from delivery import opening
from delivery.clients import backoff, close, producer, refusal, start_client
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.kafka_errors import InvalidRecordError, describe
from delivery.log_throttle import LogThrottle
from delivery.quotas import QUOTAS
from delivery.topic_admin import TopicCheck
from topics.topic import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes]]

RECORD_OVERHEAD_BYTES = 200
"""An upper limit of what a batch of one record adds to its key, value and headers."""

_REFUSALS = (
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    InvalidTimestampError,
    InvalidMessageError,
    CorruptRecordException,
    PolicyViolationError,
    InvalidRecordError,
)
_UNEXPECTED_ERROR_TRIES = 60
"""After so many unexpected errors, which take five minutes, a record counts as refused. A broker gives such an error
for its own failures, which pass. But if the record is the cause, nothing after it would ever be sent."""

_INVALID_RECORD = (AssertionError, TypeError, ValueError)
"""What the client raises for a record that it can't encode, or whose partition does not exist."""

_RETRY_BACKOFF_MS = 500
"""With the client's own 100 ms, a node's producer used half of its CPU time on retries while no broker answered."""

UNREADY_AFTER_S = 30.0  # a component whose records have waited for longer is not ready

_LOG_APPEND_TIME = 1  # the broker's clock gave the record its time
_FIRST_CLOCK_MS = 1_577_836_800_000  # 2020; an earlier time is no clock's: the broker of `gpustream run` says 1234 ms
_WRONG_CLOCK_MS = 60_000  # usage counts no tick that is further ahead of its log time

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_CANCEL_TIMEOUT_S = 2.0


class Unsendable(Exception):
    """The record can never be sent: it is too large, or the broker refused it even alone. Drop or dead-letter it."""


class _PendingRecord:
    """A record that is not acknowledged yet.

    ``sent`` is the client's future, once the client has taken the record; ``acknowledged`` is the caller's.
    ``since_s`` is when the caller sent it.
    """

    __slots__ = ("acknowledged", "arguments", "sent", "since_s")

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.sent: asyncio.Future[Any] | None = None
        loop = asyncio.get_running_loop()
        self.acknowledged: asyncio.Future[int] = loop.create_future()
        self.since_s = loop.time()


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, of so many: by its murmur2 hash, as in Kafka's Java clients."""
    key_hash: int = murmur2(key)
    return (key_hash & 0x7FFFFFFF) % partitions


class Sender:
    """An idempotent producer that outlives refused records and broker outages.

    Records of a partition are stored in the order in which they were sent. If a record has a key and no partition, the
    key's murmur2 hash picks the partition, as in Kafka's Java client. Nothing is sent before ``check`` has passed. A
    partition has one batch in flight: of at most ``max_batch_bytes`` before compression, or of one record.

    ``ahead_ms``: by how much this clock is at least ahead of the brokers', or behind if it is negative, as the last
    acknowledgement shows it; None before the first.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        client_id: str,
        check: TopicCheck | None = None,
        max_batch_bytes: int = 512 * 1024,
    ) -> None:
        self._connection, self._check = connection, check
        self._options: dict[str, Any] = {
            "client_id": client_id,
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": 20,
            "max_batch_size": max_batch_bytes,
            "max_request_size": 2 * MAX_MESSAGE_BYTES,
            "request_timeout_ms": 30_000,
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
        }
        self._producer: Any = None
        self._unacknowledged: dict[_PendingRecord, None] = {}
        self._accepting = asyncio.Event()
        self._sends_in_progress = 0
        self._recovery: asyncio.Task[None] | None = None
        self._stopped = False
        self._last_error: str | None = None
        self.ahead_ms: int | None = None
        self._throttle = LogThrottle()  # each record of a kind may be refused

    async def start(self) -> None:
        """Wait until the topics may be used and connect, for as long as that takes; cancel to give up."""
        if self._check is not None:
            await self._check.wait(asyncio.Event())
        await self._replace_producer()
        self._accepting.set()

    def not_ready(self) -> list[str]:
        """The reasons why nothing is sent; empty if it has started and records are acknowledged."""
        check = self._check.not_ready() if self._check is not None else []
        no_answer = [] if self._producer is not None else [f"no Kafka broker has answered at {self._connection} yet"]
        problem = opening.trouble(self._connection) or self._last_error
        return check or ([problem] if problem is not None else no_answer)

    def waited_s(self) -> float:
        """How long the oldest record that is not acknowledged has waited, in seconds; 0 if there is none."""
        oldest = next(iter(self._unacknowledged), None)
        return asyncio.get_running_loop().time() - oldest.since_s if oldest is not None else 0.0

    def refusal(self) -> str | None:
        """Why Kafka does not take the oldest record that waits, as far as it says; None if it says nothing of that."""
        oldest = next(iter(self._unacknowledged), None)
        return None if oldest is None else refusal(self._producer, oldest.arguments["topic"])

    async def ready(self) -> None:
        """Wait until new records are accepted: a broker has answered, and no records are being sent again."""
        await self._accepting.wait()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        """Send a record; waits until the client's buffer has room.

        The future gives the record's offset once it is acknowledged, or raises Unsendable; if the sender is stopped
        before, it is cancelled. A record without a value deletes its key from a compacted topic.
        """
        topic = self._connection.prefixed(topic)
        record = _PendingRecord(topic=topic, value=value, key=key, partition=partition, headers=headers)
        headers_size = sum(len(name) + len(text) + 10 for name, text in headers)
        size = len(value or b"") + len(key or b"") + headers_size + RECORD_OVERHEAD_BYTES
        if size > MAX_MESSAGE_BYTES:
            record.acknowledged.set_exception(Unsendable(f"{size} bytes, and a record may have {MAX_MESSAGE_BYTES}"))
            return record.acknowledged
        await self._accepting.wait()
        if self._stopped:
            record.acknowledged.cancel()
            return record.acknowledged
        self._unacknowledged[record] = None
        self._sends_in_progress += 1
        try:
            record.sent = await self._producer.send(**record.arguments)
            record.sent.add_done_callback(lambda sent: self._on_sent(record, sent))
        except asyncio.CancelledError:
            self._unacknowledged.pop(record, None)
            raise
        except KafkaError as error:
            self._start_recovery(record, error)
        except _INVALID_RECORD as error:
            self._resolve(record, Unsendable(describe(error)))
        finally:
            self._sends_in_progress -= 1
        return record.acknowledged

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything that was sent is acknowledged, also what is sent meanwhile, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while pending := [r.acknowledged for r in self._unacknowledged if not r.acknowledged.done()]:
                    await asyncio.wait(pending)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Flush for at most ``timeout_s``, then close the connections and cancel what is still unacknowledged."""
        await self.flush(timeout_s)
        self._stopped = True
        self._accepting.set()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery], timeout=_CANCEL_TIMEOUT_S)
        for record in self._unacknowledged:
            record.acknowledged.cancel()
        self._unacknowledged.clear()
        await close(self._producer)
        self._producer = None

    def _on_sent(self, record: _PendingRecord, sent: "asyncio.Future[Any]") -> None:
        """Handle the client's answer; it no longer matters if the record was resolved before."""
        error = asyncio.CancelledError() if sent.cancelled() else sent.exception()
        if record not in self._unacknowledged:
            return
        if error is not None:
            self._start_recovery(record, error)
        else:
            metadata = sent.result()
            self._compare_clocks(record, metadata)
            self._resolve(record, metadata.offset)

    def _compare_clocks(self, record: _PendingRecord, metadata: Any) -> None:
        """Note how this clock differs from the broker's, which gave the record its time between sending and now."""
        self.ahead_ms = 0
        if metadata.timestamp_type == _LOG_APPEND_TIME and metadata.timestamp >= _FIRST_CLOCK_MS:
            waited_ms = round((asyncio.get_running_loop().time() - record.since_s) * 1000)
            most_ms = now_ms() - metadata.timestamp
            self.ahead_ms = max(most_ms - waited_ms, min(most_ms, 0))
        if abs(self.ahead_ms) > _WRONG_CLOCK_MS and self._throttle.is_due("clock"):
            differs = f"{abs(self.ahead_ms) // 1000} s {'ahead of' if self.ahead_ms > 0 else 'behind'}"
            log.warning("%s: the clock here is %s the brokers' clock", record.arguments["topic"], differs)

    def _resolve(self, record: _PendingRecord, outcome: int | Unsendable) -> None:
        self._unacknowledged.pop(record, None)
        if not isinstance(outcome, Unsendable):
            self._last_error = None
        if record.acknowledged.done():  # the caller did not wait for it
            return
        if isinstance(outcome, Unsendable):
            record.acknowledged.set_exception(outcome)
        else:
            record.acknowledged.set_result(outcome)

    def _start_recovery(self, record: _PendingRecord, error: BaseException) -> None:
        if self._stopped:
            record.acknowledged.cancel()
        if self._stopped or self._recovery is not None:
            return
        topic, reason = record.arguments["topic"], describe(error)
        if self._throttle.is_due((topic, reason)):
            log.warning("%s: not acknowledged (%s): replacing the producer", topic, reason)
        self._accepting.clear()
        self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Send again, one at a time and in order, what the old producer did not deliver; then accept new records."""
        while self._sends_in_progress:  # noqa: ASYNC110 - only after a failure, and for a moment
            await asyncio.sleep(_BACKOFF_S[0])
        sent = [record.sent for record in self._unacknowledged if record.sent is not None]
        if sent:
            await asyncio.wait(sent)
        await self._replace_producer()
        for record in list(self._unacknowledged):
            await self._send_alone(record)
        self._recovery = None
        self._accepting.set()

    async def _send_alone(self, record: _PendingRecord) -> None:
        """Send a record until it is acknowledged or refused."""
        unexpected_errors = 0
        for delay_s in backoff(_BACKOFF_S):
            try:
                metadata = await self._producer.send_and_wait(**record.arguments)
            except _INVALID_RECORD as error:
                self._resolve(record, Unsendable(describe(error)))
                return
            except KafkaError as error:
                unexpected_errors += isinstance(error, UnknownError)
                if isinstance(error, _REFUSALS) or unexpected_errors == _UNEXPECTED_ERROR_TRIES:
                    self._resolve(record, Unsendable(describe(error)))
                    await self._replace_producer()
                    return
                self._last_error = f"{record.arguments['topic']}: not acknowledged ({describe(error)})"
                log.warning("%s: trying again", self._last_error)
                await asyncio.sleep(delay_s)
                await self._replace_producer()
            else:
                self._resolve(record, metadata.offset)
                return

    async def _replace_producer(self) -> None:
        await close(self._producer)
        connection, options = self._connection, self._options
        self._producer = await start_client(lambda: producer(connection, **options), connection, _BACKOFF_S)


def not_sent(sender: Sender, *, what: str, waited_s: float) -> list[str]:
    """Why records do not reach Kafka; empty if they do. ``what`` names the record that has waited for ``waited_s``."""
    if (reasons := sender.not_ready()) or waited_s <= UNREADY_AFTER_S:
        return reasons
    cause = QUOTAS.problem() or sender.refusal()
    return [f"{what} has waited {waited_s:.0f} s for Kafka{f': {cause}' if cause else ''}"]
