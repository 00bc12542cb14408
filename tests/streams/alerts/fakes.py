"""A broker with one partition of each topic, and workers that are killed at the worst moments."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, cast

import msgspec

from delivery.instruments import Instruments
from delivery.ledger import Partition
from delivery.sender import Unsendable
from delivery.settings import DEAD_LETTERS
from streams.alerts.component import (
    ALERTS,
    GROUPS,
    INSTRUMENTS,
    MEMBERS,
    STATE,
    WORKLOADS,
    AlertWorker,
)
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from streams.app import ReaderApp
from streams.caught_up import BREAK_S
from streams.reader import Batch
from streams.stage import ATTRIBUTED, SAMPLES, Clocks
from tests.eventually import settle
from tests.streams.alerts.stories import SHORT_RULES
from tests.streams.fakes import LedgerApp, Record
from topics.alerts import Alert
from topics.topic import node_key

TICKS, REPORTS = Partition(ATTRIBUTED, 0), Partition(MEMBERS, 0)


class Broker:
    """The logs of all topics, and what the group has committed."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Record]] = defaultdict(list)
        self.committed = self.committed_reports = 0

    def log(self, tick: Tick, *, logged_ms: int | None = None) -> None:
        """Write a tick, logged at a time in ms (default: its own)."""
        key = node_key(tick.cluster, tick.node)
        at_ms = tick.ts_ms if logged_ms is None else logged_ms
        self.logs[ATTRIBUTED].append(Record(key, msgspec.json.encode(tick), at_ms))

    def alerts(self) -> list[Alert]:
        """What was written to gpu.alerts, less the deletions."""
        return [msgspec.json.decode(r.value, type=Alert) for r in self.logs[ALERTS] if r.value is not None]


class _InFlight(NamedTuple):
    topic: str
    record: Record
    acknowledged: "asyncio.Future[int]"


class FakeSender:
    """Takes records at once; they land, and are acknowledged, when a test calls ``land``. An acknowledgement shows that
    the worker's clock is ahead by ``differs_ms``."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.ahead_ms: int | None = None
        self.differs_ms = 0
        self.flying: list[_InFlight] = []
        self.holding = False
        self.largest = 10**9

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> "asyncio.Future[int]":
        assert partition == (None if topic in (ALERTS, DEAD_LETTERS) else 0)
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if len(value or b"") > self.largest:
            acknowledged.set_exception(Unsendable("too large"))
            return acknowledged
        self.flying.append(_InFlight(topic, Record(key, value), acknowledged))
        if not self.holding:
            self.land()
        return acknowledged

    def land(self, count: int = 10**6, *, topic: str | None = None, acknowledge: bool = True) -> None:
        """Let some of the records in flight arrive, in order."""
        for record in [s for s in self.flying if topic is None or s.topic == topic][:count]:
            self.flying.remove(record)
            self.broker.logs[record.topic].append(record.record)
            if acknowledge and not record.acknowledged.done():
                self.ahead_ms = self.differs_ms
                record.acknowledged.set_result(len(self.broker.logs[record.topic]) - 1)


class FakeClocks(Clocks):
    """The worker's clocks, as they are set."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.started_ms = 0

    def monotonic_s(self) -> float:
        return self.at_s

    def now_ms(self) -> int:
        return self.started_ms + round(self.at_s * 1000)


