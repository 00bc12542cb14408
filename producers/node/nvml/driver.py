"""The driver: whether it is there and answers, whether it was replaced, and when NVML has to be opened again.

In: nvmlInit, on a thread of its own; a short-lived child process that loads NVML for itself.
Out: the number of GPUs, or an error; the UUIDs of the GPUs that a new process would see; the reason to open NVML again.
This process only sees the GPUs that existed when it attached to the driver.
State: whether NVML is open, and its last error; the child that runs, at most one; how often opening NVML again did not
help a GPU, and when to try again.
On failure: :meth:`Driver.attach` never raises; the caller tries again. If nvmlInit does not return, no second one
begins until it does. A child that fails, is slow or prints nonsense gives None, which changes nothing. If a child can't
even be killed, no other begins before it has ended.

Why a child process: to attach again, this process would have to detach first. Without persistence mode the driver would
then reset the GPUs' volatile counters, because no process uses them any more.
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
LONGEST_REOPENING_S = 3600.0  # the longest time between two attempts to open NVML again for one GPU

_MESSAGES = {
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
        refused = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION)  # the latter in MIG mode
        return uuid if error.value in refused else None
    return uuid

pynvml.nvmlInit()
print(json.dumps([uuid for uuid in map(works, range(pynvml.nvmlDeviceGetCount())) if uuid]))
"""


class DriverReplaced(Exception):
    """The driver was replaced while this process ran, which still has the old driver's library loaded. Start a new
    process: it loads the new library."""

    exit_code = 70


class _AttachedDriver(NamedTuple):
    version: str
    gpus: int


class Driver:
    """Opens and closes NVML. All methods are for the event loop's thread."""

    def __init__(self, nvml: Nvml, instruments: Instruments, clock: Callable[[], float]) -> None:
        self._nvml, self._instruments = nvml, instruments
        self._worker = Worker("nvml-driver", clock)
        self._current_call = "nvmlInit"
        self._worked = False
        self._attached_driver: _AttachedDriver | None = None
        self._error: NvmlError | None = None
        self.fatal: DriverReplaced | None = None

    @property
    def attached(self) -> bool:
        return self._attached_driver is not None

    @property
    def count(self) -> int:
        """How many GPUs it has; 0 while it is not open."""
        return self._attached_driver.gpus if self._attached_driver else 0

    async def attach(self, reason: str | None) -> None:
        """Open NVML; with a ``reason``, close it first. Make no other call of NVML meanwhile."""
        job = self._worker.submit(lambda: self._attach(again=reason is not None))
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits for it any more
        await asyncio.wait([job])
        error = job.exception()
        if error is None:
            self._attached_driver, self._error, self._worked = job.result(), None, True
            self._instruments.counter(names.OPENED).inc()
            version, gpus = job.result()
            again = f", opened again: {reason}" if reason is not None else ""
            log.info("NVIDIA driver %s", f"{version} with {gpus} GPUs{again}")
        elif isinstance(error, NvmlError):
            if self._attached_driver is not None or self._error is None or self._error.code != error.code:
                log.warning("%s; it is tried again", _message(error))
            self._attached_driver, self._error = None, error
            self.check_replaced(error)
        else:
            raise error

    def check_replaced(self, error: NvmlError) -> None:
        """Set ``fatal`` if the error of a call shows that the driver was replaced."""
        if error.code == binding.LIB_RM_VERSION_MISMATCH and self._worked and self.fatal is None:
            self.fatal = DriverReplaced(
                "the NVIDIA driver was replaced while this process ran, and the library that it has loaded belongs to"
                " the old one: it must be started again"
            )

    def not_ready(self) -> list[str]:
        if self.fatal is not None:
            return [str(self.fatal)]
        if (waited_s := self._worker.busy_s()) > SILENT_AFTER_S:
            return [f"the NVIDIA driver does not answer: {self._current_call} has not returned for {waited_s:.0f} s"]
        if self._attached_driver is None:
            return [_message(self._error)]
        return [] if self._attached_driver.gpus else ["the NVIDIA driver has no GPU"]

    def close(self, *, detach: bool, after: threading.Event) -> None:
        """Let the thread end. With ``detach``, which needs that no GPU's thread uses NVML, NVML is closed first, once
        ``after`` is set."""

        def detach_after() -> None:
            if after.wait(ENDS_WITHIN_S):
                self._detach()

        if detach and self.attached and not self._worker.busy:
            self._worker.submit_last(detach_after)
        self._worker.stop()

    def _attach(self, *, again: bool) -> _AttachedDriver:
        """Open NVML, on the thread. A driver that does not give its version is used anyway. Raises NvmlError."""
        if again:
            self._detach()
        self._call("nvmlInit")
        try:
            version = str(self._call("nvmlSystemGetDriverVersion"))
        except NvmlError as error:
            version = f"of an unknown version ({error.name})"
        self._current_call = "nvmlDeviceGetCount"
        try:
            return _AttachedDriver(version, self._nvml.count())
        except NvmlError:
            self._detach()
            raise

    def _detach(self) -> None:
        with contextlib.suppress(NvmlError):  # it is closed already
            self._call("nvmlShutdown")

    def _call(self, function: str) -> Any:
        self._current_call = function
        return self._nvml.call(function)


