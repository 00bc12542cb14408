"""The boundary to pynvml: its exceptions, its structures of fields and its traps are not visible outside this module.

In: functions by pynvml's names. Out: their answers, or their error as :class:`NvmlError`.
State: none of its own; the loaded library is pynvml's.
On failure: every call raises NvmlError and nothing else. Any call may hang, even for ever. A call that succeeds without
filling in its answer counts as an error; pynvml would return zeros. So the functions in ``_ANSWER_TYPES`` are called
here without pynvml's wrappers, with every bit of the answer set before, which is how NVML writes "not available". So
are the functions that list something, because pynvml believes any number of items, and allocates memory for them all.
Source: nvml.h and pynvml. pynvml's own errors are unhashable and can't be compared with None. A missing symbol is
sometimes an error of another class.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, NewType

import pynvml

Handle = NewType("Handle", object)  # a GPU or a MIG device, valid between nvmlInit and nvmlShutdown
GpmSample = NewType("GpmSample", object)  # a buffer for one sample of GPM
EventSet = NewType("EventSet", object)  # events that are waited for together
FieldId = int | tuple[int, int]  # a field of nvmlDeviceGetFieldValues, or a field and its scope: a link, or all links
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

_VALUE_TYPES = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: ("uiVal", "I", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulVal", "Q", 64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("ullVal", "Q", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("sllVal", "q", 64),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: ("siVal", "i", 32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: ("usVal", "H", 16),
    pynvml.NVML_VALUE_TYPE_DOUBLE: ("dVal", "d", 0),
}
"""For each type of a value: its member of the union, its format for struct, and its width in bits, at which a counter
wraps; 0: it is no integer."""

_FIELD = struct.Struct("=IIqqII8s")  # nvmlFieldValue_t: field, scope, timestamp, latency, type, return code, value
_UINT, _ULONG = ctypes.c_uint, ctypes.c_ulonglong
_UNFILLED: Final = 0xFFFFFFFF
_NOT_AVAILABLE: Final = 0xFFFFFFFF_FFFFFFFF  # the memory of a process, where the driver does not know it

_ANSWER_TYPES: dict[str, tuple[type[Any], ...]] = {
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
"""The types that these functions fill in, after the handle and the arguments, which are numbers. Source: nvml.h."""

PROCESS_LISTS: tuple[tuple[str, ...], ...] = tuple(
    tuple(f"nvmlDeviceGet{kind}RunningProcesses{version}" for version in ("_v3", "_v2", ""))
    for kind in ("Compute", "Graphics", "MPSCompute")
)
"""Every list of processes: its newest function, then the older ones."""

_MAX_GPUS: Final = 256  # far above any machine's; each gets a thread
_MAX_ITEMS: Final = 1 << 16  # far above any list of NVML's: a larger number of items is garbage


class _ProcessInfoV1(ctypes.Structure):
    """nvmlProcessInfo_v1_t, which pynvml lacks."""

    _fields_ = (("pid", _UINT), ("usedGpuMemory", _ULONG))


_PROCESS_TYPES = (_ProcessInfoV1, pynvml.c_nvmlProcessInfo_v2_t, pynvml.c_nvmlProcessDetail_v1_t)
"""The items that lists of processes have had, by size: each begins like the one before it."""

_UNTOUCHED: Final = 0xA5  # the memory of a list is filled with it before the call: no item of NVML's ends with it

_HANDLE_TYPES = (pynvml.c_nvmlDevice_t, pynvml.c_nvmlEventSet_t, pynvml.c_nvmlGpmSample_t)
"""Answers that are pointers: one that was not filled in is null, and NVML might follow it."""


class NvmlError(Exception):
    """An error of NVML: its ``code``, and its ``name`` without NVML_ERROR_."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = _NAMES.get(code, f"CODE_{code}")
        super().__init__(self.name)


class FieldValue(NamedTuple):
    """The answer for one field: its return ``code``, and if that is 0, its ``value``, ``bits`` wide, read at
    ``at_us``."""

    code: int
    value: float = 0
    bits: int = 64
    at_us: int = 0


