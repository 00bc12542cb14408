"""Remote write 2.0: groups of samples -> a Request with interned symbols, before snappy.

What rows are called, label names and help are symbols of every request, in front and always at the same place, so that
all of a series but the references to its device's label values, its value and its time is constant. References have the
same number of bytes throughout a request, so that the constant parts never move.

A counter that counts from its producer's start says so twice: on the sample, as receivers read it since Prometheus 3.8,
and on the series, as those before it do. Each ignores the field that it does not know. When the others began, in the
driver or the GPU, nobody says.

Source: the message definitions of io.prometheus.write.v2: Request{4 symbols, 5 timeseries}, TimeSeries{1 labels_refs,
2 samples, 5 metadata; before 3.8 6 int64 created_timestamp}, Sample{1 double value, 2 int64 timestamp,
3 int64 start_timestamp}, Metadata{1 type, 3 help_ref, 4 unit_ref}.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from sinks.remote_write.plans import planned, samples
from sinks.remote_write.protobuf import (
    NAME,
    VALUE_BYTES,
    fixed_varint,
    message,
    sample_head,
    text,
    ts_width,
    varint,
)
from sinks.series.model import Row, Rows, SampleGroup, SeriesSet
from topics.metric import Kind

_SYMBOL = 0x22
_TIMESERIES = 0x2A
_LABELS_REFS = 0x0A
_METADATA = 0x2A
_TYPE = b"\x08"
_HELP_REF = b"\x18"
_UNIT_REF = b"\x20"
_START_OF_SAMPLE = b"\x18"
_START_OF_SERIES = b"\x30"
_TYPES: dict[Kind, int] = {"untyped": 0, "counter": 1, "gauge": 2}

_REF_WIDTHS = (2, 3, 5)
_MAX_CONSTANTS = 8192


class _Shape(NamedTuple):
    """What decides how a set is written, beside its label values, its values and its time."""

    names: tuple[str, ...]
    rows: Rows
    ref_width: int
    ts_width: int


class _LabelCut(NamedTuple):
    """Some of a device's labels in a row, by their numbers, and what comes behind them."""

    start: int
    end: int
    tail: bytes


class _ShapePlan(NamedTuple):
    """How sets of one shape are written: the references to the names of the device's labels, constant parts, the cuts
    through its labels, and the order in which constants, cuts, samples and, with ``starts``, the start are written.
    """

    names: tuple[bytes, ...]
    constants: tuple[bytes, ...]
    cuts: tuple[_LabelCut, ...]
    order: "itemgetter[Any]"
    starts: bool


class _PlanV2(NamedTuple):
    """How some sets are written together. ``values`` are their labels' values, each once, and ``encoded`` as symbols.

    All cuts, one behind the other, are constants with a reference between any two: ``references`` picks those, and
    ``cuts`` takes all apart again.
    """

    sets: tuple[SeriesSet, ...]
    shapes: list[_ShapePlan]
    values: tuple[str, ...]
    encoded: list[bytes]
    constants: list[bytes]
    references: "itemgetter[Any]"
    cuts: Struct


