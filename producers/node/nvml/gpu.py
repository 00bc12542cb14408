"""One physical GPU, on its own thread: who it is, its values and processes, and the MIG devices that it is cut into.

In: NVML's answers. Out: a :class:`Reading` per tick.
State: the identity from the healthy time, since a lost GPU can't be asked for it; the layout of its MIG devices;
whether its processes can be seen, which one that was seen shows for good.
On failure: a reading never raises for what NVML answers; it says that the GPU can't be opened, or is lost.
Source: nvml.h. Handles of MIG devices go stale when the layout changes, and may be used again for others: each reading
asks a handle for its UUID first.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, Nvml, NvmlError
from producers.node.nvml.calls import NO_VALUE, Calls, LeftOut, Lost, SlowCall, Tried, is_unsupported
from producers.node.nvml.device import Device, Turn
from producers.node.nvml.lost_gpus import bare
from producers.node.nvml.mig import Instance, Instances
from producers.node.nvml.processes import Found, Placing, Processes
from producers.node.nvml.profiling import Profiling
from producers.node.nvml.support import Support

INFO = ("serial", "driver_version", "cuda_version", "vbios_version")
MIG_MODE = "nvmlDeviceGetMigMode"
UUID = "nvmlDeviceGetUUID"

STALE = (binding.INVALID_ARGUMENT, binding.NOT_FOUND, binding.NOT_SUPPORTED)
"""What a handle is answered whose MIG device is gone."""


class Reading(NamedTuple):
    """What a GPU said when it was read. ``devices`` are as in gpu.samples: the GPU, then its MIG devices; empty if
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


class _Layout(NamedTuple):
    """Whether the GPU is in MIG mode, and into what it is cut."""

    cut: bool = False
    parts: tuple[tuple[str, int | None, int | None, str | None], ...] = ()


class _Part(NamedTuple):
    """A MIG device as it is read."""

    identity: Mapping[str, Any]
    device: Device
    processes: Processes
    profiling: Profiling | None


