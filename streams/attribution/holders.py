"""Who holds each device of a tick, and what each holder did on it. Pure.

In: a snapshot of the node's containers, the devices of a tick with their processes, and the pods. Out: the holders of
each device with their parts, and the rest that is nobody's.

**Processes** count if they have memory on the device: what only queries it, as monitoring does, has none. If a pod has
a process on a device that it was not given, the pod becomes an observed holder, a holder as any other. If the node's
workloads lack the pod, because it asked for no GPU or has ended, it can't be named: then there is only a conflict. It
is no conflict if a holder's uid is not known: the process may be that holder's. Any process of no pod, of a display
server for example, is a conflict on a device that pods hold. An MPS server, in a pod or not, computes for others: it
does not show who holds the device. A DRA driver may make a MIG device for a claim, whose UUID no slice has: a pod with
such a claim and a process on a MIG device that nobody holds was given that device.

**A shared device** is divided among its holders: the parts and the rest add up to the device, to the last bits of a
float. No part is negative. The order of processes and holders does not matter.

- Utilization is divided by the processes' ``sm_utilization_ratio``, memory by their ``memory_used_bytes``. A holder's
  part is the sum over its pod's processes. If the sum over all pods is more than the device, each part is scaled by
  device / sum, the rest is 0, and the split is flagged.
- The rest is what no holder's process accounts for: processes of no pod, or of a pod that holds nothing, an MPS server
  that is not a holder's own, memory of the driver and of contexts.
- A pod's power is ``power_watts`` times its part of the utilization: the power of the time in which it ran. The power
  of the time in which nobody ran is the rest, idle power included. A pod's energy is the sum over time of its power.
- A part that is not known is absent. A pod has no part if one of its processes does not report how much it uses. A pod
  whose uid is not known has none if there are processes of a pod that is none of the holders: these may be its own.
  Then the rest is absent, too, because it would include that part.
- Nothing is divided if the processes can't be seen. A quantity is not divided if the device does not have it (a MIG
  device has neither utilization nor power of its own) or if no process has it.
- Records do not have the container of a process, only its ``container_id``. So if a pod has several containers on the
  device, the first one by name has the pod's whole part, and the others have none: sums over a pod's rows are right,
  whichever container it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import msgspec

from streams.attribution.hami import ContainerName, hami_device_ids, is_slot
from streams.attribution.workloads import EMPTY, DraKey, PodName
from topics.allocations import Allocations, Claim, Container
from topics.attributed import JOB, Holder, Parts, Workload
from topics.device_ids import DeviceIndex, UnknownDeviceId, parse
from topics.samples import Device, Process
from topics.workloads import Owner, Pod

UNALLOCATED = "unallocated_process"
NO_POD = "no_pod"

Pods = Mapping[PodName, Pod | None]
"""The pods that a snapshot names, as they were at the time of the sample. None: the workloads have no such pod. A name
is absent if nothing is known of the node's pods."""

Amount = int | float
_CONTROLLERS = {("batch", "Job"): "job", ("apps", "StatefulSet"): "statefulset", ("apps", "Deployment"): "deployment"}

_STATIC_UID_LENGTH = 32  # a control group's uid of a static pod has no dashes, and the API server has another
_SLACK = 1e-9  # a sum may exceed the device by this share: ratios of percents do not add up exactly
_LARGEST = 2**63 - 1  # a larger value measures nothing, and no integer of a record is larger
_NO_PARTS = Parts()
_replace = msgspec.structs.replace


class SnapshotHolders(msgspec.Struct, frozen=True):
    """The holders of each device, by UUID, and the device ids that are in no known grammar. ``by_claim`` has a
    container of each pod with a claim to a device whose UUID its driver does not say."""

    by_uuid: dict[str, tuple[Holder, ...]]
    unknown_ids: tuple[str, ...] = ()
    by_claim: dict[PodName, Holder] = {}


# -- by the snapshot


