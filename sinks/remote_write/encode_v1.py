"""Remote write 1.0: groups of samples -> a WriteRequest, before snappy.

A device's labels are encoded once. Each of its series consists of slices of those bytes with the row's name and labels
between them; the bytes behind the row's labels are shared by many series. As long as a node's tick has the sets of its
last one, it is encoded by joining these bytes with the new values between them.

Source: the message definitions of prometheus/prompb: WriteRequest{1 timeseries}, TimeSeries{1 labels, 2 samples},
Label{1 name, 2 value}, Sample{1 double value, 2 int64 timestamp}.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from sinks.remote_write.encoding import NAME, VALUE_BYTES, message, planned, sample_head, samples, text, varint
from sinks.series.model import Rows, SampleGroup, SeriesSet

_SERIES = b"\x0a"
_LABEL = 0x0A
_FIRST = 0x0A
_SECOND = 0x12


def pieces(groups: Sequence[SampleGroup]) -> Iterator[bytes]:
    """The uncompressed request with these groups, tick by tick."""
    for plan, tick in planned(groups, "v1", _plan):
        parts = plan.copy()
        parts[2::3] = samples(tick)
        yield b"".join(parts)


def _plan(sets: Sequence[SeriesSet], width: int) -> list[bytes]:
    """The parts of all rows of the sets, which each set keeps."""
    parts, key = list[bytes](), ("parts", width)
    for series in sets:
        series_parts = series.cache.get(key)
        if series_parts is None:
            series_parts = series.cache[key] = _parts(series, width)
        parts += series_parts
    return parts


def _parts(series: SeriesSet, width: int) -> tuple[bytes, ...]:
    """The parts of each row: its own bytes, the bytes that many rows share, and an empty place for the sample."""
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate(map(len, encoded), initial=0))
    blob, sample = b"".join(encoded), sample_head(width)
    rest = len(blob) + len(sample) - 1 + VALUE_BYTES + 1 + width
    tails: dict[int, bytes] = {}
    parts: list[bytes] = []
    for head, own, last in _row_heads(series.rows, tuple([name for name, _ in series.labels]), rest):
        if last not in tails:
            tails[last] = blob[ends[last] :] + sample
        start = 0
        for before, row_label in own:  # the device's labels, with those of the row in sorted order among them
            head += blob[start : ends[before]] + row_label
            start = ends[before]
        parts += (head, tails[last], b"")
    return tuple(parts)


class _RowHead(NamedTuple):
    """The bytes of a row before the device's labels; its own labels among them, sorted and encoded, each with the
    number of the device's labels that sort before it; and the last such number."""

    head: bytes
    own: tuple[tuple[int, bytes], ...]
    last: int


@lru_cache(maxsize=4096)
def _row_heads(rows: Rows, names: tuple[str, ...], rest: int) -> tuple[_RowHead, ...]:
    """How each row begins if the device's labels, of these names, and the sample take ``rest`` bytes."""
    heads: list[_RowHead] = []
    for row in rows:
        pairs = sorted(((NAME, row.name), *row.labels))
        own = [(bisect_left(names, name), label(name, value)) for name, value in pairs]
        first = [encoded for before, encoded in own if not before]
        size = rest + sum([len(encoded) for _, encoded in own])
        head = _shared(b"".join((_SERIES, varint(size), *first)))
        heads.append(_RowHead(head, tuple(own[len(first) :]), own[-1][0]))
    return tuple(heads)


_shared = lru_cache(maxsize=65536)(bytes)
"""Equal bytes as one object: those of a row recur on most devices, and far fewer objects are fetched from memory."""


@lru_cache(maxsize=65536)
def label(name: str, value: str) -> bytes:
    """An encoded label."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
