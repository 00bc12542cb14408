"""The devices of dynamic resource allocation: their UUIDs, their taints, and the claims that only observe them.

In: resource slices and claims as the API server has them. Out: the devices of a node with their UUIDs; the devices that
claims have for administration, for instance for monitoring: such a claim holds nothing; and which devices are tainted.
State: the slices, by pool. While a driver replaces a pool's slices there are two generations: the higher one counts
alone once it is complete, and until then before the other. A deleted slice counts until the others of its pool are
complete, or its nodes are gone: the kubelet deletes the slices of a driver that is away for 30 s, while it is replaced
for instance, and the pods go on with their devices. The claims for administration, by uid. A claim that is gone is kept
as long as a pod that ended: the kubelet may go on reporting it. It is dropped earlier if there is another claim of its
name. All of it is pure: times are given, in ms since the epoch.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from producers.cluster.objects import DeviceTaint, DeviceTaintRule, ResourceClaim, ResourceSlice, shortened
from producers.cluster.pods import KEPT_MS, discard
from topics.allocations import Claim
from topics.workloads import DraDevice, UnwellDevice

PoolName = tuple[str, str]  # a driver and the name of one of its pools


class KnownSlice(NamedTuple):
    """A slice: its pool and generation, how many slices that has (0: not known), its devices with a UUID by node, and
    the taints of those that have any."""

    pool: PoolName
    generation: int
    slice_count: int
    devices: dict[str, list[DraDevice]]
    taints: dict[str, list[str]]


def taint_text(taint: DeviceTaint) -> str:
    """A taint as kubectl writes it: ``KEY=VALUE:EFFECT``, or ``KEY:EFFECT``."""
    return shortened(f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}")


def known_slice(resource_slice: ResourceSlice) -> KnownSlice:
    """What is kept of a slice. A device without a UUID, or without a node, is left out."""
    devices: dict[str, list[DraDevice]] = {}
    taints: dict[str, list[str]] = {}
    for device in resource_slice.spec.devices or ():
        basic = device.basic or device
        uuid = (basic.attributes or {}).get("uuid")
        node = basic.node_name or resource_slice.spec.node_name
        if node and uuid and uuid.string:
            parts = (resource_slice.spec.driver, resource_slice.spec.pool.name, device.name, uuid.string)
            devices.setdefault(node, []).append(DraDevice(*map(shortened, parts)))
            if basic.taints:
                taints[shortened(device.name)] = [taint_text(taint) for taint in basic.taints]
    return KnownSlice(
        (resource_slice.spec.driver, resource_slice.spec.pool.name),
        resource_slice.spec.pool.generation,
        resource_slice.spec.pool.resource_slice_count,
        devices,
        taints,
    )


class Slices:
    """The slices by uid. A method that changes them returns the nodes that may have changed."""

    def __init__(self) -> None:
        self._slices: dict[str, KnownSlice] = {}
        self._deleted: dict[str, KnownSlice] = {}
        self._pools: dict[PoolName, dict[str, KnownSlice]] = {}
        self._by_node: dict[str, dict[PoolName, None]] = {}

    def keys(self) -> Collection[str]:
        """The uids of the slices that were not deleted."""
        return self._slices

    def of_node(self, node: str) -> dict[DraDevice, Sequence[str]]:
        """The devices of a node, none twice, each with the taints of its slice."""
        devices: dict[tuple[str, str, str], tuple[DraDevice, Sequence[str]]] = {}
        for pool in self.pools_of(node):
            parts = sorted(  # the deleted ones first
                self._pools[pool].items(), key=lambda item: (item[0] in self._slices, item[1].generation, item[0])
            )
            newest = [(uid, part) for uid, part in parts if part.generation == parts[-1][1].generation]
            for _, part in newest if len(newest) >= newest[-1][1].slice_count else parts:
                for device in part.devices.get(node, ()):
                    taints = part.taints.get(device.device, ())
                    devices[device.driver, device.pool, device.device] = device, taints
        return dict(devices.values())

    def nodes(self) -> Collection[str]:
        """The nodes that have devices."""
        return self._by_node

    def pools_of(self, node: str) -> Iterable[PoolName]:
        return self._by_node.get(node, ())

    def nodes_of(self, pool: PoolName) -> set[str]:
        return {node for part in self._pools.get(pool, {}).values() for node in part.devices}

    def put(self, uid: str, part: KnownSlice) -> set[str]:
        if self._slices.get(uid) == part:
            return set()
        changed = self._forget(uid)
        self._slices[uid] = part
        self._pools.setdefault(part.pool, {})[uid] = part
        for node in part.devices:
            self._by_node.setdefault(node, {})[part.pool] = None
        return changed | self._replace_deleted(part.pool) | self.nodes_of(part.pool)

    def remove(self, uid: str) -> set[str]:
        """A slice was deleted: it still counts, unless its pool is complete without it."""
        part = self._slices.pop(uid, None)
        if part is None:
            return set()
        self._deleted[uid] = part
        return self._replace_deleted(part.pool)

    def expire(self, nodes: Collection[str]) -> None:
        """Forget the deleted slices without a device on one of these nodes, which are all that there are."""
        for uid in [uid for uid, part in self._deleted.items() if not any(node in nodes for node in part.devices)]:
            self._forget(uid)

    def _replace_deleted(self, pool: PoolName) -> set[str]:
        """Forget the deleted slices of a pool if the others are complete."""
        others = [part for uid, part in self._pools[pool].items() if uid in self._slices]
        newest = max(others, key=lambda part: part.generation, default=None)
        if newest is None or [part.generation for part in others].count(newest.generation) < newest.slice_count:
            return set()
        return {node for uid in [*self._pools[pool]] if uid in self._deleted for node in self._forget(uid)}

    def _forget(self, uid: str) -> set[str]:
        part = self._slices.pop(uid, None) or self._deleted.pop(uid, None)
        if part is None:
            return set()
        nodes = self.nodes_of(part.pool)
        discard(self._pools, part.pool, uid)
        for node in nodes - self.nodes_of(part.pool):
            discard(self._by_node, node, part.pool)
        return nodes


def tainted(devices: Mapping[DraDevice, Sequence[str]], rules: Iterable[DeviceTaintRule]) -> dict[UnwellDevice, None]:
    """The taints of these devices: those of their slices, and of the rules that select them. A rule without a selector
    selects none, and one with an empty selector all."""
    unwell: dict[UnwellDevice, None] = {}
    for device, taints in devices.items():
        texts = list(taints)
        for rule in rules:
            selector = rule.spec.device_selector
            if selector is None:
                continue
            expected = (selector.driver, selector.pool, selector.device)
            actual = (device.driver, device.pool, device.device)
            if all(want is None or want == has for want, has in zip(expected, actual, strict=True)):
                texts.append(taint_text(rule.spec.taint))
        unwell |= {UnwellDevice(device.uuid, taint=text): None for text in texts}
    return unwell


class AdminClaim(NamedTuple):
    """A claim: its namespace and name, and the devices that it has for administration and for nothing else."""

    name: tuple[str, str]
    devices: tuple[Claim, ...]

    def pools(self) -> set[PoolName]:
        return {(device.driver, device.pool) for device in self.devices}


def known_claim(claim: ResourceClaim, has_driver: Callable[[str], bool]) -> AdminClaim | None:
    """What is kept of a claim: its devices of the drivers that ``has_driver`` selects; None if it is not allocated."""
    namespace, name = claim.metadata.namespace, claim.metadata.name
    if claim.status.allocation is None:
        return None
    results = [device for device in claim.status.allocation.devices.results or () if has_driver(device.driver)]
    used = {(device.driver, device.pool, device.device) for device in results if not device.admin_access}
    observed = {(device.driver, device.pool, device.device) for device in results} - used
    devices = (Claim(*map(shortened, (name, namespace, *device))) for device in sorted(observed))
    return AdminClaim((namespace, name), tuple(devices))


class Claims:
    """The claims for administration by uid. A method that changes them returns the pools concerned."""

    def __init__(self) -> None:
        self._claims: dict[str, AdminClaim] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._by_pool: dict[PoolName, dict[str, None]] = {}
        self._removed_ms: dict[str, int] = {}

    def keys(self) -> Collection[str]:
        """The uids of all claims, those that are gone among them."""
        return self._claims

    def of_pools(self, pools: Iterable[PoolName]) -> list[Claim]:
        """The devices for administration of some pools; none twice."""
        devices = {
            device: None
            for pool in pools
            for uid in self._by_pool.get(pool, ())
            for device in self._claims[uid].devices
            if (device.driver, device.pool) == pool
        }
        return list(devices)

    def put(self, uid: str, claim: AdminClaim | None, now_ms: int) -> set[PoolName]:
        """Add or update a claim; None: it has no devices, as before and after its pods."""
        if claim is None:
            self.remove(uid, now_ms)
            return set()
        self._removed_ms.pop(uid, None)
        if claim == self._claims.get(uid):
            return set()
        changed = self._forget(uid) | self._forget(self._uids.get(claim.name, ""))
        if claim.devices:
            self._claims[uid] = claim
            self._uids[claim.name] = uid
            for pool in claim.pools():
                self._by_pool.setdefault(pool, {})[uid] = None
        return changed | claim.pools()

    def remove(self, uid: str, now_ms: int) -> None:
        if uid in self._claims:
            self._removed_ms.setdefault(uid, now_ms)

    def expire(self, now_ms: int) -> set[PoolName]:
        expired = [uid for uid, removed_ms in self._removed_ms.items() if removed_ms + KEPT_MS <= now_ms]
        return {pool for uid in expired for pool in self._forget(uid)}

    def _forget(self, uid: str) -> set[PoolName]:
        claim = self._claims.pop(uid, None)
        self._removed_ms.pop(uid, None)
        if claim is None:
            return set()
        del self._uids[claim.name]
        for pool in claim.pools():
            discard(self._by_pool, pool, uid)
        return claim.pools()