class Encoder:
    """Encodes requests; what it keeps between them is the constant symbols and the plans made of them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._token = object()
        self._constants: dict[str, int] = {"": 0}
        self._constant_symbols = bytearray(text(_SYMBOL, ""))
        self._shapes: dict[_Shape, _ShapePlan] = {}

    def encode(self, groups: Sequence[SampleGroup]) -> bytes:
        """The request that writes these groups, uncompressed."""
        if max(len(self._constants), len(self._shapes)) > _MAX_CONSTANTS:
            self._reset()
        for series in [series for series, _, _ in groups if self._token not in series.cache]:
            own = chain.from_iterable(
                (row.name, row.help, row.unit, *chain.from_iterable(row.labels)) for row in series.rows
            )
            for symbol in (NAME, *(name for name, _ in series.labels), *own):
                if symbol not in self._constants:
                    self._constants[symbol] = len(self._constants)
                    self._constant_symbols += text(_SYMBOL, symbol)
            series.cache[self._token] = True
        most_symbols = len(self._constants) + sum([len(group.series.labels) for group in groups])
        width = next(width for width in _REF_WIDTHS if most_symbols < 1 << 7 * width)
        symbols, fresh = dict(self._constants), list[bytes]()
        written: list[bytes] = []
        for plan, some in planned(groups, (self._token, width), partial(self._plan, width)):
            for value, encoded in zip(plan.values, plan.encoded, strict=True):
                if value not in symbols:
                    symbols[value] = len(symbols)
                    fresh.append(encoded)
            written.append(_written(plan, some, [_ref(symbols[value], width) for value in plan.values]))
        return b"".join([bytes(self._constant_symbols), *fresh, *written])

    def _plan(self, width: int, sets: tuple[SeriesSet, ...], ts_width: int) -> _PlanV2:
        """Work out how sets are written together."""
        values: dict[str, int] = {}
        shapes: list[_ShapePlan] = []
        constants, picked, sizes, tail = list[bytes](), list[int](), list[int](), b""
        for series in sets:
            shape = self._shape(_Shape(tuple([name for name, _ in series.labels]), series.rows, width, ts_width))
            numbers = [values.setdefault(value, len(values)) for _, value in series.labels]
            for start, end, behind in shape.cuts:
                constants += (tail + shape.names[start], *shape.names[start + 1 : end])
                picked += numbers[start:end]
                sizes.append(2 * width * (end - start) + len(behind))
                tail = behind
            shapes.append(shape)
        pick = itemgetter(*picked) if len(picked) > 1 else itemgetter(slice(len(picked)))  # always a sequence
        cuts = Struct("".join([f"{size}s" for size in sizes]))
        return _PlanV2(sets, shapes, tuple(values), list(map(_symbol, values)), [*constants, tail], pick, cuts)

    def _shape(self, shape: _Shape) -> _ShapePlan:
        if shape not in self._shapes:
            self._shapes[shape] = _shape_plan(shape, self._constants)
        return self._shapes[shape]


def _written(plan: _PlanV2, groups: Sequence[SampleGroup], refs: Sequence[bytes]) -> bytes:
    """The series of a tick; ``refs`` has a reference for each value of a label."""
    labels = plan.constants * 2
    labels[::2] = plan.constants
    labels[1::2] = *plan.references(refs), b""
    cuts, stamped = iter(plan.cuts.unpack(b"".join(labels))), iter(samples(groups))
    written: list[bytes] = []
    for shape, (series, ts_ms, values) in zip(plan.shapes, groups, strict=True):
        starts = _starts(series.start_ms if series.start_ms <= ts_ms else 0, ts_width(ts_ms)) if shape.starts else ()
        own = (*shape.constants, *islice(cuts, len(shape.cuts)), *islice(stamped, len(values)), *starts)
        written += shape.order(own)
    return b"".join(written)


@lru_cache(maxsize=65536)
def _starts(start_ms: int, width: int) -> tuple[bytes, bytes]:
    """When a counter began, as a field of the sample and of its series. 0: that is not known, as of a sample that is
    earlier, since its producer has begun again."""
    start = fixed_varint(start_ms, width)
    return _START_OF_SAMPLE + start, _START_OF_SERIES + start


_symbol = lru_cache(maxsize=65536)(partial(text, _SYMBOL))
_ref = lru_cache(maxsize=65536)(fixed_varint)


def _shape_plan(shape: _Shape, symbols: dict[str, int]) -> _ShapePlan:
    """Work out a shape: every series is a head, cuts of the device's references around the row's own, and a sample."""
    constants: list[bytes] = []
    cuts: dict[_LabelCut, int] = {}
    parts: list[tuple[str, int]] = []

    def write(constant: bytes) -> None:
        if parts and parts[-1][0] == "constant":
            constants[-1] += constant
        else:
            parts.append(("constant", len(constants)))
            constants.append(constant)

    for number, row in enumerate(shape.rows):
        head, pieces, metadata = _series(row, shape, symbols)
        write(head)
        for piece in pieces:
            if isinstance(piece, bytes):
                write(piece)
            else:
                parts.append(("cut", cuts.setdefault(piece, len(cuts))))
        parts.append(("sample", number))
        if row.since_start:
            parts.append(("start", 0))
        write(metadata)
        if row.since_start:
            parts.append(("start", 1))
    begins = {"constant": 0, "cut": len(constants)}
    begins["sample"] = begins["cut"] + len(cuts)
    begins["start"] = begins["sample"] + len(shape.rows)
    order = itemgetter(*[begins[kind] + number for kind, number in parts])
    has_starts = any(row.since_start for row in shape.rows)
    names = tuple([_ref(symbols[name], shape.ref_width) for name in shape.names])
    return _ShapePlan(names, tuple(constants), tuple(cuts), order, has_starts)


def _series(row: Row, shape: _Shape, symbols: dict[str, int]) -> tuple[bytes, list[bytes | _LabelCut], bytes]:
    """The head of a series, its labels up to the sample's value, and its metadata."""
    own = sorted(((NAME, row.name), *row.labels))
    start_bytes = 1 + shape.ts_width if row.since_start else 0
    sample = sample_head(shape.ts_width, start_bytes)
    pieces: list[bytes | _LabelCut] = []
    start = 0
    for name, value in own:
        at = bisect_left(shape.names, name)
        pieces += [
            _LabelCut(start, at, b""),
            _ref(symbols[name], shape.ref_width) + _ref(symbols[value], shape.ref_width),
        ]
        start = at
    pieces += [_LabelCut(start, len(shape.names), sample)] if start < len(shape.names) else [sample]
    refs = (len(shape.names) + len(own)) * 2 * shape.ref_width
    said = _HELP_REF + varint(symbols[row.help]) + _UNIT_REF + varint(symbols[row.unit])
    metadata = message(_METADATA, _TYPE + varint(_TYPES[row.kind]) + said)
    labels = bytes((_LABELS_REFS,)) + varint(refs)
    size = len(labels) + refs + len(sample) - 1 + VALUE_BYTES + 1 + shape.ts_width + start_bytes
    head = bytes((_TIMESERIES,)) + varint(size + len(metadata) + start_bytes) + labels
    return head, [piece for piece in pieces if isinstance(piece, bytes) or piece.start < piece.end], metadata
