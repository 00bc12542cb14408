"""Reads topics for a sink, as a member of the sink's consumer group: one task for each partition it is assigned.

In: which partitions are ours. Out: an :class:`Assignment` of each, at work.
State: the assignments, and the last ones, so that a partition that comes back unchanged need not be read back.
On failure: the client finds the group again by itself; a partition's own failure ends the sink, and it starts over.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError

from delivery.positions import From
from sinks.assignment import Assignment, Handler
from sinks.dead_letters import Abandoned
from sinks.outcomes import Outcomes
from topics import dead_letters
from topics.check import TopicCheck
from topics.clients import AIOKafkaConsumer

log = logging.getLogger(__name__)

LEAVE_S = 4.0
"""So long may what is under way in a partition take when the partition is taken away."""

_CANCEL_S = 0.5
_CLOSE_S = 2.0
_RETRY_S = 0.5
_MEASURE_S = 1.0
_FETCH_WAIT_MS = 200
_MAX_FETCH = 32 << 20
_MAX_PARTITION_FETCH = 8 << 20
_NEVER_MS = 2**31 - 1
_REBALANCE_MS = 30_000
_METADATA_MS = 30_000


class Source(NamedTuple):
    """A topic that a sink reads, and what makes the handler of one of its partitions, given its number.

    ``from_`` says where a group without offsets starts, ``recall_s`` how much of the log before the first unfinished
    record is read back; ``WHOLE`` is all of it.
    """

    topic: str
    handler: Callable[[int], Handler]
    from_: From
    recall_s: float


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """How a sink is a member of its group; ``instance_id`` makes it a static one."""

    kafka: str
    group: str
    instance_id: str | None = None
    session_timeout_s: float = 10.0


class SinkSettings(Protocol):
    """What the settings of every sink have."""

    @property
    def kafka(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def instance_id(self) -> str | None: ...
    @property
    def session_timeout_s(self) -> float: ...


def membership(settings: SinkSettings) -> ConsumerSettings:
    """How a sink with these settings is a member of its group."""
    return ConsumerSettings(
        kafka=settings.kafka,
        group=settings.group,
        instance_id=settings.instance_id,
        session_timeout_s=settings.session_timeout_s,
    )


class GroupReader:
    """A member of a consumer group."""

    def __init__(self, settings: ConsumerSettings, sources: Sequence[Source], outcomes: Outcomes) -> None:
        self._settings = settings
        self._sources = {source.topic: source for source in sources}
        self._outcomes = outcomes
        self._check = TopicCheck(settings.kafka, (*self._sources, dead_letters.TOPIC.name))
        self._consumer: Any = None
        self._tasks: dict[Assignment, asyncio.Task[None]] = {}
        self._kept: dict[Any, Assignment] = {}
        self._failure: asyncio.Future[None] | None = None
        self._joined = False

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``. Raises what a handler raised, or what the broker refuses us with."""
        self._failure = asyncio.get_running_loop().create_future()
        stopping = asyncio.ensure_future(stop.wait())
        try:
            if await self._check.passed(stop) is None:
                return
            self._consumer = await self._connect(stopping)
            if self._consumer is None:
                return
            self._consumer.subscribe(list(self._sources), listener=_Listener(self))
            while not stopping.done() and not self._failure.done():
                await asyncio.wait((stopping, self._failure), timeout=_MEASURE_S, return_when=asyncio.FIRST_COMPLETED)
                self._outcomes.assigned((assignment.lag() for assignment in self._tasks), of=self)
            if self._failure.done():
                self._failure.result()
        finally:
            stopping.cancel()
            await self._close()

    def not_ready(self) -> list[str]:
        """Why nothing is read; empty when all assigned partitions are."""
        if self._consumer is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        if not self._joined:
            return [f"not a member of the group {self._settings.group}"]
        if missing := [topic for topic in self._sources if not self._consumer.partitions_for_topic(topic)]:
            return [f"there is no topic {topic}: run `gpustream topics create`" for topic in missing]
        return [reason for topic in self._sources for reason in self._opening(topic)]

    async def leave(self) -> None:
        """Let go of all partitions: wait for what is under way, bounded, then cancel it."""
        self._joined = False
        tasks, self._tasks = self._tasks, {}
        for assignment in tasks:
            assignment.abandon.set()
        busy = [task for assignment, task in tasks.items() if assignment.busy]
        if busy:
            await asyncio.wait(busy, timeout=LEAVE_S)
        left = [task for task in tasks.values() if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        for assignment in tasks:
            assignment.close()
        self._kept = {assignment.tp: assignment for assignment in tasks if assignment.next is not None}

    def take(self, assigned: Iterable[Any]) -> None:
        """Start on these partitions."""
        for tp in assigned:
            source = self._sources[tp.topic]
            handler = source.handler(tp.partition)
            assignment = Assignment(self._consumer, tp, handler, self._outcomes, self._kept.get(tp))
            self._tasks[assignment] = asyncio.ensure_future(self._guard(assignment, source))
        self._kept = {}
        self._joined = True

    def _opening(self, topic: str) -> list[str]:
        tps = [assignment.tp for assignment in self._tasks if assignment.next is None]
        partitions = sorted(tp.partition for tp in tps if tp.topic == topic)
        return [f"reading back {topic}, partitions {', '.join(map(str, partitions))}"] if partitions else []

    async def _guard(self, assignment: Assignment, source: Source) -> None:
        try:
            await assignment.run(source.from_, source.recall_s)
        except Abandoned:
            pass
        except (CommitFailedError, IllegalStateError) as error:
            log.info("%s: no longer ours: %s", assignment.tp, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the sink
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)

    async def _connect(self, stopping: "asyncio.Future[Any]") -> Any:
        """A connected consumer, for as long as that takes; None when told to stop first."""
        complained = False
        while not stopping.done():
            consumer = AIOKafkaConsumer(**_options(self._settings))
            starting = asyncio.ensure_future(consumer.start())
            try:
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    return consumer
            except KafkaError as error:
                if not complained:
                    log.warning("%s: %s, trying again", self._settings.kafka, error)
                complained = True
            finally:
                if not starting.done() or starting.cancelled() or starting.exception() is not None:
                    starting.cancel()
                    await _bounded(consumer.stop(), _CLOSE_S)
            await asyncio.wait((stopping,), timeout=_RETRY_S)
        return None

    async def _close(self) -> None:
        await self.leave()
        if self._consumer is not None:
            await _bounded(self._consumer.stop(), _CLOSE_S)
        self._outcomes.assigned((), of=self)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """Of the client: tells the reader what the group decides."""

    def __init__(self, reader: GroupReader) -> None:
        self._reader = reader

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """The group is about to deal out its partitions anew."""
        await self._reader.leave()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """These are ours now."""
        self._reader.take(assigned)


async def _bounded(work: Any, timeout_s: float) -> None:
    """Await a client's clean-up, but not for ever: one whose brokers are away waits for them."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait((task,), timeout=timeout_s)
    if not done:
        task.cancel()
    elif not task.cancelled() and task.exception() is not None:
        log.warning("not closed in good order: %s", task.exception())


def _options(settings: ConsumerSettings) -> dict[str, Any]:
    session_ms = int(settings.session_timeout_s * 1000)
    return {
        "bootstrap_servers": settings.kafka.split(","),
        "client_id": settings.group,
        "group_id": settings.group,
        "group_instance_id": settings.instance_id,
        "session_timeout_ms": session_ms,
        "heartbeat_interval_ms": max(session_ms // 4, 250),
        "rebalance_timeout_ms": max(session_ms, _REBALANCE_MS),
        "max_poll_interval_ms": _NEVER_MS,  # an outage of the receiver is no reason to leave the group
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "fetch_max_wait_ms": _FETCH_WAIT_MS,
        "fetch_max_bytes": _MAX_FETCH,
        "max_partition_fetch_bytes": _MAX_PARTITION_FETCH,
        "metadata_max_age_ms": _METADATA_MS,
    }
