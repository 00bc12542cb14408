"""A member of a consumer group, with a client in memory: its reports, and the errors that end its process."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalStateError,
    InconsistentGroupProtocolError,
    KafkaConnectionError,
    KafkaError,
    OffsetMetadataTooLargeError,
    TopicAuthorizationFailedError,
    UnknownError,
)
from aiokafka.structs import OffsetAndMetadata

from delivery import group as module
from delivery.assignor import CoPartitioned
from delivery.commits import Commits
from delivery.group import ConsumerGroup, MustRestart
from delivery.ledger import Partition
from delivery.settings import MemberSettings
from tests.eventually import eventually

TICKS_0, TICKS_1 = Partition("ticks", 0), Partition("ticks", 1)


class Member:
    """Counts its notifications."""

    def __init__(self) -> None:
        self.revocations = 0
        self.has: list[set[Partition]] = []

    async def revoked(self) -> None:
        self.revocations += 1

    def assigned(self, tps: set[Partition]) -> None:
        self.has.append(tps)


class Client:
    """The Kafka client: an assignment, and the calls that it got."""

    def __init__(self, *assigned: Partition) -> None:
        self.assigned, self.counts = assigned, {"ticks": 2}
        self.errors: list[Exception] = []
        self.committed: dict[TopicPartition, int] = {}
        self.sought: dict[TopicPartition, int] = {}
        self.log_end, self.stable, self.polled = 10, 10, 0
        self.rejoins = 0
        self.coordinator_id: int | None = 1
        self._heartbeat_task: asyncio.Future[Any] | None = None
        self._commit_refresh_task: asyncio.Future[Any] | None = None
        self._conns: dict[int, Any] = {}
        self._client, self.cluster = self, SimpleNamespace(unauthorized_topics=set[str]())
        self.refuses: Exception | None = None
        self.waiting, self.timestamp_type = 0, 1
        self._fetcher = SimpleNamespace(_fetch_min_bytes=1, _records=dict[TopicPartition, Any]())
        self.answered_s: float | None = math.inf

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(*tp) for tp in self.assigned}

    @property
    def _coordinator(self) -> "Client":
        return self

    def request_rejoin(self) -> None:
        """Records the request to join the group again."""
        self.rejoins += 1

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(self.counts.get(topic, 0))) or None

    async def getmany(self, *tps: TopicPartition, timeout_ms: int, max_records: int | None = None) -> Any:
        self.polled += 1
        if self.errors:
            raise self.errors.pop(0)
        await asyncio.sleep(0)
        records = [SimpleNamespace(offset=n, timestamp_type=self.timestamp_type) for n in range(self.waiting)]
        return {tp: records for tp in tps if tp in self.assignment() and self.waiting}

    async def stop(self) -> None:
        """Nothing to close."""

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.committed |= offsets

    async def commit_offsets(self, _: None, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        await self.commit({tp: metadata.offset for tp, metadata in offsets.items()})

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp not in self.assignment():
            raise IllegalStateError(f"{tp} is not assigned")
        self.sought[tp] = offset

    def highwater(self, _: TopicPartition) -> int:
        return self.log_end

    def last_stable_offset(self, _: TopicPartition) -> int:
        return self.stable

    def last_poll_timestamp(self, _: TopicPartition) -> float | None:
        return self.answered_s and min(self.answered_s, time.time()) * 1000


def group_of(client: Client, **settings: Any) -> tuple[ConsumerGroup, Member]:
    """A group and its member, with this client."""
    member = Member()
    membership = MemberSettings(kafka="127.0.0.1:1", group="g", **settings)
    group = ConsumerGroup(membership, ("ticks",), member, dict(client.counts))
    group._consumer, group._commits = client, Commits(client)
    return group, member


# -- commits


async def test_a_commit_has_only_partitions_that_are_still_assigned() -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    assert await group.commit({TICKS_0: 5})
    assert not await group.commit({TICKS_0: 6, TICKS_1: 7})
    assert client.committed == {TopicPartition("ticks", 0): 6}
    client.assigned = ()
    assert not await group.commit({TICKS_0: 8})


@pytest.mark.parametrize("error", [CommitFailedError("the group has already rebalanced"), IllegalStateError("gone")])
async def test_a_commit_after_the_group_has_moved_on_is_no_failure(error: Exception) -> None:
    client = Client(TICKS_0)
    client.refuses = error
    assert not await group_of(client)[0].commit({TICKS_0: 5})


class SlowClient(Client):
    """Answers no commit before ``answers`` is set. ``requests`` are the offsets of each; ``refused`` are those that it
    refuses."""

    def __init__(self, *assigned: Partition) -> None:
        super().__init__(*assigned)
        self.answers, self.requests, self.refused = asyncio.Event(), list[dict[int, int]](), set[int]()

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self.requests.append({tp.partition: offset for tp, offset in offsets.items()})
        await self.answers.wait()
        if self.refused.intersection(offsets.values()):
            raise TopicAuthorizationFailedError("ticks")
        await super().commit(offsets)


NUMBERS = range(5)


async def committing(client: SlowClient) -> list["asyncio.Task[bool]"]:
    """A group's commits of five partitions, of which the first is under way."""
    group, _ = group_of(client)
    commits = [asyncio.create_task(group.commit({Partition("ticks", number): 10 + number})) for number in NUMBERS]
    await eventually(lambda: client.requests)
    return commits


