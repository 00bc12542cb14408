"""Reads dead letters and their original records, and sends those that may be sent again, each at most once.

In:       gpu.dead-letters, in no group; the original record if a letter lacks a part of it, while its topic has it.
Out:      each letter, and whether it was sent again; the whole records, and the snapshots that ticks name, on the
          topics that they came from.
State:    a receipt in gpu.dead-letters for each letter that was sent again.
On failure: what is not acknowledged was not sent: run it again.

A record and the receipt of its letter are one transaction, and a reader of committed records sees both or none. The
transactions of all processes that resubmit have one id: a process that begins aborts what another one left open, and
only then reads the receipts.
"""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from typing import Any, NamedTuple

import msgspec
from aiokafka.errors import KafkaError, ProducerFenced, TransactionalIdAuthorizationFailed

from delivery.clients import close, producer, start_client
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from gpustream.history import STALLED_S, History, opened
from topics import allocations, samples
from topics import dead_letters as contract
from topics.dead_letters import MAX_KEY_BYTES, Cause
from topics.topic import MAX_MESSAGE_BYTES, decoder

RESUBMITTABLE = ("gpu.samples", "gpu.allocations", "gpu.workloads")
"""The topics that attribution reads. A record of another topic would have no effect, or a wrong one, if sent again."""

TRANSACTIONAL_ID = "gpustream-dead-letters"

ALREADY_SENT = "it was sent again before"
NOT_FOUND = "it is not there, or the other options leave it out"

_REFUSAL_REASONS = {
    "gpu.attributed": "every reader of gpu.attributed drops a tick that comes again as a replay",
    "gpu.alerts": "gpu.alerts keeps the last record of each key: this one would take the place of a newer one",
}
_ID = re.compile(r"([0-9]{1,9}):([0-9]{1,18})", re.ASCII)

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_RECORDS = 100
_TRANSACTION_MS = 10_000
_BEGIN_S = 30.0
_AGAIN = "Run the command again"


class LetterId(NamedTuple):
    """The position of a letter in gpu.dead-letters."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def letter_id(text: str) -> LetterId:
    """Parses ``PARTITION:OFFSET``. Raises ValueError."""
    if not (match := _ID.fullmatch(text)):
        raise ValueError(
            f"{text[:80]!r} is not a letter: write PARTITION:OFFSET, as `gpustream dead-letters list` has it"
        )
    return LetterId(int(match[1]), int(match[2]))


class Letter(NamedTuple):
    """A dead letter as it was read. ``resubmitted``: it was sent again."""

    id: LetterId
    logged_ms: int
    key: bytes | None
    value: bytes
    cause: Cause
    resubmitted: bool = False

    @property
    def key_text(self) -> str:
        """The key of the record: in most topics it names a node, ``CLUSTER/NODE``."""
        return (self.key or b"").decode("utf-8", "replace")

    @property
    def is_whole(self) -> bool:
        """Whether the letter has the whole record. An empty value may stand for a record without one."""
        return self.key is not None and 0 < self.cause.length == len(self.value)


class LetterFilter(NamedTuple):
    """Selects the letters that match every field that is given."""

    topic: str | None = None
    stage: str | None = None
    reason: str | None = None
    key: str | None = None
    ids: Collection[LetterId] = ()

    def __contains__(self, letter: object) -> bool:
        if not isinstance(letter, Letter) or (self.ids and letter.id not in self.ids):
            return False
        expected = (self.topic, self.stage and _component(self.stage), self.reason, self.key)
        cause = letter.cause
        values = (cause.origin.topic, _component(cause.stage), cause.reason, letter.key_text)
        return all(wanted is None or wanted == value for wanted, value in zip(expected, values, strict=True))


def _component(stage: str) -> str:
    """The name of a component, however it is written: ``sink remote-write`` is ``remote-write`` or ``remote_write``."""
    return stage.removeprefix("sink ").replace("_", "-")


async def letters(reader: History, since_s: float) -> AsyncIterator[Letter]:
    """The letters of the last ``since_s``, in order per partition, each with whether it was sent again.

    The topic is read twice: a receipt comes after its letter, and letters may be too large to be kept.
    """
    spans = await reader.spans(contract.TOPIC.name, int((time.time() - since_s) * 1000))
    receipts: set[LetterId] = set()
    async for records in reader.records(spans):
        for record in records:
            if (offset := contract.resubmitted(record.headers)) is not None:
                receipts.add(LetterId(record.partition, offset))
    async for records in reader.records(spans):
        for record in records:
            if (cause := contract.cause(record.headers)) is not None:
                origin = cause.origin._replace(topic=reader.connection.unprefixed(cause.origin.topic))
                cause = cause._replace(origin=origin)
                position = LetterId(record.partition, record.offset)
                yield Letter(position, record.timestamp, record.key, record.value or b"", cause, position in receipts)


class Original(NamedTuple):
    """An original record: its whole key and value."""

    key: bytes | None
    value: bytes | None


async def original(reader: History, letter: Letter) -> Original | str:
    """The original record of a letter, read from its topic if the letter lacks a part; or why it can't be read."""
    if letter.is_whole:
        return Original(letter.key, letter.value)
    name, partition, offset = letter.cause.origin
    if partition not in range(reader.partitions.get(name, 0)):
        return f"{name} has no partition {partition} any more"
    record = await reader.record(Partition(name, partition), offset)
    missing_part = "its key" if letter.key is None else "a part of its value" if letter.value else "its value"
    if record is None:
        return f"the letter lacks {missing_part}, and {name} does not have the record any more"
    value, key = record.value or b"", record.key
    same_key = key == letter.key or (letter.key is None and len(key or b"") > MAX_KEY_BYTES)
    if not (same_key and len(value) == letter.cause.length and value.startswith(letter.value)):
        return f"the letter lacks {missing_part}, and another record stands at its place now: {name} was created again"
    if key is None and record.value is None:
        return "it has neither a key nor a value: there is nothing to send"
    return Original(key, record.value)


