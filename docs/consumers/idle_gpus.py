# /// script
# requires-python = ">=3.11"
# dependencies = ["cramjam>=2.14", "faust-streaming>=0.15", "msgspec>=0.22"]
# ///
"""The pods that hold idle GPUs right now: an ordinary Faust agent, and a page with the result.

    KAFKA=127.0.0.1:9092 uv run idle_gpus.py worker --web-port 6066
    curl http://127.0.0.1:6066/idle/

In: gpu.attributed, from its end. Out: the page, with a row for each pod that holds a GPU which has long been idle.
State: the last tick of each node, in memory. A worker that gets a partition has a tick of all its nodes an interval
later. So nothing has to be stored, and records that the agent misses at a rebalance do no harm.
On failure: a malformed record is logged and skipped. One with a header whose name is no UTF-8, which gpustream never
writes, ends each start: aiokafka can't read it.

It needs no code of gpustream: the types below are the part of topics/schemas/gpu.attributed.json that it reads.
"""

import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple

import faust
import msgspec

TOPIC_PREFIX = os.environ.get("GPUSTREAM_TOPIC_PREFIX", "")
IDLE_BELOW = 0.05
IDLE_AFTER_MS = 1000 * int(os.environ.get("IDLE_AFTER_SECONDS", "600"))
FORGET_AFTER_S = 60.0
"""A node without a tick for this time, and for three of its intervals, is down, or another worker reads it now."""

log = logging.getLogger("idle_gpus")

Pods = frozenset[tuple[str, str]]


class Holder(msgspec.Struct):
    """A container that holds a device."""

    namespace: str
    pod: str


class Device(msgspec.Struct):
    """A GPU or a MIG device, in one tick."""

    uuid: str
    metrics: dict[str, float | None] | None = None
    holders: list[Holder] | None = None


class Tick(msgspec.Struct):
    """A record of gpu.attributed: one reading of a node."""

    schema: Literal[1]
    cluster: str
    node: str
    run_id: int
    seq: int
    ts_ms: int
    offset: int
    interval_ms: int | None = None
    devices: list[Device] | None = None


decoder = msgspec.json.Decoder(Tick)


class Idle(NamedTuple):
    """The pods that hold an idle device, and the time since which they hold it idle."""

    since_ms: int
    pods: Pods


class Node(NamedTuple):
    """A node's last tick, the latest time of any tick, the idle devices by UUID, and the local time of receipt."""

    tick: Tick
    newest_ts_ms: int
    idle: dict[str, Idle]
    received_s: float

    def is_gone(self, now_s: float) -> bool:
        """Whether its next tick is long overdue."""
        return now_s - self.received_s > max(FORGET_AFTER_S, 3 * (self.tick.interval_ms or 0) / 1000)


nodes: dict[tuple[str, str], Node] = {}


def add_record(value: bytes | None, now_s: float) -> None:
    """Decode a record and keep its tick.

    A malformed record is skipped here: an exception in the agent's loop would lose other records.
    """
    try:
        add_tick(decoder.decode(value or b""), now_s)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("skipped what is no record of gpu.attributed: %s", error)


def is_replay(last: Node, tick: Tick) -> bool:
    """Whether the tick has come before: in the same run by its number, in another run by its offset and its time."""
    if tick.run_id == last.tick.run_id:
        return tick.seq <= last.tick.seq
    return tick.offset <= last.tick.offset and tick.ts_ms <= last.newest_ts_ms


def add_tick(tick: Tick, now_s: float) -> None:
    """Keep a tick, unless it is a replay."""
    last = nodes.get((tick.cluster, tick.node))
    if last and is_replay(last, tick) and not last.is_gone(now_s):
        return
    before = last.idle if last and last.tick.run_id == tick.run_id else {}
    idle: dict[str, Idle] = {}
    for device in filter(is_idle, tick.devices or ()):
        pods = frozenset((holder.namespace, holder.pod) for holder in device.holders or ())
        idle_before = before.get(device.uuid)
        idle[device.uuid] = idle_before if idle_before and idle_before.pods == pods else Idle(tick.ts_ms, pods)
    newest_ts_ms = max(tick.ts_ms, last.newest_ts_ms) if last else tick.ts_ms
    nodes[tick.cluster, tick.node] = Node(tick, newest_ts_ms, idle, now_s)


def is_idle(device: Device) -> bool:
    """Whether a pod holds the device and nothing uses it. Never true of MIG devices: NVML does not report their use."""
    utilization = (device.metrics or {}).get("gpu_utilization_ratio")
    return bool(device.holders) and utilization is not None and utilization < IDLE_BELOW


def rows(now_s: float) -> list[dict[str, Any]]:
    """A row for each idle device and pod that holds it, the longest idle first."""
    for name in [name for name, node in nodes.items() if node.is_gone(now_s)]:
        del nodes[name]
    idle_rows = [
        {
            "cluster": node.tick.cluster,
            "node": node.tick.node,
            "uuid": uuid,
            "namespace": namespace,
            "pod": pod,
            "idle_seconds": (node.tick.ts_ms - idle.since_ms) / 1000,
            "ts_ms": node.tick.ts_ms,
        }
        for node in nodes.values()
        for uuid, idle in node.idle.items()
        for namespace, pod in idle.pods
        if node.tick.ts_ms - idle.since_ms >= IDLE_AFTER_MS
    ]
    return sorted(idle_rows, key=lambda row: -row["idle_seconds"])


app = faust.App(
    TOPIC_PREFIX + "idle-gpus",
    broker="kafka://" + os.environ.get("KAFKA", "127.0.0.1:9092").replace(",", ";kafka://"),
    consumer_auto_offset_reset="latest",
    consumer_max_fetch_size=8 << 20,  # with less, a worker waits most of the time
    topic_allow_declare=False,  # the topic is gpustream's: never create it
    topic_disable_leader=True,
)
attributed = app.topic(TOPIC_PREFIX + "gpu.attributed", key_type=bytes, value_type=bytes, value_serializer="raw")


@app.agent(attributed)  # type: ignore[untyped-decorator]
async def watch(values: AsyncIterator[bytes | None]) -> None:
    """Keep the last tick of each node."""
    async for value in values:
        add_record(value, time.monotonic())


@app.page("/idle/")  # type: ignore[untyped-decorator]
async def idle_page(view: Any, request: Any) -> Any:
    """The rows, as JSON."""
    del request
    return view.json(rows(time.monotonic()))


if __name__ == "__main__":
    app.main()
