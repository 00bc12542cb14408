"""The ticks that a node has not sent yet, bounded by bytes and by age: the oldest is dropped. Pure: the time is given.

In: encoded ticks. Out: the oldest one, and those that were dropped.
State: the ticks, oldest first. The newest few are kept as they came, so that a tick that is sent at once costs nothing
more. Those that wait longer are compressed, each by itself; a tick of many devices becomes a tenth as large.
"""

from collections import deque
from dataclasses import dataclass, replace

import cramjam

from producers.records import Snapshot

PLAIN_TICKS = 4  # how many of the newest ticks are not compressed, if there is room
LEAST_BYTES = 512  # what is smaller is not worth compressing
_CROWDED = 7 / 8  # a buffer fuller than this has no room for several ticks in flight as they came


@dataclass(frozen=True, slots=True, eq=False)
class WaitingTick:
    """An encoded tick, the snapshots it names, and when it was made on a clock that never steps back."""

    value: bytes
    snapshots: tuple[Snapshot, ...]
    made_at_s: float
    compressed: bool = False


def compressed(tick: WaitingTick) -> WaitingTick:
    """A tick with its value as it waits; the same if that would not be smaller."""
    if tick.compressed or len(tick.value) < LEAST_BYTES:
        return tick
    value = bytes(cramjam.zstd.compress(tick.value, level=1))
    return replace(tick, value=value, compressed=True) if len(value) < len(tick.value) else tick


class RetryBuffer:
    """The ticks of one node that wait to be sent.

    ``max_bytes`` bounds their values, as they wait, together with ``in_flight_bytes``, which the owner keeps at what it
    has sent and has not seen acknowledged; ``max_age_s`` bounds how long one waits. The newest tick is never the one
    that gives way for bytes: a buffer smaller than a tick holds one tick.
    """

    def __init__(self, *, max_bytes: int = 16 * 1024 * 1024, max_age_s: float = 900.0) -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.in_flight_bytes = 0
        self.bytes = 0
        self._old: deque[WaitingTick] = deque()
        self._new: deque[WaitingTick] = deque()

    def __len__(self) -> int:
        return len(self._old) + len(self._new)

    @property
    def crowded(self) -> bool:
        """Whether a compressed tick should wait until those in flight are acknowledged, as it will need more room."""
        return self.bytes + self.in_flight_bytes > self.max_bytes * _CROWDED

    def capacity(self, value: bytes) -> int:
        """How many ticks like this one fit."""
        waiting = compressed(WaitingTick(value, (), 0.0)).value
        return 1 + max(0, self.max_bytes - len(value)) // max(1, len(waiting))

    def head(self) -> WaitingTick | None:
        """The oldest tick, as it waits; it stays in the buffer."""
        return self._old[0] if self._old else self._new[0] if self._new else None

    def push(self, tick: WaitingTick) -> list[WaitingTick]:
        """Add the newest tick; gives those that were dropped because there was no room."""
        self._new.append(tick)
        self.bytes += len(tick.value)
        while len(self._new) > 1 and (len(self._new) > PLAIN_TICKS or self._over()):
            plain = self._new.popleft()
            self._old.append(compressed(plain))
            self.bytes += len(self._old[-1].value) - len(plain.value)
        gone = []
        while len(self) > 1 and self._over():
            gone.append(self._take())
        return gone

    def expire(self, now_s: float) -> list[WaitingTick]:
        """Drop and give what has waited for longer than ``max_age_s``."""
        gone = []
        while (head := self.head()) is not None and now_s - head.made_at_s > self.max_age_s:
            gone.append(self._take())
        return gone

    def pop(self) -> WaitingTick:
        """Take the oldest tick, as it came; IndexError if there is none."""
        tick = self._take()
        if not tick.compressed:
            return tick
        return replace(tick, value=bytes(cramjam.zstd.decompress(tick.value)), compressed=False)

    def clear(self) -> None:
        self._old.clear()
        self._new.clear()
        self.bytes = 0

    def _over(self) -> bool:
        return self.bytes + self.in_flight_bytes > self.max_bytes

    def _take(self) -> WaitingTick:
        tick = self._old.popleft() if self._old else self._new.popleft()
        self.bytes -= len(tick.value)
        return tick
