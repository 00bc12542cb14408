"""The join: what a sample waits for, and for how long."""

from collections.abc import Iterable

import pytest

from streams.attribution import join
from streams.attribution.attribute import Joined
from streams.attribution.join import AllocationsRead, Forget, NodeState, PendingTick, WatermarkRaised, needs_end
from streams.attribution.log_time import Watermark
from tests.streams.attribution import records
from tests.streams.attribution.reading import GRACE_S, run
from tests.streams.attribution.records import container, gpu, logged, pod, process, snapshot, tick, workloads
from topics.attributed import Attribution
from topics.samples import Sample
from topics.workloads import NodeWorkloads, Pod

SNAPSHOT = snapshot(1, container("p", gpu(0)))


def pending(
    sample: Sample, at_s: float = 0.0, logged_ms: int = 10_000, watermark_ms: float = float("inf")
) -> PendingTick:
    """A sample that was read at a time, in offset order of its seq."""
    return records.pending(sample, sample.seq, at_s, logged_ms=logged_ms, watermark_ms=watermark_ms)


def attributions(joined_ticks: Iterable[Joined]) -> list[tuple[int, Attribution]]:
    return [(output.sample.seq, output.sample.attribution) for output in joined_ticks]


def lost_once() -> NodeState:
    """A node that has run out of grace: its snapshot 2 never came."""
    state, joined_ticks = run(join.NEW, SNAPSHOT, pending(tick(1, 2), 0.0), AllocationsRead(GRACE_S))
    assert attributions(joined_ticks) == [(1, "late")]
    return state


def test_a_sample_goes_at_once_when_its_snapshot_is_there() -> None:
    assert attributions(run(join.NEW, SNAPSHOT, pending(tick(1, 1), 0.0))[1]) == [(1, "exact")]


def test_a_sample_waits_for_its_snapshot_and_those_behind_it_wait_too() -> None:
    state, joined_ticks = run(join.NEW, SNAPSHOT, pending(tick(1, 2), 0.0), pending(tick(2, 1), 0.0))
    assert joined_ticks == []

    assert attributions(run(state, snapshot(2))[1]) == [(1, "exact"), (2, "exact")]


def test_a_snapshot_of_another_run_with_the_same_number_is_not_the_one() -> None:
    _, joined_ticks = run(join.NEW, SNAPSHOT, pending(tick(1, 1, run_id=2), 0.0))

    assert joined_ticks == []


@pytest.mark.parametrize(("asked_s", "released"), [(14.999, []), (15.0, [(1, "none")])])
def test_grace_is_up_when_an_end_has_been_read_that_was_asked_that_long_after_the_sample(
    asked_s: float, released: list[tuple[int, str]]
) -> None:
    _, joined_ticks = run(join.NEW, pending(tick(1, 1), 5.0), AllocationsRead(asked_s))

    assert attributions(joined_ticks) == released


def test_a_node_that_ran_out_of_grace_waits_only_for_an_end_asked_after_the_sample() -> None:
    state, joined_ticks = run(lost_once(), pending(tick(2, 2), 20.0), AllocationsRead(19.9))
    assert joined_ticks == []

    assert attributions(run(state, AllocationsRead(20.0))[1]) == [(2, "late")]


def test_a_snapshot_makes_the_node_wait_the_whole_grace_again() -> None:
    state, joined_ticks = run(lost_once(), snapshot(3), pending(tick(2, 4), 20.0), AllocationsRead(29.9))
    assert joined_ticks == []

    assert attributions(run(state, AllocationsRead(30.0))[1]) == [(2, "late")]


def test_a_snapshot_that_is_sent_again_makes_the_node_wait_the_whole_grace_again() -> None:
    _, joined_ticks = run(lost_once(), SNAPSHOT, pending(tick(2, 2), 20.0), AllocationsRead(29.9))

    assert joined_ticks == []


def test_a_node_that_holds_more_than_64_samples_does_not_wait_for_grace() -> None:
    ticks = [pending(tick(seq, 1), 5.0) for seq in range(1, join.MAX_PENDING + 1)]
    state, joined_ticks = run(join.NEW, *ticks, AllocationsRead(5.0))
    assert joined_ticks == []

    state, joined_ticks = run(state, pending(tick(65, 1), 5.0))
    assert attributions(joined_ticks) == [(seq, "none") for seq in range(1, 66)]


