"""The join by log time: which pods a tick means, and how far gpu.workloads has to be read before that is known.

Samples and workloads come from two producers. The only order between them that is the same for every reader is that of
the times at which the broker logged them. **The rule**, for a tick that was logged at T:

1. The records of gpu.workloads count that were logged at or before T - 2 s.
2. If these lack a pod, the first record that has it counts for this pod, if it was logged at or before T + 2 s.

So every reader of the logs gives the same answer: live, seconds behind, or a day later.

The **watermark** of a partition is the log time up to which all its records of gpu.workloads have been read. A tick is
**pending** until the watermark has reached T - 2 s. Live, it has reached that before the tick is read. Only a tick that
lacks a pod waits longer: until a record with the pod is read, or the watermark has reached T + 2 s.

Which pod a name or a process means:

- A node without a record that was logged by T - 2 s has no known pods. Its ticks wait for none.
- If a process has the uid of a pod of that name, it is that pod, whatever the time says.
- A name that comes back in a snapshot after it was missing is a new pod. A pod that certainly ran before is meant only
  if the records have no other pod of the name, and not its end.
- A pod that ended long ago is not waited for, unless its name is new in the snapshot, or came back there
  after the end while others were listed.

Pure. Times called ``_s`` are seconds of the reader's monotonic clock. ``ts_ms`` is the time in a record.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from streams.attribution.holders import is_static_pod
from streams.attribution.workloads import (
    EMPTY,
    AsOf,
    DraKey,
    KnownWorkloads,
    NodeFacts,
    PodName,
    ValidUntil,
    version_at,
)
from topics.allocations import Allocations, Claim
from topics.topic import shared
from topics.workloads import Pod, UnwellDevice

HORIZON_MS = 2_000  # records count that are logged this long before a tick; or after it, if the tick lacks its pod
LEADERS_APART_MS = 500  # by how much the clock of the workloads' leader may be behind that of the samples'
NEW_MS = 10_000  # how long a name is new in the snapshots of its node: the API server has a pod much sooner
_MISSING_MS = 300_000  # how long it is remembered that a snapshot lacked a name: a start reads from further back
_MAX_ENDS = 64
_replace = msgspec.structs.replace


# -- how far the workloads have been read


class _EndsAnswer(NamedTuple):
    """An answer of the broker: when it was asked, where the workloads end, and the previous end of the samples."""

    asked_s: float
    workloads_end: int
    samples_end: int


class Watermark:
    """The watermark of one partition, in ``ms``. It reads no wall clock; three things raise it:

    - A record of gpu.workloads is read: all that were logged earlier have been read.
    - The workloads have been read to an end that the broker gave. When it was asked for this end, its clock showed at
      least the log time of the last sample that had been read, plus the seconds that had passed since.
    - A sample is read that was logged before the broker was asked for such an end. Its offset shows that: it is below
      an end of the samples that the broker had given earlier. So one answer is enough for a backlog.

    The clocks are those of the two partitions' leaders. If they are more than half a second apart, a record may come
    that was logged before the watermark. ``misordered`` counts these records: a replay may join the earlier ticks in
    another way. The embedded broker keeps the producers' times, so its clock is behind by the time that a record is on
    its way.
    """

    def __init__(self) -> None:
        self.ms = float("-inf")
        self.misordered = 0
        self.ends_ahead: deque[_EndsAnswer] = deque(maxlen=_MAX_ENDS)
        self._offset = self._newest_ms = -1
        self._last_sample: tuple[int, float] | None = None
        self._samples_end = self._backlog_end = 0

    def workloads_read(self, offset: int, logged_ms: int) -> int:
        """A record of the workloads was read. Returns its log time, never less than that of the previous record."""
        if offset > self._offset and logged_ms <= self.ms:
            self.misordered += 1
        self._offset = max(self._offset, offset)
        self._newest_ms = max(self._newest_ms, logged_ms)
        self.ms = max(self.ms, self._newest_ms - 1)
        return self._newest_ms

    def sample_read(self, offset: int, logged_ms: int, now_s: float) -> None:
        """A sample was read."""
        self._last_sample = logged_ms, now_s
        if offset < self._backlog_end:
            self.ms = max(self.ms, logged_ms - LEADERS_APART_MS)

    def add_ends(self, asked_s: float, workloads_end: int, samples_end: int) -> None:
        """The broker has reported the ends of the partitions. It gave its last answer before it was asked for this."""
        self.ends_ahead.append(_EndsAnswer(asked_s, workloads_end, self._samples_end))
        self._samples_end = samples_end

    def read_to(self, position: int) -> None:
        """The workloads have been read up to an offset."""
        while self.ends_ahead and self.ends_ahead[0].workloads_end <= position:
            reached = self.ends_ahead.popleft()
            self._backlog_end = max(self._backlog_end, reached.samples_end)
            self.ms = max(self.ms, self.if_end_asked_at(reached.asked_s))

    def if_end_asked_at(self, asked_s: float) -> float:
        """The watermark, in ms, that follows from reading to an end of the workloads that was asked for at a time."""
        if self._last_sample is None:
            return float("-inf")
        logged_ms, read_s = self._last_sample
        return logged_ms + (asked_s - read_s) * 1000 - LEADERS_APART_MS

    def forget(self) -> None:
        """Offsets may mean other records from now on. What was read stays read."""
        self.ends_ahead.clear()
        self._samples_end = self._backlog_end = 0


# -- the names in snapshots


class Appeared(NamedTuple):
    """When a name came into the snapshots, and since when it was missing from them before, if it was.

    ``beside_others``: the previous snapshot had other names. A kubelet that has just started has none at first.
    """

    at_ms: int
    missing_ms: int | None
    beside_others: bool = False


class IndexedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot and the names in it.

    ``appeared`` has the names that came in lately, ``missing_ms`` the names that went lately and since when they are
    missing. ``uids`` are those of the pods whose uid the kubelet reports.
    """

    snapshot: Allocations
    names: tuple[PodName, ...]
    appeared: dict[PodName, Appeared] = {}
    missing_ms: dict[PodName, int] = {}
    uids: frozenset[str] = EMPTY

    def new_at(self, ts_ms: int) -> dict[PodName, Appeared]:
        """The names that are new at a time."""
        return {name: appeared for name, appeared in self.appeared.items() if ts_ms - appeared.at_ms < NEW_MS}


