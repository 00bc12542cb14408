"""The join: which snapshot stands in for one that never came."""

import pytest

from streams.attribution import join
from streams.attribution.attribute import Joined
from streams.attribution.join import AllocationsRead
from tests.streams.attribution.reading import run
from tests.streams.attribution.records import container, gpu, pending, snapshot, tick
from topics.allocations import Allocations
from topics.samples import Sample


def held_by(*records: Allocations | Sample) -> list[tuple[str, str]]:
    """The attribution of each sample, and the pod on its first device, after records that arrived in this order."""
    state, joined_ticks, offset = join.NEW, list[Joined](), 0
    for record in records:
        if isinstance(record, Sample):
            state, joined = join.step(state, pending(record, offset, float(offset)), 10.0)
            joined_ticks += joined
            offset += 1
            state, joined = join.step(state, AllocationsRead(offset + 10.0), 10.0)
        else:
            state, joined = join.step(state, record, 10.0)
        joined_ticks += joined
    pods = [[holder.pod for holder in output.sample.devices[0].holders] for output in joined_ticks]
    return [(output.sample.attribution, "".join(names)) for output, names in zip(joined_ticks, pods, strict=True)]


def named(run_id: int, seq: int, *, ts_ms: int = 0) -> Allocations:
    """A snapshot whose pod is named after it."""
    return snapshot(seq, container(f"{run_id}/{seq}", gpu(0)), run_id=run_id, ts_ms=ts_ms)


def test_the_highest_number_below_it_in_its_run_stands_in() -> None:
    assert held_by(named(1, 1), named(1, 3), named(1, 6), tick(1, 5)) == [("late", "1/3")]


def test_a_lower_number_that_is_sent_again_after_a_higher_one_is_not_the_last() -> None:
    assert held_by(named(1, 1), named(1, 3), named(1, 1), tick(1, 5)) == [("late", "1/3")]


def test_the_last_of_the_run_before_stands_in_whatever_the_runs_are_called() -> None:
    runs = (named(9, 1), named(9, 2), named(3, 1), named(3, 2), named(5, 7))

    assert held_by(*runs, tick(1, 4, run_id=5)) == [("late", "3/2")]


def test_a_run_between_that_has_no_snapshot_is_passed_over() -> None:
    assert held_by(named(1, 1), tick(1, 1), tick(1, None, run_id=2), tick(1, 1, run_id=3)) == [
        ("exact", "1/1"),
        ("none", ""),
        ("late", "1/1"),
    ]


def test_where_nothing_came_before_there_are_no_holders() -> None:
    assert held_by(tick(1, 1)) == [("none", "")]
    assert held_by(named(1, 2), tick(1, 1)) == [("none", "")]


def test_a_sample_without_a_kubelet_has_no_holders_whatever_is_known() -> None:
    assert held_by(named(1, 1), tick(1, None)) == [("none", "")]


def test_a_later_run_that_was_read_ahead_never_stands_in() -> None:
    ahead = (named(2, 1, ts_ms=5_000), named(3, 1, ts_ms=9_000))

    assert held_by(*ahead, tick(1, 1, run_id=1, ts_ms=1_000)) == [("none", "")]
    assert held_by(named(1, 1), *ahead[1:], tick(1, 1, run_id=2, ts_ms=5_000)) == [("late", "1/1")]


@pytest.mark.parametrize("set_back_ms", [0, 1_000_000])
def test_a_run_that_was_sampled_before_stands_in_although_the_clock_was_set_back(set_back_ms: int) -> None:
    start_ms = 2_000_000
    first = (named(1, 1, ts_ms=start_ms), tick(1, 1, run_id=1, ts_ms=start_ms))

    later = [tick(seq, 1, run_id=2, ts_ms=start_ms + seq - set_back_ms) for seq in range(1, 21)]
    assert held_by(*first, *later) == [("exact", "1/1"), *[("late", "1/1")] * 20]


def test_many_runs_that_wait_for_their_snapshots_at_the_same_time_all_go_on_without() -> None:
    samples = [pending(tick(1, 1, run_id=run_id), run_id, 0.0) for run_id in range(20)]
    _, joined_ticks = run(join.NEW, *samples, AllocationsRead(10.0))

    assert [output.sample.run_id for output in joined_ticks] == list(range(20))
    assert {output.sample.attribution for output in joined_ticks} == {"none"}


def test_a_snapshot_that_comes_after_all_is_exact_from_then_on() -> None:
    assert held_by(named(1, 1), tick(1, 2), named(1, 2), tick(2, 2)) == [("late", "1/1"), ("exact", "1/2")]
