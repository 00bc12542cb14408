"""For how long a partition has been watched without a break, so that it can be said that nothing came.

In: how far it was read, and where the broker says that it ends, as does the log that it is made from. Out: since when,
and until when, everything that there was has been read.
State: the questions that were answered and not yet read to. No clock, no Kafka.
"""

from collections import deque
from typing import NamedTuple

BREAK_S = 10.0
"""Answers that are further apart leave it open what came between."""

_ASKED_AT_MOST = 600


class Ends(NamedTuple):
    """Where the partition ended, and that of the samples, when the broker was asked."""

    asked_s: float
    end: int
    samples_end: int | None


class Attendance:
    """One partition's. ``newest`` is the greatest offset of a sample that its records are of."""

    def __init__(self) -> None:
        self.newest = -1
        self._asked: deque[Ends] = deque(maxlen=_ASKED_AT_MOST)
        self._since_s, self._until_s = float("inf"), float("-inf")

    def learned(self, offset: int) -> None:
        """A record of the sample at this offset was read."""
        self.newest = max(self.newest, offset)

    def begun_again(self, offset: int) -> None:
        """The offsets of the samples began again, and a record of the one at this offset was read."""
        self.newest = offset

    def told(self, ends: Ends) -> None:
        """The broker has said where the partitions end."""
        self._asked.append(ends)

    def read(self, position: int) -> None:
        """The partition was read to this position: all is known that there was when its end was asked."""
        while self._asked and position >= self._asked[0].end and self._attributed(self._asked[0]):
            at_s = self._asked.popleft().asked_s
            if at_s - self._until_s > BREAK_S:
                self._since_s = at_s
            self._until_s = at_s

    def lasted_s(self, since_s: float) -> float:
        """For how long, from that time on, the partition has been watched; below 0: not at all."""
        return self._until_s - max(since_s, self._since_s)

    def _attributed(self, ends: Ends) -> bool:
        """Whether no sample waits for being attributed: a stream that stands still is not a node that is silent."""
        return ends.samples_end is None or self.newest + 1 >= ends.samples_end
