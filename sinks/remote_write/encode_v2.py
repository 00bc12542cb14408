"""Remote write 2.0: groups of samples -> a Request with interned symbols, before snappy.

Metric names, label names, units and help texts are the first symbols of every request, always with the same numbers.
So everything in a series is constant except its values, their timestamps and the references to its device's label
values. All references of a request have the same number of bytes, so the constant parts are always at the same place.

A counter that counts from its producer's start has the start time twice: on the sample, where receivers read it since
Prometheus 3.8, and on the series, where older ones do. Each ignores the field that it does not know. For counters of
the driver or the GPU, the start is unknown.

Source: the message definitions of io.prometheus.write.v2: Request{4 symbols, 5 timeseries}, TimeSeries{1 labels_refs,
2 samples, 5 metadata; before 3.8 6 int64 created_timestamp}, Sample{1 double value, 2 int64 timestamp,
3 int64 start_timestamp}, Metadata{1 type, 3 help_ref, 4 unit_ref}.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from sinks.remote_write.encode_v1 import (
    NAME,
    Tick,
    fixed_varint,
    message,
    planned,
    runs,
    sample_bytes,
    sample_head,
    samples,
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
_MAX_SHAPES = 8192
_MAX_RUN = 16
"""The most ticks that are encoded together. There is a plan for each power of two up to it."""


class _Shape(NamedTuple):
    """Everything that the encoding of a set depends on, except label values, values and time."""

    names: tuple[str, ...]
    rows: Rows
    ref_width: int
    ts_width: int


class _LabelSlice(NamedTuple):
    """A slice of a device's labels in a row, by their numbers, and the bytes behind it."""

    start: int
    end: int
    tail: bytes


class _RowPlan(NamedTuple):
    """How a series is encoded: its labels, up to the first sample's value, what begins each further sample, and the
    metadata. ``bytes`` has it without samples, ``sample_bytes`` each sample."""

    labels: list[bytes | _LabelSlice]
    next_sample: bytes
    metadata: bytes
    bytes: int
    sample_bytes: int
    since_start: bool


class _RunPlan(NamedTuple):
    """How so many ticks of sets of one shape are encoded together: the constant parts, and the order of constants,
    slices, samples and start times."""

    constants: tuple[bytes, ...]
    order: "itemgetter[Any]"


class _ShapePlan(NamedTuple):
    """How sets of one shape are encoded: the references to the names of the device's labels, the slices of its labels,
    each row, whether there are start times, and a plan for each number of ticks that there was."""

    names: tuple[bytes, ...]
    slices: dict[_LabelSlice, int]
    rows: list[_RowPlan]
    starts: bool
    runs: dict[int, _RunPlan]


class _PlanV2(NamedTuple):
    """How some sets are encoded together.

    ``values``: the values of their labels, each once; ``encoded``: the same as symbols. All slices of labels, one
    behind the other, are ``constants`` with a reference between each two: ``references`` picks those from the
    references to ``values``, and ``slices`` splits the result.
    """

    shapes: list[_ShapePlan]
    values: tuple[str, ...]
    encoded: list[bytes]
    constants: list[bytes]
    references: "itemgetter[Any]"
    slices: Struct


