"""The GPU pods of the cluster, each from its binding to 30 minutes after its end.

In: pods as the API server has them, and deletions. Out: the GPU pods of a node.
State: the pods by uid, because a StatefulSet's pods come back under the same name.
On failure: if a pod is missing in a full list, or is no GPU pod any more, it counts as ended from then on.
All of it is pure: the caller gives the times, in ms since the epoch.
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


class PodOwner(NamedTuple):
    """A pod's controller in the namespace of the pod. A tenant may write any uid into a pod, also that of another's
    controller: only pods that name it in all the same way, in one namespace, have the same owner."""

    namespace: str
    owner: Owner


class KnownPod(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a GPU pod. ``owner`` is its controller. ``cut`` is how many labels and annotations were cut or
    left out. ``unwell`` are its unwell devices. ``waiting`` is the reason why a restarted container waits, and
    ``restarts`` is how often that container was restarted."""

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

    @property
    def followed_owner(self) -> PodOwner | None:
        """The owner whose chain is looked for; None if it has none."""
        return PodOwner(self.namespace, self.owner) if self.owner and self.owner.uid else None


class Change(NamedTuple):
    """A pod before and after an event; None: it was not yet, or is no longer, in the store."""

    before: KnownPod | None
    after: KnownPod | None


def known_pod(pod: objects.Pod, selection: Selection, before: KnownPod | None, now_ms: int) -> KnownPod:
    """What is kept of a bound pod. It started when the kubelet accepted it; before that, its creation counts."""
    labels = selection.pod_labels.keep(pod.metadata.labels)
    annotations = selection.pod_annotations.keep(pod.metadata.annotations)
    owner = controller(pod.metadata)
    restarts, waiting_reason = waiting(pod.status)
    started_ms = milliseconds(pod.status.start_time or pod.metadata.creation_timestamp)
    return KnownPod(
        uid=pod.metadata.uid,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        node=pod.spec.node_name or "",
        phase=pod.status.phase,
        started_ms=started_ms,
        ended_ms=ended_ms(pod.status, started_ms, before, now_ms),
        labels=labels.entries,
        annotations=annotations.entries,
        owner=as_owner(owner) if owner else None,
        cut=labels.cut + annotations.cut,
        unwell=unwell(pod.status),
        waiting=waiting_reason,
        restarts=restarts,
    )


def unwell(status: objects.PodStatus) -> tuple[UnwellDevice, ...]:
    """The devices that a pod's status reports as ``Unhealthy``. ``Unknown`` only means that a device has no health
    check."""
    devices: dict[UnwellDevice, None] = {}
    for container in status.container_statuses or ():
        for resource in container.allocated_resources_status or ():
            for device in resource.resources or ():
                if device.health == "Unhealthy":
                    message = shortened(device.message) if device.message else None
                    devices[UnwellDevice(shortened(device.id), device.health, message)] = None
    return tuple(devices)