def _message(error: NvmlError | None) -> str:
    if error is None:
        return "the NVIDIA driver has not been asked yet"
    return _MESSAGES.get(error.code, f"the NVIDIA driver can't be opened: {error.name}")


class Census:
    """Finds out which GPUs work for a new process, by a child process. ``command`` is for tests."""

    def __init__(self, *, within_s: float = 10.0, command: Sequence[str] | None = None) -> None:
        self._within_s = within_s
        self._command = command or (sys.executable, "-I", "-S", "-c", _SCRIPT, str(Path(pynvml.__file__).parent))
        self._worker = Worker("nvml-census")
        self._child: subprocess.Popen[bytes] | None = None
        self._logged: subprocess.Popen[bytes] | None = None

    async def run(self) -> frozenset[str] | None:
        """The UUIDs of the GPUs that work; None if that can't be found out now."""
        if self._worker.busy:
            return None
        if problems := self.not_ready():
            if self._logged is not self._child:
                self._logged = self._child
                log.warning("%s", problems[0])
            return None
        return await self._worker.submit(self._run_child)

    def not_ready(self) -> list[str]:
        """The child that was killed and has not ended: the kernel ends no process within a call of the driver."""
        if self._worker.busy or self._child is None or self._child.poll() is not None:
            return []
        return [
            f"the NVIDIA driver does not answer a new process (pid {self._child.pid}), which can't be ended: programs"
            " that start on its GPUs may hang, and a GPU that is new or works again is not noticed"
        ]

    def close(self) -> None:
        """End the child, without waiting for its end."""
        self._worker.stop()
        if (child := self._child) is not None:
            child.kill()

    def _run_child(self) -> frozenset[str] | None:
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            child = subprocess.Popen(self._command, stdin=devnull, stdout=pipe, stderr=devnull)  # noqa: S603 - ours
        except OSError:  # the system gives no process or no memory
            return None
        self._child = child
        try:
            output, _ = child.communicate(timeout=self._within_s)
        except subprocess.TimeoutExpired:
            child.kill()
            if child.stdout is not None:
                child.stdout.close()
            return None
        return parse_census(output) if child.returncode == 0 else None


def parse_census(output: bytes) -> frozenset[str] | None:
    """The UUIDs that a child has printed; None if it has printed something else."""
    try:
        return frozenset(msgspec.json.decode(output, type=list[Annotated[str, msgspec.Meta(min_length=1)]]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Reopening:
    """Decides when NVML is opened again: less and less often if that does not help, because it delays other GPUs."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._clock = first_s, clock
        self._attempts: dict[str, tuple[int, float]] = {}  # how often, and when it may be tried again

    def worked(self, uuid: str) -> None:
        self._attempts.pop(uuid, None)

    def reason(self, working_in_child: Set[str], working_here: Set[str | None]) -> str | None:
        """Why NVML must be opened again, or None. The sets are the UUIDs of the GPUs that work for a child process, and
        of those that work for this process."""
        now_s = self._clock()
        missing = sorted(
            uuid for uuid in working_in_child - working_here if now_s >= self._attempts.get(uuid, (0, now_s))[1]
        )
        for uuid in missing:
            attempts, _ = self._attempts.get(uuid, (0, now_s))
            wait_s = min(LONGEST_REOPENING_S, self._first_s * 2 ** min(attempts, 16))  # 2**1024 is no float
            self._attempts[uuid] = attempts + 1, now_s + wait_s
        return f"{', '.join(missing)} would answer a new process, and not this one" if missing else None
