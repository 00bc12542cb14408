"""Kafka's administration: topics and their settings, consumer groups, ACLs, and the brokers' disks.

In: an address. Out: what the broker has, in plain types. On failure: :class:`BrokerUnavailable` if nobody answers,
:class:`SettingsUnknown` if the broker does not say, :class:`Refused` if it refuses.

Source: Kafka's protocol for the error codes, for Metadata 8, for IncrementalAlterConfigs and for DescribeLogDirs.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    IncompatibleBrokerVersion,
    KafkaError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.admin import DescribeAclsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from delivery import clients, opening
from delivery.clients import SILENCE, explain
from delivery.connection import Connection
from delivery.ledger import Partition

_REQUEST_TIMEOUT_MS = 10_000
_SESSION_TIMEOUT_S = 60.0
_SET = 0
_TEXT = String("utf-8")
_COMPACT = CompactString("utf-8")
_UNAUTHORIZED = 29
_UNSAID = -(2**31)

_ANY, _PREFIXED, _ALLOW = 1, 4, 3
_RESOURCES = {2: "Topic", 3: "Group"}
_OPERATIONS = {2: "All", 3: "Read", 4: "Write", 5: "Create", 8: "Describe", 10: "DescribeConfigs", 11: "AlterConfigs"}
"""Of ACLs, by Kafka's codes."""

RIGHTS = {code: _OPERATIONS[code] for code in (3, 4, 8)}
"""What an ACL allows with a topic, as far as components need it. Each of the first two implies the third."""


class BrokerError(Exception):
    """The broker does not give what it was asked for; the message says why, in one line or one line a mistake."""

    exit_code = 1


class BrokerUnavailable(BrokerError):
    """No broker answers. Try again later."""


class SettingsUnknown(BrokerError):
    """The broker has no topic settings (an embedded one), or this client may not read them."""


class Refused(BrokerError):
    """The broker said no, and will say it again; ``reasons`` are by topic."""

    def __init__(self, what: str, reasons: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{topic}: {what}: {reason}" for topic, reason in reasons.items()))


class TopicDescription(NamedTuple):
    """A topic as the broker has it. ``settings`` None if it does not say.

    ``leaderless`` are the partitions without a leader, ``in_sync`` how many replicas of each partition are in sync.
    ``allowed`` is what this client may do with it, None if the broker does not say. Of a topic that it may not see,
    nothing else is known.
    """

    partitions: int
    settings: Mapping[str, str] | None = None
    leaderless: tuple[int, ...] = ()
    in_sync: Mapping[int, int] = {}
    allowed: frozenset[str] | None = None


class GroupDescription(NamedTuple):
    """A consumer group: its state as the broker calls it, how many members it has, and what it has committed."""

    name: str
    state: str
    members: int
    committed: Mapping[Partition, int]


class Acl(NamedTuple):
    """What a user may do, or may not, in Kafka's words; ``name`` ends in ``*`` if it stands for all that begin so."""

    principal: str
    operation: str
    resource: str
    name: str
    allowed: bool


class Disk(NamedTuple):
    """A folder in which a broker keeps its logs, in bytes; ``error`` is what keeps it from being used."""

    broker: int
    path: str
    total: int
    usable: int
    error: str = ""


class _SettingsSet(Response):  # type: ignore[misc] # aiokafka has no types
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("resources", Array(("error_code", Int16), ("error_message", _TEXT), ("type", Int8), ("name", _TEXT))),
    )


class _SetSettings(RequestStruct):  # type: ignore[misc]
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = _SettingsSet
    CONFIGS = Array(("name", _TEXT), ("config_operation", Int8), ("value", _TEXT))
    SCHEMA = Schema(
        ("resources", Array(("type", Int8), ("name", _TEXT), ("configs", CONFIGS))), ("validate_only", Boolean)
    )


class IncrementalAlterConfigs(Request[_SetSettings]):  # type: ignore[misc]
    """Sets some settings of a topic and leaves its others alone: aiokafka knows only the request that resets those."""

    API_KEY = 44

    def __init__(self, topic: str, settings: Mapping[str, str]) -> None:
        self.topic, self.settings = topic, dict(settings)

    def build(self, request_struct_class: Any) -> Any:
        """The request, as it is sent."""
        configs = [(name, _SET, value) for name, value in self.settings.items()]
        return request_struct_class([(int(ConfigResourceType.TOPIC), self.topic, configs)], False)


class _Topics(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    BROKERS = Array(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT))
    PARTITIONS = Array(
        ("error_code", Int16), ("partition", Int32), ("leader", Int32), ("leader_epoch", Int32),
        ("replicas", Array(Int32)), ("isr", Array(Int32)), ("offline", Array(Int32)),
    )  # fmt: skip
    TOPICS = Array(
        ("error_code", Int16), ("name", _TEXT), ("is_internal", Boolean), ("partitions", PARTITIONS), ("allowed", Int32)
    )
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("brokers", BROKERS), ("cluster_id", _TEXT), ("controller_id", Int32),
        ("topics", TOPICS), ("allowed", Int32),
    )  # fmt: skip


