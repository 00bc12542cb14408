"""The GPU pods of the cluster, each from its binding to 30 minutes after its end.

In: pods as the API server has them, and deletions. Out: what is known of the pods of a node.
State: the pods by uid, because a StatefulSet's pods come back under the same name.
On failure: if a pod is missing in a full list, or is no GPU pod any more, it counts as ended from then on.
All of it is pure: times are given, in ms since the epoch.
"""

import heapq
from collections.abc import Collection, Hashable, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import msgspec

from producers.cluster import objects
from producers.cluster.objects import Selection, controller, milliseconds, shortened
from topics.workloads import Owner, UnwellDevice

K = TypeVar("K", bound=Hashable)
KEPT_MS = 30 * 60_000  # for how long a pod that ended is still published


class KnownPod(msgspec.Struct, frozen=True, gc=False):
    """A pod. ``owner`` is its controller, ``cut`` how many labels and annotations were cut or had no room. ``unwell``
    are those of its devices that are not. ``waiting``: why a container of it that was restarted waits, and its
    ``restarts``."""

    uid: str
    namespace: str
    name: str
    node: str
    phase: str | None
    started_ms: int | None
    ended_ms: int | None
    labels: dict[str, str]
    annotations: dict[str, str]
    owner: Owner | None
    cut: int = 0
    unwell: tuple[UnwellDevice, ...] = ()
    waiting: str | None = None
    restarts: int | None = None


class Change(NamedTuple):
    """A pod before and after something happened to it; None: it was not, or is no longer, known."""

    before: KnownPod | None
    after: KnownPod | None


def known_pod(pod: objects.Pod, selection: Selection, before: KnownPod | None, now_ms: int) -> KnownPod:
    """What is kept of a bound pod. It began when the kubelet took it; before that, when it was made."""
    labels = selection.pod_labels.keep(pod.metadata.labels)
    annotations = selection.pod_annotations.keep(pod.metadata.annotations)
    owner = controller(pod.metadata)
    restarts, reason = waiting(pod.status)
    began_ms = milliseconds(pod.status.start_time or pod.metadata.creation_timestamp)
    return KnownPod(
        uid=pod.metadata.uid,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        node=pod.spec.node_name or "",
        phase=pod.status.phase,
        started_ms=began_ms,
        ended_ms=ended_ms(pod.status, began_ms, before, now_ms),
        labels=labels.entries,
        annotations=annotations.entries,
        owner=as_owner(owner) if owner else None,
        cut=labels.cut + annotations.cut,
        unwell=unwell(pod.status),
        waiting=reason,
        restarts=restarts,
    )


def unwell(status: objects.PodStatus) -> tuple[UnwellDevice, ...]:
    """The devices of a pod that runs whose health is said to be bad. That of a device without a health check is
    ``Unknown``, which says nothing."""
    if status.phase in ("Succeeded", "Failed"):
        return ()
    found: dict[UnwellDevice, None] = {}
    for container in status.container_statuses or ():
        for resource in container.allocated_resources_status or ():
            for device in (one for one in resource.resources or () if one.health == "Unhealthy"):
                message = shortened(device.message) if device.message else None
                found[UnwellDevice(shortened(device.id), device.health, message)] = None
    return tuple(found)


