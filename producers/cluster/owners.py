"""Who owns a pod: the chain of controllers from its own to the top, each asked for once.

In: a pod's controller, which a tenant may have written; the API server's metadata of each owner. Out: owner chains.
State: the chains that are wanted, what is above each owner, the kinds that each API group serves, and the groups and
kinds that are not asked for a while.
On failure: a chain that can't be followed now is incomplete, and tried again; what is known of it stays. An owner that
is gone, or that may not be read, is the last of its chain. If reading is refused, it is tried again with pauses that
grow to ten minutes, because an API server that has just started refuses what it allows later. After an answer that
makes no sense it is tried again in ten minutes. An API group that does not answer is tried again with growing pauses.
"""

import asyncio
import heapq
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable
from delivery.tasks import set_within
from producers.cluster import instruments as names
from producers.cluster import objects
from producers.cluster.objects import UndecodableObject, controller, decode
from producers.cluster.pods import as_owner
from topics.workloads import Owner

log = logging.getLogger(__name__)
KEPT_S = 3600.0  # for how long an owner's answer is good for other pods
MOST_LINKS = 16_384
DEEPEST = 8  # the most links of a chain
AGAIN_S = 600.0  # after how long to ask again for what is not known; and at most for what may not be read
REFUSED_S = 5.0  # after how long to ask again for what may not be read; four times as long after each refusal
NEW_KIND_S = 30.0  # after how long a kind that an API group did not have may be there
MOST_GROUPS = 256
AT_ONCE = 4  # requests of one API group at the same time: one that hangs holds up no other
TIMEOUT_S = 5.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0

_GROUP_VERSION = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?v[a-z0-9]{1,62}")
_NAME = re.compile(r"(?!\.{1,2}\Z)[^/%\x00-\x20\x7f]{1,253}")
_METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
_JSON = {"Accept": "application/json"}

_OBJECT, _RESOURCES = msgspec.json.Decoder(objects.Object), msgspec.json.Decoder(objects.ApiResources)


class Chain(NamedTuple):
    """Owners from a pod's controller upward. ``complete``: nothing that could be read is above the last."""

    owners: tuple[Owner, ...]
    complete: bool


UNKNOWN = Chain((), complete=False)


class Kind(NamedTuple):
    plural: str
    namespaced: bool = True


class Link(NamedTuple):
    """What is above an owner, and in how many seconds to ask again; None: never.
    ``known``: there was an answer. One that may not be read counts as nothing above: a chain ends there."""

    above: Owner | None
    again_s: float | None = None
    known: bool = True


TOP = Link(None)

_BUILT_IN = {
    (version, kind): Kind(f"{kind.lower()}s")
    for version, kinds in (
        ("v1", ("Pod", "ReplicationController")),
        ("apps/v1", ("ReplicaSet", "Deployment", "StatefulSet", "DaemonSet")),
        ("batch/v1", ("Job", "CronJob")),
    )
    for kind in kinds
}
_TOPS = {("v1", "Node")}  # kinds that nothing owns: a static pod's node


@dataclass(slots=True)
class _ApiGroup:
    """A version of an API group: what it serves, when that was asked, and until when it is left alone."""

    kinds: dict[str, Kind] | None = None
    asked_s: float = 0.0
    paused_until_s: float = 0.0
    failures: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class _Denial(NamedTuple):
    """A kind may not be read in a namespace: when the API server refused, and for how long it is not asked again."""

    at_s: float
    pause_s: float


