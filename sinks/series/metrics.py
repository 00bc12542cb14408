"""A device's metrics -> rows and values, in profiles that share its labels. Pure.

In: the values of a device. Out: the rows of each profile's series, and a value for each.
State: the rows for each set of known metrics, and converted values.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sinks.series.model import Row, Rows, Value
from sinks.series.tick import KEYS
from topics.catalogue import CATALOGUE, HOLDERS, LAST_XID, XIDS
from topics.metric import Info, Labels, Ratio, Series
from topics.profiles import Profile, help_with_unit

MEMO_SIZE = 4096
_LAYOUTS = 1024
_ALL_KEYS = (*KEYS, HOLDERS.name, XIDS.name, LAST_XID.name)

DeviceValues = tuple[float | None, ...]
"""A value for each key of metrics, then the device's :data:`Counts`; None if it is not known."""

Counts = tuple[float | None, float | None, float | None]
"""How many holders a device has, how many XID errors it had, and the code of the last one."""

NO_COUNTS: Counts = (None, None, None)
NO_REST: Mapping[str, Value] = {}


class MetricNames:
    """The names of a device's metrics in profiles that share its labels. Layouts are kept by which values are known.

    ``counted``: for each profile, the keys whose values are counted as another profile's.
    """

    def __init__(self, profiles: Sequence[Profile], counted: Mapping[Profile, Collection[str]]) -> None:
        self._series: list[tuple[str, Series, bool]] = []
        self._ratios: list[Ratio] = []
        further = any(profile.further for profile in profiles)
        self._counts = [(info.name, row_of(info)) for info in (HOLDERS, XIDS) if further]
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._rows: dict[Rows, Rows] = {}
        names: set[tuple[str, Labels]] = set()
        for profile in profiles:
            for key in [key for key in CATALOGUE if key in profile.series]:
                for number, series in enumerate(profile.series[key]):
                    if (series.name, series.labels) not in names:
                        names.add((series.name, series.labels))
                        self._series.append((key, series, not number and key not in counted[profile]))
            for series in profile.series.get(LAST_XID.name, ()):
                if (series.name, series.labels) not in names:
                    names.add((series.name, series.labels))
                    row = Row(series.name, (), series.kind, series.help, series.unit, primary=False)
                    self._counts.append((LAST_XID.name, row))
            for ratio in profile.ratios:
                if (ratio.name, ratio.labels) not in names:
                    names.add((ratio.name, ratio.labels))
                    self._ratios.append(ratio)

    def measure(
        self, values: DeviceValues, rest: Mapping[str, Value] = NO_REST, layout: "Layout | None" = None
    ) -> "tuple[Rows, Sequence[float], Layout | None]":
        """The rows of a device, a value for each, and the layout used. Equal rows are the same object.

        Of a device without any metric, such as a lost one, only its XID errors have rows. ``rest`` replaces the
        device's own values, but not in what is computed from several of them. ``layout``: the device's last one, which
        is tried first.
        """
        row_values = layout.values(values) if layout is not None else None
        if layout is None or row_values is None:
            known = tuple([index for index, value in enumerate(values) if value is not None])
            if not known:
                return (), (), layout
            layout = self._layouts.get(known)
            if layout is None:
                if len(self._layouts) >= _LAYOUTS:
                    self._layouts.clear()
                    self._rows.clear()
                layout = self._layouts[known] = Layout(self._series, self._ratios, self._counts, known, self._shared)
            row_values = layout.values(values) or []
        if rest:
            row_values = layout.with_rest(row_values, rest)
        if None in row_values[layout.plain :]:
            present = [(row, value) for row, value in zip(layout.rows, row_values, strict=True) if value is not None]
            return self._shared(row for row, _ in present), [value for _, value in present], layout
        return layout.rows, row_values, layout  # type: ignore[return-value] # there is no None among them

    def _shared(self, rows: Iterable[Row]) -> Rows:
        """The rows as a tuple, the same object for equal ones."""
        unique = tuple(rows)
        return self._rows.setdefault(unique, unique)


