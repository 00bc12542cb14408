"""A new leader reads back what the last one reported, and waits for it no longer than it must."""

import asyncio
import logging
from typing import Any

import orjson
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError
from aiokafka.structs import OffsetAndTimestamp

from delivery import clients, topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import TopicDescription
from producers.cluster import takeover
from producers.cluster.takeover import PublishedNodes, read_back


def record(seq: int, *pods: dict[str, Any], **changed: Any) -> bytes:
    head = {"schema": 1, "cluster": "prod", "node": "n1", "epoch": 1, "seq": seq, "ts_ms": 1000 * seq}
    return orjson.dumps({**head, "pods": pods, **changed})


def pod(uid: str, ended_ms: int | None = None) -> dict[str, Any]:
    return {"namespace": "ml", "name": uid, "uid": uid, "ended_ms": ended_ms}


def ends(*values: bytes) -> dict[str, int | None]:
    """The ends of the pods of n1 after these records."""
    published = PublishedNodes("prod")
    for value in values:
        published.add(value)
    return {uid: pod.ended_ms for uid, pod in published.nodes["n1"].pods.items()} if published.nodes else {}


def test_a_pod_that_ended_is_known_from_the_record_that_ended_it() -> None:
    assert ends(record(1, pod("a"), pod("b")), record(2, pod("a", 1500), pod("b")), record(3, pod("b"))) == {
        "a": 1500,
        "b": None,
    }


def test_a_pod_that_is_not_reported_any_more_has_ended() -> None:
    assert ends(record(1, pod("a")), record(2)) == {"a": 2000}


@pytest.mark.parametrize(
    "record_bytes",
    [
        record(1, pod("z")),
        record(9, pod("z"), epoch=0),
        record(9, pod("z"), cluster="another"),
        record(9, pod("z"), schema=2),
        b"{",
        b"",
    ],
)
def test_older_records_others_records_and_malformed_ones_change_nothing(record_bytes: bytes) -> None:
    assert ends(record(2, pod("a")), record_bytes) == {"a": None}


async def test_a_broker_that_is_away_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "WITHIN_S", 0.0)
    reading = asyncio.create_task(read_back(Connection("127.0.0.1:1"), 0, PublishedNodes("prod")))
    async with asyncio.timeout(30):
        while not any("trying again" in text for text in caplog.messages):  # noqa: ASYNC110 - a log
            await asyncio.sleep(0.01)
    assert not reading.done()
    reading.cancel()
    await asyncio.wait([reading])


async def test_every_partition_is_read_from_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the lookup of the partitions before it takes."""
    consumer = EmptyConsumer()

    async def connect_consumer(_: Connection) -> EmptyConsumer:
        return consumer

    async def inspect(*_: object) -> tuple[dict[str, TopicDescription], None]:
        return {"gpu.workloads": TopicDescription(3)}, None

    monkeypatch.setattr(clients, "connect_consumer", connect_consumer)
    monkeypatch.setattr(topic_admin, "inspect", inspect)
    await read_back(Connection("k:1"), 1_795_219_152_001, PublishedNodes("prod"))
    assert consumer.times_ms == [1_795_219_152_001] * 3


class EmptyConsumer:
    """A consumer of partitions without records; each lookup by time takes a few milliseconds."""

    def __init__(self) -> None:
        self.times_ms: list[int] = []

    async def offsets_for_times(self, times_ms: dict[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp]:
        await asyncio.sleep(0.005)
        self.times_ms += times_ms.values()
        return {tp: OffsetAndTimestamp(0, time_ms) for tp, time_ms in times_ms.items()}

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    end_offsets = beginning_offsets

    def assign(self, _: object) -> None:
        pass

    def seek(self, *_: object) -> None:
        pass

    async def position(self, _: object) -> int:
        return 0

    async def stop(self) -> None:
        pass


class FakeConsumer:
    """A consumer that answers with an error, or never, when it is given partitions."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.stopped = error, False

    def assign(self, _: object) -> None:
        pass

    async def beginning_offsets(self, _: object) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "not read back within 0.01 s"),
        (TopicAuthorizationFailedError(), "allow READ on the topic"),
        (KafkaError("x"), "going on without it"),
    ],
)
async def test_a_leader_goes_on_without_records_that_it_can_not_read_and_logs_why(
    error: Exception | None, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = FakeConsumer(error)

    async def connect_consumer(_: Connection) -> FakeConsumer:
        return consumer

    async def inspect(*_: object) -> tuple[dict[str, TopicDescription], None]:
        return {"gpu.workloads": TopicDescription(1)}, None

    monkeypatch.setattr(clients, "connect_consumer", connect_consumer)
    monkeypatch.setattr(topic_admin, "inspect", inspect)
    monkeypatch.setattr(takeover, "WITHIN_S", 0.01)
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(30):
        await read_back(Connection("k:1"), 0, PublishedNodes("prod"))

    assert [expected in message for message in caplog.messages] == [True]
    assert consumer.stopped
