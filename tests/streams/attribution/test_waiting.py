"""The join: what a sample waits for, and for how long."""

from collections.abc import Iterable

import pytest

from streams.attribution import join
from streams.attribution.join import AllocationsRead, Forget, Joined, NodeState, Passed, Tick, wants_end
from tests.streams.attribution.records import container, gpu, known, pod, process, snapshot, tick
from topics.attributed import Attribution
from topics.samples import Sample
from topics.workloads import NodeWorkloads

GRACE_S = 10.0
SNAPSHOT = snapshot(1, container("p", gpu(0)))


def run(state: NodeState, *records: join.Record) -> tuple[NodeState, list[Joined]]:
    """The state after some records, and all that they let go."""
    out: list[Joined] = []
    for record in records:
        state, joined = join.step(state, record, GRACE_S)
        out += joined
    return state, out


def read(sample: Sample, at_s: float) -> Tick:
    """A sample that was read at a time, in offset order of its seq."""
    return Tick(sample, sample.seq, at_s, at_s + join.POD_WAIT_S)


def attributions(out: Iterable[Joined]) -> list[tuple[int, Attribution]]:
    return [(one.sample.seq, one.sample.attribution) for one in out]


def lost_once() -> NodeState:
    """A node that has run out of grace: its snapshot 2 never came."""
    state, out = run(join.NEW, SNAPSHOT, read(tick(1, 2), 0.0), AllocationsRead(GRACE_S))
    assert attributions(out) == [(1, "late")]
    return state


def test_a_sample_goes_at_once_when_its_snapshot_is_there() -> None:
    assert attributions(run(join.NEW, SNAPSHOT, read(tick(1, 1), 0.0))[1]) == [(1, "exact")]


def test_a_sample_waits_for_its_snapshot_and_those_behind_it_wait_too() -> None:
    state, out = run(join.NEW, SNAPSHOT, read(tick(1, 2), 0.0), read(tick(2, 1), 0.0), Passed(1e9))
    assert out == []

    assert attributions(run(state, snapshot(2))[1]) == [(1, "exact"), (2, "exact")]


def test_a_snapshot_of_another_run_with_the_same_number_is_not_the_one() -> None:
    _, out = run(join.NEW, SNAPSHOT, read(tick(1, 1, run_id=2), 0.0))

    assert out == []


@pytest.mark.parametrize(("asked_s", "released"), [(14.999, []), (15.0, [(1, "none")])])
def test_grace_is_up_when_an_end_has_been_read_that_was_asked_that_long_after_the_sample(
    asked_s: float, released: list[tuple[int, str]]
) -> None:
    _, out = run(join.NEW, read(tick(1, 1), 5.0), Passed(1e9), AllocationsRead(asked_s))

    assert attributions(out) == released


def test_a_node_that_ran_out_of_grace_waits_only_for_an_end_asked_after_the_sample() -> None:
    state, out = run(lost_once(), read(tick(2, 2), 20.0), AllocationsRead(19.9))
    assert out == []

    assert attributions(run(state, AllocationsRead(20.0))[1]) == [(2, "late")]


def test_a_snapshot_makes_the_node_wait_the_whole_grace_again() -> None:
    state, out = run(lost_once(), snapshot(3), read(tick(2, 4), 20.0), AllocationsRead(29.9))
    assert out == []

    assert attributions(run(state, AllocationsRead(30.0))[1]) == [(2, "late")]


def test_a_snapshot_that_is_sent_again_makes_the_node_wait_the_whole_grace_again() -> None:
    _, out = run(lost_once(), SNAPSHOT, read(tick(2, 2), 20.0), AllocationsRead(29.9))

    assert out == []


def test_a_node_that_holds_more_than_64_samples_does_not_wait_for_grace() -> None:
    state, out = run(join.NEW, *(read(tick(seq, 1), 5.0) for seq in range(1, join.MAX_HELD + 1)), AllocationsRead(5.0))
    assert out == []

    state, out = run(state, read(tick(65, 1), 5.0))
    assert attributions(out) == [(seq, "none") for seq in range(1, 66)]


