"""A member of a consumer group: joins, reads, commits, and reports when it can't go on.

In: the topics to read. Out: their records, on the event loop of the reader; commits.
State: the Kafka client, and what it has learned about the group and the topics.
On failure: a temporary error is logged, once a kind, and retried for as long as it takes. An error that only a restart
can mend ends the process with its reason (:class:`MustRestart`): the number of partitions of a topic has changed, or
another process uses this one's instance id.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError, KafkaError, TopicAuthorizationFailedError
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.group import JoinGroupRequest
from aiokafka.structs import OffsetAndMetadata

from delivery.assignor import CoPartitioned
from delivery.clients import OffsetClient, close, connect_consumer, to_kafka
from delivery.clock import now_ms
from delivery.commits import Commits
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.member_health import MemberHealth, evicted_by
from delivery.settings import MemberSettings
from delivery.topic_admin import command
from delivery.topic_watch import PartitionWatch, TopicWatch
from delivery.watchdog import RESTART, LoopLateness

log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.3
_MANY_RECORDS = 30
"""If so many records come within _WATCH_EVERY_S, a fetch waits for more: fetching them singly costs too much CPU."""
_MIN_FETCH_BYTES = 1 << 20
_MAX_FETCH_WAIT_MS = 200
_RETRY_S = 0.5
_POSITION_TIMEOUT_S = 0.1
_FETCH_GRACE_S = 0.05
_DESCRIBE_TIMEOUT_S = 3.0
_METADATA_MS = 20_000
_HEARTBEAT_MS = 1_000
"""A member notices a rebalance at a heartbeat, and nobody reads until all members have noticed it."""
_FRESH_MS = 5_000
_CREATE_TIME = 0  # the type of a record's time if it is that of its writer, and not of the broker
_NO_PARTITION = TopicPartition("", -1)
"""A poll for it gives no records, but raises the client's pending errors."""


class MustRestart(Exception):
    """The process must be started again; the message is the reason. What is not committed is read again."""

    exit_code = RESTART


class Member(Protocol):
    """The reader of a stream or a sink, which the group notifies of rebalances."""

    async def revoked(self) -> None:
        """A rebalance begins: commit what is finished and let go of all partitions, in bounded time."""

    def assigned(self, tps: set[Partition]) -> None:
        """A rebalance has ended, and these partitions are assigned to this process."""


