"""What ``gpustream top`` reads of the past."""

from delivery.ledger import Partition
from gpustream.history import Span
from gpustream.top.command import latest_spans

QUIET, BUSY, EMPTY = (Partition("gpu.attributed", number) for number in range(3))


def test_of_a_large_fleet_each_partition_is_read_from_about_the_same_time() -> None:
    spans = {QUIET: Span(100, 1_100), BUSY: Span(0, 9_000), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == {QUIET: Span(1_000, 1_100), BUSY: Span(8_100, 9_000), EMPTY: Span(5, 5)}


def test_of_a_small_fleet_all_of_the_time_is_read() -> None:
    spans = {QUIET: Span(100, 1_100), EMPTY: Span(5, 5)}

    assert latest_spans(spans, 1_000) == spans
    assert latest_spans({EMPTY: Span(5, 5)}, 1_000) == {EMPTY: Span(5, 5)}
