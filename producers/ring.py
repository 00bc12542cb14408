"""What a node has not sent yet, bounded by bytes and by age: the oldest gives way. Pure: it is told the time.

In: encoded ticks. Out: the oldest one, and those that gave way, with the reason.
State: the ticks, oldest first. The newest few are as they came, so that a tick that is sent at once costs nothing more;
those that wait longer are compressed, each by itself: the ticks of many devices to a tenth.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import cramjam

from producers.numbering import Snapshot

DropReason = Literal["buffer_full", "buffer_age", "stopped"]

PLAIN_TICKS = 4
"""So many of the newest ticks are as they came, if there is room."""

LEAST_BYTES = 512
"""What is smaller is not worth compressing."""

_CROWDED = 7 / 8
"""A ring that is fuller than this share has no room for several ticks that are in flight as they came."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """An encoded tick, the snapshots it names, and when it was made on a clock that never steps back."""

    value: bytes
    snapshots: tuple[Snapshot, ...]
    made_at_s: float
    compressed: bool = False


class Dropped(NamedTuple):
    """A tick that gave way, and why."""

    tick: Waiting
    reason: DropReason


def compressed(tick: Waiting) -> Waiting:
    """A tick with its value as it waits; the same where that would not be smaller."""
    if tick.compressed or len(tick.value) < LEAST_BYTES:
        return tick
    value = bytes(cramjam.zstd.compress(tick.value, level=1))
    return replace(tick, value=value, compressed=True) if len(value) < len(tick.value) else tick


class Ring:
    """The ticks of one node that wait to be sent.

    ``max_bytes`` bounds their values, as they wait, together with ``in_flight_bytes``, which the owner keeps at what it
    has sent and has not seen acknowledged; ``max_age_s`` bounds how long one waits. The newest tick is never the one
    that gives way for bytes: a buffer smaller than a tick holds one tick.
    """

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.in_flight_bytes = 0
        self.bytes = 0
        self._old: deque[Waiting] = deque()
        self._new: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._old) + len(self._new)

    @property
    def crowded(self) -> bool:
        """Whether a compressed tick should wait until those in flight are acknowledged, as it will need more room."""
        return self.bytes + self.in_flight_bytes > self.max_bytes * _CROWDED

    def capacity(self, value: bytes) -> int:
        """How many ticks like this one fit."""
        waiting = compressed(Waiting(value, (), 0.0)).value
        return 1 + max(0, self.max_bytes - len(value)) // max(1, len(waiting))

    def head(self) -> Waiting | None:
        """The oldest tick, left where it is and as it waits."""
        return self._old[0] if self._old else self._new[0] if self._new else None

    def push(self, tick: Waiting) -> Iterator[Dropped]:
        """Add the newest tick; gives those that gave way. Run it to its end."""
        self._new.append(tick)
        self.bytes += len(tick.value)
        while len(self._new) > 1 and (len(self._new) > PLAIN_TICKS or self._over()):
            self._compress(self._new.popleft())
        while len(self) > 1 and self._over():
            yield Dropped(self._take(), "buffer_full")

    def expire(self, now_s: float) -> Iterator[Dropped]:
        """Drop what has waited for longer than ``max_age_s``. Run it to its end."""
        while (head := self.head()) is not None and now_s - head.made_at_s > self.max_age_s:
            yield Dropped(self._take(), "buffer_age")

    def pop(self) -> Waiting:
        """Take the oldest tick, as it came; IndexError where there is none."""
        tick = self._take()
        if not tick.compressed:
            return tick
        return replace(tick, value=bytes(cramjam.zstd.decompress(tick.value)), compressed=False)

    def clear(self) -> None:
        """Forget all ticks."""
        self._old.clear()
        self._new.clear()
        self.bytes = 0

    def _over(self) -> bool:
        return self.bytes + self.in_flight_bytes > self.max_bytes

    def _compress(self, tick: Waiting) -> None:
        smaller = compressed(tick)
        self.bytes += len(smaller.value) - len(tick.value)
        self._old.append(smaller)

    def _take(self) -> Waiting:
        """The oldest tick, as it waits."""
        tick = self._old.popleft() if self._old else self._new.popleft()
        self.bytes -= len(tick.value)
        return tick
