"""Remote write 1.0: groups of samples -> a WriteRequest, before snappy.

A device's labels are encoded once, when it is first seen with them; every series of it is a cut through those bytes
with the row's name and labels put in. What is behind them is the same bytes for many series. A node's tick is one join
of all that with its values between, as long as it has the sets that it had last.

Source: the message definitions of prometheus/prompb: WriteRequest{1 timeseries}, TimeSeries{1 labels, 2 samples},
Label{1 name, 2 value}, Sample{1 double value, 2 int64 timestamp}.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from sinks.remote_write.plans import planned, samples
from sinks.remote_write.protobuf import NAME, VALUE_BYTES, message, sample_head, text, varint
from sinks.series.model import Rows, SampleGroup, SeriesSet

_SERIES = b"\x0a"
_LABEL = 0x0A
_FIRST = 0x0A
_SECOND = 0x12


class _PlanV1(NamedTuple):
    """How some sets are written together: what is before each value, in two parts, and a hole."""

    sets: tuple[SeriesSet, ...]
    parts: list[bytes]


def encode(groups: Sequence[SampleGroup]) -> bytes:
    """The request that writes these groups, uncompressed."""
    return b"".join(pieces(groups))


def pieces(groups: Sequence[SampleGroup]) -> Iterator[bytes]:
    """The same, a tick at a time."""
    for plan, some in planned(groups, "v1", _plan):
        parts = plan.parts.copy()
        parts[2::3] = samples(some)
        yield b"".join(parts)


def _plan(sets: tuple[SeriesSet, ...], width: int) -> _PlanV1:
    parts: list[bytes] = []
    for series in sets:
        found = series.cache.get(("parts", width))
        if found is None:
            found = series.cache["parts", width] = _parts(series, width)
        parts += found
    return _PlanV1(sets, parts)


def _parts(series: SeriesSet, width: int) -> list[bytes]:
    """What is before the value of each series: the first part is its own, the second is that of many."""
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate((len(one) for one in encoded), initial=0))
    blob, sample = b"".join(encoded), sample_head(width)
    rest = len(blob) + len(sample) - 1 + VALUE_BYTES + 1 + width
    tails: dict[int, bytes] = {}
    parts: list[bytes] = []
    for own, size, last in _own_labels(series.rows, tuple([name for name, _ in series.labels])):
        head, start = [_SERIES, _varint(rest + size)], 0
        for before, one in own:  # the device's labels, and those of the row where they sort
            head += (blob[start : ends[before]], one)
            start = ends[before]
        if last not in tails:
            tails[last] = blob[start:] + sample
        parts += (b"".join(head), tails[last], b"")
    return parts


class _OwnLabels(NamedTuple):
    """The labels of a row itself, sorted, each with the number of the device's labels that sort before it; the bytes
    that they take, and the last such number."""

    labels: tuple[tuple[int, bytes], ...]
    size: int
    last: int


@lru_cache(maxsize=1024)
def _own_labels(rows: Rows, names: tuple[str, ...]) -> tuple[_OwnLabels, ...]:
    found: list[_OwnLabels] = []
    for row in rows:
        pairs = sorted(((NAME, row.name), *row.labels))
        own = tuple([(bisect_left(names, name), label(name, value)) for name, value in pairs])
        found.append(_OwnLabels(own, sum([len(one) for _, one in own]), own[-1][0]))
    return tuple(found)


_varint = lru_cache(maxsize=4096)(varint)


@lru_cache(maxsize=65536)
def label(name: str, value: str) -> bytes:
    """One label of a series."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