class Worker(LedgerApp):
    """A worker that has the partition, as a stage sees its app. For another stream ``reads`` differ: its input,
    its state, and what it reads beside."""

    reads: tuple[str, str, tuple[str, ...]] = (ATTRIBUTED, STATE, (WORKLOADS, MEMBERS, GROUPS))
    stage: Any

    def __init__(self, broker: Broker, rules: Rules = SHORT_RULES) -> None:
        self.broker, self.sender = broker, FakeSender(broker)
        super().__init__()
        self.reader = self
        self.input_ends: dict[Partition, int] = {}
        self.torn: frozenset[int] = frozenset()
        self.clocks = FakeClocks()
        self.make(rules)
        self.stage.app = cast("ReaderApp", self)
        self.state_read = 0

    def make(self, rules: Rules) -> None:
        self.instruments = Instruments(INSTRUMENTS)
        self.stage = AlertWorker(self.instruments, rules, partitions=1, clocks=self.clocks)

    # -- what the watch may ask

    def pending_states(self) -> list[Partition]:
        return []

    # -- what happens

    async def start(self) -> None:
        """Be assigned the partition: read the state, then the ticks from what was committed."""
        self.ledger.forget()
        self.stage.forget()
        self.input_ends = {TICKS: len(self.broker.logs[ATTRIBUTED]), REPORTS: len(self.broker.logs[MEMBERS])}
        _, state, others = self.reads
        beside = {Partition(topic, 0): 0 for topic in others} | {REPORTS: self.broker.committed_reports}
        self.ledger.begin({TICKS: self.broker.committed, Partition(state, 0): self.state_read, **beside})
        await self.read(state)

    async def read(self, topic: str = ATTRIBUTED, count: int = 10**6, *, ends_after: int = 10**6) -> None:
        """Read the next records of a topic, and run everything that follows from them."""
        batch = self.fetch(topic, count)
        await self.take(batch, ends_after=ends_after)
        if topic == self.reads[1]:
            self.state_read += len(batch)

    def fetch(self, topic: str, count: int = 10**6) -> Batch:
        """The next records of a topic, on their way to the stage."""
        tp = Partition(topic, 0)
        offset = self.ledger.expected(tp)
        assert offset is not None
        records = self.broker.logs[topic][offset : offset + count]
        fetched = [record._replace(topic=tp.topic, partition=tp.partition) for record in records]
        return [(self.ledger.admit(tp, offset + i, 10), record) for i, record in enumerate(fetched)]

    async def take(self, batch: Batch, *, ends_after: int = 10**6) -> None:
        """Give the stage a batch, and run everything that follows from it, or until so many records
        have been written (``ends_after``), at which the worker ends."""
        taking = asyncio.create_task(self.stage.handle(batch))
        await settle()
        while not taking.done():  # it waits for what it sends, or what an older epoch has sent
            if not ends_after:
                taking.cancel()
            ends_after -= 1
            self.sender.land(1)
            await settle()

    async def live(self, count: int = 10**6) -> None:
        """Read ticks, and the states that were written meanwhile."""
        await self.read(ATTRIBUTED, count)
        await self.read(self.reads[1])

    def commit(self) -> None:
        """Commit what is finished."""
        self.broker.committed = self.position()
        self.broker.committed_reports = self.ledger.position(REPORTS) or 0

    def position(self) -> int:
        """The offset that would be committed."""
        offset = self.ledger.position(TICKS)
        assert offset is not None
        return offset

    def position_read(self) -> int:
        """The next offset to read."""
        return self.ledger.expected(TICKS) or 0

    async def wait(self, seconds: float, *, samples_end: int | None = None, asking: bool = True) -> None:
        """Let time pass: the broker is asked where the partitions end, and every node is checked."""
        step_s = BREAK_S / 2
        while seconds > 0:
            self.clocks.at_s += min(step_s, seconds)
            seconds -= step_s
            if asking:
                ends = {Partition(topic, 0): len(self.broker.logs[topic]) for topic in self.reads[:2]}
                samples = {} if samples_end is None else {Partition(SAMPLES, 0): samples_end}
                self.stage.ends(self.clocks.at_s, {**ends, **samples})
            self.stage.check_partition(0)
            await settle()

    def kill(self, chance: Random) -> None:
        """End at once: some of the records in flight arrive, and no acknowledgement is seen."""
        for topic in dict.fromkeys(record.topic for record in self.sender.flying):
            self.sender.land(chance.randint(0, 3), topic=topic, acknowledge=False)
        for task in self.stage._write_tasks.running:
            task.cancel()

    def total(self, name: str, *labels: str) -> float:
        """The value of a counter or gauge."""
        self.stage.observe()
        row = next(row for row in INSTRUMENTS if row.name == f"gpustream_alerts_{name}")
        value = self.instruments.registry.get_sample_value(row.name, dict(zip(row.labels, labels, strict=True)))
        return value or 0.0
