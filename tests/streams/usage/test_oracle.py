"""The books against sums of independent code, for any ticks: shared devices, MIG, gaps, clocks that are set back."""

from collections import defaultdict
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustream.replay import PartitionReplay
from gpustream.usage.read import Range
from streams.usage.books import Accounting, decode, encode
from streams.usage.measure import divide
from streams.usage.tick import CountedTick
from tests.streams.usage.made import START_MS, BookkeeperHarness, Json, holder, mig, tick
from tests.usage_sums import FIELDS, UsageSums
from topics.times import MAX_TIME_MS
from topics.usage import HOUR_MS, MINUTE_MS, Usage


class Step(NamedTuple):
    """A tick: how long after the one before (below 0: a new run, with a clock that was set back), and what it says.

    ``ahead_ms``: how far its clock is ahead of the broker's. ``again``: so many of the last ticks are read again after
    it.
    """

    after_ms: int
    devices: list[Json]
    attribution: str
    interval_ms: int
    ahead_ms: int = 0
    again: int = 0


readings = st.fixed_dictionaries(
    {},
    optional={
        "gpu_utilization_ratio": st.sampled_from([0.0, 0.004, 0.37, 1.0, 1.01]),
        "sm_active_ratio": st.sampled_from([0.0, 0.004, 0.37]),
        "encoder_utilization_ratio": st.sampled_from([0.0, 0.5]),
        "tensor_active_ratio": st.sampled_from([0.0, 0.25]),
        "memory_used_bytes": st.integers(0, 80 << 30),
        "energy_joules_total": st.sampled_from([0.0, 70.001, 70.5, 1000.0, 957_230.003, 5e6]),
        "power_watts": st.sampled_from([0.0, 99.9, 700.0]),
    },
)


@st.composite
def holders(draw: st.DrawFn, most: int) -> list[Json]:
    """Containers of up to three pods, whose labels and workloads change; one may run on a device that it was not given,
    and of one the uid is not known."""
    names = st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["main", "sidecar"]))
    workload, labels = draw(st.sampled_from([None, {"kind": "Job", "name": "bert"}])), draw(st.sampled_from("xy"))
    pods = [
        holder(
            pod,
            draw(st.sampled_from([None, 0.0, 0.004, 0.1, 0.3])),
            container=container,
            pod_uid=None if pod == "c" else f"uid-{pod}",
            workload=workload,
            labels={"team": labels},
        )
        for pod, container in draw(st.lists(names, unique=True, max_size=most))
    ]
    for row in pods:
        if "parts" in row:
            row["parts"]["memory_used_bytes"] = draw(st.integers(0, 8 << 30))
        row["observed"] = draw(st.integers(0, 9)) == 0
    return pods


@st.composite
def devices(draw: st.DrawFn) -> list[Json]:
    devices_found: list[Json] = []
    for uuid in draw(st.lists(st.sampled_from(["GPU-a", "GPU-b"]), unique=True, max_size=2)):
        parts = draw(st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "1c.3g.40gb", "7g.80gb"]), max_size=3))
        state = draw(st.sampled_from(["ok"] * 4 + ["lost", "timeout", "of a later version"]))
        fields = {"compute_slices": 7, "metrics": draw(readings), "state": state}
        fields["attribution"] = draw(st.sampled_from([None, None, None, "none"]))
        devices_found.append({"uuid": uuid, "model": "H100", **fields, "holders": [] if parts else draw(holders(4))})
        if ran := draw(st.sampled_from([None, 0.0, 0.2])):
            devices_found[-1]["processes"] = [{"pid": 1, "pod_uid": "uid-a", "sm_utilization_ratio": ran}]
        devices_found += [
            mig(f"MIG-{uuid}-{number}", profile, *draw(holders(2)), parent=uuid, metrics=draw(readings))
            for number, profile in enumerate(parts)
        ]
    return devices_found


gaps = st.sampled_from([500, 1000, 1000, 1000, 2500, 3000, 3500, 61_000, 900_000, 1_511_003, 4_000_000, -1000, -70_000])
steps = st.lists(
    st.builds(
        Step,
        gaps,
        devices(),
        st.sampled_from(["exact", "late", "none", "of a later version"]),
        st.sampled_from([1000, 2000]),
        ahead_ms=st.sampled_from([0, 0, 0, 0, 0, 59_000, 61_000]),
        again=st.sampled_from([0, 0, 0, 0, 1, 3]),
    ),
    min_size=2,
    max_size=25,
)


def records_of(story: list[Step]) -> list[Any]:
    """The ticks of a story, and a last one hours later that closes all."""
    records, at_ms, run_id = list[Any](), 3_000_000, 1
    for seq, step in enumerate(story, 1):
        at_ms, run_id = at_ms + step.after_ms, run_id + (step.after_ms < 0)
        fields: Json = {"attribution": step.attribution, "interval_ms": step.interval_ms, "logged_ms": START_MS + at_ms}
        records.append(tick(at_ms + step.ahead_ms, *step.devices, run_id=run_id, seq=seq, offset=seq, **fields))
        records += records[-step.again :] if step.again else ()
    newest_ms = max(record.ts_ms for record in records) - START_MS
    records.append(tick(newest_ms + 3 * HOUR_MS, run_id=10_000, seq=1, offset=10_000))
    return records


