"""When a node is silent: no tick of it came while everything that was logged is known to be read. Pure.

In: how far a partition was read, and where the broker says that it ends, as does the log that it is made from. Out: for
how long it has been read to its end, and what becomes of a node of which nothing came.
"""

from collections import deque
from typing import NamedTuple

from streams.alerts import machine
from streams.alerts.machine import Step
from streams.alerts.memory import NodeAlerts
from streams.alerts.rules.rule import Rules

BREAK_S = 10.0
"""Between answers that are further apart than this, it is not known what came."""

FORGET_MS = 24 * 3_600_000
"""After so long without a tick a node is taken to be removed."""

LEAVING_MS = 120_000
"""For how long a node that was removed from the cluster may send ticks before its machine is off."""

_MOST_ASKED = 600


class Ends(NamedTuple):
    """Where the partition ended, and that of the samples, when the broker was asked."""

    asked_s: float
    end: int
    samples_end: int | None


class CaughtUp:
    """For how long one partition has been read to its end without a break.

    ``newest`` is the greatest offset of a sample that its records are of.
    """

    def __init__(self) -> None:
        self.newest = -1
        self._asked: deque[Ends] = deque(maxlen=_MOST_ASKED)
        self._since_s, self._until_s = float("inf"), float("-inf")

    def attributed(self, offset: int, *, new_log: bool = False) -> None:
        """A record of the sample at this offset was read. ``new_log``: the offsets of the samples began again."""
        self.newest = offset if new_log else max(self.newest, offset)

    def ends(self, ends: Ends) -> None:
        """The broker has said where the partitions end."""
        self._asked.append(ends)

    def read(self, position: int) -> None:
        """The partition was read to this position: all is known that there was when its end was asked.

        No sample may wait to be attributed: a stream that stands still is not a node that is silent.
        """
        while self._asked and position >= self._asked[0].end:
            samples_end = self._asked[0].samples_end
            if samples_end is not None and self.newest + 1 < samples_end:
                return
            at_s = self._asked.popleft().asked_s
            if at_s - self._until_s > BREAK_S:
                self._since_s = at_s
            self._until_s = at_s

    def lasted_s(self, since_s: float) -> float:
        """For how long, from that time on, the partition has been read to its end; below 0: not at all."""
        return self._until_s - max(since_s, self._since_s)


def without_ticks(state: NodeAlerts, rules: Rules, *, now_ms: int, removed_ms: int | None) -> Step:
    """What becomes of a node of which no tick came: it has left, or its silence fires.

    It has left if the cluster removed it (``removed_ms``, in log time), or after a day.
    """
    if machine.has_unwritten(state):
        return machine.announce(state)
    if removed_ms is not None and removed_ms + LEAVING_MS >= state.logged_ms:
        after = machine.retire(state, state.last_ts_ms)
    elif now_ms - state.logged_ms >= FORGET_MS:
        after = machine.retire(state, state.last_ts_ms + FORGET_MS)
    else:
        after = machine.silence(state, rules, now_ms - state.logged_ms)
    return Step(after) if after is not state else machine.expire(state, now_ms)
