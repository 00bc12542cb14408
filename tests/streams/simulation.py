"""A broker, a consumer group and processes that read, all in memory and on a simulated clock.

The broker keeps what it was asked to keep and nothing else; the client is as contrary as the real one may be: whatever
is awaited takes its time, so that partitions go in the middle of it, and a commit that is tried again is sent as by the
member of that time. :class:`World` holds what is promised against what
happens: a commit past an unfinished record, a hole, an input before its state, all fail where they happen.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from aiokafka.errors import IllegalStateError, KafkaConnectionError

from delivery.group import ConsumerGroup
from delivery.ledger import Partition, Slot
from streams.reader import Batch, Reader, Reads

INPUT = "ticks"
STATES = ("owners", "labels")
TOPICS = (INPUT, *STATES)
MISSED_CALL_S = 1.0
RETRY_S = 0.1


@dataclass(frozen=True)
class Record:
    """A record as the client gives it; ``timestamp`` in ms of log time."""

    offset: int
    value: bytes = b"x" * 10
    key: bytes | None = None
    timestamp: int = 1_000_000


@dataclass
class Log:
    """One partition: offsets that hold a record, and where it begins and ends."""

    begin: int = 0
    end: int = 0
    records: dict[int, Record] = field(default_factory=dict)

    def append(self, count: int = 1, *, timestamp: int = 1_000_000) -> None:
        """Store so many records."""
        for _ in range(count):
            self.records[self.end] = Record(self.end, timestamp=timestamp)
            self.end += 1

    def mark(self) -> None:
        """Store a transaction's marker, which no reader gets."""
        self.end += 1

    def compact(self, offset: int) -> None:
        """Lose the record at an offset, and keep the offset."""
        self.records.pop(offset, None)

    def retain(self, begin: int) -> None:
        """Lose everything before an offset."""
        self.begin = max(self.begin, min(begin, self.end))
        self.records = {offset: record for offset, record in self.records.items() if offset >= self.begin}

    def recreate(self) -> None:
        """Delete and create the log again."""
        self.begin = self.end = 0
        self.records = {}


@dataclass
class Broker:
    """The logs, the group's commits, and the current faults."""

    partitions: int = 2
    logs: dict[Partition, Log] = field(default_factory=lambda: defaultdict(Log))
    committed: dict[Partition, int] = field(default_factory=dict)
    away: bool = False
    commits: str = "taken"  # or refused, failed, hanging, unreachable
    on_commit: Callable[[Partition, int], None] = lambda _tp, _offset: None

    def all(self) -> set[Partition]:
        """Every partition of every topic."""
        return {Partition(topic, number) for topic in TOPICS for number in range(self.partitions)}


