"""When a node's next record is due: at once, but not many in a row, and not for want of an owner's name.

In: the nodes that changed, and the time. Out: those that are due, and when the next is.
State: when each was last told of. All of it is pure: times are given, in seconds that never step back.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

SPACING_S = 0.2
"""At least so much lies between two records of a node: a pod that starts changes often."""

HOLD_S = 0.5
"""So long a record waits for the owner chains of new pods. Readers wait for a new pod for 2 s, and what a series is
called by would change if the chain came later."""


class Due(NamedTuple):
    """The nodes that are due now, and the time when the next will be; None: none waits."""

    nodes: list[str]
    next_s: float | None


class Pace:
    """When each node was last told of, and since when one waits for owner chains."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._held_s: dict[str, float] = {}

    def due(self, changed: Iterable[str], awaits: Callable[[str], bool], now_s: float) -> Due:
        """Which of the changed nodes are due. ``awaits``: whether a chain that a node's record needs is unknown yet."""
        self._forget(now_s)
        nodes, next_s = [], None
        for node in changed:
            at_s = self._told_s.get(node, now_s - SPACING_S) + SPACING_S
            if awaits(node):
                at_s = max(at_s, self._held_s.setdefault(node, now_s) + HOLD_S)
            if at_s <= now_s:
                nodes.append(node)
            else:
                next_s = at_s if next_s is None else min(next_s, at_s)
        return Due(nodes, next_s)

    def told(self, node: str, now_s: float) -> None:
        """A record of the node was made."""
        self._held_s.pop(node, None)
        self._told_s.pop(node, None)
        self._told_s[node] = now_s

    def _forget(self, now_s: float) -> None:
        """Forget the nodes that were told of so long ago that it does not matter any more."""
        while self._told_s:
            node = next(iter(self._told_s))
            if now_s - self._told_s[node] < SPACING_S:
                return
            del self._told_s[node]
