"""Series in sets: those of one device under one label set. They change only when a pod or a metric comes or goes.

A set is made once and then only gets values, so a sink may keep on it what it computed from the labels.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from typing import Any, Literal, NamedTuple

from topics.metric import Kind, Labels

Subject = Literal["metrics", "by_pod", "info", "rest", "part", "errors", "pod", "alert", "usage"]
"""What the series of a set are about. Sets about different things may have the same labels; they share no name."""

Value = int | float

Key = str | tuple[str, ...]
"""The key of a set within its node: a device's uuid for its metrics, otherwise a kind and what it is about."""

_ROW_BYTES = 70
"""The approximate size of a sample in a request, with its name and its row's labels."""

STALE: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""Prometheus' staleness marker, the value that ends a series: a NaN with exactly these bits."""


_numbers = count()
_shared: Callable[[tuple[str, str]], tuple[str, str]] = lru_cache(maxsize=8192)(tuple)
"""One object for equal labels: the sets of a node have most of theirs in common."""


class Row(NamedTuple):
    """One series of a device: its name, its own labels without the device's, and its metadata.

    ``primary``: its value is one of ``metrics`` itself, and no other written profile has it. ``since_start``: it counts
    from its producer's start.
    """

    name: str
    labels: Labels = ()
    kind: Kind = "gauge"
    help: str = ""
    unit: str = ""
    primary: bool = True
    since_start: bool = False


Rows = tuple[Row, ...]


@dataclass(slots=True, eq=False)
class SeriesSet:
    """The series of one device: its labels, sorted by name, and the rows, whose own labels have other names.

    ``primaries``: the number of primary rows. ``bytes``: the approximate size of all rows in a request before it is
    compressed. ``start_ms``: when the producer of its last samples was started. ``node``: the node of the tick that has
    them; the sets of a node's tick are encoded together. ``cache``: what each encoder computed from labels and rows,
    under a key of its own. ``number`` is that of no other set: by it a cache refers to sets without keeping them.
    """

    labels: Labels
    rows: Rows
    subject: Subject = "metrics"
    primaries: int = field(init=False)
    bytes: int = field(init=False)
    start_ms: int = field(default=0, init=False)
    node: tuple[str, str] | None = field(default=None, init=False)
    cache: dict[Any, Any] = field(default_factory=dict, init=False)
    number: int = field(default_factory=_numbers.__next__, init=False)

    def __post_init__(self) -> None:
        self.labels = tuple(map(_shared, self.labels))
        self.primaries = sum([row.primary for row in self.rows])
        label_bytes = sum(map(len, chain.from_iterable(self.labels))) + 6 * len(self.labels)
        self.bytes = len(self.rows) * (label_bytes + _ROW_BYTES)

    def part(self, rows: Sequence[int]) -> "SeriesSet":
        """A set of some of its rows, by their numbers."""
        return SeriesSet(self.labels, tuple([self.rows[row] for row in rows]), self.subject)

    def keys(self) -> list[tuple[Labels, str, Labels]]:
        """A key for each row: its device's labels, its name, and its own labels."""
        return [(self.labels, row.name, row.labels) for row in self.rows]

    def series(self) -> list[Labels]:
        """All labels of each row, ``__name__`` included. No two series written at the same time have equal ones."""
        labels = {row_labels: sorted((*self.labels, *row_labels)) for row_labels in {row.labels for row in self.rows}}
        at = {row_labels: bisect_left(pairs, ("__name__",)) for row_labels, pairs in labels.items()}
        rows = [(row.name, labels[row.labels], at[row.labels]) for row in self.rows]
        return [(*pairs[:here], ("__name__", name), *pairs[here:]) for name, pairs, here in rows]

    def set_producer(self, start_ms: int, node: tuple[str, str] | None) -> None:
        """From now on its samples come from the producer of this node that was started at this time."""
        self.start_ms, self.node = start_ms, node

    @property
    def identity(self) -> tuple[Subject, Labels]:
        """Sets with equal identities have the same series, so only one of them is written at a time."""
        return self.subject, self.labels


class SampleGroup(NamedTuple):
    """The samples of a set at one time, in milliseconds since the epoch: a value for each row. STALE ends a series."""

    series: SeriesSet
    ts_ms: int
    values: Sequence[Value]

    @property
    def is_end(self) -> bool:
        """Whether it ends its series: its values are staleness markers."""
        return self.values[0] != self.values[0]

    def part(self, rows: Sequence[int]) -> "SampleGroup":
        """A group of some of its rows, by their numbers."""
        return SampleGroup(self.series.part(rows), self.ts_ms, [self.values[row] for row in rows])


def primaries(groups: Iterable[SampleGroup]) -> int:
    """The number of primary values in these groups, without staleness markers."""
    return sum([series.primaries for series, _, values in groups if values[0] == values[0]])


def samples_of(groups: Iterable[SampleGroup]) -> int:
    """The number of samples in these groups."""
    return sum([len(values) for _, _, values in groups])
