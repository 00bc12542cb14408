"""What a node has not sent yet, bounded by bytes and by age: the oldest gives way. Pure: it is told the time.

In: encoded ticks. Out: the oldest one, and those that gave way, with the reason.
State: the ticks, oldest first.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from producers.numbering import Snapshot

DropReason = Literal["buffer_full", "buffer_age", "stopped"]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """An encoded tick, the snapshots it names, and when it was made on a clock that never steps back."""

    value: bytes
    snapshots: tuple[Snapshot, ...]
    made_at_s: float


class Dropped(NamedTuple):
    """A tick that gave way, and why."""

    tick: Waiting
    reason: DropReason


class Ring:
    """The ticks of one node that wait to be sent.

    ``max_bytes`` bounds their values together with ``in_flight_bytes``, which the owner keeps at what it has sent and
    has not seen acknowledged; ``max_age_s`` bounds how long one waits. The newest tick is never the one that gives way
    for bytes: a buffer smaller than a tick holds one tick.
    """

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.in_flight_bytes = 0
        self.bytes = 0
        self._ticks: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._ticks)

    def head(self) -> Waiting | None:
        """The oldest tick, left where it is."""
        return self._ticks[0] if self._ticks else None

    def push(self, tick: Waiting) -> Iterator[Dropped]:
        """Add the newest tick; gives those that gave way. Run it to its end."""
        self._ticks.append(tick)
        self.bytes += len(tick.value)
        while len(self._ticks) > 1 and self.bytes + self.in_flight_bytes > self.max_bytes:
            yield Dropped(self.pop(), "buffer_full")

    def expire(self, now_s: float) -> Iterator[Dropped]:
        """Drop what has waited for longer than ``max_age_s``. Run it to its end."""
        while self._ticks and now_s - self._ticks[0].made_at_s > self.max_age_s:
            yield Dropped(self.pop(), "buffer_age")

    def pop(self) -> Waiting:
        """Take the oldest tick; IndexError where there is none."""
        tick = self._ticks.popleft()
        self.bytes -= len(tick.value)
        return tick
