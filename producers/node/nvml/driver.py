"""The driver: there, not there, silent, or another one than when this process began.

In: nvmlInit, on a thread of its own. Out: how many GPUs there are, or what is wrong.
State: whether NVML is open, and the last trouble with it.
On failure: :meth:`Driver.attach` never raises; whoever asks tries again. A nvmlInit that does not return is waited for,
and there is no second one beside it.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml import binding
from producers.node.nvml.binding import Nvml, NvmlError
from producers.node.nvml.worker import Worker

log = logging.getLogger(__name__)

SILENT_AFTER_S = 2.0
ENDS_WITHIN_S = 5.0

_TEXTS = {
    binding.LIBRARY_NOT_FOUND: (
        "no NVIDIA driver: libnvidia-ml.so.1 is not found; on a machine with GPUs install the driver, and give a"
        " container the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES=utility"
    ),
    binding.DRIVER_NOT_LOADED: (
        "no NVIDIA driver: its library is there, but its kernel module is not loaded, or /dev/nvidiactl is not visible"
    ),
    binding.NO_PERMISSION: "the NVIDIA driver refuses this user: NO_PERMISSION",
    binding.LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and its kernel module are of different versions: reboot, or load the module that"
        " belongs to the library"
    ),
}


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
        """Whether NVML is open."""
        return self._now is not None

    @property
    def count(self) -> int:
        """How many GPUs it has; 0 while it is not open."""
        return self._now.gpus if self._now else 0

    async def attach(self, why: str | None) -> None:
        """Open NVML; where ``why`` says why, close it before. Nothing else may be asked of NVML meanwhile."""
        job = self._worker.ask(self._reattach if why is not None else self._attach)
        job.add_done_callback(_heed)
        await asyncio.wait([job])
        error = job.exception()
        if error is None:
            self._attached_now(job.result(), why)
        elif isinstance(error, NvmlError):
            self._failed(error)
        else:
            raise error

    def judge(self, error: NvmlError) -> None:
        """An error that a call gave: whether the driver has been replaced."""
        if error.code == binding.LIB_RM_VERSION_MISMATCH and self._worked and self.fatal is None:
            self.fatal = DriverReplaced(
                "the NVIDIA driver was replaced while this process ran, and the library that it has loaded belongs to"
                " the old one: it must be started again"
            )

    def not_ready(self) -> list[str]:
        """What is wrong with it."""
        if self.fatal is not None:
            return [str(self.fatal)]
        if self._worker.busy_s() > SILENT_AFTER_S:
            waited_s = self._worker.busy_s()
            return [f"the NVIDIA driver does not answer: {self._doing} has not returned for {waited_s:.0f} s"]
        if self._now is None:
            return [_text(self._trouble)]
        return [] if self._now.gpus else ["the NVIDIA driver has no GPU"]

    def close(self, *, detach: bool, after: threading.Event) -> None:
        """Let the thread end, after closing NVML where ``detach`` says that nobody uses it but who ends ``after``."""
        if detach and self.attached and not self._worker.busy:
            self._worker.leave(lambda: self._detach_after(after))
        self._worker.stop()

    def _detach_after(self, after: threading.Event) -> None:
        if after.wait(ENDS_WITHIN_S):
            self._detach()

    def _reattach(self) -> _Attached:
        self._detach()
        return self._attach()

    def _attach(self) -> _Attached:
        self._doing = "nvmlInit"
        self._nvml.init()
        try:
            version = self._version()
            self._doing = "nvmlDeviceGetCount"
            return _Attached(version, self._nvml.count())
        except NvmlError:
            self._detach()
            raise

    def _version(self) -> str:
        """The driver's version; one that does not tell it is used all the same."""
        self._doing = "nvmlSystemGetDriverVersion"
        try:
            return self._nvml.driver_version()
        except NvmlError as error:
            return f"of a version that it does not tell ({error.name})"

    def _detach(self) -> None:
        self._doing = "nvmlShutdown"
        with contextlib.suppress(NvmlError):  # it is not open any more
            self._nvml.shutdown()

    def _attached_now(self, now: _Attached, why: str | None) -> None:
        self._now, self._trouble, self._worked = now, None, True
        self._instruments.counter(names.OPENED).inc()
        again = f", opened again: {why}" if why is not None else ""
        log.info("NVIDIA driver %s", f"{now.version} with {now.gpus} GPUs{again}")

    def _failed(self, error: NvmlError) -> None:
        if self._now is not None or self._trouble is None or self._trouble.code != error.code:
            log.warning("%s; it is tried again", _text(error))
        self._now, self._trouble = None, error
        self.judge(error)


def _heed(job: "asyncio.Future[_Attached]") -> None:
    """Take note of the outcome, so that nobody complains where none waits for it any more."""
    if not job.cancelled():
        job.exception()


def _text(trouble: NvmlError | None) -> str:
    if trouble is None:
        return "the NVIDIA driver has not been asked yet"
    return _TEXTS.get(trouble.code, f"the NVIDIA driver can't be opened: {trouble.name}")