def test_an_older_end_that_arrives_later_takes_nothing_back() -> None:
    _, out = run(join.NEW, AllocationsRead(50.0), AllocationsRead(1.0), read(tick(1, 1), 30.0))

    assert attributions(out) == [(1, "none")]


@pytest.mark.parametrize(("now_s", "wanted"), [(14.9, False), (15.0, True)])
def test_an_end_is_wanted_when_grace_is_up(now_s: float, wanted: bool) -> None:
    state, _ = run(join.NEW, read(tick(1, 1), 5.0))

    assert wants_end(state, now_s, GRACE_S) is wanted


def test_an_impatient_node_wants_an_end_at_once() -> None:
    state, _ = run(lost_once(), read(tick(2, 2), 20.0))

    assert wants_end(state, 20.0, GRACE_S)


def test_no_end_is_wanted_for_a_node_that_waits_for_nothing_or_for_a_pod() -> None:
    waiting_for_a_pod, out = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0))

    assert out == []
    assert not wants_end(waiting_for_a_pod, 1e9, GRACE_S)
    assert not wants_end(join.NEW, 1e9, GRACE_S)


def test_an_end_that_was_read_is_not_wanted_again() -> None:
    state, out = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 2), 0.0), AllocationsRead(GRACE_S))

    assert out == []
    assert not wants_end(state, 1e9, GRACE_S)


def test_what_was_forgotten_does_not_come_out() -> None:
    state, _ = run(join.NEW, read(tick(1, 1), 0.0), Forget())
    state, out = run(state, SNAPSHOT, AllocationsRead(1e9))
    assert out == []

    assert attributions(run(state, read(tick(1, 1), 2e9))[1]) == [(1, "exact")]


# -- pods


def test_where_nothing_tells_of_workloads_no_pod_is_waited_for() -> None:
    _, out = run(join.NEW, SNAPSHOT, read(tick(1, 1), 0.0))

    assert out[0].sample.devices[0].holders[0].pod_uid is None


def test_a_new_pod_is_waited_for_until_the_workloads_have_it() -> None:
    state, out = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0), Passed(1.9))
    assert out == []

    _, out = run(state, known(2, pod("p")))
    assert out[0].sample.devices[0].holders[0].pod_uid == "uid-p"


def test_a_new_pod_is_waited_for_two_seconds_and_then_only_named() -> None:
    state, out = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0), Passed(1.999))
    assert out == []

    _, out = run(state, Passed(2.0))
    holder = out[0].sample.devices[0].holders[0]
    assert (holder.namespace, holder.pod, holder.pod_uid, holder.workload) == ("ns", "p", None, None)


def test_a_pod_that_did_not_come_is_not_waited_for_by_later_samples() -> None:
    _, out = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0), Passed(2.0), read(tick(2, 1), 2.0))

    assert attributions(out) == [(1, "exact"), (2, "exact")]


def test_another_pod_is_waited_for_although_one_did_not_come() -> None:
    both = snapshot(2, container("p", gpu(0)), container("q", gpu(1)))

    state, out = run(join.NEW, known(1), SNAPSHOT, both, read(tick(1, 1), 0.0), Passed(2.0), read(tick(2, 2), 2.0))

    assert attributions(out) == [(1, "exact")]
    assert attributions(run(state, Passed(4.0))[1]) == [(2, "exact")]


def test_a_pod_that_comes_after_it_was_given_up_is_known_to_the_samples_that_follow() -> None:
    _, out = run(
        join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0), Passed(2.0), known(2, pod("p")), read(tick(2, 1), 3.0)
    )

    assert [one.sample.devices[0].holders[0].pod_uid for one in out] == [None, "uid-p"]


