"""Puts ticks that were read into requests: a lane of records for each node, and the requests in flight.

In: records, those of a node in their order. Out: requests, and the result of each record to the partition that read it.
State: the lanes and the requests in flight. If the process ends, they are lost, and the records are read again.

A node has one request in flight at a time. A request has ticks of many nodes and partitions, the oldest ticks first. A
very large tick has a request of its own. So has a tick of a node whose last one was refused, as after its clock was set
back: it will be refused, too, and all that shares its request would wait until that is found out. Several ticks of a
node share a request only if its last tick was accepted as a whole and they have exactly its series. Then none of them
will be refused for its content; if one were, after a later one was accepted, it could not be sent again.

A tick waits if it is more than ten minutes later than the oldest tick of a backlog: Prometheus refuses samples that are
an hour older than its newest one. A backlog that has not moved for a minute is not waited for.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakMethod, WeakSet

from delivery import clock
from delivery.dead_letters import Abandoned, Record
from delivery.ledger import Slot
from sinks.outcomes import Undecodable, decoded
from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.remote_write.refusals import Delivered, Deliverer
from sinks.series.tick import SeriesTick, decode
from sinks.series.windows import NodeWindow
from topics.attributed import TOPIC
from topics.samples import silent_after_s

MAX_BYTES = 4 << 20
"""The approximate size of a request before compression, unless it has only one tick."""

LARGE_BYTES = MAX_BYTES // 4
"""A tick of this size has a request of its own, because the other ticks would wait long for it."""

MAX_RECORDS = 500
"""The most records of a request; replays count, although they add nothing to it."""

MAX_CPU_S = 0.2
"""The CPU time after which nothing is added to a request: the event loop serves nobody else while it is made, and ticks
of nodes that are new, with labels and series of their own, take ten times that of others."""

MAX_AHEAD_MS = 10 * 60_000
"""A tick may be that much later than the oldest one of a backlog."""

BACKLOG_MS = 60_000
"""Records that have been in Kafka for longer than this are a backlog."""

STUCK_AFTER_S = 60.0
"""A backlog that has not moved for this time is not waited for."""

MAX_OPEN_S = 120.0
"""The longest time that a window stays open without a tick, because nothing after it is committed: no window is
longer."""


@dataclass(slots=True, eq=False)
class ReadRecord:
    """A record, and the tick decoded from it, or the error; neither if it is a replay. It is decoded in its turn.

    ``in_doubt``: an earlier process may have sent it. ``window``: the window of which it is the last record. Then it
    was read at ``read_s``, logged at ``log_s``, and ``earlier`` are the window's other records, without their devices.
    """

    record: Record
    slot: Slot
    in_doubt: bool
    sample: SeriesTick | None = None
    tick: NodeTick | None = None
    error: str = ""
    window: NodeWindow | None = None
    read_s: float = 0.0
    log_s: float = 0.0
    earlier: list[tuple[Slot, SeriesTick]] = field(default_factory=list)

    def open_for_s(self, at_least_s: float) -> float:
        """For how long its window stays open without another tick: until its node is silent, within bounds."""
        return min(MAX_OPEN_S, silent_after_s(self.sample.interval_ms if self.sample else None, at_least_s))


Sent = tuple[ReadRecord, Delivered | None]
"""A record that was in a request, and the result of its tick, if it has one."""


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting records of a node, in order. ``busy``: a request with earlier records of it is in flight.

    ``settle`` is called with the records of a request, in order; then ``moved`` is set. ``abandon``: send nothing more.
    A lane refers weakly to the partition and to its ``series``. So both are gone as soon as the partition's owner gives
    them up, with the series that its nodes claim. A request with their records may still be in flight then.
    """

    series: OpenSeries
    settle: WeakMethod[Callable[[Sequence[Sent]], Awaitable[None]]]
    moved: asyncio.Event
    abandon: asyncio.Event
    waiting: deque[ReadRecord] = field(default_factory=deque)
    busy: bool = False

    def head(self) -> ReadRecord | None:
        """The first waiting record, decoded."""
        if not self.waiting:
            return None
        head = self.waiting[0]
        if head.sample is None and not head.error:
            try:
                head.sample = decoded(head.record, decode, TOPIC.name)
            except Undecodable as error:
                head.error = str(error)
        return head

    def was_refused(self) -> bool:
        """Whether the first waiting record is of a node of whose last tick nothing was accepted."""
        head = self.head()
        return head is not None and head.sample is not None and self.series.was_refused(head.sample)

    def take(self, request: "SharedRequest", until_ms: float) -> None:
        """Put the next tick into a request, and those after it that may share the request with it."""
        previous: SeriesTick | None = None
        while (read := self.head()) is not None and not request.is_full():
            alone, fills, sample = False, False, read.sample
            verdict = "replay" if sample is None else self.series.verdict(sample, previous)
            if sample is not None and verdict != "replay":
                if previous is not None and not previous.ts_ms < sample.ts_ms <= until_ms:
                    return
                tick = self.series.tick(sample, read.window)
                is_large = tick.size.bytes >= LARGE_BYTES
                alone = is_large or verdict == "new_log" or not self.series.is_proven(tick)
                if (previous is not None and alone) or (is_large and request.parts):
                    return
                previous, read.tick, fills = sample, tick, is_large or self.series.was_refused(sample)
            self.waiting.popleft()
            request.add(self, read, fills=fills)
            if alone:
                return


