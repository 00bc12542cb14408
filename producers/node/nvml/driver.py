"""The driver: whether it is there and answers, whether it was replaced, and when NVML has to be opened again.

In: nvmlInit, on a thread of its own; a short-lived child process that loads NVML for itself.
Out: how many GPUs there are, or what is wrong; the UUIDs of the GPUs that a new process would see, and why NVML must be
opened again. This process sees only the GPUs that were there when it attached to the driver.
State: whether NVML is open, and the last trouble with it; the child that runs, at most one; how often opening NVML
again did not help a GPU, and when to try again.
On failure: :meth:`Driver.attach` never raises; the caller tries again. If nvmlInit does not return, it is waited for,
and no second one begins. A child that fails, is slow or answers nonsense gives None, which changes nothing. A child
that can't even be killed is left alone, and no other begins before it has ended.

Why a child: to attach again, this process would have to detach first. Without persistence mode the driver would then
reset the GPUs' volatile counters, because nobody uses them any more.
"""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pynvml

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml import binding
from producers.node.nvml.binding import Nvml, NvmlError
from producers.node.worker import Worker

log = logging.getLogger(__name__)

SILENT_AFTER_S = 2.0
ENDS_WITHIN_S = 5.0
LONGEST_REOPENING_S = 3600.0  # opening NVML for a GPU that does not work afterwards either is tried at least this often

_TEXTS = {
    binding.LIBRARY_NOT_FOUND:
        "no NVIDIA driver: libnvidia-ml.so.1 is not found; on a machine with GPUs install the driver, and give a"
        " container the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES=utility",
    binding.DRIVER_NOT_LOADED:
        "no NVIDIA driver: its library is there, but its kernel module is not loaded, or /dev/nvidiactl is not visible",
    binding.NO_PERMISSION: "the NVIDIA driver refuses this user: NO_PERMISSION",
    binding.LIB_RM_VERSION_MISMATCH:
        "the NVIDIA driver's library and its kernel module are of different versions: reboot, or load the module that"
        " belongs to the library",
}  # fmt: skip

_SCRIPT = """
import json, sys
sys.path.append(sys.argv[1])
import pynvml

def works(index):
    uuid = None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return uuid if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED else None
    return uuid

pynvml.nvmlInit()
print(json.dumps([uuid for uuid in map(works, range(pynvml.nvmlDeviceGetCount())) if uuid]))
"""


class DriverReplaced(Exception):
    """The driver was replaced while this process ran, and the library that it has loaded is of the old one. A new
    process loads the new one."""

    exit_code = 70


class _Attached(NamedTuple):
    version: str
    gpus: int


class Driver:
    """NVML's own state. All methods are for the event loop's thread."""

    def __init__(self, nvml: Nvml, instruments: Instruments, clock: Callable[[], float]) -> None:
        self._nvml, self._instruments = nvml, instruments
        self._worker = Worker("nvml-driver", clock)
        self._doing = "nvmlInit"
        self._worked = False
        self._now: _Attached | None = None
        self._trouble: NvmlError | None = None
        self.fatal: DriverReplaced | None = None

    @property
    def attached(self) -> bool:
        return self._now is not None

    @property
    def count(self) -> int:
        """How many GPUs it has; 0 while it is not open."""
        return self._now.gpus if self._now else 0

    async def attach(self, why: str | None) -> None:
        """Open NVML; if ``why`` says why, close it before. Nothing else may be asked of NVML meanwhile."""
        job = self._worker.ask(lambda: self._attach(again=why is not None))
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # maybe nobody waits any more
        await asyncio.wait([job])
        error = job.exception()
        if error is None:
            self._now, self._trouble, self._worked = job.result(), None, True
            self._instruments.counter(names.OPENED).inc()
            again = f", opened again: {why}" if why is not None else ""
            log.info("NVIDIA driver %s", f"{self._now.version} with {self._now.gpus} GPUs{again}")
        elif isinstance(error, NvmlError):
            if self._now is not None or self._trouble is None or self._trouble.code != error.code:
                log.warning("%s; it is tried again", _text(error))
            self._now, self._trouble = None, error
            self.judge(error)
        else:
            raise error

    def judge(self, error: NvmlError) -> None:
        """Find out from an error that a call gave whether the driver has been replaced."""
        if error.code == binding.LIB_RM_VERSION_MISMATCH and self._worked and self.fatal is None:
            self.fatal = DriverReplaced(
                "the NVIDIA driver was replaced while this process ran, and the library that it has loaded belongs to"
                " the old one: it must be started again"
            )

    def not_ready(self) -> list[str]:
        if self.fatal is not None:
            return [str(self.fatal)]
        if (waited_s := self._worker.busy_s()) > SILENT_AFTER_S:
            return [f"the NVIDIA driver does not answer: {self._doing} has not returned for {waited_s:.0f} s"]
        if self._now is None:
            return [_text(self._trouble)]
        return [] if self._now.gpus else ["the NVIDIA driver has no GPU"]

    def close(self, *, detach: bool, after: threading.Event) -> None:
        """Let the thread end. If no GPU's thread uses NVML (``detach``), it is closed first, once ``after`` is set."""

        def detach_after() -> None:
            if after.wait(ENDS_WITHIN_S):
                self._detach()

        if detach and self.attached and not self._worker.busy:
            self._worker.leave(detach_after)
        self._worker.stop()

    def _attach(self, *, again: bool) -> _Attached:
        """Open NVML, on the thread. A driver that does not give its version is used all the same. Raises NvmlError."""
        if again:
            self._detach()
        self._call("nvmlInit")
        try:
            version = str(self._call("nvmlSystemGetDriverVersion"))
        except NvmlError as error:
            version = f"of an unknown version ({error.name})"
        self._doing = "nvmlDeviceGetCount"
        try:
            return _Attached(version, self._nvml.count())
        except NvmlError:
            self._detach()
            raise

    def _detach(self) -> None:
        with contextlib.suppress(NvmlError):  # it is not open any more
            self._call("nvmlShutdown")

    def _call(self, function: str) -> Any:
        self._doing = function
        return self._nvml.call(function)


