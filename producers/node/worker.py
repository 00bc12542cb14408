"""A thread that runs one job at a time, so that a call that hangs blocks neither the event loop nor the exit.

In: jobs, from the event loop. Out: futures of the loop. State: the job that runs.
On failure: the future raises what its job raised. A job that never returns keeps its worker busy for ever; the thread
is a daemon, and nobody waits for its end. A result that comes after the loop was closed is dropped.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def ran_within(function: Callable[[], object], within_s: float, *, name: str) -> bool:
    """Run ``function`` on a thread of that name, and wait for its end for at most ``within_s``. Returns False if the
    system gives no thread, so that it was not run at all."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join(within_s)
    return True


class Worker:
    """One thread. All methods are for the event loop's thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._clock = clock
        self._job_began_s: float | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._job_began_s is not None

    def busy_s(self) -> float:
        return 0.0 if self._job_began_s is None else self._clock() - self._job_began_s

    def submit(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Run ``function`` on the thread. The worker is busy until it returns, even if the future is cancelled.
        Raises RuntimeError if the worker is busy."""
        if self.busy:
            raise RuntimeError("submitted while another job runs")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._job_began_s = self._clock()

        def settle(result: Any, error: Exception | None) -> None:
            self._job_began_s = None
            if error is not None and not future.cancelled():
                future.set_exception(error)
                future.exception()  # or asyncio logs it if the loop ends before whoever waits gets it
            elif not future.cancelled():
                future.set_result(result)

        def job() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - it is raised where the future is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(job)
        return future

    def submit_last(self, function: Callable[[], None]) -> None:
        """Run ``function`` after the jobs before it; nobody gets its result. Call :meth:`stop` next."""
        self._jobs.put(function)

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            with contextlib.suppress(Exception):  # nobody waits for what was submitted last
                job()
