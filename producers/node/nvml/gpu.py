"""One physical GPU, on its own thread: its identity, and its devices, which are the GPU itself and its MIG devices.

In: NVML's answers. Out: a :class:`GpuReading` per tick.
State: the GPU's identity from when it worked, because a lost GPU does not answer; the layout of its MIG devices, and
the empty slots, so that a new MIG device is noticed without a full listing; whether any of its processes was ever seen.
On failure: a reading never raises because of an answer of NVML. It reports that the GPU can't be opened, or is lost. An
error of a MIG slot is counted. The MIG device that was listed there before stays; without one the slot is left out. If
a call is skipped because it is slow, or gives no answer, the listing is given up, and the layout stays as it was.
Source: nvml.h. A GPU has a number of slots for MIG devices, and any of them may be empty. The profile of a MIG device
is only in its name. When the layout changes, a handle may belong to another MIG device. So each reading checks the
UUID of a handle first.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from delivery.clock import now_ms
from producers.node.cgroups import ProcessOwners
from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, Nvml, NvmlError
from producers.node.nvml.calls import (
    NO_VALUE,
    Calls,
    FailedCall,
    GpuLost,
    LeftOut,
    NotReturned,
    Support,
    is_unsupported,
)
from producers.node.nvml.metrics import AvailabilityChange, Metrics, MetricsReading
from producers.node.nvml.processes import DeviceProcesses, Processes
from producers.node.nvml.sources import Profiling

INFO = ("serial", "driver_version", "cuda_version", "vbios_version")
MIG_MODE = "nvmlDeviceGetMigMode"
MIG_SLOTS = "nvmlDeviceGetMaxMigDeviceCount"
MIG_SLOT = "nvmlDeviceGetMigDeviceHandleByIndex"
MAX_MIG_SLOTS = 64  # far above any GPU's; one that claims more gives no number
UUID = "nvmlDeviceGetUUID"
STALE = (binding.INVALID_ARGUMENT, binding.NOT_FOUND, binding.NOT_SUPPORTED)  # errors of a removed MIG device's handle
_PROFILE = re.compile(r" MIG (\S+)$")
_IDENTITY_KEYS = ("uuid", "index", "vendor", "model", "pci_bus_id", "minor", "mig", "info", "compute_slices")


def without_values(devices: Iterable[Mapping[str, Any]], state: str) -> list[dict[str, Any]]:
    """Devices that did not answer, as in gpu.samples: their identities with ``state``, and no values."""
    return [
        {**{key: device[key] for key in _IDENTITY_KEYS if key in device}, "state": state, "metrics": {}}
        for device in devices
    ]


def log_fields(device: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a log line that identify a GPU; to find the board, people need its PCI bus id and serial number."""
    serial = device.get("info", {}).get("serial")
    fields = {"gpu_uuid": device["uuid"], "pci_bus_id": device.get("pci_bus_id"), "serial": serial}
    return {key: value for key, value in fields.items() if value is not None}


class GpuReading(NamedTuple):
    """The result of reading a GPU once. ``devices`` are as in gpu.samples: the GPU, then its MIG devices; empty if the
    GPU is ``lost``. ``identity`` is empty if it can't be opened.

    ``errors`` are calls with the names of their errors. ``process_kinds`` are by process id. The values were read from
    ``read_ms`` on (since the epoch). ``availability_changes`` are by the UUID of the device. ``slowest`` is the call
    that took the longest, and how long in seconds.
    """

    identity: Mapping[str, Any]
    devices: Sequence[dict[str, Any]]
    lost: GpuLost | None
    errors: Sequence[tuple[str, str]]
    process_kinds: Mapping[int, str]
    took_s: float
    read_ms: int
    availability_changes: Sequence[tuple[str, AvailabilityChange]]
    slowest: tuple[str, float]


class MigInstance(NamedTuple):
    handle: Handle
    uuid: str
    gpu_instance: int | None
    compute_instance: int | None
    profile: str | None


