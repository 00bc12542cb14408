"""What the driver sampled of its own accord between two ticks, so that no spike is lost: mean, minimum and maximum.

In: the driver's buffer of samples. Their times are in microseconds: of the day on most machines, on some since the
machine was started. Out: the samples' spread, in the table's units.
State: the time of the newest sample that was read. The first reading only takes note of that: the buffer reaches back
further than a tick.
On failure: NvmlError. A sample that can't be is left out, and counted.
Source: nvml.h: NOT_FOUND says that there is no new one.
"""

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from producers.node.nvml import binding, values
from producers.node.nvml.binding import FieldValue, Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls
from producers.node.nvml.values import Absent, Limits, Scale

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


class Spread(NamedTuple):
    """Of the samples of one tick."""

    mean: float
    minimum: float
    maximum: float


class Samples:
    """Those of one kind, of one device."""

    def __init__(self, calls: Calls, name: str, kind: int) -> None:
        self._calls, self._name, self._kind = calls, name, kind
        self._newest = Newest()

    def read(self, handle: Handle, scale: Scale, limits: Limits) -> Spread | None:
        """Of the samples since the last time; None the first time, and where there are none. Raises Lost, NvmlError."""
        since_us = self._newest.since_us()
        new = [one for one in self._since(handle, since_us or 0) if self._newest.is_new(one.at_us)]
        self._newest.read(one.at_us for one in new)
        return None if since_us is None else self._spread(new, scale, limits)

    def forget(self) -> None:
        """What was sampled until now is of another time."""
        self._newest.forget()

    def _since(self, handle: Handle, since_us: int) -> Iterable[FieldValue]:
        try:
            return self._calls.samples(handle, self._kind, since_us)
        except NvmlError as error:
            if error.code != binding.NOT_FOUND:
                raise
            return ()

    def _spread(self, new: Iterable[FieldValue], scale: Scale, limits: Limits) -> Spread | None:
        found = [values.measured(one.value, one.bits, scale, limits) for one in new]
        good = [one for one in found if not isinstance(one, Absent)]
        for _ in range(len(found) - len(good)):
            self._calls.count(self._name, IMPLAUSIBLE)
        return _spread(good) if good else None


def _spread(good: Sequence[float]) -> Spread:
    low, high = min(good), max(good)
    return Spread(min(max(fmean(good), low), high), low, high)  # rounding may take the mean of equals past them
