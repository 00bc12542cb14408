"""Resolves owner chains: a pod's controller, the controller's controller, up to the top. Each is requested once.

In: a pod's controller, which a tenant may have written; the API server's metadata of each owner. Out: owner chains.
State: the followed chains, the link above each owner, the kinds that each API group serves, and the groups and kinds
that are paused.
On failure: a chain that can't be followed now is incomplete, and tried again; what is known of it stays. An owner that
is gone, or that may not be read, is the last of its chain. A refused request is tried again with pauses that grow to
ten minutes, because an API server that has just started refuses what it allows later. After an invalid answer it is
tried again in ten minutes. An API group that does not answer, or is not there, is tried again with growing pauses.
"""

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable, can_be_read
from delivery.tasks import set_within
from producers.cluster import instruments as names
from producers.cluster import objects
from producers.cluster.objects import UndecodableObject, controller, decode
from producers.cluster.pods import PodOwner, as_owner
from topics.topic import UNDECODABLE
from topics.workloads import Owner

log = logging.getLogger(__name__)
KEPT_S = 3600.0  # how long an owner's link is cached for other pods
MOST_LINKS = 16_384
DEEPEST = 8  # the most owners of a chain
AGAIN_S = 600.0  # the pause after an unknown kind or an invalid answer; the longest after refusals and unknown groups
REFUSED_S = 5.0  # the pause after a first refusal; four times as long after each further one
NEW_KIND_S = 30.0  # how soon a group is read again for a kind that it did not serve, or if it was not there
MOST_GROUPS = 256
AT_ONCE = 4  # requests of one API group at the same time: one that hangs holds up no other
TIMEOUT_S = 5.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0

_METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
_JSON = {"Accept": "application/json"}

_OBJECT, _RESOURCES = msgspec.json.Decoder(objects.Object), msgspec.json.Decoder(objects.ApiResources)


class Chain(NamedTuple):
    """Owners from a pod's controller upward. ``complete``: above the last owner there is none that can be read."""

    owners: tuple[Owner, ...]
    complete: bool


UNKNOWN = Chain((), complete=False)


class Kind(NamedTuple):
    plural: str
    namespaced: bool = True


class Link(NamedTuple):
    """The owner above an owner; None if there is none. ``again_s``: request it again after so long; None: never.
    ``known``: the API server gave an answer. A refusal counts as one: the chain ends there."""

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
_TOPS = {("v1", "Node")}  # kinds without an owner: a static pod is owned by its node


@dataclass(slots=True)
class _ApiGroup:
    """A version of an API group: the kinds that it serves, when these were read, and until when it is paused."""

    kinds: dict[str, Kind] | None = None
    read_s: float = 0.0
    paused_until_s: float = 0.0
    failures: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class _Denial(NamedTuple):
    """A kind that may not be read in a namespace: when the API server refused, and how long to pause after it."""

    denied_s: float
    pause_s: float


