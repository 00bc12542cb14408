"""The node's GPUs, whatever becomes of them and of their driver: what the component asks each tick.

In: NVML, on threads of its own. Out: devices as in gpu.samples.
State: the GPUs of the driver that is open, those that have gone since the start, and what the last census saw.
On failure: a GPU that hangs or is lost is reported so, under the identity that it had, and the others go on; a call
that hangs is left out, and the rest of its GPU is read. Without a driver there are no devices, and it is tried again.
What only a new process can mend is :meth:`Gpus.fatal`.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml.binding import Nvml, Pynvml
from producers.node.nvml.calls import LeftOut, Tried
from producers.node.nvml.census import Census, Reopening
from producers.node.nvml.driver import Driver
from producers.node.nvml.events import Events, Xid
from producers.node.nvml.gpu import Gpu, Reading
from producers.node.nvml.lost_gpus import LostGpus
from producers.node.nvml.processes import Placing
from producers.node.nvml.threaded_gpu import ThreadedGpu
from producers.node.nvml.xids import Xids

log = logging.getLogger(__name__)

STATES = ("ok", "lost", "timeout")
KINDS = ("attributed", "host", "unseen")

QUIET_WITHIN_S = 2.0
"""How long to wait for the calls in flight before NVML is opened again; it is put off where one takes longer."""


TURNS_SHARE = 0.25
"""The share of a tick in which every GPU has begun to be read, however slow those before it are."""

SLOW_SHARE = 0.25
"""The share of a tick that one call may take; one that takes longer is left out."""

SLOW_AFTER_S = 0.1
"""No call is slow before that, however short the ticks are."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things are looked at, in seconds: a driver that is not there, the GPUs that a new process would see
    (``soon_s`` after one was lost), and the MIG devices of each GPU."""

    retry_s: float = 5.0
    census_s: float = 40.0
    soon_s: float = 10.0
    list_s: float = 10.0


class Refusal(NamedTuple):
    """The GPU at ``place`` of the driver can't be read, and why. ``uuid`` None: it could not be opened either, and is
    in no tick."""

    place: int
    uuid: str | None
    why: Tried


class Gpus:
    """Call :meth:`open`, then :meth:`read` each tick, and keep :meth:`run` running beside it.

    ``interval_s`` is that of the ticks. ``nvml``, ``census``, ``pace`` and ``clock`` are for tests.
    """

    def __init__(
        self,
        instruments: Instruments,
        places: Placing,
        *,
        interval_s: float = 1.0,
        nvml: Nvml | None = None,
        census: Census | None = None,
        pace: Pace = Pace(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instruments, self._places, self._pace, self._clock = instruments, places, pace, clock
        self._nvml = nvml or Pynvml()
        self._hangs_after_s = max(2.0, 2 * interval_s)
        self._driver = Driver(self._nvml, instruments, clock)
        self._census = census
        self._xids = Xids(instruments)
        self._events = Events(self._nvml, tell=self._told, count=self._count_error, clock=clock)
        self._gpus: list[ThreadedGpu] = []
        self._tick = 0
        self._lost = LostGpus()
        self._opening: asyncio.Task[None] | None = None
        self._reopening = Reopening(pace.census_s, clock)
        self._soon, self._event = asyncio.Event(), asyncio.Event()
        self._looked_s = clock()

    async def open(self, within_s: float) -> None:
        """Begin to open NVML and its GPUs; returns when that ended, well or not, or after ``within_s``."""
        ends_s = asyncio.get_running_loop().time() + within_s
        await asyncio.wait([self._open()], timeout=within_s)
        if self._driver.attached:
            await self._read(ends_s)

    async def read(self, within_s: float) -> list[dict[str, Any]]:
        """The devices of one tick, by index, MIG devices after their GPU; after ``within_s`` those that did not answer
        are ``timeout``, unless an earlier reading of theirs has ended since the last tick."""
        ends_s = asyncio.get_running_loop().time() + within_s
        if self._opening is not None and self._gpus:
            await asyncio.wait([self._opening], timeout=within_s)
        await self._read(ends_s)
        readings = {gpu: reading for gpu in self._gpus if (reading := gpu.take()) is not None}
        devices = self._report(readings)
        self._count(devices)
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
                await self._until_due()
                await self._look()
            else:
                await self._try()

    @property
    def count(self) -> int:
        """How many GPUs the driver has; 0 without a driver."""
        return self._driver.count

    def not_ready(self) -> list[str]:
        """What is wrong, for people."""
        indexes = self._lost.indexes
        here = [gpu for gpu in self._gpus if not (gpu.refused and gpu.index in indexes)]
        return [
            *self._driver.not_ready(),
            *self._lost.not_ready(),
            *(text for gpu in here for text in gpu.not_ready()),
        ]

    def left_out(self) -> dict[str, LeftOut]:
        """What the last readings could not have, by the UUID of the device, and why."""
        found = {uuid: left_out for gpu in self._gpus for uuid, left_out in gpu.left_out().items()}
        silent = self._events.refusals()
        for gpu in self._gpus:
            if gpu.uuid in found and gpu.index in silent:
                found[gpu.uuid]["xids"] = (silent[gpu.index],)
        return found

    def refusals(self) -> list[Refusal]:
        """The GPUs that can't be read now, and why."""
        asked = [(gpu, gpu.refusal()) for gpu in self._gpus]
        return [Refusal(gpu.index, gpu.uuid, why) for gpu, why in asked if why is not None]

    def fatal(self) -> Exception | None:
        """What only a new process can mend."""
        return self._driver.fatal

    def close(self) -> None:
        """Let go, without waiting for anybody."""
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
        """Open NVML, or open it again where ``why`` says why; one at a time."""
        if self._opening is None or not self._is_opening:
            self._opening = asyncio.create_task(self._attach(why))
        return self._opening

    async def _attach(self, why: str | None) -> None:
        if why is not None and not (await self._quiet() and await self._let_go()):
            self._events.watch()
            return
        await self._driver.attach(why)
        for gpu in self._gpus:
            if gpu.uuid is not None:
                self._lost.expect(gpu.uuid, gpu.known, told=not gpu.works)
            gpu.stop()
        self._gpus = [self._gpu(index) for index in range(self._driver.count)]
        self._looked_s = self._clock()
        if self._driver.attached:
            self._events.watch()

    def _told(self, xid: Xid) -> None:
        """An XID error has come."""
        self._xids.note(xid, self._gpus[xid.gpu].known if xid.gpu is not None else ())
        self._event.set()

    def _count_error(self, call: str, error: str) -> None:
        self._instruments.counter(names.NVML_ERRORS, call, error).inc()

    def _gpu(self, index: int) -> ThreadedGpu:
        gpu = Gpu(self._nvml, index, self._places, list_every_s=self._pace.list_s, clock=self._clock)
        return ThreadedGpu(
            gpu, self._instruments, changed=self._changed, hangs_after_s=self._hangs_after_s, clock=self._clock
        )

    async def _quiet(self) -> bool:
        """Wait until no call is in flight: handles are void when NVML is opened again."""
        return await self._until(lambda: not (self._events.busy or any(gpu.busy for gpu in self._gpus)))

    async def _until(self, quiet: Callable[[], bool]) -> bool:
        """Whether it came to that soon enough."""
        ends_s = self._clock() + QUIET_WITHIN_S
        while not quiet():
            if self._clock() > ends_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _let_go(self) -> bool:
        """Have every GPU give back what NVML has lent it; whether all have."""
        asked = [gpu.let_go() for gpu in self._gpus]
        if asked:
            await asyncio.wait(asked, timeout=QUIET_WITHIN_S)
        return all(one.done() for one in asked)

    async def _read(self, ends_s: float) -> None:
        """Have every GPU read that can be asked, until the loop's time is ``ends_s``.

        One after the other while they are quick, for their threads would spend more on taking turns than on NVML.
        """
        loop, gpus = asyncio.get_running_loop(), self._gpus
        within_s = ends_s - loop.time()
        self._tick += 1
        for gpu in gpus:
            if not self._may_read(gpus):
                break
            if not gpu.refused:
                await gpu.begin(self._tick, TURNS_SHARE * within_s / len(gpus))
        slow_after_s = max(SLOW_AFTER_S, SLOW_SHARE * within_s)
        slow = [gpu.finish(ends_s, slow_after_s, lambda: self._may_read(gpus)) for gpu in gpus if gpu.reads]
        await asyncio.gather(*slow)

    def _may_read(self, gpus: Sequence[ThreadedGpu]) -> bool:
        """Whether those are the GPUs of NVML as it is open now."""
        return gpus is self._gpus and not self._is_opening

    def _report(self, answers: Mapping[ThreadedGpu, Reading]) -> list[dict[str, Any]]:
        """Every device ever seen, by index."""
        for gpu in self._gpus:
            gpu.watch()
        found = [(gpu.index, gpu.devices(answers.get(gpu))) for gpu in self._gpus if gpu.uuid is not None]
        unsure = any(gpu.uuid is None and not gpu.refused for gpu in self._gpus)
        if self._driver.attached and not unsure:
            self._lost.report()
        here = [device for _, devices in found for device in devices]
        found += self._lost.devices("timeout" if unsure else "lost", here)
        self._count_kinds(answers.values())
        return [device for _, devices in sorted(found, key=lambda one: one[0]) for device in devices]

    def _count(self, devices: Iterable[Mapping[str, Any]]) -> None:
        states = Counter(device["state"] for device in devices)
        for state in STATES:
            self._instruments.gauge(names.GPUS, state).set(states[state])

    def _count_kinds(self, readings: Iterable[Reading]) -> None:
        """A process that is on two GPUs is one process."""
        kinds = Counter({pid: kind for reading in readings for pid, kind in reading.kinds.items()}.values())
        for kind in KINDS:
            self._instruments.gauge(names.PROCESSES, kind).set(kinds[kind])

    def _changed(self, gpu: ThreadedGpu) -> None:
        """A GPU was read: who it is may be known now, and whether it works."""
        if gpu.lost is not None:
            self._driver.judge(gpu.lost.error)
        if gpu.turned and not gpu.works:
            self._soon.set()
        if gpu.uuid is None:
            return
        if gpu.works and not self._is_opening:
            self._events.add(gpu.index, gpu.handle)
        self._lost.answered(gpu.uuid)
        if (twin := next((one for one in self._gpus if one is not gpu and one.uuid == gpu.uuid), None)) is not None:
            gpu.refuse(f"it has the UUID of GPU {twin.index}")
        elif gpu.works:
            self._reopening.worked(gpu.uuid)

    async def _try(self) -> None:
        opening = self._open()
        await asyncio.wait([opening])
        opening.result()
        if not self._driver.attached:
            await asyncio.sleep(self._pace.retry_s)

    async def _until_due(self) -> None:
        """Wait for the next census: sooner, but not at once, where a GPU was lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._looked_s + self._pace.census_s - self._clock()):
                await self._soon.wait()
        await asyncio.sleep(max(0.0, self._looked_s + self._pace.soon_s - self._clock()))
        self._soon.clear()

    async def _look(self) -> None:
        """Ask a new process which GPUs work; if one does that does not work here, open NVML again."""
        if self._census is None:
            self._census = Census()
        if not all(gpu.asked for gpu in self._gpus):  # else none of them would count as working
            await self._read(asyncio.get_running_loop().time() + QUIET_WITHIN_S)
        seen = await self._census.take()
        self._looked_s = self._clock()
        why = self._reopening.why(seen or frozenset(), {gpu.uuid for gpu in self._gpus if gpu.works})
        if why is not None and not any(gpu.hangs for gpu in self._gpus):
            self._events.pause()  # before ticks have to wait for it
            await self._until(lambda: not self._events.busy)
            opening = self._open(why)
            await asyncio.wait([opening])
            opening.result()