class NvmlEvent(NamedTuple):
    """An event of the GPU with that :meth:`Nvml.address`: its kind, its data (for an XID error, the code), and the GPU
    and compute instance if it concerns only those."""

    address: int
    kind: int
    data: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Nvml:
    """NVML through pynvml. Every method raises :class:`NvmlError`, and may hang."""

    def __init__(self) -> None:
        self._field_requests: dict[tuple[FieldId, ...], bytes] = {}
        self._threads = threading.local()

    def call(self, function: str, *arguments: Any) -> Any:
        """The answer of pynvml's ``function``, which concerns no GPU or has no answer to fill in. A function that
        pynvml lacks gives the same error as one that the driver lacks."""
        pynvml_function = getattr(pynvml, function, None)
        if pynvml_function is None:
            raise NvmlError(FUNCTION_NOT_FOUND)
        try:
            answer = pynvml_function(*arguments)
        except pynvml.NVMLError as error:
            raise NvmlError(error.value) from None
        except pynvml.NVMLLibraryMismatchError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        except UnicodeError:  # the answer is a name that is not valid text
            raise NvmlError(UNKNOWN) from None
        if answer == "" or (isinstance(answer, _HANDLE_TYPES) and not answer):
            raise NvmlError(NOTHING_FILLED_IN)
        return answer

    def count(self) -> int:
        """How many GPUs there are, including those that can't be opened. A number that can't be true is an error."""
        count = _unfilled(_UINT)
        _fill("nvmlDeviceGetCount_v2", (), (count,))
        if count.value > _MAX_GPUS:
            raise NvmlError(NOTHING_FILLED_IN)
        return int(count.value)

    def handle(self, index: int) -> Handle:
        return Handle(self.call("nvmlDeviceGetHandleByIndex", index))

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """The answer of pynvml's ``function`` for a device; an empty list if there is nothing to list."""
        if function in _SPECIAL:
            return _SPECIAL[function](function, handle, *arguments)
        answer_types = _ANSWER_TYPES.get(function)
        if answer_types is None:
            return self.call(function, handle, *arguments)
        answers = [_unfilled(answer_type) for answer_type in answer_types]
        _fill(function, (handle, *map(_UINT, arguments)), answers)
        result = [answer if isinstance(answer, ctypes.Structure) else answer.value for answer in answers]
        return result[0] if len(result) == 1 else result

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        """The values of many fields in one call, in the order of ``fields``."""
        request = self._field_requests.get(key := tuple(fields))
        if request is None:
            scoped = [field if isinstance(field, tuple) else (field, 0) for field in fields]
            unfilled = (-1, -1, _UNFILLED, _UNFILLED, b"\xff" * 8)
            request = self._field_requests[key] = b"".join(_FIELD.pack(*field, *unfilled) for field in scoped)
        answers = (ctypes.c_char * len(request)).from_buffer_copy(request)
        _fill("nvmlDeviceGetFieldValues", (handle, ctypes.c_int32(len(fields))), (answers,))
        values = []
        for _, _, at_us, _, value_type, return_code, raw in _FIELD.iter_unpack(answers):
            _, struct_format, bits = _VALUE_TYPES.get(value_type, ("", "", 0))
            if return_code or value_type == _UNFILLED:
                values.append(FieldValue(_code(return_code) if return_code else NOTHING_FILLED_IN))
            elif struct_format:
                values.append(FieldValue(0, struct.unpack_from(struct_format, raw)[0], bits, at_us))
            else:  # a type that a later NVML has added
                values.append(FieldValue(NOT_SUPPORTED))
        return values

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """The samples of nvmlDeviceGetSamples of that kind, newer than ``since_us``."""
        value_type, since = _unfilled(_UINT), _ULONG(since_us)
        samples = _items(
            "nvmlDeviceGetSamples",
            pynvml.c_nvmlSample_t,
            lambda call, count, items: call(
                handle, _UINT(kind), since, ctypes.byref(value_type), ctypes.byref(count), items
            ),
        )
        union_member, _, bits = _VALUE_TYPES.get(value_type.value, ("", "", 0))
        if samples and not union_member:
            raise NvmlError(NOTHING_FILLED_IN if value_type.value == _UNFILLED else NOT_SUPPORTED)
        return [FieldValue(0, getattr(sample.sampleValue, union_member), bits, sample.timeStamp) for sample in samples]

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """The values of these metrics for the time between two samples of one device, in the order of ``metrics``."""
        request = getattr(self._threads, "gpm", None)
        if request is None:  # it has 19 kB: keep one for each thread
            request = self._threads.gpm = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
        request.numMetrics, request.sample1, request.sample2 = len(metrics), older, newer
        answers = [request.metrics[index] for index in range(len(metrics))]
        for answer, number in zip(answers, metrics, strict=True):
            answer.metricId = number
            answer.nvmlReturn = _UNFILLED  # otherwise the last call's code would look like this one's
        self.call("nvmlGpmMetricsGet", request)
        return [FieldValue(_code(answer.nvmlReturn), 0 if answer.nvmlReturn else answer.value, 0) for answer in answers]

    def address(self, handle: Handle) -> int:
        """The address that a GPU's handle and its events have in common: NVML returns a new ctypes pointer each time,
        but to the same address."""
        return ctypes.cast(handle, ctypes.c_void_p).value or 0  # type: ignore[arg-type] # it is one of ctypes

    def wait(self, events: EventSet, within_ms: int) -> NvmlEvent | None:
        """The next event; None if there is none within ``within_ms``."""
        try:
            event = self.call("nvmlEventSetWait_v2", events, within_ms)
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        if not event.eventType:  # nothing was filled in
            return None
        instances = _instance(event.gpuInstanceId), _instance(event.computeInstanceId)
        return NvmlEvent(self.address(event.device), event.eventType, event.eventData, *instances)


