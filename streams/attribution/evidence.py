"""What the processes on a device say otherwise than the kubelet.

In: a device of a tick with its processes, its holders, and the node's pods. Out: the holders and those that were
observed beside them, and the conflict.
Pure. Nothing is said where the processes can't be seen.

A process counts that has memory on the device: what only asks it, as monitoring does, has none. A pod's process on a
device that it was not given makes the pod an observed holder, where the node's workloads have the pod. What was
observed is a holder as any other: it is counted as one, has its part, and has a device alone that no other pod holds.
A pod that they do not have, because it asked for no GPU or had ended by then, is a conflict all the same, though it
can't be named; but not where a holder's uid is not known, for it may be that holder.
Any process of no pod is a conflict on a device that pods hold: a display server of the node, too. An MPS server, in a
pod or not, computes for others, and is no evidence.
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

_STATIC_UID_LENGTH = 32
"""A control group names a static pod by 32 digits without dashes, and the API server by a uid that differs."""


class Evidence(NamedTuple):
    """All holders of a device, and what the processes say otherwise."""

    holders: tuple[Holder, ...]
    conflict: str | None = None


def shown(device: Device) -> Uids:
    """The pods that processes show on a device; none where they can't be seen."""
    if not device.processes or not seen(device):
        return set()
    return {one.pod_uid for one in device.processes if one.memory_used_bytes and one.service is None}


def observe(device: Device, holders: tuple[Holder, ...], pod_of: PodOf | None) -> Evidence:
    """The holders of a device with those that its processes show. ``pod_of``: None if the node has no workloads.

    A holder whose uid is not known may be any pod of its name, and any that is not known.
    """
    uids = shown(device)
    if uids:
        uids.difference_update([holder.pod_uid for holder in holders if holder.pod_uid is not None])
    if not uids:
        return Evidence(holders)
    pods = {uid: pod_of(uid) for uid in uids if uid is not None} if pod_of else {}
    unknown = {(holder.namespace, holder.pod) for holder in holders if holder.pod_uid is None}
    strangers = [pod for pod in pods.values() if pod is not None and (pod.namespace, pod.name) not in unknown]
    if strangers:
        strangers.sort(key=lambda pod: (pod.namespace, pod.name, pod.uid))
        return Evidence((*holders, *[holder_of(pod, observed=True) for pod in strangers]), UNALLOCATED)
    if not unknown and any(pod is None and not static(uid) for uid, pod in pods.items()):
        return Evidence(holders, UNALLOCATED)
    return Evidence(holders, NO_POD if holders and None in uids else None)


def static(uid: str) -> bool:
    """Whether a control group names a static pod, which the API server knows by another uid."""
    return len(uid) == _STATIC_UID_LENGTH and "-" not in uid
