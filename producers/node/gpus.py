"""The node's GPUs and their driver: the component asks here for the devices of each tick, whatever fails.

In: NVML, on threads of its own. Out: devices as in gpu.samples.
State: the GPUs that the driver has now, those that have gone since the start, and what the last census saw.
On failure: a GPU that hangs or is lost is reported as such, under its last identity, and the others go on. A call that
hangs is left out, and the rest of its GPU is read. Without a driver there are no devices, and opening it is tried
again. :meth:`Gpus.fatal` is what only a new process can mend.
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
from producers.node.nvml.events import Events, Xid, Xids
from producers.node.nvml.gpu import PhysicalGpu, bare, log_fields
from producers.node.nvml.reader import GpuReader

log = logging.getLogger(__name__)

STATES = ("ok", "lost", "timeout")
KINDS = ("attributed", "host", "unseen")
QUIET_WITHIN_S = 2.0  # how long the opening of NVML waits for calls in flight; if they take longer, it is put off
TURNS_SHARE = 0.25  # the share of a tick within which the reading of every GPU begins, however slow the first ones are
SLOW_SHARE = 0.25  # the share of a tick that one call may take; one that takes longer is left out
SLOW_AFTER_S = 0.1  # no call is slow before that, however short the ticks are
_NUMBERS = ("index", "minor")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things are looked at, in seconds: a driver that is not there, the GPUs that a new process would see
    (``soon_s`` after one was lost), and the MIG devices of each GPU."""

    retry_s: float = 5.0
    census_s: float = 40.0
    soon_s: float = 10.0
    list_s: float = 10.0


class UnreadableGpu(NamedTuple):
    """A GPU that can't be read, by its index in the driver, and the call that failed.
    ``uuid`` is None if the GPU can't even be opened."""

    gpu_index: int
    uuid: str | None
    failed_call: FailedCall