@pytest.mark.parametrize(
    "record", [known(1, pod("p", uid="old", ended=25_000)), known(1, pod("p", uid="next", started=60_000))]
)
def test_a_pod_of_that_name_at_another_time_is_not_the_pod(record: NodeWorkloads) -> None:
    _, out = run(join.NEW, record, SNAPSHOT, read(tick(1, 1, ts_ms=30_000), 0.0), Passed(2.0))

    assert [one.sample.devices[0].holders[0].pod_uid for one in out] == [None]


def test_the_next_pod_of_a_name_that_was_given_up_once_is_waited_for() -> None:
    state, _ = run(join.NEW, known(1), SNAPSHOT, read(tick(1, 1), 0.0), Passed(2.0))
    state, _ = run(state, known(2, pod("p", ended=10_000)), snapshot(2), read(tick(2, 2, ts_ms=11_000), 11.0))

    state, out = run(state, read(tick(3, 1, ts_ms=60_000), 60.0), Passed(61.9))
    assert out == []

    _, out = run(state, known(3, pod("p", uid="next", started=59_000)))
    assert out[0].sample.devices[0].holders[0].pod_uid == "next"


# -- pods that ended, and that the kubelet goes on listing

OVER = known(1, pod("p", ended=20_000))


def listed(seq: int, ts_ms: int) -> Tick:
    """A tick of the snapshot that has the pod, read when it was made."""
    return read(tick(seq, 1, ts_ms=ts_ms), ts_ms / 1000)


def held(out: Iterable[Joined]) -> list[list[str]]:
    """Who holds the first GPU, by tick."""
    return [[holder.pod for holder in one.sample.devices[0].holders] for one in out]


def test_a_pod_that_ended_more_than_ten_seconds_before_holds_nothing_from_one_tick_to_the_next() -> None:
    _, out = run(join.NEW, OVER, SNAPSHOT, listed(1, 21_000), listed(2, 30_000), listed(3, 30_001), Passed(33.0))

    assert held(out) == [["p"], ["p"], []]


def test_one_that_is_over_and_one_whose_name_has_a_new_pod_in_the_same_tick_change_places() -> None:
    pods = pod("p", ended=20_000), pod("q", ended=0), pod("q", uid="next", started=32_500)
    shared = snapshot(1, container("p", gpu(0)), container("q", gpu(0)))
    _, out = run(join.NEW, known(1, *pods), shared, listed(1, 30_000), listed(2, 31_000), Passed(33.0))

    assert held(out) == [["p"], ["q"]]


def test_the_other_pods_of_the_snapshot_hold_what_they_held() -> None:
    shared = snapshot(1, container("p", f"{gpu(0)}::0"), container("q", f"{gpu(0)}::1"))
    _, out = run(join.NEW, known(1, pod("p", ended=20_000), pod("q")), shared, listed(1, 60_000), Passed(62.0))

    assert held(out) == [["q"]]


@pytest.mark.parametrize(
    "workloads",
    [
        (known(1, pod("p")),),
        (known(1, pod("p")), known(2, ts_ms=20_000)),
        (OVER, known(2, pod("p"), ts_ms=25_000)),
        (known(1, pod("p", ended=20_000), pod("p", uid="next", started=61_000)),),
        (known(1, pod("p", ended=20_000), pod("p", uid="next", started=30_000, ended=55_000)),),
        (known(1, pod("q", ended=20_000)),),
    ],
    ids=["runs", "is only missing", "runs after all", "another begins", "another ended just now", "of another name"],
)
def test_the_kubelets_word_counts_where_the_pods_end_is_not_told_or_another_may_be_meant(
    workloads: tuple[NodeWorkloads, ...],
) -> None:
    assert held(run(join.NEW, *workloads, SNAPSHOT, listed(1, 60_000), Passed(62.0))[1]) == [["p"]]


def test_a_pod_that_ended_long_ago_is_waited_for_once_for_its_name_may_be_another_ones() -> None:
    state, out = run(join.NEW, OVER, SNAPSHOT, listed(1, 60_000), Passed(61.9))
    assert out == []

    assert held(run(state, known(2, pod("p", uid="next", started=59_000)))[1]) == [["p"]]
    again = known(2, pod("p", ended=20_000), ts_ms=60_500)
    assert held(run(state, Passed(62.0), again, listed(2, 62_000), listed(3, 63_000))[1]) == [[], [], []]


