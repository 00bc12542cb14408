"""A node's ticks in windows of time: the last value of each series, and the aggregates of its gauges.

In: a node's translated ticks, in order. Out: what a window writes when it closes.
State: one window of one node.

A window is the time between two multiples of the resolution, on the clock of the ticks. It closes when a tick is
outside of it, or is not later than the one before. A series that ends within it is written with its last value, at the
time of the last tick that had it, and ends at the tick that lacks it. The mean is the mean over ticks. What counts
since the tick before is written of every tick, because its values add up.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import add
from typing import Literal, NamedTuple

from sinks.series.model import STALE, Key, Row, Rows, SampleGroup, SeriesSet, Subject, Value
from sinks.series.relabel import Withheld
from topics.metric import Series
from topics.profiles import PROFILES, insert_suffix, names_of

Aggregate = Literal["min", "mean", "max"]
"""What a window writes of a gauge beside its last value."""

_HELP: dict[Aggregate, str] = {"min": "Lowest value", "mean": "Mean of the values", "max": "Highest value"}
_NO_QUANTITIES = ("", "bitmask", "code", "errors")  # a gauge of errors has those since the tick before
_OF_EVERY_TICK: Subject = "errors"


def _is_gauge(series: Row | Series) -> bool:
    """Whether its value is a quantity that goes up and down."""
    return series.kind == "gauge" and series.unit not in _NO_QUANTITIES


_WITHIN_TICKS: dict[str, Aggregate] = {
    insert_suffix(series.name, f"_{aggregate}", series.unit): aggregate
    for profile in PROFILES.values()
    for series in chain.from_iterable(profile.series.values())
    for aggregate in _HELP
    if _is_gauge(series)
}
"""The names of aggregates of gauges. A series of one of these names is an aggregate within each tick, also in a tick
that lacks the gauge."""


def aggregates(text: str) -> tuple[Aggregate, ...]:
    """The aggregates of a list such as ``min,max``; none of an empty text.

    :raises ValueError: a name is unknown, or is given twice.
    """
    names = names_of(text, _HELP) if text else []
    return tuple([name for name in _HELP if name in names])


class Resolution(NamedTuple):
    """The length of windows, and what they write of gauges beside the last value."""

    window_ms: int
    aggregates: tuple[Aggregate, ...] = ()


class NodeWindow:
    """The ticks of a node in one window; at least one.

    ``first``: the series of the first tick. ``began_ms``: its time. ``ended``: for series that a later tick
    lacks, their last values and then their staleness markers, in order of time; and what is written of every tick, of
    all but the last one. ``identities`` gives a unique key for each series of a set.
    """

    def __init__(
        self,
        resolution: Resolution,
        identities: Callable[[SeriesSet], Sequence[Hashable]],
        ts_ms: int,
        keys: Sequence[Key],
        groups: list[SampleGroup],
        withheld: Mapping[Withheld, int],
    ) -> None:
        self._resolution, self._identities = resolution, identities
        self.began_ms = self._ts_ms = ts_ms
        self._keys, self._groups, self.withheld = keys, groups, withheld
        self.ended: list[SampleGroup] = []
        self._aggregates: dict[SeriesSet, _Aggregates] = {}
        self._aggregate(groups)
        self.first = tuple([group.series for group in self.written()[1]])

    def includes(self, ts_ms: int) -> bool:
        """Whether a tick of this time is in the window, and later than all of its ticks."""
        length = self._resolution.window_ms
        return ts_ms > self._ts_ms and ts_ms // length == self.began_ms // length

    def add(self, ts_ms: int, keys: Sequence[Key], groups: list[SampleGroup], withheld: Mapping[Withheld, int]) -> None:
        """Add the node's next tick, which must be in the window."""
        self.ended += [group for group in self._groups if group.series.subject == _OF_EVERY_TICK]
        if [group.series for group in groups] != [group.series for group in self._groups]:
            self._change_series(ts_ms, groups)
        self._ts_ms, self._keys, self._groups, self.withheld = ts_ms, keys, groups, withheld
        self._aggregate(groups)

    def written(self) -> tuple[list[Key], list[SampleGroup]]:
        """The keys and the groups of the window: the last values, then the aggregates.

        Relabelling may make a device's aggregate equal to what the driver says of another: then that is written.
        """
        keys, groups = list(self._keys), list[SampleGroup]()
        aggregates: list[tuple[Key, SampleGroup]] = []
        for key, group in zip(self._keys, self._groups, strict=True):
            last, *of_gauges = self._closed(group)
            groups.append(last)
            aggregates += [(("between", *((key,) if isinstance(key, str) else key)), added) for added in of_gauges]
        names = {row.name for rows in {last.series.rows for last in groups} for row in rows}
        if any(row.name in names for _, added in aggregates for row in added.series.rows):
            written = {identity for last in groups for identity in self._identities(last.series)}
            aggregates = [(key, rest) for key, added in aggregates for rest in self._without(written, added)]
        return [*keys, *[key for key, _ in aggregates]], [*groups, *[added for _, added in aggregates]]

    def _without(self, written: Collection[Hashable], group: SampleGroup) -> list[SampleGroup]:
        """The group without the series of these identities; none if it has no others."""
        identities = self._identities(group.series)
        rows = [row for row, identity in enumerate(identities) if identity not in written]
        return [group if len(rows) == len(identities) else group.part(rows)] if rows else []

    def _closed(self, group: SampleGroup) -> list[SampleGroup]:
        """What the window writes of a group: its last values and, if it has gauges, their aggregates."""
        gauges = self._aggregates.get(group.series)
        if gauges is None:
            return [group]
        columns, aggregates = self._columns(group.series), gauges.by_name()
        values = list(group.values)
        for row, name, gauge in columns.in_place:
            values[row] = aggregates[name][gauge]
        last = SampleGroup(group.series, group.ts_ms, values)
        if not columns.added:
            return [last]
        added = [aggregates[name][gauge] for name, gauge in columns.added]
        return [last, SampleGroup(_aggregate_set(group.series, self._resolution.aggregates), group.ts_ms, added)]

    def _aggregate(self, groups: Sequence[SampleGroup]) -> None:
        for series, _, values in groups if self._resolution.aggregates else ():
            aggregates = self._aggregates.get(series)
            if aggregates is None:
                aggregates = self._aggregates[series] = _Aggregates(_gauges(series.rows))
            aggregates.add(values)

    def _change_series(self, ts_ms: int, groups: Sequence[SampleGroup]) -> None:
        """The next tick has other series: end those that are not written any more, and keep the aggregates of the
        others. The same series may be an aggregate of the window in one tick, and one of the driver's in the next."""
        current = {group.series for group in groups}
        written = {identity for series in current for identity in self._written_identities(series)}
        ended = [rest for closed in self.written()[1] for rest in self._without(written, closed)]
        so_far: dict[Hashable, _RowAggregates] = {}
        for group in self._groups:
            if group.series not in current and (aggregates := self._aggregates.pop(group.series, None)) is not None:
                of_rows = dict(aggregates.by_row())
                added = [of_rows[aggregates.rows[gauge]] for _, gauge in self._columns(group.series).added]
                identities = self._written_identities(group.series)
                so_far |= {identities[row]: of_row for row, of_row in of_rows.items()}
                so_far |= dict(zip(identities[len(group.series.rows) :], added, strict=True))
        self.ended += [group for group in ended if group.series.subject != _OF_EVERY_TICK]
        self.ended += [SampleGroup(series, ts_ms, [STALE] * len(values)) for series, _, values in ended]
        for series in (current if so_far else set()) - self._aggregates.keys():
            aggregates = self._aggregates[series] = _Aggregates(_gauges(series.rows))
            identities = self._written_identities(series)
            known = {row: so_far.get(identities[row], _NO_TICKS) for row in aggregates.rows}
            added_identities = identities[len(series.rows) :]
            for identity, (name, gauge) in zip(added_identities, self._columns(series).added, strict=True):
                row = aggregates.rows[gauge]
                known[row] = known[row].merged(name, so_far.get(identity, _NO_TICKS))
            aggregates.restore(known)

    def _columns(self, series: SeriesSet) -> "_Columns":
        return _columns_of(series.rows, self._resolution.aggregates)

    def _written_identities(self, series: SeriesSet) -> list[Hashable]:
        """The identities of what the window writes of a set: of its series, then of their aggregates."""
        identities = list(self._identities(series))
        if self._columns(series).added:
            identities += self._identities(_aggregate_set(series, self._resolution.aggregates))
        return identities


