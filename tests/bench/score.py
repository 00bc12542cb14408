"""How many ticks are given to whoever held the device when it was read: this join, and a scrape every 30 s.

Both are scored by the same function on the same fleet. The scrape takes the latest value with the holder at scrape
time, so that every tick since the scrape before is booked to that holder. No Kafka is needed: the join is the stream's
own, fed in memory.

The join is scored twice: with a kubelet that is only asked at each tick, and with one that serves both its sockets, its
pod resources and its Pods API, to the node producer's own client. What it answers lags by up to 1.9 s in both cases.
What it pushes comes within 0.2 s.

    python -m tests.bench.score
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.kubelet import Kubelet
from producers.simulated.fleet import Fleet, KnownPods
from producers.simulated.pods import SimulatedPod
from producers.simulated.schedule import Schedule
from streams.attribution import join
from tests.eventually import eventually
from tests.producers.fakes import value
from tests.producers.node.pod_resources import Server, answer, container, pod, serving
from tests.producers.node.pods_server import PodsServer, pushed_pod, pushing
from tests.producers.simulated.fleet_ticks import Tick, ticks
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.workloads import NodeWorkloads

START_MS = 1_795_219_152_000
SCRAPE_S = 30
POD_LIVES_S = (30, 120, 600)
NODES, GPUS = 20, 8
PUSHED_WITHIN_MS = 200

Holders = frozenset[tuple[str, str]]


class Reading(NamedTuple):
    """One device at one time: who held it, and who the kubelet's answer in force says."""

    device: str
    ts_ms: int
    held: Holders
    reported: Holders


Containers = Callable[[Tick], list[dict[str, Any]]]


def listed(tick: Tick) -> list[dict[str, Any]]:
    """The containers that the kubelet's pod resources name."""
    return tick.reading.containers


def main() -> None:
    """Prints a row for each mean life of a pod."""
    sys.stdout.write("| mean life of a pod | readings | this join, with the Pods API | without | scrape every 30 s |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for life_s in POD_LIVES_S:
        polled, readings = attributed_score(life_s)
        watched, _ = attributed_score(life_s, asyncio.run(scripted(life_s)))
        scrape_score = score(list(scraped(readings)))
        sys.stdout.write(f"| {life_s} s | {len(readings)} | {watched:.2%} | {polled:.2%} | {scrape_score:.2%} |\n")


def score(pairs: list[tuple[Reading, Holders]]) -> float:
    """The share of readings that were given to exactly the pods that held the device at that instant."""
    return sum(reading.held == holders for reading, holders in pairs) / len(pairs)


def attributed_score(
    life_s: int, containers: Containers = listed, nodes: int = NODES, seconds: int | None = None
) -> tuple[float, list[Reading]]:
    """The join's score, and the readings, of a fleet whose nodes find what ``containers`` gives of a tick."""
    fleet = Fleet(nodes, GPUS, seed=7, pod_life_s=life_s)
    attributed_to: dict[tuple[str, int], Holders] = {}
    readings: list[Reading] = []
    for tick, sample in joined(fleet, seconds or read_for(life_s), containers):
        readings += _readings(tick)
        attributed_to.update(_attributed_holders(sample))
    return score([(reading, attributed_to[reading.device, reading.ts_ms]) for reading in readings]), readings


def read_for(life_s: int) -> int:
    """For how many seconds a fleet is read whose pods live so long on average."""
    return max(600, 3 * life_s)


def joined(
    fleet: Fleet, count: int, containers: Containers = listed, step_s: int = 1
) -> Iterator[tuple[Tick, AttributedSample]]:
    """The fleet's ticks, so many seconds apart, and what the join makes of each with all that its producers say."""
    states: dict[str, join.NodeState] = {}
    snapshots: dict[str, tuple[int, list[dict[str, Any]]]] = {}
    waiting: dict[tuple[str, int], Tick] = {}
    for tick in ticks(fleet, START_MS, step_s * 1000, count):
        name, now_s = tick.node.name, tick.ts_ms / 1000
        waiting[name, tick.seq] = tick
        seq, content = snapshots.get(name, (0, []))
        records: list[join.Record] = [join.LoggedWorkloads(_workloads(tick, news), news.at_ms) for news in tick.news]
        if not seq or content != containers(tick):
            seq, content = seq + 1, containers(tick)
            snapshots[name] = seq, content
            records.append(_snapshot(tick, seq, content))
        sample = join.PendingTick(_sample(tick, seq), tick.seq, now_s, tick.ts_ms, tick.ts_ms)
        for record in (*records, join.WatermarkRaised(tick.ts_ms), sample):
            states[name], out = join.step(states.get(name, join.NEW), record, 10.0)
            yield from ((waiting.pop((name, pending.sample.seq)), pending.sample) for pending in out)
        states[name], _ = join.step(states[name], join.Committed(tick.seq - len(states[name].pending)), 10.0)


# -- a kubelet with both its sockets


class Change(NamedTuple):
    """A pod begins or ends; the kubelet pushes that at ``at_ms`` since the fleet's start."""

    at_ms: int
    pod: SimulatedPod
    begins: bool


async def scripted(life_s: int, nodes: int = NODES, seconds: int | None = None) -> Containers:
    """What the node producer's client finds at each tick of a fleet whose kubelets serve both sockets."""
    fleet = Fleet(nodes, GPUS, seed=7, pod_life_s=life_s)
    read: dict[str, list[Tick]] = {}
    for tick in ticks(fleet, START_MS, 1000, seconds or read_for(life_s)):
        read.setdefault(tick.node.name, []).append(tick)
    rows_of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for index in range(nodes):
        name = fleet.node(index).name
        schedule = Schedule(fleet.cluster, fleet.seed, index, fleet.node(index).machine, life_s * 1000)
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder, "kubelet.sock")) as resources,
            pushing(Path(folder, "pods.sock")) as pods,
        ):
            rows = await _kubelet_rows(read[name], schedule, resources, pods)
        rows_of.update({(name, tick.ts_ms): held for tick, held in zip(read[name], rows, strict=True)})
    return lambda tick: rows_of[tick.node.name, tick.ts_ms]


