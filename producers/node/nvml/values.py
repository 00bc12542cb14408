"""From NVML's numbers to the catalogue's: base units, and nothing that can't be.

In: raw numbers and how wide they are. Out: numbers in base units, or why there is none. Pure.
Source: nvml.h writes "not available" as all ones of the type; DCGM, whose numbers pass through some layers, as
2^31 - 16 and 2^63 - 16 (and three more above each); some calls as -1.
"""

import enum
from typing import NamedTuple


class Absent(enum.Enum):
    """Why a device has no value: it says that it does not know, or what it says can't be."""

    UNKNOWN = "unknown"
    IMPLAUSIBLE = "implausible"


class Scale(NamedTuple):
    """How a raw number becomes one in base units: ``times``, then ``per``, which keeps 93 % exactly 0.93."""

    times: int = 1
    per: int = 1


class Limits(NamedTuple):
    """The smallest and the largest value, in base units, that a device can have; what is over the largest by at most
    ``slack``, as what is measured may be, is the largest."""

    low: float
    high: float
    slack: float = 0.0


class Count(NamedTuple):
    """A counter as it was read: ``bits`` wide, at ``at_us`` by its own clock (0: it has none) and ``at_s`` by ours,
    which never steps back."""

    raw: int
    bits: int
    at_us: int
    at_s: float


AMBIGUOUS_AFTER_S = 10.0
"""After so long a counter of 32 bits may have wrapped more than once."""

_BLANK: dict[int, frozenset[float]] = {
    bits: frozenset({-1, (1 << bits) - 1, *((1 << (bits - 1)) - 16 + more for more in range(4))})
    for bits in (16, 32, 64)
}
_BLANK[16] = frozenset({-1, 0xFFFF})
_NONE_BLANK = frozenset({-1.0})


def is_blank(raw: float, bits: int) -> bool:
    """Whether a number of that width stands for "not available"."""
    return raw in _BLANK.get(bits, _NONE_BLANK)


def measured(raw: object, bits: int, scale: Scale, limits: Limits) -> float | Absent:
    """A raw number in base units; IMPLAUSIBLE where it is blank, no number, or beyond the limits."""
    if not isinstance(raw, int | float) or is_blank(raw, bits):
        return Absent.IMPLAUSIBLE
    value = raw * scale.times
    return within(value / scale.per if scale.per != 1 else value, limits)


def within(value: float, limits: Limits) -> float | Absent:
    """The value itself, or IMPLAUSIBLE; NaN is within nothing."""
    return min(value, limits.high) if limits.low <= value <= limits.high + limits.slack else Absent.IMPLAUSIBLE


def per_second(last: Count, now: Count) -> float | None:
    """How fast a counter that may have wrapped once has run; None where that can't be said.

    Reset to 0, it looks wrapped: of 64 bits far beyond any limit, of 32 bits not to be told from a wrap.
    """
    elapsed_s = _elapsed_s(last, now)
    if not elapsed_s > 0 or last.bits != now.bits or (now.bits < 64 and elapsed_s > AMBIGUOUS_AFTER_S):
        return None
    return float((now.raw - last.raw) % (1 << now.bits)) / elapsed_s


def is_same_reading(last: Count, now: Count) -> bool:
    """Whether the device gave an answer that it had given before."""
    return now.at_us > 0 and now.at_us == last.at_us and now.raw == last.raw


def _elapsed_s(last: Count, now: Count) -> float:
    """By the counter's own clock where that agrees with ours within a factor of two, else by ours."""
    ours_s = now.at_s - last.at_s
    own_s = (now.at_us - last.at_us) / 1e6 if last.at_us > 0 else 0.0
    return own_s if ours_s / 2 <= own_s <= ours_s * 2 else ours_s
