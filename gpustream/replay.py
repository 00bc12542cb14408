"""``gpustream replay``: makes usage again from what gpu.attributed still has, under a higher generation.

With ``--into`` it attributes again instead: :mod:`gpustream.reattribution`.

In:       gpu.attributed, in no group; what gpu.usage and gpu.usage-minutes have of the same time.
Out:      the final records of that time, as the usage stream writes them, except the generation; and zeros under every
          key that they had there and do not have now, because readers take the highest generation of each key.
State:    none. Of each partition the generation is one above the highest that its records have. So a replay that was
          killed is run again, and overwrites what it had written.
On failure: what Kafka does not have any more is refused, with the reason and what it has; exit code 1. An hour of a
          node stays as it is if gpu.attributed was created again in it: the ticks of its beginning are gone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click
import msgspec

from delivery import topic_admin
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.dead_letters import connecting
from delivery.ledger import Partition
from delivery.sender import Sender
from delivery.settings import TOPIC_PREFIX, TopicAccess
from delivery.values import counted
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, option, options
from gpustream.history import History, Span, refuse_deleted, utc
from gpustream.output import answer
from gpustream.usage.command import TIME, When
from gpustream.usage.read import Range
from streams.settings import UsageSettings
from streams.usage.bookkeeper import Bookkeeper
from streams.usage.books import FIELDS, FINAL_AFTER_MS, Accounting, Books
from streams.usage.tick import CountedTick
from streams.usage.tick import decode as decode_tick
from topics.attributed import TOPIC as ATTRIBUTED
from topics.samples import silent_after_ms
from topics.topic import UInt, decoder
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

BEFORE_MS = 30 * MINUTE_MS
"""Ticks logged this long before the time are read too: a tick counts for the time since the one before it."""

SETTLED_MS = FINAL_AFTER_MS + 2 * MINUTE_MS
"""An hour is made again this long after its end at the earliest: by then the stream has made it final."""

SETTLED_MS_OF_SAMPLES = 15_000
"""A sample is attributed again this long after it was logged: by then all that its join needs is logged, too."""

_decode = decoder(Usage)

NodeName = tuple[str, str]
"""The cluster and the name of a node."""


class _WindowHead(msgspec.Struct, frozen=True):
    """The fields of a record of usage that decide which generation comes next, and whether its node had ticks then."""

    cluster: str
    node: str
    start_ms: UInt
    end_ms: UInt
    generation: UInt
    category: str
    device_ms: UInt


_decode_head = decoder(_WindowHead)


def _errors(values: Mapping[str, Any]) -> Iterable[str]:
    try:
        if values["into"] is None:
            final_hours(values["first"], values["last"], now_ms())
        else:
            attributable_time(values["first"], values["last"], now_ms())
    except ValueError as error:
        yield str(error)
    if values["into"] == values["topic_prefix"]:
        yield "--into: it is the prefix of the pipeline itself: readers would drop what they have; give another one"


def attributable_time(first: When, last: When | None, now_ms: int) -> Range:
    """The part of the requested time whose samples can be attributed again. Raises ValueError if it is empty."""
    latest_ms = now_ms - SETTLED_MS_OF_SAMPLES
    time = Range(first.at_ms(now_ms), latest_ms if last is None else min(latest_ms, last.at_ms(now_ms)))
    if time.from_ms >= time.to_ms:
        raise ValueError(
            f"--from: there is no time between it and --to, or it is not over: {SETTLED_MS_OF_SAMPLES // 1000} s ago is"
            " the latest"
        )
    return time


def final_hours(first: When, last: When | None, now_ms: int) -> Range:
    """The whole hours of the requested time that are final. Raises ValueError if there are none."""
    latest_ms = (now_ms - SETTLED_MS) // HOUR_MS * HOUR_MS
    from_ms = first.at_ms(now_ms) // HOUR_MS * HOUR_MS
    to_ms = latest_ms if last is None else min(latest_ms, -(-last.at_ms(now_ms) // HOUR_MS) * HOUR_MS)
    if from_ms >= to_ms:
        raise ValueError(
            f"--from: no hour in that time is final: the last that is ended at {utc(latest_ms)}, as an hour is final"
            f" {SETTLED_MS // MINUTE_MS} minutes after its end"
        )
    return Range(from_ms, to_ms)


@click.command(
    cls=Command,
    check=_errors,
    example=(
        "gpustream replay --kafka kafka-0:9092 --from 6h\n"
        "gpustream replay --kafka kafka-0:9092 --from 2026-11-22T08:00 --to 2026-11-22T12:00 --team-label team\n"
        "gpustream replay --kafka kafka-0:9092 --from 6h --into again."
    ),
)
@KAFKA
@option(
    "--from",
    "first",
    type=TIME,
    required=True,
    help="When the time begins: 2026-11-22T08:00, or 6h for six hours ago. Whole hours are made again.",
)
@option("--to", "last", type=TIME, show_default="the last hour that is final", help="When it ends, written as --from.")
@option(
    "--into",
    type=TOPIC_PREFIX,
    help="Attribute again instead, into the topics of this prefix, which `gpustream topics create` makes.",
)
@options(UsageSettings, only=("split", "team_label"))
@LOG_FORMAT
def replay(
    connection: Connection,
    first: When,
    last: When | None,
    into: str | None,
    split: Literal["used", "equal"],
    team_label: str,
) -> None:
    """Make usage again from what gpu.attributed still has, for hours that were not booked.

    That is a day, unless the topic keeps more. Ticks are not booked if the usage stream did not run for longer, or if
    they came too late. The records have a higher generation, which readers take. Give --split and --team-label as the
    stream has them. If it is stopped, run it again.

    With --into, samples are attributed again from what gpu.samples, gpu.allocations and gpu.workloads still have, into
    gpu.attributed of another prefix: the same bytes as before, but that late ticks are exact if their snapshot came.
    Streams and sinks with that --topic-prefix read them. If it is stopped, run it again with the same --from.
    """
    if into is not None:
        from gpustream.reattribution import reattribute  # Faust's part of the command is loaded if it is wanted

        time_range = attributable_time(first, last, now_ms())
        click.echo(f"attribution again from {utc(time_range.from_ms)} to {utc(time_range.to_ms)} into {into}", err=True)
        attributed = answer(reattribute(connection, into, time_range))
        ticks = counted(attributed.exact + attributed.late + attributed.none, "tick")
        click.echo(
            f"{ticks} of {counted(attributed.nodes, 'node')} written: {attributed.exact} exact, {attributed.late} late,"
            f" {attributed.none} without a snapshot; {attributed.existing} were there"
        )
        if attributed.malformed:
            click.echo(
                f"{counted(attributed.malformed, 'sample')} could not be decoded, and have their dead letters", err=True
            )
        return
    hours = final_hours(first, last, now_ms())
    click.echo(f"usage again from {utc(hours.from_ms)} to {utc(hours.to_ms)}", err=True)
    totals = answer(_replay(connection, hours, Accounting(split, team_label)))
    click.echo(
        f"{counted(totals.ticks, 'tick')} of {counted(totals.nodes, 'node')}: {counted(totals.hours, 'record')} of"
        f" hours and {totals.minutes} of minutes written, {totals.zeros} keys set to zero,"
        f" generation {totals.generation}"
    )
    if totals.malformed:
        click.echo(f"{counted(totals.malformed, 'record')} of {ATTRIBUTED.name} could not be decoded", err=True)
    if totals.partial:
        click.echo(f"{counted(totals.partial, 'hour')} of nodes left as before: {ATTRIBUTED.name} has a part", err=True)


@dataclass
class ReplayTotals:
    """How much a replay has read and written so far."""

    nodes: int = 0
    ticks: int = 0
    malformed: int = 0
    partial: int = 0
    hours: int = 0
    minutes: int = 0
    zeros: int = 0
    generation: int = 0


class PartitionReplay:
    """What the stream should have written of one partition's nodes in some hours. Pure.

    It returns final records only, each hour after its minutes. The nodes' own ticks close windows, and at the end the
    log does. So ticks that were too late are booked.

    ``observed_ms``: since when each node has time in these hours that is not unobserved, as it was booked before. If
    its ticks begin long after it, the hours until then are ``partial``, and are not made again.
    """

    def __init__(self, hours: Range, policy: Accounting, observed_ms: Mapping[NodeName, int] | None = None) -> None:
        self._hours, self._policy = hours, policy._replace(live=False)
        self._nodes: dict[NodeName, tuple[Bookkeeper, list[Usage]]] = {}
        self._logged_ms = 0
        self._observed_ms, self._begins = observed_ms or {}, dict[NodeName, tuple[int, int]]()
        self.partial: set[tuple[NodeName, int]] = set()
        self.nodes: set[bytes | None] = set()
        self.ticks = self.malformed = 0

    def add(self, records: Sequence[Any]) -> list[Usage]:
        """Takes in records of gpu.attributed. Returns the usage that they make final."""
        final: list[Usage] = []
        for record in records:
            try:
                tick = decode_tick(record.value or b"")
                final += self.book(tick, record.timestamp if tick.logged_ms is None else tick.logged_ms)
            except msgspec.DecodeError:
                self.malformed += 1  # the stream has written its dead letter
            else:
                self.ticks += 1
                self.nodes.add(record.key)
        return final

    def book(self, tick: CountedTick, logged_ms: int) -> list[Usage]:
        """The usage that a tick makes final. Raises msgspec.DecodeError if its labels or workload are malformed."""
        node = (tick.cluster, tick.node)
        if node not in self._nodes:
            books = Books(schema=1, cluster=tick.cluster, node=tick.node)
            self._nodes[node] = Bookkeeper(books, self._policy), []
        self._logged_ms = max(self._logged_ms, logged_ms)
        bookkeeper, minutes = self._nodes[node]
        records = bookkeeper.book(tick, logged_ms).records
        first_ms = min(tick.ts_ms, logged_ms)  # it stands for up to three intervals
        self._begins.setdefault(node, (first_ms - silent_after_ms(tick.interval_ms, MINUTE_MS), first_ms))
        return self._whole_hours(minutes, records)

    def end(self, log_ms: int) -> list[Usage]:
        """The usage that is final because its node was silent until this log time, or until the last tick's."""
        final: list[Usage] = []
        for bookkeeper, minutes in self._nodes.values():
            final += self._whole_hours(minutes, bookkeeper.close_silent(max(self._logged_ms, log_ms)))
        return final

    def _whole_hours(self, minutes: list[Usage], records: list[Usage]) -> list[Usage]:
        """The hours that are final now, each after its minutes, which were kept back in ``minutes`` until then."""
        due: list[Usage] = []
        for record in records:
            if not record.final or not _contains(self._hours, record):
                continue
            if _is_minute(record):
                minutes.append(record)
                continue
            due += [minute for minute in minutes if minute.end_ms <= record.end_ms]
            minutes[:] = [minute for minute in minutes if minute.end_ms > record.end_ms]
            due.append(record)
        return list(filter(self._is_complete, due))

    def _is_complete(self, record: Usage) -> bool:
        """Whether the ticks of a record's node are all there."""
        node, hour_ms = (record.cluster, record.node), record.start_ms // HOUR_MS * HOUR_MS
        since_ms, first_ms = self._begins[node]
        if hour_ms >= first_ms or self._observed_ms.get(node, first_ms) + MINUTE_MS >= since_ms:
            return True
        self.partial.add((node, hour_ms))
        return False


