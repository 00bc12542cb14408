"""``gpustream replay --into``: what was attributed live is attributed again, byte for byte, into topics of a prefix."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from gpustream.reattribution import ReattributionTotals, reattribute
from gpustream.usage.read import Range
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.pipeline import lag, read_all, running
from tests.real.servers import KafkaServer
from topics import samples

INTO = "again."
TICKS = 20


async def attribute_again(
    kafka: KafkaServer, *, to_ms: int | None = None, from_ms: int = 0, into: str = INTO
) -> ReattributionTotals:
    """Attributes all samples again, or those that were logged in a range of time."""
    return await reattribute(kafka.connection, into, Range(from_ms, to_ms or int(time.time() * 1000) + 60_000))


async def by_partition(kafka: KafkaServer, topic: str) -> dict[int, list[tuple[int, bytes, bytes]]]:
    """Key and value of each record, by partition, in the order of the samples' offsets."""
    rows_of: dict[int, list[tuple[int, bytes, bytes]]] = {}
    for record in await read_all(kafka.address, topic):
        offset = json.loads(record.value)["offset"]
        rows_of.setdefault(record.partition, []).append((offset, record.key, record.value))
    return {partition: sorted(rows) for partition, rows in rows_of.items()}


async def test_what_was_attributed_live_is_attributed_again_byte_for_byte(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    kafka = empty_kafka
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    settings = SimulatedSettings(
        kafka=kafka.address,
        fleet="6x4",
        interval_s=0.1,
        pod_life_s=3.0,
        stop_after_ticks=TICKS,
        truth=tmp_path / "truth.jsonl",
    )
    async with running(Attribution(AttributionSettings(kafka=kafka.address))):
        await SimulatedFleet(settings).run(asyncio.Event())

        async def all_is_attributed() -> bool:
            return not await lag(kafka.address, "gpustream-attribution", ["gpu.samples"])

        await eventually(all_is_attributed)
    with pytest.raises(BrokerError, match=r"no topic again\.gpu\.samples .*--topic-prefix again\."):
        await attribute_again(kafka)
    target = Connection(kafka.address, topic_prefix=INTO)
    await topic_admin.create(target, partitions=2, replication_factor=1)

    live = await by_partition(kafka, "gpu.attributed")
    logged_ms = sorted(record.timestamp for record in await read_all(kafka.address, "gpu.samples"))
    half = await attribute_again(kafka, to_ms=logged_ms[len(logged_ms) // 2])  # as if it had been killed then
    assert 0 < half.exact < 6 * TICKS
    without_ticks = {"schema": 1, "cluster": "default", "node": "n", "epoch": 1, "seq": 1, "ts_ms": 1}
    await _write(kafka, "gpu.workloads", (b"default/n", json.dumps(without_ticks).encode()))
    counts = await attribute_again(kafka)
    assert counts.nodes == 6
    assert (counts.existing, counts.exact, counts.late, counts.none) == (half.exact, 6 * TICKS - half.exact, 0, 0)
    live_records = await read_all(kafka.address, f"{INTO}gpu.attributed")
    assert await by_partition(kafka, f"{INTO}gpu.attributed") == live
    for partition in live:
        offsets = [json.loads(record.value)["offset"] for record in live_records if record.partition == partition]
        assert offsets == sorted(set(offsets))

    arguments = ("-m", "gpustream", "replay", "--kafka", kafka.address, "--from", "1h", "--into", INTO)
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "0 ticks of " in ran.stdout
    assert len(await read_all(kafka.address, f"{INTO}gpu.attributed")) == len(live_records)

    stray = (await read_all(kafka.address, "gpu.samples"))[0]
    await _write(kafka, f"{INTO}gpu.samples", (stray.key, stray.value))
    with pytest.raises(BrokerError, match="is a pipeline of its own"):
        await attribute_again(kafka)


async def _write(kafka: KafkaServer, topic: str, *rows: tuple[bytes, bytes]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for key, value in rows:
            await producer.send_and_wait(topic, value, key)


async def _write_later(kafka: KafkaServer, row: tuple[bytes, bytes]) -> None:
    """Writes a sample whose log time is none of those before it."""
    written_ms = time.time_ns() // 1_000_000
    await eventually(lambda: time.time_ns() // 1_000_000 > written_ms)
    await _write(kafka, "gpu.samples", row)


async def test_what_the_target_can_not_take_is_refused_and_what_is_no_sample_is_counted(
    empty_kafka: KafkaServer,
) -> None:
    kafka = empty_kafka
    sample = {**samples.TOPIC.example, "cluster": "c", "node": "n", "allocations_seq": None, "devices": []}
    rows = [json.dumps({**sample, "seq": seq}).encode() for seq in (1, 2, 3)]
    await topic_admin.create(kafka.connection, partitions=1, replication_factor=1)
    for name, count in ((INTO, 2), ("once-more.", 1)):
        target = Connection(kafka.address, topic_prefix=name)
        await topic_admin.create(target, partitions=count, replication_factor=1)
    await _write(kafka, "gpu.samples", *((b"c/n", row) for row in (b"{", *rows[:-1])))
    await _write_later(kafka, (b"c/n", rows[-1]))
    with pytest.raises(BrokerError, match=r"has 2 partitions, and gpu\.samples has 1"):
        await attribute_again(kafka)

    first, *_, last = [record.timestamp for record in await read_all(kafka.address, "gpu.samples")]
    counts = await attribute_again(kafka, from_ms=last, into="once-more.")
    assert counts.none == sum(record.timestamp >= last for record in await read_all(kafka.address, "gpu.samples"))
    with pytest.raises(BrokerError, match=r"begins with a later sample .*another prefix"):
        await attribute_again(kafka, from_ms=first, into="once-more.")

    for _ in range(2):
        await _write_later(kafka, (b"c/n", rows[-1]))
    before, after = [record.timestamp for record in await read_all(kafka.address, "gpu.samples")][-2:]
    with pytest.raises(BrokerError, match=r"ends with an earlier sample .*would be missing"):
        await attribute_again(kafka, from_ms=after, into="once-more.")
    assert (await attribute_again(kafka, from_ms=before, into="once-more.")).none == 2
