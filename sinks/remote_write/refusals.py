"""Delivers what a receiver takes of some ticks, and finds out what it does not take.

In: ticks, each a list of groups, those of a node in their order. Out: for each, what of it was refused and left out,
and why.
State: the series that were refused lately, and how large a request may be.
A refused request is halved, by tick, then by device, then by series, the earlier half first, until the rest is in.
Halves that have no node in common are sent at the same time; at most ``at_once`` requests of all are under way.
To send a sample again is safe. A receiver may have kept a part of the refused request, or not: it takes an exact
duplicate of the newest sample of a series silently, and refuses an older one, which is in then.

A refused request of m ticks costs at most 2 m requests to find the ticks, and at most ``BUDGET`` more for each of
those. If ``FEW`` series of a tick or of a device, far from one another, are refused one by one and none is accepted,
they stand for all of it. What is refused is left out for ten minutes. What could not be found out is not: it is refused
with its tick, and the node's next tick goes on where this one stopped.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from delivery.instruments import Instruments
from sinks.remote_write.policy import TOO_LARGE, UNTIMELY, WHOLE, Refusal
from sinks.remote_write.send import RemoteWriteSender
from sinks.series.model import Row, SampleGroup, SeriesSet, samples_of
from topics.metric import Labels

FEW = 8
"""So many series, refused one by one and none accepted, stand for all of their device or tick."""

BUDGET = 64
"""So many requests may find out what of a tick is refused; what is left then is sent once more and not split."""

LEFT_OUT = "left_out"
"""The reason of a record of which all is left out."""

LEFT_OUT_S = 600.0
"""A series that was refused is not sent for so long, and then tried again."""

GROWS_EVERY_S = 60.0
"""So often the size of requests grows by a tenth, while such requests are accepted."""

_SERIES_NAMED = 3

Refused = tuple[SampleGroup, Refusal]
"""Series of one device, and why they are refused."""

_Key = tuple[Labels, str, Labels]
"""A series: its device's labels, its name, its own labels."""


class _Cut(NamedTuple):
    """How a set is cut, until other series are left out: the numbers of the rows that are sent, and that are not.

    ``series`` has those that are sent.
    """

    version: int
    series: SeriesSet
    sent: list[int]
    left: dict[Refusal, list[int]]


class LeftOut:
    """The series that are left out."""

    def __init__(self) -> None:
        self._entries: dict[_Key, tuple[Refusal, float]] = {}
        self._version = 0
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, group: SampleGroup, refusal: Refusal, now_s: float) -> None:
        """Series were refused."""
        until_s = now_s + LEFT_OUT_S
        self._entries |= {_key(group.series, row): (refusal, until_s) for row in group.series.rows}
        self._next_s = min(self._next_s, until_s)
        self._version += 1

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        if now_s < self._next_s:
            return
        self._entries = {key: (why, until_s) for key, (why, until_s) in self._entries.items() if until_s > now_s}
        self._next_s = min((until_s for _, until_s in self._entries.values()), default=math.inf)
        self._version += 1

    def cut(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], list[Refused]]:
        """What of these groups is sent, and what is left out."""
        if not self._entries:
            return groups, []
        sent: list[SampleGroup] = []
        left: list[Refused] = []
        for group in groups:
            cut: _Cut | None = group.series.cache.get(self)
            if cut is None or cut.version != self._version:
                cut = _Cut(self._version, group.series, [], {})
                for number, row in enumerate(group.series.rows):
                    entry = self._entries.get(_key(group.series, row))
                    (cut.sent if entry is None else cut.left.setdefault(entry[0], [])).append(number)
                if cut.left:
                    cut = cut._replace(series=group.part(cut.sent).series)
                group.series.cache[self] = cut
            if not cut.left:
                sent.append(group)
                continue
            left += [(group.part(rows), refusal) for refusal, rows in cut.left.items()]
            if cut.sent:
                sent.append(SampleGroup(cut.series, group.ts_ms, [group.values[row] for row in cut.sent]))
        return sent, left


def _key(series: SeriesSet, row: Row) -> _Key:
    return series.labels, row.name, row.labels


