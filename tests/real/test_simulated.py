"""A simulated fleet through a broker's outages: nothing is lost that fits the buffer, and the order holds."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delivery import topic_admin
from producers import publisher as names
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from tests.eventually import eventually
from tests.real.pipeline import read_all
from tests.real.servers import KafkaServer

OUTAGE_S = 6.0


async def _through_an_outage(kafka: KafkaServer, component: SimulatedFleet, *, half_open: bool) -> None:
    """Run the fleet for some seconds around an outage, and stop it."""
    stop = asyncio.Event()
    running = asyncio.create_task(component.run(stop))
    await asyncio.sleep(3)
    await asyncio.to_thread(kafka.sigstop if half_open else kafka.kill9)
    await asyncio.sleep(OUTAGE_S)
    await asyncio.to_thread(kafka.sigcont if half_open else kafka.start)
    await eventually(lambda: (component.registry.get_sample_value(names.HELD) or 0) <= 100)
    stop.set()
    await running


@pytest.mark.parametrize("half_open", [False, True], ids=["killed", "paused"])
async def test_an_outage_loses_no_tick_and_no_snapshot_comes_after_a_sample_that_names_it(
    start_kafka: Callable[..., KafkaServer], tmp_path: Path, half_open: bool
) -> None:
    kafka, truth = start_kafka(), tmp_path / "truth.jsonl"
    await topic_admin.create(kafka.connection, partitions=4, replication_factor=1)
    component = SimulatedFleet(
        SimulatedSettings(kafka=kafka.address, fleet="6x2", interval_s=0.25, pod_life_s=2.0, truth=truth)
    )
    await _through_an_outage(kafka, component, half_open=half_open)
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
