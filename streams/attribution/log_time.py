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

- A node of which no record was logged by T - 2 s has no known pods. Its ticks wait for none.
- If a process shows the uid of a pod of that name, it is that pod, whatever the time says.
- A name that comes back in a snapshot after it was gone is a new pod. A pod that certainly ran before is meant only if
  the records have no other pod of the name, and not its end.
- A pod that ended long ago is not waited for, unless its name is new in the snapshot, or came back there
  after the end while others were listed.

Pure. Times called ``_s`` are seconds of the reader's monotonic clock. ``ts_ms`` is the time in a record.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from sys import intern
from typing import NamedTuple

import msgspec

from streams.attribution.holders import is_static
from streams.attribution.workloads import AsOf, DraKey, Knowledge, PodName, Until
from topics.allocations import Allocations, Claim
from topics.workloads import Pod, UnwellDevice

HORIZON_MS = 2_000  # records count that are logged so long before a tick; or after it, if the tick lacks its pod
LEADERS_APART_MS = 500  # by how much the clock of the workloads' leader may be behind that of the samples'
NEW_MS = 10_000  # for how long a name is new in the snapshots of its node: the API server has a pod much sooner
_GONE_MS = 300_000  # so long it is remembered that a snapshot lacked a name: a start reads from further back
_MOST_ASKED = 64
_replace = msgspec.structs.replace


# -- how far the workloads have been read


class _Asked(NamedTuple):
    """An answer of the broker: when it was asked, where the workloads end, and where the samples had ended before."""

    at_s: float
    end: int
    samples_end: int


class Watermark:
    """The watermark of one partition, in ``ms``. It looks at no wall clock; three things raise it:

    - A record of gpu.workloads is read: all that were logged earlier have been read.
    - An end of the workloads is reached that was asked of the broker: when it was asked, the broker's clock showed at
      least the log time of a sample that had been read, plus the seconds that had passed since.
    - A sample is read that is older than such an end: it lies below an end of the samples that the broker had given
      before it was asked for the end of the workloads. So one answer is enough for a backlog.

    The clocks are those of the two partitions' leaders. If they are more than half a second apart, a record may come
    that was logged before the watermark. ``misordered`` counts these: a replay may join the ticks that went out before
    in another way. The embedded broker keeps the producers' times: it is a broker whose clock is behind by as long as a
    record is on its way.
    """

    def __init__(self) -> None:
        self.ms = float("-inf")
        self.misordered = 0
        self._offset = self._newest_ms = -1
        self._sample: tuple[int, float] | None = None
        self.asked: deque[_Asked] = deque(maxlen=_MOST_ASKED)
        self._samples_end = self._backlog_end = 0

    def workloads(self, offset: int, logged_ms: int) -> int:
        """A record of the workloads was read. Returns its log time, never less than that of the one before."""
        if offset > self._offset and logged_ms <= self.ms:
            self.misordered += 1
        self._offset = max(self._offset, offset)
        self._newest_ms = max(self._newest_ms, logged_ms)
        self.ms = max(self.ms, self._newest_ms - 1)
        return self._newest_ms

    def sample(self, offset: int, logged_ms: int, now_s: float) -> None:
        self._sample = logged_ms, now_s
        if offset < self._backlog_end:
            self.ms = max(self.ms, logged_ms - LEADERS_APART_MS)

    def ends(self, asked_s: float, workloads: int, samples: int) -> None:
        """The broker has said where the partitions end. It gave its last answer before it was asked for this one."""
        self.asked.append(_Asked(asked_s, workloads, self._samples_end))
        self._samples_end = samples

    def reached(self, position: int) -> None:
        """The workloads have been read up to an offset."""
        while self.asked and self.asked[0].end <= position:
            asked = self.asked.popleft()
            self._backlog_end = max(self._backlog_end, asked.samples_end)
            self.ms = max(self.ms, self.if_asked_at(asked.at_s))

    def if_asked_at(self, asked_s: float) -> float:
        """The watermark of a reader that has read to an end that was asked for at a time."""
        if self._sample is None:
            return float("-inf")
        logged_ms, read_s = self._sample
        return logged_ms + (asked_s - read_s) * 1000 - LEADERS_APART_MS

    def forget(self) -> None:
        """Offsets may mean other records from now on. What was read stays read."""
        self.asked.clear()
        self._samples_end = self._backlog_end = 0


