"""The store of the cluster's objects, and the content of each node's gpu.workloads record.

In: pods, nodes, namespaces, slices, claims and taint rules as the API server has them, and owner chains. Out: the
content of a node's gpu.workloads record, and which nodes changed.
State: the GPU pods, and the labels, chains and devices that are published with them.
On failure: what does not fit into a record is left out in a fixed order, and counted.
All of it is pure: the caller gives the times, in ms since the epoch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from producers.cluster import devices, objects, pods
from producers.cluster.devices import Claims, PoolName, Slices
from producers.cluster.objects import LABEL_BOUNDS, AllowList, Labels, Selection
from producers.cluster.owners import UNKNOWN, Chain
from producers.cluster.pods import Change, KnownPod, PodOwner, Pods
from producers.cluster.takeover import PublishedNode
from producers.publisher import LARGEST_VALUE_BYTES
from producers.records import WorkloadsContent, checked_name
from topics.workloads import MAINTENANCE, Pod

JsonDict = dict[str, Any]
_POLICIES = AllowList(("gpustream.dev/*",), LABEL_BOUNDS)  # the annotations that pods inherit from their namespace
MOST_UNWELL = 256  # the most unwell devices in a node's record: a rule may taint all devices of a node
_LONGEST_MAINTENANCE = 256
CHANGE_MS = 60_000  # a pod's labels, annotations and owner may change once in this time, and
MOST_CHANGES = 10  # so often at once: with each change all series of its devices are new ones
HEAD_BYTES = 4096  # an upper bound for the rest of a record, beside its pods, devices and labels


class Namespace(NamedTuple):
    """A namespace: its labels, and the policies that apply to its pods if they have none of their own."""

    labels: Labels
    policies: Labels


_NO_NAMESPACE = Namespace({}, {})


class _InheritedPod(NamedTuple):
    """A pod that only the last leader knew: its row, and until when it is published. That counts from its end, or from
    the take-over if the end is later, because the node's clock may be years ahead."""

    row: JsonDict
    expires_ms: int


