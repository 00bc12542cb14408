"""The contract's topics on a real broker: created once, corrected, compared, and never resized."""

from collections.abc import Iterable, Mapping

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import ConfigResource

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import Refused
from delivery.settings import TopicAccess
from delivery.topic_admin import Mismatch, mismatches
from tests.eventually import eventually_sync
from tests.real.servers import ASK_TIMEOUT_S, KafkaServer
from topics import TOPICS, allocations, samples
from topics.topic import load_topics

FLOW = ["gpu.samples", "gpu.allocations", "gpu.workloads", "gpu.attributed"]


def wait_for(kafka: KafkaServer, names: Iterable[str]) -> None:
    """Waits until the broker has exactly these topics: it hears of changes a little later than the client."""
    eventually_sync(lambda: set(kafka.topics()) == set(names), f"{set(names)} are the topics")


async def compare(kafka: str, names: Iterable[str] | None = None) -> list[Mismatch]:
    """The mismatches of the topics of the contract, or of those named."""
    layouts, _ = await topic_admin.inspect(Connection(kafka), names)
    return mismatches([topic for name, topic in load_topics().items() if names is None or name in names], layouts)


@pytest.fixture
def empty(empty_kafka: KafkaServer) -> KafkaServer:
    wait_for(empty_kafka, [])
    return empty_kafka


def have(kafka: KafkaServer, partitions: Mapping[str, int], settings: Mapping[str, str]) -> None:
    """Creates topics as another program would."""
    before = kafka.topics()
    kafka.create_topics(partitions, settings)
    wait_for(kafka, {**before, **partitions})


def settings(kafka: KafkaServer, topic: str) -> dict[str, str]:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    admin = kafka.admin()
    described = admin.describe_configs([resource])[resource].result(ASK_TIMEOUT_S)
    return {name: entry.value for name, entry in described.items()}


async def test_create_makes_every_topic_with_its_settings(empty: KafkaServer) -> None:
    lines = await topic_admin.create(empty.connection, partitions=4, replication_factor=1)

    assert lines == [f"{name}: created, 4 partitions, replication factor 1" for name in TOPICS]
    assert empty.topics() == dict.fromkeys(TOPICS, 4)
    current = settings(empty, "gpu.samples")
    assert current["cleanup.policy"] == "delete"
    assert current["retention.ms"] == str(24 * 3_600_000)
    assert current["message.timestamp.type"] == "LogAppendTime"
    assert current["max.message.bytes"] == str(4 * 1024 * 1024)
    assert current["segment.ms"] == "3600000"
    assert settings(empty, "gpu.alerts")["cleanup.policy"] == "compact"
    assert settings(empty, "gpu.dead-letters")["retention.ms"] == str(7 * 24 * 3_600_000)


async def test_create_again_changes_nothing(empty: KafkaServer) -> None:
    await topic_admin.create(empty.connection, partitions=4, replication_factor=1)

    assert await topic_admin.create(empty.connection, partitions=4, replication_factor=1) == []
    assert await compare(empty.address) == []


async def test_create_makes_what_is_missing_and_alters_what_is_wrong_and_says_so(empty: KafkaServer) -> None:
    changed = {
        "cleanup.policy": "compact",
        "retention.ms": "1000",
        "max.message.bytes": "9999999",
        "retention.bytes": "777",
    }
    have(empty, {"gpu.samples": 4}, changed)

    lines = await topic_admin.create(empty.connection, partitions=4, replication_factor=1)

    assert sorted(line for line in lines if line.startswith("gpu.samples")) == [
        "gpu.samples: cleanup.policy altered from compact to delete",
        "gpu.samples: message.timestamp.type altered from CreateTime to LogAppendTime",
        "gpu.samples: retention.ms altered from 1000 to 86400000",
        "gpu.samples: segment.ms altered from 604800000 to 3600000",
    ]
    assert len(lines) == 4 + len(TOPICS) - 1
    assert await topic_admin.create(empty.connection, partitions=4, replication_factor=1) == []
    assert settings(empty, "gpu.samples")["retention.bytes"] == "777"
    assert settings(empty, "gpu.samples")["max.message.bytes"] == "9999999"


