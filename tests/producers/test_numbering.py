"""The numbers of runs, ticks and snapshots are those that readers rely on."""

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.records import READ_MS, NumberedTick, Numbering, Snapshot
from tests.producers.fakes import containers, devices
from topics.topic import MAX_MESSAGE_BYTES

UNENCODABLE = "\ud800"


def _step(numbering: Numbering, ts_ms: int, *pods: str) -> NumberedTick:
    return numbering.step(ts_ms, devices(), containers(*pods))


def _snapshot(numbered: NumberedTick) -> Snapshot:
    """The snapshot that a tick names."""
    return numbered.snapshots[-1]


def _with_events(*times_ms: int) -> list[dict[str, Any]]:
    events = [{"kind": "xid", "code": 31, "ts_ms": ts_ms} for ts_ms in times_ms]
    return [{**device, "events": events} for device in devices()]


def _named_by_events(numbered: NumberedTick) -> list[int | None]:
    events = orjson.loads(numbered.value or b"")["devices"][0]["events"]
    return [event.get("allocations_seq") for event in events]


@pytest.fixture
def numbering() -> Numbering:
    return Numbering(cluster="prod", node="gpu-1", run_id=100)


def test_ticks_count_from_one(numbering: Numbering) -> None:
    assert [_step(numbering, ts_ms).seq for ts_ms in (100, 101, 102)] == [1, 2, 3]


