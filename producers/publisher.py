"""Sends a node's ticks to Kafka: in order, each snapshot before the samples that name it, and through outages.

In: each tick's devices and containers. Out: records on gpu.samples and gpu.allocations, keyed by ``cluster/node``.
State: the ticks that wait, in a buffer bounded by bytes and age, and those in flight; the snapshots sent lately.
On failure: while the broker is away, ticks wait. When the buffer is full, the oldest tick is dropped and counted; every
tick keeps its ``seq``, so that readers see the gap. A record that can never be sent is dropped and counted. If that is
a snapshot, its samples are sent without it, and their reader finds that it is missing.

This module also has what all producers share: their counters and their sender.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from delivery.connection import Connection
from delivery.instruments import Instrument, Instruments
from delivery.sender import Sender
from delivery.tasks import set_within
from delivery.topic_admin import TopicCheck
from producers import PRODUCERS
from producers.records import Containers, Numbering, RetryBuffer, Snapshot, WaitingTick
from topics import allocations, samples
from topics.topic import MAX_MESSAGE_BYTES, node_key

MADE = "gpustream_producer_ticks_made_total"
VALUES = "gpustream_producer_values_made_total"
SENT = "gpustream_producer_ticks_sent_total"
DROPPED = "gpustream_producer_ticks_dropped_total"
CROWDED = "gpustream_producer_process_lists_left_out_total"
HELD = "gpustream_producer_ticks_held"
BUFFERED = "gpustream_producer_buffered_bytes"
SNAPSHOTS = "gpustream_producer_snapshots_sent_total"
SNAPSHOTS_DROPPED = "gpustream_producer_snapshots_dropped_total"
WORKLOADS = "gpustream_producer_workloads_sent_total"
WORKLOADS_DROPPED = "gpustream_producer_workloads_dropped_total"
RUNS = "gpustream_producer_runs_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(MADE, "counter", "Ticks that were sampled; each ends as sent, dropped or held."),
    Instrument(VALUES, "counter", "Metric values in the ticks that were sampled."),
    Instrument(SENT, "counter", "Ticks that the broker acknowledged."),
    Instrument(DROPPED, "counter", "Ticks that were never acknowledged: buffer_full and buffer_age gave way to newer"
               " ones, too_large and refused could never be sent, unencodable could not be written, stopped were left"
               " at the stop.", ("reason",)),
    Instrument(CROWDED, "counter", "Lists of a GPU's processes that had no room in a tick, because they are too many."),
    Instrument(HELD, "gauge", "Ticks that wait to be sent or to be acknowledged."),
    Instrument(BUFFERED, "gauge", "Bytes of the ticks that are held; those that wait for long are compressed."),
    Instrument(SNAPSHOTS, "counter", "Snapshots of allocations that the broker acknowledged, repeats included."),
    Instrument(SNAPSHOTS_DROPPED, "counter", "Snapshots that could never be sent, by reason.", ("reason",)),
    Instrument(WORKLOADS, "counter", "Records of workloads that the broker acknowledged, repeats included."),
    Instrument(WORKLOADS_DROPPED, "counter", "Records of workloads that were not sent: superseded by a newer one while"
               " the broker was away, or could never be sent.", ("reason",)),
    Instrument(RUNS, "counter", "Runs that began: one per node at the start, and one each time a clock stepped back."),
)  # fmt: skip
"""The metrics that every producer has."""

MAX_IN_FLIGHT = 64
"""Ticks of one node that may wait for their acknowledgement: enough to catch up at thousands per second."""

RESIZE_SHARE = 0.25  # if the size of ticks has changed by this share, the capacity of the buffer is computed again
RESEND_S = 300.0
"""A snapshot or a node's workloads are sent again after this; readers look back 10 minutes for those of a sample."""

LARGEST_VALUE_BYTES = MAX_MESSAGE_BYTES - 2048
"""What one batch has room for, beside the key and the batch's own framing."""


class BufferCapacity(NamedTuple):
    """How many ticks of ``tick_bytes`` a buffer holds."""

    ticks: int
    tick_bytes: int


