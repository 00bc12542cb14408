"""One partition of gpu.alerts on its way to an Alertmanager.

In: records, in order. Out: what is new in them, told; dead letters; the offset after each request.
State: the board of what is told again and again; the newest transition of each alert.
A request has an alert once, so that firing and resolved are told one after the other.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import NamedTuple

from sinks.alertmanager.board import Board
from sinks.alertmanager.teller import Teller
from sinks.alerts import Known, Undecodable, read
from sinks.dead_letters import DeadLetters, Record
from sinks.outcomes import Outcomes
from topics.alerts import Alert


class Shared(NamedTuple):
    """What all partitions of a sink use together, for one Alertmanager."""

    teller: Teller
    letters: DeadLetters
    outcomes: Outcomes
    max_alerts: int


class _Read(NamedTuple):
    """A record and what it says: an alert, none where it is a tombstone, or an error."""

    record: Record
    alert: Alert | None = None
    error: str = ""
    is_news: bool = False


class AlertmanagerPartition:
    """The handler of a partition."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known = Known()
        self._board = Board()

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was told before."""
        for record in records:
            self._settle(self._read(record))

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Tell what is new, request by request."""
        self._shared.teller.has(self._board, abandon)
        for some in self._requests(records):
            await self._finish([self._read(record) for record in some], abandon)
            yield some[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """What is open is told again and again from now on."""
        self._shared.teller.has(self._board, abandon)

    def forget(self) -> None:
        """The topic was made anew."""
        self._known.clear()
        self._board.clear()

    def _requests(self, records: Sequence[Record]) -> Iterator[list[Record]]:
        some: list[Record] = []
        keys: set[bytes | None] = set()
        for record in records:
            if record.key in keys or len(some) == self._shared.max_alerts:
                yield some
                some, keys = [], set()
            some.append(record)
            keys.add(record.key)
        if some:
            yield some

    def _read(self, record: Record) -> _Read:
        try:
            alert = read(record)
        except Undecodable as error:
            return _Read(record, error=str(error))
        return _Read(record, alert, is_news=alert is not None and self._known.is_news(alert))

    async def _finish(self, reads: Sequence[_Read], abandon: asyncio.Event) -> None:
        """Settle a request's records. One that is refused is told again all the same, as long as it is open."""
        teller, letters, outcomes, _ = self._shared
        async with teller.turn:
            refused = await teller.tell([one.alert for one in reads if one.alert and one.is_news], abandon)
            for one in reads:
                self._settle(one)
        wrong = [one.error or (refused.get(one.alert.fingerprint, "") if one.alert else "") for one in reads]
        for one, error in zip(reads, wrong, strict=True):
            if error:
                await letters.bury(one.record, error, abandon)
        for one, error in zip(reads, wrong, strict=True):
            outcomes.finish("dead_lettered" if error else "delivered" if one.is_news else "duplicate")

    def _settle(self, one: _Read) -> None:
        if one.error:
            return
        if one.alert is None:
            self._known.forget(one.record.key)
            self._board.remove(one.record.key)
        elif one.is_news:
            self._known.learn(one.alert)
            self._board.put(one.alert, one.record.timestamp)