def test_an_older_end_that_arrives_later_takes_nothing_back() -> None:
    _, joined_ticks = run(join.NEW, AllocationsRead(50.0), AllocationsRead(1.0), pending(tick(1, 1), 30.0))

    assert attributions(joined_ticks) == [(1, "none")]


@pytest.mark.parametrize(("now_s", "needed"), [(14.9, False), (15.0, True)])
def test_an_end_is_requested_when_grace_is_up(now_s: float, needed: bool) -> None:
    state, _ = run(join.NEW, pending(tick(1, 1), 5.0))

    assert needs_end(state, now_s, GRACE_S) is needed


def test_a_node_without_grace_needs_an_end_at_once() -> None:
    state, _ = run(lost_once(), pending(tick(2, 2), 20.0))

    assert needs_end(state, 20.0, GRACE_S)


def test_no_end_is_requested_for_a_node_that_waits_for_nothing_or_for_a_pod() -> None:
    waiting_for_a_pod, joined_ticks = run(
        join.NEW, logged(workloads(1)), SNAPSHOT, pending(tick(1, 1), watermark_ms=10_000)
    )

    assert joined_ticks == []
    assert not needs_end(waiting_for_a_pod, 1e9, GRACE_S)
    assert not needs_end(join.NEW, 1e9, GRACE_S)


def test_an_end_that_was_read_is_not_requested_again() -> None:
    state, joined_ticks = run(
        join.NEW, logged(workloads(1)), SNAPSHOT, pending(tick(1, 2), watermark_ms=0), AllocationsRead(GRACE_S)
    )

    assert joined_ticks == []
    assert not needs_end(state, 1e9, GRACE_S)


def test_a_forgotten_sample_is_never_released() -> None:
    state, _ = run(join.NEW, pending(tick(1, 1), 0.0), Forget())
    state, joined_ticks = run(state, SNAPSHOT, AllocationsRead(1e9))
    assert joined_ticks == []

    assert attributions(run(state, pending(tick(1, 1), 2e9))[1]) == [(1, "exact")]


# -- pods, in log time: ticks are logged at 10 s, but where another time is said


def uids(joined_ticks: Iterable[Joined]) -> list[str | None]:
    """The uid of the holder of the first GPU, by tick."""
    return [output.sample.devices[0].holders[0].pod_uid for output in joined_ticks]


def unknown(joined_ticks: Iterable[Joined]) -> list[bool]:
    """Whether the holder of the first GPU is one that the workloads do not have, by tick."""
    return [output.sample.devices[0].holders[0].pod_unknown for output in joined_ticks]


def test_if_nothing_reports_workloads_no_pod_is_waited_for() -> None:
    _, joined_ticks = run(join.NEW, SNAPSHOT, pending(tick(1, 1), watermark_ms=8_000))

    assert (uids(joined_ticks), unknown(joined_ticks)) == ([None], [False])


def test_a_node_whose_first_record_was_logged_too_late_for_a_tick_has_no_known_pods_in_it() -> None:
    _, joined_ticks = run(
        join.NEW, logged(workloads(1, pod("p")), 8_001), SNAPSHOT, pending(tick(1, 1)), pending(tick(2, 1), 0.0, 10_001)
    )

    assert (uids(joined_ticks), unknown(joined_ticks)) == ([None, "uid-p"], [False, False])


def test_a_tick_waits_until_the_workloads_are_read_to_two_seconds_before_it() -> None:
    state, joined_ticks = run(
        join.NEW, SNAPSHOT, pending(tick(1, 1), watermark_ms=7_999), logged(workloads(1, pod("p")), 7_999)
    )
    assert (joined_ticks, state.needed_ms) == ([], 8_000)

    assert uids(run(state, WatermarkRaised(8_000))[1]) == ["uid-p"]


def test_a_pod_that_is_known_is_waited_for_no_longer() -> None:
    _, joined_ticks = run(
        join.NEW, logged(workloads(1, pod("p")), 8_000), SNAPSHOT, pending(tick(1, 1), watermark_ms=8_000)
    )

    assert uids(joined_ticks) == ["uid-p"]


