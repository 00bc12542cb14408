"""Who holds each device of a tick: by a snapshot of the node's containers, and by the processes on the device.

In: a snapshot, the devices of a tick, and the pods. Out: the holders of each device. Pure.

**HAMi** gives each GPU several slots, ``GPU-<uuid>-<N>``. The kubelet picks some of them, but the container gets the
GPU that HAMi's scheduler chose, which the pod's annotation ``hami.io/vgpu-devices-allocated`` names. It has a section
for each container, in the order of the pod's, empty for one without devices. No record has the order of all containers
of a pod. So the sections that are not empty belong, in order, to the pod's containers with slots. If there are not as
many, each container has the devices of all sections: then the pod has the right ones, whichever container it was. If an
annotation can't be read, the kubelet's ids stand. Source: HAMi's EncodePodSingleDevice: ``UUID,type,MiB,percent`` with
``:`` after each device and ``;`` after each container. A part of a GPU in HAMi's MIG mode is
``UUID[template-position]``, which names no MIG device: not read.

**Processes** count if they have memory on the device: what only queries it, as monitoring does, has none. If a pod has
a process on a device that it was not given, the pod becomes an observed holder, if the node's workloads have the pod.
It is a holder as any other. If they do not have it, because it asked for no GPU or had ended by then, it is a conflict
all the same, though the pod can't be named. But it is no conflict if a holder's uid is not known: the process may be
that holder's. Any process of no pod, of a display server for example, is a conflict on a device that pods hold. An MPS
server, in a pod or not, computes for others, and shows nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from streams.attribution.workloads import DraKey, PodName
from topics.allocations import Allocations, Claim, Container
from topics.attributed import Holder, Workload
from topics.device_ids import DeviceIndex, DeviceRef, UnknownDeviceId, parse
from topics.samples import Device
from topics.workloads import Pod

ANNOTATION = "hami.io/vgpu-devices-allocated"
UNALLOCATED = "unallocated_process"
NO_POD = "no_pod"

Pods = Mapping[PodName, Pod | None]
"""The pods that a snapshot names, as they were at the time of the sample. None: the workloads have no such pod. A name
is absent if nothing is known of the node's pods."""

PodOf = Callable[[str], Pod | None]  # the pod of a uid, as it was at the time of the tick
ContainerName = tuple[str, str, str]  # namespace, pod, container
_CONTROLLERS = {("batch", "Job"): "job", ("apps", "StatefulSet"): "statefulset", ("apps", "Deployment"): "deployment"}

_HAMI_FIELDS = 4
_STATIC_UID_LENGTH = 32  # a control group's uid of a static pod has no dashes, and the API server has another


class SnapshotHolders(msgspec.Struct, frozen=True):
    """The holders of each device, by UUID, and the device ids that are in no known grammar."""

    by_uuid: dict[str, tuple[Holder, ...]]
    unknown_ids: tuple[str, ...] = ()


# -- by the snapshot


