"""A simulated fleet through a broker's outages: nothing is lost that fits the buffer, and the order holds."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delivery import topic_admin
from producers import publisher as names
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from tests.eventually import eventually
from tests.real.pipeline import read_all
from tests.real.servers import KafkaServer

OUTAGE_S = 6.0


async def _through_outages(kafka: KafkaServer, component: SimulatedFleet) -> None:
    """Run the fleet for some seconds around two outages, in which Kafka is killed and paused, and stop it."""
    stop = asyncio.Event()
    running = asyncio.create_task(component.run(stop))
    for begin, end in ((kafka.kill9, kafka.start), (kafka.sigstop, kafka.sigcont)):
        await asyncio.sleep(3)
        await asyncio.to_thread(begin)
        await asyncio.sleep(OUTAGE_S)
        await asyncio.to_thread(end)
        await eventually(lambda: (component.registry.get_sample_value(names.HELD) or 0) <= 100)
    stop.set()
    await running


async def test_an_outage_loses_no_tick_and_no_snapshot_comes_after_a_sample_that_names_it(
    start_kafka: Callable[..., KafkaServer], tmp_path: Path
) -> None:
    kafka, truth = start_kafka(), tmp_path / "truth.jsonl"
    await topic_admin.create(kafka.connection, partitions=4, replication_factor=1)
    component = SimulatedFleet(
        SimulatedSettings(kafka=kafka.address, fleet="6x2", interval_s=0.25, pod_life_s=2.0, truth=truth)
    )
    await _through_outages(kafka, component)
    records = {topic: await read_all(kafka.address, topic) for topic in ("gpu.samples", "gpu.allocations")}
    ticks = _by_node(records["gpu.samples"])
    first_ms: dict[tuple[str, int], int] = {}
    for record in records["gpu.allocations"]:
        first_ms.setdefault(_named(json.loads(record.value), "seq"), record.timestamp)

    true_ticks = {(row["node"], row["seq"]) for row in map(json.loads, truth.read_text().splitlines())}
    assert {(node, tick["seq"]) for node, rows in ticks.items() for _, tick in rows} == true_ticks
    assert len(records["gpu.samples"]) == len(true_ticks) > 6 * 20
    for rows in ticks.values():
        assert [tick["seq"] for _, tick in rows] == list(range(1, len(rows) + 1))
        assert all(first_ms[_named(tick, "allocations_seq")] <= at_ms for at_ms, tick in rows)
    assert len(first_ms) > 30


def _named(record: dict[str, Any], field: str) -> tuple[str, int]:
    return record["node"], record[field]


def _by_node(records: list[Any]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """The ticks of each node in the order of its partition, with the time at which the broker took them."""
    ticks_by_node: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        tick = json.loads(record.value)
        ticks_by_node.setdefault(tick["node"], []).append((record.timestamp, tick))
    return ticks_by_node
