"""The calls of one GPU, on its thread: which one runs, which are left out for a while, and which error means what.

In: questions to NVML. Out: answers.
State: the call that has not returned, the errors of this reading, the calls that were slow, and (:class:`Support`) the
sources that were refused.
On failure: :class:`Lost` if the GPU answers nothing at all, else NvmlError. A call may hang. The event loop then leaves
it to its thread (:meth:`Calls.leave`), and another thread goes on with the GPU. When the call returns after all, its
thread gets :class:`Left` and must touch nothing any more. Until then, and for some readings afterwards, nobody makes
that call again: who asks for it gets :class:`NotReturned`.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldId, FieldValue, GpmSample, Handle, Nvml, NvmlError

T = TypeVar("T")
IMPLAUSIBLE = "IMPLAUSIBLE"  # what a value that can't be is counted as
NO_VALUE = "NO_VALUE"  # the error of what was answered without a value: it is not known, or there is nothing new
SHARED_INSTANCE = "SHARED_INSTANCE"  # the error of what is only known of a whole GPU instance that MIG devices share
LONGEST_SLOW_WAIT = 64  # a slow call is made again after 1, 2, 4 readings, and never later than this
FIRST_WAIT, LONGEST_WAIT = 1, 64  # readings until a source that has answered before is asked again
FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT = 64, 4096  # readings until one that never has is asked again

_LOST = frozenset({
    binding.GPU_IS_LOST, binding.GPU_NOT_FOUND, binding.UNINITIALIZED, binding.DRIVER_NOT_LOADED,
    binding.LIB_RM_VERSION_MISMATCH,
})  # fmt: skip
"""A GPU that fell off the bus, or a driver that did."""

_UNSUPPORTED = frozenset(
    {binding.NOT_SUPPORTED, binding.FUNCTION_NOT_FOUND, binding.ARGUMENT_VERSION_MISMATCH, binding.DEPRECATED}
)
"""What the device or its driver never answers."""


class FailedCall(NamedTuple):
    """A call that gave no value, and its error: NVML's, without NVML_ERROR_, or one of those above."""

    call: str
    error: str


LeftOut = dict[str, tuple[FailedCall, ...]]  # by what there is not (a key, "info.serial", ...): what was tried


class Lost(Exception):
    """Nothing can be asked of the GPU: ``call`` answered ``error``."""

    def __init__(self, call: str, error: NvmlError) -> None:
        self.call, self.error = call, error
        super().__init__(f"{error.name} ({call})")


class NotReturned(NvmlError):
    """A call that is left out, since it did not return in time."""

    def __init__(self) -> None:
        super().__init__(binding.TIMEOUT)


class Left(Exception):
    """The call has returned after another thread took over: the reading is not this thread's any more."""


def is_lost(error: NvmlError) -> bool:
    return error.code in _LOST


def is_unsupported(error: NvmlError) -> bool:
    """Whether asking again would not help."""
    return error.code in _UNSUPPORTED


def is_refused(error: NvmlError) -> bool:
    """The same for a question that the device or its driver may not know at all."""
    return is_unsupported(error) or error.code == binding.INVALID_ARGUMENT


def error_of(answer: FieldValue, call: str) -> NvmlError | None:
    """The error of one of the answers that a call gives; None if it is good. Raises Lost."""
    if not answer.code:
        return None
    error = NvmlError(answer.code)
    if is_lost(error):
        raise Lost(call, error)
    return error


class _InFlight(NamedTuple):
    call: str
    since_s: float


@dataclass(slots=True)
class _SlowCall:
    """A call that was left, ``times`` in a row: when it was made, how long it took (None: it has not returned), and in
    which reading it is made again."""

    call: str
    since_s: float
    times: int
    took_s: float | None = None
    again: int = 0