def test_what_was_logged_later_changes_nothing_for_a_pod_that_is_known() -> None:
    first, later = (
        logged(workloads(n, pod("p", labels={"n": str(n)})), logged_ms) for n, logged_ms in ((1, 0), (2, 8_001))
    )
    _, joined_ticks = run(join.NEW, first, later, SNAPSHOT, pending(tick(1, 1)), pending(tick(2, 1), 0.0, 10_001))

    assert [output.sample.devices[0].holders[0].labels for output in joined_ticks] == [{"n": "1"}, {"n": "2"}]


@pytest.mark.parametrize(("logged_ms", "uid"), [(8_001, "uid-p"), (12_000, "uid-p"), (12_001, None)])
def test_a_missing_pod_is_that_of_the_first_record_until_two_seconds_later(logged_ms: int, uid: str | None) -> None:
    state, joined_ticks = run(join.NEW, logged(workloads(1)), SNAPSHOT, pending(tick(1, 1), watermark_ms=8_000))
    assert (joined_ticks, state.needed_ms) == ([], 12_000)

    news = logged(workloads(2, pod("p")), logged_ms), logged(workloads(3, pod("p", uid="another")), logged_ms + 1)
    live, replayed = (
        run(state, *news, WatermarkRaised(12_001))[1],
        run(join.NEW, logged(workloads(1)), *news, SNAPSHOT)[0],
    )
    assert (uids(live), unknown(live)) == ([uid], [uid is None])
    assert run(replayed, pending(tick(1, 1)))[1] == live


def test_a_missing_pod_is_only_named_once_everything_is_read() -> None:
    state, joined_ticks = run(join.NEW, logged(workloads(1)), SNAPSHOT, pending(tick(1, 1), watermark_ms=11_999))
    assert joined_ticks == []

    _, joined_ticks = run(state, WatermarkRaised(12_000))
    holder = joined_ticks[0].sample.devices[0].holders[0]
    assert (holder.namespace, holder.pod, holder.pod_uid, holder.workload) == ("ns", "p", None, None)
    assert holder.pod_unknown


@pytest.mark.parametrize(
    "other", [pod("p", uid="old", started=1, ended=2), pod("p", uid="next", started=60_000)], ids=["before", "after"]
)
def test_a_pod_of_that_name_at_another_time_is_not_the_pod(other: Pod) -> None:
    new = snapshot(2, container("p", gpu(0)), ts_ms=29_000)
    _, joined_ticks = run(
        join.NEW, logged(workloads(1, other)), snapshot(1, ts_ms=20_000), new, pending(tick(1, 2, ts_ms=29_000))
    )

    holders = joined_ticks[0].sample.devices[0].holders
    assert [holder.pod_uid for holder in holders] == ([None] if other.uid == "next" else [])


# -- which pod of a name


def renewed(*pods: Pod, before: int = 0) -> list[join.Record]:
    """The pod p is in the snapshots until 20 s, then missing, and back at 21 s. Its records are known by 8 s."""
    away, back = snapshot(2, ts_ms=20_000), snapshot(3, container("p", gpu(0)), ts_ms=21_000)
    return [logged(workloads(1, *pods), before), SNAPSHOT, away, back]


OLD, NEW = pod("p", uid="old", started=1_000), pod("p", uid="new", started=20_000)


def test_a_name_that_comes_back_after_it_was_gone_is_a_new_pod_and_waited_for() -> None:
    state, joined_ticks = run(join.NEW, *renewed(OLD), pending(tick(1, 3, ts_ms=21_000), watermark_ms=8_000))
    assert (joined_ticks, state.needed_ms) == ([], 12_000)

    assert uids(run(state, logged(workloads(2, OLD, NEW), 9_000))[1]) == ["new"]


@pytest.mark.parametrize("run_id", [1, 2], ids=["the same run", "the next run of the producer"])
def test_a_name_is_known_to_be_missing_and_then_to_be_new_whatever_snapshots_come(run_id: int) -> None:
    away, other = snapshot(2, ts_ms=20_000), snapshot(3, container("q", gpu(1)), ts_ms=20_500)
    containers = container("p", gpu(0)), container("p", gpu(1), name="side")
    back = [snapshot(4 + n, *containers[: n + 1], ts_ms=21_000 + n, run_id=run_id) for n in range(2)]
    for n in range(2):
        last = pending(tick(1, 4 + n, ts_ms=21_000 + n, run_id=run_id), watermark_ms=8_000)
        state, joined_ticks = run(join.NEW, logged(workloads(1, OLD), 0), SNAPSHOT, away, other, *back, last)
        assert (joined_ticks, state.needed_ms) == ([], 12_000)


