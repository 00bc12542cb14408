"""Two pipelines on one Kafka, kept apart by ``--topic-prefix``."""

import asyncio
import json
import subprocess
import sys

from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from delivery.connection import Connection
from tests.real.pipeline import read_all
from tests.real.servers import ASK_TIMEOUT_S, KafkaServer
from topics import TOPICS

PIPELINES = {"team-a.": "east", "team_b-": "west"}
GROUPS = ("gpustream-attribution", "gpustream-alerts", "gpustream-sink-scrape")


async def test_two_pipelines_with_prefixes_share_a_kafka_and_no_record_topic_or_group(empty_kafka: KafkaServer) -> None:
    for prefix in PIPELINES:
        connection = Connection(empty_kafka.address, topic_prefix=prefix)
        await topic_admin.create(connection, partitions=2, replication_factor=1)
    async with AIOKafkaProducer(bootstrap_servers=empty_kafka.address) as producer:
        await producer.send_and_wait("team-a.gpu.samples", b"not a sample", key=b"east/sim-0000", partition=1)

    summaries = dict(
        zip(PIPELINES, await asyncio.gather(*(run(empty_kafka, prefix) for prefix in PIPELINES)), strict=True)
    )

    assert [summary["dead_lettered"] for summary in summaries.values()] == [1, 0]
    assert set(empty_kafka.topics()) == {prefix + topic for prefix in PIPELINES for topic in TOPICS}
    admin = empty_kafka.admin()
    groups = admin.list_consumer_groups().result(ASK_TIMEOUT_S).valid
    assert {group.group_id for group in groups} == {prefix + group for prefix in PIPELINES for group in GROUPS}
    for prefix, cluster in PIPELINES.items():
        attributed = [
            json.loads(record.value) for record in await read_all(empty_kafka.address, f"{prefix}gpu.attributed")
        ]
        assert len({(one["node"], one["run_id"], one["seq"]) for one in attributed}) == summaries[prefix]["ticks"] > 0
        assert {one["cluster"] for one in attributed} == {cluster}
    (letter,) = await read_all(empty_kafka.address, "team-a.gpu.dead-letters")
    assert dict(letter.headers)["topic"] == b"team-a.gpu.samples"


async def run(kafka: KafkaServer, prefix: str) -> dict[str, int]:
    """A whole pipeline with a prefix for 3 s; its summary."""
    at = ("--kafka", kafka.address, "--topic-prefix", prefix, "--cluster", PIPELINES[prefix])
    how = ("--simulate", "2x2", "--interval", "200ms", "--duration", "3s", "--summary", "json")
    nowhere = ("--listen", "off", "--scrape-listen", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpustream", "run", *at, *how, *nowhere, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    summary: dict[str, int] = json.loads(out.splitlines()[-1])
    return summary
