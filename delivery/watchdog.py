"""Ends a process that hangs; being started again and reading again is the recovery.

It runs in a thread, because the event loop may be what hangs, and counts its own seconds, because a process that was
suspended has not stalled.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

log = logging.getLogger(__name__)

RESTART = 70
"""The exit code of a process that stopped itself to be restarted."""


def fail_stop(reason: str) -> NoReturn:
    """End the process at once, without finishing anything: what is not finished is read again by the next one."""
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
    """Counts for how many looks each condition has lasted. Pure: a look is a second only because the thread says so."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._last: Pulse | None = None
        self._unready = self._still = self._stuck = self._idle = 0

    def look(self, pulse: Pulse) -> str | None:
        """The reason to end the process, or None."""
        last, self._last = self._last, pulse
        if last is None:
            return None
        answered = pulse.reachable != last.reachable
        self._still = self._still + 1 if pulse.beat == last.beat else 0
        if pulse.ready or pulse.progress != last.progress:
            self._unready = 0
        elif answered:
            self._unready += 1
        if not pulse.working or pulse.progress != last.progress:
            self._stuck = 0
        elif answered:
            self._stuck += 1
        if pulse.turns != last.turns:
            self._idle = 0
        elif answered:
            self._idle += 1
        return self._verdict()

    def _verdict(self) -> str | None:
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
        """Begin to look."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            time.sleep(1.0)
            reason = self._look()
            if reason is not None and not self._stopped.is_set():
                self._fail(reason)
                return

    def _look(self) -> str | None:
        try:
            return self._judge.look(self._pulse())
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else would notice
            return f"the watchdog failed: {error!r}"
