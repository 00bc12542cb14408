"""``gpustream dead-letters``: lists what could not be used, shows one letter, and sends letters again after a fix.

In:       gpu.dead-letters, in no group; of a letter that lacks something, the original record, while its topic has it.
Out:      tables, a letter, or what would be sent; with ``--yes``, the records on the topics that they came from.
State:    a receipt in gpu.dead-letters for each letter that was sent again.
On failure: a broker that does not answer is a sentence and exit code 1; what is not acknowledged was not sent.

A letter is sent at most once. Its record and its receipt are one transaction, and a reader of committed records sees
both or none. The transactions of all who resubmit have one id: whoever begins ends what another left open, and only
then reads the receipts.
"""

import asyncio
import base64
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import click
import msgspec
import orjson
from aiokafka.errors import KafkaError, ProducerFenced

from delivery.clients import close, describe, producer, started
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from delivery.ledger import Partition
from delivery.settings import DURATION, Text
from gpustream import history, logs
from gpustream.command import KAFKA, LOG_FORMAT, Argument, Command, counted, option
from gpustream.history import History
from gpustream.topics import FAILED, answer, show
from topics import allocations, samples
from topics import dead_letters as contract
from topics.dead_letters import MAX_KEY_BYTES, Cause
from topics.topic import MAX_MESSAGE_BYTES, decoder

TRANSACTIONS = "gpustream-dead-letters"

RESUBMITTABLE = ("gpu.samples", "gpu.allocations", "gpu.workloads")
"""What attribution reads. A record of another topic that comes again says nothing new, or something that is over."""

_NOT_AGAIN = {
    "gpu.attributed": "every reader of gpu.attributed drops a tick that comes again as a replay",
    "gpu.alerts": "gpu.alerts keeps the last record of each key: this one would take the place of a newer one",
}
DONE = "it was sent again before"

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_RECORDS = 100
_ALL_S = 365 * 86_400.0
_TRANSACTION_MS = 10_000
_BEGIN_S = 30.0
_ID = re.compile(r"([0-9]{1,9}):([0-9]{1,18})", re.ASCII)


class LetterId(NamedTuple):
    """Where a letter stands in gpu.dead-letters."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def letter_id(text: str) -> LetterId:
    """``PARTITION:OFFSET``. Raises ValueError."""
    if not (match := _ID.fullmatch(text)):
        raise ValueError(
            f"{text[:80]!r} is not a letter: write PARTITION:OFFSET, as `gpustream dead-letters list` has it"
        )
    return LetterId(int(match[1]), int(match[2]))


class Letter(NamedTuple):
    """A dead letter as it was read. ``done``: it was sent again."""

    id: LetterId
    logged_ms: int
    key: bytes | None
    value: bytes
    cause: Cause
    done: bool = False

    @property
    def key_text(self) -> str:
        """The key of the record: in most topics it names a node, ``CLUSTER/NODE``."""
        return (self.key or b"").decode("utf-8", "replace")

    @property
    def is_whole(self) -> bool:
        """Whether the letter itself has the whole record. An empty value may have been none."""
        return self.key is not None and 0 < self.cause.length == len(self.value)


class Wanted(NamedTuple):
    """Which letters are looked at: those that agree with all that is given."""

    topic: str | None = None
    stage: str | None = None
    reason: str | None = None
    key: str | None = None
    ids: Collection[LetterId] = ()

    def __contains__(self, letter: object) -> bool:
        if not isinstance(letter, Letter) or (self.ids and letter.id not in self.ids):
            return False
        has = (letter.cause.origin.topic, letter.cause.stage, letter.cause.reason, letter.key_text)
        return all(want is None or want == have for want, have in zip(self[:4], has, strict=True))


# -- reading


async def letters(past: History, since_s: float) -> AsyncIterator[Letter]:
    """The letters of some time, in order per partition, each with whether it was sent again.

    The topic is read twice: a receipt comes after its letter, and letters may be too large to be kept.
    """
    spans = await past.spans(contract.TOPIC.name, int((time.time() - since_s) * 1000))
    receipts: set[LetterId] = set()
    async for records in past.records(spans):
        for record in records:
            if (offset := contract.resubmitted(record.headers)) is not None:
                receipts.add(LetterId(record.partition, offset))
    async for records in past.records(spans):
        for record in records:
            if (cause := contract.cause(record.headers)) is not None:
                origin = cause.origin._replace(topic=past.connection.unprefixed(cause.origin.topic))
                cause = cause._replace(origin=origin)
                at = LetterId(record.partition, record.offset)
                yield Letter(at, record.timestamp, record.key, record.value or b"", cause, at in receipts)


class Original(NamedTuple):
    """A whole record, with the key and the bytes that it had."""

    key: bytes | None
    value: bytes | None


async def original(past: History, letter: Letter) -> Original | str:
    """The record of a letter, from its topic if the letter lacks something; or why it can't be had."""
    if letter.is_whole:
        return Original(letter.key, letter.value)
    name, partition, offset = letter.cause.origin
    if partition >= past.partitions.get(name, 0):
        return f"{name} has no partition {partition} any more"
    record = await past.record(Partition(name, partition), offset)
    lacks = "its key" if letter.key is None else "a part of its value" if letter.value else "its value"
    if record is None:
        return f"the letter lacks {lacks}, and {name} does not have the record any more"
    value, key = record.value or b"", record.key
    same_key = key == letter.key or (letter.key is None and len(key or b"") > MAX_KEY_BYTES)
    if not (same_key and len(value) == letter.cause.length and value.startswith(letter.value)):
        return f"the letter lacks {lacks}, and another record stands at its place now: {name} was created again"
    return Original(key, record.value)


