"""What a partition's nodes have written so far, and so what each tick writes: its series, and an end for those gone.

In: records of gpu.attributed, in the order of their partition. Out: groups of samples.
State, per node: the last sample's identity, and the open series. It changes only when a tick is settled.
A series that is missing from a tick ends there, with a staleness marker at the tick's time; those of a node that went
silent end 1 ms after its last tick, so that whatever it still sends later is later.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sinks.blocks import Block, Group, Layouts, Row, Subject, holders
from sinks.device_series import Further, MadeOf, further, made
from sinks.labels import MAX_LABELS, LabelSet, Place, Seen, labels, place, seen
from sinks.tenants import Labels
from topics import replays
from topics.attributed import AttributedDevice, AttributedSample
from topics.metric import Profile
from topics.replays import Last, Verdict

STALE: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""The value that ends a series in Prometheus: a NaN with just these bits."""

_MAX_MS = 2**63 - 1
_FORGET_AFTER_S = 24 * 3600
_SPARE = 64

NodeKey = tuple[str, str]


class _Known(NamedTuple):
    """A device, or what it has beside its metrics, as it was last labelled, and the block of it."""

    seen: Seen | MadeOf
    block: Block


_KnownBy = dict[str | tuple[str, ...], _Known]
"""By a device's uuid, or by the key of what is beside its metrics."""


@dataclass(slots=True)
class _Node:
    """What is known of a node. ``last`` is its last sample, ``heard_s`` the clock's time when that was settled."""

    last: Last
    heard_s: float
    ts_ms: int | None = None
    open: tuple[Block, ...] = ()
    known: _KnownBy = field(default_factory=dict)


class Tick(NamedTuple):
    """What a record writes. ``clashes`` counts values that are left out because another device has the same labels."""

    sample: AttributedSample
    groups: list[Group]
    blocks: tuple[Block, ...]
    markers: int
    clashes: int

    @property
    def node(self) -> NodeKey:
        """Whose tick it is."""
        return self.sample.cluster, self.sample.node


class Silence(NamedTuple):
    """The end of all open series of a node that was not heard of for long."""

    node: NodeKey
    groups: list[Group]