# -- the names in snapshots


class Appeared(NamedTuple):
    """When a name came into the snapshots, and when it had gone from them before, if it had.

    ``beside_others``: the snapshot before had other names. A kubelet that starts again has none at first.
    """

    at_ms: int
    gone_ms: int | None
    beside_others: bool = False


class Listing(msgspec.Struct, frozen=True):
    """A snapshot and the names in it; which of them appeared, and which others have gone of late, with the times; and
    the uids that the kubelet says."""

    snapshot: Allocations
    names: frozenset[PodName]
    appeared: dict[PodName, Appeared] = {}
    gone: dict[PodName, int] = {}
    uids: frozenset[str] = frozenset()

    def new_at(self, ts_ms: int) -> dict[PodName, Appeared]:
        """Which of the names are new at a time."""
        return {name: at for name, at in self.appeared.items() if ts_ms - at.at_ms < NEW_MS}


def listing(snapshot: Allocations, before: Listing | None) -> Listing:
    """A snapshot that follows another one; None: it is the first that is known. What its containers have in common with
    others is one object."""
    containers = [
        _replace(
            c, namespace=intern(c.namespace), container=intern(c.container), resource=c.resource and intern(c.resource)
        )
        for c in snapshot.containers
    ]
    snapshot = _replace(snapshot, containers=tuple(containers))
    names = frozenset([(c.namespace, c.pod) for c in snapshot.containers])
    uids = frozenset([c.pod_uid for c in snapshot.containers if c.pod_uid])
    if before is None:
        return Listing(snapshot, names, uids=uids)
    ts_ms = snapshot.ts_ms
    appeared = {name: at for name, at in before.appeared.items() if name in names and ts_ms - at.at_ms < _GONE_MS}
    appeared |= {name: Appeared(ts_ms, before.gone.get(name), bool(before.names)) for name in names - before.names}
    gone = {name: at_ms for name, at_ms in before.gone.items() if name not in names and ts_ms - at_ms < _GONE_MS}
    gone |= dict.fromkeys(before.names - names, ts_ms)
    return Listing(snapshot, names, appeared, gone, uids)


# -- which pods


class When(NamedTuple):
    """The time that is asked for, when the tick was logged, and the watermark."""

    ts_ms: int
    logged_ms: int
    watermark_ms: float


class NotYet(NamedTuple):
    """The watermark has to reach this log time first."""

    watermark_ms: int


class Lasting(NamedTuple):
    """What an answer rests on, and until when it is the answer for later ticks, too."""

    knowledge: Knowledge
    listing: Listing
    when: When
    until: Until


class Resolved(NamedTuple):
    """The pods of a tick, and its node.

    ``pods`` has those that the snapshot names; None: no record has that pod. ``over`` has the names of pods that ended
    long before and hold nothing; they are not in ``pods``. ``shown`` has the pods of the uids that processes show;
    None: nothing is known of the node's pods.
    """

    pods: Mapping[PodName, Pod | None]
    over: frozenset[PodName]
    shown: Mapping[str, Pod | None] | None
    node_labels: dict[str, str]
    dra: Mapping[DraKey, str]
    admin: frozenset[Claim]
    unwell: tuple[UnwellDevice, ...] = ()
    lasting: Lasting | None = None

    def shows(self, uids: Iterable[str]) -> list[Pod | None] | None:
        """The pods of uids that processes show; None: nothing is known of the node's pods."""
        return None if self.shown is None else [self.shown.get(uid) for uid in uids]

    def lasts(self, knowledge: Knowledge | None, listed: Listing | None, uids: AbstractSet[str], when: When) -> bool:
        """Whether it is the answer for a later tick, too, without a look at any pod."""
        if self.lasting is None or self.shown is None or not uids <= self.shown.keys():
            return False
        known, named, asked, until = self.lasting
        return (
            known is knowledge
            and named is listed
            and asked.ts_ms <= when.ts_ms < until.ts_ms
            and asked.logged_ms <= when.logged_ms < until.logged_ms
        )


_NOTHING = Resolved({}, frozenset(), None, {}, {}, frozenset())


