"""Limits how often the same message is logged."""

import time
from collections.abc import Callable, Hashable

_LOG_AGAIN_S = 60.0


class LogThrottle:
    """Decides which messages are logged: a new one, and the same one again after a minute. ``clock`` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_s: dict[Hashable, float] = {}

    def is_due(self, message: Hashable) -> bool:
        """Whether to log a message, or one of a kind, now; if so, it counts as logged."""
        now_s = self._clock()
        self._logged_s = {key: logged_s for key, logged_s in self._logged_s.items() if now_s - logged_s < _LOG_AGAIN_S}
        if message in self._logged_s:
            return False
        self._logged_s[message] = now_s
        return True
