"""Series by the block: those of one device under one label set, which change only when a pod or a metric comes or goes.

In: the metrics of a device. Out: rows (what its series are called) and their values.
A block is made once and then only given values, so whatever an encoder works out for its labels it may keep on it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sinks.tenants import Labels
from topics.attributed import AttributedDevice, Attribution
from topics.catalogue import CATALOGUE, DERIVED, HOLDERS, series
from topics.metric import Metric, Profile, Ratio
from topics.metric import Series as CatalogueSeries

Kind = Literal["gauge", "counter"]
Subject = Literal["metrics", "info", "rest", "part", "errors", "pod", "alert"]
"""What the series of a block are of: blocks about different things may have the same labels, and share no name."""

Value = int | float
Metrics = Mapping[str, Value | None]

_MEMO_SIZE = 4096
_LAYOUTS = 1024


class Row(NamedTuple):
    """One series of a device, without the device's labels. ``primary``: a value of ``metrics``, not made of one."""

    name: str
    labels: Labels = ()
    kind: Kind = "gauge"
    help: str = ""
    primary: bool = True


Rows = tuple[Row, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The series of one device: its labels (sorted by name, none of them a row's), the rows, what they are about.

    ``primaries`` counts the rows that are a value of ``metrics``. ``cache`` is the encoders': what they made of labels
    and rows, under a key of their own.
    """

    labels: Labels
    rows: Rows
    subject: Subject = "metrics"
    primaries: int = field(init=False)
    cache: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "primaries", sum([row.primary for row in self.rows]))


class Group(NamedTuple):
    """A block at one time, in milliseconds since the epoch: a value for each of its rows. NaN ends a series."""

    block: Block
    ts_ms: int
    values: Sequence[Value]

    def part(self, rows: Sequence[int]) -> "Group":
        """Some of its series, by their numbers."""
        block = Block(self.block.labels, tuple(self.block.rows[row] for row in rows), self.block.subject)
        return Group(block, self.ts_ms, [self.values[row] for row in rows])


class Measured(NamedTuple):
    """A device's metrics in a naming profile: rows and a value for each."""

    rows: Rows
    values: list[float]


class Layouts:
    """How a device becomes rows and values in a naming profile, remembered by what is known of it."""

    def __init__(self, names: Profile) -> None:
        self._names = names
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._rows: dict[Rows, Rows] = {}

    def measure(self, metrics: Metrics, holders: int | None = None) -> Measured:
        """The rows of what is known; equal rows are the same object. ``holders`` None: that is not known."""
        keys = tuple(metrics)
        if None in metrics.values():
            keys = tuple(key for key in keys if metrics[key] is not None)
        if holders is not None and keys and self._names == "otel":
            keys, metrics = (*keys, HOLDERS.name), {**metrics, HOLDERS.name: holders}
        layout = self._layouts.get(keys) or self._learn(keys)
        values = layout.values(metrics)
        if None in values[layout.plain :]:
            return self._without_gaps(layout, values)
        return Measured(layout.rows, values)  # type: ignore[arg-type] # None was looked for

    def _learn(self, keys: tuple[str, ...]) -> "_Layout":
        if len(self._layouts) >= _LAYOUTS:
            self._layouts.clear()
            self._rows.clear()
        layout = self._layouts[keys] = _Layout(self._names, keys, self._same)
        return layout

    def _same(self, rows: Iterable[Row]) -> Rows:
        made = tuple(rows)
        return self._rows.setdefault(made, made)

    def _without_gaps(self, layout: "_Layout", values: Sequence[float | None]) -> Measured:
        there = [(row, value) for row, value in zip(layout.rows, values, strict=True) if value is not None]
        return Measured(self._same(row for row, _ in there), [value for _, value in there])


_HOLDERS = Row(HOLDERS.name, (), "gauge", HOLDERS.help, primary=False)


class _Layout:
    """The rows of a device of which just these keys are known; those past ``plain`` are made of two keys."""

    def __init__(self, names: Profile, keys: tuple[str, ...], same: Callable[[Iterable[Row]], Rows]) -> None:
        plain = [(key, one) for key, many in series(names).items() if key in keys for one in many]
        self._ratios = [ratio for ratio in DERIVED[names] if ratio.numerator in keys and ratio.denominator in keys]
        self._makers = [(key, _converter(one)) for key, one in plain]
        rows = [_row(CATALOGUE[key], one) for key, one in plain]
        if HOLDERS.name in keys:
            self._makers.append((HOLDERS.name, float))
            rows.append(_HOLDERS)
        self.plain = len(rows)
        self.rows = same([*rows, *map(_ratio_row, self._ratios)])

    def values(self, metrics: Metrics) -> list[float | None]:
        """The value of each row; None for a ratio of which the denominator is zero."""
        values: list[float | None] = [make(metrics[key]) for key, make in self._makers]
        values.extend(_ratio(ratio, metrics) for ratio in self._ratios)
        return values


class _Scaled(dict[Any, float]):
    """The values of a series by those of its key, remembered: a GPU's clocks, temperatures and percentages are few."""

    def __init__(self, of: Callable[[Value], float]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, value: Value) -> float:
        if len(self) >= _MEMO_SIZE:
            self.clear()
        made = self[value] = self._of(value)
        return made


def _converter(one: CatalogueSeries) -> Callable[[Any], float]:
    return float if one.scale == 1.0 and one.bits is None else _Scaled(one.of).__getitem__


def _row(metric: Metric, one: CatalogueSeries) -> Row:
    kind: Kind = metric.kind if one.bits is None else "gauge"
    primary = any(many[0] == one for many in metric.names.values())
    return Row(one.name, one.labels, kind, metric.help, primary)


def _ratio_row(ratio: Ratio) -> Row:
    return Row(ratio.name, ratio.labels, "gauge", ratio.help, primary=False)


def _ratio(ratio: Ratio, metrics: Metrics) -> float | None:
    numerator, denominator = metrics[ratio.numerator], metrics[ratio.denominator]
    return None if numerator is None or denominator is None else ratio.of(numerator, denominator)


def holders(device: AttributedDevice, attribution: Attribution) -> int | None:
    """How many pods hold the device; None where nobody knows."""
    if attribution == "none":
        return None
    return len({(one.namespace, one.pod, one.pod_uid) for one in device.holders}) if device.holders else 0


def primaries(groups: Iterable[Group]) -> int:
    """How many values of ``metrics`` are in these groups; ends of series, which are all of a group's, are none."""
    return sum([block.primaries for block, _, values in groups if values[0] == values[0]])