class SampledDevice(NamedTuple):
    """A device, the GPU itself or a MIG device, with what reads its values."""

    identity: Mapping[str, Any]
    metrics: Metrics
    processes: Processes
    profiling: Profiling | None


class PhysicalGpu:
    """The GPU at an index. :meth:`read` is for one thread at a time; ``handle`` is set once the GPU is open."""

    handle: Handle
    _gpu_device: SampledDevice

    def __init__(
        self, nvml: Nvml, index: int, owners: ProcessOwners, *, list_every_s: float, clock: Callable[[], float]
    ) -> None:
        self.index = index
        self.calls = Calls(nvml, clock)
        self._support = Support()
        self._owners, self._list_every_s, self._clock = owners, list_every_s, clock
        self._identity: Mapping[str, Any] = {}  # empty until the GPU is open
        self._identified = False
        self._was_lost = False
        self._processes_visible: bool | None = None
        self._listed_s: float | None = None
        self._mig_mode_info: Mapping[str, str] = {}
        self._mig_enabled = False
        self._mig_layout: list[Any] = []
        self._empty_slots: list[int] = []
        self._mig_slots: Mapping[int, MigInstance] = {}
        self._mig_devices: dict[str, SampledDevice] = {}

    def abandon(self, after_s: float) -> str | None:
        """Abandon a call that has run for ``after_s``; returns its name, or None if there is none. Then call
        :meth:`read` on another thread. While the GPU is being opened, its calls can't be abandoned. For any thread."""
        return self.calls.abandon(after_s) if self._identity else None

    def read(self) -> GpuReading:
        """Read the GPU for one tick; open it first if it is not open yet. Raises CallAbandoned."""
        began_s = self._clock()
        devices: Sequence[dict[str, Any]] = ()
        changes: Sequence[tuple[str, AvailabilityChange]] = ()
        process_kinds: Mapping[int, str] = {}
        gpu_lost = None
        self.calls.begin_reading()
        try:
            self._refresh()
            read_ms = now_ms()
            devices, process_kinds = self._devices()
            changes = [
                (uuid, change)
                for uuid, device in self._sampled_devices()
                if (change := device.metrics.availability_change()) is not None
            ]
        except GpuLost as error:
            gpu_lost = error
            read_ms = now_ms()
            for _, device in self._sampled_devices():
                device.metrics.forget_counts()  # when the GPU comes back, its counters may start again from 0
            self._was_lost, self._listed_s = True, None  # and its layout may differ
            self._support.forget(INFO)  # it may have refused what it is only because it was lost
        took_s, errors = self._clock() - began_s, self.calls.errors()
        return GpuReading(
            self._identity, devices, gpu_lost, errors, process_kinds, took_s, read_ms, changes, self.calls.slowest
        )

    def left_out(self) -> dict[str, LeftOut]:
        """The values that the last reading lacks, by the UUID of the device, with the calls that failed.
        Do not call it while the GPU is being read."""
        left_out_by_uuid = {
            uuid: {**device.metrics.left_out(), **device.processes.left_out()}
            for uuid, device in self._sampled_devices()
        }
        if self._identity:
            refused = {value_name: (failed_call,) for value_name, failed_call in self.calls.refusals.items()}
            left_out_by_uuid[self._identity["uuid"]] = {**refused, **left_out_by_uuid[self._identity["uuid"]]}
        return left_out_by_uuid

    def release(self) -> None:
        """Free what NVML has allocated, before NVML is closed. The next reading allocates it again."""
        for _, device in self._sampled_devices():
            if device.profiling is not None:
                device.profiling.free()

    def _sampled_devices(self) -> list[tuple[str, SampledDevice]]:
        """The GPU and its MIG devices, with their UUIDs; empty before the GPU is open."""
        return [(self._identity["uuid"], self._gpu_device), *self._mig_devices.items()] if self._identity else []

    def _refresh(self) -> None:
        """Open the GPU, or check whether it is back. List its MIG devices if that is due, if a handle belongs to
        another device now, or if there is a new one. Raises GpuLost, also if the GPU can't be opened."""
        if not self._identity:
            try:
                self.handle = self.calls.open(self.index)
                uuid = self.calls.ask(UUID, self.handle)
            except NvmlError as error:
                self.calls.count(self.calls.current_call, error.name)
                raise GpuLost(self.calls.current_call, error) from None
            self._create_readers()
            self._identity = {"uuid": uuid, "index": self.index, "vendor": "nvidia"}
        elif self._was_lost:
            self._gpu_device.metrics.probe()
            self._was_lost = False
        if self._listed_s is None or self._clock() - self._listed_s >= self._list_every_s:
            self._list_mig_devices()
        stale = [mig_device for mig_device in self._mig_devices.values() if self._is_current(mig_device) is False]
        for mig_device in stale:
            mig_device.metrics.forget_counts()  # if it is listed again, it was created again
        slot_filled = False
        for slot in self._empty_slots:
            with contextlib.suppress(NvmlError):
                self.calls.ask(MIG_SLOT, self.handle, slot)
                slot_filled = True
                break
        if stale or slot_filled:
            self._list_mig_devices()

    def _create_readers(self) -> None:
        """Start to read the GPU from scratch, because its supported sources change with the MIG mode."""
        self.release()
        self._mig_devices = {}
        profiling = Profiling(self.calls, self.handle, clock=self._clock)
        self._gpu_device = self._sampled_device(self.handle, {}, profiling, mig_enabled=self._mig_enabled)

    def _sampled_device(
        self, handle: Handle, identity: Mapping[str, Any], profiling: Profiling | None, *, mig_enabled: bool
    ) -> SampledDevice:
        metrics = Metrics(self.calls, handle, mig_enabled=mig_enabled, profiling=profiling, clock=self._clock)
        processes = Processes(self.calls, handle, self._owners, mig_enabled=mig_enabled, clock=self._clock)
        return SampledDevice(identity, metrics, processes, profiling)

    def _devices(self) -> tuple[list[dict[str, Any]], Mapping[int, str]]:
        """The devices of this tick, and the kind of each of their processes. MIG devices whose handle belongs to
        another one by now are left out. If the MIG mode may have changed, the MIG devices are listed at once. In MIG
        mode, only they have processes. Raises GpuLost, also if the GPU answers every call with an error."""
        gpu_device = self._gpu_device
        metrics = gpu_device.metrics.read()
        if metrics.failure is not None:
            raise metrics.failure
        if metrics.mig_mode_may_have_changed:
            self._list_mig_devices()
            if self._gpu_device is not gpu_device:
                metrics = self._gpu_device.metrics.read()
        processes = DeviceProcesses(None, {}) if self._mig_enabled else self._gpu_device.processes.read()
        devices, kinds = [self._ok_device(self._identity, metrics, processes)], dict(processes.kinds)
        for mig_device in self._mig_devices.values():
            current = self._is_current(mig_device)
            if current:  # it has given its UUID, so it is not lost, even if all other calls fail
                metrics, processes = mig_device.metrics.read(), mig_device.processes.read()
                devices.append(self._ok_device(mig_device.identity, metrics, processes))
                kinds |= processes.kinds
            elif current is None:
                devices += without_values([mig_device.identity], "timeout")
        if kinds:  # a process that has just ended can't be seen
            self._processes_visible = self._processes_visible or any(kind != "unseen" for kind in kinds.values())
        if self._processes_visible is not None:
            for device in devices:
                device["info"] = {**device.get("info", {}), "processes_visible": str(self._processes_visible).lower()}
        return devices, kinds

    def _ok_device(
        self, identity: Mapping[str, Any], metrics: MetricsReading, processes: DeviceProcesses
    ) -> dict[str, Any]:
        """A device that answered, as in gpu.samples."""
        device = {**identity, "state": "ok", "metrics": metrics.values}
        if processes.rows is not None:
            device["processes"] = processes.rows
        if info := {**identity.get("info", {}), **self._mig_mode_info}:
            device["info"] = info
        return device

    def _is_current(self, mig_device: SampledDevice) -> bool | None:
        """Whether the handle of a MIG device is still its own; None if that can't be found out this time."""
        try:
            return bool(self.calls.ask(UUID, mig_device.metrics.handle) == mig_device.identity["uuid"])
        except NvmlError as error:
            return False if error.code in STALE else None

    def _list_mig_devices(self) -> None:
        """Read the GPU's identity, its MIG mode and its MIG devices. What can't be read stays as it was.
        Raises GpuLost."""
        self._support.begin_reading()
        if not self._identified and self._support.may_ask(INFO):
            self._identify()
        self._empty_slots = []
        if self._support.may_ask(MIG_MODE):
            try:
                mig_enabled = bool(self.calls.ask(MIG_MODE, self.handle)[0])
                slots = (self.calls.ask if mig_enabled else self.calls.optional)(MIG_SLOTS, self.handle)
                if slots is not None and slots > MAX_MIG_SLOTS:
                    raise NvmlError(binding.NOTHING_FILLED_IN)
                instances = self._instances(slots) if mig_enabled else {}
            except NvmlError as error:
                self.calls.refusals["mig"] = failed_call = FailedCall(self.calls.current_call, error.name)
                if is_unsupported(error):
                    self._support.mark_refused(MIG_MODE, failed_call)
                    if failed_call.call == MIG_MODE and not self._support.has_answered(MIG_MODE):  # it never had MIG
                        self._identity = {**self._identity, "compute_slices": 1}
                else:
                    self.calls.count(self.calls.current_call, error.name)
            else:
                self._support.mark_answered(MIG_MODE)
                self.calls.refusals.pop("mig", None)
                self._mig_mode_info = {"mig_mode": "enabled" if mig_enabled else "disabled"}
                if slots:  # a driver may return 0 while MIG is off
                    self._identity = {**self._identity, "compute_slices": slots}
                self._apply_layout(mig_enabled, instances)
        self._listed_s = self._clock()

    def _identify(self) -> None:
        """Read the model, the bus id, the versions and so on. Those that fail are asked for again later; those that
        were read once stay. Raises GpuLost."""
        handle, optional = self.handle, self.calls.optional
        model = optional("nvmlDeviceGetName", handle, "model")
        pci = optional("nvmlDeviceGetPciInfo", handle, "pci_bus_id")
        minor = optional("nvmlDeviceGetMinorNumber", handle, "minor")
        serial = optional("nvmlDeviceGetSerial", handle, "info.serial")
        driver = optional("nvmlSystemGetDriverVersion", None, "info.driver_version")
        cuda = optional("nvmlSystemGetCudaDriverVersion_v2", None, "info.cuda_version")
        vbios = optional("nvmlDeviceGetVbiosVersion", handle, "info.vbios_version")
        # The domain has 8 digits, and the function is included, as NVML and dcgm-exporter write it.
        bus = f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0" if pci is not None else None
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None  # 13000 is 13.0
        info = {"serial": serial, "driver_version": driver, "cuda_version": version, "vbios_version": vbios}
        new_identity = {
            "model": model,
            "pci_bus_id": bus,
            "minor": minor,
            "info": {**self._identity.get("info", {}), **{key: value for key, value in info.items() if value}} or None,
        }
        self._identity = {**self._identity, **{key: value for key, value in new_identity.items() if value is not None}}
        self._identified = new_identity.keys() <= self._identity.keys() and len(self._identity["info"]) == len(INFO)
        if not self._identified:
            self._support.mark_refused(INFO, FailedCall("", NO_VALUE))

    def _instances(self, slots: int) -> dict[int, MigInstance]:
        """The MIG devices by slot. If a call fails for one that was listed before, what is known of it stays.
        Raises NvmlError, GpuLost."""
        instances = {}
        known_by_uuid = {instance.uuid: instance for instance in self._mig_slots.values()}
        for slot in range(slots):
            known = self._mig_slots.get(slot)
            self._empty_slots.append(slot)
            try:
                handle = self.calls.ask(MIG_SLOT, self.handle, slot)
                self._empty_slots.remove(slot)
                uuid = self.calls.ask(UUID, handle)
            except NvmlError as error:
                if isinstance(error, NotReturned) or error.code == binding.NOTHING_FILLED_IN:
                    raise
                if error.code not in (binding.NOT_FOUND, binding.INVALID_ARGUMENT):
                    self.calls.count(self.calls.current_call, error.name)
                if known is not None and error.code not in STALE:
                    instances[slot] = known
                continue
            profile = _PROFILE.search(self.calls.optional("nvmlDeviceGetName", handle) or "")
            gpu_instance = self.calls.optional("nvmlDeviceGetGpuInstanceId", handle)
            compute_instance = self.calls.optional("nvmlDeviceGetComputeInstanceId", handle)
            instance = MigInstance(handle, uuid, gpu_instance, compute_instance, profile[1] if profile else None)
            if (known := known_by_uuid.get(uuid)) is not None:  # if another was destroyed, it has another slot now
                answered = {key: value for key, value in instance._asdict().items() if value is not None}
                instance = known._replace(**answered)
            instances[slot] = instance
        return instances

    def _apply_layout(self, mig_enabled: bool, instances_by_slot: Mapping[int, MigInstance]) -> None:
        """Take over a listing. MIG devices that were in the last one keep their state, but get their new handles."""
        self._mig_slots, instances = instances_by_slot, instances_by_slot.values()
        previous = self._mig_enabled, self._mig_layout
        self._mig_enabled = mig_enabled
        self._mig_layout = [self._identity, *(instance[1:] for instance in instances)]  # what MIG devices are made of
        if previous[0] != mig_enabled:
            self._create_readers()
        if previous != (self._mig_enabled, self._mig_layout):
            sharers = Counter(mig_instance.gpu_instance for mig_instance in instances)
            previous_devices = self._mig_devices
            self._mig_devices = {
                mig_instance.uuid: self._mig_device(mig_instance, alone=sharers[mig_instance.gpu_instance] == 1)
                for mig_instance in instances
            }
            for uuid, mig_device in previous_devices.items():
                if self._mig_devices.get(uuid) is not mig_device and mig_device.profiling is not None:
                    mig_device.profiling.free()
        for mig_instance in instances:
            mig_device = self._mig_devices[mig_instance.uuid]
            mig_device.metrics.handle = mig_device.processes.handle = mig_instance.handle

    def _mig_device(self, instance: MigInstance, *, alone: bool) -> SampledDevice:
        """A MIG device: the existing one, if nothing has changed. GPM is only read if it is ``alone`` in its GPU
        instance, because GPM's metrics are those of the whole instance."""
        mig = {
            "uuid": instance.uuid,
            "parent_uuid": self._identity["uuid"],
            "gpu_instance": instance.gpu_instance,
            "compute_instance": instance.compute_instance,
            "profile": instance.profile,
        }
        identity = {
            **self._identity,
            "uuid": instance.uuid,
            "mig": {key: value for key, value in mig.items() if value is not None},
        }
        existing, has_profiling = self._mig_devices.get(instance.uuid), alone and instance.gpu_instance is not None
        if existing is not None and existing.identity == identity and (existing.profiling is not None) is has_profiling:
            return existing
        profiling = None
        if has_profiling:
            profiling = Profiling(self.calls, self.handle, instance.gpu_instance, clock=self._clock)
        return self._sampled_device(instance.handle, identity, profiling, mig_enabled=True)
