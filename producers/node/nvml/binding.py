"""The boundary to pynvml: nothing above it sees its exceptions, its structures of fields, or its traps.

In: functions by pynvml's names. Out: what they answer; the errors that they give as :class:`NvmlError`.
State: none of its own; the loaded library is pynvml's.
On failure: every call raises NvmlError and nothing else. Any call may hang, for ever too.
Source: nvml.h and pynvml. pynvml's own errors are unhashable, can't be compared with None, and come as ``NVMLError(0)``
where a list of processes is empty; a missing symbol is sometimes an error of another family.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NewType, Protocol

import pynvml

Handle = NewType("Handle", object)
"""A GPU or a MIG device, as NVML names it between nvmlInit and nvmlShutdown."""

GpmSample = NewType("GpmSample", object)
"""A buffer for what GPM samples."""

EventSet = NewType("EventSet", object)
"""Events that are waited for together."""

FieldId = int | tuple[int, int]
"""A field of nvmlDeviceGetFieldValues, or one of one of its scopes: of a link."""

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26
GPU_NOT_FOUND: Final = 28
UNKNOWN: Final = 999

_PREFIX = "NVML_ERROR_"
_NAMES = {getattr(pynvml, name): name.removeprefix(_PREFIX) for name in dir(pynvml) if name.startswith(_PREFIX)}

_BITS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: ("uiVal", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulVal", 64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("ullVal", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("sllVal", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: ("siVal", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: ("usVal", 16),
    pynvml.NVML_VALUE_TYPE_DOUBLE: ("dVal", 0),
}
"""Where a field's value is, and how wide: a counter wraps there. 0: it is no integer."""


class NvmlError(Exception):
    """An error that NVML gave: its ``code``, and its ``name`` without NVML_ERROR_."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = _NAMES.get(code, f"CODE_{code}")
        super().__init__(self.name)


class FieldValue(NamedTuple):
    """One field's answer: its own return ``code``, and where that is 0 the ``value``, ``bits`` wide, as it was at
    ``at_us`` (microseconds since the epoch)."""

    code: int
    value: float = 0
    bits: int = 64
    at_us: int = 0


class Told(NamedTuple):
    """An event of the GPU at that :meth:`Nvml.address`: its kind, its data (of an XID error, the code), and the
    instances that it is of, where it is of a part of the GPU."""

    address: int
    kind: int
    data: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Nvml(Protocol):
    """What is asked of NVML. Every method raises :class:`NvmlError`, and may hang."""

    def init(self) -> None:
        """Load the library and attach to the driver."""

    def shutdown(self) -> None:
        """Detach from the driver; every handle is void."""

    def driver_version(self) -> str:
        """The driver's version, as it writes it."""

    def system(self, function: str) -> Any:
        """What pynvml's ``function`` of no GPU gives."""

    def count(self) -> int:
        """How many GPUs there are, those that can't be opened too."""

    def handle(self, index: int) -> Handle:
        """Open a GPU."""

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives; an empty list where it has nothing to list."""

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        """Many fields in one call, in that order."""

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples has of that kind, newer than that."""

    def gpm_sample(self) -> GpmSample:
        """A buffer, to be given back to :meth:`gpm_free`."""

    def gpm_free(self, sample: GpmSample) -> None:
        """Give a buffer back."""

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """These metrics of the time between two samples of one device, in that order."""

    def address(self, handle: Handle) -> int:
        """What the handle of a GPU and the events of that GPU have in common."""

    def events(self) -> EventSet:
        """A new set of events."""

    def register(self, handle: Handle, kinds: int, events: EventSet) -> None:
        """Take a GPU's events into the set."""

    def wait(self, events: EventSet, within_ms: int) -> Told | None:
        """The next event, None where none has come."""

    def free(self, events: EventSet) -> None:
        """Let go of a set."""


