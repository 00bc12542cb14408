"""One GPU as the event loop sees it: read once per tick on a thread, and known while it does not answer.

In: the readings of a :class:`PhysicalGpu`. Out: its devices as in gpu.samples: ok, lost or timeout.
State: who the GPU and its MIG devices are, whether it is lost and since when, the reading that no tick has had yet, and
the threads whose calls hang.
On failure: a call that does not return in time is left to its thread. Another thread reads the rest at once, without
that call, until it has returned. A reading that ends after its tick goes into the next tick, with its own time. At most
MOST_LEFT calls of a GPU are left to threads. If one more hangs, the GPU is ``timeout`` until one of them returns.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml.calls import LONGEST_WAIT, FailedCall, Left, LeftOut, Lost
from producers.node.nvml.gpu import GpuReading, PhysicalGpu, bare, log_fields
from producers.node.worker import Worker

log = logging.getLogger(__name__)
TIMEOUT = "TIMEOUT"  # the error of a call that has not returned
MOST_LEFT = 4  # threads of one GPU that wait for calls which do not return, beside the one that reads
SHORTEST_CHECK_S = 0.01


class GpuReader:
    """Reads ``gpu``. ``changed`` is called after each reading; ``turned`` says if trouble began or ended with it."""

    def __init__(
        self,
        gpu: PhysicalGpu,
        instruments: Instruments,
        *,
        changed: Callable[["GpuReader"], None],
        hangs_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gpu, self.index = gpu, gpu.index
        self._instruments, self._changed, self._clock = instruments, changed, clock
        self._worker = Worker(f"nvml-{gpu.index}", clock)
        self._left: list[Worker] = []
        self._reading: asyncio.Future[GpuReading] | None = None
        self._tick = self._read_in = 0
        self._newest: tuple[int, GpuReading] | None = None
        self._late: GpuReading | None = None
        self._hangs_after_s = hangs_after_s
        self._hang_logged = False
        self._slow_logged: set[str] = set()
        self._since_s = clock()
        self.uuid: str | None = None
        self.known: Sequence[Mapping[str, Any]] = ()
        self.trouble: str | None = None
        self.lost: Lost | None = None
        self.turned = False
        self.asked = False

    @property
    def title(self) -> str:
        return f"GPU {self.index} ({self.uuid})" if self.uuid else f"GPU {self.index}"

    @property
    def busy(self) -> bool:
        """Whether a call has not returned."""
        return self._worker.busy or bool(self._left)

    @property
    def reads(self) -> bool:
        """Whether a reading has not ended."""
        return self._worker.busy

    @property
    def hangs(self) -> bool:
        """Whether calls do not return, so that NVML may not be closed."""
        return self._is_silent or bool(self._left)

    @property
    def refused(self) -> bool:
        """Whether it could not be opened, so that it is not asked any more."""
        return self.trouble is not None and self.uuid is None

    @property
    def works(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.uuid is not None and self.trouble is None

    @property
    def _is_silent(self) -> bool:
        """Whether its reading takes so long that it must be reported."""
        return self._worker.busy_s() > self._hangs_after_s

    async def begin(self, tick: int, within_s: float) -> None:
        """Begin a tick: read, and wait for the end for that long; not if the last reading has not ended."""
        self._tick = tick
        if not self._worker.busy:
            await asyncio.wait([self._read()], timeout=within_s)

    async def finish(self, ends_s: float, slow_after_s: float, may_read: Callable[[], bool]) -> None:
        """Wait for the reading of this tick until the loop's time is ``ends_s``. A call that takes longer than
        ``slow_after_s`` is left to its thread. While ``may_read`` says no, no reading begins."""
        loop = asyncio.get_running_loop()
        while (left_s := ends_s - loop.time()) > 0 and self._read_in != self._tick:
            if may_read() and not (self._worker.busy or self.refused):
                self._read()  # the last one was of an earlier tick
            elif may_read():
                self._leave(slow_after_s)
            if self._reading is None:
                return
            rest_s = slow_after_s - self.gpu.calls.running_s()  # below 0 if the call could not be left
            check_s = max(SHORTEST_CHECK_S, rest_s) if rest_s > 0 else slow_after_s
            await asyncio.wait([self._reading], timeout=min(left_s, check_s))

    def take(self) -> GpuReading | None:
        """The newest reading that no tick has had; each is taken once. Of an earlier tick it has its own time."""
        if self._newest is None:
            return None
        (tick, reading), self._newest = self._newest, None
        before, self._late = self._late, reading if tick != self._tick else None
        if self._late is None:
            if before is not None:
                log.info("%s is read in time again", self.title)
            return reading
        if before is None:
            log.warning("%s", self._late_text(reading))
        return reading._replace(devices=[{**device, "read_ms": reading.read_ms} for device in reading.devices])

    def devices(self, reading: GpuReading | None) -> Sequence[dict[str, Any]]:
        if reading is not None and reading.devices:
            return reading.devices
        return bare(self.known, "lost" if self.trouble is not None and not self.reads else "timeout")

    def left_out(self) -> dict[str, LeftOut]:
        """What the last reading could not have, by the UUID of the device, and why; nothing while it reads."""
        return {} if self.reads else self.gpu.left_out()

    def refusal(self) -> FailedCall | None:
        """The call that ended the last reading, or that has not returned; None if it works."""
        if self.reads:
            return FailedCall(self.gpu.calls.doing, TIMEOUT)
        if self.lost is not None:
            return FailedCall(self.lost.call, self.lost.error.name)
        return FailedCall("", self.trouble) if self.trouble is not None else None

    def watch(self) -> None:
        """Log once that it does not answer."""
        if self._is_silent and not self._hang_logged:
            self._hang_logged = True
            log.warning("%s has not answered for %.0f s (%s)", self.title, self._worker.busy_s(), self.gpu.calls.doing)

    def not_ready(self) -> list[str]:
        found = [f"{self.title}: {call} {how}" for call, how in self.gpu.calls.slow().items()]
        if self._is_silent:
            silent_s, doing = self._worker.busy_s(), self.gpu.calls.doing
            return [f"{self.title} has not answered for {silent_s:.0f} s ({doing})", *found]
        if self.trouble is not None:
            return [f"{self._trouble_text()} (for {self._clock() - self._since_s:.0f} s)", *found]
        return found if self._late is None else [self._late_text(self._late), *found]

    def refuse(self, why: str) -> None:
        """Never report it: another GPU has its UUID."""
        self.uuid, self.known = None, ()
        self._change(why)

    def let_go(self) -> "asyncio.Future[None]":
        """Begin to give back what NVML has lent. Only for one that is not busy."""
        return self._worker.ask(self.gpu.let_go)

    def stop(self) -> None:
        for worker in (self._worker, *self._left):
            worker.stop()

    def _read(self) -> "asyncio.Future[GpuReading]":
        self.asked = True
        self._reading = reading = self._worker.ask(self.gpu.read)
        reading.add_done_callback(functools.partial(self._settle, self._worker, self._tick))
        return reading

    def _leave(self, slow_after_s: float) -> None:
        """Leave a slow call to its thread, and read the rest on another one."""
        if len(self._left) == MOST_LEFT or self.gpu.calls.running_s() < slow_after_s:
            return
        try:
            other = Worker(f"nvml-{self.index}", self._clock)
        except RuntimeError as error:  # as many threads as the system allows
            log.warning("%s: its slow call holds up the others: %s", self.title, error)
            return
        call = self.gpu.leave(slow_after_s)
        if call is None:
            other.stop()
            return
        if call not in self._slow_logged:
            self._slow_logged.add(call)
            log.warning(
                "%s has not returned for %.1f s; what it gives is left out until it is quick again",
                f"{self.title}: {call}",
                slow_after_s,
            )
        self._left.append(self._worker)
        self._worker = other
        self._read()

    def _settle(self, worker: Worker, tick: int, future: "asyncio.Future[GpuReading]") -> None:
        """A reading has ended, or the call that it was left in has returned."""
        fault = future.exception()
        if worker in self._left:
            self._left.remove(worker)
            worker.stop()
            if not isinstance(fault, Left):
                log.error("%s: a call that was left went on", self.title, exc_info=fault)
            return
        self._reading, self._read_in = None, tick
        if self._hang_logged:
            self._hang_logged = False
            log.info("%s has returned", self.title)
        if fault is None:
            self._take(future.result())
            return
        if self.trouble is None:
            log.error("%s can't be read", self.title, exc_info=fault)
        self._change(f"{type(fault).__name__}: {fault}")

    def _take(self, reading: GpuReading) -> None:
        """Note a reading: count it, log which values have gone, by the call that gave them, and which are back."""
        self._newest = self._read_in, reading
        self._instruments.histogram(names.READ_SECONDS).observe(reading.took_s)
        for call, error in reading.errors:
            self._instruments.counter(names.NVML_ERRORS, call, error).inc()
        if reading.identity is not None:
            self.uuid = str(reading.identity["uuid"])
            self.known = reading.devices or self.known or [reading.identity]
        for uuid, turn in reading.turns:
            whose = self.title if uuid == self.uuid else f"{self.title}, MIG device {uuid}"
            for tried in dict.fromkeys(turn.gone.values()):
                keys = ", ".join(key for key, one in turn.gone.items() if one == tried)
                what = f"{whose}: {tried.call} answers {tried.error}, and there is no {keys}"
                log.warning("%s; it is asked again, at the latest after %d ticks", what, LONGEST_WAIT)
            if turn.back:
                log.info("%s again", f"{whose}: there is {', '.join(turn.back)}")
        for call in sorted(self._slow_logged - self.gpu.calls.slow().keys()):
            self._slow_logged.discard(call)
            log.info("%s is quick again", f"{self.title}: {call}")
        self.lost = reading.trouble
        self._change(str(reading.trouble) if reading.trouble else None)

    def _change(self, trouble: str | None) -> None:
        before, self.trouble = self.trouble, trouble
        self.turned = (trouble is None) is not (before is None)
        if trouble is not None and before is None:
            self._since_s = self._clock()
            log.warning("%s", self._trouble_text(), extra=log_fields(self.known[0]) if self.known else {})
        elif trouble is None and before is not None:
            log.info("%s answers again", self.title)
        self._changed(self)

    def _trouble_text(self) -> str:
        if self.uuid is None:
            return f"GPU {self.index} can't be opened: {self.trouble}"
        return f"{self.title} is lost: {self.trouble}"

    def _late_text(self, reading: GpuReading) -> str:
        call, longest_s = reading.slowest
        return (
            f"{self.title} takes {reading.took_s:.1f} s to read, too long for a tick; its values come in the next one,"
            f" with the time read_ms; its slowest call was {call} ({longest_s:.2f} s)"
        )