async def test_commits_that_wait_for_another_one_go_together() -> None:
    client = SlowClient(*[Partition("ticks", number) for number in NUMBERS if number != 3])
    commits = await committing(client)
    client.answers.set()
    assert await asyncio.gather(*commits) == [True, True, True, False, True]
    assert client.requests == [{0: 10}, {1: 11, 2: 12, 4: 14}]


async def test_a_commit_that_is_refused_keeps_no_other_from_being_made() -> None:
    client = SlowClient(*[Partition("ticks", number) for number in NUMBERS])
    client.refused = {12}
    commits = await committing(client)
    client.answers.set()
    first, *others = await asyncio.gather(*commits, return_exceptions=True)
    assert first is True
    assert [type(outcome) for outcome in others] == [bool, TopicAuthorizationFailedError, bool, bool]
    assert client.requests == [{0: 10}, {1: 11, 2: 12, 3: 13, 4: 14}, {1: 11}, {2: 12}, {3: 13}, {4: 14}]


async def test_a_commit_that_is_cancelled_is_not_sent_later_and_ends_no_other() -> None:
    client = SlowClient(*[Partition("ticks", number) for number in NUMBERS])
    commits = await committing(client)
    for number in (0, 2):
        commits[number].cancel()
    await eventually(lambda: len(client.requests) == 2)
    commits[1].cancel()  # it has taken the others along
    await eventually(lambda: len(client.requests) == 3)
    client.answers.set()
    assert await asyncio.gather(*commits[3:]) == [True, True]
    assert client.requests == [{0: 10}, {1: 11, 3: 13, 4: 14}, {3: 13, 4: 14}]


async def test_a_commit_that_the_broker_does_not_answer_is_raised() -> None:
    client = Client(TICKS_0)
    client.refuses = KafkaConnectionError("away")
    with pytest.raises(KafkaConnectionError):
        await group_of(client)[0].commit({TICKS_0: 5})


async def test_a_commit_that_fails_is_a_reason_not_to_be_ready_until_one_succeeds() -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    await group.on_partitions_assigned(None)
    client.refuses = OffsetMetadataTooLargeError()
    with pytest.raises(OffsetMetadataTooLargeError):
        await group.commit({TICKS_0: 5})
    assert "not committed: OffsetMetadataTooLargeError" in "".join(group.not_ready())
    client.refuses = None
    assert await group.commit({TICKS_0: 5})
    assert group.not_ready() == []


