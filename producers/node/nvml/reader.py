"""One GPU for the event loop: it is read once per tick on a thread, and stays in the ticks while it does not answer.

In: the readings of a :class:`PhysicalGpu`. Out: its devices as in gpu.samples: ok, lost or timeout.
State: the identities of the GPU and its MIG devices, why it can't be read and since when, the reading that no tick has
had yet, and the threads whose calls hang.
On failure: a call that does not return in time is abandoned: another thread reads the rest at once, without that call,
until the call returns. A reading that ends after its tick goes into the next tick, with its own time. At most
MAX_ABANDONED calls of a GPU are abandoned at a time. If one more hangs, the GPU is ``timeout`` until one returns.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from delivery.instruments import Instruments
from delivery.values import counted
from producers.node import instruments as names
from producers.node.nvml.calls import LONGEST_WAIT, CallAbandoned, FailedCall, GpuLost, LeftOut
from producers.node.nvml.gpu import GpuReading, PhysicalGpu, log_fields, without_values
from producers.node.worker import Worker

log = logging.getLogger(__name__)
TIMEOUT = "TIMEOUT"  # the error of a call that has not returned
MAX_ABANDONED = 4  # threads of one GPU whose calls do not return, beside the thread that reads
SHORTEST_CHECK_S = 0.01
_QUICK_S = 0.1  # a reading that took less and came too late had to wait for the processor


class Failure(NamedTuple):
    """Why a GPU can't be read: a text for people, since when by the clock, and the loss, if NVML has reported one."""

    text: str
    since_s: float
    lost: GpuLost | None

    @property
    def call(self) -> FailedCall:
        return FailedCall("", self.text) if self.lost is None else FailedCall(self.lost.call, self.lost.error.name)


