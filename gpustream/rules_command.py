"""``gpustream rules check`` and ``gpustream rules test``.

In:       a file of rules; for a test gpu.attributed, from Kafka or as recorded lines.
Out:      on standard output what would have fired, and when: a table on a terminal, tab-separated fields elsewhere, or
          the transitions as JSON lines.
On failure: mistakes of the file, each with its line, on standard error and exit code 1; lines and records that are no
          ticks are named there, left out, and make the exit code 1.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from delivery import topic_admin
from delivery.clients import AIOKafkaConsumer
from gpustream import alerts_command
from streams.alerts import tick as ticks
from streams.alerts.replay import Replay
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import Rules
from streams.alerts.rules.rules_file import RulesError
from topics import attributed
from topics.alerts import Alert

Form = Literal["table", "json"]

COLUMNS = ("fired", "resolved", "for", "severity", "alert", "where", "who", "why it ended", "summary")

FAILED = 1
_MOST_NAMED = 20
"""Of lines that are no ticks: the rest is only counted."""

_WAIT_MS = 500
_PROGRESS_S = 5.0


class Told(NamedTuple):
    """A record, where it is, for a message, and when it was logged, if that is known."""

    value: bytes
    place: str
    logged_ms: int | None = None


class Run:
    """A test of rules: takes records, keeps what came of them."""

    def __init__(self, by: Rules) -> None:
        self._replay = Replay(by)
        self.transitions: list[Alert] = []
        self.wrong = 0

    def take(self, told: Told) -> None:
        """Judge a record; one that is no tick is named, the first few times."""
        try:
            self.transitions += self._replay.take(ticks.decode(told.value), told.logged_ms)
        except msgspec.DecodeError as error:
            self.wrong += 1
            if self.wrong <= _MOST_NAMED:
                click.echo(f"{told.place}: not a record of gpu.attributed: {error}", err=True)

    def end(self) -> None:
        """There are no more records."""
        self.transitions += self._replay.end()

    def summary(self) -> str:
        """What was read, in a sentence."""
        fired = sum(alert.state == "firing" for alert in self.transitions)
        read = f"{_count(self._replay.ticks, 'tick')} of {_count(self._replay.nodes, 'node')}"
        again = f", {self._replay.repeats} more were there twice" if self._replay.repeats else ""
        wrong = f", {self.wrong} were none" if self.wrong else ""
        return f"{read}{again}{wrong}: {_count(fired, 'alert')} would have fired"


def check(path: Path) -> int:
    """Names every mistake of a file of rules. Gives the exit code."""
    by = _load(path)
    if by is None:
        return FAILED
    click.echo(f"{path}: no mistakes; {_count(len(by.rules), 'rule')} in force")
    return 0


def replay_lines(path: Path, lines: Path, form: Form) -> int:
    """Tests rules on recorded lines; ``-`` is standard input. Gives the exit code."""
    by = _load(path)
    if by is None:
        return FAILED
    run = Run(by)
    try:
        for told in _lines(lines):
            run.take(told)
    except OSError as error:
        click.echo(f"{lines}: {error.strerror}", err=True)
        return FAILED
    return _end(run, form)


def replay_kafka(path: Path, kafka: str, start: str | float, form: Form) -> int:
    """Tests rules on what a Kafka has, from a time on. Gives the exit code."""
    by = _load(path)
    if by is None:
        return FAILED
    run = Run(by)
    try:
        asyncio.run(_read(kafka, start, run))
    except (topic_admin.BrokerError, KafkaError) as error:
        click.echo(str(error), err=True)
        return FAILED
    return _end(run, form)


def rows(transitions: Iterable[Alert]) -> list[tuple[str, ...]]:
    """A row for each firing, in order of time, with what became of it."""
    fired: dict[tuple[str, str], Alert] = {}
    for alert in transitions:
        fired[alert.fingerprint, alert.starts_at.isoformat()] = alert
    ordered = sorted(fired.values(), key=lambda alert: (alert.starts_at, alert.name, alert.fingerprint))
    return [_row(alert) for alert in ordered]


def _row(alert: Alert) -> tuple[str, ...]:
    said = alerts_command.row(alert, alert.starts_at)
    if alert.ends_at is None:
        return (said.since, "-", "-", *said[2:6], "-", said.summary)
    ended = f"{alert.ends_at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
    return (said.since, ended, said.lasted, *said[2:6], alert.resolved_because or "-", said.summary)


def _load(path: Path) -> Rules | None:
    """The rules of a file; None after its mistakes were named."""
    try:
        return rules_file.load(path)
    except RulesError as error:
        for mistake in error.mistakes:
            click.echo(str(mistake), err=True)
        if len(error.mistakes) > 1:
            click.echo(f"{len(error.mistakes)} mistakes", err=True)
        return None


def _lines(path: Path) -> Iterator[Told]:
    name = "standard input" if str(path) == "-" else str(path)
    with click.open_file(str(path), "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Told(line, f"{name}:{number}")


def _end(run: Run, form: Form) -> int:
    run.end()
    if form == "json":
        for alert in sorted(run.transitions, key=lambda one: (one.ends_at or one.starts_at, one.fingerprint)):
            click.echo(msgspec.json.encode(alert))
    else:
        _print(rows(run.transitions))
    click.echo(run.summary(), err=True)
    return FAILED if run.wrong else 0


def _print(found: list[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        drawn = Table(*COLUMNS)
        for row in found:
            drawn.add_row(*map(Text, row))
        Console().print(drawn if found else "nothing would have fired")
        return
    for row in (COLUMNS, *found):
        click.echo("\t".join(row))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# -- Kafka


async def _read(kafka: str, start: str | float, run: Run) -> None:
    name = attributed.TOPIC.name
    found, _ = await topic_admin.inspect(kafka, [name])
    if name not in found:
        raise topic_admin.BrokerError(f"there is no topic {name} at {kafka}: `gpustream topics create` makes it")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.split(","), enable_auto_commit=False, isolation_level="read_committed"
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(name, number) for number in range(found[name].partitions)]
        async for told in _records(consumer, partitions, start):
            run.take(told)
    finally:
        await consumer.stop()


async def _records(consumer: Any, partitions: list[TopicPartition], start: str | float) -> AsyncIterator[Told]:
    """The records from a time on to where each partition ends now."""
    from_ms = 0 if isinstance(start, str) else int((time.time() - start) * 1000)
    consumer.assign(partitions)
    ends = await consumer.end_offsets(partitions)
    await _seek(consumer, partitions, from_ms)
    said_s = time.monotonic()
    while left := [tp for tp in partitions if await consumer.position(tp) < ends[tp]]:
        for tp, batch in (await consumer.getmany(*left, timeout_ms=_WAIT_MS)).items():
            for record in batch:
                if record.offset < ends[tp] and record.timestamp >= from_ms and record.value is not None:
                    place = f"{tp.topic}[{tp.partition}]@{record.offset}"
                    yield Told(record.value, place, record.timestamp)
        if sys.stderr.isatty() and time.monotonic() - said_s >= _PROGRESS_S:
            said_s = time.monotonic()
            behind = sum([ends[tp] - await consumer.position(tp) for tp in left])
            click.echo(f"{behind} records to read", err=True)


async def _seek(consumer: Any, partitions: list[TopicPartition], from_ms: int) -> None:
    """To the first record at a time; where the broker does not know one, to the beginning."""
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, from_ms)) if from_ms else {}
    beginnings = await consumer.beginning_offsets(partitions)
    for tp in partitions:
        at = found.get(tp)
        consumer.seek(tp, beginnings[tp] if at is None else at.offset)
