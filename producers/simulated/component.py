"""The simulated fleet as a producer: it reads its nodes as time passes, and sends what they say.

In: a fleet's size and seed. Out: gpu.samples, gpu.allocations and gpu.workloads; and the truth as a file of JSON lines:
who really held each device, whatever the kubelet said.
State: the nodes, and their records that Kafka has not acknowledged.
On failure: see the publishers. If the truth can't be written, the component ends.
"""

import asyncio
import contextlib
import heapq
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from delivery.instruments import Instrument, Instruments
from delivery.sender import Sender, not_sent
from delivery.tasks import running, set_within
from producers.publisher import INSTRUMENTS as SHARED_INSTRUMENTS
from producers.publisher import NodePublisher, sender_of
from producers.records import RetryBuffer, WorkloadsContent
from producers.simulated.config import SimulatedSettings
from producers.simulated.fleet import JsonDict, NodeReading, parse_size
from producers.workloads import WorkloadsPublisher

log = logging.getLogger(__name__)

MISSED = "gpustream_simulated_ticks_missed_total"
TRUTHS = "gpustream_simulated_truth_lines_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(MISSED, "counter", "Ticks that were never sampled, because the process was late by a whole interval."),
    Instrument(TRUTHS, "counter", "Lines written to the truth file, one per device and tick."),
)

DRAIN_S = 4.0
SMALLEST_BUFFER_BYTES = 256 * 1024
TOLERANCE_MS = 1_000  # how far the fleet's times may drift from the machine's before they follow it


class FleetClock:
    """Counts from its making on a clock that never steps back; times since the epoch follow the machine's clock.

    If the machine's clock steps, so do the times since the epoch, as on a real node; the fleet lives on evenly.
    ``start_ms`` is added to a time since the start.
    """

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._began_s = monotonic_s()
        self.start_ms = int(wall_s() * 1000)

    def elapsed_ms(self) -> int:
        before_ms = int((self._monotonic_s() - self._began_s) * 1000)
        wall_ms = int(self._wall_s() * 1000)
        elapsed_ms = int((self._monotonic_s() - self._began_s) * 1000)
        # on a busy machine this process may have stood still between two of these readings: that is no step
        if not before_ms - TOLERANCE_MS <= wall_ms - self.start_ms <= elapsed_ms + TOLERANCE_MS:
            self.start_ms = max(0, wall_ms - elapsed_ms)
        return elapsed_ms


@contextlib.contextmanager
def _opened(truth: Path | None) -> Iterator[BinaryIO | None]:
    """The truth, to add to it, if there is one. If it can't be written, the error names it."""
    if truth is None:
        yield None
        return
    try:
        with truth.open("ab") as file:
            if truth.is_file() and truth.stat().st_size and os.access(truth, os.R_OK):
                with truth.open("rb") as written:
                    written.seek(-1, os.SEEK_END)
                    if written.read() != b"\n":  # a process that was killed has cut the last line
                        file.write(b"\n")
            yield file
    except OSError as error:
        error.filename = error.filename or str(truth)
        raise


def truths(reading: NodeReading, behaviours: list[list[JsonDict]], tick: JsonDict) -> list[JsonDict]:
    """One row per device of a ``tick``: ``holders`` held it when it was read, ``behaviours`` is what each of them did,
    ``reported`` is what the snapshot in force said, and the metrics and XID errors are as they were sent.
    ``utilization_ratio`` and ``memory_used_bytes`` are None if the device has no such metric."""
    return [
        {
            **tick,
            "uuid": device["uuid"],
            "holders": holders,
            "behaviours": behaving,
            "reported": reported,
            "utilization_ratio": device["metrics"].get("gpu_utilization_ratio"),
            "memory_used_bytes": device["metrics"].get("memory_used_bytes"),
            "metrics": device["metrics"],
            "xids": device.get("xids", {}),
            "events": device.get("events", []),
        }
        for device, holders, behaving, reported in zip(
            reading.devices, reading.holders, behaviours, reading.reported, strict=True
        )
    ]


