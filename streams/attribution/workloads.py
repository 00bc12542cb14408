"""What a node's NodeWorkloads records say, kept so that it can be asked with two times.

The one is the time of a sample (``ts_ms``): which pod ran then, with which labels. The other is a log time
(``logged_ms``): what the records say that were logged by then. Whoever asks with both gets the same answer, whether it
has read just that far or much further. So every fact is kept with the log time from which it was known.

Pods are kept per uid, because a StatefulSet's come back under the same name, and each with the versions that it had,
because a label may change. Everything here is pure and immutable; times are in ms since the epoch.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from topics.allocations import Claim
from topics.samples import TOPIC as SAMPLES
from topics.workloads import TOPIC as WORKLOADS
from topics.workloads import NodeWorkloads, Pod

TOLERANCE_MS = 2_000
"""By how much a node's clock may differ from the API server's before a sample misses its pod."""

WHOLE_SECOND_MS = 999
"""By how much later than its ``started_ms`` a pod may have begun: the API server gives whole seconds."""

LISTED_MS = 10_000
"""So long after a pod's end the kubelet may list it rightly, because clocks and reports differ by so much.
Later the kubelet only goes on listing a pod that ended, as some do."""

REMEMBERED_MS = ((WORKLOADS.retention_hours or 0) - (SAMPLES.retention_hours or 0)) * 3_600_000
"""For so long after its end a pod is known to have ended: who reads the oldest sample again finds it in the log."""

KEPT_MS = (SAMPLES.retention_hours or 0) * 3_600_000 + 3_600_000
"""For how long what has ended is kept where no sample says that it is not asked for any more: as long as one can be."""

_FORGET_EVERY_MS = 600_000

T = TypeVar("T")

Versions = tuple[tuple[int, T], ...]
"""What something was from a time on, in order of time."""

History = tuple[tuple[int, T], ...]
"""What was known of something from a log time on, in order of log time."""

PodName = tuple[str, str]
"""A pod's namespace and name."""

DraKey = tuple[str, str, str]
"""A DRA device's driver, pool and name."""


class Life(msgspec.Struct, frozen=True):
    """What is known of one pod, by uid: its versions, and when it ran. ``seen_ms`` is the time of the first record.

    ``end_reported``: a record has its end; otherwise it is only missing since then.
    """

    uid: str
    versions: Versions[Pod]
    seen_ms: int
    started_ms: int | None
    ended_ms: int | None
    end_reported: bool = False

    def may_hold(self, ts_ms: int) -> bool:
        """Whether the kubelet may list it rightly at a time."""
        begun = self.started_ms is None or self.started_ms - ts_ms <= TOLERANCE_MS
        return begun and (self.ended_ms is None or ts_ms - self.ended_ms <= LISTED_MS)

    def began_before(self, ts_ms: int) -> bool:
        """Whether it surely ran before a time of another clock."""
        return self.started_ms is not None and self.started_ms + WHOLE_SECOND_MS + TOLERANCE_MS < ts_ms

    def ended_by(self, ts_ms: int) -> bool:
        """Whether its end was reported, and is not after a time."""
        return self.end_reported and self.ended_ms is not None and self.ended_ms <= ts_ms

    def distance_ms(self, ts_ms: int) -> int:
        """How far a time lies outside [started_ms, ended_ms); the two are of different clocks and may be crossed."""
        before = 0 if self.started_ms is None else self.started_ms - ts_ms
        after = 0 if self.ended_ms is None else ts_ms - self.ended_ms + 1
        return max(before, after, 0)


class Knowledge(msgspec.Struct, frozen=True):
    """Everything known of a node's pods, from the record that was logged at ``since_ms`` to that at ``logged_ms``.

    ``ended`` has the reported ends of the pods that are no longer in ``lives``.
    """

    epoch: int
    seq: int
    since_ms: int
    logged_ms: int
    node_labels: History[Versions[dict[str, str]]]
    dra: History[Versions[dict[DraKey, str]]]
    admin: History[Versions[frozenset[Claim]]]
    lives: dict[PodName, tuple[History[Life], ...]]
    ended: dict[PodName, History[int]] = {}

    def as_of(self, logged_ms: int) -> "AsOf | None":
        """What the records say that were logged at or before a time; None: there are none."""
        return AsOf(self, logged_ms) if self.since_ms <= logged_ms else None

    def first_logged_ms(self, uid: str) -> int | None:
        """When the first record was logged that has the pod of that uid."""
        history = self.history_of(uid)
        return history[0][0] if history else None

    def changes_ms(self, name: PodName, after_ms: int, until_ms: int) -> list[int]:
        """When records were logged, after one time and until another, that changed what is known of a name's pods."""
        logged = {logged_ms for history in self.lives.get(name, ()) for logged_ms, _ in history}
        return sorted(logged_ms for logged_ms in logged if after_ms < logged_ms <= until_ms)

    def history_of(self, uid: str) -> History[Life] | None:
        """What is known of the pod of that uid."""
        return next((h for pods in self.lives.values() for h in pods if h[0][1].uid == uid), None)