def _instance(number: int) -> int | None:
    return None if number == _UNFILLED else number


def _code(returned: int) -> int:
    """The return code of one of many answers; NOTHING_FILLED_IN if NVML did not set it."""
    return NOTHING_FILLED_IN if returned == _UNFILLED else returned


def _unfilled(kind: type[Any]) -> Any:
    """An answer with every bit set."""
    return kind.from_buffer_copy(b"\xff" * ctypes.sizeof(kind))


def _fill(symbol: str, inputs: Sequence[Any], answers: Sequence[Any]) -> None:
    """Have NVML's own function fill in the answers. Raises NvmlError, also if it leaves them unchanged."""
    unfilled = [bytes(answer) for answer in answers]
    if code := _symbol(symbol)(*inputs, *map(ctypes.byref, answers)):
        raise NvmlError(code)
    if unfilled == [bytes(answer) for answer in answers]:
        raise NvmlError(NOTHING_FILLED_IN)


def _symbol(name: str) -> Callable[..., int]:
    """NVML's own function. Raises NvmlError if the driver lacks it."""
    try:
        function: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - not its wrappers
    except pynvml.NVMLError as error:
        raise NvmlError(error.value) from None
    return function


def _memory(function: str, handle: Handle, *version: int) -> Any:
    """The argument is the version of the structure; older drivers have none."""
    memory = _unfilled(pynvml.c_nvmlMemory_v2_t if version else pynvml.c_nvmlMemory_t)
    if version:
        (memory.version,) = version
    _fill(f"{function}_v2" if version else function, (handle,), (memory,))
    return memory


def _pci(function: str, handle: Handle) -> Any:
    """Without the texts in it, which pynvml decodes when they are read."""
    pci = _unfilled(pynvml.nvmlPciInfo_t)
    _fill(f"{function}_v3", (handle,), (pci,))
    return pci


def _temperature(function: str, handle: Handle, sensor: int) -> int:
    """It is signed: all bits set would be -1 degree."""
    answer = pynvml.c_nvmlTemperature_v1_t(pynvml.nvmlTemperature_v1, sensor, -(1 << 31))
    _fill(function, (handle,), (answer,))
    return int(answer.temperature)