def test_the_next_pod_of_that_name_is_waited_for() -> None:
    state, out = run(join.NEW, OVER, SNAPSHOT, listed(1, 60_000), Passed(62.0), snapshot(2))
    state, out = run(state, read(tick(2, 2, ts_ms=62_000), 62.0), listed(3, 63_000))
    assert held(out) == [[]]

    assert held(run(state, known(2, pod("p", uid="next", started=63_000)))[1]) == [["p"]]


# -- pods that only processes show


def shown(seq: int, *uids: str | None, memory: int | None = 40) -> Sample:
    """A tick of the snapshot 1 in which processes of these pods are on the second GPU, which nobody was given."""
    return tick(seq, 1, processes=((), tuple(process(uid, memory) for uid in uids)))


def observed(out: Iterable[Joined]) -> list[tuple[int, list[str]]]:
    """Who is seen on the second GPU, by tick."""
    return [(one.sample.seq, [h.pod for h in one.sample.devices[1].holders if h.observed]) for one in out]


HELD = (known(1, pod("p")), SNAPSHOT)


def test_a_pod_that_only_its_processes_show_is_waited_for_until_the_workloads_have_it() -> None:
    state, out = run(join.NEW, *HELD, read(shown(1, "uid-q"), 0.0), Passed(1.9))
    assert out == []

    assert observed(run(state, known(2, pod("p"), pod("q")))[1]) == [(1, ["q"])]


def test_it_is_waited_for_two_seconds_and_once() -> None:
    state, out = run(join.NEW, *HELD, read(shown(1, "uid-q"), 0.0), Passed(1.999))
    assert out == []

    state, out = run(state, Passed(2.0), read(shown(2), 3.0), read(shown(3, "uid-q"), 4.0))
    assert observed(out) == [(1, []), (2, []), (3, [])]


def test_once_the_workloads_have_it_after_all_it_is_shown() -> None:
    came = known(2, pod("p"), pod("q"))
    _, out = run(join.NEW, *HELD, read(shown(1, "uid-q"), 0.0), Passed(2.0), came, read(shown(2, "uid-q"), 3.0))

    assert observed(out) == [(1, []), (2, ["q"])]


def test_another_one_is_waited_for_although_one_did_not_come() -> None:
    state, out = run(join.NEW, *HELD, read(shown(1, "uid-q"), 0.0), Passed(2.0), read(shown(2, "uid-q", "uid-r"), 2.0))
    assert observed(out) == [(1, [])]

    assert observed(run(state, Passed(4.0))[1]) == [(2, [])]


def test_of_those_that_did_not_come_the_last_64_are_remembered() -> None:
    state, out = run(join.NEW, *HELD, read(shown(1, "uid-q"), 0.0), Passed(2.0))
    state, out = run(state, read(shown(2, *[f"uid-{n:02d}" for n in range(64)]), 2.0), Passed(4.0))
    assert len(out) == 1

    state, out = run(state, read(shown(3, "uid-00", "uid-63"), 4.0), read(shown(4, "uid-q"), 4.0))
    assert observed(out) == [(3, [])]


@pytest.mark.parametrize(
    "records",
    [
        (SNAPSHOT, read(shown(1, "uid-q"), 0.0)),
        (*HELD, read(tick(1, None, processes=((process("uid-q"),),)), 0.0)),
        (*HELD, read(shown(1, "uid-q", memory=None), 0.0)),
        (*HELD, read(shown(1, None), 0.0)),
        (*HELD, read(shown(1, "uid-p"), 0.0)),
    ],
    ids=["no workloads", "no kubelet", "no memory", "of no pod", "known"],
)
def test_nothing_is_waited_for_where_nothing_can_come_of_it(records: tuple[join.Record, ...]) -> None:
    assert len(run(join.NEW, *records)[1]) == 1