async def _kubelet_rows(
    node_ticks: Sequence[Tick], schedule: Schedule, resources: Server, pods: PodsServer
) -> list[list[dict[str, Any]]]:
    """What a client of one node finds at each of its ticks."""
    instruments, rows_by_tick = Instruments(names.INSTRUMENTS), list[list[dict[str, Any]]]()
    kubelet = Kubelet(resources.path, instruments, pods_socket=pods.path, deadline_s=60.0)
    following = asyncio.create_task(kubelet.run())
    await eventually(lambda: value(instruments, names.PODS_WATCHED) == 1)
    coming: list[Change] = []
    sent = {"added": 0, "modified": 0}
    for tick in node_ticks:
        at_ms = tick.ts_ms - START_MS
        for life in schedule.advance(at_ms):
            late_ms = int(PUSHED_WITHIN_MS * life.seed)
            coming += [Change(life.start_ms + late_ms, life, True), Change(life.end_ms + late_ms, life, False)]
        coming.sort(key=lambda change: (change.at_ms, change.begins))
        while coming and coming[0].at_ms <= at_ms:
            change = coming.pop(0)
            sent["added" if change.begins else "modified"] += 1
            pods.push(_pushed(change))
        resources.reply = _listed(tick)
        await eventually(lambda: all(value(instruments, names.POD_EVENTS, type=kind) == n for kind, n in sent.items()))
        rows_by_tick.append([dict(row) for row in await kubelet.read(60.0) or ()])
    following.cancel()
    await asyncio.wait([following])
    await kubelet.close()
    return rows_by_tick


def _pushed(change: Change) -> Any:
    devices = {row["container"]: {row["resource"]: row["device_ids"]} for row in change.pod.allocated}
    phase = "Running" if change.begins else "Succeeded"
    return pushed_pod(change.pod.name, change.pod.uid, namespace=change.pod.namespace, phase=phase, devices=devices)


def _listed(tick: Tick) -> bytes:
    return answer(
        *(
            pod(
                row["pod"],
                container(row["container"], **{row["resource"]: row["device_ids"]}),
                namespace=row["namespace"],
            )
            for row in tick.reading.containers
        )
    )


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
    for device, holders, reported in zip(r.devices, r.holders, r.reported, strict=True):
        yield Reading(device["uuid"], tick.ts_ms, _pods(holders), _pods(reported))


def _pods(holders: tuple[dict[str, object], ...]) -> Holders:
    return frozenset((str(holder["namespace"]), str(holder["pod"])) for holder in holders)


def _attributed_holders(sample: AttributedSample) -> Iterator[tuple[tuple[str, int], Holders]]:
    for device in sample.devices:
        yield (device.uuid, sample.ts_ms), frozenset((h.namespace, h.pod) for h in device.holders)


def _snapshot(tick: Tick, seq: int, containers: list[dict[str, Any]]) -> Allocations:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": START_MS, "ts_ms": tick.ts_ms}
    return msgspec.convert({**fields, "seq": seq, "containers": containers}, Allocations)


def _workloads(tick: Tick, news: KnownPods) -> NodeWorkloads:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "epoch": START_MS}
    fields["seq"] = news.at_ms - START_MS + 1  # a tick may have several
    return msgspec.convert({**fields, "ts_ms": news.at_ms, "pods": news.pods}, NodeWorkloads)


def _sample(tick: Tick, allocations_seq: int) -> Sample:
    fields = {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": START_MS, "ts_ms": tick.ts_ms}
    devices = {"devices": tick.reading.devices, "allocations_seq": allocations_seq, "seq": tick.seq}
    return msgspec.convert({**fields, **devices}, Sample)


if __name__ == "__main__":
    main()
