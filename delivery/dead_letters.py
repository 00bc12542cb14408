"""Dead letters: a stream or a sink writes a record here that it could not decode or deliver, before it goes on."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from delivery.clock import now_ms
from delivery.sender import Sender, Unsendable, not_sent
from delivery.tasks import until_stopped
from topics import dead_letters
from topics.dead_letters import Origin

log = logging.getLogger(__name__)

_SENDER_STOP_S = 0.5


class Record(Protocol):
    """The fields of a consumer's record that are used here and in sinks. ``timestamp`` is the log time in ms."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...


class Abandoned(Exception):
    """The caller must let go of the partition. The work under way may have been done or not."""


@contextlib.asynccontextmanager
async def connecting(sender: Sender) -> AsyncIterator[None]:
    """The sender connects during the ``async with`` block, however long that takes, and is stopped at its end."""
    starting = asyncio.ensure_future(sender.start())
    try:
        yield
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await sender.stop(_SENDER_STOP_S)


class DeadLetters:
    """Writes dead letters and waits for the broker to have them."""

    def __init__(self, sender: Sender, stage: str) -> None:
        self._sender = sender
        self._stage = stage
        self._waiting_since_s: list[float] = []

    def not_ready(self) -> list[str]:
        """The reasons why none can be written; empty if there is none."""
        waited_s = time.monotonic() - min(self._waiting_since_s, default=math.inf)
        return not_sent(self._sender, what="a dead letter", waited_s=waited_s)

    async def write(self, record: Record, error: str, abandon: asyncio.Event) -> None:
        """Write a record's dead letter; returns once it is acknowledged. Raises Abandoned if ``abandon`` is set."""
        origin = Origin(record.topic, record.partition, record.offset)
        log.warning("%s partition %d: dead-lettered at offset %d: %.300s", *origin, error)

        async def send() -> None:
            try:
                await (await send_letter(self._sender, record, origin, stage=self._stage, error=error))
            except Unsendable as unsendable:
                log.error(
                    "%s partition %d: not even the dead letter of offset %d could be sent: %s", *origin, unsendable
                )

        self._waiting_since_s.append(since_s := time.monotonic())
        try:
            await until_abandoned(abandon, send())
        finally:
            self._waiting_since_s.remove(since_s)


async def send_letter(sender: Sender, record: Any, origin: Origin, *, stage: str, error: str) -> asyncio.Future[int]:
    """Send the dead letter of a record; the sender's future is done once it is acknowledged."""
    at_ms = now_ms()
    letter = dead_letters.letter(record.key, record.value, origin, stage=stage, error=error, at_ms=at_ms)
    return await sender.send(dead_letters.TOPIC.name, letter.value, key=letter.key, headers=letter.headers)


async def until_abandoned(abandon: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await work until ``abandon`` is set. Raises Abandoned, with the work cancelled, or what the work raises."""
    if not await until_stopped(abandon, work):
        raise Abandoned
