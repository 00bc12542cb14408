"""Ticks that were read, on their way into requests: a lane for each node, and the requests that are under way.

In: records, those of a node in their order. Out: requests; what became of each record, to whoever read it.
State: the lanes, and what is under way. Nothing of it outlives the process: Kafka has the records.

A node has one request under way at a time. A request has ticks of many nodes, of whatever partitions, the oldest first.
A very large tick has one to itself.
Several ticks of a node share one only if the node's last tick was accepted whole and they write just its series: then
nothing of them is refused for what it is, after a later tick is in and nothing can be sent again.

A tick that is ten minutes later than one of a backlog waits for it: Prometheus refuses what is an hour older than its
newest sample. What has not moved for a minute is not waited for.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from weakref import WeakSet

from delivery.dead_letters import Abandoned, Record
from delivery.ledger import Slot
from sinks.outcomes import Undecodable, decoded
from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.remote_write.refusals import Delivered, Deliverer
from sinks.series.tick import SeriesTick, decode
from sinks.series.windows import NodeWindow
from topics.attributed import TOPIC

MAX_BYTES = 4 << 20
"""A request has about so many bytes before it is compressed, or one tick."""

LARGE_BYTES = MAX_BYTES // 4
"""A tick that takes so many goes alone: others would wait long for it."""

MAX_RECORDS = 500
"""A request stands for so many records at most; those that say nothing new need no room in it."""

APART_MS = 10 * 60_000
"""A tick may be so much later than the oldest one of a backlog."""

BACKLOG_MS = 60_000
"""What Kafka has had for longer is a backlog."""

PATIENCE_S = 60.0
"""So long a backlog that does not move is waited for."""


@dataclass(slots=True, eq=False)
class ReadRecord:
    """A record and what it says: a tick, an error, or neither if it is a replay. It is decoded when its turn comes.

    ``in_doubt``: a process before this one may have sent it. ``window``: it is the last one of that, and ``before``
    are the others, of which only that is kept. It was read at ``heard_s``, if it has a window.
    """

    record: Record
    slot: Slot
    in_doubt: bool
    sample: SeriesTick | None = None
    tick: NodeTick | None = None
    error: str = ""
    window: NodeWindow | None = None
    heard_s: float = 0.0
    before: list[tuple[Slot, SeriesTick]] = field(default_factory=list)


class Ended(NamedTuple):
    """A record that was in a request, and what became of its tick, if it has one."""

    read: ReadRecord
    result: Delivered | None


@dataclass(slots=True, eq=False)
class Lane:
    """The records of a node that wait, in order. ``busy``: a request with those before them is under way.

    ``settle`` is called with those that were in a request, in order; then ``moved`` is set. ``abandon``: nothing more
    is to be sent.
    """

    series: OpenSeries
    settle: Callable[[Sequence[Ended]], Awaitable[None]]
    moved: asyncio.Event
    abandon: asyncio.Event
    waiting: deque[ReadRecord] = field(default_factory=deque)
    busy: bool = False

    def head(self) -> ReadRecord | None:
        """The first of them, decoded."""
        if not self.waiting:
            return None
        head = self.waiting[0]
        if head.sample is None and not head.error:
            try:
                head.sample = decoded(head.record, decode, TOPIC.name)
            except Undecodable as error:
                head.error = str(error)
        return head

    def take(self, request: "SharedRequest", until_ms: float) -> None:
        """Put the next tick into a request, and those after it that may share it with it."""
        before: SeriesTick | None = None
        while (read := self.head()) is not None and not request.is_full():
            alone, sample = False, read.sample
            verdict = "replay" if sample is None else self.series.verdict(sample, before)
            if sample is not None and verdict != "replay":
                if before is not None and not before.ts_ms < sample.ts_ms <= until_ms:
                    return
                tick = self.series.tick(sample, read.window)
                is_large = tick.size.bytes >= LARGE_BYTES
                alone = is_large or verdict == "new_log" or not self.series.is_proven(tick)
                if (before is not None and alone) or (is_large and request.parts):
                    return
                before, read.tick = sample, tick
            self.waiting.popleft()
            request.add(self, read)
            if alone:
                return


@dataclass(slots=True, weakref_slot=True, eq=False)
class Progress:
    """How far somebody has got: the time of the oldest tick that is not finished, when it was logged, and since when.

    ``ts_ms`` 0: that is not known yet. ``at_end``: nothing is unfinished.
    """

    since_s: float
    ts_ms: int = 0
    logged_ms: int = 0
    at_end: bool = False

    def move(self, read: ReadRecord, now_s: float) -> None:
        """It has got to a record."""
        if read.sample is not None:
            self.ts_ms, self.logged_ms = read.sample.ts_ms, read.record.timestamp
        self.since_s, self.at_end = now_s, False


class SharedRequest:
    """Records of many lanes. ``progress`` is that of its oldest tick."""

    def __init__(self, abandon: asyncio.Event, first: ReadRecord, max_samples: int, now_s: float) -> None:
        self.abandon = abandon
        self.progress = Progress(now_s)
        self.progress.move(first, now_s)
        self.parts: dict[Lane, list[ReadRecord]] = {}
        self._max_samples = max_samples
        self._samples = self._bytes = self._records = 0

    def is_full(self) -> bool:
        """Whether nothing more is to be put in."""
        return self._samples >= self._max_samples or self._bytes >= MAX_BYTES or self._records >= MAX_RECORDS

    def add(self, lane: Lane, read: ReadRecord) -> None:
        """Put in the next record of a lane."""
        self.parts.setdefault(lane, []).append(read)
        self._records += 1
        if read.tick is not None:
            size = read.tick.size
            self._samples += size.samples
            self._bytes += size.bytes if size.bytes < LARGE_BYTES else MAX_BYTES


class Queue:
    """What all partitions of a sink have to send. ``clock_s`` never steps back, ``wall_s`` is the time of day.

    ``partitions`` has how far each of them has got. ``failure`` is what ended a request that should not have.
    """

    def __init__(
        self,
        deliverer: Deliverer,
        *,
        at_once: int,
        max_samples: int,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.partitions: WeakSet[Progress] = WeakSet()
        self.failure: BaseException | None = None
        self.clock_s = clock_s
        self._deliverer, self._at_once, self._max_samples, self._wall_s = deliverer, at_once, max_samples, wall_s
        self._ready: list[tuple[int, int, Lane]] = []
        self._turns = count()
        self._requests: dict[asyncio.Task[None], SharedRequest] = {}
        self._pumping = False

    def ready(self, lane: Lane) -> None:
        """A lane has records that wait, and is not busy."""
        head = lane.head()
        if head is not None:
            ts_ms = head.sample.ts_ms if head.sample else 0
            heapq.heappush(self._ready, (ts_ms, next(self._turns), lane))

    def pump(self) -> None:
        """Send what may be sent, one request each turn of the loop, from the next on: what several partitions were
        given in this turn goes together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if len(self._requests) < self._at_once and (request := self._next()) is not None:
            task = asyncio.ensure_future(self._send(request))
            self._requests[task] = request
            task.add_done_callback(self._sent)
            self.pump()

    def _next(self) -> SharedRequest | None:
        """The next request: the oldest ticks, as many as it takes."""
        while self._ready and (self._ready[0][2].abandon.is_set() or not self._ready[0][2].waiting):
            heapq.heappop(self._ready)
        if not self._ready or (first := self._ready[0][2].head()) is None:
            return None
        request = SharedRequest(self._ready[0][2].abandon, first, self._max_samples, self.clock_s())
        until_ms = self._until_ms(request.progress)
        while self._ready and self._ready[0][0] <= until_ms and not request.is_full():
            turn = heapq.heappop(self._ready)
            lane = turn[2]
            if lane.abandon.is_set() or not lane.waiting:
                continue
            lane.take(request, until_ms)
            lane.busy = lane in request.parts
            if not lane.busy:  # its tick goes alone
                heapq.heappush(self._ready, turn)
                break
        return request if request.parts else None

    def _until_ms(self, oldest: Progress) -> float:
        """The latest tick that may be sent now; ``oldest`` is what would be sent first.

        A tick that was logged just now does not wait for partitions that are not opened yet.
        """
        now_s, now_ms = self.clock_s(), self._wall_s() * 1000
        is_live = now_ms - oldest.logged_ms <= BACKLOG_MS
        backlogs = [
            progress.ts_ms
            for progress in (oldest, *self.partitions, *(request.progress for request in self._requests.values()))
            if not progress.at_end
            and now_ms - progress.logged_ms > BACKLOG_MS
            and now_s - progress.since_s < PATIENCE_S
            and (progress.ts_ms or not is_live)
        ]
        return min(backlogs, default=math.inf) + APART_MS

    async def _send(self, request: SharedRequest) -> None:
        """Send a request, and settle what was in it."""
        ticks = [read.tick.groups for reads in request.parts.values() for read in reads if read.tick]
        results = iter(await self._deliverer.deliver(ticks, request.abandon))
        for lane, reads in request.parts.items():
            await lane.settle([Ended(read, next(results) if read.tick else None) for read in reads])

    def _sent(self, task: asyncio.Task[None]) -> None:
        """A request is over. What was not settled, as it was abandoned, is read again by whoever has it then."""
        request = self._requests.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Abandoned):
            self.failure = error
        for lane in request.parts:
            lane.busy = False
            lane.moved.set()
            self.ready(lane)
        self.pump()

    async def close(self) -> None:
        """Give up what is under way."""
        self._at_once, tasks = 0, list(self._requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
