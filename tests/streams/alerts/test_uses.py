"""What pods did with their devices, in steps of five minutes."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.memory import Memory, NodeAlerts, remember
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, UseNeeds, mean_of, means_of_closed_step
from tests.streams.alerts.ticks import START_MS, device, gpu, holder, tick

NEEDS = UseNeeds(4, figures=True)
FROM_S = (STEP_MS - START_MS % STEP_MS) / 1000  # the first step that begins after the first tick


def uses_after(*ticks: Tick, needs: UseNeeds = NEEDS) -> Memory:
    memory = Memory()
    for node_tick in ticks:
        memory = remember(memory, node_tick, 1, needs)
    return memory


def mean(*ticks: Tick, steps: int = 1) -> float | None:
    (use,) = uses_after(*ticks).uses[gpu(0)]
    return mean_of(use.marks, steps)


def busy(second: float, share: float | None, **fields: Any) -> Tick:
    return tick(FROM_S + second, device(0, holder(), busy=share, **fields))


@pytest.mark.parametrize("every_s", [1, 2, 5, 15, 50, 60])
def test_the_mean_is_the_same_at_any_interval_of_the_ticks(every_s: int) -> None:
    ticks = [busy(s, 0.5 if (s - every_s) % 300 < 150 else 0.1) for s in range(0, 601, every_s)]
    assert mean(*ticks) == pytest.approx(0.3, abs=every_s / 300 * 0.4)


def test_a_gap_is_not_measured_and_is_no_zero() -> None:
    ticks = [busy(s, 0.5) for s in [*range(0, 200, 5), *range(280, 301, 5)]]
    assert mean(*ticks) == pytest.approx(0.5)


@pytest.mark.parametrize("every_s", [90, 300])
def test_a_node_that_is_seldom_read_is_measured_between_its_ticks(every_s: int) -> None:
    seconds = range(0, 1801, every_s)
    often = [msgspec.structs.replace(busy(s, 0.5), interval_ms=every_s * 1000) for s in seconds]
    assert mean(*often, steps=4) == pytest.approx(0.5)
    assert mean(*[busy(s, 0.5) for s in seconds], steps=4) is None, "its ticks do not say that they are seldom"


def test_a_step_that_is_measured_for_less_than_half_has_no_value() -> None:
    assert mean(*[busy(s, 0.5) for s in [*range(0, 140, 5), 300]]) is None
    assert mean(*[busy(s, 0.5) for s in [*range(0, 160, 5), 300]]) == pytest.approx(0.5)


def test_a_step_that_nothing_was_measured_in_is_one_of_the_window() -> None:
    ticks = [busy(s, 0.4) for s in [*range(0, 300, 5), *range(600, 900, 5), 900]]
    assert mean(*ticks, steps=3) == pytest.approx(0.4)
    assert mean(*ticks, steps=2) is None


@pytest.mark.parametrize(("written", "meant"), [(1e308, 1.0), (1.5, 1.0), (-1e308, 0.0)])
def test_a_ratio_that_is_none_counts_as_the_nearest_that_is_one(written: float, meant: float) -> None:
    assert mean(*[busy(s, written) for s in range(0, 305, 5)]) == meant


def test_the_sums_of_counters_whose_readings_can_not_be_added_up_are_read_back() -> None:
    counters = dict.fromkeys(("power_violation_seconds_total", "thermal_violation_seconds_total"), 1.7e308)
    memory = uses_after(*[busy(s, 0.5, **counters) for s in range(0, 305, 5)])
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory


def test_a_tick_that_does_not_say_who_holds_what_is_no_reading() -> None:
    blind = [tick(FROM_S + s, device(0, busy=1.0), attribution="none") for s in range(100, 150, 5)]
    ticks = [*[busy(s, 0.2) for s in range(0, 100, 5)], *blind, *[busy(s, 0.2) for s in range(150, 305, 5)]]
    assert mean(*ticks) == pytest.approx(0.2)


@pytest.mark.parametrize(("state", "expected"), [("ok", 0.4), ("resting", 0.4), ("lost", None), ("timeout", None)])
def test_a_device_in_a_state_of_a_later_version_is_measured_and_one_that_does_not_answer_is_not(
    state: str, expected: float | None
) -> None:
    assert mean(busy(0, 0.4), *[busy(s, 0.4, state=state) for s in range(5, 305, 5)], busy(305, 0.4)) == expected


def test_another_pod_begins_again() -> None:
    ticks = [busy(s, 0.9) for s in range(0, 600, 5)]
    (use,) = uses_after(*ticks, tick(FROM_S + 600, device(0, holder("other"), busy=0.1))).uses[gpu(0)]
    assert (use.ms, mean_of(use.marks, 1)) == (0, None)


def test_of_a_shared_device_each_pod_has_its_part() -> None:
    def shared(second: float) -> Tick:
        return tick(FROM_S + second, device(0, holder("a", busy=0.3), holder("b", busy=0.1), busy=0.4))

    uses = uses_after(*[shared(s) for s in range(0, 305, 5)]).uses[gpu(0)]
    assert [mean_of(use.marks, 1) for use in uses] == [pytest.approx(0.3), pytest.approx(0.1)]


def test_a_clock_that_is_set_back_a_little_loses_nothing_and_by_an_hour_begins_again() -> None:
    ticks = [busy(s, 0.5) for s in range(0, 605, 5)]
    (use,) = uses_after(*ticks, busy(598, 0.5), busy(603, 0.5)).uses[gpu(0)]
    assert mean_of(use.marks, 2) == pytest.approx(0.5)
    (use,) = uses_after(*ticks, busy(-3600, 0.5)).uses[gpu(0)]
    assert mean_of(use.marks, 1) is None


@given(st.lists(st.tuples(st.sampled_from([0.5, 1, 7, 30, 59, 61, 4000, -2, -900]), st.floats(0, 1)), min_size=1))
def test_what_is_kept_is_bounded_and_read_as_it_was_written(steps: list[tuple[float, float]]) -> None:
    memory, at_s = Memory(), 0.0
    for after_s, share in steps:
        at_s += after_s
        memory = remember(memory, busy(max(at_s, 0), share, sm_clock_hz=1.5e9), 1, NEEDS)
    state = NodeAlerts(schema=1, cluster="c", node="n", offset=0, position=0, last_ts_ms=0, logged_ms=0, memory=memory)
    assert msgspec.json.decode(msgspec.json.encode(state), type=NodeAlerts).memory == memory
    assert all(len(use.marks) <= 8 * 5 for uses in memory.uses.values() for use in uses)


def test_a_node_of_eight_gpus_takes_less_than_six_kilobytes_for_four_hours() -> None:
    def node(second: float) -> Tick:
        metrics = {"sm_active_ratio": 0.31, "tensor_active_ratio": 0.2, "sm_clock_hz": 1.98e9, "power_watts": 431.5}
        return tick(second, *[device(i, holder(), busy=0.5, clock_event_reasons=4, **metrics) for i in range(8)])

    uses = uses_after(*[node(s) for s in range(0, 5 * 3600, 60)], needs=UseNeeds(48, figures=True)).uses
    assert len(msgspec.json.encode(uses)) < 8 * 750


def test_the_mean_is_right_however_long_the_pod_has_worked() -> None:
    ticks = (busy(s, 1.0) for s in range(0, 121 * 3600, 60))
    (use,) = uses_after(*ticks, needs=UseNeeds(4, figures=False)).uses[gpu(0)]
    assert mean_of(use.marks, 4) == pytest.approx(1.0)


def test_a_gpu_that_is_slowed_down_on_purpose_is_not_throttled_and_violations_are_a_share_of_the_time() -> None:
    def violating(second: float) -> Tick:
        seconds = {"power_violation_seconds_total": 0.2 * second, "thermal_violation_seconds_total": 0.3 * second}
        return busy(second, 0.5, clock_event_reasons=0x4, **seconds)

    ticks = [violating(s) for s in range(0, 300, 5)]
    before, now = uses_after(*ticks), uses_after(*ticks, violating(300))
    figures = means_of_closed_step(before.uses[gpu(0)], now.uses[gpu(0)])
    assert figures is not None
    *_, throttled, violated = figures
    assert throttled == 0.0
    assert violated == pytest.approx(0.5)


def test_the_figures_of_a_step_are_given_when_it_has_ended() -> None:
    fields = {"sm_clock_hz": 1.5e9, "power_watts": 300.0, "clock_event_reasons": 0x40}
    ticks = [busy(s, 0.5, **fields) for s in range(0, 300, 5)]
    before, now = uses_after(*ticks), uses_after(*ticks, busy(300, 0.5))
    figures = means_of_closed_step(before.uses[gpu(0)], now.uses[gpu(0)])
    assert figures is not None
    assert [None if figure is None else round(figure, 6) for figure in figures] == [
        0.5,
        None,
        None,
        1.5e9,
        300,
        1.0,
        None,
    ]
    assert means_of_closed_step(before.uses[gpu(0)], before.uses[gpu(0)]) is None
