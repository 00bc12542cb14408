"""How right it is to call a GPU held and idle: the rule ``GPUHeldIdle``, and the query that is written for it.

    python -m tests.bench.idle [HOURS]

Both are scored by the same function on the same simulated fleet: pods that train, serve, work in bursts, start and load
their models, and notebooks that are left alone, come and go. The truth: at that time the pod has held the GPU for the
duration, and none of its processes has worked on it since. Each pod and GPU, each second, is a claim to be right about.
A query is given a scrape every 30 s, as Prometheus has it, of series with the labels that gpustream's own have; it
names whoever is in the labels, or nobody. Devices of MIG, of which the query knows no activity, are left out. No Kafka
is needed: the streams' own state machines are fed in memory.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from producers.simulated.fleet import Fleet
from streams.alerts import machine, tick
from streams.alerts.machine import LogPosition
from streams.alerts.memory import NodeAlerts
from streams.alerts.rules.rule import Rules
from streams.alerts.rules.rules_file import load
from tests.bench.score import joined
from tests.producers.simulated.fleet_ticks import Tick as SimulatedTick
from topics.attributed import AttributedSample

NODES, GPUS, POD_LIFE_S, HOURS = 8, 8, 3600, 4
SCRAPE_MS = 30_000
IDLE_BELOW = 0.01

Pod = tuple[str, str]
NOBODY: Pod = ("", "")
Claims = set[tuple[str, Pod]]
"""GPUs, each with the pod that is said to idle on it."""


class Score(NamedTuple):
    """Of all that was claimed, which share is true (precision), and of all that is true, which was claimed (recall)."""

    precision: float
    recall: float


@dataclass
class Counted:
    """Claims held against the truth."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    def count(self, claimed: Claims, true: Claims) -> None:
        """One node at one time."""
        self.right += len(claimed & true)
        self.wrong += len(claimed - true)
        self.missed += len(true - claimed)

    def score(self) -> Score:
        """Over all nodes and times."""
        claimed, true = self.right + self.wrong, self.right + self.missed
        return Score(self.right / claimed if claimed else 1.0, self.right / true if true else 1.0)


@dataclass
class Truth:
    """Since when each pod has held each GPU of a node without working on it."""

    for_ms: int
    _since: dict[tuple[str, Pod], int] = field(default_factory=dict)

    def see(self, tick: SimulatedTick) -> Claims:
        """What is true at a tick."""
        idle: set[tuple[str, Pod]] = set()
        for device, holders in zip(tick.reading.devices, tick.reading.holders, strict=True):
            working = {
                process["pod_uid"]
                for process in device["processes"]
                if process.get("sm_utilization_ratio", 0) >= IDLE_BELOW
            }
            if "gpu_utilization_ratio" in device["metrics"]:
                pods = {(h["namespace"], h["pod"]): h["pod_uid"] for h in holders}
                idle |= {(device["uuid"], pod) for pod, uid in pods.items() if uid not in working}
        self._since = {claim: self._since.get(claim, tick.ts_ms) for claim in idle}
        return {claim for claim, since_ms in self._since.items() if tick.ts_ms - since_ms >= self.for_ms}


@dataclass
class Stream:
    """What GPUHeldIdle claims of a node: the alerts of the stream that fire."""

    rules: Rules
    _state: NodeAlerts | None = None
    _firing: dict[str, tuple[str, Pod]] = field(default_factory=dict)

    def see(self, sample: AttributedSample) -> Claims:
        """What is claimed at a tick."""
        read = tick.decode(msgspec.json.encode(sample))
        position = LogPosition(read.offset, read.ts_ms)
        step = machine.step(self._state or machine.initial_state(read, position), read, position, self.rules)
        self._state = step.state
        for alert in step.alerts:
            labels = alert.labels
            if "gpu_mig_uuid" in labels:
                continue
            if alert.state == "firing":
                pod = labels["k8s_namespace_name"], labels["k8s_pod_name"]
                self._firing[alert.fingerprint] = (labels["gpu_uuid"], pod)
            else:
                del self._firing[alert.fingerprint]
        return set(self._firing.values())


