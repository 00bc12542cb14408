"""How long a partition has been read to its end: only then is a node silent that has no tick. No clock, no Kafka."""

from collections import deque
from typing import NamedTuple

BREAK_S = 10.0  # between answers of the broker that are further apart than this, it is not known what came
_MOST_ASKED = 600


class Ends(NamedTuple):
    """Where the partition ended, and that of the samples, when the broker was asked."""

    asked_s: float
    end: int
    samples_end: int | None


class CaughtUp:
    """For how long one partition has been read to its end without a break.
    ``newest`` is the greatest offset of a sample that its records are of."""

    def __init__(self) -> None:
        self.newest = -1
        self._asked: deque[Ends] = deque(maxlen=_MOST_ASKED)
        self._since_s, self._until_s = float("inf"), float("-inf")

    def attributed(self, offset: int, *, new_log: bool = False) -> None:
        """A record of the sample at this offset was read. ``new_log``: the offsets of the samples began again."""
        self.newest = offset if new_log else max(self.newest, offset)

    def ends(self, ends: Ends) -> None:
        self._asked.append(ends)

    def read(self, position: int) -> None:
        """The partition was read to this position: all is known that there was when its end was asked.
        No sample may wait to be attributed: a stream that stands still is not a node that is silent."""
        while self._asked and position >= self._asked[0].end:
            samples_end = self._asked[0].samples_end
            if samples_end is not None and self.newest + 1 < samples_end:
                return
            at_s = self._asked.popleft().asked_s
            if at_s - self._until_s > BREAK_S:
                self._since_s = at_s
            self._until_s = at_s

    @property
    def until_s(self) -> float:
        """When the broker was last asked for an end that has been read to, of the monotonic clock."""
        return self._until_s

    def lasted_s(self, since_s: float) -> float:
        """For how long, from that time on, the partition has been read to its end; below 0: not at all."""
        return self._until_s - max(since_s, self._since_s)


class PartitionState:
    """What is known of a partition of gpu.attributed: ``logged_ms`` is how far its log has come."""

    def __init__(self, number: int) -> None:
        self.number, self.logged_ms, self.caught_up = number, 0, CaughtUp()
