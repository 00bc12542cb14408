"""Who holds each device of a tick, from a snapshot of the node's containers and what is known of their pods."""

from collections.abc import Mapping, Sequence

import msgspec

from streams.attribution.hami import Chosen, chosen, is_slot
from streams.attribution.workloads import DraKey, PodName
from topics.allocations import Allocations, Container
from topics.attributed import Holder, Workload
from topics.device_ids import DeviceIndex, UnknownDeviceId, parse
from topics.samples import Device
from topics.workloads import Owner, Pod

Pods = Mapping[PodName, Pod | None]
"""The pods that a snapshot names, as they were at the time of the sample. None: the workloads have no such pod; a name
that is absent: nothing is known of the node's pods."""


_CONTROLLERS = (("batch", "Job"), ("apps", "StatefulSet"), ("apps", "Deployment"))


class Held(msgspec.Struct, frozen=True):
    """The holders of each device, by uuid, and the device ids that mean no device in any grammar that is known."""

    holders: dict[str, tuple[Holder, ...]]
    unknown_ids: tuple[str, ...] = ()


def hold(snapshot: Allocations, devices: Sequence[Device], pods: Pods, dra: Mapping[DraKey, str]) -> Held:
    """The holders of each of ``devices``, each (pod, container, physical device) once, in the snapshot's order."""
    index, by_hami = DeviceIndex(devices), chosen(snapshot.containers, pods)
    found: dict[str, dict[tuple[str, str, str], Holder]] = {}
    unknown: list[str] = []
    for container in snapshot.containers:
        uuids, strange = _devices_of(container, index, dra, by_hami)
        unknown += strange
        for uuid in uuids:
            key = (container.namespace, container.pod, container.container)
            found.setdefault(uuid, {}).setdefault(key, _holder(container, pods))
    return Held({uuid: tuple(holders.values()) for uuid, holders in found.items()}, tuple(unknown))


def _devices_of(
    container: Container, index: DeviceIndex, dra: Mapping[DraKey, str], by_hami: Chosen
) -> tuple[list[str], list[str]]:
    """The uuids of a container's devices that are in the tick, and the ids that could not be read.

    Where HAMi's annotation names the devices, they are in place of the slots that the kubelet picked.
    """
    ids = list(container.device_ids)
    named = by_hami.get(((container.namespace, container.pod), container.container))
    if named is not None and any(map(is_slot, ids)):
        ids = [device_id for device_id in ids if not is_slot(device_id)] + list(named)
    ids += [dra[key] for c in container.claims if (key := (c.driver, c.pool, c.device)) in dra]
    uuids, unknown = [], []
    for device_id in ids:
        try:
            uuid = index.find(parse(device_id))
        except UnknownDeviceId:
            unknown.append(device_id)
        else:
            if uuid is not None:
                uuids.append(uuid)
    return uuids, unknown


def _holder(container: Container, pods: Pods) -> Holder:
    name = (container.namespace, container.pod)
    pod = pods.get(name)
    if pod is None:
        return Holder(
            namespace=container.namespace,
            pod=container.pod,
            container=container.container,
            resource=container.resource,
            pod_unknown=name in pods,
        )
    return holder_of(pod, container=container.container, resource=container.resource)


def holder_of(pod: Pod, *, container: str | None = None, resource: str | None = None, observed: bool = False) -> Holder:
    """A container of a pod that is known, with its labels and who owns it."""
    known = pod.owners_complete
    top = pod.owners[-1] if known and pod.owners else None  # a pod that nothing owns is its own workload
    job, statefulset, deployment = _controllers(pod.owners) if known else (None, None, None)
    return Holder(
        namespace=pod.namespace,
        pod=pod.name,
        pod_uid=pod.uid,
        container=container,
        resource=resource,
        workload=Workload(top.kind, top.name) if top is not None else Workload("Pod", pod.name) if known else None,
        job=job,
        statefulset=statefulset,
        deployment=deployment,
        labels=pod.labels,
        annotations=pod.annotations,
        namespace_labels=pod.namespace_labels,
        observed=observed,
    )


def _controllers(owners: Sequence[Owner]) -> tuple[str | None, str | None, str | None]:
    """The Job, StatefulSet or Deployment that is nearest to the pod: at most one of the three."""
    for owner in owners:
        kind = (owner.api_version.split("/")[0], owner.kind)
        if kind in _CONTROLLERS:
            i = _CONTROLLERS.index(kind)
            return owner.name if i == 0 else None, owner.name if i == 1 else None, owner.name if i == 2 else None
    return None, None, None
