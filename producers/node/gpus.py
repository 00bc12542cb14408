"""The node's GPUs and their driver: gives the devices of each tick, whatever fails.

In: NVML, on threads of its own. Out: devices as in gpu.samples.
State: the GPUs that the driver has now, those that have disappeared since the start, and the result of the last census.
On failure: a GPU that hangs or is lost is reported as such, under its last identity, and the others go on. A call that
hangs is skipped, and the rest of its GPU is read. Without a driver there are no devices, and opening it is tried
again. :meth:`Gpus.fatal` is an error that only a new process can fix.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from delivery.instruments import Instruments
from delivery.tasks import set_within
from producers.node import instruments as names
from producers.node.cgroups import ProcessOwners
from producers.node.nvml.binding import Nvml
from producers.node.nvml.calls import FailedCall, LeftOut
from producers.node.nvml.driver import Census, Driver, Reopening
from producers.node.nvml.events import WAIT_S, Events, Xid, Xids
from producers.node.nvml.gpu import PhysicalGpu, log_fields, without_values
from producers.node.nvml.reader import GpuReader

log = logging.getLogger(__name__)

STATES = ("ok", "lost", "timeout")
KINDS = ("attributed", "host", "unseen")
QUIET_WITHIN_S = 2.0  # how long opening NVML waits for calls in flight; if they take longer, it is put off
TURNS_SHARE = 0.25  # the share of a tick within which the reading of every GPU begins, however slow the first ones are
SLOW_SHARE = 0.25  # the share of a tick that one call may take; one that takes longer is abandoned
HANGS_AFTER_S = 20.0  # a GPU hangs if its reading takes two intervals, or this long
SLOW_AFTER_S = 0.1  # no call is slow before that, however short the ticks are
_NUMBER_KEYS = ("index", "minor")


@dataclass(frozen=True, slots=True)
class CheckIntervals:
    """How often things are checked, in seconds. ``retry_s``: a missing driver; ``census_s``: the GPUs that a new
    process would see, or ``soon_s`` after one was lost; ``list_s``: the MIG devices of each GPU; ``xid_wait_s``:
    whether to go on waiting for XID errors."""

    retry_s: float = 5.0
    census_s: float = 40.0
    soon_s: float = 10.0
    list_s: float = 10.0
    xid_wait_s: float = WAIT_S


class UnreadableGpu(NamedTuple):
    """A GPU that can't be read, by its index in the driver, and the call that failed.
    ``uuid`` is None if the GPU can't even be opened."""

    gpu_index: int
    uuid: str | None
    failed_call: FailedCall


