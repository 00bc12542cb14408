"""Reads topics for a sink, as a member of the sink's consumer group: one task for each partition it is assigned.

In: which partitions are ours. Out: an :class:`Assignment` of each, at work.
State: the assignments, and the last ones, so that a partition that comes back unchanged need not be read back.
On failure: the group is found again by itself; a partition's own failure ends the sink, and it starts over.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from aiokafka.errors import IllegalStateError

from delivery.dead_letters import Abandoned
from delivery.group import ConsumerGroup
from delivery.ledger import Partition
from delivery.positions import From
from delivery.settings import MemberSettings
from delivery.topic_admin import TopicCheck
from sinks.assignment import Assignment, Handler
from sinks.outcomes import Outcomes
from topics import dead_letters

log = logging.getLogger(__name__)

LEAVE_S = 4.0
"""So long may what is under way in a partition take when the partition is taken away."""

_CANCEL_S = 0.5
_MEASURE_S = 1.0


class Source(NamedTuple):
    """A topic that a sink reads, and what makes the handler of one of its partitions, given its number.

    ``from_`` says where a group without offsets starts, ``recall_s`` how much of the log before the first unfinished
    record is read back; ``WHOLE`` is all of it.
    """

    topic: str
    handler: Callable[[int], Handler]
    from_: From
    recall_s: float


class GroupReader:
    """A member of a consumer group."""

    def __init__(self, settings: MemberSettings, sources: Sequence[Source], outcomes: Outcomes) -> None:
        self._sources = {source.topic: source for source in sources}
        self._outcomes = outcomes
        self._settings = settings
        self._check = TopicCheck(settings.kafka, (*self._sources, dead_letters.TOPIC.name))
        self._group: ConsumerGroup | None = None
        self._established: frozenset[str] = frozenset()
        self._tasks: dict[Assignment, asyncio.Task[None]] = {}
        self._kept: dict[Partition, Assignment] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``. Raises what a handler raised, what the broker refuses us with, and MustRestart."""
        if (checked := await self._check.passed(stop)) is None:
            return
        group = self._group = ConsumerGroup(self._settings, list(self._sources), self, checked.partitions)
        stopping = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, self._failure, group.failed]
        try:
            if not await _unless(stopping, self._join(group)):
                return
            while not any(end.done() for end in ends):
                await asyncio.wait(ends, timeout=_MEASURE_S, return_when=asyncio.FIRST_COMPLETED)
                self._outcomes.assigned((assignment.lag() for assignment in self._tasks), of=self)
                self._outcomes.late(group.lateness.worst_s())
            for failed in (end for end in ends if end.done()):
                failed.result()
        finally:
            stopping.cancel()
            await self.revoked()
            await group.close()
            self._outcomes.assigned((), of=self)

    def not_ready(self) -> list[str]:
        """Why nothing is read; empty when all assigned partitions are."""
        if self._group is None:
            return self._check.not_ready() or ["not connected to Kafka"]
        if reasons := self._group.not_ready():
            return reasons
        return [reason for topic in self._sources for reason in self._opening(topic)]

    async def revoked(self) -> None:
        """Let go of all partitions: wait for what is under way, bounded, then cancel it."""
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

    def assigned(self, tps: set[Partition]) -> None:
        """Start on these partitions."""
        if self._group is None:
            raise RuntimeError("partitions of no group")
        for tp in sorted(tps):
            source = self._sources[tp.topic]
            handler = source.handler(tp.partition)
            assignment = Assignment(self._group, tp, handler, self._outcomes, self._kept.get(tp))
            self._tasks[assignment] = asyncio.ensure_future(self._guard(assignment, source))
        self._kept = {}

    async def _join(self, group: ConsumerGroup) -> None:
        """Become a member. A partition that a group without offsets in it finds, where it has some in others, was
        added to the topic: all of it is new."""
        await group.connect()
        self._established = await group.topics_with_commits()
        group.join()

    def _opening(self, topic: str) -> list[str]:
        tps = [assignment.tp for assignment in self._tasks if assignment.next is None]
        partitions = sorted(tp.partition for tp in tps if tp.topic == topic)
        return [f"reading back {topic}, partitions {', '.join(map(str, partitions))}"] if partitions else []

    async def _guard(self, assignment: Assignment, source: Source) -> None:
        try:
            await assignment.run("earliest" if source.topic in self._established else source.from_, source.recall_s)
        except Abandoned:
            pass
        except IllegalStateError as error:
            log.info("%s: no longer ours: %s", assignment.tp, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the sink
            if not self._failure.done():
                self._failure.set_exception(error)


async def _unless(stopping: "asyncio.Future[Any]", work: Coroutine[Any, Any, None]) -> bool:
    """Do some work, unless told to stop first; whether it was done."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
