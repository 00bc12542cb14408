"""How many ticks are given to whoever held the device when it was read: this join, and a scrape every 30 s.

Both are scored by the same function on the same fleet. The scrape takes the latest value with the holder at scrape
time, so that every tick since the scrape before is booked to that holder. No Kafka is needed: the join is the stream's
own, fed in memory.

    python -m tests.bench.score
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from producers.simulated.fleet import Fleet, KnownPods
from streams.attribution import join
from tests.producers.simulated.made import Tick, ticks
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.workloads import NodeWorkloads

START_MS = 1_795_219_152_000
SCRAPE_S = 30
POD_LIVES_S = (30, 120, 600)
NODES, GPUS = 20, 8

Holders = frozenset[tuple[str, str]]


class Reading(NamedTuple):
    """One device at one time: who held it, and who the kubelet's answer in force says."""

    device: str
    ts_ms: int
    held: Holders
    reported: Holders


def main() -> None:
    """Prints a row for each mean life of a pod."""
    sys.stdout.write("| mean life of a pod | ticks of devices | this join | scrape every 30 s |\n|---|---|---|---|\n")
    for life_s in POD_LIVES_S:
        joined, readings = attributed(life_s)
        ours = score([(reading, joined[reading.device, reading.ts_ms]) for reading in readings])
        theirs = score(list(scraped(readings)))
        sys.stdout.write(f"| {life_s} s | {len(readings)} | {ours:.2%} | {theirs:.2%} |\n")


def score(given: list[tuple[Reading, Holders]]) -> float:
    """The share of readings that were given to exactly the pods that held the device at that instant."""
    return sum(reading.held == holders for reading, holders in given) / len(given)


def attributed(life_s: int) -> tuple[dict[tuple[str, int], Holders], list[Reading]]:
    """The join's answer for every device and time, and the truth about them."""
    fleet = Fleet(NODES, GPUS, seed=7, pod_life_s=life_s)
    given: dict[tuple[str, int], Holders] = {}
    readings: list[Reading] = []
    for tick, sample in joined(fleet, max(600, 3 * life_s)):
        readings += _readings(tick)
        given.update(_given(sample))
    return given, readings


def joined(fleet: Fleet, count: int) -> Iterator[tuple[Tick, AttributedSample]]:
    """The fleet's ticks, a second apart, and what the join makes of each with all that the fleet's producers say."""
    states: dict[str, join.NodeState] = {}
    snapshots: dict[str, tuple[int, list[dict[str, Any]]]] = {}
    waiting: dict[tuple[str, int], Tick] = {}
    for tick in ticks(fleet, START_MS, 1000, count):
        name, now_s = tick.node.name, tick.ts_ms / 1000
        waiting[name, tick.seq] = tick
        seq, content = snapshots.get(name, (0, []))
        records: list[join.Record] = [join.LoggedWorkloads(_workloads(tick, news), news.at_ms) for news in tick.news]
        if not seq or content != tick.reading.containers:
            seq += 1
            snapshots[name] = seq, tick.reading.containers
            records.append(_snapshot(tick, seq))
        sample = join.PendingTick(_sample(tick, seq), tick.seq, now_s, tick.ts_ms, tick.ts_ms)
        for record in (*records, join.WatermarkRaised(tick.ts_ms), sample):
            states[name], out = join.step(states.get(name, join.NEW), record, 10.0)
            yield from ((waiting.pop((name, one.sample.seq)), one.sample) for one in out)
        states[name], _ = join.step(states[name], join.Committed(tick.seq - len(states[name].pending)), 10.0)


def scraped(readings: list[Reading]) -> Iterator[tuple[Reading, Holders]]:
    """Each reading with the holder that the next scrape shows."""
    every_ms = SCRAPE_S * 1000
    at_scrape: dict[tuple[str, int], Holders] = {}
    for reading in readings:
        at_scrape[reading.device, reading.ts_ms // every_ms] = reading.reported
    for reading in readings:
        yield reading, at_scrape[reading.device, reading.ts_ms // every_ms]


def _readings(tick: Tick) -> Iterator[Reading]:
    r = tick.reading
    for device, held, reported in zip(r.devices, r.holders, r.reported, strict=True):
        yield Reading(device["uuid"], tick.ts_ms, _pods(held), _pods(reported))


def _pods(holders: tuple[dict[str, object], ...]) -> Holders:
    return frozenset((str(holder["namespace"]), str(holder["pod"])) for holder in holders)


def _given(sample: AttributedSample) -> Iterator[tuple[tuple[str, int], Holders]]:
    for device in sample.devices:
        yield (device.uuid, sample.ts_ms), frozenset((h.namespace, h.pod) for h in device.holders)


def _snapshot(tick: Tick, seq: int) -> Allocations:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": START_MS, "ts_ms": tick.ts_ms}
    return msgspec.convert({**fields, "seq": seq, "containers": tick.reading.containers}, Allocations)


def _workloads(tick: Tick, news: KnownPods) -> NodeWorkloads:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "epoch": START_MS, "seq": tick.seq}
    return msgspec.convert({**fields, "ts_ms": news.at_ms, "pods": news.pods}, NodeWorkloads)


def _sample(tick: Tick, allocations_seq: int) -> Sample:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": START_MS, "ts_ms": tick.ts_ms}
    devices = {"devices": tick.reading.devices, "allocations_seq": allocations_seq, "seq": tick.seq}
    return msgspec.convert({**fields, **devices}, Sample)


if __name__ == "__main__":
    main()