class Pynvml:
    """NVML as pynvml has it."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        self._threads = threading.local()

    def init(self) -> None:
        """Load the library and attach to the driver."""
        self._call("nvmlInit")

    def shutdown(self) -> None:
        """Detach from the driver; every handle is void."""
        self._call("nvmlShutdown")

    def driver_version(self) -> str:
        """The driver's version, as it writes it."""
        return str(self._call("nvmlSystemGetDriverVersion"))

    def system(self, function: str) -> Any:
        """What pynvml's ``function`` of no GPU gives."""
        return self._call(function)

    def count(self) -> int:
        """How many GPUs there are, those that can't be opened too."""
        return int(self._call("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Handle:
        """Open a GPU."""
        return Handle(self._call("nvmlDeviceGetHandleByIndex", index))

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives; an empty list where it has nothing to list."""
        return self._call(function, handle, *arguments)

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        """Many fields in one call, in that order."""
        return [_field_value(value) for value in self._call("nvmlDeviceGetFieldValues", handle, fields)]

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples has of that kind, newer than that."""
        answer = self._call("nvmlDeviceGetSamples", handle, kind, since_us)
        if not answer:
            return []
        name, bits = _BITS.get(answer[0], ("", 0))
        if not name:
            raise NvmlError(NOT_SUPPORTED)
        return [FieldValue(0, getattr(one.sampleValue, name), bits, one.timeStamp) for one in answer[1]]

    def gpm_sample(self) -> GpmSample:
        """A buffer, to be given back to :meth:`gpm_free`."""
        return GpmSample(self._call("nvmlGpmSampleAlloc"))

    def gpm_free(self, sample: GpmSample) -> None:
        """Give a buffer back."""
        self._call("nvmlGpmSampleFree", sample)

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """These metrics of the time between two samples of one device, in that order."""
        asked = self._gpm_question()
        asked.numMetrics, asked.sample1, asked.sample2 = len(metrics), older, newer
        for place, number in enumerate(metrics):
            asked.metrics[place].metricId = number
        self._call("nvmlGpmMetricsGet", asked)
        answers = [asked.metrics[place] for place in range(len(metrics))]
        return [FieldValue(one.nvmlReturn, 0 if one.nvmlReturn else one.value, 0) for one in answers]

    def _gpm_question(self) -> Any:
        """Of 19 kB, and so one for each thread."""
        found = getattr(self._threads, "gpm", None)
        if found is None:
            found = self._threads.gpm = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
        return found

    def address(self, handle: Handle) -> int:
        """What the handle of a GPU and the events of that GPU have in common."""
        return _address(handle)

    def events(self) -> EventSet:
        """A new set of events."""
        return EventSet(self._call("nvmlEventSetCreate"))

    def register(self, handle: Handle, kinds: int, events: EventSet) -> None:
        """Take a GPU's events into the set."""
        self._call("nvmlDeviceRegisterEvents", handle, kinds, events)

    def wait(self, events: EventSet, within_ms: int) -> Told | None:
        """The next event, None where none has come."""
        try:
            told = self._call("nvmlEventSetWait_v2", events, within_ms)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        instances = _instance(told.gpuInstanceId), _instance(told.computeInstanceId)
        return Told(_address(told.device), told.eventType, told.eventData, *instances)

    def free(self, events: EventSet) -> None:
        """Let go of a set."""
        self._call("nvmlEventSetFree", events)

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return self._function(function)(*arguments)
        except pynvml.NVMLError as error:
            if error.value == 0:
                return []
            raise NvmlError(error.value) from None
        except pynvml.NVMLLibraryMismatchError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        except UnicodeError:  # a name that is not text
            raise NvmlError(UNKNOWN) from None

    def _function(self, name: str) -> Any:
        """pynvml's function of that name; one that this pynvml does not have is missing like one of the driver's."""
        found = self._functions.get(name)
        if found is None:
            found = getattr(pynvml, name, None)
            if found is None:
                raise NvmlError(FUNCTION_NOT_FOUND)
            self._functions[name] = found
        return found


def _address(handle: Any) -> int:
    """Each answer of NVML is a new pointer of ctypes; where it points to is the same."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _instance(number: int) -> int | None:
    return None if number == 0xFFFFFFFF else number


def _field_value(value: Any) -> FieldValue:
    code = value.nvmlReturn
    if code:
        return FieldValue(code)
    name, bits = _BITS.get(value.valueType, ("", 0))
    if not name:  # a type of a later NVML: its bytes can't be read
        return FieldValue(NOT_SUPPORTED)
    return FieldValue(0, getattr(value.value, name), bits, value.timestamp)
