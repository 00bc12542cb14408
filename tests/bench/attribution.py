"""The log of a simulated fleet for the attribution stream, and the CPU time of those who read it.

8 whole GPUs a node of up to 27 values each (15 where a GPU is cut up by MIG), and pods that change.
"""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer

from delivery import clients, kafka_admin
from delivery.connection import Connection
from producers.simulated.fleet import Fleet
from tests.producers.simulated.fleet_ticks import Tick, ticks
from topics.topic import node_key
from topics.usage import HOUR_MS

GPUS, VALUES = 8, 27
LOGGED_AFTER_MS = {"gpu.samples": 60, "gpu.allocations": 40, "gpu.workloads": 300}
"""How long after its time the broker logs a record."""


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def produce(kafka: Connection, count: int, nodes: int) -> None:
    """Writes the log of a fleet, at any pace, with the log times of a fleet that is followed: a tick is joined with
    what was logged 2 s before it, and in a log of minutes that is written in seconds each tick would lack pods."""
    await set_timestamp_type(kafka, "CreateTime")
    producer = clients.producer(kafka, max_batch_size=512 * 1024, linger_ms=20)
    await producer.start()
    async for topic, key, value in records(count, nodes):
        logged_ms = orjson.loads(value)["ts_ms"] + LOGGED_AFTER_MS[topic]
        await producer.send(kafka.prefixed(topic), value, key=key, timestamp_ms=logged_ms)
    await producer.stop()
    await set_timestamp_type(kafka, "LogAppendTime")


async def set_timestamp_type(kafka: Connection, timestamp_type: str) -> None:
    """Whose time a record of these topics has: the producer's or the broker's."""
    async with kafka_admin.connect(kafka) as admin:
        for topic in LOGGED_AFTER_MS:
            await admin.alter(kafka.prefixed(topic), {"message.timestamp.type": timestamp_type})


async def records(count: int, nodes: int) -> AsyncIterator[tuple[str, bytes, bytes]]:
    """Topic, key and value of what the fleet's producers would send, from the last full hour on: usage books nothing
    that is ahead of its log time, and what it has to write of an hour that had begun depends on the minute."""
    fleet = Fleet(nodes, GPUS, pod_life_s=600)
    last: dict[str, tuple[int, object]] = {}
    start_ms = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
    sent = 0
    for tick in ticks(fleet, start_ms, 1000, count // nodes + 1):
        key, fields = node_key("default", tick.node.name), identity(tick, start_ms)
        for news in tick.news:
            workloads = {**fields, "epoch": start_ms, "seq": tick.seq, "ts_ms": news.at_ms, "pods": news.pods}
            yield "gpu.workloads", key, orjson.dumps(workloads)
        seq, content = last.get(tick.node.name, (0, None))
        if content != tick.reading.containers:
            seq += 1
            last[tick.node.name] = seq, tick.reading.containers
            yield "gpu.allocations", key, orjson.dumps({**fields, "seq": seq, "containers": tick.reading.containers})
        if sent < count:
            sent += 1
            sample = {**fields, "seq": tick.seq, "allocations_seq": seq, "devices": whole(tick.reading.devices)}
            yield "gpu.samples", key, orjson.dumps(sample)


def identity(tick: Tick, start_ms: int) -> dict[str, object]:
    """The fields that every record of a tick has."""
    return {"schema": 1, "cluster": "default", "node": tick.node.name, "run_id": start_ms, "ts_ms": tick.ts_ms}


def whole(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole GPUs, with at most 27 values each."""
    return [{**d, "metrics": dict(list(d["metrics"].items())[:VALUES])} for d in devices if not d.get("mig")][:GPUS]


async def bare(kafka: str, count: int, topic: str = "gpu.samples") -> float:
    """CPU seconds of a loop that only reads a topic, in this process."""
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, auto_offset_reset="earliest", max_partition_fetch_bytes=8 << 20
    ) as consumer:
        before_s, read = time.process_time(), 0
        while read < count:
            read += sum(map(len, (await consumer.getmany(timeout_ms=1000, max_records=500)).values()))
        return time.process_time() - before_s
