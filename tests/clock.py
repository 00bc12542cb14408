"""An event loop whose time is made up: a sleep takes no time, and what happens is the same on every machine."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Instant(selectors.SelectSelector):
    """Never blocks: where the loop would sleep, its clock is set forward instead."""

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
    """A loop that lives on the clock of its selector."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._instant.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a loop of its own; whatever is left over is cancelled."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(main)