class Store:
    """The objects of the cluster that concern GPUs. It calls ``follow`` with an owner when it needs the chain from this
    owner up, and ``forget`` when it no longer does."""

    def __init__(
        self, selection: Selection, follow: Callable[[PodOwner], None], forget: Callable[[PodOwner], None]
    ) -> None:
        self._selection, self._follow, self._forget = selection, follow, forget
        self.pods = Pods()
        self.slices = Slices()
        self.claims = Claims()
        self.taint_rules: dict[str, objects.DeviceTaintRule] = {}
        self.nodes: dict[str, Labels] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._chains: dict[PodOwner, Chain] = {}
        self._next_change_ms: dict[str, int] = {}
        self._later: dict[str, KnownPod] = {}
        self._published_pods: set[str] = set()
        self._followed_owners: set[PodOwner] = set()
        self._removed_nodes_ms: dict[str, int] = {}
        self._inherited_pods: dict[str, dict[str, _InheritedPod]] = {}
        self._deleted_namespaces: dict[str, None] = {}
        self._changed_nodes: dict[str, None] = {}

    def changed_nodes(self) -> Sequence[str]:
        """The nodes that changed since their last record; those that changed first are first."""
        return list(self._changed_nodes)

    def mark_all_changed(self) -> None:
        """Mark every node as changed, and every pod as published: another leader may have published it."""
        self._published_pods.update(pod.uid for pod in self.pods)
        self._mark_changed((*self.nodes, *self._removed_nodes_ms))

    def take_over(self, published: Mapping[str, PublishedNode], now_ms: int) -> Sequence[str]:
        """Take over what the last leader published and this store lacks: pods, nodes and owner chains. Such a pod has
        ended now, if its record has no end; such a node was removed now. Returns the names of these nodes."""
        removed = [name for name, node in published.items() if name not in self.nodes and not node.removed]
        self._removed_nodes_ms |= dict.fromkeys(removed, now_ms)
        for name, node in published.items():
            for pod in node.pods.values():
                root = PodOwner(pod.namespace, pod.owners[0]) if pod.owners and pod.owners_complete else None
                if root is not None and root in self._followed_owners and not self._chains.get(root, UNKNOWN).complete:
                    self._chains[root] = Chain(pod.owners, complete=True)
                ended_ms = now_ms if pod.ended_ms is None else pod.ended_ms
                if self.pods.get(pod.uid) is None and ended_ms + pods.KEPT_MS > now_ms:
                    chain = Chain(pod.owners, pod.owners_complete)
                    row = _row(pod, ended_ms, chain, Namespace(pod.namespace_labels, {}))
                    inherited = _InheritedPod(row, min(ended_ms, now_ms) + pods.KEPT_MS)
                    self._inherited_pods.setdefault(name, {})[pod.uid] = inherited
        return removed

    def pods_awaiting_owners(self, node: str) -> list[str]:
        """The pods of a node that were never published, and whose owner chains are not complete yet."""
        pods_on_node = self.pods.on_node(node)
        return [
            pod.uid for pod in pods_on_node if pod.uid not in self._published_pods and not self._chain(pod).complete
        ]

    def pop_content(self, node: str, deferred: Collection[str] = ()) -> WorkloadsContent | None:
        """The content of the node's next record; None if there is no such node. The node then no longer counts as
        changed, unless there are ``deferred`` pods: these are left out of the record."""
        self._changed_nodes.pop(node, None)
        removed_ms = self._removed_nodes_ms.pop(node, None)
        labels = self.nodes.get(node)
        exists = labels is not None
        if not exists and removed_ms is None:
            return None
        if deferred and exists:
            self._changed_nodes[node] = None
        taints_by_device = self.slices.of_node(node)  # also of a removed node: its pods hold them for 10 s more
        dra = [msgspec.to_builtins(device) for device in taints_by_device]
        admin = [msgspec.to_builtins(claim) for claim in self.claims.of_pools(self.slices.pools_of(node))]
        unwell_devices = devices.tainted(taints_by_device, self.taint_rules.values()) if exists else {}
        uuids = {f"{device.driver}/{device.pool}/{device.device}": device.uuid for device in taints_by_device}
        rows = []
        for pod in self.pods.on_node(node):
            for device in pod.unwell if exists and pod.ended_ms is None else ():
                device_id = uuids.get(device.device_id, device.device_id)
                unwell_devices[msgspec.structs.replace(device, device_id=device_id)] = None
            if pod.uid not in deferred or not exists:
                chain = self._chain(pod)
                self._published_pods.add(pod.uid)  # also with a complete chain: another owner may adopt the pod
                ended_ms = removed_ms if pod.ended_ms is None else pod.ended_ms
                rows.append(_row(pod, ended_ms, chain, self.namespaces.get(pod.namespace, _NO_NAMESPACE)))
        unwell = [msgspec.to_builtins(device) for device in list(unwell_devices)[:MOST_UNWELL]]
        inherited = self._inherited_pods.get(node, {})
        rows += [pod.row for uid, pod in inherited.items() if self.pods.get(uid) is None]
        fitting, shed = fit(rows, LARGEST_VALUE_BYTES - HEAD_BYTES - sum(map(_json_size, (dra, admin, labels, unwell))))
        return WorkloadsContent(labels or {}, fitting, dra, admin, not exists, shed, unwell)

    def put_pod(self, pod: objects.Pod, now_ms: int) -> int:
        """Add or update a pod; returns how many of its labels and annotations were cut or left out, 0 if as many as
        before."""
        if not pod.spec.node_name or not self._selection.has_pod(pod):
            self.remove_pod(pod.metadata.uid, now_ms)
            return 0
        before = self.pods.get(pod.metadata.uid)
        after = pods.known_pod(pod, self._selection, before, now_ms)
        self._put(before, after, now_ms)
        return after.cut if before is None or before.cut != after.cut else 0

    def _put(self, before: KnownPod | None, after: KnownPod, now_ms: int) -> None:
        """Add or update a pod. If its labels, annotations or owner change too often, the last change counts later."""
        self._later.pop(after.uid, None)
        if before is not None and _tenant_fields(before) != _tenant_fields(after):
            next_ms = max(self._next_change_ms.get(after.uid, 0), now_ms)
            if next_ms - now_ms > MOST_CHANGES * CHANGE_MS:  # the clock was set back
                next_ms = now_ms
            if next_ms - now_ms > (MOST_CHANGES - 1) * CHANGE_MS:
                self._later[after.uid] = after
                after = msgspec.structs.replace(after, **_tenant_fields(before))
            else:
                self._next_change_ms[after.uid] = next_ms + CHANGE_MS
        self._apply(self.pods.put(after, now_ms))

    def remove_pod(self, uid: str, now_ms: int) -> None:
        self._apply(self.pods.end(uid, now_ms))

    def put_node(self, name: str, labels: Mapping[str, str] | None, maintenance: str | None = None) -> None:
        """Add or update a node; raises ValueError if its name can't stand in a record."""
        published = self._selection.node_labels.keep(labels).entries
        if maintenance is not None:
            published = {**published, MAINTENANCE: maintenance[:_LONGEST_MAINTENANCE]}
        self._removed_nodes_ms.pop(checked_name("node", name), None)
        if self.nodes.get(name) != published:
            self.nodes[name] = published
            self._mark_changed([name])

    def remove_node(self, name: str, now_ms: int) -> None:
        """Remove a node; all its pods have ended with it."""
        if self.nodes.pop(name, None) is not None:
            self._removed_nodes_ms[name] = now_ms
            self._mark_changed([name])

    def put_namespace(
        self, name: str, labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None = None
    ) -> None:
        self._deleted_namespaces.pop(name, None)
        published = self._selection.namespace_labels.keep(labels).entries
        namespace = Namespace(published, _POLICIES.keep(annotations).entries)
        if self.namespaces.get(name) != namespace:
            self.namespaces[name] = namespace
            self._mark_changed(pod.node for pod in self.pods.in_namespace(name))

    def remove_namespace(self, name: str) -> None:
        """Forget a namespace: at once if it has no pod, else with its last one."""
        if self.pods.in_namespace(name):
            self._deleted_namespaces[name] = None
        else:
            self.namespaces.pop(name, None)

    def put_slice(self, resource_slice: objects.ResourceSlice) -> None:
        if self._selection.has_driver(resource_slice.spec.driver):
            nodes = self.slices.put(resource_slice.metadata.uid, devices.known_slice(resource_slice))
            self._mark_changed(nodes)

    def remove_slice(self, uid: str) -> None:
        self._mark_changed(self.slices.remove(uid))

    def put_taint_rule(self, rule: objects.DeviceTaintRule) -> None:
        if self.taint_rules.get(rule.metadata.uid) != rule:
            self.taint_rules[rule.metadata.uid] = rule
            self._mark_changed(self.slices.nodes())

    def remove_taint_rule(self, uid: str) -> None:
        if self.taint_rules.pop(uid, None) is not None:
            self._mark_changed(self.slices.nodes())

    def put_claim(self, claim: objects.ResourceClaim, now_ms: int) -> None:
        admin_claim = devices.known_claim(claim, self._selection.has_driver)
        self._mark_pools_changed(self.claims.put(claim.metadata.uid, admin_claim, now_ms))

    def set_chain(self, owner: PodOwner, chain: Chain) -> None:
        """Store the chain from an owner up, the owner included. An incomplete chain never replaces a complete one."""
        if owner in self._followed_owners and (chain.complete or not self._chains.get(owner, UNKNOWN).complete):
            self._chains[owner] = chain
            self._mark_changed(pod.node for pod in self.pods.of_owner(owner))

    def expire(self, now_ms: int) -> None:
        for uid, after in list(self._later.items()):
            if (before := self.pods.get(uid)) is not None:
                self._put(before, msgspec.structs.replace(before, **_tenant_fields(after)), now_ms)
        self._apply(self.pods.expire(now_ms))
        self.slices.expire(self.nodes)
        self._mark_pools_changed(self.claims.expire(now_ms))
        for node, inherited in list(self._inherited_pods.items()):
            for uid in [uid for uid, pod in inherited.items() if pod.expires_ms <= now_ms]:
                pods.discard(self._inherited_pods, node, uid)
                self._mark_changed([node])
        for node in [
            node for node, removed_ms in self._removed_nodes_ms.items() if removed_ms + pods.KEPT_MS <= now_ms
        ]:
            del self._removed_nodes_ms[node]
            self._changed_nodes.pop(node, None)
        for name in [name for name in self._deleted_namespaces if not self.pods.in_namespace(name)]:
            del self._deleted_namespaces[name]
            self.namespaces.pop(name, None)

    def _apply(self, changes: Iterable[Change]) -> None:
        """Mark the nodes of changed pods; follow the owners of new pods, and forget those of no pod."""
        for before, after in changes:
            self._mark_changed(pod.node for pod in (before, after) if pod)
            owner = after.followed_owner if after else None
            if owner is not None and owner not in self._followed_owners:
                self._followed_owners.add(owner)
                self._follow(owner)
            if before and not after:
                self._published_pods.discard(before.uid)
                self._next_change_ms.pop(before.uid, None)
                self._later.pop(before.uid, None)
            owner = before.followed_owner if before else None
            if owner is not None and owner in self._followed_owners and not self.pods.of_owner(owner):
                self._followed_owners.discard(owner)
                self._chains.pop(owner, None)
                self._forget(owner)

    def _mark_changed(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node in self.nodes or node in self._removed_nodes_ms:
                self._changed_nodes[node] = None

    def _mark_pools_changed(self, pools: Iterable[PoolName]) -> None:
        self._mark_changed(node for pool in pools for node in self.slices.nodes_of(pool))

    def _chain(self, pod: KnownPod) -> Chain:
        """The chain as far as it is known; the pod itself names the first link."""
        if pod.owner is None:
            return Chain((), complete=True)
        owner = PodOwner(pod.namespace, pod.owner)
        return self._chains.get(owner) or Chain((pod.owner,), complete=owner not in self._followed_owners)


def _tenant_fields(pod: KnownPod) -> JsonDict:
    """What a tenant may change of a pod at any time."""
    return {"labels": pod.labels, "annotations": pod.annotations, "owner": pod.owner}


def _row(pod: KnownPod | Pod, ended_ms: int | None, chain: Chain, namespace: Namespace) -> JsonDict:
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "started_ms": pod.started_ms,
        "ended_ms": ended_ms,
        "labels": pod.labels,
        "annotations": {**namespace.policies, **pod.annotations},
        "namespace_labels": namespace.labels,
        "owners": [msgspec.to_builtins(owner) for owner in chain.owners],
        "owners_complete": None if chain.complete else False,
        **({"waiting": pod.waiting, "restarts": pod.restarts} if pod.waiting else {}),
    }


