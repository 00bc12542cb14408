"""The sliding window: how long an error counts in it, whatever the ticks, the counter and the clock do."""

from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.memory import BUCKET_MS, WINDOW_MS, ErrorWindow, errors_in_window, next_window
from tests.streams.alerts.ticks import START_MS

Readings = list[tuple[int, float | None]]

steps = st.lists(
    st.tuples(st.integers(0, 40_000) | st.integers(0, 2_000), st.none() | st.integers(0, 5) | st.just(-1)),
    max_size=60,
)
"""Milliseconds since the last tick, and what the counter did: no reading, so many errors, or back to zero."""


def readings(story: list[tuple[int, int | None]]) -> Readings:
    at_ms, value, result = START_MS, 7.0, Readings()
    for after_ms, rise in story:
        at_ms += after_ms
        value = 0.0 if rise == -1 else value + (rise or 0)
        result.append((at_ms, None if rise is None else value))
    return result


def errors_shown(reading_list: Readings) -> list[tuple[int, float]]:
    """The errors that each tick shows."""
    errors, last = list[tuple[int, float]](), None
    for at_ms, value in reading_list:
        if value is not None:
            if last is not None:
                errors.append((at_ms, value - last if value >= last else value))
            last = value
    return errors


def window_after(reading_list: Readings) -> ErrorWindow | None:
    window: ErrorWindow | None = None
    for at_ms, value in reading_list:
        if window is not None:
            window = next_window(window, value, at_ms)
        elif value is not None:
            window = ErrorWindow(value)
    return window


@given(steps)
def test_an_error_counts_for_a_minute_and_for_less_than_five_seconds_more(story: list[tuple[int, int | None]]) -> None:
    reading_list = readings(story)
    for count in range(1, len(reading_list) + 1):
        now_ms = reading_list[count - 1][0]
        errors = errors_shown(reading_list[:count])
        least = sum(rise for at_ms, rise in errors if now_ms - at_ms < WINDOW_MS)
        most = sum(rise for at_ms, rise in errors if now_ms - at_ms < WINDOW_MS + BUCKET_MS)
        assert least <= errors_in_window(window_after(reading_list[:count]), now_ms) <= most


@given(steps)
def test_what_is_remembered_is_bounded_and_goes_when_it_is_over(story: list[tuple[int, int | None]]) -> None:
    reading_list = readings(story)
    window = window_after(reading_list)
    if window is not None:
        assert len(window.errors) <= WINDOW_MS // BUCKET_MS + 2
        assert next_window(window, None, reading_list[-1][0] + WINDOW_MS + BUCKET_MS).errors == ()


@given(steps, st.integers(1, 10_000_000))
def test_errors_from_before_a_clock_was_set_back_count_from_the_first_tick_after(
    story: list[tuple[int, int | None]], back_ms: int
) -> None:
    reading_list = readings(story)
    window = window_after(reading_list)
    if window is None:
        return
    now_ms = reading_list[-1][0]
    counted = errors_in_window(window, now_ms)
    following = next_window(window, None, now_ms - back_ms)
    assert errors_in_window(following, now_ms - back_ms) <= counted
    if back_ms >= WINDOW_MS + 2 * BUCKET_MS:
        assert errors_in_window(following, now_ms - back_ms) == sum(n for _, n in window.errors)
    assert errors_in_window(following, now_ms - back_ms + WINDOW_MS + BUCKET_MS) == 0


def test_the_first_reading_shows_no_error_and_a_reset_shows_all_of_what_is_there() -> None:
    reading_list: Readings = [(START_MS, 40.0), (START_MS + 1000, 41.0), (START_MS + 2000, 3.0), (START_MS + 3000, 0.0)]
    assert [errors_in_window(window_after(reading_list[: i + 1]), reading_list[i][0]) for i in range(4)] == [
        0.0,
        1.0,
        4.0,
        4.0,
    ]
