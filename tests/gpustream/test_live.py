"""What is said of a run where no screen is, and of its end."""

import pytest

from gpustream import live
from gpustream.fleet import Fleet
from gpustream.tally import Attributed, RunSummary
from tests.gpustream.test_fleet import gpu, seen, tick

FACTS = ["4 ticks/s, 890 values/s", "lag 0.3 s", "scrape 9,600 values (9 ticks behind)"]


def test_a_line_says_how_many_gpus_are_held_what_flows_and_who_is_busiest() -> None:
    fleet = seen(tick(gpu("a", 0.2, "ml/x"), gpu("b", 0.93, "ml/bert-0"), gpu("c", 0.0)))

    assert live.fleet_line(fleet, FACTS, 0, "") == (
        "1 nodes, 3 GPUs (2 held), 4 ticks/s, 890 values/s, lag 0.3 s, "
        "scrape 9,600 values (9 ticks behind), busiest ml/bert-0 at 93%"
    )
    assert ", 9 alerts, busiest" in live.fleet_line(fleet, FACTS, 9, "")
    assert live.fleet_line(fleet, FACTS, 0, "not ready: GPU 3 is lost").endswith("at 93%, not ready: GPU 3 is lost")


def test_while_it_starts_it_says_what_it_waits_for() -> None:
    waiting = "starting: sink: no assignment yet"

    assert live.fleet_line(Fleet(), [], 0, waiting) == waiting


@pytest.mark.parametrize("seen_things", [[], ["XID 31 on GPU 4 of sim-0000", "GPU 4 of sim-0000 lost"]])
def test_the_summary_says_what_was_seen_and_where_everything_went(seen_things: list[str]) -> None:
    summary = RunSummary(60, 13200, Attributed(58, 1, 1), {"scrape": 13200}, 0, 0, 2)
    head = ["            seen  XID 31 on GPU 4 of sim-0000", "                  GPU 4 of sim-0000 lost"]

    assert live.summary_text(summary, seen_things).splitlines() == [
        *head[: len(seen_things)],
        "         sampled  60 ticks, 13,200 values",
        "      attributed  58 exact, 1 late, 1 without a snapshot",
        "       to scrape  13,200 values",
        "   dead-lettered  0",
        "         dropped  0",
        "            lost  2",
    ]
