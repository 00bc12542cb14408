"""How soon an alert is reported, and what a worker of the alert stream costs.

    python -m tests.bench.alerts [SECONDS] [NODES]

Soon: a simulated fleet of 200 nodes of 8 GPUs at one tick a second, through Kafka, both streams and the Alertmanager
sink into Alertmanager, with GPUHeldIdle after 20 s. Counted is from the first sample in which a GPU was held and idle,
less those 20 s, to the record's log time and to when Alertmanager had it. Pods of which some samples said nothing, as
those of a shared GPU whose video engine was busy, wait for evidence and are left out. All clocks are this machine's.

Costs: the ticks of NODES nodes of 8 GPUs, all in one worker, as a backlog. Memory is the resident set of the process
with all nodes known, less that of one without any; CPU is user and system time of the whole process, all threads, for
the ticks after each node's first.
"""

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from producers.simulated.fleet import Fleet
from sinks.alertmanager import FINGERPRINT
from tests.bench.attribution import cpu_s
from tests.bench.score import joined
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import AlertmanagerServer, KafkaServer
from topics.alerts import Alert
from topics.times import epoch_ms
from topics.topic import decoder, node_key

FLEET, SECONDS, FOR_S = "200x8", 600, 20
NODES, GPUS, ROUNDS, TEMPLATES, PARTITIONS = 10_000, 8, 3, 100, 8
WARM_UP_S, SETTLE_S, TICK_MS = 15.0, 5.0, 1000

RULES = f"""
[rules.GPUHeldIdle]
for = "{FOR_S}s"
grace = "0s"
"""

Fired = tuple[str, int]
"""Which alert began when: its fingerprint, milliseconds since the epoch."""


