"""Two pipelines on one Kafka, kept apart by ``--topic-prefix``, and each with its ``--compression``."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from tests.eventually import eventually
from tests.real.contents import codecs
from tests.real.pipeline import Gpustream, lag, read_all, stored
from tests.real.servers import ASK_TIMEOUT_S, KafkaServer, PrometheusServer
from topics import TOPICS

GROUPS = ("gpustream-attribution", "gpustream-alerts", "gpustream-usage", "gpustream-sink-scrape")


class Pipeline(NamedTuple):
    """The options of one of the pipelines."""

    prefix: str
    cluster: str
    compression: str


EAST, WEST = Pipeline("team-a.", "east", "zstd"), Pipeline("team_b-", "west", "gzip")

Summaries = dict[Pipeline, dict[str, Any]]


@pytest.fixture(scope="module")
def groups_before(kafka: KafkaServer) -> set[str]:
    """The groups of other tests, whose members have not left yet; the broker is empty otherwise."""
    kafka.empty()
    return groups(kafka)


@pytest.fixture(scope="module")
def summaries(kafka: KafkaServer, groups_before: set[str]) -> Summaries:
    """The summaries of both pipelines. The samples of the first one have a malformed record."""

    async def run_both() -> Summaries:
        await asyncio.gather(*(create_topics(kafka, pipeline) for pipeline in (EAST, WEST)))
        async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
            await producer.send_and_wait(f"{EAST.prefix}gpu.samples", b"not a sample", key=b"east/sim-0000")
        return dict(zip((EAST, WEST), await asyncio.gather(run(kafka, EAST), run(kafka, WEST)), strict=True))

    return asyncio.run(run_both())


def groups(kafka: KafkaServer) -> set[str]:
    """The consumer groups that the broker has."""
    admin = kafka.admin()
    return {group.group_id for group in admin.list_consumer_groups().result(ASK_TIMEOUT_S).valid}


async def test_two_pipelines_share_a_kafka_and_no_record_topic_or_group(
    kafka: KafkaServer, summaries: Summaries, groups_before: set[str]
) -> None:
    assert set(kafka.topics()) == {pipeline.prefix + topic for pipeline in summaries for topic in TOPICS}
    assert groups(kafka) - groups_before == {pipeline.prefix + group for pipeline in summaries for group in GROUPS}
    for pipeline, summary in summaries.items():
        attributed = [
            json.loads(record.value) for record in await read_all(kafka.address, f"{pipeline.prefix}gpu.attributed")
        ]
        assert len({(sample["node"], sample["run_id"], sample["seq"]) for sample in attributed}) == summary["ticks"] > 0
        assert {sample["cluster"] for sample in attributed} == {pipeline.cluster}


async def test_a_dead_letter_names_the_topic_as_kafka_knows_it(kafka: KafkaServer, summaries: Summaries) -> None:
    assert (summaries[EAST]["dead_lettered"], summaries[WEST]["dead_lettered"]) == (1, 0)
    (letter,) = await read_all(kafka.address, f"{EAST.prefix}gpu.dead-letters")
    assert dict(letter.headers)["topic"] == f"{EAST.prefix}gpu.samples".encode()


def test_everything_that_a_pipeline_writes_is_compressed_as_its_options_say(
    kafka: KafkaServer, summaries: Summaries
) -> None:
    for pipeline in summaries:
        assert codecs(kafka, f"{pipeline.prefix}gpu.samples") - {"none"} == {
            pipeline.compression
        }  # "none" is the record that is none
        assert codecs(kafka, f"{pipeline.prefix}gpu.attributed") == {pipeline.compression}
        used_codecs = set.union(*(codecs(kafka, pipeline.prefix + topic) for topic in TOPICS))
        assert used_codecs - {"none"} == {pipeline.compression}  # what compression does not make smaller stays as it is


async def create_topics(kafka: KafkaServer, pipeline: Pipeline) -> None:
    """The topics of a pipeline, by the command."""
    options = ("--partitions", "2", "--replication-factor", "1")
    await command("topics", "create", "--kafka", kafka.address, "--topic-prefix", pipeline.prefix, *options)


async def run(kafka: KafkaServer, pipeline: Pipeline) -> dict[str, Any]:
    """A whole pipeline for 3 s; its summary."""
    common_options = (
        "--kafka",
        kafka.address,
        "--topic-prefix",
        pipeline.prefix,
        "--compression",
        pipeline.compression,
    )
    run_options = (
        "--cluster",
        pipeline.cluster,
        "--simulate",
        "2x2",
        "--interval",
        "200ms",
        "--duration",
        "3s",
        "--summary",
        "json",
    )
    output = await command(
        "run",
        *common_options,
        *run_options,
        "--listen",
        "off",
        "--page-listen",
        "off",
        "--scrape-listen",
        "127.0.0.1:0",
    )
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary


async def command(*arguments: str) -> bytes:
    """The output of a command that must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpustream", *arguments, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


async def test_a_copy_at_other_offsets_with_records_twice_is_delivered_once_and_can_be_read_again(
    kafka: KafkaServer, summaries: Summaries, prometheus: PrometheusServer, gpustream: Callable[..., Gpustream]
) -> None:
    """What MirrorMaker does: the same keys and partitions, other offsets, and after its restart some records again."""
    copied = Pipeline("copy.", EAST.cluster, EAST.compression)
    await create_topics(kafka, copied)
    records = await read_all(kafka.address, f"{EAST.prefix}gpu.attributed")
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for partition in {record.partition for record in records}:
            of_partition = [record for record in records if record.partition == partition]
            for record in (*of_partition[: len(of_partition) // 2], *of_partition[len(of_partition) // 4 :]):
                await producer.send_and_wait("copy.gpu.attributed", record.value, record.key, partition)
    options = ("--kafka", kafka.address, "--topic-prefix", copied.prefix, "--from", "earliest")
    with gpustream("sink", "sink", "remote-write", *options, "--url", prometheus.write_url):
        await eventually(partial(caught_up, kafka), "the copy is delivered")
    ticks = [json.loads(record.value) for record in records]
    delivered = {
        (tick["cluster"], tick["node"], device["uuid"], tick["ts_ms"])
        for tick in ticks
        for device in tick["devices"]
        if "memory_used_bytes" in device["metrics"]
    }
    assert stored(prometheus, "gpu_memory_used", EAST.cluster, "1h").keys() == delivered
    assert await read_all(kafka.address, "copy.gpu.dead-letters") == []


async def caught_up(kafka: KafkaServer) -> bool:
    """Whether the sink of the copy has committed all of it."""
    return await lag(kafka.address, "copy.gpustream-sink-remote-write", ["copy.gpu.attributed"]) == 0
