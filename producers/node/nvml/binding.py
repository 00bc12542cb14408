"""The boundary to pynvml: nothing above it sees its exceptions, its structures of fields, or its traps.

In: functions by pynvml's names. Out: what they answer, or their error as :class:`NvmlError`.
State: none of its own; the loaded library is pynvml's.
On failure: every call raises NvmlError and nothing else. Any call may hang, even for ever. A call that succeeds without
an answer counts as an error. pynvml would give zeros for it. So the functions in ``_ANSWERS`` are called here, with
every bit of their answers set before: NVML itself writes "not available" that way.
Source: nvml.h and pynvml. pynvml's own errors are unhashable and can't be compared with None. An empty list of
processes comes as ``NVMLError(0)``. A missing symbol is sometimes an error of another family.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NewType

import pynvml

Handle = NewType("Handle", object)  # a GPU or a MIG device, as NVML names it between nvmlInit and nvmlShutdown
GpmSample = NewType("GpmSample", object)  # a buffer for what GPM samples
EventSet = NewType("EventSet", object)  # events that are waited for together
FieldId = int | tuple[int, int]  # a field of nvmlDeviceGetFieldValues, or one of a scope: of a link, or of all links
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
NOTHING_FILLED_IN: Final = -1  # not NVML's: the call said that it succeeded, and left the answer as it was
_PREFIX = "NVML_ERROR_"
_NAMES = {getattr(pynvml, name): name.removeprefix(_PREFIX) for name in dir(pynvml) if name.startswith(_PREFIX)}
_NAMES[NOTHING_FILLED_IN] = "NO_VALUE"

_KINDS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: ("uiVal", "I", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulVal", "Q", 64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("ullVal", "Q", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("sllVal", "q", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: ("siVal", "i", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: ("usVal", "H", 16),
    pynvml.NVML_VALUE_TYPE_DOUBLE: ("dVal", "d", 0),
}
"""By the type of a value: its name in the union, how it is packed there, and its width in bits, at which a counter
wraps. 0: it is no integer."""

_FIELD = struct.Struct("=IIqqII8s")  # nvmlFieldValue_t: field, scope, timestamp, latency, type, return code, value
_UINT, _ULONG = ctypes.c_uint, ctypes.c_ulonglong
_UNFILLED: Final = 0xFFFFFFFF

_ANSWERS: dict[str, tuple[type[Any], ...]] = {
    "nvmlDeviceGetMinorNumber": (_UINT,),
    "nvmlDeviceGetMigMode": (_UINT, _UINT),
    "nvmlDeviceGetMaxMigDeviceCount": (_UINT,),
    "nvmlDeviceGetGpuInstanceId": (_UINT,),
    "nvmlDeviceGetComputeInstanceId": (_UINT,),
    "nvmlDeviceGetUtilizationRates": (pynvml.c_nvmlUtilization_t,),
    "nvmlDeviceGetEncoderUtilization": (_UINT, _UINT),
    "nvmlDeviceGetDecoderUtilization": (_UINT, _UINT),
    "nvmlDeviceGetPowerUsage": (_UINT,),
    "nvmlDeviceGetEnforcedPowerLimit": (_UINT,),
    "nvmlDeviceGetPowerManagementLimitConstraints": (_UINT, _UINT),
    "nvmlDeviceGetTotalEnergyConsumption": (_ULONG,),
    "nvmlDeviceGetTemperature": (_UINT,),
    "nvmlDeviceGetFanSpeed": (_UINT,),
    "nvmlDeviceGetPerformanceState": (_UINT,),
    "nvmlDeviceGetClockInfo": (_UINT,),
    "nvmlDeviceGetMaxClockInfo": (_UINT,),
    "nvmlDeviceGetCurrentClocksEventReasons": (_ULONG,),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (_ULONG,),
    "nvmlDeviceGetPcieReplayCounter": (_UINT,),
    "nvmlDeviceGetTotalEccErrors": (_ULONG,),
    "nvmlDeviceGetRemappedRows": (_UINT, _UINT, _UINT, _UINT),
    "nvmlDeviceGetSupportedEventTypes": (_ULONG,),
}
"""What these functions fill in, after the handle and arguments that are numbers. Source: nvml.h."""


class NvmlError(Exception):
    """An error that NVML gave: its ``code``, and its ``name`` without NVML_ERROR_."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = _NAMES.get(code, f"CODE_{code}")
        super().__init__(self.name)


