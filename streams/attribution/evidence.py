"""What the processes on a device say otherwise than the kubelet.

In: a device of a tick with its processes, its holders, and the node's pods. Out: the holders and those that were
observed beside them, and the conflict.
Pure. Nothing is said where the processes can't be seen.

A process counts that has memory on the device: what only asks it, as monitoring does, has none. A pod's process on a
device that it was not given makes the pod an observed holder, where the node's workloads have the pod; a pod that they
do not have (it asked for no GPU, as a daemon of the GPU operator does) can't be named, and is no conflict. What was
observed is a holder as any other: it is counted as one, has its part, and has a device alone that no other pod holds.
Any process of no pod is a conflict on a device that pods hold: an MPS server or a display server of the node, too.
"""

from collections.abc import Callable
from typing import NamedTuple

from streams.attribution.holders import holder_of
from streams.attribution.split import seen
from topics.attributed import Holder
from topics.samples import Device
from topics.workloads import Pod

UNALLOCATED = "unallocated_process"
NO_POD = "no_pod"

Uids = set[str | None]
"""Of pods; None stands for processes of no pod."""

PodOf = Callable[[str], Pod | None]
"""The pod of a uid, as it was at the time of the tick."""


class Evidence(NamedTuple):
    """All holders of a device, and what the processes say otherwise."""

    holders: tuple[Holder, ...]
    conflict: str | None = None


def shown(device: Device) -> Uids:
    """The pods that processes show on a device; none where they can't be seen."""
    if not device.processes or not seen(device):
        return set()
    return {process.pod_uid for process in device.processes if process.memory_used_bytes}


def observe(device: Device, holders: tuple[Holder, ...], pod_of: PodOf) -> Evidence:
    """The holders of a device with those that its processes show."""
    uids = shown(device) - {holder.pod_uid for holder in holders if holder.pod_uid is not None}
    if not uids:
        return Evidence(holders)
    strangers = _strangers(uids, holders, pod_of)
    if strangers:
        return Evidence((*holders, *strangers), UNALLOCATED)
    return Evidence(holders, NO_POD if holders and None in uids else None)


def _strangers(uids: Uids, holders: tuple[Holder, ...], pod_of: PodOf) -> list[Holder]:
    """The pods of these uids that do not hold the device. A holder without a uid is known by its name."""
    unknown = {(holder.namespace, holder.pod) for holder in holders if holder.pod_uid is None}
    pods = [pod for uid in uids if uid is not None and (pod := pod_of(uid))]
    strange = [pod for pod in pods if (pod.namespace, pod.name) not in unknown]
    return [
        holder_of(pod, observed=True) for pod in sorted(strange, key=lambda pod: (pod.namespace, pod.name, pod.uid))
    ]
