"""What the records of gpu.workloads say about a node's pods, indexed by two times.

- ``ts_ms`` is the time of a sample: which pod ran then, and with which labels? Pods are kept by uid, because a
  StatefulSet creates its pods again under the same names. A pod has several versions, because a label may change.
- ``logged_ms`` is a log time: what do the records say that were logged by then? Every fact is kept with the log time
  from which it was known.

So a reader that has read up to that log time and a reader that is a day further get the same answer.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from topics.allocations import Claim
from topics.samples import TOPIC as SAMPLES
from topics.topic import shared
from topics.workloads import TOPIC as WORKLOADS
from topics.workloads import NodeWorkloads, Owner, Pod, UnwellDevice

TOLERANCE_MS = 2_000  # how far a node's clock may differ from the API server's before a sample misses its pod
WHOLE_SECOND_MS = 999  # a pod may have started this much after its started_ms: the API server gives whole seconds
LISTED_MS = 10_000  # the kubelet may still list a pod this long after its end: clocks differ, and reports are late
REMEMBERED_MS = ((WORKLOADS.retention_hours or 0) - (SAMPLES.retention_hours or 0)) * 3_600_000
"""For how long the end of a pod is remembered: a reader of the oldest sample still finds it in the log."""

KEPT_MS = (SAMPLES.retention_hours or 0) * 3_600_000 + 3_600_000
"""For how long an ended pod is kept if no commit shows that it is not needed: as long as a sample may refer to it."""

EMPTY: frozenset[Any] = frozenset()
"""What is kept where a set has nothing in it: each further empty set would take 216 bytes."""

_FORGET_EVERY_MS = 600_000

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Since(msgspec.Struct, Generic[T_co], frozen=True, gc=False, order=True):
    """A value, and the time from which it held or was known. It has half the size of a tuple of the two."""

    ms: int
    value: T_co


Versions = tuple[Since[T], ...]  # values by the time from which they held, oldest first
History = tuple[Since[T], ...]  # values by the log time from which they were known, oldest first
PodName = tuple[str, str]  # a pod's namespace and name
DraKey = tuple[str, str, str]  # a DRA device's driver, pool and name
_replace = msgspec.structs.replace
_holder_fields = operator.attrgetter(
    "labels", "annotations", "namespace_labels", "owners", "owners_complete", "waiting", "restarts"
)
_since_ms = operator.attrgetter("ms")
_owner_fields = operator.attrgetter("api_version", "kind", "name")


class Lifetime(msgspec.Struct, frozen=True, gc=False):
    """What is known of one pod, by uid: its versions, and when it ran.

    ``first_seen_ms`` is the time of the first record that has it. If ``end_reported`` is false, ``ended_ms`` is the
    time of the first record that does not have it any more.
    """

    uid: str
    versions: Versions[Pod]
    first_seen_ms: int
    started_ms: int | None
    ended_ms: int | None
    end_reported: bool = False

    def may_be_listed(self, ts_ms: int) -> bool:
        """Whether the kubelet may rightly list the pod at a time."""
        started = self.started_ms is None or self.started_ms - ts_ms <= TOLERANCE_MS
        return started and (self.ended_ms is None or ts_ms - self.ended_ms <= LISTED_MS)

    def started_before(self, ts_ms: int) -> bool:
        """Whether the pod certainly ran before a time of another clock."""
        return self.started_ms is not None and self.started_ms + WHOLE_SECOND_MS + TOLERANCE_MS < ts_ms

    def ended_by(self, ts_ms: int) -> bool:
        """Whether a record reports that the pod ended at or before a time."""
        return self.end_reported and self.ended_ms is not None and self.ended_ms <= ts_ms

    def distance_ms(self, ts_ms: int) -> int:
        """How far a time lies outside [started_ms, ended_ms). They are of different clocks: the end may be first."""
        before = 0 if self.started_ms is None else self.started_ms - ts_ms
        after = 0 if self.ended_ms is None else ts_ms - self.ended_ms + 1
        return max(before, after, 0)

    def start_order(self) -> tuple[int, int, str]:
        """The key that sorts the pods of one name by their start, as far as it is known: else by when the pod was first
        seen, or by its end, if that was before. A record may come again long after the end of a pod."""
        seen_ms = self.first_seen_ms if self.ended_ms is None else min(self.first_seen_ms, self.ended_ms)
        return (seen_ms if self.started_ms is None else self.started_ms), seen_ms, self.uid


Lifetimes = dict[PodName, tuple[History[Lifetime], ...]]  # the pods that each name has had


class KnownWorkloads(msgspec.Struct, frozen=True):
    """All that is known of a node's pods, by the records that were logged from ``since_ms`` to ``logged_ms``.

    ``ends`` has the reported ends of pods that are no longer in ``lifetimes``. ``admin`` has the devices that a claim
    for administration gives access to; such a claim does not hold them.
    """

    since_ms: int
    logged_ms: int
    epoch: int = -1
    seq: int = -1
    node_labels: History[Versions[dict[str, str]]] = ()
    dra: History[Versions[dict[DraKey, str]]] = ()
    admin: History[Versions[frozenset[Claim]]] = ()
    unwell: History[Versions[tuple[UnwellDevice, ...]]] = ()
    lifetimes: Lifetimes = {}
    ends: dict[PodName, History[int]] = {}

    def history_of(self, uid: str) -> History[Lifetime] | None:
        """What was known of the pod of a uid, by log time; None: no record has it."""
        return next((h for histories in self.lifetimes.values() for h in histories if h[0].value.uid == uid), None)

    def changes_ms(self, name: PodName, after_ms: int, until_ms: int) -> list[int]:
        """The log times of the records that changed what is known of a name's pods: after one time, until another."""
        logged = {known.ms for history in self.lifetimes.get(name, ()) for known in history}
        return sorted(logged_ms for logged_ms in logged if after_ms < logged_ms <= until_ms)