class SimulatedFleet:
    """The component ``produce simulated``. ``sender`` and ``clock`` are for tests."""

    name = "simulated"

    def __init__(
        self, settings: SimulatedSettings, *, sender: Sender | None = None, clock: FleetClock | None = None
    ) -> None:
        self.drain_s = DRAIN_S
        self._settings = settings
        self._fleet = settings.fleet_of(*parse_size(settings.fleet))
        self._instruments = Instruments((*SHARED_INSTRUMENTS, *INSTRUMENTS))
        self.registry = self._instruments.registry
        self._clock = clock or FleetClock()
        self._sender = sender or sender_of(self.name, settings.connection(), f"gpustream-{self.name}")
        self._nodes = [self._fleet.node(index) for index in range(self._fleet.nodes)]
        share = max(SMALLEST_BUFFER_BYTES, settings.buffer_size // self._fleet.nodes)
        run_id, cluster = self._clock.start_ms, settings.cluster
        self._publishers = [
            NodePublisher(
                self._sender,
                self._instruments,
                cluster=cluster,
                node=node.name,
                run_id=run_id,
                interval_ms=round(settings.interval_s * 1000),
                buffer=RetryBuffer(max_bytes=share, max_age_s=settings.buffer_s),
            )
            for node in self._nodes
        ]
        self._workloads = WorkloadsPublisher(self._sender, self._instruments, cluster=cluster, epoch=run_id)

    def not_ready(self) -> list[str]:
        waited_s = max(publisher.waited_s() for publisher in self._publishers)
        return not_sent(self._sender, what="a tick", waited_s=waited_s)

    def sampled(self) -> list[tuple[str, int, int]]:
        """Every run of every node so far: see :meth:`NodePublisher.sampled`."""
        return [run for publisher in self._publishers for run in publisher.sampled()]

    @property
    def sampled_values(self) -> int:
        """The metric values in all ticks so far, those of dropped ones included."""
        return sum(publisher.sampled_values for publisher in self._publishers)

    async def run(self, stop: asyncio.Event) -> None:
        """Read and send until ``stop`` is set or the limit is reached, then send what is left, for at most
        ``drain_s``. A failure of anything that runs beside the ticks ends them."""
        publishers = [publisher.run for publisher in self._publishers]
        beside = (self._sender.start, self._workloads.run, self._publish_workloads, *publishers)
        try:
            with _opened(self._settings.truth) as file:
                async with running(*(part() for part in beside)):
                    await self._tick(stop, file)
                    drains = [publisher.drain(self.drain_s) for publisher in self._publishers]
                    *ticks, records = await asyncio.gather(*drains, self._workloads.drain(self.drain_s))
                    if any(ticks) or records:
                        log.warning(
                            "left unsent at the stop: %d ticks, %d records of workloads",
                            sum(ticks),
                            records,
                        )
        finally:
            await self._sender.stop(0.5)

    async def _tick(self, stop: asyncio.Event, file: BinaryIO | None) -> None:
        interval_ms = round(self._settings.interval_s * 1000)
        order = self._fleet.order(interval_ms)
        number, ticks = self._clock.elapsed_ms() // interval_ms, 0
        read_ms: dict[int, int] = {}
        while self._settings.stop_after_ticks is None or ticks < self._settings.stop_after_ticks:
            for phase_ms, index in order:
                after_ms = read_ms.get(index, -1)  # a tick of the same millisecond would begin another run
                due_ms = max(number * interval_ms + phase_ms, after_ms + 1)
                while (now_ms := self._clock.elapsed_ms()) < due_ms and not stop.is_set():
                    await set_within(stop, (due_ms - now_ms) / 1000)
                if stop.is_set():
                    return
                await asyncio.sleep(0)
                node, publisher = self._nodes[index], self._publishers[index]
                elapsed_ms = read_ms[index] = self._clock.elapsed_ms()
                reading, ts_ms = node.read(elapsed_ms, self._clock.start_ms), self._clock.start_ms + elapsed_ms
                seq = publisher.publish(ts_ms, reading.devices, reading.containers, reading.at_events.get)
                if file is not None:
                    tick = {"cluster": self._settings.cluster, "node": node.name, "run_id": publisher.run_id}
                    behaviours = node.behaviours(elapsed_ms, self._clock.start_ms)
                    rows = truths(reading, behaviours, {**tick, "seq": seq, "ts_ms": ts_ms})
                    file.write(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
                    file.flush()
                    self._instruments.counter(TRUTHS).inc(len(rows))
            ticks += 1
            late = self._clock.elapsed_ms() // interval_ms - number - 1
            if late > 0:
                self._instruments.counter(MISSED).inc(late * len(order))
            number += 1 + max(0, late)

    async def _publish_workloads(self) -> None:
        due = [(0, index) for index in range(len(self._nodes))]
        while due:
            elapsed_ms = self._clock.elapsed_ms()
            if due[0][0] > elapsed_ms:
                await asyncio.sleep((due[0][0] - elapsed_ms) / 1000)
                continue
            index = heapq.heappop(due)[1]
            node = self._nodes[index]
            for known in node.pod_changes(elapsed_ms, self._clock.start_ms):
                ts_ms = self._clock.start_ms + known.at_ms
                self._workloads.publish(ts_ms, node.name, WorkloadsContent(node.machine.labels, known.pods))
            coming_ms = node.next_change_ms()
            if coming_ms is not None:
                heapq.heappush(due, (max(coming_ms, elapsed_ms + 1), index))
            await asyncio.sleep(0)
