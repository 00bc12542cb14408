"""Reads every partition of topics, without a consumer group: for what every replica has to know.

In: topics, and where each of them is read from. Out: their records, in order per partition, on the event loop. Nothing
is committed.
State: the Kafka client, and when all partitions were last known to be read to their ends.
On failure: during an outage it waits, and :meth:`Tail.not_ready` says so. If a topic has another number of partitions
than at the start, it raises :class:`MustRestart`, because only another start can mend that. A topic that was created
again is read from its beginning.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiokafka.errors import KafkaError

from delivery import clients, positions
from delivery.clients import LogThrottle, OffsetClient, connect_consumer, to_kafka
from delivery.connection import Connection
from delivery.dead_letters import Record
from delivery.group import MustRestart
from delivery.ledger import Partition
from delivery.positions import StartFrom
from delivery.settings import TopicAccess
from delivery.tasks import until_stopped
from delivery.topic_admin import TopicCheck

log = logging.getLogger(__name__)

_POLL_MS = 200
_BATCH_RECORDS = 500
_RETRY_S = 0.5
_LAP_EVERY_S = 0.5
_LATE_S = 10.0  # after this time without knowing whether everything is read, it is reported as not read
_METADATA_MS = 20_000


class Tail:
    """Reads topics, each ``from_`` an end or some seconds ago on. ``take`` gets a topic's records as they come."""

    def __init__(
        self,
        connection: Connection,
        from_: Mapping[str, StartFrom],
        take: Callable[[str, Sequence[Record]], None],
        *,
        client_id: str,
    ) -> None:
        self._connection, self._from, self._take = connection, from_, take
        self._client_id = client_id
        self._check = TopicCheck(connection, TopicAccess(tuple(from_)))
        self._offsets = OffsetClient(connection, client_id=client_id)
        self._consumer: Any = None
        self._read_to_end_s: float | None = None
        self._behind: dict[Partition, int] = {}
        self._log_throttle = LogThrottle()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``. Raises MustRestart, and what ``take`` raises."""
        if (checked := await self._check.wait(stop)) is None:
            return
        counts = checked.partitions
        tps = [Partition(topic, number) for topic in self._from for number in range(counts[topic])]
        try:
            await until_stopped(stop, self._read(tps))
        finally:
            consumers = [] if self._consumer is None else [self._consumer]
            await asyncio.gather(self._offsets.close(), *map(clients.close, consumers))

    def not_ready(self) -> list[str]:
        """Why not everything that there is was taken; empty when it was."""
        if self._consumer is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        topics = dict.fromkeys(tp.topic for tp in self._behind) or self._from
        name = ", ".join(map(self._connection.prefixed, topics))
        if self._read_to_end_s is None:
            left = f": {sum(self._behind.values())} records are left" if self._behind else ""
            return [f"reading {name} to its end{left}"]
        late_s = time.monotonic() - self._read_to_end_s
        return [f"whether {name} is read to its end is not known for {late_s:.0f} s"] if late_s > _LATE_S else []

    async def _read(self, tps: list[Partition]) -> None:
        await self._offsets.connect()
        self._consumer = consumer = await connect_consumer(
            self._connection,
            client_id=self._client_id,
            group_id=None,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_POLL_MS,
            metadata_max_age_ms=_METADATA_MS,
        )
        starts = await self._starts(tps)
        consumer.assign([to_kafka(self._connection, tp) for tp in tps])
        for tp, offset in starts.items():
            consumer.seek(to_kafka(self._connection, tp), offset)
        watching = asyncio.ensure_future(self._watch(tps))
        try:
            while not watching.done():
                try:
                    batches = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_BATCH_RECORDS)
                except KafkaError as error:
                    await self._retry(error)
                    continue
                for tp, records in batches.items():
                    self._take(clients.from_kafka(self._connection, tp).topic, records)
                    await asyncio.sleep(0)
            watching.result()
        finally:
            watching.cancel()

    async def _starts(self, tps: list[Partition]) -> dict[Partition, int]:
        """Where to begin, as soon as the broker says."""
        while True:
            try:
                begins, ends = await asyncio.gather(self._offsets.beginnings(tps), self._offsets.ends(tps))
                found = [
                    positions.initial_offset(self._offsets.offsets_at, tp, self._from[tp.topic], begins[tp], ends[tp])
                    for tp in tps
                ]
                return dict(zip(tps, await asyncio.gather(*found), strict=True))
            except KafkaError as error:
                await self._retry(error)

    async def _watch(self, tps: list[Partition]) -> None:
        """Ask again and again where the partitions end, and wait until all is read up to there. Raises MustRestart."""
        while True:
            asked_s = time.monotonic()
            try:
                ends = await self._offsets.ends(tps)
                while behind := {
                    tp: end - read
                    for tp, end in ends.items()
                    if (read := await self._consumer.position(to_kafka(self._connection, tp))) < end
                }:
                    self._behind = behind
                    await asyncio.sleep(_LAP_EVERY_S / 5)
                self._behind, self._read_to_end_s = {}, asked_s
            except KafkaError as error:
                await self._retry(error)
            for topic, had in Counter(tp.topic for tp in tps).items():
                name = self._connection.prefixed(topic)
                count = len(self._consumer.partitions_for_topic(name) or ())
                if count not in (0, had):
                    raise MustRestart(f"{name} has {count} partitions, and had {had} when this process started")
            await asyncio.sleep(_LAP_EVERY_S)

    async def _retry(self, error: KafkaError) -> None:
        """Say what is wrong, now and then, and wait before it is tried again."""
        if self._log_throttle.is_due(why := clients.explain(error, self._connection)):
            log.warning("%s; trying again", why)
        await asyncio.sleep(_RETRY_S)
