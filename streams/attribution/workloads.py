"""What a node's NodeWorkloads records say, kept so that it can be asked as of the time of a sample.

Pods are kept per uid, because a StatefulSet's come back under the same name, and each with the versions that it had,
because a label may change. Everything here is pure and immutable; times are in ms since the epoch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from topics.allocations import Claim
from topics.samples import TOPIC as SAMPLES
from topics.workloads import TOPIC as WORKLOADS
from topics.workloads import NodeWorkloads, Pod

TOLERANCE_MS = 2_000
"""By how much a node's clock may differ from the API server's before a sample misses its pod."""

LISTED_MS = 10_000
"""So long after a pod's end the kubelet may list it rightly, for all that differs between clocks and what is told when;
later it only goes on listing it, as kubelets do that list the pods which ended, too."""

REMEMBERED_MS = ((WORKLOADS.retention_hours or 0) - (SAMPLES.retention_hours or 0)) * 3_600_000
"""So long after its end a pod is known to have ended: of as much the log tells who reads the oldest sample again."""

KEPT_MS = (SAMPLES.retention_hours or 0) * 3_600_000 + 3_600_000
"""For how long what has ended is kept where no sample says that it is not asked for any more: as long as one can be."""

T = TypeVar("T")

Versions = tuple[tuple[int, T], ...]
"""What something was from a time on, in order of time."""

PodName = tuple[str, str]
"""A pod's namespace and name."""

DraKey = tuple[str, str, str]
"""A DRA device's driver, pool and name."""


class Life(msgspec.Struct, frozen=True):
    """One pod, by uid: the versions that were known of it, and when it ran.

    ``told``: its end was told; otherwise it is only missing since.
    """

    uid: str
    versions: Versions[Pod]
    started_ms: int | None
    ended_ms: int | None
    told: bool = False

    def may_hold(self, ts_ms: int) -> bool:
        """Whether the kubelet may list it rightly at a time."""
        begun = self.started_ms is None or self.started_ms - ts_ms <= TOLERANCE_MS
        return begun and (self.ended_ms is None or ts_ms - self.ended_ms <= LISTED_MS)

    def distance_ms(self, ts_ms: int) -> int:
        """How far a time lies outside [started_ms, ended_ms); the two are of different clocks and may be crossed."""
        before = 0 if self.started_ms is None else self.started_ms - ts_ms
        after = 0 if self.ended_ms is None else ts_ms - self.ended_ms + 1
        return max(before, after, 0)

    def rank(self, ts_ms: int) -> tuple[int, int, str]:
        """Among several lives of one name the lowest is meant: the nearest in time, then the one that began last."""
        return self.distance_ms(ts_ms), -(self.started_ms or 0), self.uid


class Knowledge(msgspec.Struct, frozen=True):
    """Everything known of a node's pods. ``ended`` is when those were told to have ended that ``lives`` has no more."""

    epoch: int
    seq: int
    node_labels: Versions[dict[str, str]]
    dra: Versions[dict[DraKey, str]]
    admin: Versions[frozenset[Claim]]
    lives: dict[PodName, tuple[Life, ...]]
    ended: dict[PodName, tuple[int, ...]] = {}

    def pod_at(self, name: PodName, ts_ms: int) -> Pod | None:
        """The pod of that name that ran at a time, in the version of that time, or None."""
        lives = [life for life in self.lives.get(name, ()) if life.distance_ms(ts_ms) <= TOLERANCE_MS]
        if not lives:
            return None
        life = lives[0] if len(lives) == 1 else min(lives, key=lambda life: life.rank(ts_ms))
        return at(life.versions, ts_ms)

    def is_over(self, name: PodName, ts_ms: int) -> bool:
        """Whether a pod of that name was told to have ended long before a time, and no other one may be meant."""
        lives = self.lives.get(name, ())
        ends = [*self.ended.get(name, ()), *_told_ends(lives)]
        over = any(LISTED_MS < ts_ms - ended_ms <= REMEMBERED_MS for ended_ms in ends)
        return over and not any(life.may_hold(ts_ms) for life in lives)

    def runs(self, name: PodName) -> bool:
        """Whether a pod of that name has not ended, as far as is known."""
        return any(life.ended_ms is None for life in self.lives.get(name, ()))

    def pod_of(self, uid: str, ts_ms: int) -> Pod | None:
        """The pod of that uid, in the version of a time at which it ran, or None."""
        life = self.life_of(uid)
        return at(life.versions, ts_ms) if life and life.distance_ms(ts_ms) <= TOLERANCE_MS else None

    def life_of(self, uid: str) -> Life | None:
        """What is known of the pod of that uid."""
        for pods in self.lives.values():
            for life in pods:
                if life.uid == uid:
                    return life
        return None

    def node_labels_at(self, ts_ms: int) -> dict[str, str]:
        """The node's labels at a time."""
        return at(self.node_labels, ts_ms)

    def dra_at(self, ts_ms: int) -> dict[DraKey, str]:
        """The UUIDs of the DRA devices at a time."""
        return at(self.dra, ts_ms)

    def admin_at(self, ts_ms: int) -> frozenset[Claim]:
        """The devices that claims have only to look at them, at a time."""
        return at(self.admin, ts_ms)


