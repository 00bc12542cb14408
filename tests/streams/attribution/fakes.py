"""A reader's app without a broker: its ledger is the real one, and tests decide the outcome of each send."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, cast

import msgspec
import pytest

from delivery.instruments import Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from delivery.settings import DEAD_LETTERS
from streams.app import ReaderApp
from streams.attribution import component
from streams.attribution.component import ALLOCATIONS, INSTRUMENTS, OUTPUT, SAMPLES, WORKLOADS, Joiner
from tests.eventually import settle
from tests.streams.fakes import LedgerApp, Record
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.topic import node_key
from topics.workloads import NodeWorkloads

TOPICS = (SAMPLES, ALLOCATIONS, WORKLOADS)


class SentRecord(NamedTuple):
    """A record that was sent, and its acknowledgement."""

    topic: str
    value: bytes
    key: bytes | None
    partition: int | None
    headers: dict[str, bytes]
    acknowledged: "asyncio.Future[int]"


class FakeSender:
    """Takes records after up to ``turns`` turns of the loop, and acknowledges them at once unless ``holding``."""

    def __init__(self) -> None:
        self.sent: list[SentRecord] = []
        self.turns = 0
        self.holding = False
        self.largest = 10**9
        self.broken = False
        self.room = asyncio.Event()
        self.room.set()
        self._random = Random(1)

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> "asyncio.Future[int]":
        if self.broken:
            raise RuntimeError("broken")
        await self.room.wait()
        for _ in range(self._random.randint(0, self.turns)):
            await asyncio.sleep(0)
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.sent.append(SentRecord(topic, value, key, partition, dict(headers), acknowledged))
        if topic == OUTPUT and len(value) > self.largest:
            acknowledged.set_exception(Unsendable("too large"))
        elif not self.holding:
            acknowledged.set_result(len(self.sent))
        return acknowledged

    def outputs(self) -> list[AttributedSample]:
        """What was sent to gpu.attributed, in order."""
        return [msgspec.json.decode(s.value, type=AttributedSample) for s in self.sent if s.topic == OUTPUT]

    def letters(self) -> list[SentRecord]:
        """What was sent to gpu.dead-letters, in order."""
        return [record for record in self.sent if record.topic == DEAD_LETTERS]


class FakeApp(LedgerApp):
    """The app, as the joiner sees it. Records are appended to logs, and the joiner reads them in batches."""

    def __init__(self, *, grace_s: float = 0.0, partitions: int = 4) -> None:
        self.sender = FakeSender()
        super().__init__()
        self.reader = self
        self.ends_asked = 0
        self.answering = True
        self.ahead_s = 0.0
        self.instruments = Instruments(INSTRUMENTS)
        self.joiner = Joiner(self.instruments, grace_s=grace_s, partitions=partitions, clock=self.now_s)
        self.joiner.app = cast("ReaderApp", self)
        self.logs = {Partition(topic, i): list[Record]() for topic in TOPICS for i in range(partitions)}
        self.begin({})

    # -- what the joiner may ask

    def ask_ends(self) -> None:
        """Asks where the partitions end. Tests answer those of the allocations."""
        self.ends_asked += 1
        if self.answering:
            ends = {tp: len(log) for tp, log in self.logs.items() if tp.topic != ALLOCATIONS}
            asyncio.get_running_loop().call_soon(self.joiner.ends, self.now_s(), ends)

    def now_s(self) -> float:
        """The monotonic clock: it stands still, but tests may set it ahead."""
        return 1_000.0 + self.ahead_s

    # -- what tests do

    def begin(self, positions: Mapping[Partition, int]) -> None:
        """Begin an epoch: these partitions are read from these positions, the others from where they were."""
        before = self.ledger.positions() or dict.fromkeys(self.logs, 0)
        self.ledger.forget()
        self.joiner.forget()
        self.ledger.begin({**before, **positions})

    def log(self, record: Sample | Allocations | NodeWorkloads, partition: int = 0, *, timestamp: int = 0) -> None:
        """Write a record, logged at a time in ms."""
        topic = {Sample: SAMPLES, Allocations: ALLOCATIONS, NodeWorkloads: WORKLOADS}[type(record)]
        key = node_key(record.cluster, record.node)
        self.logs[Partition(topic, partition)].append(Record(key, msgspec.json.encode(record), timestamp))

    def batch(self, topic: str, partition: int = 0, limit: int = 10**6) -> list[tuple[Slot, Any]]:
        """The next records of a partition."""
        tp = Partition(topic, partition)
        offset = self.ledger.expected(tp)
        assert offset is not None
        return [
            (
                self.ledger.admit(tp, offset + i, len(record.value or b"")),
                record._replace(topic=topic, partition=partition),
            )
            for i, record in enumerate(self.logs[tp][offset : offset + limit])
        ]

    async def read(self, *topics: str, partition: int = 0) -> None:
        """Let the joiner read everything in these topics."""
        for topic in topics:
            await self.joiner.handle(self.batch(topic, partition))
            await settle()
            await self.look()

    async def look(self) -> None:
        """Let the joiner check the clock, and what the broker has answered."""
        for _ in range(2):
            try:
                await self.joiner.check_pending()
            except RuntimeError as error:
                self.fail(repr(error))
            await settle()

    def nodes(self) -> set[bytes]:
        """The keys of the nodes whose state is held."""
        return {key for partition in self.joiner._partitions.values() for key in partition.states}

    def position(self, topic: str, partition: int = 0) -> int:
        """The offset that would be committed."""
        offset = self.ledger.position(Partition(topic, partition))
        assert offset is not None
        return offset

    def total(self, name: str, *labels: str) -> float:
        """The value of a counter or gauge."""
        self.joiner.observe()
        row = next(row for row in INSTRUMENTS if row.name == f"gpustream_attribution_{name}")
        value = self.instruments.registry.get_sample_value(row.name, dict(zip(row.labels, labels, strict=True)))
        return value or 0.0


@contextlib.asynccontextmanager
async def looking(app: FakeApp, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let the joiner check the clock in a loop, without pause."""
    monkeypatch.setattr(component, "_WATCH_EVERY_S", 0.0)
    task = asyncio.create_task(app.joiner.watch())
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until_sent(app: FakeApp, count: int) -> None:
    """Wait until that many records were sent."""
    async with asyncio.timeout(10):
        while len(app.sender.sent) < count:  # noqa: ASYNC110 - the sender is not to know who waits
            await asyncio.sleep(0)
    await settle()
