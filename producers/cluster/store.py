"""What is known of the cluster, and what of it is published of each node.

In: pods, nodes, namespaces, slices, claims and taint rules as the API server has them, and owner chains. Out: the
content of a node's gpu.workloads record, and which nodes changed.
State: the GPU pods, and the labels, chains and devices that are published with them.
On failure: what does not fit into a record is left out in a fixed order, and counted.
All of it is pure: times are given, in ms since the epoch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from producers.cluster import devices, objects, pods
from producers.cluster.devices import Claims, PoolName, Slices
from producers.cluster.objects import LABEL_BOUNDS, AllowList, Labels, Selection
from producers.cluster.owners import UNKNOWN, Chain
from producers.cluster.pods import Change, KnownPod, Pods
from producers.cluster.takeover import PublishedNode
from producers.publisher import LARGEST_VALUE_BYTES
from producers.records import WorkloadsContent, checked_name
from topics.workloads import MAINTENANCE, DraDevice, Owner, Pod, UnwellDevice

JsonDict = dict[str, Any]
_POLICIES = AllowList(("gpustream.dev/*",), LABEL_BOUNDS)  # the annotations of a namespace that its pods inherit
MOST_UNWELL = 256  # of a node's devices; a rule may taint each of them
_LONGEST_MAINTENANCE = 256
HEAD_BYTES = 4096  # what a record has beside its pods, devices and labels, generously


class Namespace(NamedTuple):
    """A namespace: its labels, and the policies that its pods have if they have none of their own."""

    labels: Labels
    policies: Labels


_NO_NAMESPACE = Namespace({}, {})


class Store:
    """The cluster as far as it concerns GPUs. ``follow`` is called with an owner and its namespace when the chain from
    this owner up is wanted, and ``forget`` with its uid when it no longer is."""

    def __init__(
        self, selection: Selection, follow: Callable[[Owner, str], None], forget: Callable[[str], None]
    ) -> None:
        self._selection, self._follow, self._forget = selection, follow, forget
        self.pods = Pods()
        self.slices = Slices()
        self.claims = Claims()
        self.taint_rules: dict[str, objects.DeviceTaintRule] = {}
        self.nodes: dict[str, Labels] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._chains: dict[str, Chain] = {}
        self._published: set[str] = set()
        self._followed: set[str] = set()
        self._gone_ms: dict[str, int] = {}
        self._past: dict[str, dict[str, JsonDict]] = {}
        self._left_namespaces: dict[str, None] = {}
        self._changed: dict[str, None] = {}

    def changed(self) -> Sequence[str]:
        """The nodes of which a new record may be due, since each was last taken; those that changed first are first."""
        return list(self._changed)

    def mark_all(self) -> None:
        """A record of every node is due, with every pod: another leader may have published it."""
        self._published.update(pod.uid for pod in self.pods)
        self._mark((*self.nodes, *self._gone_ms))

    def take_over(self, published: Mapping[str, PublishedNode], now_ms: int) -> None:
        """What the last leader published and is not known here: pods and nodes that went unseen, and owner chains.
        A pod whose end nobody saw has ended now, and a node that is not there is gone."""
        for name, node in published.items():
            if name not in self.nodes and not node.removed:
                self._gone_ms[name] = now_ms
            for pod in node.pods.values():
                root = pod.owners[0].uid if pod.owners and pod.owners_complete else None
                if root in self._followed and not self._chains.get(root, UNKNOWN).complete:
                    self._chains[root] = Chain(pod.owners, complete=True)
                ended_ms = now_ms if pod.ended_ms is None else pod.ended_ms
                if self.pods.get(pod.uid) is None and ended_ms + pods.KEPT_MS > now_ms:
                    chain = Chain(pod.owners, pod.owners_complete)
                    row = _row(pod, ended_ms, chain, Namespace(pod.namespace_labels, {}))
                    self._past.setdefault(name, {})[pod.uid] = row

    def awaits(self, node: str) -> list[str]:
        """The pods of a node that were never published, and whose owner chains are not known yet."""
        known = self.pods.on_node(node)
        return [pod.uid for pod in known if pod.uid not in self._published and not self._chain(pod).complete]

    def take(self, node: str, held: Collection[str] = ()) -> WorkloadsContent | None:
        """What to publish of a node now; None if there is no such node.
        The pods that are ``held`` are left out, and the node stays due."""
        self._changed.pop(node, None)
        gone_ms = self._gone_ms.pop(node, None)
        labels = self.nodes.get(node)
        here = labels is not None
        if not here and gone_ms is None:
            return None
        if held and here:
            self._changed[node] = None
        slices = self.slices.of_node(node) if here else {}
        dra = [msgspec.to_builtins(device) for device in slices]
        unwell = [msgspec.to_builtins(one) for one in self._unwell(node, slices)] if here else []
        admin = [msgspec.to_builtins(one) for one in self.claims.of_pools(self.slices.pools_of(node)) if here]
        rows = []
        for pod in self.pods.on_node(node):
            if pod.uid not in held or not here:
                chain = self._chain(pod)
                if not chain.complete:
                    self._published.add(pod.uid)
                ended_ms = gone_ms if pod.ended_ms is None else pod.ended_ms
                rows.append(_row(pod, ended_ms, chain, self.namespaces.get(pod.namespace, _NO_NAMESPACE)))
        rows += [row for uid, row in self._past.get(node, {}).items() if self.pods.get(uid) is None]
        fitting, shed = fit(rows, LARGEST_VALUE_BYTES - HEAD_BYTES - sum(map(_size, (dra, admin, labels, unwell))))
        return WorkloadsContent(labels or {}, fitting, dra, admin, not here, shed, unwell)

    def _unwell(self, node: str, slices: Mapping[DraDevice, Sequence[str]]) -> list[UnwellDevice]:
        """The devices of a node that are not well: by their taints, and by the statuses of the pods that have them."""
        found = devices.tainted(slices, self.taint_rules.values())
        uuids = {f"{device.driver}/{device.pool}/{device.device}": device.uuid for device in slices}
        for one in (one for pod in self.pods.on_node(node) if pod.ended_ms is None for one in pod.unwell):
            found[msgspec.structs.replace(one, device_id=uuids.get(one.device_id, one.device_id))] = None
        return list(found)[:MOST_UNWELL]

    def put_pod(self, pod: objects.Pod, now_ms: int) -> int:
        """A pod as it is now; gives how many of its labels and annotations were cut or left out since it last was."""
        if not pod.spec.node_name or not self._selection.has_pod(pod):
            self.remove_pod(pod.metadata.uid, now_ms)
            return 0
        before = self.pods.get(pod.metadata.uid)
        known = pods.known_pod(pod, self._selection, before, now_ms)
        self._apply(self.pods.put(known, now_ms))
        return known.cut if before is None or before.cut != known.cut else 0

    def remove_pod(self, uid: str, now_ms: int) -> None:
        self._apply(self.pods.end(uid, now_ms))

    def put_node(self, name: str, labels: Mapping[str, str] | None, maintenance: str | None = None) -> None:
        """A node as it is now; raises ValueError if a record can't have its name."""
        kept = self._selection.node_labels.keep(labels).entries
        if maintenance is not None:
            kept = {**kept, MAINTENANCE: maintenance[:_LONGEST_MAINTENANCE]}
        self._gone_ms.pop(checked_name("node", name), None)
        if self.nodes.get(name) != kept:
            self.nodes[name] = kept
            self._mark([name])

    def remove_node(self, name: str, now_ms: int) -> None:
        """A node was removed from the cluster, and with it all that ran there."""
        if self.nodes.pop(name, None) is not None:
            self._gone_ms[name] = now_ms
            self._mark([name])

    def put_namespace(
        self, name: str, labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None = None
    ) -> None:
        self._left_namespaces.pop(name, None)
        known = Namespace(self._selection.namespace_labels.keep(labels).entries, _POLICIES.keep(annotations).entries)
        if self.namespaces.get(name) != known:
            self.namespaces[name] = known
            self._mark(pod.node for pod in self.pods.in_namespace(name))

    def remove_namespace(self, name: str) -> None:
        """A namespace was deleted; it is forgotten with the last pod in it."""
        self._left_namespaces[name] = None
        self._forget_namespaces()

    def put_slice(self, part: objects.ResourceSlice) -> None:
        if self._selection.has_driver(part.spec.driver):
            self._mark(self.slices.put(part.metadata.uid, devices.known_slice(part)))

    def remove_slice(self, uid: str) -> None:
        self._mark(self.slices.remove(uid))

    def put_taint_rule(self, rule: objects.DeviceTaintRule) -> None:
        if self.taint_rules.get(rule.metadata.uid) != rule:
            self.taint_rules[rule.metadata.uid] = rule
            self._mark(self.slices.nodes())

    def remove_taint_rule(self, uid: str) -> None:
        if self.taint_rules.pop(uid, None) is not None:
            self._mark(self.slices.nodes())

    def put_claim(self, claim: objects.ResourceClaim, now_ms: int) -> None:
        known = devices.known_claim(claim, self._selection.has_driver)
        self._mark_pools(self.claims.put(claim.metadata.uid, known, now_ms))

    def learn(self, owner_uid: str, chain: Chain) -> None:
        """The chain from an owner up, the owner included. One that was complete once is not taken for less again."""
        if owner_uid in self._followed and (chain.complete or not self._chains.get(owner_uid, UNKNOWN).complete):
            self._chains[owner_uid] = chain
            self._mark(pod.node for pod in self.pods.of_owner(owner_uid))

    def expire(self, now_ms: int) -> None:
        self._apply(self.pods.expire(now_ms))
        self._mark_pools(self.claims.expire(now_ms))
        for node, past in list(self._past.items()):
            for uid in [uid for uid, row in past.items() if row["ended_ms"] + pods.KEPT_MS <= now_ms]:
                pods.discard(self._past, node, uid)
                self._mark([node])
        for node in [node for node, gone_ms in self._gone_ms.items() if gone_ms + pods.KEPT_MS <= now_ms]:
            del self._gone_ms[node]
        self._forget_namespaces()

    def _forget_namespaces(self) -> None:
        for name in [name for name in self._left_namespaces if not self.pods.in_namespace(name)]:
            del self._left_namespaces[name]
            self.namespaces.pop(name, None)

    def _apply(self, changes: Iterable[Change]) -> None:
        """Mark the nodes of pods that changed, and follow the owners of the pods that there are."""
        for before, after in changes:
            self._mark(pod.node for pod in (before, after) if pod)
            owner = after.owner if after else None
            if after and owner and owner.uid and owner.uid not in self._followed:
                self._followed.add(owner.uid)
                self._follow(owner, after.namespace)
            if before and not after:
                self._published.discard(before.uid)
            uid = before.owner.uid if before and before.owner else None
            if uid in self._followed and not self.pods.of_owner(uid):
                self._followed.discard(uid)
                self._chains.pop(uid, None)
                self._forget(uid)

    def _mark(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            if node in self.nodes or node in self._gone_ms:
                self._changed[node] = None

    def _mark_pools(self, pools: Iterable[PoolName]) -> None:
        self._mark(node for pool in pools for node in self.slices.nodes_of(pool))

    def _chain(self, pod: KnownPod) -> Chain:
        """The chain as far as it is known; the pod itself names the first link."""
        if pod.owner is None:
            return Chain((), complete=True)
        found = self._chains.get(pod.owner.uid or "")
        return found or Chain((pod.owner,), complete=pod.owner.uid not in self._followed)


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


def fit(rows: list[JsonDict], room: int) -> tuple[list[JsonDict], int]:
    """As many of a node's pods as fit into ``room`` bytes, and how many were left out or shortened.

    First the pods that ended are left out, the earliest end first; then annotations and labels of those that have the
    most; then the pods that began last, because the first ones got the GPUs.
    """
    sizes = [_size(row) + 1 for row in rows]
    over = sum(sizes) - room
    if over <= 0:
        return rows, 0
    kept: dict[int, JsonDict] = dict(enumerate(rows))
    shed = set()
    for i in sorted((i for i, row in kept.items() if row["ended_ms"] is not None), key=lambda i: rows[i]["ended_ms"]):
        if over > 0:
            over -= sizes[i]
            del kept[i]
            shed.add(i)
    for i in sorted(kept, key=lambda i: -sizes[i]):
        if over > 0:
            kept[i] = {**rows[i], "labels": {}, "annotations": {}}
            over -= sizes[i] - _size(kept[i]) - 1
            shed.add(i)
    for i in sorted(kept, key=lambda i: -(rows[i]["started_ms"] or 0)):
        if over > 0:
            over -= _size(kept.pop(i)) + 1
            shed.add(i)
    return list(kept.values()), len(shed)


def _size(of: object) -> int:
    return len(orjson.dumps(of))
