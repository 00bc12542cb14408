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
from itertools import chain, repeat
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from sinks.remote_write.protobuf import (
    NAME,
    VALUE_BYTES,
    fixed_varint,
    message,
    sample_head,
    text,
    timestamp,
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


class _ShapePlan(NamedTuple):
    """How sets of one shape are written: the packer, the references to the names of the device's labels, its constant
    arguments, where to cut the device's references, and the order in which constants, cuts, values, the time and, with
    ``starts``, the start are its arguments.
    """

    pack: Struct
    names: tuple[bytes, ...]
    constants: tuple[bytes, ...]
    cuts: tuple[slice, ...]
    order: "itemgetter[Any]"
    starts: bool


class Encoder:
    """Encodes requests; what it keeps between them is the constant symbols and the plans made of them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._token = object()
        self._constants: dict[str, int] = {"": 0}
        self._constant_symbols = bytearray(text(_SYMBOL, ""))
        self._plans: dict[_Shape, _ShapePlan] = {}

    def encode(self, groups: Sequence[SampleGroup]) -> bytes:
        """The request that writes these groups, uncompressed."""
        if max(len(self._constants), len(self._plans)) > _MAX_CONSTANTS:
            self._reset()
        for series in [series for series, _, _ in groups if self._token not in series.cache]:
            own = chain.from_iterable(
                (row.name, row.help, row.unit, *chain.from_iterable(row.labels)) for row in series.rows
            )
            for symbol in (NAME, *(name for name, _ in series.labels), *own):
                if symbol not in self._constants:
                    self._constants[symbol] = len(self._constants)
                    self._constant_symbols += text(_SYMBOL, symbol)
            series.cache[self._token] = {}
        most_symbols = len(self._constants) + sum([len(group.series.labels) for group in groups])
        width = next(width for width in _REF_WIDTHS if most_symbols < 1 << 7 * width)
        symbols, fresh = dict(self._constants), list[bytes]()
        written: list[bytes] = []
        ready: dict[
            tuple[SeriesSet, int], tuple[_ShapePlan, list[bytes]]
        ] = {}  # several ticks of a node are of the same sets
        for series, ts_ms, values in groups:
            key = (series, ts_width(ts_ms))
            if key not in ready:
                ready[key] = self._labelled(series, (width, key[1]), symbols, fresh)
            plan, cuts = ready[key]
            starts = _starts(series.start_ms if series.start_ms <= ts_ms else 0, key[1]) if plan.starts else ()
            arguments = (*plan.constants, *cuts, *values, timestamp(ts_ms), *starts)
            written.append(plan.pack.pack(*plan.order(arguments)))
        return b"".join([bytes(self._constant_symbols), *fresh, *written])

    def _labelled(
        self, series: SeriesSet, widths: tuple[int, int], symbols: dict[str, int], fresh: list[bytes]
    ) -> tuple[_ShapePlan, list[bytes]]:
        """How a set is written, and its references. Label values that are new in this request are put in ``fresh``."""
        plan: _ShapePlan | None = series.cache[self._token].get(widths)
        if plan is None:
            shape = _Shape(tuple(name for name, _ in series.labels), series.rows, *widths)
            plan = self._plans.get(shape)
            if plan is None:
                plan = self._plans[shape] = _plan(shape, self._constants)
            series.cache[self._token][widths] = plan
        values = [value for _, value in series.labels]
        for value in values:
            if value not in symbols:
                symbols[value] = len(symbols)
                fresh.append(_symbol(value))
        pieces = [*plan.names, *plan.names]
        pieces[::2], pieces[1::2] = plan.names, map(_ref, map(symbols.__getitem__, values), repeat(widths[0]))
        refs = b"".join(pieces)
        return plan, [refs[cut] for cut in plan.cuts]


@lru_cache(maxsize=65536)
def _starts(start_ms: int, width: int) -> tuple[bytes, bytes]:
    """When a counter began, as a field of the sample and of its series. 0: that is not known, as of a sample that is
    earlier, since its producer has begun again."""
    start = fixed_varint(start_ms, width)
    return _START_OF_SAMPLE + start, _START_OF_SERIES + start


_symbol = lru_cache(maxsize=65536)(partial(text, _SYMBOL))
_ref = lru_cache(maxsize=65536)(fixed_varint)


def _plan(shape: _Shape, symbols: dict[str, int]) -> _ShapePlan:
    """Work out a shape: every series is a head, cuts of the device's references around the row's own, and a sample."""
    constants: list[bytes] = []
    cuts: dict[tuple[int, int], int] = {}
    parts: list[tuple[str, int]] = []
    sizes: list[str] = []
    for number, row in enumerate(shape.rows):
        head, pieces, tail = _series(row, shape, symbols)
        start = 1 + shape.ts_width if row.since_start else 0
        for piece in (head, *pieces, sample_head(shape.ts_width, start)):
            if isinstance(piece, bytes):
                parts.append(("constant", len(constants)))
                sizes.append(f"{len(piece)}s")
                constants.append(piece)
            else:
                parts.append(("cut", cuts.setdefault(piece, len(cuts))))
                sizes.append(f"{piece[1] - piece[0]}s")
        parts += [("value", number), ("time", 0), *([("start", 0)] if start else []), ("constant", len(constants))]
        sizes += ["d", f"{1 + shape.ts_width}s", *([f"{start}s"] if start else []), f"{len(tail)}s"]
        constants.append(tail)
        if start:
            parts.append(("start", 1))
            sizes.append(f"{start}s")
    begins = {"constant": 0, "cut": len(constants)}
    begins["value"] = begins["cut"] + len(cuts)
    begins["time"] = begins["value"] + len(shape.rows)
    begins["start"] = begins["time"] + 1
    order = itemgetter(*(begins[kind] + number for kind, number in parts))
    has_starts = any(row.since_start for row in shape.rows)
    cut_by = tuple(slice(*cut) for cut in cuts)
    names = tuple([_ref(symbols[name], shape.ref_width) for name in shape.names])
    return _ShapePlan(Struct("<" + "".join(sizes)), names, tuple(constants), cut_by, order, has_starts)


def _series(row: Row, shape: _Shape, symbols: dict[str, int]) -> tuple[bytes, list[bytes | tuple[int, int]], bytes]:
    """The head of a series, its labels (a pair is a cut through the device's references), and its metadata."""
    pieces: list[bytes | tuple[int, int]] = []
    start = 0
    for name, value in sorted(((NAME, row.name), *row.labels)):
        at = bisect_left(shape.names, name) * 2 * shape.ref_width
        pieces += [(start, at), _ref(symbols[name], shape.ref_width) + _ref(symbols[value], shape.ref_width)]
        start = at
    pieces.append((start, len(shape.names) * 2 * shape.ref_width))
    refs = (len(shape.names) + 1 + len(row.labels)) * 2 * shape.ref_width
    said = _HELP_REF + varint(symbols[row.help]) + _UNIT_REF + varint(symbols[row.unit])
    metadata = message(_METADATA, _TYPE + varint(_TYPES[row.kind]) + said)
    labels = bytes((_LABELS_REFS,)) + varint(refs)
    start = 1 + shape.ts_width if row.since_start else 0
    sample = len(sample_head(shape.ts_width, start)) - 1 + VALUE_BYTES + 1 + shape.ts_width + start
    size = len(labels) + refs + sample + len(metadata) + start
    head = bytes((_TIMESERIES,)) + varint(size) + labels
    return head, [piece for piece in pieces if isinstance(piece, bytes) or piece[0] != piece[1]], metadata