def holders_by_snapshot(
    snapshot: Allocations,
    devices: Sequence[Device],
    pods: Pods,
    dra: Mapping[DraKey, str],
    *,
    ended: AbstractSet[PodName] = EMPTY,
    admin: AbstractSet[Claim] = EMPTY,
) -> SnapshotHolders:
    """The holders of each of ``devices``, each (pod, container, physical device) once, in the snapshot's order.
    Pods that had ``ended`` hold nothing, and the claims in ``admin`` do not hold their devices."""
    index = DeviceIndex(devices)
    containers = [container for container in snapshot.containers if (container.namespace, container.pod) not in ended]
    hami_ids = hami_device_ids(containers, pods)
    holders_by_uuid: dict[str, dict[ContainerName, Holder]] = {}
    by_claim: dict[PodName, Holder] = {}
    unknown_ids: list[str] = []
    drivers = {driver for driver, *_ in dra}
    for container in containers:
        holder, name = _listed_holder(container, pods), (container.namespace, container.pod, container.container)
        ids: list[str] = list(container.device_ids)
        if name in hami_ids and any(map(is_slot, ids)):
            ids = [device_id for device_id in ids if not is_slot(device_id)] + list(hami_ids[name])
        claimed = [(c.driver, c.pool, c.device) for c in container.claims if c not in admin]
        ids += [dra[key] for key in claimed if key in dra]
        if any(key not in dra and key[0] in drivers for key in claimed):
            by_claim.setdefault(name[:2], holder)
        for device_id in ids:
            try:
                uuid = index.find(parse(device_id))
            except UnknownDeviceId:
                unknown_ids.append(device_id)
                continue
            if uuid is not None:
                holders_by_uuid.setdefault(uuid, {}).setdefault(name, holder)
    return SnapshotHolders(
        {uuid: tuple(holders.values()) for uuid, holders in holders_by_uuid.items()}, tuple(unknown_ids), by_claim
    )


def _listed_holder(container: Container, pods: Pods) -> Holder:
    """A container of a snapshot, with what is known of its pod."""
    pod_name, resource = (container.namespace, container.pod), container.resource
    if (pod := pods.get(pod_name)) is not None and container.pod_uid in (None, pod.uid):
        return holder_of(pod, container=container.container, resource=resource)
    return Holder(
        *pod_name,
        pod_uid=container.pod_uid,
        container=container.container,
        resource=resource,
        pod_unknown=pod_name in pods,
    )


def holder_of(pod: Pod, *, container: str | None = None, resource: str | None = None, observed: bool = False) -> Holder:
    """A container of a known pod, with its labels and owners.
    It names the Job, StatefulSet or Deployment that is the nearest owner of the pod: at most one of the three."""
    owners = pod.owners if pod.owners_complete else ()
    kind = controller = None
    for owner in owners:
        if (kind := _CONTROLLERS.get((owner.api_version.split("/")[0], owner.kind))) is not None:
            controller = owner.name
            break
    workload = workload_of(owners[-1]) if owners else None
    if workload is None and pod.owners_complete:
        workload = Workload("Pod", pod.name)  # a pod without owners is its own workload
    return Holder(
        namespace=pod.namespace,
        pod=pod.name,
        pod_uid=pod.uid,
        container=container,
        resource=resource,
        workload=workload,
        job=controller if kind == "job" else None,
        statefulset=controller if kind == "statefulset" else None,
        deployment=controller if kind == "deployment" else None,
        labels=pod.labels,
        annotations=pod.annotations,
        namespace_labels=pod.namespace_labels,
        observed=observed,
        waiting=pod.waiting,
        restarts=pod.restarts,
    )


def workload_of(top: Owner) -> Workload:
    """The top of a chain as a workload. The kind that batch jobs have is written with its API group: a tenant may write
    any kind as the owner of a pod, and a batch job has neither a namespace nor the labels of a pod."""
    kind = top.kind if top.kind != JOB else f"{top.kind}.{top.api_version.rpartition('/')[0]}"
    return Workload(kind, top.name)


# -- by the processes


class DeviceHolders(NamedTuple):
    """All holders of a device, and the conflict between its processes and what the kubelet reports."""

    holders: tuple[Holder, ...]
    conflict: str | None = None


def _processes_visible(device: Device) -> bool:
    """Whether all processes of a device can be seen, if the tick has them."""
    return device.info.get("processes_visible") != "false"


def process_uids(devices: Iterable[Device]) -> frozenset[str]:
    """The uids of the pods that have a process with memory on one of the devices."""
    return frozenset(
        process.pod_uid
        for device in devices
        if device.processes and _processes_visible(device)
        for process in device.processes
        if process.pod_uid and process.memory_used_bytes and process.service is None
    )


