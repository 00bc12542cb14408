"""When a node is silent."""

import pytest

from topics.samples import silent_after_s


@pytest.mark.parametrize(
    ("interval_ms", "after_s"),
    [(None, 30.0), (0, 30.0), (1000, 30.0), (10_000, 30.0), (30_000, 90.0), (3_600_000, 10_800.0), (2**62, 10_800.0)],
)
def test_a_node_is_silent_after_three_of_its_intervals_if_that_is_longer(
    interval_ms: int | None, after_s: float
) -> None:
    assert silent_after_s(interval_ms, 30.0) == after_s