class _Event(msgspec.Struct, frozen=True):
    allocations_seq: int | None = None


class _Device(msgspec.Struct, frozen=True):
    events: tuple[_Event, ...] | None = None


class _Tick(msgspec.Struct, frozen=True):
    """What of a tick, or of a snapshot, says which snapshots it is about."""

    run_id: int
    seq: int
    allocations_seq: int | None = None
    devices: tuple[_Device, ...] = ()


class Snapshots:
    """Finds the snapshots that ticks name. Each partition of gpu.allocations is read once, when it is asked for."""

    def __init__(self, past: History) -> None:
        self._past = past
        self._offsets: dict[int, dict[tuple[bytes | None, int, int], int]] = {}
        self._given: set[tuple[int, int]] = set()
        self._decode = decoder(_Tick)

    async def named_by(self, letter: Letter, record: Original) -> list[Original]:
        """The snapshots that a tick and its events name, as far as the topic has them and they were not given yet."""
        if letter.cause.origin.topic != samples.TOPIC.name:
            return []
        try:
            tick = self._decode(record.value or b"")
        except msgspec.DecodeError:
            return []
        partition = letter.cause.origin.partition
        events = [event.allocations_seq for device in tick.devices for event in device.events or ()]
        found = []
        for seq in sorted({one for one in (tick.allocations_seq, *events) if one is not None}):
            offset = (await self._of(partition)).get((record.key, tick.run_id, seq))
            if offset is None or (partition, offset) in self._given:
                continue
            self._given.add((partition, offset))
            snapshot = await self._past.record(Partition(allocations.TOPIC.name, partition), offset)
            if snapshot is not None:
                found.append(Original(snapshot.key, snapshot.value))
        return found

    async def _of(self, partition: int) -> dict[tuple[bytes | None, int, int], int]:
        """Where the snapshots of a partition stand, by their key, run and seq."""
        if partition not in self._offsets:
            self._offsets[partition] = offsets = {}
            tp = Partition(allocations.TOPIC.name, partition)
            async for records in self._past.records({tp: (await self._past.spans(tp.topic))[tp]}):
                for record in records:
                    with contextlib.suppress(msgspec.DecodeError):
                        snapshot = self._decode(record.value or b"")
                        offsets[record.key, snapshot.run_id, snapshot.seq] = record.offset
        return self._offsets[partition]


def refused(letter: Letter) -> str | None:
    """Why a letter is not to be sent again; None if it may be."""
    if letter.done:
        return DONE
    name = letter.cause.origin.topic
    if name not in RESUBMITTABLE:
        return _NOT_AGAIN.get(name, f"{name} is not a topic that attribution reads")
    return None


# -- sending