def test_the_watermark_is_below_the_last_record_and_never_falls() -> None:
    watermark = Watermark()
    watermark.workloads_read(0, 10_000)
    assert watermark.ms == 9_999  # another record may be of the same millisecond
    watermark.sample_read(0, 5_000, 0.0)
    watermark.add_ends(1.0, 1, 1)
    watermark.read_to(1)
    assert watermark.ms == 9_999


def test_a_sample_of_a_backlog_raises_the_watermark_to_half_a_second_before_it() -> None:
    watermark = Watermark()
    watermark.add_ends(0.0, 0, 5)
    watermark.add_ends(1.0, 0, 5)
    watermark.read_to(0)
    watermark.sample_read(4, 10_000, 2.0)
    assert watermark.ms == 9_500

    watermark.forget()  # the offsets may be those of another log
    watermark.sample_read(4, 20_000, 3.0)
    assert watermark.ms == 9_500
    watermark.add_ends(3.0, 0, 5)
    watermark.read_to(0)
    watermark.sample_read(4, 30_000, 4.0)
    assert watermark.ms == 19_500


def test_without_evidence_of_a_new_pod_it_is_the_old_one() -> None:
    ticks = [pending(tick(n, 3, ts_ms=21_000 + n), watermark_ms=12_000) for n in (0, 9_999, 10_000)]
    state, joined_ticks = run(join.NEW, *renewed(OLD), *ticks)

    assert (uids(joined_ticks), unknown(joined_ticks)) == (["old"] * 3, [False] * 3)
    assert run(state, pending(tick(4, 3, ts_ms=31_000), watermark_ms=8_000))[1] != []


def test_a_pod_that_a_record_lacks_may_still_be_the_one_whose_name_comes_back() -> None:
    lacks_it = logged(workloads(2, ts_ms=20_500), 5_000)
    _, joined_ticks = run(join.NEW, *renewed(OLD), lacks_it, pending(tick(1, 3, ts_ms=21_000), watermark_ms=12_000))
    assert (uids(joined_ticks), unknown(joined_ticks)) == (["old"], [False])


def test_a_name_that_comes_back_after_its_pods_end_is_no_pod_that_is_over_however_late_the_new_ones_record_is() -> None:
    ended_workloads = workloads(1, pod("p", uid="old", started=1_000, ended=19_000), pod("q"))
    ticks = [
        pending(tick(n, 3, ts_ms=ms), watermark_ms=12_000) for n, ms in enumerate((21_000, 30_000, 31_000, 300_000))
    ]
    p, q = container("p", gpu(0)), container("q", gpu(1))
    snapshots = snapshot(1, p, q), snapshot(2, q, ts_ms=20_000), snapshot(3, p, q, ts_ms=21_000)
    _, joined_ticks = run(join.NEW, logged(ended_workloads), *snapshots, *ticks)

    assert (uids(joined_ticks), unknown(joined_ticks)) == ([None] * 4, [True] * 4)
    later = pending(tick(1, 3, ts_ms=321_000), watermark_ms=12_000)
    assert pods_held(run(join.NEW, logged(ended_workloads), *snapshots, later)[1]) == [[]]


@pytest.mark.parametrize(("ended_ms", "held"), [(20_100, ["p"]), (22_000, ["p"]), (22_001, [])])
def test_the_kubelet_may_drop_a_pod_two_seconds_before_its_end_is_reported(ended_ms: int, held: list[str]) -> None:
    ended_workloads = workloads(1, pod("p", uid="old", started=1_000, ended=ended_ms), pod("q"))
    p, q = container("p", gpu(0)), container("q", gpu(1))
    snapshots = snapshot(1, p, q), snapshot(2, q, ts_ms=20_000), snapshot(3, p, q, ts_ms=40_000)
    ticks = [pending(tick(n, 3, ts_ms=ms)) for n, ms in enumerate((40_000, 60_000))]
    _, joined_ticks = run(join.NEW, logged(ended_workloads), *snapshots, *ticks)

    assert pods_held(joined_ticks) == [held, held]
    assert not held or unknown(joined_ticks) == [True, True]