class GpuReader:
    """Reads ``gpu``. ``changed`` is called after each reading, with whether the GPU has begun to fail in it.
    ``failure`` says why the last reading failed; ``uuid`` is None until one has succeeded."""

    def __init__(
        self,
        gpu: PhysicalGpu,
        instruments: Instruments,
        *,
        changed: Callable[["GpuReader", bool], None],
        hangs_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.gpu, self.index = gpu, gpu.index
        self._instruments, self._changed, self._clock = instruments, changed, clock
        self._worker = Worker(f"nvml-{gpu.index}", clock)
        self._abandoned: list[Worker] = []
        self._reading: asyncio.Future[GpuReading] | None = None
        self._tick = self._last_read_tick = 0
        self._pending: tuple[int, GpuReading] | None = None
        self._late_reading: GpuReading | None = None
        self._hangs_after_s = hangs_after_s
        self._hang_logged = False
        self._slow_logged: set[str] = set()
        self.uuid: str | None = None
        self.last_devices: Sequence[Mapping[str, Any]] = ()
        self.failure: Failure | None = None

    @property
    def title(self) -> str:
        return f"GPU {self.index} ({self.uuid})" if self.uuid else f"GPU {self.index}"

    @property
    def state(self) -> Literal["opening", "ok", "lost", "refused"]:
        """The outcome of its last reading: ``opening`` (none has ended), ``ok``, ``lost``, or ``refused``: it could not
        be opened, or has the UUID of another GPU, and is not read any more."""
        if self.uuid is None:
            return "opening" if self.failure is None else "refused"
        return "ok" if self.failure is None else "lost"

    @property
    def is_reading(self) -> bool:
        """Whether a reading has not ended."""
        return self._worker.busy

    @property
    def busy(self) -> bool:
        """Whether any call has not returned: that of a reading, or one that was abandoned."""
        return self.is_reading or bool(self._abandoned)

    @property
    def hangs(self) -> bool:
        """Whether calls do not return, so that NVML must not be closed."""
        return self._is_silent or bool(self._abandoned)

    @property
    def _is_silent(self) -> bool:
        """Whether its reading takes so long that it must be reported."""
        return self._worker.busy_s() > self._hangs_after_s

    async def begin(self, tick: int, within_s: float) -> None:
        """Begin a tick: read the GPU, and wait for at most ``within_s``. Does nothing while the last reading runs."""
        self._tick = tick
        if not self.is_reading:
            await asyncio.wait([self._submit_reading()], timeout=within_s)

    async def finish(self, ends_s: float, slow_after_s: float, may_read: Callable[[], bool]) -> None:
        """Wait for the reading of this tick until the loop's time is ``ends_s``. A call that takes longer than
        ``slow_after_s`` is abandoned. While ``may_read`` is false, no reading begins."""
        loop = asyncio.get_running_loop()
        while (left_s := ends_s - loop.time()) > 0 and self._last_read_tick != self._tick:
            if may_read() and not (self.is_reading or self.state == "refused"):
                self._submit_reading()  # the last one was of an earlier tick
            elif may_read():
                self._abandon_slow_call(slow_after_s)
            if self._reading is None:
                return
            rest_s = slow_after_s - self.gpu.calls.running_s()  # below 0 if the call could not be abandoned
            check_s = max(SHORTEST_CHECK_S, rest_s) if rest_s > 0 else slow_after_s
            await asyncio.wait([self._reading], timeout=min(left_s, check_s))

    def take_reading(self) -> GpuReading | None:
        """The newest reading that no tick has had, or None. One of an earlier tick gets ``read_ms`` in its devices."""
        if self._pending is None:
            return None
        (tick, reading), self._pending = self._pending, None
        previous, self._late_reading = self._late_reading, reading if tick != self._tick else None
        if self._late_reading is None:
            if previous is not None:
                log.info("%s is read in time again", self.title)
            return reading
        if previous is None:
            log.warning("%s: it %s", self.title, self._late_text(reading))  # its subject has no figures that vary
        return reading._replace(devices=[{**device, "read_ms": reading.read_ms} for device in reading.devices])

    def devices(self, reading: GpuReading | None) -> Sequence[dict[str, Any]]:
        if reading is not None and reading.devices:
            return reading.devices
        return without_values(
            self.last_devices, "lost" if self.failure is not None and not self.is_reading else "timeout"
        )

    def left_out(self) -> dict[str, LeftOut]:
        """The values that the last reading lacks, by the UUID of the device, with the calls that failed; empty while a
        reading runs."""
        return {} if self.is_reading else self.gpu.left_out()

    def failed_call(self) -> FailedCall | None:
        """The call that ended the last reading, or that has not returned; None if it works."""
        if self.is_reading:
            return FailedCall(self.gpu.calls.current_call, TIMEOUT)
        return None if self.failure is None else self.failure.call

    def log_hang(self) -> None:
        """Log that the GPU does not answer, once for each hang."""
        if self._is_silent and not self._hang_logged:
            self._hang_logged = True
            log.warning(
                "%s has not answered for %.0f s (%s)", self.title, self._worker.busy_s(), self.gpu.calls.current_call
            )

    def not_ready(self) -> list[str]:
        slow_calls = [f"{self.title}: {call} {detail}" for call, detail in self.gpu.calls.slow().items()]
        if more := len(slow_calls[MAX_ABANDONED:]):  # as many are named as may never return
            slow_calls[MAX_ABANDONED:] = [f"{self.title}: also {counted(more, 'call')}, slow and left out"]
        if self._is_silent:
            silent_s, call = self._worker.busy_s(), self.gpu.calls.current_call
            return [f"{self.title} has not answered for {silent_s:.0f} s ({call})", *slow_calls]
        if self.failure is not None:
            failing_s = self._clock() - self.failure.since_s
            return [f"{self._failure_text(self.failure)} (for {failing_s:.0f} s)", *slow_calls]
        if self._late_reading is not None:
            return [f"{self.title} {self._late_text(self._late_reading)}", *slow_calls]
        return slow_calls

    def refuse(self, reason: str) -> None:
        """Do not report this GPU any more, for instance because another one has its UUID."""
        self.uuid, self.last_devices = None, ()
        self._set_failure(reason)

    def release(self) -> "asyncio.Future[None]":
        """Begin to free what NVML has allocated. Raises RuntimeError if the reader is busy."""
        return self._worker.submit(self.gpu.release)

    def stop(self) -> None:
        for worker in (self._worker, *self._abandoned):
            worker.stop()

    def _submit_reading(self) -> "asyncio.Future[GpuReading]":
        self._reading = reading = self._worker.submit(self.gpu.read)
        reading.add_done_callback(functools.partial(self._settle, self._worker, self._tick))
        return reading

    def _abandon_slow_call(self, slow_after_s: float) -> None:
        """Abandon the call that runs if it is slow, and read the rest on another thread."""
        if len(self._abandoned) == MAX_ABANDONED or self.gpu.calls.running_s() < slow_after_s:
            return
        try:
            new_worker = Worker(f"nvml-{self.index}", self._clock)
        except RuntimeError as error:  # as many threads as the system allows
            log.warning("%s: its slow call holds up the others: %s", self.title, error)
            return
        call = self.gpu.abandon(slow_after_s)
        if call is None:
            new_worker.stop()
            return
        if call not in self._slow_logged:
            self._slow_logged.add(call)
            log.warning(
                "%s has not returned for %.1f s; what it gives is left out until it is quick again",
                f"{self.title}: {call}",
                slow_after_s,
            )
        self._abandoned.append(self._worker)
        self._worker = new_worker
        self._submit_reading()

    def _settle(self, worker: Worker, tick: int, future: "asyncio.Future[GpuReading]") -> None:
        """A reading has ended, or an abandoned call has returned."""
        error = future.exception()
        if worker in self._abandoned:
            self._abandoned.remove(worker)
            worker.stop()
            if not isinstance(error, CallAbandoned):
                log.error("%s: a call that was left went on", self.title, exc_info=error)
            return
        self._reading, self._last_read_tick = None, tick
        if self._hang_logged:
            self._hang_logged = False
            log.info("%s has returned", self.title)
        if error is None:
            self._apply(future.result())
            return
        if self.failure is None:
            log.error("%s can't be read", self.title, exc_info=error)
        self._set_failure(f"{type(error).__name__}: {error}")

    def _apply(self, reading: GpuReading) -> None:
        """Take over a reading: count it, and log which values were lost, by the failed call, and which are back."""
        self._pending = self._last_read_tick, reading
        self._instruments.histogram(names.READ_SECONDS).observe(reading.took_s)
        for call, error in reading.errors:
            self._instruments.counter(names.NVML_ERRORS, call, error).inc()
        if reading.identity:
            self.uuid = str(reading.identity["uuid"])
            self.last_devices = reading.devices or self.last_devices or [reading.identity]
        for uuid, change in reading.availability_changes:
            device_title = self.title if uuid == self.uuid else f"{self.title}, MIG device {uuid}"
            for failed_call in dict.fromkeys(change.lost.values()):
                keys = ", ".join(key for key, candidate in change.lost.items() if candidate == failed_call)
                message = f"{device_title}: {failed_call.call} answers {failed_call.error}, and there is no {keys}"
                log.warning("%s; it is asked again, at the latest after %d ticks", message, LONGEST_WAIT)
            if change.regained:
                log.info("%s again", f"{device_title}: there is {', '.join(change.regained)}")
        for call in sorted(self._slow_logged - self.gpu.calls.slow().keys()):
            self._slow_logged.discard(call)
            log.info("%s is quick again", f"{self.title}: {call}")
        self._set_failure(str(reading.lost) if reading.lost else None, reading.lost)

    def _set_failure(self, text: str | None, lost: GpuLost | None = None) -> None:
        """Note why the last reading failed, None if it did not, and log it if that has begun or ended."""
        previous, self.failure = self.failure, None
        if text is not None:
            self.failure = Failure(text, self._clock() if previous is None else previous.since_s, lost)
            if previous is None:
                extra = log_fields(self.last_devices[0]) if self.last_devices else {}
                log.warning("%s", self._failure_text(self.failure), extra=extra)
        elif previous is not None:
            log.info("%s answers again", self.title)
        self._changed(self, self.failure is not None and previous is None)

    def _failure_text(self, failure: Failure) -> str:
        subject = f"GPU {self.index} can't be opened" if self.uuid is None else f"{self.title} is lost"
        return f"{subject}: {failure.text}"

    def _late_text(self, reading: GpuReading) -> str:
        later = "its values come in the next tick, with the time read_ms"
        if reading.took_s < _QUICK_S:
            return (
                f"was read too late for its tick, though it took only {reading.took_s:.2f} s:"
                f" this process gets too little CPU; {later}"
            )
        call, longest_s = reading.slowest
        return (
            f"takes {reading.took_s:.1f} s to read, too long for a tick; {later};"
            f" its slowest call was {call} ({longest_s:.2f} s)"
        )