class _Event(msgspec.Struct, frozen=True):
    allocations_seq: int | None = None


class _DeviceEvents(msgspec.Struct, frozen=True):
    events: tuple[_Event, ...] | None = None


class _NamedSnapshots(msgspec.Struct, frozen=True):
    """The fields of a tick or a snapshot that identify it and the snapshots that it names."""

    run_id: int
    seq: int
    allocations_seq: int | None = None
    devices: tuple[_DeviceEvents, ...] = ()


class Snapshots:
    """Finds the snapshots that ticks name. Each partition of gpu.allocations is read once, at its first use."""

    def __init__(self, reader: History) -> None:
        self._reader = reader
        self._offsets: dict[int, dict[tuple[bytes | None, int, int], int]] = {}
        self._returned: set[tuple[int, int]] = set()
        self._decode = decoder(_NamedSnapshots)

    async def named_by(self, letter: Letter, record: Original) -> list[Original]:
        """The snapshots that a tick and its events name, if the topic has them and they were not returned before."""
        if letter.cause.origin.topic != samples.TOPIC.name:
            return []
        try:
            tick = self._decode(record.value or b"")
        except msgspec.DecodeError:
            return []
        partition = letter.cause.origin.partition
        events = [event.allocations_seq for device in tick.devices for event in device.events or ()]
        snapshots = []
        for seq in sorted({seq for seq in (tick.allocations_seq, *events) if seq is not None}):
            offset = (await self._offsets_of(partition)).get((record.key, tick.run_id, seq))
            if offset is None or (partition, offset) in self._returned:
                continue
            self._returned.add((partition, offset))
            snapshot = await self._reader.record(Partition(allocations.TOPIC.name, partition), offset)
            if snapshot is not None:
                snapshots.append(Original(snapshot.key, snapshot.value))
        return snapshots

    async def _offsets_of(self, partition: int) -> dict[tuple[bytes | None, int, int], int]:
        """The offsets of a partition's snapshots, by key, run and seq."""
        if partition not in self._offsets:
            self._offsets[partition] = offsets = {}
            tp = Partition(allocations.TOPIC.name, partition)
            async for records in self._reader.records({tp: (await self._reader.spans(tp.topic))[tp]}):
                for record in records:
                    with contextlib.suppress(msgspec.DecodeError):
                        snapshot = self._decode(record.value or b"")
                        offsets[record.key, snapshot.run_id, snapshot.seq] = record.offset
        return self._offsets[partition]


def refusal_reason(letter: Letter) -> str | None:
    """Why a letter must not be sent again; None if it may."""
    if letter.resubmitted:
        return ALREADY_SENT
    name = letter.cause.origin.topic
    if name not in RESUBMITTABLE:
        return _REFUSAL_REASONS.get(name, f"{name} is not a topic that attribution reads")
    return None


# -- sending again


