"""The time of a simulated fleet: how long it has lived, and what a reader's clock says then."""

import time
from collections.abc import Callable

TOLERANCE_MS = 1_000
"""How far the fleet's times may drift from the machine's before they follow it."""


class FleetClock:
    """Counts from its making on a clock that never steps back; times since the epoch follow the machine's clock.

    Where the machine's clock steps, so do the times since the epoch, as on a real node; the fleet lives on evenly.
    ``start_ms`` is what a time since the start is added to.
    """

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._began_s = monotonic_s()
        self.start_ms = int(wall_s() * 1000)

    def elapsed_ms(self) -> int:
        """Milliseconds since the start."""
        elapsed_ms = int((self._monotonic_s() - self._began_s) * 1000)
        wall_ms = int(self._wall_s() * 1000)
        if abs(wall_ms - self.start_ms - elapsed_ms) > TOLERANCE_MS:
            self.start_ms = max(0, wall_ms - elapsed_ms)
        return elapsed_ms