def fit(rows: list[JsonDict], limit_bytes: int) -> tuple[list[JsonDict], int]:
    """As many of a node's pods as fit into ``limit_bytes``, and how many were left out or shortened.

    First the pods that ended are left out, the earliest end first; then annotations and labels of those that have the
    most; then the pods that began last, because the first ones got the GPUs.
    """
    sizes = [_json_size(row) + 1 for row in rows]
    excess = sum(sizes) - limit_bytes
    if excess <= 0:
        return rows, 0
    kept: dict[int, JsonDict] = dict(enumerate(rows))
    shed = set()
    for i in sorted((i for i, row in kept.items() if row["ended_ms"] is not None), key=lambda i: rows[i]["ended_ms"]):
        if excess > 0:
            excess -= sizes[i]
            del kept[i]
            shed.add(i)
    for i in sorted(kept, key=lambda i: -sizes[i]):
        if excess > 0:
            kept[i] = {**rows[i], "labels": {}, "annotations": {}}
            excess -= sizes[i] - _json_size(kept[i]) - 1
            shed.add(i)
    for i in sorted(kept, key=lambda i: -(rows[i]["started_ms"] or 0)):
        if excess > 0:
            excess -= _json_size(kept.pop(i)) + 1
            shed.add(i)
    return list(kept.values()), len(shed)


def _json_size(content: object) -> int:
    return len(orjson.dumps(content))
