"""A producer, streams and sinks in one process: started back to front, drained front to back.

In:       the components, and the tail that reads what comes out.
Out:      frames while it runs, and the tally when it has ended.
On failure: the first component that fails ends the run, and its error is raised when the others have stopped.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpustream.components import Component
from gpustream.tally import Sampled, Tally

log = logging.getLogger(__name__)

DRAIN_S = 8.0
"""From the end of sampling, the longest that sinks may take to get everything."""

STOPPED_BY_S = 9.5
"""From the end of sampling, when components that have not stopped are cancelled."""

_CLOSE_S = 1.0
_LOOK_EVERY_S = 0.1


class Producer(Component, Protocol):
    """A producer that tells what it sampled."""

    def sampled(self) -> Iterable[Sampled]:
        """Every run of every node so far, and the last tick of each, dropped ones included."""


class Reader(Protocol):
    """What reads gpu.attributed as it comes."""

    async def start(self) -> None:
        """Stands at the end once it returns."""

    async def run(self) -> None:
        """Reads until cancelled."""

    async def stop(self) -> None:
        """Closes."""


class Failed(Exception):
    """A component ended on its own."""


@dataclass
class Pipeline:
    """One run. ``look`` is called ten times a second with why it is not ready yet."""

    producer: Producer
    streams: Sequence[Component]
    sinks: Mapping[str, Component]
    reader: Reader
    tally: Tally
    look: Callable[[list[str]], None]
    _tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _stops: dict[str, asyncio.Event] = field(default_factory=dict)
    _ended_s: float | None = None

    @property
    def components(self) -> list[Component]:
        """Every component, in the order of the flow."""
        return [self.producer, *self.streams, *self.sinks.values()]

    async def run(self, stop: asyncio.Event, duration_s: float | None) -> None:
        """Runs until ``stop`` is set or ``duration_s`` is over, then drains and stops everything.

        Raises :class:`Failed` where a component ended before it was asked to.
        """
        try:
            await self._start(stop)
            await self._until(stop, duration_s)
            await self._drain()
        finally:
            await self._stop()

    async def _start(self, stop: asyncio.Event) -> None:
        await self.reader.start()
        self._spawn("tail", self.reader.run())
        for component in reversed(self.components[1:]):
            self._spawn(component.name, component.run(self._event(component)))
        while not stop.is_set() and (reasons := self._not_ready()):
            await self._pause(stop, reasons)
        if not stop.is_set():
            self._spawn(self.producer.name, self.producer.run(self._event(self.producer)))

    async def _until(self, stop: asyncio.Event, duration_s: float | None) -> None:
        end = time.monotonic() + duration_s if duration_s is not None else float("inf")
        while not stop.is_set() and time.monotonic() < end:
            await self._pause(stop, self._not_ready())

    async def _drain(self) -> None:
        """The producer stops sampling and flushes; then attribution catches up, and the sinks."""
        self._ended_s = time.monotonic()
        end = self._ended_s + DRAIN_S
        never = asyncio.Event()
        if producing := self._tasks.get(self.producer.name):
            self._event(self.producer).set()
            await asyncio.wait([producing], timeout=DRAIN_S)
        while time.monotonic() < end and self._behind():
            await self._pause(never, [])

    def _behind(self) -> bool:
        sampled = list(self.producer.sampled())
        return bool(self.tally.undelivered(sampled) or self.tally.unattributed(sampled))

    async def _stop(self) -> None:
        """Stops the components, then the reader; what does not stop in time is cancelled and left behind."""
        for event in self._stops.values():
            event.set()
        left_s = STOPPED_BY_S - (time.monotonic() - (self._ended_s or time.monotonic()))
        tail = self._tasks.pop("tail", None)
        late = await _unfinished(self._tasks.values(), max(0.0, left_s))
        for task in late:
            log.warning("did not stop in time", extra={"component": task.get_name()})
        for task in [*late, *([tail] if tail else [])]:
            task.cancel()
        closing = asyncio.create_task(self.reader.stop())
        for task in await _unfinished([closing], _CLOSE_S):
            task.cancel()
        for task in [*self._tasks.values(), closing]:
            if task.done() and not task.cancelled():
                task.exception()  # told of before, or of no interest any more

    async def _pause(self, stop: asyncio.Event, reasons: list[str]) -> None:
        """A moment, unless a component ends in it that was not asked to."""
        self.look(reasons)
        for name, task in self._tasks.items():
            asked = name in self._stops and self._stops[name].is_set()
            if task.done() and (error := task.exception()):
                raise Failed(f"{name} failed: {error}") from error
            if task.done() and not asked:
                raise Failed(f"{name} ended on its own")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_EVERY_S)

    def _not_ready(self) -> list[str]:
        running = [component for component in self.components if component.name in self._tasks]
        return [f"{component.name}: {reason}" for component in running for reason in component.not_ready()]

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=name)

    def _event(self, component: Component) -> asyncio.Event:
        return self._stops.setdefault(component.name, asyncio.Event())


async def _unfinished(tasks: Iterable["asyncio.Task[None]"], timeout_s: float) -> set["asyncio.Task[None]"]:
    """Those of the tasks that are not done after so long."""
    waited = list(tasks)
    return (await asyncio.wait(waited, timeout=timeout_s))[1] if waited else set()
