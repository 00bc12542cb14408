"""Broker answers are read correctly: tests with a client that returns prepared answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.admin import NewTopic
from aiokafka.errors import GroupLoadInProgressError, UnknownError

from delivery.connection import Connection
from delivery.kafka_admin import (
    Admin,
    BrokerUnavailable,
    GroupDescription,
    Refused,
    SettingsUnknown,
    TopicDescription,
    connect,
)
from delivery.kafka_requests import DescribeTopics
from delivery.ledger import Partition

TOPIC = 2
UNSAID = -(2**31)
UNKNOWN_TOPIC, LOADING, UNAUTHORIZED, EXISTS, BAD_FACTOR, BAD_CONFIG, NOT_CONTROLLER = 3, 14, 29, 36, 38, 40, 41


class FakeAdminClient:
    """An admin client with prepared answers."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.requests: list[Any] = []

    async def describe_topics(self, names: list[str]) -> Any:
        return self._answers["older"]

    async def describe_configs(self, resources: list[Any]) -> Any:
        self.requests.append([resource.name for resource in resources])
        return [SimpleNamespace(resources=self._answers["settings"])]

    async def _send_request(self, request: Any) -> Any:
        if isinstance(request, DescribeTopics):
            if "older" in self._answers:
                raise NotImplementedError
            return SimpleNamespace(topics=self._answers["topics"])
        self.requests.append((request.topic, request.settings))
        return SimpleNamespace(resources=self._answers["altered"])

    async def delete_topics(self, names: list[str]) -> Any:
        return SimpleNamespace(topic_error_codes=self._answers["deleted"])

    async def create_topics(self, topics: list[NewTopic]) -> Any:
        self.requests.append([topic.name for topic in topics])
        return SimpleNamespace(topic_errors=self._answers["created"])

    @property
    def _client(self) -> Any:
        return self

    async def force_metadata_update(self) -> None:
        self.requests.append("metadata")


class FakeGroupsClient:
    """An admin client of one group."""

    def __init__(self, *, described: int = 0, fetched: int = 0) -> None:
        self._described, self._fetched = described, fetched

    async def list_consumer_groups(self) -> Any:
        return [("gpustream-usage", "consumer"), ("another", "consumer")]

    async def describe_consumer_groups(self, names: list[str], coordinator: int) -> Any:
        return [SimpleNamespace(groups=[(self._described, names[0], "Stable", "consumer", "", ["member"])])]

    async def list_consumer_group_offsets(self, name: str) -> Any:
        return {}

    async def find_coordinator(self, name: str) -> int:
        return 1

    async def _send_request(self, request: Any, node: int) -> Any:
        offsets = [] if self._fetched else [("gpu.attributed", [(0, 7, "", 0), (1, -1, "", 0)])]
        return SimpleNamespace(topics=offsets, error_code=self._fetched)


def admin(**answers: Any) -> Admin:
    return Admin(FakeAdminClient(**answers), Connection("kafka:9092"))


def topic(name: str, leaders: list[int], *, code: int = 0, allowed: int = UNSAID) -> tuple[Any, ...]:
    return code, name, False, [(0, n, leader, 0, [1], [1], []) for n, leader in enumerate(leaders)], allowed


async def test_a_partition_without_a_leader_counts_and_is_reported() -> None:
    rows = [topic("a", [1, 2, 3], allowed=8), topic("b", [1, -1], allowed=8), topic("deleted", [])]

    assert await admin(topics=rows).layouts(["a", "b", "deleted"]) == {
        "a": TopicDescription(3, in_sync={0: 1, 1: 1, 2: 1}, allowed=frozenset({"Read"}), replicas=1),
        "b": TopicDescription(2, leaderless=(1,), in_sync={0: 1, 1: 1}, allowed=frozenset({"Read"}), replicas=1),
    }


async def test_a_topic_that_the_broker_can_not_describe_is_not_called_missing() -> None:
    with pytest.raises(UnknownError, match="a"):
        await admin(topics=[topic("a", [], code=-1), topic("b", [1])]).layouts(["a", "b"])
    assert await admin(topics=[topic("a", [], code=UNKNOWN_TOPIC)]).layouts(["a"]) == {}


async def test_the_clients_permissions_are_reported_if_the_broker_gives_them() -> None:
    rows = [topic("read", [1], allowed=1 << 3 | 1 << 8), topic("hidden", [], code=UNAUTHORIZED), topic("unsaid", [1])]

    layouts = await admin(topics=rows).layouts(["read", "hidden", "unsaid"])

    assert {name: layout.allowed for name, layout in layouts.items()} == {
        "read": {"Read", "Describe"},
        "hidden": frozenset(),
        "unsaid": None,
    }


async def test_an_older_broker_gives_no_permissions() -> None:
    partition = {"error_code": 0, "partition": 0, "leader": 1, "replicas": [1], "isr": [1], "offline_replicas": []}
    rows = [{"error_code": 0, "topic": "a", "is_internal": False, "partitions": [partition]}]

    assert await admin(older=rows).layouts(["a"]) == {"a": TopicDescription(1)}


