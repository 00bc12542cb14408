"""Until when samples that the driver keeps have been read: what is newer is new.

In: the times of samples, in microseconds by the driver's clock: that of the day on most machines, on some one that
began with the machine. Out: which are new, and since when to ask.
State: the time of the newest, and when that was looked at.
"""

import time
from collections.abc import Iterable

_FUTURE_US = 60_000_000


class Newest:
    """Of the samples of one kind, of one device."""

    def __init__(self) -> None:
        self._at_us: int | None = None
        self._looked_us = 0

    def since_us(self) -> int | None:
        """Since when there may be new ones; None where that is not known: at first, and where the clock was set back
        since it was asked last, by which samples would be older than those that were read."""
        now_us = time.time_ns() // 1000
        if now_us < self._looked_us:
            self.forget()
        self._looked_us = now_us
        return self._at_us

    def is_new(self, at_us: int) -> bool:
        """Whether a sample of that time has not been read: a driver may give older ones than it was asked for, and ones
        of a time that can't be."""
        return (self._at_us or 0) < at_us <= self._looked_us + _FUTURE_US

    def read(self, times_us: Iterable[int]) -> None:
        """These were new, and are read."""
        self._at_us = max(times_us, default=self._at_us or 0)

    def forget(self) -> None:
        """What was read is of another time."""
        self._at_us = None
