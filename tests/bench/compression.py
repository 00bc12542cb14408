"""Bytes a tick on a broker's disk, and what each side pays for them, by ``--compression``.

    python -m tests.bench.compression [NODESxGPUS [SECONDS]]

A simulated fleet at one tick a second a node, live, through the attribution stream and the remote-write sink to a
receiver that takes everything at once, with Apache Kafka and 32 partitions. Each node ticks at its own time within the
second, as nodes do, so nearly every batch of gpu.samples is one tick. Bytes are what the log segments grow by; CPU is
user and system time of each process, all threads.
"""

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from delivery import topic_admin
from tests.bench.attribution import cpu_s
from tests.bench.remote_write import null_receiver
from tests.real.contents import ends
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer
from topics.topic import PARTITIONS

COMPRESSIONS = ("none", "zstd", "lz4", "gzip")
TOPICS = ("gpu.samples", "gpu.attributed")
WARM_UP_S = 15.0


class Reading(NamedTuple):
    """What there is at one moment: records and bytes of each topic, and the CPU seconds of each process."""

    records: dict[str, int]
    bytes: dict[str, int]
    cpu_s: dict[str, float]


def main(fleet: str, seconds: float) -> None:
    """Prints a row for each compression."""
    sys.stdout.write(f"{fleet} GPUs, {seconds:g} s each\n\n")
    sys.stdout.write("| compression | gpu.samples, bytes a tick | gpu.attributed | fleet, CPU us a tick |")
    sys.stdout.write(" attribution | remote write |\n|---|---|---|---|---|---|\n")
    for compression in COMPRESSIONS:
        figures = measured(fleet, seconds, compression)
        sys.stdout.write(f"| {compression} | {' | '.join(figures)} |\n")
        sys.stdout.flush()


def measured(fleet: str, seconds: float, compression: str) -> list[str]:
    """The figures of one row."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        url = servers.enter_context(null_receiver())
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        options = ("--kafka", kafka.address, "--compression", compression)
        commands = {
            "remote write": ("sink", "remote-write", *options, "--url", url, "--from", "earliest"),
            "attribution": ("stream", "attribution", *options),
            "fleet": ("produce", "simulated", *options, "--fleet", fleet),
        }
        processes = {
            name: servers.enter_context(Gpustream(directory / name, *command)) for name, command in commands.items()
        }
        time.sleep(WARM_UP_S)
        before = read(kafka, processes)
        time.sleep(seconds)
        after = read(kafka, processes)
    ticks = {topic: after.records[topic] - before.records[topic] for topic in TOPICS}
    sizes = [(after.bytes[topic] - before.bytes[topic]) / ticks[topic] for topic in TOPICS]
    spent = [(after.cpu_s[name] - before.cpu_s[name]) / ticks["gpu.samples"] for name in reversed(commands)]
    return [f"{size:.0f}" for size in sizes] + [f"{one_s * 1e6:.0f}" for one_s in spent]


def read(kafka: KafkaServer, processes: dict[str, Gpustream]) -> Reading:
    """How things stand now."""
    return Reading(
        {topic: sum(asyncio.run(ends(kafka.address, topic, PARTITIONS)).values()) for topic in TOPICS},
        {topic: log_bytes(kafka, topic) for topic in TOPICS},
        {name: cpu_s(process.pid) for name, process in processes.items()},
    )


def log_bytes(kafka: KafkaServer, topic: str) -> int:
    """The size of a topic's log segments on the broker's disk."""
    return sum(log.stat().st_size for log in (kafka.directory / "data").glob(f"{topic}-*/*.log"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "100x8", float(sys.argv[2]) if len(sys.argv) > 2 else 30.0)
