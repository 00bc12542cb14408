"""Faust's consumer, with the reader in place of its drain loop, its seeks and its offsets.

Faust keeps membership, the co-partitioning assignor and the consumer's thread. The rest is replaced because it loses
records whenever members come and go: it delivers before it seeks, empties agents' queues, and commits what it skipped.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError
from faust.transport.drivers import aiokafka as driver
from mode.threads import WorkerThread

from delivery.ledger import Partition
from streams.reader.reader import Reader

log = logging.getLogger(__name__)

_PEEKS = 10
_FETCH_WAIT_MS = 200


class _Daemon(WorkerThread):  # type: ignore[misc]
    """The consumer's thread. The end of the process does not wait for it, as it may itself wait for a broker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.daemon = True


class LosslessConsumer(driver.Consumer):  # type: ignore[misc]  # faust has no types that pass strict
    """Reads for ``reader``, which its application sets on the class, as it does ``kafka`` and ``fail``."""

    reader: Reader
    kafka: str
    answered: Callable[[], None]
    fail: Callable[[str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reader.client = ThreadClient(self)

    def _new_consumer_thread(self) -> Any:
        return _Thread(self, loop=self.loop, beacon=self.beacon, Worker=_Daemon)

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Commit what the reader's ledger has finished, and nothing else."""
        return await self.reader.commit()

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:
        """The reader lets go before Faust does."""
        await self.reader.revoked()
        await super().on_partitions_revoked(revoked)

    async def perform_seek(self) -> None:
        """Faust has an assignment; the reader's loop sets the positions."""
        self.reader.end_epoch()

    def verify_event_path(self, now: float, tp: Any) -> None:
        """Faust's own stall detector looks at agents that never see a record here."""

    async def _drain_messages(self, fetcher: Any) -> None:
        while not (self.should_stop or fetcher.should_stop):
            await asyncio.sleep(0)
            try:
                await self.reader.turn()
            except asyncio.CancelledError:
                if not (self.should_stop or fetcher.should_stop or self.app.should_stop):
                    self.fail("the reader was cancelled")  # Faust would go on without it
                raise
            except self.consumer_stopped_errors:
                if not self.app.should_stop:
                    raise
                return
            except Exception as error:
                log.exception("the reader failed")
                self.fail(f"the reader failed: {error!r}")
                return


class _Thread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Faust's thread, whose fetches wait 1.5 s for a broker that does not answer as soon as there is something."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = _FETCH_WAIT_MS
        return consumer


class ThreadClient:
    """The group's consumer in Faust's thread, as the reader sees it; every answer of the broker is reported.

    A second consumer, of no group and short-lived, reads the log times of single records.
    """

    def __init__(self, consumer: LosslessConsumer) -> None:
        self._consumer = consumer
        self._thread = consumer._thread

    def assignment(self) -> set[Partition]:
        """The partitions that are ours now."""
        return {Partition(tp.topic, tp.partition) for tp in self._consumer.assignment()}

    def flowing(self) -> bool:
        """Whether records may be taken: not in the middle of a rebalance."""
        return bool(self._consumer.flow_active)

    async def fetch(self, active: set[Partition], timeout_s: float) -> Mapping[Partition, list[Any]]:
        """Records of these partitions, in order; none when none came in time."""
        records = await self._thread.getmany({_theirs(tp) for tp in active}, timeout_s)
        return {Partition(tp.topic, tp.partition): found for tp, found in records.items()}

    async def committed(self, tp: Partition) -> int | None:
        """The group's committed offset."""
        offset: int | None = await self._ask("committed", _theirs(tp))
        return offset

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The first offset of each partition."""
        return _ours(await self._ask("beginning_offsets", [_theirs(tp) for tp in tps])) if tps else {}

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last one of each partition."""
        return _ours(await self._ask("end_offsets", [_theirs(tp) for tp in tps])) if tps else {}

    async def position(self, tp: Partition) -> int:
        """The next offset that the client will give, past whatever holds no record."""
        offset: int = await self._ask("position", _theirs(tp))
        return offset

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time; None: there is none, or the broker can't tell."""
        found = await self._ask("offsets_for_times", {_theirs(tp): at for tp, at in times_ms.items()})
        return {Partition(*tp): at.offset if at is not None else None for tp, at in found.items()}

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time in ms of the record at each offset; None: it could not be read."""
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        peeking = AIOKafkaConsumer(bootstrap_servers=self._consumer.kafka.split(","), enable_auto_commit=False)
        await peeking.start()
        try:
            await _peek(peeking, offsets, times)
        finally:
            await peeking.stop()
        self._consumer.answered()
        return times

    async def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read on from these offsets."""

        async def seek(consumer: Any) -> None:
            for tp, offset in positions.items():
                consumer.seek(_theirs(tp), offset)

        await self._thread.call_thread(seek, self._thread._ensure_consumer())

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit; False where the group has moved on."""
        consumer = self._thread._ensure_consumer()

        async def commit() -> bool:
            assigned = consumer.assignment()  # now, and no longer what it was when this was asked for
            ours = {_theirs(tp): offset for tp, offset in offsets.items() if _theirs(tp) in assigned}
            if ours:
                await consumer.commit(ours)
            return len(ours) == len(offsets)

        try:
            committed: bool = await self._thread.call_thread(commit)
        except (CommitFailedError, IllegalStateError):
            return False
        self._consumer.answered()
        return committed

    async def _ask(self, method: str, *args: Any) -> Any:
        answer = await self._thread.call_thread(getattr(self._thread._ensure_consumer(), method), *args)
        self._consumer.answered()
        return answer


async def _peek(
    consumer: AIOKafkaConsumer, offsets: Mapping[Partition, int], times: dict[Partition, int | None]
) -> None:
    waiting = {_theirs(tp) for tp in offsets}
    consumer.assign(list(waiting))
    for tp, offset in offsets.items():
        consumer.seek(_theirs(tp), offset)
    for _ in range(_PEEKS):
        if not waiting:
            return
        for tp, records in (await consumer.getmany(*waiting, timeout_ms=1000, max_records=4 * len(waiting))).items():
            times[Partition(tp.topic, tp.partition)] = records[0].timestamp
            waiting.discard(tp)
            consumer.pause(tp)


def _theirs(tp: Partition) -> TopicPartition:
    return TopicPartition(tp.topic, tp.partition)


def _ours(answer: Mapping[TopicPartition, int]) -> dict[Partition, int]:
    return {Partition(tp.topic, tp.partition): offset for tp, offset in answer.items()}
