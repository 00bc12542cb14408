"""A Faust app whose agents are fed batch by batch by the reader, through a channel in memory.

A stream is an app, a consumer group and one agent:

    app = ReaderApp(settings, stage)

    @app.agent(app.batches)
    async def attribution(batches):
        async for batch in batches: ...

The agent sends through ``app.sender`` and finishes each record's slot with ``app.finish`` or ``app.finish_when``; it
knows nothing of rebalances, seeks or commits. Faust runs the agent, the channel and the reader's loops; it has no Kafka
client of its own, so nothing may be subscribed. The group, the reader and the agent share one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import faust
import msgspec
from faust.app.base import BootStrategy
from faust.channels import Channel
from mode import Service
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from delivery.group import ConsumerGroup
from delivery.ledger import Partition, Slot
from delivery.sender import Sender
from delivery.settings import MemberSettings
from delivery.watchdog import Deadlines, Pulse, Watchdog, fail_stop
from streams.reader import Batch, Reader, Stage

log = logging.getLogger(__name__)

_BATCHES_IN_HAND = 16
_COMMIT_EVERY_S = 1.0
_ASK_EVERY_S = 1.0
_ASK_AT_MOST_EVERY_S = 0.05
_ASK_FOR_S = 10.0
_STOP_S = 6.0


class ReaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reads, as whom. Times in seconds, sizes in bytes.

    ``compacted`` are the states that are read whole. ``watched`` are topics that are not read: only where their
    partitions end is asked, of those numbers whose inputs are read. ``partitions`` is how many each topic has, as
    checked at the start.
    """

    group: str
    kafka: str
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    compacted: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    partitions: Mapping[str, int] = {}
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    max_open_bytes: int = 128 * 1024 * 1024
    deadlines: Deadlines = Deadlines()


class Batches(Channel):  # type: ignore[misc]  # faust has no types that pass strict
    """A bounded channel that Faust's flow control neither clears nor suspends."""

    _queue: Any

    @property
    def queue(self) -> Any:
        """The one queue, made at first use in the running loop."""
        if self._queue is None:
            flow = FlowControlEvent(initially_suspended=False)
            self._queue = ThrowableQueue(maxsize=_BATCHES_IN_HAND, flow_control=flow)
        return self._queue

    def readers(self) -> int:
        """How many are given the batches: without one they are dropped, and each of several is given all."""
        return len(self._subscribers)


class _Boot(BootStrategy):  # type: ignore[misc]
    """Neither a consumer nor a producer of Faust's, no web server and no sensors: agents only."""

    enable_kafka = False
    enable_web = False
    enable_sensors = False


class _NoConsumer:
    """What Faust looks at of a consumer, in place of the one that it would make: records come from the group."""

    def __init__(self, beacon: Any) -> None:
        self.beacon = beacon
        self.unacked = self._unacked_messages = WeakSet[Any]()

    def assignment(self) -> set[Any]:
        """None by Faust."""
        return set()

    async def on_task_error(self, error: BaseException) -> None:
        """An agent failed, which Faust logs."""


class _Loops(Service):  # type: ignore[misc]
    """The reader's loops, as a service of the app: started after its agent, stopped before it."""

    def __init__(self, *loops: Callable[[], Any]) -> None:
        super().__init__()
        self._loops = loops

    async def on_start(self) -> None:
        """Begin with all of them."""
        for loop in self._loops:
            self.add_future(loop())


