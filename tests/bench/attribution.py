"""Node ticks per CPU-second through the attribution stream, next to a bare aiokafka loop over the same log.

    python -m tests.bench.attribution [TICKS]

The log is a simulated fleet's: 8 whole GPUs a node of up to 27 values each (15 where a GPU is cut up by MIG), and pods
that change. The stream starts on all of it.
CPU is user and system time of the whole process, all threads, less that of a start on empty topics. Heartbeats share
the event loop with the work, so how late it was is measured, too.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from producers.simulated.fleet import Fleet
from tests.producers.simulated.made import Tick, ticks
from tests.real.pipeline import Gpustream, lag
from tests.real.servers import KafkaServer
from topics.topic import node_key
from topics.usage import HOUR_MS

NODES, GPUS, VALUES, PARTITIONS = 200, 8, 27, 4


def main(count: int) -> None:
    """Prints a row for the bare loop and one for the stream."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        stream = Gpustream(directory / "stream", "stream", "attribution", "--kafka", kafka.address)
        servers.callback(stream.close)
        start_s, _ = cpu_and_lateness_of(stream, kafka.address)
        size = asyncio.run(produce(kafka.connection, count))
        stream_s, late_s = cpu_and_lateness_of(stream, kafka.address)
        stream_s -= start_s
        bare_s = asyncio.run(bare(kafka.address, count))
        rows = (("bare aiokafka loop, nothing decoded", bare_s), ("attribution stream", stream_s))
        sys.stdout.write(f"{count} ticks of {size / count:.0f} bytes\n\n")
        sys.stdout.write("| | node ticks per CPU-second | CPU us a tick | x the bare loop |\n|---|---|---|---|\n")
        for name, spent_s in rows:
            sys.stdout.write(
                f"| {name} | {count / spent_s:.0f} | {spent_s / count * 1e6:.0f} | {spent_s / bare_s:.1f} |\n"
            )
        sys.stdout.write(f"\nThe stream's event loop was late by at most {late_s * 1000:.0f} ms within a minute.\n")


def cpu_and_lateness_of(stream: Gpustream, kafka: str) -> tuple[float, float]:
    """CPU seconds of a stream from its start until it has committed all there is, and how late its event loop was."""
    stream.start()
    while asyncio.run(lag(kafka, "gpustream-attribution", ["gpu.samples"])):
        time.sleep(0.5)
    spent_s = cpu_s(stream.pid)
    lines = (stream.get("/metrics") or "").splitlines()
    late_s = [float(line.split()[1]) for line in lines if line.startswith("gpustream_attribution_loop_late_seconds ")]
    stream.stop()
    return spent_s, max(late_s, default=0.0)


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def produce(kafka: Connection, count: int, nodes: int = NODES) -> int:
    """The log of a fleet, at any pace; returns the bytes of its samples."""
    sender = Sender(kafka, client_id="bench", max_batch_bytes=512 * 1024)
    await sender.start()
    size = 0
    waiting = []
    async for topic, key, value in records(count, nodes):
        size += len(value) if topic == "gpu.samples" else 0
        sent = await sender.send(topic, value, key=key)
        waiting.append(sent)
        if topic == "gpu.allocations":
            await sent
    await asyncio.gather(*waiting)
    await sender.stop()
    return size


async def records(count: int, nodes: int) -> AsyncIterator[tuple[str, bytes, bytes]]:
    """Topic, key and value of what the fleet's producers would send, from the last full hour on: usage books nothing
    that is ahead of its log time, and what it has to write of an hour that had begun depends on the minute."""
    fleet = Fleet(nodes, GPUS, pod_life_s=600)
    last: dict[str, tuple[int, object]] = {}
    start_ms = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
    made = 0
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
        if made < count:
            made += 1
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
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, auto_offset_reset="earliest", max_partition_fetch_bytes=8 << 20
    )
    await consumer.start()
    before_s, seen = time.process_time(), 0
    while seen < count:
        seen += sum(map(len, (await consumer.getmany(timeout_ms=1000, max_records=500)).values()))
    spent_s = time.process_time() - before_s
    await consumer.stop()
    return spent_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