def _text(trouble: NvmlError | None) -> str:
    if trouble is None:
        return "the NVIDIA driver has not been asked yet"
    return _TEXTS.get(trouble.code, f"the NVIDIA driver can't be opened: {trouble.name}")


class Census:
    """Asks a child which GPUs work for a new process. ``command`` is for tests."""

    def __init__(self, *, within_s: float = 10.0, command: Sequence[str] | None = None) -> None:
        self._within_s = within_s
        self._command = command or (sys.executable, "-I", "-S", "-c", _SCRIPT, str(Path(pynvml.__file__).parent))
        self._worker = Worker("nvml-census")
        self._child: subprocess.Popen[bytes] | None = None

    async def take(self) -> frozenset[str] | None:
        """The UUIDs of the GPUs that work; None if that can't be found out now."""
        if self._worker.busy:
            return None
        return await self._worker.ask(self._count)

    def close(self) -> None:
        """End the child, without waiting for its end."""
        self._worker.stop()
        if (child := self._child) is not None:
            child.kill()

    def _count(self) -> frozenset[str] | None:
        if self._child is not None and self._child.poll() is None:
            return None
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            child = subprocess.Popen(self._command, stdin=devnull, stdout=pipe, stderr=devnull)  # noqa: S603 - ours
        except OSError:  # the system gives no process or no memory
            return None
        self._child = child
        try:
            said, _ = child.communicate(timeout=self._within_s)
        except subprocess.TimeoutExpired:
            child.kill()
            if child.stdout is not None:
                child.stdout.close()
            return None
        return parse_census(said) if child.returncode == 0 else None


def parse_census(said: bytes) -> frozenset[str] | None:
    """The UUIDs that a child has printed; None if it has printed something else."""
    try:
        return frozenset(msgspec.json.decode(said, type=list[Annotated[str, msgspec.Meta(min_length=1)]]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Reopening:
    """Decides when NVML is opened again: less and less often if that does not help, since other GPUs suffer."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._clock = first_s, clock
        self._tried: dict[str, tuple[int, float]] = {}  # how often, and when it may be tried again

    def worked(self, uuid: str) -> None:
        self._tried.pop(uuid, None)

    def why(self, seen: Set[str], working: Set[str | None]) -> str | None:
        """Why NVML must be opened again, or None. ``seen``: what works for a new process; ``working``: for this."""
        now_s = self._clock()
        missing = sorted(uuid for uuid in seen - working if now_s >= self._tried.get(uuid, (0, now_s))[1])
        for uuid in missing:
            times, _ = self._tried.get(uuid, (-1, now_s))
            self._tried[uuid] = times + 1, now_s + min(LONGEST_REOPENING_S, self._first_s * 2 ** (times + 1))
        return f"{', '.join(missing)} would answer a new process, and not this one" if missing else None