def resolve(
    knowledge: Knowledge | None,
    listed: Listing | None,
    uids: AbstractSet[str],
    when: When,
    last: Resolved | None = None,
) -> Resolved | NotYet:
    """The pods that a snapshot names, by their uids if it has them, and those of the uids that processes show.
    ``last`` is an earlier answer."""
    ts_ms, since_ms = when.ts_ms, when.logged_ms - HORIZON_MS
    if when.watermark_ms < since_ms:
        return NotYet(since_ms)
    if last is not None and last.lasts(knowledge, listed, uids, when):
        return last
    known = knowledge.as_of(since_ms) if knowledge else None
    if knowledge is None or known is None:
        return _NOTHING
    if listed is None:
        return Resolved({}, frozenset(), {}, *known.node_at(ts_ms))
    new, uids = listed.new_at(ts_ms), uids | listed.uids
    by_time = {name: _pod_at(known, name, new.get(name), ts_ms) for name in listed.names}
    pods = {name: pod for name, pod in by_time.items() if pod is not None}
    shown = {pod.uid: pod for pod in pods.values()}
    if len(pods) < len(by_time) or not uids <= shown.keys():
        return _search(known, by_time, listed, uids, when)
    same = known.same_until(pods, ts_ms)
    lasting = Lasting(knowledge, listed, when, Until(same.ts_ms, same.logged_ms + HORIZON_MS))
    return Resolved(pods, frozenset(), shown, *known.node_at(ts_ms), lasting)


def _search(
    known: AsOf,
    by_time: Mapping[PodName, Pod | None],
    listed: Listing,
    uids: AbstractSet[str],
    when: When,
) -> Resolved | NotYet:
    """The pods of a tick whose time does not give them all: processes may show them, or records that came later."""
    knowledge, ts_ms, since_ms, until_ms = known.known, when.ts_ms, known.logged_ms, when.logged_ms + HORIZON_MS
    new = listed.new_at(ts_ms)
    beside_others = {name: at for name, at in listed.appeared.items() if at.beside_others}
    gone_ms = {name: at.gone_ms for name, at in beside_others.items() if ts_ms - at.at_ms < _GONE_MS}
    by_uid, may_come = _pods_of(known, uids - {pod.uid for pod in by_time.values() if pod}, ts_ms, until_ms)
    pods, over, lacking = dict(by_time), set[PodName](), set[PodName]()
    for pod in sorted([pod for pod in by_uid.values() if pod], key=lambda pod: (pod.started_ms or 0, pod.uid)):
        name = (pod.namespace, pod.name)
        if name in by_time and ((by_then := by_time[name]) is None or by_then.uid not in uids):
            pods[name] = pod
    for name in [name for name, found in pods.items() if found is None]:
        if name not in new and known.is_over(name, ts_ms, gone_ms.get(name)):
            over.add(name)
            continue
        later = [AsOf(knowledge, logged_ms) for logged_ms in knowledge.changes_ms(name, since_ms, until_ms)]
        pods[name] = next((first for then in later if (first := _pod_at(then, name, new.get(name), ts_ms))), None)
        if pods[name] is None:
            lacking.add(name)
    if when.watermark_ms < until_ms and (lacking or may_come):
        return NotYet(until_ms)
    for name in lacking:
        pods[name] = known.pod_at(name, ts_ms, new[name].at_ms if name in new else None)
        if pods[name] is None and known.is_over(name, ts_ms, gone_ms.get(name)):
            over.add(name)
    pods = {name: found for name, found in pods.items() if name not in over}
    shown = by_uid | {found.uid: found for found in pods.values() if found}
    return Resolved(pods, frozenset(over), shown, *known.node_at(ts_ms))


def _pods_of(known: AsOf, uids: AbstractSet[str], ts_ms: int, until_ms: int) -> tuple[dict[str, Pod | None], bool]:
    """The pods of uids, each as the first record says that counts and has it; and whether such a record may yet come.
    No record ever has the uid that the processes of a static pod show."""
    pods: dict[str, Pod | None] = {}
    may_come = False
    for uid in uids:
        history = known.known.history_of(uid)
        if history is not None and history[0][0] <= until_ms:
            pods[uid] = AsOf(known.known, max(history[0][0], known.logged_ms)).pod_of(uid, ts_ms)
        else:
            pods[uid] = None
            may_come |= not is_static(uid)
    return pods, may_come


def _pod_at(known: AsOf, name: PodName, new: Appeared | None, ts_ms: int) -> Pod | None:
    return known.pod_at(name, ts_ms) if new is None else known.new_pod_at(name, ts_ms, new.gone_ms)
