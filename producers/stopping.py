"""How a producer ends: at a stop that does not wait for what hangs, and with the first of what went wrong."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
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


def first_failure(failures: BaseExceptionGroup[Exception]) -> Exception:
    """The first failure of a group, however deep."""
    failure: Exception | BaseExceptionGroup[Exception] = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
