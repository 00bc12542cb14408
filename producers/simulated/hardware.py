"""The GPUs that a simulated node may have, and how its devices appear to NVML and to its kubelet.

In: a node's place in the fleet. Out: its devices, and the units of them that pods can be given.
A GPU in MIG mode stays a device: NVML still answers its power, temperature, clocks and energy, refuses its utilization,
and reports its memory to privileged callers only. Its instances are devices of their own, and NVML reports their
memory. So the sum over a node's devices is right for memory, too.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from producers.simulated import names
from topics.mig import SLICES

MIB = 1024 * 1024

REPLICAS = 4  # how many pods a shared GPU is offered to


class MigSlice(NamedTuple):
    """A MIG instance of a layout: its profile, its GPU instance id, and its share of the memory."""

    profile: str
    gpu_instance: int
    memory_share: float


MIG_LAYOUT = (
    MigSlice("3g.40gb", 2, 4 / 8),
    MigSlice("2g.20gb", 3, 2 / 8),
    MigSlice("1g.10gb", 9, 1 / 8),
    MigSlice("1g.10gb", 10, 1 / 8),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A GPU model: watts, MHz, bytes; ``fan`` and ``memory_sensor`` say whether it has one, ``gpm`` whether it has
    GPM, as Hopper and later have, and ``nvlink_bytes_per_second`` is what its NVLinks carry in each direction.
    ``retires_pages``: it is older than Ampere, and retires bad memory instead of remapping it. ``vgpu``: it says
    whether vGPU software is licensed, which it never is."""

    name: str
    memory_bytes: int
    reserved_bytes: int
    power_limit_watts: float
    idle_watts: float
    idle_mhz: int
    boost_mhz: int
    memory_mhz: int
    idle_pstate: int
    pcie_bytes_per_second: float
    instance_type: str
    vbios_version: str
    mig: bool = False
    fan: bool = False
    memory_sensor: bool = True
    gpm: bool = False
    nvlink_bytes_per_second: float = 0.0
    retires_pages: bool = False
    vgpu: bool = False


MODELS = (
    Model("NVIDIA H100 80GB HBM3", 81559 * MIB, 551 * MIB, 700.0, 68.0, 345, 1980, 2619, 0, 5.5e10, "p5.48xlarge",
          "96.00.99.00.01", mig=True, gpm=True, nvlink_bytes_per_second=4.5e11),
    Model("NVIDIA RTX 6000 Ada Generation", 49140 * MIB, 509 * MIB, 300.0, 22.0, 210, 2505, 10001, 8, 2.8e10,
          "bare-metal-8x6000ada", "95.02.2D.00.05", fan=True, memory_sensor=False, vgpu=True),
    Model("NVIDIA A100-SXM4-80GB", 81920 * MIB, 636 * MIB, 400.0, 56.0, 210, 1410, 1593, 0, 2.8e10, "p4de.24xlarge",
          "92.00.45.00.03", mig=True, nvlink_bytes_per_second=3.0e11),
    Model("NVIDIA L40S", 46068 * MIB, 473 * MIB, 350.0, 34.0, 210, 2520, 9001, 8, 2.8e10, "g6e.48xlarge",
          "95.02.66.00.02", vgpu=True),
    Model("Tesla T4", 15360 * MIB, 425 * MIB, 70.0, 10.0, 300, 1590, 5001, 8, 1.4e10, "g4dn.metal",
          "90.04.96.00.02", memory_sensor=False, retires_pages=True),
)  # fmt: skip

_H100, _ADA, _A100, _L40S, _T4 = MODELS
NODES = (
    ("plain", _H100), ("shared", _T4), ("plain", _ADA), ("mig", _H100), ("plain", _A100),
    ("plain", _L40S), ("shared", _H100), ("plain", _ADA), ("mig", _A100), ("plain", _H100),
)  # fmt: skip
"""How GPUs are given out and which they are, by the last digit of a node's number: a few nodes have all there is."""