def test_the_uid_of_a_process_decides_before_the_time_does() -> None:
    both = logged(workloads(1, pod("p", uid="old", started=1_000, ended=20_500), NEW))
    samples = {uid: tick(1, 1, ts_ms=20_100, processes=((process(uid),),)) for uid in ("old", "new", None)}

    uids_held = {uid: uids(run(join.NEW, both, SNAPSHOT, pending(sample))[1]) for uid, sample in samples.items()}
    assert uids_held == {"old": ["old"], "new": ["new"], None: ["old"]}


@pytest.mark.parametrize("ts_ms", [23_000, 30_000])
def test_the_process_of_a_pod_that_was_deleted_by_force_shows_that_its_name_does_not_mean_the_next_one_yet(
    ts_ms: int,
) -> None:
    deleted = workloads(1, pod("p", uid="old", started=1_000, ended=20_000), pod("p", uid="new", started=20_500))
    samples = [tick(n, 1, ts_ms=ts_ms, processes=((process(uid),),)) for n, uid in enumerate(("old", "new", None))]
    _, joined_ticks = run(join.NEW, logged(deleted), SNAPSHOT, *map(pending, samples))

    assert (uids(joined_ticks), unknown(joined_ticks)) == (["old", "new", "new"], [False] * 3)
    assert [output.sample.devices[0].conflict for output in joined_ticks] == [None, None, "no_pod"]


def test_a_process_of_a_pod_that_is_not_known_yet_is_waited_for_although_its_name_is() -> None:
    sample = tick(1, 1, ts_ms=20_100, processes=((process("new"),),))
    state, joined_ticks = run(join.NEW, logged(workloads(1, OLD)), SNAPSHOT, pending(sample, watermark_ms=8_000))
    assert joined_ticks == []

    assert uids(run(state, logged(workloads(2, OLD, NEW), 9_000))[1]) == ["new"]


# -- pods that ended, and that the kubelet goes on listing

OVER = logged(workloads(1, pod("p", ended=20_000)))


def listed(seq: int, ts_ms: int, watermark_ms: float = float("inf")) -> PendingTick:
    """A tick of the snapshot that has the pod."""
    return pending(tick(seq, 1, ts_ms=ts_ms), ts_ms / 1000, watermark_ms=watermark_ms)


def pods_held(joined_ticks: Iterable[Joined]) -> list[list[str]]:
    """The holders of the first GPU, by tick."""
    return [[holder.pod for holder in output.sample.devices[0].holders] for output in joined_ticks]


def test_a_pod_that_ended_more_than_ten_seconds_before_holds_nothing_from_one_tick_to_the_next() -> None:
    _, joined_ticks = run(
        join.NEW, OVER, SNAPSHOT, *[listed(n, ms, 8_000) for n, ms in enumerate([21_000, 30_000, 30_001])]
    )

    assert pods_held(joined_ticks) == [["p"], ["p"], []]
    assert uids(joined_ticks[:2]) == ["uid-p", "uid-p"]


def test_one_that_is_over_and_one_whose_name_has_a_new_pod_in_the_same_tick_change_places() -> None:
    pods = pod("p", ended=20_000), pod("q", ended=0), pod("q", uid="next", started=32_500)
    shared = snapshot(1, container("p", gpu(0)), container("q", gpu(0)))
    _, joined_ticks = run(join.NEW, logged(workloads(1, *pods)), shared, listed(1, 30_000), listed(2, 31_000))

    assert pods_held(joined_ticks) == [["p"], ["q"]]


def test_the_other_pods_of_the_snapshot_hold_what_they_held() -> None:
    shared = snapshot(1, container("p", f"{gpu(0)}::0"), container("q", f"{gpu(0)}::1"))
    _, joined_ticks = run(join.NEW, logged(workloads(1, pod("p", ended=20_000), pod("q"))), shared, listed(1, 60_000))

    assert pods_held(joined_ticks) == [["q"]]


def test_beside_a_pod_that_is_over_one_that_is_not_known_yet_is_waited_for() -> None:
    shared = snapshot(1, container("p", gpu(0)), container("q", gpu(0)))
    state, joined_ticks = run(join.NEW, OVER, shared, listed(1, 60_000, 8_000))
    assert (joined_ticks, state.needed_ms) == ([], 12_000)

    q = logged(workloads(2, pod("p", ended=20_000), pod("q")), 9_000)
    assert pods_held(run(state, q)[1]) == [["q"]]