def logged_ms(counted: CountedTick) -> int:
    return counted.ts_ms if counted.logged_ms is None else counted.logged_ms


@pytest.mark.parametrize("split", ["used", "equal"])
@given(story=steps)
def test_every_field_of_every_window_equals_the_sums_of_independent_code(split: Any, story: list[Step]) -> None:
    ticks, sums = records_of(story), UsageSums(split)
    harness = BookkeeperHarness(Accounting(split)).play(*ticks)
    for counted in ticks:
        sums.add(msgspec.json.decode(msgspec.json.encode(counted)), logged_ms(counted))
    for lasts_ms in (MINUTE_MS, HOUR_MS):
        assert (
            sums.differences([row for (lasts, *_), row in harness.records.items() if lasts == lasts_ms], lasts_ms) == []
        )


@given(steps, st.randoms(use_true_random=False))
def test_windows_close_hours_are_their_minutes_and_a_restart_changes_nothing(story: list[Step], chance: Any) -> None:
    ticks = records_of(story)
    harness, restarted = BookkeeperHarness().play(*ticks), BookkeeperHarness()
    for counted in ticks:
        restarted.book(counted)
        if chance.random() < 0.3:
            restarted.keeper = type(restarted.keeper)(decode(encode(restarted.keeper.books)), restarted.policy)
    assert restarted.written == harness.written
    sums: dict[tuple[int, int, str], int] = defaultdict(int)
    minutes: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(FIELDS))
    hours: dict[tuple[Any, ...], list[int]] = {}
    for row in harness.records.values():
        assert row.final
        assert row.exact_ms + row.late_ms + row.none_ms == (0 if row.category == "unobserved" else row.device_ms)
        sums[row.end_ms - row.start_ms, row.start_ms, row.gpu_uuid] += row.slice_ms
        amounts = [getattr(row, field) for field in FIELDS]
        name = (row.start_ms // HOUR_MS, *row.key._replace(start_ms=0))
        if row.end_ms - row.start_ms == HOUR_MS:
            hours[name] = amounts
        else:
            minutes[name] = [a + b for a, b in zip(minutes[name], amounts, strict=True)]
    assert hours == minutes
    assert {total - lasts_ms * 7 for (lasts_ms, _, _), total in sums.items()} <= {0}
    assert all((MINUTE_MS, start_ms, uuid) in sums for lasts_ms, start_ms, uuid in sums if lasts_ms == HOUR_MS)


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_what_is_divided_sums_and_is_off_by_less_than_one(total: int, weights: list[int]) -> None:
    parts = divide(total, weights)
    assert sum(parts) == total
    if sum(weights):
        assert all(
            abs(part - Fraction(total * weight, sum(weights))) < 1 for part, weight in zip(parts, weights, strict=True)
        )


def test_what_is_left_by_rounding_goes_to_the_largest_remainders_the_first_of_equal_ones() -> None:
    assert divide(10, [3, 3, 3]) == [4, 3, 3]
    assert divide(11, [3, 3, 3]) == [4, 4, 3]
    assert divide(10, [1, 5, 1, 5]) == [1, 4, 1, 4]
    assert divide(5, [1, 2, 4]) == [1, 1, 3]


@given(steps)
def test_the_policy_moves_time_between_pods_and_nothing_else(story: list[Step]) -> None:
    used, equal = (BookkeeperHarness(Accounting(split)).play(*records_of(story)) for split in ("used", "equal"))

    def totals(harness: BookkeeperHarness) -> dict[tuple[Any, ...], int]:
        sums: dict[tuple[Any, ...], int] = defaultdict(int)
        for row in harness.records.values():
            for field in ("device_ms", "slice_ms", "used_us", "energy_mj", "memory_byte_ms"):
                sums[row.end_ms - row.start_ms, row.start_ms, row.uuid, row.category, field] += getattr(row, field)
        return sums

    assert totals(used) == totals(equal)


@given(steps)
def test_a_replay_gives_the_same_records_but_for_the_generation(story: list[Step]) -> None:
    ticks = records_of(story)
    replay = PartitionReplay(Range(START_MS, MAX_TIME_MS), Accounting(generation=7))
    rows = [row for counted_tick in ticks for row in replay.book(counted_tick, logged_ms(counted_tick))] + replay.end(0)
    live = {_named(row): row for row in BookkeeperHarness().play(*ticks).records.values() if row.final}
    booked = {_named(row): msgspec.structs.replace(row, generation=0) for row in rows}
    assert booked == live
    assert {row.generation for row in rows} <= {7}


def _named(row: Usage) -> tuple[Any, ...]:
    return (row.end_ms - row.start_ms, *row.key)
