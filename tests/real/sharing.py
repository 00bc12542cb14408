"""A node of eight GPUs that pods share in every way there is, as a story: scene by scene, each with its truth.

In: nothing. Out: for each scene what is so on each device, and what NVML, procfs, the kubelet and the API server say.
What each pod's part is is worked out here in the plainest way, from the processes that are put there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from producers.node.podresources_pb2 import ContainerResources
from tests.nvml.scripted import Mig
from tests.producers.node.pod_resources import answer, claiming, container, pod

NAMESPACE, POOL = "ml-team", "gpu-node-1"
GIB = 1 << 30
GPUS = [f"GPU-5c41b7ed-0000-4000-8000-{gpu:012x}" for gpu in range(8)]
HOST = "(the node itself)"
OPERATOR = "gpu-operator"
"""A pod that asked for no GPU, which the API server's list of GPU pods never has."""
MPS = "nvidia-cuda-mps"
"""The command of an MPS server, which computes for others."""
LATE_POD = "late"
"""A pod that the kubelet knows before the API server's list has it."""


def mig_uuid(gpu: int, instance: int) -> str:
    """What the scripted NVML calls the MIG device of a GPU instance."""
    return f"MIG-5c41b7ed-{gpu:04x}-5000-8000-{instance:06x}{0:06x}"


def pod_uid(name: str) -> str:
    """A pod's uid."""
    return str(uuid5(NAMESPACE_URL, name))


class Running(NamedTuple):
    """A process on a device: whose it is, what it holds (None: NVML can't tell), and how many percent of the time it
    keeps the device busy. ``init``: it is of an init container, which the kubelet does not list; ``ended``: NVML lists
    it a while longer than procfs. ``comm``: its command, as the kernel keeps it."""

    pid: int
    pod: str
    memory: int | None
    busy: int = 0
    init: bool = False
    ended: bool = False
    comm: str = "python"

    @property
    def cgroup(self) -> str:
        """Its control group, in one of the forms that kubelets and runtimes make."""
        if self.pod == HOST:
            return "0::/system.slice/monitor.service\n"
        uid, container_id = pod_uid(self.pod), f"{self.pid + 100 * self.init:064x}"
        sliced = uid.replace("-", "_")
        return (
            f"0::/kubepods.slice/kubepods-pod{sliced}.slice/cri-containerd-{container_id}.scope\n",
            f"0::/kubepods/burstable/pod{uid}/{container_id}\n",
            f"0::/../../kubepods-besteffort-pod{sliced}.slice/crio-{container_id}.scope/container\n",
        )[self.pid % 3]


class Split(NamedTuple):
    """One quantity of a device: each pod's part, and the unattributed rest (None: not known)."""

    parts: Mapping[str, float]
    rest: float | None


@dataclass(frozen=True)
class Truth:
    """A device in one scene. ``busy`` (percent) and ``milliwatts`` None: it has none of its own. ``lost``: it does not
    answer, and only who was given it is known. ``unknown``: the pods whose processes nobody can tell from others'."""

    memory: int
    busy: int | None = None
    milliwatts: int | None = None
    processes: tuple[Running, ...] = ()
    holders: frozenset[str] = frozenset()
    conflict: str | None = None
    sm_active: float | None = None
    lost: bool = False
    unknown: frozenset[str] = frozenset()

    def values(self) -> dict[str, float]:
        """The device's own values, by the keys of its parts."""
        if self.lost:
            return {}
        values_by_key = {"memory_used_bytes": float(self.memory)}
        if self.busy is not None:
            values_by_key["utilization_ratio"] = self.busy / 100
        if self.milliwatts is not None:
            values_by_key["power_watts"] = self.milliwatts / 1000
        return values_by_key

    def splits(self) -> dict[str, Split]:
        """By quantity; nothing if nobody holds the device, or it is lost."""
        if not self.holders or self.lost:
            return {}
        values, split_by_quantity = self.values(), {}
        if any(process.memory is not None for process in self.processes) or not self.processes:
            amounts: dict[int, float] = {process.pid: process.memory or 0 for process in self.processes}
            unmeasured_pods = {
                process.pod for process in self.processes if process.memory is None and process.pod in self.holders
            }
            split_by_quantity["memory_used_bytes"] = self._split(self.memory, amounts, self.unknown | unmeasured_pods)
        if "utilization_ratio" in values:
            amounts = {process.pid: process.busy / 100 for process in self.processes}
            busy = self._split(values["utilization_ratio"], amounts, self.unknown)
            watts = {name: part * values["power_watts"] for name, part in busy.parts.items()}
            split_by_quantity["utilization_ratio"] = busy
            split_by_quantity["power_watts"] = Split(
                watts, None if self.unknown else values["power_watts"] - sum(watts.values())
            )
        return split_by_quantity

    @property
    def scaled(self) -> bool:
        """Whether the processes of pods add up to more than the device."""
        pods = [process for process in self.processes if process.pod in self.holders]
        too_much = sum(process.memory or 0 for process in pods) > self.memory
        return too_much or (self.busy is not None and sum(process.busy for process in pods) > self.busy)

    def without(self, name: str) -> "Truth":
        """The same if the processes of that pod can not be assigned: neither its part nor the rest is known."""
        processes = tuple(process._replace(pod=HOST) if process.pod == name else process for process in self.processes)
        return replace(self, processes=processes, unknown=frozenset({name}))

    def _split(self, total: float, amounts: Mapping[int, float], unknown: Set[str]) -> Split:
        known_pods = self.holders - unknown
        amounts_by_pod = {
            name: [amounts[process.pid] for process in self.processes if process.pod == name] for name in known_pods
        }
        parts = {name: float(sum(used)) for name, used in amounts_by_pod.items()}
        used_total = sum(parts.values())
        if used_total <= total:
            return Split(parts, None if unknown else total - used_total)
        return Split({name: total * part / used_total for name, part in parts.items()}, 0.0)


