"""A Faust app whose one agent the reader feeds, batch by batch, through a channel in memory.

    app = ReaderApp(settings, Reads(inputs=("gpu.samples",), states=("gpu.allocations",)), stage)

    @app.agent(app.batches)
    async def attribution(batches):
        async for batch in batches: ...

- Faust runs the agent, its channel and the reader's loops, and stops them. It has no Kafka client of its own.
- :class:`~streams.reader.Reader` reads, seeks and commits; :class:`~delivery.group.ConsumerGroup` is the membership.
- The agent sends through ``app.sender`` and finishes each record's slot with ``app.finish`` or ``app.finish_when``. It
  knows nothing of rebalances, seeks or commits.

All of it shares one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import faust
from faust.app.base import BootStrategy
from faust.channels import Channel
from mode import Service
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from delivery.group import ConsumerGroup
from delivery.ledger import Partition, Slot
from delivery.sender import Sender
from delivery.settings import MemberSettings
from delivery.watchdog import Pulse, Watchdog, fail_stop
from streams.reader import Reader, Reads, Stage

log = logging.getLogger(__name__)

_BATCHES_IN_HAND = 2
_COMMIT_EVERY_S = 1.0
_ASK_EVERY_S = 1.0
_ASK_AT_MOST_EVERY_S = 0.05
_ASK_FOR_S = 10.0
_STOP_S = 6.0


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
        """How many get the batches. Without a reader the batches are dropped; each of several gets them all."""
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


class ReaderApp(faust.App):  # type: ignore[misc]
    """A Faust app that reads its topics without loss. ``fail`` ends the process; tests give another."""

    BootStrategy = _Boot

    def __init__(
        self, member: MemberSettings, reads: Reads, stage: Stage, *, fail: Callable[[str], None] = fail_stop
    ) -> None:
        self.fail = fail
        self.sender = Sender(member.connection(), client_id=member.group, max_batch_bytes=512 * 1024)
        self.reader = Reader(
            stage, lambda batch: self.batches.send(value=batch), reads, lambda timeout_s: self.sender.settled(timeout_s)
        )
        self.group = ConsumerGroup(member, (*reads.inputs, *reads.states), self.reader, reads.partitions)
        self.reader.group = self.group
        self._watchdog = Watchdog(self._pulse, reads.deadlines, fail=fail)
        super().__init__(self.group.name, store="memory://", topic_allow_declare=False, topic_disable_leader=True)
        self.batches = Batches(self)
        self.consumer = _NoConsumer(self.beacon)
        self.loops = ReaderLoops(self)

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
                self.fail(f"{self.group.place(slot.tp)} offset {slot.offset}: output not acknowledged: {reason}")
                return
            left -= 1
            if not left:
                self.finish(slot)

        for future in waiting:
            future.add_done_callback(done)

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot still counts. Ask again after every await."""
        return slot.epoch == self.reader.ledger.epoch

    def ask_ends(self) -> None:
        """Ask the broker at once where the partitions end; the stage is notified."""
        self.loops.ask.set()

    # -- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set or something fails. Raises MustRestart.
        The stop takes bounded time: a broker that is away is not waited for."""
        starting, stopping = asyncio.create_task(self._start()), asyncio.create_task(stop.wait())
        failed = self.group.failed
        ends: list[asyncio.Future[Any]] = [stopping, failed]
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            while not stopping.done():
                await asyncio.wait(ends, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                if self.should_stop:
                    self.fail(f"the app ended by itself: {self.crash_reason!r}")
                    break
        finally:
            stopping.cancel()
            starting.cancel()
            ending = asyncio.create_task(self.close())
            done, _ = await asyncio.wait([ending], timeout=_STOP_S)
            self._watchdog.stop()
            if not done:
                log.warning("not stopped cleanly in %s s; what is not committed will be read again", _STOP_S)
                ending.cancel()

    async def _start(self) -> None:
        """Connect, start the agent and then the reader's loops, and join the group."""
        await self.sender.start()
        self._watchdog.start()
        await self.group.connect()
        self.flow_control.resume()  # or Faust's streams skip every batch
        await self.start()
        if self.batches.readers() != 1:
            raise RuntimeError(f"{self.batches.readers()} agents on the batches, not one")
        if self.topics:
            raise RuntimeError(f"subscribed to topics, which nothing here reads: {', '.join(map(str, self.topics))}")
        await self.add_runtime_dependency(self.loops)
        self.group.join()

    async def close(self) -> None:
        """Stop reading, wait for what was sent, commit, and leave: what the broker took is not read again."""
        await self.stop()
        await self.reader.revoked()  # nothing can be finished any more, and what is not sent now is no failure
        await asyncio.gather(self.group.close(), self.sender.stop(timeout_s=1.0))

    def not_ready(self) -> list[str]:
        """What keeps the reader from reading; empty when it reads."""
        if reasons := self.group.not_ready() or self.sender.not_ready():
            return reasons
        if not self.reader.ledger.ready:
            return ["no partitions assigned yet"]
        pending = len(self.reader.pending_states())
        return [f"state of {pending} partitions still being read"] if pending else []

    def _pulse(self) -> Pulse:
        ledger = self.reader.ledger
        return Pulse(
            beat=self.loops.beat,
            progress=ledger.finished,
            turns=self.reader.turns,
            working=ledger.open_bytes > 0,
            ready=ledger.ready and not self.reader.pending_states(),
            reachable=self.loops.answers,
        )

    # -- Faust's hooks

    def _create_directories(self) -> None:
        """Nothing is kept on disk."""


