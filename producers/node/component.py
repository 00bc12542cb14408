"""The node producer: each tick reads the GPUs and the kubelet at the same time, and sends the result.

In: NVML, the kubelet's sockets, procfs, a batch system's job files. Out: gpu.samples, gpu.allocations.
State: the devices and containers last known, and the ticks that Kafka has not acknowledged.
On failure: without a driver, a kubelet or Kafka it runs, reports what is missing, and works as soon as they come. A
tick waits for its devices until 80 % of the interval has passed, or 10 s, and is sent with those that have answered. At
the stop, a last tick reports what happened since the one before.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from delivery.clock import now_ms
from delivery.instruments import Instruments
from delivery.sender import Sender, not_sent
from delivery.tasks import running, until_stopped
from delivery.values import duration_words
from producers.node import instruments
from producers.node.cgroups import ProcessOwners
from producers.node.config import NodeSettings
from producers.node.gpus import Gpus
from producers.node.job_files import JobFiles
from producers.node.jobs import with_jobs
from producers.node.kubelet import Kubelet
from producers.publisher import INSTRUMENTS as SHARED_INSTRUMENTS
from producers.publisher import NodePublisher, sender_of
from producers.records import RetryBuffer

log = logging.getLogger(__name__)
ANSWER_WITHIN, LONGEST_ANSWER_S = 0.8, 10.0
"""Within this share of the interval, and this time, the GPUs and the kubelet must answer."""
OPEN_WITHIN_S = 10.0  # how long the first tick waits for the driver: a restart must not look like a node without GPUs
DRAIN_S = 4.0
MAX_BATCH_BYTES = 64 * 1024  # a node has little to send, and little memory
_MIB = 1024 * 1024
LAST_TICK_WITHIN_S = 2.0  # how long the last tick waits at the stop; with the drain, that must take less than 10 s
HOLDERS_WITHIN_S = 0.4
HOLDERS_EVERY_S = 0.1  # at XID errors the kubelet is called at most so often: its clients share 100 calls a second


class NodeProducer:
    """The component ``produce node``. ``sender``, ``gpus``, ``kubelet`` and ``process_owners`` are for tests."""

    name = "node"

    def __init__(
        self,
        settings: NodeSettings,
        *,
        sender: Sender | None = None,
        gpus: Gpus | None = None,
        kubelet: Kubelet | None = None,
        process_owners: ProcessOwners | None = None,
    ) -> None:
        self.drain_s = DRAIN_S
        self._settings = settings
        self._instruments = Instruments((*SHARED_INSTRUMENTS, *instruments.INSTRUMENTS))
        self.registry = self._instruments.registry
        client_id = f"gpustream-{self.name}-{settings.node}"
        self._sender = sender or sender_of(self.name, settings.connection(), client_id, max_batch_bytes=MAX_BATCH_BYTES)
        self._reported_buffer_s: float | None = None
        self._process_owners = process_owners or ProcessOwners(settings.procfs)
        self._gpus = gpus or Gpus(self._instruments, self._process_owners, interval_s=settings.interval_s)
        self._job_files = JobFiles(settings.hpc_job_mapping_dir, self._instruments)
        self._kubelet = kubelet or Kubelet(
            settings.pod_resources_socket,
            self._instruments,
            pods_socket=settings.pods_api_socket,
            prefixes=settings.resource_prefixes,
            interval_s=settings.interval_s,
        )
        self._publisher = NodePublisher(
            self._sender,
            self._instruments,
            cluster=settings.cluster,
            node=settings.node,
            run_id=now_ms(),
            interval_ms=round(settings.interval_s * 1000),
            buffer=RetryBuffer(max_bytes=settings.buffer_size, max_age_s=settings.buffer_s),
        )

    def not_ready(self) -> list[str]:
        waiting = not_sent(self._sender, what="a tick", waited_s=self._publisher.waited_s())
        return [*self._gpus.not_ready(), *self._kubelet.not_ready(), *waiting]

    def sampled(self) -> list[tuple[str, int, int]]:
        """Every run so far: see :meth:`NodePublisher.sampled`."""
        return self._publisher.sampled()

    @property
    def sampled_values(self) -> int:
        """The metric values in all ticks so far, those of dropped ones included."""
        return self._publisher.sampled_values

    async def run(self, stop: asyncio.Event) -> None:
        """Read and send until ``stop``, then send the ticks that are left, for at most 4 s.
        Raises an error that only a new process can fix."""
        try:
            async with running(
                self._publisher.run(),
                self._sender.start(),
                self._gpus.run(),
                self._kubelet.run(),
                self._read_holders_at_events(),
            ):
                await until_stopped(stop, self._gpus.open(OPEN_WITHIN_S))
                await self._run_ticks(stop)
                if unsent := await self._publisher.drain(self.drain_s):
                    log.warning("left unsent at the stop: %d ticks", unsent)
        finally:
            self._gpus.close()
            self._job_files.close()
            await self._kubelet.close()
            await self._sender.stop(0.5)
        if (fatal := self._gpus.fatal()) is not None:
            raise fatal

    async def _read_holders_at_events(self) -> None:
        """Read the kubelet's containers as soon as a GPU has an XID error: at the next tick, others may hold it."""
        while True:
            await self._gpus.event()
            await self._kubelet.read(HOLDERS_WITHIN_S)
            await asyncio.sleep(HOLDERS_EVERY_S)

    async def _run_ticks(self, stop: asyncio.Event) -> None:
        """Read a tick every interval until ``stop``, and then a last one, if there was one before. A tick that would
        begin a whole interval late is skipped and counted."""
        interval_s, started_s, tick_number = self._settings.interval_s, time.monotonic(), 0
        within_s = min(interval_s * ANSWER_WITHIN, LONGEST_ANSWER_S)
        while not stop.is_set() and self._gpus.fatal() is None:
            await until_stopped(stop, self._read_tick(within_s))
            elapsed_s = time.monotonic() - started_s
            missed = max(0, int(elapsed_s / interval_s) - tick_number - 1)
            if missed:
                self._instruments.counter(instruments.MISSED).inc(missed)
            tick_number += 1 + missed
            await until_stopped(stop, asyncio.sleep(tick_number * interval_s - elapsed_s))
        if self._publisher.sampled():
            await asyncio.sleep(0.001)  # a tick of the same millisecond would begin another run
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_TICK_WITHIN_S + 0.5):
                    await self._read_tick(min(within_s, LAST_TICK_WITHIN_S))

    async def _read_tick(self, within_s: float) -> None:
        """Read and publish one tick. There is no await between taking the events and publishing them, so that none is
        lost."""
        ts_ms = now_ms()
        containers, devices, job_ids_by_file = await asyncio.gather(
            self._kubelet.read(within_s), self._gpus.read(within_s), self._job_files.read(within_s)
        )
        devices = with_jobs(
            self._gpus.with_events(devices),
            job_ids_by_file,
            lambda job_id: self._job_files.enriched(self._process_owners.jobs.of(job_id)),
            all_known=self._all_jobs_known,
        )
        self._publisher.publish(ts_ms, devices, containers, self._kubelet.in_force)
        self._report_buffer()

    def _all_jobs_known(self, device: Mapping[str, Any]) -> bool:
        """Whether a device for which no job was found has none. If there are job files, they say so. If there are none,
        the processes on it say so, as soon as a process of any job was seen on this machine."""
        files_were_read = self._job_files.were_read()
        if self._settings.pod_resources_socket is not None or files_were_read is None:
            return False
        if files_were_read:
            return self._job_files.cover(device)
        return self._process_owners.jobs.any() and device.get("processes") is not None

    def _report_buffer(self) -> None:
        """Log how long the buffer lasts: at the first tick, and when it becomes too small, or large enough again."""
        configured_s, size = self._settings.buffer_s, self._settings.buffer_size
        ticks, tick_bytes = self._publisher.capacity
        reported_s, buffer_s = self._reported_buffer_s, min(configured_s, ticks * self._settings.interval_s)
        if not ticks or buffer_s == reported_s:
            return
        self._reported_buffer_s = buffer_s
        self._instruments.gauge(instruments.BUFFER_SECONDS).set(buffer_s)
        if reported_s is not None and (reported_s == configured_s) == (buffer_s == configured_s):
            return
        lasts = duration_words(ticks * self._settings.interval_s * 1000)
        holds = f"the buffer of {size / _MIB:g} MiB holds about {lasts} at {tick_bytes:.0f} bytes a tick"
        if buffer_s == configured_s:
            log.info("%s", holds)
            return
        enough_mib = math.ceil(size / _MIB * configured_s / buffer_s)
        wanted = duration_words(configured_s * 1000)
        log.warning("%s: give --buffer-size %dMiB, as --buffer wants %s", holds, enough_mib, wanted)