@pytest.mark.parametrize("partitions", [8, 2])
async def test_another_number_of_partitions_is_refused_and_nothing_changes(empty: KafkaServer, partitions: int) -> None:
    have(empty, {"gpu.samples": 4}, {"retention.ms": "1000"})

    with pytest.raises(topic_admin.ContractMismatch, match=r"gpu\.samples: .* is 4, must be .* it is empty"):
        await topic_admin.create(empty.connection, partitions=partitions, replication_factor=1)

    assert empty.topics() == {"gpu.samples": 4}
    assert settings(empty, "gpu.samples")["retention.ms"] == "1000"


async def test_topics_that_are_empty_and_have_other_partitions_are_created_again_if_that_is_asked_for(
    empty: KafkaServer,
) -> None:
    have(empty, {"gpu.samples": 1, "gpu.workloads": 3}, {})

    with pytest.raises(topic_admin.ContractMismatch, match="--recreate-empty deletes it"):
        await topic_admin.create(empty.connection, partitions=4, replication_factor=1)
    assert empty.topics() == {"gpu.samples": 1, "gpu.workloads": 3}

    lines = await topic_admin.create(empty.connection, partitions=4, replication_factor=1, recreate_empty=True)

    assert "gpu.samples: deleted: it was empty, with 1 partitions" in lines
    assert "gpu.samples: created, 4 partitions, replication factor 1" in lines
    assert empty.topics() == dict.fromkeys(TOPICS, 4)
    assert await compare(empty.address) == []


async def test_a_topic_with_records_is_never_deleted_nor_another_beside_it(empty: KafkaServer) -> None:
    have(empty, {"gpu.samples": 1, "gpu.workloads": 3}, {})
    producer = Producer({"bootstrap.servers": empty.address})
    producer.produce("gpu.samples", b"x")
    producer.flush(ASK_TIMEOUT_S)

    with pytest.raises(topic_admin.ContractMismatch, match=r"gpu\.samples: .* it has records, .* --partitions 1"):
        await topic_admin.create(empty.connection, partitions=4, replication_factor=1, recreate_empty=True)

    assert empty.topics() == {"gpu.samples": 1, "gpu.workloads": 3}


async def test_topics_not_keyed_by_node_keep_their_number_of_partitions(empty: KafkaServer) -> None:
    have(empty, {"gpu.dead-letters": 1}, {})

    await topic_admin.create(empty.connection, partitions=4, replication_factor=1)

    assert empty.topics() == {**dict.fromkeys(TOPICS, 4), "gpu.dead-letters": 1}


async def test_a_replication_factor_above_the_number_of_brokers_is_refused_with_the_reason(
    empty: KafkaServer,
) -> None:
    with pytest.raises(Refused, match=r"gpu\.samples: not created: .*replication factor of 3"):
        await topic_admin.create(empty.connection, partitions=4, replication_factor=3)

    assert empty.topics() == {}


async def test_topics_that_fit_may_be_used(empty: KafkaServer) -> None:
    await topic_admin.create(empty.connection, partitions=4, replication_factor=1)

    assert await topic_admin.check(empty.connection, TopicAccess(tuple(FLOW))) == topic_admin.Checked(
        dict.fromkeys(FLOW, 4)
    )


async def test_every_error_is_in_one_message(empty: KafkaServer) -> None:
    for topic in (samples.TOPIC, allocations.TOPIC):
        have(empty, {topic.name: 4}, topic.settings())
    have(empty, {"gpu.attributed": 6}, {"cleanup.policy": "compact", "max.message.bytes": "1000"})

    with pytest.raises(topic_admin.ContractMismatch) as raised:
        await topic_admin.check(empty.connection, TopicAccess(tuple(FLOW)))

    assert str(raised.value).splitlines() == [
        "gpu.workloads: the topic is missing, must be there",
        "gpu.attributed: its number of partitions is 6, must be 4, as gpu.samples has",
        "gpu.attributed: cleanup.policy is compact, must be delete",
        "gpu.attributed: message.timestamp.type is CreateTime, must be LogAppendTime",
        "gpu.attributed: max.message.bytes is 1000, must be at least 4194304",
    ]
    assert [mismatch.subject for mismatch in await compare(empty.address, FLOW) if not mismatch.breaks] == [
        "segment.ms"
    ]
