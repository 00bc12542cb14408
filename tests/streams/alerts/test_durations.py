"""Durations, as written and as read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.durations import LONGEST_MS, milliseconds, words


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("30s", 30_000), (" 15 m ", 900_000), ("2h", 7_200_000), ("7d", 604_800_000),
                     ("90", 90_000), ("1.5h", 5_400_000), ("0", 0)]
)  # fmt: skip
def test_a_duration_is_read(text: str, ms: int) -> None:
    assert milliseconds(text) == ms


@pytest.mark.parametrize(
    "text", ["", " ", "h", "1w", "-1s", "1e3", "1h30m", "١s", "1.s", ".5s", "nan", "1" * 13, "4000d"]
)
def test_what_is_none_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|ten years"):
        milliseconds(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0s"), (499, "0s"), (1_000, "1s"), (61_000, "1m 1s"), (900_000, "15m"), (5_400_000, "1h 30m"),
                     (90_061_000, "1d 1h"), (86_401_000, "1d 1s")]
)  # fmt: skip
def test_a_duration_is_said_by_its_two_largest_units(ms: int, text: str) -> None:
    assert words(ms) == text


@given(st.text(max_size=8))
def test_whatever_is_written_is_a_bounded_duration_or_an_error(text: str) -> None:
    try:
        ms = milliseconds(text)
    except ValueError:
        return
    assert 0 <= ms <= LONGEST_MS