def index_snapshot(snapshot: Allocations, previous: IndexedSnapshot | None) -> IndexedSnapshot:
    """A snapshot after the previous one; None: it is the first that is known. Equal strings become one object."""
    containers = [
        _replace(
            c, namespace=shared(c.namespace), container=shared(c.container), resource=c.resource and shared(c.resource)
        )
        for c in snapshot.containers
    ]
    snapshot = _replace(snapshot, containers=tuple(containers))
    names = dict.fromkeys([(c.namespace, c.pod) for c in snapshot.containers])
    uids = frozenset([c.pod_uid for c in snapshot.containers if c.pod_uid]) or EMPTY
    if previous is None:
        return IndexedSnapshot(snapshot, tuple(names), uids=uids)
    ts_ms, previous_names = snapshot.ts_ms, dict.fromkeys(previous.names)
    appeared = {
        name: entry for name, entry in previous.appeared.items() if name in names and ts_ms - entry.at_ms < _MISSING_MS
    }
    for name in names.keys() - previous_names.keys():
        appeared[name] = Appeared(ts_ms, previous.missing_ms.get(name), bool(previous_names))
    missing_ms = {
        name: since_ms
        for name, since_ms in previous.missing_ms.items()
        if name not in names and ts_ms - since_ms < _MISSING_MS
    }
    missing_ms |= dict.fromkeys(previous_names.keys() - names.keys(), ts_ms)
    return IndexedSnapshot(snapshot, tuple(names), appeared, missing_ms, uids)


# -- which pods


