"""Which pods a sample means: those that its snapshot names, and those that its processes show.

In: a snapshot, a tick with its processes, what is known of the node's pods, and how far the workloads have been read.
Out: a pod for each name and each uid, or the log time to which the workloads have to be read first. Pure.

The rule, in log time. A sample that was logged at T is joined with the records of gpu.workloads that were logged at or
before T - 2 s. For a pod that these lack it is the first record, logged at or before T + 2 s, that has it. So whoever
reads the logs gives the same answer: as they are written, seconds behind, or a day later.

- Live, the workloads are read to T - 2 s as a matter of course, and nothing is waited for. Only a pod that is lacking
  is: until the record that has it is read, or all that was logged by T + 2 s.
- A node of which no record was logged by T - 2 s has no pods that are known, and waits for none.
- The uid of a process decides before the time does which pod of a name is meant.
- A name that comes back in a snapshot after it was gone is a new pod. One that surely ran before is meant only if no
  record has another pod of the name, nor its end.
- A pod that is known to have ended long ago is not waited for, unless its name is new in the snapshot.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from streams.attribution.evidence import static
from streams.attribution.workloads import AsOf, DraKey, Knowledge, PodName, Until
from topics.allocations import Allocations, Claim
from topics.workloads import Pod

HORIZON_MS = 2_000
"""How much earlier than a sample a record is surely read without waiting, and how much later it may still come."""

NEW_MS = 10_000
"""So long a name is new in the snapshots of its node: the API server has a pod much sooner."""

_GONE_MS = 300_000
"""For how long it is remembered that a snapshot did not have a name: a start reads state from further back."""


class Appeared(NamedTuple):
    """When a name came into the snapshots, and when it had gone from them before, if it had."""

    at_ms: int
    gone_ms: int | None


class Listing(msgspec.Struct, frozen=True):
    """A snapshot, the names in it, and of late: when they came, and when others were gone."""

    snapshot: Allocations
    names: frozenset[PodName]
    appeared: dict[PodName, Appeared] = {}
    gone: dict[PodName, int] = {}

    def appeared_at(self, name: PodName, ts_ms: int) -> Appeared | None:
        """How a name came into the snapshots, where it is new at a time."""
        found = self.appeared.get(name)
        return found if found is not None and ts_ms - found.at_ms < NEW_MS else None


class When(NamedTuple):
    """The time that is asked for, when its sample was logged, and how far the workloads have been read."""

    ts_ms: int
    logged_ms: int
    read_ms: float


class Lasting(NamedTuple):
    """What an answer rests on, and until when it is the answer for later samples, too."""

    knowledge: Knowledge
    named: Listing
    when: When
    until: Until


class Meant(NamedTuple):
    """The pods of a sample, and its node.

    ``pods`` has those that the snapshot names, None where no record does, without those in ``over``, which had ended
    long before and hold nothing. ``shown`` has those of the uids that processes show; None: nothing is known of
    the node's pods.
    """

    pods: Mapping[PodName, Pod | None]
    over: frozenset[PodName]
    shown: Mapping[str, Pod | None] | None
    node_labels: dict[str, str]
    dra: Mapping[DraKey, str]
    admin: frozenset[Claim]
    lasting: Lasting | None = None

    def lasts(self, knowledge: Knowledge | None, named: Listing | None, uids: AbstractSet[str], when: When) -> bool:
        """Whether it is the answer for a later sample, too, without a look at any pod."""
        if self.lasting is None or self.shown is None or not uids <= self.shown.keys():
            return False
        known, listed, asked, until = self.lasting
        return (
            known is knowledge
            and listed is named
            and asked.ts_ms <= when.ts_ms < until.ts_ms
            and asked.logged_ms <= when.logged_ms < until.logged_ms
        )


_NOTHING = Meant({}, frozenset(), None, {}, {}, frozenset())


class Unread(NamedTuple):
    """The workloads have to be read first, as far as they were logged at or before a time."""

    until_ms: int


def listing(snapshot: Allocations, before: Listing | None) -> Listing:
    """A snapshot that follows another one; None: it is the first that is known."""
    names = frozenset([(c.namespace, c.pod) for c in snapshot.containers])
    if before is None:
        return Listing(snapshot, names)
    ts_ms = snapshot.ts_ms
    appeared = {name: at for name, at in before.appeared.items() if name in names and ts_ms - at.at_ms < NEW_MS}
    appeared |= {name: Appeared(ts_ms, before.gone.get(name)) for name in names - before.names}
    gone = {name: at_ms for name, at_ms in before.gone.items() if name not in names and ts_ms - at_ms < _GONE_MS}
    gone |= dict.fromkeys(before.names - names, ts_ms)
    return Listing(snapshot, names, appeared, gone)


def meant(
    knowledge: Knowledge | None, named: Listing | None, uids: AbstractSet[str], when: When, last: Meant | None = None
) -> Meant | Unread:
    """The pods of a snapshot, and those of the uids that processes show. ``last`` is an earlier answer."""
    ts_ms, since_ms = when.ts_ms, when.logged_ms - HORIZON_MS
    if when.read_ms < since_ms:
        return Unread(since_ms)
    if last is not None and last.lasts(knowledge, named, uids, when):
        return last
    known = knowledge.as_of(since_ms) if knowledge else None
    if knowledge is None or known is None:
        return _NOTHING
    node = known.node_labels_at(ts_ms), known.dra_at(ts_ms), known.admin_at(ts_ms)
    if named is None:
        return Meant({}, frozenset(), {}, *node)
    new = {name: appeared for name in named.names if (appeared := named.appeared_at(name, ts_ms)) is not None}
    by_time = {name: _pod_at(known, name, new.get(name), ts_ms) for name in named.names}
    pods = {name: pod for name, pod in by_time.items() if pod is not None}
    shown = {pod.uid: pod for pod in pods.values()}
    if len(pods) == len(by_time) and uids <= shown.keys():
        same = known.same_until(pods, ts_ms)
        lasting = Lasting(knowledge, named, when, Until(same.ts_ms, same.logged_ms + HORIZON_MS))
        return Meant(pods, frozenset(), shown, *node, lasting)
    found = _searched(known, by_time, new, uids, when)
    return found if isinstance(found, Unread) else Meant(found.pods, found.over, found.shown, *node)


class _Found(NamedTuple):
    """The pods of a snapshot's names, the names of those that were over, and the pods of uids."""

    pods: Mapping[PodName, Pod | None]
    over: frozenset[PodName]
    shown: Mapping[str, Pod | None]


