"""Sends letters again, each at most once.

In:       letters, and their whole records. Out: the records on the topics that they came from.
State:    a receipt in gpu.dead-letters for each letter that was sent again.
On failure: what is not acknowledged was not sent: run it again.

A record and the receipt of its letter are one transaction, and a reader of committed records sees both or none. The
transactions of all processes that resubmit have one id: a process that begins aborts what another one left open, and
only then reads the receipts.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiokafka.errors import KafkaError, ProducerFenced, TransactionalIdAuthorizationFailed

from delivery.clients import close, producer, start_client
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.kafka_errors import describe
from gpustream import history
from gpustream.dead_letters.letters import (
    RESUBMITTABLE,
    Letter,
    LetterFilter,
    LetterId,
    Original,
    Snapshots,
    letters,
    original,
    refusal_reason,
)
from topics import allocations
from topics import dead_letters as contract
from topics.topic import MAX_MESSAGE_BYTES

TRANSACTIONAL_ID = "gpustream-dead-letters"

NOT_FOUND = "it is not there, or the other options leave it out"

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_RECORDS = 100
_TRANSACTION_MS = 10_000
_BEGIN_S = 30.0


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
        prefixed = self._connection.prefixed
        try:
            async with self._sender.transaction():
                acknowledged = []
                for letter, record, snapshots in batch:
                    name, partition, _ = letter.cause.origin
                    for snapshot in snapshots:
                        topic = prefixed(allocations.TOPIC.name)
                        acknowledged.append(
                            await self._sender.send(topic, snapshot.value, key=snapshot.key, partition=partition)
                        )
                    acknowledged += [
                        await self._sender.send(prefixed(name), record.value, key=record.key, partition=partition),
                        await self._sender.send(
                            prefixed(contract.TOPIC.name),
                            None,
                            key=letter.key or b"",  # the client sends no record without key and value
                            partition=letter.id.partition,
                            headers=contract.receipt(letter.id.offset),
                        ),
                    ]
                await asyncio.gather(*acknowledged)
        except ProducerFenced as error:
            raise BrokerError("another `gpustream dead-letters resubmit` began: this one has ended") from error
        except KafkaError as error:
            ids = ", ".join(str(letter.id) for letter, *_ in batch[:10])
            raise BrokerError(f"letters {ids} ...: not sent: {describe(error)}. Run the command again") from error


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


class Resubmitted(NamedTuple):
    """How many records of each topic were sent, or would be; and the letters that were not sent, by reason."""

    sent: dict[str, int]
    not_sent: dict[str, list[LetterId]]


async def resubmit(connection: Connection, since_s: float, letter_filter: LetterFilter, *, send: bool) -> Resubmitted:
    """Sends the letters that match, or only finds out which could be. Reads the receipts when nobody else writes."""
    result = Resubmitted({}, {})
    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(history.opened(connection, [contract.TOPIC.name]))
        originals = await stack.enter_async_context(history.opened(connection, RESUBMITTABLE))
        resubmission = await stack.enter_async_context(open_resubmission(connection)) if send else None
        snapshots, missing = Snapshots(originals), set(letter_filter.ids)
        async for letter in letters(reader, since_s):
            if letter not in letter_filter:
                continue
            missing.discard(letter.id)
            record = refusal_reason(letter) or await original(originals, letter)
            if isinstance(record, str):  # the reason why it is not sent
                result.not_sent.setdefault(record, []).append(letter.id)
                continue
            if resubmission is not None:
                await resubmission.add(letter, record, await snapshots.named_by(letter, record))
            name = letter.cause.origin.topic
            result.sent[name] = result.sent.get(name, 0) + 1
        if resubmission is not None:
            await resubmission.flush()
    if missing:
        result.not_sent[NOT_FOUND] = sorted(missing)
    return result
