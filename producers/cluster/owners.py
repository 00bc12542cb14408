"""Who owns a pod: the chain of controllers from its own to the top, each asked for once.

In: a pod's controller, as its owner reference names it. Out: owner chains.
State: the chains that are wanted, and what is above each owner.
On failure: a chain that can't be followed now is incomplete, and tried again; what was once found of it stays. An owner
that is gone, or that may not be read, stays in the chain as the last.
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from delivery.instruments import Instruments
from producers.cluster.client import Requests
from producers.cluster.owner_lookup import DEEPEST, Link, OwnerLookup
from topics.workloads import Owner

KEPT_S = 3600.0
"""For how long an owner's answer is good for other pods."""

MOST_LINKS = 16_384


class Chain(NamedTuple):
    """Owners from a pod's controller upward. ``complete``: nothing that could be read is above the last."""

    owners: tuple[Owner, ...]
    complete: bool


UNKNOWN = Chain((), complete=False)


@dataclass(slots=True)
class _Root:
    """A pod's controller, and the chain from it up that was told of last. ``open``: more may be known soon."""

    owner: Owner
    namespace: str
    told: Chain = UNKNOWN
    open: bool = True


class Owners:
    """Finds out owner chains, for as long as :meth:`run` runs.

    ``learned`` is called with an owner's uid and the chain from it up when it was looked for, and whenever more of it
    is known. It must not raise.
    """

    def __init__(
        self,
        api: Requests,
        instruments: Instruments,
        learned: Callable[[str, Chain], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learned, self._clock = learned, clock
        self._lookup = OwnerLookup(api, instruments, clock=clock)
        self._roots: dict[str, _Root] = {}
        self._due: list[tuple[float, str]] = []
        self._climbing: set[str] = set()
        self._links: dict[str, tuple[float, Link]] = {}
        self._asking: dict[str, asyncio.Future[Link]] = {}
        self._wake = asyncio.Event()

    @property
    def unknown(self) -> int:
        """The owners whose chains are wanted and may soon be known, but are not yet."""
        return sum(root.open for root in self._roots.values())

    def follow(self, owner: Owner, namespace: str) -> None:
        """The chain from this owner up is wanted."""
        uid = owner.uid or ""
        self._roots[uid] = _Root(owner, namespace)
        self._come_back(uid, 0.0)

    def forget(self, uid: str) -> None:
        """It is not wanted any more."""
        self._roots.pop(uid, None)

    async def run(self) -> None:
        """Ask, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as climbs:
                while True:
                    for uid in self._take_due():
                        climbs.create_task(self._climb(uid))
                    await self._sleep()
        finally:
            for asked in self._asking.values():
                asked.cancel()

    def _come_back(self, uid: str, in_s: float) -> None:
        heapq.heappush(self._due, (self._clock() + in_s, uid))
        self._wake.set()

    def _take_due(self) -> list[str]:
        """Whose chains are to be climbed now; one of which a climb is under way is not climbed twice."""
        due: dict[str, None] = {}
        while self._due and self._due[0][0] <= self._clock():
            _, uid = heapq.heappop(self._due)
            if uid in self._roots and uid not in self._climbing:
                due[uid] = None
        self._climbing.update(due)
        return list(due)

    async def _sleep(self) -> None:
        self._wake.clear()
        wait_s = max(0.0, self._due[0][0] - self._clock()) if self._due else None
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _climb(self, uid: str) -> None:
        """Find out one chain, and tell of it where that is more than was told before."""
        root = self._roots.get(uid)
        if root is None:
            self._climbing.discard(uid)
            return
        chain, again_s = await self._chain(root)
        self._climbing.discard(uid)
        if self._roots.get(uid) is not root:
            self._come_back(uid, 0.0)
            return
        root.open = not chain.complete and again_s is not None
        if (chain.complete, len(chain.owners)) > (root.told.complete, len(root.told.owners)):
            root.told = chain
            self._learned(uid, chain)
        if again_s is not None:
            self._come_back(uid, again_s)

    async def _chain(self, root: _Root) -> tuple[Chain, float | None]:
        """The chain from an owner up as far as it can be known now, and in how many seconds to try again."""
        owners = [root.owner]
        while True:
            link = await self._link(owners[-1], root.namespace)
            if link.above is None:
                return Chain(tuple(owners), link.known), link.again_s
            if len(owners) == DEEPEST or link.above.uid in {owner.uid for owner in owners}:
                self._lookup.too_long(owners[-1], root.owner)
                return Chain(tuple(owners), complete=False), None
            owners.append(link.above)

    async def _link(self, owner: Owner, namespace: str) -> Link:
        """What is above an owner: remembered, or asked for once however many wait for it."""
        uid = owner.uid or ""
        remembered = self._links.get(uid)
        if remembered is not None and remembered[0] > self._clock():
            return remembered[1]
        asked = self._asking.get(uid)
        if asked is None:
            asked = self._asking[uid] = asyncio.ensure_future(self._ask_once(owner, namespace))
            asked.add_done_callback(lambda _: self._asking.pop(uid, None))
        return await asyncio.shield(asked)

    async def _ask_once(self, owner: Owner, namespace: str) -> Link:
        link = await self._lookup.above(owner, namespace)
        if link.again_s is None:
            self._remember(owner.uid or "", link)
        return link

    def _remember(self, uid: str, link: Link) -> None:
        self._links.pop(uid, None)
        self._links[uid] = (self._clock() + KEPT_S, link)
        if len(self._links) > MOST_LINKS:
            del self._links[next(iter(self._links))]
