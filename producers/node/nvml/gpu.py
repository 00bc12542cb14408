"""One physical GPU, on its own thread: who it is, and the devices that it is: itself, and its MIG devices.

In: NVML's answers. Out: a :class:`GpuReading` per tick.
State: the GPU's identity from when it worked, because a lost GPU does not answer; the layout of its MIG devices, and
the empty slots, so that a new MIG device is noticed without a full listing; whether any of its processes was ever seen.
On failure: a reading never raises because of an answer of NVML. It says that the GPU can't be opened, or is lost. A MIG
slot that gives an error is left out and counted. If a call is left out because it is slow, or gives no answer, there is
no listing, and the layout stays.
Source: nvml.h. A GPU has a number of slots for MIG devices, and any of them may be empty. The profile of a MIG device
is only in its name. When the layout changes, a handle may belong to another MIG device: each reading asks a handle for
its UUID first.
"""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.cgroups import ProcessOwners
from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, Nvml, NvmlError
from producers.node.nvml.calls import NO_VALUE, Calls, FailedCall, LeftOut, Lost, NotReturned, Support, is_unsupported
from producers.node.nvml.metrics import Metrics, Turn
from producers.node.nvml.processes import DeviceProcesses, Processes
from producers.node.nvml.sources import Profiling

INFO = ("serial", "driver_version", "cuda_version", "vbios_version")
MIG_MODE = "nvmlDeviceGetMigMode"
MIG_SLOTS = "nvmlDeviceGetMaxMigDeviceCount"
MIG_SLOT = "nvmlDeviceGetMigDeviceHandleByIndex"
UUID = "nvmlDeviceGetUUID"
STALE = (binding.INVALID_ARGUMENT, binding.NOT_FOUND, binding.NOT_SUPPORTED)  # of a MIG device that is gone
_PROFILE = re.compile(r" MIG (\S+)$")
_KEPT = ("uuid", "index", "vendor", "model", "pci_bus_id", "minor", "mig", "info", "compute_slices")


def bare(devices: Iterable[Mapping[str, Any]], state: str) -> list[dict[str, Any]]:
    """Devices that did not answer: who they are, and nothing else."""
    return [{**{key: one[key] for key in _KEPT if key in one}, "state": state, "metrics": {}} for one in devices]


def log_fields(device: Mapping[str, Any]) -> dict[str, Any]:
    """Who a GPU is, as fields of a line of log; to find the board, people need its place and serial number."""
    serial = device.get("info", {}).get("serial")
    found = {"gpu_uuid": device["uuid"], "pci_bus_id": device.get("pci_bus_id"), "serial": serial}
    return {key: value for key, value in found.items() if value is not None}


class GpuReading(NamedTuple):
    """What a GPU answered when it was read. ``devices`` are as in gpu.samples: the GPU, then its MIG devices; empty if
    ``trouble`` says why the GPU is lost or, without ``identity``, can't be opened.

    Its values were read from ``read_ms`` on (since the epoch). ``turns``: by UUID, what a device no longer has, or has
    again. ``slowest``: the call that took the longest, and how long in seconds.
    """

    identity: Mapping[str, Any] | None
    devices: Sequence[dict[str, Any]]
    trouble: Lost | None
    errors: Sequence[tuple[str, str]]
    kinds: Mapping[int, str]
    took_s: float
    read_ms: int
    turns: Sequence[tuple[str, Turn]] = ()
    slowest: tuple[str, float] = ("", 0.0)


class MigInstance(NamedTuple):
    handle: Handle
    uuid: str
    gpu_instance: int | None
    compute_instance: int | None
    profile: str | None


class SampledDevice(NamedTuple):
    """A device as it is read: the GPU itself, or a MIG device."""

    identity: Mapping[str, Any]
    metrics: Metrics
    processes: Processes
    profiling: Profiling | None


