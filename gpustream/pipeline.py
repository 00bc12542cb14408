"""A producer, streams and sinks in one process: started back to front, drained front to back.

In:       the components, and the tail that reads what comes out of them.
Out:      calls of ``check`` while it runs.
On failure: the first component that fails ends the run, and its error is raised when the others have stopped. The tail
          waits out an outage; a record that it can't decode is logged and passed over.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from delivery.connection import Connection
from delivery.ledger import Partition
from delivery.tasks import set_within
from gpustream.history import Span, decoded, opened
from gpustream.serve import Component
from gpustream.ticks import Tick, decode_tick
from topics import alerts, attributed, dead_letters

log = logging.getLogger(__name__)

DRAIN_S = 8.0
"""How long the sinks may take to receive everything, after the run was asked to stop, or while one can't deliver."""

STOPPED_BY_S = 9.5
"""How long after that components that have not stopped are cancelled."""

PATIENCE_S = 30.0
"""How long a run that ends by itself waits for anything to move, however busy the machine is."""

_CLOSE_S = 1.0
_CHECK_EVERY_S = 0.1

_FETCH_WAIT_MS = 100  # the embedded broker answers an empty fetch only when this is over, whatever arrives meanwhile
_LETTER_HEADERS = ("topic", "partition", "offset", "stage")


class Tail:
    """Reads the pipeline's output topics as any consumer would, in no group.

    From :meth:`start` on it calls ``on_tick`` with each tick of gpu.attributed, and ``on_letter`` with the identity of
    each dead letter: its original's topic, partition and offset, and the stage that gave up. It calls ``on_alert`` with
    every record of gpu.alerts, also older ones. All are in order per partition, replays included.
    """

    def __init__(
        self,
        connection: Connection,
        on_tick: Callable[[Tick], None],
        on_alert: Callable[[Any], object],
        on_letter: Callable[[tuple[bytes, ...]], None],
    ) -> None:
        self._connection = connection
        self._on_tick, self._on_alert, self._on_letter = on_tick, on_alert, on_letter
        self._opened, self._read = contextlib.AsyncExitStack(), dict[Partition, Span]()

    async def start(self) -> None:
        """Connects, and returns when it knows where to begin in every partition. Raises BrokerError or KafkaError."""
        topics = [module.TOPIC.name for module in (attributed, alerts, dead_letters)]
        self._reader = await self._opened.enter_async_context(
            opened(self._connection, topics, fetch_wait_ms=_FETCH_WAIT_MS)
        )
        for topic in topics:
            spans = await self._reader.spans(topic)
            if topic == alerts.TOPIC.name:
                spans = {tp: Span(start, start) for tp, (start, _) in spans.items()}
            self._read |= spans

    async def run(self) -> None:
        """Reads for ever; cancel it to stop. Raises BrokerError if a topic has got other partitions."""
        async for records in self._reader.after(self._read):
            for record in records:
                topic = self._connection.unprefixed(record.topic)
                if topic == alerts.TOPIC.name:
                    self._on_alert(record)
                elif topic == dead_letters.TOPIC.name:
                    headers = dict(record.headers)
                    if dead_letters.RESUBMITTED not in headers:
                        self._on_letter(tuple(headers.get(name, b"") for name in _LETTER_HEADERS))
                else:
                    for _, tick in decoded([record], decode_tick, log):
                        self._on_tick(tick)

    async def stop(self) -> None:
        await self._opened.aclose()


class Producer(Component, Protocol):
    """A producer of ticks. ``drain_s``: how long it may take to send what is left, after it is asked to stop."""

    drain_s: float


class Failed(Exception):
    """A component ended on its own."""