class ValidUntil(NamedTuple):
    """The first sample time, and the first log time, at which an answer may be another one."""

    ts_ms: float
    logged_ms: float


class NodeFacts(NamedTuple):
    """A node's labels, the UUIDs of its DRA devices, its claims for administration, and its unwell devices."""

    labels: dict[str, str]
    dra: dict[DraKey, str]
    admin: frozenset[Claim]
    unwell: tuple[UnwellDevice, ...] = ()


class AsOf(NamedTuple):
    """What was known of a node's pods at a log time: at the first record's, or later."""

    workloads: KnownWorkloads
    logged_ms: int

    def pod_at(self, name: PodName, ts_ms: int, listed_since_ms: int | None = None) -> Pod | None:
        """The pod of a name that the kubelet may rightly list at a time, in its version of that time; None: none.
        ``listed_since_ms``: the name is listed since then, so it means no pod whose end was reported before."""
        for lifetime in self._nearest(name, ts_ms):
            if lifetime.may_be_listed(ts_ms) and (listed_since_ms is None or not lifetime.ended_by(listed_since_ms)):
                return version_at(lifetime.versions, ts_ms)
        return None

    def new_pod_at(self, name: PodName, ts_ms: int, missing_ms: int | None) -> Pod | None:
        """The same for a name that is new in the snapshots: a pod that runs at that time.
        ``missing_ms``: a snapshot of that time lacks the name, so it means no pod that certainly ran before."""
        for lifetime in self._nearest(name, ts_ms):
            if lifetime.distance_ms(ts_ms) <= TOLERANCE_MS and (
                missing_ms is None or not lifetime.started_before(missing_ms)
            ):
                return version_at(lifetime.versions, ts_ms)
        return None

    def has_ended(self, name: PodName, ts_ms: int, missing_ms: int | None = None) -> bool:
        """Whether a pod of a name is reported to have ended long before a time, and the name can mean no other pod.
        ``missing_ms``: a snapshot of that time lacks the name, so it does not mean a pod that had ended by then: the
        kubelet may drop a pod from its list before the API server reports its end, and their clocks differ."""
        lifetimes = self._lifetimes(name)
        ends = [end.value for end in self.workloads.ends.get(name, ()) if end.ms <= self.logged_ms]
        ends += [lifetime.ended_ms for lifetime in lifetimes if lifetime.end_reported and lifetime.ended_ms is not None]
        after_ms = ts_ms - REMEMBERED_MS
        if missing_ms is not None:
            after_ms = max(after_ms, missing_ms + TOLERANCE_MS + 1)
        ended = any(after_ms <= ended_ms < ts_ms - LISTED_MS for ended_ms in ends)
        return ended and not any(lifetime.may_be_listed(ts_ms) for lifetime in lifetimes)

    def pod_of(self, uid: str, ts_ms: int, listed: Collection[PodName] = ()) -> Pod | None:
        """The pod of a uid, in its version of a time; None: no such pod ran then. One whose name is in ``listed`` may
        run for as long as it may be listed."""
        history = self.workloads.history_of(uid)
        lifetime = _known_at(history, self.logged_ms) if history else None
        if lifetime is None:
            return None
        pod = version_at(lifetime.versions, ts_ms)
        is_listed = (pod.namespace, pod.name) in listed and lifetime.may_be_listed(ts_ms)
        return pod if is_listed or lifetime.distance_ms(ts_ms) <= TOLERANCE_MS else None

    def node_at(self, ts_ms: int) -> NodeFacts:
        """The node at a time."""
        workloads, logged_ms = self.workloads, self.logged_ms
        return NodeFacts(
            version_at(version_at(workloads.node_labels, logged_ms), ts_ms),
            version_at(version_at(workloads.dra, logged_ms), ts_ms),
            version_at(version_at(workloads.admin, logged_ms), ts_ms),
            version_at(version_at(workloads.unwell, logged_ms), ts_ms),
        )

    def valid_until(self, pods: Mapping[PodName, Pod], ts_ms: int) -> ValidUntil:
        """Until when these names go on meaning these pods, and the node stays as it is at a time.
        Each pod has to be the last one of its name, and running; otherwise the answer is valid for this time only."""
        workloads, logged_ms = self.workloads, self.logged_ms
        changes_ms, changes_logged_ms = [math.inf], [math.inf]
        for history in (workloads.node_labels, workloads.dra, workloads.admin, workloads.unwell):
            changes_ms.append(_next_change_ms(version_at(history, logged_ms), ts_ms))
            changes_logged_ms.append(_next_change_ms(history, logged_ms))
        for name, pod in pods.items():
            last = without_overlaps(self._lifetimes(name))[-1]
            if last.uid != pod.uid or last.ended_ms is not None or last.distance_ms(ts_ms):
                return ValidUntil(ts_ms, logged_ms)
            changes_ms.append(_next_change_ms(last.versions, ts_ms))
            changes_logged_ms += [_next_change_ms(history, logged_ms) for history in workloads.lifetimes[name]]
        return ValidUntil(min(changes_ms), min(changes_logged_ms))

    def _nearest(self, name: PodName, ts_ms: int) -> list[Lifetime]:
        """The lifetimes of a name, the likeliest at a time first: the nearest, then the one that started last."""
        lifetimes = self._lifetimes(name)
        if len(lifetimes) < 2:
            return lifetimes
        return sorted(
            without_overlaps(lifetimes),
            key=lambda lifetime: (lifetime.distance_ms(ts_ms), -(lifetime.started_ms or 0), lifetime.uid),
        )

    def _lifetimes(self, name: PodName) -> list[Lifetime]:
        histories = self.workloads.lifetimes.get(name, ())
        return [lifetime for history in histories if (lifetime := _known_at(history, self.logged_ms)) is not None]


