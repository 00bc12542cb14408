"""The simulated fleet as a producer: it reads its nodes as time passes, and sends what they say.

In: a fleet's size and seed. Out: gpu.samples, gpu.allocations and gpu.workloads, and the truth as a file.
State: the nodes, and what of theirs is not yet acknowledged.
On failure: see the publishers; a truth that can't be written ends it.
"""

import asyncio
import contextlib
import heapq
import logging
import math
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO

from delivery.instruments import Instruments
from delivery.sender import Sender
from delivery.topic_admin import TopicCheck
from producers.publisher import INSTRUMENTS, Buffer, NodePublisher, first_failure, not_sent
from producers.simulated import instruments as own
from producers.simulated import truth
from producers.simulated.clock import FleetClock
from producers.simulated.config import SimulatedSettings
from producers.simulated.fleet import Fleet, parse_size
from producers.workloads import WorkloadsPublisher
from topics import allocations, samples, workloads

log = logging.getLogger(__name__)

DRAIN_S = 4.0
SMALLEST_BUFFER_BYTES = 256 * 1024


class SimulatedFleet:
    """The component ``produce simulated``. ``sender`` and ``clock`` are for tests."""

    name = "simulated"

    def __init__(
        self, settings: SimulatedSettings, *, sender: Sender | None = None, clock: FleetClock | None = None
    ) -> None:
        self._settings = settings
        nodes, gpus = parse_size(settings.fleet)
        self._fleet = Fleet(nodes, gpus, cluster=settings.cluster, seed=settings.seed, pod_life_s=settings.pod_life_s)
        self._instruments = Instruments((*INSTRUMENTS, *own.INSTRUMENTS))
        self.registry = self._instruments.registry
        self._clock = clock or FleetClock()
        check = TopicCheck(settings.kafka, (samples.TOPIC.name, allocations.TOPIC.name, workloads.TOPIC.name))
        self._sender = sender or Sender(settings.kafka, client_id=f"gpustream-{self.name}", check=check)
        self._nodes = [self._fleet.node(index) for index in range(self._fleet.nodes)]
        share = max(SMALLEST_BUFFER_BYTES, settings.buffer_size // self._fleet.nodes)
        buffer = Buffer(max_bytes=share, max_age_s=settings.buffer_s)
        self._publishers = [self._publisher(node.name, buffer) for node in self._nodes]
        self._workloads = WorkloadsPublisher(
            self._sender, self._instruments, cluster=settings.cluster, epoch=self._clock.start_ms
        )

    def not_ready(self) -> list[str]:
        """Why it is not ready; empty where it is."""
        waited_s = max(publisher.waited_s() for publisher in self._publishers)
        return not_sent(self._sender, what="a tick", waited_s=waited_s)

    def sampled(self) -> list[tuple[str, int, int]]:
        """Every run of every node so far: node, run_id, and the ``seq`` of its last tick, dropped ones included."""
        nodes = zip(self._nodes, self._publishers, strict=True)
        return [(node.name, run_id, seq) for node, of in nodes for run_id, seq in of.sampled().items() if seq]

    @property
    def sampled_values(self) -> int:
        """The metric values in all ticks so far, those of dropped ones included."""
        return sum(publisher.sampled_values for publisher in self._publishers)

    async def run(self, stop: asyncio.Event) -> None:
        """Read and send until ``stop`` is set or the limit is reached, then send what is left, for at most 4 s."""
        try:
            with self._truth() as file:
                async with self._background():
                    await self._tick(stop, file)
                    await self._drain()
        except ExceptionGroup as failures:
            raise first_failure(failures) from failures
        finally:
            await self._sender.stop(0.5)

    def _publisher(self, node: str, buffer: Buffer) -> NodePublisher:
        return NodePublisher(
            self._sender,
            self._instruments,
            cluster=self._settings.cluster,
            node=node,
            run_id=self._clock.start_ms,
            buffer=buffer,
        )

    @contextlib.contextmanager
    def _truth(self) -> Iterator[BinaryIO | None]:
        if self._settings.truth is None:
            yield None
            return
        with self._settings.truth.open("ab") as file:
            yield file

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """What runs beside the ticks; a failure in it ends them."""
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(publisher.run()) for publisher in self._publishers]
            running += [group.create_task(part()) for part in (self._sender.start, self._workloads.run, self._tell)]
            yield
            for task in running:
                task.cancel()

    async def _tick(self, stop: asyncio.Event, file: BinaryIO | None) -> None:
        """Read each node at its own time within every interval."""
        interval_ms = round(self._settings.interval_s * 1000)
        order = sorted((self._fleet.phase_ms(index, interval_ms), index) for index in range(self._fleet.nodes))
        began_ms = self._clock.elapsed_ms()
        limit_ms = math.inf if self._settings.stop_after_s is None else began_ms + 1000 * self._settings.stop_after_s
        number, made = began_ms // interval_ms, 0
        while self._settings.stop_after_ticks is None or made < self._settings.stop_after_ticks:
            for phase_ms, index in order:
                if not await self._wait(stop, number * interval_ms + phase_ms, limit_ms):
                    return
                self._read(index, file)
            made += 1
            late = self._clock.elapsed_ms() // interval_ms - number - 1
            if late > 0:
                self._instruments.counter(own.MISSED).inc(late * len(order))
            number += 1 + max(0, late)

    async def _wait(self, stop: asyncio.Event, due_ms: int, limit_ms: float) -> bool:
        """Wait for ``due_ms`` since the start; False where the stop or ``limit_ms`` comes first."""
        while not stop.is_set():
            elapsed_ms = self._clock.elapsed_ms()
            if elapsed_ms >= limit_ms:
                return False
            if elapsed_ms >= due_ms:
                await asyncio.sleep(0)
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((min(due_ms, limit_ms) - elapsed_ms) / 1000):
                    await stop.wait()
        return False

    def _read(self, index: int, file: BinaryIO | None) -> None:
        node, publisher = self._nodes[index], self._publishers[index]
        elapsed_ms = self._clock.elapsed_ms()
        reading, ts_ms = node.read(elapsed_ms, self._clock.start_ms), self._clock.start_ms + elapsed_ms
        seq = publisher.publish(ts_ms, reading.devices, reading.containers, reading.at_events.get)
        if file is not None:
            rows = truth.rows(
                reading,
                cluster=self._settings.cluster,
                node=node.name,
                run_id=publisher.run_id,
                seq=seq,
                ts_ms=ts_ms,
            )
            file.write(truth.lines(rows))
            file.flush()
            self._instruments.counter(own.TRUTHS).inc(len(rows))

    async def _tell(self) -> None:
        """Publish what the API server comes to know, when it does."""
        due = [(0, index) for index in range(len(self._nodes))]
        while due:
            elapsed_ms = self._clock.elapsed_ms()
            if due[0][0] > elapsed_ms:
                await asyncio.sleep((due[0][0] - elapsed_ms) / 1000)
                continue
            index = heapq.heappop(due)[1]
            node = self._nodes[index]
            for known in node.news(elapsed_ms, self._clock.start_ms):
                ts_ms = self._clock.start_ms + known.at_ms
                self._workloads.publish(ts_ms, node.name, node.machine.labels, known.pods)
            coming_ms = node.next_news_ms()
            if coming_ms is not None:
                heapq.heappush(due, (max(coming_ms, elapsed_ms + 1), index))
            await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Send what can be sent, and say what could not."""
        *left, news = await asyncio.gather(
            *(publisher.drain(DRAIN_S) for publisher in self._publishers), self._workloads.drain(DRAIN_S)
        )
        if any(left) or news:
            log.warning("left unsent at the stop: %d ticks, %d records of workloads", sum(left), news)
