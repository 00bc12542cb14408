"""Reads all partitions of topics without a consumer group, for what every replica needs.

In: topics, and where each of them is read from. Out: their records, in order per partition, on the event loop. Nothing
is committed.
State: the Kafka client, and when all partitions were last known to be read to their ends.
On failure: during an outage it waits, and :meth:`Tail.not_ready` reports it. If the number of partitions of a topic has
changed since the start, it raises :class:`MustRestart`, because only a restart can mend that. A topic that was created
again is read from its beginning.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiokafka.errors import KafkaError

from delivery import clients, positions
from delivery.clients import OffsetClient, connect_consumer, to_kafka
from delivery.connection import Connection
from delivery.dead_letters import Record
from delivery.group import MustRestart
from delivery.ledger import Partition
from delivery.log_throttle import LogThrottle
from delivery.positions import StartFrom
from delivery.settings import TopicAccess
from delivery.tasks import until_stopped
from delivery.topic_admin import TopicCheck
from delivery.topic_watch import TopicWatch, other_partitions

log = logging.getLogger(__name__)

_POLL_MS = 200
_BATCH_RECORDS = 500
_RETRY_S = 0.5
_CHECK_EVERY_S = 0.5
_LATE_S = 10.0  # the tail is not ready if it has not known for so long whether everything is read
_METADATA_MS = 20_000


class Tail:
    """Reads topics, each from where ``from_`` says. ``on_records`` gets each topic's records as they come. Before those
    of a topic that was missing and is back, ``on_new_log`` gets its name.

    All that was there at ``read_to_end_s`` has been read, by the clock that never steps back.
    """

    def __init__(
        self,
        connection: Connection,
        from_: Mapping[str, StartFrom],
        on_records: Callable[[str, Sequence[Record]], None],
        *,
        client_id: str,
        on_new_log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._connection, self._from, self._on_records, self._on_new_log = connection, from_, on_records, on_new_log
        self._client_id = client_id
        self._check = TopicCheck(connection, TopicAccess(tuple(from_)))
        self._offsets = OffsetClient(connection, client_id=client_id)
        self._consumer: Any = None
        self.read_to_end_s: float | None = None
        self._behind: dict[Partition, int] = {}
        self._log_throttle = LogThrottle()
        self._topic_watch = TopicWatch(tuple(map(connection.prefixed, from_)))

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set. Raises MustRestart, and what ``on_records`` raises."""
        if (checked := await self._check.wait(stop)) is None:
            return
        counts = checked.partitions
        tps = [Partition(topic, number) for topic in self._from for number in range(counts[topic])]
        try:
            await until_stopped(stop, self._read(tps))
        finally:
            await asyncio.gather(self._offsets.close(), clients.close(self._consumer))

    def not_ready(self) -> list[str]:
        """The reasons why not all records were read; empty if they were."""
        if self._consumer is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        topics = dict.fromkeys(tp.topic for tp in self._behind) or self._from
        name = ", ".join(map(self._connection.prefixed, topics))
        if self.read_to_end_s is None:
            backlog = f": {sum(self._behind.values())} records are left" if self._behind else ""
            return [f"reading {name} to its end{backlog}"]
        late_s = time.monotonic() - self.read_to_end_s
        return [f"whether {name} is read to its end is not known for {late_s:.0f} s"] if late_s > _LATE_S else []

    def age_s(self, age_s: float, now_s: float) -> float:
        """The age of a record that has just come, given its age by the clocks of this host and of the record. It is not
        older than what was read to the end before, also if one of these clocks is wrong."""
        return age_s if self.read_to_end_s is None else min(age_s, now_s - self.read_to_end_s)

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
        starts, kafka_tps = await self._find_starts(tps), [to_kafka(self._connection, tp) for tp in tps]
        consumer.assign(kafka_tps)
        for tp, offset in starts.items():
            consumer.seek(to_kafka(self._connection, tp), offset)
        consumer._client.cluster.add_listener(self._topic_watch.note)  # noqa: SLF001 - no public way
        end_watch = asyncio.ensure_future(self._watch_ends(tps))
        try:
            while not end_watch.done():
                try:
                    batches = await consumer.getmany(timeout_ms=_POLL_MS, max_records=_BATCH_RECORDS)
                except KafkaError as error:
                    await self._retry(error)
                    batches = {}
                changed = other_partitions(consumer, kafka_tps)  # first: no broker answers for one that is gone
                if changed is not None:
                    raise MustRestart(f"{changed} when this process started")
                missing = self._topic_watch.missing.copy()
                for tp, records in batches.items():
                    if tp.topic not in missing:
                        self._on_records(clients.from_kafka(self._connection, tp).topic, records)
                    await asyncio.sleep(0)
                if returned := {topic for topic in missing if consumer.partitions_for_topic(topic)}:
                    names = ", ".join(sorted(returned))
                    log.warning("%s: was missing and is back; reading its log from its start", names)
                    back = [tp for tp in tps if self._connection.prefixed(tp.topic) in returned]
                    for topic in dict.fromkeys(tp.topic for tp in back):
                        self._on_new_log(topic)
                    for tp, offset in (await self._find_starts(back)).items():
                        consumer.seek(to_kafka(self._connection, tp), offset)
                    self._topic_watch.missing -= returned
            end_watch.result()
        finally:
            end_watch.cancel()

    async def _find_starts(self, tps: list[Partition]) -> dict[Partition, int]:
        """The offset to begin at in each partition, once the broker answers."""
        while True:
            try:
                begins, ends = await asyncio.gather(self._offsets.beginnings(tps), self._offsets.ends(tps))
                offsets = [
                    positions.initial_offset(self._offsets.offsets_at, tp, self._from[tp.topic], begins[tp], ends[tp])
                    for tp in tps
                ]
                return dict(zip(tps, await asyncio.gather(*offsets), strict=True))
            except KafkaError as error:
                await self._retry(error)

    async def _watch_ends(self, tps: list[Partition]) -> None:
        """Look up the ends of the partitions, wait until they are read, and so on."""
        while True:
            asked_s = time.monotonic()
            try:
                ends = await self._offsets.ends(tps)
                while behind := {
                    tp: end - position
                    for tp, end in ends.items()
                    if (position := await self._consumer.position(to_kafka(self._connection, tp))) < end
                }:
                    self._behind = behind
                    await asyncio.sleep(_CHECK_EVERY_S / 5)
                    new_ends = await self._offsets.ends(list(behind))  # smaller, if it is another log by now
                    ends = {tp: min(ends[tp], end) for tp, end in new_ends.items()}
                self._behind, self.read_to_end_s = {}, asked_s
            except KafkaError as error:
                await self._retry(error)
            await asyncio.sleep(_CHECK_EVERY_S)

    async def _retry(self, error: KafkaError) -> None:
        """Log the error, if that is due, and wait before the next attempt."""
        if self._log_throttle.is_due(reason := clients.explain(error, self._connection)):
            log.warning("%s; trying again", reason)
        await asyncio.sleep(_RETRY_S)
