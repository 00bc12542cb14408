"""What the last leader published: the next one reads it back from gpu.workloads before it writes.

In: the records of a cluster of the last half hour. Out: each node's pods, as they were last published.
On failure: it waits for a broker that is away, because nothing can be sent without one. If reading is not allowed,
or takes longer than 30 s after the broker's first answer, the leader goes on without them, and the log says so. Pods
that ended before this process began to watch are then not published again, and their ends stay in the log.
"""

import asyncio
import logging

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from delivery import clients, positions, topic_admin
from delivery.clients import Offsets, from_kafka
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.kafka_errors import describe
from topics.times import MAX_TIME_MS
from topics.topic import decoder
from topics.workloads import TOPIC, NodeWorkloads, Pod

log = logging.getLogger(__name__)
WITHIN_S = 30.0  # how long reading back may take, since a broker answered
_FETCH_MS = 500

_decode = decoder(NodeWorkloads)


class PublishedNode(msgspec.Struct):
    """What was published of a node: the epoch and seq of its last record, whether that record removed the node, and its
    pods by uid, those that ended included."""

    last: tuple[int, int]
    removed: bool
    pods: dict[str, Pod]


class PublishedNodes:
    """What was published of the nodes of ``cluster``. Its records are added in the order of the log."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self.nodes: dict[str, PublishedNode] = {}

    def add(self, value: bytes | None) -> None:
        """Add the next record. One that can't be decoded, or that an older leader wrote, is ignored."""
        try:
            record = _decode(value or b"")
        except msgspec.DecodeError:
            return
        previous = self.nodes.get(record.node)
        if record.cluster != self._cluster or (previous and record.order <= previous.last):
            return
        pods = {pod.uid: pod for pod in record.pods}
        for uid, pod in previous.pods.items() if previous else ():
            if uid not in pods:  # to a reader, a pod that is missing has ended
                ended_ms = record.ts_ms if pod.ended_ms is None else pod.ended_ms
                pods[uid] = msgspec.structs.replace(pod, ended_ms=ended_ms)
        self.nodes[record.node] = PublishedNode(record.order, record.removed, pods)

    def epoch_after(self, epoch: int) -> int:
        """``epoch``, or the next one after those that were published: readers ignore records of an older one. There may
        have been another Lease, or none, and clocks may differ. An epoch that is no time is not followed."""
        return max([epoch, *[node.last[0] + 1 for node in self.nodes.values() if node.last[0] < MAX_TIME_MS]])


async def read_back(connection: Connection, since_ms: int, published: PublishedNodes) -> None:
    """Add the records with a log time of ``since_ms`` or later, up to the present end of the topic."""
    topic, consumer = connection.prefixed(TOPIC.name), await clients.connect_consumer(connection)
    try:
        async with asyncio.timeout(WITHIN_S):
            descriptions, _ = await topic_admin.inspect(connection, [TOPIC.name])
            if topic not in descriptions:
                return
            partitions = [TopicPartition(topic, number) for number in range(descriptions[topic].partitions)]
            begins, ends = await consumer.beginning_offsets(partitions), await consumer.end_offsets(partitions)
            offset_lookup, starts = Offsets(connection, consumer).offsets_at, {}
            for tp in partitions:  # before any is assigned: behind a fetch that waits, each answer takes half a second
                partition = from_kafka(connection, tp)
                starts[tp] = await positions.offset_since(offset_lookup, partition, since_ms, begins[tp], ends[tp])
            consumer.assign(partitions)
            for tp, start in starts.items():
                consumer.seek(tp, start)
            while unread := [tp for tp in partitions if await consumer.position(tp) < ends[tp]]:
                for batch in (await consumer.getmany(*unread, timeout_ms=_FETCH_MS)).values():
                    for record in batch:
                        published.add(record.value)
    except TimeoutError:
        log.warning("%s: not read back within %g s; going on without the rest of it", topic, WITHIN_S)
    except TopicAuthorizationFailedError as error:
        log.warning("%s: it may not be read back: allow READ on the topic (%s)", topic, describe(error))
    except (BrokerError, KafkaError) as error:
        log.warning("%s: not read back, going on without it: %s", topic, describe(error))
    finally:
        await clients.close(consumer)
