"""A member of a group whose topic is deleted and created again reads the new log from its beginning."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition

from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.settings import MemberSettings

TOPIC, OTHER_TOPIC = "gpu.samples", "gpu.workloads"


class Member:
    """Reads nothing."""

    async def revoked(self) -> None:
        """Nothing to finish."""

    def assigned(self, tps: set[Partition]) -> None:
        """Nothing to begin."""


class Client:
    """The part of aiokafka's consumer that the group uses."""

    def __init__(self) -> None:
        self.partitions: dict[str, set[int]] = {TOPIC: {0, 1}, OTHER_TOPIC: {0, 1}}
        self.seeks: dict[TopicPartition, int] = {}
        self.update_requests = 0
        self.offset: int | None = None
        self.listeners: list[Callable[[Any], None]] = []
        self._client, self.cluster = self, self
        self.unauthorized_topics: set[str] = set()
        self.records: dict[TopicPartition, list[Any]] = {}

    def partitions_for_topic(self, topic: str) -> Collection[int] | None:
        return self.partitions.get(topic)

    def topics(self) -> set[str]:
        return set(self.partitions)

    def add_listener(self, listener: Callable[[Any], None]) -> None:
        self.listeners.append(listener)

    def get_metadata(self, *topics: str) -> None:
        """New metadata, which have these topics."""
        self.partitions = {topic: {0, 1} for topic in topics}
        for listener in self.listeners:
            listener(self)

    def subscribe(self, topics: Collection[str], listener: object) -> None:
        """Nothing to do: the assignment is fixed."""

    async def getmany(self, *tps: TopicPartition, **_: object) -> dict[TopicPartition, list[Any]]:
        return {tp: self.records.pop(tp) for tp in tps if tp in self.records}

    async def stop(self) -> None:
        """Nothing to close."""

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(topic, 1) for topic in (TOPIC, OTHER_TOPIC)}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.seeks[tp] = offset

    def force_metadata_update(self) -> None:
        self.update_requests += 1

    async def committed(self, tp: TopicPartition) -> int | None:
        return self.offset


def member() -> tuple[ConsumerGroup, Client]:
    """A member that has a partition of each topic."""
    client: Any = Client()
    settings = MemberSettings(kafka="127.0.0.1:1", group="g")
    group = ConsumerGroup(settings, (TOPIC, OTHER_TOPIC), Member(), {TOPIC: 2, OTHER_TOPIC: 2})
    group._consumer = client
    return group, client


async def test_a_deleted_topic_is_looked_for_and_read_from_its_beginning_when_it_is_back() -> None:
    group, client = member()
    group.check_topics(0.0)
    assert (client.seeks, client.update_requests) == ({}, 0)

    del client.partitions[TOPIC]
    group.check_topics(0.3)
    group.check_topics(0.6)
    assert (client.seeks, client.update_requests) == ({}, 2)

    client.partitions[TOPIC] = {0, 1}
    for now_s in (0.9, 1.2):
        group.check_topics(now_s)
        await group.read_new_logs()
    assert client.seeks == {TopicPartition(TOPIC, 1): 0}
    assert client.update_requests == 2


async def test_a_topic_that_was_only_missing_from_the_metadata_is_read_on() -> None:
    group, client = member()
    client.offset = 42
    present, absent = client.partitions, {OTHER_TOPIC: {0, 1}}
    for client.partitions in (present, absent, present):
        group.check_topics(0.0)
        await group.read_new_logs()
    assert client.seeks == {}


async def test_a_topic_that_was_missing_for_a_moment_is_not_read_before_it_is_known_which_log_it_is() -> None:
    group, client = member()
    samples, workloads = Partition(TOPIC, 1), Partition(OTHER_TOPIC, 1)
    records = [SimpleNamespace(offset=offset, timestamp_type=1) for offset in (7, 8)]
    group.check_topics(0.0)
    group.join()
    try:
        client.get_metadata(OTHER_TOPIC)
        client.get_metadata(TOPIC, OTHER_TOPIC)  # between two looks at the topics
        client.records = {TopicPartition(TOPIC, 1): records[:], TopicPartition(OTHER_TOPIC, 1): records[:]}
        assert await group.fetch({samples, workloads}, 0.0) == {workloads: records}
        await group.read_new_logs()
        assert client.seeks == {TopicPartition(TOPIC, 1): 0}
        assert await group.fetch({samples}, 0.0) == {samples: records}
    finally:
        await group.close()


async def test_records_that_were_fetched_while_their_topic_was_missing_are_read_again_if_the_log_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, client = member()
    samples, records = Partition(TOPIC, 1), [SimpleNamespace(offset=offset, timestamp_type=1) for offset in (7, 8)]
    client.offset = 7
    group.check_topics(0.0)

    async def getmany(*_: TopicPartition, **__: object) -> dict[TopicPartition, list[Any]]:
        for topics in ((OTHER_TOPIC,), (TOPIC, OTHER_TOPIC)):
            client.partitions = {topic: {0, 1} for topic in topics}
            group._topic_watch.note(client)
        return {TopicPartition(TOPIC, 1): records[:]}

    monkeypatch.setattr(client, "getmany", getmany)
    assert [await group.fetch({samples}, 0.0) for _ in range(2)] == [{}, {}]
    await group.read_new_logs()
    assert client.seeks == {TopicPartition(TOPIC, 1): 7}


async def test_a_topic_that_is_back_with_other_partitions_ends_the_process() -> None:
    group, client = member()
    for partitions in ({}, {TOPIC: {0}}):
        client.partitions = {OTHER_TOPIC: {0, 1}, **partitions}
        group.check_topics(0.0)

    assert "has 1 partitions, and had 2" in str(group.failed.exception())


async def test_a_topic_that_is_still_unknown_after_joining_is_not_taken_for_a_deleted_one() -> None:
    group, client = member()
    partitions, client.partitions = client.partitions, {}
    group.check_topics(0.0)
    client.partitions = partitions
    group.check_topics(0.3)
    assert (client.seeks, client.update_requests) == ({}, 0)
