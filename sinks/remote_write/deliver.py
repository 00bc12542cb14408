"""Delivers what a receiver takes of some ticks, and finds out what it does not take.

In: ticks, each a list of groups, at most one of a node. Out: for each, what of it was refused and left out, and why.
A refused request is halved, by tick, then by device, then by series, the earlier half first, until the rest is in.
Sending a sample again is safe: no two ticks of a request are one node's, so it is still the newest of its series, and
receivers take an exact duplicate of the newest sample silently, whether they kept a part of the refused request or not.

Each refused request of m ticks costs at most 2 m requests to find the ticks, and at most ``BUDGET`` for each of those,
but for the parts that are left then. If ``SOUNDINGS`` series of a tick or of a device, far from one another, are
refused one by one and none is accepted, they stand for all of it. What is refused is left out for ten minutes. What
could not be found out is not: it is refused with its tick, and the node's next tick goes on where this one stopped.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sinks.blocks import Group
from sinks.remote_write.left_out import LeftOut, Refused, RequestSize
from sinks.remote_write.policy import TOO_LARGE, UNTIMELY, WHOLE, Refusal
from sinks.remote_write.transmit import Transmitter
from topics.instruments import Instruments

SOUNDINGS = 8
"""So many series, refused one by one and none accepted, stand for all of their device or tick."""

BUDGET = 64
"""So many requests may find out what of a tick is refused; what is left then is sent once more and not split."""


@dataclass(slots=True)
class Fate:
    """What became of a tick: the groups of it that were refused now or left out, with the reasons; else all is in.

    ``requests`` counts those that found it out.
    """

    refused: list[Refused] = field(default_factory=list)
    left_out: list[Refused] = field(default_factory=list)
    requests: int = 0

    def nothing_of(self, tick: Sequence[Group]) -> bool:
        """Whether the tick has series, and none of them was accepted."""
        refused = (*self.refused, *self.left_out)
        return bool(refused) and _samples(group for group, _ in refused) == _samples(tick)


class Deliverer:
    """Delivers ticks to one receiver, and remembers what it does not take."""

    def __init__(
        self, transmitter: Transmitter, made: Instruments, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._transmitter = transmitter
        self._left_out = LeftOut()
        self._size = RequestSize()
        self._clock_s = clock_s
        made.gauge("gpustream_remote_write_series_left_out").set_function(self._left_out.__len__)

    async def deliver(self, ticks: Sequence[Sequence[Group]], abandon: asyncio.Event) -> list[Fate]:
        """Send ticks as one request, or as many as the receiver's size asks for, in parts where that is refused.

        A receiver that refuses everything is waited for, and all is sent again. Raises Abandoned.
        """
        self._left_out.expire(self._clock_s())
        cuts = [self._left_out.cut(tick) for tick in ticks]
        while True:
            fates = [Fate(left_out=left) for _, left in cuts]
            pieces = [_Piece(fate, group) for fate, (sent, _) in zip(fates, cuts, strict=True) for group in sent]
            request = _Request(self._transmitter, self._size, self._clock_s, abandon)
            if await request.deliver(pieces):
                for group, refusal in request.found:
                    self._left_out.add(group, refusal, self._clock_s())
                return fates


class _Piece(NamedTuple):
    """A group to be sent, and the fate of its tick."""

    fate: Fate
    group: Group

    def part(self, rows: Sequence[int]) -> "_Piece":
        """Some of its series, by their numbers."""
        return _Piece(self.fate, self.group.part(rows))


_Pieces = Sequence[_Piece]


class _RefusesEverything(Exception):
    """The receiver refused everything for a while, so that nothing is known of what was sent."""


class _Request:
    """Pieces on their way. ``found`` are the series that are refused for what they are, as far as was found out."""

    def __init__(
        self, transmitter: Transmitter, size: RequestSize, clock_s: Callable[[], float], abandon: asyncio.Event
    ) -> None:
        self.found: list[Refused] = []
        self._transmitter = transmitter
        self._size = size
        self._clock_s = clock_s
        self._abandon = abandon
        self._accepted_before = transmitter.accepted
        self._all: _Pieces = ()
        self._judged: tuple[Refusal, int] | None = None

    async def deliver(self, pieces: _Pieces) -> bool:
        """Send pieces, and find out what is refused of them.

        False: the receiver began to refuse everything. It was waited for; send all again.
        """
        self._all = pieces
        try:
            await self._send(pieces)
            if self._judged is not None:
                await self._make_sure(*self._judged)
        except _RefusesEverything:
            return False
        return True

    async def _send(self, pieces: _Pieces) -> None:
        """Send pieces in requests of the size that the receiver takes; narrow down those that are refused."""
        while pieces:
            some, pieces = _first(pieces, self._size.samples)
            await self._try(some)

    async def _send_less(self, pieces: _Pieces, samples: int) -> None:
        """Send pieces in smaller requests: one of so many samples was too large."""
        self._size.too_large(samples, self._clock_s())
        await self._send(pieces)

    async def _try(self, pieces: _Pieces) -> None:
        """Send pieces of any ticks, and narrow down what is refused."""
        refusal = await self._ask(pieces)
        if refusal is None:
            return
        if refusal.reason not in UNTIMELY:
            await self._make_sure(refusal, self._accepted_before)
        ticks = list({id(piece.fate): piece.fate for piece in pieces}.values())
        samples = _samples(piece.group for piece in pieces)
        if refusal.reason == TOO_LARGE and samples > 1:
            await self._send_less(pieces, samples)
        elif len(ticks) > 1:
            second = ticks[len(ticks) // 2]
            cut = next(number for number, piece in enumerate(pieces) if piece.fate is second)
            await self._try(pieces[:cut])
            await self._try(pieces[cut:])
        else:
            await self._search(pieces, refusal, sound=True)

    async def _search(self, pieces: _Pieces, refusal: Refusal, *, sound: bool) -> None:
        """Find out which series of one tick are refused. ``sound``: try a few of many before anything else."""
        samples = _samples(piece.group for piece in pieces)
        if refusal.reason in WHOLE or samples == 1:
            self._refuse(pieces, refusal)
        elif refusal.reason == TOO_LARGE:
            await self._send_less(pieces, samples)
        elif pieces[0].fate.requests >= BUDGET:
            self._refuse(pieces, refusal, known=False)
        elif sound and samples > SOUNDINGS:
            left = await self._sound(pieces, refusal)
            if left is pieces:
                await self._search(pieces, refusal, sound=False)
            elif left:
                await self._part(left, sound=False)
        else:
            for half in _halves(pieces):
                await self._part(half, sound=len(half) == 1 < len(pieces))

    async def _part(self, pieces: _Pieces, *, sound: bool) -> None:
        refusal = await self._ask_for(pieces)
        if refusal is not None:
            await self._search(pieces, refusal, sound=sound)

    async def _sound(self, pieces: _Pieces, refusal: Refusal) -> _Pieces:
        """Send a few series one by one, until one is accepted. Gives what is not settled then.

        If none is, they stand for all that are about the same, as metrics or pods.
        """
        series = [(number, row) for number, piece in enumerate(pieces) for row in range(len(piece.group.values))]
        refused: set[tuple[int, int]] = set()
        for sounding in range(SOUNDINGS):
            number, row = series[(2 * sounding + 1) * len(series) // (2 * SOUNDINGS)]
            one = [pieces[number].part([row])]
            why = await self._ask_for(one)
            if why is None:
                return _without(pieces, refused) if refused else pieces
            self._refuse(one, why)
            refused.add((number, row))
        sounded = {pieces[number].group.block.subject for number, _ in refused}
        left = _without(pieces, refused)
        self._refuse([piece for piece in left if piece.group.block.subject in sounded], refusal)
        return [piece for piece in left if piece.group.block.subject not in sounded]

    def _refuse(self, pieces: _Pieces, refusal: Refusal, *, known: bool = True) -> None:
        """These are refused. ``known``: all of them are, not just some."""
        if not pieces:
            return
        refused = [(piece.group, refusal) for piece in pieces]
        pieces[0].fate.refused += refused
        if refusal.reason not in WHOLE:
            self.found += refused if known else []
            self._judged = refusal, self._transmitter.accepted

    async def _ask_for(self, pieces: _Pieces) -> Refusal | None:
        """Ask in search of what is refused of a tick."""
        pieces[0].fate.requests += 1
        return await self._ask(pieces)

    async def _ask(self, pieces: _Pieces) -> Refusal | None:
        refusal = await self._transmitter.send([piece.group for piece in pieces], self._abandon)
        if refusal is None and not math.isinf(self._size.samples):
            self._size.taken(_samples(piece.group for piece in pieces), self._clock_s())
        return refusal

    async def _make_sure(self, refusal: Refusal, since: int) -> None:
        """The receiver accepts something, be it not this. Raises _RefusesEverything, when it accepts again."""
        groups = [piece.group for piece in self._all]
        if not await self._transmitter.takes_something(groups, since, refusal.text, self._abandon):
            raise _RefusesEverything


def _samples(groups: Iterable[Group]) -> int:
    return sum([len(group.values) for group in groups])


def _first(pieces: _Pieces, most: float) -> tuple[_Pieces, _Pieces]:
    """The first pieces with at most so many samples, at least one, and the others."""
    if math.isinf(most):
        return pieces, []
    room = int(most)
    for number, piece in enumerate(pieces):
        samples = len(piece.group.values)
        if samples > room:
            if not room:
                return pieces[:number], pieces[number:]
            here, rest = piece.part(range(room)), piece.part(range(room, samples))
            return [*pieces[:number], here], [rest, *pieces[number + 1 :]]
        room -= samples
    return pieces, []


def _halves(pieces: _Pieces) -> tuple[_Pieces, _Pieces]:
    """The two halves of pieces, or of the series of a single one that has several."""
    if len(pieces) > 1:
        half = len(pieces) // 2
        return pieces[:half], pieces[half:]
    samples = len(pieces[0].group.values)
    return [pieces[0].part(range(samples // 2))], [pieces[0].part(range(samples // 2, samples))]


def _without(pieces: _Pieces, series: Collection[tuple[int, int]]) -> _Pieces:
    """The pieces but for some series, each given by the numbers of its piece and its row."""
    rows = [
        [row for row in range(len(piece.group.values)) if (number, row) not in series]
        for number, piece in enumerate(pieces)
    ]
    return [piece.part(kept) for piece, kept in zip(pieces, rows, strict=True) if kept]
