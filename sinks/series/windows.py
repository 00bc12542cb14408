"""A node's ticks in windows of time: of each series the last value, and what its gauges were in between.

In:       a node's ticks, translated, in order. Out: what a window writes, when it is over.
State:    of one node, one window.

A window is what lies between two multiples of the resolution, on the ticks' own clock. It is over when a tick comes
that lies elsewhere, or is not later than the one before. A series that ends in it is written with its last value, at
the time of the last tick that had it, and ends with the tick that lacks it. The mean is that of the ticks.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import add
from typing import Literal, NamedTuple

from sinks.series.model import STALE, Key, Row, Rows, SampleGroup, SeriesSet, Value
from sinks.series.relabel import Withheld
from topics.profiles import insert_suffix

Aggregate = Literal["min", "mean", "max"]
"""What a window says of a gauge beside its last value."""

_HELP: dict[Aggregate, str] = {"min": "Lowest value", "mean": "Mean of the values", "max": "Highest value"}
_NO_QUANTITIES = ("", "bitmask", "code")

Identities = Callable[[SeriesSet], Sequence[Hashable]]


def aggregates(text: str) -> tuple[Aggregate, ...]:
    """Those that ``min,max`` names; of an empty text none, as the command has it by default.

    :raises ValueError: one is not known, or is there twice.
    """
    names = [name.strip() for name in text.split(",")] if text else []
    if wrong := [name for name in names if name not in _HELP]:
        raise ValueError(f"{wrong[0]!r} is none of {', '.join(_HELP)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} has a name twice")
    return tuple([name for name in _HELP if name in names])


class Resolution(NamedTuple):
    """How long windows are, and what they say of gauges beside the last value."""

    window_ms: int
    aggregates: tuple[Aggregate, ...] = ()


class NodeWindow:
    """The ticks of a node in one window, of which there is at least one.

    ``first``: the series that the first one had; ``ended``: the last values and the ends of those that a later one
    lacks, in the order of time; ``began_ms`` is the first one's time. ``identities`` tells a set's series from all
    others.
    """

    def __init__(
        self,
        resolution: Resolution,
        identities: Identities,
        ts_ms: int,
        keys: Sequence[Key],
        groups: list[SampleGroup],
        withheld: Mapping[Withheld, int],
    ) -> None:
        self._resolution, self._identities = resolution, identities
        self.began_ms = self._ts_ms = ts_ms
        self._keys, self._groups, self.withheld = keys, groups, withheld
        self.ended: list[SampleGroup] = []
        self._spreads: dict[SeriesSet, _Spread] = {}
        self._spread(groups)
        self.first = tuple([group.series for group in self.written()[1]])

    def has(self, ts_ms: int) -> bool:
        """Whether a tick of that time lies in it, after all that it has."""
        length = self._resolution.window_ms
        return ts_ms > self._ts_ms and ts_ms // length == self.began_ms // length

    def add(self, ts_ms: int, keys: Sequence[Key], groups: list[SampleGroup], withheld: Mapping[Withheld, int]) -> None:
        """The next tick, which lies in it."""
        if [group.series for group in groups] != [group.series for group in self._groups]:
            self._change(ts_ms, groups)
        self._ts_ms, self._keys, self._groups, self.withheld = ts_ms, keys, groups, withheld
        self._spread(groups)

    def written(self) -> tuple[list[Key], list[SampleGroup]]:
        """The last values, and what the gauges were in between; and the key of each group."""
        keys, groups = list(self._keys), list[SampleGroup]()
        between: list[SampleGroup] = []
        for key, group in zip(self._keys, self._groups, strict=True):
            last, *more = self._over(group)
            groups.append(last)
            between += more
            keys += [("between", *((key,) if isinstance(key, str) else key))] * len(more)
        return keys, [*groups, *between]

    def _over(self, group: SampleGroup) -> list[SampleGroup]:
        """What is written of a group in the end: its last values, and what its gauges were, if it has any."""
        spread = self._spreads.get(group.series)
        if spread is None:
            return [group]
        columns, of = _columns(group.series.rows, self._resolution.aggregates), spread.all()
        values = list(group.values)
        for row, aggregate, place in columns.themselves:
            values[row] = of[aggregate][place]
        last = SampleGroup(group.series, group.ts_ms, values)
        if not columns.beside:
            return [last]
        more = [of[aggregate][place] for aggregate, place in columns.beside]
        return [last, SampleGroup(_beside(group.series, self._resolution.aggregates), group.ts_ms, more)]

    def _spread(self, groups: Sequence[SampleGroup]) -> None:
        for series, _, values in groups if self._resolution.aggregates else ():
            spread = self._spreads.get(series)
            if spread is None:
                spread = self._spreads[series] = _Spread(_gauges(series.rows))
            spread.add(values)

    def _change(self, ts_ms: int, groups: Sequence[SampleGroup]) -> None:
        """The next tick has other series: end those that it lacks, and go on with what is known of the others."""
        now = {group.series for group in groups}
        there = {one for series in now for one in self._identities(series)}
        known: dict[Hashable, _Known] = {}
        gone: list[SampleGroup] = []
        for group in self._groups:
            if group.series in now:
                continue
            identities = self._identities(group.series)
            spread = self._spreads.pop(group.series, None)
            rows = [row for row, one in enumerate(identities) if one not in there]
            if rows:
                part = group if len(rows) == len(identities) else group.part(rows)
                gone.append(part)
                if spread is not None:
                    self._spreads[part.series] = spread.part(rows)
            if spread is not None:
                known |= {identities[row]: one for row, one in spread.by_row()}
        ended = [one for group in gone for one in self._over(group)]
        self.ended += ended
        self.ended += [SampleGroup(series, ts_ms, [STALE] * len(values)) for series, _, values in ended]
        for group in gone:
            self._spreads.pop(group.series, None)
        if known:
            for series in now - self._spreads.keys():
                spread = self._spreads[series] = _Spread(_gauges(series.rows))
                identities = self._identities(series)
                spread.know({row: known[identities[row]] for row in spread.rows if identities[row] in known})


class _Known(NamedTuple):
    """What is known of a series so far."""

    low: Value
    high: Value
    total: Value
    ticks: int


class _Spread:
    """What some rows of a set were, tick after tick."""

    __slots__ = ("_high", "_low", "_ticks", "_total", "rows")

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self._low: list[Value] = [float("inf")] * len(rows)
        self._high: list[Value] = [float("-inf")] * len(rows)
        self._total: list[Value] = [0] * len(rows)
        self._ticks = [0] * len(rows)

    def add(self, values: Sequence[Value]) -> None:
        """The values of a tick, of all rows of the set."""
        some = [values[row] for row in self.rows]
        self._low = list(map(min, self._low, some))
        self._high = list(map(max, self._high, some))
        self._total = list(map(add, self._total, some))
        self._ticks = [ticks + 1 for ticks in self._ticks]

    def know(self, known: Mapping[int, _Known]) -> None:
        """What was known of some rows before."""
        for place, row in enumerate(self.rows):
            if row in known:
                self._low[place], self._high[place], self._total[place], self._ticks[place] = known[row]

    def by_row(self) -> Iterator[tuple[int, _Known]]:
        """What is known of each row."""
        yield from zip(self.rows, map(_Known, self._low, self._high, self._total, self._ticks), strict=True)

    def part(self, rows: Sequence[int]) -> "_Spread":
        """That of a set of just these rows, in their order."""
        known = dict(self.by_row())
        places = [place for place, row in enumerate(rows) if row in known]
        some = _Spread(places)
        some.know({place: known[rows[place]] for place in places})
        return some

    def all(self) -> Mapping[Aggregate, Sequence[Value]]:
        """Each aggregate of all its rows."""
        means = [total / ticks for total, ticks in zip(self._total, self._ticks, strict=True)]
        return {"min": self._low, "mean": means, "max": self._high}


class _Columns(NamedTuple):
    """What is written of the gauges of some rows, each by its place among them.

    ``beside``: an aggregate, and of which gauge. ``themselves``: a row which is such an aggregate already, within each
    tick, and is one of itself.
    """

    beside: tuple[tuple[Aggregate, int], ...]
    themselves: tuple[tuple[int, Aggregate, int], ...]


@lru_cache(maxsize=4096)
def _columns(rows: Rows, aggregates: tuple[Aggregate, ...]) -> _Columns:
    gauges = _gauges(rows)
    of: dict[str, Aggregate] = {_aggregated(rows[row], one).name: one for row in gauges for one in _HELP}
    own = {row: of[rows[row].name] for row in gauges if rows[row].name in of}
    names = {row.name for row in rows}
    beside = [
        (one, place)
        for one in aggregates
        for place, row in enumerate(gauges)
        if row not in own and _aggregated(rows[row], one).name not in names
    ]
    themselves = [(row, own[row], place) for place, row in enumerate(gauges) if own.get(row) in aggregates]
    return _Columns(tuple(beside), tuple(themselves))


@lru_cache(maxsize=4096)
def _gauges(rows: Rows) -> tuple[int, ...]:
    """The numbers of those that are a quantity that goes up and down."""
    return tuple([n for n, row in enumerate(rows) if row.kind == "gauge" and row.unit not in _NO_QUANTITIES])


def _beside(series: SeriesSet, aggregates: tuple[Aggregate, ...]) -> SeriesSet:
    """The set that says what the gauges of a set were in a window; the same one for the same."""
    made: SeriesSet | None = series.cache.get((_beside, aggregates))
    if made is None:
        gauges, columns = _gauges(series.rows), _columns(series.rows, aggregates)
        rows = tuple([_aggregated(series.rows[gauges[place]], one) for one, place in columns.beside])
        made = series.cache[_beside, aggregates] = SeriesSet(series.labels, rows, series.subject)
    made.begin(series.start_ms, series.node)
    return made


@lru_cache(maxsize=4096)
def _aggregated(row: Row, one: Aggregate) -> Row:
    name = insert_suffix(row.name, f"_{one}", row.unit)
    return row._replace(name=name, help=f"{_HELP[one]} in the window. {row.help}", primary=False)
