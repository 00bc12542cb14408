"""Remote write 1.0: groups of samples -> a WriteRequest, before snappy.

A device's labels are encoded once, when it is first seen with them; every series of it is a cut through those bytes
with the row's name and labels put in, and every tick of it one ``struct.pack`` of values between them.

Source: the message definitions of prometheus/prompb: WriteRequest{1 timeseries}, TimeSeries{1 labels, 2 samples},
Label{1 name, 2 value}, Sample{1 double value, 2 int64 timestamp}.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

from sinks.remote_write.protobuf import NAME, VALUE_BYTES, message, sample_head, text, timestamp, ts_width, varint
from sinks.series.model import Rows, SampleGroup, SeriesSet

_SERIES = b"\x0a"
_LABEL = 0x0A
_FIRST = 0x0A
_SECOND = 0x12


class _Packed(NamedTuple):
    """How a set is written: the packer, and its arguments with holes at every second and third place."""

    pack: Struct
    arguments: list[Any]


def encode(groups: Sequence[SampleGroup]) -> bytes:
    """The request that writes these groups, uncompressed."""
    out = []
    for series, ts_ms, values in groups:
        width = ts_width(ts_ms)
        packed: _Packed | None = series.cache.get(("v1", width))
        if packed is None:
            packed = series.cache["v1", width] = _prepare(series, width)
        arguments = packed.arguments.copy()
        arguments[1::3] = values
        arguments[2::3] = [timestamp(ts_ms)] * len(values)
        out.append(packed.pack.pack(*arguments))
    return b"".join(out)


def _prepare(series: SeriesSet, width: int) -> _Packed:
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate((len(one) for one in encoded), initial=0))
    blob, sample = b"".join(encoded), sample_head(width)
    rest = len(sample) - 1 + VALUE_BYTES + 1 + width
    arguments: list[Any] = []
    for own in _own_labels(series.rows, tuple(name for name, _ in series.labels)):
        pieces, start = [], 0
        for before, one in own:  # the device's labels, and those of the row where they sort
            pieces += [blob[start : ends[before]], one]
            start = ends[before]
        labels = b"".join((*pieces, blob[start:]))
        arguments += [b"".join((_SERIES, varint(len(labels) + rest), labels, sample)), 0.0, b""]
    pattern = "".join(f"{len(head)}sd{1 + width}s" for head in arguments[::3])
    return _Packed(Struct(f"<{pattern}"), arguments)


@lru_cache(maxsize=1024)
def _own_labels(rows: Rows, names: tuple[str, ...]) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    """The labels of each row itself, sorted, each with the number of the device's labels that sort before it."""
    sorted_labels = [sorted(((NAME, row.name), *row.labels)) for row in rows]
    return tuple(tuple((bisect_left(names, name), label(name, value)) for name, value in own) for own in sorted_labels)


def label(name: str, value: str) -> bytes:
    """One label of a series."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