class LookupTime(NamedTuple):
    """The time of which pods are looked up, the log time of the tick, and the watermark."""

    ts_ms: int
    logged_ms: int
    watermark_ms: float


class Unresolved(NamedTuple):
    """The pods are not known yet: the watermark has to reach this log time first."""

    watermark_ms: int


class Validity(NamedTuple):
    """The inputs of an answer, and until when it is the answer for later ticks, too."""

    workloads: KnownWorkloads
    snapshot: IndexedSnapshot
    time: LookupTime
    until: ValidUntil


class ResolvedPods(NamedTuple):
    """The pods of a tick, and its node.

    ``pods`` has the pods that the snapshot names; None: no record has that pod. ``ended`` has the names of pods that
    ended long before and hold nothing; they are not in ``pods``. ``by_uid`` has the pods of the uids that the snapshot
    or processes show; None: nothing is known of the node's pods.
    """

    pods: Mapping[PodName, Pod | None]
    ended: frozenset[PodName]
    by_uid: Mapping[str, Pod | None] | None
    node_labels: dict[str, str]
    dra: Mapping[DraKey, str]
    admin: frozenset[Claim]
    unwell: tuple[UnwellDevice, ...] = ()
    validity: Validity | None = None

    def pods_of(self, uids: Iterable[str]) -> list[Pod | None] | None:
        """The pods of uids that processes show; None: nothing is known of the node's pods."""
        return None if self.by_uid is None else [self.by_uid.get(uid) for uid in uids]


_NO_PODS_KNOWN = ResolvedPods({}, EMPTY, None, {}, {}, EMPTY)


def resolve(
    workloads: KnownWorkloads | None,
    snapshot: IndexedSnapshot | None,
    uids: AbstractSet[str],
    time: LookupTime,
    last: ResolvedPods | None = None,
) -> ResolvedPods | Unresolved:
    """The pods that a snapshot names, by their uids if it has them, and the pods of the uids that processes show.
    ``last`` is an earlier answer, which is returned as long as it is valid."""
    ts_ms, known_by_ms = time.ts_ms, time.logged_ms - HORIZON_MS
    if time.watermark_ms < known_by_ms:
        return Unresolved(known_by_ms)
    if last is not None and last.validity is not None and last.by_uid is not None and uids <= last.by_uid.keys():
        of_workloads, of_snapshot, since, until = last.validity
        is_valid = since.ts_ms <= ts_ms < until.ts_ms and since.logged_ms <= time.logged_ms < until.logged_ms
        if is_valid and of_workloads is workloads and of_snapshot is snapshot:
            return last  # no pod has to be looked up
    if workloads is None or known_by_ms < workloads.since_ms:
        return _NO_PODS_KNOWN
    as_of = AsOf(workloads, known_by_ms)
    if snapshot is None:
        return ResolvedPods({}, EMPTY, {}, *as_of.node_at(ts_ms))
    new_names, uids = snapshot.new_at(ts_ms), uids | snapshot.uids
    by_time = {name: _pod_at(as_of, name, new_names.get(name), ts_ms) for name in snapshot.names}
    pods = {name: pod for name, pod in by_time.items() if pod is not None}
    by_uid = {pod.uid: pod for pod in pods.values()}
    if len(pods) < len(by_time) or not uids <= by_uid.keys():
        return _resolve_missing(as_of, by_time, snapshot, uids, time)
    until = as_of.valid_until(pods, ts_ms)
    validity = Validity(workloads, snapshot, time, ValidUntil(until.ts_ms, until.logged_ms + HORIZON_MS))
    return ResolvedPods(pods, EMPTY, by_uid, *as_of.node_at(ts_ms), validity)