class FakeClient:
    """The consumer of one process. ``chance`` decides how long everything takes, and what is late."""

    def __init__(self, broker: Broker, chance: random.Random) -> None:
        self.broker, self.chance, self.offsets = broker, chance, self
        self.tps: set[Partition] = set()
        self.flow = True
        self.generation = 0
        self.max_records = 5
        self.positions_: dict[Partition, int] = {}
        self.seeks: list[dict[Partition, int]] = []
        self.asked_to_commit: list[dict[Partition, int]] = []

    def assign(self, tps: set[Partition]) -> None:
        """Assign these partitions, at the positions that the client assumes."""
        self.generation += 1
        self.tps = set(tps)
        self.positions_ = {tp: self.broker.committed.get(tp, self.broker.logs[tp].begin) for tp in tps}

    def assignment(self) -> set[Partition]:
        return set(self.tps)

    def kafka_name(self, tp: Partition) -> str:
        return str(tp)

    def can_fetch(self) -> bool:
        return self.flow

    async def fetch(self, active: set[Partition], timeout_s: float) -> Mapping[Partition, list[Record]]:
        assert active, "nothing asked for, which the real client takes for everything"
        await self._answer(fails=False)
        records = {tp: log for tp in sorted(active & self.tps) if (log := self._read(tp))}
        if not records or self.broker.away:
            await asyncio.sleep(timeout_s)
        return {} if self.broker.away else records

    def _read(self, tp: Partition) -> list[Record]:
        if self.broker.away:
            return []
        log = self.broker.logs[tp]
        if not log.begin <= self.positions_[tp] <= log.end:
            self.positions_[tp] = log.begin
        records = self._from(log, self.positions_[tp])
        self.positions_[tp] = records[-1].offset + 1 if records else log.end
        return records

    def _from(self, log: Log, position: int) -> list[Record]:
        return [log.records[offset] for offset in range(position, log.end) if offset in log.records][: self.max_records]

    def seek(self, positions: Mapping[Partition, int]) -> None:
        self.seeks.append(dict(positions))
        for tp, offset in positions.items():
            self._check_owner(tp)
            self.positions_[tp] = offset

    async def positions(self, tps: Iterable[Partition]) -> Mapping[Partition, int]:
        await asyncio.sleep(0)
        return {tp: self.positions_[tp] for tp in tps if tp in self.tps}

    async def committed(self, tp: Partition) -> int | None:
        await self._answer()
        self._check_owner(tp)
        return self.broker.committed.get(tp)

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        await self._answer()
        return {tp: self.broker.logs[tp].begin for tp in tps}

    async def log_ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        return await self.ends(tps)

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        await self._answer()
        return {tp: self.broker.logs[tp].end for tp in tps}

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        await self._answer()
        return {tp: self._first_since(tp, ms) for tp, ms in times_ms.items()}

    def _first_since(self, tp: Partition, at_ms: int) -> int | None:
        records = self.broker.logs[tp].records
        return min((offset for offset, record in records.items() if record.timestamp >= at_ms), default=None)

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        await self._answer()
        return {tp: self._time_of(tp, offset) for tp, offset in offsets.items()}

    def _time_of(self, tp: Partition, position: int) -> int | None:
        records = self.broker.logs[tp].records
        first = min((offset for offset in records if offset >= position), default=None)
        return None if first is None else records[first].timestamp

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        self.asked_to_commit.append(dict(offsets))
        while self.broker.commits == "unreachable":  # noqa: ASYNC110 - tried again, as whatever member it is by then
            await asyncio.sleep(RETRY_S)
        generation = self.generation
        await self._answer(fails=False)
        match self.broker.commits:
            case "hanging":
                await asyncio.get_running_loop().create_future()
            case "failed":
                raise KafkaConnectionError("no coordinator")
            case "refused":
                return False
        if generation != self.generation:
            return False
        for tp, offset in offsets.items():
            self.broker.on_commit(tp, offset)
            self.broker.committed[tp] = offset
        return True

    def _check_owner(self, tp: Partition) -> None:
        if tp not in self.tps:
            raise IllegalStateError(f"{tp} is not assigned")

    async def _answer(self, *, fails: bool = True) -> None:
        """Take some time; fail where the broker is away, as what asks it does."""
        await asyncio.sleep(self.chance.choice((0, 0, 0.001, 0.05, 0.3)))
        if fails and self.broker.away:
            await asyncio.sleep(MISSED_CALL_S)
            raise KafkaConnectionError("the broker is away")


class Process:
    """A reader with its loop, its agent and its commits. The agent finishes in any order, some of it late."""

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.client = FakeClient(world.broker, chance)
        reads = Reads(inputs=(INPUT,), states=STATES, max_open_bytes=world.max_open_bytes)
        self.reader = Reader(self, self._deliver, reads, lambda _: asyncio.sleep(chance.choice((0, 0, 0.2))))
        self.reader.group = cast("ConsumerGroup", self.client)
        self.memory: dict[Partition, set[int]] = defaultdict(set)
        self.to_learn: dict[Partition, int] = {}
        self.last: dict[tuple[int, Partition], int] = {}
        self.queue: asyncio.Queue[Batch] = asyncio.Queue(maxsize=3)
        self.failed: list[BaseException] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._open: list[tuple[Slot, Record]] = []

    def start(self) -> None:
        """Begin to read."""
        work = (self._loop, self._commit, self._agent, self._finish)
        self._tasks = [asyncio.create_task(self._guarded(loop)) for loop in work]

    def kill(self) -> None:
        """End as if by SIGKILL."""
        for task in self._tasks:
            task.cancel()
        self.client.generation += 1
        self.client.tps = set()

    async def revoke(self) -> None:
        """Call what the client calls before it joins the group again."""
        self.client.flow = False
        await self.reader.revoked()

    async def assign(self, tps: set[Partition]) -> None:
        """Set an assignment as the client does: it has it for a moment before it reports it."""
        self.client.assign(tps)
        self.to_learn = {tp: self.world.broker.logs[tp].end for tp in tps if tp.topic in STATES}
        await asyncio.sleep(self.chance.choice((0, 0, 0.2)))
        self.client.flow = True
        self.reader.assigned(tps)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                await asyncio.sleep(0)
                await work()
        except Exception as error:
            self.failed.append(error)
            raise

    async def _loop(self) -> None:
        await self.reader.turn()

    async def _commit(self) -> None:
        await asyncio.sleep(1)
        await self.reader.commit()

    async def _deliver(self, batch: Batch) -> None:
        await self.queue.put(batch)

    async def _agent(self) -> None:
        for slot, record in await self.queue.get():
            if slot.epoch != self.reader.ledger.epoch:
                continue
            self._check_sequence(slot)
            if slot.tp.topic in STATES:
                self.memory[slot.tp].add(record.offset)
                self.reader.ledger.finish(slot)
                continue
            self._check_state(slot.tp)
            self._open.append((slot, record))
            await asyncio.sleep(self.chance.choice((0, 0, 0, 0.01)))

    async def _finish(self) -> None:
        await asyncio.sleep(self.chance.choice((0.01, 0.01, 0.1, 3.0 if self.world.slow else 0.1)))
        self.chance.shuffle(self._open)
        for _ in range(min(len(self._open), 4)):
            slot, record = self._open.pop()
            self.world.finished(slot.tp, record)
            self.reader.ledger.finish(slot)
            if self.chance.random() < 0.1:
                self.reader.ledger.finish(slot)

    def _check_sequence(self, slot: Slot) -> None:
        """Within an epoch, each record of a partition comes once, in order, and none that exists is left out."""
        before = self.last.get((slot.epoch, slot.tp))
        self.last[slot.epoch, slot.tp] = slot.offset
        if before is not None:
            assert slot.offset > before, f"{slot.tp}: {slot.offset} after {before}"
            records = self.world.broker.logs[slot.tp].records
            missed = [offset for offset in range(before + 1, slot.offset) if offset in records]
            assert not missed, f"{slot.tp}: left out {missed}"

    def _check_state(self, tp: Partition) -> None:
        """No input before all of its partition's state was learned, to where it ended at the assignment."""
        for topic in STATES:
            state = Partition(topic, tp.partition)
            required = {offset for offset in self.world.broker.logs[state].records if offset < self.to_learn[state]}
            assert required <= self.memory[state], f"{tp} before {state}: {sorted(required - self.memory[state])}"

    # -- the stage

    def forget(self) -> None:
        """Nothing waits here but slots of the old epoch, which are finished all the same, to no effect."""

    def drop(self, partitions: frozenset[int]) -> None:
        self.memory = defaultdict(
            set, {tp: offsets for tp, offsets in self.memory.items() if tp.partition not in partitions}
        )

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        assert all(tp.topic == INPUT for tp in offsets)

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        raise AssertionError("nobody asked")


