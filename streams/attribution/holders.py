"""Who holds each device of a tick: by a snapshot of the node's containers, and by the processes on the device.

In: a snapshot, the devices of a tick, and the pods. Out: the holders of each device. Pure.

**HAMi** gives each GPU several slots, ``GPU-<uuid>-<N>``. The kubelet picks some of them, but the container gets the
GPU that HAMi's scheduler chose, which the pod's annotation ``hami.io/vgpu-devices-allocated`` names. It has a section
for each container, in the order of the pod's, empty for one without devices. No record has the order of all containers
of a pod. So the sections that are not empty belong, in order, to the pod's containers with slots. If these are not as
many, each container has the devices of all sections: then the pod has the right ones, whichever container it was. If an
annotation can't be read, the kubelet's ids stand. Source: HAMi's EncodePodSingleDevice: ``UUID,type,MiB,percent`` with
``:`` after each device and ``;`` after each container. A part of a GPU in HAMi's MIG mode is
``UUID[template-position]``, which names no MIG device: not read.

**Processes** count if they have memory on the device: what only asks it, as monitoring does, has none. A pod's process
on a device that the pod was not given makes the pod an observed holder, if the node's workloads have the pod. It is a
holder as any other. If they do not have it, because it asked for no GPU or had ended by then, it is a conflict all the
same, though it can't be named. But it is none if a holder's uid is not known: the process may be that holder's. Any
process of no pod, of a display server for example, is a conflict on a device that pods hold. An MPS server, in a pod or
not, computes for others, and shows nothing.
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
"""The pods that a snapshot names, as they were at the time of the sample. None: the workloads have no such pod; a name
that is absent: nothing is known of the node's pods."""

PodOf = Callable[[str], Pod | None]  # the pod of a uid, as it was at the time of the tick
_CONTROLLERS = {("batch", "Job"): "job", ("apps", "StatefulSet"): "statefulset", ("apps", "Deployment"): "deployment"}

_HAMI_FIELDS = 4
_STATIC_UID_LENGTH = 32  # a control group's uid of a static pod has no dashes, and the API server has another


class HeldDevices(msgspec.Struct, frozen=True):
    """The holders of each device, by uuid, and the device ids that mean no device in any grammar that is known."""

    holders: dict[str, tuple[Holder, ...]]
    unknown_ids: tuple[str, ...] = ()


# -- by the snapshot


def hold(
    snapshot: Allocations,
    devices: Sequence[Device],
    pods: Pods,
    dra: Mapping[DraKey, str],
    *,
    over: AbstractSet[PodName] = frozenset(),
    admin: AbstractSet[Claim] = frozenset(),
) -> HeldDevices:
    """The holders of each of ``devices``, each (pod, container, physical device) once, in the snapshot's order.
    Pods that were ``over`` hold nothing, and the claims in ``admin`` only look at their devices."""
    index = DeviceIndex(devices)
    containers = [container for container in snapshot.containers if (container.namespace, container.pod) not in over]
    chosen = chosen_by_hami(containers, pods)
    found: dict[str, dict[tuple[str, str, str], Holder]] = {}
    unknown: list[str] = []
    for container in containers:
        name, own, resource = (container.namespace, container.pod), container.container, container.resource
        if (pod := pods.get(name)) is not None and container.pod_uid in (None, pod.uid):
            holder = holder_of(pod, container=own, resource=resource)
        else:
            uid = container.pod_uid
            holder = Holder(*name, pod_uid=uid, container=own, resource=resource, pod_unknown=name in pods)
        key = (*name, own)
        ids: list[str] = list(container.device_ids)
        if key in chosen and any(map(is_slot, ids)):
            ids = [device_id for device_id in ids if not is_slot(device_id)] + list(chosen[key])
        ids += [dra[at] for c in container.claims if (at := (c.driver, c.pool, c.device)) in dra and c not in admin]
        for device_id in ids:
            try:
                uuid = index.find(parse(device_id))
            except UnknownDeviceId:
                unknown.append(device_id)
                continue
            if uuid is not None:
                found.setdefault(uuid, {}).setdefault(key, holder)
    return HeldDevices({uuid: tuple(holders.values()) for uuid, holders in found.items()}, tuple(unknown))


