"""A thread that does one job at a time, so that a call that hangs holds up nobody else, and not the exit either.

In: jobs, from the event loop. Out: futures of the loop. State: the job that runs.
On failure: the future raises what its job raised. A job that never returns keeps its worker busy for ever; the thread
is a daemon, and nobody waits for its end. An answer that comes after the loop was closed is dropped.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """One thread. All methods are for the event loop's thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._clock = clock
        self._since_s: float | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._since_s is not None

    def busy_s(self) -> float:
        return 0.0 if self._since_s is None else self._clock() - self._since_s

    def ask(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Do ``work`` on the thread, if not busy; it is until ``work`` returns, even if the future is cancelled."""
        if self.busy:
            raise RuntimeError("asked while another job runs")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._since_s = self._clock()

        def settle(answer: Any, error: Exception | None) -> None:
            self._since_s = None
            if error is not None and not future.cancelled():
                future.set_exception(error)
            elif not future.cancelled():
                future.set_result(answer)

        def job() -> None:
            answer: Any = None
            error: Exception | None = None
            try:
                answer = work()
            except Exception as raised:  # noqa: BLE001 - it is raised where the future is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, answer, error)

        self._jobs.put(job)
        return future

    def leave(self, work: Callable[[], None]) -> None:
        """Do ``work`` as the last thing, without an answer."""
        self._jobs.put(work)

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            with contextlib.suppress(Exception):  # what is left to it is for nobody
                job()
