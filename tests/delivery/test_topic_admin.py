"""The topics of a broker against those that it must have, without a broker and on an embedded one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiokafka.admin import NewTopic
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import BrokerUnavailable, SettingsUnknown, TopicDescription
from delivery.settings import TopicAccess
from delivery.topic_admin import Mismatch, command, contract, mismatches
from topics import TOPICS
from topics.topic import Topic, load_topics

ALL = load_topics()
BY_NODE = [name for name, topic in ALL.items() if topic.by_node]

numbers = st.integers(1, 1000)


def described(topic: Topic, partitions: int, **other_settings: str) -> TopicDescription:
    """A topic as it must be, except for these settings (with underscores for dots)."""
    settings = topic.settings() | {name.replace("_", "."): value for name, value in other_settings.items()}
    return TopicDescription(partitions, settings)


def mismatches_of_samples(other_settings: dict[str, str]) -> list[Mismatch]:
    topic = ALL["gpu.samples"]
    return mismatches([topic], {topic.name: described(topic, 32, **other_settings)})


@given(numbers)
def test_topics_as_they_must_be_have_no_mismatch(partitions: int) -> None:
    assert mismatches(ALL.values(), {name: described(topic, partitions) for name, topic in ALL.items()}) == []


def test_every_topic_that_is_missing_is_named() -> None:
    found_mismatches = mismatches(ALL.values(), {})

    assert [mismatch.topic for mismatch in found_mismatches] == list(TOPICS)
    assert str(found_mismatches[0]) == "gpu.samples: the topic is missing, must be there"


@given(st.fixed_dictionaries(dict.fromkeys(ALL, numbers)))
def test_topics_keyed_by_node_must_have_as_many_partitions_as_the_samples(counts: dict[str, int]) -> None:
    found_mismatches = mismatches(ALL.values(), {name: described(topic, counts[name]) for name, topic in ALL.items()})

    assert [mismatch.topic for mismatch in found_mismatches] == [
        name for name in BY_NODE if counts[name] != counts["gpu.samples"]
    ]
    assert all(mismatch.breaks for mismatch in found_mismatches)


def test_topics_not_keyed_by_node_may_have_any_number_of_partitions() -> None:
    topics = [ALL["gpu.attributed"], ALL["gpu.alerts"], ALL["gpu.dead-letters"]]

    assert mismatches(topics, {topic.name: described(topic, number) for number, topic in enumerate(topics, 1)}) == []


@given(numbers, numbers)
def test_an_optional_topic_may_be_missing_but_must_have_as_many_partitions(partitions: int, others: int) -> None:
    topic, beside = ALL["gpu.workloads"], [ALL["gpu.samples"], ALL["gpu.allocations"]]
    descriptions = {
        topic.name: described(topic, partitions),
        "gpu.samples": TopicDescription(others, {"cleanup.policy": "compact"}),
    }

    found_mismatches = mismatches([topic], descriptions, beside)

    assert [mismatch.topic for mismatch in found_mismatches] == (["gpu.samples"] if partitions != others else [])


@pytest.mark.parametrize(
    ("other_settings", "message"),
    [
        ({"cleanup_policy": "compact"}, "gpu.samples: cleanup.policy is compact, must be delete"),
        ({"message_timestamp_type": "CreateTime"}, "message.timestamp.type is CreateTime, must be LogAppendTime"),
        ({"max_message_bytes": "1048588"}, "max.message.bytes is 1048588, must be at least 4194304"),
    ],
)
def test_a_setting_that_readers_can_not_work_with_is_an_error(other_settings: dict[str, str], message: str) -> None:
    (mismatch,) = mismatches_of_samples(other_settings)

    assert message in str(mismatch)
    assert mismatch.breaks


def test_a_setting_that_does_no_harm_is_reported_and_does_not_break() -> None:
    (mismatch,) = mismatches_of_samples({"segment_ms": "604800000"})

    assert (mismatch.subject, mismatch.breaks) == ("segment.ms", False)


def test_a_shorter_retention_is_reported_and_keeps_no_component_from_starting() -> None:
    (mismatch,) = mismatches_of_samples({"retention_ms": "86399999"})

    assert str(mismatch) == "gpu.samples: retention.ms is 86399999, must be at least 86400000"
    assert not mismatch.breaks


@pytest.mark.parametrize(
    "other_settings", [{"retention_ms": "-1"}, {"retention_ms": "604800000"}, {"max_message_bytes": "9999999"}]
)
def test_more_retention_and_larger_messages_are_no_mismatch(other_settings: dict[str, str]) -> None:
    assert mismatches_of_samples(other_settings) == []


def test_settings_that_the_broker_does_not_report_are_not_errors() -> None:
    assert mismatches(ALL.values(), dict.fromkeys(ALL, TopicDescription(4))) == []


@pytest.fixture
def embedded() -> Iterator[str]:
    """The address of librdkafka's broker, with a topic of 4 partitions. It lives as long as its producer."""
    producer = Producer({"test.mock.num.brokers": "1", "bootstrap.servers": "of no account", "log_level": 0})
    producer.produce("gpu.samples", b"x")
    producer.flush(10)
    (address,) = producer.list_topics(timeout=10).brokers.values()
    yield f"{address.host}:{address.port}"
    producer.purge()


