"""Where a sink puts what it could not decode or deliver, before it goes past it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from delivery.sender import Sender, Unsendable
from topics import dead_letters
from topics.dead_letters import Origin

log = logging.getLogger(__name__)

_SENDER_STOP_S = 0.5


class Record(Protocol):
    """A record as it was read: what this module and the sinks use of it."""

    @property
    def topic(self) -> str:
        """Where it was read."""

    @property
    def partition(self) -> int:
        """Its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def timestamp(self) -> int:
        """When the broker appended it, in milliseconds since the epoch."""

    @property
    def key(self) -> bytes | None:
        """Its key."""

    @property
    def value(self) -> bytes | None:
        """Its bytes."""


class Abandoned(Exception):
    """Whoever asked is to let go of the partition: what was under way may have been done, or not."""


@contextlib.asynccontextmanager
async def connecting(sender: Sender) -> AsyncIterator[None]:
    """The sender connects while inside, for as long as that takes, and is let go at the end."""
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

    async def bury(self, record: Record, error: str, abandon: asyncio.Event) -> None:
        """Write a record to the dead letters; returns once it is there. Raises Abandoned if that is not awaited."""
        origin = Origin(record.topic, record.partition, record.offset)
        log.warning("%s: dead-lettered: %s", origin, error)
        letter = dead_letters.letter(
            record.key, record.value, origin, stage=self._stage, error=error, at_ms=int(time.time() * 1000)
        )
        await unless(abandon, self._send(letter, origin))

    async def _send(self, letter: dead_letters.Letter, origin: Origin) -> None:
        sent = await self._sender.send(dead_letters.TOPIC.name, letter.value, key=letter.key, headers=letter.headers)
        try:
            await sent
        except Unsendable as error:
            log.error("%s: not even its dead letter could be sent: %s", origin, error)


async def unless(abandon: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await work until ``abandon`` is set. Raises Abandoned, with the work cancelled, or what the work raises."""
    task = asyncio.ensure_future(work)
    given_up = asyncio.ensure_future(abandon.wait())
    try:
        await asyncio.wait((task, given_up), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Abandoned
        await task
    finally:
        given_up.cancel()
        task.cancel()
