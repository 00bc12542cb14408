"""From reading a node to the record in gpu.attributed, live: milliseconds, and the CPU that one worker takes.

    python -m tests.bench.latency [NODESxGPUS] [--hot]

A simulated fleet at one tick a second a node; both clocks are this machine's. With ``--hot``, beside it, one node of
8 GPUs with a hundred ticks a second, which are not among those that are timed.
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
HOT = "hot"


class Read(msgspec.Struct):
    """When a tick was read, and of which cluster."""

    cluster: str
    ts_ms: int


def main(fleet: str, *, hot: bool) -> None:
    """Prints one row."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=8, replication_factor=1))
        options = ("--kafka", kafka.address)
        stream = servers.enter_context(Gpustream(directory / "stream", "stream", "attribution", *options))
        servers.enter_context(Gpustream(directory / "fleet", "produce", "simulated", *options, "--fleet", fleet))
        if hot:
            fleet_options = ("--fleet", "1x8", "--interval", "10ms", "--cluster", HOT)
            servers.enter_context(Gpustream(directory / "hot", "produce", "simulated", *options, *fleet_options))
        time.sleep(WARM_UP_S)
        since_ms, before_s = time.time() * 1000, cpu_s(stream.pid)
        time.sleep(MEASURE_S)
        spent_s = cpu_s(stream.pid) - before_s
        ages = sorted(asyncio.run(latencies_ms(kafka.address, since_ms)))
    sys.stdout.write(
        "| fleet, 1 Hz | ticks a second | p50 ms | p99 ms | cores of one worker |\n|---|---|---|---|---|\n"
    )
    rate, p99 = len(ages) / MEASURE_S, ages[int(len(ages) * 0.99)]
    fleet += " and a hot node" if hot else ""
    sys.stdout.write(f"| {fleet} | {rate:.0f} | {ages[len(ages) // 2]} | {p99} | {spent_s / MEASURE_S:.2f} |\n")


async def latencies_ms(kafka: str, since_ms: float) -> list[int]:
    """From each tick's reading since then to its record's log time."""
    read = msgspec.json.Decoder(Read)
    records = [(record.timestamp, read.decode(record.value)) for record in await read_all(kafka, "gpu.attributed")]
    return [
        logged_ms - sample.ts_ms
        for logged_ms, sample in records
        if since_ms <= sample.ts_ms < since_ms + MEASURE_S * 1000 and sample.cluster != HOT
    ]


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--hot"]
    main(named[0] if named else "200x8", hot="--hot" in sys.argv)
