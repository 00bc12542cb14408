"""When a node's next record is due: at once, but not many in a row, and not before new pods' owners are known.

In: the nodes that changed, and the time. Out: those that are due, the pods that are held, and when to look again.
State: when each node was last told of, and since when each pod is held. Pure: times are given, in seconds that never
step back.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

SPACING_S = 0.2
"""At least so much lies between two records of a node: a pod that starts changes often."""

HOLD_S = 1.0
"""So long a new pod waits for its chain of owners. Readers wait for a new pod for 2 s, and what a series is called by
would change if the chain came later."""

_FORGET_S = 60.0


class Due(NamedTuple):
    """The nodes that are due now, and the time when the next will be; None: none waits."""

    nodes: list[str]
    next_s: float | None


class RateLimiter:
    """When each node was last told of, and since when pods are held."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}
        self._held_s: dict[str, float] = {}

    def due(self, changed: Iterable[str], awaits: Callable[[str], Iterable[str]], now_s: float) -> Due:
        """Which of the changed nodes are due. ``awaits`` gives the pods of a node whose chains are not known yet."""
        _forget(self._told_s, now_s - SPACING_S)
        _forget(self._held_s, now_s - _FORGET_S)
        nodes, next_s = [], None
        for node in changed:
            at_s = self._told_s.get(node, now_s - SPACING_S) + SPACING_S
            held_s = [self._held_s.setdefault(pod, now_s) for pod in awaits(node)]
            if held_s:
                at_s = max(at_s, min(held_s) + HOLD_S)
            if at_s <= now_s:
                nodes.append(node)
            else:
                next_s = at_s if next_s is None else min(next_s, at_s)
        return Due(nodes, next_s)

    def held(self, pods: Iterable[str], now_s: float) -> set[str]:
        """Which of these pods, whose chains are not known yet, have not waited long enough."""
        return {pod for pod in pods if now_s < self._held_s.setdefault(pod, now_s) + HOLD_S}

    def told(self, node: str, now_s: float) -> None:
        """A record of the node was made."""
        self._told_s.pop(node, None)
        self._told_s[node] = now_s


def _forget(times_s: dict[str, float], before_s: float) -> None:
    """Forget what was so long ago that it does not matter any more; the oldest times are first."""
    while times_s and next(iter(times_s.values())) <= before_s:
        del times_s[next(iter(times_s))]