class Encoder:
    """Encodes requests, and keeps the constant symbols and the plans between them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._token = object()
        self._constants: dict[str, int] = {"": 0}
        self._constant_symbols = bytearray(text(_SYMBOL, ""))
        self._shapes: dict[_Shape, _ShapePlan] = {}

    def encode(self, groups: Sequence[SampleGroup]) -> bytes:
        """The uncompressed request with these groups."""
        if len(self._constants) > _MAX_CONSTANTS:
            self._reset()
        if len(self._shapes) > _MAX_SHAPES:  # the plans of sets that are in use keep theirs
            self._shapes.clear()
        for series in [series for series, _, _ in groups if series.cache.get(self) is not self._token]:
            row_symbols = chain.from_iterable(
                (row.name, row.help, row.unit, *chain.from_iterable(row.labels)) for row in series.rows
            )
            for symbol in (NAME, *(name for name, _ in series.labels), *row_symbols):
                if symbol not in self._constants:
                    self._constants[symbol] = len(self._constants)
                    self._constant_symbols += text(_SYMBOL, symbol)
            series.cache[self] = self._token
        most_symbols = len(self._constants) + sum([len(group.series.labels) for group in groups])
        width = next(width for width in _REF_WIDTHS if most_symbols < 1 << 7 * width)
        symbols, new_symbols = dict(self._constants), list[bytes]()
        series_bytes: list[bytes] = []
        plans = planned(groups, (self, width), partial(self._plan, width), basis=self._token)
        for plan, ticks in runs(plans):
            for value, encoded in zip(plan.values, plan.encoded, strict=True):
                if value not in symbols:
                    symbols[value] = len(symbols)
                    new_symbols.append(encoded)
            labels, refs = plan.constants * 2, [_ref(symbols[value], width) for value in plan.values]
            labels[::2], labels[1::2] = plan.constants, (*plan.references(refs), b"")
            slices = plan.slices.unpack(b"".join(labels))
            series_bytes += _encode(plan, ticks, slices)
        return b"".join([bytes(self._constant_symbols), *new_symbols, *series_bytes])

    def _plan(self, width: int, sets: Sequence[SeriesSet], ts_width: int) -> _PlanV2:
        """Plan how sets are encoded together."""
        values: dict[str, int] = {}
        shapes: list[_ShapePlan] = []
        constants, picked, sizes, tail = list[bytes](), list[int](), list[int](), b""
        for series in sets:
            key = _Shape(tuple([name for name, _ in series.labels]), series.rows, width, ts_width)
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = _shape_plan(key, self._constants)
            numbers = [values.setdefault(value, len(values)) for _, value in series.labels]
            for start, end, behind in shape.slices:
                constants += (tail + shape.names[start], *shape.names[start + 1 : end])
                picked += numbers[start:end]
                sizes.append(2 * width * (end - start) + len(behind))
                tail = behind
            shapes.append(shape)
        pick = itemgetter(*picked) if len(picked) > 1 else itemgetter(slice(len(picked)))  # always a sequence
        slices = Struct("".join([f"{size}s" for size in sizes]))
        return _PlanV2(shapes, tuple(values), list(map(_symbol, values)), [*constants, tail], pick, slices)


def _encode(plan: _PlanV2, ticks: Sequence[Tick], slices: Iterable[bytes]) -> Iterator[bytes]:
    """The encoded series of ticks, as many ticks together as there is a plan for; ``slices`` are those of their
    labels."""
    end = 0
    while end < len(ticks):
        start, end = end, end + min(_MAX_RUN, 1 << (len(ticks) - end).bit_length() - 1)
        run, encoded = ticks[start:end], list[bytes]()
        next_slices, next_samples = iter(slices), [iter(samples(tick)) for tick in run]
        for number, shape in enumerate(plan.shapes):
            plan_of_run = shape.runs.get(len(run)) or _run_plan(shape, len(run))
            parts = [*plan_of_run.constants, *islice(next_slices, len(shape.slices))]
            for of_tick in next_samples:
                parts += islice(of_tick, len(shape.rows))
            if shape.starts:
                starts = [_starts(series.start_ms, ts_ms) for series, ts_ms, _ in [tick[number] for tick in run]]
                parts += (*[of_sample for of_sample, _ in starts], starts[0][1])
            encoded += plan_of_run.order(parts)
        yield b"".join(encoded)


def _starts(start_ms: int, ts_ms: int) -> tuple[bytes, bytes]:
    """The start time of a counter, as a field of the sample and of the series. 0: unknown. It is for a sample that is
    earlier than the start, too: the producer was restarted since."""
    return _start_fields(start_ms if start_ms <= ts_ms else 0, ts_width(ts_ms))


@lru_cache(maxsize=65536)
def _start_fields(start_ms: int, width: int) -> tuple[bytes, bytes]:
    start = fixed_varint(start_ms, width)
    return _START_OF_SAMPLE + start, _START_OF_SERIES + start


_symbol = lru_cache(maxsize=65536)(partial(text, _SYMBOL))
_ref = lru_cache(maxsize=65536)(fixed_varint)


def _shape_plan(shape: _Shape, symbols: dict[str, int]) -> _ShapePlan:
    """Plan a shape: a series is a head, slices of the device's label references around the row's own, and samples."""
    slices: dict[_LabelSlice, int] = {}
    rows = [_row_plan(row, shape, symbols) for row in shape.rows]
    for piece in chain.from_iterable([row.labels for row in rows]):
        if isinstance(piece, _LabelSlice):
            slices.setdefault(piece, len(slices))
    names = tuple([_ref(symbols[name], shape.ref_width) for name in shape.names])
    return _ShapePlan(names, slices, rows, any(row.since_start for row in rows), {})


def _run_plan(shape: _ShapePlan, ticks: int) -> _RunPlan:
    """Plan so many ticks of a shape, which keeps the plan."""
    constants: list[bytes] = []
    parts: list[tuple[str, int]] = []

    def write(constant: bytes) -> None:
        if parts and parts[-1][0] == "constant":
            constants[-1] += constant
        else:
            parts.append(("constant", len(constants)))
            constants.append(constant)

    for number, row in enumerate(shape.rows):
        write(bytes((_TIMESERIES,)) + varint(row.bytes + ticks * row.sample_bytes))
        for piece in row.labels:
            if isinstance(piece, bytes):
                write(piece)
            else:
                parts.append(("slice", shape.slices[piece]))
        for tick in range(ticks):
            if tick:
                write(row.next_sample)
            parts.append(("sample", tick * len(shape.rows) + number))
            if row.since_start:
                parts.append(("start", tick))
        write(row.metadata)
        if row.since_start:
            parts.append(("start", ticks))
    begins = {"constant": 0, "slice": len(constants)}
    begins["sample"] = begins["slice"] + len(shape.slices)
    begins["start"] = begins["sample"] + ticks * len(shape.rows)
    order = itemgetter(*[begins[kind] + number for kind, number in parts])
    plan = shape.runs[ticks] = _RunPlan(tuple(constants), order)
    return plan


def _row_plan(row: Row, shape: _Shape, symbols: dict[str, int]) -> _RowPlan:
    """Plan a series of a shape."""
    own = sorted(((NAME, row.name), *row.labels))
    start_bytes = 1 + shape.ts_width if row.since_start else 0
    sample = sample_head(shape.ts_width, start_bytes)
    refs = (len(shape.names) + len(own)) * 2 * shape.ref_width
    head = bytes((_LABELS_REFS,)) + varint(refs)
    pieces: list[bytes | _LabelSlice] = [head]
    start = 0
    for name, value in own:
        at = bisect_left(shape.names, name)
        pieces += [
            _LabelSlice(start, at, b""),
            _ref(symbols[name], shape.ref_width) + _ref(symbols[value], shape.ref_width),
        ]
        start = at
    pieces += [_LabelSlice(start, len(shape.names), sample)] if start < len(shape.names) else [sample]
    help_and_unit = _HELP_REF + varint(symbols[row.help]) + _UNIT_REF + varint(symbols[row.unit])
    metadata = message(_METADATA, _TYPE + varint(_TYPES[row.kind]) + help_and_unit)
    return _RowPlan(
        labels=[piece for piece in pieces if isinstance(piece, bytes) or piece.start < piece.end],
        next_sample=sample,
        metadata=metadata,
        bytes=len(head) + refs + len(metadata) + start_bytes,
        sample_bytes=sample_bytes(shape.ts_width, start_bytes),
        since_start=row.since_start,
    )
