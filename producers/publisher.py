"""How a node's ticks reach Kafka: each snapshot before the samples that name it, in order, through outages.

In: each tick's devices and containers. Out: records on gpu.samples and gpu.allocations, keyed by ``cluster/node``.
State: the ticks that wait, in a ring bounded by bytes and age, and those in flight.
On failure: a broker that is away is waited for, and the oldest tick gives way and is counted; a tick keeps its ``seq``,
so the gap is visible downstream. What can never be sent is dropped and counted. A snapshot that can never be sent
leaves its samples to go without: their reader finds that it never came.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from delivery.instruments import Instruments
from producers import instruments as names
from producers.numbering import Containers, Numbering
from producers.ring import Ring, Waiting
from producers.sending import LARGEST_VALUE_BYTES, RecordSender, SnapshotSender
from topics import samples
from topics.topic import node_key

MAX_IN_FLIGHT = 64
"""Ticks of one node that may wait for their acknowledgement: enough to catch up at thousands per second."""


RESIZED = 0.25
"""By this share the size of ticks has to change before it is worked out again how many fit."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """How much of one node is kept while Kafka is away: ``max_bytes`` of ticks, none older than ``max_age_s``."""

    max_bytes: int = 16 * 1024 * 1024
    max_age_s: float = 900.0


class Fits(NamedTuple):
    """How many ticks of so many bytes a buffer holds."""

    ticks: int
    tick_bytes: int


class NodePublisher:
    """The sending half of one node. Call :meth:`publish` each tick, and keep :meth:`run` running beside it.

    ``run_id`` is milliseconds since the epoch at the start, and differs from that of any earlier publisher of the node.
    ``fits`` says how many ticks like the last one the buffer holds; it is worked out when their size has changed.
    ``clock`` gives seconds and never steps back. Raises ValueError where ``cluster`` or ``node`` can't be a name.
    """

    def __init__(
        self,
        sender: RecordSender,
        instruments: Instruments,
        *,
        cluster: str,
        node: str,
        run_id: int,
        buffer: Buffer = Buffer(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._numbering = Numbering(cluster=cluster, node=node, run_id=run_id)
        self._key = node_key(cluster, node)
        self._sender, self._instruments, self._clock = sender, instruments, clock
        self.sampled_values = 0
        self.fits = Fits(0, 0)
        self._ring = Ring(max_bytes=buffer.max_bytes, max_age_s=buffer.max_age_s)
        self._counted = (0, 0)
        self._in_flight: dict[Waiting, None] = {}
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._snapshots = SnapshotSender(sender, instruments, self._key, clock)
        instruments.counter(names.RUNS).inc()

    @property
    def run_id(self) -> int:
        """The run of the last tick."""
        return self._numbering.run_id

    def sampled(self) -> dict[int, int]:
        """Every run so far, and the ``seq`` of its last tick, dropped ones included."""
        return self._numbering.runs()

    @property
    def held(self) -> int:
        """Ticks that wait to be sent or to be acknowledged."""
        return len(self._ring) + len(self._in_flight)

    def waited_s(self) -> float:
        """For how long the oldest held tick has waited; 0 where none is held."""
        oldest = next(iter(self._in_flight), None) or self._ring.head()
        return self._clock() - oldest.made_at_s if oldest else 0.0

    def publish(
        self,
        ts_ms: int,
        devices: Sequence[Mapping[str, Any]],
        containers: Containers,
        in_force: Callable[[int], Containers] | None = None,
    ) -> int:
        """Take a tick read at ``ts_ms``, without waiting; gives its ``seq`` in :attr:`run_id`.

        ``devices`` and ``containers`` are dicts as in gpu.samples and gpu.allocations; ``containers`` None: there is no
        kubelet. ``in_force`` gives the containers of an earlier time, for events. What is given may be changed once
        this returns.
        """
        before = self._numbering.run_id
        tick = self._numbering.step(ts_ms, devices, containers, in_force)
        if tick.run_id != before:
            self._instruments.counter(names.RUNS).inc()
        self._instruments.counter(names.MADE).inc()
        values = sum(len(device.get("metrics") or ()) for device in devices)
        self.sampled_values += values
        self._instruments.counter(names.VALUES).inc(values)
        if tick.value is None:
            self._count_dropped("unencodable")
        elif len(tick.value) > LARGEST_VALUE_BYTES:
            self._count_dropped("too_large")
        else:
            if abs(len(tick.value) - self.fits.tick_bytes) > RESIZED * self.fits.tick_bytes:
                self.fits = Fits(self._ring.capacity(tick.value), len(tick.value))
            self._push(Waiting(tick.value, tick.snapshots, self._clock()))
        return tick.seq

    async def run(self) -> None:
        """Send what is published, for as long as it runs. Cancel it to stop, after :meth:`drain`."""
        while True:
            await self._sender.ready()
            self._expire()
            head = self._ring.head()
            if head is None or len(self._in_flight) >= self._most_in_flight(head):
                await self._sleep()
            elif (snapshot := self._snapshots.due(head.snapshots)) is not None:
                await self._snapshots.send(snapshot)
            else:
                await self._send(self._ring.pop())

    async def drain(self, timeout_s: float) -> int:
        """Wait until all is acknowledged, at most ``timeout_s``; what is left is dropped and counted, and its number
        returned. Publish nothing after it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        left = self.held
        self._ring.clear()
        self._in_flight.clear()
        self._ring.in_flight_bytes = 0
        self._instruments.counter(names.DROPPED, "stopped").inc(left)
        self._count_held()
        return left

    def _push(self, tick: Waiting) -> None:
        self._expire()
        for dropped in self._ring.push(tick):
            self._count_dropped(dropped.reason)
        self._count_held()
        self._wake.set()

    def _expire(self) -> None:
        for dropped in self._ring.expire(self._clock()):
            self._count_dropped(dropped.reason)
        self._count_held()

    def _count_dropped(self, reason: str) -> None:
        self._instruments.counter(names.DROPPED, reason).inc()

    def _count_held(self) -> None:
        """Say what is held now; several publishers may share the gauges."""
        ticks, size = self.held, self._ring.bytes + self._ring.in_flight_bytes
        before, self._counted = self._counted, (ticks, size)
        self._instruments.gauge(names.HELD).inc(ticks - before[0])
        self._instruments.gauge(names.BUFFERED).inc(size - before[1])
        if ticks:
            self._empty.clear()
        else:
            self._empty.set()

    def _most_in_flight(self, head: Waiting) -> int:
        """One at a time while the ring has no room for several that were compressed and now are as they came."""
        return 1 if head.compressed and self._ring.crowded else MAX_IN_FLIGHT

    async def _sleep(self) -> None:
        """Wait for a tick or an acknowledgement; where none comes for long, send the snapshots in use again."""
        self._wake.clear()
        try:
            async with asyncio.timeout(self._snapshots.idle_s()):
                await self._wake.wait()
        except TimeoutError:
            await self._snapshots.repeat(one for tick in self._in_flight for one in tick.snapshots)

    async def _send(self, tick: Waiting) -> None:
        self._in_flight[tick] = None
        self._ring.in_flight_bytes += len(tick.value)
        acknowledged = await self._sender.send(samples.TOPIC.name, tick.value, key=self._key)
        acknowledged.add_done_callback(lambda done: self._settle(tick, done))

    def _settle(self, tick: Waiting, done: "asyncio.Future[int]") -> None:
        if done.cancelled() or tick not in self._in_flight:
            return
        self._land(tick)
        if done.exception() is None:
            self._instruments.counter(names.SENT).inc()
        else:
            self._count_dropped("refused")
        self._wake.set()

    def _land(self, tick: Waiting) -> None:
        del self._in_flight[tick]
        self._ring.in_flight_bytes -= len(tick.value)
        self._count_held()
