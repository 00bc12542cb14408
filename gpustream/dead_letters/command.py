"""The commands ``gpustream dead-letters list``, ``show`` and ``resubmit``.

In:       gpu.dead-letters, and of a letter that lacks something, the original record.
Out:      tables, a letter, or what would be sent; with ``--yes``, the records on the topics that they came from.
On failure: a broker that does not answer is a sentence and exit code 1.
"""

import base64
import dataclasses
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

import click
import msgspec

from delivery.connection import Connection
from delivery.settings import DURATION, KafkaSettings, Text
from delivery.values import counted, printable
from gpustream import history
from gpustream.command import (
    KAFKA,
    LOG_FORMAT,
    Argument,
    Command,
    CommandGroup,
    combined,
    option,
    options,
    output_format,
)
from gpustream.dead_letters.letters import (
    ALREADY_SENT,
    RESUBMITTABLE,
    Letter,
    LetterFilter,
    LetterId,
    Original,
    letter_id,
    letters,
    original,
    refusal_reason,
    send_again,
)
from gpustream.output import FAILED, answer, failed, json_lines, json_text, second, show
from topics import dead_letters as contract
from topics.times import time_of
from topics.topic import UNDECODABLE

_FOREVER_S = 365 * 86_400.0

_MAX_DEPTH = 1000
"""A record that nests more deeply is shown without line breaks: 64 KiB of brackets would be 4 GiB of text.

Before Python 3.12 msgspec refuses what nests more deeply than calls of Python may; in 3.14 it refuses hardly anything.
"""

_LETTER = Text("PARTITION:OFFSET", letter_id, "0:17")

By = Literal["reason", "topic", "node", "letter"]


_FILTER_OPTIONS = combined(
    option("--since", "since_s", type=DURATION, default="7d", help="Letters of this time, from now back."),
    option("--topic", help="Only letters of records of this topic."),
    option("--stage", help="Only letters of this component, such as attribution or remote-write."),
    option("--reason", help="Only letters of this reason, as the list has it."),
    option("--key", metavar="CLUSTER/NODE", help="Only letters of this node: the key of their records."),
)


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
@_FILTER_OPTIONS
@option("--by", type=click.Choice(["reason", "topic", "node", "letter"]), default="reason", help="A line for each.")
@output_format("text", "json", help="json: an object a line.")
@LOG_FORMAT
def list_letters(
    connection: Connection, since_s: float, by: By, form: Literal["text", "json"], **filters: str | None
) -> None:
    """List dead letters by reason, topic or node, or each by itself. It reads in no group and commits nothing."""
    rows = answer(_list(connection, since_s, LetterFilter(**filters, ids=()), by))
    if form == "json":
        json_lines(group._asdict() for group in rows)
    else:
        show(LetterGroup._fields, [tuple(map(str, group)) for group in rows], nothing="no dead letter")


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


async def _list(connection: Connection, since_s: float, letter_filter: LetterFilter, by: By) -> list[LetterGroup]:
    groups: dict[tuple[str, ...], LetterGroup] = {}
    async with history.opened(connection, [contract.TOPIC.name]) as reader:
        async for letter in letters(reader, since_s):
            if letter in letter_filter:
                group = group_of(letter)
                key = {
                    "reason": (group.stage, group.topic, group.reason),
                    "topic": (group.topic,),
                    "node": (group.key,),
                    "letter": (group.last_letter,),
                }[by]
                groups[key] = merge_groups(groups[key], group) if key in groups else group
    return sorted(groups.values(), key=lambda group: (-group.letters, group.last))


def group_of(letter: Letter) -> LetterGroup:
    cause = letter.cause
    return LetterGroup(
        1,
        int(letter.resubmitted),
        second(time_of(letter.logged_ms)),
        cause.stage,
        cause.origin.topic,
        cause.reason,
        letter.key_text,
        str(letter.id),
    )