class _RowAggregates(NamedTuple):
    """The aggregates of a series so far."""

    low: Value
    high: Value
    total: Value
    ticks: int

    def merged(self, name: Aggregate, other: "_RowAggregates") -> "_RowAggregates":
        """With the lowest or the highest value of ``other``, if that is the lower or the higher one."""
        low = min(self.low, other.low) if name == "min" else self.low
        return self._replace(low=low, high=max(self.high, other.high) if name == "max" else self.high)


_NO_TICKS = _RowAggregates(math.inf, -math.inf, 0, 0)


class _Aggregates:
    """The aggregates of some rows of a set."""

    __slots__ = ("_high", "_low", "_ticks", "_total", "rows")

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows
        self._low: list[Value] = [math.inf] * len(rows)
        self._high: list[Value] = [-math.inf] * len(rows)
        self._total: list[Value] = [0] * len(rows)
        self._ticks = [0] * len(rows)

    def add(self, values: Sequence[Value]) -> None:
        """Add a tick: a value for each row of the set."""
        gauge_values = [values[row] for row in self.rows]
        self._low = list(map(min, self._low, gauge_values))
        self._high = list(map(max, self._high, gauge_values))
        self._total = list(map(add, self._total, gauge_values))
        self._ticks = [ticks + 1 for ticks in self._ticks]

    def restore(self, aggregates: Mapping[int, _RowAggregates]) -> None:
        """Go on with the earlier aggregates of each row."""
        for index, row in enumerate(self.rows):
            self._low[index], self._high[index], self._total[index], self._ticks[index] = aggregates[row]

    def by_row(self) -> Iterator[tuple[int, _RowAggregates]]:
        """Each row and its aggregates."""
        yield from zip(self.rows, map(_RowAggregates, self._low, self._high, self._total, self._ticks), strict=True)

    def by_name(self) -> Mapping[Aggregate, Sequence[Value]]:
        """Each aggregate, with a value for each row."""
        means = [total / ticks for total, ticks in zip(self._total, self._ticks, strict=True)]
        return {"min": self._low, "mean": means, "max": self._high}