class PhysicalGpu:
    """The GPU at an index. :meth:`read` is for one thread at a time; ``handle`` is there once it has been opened."""

    handle: Handle
    _whole: SampledDevice

    def __init__(
        self, nvml: Nvml, index: int, owners: ProcessOwners, *, list_every_s: float, clock: Callable[[], float]
    ) -> None:
        self.index = index
        self.calls = Calls(nvml, clock)
        self._support = Support()
        self._owners, self._list_every_s, self._clock = owners, list_every_s, clock
        self._identity: Mapping[str, Any] | None = None
        self._identified = False
        self._lost = False
        self._visible: bool | None = None
        self._listed_s: float | None = None
        self._mig_mode: Mapping[str, str] = {}
        self._cut = False
        self._layout: list[tuple[Any, ...]] = []
        self._empty_slots: list[int] = []
        self._parts: dict[str, SampledDevice] = {}

    def leave(self, after_s: float) -> str | None:
        """Leave a call that has run for that long to its thread; gives its name. :meth:`read` must then be called on
        another one. A GPU that is being opened is not left. For any thread."""
        return None if self._identity is None else self.calls.leave(after_s)

    def read(self) -> GpuReading:
        """One tick; the GPU is opened first if it is not yet. Raises Left."""
        began_s = self._clock()
        devices: Sequence[dict[str, Any]] = ()
        turns: Sequence[tuple[str, Turn]] = ()
        kinds: dict[int, str] = {}
        trouble = None
        self.calls.begin()
        try:
            self._look()
            read_ms = time.time_ns() // 1_000_000
            devices = self._devices(kinds)
            turns = [(uuid, turn) for uuid, one in self._sampled() if (turn := one.metrics.turn()) is not None]
        except Lost as lost:
            trouble = lost
            read_ms = time.time_ns() // 1_000_000
            for _, one in self._sampled():  # when it is back its counters may begin again, and its layout be another
                one.metrics.forget_counts()
            self._lost, self._listed_s = True, None
        took_s, errors = self._clock() - began_s, self.calls.errors()
        return GpuReading(self._identity, devices, trouble, errors, kinds, took_s, read_ms, turns, self.calls.slowest)

    def left_out(self) -> dict[str, LeftOut]:
        """What the last reading could not have, by the UUID of the device, and why. Not while it reads."""
        found = {uuid: {**one.metrics.left_out(), **one.processes.left_out()} for uuid, one in self._sampled()}
        if self._identity is not None:
            refused = {what: (tried,) for what, tried in self.calls.refusals.items()}
            found[self._identity["uuid"]] = {**refused, **found[self._identity["uuid"]]}
        return found

    def let_go(self) -> None:
        """Give back what NVML has lent, before it is closed. Reading the GPU again takes it again."""
        for _, one in self._sampled():
            if one.profiling is not None:
                one.profiling.free()

    def _sampled(self) -> list[tuple[str, SampledDevice]]:
        """The GPU and its MIG devices, by UUID; nothing before it is opened."""
        return [] if self._identity is None else [(self._identity["uuid"], self._whole), *self._parts.items()]

    def _look(self) -> None:
        """Open the GPU, or see whether it is back; list its MIG devices when that is due, if a handle turns out to be
        another's, or if a MIG device is new. Raises Lost."""
        if self._identity is None:
            self._open()
        elif self._lost:
            self._whole.metrics.probe()
            self._lost = False
        if self._listed_s is None or self._clock() - self._listed_s >= self._list_every_s:
            self._list()
        stale = [part for part in self._parts.values() if self._is_current(part) is False]
        for part in stale:
            part.metrics.forget_counts()  # if it is listed again it was made again
        made = False
        for slot in self._empty_slots:
            with contextlib.suppress(NvmlError):
                self.calls.ask(MIG_SLOT, self.handle, slot)
                made = True
                break
        if stale or made:
            self._list()

    def _open(self) -> None:
        """Find out who it is; the UUID is a must. Raises Lost."""
        try:
            self.handle = self.calls.open(self.index)
            uuid = self.calls.ask(UUID, self.handle)
        except NvmlError as error:
            self.calls.count(self.calls.doing, error.name)
            raise Lost(self.calls.doing, error) from None
        self._renew()
        self._identity = {"uuid": uuid, "index": self.index, "vendor": "nvidia"}

    def _renew(self) -> None:
        """Ask again what the GPU supports: in MIG mode it supports other things."""
        self.let_go()
        self._parts = {}
        self._whole = self._device(self.handle, Profiling(self.calls, self.handle, clock=self._clock), cut=self._cut)

    def _device(
        self, handle: Handle, profiling: Profiling | None, *, cut: bool, identity: Mapping[str, Any] | None = None
    ) -> SampledDevice:
        metrics = Metrics(self.calls, handle, cut=cut, profiling=profiling, clock=self._clock)
        processes = Processes(self.calls, handle, self._owners, cut=cut, clock=self._clock)
        return SampledDevice(identity or {}, metrics, processes, profiling)

    def _devices(self, kinds: dict[int, str]) -> list[dict[str, Any]]:
        """The devices of this tick; a MIG device whose handle is another's by now is left out. Raises Lost. A GPU that
        may have been cut, or is whole again, is listed at once. If it is cut, the processes are its parts'."""
        whole = self._whole
        metrics = whole.metrics.values()
        if whole.metrics.changed:
            self._list()
            if self._whole is not whole:
                metrics = self._whole.metrics.values()
        processes = DeviceProcesses(None, {}) if self._cut else self._whole.processes.read()
        devices = [self._answered(self._identity or {}, metrics, processes, kinds)]
        for part in self._parts.values():
            current = self._is_current(part)
            if current:
                found = part.metrics.values(), part.processes.read()
                devices.append(self._answered(part.identity, *found, kinds))
            elif current is None:
                devices += bare([part.identity], "timeout")
        if kinds:  # a process that has just ended can't be seen
            self._visible = self._visible or any(kind != "unseen" for kind in kinds.values())
        if self._visible is not None:
            for device in devices:
                device["info"] = {**device.get("info", {}), "processes_visible": str(self._visible).lower()}
        return devices

    def _answered(
        self, identity: Mapping[str, Any], metrics: dict[str, float], processes: DeviceProcesses, kinds: dict[int, str]
    ) -> dict[str, Any]:
        """A device as in gpu.samples that answered."""
        kinds.update(processes.kinds)
        device = {**identity, "state": "ok", "metrics": metrics}
        if processes.rows is not None:
            device["processes"] = processes.rows
        if info := {**identity.get("info", {}), **self._mig_mode}:
            device["info"] = info
        return device

    def _is_current(self, part: SampledDevice) -> bool | None:
        """Whether its handle is still its own; None if that can't be said this time."""
        try:
            return bool(self.calls.ask(UUID, part.metrics.handle) == part.identity["uuid"])
        except NvmlError as error:
            return False if error.code in STALE else None

    def _list(self) -> None:
        """Find out who the GPU is, and into what it is cut. What can't be asked stays as it was. Raises Lost."""
        self._support.begin()
        if not self._identified and self._support.asks(INFO):
            self._identify()
        self._empty_slots = []
        if self._support.asks(MIG_MODE):
            try:
                cut = bool(self.calls.ask(MIG_MODE, self.handle)[0])
                slots = (self.calls.ask if cut else self.calls.optional)(MIG_SLOTS, self.handle)
                instances = self._instances(slots) if cut else []
            except NvmlError as error:
                self.calls.refusals["mig"] = why = FailedCall(self.calls.doing, error.name)
                if is_unsupported(error):
                    self._support.refuse(MIG_MODE, why)
                    self._identity = {**(self._identity or {}), "compute_slices": 1}
                else:
                    self.calls.count(self.calls.doing, error.name)
            else:
                self._support.answer(MIG_MODE)
                self.calls.refusals.pop("mig", None)
                self._mig_mode = {"mig_mode": "enabled" if cut else "disabled"}
                if slots:  # a driver may say 0 while MIG is off
                    self._identity = {**(self._identity or {}), "compute_slices": slots}
                self._arrange(cut, instances)
        self._listed_s = self._clock()

    def _identify(self) -> None:
        """Find out what it is. What it does not say is asked again later; what it has said stays. Raises Lost."""
        before, handle, ask = self._identity or {}, self.handle, self.calls.optional
        model, pci = ask("nvmlDeviceGetName", handle, "model"), ask("nvmlDeviceGetPciInfo", handle, "pci_bus_id")
        minor = ask("nvmlDeviceGetMinorNumber", handle, "minor")
        serial = ask("nvmlDeviceGetSerial", handle, "info.serial")
        driver = ask("nvmlSystemGetDriverVersion", None, "info.driver_version")
        cuda = ask("nvmlSystemGetCudaDriverVersion_v2", None, "info.cuda_version")
        vbios = ask("nvmlDeviceGetVbiosVersion", handle, "info.vbios_version")
        # With a domain of 8 digits and the function, as NVML and dcgm-exporter write it. NVML's own text of it is empty
        # if nothing was filled in.
        filled_in = pci is not None and getattr(pci, "busId", True)
        bus = f"{pci.domain:08X}:{pci.bus:02X}:{pci.device:02X}.0" if filled_in else None
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None  # 13000 is 13.0
        info = {"serial": serial, "driver_version": driver, "cuda_version": version, "vbios_version": vbios}
        asked = {
            "model": model,
            "pci_bus_id": bus,
            "minor": minor,
            "info": {**before.get("info", {}), **{key: value for key, value in info.items() if value}} or None,
        }
        self._identity = {**before, **{key: value for key, value in asked.items() if value is not None}}
        self._identified = asked.keys() <= self._identity.keys() and len(self._identity["info"]) == len(INFO)
        if not self._identified:
            self._support.refuse(INFO, FailedCall("", NO_VALUE))

    def _instances(self, slots: int) -> list[MigInstance]:
        """The MIG devices. Raises NvmlError, Lost."""
        found = []
        for slot in range(slots):
            self._empty_slots.append(slot)
            try:
                handle = self.calls.ask(MIG_SLOT, self.handle, slot)
                self._empty_slots.remove(slot)
                uuid = self.calls.ask(UUID, handle)
            except NvmlError as error:
                if isinstance(error, NotReturned) or error.code == binding.NOTHING_FILLED_IN:
                    raise
                if error.code not in (binding.NOT_FOUND, binding.INVALID_ARGUMENT):
                    self.calls.count(self.calls.doing, error.name)
                continue
            profile = _PROFILE.search(self.calls.optional("nvmlDeviceGetName", handle) or "")
            gpu_instance = self.calls.optional("nvmlDeviceGetGpuInstanceId", handle)
            compute_instance = self.calls.optional("nvmlDeviceGetComputeInstanceId", handle)
            found.append(MigInstance(handle, uuid, gpu_instance, compute_instance, profile[1] if profile else None))
        return found

    def _arrange(self, cut: bool, instances: Sequence[MigInstance]) -> None:
        """Take a listing. MIG devices that were in the last one go on as they were, but with handles of this one."""
        before = self._cut, self._layout
        self._cut, self._layout = cut, [instance[1:] for instance in instances]
        if before[0] != cut:
            self._renew()
        if before != (self._cut, self._layout):
            shares = Counter(one.gpu_instance for one in instances)
            parts = self._parts
            self._parts = {one.uuid: self._part(one, alone=shares[one.gpu_instance] == 1) for one in instances}
            for uuid, part in parts.items():
                if self._parts.get(uuid) is not part and part.profiling is not None:
                    part.profiling.free()
        for one in instances:
            part = self._parts[one.uuid]
            part.metrics.handle = part.processes.handle = one.handle

    def _part(self, one: MigInstance, *, alone: bool) -> SampledDevice:
        """A MIG device: the known one, if nothing changed. What GPM says is its own only if it is ``alone`` there."""
        whole = self._identity or {}
        mig = {
            "uuid": one.uuid,
            "parent_uuid": whole["uuid"],
            "gpu_instance": one.gpu_instance,
            "compute_instance": one.compute_instance,
            "profile": one.profile,
        }
        identity = {**whole, "uuid": one.uuid, "mig": {key: value for key, value in mig.items() if value is not None}}
        known, profiled = self._parts.get(one.uuid), alone and one.gpu_instance is not None
        if known is not None and known.identity == identity and (known.profiling is not None) is profiled:
            return known
        profiling = Profiling(self.calls, self.handle, one.gpu_instance, clock=self._clock) if profiled else None
        return self._device(one.handle, profiling, cut=True, identity=identity)
