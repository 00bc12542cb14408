"""A published trace as a producer: its readings as samples, its pods as snapshots and workloads, with its own times.

In: a folder of the trace's files. Out: gpu.samples, gpu.allocations and gpu.workloads, of one run for each node.
State: its position in the trace. The next start begins the trace again, as a new run.
On failure: if the files are not the trace's, the component ends with a sentence. A row that can't be used is left out,
counted and named. A broker that is away is waited for, and nothing is dropped, because the trace waits, too.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pkgutil import resolve_name

from delivery.clock import now_ms
from delivery.instruments import Instrument, Instruments
from delivery.sender import Sender, not_sent
from delivery.tasks import running, until_stopped
from producers.publisher import INSTRUMENTS as SHARED_INSTRUMENTS
from producers.publisher import MAX_IN_FLIGHT, NodePublisher, sender_of
from producers.records import RetryBuffer, WorkloadsContent
from producers.replay.config import TRACES, ReplaySettings
from producers.replay.trace import Rows, Trace
from producers.workloads import WorkloadsPublisher

log = logging.getLogger(__name__)

READ = "gpustream_trace_rows_read_total"
LEFT_OUT = "gpustream_trace_rows_left_out_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(READ, "counter", "Rows of a trace that were read, by file.", ("file",)),
    Instrument(LEFT_OUT, "counter", "Rows of a trace that could not be used, by file and reason.", ("file", "reason")),
)

DRAIN_S = 4.0
KNOWN_S = 3.0
"""How long before the first tick the pods are in Kafka: a tick is joined with what was there 2 s before it."""

PROGRESS_S = 10.0


class TraceReplay:
    """The component ``produce replay``. ``sender``, ``clock_s`` and ``sleep`` are for tests."""

    name = "replay"

    def __init__(
        self,
        settings: ReplaySettings,
        *,
        sender: Sender | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._settings, self._clock_s, self._sleep = settings, clock_s, sleep
        self._instruments = Instruments((*SHARED_INSTRUMENTS, *INSTRUMENTS))
        self.registry = self._instruments.registry
        self._sender = sender or sender_of(self.name, settings.connection(), f"gpustream-{self.name}")
        self._run_id = now_ms()
        self._workloads = WorkloadsPublisher(
            self._sender, self._instruments, cluster=settings.cluster, epoch=self._run_id
        )
        self._publishers: dict[str, NodePublisher] = {}

    def not_ready(self) -> list[str]:
        waited_s = max((publisher.waited_s() for publisher in self._publishers.values()), default=0.0)
        return not_sent(self._sender, what="a tick", waited_s=waited_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Send the trace to its end, or until ``stop``; then what is left, for at most 4 s. Raises NoTrace, OSError."""
        trace = await asyncio.to_thread(self._read)
        self._publishers = {
            node: NodePublisher(
                self._sender,
                self._instruments,
                cluster=self._settings.cluster,
                node=node,
                run_id=self._run_id,
                interval_ms=trace.interval_ms,
                buffer=RetryBuffer(max_age_s=math.inf),
            )
            for node in trace.pods
        }
        beside = (self._sender.start, self._workloads.run, *(publisher.run for publisher in self._publishers.values()))
        try:
            async with running(*(part() for part in beside)):
                await until_stopped(stop, self._send(trace))
                drains = [publisher.drain(DRAIN_S) for publisher in self._publishers.values()]
                if left := sum(await asyncio.gather(*drains)):
                    log.warning("left unsent at the stop: %d ticks", left)
        finally:
            await self._sender.stop(0.5)

    def _read(self) -> Trace:
        """The trace, and what of its files could not be used."""
        name, folder = self._settings.trace
        rows, interval_s = Rows(), self._settings.interval_s or TRACES[name].interval_s
        trace: Trace = resolve_name(TRACES[name].open)(folder, rows, interval_s and round(interval_s * 1000))
        for file, count in rows.read.items():
            self._instruments.counter(READ, file).inc(count)
            log.info("%s: %d rows read", file, count)
        for (file, reason), count in rows.left_out.items():
            self._instruments.counter(LEFT_OUT, file, reason).inc(count)
            log.warning("%d rows are left out, the first: %s", count, rows.first[file, reason])
        return trace

    async def _send(self, trace: Trace) -> None:
        """All pods first, so that no tick meets one that is not known; then the ticks, when each is due."""
        for node, pods in trace.pods.items():
            self._workloads.publish(trace.first_ms, node, WorkloadsContent({}, pods))
        while await self._workloads.drain(1.0):
            continue
        await self._sleep(KNOWN_S)
        began_s = reported_s = self._clock_s()
        sent, length_ms = 0, max(1, trace.last_ms - trace.first_ms)
        for tick in trace.ticks:
            now_s = self._clock_s()
            due_s = began_s + (tick.ts_ms - trace.first_ms) / 1000 / self._settings.speed
            if due_s > now_s:
                await self._sleep(due_s - now_s)
            elif sent % MAX_IN_FLIGHT == 0:
                await self._sleep(0)
            if now_s - reported_s >= PROGRESS_S:
                reported_s = now_s
                log.info("%.0f %% of the trace, %d ticks", (tick.ts_ms - trace.first_ms) * 100 / length_ms, sent)
            publisher = self._publishers[tick.node]
            if publisher.held >= MAX_IN_FLIGHT:
                await publisher.emptied()
            publisher.publish(tick.ts_ms, tick.devices, tick.containers)
            sent += 1
        for publisher in self._publishers.values():
            await publisher.emptied()
        log.info("the whole trace is sent: %d ticks of %d nodes", sent, len(trace.pods))
