"""Runs components as a process: event loop, health server, signals, and an end that always comes.

In:       a function that makes the components, and what to do with them.
Out:      an exit code: 0 stopped as asked, 1 failed, 70 stopped itself to be restarted.
On failure: a component that raises ends the process with 1 (or with its error's ``exit_code``); one that does not stop
          in time, and a second signal, with 70.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import FrameType

import uvloop

from gpustream.components import Component
from gpustream.health import Health, listening
from gpustream.values import Address
from topics.broker import BrokerError

log = logging.getLogger(__name__)

FAILED = 1
RESTART = 70
STOP_WITHIN_S = 10.0

Exit = Callable[[int], object]


class Deadline:
    """Ends the process from a thread of its own when a stop takes too long: a hung event loop can't prevent it."""

    def __init__(self, after_s: float = STOP_WITHIN_S, exit_process: Exit = os._exit) -> None:
        self._exit = exit_process
        self._timer = threading.Timer(after_s, self._expire)
        self._timer.daemon = True

    def start(self) -> None:
        """Starts the clock; again: ends the process at once."""
        if self._timer.ident is not None:
            self._expire()
        else:
            self._timer.start()

    def cancel(self) -> None:
        """The stop is done."""
        self._timer.cancel()

    def _expire(self) -> None:
        log.error("not stopped in time, ending now")
        self._exit(RESTART)


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event, deadline: Deadline) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stop`` and start the deadline, even while the loop hangs; a second one ends all."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _: FrameType | None) -> None:
        deadline.start()
        loop.call_soon_threadsafe(_note, stop, signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(stop: asyncio.Event, name: str) -> None:
    log.info("stopping", extra={"signal": name})
    stop.set()


def serve(make: Callable[[], Component], listen: Address | None, exit_process: Exit = os._exit) -> int:
    """Runs one component until it ends or a signal asks it to, and gives the exit code."""

    async def main(stop: asyncio.Event) -> int:
        component = make()
        async with observed([component], listen):
            log.info("started", extra={"component": component.name})
            await component.run(stop)
        log.info("stopped", extra={"component": component.name})
        return 0

    return run(main, exit_process)


def run(
    main: Callable[[asyncio.Event], Awaitable[int]],
    exit_process: Exit = os._exit,
    stop_within_s: float = STOP_WITHIN_S,
) -> int:
    """Runs ``main`` on uvloop with signals and deadline, and turns what it raises into an exit code."""

    deadline = Deadline(stop_within_s, exit_process)

    async def guarded() -> int:
        stop = asyncio.Event()
        with stop_on_signals(stop, deadline):
            return await main(stop)

    try:
        return uvloop.run(guarded())
    except Exception as error:  # noqa: BLE001 - the last place where anybody can be told
        return _failed(error)
    finally:
        deadline.cancel()


def _failed(error: Exception) -> int:
    """Tells of the error and gives the exit code. One with a code of its own, or a broker's, is told in a sentence."""
    deliberate = [one for one in (error, error.__cause__) if hasattr(one, "exit_code") or isinstance(one, BrokerError)]
    if deliberate:
        log.critical("%s", error)
    else:
        log.critical("failed", exc_info=error)
    return int(getattr(deliberate[-1] if deliberate else error, "exit_code", FAILED))


@contextlib.asynccontextmanager
async def observed(components: Sequence[Component], listen: Address | None) -> AsyncIterator[None]:
    """Serves the metrics and health of the components while inside."""

    def not_ready() -> list[str]:
        return [f"{component.name}: {reason}" for component in components for reason in component.not_ready()]

    health = Health([component.registry for component in components], not_ready)
    beat = asyncio.create_task(health.beat())
    try:
        async with listening(health.application(), listen) as address:
            if address is not None:
                log.info("serving own metrics", extra={"listen": str(address)})
            yield
    finally:
        beat.cancel()
