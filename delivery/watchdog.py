"""Watches the event loop: ends a process that hangs, and measures how late the loop is.

A process that was ended is started again, and reads again what it had not finished. The watchdog runs in a thread of
its own, because the event loop may hang. It counts its own seconds, because a process that was suspended has not
stalled.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from delivery.instruments import Instrument

log = logging.getLogger(__name__)

_LATE_EVERY_S = 0.1
_LATE_FOR_S = 60.0

RESTART = 70  # the exit code of a process that stopped itself to be restarted


def fail_stop(reason: str) -> NoReturn:
    """End the process at once, without finishing anything: the next one reads again what is not finished."""
    log.critical("stopping to be restarted: %s", reason)
    sys.stderr.flush()
    os._exit(RESTART)


class Pulse(msgspec.Struct, frozen=True):
    """What a watchdog looks at: a beat of the event loop, the progress so far, and what is being waited for.

    ``progress`` is any number that changes when work is done. ``working``: there is work that should be getting done.
    ``turns`` counts how often the reader has looked for records.
    ``reachable`` counts the broker's answers: without them nothing can progress, and ending the process helps nobody.
    """

    beat: int
    progress: int
    turns: int
    working: bool
    ready: bool
    reachable: int


class Deadlines(msgspec.Struct, frozen=True):
    """In seconds: until the reader is ready, between two beats of the event loop, and between two steps of progress."""

    start: int = 120
    beat: int = 60
    progress: int = 90


class Judge:
    """Counts for how many looks each condition has lasted. Pure: the thread looks once a second."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._last: Pulse | None = None
        self._unready = self._still = self._stuck = self._idle = 0

    def look(self, pulse: Pulse) -> str | None:
        """The reason to end the process, or None."""
        last, self._last = self._last, pulse
        if last is None:
            return None
        answered, progressed = pulse.reachable != last.reachable, pulse.progress != last.progress
        self._still = self._still + 1 if pulse.beat == last.beat else 0
        self._unready = 0 if pulse.ready or progressed else self._unready + answered
        self._stuck = 0 if not pulse.working or progressed else self._stuck + answered
        self._idle = 0 if pulse.turns != last.turns else self._idle + answered
        if self._still >= self._deadlines.beat:
            return f"the event loop has not moved for {self._still} s"
        if self._unready >= self._deadlines.start:
            return f"not ready after {self._unready} s of a broker that answers"
        if self._stuck >= self._deadlines.progress:
            return f"records were read and none was finished in {self._stuck} s of a broker that answers"
        if self._idle >= self._deadlines.progress:
            return f"no records were looked for in {self._idle} s of a broker that answers"
        return None


class Watchdog:
    """Looks once a second, from :meth:`start` to :meth:`stop`, and ends the process when its judge says so."""

    def __init__(
        self, pulse: Callable[[], Pulse], deadlines: Deadlines, *, fail: Callable[[str], None] = fail_stop
    ) -> None:
        self._pulse, self._judge, self._fail = pulse, Judge(deadlines), fail
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        """Look until stopped, or until there is a reason to end the process."""
        while not self._stopped.wait(1.0):
            try:
                reason = self._judge.look(self._pulse())
            except Exception as error:  # noqa: BLE001 - nobody else would notice it
                reason = f"the watchdog failed: {error!r}"
            if reason is not None and not self._stopped.is_set():
                self._fail(reason)
                return


def lateness_instrument(component: str) -> Instrument:
    """What a component says of its own event loop."""
    return Instrument(
        f"gpustream_{component}_loop_late_seconds",
        "gauge",
        "The most that the event loop was late in the last minute. Past a tenth of --session-timeout it delays"
        " heartbeats; past all of it, another member takes over.",
    )


class LoopLateness:
    """Measures, while :meth:`watch` runs, how much later than due a sleeper wakes."""

    def __init__(self) -> None:
        self._worst: deque[tuple[float, float]] = deque()

    async def watch(self) -> None:
        """Measure ten times a second. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LATE_EVERY_S
            await asyncio.sleep(_LATE_EVERY_S)
            self.note(loop.time(), loop.time() - due_s)

    def note(self, now_s: float, late_s: float) -> None:
        """The loop was this late. Smaller values from before are forgotten: none can be the worst of a minute again."""
        while self._worst and self._worst[-1][1] <= late_s:
            self._worst.pop()
        self._worst.append((now_s, late_s))
        while self._worst[0][0] < now_s - _LATE_FOR_S:
            self._worst.popleft()

    def worst_s(self) -> float:
        """The most that it was late within the last minute, in seconds."""
        return max(0.0, self._worst[0][1]) if self._worst else 0.0