@dataclass(slots=True, weakref_slot=True, eq=False)
class Progress:
    """The progress of a partition or a request: the time and log time of its oldest unfinished tick, and since when.

    ``ts_ms`` 0: the tick is not known yet. ``at_end``: nothing is unfinished.
    """

    since_s: float
    ts_ms: int = 0
    logged_ms: int = 0
    at_end: bool = False

    def move(self, read: ReadRecord, now_s: float) -> None:
        """Advance to a record."""
        if read.sample is not None:
            self.ts_ms, self.logged_ms = read.sample.ts_ms, read.record.timestamp
        self.since_s, self.at_end = now_s, False


class SharedRequest:
    """The records of many lanes that are sent together. ``progress`` is that of the oldest tick."""

    def __init__(self, abandon: asyncio.Event, first: ReadRecord, max_samples: int, now_s: float) -> None:
        self.abandon = abandon
        self.progress = Progress(now_s)
        self.progress.move(first, now_s)
        self.parts: dict[Lane, list[ReadRecord]] = {}
        self._max_samples = max_samples
        self._samples = self._bytes = self._records = 0
        self._ends_cpu_s = time.thread_time() + MAX_CPU_S

    def is_full(self) -> bool:
        """Whether nothing more should be added."""
        is_large = self._samples >= self._max_samples or self._bytes >= MAX_BYTES or self._records >= MAX_RECORDS
        return is_large or (self._records > 0 and time.thread_time() >= self._ends_cpu_s)

    def add(self, lane: Lane, read: ReadRecord, *, fills: bool) -> None:
        """Add the next record of a lane. ``fills``: nothing is to be added after it."""
        self.parts.setdefault(lane, []).append(read)
        self._records += 1
        if read.tick is not None:
            size = read.tick.size
            self._samples += size.samples
            self._bytes += MAX_BYTES if fills else size.bytes


class Queue:
    """The queue of all partitions of a sink. ``clock_s`` never steps back.

    ``partitions``: the progress of each. ``failure``: the unexpected error that ended a request.
    """

    def __init__(
        self,
        deliverer: Deliverer,
        *,
        at_once: int,
        max_samples: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partitions: WeakSet[Progress] = WeakSet()
        self.failure: BaseException | None = None
        self.clock_s = clock_s
        self._deliverer, self._at_once, self._max_samples = deliverer, at_once, max_samples
        self._ready: list[tuple[int, int, Lane]] = []
        self._turns = count()
        self._requests: dict[asyncio.Task[None], SharedRequest] = {}
        self._pumping = False

    def ready(self, lane: Lane) -> None:
        """Enqueue a lane that has waiting records and is not busy."""
        head = lane.head()
        if head is not None:
            ts_ms = head.sample.ts_ms if head.sample else 0
            heapq.heappush(self._ready, (ts_ms, next(self._turns), lane))

    def pump(self) -> None:
        """Start requests from the next turn of the event loop on, one in each turn.

        So the records that several partitions get in this turn share a request.
        """
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
        """The next request: the oldest ticks, as many as fit."""
        while self._ready and (self._ready[0][2].abandon.is_set() or not self._ready[0][2].waiting):
            heapq.heappop(self._ready)
        if not self._ready or (first := self._ready[0][2].head()) is None:
            return None
        request = SharedRequest(self._ready[0][2].abandon, first, self._max_samples, self.clock_s())
        until_ms, others = self._until_ms(request.progress), list[tuple[int, int, Lane]]()
        while self._ready and self._ready[0][0] <= until_ms and not request.is_full():
            turn = heapq.heappop(self._ready)
            lane = turn[2]
            if lane.abandon.is_set() or not lane.waiting:
                continue
            if request.parts and lane.was_refused():
                others.append(turn)
                continue
            lane.take(request, until_ms)
            lane.busy = lane in request.parts
            if not lane.busy:  # its tick needs a request of its own
                others.append(turn)
                break
        for turn in others:
            heapq.heappush(self._ready, turn)
        return request if request.parts else None

    def _until_ms(self, oldest: Progress) -> float:
        """The time of the latest tick that may be sent now; ``oldest`` is the first one to send.

        A live tick does not wait for partitions whose oldest tick is not known yet.
        """
        now_s, now_ms = self.clock_s(), clock.now_ms()
        is_live = now_ms - oldest.logged_ms <= BACKLOG_MS
        backlogs = [
            progress.ts_ms
            for progress in (oldest, *self.partitions, *(request.progress for request in self._requests.values()))
            if not progress.at_end
            and now_ms - progress.logged_ms > BACKLOG_MS
            and now_s - progress.since_s < STUCK_AFTER_S
            and (progress.ts_ms or not is_live)
        ]
        return min(backlogs, default=math.inf) + MAX_AHEAD_MS

    async def _send(self, request: SharedRequest) -> None:
        """Send a request, and settle its records."""
        ticks = [read.tick.groups for reads in request.parts.values() for read in reads if read.tick]
        results = iter(await self._deliverer.deliver(ticks, request.abandon))
        for lane, reads in request.parts.items():
            sent = [(read, next(results) if read.tick else None) for read in reads]
            if (settle := lane.settle()) is not None:
                await settle(sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """A request has ended. Records that an abandoned one did not settle are read again by their next owner."""
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
        """Cancel the requests in flight."""
        self._at_once, tasks = 0, list(self._requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
