"""Remote write 1.0: groups of samples -> a WriteRequest, before snappy.

A device's labels are encoded once, when it is first seen with them; every series of it is a cut through those bytes
with the row's name and labels put in. A node's tick is one ``struct.pack`` of all its values between them, as long as
it has the sets that it had last.

Source: the message definitions of prometheus/prompb: WriteRequest{1 timeseries}, TimeSeries{1 labels, 2 samples},
Label{1 name, 2 value}, Sample{1 double value, 2 int64 timestamp}.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from struct import Struct
from typing import Any, NamedTuple

from sinks.remote_write.protobuf import NAME, VALUE_BYTES, message, sample_head, text, timestamp, ts_width, varint
from sinks.series.model import Rows, SampleGroup, SeriesSet

_SERIES = b"\x0a"
_LABEL = 0x0A
_FIRST = 0x0A
_SECOND = 0x12


class _Plan(NamedTuple):
    """How some sets are written together: the packer, and its arguments with holes at every second and third place."""

    sets: tuple[SeriesSet, ...]
    pack: Struct
    arguments: list[Any]


def encode(groups: Sequence[SampleGroup]) -> bytes:
    """The request that writes these groups, uncompressed."""
    return b"".join(pieces(groups))


def pieces(groups: Sequence[SampleGroup]) -> Iterator[bytes]:
    """The same, a tick at a time."""
    start = 0
    while start < len(groups):
        first, ts_ms, _ = groups[start]
        width = ts_width(ts_ms)
        plan: _Plan | None = first.cache.get(("v1", width))
        some = groups[start : start + len(plan.sets)] if plan else ()
        if plan is None or plan.sets != tuple([one.series for one in some]) or any(one.ts_ms != ts_ms for one in some):
            some = _of_one_tick(groups, start)
            plan = first.cache["v1", width] = _plan(tuple([one.series for one in some]), width)
        arguments = plan.arguments.copy()
        arguments[1::3] = chain.from_iterable([one.values for one in some])
        arguments[2::3] = [timestamp(ts_ms)] * (len(arguments) // 3)
        yield plan.pack.pack(*arguments)
        start += len(some)


def _of_one_tick(groups: Sequence[SampleGroup], start: int) -> Sequence[SampleGroup]:
    """A group and those after it that are of the same tick of a node."""
    first, end = groups[start], start + 1
    while first.series.node is not None and end < len(groups):
        if groups[end].ts_ms != first.ts_ms or groups[end].series.node != first.series.node:
            break
        end += 1
    return groups[start:end]


def _plan(sets: tuple[SeriesSet, ...], width: int) -> _Plan:
    arguments: list[Any] = []
    for series in sets:
        heads = series.cache.get(("heads", width))
        if heads is None:
            heads = series.cache["heads", width] = _heads(series, width)
        for head in heads:
            arguments += (head, 0.0, b"")
    pattern = "".join([f"{len(head)}sd{1 + width}s" for head in arguments[::3]])
    return _Plan(sets, Struct(f"<{pattern}"), arguments)


def _heads(series: SeriesSet, width: int) -> list[bytes]:
    """What is before the value of each series."""
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate((len(one) for one in encoded), initial=0))
    blob, sample = b"".join(encoded), sample_head(width)
    rest = len(sample) - 1 + VALUE_BYTES + 1 + width
    heads = []
    for own in _own_labels(series.rows, tuple(name for name, _ in series.labels)):
        pieces, start = [], 0
        for before, one in own:  # the device's labels, and those of the row where they sort
            pieces += [blob[start : ends[before]], one]
            start = ends[before]
        labels = b"".join((*pieces, blob[start:]))
        heads.append(b"".join((_SERIES, varint(len(labels) + rest), labels, sample)))
    return heads


@lru_cache(maxsize=1024)
def _own_labels(rows: Rows, names: tuple[str, ...]) -> tuple[tuple[tuple[int, bytes], ...], ...]:
    """The labels of each row itself, sorted, each with the number of the device's labels that sort before it."""
    sorted_labels = [sorted(((NAME, row.name), *row.labels)) for row in rows]
    return tuple(tuple((bisect_left(names, name), label(name, value)) for name, value in own) for own in sorted_labels)


def label(name: str, value: str) -> bytes:
    """One label of a series."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
