"""The commands of docs/operations on a real Kafka, in their order; those of kubectl and Helm are in test_installing."""

import asyncio
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delivery import topic_admin
from delivery.connection import Connection
from gpustream.cli import main
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.command_line import parsed
from tests.docs.page import blocks
from tests.eventually import eventually
from tests.real.pipeline import Expected, Point, Truth, differences, read_all, running, stored
from tests.real.servers import KafkaServer, PrometheusServer
from topics import TOPICS

RUN_LONG = ("produce", "stream", "sink")
ONE_BROKER = ("--partitions", "4", "--replication-factor", "1")
BLOCKS = blocks("operations/README.md", "sh", indented=True)
LINES = [line.strip() for block in BLOCKS for line in block.text.splitlines()]
COMMANDS_HERE = [line for line in LINES if line.startswith("gpustream")]
KUBERNETES = [line for line in LINES if line.startswith(("kubectl", "helm"))]


def words_of(line: str, kafka: str) -> list[str]:
    """The arguments of a line, for a Kafka of one broker, on which the last of an option counts."""
    words = [kafka if word in ("$KAFKA", "$NEW") else word for word in shlex.split(line, comments=True)][1:]
    return [*words, *ONE_BROKER] if words[:2] == ["topics", "create"] else words


def test_every_line_is_tried() -> None:
    assert len(COMMANDS_HERE) > 15
    others = [line.split()[0] for line in LINES if line not in COMMANDS_HERE + KUBERNETES]
    assert others == ["kafka-configs.sh", "kafka-topics.sh"]


async def test_each_command_runs_on_a_real_kafka_in_the_order_of_the_page(empty_kafka: KafkaServer) -> None:
    for line in COMMANDS_HERE:
        arguments = words_of(line, empty_kafka.address)
        if arguments[0] in RUN_LONG:
            parsed(arguments)
            continue
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        if arguments[0] == "doctor":
            assert result.exit_code in (0, 1), (line, result.output)
            assert "no tick came in" in result.output or '"ok":' in result.output, (line, result.output)
        else:
            assert result.exit_code == 0, (line, result.output)
    (delete,) = [line for line in LINES if line.startswith("kafka-topics.sh")]
    pattern = words_of(delete, empty_kafka.address)[-1]
    assert {topic for topic in empty_kafka.topics() if re.fullmatch(pattern, topic)} == set(TOPICS)


@pytest.mark.parametrize("away", [False, True], ids=["more-partitions", "another-kafka"])
async def test_nodes_move_without_a_lost_tick(
    empty_kafka: KafkaServer, prometheus: PrometheusServer, tmp_path: Path, request: pytest.FixtureRequest, away: bool
) -> None:
    cluster = f"moved-{away}"
    new: KafkaServer = request.getfixturevalue("oldest_kafka") if away else empty_kafka
    places = [Connection(empty_kafka.address), Connection(new.address, topic_prefix="" if away else "wide.")]
    truths = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for site, partitions, truth in zip(places, (2, 4), truths, strict=True):
        options: dict[str, Any] = {"kafka": site.servers, "topic_prefix": site.topic_prefix}
        await topic_admin.create(site, partitions, 1)
        stream = Attribution(AttributionSettings(**options))
        sink = RemoteWriteSink(RemoteWriteSettings(**options, url=prometheus.write_url, from_="earliest"))
        async with running(stream, sink):  # those of the old place end before those of the new one begin
            fleet = SimulatedSettings(
                **options, cluster=cluster, fleet="3x2", interval_s=0.1, stop_after_ticks=10, truth=truth
            )
            await SimulatedFleet(fleet).run(asyncio.Event())
            sampled = Truth.read(*truths[: truths.index(truth) + 1])
            points = sampled.points("utilization_ratio")

            async def all_there(points: Mapping[Point, Expected] = points) -> bool:
                stored_points = await asyncio.to_thread(stored, prometheus, "gpu_utilization", cluster, "10m")
                return len(stored_points) == len(points) > 0

            await eventually(all_there)
    assert differences(points, stored(prometheus, "gpu_utilization", cluster, "10m"), "utilization_ratio") == []
    attributed = {  # each at least once; another test may have left its records on the Kafka of the oldest version
        (decoded["cluster"], decoded["node"], decoded["run_id"], decoded["seq"])
        for site in places
        for record in await read_all(site.servers, f"{site.topic_prefix}gpu.attributed")
        for decoded in [json.loads(record.value)]
        if decoded["cluster"] == cluster
    }
    assert len(sampled.ticks) == 60
    assert attributed == sampled.ticks