async def test_settings_are_reported_by_topic() -> None:
    rows = [
        (0, None, TOPIC, "a", [("x", "1", False, 1, False, []), ("y", None, False, 4, False, [])]),
        (0, None, TOPIC, "b", [("x", "2", False, False, False)]),
    ]

    assert await admin(settings=rows).settings(["a", "b"]) == {"a": {"x": "1", "y": ""}, "b": {"x": "2"}}


async def test_without_topics_no_request_for_settings_is_made() -> None:
    client = FakeAdminClient()

    assert (await Admin(client, Connection("kafka:9092")).settings([]), client.requests) == ({}, [])


async def test_a_topic_deleted_meanwhile_has_no_settings() -> None:
    assert await admin(settings=[(UNKNOWN_TOPIC, None, TOPIC, "gone", [])]).settings(["gone"]) == {}


async def test_settings_that_may_not_be_read_are_unknown() -> None:
    with pytest.raises(SettingsUnknown, match="may not read the settings of a"):
        await admin(settings=[(UNAUTHORIZED, "no", TOPIC, "a", [])]).settings(["a"])


async def test_settings_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(Refused, match="a: settings not read: the disk is gone"):
        await admin(settings=[(56, "the disk is gone", TOPIC, "a", [])]).settings(["a"])


async def test_topics_that_somebody_else_created_first_are_not_reported_as_created() -> None:
    rows = [("a", 0, None), ("b", EXISTS, "there is b")]

    assert await admin(created=rows).create([NewTopic("a", 1, 1), NewTopic("b", 1, 1)]) == ["a"]


async def test_every_topic_that_is_refused_is_named_with_the_brokers_reason() -> None:
    rows = [("a", 0, None), ("b", BAD_FACTOR, "3 is more than 1"), ("c", UNAUTHORIZED, None)]

    with pytest.raises(Refused) as raised:
        await admin(created=rows).create([NewTopic(name, 1, 3) for name in "abc"])

    assert str(raised.value).splitlines() == [
        "b: not created: 3 is more than 1: give a --replication-factor that the brokers are enough for",
        "c: not created: TopicAuthorizationFailedError",
    ]


async def test_what_can_not_be_created_now_is_no_refusal_and_the_controller_is_looked_up_again() -> None:
    client = FakeAdminClient(created=[("a", 0, None), ("b", NOT_CONTROLLER, None)])

    with pytest.raises(BrokerUnavailable, match="b: not created: NotControllerError"):
        await Admin(client, Connection("kafka:9092")).create([NewTopic(name, 1, 3) for name in "ab"])
    assert client.requests == [["a", "b"], "metadata"]


async def test_settings_that_can_not_be_altered_now_are_not_refused_and_the_controller_is_looked_up_again() -> None:
    client = FakeAdminClient(altered=[(NOT_CONTROLLER, None, TOPIC, "a")])

    with pytest.raises(BrokerUnavailable, match="a: settings not altered: NotControllerError"):
        await Admin(client, Connection("kafka:9092")).alter("a", {"retention.ms": "-1"})
    assert client.requests == [("a", {"retention.ms": "-1"}), "metadata"]


async def test_the_groups_have_their_members_and_offsets() -> None:
    groups = await Admin(FakeGroupsClient(), Connection("kafka:9092")).groups("gpustream-")

    assert groups == [GroupDescription("gpustream-usage", "Stable", 1, {Partition("gpu.attributed", 0): 7})]


@pytest.mark.parametrize("errors", [{"described": LOADING}, {"fetched": LOADING}])
async def test_a_group_whose_offsets_are_not_known_now_is_not_one_without_offsets(errors: dict[str, int]) -> None:
    with pytest.raises(GroupLoadInProgressError, match="gpustream-usage"):
        await Admin(FakeGroupsClient(**errors), Connection("kafka:9092")).groups("gpustream-")


async def test_settings_that_are_refused_are_an_error() -> None:
    client = FakeAdminClient(altered=[(BAD_CONFIG, "no such policy", TOPIC, "a")])

    with pytest.raises(Refused, match="a: settings not altered: no such policy"):
        await Admin(client, Connection("kafka:9092")).alter("a", {"cleanup.policy": "shred"})
    assert client.requests == [("a", {"cleanup.policy": "shred"})]


async def test_a_topic_that_is_already_missing_counts_as_deleted_and_a_forbidden_deletion_is_an_error() -> None:
    await admin(deleted=[("a", 0), ("b", UNKNOWN_TOPIC)]).delete(["a", "b"])

    with pytest.raises(Refused, match="c: not deleted: TopicAuthorizationFailedError"):
        await admin(deleted=[("c", UNAUTHORIZED)]).delete(["c"])


async def test_a_command_with_one_request_reports_why_a_broker_closes_the_connection() -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(
            BrokerUnavailable, match="it may want TLS, --kafka-security ssl or sasl-ssl, or be no Kafka"
        ):
            async with connect(Connection(f"{host}:{port}")):
                pass
