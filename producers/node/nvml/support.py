"""Which sources of a device's values are asked: one that was refused is asked again, less and less often.

In: which sources answered, and which were refused and why. Out: which to ask in this reading.
State: for each refused source, the reading in which it is asked again. Pure.

A driver may refuse for seconds what it supports, as while a GPU is reset or in use by a profiler. So what has answered
once is asked again after 1, 2, 4, ... readings. What has never answered most likely never will.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from producers.node.nvml.calls import Tried

FIRST_WAIT, LONGEST_WAIT = 1, 64
"""Readings until a source that has answered before is asked again."""

FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT = 64, 4096
"""Readings until one that never has is asked again."""


@dataclass(slots=True)
class _Refused:
    why: Tried
    wait: int
    again: int


class Support:
    """Of one device."""

    def __init__(self) -> None:
        self._readings = 0
        self._answered: set[Hashable] = set()
        self._refused: dict[Hashable, _Refused] = {}

    def begin(self) -> bool:
        """A new reading; whether a refused source is to be asked again in it."""
        self._readings += 1
        return any(one.again <= self._readings for one in self._refused.values())

    def asks(self, source: Hashable) -> bool:
        """Whether to ask the source in this reading."""
        refused = self._refused.get(source)
        return refused is None or refused.again <= self._readings

    def has_answered(self, source: Hashable) -> bool:
        """Whether it ever did."""
        return source in self._answered

    def answer(self, source: Hashable) -> None:
        """It has answered."""
        self._answered.add(source)
        self._refused.pop(source, None)

    def refuse(self, source: Hashable, why: Tried) -> None:
        """The device does not support it, now at least."""
        known = source in self._answered
        first, longest = (FIRST_WAIT, LONGEST_WAIT) if known else (FIRST_UNKNOWN_WAIT, LONGEST_UNKNOWN_WAIT)
        before = self._refused.get(source)
        wait = first if before is None else min(longest, 2 * before.wait)
        self._refused[source] = _Refused(why, wait, self._readings + wait)

    def why(self, source: Hashable) -> Tried | None:
        """Why it was refused when it was asked last; None if it was not."""
        refused = self._refused.get(source)
        return None if refused is None else refused.why
