"""A fake NVML that the test controls: errors, hangs, GPUs that come and go, MIG devices, processes."""

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from producers.node.cgroups import ProcessOwner, ProcessOwners
from producers.node.nvml import binding
from producers.node.nvml.binding import EventSet, FieldId, FieldValue, Handle, Nvml, NvmlError, NvmlEvent
from producers.node.nvml.events import XID_EVENT

GIB = 1 << 30


def memory(used: int = 4 * GIB, total: int = 80 * GIB, reserved: int = GIB) -> SimpleNamespace:
    return SimpleNamespace(total=total, reserved=reserved, free=total - used - reserved, used=used)


def running(pid: int, memory_bytes: int | None = GIB) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=memory_bytes)


def busy(pid: int, percent: int, at_us: int = 1) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=at_us)


def _answers() -> dict[Any, Any]:
    return {
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetPciInfo": SimpleNamespace(domain=0, bus=10, device=0),
        "nvmlDeviceGetMinorNumber": 0,
        "nvmlDeviceGetMigMode": NvmlError(binding.NOT_SUPPORTED),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=40),
        "nvmlDeviceGetEncoderUtilization": [0, 1000],
        "nvmlDeviceGetDecoderUtilization": [7, 1000],
        "nvmlDeviceGetMemoryInfo": memory(),
        "nvmlDeviceGetPowerUsage": 250_123,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetPowerManagementLimitConstraints": [200_000, 750_000],
        "nvmlDeviceGetTotalEnergyConsumption": 1_500,
        "nvmlDeviceGetTemperatureV": 41,
        "nvmlDeviceGetTemperature": 42,
        "nvmlDeviceGetFanSpeed": 105,
        "nvmlDeviceGetPerformanceState": 0,
        ("nvmlDeviceGetClockInfo", 0): 1980,
        ("nvmlDeviceGetClockInfo", 1): 1965,
        ("nvmlDeviceGetClockInfo", 2): 2619,
        ("nvmlDeviceGetMaxClockInfo", 1): 1980,
        ("nvmlDeviceGetMaxClockInfo", 2): 2620,
        "nvmlDeviceGetCurrentClocksEventReasons": 4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 8,
        "nvmlDeviceGetPcieReplayCounter": 3,
        ("nvmlDeviceGetTotalEccErrors", 0, 0): 11,
        ("nvmlDeviceGetTotalEccErrors", 1, 0): 0,
        ("nvmlDeviceGetTotalEccErrors", 0, 1): 21,
        ("nvmlDeviceGetTotalEccErrors", 1, 1): 1,
        "nvmlDeviceGetRemappedRows": (1, 2, 0, 1),
        "nvmlDeviceGetGridLicensableFeatures": 1,
        "nvmlDeviceGetComputeRunningProcesses_v3": [],
        "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
        "nvmlDeviceGetProcessesUtilizationInfo": [],
        "nvmlDeviceGetProcessUtilization": [],
    }


def _fields() -> dict[FieldId, FieldValue]:
    counters = {29: 5, 30: 1, 31: 0, 38: 2, 52: 3, 59: 4, **{number: number * 10**9 for number in range(74, 80)}}
    return {82: FieldValue(0, 55, 32, 0), **{number: FieldValue(0, raw) for number, raw in counters.items()}}