class Resubmission:
    """Sends letters again, each with its receipt in one transaction; see :func:`resubmitting`."""

    def __init__(self, connection: Connection, sender: Any) -> None:
        self._connection, self._sender = connection, sender
        self._batch: list[tuple[Letter, Original, list[Original]]] = []
        self._bytes = 0
        self.sent = 0

    async def add(self, letter: Letter, record: Original, snapshots: list[Original]) -> None:
        """Send a letter's record, now or with those that come next, after the ``snapshots`` that it names."""
        self._batch.append((letter, record, snapshots))
        self._bytes += len(record.value or b"")
        if len(self._batch) >= _BATCH_RECORDS or self._bytes >= _BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Send what was added. Raises BrokerError: nothing of it was sent then, or its transaction's end is unknown."""
        batch, self._batch, self._bytes = self._batch, [], 0
        if not batch:
            return
        theirs = self._connection.prefixed
        try:
            async with self._sender.transaction():
                acknowledged = []
                for letter, record, snapshots in batch:
                    name, partition, _ = letter.cause.origin
                    for one in snapshots:
                        to = theirs(allocations.TOPIC.name)
                        acknowledged.append(await self._sender.send(to, one.value, key=one.key, partition=partition))
                    acknowledged += [
                        await self._sender.send(theirs(name), record.value, key=record.key, partition=partition),
                        await self._sender.send(
                            theirs(contract.TOPIC.name),
                            None,
                            key=letter.key,
                            partition=letter.id.partition,
                            headers=contract.receipt(letter.id.offset),
                        ),
                    ]
                await asyncio.gather(*acknowledged)
        except ProducerFenced as error:
            raise BrokerError("another `gpustream dead-letters resubmit` began: this one has ended") from error
        except KafkaError as error:
            places = ", ".join(str(letter.id) for letter, *_ in batch[:10])
            raise BrokerError(f"letters {places} ...: not sent: {describe(error)}. Run the command again") from error
        self.sent += len(batch)


@contextlib.asynccontextmanager
async def resubmitting(connection: Connection) -> AsyncIterator[Resubmission]:
    """A resubmission: whatever another one left open is ended, and no other one can go on.

    Raises BrokerError if the broker begins no transaction.
    """
    sender = None
    try:
        async with asyncio.timeout(_BEGIN_S):
            sender = await started(
                lambda: producer(
                    connection,
                    client_id=TRANSACTIONS,
                    transactional_id=connection.prefixed(TRANSACTIONS),
                    transaction_timeout_ms=_TRANSACTION_MS,
                    max_request_size=2 * MAX_MESSAGE_BYTES,
                ),
                connection,
            )
        yield Resubmission(connection, sender)
    except TimeoutError as error:
        raise BrokerError(
            f"{connection} has begun no transaction in {_BEGIN_S:.0f} s: a broker without transactions, or too few"
            " brokers are up for transaction.state.log.replication.factor"
        ) from error
    finally:
        if sender is not None:
            await close(sender)


# -- the commands


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


def _wanted(given: Mapping[str, str | None]) -> Wanted:
    return Wanted(given["topic"], given["stage"], given["reason"], given["key"])


@click.group("dead-letters")
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
@option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="json: an object a line.")
@LOG_FORMAT
def list_letters(
    connection: Connection,
    since_s: float,
    by: By,
    form: Literal["text", "json"],
    log_format: logs.Format,
    **given: str | None,
) -> None:
    """List dead letters by reason, topic or node, or each by itself. It reads in no group and commits nothing."""
    logs.setup(log_format)
    rows = answer(_list(connection, since_s, _wanted(given), by))
    if form == "json":
        for row in rows:
            click.echo(orjson.dumps(row._asdict()))
    elif not rows and sys.stdout.isatty():
        click.echo("no dead letter")
    else:
        show(Row._fields, [tuple(map(_printable, row)) for row in rows])


class Row(NamedTuple):
    """Letters that have something in common. What they do not have in common is ``several``."""

    letters: int
    sent_again: int
    last: str
    stage: str
    topic: str
    reason: str
    key: str
    last_letter: str


async def _list(connection: Connection, since_s: float, wanted: Wanted, by: By) -> list[Row]:
    rows: dict[tuple[str, ...], Row] = {}
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


