"""The GPU pods of the cluster, each from its binding to 30 minutes after its end.

In: pods as the API server has them, deletions, and full lists. Out: what is known of the pods of a node.
State: the pods by uid, for a StatefulSet's come back under the same name.
On failure: a pod that a full list does not have, or that is no GPU pod any more, ended when that was noticed.
All of it is pure: times are given, in ms since the epoch.
"""

import heapq
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

import msgspec

from producers.cluster import objects
from producers.cluster.objects import controller, milliseconds
from producers.cluster.selection import LONGEST_TEXT, AllowList, shortened
from topics.workloads import Owner

KEPT_MS = 30 * 60_000
"""For how long a pod that ended is still told of."""

_OVER = ("Succeeded", "Failed")


class Known(msgspec.Struct, frozen=True, gc=False):
    """A pod. ``owner`` is its controller, ``cut`` how many labels and annotations were cut or had no room."""

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


class Change(NamedTuple):
    """A pod before and after something happened to it; None: it was not, or is not any more, told of."""

    before: Known | None
    after: Known | None


class Reading(NamedTuple):
    """How a pod's labels and annotations are read."""

    labels: AllowList
    annotations: AllowList


def known(pod: objects.Pod, reading: Reading, before: Known | None, now_ms: int) -> Known:
    """What is kept of a bound pod, with what was known of it before."""
    labels, annotations = reading.labels.keep(pod.metadata.labels), reading.annotations.keep(pod.metadata.annotations)
    owner = controller(pod.metadata)
    return Known(
        uid=pod.metadata.uid,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        node=pod.spec.node_name or "",
        phase=pod.status.phase,
        started_ms=milliseconds(_began(pod)),
        ended_ms=_ended_ms(pod, before, now_ms),
        labels=labels.entries,
        annotations=annotations.entries,
        owner=as_owner(owner) if owner else None,
        cut=labels.cut + annotations.cut,
    )


def as_owner(reference: objects.Reference) -> Owner:
    """A link of an owner chain. Its texts are a tenant's too."""
    parts = (reference.api_version, reference.kind, reference.name, reference.uid)
    return Owner(*(shortened(part, LONGEST_TEXT) for part in parts))


def _ended_ms(pod: objects.Pod, before: Known | None, now_ms: int) -> int | None:
    """When it ended: when its last container did, else when it was seen; None while it runs.

    One that is being deleted runs until it is gone. One that was over when it was first seen, and does not say when,
    never ran: it ended when it began. None ends before it begins, whatever the clocks say that both come from.
    """
    if pod.status.phase not in _OVER:
        return None
    began_ms = milliseconds(_began(pod))
    told_ms = milliseconds(_last_end(pod.status))
    if told_ms is not None:
        return max(told_ms, began_ms or 0)
    if before is None:
        return now_ms if began_ms is None else began_ms
    return now_ms if before.ended_ms is None else before.ended_ms


def _began(pod: objects.Pod) -> datetime | None:
    """When the kubelet took it; before that, when it was made."""
    return pod.status.start_time or pod.metadata.creation_timestamp


def _last_end(status: objects.PodStatus) -> datetime | None:
    """When its last container ended; where one does not say, when the last of its conditions changed; None: unknown."""
    ends = [_end(container) for container in status.container_statuses or ()]
    told = [end for end in ends if end]
    if not ends or len(told) < len(ends):
        told += [end for container in status.init_container_statuses or () if (end := _end(container))]
        told += [at for condition in status.conditions or () if (at := condition.last_transition_time)]
    return max(told, default=None)


def _end(container: objects.ContainerStatus) -> datetime | None:
    terminated = container.state and container.state.terminated
    return terminated.finished_at if terminated else None


