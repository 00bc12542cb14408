"""What components do with tasks and events: wait for a time at most, work until a stop, run parts side by side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set, for that long at most (None: for ever). Returns whether it was set in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless the stop comes before its end; returns when it has ended. Raises what the work raised."""
    doing, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((doing, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, stopped):
            task.cancel()
        await asyncio.wait((doing, stopped))
    if not doing.cancelled():
        doing.result()


@contextlib.asynccontextmanager
async def running(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the parts while inside, and cancel them at the end. Raises the first failure, of a part or of the inside."""
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