def row(letter: Letter) -> Row:
    """A letter by itself."""
    cause = letter.cause
    return Row(
        1,
        int(letter.done),
        _time(letter),
        cause.stage,
        cause.origin.topic,
        cause.reason,
        letter.key_text,
        str(letter.id),
    )


def merged(one: Row, more: Row) -> Row:
    """Two rows as one."""

    def common(mine: str, theirs: str) -> str:
        return mine if mine == theirs else "several"

    return Row(
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


def _printable(cell: object) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in str(cell))


@dead_letters.command("show", cls=Command, example="gpustream dead-letters show 3:17 --kafka kafka-0:9092")
@click.argument("letter", cls=Argument, type=_LETTER)
@KAFKA
@option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "raw"]),
    default="text",
    help="json: one object, the record in base64; raw: the bytes of the record, and nothing else.",
)
@LOG_FORMAT
def show_letter(
    letter: LetterId, connection: Connection, form: Literal["text", "json", "raw"], log_format: logs.Format
) -> None:
    """Show a dead letter: its record, its error, where it came from, and whether it can be sent again."""
    logs.setup(log_format)
    found = answer(_find(connection, letter))
    if found is None:
        click.echo(
            f"there is no letter {letter}: `gpustream dead-letters list --by letter` has those that there are", err=True
        )
        raise SystemExit(FAILED)
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
    yield f"from      {name} partition {partition} offset {offset}, key {_printable(letter.key_text) or 'not kept'}"
    yield f"stage     {_printable(letter.cause.stage)}"
    yield f"error     {_printable(letter.cause.error)}"
    yield f"record    {size}" if len(value) == letter.cause.length else f"record    the first {len(value)} of {size}"
    yield f"again     {f'no: {why_not}' if why_not else 'it can be sent again: `gpustream dead-letters resubmit`'}"
    yield ""
    try:
        yield orjson.dumps(orjson.loads(value), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        yield repr(value)[2:-1]


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
@_filters
@option("--yes", is_flag=True, help="Send them. Without it, only what would be sent is said.")
@LOG_FORMAT
def resubmit(
    letters: tuple[LetterId, ...],
    connection: Connection,
    since_s: float,
    yes: bool,
    log_format: logs.Format,
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
    logs.setup(log_format)
    wanted = _wanted(given)._replace(ids=frozenset(letters))
    done = answer(_resubmit(connection, since_s, wanted, send=yes))
    for why, ids in done.refused.items():
        some = ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
        click.echo(f"not sent: {some}: {why}", err=True)
    for name, count in sorted(done.sent.items()):
        click.echo(f"{name}: {counted(count, 'record')} {'sent again' if yes else 'would be sent again: add --yes'}")
    if not done.sent:
        click.echo("nothing is to be sent again")
    raise SystemExit(FAILED if done.refused.keys() - {DONE} else 0)


class Resubmitted(NamedTuple):
    """How many records of each topic were sent, or would be; and the letters that were not, by why."""

    sent: dict[str, int]
    refused: dict[str, list[LetterId]]


async def _resubmit(connection: Connection, since_s: float, wanted: Wanted, *, send: bool) -> Resubmitted:
    """Send the wanted letters, or only see which could be. The receipts are read when no other can write one."""
    done = Resubmitted({}, {})
    async with contextlib.AsyncExitStack() as stack:
        sending = await stack.enter_async_context(resubmitting(connection)) if send else None
        past = await stack.enter_async_context(history.opened(connection, [contract.TOPIC.name]))
        originals = await stack.enter_async_context(history.opened(connection, RESUBMITTABLE))
        snapshots = Snapshots(originals)
        async for letter in letters(past, since_s):
            if letter not in wanted:
                continue
            why_not, record = refused(letter), None
            if why_not is None:
                record = await original(originals, letter)
                why_not = record if isinstance(record, str) else None
            if not isinstance(record, Original):
                done.refused.setdefault(why_not or "", []).append(letter.id)
                continue
            if sending is not None:
                await sending.add(letter, record, await snapshots.named_by(letter, record))
            name = letter.cause.origin.topic
            done.sent[name] = done.sent.get(name, 0) + 1
        if sending is not None:
            await sending.flush()
    return done