async def test_on_an_embedded_broker_only_partition_counts_are_checked(embedded: str) -> None:
    assert await topic_admin.check(Connection(embedded), TopicAccess(("gpu.samples",))) == topic_admin.Checked(
        {"gpu.samples": 4}
    )


async def test_on_an_embedded_broker_a_missing_topic_is_an_error_and_stays_missing(embedded: str) -> None:
    for _ in range(2):
        with pytest.raises(topic_admin.ContractMismatch, match=r"gpu\.attributed: the topic is missing"):
            await topic_admin.check(Connection(embedded), TopicAccess(("gpu.samples", "gpu.attributed")))


async def test_who_has_a_wrong_prefix_is_told_which_one_the_topics_have(embedded: str) -> None:
    with pytest.raises(topic_admin.ContractMismatch) as raised:
        await topic_admin.check(Connection(embedded, topic_prefix="pord."), TopicAccess(("gpu.samples",)))
    assert raised.value.hint == (
        "there is no topic of gpustream with the prefix 'pord.', but there are some without a prefix: is --topic-prefix"
        " right?"
    )
    assert raised.value.hint in raised.value.advice


async def test_whose_topics_are_there_in_part_is_told_no_other_prefix(embedded: str) -> None:
    with pytest.raises(topic_admin.ContractMismatch) as raised:
        await topic_admin.check(Connection(embedded), TopicAccess(("gpu.samples", "gpu.attributed")))
    assert raised.value.hint == ""


def test_the_prefixes_of_topics_are_those_that_others_have() -> None:
    names = ["gpu.samples", "prod.gpu.samples", "prod.gpu.attributed", "pord.gpu.alerts", "orders"]
    assert topic_admin.other_prefixes(names, Connection("kafka:9092")) == ["prod."]
    assert topic_admin.other_prefixes(names, Connection("kafka:9092", topic_prefix="pord.")) == ["", "prod."]


async def test_topics_are_not_created_on_an_embedded_broker(embedded: str) -> None:
    with pytest.raises(SettingsUnknown, match="can't be created: the broker has no topic settings"):
        await topic_admin.create(Connection(embedded))


class FakeAdmin:
    """A broker without topics, that creates them after so many answers of ``delays``."""

    def __init__(self, delays: int) -> None:
        self.delays = delays
        self.created: dict[str, TopicDescription] = {}

    async def layouts(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        return {name: self.created[name] for name in names if name in self.created}

    async def settings(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        return {name: ALL[name].settings() for name in names}

    async def create(self, topics: Sequence[NewTopic]) -> list[str]:
        self.delays -= 1
        if self.delays >= 0:
            raise BrokerUnavailable("not created: NotControllerError")
        self.created = {topic.name: TopicDescription(topic.num_partitions) for topic in topics}
        return list(self.created)


@pytest.mark.parametrize("delays", [0, 3, 1000])
async def test_topics_are_created_when_a_controller_is_elected_and_it_is_said_if_none_is(
    delays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def connect(_: Connection) -> AsyncIterator[FakeAdmin]:
        yield FakeAdmin(delays)

    monkeypatch.setattr(topic_admin, "connect", connect)
    monkeypatch.setattr(topic_admin, "_PASS_EVERY_S", 0.0)
    if delays == 1000:
        with pytest.raises(BrokerUnavailable, match="NotControllerError"):
            await topic_admin.create(Connection("kafka:9092"))
    else:
        assert len(await topic_admin.create(Connection("kafka:9092"))) == len(TOPICS)


async def test_an_unreachable_broker_is_named() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{occupied.getsockname()[1]}"

        with pytest.raises(BrokerUnavailable, match=f"no Kafka broker answers at {address}"):
            await topic_admin.check(Connection(address), TopicAccess(("gpu.samples",)))


async def test_a_stop_does_not_wait_for_a_broker_that_says_nothing() -> None:
    stop = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stop.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    check = topic_admin.TopicCheck(
        Connection(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), TopicAccess(("gpu.samples",))
    )
    async with server, asyncio.timeout(5):
        assert await check.wait(stop) is None


def test_a_missing_topic_and_the_command_to_run_have_kafkas_name_of_it() -> None:
    connection = Connection("kafka:9092", topic_prefix="team-a.")

    (missing,) = mismatches(contract(connection, ["gpu.samples"]).values(), {})

    assert str(missing) == "team-a.gpu.samples: the topic is missing, must be there"
    assert command(connection) == "gpustream topics create --topic-prefix team-a."


@pytest.mark.parametrize(
    ("counts", "partitions"), [([4, 4, 0], " --partitions 4"), ([32, 32], ""), ([4, 5], ""), ([], "")]
)
def test_the_command_to_run_says_how_many_partitions_the_topics_have_if_that_is_not_the_default(
    counts: list[int], partitions: str
) -> None:
    by_node = [TopicDescription(count) for count in counts]

    assert command(Connection("kafka:9092"), by_node) == f"gpustream topics create{partitions}"
