"""Fleet -> Kafka -> attribution -> Kafka, and every record of the answer held against the truth."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from tests.real.pipeline import Gpustream, Truth, read_all
from tests.real.servers import KafkaServer
from topics import broker

FLEET_S = 20.0


async def test_every_tick_is_attributed_once_to_the_holders_that_the_kubelet_reported(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream], tmp_path: Path
) -> None:
    kafka, truth_file = empty_kafka.address, tmp_path / "truth.jsonl"
    await broker.create(kafka, partitions=4, replication_factor=1)
    stream = gpustream("stream", "stream", "attribution", "--kafka", kafka)
    fleet = gpustream(
        "fleet", "produce", "simulated", "--kafka", kafka, "--cluster", "exact",
        "--fleet", "20x8", "--seed", "3", "--truth", str(truth_file),
    )  # fmt: skip
    await asyncio.to_thread(fleet.start)
    await asyncio.to_thread(stream.start)
    await asyncio.sleep(FLEET_S)
    await asyncio.to_thread(fleet.stop)
    truth = Truth.read(truth_file)
    found = {}
    for _ in range(20):
        records = await read_all(kafka, "gpu.attributed")
        found = {
            (t["cluster"], t["node"], t["run_id"], t["seq"]): t for t in map(json.loads, (r.value for r in records))
        }
        if found.keys() >= truth.ticks:
            break
        await asyncio.sleep(1)
    await asyncio.to_thread(stream.stop)

    assert fleet.returncode == 0, fleet.log_tail()
    assert stream.returncode == 0, stream.log_tail()
    assert found.keys() == truth.ticks
    assert len(records) == len(found)
    assert {tick["attribution"] for tick in found.values()} == {"exact"}
    for point, expected in truth.readings.items():
        tick = found[truth.of_tick[point]]
        device = next(d for d in tick["devices"] if d["uuid"] == point[2])
        holders = {(h["namespace"], h["pod"], h["container"]) for h in device.get("holders", [])}
        assert holders == expected.containers, point
    assert sum(len(expected.holders) for expected in truth.readings.values()) > len(truth.readings) / 4
