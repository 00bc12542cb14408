"""A reader without a group, with a client in memory: the log of a topic that was missing is read from its start."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError

from delivery import tail as module
from delivery.connection import Connection
from delivery.group import MustRestart
from delivery.ledger import Partition
from delivery.tail import Tail
from tests.eventually import eventually

TICKS, ALERTS = "gpu.attributed", "gpu.alerts"


class Kafka:
    """A broker that has records in the first partition of each topic, and the client that reads from it."""

    def __init__(self) -> None:
        self.logs = {topic: [f"{topic} {number}" for number in range(3)] for topic in (TICKS, ALERTS)}
        self.present, self.partitions = {TICKS, ALERTS}, 1
        self.positions: dict[TopicPartition, int] = {}
        self.unauthorized_topics: set[str] = set()
        self.listeners: list[Callable[[Any], None]] = []
        self.during_a_poll: Callable[[], None] | None = None
        self.flows = asyncio.Event()
        self.flows.set()
        self._client, self.cluster = self, self

    def get_metadata(self, *topics: str) -> None:
        """New metadata, which have these topics."""
        self.present = set(topics)
        for listener in self.listeners:
            listener(self)

    # -- the consumer

    def add_listener(self, listener: Callable[[Any], None]) -> None:
        self.listeners.append(listener)
        self.get_metadata(*self.present)

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(self.partitions)) if topic in self.present else None

    def assign(self, tps: Sequence[TopicPartition]) -> None:
        self.positions = dict.fromkeys(tps, 0)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.positions[tp] = offset

    async def position(self, tp: TopicPartition) -> int:
        return self.positions[tp]

    async def getmany(self, **_: object) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        await self.flows.wait()
        if self.during_a_poll is not None:
            self.during_a_poll()
            self.during_a_poll = None
        batches = {}
        for tp, position in self.positions.items():
            if not tp.partition and (values := self.logs[tp.topic][position:] if tp.topic in self.present else []):
                batches[tp] = [SimpleNamespace(value=value) for value in values]
                self.positions[tp] = position + len(values)
        return batches

    async def stop(self) -> None:
        """Nothing to close."""

    # -- the client that looks up offsets

    async def connect(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to close."""

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        if any(tp.partition >= self.partitions for tp in tps):
            raise KafkaTimeoutError
        return dict.fromkeys(tps, 0)

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        return {tp: 0 if tp.partition else len(self.logs[tp.topic]) for tp in tps}

    offsets_at = beginnings


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    """What a tail reads from."""
    kafka = Kafka()

    async def connect_consumer(*_: object, **__: object) -> Kafka:
        return kafka

    async def wait(_: asyncio.Event) -> object:
        return SimpleNamespace(partitions=dict.fromkeys((TICKS, ALERTS), kafka.partitions))

    monkeypatch.setattr(module, "connect_consumer", connect_consumer)
    monkeypatch.setattr(module, "OffsetClient", lambda *_, **__: kafka)
    monkeypatch.setattr(module, "TopicCheck", lambda *_: SimpleNamespace(wait=wait, not_ready=list))
    return kafka


@contextlib.asynccontextmanager
async def reading(taken: list[str]) -> AsyncIterator[tuple[Tail, "asyncio.Task[None]"]]:
    """A tail that reads both topics from their beginning, and its task."""

    def take(_: str, records: Sequence[Any]) -> None:
        taken.extend(record.value for record in records)

    def begin_again(topic: str) -> None:
        taken.append(f"a new log of {topic}")

    tail = Tail(
        Connection("127.0.0.1:1"),
        {TICKS: "earliest", ALERTS: "earliest"},
        take,
        client_id="c",
        on_new_log=begin_again,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(tail.run(stop))
    try:
        yield tail, running
    finally:
        stop.set()
        await asyncio.wait([running])


async def test_the_log_of_a_topic_that_was_missing_for_a_moment_is_read_from_its_start(kafka: Kafka) -> None:
    """The new log has more records than the old one had, before the client notices that it is another one."""
    taken = list[str]()

    def recreate() -> None:
        kafka.get_metadata(ALERTS)
        kafka.logs[TICKS] = [f"new {number}" for number in range(5)]
        kafka.logs[ALERTS].append("one more")
        kafka.get_metadata(TICKS, ALERTS)

    async with reading(taken) as (_, running):
        await eventually(lambda: len(taken) == 6, unless=running)
        taken.clear()
        kafka.during_a_poll = recreate
        await eventually(lambda: "new 4" in taken, unless=running)

    assert taken == ["one more", f"a new log of {TICKS}", *[f"new {number}" for number in range(5)]]


async def test_a_log_that_becomes_shorter_before_it_was_read_to_its_end_is_read_to_its_new_end(kafka: Kafka) -> None:
    """As that of a topic that is deleted and created again, or one that lost records in an unclean election."""
    taken = list[str]()
    kafka.flows.clear()
    async with reading(taken) as (tail, running):
        await eventually(lambda: "6 records are left" in str(tail.not_ready()), unless=running)
        kafka.logs[TICKS] = ["new 0"]
        kafka.flows.set()
        await eventually(lambda: tail.not_ready() == [], unless=running)
        assert "new 0" in taken


async def test_a_topic_that_is_created_again_with_fewer_partitions_ends_the_process(kafka: Kafka) -> None:
    """No broker answers for the partitions that it had: the reader does not wait for them."""
    taken = list[str]()

    def recreate() -> None:
        kafka.get_metadata(ALERTS)
        kafka.partitions = 2
        kafka.get_metadata(TICKS, ALERTS)

    kafka.partitions = 3
    async with reading(taken) as (_, running):
        await eventually(lambda: len(taken) == 6, unless=running)
        kafka.during_a_poll = recreate
        with pytest.raises(MustRestart, match="has 2 partitions, and had 3 when this process started"):
            await asyncio.wait_for(running, 60)