class WrittenKeys:
    """The keys written for a partition, as hashes: old records under other keys must be set to zero."""

    def __init__(self, hours: Range, generation: int) -> None:
        self._hours, self._generation = hours, generation
        self._keys: set[int] = set()
        self._windows: set[int] = set()

    def note(self, record: Usage) -> None:
        self._keys.add(hash((record.key, record.end_ms)))
        self._windows.add(_window_hash(record))

    def zero(self, record: Usage) -> Usage | None:
        """The zeros to write over an old record, if its window was made again without its key; else None."""
        key = hash((record.key, record.end_ms))
        if not _contains(self._hours, record) or key in self._keys or _window_hash(record) not in self._windows:
            return None
        self._keys.add(key)
        return msgspec.structs.replace(record, generation=self._generation, final=True, **dict.fromkeys(FIELDS, 0))


def _contains(hours: Range, record: "Usage | _WindowHead") -> bool:
    """Whether a record's whole window is in these hours."""
    return hours.from_ms <= record.start_ms and record.end_ms <= hours.to_ms


def _is_minute(record: "Usage | _WindowHead") -> bool:
    """Whether a record is of gpu.usage-minutes. The others are of gpu.usage, which has hours."""
    return record.end_ms - record.start_ms == MINUTE_MS


def _window_hash(record: Usage) -> int:
    return hash((record.cluster, record.node, record.gpu_uuid, record.start_ms, record.end_ms))


