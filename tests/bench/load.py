"""A fleet of any size from some nodes of a simulated one, repeated under other names: cheap enough to be beside what is
measured. Each node has 8 whole GPUs with processes, a quarter of the held ones by several pods.
"""

import re
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import orjson
from confluent_kafka import Producer

from tests.bench.attribution import records
from topics.topic import node_key

MADE, READINGS = 100, 2
WARM = READINGS + 1
"""After so many ticks of a node, what is kept of it has been made."""

WAIT_S = 120.0
SEEN_S = 3.0
"""A sample sees the workloads that were logged 2 s before it: with others all its series would change once."""

_UUID = re.compile(rb'"(GPU|MIG)-[0-9a-f]{8}')


class Node(NamedTuple):
    """What a node's producers send: who holds its GPUs, which stays as it is, and some seconds of its samples."""

    key: bytes
    workloads: bytes
    allocations: bytes
    head: bytes
    readings: tuple[bytes, ...]

    def sample(self, seq: int, ts_ms: int) -> bytes:
        """The record of gpu.samples of a tick."""
        return b'%s"seq":%d,"ts_ms":%d,%s' % (self.head, seq, ts_ms, self.readings[seq % len(self.readings)])


async def fleet(count: int, interval_s: float = 1.0) -> list[Node]:
    """So many nodes, which say that they read their GPUs that often."""
    by_node: dict[bytes, dict[str, list[bytes]]] = {}
    async for topic, key, value in records(MADE * READINGS, MADE):
        by_node.setdefault(key, {}).setdefault(topic, []).append(value)
    return [_node(number, list(by_node.values())[number % MADE], interval_s) for number in range(count)]


def _node(number: int, values: dict[str, list[bytes]], interval_s: float) -> Node:
    """One of the made ones with a name and UUIDs of its own: ticks name the first allocations, and pods never end."""
    name = f"node-{number:05}"

    def renamed(content: dict[str, object]) -> bytes:
        return _UUID.sub(rb'"\1-%08x' % number, orjson.dumps(content))

    samples = [orjson.loads(value) for value in values["gpu.samples"]]
    allocations, workloads = orjson.loads(values["gpu.allocations"][0]), orjson.loads(values["gpu.workloads"][-1])
    last_lives = {(pod["namespace"], pod["name"]): {**pod, "ended_ms": None} for pod in workloads["pods"]}
    head = {key: value for key, value in samples[0].items() if key not in ("seq", "ts_ms", "devices")}
    head["interval_ms"] = round(interval_s * 1000)
    return Node(
        key=node_key("default", name),
        workloads=renamed({**workloads, "node": name, "pods": list(last_lives.values())}),
        allocations=renamed({**allocations, "node": name}),
        head=renamed({**head, "node": name, "allocations_seq": 1})[:-1] + b",",
        readings=tuple(renamed({"devices": sample["devices"]})[1:] for sample in samples),
    )


class Replay:
    """Writes what nodes send as their producers do, but with one client: a batch waits for 5 ms."""

    def __init__(self, kafka: str, prefix: str, nodes: Iterable[Node]) -> None:
        self.nodes = list(nodes)
        self._prefix = prefix
        self._producer = Producer(
            {
                "bootstrap.servers": kafka,
                "partitioner": "murmur2_random",
                "compression.type": "zstd",
                "linger.ms": 5,
                "log_level": 2,  # or it says that Kafka has been stopped
                "queue.buffering.max.kbytes": 256 << 10,
            }
        )
        for node in self.nodes:
            self.send("gpu.workloads", node.key, node.workloads)
            self.send("gpu.allocations", node.key, node.allocations)
        self.flush()
        time.sleep(SEEN_S)

    def send(self, topic: str, key: bytes, value: bytes) -> None:
        """Queue a record; waits while the queue is full."""
        while True:
            try:
                self._producer.produce(self._prefix + topic, value, key)
                return
            except BufferError:
                self._producer.poll(0.05)

    def tick(self, node: Node, seq: int, ts_ms: int) -> None:
        """Queue a node's tick."""
        self.send("gpu.samples", node.key, node.sample(seq, ts_ms))

    def ticks(self, seqs: range, count: int) -> None:
        """Write ticks of all nodes, of which the last, the ``of``-th, is of now."""
        end_ms = time.time_ns() // 1_000_000
        for seq in seqs:
            for node in self.nodes:
                self.tick(node, seq, end_ms - (count - seq) * 1000)
        self.flush()

    def flush(self) -> None:
        """Wait until the broker has all of it; raises ``TimeoutError`` if it never has."""
        if self._producer.flush(WAIT_S):
            raise TimeoutError("the broker does not take the records")

    def steadily(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Each node's tick in every interval after the first ``WARM``, spread over it, until ``stop`` is set."""
        began_s, sent = time.time(), 0
        while not stop.is_set():
            due = int((time.time() - began_s) / interval_s * len(self.nodes))
            for number in range(sent, due):
                round_, index = divmod(number, len(self.nodes))
                self.tick(self.nodes[index], round_ + WARM + 1, time.time_ns() // 1_000_000)
            sent = due
            self._producer.poll(0)
            time.sleep(0.005)
        self.flush()
