"""What one tick says of each physical GPU, and how that is divided among those who hold it. Integers only. Pure.

In: a tick. Out: for each GPU of it, the shares of its devices: a whole GPU, or its MIG devices and what was not cut.

- A MIG device has the compute slices that its profile names: 3 in "3g.40gb", 1 in "1c.3g.40gb". All others of its GPU
  are free, those of a GPU instance that no compute instance has included. The GPU's energy is divided by slices.
- A device that several hold is divided by their parts. What nobody used is divided in equal parts among the pods that
  it was given to, and then among their containers. Whoever was not given it, but runs on it, gets what it used.
- Ratios count in millionths. What does not come out even goes to the largest remainders.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from streams.usage.tick import CountedDevice, CountedTick, Holder
from topics.attributed import Parts, by_pod
from topics.idleness import IDLE_BELOW, is_idle, part_of, rest_of, work_by_pod, work_of

Split = Literal["used", "equal"]

MILLION = 1_000_000
MOST_BYTES = 2**41  # a device with more memory in use measures nothing; an hour of it would be no 64-bit integer
MOST_SLICES = 64
MOST_WATTS = 20_000  # a GPU that draws more has a counter that jumped

_said = attrgetter("namespace", "pod", "pod_uid", "container", "observed", "workload", "labels", "namespace_labels")
_PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.")
_FEWER_SLICES = (("A30", 4), ("RTX PRO", 4))
_SLICES = 7
_NO_PARTS = Parts()


class Weights(NamedTuple):
    """How a device that several hold is divided: one weight for each holder, by what is divided."""

    time: Sequence[int]
    used: Sequence[int]
    tensor: Sequence[int]
    energy: Sequence[int]
    memory: Sequence[int]


class Held(msgspec.Struct):
    """Who holds a device of a GPU, worked out once: it counts for as long as ticks say the same.

    ``said`` is what each holder says of itself but its parts; None: the device is lost. ``pods`` has the places of each
    pod's holders. ``equal`` are the equal parts among those that it was given to, each of ``unit``. ``accounts`` are
    the numbers of the accounts to which its time goes, once they are known.
    """

    gpu_uuid: str
    said: tuple[tuple[Any, ...], ...] | None
    pods: tuple[tuple[int, ...], ...] = ()
    equal: tuple[int, ...] = ()
    unit: int = 1
    accounts: tuple[int, ...] = ()


class DeviceShare(msgspec.Struct, frozen=True, gc=False):
    """A device of a GPU. ``slices`` are those of a MIG device; 0: it is the GPU itself, or what of it was not cut.

    ``used`` and ``tensor`` are in millionths of the time. ``idle`` says who does nothing with it; ``weights`` are there
    if several hold it.
    """

    uuid: str
    slices: int
    held: Held
    used: int = 0
    tensor: int = 0
    memory_bytes: int = 0
    idle: Sequence[bool] = (False,)
    weights: Weights | None = None


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """A physical GPU in a tick: its MIG devices, and then itself. ``energy_mj`` is what its counter says."""

    uuid: str
    model: str | None
    shares: list[DeviceShare]
    energy_mj: int | None
    power_watts: float | None


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Parts of a total in proportion to the weights; the largest remainders are rounded up, so that the parts sum.
    If all weights are 0 the parts are equal."""
    if not total:
        return [0] * len(weights)
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts = [total * weight // whole for weight in weights]
    if left := total - sum(parts):
        remainders = [total * weight % whole for weight in weights]
        for _ in range(left):
            at = remainders.index(max(remainders))
            parts[at] += 1
            remainders[at] = -1
    return parts


def gpus_of(tick: CountedTick, of: dict[str, int], held: dict[str, Held], split: Split) -> list[Gpu]:
    """The physical GPUs of a tick. What the tick says of the slices of each is put into ``of``, and who holds a device,
    if others did before, into ``held``."""
    groups: dict[str, list[CountedDevice]] = {}
    for device in tick.devices:
        uuid = device.uuid if device.mig is None else device.mig.parent_uuid
        if uuid in groups:
            groups[uuid].append(device)
        else:
            groups[uuid] = [device]
        if device.compute_slices and device.compute_slices <= MOST_SLICES:
            of[uuid] = device.compute_slices
    found = []
    for uuid, devices in groups.items():
        first, cut = devices[0], []
        if len(devices) > 1 or first.mig is not None:
            cut = [one for one in devices if one.mig is not None]
            first = next((one for one in devices if one.mig is None), first)
        if uuid not in of:
            of[uuid] = slices_without(first)
        shares = [_share(one, held, split) for one in cut]
        shares.append(_share(first if first.mig is None else CountedDevice(uuid), held, split))
        if cut:
            beside = max(0, shares[-1].memory_bytes - sum([one.memory_bytes for one in shares[:-1]]))
            shares[-1] = msgspec.structs.replace(shares[-1], used=0, tensor=0, memory_bytes=beside)
        energy, power = first.metrics.energy_joules_total, first.metrics.power_watts
        if first.mig is not None:
            energy = power = None
        energy_mj = round(energy * 1000) if energy is not None and 0 <= energy < 1e12 else None
        watts = power if power is not None and 0 <= power <= MOST_WATTS else None
        found.append(Gpu(uuid, first.model, shares, energy_mj, watts))
    return found


def slices_without(device: CountedDevice) -> int:
    """Into how many slices a GPU can be cut, if no tick has said so."""
    if device.mig is None and device.info.mig_mode is None:
        return 1
    return next((few for name, few in _FEWER_SLICES if name in (device.model or "")), _SLICES)


@lru_cache(maxsize=256)
def slices_of(profile: str | None) -> int:
    """The compute slices of a MIG device; 1 if its profile does not say."""
    found = _PROFILE.match(profile or "")
    return max(1, int(found[1] or found[2])) if found else 1


def _share(device: CountedDevice, known: dict[str, Held], split: Split) -> DeviceShare:
    uuid, metrics, holders, gpu_uuid, slices = device.uuid, device.metrics, device.holders, device.uuid, 0
    if device.mig is not None:
        gpu_uuid, slices = device.mig.parent_uuid, slices_of(device.mig.profile)
    said = tuple(map(_said, holders)) if device.state not in ("lost", "timeout") else None
    held = known.get(uuid)
    if held is None or held.said != said or held.gpu_uuid != gpu_uuid:
        held = known[uuid] = Held(gpu_uuid, None) if said is None else _held(gpu_uuid, holders)
    if said is None:
        return DeviceShare(uuid, slices, held)
    busy, memory = metrics.gpu_utilization_ratio, metrics.memory_used_bytes
    if busy is None:
        busy = metrics.graphics_engine_active_ratio
    if busy is None:
        busy = metrics.sm_active_ratio
    used, tensor = _millionths(busy), _millionths(metrics.tensor_active_ratio)
    memory_bytes = round(memory) if memory is not None and 0 <= memory <= MOST_BYTES else 0
    if not holders or (len(holders) == 1 and busy is not None and busy >= IDLE_BELOW):
        return DeviceShare(uuid, slices, held, used, tensor, memory_bytes)
    weights = _weights(holders, held, used, memory_bytes, split) if len(holders) > 1 else None
    idle = _idle(device, held.pods)
    return DeviceShare(uuid, slices, held, used, tensor, memory_bytes, idle, weights)


def _held(gpu_uuid: str, holders: Sequence[Holder]) -> Held:
    """Who holds a device, as a tick has it. The JSON in it is copied: it is a part of the whole record."""
    said = [[one.copy() if isinstance(one, msgspec.Raw) else one for one in _said(holder)] for holder in holders]
    places = {id(one): at for at, one in enumerate(holders)}
    pods = [tuple([places[id(one)] for one in pod]) for pod in by_pod(holders).values()]
    given = list(by_pod([one for one in holders if not one.observed] or holders).values())
    parts_of = {places[id(one)]: len(given) * len(pod) for pod in given for one in pod}
    unit = lcm(*parts_of.values())
    equal = [unit // parts_of[at] if at in parts_of else 0 for at in range(len(holders))]
    return Held(gpu_uuid, tuple(map(tuple, said)), tuple(pods), tuple(equal), unit)


def _millionths(ratio: float | None) -> int:
    if not ratio or ratio < 0:
        return 0
    return round(ratio * MILLION) if ratio < 1 else MILLION


def _idle(device: CountedDevice, pods: Sequence[Sequence[int]]) -> Sequence[bool]:
    """Which of the holders do nothing with the device, as alerts judge it in a tick; not known is not idle."""
    holders = device.holders
    parts = [part_of([holders[at].parts for at in pod]) for pod in pods]
    if min([part or 0.0 for part in parts]) >= IDLE_BELOW:
        return (False,) * len(holders)
    work, ran, rest = work_of(device.metrics), work_by_pod(device.processes or ()), None
    idle = [False] * len(holders)
    if len(pods) > 1:
        strangers = not ran.keys() <= {one.pod_uid for one in holders} - {None}
        rest = rest_of(device.unattributed, work, parts, strangers=strangers)
    for pod, part in zip(pods, parts, strict=True):
        uid = holders[pod[0]].pod_uid
        done = ran.get(uid, 0.0) if uid is not None else 0.0
        found = is_idle(IDLE_BELOW, work, part, done, rest) is True
        for at in pod:
            idle[at] = found and not holders[at].observed
    return idle


def _weights(holders: Sequence[Holder], held: Held, used: int, memory_bytes: int, split: Split) -> Weights:
    """How a device is divided: what each holder did or had and, of the rest, its equal part."""
    parts = [one.parts or _NO_PARTS for one in holders]
    did = [_millionths(one.utilization_ratio) for one in parts]
    had = [max(0, round(one.memory_used_bytes or 0)) for one in parts]
    worked = sum(did)
    whole, busy = _filled(did, MILLION - worked, held), _filled(did, used - worked, held)
    time = held.equal if split == "equal" else whole
    return Weights(time, busy, busy, whole, _filled(had, memory_bytes - sum(had), held))


def _filled(own: list[int], rest: int, held: Held) -> list[int]:
    if rest <= 0:
        return own
    return [held.unit * mine + rest * share for mine, share in zip(own, held.equal, strict=True)]
