"""One partition of gpu.alerts on its way to the receiver: a request for each transition, in order for each alert.

In: records, in order. Out: requests, dead letters, the offset before which all is finished.
State: the newest transition of each alert, so that one that is written again is not sent again; the records that are
begun, from the first unfinished one on.
Transitions of one alert wait for one another, and no other alert's do: one that the receiver does not accept yet is
tried again while others are read and sent. It holds others up only where more than ``PENDING`` wait to be accepted, or
``AHEAD`` records came after it: that bounds what is kept in memory, and what is sent again after a crash.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from delivery.dead_letters import DeadLetters, Record
from sinks.alerts import Transitions, Undecodable, read
from sinks.outcomes import Outcome, Outcomes
from sinks.receiver import Receiver
from sinks.webhook.encode import Secret, request
from topics.alerts import Alert

PENDING = 32
"""So many records of a partition are under way at a time."""

AHEAD = 1000
"""So many records of a partition are begun, from the first unfinished one on; those after it may be finished."""

_PATIENCE_S = 0.2


class WebhookShared(NamedTuple):
    """What all partitions of a sink use together."""

    receiver: Receiver
    secret: Secret
    letters: DeadLetters
    outcomes: Outcomes


class WebhookPartition:
    """The handler of a partition."""

    def __init__(self, shared: WebhookShared) -> None:
        self._shared = shared
        self._transitions = Transitions()
        self._begun: deque[tuple[Record, asyncio.Task[Outcome]]] = deque()
        self._newest: dict[bytes | None, asyncio.Task[Outcome]] = {}
        self._abandon: asyncio.Event | None = None

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                alert = read(record)
            except Undecodable:
                continue  # its dead letter was written then
            self._learn(record, alert)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, several at once, and finish them in order; what takes long is kept for the next call.

        Raises Abandoned, when all that was under way has ended.
        """
        waiting = deque(records)
        if abandon is not self._abandon:  # the partition was away, and what was begun then was given back
            await self._drop()
            self._abandon = abandon
        try:
            while True:
                pending = {end for _, end in self._begun if not end.done()}
                while waiting and len(pending) < PENDING and len(self._begun) < AHEAD:
                    pending.add(self._begin(waiting.popleft(), abandon))
                if (offset := self._finished()) is not None:
                    yield offset
                elif pending:
                    patience_s = _PATIENCE_S if records else 0.0
                    timeout_s = None if waiting or abandon.is_set() else patience_s
                    done, _ = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        return
                else:
                    return
        except BaseException:
            await self._drop()
            raise

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Nothing is due by itself."""

    def reset(self) -> None:
        """The topic was made again."""
        self._transitions.clear()
        for _, end in self._begun:
            end.cancel()
        self._begun.clear()
        self._newest.clear()

    def _begin(self, record: Record, abandon: asyncio.Event) -> asyncio.Task[Outcome]:
        """Begin a task for a record; it waits for the one before of the same alert."""
        task = asyncio.ensure_future(self._end(record, self._newest.get(record.key), abandon))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waits for it raises it
        self._newest[record.key] = task
        self._begun.append((record, task))
        return task

    def _finished(self) -> int | None:
        """Count the records that ended, up to the first that has not. Gives the offset after them. Raises Abandoned."""
        offset = None
        while self._begun and self._begun[0][1].done():
            record, end = self._begun[0]
            self._shared.outcomes.finish(end.result())
            self._begun.popleft()
            if self._newest.get(record.key) is end:
                del self._newest[record.key]
            offset = record.offset + 1
        return offset

    async def _drop(self) -> None:
        """Give up what is begun."""
        begun = [end for _, end in self._begun]
        self._begun.clear()
        self._newest.clear()
        for end in begun:
            end.cancel()
        await asyncio.gather(*begun, return_exceptions=True)

    async def _end(self, record: Record, before: asyncio.Task[Outcome] | None, abandon: asyncio.Event) -> Outcome:
        """Finish a record. Raises Abandoned."""
        if before is not None:
            await asyncio.wait((before,))
            before.result()  # of one that was abandoned, that is raised here too
        try:
            alert = read(record)
        except Undecodable as error:
            await self._shared.letters.bury(record, str(error), abandon)
            return "dead_lettered"
        outcome = (
            await self._send(record, alert, abandon) if alert and self._transitions.is_news(alert) else "duplicate"
        )
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
            self._transitions.remove(record.key)
        else:
            self._transitions.learn(alert)
