"""What a leader reported is read back by the next one, on Apache Kafka."""

import asyncio
import time

import orjson

from producers.cluster.takeover import PublishedNodes, read_back
from tests.real.pipeline import sender_to
from tests.real.servers import KafkaServer
from topics.topic import node_key

PARTITIONS = 4


def record(node: str, seq: int) -> bytes:
    pods = [{"namespace": "ml", "name": f"p{seq}", "uid": f"{node}-{seq}"}]
    head = {"schema": 1, "cluster": "prod", "node": node, "epoch": 1, "seq": seq, "ts_ms": 1000 * seq}
    return orjson.dumps({**head, "pods": pods})


async def test_all_partitions_are_read_back_to_their_ends_and_from_the_time_that_was_asked_for(
    empty_kafka: KafkaServer,
) -> None:
    before_the_topic = PublishedNodes("prod")
    await read_back(empty_kafka.connection, 0, before_the_topic)
    assert before_the_topic.nodes == {}

    empty_kafka.create_topics({"gpu.workloads": PARTITIONS}, {"message.timestamp.type": "LogAppendTime"})
    nodes = [f"n{number}" for number in range(50)]
    async with sender_to(empty_kafka.connection) as sender:
        between_ms = 0
        for seq in (1, 2):
            futures = [
                await sender.send("gpu.workloads", record(node, seq), key=node_key("prod", node))
                for node in nodes
                if (node, seq) != ("n0", 2)
            ]
            await asyncio.gather(*futures)
            if seq == 1:
                await asyncio.sleep(0.01)
                between_ms = int(time.time() * 1000)

    all_of_it, second = PublishedNodes("prod"), PublishedNodes("prod")
    await read_back(empty_kafka.connection, 0, all_of_it)
    await read_back(empty_kafka.connection, between_ms, second)
    assert set(all_of_it.nodes) == set(nodes)
    assert set(second.nodes) == set(nodes) - {"n0"}
    assert {uid: pod.ended_ms for uid, pod in all_of_it.nodes["n1"].pods.items()} == {"n1-1": 2000, "n1-2": None}
    assert list(second.nodes["n1"].pods) == ["n1-2"]
