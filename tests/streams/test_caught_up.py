"""Since when a partition has been watched: the condition for reporting that nothing came."""

from hypothesis import given
from hypothesis import strategies as st

from streams.caught_up import BREAK_S, CaughtUp, Ends

FOREVER = float("-inf")


def attended(*asked_s: float) -> CaughtUp:
    """A partition that ended at 10 whenever it was asked, and has been read so far."""
    partition = CaughtUp()
    for at_s in asked_s:
        partition.ends(Ends(at_s, 10, None))
        partition.read(10)
    return partition


def test_a_partition_is_watched_from_the_first_to_the_last_answer_that_was_read_to() -> None:
    assert attended(5.0, 6.0, 9.0).lasted_s(FOREVER) == 4.0
    assert attended(5.0, 6.0, 9.0).lasted_s(7.0) == 2.0


def test_a_partition_that_was_never_read_to_its_end_was_never_watched() -> None:
    partition = CaughtUp()
    partition.ends(Ends(5.0, 10, None))
    partition.read(9)
    assert partition.lasted_s(FOREVER) < 0
    assert partition.lasted_s(0.0) < 0


def test_an_answer_counts_once_what_there_was_then_has_been_read() -> None:
    partition = attended(1.0)
    partition.ends(Ends(2.0, 12, None))
    partition.ends(Ends(3.0, 15, None))
    partition.read(12)
    assert partition.lasted_s(1.0) == 1.0
    partition.read(15)
    assert partition.lasted_s(1.0) == 2.0


def test_after_a_break_watching_begins_again() -> None:
    assert attended(1.0, 1.0 + BREAK_S).lasted_s(FOREVER) == BREAK_S
    assert attended(1.0, 1.1 + BREAK_S, 3.1 + BREAK_S).lasted_s(FOREVER) == 2.0


def test_samples_that_are_not_attributed_keep_a_partition_from_being_watched() -> None:
    partition = attended(1.0)
    partition.ends(Ends(2.0, 10, 8))
    partition.attributed(6)
    partition.read(10)
    assert partition.lasted_s(1.0) == 0.0
    partition.attributed(7)
    partition.attributed(3)
    partition.read(10)
    assert partition.lasted_s(1.0) == 1.0


def test_a_sample_that_is_never_attributed_counts_until_none_has_come_for_long() -> None:
    partition = CaughtUp(no_samples_s=60.0)
    for at_s in range(0, 58, 2):
        partition.ends(Ends(at_s, 10, 8 if at_s < 20 else 9))
        partition.read(10)
    assert partition.lasted_s(FOREVER) < 0
    for at_s in range(58, 90, 2):
        partition.ends(Ends(at_s, 10, 9))
        partition.read(10)
    assert partition.lasted_s(FOREVER) == 88.0


@given(st.lists(st.floats(0, 30), max_size=20))
def test_no_longer_is_claimed_than_there_were_answers(pauses: list[float]) -> None:
    at_s, since_s = 0.0, 0.0
    partition = attended(0.0)
    for pause_s in pauses:
        at_s += pause_s
        if pause_s > BREAK_S:
            since_s = at_s
        partition.ends(Ends(at_s, 10, None))
        partition.read(10)
        assert partition.lasted_s(FOREVER) <= at_s - since_s + 1e-6