class Gpu:
    """The GPU at an index. :meth:`read` is for one thread at a time."""

    def __init__(
        self,
        nvml: Nvml,
        index: int,
        places: Placing,
        *,
        list_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self._calls = Calls(nvml, clock)
        self._support = Support()
        self._places, self._list_every_s, self._clock = places, list_every_s, clock
        self._identity: Mapping[str, Any] | None = None
        self._identified = False
        self._lost = False
        self._mig_mode: Mapping[str, str] = {}
        self._visible: bool | None = None
        self._listed_s: float | None = None
        self._layout = _Layout()
        self._parts: dict[str, _Part] = {}
        self._profiling: Profiling | None = None

    @property
    def doing(self) -> str:
        """The call that was made last; of a GPU that hangs, the one that has not returned. For any thread."""
        return self._calls.doing

    @property
    def handle(self) -> Handle:
        """The GPU's, once it has been opened. For any thread."""
        return self._handle

    def running_s(self) -> float:
        """For how long the present call has run. For any thread."""
        return self._calls.running_s()

    def leave(self, after_s: float) -> str | None:
        """Leave a call that has run for so long to its thread; gives its name. :meth:`read` is then to be called on
        another one. A GPU that is being opened is not left. For any thread."""
        return None if self._identity is None else self._calls.leave(after_s)

    def slow(self) -> Sequence[SlowCall]:
        """The calls that are left out, since they did not return in time. For any thread."""
        return self._calls.slow()

    def read(self) -> Reading:
        """One tick; the GPU is opened first if it is not yet. Raises Left."""
        began_s = self._clock()
        devices: Sequence[dict[str, Any]] = ()
        turns: Sequence[tuple[str, Turn]] = ()
        kinds: dict[int, str] = {}
        trouble = None
        self._calls.begin()
        try:
            self._look()
            read_ms = time.time_ns() // 1_000_000
            devices = self._devices(kinds)
            turns = self._turns()
        except Lost as lost:
            trouble = lost
            read_ms = time.time_ns() // 1_000_000
            self._forget()
        took_s, errors = self._clock() - began_s, self._calls.errors()
        return Reading(self._identity, devices, trouble, errors, kinds, took_s, read_ms, turns, self._calls.slowest)

    def left_out(self) -> dict[str, LeftOut]:
        """What the last reading could not have, by the UUID of the device, and why. Not while it reads."""
        if self._identity is None:
            return {}
        parts = {uuid: {**part.device.left_out(), **part.processes.left_out()} for uuid, part in self._parts.items()}
        whole = {**self._refusals(), **self._whole.left_out(), **self._processes.left_out()}
        return {self._identity["uuid"]: whole, **parts}

    def _refusals(self) -> LeftOut:
        return {what: (tried,) for what, tried in self._calls.refusals.items()}

    def let_go(self) -> None:
        """Give back what NVML has lent, before it is closed. It is had anew where the GPU is read again."""
        for profiling in (self._profiling, *(part.profiling for part in self._parts.values())):
            if profiling is not None:
                profiling.free()

    def _look(self) -> None:
        """Open the GPU, or see whether it is back, and into what it is cut. Raises Lost."""
        if self._identity is None:
            self._identity = self._open()
        elif self._lost:
            self._whole.probe()
            self._lost = False
        if self._listed_s is None or self._clock() - self._listed_s >= self._list_every_s:
            self._list()
        self._notice()

    def _devices(self, kinds: dict[int, str]) -> Sequence[dict[str, Any]]:
        devices = [self._device(self._identity or {}, kinds), *self._cut_devices(kinds)]
        return [self._with_visible(device, kinds) for device in devices]

    def _turns(self) -> Sequence[tuple[str, Turn]]:
        """What the GPU and its MIG devices no longer have, or have again."""
        devices = [((self._identity or {})["uuid"], self._whole)]
        devices += [(uuid, part.device) for uuid, part in self._parts.items()]
        return [(uuid, turn) for uuid, device in devices if (turn := device.turn()) is not None]

    def _open(self) -> Mapping[str, Any]:
        """Find out who it is; the UUID is a must. Raises Lost."""
        try:
            self._handle = self._calls.open(self.index)
            uuid = self._calls.ask(UUID, self._handle)
        except NvmlError as error:
            self._calls.count(self.doing, error.name)
            raise Lost(self.doing, error) from None
        self._instances = Instances(self._calls, self._handle)
        self._renew()
        return {"uuid": uuid, "index": self.index, "vendor": "nvidia"}

    def _identify(self) -> None:
        """Find out what it is. What it does not say is asked again later; what it has said stays."""
        before = self._identity or {}
        asked = {
            "model": self._calls.optional("nvmlDeviceGetName", self._handle, "model"),
            "pci_bus_id": _pci_bus_id(self._calls.optional("nvmlDeviceGetPciInfo", self._handle, "pci_bus_id")),
            "minor": self._calls.optional("nvmlDeviceGetMinorNumber", self._handle, "minor"),
            "info": {**before.get("info", {}), **self._asked_info()} or None,
        }
        self._identity = {**before, **{key: value for key, value in asked.items() if value is not None}}
        self._identified = asked.keys() <= self._identity.keys() and len(self._identity["info"]) == len(INFO)
        if not self._identified:
            self._support.refuse(self._identify, Tried("", NO_VALUE))

    def _asked_info(self) -> dict[str, str]:
        """What does not change while NVML is open."""
        asked = {
            "serial": self._calls.optional("nvmlDeviceGetSerial", self._handle, "info.serial"),
            "driver_version": self._calls.system("nvmlSystemGetDriverVersion", "info.driver_version"),
            "cuda_version": _version(self._calls.system("nvmlSystemGetCudaDriverVersion_v2", "info.cuda_version")),
            "vbios_version": self._calls.optional("nvmlDeviceGetVbiosVersion", self._handle, "info.vbios_version"),
        }
        return {key: value for key, value in asked.items() if value}

    def _renew(self) -> None:
        """Ask anew what the GPU supports: in MIG mode that is not what it is else."""
        self.let_go()
        self._parts = {}
        cut, self._profiling = self._layout.cut, Profiling(self._calls, self._handle, clock=self._clock)
        self._whole = Device(self._calls, self._handle, cut=cut, profiling=self._profiling, clock=self._clock)
        self._processes = Processes(self._calls, self._handle, self._places, clock=self._clock)

    def _forget(self) -> None:
        """It is lost: when it is back, its counters may have begun anew, and its layout may be another."""
        self._lost = True
        if self._identity is not None:
            for device in (self._whole, *(part.device for part in self._parts.values())):
                device.forget_counts()
        self._listed_s = None

    def _device(self, identity: Mapping[str, Any], kinds: dict[int, str]) -> dict[str, Any]:
        """The GPU itself. Where it is cut, the processes are its parts'."""
        metrics = self._values()
        found = Found(None, {}) if self._layout.cut else self._processes.read()
        return _device(identity, self._mig_mode, metrics, found, kinds)

    def _values(self) -> dict[str, float]:
        """Those of the GPU itself; where it may have been cut, or is whole again, that is found out at once."""
        whole = self._whole
        metrics = whole.values()
        if whole.changed:
            self._list()
        return metrics if self._whole is whole else self._whole.values()

    def _with_visible(self, device: dict[str, Any], kinds: Mapping[int, str]) -> dict[str, Any]:
        """The device, and whether its processes can be seen, once there were some. One that has just ended can't."""
        if kinds:
            self._visible = self._visible or any(kind != "unseen" for kind in kinds.values())
        if self._visible is None:
            return device
        return {**device, "info": {**device.get("info", {}), "processes_visible": str(self._visible).lower()}}

    def _notice(self) -> None:
        """List the MIG devices again if a handle turns out to be another's, or one is new."""
        stale = [part for part in self._parts.values() if self._is_current(part) is False]
        for part in stale:
            part.device.forget_counts()  # if it is listed again it was made again
        if stale or self._instances.is_new():
            self._list()

    def _cut_devices(self, kinds: dict[int, str]) -> Sequence[dict[str, Any]]:
        """The MIG devices, but for those whose handles are not theirs any more."""
        found = []
        for part in self._parts.values():
            current = self._is_current(part)
            if current:
                metrics, processes = part.device.values(), part.processes.read()
                found.append(_device(part.identity, self._mig_mode, metrics, processes, kinds))
            elif current is None:
                found += bare([part.identity], "timeout")
        return found

    def _is_current(self, part: _Part) -> bool | None:
        """Whether its handle is still its own; None if that can't be said this time."""
        try:
            return bool(self._calls.ask(UUID, part.device.handle) == part.identity["uuid"])
        except NvmlError as error:
            return False if error.code in STALE else None

    def _list(self) -> None:
        """Find out into what the GPU is cut. What can't be asked leaves things as they were."""
        self._support.begin()
        if not self._identified and self._support.asks(self._identify):
            self._identify()
        if self._support.asks(MIG_MODE):
            self._list_instances()
        else:
            self._instances.forget()
        self._listed_s = self._clock()

    def _list_instances(self) -> None:
        self._instances.forget()
        try:
            cut = bool(self._calls.ask(MIG_MODE, self._handle)[0])
            instances = self._instances.listed() if cut else []
        except NvmlError as error:
            self._calls.refusals["mig"] = why = Tried(self.doing, error.name)
            if is_unsupported(error):
                self._support.refuse(MIG_MODE, why)
            else:
                self._calls.count(self.doing, error.name)
            return
        self._support.answer(MIG_MODE)
        self._calls.refusals.pop("mig", None)
        self._mig_mode = {"mig_mode": "enabled" if cut else "disabled"}
        self._arrange(cut, instances)

    def _arrange(self, cut: bool, instances: Sequence[Instance]) -> None:
        """Take a listing; handles are always taken from the newest one."""
        parts = [(one.uuid, one.gpu_instance, one.compute_instance, one.profile) for one in instances]
        before, self._layout = self._layout, _Layout(cut, tuple(parts))
        if before.cut != cut:
            self._renew()
        if before != self._layout:
            self._take_parts(instances)
        for one in instances:
            part = self._parts[one.uuid]
            part.device.handle = part.processes.handle = one.handle

    def _take_parts(self, instances: Sequence[Instance]) -> None:
        """The MIG devices of a layout; those that were in the last one go on as they were."""
        shares = Counter(one.gpu_instance for one in instances)
        before = self._parts
        self._parts = {one.uuid: self._part(one, alone=shares[one.gpu_instance] == 1) for one in instances}
        for uuid, part in before.items():
            if self._parts.get(uuid) is not part and part.profiling is not None:
                part.profiling.free()

    def _part(self, one: Instance, *, alone: bool) -> _Part:
        """A MIG device, the known one where there is it. What GPM says is its own only where it is ``alone`` in its GPU
        instance."""
        identity = {**(self._identity or {}), "uuid": one.uuid, "mig": self._mig(one)}
        known, profiled = self._parts.get(one.uuid), alone and one.gpu_instance is not None
        if known is not None and known.identity == identity and (known.profiling is not None) is profiled:
            return known
        profiling = Profiling(self._calls, self._handle, one.gpu_instance, clock=self._clock) if profiled else None
        return _Part(
            identity,
            Device(self._calls, one.handle, cut=True, profiling=profiling, clock=self._clock),
            Processes(self._calls, one.handle, self._places, cut=True, clock=self._clock),
            profiling,
        )

    def _mig(self, one: Instance) -> Mapping[str, Any]:
        """What a MIG device is of its GPU, as in gpu.samples."""
        mig = {
            "uuid": one.uuid,
            "parent_uuid": (self._identity or {})["uuid"],
            "gpu_instance": one.gpu_instance,
            "compute_instance": one.compute_instance,
            "profile": one.profile,
        }
        return {key: value for key, value in mig.items() if value is not None}


def _device(
    identity: Mapping[str, Any],
    mig_mode: Mapping[str, str],
    metrics: dict[str, float],
    processes: Found,
    kinds: dict[int, str],
) -> dict[str, Any]:
    """A device as in gpu.samples that answered."""
    kinds.update(processes.kinds)
    device = {**identity, "state": "ok", "metrics": metrics}
    if processes.rows is not None:
        device["processes"] = processes.rows
    if info := {**identity.get("info", {}), **mig_mode}:
        device["info"] = info
    return device


def _version(number: int | None) -> str | None:
    """CUDA's version as people write it: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _pci_bus_id(info: Any) -> str | None:
    """With a domain of 8 digits and the function, as NVML and dcgm-exporter write it: 00000000:0A:00.0. None if nothing
    was filled in: then NVML's own text of it is empty, too."""
    if info is None or not getattr(info, "busId", True):
        return None
    return f"{info.domain:08X}:{info.bus:02X}:{info.device:02X}.0"
