"""GPUHeldIdle against the truth of a simulated fleet, and against the query written for it: a small benchmark."""

import pytest

from producers.simulated.fleet import Fleet
from tests.bench.idle import NOBODY, Counted, Score, scores

MINUTE_MS = 60_000

pytestmark = pytest.mark.slow


def test_what_is_reported_idle_is_idle_and_nearly_all_that_is_idle_is_reported() -> None:
    fleet = Fleet(2, 4, seed=7, pod_life_s=1200)
    right, claims, asked_of_held = scores(fleet, 2000, for_ms=3 * MINUTE_MS, grace_ms=MINUTE_MS // 2).values()
    assert right.precision > 0.99
    assert right.recall > 0.9
    for query in (claims, asked_of_held):
        assert query.precision < right.precision - 0.3
        assert query.recall < right.recall - 0.2


def test_a_claim_about_another_pod_or_nobody_is_wrong_and_leaves_the_true_one_unreported() -> None:
    counts = Counted()
    counts.count({("GPU-a", ("ml", "b")), ("GPU-b", NOBODY), ("GPU-c", ("ml", "c"))}, {("GPU-a", ("ml", "a"))})
    counts.count({("GPU-a", ("ml", "a"))}, {("GPU-a", ("ml", "a"))})
    assert counts.score() == Score(precision=1 / 4, recall=1 / 2)