class OwnerLookup:
    """Asks for what is above one owner; several of one API group at the same time, but not many."""

    def __init__(self, api: Client, instruments: Instruments, *, clock: Callable[[], float]) -> None:
        self._api, self._instruments, self._clock = api, instruments, clock
        self._groups: dict[str, _ApiGroup] = {}
        self._denials: dict[tuple[str, str, str], _Denial] = {}
        self._logged: dict[tuple[str, str], None] = {}

    async def above(self, owner: Owner, namespace: str) -> Link:
        if (owner.api_version, owner.kind) in _TOPS:
            return TOP
        if not _GROUP_VERSION.fullmatch(owner.api_version) or not _NAME.fullmatch(owner.name):
            return self._ended(owner, "malformed", None)
        group = self._group(owner.api_version)
        async with group.slots:
            denial = self._denials.get((owner.api_version, owner.kind, namespace))
            denied_s = denial.at_s + denial.pause_s - self._clock() if denial else 0.0
            pause_s = max(group.paused_until_s - self._clock(), denied_s)
            if pause_s > 0:
                return Link(None, _spread(pause_s), known=denied_s > 0)
            try:
                return await self._ask(group, owner, namespace)
            except Unreachable:
                return self._away(group, owner, None)
            except UndecodableObject:
                self._instruments.counter(names.UNDECODABLE, "owners").inc()
                return self._ended(owner, "undecodable", AGAIN_S)._replace(known=False)

    def too_long(self, owner: Owner, pod_side: Owner) -> None:
        """A chain was not followed above ``owner``: it has too many links, or comes back to one of them."""
        self._count(owner, "too_long")
        what = f"{pod_side.kind} {pod_side.name}"
        log.warning("%s: its chain of owners has more than %d links, or is a ring: no workload", what, DEEPEST)

    async def _ask(self, group: _ApiGroup, owner: Owner, namespace: str) -> Link:
        kind = _BUILT_IN.get((owner.api_version, owner.kind)) or await self._served(group, owner)
        if isinstance(kind, Link):
            return kind
        of_namespace = f"/namespaces/{quote(namespace, safe='')}" if kind.namespaced else ""
        path = f"{_base(owner.api_version)}{of_namespace}/{kind.plural}/{quote(owner.name, safe='')}"
        answer = await self._api.request("GET", path, headers=_METADATA_ONLY, timeout_s=TIMEOUT_S)
        if answer.status not in (200, 404):
            return self._not_read(group, owner, namespace, answer)
        if answer.status == 404:
            return self._ended(owner, "gone", None)
        group.failures = 0
        meta = decode(_OBJECT, answer.body).metadata
        if meta.uid != owner.uid:
            return self._ended(owner, "gone", None)
        self._count(owner, "ok")
        self._denials.pop((owner.api_version, owner.kind, namespace), None)
        above = controller(meta)
        return Link(as_owner(above)) if above else TOP

    async def _served(self, group: _ApiGroup, owner: Owner) -> Kind | Link:
        """How an owner's kind is asked for, by what its group serves; a link that ends the chain if that is unknown."""
        kinds = group.kinds
        good_for_s = AGAIN_S if kinds and owner.kind in kinds else NEW_KIND_S
        if kinds is None or self._clock() - group.asked_s >= good_for_s:
            answer = await self._api.request("GET", _base(owner.api_version), headers=_JSON, timeout_s=TIMEOUT_S)
            if answer.status not in (200, 404):
                return self._not_read(group, owner, "", answer)
            served = decode(_RESOURCES, answer.body).resources or () if answer.status == 200 else ()
            kinds = {row.kind: Kind(row.name, row.namespaced) for row in served if "/" not in row.name}
            group.kinds, group.asked_s, group.failures = kinds, self._clock(), 0
        return kinds.get(owner.kind) or self._ended(owner, "unknown_kind", AGAIN_S)

    def _not_read(self, group: _ApiGroup, owner: Owner, namespace: str, answer: Answer) -> Link:
        """An answer that says nothing of the owner: the API is away for now, or does not let it be read. Denials of
        long ago are forgotten, so that they never grow many."""
        if answer.status in (401, 408, 429) or answer.status >= 500:
            return self._away(group, owner, answer.retry_after_s)
        now_s, kind = self._clock(), (owner.api_version, owner.kind)
        before = self._denials.pop((*kind, namespace), None)
        while self._denials and (oldest := next(iter(self._denials.items())))[1].at_s + 2 * AGAIN_S <= now_s:
            del self._denials[oldest[0]]
        if before and before.at_s + before.pause_s > now_s:  # several were asked for at once
            denial = before
        else:
            denial = _Denial(now_s, min(AGAIN_S, 4 * before.pause_s) if before else REFUSED_S)
        self._denials[*kind, namespace] = denial
        if kind not in self._logged:
            self._logged[kind] = None
            if len(self._logged) > MOST_GROUPS:
                del self._logged[next(iter(self._logged))]
            what = f"{owner.kind} of {owner.api_version}"
            log.warning("%s: not to be read (HTTP %d); owner chains end there", what, answer.status)
        return self._ended(owner, "forbidden" if answer.status == 403 else "refused", denial.pause_s)

    def _away(self, group: _ApiGroup, owner: Owner, retry_after_s: float | None) -> Link:
        """Leave the API group alone for a while."""
        self._count(owner, "away")
        pause_s = min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** min(group.failures, 10))
        group.failures += 1
        pause_s = max(pause_s, min(LONGEST_PAUSE_S, retry_after_s or 0.0))
        group.paused_until_s = self._clock() + pause_s
        return Link(None, _spread(pause_s), known=False)

    def _ended(self, owner: Owner, result: str, again_s: float | None) -> Link:
        self._count(owner, result)
        return Link(None, None if again_s is None else _spread(again_s))

    def _count(self, owner: Owner, result: str) -> None:
        """A kind that the API server is not known to have may be any text: it is counted as other."""
        kinds = self._group(owner.api_version).kinds or {}
        known = (owner.api_version, owner.kind) in _BUILT_IN or owner.kind in kinds
        self._instruments.counter(names.OWNER_REQUESTS, owner.kind if known else "other", result).inc()

    def _group(self, api_version: str) -> _ApiGroup:
        group = self._groups.pop(api_version, None) or _ApiGroup()
        self._groups[api_version] = group
        if len(self._groups) > MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return group


