"""A fake of aiokafka's producer, which lingers, batches, refuses whole batches and poisons partitions as it does."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaConnectionError, OutOfOrderSequenceNumber, ProducerClosed

from delivery.connection import Connection

LINGER_S = 0.02


@dataclass(frozen=True)
class StoredRecord:
    """The result of a send: the record's offset, and the time that the broker gave it (type 1), if it gave it one."""

    offset: int
    timestamp: int = -1
    timestamp_type: int = 0


@dataclass
class Cluster:
    """The logs by (topic, partition), the values that are refused, the current faults, and the clock of the brokers."""

    logs: dict[tuple[str, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[bytes, Callable[[], Exception]] = field(default_factory=dict)
    raised: list[Exception] = field(default_factory=list)
    lost_answers: list[Exception] = field(default_factory=list)
    failed_starts: int = 0
    stop_hangs: bool = False
    away: asyncio.Event | None = None
    now_ms: Callable[[], int] | None = None
    producers: list["FakeProducer"] = field(default_factory=list)

    def log(self, topic: str, partition: int = 0) -> list[bytes]:
        return self.logs[topic, partition]

    def open(self) -> list["FakeProducer"]:
        """The producers that were not stopped."""
        return [producer for producer in self.producers if not producer.closed]


class FakeProducer:
    """Stands in for AIOKafkaProducer. A batch that fails leaves the partition out of sequence for this producer."""

    def __init__(self, cluster: Cluster, _: Connection, **settings: Any) -> None:
        self.cluster, self.settings = cluster, settings
        self.closed = False
        self.client = SimpleNamespace(cluster=ClusterMetadata(), refused={})
        self.poisoned: set[tuple[str, int]] = set()
        self._batches: dict[tuple[str, int], list[tuple[bytes, asyncio.Future[StoredRecord]]]] = {}
        self._flushing: set[asyncio.Task[None]] = set()
        cluster.producers.append(self)

    async def start(self) -> None:
        await asyncio.sleep(0.01)
        if self.cluster.failed_starts:
            self.cluster.failed_starts -= 1
            raise KafkaConnectionError("Unable to bootstrap")

    async def stop(self) -> None:
        self.closed = True
        if self.cluster.stop_hangs:
            await asyncio.get_running_loop().create_future()
        await asyncio.gather(*self._flushing)

    async def send(
        self, topic: str, value: bytes, key: bytes | None = None, partition: int | None = None, headers: Any = None
    ) -> "asyncio.Future[StoredRecord]":
        await asyncio.sleep(0)
        if self.closed:
            raise ProducerClosed
        if self.cluster.raised:
            raise self.cluster.raised.pop(0)
        assert (partition or 0) >= 0, "Unrecognized partition"
        tp = topic, partition or 0
        if tp not in self._batches:
            self._batches[tp] = []
            task = asyncio.create_task(self._flush(tp))
            self._flushing.add(task)
            task.add_done_callback(self._flushing.discard)
        acknowledged: asyncio.Future[StoredRecord] = asyncio.get_running_loop().create_future()
        self._batches[tp].append((value, acknowledged))
        return acknowledged

    async def send_and_wait(self, *args: Any, **kwargs: Any) -> StoredRecord:
        return await (await self.send(*args, **kwargs))

    async def _flush(self, tp: tuple[str, int]) -> None:
        await asyncio.sleep(LINGER_S)
        batch = self._batches.pop(tp)
        if self.cluster.away is not None:
            await self.cluster.away.wait()
        error = self._refusal(tp, [value for value, _ in batch])
        if error is not None:
            self.poisoned.add(tp)
        elif self.cluster.lost_answers:
            self._store(tp, batch)
            error = self.cluster.lost_answers.pop(0)
        for offset, (_, acknowledged) in enumerate(batch, self._store(tp, batch) if error is None else 0):
            if error is not None:
                acknowledged.set_exception(error)
            else:
                times = () if self.cluster.now_ms is None else (self.cluster.now_ms(), 1)
                acknowledged.set_result(StoredRecord(offset, *times))

    def _store(self, tp: tuple[str, int], batch: list[tuple[bytes, "asyncio.Future[StoredRecord]"]]) -> int:
        log = self.cluster.logs[tp]
        log.extend(value for value, _ in batch)
        return len(log) - len(batch)

    def _refusal(self, tp: tuple[str, int], values: list[bytes]) -> Exception | None:
        error: Exception | None = OutOfOrderSequenceNumber() if tp in self.poisoned else None
        for value in values:
            if error is None and value in self.cluster.refused:
                error = self.cluster.refused[value]()
        return error
