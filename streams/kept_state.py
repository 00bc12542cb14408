"""What a worker knows of a key's state in a compacted topic, through which workers hand it on. No clock, no Kafka.

A worker writes the state when it has changed, and finishes the records behind it once the broker has acknowledged it.
The next worker begins with the latest state that it reads, and reads again what was not finished. These rules hold:

- A state has an order. The latest by order counts, not the last in the topic.
- A worker that has lost the partition may still write. If the last state in the topic is not later than the owner's,
  or a deletion, the owner writes its own again, before a compaction leaves only the last one.
- A later state that is read after other records of the key shows that this worker has lost the partition. If it gets
  the partition back, it begins with that state.
- A worker reads its own writes, too. It knows them by their offset.
- A state that is too large for the broker counts as written: it would be refused after each restart.
"""

from typing import Generic, TypeVar

Order = tuple[int, ...]

S = TypeVar("S")


class KeptState(Generic[S]):
    """The state of a key. ``latest`` is the latest that the broker has of any worker, and ``order`` its order.

    ``is_fresh``: nothing of the key was read since its state was. ``stale``: the last state in the topic is another
    worker's, and not later than this worker's. ``writing``: a write is not acknowledged yet.
    """

    __slots__ = ("_last_offset", "is_fresh", "latest", "order", "stale", "writing")

    def __init__(self, latest: S, order: Order = ()) -> None:
        self.latest, self.order, self._last_offset = latest, order, -1
        self.is_fresh, self.stale, self.writing = True, False, False

    def current_order(self) -> Order:
        """The order of the state that the worker has, written or not."""
        return self.order

    def read(self, offset: int, state: S, order: Order = ()) -> bool:
        """Note a state, or its deletion, that was read from the topic. Returns whether the worker goes on from it."""
        current_order, is_last = self.current_order(), offset > self._last_offset
        is_equal = order == current_order or state is None
        is_used = self.is_fresh and (order > current_order or (is_equal and is_last and not self.writing))
        if is_used or order > self.order:
            self.latest, self.order = state, order
        if is_used or is_last:
            self.stale = not is_last if is_used else order <= current_order
        self._last_offset = max(self._last_offset, offset)
        return is_used

    def wrote(self, offset: int | None, state: S, order: Order = ()) -> None:
        """Note that the broker has acknowledged a state of this worker, or its deletion, or (no offset) refused it."""
        self.writing = False
        if order >= self.order or state is None:
            self.latest, self.order = state, order
        if offset is not None and offset < self._last_offset:
            return
        if offset is not None:
            self._last_offset = offset
        self.stale = order < self.order <= self.current_order()  # a later one was read meanwhile