def waiting(status: objects.PodStatus) -> tuple[int, str] | tuple[None, None]:
    """How often the container of a pod was restarted that waits now, and why it waits: of several, the most often."""
    if status.phase in ("Succeeded", "Failed"):
        return None, None
    statuses = (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    waits = [(one.restart_count, one.state.waiting) for one in statuses if one.state and one.restart_count > 0]
    found = [(restarts, shortened(why.reason)) for restarts, why in waits if why is not None and why.reason]
    return max(found, default=(None, None))


def as_owner(reference: objects.Reference) -> Owner:
    """A link of an owner chain. Its texts are a tenant's too."""
    return Owner(*map(shortened, (reference.api_version, reference.kind, reference.name, reference.uid)))


def ended_ms(status: objects.PodStatus, began_ms: int | None, before: KnownPod | None, now_ms: int) -> int | None:
    """When a pod ended: with the last of its containers; else when that was noticed. None while it runs.

    If a container does not say when it ended, the last end of the other containers or the last change of the pod's
    conditions counts. A pod that is being deleted runs until it is gone. One that was over when it was first seen, and
    does not say since when, never ran: it ended when it began. None ends before it begins, whatever its clocks say.
    """
    if status.phase not in ("Succeeded", "Failed"):
        return None
    ends = _ends(status.container_statuses)
    if not ends or len(ends) < len(status.container_statuses or ()):
        ends += _ends(status.init_container_statuses)
        ends += [at for condition in status.conditions or () if (at := condition.last_transition_time)]
    last_ms = milliseconds(max(ends, default=None))
    if last_ms is not None:
        return max(last_ms, began_ms or 0)
    if before is None:
        return now_ms if began_ms is None else began_ms
    return now_ms if before.ended_ms is None else before.ended_ms


def _ends(statuses: Iterable[objects.ContainerStatus] | None) -> list[datetime]:
    """When containers ended, of those that say so."""
    states = [one.state.terminated for one in statuses or () if one.state and one.state.terminated]
    return [terminated.finished_at for terminated in states if terminated.finished_at]


def discard(index: dict[K, dict[Any, Any]], key: K, member: object) -> None:
    """Take a member out of an index, and the key with its last one."""
    index[key].pop(member, None)
    if not index[key]:
        del index[key]


class Pods:
    def __init__(self) -> None:
        self._pods: dict[str, KnownPod] = {}
        self._by_node: dict[str, dict[str, None]] = {}
        self._by_owner: dict[str, dict[str, None]] = {}
        self._leaving: list[tuple[int, str]] = []
        self._leaves_ms: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[KnownPod]:
        return iter(self._pods.values())

    def keys(self) -> Collection[str]:
        """The uids of all pods, those that ended among them."""
        return self._pods

    def get(self, uid: str) -> KnownPod | None:
        return self._pods.get(uid)

    def on_node(self, node: str) -> list[KnownPod]:
        """The pods that are, or lately were, on a node."""
        return [self._pods[uid] for uid in self._by_node.get(node, ())]

    def in_namespace(self, namespace: str) -> list[KnownPod]:
        return [pod for pod in self._pods.values() if pod.namespace == namespace]

    def of_owner(self, uid: str) -> list[KnownPod]:
        return [self._pods[pod] for pod in self._by_owner.get(uid, ())]

    def put(self, pod: KnownPod, now_ms: int) -> Iterable[Change]:
        """A pod as it is now. One that ended leaves 30 minutes after that was noticed."""
        before = self._pods.get(pod.uid)
        if pod == before:
            return ()
        if pod.ended_ms is None:
            self._leaves_ms.pop(pod.uid, None)
        elif before is None or before.ended_ms is None:
            noticed_ms = now_ms if before else min(pod.ended_ms, now_ms)
            if noticed_ms + KEPT_MS <= now_ms:
                return ()
            self._leaves_ms[pod.uid] = noticed_ms + KEPT_MS
            heapq.heappush(self._leaving, (noticed_ms + KEPT_MS, pod.uid))
        self._forget(before)
        self._pods[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = None
        if pod.owner and pod.owner.uid:
            self._by_owner.setdefault(pod.owner.uid, {})[pod.uid] = None
        return (Change(before, pod),)

    def end(self, uid: str, now_ms: int) -> Iterable[Change]:
        before = self._pods.get(uid)
        if before is None or before.ended_ms is not None:
            return ()
        return self.put(msgspec.structs.replace(before, ended_ms=now_ms), now_ms)

    def expire(self, now_ms: int) -> list[Change]:
        left = []
        while self._leaving and self._leaving[0][0] <= now_ms:
            at_ms, uid = heapq.heappop(self._leaving)
            pod = self._pods.get(uid)
            if pod is not None and self._leaves_ms.get(uid) == at_ms:
                del self._leaves_ms[uid]
                self._forget(pod)
                left.append(Change(pod, None))
        return left

    def _forget(self, pod: KnownPod | None) -> None:
        if pod is None:
            return
        del self._pods[pod.uid]
        discard(self._by_node, pod.node, pod.uid)
        if pod.owner and pod.owner.uid:
            discard(self._by_owner, pod.owner.uid, pod.uid)
