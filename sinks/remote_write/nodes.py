"""What the nodes of a partition have written so far: their open series, and how they end.

In: ticks, each node's in order. Out: what a tick, or a window of them, writes, as groups of samples.
State, per node: the last sample's identity, and the open series. It changes only when a tick is settled.
A series that is missing from a tick ends with a staleness marker at the tick's time. The series of a node that went
silent end 1 ms after its last tick, so that a tick that still comes is later than the marker.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delivery import replays
from delivery.replays import LastTick, Verdict
from sinks.series.cache import Cache
from sinks.series.model import STALE, SampleGroup, SeriesSet, primaries, samples_of
from sinks.series.relabel import Withheld
from sinks.series.tick import SeriesTick
from sinks.series.translation import Translator
from sinks.series.windows import NodeWindow, Resolution

_MAX_MS = 2**63 - 1
_FORGET_AFTER_S = 24 * 3600

NodeKey = tuple[str, str]


class Size(NamedTuple):
    """How much a tick writes: samples, about how many bytes before they are compressed, and values of metrics."""

    samples: int
    bytes: int
    primaries: int


@dataclass(slots=True)
class _Node:
    """What is known of a node. ``last`` is its last sample, ``heard_s`` the clock's time when that was settled.

    ``ts_ms`` and ``open``: the time and the series of the last one that was accepted. ``proven``: all of that was
    accepted, by this process. ``size`` is that of a tick that writes these series and ends none, once it is known.
    """

    last: LastTick
    heard_s: float
    ts_ms: int | None = None
    open: tuple[SeriesSet, ...] = ()
    proven: bool = False
    size: Size | None = None
    cache: Cache = field(default_factory=Cache)


class NodeTick(NamedTuple):
    """What a record writes, or a window, of which ``sample`` is the last tick.

    ``withheld`` counts samples that are not written because of their labels, by reason."""

    sample: SeriesTick
    groups: list[SampleGroup]
    open: tuple[SeriesSet, ...]
    markers: int
    withheld: Mapping[Withheld, int]
    size: Size

    @property
    def node(self) -> NodeKey:
        """Whose tick it is."""
        return self.sample.cluster, self.sample.node


class Silence(NamedTuple):
    """The end of all open series of a node that was not heard of for long."""

    node: NodeKey
    groups: list[SampleGroup]


class OpenSeries:
    """The series that the nodes of a partition have written so far. ``now_s`` is a clock that never steps back.

    ``resolution`` None: each tick is written.
    """

    def __init__(self, translator: Translator, resolution: Resolution | None = None) -> None:
        self._translator, self._resolution = translator, resolution
        self._nodes: dict[NodeKey, _Node] = {}
        self._unsettled: dict[NodeKey, Cache] = {}

    def verdict(self, sample: SeriesTick, before: SeriesTick | None = None) -> Verdict:
        """Whether this record is its node's next one, was settled before, or is the first of a new log.

        ``before``: the node's tick before it, if that is not settled yet.
        """
        node = self._nodes.get((sample.cluster, sample.node))
        last = node.last if node else None
        return replays.verdict(replays.after(last, before) if before else last, sample)

    def is_proven(self, tick: NodeTick) -> bool:
        """Whether it writes just the series of which the node's last tick was accepted whole."""
        node = self._nodes.get(tick.node)
        return node is not None and node.proven and tick.open == node.open and not tick.markers

    def is_newest(self, tick: NodeTick) -> bool:
        """Whether it is later than all of its node that is known to be accepted."""
        node = self._nodes.get(tick.node)
        return node is None or node.ts_ms is None or tick.sample.ts_ms > node.ts_ms

    def doubt(self) -> None:
        """Somebody else may have sent later ticks meanwhile: nothing is proven any more."""
        for node in self._nodes.values():
            node.proven = False

    def fold(self, sample: SeriesTick, window: NodeWindow | None) -> NodeWindow:
        """Put a tick into its node's window; None: it begins one."""
        if self._resolution is None:
            raise RuntimeError("without a resolution there are no windows")
        cache = self._cache(sample)
        keys, groups = self._translator.translate(sample, cache)
        if window is None:
            identities = self._translator.identities
            return NodeWindow(self._resolution, identities, sample.ts_ms, keys, groups, cache.withheld)
        window.add(sample.ts_ms, keys, groups, cache.withheld)
        return window

    def tick(self, sample: SeriesTick, window: NodeWindow | None = None) -> NodeTick:
        """What a record writes, or its window: its series, each once, and an end for those that are gone."""
        if window is None and self._resolution is not None:
            window = self.fold(sample, None)
        if window is not None:
            (_, groups), withheld = window.written(), window.withheld
            written, ended, began_ms = window.first, window.ended, window.began_ms
        else:
            cache = self._cache(sample)
            _, groups = self._translator.translate(sample, cache)
            withheld, ended, began_ms = cache.withheld, [], sample.ts_ms
            written = tuple([group.series for group in groups])
        node = self._nodes.get((sample.cluster, sample.node))
        before = node.open if node is not None else ()
        markers = self._ends(before, written, began_ms) if before != written else []
        if window is not None:
            written = tuple([group.series for group in groups])
            ends = samples_of([one for one in (*markers, *ended) if one.is_end])
            groups = [*markers, *ended, *groups]
            return NodeTick(sample, groups, written, ends, withheld, _size(groups))
        if node is not None and node.size is not None and before == written:
            return NodeTick(sample, groups, before, 0, withheld, node.size)
        groups += markers
        return NodeTick(sample, groups, written, samples_of(markers), withheld, _size(groups))

    def _ends(self, before: Sequence[SeriesSet], written: Sequence[SeriesSet], at_ms: int) -> list[SampleGroup]:
        """The ends of those series that are not written any more."""
        kept, translator = set(before).intersection(written), self._translator
        gone, begun = ([series for series in some if series not in kept] for some in (before, written))
        there = {series.labels for series in begun}
        alike = {series for series in gone if translator.may_collide or series.labels in there}
        new = {one for series in (begun if alike else ()) for one in translator.identities(series)}
        markers: list[SampleGroup] = []
        for series in gone:
            if series in alike:
                identities = translator.identities(series)
                rows = tuple([row for row, one in zip(series.rows, identities, strict=True) if one not in new])
                if len(rows) < len(series.rows):
                    series = SeriesSet(series.labels, rows, series.subject)
            if series.rows:
                markers.append(SampleGroup(series, at_ms, [STALE] * len(series.rows)))
        return markers

    def _cache(self, sample: SeriesTick) -> Cache:
        key = (sample.cluster, sample.node)
        node = self._nodes.get(key)
        return node.cache if node else self._unsettled.setdefault(key, Cache())

    def settle(self, tick: NodeTick, now_s: float, *, accepted: bool, whole: bool = False) -> None:
        """A tick was finished. One that was refused leaves the open series as they were before it.

        ``whole``: nothing of it was refused or left out.
        """
        sample = tick.sample
        node = self._nodes.get(tick.node)
        if node is None:
            cache = self._unsettled.pop(tick.node, None) or Cache()
            node = self._nodes[tick.node] = _Node(replays.after(None, sample), now_s, cache=cache)
        node.last, node.heard_s, node.proven = replays.after(node.last, sample), now_s, whole
        if accepted:
            node.ts_ms, node.open = sample.ts_ms, tick.open
            node.size = None if tick.markers else tick.size

    def recall(self, sample: SeriesTick, now_s: float) -> None:
        """A record that an earlier life settled: know it, and write nothing."""
        if self.verdict(sample) != "replay":
            self.settle(self.tick(sample), now_s, accepted=True)

    def silent(self, now_s: float, stale_after_s: float, but: Collection[NodeKey] = ()) -> list[Silence]:
        """The ends of nodes that were not heard of for so long, ``but`` those. They are open until :meth:`ended`."""
        for key in [key for key, node in self._nodes.items() if now_s - node.heard_s > _FORGET_AFTER_S]:
            del self._nodes[key]
        found = []
        for key, node in self._nodes.items():
            silent = now_s - node.heard_s >= stale_after_s and key not in but
            if silent and node.open and node.ts_ms is not None:
                ts_ms = min(node.ts_ms + 1, _MAX_MS)
                ends = [SampleGroup(series, ts_ms, [STALE] * len(series.rows)) for series in node.open]
                found.append(Silence(key, ends))
        return found

    def ended(self, silence: Silence) -> None:
        """A node's silence was written, or refused for good. Its series may be another node's from now on."""
        node = self._nodes[silence.node]
        node.open, node.cache = (), Cache()

    def clear(self) -> None:
        """The topic was created again: offsets start again."""
        self._nodes.clear()
        self._unsettled.clear()


def _size(groups: Sequence[SampleGroup]) -> Size:
    return Size(samples_of(groups), sum([series.bytes for series, _, _ in groups]), primaries(groups))
