"""Series by the set: those of one device under one label set, which change only when a pod or a metric comes or goes.

A set is made once and then only given values, so whatever a sink works out for its labels it may keep on it.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from topics.metric import Kind, Labels

Subject = Literal["metrics", "by_pod", "info", "rest", "part", "errors", "pod", "alert", "usage"]
"""What the series of a set are of: sets about different things may have the same labels, and share no name."""

Value = int | float

Key = str | tuple[str, ...]
"""Of a set within its node: a device's uuid for its metrics, else a kind and what it is about."""

_ROW_BYTES = 70
"""About what a sample takes in a request, with its name and its own labels."""

STALE: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""The value that ends a series in Prometheus: a NaN with just these bits."""


class Row(NamedTuple):
    """One series of a device, without the device's labels, and what is said of it.

    ``primary``: a value of ``metrics``, not made of one, and in no other profile that is written. ``since_start``: it
    counts from its producer's start.
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
    """The series of one device: its labels (sorted by name, none of them a row's), the rows, what they are about.

    ``primaries`` counts the rows that are a value of ``metrics``, ``bytes`` is about what all rows take in a request,
    before it is compressed. ``start_ms`` is when the producer of its last samples was started, ``node`` whose tick they
    were in: the sets of a node's tick are written together. ``cache`` is the encoders': what they made of labels and
    rows, under a key of their own.
    """

    labels: Labels
    rows: Rows
    subject: Subject = "metrics"
    primaries: int = field(init=False)
    bytes: int = field(init=False)
    start_ms: int = field(default=0, init=False)
    node: tuple[str, str] | None = field(default=None, init=False)
    cache: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.primaries = sum([row.primary for row in self.rows])
        label_bytes = sum(map(len, chain.from_iterable(self.labels))) + 6 * len(self.labels)
        self.bytes = len(self.rows) * (label_bytes + _ROW_BYTES)

    def series(self) -> list[Labels]:
        """All labels of each row, its name among them: no two series that are written at a time have the same."""
        labels = {own: sorted((*self.labels, *own)) for own in {row.labels for row in self.rows}}
        at = {own: bisect_left(pairs, ("__name__",)) for own, pairs in labels.items()}
        rows = [(row.name, labels[row.labels], at[row.labels]) for row in self.rows]
        return [(*pairs[:here], ("__name__", name), *pairs[here:]) for name, pairs, here in rows]

    def begin(self, start_ms: int, node: tuple[str, str] | None) -> None:
        """A node's producer, which was started at a time, writes it from now on."""
        self.start_ms, self.node = start_ms, node

    @property
    def identity(self) -> tuple[Subject, Labels]:
        """Sets with the same one are of the same series: of each there is one value at a time."""
        return self.subject, self.labels


class SampleGroup(NamedTuple):
    """The samples of a set at one time, in milliseconds since the epoch: a value for each row. STALE ends a series."""

    series: SeriesSet
    ts_ms: int
    values: Sequence[Value]

    @property
    def is_end(self) -> bool:
        """Whether it ends its series."""
        return self.values[0] != self.values[0]

    def part(self, rows: Sequence[int]) -> "SampleGroup":
        """Some of its series, by their numbers."""
        series = SeriesSet(self.series.labels, tuple(self.series.rows[row] for row in rows), self.series.subject)
        return SampleGroup(series, self.ts_ms, [self.values[row] for row in rows])


def primaries(groups: Iterable[SampleGroup]) -> int:
    """How many values of ``metrics`` are in these groups; ends of series, which are all of a group's, are none."""
    return sum([series.primaries for series, _, values in groups if values[0] == values[0]])


def samples_of(groups: Iterable[SampleGroup]) -> int:
    """How many samples are in these groups."""
    return sum([len(values) for _, _, values in groups])
