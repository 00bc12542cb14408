"""The commands ``gpustream dead-letters list``, ``show`` and ``resubmit``.

In:       gpu.dead-letters, and of a letter that lacks something, the original record.
Out:      tables, a letter, or what would be sent; with ``--yes``, the records on the topics that they came from.
On failure: a broker that does not answer is a sentence and exit code 1.
"""

import base64
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import click
import orjson

from delivery.connection import Connection
from delivery.settings import DURATION, KafkaSettings, Text
from gpustream import history
from gpustream.command import (
    KAFKA,
    LOG_FORMAT,
    Argument,
    Command,
    CommandGroup,
    counted,
    option,
    options,
    output_format,
)
from gpustream.dead_letters import resubmission
from gpustream.dead_letters.letters import (
    DONE,
    RESUBMITTABLE,
    Letter,
    LetterFilter,
    LetterId,
    Original,
    letter_id,
    letters,
    original,
    refused,
)
from gpustream.output import FAILED, answer, failed, json_lines, printable, show_or_say
from topics import dead_letters as contract

_ALL_S = 365 * 86_400.0

_LETTER = Text("PARTITION:OFFSET", letter_id, "0:17")

By = Literal["reason", "topic", "node", "letter"]


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    declared = (
        option("--since", "since_s", type=DURATION, default="7d", help="Letters of this time, from now back."),
        option("--topic", help="Only letters of records of this topic."),
        option("--stage", help="Only letters of this component, such as attribution or remote_write."),
        option("--reason", help="Only letters of this reason, as the list has it."),
        option("--key", metavar="CLUSTER/NODE", help="Only letters of this node: the key of their records."),
    )
    for one in reversed(declared):
        function = one(function)
    return function


def _wanted(given: Mapping[str, str | None]) -> LetterFilter:
    return LetterFilter(given["topic"], given["stage"], given["reason"], given["key"])


@click.group("dead-letters", cls=CommandGroup)
def dead_letters() -> None:
    """List what could not be used and why, show it, and send it again after a fix."""


@dead_letters.command(
    "list",
    cls=Command,
    example=(
        "gpustream dead-letters list --kafka kafka-0:9092\n"
        "gpustream dead-letters list --kafka kafka-0:9092 --since 1h --by node --topic gpu.samples"
    ),
)
@KAFKA
@_filters
@option("--by", type=click.Choice(["reason", "topic", "node", "letter"]), default="reason", help="A line for each.")
@output_format("text", "json", help="json: an object a line.")
@LOG_FORMAT
def list_letters(
    connection: Connection,
    since_s: float,
    by: By,
    form: Literal["text", "json"],
    **given: str | None,
) -> None:
    """List dead letters by reason, topic or node, or each by itself. It reads in no group and commits nothing."""
    rows = answer(_list(connection, since_s, _wanted(given), by))
    if form == "json":
        json_lines(row._asdict() for row in rows)
    else:
        show_or_say(LetterGroup._fields, [tuple(map(printable, row)) for row in rows], "no dead letter")


class LetterGroup(NamedTuple):
    """Letters that have something in common. A field in which they differ is ``several``."""

    letters: int
    sent_again: int
    last: str
    stage: str
    topic: str
    reason: str
    key: str
    last_letter: str


async def _list(connection: Connection, since_s: float, wanted: LetterFilter, by: By) -> list[LetterGroup]:
    rows: dict[tuple[str, ...], LetterGroup] = {}
    async with history.opened(connection, [contract.TOPIC.name]) as past:
        async for letter in letters(past, since_s):
            if letter in wanted:
                one = row(letter)
                key = {
                    "reason": (one.stage, one.topic, one.reason),
                    "topic": (one.topic,),
                    "node": (one.key,),
                    "letter": (one.last_letter,),
                }[by]
                rows[key] = merged(rows[key], one) if key in rows else one
    return sorted(rows.values(), key=lambda row: (-row.letters, row.last))


def row(letter: Letter) -> LetterGroup:
    """A letter by itself."""
    cause = letter.cause
    return LetterGroup(
        1,
        int(letter.done),
        _time(letter),
        cause.stage,
        cause.origin.topic,
        cause.reason,
        letter.key_text,
        str(letter.id),
    )


def merged(one: LetterGroup, more: LetterGroup) -> LetterGroup:
    """Two rows as one."""

    def common(mine: str, theirs: str) -> str:
        return mine if mine == theirs else "several"

    return LetterGroup(
        letters=one.letters + more.letters,
        sent_again=one.sent_again + more.sent_again,
        last=max(one.last, more.last),
        stage=common(one.stage, more.stage),
        topic=common(one.topic, more.topic),
        reason=common(one.reason, more.reason),
        key=common(one.key, more.key),
        last_letter=one.last_letter if one.last > more.last else more.last_letter,
    )


def _time(letter: Letter) -> str:
    return f"{datetime.fromtimestamp(letter.logged_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


