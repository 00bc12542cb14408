"""What the records of gpu.workloads say about a node's pods, kept so that it can be asked with two times.

- ``ts_ms`` is the time of a sample: which pod ran then, and with which labels? Pods are kept by uid, because a
  StatefulSet's pods come back under the same name. Each has the versions that it had, because a label may change.
- ``logged_ms`` is a log time: what do the records say that were logged by then? So every fact is kept with the log time
  from which it was known.

A reader that has read just to that log time and one that has read a day further get the same answer.
Pure and immutable. Times are in ms since the epoch.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from sys import intern
from typing import NamedTuple, TypeVar

import msgspec

from topics.allocations import Claim
from topics.samples import TOPIC as SAMPLES
from topics.workloads import TOPIC as WORKLOADS
from topics.workloads import NodeWorkloads, Owner, Pod, UnwellDevice

TOLERANCE_MS = 2_000  # by how much a node's clock may differ from the API server's before a sample misses its pod
WHOLE_SECOND_MS = 999  # by how much later than its started_ms a pod may have begun: the API server gives whole seconds
LISTED_MS = 10_000  # so long after its end the kubelet may rightly list a pod: clocks and reports differ by so much
REMEMBERED_MS = ((WORKLOADS.retention_hours or 0) - (SAMPLES.retention_hours or 0)) * 3_600_000
"""For how long an end is remembered: a reader that reads the oldest sample again finds it in the log."""

KEPT_MS = (SAMPLES.retention_hours or 0) * 3_600_000 + 3_600_000
"""For how long what has ended is kept if no sample says that it is not needed: as long as a sample can ask for it."""

_FORGET_EVERY_MS = 600_000

T = TypeVar("T")
Versions = tuple[tuple[int, T], ...]  # what something was from a time on, in order of time
History = tuple[tuple[int, T], ...]  # what was known of something from a log time on, in order of log time
PodName = tuple[str, str]  # a pod's namespace and name
DraKey = tuple[str, str, str]  # a DRA device's driver, pool and name
_replace = msgspec.structs.replace
_looks = operator.attrgetter("labels", "annotations", "namespace_labels", "owners_complete", "waiting", "restarts")
_owner = operator.attrgetter("api_version", "kind", "name")


class Life(msgspec.Struct, frozen=True, gc=False):
    """What is known of one pod, by uid: its versions, and when it ran. ``seen_ms`` is the time of its first record.
    ``end_reported``: a record has its end. Otherwise the pod is only missing since ``ended_ms``."""

    uid: str
    versions: Versions[Pod]
    seen_ms: int
    started_ms: int | None
    ended_ms: int | None
    end_reported: bool = False

    def may_hold(self, ts_ms: int) -> bool:
        """Whether the kubelet may rightly list it at a time."""
        begun = self.started_ms is None or self.started_ms - ts_ms <= TOLERANCE_MS
        return begun and (self.ended_ms is None or ts_ms - self.ended_ms <= LISTED_MS)

    def began_before(self, ts_ms: int) -> bool:
        """Whether it certainly ran before a time of another clock."""
        return self.started_ms is not None and self.started_ms + WHOLE_SECOND_MS + TOLERANCE_MS < ts_ms

    def ended_by(self, ts_ms: int) -> bool:
        """Whether its end was reported, and is not after a time."""
        return self.end_reported and self.ended_ms is not None and self.ended_ms <= ts_ms

    def distance_ms(self, ts_ms: int) -> int:
        """How far a time lies outside [started_ms, ended_ms). The two are of different clocks and may be crossed."""
        before = 0 if self.started_ms is None else self.started_ms - ts_ms
        after = 0 if self.ended_ms is None else ts_ms - self.ended_ms + 1
        return max(before, after, 0)

    def order(self) -> tuple[int, int, str]:
        """Sorts the pods of one name by when each began, as far as that is known."""
        return (self.seen_ms if self.started_ms is None else self.started_ms), self.seen_ms, self.uid


Lives = dict[PodName, tuple[History[Life], ...]]  # the pods that each name has had


class Knowledge(msgspec.Struct, frozen=True):
    """All that is known of a node's pods, from the record that was logged at ``since_ms`` to that at ``logged_ms``.

    ``ended`` has the reported ends of the pods that are no longer in ``lives``. ``admin`` has the devices that claims
    have only to look at them.
    """

    epoch: int
    seq: int
    since_ms: int
    logged_ms: int
    node_labels: History[Versions[dict[str, str]]]
    dra: History[Versions[dict[DraKey, str]]]
    admin: History[Versions[frozenset[Claim]]]
    unwell: History[Versions[tuple[UnwellDevice, ...]]]
    lives: Lives
    ended: dict[PodName, History[int]] = {}

    def as_of(self, logged_ms: int) -> "AsOf | None":
        """What the records say that were logged at or before a time; None: there are none."""
        return AsOf(self, logged_ms) if self.since_ms <= logged_ms else None

    def history_of(self, uid: str) -> History[Life] | None:
        return next((h for pods in self.lives.values() for h in pods if h[0][1].uid == uid), None)

    def changes_ms(self, name: PodName, after_ms: int, until_ms: int) -> list[int]:
        """When records were logged, after one time and until another, that changed what is known of a name's pods."""
        logged = {logged_ms for history in self.lives.get(name, ()) for logged_ms, _ in history}
        return sorted(logged_ms for logged_ms in logged if after_ms < logged_ms <= until_ms)


