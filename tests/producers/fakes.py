"""A sender whose broker the test controls, and readings to publish."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from delivery.instruments import Instruments
from delivery.sender import Headers, Sender, Unsendable
from producers.publisher import INSTRUMENTS, NodePublisher
from producers.workloads import WorkloadsPublisher

CLUSTER, NODE = "prod", "gpu-1"
DROP_REASONS = ("buffer_full", "buffer_age", "too_large", "refused", "unencodable", "stopped")


class Event(NamedTuple):
    """The outcome of a record at the broker, and its time."""

    outcome: Literal["sent", "acknowledged", "refused"]
    topic: str
    key: bytes | None
    record: dict[str, Any]
    at_s: float


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeSender(Sender):
    """Keeps each record until the test acknowledges or refuses it; ``events`` are all outcomes, in order.

    With ``prompt`` it acknowledges at once. It accepts records while ``taking`` is set.
    """

    def __init__(self, clock: FakeClock | None = None, *, prompt: bool = False) -> None:
        self.prompt = prompt
        self.events: list[Event] = []
        self.started = self.stopped = False
        self.taking = asyncio.Event()
        self.taking.set()
        self._clock = clock or FakeClock()
        self._waiting: list[tuple[Event, asyncio.Future[int]]] = []
        self._offsets = itertools.count()

    async def start(self) -> None:
        self.started = True

    async def stop(self, timeout_s: float = 5.0) -> None:
        self.stopped = True

    def not_ready(self) -> list[str]:
        return [] if self.started else ["no Kafka broker has answered at 127.0.0.1:1 yet"]

    def refusal(self) -> None:
        return None

    async def ready(self) -> None:
        await self.taking.wait()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        event = Event("sent", topic, key, msgspec.json.decode(value or b""), self._clock())
        self.events.append(event)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((event, future))
        if self.prompt:
            self.acknowledge()
        return future

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def acknowledge(self, count: int = 1_000_000) -> None:
        """Acknowledge the oldest ``count`` records."""
        for event, future in self._take(count):
            self.events.append(event._replace(outcome="acknowledged", at_s=self._clock()))
            future.set_result(next(self._offsets))

    def refuse(self, count: int = 1) -> None:
        """Refuse the oldest ``count`` records for good."""
        for event, future in self._take(count):
            self.events.append(event._replace(outcome="refused", at_s=self._clock()))
            future.set_exception(Unsendable("the broker said no"))

    def records(self, topic: str, outcome: str = "sent") -> list[dict[str, Any]]:
        """The records of a topic that had this outcome, in order."""
        return [event.record for event in self.events if event.topic == topic and event.outcome == outcome]

    def _take(self, count: int) -> list[tuple[Event, "asyncio.Future[int]"]]:
        oldest, self._waiting = self._waiting[:count], self._waiting[count:]
        return oldest


def instruments() -> Instruments:
    return Instruments(INSTRUMENTS)


def value(instruments: Instruments, name: str, **labels: str) -> float:
    """The value of a component's metric; 0 if it has none."""
    return instruments.registry.get_sample_value(name, labels) or 0.0


def devices(utilization: float | None = 0.5) -> list[dict[str, Any]]:
    """The devices of a node with one GPU."""
    return [{"uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", "metrics": {"gpu_utilization_ratio": utilization}}]


def containers(*pods: str) -> list[dict[str, Any]]:
    """A kubelet's answer in which each pod has a GPU."""
    return [
        {
            "namespace": "ml",
            "pod": pod,
            "container": "main",
            "resource": "nvidia.com/gpu",
            "device_ids": [f"GPU-0f12ab34-5c6d-7e8f-9a0b-{number:012x}"],
        }
        for number, pod in enumerate(pods)
    ]


class HasPublisher(Protocol):
    """A test's bench with a publisher."""

    @property
    def publisher(self) -> NodePublisher | WorkloadsPublisher:
        """The publisher that :func:`running` runs."""


B = TypeVar("B", bound=HasPublisher)


@asynccontextmanager
async def running(bench: B) -> AsyncIterator[B]:
    """The bench, with its publisher running."""
    task = asyncio.create_task(bench.publisher.run())
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])