class SnapshotSender:
    """Sends a node's snapshots to gpu.allocations: each is acknowledged before a sample names it, and is sent again
    while it is in use. A snapshot that can never be sent is counted once."""

    def __init__(self, sender: Sender, instruments: Instruments, key: bytes, clock: Callable[[], float]) -> None:
        self._sender, self._instruments, self._key, self._clock = sender, instruments, key, clock
        self._sent_s: dict[Snapshot, float] = {}
        self._last_sent_s = self._last_repeat_s = clock()
        self._repeats: set[asyncio.Future[int]] = set()

    def due(self, snapshots: Iterable[Snapshot]) -> Snapshot | None:
        """The first of a sample's snapshots that must be sent before the sample; None if the sample may be sent."""
        sent_before_s = self._clock() - RESEND_S
        return next(
            (snapshot for snapshot in snapshots if self._sent_s.get(snapshot, sent_before_s) <= sent_before_s), None
        )

    def idle_s(self) -> float:
        """Seconds until :meth:`repeat` is due, if no snapshot is sent before."""
        return max(self._last_sent_s, self._last_repeat_s) + RESEND_S - self._clock()

    async def send(self, snapshot: Snapshot) -> None:
        """Send a snapshot, and wait until it is acknowledged or has failed for good."""
        submitted_s = self._clock()
        if len(snapshot.value) > LARGEST_VALUE_BYTES:
            self._instruments.counter(SNAPSHOTS_DROPPED, "too_large").inc()
        else:
            acknowledged = await self._sender.send(allocations.TOPIC.name, snapshot.value, key=self._key)
            await asyncio.wait([acknowledged])
            self._settle(acknowledged)
        self._sent_s = {sent: sent_s for sent, sent_s in self._sent_s.items() if submitted_s - sent_s < RESEND_S}
        self._sent_s[snapshot] = self._last_sent_s = submitted_s

    async def repeat(self, snapshots: Iterable[Snapshot]) -> None:
        """Send the snapshots in use again. They were acknowledged before, so no sample waits for them now."""
        self._last_repeat_s = self._clock()
        if self._repeats or not self._sent_s:
            return
        last_snapshot = next(reversed(self._sent_s))
        for snapshot in dict.fromkeys((*snapshots, last_snapshot)):
            if len(snapshot.value) <= LARGEST_VALUE_BYTES:
                acknowledged = await self._sender.send(allocations.TOPIC.name, snapshot.value, key=self._key)
                self._repeats.add(acknowledged)
                acknowledged.add_done_callback(self._settle)

    def _settle(self, done: "asyncio.Future[int]") -> None:
        self._repeats.discard(done)
        count_settled(self._instruments, done, SNAPSHOTS, SNAPSHOTS_DROPPED)


