"""Tracks which records of each partition were read and are not finished, and so which offset may be committed.

In: the offsets that were read, and which of them are finished, in any order. Out: for each partition, the offset after
its finished prefix; for each topic, how many records were read, and how many of them were delivered, released and so
on. State: one window of open slots per partition. No clock, no Kafka.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Slot:
    """One record that was read: its partition and offset, its size in bytes, and the epoch in which it was read.

    ``outcome`` is counted when it is finished: ``delivered``, ``duplicate``, or ``dead_lettered`` with the reason.
    """

    __slots__ = ("done", "epoch", "offset", "outcome", "size", "tp")

    def __init__(self, tp: Partition, offset: int, epoch: int, size: int) -> None:
        self.tp, self.offset, self.epoch, self.size, self.done = tp, offset, epoch, size, False
        self.outcome: tuple[str, ...] = ("delivered",)


class Ledger:
    """The only source of offsets to commit.

    An epoch ends (:meth:`forget`) when partitions are revoked or before positions change. To finish a record of an
    earlier epoch has no effect, because that record is read again. ``ready`` is True while positions are known.
    ``counts`` has the number of records of each topic that were ``read``, had each outcome, or were ``released``, which
    means given back unfinished. ``held`` has the number of unfinished records of each topic.
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

    def forget(self) -> None:
        """End the epoch: what was read in it no longer counts."""
        self.epoch += 1
        self.ready = False
        self.open_bytes = 0
        for topic, records in self.held.items():
            self.counts[topic, "released"] += records
            self.held[topic] = 0
        self._expected, self._windows, self._prefix = {}, {}, {}

    def begin(self, positions: Mapping[Partition, int]) -> None:
        """Begin an epoch with these partitions and the next offset of each."""
        self.forget()
        self._expected = dict(positions)
        self._prefix = dict(positions)
        self._windows = {tp: deque() for tp in positions}
        self.ready = True

    def expected(self, tp: Partition) -> int | None:
        """The next offset to read, or None if the partition is not assigned."""
        return self._expected.get(tp)

    def position(self, tp: Partition) -> int | None:
        """The offset after the finished prefix, or None if the partition is not assigned."""
        return self._prefix.get(tp)

    def positions(self) -> dict[Partition, int]:
        """Every partition's :meth:`position`."""
        return dict(self._prefix)

    def last_unfinished(self, tp: Partition) -> int:
        """The offset of the last record that was read and may not be finished; -1 if all are."""
        window = self._windows.get(tp)
        return window[-1].offset if window else -1

    def admit(self, tp: Partition, offset: int, size: int) -> Slot:
        """Open a slot for a record of an assigned partition, at or after the expected offset."""
        slot = Slot(tp, offset, self.epoch, size)
        self._windows[tp].append(slot)
        self._expected[tp] = offset + 1
        self.open_bytes += size
        self.counts[tp.topic, "read"] += 1
        self.held[tp.topic] += 1
        return slot

    def skip(self, tp: Partition, offset: int) -> None:
        """Expect this offset of an assigned partition next, or a later one that is expected already: before it are only
        markers that no reader gets, such as the end of a transaction."""
        self._expected[tp] = max(offset, self._expected[tp])
        if not self._windows[tp]:
            self._prefix[tp] = self._expected[tp]

    def finish(self, slot: Slot) -> None:
        """Mark the record as finished. To do so twice, or after the epoch has ended, has no effect."""
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
        """Stop counting the bytes of a record that stays unfinished: the caller keeps only its offset."""
        if slot.epoch == self.epoch and not slot.done:
            self.open_bytes -= slot.size
            slot.size = 0