@pytest.mark.parametrize(
    "node_workloads",
    [
        (workloads(1, pod("p")),),
        (workloads(1, pod("p")), workloads(2, ts_ms=20_000)),
        (workloads(1, pod("p", ended=20_000)), workloads(2, pod("p"), ts_ms=25_000)),
        (workloads(1, pod("p", ended=20_000), pod("p", uid="next", started=61_000)),),
        (workloads(1, pod("p", ended=20_000), pod("p", uid="next", started=30_000, ended=55_000)),),
        (workloads(1, pod("q", ended=20_000)),),
    ],
    ids=["runs", "is only missing", "runs after all", "another begins", "another ended just now", "of another name"],
)
def test_the_kubelet_wins_if_the_pods_end_is_not_reported_or_another_pod_may_be_meant(
    node_workloads: tuple[NodeWorkloads, ...],
) -> None:
    assert pods_held(run(join.NEW, *map(logged, node_workloads), SNAPSHOT, listed(1, 60_000))[1]) == [["p"]]


def test_a_pod_that_ended_long_ago_is_waited_for_while_its_name_is_new_in_the_snapshots() -> None:
    records = (OVER, snapshot(1, ts_ms=55_000), snapshot(2, container("p", gpu(0)), ts_ms=60_000))
    state, joined_ticks = run(join.NEW, *records, pending(tick(1, 2, ts_ms=60_000), watermark_ms=8_000))
    assert joined_ticks == []

    assert pods_held(run(state, logged(workloads(2, pod("p", uid="next", started=59_000)), 9_000))[1]) == [["p"]]
    assert pods_held(run(state, WatermarkRaised(12_000), pending(tick(2, 2, ts_ms=70_000), watermark_ms=8_000))[1]) == [
        [],
        [],
    ]


# -- pods that only processes show


def tick_with_processes(seq: int, *uids: str | None, memory: int | None = 40) -> Sample:
    """A tick of the snapshot 1 in which processes of these pods are on the second GPU, which nobody was given."""
    return tick(seq, 1, processes=((), tuple(process(uid, memory) for uid in uids)))


def observed_pods(joined_ticks: Iterable[Joined]) -> list[tuple[int, list[str]]]:
    """The observed pods on the second GPU, by tick."""
    return [
        (output.sample.seq, [h.pod for h in output.sample.devices[1].holders if h.observed]) for output in joined_ticks
    ]


HELD_BY_P = (logged(workloads(1, pod("p"))), SNAPSHOT)


@pytest.mark.parametrize(("logged_ms", "names"), [(8_001, ["q"]), (12_000, ["q"]), (12_001, [])])
def test_a_pod_that_only_its_processes_show_is_that_of_the_first_record_until_two_seconds_later(
    logged_ms: int, names: list[str]
) -> None:
    state, joined_ticks = run(join.NEW, *HELD_BY_P, pending(tick_with_processes(1, "uid-q"), watermark_ms=8_000))
    assert joined_ticks == []

    news = logged(workloads(2, pod("p"), pod("q")), logged_ms)
    assert observed_pods(run(state, news, WatermarkRaised(12_000))[1]) == [(1, names)]


@pytest.mark.parametrize(
    "records",
    [
        (SNAPSHOT, pending(tick_with_processes(1, "uid-q"), watermark_ms=8_000)),
        (*HELD_BY_P, pending(tick(1, None, processes=((process("uid-q"),),)), watermark_ms=8_000)),
        (*HELD_BY_P, pending(tick_with_processes(1, "uid-q", memory=None), watermark_ms=8_000)),
        (*HELD_BY_P, pending(tick_with_processes(1, None), watermark_ms=8_000)),
        (*HELD_BY_P, pending(tick_with_processes(1, "uid-p"), watermark_ms=8_000)),
        (*HELD_BY_P, pending(tick_with_processes(1, "0123456789abcdef" * 2), watermark_ms=8_000)),
    ],
    ids=["no workloads", "no kubelet", "no memory", "of no pod", "known", "static"],
)
def test_nothing_is_waited_for_that_would_change_nothing(records: tuple[join.Record, ...]) -> None:
    assert len(run(join.NEW, *records)[1]) == 1
