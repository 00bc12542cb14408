"""What was read and not yet finished, per partition, in offset order; and so what may be committed.

In: the offsets that were read, and which of them are finished, in any order. Out: the offset after the last one of the
finished prefix, per partition; per topic, what became of the records: each that was read has ended, is held, or was
given back. State: one window of open slots per partition. No clock, no Kafka.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Slot:
    """One record that was read: its place, its size in bytes, and the epoch in which it was read.

    ``outcome`` is what becomes of it when it is finished: ``delivered``, ``duplicate``, or ``dead_lettered`` and why.
    """

    __slots__ = ("done", "epoch", "offset", "outcome", "size", "tp")

    def __init__(self, tp: Partition, offset: int, epoch: int, size: int) -> None:
        self.tp, self.offset, self.epoch, self.size, self.done = tp, offset, epoch, size, False
        self.outcome: tuple[str, ...] = ("delivered",)


class Ledger:
    """The only source of offsets to commit.

    An epoch ends (:meth:`forget`) whenever partitions go or positions are about to move: what was read in it may be
    finished later without effect, because somebody reads it again. ``ready`` says that positions are known.
    ``counts`` has how many records of a topic were ``read``, came to each ``outcome``, or were ``released``: given back
    unfinished. ``held`` has how many are not finished.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.ready = False
        self.finished = 0
        self.open_bytes = 0
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.held: Counter[str] = Counter()
        self._expected: dict[Partition, int] = {}
        self._windows: dict[Partition, deque[Slot]] = {}
        self._prefix: dict[Partition, int] = {}

    def forget(self) -> int:
        """End the epoch: nothing read in it counts any more. Returns the number of the new one."""
        self.epoch += 1
        self.ready = False
        self.open_bytes = 0
        for topic, records in self.held.items():
            self.counts[topic, "released"] += records
            self.held[topic] = 0
        self._expected, self._windows, self._prefix = {}, {}, {}
        return self.epoch

    def begin(self, positions: Mapping[Partition, int]) -> None:
        """Read on from these positions: for each partition, the next offset."""
        self.forget()
        self._expected = dict(positions)
        self._prefix = dict(positions)
        self._windows = {tp: deque() for tp in positions}
        self.ready = True

    def expected(self, tp: Partition) -> int | None:
        """The next offset to read, or None if the partition is not ours."""
        return self._expected.get(tp)

    def position(self, tp: Partition) -> int | None:
        """The offset after the last one of the finished prefix, or None if the partition is not ours."""
        return self._prefix.get(tp)

    def positions(self) -> dict[Partition, int]:
        """Every partition's :meth:`position`."""
        return dict(self._prefix)

    def admit(self, tp: Partition, offset: int, size: int) -> Slot:
        """Open a slot for a record of a partition that is ours, at or after the expected offset."""
        slot = Slot(tp, offset, self.epoch, size)
        self._windows[tp].append(slot)
        self._expected[tp] = offset + 1
        self.open_bytes += size
        self.counts[tp.topic, "read"] += 1
        self.held[tp.topic] += 1
        return slot

    def skip(self, tp: Partition, offset: int) -> None:
        """Nothing is left to read before this offset, but what no reader is given, such as the end of a transaction."""
        if offset > self._expected.get(tp, offset):
            self._expected[tp] = offset
        if tp in self._prefix and not self._windows[tp]:
            self._prefix[tp] = self._expected[tp]

    def finish(self, slot: Slot) -> None:
        """The record needs nothing more. Finishing twice, or after the epoch has ended, has no effect."""
        if slot.epoch != self.epoch or slot.done:
            return
        slot.done = True
        self.finished += 1
        self.open_bytes -= slot.size
        self.counts[slot.tp.topic, *slot.outcome] += 1
        self.held[slot.tp.topic] -= 1
        window = self._windows[slot.tp]
        while window and window[0].done:
            self._prefix[slot.tp] = window.popleft().offset + 1

    def set_aside(self, slot: Slot) -> None:
        """The record is not finished, but its bytes are no longer held: only its offset waits."""
        if slot.epoch == self.epoch and not slot.done:
            self.open_bytes -= slot.size
            slot.size = 0

    def unfinished(self) -> int:
        """How many records were read and are not finished."""
        return sum(not slot.done for window in self._windows.values() for slot in window)
