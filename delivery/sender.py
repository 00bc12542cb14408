"""How a record gets onto a topic: once, in order, acknowledged by every replica in sync.

In: a topic, a value, and where it belongs. Out: a future of the record's offset.
State: what was sent and is not acknowledged yet, in order.
On failure: a broker that is away is waited for, for as long as it takes. A record that the broker refuses breaks an
idempotent producer: every later record of its partition is out of sequence. So the producer is replaced, and what it
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

from delivery import opening
from delivery.clients import backoff, close, producer, start_client
from delivery.connection import Connection
from delivery.kafka_errors import describe
from delivery.topic_admin import TopicCheck
from topics.topic import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes]]

RECORD_OVERHEAD_BYTES = 200
"""What a batch of one record adds to its key, value and headers, generously."""

_REFUSALS = (
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    InvalidTimestampError,
    InvalidMessageError,
    CorruptRecordException,
    PolicyViolationError,
)
_UNKNOWN_TRIES = 5
"""How often an error is tried again that the client has no name for, as it has none for INVALID_RECORD."""

_IMPOSSIBLE = (AssertionError, TypeError, ValueError)
"""What the client raises for a record that it can't encode, or whose partition does not exist."""

_RETRY_BACKOFF_MS = 500
"""Looking for a broker that is away every 100 ms, as the client would, costs a node's producer half of its CPU."""

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_CANCELLED_S = 2.0


class Unsendable(Exception):
    """This record can never be sent: it is too large, or the broker refused it even alone. Drop or dead-letter it."""


