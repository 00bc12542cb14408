"""Where to begin: inputs at what was committed, state ten minutes of log time before that.

A snapshot of a node is sent again every five minutes, so ten minutes of them hold every node's state; a partition whose
newest record is older than that is read from ten minutes before it. A broker that can't find offsets by time, or a
topic without times, is read from the beginning; so is a compacted state topic, whose every record may be the last of
its key.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from delivery.ledger import Partition

STATE_WINDOW_MS = 10 * 60 * 1000


class Log(Protocol):
    """What has to be asked of a broker to know where to begin."""

    async def committed(self, tp: Partition) -> int | None:
        """The group's committed offset."""

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The first offset of each partition."""

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last one of each partition."""

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time; None: there is none, or the broker can't tell."""

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time of the record at each offset; None: it could not be read."""


class Held(msgspec.Struct, frozen=True):
    """What this process already holds: how far it has read each state partition, and the inputs' last commits.

    State is pruned behind the commits, so a group that was set back makes it useless.
    """

    states: dict[Partition, int] = {}
    commits: dict[Partition, int] = {}


class Start(msgspec.Struct, frozen=True):
    """Where reading begins: the next offset of each partition, and where each partition ends at this moment.

    ``fresh`` are the partition numbers whose state is read anew, so that what is held of them must be dropped;
    ``lost`` are offsets that were committed as the next to read, but that the log no longer has. ``settled`` says of
    each state partition before which offset the group has finished its records once, dead letters included: they are
    read again for what they say, and not to be dead-lettered again.
    """

    positions: dict[Partition, int]
    input_ends: dict[Partition, int]
    state_ends: dict[Partition, int]
    fresh: frozenset[int]
    lost: dict[Partition, int]
    settled: dict[Partition, int]


class Bounds(msgspec.Struct, frozen=True):
    """The first offset of each partition, and the one after the last."""

    begins: Mapping[Partition, int]
    ends: Mapping[Partition, int]

    def holds(self, tp: Partition, offset: int | None) -> bool:
        """Whether reading can go on from this offset."""
        return offset is not None and self.begins[tp] <= offset <= self.ends[tp]


async def find(
    log: Log,
    inputs: Iterable[Partition],
    states: Iterable[Partition],
    held: Held,
    compacted: frozenset[str] = frozenset(),
) -> Start:
    """Find where to begin to read these input and state partitions. ``compacted`` topics are read whole.

    Where a state's topic was deleted and created again, what is held of it stays true, and its new log is read as well.
    """
    inputs, states = list(inputs), list(states)
    bounds = Bounds(*await asyncio.gather(log.beginnings(inputs + states), log.ends(inputs + states)))
    tps = inputs + states
    commits = dict(zip(tps, await asyncio.gather(*(log.committed(tp) for tp in tps)), strict=True))
    committed = {tp: commits[tp] for tp in inputs}
    positions = {tp: _position(offset, bounds, tp) for tp, offset in committed.items()}
    lost = {tp: offset for tp, offset in committed.items() if offset is not None and offset != positions[tp]}
    renewed = {tp for tp in states if held.states.get(tp, 0) > bounds.ends[tp]}
    fresh = {tp.partition for tp in states if tp not in renewed and not bounds.holds(tp, held.states.get(tp))}
    fresh |= {tp.partition for tp, offset in positions.items() if offset < held.commits.get(tp, 0)}
    unread = [tp for tp in states if tp.partition in fresh or tp in renewed]
    kept = {tp: held.states[tp] for tp in states if tp not in unread}
    whole = {tp: bounds.begins[tp] for tp in unread if tp.topic in compacted}
    anew = await _state_positions(log, [tp for tp in unread if tp.topic not in compacted], positions, bounds)
    ends = {tp: bounds.ends[tp] for tp in inputs}, {tp: bounds.ends[tp] for tp in states}
    settled = {tp: _position(commits[tp], bounds, tp) for tp in states}
    return Start(positions | kept | whole | anew, *ends, frozenset(fresh), lost, settled)


def _position(committed: int | None, bounds: Bounds, tp: Partition) -> int:
    return committed if committed is not None and bounds.holds(tp, committed) else bounds.begins[tp]


async def _state_positions(
    log: Log, states: list[Partition], inputs: Mapping[Partition, int], bounds: Bounds
) -> dict[Partition, int]:
    """For each state partition, the offset to read it from."""
    filled = [tp for tp in states if bounds.begins[tp] < bounds.ends[tp]]
    numbers = {tp.partition for tp in filled}
    pending = {tp: at for tp, at in inputs.items() if tp.partition in numbers and at < bounds.ends[tp]}
    times = await log.times(pending | {tp: bounds.ends[tp] - 1 for tp in filled}) if filled else {}
    since: dict[Partition, int] = {}
    for tp in filled:
        known = [times.get(other) for other in (tp, *(i for i in pending if i.partition == tp.partition))]
        if None not in known:
            since[tp] = max(0, min(t for t in known if t is not None) - STATE_WINDOW_MS)
    found = await log.offsets_at(since) if since else {}
    return {tp: _or(found.get(tp), bounds.begins[tp]) for tp in states}


def _or(offset: int | None, otherwise: int) -> int:
    return otherwise if offset is None else offset
