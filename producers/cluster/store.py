"""What is known of the cluster, and what of it is told of each node.

In: pods, nodes, namespaces, slices and claims as the API server has them, and owner chains. Out: the content of a
node's gpu.workloads record, and which nodes changed.
State: the GPU pods, and the labels, chains and devices that they are told with.
On failure: what would not fit into a record gives way in a fixed order, and is counted.
All of it is pure: times are given, in ms since the epoch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from producers import records
from producers.cluster import claims, objects, pods, slices
from producers.cluster.claims import Claims
from producers.cluster.labelled import Labelled
from producers.cluster.owners import UNKNOWN, Chain
from producers.cluster.pods import Change, Pods, Reading
from producers.cluster.record_size import JsonDict, fit, size
from producers.cluster.selection import LABEL_BOUNDS, AllowList
from producers.cluster.slices import Slices
from producers.cluster.takeover import ToldNode
from producers.sending import LARGEST_VALUE_BYTES
from topics.workloads import Owner, Pod

_POLICIES = AllowList(("gpustream.dev/*",), LABEL_BOUNDS)
"""The annotations of a namespace that its pods inherit."""

HEAD_BYTES = 4096
"""What a record has beside its pods, devices and labels, generously."""


class Selection(NamedTuple):
    """What is kept of the cluster: see :mod:`producers.cluster.selection`."""

    concerns: Callable[[objects.Pod], bool]
    drivers: Callable[[str], bool]
    pods: Reading
    namespace_labels: AllowList
    node_labels: AllowList


class Follower(Protocol):
    """Who finds out the owner chains; see :class:`producers.cluster.owners.Owners`."""

    def follow(self, owner: Owner, namespace: str) -> None:
        """The chain from this owner up is wanted."""

    def forget(self, uid: str) -> None:
        """It is not wanted any more."""


class Content(NamedTuple):
    """What a record tells of a node. ``last``: the node is gone. ``shed`` is how many pods could not be told of, or not
    with all their labels and annotations."""

    node_labels: dict[str, str]
    pods: list[JsonDict]
    dra_devices: list[JsonDict]
    admin_claims: list[JsonDict]
    last: bool
    shed: int


class Store:
    """The cluster as far as it concerns GPUs."""

    def __init__(self, selection: Selection, follower: Follower) -> None:
        self._selection, self._follower = selection, follower
        self.pods = Pods()
        self.slices = Slices()
        self.claims = Claims()
        self.nodes = Labelled()
        self.namespaces = Labelled()
        self._policies: dict[str, dict[str, str]] = {}
        self._chains: dict[str, Chain] = {}
        self._told: set[str] = set()
        self._followed: set[str] = set()
        self._gone_ms: dict[str, int] = {}
        self._past: dict[str, dict[str, JsonDict]] = {}
        self._left_namespaces: dict[str, None] = {}
        self._changed: dict[str, None] = {}

    def changed(self) -> Sequence[str]:
        """The nodes of which a new record may be due, since each was last taken; those that changed first are first."""
        return list(self._changed)

    def mark_all(self) -> None:
        """A record of every node is due, with every pod: another leader may have told of it."""
        self._told.update(pod.uid for pod in self.pods)
        self._mark((*self.nodes, *self._gone_ms))

    def take_over(self, told: Mapping[str, ToldNode], now_ms: int) -> None:
        """What the last leader told of and is not known here: pods and nodes that went unseen, and chains of owners.

        A pod that nobody saw end has ended by now, and a node that is not there is gone.
        """
        for name, node in told.items():
            if name not in self.nodes and not node.removed:
                self._gone_ms[name] = now_ms
            for pod in node.pods.values():
                root = pod.owners[0].uid if pod.owners and pod.owners_complete else None
                if root in self._followed and not self._chains.get(root, UNKNOWN).complete:
                    self._chains[root] = Chain(pod.owners, complete=True)
                row = _past_row(pod, now_ms)
                if self.pods.get(pod.uid) is None and row["ended_ms"] + pods.KEPT_MS > now_ms:
                    self._past.setdefault(name, {})[pod.uid] = row

    def awaits(self, node: str) -> list[str]:
        """The pods of a node that were never told of, and whose owner chains are not known yet."""
        return [
            pod.uid for pod in self.pods.on_node(node) if pod.uid not in self._told and not self._chain(pod).complete
        ]

    def take(self, node: str, held: Collection[str] = ()) -> Content | None:
        """What is to be told of a node now; None where there is no such node.

        The pods that are ``held`` are left out, and the node stays due.
        """
        self._changed.pop(node, None)
        gone_ms = self._gone_ms.pop(node, None)
        labels = self.nodes.get(node)
        if labels is None and gone_ms is None:
            return None
        here = labels is not None
        if held and here:
            self._changed[node] = None
        devices = [msgspec.to_builtins(device) for device in self.slices.of_node(node) if here]
        admin = [msgspec.to_builtins(one) for one in self.claims.of_pools(self.slices.pools_of(node)) if here]
        room = LARGEST_VALUE_BYTES - HEAD_BYTES - size(devices) - size(admin) - size(labels)
        told = [pod for pod in self.pods.on_node(node) if pod.uid not in held or not here]
        self._told.update(pod.uid for pod in told if not self._chain(pod).complete)
        past = [row for uid, row in self._past.get(node, {}).items() if self.pods.get(uid) is None]
        rows, shed = fit([*(self._row(pod, gone_ms) for pod in told), *past], room)
        return Content(labels or {}, rows, devices, admin, not here, shed)

    def put_pod(self, pod: objects.Pod, now_ms: int) -> int:
        """A pod as it is now; gives how many of its labels and annotations were cut or left out since it last was."""
        if not pod.spec.node_name or not self._selection.concerns(pod):
            self._apply(self.pods.end(pod.metadata.uid, now_ms))
            return 0
        before = self.pods.get(pod.metadata.uid)
        known = pods.known(pod, self._selection.pods, before, now_ms)
        self._apply(self.pods.put(known, now_ms))
        return known.cut if before is None or before.cut != known.cut else 0

    def remove_pod(self, uid: str, now_ms: int) -> None:
        """A pod was deleted."""
        self._apply(self.pods.end(uid, now_ms))

    def complete_pods(self, now_ms: int) -> None:
        """A full list of pods is over."""
        self._apply(self.pods.complete(now_ms))

    def put_node(self, name: str, labels: Mapping[str, str] | None) -> None:
        """A node as it is now; raises ValueError where a record can't have its name."""
        kept = self._selection.node_labels.keep(labels).entries
        self._gone_ms.pop(records.checked_name("node", name), None)
        if self.nodes.put(name, kept):
            self._mark([name])

    def remove_node(self, name: str, now_ms: int) -> None:
        """A node was removed from the cluster, and with it all that ran there."""
        if self.nodes.remove(name):
            self._gone_ms[name] = now_ms
            self._mark([name])

    def complete_nodes(self, now_ms: int) -> None:
        """A full list of nodes is over."""
        for name in self.nodes.missing():
            self.remove_node(name, now_ms)

    def put_namespace(
        self, name: str, labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None = None
    ) -> None:
        """A namespace as it is now. Its policies are its pods' too, where they have none of their own."""
        self._left_namespaces.pop(name, None)
        policies = _POLICIES.keep(annotations).entries
        other = self._policies.get(name, {}) != policies
        self._policies[name] = policies
        if self.namespaces.put(name, self._selection.namespace_labels.keep(labels).entries) or other:
            self._mark(pod.node for pod in self.pods.in_namespace(name))

    def complete_namespaces(self) -> None:
        """A full list of namespaces is over."""
        for name in self.namespaces.missing():
            self.remove_namespace(name)

    def remove_namespace(self, name: str) -> None:
        """A namespace was deleted; it is forgotten with the last pod in it."""
        self._left_namespaces[name] = None
        self._forget_namespaces()

    def put_slice(self, part: objects.Slice) -> None:
        """A resource slice as it is now."""
        if self._selection.drivers(part.spec.driver):
            self._mark(self.slices.put(part.metadata.uid, slices.known(part)))

    def remove_slice(self, uid: str) -> None:
        """A resource slice was deleted."""
        self._mark(self.slices.remove(uid))

    def complete_slices(self) -> None:
        """A full list of resource slices is over."""
        self._mark(self.slices.complete())

    def put_claim(self, claim: objects.ResourceClaim, now_ms: int) -> None:
        """A resource claim as it is now."""
        found = claims.known(claim, self._selection.drivers)
        self._mark_pools(self.claims.put(claim.metadata.uid, found, now_ms))

    def learn(self, owner_uid: str, chain: Chain) -> None:
        """The chain from an owner up, the owner included. One that was complete once is not taken for less again."""
        if owner_uid in self._followed and (chain.complete or not self._chains.get(owner_uid, UNKNOWN).complete):
            self._chains[owner_uid] = chain
            self._mark(pod.node for pod in self.pods.of_owner(owner_uid))

    def expire(self, now_ms: int) -> None:
        """Forget what ended long ago."""
        self._apply(self.pods.expire(now_ms))
        self._mark_pools(self.claims.expire(now_ms))
        for node, past in list(self._past.items()):
            for uid in [uid for uid, row in past.items() if row["ended_ms"] + pods.KEPT_MS <= now_ms]:
                del past[uid]
                self._mark([node])
            if not past:
                del self._past[node]
        for node in [node for node, gone_ms in self._gone_ms.items() if gone_ms + pods.KEPT_MS <= now_ms]:
            del self._gone_ms[node]
        self._forget_namespaces()

    def _forget_namespaces(self) -> None:
        for name in [name for name in self._left_namespaces if not self.pods.in_namespace(name)]:
            del self._left_namespaces[name]
            self.namespaces.remove(name)
            self._policies.pop(name, None)

    def _apply(self, changes: Iterable[Change]) -> None:
        for before, after in changes:
            self._mark(pod.node for pod in (before, after) if pod)
            if after:
                self._follow(after)
            elif before:
                self._told.discard(before.uid)
            if before:
                self._unfollow(before)

    def _mark(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node in self.nodes or node in self._gone_ms:
                self._changed[node] = None

    def _mark_pools(self, pools: Iterable[slices.PoolName]) -> None:
        self._mark(node for pool in pools for node in self.slices.nodes_of(pool))

    def _follow(self, pod: pods.Known) -> None:
        if pod.owner and pod.owner.uid and pod.owner.uid not in self._followed:
            self._followed.add(pod.owner.uid)
            self._follower.follow(pod.owner, pod.namespace)

    def _unfollow(self, pod: pods.Known) -> None:
        uid = pod.owner.uid if pod.owner else None
        if uid in self._followed and not self.pods.of_owner(uid):
            self._followed.discard(uid)
            self._chains.pop(uid, None)
            self._follower.forget(uid)

    def _row(self, pod: pods.Known, gone_ms: int | None) -> JsonDict:
        chain = self._chain(pod)
        return {
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "phase": pod.phase,
            "started_ms": pod.started_ms,
            "ended_ms": gone_ms if pod.ended_ms is None else pod.ended_ms,
            "labels": pod.labels,
            "annotations": {**self._policies.get(pod.namespace, {}), **pod.annotations},
            "namespace_labels": self.namespaces.get(pod.namespace) or {},
            "owners": [msgspec.to_builtins(owner) for owner in chain.owners],
            "owners_complete": None if chain.complete else False,
        }

    def _chain(self, pod: pods.Known) -> Chain:
        """The chain as far as it is known; the pod itself names the first link."""
        if pod.owner is None:
            return Chain((), complete=True)
        found = self._chains.get(pod.owner.uid or "")
        return found or Chain((pod.owner,), complete=pod.owner.uid not in self._followed)


def _past_row(pod: Pod, now_ms: int) -> JsonDict:
    """A pod that another leader told of, as a record has it. It has ended, if nobody saw it by now."""
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "started_ms": pod.started_ms,
        "ended_ms": now_ms if pod.ended_ms is None else pod.ended_ms,
        "labels": pod.labels,
        "annotations": pod.annotations,
        "namespace_labels": pod.namespace_labels,
        "owners": [msgspec.to_builtins(owner) for owner in pod.owners],
        "owners_complete": None if pod.owners_complete else False,
    }