@dead_letters.command("show", cls=Command, example="gpustream dead-letters show 3:17 --kafka kafka-0:9092")
@click.argument("letter", cls=Argument, type=_LETTER)
@KAFKA
@output_format(
    "text",
    "json",
    "raw",
    help="json: one object, the record in base64; raw: the bytes of the record, and nothing else.",
)
@LOG_FORMAT
def show_letter(letter: LetterId, connection: Connection, form: Literal["text", "json", "raw"]) -> None:
    """Show a dead letter: its record, its error, where it came from, and whether it can be sent again."""
    found = answer(_find(connection, letter))
    if found is None:
        raise failed(f"there is no letter {letter}: `gpustream dead-letters list --by letter` has those that there are")
    one, record = found
    whole = isinstance(record, Original)
    value = (record.value or b"") if isinstance(record, Original) else one.value
    if form == "raw":
        sys.stdout.buffer.write(value)
    elif form == "json":
        click.echo(orjson.dumps({**_described(one), "whole": whole, "value_base64": base64.b64encode(value).decode()}))
    else:
        why_not = refused(one) or (record if isinstance(record, str) else None)
        click.echo("\n".join(_text(one, value, why_not)))


async def _find(connection: Connection, wanted: LetterId) -> tuple[Letter, Original | str] | None:
    topics = (contract.TOPIC.name, *RESUBMITTABLE)
    async with history.opened(connection, topics[:1]) as past, history.opened(connection, topics[1:]) as originals:
        async for letter in letters(past, _ALL_S):
            if letter.id == wanted:
                return letter, await original(originals, letter)
    return None


def _described(letter: Letter) -> dict[str, Any]:
    name, partition, offset = letter.cause.origin
    return {
        "letter": str(letter.id),
        "topic": name,
        "partition": partition,
        "offset": offset,
        "key": letter.key_text if letter.key is not None else None,
        "stage": letter.cause.stage,
        "error": letter.cause.error,
        "at_ms": letter.cause.at_ms,
        "length": letter.cause.length,
        "sent_again": letter.done,
    }


def _text(letter: Letter, value: bytes, why_not: str | None) -> Iterator[str]:
    name, partition, offset = letter.cause.origin
    size = counted(letter.cause.length, "byte")
    yield f"letter    {letter.id}, of {_time(letter)}"
    yield f"from      {name} partition {partition} offset {offset}, key {printable(letter.key_text) or 'not kept'}"
    yield f"stage     {printable(letter.cause.stage)}"
    yield f"error     {printable(letter.cause.error)}"
    yield f"record    {size}" if len(value) == letter.cause.length else f"record    the first {len(value)} of {size}"
    yield f"again     {f'no: {why_not}' if why_not else 'it can be sent again: `gpustream dead-letters resubmit`'}"
    yield ""
    try:
        lines = orjson.dumps(orjson.loads(value), option=orjson.OPT_INDENT_2).decode().splitlines()
    except orjson.JSONDecodeError:
        lines = [repr(value)[2:-1]]
    yield from map(printable, lines)


@dead_letters.command(
    cls=Command,
    example=(
        "gpustream dead-letters resubmit --kafka kafka-0:9092 --reason unsendable          # what would be sent\n"
        "gpustream dead-letters resubmit --kafka kafka-0:9092 --reason unsendable --yes    # send it\n"
        "gpustream dead-letters resubmit 3:17 3:18 --kafka kafka-0:9092 --yes"
    ),
)
@click.argument("letters", cls=Argument, type=_LETTER, nargs=-1)
@KAFKA
@options(KafkaSettings, only=("compression",))
@_filters
@option("--yes", is_flag=True, help="Send them. Without it, only what would be sent is said.")
@LOG_FORMAT
def resubmit(
    letters: tuple[LetterId, ...],
    connection: Connection,
    compression: str,
    since_s: float,
    yes: bool,
    **given: str | None,
) -> None:
    """Send letters to the topic that they came from: the same partition, key and bytes, at most once for each letter.

    Without --yes it says what would be sent. What the letter lacks (a value past 64 KiB, a key past 1 KiB) is read from
    its topic, as long as that has the record; before a tick, the snapshot that it names is sent again. Exit code 1 if a
    letter can't be sent.

    Mend first what was wrong, or it becomes a dead letter again. A tick that is sent again comes after newer ones of
    its node: gpu.attributed has it then, and readers that go by (cluster, node, run_id, seq) take it; sinks that have
    had a newer tick of the same run count it as a duplicate.
    """
    wanted = _wanted(given)._replace(ids=frozenset(letters))
    connection = dataclasses.replace(connection, compression=compression)
    done = answer(resubmission.resubmit(connection, since_s, wanted, send=yes))
    for why, ids in done.refused.items():
        some = ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
        click.echo(f"not sent: {some}: {why}", err=True)
    for name, count in sorted(done.sent.items()):
        click.echo(f"{name}: {counted(count, 'record')} {'sent again' if yes else 'would be sent again: add --yes'}")
    if not done.sent:
        click.echo("nothing is to be sent again")
    raise SystemExit(FAILED if done.refused.keys() - {DONE} else 0)