def add_observed(
    device: Device,
    holders: tuple[Holder, ...],
    pod_of: Callable[[str], Pod | None] | None,
    by_claim: Mapping[PodName, Holder],
) -> DeviceHolders:
    """The holders of a device with the pods that its processes show. ``pod_of`` returns the pod of a uid as it was at
    the time of the tick; None: the node has no workloads. A holder whose uid is not known may be any pod of its name,
    and any pod that is not known. One that nobody holds may be a MIG device made for a pod in ``by_claim``."""
    if not device.processes:
        return DeviceHolders(holders)
    holder_uids = [holder.pod_uid for holder in holders if holder.pod_uid is not None]
    of_others = [process for process in device.processes if process.pod_uid not in holder_uids]
    uids = {process.pod_uid for process in of_others if process.memory_used_bytes and process.service is None}
    if not uids or not _processes_visible(device):
        return DeviceHolders(holders)
    pods = {uid: pod_of(uid) for uid in uids if uid is not None} if pod_of else {}
    without_uid = {(holder.namespace, holder.pod) for holder in holders if holder.pod_uid is None}
    observed = [pod for pod in pods.values() if pod is not None and (pod.namespace, pod.name) not in without_uid]
    observed.sort(key=lambda pod: (pod.namespace, pod.name, pod.uid))
    by_uid = {holder.pod_uid: holder for holder in by_claim.values()} if device.mig and not holders else {}
    shown = [by_uid.get(pod.uid) or holder_of(pod, observed=True) for pod in observed]
    unknown = not without_uid and any(pod is None and not is_static_pod(uid) for uid, pod in pods.items())
    if unknown or any(holder.observed for holder in shown):
        return DeviceHolders((*holders, *shown), UNALLOCATED)
    holders = (*holders, *shown)
    return DeviceHolders(holders, NO_POD if holders and None in uids else None)


def is_static_pod(uid: str) -> bool:
    """Whether a control group's uid is that of a static pod, which the API server knows by another uid."""
    return len(uid) == _STATIC_UID_LENGTH and "-" not in uid


# -- the parts of a shared device


class Split(msgspec.Struct, frozen=True, gc=False):
    """Holders with their parts, the rest, and whether the processes' sum exceeded the device."""

    holders: tuple[Holder, ...]
    unattributed: Parts | None = None
    scaled: bool = False


class ProcessOwners(msgspec.Struct, frozen=True, gc=False):
    """Which holder owns each process of a device. A holder is its index here, its row; ``holders`` is their number.

    ``rows`` has the row of each process; the row behind the last one means no holder. ``unknown`` are the holders of
    which it is not known which processes are theirs. ``absent`` are the holders without a part: the unknown ones, and
    the further containers of a pod, whose part the first one has. ``sole``: there is one holder, and it owns all
    processes. ``unsorted``: no holder has more than two processes, so the order in which they are added does not
    matter.
    """

    holders: int
    rows: tuple[int, ...]
    unknown: frozenset[int] = EMPTY
    absent: frozenset[int] = EMPTY
    sole: bool = False
    unsorted: bool = False


class _Shares(msgspec.Struct, frozen=True, gc=False):
    """One quantity: the amount of each holder and, behind the last, the rest; None: not known.
    ``absent`` are the rows of the holders without an amount."""

    amounts: list[Amount | None]
    absent: frozenset[int]
    scaled: bool = False


def owners_of(device: Device, holders: Sequence[Holder]) -> ProcessOwners | None:
    """Which holder owns each process of a device; None: nothing is divided.
    A pod whose uid is not known owns the processes if it is the only holder and they are all of one pod."""
    processes, count = device.processes, len(holders)
    if not holders or processes is None or not _processes_visible(device):
        return None
    row_by_uid: dict[str | None, int] = {holder.pod_uid: row for row, holder in enumerate(holders)}
    if len(row_by_uid) == count and None not in row_by_uid:
        rows = tuple([row_by_uid.get(process.pod_uid, count) for process in processes])
        unsorted = all(rows.count(row) <= 2 for row in range(count))
        return ProcessOwners(count, rows, sole=count == 1 and set(rows) == {0}, unsorted=unsorted)
    first_rows: dict[str | tuple[str, str], int] = {}
    for row in sorted(range(count), key=lambda row: holders[row].container or ""):
        first_rows.setdefault(holders[row].pod_uid or (holders[row].namespace, holders[row].pod), row)
    row_by_uid = {pod: row for pod, row in first_rows.items() if isinstance(pod, str)}
    without_uid = [row for pod, row in first_rows.items() if not isinstance(pod, str)]
    other_uids = {p.pod_uid for p in processes if p.service is None and p.pod_uid is not None}.difference(row_by_uid)
    if len(without_uid) == len(first_rows) == len(other_uids) == 1:
        row_by_uid[other_uids.pop()] = without_uid.pop()
    unknown = frozenset(without_uid if other_uids else ()) or EMPTY
    absent = unknown.union(set(range(count)).difference(first_rows.values())) or EMPTY
    rows = tuple([row_by_uid.get(process.pod_uid, count) for process in processes])
    return ProcessOwners(count, rows, unknown, absent)