def _searched(
    known: AsOf,
    by_time: Mapping[PodName, Pod | None],
    new: Mapping[PodName, Appeared],
    uids: AbstractSet[str],
    when: When,
) -> _Found | Unread:
    """The pods where the time of the sample does not tell them all: processes do, later records, or what has ended."""
    knowledge, ts_ms, since_ms, until_ms = known.known, when.ts_ms, known.logged_ms, when.logged_ms + HORIZON_MS
    unnamed = uids - {pod.uid for pod in by_time.values() if pod}
    by_uid = {uid: _of_uid(knowledge, uid, ts_ms, since_ms, until_ms) for uid in unnamed}
    pods = {**by_time, **_decided(by_uid.values(), by_time, uids)}
    over, lacking = set[PodName](), set[PodName]()
    for name in [name for name, pod in pods.items() if pod is None]:
        if name not in new and known.is_over(name, ts_ms):
            over.add(name)
        elif (pod := _first(knowledge, name, new.get(name), ts_ms, since_ms, until_ms)) is not None:
            pods[name] = pod
        else:
            lacking.add(name)
    if when.read_ms < until_ms and (lacking or any(_may_come(knowledge, uid, until_ms) for uid in by_uid)):
        return Unread(until_ms)
    for name in lacking:
        pods[name] = known.pod_at(name, ts_ms, new[name].at_ms if name in new else None)
        if pods[name] is None and known.is_over(name, ts_ms):
            over.add(name)
    if over:
        pods = {name: pod for name, pod in pods.items() if name not in over}
    return _Found(pods, frozenset(over), by_uid | {pod.uid: pod for pod in pods.values() if pod})


def _of_uid(knowledge: Knowledge, uid: str, ts_ms: int, since_ms: int, until_ms: int) -> Pod | None:
    """The pod of a uid as the first record says that counts and has it."""
    logged_ms = knowledge.first_logged_ms(uid)
    if logged_ms is None or logged_ms > until_ms:
        return None
    known = knowledge.as_of(max(logged_ms, since_ms))
    return known.pod_of(uid, ts_ms) if known else None


def _may_come(knowledge: Knowledge, uid: str, until_ms: int) -> bool:
    """Whether no record has the uid yet that counts. Of static pods none ever has the uid that processes show."""
    logged_ms = knowledge.first_logged_ms(uid)
    return not static(uid) and (logged_ms is None or logged_ms > until_ms)


def _decided(
    by_uid: Iterable[Pod | None], pods: Mapping[PodName, Pod | None], uids: AbstractSet[str]
) -> dict[PodName, Pod]:
    """The pods of a snapshot's names whose processes are seen, if none are of the pod that ran by the time alone."""
    found: dict[PodName, Pod] = {}
    for pod in sorted([pod for pod in by_uid if pod], key=lambda pod: (pod.started_ms or 0, pod.uid)):
        name = (pod.namespace, pod.name)
        by_time = pods.get(name)
        if name in pods and (by_time is None or by_time.uid not in uids):
            found[name] = pod
    return found


def _first(
    knowledge: Knowledge, name: PodName, new: Appeared | None, ts_ms: int, since_ms: int, until_ms: int
) -> Pod | None:
    """The pod of a name as the first record says that was logged later, and still counts, and has it."""
    for logged_ms in knowledge.changes_ms(name, since_ms, until_ms):
        known = knowledge.as_of(logged_ms)
        if known and (pod := _pod_at(known, name, new, ts_ms)) is not None:
            return pod
    return None


def _pod_at(known: AsOf, name: PodName, new: Appeared | None, ts_ms: int) -> Pod | None:
    return known.pod_at(name, ts_ms) if new is None else known.new_pod_at(name, ts_ms, new.gone_ms)