class ReaderApp(faust.App):  # type: ignore[misc]
    """A Faust app that reads its topics without loss. ``fail`` ends the process; tests give another."""

    BootStrategy = _Boot

    def __init__(
        self, settings: ReaderSettings, stage: Stage, *, fail: Callable[[str], None] = fail_stop, **options: Any
    ) -> None:
        self.settings = settings
        self.fail = fail
        self.sender = Sender(settings.kafka, client_id=settings.group, max_batch_bytes=512 * 1024)
        self.reader = Reader(
            stage,
            self._deliver,
            inputs=frozenset(settings.inputs),
            states=frozenset(settings.states),
            compacted=frozenset(settings.compacted),
            max_open_bytes=settings.max_open_bytes,
        )
        member = MemberSettings(
            kafka=settings.kafka,
            group=settings.group,
            instance_id=settings.instance_id,
            session_timeout_s=settings.session_timeout_s,
        )
        self.group = ConsumerGroup(member, (*settings.inputs, *settings.states), self.reader, settings.partitions)
        self.reader.client = self.group
        self._answers = 0
        self._beat = 0
        self._ask = asyncio.Event()
        self._watchdog = Watchdog(self._pulse, settings.deadlines, fail=fail)
        faust_settings = {"store": "memory://", "topic_allow_declare": False, "topic_disable_leader": True}
        super().__init__(settings.group, **(faust_settings | options))
        self.batches = Batches(self)
        self.consumer = _NoConsumer(self.beacon)

    # -- for the agent

    def finish(self, slot: Slot) -> None:
        """The record of this slot needs nothing more."""
        self.reader.ledger.finish(slot)

    def finish_when(self, slot: Slot, acknowledged: Sequence["asyncio.Future[int]"]) -> None:
        """The record of this slot needs nothing more once all these are acknowledged; a failure ends the process."""
        waiting = [future for future in acknowledged if not future.done() or future.cancelled() or future.exception()]
        if not waiting:
            self.finish(slot)
        left = len(waiting)

        def done(future: "asyncio.Future[int]") -> None:
            nonlocal left
            if slot.epoch != self.reader.ledger.epoch:
                return
            if future.cancelled() or future.exception() is not None:
                reason = "cancelled" if future.cancelled() else repr(future.exception())
                self.fail(f"{slot.tp} offset {slot.offset}: output not acknowledged: {reason}")
                return
            left -= 1
            if not left:
                self.finish(slot)

        for future in waiting:
            future.add_done_callback(done)

    def current(self, slot: Slot) -> bool:
        """Whether the slot still counts. Ask again after every await."""
        return slot.epoch == self.reader.ledger.epoch

    def ask_ends(self) -> None:
        """Ask the broker at once where the partitions end; the stage is notified."""
        self._ask.set()

    # -- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set or something fails. Raises MustRestart."""
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await self._until(stopping)
        finally:
            stopping.cancel()
            starting.cancel()
            await self._end()

    def not_ready(self) -> list[str]:
        """What keeps the reader from reading; empty when it reads."""
        if reasons := self.group.not_ready():
            return reasons
        if not self.reader.ledger.ready:
            return ["no partitions assigned yet"]
        pending = len(self.reader.pending_states())
        return [f"state of {pending} partitions still being read"] if pending else []

    async def _start(self) -> None:
        await self.sender.start()
        self._watchdog.start()
        await self.group.connect()
        self.flow_control.resume()  # or Faust's streams skip every batch
        await self.start()
        if self.batches.readers() != 1:
            raise RuntimeError(f"{self.batches.readers()} agents on the batches, not one")
        if self.topics:
            raise RuntimeError(f"subscribed to topics, which nothing here reads: {', '.join(map(str, self.topics))}")
        await self.add_runtime_dependency(_Loops(self._read, self._commit, self._ask_for_ends))
        self.group.join()

    async def _until(self, stopping: "asyncio.Task[bool]") -> None:
        failed = self.group.failed
        ends: list[asyncio.Future[Any]] = [stopping, failed]
        while not stopping.done():
            await asyncio.wait(ends, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if self.should_stop:
                self.fail(f"the app ended by itself: {self.crash_reason!r}")
                return

    async def _end(self) -> None:
        """Stop, in bounded time: a broker that is away is not waited for."""
        ending = asyncio.ensure_future(self._stop_all())
        done, _ = await asyncio.wait([ending], timeout=_STOP_S)
        self._watchdog.stop()
        if not done:
            log.warning("not stopped cleanly in %s s; what is not committed will be read again", _STOP_S)
            ending.cancel()

    async def _stop_all(self) -> None:
        await self.stop()
        await self.reader.revoked()  # nothing can be finished any more, and what is not sent now is no failure
        await asyncio.gather(self.group.close(), self.sender.stop(timeout_s=1.0))

    async def _deliver(self, batch: Batch) -> None:
        await self.batches.send(value=batch)

    # -- the reader's loops

    async def _read(self) -> None:
        """Turn after turn. Whatever fails in one ends the process."""
        try:
            while not self.should_stop:
                await asyncio.sleep(0)  # records that are there already are given without waiting
                await self.reader.turn()
        except asyncio.CancelledError:
            if not self.should_stop:
                self.fail("the reader was cancelled")
            raise
        except Exception as error:
            log.exception("the reader failed")
            self.fail(f"the reader failed: {error!r}")

    async def _commit(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_EVERY_S)
            await self.reader.commit()

    async def _ask_for_ends(self) -> None:
        """Ask where the partitions end, every second and when asked to."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ask.wait(), _ASK_EVERY_S)
            self._ask.clear()
            self._beat += 1
            self.reader.loop_late_s = self.group.lateness.worst_s()
            await self._ask_once()
            await asyncio.sleep(_ASK_AT_MOST_EVERY_S)

    async def _ask_once(self) -> None:
        """Ask where our partitions end; of any partition where none is ours, to know whether the broker answers."""
        ledger, epoch, asked_s = self.reader.ledger, self.reader.ledger.epoch, time.monotonic()
        ours = list(ledger.positions())
        numbers = {tp.partition for tp in ours if tp.topic in self.settings.inputs}
        ours += [Partition(topic, number) for topic in self.settings.watched for number in sorted(numbers)]
        asking = asyncio.ensure_future(self.group.ends(ours or [Partition(self.settings.inputs[0], 0)]))
        done, _ = await asyncio.wait([asking], timeout=_ASK_FOR_S)
        if not done or asking.cancelled():
            asking.cancel()
        elif asking.exception() is not None:
            log.info("where the partitions end is not known: %r", asking.exception())
        else:
            self._answers += 1
            if ours and epoch == ledger.epoch:
                self.reader.stage.ends(asked_s, asking.result())

    def _pulse(self) -> Pulse:
        ledger = self.reader.ledger
        return Pulse(
            beat=self._beat,
            progress=ledger.finished,
            turns=self.reader.turns,
            working=ledger.open_bytes > 0,
            ready=ledger.ready and not self.reader.pending_states(),
            reachable=self._answers,
        )

    # -- Faust's hooks

    def _create_directories(self) -> None:
        """Nothing is kept on disk."""