class Layout:
    """The rows of a device of which just the values at these indices are known.

    The first ``plain`` rows have one value each; the others are ratios of several.
    """

    def __init__(
        self,
        all_series: Iterable[tuple[str, Series, bool]],
        ratios: Iterable[Ratio],
        counts: Iterable[tuple[str, Row]],
        known: tuple[int, ...],
        shared: Callable[[Iterable[Row]], Rows],
    ) -> None:
        index_by_key = {_ALL_KEYS[index]: index for index in known}
        self._conversions: list[tuple[int, Callable[[Any], float]]] = []
        self._keys: list[str] = []
        rows: list[Row] = []
        for key, series, primary in all_series:
            if key in index_by_key:
                if series.scale != 1.0 or series.bits is not None:
                    convert = (
                        series.convert if series.kind == "counter" else _ConvertedValues(series.convert).__getitem__
                    )
                    self._conversions.append((len(rows), convert))
                self._keys.append(key)
                rows.append(Row(series.name, series.labels, series.kind, series.help, series.unit, primary))
        known_counts = [(key, row) for key, row in counts if key in index_by_key and (rows or key != HOLDERS.name)]
        rows += [row for _, row in known_counts]
        self.plain = len(rows)
        in_rows = [index_by_key[key] for key in (*self._keys, *[key for key, _ in known_counts])]
        picked = [*in_rows, *[index for index in known if index not in in_rows]]
        unknown = [index for index in range(len(_ALL_KEYS)) if index not in known]
        self._known, self._unknown = len(picked), (None,) * len(unknown)
        self._pick: Callable[[DeviceValues], DeviceValues] = itemgetter(*picked, *unknown)
        self._sums: list[list[int]] = []
        self._ratios: list[tuple[int, int, Ratio]] = []
        for ratio in ratios:
            if all(key in index_by_key for key in ratio.keys):
                numerator, denominator = (
                    self._sum([index_by_key[key] for key in keys]) for keys in (ratio.numerators, ratio.denominators)
                )
                self._ratios.append((numerator, denominator, ratio))
                rows.append(Row(ratio.name, ratio.labels, ratio.kind, ratio.help, ratio.unit, primary=False))
        self.rows = shared(rows)

    def _sum(self, indices: list[int]) -> int:
        """The index of a sum of values, behind all values. The sum of no values counts as one."""
        if len(indices) == 1:
            return indices[0]
        self._sums.append(indices)
        return len(_ALL_KEYS) + len(self._sums) - 1

    def values(self, values: DeviceValues) -> list[float | None] | None:
        """The value of each row, None for a ratio whose denominator is zero.

        Returns None if other values are known than this layout is for.
        """
        picked = self._pick(values)
        row_values = list(picked[: self._known])
        if picked[self._known :] != self._unknown:
            return None
        try:
            sum(row_values)  # type: ignore[arg-type] # fails if one is None, much faster than a search for it
        except TypeError:
            return None
        del row_values[self.plain :]
        for row, convert in self._conversions:
            row_values[row] = convert(row_values[row])
        if self._sums:
            values += tuple([sum([values[at] or 0.0 for at in indices]) if indices else 1.0 for indices in self._sums])
        row_values += [ratio.compute(values[above], values[below]) for above, below, ratio in self._ratios]  # type: ignore[arg-type]
        return row_values

    def with_rest(self, row_values: list[float | None], rest: Mapping[str, Value]) -> list[float | None]:
        """The row values, with those of ``rest`` in place of the device's own."""
        conversions = dict(self._conversions)
        for row, key in enumerate(self._keys):
            if (value := rest.get(key)) is not None:
                row_values[row] = conversions[row](value) if row in conversions else float(value)
        return row_values


class _ConvertedValues(dict[Any, float]):
    """A series' values by those of its key. Clocks, temperatures and percentages repeat; counters do not, and are not
    kept."""

    def __init__(self, convert: Callable[[Value], float]) -> None:
        super().__init__()
        self._convert = convert

    def __missing__(self, value: Value) -> float:
        if len(self) >= MEMO_SIZE:
            self.clear()
        converted = self[value] = self._convert(value)
        return converted


@lru_cache(maxsize=MEMO_SIZE)
def row_of(info: Info, *values: str) -> Row:
    """The row of an info metric with these values of its labels; equal rows are the same object."""
    pairs = tuple(zip(info.labels, values, strict=True))
    fields = (info.name, pairs, info.kind, help_with_unit(info.help, info.unit), info.unit)
    return Row(*fields, primary=False, since_start=info.since_start)