DRIVERS = (("570.124.06", "12.8"), ("550.163.01", "12.4"))  # of the driver and its CUDA; every fourth node is old


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A device as NVML shows it. ``slice_of`` is the position of its parent among the node's devices."""

    uuid: str
    index: int
    pci_bus_id: str
    model: Model
    info: dict[str, str]
    mig_mode: bool = False
    slice_of: int | None = None
    slice: MigSlice | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory of the device; of a MIG instance, its share."""
        share = self.slice.memory_share if self.slice else 1.0
        return int(self.model.memory_bytes * share)

    def identity(self, parent_uuid: str | None) -> dict[str, Any]:
        identity = {
            "uuid": self.uuid,
            "index": self.index,
            "vendor": "nvidia",
            "model": self.model.name,
            "pci_bus_id": self.pci_bus_id,
            "minor": self.index,
            "compute_slices": SLICES if self.model.mig else 1,
            "state": "ok",
            "info": self.info,
        }
        if self.slice is None:
            return identity
        mig = {
            "uuid": self.uuid,
            "parent_uuid": parent_uuid,
            "gpu_instance": self.slice.gpu_instance,
            "compute_instance": 0,
            "profile": self.slice.profile,
        }
        return {**identity, "mig": mig}


class Unit(NamedTuple):
    """What a pod can be given: a device plugin's id, its resource, and the position of the device in its node."""

    device_id: str
    resource: str
    device: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one node. ``devices`` is in NVML's order, each GPU followed by its MIG instances."""

    devices: tuple[SimulatedDevice, ...]
    units: tuple[Unit, ...]
    labels: dict[str, str]


def in_use(hardware: Machine, index: int) -> list[Unit]:
    """The units that are given to pods: on every third node the last GPU is kept out of use."""
    spare = len(hardware.devices) - 1 if index % 3 == 2 and len(hardware.devices) > 1 else -1
    return [unit for unit in hardware.units if unit.device != spare]


def whole_gpus(hardware: Machine, index: int) -> list[Unit]:
    return [unit for unit in in_use(hardware, index) if unit.resource == "nvidia.com/gpu"]


def machine(cluster: str, seed: int, index: int, gpus: int) -> Machine:
    """The hardware of the node number ``index``: of five, three have whole GPUs, one shares them, one cuts some up."""
    flavour, model = NODES[index % len(NODES)]
    driver, cuda = DRIVERS[index % 4 == 3]
    devices: list[SimulatedDevice] = []
    for gpu in range(gpus):
        cut = flavour == "mig" and gpu % 2 == 0
        uuid = names.device_uuid("GPU", cluster, seed, index, gpu)
        bus = f"00000000:{0x0A + 0x0F * gpu:02X}:00.0"
        parent = len(devices)
        info = {"serial": names.serial(cluster, seed, index, gpu), "driver_version": driver, "cuda_version": cuda}
        info["vbios_version"] = model.vbios_version
        if model.mig:
            info["mig_mode"] = "enabled" if cut else "disabled"
        devices.append(SimulatedDevice(uuid, gpu, bus, model, info, mig_mode=cut))
        for part in MIG_LAYOUT if cut else ():
            mig_uuid = names.device_uuid("MIG", cluster, seed, index, gpu, part.gpu_instance)
            devices.append(SimulatedDevice(mig_uuid, gpu, bus, model, info, slice_of=parent, slice=part))
    units: list[Unit] = []
    for at, device in enumerate(devices):
        if device.slice is not None:
            units.append(Unit(device.uuid, f"nvidia.com/mig-{device.slice.profile}", at))
        elif flavour == "shared":
            units += [Unit(f"{device.uuid}::{n}", "nvidia.com/gpu.shared", at) for n in range(REPLICAS)]
        elif not device.mig_mode:
            units.append(Unit(device.uuid, "nvidia.com/gpu", at))
    region = ("us-east-1", "eu-central-1", "ap-northeast-1")[int(names.fraction("region", cluster) * 3)]
    labels = {
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/region": region,
        "topology.kubernetes.io/zone": f"{region}{'abc'[index % 3]}",
        "node.kubernetes.io/instance-type": model.instance_type,
        "nvidia.com/gpu.product": model.name.replace(" ", "-") + ("-SHARED" if flavour == "shared" else ""),
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.sharing-strategy": "time-slicing" if flavour == "shared" else "none",
    }
    return Machine(tuple(devices), tuple(units), labels)