@dataclass
class Query:
    """What ``avg_over_time(gpu_utilization[FOR]) < 0.01`` claims of a node; ``held``: of series that name a pod."""

    for_ms: int
    held: bool
    _series: dict[tuple[str, Pod], deque[tuple[int, float]]] = field(default_factory=dict)
    _scraped_ms: int = -1
    _claims: Claims = field(default_factory=set)

    def see(self, sample: AttributedSample) -> Claims:
        """What is claimed at a tick: what was at the last scrape."""
        if sample.ts_ms // SCRAPE_MS != self._scraped_ms:
            self._scraped_ms = sample.ts_ms // SCRAPE_MS
            self._scrape(sample)
        return self._claims

    def _scrape(self, sample: AttributedSample) -> None:
        for device in sample.devices:
            pods = {(holder.namespace, holder.pod) for holder in device.holders}
            value = device.metrics.get("gpu_utilization_ratio")
            if value is not None:
                key = device.uuid, (min(pods) if len(pods) == 1 else NOBODY)
                self._series.setdefault(key, deque()).append((sample.ts_ms, value))
        for points in self._series.values():
            while points and points[0][0] <= sample.ts_ms - self.for_ms:
                points.popleft()
        self._series = {key: points for key, points in self._series.items() if points}
        self._claims = {
            key
            for key, points in self._series.items()
            if sum(value for _, value in points) / len(points) < IDLE_BELOW and not (self.held and key[1] == NOBODY)
        }


def rules(for_ms: int, grace_ms: int) -> Rules:
    """GPUHeldIdle alone, with this duration, and ended by the first work."""
    (idle,) = load(None).of("held_idle")
    return Rules((msgspec.structs.replace(idle, for_ms=for_ms, grace_ms=grace_ms, keep_firing_ms=0),))


def scores(fleet: Fleet, ticks: int, for_ms: int, grace_ms: int) -> dict[str, Score]:
    """How right each is, over the ticks of a fleet."""
    in_force = rules(for_ms, grace_ms)
    query = f"avg_over_time(gpu_utilization{{}}[{for_ms // 60_000}m]) < {IDLE_BELOW}"
    claimants: dict[str, Callable[[], Stream | Query]] = {
        "GPUHeldIdle": lambda: Stream(in_force),
        query.replace("{}", ""): lambda: Query(for_ms, held=False),
        query.replace("{}", '{k8s_pod_name!=""}'): lambda: Query(for_ms, held=True),
    }
    counted = {name: Counted() for name in claimants}
    truths: dict[str, Truth] = {}
    nodes: dict[str, dict[str, Stream | Query]] = {}
    for fleet_tick, sample in joined(fleet, ticks):
        node = fleet_tick.node.name
        true = truths.setdefault(node, Truth(for_ms)).see(fleet_tick)
        for name, claimant in nodes.setdefault(node, {name: make() for name, make in claimants.items()}).items():
            counted[name].count(claimant.see(sample), true)
    return {name: contender.score() for name, contender in counted.items()}


def rows(scores_by_claimant: dict[str, Score]) -> Iterator[str]:
    """A table."""
    yield "| | precision | recall |"
    yield "|---|---|---|"
    for name, (precision, recall) in scores_by_claimant.items():
        yield f"| `{name}` | {precision:.1%} | {recall:.1%} |"


def main(hours: float) -> None:
    """Prints a row for each."""
    fleet = Fleet(NODES, GPUS, seed=7, pod_life_s=POD_LIFE_S)
    (idle,) = load(None).of("held_idle")
    scores_by_claimant = scores(fleet, int(hours * 3600), idle.for_ms, idle.grace_ms)
    sys.stdout.write("\n".join(rows(scores_by_claimant)) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else HOURS)