def without_overlaps(lifetimes: Iterable[Lifetime]) -> list[Lifetime]:
    """The lifetimes of one name, cut so that no two overlap: a name has one pod at a time.

    A lifetime ends at its reported end, and at the latest within the second in which the next one started by its
    record. The next one starts there.
    """
    cut: list[Lifetime] = []
    for lifetime in sorted(lifetimes, key=Lifetime.start_order):
        if cut:
            previous = cut[-1]
            started_ms, *_ = lifetime.start_order()
            latest_ms = started_ms + WHOLE_SECOND_MS
            end_ms = latest_ms if previous.ended_ms is None else min(previous.ended_ms, latest_ms)
            cut[-1] = _replace(previous, ended_ms=end_ms)
            lifetime = _replace(lifetime, started_ms=max(started_ms, end_ms))
        cut.append(lifetime)
    return cut


# -- what a record adds


def add_record(known: KnownWorkloads | None, record: NodeWorkloads, logged_ms: int) -> KnownWorkloads:
    """What is known after a record that was logged at ``logged_ms``, which is never less than the previous record's.
    A record of an older epoch, or with an older or the same ``seq``, changes nothing.

    Records that the broker stored together have one log time. Each counts as logged 1 ms after the previous one, so
    that a reader of the first one and a reader of all of them give the same answer.
    """
    known = known or KnownWorkloads(since_ms=logged_ms, logged_ms=logged_ms - 1)
    if record.order <= (known.epoch, known.seq):
        return known
    logged_ms = max(logged_ms, known.logged_ms + 1)

    def with_value(history: History[Versions[T]], value: T) -> History[Versions[T]]:
        return _add_logged(history, logged_ms, _add_version(history[-1].value if history else (), record.ts_ms, value))

    dra = {(d.driver, d.pool, d.device): d.uuid for d in record.dra_devices}
    updated = _replace(
        known,
        epoch=record.epoch,
        seq=record.seq,
        logged_ms=logged_ms,
        node_labels=with_value(known.node_labels, record.node_labels),
        dra=with_value(known.dra, dra),
        admin=with_value(known.admin, frozenset(record.admin_claims) or EMPTY),
        unwell=with_value(known.unwell, record.unwell),
        lifetimes=_with_pods(known.lifetimes, record, logged_ms),
    )
    if known.logged_ms // _FORGET_EVERY_MS == logged_ms // _FORGET_EVERY_MS:
        return updated
    return forget_before(updated, record.ts_ms - KEPT_MS, logged_ms - KEPT_MS)


