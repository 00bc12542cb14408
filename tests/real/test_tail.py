"""A reader without a group: where it starts, when it is ready, and how it handles a topic that is created again."""

import asyncio
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

from delivery import tail as module
from delivery.connection import Connection
from delivery.dead_letters import Record
from delivery.group import MustRestart
from delivery.tail import Tail
from tests.eventually import LIMIT_S, eventually
from tests.real.servers import KafkaServer
from topics.topic import load_topics

TOPIC = "gpu.attributed"


class Bench:
    """A tail of a topic of its own, and the records that it got."""

    def __init__(self, kafka: KafkaServer, *, since_s: float) -> None:
        self.kafka = kafka
        self.connection = Connection(kafka.address, topic_prefix=f"t{uuid4().hex[:8]}.")
        self.name = self.connection.prefixed(TOPIC)
        self.taken: list[bytes | None] = []
        self.since_s = since_s
        self.stop = asyncio.Event()

    def create(self, partitions: int) -> None:
        """Makes the topic."""
        self.kafka.create_topics({self.name: partitions}, load_topics()[TOPIC].settings())

    async def send(self, *values: bytes, partition: int = 0) -> None:
        """Puts records into a partition."""
        async with AIOKafkaProducer(bootstrap_servers=self.kafka.address) as producer:
            for value in values:
                await producer.send_and_wait(self.name, value, partition=partition)

    def start(self) -> tuple[Tail, "asyncio.Task[None]"]:
        """Begins to read."""
        tail = Tail(self.connection, {TOPIC: self.since_s}, self._take, client_id="of-the-tests")
        return tail, asyncio.create_task(tail.run(self.stop))

    def _take(self, _: str, records: Sequence[Record]) -> None:
        self.taken += [record.value for record in records]


async def test_it_reads_every_partition_from_then_on_and_is_ready_at_the_end(kafka: KafkaServer) -> None:
    bench = Bench(kafka, since_s=60.0)
    tail, running = bench.start()
    await eventually(lambda: "the topic is missing" in str(tail.not_ready()), unless=running)
    bench.create(2)
    await bench.send(b"a", b"b")
    await bench.send(b"c", partition=1)
    await eventually(lambda: tail.not_ready() == [], unless=running)

    assert sorted(filter(None, bench.taken)) == [b"a", b"b", b"c"]
    await bench.send(b"d", partition=1)
    await eventually(lambda: b"d" in bench.taken, unless=running)
    bench.stop.set()
    await running


async def test_what_was_logged_before_is_not_read(kafka: KafkaServer) -> None:
    bench = Bench(kafka, since_s=1.0)
    bench.create(1)
    await bench.send(b"old")
    logged_s = time.monotonic()
    await eventually(lambda: time.monotonic() - logged_s > 1.5, every_s=0.1)
    await bench.send(b"new")
    tail, running = bench.start()
    await eventually(lambda: tail.not_ready() == [], unless=running)

    assert bench.taken == [b"new"]
    bench.stop.set()
    await running


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_a_topic_that_is_created_again_is_read_on_or_ends_the_process_if_its_partitions_differ(
    kafka: KafkaServer, before: int, after: int
) -> None:
    bench = Bench(kafka, since_s=60.0)
    bench.create(before)
    await bench.send(b"a", b"b")
    tail, running = bench.start()
    await eventually(lambda: tail.not_ready() == [], unless=running)
    admin = kafka.admin()  # a client that nothing refers to gives up what it was asked
    admin.delete_topics([bench.name])[bench.name].result(LIMIT_S)
    await eventually(lambda: bench.name not in kafka.topics(), every_s=0.1)
    bench.create(after)
    await bench.send(b"again")

    with pytest.raises(MustRestart, match=f"has {after} partitions, and had {before}"):
        await asyncio.wait_for(running, 120)


async def test_while_kafka_is_away_it_is_not_ready_and_goes_on_afterwards(
    start_kafka: Callable[..., KafkaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 1.0)
    kafka = start_kafka()
    bench = Bench(kafka, since_s=60.0)
    bench.create(1)
    await bench.send(b"a")
    tail, running = bench.start()
    await eventually(lambda: tail.not_ready() == [], unless=running)
    await asyncio.to_thread(kafka.kill9)
    (reason,) = await eventually(tail.not_ready, unless=running)
    assert "read to its end is not known" in reason
    await asyncio.to_thread(kafka.start)
    await bench.send(b"b")
    await eventually(lambda: tail.not_ready() == [] and bench.taken == [b"a", b"b"], unless=running)
    bench.stop.set()
    await running
