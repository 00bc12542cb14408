"""The calls of one GPU, on its thread: the one that runs, those that are slow, and when an error means the GPU is gone.

In: questions to NVML. Out: answers.
State: the call that has not returned, the errors of this reading, and the calls that were slow.
On failure: :class:`Lost` if nothing can be asked of the GPU at all, else NvmlError. The event loop may leave a call
that does not return to its thread (:meth:`Calls.leave`). That thread gets :class:`Left` when the call returns after
all, and must touch nothing any more. Until then, and for some readings afterwards, the call is not made: whoever asks
gets :class:`NotReturned`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldId, FieldValue, GpmSample, Handle, Nvml, NvmlError

T = TypeVar("T")

IMPLAUSIBLE = "IMPLAUSIBLE"
"""What a value that can't be is counted as."""

NO_VALUE = "NO_VALUE"
"""The error of what was answered without a value: it is not known, or there is nothing new."""

SHARED_INSTANCE = "SHARED_INSTANCE"
"""The error of what is only known of a whole GPU instance, which several MIG devices share."""

_LOST = frozenset(
    {
        binding.GPU_IS_LOST,
        binding.GPU_NOT_FOUND,
        binding.UNINITIALIZED,
        binding.DRIVER_NOT_LOADED,
        binding.LIB_RM_VERSION_MISMATCH,
    }
)
"""A GPU that fell off the bus, or a driver that did."""

_UNSUPPORTED = frozenset(
    {
        binding.NOT_SUPPORTED,
        binding.FUNCTION_NOT_FOUND,
        binding.ARGUMENT_VERSION_MISMATCH,
        binding.DEPRECATED,
    }
)
"""What the device or its driver can't be asked, now and later."""


class Tried(NamedTuple):
    """What was asked for in vain, and the error that NVML gave, without NVML_ERROR_, or one of those above."""

    call: str
    error: str


LeftOut = dict[str, tuple[Tried, ...]]
"""By what there is not (a key of the catalogue, "processes", "info.serial", ...), what was tried, in that order."""


class Lost(Exception):
    """Nothing can be asked of the GPU: ``call`` answered ``error``."""

    def __init__(self, call: str, error: NvmlError) -> None:
        self.call, self.error = call, error
        super().__init__(f"{error.name} ({call})")


def is_lost(error: NvmlError) -> bool:
    """Whether nothing can be asked of the GPU."""
    return error.code in _LOST


def is_unsupported(error: NvmlError) -> bool:
    """Whether there is no use in asking again."""
    return error.code in _UNSUPPORTED


class NotReturned(NvmlError):
    """A call that is left out, since it did not return in time."""

    def __init__(self) -> None:
        super().__init__(binding.TIMEOUT)


class Left(Exception):
    """The call has returned after another thread took over: the reading that it was made for is not this thread's."""


@dataclass(slots=True)
class _InFlight:
    call: str
    since_s: float


@dataclass(slots=True)
class _Slow:
    """A call that was left, ``times`` in a row: when it was made, how long it took (None: it has not returned), and in
    which reading it is made again."""

    call: str
    since_s: float
    times: int
    took_s: float | None = None
    again: int = 0


class SlowCall(NamedTuple):
    """A call that is left out. ``returned``: whether it has answered since, after so many seconds."""

    call: str
    seconds: float
    returned: bool


LONGEST_WAIT = 64
"""A slow call is made again after 1, 2, 4 readings, and never later than this."""