async def test_a_commit_that_gets_no_answer_is_a_reason_not_to_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    await group.on_partitions_assigned(None)
    monkeypatch.setattr(client, "commit", lambda _: asyncio.Event().wait())
    committing = asyncio.ensure_future(group.commit({TICKS_0: 5}))
    await asyncio.sleep(0)
    assert group.not_ready() == []
    monkeypatch.setattr("delivery.member_health._SILENT_S", 1e-9)
    assert "a commit of the group g has waited 0 s" in "".join(group.not_ready())
    committing.cancel()
    await asyncio.wait([committing])
    assert group.not_ready() == []


async def test_every_position_is_sought_and_a_revoked_partition_is_raised() -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    with pytest.raises(IllegalStateError):
        group.seek({TICKS_0: 0, TICKS_1: 3})
    assert client.sought == {TopicPartition("ticks", 0): 0}


# -- errors of the coordinator


async def test_errors_of_the_coordinator_do_not_stop_the_member_and_each_kind_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "delivery.group")
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    client = Client()
    client.errors = [InconsistentGroupProtocolError() for _ in range(5)] + [GroupAuthorizationFailedError("g")] * 5
    group, _ = group_of(client)
    watching = asyncio.create_task(group.watch())
    await eventually(lambda: client.polled > 11)
    watching.cancel()
    assert len(caplog.messages) == 2
    assert "GroupAuthorizationFailedError" in group.not_ready()[0]
    assert client.rejoins == 0
    assert not group.failed.done()
    await group.on_partitions_assigned(set())
    assert group.not_ready() == []


@pytest.mark.parametrize("name", ["_heartbeat_task", "_commit_refresh_task"])
async def test_a_member_whose_client_has_ended_one_of_its_tasks_joins_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def fail() -> None:
        raise UnknownError

    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    client = Client()
    group, _ = group_of(client)
    setattr(client, name, asyncio.ensure_future(asyncio.Event().wait()))
    watching = asyncio.create_task(group.watch())
    await eventually(lambda: client.polled > 1)
    assert client.rejoins == 0
    getattr(client, name).cancel()
    setattr(client, name, asyncio.ensure_future(fail()))
    await eventually(lambda: client.rejoins > 0)
    watching.cancel()


async def test_a_member_without_brokers_is_unready_until_they_are_back_and_logs_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "delivery.member_health")
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    monkeypatch.setattr("delivery.member_health._SILENT_S", 0.01)
    client = Client()
    group, _ = group_of(client)
    await group.on_partitions_assigned(set())
    watching = asyncio.create_task(group.watch())
    client.coordinator_id = None
    await eventually(lambda: group.not_ready() == ["no Kafka broker answers for the group g at 127.0.0.1:1"])
    silent = "group g: no Kafka broker answers at 127.0.0.1:1; trying again"
    await eventually(lambda: silent in caplog.messages)
    client.coordinator_id = 2
    await eventually(lambda: group.not_ready() == [])
    await eventually(lambda: "group g: a Kafka broker answers again" in caplog.messages)
    watching.cancel()
    assert caplog.messages == [silent, "group g: a Kafka broker answers again"]


async def test_a_client_that_has_given_up_on_the_group_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    client = Client()
    client.errors = [KafkaError("Unexpected error during coordination ValueError()")]
    group, _ = group_of(client)
    watching = asyncio.create_task(group.watch())
    with pytest.raises(MustRestart, match="no member of the group g any more"):
        await asyncio.wait_for(group.failed, 10)
    watching.cancel()


async def test_a_fetch_waits_for_more_after_many_records_and_not_after_a_single_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.0)
    client = Client(TICKS_0)
    group, _ = group_of(client)
    watching = asyncio.create_task(group.watch())

    async def waits_after(records: int) -> bool:
        client.waiting, looks = records, client.polled + 5
        await group.fetch({TICKS_0}, 0.1)
        waited = False
        while client.polled < looks:
            await asyncio.sleep(0)
            waited |= client._fetcher._fetch_min_bytes > 1
        return waited

    assert [await waits_after(records) for records in (1, 200, 2)] == [False, True, False]
    watching.cancel()


