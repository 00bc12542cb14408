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
from typing import Literal, NamedTuple

import msgspec

from streams.usage.tick import CountedDevice, CountedTick, Holder
from topics.attributed import by_pod
from topics.idleness import IDLE_BELOW, is_idle, part_of, rest_of, work_of

Split = Literal["used", "equal"]

MILLION = 1_000_000
MOST_BYTES = 2**41  # a device with more memory in use measures nothing; an hour of it would be no 64-bit integer
MOST_SLICES = 64
MOST_WATTS = 20_000  # a GPU that draws more has a counter that jumped

_BUSY = (False,)
_PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.")
_FEWER_SLICES = (("A30", 4), ("RTX PRO", 4))
_SLICES = 7


class Weights(NamedTuple):
    """How a device that several hold is divided: one weight for each holder, by what is divided."""

    time: list[int]
    used: list[int]
    energy: list[int]
    memory: list[int]


class DeviceShare(msgspec.Struct, frozen=True, gc=False):
    """A device of a GPU. ``slices`` are those of a MIG device; 0: it is the GPU itself, or what of it was not cut.

    ``used`` and ``tensor`` are in millionths of the time. ``idle`` says who does nothing with it; ``weights`` are there
    if several hold it.
    """

    uuid: str
    slices: int
    lost: bool = False
    holders: tuple[Holder, ...] = ()
    used: int = 0
    tensor: int = 0
    memory_bytes: int = 0
    idle: tuple[bool, ...] = (False,)
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
        order = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
        for i in order[:left]:
            parts[i] += 1
    return parts


def gpus_of(tick: CountedTick, of: dict[str, int], split: Split) -> list[Gpu]:
    """The physical GPUs of a tick. What the tick says of the slices of each is put into ``of``."""
    groups: dict[str, list[CountedDevice]] = {}
    for device in tick.devices:
        uuid = device.uuid if device.mig is None else device.mig.parent_uuid
        groups.setdefault(uuid, []).append(device)
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
        shares = [_share(one, slices_of(one.mig.profile if one.mig else None), split) for one in cut]
        itself = _share(first, 0, split) if first.mig is None else DeviceShare(uuid, 0)
        if cut:
            beside = max(0, itself.memory_bytes - sum([one.memory_bytes for one in shares]))
            itself = msgspec.structs.replace(itself, used=0, tensor=0, memory_bytes=beside)
        energy, power = first.metrics.energy_joules_total, first.metrics.power_watts
        if first.mig is not None:
            energy = power = None
        energy_mj = round(energy * 1000) if energy is not None and 0 <= energy < 1e12 else None
        watts = power if power is not None and 0 <= power <= MOST_WATTS else None
        found.append(Gpu(uuid, first.model, [*shares, itself], energy_mj, watts))
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


def _share(device: CountedDevice, slices: int, split: Split) -> DeviceShare:
    if device.state in ("lost", "timeout"):
        return DeviceShare(device.uuid, slices, lost=True)
    metrics, holders = device.metrics, device.holders
    busy = metrics.gpu_utilization_ratio
    if busy is None:
        busy = metrics.graphics_engine_active_ratio
    if busy is None:
        busy = metrics.sm_active_ratio
    held = metrics.memory_used_bytes
    memory_bytes = round(held) if held is not None and 0 <= held <= MOST_BYTES else 0
    used, tensor = _millionths(busy), _millionths(metrics.tensor_active_ratio)
    if not holders:
        return DeviceShare(device.uuid, slices, False, (), used, tensor, memory_bytes)
    idle = _idle(device)
    weights = _weights(device, used, memory_bytes, split) if len(holders) > 1 else None
    return DeviceShare(device.uuid, slices, False, holders, used, tensor, memory_bytes, idle, weights)


def _millionths(ratio: float | None) -> int:
    if not ratio or ratio < 0:
        return 0
    return round(ratio * MILLION) if ratio < 1 else MILLION


def _idle(device: CountedDevice) -> tuple[bool, ...]:
    """Which of the holders do nothing with the device, as alerts judge it in a tick; not known is not idle."""
    holders, busy = device.holders, device.metrics.gpu_utilization_ratio
    if len(holders) == 1 and busy is not None and busy >= IDLE_BELOW:
        return _BUSY
    work = work_of(device.metrics)
    if len(holders) == 1 and work.most >= IDLE_BELOW:
        return _BUSY
    pods = list(by_pod(holders).values())
    parts = [part_of([one.parts for one in pod]) for pod in pods]
    rest = rest_of(device.unattributed, work, parts) if len(pods) > 1 else None
    idle: dict[int, bool] = {}
    for pod, part in zip(pods, parts, strict=True):
        uid = pod[0].pod_uid
        own = [one for one in device.processes or () if uid is not None and one.pod_uid == uid]
        done = sum([one.sm_utilization_ratio or 0.0 for one in own])
        found = is_idle(IDLE_BELOW, work, part, done, rest) is True
        idle |= {id(one): found and not one.observed for one in pod}
    return tuple([idle[id(one)] for one in holders])


def _weights(device: CountedDevice, used: int, memory_bytes: int, split: Split) -> Weights:
    holders = device.holders
    given = [one for one in holders if not one.observed] or holders
    pods = list(by_pod(given).values())
    parts_of = {id(one): len(pods) * len(pod) for pod in pods for one in pod}
    unit = lcm(*parts_of.values())
    equal = [unit // parts_of[id(one)] if id(one) in parts_of else 0 for one in holders]
    done = [_millionths(one.parts.utilization_ratio) if one.parts is not None else 0 for one in holders]
    held = [max(0, round(one.parts.memory_used_bytes or 0)) if one.parts is not None else 0 for one in holders]

    def filled(own: list[int], whole: int) -> list[int]:
        rest = max(0, whole - sum(own))
        return [unit * mine + rest * share for mine, share in zip(own, equal, strict=True)]

    time = filled(done, MILLION)
    return Weights(equal if split == "equal" else time, filled(done, used), time, filled(held, memory_bytes))