def holder_of(pod: Pod, *, container: str | None = None, resource: str | None = None, observed: bool = False) -> Holder:
    """A container of a pod that is known, with its labels and who owns it.
    Of Job, StatefulSet and Deployment the one is named that is nearest to the pod: at most one of the three."""
    owners = pod.owners if pod.owners_complete else ()
    kind = controller = None
    for owner in owners:
        if (kind := _CONTROLLERS.get((owner.api_version.split("/")[0], owner.kind))) is not None:
            controller = owner.name
            break
    workload = Workload("Pod", pod.name) if pod.owners_complete else None  # a pod that nothing owns is its own workload
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


def chosen_by_hami(containers: Sequence[Container], pods: Pods) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """The device ids of each container with slots whose pod's annotation names them."""
    annotations = {name: pod.annotations.get(ANNOTATION) for name, pod in pods.items() if pod}
    sections = {name: devices_in(text) for name, text in annotations.items() if text is not None}
    slotted: dict[PodName, dict[str, None]] = {}
    for container in containers:
        pod_name = (container.namespace, container.pod)
        if sections.get(pod_name) and any(map(is_slot, container.device_ids)):
            slotted.setdefault(pod_name, {})[container.container] = None
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for pod_name, names in slotted.items():
        parts = sections[pod_name] or ()
        union = tuple(dict.fromkeys(device_id for section in parts for device_id in section))
        for i, name in enumerate(names):
            found[*pod_name, name] = parts[i] if len(parts) == len(names) else union
    return found


def devices_in(annotation: str) -> tuple[tuple[str, ...], ...] | None:
    """The ids of each container's devices, without those that have none; None if the annotation can't be read."""
    sections = []
    for section in annotation.split(";"):
        entries = [entry.strip().split(",") for entry in section.split(":") if entry.strip()]
        for fields in entries:
            ref = _ref(fields[0])
            if len(fields) < _HAMI_FIELDS or ref.uuid is None or ref.replica is not None or ref.slot is not None:
                return None
        sections.append(tuple([fields[0] for fields in entries]))
    return tuple([section for section in sections if section]) or None


def is_slot(device_id: str) -> bool:
    """Whether an id is a slot of HAMi's."""
    return _ref(device_id).slot is not None


def _ref(device_id: str) -> DeviceRef:
    try:
        return parse(device_id)
    except UnknownDeviceId:
        return DeviceRef()


# -- by the processes


class Evidence(NamedTuple):
    """All holders of a device, and what its processes say otherwise than the kubelet."""

    holders: tuple[Holder, ...]
    conflict: str | None = None


def processes_visible(device: Device) -> bool:
    """Whether the processes of a device, if the tick has them, are those that are there."""
    return device.info.get("processes_visible") != "false"


def uids_of(devices: Iterable[Device]) -> frozenset[str]:
    """The uids of the pods that processes show on devices."""
    shown = [device.processes for device in devices if device.processes and processes_visible(device)]
    return frozenset(p.pod_uid for one in shown for p in one if p.pod_uid and p.memory_used_bytes and p.service is None)


def observe(device: Device, holders: tuple[Holder, ...], pod_of: PodOf | None) -> Evidence:
    """The holders of a device with those that its processes show. ``pod_of``: None if the node has no workloads.
    A holder whose uid is not known may be any pod of its name, and any that is not known."""
    if not device.processes:
        return Evidence(holders)
    known = [holder.pod_uid for holder in holders if holder.pod_uid is not None]
    others = [process for process in device.processes if process.pod_uid not in known]
    uids = {process.pod_uid for process in others if process.memory_used_bytes and process.service is None}
    if not uids or not processes_visible(device):
        return Evidence(holders)
    pods = {uid: pod_of(uid) for uid in uids if uid is not None} if pod_of else {}
    unknown = {(holder.namespace, holder.pod) for holder in holders if holder.pod_uid is None}
    strangers = [pod for pod in pods.values() if pod is not None and (pod.namespace, pod.name) not in unknown]
    if strangers:
        strangers.sort(key=lambda pod: (pod.namespace, pod.name, pod.uid))
        return Evidence((*holders, *[holder_of(pod, observed=True) for pod in strangers]), UNALLOCATED)
    if not unknown and any(pod is None and not is_static(uid) for uid, pod in pods.items()):
        return Evidence(holders, UNALLOCATED)
    return Evidence(holders, NO_POD if holders and None in uids else None)


def is_static(uid: str) -> bool:
    """Whether a control group names a static pod, which the API server knows by another uid."""
    return len(uid) == _STATIC_UID_LENGTH and "-" not in uid