class Gpus:
    """Call :meth:`open`, then :meth:`read` each tick, and keep :meth:`run` running beside it.
    ``interval_s`` is that of the ticks. ``nvml``, ``census``, ``pace`` and ``clock`` are for tests."""

    def __init__(
        self,
        instruments: Instruments,
        owners: ProcessOwners,
        *,
        interval_s: float = 1.0,
        nvml: Nvml | None = None,
        census: Census | None = None,
        pace: Pace = Pace(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instruments, self._owners, self._pace, self._clock = instruments, owners, pace, clock
        self._nvml = nvml or Nvml()
        self._hangs_after_s = max(2.0, 2 * interval_s)
        self._driver = Driver(self._nvml, instruments, clock)
        self._census = census
        self._reopening = Reopening(pace.census_s, clock)
        self._xids = Xids(instruments)
        self._events = Events(self._nvml, instruments, take=self._note, clock=clock)
        self._gpus: list[GpuReader] = []
        self._tick = 1  # a GpuReader begins at 0
        self._lost = LostGpus()
        self._opening: asyncio.Task[None] | None = None
        self._soon, self._event = asyncio.Event(), asyncio.Event()
        self._looked_s = clock()

    async def open(self, within_s: float) -> None:
        """Begin to open NVML and its GPUs; returns when that ended, well or not, or after ``within_s``."""
        ends_s = asyncio.get_running_loop().time() + within_s
        await asyncio.wait([self._open()], timeout=within_s)
        if self._driver.attached:
            self._tick += 1
            await self._read(ends_s)

    async def read(self, within_s: float) -> list[dict[str, Any]]:
        """The devices of one tick, by index, MIG devices after their GPU; after ``within_s`` those that did not answer
        are ``timeout``, unless an earlier reading of them has ended since the last tick."""
        ends_s = asyncio.get_running_loop().time() + within_s
        if self._opening is not None and self._gpus:
            await asyncio.wait([self._opening], timeout=within_s)
        self._tick += 1
        await self._read(ends_s)
        readings = {gpu: reading for gpu in self._gpus if (reading := gpu.take()) is not None}
        for gpu in self._gpus:
            gpu.watch()
        found = [(gpu.index, gpu.devices(readings.get(gpu))) for gpu in self._gpus if gpu.uuid is not None]
        unsure = any(gpu.uuid is None and not gpu.refused for gpu in self._gpus)
        if self._driver.attached and not unsure:
            self._lost.report()
        here = [device for _, devices in found for device in devices]
        found += self._lost.devices("timeout" if unsure else "lost", here)
        devices = [device for _, devices in sorted(found, key=lambda one: one[0]) for device in devices]
        states = Counter(device["state"] for device in devices)
        for state in STATES:
            self._instruments.gauge(names.GPUS, state).set(states[state])
        by_pid = {pid: kind for reading in readings.values() for pid, kind in reading.kinds.items()}
        kinds = Counter(by_pid.values())  # a process that is on two GPUs is one process
        for kind in KINDS:
            self._instruments.gauge(names.PROCESSES, kind).set(kinds[kind])
        return devices

    def with_events(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The devices of a tick with the XID errors that no tick has had. Send what it gives: it gives each once."""
        return self._xids.onto(devices)

    async def event(self) -> None:
        """Wait for an XID error that has come since this returned last."""
        await self._event.wait()
        self._event.clear()

    async def run(self) -> None:
        """Wait for a driver, and look for GPUs that come, go or change; until it is cancelled."""
        while True:
            if self._driver.attached:
                await self._take_census()
            else:
                await self._opened()
                if not self._driver.attached:
                    await asyncio.sleep(self._pace.retry_s)

    @property
    def count(self) -> int:
        """How many GPUs the driver has; 0 without a driver."""
        return self._driver.count

    def not_ready(self) -> list[str]:
        indexes = self._lost.indexes
        here = [gpu for gpu in self._gpus if not (gpu.refused and gpu.index in indexes)]
        of_gpus = [text for gpu in here for text in gpu.not_ready()]
        return [*self._driver.not_ready(), *self._lost.not_ready(), *of_gpus]

    def left_out(self) -> dict[str, LeftOut]:
        """What the last readings could not have, by the UUID of the device, and why."""
        found = {uuid: left_out for gpu in self._gpus for uuid, left_out in gpu.left_out().items()}
        silent = self._events.refusals()
        for gpu in self._gpus:
            if gpu.uuid in found and gpu.index in silent:
                found[gpu.uuid]["xids"] = (silent[gpu.index],)
        return found

    def refusals(self) -> list[UnreadableGpu]:
        return [UnreadableGpu(gpu.index, gpu.uuid, why) for gpu in self._gpus if (why := gpu.refusal()) is not None]

    def fatal(self) -> Exception | None:
        """What only a new process can mend."""
        return self._driver.fatal

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._census is not None:
            self._census.close()
        for gpu in self._gpus:
            gpu.stop()
        self._driver.close(detach=not any(gpu.busy for gpu in self._gpus), after=self._events.close())

    @property
    def _is_opening(self) -> bool:
        """While it is, no GPU may be asked anything."""
        return self._opening is not None and not self._opening.done()

    def _open(self, why: str | None = None) -> "asyncio.Task[None]":
        """Open NVML, or open it again if ``why`` says why; one at a time."""
        if self._opening is None or not self._is_opening:
            self._opening = asyncio.create_task(self._attach(why))
        return self._opening

    async def _opened(self, why: str | None = None) -> None:
        """Do so, and wait for the end."""
        opening = self._open(why)
        await asyncio.wait([opening])
        opening.result()

    async def _attach(self, why: str | None) -> None:
        """Open NVML, and forget the GPUs that were open before. Handles are void when NVML is opened again: it is put
        off while a call is in flight, or a GPU has not given back what NVML has lent it."""
        if why is not None:
            quiet = await self._until(lambda: not (self._events.busy or any(gpu.busy for gpu in self._gpus)))
            lent = [gpu.let_go() for gpu in self._gpus] if quiet else []
            if lent:
                await asyncio.wait(lent, timeout=QUIET_WITHIN_S)
            if not (quiet and all(one.done() for one in lent)):
                self._events.watch()
                return
        await self._driver.attach(why)
        for former in self._gpus:
            if former.uuid is not None:
                self._lost.expect(former.uuid, former.known, logged=not former.works)
            former.stop()
        clock, list_s, hangs_s = self._clock, self._pace.list_s, self._hangs_after_s
        self._gpus = []
        for index in range(self._driver.count):
            gpu = PhysicalGpu(self._nvml, index, self._owners, list_every_s=list_s, clock=clock)
            reader = GpuReader(gpu, self._instruments, changed=self._changed, hangs_after_s=hangs_s, clock=clock)
            self._gpus.append(reader)
        self._looked_s = self._clock()
        if self._driver.attached:
            self._events.watch()

    def _note(self, xid: Xid) -> None:
        self._xids.note(xid, self._gpus[xid.gpu].known if xid.gpu is not None else ())
        self._event.set()

    async def _until(self, quiet: Callable[[], bool]) -> bool:
        """Wait until it is; whether it came to that soon enough."""
        ends_s = self._clock() + QUIET_WITHIN_S
        while not quiet():
            if self._clock() > ends_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _read(self, ends_s: float) -> None:
        """Have every GPU read that can be asked, until the loop's time is ``ends_s``.
        One after the other while they are quick, for their threads would spend more on taking turns than on NVML."""
        loop, gpus = asyncio.get_running_loop(), self._gpus
        within_s = ends_s - loop.time()

        def may_read() -> bool:
            """Whether those are the GPUs of NVML as it is open now."""
            return gpus is self._gpus and not self._is_opening

        for gpu in gpus:
            if not may_read():
                break
            if not gpu.refused:
                await gpu.begin(self._tick, TURNS_SHARE * within_s / len(gpus))
        slow_after_s = max(SLOW_AFTER_S, SLOW_SHARE * within_s)
        await asyncio.gather(*(gpu.finish(ends_s, slow_after_s, may_read) for gpu in gpus if gpu.reads))

    def _changed(self, gpu: GpuReader) -> None:
        """A GPU was read: who it is may be known now, and whether it works."""
        if gpu.lost is not None:
            self._driver.judge(gpu.lost.error)
        if gpu.turned and not gpu.works:
            self._soon.set()
        if gpu.uuid is None:
            return
        if gpu.works and not self._is_opening:
            self._events.add(gpu.index, gpu.gpu.handle)
        self._lost.answered(gpu.uuid)
        if (twin := next((one for one in self._gpus if one is not gpu and one.uuid == gpu.uuid), None)) is not None:
            gpu.refuse(f"it has the UUID of GPU {twin.index}")
        elif gpu.works:
            self._reopening.worked(gpu.uuid)

    async def _take_census(self) -> None:
        """Ask a new process which GPUs work, and open NVML again if one does that does not work here.
        Waits before that until it is due: sooner, but not at once, if a GPU was lost."""
        await set_within(self._soon, self._looked_s + self._pace.census_s - self._clock())
        await asyncio.sleep(max(0.0, self._looked_s + self._pace.soon_s - self._clock()))
        self._soon.clear()
        if self._census is None:
            self._census = Census()
        if not all(gpu.asked for gpu in self._gpus):  # else none would count as working; that is no tick of its own
            await self._read(asyncio.get_running_loop().time() + QUIET_WITHIN_S)
        seen = await self._census.take()
        self._looked_s = self._clock()
        why = self._reopening.why(seen or frozenset(), {gpu.uuid for gpu in self._gpus if gpu.works})
        if why is not None and not any(gpu.hangs for gpu in self._gpus):
            self._events.pause()  # before ticks have to wait for it
            await self._until(lambda: not self._events.busy)
            await self._opened(why)


class LostGpus:
    """GPUs that were there before NVML was opened again, and that the driver does not open any more: lost, not
    forgotten. Each that is missing is logged, unless its loss was logged before, and so is its return.

    Keeps who they were, the GPU and then its MIG devices, for as long as the process.
    """

    def __init__(self) -> None:
        self._known: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._logged: set[str] = set()

    @property
    def indexes(self) -> set[int]:
        return {known[0]["index"] for known in self._known.values()}

    def expect(self, uuid: str, known: Sequence[Mapping[str, Any]], *, logged: bool) -> None:
        """NVML is opened again: until this GPU answers, it is missing. ``logged``: its loss was logged before."""
        self._known[uuid] = known
        if logged:
            self._logged.add(uuid)

    def answered(self, uuid: str) -> None:
        known = self._known.pop(uuid, None)
        if known is not None and uuid in self._logged:
            self._logged.discard(uuid)
            log.info("%s is back", _title(known), extra=log_fields(known[0]))

    def report(self) -> None:
        """Log of each, once, that it is missing: every GPU that the driver has was asked who it is."""
        for uuid in self._known.keys() - self._logged:
            self._logged.add(uuid)
            log.warning("%s", _trouble(self._known[uuid]), extra=log_fields(self._known[uuid][0]))

    def devices(self, state: str, here: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
        """Those of each, with the index that it had; ``here`` are the devices that are not missing. A driver gives the
        numbers of a missing GPU to others: one that another has by now is not this one's any more."""
        if not self._known:
            return []
        taken = {(key, one[key]) for one in here for key in _NUMBERS if key in one}
        found = []
        for known in self._known.values():
            devices = [
                {key: value for key, value in one.items() if not (key in _NUMBERS and (key, value) in taken)}
                for one in bare(known, state)
            ]
            found.append((known[0]["index"], devices))
        return found

    def not_ready(self) -> list[str]:
        return [_trouble(known) for known in self._known.values()]


def _title(known: Sequence[Mapping[str, Any]]) -> str:
    return f"GPU {known[0].get('index')} ({known[0]['uuid']})"


def _trouble(known: Sequence[Mapping[str, Any]]) -> str:
    return f"{_title(known)} is lost: the driver does not open it any more"