class _MetadataWithRights(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _Topics
    SCHEMA = Schema(
        ("topics", Array(_TEXT)), ("allow_auto_topic_creation", Boolean), ("include_cluster_allowed", Boolean),
        ("include_topic_allowed", Boolean),
    )  # fmt: skip


class DescribeTopics(Request[_MetadataWithRights]):  # type: ignore[misc]
    """Asks for topics, and for what this client may do with them, which aiokafka's own request can't."""

    API_KEY = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = list(topics)

    def build(self, request_struct_class: Any) -> Any:
        """The request, as it is sent. No topic is made by it."""
        return request_struct_class(self.topics, False, False, True)


class _Disks(Response):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 4
    PARTITION = (("partition", Int32), ("size", Int64), ("lag", Int64), ("future", Boolean), ("tags", TaggedFields))
    TOPIC = (("name", _COMPACT), ("partitions", CompactArray(*PARTITION)), ("tags", TaggedFields))
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("results", CompactArray(
            ("error_code", Int16), ("path", _COMPACT), ("topics", CompactArray(*TOPIC)), ("total", Int64),
            ("usable", Int64), ("tags", TaggedFields),
        )),
        ("tags", TaggedFields),
    )  # fmt: skip


class _NoTopicsDisks(RequestStruct):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 4
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Disks
    PARTITIONS = CompactArray(("name", _COMPACT), ("tags", TaggedFields))
    SCHEMA = Schema(("topics", PARTITIONS), ("tags", TaggedFields))


class DescribeLogDirs(Request[_NoTopicsDisks]):  # type: ignore[misc]
    """Asks a broker for its folders and how much room they have, and for nothing that is in them."""

    API_KEY = 35

    def build(self, request_struct_class: Any) -> Any:
        """The request, as it is sent."""
        return request_struct_class([], {})