class _Sending:
    """A record on its way: ``sent`` is the client's future once it took it, ``acknowledged`` the caller's."""

    __slots__ = ("acknowledged", "arguments", "sent")

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.sent: asyncio.Future[Any] | None = None
        self.acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Sender:
    """An idempotent producer that outlives refused records and broker outages.

    Records sent one after the other to a partition are stored in that order; with a key and no partition, the partition
    is the key's by murmur2, as for every Kafka client in Java. Nothing is sent before ``check`` has passed.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        client_id: str,
        check: TopicCheck | None = None,
        linger_ms: int = 20,
        max_batch_bytes: int = 65536,
    ) -> None:
        self._connection, self._check = connection, check
        self._options: dict[str, Any] = {
            "client_id": client_id,
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": linger_ms,
            "max_batch_size": max_batch_bytes,
            "max_request_size": 2 * MAX_MESSAGE_BYTES,
            "request_timeout_ms": 30_000,
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
        }
        self._producer: Any = None
        self._unacknowledged: dict[_Sending, None] = {}
        self._healthy = asyncio.Event()
        self._handing_over = 0
        self._recovery: asyncio.Task[None] | None = None
        self._stopped = False
        self._trouble: str | None = None

    async def start(self) -> None:
        """Connect, for as long as it takes until a broker answers whose topics may be used; cancel to give up."""
        if self._check is not None:
            await self._check.wait(asyncio.Event())
        await self._renew()
        self._healthy.set()

    def not_ready(self) -> list[str]:
        """Why nothing is sent; empty once it has started, and while what is sent is acknowledged."""
        checking = self._check.not_ready() if self._check is not None else []
        silent = [] if self._producer is not None else [f"no Kafka broker has answered at {self._connection} yet"]
        trouble = opening.trouble(self._connection) or self._trouble
        return checking or ([trouble] if trouble is not None else silent)

    async def ready(self) -> None:
        """Wait until records are taken: not before a broker was there, and not while records are sent again."""
        await self._healthy.wait()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        """Send a record, waiting for room. The future gives its offset once acknowledged, or raises Unsendable.

        A record without a value deletes its key from a compacted topic. Once the sender is stopped, it is cancelled.
        """
        topic = self._connection.prefixed(topic)
        record = _Sending(topic=topic, value=value, key=key, partition=partition, headers=headers)
        of_headers = sum(len(name) + len(text) + 10 for name, text in headers)
        size = len(value or b"") + len(key or b"") + of_headers + RECORD_OVERHEAD_BYTES
        if size > MAX_MESSAGE_BYTES:
            record.acknowledged.set_exception(Unsendable(f"{size} bytes, and a record may have {MAX_MESSAGE_BYTES}"))
            return record.acknowledged
        await self._healthy.wait()
        if self._stopped:
            record.acknowledged.cancel()
            return record.acknowledged
        self._unacknowledged[record] = None
        self._handing_over += 1
        try:
            record.sent = await self._client().send(**record.arguments)
            record.sent.add_done_callback(lambda sent: self._settle(record, sent))
        except asyncio.CancelledError:
            self._unacknowledged.pop(record, None)
            raise
        except KafkaError as error:
            self._recover(record, error)
        except _IMPOSSIBLE as error:
            self._resolve(record, Unsendable(describe(error)))
        finally:
            self._handing_over -= 1
        return record.acknowledged

    async def flush(self, timeout_s: float) -> None:
        """Wait until what was sent is acknowledged, also what is sent meanwhile, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting := [one.acknowledged for one in self._unacknowledged if not one.acknowledged.done()]:
                    await asyncio.wait(waiting)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Wait for what is unacknowledged, at most ``timeout_s``, and let go. What is left is cancelled."""
        await self.flush(timeout_s)
        self._stopped = True
        self._healthy.set()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery], timeout=_CANCELLED_S)
        for record in self._unacknowledged:
            record.acknowledged.cancel()
        self._unacknowledged.clear()
        if self._producer is not None:
            await close(self._producer)
            self._producer = None

    def _client(self) -> Any:
        if self._producer is None:
            raise RuntimeError("the sender is not started, or was stopped")
        return self._producer

    def _settle(self, record: _Sending, sent: "asyncio.Future[Any]") -> None:
        """The client has an answer, which no longer matters if the record was resolved before."""
        error = asyncio.CancelledError() if sent.cancelled() else sent.exception()
        if record not in self._unacknowledged:
            return
        if error is not None:
            self._recover(record, error)
        else:
            self._resolve(record, sent.result().offset)

    def _resolve(self, record: _Sending, outcome: int | Unsendable) -> None:
        self._unacknowledged.pop(record, None)
        if record.acknowledged.done():
            return
        if isinstance(outcome, Unsendable):
            record.acknowledged.set_exception(outcome)
        else:
            self._trouble = None
            record.acknowledged.set_result(outcome)

    def _recover(self, record: _Sending, error: BaseException) -> None:
        if self._stopped:
            record.acknowledged.cancel()
        if self._stopped or self._recovery is not None:
            return
        topic = record.arguments["topic"]
        log.warning("%s: not acknowledged (%s): replacing the producer", topic, describe(error))
        self._healthy.clear()
        self._recovery = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        """Send again, one at a time and in order, what the old producer did not deliver; then take new records."""
        while self._handing_over:  # noqa: ASYNC110 - only after a failure, and for a moment
            await asyncio.sleep(_BACKOFF_S[0])
        sent = [record.sent for record in self._unacknowledged if record.sent is not None]
        if sent:
            await asyncio.wait(sent)
        await self._renew()
        for record in list(self._unacknowledged):
            await self._send_alone(record)
        self._recovery = None
        self._healthy.set()

    async def _send_alone(self, record: _Sending) -> None:
        """Send a record until it is acknowledged or refused."""
        for attempt, delay_s in enumerate(backoff(_BACKOFF_S), 1):
            try:
                metadata = await self._client().send_and_wait(**record.arguments)
            except _IMPOSSIBLE as error:
                self._resolve(record, Unsendable(describe(error)))
                return
            except KafkaError as error:
                if isinstance(error, _REFUSALS) or (isinstance(error, UnknownError) and attempt >= _UNKNOWN_TRIES):
                    self._resolve(record, Unsendable(describe(error)))
                    await self._renew()
                    return
                self._trouble = f"{record.arguments['topic']}: not acknowledged ({describe(error)})"
                log.warning("%s: trying again", self._trouble)
                await asyncio.sleep(delay_s)
                await self._renew()
            else:
                self._resolve(record, metadata.offset)
                return

    async def _renew(self) -> None:
        if self._producer is not None:
            await close(self._producer)
        connection, options = self._connection, self._options
        self._producer = await start_client(lambda: producer(connection, **options), connection, _BACKOFF_S)
