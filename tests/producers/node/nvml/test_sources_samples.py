"""The driver's samples between two ticks: each counts once, in whatever order it comes."""

import time
from random import Random
from statistics import fmean
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue, NvmlError
from producers.node.nvml.calls import Calls
from producers.node.nvml.sources import Samples, Spread
from producers.node.nvml.table import Limits, Scale
from tests.producers.node.nvml.fake import FakeNvml

UTILIZATION = 1
PERCENT, RATIO = Scale(per=100), Limits(0, 1)
NAME = "NVML_GPU_UTILIZATION_SAMPLES"


class Bench:
    def __init__(self) -> None:
        self.nvml = FakeNvml(1)
        self.nvml.init()
        self.driver_samples = self.nvml.gpus[0].samples[UTILIZATION] = []
        self.calls = Calls(self.nvml)
        self.samples = Samples(self.calls, NAME, UTILIZATION)
        self._gpu = self.calls.open(0)

    def keep(self, at_us: int, raw: float) -> None:
        """The driver takes a sample at this time."""
        self.driver_samples.append(FieldValue(0, raw, 32, at_us))

    def read(self) -> Spread | None:
        return self.samples.read(self._gpu, PERCENT, RATIO)


@given(st.lists(st.integers(0, 100), min_size=1), st.randoms())
def test_the_spread_is_that_of_the_new_samples_in_any_order(raw: list[int], random: Random) -> None:
    bench = Bench()
    bench.keep(1, 100)
    assert bench.read() is None
    at_us = list(range(2, 2 + len(raw)))
    random.shuffle(at_us)
    for when, value in zip(at_us, raw, strict=True):
        bench.keep(when, value)
    spread = bench.read()
    assert spread is not None
    assert (spread.minimum, spread.maximum) == (min(raw) / 100, max(raw) / 100)
    assert spread.mean == pytest.approx(fmean(raw) / 100)
    assert spread.minimum <= spread.mean <= spread.maximum
    assert bench.read() is None


@given(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=8))
def test_no_sample_is_lost_or_reported_twice_over_the_ticks(ticks: list[list[int]]) -> None:
    bench = Bench()
    bench.read()
    at_us, reported = 0, []
    for tick in ticks:
        for raw in tick:
            at_us += 1
            bench.keep(at_us, raw)
        spread = bench.read()
        reported.append(None if spread is None else spread.maximum)
    assert reported == [max(tick) / 100 if tick else None for tick in ticks]


@given(st.lists(st.one_of(st.integers(-(2**31), 2**64), st.floats())))
def test_whatever_the_samples_are_their_spread_is_within_the_limits_and_the_others_are_counted(
    raw: list[float],
) -> None:
    bench = Bench()
    bench.read()
    for number, value in enumerate(raw, 1):
        bench.keep(number, value)
    good = [value for value in raw if 0 <= value / 100 <= 1]
    spread = bench.read()
    assert (spread is None) is (not good)
    assert spread is None or 0 <= spread.minimum <= spread.mean <= spread.maximum <= 1
    assert bench.calls.errors() == [(NAME, "IMPLAUSIBLE")] * (len(raw) - len(good))


def test_a_sample_older_than_requested_does_not_count_again() -> None:
    bench = Bench()
    bench.keep(5, 100)
    bench.read()
    with patch.object(bench.nvml, "samples", lambda *_: [*bench.driver_samples, FieldValue(0, 10, 32, 6)]):
        spread = bench.read()
    assert spread == Spread(0.1, 0.1, 0.1)


@pytest.mark.parametrize("back_us", [10_000_000, 3_600_000_000])
def test_a_clock_that_is_set_back_does_not_silence_the_samples(back_us: int) -> None:
    bench = Bench()
    now_us = time.time_ns() // 1000
    bench.keep(now_us, 1)
    bench.read()
    bench.driver_samples.clear()
    with patch.object(time, "time_ns", lambda: (now_us - back_us) * 1000):
        bench.keep(now_us - back_us, 50)
        assert bench.read() is None  # it is unknown how far back they reach
        bench.keep(now_us - back_us + 1, 70)
        assert bench.read() == Spread(0.7, 0.7, 0.7)


@pytest.mark.parametrize("is_lost_meanwhile", [False, True])
def test_samples_from_before_a_clock_was_set_back_a_little_do_not_count_and_silence_none(
    is_lost_meanwhile: bool,
) -> None:
    bench = Bench()
    now_us = time.time_ns() // 1000
    for at_us in range(now_us - 9_000_000, now_us + 1, 1_000_000):
        bench.keep(at_us, 90)
    bench.read()
    if is_lost_meanwhile:
        bench.samples.forget()
    spreads = []
    for at_us in range(now_us - 5_499_999, now_us + 3_000_000, 1_000_000):
        bench.keep(at_us, 20)
        with patch.object(time, "time_ns", lambda: at_us * 1000):  # noqa: B023 - it is called in this round
            spreads.append(bench.read())
    assert spreads == [None] + [Spread(0.2, 0.2, 0.2)] * 8


def test_a_failure_is_raised_and_the_samples_of_that_time_are_reported_later() -> None:
    bench = Bench()
    bench.keep(1, 1)
    bench.read()
    bench.keep(2, 90)
    bench.nvml.gpus[0].fail(("nvmlDeviceGetSamples", UTILIZATION), binding.UNKNOWN)
    with pytest.raises(NvmlError, match="UNKNOWN"):
        bench.read()
    del bench.nvml.gpus[0].answers["nvmlDeviceGetSamples", UTILIZATION]
    bench.keep(3, 10)
    assert bench.read() == Spread(0.5, 0.1, 0.9)
