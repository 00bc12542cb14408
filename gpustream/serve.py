"""Runs components as a process: event loop, health server, signals, and an end that always comes.

In:       a function that makes the components, and what to do with them.
Out:      an exit code: 0 stopped as asked, 1 failed, 70 stopped itself to be restarted.
On failure: if a component raises, the process exits with 1 or with the error's ``exit_code``. If it does not stop in
          time, or a second signal comes, it exits with 70.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry

from delivery.values import Address
from gpustream.command import output_failure
from gpustream.health import Health, listening

log = logging.getLogger(__name__)

FAILED = 1
RESTART = 70
STOP_WITHIN_S = 10.0
_GC_AFTER = 100_000

_CANCEL_S = 1.0

Exit = Callable[[int], object]


@runtime_checkable
class Component(Protocol):
    """A producer, a stream or a sink, made from one frozen record of settings."""

    name: str
    registry: CollectorRegistry

    async def run(self, stop: asyncio.Event) -> None:
        """Works until ``stop`` is set, and returns within 8 s of that. Raises when it can't go on."""

    def not_ready(self) -> list[str]:
        """The reasons why it is not ready yet; empty if it is ready."""


class Deadline:
    """Ends the process from a thread of its own when a stop takes too long: a hung event loop can't prevent it."""

    def __init__(self, after_s: float = STOP_WITHIN_S, exit_process: Exit = os._exit) -> None:
        self._exit = exit_process
        self._timer = threading.Timer(after_s, self._expire)
        self._timer.daemon = True

    def start(self) -> None:
        """Starts the clock. A second call ends the process at once."""
        if self._timer.ident is not None:
            self._expire()
        else:
            self._timer.start()

    def cancel(self) -> None:
        """Stops the clock: the process has stopped in time."""
        self._timer.cancel()

    def _expire(self) -> None:
        log.error("not stopped in time, ending now")
        self._exit(RESTART)


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event, deadline: Deadline) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stop`` and start the deadline, even while the loop hangs; a second one ends all."""
    loop = asyncio.get_running_loop()

    def request_stop(name: str) -> None:
        log.info("stopping", extra={"signal": name})
        stop.set()

    def on_signal(number: int, _: FrameType | None) -> None:
        deadline.start()
        loop.call_soon_threadsafe(request_stop, signal.Signals(number).name)

    previous_handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def serve(
    make: Callable[[], Component], listen: Address | None, exit_process: Exit = os._exit, *, light: bool = False
) -> int:
    """Runs one component until it ends or a signal asks it to, and gives the exit code. ``light``: see :func:`run`."""

    async def main(stop: asyncio.Event) -> int:
        component = make()
        async with observed([component], listen):
            log.info("started", extra={"component": component.name})
            await component.run(stop)
        log.info("stopped", extra={"component": component.name})
        return 0

    return run(main, exit_process, light=light)


def run(
    main: Callable[[asyncio.Event], Awaitable[int]],
    exit_process: Exit = os._exit,
    stop_within_s: float = STOP_WITHIN_S,
    *,
    light: bool = False,
) -> int:
    """Runs ``main`` with signals and deadline, and turns what it raises into an exit code.

    It runs on uvloop, or on asyncio's own loop if ``light`` asks for a small process rather than a fast one.
    """
    deadline = Deadline(stop_within_s, exit_process)
    threads = set(threading.enumerate())
    # Records make many objects and no cycles: looking for those as often as by default costs 10 to 25 % of the CPU.
    gc.set_threshold(_GC_AFTER, 50, 100)
    gc.freeze()

    code = FAILED
    closing = threading.Timer(_CANCEL_S, lambda: _flush_and_exit(code, exit_process))
    closing.daemon = True

    async def guarded() -> None:
        nonlocal code
        stop = asyncio.Event()
        with stop_on_signals(stop, deadline):
            try:
                code = await main(stop)
            except Exception as error:  # noqa: BLE001 - the last place where it can be logged
                code = _log_failure(error)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks and (await asyncio.wait(tasks, timeout=_CANCEL_S))[1]:  # the loop would wait for them for ever
                _flush_and_exit(code, exit_process)
        deadline.cancel()
        closing.start()  # the loop and the interpreter would wait for ever for threads, as for one that looks up a name

    try:
        if light:
            asyncio.run(guarded())
        else:
            import uvloop

            uvloop.run(guarded())
        for thread in set(threading.enumerate()) - threads:
            if not thread.daemon:
                thread.join()
    finally:
        deadline.cancel()
        closing.cancel()
    return code


def _flush_and_exit(code: int, exit_process: Exit) -> None:
    """Flushes the output and ends the process, even if threads or tasks hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # as on a full disk, which was reported when it was written to
            stream.flush()
    exit_process(code)


def _log_failure(error: Exception) -> int:
    """Logs the error and returns the exit code. One with an ``exit_code`` is logged as its text and its ``advice``, and
    an output that can't be written as one line."""
    expected = [candidate for candidate in (error, error.__cause__) if hasattr(candidate, "exit_code")]
    if expected:
        log.critical("%s", "\n".join(filter(None, (str(error), getattr(expected[-1], "advice", "")))))
        return int(expected[-1].exit_code)  # type: ignore[union-attr] # which it has
    if (sentence := output_failure(error) or output_failure(error.__cause__)) is not None:
        log.critical("%s", sentence)
        return FAILED
    log.critical("failed", exc_info=error)
    return FAILED


@contextlib.asynccontextmanager
async def observed(components: Sequence[Component], listen: Address | None) -> AsyncIterator[None]:
    """Serves the metrics and health of the components while inside."""

    def not_ready() -> list[str]:
        return [f"{component.name}: {reason}" for component in components for reason in component.not_ready()]

    health = Health([component.registry for component in components], not_ready)
    beat = asyncio.create_task(health.beat())
    try:
        async with listening(health.answer, listen) as address:
            if address is not None:
                log.info("serving own metrics", extra={"listen": str(address)})
            yield
    finally:
        beat.cancel()