class ConsumerGroup(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """The membership of one process in a consumer group.

    ``partitions`` is the number of partitions of each topic at the start. ``failed`` raises :class:`MustRestart` when
    the process must end; whoever runs the group waits for it.
    """

    def __init__(
        self, settings: MemberSettings, topics: Collection[str], member: Member, partitions: Mapping[str, int]
    ) -> None:
        self.settings, self.connection = settings, settings.connection()
        self.name = self.connection.prefixed(settings.group)
        self._topics = {self.connection.prefixed(topic): topic for topic in topics}
        self.offsets = OffsetClient(self.connection, client_id=self.name)
        self.lateness = LoopLateness()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._member = member
        self._partitions = {self.connection.prefixed(topic): count for topic, count in partitions.items()}
        self._assignor = CoPartitioned(settings.instance_id)
        self._consumer: Any = None
        self._commits: Commits
        self._joined = False
        self._fetched = 0
        self._health = MemberHealth(self.name, self.connection)
        self._topic_watch, self._partition_watch = TopicWatch(self._topics), PartitionWatch()
        self._tasks: list[asyncio.Task[None]] = []
        self._evicted: asyncio.Task[Any] | None = None

    # -- start and stop

    async def connect(self) -> None:
        """Connect, for as long as that takes; cancel to give up."""
        settings, session_ms = self.settings, int(self.settings.session_timeout_s * 1000)
        await self.offsets.connect()
        self._consumer = await connect_consumer(
            self.connection,
            client_id=self.name,
            group_id=self.name,
            group_instance_id=settings.instance_id,
            partition_assignment_strategy=(self._assignor,),  # only one: of two, the first join would offer only one
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=max(min(session_ms // 4, _HEARTBEAT_MS), 250),
            rebalance_timeout_ms=max(session_ms, 30_000),
            max_poll_interval_ms=2**31 - 1,  # a sink that waits for its receiver stays in the group
            max_poll_records=500,  # unpacking more at once would delay heartbeats
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_MAX_FETCH_WAIT_MS,
            fetch_max_bytes=32 << 20,
            max_partition_fetch_bytes=8 << 20,
            metadata_max_age_ms=_METADATA_MS,  # after this time a new partition is noticed
        )
        self._commits = Commits(self._consumer)

    async def committed_offsets(self) -> Mapping[Partition, int | None]:
        """The group's committed offset of each partition that its topics had at the start; None if there is none."""
        tps = [
            Partition(topic, number)
            for name, topic in self._topics.items()
            for number in range(self._partitions.get(name, 0))
        ]
        while True:
            try:
                return dict(zip(tps, await asyncio.gather(*map(self.committed, tps)), strict=True))
            except KafkaError as error:
                self._health.report(error)
                await asyncio.sleep(_RETRY_S)

    async def commit_before_join(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit where the group begins, all or nothing, before it is joined. Raises KafkaError.

        False: nothing was committed, because the group has members. The broker accepts the commit of a process that is
        no member only if the group is empty.
        """
        commits = {self._to_kafka(tp): OffsetAndMetadata(offset, "") for tp, offset in offsets.items()}
        try:
            # the public method takes only partitions that are assigned
            await self._consumer._coordinator.commit_offsets(None, commits)  # noqa: SLF001
        except CommitFailedError:
            return False
        return True

    def join(self) -> None:
        """Become a member; the member is notified of its partitions as they come and go."""
        self._consumer.subscribe(list(self._topics), listener=self)
        self._consumer._client.cluster.add_listener(self._topic_watch.note)  # noqa: SLF001 - no public way
        loops = (self.watch(), self._require_classic_protocol(), self.lateness.watch())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """Leave the group, in bounded time. The member has let go of its partitions before."""
        for task in self._tasks:
            task.cancel()
        if self._evicted is not None:
            self._evicted.cancel()
        is_leaving = self.settings.leave_on_stop and not self.failed.done()  # a failed process is restarted at once
        if is_leaving and self._consumer is not None:
            self._consumer._coordinator._group_instance_id = None  # noqa: SLF001 - or the client would not leave
        self.failed.cancel()
        await asyncio.gather(self.offsets.close(), close(self._consumer))

    def not_ready(self) -> list[str]:
        """The reasons why nothing is read, or not everything; empty if there is none."""
        if self._consumer is None:
            return ["not connected to Kafka"]
        if not self._joined:
            suffix = f": {problem}" if (problem := self._health.problem()) else ""
            return [f"not a member of the group {self.name}{suffix}"]
        if missing := [topic for topic in self._topics if not self._consumer.partitions_for_topic(topic)]:
            denied, run = self._unauthorized_topics().intersection(missing), f"run `{command(self.connection)}`"
            absent = [f"there is no topic {topic}: {run}" for topic in missing if topic not in denied]
            return [*absent, *(describe(TopicAuthorizationFailedError(topic)) for topic in sorted(denied))]
        problem = self._health.problem()
        return [*([problem] if problem else []), *self._partition_watch.problems(self.kafka_name, time.monotonic())]

    # -- rebalances

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Called by the client before it joins again; it waits until this returns. Nothing is committed after that."""
        if not self._joined:
            return
        self._joined = False
        self._partition_watch.clear()
        await self._member.revoked()
        if host := await evicted_by(self._assignor.claim, self.name, self.connection):
            self._fail(
                f"another process has joined the group {self.name} with the instance id"
                f" {self.settings.instance_id}, from {host}: give each process an id of its own"
            )
            self._evicted = asyncio.current_task()
            await asyncio.Event().wait()  # joining again would evict the other process

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Called by the client, which sends no heartbeats until this returns."""
        self.check_topics(time.monotonic())
        self._joined = True
        self._health.joined()
        self._member.assigned(self.assignment())

    # -- watching

    async def _require_classic_protocol(self) -> None:
        """Fail if a broker does not offer the classic protocol of groups: the client would try to join for ever."""
        while not self._joined:
            if any(versions and JoinGroupRequest.API_KEY not in versions for versions in self._api_versions()):
                self._fail(
                    f"this Kafka has switched off the classic protocol of consumer groups, and the group {self.name}"
                    " needs it: docs/how-to/kafka.md says with which Kafkas gpustream works"
                )
                return
            await asyncio.sleep(_WATCH_EVERY_S)

    async def watch(self) -> None:
        """Poll, whether anything is assigned or not, and check the topics. Never returns.

        An error of the coordinator blocks the client until a poll raises it; polling again is the only answer to it. It
        may also have ended the client's task that sends heartbeats, or the one that reads commits.
        """
        while True:
            try:
                await self._consumer.getmany(_NO_PARTITION, timeout_ms=0)
            except KafkaError as error:
                self._health.report(error)
                if "Unexpected error during coordination" in str(error):  # it has ended the client's task
                    self._fail(f"no member of the group {self.name} any more: {describe(error)}")
            coordinator = self._consumer._coordinator  # noqa: SLF001 - no public way
            for task in (coordinator._heartbeat_task, coordinator._commit_refresh_task):  # noqa: SLF001 - likewise
                if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                    coordinator.request_rejoin()  # only a join starts it again
            now_s = time.monotonic()
            self._health.note_coordinator(now_s, known=coordinator.coordinator_id is not None)
            self.check_topics(now_s)
            min_bytes = _MIN_FETCH_BYTES if self._fetched >= _MANY_RECORDS else 1
            self._consumer._fetcher._fetch_min_bytes, self._fetched = min_bytes, 0  # noqa: SLF001 - no public setter
            await self.read_new_logs()
            await asyncio.sleep(_WATCH_EVERY_S)

    def check_topics(self, now_s: float) -> None:
        """Note which topics have other partitions or are missing, and what is wrong with assigned partitions."""
        for topic in self._topics:
            count = len(self._consumer.partitions_for_topic(topic) or ())
            if not count and topic in self._unauthorized_topics():
                self._health.report(TopicAuthorizationFailedError(topic))
            elif not count and topic in self._topic_watch.seen:
                self._topic_watch.note(self._consumer._client.cluster)  # noqa: SLF001 - no public way
                self._consumer._client.force_metadata_update()  # noqa: SLF001 - or its return is noticed up to 20 s later
            if not count:
                continue
            self._topic_watch.seen.add(topic)
            if count != (expected := self._partitions.setdefault(topic, count)):
                self._fail(
                    f"{topic} has {count} partitions, and had {expected} when this process started: which partition a"
                    " key belongs to has changed. Give all topics that are keyed by node the same number"
                )
        for tp in self.assignment() if self._joined else ():
            fetched = self._to_kafka(tp) in self._consumer._fetcher._records  # noqa: SLF001 - no public way
            end, stable = self._consumer.highwater(self._to_kafka(tp)), self.end(tp)
            answered = self._is_fresh(tp)
            self._partition_watch.note(tp, now_s, answered=answered, fetched=fetched, stable=stable, end=end)
        problems = self._partition_watch.problems(self.kafka_name, now_s)
        if problems and self._health.throttle.is_due("partitions"):
            log.warning("group %s: %s", self.name, "; ".join(problems))

    async def read_new_logs(self) -> None:
        """Read a topic that was deleted and created again from its beginning.

        A broker that deletes a topic deletes its committed offsets too. So if a commit is still there, the topic was
        only invisible for a while.
        """
        for topic in [topic for topic in self._topic_watch.missing if self._consumer.partitions_for_topic(topic)]:
            tps = [tp for tp in self.assignment() if tp.topic == self._topics[topic]]
            try:
                async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                    new = [tp for tp in tps if await self.committed(tp) is None]
            except (KafkaError, TimeoutError) as error:
                log.info("%s: whether it is a new log is not known yet: %s", topic, describe(error))
                continue
            if new:
                log.warning("%s: deleted and created again; reading its new log from the beginning", topic)
            for tp in self.assignment().intersection(new):
                self._consumer.seek(self._to_kafka(tp), 0)
            self._topic_watch.missing.discard(topic)

    def _warn_of_times(self, records: Mapping[TopicPartition, Sequence[Any]]) -> None:
        """Warn if records have the time of their writer. This also shows it to a client without the right to read topic
        settings."""
        for tp, batch in records.items():
            if batch[-1].timestamp_type != _CREATE_TIME:
                continue
            if not any(DescribeConfigsRequest.API_KEY in (versions or ()) for versions in self._api_versions()):
                return  # an embedded broker, which has no topic settings
            if self._health.throttle.is_due(f"{tp.topic}: times"):
                log.warning(
                    "%s partition %d: offset %d has the time of its writer's clock, and records are joined by the"
                    " broker's: message.timestamp.type must be LogAppendTime: run `%s`",
                    *(tp.topic, tp.partition, batch[-1].offset, command(self.connection)),
                )

    def _api_versions(self) -> list[Mapping[int, Any] | None]:
        return [conn._versions for conn in self._consumer._client._conns.values()]  # noqa: SLF001

    def _unauthorized_topics(self) -> frozenset[str]:
        """The topics that this client may not see, as of the last metadata."""
        return frozenset(self._consumer._client.cluster.unauthorized_topics)  # noqa: SLF001

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(MustRestart(reason))

    # -- reading

    def assignment(self) -> set[Partition]:
        """The partitions that are assigned to this process, without those added to a topic since the start."""
        assigned = self._consumer.assignment()
        usable = (tp for tp in assigned if tp.partition < self._partitions.get(tp.topic, tp.partition + 1))
        return {Partition(self._topics[tp.topic], tp.partition) for tp in usable}

    def kafka_name(self, tp: Partition) -> str:
        """The partition by its name in Kafka, for logs."""
        return f"{self.connection.prefixed(tp.topic)} partition {tp.partition}"

    def _to_kafka(self, tp: Partition) -> TopicPartition:
        return to_kafka(self.connection, tp)

    def can_fetch(self) -> bool:
        """Whether records may be fetched: this process is a member, and no rebalance is under way."""
        return self._joined and not self.failed.done()

    async def fetch(
        self, active: Collection[Partition], timeout_s: float, max_records: int | None = None
    ) -> Mapping[Partition, Sequence[Any]]:
        """Records of these partitions, in order; none if none came within ``timeout_s``.

        The timeout is our own: during a rebalance the client would wait for its end, which waits for the reader. A
        topic that was missing is not read until :meth:`read_new_logs` has found out which log it is.
        """
        tps = [tp for tp in map(self._to_kafka, active) if tp.topic not in self._topic_watch.missing]
        if not tps:
            await asyncio.sleep(timeout_s)
            return {}
        try:
            async with asyncio.timeout(timeout_s + _FETCH_GRACE_S):
                records = await self._consumer.getmany(*tps, timeout_ms=int(timeout_s * 1000), max_records=max_records)
            for tp in [tp for tp in records if tp.topic in self._topic_watch.missing]:
                self._consumer.seek(tp, records.pop(tp)[0].offset)
        except TimeoutError:
            return {}
        except KafkaError as error:
            self._health.report(error)
            await asyncio.sleep(_RETRY_S)
            return {}
        self._fetched += sum(map(len, records.values()))
        self._warn_of_times(records)
        if self._joined and (failed_ms := self._health.failed_ms) is not None:
            assigned = self._consumer.assignment()
            if records or all(self._has_answered_since(tp, failed_ms) for tp in tps if tp in assigned):
                self._health.passed()
        return {Partition(self._topics[tp.topic], tp.partition): batch for tp, batch in records.items()}

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read on from these offsets, and drop what was fetched before. Raises IllegalStateError."""
        for tp, offset in positions.items():
            self._consumer.seek(self._to_kafka(tp), offset)

    async def positions(self, tps: Iterable[Partition]) -> Mapping[Partition, int]:
        """The next offset to read of each partition; those without a position are left out."""
        positions: dict[Partition, int] = {}
        with contextlib.suppress(KafkaError, AssertionError, TimeoutError):
            async with asyncio.timeout(_POSITION_TIMEOUT_S):
                for tp in tps:
                    positions[tp] = await self._consumer.position(self._to_kafka(tp))
        return positions

    def end(self, tp: Partition) -> int | None:
        """The offset after the last record that can be read, as of the last fetch."""
        stable: int | None = self._consumer.last_stable_offset(self._to_kafka(tp))
        if stable is None or stable < 0:  # a broker without transactions
            stable = self._consumer.highwater(self._to_kafka(tp))
        return stable

    def is_read_to_end(self, tp: Partition, position: int) -> bool:
        """Whether the broker, as of a few seconds ago, had no readable record at or after this offset."""
        end = self.end(tp)
        return end is not None and position >= end and self._is_fresh(tp)

    def _is_fresh(self, tp: Partition) -> bool:
        """Whether the broker has answered for this partition in the last few seconds."""
        return self._has_answered_since(self._to_kafka(tp), now_ms() - _FRESH_MS)

    def _has_answered_since(self, tp: TopicPartition, time_ms: float) -> bool:
        """Whether the broker has answered a fetch of this partition at that time or later, other than by an error."""
        answered_ms: int | None = self._consumer.last_poll_timestamp(tp)
        return answered_ms is not None and answered_ms >= time_ms

    # -- offsets

    async def committed(self, tp: Partition) -> int | None:
        """The group's committed offset."""
        offset: int | None = await self._consumer.committed(self._to_kafka(tp))
        return offset

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit these offsets; False if some of the partitions are not assigned to this process any more.

        Raises KafkaError. Before :meth:`Member.revoked` returns, a commit under way must be cancelled and awaited. The
        broker checks the generation at the time of sending, and not who owns the partition: a commit that outlives a
        rebalance would set the new owner back.
        """
        with self._health.committing():
            return await self._commits.commit({self._to_kafka(tp): offset for tp, offset in offsets.items()})