def _with_pods(lifetimes: Lifetimes, record: NodeWorkloads, logged_ms: int) -> Lifetimes:
    """The lifetimes with the pods of a record. A pod that the record lacks has ended, at the latest by then."""
    updated = dict(lifetimes)
    for pod in record.pods:
        name = (shared(pod.namespace), pod.name)
        histories = updated.get(name, ())
        history = next((history for history in histories if history[-1].value.uid == pod.uid), ())
        last = history[-1].value if history else None
        pod = _replace(pod, owners=_shared_owners(*map(_owner_fields, pod.owners)))
        if last is None:  # a fleet has few namespaces, labels and owners: pods share equal ones
            pod = _replace(
                pod,
                namespace=name[0],
                phase=shared(pod.phase) if pod.phase else pod.phase,
                labels=_shared_labels(*((name, shared(text)) for name, text in pod.labels.items())),
                annotations=_shared_labels(*pod.annotations.items()),
                namespace_labels=_shared_labels(*pod.namespace_labels.items()),
            )
        versions = _add_version(last.versions if last else (), record.ts_ms, pod, key=_holder_fields)
        started_ms = last.started_ms if last and pod.started_ms is None else pod.started_ms
        first_seen_ms = last.first_seen_ms if last else record.ts_ms
        lifetime = Lifetime(
            pod.uid, versions, first_seen_ms, started_ms, pod.ended_ms, end_reported=pod.ended_ms is not None
        )
        others = (other for other in histories if other is not history)
        updated[name] = (*others, _add_logged(history, logged_ms, lifetime))
    uids = {pod.uid for pod in record.pods}
    for name, histories in updated.items():
        missing = [h for h in histories if (lifetime := h[-1].value).ended_ms is None and lifetime.uid not in uids]
        for history in missing:
            ended = _replace(history[-1].value, ended_ms=record.ts_ms)
            updated[name] = tuple([_add_logged(h, logged_ms, ended) if h is history else h for h in updated[name]])
    return updated


@lru_cache(maxsize=4096)
def _shared_labels(*labels: tuple[str, str]) -> dict[str, str]:
    """One object for equal labels."""
    return dict(labels)


@lru_cache(maxsize=4096)
def _shared_owners(*owners: tuple[str, str, str]) -> tuple[Owner, ...]:
    """One object for equal owner chains, without their uids, which nothing reads."""
    return tuple([Owner(shared(api_version), shared(kind), name) for api_version, kind, name in owners])


# -- what may be forgotten


