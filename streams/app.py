"""A stream as a component: a Faust app whose one agent the reader feeds, batch by batch, through a channel in memory.

- Faust starts and stops the agent, its channel and the reader's loops. It has no Kafka client of its own.
- :class:`~streams.reader.Reader` reads, seeks and commits; :class:`~delivery.group.ConsumerGroup` is the membership.
- The agent passes each batch to the stream's worker, which sends through ``app.sender`` and finishes each record's
  slot with ``app.finish`` or ``app.finish_when``. It knows nothing of rebalances, seeks or commits.

All of this runs on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Callable, Mapping
from math import ceil
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import faust
from faust.app.base import BootStrategy
from faust.channels import Channel
from mode import Service
from mode.utils.queues import FlowControlEvent, ThrowableQueue
from msgspec.structs import replace

from delivery.group import ConsumerGroup
from delivery.instruments import Instrument, Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Sender, not_sent
from delivery.settings import MemberSettings
from delivery.tasks import set_within
from delivery.topic_admin import TopicCheck
from delivery.watchdog import Pulse, Watchdog, fail_stop
from streams import STREAMS
from streams.reader import Batch, Reader, Reads, Stage

log = logging.getLogger(__name__)
S = TypeVar("S", bound=MemberSettings)

_MAX_BATCHES = 2
_COMMIT_EVERY_S = 1.0
_ASK_EVERY_S = 1.0
_ASK_PAUSE_S = 0.05
_ASK_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 6.0


class Batches(Channel):  # type: ignore[misc]  # faust has no types that pass strict
    """A bounded channel that Faust's flow control neither clears nor pauses."""

    _queue: Any

    @property
    def queue(self) -> Any:
        """The one queue, made at first use in the running loop."""
        if self._queue is None:
            flow = FlowControlEvent(initially_suspended=False)
            self._queue = ThrowableQueue(maxsize=_MAX_BATCHES, flow_control=flow)
        return self._queue

    def readers(self) -> int:
        """How many agents read the batches. Without one they are dropped; if there are several, each gets them all."""
        return len(self._subscribers)


class _Boot(BootStrategy):  # type: ignore[misc]
    """Starts agents only: no consumer or producer of Faust's, no web server and no sensors."""

    enable_kafka = False
    enable_web = False
    enable_sensors = False


class _NoConsumer:
    """The attributes of a consumer that Faust reads, in place of Faust's own consumer: records come from the group."""

    def __init__(self, beacon: Any) -> None:
        self.beacon = beacon
        self.unacked = self._unacked_messages = WeakSet[Any]()

    def assignment(self) -> set[Any]:
        """Faust has no partitions."""
        return set()

    async def on_task_error(self, error: BaseException) -> None:
        """An agent failed. Faust has logged it."""


