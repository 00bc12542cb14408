"""How late the event loop is: whatever shares it with the consumer group delays its heartbeats by as much."""

import asyncio
from collections import deque

from delivery.instruments import Instrument

_EVERY_S = 0.1
_WINDOW_S = 60.0


def lateness_instrument(component: str) -> Instrument:
    """What a component says of its own event loop."""
    return Instrument(
        f"gpustream_{component}_loop_late_seconds",
        "gauge",
        "The most that the event loop was late in the last minute. Past a tenth of --session-timeout it delays"
        " heartbeats; past all of it, another member takes over.",
    )


class LoopLateness:
    """Measures, while :meth:`watch` runs, how much later than due a sleeper wakes."""

    def __init__(self) -> None:
        self._worst: deque[tuple[float, float]] = deque()

    async def watch(self) -> None:
        """Measure ten times a second. Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.note(loop.time(), loop.time() - due_s)

    def note(self, now_s: float, late_s: float) -> None:
        """It woke this late. What was less late before is forgotten: it is never the worst of a minute again."""
        while self._worst and self._worst[-1][1] <= late_s:
            self._worst.pop()
        self._worst.append((now_s, late_s))
        while self._worst[0][0] < now_s - _WINDOW_S:
            self._worst.popleft()

    def worst_s(self) -> float:
        """The most that it was late within the last minute, in seconds."""
        return max(0.0, self._worst[0][1]) if self._worst else 0.0
