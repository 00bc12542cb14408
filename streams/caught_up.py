"""For how long a partition has been read to its end: until it is, no node counts as silent. No clock, no Kafka."""

from collections import deque
from math import inf
from typing import NamedTuple

BREAK_S = 10.0  # if two answers of the broker are further apart, it is not known what came between them
_MAX_ENDS = 600


class Ends(NamedTuple):
    """Where the partition, and that of gpu.samples with its number, ended when the broker was asked."""

    asked_s: float
    end: int
    samples_end: int | None


class CaughtUp:
    """For how long one partition has been read to its end without a break.
    ``newest`` is the greatest offset of the samples that its records were made of. If no sample has come for
    ``no_samples_s`` the nodes are silent, whether or not the last samples were attributed. ``handled`` is the offset of
    the last record that the worker has handled."""

    def __init__(self, no_samples_s: float = inf) -> None:
        self.newest = -1
        self._no_samples_s = no_samples_s
        self._samples_end: int | None = None
        self._samples_end_since_s = -inf
        self.forget()

    def forget(self) -> None:
        """The partition is read again, from the last commit. Ticks before that do not come again: ``newest`` stays."""
        self._ends: deque[Ends] = deque(maxlen=_MAX_ENDS)
        self._since_s, self._until_s = inf, -inf
        self.handled = -1

    def attributed(self, offset: int, *, new_log: bool = False) -> None:
        """The record that was made of the sample at this offset was read. ``new_log``: gpu.samples was created
        again, so its offsets began again."""
        self.newest = offset if new_log else max(self.newest, offset)

    def ends(self, ends: Ends) -> None:
        """The broker has reported where the partitions end."""
        self._ends.append(ends)
        if ends.samples_end != self._samples_end:
            self._samples_end, self._samples_end_since_s = ends.samples_end, ends.asked_s

    def read(self, position: int, last_unfinished: int = -1) -> None:
        """The partition was read to this position, and so to each end that is not above it. While a record that was
        read waits to be handled, no end counts.
        An end does not count while a sample before it is not attributed: if the attribution stream stands still, the
        nodes are not silent. It counts all the same if no sample has come for long: a last sample that was a dead
        letter, or that retention deleted, is never attributed."""
        if last_unfinished > self.handled:
            return
        while self._ends and position >= self._ends[0].end:
            samples_end = self._ends[0].samples_end
            still_come = self._ends[-1].asked_s - self._samples_end_since_s < self._no_samples_s
            if samples_end is not None and self.newest + 1 < samples_end and still_come:
                return
            asked_s = self._ends.popleft().asked_s
            if asked_s - self._until_s > BREAK_S:
                self._since_s = asked_s
            self._until_s = asked_s

    def age_s(self, now_s: float) -> float:
        """For how many seconds the partition may have records that were not read: since the broker was asked for the
        last end that has been reached; infinite until one has been."""
        return now_s - self._until_s

    def lasted_s(self, since_s: float) -> float:
        """For how many seconds, from that time on, the partition has been read to its end; below 0: not at all."""
        return self._until_s - max(since_s, self._since_s)


class PartitionState:
    """The state of a partition of gpu.attributed. ``logged_ms`` is the log time of the newest record that was read."""

    def __init__(self, number: int, no_samples_s: float) -> None:
        self.number, self.logged_ms, self.caught_up = number, 0, CaughtUp(no_samples_s)

    def forget(self) -> None:
        """The records since the last commit are read again: go back to what the broker has."""
        self.logged_ms = 0
        self.caught_up.forget()