class _Columns(NamedTuple):
    """The aggregates that are written of a set; a gauge is its number among the set's gauges.

    ``added``: an aggregate of a gauge as a further series. ``in_place``: a row that is an aggregate itself, within each
    tick, and whose value is the same aggregate over the window.
    """

    added: tuple[tuple[Aggregate, int], ...]
    in_place: tuple[tuple[int, Aggregate, int], ...]


@lru_cache(maxsize=4096)
def _columns_of(rows: Rows, aggregates: tuple[Aggregate, ...]) -> _Columns:
    gauges = _gauges(rows)
    by_metric = _WITHIN_TICKS | {_aggregated(rows[row], name).name: name for row in gauges for name in _HELP}
    own = {row: by_metric[rows[row].name] for row in gauges if rows[row].name in by_metric}
    metrics = {row.name for row in rows}
    added = [
        (name, gauge)
        for name in aggregates
        for gauge, row in enumerate(gauges)
        if row not in own and _aggregated(rows[row], name).name not in metrics
    ]
    in_place = [(row, own[row], gauge) for gauge, row in enumerate(gauges) if own.get(row) in aggregates]
    return _Columns(tuple(added), tuple(in_place))


@lru_cache(maxsize=4096)
def _gauges(rows: Rows) -> tuple[int, ...]:
    """The numbers of the rows whose value is a quantity that goes up and down."""
    return tuple([number for number, row in enumerate(rows) if _is_gauge(row)])


def _aggregate_set(series: SeriesSet, aggregates: tuple[Aggregate, ...]) -> SeriesSet:
    """The set with the aggregates of a set's gauges: the same object for the same arguments."""
    aggregate_set: SeriesSet | None = series.cache.get((_aggregate_set, aggregates))
    if aggregate_set is None:
        gauges, columns = _gauges(series.rows), _columns_of(series.rows, aggregates)
        rows = tuple([_aggregated(series.rows[gauges[gauge]], name) for name, gauge in columns.added])
        aggregate_set = series.cache[_aggregate_set, aggregates] = SeriesSet(series.labels, rows, series.subject)
    aggregate_set.set_producer(series.start_ms, series.node)
    return aggregate_set


@lru_cache(maxsize=4096)
def _aggregated(row: Row, aggregate: Aggregate) -> Row:
    name = insert_suffix(row.name, f"_{aggregate}", row.unit)
    return row._replace(name=name, help=f"{_HELP[aggregate]} in the window. {row.help}", primary=False)