def waiting(status: objects.PodStatus) -> tuple[int, str] | tuple[None, None]:
    """The restarts of a pod's waiting container, and why it waits; of several, the one with the most restarts."""
    if status.phase in ("Succeeded", "Failed"):
        return None, None
    statuses = (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    restarted = [(s.restart_count, s.state.waiting) for s in statuses if s.state and s.restart_count > 0]
    waits = [(restarts, shortened(w.reason)) for restarts, w in restarted if w is not None and w.reason]
    return max(waits, default=(None, None))


def as_owner(reference: objects.Reference) -> Owner:
    """A link of an owner chain. Its texts are cut, because tenants write them, too."""
    return Owner(*map(shortened, (reference.api_version, reference.kind, reference.name, reference.uid)))


def ended_ms(status: objects.PodStatus, started_ms: int | None, before: KnownPod | None, now_ms: int) -> int | None:
    """When a pod ended: with the last of its containers; else when that was noticed. None while it runs.

    If a container does not say when it ended, the last end of the other containers or the last change of the pod's
    conditions counts. A pod that is being deleted runs until it is gone. A pod that was over when it was first seen,
    and whose status has no time, never ran: it ended when it started. No pod ends before it starts, even if clocks
    differ.
    """
    if status.phase not in ("Succeeded", "Failed"):
        return None
    ends = _finish_times(status.container_statuses)
    if not ends or len(ends) < len(status.container_statuses or ()):
        ends += _finish_times(status.init_container_statuses)
        ends += [c.last_transition_time for c in status.conditions or () if c.last_transition_time]
    last_ms = milliseconds(max(ends, default=None))
    if last_ms is not None:
        return max(last_ms, started_ms or 0)
    if before is None:
        return now_ms if started_ms is None else started_ms
    return now_ms if before.ended_ms is None else before.ended_ms


def _finish_times(statuses: Iterable[objects.ContainerStatus] | None) -> list[datetime]:
    """The times when containers finished, of those whose status has one."""
    terminated = [status.state.terminated for status in statuses or () if status.state and status.state.terminated]
    return [state.finished_at for state in terminated if state.finished_at]


def discard(index: dict[K, dict[Any, Any]], key: K, member: object) -> None:
    """Remove a member from an index, and the key with its last member."""
    index[key].pop(member, None)
    if not index[key]:
        del index[key]


class Pods:
    """The GPU pods by uid, indexed by node, by namespace and by owner."""

    def __init__(self) -> None:
        self._pods: dict[str, KnownPod] = {}
        self._by_node: dict[str, dict[str, None]] = {}
        self._by_namespace: dict[str, dict[str, None]] = {}
        self._by_owner: dict[PodOwner, dict[str, None]] = {}
        self._expiry_queue: list[tuple[int, str]] = []
        self._expires_ms: dict[str, int] = {}

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
        return [self._pods[uid] for uid in self._by_namespace.get(namespace, ())]

    def of_owner(self, owner: PodOwner) -> list[KnownPod]:
        return [self._pods[pod] for pod in self._by_owner.get(owner, ())]

    def put(self, pod: KnownPod, now_ms: int) -> Iterable[Change]:
        """Add or update a pod. One that ended is forgotten 30 minutes after its end was noticed."""
        before = self._pods.get(pod.uid)
        if pod == before:
            return ()
        if pod.ended_ms is None:
            self._expires_ms.pop(pod.uid, None)
        elif before is None or before.ended_ms is None:
            noticed_ms = now_ms if before else min(pod.ended_ms, now_ms)
            if noticed_ms + KEPT_MS <= now_ms:
                return ()
            self._expires_ms[pod.uid] = noticed_ms + KEPT_MS
            heapq.heappush(self._expiry_queue, (noticed_ms + KEPT_MS, pod.uid))
        self._forget(before)
        self._pods[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = None
        self._by_namespace.setdefault(pod.namespace, {})[pod.uid] = None
        if (owner := pod.followed_owner) is not None:
            self._by_owner.setdefault(owner, {})[pod.uid] = None
        return (Change(before, pod),)

    def end(self, uid: str, now_ms: int) -> Iterable[Change]:
        before = self._pods.get(uid)
        if before is None or before.ended_ms is not None:
            return ()
        return self.put(msgspec.structs.replace(before, ended_ms=now_ms), now_ms)

    def expire(self, now_ms: int) -> list[Change]:
        expired = []
        while self._expiry_queue and self._expiry_queue[0][0] <= now_ms:
            expires_ms, uid = heapq.heappop(self._expiry_queue)
            if self._expires_ms.get(uid) == expires_ms:
                del self._expires_ms[uid]
                pod = self._pods[uid]
                self._forget(pod)
                expired.append(Change(pod, None))
        return expired

    def _forget(self, pod: KnownPod | None) -> None:
        if pod is None:
            return
        del self._pods[pod.uid]
        discard(self._by_node, pod.node, pod.uid)
        discard(self._by_namespace, pod.namespace, pod.uid)
        if (owner := pod.followed_owner) is not None:
            discard(self._by_owner, owner, pod.uid)
