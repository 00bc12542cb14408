"""Waiting for what a test expects, with a limit that a busy machine does not reach."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
Task = asyncio.Future[Any]

LIMIT_S = 120.0
"""How long a test waits before it fails. What takes milliseconds on an idle machine may take a minute on a busy one."""


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], what: str = ..., *, within_s: float = ..., every_s: float = ...
) -> T: ...
@overload
async def eventually(
    condition: Callable[[], T | None],
    what: str = ...,
    *,
    within_s: float = ...,
    every_s: float = ...,
    unless: Task | None = ...,
) -> T: ...
async def eventually(
    condition: Callable[[], Any],
    what: str = "",
    *,
    within_s: float = LIMIT_S,
    every_s: float = 0.01,
    unless: Task | None = None,
) -> Any:
    """Waits until the condition, a function or a coroutine function, gives something true, and returns that.

    ``what`` is the message of the failure. Fails at once when ``unless``, the task that is to make it true, has ended.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + within_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert unless is None or not unless.done(), f"{_named(condition, what)}: its task ended: {unless!r}"
        assert loop.time() < ends_s, f"{_named(condition, what)}: not within {within_s:g} s, but {found!r}"
        await asyncio.sleep(every_s)


def eventually_sync(
    condition: Callable[[], T | None], what: str = "", *, within_s: float = LIMIT_S, every_s: float = 0.05
) -> T:
    """The same for a test that is no coroutine, and by ``asyncio.to_thread`` for a condition that blocks."""
    ends_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < ends_s, f"{_named(condition, what)}: not within {within_s:g} s, but {found!r}"
        time.sleep(every_s)
    return found


def _named(condition: Callable[[], object], what: str) -> str:
    """What was waited for: as the test calls it, or the source of the condition."""
    try:
        return what or " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
