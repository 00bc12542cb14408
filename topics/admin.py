"""A broker's topics and their settings, and nothing else of Kafka's administration.

In: an address. Out: what the broker has, in plain types. On failure: :class:`BrokerUnavailable` where nobody answers,
:class:`SettingsUnknown` where the broker does not say, :class:`Refused` where it says no.

Source: Kafka's protocol for the error codes and for the sources of a setting.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    RequestTimedOutError,
    StaleMetadata,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)

from topics.sender import describe

_REQUEST_TIMEOUT_MS = 10_000
_SESSION_TIMEOUT_S = 60.0
_SET_ON_THE_TOPIC = 1
_UNAUTHORIZED = 29
_SILENCE = (KafkaConnectionError, NodeNotReadyError, RequestTimedOutError, StaleMetadata, OSError, TimeoutError)


class BrokerError(Exception):
    """What is asked of the broker can't be had; the message says why, in one line or one line a mistake."""

    exit_code = 1


class BrokerUnavailable(BrokerError):
    """No broker answers. Try again later."""


class SettingsUnknown(BrokerError):
    """The broker has no topic settings (an embedded one), or this client may not read them."""


class Refused(BrokerError):
    """The broker said no, and will say it again. ``reasons`` are by topic."""

    def __init__(self, what: str, reasons: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{topic}: {what}: {reason}" for topic, reason in reasons.items()))
        self.reasons = dict(reasons)


class Layout(NamedTuple):
    """How many partitions a topic has, and whether each has a leader."""

    partitions: int
    led: bool


class Setting(NamedTuple):
    """A setting's value, and whether it was set on the topic itself."""

    value: str
    own: bool


class Admin:
    """An open connection to a broker's administration; see :func:`connect`."""

    def __init__(self, client: AIOKafkaAdminClient) -> None:
        self._client = client

    async def layouts(self) -> dict[str, Layout]:
        """Every topic that this client may see. All are asked for: to ask for one by name may create it."""
        leaders = {
            topic["topic"]: [one["leader"] for one in topic["partitions"]]
            for topic in await self._client.describe_topics()
        }
        return {name: Layout(len(some), all(one >= 0 for one in some)) for name, some in leaders.items() if some}

    async def settings(self, names: Iterable[str]) -> dict[str, dict[str, Setting]]:
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
        rows = [row for response in responses for row in response.resources]
        return {row[3]: _settings(row) for row in rows if for_code(row[0]) is not UnknownTopicOrPartitionError}

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
        """Set *all* of a topic's own settings: one that is not given goes back to the broker's default.

        :raises Refused: the broker takes one of them not.
        """
        resource = ConfigResource(ConfigResourceType.TOPIC, name, configs=dict(settings))
        rows = [row for response in await self._client.alter_configs([resource]) for row in response.resources]
        reasons = {row[3]: row[1] or for_code(row[0]).__name__ for row in rows if row[0]}
        if reasons:
            raise Refused("settings not altered", reasons)


@asynccontextmanager
async def connect(kafka: str) -> AsyncIterator[Admin]:
    """A connection to ``HOST:PORT[,...]``, closed at the end.

    :raises BrokerUnavailable: nobody answers there, now or before the end.
    :raises BrokerError: an answer that was not expected.
    """
    client = AIOKafkaAdminClient(
        bootstrap_servers=kafka.split(","), client_id="gpustream-topics", request_timeout_ms=_REQUEST_TIMEOUT_MS
    )
    try:
        async with asyncio.timeout(_SESSION_TIMEOUT_S):
            await client.start()
            yield Admin(client)
    except _SILENCE as error:
        raise BrokerUnavailable(f"no Kafka broker answers at {kafka} ({type(error).__name__})") from error
    except KafkaError as error:
        raise BrokerError(f"the Kafka broker at {kafka} can't do that: {describe(error)}") from error
    finally:
        await client.close()


def _settings(row: Any) -> dict[str, Setting]:
    """One resource of a DescribeConfigs response: code, message, type, name, entries."""
    code, message, _, name, entries = row
    if code == _UNAUTHORIZED:
        raise SettingsUnknown(f"this client may not read the settings of {name}")
    if code:
        raise Refused("settings not read", {name: message or for_code(code).__name__})
    return {entry[0]: Setting(entry[1] or "", _is_own(entry)) for entry in entries}


def _is_own(entry: Any) -> bool:
    """Whether a setting was set on the topic: by its source, or, in the oldest version, by not being a default."""
    source = entry[3]
    return not source if isinstance(source, bool) else source == _SET_ON_THE_TOPIC