class OwnerLookup:
    """Reads the owner of an owner from the API server, with at most four requests of one API group at a time."""

    def __init__(self, api: Client, instruments: Instruments, *, clock: Callable[[], float]) -> None:
        self._api, self._instruments, self._clock = api, instruments, clock
        self._groups: dict[str, _ApiGroup] = {}
        self._denials: dict[tuple[str, str, str], _Denial] = {}
        self._logged: dict[tuple[str, str], None] = {}

    async def above(self, owner: Owner, namespace: str) -> Link:
        """The link above an owner. It never raises for what the API server does."""
        if (owner.api_version, owner.kind) in _TOPS:
            return TOP
        if not can_be_read(owner.api_version, owner.name):
            return self._end_chain(owner, "malformed", None)
        group = self._group(owner.api_version)
        async with group.slots:
            denial = self._denials.get((owner.api_version, owner.kind, namespace))
            denied_for_s = denial.denied_s + denial.pause_s - self._clock() if denial else 0.0
            pause_s = max(group.paused_until_s - self._clock(), denied_for_s)
            if pause_s > 0:
                return Link(None, _jitter(pause_s), known=denied_for_s > 0)
            try:
                return await self._request(group, owner, namespace)
            except Unreachable:
                return self._pause_group(group, owner, None)
            except UndecodableObject:
                self._instruments.counter(names.UNDECODABLE, "owners").inc()
                return self._end_chain(owner, "undecodable", AGAIN_S)._replace(known=False)

    def too_long(self, owner: Owner, root: Owner) -> None:
        """Count and log a chain from ``root`` that ends at ``owner``: it has too many owners, or is a ring."""
        self._count(owner, "too_long")
        name = f"{root.kind} {root.name}"
        log.warning("%s: its chain of owners has more than %d links, or is a ring: no workload", name, DEEPEST)

    async def _request(self, group: _ApiGroup, owner: Owner, namespace: str) -> Link:
        kind = _BUILT_IN.get((owner.api_version, owner.kind)) or await self._find_kind(group, owner)
        if isinstance(kind, Link):
            return kind
        scope = f"/namespaces/{quote(namespace, safe='')}" if kind.namespaced else ""
        path = f"{_base_path(owner.api_version)}{scope}/{kind.plural}/{quote(owner.name, safe='')}"
        answer = await self._api.request("GET", path, headers=_METADATA_ONLY, timeout_s=TIMEOUT_S)
        if answer.status == 404 and says_gone(answer.body, owner.name):
            return self._end_chain(owner, "gone", None)
        if answer.status != 200:
            return self._handle_refusal(group, owner, namespace, answer)
        group.failures = 0
        meta = decode(_OBJECT, answer.body).metadata
        if meta.uid != owner.uid:
            return self._end_chain(owner, "gone", None)
        self._count(owner, "ok")
        self._denials.pop((owner.api_version, owner.kind, namespace), None)
        above = controller(meta)
        return Link(as_owner(above)) if above else TOP

    async def _find_kind(self, group: _ApiGroup, owner: Owner) -> Kind | Link:
        """The plural and scope of an owner's kind, as its group serves it; else a link that ends the chain."""
        kinds = group.kinds
        max_age_s = AGAIN_S if kinds and owner.kind in kinds else NEW_KIND_S
        if kinds is None or self._clock() - group.read_s >= max_age_s:
            answer = await self._api.request("GET", _base_path(owner.api_version), headers=_JSON, timeout_s=TIMEOUT_S)
            if answer.status not in (200, 404):
                return self._handle_refusal(group, owner, "", answer)
            resources = decode(_RESOURCES, answer.body).resources or () if answer.status == 200 else ()
            kinds = {row.kind: Kind(row.name, row.namespaced) for row in resources if "/" not in row.name}
            group.kinds, group.read_s = kinds, self._clock()
            group.failures = group.failures + 1 if answer.status == 404 else 0
        if owner.kind in kinds:
            return kinds[owner.kind]
        again_s = AGAIN_S
        if group.failures:  # a 404 may be that of a proxy, or of an API server that has not heard of a new group yet
            again_s = min(AGAIN_S, NEW_KIND_S * 2 ** min(group.failures - 1, 10))
        return self._end_chain(owner, "unknown_kind", again_s)

    def _handle_refusal(self, group: _ApiGroup, owner: Owner, namespace: str, answer: Answer) -> Link:
        """The link after any other status: the API group is away for now, or the owner may not be read. Old denials are
        dropped, so that their number stays small."""
        if answer.status in (401, 408, 429) or answer.status >= 500:
            return self._pause_group(group, owner, answer.retry_after_s)
        now_s, kind = self._clock(), (owner.api_version, owner.kind)
        before = self._denials.pop((*kind, namespace), None)
        while self._denials and (oldest := next(iter(self._denials.items())))[1].denied_s + 2 * AGAIN_S <= now_s:
            del self._denials[oldest[0]]
        if before and before.denied_s + before.pause_s > now_s:  # an earlier one of concurrent requests was denied
            denial = before
        else:
            denial = _Denial(now_s, min(AGAIN_S, 4 * before.pause_s) if before else REFUSED_S)
        self._denials[*kind, namespace] = denial
        if kind not in self._logged:
            self._logged[kind] = None
            if len(self._logged) > MOST_GROUPS:
                del self._logged[next(iter(self._logged))]
            kind_name = f"{owner.kind} of {owner.api_version}"
            log.warning("%s: not to be read (HTTP %d); owner chains end there", kind_name, answer.status)
        return self._end_chain(owner, "forbidden" if answer.status == 403 else "refused", denial.pause_s)

    def _pause_group(self, group: _ApiGroup, owner: Owner, retry_after_s: float | None) -> Link:
        """Pause the API group, longer after each failure."""
        self._count(owner, "away")
        pause_s = min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** min(group.failures, 10))
        group.failures += 1
        pause_s = max(pause_s, min(LONGEST_PAUSE_S, retry_after_s or 0.0))
        group.paused_until_s = self._clock() + pause_s
        return Link(None, _jitter(pause_s), known=False)

    def _end_chain(self, owner: Owner, result: str, again_s: float | None) -> Link:
        self._count(owner, result)
        return Link(None, None if again_s is None else _jitter(again_s))

    def _count(self, owner: Owner, result: str) -> None:
        """Count a lookup. A kind that the API server is not known to serve may be any text: it is counted as other."""
        kinds = self._group(owner.api_version).kinds or {}
        known = (owner.api_version, owner.kind) in _BUILT_IN or owner.kind in kinds
        self._instruments.counter(names.OWNER_REQUESTS, owner.kind if known else "other", result).inc()

    def _group(self, api_version: str) -> _ApiGroup:
        group = self._groups.pop(api_version, None) or _ApiGroup()
        self._groups[api_version] = group
        if len(self._groups) > MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return group


class _Details(msgspec.Struct):
    name: str = ""


class _NotFound(msgspec.Struct):
    details: _Details | None = None


