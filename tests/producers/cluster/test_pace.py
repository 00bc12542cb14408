"""A node's record is due at once, then not more than five times a second, and waits shortly for owner chains."""

from producers.cluster.pace import HOLD_S, SPACING_S, Pace


def _never(_: str) -> bool:
    return False


def _always(_: str) -> bool:
    return True


def test_the_first_change_of_a_node_is_due_at_once() -> None:
    assert Pace().due(["a", "b"], _never, 100.0) == (["a", "b"], None)


def test_further_changes_wait_until_the_last_record_is_long_enough_ago() -> None:
    pace = Pace()
    pace.told("a", 100.0)

    assert pace.due(["a", "b"], _never, 100.0 + SPACING_S / 2) == (["b"], 100.0 + SPACING_S)
    assert pace.due(["a"], _never, 100.0 + SPACING_S) == (["a"], None)


def test_a_node_waits_for_owner_chains_but_not_for_long() -> None:
    pace = Pace()
    assert pace.due(["a"], _always, 100.0) == ([], 100.0 + HOLD_S)
    assert pace.due(["a"], _always, 100.2) == ([], 100.0 + HOLD_S)
    assert pace.due(["a"], _always, 100.0 + HOLD_S) == (["a"], None)


def test_a_node_is_due_as_soon_as_its_chains_are_known() -> None:
    pace = Pace()
    pace.due(["a"], _always, 100.0)

    assert pace.due(["a"], _never, 100.01).nodes == ["a"]


def test_the_next_wait_for_a_chain_begins_anew() -> None:
    pace = Pace()
    pace.due(["a"], _always, 100.0)
    pace.told("a", 101.0)

    assert pace.due(["a"], _always, 102.0) == ([], 102.0 + HOLD_S)
