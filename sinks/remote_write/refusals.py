"""Delivers the samples that the receiver accepts, and finds out which series it refuses.

In: ticks, each a list of groups, those of a node in their order. Out: for each tick, what was refused or left out, and
why.
State: the series that were refused lately, and the size that a request may have.

A refused request is bisected, by tick, then by device, then by series, the earlier half first, until everything else is
accepted. Halves without a common node are sent at the same time; at most ``at_once`` requests are in flight. To send a
sample again is safe, whether or not the receiver has kept a part of the refused request: it accepts an exact duplicate
of the newest sample of a series, and refuses an older sample, which it has then.

To find the refused ticks of m ticks takes at most 2 m requests, and at most ``BUDGET`` more for each of those. If
``FEW`` series of a tick or a device, spread over all of it, are refused one by one and none is accepted, all of it
counts as refused. Refused series are left out for ten minutes. If the budget did not suffice to find them, the tick is
refused and its series are not left out: the search goes on with the node's next tick.
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
from sinks.series.model import SampleGroup, SeriesSet, samples_of
from topics.metric import Labels

FEW = 8
"""If so many series are refused one by one and none is accepted, all of their device or tick is refused."""

BUDGET = 64
"""The most requests to find out which series of a tick are refused; the rest is sent once more as a whole."""

LEFT_OUT = "left_out"
"""The reason of a record whose series are all left out."""

LEFT_OUT_S = 600.0
"""How long a refused series is left out before it is tried again."""

GROWS_EVERY_S = 60.0
"""How often the size of requests grows by a tenth, while requests of that size are accepted."""

_SERIES_NAMED = 3

Refused = tuple[SampleGroup, Refusal]
"""Series of one device, and why they are refused."""


class _Cut(NamedTuple):
    """The rows of a set that are sent, and those that are left out by reason, as of a version of :class:`LeftOut`.

    ``series``: the set of the rows that are sent, None if that is all of them.
    """

    version: int
    series: SeriesSet | None
    sent: list[int]
    left_out: dict[Refusal, list[int]]


class LeftOut:
    """The series that are left out because they were refused lately."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Labels, str, Labels], tuple[Refusal, float]] = {}  # by SeriesSet.keys
        self._version = 0
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, group: SampleGroup, refusal: Refusal, now_s: float) -> None:
        """Leave out the series of a group from now on."""
        until_s = now_s + LEFT_OUT_S
        self._entries |= dict.fromkeys(group.series.keys(), (refusal, until_s))
        self._next_s = min(self._next_s, until_s)
        self._version += 1

    def expire(self, now_s: float) -> None:
        """Forget the series whose time is over."""
        if now_s < self._next_s:
            return
        self._entries = {key: entry for key, entry in self._entries.items() if entry[1] > now_s}
        self._next_s = min((until_s for _, until_s in self._entries.values()), default=math.inf)
        self._version += 1

    def cut(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], list[Refused]]:
        """Divide groups into what to send and what to leave out."""
        if not self._entries:
            return groups, []
        sent: list[SampleGroup] = []
        left_out: list[Refused] = []
        for group in groups:
            cut: _Cut | None = group.series.cache.get(self)
            if cut is None or cut.version != self._version:
                cut = _Cut(self._version, None, [], {})
                for number, key in enumerate(group.series.keys()):
                    entry = self._entries.get(key)
                    (cut.sent if entry is None else cut.left_out.setdefault(entry[0], [])).append(number)
                if cut.left_out:
                    cut = cut._replace(series=group.series.part(cut.sent))
                group.series.cache[self] = cut
            if cut.series is None:
                sent.append(group)
                continue
            left_out += [(group.part(rows), refusal) for refusal, rows in cut.left_out.items()]
            if cut.sent:
                sent.append(SampleGroup(cut.series, group.ts_ms, [group.values[row] for row in cut.sent]))
        return sent, left_out


