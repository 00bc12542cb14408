"""What ``gpustream top`` reads of the past, and when it says that nothing comes."""

import time

import pytest

from delivery.ledger import Partition
from gpustream.alerts import LatestAlerts
from gpustream.fleet import Fleet
from gpustream.history import Span
from gpustream.top.command import latest_spans, moment
from tests.gpustream.test_fleet import gpu, tick

QUIET, BUSY, EMPTY = (Partition("gpu.attributed", number) for number in range(3))


def test_of_a_large_fleet_each_partition_is_read_from_about_the_same_time() -> None:
    spans = {QUIET: Span(100, 1_100), BUSY: Span(0, 9_000), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == {QUIET: Span(1_000, 1_100), BUSY: Span(8_100, 9_000), EMPTY: Span(5, 5)}


def test_of_a_small_fleet_all_of_the_time_is_read() -> None:
    spans = {QUIET: Span(100, 1_100), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == spans
    assert latest_spans({EMPTY: Span(5, 5)}, 1_000) == {EMPTY: Span(5, 5)}


@pytest.mark.parametrize(
    ("interval_ms", "ago_s", "is_quiet"),
    [(1_000, 5, False), (1_000, 15, True), (30_000, 60, False), (30_000, 95, True)],
)
def test_nothing_is_said_to_be_quiet_before_three_intervals_are_over(
    interval_ms: int, ago_s: float, is_quiet: bool
) -> None:
    fleet, now_s = Fleet(), time.monotonic()
    fleet.observe(tick(gpu("a"), interval_ms=interval_ms), now_s - ago_s, 0)
    assert bool(moment(fleet, LatestAlerts(), "", now_s).trouble) is is_quiet