class Pods:
    """The pods by uid, by node and by owner."""

    def __init__(self) -> None:
        self._pods: dict[str, Known] = {}
        self._by_node: dict[str, dict[str, None]] = {}
        self._by_owner: dict[str, dict[str, None]] = {}
        self._leaving: list[tuple[int, str]] = []
        self._leaves_ms: dict[str, int] = {}
        self._unseen: dict[str, None] | None = None

    def __len__(self) -> int:
        return len(self._pods)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._pods.values())

    def get(self, uid: str) -> Known | None:
        """The pod with that uid."""
        return self._pods.get(uid)

    def on_node(self, node: str) -> list[Known]:
        """The pods that are, or lately were, on a node."""
        return [self._pods[uid] for uid in self._by_node.get(node, ())]

    def in_namespace(self, namespace: str) -> list[Known]:
        """The pods of a namespace."""
        return [pod for pod in self._pods.values() if pod.namespace == namespace]

    def of_owner(self, uid: str) -> list[Known]:
        """The pods whose controller has that uid."""
        return [self._pods[pod] for pod in self._by_owner.get(uid, ())]

    def begin(self) -> None:
        """A full list begins."""
        self._unseen = dict.fromkeys(uid for uid, pod in self._pods.items() if pod.ended_ms is None)

    def seen(self, uid: str) -> None:
        """A full list has the pod."""
        if self._unseen is not None:
            self._unseen.pop(uid, None)

    def complete(self, now_ms: int) -> list[Change]:
        """The full list is over: the pods that it did not have ended by now."""
        missing, self._unseen = self._unseen or {}, None
        return [change for uid in missing for change in self.end(uid, now_ms)]

    def put(self, pod: Known, now_ms: int) -> Iterable[Change]:
        """A pod as it is now."""
        self.seen(pod.uid)
        before = self._pods.get(pod.uid)
        if pod == before:
            return ()
        if pod.ended_ms is not None and (before is None or before.ended_ms is None):
            noticed_ms = now_ms if before else min(pod.ended_ms, now_ms)
            if noticed_ms + KEPT_MS <= now_ms:
                return ()
            self._leave_at(pod.uid, noticed_ms + KEPT_MS)
        elif pod.ended_ms is None:
            self._leaves_ms.pop(pod.uid, None)
        self._forget(before)
        self._remember(pod)
        return (Change(before, pod),)

    def end(self, uid: str, now_ms: int) -> Iterable[Change]:
        """A pod is gone, or is none that is told of any more."""
        before = self._pods.get(uid)
        if before is None or before.ended_ms is not None:
            return ()
        return self.put(msgspec.structs.replace(before, ended_ms=now_ms), now_ms)

    def expire(self, now_ms: int) -> list[Change]:
        """Forget the pods that ended long ago."""
        left = []
        while self._leaving and self._leaving[0][0] <= now_ms:
            at_ms, uid = heapq.heappop(self._leaving)
            pod = self._pods.get(uid)
            if pod is not None and self._leaves_ms.get(uid) == at_ms:
                del self._leaves_ms[uid]
                self._forget(pod)
                left.append(Change(pod, None))
        return left

    def _leave_at(self, uid: str, at_ms: int) -> None:
        self._leaves_ms[uid] = at_ms
        heapq.heappush(self._leaving, (at_ms, uid))

    def _remember(self, pod: Known) -> None:
        self._pods[pod.uid] = pod
        self._by_node.setdefault(pod.node, {})[pod.uid] = None
        if pod.owner and pod.owner.uid:
            self._by_owner.setdefault(pod.owner.uid, {})[pod.uid] = None

    def _forget(self, pod: Known | None) -> None:
        if pod is None:
            return
        del self._pods[pod.uid]
        _discard(self._by_node, pod.node, pod.uid)
        if pod.owner and pod.owner.uid:
            _discard(self._by_owner, pod.owner.uid, pod.uid)


def _discard(index: dict[str, dict[str, None]], key: str, uid: str) -> None:
    """Take a pod out of an index, and the key with the last one."""
    index[key].pop(uid, None)
    if not index[key]:
        del index[key]
