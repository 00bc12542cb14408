"""One partition of gpu.alerts on its way to the receiver: a request for each transition, in order for each alert.

In: records, in order. Out: requests, dead letters, the offset before which all is finished.
State: the newest transition of each alert, so that one that is written again is not sent again.
Alerts wait for one another only where one is so far ahead of an unfinished one that too much would be sent again after
a crash.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from sinks.alerts import Known, Undecodable, read
from sinks.dead_letters import DeadLetters, Record
from sinks.outcomes import Outcome, Outcomes
from sinks.receiver import Receiver
from sinks.webhook.encode import Secret, request
from topics.alerts import Alert

AHEAD = 32
"""So many records of a partition are begun, from the first unfinished one on."""


class Shared(NamedTuple):
    """What all partitions of a sink use together."""

    receiver: Receiver
    secret: Secret
    letters: DeadLetters
    outcomes: Outcomes


class WebhookPartition:
    """The handler of a partition."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known = Known()

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                alert = read(record)
            except Undecodable:
                continue  # its dead letter was written then
            self._learn(record, alert)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, several at once, and finish them in order."""
        begun: deque[tuple[Record, asyncio.Task[Outcome]]] = deque()
        beginning = self._begin(records, abandon)
        try:
            begun.extend(islice(beginning, AHEAD))
            while begun:
                record, end = begun[0]
                self._shared.outcomes.finish(await end)
                begun.popleft()
                begun.extend(islice(beginning, 1))
                if not begun or not begun[0][1].done():
                    yield record.offset + 1
        finally:
            for _, end in begun:
                end.cancel()
            await asyncio.gather(*(end for _, end in begun), return_exceptions=True)

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Nothing is due by itself."""

    def forget(self) -> None:
        """The topic was made anew."""
        self._known.clear()

    def _begin(
        self, records: Sequence[Record], abandon: asyncio.Event
    ) -> Iterator[tuple[Record, asyncio.Task[Outcome]]]:
        """Begin a task for each record, as it is asked for; it waits for the one before of the same alert."""
        newest: dict[bytes | None, asyncio.Task[Outcome]] = {}
        for record in records:
            task = asyncio.ensure_future(self._end(record, newest.get(record.key), abandon))
            newest[record.key] = task
            yield record, task

    async def _end(self, record: Record, before: asyncio.Task[Outcome] | None, abandon: asyncio.Event) -> Outcome:
        """Finish a record. Raises Abandoned."""
        if before is not None:
            await asyncio.wait((before,))
            before.result()
        try:
            alert = read(record)
        except Undecodable as error:
            await self._shared.letters.bury(record, str(error), abandon)
            return "dead_lettered"
        outcome = await self._send(record, alert, abandon) if alert and self._known.is_news(alert) else "duplicate"
        self._learn(record, alert)
        return outcome

    async def _send(self, record: Record, alert: Alert, abandon: asyncio.Event) -> Outcome:
        body, shared = record.value or b"", self._shared
        refused = await shared.receiver.send(lambda: request(alert, body, shared.secret.now()), abandon)
        if refused is None:
            return "delivered"
        await shared.letters.bury(record, f"refused: {refused}", abandon)
        return "dead_lettered"

    def _learn(self, record: Record, alert: Alert | None) -> None:
        if alert is None:
            self._known.forget(record.key)
        else:
            self._known.learn(alert)
