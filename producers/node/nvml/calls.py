"""The NVML calls of one GPU: the call that runs, the calls that are skipped for a while, and what each error means.

In: calls to NVML. Out: their answers.
State: the call that has not returned, the errors of this reading, the calls that were slow, and (:class:`Support`) the
sources that were refused.
On failure: :class:`GpuLost` if the GPU answers nothing at all, else NvmlError. A call may hang. The event loop then
abandons it (:meth:`Calls.abandon`), and another thread goes on with the GPU. When the call returns after all, its
thread gets :class:`CallAbandoned`, and must not touch anything any more. Until then, and for some readings afterwards,
the call is skipped: it raises :class:`NotReturned`.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldId, FieldValue, GpmSample, Handle, Nvml, NvmlError

T = TypeVar("T")
IMPLAUSIBLE = "IMPLAUSIBLE"  # the error of a value that is impossible
NO_VALUE = "NO_VALUE"  # the error of an answer without a value: it is not known, or there is nothing new
SHARED_INSTANCE = "SHARED_INSTANCE"  # the error of a value that is only known for a GPU instance shared by MIG devices
LONGEST_SLOW_WAIT = 64  # a slow call is made again after 1, 2, 4 readings, and never later than this
FIRST_WAIT, LONGEST_WAIT = 1, 64  # readings until a source that has answered before is asked again
FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT = 64, 4096  # readings until one that never has is asked again

_LOST = frozenset({
    binding.GPU_IS_LOST, binding.GPU_NOT_FOUND, binding.UNINITIALIZED, binding.DRIVER_NOT_LOADED,
    binding.LIB_RM_VERSION_MISMATCH,
})  # fmt: skip
"""The GPU fell off the bus, or the driver is gone."""

_UNSUPPORTED = frozenset(
    {binding.NOT_SUPPORTED, binding.FUNCTION_NOT_FOUND, binding.ARGUMENT_VERSION_MISMATCH, binding.DEPRECATED}
)
"""The device or its driver does not support the call."""


class FailedCall(NamedTuple):
    """A call that gave no value, and its error: the name of NVML's, without NVML_ERROR_, or one of those above."""

    call: str
    error: str


LeftOut = dict[str, tuple[FailedCall, ...]]  # by the missing value (a key, "info.serial", ...): the calls tried for it


class GpuLost(Exception):
    """The GPU does not answer any call: ``call`` failed with ``error``."""

    def __init__(self, call: str, error: NvmlError) -> None:
        self.call, self.error = call, error
        super().__init__(f"{error.name} ({call})")


class NotReturned(NvmlError):
    """The call was skipped, because it did not return in time before."""

    def __init__(self) -> None:
        super().__init__(binding.TIMEOUT)


class CallAbandoned(Exception):
    """The call returned after another thread took over. This thread must end its reading without any effect."""


def is_lost(error: NvmlError) -> bool:
    return error.code in _LOST


def is_unsupported(error: NvmlError) -> bool:
    """Whether the device or its driver does not support the call, so that calling again would not help."""
    return error.code in _UNSUPPORTED


def is_refused(error: NvmlError) -> bool:
    """The same for a call or field that the device or its driver may not even know."""
    return is_unsupported(error) or error.code == binding.INVALID_ARGUMENT


def error_of(answer: FieldValue, call: str) -> NvmlError | None:
    """The error of one of the answers of a call; None if it is good. Raises GpuLost."""
    if not answer.code:
        return None
    error = NvmlError(answer.code)
    if is_lost(error):
        raise GpuLost(call, error)
    return error


class _InFlight(NamedTuple):
    call: str
    began_s: float


@dataclass(slots=True)
class _SlowCall:
    """A call that was abandoned, so many times in a row. ``took_s`` is None until it returns;
    ``retry_in_reading`` is the number of the reading in which it is made again."""

    call: str
    began_s: float
    abandoned_in_a_row: int
    took_s: float | None = None
    retry_in_reading: int = 0


