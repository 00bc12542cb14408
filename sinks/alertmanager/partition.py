"""One partition of gpu.alerts on its way to an Alertmanager.

In: records, in order. Out: what is new in them; dead letters; the offset after each request.
State: the active alerts, which are sent again and again; the newest transition of each alert.
A request has an alert once, so that firing and resolved are sent one after the other.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import NamedTuple

from delivery.dead_letters import DeadLetters, Record
from sinks.alertmanager.notifier import ActiveAlerts, Notifier
from sinks.alerts import Transitions, Undecodable, read
from sinks.outcomes import Outcomes
from topics.alerts import Alert


class AlertmanagerShared(NamedTuple):
    """What all partitions of a sink use together, for one Alertmanager."""

    notifier: Notifier
    letters: DeadLetters
    outcomes: Outcomes
    max_alerts: int


class _AlertmanagerRecord(NamedTuple):
    """A record and what it says: an alert, none if it is a tombstone, or an error."""

    record: Record
    alert: Alert | None = None
    error: str = ""
    is_news: bool = False


class AlertmanagerPartition:
    """The handler of a partition."""

    def __init__(self, shared: AlertmanagerShared) -> None:
        self._shared = shared
        self._transitions = Transitions()
        self._active = ActiveAlerts()

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            self._settle(self._read(record))

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send what is new, request by request."""
        self._shared.notifier.watch(self._active, abandon)
        for some in self._requests(records):
            await self._finish([self._read(record) for record in some], abandon)
            yield some[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """What is open is sent again and again from now on."""
        self._shared.notifier.watch(self._active, abandon)

    def reset(self) -> None:
        """The topic was created again."""
        self._transitions.clear()
        self._active.clear()

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

    def _read(self, record: Record) -> _AlertmanagerRecord:
        try:
            alert = read(record)
        except Undecodable as error:
            return _AlertmanagerRecord(record, error=str(error))
        return _AlertmanagerRecord(record, alert, is_news=alert is not None and self._transitions.is_news(alert))

    async def _finish(self, reads: Sequence[_AlertmanagerRecord], abandon: asyncio.Event) -> None:
        """Settle a request's records. One that is refused is sent again all the same, as long as it is open."""
        notifier, letters, outcomes, _ = self._shared
        async with notifier.turn:
            refused = await notifier.send([one.alert for one in reads if one.alert and one.is_news], abandon)
            for one in reads:
                self._settle(one)
        wrong = [one.error or (refused.get(one.alert.fingerprint, "") if one.alert else "") for one in reads]
        for one, error in zip(reads, wrong, strict=True):
            if error:
                await letters.bury(one.record, error, abandon)
        for one, error in zip(reads, wrong, strict=True):
            outcomes.finish("dead_lettered" if error else "delivered" if one.is_news else "duplicate")

    def _settle(self, one: _AlertmanagerRecord) -> None:
        if one.error:
            return
        if one.alert is None:
            self._transitions.remove(one.record.key)
            self._active.remove(one.record.key)
        elif one.is_news:
            self._transitions.learn(one.alert)
            self._active.put(one.alert, one.record.timestamp)
