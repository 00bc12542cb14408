"""The rule that distinguishes replays from new ticks, over logs that are partly repeated or created again."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from delivery.replays import LastTick, Verdict, after, verdict


class Tick(NamedTuple):
    """The fields that the rule reads."""

    run_id: int
    seq: int
    ts_ms: int
    offset: int


class Node(NamedTuple):
    """A reader's state of a node, and the identities of the ticks that it has accepted."""

    last: LastTick | None = None
    accepted: tuple[tuple[int, int], ...] = ()


def take(node: Node, tick: Tick) -> tuple[Node, Verdict]:
    """The node after a record, and the verdict on that record."""
    outcome = verdict(node.last, tick)
    if outcome == "replay":
        return node, outcome
    return Node(after(node.last, tick), (*node.accepted, (tick.run_id, tick.seq))), outcome


@st.composite
def logs(draw: st.DrawFn) -> list[Tick]:
    """A node's samples: runs whose ids are in no order, ticks that were dropped, clocks that a new run may set back."""
    ticks: list[Tick] = []
    offset, clock = draw(st.integers(0, 50)), 1_000_000
    for run_id in draw(st.lists(st.integers(1, 1000), min_size=1, max_size=4, unique=True)):
        clock += draw(st.integers(-5_000, 5_000))
        seq = 0
        for _ in range(draw(st.integers(1, 8))):
            seq, clock, offset = seq + draw(st.integers(1, 3)), clock + draw(st.integers(1, 1000)), offset + 1
            ticks.append(Tick(run_id, seq, clock, offset))
            offset += draw(st.integers(0, 5))
    return ticks


def identities(log: list[Tick]) -> tuple[tuple[int, int], ...]:
    return tuple((tick.run_id, tick.seq) for tick in log)


@given(logs(), st.data())
def test_every_tick_is_accepted_once_whatever_part_of_the_log_comes_again_and_when(
    log: list[Tick], data: st.DataObject
) -> None:
    node = Node()
    for number, tick in enumerate(log):
        node, outcome = take(node, tick)
        assert outcome == "next"
        begin = data.draw(st.integers(0, number + 1))
        for repeated in log[begin : data.draw(st.integers(begin, number + 1))]:
            node, outcome = take(node, repeated)
            assert outcome == "replay"

    assert node.accepted == identities(log)


@given(logs(), st.data())
def test_a_reader_that_begins_in_the_middle_accepts_no_replay_of_earlier_ticks(
    log: list[Tick], data: st.DataObject
) -> None:
    log = [tick._replace(ts_ms=1_000_000 + 1000 * number) for number, tick in enumerate(log)]
    middle = data.draw(st.integers(0, len(log) - 1))
    node, _ = take(Node(), log[middle])

    for repeated in log[: middle + 1]:
        node, outcome = take(node, repeated)
        assert outcome == "replay"


@given(logs(), st.integers(1, 8), st.data())
def test_a_log_that_is_created_again_is_accepted_whole_and_its_replays_are_not(
    log: list[Tick], extra_ticks: int, data: st.DataObject
) -> None:
    node = Node()
    for tick in log:
        node, _ = take(node, tick)
    end = log[-1]
    new_run = data.draw(st.booleans())
    clock = max(tick.ts_ms for tick in log)
    first_seq, run_id = (1, 2000) if new_run else (end.seq + 1, end.run_id)
    lower = [Tick(run_id, first_seq + n, clock + 1 + n, n) for n in range(extra_ticks) if n <= end.offset]

    for number, tick in enumerate(lower):
        node, outcome = take(node, tick)
        assert outcome == ("next" if number else "new_log")
        for repeated in lower[data.draw(st.integers(0, number)) : number + 1]:
            node, outcome = take(node, repeated)
            assert outcome == "replay"
        if not new_run:
            node, outcome = take(node, end)
            assert outcome == "replay"

    assert node.accepted == (*identities(log), *identities(lower))


def test_a_tick_that_its_producer_wrote_twice_is_accepted_once() -> None:
    node, _ = take(Node(), Tick(1, 7, 1000, 40))

    assert verdict(node.last, Tick(1, 7, 1000, 41)) == "replay"


def test_a_log_that_is_created_again_may_begin_at_the_last_offset_or_at_an_earlier_time() -> None:
    node, _ = take(Node(), Tick(1, 7, 1000, 40))

    assert verdict(node.last, Tick(1, 8, 1001, 40)) == "new_log"
    assert verdict(node.last, Tick(1, 8, 900, 3)) == "new_log"