class NodePublisher:
    """Sends the ticks of one node. Call :meth:`publish` each tick, and keep :meth:`run` running beside it.

    ``run_id`` is the start time in milliseconds since the epoch, and differs from that of any earlier publisher of the
    node. ``interval_ms`` is the time between two ticks. ``buffer`` must not be shared with another node.
    ``capacity`` is how many ticks like the last one the buffer holds; it is computed when their size has changed.
    ``clock`` gives seconds and never steps back. Raises ValueError if ``cluster`` or ``node`` can't be a name.
    """

    def __init__(
        self,
        sender: Sender,
        instruments: Instruments,
        *,
        cluster: str,
        node: str,
        run_id: int,
        interval_ms: int | None = None,
        buffer: RetryBuffer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._numbering = Numbering(cluster=cluster, node=node, run_id=run_id, interval_ms=interval_ms)
        self._key = node_key(cluster, node)
        self._sender, self._instruments, self._clock = sender, instruments, clock
        self.sampled_values = 0
        self.capacity = BufferCapacity(0, 0)
        self._buffer = RetryBuffer() if buffer is None else buffer
        self._reported_held = (0, 0)
        self._in_flight: dict[WaitingTick, None] = {}
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._snapshots = SnapshotSender(sender, instruments, self._key, clock)
        instruments.counter(RUNS).inc()

    @property
    def run_id(self) -> int:
        """The run of the last tick."""
        return self._numbering.run_id

    def sampled(self) -> list[tuple[str, int, int]]:
        """Every run so far: the node, the run_id, and the ``seq`` of its last tick, dropped ones included."""
        return [(self._numbering.node, run_id, seq) for run_id, seq in self._numbering.runs().items() if seq]

    @property
    def held(self) -> int:
        """Ticks that wait to be sent or to be acknowledged."""
        return len(self._buffer) + len(self._in_flight)

    def waited_s(self) -> float:
        """How long the oldest held tick has waited, in seconds; 0 if none is held."""
        oldest = next(iter(self._in_flight), None) or self._buffer.head()
        return self._clock() - oldest.made_at_s if oldest else 0.0

    def publish(
        self,
        ts_ms: int,
        devices: Sequence[Mapping[str, Any]],
        containers: Containers,
        in_force: Callable[[int], Containers] | None = None,
    ) -> int:
        """Queue a tick read at ``ts_ms``, without waiting; returns its ``seq`` in :attr:`run_id`.

        ``devices`` and ``containers`` are dicts as in gpu.samples and gpu.allocations; ``containers`` None: there is no
        kubelet. ``in_force`` returns the containers at an earlier time, for events. The caller may change the arguments
        afterwards.
        """
        previous_run_id = self._numbering.run_id
        tick = self._numbering.step(ts_ms, devices, containers, in_force)
        if tick.run_id != previous_run_id:
            self._instruments.counter(RUNS).inc()
        self._instruments.counter(MADE).inc()
        self._instruments.counter(CROWDED).inc(tick.crowded)
        values = sum(len(device.get("metrics") or ()) for device in devices)
        self.sampled_values += values
        self._instruments.counter(VALUES).inc(values)
        if tick.value is None:
            self._count_dropped("unencodable")
        elif len(tick.value) > LARGEST_VALUE_BYTES:
            self._count_dropped("too_large")
        else:
            if abs(len(tick.value) - self.capacity.tick_bytes) > RESIZE_SHARE * self.capacity.tick_bytes:
                self.capacity = BufferCapacity(self._buffer.capacity(tick.value), len(tick.value))
            self._expire()
            dropped = self._buffer.push(WaitingTick(tick.value, tick.snapshots, self._clock()))
            self._count_dropped("buffer_full", len(dropped))
            self._update_held()
            self._wake.set()
        return tick.seq

    async def run(self) -> None:
        """Send what is published, until it is cancelled. To stop, call :meth:`drain` before.

        If nothing is published or acknowledged for long, the snapshots in use are sent again. Only one tick is in
        flight at a time while the buffer is crowded and its ticks are compressed, because a tick is sent uncompressed.
        """
        while True:
            await self._sender.ready()
            self._expire()
            head = self._buffer.head()
            one_at_a_time = head is not None and head.compressed and self._buffer.crowded
            if head is None or len(self._in_flight) >= (1 if one_at_a_time else MAX_IN_FLIGHT):
                self._wake.clear()
                if not await set_within(self._wake, self._snapshots.idle_s()):
                    await self._snapshots.repeat(snapshot for tick in self._in_flight for snapshot in tick.snapshots)
            elif (snapshot := self._snapshots.due(head.snapshots)) is not None:
                await self._snapshots.send(snapshot)
            else:
                tick = self._buffer.pop()
                self._in_flight[tick] = None
                self._buffer.in_flight_bytes += len(tick.value)
                acknowledged = await self._sender.send(samples.TOPIC.name, tick.value, key=self._key)
                acknowledged.add_done_callback(partial(self._settle, tick))

    async def emptied(self) -> None:
        """Wait until every published tick is acknowledged or dropped."""
        await self._empty.wait()

    async def drain(self, timeout_s: float) -> int:
        """Wait until every tick is acknowledged, at most ``timeout_s``. The ticks that are left are dropped and
        counted; returns their number. Publish nothing afterwards."""
        await set_within(self._empty, timeout_s)
        unsent = self.held
        self._buffer.clear()
        self._in_flight.clear()
        self._buffer.in_flight_bytes = 0
        self._instruments.counter(DROPPED, "stopped").inc(unsent)
        self._update_held()
        return unsent

    def _expire(self) -> None:
        self._count_dropped("buffer_age", len(self._buffer.expire(self._clock())))
        self._update_held()

    def _count_dropped(self, reason: str, count: int = 1) -> None:
        if count:
            self._instruments.counter(DROPPED, reason).inc(count)

    def _update_held(self) -> None:
        """Update the gauges by what has changed, because several publishers may share them."""
        ticks, size = self.held, self._buffer.bytes + self._buffer.in_flight_bytes
        previous, self._reported_held = self._reported_held, (ticks, size)
        self._instruments.gauge(HELD).inc(ticks - previous[0])
        self._instruments.gauge(BUFFERED).inc(size - previous[1])
        if ticks:
            self._empty.clear()
        else:
            self._empty.set()

    def _settle(self, tick: WaitingTick, done: "asyncio.Future[int]") -> None:
        if done.cancelled() or tick not in self._in_flight:
            return
        del self._in_flight[tick]
        self._buffer.in_flight_bytes -= len(tick.value)
        self._update_held()
        count_settled(self._instruments, done, SENT, DROPPED)
        self._wake.set()


# -- what all producers have in common


def sender_of(name: str, connection: Connection, client_id: str, **options: int) -> Sender:
    """The sender for the producer of that name: it waits until the producer's topics are ready for use."""
    return Sender(connection, client_id=client_id, check=TopicCheck(connection, PRODUCERS[name].uses), **options)


def count_settled(instruments: Instruments, done: "asyncio.Future[int]", sent: str, dropped: str) -> None:
    """Count a record whose future is done as sent or as dropped; a cancelled one is not counted."""
    if not done.cancelled():
        refused = done.exception() is not None
        (instruments.counter(dropped, "refused") if refused else instruments.counter(sent)).inc()
