"""``gpustream topics create`` and ``gpustream topics list``.

In:       a broker's address.
Out:      lines on standard output: a table on a terminal, tab-separated fields elsewhere.
On failure: what is wrong, on standard error, and exit code 1.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import click
from rich.console import Console
from rich.table import Table

from delivery import topic_admin
from delivery.topic_admin import Found, Mismatch
from topics import registry
from topics.topic import Topic

R = TypeVar("R")

FAILED = 1

COLUMNS = ("topic", "key", "partitions", "cleanup", "retention", "as it must be")


class Row(NamedTuple):
    """A topic of the contract beside the broker's."""

    topic: str
    key: str
    partitions: str
    cleanup: str
    retention: str
    verdict: str


def create(kafka: str, partitions: int, replication_factor: int, *, recreate_empty: bool) -> int:
    """Creates what is missing, mends settings, prints what it changed. 1 where the broker or the contract says no."""
    return _answered(
        lambda: topic_admin.create(kafka, partitions, replication_factor, recreate_empty=recreate_empty), _print_changes
    )


def compare(kafka: str) -> int:
    """Prints the topics of the contract beside the broker's. 1 if any is missing or not as it must be."""
    return _answered(lambda: topic_admin.inspect(kafka), lambda answer: _print_topics(*answer))


def rows(topics: Iterable[Topic], found: Mapping[str, Found], wrong: Iterable[Mismatch]) -> list[Row]:
    """A row per topic of the contract, in the order of the flow."""
    mistakes: dict[str, list[str]] = {}
    for mismatch in wrong:
        mistakes.setdefault(mismatch.topic, []).append(_sentence(mismatch))
    return [_row(topic, found.get(topic.name), mistakes.get(topic.name, [])) for topic in topics]


def _sentence(mismatch: Mismatch) -> str:
    if mismatch.have == "missing":
        return "missing"
    return f"{mismatch.what} is {mismatch.have}, must be {mismatch.want}"


def _row(topic: Topic, found: Found | None, mistakes: list[str]) -> Row:
    retention = "for ever" if topic.retention_hours is None else f"{topic.retention_hours} h"
    partitions = str(found.partitions) if found else "-"
    return Row(topic.name, topic.key, partitions, topic.cleanup, retention, "; ".join(mistakes) or "yes")


def _answered(ask: Callable[[], Coroutine[Any, Any, R]], use: Callable[[R], int]) -> int:
    """Asks the broker and uses its answer; a broker that says no, or nothing, is a sentence and exit code 1."""
    try:
        answer = asyncio.run(ask())
    except topic_admin.BrokerError as error:
        click.echo(str(error), err=True)
        return FAILED
    return use(answer)


def _print_changes(changes: list[str]) -> int:
    for line in changes or ["every topic is there, as it must be"]:
        click.echo(line)
    return 0


def _print_topics(found: Mapping[str, Found], unchecked: str | None) -> int:
    topics = list(registry.load().values())
    wrong = topic_admin.mismatches(topics, found)
    table = rows(topics, found, wrong)
    if sys.stdout.isatty():
        Console().print(_table(table))
    else:
        for row in (COLUMNS, *table):
            click.echo("\t".join(row))
    if unchecked is not None:
        click.echo(f"settings were not compared: {unchecked}", err=True)
    return FAILED if wrong else 0


def _table(table: Iterable[Row]) -> Table:
    drawn = Table(*COLUMNS)
    for row in table:
        drawn.add_row(*row[:-1], row.verdict, style=None if row.verdict == "yes" else "red")
    return drawn
