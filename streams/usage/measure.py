"""What one tick reports of each physical GPU, and how it is divided among the holders. Integers only. Pure.

In: a tick. Out: for each GPU of it, the shares of its devices: a whole GPU, or its MIG devices and the slices of no MIG
device.

- A MIG device has the compute slices that its profile names: 3 in "3g.40gb", 1 in "1c.3g.40gb". All other slices of
  its GPU are free, also those of a GPU instance that no compute instance has. The GPU's energy is divided by slices.
- A device with several holders is divided by their parts. What nobody used is divided in equal parts among the pods
  that the device was given to, and then among their containers. A holder that was not given the device, but runs on it,
  gets what it used.
- Ratios are integers in millionths. What is left by rounding goes to the largest remainders.
"""

from collections.abc import Mapping, Sequence
from math import lcm
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from streams.usage.tick import CountedDevice, CountedTick, Holder, kept
from topics.attributed import Parts, by_pod
from topics.idleness import IDLE_BELOW, beside_parts, is_idle, part_of, work_of
from topics.mig import model_slices, profile_slices

Split = Literal["used", "equal"]

MILLION = 1_000_000
MOST_BYTES = 2**41  # a device with more memory in use measures nothing; an hour of it would be no 64-bit integer
MOST_SLICES = 64
MOST_WATTS = 20_000  # a GPU that draws more has a counter that jumped

_identity = attrgetter("namespace", "pod", "pod_uid", "container", "observed", "workload", "labels", "namespace_labels")
_NO_PARTS = Parts()


class Weights(NamedTuple):
    """How a device with several holders is divided: one weight for each holder, by the quantity that is divided."""

    time: Sequence[int]
    used: Sequence[int]
    tensor: Sequence[int]
    energy: Sequence[int]
    memory: Sequence[int]


class DeviceAccounts(msgspec.Struct):
    """Who holds a device of a GPU, and the accounts to which its time is booked: reused while ticks report the same.

    ``identities`` has all that a tick reports of each holder but its parts; None: the device is lost. ``pods`` has the
    indices of each pod's holders. ``equal_parts`` are the parts of the holders that were given the device, each in
    units of ``1 / unit``. ``numbers`` are those of the accounts, once they are open.
    """

    gpu_uuid: str
    identities: tuple[tuple[Any, ...], ...] | None
    pods: tuple[tuple[int, ...], ...] = ()
    equal_parts: tuple[int, ...] = ()
    unit: int = 1
    numbers: tuple[int, ...] = ()


class DeviceShare(msgspec.Struct, frozen=True, gc=False):
    """A device of a GPU. ``slices`` are those of a MIG device; 0: it is the GPU itself, or its slices of no MIG device.

    ``used`` and ``tensor`` are in millionths of the time. ``idle`` has, for each holder, whether it does nothing with
    the device. ``weights`` is None unless there are several holders. ``attribution``: the device's own, if it has one.
    """

    uuid: str
    slices: int
    accounts: DeviceAccounts
    used: int = 0
    tensor: int = 0
    memory_bytes: int = 0
    idle: Sequence[bool] = (False,)
    weights: Weights | None = None
    attribution: str | None = None


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """A physical GPU in a tick: its MIG devices, and then itself. ``energy_mj`` is what its energy counter reads."""

    uuid: str
    model: str | None
    shares: list[DeviceShare]
    energy_mj: int | None
    power_watts: float | None


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Parts of a total in proportion to the weights. The largest remainders are rounded up, so that the parts add up.
    If all weights are 0 the parts are equal."""
    if not total:
        return [0] * len(weights)
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    parts: list[int] = []
    remainders: list[int] = []
    undivided = total
    for weight in weights:
        part, remainder = divmod(total * weight, whole)
        parts.append(part)
        remainders.append(remainder)
        undivided -= part
    if undivided:
        for index in sorted(range(len(parts)), key=remainders.__getitem__, reverse=True)[:undivided]:
            parts[index] += 1
    return parts


def gpus_of(
    tick: CountedTick, slices_by_gpu: dict[str, int], last_accounts: Mapping[str, DeviceAccounts], split: Split
) -> list[Gpu]:
    """The physical GPUs of a tick. It updates ``slices_by_gpu`` with the slices that the tick reports.
    ``last_accounts`` are those of the last tick's devices: a device whose holders are the same has them again."""
    devices_by_gpu: dict[str, list[CountedDevice]] = {}
    for device in tick.devices:
        uuid = device.uuid if device.mig is None else device.mig.parent_uuid
        if uuid in devices_by_gpu:
            devices_by_gpu[uuid].append(device)
        else:
            devices_by_gpu[uuid] = [device]
        if device.compute_slices and device.compute_slices <= MOST_SLICES:
            slices_by_gpu[uuid] = device.compute_slices
    gpus = []
    for uuid, devices in devices_by_gpu.items():
        first, mig_devices = devices[0], []
        if len(devices) > 1 or first.mig is not None:
            mig_devices = list({device.uuid: device for device in devices if device.mig is not None}.values())
            first = next((device for device in devices if device.mig is None), first)
        if uuid not in slices_by_gpu:  # no tick has reported into how many slices it can be cut
            without_mig = not mig_devices and first.info.mig_mode is None
            slices_by_gpu[uuid] = 1 if without_mig else model_slices(first.model)
        shares = [_share(device, last_accounts, split) for device in mig_devices]
        shares.append(_share(first if first.mig is None else CountedDevice(uuid), last_accounts, split))
        if mig_devices:
            other_bytes = max(0, shares[-1].memory_bytes - sum([share.memory_bytes for share in shares[:-1]]))
            shares[-1] = msgspec.structs.replace(shares[-1], used=0, tensor=0, memory_bytes=other_bytes)
        energy, power = first.metrics.energy_joules_total, first.metrics.power_watts
        if first.mig is not None:
            energy = power = None
        energy_mj = round(energy * 1000) if energy is not None and 0 <= energy < 1e12 else None
        watts = power if power is not None and 0 <= power <= MOST_WATTS else None
        gpus.append(Gpu(uuid, first.model, shares, energy_mj, watts))
    return gpus