class Calls:
    """NVML as one GPU's thread calls it. ``refusals`` is what was noted.

    :attr:`doing`, :meth:`leave`, :meth:`running_s` and :meth:`slow` are for any thread.
    """

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._errors: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._in_flight: _InFlight | None = None
        self._slow: dict[str, _Slow] = {}
        self._readings = 0
        self.doing = ""
        self.slowest: tuple[str, float] = ("", 0.0)
        self.refusals: dict[str, Tried] = {}

    def begin(self) -> None:
        """A new reading."""
        self._readings += 1
        self.slowest = ("", 0.0)

    def running_s(self) -> float:
        """For how long the present call has run; 0 if none does."""
        running = self._in_flight
        return 0.0 if running is None else self._clock() - running.since_s

    def leave(self, after_s: float) -> str | None:
        """Leave the present call to its thread if it has run for so long; gives its name. The thread that goes on must
        be another one."""
        with self._lock:
            running = self._in_flight
            if running is None or self._clock() - running.since_s < after_s:
                return None
            self._in_flight = None
            before = self._slow.get(_key(running.call))
            times = 1 if before is None else before.times + 1
            self._slow[_key(running.call)] = _Slow(running.call, running.since_s, times)
            return running.call

    def slow(self) -> list[SlowCall]:
        """The calls that are left out."""
        now_s = self._clock()
        with self._lock:
            return [
                SlowCall(one.call, now_s - one.since_s if one.took_s is None else one.took_s, one.took_s is not None)
                for one in self._slow.values()
            ]

    def leaves_out(self, call: str) -> bool:
        """Whether the call is not made in this reading."""
        slow = self._slow.get(_key(call))
        return slow is not None and (slow.took_s is None or self._readings < slow.again)

    def open(self, index: int) -> Handle:
        """The GPU of that index. Raises NvmlError."""
        self.doing = "nvmlDeviceGetHandleByIndex"
        return self._nvml.handle(index)

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives. Raises Lost, NvmlError."""
        return self._do(function, lambda: self._nvml.ask(function, handle, *arguments))

    def fields(
        self, handle: Handle, numbers: Sequence[FieldId], name: str = "nvmlDeviceGetFieldValues"
    ) -> list[FieldValue]:
        """What nvmlDeviceGetFieldValues gives; ``name`` is what it is called in errors. Raises Lost, NvmlError."""
        return self._do(name, lambda: self._nvml.fields(handle, numbers))

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples gives. Raises Lost, NvmlError."""
        return self._do("nvmlDeviceGetSamples", lambda: self._nvml.samples(handle, kind, since_us))

    def gpm_sample(self) -> GpmSample:
        """A buffer. Raises Lost, NvmlError."""
        return self._do("nvmlGpmSampleAlloc", self._nvml.gpm_sample)

    def gpm_free(self, sample: GpmSample) -> None:
        """Give a buffer back, but not while a slow call may write to it. If it fails it is counted."""
        if self.leaves_out("nvmlGpmSampleFree"):
            return
        self.doing = "nvmlGpmSampleFree"
        try:
            self._nvml.gpm_free(sample)
        except NvmlError as error:
            self.count(self.doing, error.name)

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """What nvmlGpmMetricsGet gives. Raises Lost, NvmlError."""
        return self._do("nvmlGpmMetricsGet", lambda: self._nvml.gpm_metrics(older, newer, metrics))

    def optional(self, function: str, handle: Handle, what: str = "") -> Any:
        """What pynvml's ``function`` gives; None where it fails, which is counted, and noted as ``what``.

        Raises Lost.
        """
        try:
            answer = self.ask(function, handle)
        except NvmlError as error:
            return self._refused(what, error)
        self.refusals.pop(what, None)
        return answer

    def system(self, function: str, what: str = "") -> Any:
        """What pynvml's ``function`` of no GPU gives; None where it fails, which is counted, and noted as ``what``."""
        try:
            answer = self._do(function, lambda: self._nvml.system(function))
        except NvmlError as error:
            return self._refused(what, error)
        self.refusals.pop(what, None)
        return answer

    def count(self, call: str, error: str) -> None:
        """A value is left out."""
        self._errors.append((call, error))

    def errors(self) -> list[tuple[str, str]]:
        """What was counted since the last time: call and error."""
        found, self._errors = self._errors, []
        return found

    def _refused(self, what: str, error: NvmlError) -> None:
        if what:
            self.refusals[what] = Tried(self.doing, error.name)
        if not is_unsupported(error):
            self.count(self.doing, error.name)

    def _do(self, call: str, work: Callable[[], T]) -> T:
        """Make a call. Raises Lost, NvmlError, and Left, which nobody here may take for an answer."""
        if self._slow and self.leaves_out(call):
            raise NotReturned
        self.doing = call
        running = self._in_flight = _InFlight(call, self._clock())
        try:
            answer = work()
        except NvmlError as error:
            self._returned(running)
            raise self._judged(call, error) from None
        self._returned(running)
        return answer

    def _returned(self, running: _InFlight) -> None:
        """Raises Left."""
        took_s = self._clock() - running.since_s
        with self._lock:
            slow = self._slow.get(_key(running.call)) if self._slow else None
            if self._in_flight is not running:
                if slow is not None:
                    slow.took_s = took_s
                    slow.again = self._readings + min(LONGEST_WAIT, 1 << (slow.times - 1))
                raise Left
            self._in_flight = None
            if slow is not None:
                del self._slow[_key(running.call)]
        if took_s > self.slowest[1]:
            self.slowest = (running.call, took_s)

    def _judged(self, call: str, error: NvmlError) -> Exception:
        if not is_lost(error):
            return error
        self.count(call, error.name)
        return Lost(call, error)


def _key(call: str) -> str:
    """What is left out together: all of GPM writes to the same buffers."""
    return "nvmlGpm" if call.startswith("nvmlGpm") else call