class World:
    """The broker, the processes and what was finished."""

    def __init__(self, seed: int, *, partitions: int = 2, max_open_bytes: int = 200) -> None:
        self.chance = random.Random(seed)
        self.broker = Broker(partitions=partitions, on_commit=self.check_commit)
        self.max_open_bytes = max_open_bytes
        self.slow = False
        self.done: dict[Partition, set[int]] = defaultdict(set)
        self.lives: list[Process] = []
        self.processes: list[Process] = []

    def log(self, topic: str, partition: int = 0) -> Log:
        return self.broker.logs[Partition(topic, partition)]

    def join(self) -> Process:
        """Add a process; it has nothing until the next rebalance."""
        process = Process(self, random.Random(self.chance.random()))
        self.processes.append(process)
        self.lives.append(process)
        process.start()
        return process

    def kill(self, index: int = 0) -> None:
        """Remove a process."""
        if self.processes:
            self.processes.pop(index % len(self.processes)).kill()

    async def rebalance(self, shares: list[int] | None = None) -> None:
        """Give partition number i to the process that ``shares`` names, all topics of it together."""
        await asyncio.gather(*(process.revoke() for process in self.processes))
        numbers = shares or [number % max(1, len(self.processes)) for number in range(self.broker.partitions)]
        for index, process in enumerate(self.processes):
            own_partitions = {tp for tp in self.broker.all() if numbers[tp.partition] % len(self.processes) == index}
            await process.assign(own_partitions)

    def finished(self, tp: Partition, record: Record) -> None:
        self.done[tp].add(record.offset)

    def unfinished(self, tp: Partition, below: int | None = None) -> list[int]:
        """The offsets whose records exist and were never finished."""
        records = self.broker.logs[tp].records
        return [offset for offset in records if offset not in self.done[tp] and (below is None or offset < below)]

    def check_commit(self, tp: Partition, offset: int) -> None:
        assert tp.topic == INPUT
        assert not self.unfinished(tp, offset), f"{tp}: {offset} committed past {self.unfinished(tp, offset)}"
        assert offset >= self.broker.committed.get(tp, 0), (
            f"{tp}: set back to {offset} from {self.broker.committed[tp]}"
        )

    async def settle(self, seconds: float = 90.0) -> None:
        """Let everything work again, for long enough."""
        self.broker.away, self.broker.commits, self.slow = False, "taken", False
        if not self.processes:
            self.join()
        await self.rebalance()
        await asyncio.sleep(seconds)

    def check_settled(self) -> None:
        """Nothing lost, nothing held, all committed, and nobody failed."""
        assert [error for process in self.lives for error in process.failed] == []
        for number in range(self.broker.partitions):
            tp = Partition(INPUT, number)
            assert self.unfinished(tp) == []
            last = max(self.broker.logs[tp].records, default=-1)
            assert self.broker.committed.get(tp, 0) >= last + 1, f"{tp}: {self.broker.committed} of {last + 1}"
        for process in self.processes:
            assert process.reader.ledger.open_bytes == 0
            assert process.reader.ledger.held.total() == 0
