"""How far the workloads of one partition have been read, in log time.

In: the records that are read, with their log times, and where the broker says that the partitions end. Out: the log
time up to which every record of gpu.workloads has been read. Pure: times called ``_s`` are seconds of the reader's
monotonic clock, those called ``_ms`` are log times.

It follows from three things, and none of them looks at a wall clock:

- a record of gpu.workloads: all that were logged earlier have been read;
- an end of the workloads that has been read to: when it was asked for, the broker's clock was at least the log time of
  any sample that was read, plus what has passed since it was read;
- the same end, and a sample below an end of the samples that the broker had given before: the sample was logged before
  the workloads' end was asked for. So one answer is enough for a backlog.

The clocks are those of the two partitions' leaders, which may be half a second apart. Where they are further apart, a
record of the workloads may come that was logged before a time to which they were taken as read: it is counted, and the
samples that went out before might be joined otherwise by a replay. A broker that gives records the time of their
producer (the embedded one) is one whose clock is behind by as long as a record is on its way.
"""

from collections import deque
from typing import NamedTuple

LEADERS_APART_MS = 500
"""By how much the clock of the workloads' leader may be behind that of the samples'."""

_MOST_ASKED = 64


class _Asked(NamedTuple):
    """An answer of the broker: when it was asked, where the workloads end, and where the samples had ended before."""

    at_s: float
    end: int
    samples_end: int


class WorkloadsProgress:
    """Of one partition. ``read_ms`` is what it is about; ``misordered`` counts records that came after all."""

    def __init__(self) -> None:
        self.read_ms = float("-inf")
        self.misordered = 0
        self._offset = self._newest_ms = -1
        self._sample: tuple[int, float] | None = None
        self._asked: deque[_Asked] = deque(maxlen=_MOST_ASKED)
        self._samples_end = self._backlog_end = 0

    def workloads(self, offset: int, logged_ms: int) -> int:
        """A record of the workloads was read. Its log time, which is never less than that of the one before."""
        if offset > self._offset and logged_ms <= self.read_ms:
            self.misordered += 1
        self._offset = max(self._offset, offset)
        self._newest_ms = max(self._newest_ms, logged_ms)
        self._raise(self._newest_ms - 1)
        return self._newest_ms

    def sample(self, offset: int, logged_ms: int, now_s: float) -> None:
        """A sample was read."""
        self._sample = logged_ms, now_s
        if offset < self._backlog_end:
            self._raise(logged_ms - LEADERS_APART_MS)

    def ends(self, asked_s: float, workloads: int, samples: int) -> None:
        """The broker has said where the partitions end. Before it was asked, it had answered the last time."""
        self._asked.append(_Asked(asked_s, workloads, self._samples_end))
        self._samples_end = samples

    def learned(self, position: int) -> None:
        """The workloads have been read up to an offset."""
        while self._asked and self._asked[0].end <= position:
            asked = self._asked.popleft()
            self._backlog_end = max(self._backlog_end, asked.samples_end)
            self._raise(self.reached_ms(asked.at_s))

    def reached_ms(self, asked_s: float) -> float:
        """Up to where the workloads are read by who reads them to an end that is asked for at a time."""
        if self._sample is None:
            return float("-inf")
        logged_ms, read_s = self._sample
        return logged_ms + (asked_s - read_s) * 1000 - LEADERS_APART_MS

    def forget(self) -> None:
        """Offsets may mean other records from now on; what was read has been read."""
        self._asked.clear()
        self._samples_end = self._backlog_end = 0

    def _raise(self, read_ms: float) -> None:
        self.read_ms = max(self.read_ms, read_ms)