async def _replay(connection: Connection, hours: Range, policy: Accounting) -> ReplayTotals:
    """Makes the usage of each partition again, one after the other."""
    sender = Sender(connection, client_id="gpustream-replay")
    written_topics = (HOURS.name, MINUTES.name)
    async with history.opened(connection, [ATTRIBUTED.name, *written_topics]) as reader, connecting(sender):
        await topic_admin.check(connection, TopicAccess((ATTRIBUTED.name, *written_topics), written_topics))
        ticks = await reader.spans(ATTRIBUTED.name, hours.from_ms - BEFORE_MS)
        await history.check_retention(reader, ATTRIBUTED, ticks, hours.from_ms, before_ms=BEFORE_MS, step_ms=HOUR_MS)
        old_spans = await reader.spans(HOURS.name, hours.from_ms) | await reader.spans(MINUTES.name, hours.from_ms)
        with history.progress("making usage again", {**ticks, **old_spans}) as advanced:
            writer = UsageWriter(reader, sender, hours, policy, advanced)
            for tp, span in ticks.items():
                old_of_partition = {old: span for old, span in old_spans.items() if old.partition == tp.partition}
                await writer.replay(tp, span, old_of_partition)
    return writer.totals


class UsageWriter:
    """Writes the usage of partitions again, one after the other."""

    def __init__(
        self, reader: History, sender: Sender, hours: Range, policy: Accounting, advanced: Callable[[int], None]
    ) -> None:
        self._reader, self._writer, self._hours, self._policy = reader, history.Writer(sender), hours, policy
        self._advanced = advanced
        self.totals = ReplayTotals()

    async def replay(self, tp: Partition, ticks: Span, old_spans: Mapping[Partition, Span]) -> None:
        """Writes the usage of a partition's nodes, and zeros under keys that only the old records have."""
        totals = self.totals
        generation, observed_ms = 1, dict[NodeName, int]()
        async for records in self._reader.records(old_spans, self._advanced):
            for _, head in history.decoded(records, _decode_head):
                if not _contains(self._hours, head):
                    continue
                generation = max(generation, 1 + head.generation)
                if _is_minute(head) and head.category != "unobserved" and head.device_ms:
                    node = (head.cluster, head.node)
                    observed_ms[node] = min(head.start_ms, observed_ms.get(node, head.start_ms))
        nodes = PartitionReplay(self._hours, self._policy._replace(generation=generation), observed_ms)
        written = WrittenKeys(self._hours, generation)

        async def write(final: Sequence[Usage]) -> None:
            for record in final:
                written.note(record)
            minutes = sum(map(_is_minute, final))
            totals.hours, totals.minutes = totals.hours + len(final) - minutes, totals.minutes + minutes
            await self._send(tp.partition, final)

        async for records in self._reader.records({tp: ticks}, self._advanced, on_deleted=refuse_deleted):
            await write(nodes.add(records))
        await write(nodes.end(now_ms() - MINUTE_MS))
        async for records in self._reader.records(old_spans):
            zeros = [zero for _, record in history.decoded(records, _decode) if (zero := written.zero(record))]
            totals.zeros += len(zeros)
            await self._send(tp.partition, zeros)
        await self._writer.settle()
        totals.nodes, totals.ticks = totals.nodes + len(nodes.nodes), totals.ticks + nodes.ticks
        totals.malformed, totals.partial = totals.malformed + nodes.malformed, totals.partial + len(nodes.partial)
        totals.generation = max(totals.generation, generation)

    async def _send(self, partition: int, records: Sequence[Usage]) -> None:
        for record in records:
            topic = MINUTES if _is_minute(record) else HOURS
            await self._writer.write(topic.name, msgspec.json.encode(record), record.key.encode(), partition)
