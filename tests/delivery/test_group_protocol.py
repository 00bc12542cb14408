"""A Kafka that has switched off the classic protocol of consumer groups, as a later version may."""

import asyncio
from collections.abc import Iterator

import pytest
from aiokafka.conn import AIOKafkaConnection
from confluent_kafka import Producer

from delivery.group import ConsumerGroup, MustRestart
from delivery.ledger import Partition
from delivery.settings import MemberSettings

JOIN_GROUP = 11


class Member:
    """Is never notified."""

    async def revoked(self) -> None:
        raise AssertionError

    def assigned(self, tps: set[Partition]) -> None:
        raise AssertionError


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of librdkafka's broker, which here reports to clients that it does not support joining a group."""
    look_up = AIOKafkaConnection._do_version_lookup

    async def without_groups(connection: AIOKafkaConnection) -> None:
        await look_up(connection)
        del connection._versions[JOIN_GROUP]

    monkeypatch.setattr(AIOKafkaConnection, "_do_version_lookup", without_groups)
    producer = Producer({"test.mock.num.brokers": "1", "bootstrap.servers": "of no account", "log_level": 0})
    producer.produce("in", b"x")
    producer.flush(10)
    (address,) = producer.list_topics(timeout=10).brokers.values()
    yield f"{address.host}:{address.port}"
    producer.purge()


async def test_a_group_ends_with_one_sentence_if_the_classic_protocol_is_switched_off(embedded: str) -> None:
    group = ConsumerGroup(MemberSettings(kafka=embedded, group="readers"), ["in"], Member(), {"in": 4})
    await group.connect()
    try:
        group.join()
        with pytest.raises(MustRestart, match=r"switched off the classic protocol .* the group readers needs it"):
            await asyncio.wait_for(group.failed, 10)
    finally:
        await group.close()