def test_a_gpu_with_thousands_of_processes_is_without_them_and_costs_the_node_no_tick(numbering: Numbering) -> None:
    def gpu(number: int, processes: int) -> dict[str, Any]:
        rows = [{"pid": pid, "pod_uid": "u" * 36, "container_id": "c" * 64, "memory_used_bytes": None}
                for pid in range(processes)]  # fmt: skip
        return {"uuid": f"GPU-{number}", "metrics": {"power_watts": 1.0}, "processes": rows}

    hostile = [gpu(0, 3), gpu(1, 40_000), gpu(2, 1_000), gpu(3, 0)]
    numbered = numbering.step(100, hostile, None)
    listed = orjson.loads(numbered.value or b"")["devices"]
    assert [len(device["processes"]) if "processes" in device else None for device in listed] == [3, None, 1_000, 0]
    assert [device["metrics"] for device in listed] == [{"power_watts": 1.0}] * 4
    assert (len(numbered.value or b"") < MAX_MESSAGE_BYTES // 2, numbered.crowded) == (True, 1)


def test_a_snapshot_is_new_only_if_its_content_is(numbering: Numbering) -> None:
    named = [_snapshot(_step(numbering, 100 + n, *pods)) for n, pods in enumerate([("a",), ("a",), ("b",), ("a",), ()])]

    assert [snapshot.seq for snapshot in named if snapshot] == [1, 1, 2, 3, 4]
    assert named[0] is named[1]


def test_without_a_kubelet_no_snapshot_is_named_and_the_last_is_not_forgotten(numbering: Numbering) -> None:
    first = _step(numbering, 100, "a")

    assert numbering.step(101, devices(), None).snapshots == ()
    assert _snapshot(_step(numbering, 102, "a")) is _snapshot(first)


def test_an_empty_answer_is_a_snapshot(numbering: Numbering) -> None:
    snapshot = _snapshot(_step(numbering, 100))

    assert snapshot is not None
    assert b'"containers":[]' in snapshot.value


def test_a_tick_that_cannot_be_encoded_keeps_its_number(numbering: Numbering) -> None:
    assert numbering.step(100, [{"uuid": "\ud800"}], None) == NumberedTick(100, 1, None)
    assert _step(numbering, 101).seq == 2


def test_changing_a_reading_afterwards_changes_no_snapshot(numbering: Numbering) -> None:
    rows = containers("a")
    first = numbering.step(100, devices(), rows)
    rows[0]["pod"] = "b"

    assert _snapshot(numbering.step(101, devices(), rows)) is not _snapshot(first)


@given(st.lists(st.integers(0, 20), min_size=1))
def test_a_clock_that_does_not_advance_starts_a_run_of_its_own(times: list[int]) -> None:
    numbering = Numbering(cluster="prod", node="gpu-1", run_id=3)
    steps = [(ts_ms, _step(numbering, ts_ms, "a")) for ts_ms in times]
    runs: dict[int, list[tuple[int, NumberedTick]]] = {}
    for ts_ms, step in steps:
        runs.setdefault(step.run_id, []).append((ts_ms, step))

    assert [row for run in runs.values() for row in run] == steps
    for run in runs.values():
        assert [step.seq for _, step in run] == list(range(1, len(run) + 1))
        assert all(before < after for (before, _), (after, _) in itertools.pairwise(run))
        assert {_snapshot(step).seq for _, step in run if step.snapshots} == {1}
    assert len(runs) == 1 + sum(after <= before for before, after in itertools.pairwise(times))
    assert numbering.runs() == {run_id: len(run) for run_id, run in runs.items()} | ({} if 3 in runs else {3: 0})


_PODS = st.sampled_from(["a", "b", "c", "a", "b", "c", None, UNENCODABLE])
_IN_FORCE = st.lists(_PODS, min_size=26, max_size=26)  # the pod that has the GPU, by the second


def _seconds(longest: int) -> st.SearchStrategy[int]:
    return st.integers(0, longest).map(lambda seconds: seconds * 1000)


def _holder(pod: str | None) -> list[dict[str, Any]] | None:
    return None if pod is None else containers(pod)


@given(st.lists(st.tuples(_seconds(15), _PODS, st.lists(_seconds(25), max_size=3), _IN_FORCE), max_size=8))
def test_ticks_and_events_name_snapshots_of_their_own_time_in_the_order_of_time(
    ticks: list[tuple[int, str | None, list[int], list[str | None]]],
) -> None:
    numbering, last_seqs, values = Numbering(cluster="prod", node="gpu-1", run_id=1), {1: 0}, dict[Any, bytes]()
    previous_ms = -1
    for ts_ms, pod, event_times, in_force in ticks:
        holders = {1000 * second: _holder(pod) for second, pod in enumerate(in_force)}
        tick = numbering.step(ts_ms, _with_events(*event_times), _holder(pod), holders.get)
        in_reach = [previous_ms < min(at_ms, ts_ms) and at_ms <= ts_ms + READ_MS for at_ms in event_times]
        previous_ms = ts_ms
        for snapshot in tick.snapshots:
            assert snapshot.run_id == tick.run_id
            assert values.setdefault((snapshot.run_id, snapshot.seq), snapshot.value) == snapshot.value
        if tick.value is None:
            continue
        pods: dict[int | None, str] = {
            snapshot.seq: orjson.loads(snapshot.content)[0]["pod"] for snapshot in tick.snapshots
        }
        own_seq, named = orjson.loads(tick.value)["allocations_seq"], _named_by_events(tick)
        assert pods.get(own_seq) == pod
        expected = [
            in_force[at // 1000] if near and pod else None for at, near in zip(event_times, in_reach, strict=True)
        ]
        assert [pods.get(seq) for seq in named] == expected
        in_order = sorted([*zip(event_times, [False] * 3, named, strict=False), (ts_ms, True, own_seq)])
        seqs = [seq for *_, seq in in_order if seq is not None]
        assert [last_seqs.get(tick.run_id, 0), *seqs] == sorted([last_seqs.get(tick.run_id, 0), *seqs])
        last_seqs[tick.run_id] = own_seq or last_seqs.get(tick.run_id, 0)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster 'a/b'"):
        Numbering(cluster="a/b", node="n", run_id=1)


def test_an_event_names_the_snapshot_of_its_own_time(numbering: Numbering) -> None:
    _step(numbering, 100, "old")
    pod_at = {103: "old", 105: "between", 109: "new"}
    tick = numbering.step(110, _with_events(109, 103, 105), containers("new"), lambda ts_ms: containers(pod_at[ts_ms]))

    assert _named_by_events(tick) == [3, 1, 2]
    assert [snapshot.seq for snapshot in tick.snapshots] == [1, 2, 3]
    assert [orjson.loads(snapshot.value)["ts_ms"] for snapshot in tick.snapshots] == [100, 105, 109]


def test_an_event_from_before_the_last_tick_names_no_snapshot_because_numbers_are_in_the_order_of_time(
    numbering: Numbering,
) -> None:
    _step(numbering, 100, "old")
    _step(numbering, 110, "new")
    tick = numbering.step(120, _with_events(109), containers("new"), lambda ts_ms: containers("old"))

    assert _named_by_events(tick) == [None]
    assert [snapshot.seq for snapshot in tick.snapshots] == [2]


def test_an_event_during_the_reading_of_its_tick_names_a_later_snapshot_than_the_tick(numbering: Numbering) -> None:
    tick = numbering.step(100, _with_events(104), containers("old"), lambda ts_ms: containers("new"))
    after = _step(numbering, 110, "new")

    assert orjson.loads(tick.value or b"")["allocations_seq"] == 1
    assert _named_by_events(tick) == [2]
    assert [snapshot.seq for snapshot in (*tick.snapshots, *after.snapshots)] == [1, 2, 2]


def test_an_event_from_before_a_clock_was_set_back_names_no_snapshot(numbering: Numbering) -> None:
    _step(numbering, 100, "old")
    tick = numbering.step(90, _with_events(103), containers("new"), lambda ts_ms: containers("old"))
    next_tick = numbering.step(91, _with_events(10**6), containers("new"), lambda ts_ms: containers("old"))

    assert [_named_by_events(numbered) for numbered in (tick, next_tick)] == [[None], [None]]


def test_an_event_at_whose_time_the_holders_are_unknown_names_no_snapshot(numbering: Numbering) -> None:
    tick = numbering.step(110, _with_events(103), containers("new"), lambda ts_ms: None)
    without = numbering.step(120, _with_events(113), None, lambda ts_ms: containers("a"))

    assert _named_by_events(tick) == [None]
    assert _named_by_events(without) == [None]
