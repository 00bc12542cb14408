"""What is lost is found from sequence numbers."""

from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustream.tally import Attributed, Ranges, Run, RunSummary, Sampled, Tally
from sinks.outcomes import Outcome

NODE = Run("c", "n-0", 1000)
OTHER_RUN = Run("c", "n-1", 1000)

seqs = st.lists(st.integers(1, 30))


def _tally(**seqs_by_sink: list[int]) -> Tally:
    tally = Tally(seqs_by_sink)
    for name, numbers in seqs_by_sink.items():
        for seq in numbers:
            tally.sinks[name].outcome(*NODE, seq, "delivered")
    return tally


@given(seqs)
def test_sequence_numbers_are_a_set(numbers: list[int]) -> None:
    ranges = Ranges()
    new = [ranges.add(seq) for seq in numbers]

    assert new == [seq not in numbers[:i] for i, seq in enumerate(numbers)]
    assert {seq for seq in range(-1, 40) if seq in ranges} == set(numbers)


def test_a_long_run_in_order_is_one_range() -> None:
    ranges = Ranges()
    for seq in range(1, 100_001):
        ranges.add(seq)

    assert (ranges.prefix, list(ranges)) == (100_000, [(1, 100_000)])


@given(seqs, seqs, st.integers(0, 30))
def test_lost_is_what_was_sampled_and_some_sink_did_not_take(scrape: list[int], write: list[int], last: int) -> None:
    tally = _tally(scrape=scrape, remote_write=write)

    assert tally.undelivered({NODE: last}) == len(set(range(1, last + 1)) - (set(scrape) & set(write)))


def test_the_ticks_of_an_unknown_run_are_lost() -> None:
    assert _tally(scrape=[1, 2]).undelivered({NODE: 2, OTHER_RUN: 3}) == 3


def test_without_a_sink_nothing_can_be_lost() -> None:
    assert Tally([]).undelivered({NODE: 2}) == 0


def test_a_replay_of_an_attributed_tick_is_not_counted_again() -> None:
    tally = Tally([])

    assert tally.attributed(NODE, 1, "exact")
    assert not tally.attributed(NODE, 1, "late")
    assert _summary(tally, {NODE: 1}).attributed.exact == 1


def test_ticks_of_other_producers_on_the_same_kafka_are_not_counted() -> None:
    tally = _tally(scrape=[1])
    tally.attributed(NODE, 1, "exact")
    tally.attributed(OTHER_RUN, 1, "none")

    assert _summary(tally, {NODE: 1}).attributed.none == 0
    assert tally.unattributed({NODE: 2}) == 1


def test_the_summary_is_one_object_with_all_its_names() -> None:
    tally = _tally(scrape=[1, 2], remote_write=[1])
    tally.attributed(NODE, 1, "exact")
    tally.attributed(NODE, 2, "late")
    tally.dead_lettered((b"gpu.samples", b"0", b"7"))
    tally.dead_lettered((b"gpu.samples", b"0", b"7"))
    summary = tally.summary({NODE: 2}, values=8, delivered={"scrape": 8, "remote_write": 0}, dropped=0)

    assert msgspec.json.decode(msgspec.json.encode(summary)) == {
        "ticks": 2,
        "samples": 8,
        "attributed": {"exact": 1, "late": 1, "none": 0},
        "delivered": {"scrape": 8, "remote_write": 0},
        "dead_lettered": 1,
        "dropped": 0,
        "lost": 1,
    }
    assert not summary.ok


def test_a_dropped_tick_is_not_taken() -> None:
    tally = Tally(["scrape"])
    for seq, outcome in enumerate(("delivered", "dead_lettered", "duplicate", "dropped"), start=1):
        tally.sinks["scrape"].outcome(*NODE, seq, cast("Outcome", outcome))
    summary = tally.summary({NODE: 4}, values=0, delivered={}, dropped=3)

    assert (summary.lost, summary.dropped) == (1, 4)
    assert tally.behind("scrape", {NODE: 4}) == 1


def _summary(tally: Tally, sampled: Sampled) -> RunSummary:
    return tally.summary(sampled, values=0, delivered={}, dropped=0)


@pytest.mark.parametrize("seen_things", [[], ["XID 31 on GPU 4 of sim-0000", "GPU 4 of sim-0000 lost"]])
def test_the_summary_says_what_was_seen_and_where_everything_went(seen_things: list[str]) -> None:
    summary = RunSummary(60, 13200, Attributed(58, 1, 1), {"scrape": 13200}, 0, 0, 2)
    head = ["            seen  XID 31 on GPU 4 of sim-0000", "                  GPU 4 of sim-0000 lost"]

    assert summary.text(seen_things).splitlines() == [
        *head[: len(seen_things)],
        "         sampled  60 ticks, 13,200 values",
        "      attributed  58 exact, 1 late, 1 without a snapshot",
        "       to scrape  13,200 values",
        "   dead-lettered  0",
        "         dropped  0",
        "            lost  2",
    ]
