"""The open series of the nodes of a partition: those that were written and have not ended.

In: ticks, each node's in order. Out: the samples of a tick, or of a window of ticks, in groups.
State, per node: the identity of its last tick, and its open series. It changes only when a tick is settled.
A series that is missing from a tick ends with a staleness marker at the tick's time. The series of a silent node end
1 ms after its last tick, so that a tick that comes after all is later than the marker.
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
from topics.samples import silent_after_s

_MAX_MS = 2**63 - 1
_FORGET_AFTER_S = 24 * 3600

NodeKey = tuple[str, str]


class Size(NamedTuple):
    """The size of a tick: its samples, their approximate bytes before compression, and its primary values."""

    samples: int
    bytes: int
    primaries: int


@dataclass(slots=True)
class _Node:
    """The state of a node.

    ``last`` identifies its last tick, which was settled at ``settled_s`` and had this ``interval_ms``. ``ts_ms`` and
    ``open``: the time and the series of the last tick that was accepted. ``proven``: this process has sent that tick,
    and all of it was accepted. ``refused``: nothing of its last tick was accepted.
    ``size``: that of a tick with just these series and no ends, None if it is not computed yet.
    """

    last: LastTick
    settled_s: float
    interval_ms: int | None = None
    ts_ms: int | None = None
    open: tuple[SeriesSet, ...] = ()
    proven: bool = False
    refused: bool = False
    size: Size | None = None
    cache: Cache = field(default_factory=Cache)


class NodeTick(NamedTuple):
    """The samples of a tick, or of a window of which ``sample`` is the last tick.

    ``open``: the series that are open afterwards. ``withheld`` counts the samples that are not written because of their
    labels, by reason.
    """

    sample: SeriesTick
    groups: list[SampleGroup]
    open: tuple[SeriesSet, ...]
    markers: int
    withheld: Mapping[Withheld, int]
    size: Size

    @property
    def node(self) -> NodeKey:
        """The cluster and node of the tick."""
        return self.sample.cluster, self.sample.node


class Silence(NamedTuple):
    """The ends of all open series of a node that has been silent for too long."""

    node: NodeKey
    groups: list[SampleGroup]


class OpenSeries:
    """The open series of the nodes of a partition. ``now_s`` is a clock that never steps back.

    ``resolution`` None: each tick is written.
    """

    def __init__(self, translator: Translator, resolution: Resolution | None = None) -> None:
        self._translator, self.resolution = translator, resolution
        self._nodes: dict[NodeKey, _Node] = {}
        self._unsettled: dict[NodeKey, Cache] = {}

    def verdict(self, sample: SeriesTick, previous: SeriesTick | None = None) -> Verdict:
        """Whether a record is its node's next one, a replay, or the first of a new log.

        ``previous``: the node's tick before it, if that is not settled yet.
        """
        node = self._nodes.get((sample.cluster, sample.node))
        last = node.last if node else None
        return replays.verdict(replays.after(last, previous) if previous else last, sample)

    def is_proven(self, tick: NodeTick) -> bool:
        """Whether the tick has exactly the series of the node's last tick, and all of that was accepted."""
        node = self._nodes.get(tick.node)
        return node is not None and node.proven and tick.open == node.open and not tick.markers

    def was_refused(self, sample: SeriesTick) -> bool:
        """Whether nothing of the node's last tick was accepted, as after its clock was set back."""
        node = self._nodes.get((sample.cluster, sample.node))
        return node is not None and node.refused

    def is_newest(self, tick: NodeTick) -> bool:
        """Whether the tick is later than every tick of its node that is known to be accepted."""
        node = self._nodes.get(tick.node)
        return node is None or node.ts_ms is None or tick.sample.ts_ms > node.ts_ms

    def distrust(self) -> None:
        """Another process may have sent later ticks: what was proven of the nodes is not any more."""
        for node in self._nodes.values():
            node.proven = False

    def fold(self, sample: SeriesTick, window: NodeWindow | None) -> NodeWindow:
        """Put a tick into its node's window. None: open a new one."""
        if self.resolution is None:
            raise RuntimeError("without a resolution there are no windows")
        cache = self._cache(sample)
        keys, groups = self._translator.translate(sample, cache)
        if window is None:
            identities = self._translator.identities
            return NodeWindow(self.resolution, identities, sample.ts_ms, keys, groups, cache.withheld)
        window.add(sample.ts_ms, keys, groups, cache.withheld)
        return window

    def tick(self, sample: SeriesTick, window: NodeWindow | None = None) -> NodeTick:
        """The samples of a tick, or of its window: each series once, and an end for those that are gone."""
        node = self._nodes.get((sample.cluster, sample.node))
        open_before = node.open if node is not None else ()
        if window is None and self.resolution is not None:
            window = self.fold(sample, None)
        if window is not None:
            _, last = window.written()
            ends = [*self._markers(open_before, window.first, window.began_ms), *window.ended]
            markers, groups = samples_of([group for group in ends if group.is_end]), [*ends, *last]
            series = tuple([group.series for group in last])
            return NodeTick(sample, groups, series, markers, window.withheld, _size(groups))
        cache = self._cache(sample)
        _, groups = self._translator.translate(sample, cache)
        series = tuple([group.series for group in groups])
        if node is not None and node.size is not None and series == open_before:
            return NodeTick(sample, groups, open_before, 0, cache.withheld, node.size)
        ends = self._markers(open_before, series, sample.ts_ms)
        groups += ends
        return NodeTick(sample, groups, series, samples_of(ends), cache.withheld, _size(groups))

    def _markers(self, before: Sequence[SeriesSet], after: Sequence[SeriesSet], ts_ms: int) -> list[SampleGroup]:
        """The staleness markers of the series that are in sets ``before`` and in none ``after``."""
        kept, translator = set(before).intersection(after), self._translator
        removed = [series for series in before if series not in kept]
        added = [series for series in after if series not in kept]
        added_labels = {series.labels for series in added}
        overlapping = {series for series in removed if translator.may_collide or series.labels in added_labels}
        written = {key for series in (added if overlapping else ()) for key in translator.identities(series)}
        markers: list[SampleGroup] = []
        for series in removed:
            if series in overlapping:
                identities = translator.identities(series)
                rows = [row for row, key in enumerate(identities) if key not in written]
                series = series if len(rows) == len(series.rows) else series.part(rows)
            if series.rows:
                markers.append(SampleGroup(series, ts_ms, [STALE] * len(series.rows)))
        return markers

    def _cache(self, sample: SeriesTick) -> Cache:
        key = (sample.cluster, sample.node)
        node = self._nodes.get(key)
        return node.cache if node else self._unsettled.setdefault(key, Cache())

    def settle(self, tick: NodeTick, now_s: float, *, accepted: bool, whole: bool = False) -> None:
        """Note that a tick is finished. If it was refused, the open series stay as they were.

        ``whole``: nothing of it was refused or left out.
        """
        sample = tick.sample
        node = self._nodes.get(tick.node)
        if node is None:
            cache = self._unsettled.pop(tick.node, None) or Cache()
            node = self._nodes[tick.node] = _Node(replays.after(None, sample), now_s, cache=cache)
        node.last, node.settled_s, node.interval_ms = replays.after(node.last, sample), now_s, sample.interval_ms
        node.proven, node.refused = whole, not accepted
        if accepted:
            node.ts_ms, node.open = sample.ts_ms, tick.open
            node.size = None if tick.markers else tick.size
        self._translator.release(node.cache, node.open, sample.offset)

    def recall(self, sample: SeriesTick, now_s: float) -> None:
        """Restore the state that a record left, which an earlier process has settled. Writes nothing."""
        if self.verdict(sample) != "replay":
            self.settle(self.tick(sample), now_s, accepted=True)

    def silences(self, now_s: float, stale_after_s: float, except_for: Collection[NodeKey] = ()) -> list[Silence]:
        """The ends of the nodes that have been silent for that long, and for three of their intervals. Their series are
        open until :meth:`ended`. A node that has none is forgotten after a day."""
        for key, node in list(self._nodes.items()):
            if now_s - node.settled_s > _FORGET_AFTER_S and not node.open and key not in except_for:
                del self._nodes[key]
        silences = []
        for key, node in self._nodes.items():
            is_due = now_s - node.settled_s >= silent_after_s(node.interval_ms, stale_after_s)
            is_silent = is_due and key not in except_for
            if is_silent and node.open and node.ts_ms is not None:
                ts_ms = min(node.ts_ms + 1, _MAX_MS)
                ends = [SampleGroup(series, ts_ms, [STALE] * len(series.rows)) for series in node.open]
                silences.append(Silence(key, ends))
        return silences

    def ended(self, silence: Silence) -> None:
        """Note that a silence was written, or refused for good: another node may write these series from now on."""
        node = self._nodes[silence.node]
        claimed, node.cache.claimed = node.cache.claimed, set()
        node.cache.end(claimed, 0, silence.groups[0].ts_ms)
        self._translator.release(node.cache)
        node.open, node.cache = (), Cache()

    def clear(self) -> None:
        """Forget everything: the topic was recreated, and its offsets start again."""
        self._nodes.clear()
        self._unsettled.clear()


def _size(groups: Sequence[SampleGroup]) -> Size:
    return Size(samples_of(groups), sum([series.bytes for series, _, _ in groups]), primaries(groups))