class Until(NamedTuple):
    """The first time of a sample, and the first log time, at which something else may be known."""

    ts_ms: float
    logged_ms: float


class NodeFacts(NamedTuple):
    """A node: its labels, the UUIDs of its DRA devices, the claims for administration, and its devices that are not
    well."""

    labels: dict[str, str]
    dra: dict[DraKey, str]
    admin: frozenset[Claim]
    unwell: tuple[UnwellDevice, ...] = ()


class AsOf(NamedTuple):
    """What was known of a node's pods at a log time."""

    known: Knowledge
    logged_ms: int

    def pod_at(self, name: PodName, ts_ms: int, since_ms: int | None = None) -> Pod | None:
        """The pod of that name that the kubelet may rightly list at a time, in the version of that time, or None.
        ``since_ms``: the name is listed since then, so it is no pod whose end was reported to be before."""
        for life in self._nearest(name, ts_ms):
            if life.may_hold(ts_ms) and (since_ms is None or not life.ended_by(since_ms)):
                return at(life.versions, ts_ms)
        return None

    def new_pod_at(self, name: PodName, ts_ms: int, gone_ms: int | None) -> Pod | None:
        """The same for a name that is new in the snapshots: a pod that runs at that time.
        ``gone_ms``: a snapshot did not have the name then, so it is no pod that certainly ran before."""
        for life in self._nearest(name, ts_ms):
            if life.distance_ms(ts_ms) <= TOLERANCE_MS and (gone_ms is None or not life.began_before(gone_ms)):
                return at(life.versions, ts_ms)
        return None

    def is_over(self, name: PodName, ts_ms: int, gone_ms: int | None = None) -> bool:
        """Whether a pod of that name is reported to have ended long before a time, and the name means no other pod.
        ``gone_ms``: a snapshot did not have the name then, so what is listed now is no pod that had ended by then."""
        lives = self._lives(name)
        ends = [ended_ms for logged_ms, ended_ms in self.known.ended.get(name, ()) if logged_ms <= self.logged_ms]
        ends += [life.ended_ms for life in lives if life.end_reported and life.ended_ms is not None]
        after_ms = max(ts_ms - REMEMBERED_MS, 0 if gone_ms is None else gone_ms + 1)
        over = any(after_ms <= ended_ms < ts_ms - LISTED_MS for ended_ms in ends)
        return over and not any(life.may_hold(ts_ms) for life in lives)

    def pod_of(self, uid: str, ts_ms: int) -> Pod | None:
        """The pod of that uid, in the version of a time at which it ran, or None."""
        history = self.known.history_of(uid)
        life = _latest(history, self.logged_ms) if history else None
        return at(life.versions, ts_ms) if life and life.distance_ms(ts_ms) <= TOLERANCE_MS else None

    def node_at(self, ts_ms: int) -> NodeFacts:
        """The node at a time."""
        known, logged_ms = self.known, self.logged_ms
        labels, dra, admin = at(known.node_labels, logged_ms), at(known.dra, logged_ms), at(known.admin, logged_ms)
        return NodeFacts(at(labels, ts_ms), at(dra, ts_ms), at(admin, ts_ms), at(at(known.unwell, logged_ms), ts_ms))

    def same_until(self, pods: Mapping[PodName, Pod], ts_ms: int) -> Until:
        """Until when these names mean the pods that they mean at a time, and the node is as it is then.
        Each pod has to be the last one of its name, and running; of others nothing is promised."""
        known, logged_ms = self.known, self.logged_ms
        changes_ms, logged = [math.inf], [math.inf]
        for history in (known.node_labels, known.dra, known.admin, known.unwell):
            changes_ms.append(_next_ms(at(history, logged_ms), ts_ms))
            logged.append(_next_ms(history, logged_ms))
        for name, pod in pods.items():
            last = apart(self._lives(name))[-1]
            if last.uid != pod.uid or last.ended_ms is not None or last.distance_ms(ts_ms):
                return Until(ts_ms, logged_ms)
            changes_ms.append(_next_ms(last.versions, ts_ms))
            logged += [_next_ms(history, logged_ms) for history in known.lives[name]]
        return Until(min(changes_ms), min(logged))

    def _nearest(self, name: PodName, ts_ms: int) -> list[Life]:
        """The lives of a name, the most likely one at a time first: the nearest, then the one that began last."""
        lives = self._lives(name)
        if len(lives) < 2:
            return lives
        return sorted(apart(lives), key=lambda life: (life.distance_ms(ts_ms), -(life.started_ms or 0), life.uid))

    def _lives(self, name: PodName) -> list[Life]:
        histories = self.known.lives.get(name, ())
        return [life for history in histories if (life := _latest(history, self.logged_ms)) is not None]


