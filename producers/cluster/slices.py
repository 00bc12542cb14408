"""The devices of dynamic resource allocation: which UUID a driver's device has.

In: resource slices as the API server has them, deletions, and full lists. Out: the devices of a node.
State: the slices, by pool. A pool that a driver writes anew has slices of two generations for a while: the higher one
is meant. All of it is pure.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from producers.cluster.objects import Slice
from producers.cluster.selection import LONGEST_TEXT, shortened
from topics.workloads import DraDevice

PoolName = tuple[str, str]
"""A driver and the name of a pool of its."""


class Known(NamedTuple):
    """A slice: where it belongs, and the devices with a UUID that it has, by node."""

    pool: PoolName
    generation: int
    devices: dict[str, list[DraDevice]]


def known(of: Slice) -> Known:
    """What is kept of a slice. A device without a UUID, or of no one node, is left out."""
    devices: dict[str, list[DraDevice]] = {}
    for device in of.spec.devices or ():
        uuid = (device.attributes or {}).get("uuid")
        node = device.node_name or of.spec.node_name
        if node and uuid and uuid.string:
            parts = (of.spec.driver, of.spec.pool.name, device.name, uuid.string)
            devices.setdefault(node, []).append(DraDevice(*(shortened(part, LONGEST_TEXT) for part in parts)))
    return Known((of.spec.driver, of.spec.pool.name), of.spec.pool.generation, devices)


class Slices:
    """The slices, by the uid of each."""

    def __init__(self) -> None:
        self._slices: dict[str, Known] = {}
        self._pools: dict[PoolName, dict[str, Known]] = {}
        self._by_node: dict[str, dict[PoolName, None]] = {}
        self._unseen: dict[str, None] | None = None

    def __len__(self) -> int:
        return len(self._slices)

    def of_node(self, node: str) -> list[DraDevice]:
        """The devices of a node; none twice."""
        found = {
            (device.driver, device.pool, device.device): device
            for pool in self.pools_of(node)
            for part in _newest(self._pools[pool])
            for device in part.devices.get(node, ())
        }
        return list(found.values())

    def pools_of(self, node: str) -> Iterable[PoolName]:
        """The pools that have devices of a node."""
        return self._by_node.get(node, ())

    def nodes_of(self, pool: PoolName) -> set[str]:
        """The nodes of which a pool has devices."""
        return {node for part in self._pools.get(pool, {}).values() for node in part.devices}

    def begin(self) -> None:
        """A full list begins."""
        self._unseen = dict.fromkeys(self._slices)

    def seen(self, uid: str) -> None:
        """A full list has the slice."""
        if self._unseen is not None:
            self._unseen.pop(uid, None)

    def complete(self) -> set[str]:
        """The full list is over: the slices that it did not have are gone. Gives the nodes that may have changed."""
        missing, self._unseen = self._unseen or {}, None
        return {node for uid in missing for node in self.remove(uid)}

    def put(self, uid: str, part: Known) -> set[str]:
        """A slice as it is now; gives the nodes that may have changed."""
        self.seen(uid)
        if self._slices.get(uid) == part:
            return set()
        changed = self.remove(uid)
        self._slices[uid] = part
        self._pools.setdefault(part.pool, {})[uid] = part
        for node in part.devices:
            self._by_node.setdefault(node, {})[part.pool] = None
        return changed | self.nodes_of(part.pool)

    def remove(self, uid: str) -> set[str]:
        """A slice is gone; gives the nodes that may have changed."""
        part = self._slices.pop(uid, None)
        if part is None:
            return set()
        nodes = self.nodes_of(part.pool)
        del self._pools[part.pool][uid]
        for node in nodes - self.nodes_of(part.pool):
            del self._by_node[node][part.pool]
            if not self._by_node[node]:
                del self._by_node[node]
        if not self._pools[part.pool]:
            del self._pools[part.pool]
        return nodes


def _newest(pool: dict[str, Known]) -> Iterator[Known]:
    """The slices of a pool's highest generation, in one order."""
    highest = max(part.generation for part in pool.values())
    return (part for _, part in sorted(pool.items()) if part.generation == highest)
