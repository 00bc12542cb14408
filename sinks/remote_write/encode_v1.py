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

from sinks.remote_write.protobuf import fixed_varint, message, text, ts_width, varint
from sinks.series.model import Rows, SampleGroup, SeriesSet

NAME = "__name__"

_SERIES = b"\x0a"
_LABEL = 0x0A
_SAMPLES = 0x12
_FIRST = 0x0A
_SECOND = 0x12
_VALUE = b"\x09"
_TIMESTAMP = b"\x10"
_VALUE_BYTES = 9


class _Packed(NamedTuple):
    """How a set is written: the packer, and its arguments with holes at every second and third place."""

    pack: Struct
    arguments: list[Any]


def encode(groups: Sequence[SampleGroup]) -> bytes:
    """The request that writes these groups, uncompressed."""
    return b"".join([_group(group) for group in groups])


def _group(group: SampleGroup) -> bytes:
    series, ts_ms, values = group
    width = ts_width(ts_ms)
    packed: _Packed | None = series.cache.get(("v1", width))
    if packed is None:
        packed = series.cache["v1", width] = _prepare(series, width)
    arguments = packed.arguments.copy()
    arguments[1::3] = values
    arguments[2::3] = [_timestamp(ts_ms)] * len(values)
    return packed.pack.pack(*arguments)


@lru_cache(maxsize=1024)
def _timestamp(ts_ms: int) -> bytes:
    return _TIMESTAMP + fixed_varint(ts_ms, ts_width(ts_ms))


def _prepare(series: SeriesSet, width: int) -> _Packed:
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate((len(one) for one in encoded), initial=0))
    blob = b"".join(encoded)
    sample = bytes((_SAMPLES,)) + varint(_VALUE_BYTES + 1 + width) + _VALUE
    rest = len(sample) - 1 + _VALUE_BYTES + 1 + width
    arguments: list[Any] = []
    for own in _own(series.rows, tuple(name for name, _ in series.labels)):
        labels = _merge(own, ends, blob)
        arguments += [b"".join((_SERIES, varint(len(labels) + rest), labels, sample)), 0.0, b""]
    pattern = "".join(f"{len(head)}sd{1 + width}s" for head in arguments[::3])
    return _Packed(Struct(f"<{pattern}"), arguments)


@lru_cache(maxsize=1024)
def _own(rows: Rows, names: tuple[str, ...]) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    """The labels of each row itself, sorted, each with the number of the device's labels that sort before it."""
    sorted_labels = [sorted(((NAME, row.name), *row.labels)) for row in rows]
    return tuple(tuple((bisect_left(names, name), label(name, value)) for name, value in own) for own in sorted_labels)


def _merge(own: tuple[tuple[int, bytes], ...], ends: Sequence[int], blob: bytes) -> bytes:
    """A series' labels: the device's in ``blob``, which end at ``ends``, and those of the row where they sort."""
    pieces: list[bytes] = []
    start = 0
    for before, one in own:
        at = ends[before]
        pieces += (blob[start:at], one)
        start = at
    return b"".join((*pieces, blob[start:]))


def label(name: str, value: str) -> bytes:
    """One label of a series."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