class RequestSize:
    """The most samples of a request, learned from the receiver.

    It is halved when a request was too large, and grows by a tenth each minute while requests of that size are
    accepted.
    """

    def __init__(self) -> None:
        self.samples = math.inf
        self._grown_s = 0.0

    def too_large(self, samples: int, now_s: float) -> None:
        """Note that a request with so many samples was too large."""
        self.samples = min(self.samples, max(1, samples // 2))
        self._grown_s = now_s

    def accepted(self, samples: int, now_s: float) -> None:
        """Note that a request with so many samples was accepted."""
        if samples >= 0.9 * self.samples and now_s - self._grown_s >= GROWS_EVERY_S:
            self.samples += max(1.0, self.samples // 10)
            self._grown_s = now_s


@dataclass(slots=True)
class Delivered:
    """The result of a tick: the groups that were refused now or left out, with the reasons. All others were accepted.

    ``written``: how many samples of groups that were refused for their time were accepted nevertheless; which ones is
    unknown. ``requests`` counts the requests that it took to find out. ``in_doubt``: it was sent more than once, so its
    samples may have been accepted before they were refused. ``found``: the refused series that are to be left out.
    """

    refused: list[Refused] = field(default_factory=list)
    found: list[Refused] = field(default_factory=list)
    left_out: list[Refused] = field(default_factory=list)
    written: int = 0
    requests: int = 0
    in_doubt: bool = False

    def nothing_of(self, tick: Sequence[SampleGroup]) -> bool:
        """Whether the tick has series, and none of them was accepted."""
        refused = (*self.refused, *self.left_out)
        return bool(refused) and samples_of(group for group, _ in refused) == samples_of(tick)

    def describe(self) -> str:
        """What was refused, in one line: the receiver's reason, and the first few series by name and labels."""
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
    """Delivers ticks to one receiver, and remembers which series it refuses. ``slots`` are for requests in flight."""

    def __init__(
        self,
        sender: RemoteWriteSender,
        instruments: Instruments,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        at_once: int = 8,
    ) -> None:
        self.sender, self.slots, self.clock_s = sender, asyncio.Semaphore(at_once), clock_s
        self.size = RequestSize()
        self._left_out = LeftOut()
        instruments.gauge("gpustream_remote_write_series_left_out").set_function(self._left_out.__len__)

    async def deliver(self, ticks: Sequence[Sequence[SampleGroup]], abandon: asyncio.Event) -> list[Delivered]:
        """Send ticks in one request, or in several if that is too large or refused.

        If the receiver refuses everything, this waits until it does not, and sends everything again. Raises Abandoned.
        """
        self._left_out.expire(self.clock_s())
        cuts = [self._left_out.cut(tick) for tick in ticks]
        sent_before = False
        while True:
            results = [Delivered(left_out=left) for _, left in cuts]
            pieces = [_Piece(result, group) for result, (sent, _) in zip(results, cuts, strict=True) for group in sent]
            bisection = _Bisection(self, abandon, pieces)
            try:
                await bisection.run()
            except _RefusesEverything:
                sent_before = True
                continue
            for result in results:
                result.in_doubt = sent_before or bisection.sent_again
            return results

    def leave_out(self, result: Delivered) -> None:
        """Leave out the series that were found to be refused. Report them before: afterwards nothing refuses them."""
        for group, refusal in result.found:
            self._left_out.add(group, refusal, self.clock_s())


class _Piece(NamedTuple):
    """A group to send, and the result of its tick."""

    result: Delivered
    group: SampleGroup

    def part(self, rows: Sequence[int]) -> "_Piece":
        """Some of its series, by their numbers."""
        return _Piece(self.result, self.group.part(rows))


_Pieces = Sequence[_Piece]


class _RefusesEverything(Exception):
    """The receiver refused everything for a while and accepts again, so its refusals said nothing about the samples."""


class _Bisection:
    """Sends pieces, and bisects those that are refused. ``sent_again``: some pieces were sent more than once."""

    def __init__(self, deliverer: Deliverer, abandon: asyncio.Event, pieces: _Pieces) -> None:
        self.sent_again = False
        self._deliverer, self._abandon, self._all = deliverer, abandon, pieces
        self._accepted_before = deliverer.sender.accepted
        self._last_refusal: tuple[Refusal, int] | None = None

    async def run(self) -> None:
        """Send the pieces, and find out which are refused. Raises _RefusesEverything: send all of them again."""
        await self._send(self._all)
        if self._last_refusal is not None:
            await self._probe_or_wait(*self._last_refusal)

    async def _send(self, pieces: _Pieces) -> None:
        """Send pieces in requests of the size that the receiver accepts, and bisect those that are refused."""
        while pieces:
            batch, pieces = _take(pieces, self._deliverer.size.samples)
            await self._send_ticks(batch)

    async def _send_smaller(self, pieces: _Pieces, samples: int) -> None:
        """Send pieces in smaller requests, because one with so many samples was too large."""
        self._deliverer.size.too_large(samples, self._deliverer.clock_s())
        await self._send(pieces)

    async def _send_ticks(self, pieces: _Pieces) -> None:
        """Send pieces of several ticks, and find out which are refused."""
        refusal = await self._request(pieces)
        if refusal is None:
            return
        self.sent_again |= refusal.sent_before
        if refusal.reason not in UNTIMELY:
            await self._probe_or_wait(refusal, self._accepted_before)
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
        """Send two halves at the same time, or one after the other if both have samples of the same labels."""
        earlier, later = ({piece.group.series.labels for piece in half} for half in halves)
        if not earlier.isdisjoint(later):
            for half in halves:
                await self._send_ticks(half)
            return
        ends = await asyncio.gather(*map(self._send_ticks, halves), return_exceptions=True)
        failed = [end for end in ends if end is not None]
        del ends
        try:
            if failed:
                raise failed[0]
        finally:
            failed.clear()  # an error refers to the frames that it has passed: none of them is to refer to it

    async def _narrow(self, pieces: _Pieces, refusal: Refusal, *, try_a_few: bool) -> None:
        """Find out which series of one tick are refused. ``try_a_few``: try a few of many first."""
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
        """Send a part of one tick, and find out which of its series are refused."""
        refusal = await self._request_of_tick(pieces)
        if refusal is not None:
            await self._narrow(pieces, refusal, try_a_few=try_a_few)

    async def _try_a_few(self, pieces: _Pieces, refusal: Refusal) -> _Pieces:
        """Send a few series one by one, until one is accepted. Returns the pieces that are still to be settled.

        If none is accepted, all series about the same subject (metrics, pods and so on) are refused, for the reason of
        the last one: the text about all of them may have been lost.
        """
        series = [(number, row) for number, piece in enumerate(pieces) for row in range(len(piece.group.values))]
        refused: set[tuple[int, int]] = set()
        for turn in range(FEW):
            number, row = series[(2 * turn + 1) * len(series) // (2 * FEW)]
            one = [pieces[number].part([row])]
            refused_alone = await self._request_of_tick(one)
            if refused_alone is None:
                return _without(pieces, refused) if refused else pieces
            refusal = refused_alone
            self._refuse(one, refusal)
            refused.add((number, row))
        tried = {pieces[number].group.series.subject for number, _ in refused}
        left = _without(pieces, refused)
        self._refuse([piece for piece in left if piece.group.series.subject in tried], refusal)
        return [piece for piece in left if piece.group.series.subject not in tried]

    def _refuse(self, pieces: _Pieces, refusal: Refusal, *, known: bool = True) -> None:
        """Note that pieces are refused. ``known``: each of their series is, not just some."""
        if not pieces:
            return
        refused, result = [(piece.group, refusal) for piece in pieces], pieces[0].result
        result.refused += refused
        result.written += refusal.written
        if refusal.reason not in WHOLE:
            result.found += refused if known else []
            self._last_refusal = refusal, self._deliverer.sender.accepted

    async def _request_of_tick(self, pieces: _Pieces) -> Refusal | None:
        """Send a part of one tick as one request, and count it against the tick's budget."""
        pieces[0].result.requests += 1
        return await self._request(pieces)

    async def _request(self, pieces: _Pieces) -> Refusal | None:
        """Send pieces as one request."""
        groups = [piece.group for piece in pieces]
        async with self._deliverer.slots:
            refusal = await self._deliverer.sender.send(groups, self._abandon)
        if refusal is None and not math.isinf(self._deliverer.size.samples):
            self._deliverer.size.accepted(samples_of(groups), self._deliverer.clock_s())
        return refusal

    async def _probe_or_wait(self, refusal: Refusal, since: int) -> None:
        """Return if the receiver accepts other requests; else wait until it does and raise _RefusesEverything."""
        groups = [piece.group for piece in self._all]
        if not await self._deliverer.sender.probe_or_wait(groups, since, refusal.text, self._abandon):
            raise _RefusesEverything


def _take(pieces: _Pieces, most: float) -> tuple[_Pieces, _Pieces]:
    """Split off the first pieces with at most so many samples, but at least one sample."""
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
    """The pieces without some series, which are given by the numbers of piece and row."""
    kept = []
    for number, piece in enumerate(pieces):
        if rows := [row for row in range(len(piece.group.values)) if (number, row) not in series]:
            kept.append(piece.part(rows))
    return kept
