"""What the receiver is known not to take: series that it refused lately, and requests above a size. Pure.

In: refusals, and the time of a clock that never steps back. Out: what of a tick is sent; how large a request may be.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sinks.blocks import Block, Group, Row
from sinks.remote_write.policy import Refusal
from sinks.tenants import Labels

LEFT_OUT = "left_out"
"""The reason of a record of which all is left out."""

LEFT_OUT_S = 600.0
"""A series that was refused is not sent for so long, and then tried again."""

GROWS_EVERY_S = 60.0
"""So often the size of requests grows by a tenth, while such requests are accepted."""

Refused = tuple[Group, Refusal]
"""Series of one device, and why they are refused."""

_Key = tuple[Labels, str, Labels]
"""A series: its device's labels, its name, its own labels."""


class _Entry(NamedTuple):
    refusal: Refusal
    until_s: float


class _Cut(NamedTuple):
    """How a block is cut, until other series are left out: the numbers of the rows that are sent, and that are not.

    ``block`` has those that are sent.
    """

    version: int
    block: Block
    sent: tuple[int, ...]
    left: tuple[tuple[Refusal, tuple[int, ...]], ...]


class LeftOut:
    """The series that are left out."""

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._version = 0
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, group: Group, refusal: Refusal, now_s: float) -> None:
        """Series were refused."""
        entry = _Entry(refusal, now_s + LEFT_OUT_S)
        self._entries |= {_key(group.block, row): entry for row in group.block.rows}
        self._next_s = min(self._next_s, entry.until_s)
        self._version += 1

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        if now_s < self._next_s:
            return
        self._entries = {key: entry for key, entry in self._entries.items() if entry.until_s > now_s}
        self._next_s = min((entry.until_s for entry in self._entries.values()), default=math.inf)
        self._version += 1

    def cut(self, groups: Sequence[Group]) -> tuple[Sequence[Group], list[Refused]]:
        """What of these groups is sent, and what is left out."""
        if not self._entries:
            return groups, []
        sent: list[Group] = []
        left: list[Refused] = []
        for group in groups:
            cut: _Cut | None = group.block.cache.get(self)
            if cut is None or cut.version != self._version:
                cut = group.block.cache[self] = self._cut(group)
            if not cut.left:
                sent.append(group)
                continue
            left += [(group.part(rows), refusal) for refusal, rows in cut.left]
            if cut.sent:
                sent.append(Group(cut.block, group.ts_ms, [group.values[row] for row in cut.sent]))
        return sent, left

    def _cut(self, group: Group) -> _Cut:
        sent: list[int] = []
        left: dict[Refusal, list[int]] = {}
        for number, row in enumerate(group.block.rows):
            entry = self._entries.get(_key(group.block, row))
            (sent if entry is None else left.setdefault(entry.refusal, [])).append(number)
        block = group.part(sent).block if left else group.block
        return _Cut(self._version, block, tuple(sent), tuple((why, tuple(rows)) for why, rows in left.items()))


def _key(block: Block, row: Row) -> _Key:
    return block.labels, row.name, row.labels


class RequestSize:
    """How many samples a request may have, as the receiver has shown.

    Half of what was too large, then a tenth more each minute, for as long as requests of that size are accepted.
    """

    def __init__(self) -> None:
        self.samples = math.inf
        self._grown_s = 0.0

    def too_large(self, samples: int, now_s: float) -> None:
        """A request of so many samples was too large."""
        self.samples = min(self.samples, max(1, samples // 2))
        self._grown_s = now_s

    def taken(self, samples: int, now_s: float) -> None:
        """A request of so many samples was accepted."""
        if samples >= 0.9 * self.samples and now_s - self._grown_s >= GROWS_EVERY_S:
            self.samples += max(1.0, self.samples // 10)
            self._grown_s = now_s