def divide(device: Device, holders: tuple[Holder, ...], owners: ProcessOwners | None) -> Split:
    """The parts of a device; none if the owners of its processes are None."""
    processes, metrics = device.processes, device.metrics
    if owners is None or processes is None:
        return Split(holders)
    if owners.sole:
        return _divide_sole(holders[0], processes, metrics)
    busy, watts, power = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts"), None
    utilization = _shares(busy, [process.sm_utilization_ratio for process in processes], owners, 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory = _shares(metrics.get("memory_used_bytes"), bytes_used, owners, _LARGEST)
    if utilization is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        watts_per_ratio = watts / max(1.0, busy)
        *ratios, idle = utilization.amounts
        watts_used: list[Amount] = [watts_per_ratio * (ratio or 0) for ratio in ratios]
        power = _fit(watts, watts_used, utilization.absent, all_known=idle is not None)
    unknown = [None] * (len(holders) + 1)
    columns = [unknown if shares is None else shares.amounts for shares in (utilization, memory, power)]
    *parts, rest = map(Parts, *columns)
    with_parts = [
        _replace(holder, parts=None if part == _NO_PARTS else part) for holder, part in zip(holders, parts, strict=True)
    ]
    scaled = (utilization is not None and utilization.scaled) or (memory is not None and memory.scaled)
    return Split(tuple(with_parts), None if rest == _NO_PARTS else rest, scaled)


def _divide_sole(holder: Holder, processes: Sequence[Process], metrics: Mapping[str, Amount | None]) -> Split:
    """The parts of a device that one pod holds and on which all processes are that pod's: the usual case. They are the
    same as if other pods without a process held it, too."""
    busy, watts = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts")
    ratio, idle_ratio, scaled = _total(busy, [process.sm_utilization_ratio for process in processes], 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory, other_memory, memory_scaled = _total(metrics.get("memory_used_bytes"), bytes_used, _LARGEST)
    if ratio is None and memory is None:
        return Split((holder,))
    power = other_power = None
    if ratio is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        power = watts / max(1.0, busy) * ratio
        power, other_power = (power, watts - power) if power <= watts else (watts * 1.0, 0)
    rest = Parts(idle_ratio, other_memory, other_power)
    return Split((_replace(holder, parts=Parts(ratio, memory, power)),), rest, scaled or memory_scaled)


def _total(whole: Amount | None, amounts: list[Any], limit: Amount) -> tuple[Amount | None, Amount | None, bool]:
    """What all processes use of a quantity, the rest, and whether they use more than the whole; None: not known.
    ``limit`` is the most that one process can use."""
    if whole is None or not 0 <= whole <= _LARGEST or None in amounts:
        return None, None, False
    total: Amount = 0
    for amount in sorted(amounts) if len(amounts) > 2 else amounts:
        if amount > limit:
            total += limit
        elif amount > 0:
            total += amount
    return (total, whole - total, False) if total <= whole else (whole * 1.0, 0, total > whole * (1 + _SLACK))


def _shares(whole: Amount | None, amounts: list[Any], owners: ProcessOwners, limit: Amount) -> _Shares | None:
    """What each holder uses of a quantity: the sum over its processes, each at most ``limit``.

    None: it can't be divided, because the device does not have it or no process does. Floats are added from the least,
    so that their order does not matter.
    """
    if whole is None or not 0 <= whole <= _LARGEST:
        return None
    count, unknown, absent = owners.holders, owners.unknown, owners.absent
    if None in amounts:
        if amounts.count(None) == len(amounts):
            return None
        unknown |= {row for amount, row in zip(amounts, owners.rows, strict=True) if amount is None and row < count}
        absent |= unknown
        amounts = [amount or 0 for amount in amounts]
    used: list[Amount] = [0] * (count + 1)
    pairs = zip(amounts, owners.rows, strict=True)
    for amount, row in pairs if owners.unsorted else sorted(pairs):
        if amount > limit:
            used[row] += limit
        elif amount > 0:
            used[row] += amount
    used.pop()
    return _fit(whole, used, absent, all_known=not unknown)


def _fit(whole: Amount, used: list[Amount], absent: frozenset[int], *, all_known: bool) -> _Shares:
    """The amounts, scaled so that they are not more than the whole, and the rest."""
    if absent:
        used = [0 if row in absent else amount for row, amount in enumerate(used)]
    total = used[0] if len(used) == 1 else sum(sorted(used))
    rest, scaled = whole - total, False
    if total > whole:
        used, rest, scaled = [whole * (amount / total) for amount in used], 0, total > whole * (1 + _SLACK)
    amounts: list[Amount | None] = [*used, rest if all_known else None]
    for row in absent:
        amounts[row] = None
    return _Shares(amounts, absent, scaled)