def apart(lives: Iterable[Life]) -> list[Life]:
    """The lives of one name, cut so that no two overlap: a name has one pod at a time.

    A life ends when its end was reported, and at the latest within the second in which the next one began by its
    record. The next one begins there.
    """
    cut: list[Life] = []
    for life in sorted(lives, key=Life.order):
        if cut:
            before, begun_ms = cut[-1], life.started_ms if life.started_ms is not None else life.seen_ms
            latest_ms = begun_ms + WHOLE_SECOND_MS
            end_ms = latest_ms if before.ended_ms is None else min(before.ended_ms, latest_ms)
            cut[-1] = _replace(before, ended_ms=end_ms)
            life = _replace(life, started_ms=max(begun_ms, end_ms))
        cut.append(life)
    return cut


# -- what a record adds


def learn(known: Knowledge | None, record: NodeWorkloads, logged_ms: int) -> Knowledge:
    """What is known after a record that was logged at ``logged_ms``, which is never less than the last one's.
    A record of an older epoch, or with an older or the same ``seq``, changes nothing."""
    if known is not None and (record.epoch, record.seq) <= (known.epoch, known.seq):
        return known

    def noted(history: History[Versions[T]], value: T) -> History[Versions[T]]:
        return _then(history, logged_ms, _add(history[-1][1] if history else (), record.ts_ms, value))

    dra = {(d.driver, d.pool, d.device): d.uuid for d in record.dra_devices}
    learned = Knowledge(
        epoch=record.epoch,
        seq=record.seq,
        since_ms=known.since_ms if known else logged_ms,
        logged_ms=logged_ms,
        node_labels=noted(known.node_labels if known else (), record.node_labels),
        dra=noted(known.dra if known else (), dra),
        admin=noted(known.admin if known else (), frozenset(record.admin_claims)),
        unwell=noted(known.unwell if known else (), record.unwell),
        lives=_with_pods(known.lives if known else {}, record, logged_ms),
        ended=known.ended if known else {},
    )
    if known is not None and known.logged_ms // _FORGET_EVERY_MS == logged_ms // _FORGET_EVERY_MS:
        return learned
    return forget_before(learned, record.ts_ms - KEPT_MS, logged_ms - KEPT_MS)


def _with_pods(lives: Lives, record: NodeWorkloads, logged_ms: int) -> Lives:
    """The lives with what a record says of its pods. A pod that it does not have has ended, at the latest by then."""
    learned = dict(lives)
    for pod in record.pods:
        name = (pod.namespace, pod.name)
        pods = learned.get(name, ())
        history = next((history for history in pods if history[-1][1].uid == pod.uid), ())
        last = history[-1][1] if history else None
        pod = pod if last else _sharing(pod)
        versions = _add(last.versions if last else (), record.ts_ms, pod, same=_alike)
        started_ms = last.started_ms if last and pod.started_ms is None else pod.started_ms
        seen_ms = last.seen_ms if last else record.ts_ms
        life = Life(pod.uid, versions, seen_ms, started_ms, pod.ended_ms, end_reported=pod.ended_ms is not None)
        learned[name] = (*(other for other in pods if other is not history), _then(history, logged_ms, life))
    present = {pod.uid for pod in record.pods}
    for name, pods in learned.items():
        missing = [h for h in pods if (life := h[-1][1]).ended_ms is None and life.uid not in present]
        if missing:
            ended = [_replace(history[-1][1], ended_ms=record.ts_ms) for history in missing]
            changed = {life.uid: _then(h, logged_ms, life) for h, life in zip(missing, ended, strict=True)}
            learned[name] = tuple([changed.get(history[-1][1].uid, history) for history in pods])
    return learned


def _alike(a: Pod, b: Pod) -> bool:
    """Whether a holder looks the same by two versions of its pod."""
    return _looks(a) == _looks(b) and list(map(_owner, a.owners)) == list(map(_owner, b.owners))


