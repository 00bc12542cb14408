"""A topic deleted and created again under a live pipeline: what its new log has arrives everywhere, by identity."""

import asyncio
import json
import time
from typing import Any, NamedTuple

import pytest

from delivery import topic_admin
from gpustream.pipeline import Tail
from gpustream.ticks import Tick as ReadTick
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from sinks.outcomes import Outcome
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.pipeline import Tick, read_all, running
from tests.real.servers import ASK_TIMEOUT_S, KafkaServer

PARTITIONS = 2
NODES = 3
ENOUGH = 60
"""Ticks that are waited for before, and after."""


class Pipeline(NamedTuple):
    """A fleet, its attribution and a sink, the outcomes of the sink, and the failures."""

    fleet: SimulatedFleet
    attribution: Attribution
    scrape: ScrapeSink
    delivered: list[Tick]
    failures: list[str]


def pipeline(kafka: str, grace_s: float = 0.5) -> Pipeline:
    """The components, not started. Pods are short-lived, so that new snapshots come all the time."""
    delivered: list[Tick] = []
    failures: list[str] = []

    def note_outcome(cluster: str, node: str, run_id: int, seq: int, outcome: Outcome) -> None:
        if outcome == "delivered":
            delivered.append((cluster, node, run_id, seq))

    fleet = SimulatedSettings(kafka=kafka, fleet=f"{NODES}x2", interval_s=0.1, pod_life_s=2.0)
    scrape = ScrapeSettings(kafka=kafka, scrape_listen=None, from_="earliest")
    return Pipeline(
        SimulatedFleet(fleet),
        Attribution(AttributionSettings(kafka=kafka, grace_s=grace_s), fail=failures.append),
        ScrapeSink(scrape, note_outcome),
        delivered,
        failures,
    )


def recreate(kafka: KafkaServer, topic: str, after_s: float = 0.0) -> None:
    """Delete a topic, and create it again as it was, some time later."""
    admin = kafka.admin()  # a client that nothing refers to gives up what it was asked
    for future in admin.delete_topics([topic], operation_timeout=ASK_TIMEOUT_S).values():
        future.result(ASK_TIMEOUT_S)
    kafka.wait_until(lambda: topic not in kafka.topics())
    time.sleep(after_s)
    kafka.create_ours({topic: PARTITIONS})


async def records(kafka: KafkaServer, topic: str) -> dict[Tick, dict[str, Any]]:
    """The records of a topic, by identity."""
    ticks = [json.loads(record.value) for record in await read_all(kafka.address, topic)]
    return {(tick["cluster"], tick["node"], tick["run_id"], tick["seq"]): tick for tick in ticks}


@pytest.mark.parametrize("topic", ["gpu.samples", "gpu.allocations", "gpu.workloads", "gpu.attributed"])
async def test_what_the_new_log_has_arrives_everywhere_once(empty_kafka: KafkaServer, topic: str) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=PARTITIONS, replication_factor=1)
    # a busy machine may be long in finding the new log: the samples that name its snapshots wait for that
    process = pipeline(empty_kafka.address, grace_s=30.0 if topic == "gpu.allocations" else 0.5)
    async with running(process.attribution, process.scrape):
        async with running(process.fleet):
            await eventually(lambda: len(process.delivered) >= ENOUGH)
            await asyncio.to_thread(recreate, empty_kafka, topic)
            before = len(process.delivered)
            await eventually(lambda: len(process.delivered) >= before + ENOUGH)
            await eventually(lambda: records(empty_kafka, "gpu.allocations"), every_s=0.5)
        samples = await records(empty_kafka, "gpu.samples")
        last = {node: (cluster, node, run_id, seq) for cluster, node, run_id, seq in sorted(samples)}.values()
        await eventually(lambda: set(last) <= set(process.delivered))
        attributed = await records(empty_kafka, "gpu.attributed")
        snapshots = await records(empty_kafka, "gpu.allocations")

    expected = samples.keys() & attributed.keys() if topic == "gpu.attributed" else samples.keys()
    assert process.failures == []
    assert len(expected) >= ENOUGH // 2
    assert expected <= attributed.keys() & set(process.delivered)
    assert len(process.delivered) == len(set(process.delivered))
    named = {tick: (*tick[:3], sample["allocations_seq"]) for tick, sample in samples.items() if tick in attributed}
    exact = {tick for tick in named if attributed[tick]["attribution"] == "exact"}
    assert exact >= {tick for tick, snapshot in named.items() if snapshot in snapshots}
    assert exact >= set(last) or topic == "gpu.allocations"  # a snapshot that was deleted is sent again in 5 minutes


async def test_a_stream_that_was_stopped_meanwhile_reads_the_new_log_from_its_beginning(
    empty_kafka: KafkaServer,
) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=PARTITIONS, replication_factor=1)
    first_stream = pipeline(empty_kafka.address)
    async with running(first_stream.attribution, first_stream.scrape, first_stream.fleet):
        await eventually(lambda: len(first_stream.delivered) >= ENOUGH)
    await asyncio.to_thread(recreate, empty_kafka, "gpu.samples")
    successor = pipeline(empty_kafka.address)  # now: runs that begin in one millisecond have one number
    async with running(successor.fleet):
        await eventually(lambda: sum(seq for *_, seq in successor.fleet.sampled()) >= 3 * ENOUGH)
    samples = await records(empty_kafka, "gpu.samples")
    assert len(samples) >= 3 * ENOUGH
    async with running(successor.attribution, successor.scrape):
        await eventually(lambda: samples.keys() <= set(successor.delivered))
    assert first_stream.failures == successor.failures == []


async def test_a_run_sees_every_tick_of_the_new_log(empty_kafka: KafkaServer) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=PARTITIONS, replication_factor=1)
    process, seen = pipeline(empty_kafka.address), list[Tick]()

    def see(tick: ReadTick) -> None:
        seen.append((tick.cluster, tick.node, tick.run_id, tick.seq))

    async def are_all_seen() -> bool:
        ticks = await records(empty_kafka, "gpu.attributed")
        return len(ticks) >= ENOUGH and ticks.keys() <= set(seen)

    tail = Tail(empty_kafka.connection, see, lambda _: None, lambda _: None)
    await tail.start()
    reading = asyncio.create_task(tail.run())
    try:
        async with running(process.attribution, process.fleet):
            await eventually(lambda: len(seen) >= ENOUGH, unless=reading)
            await asyncio.to_thread(recreate, empty_kafka, "gpu.attributed", after_s=2.0)  # clients notice it meanwhile
            begun = len(seen)
            await eventually(lambda: len(seen) >= begun + ENOUGH, within_s=120, unless=reading)
        await eventually(are_all_seen, every_s=0.5)
    finally:
        reading.cancel()
        await tail.stop()
    assert len(seen) == len(set(seen))
