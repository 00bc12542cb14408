"""Commands that follow a topic, with a client in memory: what happens when it becomes another one."""

import asyncio

import pytest

from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.ledger import Partition
from gpustream.history import History, Span
from tests.delivery.test_tail import ALERTS, TICKS, Kafka

SPANS = {Partition(topic, 0): Span(0, 3) for topic in (TICKS, ALERTS)}


async def test_the_log_of_a_topic_that_was_missing_for_a_moment_is_followed_from_its_start() -> None:
    """The new log has more records than the old one had, before the client notices that it is another one."""
    kafka = Kafka()

    def recreate() -> None:
        kafka.get_metadata(ALERTS)
        kafka.logs[TICKS] = [f"new {number}" for number in range(5)]
        kafka.logs[ALERTS].append("one more")
        kafka.get_metadata(TICKS, ALERTS)

    kafka.during_a_poll = recreate
    values: list[str] = []
    async with asyncio.timeout(60):
        async for records in History(Connection("127.0.0.1:1"), kafka, {TICKS: 1, ALERTS: 1}).after(SPANS):
            values += [record.value for record in records]
            if "new 4" in values:
                break
    assert values == ["one more", *kafka.logs[TICKS]]


@pytest.mark.parametrize("count", [1, 3])
async def test_who_follows_a_topic_that_has_other_partitions_ends_with_that(count: int) -> None:
    kafka = Kafka()
    kafka.partitions = count
    following = History(Connection("127.0.0.1:1"), kafka, {ALERTS: 2}).after(
        {Partition(ALERTS, number): Span(0, 3) for number in range(2)}
    )
    with pytest.raises(BrokerError, match=f"gpu.alerts has {count} partitions, and had 2 before: run this again"):
        await asyncio.wait_for(anext(following), 60)