def holders_by_snapshot(
    snapshot: Allocations,
    devices: Sequence[Device],
    pods: Pods,
    dra: Mapping[DraKey, str],
    *,
    ended: AbstractSet[PodName] = frozenset(),
    admin: AbstractSet[Claim] = frozenset(),
) -> SnapshotHolders:
    """The holders of each of ``devices``, each (pod, container, physical device) once, in the snapshot's order.
    Pods that had ``ended`` hold nothing, and the claims in ``admin`` do not hold their devices."""
    index = DeviceIndex(devices)
    containers = [container for container in snapshot.containers if (container.namespace, container.pod) not in ended]
    hami_ids = hami_device_ids(containers, pods)
    holders_by_uuid: dict[str, dict[ContainerName, Holder]] = {}
    unknown_ids: list[str] = []
    for container in containers:
        pod_name, resource = (container.namespace, container.pod), container.resource
        if (pod := pods.get(pod_name)) is not None and container.pod_uid in (None, pod.uid):
            holder = holder_of(pod, container=container.container, resource=resource)
        else:
            holder = Holder(
                *pod_name,
                pod_uid=container.pod_uid,
                container=container.container,
                resource=resource,
                pod_unknown=pod_name in pods,
            )
        name = (*pod_name, container.container)
        ids: list[str] = list(container.device_ids)
        if name in hami_ids and any(map(is_slot, ids)):
            ids = [device_id for device_id in ids if not is_slot(device_id)] + list(hami_ids[name])
        ids += [dra[key] for c in container.claims if (key := (c.driver, c.pool, c.device)) in dra and c not in admin]
        for device_id in ids:
            try:
                uuid = index.find(parse(device_id))
            except UnknownDeviceId:
                unknown_ids.append(device_id)
                continue
            if uuid is not None:
                holders_by_uuid.setdefault(uuid, {}).setdefault(name, holder)
    return SnapshotHolders(
        {uuid: tuple(holders.values()) for uuid, holders in holders_by_uuid.items()}, tuple(unknown_ids)
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
    workload = Workload("Pod", pod.name) if pod.owners_complete else None  # a pod without owners is its own workload
    return Holder(
        namespace=pod.namespace,
        pod=pod.name,
        pod_uid=pod.uid,
        container=container,
        resource=resource,
        workload=Workload(owners[-1].kind, owners[-1].name) if owners else workload,
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


# -- by HAMi's annotations


def hami_device_ids(containers: Sequence[Container], pods: Pods) -> dict[ContainerName, tuple[str, ...]]:
    """The device ids that HAMi's annotations name, for each container with slots of a pod that has the annotation."""
    annotations = {name: pod.annotations.get(ANNOTATION) for name, pod in pods.items() if pod}
    sections_by_pod = {name: parse_hami_annotation(text) for name, text in annotations.items() if text is not None}
    containers_with_slots: dict[PodName, dict[str, None]] = {}  # as an ordered set
    for container in containers:
        pod_name = (container.namespace, container.pod)
        if sections_by_pod.get(pod_name) and any(map(is_slot, container.device_ids)):
            containers_with_slots.setdefault(pod_name, {})[container.container] = None
    device_ids: dict[ContainerName, tuple[str, ...]] = {}
    for pod_name, names in containers_with_slots.items():
        sections = sections_by_pod[pod_name] or ()
        union = tuple(dict.fromkeys(device_id for section in sections for device_id in section))
        for i, name in enumerate(names):
            device_ids[*pod_name, name] = sections[i] if len(sections) == len(names) else union
    return device_ids


def parse_hami_annotation(annotation: str) -> tuple[tuple[str, ...], ...] | None:
    """The device ids of each container that has any; None if the annotation can't be read."""
    sections = []
    for section in annotation.split(";"):
        entries = [entry.strip().split(",") for entry in section.split(":") if entry.strip()]
        for fields in entries:
            ref = _parse(fields[0])
            if len(fields) < _HAMI_FIELDS or ref.uuid is None or ref.replica is not None or ref.slot is not None:
                return None
        sections.append(tuple([fields[0] for fields in entries]))
    return tuple([section for section in sections if section]) or None


def is_slot(device_id: str) -> bool:
    """Whether an id is a slot of HAMi's."""
    return _parse(device_id).slot is not None


def _parse(device_id: str) -> DeviceRef:
    try:
        return parse(device_id)
    except UnknownDeviceId:
        return DeviceRef()


# -- by the processes


class DeviceHolders(NamedTuple):
    """All holders of a device, and the conflict between its processes and what the kubelet reports."""

    holders: tuple[Holder, ...]
    conflict: str | None = None


def processes_visible(device: Device) -> bool:
    """Whether all processes of a device can be seen, if the tick has them."""
    return device.info.get("processes_visible") != "false"


def process_uids(devices: Iterable[Device]) -> frozenset[str]:
    """The uids of the pods that have a process with memory on one of the devices."""
    return frozenset(
        process.pod_uid
        for device in devices
        if device.processes and processes_visible(device)
        for process in device.processes
        if process.pod_uid and process.memory_used_bytes and process.service is None
    )


def add_observed(device: Device, holders: tuple[Holder, ...], pod_of: PodOf | None) -> DeviceHolders:
    """The holders of a device with the pods that its processes show. ``pod_of``: None if the node has no workloads.
    A holder whose uid is not known may be any pod of its name, and any pod that is not known."""
    if not device.processes:
        return DeviceHolders(holders)
    holder_uids = [holder.pod_uid for holder in holders if holder.pod_uid is not None]
    others = [process for process in device.processes if process.pod_uid not in holder_uids]
    uids = {process.pod_uid for process in others if process.memory_used_bytes and process.service is None}
    if not uids or not processes_visible(device):
        return DeviceHolders(holders)
    pods = {uid: pod_of(uid) for uid in uids if uid is not None} if pod_of else {}
    without_uid = {(holder.namespace, holder.pod) for holder in holders if holder.pod_uid is None}
    observed = [pod for pod in pods.values() if pod is not None and (pod.namespace, pod.name) not in without_uid]
    if observed:
        observed.sort(key=lambda pod: (pod.namespace, pod.name, pod.uid))
        return DeviceHolders((*holders, *[holder_of(pod, observed=True) for pod in observed]), UNALLOCATED)
    if not without_uid and any(pod is None and not is_static_pod(uid) for uid, pod in pods.items()):
        return DeviceHolders(holders, UNALLOCATED)
    return DeviceHolders(holders, NO_POD if holders and None in uids else None)


def is_static_pod(uid: str) -> bool:
    """Whether a control group's uid is that of a static pod, which the API server knows by another uid."""
    return len(uid) == _STATIC_UID_LENGTH and "-" not in uid
