"""Values are in base units and within limits; an impossible one, or one that means "not available", is left out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.node.nvml.table import Count, Limits, Scale, is_same_reading, measured, per_second
from tests.producers.node.nvml.fake import memory

ANYTHING = st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=3))
LIMITS = st.tuples(st.floats(0, 1e15), st.floats(0, 1e15)).map(lambda pair: Limits(*sorted(pair)))
SCALES = st.sampled_from([Scale(), Scale(per=100), Scale(per=1000), Scale(times=1_000_000)])
PERCENT = Scale(per=100)
RATIO = Limits(0, 1)


@given(ANYTHING, st.sampled_from([0, 16, 32, 64]), SCALES, LIMITS)
def test_any_raw_value_is_within_the_limits_or_absent(raw: object, bits: int, scale: Scale, limits: Limits) -> None:
    value = measured(raw, bits, scale, limits)
    assert value is None or (limits.low <= value <= limits.high and math.isfinite(value))


@given(st.integers(0, 100))
def test_a_percentage_becomes_its_ratio(percent: int) -> None:
    assert measured(percent, 32, PERCENT, RATIO) == float(f"{percent / 100:.2f}")


def test_zero_is_zero() -> None:
    assert measured(0, 32, PERCENT, RATIO) == 0
    assert measured(0, 64, Scale(), Limits(0, 1e12)) == 0


@pytest.mark.parametrize(
    ("raw", "bits"),
    [
        (-1, 32), (-1, 64), (-1.0, 0), (0xFFFF, 16), (0xFFFFFFFF, 32), (0xFFFFFFFF_FFFFFFFF, 64), (0x7FFFFFF0, 32),
        (0x7FFFFFF3, 32), (0x7FFFFFFF_FFFFFFF0, 64), (math.nan, 0), (math.inf, 0), (None, 32), ("1", 32),
        (memory(), 64),
    ],
)  # fmt: skip
def test_not_available_is_no_value(raw: object, bits: int) -> None:
    assert measured(raw, bits, Scale(), Limits(-10, 1e30)) is None


def test_all_ones_of_a_narrower_type_is_a_value_of_a_wider_one() -> None:
    assert measured(0xFFFFFFFF, 64, Scale(), Limits(0, 1e12)) == 0xFFFFFFFF


@pytest.mark.parametrize(("raw", "within_limits"), [(100, True), (101, False), (255, False), (-2, False)])
def test_a_value_beyond_its_limits_is_none(raw: int, within_limits: bool) -> None:
    assert (measured(raw, 32, PERCENT, RATIO) is not None) is within_limits


@given(st.sampled_from([16, 32, 64]), st.integers(0), st.integers(0), st.floats(0.05, 9), st.sampled_from([0, 10**15]))
def test_a_counter_that_wrapped_has_counted_on(bits: int, start: int, run: int, seconds: float, at_us: int) -> None:
    start, run = start % (1 << bits), run % (1 << bits)
    last = Count(start, bits, at_us, 100.0)
    current = Count((start + run) % (1 << bits), bits, at_us and at_us + round(seconds * 1e6), 100.0 + seconds)
    rate = per_second(last, current)
    assert rate is not None
    assert rate >= 0
    assert rate == pytest.approx(run / seconds, rel=1e-4)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.floats(), st.floats(), st.integers(), st.integers())
def test_no_clock_makes_a_rate_negative_or_infinite(
    first: int, second: int, first_s: float, second_s: float, first_us: int, second_us: int
) -> None:
    rate = per_second(Count(first, 64, first_us, first_s), Count(second, 64, second_us, second_s))
    assert rate is None or rate >= 0


def test_the_counters_own_clock_gives_the_time_if_it_is_plausible() -> None:
    last = Count(0, 64, 1_000_000, 10.0)
    assert per_second(last, Count(1000, 64, 1_500_000, 10.9)) == 2000
    assert per_second(last, Count(1000, 64, 9_000_000, 10.5)) == 2000
    assert per_second(last, Count(1000, 64, 900_000, 10.5)) == 2000
    assert per_second(Count(0, 64, 0, 10.0), Count(1000, 64, 500_000, 10.5)) == 2000


def test_a_32_bit_counter_that_was_not_read_for_long_gives_no_rate() -> None:
    assert per_second(Count(0, 32, 0, 0.0), Count(5, 32, 0, 11.0)) is None
    assert per_second(Count(0, 64, 0, 0.0), Count(5, 64, 0, 10.0)) == 0.5


def test_a_counter_of_another_width_or_without_a_time_gives_no_rate() -> None:
    assert per_second(Count(0, 32, 0, 0.0), Count(5, 64, 0, 1.0)) is None
    assert per_second(Count(0, 64, 0, 1.0), Count(5, 64, 0, 1.0)) is None


def test_a_repeated_answer_is_recognised_by_its_own_time() -> None:
    assert is_same_reading(Count(5, 64, 7, 0.0), Count(5, 64, 7, 1.0))
    assert not is_same_reading(Count(5, 64, 0, 0.0), Count(5, 64, 0, 1.0))
    assert not is_same_reading(Count(5, 64, 7, 0.0), Count(6, 64, 7, 1.0))
