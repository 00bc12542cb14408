"""How many samples a CPU-second sends by remote write: ``python -m tests.bench.remote_write [--nodes N] [--ticks N]``.

Ticks of 8 GPUs with 27 values each, and what each GPU is, go through the sink's own handler (decode, series, encode,
snappy, and a POST to a server in another process that answers 204 at once); Kafka's part is left out. Prints stage by
stage, then all of it, warm, with a quarter of the GPUs shared by 4 pods each, and with every label set new in every
tick, for 1.0 and 2.0. CPU time of this process only.
"""

import argparse
import asyncio
import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from cramjam import snappy

from delivery.dead_letters import DeadLetters
from delivery.instruments import Instruments
from delivery.tasks import Turns
from sinks.outcomes import Outcomes
from sinks.remote_write import encode_v1, encode_v2
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.nodes import OpenSeries
from sinks.remote_write.partition import RemoteWritePartition, RemoteWriteShared
from sinks.remote_write.policy import Protocol
from sinks.remote_write.queue import Queue
from sinks.remote_write.refusals import Deliverer
from sinks.remote_write.send import Client, RemoteWriteSender
from sinks.remote_write.sink import COMPONENT, INSTRUMENTS
from sinks.series.model import SampleGroup
from sinks.series.tick import SeriesTick, decode
from sinks.series.translation import Translator
from topics.catalogue import CATALOGUE
from topics.profiles import PROFILES

GPUS = 8
KEYS = list(CATALOGUE)[:27]
SHARED_BY = 4
START_MS = 1_795_219_152_000

NULL_RECEIVER = """
import asyncio
ANSWER = b"HTTP/1.1 204 No Content\\r\\nX-Prometheus-Remote-Write-Samples-Written: 99999999\\r\\n\\r\\n"
async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\\r\\n")[0])
            await reader.readexactly(length)
            writer.write(ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class Read(NamedTuple):
    """A record as it is read."""

    offset: int
    value: bytes
    timestamp: int = 0
    key: bytes | None = None
    topic: str = "gpu.attributed"
    partition: int = 0


def device(rng: random.Random, node: int, gpu: int, pods: Sequence[str]) -> dict[str, Any]:
    """One GPU that Jobs' pods hold; if there are several, with their parts."""
    parts = {"utilization_ratio": 0.2, "memory_used_bytes": 1 << 30, "power_watts": 50.5}
    shared = len(pods) > 1
    return {
        "uuid": f"GPU-{node:08x}-1c2d-3e4f-5a6b-{gpu:012x}",
        "index": gpu,
        "minor": gpu,
        "model": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{gpu:02X}:00.0",
        "info": {
            "serial": f"{gpu}",
            "driver_version": "580.95.05",
            "mig_mode": "disabled",
            "processes_visible": "true",
        },
        "metrics": {key: reading(rng, key) for key in KEYS},
        "holders": [{**holder(pod), **({"parts": parts} if shared else {})} for pod in pods],
        **({"unattributed": parts, "split_scaled": False} if shared else {}),
    }


def holder(pod: str) -> dict[str, Any]:
    """A Job's pod."""
    return {
        "namespace": "ml-team",
        "pod": pod,
        "pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
        "container": "pytorch",
        "resource": "nvidia.com/gpu",
        "workload": {"kind": "Job", "name": "bert-finetune-v3"},
        "job": "bert-finetune-v3",
        "labels": {"app": "bert"},
    }


def pods_of(gpu: int, stem: str, *, shared: bool) -> list[str]:
    """Who holds a GPU; with ``shared`` every fourth is held by several."""
    return [f"{stem}-{gpu}-{n}" for n in range(SHARED_BY if shared and gpu % 4 == 0 else 1)]


def reading(rng: random.Random, key: str) -> float:
    """A value as a GPU gives them: ratios in percent, few clocks and reasons, anything else."""
    if key.endswith("_ratio"):
        return rng.randrange(101) / 100
    if key.endswith("_clock_hz"):
        return 15_000_000 * rng.randrange(20, 132)
    return 1 << rng.randrange(8) if key == "clock_event_reasons" else rng.randrange(10**9)


def log(nodes: int, ticks: int, *, cold: bool = False, shared: bool = False) -> list[Read]:
    """Records of a partition; with ``cold`` every tick finds other pods, with ``shared`` a quarter of the GPUs is."""
    rng = random.Random(1)
    records: list[Read] = []
    for seq in range(1, ticks + 1):
        for node in range(nodes):
            stem = f"bert-{node}-{seq if cold else 0}"
            devices = [device(rng, node, gpu, pods_of(gpu, stem, shared=shared)) for gpu in range(GPUS)]
            content = {
                "schema": 1,
                "cluster": "prod-us-east-1",
                "node": f"gpu-node-{node}",
                "run_id": 1,
                "seq": seq,
                "ts_ms": START_MS + seq * 1000,
                "offset": seq,
                "attribution": "exact",
                "devices": devices,
            }
            records.append(Read(len(records), msgspec.json.encode(content), key=b"%d" % node))
    return records


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def per_cpu_second(work: Callable[[], Any], values: int, label: str) -> None:
    """Runs and prints."""
    start = time.process_time()
    work()
    spent = time.process_time() - start
    per_tick_us = spent * 1e6 * GPUS * len(KEYS) / values
    say(f"  {label:<28}{per_tick_us:9.1f} us/tick {values / spent / 1e6:8.2f} M values/CPU-s")


