"""What is above one owner: how the API server is asked, and what its answers mean.

In: an owner reference, as a tenant's pod may have it; the API server's metadata of the owner. Out: the owner's own
controller, or that there is none, or when to ask again.
State: the kinds of each API group, the kinds that may not be read, and the groups that are left alone for a while.
On failure: what may not be read is tried again with pauses that grow to ten minutes, for an API server that has just
started refuses what it allows later; what makes no sense after ten minutes; an API that is away with growing pauses,
each group for itself.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from delivery.instruments import Instruments
from producers.cluster import instruments as names
from producers.cluster import objects
from producers.cluster.client import Answer, Requests, Unreachable
from producers.cluster.objects import Undecodable, controller, decode, reader
from producers.cluster.pods import as_owner
from topics.workloads import Owner

log = logging.getLogger(__name__)

AGAIN_S = 600.0
"""After how long to ask again what is not known, and at most what may not be read."""

REFUSED_S = 5.0
"""After how long to ask again what may not be read, the first time; the pause grows fourfold with each refusal."""

NEW_KIND_S = 30.0
"""After how long a kind that an API group did not have may be there."""

DEEPEST = 8
"""The most links of a chain."""

MOST_GROUPS = 256
AT_ONCE = 4
"""Requests of one API group at the same time: one that hangs holds up no other."""

TIMEOUT_S = 5.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0

_GROUP_VERSION = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?v[a-z0-9]{1,62}")
_NAME = re.compile(r"(?!\.{1,2}\Z)[^/%\x00-\x20\x7f]{1,253}")
_METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
_JSON = {"Accept": "application/json"}

_OBJECT = reader(objects.Object)
_RESOURCES = reader(objects.ApiResources)


class Kind(NamedTuple):
    """How a kind is asked for."""

    plural: str
    namespaced: bool


class Link(NamedTuple):
    """What is above an owner, and in how many seconds to ask again; None: never.

    ``known``: there was an answer. One that may not be read counts as nothing above: a chain ends there.
    """

    above: Owner | None
    again_s: float | None = None
    known: bool = True


TOP = Link(None)

_BUILT_IN = {
    ("v1", "Pod"): Kind("pods", namespaced=True),
    ("v1", "ReplicationController"): Kind("replicationcontrollers", namespaced=True),
    ("apps/v1", "ReplicaSet"): Kind("replicasets", namespaced=True),
    ("apps/v1", "Deployment"): Kind("deployments", namespaced=True),
    ("apps/v1", "StatefulSet"): Kind("statefulsets", namespaced=True),
    ("apps/v1", "DaemonSet"): Kind("daemonsets", namespaced=True),
    ("batch/v1", "Job"): Kind("jobs", namespaced=True),
    ("batch/v1", "CronJob"): Kind("cronjobs", namespaced=True),
}
_TOPS = {("v1", "Node")}
"""Kinds that nothing owns: a static pod's node."""


@dataclass(slots=True)
class _Group:
    """A version of an API group: what it serves, where that was asked, and until when it is left alone."""

    kinds: dict[str, Kind] | None = None
    asked_s: float = 0.0
    paused_until_s: float = 0.0
    failures: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


class _Refusal(NamedTuple):
    """That a kind may not be read in a namespace: when that was said, and how long it is believed."""

    at_s: float
    pause_s: float