class ReaderApp(faust.App):  # type: ignore[misc]
    """A Faust app that reads its topics without loss. ``fail`` ends the process; tests replace it.
    ``deadlines`` are those of its watchdog: that of the start includes the time of a rebalance of the group."""

    BootStrategy = _Boot

    def __init__(
        self, member: MemberSettings, reads: Reads, stage: Stage, *, fail: Callable[[str], None] = fail_stop
    ) -> None:
        self.fail = fail
        self.sender = Sender(member.connection(), client_id=member.group)
        self.reader = Reader(
            stage, lambda batch: self.batches.send(value=batch), reads, lambda timeout_s: self.sender.flush(timeout_s)
        )
        self.group = ConsumerGroup(member, (*reads.inputs, *reads.states), self.reader, reads.partitions)
        self.reader.group = self.group
        rebalance_s = ceil(member.session_timeout_s)  # for so long the group may wait for a killed member
        self.deadlines = replace(reads.deadlines, start=reads.deadlines.start + rebalance_s)
        self._watchdog = Watchdog(self._pulse, self.deadlines, fail=fail)
        super().__init__(self.group.name, store="memory://", topic_allow_declare=False, topic_disable_leader=True)
        self.batches = Batches(self)
        self.consumer = _NoConsumer(self.beacon)
        self.loops = ReaderLoops(self)

    # -- for the agent

    def finish(self, slot: Slot) -> None:
        """The record of this slot needs nothing more."""
        self.reader.ledger.finish(slot)

    def finish_when(self, slot: Slot, sent: "asyncio.Future[int]") -> None:
        """Finish the record of this slot when its output is acknowledged; a failure ends the process."""

        def on_done(sent: "asyncio.Future[int]") -> None:
            if not self.is_current(slot):
                return
            if sent.cancelled() or sent.exception() is not None:
                reason = "cancelled" if sent.cancelled() else repr(sent.exception())
                self.fail(f"{self.group.kafka_name(slot.tp)} offset {slot.offset}: output not acknowledged: {reason}")
            else:
                self.finish(slot)

        sent.add_done_callback(on_done)

    def is_current(self, slot: Slot) -> bool:
        """Whether the slot is of this epoch, so that its record may still be used. Check again after every await."""
        return slot.epoch == self.reader.ledger.epoch

    def ask_ends(self) -> None:
        """Ask the broker at once where the partitions end. The stage gets the answer in :meth:`Stage.ends`."""
        self.loops.ask.set()

    # -- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set or something fails. Raises MustRestart.
        Stopping takes bounded time: it does not wait for a broker that is unreachable."""
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
            closing = asyncio.create_task(self.close())
            done, _ = await asyncio.wait([closing], timeout=_STOP_TIMEOUT_S)
            self._watchdog.stop()
            if not done:
                log.warning("not stopped cleanly in %s s; what is not committed will be read again", _STOP_TIMEOUT_S)
                closing.cancel()

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
        """Stop reading, wait for what was sent, commit, and leave the group: finished records are not read again."""
        await self.stop()
        await self.reader.revoked()  # from here on no record is finished, and a send that fails is no failure
        await asyncio.gather(self.group.close(), self.sender.stop(timeout_s=1.0))

    def not_ready(self) -> list[str]:
        """The reasons why the reader does not read yet; empty if it reads."""
        unsent = not_sent(self.sender, what="what it made of records", waited_s=self.sender.waited_s())
        if reasons := self.group.not_ready() or unsent:
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
    """The loops of the reader, as a service of the app: started after its agent, stopped before it.
    ``beat`` and ``answers`` count, for the watchdog, how often the broker was asked and how often it answered. An
    answer while Kafka says that it does not take what was made of records does not count."""

    def __init__(self, app: ReaderApp) -> None:
        super().__init__()
        self.app, self.reader = app, app.reader
        self.beat = self.answers = 0
        self.ask = asyncio.Event()

    async def on_start(self) -> None:
        for loop in (self.read(), self.commit(), self.ask_for_ends()):
            self.add_future(loop)

    async def read(self) -> None:
        """Read, turn after turn. Any failure ends the process."""
        try:
            while not self.app.should_stop:
                await asyncio.sleep(0)  # a turn need not wait if records have already been fetched
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
        """Ask the broker where the assigned partitions end, every second and on :meth:`ReaderApp.ask_ends`.
        While none is assigned, ask where partition 0 ends: the watchdog has to know whether the broker answers."""
        reader, ledger, reads = self.reader, self.reader.ledger, self.reader.reads
        while True:
            await set_within(self.ask, _ASK_EVERY_S)
            self.ask.clear()
            self.beat += 1
            epoch, asked_s, partitions = ledger.epoch, time.monotonic(), list(ledger.positions())
            numbers = sorted({tp.partition for tp in partitions if tp.topic in reads.inputs})
            partitions += [Partition(topic, number) for topic in reads.watched for number in numbers]
            asking = asyncio.ensure_future(reader.group.offsets.ends(partitions or [Partition(reads.inputs[0], 0)]))
            done, _ = await asyncio.wait([asking], timeout=_ASK_TIMEOUT_S)
            if not done or asking.cancelled():
                asking.cancel()
            elif asking.exception() is not None:
                log.info("where the partitions end is not known: %r", asking.exception())
            else:
                self.answers += self.app.sender.refusal() is None
                if ledger.ready and epoch == ledger.epoch:
                    reader.stage.ends(asked_s, asking.result() if partitions else {})
            await asyncio.sleep(_ASK_PAUSE_S)


# -- a stream


class StreamWorker(Stage, Protocol):
    """What processes the batches of a stream."""

    app: ReaderApp

    async def handle(self, batch: Batch) -> None:
        """Process a batch of one partition."""

    async def watch(self) -> None:
        """Do what has to be done because time passes. Never returns."""


class Stream(Generic[S]):
    """A stream as a component: it waits for its topics, then its one agent runs its worker until the stop.

    A stream defines its ``name`` in the registry, the ``table`` of its instruments, ``watch_failure``, what is logged
    if the worker's :meth:`~StreamWorker.watch` fails, and :meth:`make_worker`.
    """

    name: str
    table: tuple[Instrument, ...]
    watch_failure: str

    def __init__(self, settings: S, *, fail: Callable[[str], None] = fail_stop) -> None:
        self.settings, self._fail = settings, fail
        self.instruments = Instruments(self.table)
        self.registry = self.instruments.registry
        self._check = TopicCheck(settings.connection(), STREAMS[self.name].uses)
        self._app: ReaderApp | None = None

    def make_worker(self, partitions: Mapping[str, int]) -> tuple[StreamWorker, Reads]:
        """The worker, and the topics that it reads. ``partitions``: how many partitions each topic has."""
        raise NotImplementedError

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for the topics, then work until ``stop`` is set. If the worker's watch fails, the process ends."""
        checked = await self._check.wait(stop)
        if checked is None:
            return
        worker, reads = self.make_worker(checked.partitions)
        app = self._app = worker.app = ReaderApp(self.settings, reads, worker, fail=self._fail)

        @app.agent(app.batches, name=self.name)  # type: ignore[untyped-decorator]
        async def agent(batches: AsyncIterable[Batch]) -> None:
            async for batch in batches:
                await worker.handle(batch)

        def on_done(watching: "asyncio.Task[None]") -> None:
            if not watching.cancelled():
                app.fail(f"{self.watch_failure}: {watching.exception()!r}")

        watching = asyncio.create_task(worker.watch())
        watching.add_done_callback(on_done)
        try:
            await app.run(stop)
        finally:
            watching.cancel()

    def not_ready(self) -> list[str]:
        """The reasons why it does not work yet; empty if it works."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
