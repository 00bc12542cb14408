"""The ticks that a node has not sent yet, bounded by bytes and by age: the oldest is dropped. Pure: the time is given.

In: encoded ticks. Out: the oldest one, and those that were dropped.
State: the ticks, oldest first. The newest few are not compressed, so that a tick that is sent at once costs nothing
extra. Those that wait longer are compressed, each by itself; a tick of many devices becomes a tenth as large.
"""

from collections import deque
from dataclasses import dataclass, replace

import cramjam

from producers.records import Snapshot

PLAIN_TICKS = 4  # how many of the newest ticks are not compressed, if there is room
MIN_COMPRESSED_BYTES = 512  # a smaller tick is not worth compressing
_CROWDED_SHARE = 7 / 8  # a buffer fuller than this has no room for several uncompressed ticks in flight


@dataclass(frozen=True, slots=True, eq=False)
class WaitingTick:
    """An encoded tick, the snapshots that it names, and the time of its creation on a clock that never steps back."""

    value: bytes
    snapshots: tuple[Snapshot, ...]
    made_at_s: float
    compressed: bool = False


def compressed(tick: WaitingTick) -> WaitingTick:
    """The tick with its value compressed; the same tick if that would not be smaller."""
    if tick.compressed or len(tick.value) < MIN_COMPRESSED_BYTES:
        return tick
    value = bytes(cramjam.zstd.compress(tick.value, level=1))
    return replace(tick, value=value, compressed=True) if len(value) < len(tick.value) else tick


class RetryBuffer:
    """The ticks of one node that wait to be sent.

    ``max_bytes`` bounds the sum of their values, compressed or not, and of ``in_flight_bytes``, which the owner sets to
    the bytes that are sent and not yet acknowledged. ``max_age_s`` bounds how long a tick waits. The newest tick is
    never dropped for its size: a buffer smaller than a tick holds one tick.
    """

    def __init__(self, *, max_bytes: int = 16 * 1024 * 1024, max_age_s: float = 900.0) -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.in_flight_bytes = 0
        self.bytes = 0
        self._compressed_ticks: deque[WaitingTick] = deque()
        self._plain_ticks: deque[WaitingTick] = deque()

    def __len__(self) -> int:
        return len(self._compressed_ticks) + len(self._plain_ticks)

    @property
    def crowded(self) -> bool:
        """Whether a compressed tick should wait until those in flight are acknowledged, because it needs more room when
        it is sent."""
        return self.bytes + self.in_flight_bytes > self.max_bytes * _CROWDED_SHARE

    def capacity(self, value: bytes) -> int:
        """How many ticks like this one fit."""
        waiting = compressed(WaitingTick(value, (), 0.0)).value
        return 1 + max(0, self.max_bytes - len(value)) // max(1, len(waiting))

    def head(self) -> WaitingTick | None:
        """The oldest tick, compressed or not; it stays in the buffer."""
        return (
            self._compressed_ticks[0] if self._compressed_ticks else self._plain_ticks[0] if self._plain_ticks else None
        )

    def push(self, tick: WaitingTick) -> list[WaitingTick]:
        """Add the newest tick; returns the ticks that were dropped because there was no room."""
        self._plain_ticks.append(tick)
        self.bytes += len(tick.value)
        while len(self._plain_ticks) > 1 and (len(self._plain_ticks) > PLAIN_TICKS or self._is_over_limit()):
            plain = self._plain_ticks.popleft()
            self._compressed_ticks.append(compressed(plain))
            self.bytes += len(self._compressed_ticks[-1].value) - len(plain.value)
        dropped = []
        while len(self) > 1 and self._is_over_limit():
            dropped.append(self._pop_oldest())
        return dropped

    def expire(self, now_s: float) -> list[WaitingTick]:
        """Drop the ticks that have waited for longer than ``max_age_s``, and return them."""
        expired = []
        while (head := self.head()) is not None and now_s - head.made_at_s > self.max_age_s:
            expired.append(self._pop_oldest())
        return expired

    def pop(self) -> WaitingTick:
        """Remove the oldest tick and return it uncompressed. Raises IndexError if the buffer is empty."""
        tick = self._pop_oldest()
        if not tick.compressed:
            return tick
        return replace(tick, value=bytes(cramjam.zstd.decompress(tick.value)), compressed=False)

    def clear(self) -> None:
        self._compressed_ticks.clear()
        self._plain_ticks.clear()
        self.bytes = 0

    def _is_over_limit(self) -> bool:
        return self.bytes + self.in_flight_bytes > self.max_bytes

    def _pop_oldest(self) -> WaitingTick:
        tick = self._compressed_ticks.popleft() if self._compressed_ticks else self._plain_ticks.popleft()
        self.bytes -= len(tick.value)
        return tick
