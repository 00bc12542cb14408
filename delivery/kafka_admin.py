"""Kafka's administration: topics and their settings, consumer groups, ACLs, and the brokers' disks.

In: a connection. Out: descriptions in plain types. On failure: :class:`BrokerUnavailable` if no broker answers,
:class:`SettingsUnknown` if the broker does not give topic settings, :class:`Refused` if it refuses.

Source: Kafka's protocol for the error codes.
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
    InvalidReplicationFactorError,
    KafkaError,
    LeaderNotAvailableError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.admin import DescribeAclsRequest
from aiokafka.protocol.commit import OffsetFetchRequest

from delivery import clients, opening
from delivery.clients import SILENCE, explain
from delivery.connection import Connection
from delivery.kafka_requests import DescribeLogDirs, DescribeTopics, IncrementalAlterConfigs
from delivery.ledger import Partition
from delivery.values import Address

_REQUEST_TIMEOUT_MS = 10_000
_SESSION_TIMEOUT_S = 60.0
_UNAUTHORIZED = 29
_NO_ERROR = 0
_MAY_BE_MISSING = (_NO_ERROR, UnknownTopicOrPartitionError.errno, LeaderNotAvailableError.errno)  # a new one has none
_RIGHTS_UNKNOWN = -(2**31)

_ANY, _PREFIXED, _ALLOW = 1, 4, 3
_RESOURCES = {2: "Topic", 3: "Group"}
_OPERATIONS = {2: "All", 3: "Read", 4: "Write", 5: "Create", 8: "Describe", 10: "DescribeConfigs", 11: "AlterConfigs"}
"""The names of resource types and operations of ACLs, by Kafka's codes."""

RIGHTS = {code: _OPERATIONS[code] for code in (3, 4, 8)}
"""The operations on a topic that components need. Each of the first two implies the third."""


class BrokerError(Exception):
    """A request to the broker failed; the message says why, one line for each reason."""

    exit_code = 1


class BrokerUnavailable(BrokerError):
    """No broker answers. Try again later."""


class SettingsUnknown(BrokerError):
    """The broker has no topic settings (an embedded one has none), or this client may not read them."""