def main(seconds: int, nodes: int) -> None:
    """Prints a table of each."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka", heap="1g"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        sys.stdout.write("\n".join(soon(directory, kafka.address, seconds)) + "\n\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka", heap="1g"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        sys.stdout.write("\n".join(costs(directory, kafka.address, nodes)) + "\n")


# -- how soon


def soon(directory: Path, kafka: str, seconds: int) -> Iterator[str]:
    """The rows of how soon alerts are reported."""
    rules, options = directory / "rules.toml", ("--kafka", kafka)
    rules.write_text(RULES)
    with ExitStack() as running:
        manager = running.enter_context(AlertmanagerServer(directory / "alertmanager"))
        arguments = {
            "attribution": ("stream", "attribution", *options),
            "alerts": ("stream", "alerts", *options, "--rules", str(rules)),
            "sink": ("sink", "alertmanager", *options, "--url", manager.url),
            "fleet": ("produce", "simulated", *options, "--fleet", FLEET),
        }
        processes = {
            name: running.enter_context(Gpustream(directory / name, *args)) for name, args in arguments.items()
        }
        time.sleep(WARM_UP_S)
        began_s = {name: cpu_s(process.pid) for name, process in processes.items()}
        had = watch(manager, seconds)
        cores = {name: (cpu_s(process.pid) - began_s[name]) / seconds for name, process in processes.items()}
        logged = asyncio.run(log_times(kafka))
    rows = {
        "gpu.alerts": [at_ms - due_ms for at_ms, due_ms in logged.values()],
        "Alertmanager": [had[firing] - due_ms for firing, (_, due_ms) in logged.items() if firing in had],
    }
    yield f"| {FLEET} at 1 Hz, {seconds} s, to the alert in | alerts | p50 ms | p99 ms |"
    yield "|---|---|---|---|"
    for name, ages in rows.items():
        ages.sort()
        yield f"| {name} | {len(ages)} | {ages[len(ages) // 2]} | {ages[int(len(ages) * 0.99)]} |"
    yield ""
    yield "Cores: " + ", ".join(f"{name} {share:.2f}" for name, share in cores.items() if name != "fleet") + "."


def watch(manager: AlertmanagerServer, seconds: int) -> dict[Fired, int]:
    """When Alertmanager first had each alert, by its own word, looked at twice a second."""
    had: dict[Fired, int] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for alert in manager.alerts():
            key = alert["labels"][FINGERPRINT], _ms(alert["startsAt"])
            had.setdefault(key, _ms(alert["updatedAt"]))
        time.sleep(0.5)
    return had


async def log_times(kafka: str) -> dict[Fired, tuple[int, int]]:
    """When each GPUHeldIdle that fired was logged, and when it was due, if each sample until then showed it."""
    decode = decoder(Alert)
    logged: dict[Fired, tuple[int, int]] = {}
    for record in await read_all(kafka, "gpu.alerts"):
        alert = decode(record.value) if record.value else None
        idle = alert is not None and alert.name == "GPUHeldIdle" and alert.state == "firing" and not alert.revision
        if alert is not None and idle and alert.value is not None:
            starts_ms = epoch_ms(alert.starts_at)
            due_ms = starts_ms - round((alert.value - FOR_S) * 1000)
            if starts_ms - due_ms > TICK_MS:
                continue
            logged.setdefault((alert.fingerprint, starts_ms), (record.timestamp, due_ms))
    return logged


def _ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


# -- what it costs


def costs(directory: Path, kafka: str, nodes: int) -> Iterator[str]:
    """The rows of what a worker costs."""
    with Gpustream(directory / "alerts", "stream", "alerts", "--kafka", kafka) as stream:
        empty_mib = memory_mib(stream.pid)
        patterns = list(templates())
        size = asyncio.run(produce(kafka, patterns, nodes, rounds=range(1)))
        finish(kafka)
        before_s, ticks = cpu_s(stream.pid), nodes * (ROUNDS - 1)
        asyncio.run(produce(kafka, patterns, nodes, rounds=range(1, ROUNDS)))
        finish(kafka)
        spent_s, full_mib = cpu_s(stream.pid) - before_s, memory_mib(stream.pid)
    yield f"| {nodes * GPUS} GPUs of {nodes} nodes in one worker, ticks of {size / nodes / 1000:.1f} kB | |"
    yield "|---|---|"
    yield f"| memory | {full_mib - empty_mib:.0f} MiB, {(full_mib - empty_mib) * 1024 / nodes:.0f} KiB a node |"
    yield f"| CPU a node tick | {spent_s / ticks * 1e6:.0f} us |"
    yield f"| node ticks a CPU-second | {ticks / spent_s:.0f} |"


def templates() -> Iterator[list[dict[str, Any]]]:
    """For some nodes, their first ticks as gpu.attributed has them."""
    ticks_by_node: dict[str, list[dict[str, Any]]] = {}
    for _, sample in joined(Fleet(TEMPLATES, GPUS, pod_life_s=3600), ROUNDS):
        ticks_by_node.setdefault(sample.node, []).append(orjson.loads(msgspec.json.encode(sample)))
    yield from ticks_by_node.values()


async def produce(kafka: str, patterns: list[list[dict[str, Any]]], nodes: int, rounds: range) -> int:
    """Writes ticks of so many nodes, each a copy with a name and UUIDs of its own; returns the bytes of one round."""
    sender = Sender(Connection(kafka), client_id="bench", max_batch_bytes=512 * 1024)
    await sender.start()
    size, waiting = 0, []
    for number in rounds:
        size = 0
        for node in range(nodes):
            name = f"node-{node:05}"
            tick = {**patterns[node % len(patterns)][number], "node": name, "offset": number * nodes + node}
            value = re.sub(rb'"(GPU|MIG)-[0-9a-f]{8}', rb'"\1-%08x' % node, orjson.dumps(tick))
            size += len(value)
            waiting.append(await sender.send("gpu.attributed", value, key=node_key("default", name)))
        await asyncio.gather(*waiting)
        waiting.clear()
    await sender.stop()
    return size


def finish(kafka: str) -> None:
    """Waits until the worker has read all there is: each node's last tick stays unfinished."""
    behind = None
    while behind != (behind := asyncio.run(lag(kafka, "gpustream-alerts", ["gpu.attributed"]))):
        time.sleep(SETTLE_S)


def memory_mib(pid: int) -> float:
    """The resident set of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [SECONDS, NODES][len(arguments) :]))
