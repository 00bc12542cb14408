"""How many errors a counter had within the last minute: a sliding window of event time, for every rule that counts.

In: the readings of a counter, each with the time of its tick. Out: what is remembered of it, and the errors in the
window. Pure.

The window moves in buckets of five seconds, so that a counter that runs all the time takes at most 14 numbers:

- An error counts from the tick that shows it, for at least 60 s and for less than 65 s. It never comes back.
- The first reading of a counter is where it begins: it shows no error. A reading below the last one is a counter that
  began again at zero, so all of it is errors.
- A tick without a reading shows no error. Those that came meanwhile are shown by the next reading.
- If the node's clock was set back, what counted before counts as shown by the first tick after.
"""

import msgspec

WINDOW_MS = 60_000
BUCKET_MS = 5_000


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A counter's last reading, and the errors by bucket: (its start in units of :data:`BUCKET_MS`, how many)."""

    value: float
    errors: tuple[tuple[int, float], ...] = ()


_AT_ZERO = Window(0.0)
"""What most counters are, shared by all of them."""


def began(value: float) -> Window:
    """What is remembered after the first reading."""
    return Window(value) if value else _AT_ZERO


def read(window: Window, value: float | None, ts_ms: int) -> Window:
    """What is remembered after a tick; the same object if nothing changed. ``value`` None: the tick has no reading."""
    if value is None:
        value = window.value
    rise = value - window.value if value >= window.value else value
    now = ts_ms // BUCKET_MS
    kept = [one for one in window.errors if one[0] < now and _is_in(one[0], ts_ms)]
    rise += sum([count for start, count in window.errors if start >= now])
    errors = (*kept, (now, rise)) if rise else tuple(kept)
    return window if value == window.value and errors == window.errors else Window(value, errors)


def within(window: Window | None, ts_ms: int) -> float:
    """The errors in the window that ends with a tick."""
    if window is None or not window.errors:
        return 0.0
    return sum([count for start, count in window.errors if _is_in(start, ts_ms)])


def _is_in(start: int, ts_ms: int) -> bool:
    return ts_ms - start * BUCKET_MS < WINDOW_MS + BUCKET_MS