class Until(NamedTuple):
    """The first time of a sample, and the first log time, at which something else may be known."""

    ts_ms: float
    logged_ms: float


class AsOf(NamedTuple):
    """What was known of a node's pods at a log time."""

    known: Knowledge
    logged_ms: int

    def pod_at(self, name: PodName, ts_ms: int, since_ms: int | None = None) -> Pod | None:
        """The pod of that name that the kubelet may list rightly at a time, in the version of that time, or None.

        ``since_ms``: it is listed since then, so none is meant whose end was reported to be before.
        """
        for life in self._nearest(name, ts_ms):
            if life.may_hold(ts_ms) and (since_ms is None or not life.ended_by(since_ms)):
                return at(life.versions, ts_ms)
        return None

    def new_pod_at(self, name: PodName, ts_ms: int, gone_ms: int | None) -> Pod | None:
        """The same where the name is new in the snapshots: one that runs at that time.

        ``gone_ms``: a snapshot did not have the name then, so none is meant that surely ran before.
        """
        for life in self._nearest(name, ts_ms):
            if life.distance_ms(ts_ms) <= TOLERANCE_MS and (gone_ms is None or not life.began_before(gone_ms)):
                return at(life.versions, ts_ms)
        return None

    def is_over(self, name: PodName, ts_ms: int) -> bool:
        """Whether a pod of that name is reported to have ended long before a time, and no other one may be meant."""
        lives = self._lives(name)
        ends = [ended_ms for logged_ms, ended_ms in self.known.ended.get(name, ()) if logged_ms <= self.logged_ms]
        ends += [life.ended_ms for life in lives if life.end_reported and life.ended_ms is not None]
        over = any(LISTED_MS < ts_ms - ended_ms <= REMEMBERED_MS for ended_ms in ends)
        return over and not any(life.may_hold(ts_ms) for life in lives)

    def same_until(self, pods: Mapping[PodName, Pod], ts_ms: int) -> "Until":
        """Until when these names mean the pods that they mean at a time, and the node is as it is then.

        Each pod has to be the last one of its name, and running; of others nothing is promised.
        """
        known, logged_ms = self.known, self.logged_ms
        changes_ms, logged = [math.inf], [math.inf]
        for history in (known.node_labels, known.dra, known.admin):
            changes_ms.append(_next_ms(at(history, logged_ms), ts_ms))
            logged.append(_next_ms(history, logged_ms))
        for name, pod in pods.items():
            last = apart(self._lives(name))[-1]
            if last.uid != pod.uid or last.ended_ms is not None or last.distance_ms(ts_ms):
                return Until(ts_ms, logged_ms)
            changes_ms.append(_next_ms(last.versions, ts_ms))
            logged += [_next_ms(history, logged_ms) for history in known.lives[name]]
        return Until(min(changes_ms), min(logged))

    def pod_of(self, uid: str, ts_ms: int) -> Pod | None:
        """The pod of that uid, in the version of a time at which it ran, or None."""
        history = self.known.history_of(uid)
        life = _latest(history, self.logged_ms) if history else None
        return at(life.versions, ts_ms) if life and life.distance_ms(ts_ms) <= TOLERANCE_MS else None

    def node_labels_at(self, ts_ms: int) -> dict[str, str]:
        """The node's labels at a time."""
        return at(at(self.known.node_labels, self.logged_ms), ts_ms)

    def dra_at(self, ts_ms: int) -> dict[DraKey, str]:
        """The UUIDs of the DRA devices at a time."""
        return at(at(self.known.dra, self.logged_ms), ts_ms)

    def admin_at(self, ts_ms: int) -> frozenset[Claim]:
        """The devices that claims have only to look at them, at a time."""
        return at(at(self.known.admin, self.logged_ms), ts_ms)

    def _nearest(self, name: PodName, ts_ms: int) -> list[Life]:
        """The lives of a name, the one that is meant at a time first: the nearest, then the one that began last."""
        lives = self._lives(name)
        if len(lives) < 2:
            return lives
        return sorted(apart(lives), key=lambda life: (life.distance_ms(ts_ms), -(life.started_ms or 0), life.uid))

    def _lives(self, name: PodName) -> list[Life]:
        histories = self.known.lives.get(name, ())
        return [life for history in histories if (life := _latest(history, self.logged_ms)) is not None]


