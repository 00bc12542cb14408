"""The join: what precedes the committed samples is forgotten, except what a later sample needs."""

import itertools

import pytest
from msgspec.structs import replace

from streams.attribution import join
from streams.attribution.join import AllocationsRead, Committed, Forget, NodeState
from tests.streams.attribution.reading import GRACE_S, run
from tests.streams.attribution.records import container, gpu, logged, pending, pod, snapshot, tick, workloads
from topics.allocations import Claim, Container
from topics.workloads import DraDevice


def size(state: NodeState) -> dict[str, int]:
    """How many objects of each kind are in memory."""
    known_workloads = state.workloads
    histories = [history for pods in known_workloads.lifetimes.values() for history in pods] if known_workloads else []
    return {
        "snapshots": len(state.snapshots),
        "runs": max(len(state.snapshot_runs), len(state.sample_runs)),
        "pending": len(state.pending),
        "marks": len(state.marks),
        "lifetimes": len(histories),
        "ends": len(known_workloads.ends) if known_workloads else 0,
        "changes": max(
            [len(history) for history in histories] + [len(known_workloads.node_labels) if known_workloads else 0]
        ),
    }


@pytest.mark.parametrize("lost_every", [1_000_000, 3, 1])
def test_a_node_of_many_runs_snapshots_and_pods_is_remembered_in_little(lost_every: int) -> None:
    state, most = join.NEW, dict[str, int]()
    for i, (run_id, seq) in enumerate(itertools.product(range(40, 0, -1), range(1, 21))):
        ts_ms, named = i * 11_000, seq + 1_000 * ((i + 1) % lost_every == 0)
        state, joined_ticks = run(
            state,
            logged(workloads(i, pod(f"p{i}", started=ts_ms), ts_ms=ts_ms, labels={"i": str(i)}), ts_ms),
            snapshot(seq, container(f"p{i}", gpu(0)), run_id=run_id, ts_ms=ts_ms),
            pending(tick(seq, named, run_id=run_id, ts_ms=ts_ms), i, logged_ms=ts_ms + 2_000),
            AllocationsRead(i + GRACE_S),
            Committed(i + 1),
        )
        assert len(joined_ticks) == 1
        most = {kind: max(count, most.get(kind, 0)) for kind, count in size(state).items()}

    bounds = {"snapshots": 3, "runs": 8, "pending": 0, "marks": 2, "lifetimes": 9, "ends": 0, "changes": 3}
    assert {kind: count for kind, count in most.items() if count > bounds[kind]} == {}


def test_a_quiet_node_keeps_one_mark_in_ten_seconds() -> None:
    state, _ = run(join.NEW, snapshot(1), *(pending(tick(i, 1, ts_ms=i * 1000), i) for i in range(100)))

    assert len(state.marks) == 10


