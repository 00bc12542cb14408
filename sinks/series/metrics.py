"""A device's metrics in a naming profile: what its series are called, and their values. Pure.

In: the metrics of a device. Out: rows and a value for each; what is known of a device rarely changes, so rows are
remembered by it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sinks.series.model import Row, Rows, Value
from topics.catalogue import CATALOGUE, DERIVED, HOLDERS, series
from topics.metric import Metric, Profile
from topics.metric import Series as CatalogueSeries

Metrics = Mapping[str, Value | None]

_MEMO_SIZE = 4096
_LAYOUTS = 1024
_HOLDERS = Row(HOLDERS.name, (), "gauge", HOLDERS.help, primary=False)


class Measured(NamedTuple):
    """A device's metrics in a naming profile: rows and a value for each."""

    rows: Rows
    values: list[float]


class MetricNames:
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
        layout = self._layouts.get(keys)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
                self._rows.clear()
            layout = self._layouts[keys] = _Layout(self._names, keys, self._same)
        values = layout.values(metrics)
        if None in values[layout.plain :]:
            there = [(row, value) for row, value in zip(layout.rows, values, strict=True) if value is not None]
            return Measured(self._same(row for row, _ in there), [value for _, value in there])
        return Measured(layout.rows, values)  # type: ignore[arg-type] # None was looked for

    def _same(self, rows: Iterable[Row]) -> Rows:
        made = tuple(rows)
        return self._rows.setdefault(made, made)


class _Layout:
    """The rows of a device of which just these keys are known; those past ``plain`` are made of two keys."""

    def __init__(self, names: Profile, keys: tuple[str, ...], same: Callable[[Iterable[Row]], Rows]) -> None:
        plain = [(key, one) for key, many in series(names).items() if key in keys for one in many]
        self._ratios = [ratio for ratio in DERIVED[names] if ratio.numerator in keys and ratio.denominator in keys]
        self._converters: list[tuple[str, Callable[[Any], float]]] = [
            (key, float if one.scale == 1.0 and one.bits is None else _Scaled(one.of).__getitem__) for key, one in plain
        ]
        rows = [_row(CATALOGUE[key], one) for key, one in plain]
        if HOLDERS.name in keys:
            self._converters.append((HOLDERS.name, float))
            rows.append(_HOLDERS)
        self.plain = len(rows)
        ratios = [Row(ratio.name, ratio.labels, "gauge", ratio.help, primary=False) for ratio in self._ratios]
        self.rows = same([*rows, *ratios])

    def values(self, metrics: Metrics) -> list[float | None]:
        """The value of each row; None for a ratio of which the denominator is zero."""
        values: list[float | None] = [convert(metrics[key]) for key, convert in self._converters]
        for ratio in self._ratios:
            numerator, denominator = metrics[ratio.numerator], metrics[ratio.denominator]
            if numerator is None or denominator is None:
                values.append(None)
            else:
                values.append(ratio.of(numerator, denominator))
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


def _row(metric: Metric, one: CatalogueSeries) -> Row:
    """A series of a metric. One that is made of some bits of a counter is a gauge."""
    primary = any(many[0] == one for many in metric.names.values())
    return Row(one.name, one.labels, metric.kind if one.bits is None else "gauge", metric.help, primary)
