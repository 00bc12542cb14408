"""The ticks of a simulated fleet, without waiting for their times."""

from collections.abc import Iterator
from typing import NamedTuple

from producers.simulated.fleet import Fleet, KnownPods, NodeReading, SimulatedNode


class Tick(NamedTuple):
    """One node's tick at ``ts_ms``, the ``seq``-th of its run. ``news`` is what the API server learned since the last
    tick; its times are absolute, as ``ts_ms`` is."""

    node: SimulatedNode
    seq: int
    ts_ms: int
    reading: NodeReading
    news: tuple[KnownPods, ...]


def ticks(fleet: Fleet, start_ms: int, interval_ms: int, count: int) -> Iterator[Tick]:
    """``count`` ticks of every node, in the order of their times, for a fleet that starts at ``start_ms``. It
    does not wait."""
    nodes, order = [fleet.node(index) for index in range(fleet.nodes)], fleet.order(interval_ms)
    for number in range(count):
        for phase_ms, index in order:
            node, at_ms = nodes[index], number * interval_ms + phase_ms
            news = tuple(change._replace(at_ms=start_ms + change.at_ms) for change in node.pod_changes(at_ms, start_ms))
            yield Tick(node, number + 1, start_ms + at_ms, node.read(at_ms, start_ms), news)
