"""What is told again and again."""

from sinks.alertmanager.board import RESOLVED_FOR_MS, Board
from tests.sinks.alerts import START_MS, alert


def test_what_is_open_is_due_for_ever_and_what_is_over_for_a_quarter_of_an_hour() -> None:
    board, over_ms = Board(), START_MS + 5_000
    board.put(alert("open"), START_MS)
    board.put(alert("over"), START_MS)
    board.put(alert("over", ends_ms=over_ms - 1_000_000), over_ms)
    both = [alert("open").fingerprint, alert("over").fingerprint]
    assert board.due(over_ms + RESOLVED_FOR_MS) == both
    assert board.states(both) == [alert("open"), alert("over", ends_ms=over_ms - 1_000_000)]
    assert board.open() == 1
    assert board.due(over_ms + RESOLVED_FOR_MS + 1) == both[:1]
    assert board.due(over_ms + 10 * 365 * 86_400_000) == both[:1]
    assert board.states(both) == [alert("open")]


def test_what_is_deleted_is_not_told() -> None:
    board = Board()
    board.put(alert(), START_MS)
    board.remove(None)
    board.remove(b"\xff")
    assert board.open() == 1
    board.remove(alert().fingerprint.encode())
    assert board.due(START_MS) == []


def test_an_alert_that_fires_again_is_told_as_it_is_now() -> None:
    board = Board()
    board.put(alert(ends_ms=START_MS + 1), START_MS)
    board.put(alert(starts_ms=START_MS + 2), START_MS)
    assert board.states(board.due(START_MS)) == [alert(starts_ms=START_MS + 2)]
    board.clear()
    assert board.due(START_MS) == []
