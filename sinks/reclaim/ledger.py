"""The ledger of gpu.actions: the last record of each action, and which intentions are within the budget. Pure.

In: the records of a cluster, in the order of their log. Out: the state of each action.

An intention is granted if fewer than the budget were granted in the hour before it in the log; undone ones count,
and refused ones do not, except if they were interrupted: the API server may still answer their requests. What was done
after all counts from when that was written. What a replica decides about an action before it has read the intention of
another counts for nothing: only one of them acts. Every reader of the log comes to the same result, so replicas of the
sink share the budget without any other agreement.
"""

from collections import deque
from collections.abc import Mapping
from operator import attrgetter

from topics.actions import TOPIC, Action
from topics.times import epoch_ms

HOUR_MS = 3_600_000
KEPT_MS = (TOPIC.retention_hours or 0) * HOUR_MS
"""An action of which nothing was written for so long is forgotten: the topic does not have it any more."""

_REMEMBERED = 1000

OVER = frozenset({"done", "undone"})
"""The states after which an action is not done again for the same firing of an alert."""


def budget_of(action: str | None) -> str:
    """The budget that an action counts against."""
    return "event" if action == "event" else "stop"


class Ledger:
    """The actions of one cluster. Times are those of the log, in ms; -1 in a log without times.

    ``budgets``: how many actions may be done within an hour, of kind ``event``, and of ``stop``, which are all others.
    """

    def __init__(self, cluster: str, budgets: Mapping[str, int]) -> None:
        self._cluster, self._budgets = cluster, budgets
        self._last: dict[str, Action] = {}
        self._last_logged_ms: dict[str, int] = {}  # the one that was written of longest ago is the first
        self._intentions: dict[str, Action] = {}
        self._unsettled: dict[str, Action] = {}
        self._granted: dict[str, dict[str, int]] = {budget: {} for budget in budgets}
        self._read: deque[tuple[Action, bool]] = deque(maxlen=_REMEMBERED)

    def add(self, action: Action, logged_ms: int) -> None:
        """Add the next record of the log."""
        if action.cluster != self._cluster:
            return
        granted = self._granted[budget_of(action.action)]
        is_late = _is_late(action, self._last.get(action.id), is_granted=action.id in granted)
        if not is_late:
            self._last[action.id] = action
            self._unsettled.pop(action.id, None)
            if action.state in ("intended", "planned"):
                self._unsettled[action.id] = action
            if action.state == "intended":
                self._intentions[action.id] = action
            self._count(action, logged_ms if logged_ms > 0 else epoch_ms(action.at))
        self._last_logged_ms.pop(action.id, None)
        self._last_logged_ms[action.id] = logged_ms
        while (oldest := next(iter(self._last_logged_ms.items())))[1] < logged_ms - KEPT_MS:
            for actions in (self._last, self._last_logged_ms, self._intentions, self._unsettled):
                actions.pop(oldest[0], None)
            for of_budget in self._granted.values():
                of_budget.pop(oldest[0], None)
        is_granted = not is_late and action.id in granted and self._last[action.id].state not in OVER
        self._read.append((action, is_granted))

    def _count(self, action: Action, at_ms: int) -> None:
        """Count an action against its budget from a time on, or not any more."""
        budget = budget_of(action.action)
        granted = self._granted[budget]
        if action.state == "intended":
            was_granted = granted.pop(action.id, -HOUR_MS) > at_ms - HOUR_MS
            if was_granted or self.left(budget, at_ms) > 0:
                granted[action.id] = at_ms  # it may only be done now: its hour begins again
        elif action.state == "refused" and action.target is not None and action.reason != "interrupted":
            granted.pop(action.id, None)
        elif action.state == "done":
            granted.setdefault(action.id, at_ms)

    def last(self, action: str) -> Action | None:
        """The last record of an action, by its id; None if there is none."""
        return self._last.get(action)

    def intention(self, action: str) -> Action | None:
        """The last intention of an action, whatever became of it; None if there is none."""
        return self._intentions.get(action)

    def unsettled(self) -> list[Action]:
        """The actions that are planned, or intended and without an outcome."""
        return list(self._unsettled.values())

    def verdict(self, written: Action) -> bool | None:
        """Whether an intention that was written is within the budget, and its action is neither done yet nor begun by
        another replica; None: it was not read back yet."""
        return next((granted for read, granted in reversed(self._read) if read == written), None)

    def has_room(self, action: Action, now_ms: int) -> bool:
        """Whether an intention would be within the budget now, by the records read so far."""
        budget = budget_of(action.action)
        return self._granted[budget].get(action.id, 0) > now_ms - HOUR_MS or self.left(budget, now_ms) > 0

    def left(self, budget: str, now_ms: int) -> int:
        """How many more actions are within a budget now."""
        recent = 0
        for at_ms in reversed(self._granted[budget].values()):  # in the order of the log, and clocks may differ
            if at_ms <= now_ms - 2 * HOUR_MS:
                break
            recent += at_ms > now_ms - HOUR_MS
        return self._budgets[budget] - recent


def _is_late(action: Action, last: Action | None, *, is_granted: bool) -> bool:
    """Whether a record was written by a replica that had not read the last one. An outcome has the target of its
    intention, and ``by``; what is refused without a target was never begun by who wrote that."""
    if last is None or action.state == "undone":
        return False
    is_outcome = action.state in ("intended", "done") or (action.state == "refused" and action.target is not None)
    is_of_last = is_outcome and action.by == last.by
    return last.state in OVER or (last.state == "intended" and is_granted and not is_of_last)


def is_repeated(action: Action, last: Action | None) -> bool:
    """Whether a record would only repeat the last one of its action."""
    content = attrgetter("state", "reason", "due_at", "target", "revision")
    return last is not None and content(action) == content(last)