def _sharing(pod: Pod) -> Pod:
    """The same pod, but what it has in common with others is one object: a fleet has few namespaces and kinds. Its
    owners are kept without their uids, which nobody asks for."""
    return _replace(
        pod,
        namespace=intern(pod.namespace),
        phase=intern(pod.phase) if pod.phase else pod.phase,
        labels={name: intern(text) for name, text in pod.labels.items()},
        annotations=_labels(*pod.annotations.items()),
        namespace_labels=_labels(*pod.namespace_labels.items()),
        owners=tuple([Owner(intern(o.api_version), intern(o.kind), o.name) for o in pod.owners]),
    )


@lru_cache(maxsize=4096)
def _labels(*labels: tuple[str, str]) -> dict[str, str]:
    return dict(labels)


# -- what may be forgotten


def forget_before(known: Knowledge, ts_ms: int, logged_ms: int) -> Knowledge:
    """Drop what no sample at or after ``ts_ms`` can ask for, as of ``logged_ms`` or later."""
    lives: Lives = {}
    ended = dict(known.ended)
    for name, pods in known.lives.items():
        if all(len(h) == 1 and len(h[0][1].versions) == 1 and h[0][1].ended_ms is None for h in pods):
            lives[name] = pods
            continue
        recent = [_since(history, logged_ms) for history in pods]
        asked_for = [history for history in recent if not _over(history, ts_ms, logged_ms)]
        begun = min([life.order() for history in asked_for for _, life in history], default=None)
        gone = [h for h in recent if _over(h, ts_ms, logged_ms) and (begun is None or h[0][1].order() < begun)]
        if asked_for and gone:
            gone.remove(max(gone, key=lambda history: history[0][1].order()))  # where it ended, the next one began
        if len(gone) < len(recent):
            left = [history for history in recent if history not in gone]
            cut = [[(ms, _replace(life, versions=_since(life.versions, ts_ms))) for ms, life in one] for one in left]
            lives[name] = tuple(map(tuple, cut))
        for ((known_ms, life),) in gone:
            ends = ended.get(name, ())
            if life.end_reported and life.ended_ms is not None and all(end != life.ended_ms for _, end in ends):
                ended[name] = tuple(sorted([*ends, (known_ms, life.ended_ms)]))
    remembered = {name: tuple([e for e in ends if e[1] >= ts_ms - REMEMBERED_MS]) for name, ends in ended.items()}

    def since(history: History[Versions[T]]) -> History[Versions[T]]:
        return tuple((known_ms, _since(versions, ts_ms)) for known_ms, versions in _since(history, logged_ms))

    return _replace(
        known,
        lives=lives,
        ended={name: ends for name, ends in remembered.items() if ends},
        node_labels=since(known.node_labels),
        dra=since(known.dra),
        admin=since(known.admin),
        unwell=since(known.unwell),
    )


def _over(history: History[Life], ts_ms: int, logged_ms: int) -> bool:
    """Whether a pod had ended long before a time, and nothing else is said of it after a log time."""
    known_ms, life = history[0]
    is_last = len(history) == 1 and known_ms <= logged_ms
    return is_last and life.ended_ms is not None and life.ended_ms + LISTED_MS < ts_ms


# -- versions and histories


def at(versions: Versions[T], ts_ms: int) -> T:
    """The version with the greatest time at or before ``ts_ms``, else the earliest."""
    return versions[0][1] if len(versions) == 1 else versions[max(0, _count_until(versions, ts_ms) - 1)][1]


def _latest(history: History[T], logged_ms: int) -> T | None:
    """What was known at a log time; None: nothing yet."""
    if history[-1][0] <= logged_ms:
        return history[-1][1]
    count = _count_until(history, logged_ms)
    return history[count - 1][1] if count else None


def _next_ms(versions: Versions[T], ms: int) -> float:
    """The first time after ``ms`` at which something else holds or is known."""
    return math.inf if versions[-1][0] <= ms else versions[_count_until(versions, ms)][0]


def _since(versions: Versions[T], ms: int) -> Versions[T]:
    """What holds at ``ms`` or later."""
    count = _count_until(versions, ms)
    return versions[count - 1 :] if count > 1 else versions


def _add(versions: Versions[T], ts_ms: int, value: T, *, same: Callable[[T, T], bool] = operator.eq) -> Versions[T]:
    """The versions with one more, if it differs from what held at its time."""
    count = _count_until(versions, ts_ms)
    if count and same(versions[count - 1][1], value):
        return versions
    return (*versions[:count], (ts_ms, value), *versions[count:])


def _then(history: History[T], logged_ms: int, value: T) -> History[T]:
    """The history with what is known by one more record. Of several logged in the same ms, the last one counts."""
    if history and history[-1][1] == value:
        return history
    return (*(history[:-1] if history and history[-1][0] == logged_ms else history), (logged_ms, value))


def _count_until(versions: Versions[T], ms: int) -> int:
    """How many of them are from ``ms`` or before."""
    return bisect_right(versions, ms, key=operator.itemgetter(0))