class Series:
    """The series of one partition. ``now_s`` is always a clock that never steps back."""

    def __init__(self, names: Profile, label_set: LabelSet, max_labels: int = MAX_LABELS) -> None:
        self._layouts = Layouts(names)
        self._label_set, self._max_labels = label_set, max_labels
        self._nodes: dict[NodeKey, _Node] = {}
        self._strangers: dict[NodeKey, _KnownBy] = {}

    def verdict(self, sample: AttributedSample) -> Verdict:
        """Whether this record is its node's next one, was settled before, or is the first of a new log."""
        node = self._nodes.get((sample.cluster, sample.node))
        return replays.verdict(node.last if node else None, sample)

    def tick(self, sample: AttributedSample) -> Tick:
        """What a record writes."""
        node = self._nodes.get((sample.cluster, sample.node))
        known = node.known if node else self._strangers.setdefault((sample.cluster, sample.node), {})
        groups = self._groups(sample, known)
        blocks = tuple(group.block for group in groups)
        if node is not None and blocks == node.open:
            return Tick(sample, groups, blocks, 0, 0)
        kept = _unique(groups)
        clashes = sum(len(group.values) for group in groups) - sum(len(group.values) for group in kept)
        markers = _ended(node.open, kept, sample.ts_ms) if node else []
        count = sum(len(group.values) for group in markers)
        return Tick(sample, [*kept, *markers], tuple(group.block for group in kept), count, clashes)

    def settle(self, tick: Tick, now_s: float, *, accepted: bool) -> None:
        """A tick was finished. One that was refused leaves the open series as they were before it."""
        sample = tick.sample
        node = self._nodes.get(tick.node)
        if node is None:
            known = self._strangers.pop(tick.node, {})
            node = self._nodes[tick.node] = _Node(replays.after(None, sample), now_s, known=known)
        node.last, node.heard_s = replays.after(node.last, sample), now_s
        if accepted:
            node.ts_ms, node.open = sample.ts_ms, tick.blocks
            if len(node.known) > 2 * len(tick.blocks) + _SPARE:
                node.known.clear()

    def recall(self, sample: AttributedSample, now_s: float) -> None:
        """A record that an earlier life settled: know it, and write nothing."""
        if self.verdict(sample) != "replay":
            self.settle(self.tick(sample), now_s, accepted=True)

    def silent(self, now_s: float, stale_after_s: float) -> list[Silence]:
        """The ends of the nodes that were not heard of for so long. They are open until :meth:`ended`."""
        for key in [key for key, node in self._nodes.items() if now_s - node.heard_s > _FORGET_AFTER_S]:
            del self._nodes[key]
        quiet = [(key, node) for key, node in self._nodes.items() if now_s - node.heard_s >= stale_after_s]
        return [Silence(key, _end_all(node)) for key, node in quiet if node.open and node.ts_ms is not None]

    def ended(self, silence: Silence) -> None:
        """A node's silence was written, or refused for good."""
        self._nodes[silence.node].open = ()

    def forget(self) -> None:
        """The topic was made anew: offsets start again."""
        self._nodes.clear()
        self._strangers.clear()

    def _groups(self, sample: AttributedSample, known: _KnownBy) -> list[Group]:
        """What a record says of its devices' metrics, and beside them."""
        where = place(sample)
        groups = [group for device in sample.devices if (group := self._device(where, sample, device, known))]
        beside = further(self._label_set, where, sample)
        return groups + [Group(self._beside(one, known), sample.ts_ms, one.values) for one in beside]

    def _device(
        self, where: Place, sample: AttributedSample, device: AttributedDevice, known: _KnownBy
    ) -> Group | None:
        measured = self._layouts.measure(device.metrics, holders(device, sample.attribution))
        if not measured.rows:
            return None
        now = seen(where, device)
        before = known.get(device.uuid)
        if before is None or before.seen != now:
            pairs = labels(self._label_set, now, self._max_labels)
            before = known[device.uuid] = _Known(now, Block(pairs, measured.rows))
        elif before.block.rows is not measured.rows:
            before = known[device.uuid] = _Known(now, Block(before.block.labels, measured.rows))
        return Group(before.block, sample.ts_ms, measured.values)

    def _beside(self, one: Further, known: _KnownBy) -> Block:
        before = known.get(one.key)
        if before is None or before.seen != one.of:
            before = known[one.key] = _Known(one.of, Block(*made(self._label_set, one.of, self._max_labels)))
        return before.block


def _unique(groups: Iterable[Group]) -> list[Group]:
    """The groups, the first of those whose series are the same: a series has one value at a time."""
    return list({_series(group.block): group for group in reversed(list(groups))}.values())[::-1]


def _series(block: Block) -> tuple[Subject, Labels]:
    return block.subject, block.labels


def _ended(before: Sequence[Block], now: Iterable[Group], ts_ms: int) -> list[Group]:
    there: dict[tuple[Subject, Labels], frozenset[Row]] = {
        _series(group.block): frozenset(group.block.rows) for group in now
    }
    gone = [(block, [row for row in block.rows if row not in there.get(_series(block), ())]) for block in before]
    return [_end(block, rows, ts_ms) for block, rows in gone if rows]


def _end_all(node: _Node) -> list[Group]:
    ts_ms = min((node.ts_ms or 0) + 1, _MAX_MS)
    return [_end(block, block.rows, ts_ms) for block in node.open]


def _end(block: Block, rows: Sequence[Row], ts_ms: int) -> Group:
    """The end of some of a block's series: of all of them, as a rule, and then the block is one that was written."""
    some = block if len(rows) == len(block.rows) else Block(block.labels, tuple(rows), block.subject)
    return Group(some, ts_ms, [STALE] * len(rows))
