"""From reading a node to the record in gpu.attributed, live: milliseconds, and the CPU that one worker takes.

    python -m tests.bench.latency [NODESxGPUS]

A simulated fleet at one tick a second a node; both clocks are this machine's.
"""

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from delivery import topic_admin
from tests.bench.attribution import cpu_s
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import KafkaServer

WARM_UP_S, MEASURE_S = 10.0, 20.0


class Read(msgspec.Struct):
    """When a tick was read."""

    ts_ms: int


def main(fleet: str) -> None:
    """Prints one row."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=8, replication_factor=1))
        at = ("--kafka", kafka.address)
        stream = servers.enter_context(Gpustream(directory / "stream", "stream", "attribution", *at))
        servers.enter_context(Gpustream(directory / "fleet", "produce", "simulated", *at, "--fleet", fleet))
        time.sleep(WARM_UP_S)
        since_ms, before_s = time.time() * 1000, cpu_s(stream.pid)
        time.sleep(MEASURE_S)
        spent_s = cpu_s(stream.pid) - before_s
        ages = sorted(asyncio.run(latencies_ms(kafka.address, since_ms)))
    sys.stdout.write(
        "| fleet, 1 Hz | ticks a second | p50 ms | p99 ms | cores of one worker |\n|---|---|---|---|---|\n"
    )
    rate, p99 = len(ages) / MEASURE_S, ages[int(len(ages) * 0.99)]
    sys.stdout.write(f"| {fleet} | {rate:.0f} | {ages[len(ages) // 2]} | {p99} | {spent_s / MEASURE_S:.2f} |\n")


async def latencies_ms(kafka: str, since_ms: float) -> list[int]:
    """From each tick's reading since then to its record's log time."""
    read = msgspec.json.Decoder(Read)
    records = [
        (record.timestamp, read.decode(record.value).ts_ms) for record in await read_all(kafka, "gpu.attributed")
    ]
    return [logged_ms - ts_ms for logged_ms, ts_ms in records if since_ms <= ts_ms < since_ms + MEASURE_S * 1000]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "200x8")