def _base(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _spread(wait_s: float) -> float:
    """A little more, so that not all who wait come back at once."""
    return wait_s * random.uniform(1.0, 1.2)


@dataclass(slots=True)
class _Root:
    """A pod's controller, and the chain from it up that was reported last. ``open``: more may be known soon."""

    owner: Owner
    namespace: str
    reported: Chain = UNKNOWN
    open: bool = True


class Owners:
    """Finds out owner chains, for as long as :meth:`run` runs. ``learned`` is called with an owner's uid and the chain
    from it up when it was looked for, and whenever more of it is known. It must not raise."""

    def __init__(
        self,
        api: Client,
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
        uid = owner.uid or ""
        self._roots[uid] = _Root(owner, namespace)
        self._come_back(uid, 0.0)

    def forget(self, uid: str) -> None:
        self._roots.pop(uid, None)

    async def run(self) -> None:
        """Ask, until it is cancelled. One chain is not climbed twice at the same time."""
        try:
            async with asyncio.TaskGroup() as climbs:
                while True:
                    while self._due and self._due[0][0] <= self._clock():
                        _, uid = heapq.heappop(self._due)
                        if uid in self._roots and uid not in self._climbing:
                            self._climbing.add(uid)
                            climbs.create_task(self._climb(uid))
                    self._wake.clear()
                    wait_s = max(0.0, self._due[0][0] - self._clock()) if self._due else None
                    await set_within(self._wake, wait_s)
        finally:
            for asked in self._asking.values():
                asked.cancel()

    def _come_back(self, uid: str, in_s: float) -> None:
        heapq.heappush(self._due, (self._clock() + in_s, uid))
        self._wake.set()

    async def _climb(self, uid: str) -> None:
        """Find out one chain as far as it can be known now, and report it if that is more than before."""
        root = self._roots.get(uid)
        if root is None:
            self._climbing.discard(uid)
            return
        owners = [root.owner]
        link = await self._link(root.owner, root.namespace)
        while (above := link.above) is not None:
            if len(owners) == DEEPEST or above.uid in {owner.uid for owner in owners}:
                self._lookup.too_long(owners[-1], root.owner)
                link = Link(None, known=False)
            else:
                owners.append(above)
                link = await self._link(above, root.namespace)
        chain = Chain(tuple(owners), link.known)
        self._climbing.discard(uid)
        if self._roots.get(uid) is not root:
            self._come_back(uid, 0.0)
            return
        root.open = not chain.complete and link.again_s is not None
        if (chain.complete, len(owners)) > (root.reported.complete, len(root.reported.owners)):
            root.reported = chain
            self._learned(uid, chain)
        if link.again_s is not None:
            self._come_back(uid, link.again_s)

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
            self._links.pop(owner.uid or "", None)
            self._links[owner.uid or ""] = (self._clock() + KEPT_S, link)
            if len(self._links) > MOST_LINKS:
                del self._links[next(iter(self._links))]
        return link