@dataclass
class FakeDevice:
    """A GPU or a MIG device.

    A function that is not in ``answers`` is NOT_SUPPORTED. An NvmlError in there is raised, and a callable is called
    with the arguments. ``parts`` are the MIG devices by slot, None for an empty slot. ``gpm`` has GPM's values by
    metric, or by GPU instance and metric. ``samples`` are those that the driver keeps, by kind.
    """

    uuid: str
    answers: dict[Any, Any] = field(default_factory=_answers)
    fields: dict[FieldId, FieldValue] = field(default_factory=_fields)
    parts: list["FakeDevice | None"] = field(default_factory=list)
    gpm: dict[Any, FieldValue] = field(default_factory=dict)
    samples: dict[int, list[FieldValue]] = field(default_factory=dict)
    error: int | None = None
    open_error: int | None = None

    def fail(self, function: Any, code: int) -> None:
        self.answers[function] = NvmlError(code)

    def profiled(self, metrics: dict[Any, float]) -> None:
        """Give it GPM, with these values."""
        self.answers |= {
            "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
            "nvmlGpmSampleGet": lambda sample: sample.take(self, None),
            "nvmlGpmMigSampleGet": lambda instance, sample: sample.take(self, instance),
        }
        self.gpm = {metric: FieldValue(0, value, 0) for metric, value in metrics.items()}

    def cut(self, *parts: "FakeDevice | None") -> None:
        """Cut it into MIG devices."""
        self.parts = list(parts)
        self.answers |= {
            "nvmlDeviceGetMigMode": [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount": len(parts),
        }


def part(uuid: str, gpu_instance: int = 1, profile: str = "1g.10gb", *pids: int) -> FakeDevice:
    """A MIG device. It has memory and processes, and nothing else."""
    kinds = ("Compute", "Graphics", "MPSCompute")
    device = FakeDevice(
        uuid,
        {
            "nvmlDeviceGetName": f"NVIDIA H100 80GB HBM3 MIG {profile}",
            "nvmlDeviceGetGpuInstanceId": gpu_instance,
            "nvmlDeviceGetComputeInstanceId": 0,
            "nvmlDeviceGetMemoryInfo": memory(GIB, 10 * GIB),
            **{f"nvmlDeviceGet{kind}RunningProcesses_v3": [] for kind in kinds},
            "nvmlDeviceGetComputeRunningProcesses_v3": [running(pid) for pid in pids],
        },
    )
    device.fields = {}
    return device


class Hang(NamedTuple):
    """Calls that do not return until ``end`` is set."""

    started: threading.Event
    end: threading.Event


class FakeSample:
    """A buffer of GPM. ``take`` fills it with a sample of a device or a GPU instance."""

    def __init__(self) -> None:
        self.device: FakeDevice | None = None
        self.instance: int | None = None
        self.number = 0

    def take(self, device: FakeDevice, instance: int | None) -> "FakeSample":
        self.device, self.instance, self.number = device, instance, next(_SAMPLE_NUMBERS)
        return self


_SAMPLE_NUMBERS = itertools.count(1)


class _Open(NamedTuple):
    device: FakeDevice
    session: int


class _Events:
    """A set of events."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.devices: list[FakeDevice] = []
        self.reported: queue.SimpleQueue[NvmlEvent | NvmlError] = queue.SimpleQueue()


class FakeNvml(Nvml):
    """A machine. As in reality, the GPUs that exist at init are the visible ones."""

    def __init__(self, gpus: int = 2) -> None:
        super().__init__()
        self.gpus = [FakeDevice(f"GPU-{index}") for index in range(gpus)]
        for index, gpu in enumerate(self.gpus):
            gpu.answers["nvmlDeviceGetMinorNumber"] = index
        self.driver_error: int | None = None
        self.version_error: int | None = None
        self.lent: list[Any] = []
        self.lent_at_shutdown: list[int] = []
        self.free_error: int | None = None
        self.windows: list[tuple[int, int]] = []
        self.events_error: int | None = None
        self.system_answers: dict[str, Any] = {}
        self.sets: list[Any] = []
        self.call_counts: Counter[tuple[str, str]] = Counter()
        self.threads: set[str] = set()
        self.inits = self.shutdowns = 0
        self._visible_gpus: list[FakeDevice] = []
        self._hangs: dict[tuple[str | None, str], Hang] = {}
        self.delays_s: dict[tuple[str | None, str], float] = {}

    def hang(self, uuid: str | None, function: str) -> Hang:
        """Let calls of this function hang; ``*`` means every function."""
        hang = self._hangs[uuid, function] = Hang(threading.Event(), threading.Event())
        return hang

    def release(self) -> None:
        for hang in self._hangs.values():
            hang.end.set()
        self._hangs.clear()

    def init(self) -> None:
        self._called(None, "nvmlInit")
        self.inits += 1
        if self.driver_error is not None:
            raise NvmlError(self.driver_error)
        self._visible_gpus = list(self.gpus)

    def shutdown(self) -> None:
        self._called(None, "nvmlShutdown")
        self.shutdowns += 1
        self.lent_at_shutdown.append(len(self.lent))

    def driver_version(self) -> str:
        if self.version_error is not None:
            raise NvmlError(self.version_error)
        return "580.0"

    def call(self, function: str, *arguments: Any) -> Any:
        implemented: dict[str, Callable[..., Any]] = {
            "nvmlInit": self.init,
            "nvmlShutdown": self.shutdown,
            "nvmlSystemGetDriverVersion": self.driver_version,
            "nvmlGpmSampleAlloc": self.gpm_sample,
            "nvmlGpmSampleFree": self.gpm_free,
            "nvmlEventSetCreate": self.events,
            "nvmlDeviceRegisterEvents": self.register,
            "nvmlEventSetFree": self.free,
        }
        if function in implemented and function not in self.system_answers:
            return implemented[function](*arguments)
        self._called(None, function)
        if function not in self.system_answers:
            raise NvmlError(binding.NOT_SUPPORTED)
        return self.system_answers[function]

    def count(self) -> int:
        return len(self._visible_gpus)

    def handle(self, index: int) -> Handle:
        device = self._visible_gpus[index]
        self._called(device.uuid, "nvmlDeviceGetHandleByIndex")
        for error in (device.open_error, device.error):
            if error is not None:
                raise NvmlError(error)
        return Handle(_Open(device, self.inits))

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        device = self._device(handle, function)
        if function == "nvmlDeviceGetUUID":
            return device.uuid
        if function == "nvmlDeviceGetMigDeviceHandleByIndex":
            mig_device = device.parts[arguments[0]] if arguments[0] < len(device.parts) else None
            return Handle(_Open(_existing(mig_device), self.inits))
        answer = device.answers.get((function, *arguments), device.answers.get(function))
        if callable(answer):
            answer = answer(*arguments)
        if answer is None:
            raise NvmlError(binding.NOT_SUPPORTED)
        if isinstance(answer, NvmlError):
            raise NvmlError(answer.code)
        return answer

    def fields(self, handle: Handle, fields: Sequence[FieldId]) -> list[FieldValue]:
        device = self._device(handle, "nvmlDeviceGetFieldValues")
        if (error := device.answers.get("nvmlDeviceGetFieldValues")) is not None:
            answer = error(fields) if callable(error) else error
            if isinstance(answer, NvmlError):
                raise NvmlError(answer.code)
        for number in fields:
            self.call_counts[device.uuid, f"field {number}"] += 1
        return [device.fields.get(number, FieldValue(binding.NOT_SUPPORTED)) for number in fields]

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        device = self._device(handle, "nvmlDeviceGetSamples")
        if isinstance(error := device.answers.get(("nvmlDeviceGetSamples", kind)), NvmlError):
            raise NvmlError(error.code)
        if kind not in device.samples:
            raise NvmlError(binding.NOT_SUPPORTED)
        new = [sample for sample in device.samples[kind] if sample.at_us > since_us]
        if not new:
            raise NvmlError(binding.NOT_FOUND)
        return new

    def gpm_sample(self) -> Any:
        self._called(None, "nvmlGpmSampleAlloc")
        self.lent.append(FakeSample())
        return self.lent[-1]

    def gpm_free(self, sample: Any) -> None:
        self._called(None, "nvmlGpmSampleFree")
        if self.free_error is not None:
            raise NvmlError(self.free_error)
        self.lent.remove(sample)

    def gpm_metrics(self, older: Any, newer: Any, metrics: Sequence[int]) -> list[FieldValue]:
        assert {older, newer} <= set(self.lent)
        assert (older.device, older.instance) == (newer.device, newer.instance)
        device: FakeDevice = newer.device
        self._called(device.uuid, "nvmlGpmMetricsGet")
        if isinstance(error := device.answers.get("nvmlGpmMetricsGet"), NvmlError):
            raise NvmlError(error.code)
        self.windows.append((older.number, newer.number))
        keys = [metric if newer.instance is None else (newer.instance, metric) for metric in metrics]
        return [device.gpm.get(key, FieldValue(binding.NOT_SUPPORTED)) for key in keys]

    def address(self, handle: Handle) -> int:
        return id(handle.device)  # type: ignore[attr-defined]

    def events(self) -> EventSet:
        self._called(None, "nvmlEventSetCreate")
        if self.events_error is not None:
            raise NvmlError(self.events_error)
        events = EventSet(_Events(self.inits))
        self.sets.append(events)
        return events

    def register(self, handle: Handle, kinds: int, events: Any) -> None:
        device = self._device(handle, "nvmlDeviceRegisterEvents")
        assert kinds == XID_EVENT
        events.devices.append(device)

    def wait(self, events: Any, within_ms: int) -> NvmlEvent | None:
        self._called(None, "nvmlEventSetWait")
        assert events.session == self.inits, "the set is void"
        try:
            reported = events.reported.get(timeout=within_ms / 1000)
        except queue.Empty:
            return None
        if isinstance(reported, Exception):
            raise reported
        event: NvmlEvent = reported
        return event

    def free(self, events: Any) -> None:
        self._called(None, "nvmlEventSetFree")
        self.sets.remove(events)

    def xid(self, gpu: FakeDevice, code: int, gpu_instance: int | None = None) -> None:
        """Report an XID error to the event sets that the GPU is in."""
        for events in self.sets:
            events.reported.put(NvmlEvent(id(gpu), XID_EVENT, code, gpu_instance))

    def _device(self, handle: Any, function: str) -> FakeDevice:
        device: FakeDevice = handle.device
        self._called(device.uuid, function)
        if handle.session != self.inits:
            raise NvmlError(binding.UNINITIALIZED)
        if device.error is not None:
            raise NvmlError(device.error)
        return device

    def _called(self, uuid: str | None, function: str) -> None:
        self.call_counts[uuid or "", function] += 1
        self.threads.add(threading.current_thread().name)
        if (hang := self._hangs.get((uuid, function)) or self._hangs.get((uuid, "*"))) is not None:
            hang.started.set()
            hang.end.wait(60)
        if delay_s := self.delays_s.get((uuid, function)) or self.delays_s.get((uuid, "*")):
            time.sleep(delay_s)  # on the thread of the call


def _existing(device: FakeDevice | None) -> FakeDevice:
    if device is None:
        raise NvmlError(binding.NOT_FOUND)
    return device


class FakeProcessOwners(ProcessOwners):
    """The owners of processes, as the test gives them; other processes are invisible."""

    def __init__(self, owners: dict[int, ProcessOwner] | None = None) -> None:
        super().__init__()
        self.owners = owners or {}

    def of(self, pid: int) -> ProcessOwner | None:
        return self.owners.get(pid)


class FakeCensus:
    """The UUIDs of the GPUs that work for a new process, as ``look`` gives them, which the test may set."""

    def __init__(self, look: Callable[[], Iterable[str] | None]) -> None:
        self.look = look
        self.times: list[float] = []
        self.closed = False

    async def run(self) -> frozenset[str] | None:
        self.times.append(time.monotonic())
        uuids = self.look()
        return None if uuids is None else frozenset(uuids)

    def not_ready(self) -> list[str]:
        return []

    def close(self) -> None:
        self.closed = True