def forget_before(known: KnownWorkloads, ts_ms: int, logged_ms: int) -> KnownWorkloads:
    """Drop what no sample at or after ``ts_ms`` that was logged at or after ``logged_ms`` can refer to."""
    lifetimes: Lifetimes = {}
    ends_by_name = dict(known.ends)
    for name, histories in known.lifetimes.items():
        if all(len(h) == 1 and len(h[0].value.versions) == 1 and h[0].value.ended_ms is None for h in histories):
            lifetimes[name] = histories
            continue
        kept, dropped = _without_ended(histories, ts_ms, logged_ms)
        if kept:
            lifetimes[name] = kept
        for last in dropped:
            ends, ended_ms = ends_by_name.get(name, ()), last.value.ended_ms
            if last.value.end_reported and ended_ms is not None and all(end.value != ended_ms for end in ends):
                ends_by_name[name] = tuple(sorted([*ends, Since(last.ms, ended_ms)]))
    remembered = {
        name: tuple([end for end in ends if end.value >= ts_ms - REMEMBERED_MS]) for name, ends in ends_by_name.items()
    }

    def cut(history: History[Versions[T]]) -> History[Versions[T]]:
        return tuple([Since(known.ms, _from(known.value, ts_ms)) for known in _from(history, logged_ms)])

    left = _replace(
        known,
        lifetimes=lifetimes,
        ends={name: ends for name, ends in remembered.items() if ends},
        node_labels=cut(known.node_labels),
        dra=cut(known.dra),
        admin=cut(known.admin),
        unwell=cut(known.unwell),
    )
    return known if left == known else left  # answers that were given from it stay valid


def _without_ended(
    histories: Iterable[History[Lifetime]], ts_ms: int, logged_ms: int
) -> tuple[tuple[History[Lifetime], ...], list[Since[Lifetime]]]:
    """What may still be needed of the histories of a name, and the pods that are not needed: those that had ended long
    before, up to the first that is needed. Of these the last one stays: where it ended, the next one started."""
    recent = [_from(history, logged_ms) for history in histories]
    ended = [  # no record that was logged after ``logged_ms`` changes these
        history
        for history in recent
        if len(history) == 1 and history[0].ms <= logged_ms
        if (ended_ms := history[0].value.ended_ms) is not None and ended_ms + LISTED_MS < ts_ms
    ]
    needed = [history for history in recent if history not in ended]
    first_start = min([known.value.start_order() for history in needed for known in history], default=None)
    dropped = [h for h in ended if first_start is None or h[0].value.start_order() < first_start]
    if needed and dropped:
        dropped.remove(max(dropped, key=lambda history: history[0].value.start_order()))
    kept = [
        tuple([_replace(k, value=_replace(k.value, versions=_from(k.value.versions, ts_ms))) for k in history])
        for history in recent
        if history not in dropped
    ]
    return tuple(kept), [history[0] for history in dropped]


# -- versions and histories


def version_at(versions: Versions[T], ts_ms: int) -> T:
    """The version with the greatest time at or before ``ts_ms``, else the earliest."""
    return versions[max(0, _count_until(versions, ts_ms) - 1) if len(versions) > 1 else 0].value


def _known_at(history: History[T], logged_ms: int) -> T | None:
    """What was known at a log time; None: nothing yet."""
    if history[-1].ms <= logged_ms:
        return history[-1].value
    count = _count_until(history, logged_ms)
    return history[count - 1].value if count else None


def _next_change_ms(versions: Versions[T], ms: int) -> float:
    """The first time after ``ms`` from which there is another value."""
    return math.inf if versions[-1].ms <= ms else versions[_count_until(versions, ms)].ms


def _from(versions: Versions[T], ms: int) -> Versions[T]:
    """The versions that hold at ``ms`` or later."""
    count = _count_until(versions, ms)
    return versions[count - 1 :] if count > 1 else versions


def _add_version(
    versions: Versions[T], ts_ms: int, value: T, *, key: Callable[[T], object] = lambda value: value
) -> Versions[T]:
    """The versions with one more, if it differs by its key from the one that held at its time."""
    count = _count_until(versions, ts_ms)
    if count and key(versions[count - 1].value) == key(value):
        return versions
    return (*versions[:count], Since(ts_ms, value), *versions[count:])


def _add_logged(history: History[T], logged_ms: int, value: T) -> History[T]:
    """The history with the value of one more record."""
    if history and history[-1].value == value:
        return history
    return (*history, Since(logged_ms, value))


def _count_until(versions: Versions[T], ms: int) -> int:
    """How many of the versions are from ``ms`` or before."""
    return bisect_right(versions, ms, key=_since_ms)
