"""What ``gpustream top`` reads of the past, and what it says when nothing comes."""

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


@pytest.mark.parametrize(("interval_ms", "quiet_after_s"), [(None, 10), (1_000, 10), (60_000, 180)])
def test_kafka_is_said_to_be_away_when_every_node_has_missed_three_ticks(
    interval_ms: int | None, quiet_after_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet()
    fleet.observe(tick(gpu("b"), node="gone", interval_ms=1_000), at_s=1.0, wall_ms=1_000)
    fleet.observe(tick(gpu("a"), interval_ms=interval_ms), at_s=100.0, wall_ms=1_000)

    def trouble(at_s: float) -> str:
        monkeypatch.setattr(time, "monotonic", lambda: at_s)
        return moment(fleet, LatestAlerts(), "", began_s=0.0).trouble

    assert trouble(100.0 + quiet_after_s) == ""
    assert trouble(101.0 + quiet_after_s).startswith(f"no tick for {quiet_after_s + 1} s")
