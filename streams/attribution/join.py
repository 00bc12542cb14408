"""The join of one node: samples wait for the snapshot that they name, and are given its holders.

In: the node's samples, snapshots and workloads in the order of their logs, and what the reader learns about time and
offsets. Out: attributed samples, in the order of the samples. State: one immutable :class:`NodeState` a node.
Pure: no clock, no network, no log. Times called ``_s`` are seconds of the reader's monotonic clock.

A sample names the snapshot in force by number, within one run of its producer, so no clock is compared. It waits until
that snapshot is there, or until it is certain that it never comes: the allocations partition has been read to an end
that was asked of the broker at least ``grace`` after the sample was read. A node that waited in vain once, or holds too
many, is not made to wait that long again: any end asked after the sample was read will do, because a snapshot is
acknowledged before the first sample that names it. The snapshots that a sample's events name are waited for alike.

Of what a snapshot names a pod holds nothing that the workloads told to have ended long before the sample, where none
of its name may be meant that lives: kubelets go on listing pods that ended until their devices are needed again. Nor
does it hold what it has by a claim for administration, as monitoring does.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from streams.attribution.events import Then, attributed_events, named_snapshots
from streams.attribution.evidence import PodOf, observe, shown
from streams.attribution.holders import hold
from streams.attribution.split import split
from streams.attribution.state import (
    NEW,
    AllocationsRead,
    Committed,
    Forget,
    Inventory,
    Joined,
    Mark,
    Memo,
    Named,
    NodeState,
    Passed,
    Record,
    Tick,
    marked,
    pruned,
)
from streams.attribution.workloads import DraKey, PodName, learn
from topics.allocations import Allocations, Claim, Container
from topics.attributed import AttributedDevice, AttributedSample, Attribution, Holder
from topics.samples import Device, Sample
from topics.workloads import NodeWorkloads

__all__ = [
    "MAX_HELD",
    "NEW",
    "POD_WAIT_S",
    "AllocationsRead",
    "Committed",
    "Forget",
    "Joined",
    "Mark",
    "NodeState",
    "Passed",
    "Record",
    "Tick",
    "step",
    "wants_end",
]

MAX_HELD = 64
"""How many samples a node may hold before the end of its allocations is asked at once."""

POD_WAIT_S = 2.0
"""How long the first sample of a pod that the node's workloads do not have yet waits for them."""

_RUNS = 8
_STRANGERS = 64
"""How many pods that only their processes show, and that nothing tells of, are remembered as waited for in vain."""

_NO_PODS = Named({})
_NO_DRA: dict[DraKey, str] = {}
_NO_ADMIN: frozenset[Claim] = frozenset()
_replace = msgspec.structs.replace