class FieldValue(NamedTuple):
    """One field's answer: its return ``code``, and if that is 0 its ``value``, ``bits`` wide, as of ``at_us``."""

    code: int
    value: float = 0
    bits: int = 64
    at_us: int = 0


class NvmlEvent(NamedTuple):
    """An event of the GPU at that :meth:`Nvml.address`: its kind, its data (of an XID error, the code), and the
    instances that it is of, if it is of a part of the GPU."""

    address: int
    kind: int
    data: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Nvml:
    """NVML as pynvml has it. Every method raises :class:`NvmlError`, and may hang."""

    def __init__(self) -> None:
        self._field_questions: dict[tuple[FieldId, ...], bytes] = {}
        self._threads = threading.local()

    def call(self, function: str, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives that is about no GPU, or fills nothing in."""
        return self._call(function, *arguments)

    def count(self) -> int:
        """How many GPUs there are, those that can't be opened too."""
        found = _unfilled(_UINT)
        _fill("nvmlDeviceGetCount_v2", (), (found,))
        return int(found.value)

    def handle(self, index: int) -> Handle:
        return Handle(self._call("nvmlDeviceGetHandleByIndex", index))

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives; an empty list if it has nothing to list.
        The memory is that of the structure's version in the arguments; without one, as older drivers have it."""
        if function == "nvmlDeviceGetMemoryInfo":
            memory = _unfilled(pynvml.c_nvmlMemory_v2_t if arguments else pynvml.c_nvmlMemory_t)
            if arguments:
                (memory.version,) = arguments
            _fill(f"{function}_v2" if arguments else function, (handle,), (memory,))
            return memory
        if function == "nvmlDeviceGetTemperatureV":  # signed: all bits set would be -1 degree, the least is none at all
            answer = pynvml.c_nvmlTemperature_v1_t(pynvml.nvmlTemperature_v1, *arguments, -(1 << 31))
            _fill(function, (handle,), (answer,))
            return int(answer.temperature)
        if function == "nvmlDeviceGetGridLicensableFeatures":
            found = _unfilled(pynvml.c_nvmlGridLicensableFeatures_v4_t)
            _fill("nvmlDeviceGetGridLicensableFeatures_v4", (handle,), (found,))
            if not found.isGridLicenseSupported:  # a GPU that has none to license does not support the question
                raise NvmlError(NOT_SUPPORTED)
            return int(any(one.featureState for one in found.gridLicensableFeatures[: found.licensableFeaturesCount]))
        kinds = _ANSWERS.get(function)
        if kinds is None:
            return self._call(function, handle, *arguments)
        answers = [_unfilled(kind) for kind in kinds]
        _fill(function, (handle, *map(_UINT, arguments)), answers)
        found = [one if isinstance(one, ctypes.Structure) else one.value for one in answers]
        return found[0] if len(found) == 1 else found

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        """Many fields in one call, in that order."""
        asked = self._field_questions.get(key := tuple(fields))
        if asked is None:
            scoped = [field if isinstance(field, tuple) else (field, 0) for field in fields]
            unfilled = (-1, -1, _UNFILLED, _UNFILLED, b"\xff" * 8)
            asked = self._field_questions[key] = b"".join(_FIELD.pack(*field, *unfilled) for field in scoped)
        answers = (ctypes.c_char * len(asked)).from_buffer_copy(asked)
        _fill("nvmlDeviceGetFieldValues", (handle, ctypes.c_int32(len(fields))), (answers,))
        found = []
        for _, _, at_us, _, kind, returned, raw in _FIELD.iter_unpack(answers):
            _, form, bits = _KINDS.get(kind, ("", "", 0))
            if returned or kind == _UNFILLED:
                found.append(FieldValue(_code(returned) if returned else NOTHING_FILLED_IN))
            elif form:
                found.append(FieldValue(0, struct.unpack_from(form, raw)[0], bits, at_us))
            else:  # a type of a later NVML: its bytes can't be read
                found.append(FieldValue(NOT_SUPPORTED))
        return found

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples has of that kind, newer than that."""
        answer = self._call("nvmlDeviceGetSamples", handle, kind, since_us)
        if not answer:
            return []
        name, _, bits = _KINDS.get(answer[0], ("", "", 0))
        if not name:
            raise NvmlError(NOT_SUPPORTED)
        return [FieldValue(0, getattr(one.sampleValue, name), bits, one.timeStamp) for one in answer[1]]

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """These metrics of the time between two samples of one device, in that order."""
        asked = getattr(self._threads, "gpm", None)
        if asked is None:  # of 19 kB: one for each thread
            asked = self._threads.gpm = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
        asked.numMetrics, asked.sample1, asked.sample2 = len(metrics), older, newer
        answers = [asked.metrics[place] for place in range(len(metrics))]
        for one, number in zip(answers, metrics, strict=True):
            one.metricId, one.nvmlReturn = number, _UNFILLED  # else those of the last time would be taken for these
        self._call("nvmlGpmMetricsGet", asked)
        return [FieldValue(_code(one.nvmlReturn), 0 if one.nvmlReturn else one.value, 0) for one in answers]

    def address(self, handle: Handle) -> int:
        """What the handle of a GPU and the events of that GPU have in common."""
        return _address(handle)

    def wait(self, events: EventSet, within_ms: int) -> NvmlEvent | None:
        """The next event, None if none has come."""
        try:
            event = self._call("nvmlEventSetWait_v2", events, within_ms)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        instances = _instance(event.gpuInstanceId), _instance(event.computeInstanceId)
        return NvmlEvent(_address(event.device), event.eventType, event.eventData, *instances)

    def _call(self, function: str, *arguments: Any) -> Any:
        """pynvml's function of that name; one that this pynvml does not have is missing like one of the driver's."""
        called = getattr(pynvml, function, None)
        if called is None:
            raise NvmlError(FUNCTION_NOT_FOUND)
        try:
            answer = called(*arguments)
        except pynvml.NVMLError as error:
            if error.value == 0:
                return []
            raise NvmlError(error.value) from None
        except pynvml.NVMLLibraryMismatchError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        except UnicodeError:  # a name that is not text
            raise NvmlError(UNKNOWN) from None
        if answer == "":
            raise NvmlError(NOTHING_FILLED_IN)
        return answer


def _address(handle: Any) -> int:
    """What a handle points to: each answer of NVML is a new pointer of ctypes, to the same place."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _instance(number: int) -> int | None:
    return None if number == 0xFFFFFFFF else number


def _code(returned: int) -> int:
    """The return code of one of many answers."""
    return NOTHING_FILLED_IN if returned == _UNFILLED else returned


def _unfilled(kind: type[Any]) -> Any:
    """An answer with every bit set."""
    return kind.from_buffer_copy(b"\xff" * ctypes.sizeof(kind))


def _fill(symbol: str, inputs: Sequence[Any], answers: Sequence[Any]) -> None:
    """Have NVML's own function fill in the answers. Raises NvmlError, also when they are what they were before."""
    before = [bytes(one) for one in answers]
    try:
        function = pynvml._nvmlGetFunctionPointer(symbol)  # noqa: SLF001 - its wrappers begin with zeros
    except pynvml.NVMLError as error:
        raise NvmlError(error.value) from None
    if code := function(*inputs, *map(ctypes.byref, answers)):
        raise NvmlError(code)
    if before == [bytes(one) for one in answers]:
        raise NvmlError(NOTHING_FILLED_IN)
