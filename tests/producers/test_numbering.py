"""Runs, ticks and snapshots are numbered as readers rely on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.numbering import Numbered, Numbering
from tests.producers.fakes import containers, devices


def _step(numbering: Numbering, ts_ms: int, *pods: str) -> Numbered:
    return numbering.step(ts_ms, devices(), containers(*pods))


@pytest.fixture
def numbering() -> Numbering:
    return Numbering(cluster="prod", node="gpu-1", run_id=100)


def test_ticks_count_from_one(numbering: Numbering) -> None:
    assert [_step(numbering, ts_ms).seq for ts_ms in (100, 101, 102)] == [1, 2, 3]


def test_a_snapshot_is_new_only_where_its_content_is(numbering: Numbering) -> None:
    named = [_step(numbering, 100 + n, *pods).snapshot for n, pods in enumerate([("a",), ("a",), ("b",), ("a",), ()])]

    assert [snapshot.seq for snapshot in named if snapshot] == [1, 1, 2, 3, 4]
    assert named[0] is named[1]


def test_without_a_kubelet_no_snapshot_is_named_and_the_last_is_not_forgotten(numbering: Numbering) -> None:
    first = _step(numbering, 100, "a")

    assert numbering.step(101, devices(), None).snapshot is None
    assert _step(numbering, 102, "a").snapshot is first.snapshot


def test_an_empty_answer_is_a_snapshot(numbering: Numbering) -> None:
    snapshot = _step(numbering, 100).snapshot

    assert snapshot is not None
    assert b'"containers":[]' in snapshot.value


def test_a_tick_that_cannot_be_encoded_keeps_its_number(numbering: Numbering) -> None:
    assert numbering.step(100, [{"uuid": "\ud800"}], None) == Numbered(100, 1, None, None)
    assert _step(numbering, 101).seq == 2


def test_changing_what_was_read_changes_no_snapshot(numbering: Numbering) -> None:
    rows = containers("a")
    first = numbering.step(100, devices(), rows)
    rows[0]["pod"] = "b"

    assert numbering.step(101, devices(), rows).snapshot is not first.snapshot


@given(st.lists(st.integers(0, 20), min_size=1))
def test_a_clock_that_does_not_advance_starts_a_run_of_its_own(times: list[int]) -> None:
    numbering = Numbering(cluster="prod", node="gpu-1", run_id=3)
    steps = [(ts_ms, _step(numbering, ts_ms, "a")) for ts_ms in times]
    runs: dict[int, list[tuple[int, Numbered]]] = {}
    for ts_ms, step in steps:
        runs.setdefault(step.run_id, []).append((ts_ms, step))

    assert [row for run in runs.values() for row in run] == steps
    for run in runs.values():
        assert [step.seq for _, step in run] == list(range(1, len(run) + 1))
        assert all(before < after for (before, _), (after, _) in itertools.pairwise(run))
        assert {step.snapshot.seq for _, step in run if step.snapshot} == {1}
    assert len(runs) == 1 + sum(after <= before for before, after in itertools.pairwise(times))
    assert numbering.runs() == {run_id: len(run) for run_id, run in runs.items()} | ({} if 3 in runs else {3: 0})


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster 'a/b'"):
        Numbering(cluster="a/b", node="n", run_id=1)