def test_a_pod_and_a_snapshot_that_uncommitted_samples_ask_for_are_kept() -> None:
    samples = [tick(i, 1 + i // 5, ts_ms=i * 5_000) for i in range(10)]
    before = (
        logged(workloads(1, pod("p", ended=20_000, labels={"a": "1"}))),
        snapshot(1, container("p", gpu(0))),
        snapshot(2),
    )
    state, first = run(
        join.NEW, *before, *(pending(sample, i) for i, sample in enumerate(samples)), Committed(4), Forget()
    )
    _, repeated = run(state, *(pending(sample, i) for i, sample in enumerate(samples) if i >= 4))

    assert [output.sample for output in repeated] == [output.sample for output in first[4:]]
    assert repeated[0].sample.devices[0].holders[0].labels == {"a": "1"}


def test_a_pod_is_kept_for_samples_of_a_run_whose_clock_was_set_back_before_the_commit() -> None:
    """A commit can lie between a sample of a fast clock and one of the run after it."""
    samples = [tick(1, 1), tick(2, 1, ts_ms=100_000), tick(1, 1, run_id=2, ts_ms=10_000)]
    state, first = run(
        join.NEW,
        logged(workloads(1, pod("p", ended=20_000, labels={"a": "1"}))),
        snapshot(1, container("p", gpu(0))),
        snapshot(1, container("p", gpu(0)), run_id=2),
        *(pending(sample, i) for i, sample in enumerate(samples)),
        Committed(2),
        Forget(),
    )
    _, repeated = run(state, pending(samples[2], 2))

    assert first[2].sample.devices[0].holders[0].pod_uid == "uid-p"
    assert repeated[0].sample == first[2].sample


def test_a_pod_is_kept_for_a_sample_that_waits_while_later_ones_are_committed() -> None:
    """Another run's clock may be behind the one whose samples are finished."""
    samples = [tick(1, 1), tick(2, 1, ts_ms=100_000), tick(1, 1, run_id=2, ts_ms=10_000)]
    state, _ = run(
        join.NEW,
        logged(workloads(1, pod("p", ended=20_000))),
        snapshot(1, container("p", gpu(0))),
        *(pending(sample, i) for i, sample in enumerate(samples)),
        Committed(2),
    )
    _, joined_ticks = run(state, snapshot(1, container("p", gpu(0)), run_id=2))

    assert [output.sample.devices[0].holders[0].pod_uid for output in joined_ticks] == ["uid-p"]


def test_the_last_snapshot_of_the_run_before_is_kept_while_a_late_sample_may_need_it() -> None:
    listed = snapshot(2, container("p", gpu(0)))
    state, _ = run(
        join.NEW, snapshot(1), listed, pending(tick(1, 1), 0), pending(tick(2, 2, ts_ms=11_000), 1), Committed(2)
    )
    _, joined_ticks = run(state, pending(tick(1, 1, run_id=9, ts_ms=12_000), 2), AllocationsRead(GRACE_S))

    assert joined_ticks[0].sample.attribution == "late"
    assert [holder.pod for holder in joined_ticks[0].sample.devices[0].holders] == ["p"]


def test_the_snapshots_of_the_next_run_are_kept_though_their_numbers_are_lower() -> None:
    read_ahead = snapshot(1, container("p", gpu(0)), run_id=2)
    ticks = pending(tick(1, 4), 0), pending(tick(2, 5, ts_ms=11_000), 1)
    state, _ = run(join.NEW, snapshot(4), snapshot(5), read_ahead, *ticks, Committed(2))
    _, joined_ticks = run(state, pending(tick(1, 1, run_id=2, ts_ms=12_000), 2), AllocationsRead(GRACE_S))

    assert joined_ticks[0].sample.attribution == "exact"


def test_snapshots_do_not_pile_up_behind_samples_that_never_name_one_of_them() -> None:
    state = join.NEW
    for i in range(50):
        state, _ = run(
            state,
            snapshot(i + 1, ts_ms=i * 11_000),
            pending(tick(i, i + 1000, ts_ms=i * 11_000), i),
            AllocationsRead(GRACE_S),
            Committed(i + 1),
        )

    assert len(state.snapshots) <= 2


def test_that_a_pod_has_ended_is_remembered_while_a_kubelet_that_begins_again_lists_nothing() -> None:
    listing = [container("p", gpu(0))]
    snapshots = snapshot(1, *listing), snapshot(2, ts_ms=90_000), snapshot(3, *listing, ts_ms=200_000)
    ticks = [pending(tick(1 + i, 1 + i // 5, ts_ms=i * 20_000), i) for i in range(13)]
    kept_all, all_out = run(join.NEW, logged(workloads(1, pod("p", ended=20_000))), *snapshots, *ticks)
    _, pruned_out = run(kept_all, Committed(9), Forget(), *ticks[9:])

    assert [bool(output.sample.devices[0].holders) for output in all_out] == [True, True, *[False] * 11]
    assert [output.sample for output in pruned_out] == [output.sample for output in all_out[9:]]


# -- the last answer is used again only where it is the same


def test_a_minor_number_that_appears_within_a_snapshot_counts() -> None:
    """An id that names the device file means another device once the tick says which."""
    listed, first, second = snapshot(1, container("p", "nvidia1")), tick(1, 1), tick(2, 1)
    swapped = tuple(replace(device, minor=1 - (device.index or 0)) for device in second.devices)
    second = replace(second, devices=swapped)

    _, joined_ticks = run(join.NEW, listed, pending(first, 0), pending(second, 1))

    assert [[bool(device.holders) for device in o.sample.devices] for o in joined_ticks] == [
        [False, True],
        [True, False],
    ]


def test_device_ids_in_no_grammar_are_reported_once_a_snapshot() -> None:
    listed = snapshot(1, container("p", "strange", gpu(0)))

    _, joined_ticks = run(join.NEW, listed, pending(tick(1, 1), 0), pending(tick(2, 1), 1))

    assert [output.unknown_ids for output in joined_ticks] == [("strange",), ()]
    assert all(output.sample.devices[0].holders for output in joined_ticks)


def test_a_resource_slice_that_changes_within_a_snapshot_counts() -> None:
    claimed = Container("ns", "p", "main", claims=(Claim("claim", "ns", "gpu.nvidia.com", "n", "gpu-0"),))
    slices = [
        logged(replace(workloads(i, ts_ms=i * 1000), dra_devices=(DraDevice("gpu.nvidia.com", "n", "gpu-0", gpu(i)),)))
        for i in range(2)
    ]

    ticks = (pending(tick(i, 1, ts_ms=i * 1000), i) for i in range(2))
    _, joined_ticks = run(join.NEW, *slices, snapshot(1, claimed), *ticks)

    assert [[bool(device.holders) for device in o.sample.devices] for o in joined_ticks] == [
        [True, False],
        [False, True],
    ]


def test_a_claim_that_only_looks_at_a_device_holds_nothing_and_may_be_reported_within_a_snapshot() -> None:
    allocated, monitoring = (Claim(name, "ns", "gpu.nvidia.com", "n", "gpu-0") for name in ("given", "monitoring"))
    of_claims = [Container("ns", claim.claim, "main", claims=(claim,)) for claim in (allocated, monitoring)]
    also = replace(of_claims[1], pod="also", device_ids=(gpu(1),))
    device = DraDevice("gpu.nvidia.com", "n", "gpu-0", gpu(0))
    claims = [
        logged(replace(workloads(i, ts_ms=i * 1000), dra_devices=(device,), admin_claims=admin))
        for i, admin in enumerate([(), (monitoring,), ()])
    ]
    ticks = (pending(tick(i, 1, ts_ms=i * 1000), i) for i in range(3))
    _, joined_ticks = run(join.NEW, *claims, snapshot(1, *of_claims, also), *ticks)

    pods = [[[holder.pod for holder in device.holders] for device in output.sample.devices] for output in joined_ticks]
    everyone = [["given", "monitoring", "also"], ["also"]]
    assert pods == [everyone, [["given"], ["also"]], everyone]


def test_a_pod_that_only_looks_holds_nothing_from_its_first_tick_on() -> None:
    """Its first ticks come before the records that have it and its claim have been logged for two seconds."""
    allocated, monitoring = (Claim(name, "ns", "gpu.nvidia.com", "n", "gpu-0") for name in ("given", "monitoring"))
    of_claims = [Container("ns", claim.claim, "main", claims=(claim,)) for claim in (allocated, monitoring)]
    before = replace(workloads(1, pod("given")), dra_devices=(DraDevice("gpu.nvidia.com", "n", "gpu-0", gpu(0)),))
    after = replace(
        before, seq=2, ts_ms=9_500, pods=(*before.pods, pod("monitoring", started=9_000)), admin_claims=(monitoring,)
    )
    snapshots = [snapshot(1, of_claims[0]), snapshot(2, *of_claims, ts_ms=9_400)]
    ticks = [pending(tick(i, 2, ts_ms=ms), i, logged_ms=ms) for i, ms in enumerate((9_400, 10_000, 11_000, 12_000))]

    _, joined_ticks = run(join.NEW, logged(before), *snapshots, logged(after, 9_500), *ticks)

    assert [[holder.pod for holder in output.sample.devices[0].holders] for output in joined_ticks] == [["given"]] * 4