def merge_groups(first: LetterGroup, second: LetterGroup) -> LetterGroup:
    """Merges two groups; a field in which they differ becomes ``several``."""

    def common(text: str, other: str) -> str:
        return text if text == other else "several"

    newer = first if first.last > second.last else second
    return newer._replace(
        letters=first.letters + second.letters,
        sent_again=first.sent_again + second.sent_again,
        stage=common(first.stage, second.stage),
        topic=common(first.topic, second.topic),
        reason=common(first.reason, second.reason),
        key=common(first.key, second.key),
    )


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
    result = answer(_find(connection, letter))
    if result is None:
        raise failed(f"there is no letter {letter}: `gpustream dead-letters list --by letter` has those that there are")
    found_letter, record = result
    is_whole = isinstance(record, Original)
    value = (record.value or b"") if isinstance(record, Original) else found_letter.value
    if form == "raw":
        sys.stdout.buffer.write(value)
    elif form == "json":
        cause = found_letter.cause
        fields = {
            "letter": str(found_letter.id),
            **cause.origin._asdict(),
            "key": found_letter.key_text if found_letter.key is not None else None,
            "stage": cause.stage,
            "error": cause.error,
            "at_ms": cause.at_ms,
            "length": cause.length,
            "sent_again": found_letter.resubmitted,
            "whole": is_whole,
            "value_base64": base64.b64encode(value).decode(),
        }
        click.echo(json_text(fields))
    else:
        reason = refusal_reason(found_letter) or (record if isinstance(record, str) else None)
        click.echo("\n".join(map(printable, _as_text(found_letter, value, reason))))


async def _find(connection: Connection, letter_id: LetterId) -> tuple[Letter, Original | str] | None:
    topics = (contract.TOPIC.name, *RESUBMITTABLE)
    async with history.opened(connection, topics[:1]) as reader, history.opened(connection, topics[1:]) as originals:
        async for letter in letters(reader, _FOREVER_S):
            if letter.id == letter_id:
                return letter, await original(originals, letter)
    return None


def _as_text(letter: Letter, value: bytes, reason: str | None) -> Iterator[str]:
    name, partition, offset = letter.cause.origin
    size = counted(letter.cause.length, "byte")
    yield f"letter    {letter.id}, of {second(time_of(letter.logged_ms))}"
    yield f"from      {name} partition {partition} offset {offset}, key {letter.key_text or 'not kept'}"
    yield f"stage     {letter.cause.stage}"
    yield f"error     {letter.cause.error}"
    yield f"record    {size}" if len(value) == letter.cause.length else f"record    the first {len(value)} of {size}"
    yield f"again     {f'no: {reason}' if reason else 'it can be sent again: `gpustream dead-letters resubmit`'}"
    yield ""
    try:  # with its own digits: they may be what is wrong
        yield from msgspec.json.format(value, indent=-1 if _depth(value) > _MAX_DEPTH else 2).decode().split("\n")
    except UNDECODABLE:
        yield repr(value)[2:-1]


def _depth(value: bytes) -> int:
    """How deeply the lists and objects of a JSON text are nested."""
    brackets = re.sub(rb'(?s)"(?:[^"\\]++|\\.)*+"?|[^][{}"]++', b"", value)
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


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
@_FILTER_OPTIONS
@option("--yes", is_flag=True, help="Send them. Without it, only what would be sent is said.")
@LOG_FORMAT
def resubmit(
    letters: tuple[LetterId, ...],
    connection: Connection,
    compression: str,
    since_s: float,
    yes: bool,
    **filters: str | None,
) -> None:
    """Send letters to the topic that they came from: the same partition, key and bytes, at most once for each letter.

    Without --yes it says what would be sent. What the letter lacks (a value past 64 KiB, a key past 1 KiB) is read from
    its topic, as long as that has the record; before a tick, the snapshot that it names is sent again. Exit code 1 if a
    letter can't be sent.

    Mend first what was wrong, or it becomes a dead letter again. A tick that is sent again comes after newer ones of
    its node: gpu.attributed has it then, and readers that go by (cluster, node, run_id, seq) take it; sinks that have
    had a newer tick of the same run count it as a duplicate.
    """
    letter_filter = LetterFilter(**filters, ids=frozenset(letters))
    connection = dataclasses.replace(connection, compression=compression)
    sent, not_sent = answer(send_again(connection, since_s, letter_filter, send=yes))
    for reason, ids in not_sent.items():
        listed = ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
        click.echo(printable(f"not sent: {listed}: {reason}"), err=True)
    for name, count in sorted(sent.items()):
        click.echo(f"{name}: {counted(count, 'record')} {'sent again' if yes else 'would be sent again: add --yes'}")
    if not sent:
        click.echo("nothing is to be sent again")
    raise SystemExit(FAILED if not_sent.keys() - {ALREADY_SENT} else 0)
