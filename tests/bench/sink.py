"""Values per CPU-second from gpu.attributed to a receiver, next to a bare aiokafka loop over the same log.

    python -m tests.bench.sink [TICKS]
    python -m tests.bench.sink catch-up [TICKS [TREE]]

The second catches up on a backlog of 20 nodes in 8 partitions, three times, in turn with the sink of another source
tree, if one is given.

The sink is the whole process, reading a log of 8 GPUs x 27 values a tick from Apache Kafka, for a receiver that takes
everything at once. CPU is user and system time, all threads, less that of a start on an empty topic: a start on a group
that has read it all would read back what is younger than a minute, and so cost more the faster the benchmark is.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from tests.bench.attribution import bare, cpu_s
from tests.bench.remote_write import GPUS, KEYS, log, null_receiver
from tests.real.pipeline import Gpustream, lag
from tests.real.servers import KafkaServer

NODES = 64
FEW_NODES, PARTITIONS = 20, 8
TOPIC = "gpu.attributed"


def main(count: int) -> None:
    """Prints a row for the bare loop, and one for each protocol: warm, with shared GPUs, and with cold label sets."""
    values = count * GPUS * len(KEYS)
    sys.stdout.write(f"{count} ticks of {GPUS} x {len(KEYS)} values, {NODES} nodes\n\n")
    sys.stdout.write("| | values per CPU-second | CPU us a tick | x the bare loop |\n|---|---|---|---|\n")
    for label, kind in (("warm", {}), ("warm, shared", {"shared": True}), ("cold label sets", {"cold": True})):
        with ExitStack() as servers:
            directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
            kafka = servers.enter_context(KafkaServer(directory / "kafka"))
            url = servers.enter_context(null_receiver())
            asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
            options = ("sink", "remote-write", "--kafka", kafka.address, "--url", url, "--from", "earliest")
            sinks = {
                protocol: Gpustream(directory / protocol, *options, "--protocol", protocol, "--group", protocol)
                for protocol in ("1.0", "2.0")
            }
            for sink in sinks.values():
                servers.callback(sink.close)
            start_s = {protocol: cpu_of(sink, kafka.address, protocol) for protocol, sink in sinks.items()}
            asyncio.run(produce(kafka.address, count, kind))
            bare_s = asyncio.run(bare(kafka.address, count, TOPIC))
            row(f"bare aiokafka loop, nothing decoded ({label})", values, bare_s, bare_s, count)
            for protocol, sink in sinks.items():
                spent_s = cpu_of(sink, kafka.address, protocol) - start_s[protocol]
                row(f"remote write {protocol}, {label}", values, spent_s, bare_s, count)


def catch_up(count: int, trees: Sequence[str]) -> None:
    """Prints a row for each turn of each source tree: ticks a second, in a second of its own CPU, and its memory."""
    sys.stdout.write(f"{count} ticks of {GPUS} x {len(KEYS)} values, {FEW_NODES} nodes, {PARTITIONS} partitions\n\n")
    sys.stdout.write("| sink | ticks a second | ticks a CPU-second | peak MiB |\n|---|---|---|---|\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        url = servers.enter_context(null_receiver())
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))

        def sink(group: str, tree: str) -> Gpustream:
            options = ("--kafka", kafka.address, "--url", url, "--from", "earliest", "--group", group)
            arguments = ("sink", "remote-write", *options)
            return Gpustream(directory / group, *arguments, environment={"PYTHONPATH": tree})

        start_s = [cpu_of(sink(f"start-{number}", tree), kafka.address, "") for number, tree in enumerate(trees)]
        asyncio.run(produce(kafka.address, count, {}, FEW_NODES))
        for turn, (number, tree) in product(range(3), enumerate(trees)):
            group = f"catch-up-{turn}-{number}"
            with sink(group, tree) as one:
                began = time.perf_counter()
                while asyncio.run(lag(kafka.address, group, [TOPIC])):
                    time.sleep(0.2)
                took_s, spent_s = time.perf_counter() - began, cpu_s(one.pid) - start_s[number]
                peak_kib = Path(f"/proc/{one.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
            figures = f"{count / took_s:.0f} | {count / spent_s:.0f} | {int(peak_kib) / 1024:.0f}"
            sys.stdout.write(f"| {Path(tree).name}, {turn + 1} | {figures} |\n")
            sys.stdout.flush()


def row(name: str, values: int, spent_s: float, bare_s: float, count: int) -> None:
    """One line of the table."""
    figures = f"{values / spent_s / 1e6:.2f} M | {spent_s / count * 1e6:.0f} | {spent_s / bare_s:.1f}"
    sys.stdout.write(f"| {name} | {figures} |\n")
    sys.stdout.flush()


def cpu_of(sink: Gpustream, kafka: str, group: str) -> float:
    """CPU seconds of a sink from its start until it has committed all there is."""
    sink.start()
    while asyncio.run(lag(kafka, group, [TOPIC])):
        time.sleep(0.5)
    spent_s = cpu_s(sink.pid)
    sink.stop()
    return spent_s


async def produce(kafka: str, count: int, kind: Mapping[str, bool], nodes: int = NODES) -> None:
    """The log of that kind, with a node's ticks in one partition and offsets as the stream writes them."""
    sender = Sender(Connection(kafka), client_id="bench", max_batch_bytes=512 * 1024)
    await sender.start()
    waiting = [await sender.send(TOPIC, record.value, key=record.key) for record in log(nodes, count // nodes, **kind)]
    await asyncio.gather(*waiting)
    await sender.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["catch-up"]:
        catch_up(int(sys.argv[2]) if len(sys.argv) > 2 else 20_000, sys.argv[3:] or [str(Path.cwd())])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 6400)