class Refused(BrokerError):
    """The broker refused a change, and would refuse it again; ``reasons`` are by topic."""

    def __init__(self, outcome: str, reasons: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{topic}: {outcome}: {reason}" for topic, reason in reasons.items()))


class TopicDescription(NamedTuple):
    """A topic as the broker describes it. ``settings`` is None if they are not known.

    ``leaderless`` are the partitions without a leader, ``in_sync`` is the number of in-sync replicas of each partition,
    and ``replicas`` that of all replicas, of the partition that has the fewest. ``allowed`` has the operations that
    this client may do, or is None if they are not known. Of a topic that this client may not describe, only ``allowed``
    is set.
    """

    partitions: int
    settings: Mapping[str, str] | None = None
    leaderless: tuple[int, ...] = ()
    in_sync: Mapping[int, int] = {}
    allowed: frozenset[str] | None = None
    replicas: int = 0


class GroupDescription(NamedTuple):
    """A consumer group: its state in Kafka's words, the number of its members, and its committed offsets."""

    name: str
    state: str
    members: int
    committed: Mapping[Partition, int]


class Acl(NamedTuple):
    """One ACL, in Kafka's words; ``name`` ends in ``*`` if it is a prefix. ``allowed`` is False if it denies."""

    principal: str
    operation: str
    resource: str
    name: str
    allowed: bool


class Disk(NamedTuple):
    """A log directory of a broker, its sizes in bytes; ``error`` is why the broker can't use it."""

    broker: int
    path: str
    total: int
    usable: int
    error: str = ""


class Admin:
    """An open connection to a broker's administration; see :func:`connect`."""

    def __init__(self, client: Any, connection: Connection) -> None:
        self._client, self._connection = client, connection

    async def layouts(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        """The descriptions of those topics that exist, as far as this client may see them. Raises KafkaError."""
        try:
            rows = (await self._client._send_request(DescribeTopics(names))).topics  # noqa: SLF001
        except NotImplementedError:  # the broker is older than Kafka 2.3
            rows = []
            for topic in await self._client.describe_topics(list(names)):
                partitions = [tuple(partition.values()) for partition in topic["partitions"]]
                rows.append((topic["error_code"], topic["topic"], False, partitions, _RIGHTS_UNKNOWN))
        descriptions = {}
        for code, name, _, partitions, bits in rows:
            if code == _UNAUTHORIZED:
                descriptions[name] = TopicDescription(0, allowed=frozenset())
            elif code not in _MAY_BE_MISSING:
                raise for_code(code)(name)
            elif partitions:
                allowed = frozenset(right for bit, right in RIGHTS.items() if bits >> bit & 1)
                leaderless = tuple(sorted(number for _, number, leader, *_ in partitions if leader < 0))
                description = TopicDescription(len(partitions), leaderless=leaderless)
                if bits != _RIGHTS_UNKNOWN:
                    in_sync = {number: len(isr) for _, number, _, _, _, isr, _ in partitions}
                    replicas = min(len(brokers) for _, _, _, _, brokers, _, _ in partitions)
                    description = description._replace(in_sync=in_sync, allowed=allowed, replicas=replicas)
                descriptions[name] = description
        return descriptions

    async def brokers(self) -> dict[int, str]:
        """The addresses ``HOST:PORT`` of the brokers that are up, by their ids."""
        rows = (await self._client._send_request(DescribeTopics([]))).brokers  # noqa: SLF001
        return {broker_id: str(Address(host, port)) for broker_id, host, port, _ in rows}

    async def names(self) -> list[str]:
        """The names in Kafka of the topics that this client may see."""
        names: list[str] = await self._client.list_topics()
        return names

    async def disks(self, brokers: Iterable[int]) -> list[Disk]:
        """The log directories of these brokers; none without the right, or if a broker is older than Kafka 3.3."""
        disks: list[Disk] = []
        for broker in brokers:
            try:
                response = await self._client._send_request_to_node(broker, DescribeLogDirs())  # noqa: SLF001
            except (IncompatibleBrokerVersion, NotImplementedError):
                return []
            disks += [
                Disk(broker, path, total, usable, for_code(code).__name__ if code else "")
                for code, path, _, total, usable, _ in response.results
            ]
        return disks

    async def acls(self) -> list[Acl] | None:
        """The ACLs of topics and groups; None without the right to list them, or if there is no authorizer."""
        all_acls = DescribeAclsRequest(_ANY, None, _ANY, None, None, _ANY, _ANY)
        try:
            response = await self._client._send_request(all_acls)  # noqa: SLF001
        except (IncompatibleBrokerVersion, NotImplementedError):
            return None
        if response.error_code:
            return None
        acls = []
        for kind, name, pattern, rows in response.resources:
            shown_name = name + "*" if pattern == _PREFIXED else name
            for principal, _, operation, permission in rows if kind in _RESOURCES else ():
                operation_name = _OPERATIONS.get(operation, "")
                acls.append(Acl(principal, operation_name, _RESOURCES[kind], shown_name, permission == _ALLOW))
        return acls

    async def hidden_groups(self, names: Iterable[str]) -> list[str]:
        """Those of these groups that this client may not describe."""
        hidden = []
        for name in names:
            try:
                (response,) = await self._client.describe_consumer_groups([self._connection.prefixed(name)])
                is_hidden = response.groups[0][0] == GroupAuthorizationFailedError.errno
            except GroupAuthorizationFailedError:
                is_hidden = True
            except GroupCoordinatorNotAvailableError:  # this Kafka has never had a group
                is_hidden = False
            if is_hidden:
                hidden.append(name)
        return hidden

    async def settings(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The settings in force of topics that exist.

        :raises SettingsUnknown: the broker has none, or this client may not read them.
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
        """Create topics; returns the names of those that did not exist before.

        :raises BrokerUnavailable: some could not be created now, as while a controller is elected; others may be.
        :raises Refused: some could not be created; the others were.
        """
        response = await self._client.create_topics(list(topics))
        errors = {row[0]: (for_code(row[1]), row[2]) for row in response.topic_errors if row[1]}
        await self._raise_temporary("not created", errors)
        existing = [name for name, (error, _) in errors.items() if error is TopicAlreadyExistsError]
        reasons = {name: text or error.__name__ for name, (error, text) in errors.items() if name not in existing}
        for name, reason in reasons.items():
            if errors[name][0] is InvalidReplicationFactorError:
                reasons[name] = f"{reason.rstrip('.')}: give a --replication-factor that the brokers are enough for"
        if reasons:
            raise Refused("not created", reasons)
        return [row[0] for row in response.topic_errors if row[0] not in existing]

    async def alter(self, name: str, settings: Mapping[str, str]) -> None:
        """Set some of a topic's settings; the others stay as they are.

        :raises BrokerUnavailable: they could not be set now, as while a controller is elected.
        :raises Refused: the broker does not take one of them.
        """
        response = await self._client._send_request(IncrementalAlterConfigs(name, settings))  # noqa: SLF001
        errors = {row[3]: (for_code(row[0]), row[1]) for row in response.resources if row[0]}
        await self._raise_temporary("settings not altered", errors)
        if errors:
            reasons = {topic: text or error.__name__ for topic, (error, text) in errors.items()}
            raise Refused("settings not altered", reasons)

    async def _raise_temporary(self, outcome: str, errors: Mapping[str, tuple[type[KafkaError], str]]) -> None:
        """Raise BrokerUnavailable if the same request may succeed later, perhaps when another controller is asked."""
        temporary = [f"{name}: {outcome}: {error.__name__}" for name, (error, _) in errors.items() if error.retriable]
        if temporary:
            await self._client._client.force_metadata_update()  # noqa: SLF001 - or the old controller is asked again
            raise BrokerUnavailable("\n".join(temporary))

    async def groups(self, prefix: str) -> list[GroupDescription]:
        """The consumer groups of this connection whose names begin with ``prefix`` and that this client may see.

        They are described one by one: aiokafka 0.14 can decode only the first group of a response.
        """
        listed = await self._client.list_consumer_groups()
        groups, full_prefix = [], self._connection.prefixed(prefix)
        for name in sorted(row[0] for row in listed if row[0].startswith(full_prefix)):
            coordinator = await self._client.find_coordinator(name)
            (response,) = await self._client.describe_consumer_groups([name], coordinator)
            (code, _, state, _, _, members, *_) = response.groups[0]
            # aiokafka's own method for this takes an error of the group for a group without offsets
            fetched = await self._client._send_request(OffsetFetchRequest(name, None), coordinator)  # noqa: SLF001
            if code or fetched.error_code:
                raise for_code(code or fetched.error_code)(name)
            committed = {
                clients.from_kafka(self._connection, TopicPartition(topic, partition)): offset
                for topic, partitions in fetched.topics
                for partition, offset, *_ in partitions
                if offset >= 0
            }
            groups.append(GroupDescription(self._connection.unprefixed(name), state, len(members), committed))
        return groups

    async def is_empty(self, name: str, partitions: int) -> bool:
        """Whether a topic holds no record at this moment."""
        # the records of an open transaction count, too
        consumer = clients.consumer(self._connection, isolation_level="read_uncommitted")
        await consumer.start()
        try:
            tps = [TopicPartition(name, number) for number in range(partitions)]
            return bool(await consumer.beginning_offsets(tps) == await consumer.end_offsets(tps))
        finally:
            await clients.close(consumer)

    async def delete(self, names: Iterable[str]) -> None:
        """Delete topics with all their records. A topic that does not exist is ignored.

        :raises Refused: some could not be deleted; the others were.
        """
        response = await self._client.delete_topics(list(names))
        errors = {name: for_code(code) for name, code in response.topic_error_codes if code}
        reasons = {name: error.__name__ for name, error in errors.items() if error is not UnknownTopicOrPartitionError}
        if reasons:
            raise Refused("not deleted", reasons)


@asynccontextmanager
async def connect(connection: Connection) -> AsyncIterator[Admin]:
    """An open admin connection, closed at the end of the ``async with`` block.

    :raises BrokerUnavailable: no broker answers, at the start or during the block.
    :raises BrokerError: an unexpected answer.
    """
    client = clients.admin(connection, client_id="gpustream-topics", request_timeout_ms=_REQUEST_TIMEOUT_MS)
    try:
        async with asyncio.timeout(_SESSION_TIMEOUT_S):
            # the reason of a closed connection is known only when it is closed twice: so a command tries twice
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
