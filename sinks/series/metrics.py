"""A device's metrics -> rows and values, in profiles that share its labels. Pure.

In: what is known of a device, as values. Out: the rows of each profile's series, and a value for each.
State: the rows for each set of known metrics, and conversions of values.
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
_SAID = (*KEYS, HOLDERS.name, XIDS.name, LAST_XID.name)

Said = tuple[float | None, ...]
"""What a device says: a value for each key of metrics, then its :data:`Counts`; None if that is not known."""

Counts = tuple[float | None, float | None, float | None]
"""What a device says beside its metrics: its holders, its XID errors, and the last one."""

NO_COUNTS: Counts = (None, None, None)
NOTHING: Mapping[str, Value] = {}


class MetricNames:
    """How a device becomes rows and values in profiles that share its labels, remembered by what is known of it.

    ``counted``: the keys of each profile whose values another one counts.
    """

    def __init__(self, profiles: Sequence[Profile], counted: Mapping[Profile, Collection[str]]) -> None:
        self._series: list[tuple[str, Series, bool]] = []
        self._ratios: list[Ratio] = []
        further = any(profile.further for profile in profiles)
        self._counts = [(one.name, row_of(one)) for one in (HOLDERS, XIDS) if further]
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._rows: dict[Rows, Rows] = {}
        named: set[tuple[str, Labels]] = set()
        for profile in profiles:
            for key in [key for key in CATALOGUE if key in profile.series]:
                for number, series in enumerate(profile.series[key]):
                    if (series.name, series.labels) not in named:
                        named.add((series.name, series.labels))
                        self._series.append((key, series, not number and key not in counted[profile]))
            for series in profile.series.get(LAST_XID.name, ()):
                if (series.name, series.labels) not in named:
                    named.add((series.name, series.labels))
                    row = Row(series.name, (), series.kind, series.help, series.unit, primary=False)
                    self._counts.append((LAST_XID.name, row))
            for one in profile.ratios:
                if (one.name, one.labels) not in named:
                    named.add((one.name, one.labels))
                    self._ratios.append(one)

    def measure(
        self, said: Said, rest: Mapping[str, Value] = NOTHING, layout: "Layout | None" = None
    ) -> "tuple[Rows, Sequence[float], Layout | None]":
        """The rows of what is known of a device that has metrics, a value for each, and the layout of that; equal rows
        are the same object.

        ``rest`` is written in place of the device's own values; what is made of several keys is made of those.
        ``layout``: the device's last one.
        """
        values = layout.values(said) if layout is not None else None
        if layout is None or values is None:
            known = tuple([place for place, value in enumerate(said) if value is not None])
            if not known or known[0] >= len(KEYS):
                return (), (), layout
            layout = self._layouts.get(known) or self._layout(known)
            values = layout.values(said) or []
        if rest:
            values = layout.with_rest(values, rest)
        if None in values[layout.plain :]:
            there = [(row, value) for row, value in zip(layout.rows, values, strict=True) if value is not None]
            return self._same(row for row, _ in there), [value for _, value in there], layout
        return layout.rows, values, layout  # type: ignore[return-value] # None was looked for

    def _layout(self, known: tuple[int, ...]) -> "Layout":
        if len(self._layouts) >= _LAYOUTS:
            self._layouts.clear()
            self._rows.clear()
        made = self._layouts[known] = Layout(self._series, self._ratios, self._counts, known, self._same)
        return made

    def _same(self, rows: Iterable[Row]) -> Rows:
        found = tuple(rows)
        return self._rows.setdefault(found, found)


class Layout:
    """The rows of a device of which just what is in these places is known; those past ``plain`` are made of several."""

    def __init__(
        self,
        series: Iterable[tuple[str, Series, bool]],
        ratios: Iterable[Ratio],
        counts: Iterable[tuple[str, Row]],
        known: tuple[int, ...],
        same: Callable[[Iterable[Row]], Rows],
    ) -> None:
        names = {_SAID[place]: place for place in known}
        self._conversions: list[tuple[int, Callable[[Any], float]]] = []
        self._keys: list[str] = []
        rows: list[Row] = []
        for key, one, primary in series:
            if key in names:
                if one.scale != 1.0 or one.bits is not None:
                    convert = one.of if one.kind == "counter" else _Scaled(one.of).__getitem__
                    self._conversions.append((len(rows), convert))
                self._keys.append(key)
                rows.append(Row(one.name, one.labels, one.kind, one.help, one.unit, primary))
        counted = [(key, row) for key, row in counts if key in names and rows]
        rows += [row for _, row in counted]
        self.plain = len(rows)
        written = [names[key] for key in (*self._keys, *[key for key, _ in counted])]
        there = [*written, *[place for place in known if place not in written]]
        absent = [place for place in range(len(_SAID)) if place not in known]
        self._known, self._absent = len(there), (None,) * len(absent)
        self._pick: Callable[[Said], Said] = itemgetter(*there, *absent)
        self._sums: list[list[int]] = []
        self._ratios: list[tuple[int, int, Ratio]] = []
        for ratio in ratios:
            if all(key in names for key in ratio.keys):
                above, below = (
                    self._sum([names[key] for key in keys]) for keys in (ratio.numerators, ratio.denominators)
                )
                self._ratios.append((above, below, ratio))
                rows.append(Row(ratio.name, ratio.labels, ratio.kind, ratio.help, ratio.unit, primary=False))
        self.rows = same(rows)

    def _sum(self, places: list[int]) -> int:
        """The place of the sum of some places, behind what is said; of none, it is one."""
        if len(places) == 1:
            return places[0]
        self._sums.append(places)
        return len(_SAID) + len(self._sums) - 1

    def values(self, said: Said) -> list[float | None] | None:
        """The value of each row, None for a ratio of which the denominator is zero; or None, if something else is known
        than its places say.
        """
        picked = self._pick(said)
        values = list(picked[: self._known])
        if picked[self._known :] != self._absent or None in values:
            return None
        del values[self.plain :]
        for at, convert in self._conversions:
            values[at] = convert(values[at])
        if self._sums:
            said += tuple([sum([said[place] or 0.0 for place in places]) if places else 1.0 for places in self._sums])
        values += [ratio.of(said[above], said[below]) for above, below, ratio in self._ratios]  # type: ignore[arg-type]
        return values

    def with_rest(self, values: list[float | None], rest: Mapping[str, Value]) -> list[float | None]:
        """The values, but for the keys of which the rest is written."""
        conversions = dict(self._conversions)
        for at, key in enumerate(self._keys):
            if (value := rest.get(key)) is not None:
                values[at] = conversions[at](value) if at in conversions else float(value)
        return values


class _Scaled(dict[Any, float]):
    """The values of a series by those of its key, remembered: clocks, temperatures and percentages are few; what
    a counter says does not come again."""

    def __init__(self, of: Callable[[Value], float]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, value: Value) -> float:
        if len(self) >= MEMO_SIZE:
            self.clear()
        made = self[value] = self._of(value)
        return made


@lru_cache(maxsize=MEMO_SIZE)
def row_of(info: Info, *values: str) -> Row:
    own = tuple(zip(info.labels, values, strict=True))
    of = (info.name, own, info.kind, help_with_unit(info.help, info.unit), info.unit)
    return Row(*of, primary=False, since_start=info.since_start)