class Calls:
    """NVML as one GPU's thread calls it. ``refusals`` is what was noted.
    :attr:`doing`, :meth:`leave`, :meth:`running_s` and :meth:`slow` are for any thread."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._errors: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._in_flight: _InFlight | None = None
        self._slow: dict[str, _SlowCall] = {}
        self._readings = 0
        self.doing = ""
        self.slowest: tuple[str, float] = ("", 0.0)
        self.refusals: dict[str, FailedCall] = {}

    def begin(self) -> None:
        self._readings += 1
        self.slowest = ("", 0.0)

    def running_s(self) -> float:
        running = self._in_flight
        return 0.0 if running is None else self._clock() - running.since_s

    def leave(self, after_s: float) -> str | None:
        """Leave the present call to its thread if it has run for ``after_s``; gives its name. Another goes on."""
        with self._lock:
            running = self._in_flight
            if running is None or self._clock() - running.since_s < after_s:
                return None
            self._in_flight = None
            before = self._slow.get(_key(running.call))
            times = 1 if before is None else before.times + 1
            self._slow[_key(running.call)] = _SlowCall(running.call, running.since_s, times)
            return running.call

    def slow(self) -> dict[str, str]:
        """The calls that are left out since they were slow, and for people how slow."""
        with self._lock:
            return {
                one.call: f"has not returned for {self._clock() - one.since_s:.1f} s and is left out"
                if one.took_s is None
                else f"took {one.took_s:.1f} s and is left out until it is quick again"
                for one in self._slow.values()
            }

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
        return self.make(function, lambda nvml: nvml.ask(function, handle, *arguments))

    def fields(
        self, handle: Handle, numbers: Sequence[FieldId], name: str = "nvmlDeviceGetFieldValues"
    ) -> list[FieldValue]:
        """What nvmlDeviceGetFieldValues gives; ``name`` is what it is called in errors. Raises Lost, NvmlError."""
        return self.make(name, lambda nvml: nvml.fields(handle, numbers))

    def optional(self, function: str, handle: Handle | None, what: str = "") -> Any:
        """What ``function`` gives of the GPU, or of none; None if it fails: counted, noted as ``what``. Raises Lost."""
        try:
            if handle is None:
                answer = self.make(function, lambda nvml: nvml.call(function))
            else:
                answer = self.ask(function, handle)
        except NvmlError as error:
            if what:
                self.refusals[what] = FailedCall(self.doing, error.name)
            if not is_unsupported(error):
                self.count(self.doing, error.name)
            return None
        self.refusals.pop(what, None)
        return answer

    def gpm_free(self, sample: GpmSample) -> None:
        """Give a buffer back, but not while a slow call may write to it. If it fails it is counted."""
        if self.leaves_out("nvmlGpmSampleFree"):
            return
        self.doing = "nvmlGpmSampleFree"
        try:
            self._nvml.call("nvmlGpmSampleFree", sample)
        except NvmlError as error:
            self.count(self.doing, error.name)

    def count(self, call: str, error: str) -> None:
        self._errors.append((call, error))

    def errors(self) -> list[tuple[str, str]]:
        found, self._errors = self._errors, []
        return found

    def make(self, call: str, work: Callable[[Nvml], T]) -> T:
        """Make a call. Raises Lost, NvmlError, and Left, which nobody here may take for an answer."""
        if self._slow and self.leaves_out(call):
            raise NotReturned
        self.doing = call
        running = self._in_flight = _InFlight(call, self._clock())
        try:
            answer = work(self._nvml)
        except NvmlError as error:
            self._returned(running)
            if is_lost(error):
                self.count(call, error.name)
                raise Lost(call, error) from None
            raise
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
                    slow.again = self._readings + min(LONGEST_SLOW_WAIT, 1 << (slow.times - 1))
                raise Left
            self._in_flight = None
            if slow is not None:
                del self._slow[_key(running.call)]
        if took_s > self.slowest[1]:
            self.slowest = (running.call, took_s)


def _key(call: str) -> str:
    """What is left out together: all of GPM writes to the same buffers."""
    return "nvmlGpm" if call.startswith("nvmlGpm") else call


class _RefusedSource(NamedTuple):
    why: FailedCall
    wait: int
    again: int


class Support:
    """Which sources of a device's values are asked: one that was refused is asked again, less and less often. Pure.

    A driver may refuse for seconds what it supports, as while a GPU is reset or in use by a profiler. So what has
    answered once is asked again after 1, 2, 4, ... readings. What has never answered most likely never will.
    """

    def __init__(self) -> None:
        self._readings = 0
        self._answered: set[Hashable] = set()
        self._refused: dict[Hashable, _RefusedSource] = {}

    def begin(self) -> bool:
        """Begin a new reading. Returns whether it asks a refused source again."""
        self._readings += 1
        return any(one.again <= self._readings for one in self._refused.values())

    def asks(self, source: Hashable) -> bool:
        refused = self._refused.get(source)
        return refused is None or refused.again <= self._readings

    def has_answered(self, source: Hashable) -> bool:
        return source in self._answered

    def answer(self, source: Hashable) -> None:
        self._answered.add(source)
        self._refused.pop(source, None)

    def refuse(self, source: Hashable, why: FailedCall) -> None:
        known = source in self._answered
        first, longest = (FIRST_WAIT, LONGEST_WAIT) if known else (FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT)
        before = self._refused.get(source)
        wait = first if before is None else min(longest, 2 * before.wait)
        self._refused[source] = _RefusedSource(why, wait, self._readings + wait)

    def why(self, source: Hashable) -> FailedCall | None:
        """Why it was refused when it was asked last; None if it was not."""
        refused = self._refused.get(source)
        return None if refused is None else refused.why
