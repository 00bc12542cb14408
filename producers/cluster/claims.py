"""The devices that claims give for administration: who has one only looks at it, as monitoring does, and holds nothing.

In: resource claims as the API server has them, deletions, and full lists. Out: the devices, by the pools they are of.
State: the claims of that kind, by uid. One that is gone is known for as long as a pod that ended, for the kubelet may
go on telling of it; until another of its name is there. All of it is pure: times are given, in ms since the epoch.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from producers.cluster.objects import ResourceClaim
from producers.cluster.pods import KEPT_MS
from producers.cluster.selection import LONGEST_TEXT, shortened
from producers.cluster.slices import PoolName
from topics.allocations import Claim


class Known(NamedTuple):
    """A claim: its namespace and name, and the devices that it has for administration and for nothing else."""

    name: tuple[str, str]
    devices: tuple[Claim, ...]

    @property
    def pools(self) -> set[PoolName]:
        """The pools that they are of."""
        return {(device.driver, device.pool) for device in self.devices}


_NOTHING = Known(("", ""), ())


def known(of: ResourceClaim, concerns: Callable[[str], bool]) -> Known | None:
    """What is kept of a claim, of the drivers that matter; None where it has no devices now."""
    name = of.metadata.namespace, of.metadata.name
    if of.status.allocation is None:
        return None
    results = [one for one in of.status.allocation.devices.results or () if concerns(one.driver)]
    used = {(one.driver, one.pool, one.device) for one in results if not one.admin_access}
    looked_at = {(one.driver, one.pool, one.device) for one in results} - used
    rows = [[shortened(part, LONGEST_TEXT) for part in (name[1], name[0], *device)] for device in sorted(looked_at)]
    return Known(name, tuple(Claim(*row) for row in rows))


class Claims:
    """The claims for administration, by the uid of each. What changes something gives the pools that it is about."""

    def __init__(self) -> None:
        self._claims: dict[str, Known] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._by_pool: dict[PoolName, dict[str, None]] = {}
        self._gone_ms: dict[str, int] = {}
        self._unseen: dict[str, None] | None = None

    def __len__(self) -> int:
        return len(self._claims)

    def of_pools(self, pools: Iterable[PoolName]) -> list[Claim]:
        """The devices for administration of some pools; none twice."""
        found = {
            device: None
            for pool in pools
            for uid in self._by_pool.get(pool, ())
            for device in self._claims[uid].devices
            if (device.driver, device.pool) == pool
        }
        return list(found)

    def begin(self) -> None:
        """A full list begins."""
        self._unseen = dict.fromkeys(self._claims)

    def seen(self, uid: str) -> None:
        """A full list has the claim."""
        if self._unseen is not None:
            self._unseen.pop(uid, None)

    def complete(self, now_ms: int) -> None:
        """The full list is over: the claims that it did not have are gone."""
        missing, self._unseen = self._unseen or {}, None
        for uid in missing:
            self.remove(uid, now_ms)

    def put(self, uid: str, claim: Known | None, now_ms: int) -> set[PoolName]:
        """A claim as it is now; None: without devices, as it is before and after its pods."""
        self.seen(uid)
        if claim is None:
            self.remove(uid, now_ms)
            return set()
        self._gone_ms.pop(uid, None)
        if self._claims.get(uid, _NOTHING) == claim:
            return set()
        changed = self._forget(uid) | self._forget(self._uids.get(claim.name, ""))
        if claim.devices:
            self._remember(uid, claim)
        return changed | claim.pools

    def remove(self, uid: str, now_ms: int) -> None:
        """A claim is gone."""
        if uid in self._claims:
            self._gone_ms.setdefault(uid, now_ms)

    def expire(self, now_ms: int) -> set[PoolName]:
        """Forget the claims that went long ago."""
        left = [uid for uid, gone_ms in self._gone_ms.items() if gone_ms + KEPT_MS <= now_ms]
        return {pool for uid in left for pool in self._forget(uid)}

    def _remember(self, uid: str, claim: Known) -> None:
        self._claims[uid] = claim
        self._uids[claim.name] = uid
        for pool in claim.pools:
            self._by_pool.setdefault(pool, {})[uid] = None

    def _forget(self, uid: str) -> set[PoolName]:
        claim = self._claims.pop(uid, None)
        self._gone_ms.pop(uid, None)
        if claim is None:
            return set()
        del self._uids[claim.name]
        for pool in claim.pools:
            del self._by_pool[pool][uid]
            if not self._by_pool[pool]:
                del self._by_pool[pool]
        return claim.pools
