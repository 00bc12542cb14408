"""Seconds from the start of a killed attribution worker to its first record, with and without an instance id.

python -m tests.bench.restart [REPETITIONS]
"""

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from aiokafka import AIOKafkaConsumer

from delivery import topic_admin
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer


def main(repetitions: int) -> None:
    """Prints a row for each kind of membership."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        at = ("--kafka", kafka.address)
        servers.enter_context(Gpustream(directory / "fleet", "produce", "simulated", *at, "--fleet", "20x8"))
        sys.stdout.write("| membership | first record after the restart, s: min, median, max |\n|---|---|\n")
        for name, options in (("static (--instance-id)", ("--instance-id", "a")), ("dynamic", ())):
            stream = Gpustream(directory / name.split()[0], "stream", "attribution", *at, *options)
            servers.callback(stream.close)
            waits = [restart(stream, kafka.address) for _ in range(repetitions)]
            stream.stop()
            time.sleep(12)  # the group forgets the member
            sys.stdout.write(f"| {name} | {min(waits):.1f}, {median(waits):.1f}, {max(waits):.1f} |\n")


def restart(stream: Gpustream, kafka: str) -> float:
    """Kill -9 a worker that works, start it again, and wait for its first record."""
    stream.start()
    asyncio.run(first_record(kafka))
    time.sleep(3)
    stream.kill9()
    return asyncio.run(started_to_first_record(stream, kafka))


async def started_to_first_record(stream: Gpustream, kafka: str) -> float:
    """Seconds until a record comes from a stream that is started now."""
    waiting = asyncio.create_task(first_record(kafka))
    await asyncio.sleep(1.0)  # the reader is at the end by now, and what was in flight has arrived
    began_s = time.monotonic()
    starting = asyncio.create_task(asyncio.to_thread(stream.start))
    await waiting
    took_s = time.monotonic() - began_s
    await starting
    return took_s


async def first_record(kafka: str) -> None:
    """Return when a record is appended to gpu.attributed from now on."""
    consumer = AIOKafkaConsumer("gpu.attributed", bootstrap_servers=kafka, auto_offset_reset="latest")
    await consumer.start()
    await consumer.seek_to_end()
    await consumer.getone()
    await consumer.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