def _licensed(function: str, handle: Handle) -> int:
    """Whether a feature is licensed, as 0 or 1. Raises NvmlError if the GPU has no features to license."""
    answer = _unfilled(pynvml.c_nvmlGridLicensableFeatures_v4_t)
    _fill(f"{function}_v4", (handle,), (answer,))
    if not answer.isGridLicenseSupported:
        raise NvmlError(NOT_SUPPORTED)
    features = answer.gridLicensableFeatures[: answer.licensableFeaturesCount]
    return int(any(feature.featureState for feature in features))


def _items(symbol: str, item_type: type[Any], call: Callable[..., int]) -> list[Any]:
    """What NVML lists. ``call`` calls its function with the count and the array of items; without an array it gives
    their number. Raises NvmlError, also if that number can't be true."""
    function, count = _symbol(symbol), _UINT()
    code = call(function, count, None)
    if code not in (0, INSUFFICIENT_SIZE):
        raise NvmlError(code)
    if not (code or count.value):
        return []
    if count.value > _MAX_ITEMS:
        raise NvmlError(NOTHING_FILLED_IN)
    count.value = room = 2 * count.value + 5  # there may be more by now
    items = (item_type * room)()
    if code := call(function, count, items):
        raise NvmlError(code)
    if count.value > room:
        raise NvmlError(NOTHING_FILLED_IN)
    return list(items[: count.value])


def _processes(symbol: str, handle: Handle) -> list[Any]:
    """A list of processes. The size of its items is what the driver has filled in: NVIDIA has changed it without a new
    version, and drivers 535.43 to 535.86 have larger items in the same call than those before and after them."""
    filled = 0

    def ask(call: Callable[..., int], count: Any, items: Any) -> int:
        nonlocal filled
        if items is not None:
            ctypes.memset(items, _UNTOUCHED, ctypes.sizeof(items))
        code = call(handle, ctypes.byref(count), items)
        if items is not None:
            filled = len(bytes(items).rstrip(bytes([_UNTOUCHED])))
        return code

    items = _items(symbol, _PROCESS_TYPES[-1], ask)
    fitting = (struct_type for struct_type in _PROCESS_TYPES if ctypes.sizeof(struct_type) * len(items) == filled)
    process_type = next(fitting, pynvml.c_nvmlProcessInfo_v2_t)
    return [
        SimpleNamespace(pid=process.pid, usedGpuMemory=None if memory_bytes == _NOT_AVAILABLE else memory_bytes)
        for process in (process_type * len(items)).from_buffer_copy(b"".join(map(bytes, items)))
        for memory_bytes in (process.usedGpuMemory,)
    ]


def _process_utilization(symbol: str, handle: Handle, since_us: int) -> list[Any]:
    return _items(
        symbol,
        pynvml.c_nvmlProcessUtilizationSample_t,
        lambda call, count, items: call(handle, items, ctypes.byref(count), _ULONG(since_us)),
    )


def _processes_utilization(symbol: str, handle: Handle, since_us: int) -> list[Any]:
    def ask(call: Callable[..., int], count: Any, items: Any) -> int:
        version = pynvml.ProcessesUtilizationInfo_v1
        answer = pynvml.c_nvmlProcessesUtilizationInfo_v1_t(version, count.value, since_us, items)
        code = call(handle, ctypes.byref(answer))
        count.value = answer.processSamplesCount
        return code

    return _items(symbol, pynvml.c_nvmlProcessUtilizationInfo_v1_t, ask)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetTemperatureV": _temperature,
    "nvmlDeviceGetGridLicensableFeatures": _licensed,
    **{name: _processes for names in PROCESS_LISTS for name in names},
    "nvmlDeviceGetProcessUtilization": _process_utilization,
    "nvmlDeviceGetProcessesUtilizationInfo": _processes_utilization,
}
"""The functions whose structure has a version or another size, and those that list processes. Each has the function
of this module that calls it, with its name, the handle and the arguments."""
