"""An event loop with simulated time: a sleep takes no real time, and the order of events is always the same."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Instant(selectors.SelectSelector):
    """Never blocks: if the loop would sleep, its clock is set forward instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("everything waits, and nothing is left to happen")
        self.now_s += timeout
        return []


class InstantLoop(asyncio.SelectorEventLoop):
    """A loop that uses the clock of its selector."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        """Seconds since the loop was created."""
        return self._instant.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new loop; tasks that are left are cancelled."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(main)
