"""Output of commands: waits for a broker's answer, prints tables or JSON, writes a file.

In:       a coroutine that asks; rows or records; lines.
Out:      standard output: a table on a terminal, tab-separated fields elsewhere, or JSON lines. A file, whole or not.
On failure: what is wrong, on standard error, and exit code 1.
"""

import asyncio
import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from delivery.kafka_admin import BrokerError
from delivery.kafka_errors import describe
from delivery.redaction import redact
from delivery.values import printable
from topics.times import epoch_ms, time_of

R = TypeVar("R")
Row = TypeVar("Row", bound=tuple[str, ...])

FAILED = 1

_MIN_NAME_CHARS, _MAX_FURTHER_NAME_CHARS = 11, 20


def answer(request: Coroutine[Any, Any, R]) -> R:
    """Runs the request. If the broker refuses it or is silent, prints a sentence and ends with exit code 1."""
    try:
        return asyncio.run(request)
    except (BrokerError, KafkaError) as error:
        raise failed(describe(error) if isinstance(error, KafkaError) else str(error)) from error


def failed(sentence: object) -> SystemExit:
    """Prints the sentence on standard error. Raise the result to end the command with exit code 1.

    A part of it may be what a server answered, or the URL of a proxy with its password.
    """
    click.echo("\n".join(map(printable, redact(str(sentence)).split("\n"))), err=True)
    return SystemExit(FAILED)


def is_screen() -> bool:
    """Whether a person is at a terminal that can show more than lines: its bars and frames need UTF-8."""
    interactive = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    shows_bars = interactive and sys.stderr.encoding.lower().replace("-", "") == "utf8"
    return shows_bars and os.environ.get("TERM", "") not in ("", "dumb")


def show(
    columns: Sequence[str], rows: Sequence[Row], style: Callable[[Row], str] = lambda _: "", *, nothing: str = ""
) -> None:
    """A table on a terminal, or there the sentence ``nothing`` in place of an empty one; elsewhere tab-separated
    fields."""
    if not sys.stdout.isatty():
        click.echo("\t".join(columns))
        for row in rows:
            click.echo("\t".join(map(printable, row)))
    elif nothing and not rows:
        click.echo(nothing)
    else:
        Console().print(table(columns, rows, style))


def json_lines(records: Iterable[Any]) -> None:
    """Each record as JSON, on a line."""
    for record in records:
        click.echo(json_text(record))


def json_text(value: object) -> str:
    """A value as JSON on one line. Characters on which a terminal would act are escaped: they are in strings only."""
    text = msgspec.json.encode(value).decode()
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def table(columns: Sequence[str], rows: Iterable[Row], style: Callable[[Row], str] = lambda _: "") -> Table:
    """The rows for a terminal, each in its style."""
    result = Table(*columns)
    for row in rows:
        result.add_row(*map(Text, map(printable, row)), style=style(row))
    return result


def aligned(lines: Sequence[tuple[Sequence[str], str, Sequence[str]]], width: int) -> Iterator[str]:
    """The lines of a table for people, each with its names, the mark behind the first name, and its figures.

    It is at most ``width`` characters wide, unless a figure is wider: names are cut for that.
    """
    all_names, marks, all_cells = zip(*lines, strict=True)
    widths = [max(map(len, column)) for column in zip(*all_cells, strict=True)]
    longest, *further = (
        max(len(name) + len(mark) for name, mark in zip(column, marks, strict=True))
        for column in zip(*all_names, strict=True)
    )
    further_widths = [min(_MAX_FURTHER_NAME_CHARS, length) for length in further]
    room = width - sum(column_width + 2 for column_width in (*further_widths, *widths))
    name_widths = [min(longest, max(_MIN_NAME_CHARS, room)), *further_widths]
    for (first, *more), mark, cells in lines:
        fitted = fit(first, name_widths[0] - len(mark)) + mark, *map(fit, more, further_widths)
        names = "  ".join(map("{:<{}}".format, fitted, name_widths))
        yield (names + "".join(map("  {:>{}}".format, cells, widths))).rstrip()


def fit(name: str, width: int) -> str:
    """A name cut to at most ``width`` characters, without those that a terminal would act on."""
    text = printable(name)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def second(at: datetime) -> str:
    """A time to the second, as people read it: ``2026-11-22 13:00:05Z``. One before 1970 is 1970: in UTC, the first
    hours of other zones are of no year."""
    return f"{time_of(max(0, epoch_ms(at))):%Y-%m-%d %H:%M:%SZ}"


def cell(name: str) -> str:
    """A name for CSV, without control characters: it may be shown on a terminal. One that a spreadsheet would take for
    a formula has an apostrophe before it: users of a batch system choose what their jobs call themselves."""
    shown = printable(name)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def csv_lines(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Each row as a line of CSV that ends with a line feed.

    Python before 3.13 quotes a field with a carriage return only if lines end with one.
    """
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="\r\n")
    for row in rows:
        writer.writerow(row)
        yield line.getvalue().removesuffix("\r\n") + "\n"
        line.seek(0)
        line.truncate()


@contextlib.contextmanager
def written(file: Path) -> Iterator[TextIO]:
    """Opens a file for writing that appears only when it is complete. One that can't be written ends the command.

    A device or a pipe, such as /dev/stdout, is written to as it is: another file must not take its place.
    """
    try:
        if file.exists() and not file.is_file():
            with file.open("w", encoding="utf-8", newline="") as out:
                yield out
            return
        with contextlib.suppress(FileNotFoundError):
            file.stat()  # of links that lead to themselves: before Python 3.13 the next line raises no OSError
        target = file.resolve()
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            with temporary.open("x", encoding="utf-8", newline="") as out:  # through no link that somebody put there
                yield out
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise failed(f"{file}: it can't be written: {error}") from error
