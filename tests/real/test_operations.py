"""The commands of docs/operations on a real Kafka, in their order; those of kubectl and Helm are in test_installing."""

import asyncio
import json
import re
import shlex
from pathlib import Path

import click
from click.testing import CliRunner

from delivery import topic_admin
from delivery.connection import Connection
from gpustream.cli import main
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.docs.page import blocks
from tests.eventually import eventually
from tests.real.pipeline import Truth, read_all, running
from tests.real.servers import KafkaServer
from topics import TOPICS

RUN_LONG = ("produce", "stream", "sink")
BLOCKS = blocks("operations/README.md", "sh", indented=True)
LINES = [line.strip() for block in BLOCKS for line in block.text.splitlines()]
HERE = [line for line in LINES if line.startswith("gpustream")]
KUBERNETES = [line for line in LINES if line.startswith(("kubectl", "helm"))]


def words_of(line: str, kafka: str) -> list[str]:
    return [kafka if word in ("$KAFKA", "$NEW") else word for word in shlex.split(line, comments=True)][1:]


def test_every_line_is_tried() -> None:
    assert len(HERE) > 15
    assert [line for line in LINES if line not in HERE + KUBERNETES and not line.startswith("kafka-topics.sh")] == []


async def test_each_command_runs_on_a_real_kafka_in_the_order_of_the_page(empty_kafka: KafkaServer) -> None:
    for line in HERE:
        words = words_of(line, empty_kafka.address)
        if words[0] in RUN_LONG:
            _parse(main, words)
            continue
        done = await asyncio.to_thread(CliRunner().invoke, main, words)
        if words[0] == "doctor":
            assert done.exit_code in (0, 1), (line, done.output)
            assert "no tick came in" in done.output or '"ok":' in done.output, (line, done.output)
        else:
            assert done.exit_code == 0, (line, done.output)
    (delete,) = [line for line in LINES if line.startswith("kafka-topics.sh")]
    pattern = words_of(delete, empty_kafka.address)[-1]
    assert {one for one in empty_kafka.topics() if re.fullmatch(pattern, one)} == set(TOPICS)


def _parse(command: click.Command | None, words: list[str]) -> None:
    """A component's command line is right."""
    while isinstance(command, click.Group):
        name, *words = words
        command = command.get_command(click.Context(command), name)
    assert command is not None
    command.make_context(command.name, words)


async def test_nodes_move_to_more_partitions_without_a_lost_tick(empty_kafka: KafkaServer, tmp_path: Path) -> None:
    kafka = empty_kafka.address
    truths = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    prefixes = ["", "wide."]
    for prefix, partitions in zip(prefixes, (2, 4), strict=True):
        await topic_admin.create(Connection(kafka, topic_prefix=prefix), partitions, 1)
    streams = [Attribution(AttributionSettings(kafka=kafka, topic_prefix=prefix)) for prefix in prefixes]
    async with running(*streams):
        for prefix, truth in zip(prefixes, truths, strict=True):
            settings = SimulatedSettings(
                kafka=kafka, topic_prefix=prefix, fleet="3x2", interval_s=0.1, stop_after_ticks=10, truth=truth
            )
            await SimulatedFleet(settings).run(asyncio.Event())
        sampled = Truth.read(*truths).ticks

        async def all_there() -> bool:
            return set(await _ticks(kafka, prefixes)) == sampled

        await eventually(all_there)
    found = await _ticks(kafka, prefixes)
    assert len(found) == len(sampled) == 60


async def _ticks(kafka: str, prefixes: list[str]) -> list[tuple[str, str, int, int]]:
    """Every tick in gpu.attributed of these prefixes."""
    rows = [json.loads(row.value) for one in prefixes for row in await read_all(kafka, f"{one}gpu.attributed")]
    return [(row["cluster"], row["node"], row["run_id"], row["seq"]) for row in rows]
