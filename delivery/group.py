"""A member of a consumer group: joins, reads, commits, and says when it can't go on.

In: the topics to read. Out: their records, on the event loop of the reader; commits.
State: the Kafka client, and what it has shown of the group and of the topics.
On failure: an error that may pass is logged, once a kind, and tried again for as long as it takes. What only another
start can mend ends the process with its reason (:class:`MustRestart`): topics that have other partitions than at the
start, and another process that uses this one's instance id.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from aiokafka.errors import (
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalStateError,
    KafkaError,
    TopicAuthorizationFailedError,
)
from aiokafka.protocol.group import JoinGroupRequest
from aiokafka.structs import OffsetAndMetadata

from delivery import clients, opening
from delivery.assignor import CoPartitioned, claim_of
from delivery.clients import LogThrottle, OffsetClient, close, connect_consumer, to_kafka
from delivery.kafka_errors import describe
from delivery.ledger import Partition
from delivery.settings import MemberSettings
from delivery.topic_admin import command
from delivery.watchdog import RESTART, LoopLateness

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.3
_MANY_RECORDS = 30
"""If so many come between two looks, a fetch waits for more: to fetch each by itself costs more than to work on it."""
_GATHER_BYTES = 1 << 20
_GATHER_MS = 200
_RETRY_S = 0.5
_POSITION_S = 0.1
_LATE_S = 0.05
_DESCRIBE_S = 3.0
_HANGING_S = 60.0
_SILENT_S = 5.0
_METADATA_MS = 20_000
_HEARTBEAT_MS = 1_000
"""So soon a member sees that another one has come or left: until all have seen it, nobody reads."""
_FRESH_MS = 5_000
_NOWHERE = TopicPartition("", -1)
"""No partition of ours: a poll for it gives no records, but raises the errors that the client has."""


class MustRestart(Exception):
    """The process can't go on, and nothing is lost if it is started again: what is not committed is read again.

    The message is the reason.
    """

    exit_code = RESTART


class Member(Protocol):
    """Who reads: a stream's reader or a sink's."""

    async def revoked(self) -> None:
        """The partitions are about to be dealt again: commit what is finished, and let go of them, in bounded time."""

    def assigned(self, tps: set[Partition]) -> None:
        """These are ours now."""


class ConsumerGroup(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """The membership of one process. ``partitions`` is how many each topic has, as was checked at the start.

    ``failed`` is set to :class:`MustRestart` when the process must end; whoever runs the group waits for it.
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
        self._joined = False
        self._fetched = 0
        self._trouble: str | None = None
        self._silent_since_s: float | None = None
        self._log_throttle = LogThrottle()
        self._open: dict[Partition, tuple[int, float]] = {}
        self._seen: set[str] = set()
        self._vanished: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._evicted: asyncio.Task[Any] | None = None

    # -- life

    async def connect(self) -> None:
        """Connect, for as long as that takes; cancel to give up."""
        settings, session_ms = self.settings, int(self.settings.session_timeout_s * 1000)
        await self.offsets.connect()
        self._consumer = await connect_consumer(
            self.connection,
            client_id=self.name,
            group_id=self.name,
            group_instance_id=settings.instance_id,
            partition_assignment_strategy=(self._assignor,),  # one: the first join would offer only the first of two
            session_timeout_ms=session_ms,
            heartbeat_interval_ms=max(min(session_ms // 4, _HEARTBEAT_MS), 250),
            rebalance_timeout_ms=max(session_ms, 30_000),
            max_poll_interval_ms=2**31 - 1,  # not to read, because a receiver is away, is no reason to leave
            max_poll_records=500,  # so many are unpacked at once: it holds up heartbeats
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_GATHER_MS,
            fetch_max_bytes=32 << 20,
            max_partition_fetch_bytes=8 << 20,
            metadata_max_age_ms=_METADATA_MS,  # so soon a partition that is added is seen
        )

    async def committed_offsets(self) -> Mapping[Partition, int | None]:
        """What the group has committed, for each partition that its topics had when this process started."""
        tps = [
            Partition(topic, number)
            for name, topic in self._topics.items()
            for number in range(self._partitions.get(name, 0))
        ]
        while True:
            try:
                return dict(zip(tps, await asyncio.gather(*map(self.committed, tps)), strict=True))
            except KafkaError as error:
                self._complain(error)
                await asyncio.sleep(_RETRY_S)

    async def commit_before_join(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit where the group begins, all or nothing, before it is joined. Raises KafkaError.

        False: it has members, and nothing was committed. The broker takes the commit of a process that is no member
        only if the group has none.
        """
        wanted = {self._theirs(tp): OffsetAndMetadata(offset, "") for tp, offset in offsets.items()}
        try:
            # the public method takes only partitions that are assigned
            await self._consumer._coordinator.commit_offsets(None, wanted)  # noqa: SLF001
        except CommitFailedError:
            return False
        return True

    def join(self) -> None:
        """Become a member; the member is notified of its partitions as they come and go."""
        self._consumer.subscribe(list(self._topics), listener=self)
        watching = (self.watch(), self._require_classic(), self.lateness.watch())
        self._tasks = [asyncio.create_task(one) for one in watching]

    async def close(self) -> None:
        """Leave the group, in bounded time. Whoever reads has let go before."""
        for task in self._tasks:
            task.cancel()
        if self._evicted is not None:
            self._evicted.cancel()
        consumers = [] if self._consumer is None else [self._consumer]
        if self.settings.leave_on_stop and not self.failed.done():  # who failed is started again, and comes back
            for consumer in consumers:
                consumer._coordinator._group_instance_id = None  # noqa: SLF001 - or the client would not leave
        self.failed.cancel()
        await asyncio.gather(self.offsets.close(), *map(close, consumers))

    def not_ready(self) -> list[str]:
        """Why nothing is read, or not all of it; empty when all is well."""
        if self._consumer is None:
            return ["not connected to Kafka"]
        if not self._joined:
            trouble = f": {found}" if (found := self._worst()) else ""
            return [f"not a member of the group {self.name}{trouble}"]
        if missing := [topic for topic in self._topics if not self._consumer.partitions_for_topic(topic)]:
            denied, run = self._denied().intersection(missing), f"run `{command(self.connection)}`"
            absent = [f"there is no topic {topic}: {run}" for topic in missing if topic not in denied]
            return [*absent, *(describe(TopicAuthorizationFailedError(topic)) for topic in sorted(denied))]
        now_s = time.monotonic()
        hanging = [
            f"{self.kafka_name(tp)}: a transaction is open since offset {offset}, for"
            f" {now_s - since_s:.0f} s now, and nothing after it can be read: see `kafka-transactions.sh find-hanging`"
            for tp, (offset, since_s) in sorted(self._open.items())
            if now_s - since_s >= _HANGING_S
        ]
        return [*([found] if (found := self._worst()) else []), *hanging]

    # -- rebalances

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Called by the client, which waits for it before it joins again: nothing is committed any more after this."""
        if not self._joined:
            return
        self._joined = False
        self._open.clear()
        await self._member.revoked()
        if self.settings.instance_id is not None and (other := await self._successor()):
            reason = (
                f"another process has joined the group {self.name} with the instance id"
                f" {self.settings.instance_id}, from {other}: give each process an id of its own"
            )
            self._end(reason)
            self._evicted = asyncio.current_task()
            await asyncio.Event().wait()  # to join again would throw the other one out

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Called by the client, which sends no heartbeats until this returns."""
        self.look(time.monotonic())
        self._joined, self._trouble = True, None
        self._log_throttle = LogThrottle()
        self._member.assigned(self.assignment())

    async def _successor(self) -> str | None:
        """The host of a process that has our instance id in the group and began after us; None if there is none.

        The broker gives a static member's place to whoever comes with its id. The process that had it is unknown to the
        group from then on, and would take the place back.
        """
        mine = self._assignor.claim
        admin = clients.admin(self.connection, client_id=self.name)
        try:
            async with asyncio.timeout(_DESCRIBE_S):
                await admin.start()
                answers = await admin.describe_consumer_groups([self.name])
        except (KafkaError, OSError, TimeoutError) as error:
            log.info("who else is in the group %s is not known: %s", self.name, describe(error))
            return None
        finally:
            await close(admin)
        for *_, members in (row for answer in answers for row in answer.groups):
            for _, _, host, metadata, *_ in members:
                if not metadata:  # there is none in the middle of a rebalance
                    continue
                claim = claim_of(ConsumerProtocolMemberMetadata.decode(metadata).user_data)
                same_id = claim.instance == mine.instance and claim.process != mine.process
                if same_id and (claim.started_ms, claim.process) > (mine.started_ms, mine.process):
                    return str(host)
        return None

    # -- watching

    async def _require_classic(self) -> None:
        """End if no broker offers to join a group by the classic protocol: the client would try for ever."""
        while not self._joined:
            offered = [one._versions for one in self._consumer._client._conns.values()]  # noqa: SLF001
            if any(some and JoinGroupRequest.API_KEY not in some for some in offered):
                self._end(
                    f"this Kafka has switched off the classic protocol of consumer groups, and the group {self.name}"
                    " needs it: docs/how-to/kafka.md says with which Kafkas gpustream works"
                )
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def watch(self) -> None:
        """Poll, whether anything is assigned or not, and look at the topics. Never returns.

        An error of the coordinator holds everything up until the poll that raises it, and only going on answers it.
        """
        while True:
            try:
                await self._consumer.getmany(_NOWHERE, timeout_ms=0)
            except KafkaError as error:
                self._complain(error)
                if isinstance(error, GroupAuthorizationFailedError):  # by itself it sends no heartbeats any more
                    self._consumer._coordinator.request_rejoin()  # noqa: SLF001
                if "Unexpected error during coordination" in str(error):  # the client's task has ended by it
                    self._end(f"no member of the group {self.name} any more: {describe(error)}")
            now_s, silent = time.monotonic(), self._consumer._coordinator.coordinator_id is None  # noqa: SLF001
            self._silent_since_s = (self._silent_since_s or now_s) if silent else None
            self.look(now_s)
            gathered = _GATHER_BYTES if self._fetched >= _MANY_RECORDS else 1
            self._consumer._fetcher._fetch_min_bytes, self._fetched = gathered, 0  # noqa: SLF001 - each fetch looks
            await self.read_new_logs()
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self, now_s: float) -> None:
        """Note which topics have other partitions, have gone or are there again, and where a transaction stays open."""
        for topic in self._topics:
            count = len(self._consumer.partitions_for_topic(topic) or ())
            if not count and topic in self._denied():
                self._complain(TopicAuthorizationFailedError(topic))
            elif not count and topic in self._seen:
                if topic not in self._vanished:
                    log.warning("%s: deleted; waiting for it", topic)
                self._vanished.add(topic)
                self._consumer._client.force_metadata_update()  # noqa: SLF001 - or it may not be seen for 20 s
            if not count:
                continue
            self._seen.add(topic)
            if count != (known := self._partitions.setdefault(topic, count)):
                self._end(
                    f"{topic} has {count} partitions, and had {known} when this process started: which partition a key"
                    " belongs to has changed. Give all topics that are keyed by node the same number"
                )
        for tp in self.assignment() if self._joined else ():
            end, stable = self._consumer.highwater(self._theirs(tp)), self.end(tp)
            if end is None or stable is None or stable >= end:
                self._open.pop(tp, None)
            elif self._is_fresh(tp) and self._open.get(tp, (-1, 0))[0] != stable:
                self._open[tp] = stable, now_s

    async def read_new_logs(self) -> None:
        """Read a topic that was deleted, and is there again, from its beginning.

        The client would go on at its offset in the old log, and pass over what the new one has before that. A broker
        that deletes a topic deletes what was committed of it, so a commit that is still there shows that the topic was
        only out of sight.
        """
        for topic in [topic for topic in self._vanished if self._consumer.partitions_for_topic(topic)]:
            mine = [tp for tp in self.assignment() if tp.topic == self._topics[topic]]
            try:
                async with asyncio.timeout(_DESCRIBE_S):
                    new = [tp for tp in mine if await self.committed(tp) is None]
            except (KafkaError, TimeoutError) as error:
                log.info("%s: whether it is a new log is not known yet: %s", topic, describe(error))
                continue
            if new:
                log.warning("%s: deleted and created again; reading its new log from the beginning", topic)
            for tp in self.assignment().intersection(new):
                self._consumer.seek(self._theirs(tp), 0)
            self._vanished.discard(topic)

    def _denied(self) -> frozenset[str]:
        """The topics that this client may not see, as of the last metadata."""
        return frozenset(self._consumer._client.cluster.unauthorized_topics)  # noqa: SLF001

    def _worst(self) -> str | None:
        """What is wrong with the connections, what the broker said last, or that no broker says anything."""
        since_s = self._silent_since_s
        silent = since_s is not None and time.monotonic() - since_s >= _SILENT_S
        away = f"no Kafka broker answers for the group {self.name} at {self.connection}" if silent else None
        return opening.trouble(self.connection) or self._trouble or away

    def _complain(self, error: Exception) -> None:
        """Say what is wrong, and again each minute until all is well."""
        self._trouble = describe(error)
        if self._log_throttle.is_due(self._trouble):
            log.warning("group %s: %s; trying again", self.name, self._trouble)

    def _end(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(MustRestart(reason))

    # -- reading

    def assignment(self) -> set[Partition]:
        """The partitions that are ours now. A partition that its topic did not have at the start is nobody's."""
        mine = self._consumer.assignment()
        known = (tp for tp in mine if tp.partition < self._partitions.get(tp.topic, tp.partition + 1))
        return {Partition(self._topics[tp.topic], tp.partition) for tp in known}

    def kafka_name(self, tp: Partition) -> str:
        """How an operator finds a partition in Kafka."""
        return f"{self.connection.prefixed(tp.topic)} partition {tp.partition}"

    def _theirs(self, tp: Partition) -> TopicPartition:
        return to_kafka(self.connection, tp)

    def can_fetch(self) -> bool:
        """Whether records may be taken: we are a member, and not in the middle of a rebalance."""
        return self._joined and not self.failed.done()

    async def fetch(
        self, active: Collection[Partition], timeout_s: float, max_records: int | None = None
    ) -> Mapping[Partition, Sequence[Any]]:
        """Records of these partitions, in order; none if none came in time.

        While partitions are dealt the client would wait until they are, and that waits for who reads to let go.
        """
        tps, timeout_ms = [self._theirs(tp) for tp in active], int(timeout_s * 1000)
        try:
            async with asyncio.timeout(timeout_s + _LATE_S):
                records = await self._consumer.getmany(*tps, timeout_ms=timeout_ms, max_records=max_records)
        except TimeoutError:
            return {}
        except KafkaError as error:
            self._complain(error)
            await asyncio.sleep(_RETRY_S)
            return {}
        self._fetched += sum(map(len, records.values()))
        if records and self._joined:
            self._trouble = None
        return {Partition(self._topics[tp.topic], tp.partition): found for tp, found in records.items()}

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read on from these offsets; nothing that was fetched before is given any more. Raises IllegalStateError."""
        for tp, offset in positions.items():
            self._consumer.seek(self._theirs(tp), offset)

    async def positions(self, tps: Iterable[Partition]) -> Mapping[Partition, int]:
        """The next offset that each partition will give, past whatever holds no record; not of those that have none."""
        found: dict[Partition, int] = {}
        try:
            async with asyncio.timeout(_POSITION_S):
                for tp in tps:
                    found[tp] = await self._consumer.position(self._theirs(tp))
        except (KafkaError, AssertionError, TimeoutError):
            pass
        return found

    def end(self, tp: Partition) -> int | None:
        """The offset after the last record that can be read, as of the last fetch."""
        stable: int | None = self._consumer.last_stable_offset(self._theirs(tp))
        if stable is None or stable < 0:  # a broker without transactions
            stable = self._consumer.highwater(self._theirs(tp))
        return stable

    def is_read_to_end(self, tp: Partition, position: int) -> bool:
        """Whether a broker that was asked just now had nothing at or after this offset that can be read."""
        end = self.end(tp)
        return end is not None and position >= end and self._is_fresh(tp)

    def _is_fresh(self, tp: Partition) -> bool:
        """Whether the broker has answered for this partition just now."""
        return bool(time.time() * 1000 - self._consumer.last_poll_timestamp(self._theirs(tp)) <= _FRESH_MS)

    # -- offsets

    async def committed(self, tp: Partition) -> int | None:
        """The group's committed offset."""
        offset: int | None = await self._consumer.committed(self._theirs(tp))
        return offset

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit; False if the group has moved on. Raises KafkaError.

        Before :meth:`Member.revoked` returns, a commit under way must be cancelled and awaited. The broker checks the
        generation at the time of sending, and not whose partition it is: a commit that outlives a rebalance would set
        the new owner back.
        """
        assigned = self._consumer.assignment()
        wanted = {self._theirs(tp): offset for tp, offset in offsets.items()}
        mine = {tp: offset for tp, offset in wanted.items() if tp in assigned}
        try:
            if mine:
                await self._consumer.commit(mine)
        except (CommitFailedError, IllegalStateError):
            return False
        return len(mine) == len(offsets)
