"""Watches the event loop: ends a process that hangs, and measures how late the loop is.

A process that is ended is started again, and reads again what it had not finished. The watchdog runs in a thread of its
own, because the event loop may hang. It counts its own seconds, because a suspended process has not stalled.
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

_MEASURE_EVERY_S = 0.1
_LATENESS_WINDOW_S = 60.0

RESTART = 70  # the exit code of a process that stopped itself to be restarted


def fail_stop(reason: str) -> NoReturn:
    """End the process at once, without finishing anything: its successor reads again what is not finished."""
    log.critical("stopping to be restarted: %s", reason)
    sys.stderr.flush()
    os._exit(RESTART)


class Pulse(msgspec.Struct, frozen=True):
    """What a process reports to its watchdog.

    ``beat`` changes while the event loop runs. ``progress`` is any number that changes when work is done. ``turns``
    counts how often the reader has looked for records. ``working``: there are unfinished records. ``ready``: the reader
    knows its positions. ``reachable`` counts the answers of a broker that takes what is sent: without them there can be
    no progress, and ending the process would not help.
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


class StallDetector:
    """Counts for how many seconds each kind of stall has lasted, one call of :meth:`check` a second. Pure."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._last: Pulse | None = None
        self._unready_s = self._no_beat_s = self._no_progress_s = self._no_turn_s = 0

    def check(self, pulse: Pulse) -> str | None:
        """The reason to end the process, or None."""
        last, self._last = self._last, pulse
        if last is None:
            return None
        answered, progressed = pulse.reachable != last.reachable, pulse.progress != last.progress
        self._no_beat_s = self._no_beat_s + 1 if pulse.beat == last.beat else 0
        self._unready_s = 0 if pulse.ready or progressed else self._unready_s + answered
        self._no_progress_s = 0 if not pulse.working or progressed else self._no_progress_s + answered
        self._no_turn_s = 0 if pulse.turns != last.turns else self._no_turn_s + answered
        if self._no_beat_s >= self._deadlines.beat:
            return f"the event loop has not moved for {self._no_beat_s} s"
        if self._unready_s >= self._deadlines.start:
            return f"not ready after {self._unready_s} s of a broker that answers"
        if self._no_progress_s >= self._deadlines.progress:
            return f"records were read and none was finished in {self._no_progress_s} s of a broker that answers"
        if self._no_turn_s >= self._deadlines.progress:
            return f"no records were looked for in {self._no_turn_s} s of a broker that answers"
        return None


class Watchdog:
    """Checks the pulse once a second, from :meth:`start` to :meth:`stop`, and ends the process if it has stalled."""

    def __init__(self, pulse: Callable[[], Pulse], deadlines: Deadlines, *, fail: Callable[[str], None]) -> None:
        self._pulse, self._detector, self._fail = pulse, StallDetector(deadlines), fail
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        """Check until stopped, or until there is a reason to end the process."""
        while not self._stopped.wait(1.0):
            try:
                reason = self._detector.check(self._pulse())
            except Exception as error:  # noqa: BLE001 - or the thread would end unnoticed
                reason = f"the watchdog failed: {error!r}"
            if reason is not None and not self._stopped.is_set():
                self._fail(reason)
                return


LATENESS = Instrument(
    "loop_late_seconds",
    "gauge",
    "The most that the event loop was late in the last minute. Past a tenth of --session-timeout it delays"
    " heartbeats; past all of it, another member takes over.",
)
"""The metric of a component's :class:`LoopLateness`, without its prefix."""


class LoopLateness:
    """Measures, while :meth:`watch` runs, how late a sleeping task is woken."""

    def __init__(self) -> None:
        self._worst: deque[tuple[float, float]] = deque()

    async def watch(self) -> None:
        """Measure ten times a second. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _MEASURE_EVERY_S
            await asyncio.sleep(_MEASURE_EVERY_S)
            self.note(loop.time(), loop.time() - due_s)

    def note(self, now_s: float, late_s: float) -> None:
        """Keep a measurement, and drop earlier smaller ones: they can't be the worst of a minute again."""
        while self._worst and self._worst[-1][1] <= late_s:
            self._worst.pop()
        self._worst.append((now_s, late_s))
        while self._worst[0][0] < now_s - _LATENESS_WINDOW_S:
            self._worst.popleft()

    def worst_s(self) -> float:
        """The largest lateness of the last minute, in seconds."""
        return max(0.0, self._worst[0][1]) if self._worst else 0.0
