"""Tasks and events: wait for an event with a timeout, work until a stop, run coroutines side by side, take turns."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

TURN_S = 0.02
"""How long tasks with much to do work until the event loop serves the others: heartbeats are among them."""


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, for that long at most (None: for ever). Returns whether it was set in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do the work, and cancel it once ``stop`` is set. Returns when it has ended, and whether it was not cancelled.
    Raises what the work raises."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait((working, stopping))
    if not working.cancelled():
        working.result()
    return not working.cancelled()


@contextlib.asynccontextmanager
async def running(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the parts during the ``async with`` block and cancel them at its end. Raises the first failure of any."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except ExceptionGroup as failures:
        failure: Exception = failures
        while isinstance(failure, ExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from failures


class Turns:
    """The turns of tasks that have much to do and seldom wait: each awaits :meth:`next` between two pieces of its work.

    Together they work for ``TURN_S``, one after the other. Then the event loop serves all other tasks once.
    """

    def __init__(self) -> None:
        self._ends_s = 0.0
        self._begins_soon = False

    async def next(self) -> None:
        """Wait for the next turn, if this one is over."""
        while time.monotonic() >= self._ends_s:
            if not self._begins_soon:
                self._begins_soon = True
                asyncio.get_running_loop().call_soon(self._begin)
            await asyncio.sleep(0)

    def _begin(self) -> None:
        self._begins_soon = False
        self._ends_s = time.monotonic() + TURN_S