_not_found = msgspec.json.Decoder(_NotFound)


def says_gone(body: bytes, name: str) -> bool:
    """Whether a 404 says that the object of this name does not exist. A proxy's 404 and that of a resource which is
    not served at the moment do not."""
    try:
        details = _not_found.decode(body).details
    except UNDECODABLE:
        return False
    return details is not None and details.name == name


def _base_path(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _jitter(wait_s: float) -> float:
    """The pause and up to a fifth more, so that requests do not come all at once."""
    return wait_s * random.uniform(1.0, 1.2)


@dataclass(slots=True)
class _Root:
    """The last reported chain from a pod's controller up. ``open``: more of the chain may be known soon."""

    reported: Chain = UNKNOWN
    open: bool = True


class Owners:
    """Resolves owner chains while :meth:`run` runs. It calls ``on_chain`` with an owner and the chain from it up, first
    when the chain was looked for, then whenever more of it is known. ``on_chain`` must not raise."""

    def __init__(
        self,
        api: Client,
        instruments: Instruments,
        on_chain: Callable[[PodOwner, Chain], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_chain, self._clock = on_chain, clock
        self._lookup = OwnerLookup(api, instruments, clock=clock)
        self._roots: dict[PodOwner, _Root] = {}
        self._due: list[tuple[float, int, PodOwner]] = []
        self._numbers = count()  # two of the same time are not compared by their owners
        self._resolving: set[PodOwner] = set()
        self._cache: dict[PodOwner, tuple[float, Link]] = {}
        self._in_flight: dict[PodOwner, asyncio.Future[Link]] = {}
        self._wake = asyncio.Event()

    @property
    def unknown(self) -> int:
        """How many followed chains are not known yet, but may be soon."""
        return sum(root.open for root in self._roots.values())

    def follow(self, owner: PodOwner) -> None:
        self._roots[owner] = _Root()
        self._schedule(owner, 0.0)

    def forget(self, owner: PodOwner) -> None:
        self._roots.pop(owner, None)

    async def run(self) -> None:
        """Resolve chains as they become due, until it is cancelled. One chain is never resolved twice at a time."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    while self._due and self._due[0][0] <= self._clock():
                        owner = heapq.heappop(self._due)[-1]
                        if owner in self._roots and owner not in self._resolving:
                            self._resolving.add(owner)
                            tasks.create_task(self._resolve(owner))
                    self._wake.clear()
                    wait_s = max(0.0, self._due[0][0] - self._clock()) if self._due else None
                    await set_within(self._wake, wait_s)
        finally:
            for request in self._in_flight.values():
                request.cancel()

    def _schedule(self, owner: PodOwner, in_s: float) -> None:
        heapq.heappush(self._due, (self._clock() + in_s, next(self._numbers), owner))
        self._wake.set()

    async def _resolve(self, root_owner: PodOwner) -> None:
        """Resolve one chain as far as possible now, and report it if more of it is known than before, or that it has no
        top."""
        root = self._roots.get(root_owner)
        if root is None:
            self._resolving.discard(root_owner)
            return
        owners = [root_owner.owner]
        link = await self._link(root_owner)
        while (above := link.above) is not None:
            if len(owners) == DEEPEST or above.uid in {owner.uid for owner in owners}:
                self._lookup.too_long(owners[-1], root_owner.owner)
                link = Link(None, known=False)
            else:
                owners.append(above)
                link = await self._link(PodOwner(root_owner.namespace, above))
        chain = Chain(tuple(owners), link.known)
        self._resolving.discard(root_owner)
        if self._roots.get(root_owner) is not root:
            self._schedule(root_owner, 0.0)
            return
        root.open = not chain.complete and link.again_s is not None
        has_no_top = not chain.complete and link.again_s is None
        is_more = (chain.complete, len(owners)) > (root.reported.complete, len(root.reported.owners))
        if is_more or (has_no_top and chain != root.reported):
            root.reported = chain
            self._on_chain(root_owner, chain)
        if link.again_s is not None:
            self._schedule(root_owner, link.again_s)

    async def _link(self, owner: PodOwner) -> Link:
        """The link above an owner: from the cache, or by one request, however many chains wait for it."""
        cached = self._cache.get(owner)
        if cached is not None and cached[0] > self._clock():
            return cached[1]
        request = self._in_flight.get(owner)
        if request is None:
            request = self._in_flight[owner] = asyncio.ensure_future(self._fetch(owner))
            request.add_done_callback(lambda _: self._in_flight.pop(owner, None))
        return await asyncio.shield(request)

    async def _fetch(self, owner: PodOwner) -> Link:
        link = await self._lookup.above(owner.owner, owner.namespace)
        if link.again_s is None:
            self._cache.pop(owner, None)
            self._cache[owner] = (self._clock() + KEPT_S, link)
            if len(self._cache) > MOST_LINKS:
                del self._cache[next(iter(self._cache))]
        return link
