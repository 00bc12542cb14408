"""The Parquet sink as processes that are killed, on a real Kafka: each key once, with the record that counts."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import msgspec
from aiokafka import AIOKafkaProducer

from tests.eventually import eventually_sync
from tests.real.pipeline import Gpustream, lag
from tests.real.servers import KafkaServer
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS, HOURS, Usage

PARTITIONS, GPUS, REVISIONS = 3, 40, 4
GROUP = "gpustream-sink-parquet"


def history() -> list[Usage]:
    """Three hours of a fleet as a stream writes them, some of them again by a replay."""
    records = [
        usage(
            holder, gpu_uuid=f"GPU-{gpu}", node=f"n{gpu % 8}", start_ms=START_MS + hour * HOUR_MS, revision=revision,
            device_ms=HOUR_MS // 2, used_us=revision, final=revision == REVISIONS,
        )
        for hour in range(3) for revision in range(1, REVISIONS + 1) for gpu in range(GPUS) for holder in ("ml", None)
    ]  # fmt: skip
    repeated = [
        msgspec.structs.replace(record, generation=1)
        for record in records
        if record.final and record.start_ms == START_MS + HOUR_MS
    ]
    return [*records, *repeated]


async def write(kafka: KafkaServer, records: Sequence[Usage]) -> None:
    """Writes records to the partition of their node."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all", enable_idempotence=True) as producer:
        for record in records:
            number = int(record.node[1:]) % PARTITIONS
            await producer.send(HOURS.name, msgspec.json.encode(record), key=record.key.encode(), partition=number)


def test_each_key_is_once_in_the_files_through_kills_of_both_workers(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream], tmp_path: Path
) -> None:
    empty_kafka.create_ours({HOURS.name: PARTITIONS, "gpu.dead-letters": 1})
    path, records, chance = tmp_path / "usage", history(), random.Random(1)
    arguments = ("sink", "parquet", "--kafka", empty_kafka.address, "--path", str(path), "--write-every", "50ms")
    workers = [gpustream(name, *arguments, "--instance-id", name) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    for begin in range(0, len(records), 150):
        asyncio.run(write(empty_kafka, records[begin : begin + 150]))
        time.sleep(chance.random() / 4)  # a kill at any moment of reading, writing, renaming and committing
        if begin % 450 == 0:
            killed = chance.choice(workers)
            killed.kill9()
            killed.start()
    eventually_sync(lambda: asyncio.run(lag(empty_kafka.address, GROUP, [HOURS.name])) == 0)
    for worker in workers:
        worker.stop()

    counting: dict[tuple[object, ...], tuple[int, ...]] = {}
    for record in records:
        key = record.node, record.uuid, record.start_ms, record.category
        counting[key] = max(counting.get(key, ()), (record.generation, record.revision, record.used_us))
    rows = duckdb.execute(
        "SELECT node, uuid, start_ms, category, generation, revision, used_us FROM read_parquet(?)",
        [f"{path}/date=*/*.parquet"],
    ).fetchall()
    assert len(rows) == len(counting)
    assert {row[:4]: row[4:] for row in rows} == counting