class ReaderLoops(Service):  # type: ignore[misc]
    """What the reader does all the time, as a service of the app: started after its agent, stopped before it.
    ``beat`` and ``answers`` count for the watchdog how often the broker was asked and has answered."""

    def __init__(self, app: ReaderApp) -> None:
        super().__init__()
        self.app, self.reader = app, app.reader
        self.beat = self.answers = 0
        self.ask = asyncio.Event()

    async def on_start(self) -> None:
        """Begin with all of them."""
        for loop in (self.read(), self.commit(), self.ask_for_ends()):
            self.add_future(loop)

    async def read(self) -> None:
        """Turn after turn. Whatever fails in one ends the process."""
        try:
            while not self.app.should_stop:
                await asyncio.sleep(0)  # records that are there already are given without waiting
                await self.reader.turn()
        except asyncio.CancelledError:
            if not self.app.should_stop:
                self.app.fail("the reader was cancelled")
            raise
        except Exception as error:
            log.exception("the reader failed")
            self.app.fail(f"the reader failed: {error!r}")

    async def commit(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_EVERY_S)
            await self.reader.commit()

    async def ask_for_ends(self) -> None:
        """Ask the broker where our partitions end, every second and when somebody wants to know.
        While none is ours, any partition is asked about: the watchdog has to know whether the broker answers."""
        reader, ledger, reads = self.reader, self.reader.ledger, self.reader.reads
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ask.wait(), _ASK_EVERY_S)
            self.ask.clear()
            self.beat += 1
            reader.loop_late_s = reader.group.lateness.worst_s()
            epoch, asked_s, ours = ledger.epoch, time.monotonic(), list(ledger.positions())
            numbers = sorted({tp.partition for tp in ours if tp.topic in reads.inputs})
            ours += [Partition(topic, number) for topic in reads.watched for number in numbers]
            asking = asyncio.ensure_future(reader.group.offsets.ends(ours or [Partition(reads.inputs[0], 0)]))
            done, _ = await asyncio.wait([asking], timeout=_ASK_FOR_S)
            if not done or asking.cancelled():
                asking.cancel()
            elif asking.exception() is not None:
                log.info("where the partitions end is not known: %r", asking.exception())
            else:
                self.answers += 1
                if ours and epoch == ledger.epoch:
                    reader.stage.ends(asked_s, asking.result())
            await asyncio.sleep(_ASK_AT_MOST_EVERY_S)