class Admin:
    """An open connection to a broker's administration; see :func:`connect`."""

    def __init__(self, client: Any, connection: Connection) -> None:
        self._client, self._connection = client, connection

    async def layouts(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        """Those of these topics that there are, as far as this client may see them."""
        try:
            rows = (await self._client._send_request(DescribeTopics(names))).topics  # noqa: SLF001
        except NotImplementedError:  # by a broker that speaks less than Kafka 2.3 did
            topics = await self._client.describe_topics(list(names))
            rows = [
                (one["error_code"], one["topic"], False, [tuple(each.values()) for each in one["partitions"]], _UNSAID)
                for one in topics
            ]
        found = {}
        for code, name, _, partitions, bits in rows:
            if code == _UNAUTHORIZED:
                found[name] = TopicDescription(0, allowed=frozenset())
            elif partitions:
                allowed = frozenset(right for one, right in RIGHTS.items() if bits >> one & 1)
                leaderless = tuple(sorted(number for _, number, leader, *_ in partitions if leader < 0))
                in_sync = {number: len(isr) for _, number, _, _, _, isr, _ in partitions} if bits != _UNSAID else {}
                found[name] = TopicDescription(
                    len(partitions), None, leaderless, in_sync, None if bits == _UNSAID else allowed
                )
        return found

    async def brokers(self) -> dict[int, str]:
        """The brokers that there are now, by their numbers, each as ``HOST:PORT``."""
        rows = (await self._client._send_request(DescribeTopics([]))).brokers  # noqa: SLF001
        return {number: f"{host}:{port}" for number, host, port, _ in rows}

    async def names(self) -> list[str]:
        """The topics that this client may see, as Kafka calls them."""
        names: list[str] = await self._client.list_topics()
        return names

    async def disks(self, brokers: Iterable[int]) -> list[Disk]:
        """The folders of these brokers; none if this client may not know, or a broker is older than Kafka 3.3."""
        found = []
        for broker in brokers:
            try:
                answer = await self._client._send_request_to_node(broker, DescribeLogDirs())  # noqa: SLF001
            except (IncompatibleBrokerVersion, NotImplementedError):
                return []
            found += [
                Disk(broker, path, total, usable, for_code(code).__name__ if code else "")
                for code, path, _, total, usable, _ in answer.results
            ]
        return found

    async def acls(self) -> list[Acl] | None:
        """What users may do with topics and groups; None if this client may not know, or there is no authorizer."""
        anything = DescribeAclsRequest(_ANY, None, _ANY, None, None, _ANY, _ANY)
        try:
            answer = await self._client._send_request(anything)  # noqa: SLF001
        except (IncompatibleBrokerVersion, NotImplementedError):
            return None
        if answer.error_code:
            return None
        found = []
        for kind, name, pattern, rows in answer.resources:
            of = name + "*" if pattern == _PREFIXED else name
            for who, _, operation, may in rows if kind in _RESOURCES else ():
                found.append(Acl(who, _OPERATIONS.get(operation, ""), _RESOURCES[kind], of, may == _ALLOW))
        return found

    async def hidden_groups(self, names: Iterable[str]) -> list[str]:
        """Those of these groups that this client may not see."""
        hidden = []
        for name in names:
            try:
                (answer,) = await self._client.describe_consumer_groups([self._connection.prefixed(name)])
            except GroupAuthorizationFailedError:
                hidden.append(name)
            except GroupCoordinatorNotAvailableError:  # no group has ever been in this Kafka
                continue
            else:
                hidden += [name] * (answer.groups[0][0] == GroupAuthorizationFailedError.errno)
        return hidden

    async def settings(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings in force of topics that exist.

        :raises SettingsUnknown: the broker does not say.
        """
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        try:
            responses = await self._client.describe_configs(resources)
        except IncompatibleBrokerVersion as error:
            raise SettingsUnknown("the broker has no topic settings") from error
        settings = {}
        for code, message, _, name, entries in (row for response in responses for row in response.resources):
            if for_code(code) is UnknownTopicOrPartitionError:
                continue
            if code == _UNAUTHORIZED:
                raise SettingsUnknown(f"this client may not read the settings of {name}")
            if code:
                raise Refused("settings not read", {name: message or for_code(code).__name__})
            settings[name] = {entry[0]: entry[1] or "" for entry in entries}
        return settings

    async def create(self, topics: Iterable[NewTopic]) -> list[str]:
        """Create topics; the names of those that were not there before.

        :raises Refused: some could not be created; the others were.
        """
        response = await self._client.create_topics(list(topics))
        errors = {row[0]: (for_code(row[1]), row[2]) for row in response.topic_errors if row[1]}
        already = [name for name, (error, _) in errors.items() if error is TopicAlreadyExistsError]
        reasons = {name: text or error.__name__ for name, (error, text) in errors.items() if name not in already}
        if reasons:
            raise Refused("not created", reasons)
        return [row[0] for row in response.topic_errors if row[0] not in already]

    async def alter(self, name: str, settings: Mapping[str, str]) -> None:
        """Set some of a topic's settings; the others stay as they are.

        :raises Refused: the broker does not take one of them.
        """
        response = await self._client._send_request(IncrementalAlterConfigs(name, settings))  # noqa: SLF001
        reasons = {row[3]: row[1] or for_code(row[0]).__name__ for row in response.resources if row[0]}
        if reasons:
            raise Refused("settings not altered", reasons)

    async def groups(self, prefix: str) -> list[GroupDescription]:
        """The consumer groups whose names begin so, without the prefix of all names; those that this client may see.

        They are described one by one: of an answer about several, aiokafka 0.14 can't read the second.
        """
        listed = await self._client.list_consumer_groups()
        found, begins = [], self._connection.prefixed(prefix)
        for name in sorted(row[0] for row in listed if row[0].startswith(begins)):
            (answer,) = await self._client.describe_consumer_groups([name])
            (_, _, state, _, _, members, *_) = answer.groups[0]
            offsets = await self._client.list_consumer_group_offsets(name)
            committed = {
                clients.from_kafka(self._connection, tp): metadata.offset
                for tp, metadata in offsets.items()
                if metadata.offset >= 0
            }
            found.append(GroupDescription(self._connection.unprefixed(name), state, len(members), committed))
        return found

    async def is_empty(self, name: str, partitions: int) -> bool:
        """Whether a topic holds no record at this moment."""
        # what an open transaction has written is there, too
        consumer = clients.consumer(self._connection, isolation_level="read_uncommitted")
        await consumer.start()
        try:
            tps = [TopicPartition(name, number) for number in range(partitions)]
            return bool(await consumer.beginning_offsets(tps) == await consumer.end_offsets(tps))
        finally:
            await clients.close(consumer)

    async def delete(self, names: Iterable[str]) -> None:
        """Delete topics, and all that is in them. One that is already gone is no mistake.

        :raises Refused: some could not be deleted; the others were.
        """
        response = await self._client.delete_topics(list(names))
        errors = {name: for_code(code) for name, code in response.topic_error_codes if code}
        reasons = {name: one.__name__ for name, one in errors.items() if one is not UnknownTopicOrPartitionError}
        if reasons:
            raise Refused("not deleted", reasons)


@asynccontextmanager
async def connect(connection: Connection) -> AsyncIterator[Admin]:
    """An open connection, closed at the end.

    :raises BrokerUnavailable: nobody answers there, now or before the end.
    :raises BrokerError: an answer that was not expected.
    """
    client = clients.admin(connection, client_id="gpustream-topics", request_timeout_ms=_REQUEST_TIMEOUT_MS)
    try:
        async with asyncio.timeout(_SESSION_TIMEOUT_S):
            # why a broker closes a connection is known when it does so twice, and a command asks only once
            try:
                await client.start()
            except SILENCE:
                if opening.trouble(connection) is not None:
                    raise
                await client.start()
            yield Admin(client, connection)
    except SILENCE as error:
        raise BrokerUnavailable(explain(error, connection)) from error
    except KafkaError as error:
        raise BrokerError(explain(error, connection)) from error
    finally:
        await clients.close(client)
