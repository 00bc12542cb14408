"""When NVML is to be opened again: handles of GPUs that came or came back are to be had in no other way.

In: what a census saw. Out: why it is to be opened again, or nothing.
State: for each GPU, how often that was in vain, and when it may be tried again. Pure but for the clock.
"""

from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

LONGEST_S = 3600.0


class _Tried(NamedTuple):
    times: int
    again_s: float


class Reopening:
    """Opening NVML again for a GPU that does not work afterwards either is tried less and less often: it interrupts the
    others."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._clock = first_s, clock
        self._tried: dict[str, _Tried] = {}

    def worked(self, uuid: str) -> None:
        """The GPU answered."""
        self._tried.pop(uuid, None)

    def why(self, seen: Set[str], working: Set[str | None]) -> str | None:
        """Why NVML is to be opened again, where ``seen`` are the GPUs that work for a new process, and ``working``
        those that work for this one."""
        missing = sorted(uuid for uuid in seen - working if self._is_due(uuid))
        self._note(missing)
        return f"{', '.join(missing)} would answer a new process, and not this one" if missing else None

    def _is_due(self, uuid: str) -> bool:
        tried = self._tried.get(uuid)
        return tried is None or self._clock() >= tried.again_s

    def _note(self, missing: Iterable[str]) -> None:
        for uuid in missing:
            times = self._tried[uuid].times + 1 if uuid in self._tried else 0
            again_s = self._clock() + min(LONGEST_S, self._first_s * 2**times)
            self._tried[uuid] = _Tried(times, again_s)