def apart(lives: Iterable[Life]) -> list[Life]:
    """The lives of one name, cut so that no two overlap: a name has one pod at a time.

    One ends when it is reported to, but within the second in which the next began by its record; the next begins there.
    """
    cut: list[Life] = []
    for life in sorted(lives, key=_order):
        if cut:
            before, begun_ms = cut[-1], life.started_ms if life.started_ms is not None else life.seen_ms
            latest_ms = begun_ms + WHOLE_SECOND_MS
            end_ms = latest_ms if before.ended_ms is None else min(before.ended_ms, latest_ms)
            cut[-1] = msgspec.structs.replace(before, ended_ms=end_ms)
            life = msgspec.structs.replace(life, started_ms=max(begun_ms, end_ms))
        cut.append(life)
    return cut


def _order(life: Life) -> tuple[int, int, str]:
    """Of the pods of one name: when each began, as far as it is known."""
    return (life.seen_ms if life.started_ms is None else life.started_ms), life.seen_ms, life.uid


def at(versions: Versions[T], ts_ms: int) -> T:
    """The version with the greatest time at or before ``ts_ms``, else the earliest."""
    if len(versions) == 1:
        return versions[0][1]
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    return versions[max(0, i - 1)][1]


def _next_ms(versions: Versions[T], ms: int) -> float:
    """The time of the first version, or of the first thing known, after a time."""
    if versions[-1][0] <= ms:
        return math.inf
    return versions[bisect_right(versions, ms, key=lambda version: version[0])][0]


def _latest(history: History[T], logged_ms: int) -> T | None:
    """What was known at a log time; None: nothing yet."""
    if history[-1][0] <= logged_ms:
        return history[-1][1]
    i = bisect_right(history, logged_ms, key=lambda version: version[0])
    return history[i - 1][1] if i else None


def learn(known: Knowledge | None, record: NodeWorkloads, logged_ms: int) -> Knowledge:
    """What is known after a record that was logged at ``logged_ms``, which is never less than the last one's.

    A record of an older epoch, or an older or the same one again, changes nothing.
    """
    if known is not None and (record.epoch, record.seq) <= (known.epoch, known.seq):
        return known
    dra = {(d.driver, d.pool, d.device): d.uuid for d in record.dra_devices}
    ts_ms, admin = record.ts_ms, frozenset(record.admin_claims)
    learned = Knowledge(
        epoch=record.epoch,
        seq=record.seq,
        since_ms=known.since_ms if known else logged_ms,
        logged_ms=logged_ms,
        node_labels=_noted(known.node_labels if known else (), logged_ms, ts_ms, record.node_labels),
        dra=_noted(known.dra if known else (), logged_ms, ts_ms, dra),
        admin=_noted(known.admin if known else (), logged_ms, ts_ms, admin),
        lives=_learn_pods(known.lives if known else {}, record, logged_ms),
        ended=known.ended if known else {},
    )
    if known is not None and known.logged_ms // _FORGET_EVERY_MS == logged_ms // _FORGET_EVERY_MS:
        return learned
    return forget_before(learned, ts_ms - KEPT_MS, logged_ms - KEPT_MS)


def forget_before(known: Knowledge, ts_ms: int, logged_ms: int) -> Knowledge:
    """Drop what no sample at or after ``ts_ms`` can ask for, as of ``logged_ms`` or later."""
    lives: dict[PodName, tuple[History[Life], ...]] = {}
    ended = dict(known.ended)
    for name, pods in known.lives.items():
        if all(len(history) == len(history[0][1].versions) == 1 and _runs(history[0][1]) for history in pods):
            lives[name] = pods
            continue
        recent = [_since(history, logged_ms) for history in pods]
        asked_for = [history for history in recent if not _over(history, ts_ms, logged_ms)]
        begun = min([_order(life) for history in asked_for for _, life in history], default=None)
        gone = [h for h in recent if _over(h, ts_ms, logged_ms) and (begun is None or _order(h[0][1]) < begun)]
        if len(gone) < len(recent):
            lives[name] = tuple([_with_versions_since(history, ts_ms) for history in recent if history not in gone])
        for ((known_ms, life),) in gone:
            if life.end_reported and life.ended_ms is not None:
                ended[name] = _with_end(ended.get(name, ()), known_ms, life.ended_ms)
    return msgspec.structs.replace(
        known,
        lives=lives,
        ended=_remembered(ended, ts_ms),
        node_labels=_both_since(known.node_labels, ts_ms, logged_ms),
        dra=_both_since(known.dra, ts_ms, logged_ms),
        admin=_both_since(known.admin, ts_ms, logged_ms),
    )


def _over(history: History[Life], ts_ms: int, logged_ms: int) -> bool:
    """Whether a pod had ended long before a time, and nothing else is said of it after a log time."""
    known_ms, life = history[0]
    said = len(history) == 1 and known_ms <= logged_ms
    return said and life.ended_ms is not None and life.ended_ms + LISTED_MS < ts_ms