async def test_a_fetch_that_fails_returns_nothing_and_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    client = Client(TICKS_0)
    group, _ = group_of(client)
    await group.on_partitions_assigned(set())
    client.errors = [KafkaConnectionError("away")]
    assert await group.fetch({TICKS_0}, 0.1) == {}
    assert "away" in group.not_ready()[0]


async def test_an_error_of_a_fetch_is_past_when_the_broker_answers_though_there_is_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    client = Client(TICKS_0)
    group, _ = group_of(client)
    await group.on_partitions_assigned(set())
    client.answered_s = time.time() - 1
    client.errors = [TopicAuthorizationFailedError("ticks")]
    await group.fetch({TICKS_0}, 0.1)
    await group.fetch({TICKS_0}, 0.1)
    assert "TopicAuthorizationFailedError" in group.not_ready()[0]
    client.answered_s = math.inf
    await group.fetch({TICKS_0}, 0.1)
    assert group.not_ready() == []


# -- partitions that are added


@pytest.mark.parametrize(
    ("timestamp_type", "requests", "warned"),
    [(0, {0, 32}, True), (1, {0, 32}, False), (0, {0}, False)],
    ids=["the writer's", "the broker's", "of a broker without topic settings"],
)
async def test_records_with_the_time_of_their_writer_are_reported_once(
    timestamp_type: int, requests: set[int], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(TICKS_0, TICKS_1)
    client.waiting, client.timestamp_type = 3, timestamp_type
    client._conns = {1: SimpleNamespace(_versions=dict.fromkeys(requests))}
    group, _ = group_of(client)
    for _ in range(2):
        assert len(await group.fetch({TICKS_0, TICKS_1}, 0.1)) == 2
    assert caplog.text.count("message.timestamp.type must be LogAppendTime") == warned


async def test_a_partition_that_is_added_has_no_member_and_ends_the_process_with_70() -> None:
    client = Client(TICKS_0, TICKS_1)
    group, member = group_of(client)
    await group.on_partitions_assigned(set())
    assert not group.failed.done()
    client.counts["ticks"], client.assigned = 3, (TICKS_0, TICKS_1, Partition("ticks", 2))
    await group.on_partitions_assigned(set())
    assert member.has == [{TICKS_0, TICKS_1}, {TICKS_0, TICKS_1}]
    assert not group.can_fetch()
    with pytest.raises(MustRestart, match="ticks has 3 partitions, and had 2") as exit_error:
        group.failed.result()
    assert exit_error.value.exit_code == 70


async def test_committed_offsets_can_be_read_before_the_group_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    group, _ = group_of(Client())
    results: dict[Partition, list[Any]] = {TICKS_0: [KafkaConnectionError("away"), None], TICKS_1: [None, 5]}

    async def committed(tp: Partition) -> int | None:
        answer: int | Exception | None = results[tp].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(group, "committed", committed)
    assert await group.committed_offsets() == {TICKS_0: None, TICKS_1: 5}


async def test_no_first_commit_is_made_for_a_group_that_has_members() -> None:
    client = Client()
    group, _ = group_of(client)
    assert await group.commit_before_join({TICKS_0: 5})
    client.refuses = CommitFailedError()
    assert not await group.commit_before_join({TICKS_0: 7})
    assert client.committed == {TICKS_0: 5}


# -- transactions


async def test_a_transaction_that_stays_open_is_logged_after_a_minute_and_a_moving_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    await group.on_partitions_assigned(set())
    now_s = time.monotonic()
    client.log_end, client.stable = 20, 10
    group.check_topics(now_s - 200)
    client.stable = 12
    group.check_topics(now_s - 61)
    group.check_topics(now_s - 2)
    assert caplog.messages == []
    group.check_topics(now_s - 1)
    group.check_topics(now_s)
    (logged,) = caplog.messages
    assert logged.startswith(f"group {group.name}: ticks partition 0: a transaction is open since offset 12, for 60 s")
    assert group.not_ready() == [
        "ticks partition 0: a transaction is open since offset 12, for 61 s now, and nothing after it can be read:"
        " `gpustream doctor` says how to end it"
    ]
    client.stable = 20
    group.check_topics(now_s)
    assert group.not_ready() == []


@pytest.mark.parametrize("answered_s", [None, 1.0])
async def test_a_partition_for_which_no_broker_answers_is_reported_unless_its_records_wait_for_the_reader(
    answered_s: float | None,
) -> None:
    client = Client(TICKS_0, TICKS_1)
    group, _ = group_of(client)
    await group.on_partitions_assigned(())
    client.answered_s = answered_s
    client._fetcher._records[TopicPartition("ticks", 1)] = object()
    group.check_topics(time.monotonic() - 61)
    assert [reason[:34] for reason in group.not_ready()] == ["ticks partition 0: no answer for 6"]
    client.answered_s = math.inf
    group.check_topics(time.monotonic())
    assert group.not_ready() == []
    client.answered_s = answered_s
    group.check_topics(time.monotonic() - 50)
    assert group.not_ready() == []


async def test_the_end_of_a_log_is_its_last_stable_offset() -> None:
    client = Client(TICKS_0)
    group, _ = group_of(client)
    client.log_end, client.stable = 20, 12
    assert group.end(TICKS_0) == 12
    assert group.is_read_to_end(TICKS_0, 12)
    assert not group.is_read_to_end(TICKS_0, 11)
    client.stable = -1  # a broker that has no transactions
    assert group.end(TICKS_0) == 20


# -- another process with the same instance id


def described(*members: CoPartitioned) -> Any:
    """A group as a broker describes it."""
    encoded = [member.metadata(["ticks"]).encode() for member in members]
    rows = [(f"id-{n}", "client", f"/10.0.0.{n}", metadata, b"") for n, metadata in enumerate(encoded)]
    return [SimpleNamespace(groups=[(0, "g", "Stable", "consumer", "gpustream", rows)])]


class Admin:
    """Describes the group as the test gives it."""

    answers: Any = ()

    def __init__(self, *_: object, **options: object) -> None:
        """Nothing to connect to."""

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def describe_consumer_groups(self, _: list[str]) -> Any:
        return Admin.answers


def later(instance_id: str, by_ms: int) -> CoPartitioned:
    """A process with this instance id that started ``by_ms`` later than this one."""
    member = CoPartitioned(instance_id)
    member.claim = msgspec.structs.replace(member.claim, started_ms=member.claim.started_ms + by_ms)
    return member


async def test_the_older_of_two_with_one_instance_id_ends_and_does_not_join_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delivery.clients.admin", Admin)
    group, member = group_of(Client(TICKS_0), instance_id="worker-3")
    await group.on_partitions_assigned(set())
    Admin.answers = described(later("worker-4", 5), later("worker-3", 5))
    joining = asyncio.create_task(group.on_partitions_revoked(set()))
    with pytest.raises(MustRestart, match=r"instance id worker-3, from /10\.0\.0\.1"):
        await asyncio.wait_for(group.failed, 10)
    assert member.revocations == 1
    assert not joining.done()
    await group.close()
    await asyncio.wait([joining], timeout=10)
    assert joining.cancelled()


@pytest.mark.parametrize("others", [[], [later("worker-3", -60_000)], [later("worker-4", 5)]])
async def test_the_newer_one_and_one_in_an_ordinary_rebalance_go_on(
    monkeypatch: pytest.MonkeyPatch, others: list[CoPartitioned]
) -> None:
    monkeypatch.setattr("delivery.clients.admin", Admin)
    group, _ = group_of(Client(TICKS_0), instance_id="worker-3")
    await group.on_partitions_assigned(set())
    Admin.answers = described(group._assignor, *others)
    await asyncio.wait_for(group.on_partitions_revoked(set()), 10)
    assert not group.failed.done()
