"""A Faust app whose agents are fed batch by batch by the lossless consumer, through a channel in memory.

A stream is an app, a consumer group and one agent:

    app = ReaderApp(settings, stage)

    @app.agent(app.batches)
    async def attribution(batches):
        async for batch in batches: ...

The agent sends through ``app.sender`` and finishes each record's slot with ``app.finish`` or ``app.finish_when``; it
knows nothing of rebalances, seeks or commits. Nothing else may be subscribed.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import faust
import msgspec
from faust.app.base import BootStrategy
from faust.channels import Channel
from faust.transport.drivers import aiokafka as driver
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from delivery.ledger import Partition, Slot
from delivery.watchdog import Deadlines, Pulse, Watchdog, fail_stop
from streams.reader.consumer import LosslessConsumer
from streams.reader.reader import Batch, Client, Reader, Stage
from topics.sender import Sender

log = logging.getLogger(__name__)

_BATCHES_IN_HAND = 16
_POLL_RECORDS = 500
_ASK_EVERY_S = 1.0
_ASK_AT_MOST_EVERY_S = 0.05
_STOP_S = 6.0


class ReaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reads, as whom. Times in seconds, sizes in bytes.

    ``compacted`` are the states that are read whole. ``watched`` are topics that are not read: only where their
    partitions end is asked, of those numbers whose inputs are read.
    """

    group: str
    kafka: str
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    compacted: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
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
    """No producer and no web server: records are sent by a sender of ours."""

    enable_kafka_producer = False
    enable_web = False


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
        self._answers = 0
        self._beat = 0
        self._ask = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(self._pulse, settings.deadlines, fail=fail)
        super().__init__(settings.group, **(_faust_settings(settings) | options))
        self.batches = Batches(self)
        for name in (*settings.inputs, *settings.states):
            self.topics.add(self.topic(name, key_type=bytes, value_type=bytes))

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
        """Ask the broker at once where the partitions end; the stage is told."""
        self._ask.set()

    # -- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` is set or something fails."""
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
        if not self.reader.ledger.ready:
            return ["no partitions assigned yet"]
        pending = len(self.reader.pending_states())
        return [f"state of {pending} partitions still being read"] if pending else []

    async def _start(self) -> None:
        await self.sender.start()
        self._watchdog.start()
        asking = asyncio.create_task(self._ask_for_ends())
        asking.add_done_callback(self._asked)
        self._asking = asking
        await self.start()
        self._check_wiring()

    async def _until(self, stopping: "asyncio.Task[bool]") -> None:
        while not stopping.done():
            await asyncio.wait([stopping], timeout=0.5)
            failed = self.crash_reason or (self._consumer is not None and self._consumer.crash_reason)
            if failed or self.should_stop:
                self.fail(f"the consumer ended by itself: {failed!r}")
                return

    async def _end(self) -> None:
        """Stop, in bounded time: a broker that is away is not waited for."""
        if self._asking is not None:
            self._asking.cancel()
        ending = asyncio.ensure_future(self._stop_all())
        done, _ = await asyncio.wait([ending], timeout=_STOP_S)
        self._watchdog.stop()
        if not done:
            log.warning("not stopped cleanly in %s s; what is not committed will be read again", _STOP_S)
            ending.cancel()

    async def _stop_all(self) -> None:
        await self.stop()
        self.reader.end_epoch()  # nothing can be committed any more, and what is not sent now is no failure
        await self.sender.stop(timeout_s=1.0)

    def _check_wiring(self) -> None:
        """Refuse to run unless the consumer is ours, the agent is there, and every topic is one that is read."""
        if not isinstance(self.consumer, LosslessConsumer):
            raise TypeError(f"the consumer is {type(self.consumer)}, not the lossless one")
        if self.batches.readers() != 1:
            raise RuntimeError(f"{self.batches.readers()} agents on the batches, not one")
        read = {*self.settings.inputs, *self.settings.states}
        if others := {name for topic in self.topics for name in topic.topics} - read:
            raise RuntimeError(f"subscribed to topics that nothing reads: {', '.join(sorted(others))}")

    async def _deliver(self, batch: Batch) -> None:
        await self.batches.send(value=batch)

    async def _ask_for_ends(self) -> None:
        """Ask where the partitions end, every second and when asked to."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ask.wait(), _ASK_EVERY_S)
            self._ask.clear()
            self._beat += 1
            if self.reader.client is not None:
                await self._ask_once(self.reader.client)
            await asyncio.sleep(_ASK_AT_MOST_EVERY_S)

    async def _ask_once(self, client: Client) -> None:
        """Ask where our partitions end; of any partition where none is ours, to know whether the broker answers."""
        ledger, epoch, asked_s = self.reader.ledger, self.reader.ledger.epoch, time.monotonic()
        ours = list(ledger.positions())
        numbers = {tp.partition for tp in ours if tp.topic in self.settings.inputs}
        ours += [Partition(topic, number) for topic in self.settings.watched for number in sorted(numbers)]
        asking = asyncio.ensure_future(client.ends(ours or [Partition(self.settings.inputs[0], 0)]))
        done, _ = await asyncio.wait([asking], timeout=_ASK_EVERY_S * 10)
        if not done or asking.cancelled():
            asking.cancel()
        elif asking.exception() is not None:
            log.info("where the partitions end is not known: %r", asking.exception())
        elif ours and epoch == ledger.epoch:
            self.reader.stage.ends(asked_s, asking.result())

    def _asked(self, asking: "asyncio.Task[None]") -> None:
        if not asking.cancelled():
            self.fail(f"nobody asks where the partitions end any more: {asking.exception()!r}")

    def _answered(self) -> None:
        self._answers += 1

    def _pulse(self) -> Pulse:
        ledger = self.reader.ledger
        return Pulse(
            beat=self._beat,
            progress=ledger.finished,
            turns=self.reader.turns,
            working=ledger.open_bytes > 0,
            ready=not self.not_ready(),
            reachable=self._answers,
        )

    # -- Faust's hooks

    def _create_directories(self) -> None:
        """Nothing is kept on disk."""

    def _new_transport(self) -> Any:
        wiring = {
            "reader": self.reader,
            "kafka": self.settings.kafka,
            "fail": staticmethod(self.fail),
            "answered": staticmethod(self._answered),
        }
        consumer = type("Consumer", (LosslessConsumer,), wiring)
        transport = type("Transport", (driver.Transport,), {"Consumer": consumer})
        return transport(self.conf.broker_consumer, self)


def _faust_settings(settings: ReaderSettings) -> dict[str, Any]:
    # Without tables, standby replicas only select the assignor that puts partition i of every topic on one worker.
    # The url stands in the group's metadata, and a static member must come back under the same one.
    return {
        "broker": [f"aiokafka://{address}" for address in settings.kafka.split(",")],
        "store": "memory://",
        "key_serializer": "raw",
        "value_serializer": "raw",
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "web_enabled": False,
        "canonical_url": f"http://{settings.instance_id or socket.gethostname()}:6066",
        "table_standby_replicas": 1,
        "stream_wait_empty": False,
        "consumer_max_fetch_size": 8 * 1024 * 1024,
        "consumer_group_instance_id": settings.instance_id,
        "broker_max_poll_records": _POLL_RECORDS,
        "broker_commit_interval": 1.0,
        "broker_session_timeout": settings.session_timeout_s,
        "broker_heartbeat_interval": min(3.0, settings.session_timeout_s / 3),
        "broker_rebalance_timeout": max(20.0, settings.session_timeout_s),
        "broker_request_timeout": max(40.0, settings.session_timeout_s),
    }