class Resubmission:
    """Sends letters again, each with its receipt in one transaction; see :func:`open_resubmission`."""

    def __init__(self, connection: Connection, sender: Any) -> None:
        self._connection, self._sender = connection, sender
        self._batch: list[tuple[Letter, Original, list[Original]]] = []
        self._bytes = 0

    async def add(self, letter: Letter, record: Original, snapshots: list[Original]) -> None:
        """Sends a letter's record after the ``snapshots`` that it names, now or with the next batch."""
        self._batch.append((letter, record, snapshots))
        self._bytes += len(record.value or b"")
        if len(self._batch) >= _BATCH_RECORDS or self._bytes >= _BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Sends what was added. Raises BrokerError: nothing of it was sent, or the transaction's end is unknown."""
        batch, self._batch, self._bytes = self._batch, [], 0
        if not batch:
            return
        sending = asyncio.ensure_future(self._send(batch))  # it also waits for the broker if it is cancelled
        try:
            await asyncio.wait((sending,), timeout=STALLED_S)
        finally:
            sending.cancel()
        if not sending.done():
            raise BrokerError(f"{self._connection} has not ended the transaction in {STALLED_S:.0f} s. {_AGAIN}")
        sending.result()

    async def _send(self, batch: list[tuple[Letter, Original, list[Original]]]) -> None:
        """Sends a batch in one transaction. Raises BrokerError."""
        prefixed, send = self._connection.prefixed, self._sender.send
        try:
            async with self._sender.transaction():
                acknowledged = []
                for letter, record, snapshots in batch:
                    name, partition, _ = letter.cause.origin
                    originals = [(allocations.TOPIC.name, snapshot) for snapshot in snapshots]
                    for topic, (key, value) in [*originals, (name, record)]:
                        acknowledged.append(await send(prefixed(topic), value, key=key, partition=partition))
                    receipt = {"partition": letter.id.partition, "headers": contract.receipt(letter.id.offset)}
                    key = letter.key or b""  # the client sends no record without key and value
                    acknowledged.append(await send(prefixed(contract.TOPIC.name), None, key=key, **receipt))
                await asyncio.gather(*acknowledged)
        except ProducerFenced as error:
            raise BrokerError("another `gpustream dead-letters resubmit` began: this one has ended") from error
        except KafkaError as error:
            ids = ", ".join(str(letter.id) for letter, *_ in batch[:10])
            raise BrokerError(f"letters {ids} ...: not sent: {describe(error)}. {_AGAIN}") from error


@contextlib.asynccontextmanager
async def open_resubmission(connection: Connection) -> AsyncIterator[Resubmission]:
    """A resubmission. It aborts the transaction that another one left open, and fences that one.

    Raises BrokerError if the broker begins no transaction, or the user has no right to.
    """
    sender = None
    try:
        async with asyncio.timeout(_BEGIN_S):
            sender = await start_client(
                lambda: producer(
                    connection,
                    client_id=TRANSACTIONAL_ID,
                    transactional_id=connection.prefixed(TRANSACTIONAL_ID),
                    transaction_timeout_ms=_TRANSACTION_MS,
                    max_request_size=2 * MAX_MESSAGE_BYTES,
                ),
                connection,
            )
        yield Resubmission(connection, sender)
    except TransactionalIdAuthorizationFailed as error:
        raise BrokerError(f"{connection}: {describe(error)}") from error
    except TimeoutError as error:
        raise BrokerError(
            f"{connection} has begun no transaction in {_BEGIN_S:.0f} s: a broker without transactions, or too few"
            " brokers are up for transaction.state.log.replication.factor"
        ) from error
    finally:
        if sender is not None:
            await close(sender)


async def send_again(
    connection: Connection, since_s: float, letter_filter: LetterFilter, *, send: bool
) -> tuple[Counter[str], dict[str, list[LetterId]]]:
    """Sends the letters that match, or only finds out which could be. Reads the receipts when nobody else writes.

    Returns how many records of each topic were sent, or would be; and the letters that were not sent, by reason.
    """
    sent, not_sent = Counter[str](), dict[str, list[LetterId]]()
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(opened(connection, [contract.TOPIC.name]))
        originals = await stack.enter_async_context(opened(connection, RESUBMITTABLE))
        resubmission = await stack.enter_async_context(open_resubmission(connection)) if send else None
        snapshots, missing = Snapshots(originals), set(letter_filter.ids)
        async for letter in letters(reader, since_s):
            if letter not in letter_filter:
                continue
            missing.discard(letter.id)
            record = refusal_reason(letter) or await original(originals, letter)
            if isinstance(record, str):  # the reason why it is not sent
                not_sent.setdefault(record, []).append(letter.id)
                continue
            if resubmission is not None:
                await resubmission.add(letter, record, await snapshots.named_by(letter, record))
            sent[letter.cause.origin.topic] += 1
        if resubmission is not None:
            await resubmission.flush()
    if missing:
        not_sent[NOT_FOUND] = sorted(missing)
    return sent, not_sent
