"""How it is with something that goes on in spite of trouble: told in the log when that changes, and asked by health.

In: what went well or wrong, as often as it does. Out: one line for each change; of what wavers, one a minute and kind.
"""

import logging
import time

SAY_AGAIN_S = 60.0
UNREADY_AFTER_S = 30.0


class Condition:
    """Of ``what``, which begins each sentence; lines go to the logger of its owner."""

    def __init__(self, what: str, log: logging.Logger) -> None:
        self._what, self._log = what, log
        self._since_s: float | None = None
        self._told = ""
        self._told_s: dict[str, float] = {}
        self.problem = ""

    def good(self, how: str) -> None:
        """There is no trouble, which is said whenever something else was said last."""
        self.problem, self._since_s = "", None
        if how != self._told:
            self._told = how
            self._log.info("%s", f"{self._what}: {how}")

    def bad(self, kind: str, why: str) -> None:
        """There is trouble, of a kind, with a sentence that may differ each time."""
        self.problem = why
        if self._since_s is None:
            self._since_s = time.monotonic()
        now_s = time.monotonic()
        if kind != self._told and now_s - self._told_s.get(kind, float("-inf")) >= SAY_AGAIN_S:
            self._told, self._told_s[kind] = kind, now_s
            self._log.warning("%s", f"{self._what}: {why}")

    def lasting(self) -> list[str]:
        """The trouble, where it has lasted for 30 s."""
        bad_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return [f"{self._what}: {self.problem} (for {bad_s:.0f} s)"] if bad_s > UNREADY_AFTER_S else []