def _share(device: CountedDevice, last_accounts: Mapping[str, DeviceAccounts], split: Split) -> DeviceShare:
    uuid, metrics, gpu_uuid, slices = device.uuid, device.metrics, device.uuid, 0
    if device.mig is not None:
        gpu_uuid, slices = device.mig.parent_uuid, profile_slices(device.mig.profile) or 1
    identities = tuple(map(_identity, device.holders)) if device.state not in ("lost", "timeout") else None
    accounts = last_accounts.get(uuid)
    if accounts is None or accounts.identities != identities or accounts.gpu_uuid != gpu_uuid:
        accounts = DeviceAccounts(gpu_uuid, None) if identities is None else _device_accounts(gpu_uuid, device.holders)
    if identities is None:
        return DeviceShare(uuid, slices, accounts, attribution=device.attribution)
    busy, memory = metrics.gpu_utilization_ratio, metrics.memory_used_bytes
    if busy is None:
        busy = metrics.graphics_engine_active_ratio
    if busy is None:
        busy = metrics.sm_active_ratio
    used, tensor = _millionths(busy), _millionths(metrics.tensor_active_ratio)
    memory_bytes = round(memory) if memory is not None and 0 <= memory <= MOST_BYTES else 0
    count = len(device.holders)
    if not count or (count == 1 and busy is not None and busy >= IDLE_BELOW):
        return DeviceShare(uuid, slices, accounts, used, tensor, memory_bytes, attribution=device.attribution)
    weights, idle = None, _idle(device, accounts.pods)
    if count > 1:  # each holder has what it used itself, and its equal part of the rest
        parts = [holder.parts or _NO_PARTS for holder in device.holders]
        used_by = [_millionths(part.utilization_ratio) for part in parts]
        memory_by = [max(0, round(part.memory_used_bytes or 0)) for part in parts]
        whole = _with_rest(used_by, MILLION - sum(used_by), accounts)
        busy_time = _with_rest(used_by, used - sum(used_by), accounts)
        memory_parts = _with_rest(memory_by, memory_bytes - sum(memory_by), accounts)
        time = accounts.equal_parts if split == "equal" else whole
        weights = Weights(time, busy_time, busy_time, whole, memory_parts)
    return DeviceShare(uuid, slices, accounts, used, tensor, memory_bytes, idle, weights, device.attribution)


def _device_accounts(gpu_uuid: str, holders: Sequence[Holder]) -> DeviceAccounts:
    """Who holds a device, as a tick reports it."""
    identities = [
        tuple([kept(value) if isinstance(value, msgspec.Raw) else value for value in _identity(holder)])
        for holder in holders
    ]
    indices = {id(holder): index for index, holder in enumerate(holders)}
    pods = [tuple([indices[id(holder)] for holder in pod]) for pod in by_pod(holders).values()]
    allocated = list(by_pod([holder for holder in holders if not holder.observed] or holders).values())
    denominators = {indices[id(holder)]: len(allocated) * len(pod) for pod in allocated for holder in pod}
    unit = lcm(*denominators.values())
    equal_parts = [unit // denominators[index] if index in denominators else 0 for index in range(len(holders))]
    return DeviceAccounts(gpu_uuid, tuple(identities), tuple(pods), tuple(equal_parts), unit)


def _millionths(ratio: float | None) -> int:
    if not ratio or ratio < 0:
        return 0
    return round(ratio * MILLION) if ratio < 1 else MILLION


def _idle(device: CountedDevice, pods: Sequence[Sequence[int]]) -> Sequence[bool]:
    """Which of the holders do nothing with the device, judged as alerts do in a tick; not known counts as not idle."""
    holders = device.holders
    parts = [part_of(map(holders.__getitem__, pod)) for pod in pods]
    if min([part or 0.0 for part in parts]) >= IDLE_BELOW:
        return (False,) * len(holders)
    work, idle = work_of(device.metrics), [False] * len(holders)
    uids_and_parts = [(holders[pod[0]].pod_uid, part) for pod, part in zip(pods, parts, strict=True)]
    work_of_processes, rest = beside_parts(work, device.unattributed, device.processes, uids_and_parts)
    for pod, part, process_work in zip(pods, parts, work_of_processes, strict=True):
        if is_idle(IDLE_BELOW, work, part, process_work, rest):
            for index in pod:
                idle[index] = not holders[index].observed
    return idle


def _with_rest(amounts: list[int], rest: int, accounts: DeviceAccounts) -> list[int]:
    """The amounts of the holders, each with its equal part of the rest, in units of ``1 / accounts.unit``."""
    if rest <= 0:
        return amounts
    return [accounts.unit * amount + rest * part for amount, part in zip(amounts, accounts.equal_parts, strict=True)]