def _resolve_missing(
    as_of: AsOf,
    by_time: Mapping[PodName, Pod | None],
    snapshot: IndexedSnapshot,
    uids: AbstractSet[str],
    time: LookupTime,
) -> ResolvedPods | Unresolved:
    """The pods of a tick if its time does not give them all: processes may show them, or records that came later."""
    workloads, ts_ms, until_ms = as_of.workloads, time.ts_ms, time.logged_ms + HORIZON_MS
    new_names = snapshot.new_at(ts_ms)
    missing_ms = {
        name: appeared.missing_ms
        for name, appeared in snapshot.appeared.items()
        if appeared.beside_others and ts_ms - appeared.at_ms < _MISSING_MS
    }
    by_uid, may_come = _pods_of(as_of, uids - {pod.uid for pod in by_time.values() if pod}, by_time, time)
    pods, ended, unknown = dict(by_time), set[PodName](), set[PodName]()
    for pod in sorted([pod for pod in by_uid.values() if pod], key=lambda pod: (pod.started_ms or 0, pod.uid)):
        name = (pod.namespace, pod.name)
        if name in by_time and ((pod_then := by_time[name]) is None or pod_then.uid not in uids):
            pods[name] = pod
    for name in [name for name, pod in pods.items() if pod is None]:
        if name not in new_names and as_of.has_ended(name, ts_ms, missing_ms.get(name)):
            ended.add(name)
            continue
        views = [AsOf(workloads, ms) for ms in workloads.changes_ms(name, as_of.logged_ms, until_ms)]
        pods[name] = next((later for view in views if (later := _pod_at(view, name, new_names.get(name), ts_ms))), None)
        if pods[name] is None:
            unknown.add(name)
    if time.watermark_ms < until_ms and (unknown or may_come):
        return Unresolved(until_ms)
    for name in unknown:
        pods[name] = as_of.pod_at(name, ts_ms, new_names[name].at_ms if name in new_names else None)
        if pods[name] is None and as_of.has_ended(name, ts_ms, missing_ms.get(name)):
            ended.add(name)
    pods = {name: pod for name, pod in pods.items() if name not in ended}
    by_uid |= {pod.uid: pod for pod in pods.values() if pod}
    late = [pod for name, pod in pods.items() if pod is not None and by_time[name] is None]
    return ResolvedPods(pods, frozenset(ended) or EMPTY, by_uid, *_node_with(late, as_of, ts_ms))


def _node_with(late: Iterable[Pod], as_of: AsOf, ts_ms: int) -> NodeFacts:
    """The node at a time, with the claims for administration in the first records of pods that came ``late``: such a
    pod would hold its devices until its claim is known as well."""
    node, workloads = as_of.node_at(ts_ms), as_of.workloads
    histories = [workloads.history_of(pod.uid) for pod in late]
    known_ms = max([as_of.logged_ms, *(history[0].ms for history in histories if history)])
    if known_ms == as_of.logged_ms:
        return node
    return node._replace(admin=node.admin | version_at(workloads.admin, known_ms)[-1].value)


def _pods_of(
    as_of: AsOf, uids: AbstractSet[str], listed: Collection[PodName], time: LookupTime
) -> tuple[dict[str, Pod | None], bool]:
    """The pods of uids, each as in the first record that counts and has it; and whether such a record may yet come.
    A pod whose name is ``listed`` may have ended shortly before: its containers outlive it if it was deleted by force.
    No record ever has the uid that the processes of a static pod show."""
    pods: dict[str, Pod | None] = {}
    may_come, until_ms = False, time.logged_ms + HORIZON_MS
    for uid in uids:
        history = as_of.workloads.history_of(uid)
        if history is not None and history[0].ms <= until_ms:
            pods[uid] = AsOf(as_of.workloads, max(history[0].ms, as_of.logged_ms)).pod_of(uid, time.ts_ms, listed)
        else:
            pods[uid] = None
            may_come |= not is_static_pod(uid)
    return pods, may_come


def _pod_at(as_of: AsOf, name: PodName, appeared: Appeared | None, ts_ms: int) -> Pod | None:
    """The pod of a name at a time; ``appeared``: the name was new then."""
    return as_of.pod_at(name, ts_ms) if appeared is None else as_of.new_pod_at(name, ts_ms, appeared.missing_ms)
