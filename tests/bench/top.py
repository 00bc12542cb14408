"""What ``gpustream top`` costs: its share of a core, and what it writes to its terminal, by what it shows.

    python -m tests.bench.top [NODES] [SECONDS]

250 nodes of 8 GPUs by default, at 1 Hz, on a Kafka of its own, read by the command itself on a terminal of 200x60: its
CPU time is the kernel's own count. Records are those of the simulated fleet, and are made before.
"""

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from producers.simulated.fleet import Fleet
from tests.bench.attribution import cpu_s
from tests.real.servers import KafkaServer
from tests.terminal import Terminal
from topics.attributed import TOPIC

GPUS, SECONDS, SIZE = 8, 4, (200, 60)
VIEWS = {"fleet": b"1", "nodes": b"2", "GPUs": b"3", "pods": b"4", "workloads": b"5", "one GPU": b"3\r"}


def fleet_ticks(nodes: int) -> list[list[dict[str, object]]]:
    """Some seconds of ticks of each node, without their numbers and times."""
    fleet = Fleet(nodes, GPUS)
    nodes_ticks = []
    for index in range(nodes):
        node, ticks = fleet.node(index), list[dict[str, object]]()
        for second in range(1, SECONDS + 1):
            reading = node.read(second * 1000, 1)
            pairs = zip(reading.devices, reading.reported, strict=True)
            devices = [{**device, "holders": holders} for device, holders in pairs]
            ticks.append(TOPIC.example | {"node": node.name, "devices": devices})
        nodes_ticks.append(ticks)
    return nodes_ticks


async def send(address: str, nodes: list[list[dict[str, object]]], stop: asyncio.Event) -> None:
    """Each node's tick, once a second, spread over it."""
    async with AIOKafkaProducer(
        bootstrap_servers=address, compression_type="zstd", linger_ms=20, max_batch_size=1 << 20
    ) as producer:
        began_s = time.time()
        for seq in range(1, 1_000_000):
            for number, ticks in enumerate(nodes):
                due_s = began_s + seq + number / len(nodes)
                if due_s - time.time() > 0.005:
                    await asyncio.sleep(due_s - time.time())
                if stop.is_set():
                    return
                numbers = {"seq": seq, "offset": seq, "ts_ms": int(time.time() * 1000)}
                record = msgspec.json.encode(ticks[seq % SECONDS] | numbers)
                await producer.send(TOPIC.name, record, key=f"bench/{ticks[0]['node']}".encode())


class Cost(NamedTuple):
    """What a view costs; ``ticks_per_s`` is what the screen itself says."""

    view: str
    ticks_per_s: str
    cores: float
    kib_per_s: float


async def measured(address: str, seconds: float) -> list[Cost]:
    """Every view, one after the other."""
    terminal = Terminal("top", "--kafka", address, "--since", "1s", size=SIZE)
    costs = list[Cost]()
    try:
        await asyncio.to_thread(terminal.shows, b"GPUs by node")
        await asyncio.sleep(5)
        for name, keys in VIEWS.items():
            terminal.press(keys)
            await asyncio.sleep(2)
            began_s, used_s, wrote = time.monotonic(), cpu_s(terminal.process.pid), len(terminal.written)
            await asyncio.sleep(seconds)
            lasted_s = time.monotonic() - began_s
            used = (cpu_s(terminal.process.pid) - used_s) / lasted_s
            rates = re.findall(rb"([\d,]+) ticks/s", terminal.written)
            costs.append(Cost(name, rates[-1].decode(), used, (len(terminal.written) - wrote) / lasted_s / 1024))
    finally:
        terminal.close()
    return costs


async def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    nodes, seconds = int(arguments[0]) if arguments else 250, float(arguments[1]) if arguments[1:] else 10.0
    records = fleet_ticks(nodes)
    with tempfile.TemporaryDirectory() as directory, KafkaServer(Path(directory)) as kafka:
        await topic_admin.create(kafka.connection, partitions=8, replication_factor=1)
        stop = asyncio.Event()
        sending = asyncio.create_task(send(kafka.address, records, stop))
        sys.stdout.write("| shown | ticks/s | of a core | KiB/s to the terminal |\n|---|---|---|---|\n")
        for row in await measured(kafka.address, seconds):
            sys.stdout.write(f"| {row.view} | {row.ticks_per_s} | {row.cores:.1%} | {row.kib_per_s:.1f} |\n")
        stop.set()
        await sending


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