class OwnerLookup:
    """Asks for owners, several of one API group at the same time, but not many."""

    def __init__(self, api: Requests, instruments: Instruments, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._instruments, self._clock = api, instruments, clock
        self._groups: dict[str, _Group] = {}
        self._refused: dict[tuple[str, str, str], _Refusal] = {}
        self._told_of: dict[tuple[str, str], None] = {}

    async def above(self, owner: Owner, namespace: str) -> Link:
        """Ask the API server what is above an owner."""
        kind = (owner.api_version, owner.kind)
        if kind in _TOPS:
            return TOP
        if not _GROUP_VERSION.fullmatch(owner.api_version) or not _NAME.fullmatch(owner.name):
            return self._ended(owner, "malformed", None)
        group = self._group(owner.api_version)
        async with group.slots:
            paused_s, refused_s = group.paused_until_s - self._clock(), self._refused_for_s((*kind, namespace))
            if max(paused_s, refused_s) > 0:
                return Link(None, _spread(max(paused_s, refused_s)), known=refused_s > 0)
            try:
                return await self._ask_now(group, owner, namespace)
            except Unreachable:
                return self._away(group, owner, None)

    async def _ask_now(self, group: _Group, owner: Owner, namespace: str) -> Link:
        resource = _BUILT_IN.get((owner.api_version, owner.kind))
        if resource is None:
            known = await self._kinds(group, owner)
            if isinstance(known, Link):
                return known
            resource = known.get(owner.kind)
            if resource is None:
                return self._ended(owner, "unknown_kind", AGAIN_S)
        path = _path(owner, resource, namespace)
        answer = await self._api.request("GET", path, headers=_METADATA_ONLY, timeout_s=TIMEOUT_S)
        return self._read(group, owner, namespace, answer)

    async def _kinds(self, group: _Group, owner: Owner) -> dict[str, Kind] | Link:
        """The kinds that a version of an API group serves; a link that ends the chain where that can't be known."""
        if group.kinds is not None:
            good_for_s = AGAIN_S if owner.kind in group.kinds else NEW_KIND_S
            if self._clock() - group.asked_s < good_for_s:
                return group.kinds
        answer = await self._api.request("GET", _base(owner.api_version), headers=_JSON, timeout_s=TIMEOUT_S)
        if answer.status == 404:
            group.kinds = {}
        elif answer.status != 200:
            return self._not_read(group, owner, "", answer)
        else:
            try:
                served = decode(_RESOURCES, answer.body).resources or ()
            except Undecodable:
                return self._undecodable(owner)
            group.kinds = {row.kind: Kind(row.name, row.namespaced) for row in served if "/" not in row.name}
        group.asked_s, group.failures = self._clock(), 0
        return group.kinds

    def _read(self, group: _Group, owner: Owner, namespace: str, answer: Answer) -> Link:
        """What an answer says of the owner's own controller."""
        if answer.status == 404:
            return self._ended(owner, "gone", None)
        if answer.status != 200:
            return self._not_read(group, owner, namespace, answer)
        group.failures = 0
        try:
            meta = decode(_OBJECT, answer.body).metadata
        except Undecodable:
            return self._undecodable(owner)
        if meta.uid != owner.uid:
            return self._ended(owner, "gone", None)
        self._count(owner, "ok")
        self._refused.pop((owner.api_version, owner.kind, namespace), None)
        above = controller(meta)
        return Link(as_owner(above)) if above else TOP

    def _not_read(self, group: _Group, owner: Owner, namespace: str, answer: Answer) -> Link:
        """An answer that says nothing of the owner: the API is away for now, or does not let it be read."""
        if answer.status in (401, 408, 429) or answer.status >= 500:
            return self._away(group, owner, answer.retry_after_s)
        kind = (owner.api_version, owner.kind)
        pause_s = self._refuse((*kind, namespace))
        if kind not in self._told_of:
            self._told_of[kind] = None
            if len(self._told_of) > MOST_GROUPS:
                del self._told_of[next(iter(self._told_of))]
            what = f"{owner.kind} of {owner.api_version}"
            log.warning("%s: not to be read (HTTP %d); owner chains end there", what, answer.status)
        return self._ended(owner, "forbidden" if answer.status == 403 else "refused", pause_s)

    def too_long(self, owner: Owner, pod_side: Owner) -> None:
        """A chain was not followed above ``owner``: it has too many links, or comes back to one of them."""
        self._count(owner, "too_long")
        what = f"{pod_side.kind} {pod_side.name}"
        log.warning("%s: its chain of owners has more than %d links, or is a ring: no workload", what, DEEPEST)

    def _refused_for_s(self, key: tuple[str, str, str]) -> float:
        """For how long a refusal is still believed; 0 or less: it is not."""
        refusal = self._refused.get(key)
        return refusal.at_s + refusal.pause_s - self._clock() if refusal else 0.0

    def _refuse(self, key: tuple[str, str, str]) -> float:
        """Note a refusal; how long it is believed. Those of long ago are forgotten, so that they never grow many."""
        now_s, before = self._clock(), self._refused.pop(key, None)
        while self._refused and (oldest := next(iter(self._refused.items())))[1].at_s + 2 * AGAIN_S <= now_s:
            del self._refused[oldest[0]]
        pause_s = min(AGAIN_S, 4 * before.pause_s) if before else REFUSED_S
        if before and before.at_s + before.pause_s > now_s:  # several were asked for at once
            now_s, pause_s = before
        self._refused[key] = _Refusal(now_s, pause_s)
        return pause_s

    def _away(self, group: _Group, owner: Owner, retry_after_s: float | None) -> Link:
        """Leave the API group alone for a while."""
        self._count(owner, "away")
        pause_s = min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** min(group.failures, 10))
        group.failures += 1
        pause_s = max(pause_s, min(LONGEST_PAUSE_S, retry_after_s or 0.0))
        group.paused_until_s = self._clock() + pause_s
        return Link(None, _spread(pause_s), known=False)

    def _undecodable(self, owner: Owner) -> Link:
        self._instruments.counter(names.UNDECODABLE, "owners").inc()
        return self._ended(owner, "undecodable", AGAIN_S)._replace(known=False)

    def _ended(self, owner: Owner, result: str, again_s: float | None) -> Link:
        self._count(owner, result)
        return Link(None, None if again_s is None else _spread(again_s))

    def _count(self, owner: Owner, result: str) -> None:
        """A kind that the API server is not known to have may be any text: it is counted as other."""
        kinds = self._group(owner.api_version).kinds or {}
        known = (owner.api_version, owner.kind) in _BUILT_IN or owner.kind in kinds
        self._instruments.counter(names.OWNER_REQUESTS, owner.kind if known else "other", result).inc()

    def _group(self, api_version: str) -> _Group:
        group = self._groups.pop(api_version, None) or _Group()
        self._groups[api_version] = group
        if len(self._groups) > MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return group


def _base(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _path(owner: Owner, resource: Kind, namespace: str) -> str:
    of_namespace = f"/namespaces/{quote(namespace, safe='')}" if resource.namespaced else ""
    return f"{_base(owner.api_version)}{of_namespace}/{resource.plural}/{quote(owner.name, safe='')}"


def _spread(wait_s: float) -> float:
    """A little more, so that not all who wait come back at once."""
    return wait_s * random.uniform(1.0, 1.2)
