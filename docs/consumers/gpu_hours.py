# /// script
# requires-python = ">=3.11"
# dependencies = ["aiokafka>=0.14", "cramjam>=2.14", "msgspec>=0.22"]
# ///
"""GPU time per hour, namespace and workload: gpu.attributed into SQLite, every tick counted once.

    uv run gpu_hours.py --kafka 127.0.0.1:9092 --database gpu-hours.db

In: gpu.attributed, as a consumer group. Out: the table `usage`, printed when the program ends.
State: the same database has the sums and, written in one transaction with them, the last counted tick of each node. A
record that comes again (after a crash, a rebalance, or with the group set back) is recognised and not counted again.
On failure: a malformed record is logged and skipped; anything else ends the program, and a new start continues. Only a
record with a header whose name is no UTF-8, which gpustream never writes, ends each start: aiokafka can't read it.

It needs no code of gpustream: the types below are the part of topics/schemas/gpu.attributed.json that it reads.
"""

import argparse
import asyncio
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError, IllegalStateError

LONGEST_TICK_MS = 10_000
"""A tick stands for the time since the node's last one. If that is longer than this, and than three of the node's
intervals, the time is counted for nobody."""

NOBODY, UNKNOWN = "(nobody)", "(unknown)"

SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    cluster TEXT, node TEXT, run_id INTEGER, seq INTEGER, "offset" INTEGER, newest_ts_ms INTEGER, ts_ms INTEGER,
    PRIMARY KEY (cluster, node)
);
CREATE TABLE IF NOT EXISTS usage (
    hour TEXT, cluster TEXT, namespace TEXT, workload TEXT, device TEXT,
    held_seconds REAL, measured_seconds REAL, used_seconds REAL,
    PRIMARY KEY (hour, cluster, namespace, workload, device)
);
"""

LAST = 'SELECT run_id, seq, "offset", newest_ts_ms, ts_ms FROM nodes WHERE (cluster, node) = (?, ?)'

ADD = """
INSERT INTO usage VALUES (strftime('%Y-%m-%dT%H:00Z', ? / 1000, 'unixepoch'), ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET held_seconds = held_seconds + excluded.held_seconds,
    measured_seconds = measured_seconds + excluded.measured_seconds, used_seconds = used_seconds + excluded.used_seconds
"""

REPORT = """
SELECT namespace, workload, device, sum(held_seconds) / 3600, sum(used_seconds) / nullif(sum(measured_seconds), 0)
FROM usage GROUP BY namespace, workload, device ORDER BY 4 DESC
"""

log = logging.getLogger("gpu_hours")


class Workload(msgspec.Struct):
    """The top of a pod's chain of owners."""

    kind: str
    name: str


class Parts(msgspec.Struct):
    """A pod's part of a shared device."""

    utilization_ratio: float | None = None


class Holder(msgspec.Struct):
    """A container that holds a device."""

    namespace: str
    pod: str
    workload: Workload | None = None
    parts: Parts | None = None


class Mig(msgspec.Struct):
    """The GPU that a MIG device is a slice of."""

    parent_uuid: str
    profile: str | None = None


class Device(msgspec.Struct):
    """A GPU or a MIG device, in one tick."""

    uuid: str
    metrics: dict[str, float | None] | None = None
    mig: Mig | None = None
    holders: list[Holder] | None = None
    attribution: str | None = None


class Tick(msgspec.Struct):
    """A record of gpu.attributed: one reading of a node."""

    schema: Literal[1]
    cluster: str
    node: str
    run_id: int
    seq: int
    ts_ms: int
    offset: int
    attribution: str
    interval_ms: int | None = None
    devices: list[Device] | None = None


decoder = msgspec.json.Decoder(Tick)


class LastTick(NamedTuple):
    """The last counted tick of a node, and the latest time of any of its ticks."""

    run_id: int
    seq: int
    offset: int
    newest_ts_ms: int
    ts_ms: int


class Share(NamedTuple):
    """A workload's share of a device: the ratio that it held, and the ratio of the whole device that it used (None: not
    known)."""

    namespace: str
    workload: str
    held_ratio: float
    used: float | None


def shares(tick: Tick, device: Device) -> Iterator[Share]:
    """The shares of the device during a tick. Their `held_ratio` adds up to 1."""
    utilization = (device.metrics or {}).get("gpu_utilization_ratio")
    if (device.attribution or tick.attribution) == "none":
        yield Share(UNKNOWN, "", 1.0, utilization)
        return
    pods: dict[tuple[str, str], list[Holder]] = {}
    for holder in device.holders or ():
        pods.setdefault((holder.namespace, holder.pod), []).append(holder)
    if not pods:
        yield Share(NOBODY, "", 1.0, utilization)
    parts = {pod: known_part(holders) for pod, holders in pods.items()}
    for (namespace, pod), holders in pods.items():
        workload = holders[0].workload
        name = f"{workload.kind}/{workload.name}" if workload else f"Pod/{pod}"
        used = parts[namespace, pod]
        if utilization is not None and set(parts.values()) == {None}:
            used = utilization / len(pods)
        yield Share(namespace, name, 1 / len(pods), used)


def known_part(holders: Iterable[Holder]) -> float | None:
    """A pod's part of the device's utilization: the sum over its containers."""
    given_parts = [holder.parts.utilization_ratio for holder in holders if holder.parts]
    known = [part for part in given_parts if part is not None]
    return sum(known) if known else None


def devices(tick: Tick) -> Iterator[tuple[str, Device]]:
    """The devices that can be held, with their kind: a GPU in MIG mode is not one, its MIG devices are."""
    parents = {device.mig.parent_uuid for device in tick.devices or () if device.mig}
    for device in tick.devices or ():
        if device.uuid not in parents:
            yield ("GPU" if device.mig is None else device.mig.profile or "MIG"), device


def count(database: sqlite3.Connection, values: Iterable[bytes | None]) -> None:
    """Add records to the sums, except those that were counted before."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        for value in values:
            try:
                tick = decoder.decode(value or b"")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("skipped what is no record of gpu.attributed: %s", error)
            else:
                _count(database, tick)


def is_replay(last: LastTick, tick: Tick) -> bool:
    """Whether the tick has come before: in the same run by its number, in another run by its offset and its time."""
    if tick.run_id == last.run_id:
        return tick.seq <= last.seq
    return tick.offset <= last.offset and tick.ts_ms <= last.newest_ts_ms


def _count(database: sqlite3.Connection, tick: Tick) -> None:
    node = (tick.cluster, tick.node)
    row = database.execute(LAST, node).fetchone()
    last = LastTick(*row) if row else None
    if last and is_replay(last, tick):
        return
    newest_ts_ms = max(tick.ts_ms, last.newest_ts_ms) if last else tick.ts_ms
    current = LastTick(tick.run_id, tick.seq, tick.offset, newest_ts_ms, tick.ts_ms)
    database.execute("REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?)", (*node, *current))
    since_ms = tick.ts_ms - last.ts_ms if last and tick.run_id == last.run_id else 0
    if not 0 < since_ms <= max(LONGEST_TICK_MS, 3 * (tick.interval_ms or 0)):
        return  # the first tick of a run, or the first after a gap
    seconds = since_ms / 1000
    for kind, device in devices(tick):
        for namespace, workload, held_ratio, used in shares(tick, device):
            measured_and_used = (0.0, 0.0) if used is None else (held_ratio * seconds, used * seconds)
            key = (tick.ts_ms, tick.cluster, namespace, workload, kind)
            database.execute(ADD, (*key, held_ratio * seconds, *measured_and_used))


async def consume(kafka: str, topic: str, group: str, database: sqlite3.Connection, stop: asyncio.Event) -> None:
    """Count until `stop`. An offset is committed to Kafka only after its record is in the database."""
    consumer: Any = AIOKafkaConsumer(
        topic,
        bootstrap_servers=kafka,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,  # it would commit what has been read, not what has been counted
        isolation_level="read_committed",  # not the records of an aborted transaction
        max_partition_fetch_bytes=4 << 20,  # the largest record
    )
    await consumer.start()
    try:
        while not stop.is_set():
            batches = await consumer.getmany(timeout_ms=1000, max_records=2000)
            if not batches:
                continue
            values = [record.value for batch in batches.values() for record in batch]
            await asyncio.to_thread(count, database, values)
            try:
                await consumer.commit({tp: batch[-1].offset + 1 for tp, batch in batches.items()})
            except (CommitFailedError, IllegalStateError):
                log.info("a rebalance took the partitions: who has them now reads this again, and drops it")
    finally:
        await consumer.stop()


def report(database: sqlite3.Connection) -> None:
    """Print the sums over all hours."""
    for namespace, workload, device, hours, busy in database.execute(REPORT):
        used = "-" if busy is None else f"{busy:.0%}"
        sys.stdout.write(f"{namespace:20} {workload:45} {device:8} {hours:10.4f} h {used:>5}\n")


async def main() -> None:
    """Count until Ctrl-C or SIGTERM, then print the sums."""
    parser = argparse.ArgumentParser(description="GPU time per hour, namespace and workload.")
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--database", default="gpu-hours.db")
    parser.add_argument("--group", default="gpu-hours")
    parser.add_argument("--topic-prefix", default=os.environ.get("GPUSTREAM_TOPIC_PREFIX", ""))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("aiokafka").setLevel(logging.WARNING)  # or it lists all partitions at each rebalance
    database = sqlite3.connect(options.database, isolation_level=None, check_same_thread=False)
    database.executescript(SCHEMA)
    stop = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    prefix = options.topic_prefix
    await consume(options.kafka, f"{prefix}gpu.attributed", prefix + options.group, database, stop)
    report(database)


if __name__ == "__main__":
    asyncio.run(main())
