"""``gpustream topics create`` and ``gpustream topics list``.

In:       a broker's address.
Out:      lines on standard output: a table on a terminal, tab-separated fields elsewhere.
On failure: what is wrong, on standard error, and exit code 1.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import click

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import TopicDescription
from delivery.topic_admin import Mismatch
from delivery.values import duration_words
from gpustream.command import KAFKA, LOG_FORMAT, Command, CommandGroup, option
from gpustream.output import FAILED, answer, show
from topics.topic import PARTITIONS, REPLICATION_FACTOR, Topic
from topics.usage import HOUR_MS

MAX_PARTITIONS, MAX_REPLICATION_FACTOR = 2**31 - 1, 2**15 - 1
"""What a request to Kafka can hold."""

COLUMNS = ("topic", "key", "partitions", "cleanup", "retention", "as it must be")


@click.group(cls=CommandGroup)
def topics() -> None:
    """Create the topics, or compare them with what they should be."""


@topics.command(cls=Command, example="gpustream topics create --kafka 127.0.0.1:9092 --replication-factor 1")
@KAFKA
@option(
    "--partitions", type=click.IntRange(1, MAX_PARTITIONS), default=PARTITIONS, help="Of every topic; can't grow later."
)
@option(
    "--replication-factor",
    type=click.IntRange(1, MAX_REPLICATION_FACTOR),
    default=REPLICATION_FACTOR,
    help="Copies of every partition.",
)
@option(
    "--recreate-empty",
    is_flag=True,
    help="Delete topics that have another number of partitions and create them again, if they hold no record.",
)
@LOG_FORMAT
def create(connection: Connection, partitions: int, replication_factor: int, recreate_empty: bool) -> None:
    """Create the topics that are missing, and mend the settings of those that are there. Partitions never change."""
    changes = answer(topic_admin.create(connection, partitions, replication_factor, recreate_empty=recreate_empty))
    for line in changes or ["every topic is there, as it must be"]:
        click.echo(line)


@topics.command("list", cls=Command, example="gpustream topics list --kafka 127.0.0.1:9092")
@KAFKA
@LOG_FORMAT
def list_(connection: Connection) -> None:
    """Compare the broker's topics with what they should be. Exit code 1 if any differs or is missing."""
    descriptions, unchecked = answer(topic_admin.inspect(connection))
    expected = list(topic_admin.contract(connection).values())
    mismatches = topic_admin.mismatches(expected, descriptions)
    show(COLUMNS, rows(expected, descriptions, mismatches), lambda row: "" if row.verdict == "yes" else "red")
    if unchecked is not None:
        click.echo(f"settings were not compared: {unchecked}", err=True)
    raise SystemExit(FAILED if mismatches else 0)


class TopicRow(NamedTuple):
    """A topic of the contract beside the broker's."""

    topic: str
    key: str
    partitions: str
    cleanup: str
    retention: str
    verdict: str


def rows(
    expected: Iterable[Topic], descriptions: Mapping[str, TopicDescription], mismatches: Collection[Mismatch]
) -> list[TopicRow]:
    """A row per topic of the contract, in the order of the flow."""
    topic_rows = []
    for topic in expected:
        description, retention = descriptions.get(topic.name), "for ever"
        if topic.retention_hours is not None:  # the broker's; what it should be, if its settings are not known
            settings = (description.settings if description is not None else None) or {}
            ms = int(settings.get("retention.ms") or topic.settings()["retention.ms"])
            retention = "for ever" if ms < 0 else duration_words(ms) if ms % HOUR_MS else f"{ms // HOUR_MS} h"
        differences = [
            "missing" if row.have == "missing" else f"{row.subject} is {row.have}, must be {row.want}"
            for row in mismatches
            if row.topic == topic.name
        ]
        topic_rows.append(
            TopicRow(
                topic=topic.name,
                key=topic.key,
                partitions="-" if description is None else str(description.partitions),
                cleanup=topic.cleanup,
                retention=retention,
                verdict="; ".join(differences) or "yes",
            )
        )
    return topic_rows