def stages(records: Sequence[Read]) -> None:
    """Each step on its own, warm."""
    values = len(records) * GPUS * len(KEYS)
    samples: list[SeriesTick] = []
    per_cpu_second(lambda: samples.extend(decode(record.value) for record in records), values, "decode")
    series = OpenSeries(Translator([PROFILES["otel"]]))
    for sample in samples:
        series.tick(sample)
    groups: list[list[SampleGroup]] = []

    def play() -> None:
        for sample in samples:
            tick = series.tick(sample)
            groups.append(tick.groups)
            series.settle(tick, 0.0, accepted=True)

    play()
    groups.clear()
    series.clear()
    per_cpu_second(play, values, "series")
    batches = [[group for tick in groups[start : start + 32] for group in tick] for start in range(0, len(groups), 32)]
    encoders: dict[str, Callable[[Sequence[SampleGroup]], bytes]] = {
        "1.0": lambda groups: b"".join(encode_v1.pieces(groups)),
        "2.0": encode_v2.Encoder().encode,
    }
    for protocol, encode in encoders.items():
        encode(batches[0])
        bodies: list[bytes] = []
        per_cpu_second(lambda: bodies.extend(map(encode, batches)), values, f"encode {protocol}")  # noqa: B023
        packed: list[Any] = []
        per_cpu_second(lambda: packed.extend(map(snappy.compress_raw, bodies)), values, f"snappy {protocol}")  # noqa: B023
        size = sum(map(len, packed)) / values
        say(f"  {'':<28}{size:9.1f} B/value on the wire")


async def all_of_it(records: Sequence[Read], url: str, protocol: Protocol) -> tuple[float, float]:
    """Delivers the records as the sink does; gives CPU and wall-clock seconds."""
    settings = RemoteWriteSettings(kafka="none", url=url, protocol=protocol)
    instruments = Instruments(INSTRUMENTS)
    client = Client(settings)
    shared = RemoteWriteShared(
        deliverer=Deliverer(RemoteWriteSender(client.post, protocol, instruments), instruments),
        letters=DeadLetters(None, ""),  # type: ignore[arg-type] # nothing is refused
        outcomes=Outcomes(COMPONENT, instruments),
        instruments=instruments,
        slots=asyncio.Semaphore(settings.max_in_flight),
        max_samples=settings.max_request_samples,
        stale_after_s=60.0,
        turns=Turns(),
    )
    queue = Queue(shared.deliverer, at_once=settings.max_in_flight, max_samples=settings.max_request_samples)
    handler = RemoteWritePartition(0, OpenSeries(Translator([PROFILES["otel"]])), shared, queue)
    cpu, wall = time.process_time(), time.perf_counter()
    finished, abandon = [0], asyncio.Event()
    while finished[-1] < len(records):
        unread = () if finished[1:] else records
        finished += [step async for step in handler.deliver(unread, abandon)] or [0]
        await asyncio.sleep(0.001)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    await client.close()
    delivered = instruments.registry.get_sample_value("gpustream_remote_write_values_delivered_total")
    if delivered != len(records) * GPUS * len(KEYS):
        raise RuntimeError(f"{delivered} values delivered")
    return spent


@contextmanager
def null_receiver() -> Iterator[str]:
    """A server that says that it took whatever it is sent."""
    with subprocess.Popen([sys.executable, "-c", NULL_RECEIVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout else ""
            yield f"http://127.0.0.1:{port}/write"
        finally:
            process.terminate()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ticks", type=int, default=20)
    options = parser.parse_args()
    gc.set_threshold(100_000, 50, 100)  # as a process that serves does
    size = options.nodes, options.ticks
    warm = log(*size)
    logs = (("warm", warm), ("warm, shared", log(*size, shared=True)), ("cold label sets", log(*size, cold=True)))
    values = len(warm) * GPUS * len(KEYS)
    say(f"{len(warm)} ticks of {GPUS} GPUs x {len(KEYS)} values")
    stages(warm)
    with null_receiver() as url:
        protocols: tuple[Protocol, ...] = ("1.0", "2.0")
        for name, records in logs:
            for protocol in protocols:
                cpu, wall = asyncio.run(all_of_it(records, url, protocol))
                rates = f"{values / cpu / 1e6:8.2f} M values/CPU-s {values / wall / 1e6:8.2f} M/s"
                say(f"all, {protocol}, {name:<16} {rates}")


if __name__ == "__main__":
    main()