class RequestSize:
    """How many samples a request may have, as the receiver has shown.

    Half of what was too large, then a tenth more each minute, for as long as requests of that size are accepted.
    """

    def __init__(self) -> None:
        self.samples = math.inf
        self._grown_s = 0.0

    def too_large(self, samples: int, now_s: float) -> None:
        """A request of so many samples was too large."""
        self.samples = min(self.samples, max(1, samples // 2))
        self._grown_s = now_s

    def taken(self, samples: int, now_s: float) -> None:
        """A request of so many samples was accepted."""
        if samples >= 0.9 * self.samples and now_s - self._grown_s >= GROWS_EVERY_S:
            self.samples += max(1.0, self.samples // 10)
            self._grown_s = now_s


@dataclass(slots=True)
class Delivered:
    """What became of a tick: the groups of it that were refused now or left out, with the reasons; else all is in.

    ``written``: so many samples of what was refused for its time are in all the same; which ones is not known.
    ``requests`` counts those that found it out. ``in_doubt``: it was sent more than once, and may have been in already.
    """

    refused: list[Refused] = field(default_factory=list)
    left_out: list[Refused] = field(default_factory=list)
    written: int = 0
    requests: int = 0
    in_doubt: bool = False

    def nothing_of(self, tick: Sequence[SampleGroup]) -> bool:
        """Whether the tick has series, and none of them was accepted."""
        refused = (*self.refused, *self.left_out)
        return bool(refused) and samples_of(group for group, _ in refused) == samples_of(tick)

    def describe(self) -> str:
        """One line on what was refused: what was said, and which series, the first few of them by name and labels."""
        refusal = self.refused[0][1]
        names = []
        for group, _ in self.refused:
            for row in group.series.rows:
                pairs = ",".join(
                    [f'{name}="{text[:64]}"' for name, text in sorted((*group.series.labels, *row.labels))]
                )
                names.append(f"{row.name}{{{pairs}}}")
        more = f" and {len(names) - _SERIES_NAMED} more series" if len(names) > _SERIES_NAMED else ""
        return f"{refusal.reason}: {refusal.text}: {', '.join(names[:_SERIES_NAMED])}{more}"


class Deliverer:
    """Delivers ticks to one receiver, and remembers what it does not take."""

    def __init__(
        self,
        sender: RemoteWriteSender,
        made: Instruments,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        at_once: int = 8,
    ) -> None:
        self._sender, self._slots = sender, asyncio.Semaphore(at_once)
        self._left_out = LeftOut()
        self._size = RequestSize()
        self._clock_s = clock_s
        made.gauge("gpustream_remote_write_series_left_out").set_function(self._left_out.__len__)

    async def deliver(self, ticks: Sequence[Sequence[SampleGroup]], abandon: asyncio.Event) -> list[Delivered]:
        """Send ticks as one request, or as many as the receiver's size asks for, in parts if that is refused.

        A receiver that refuses everything is waited for, and all is sent again. Raises Abandoned.
        """
        self._left_out.expire(self._clock_s())
        cuts = [self._left_out.cut(tick) for tick in ticks]
        again = False
        while True:
            results = [Delivered(left_out=left) for _, left in cuts]
            pieces = [_Piece(result, group) for result, (sent, _) in zip(results, cuts, strict=True) for group in sent]
            bisection = _Bisection(self._sender, self._slots, self._size, self._clock_s, abandon, pieces)
            try:
                await bisection.run()
            except _RefusesEverything:
                again = True
                continue
            for group, refusal in bisection.found:
                self._left_out.add(group, refusal, self._clock_s())
            for result in results:
                result.in_doubt = again or bisection.sent_again
            return results


class _Piece(NamedTuple):
    """A group to be sent, and the result of its tick."""

    result: Delivered
    group: SampleGroup

    def part(self, rows: Sequence[int]) -> "_Piece":
        """Some of its series, by their numbers."""
        return _Piece(self.result, self.group.part(rows))


_Pieces = Sequence[_Piece]


class _RefusesEverything(Exception):
    """The receiver refused everything for a while, and accepts again: nothing is known of what was sent."""


class _Bisection:
    """Pieces on their way. ``found`` are the series that are refused for what they are, if that was found out.

    ``sent_again``: some of it was sent more than once.
    """

    def __init__(
        self,
        sender: RemoteWriteSender,
        slots: asyncio.Semaphore,
        size: RequestSize,
        clock_s: Callable[[], float],
        abandon: asyncio.Event,
        pieces: _Pieces,
    ) -> None:
        self.found: list[Refused] = []
        self.sent_again = False
        self._sender, self._slots, self._size, self._clock_s = sender, slots, size, clock_s
        self._abandon, self._all = abandon, pieces
        self._accepted_before = sender.accepted
        self._last_refusal: tuple[Refusal, int] | None = None

    async def run(self) -> None:
        """Send the pieces, and find out what of them is refused. Raises _RefusesEverything: send all again."""
        await self._send(self._all)
        if self._last_refusal is not None:
            await self._ensure_it_accepts_anything(*self._last_refusal)

    async def _send(self, pieces: _Pieces) -> None:
        """Send pieces in requests of the size that the receiver takes; narrow down those that are refused."""
        while pieces:
            some, pieces = _take(pieces, self._size.samples)
            await self._send_ticks(some)

    async def _send_smaller(self, pieces: _Pieces, samples: int) -> None:
        """Send pieces in smaller requests: one of so many samples was too large."""
        self._size.too_large(samples, self._clock_s())
        await self._send(pieces)

    async def _send_ticks(self, pieces: _Pieces) -> None:
        """Send pieces of any ticks, and narrow down what is refused."""
        refusal = await self._request(pieces)
        if refusal is None:
            return
        self.sent_again |= refusal.sent_before
        if refusal.reason not in UNTIMELY:
            await self._ensure_it_accepts_anything(refusal, self._accepted_before)
        ticks = list({id(piece.result): piece.result for piece in pieces}.values())
        samples = samples_of(piece.group for piece in pieces)
        if refusal.reason == TOO_LARGE and samples > 1:
            await self._send_smaller(pieces, samples)
        elif len(ticks) > 1:
            self.sent_again = True
            second = ticks[len(ticks) // 2]
            cut = next(number for number, piece in enumerate(pieces) if piece.result is second)
            await self._send_halves(pieces[:cut], pieces[cut:])
        else:
            await self._narrow(pieces, refusal, try_a_few=True)

    async def _send_halves(self, *halves: _Pieces) -> None:
        """Send ticks before others: at the same time, unless both have samples of one device or node."""
        earlier, later = ({piece.group.series.labels for piece in half} for half in halves)
        if not earlier.isdisjoint(later):
            for half in halves:
                await self._send_ticks(half)
            return
        ends = await asyncio.gather(*map(self._send_ticks, halves), return_exceptions=True)
        for failed in (end for end in ends if end is not None):
            raise failed

    async def _narrow(self, pieces: _Pieces, refusal: Refusal, *, try_a_few: bool) -> None:
        """Find out which series of one tick are refused. ``try_a_few``: try a few of many before anything else."""
        samples = samples_of(piece.group for piece in pieces)
        if refusal.reason in WHOLE or samples == 1:
            self._refuse(pieces, refusal)
        elif refusal.reason == TOO_LARGE:
            await self._send_smaller(pieces, samples)
        elif pieces[0].result.requests >= BUDGET:
            self._refuse(pieces, refusal, known=False)
        elif try_a_few and samples > FEW:
            left = await self._try_a_few(pieces, refusal)
            if left is pieces:
                await self._narrow(pieces, refusal, try_a_few=False)
            elif left:
                await self._narrow_part(left, try_a_few=False)
        elif len(pieces) > 1:
            for half in (pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]):
                await self._narrow_part(half, try_a_few=len(half) == 1)
        else:
            for rows in (range(samples // 2), range(samples // 2, samples)):
                await self._narrow_part([pieces[0].part(rows)], try_a_few=False)

    async def _narrow_part(self, pieces: _Pieces, *, try_a_few: bool) -> None:
        """Send a part of one tick, and find out which series of it are refused."""
        refusal = await self._request_of_tick(pieces)
        if refusal is not None:
            await self._narrow(pieces, refusal, try_a_few=try_a_few)

    async def _try_a_few(self, pieces: _Pieces, refusal: Refusal) -> _Pieces:
        """Send a few series one by one, until one is accepted. Gives what is not settled then.

        If none is, they stand for all that are about the same, as metrics or pods.
        """
        series = [(number, row) for number, piece in enumerate(pieces) for row in range(len(piece.group.values))]
        refused: set[tuple[int, int]] = set()
        for turn in range(FEW):
            number, row = series[(2 * turn + 1) * len(series) // (2 * FEW)]
            one = [pieces[number].part([row])]
            why = await self._request_of_tick(one)
            if why is None:
                return _without(pieces, refused) if refused else pieces
            self._refuse(one, why)
            refused.add((number, row))
        tried = {pieces[number].group.series.subject for number, _ in refused}
        left = _without(pieces, refused)
        self._refuse([piece for piece in left if piece.group.series.subject in tried], refusal)
        return [piece for piece in left if piece.group.series.subject not in tried]

    def _refuse(self, pieces: _Pieces, refusal: Refusal, *, known: bool = True) -> None:
        """These are refused. ``known``: all of them are, not just some."""
        if not pieces:
            return
        refused = [(piece.group, refusal) for piece in pieces]
        pieces[0].result.refused += refused
        pieces[0].result.written += refusal.written
        if refusal.reason not in WHOLE:
            self.found += refused if known else []
            self._last_refusal = refusal, self._sender.accepted

    async def _request_of_tick(self, pieces: _Pieces) -> Refusal | None:
        """Send a part of one tick as one request; a tick has so many of them, and no more."""
        pieces[0].result.requests += 1
        return await self._request(pieces)

    async def _request(self, pieces: _Pieces) -> Refusal | None:
        """Send pieces as one request."""
        groups = [piece.group for piece in pieces]
        async with self._slots:
            refusal = await self._sender.send(groups, self._abandon)
        if refusal is None and not math.isinf(self._size.samples):
            self._size.taken(samples_of(groups), self._clock_s())
        return refusal

    async def _ensure_it_accepts_anything(self, refusal: Refusal, since: int) -> None:
        """The receiver accepts something else, if not this. Else raises _RefusesEverything, when it accepts again."""
        groups = [piece.group for piece in self._all]
        if not await self._sender.accepts_anything(groups, since, refusal.text, self._abandon):
            raise _RefusesEverything


def _take(pieces: _Pieces, most: float) -> tuple[_Pieces, _Pieces]:
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


def _without(pieces: _Pieces, series: Collection[tuple[int, int]]) -> _Pieces:
    """The pieces without some series, each given by the numbers of its piece and its row."""
    kept = []
    for number, piece in enumerate(pieces):
        if rows := [row for row in range(len(piece.group.values)) if (number, row) not in series]:
            kept.append(piece.part(rows))
    return kept