class Gpus:
    """Reads the GPUs of this node. Call :meth:`open`, then :meth:`read` each tick, and keep :meth:`run` running.
    ``interval_s`` is the time between ticks. ``nvml``, ``census``, ``intervals`` and ``clock`` are for tests."""

    def __init__(
        self,
        instruments: Instruments,
        owners: ProcessOwners,
        *,
        interval_s: float = 1.0,
        nvml: Nvml | None = None,
        census: Census | None = None,
        intervals: CheckIntervals = CheckIntervals(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instruments, self._owners, self._intervals, self._clock = instruments, owners, intervals, clock
        self._nvml = nvml or Nvml()
        self._hangs_after_s = min(max(2.0, 2 * interval_s), HANGS_AFTER_S)
        self._driver = Driver(self._nvml, instruments, clock)
        self._census = census
        self._reopening = Reopening(intervals.census_s, clock)
        self._xids = Xids(instruments)
        self._events = Events(self._nvml, instruments, on_xid=self._on_xid, clock=clock, wait_s=intervals.xid_wait_s)
        self._gpus: list[GpuReader] = []
        self._tick_number = 1  # a GpuReader begins at 0
        self._lost = LostGpus()
        self._opening: asyncio.Task[None] | None = None
        self._census_soon, self._event = asyncio.Event(), asyncio.Event()
        self._last_census_s = clock()

    async def open(self, within_s: float) -> None:
        """Open NVML and its GPUs; returns when that has succeeded or failed, or after ``within_s``."""
        ends_s = asyncio.get_running_loop().time() + within_s
        await asyncio.wait([self._open()], timeout=within_s)
        if self._driver.attached:
            self._tick_number += 1
            await self._read_gpus(ends_s)

    async def read(self, within_s: float) -> list[dict[str, Any]]:
        """The devices of one tick, in the order of their indexes, MIG devices after their GPU.

        A GPU that does not answer within ``within_s`` is ``timeout``, unless an earlier reading of it has ended since
        the last tick.
        """
        ends_s = asyncio.get_running_loop().time() + within_s
        if self._opening is not None and self._gpus:
            await asyncio.wait([self._opening], timeout=within_s)
        self._tick_number += 1
        await self._read_gpus(ends_s)
        readings = {gpu: reading for gpu in self._gpus if (reading := gpu.take_reading()) is not None}
        for gpu in self._gpus:
            gpu.log_hang()
        self._events.log_hang()
        devices_by_index = [(gpu.index, gpu.devices(readings.get(gpu))) for gpu in self._gpus if gpu.uuid is not None]
        some_unknown = any(gpu.state == "opening" for gpu in self._gpus)
        if self._driver.attached and not some_unknown:
            self._lost.report()
        present = [device for _, devices in devices_by_index for device in devices]
        devices_by_index += self._lost.devices("timeout" if some_unknown else "lost", present)
        devices = [device for _, devices in sorted(devices_by_index, key=lambda item: item[0]) for device in devices]
        state_counts = Counter(device["state"] for device in devices)
        for state in STATES:
            self._instruments.gauge(names.GPUS, state).set(state_counts[state])
        kind_by_pid = {pid: kind for reading in readings.values() for pid, kind in reading.process_kinds.items()}
        kind_counts = Counter(kind_by_pid.values())  # a process that is on two GPUs is one process
        for kind in KINDS:
            self._instruments.gauge(names.PROCESSES, kind).set(kind_counts[kind])
        return devices

    def with_events(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The devices of a tick with the XID errors that no tick has had. Each error is returned once: send it."""
        return self._xids.with_errors(devices)

    async def event(self) -> None:
        """Wait for an XID error that no earlier call has returned for."""
        await self._event.wait()
        self._event.clear()

    async def run(self) -> None:
        """Open the driver if it is missing, and check for GPUs that come, go or change. Runs until it is cancelled."""
        while True:
            if self._driver.attached:
                await self._run_census()
            else:
                await asyncio.shield(self._open())
                if not self._driver.attached:
                    await asyncio.sleep(self._intervals.retry_s)

    @property
    def busy(self) -> bool:
        """Whether a call to a GPU has not returned, so that NVML can't be closed."""
        return any(gpu.busy for gpu in self._gpus)

    @property
    def count(self) -> int:
        """How many GPUs the driver has; 0 without a driver."""
        return self._driver.count

    def not_ready(self) -> list[str]:
        lost_indexes = self._lost.indexes
        present = [gpu for gpu in self._gpus if not (gpu.state == "refused" and gpu.index in lost_indexes)]
        of_gpus = [text for gpu in present for text in gpu.not_ready()]
        of_driver = [*self._driver.not_ready(), *(self._census.not_ready() if self._census is not None else ())]
        return [*of_driver, *self._events.not_ready(), *self._lost.not_ready(), *of_gpus]

    def left_out(self) -> dict[str, LeftOut]:
        """The values that the last readings lack, by the UUID of the device, with the calls that failed."""
        present = [gpu for gpu in self._gpus if gpu.state != "refused"]  # a refused one may have the UUID of another
        left_out_by_uuid = {uuid: left_out for gpu in present for uuid, left_out in gpu.left_out().items()}
        refusals = self._events.refusals()
        for gpu in self._gpus:
            if gpu.uuid in left_out_by_uuid and gpu.index in refusals:
                left_out_by_uuid[gpu.uuid]["xids"] = (refusals[gpu.index],)
        return left_out_by_uuid

    def unreadable(self) -> list[UnreadableGpu]:
        """The GPUs whose last reading failed, or has not ended."""
        return [
            UnreadableGpu(gpu.index, gpu.uuid, failed_call)
            for gpu in self._gpus
            if (failed_call := gpu.failed_call()) is not None
        ]

    def fatal(self) -> Exception | None:
        """The error that only a new process can fix; None if there is none."""
        return self._driver.fatal

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._census is not None:
            self._census.close()
        for gpu in self._gpus:
            gpu.stop()
        self._driver.close(detach=not self.busy, after=self._events.close())

    @property
    def _is_opening(self) -> bool:
        """Whether NVML is being opened. Meanwhile no GPU may be read."""
        return self._opening is not None and not self._opening.done()

    def _open(self, reason: str | None = None) -> "asyncio.Task[None]":
        """Begin to open NVML; with a ``reason``, close it first. If it is being opened already, nothing new begins."""
        if self._opening is None or not self._is_opening:
            self._opening = asyncio.create_task(self._attach(reason))
        return self._opening

    async def _attach(self, reason: str | None) -> None:
        """Open NVML, and forget the GPUs that were open before. Opening it again makes all handles invalid. So that is
        put off while a call is in flight, or a GPU has not freed what NVML has allocated for it."""
        if reason is not None:
            is_quiet = await self._wait_until(lambda: not (self._events.busy or self.busy))
            releases = [gpu.release() for gpu in self._gpus] if is_quiet else []
            if releases:
                await asyncio.wait(releases, timeout=QUIET_WITHIN_S)
            if not (is_quiet and all(release.done() for release in releases)):
                self._events.resume()
                return
        await self._driver.attach(reason)
        for old_reader in self._gpus:
            if old_reader.uuid is not None:
                self._lost.expect(old_reader.uuid, old_reader.last_devices, logged=old_reader.state != "ok")
            old_reader.stop()
        clock, list_s, hangs_s = self._clock, self._intervals.list_s, self._hangs_after_s
        self._gpus = []
        for index in range(self._driver.count):
            gpu = PhysicalGpu(self._nvml, index, self._owners, list_every_s=list_s, clock=clock)
            reader = GpuReader(gpu, self._instruments, changed=self._on_reading, hangs_after_s=hangs_s, clock=clock)
            self._gpus.append(reader)
        self._last_census_s = self._clock()
        if self._driver.attached:
            self._events.resume()

    def _on_xid(self, xid: Xid) -> None:
        self._xids.record(xid, self._gpus[xid.gpu].last_devices if xid.gpu is not None else ())
        self._event.set()

    async def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, for at most QUIET_WITHIN_S; returns whether it became true."""
        ends_s = self._clock() + QUIET_WITHIN_S
        while not condition():
            if self._clock() > ends_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _read_gpus(self, ends_s: float) -> None:
        """Read every GPU that can be read, until the loop's time is ``ends_s``. While they are quick, one is read after
        the other, because their threads would spend more time on switching than in NVML."""
        loop, gpus = asyncio.get_running_loop(), self._gpus
        within_s = ends_s - loop.time()

        def may_read() -> bool:
            """Whether NVML has not been opened again since, so that these are still its GPUs."""
            return gpus is self._gpus and not self._is_opening

        for gpu in gpus:
            if not may_read():
                break
            if gpu.state != "refused":
                await gpu.begin(self._tick_number, TURNS_SHARE * within_s / len(gpus))
        slow_after_s = max(SLOW_AFTER_S, SLOW_SHARE * within_s)
        await asyncio.gather(*(gpu.finish(ends_s, slow_after_s, may_read) for gpu in gpus if gpu.is_reading))

    def _on_reading(self, gpu: GpuReader, began_to_fail: bool) -> None:
        """A GPU was read: its UUID may be known now, and whether it works."""
        if gpu.failure is not None and gpu.failure.lost is not None:
            self._driver.check_replaced(gpu.failure.lost.error)
        if began_to_fail:
            self._census_soon.set()
        if gpu.uuid is None:
            return
        if gpu.state == "ok" and not self._is_opening:
            self._events.add(gpu.index, gpu.gpu.handle)
        identities = self._lost.answered(gpu.uuid, works=gpu.state == "ok")
        if gpu.state != "ok":  # all that it has given may be its UUID
            gpu.last_devices = [{**identity, "index": gpu.index} for identity in identities] or gpu.last_devices
        others = [reader for reader in self._gpus if reader is not gpu and reader.uuid == gpu.uuid]
        if others:
            gpu.refuse(f"it has the UUID of GPU {others[0].index}")
        elif gpu.state == "ok":
            self._reopening.worked(gpu.uuid)

    async def _run_census(self) -> None:
        """Ask a new process which GPUs work, and open NVML again if a GPU works there and not here.
        Waits until the census is due: earlier, but not at once, if a GPU was lost."""
        await set_within(self._census_soon, self._last_census_s + self._intervals.census_s - self._clock())
        await asyncio.sleep(max(0.0, self._last_census_s + self._intervals.soon_s - self._clock()))
        self._census_soon.clear()
        if self._census is None:
            self._census = Census()
        if any(gpu.state == "opening" and not gpu.is_reading for gpu in self._gpus):
            # One that was not read yet would not count as working. This is not a tick.
            await self._read_gpus(asyncio.get_running_loop().time() + QUIET_WITHIN_S)
        working_in_child = await self._census.run()
        self._last_census_s = self._clock()
        if any(gpu.hangs for gpu in self._gpus):
            return  # NVML must not be closed now; no attempt is counted
        working_here = {gpu.uuid for gpu in self._gpus if gpu.state == "ok"}
        reason = self._reopening.reason(working_in_child or frozenset(), working_here)
        if reason is not None:
            self._events.pause()  # now, so that ticks do not have to wait for it
            await self._wait_until(lambda: not self._events.busy)
            await asyncio.shield(self._open(reason))


class LostGpus:
    """GPUs that were open before NVML was opened again, and that the driver does not open any more: ticks still report
    them, as lost. Each loss is logged once, and so is the return.

    Keeps the identities of each, first the GPU and then its MIG devices, until the process ends.
    """

    def __init__(self) -> None:
        self._missing: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._logged: set[str] = set()

    @property
    def indexes(self) -> set[int]:
        return {identities[0]["index"] for identities in self._missing.values()}

    def expect(self, uuid: str, identities: Sequence[Mapping[str, Any]], *, logged: bool) -> None:
        """NVML was opened again: this GPU is missing until it answers. ``logged``: its loss was logged before."""
        self._missing[uuid] = identities
        if logged:
            self._logged.add(uuid)

    def answered(self, uuid: str, *, works: bool) -> Sequence[Mapping[str, Any]]:
        """The GPU has given its UUID, so its reader reports it from now on; returns the identities that it had. Empty
        if it was not missing."""
        identities = self._missing.pop(uuid, ())
        if identities and uuid in self._logged:
            self._logged.discard(uuid)
            if works:
                log.info("%s is back", _title(identities), extra=log_fields(identities[0]))
        return identities

    def report(self) -> None:
        """Log each missing GPU once. Call it when every GPU of the driver has given its UUID."""
        for uuid in self._missing.keys() - self._logged:
            self._logged.add(uuid)
            log.warning("%s", _loss_text(self._missing[uuid]), extra=log_fields(self._missing[uuid][0]))

    def devices(self, state: str, present: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
        """The devices of each missing GPU, with the index that it had. ``present`` are the devices that answer.

        A driver gives the index and minor number of a missing GPU to another one. A missing device is reported without
        a number that another device has now, or had later than it.
        """
        if not self._missing:
            return []
        taken = {(key, device[key]) for device in present for key in _NUMBER_KEYS if key in device}
        devices_by_index = []
        for identities in reversed(self._missing.values()):  # of two that had the same number, the last one keeps it
            devices = [
                {key: value for key, value in device.items() if not (key in _NUMBER_KEYS and (key, value) in taken)}
                for device in without_values(identities, state)
            ]
            taken |= {(key, identities[0][key]) for key in _NUMBER_KEYS if key in identities[0]}
            devices_by_index.append((identities[0]["index"], devices))
        return devices_by_index

    def not_ready(self) -> list[str]:
        return [_loss_text(identities) for identities in self._missing.values()]


def _title(identities: Sequence[Mapping[str, Any]]) -> str:
    return f"GPU {identities[0].get('index')} ({identities[0]['uuid']})"


def _loss_text(identities: Sequence[Mapping[str, Any]]) -> str:
    return f"{_title(identities)} is lost: the driver does not open it any more"