def _with_end(ends: History[int], logged_ms: int, ended_ms: int) -> History[int]:
    return ends if any(end == ended_ms for _, end in ends) else tuple(sorted([*ends, (logged_ms, ended_ms)]))


def _remembered(ended: Mapping[PodName, History[int]], ts_ms: int) -> dict[PodName, History[int]]:
    since_ms = ts_ms - REMEMBERED_MS
    kept = {name: tuple([end for end in ends if end[1] >= since_ms]) for name, ends in ended.items()}
    return {name: ends for name, ends in kept.items() if ends}


def _learn_pods(
    lives: Mapping[PodName, tuple[History[Life], ...]], record: NodeWorkloads, logged_ms: int
) -> dict[PodName, tuple[History[Life], ...]]:
    learned = dict(lives)
    for pod in record.pods:
        name = (pod.namespace, pod.name)
        learned[name] = _with_pod(learned.get(name, ()), pod, record.ts_ms, logged_ms)
    present = {pod.uid for pod in record.pods}
    for name, pods in learned.items():
        if any(_runs(history[-1][1]) and history[-1][1].uid not in present for history in pods):
            learned[name] = tuple(_without(history, present, record.ts_ms, logged_ms) for history in pods)
    return learned


def _with_pod(pods: tuple[History[Life], ...], pod: Pod, ts_ms: int, logged_ms: int) -> tuple[History[Life], ...]:
    history = next((history for history in pods if history[-1][1].uid == pod.uid), ())
    life = history[-1][1] if history else None
    versions = _add(life.versions if life else (), ts_ms, pod, same=_looks_the_same)
    started = pod.started_ms if pod.started_ms is not None else (life.started_ms if life else None)
    seen_ms = life.seen_ms if life else ts_ms
    new = Life(pod.uid, versions, seen_ms, started, pod.ended_ms, end_reported=pod.ended_ms is not None)
    return (*(other for other in pods if other is not history), _then(history, logged_ms, new, same=_same_life))


def _without(history: History[Life], present: set[str], ts_ms: int, logged_ms: int) -> History[Life]:
    """A pod that the cluster knows no more has ended, at the latest by the record that does not have it."""
    life = history[-1][1]
    if not _runs(life) or life.uid in present:
        return history
    return _then(history, logged_ms, msgspec.structs.replace(life, ended_ms=ts_ms))


def _runs(life: Life) -> bool:
    return life.ended_ms is None


def _noted(history: History[Versions[T]], logged_ms: int, ts_ms: int, value: T) -> History[Versions[T]]:
    return _then(history, logged_ms, _add(history[-1][1] if history else (), ts_ms, value), same=operator.is_)


def _then(history: History[T], logged_ms: int, value: T, *, same: Callable[[T, T], bool] = operator.eq) -> History[T]:
    """What is known with one more record: of several that were logged in one ms, what the last one says."""
    if history and same(history[-1][1], value):
        return history
    return (*(history[:-1] if history and history[-1][0] == logged_ms else history), (logged_ms, value))


def _same_life(a: Life, b: Life) -> bool:
    return a.versions is b.versions and (
        a.started_ms,
        a.ended_ms,
        a.end_reported,
    ) == (b.started_ms, b.ended_ms, b.end_reported)


def _looks_the_same(a: Pod, b: Pod) -> bool:
    return (a.labels, a.annotations, a.namespace_labels, a.owners, a.owners_complete) == (
        b.labels,
        b.annotations,
        b.namespace_labels,
        b.owners,
        b.owners_complete,
    )


def _add(versions: Versions[T], ts_ms: int, value: T, *, same: Callable[[T, T], bool] = operator.eq) -> Versions[T]:
    """The versions with one more, where it differs from what held at its time."""
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    if i and same(versions[i - 1][1], value):
        return versions
    return (*versions[:i], (ts_ms, value), *versions[i:])


def _since(versions: Versions[T], ts_ms: int) -> Versions[T]:
    i = bisect_right(versions, ts_ms, key=lambda version: version[0])
    return versions[max(0, i - 1) :] if i > 1 else versions


def _with_versions_since(history: History[Life], ts_ms: int) -> History[Life]:
    if all(len(life.versions) == 1 for _, life in history):
        return history
    return tuple((ms, msgspec.structs.replace(life, versions=_since(life.versions, ts_ms))) for ms, life in history)


def _both_since(history: History[Versions[T]], ts_ms: int, logged_ms: int) -> History[Versions[T]]:
    return tuple((known_ms, _since(versions, ts_ms)) for known_ms, versions in _since(history, logged_ms))
