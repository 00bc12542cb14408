"""Waiting for what a test expects, with a limit that a busy machine does not reach."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
Task = asyncio.Future[Any]

LONGEST_PAUSE_S = 0.1
"""So seldom is a condition asked in the end that has been waited for."""

LIMIT_S = 300.0
"""How long a test waits before it fails. Work of milliseconds on an idle machine may take minutes on a busy one."""


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], description: str = ..., *, within_s: float = ..., every_s: float = ...
) -> T: ...
@overload
async def eventually(
    condition: Callable[[], T | None],
    description: str = ...,
    *,
    within_s: float = ...,
    every_s: float = ...,
    unless: Task | None = ...,
) -> T: ...
async def eventually(
    condition: Callable[[], Any],
    description: str = "",
    *,
    within_s: float = LIMIT_S,
    every_s: float = 0.01,
    unless: Task | None = None,
) -> Any:
    """Waits until the condition, a function or a coroutine function, returns something true, and returns that.

    ``description`` is the message of the failure. It fails at once if ``unless``, the task that is to make the
    condition true, has ended. A condition is asked less often if it is slow, so that it takes at most half of the time,
    and the longer it has been waited for.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ends_s = began_s + within_s
    while True:
        asked_s = loop.time()
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        assert unless is None or not unless.done(), f"{_describe(condition, description)}: its task ended: {unless!r}"
        assert loop.time() < ends_s, f"{_describe(condition, description)}: not within {within_s:g} s, but {result!r}"
        await asyncio.sleep(_pause_s(every_s, began_s, asked_s, loop.time()))


def eventually_sync(
    condition: Callable[[], T | None], description: str = "", *, within_s: float = LIMIT_S, every_s: float = 0.05
) -> T:
    """The same for a test without an event loop, and through ``asyncio.to_thread`` for a condition that blocks."""
    began_s = time.monotonic()
    ends_s = began_s + within_s
    while True:
        asked_s = time.monotonic()
        if result := condition():
            return result
        now_s = time.monotonic()
        assert now_s < ends_s, f"{_describe(condition, description)}: not within {within_s:g} s, but {result!r}"
        time.sleep(_pause_s(every_s, began_s, asked_s, now_s))


def _pause_s(every_s: float, began_s: float, asked_s: float, now_s: float) -> float:
    """The time before the condition is asked again: at least as long as it took, and a twentieth of the wait so far."""
    return max(every_s, now_s - asked_s, min((now_s - began_s) / 20, LONGEST_PAUSE_S))


async def settle(rounds: int = 20) -> None:
    """Lets every task run until it waits: until no callback is ready, or for so many rounds of the loop."""
    ready = vars(asyncio.get_running_loop())["_ready"]  # asyncio has no public list of them
    for _ in range(rounds):
        await asyncio.sleep(0)
        if not ready:
            return


def _describe(condition: Callable[[], object], description: str) -> str:
    """The test's description of the condition, or else its source."""
    try:
        return description or " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