def step(state: NodeState, record: Record, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """The state after a record, and the samples that it lets go."""
    if isinstance(record, Tick):
        state = _replace(state, held=(*state.held, record), sample_runs=_arrived(state.sample_runs, record.sample))
        if len(state.held) > MAX_HELD and not state.impatient:
            state = _replace(state, impatient=True)
        return _release(state, grace_s)
    if isinstance(record, Allocations):
        return _release(_with_snapshot(state, record), grace_s)
    if isinstance(record, NodeWorkloads):
        return _release(_with_workloads(state, record), grace_s)
    if isinstance(record, AllocationsRead):
        read_s = max(state.allocations_read_s, record.asked_s)
        return _release(_replace(state, allocations_read_s=read_s), grace_s)
    if isinstance(record, Passed):
        return _release(_replace(state, now_s=record.now_s), grace_s)
    if isinstance(record, Committed):
        return pruned(state, record.offset), []
    return _replace(state, held=(), marks=()), []


def wants_end(state: NodeState, now_s: float, grace_s: float) -> bool:
    """Whether the end of the node's allocations has to be asked for its samples to go on."""
    if not state.held:
        return False
    head = state.held[0]
    wait_s = 0.0 if state.impatient else grace_s
    return not _has_snapshots(state, head.sample) and now_s >= head.read_s + wait_s > state.allocations_read_s


# -- what arrives


def _arrived(runs: tuple[int, ...], sample: Sample) -> tuple[int, ...]:
    """The runs of a node's samples in order of arrival."""
    return runs if sample.run_id in runs else (*runs, sample.run_id)[-_RUNS:]


def _with_snapshot(state: NodeState, snapshot: Allocations) -> NodeState:
    """The first record of a snapshot counts: it is sent again unchanged."""
    key = (snapshot.run_id, snapshot.seq)
    if key in state.snapshots:
        return _replace(state, impatient=False) if state.impatient else state
    runs = state.snapshot_runs
    return _replace(
        state,
        snapshots={**state.snapshots, key: snapshot},
        snapshot_runs=runs if snapshot.run_id in runs else (*runs, snapshot.run_id),
        impatient=False,
    )


def _with_workloads(state: NodeState, record: NodeWorkloads) -> NodeState:
    workloads = learn(state.workloads, record)
    return _replace(state, workloads=workloads, given_up=frozenset(n for n in state.given_up if not workloads.runs(n)))


# -- what may go


def _release(state: NodeState, grace_s: float) -> tuple[NodeState, list[Joined]]:
    """Let go the samples at the head that wait for nothing more."""
    out: list[Joined] = []
    while state.held:
        head = state.held[0]
        if not _has_snapshots(state, head.sample):
            if not _never_comes(state, head, grace_s):
                break
            state = _replace(state, impatient=True)
        snapshot, attribution = _snapshot(state, head.sample, head.sample.allocations_seq)
        named = _named(state, snapshot, head.sample.ts_ms)
        then = _then(state, head.sample)
        missing = _awaited(state, named).union(*[_awaited(state, before.named) for before in then.values()])
        strangers = _strangers(state, snapshot, head.sample, named)
        if (missing or strangers) and state.now_s < head.pods_until_s:
            break
        state, joined = _joined(state, head, snapshot, attribution, named, then)
        out.append(joined)
        state = _replace(
            state,
            held=state.held[1:],
            given_up=_given_up(state, snapshot, missing),
            strangers=(*state.strangers, *strangers)[-_STRANGERS:] if strangers else state.strangers,
            marks=marked(state.marks, head, snapshot),
        )
    return state, out


def _has_snapshots(state: NodeState, sample: Sample) -> bool:
    """Whether all snapshots are there that a sample and its events name."""
    own = sample.allocations_seq
    if own is not None and (sample.run_id, own) not in state.snapshots:
        return False
    return all((sample.run_id, seq) in state.snapshots for seq in named_snapshots(sample))


def _never_comes(state: NodeState, tick: Tick, grace_s: float) -> bool:
    """Whether the allocations have been read far enough to know that a snapshot is not among them."""
    return state.allocations_read_s >= tick.read_s + (0.0 if state.impatient else grace_s)


def _snapshot(state: NodeState, sample: Sample, seq: int | None) -> tuple[Allocations | None, Attribution]:
    """The snapshot that a sample names by its ``seq``, else the last one known before it."""
    if seq is None:
        return None, "none"
    named = state.snapshots.get((sample.run_id, seq))
    if named is not None:
        return named, "exact"
    known = _latest(state, sample.run_id, below=seq)
    if known is None and (run_id := _run_before(state, sample)) is not None:
        known = _latest(state, run_id)
    return (known, "late") if known else (None, "none")


def _latest(state: NodeState, run_id: int, *, below: int | None = None) -> Allocations | None:
    seqs = [seq for run, seq in state.snapshots if run == run_id and (below is None or seq < below)]
    return state.snapshots[run_id, max(seqs)] if seqs else None


def _run_before(state: NodeState, sample: Sample) -> int | None:
    """The last run with a snapshot that came before a sample's.

    Where no snapshot of the sample's own run tells its place, the snapshots may have been read far ahead: of those runs
    count which had samples before, or whose snapshots are of an earlier time.
    """
    runs = state.snapshot_runs
    if sample.run_id in runs:
        before = runs[: runs.index(sample.run_id)]
        return before[-1] if before else None
    sampled = state.sample_runs[: state.sample_runs.index(sample.run_id)]
    earlier = {run for (run, _), snapshot in state.snapshots.items() if snapshot.ts_ms <= sample.ts_ms}
    return next((run for run in reversed(runs) if run in sampled or run in earlier), None)


class _Before(NamedTuple):
    """A snapshot that events name and their tick does not: what is known of it, as of the last of these events."""

    ts_ms: int
    snapshot: Allocations | None
    attribution: Attribution
    named: Named


def _then(state: NodeState, sample: Sample) -> dict[int, _Before]:
    """The snapshots that a sample's events name, by ``seq``; those of the tick itself are not among them."""
    return {
        seq: _Before(at_ms, *(found := _snapshot(state, sample, seq)), _named(state, found[0], at_ms))
        for seq, at_ms in named_snapshots(sample).items()
    }


def _named(state: NodeState, snapshot: Allocations | None, ts_ms: int) -> Named:
    workloads = state.workloads
    if snapshot is None or workloads is None:
        return _NO_PODS
    pods = {name: workloads.pod_at(name, ts_ms) for name in _names(snapshot)}
    over = frozenset([name for name, pod in pods.items() if pod is None and workloads.is_over(name, ts_ms)])
    return Named({name: pod for name, pod in pods.items() if name not in over} if over else pods, over)


def _names(snapshot: Allocations) -> set[PodName]:
    return {(c.namespace, c.pod) for c in snapshot.containers}


def _awaited(state: NodeState, named: Named) -> frozenset[PodName]:
    """The pods that are not known yet, but for those already waited for in vain. One whose name had a pod that ended
    long ago may be new."""
    unknown = [name for name, pod in named.pods.items() if pod is None]
    return frozenset([*unknown, *named.over]) - state.given_up


def _given_up(state: NodeState, snapshot: Allocations | None, missing: frozenset[PodName]) -> frozenset[PodName]:
    """The pods that were waited for in vain, until a sample's snapshot does not name them."""
    given_up = state.given_up | missing
    return given_up & _names(snapshot) if given_up and snapshot else given_up


def _strangers(state: NodeState, snapshot: Allocations | None, sample: Sample, named: Named) -> list[str]:
    """The uids of the pods that only processes show and that are not known yet, but for those waited for in vain."""
    if snapshot is None or state.workloads is None:
        return []
    uids = {uid for device in sample.devices for uid in shown(device)}
    uids -= {pod.uid for pod in named.pods.values() if pod is not None}
    unknown = [uid for uid in uids.difference(state.strangers) if uid is not None]
    return sorted(uid for uid in unknown if state.workloads.life_of(uid) is None)


# -- what goes


def _joined(
    state: NodeState,
    tick: Tick,
    snapshot: Allocations | None,
    attribution: Attribution,
    named: Named,
    then: Mapping[int, _Before],
) -> tuple[NodeState, Joined]:
    sample = tick.sample
    labels = state.workloads.node_labels_at(sample.ts_ms) if state.workloads else {}
    by_snapshot = {seq: Then(_held_before(state, before, sample), before.attribution) for seq, before in then.items()}
    if snapshot is None:
        return state, Joined(_attributed(tick, Then({}, attribution), labels, None, by_snapshot), ())
    dra = state.workloads.dra_at(sample.ts_ms) if state.workloads else _NO_DRA
    admin = state.workloads.admin_at(sample.ts_ms) if state.workloads else _NO_ADMIN
    inventory = tuple([(d.uuid, d.index, d.minor, d.mig) for d in sample.devices])
    memo = state.memo
    unknown_ids: tuple[str, ...] = ()
    if memo is None or not _still(memo, snapshot, inventory, named, dra, admin):
        held = hold(_without(snapshot, named.over, admin), sample.devices, named.pods, dra)
        memo = Memo(snapshot, inventory, named, dra, admin, held)
        state, unknown_ids = _replace(state, memo=memo), memo.held.unknown_ids
    now = Then(memo.held.holders, attribution)
    out = _attributed(tick, now, labels, _pod_of(state, sample.ts_ms), by_snapshot)
    return state, Joined(out, unknown_ids)


def _held_before(state: NodeState, before: _Before, sample: Sample) -> Mapping[str, tuple[Holder, ...]]:
    """Who held each device of a sample in a snapshot that its events name."""
    if before.snapshot is None:
        return {}
    dra = state.workloads.dra_at(before.ts_ms) if state.workloads else _NO_DRA
    admin = state.workloads.admin_at(before.ts_ms) if state.workloads else _NO_ADMIN
    without = _without(before.snapshot, before.named.over, admin)
    return hold(without, sample.devices, before.named.pods, dra).holders


def _without(snapshot: Allocations, over: frozenset[PodName], admin: frozenset[Claim]) -> Allocations:
    """A snapshot without the containers of pods that were over, and without the claims that only look at a device."""
    if not over and not admin:
        return snapshot
    left = [c for c in snapshot.containers if (c.namespace, c.pod) not in over]
    claims = [tuple(claim for claim in c.claims if claim not in admin) for c in left]
    return _replace(snapshot, containers=tuple(map(_with_claims, left, claims)))


def _with_claims(container: Container, claims: tuple[Claim, ...]) -> Container:
    return container if len(claims) == len(container.claims) else _replace(container, claims=claims)


def _pod_of(state: NodeState, ts_ms: int) -> PodOf | None:
    """Which pod a uid is at a time; None where nothing tells of pods."""
    workloads = state.workloads
    return None if workloads is None else lambda uid: workloads.pod_of(uid, ts_ms)


def _still(
    memo: Memo,
    snapshot: Allocations,
    inventory: Inventory,
    named: Named,
    dra: Mapping[DraKey, str],
    admin: frozenset[Claim],
) -> bool:
    return (
        memo.snapshot is snapshot
        and memo.dra is dra
        and memo.admin is admin
        and memo.inventory == inventory
        and memo.named.over == named.over
        and len(memo.named.pods) == len(named.pods)
        and all(named.pods[name] is pod for name, pod in memo.named.pods.items() if name in named.pods)
    )


def _attributed(
    tick: Tick,
    now: Then,
    node_labels: dict[str, str],
    pod_of: PodOf | None,
    by_snapshot: Mapping[int, Then],
) -> AttributedSample:
    sample = tick.sample
    return AttributedSample(
        schema=1,
        cluster=sample.cluster,
        node=sample.node,
        run_id=sample.run_id,
        seq=sample.seq,
        ts_ms=sample.ts_ms,
        allocations_seq=sample.allocations_seq,
        offset=tick.offset,
        attribution=now.attribution,
        node_labels=node_labels,
        devices=tuple([_device(device, now, pod_of, by_snapshot) for device in sample.devices]),
    )


def _device(d: Device, now: Then, pod_of: PodOf | None, by_snapshot: Mapping[int, Then]) -> AttributedDevice:
    """The device with its holders, those that its processes show included, and their parts of it."""
    all_holders, conflict = observe(d, now.holders.get(d.uuid, ()), pod_of)
    shared = split(d, all_holders)
    events = attributed_events(d.events, d.uuid, now, by_snapshot)
    return AttributedDevice(
        d.uuid, d.index, d.vendor, d.model, d.pci_bus_id, d.minor, d.state, d.mig, d.metrics, d.processes, d.jobs,
        events, d.info, d.xids, d.read_ms, shared.holders, shared.unattributed, shared.scaled, conflict,
    )  # fmt: skip