class Calls:
    """NVML as one GPU's thread calls it. ``refusals`` has the last failure of each optional value. ``current_call`` is
    the call that was made or skipped last, so that an error can be reported with its call.
    :attr:`current_call`, :meth:`abandon`, :meth:`running_s` and :meth:`slow` are for any thread."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._errors: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._in_flight: _InFlight | None = None
        self._slow_calls: dict[str, _SlowCall] = {}
        self._readings = 0
        self.current_call = ""
        self.slowest: tuple[str, float] = ("", 0.0)
        self.refusals: dict[str, FailedCall] = {}

    def begin_reading(self) -> None:
        self._readings += 1
        self.slowest = ("", 0.0)

    def running_s(self) -> float:
        running = self._in_flight
        return 0.0 if running is None else self._clock() - running.began_s

    def abandon(self, after_s: float) -> str | None:
        """Abandon the call that runs, if it has run for ``after_s``; returns its name. Another thread goes on."""
        with self._lock:
            running = self._in_flight
            if running is None or self._clock() - running.began_s < after_s:
                return None
            self._in_flight = None
            previous = self._slow_calls.get(_key(running.call))
            times = 1 if previous is None else previous.abandoned_in_a_row + 1
            self._slow_calls[_key(running.call)] = _SlowCall(running.call, running.began_s, times)
            return running.call

    def slow(self) -> dict[str, str]:
        """The calls that are skipped because they were slow, each with a text for people that says how slow."""
        with self._lock:
            return {
                slow_call.call: f"has not returned for {self._clock() - slow_call.began_s:.1f} s and is left out"
                if slow_call.took_s is None
                else f"took {slow_call.took_s:.1f} s and is left out until it is quick again"
                for slow_call in self._slow_calls.values()
            }

    def skips(self, call: str) -> bool:
        """Whether the call is not made in this reading, because it was slow."""
        slow = self._slow_calls.get(_key(call))
        return slow is not None and (slow.took_s is None or self._readings < slow.retry_in_reading)

    def open(self, index: int) -> Handle:
        """The GPU of that index. Raises NvmlError."""
        self.current_call = "nvmlDeviceGetHandleByIndex"
        return self._nvml.handle(index)

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """The answer of pynvml's ``function``. Raises GpuLost, NvmlError."""
        return self.make(function, lambda nvml: nvml.ask(function, handle, *arguments))

    def fields(
        self, handle: Handle, field_ids: Sequence[FieldId], name: str = "nvmlDeviceGetFieldValues"
    ) -> list[FieldValue]:
        """The answer of nvmlDeviceGetFieldValues; errors report it as ``name``. Raises GpuLost, NvmlError."""
        return self.make(name, lambda nvml: nvml.fields(handle, field_ids))

    def optional(self, function: str, handle: Handle | None, value_name: str = "") -> Any:
        """The answer of ``function`` for the GPU, or for none; None if it fails, which is counted, and noted in
        ``refusals`` as ``value_name``. Raises GpuLost."""
        try:
            if handle is None:
                answer = self.make(function, lambda nvml: nvml.call(function))
            else:
                answer = self.ask(function, handle)
        except NvmlError as error:
            if value_name:
                self.refusals[value_name] = FailedCall(self.current_call, error.name)
            if not is_unsupported(error):
                self.count(self.current_call, error.name)
            return None
        self.refusals.pop(value_name, None)
        return answer

    def gpm_free(self, sample: GpmSample) -> None:
        """Free a buffer, unless a slow call may still write to it. A failure is counted."""
        if self.skips("nvmlGpmSampleFree"):
            return
        self.current_call = "nvmlGpmSampleFree"
        try:
            self._nvml.call("nvmlGpmSampleFree", sample)
        except NvmlError as error:
            self.count(self.current_call, error.name)

    def count(self, call: str, error: str) -> None:
        self._errors.append((call, error))

    def errors(self) -> list[tuple[str, str]]:
        errors, self._errors = self._errors, []
        return errors

    def make(self, call: str, function: Callable[[Nvml], T]) -> T:
        """Make a call. Raises GpuLost, NvmlError, and CallAbandoned, which only the thread's owner may catch."""
        self.current_call = call
        if self._slow_calls and self.skips(call):
            raise NotReturned
        running = self._in_flight = _InFlight(call, self._clock())
        try:
            answer = function(self._nvml)
        except NvmlError as error:
            self._returned(running)
            if is_lost(error):
                self.count(call, error.name)
                raise GpuLost(call, error) from None
            raise
        self._returned(running)
        return answer

    def _returned(self, running: _InFlight) -> None:
        """Note that a call has returned. Raises CallAbandoned if it was abandoned meanwhile."""
        took_s = self._clock() - running.began_s
        with self._lock:
            slow = self._slow_calls.get(_key(running.call)) if self._slow_calls else None
            if self._in_flight is not running:
                if slow is not None:
                    slow.took_s = took_s
                    slow.retry_in_reading = self._readings + min(LONGEST_SLOW_WAIT, 1 << (slow.abandoned_in_a_row - 1))
                raise CallAbandoned
            self._in_flight = None
            if slow is not None:
                del self._slow_calls[_key(running.call)]
        if took_s > self.slowest[1]:
            self.slowest = (running.call, took_s)


def _key(call: str) -> str:
    """The key of the calls that are skipped together: all of GPM writes to the same buffers."""
    return "nvmlGpm" if call.startswith("nvmlGpm") else call


class _RefusedSource(NamedTuple):
    failed_call: FailedCall
    wait: int
    retry_in_reading: int


class Support:
    """Decides which sources of a device's values are asked: a refused one is asked again, less and less often. Pure.

    A driver may refuse for seconds what it supports, for instance while a GPU is reset or used by a profiler. So a
    source that has answered before is asked again after 1, 2, 4, ... readings. One that has never answered most likely
    never will.
    """

    def __init__(self) -> None:
        self._readings = 0
        self._answered: set[Hashable] = set()
        self._refused: dict[Hashable, _RefusedSource] = {}

    def begin_reading(self) -> bool:
        """Begin a new reading. Returns whether a refused source is due to be asked again."""
        self._readings += 1
        return any(refused.retry_in_reading <= self._readings for refused in self._refused.values())

    def may_ask(self, source: Hashable) -> bool:
        refused = self._refused.get(source)
        return refused is None or refused.retry_in_reading <= self._readings

    def has_answered(self, source: Hashable) -> bool:
        return source in self._answered

    def mark_answered(self, source: Hashable) -> None:
        self._answered.add(source)
        self.forget(source)

    def mark_refused(self, source: Hashable, failed_call: FailedCall) -> None:
        has_answered = source in self._answered
        first, longest = (FIRST_WAIT, LONGEST_WAIT) if has_answered else (FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT)
        previous = self._refused.get(source)
        wait = first if previous is None else min(longest, 2 * previous.wait)
        self._refused[source] = _RefusedSource(failed_call, wait, self._readings + wait)

    def forget(self, source: Hashable) -> None:
        """Ask the source again in the next reading, if it was refused."""
        self._refused.pop(source, None)

    def failed_call(self, source: Hashable) -> FailedCall | None:
        """The call by which the source was refused when it was asked last; None if it was not."""
        refused = self._refused.get(source)
        return None if refused is None else refused.failed_call
