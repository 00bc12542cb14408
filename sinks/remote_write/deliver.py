"""Delivers what a receiver takes of a request, and finds out what it does not take.

In: ticks, each a list of groups, at most one of a node. Out: for each tick, what of it was refused and why.
A refused request is halved, by tick, then by device, then by series, the earlier half first, until the rest is in.
Sending a sample again is safe: no two ticks of a request are one node's, so it is still the newest of its series, and
receivers take an exact duplicate of the newest sample silently, whether they kept a part of the refused request or not.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from sinks.blocks import Block, Group
from sinks.remote_write.policy import WHOLE, Refusal

Send = Callable[[Sequence[Group]], Awaitable[Refusal | None]]
"""Sends a request until it is accepted (None) or refused."""


@dataclass(slots=True)
class Fate:
    """What became of a tick: the groups of it that were refused, with the reasons. None: all of it was accepted."""

    refused: list[tuple[Group, Refusal]] = field(default_factory=list)

    def whole(self, tick: Sequence[Group]) -> bool:
        """Whether all of the tick was refused."""
        return sum(len(group.values) for group, _ in self.refused) == sum(len(group.values) for group in tick)


async def deliver(ticks: Sequence[Sequence[Group]], send: Send) -> list[Fate]:
    """Send ticks as one request, in parts where that is refused. Raises whatever ``send`` raises."""
    fates = [Fate() for _ in ticks]
    await _ticks([(tick, fate) for tick, fate in zip(ticks, fates, strict=True) if tick], send)
    return fates


async def _ticks(ticks: Sequence[tuple[Sequence[Group], Fate]], send: Send) -> None:
    if not ticks:
        return
    refusal = await send([group for groups, _ in ticks for group in groups])
    if refusal is None:
        return
    if len(ticks) > 1:
        half = len(ticks) // 2
        await _ticks(ticks[:half], send)
        await _ticks(ticks[half:], send)
    else:
        groups, fate = ticks[0]
        if refusal.reason in WHOLE:
            fate.refused += [(group, refusal) for group in groups]
        else:
            await _narrow(groups, refusal, fate, send)


async def _narrow(groups: Sequence[Group], refusal: Refusal, fate: Fate, send: Send) -> None:
    """These groups of one tick were refused together: find out which of them, and which of their series."""
    halves = _halves(groups)
    if not halves:
        fate.refused += [(group, refusal) for group in groups]
    for half in halves:
        again = await send(half)
        if again is not None:
            await _narrow(half, again, fate, send)


def _halves(groups: Sequence[Group]) -> tuple[Sequence[Group], ...]:
    """The two halves of these groups, or of the series of a single one; none where there is but one series."""
    if len(groups) > 1:
        half = len(groups) // 2
        return groups[:half], groups[half:]
    block, ts_ms, values = groups[0]
    half = len(values) // 2
    if not half:
        return ()
    return (
        [Group(Block(block.labels, block.rows[:half]), ts_ms, values[:half])],
        [Group(Block(block.labels, block.rows[half:]), ts_ms, values[half:])],
    )