def at(versions: Versions[T], ts_ms: int) -> T:
    """The version with the greatest time at or before ``ts_ms``, else the earliest."""
    if len(versions) == 1:
        return versions[0][1]
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    return versions[max(0, i - 1)][1]


def learn(known: Knowledge | None, record: NodeWorkloads) -> Knowledge:
    """What is known after a record. One of an older epoch, or an older or the same one again, changes nothing."""
    if known is not None and (record.epoch, record.seq) <= (known.epoch, known.seq):
        return known
    dra = {(d.driver, d.pool, d.device): d.uuid for d in record.dra_devices}
    learned = Knowledge(
        epoch=record.epoch,
        seq=record.seq,
        node_labels=_add(known.node_labels if known else (), record.ts_ms, record.node_labels),
        dra=_add(known.dra if known else (), record.ts_ms, dra),
        admin=_add(known.admin if known else (), record.ts_ms, frozenset(record.admin_claims)),
        lives=_learn_pods(known.lives if known else {}, record),
        ended=known.ended if known else {},
    )
    return forget_before(learned, record.ts_ms - KEPT_MS)


def forget_before(known: Knowledge, ts_ms: int) -> Knowledge:
    """Drop what no sample at or after a time can ask for."""
    lives, ended = {}, dict(known.ended)
    for name, pods in known.lives.items():
        kept = tuple(
            msgspec.structs.replace(life, versions=_since(life.versions, ts_ms))
            for life in pods
            if life.ended_ms is None or life.ended_ms + LISTED_MS >= ts_ms
        )
        if kept:
            lives[name] = kept
        if len(kept) < len(pods):
            left = [life for life in pods if life.ended_ms is not None and life.ended_ms + LISTED_MS < ts_ms]
            ended[name] = tuple(sorted({*ended.get(name, ()), *_told_ends(left)}))
    return msgspec.structs.replace(
        known,
        lives=lives,
        ended=_remembered(ended, ts_ms),
        node_labels=_since(known.node_labels, ts_ms),
        dra=_since(known.dra, ts_ms),
        admin=_since(known.admin, ts_ms),
    )


def _remembered(ended: Mapping[PodName, tuple[int, ...]], ts_ms: int) -> dict[PodName, tuple[int, ...]]:
    since_ms = ts_ms - REMEMBERED_MS
    return {name: kept for name, ends in ended.items() if (kept := tuple([end for end in ends if end >= since_ms]))}


def _told_ends(lives: Iterable[Life]) -> list[int]:
    return [life.ended_ms for life in lives if life.told and life.ended_ms is not None]


def _learn_pods(lives: Mapping[PodName, tuple[Life, ...]], record: NodeWorkloads) -> dict[PodName, tuple[Life, ...]]:
    learned = dict(lives)
    for pod in record.pods:
        name = (pod.namespace, pod.name)
        learned[name] = _with_pod(learned.get(name, ()), pod, record.ts_ms)
    present = {pod.uid for pod in record.pods}
    for name, pods in learned.items():
        if any(life.uid not in present and life.ended_ms is None for life in pods):
            learned[name] = tuple(_ended(life, record.ts_ms) if life.uid not in present else life for life in pods)
    return learned


def _with_pod(pods: tuple[Life, ...], pod: Pod, ts_ms: int) -> tuple[Life, ...]:
    life = next((life for life in pods if life.uid == pod.uid), None)
    versions = _add(life.versions if life else (), ts_ms, pod, same=_looks_the_same)
    started = pod.started_ms if pod.started_ms is not None else (life.started_ms if life else None)
    new = Life(pod.uid, versions, started, pod.ended_ms, told=pod.ended_ms is not None)
    return (*(other for other in pods if other.uid != pod.uid), new)


def _ended(life: Life, ts_ms: int) -> Life:
    """A pod that the cluster knows no more has ended, at the latest by the record that does not have it."""
    return life if life.ended_ms is not None else msgspec.structs.replace(life, ended_ms=ts_ms)


def _looks_the_same(a: Pod, b: Pod) -> bool:
    return (a.labels, a.annotations, a.namespace_labels, a.owners, a.owners_complete) == (
        b.labels,
        b.annotations,
        b.namespace_labels,
        b.owners,
        b.owners_complete,
    )


def _equal(a: T, b: T) -> bool:
    return a == b


def _add(versions: Versions[T], ts_ms: int, value: T, *, same: Callable[[T, T], bool] = _equal) -> Versions[T]:
    """The versions with one more, where it differs from what held at its time."""
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    if i and same(versions[i - 1][1], value):
        return versions
    return (*versions[:i], (ts_ms, value), *versions[i:])


def _since(versions: Versions[T], ts_ms: int) -> Versions[T]:
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    return versions[max(0, i - 1) :]