@dataclass
class Pipeline:
    """One run. ``check`` is called ten times a second, with the reasons why it is not ready yet.

    ``behind`` returns how many ticks that were sampled are still on their way.
    """

    producer: Producer
    streams: Sequence[Component]
    sinks: Sequence[Component]
    tail: Tail
    check: Callable[[list[str]], None]
    behind: Callable[[], int]
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _stops: dict[str, asyncio.Event] = field(default_factory=dict)
    _asked_s: float | None = None
    _moved_s: float = 0.0

    @property
    def components(self) -> list[Component]:
        """Every component, in the order of the flow."""
        return [self.producer, *self.streams, *self.sinks]

    async def run(self, stop: asyncio.Event, duration_s: float | None) -> None:
        """Runs until ``stop`` is set or ``duration_s`` is over, then drains and stops everything.

        The producer starts when all others are ready. Raises :class:`Failed` if a component ended before it was asked
        to.
        """
        try:
            await self.tail.start()
            self._tasks["tail"] = asyncio.create_task(self.tail.run(), name="tail")
            for component in reversed(self.components[1:]):
                self._begin(component)
            while not stop.is_set() and (reasons := self._not_ready()):
                await self._pause(stop, reasons)
            if not stop.is_set():
                self._begin(self.producer)
            end = time.monotonic() + duration_s if duration_s is not None else float("inf")
            while not stop.is_set() and time.monotonic() < end:
                await self._pause(stop, self._not_ready())
            await self._drain(stop)
        except BaseException:
            self._asked_s = self._asked_s or time.monotonic()
            raise
        finally:
            await self._stop(stop)

    async def _drain(self, stop: asyncio.Event) -> None:
        """The producer stops sampling and flushes; then attribution catches up, and the sinks."""
        self._moved_s = time.monotonic()
        producing = self._tasks.get(self.producer.name)
        if producing:
            if not stop.is_set():
                self.producer.drain_s = PATIENCE_S
            self._stops[self.producer.name].set()
        never, left = asyncio.Event(), self.behind()
        while (left or (producing and not producing.done())) and not self._is_over(stop, DRAIN_S):
            await self._pause(never, [])
            before, left = left, self.behind()
            if left < before:
                self._moved_s = time.monotonic()

    def _is_over(self, stop: asyncio.Event, after_s: float) -> bool:
        """Whether to wait no longer: ``after_s`` after it was asked to stop. A run that ends by itself waits as long
        after anything has moved if a component can't deliver, because a receiver is away for instance; else longer."""
        now_s = time.monotonic()
        if stop.is_set() and self._asked_s is None:
            self._asked_s = now_s
        if self._asked_s is not None:
            return now_s >= self._asked_s + after_s
        can_deliver = not any(component.not_ready() for component in (*self.streams, *self.sinks))
        return now_s >= self._moved_s + (PATIENCE_S if can_deliver else after_s)

    def _begin(self, component: Component) -> None:
        stop = self._stops[component.name] = asyncio.Event()
        self._tasks[component.name] = asyncio.create_task(component.run(stop), name=component.name)

    def _not_ready(self) -> list[str]:
        running = [component for component in self.components if component.name in self._tasks]
        return [f"{component.name}: {reason}" for component in running for reason in component.not_ready()]

    async def _pause(self, stop: asyncio.Event, reasons: list[str]) -> None:
        """Waits a moment. Raises :class:`Failed` if a component has ended that was not asked to stop."""
        self.check(reasons)
        for name, task in self._tasks.items():
            stop_requested = name in self._stops and self._stops[name].is_set()
            if task.done() and (error := task.exception()):
                raise Failed(f"{name} failed: {error}") from error
            if task.done() and not stop_requested:
                raise Failed(f"{name} ended on its own")
        await set_within(stop, _CHECK_EVERY_S)

    async def _stop(self, stop: asyncio.Event) -> None:
        """Stops the components, then the tail; what does not stop in time is cancelled and left behind."""
        for event in self._stops.values():
            event.set()
        tail = self._tasks.pop("tail", None)
        self._moved_s = time.monotonic()
        unfinished = set(self._tasks.values())
        while unfinished and not self._is_over(stop, STOPPED_BY_S):
            _, unfinished = await asyncio.wait(unfinished, timeout=_CHECK_EVERY_S)
        for task in unfinished:
            log.warning("did not stop in time", extra={"component": task.get_name()})
        for task in [*unfinished, *([tail] if tail else [])]:
            task.cancel()
        closing = asyncio.create_task(self.tail.stop())
        await asyncio.wait([closing], timeout=_CLOSE_S)
        closing.cancel()
        for task in [*self._tasks.values(), closing]:
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it too
