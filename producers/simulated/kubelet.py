"""A kubelet that answers a little late: a snapshot read at one time says what was true a moment before.

In: the pods of a node. Out: the containers of gpu.allocations.
"""

from collections.abc import Iterable
from typing import Any

from producers.simulated import names
from producers.simulated.pods import Pod

SHORTEST_LAG_MS = 200
LONGEST_LAG_MS = 1_900
"""Below the tolerance with which readers look a pod up by name and time."""

_KNOT_MS = 10_000


class Lag:
    """How late one node's kubelet is: it wanders between the shortest and the longest, and never leaps.

    It changes by less than a millisecond per millisecond, so what the kubelet says never goes back in time.
    """

    def __init__(self, cluster: str, seed: int, node: int) -> None:
        self._where = (cluster, seed, node)
        self._knots: dict[int, float] = {}

    def seen_ms(self, at_ms: int) -> int:
        """The time that the kubelet's answer at ``at_ms`` tells of."""
        knot, rest = divmod(at_ms, _KNOT_MS)
        before, after = self._knot(knot), self._knot(knot + 1)
        return at_ms - round(before + (after - before) * rest / _KNOT_MS)

    def _knot(self, number: int) -> float:
        lag = self._knots.get(number)
        if lag is None:
            chance = names.fraction("lag", *self._where, number)
            lag = SHORTEST_LAG_MS + (LONGEST_LAG_MS - SHORTEST_LAG_MS) * chance
            self._knots = {n: value for n, value in self._knots.items() if n >= number - 1}
            self._knots[number] = lag
        return lag


def containers(pods: Iterable[Pod], seen_ms: int) -> list[dict[str, Any]]:
    """The containers of the pods that ran at ``seen_ms``, as the kubelet lists them."""
    return [row for pod in pods if pod.start_ms <= seen_ms < pod.end_ms for row in pod.allocated]