@dataclass(frozen=True)
class Scene:
    """The true state, and the reported one. ``xids``: XID errors that happen now, as GPU, code and GPU instance."""

    name: str
    devices: Mapping[str, Truth]
    migs: Mapping[int, Sequence[Mig]]
    kubelet: bytes
    pods: Sequence[Mapping[str, Any]]
    xids: Sequence[tuple[int, int, int | None]] = ()

    def on(self, gpu: int) -> Iterator[tuple[Running, int | None]]:
        """The processes on a GPU, each with its GPU instance."""
        yield from ((process, None) for process in self.devices[GPUS[gpu]].processes)
        for mig in self.migs.get(gpu, ()):
            of_it = self.devices[mig_uuid(gpu, mig.gpu_instance)].processes
            yield from ((process, mig.gpu_instance) for process in of_it)


DRIVER, MADE_DEVICE = "gpu.nvidia.com", "gpu-6-mig-1g10gb-9"
DRA_DEVICES = [
    {"driver": DRIVER, "pool": POOL, "device": "gpu-3", "uuid": GPUS[3]},
    {"driver": DRIVER, "pool": POOL, "device": MADE_DEVICE, "uuid": mig_uuid(6, 9)},
]


@dataclass
class World:
    """The node as it is now."""

    devices: dict[str, Truth] = field(default_factory=dict)
    migs: dict[int, list[Mig]] = field(default_factory=dict)
    given: dict[str, list[ContainerResources]] = field(default_factory=dict)
    annotations: dict[str, dict[str, str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    xids: list[tuple[int, int, int | None]] = field(default_factory=list)

    def scene(self, name: str) -> Scene:
        """The node as it is, under a name."""
        listed = [
            {
                "namespace": NAMESPACE,
                "name": pod_name,
                "uid": pod_uid(pod_name),
                "annotations": self.annotations.get(pod_name, {}),
            }
            for pod_name in self.given
            if pod_name not in self.unknown
        ]
        kubelet = answer(
            *(pod(pod_name, *containers, namespace=NAMESPACE) for pod_name, containers in self.given.items())
        )
        xids, self.xids = self.xids, []
        migs = {gpu: tuple(cut) for gpu, cut in self.migs.items()}
        return Scene(name, dict(self.devices), migs, kubelet, listed, xids)

    def device(self, uuid: str, **changed: Any) -> None:
        """Changes the truth of a device."""
        self.devices[uuid] = replace(self.devices.get(uuid, Truth(0)), **changed)

    def give(self, name: str, *containers: ContainerResources, on: str) -> None:
        """The kubelet gives a pod these devices, which really are the device ``on``."""
        self.given[name] = [*self.given.get(name, ()), *containers]
        self.device(on, holders=self.devices[on].holders | {name})

    def end(self, name: str) -> None:
        """A pod ends, and all its processes."""
        del self.given[name]
        for device, truth in self.devices.items():
            alive = tuple(process for process in truth.processes if process.pod != name)
            self.device(device, holders=truth.holders - {name}, processes=alive)

    def run(self, uuid: str, *processes: Running) -> None:
        """Begins processes on a device."""
        self.device(uuid, processes=(*self.devices[uuid].processes, *processes))

    def kill(self, *pids: int) -> None:
        """Ends processes."""
        for device, truth in self.devices.items():
            self.device(device, processes=tuple(process for process in truth.processes if process.pid not in pids))

    def fade(self, pid: int) -> None:
        """Ends a process that NVML does not know of yet."""
        for device, truth in self.devices.items():
            faded = tuple(
                process._replace(ended=True) if process.pid == pid else process for process in truth.processes
            )
            self.device(device, processes=faded)

    def cut(self, gpu: int, *migs: Mig) -> None:
        """Cuts a GPU again: its previous MIG devices are gone."""
        for mig in self.migs.get(gpu, ()):
            if mig not in migs:
                del self.devices[mig_uuid(gpu, mig.gpu_instance)]
        self.migs[gpu] = list(migs)
        self.device(GPUS[gpu], busy=None)
        for mig in migs:
            self.device(mig_uuid(gpu, mig.gpu_instance), memory=mig.used_bytes)


def story() -> Iterator[Scene]:
    """The scenes, in order."""
    world = World()
    for gpu, uuid in enumerate(GPUS):
        world.device(uuid, memory=(2 + gpu) * GIB + gpu, busy=10 + gpu, milliwatts=100_003 + 7_001 * gpu)
    _time_sliced(world)
    _hami(world)
    _claimed(world)
    _greedy(world)
    _cut(world)
    _of_two_containers(world)
    yield world.scene("everybody begins")

    world.cut(5, Mig(1, 0, "1g.10gb", 10 * GIB, GIB + 5), Mig(2, 0, "1g.10gb", 10 * GIB, 3 * GIB + 5))
    world.xids = [(4, 94, None), (6, 31, 5)]
    yield world.scene("a GPU is cut that was whole, and two XID errors happen")

    world.fade(102)
    yield world.scene("a process has ended that NVML still lists")

    world.kill(102)
    world.end("beta")
    world.device(GPUS[0], memory=22 * GIB + 1)
    yield world.scene("one of two pods ends: the other is alone")

    world.give("gamma", container("main", gpus=[f"{GPUS[0]}::1"]), on=GPUS[0])
    yield world.scene("another pod has its place, and no process yet")

    world.run(GPUS[0], Running(121, "gamma", 5 * GIB + 1, 20), Running(122, HOST, GIB))
    world.device(GPUS[0], memory=29 * GIB, busy=77, conflict="no_pod")
    yield world.scene("it has one, and the node itself has one too")

    world.kill(122)
    world.device(GPUS[0], conflict=None)
    world.run(GPUS[1], Running(132, "claimer", GIB // 2, 5))
    world.device(GPUS[1], holders=frozenset({"claimer"}), conflict="unallocated_process")
    yield world.scene("a pod runs where it was given nothing")

    world.kill(132)
    world.device(GPUS[1], holders=frozenset(), conflict=None)
    world.unknown.add(LATE_POD)
    world.give(LATE_POD, claiming("main", "gpu", (DRIVER, POOL, "gpu-3")), on=GPUS[3])
    world.run(GPUS[3], Running(133, LATE_POD, 2 * GIB + 9, 11))
    world.device(GPUS[3], memory=9 * GIB, busy=60)
    yield world.scene("a claim is shared with a pod that the API server's list does not have")

    first, second = mig_uuid(5, 1), mig_uuid(5, 2)
    world.give("mig-d", container("main", **{"nvidia.com/mig-1g.10gb": [first]}), on=first)
    world.give("mig-e", container("main", **{"nvidia.com/mig-1g.10gb": [second]}), on=second)
    world.run(first, Running(151, "mig-d", GIB // 4))
    world.run(second, Running(152, "mig-e", 2 * GIB))
    yield world.scene("the MIG devices that were made while it ran are used")

    world.end("mig-e")
    world.cut(5, world.migs[5][0], Mig(3, 0, "3g.40gb", 40 * GIB, 7 * GIB))
    third = mig_uuid(5, 3)
    for number, name in enumerate(("mig-f", "mig-g")):
        world.give(name, container("main", **{"nvidia.com/mig-3g.40gb.shared": [f"{third}::{number}"]}), on=third)
        world.run(third, Running(155 + number, name, (2 + number) * GIB + 1))
    yield world.scene("one is destroyed, and one of another profile is in its place")

    world.unknown.clear()
    yield world.scene("the API server's list has the pod")

    world.cut(6, *world.migs[6], Mig(9, 0, "1g.10gb", 10 * GIB, GIB + 3))
    world.give("mig-h", claiming("main", "mig", (DRIVER, POOL, MADE_DEVICE)), on=mig_uuid(6, 9))
    world.run(mig_uuid(6, 9), Running(164, "mig-h", GIB + 1))
    yield world.scene("a MIG device is made for a claim, and its pod begins at once")

    world.run(GPUS[7], Running(175, OPERATOR, GIB + 3, 2))
    world.device(GPUS[7], memory=40 * GIB + 1, conflict="unallocated_process")
    yield world.scene("a pod that asked for no GPU runs on one")

    world.device(GPUS[4], lost=True)
    yield world.scene("a GPU is lost that two pods share")

    world.device(GPUS[4], lost=False)
    yield world.scene("it is back")

    world.end("two")
    world.kill(175)
    world.device(GPUS[7], memory=GIB, busy=0, conflict=None)
    world.kill(142)
    world.run(GPUS[4], Running(144, "greedy-b", None, 5))
    yield world.scene("the last pod of a GPU ends, and of one process the memory can't be told")

    for name in list(world.given):
        world.end(name)
    yield world.scene("everybody ends")


def _time_sliced(world: World) -> None:
    """GPU 0: two pods, of which one has two of the replicas."""
    world.device(GPUS[0], memory=30 * GIB + 3, busy=80)
    world.give("alpha", container("main", gpus=[f"{GPUS[0]}::0", f"{GPUS[0]}::2"]), on=GPUS[0])
    world.give("beta", container("main", gpus=[f"{GPUS[0]}::1"]), on=GPUS[0])
    world.run(GPUS[0], Running(101, "alpha", 15 * GIB, 30), Running(102, "alpha", 3 * GIB + 1, 12))
    world.run(GPUS[0], Running(111, "beta", 8 * GIB + 7, 25))


def _hami(world: World) -> None:
    """GPU 2: the kubelet picked slots of GPU 1 and 2, the scheduler GPU 2 for both. MPS servers compute there, too."""
    for number, slot in enumerate((f"{GPUS[1]}-3", f"{GPUS[2]}-5")):
        name = f"hami-{number}"
        chosen = f"{GPUS[2]},NVIDIA,{10240 * (number + 1)},30:;"
        world.annotations[name] = {"hami.io/vgpu-devices-allocated": chosen}
        world.give(name, container("main", **{"nvidia.com/gpu": [slot]}), on=GPUS[2])
        world.run(GPUS[2], Running(181 + number, name, (1 + number) * GIB + 11, 3 + number))
    world.run(GPUS[2], Running(183, OPERATOR, GIB // 4, 2, comm=MPS), Running(184, HOST, GIB // 4, 1, comm=MPS))


def _claimed(world: World) -> None:
    """GPU 3: one pod, by a claim."""
    world.give("claimer", claiming("main", "gpu", (DRIVER, POOL, "gpu-3")), on=GPUS[3])
    world.run(GPUS[3], Running(131, "claimer", 3 * GIB, 7))


def _greedy(world: World) -> None:
    """GPU 4: the processes of two pods add up to more than it has."""
    world.device(GPUS[4], memory=50 * GIB + 1, busy=90)
    for number, name in enumerate(("greedy-a", "greedy-b")):
        world.give(name, container("main", **{"nvidia.com/gpu.shared": [f"{GPUS[4]}::{number}"]}), on=GPUS[4])
        world.run(GPUS[4], Running(141 + number, name, (31 + number) * GIB + 1, 80 - 9 * number))


def _cut(world: World) -> None:
    """GPU 6: two MIG devices; one a single pod's, one shared by two."""
    world.cut(6, Mig(1, 0, "1g.10gb", 10 * GIB, 2 * GIB + 1), Mig(5, 0, "3g.40gb", 40 * GIB, 20 * GIB + 1))
    single, shared = mig_uuid(6, 1), mig_uuid(6, 5)
    world.give("mig-a", container("main", **{"nvidia.com/mig-1g.10gb": [f"MIG-{GPUS[6]}/1/0"]}), on=single)
    for number, name in enumerate(("mig-b", "mig-c")):
        world.give(name, container("main", **{"nvidia.com/mig-3g.40gb.shared": [f"{shared}::{number}"]}), on=shared)
        world.run(shared, Running(162 + number, name, (4 + 5 * number) * GIB + 3))
    world.run(single, Running(161, "mig-a", GIB))
    for instance, active in ((1, 12.5), (5, 75.5)):
        world.device(mig_uuid(6, instance), sm_active=active)


def _of_two_containers(world: World) -> None:
    """GPU 7: a pod of two containers, and what its init container left running."""
    world.device(GPUS[7], memory=39 * GIB, busy=55, sm_active=33.25)
    main, sidecar = (container(name, gpus=[f"{GPUS[7]}::{n}"]) for n, name in enumerate(("main", "sidecar")))
    world.give("two", main, sidecar, on=GPUS[7])
    world.run(GPUS[7], Running(171, "two", 20 * GIB, 30), Running(172, "two", 10 * GIB + 1, 10))
    world.run(GPUS[7], Running(173, "two", 5 * GIB, 1, init=True))


def pids(scenes: Iterable[Scene]) -> dict[int, Running]:
    """Every process of some scenes that is in procfs."""
    processes = (process for scene in scenes for truth in scene.devices.values() for process in truth.processes)
    return {process.pid: process for process in processes if not process.ended}
