"""A simulated fleet as a whole, and its ticks at any pace: a function of the seed and of the time since its start.

In: how many nodes and GPUs, a seed, how long pods live. Out: ticks in the order of their times.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from producers.records import checked_name
from producers.simulated import names
from producers.simulated.node import Known, Reading, SimulatedNode
from producers.simulated.schedule import Turnover

MAX_GPUS = 16


@dataclass(frozen=True, slots=True)
class Fleet:
    """``nodes`` nodes of ``gpus`` GPUs; pods live ``pod_life_s`` seconds on average.

    The same seed and cluster give the same pods, values and turnover; another gives other names, UUIDs and uids.
    """

    nodes: int
    gpus: int
    cluster: str = "default"
    seed: int = 1
    pod_life_s: float = 300.0

    def __post_init__(self) -> None:
        """Raises ValueError where there is no such fleet."""
        checked_name("cluster", self.cluster)
        if self.nodes < 1 or not 1 <= self.gpus <= MAX_GPUS:
            raise ValueError(f"a fleet has at least one node, and 1 to {MAX_GPUS} GPUs on each")
        if not self.pod_life_s > 0:
            raise ValueError(f"pods that live {self.pod_life_s} s: it must be above 0")

    def node(self, index: int) -> SimulatedNode:
        """A node as it is at the fleet's start."""
        return SimulatedNode(self.cluster, self.seed, index, self.gpus, Turnover(max(1, int(self.pod_life_s * 1000))))

    def phase_ms(self, index: int, interval_ms: int) -> int:
        """When within the interval a node reads: its own, so that a fleet does not read all at once."""
        return int(names.fraction("phase", self.cluster, self.seed, index) * interval_ms)


def parse_size(text: str) -> tuple[int, int]:
    """Nodes and GPUs of ``NODESxGPUS``, such as ``100x8``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]?)", text)
    if match is None or int(match[2]) > MAX_GPUS:
        raise ValueError(f"fleet {text!r}: write NODESxGPUS, such as 100x8, with at most {MAX_GPUS} GPUs")
    return int(match[1]), int(match[2])


class Tick(NamedTuple):
    """One node's tick at ``ts_ms``, the ``seq``-th of its run, with what the API server came to know since the one
    before (its times added to the start's)."""

    node: SimulatedNode
    seq: int
    ts_ms: int
    reading: Reading
    news: tuple[Known, ...]


def ticks(fleet: Fleet, start_ms: int, interval_ms: int, count: int) -> Iterator[Tick]:
    """``count`` ticks of every node, in the order of their times, for a fleet that starts at ``start_ms``. Nothing is
    waited for."""
    nodes = [fleet.node(index) for index in range(fleet.nodes)]
    order = sorted((fleet.phase_ms(index, interval_ms), index) for index in range(fleet.nodes))
    for number in range(count):
        for phase_ms, index in order:
            node, at_ms = nodes[index], number * interval_ms + phase_ms
            news = tuple(known._replace(at_ms=start_ms + known.at_ms) for known in node.news(at_ms, start_ms))
            yield Tick(node, number + 1, start_ms + at_ms, node.read(at_ms, start_ms), news)
