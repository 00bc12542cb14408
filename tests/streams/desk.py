"""A reader driven step by step, with a client that answers at once, on a simulated clock."""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from delivery.group import ConsumerGroup
from delivery.ledger import Partition, Slot
from streams.reader import Batch, Reader, Reads
from tests.clock import run
from tests.streams.simulation import INPUT, STATES, Broker, FakeClient, Log, Record

P = ParamSpec("P")
T = TypeVar("T")

TICKS = Partition(INPUT, 0)
OWNERS, LABELS = (Partition(topic, 0) for topic in STATES)


def instant(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a simulated clock."""

    @functools.wraps(test)
    def on_made_up_clock(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return on_made_up_clock


class Prompt(random.Random):
    """A random source that always takes the first choice: no delays."""

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Desk:
    """One partition of each topic, a reader, and what it delivered."""

    def __init__(
        self,
        *,
        partitions: int = 1,
        compacted: frozenset[str] = frozenset(),
        max_open_bytes: int = 10**6,
        broker: Broker | None = None,
    ) -> None:
        self.broker = broker or Broker(partitions=partitions)
        self.client = FakeClient(self.broker, Prompt())
        self.client.max_records = 100
        reads = Reads(inputs=(INPUT,), states=STATES, compacted=tuple(compacted), max_open_bytes=max_open_bytes)
        self.outputs: list[asyncio.Future[int]] = []
        self.reader = Reader(self, self.deliver, reads, self.acknowledged)
        self.reader.group = cast("ConsumerGroup", self.client)
        self.delivered: list[tuple[Slot, Record]] = []
        self.room = asyncio.Event()
        self.room.set()
        self.dropped: list[frozenset[int]] = []
        self.forgotten = 0
        self.told_committed: list[dict[Partition, int]] = []
        self.hold: Callable[[Slot], bool] = lambda _slot: False

    def log(self, tp: Partition) -> Log:
        return self.broker.logs[tp]

    def offsets(self, tp: Partition) -> list[int]:
        """What was delivered of a partition, in order."""
        return [slot.offset for slot, _ in self.delivered if slot.tp == tp]

    def slots(self, tp: Partition) -> list[Slot]:
        return [slot for slot, _ in self.delivered if slot.tp == tp]

    async def assign(self, tps: set[Partition] | None = None) -> None:
        """Set an assignment (default: all), as the client reports it."""
        self.client.assign(self.broker.all() if tps is None else tps)
        self.reader.assigned(self.client.assignment())

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            await self.reader.turn()

    async def deliver(self, batch: Batch) -> None:
        await self.room.wait()
        self.delivered += batch
        for slot, _ in batch:
            if not self.hold(slot):
                self.reader.ledger.finish(slot)

    async def acknowledged(self, timeout_s: float) -> None:
        """Wait for the outputs, at most so long."""
        if self.outputs:
            await asyncio.wait(self.outputs, timeout=timeout_s)

    # -- the stage

    def forget(self) -> None:
        self.forgotten += 1

    def drop(self, partitions: frozenset[int]) -> None:
        self.dropped.append(partitions)

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        self.told_committed.append(dict(offsets))

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        raise AssertionError("nobody asked")


async def meanwhile(work: Awaitable[T], *steps: Callable[[], Any], pauses: Sequence[float] = ()) -> T:
    """Begin some work, do the steps while it waits, and return its result."""
    task = asyncio.ensure_future(work)
    for step, pause_s in zip(steps, pauses or [0.001] * len(steps), strict=True):
        await asyncio.sleep(pause_s)
        pending = step()
        if asyncio.iscoroutine(pending):
            await pending
    return await task
