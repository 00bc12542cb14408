"""What gpu.actions says: the last word on each action, and which intentions are within the budget. Pure.

In: the records of a cluster, in the order of their log. Out: what has become of each action.

An intention is granted by its place in the log: if fewer were granted in the hour before it than the budget has, but
for those that were refused since. Whoever reads the log finds the same, so that replicas of the sink share the budget
without another agreement. What was undone still counts.
"""

from collections import deque
from collections.abc import Mapping

from topics.actions import Action, ActionKind
from topics.alerts import milliseconds

HOUR_MS = 3_600_000
_REMEMBERED = 1000

OVER = frozenset({"done", "undone"})
"""What is not done again for the same firing of an alert."""

Budgets = Mapping[str, int]
"""How many actions may be done within an hour: ``event``, and ``stop``, all others."""


def budget_of(action: str | None) -> str:
    """Which budget an action is of."""
    event: ActionKind = "event"
    return event if action == event else "stop"


class Ledger:
    """The actions of one cluster. Times are those of the log, in ms; a log without any has -1."""

    def __init__(self, cluster: str, budgets: Budgets) -> None:
        self._cluster, self._budgets = cluster, budgets
        self._last: dict[str, Action] = {}
        self._unsettled: dict[str, Action] = {}
        self._granted: dict[str, dict[str, int]] = {budget: {} for budget in budgets}
        self._read: deque[tuple[Action, bool]] = deque(maxlen=_REMEMBERED)

    def take(self, action: Action, logged_ms: int) -> None:
        """A record, as it comes in the log."""
        if action.cluster != self._cluster:
            return
        self._fold(action, logged_ms)
        self._read.append((action, action.id in self._granted[budget_of(action.action)]))

    def last(self, of: str) -> Action | None:
        """The last word on an action; None if there is none."""
        return self._last.get(of)

    def unsettled(self) -> list[Action]:
        """What is planned, or intended and without an outcome."""
        return list(self._unsettled.values())

    def verdict(self, written: Action) -> bool | None:
        """Whether an action that was just written is within the budget; None: it was not read yet."""
        return next((granted for read, granted in reversed(self._read) if read == written), None)

    def has_room(self, action: str, now_ms: int) -> bool:
        """Whether another one would be within the budget now, by what was read."""
        return self.left(budget_of(action), now_ms) > 0

    def left(self, budget: str, now_ms: int) -> int:
        """How many more actions a budget lets be done now."""
        recent = [at_ms for at_ms in self._granted[budget].values() if at_ms > now_ms - HOUR_MS]
        return self._budgets[budget] - len(recent)

    def _fold(self, action: Action, logged_ms: int) -> None:
        last = self._last.get(action.id)
        if last is not None and last.state in OVER and action.state != "undone":
            return  # a word that was late, of another replica
        self._last[action.id] = action
        self._unsettled.pop(action.id, None)
        if action.state in ("intended", "planned"):
            self._unsettled[action.id] = action
        granted = self._granted[budget_of(action.action)]
        if action.state == "intended":
            at_ms = logged_ms if logged_ms > 0 else milliseconds(action.at)
            if granted.get(action.id, -HOUR_MS) <= at_ms - HOUR_MS:  # else it was granted already
                granted.pop(action.id, None)
                if self.left(budget_of(action.action), at_ms) > 0:
                    granted[action.id] = at_ms
        elif action.state == "refused":
            granted.pop(action.id, None)


def says_nothing_new(one: Action, last: Action | None) -> bool:
    """Whether a record would say of an action what the last one did."""
    return last is not None and _said(one) == _said(last)


def _said(one: Action) -> tuple[object, ...]:
    return one.state, one.reason, one.due_at, one.target
