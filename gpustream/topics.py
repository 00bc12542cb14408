"""``gpustream topics create`` and ``gpustream topics list``.

In:       a broker's address.
Out:      lines on standard output: a table on a terminal, tab-separated fields elsewhere.
On failure: what is wrong, on standard error, and exit code 1.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import click

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import TopicDescription
from delivery.topic_admin import Mismatch
from gpustream.command import KAFKA, LOG_FORMAT, Command, CommandGroup, option
from gpustream.output import FAILED, answer, show
from topics.topic import PARTITIONS, REPLICATION_FACTOR, Topic

COLUMNS = ("topic", "key", "partitions", "cleanup", "retention", "as it must be")


@click.group(cls=CommandGroup)
def topics() -> None:
    """Create the topics, or compare them with what they should be."""


@topics.command(cls=Command, example="gpustream topics create --kafka 127.0.0.1:9092 --replication-factor 1")
@KAFKA
@option("--partitions", type=click.IntRange(min=1), default=PARTITIONS, help="Of every topic; can't grow later.")
@option(
    "--replication-factor", type=click.IntRange(min=1), default=REPLICATION_FACTOR, help="Copies of every partition."
)
@option(
    "--recreate-empty",
    is_flag=True,
    help="Delete topics that have another number of partitions and create them again, if they hold no record.",
)
@LOG_FORMAT
def create(
    connection: Connection,
    partitions: int,
    replication_factor: int,
    recreate_empty: bool,
) -> None:
    """Create the topics that are missing, and mend the settings of those that are there. Partitions never change."""
    changes = answer(topic_admin.create(connection, partitions, replication_factor, recreate_empty=recreate_empty))
    for line in changes or ["every topic is there, as it must be"]:
        click.echo(line)


@topics.command("list", cls=Command, example="gpustream topics list --kafka 127.0.0.1:9092")
@KAFKA
@LOG_FORMAT
def list_(connection: Connection) -> None:
    """Compare the broker's topics with what they should be. Exit code 1 if any differs or is missing."""
    found, unchecked = answer(topic_admin.inspect(connection))
    wanted = list(topic_admin.contract(connection).values())
    wrong = topic_admin.mismatches(wanted, found)
    show(COLUMNS, rows(wanted, found, wrong), lambda row: "" if row.verdict == "yes" else "red")
    if unchecked is not None:
        click.echo(f"settings were not compared: {unchecked}", err=True)
    raise SystemExit(FAILED if wrong else 0)


class TopicRow(NamedTuple):
    """A topic of the contract beside the broker's."""

    topic: str
    key: str
    partitions: str
    cleanup: str
    retention: str
    verdict: str


def rows(wanted: Iterable[Topic], found: Mapping[str, TopicDescription], wrong: Iterable[Mismatch]) -> list[TopicRow]:
    """A row per topic of the contract, in the order of the flow."""
    mistakes: dict[str, list[str]] = {}
    for one in wrong:
        said = "missing" if one.have == "missing" else f"{one.what} is {one.have}, must be {one.want}"
        mistakes.setdefault(one.topic, []).append(said)
    return [
        TopicRow(
            topic=topic.name,
            key=topic.key,
            partitions=str(found[topic.name].partitions) if topic.name in found else "-",
            cleanup=topic.cleanup,
            retention="for ever" if topic.retention_hours is None else f"{topic.retention_hours} h",
            verdict="; ".join(mistakes.get(topic.name, [])) or "yes",
        )
        for topic in wanted
    ]
