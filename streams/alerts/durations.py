"""Durations as people write them, and as they read them."""

import re

DAY_MS = 86_400_000
LONGEST_MS = 3650 * DAY_MS

_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|)", re.ASCII)
_UNITS_MS = {"ms": 1, "s": 1_000, "": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}


def milliseconds(text: str) -> int:
    """``500ms``, ``30s``, ``15m``, ``2h``, ``7d``; a bare number is seconds. Raises ValueError with a sentence."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a duration: write 500ms, 30s, 15m, 2h or 7d (a bare number is seconds)")
    ms = round(float(match[1]) * _UNITS_MS[match[2]])
    if ms > LONGEST_MS:
        raise ValueError(f"{text[:80]!r} is longer than ten years")
    return ms


def words(ms: float) -> str:
    """``15m``, ``1h 30m``, ``2d 3h``: the two largest units, of whole seconds."""
    left, parts = round(ms / 1000), []
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, seconds)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"
