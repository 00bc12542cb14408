"""``gpustream replay``: makes usage again from what gpu.attributed still has, under a higher generation.

With ``--into`` it attributes again instead: :mod:`gpustream.reattribution`.

In:       gpu.attributed, in no group; what gpu.usage and gpu.usage-minutes have of the same time.
Out:      the final records of that time, as the usage stream writes them, except the generation; and zeros under every
          key that they had there and do not have now, because readers take the highest generation of each key.
State:    none. Of each partition the generation is one above the highest that its records have. So a replay that was
          killed is run again, and overwrites what it had written.
On failure: what Kafka does not have any more is refused, with the reason and what it has; exit code 1.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click
import msgspec

from delivery import topic_admin
from delivery.connection import Connection
from delivery.dead_letters import connecting
from delivery.ledger import Partition
from delivery.sender import Sender
from delivery.settings import TOPIC_PREFIX, TopicAccess
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, counted, option, options
from gpustream.history import History, Span
from gpustream.output import answer, now_ms
from gpustream.usage.command import TIME, When
from gpustream.usage.read import Range, utc
from streams.settings import UsageSettings
from streams.usage.bookkeeper import AHEAD_MS, Bookkeeper
from streams.usage.books import FIELDS, FINAL_AFTER_MS, Accounting, Books
from streams.usage.tick import CountedTick
from streams.usage.tick import decode as decode_tick
from topics.attributed import TOPIC as ATTRIBUTED
from topics.topic import UInt, decoder
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

BEFORE_MS = 30 * MINUTE_MS
"""What was logged before the time is read too: the first tick in it stands for the time since the one before."""

SETTLED_MS = FINAL_AFTER_MS + 2 * MINUTE_MS
"""An hour is made again only so long after its end: by then the stream has made it final, if it ever will."""

SETTLED_MS_OF_SAMPLES = 15_000
"""A sample can be attributed so long after it was logged: what its join waits for has been logged by then."""

_decode = decoder(Usage)


class _WindowHead(msgspec.Struct, frozen=True):
    """What of a record of usage says which generation comes next."""

    start_ms: UInt
    end_ms: UInt
    generation: UInt


_decode_head = decoder(_WindowHead)


def _mistakes(given: Mapping[str, Any]) -> Iterable[str]:
    try:
        if given["into"] is None:
            asked(given["first"], given["last"], now_ms())
        else:
            settled(given["first"], given["last"], now_ms())
    except ValueError as error:
        yield str(error)
    if given["into"] == given["topic_prefix"]:
        yield "--into: it is the prefix of the pipeline itself: readers would drop what they have; give another one"


def settled(first: When, last: When | None, now_ms: int) -> Range:
    """The time whose samples are attributed again. Raises ValueError if it is too new or empty."""
    latest_ms = now_ms - SETTLED_MS_OF_SAMPLES
    time = Range(first.at_ms(now_ms), latest_ms if last is None else min(latest_ms, last.at_ms(now_ms)))
    if time.from_ms >= time.to_ms:
        raise ValueError(
            f"--from: there is no time between it and --to, or it is not over: {SETTLED_MS_OF_SAMPLES // 1000} s ago is"
            " the latest"
        )
    return time


def asked(first: When, last: When | None, now_ms: int) -> Range:
    """The whole hours that are asked for, and are over for long enough. Raises ValueError if there is none."""
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
    check=_mistakes,
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

        time_range = settled(first, last, now_ms())
        click.echo(f"attribution again from {utc(time_range.from_ms)} to {utc(time_range.to_ms)} into {into}", err=True)
        done = answer(reattribute(connection, into, time_range))
        click.echo(
            f"{counted(done.exact + done.late + done.none, 'tick')} of {counted(done.nodes, 'node')} written:"
            f" {done.exact} exact, {done.late} late, {done.none} without a snapshot; {done.there} were there"
        )
        if done.malformed:
            click.echo(
                f"{counted(done.malformed, 'sample')} could not be decoded, and have their dead letters", err=True
            )
        return
    hours = asked(first, last, now_ms())
    click.echo(f"usage again from {utc(hours.from_ms)} to {utc(hours.to_ms)}", err=True)
    made = answer(_replay(connection, hours, Accounting(split, team_label)))
    click.echo(
        f"{counted(made.ticks, 'tick')} of {counted(made.nodes, 'node')}: {counted(made.hours, 'record')} of hours and"
        f" {made.minutes} of minutes written, {made.zeros} keys set to zero, generation {made.generation}"
    )
    if made.malformed:
        click.echo(f"{counted(made.malformed, 'record')} of {ATTRIBUTED.name} could not be decoded", err=True)


@dataclass
class Made:
    """What a replay has read and written so far."""

    nodes: int = 0
    ticks: int = 0
    malformed: int = 0
    hours: int = 0
    minutes: int = 0
    zeros: int = 0
    generation: int = 0


class UsageReplay:
    """Recorded ticks of any number of nodes, in the order of their log: what the stream should have written.

    It gives final records of a higher generation, and of whole hours only: an hour with its minutes, if it began at
    least a minute after ``from_ms``, the log time of the first record. Time is closed by the nodes' own ticks, and at
    the end by the log: so what came late is booked.
    """

    def __init__(self, policy: Accounting, from_ms: int) -> None:
        self._policy = policy._replace(silent_after_ms=None)
        self._first_ms = -(-(from_ms + AHEAD_MS) // HOUR_MS) * HOUR_MS
        self._nodes: dict[tuple[str, str], tuple[Bookkeeper, list[Usage]]] = {}
        self._logged_ms = 0

    def take(self, tick: CountedTick, logged_ms: int) -> list[Usage]:
        """What is to be written after a tick. Raises msgspec.DecodeError for labels or a workload that are none."""
        name = (tick.cluster, tick.node)
        if name not in self._nodes:
            books = Books(schema=1, cluster=tick.cluster, node=tick.node)
            self._nodes[name] = Bookkeeper(books, self._policy), []
        self._logged_ms = max(self._logged_ms, logged_ms)
        keeper, minutes = self._nodes[name]
        return self._whole_hours(minutes, keeper.book(tick, logged_ms).records)

    def end(self, log_ms: int = 0) -> list[Usage]:
        """What is to be written at the end of the log, which may be later than its last record."""
        found: list[Usage] = []
        for keeper, minutes in self._nodes.values():
            found += self._whole_hours(minutes, keeper.close_silent(max(self._logged_ms, log_ms)))
        return found

    def _whole_hours(self, minutes: list[Usage], records: list[Usage]) -> list[Usage]:
        """The hours that are final now, each after its minutes, which have waited for it."""
        found: list[Usage] = []
        for one in records:
            if not one.final or one.start_ms < self._first_ms:
                continue
            if one.end_ms - one.start_ms == MINUTE_MS:
                minutes.append(one)
                continue
            found += [minute for minute in minutes if minute.end_ms <= one.end_ms]
            minutes[:] = [minute for minute in minutes if minute.end_ms > one.end_ms]
            found.append(one)
        return found


class NodesAgain:
    """The nodes of one partition, made again for some hours. Pure. Ticks that came too late live are booked now."""

    def __init__(self, hours: Range, policy: Accounting) -> None:
        self._range, self._again = hours, UsageReplay(policy, hours.from_ms - BEFORE_MS)
        self.nodes: set[bytes | None] = set()
        self.ticks = self.malformed = 0

    def take(self, records: Sequence[Any]) -> list[Usage]:
        """What becomes final by records of gpu.attributed."""
        final: list[Usage] = []
        for record in records:
            try:
                tick = decode_tick(record.value or b"")
                logged_ms = record.timestamp if tick.logged_ms is None else tick.logged_ms
                final += self._again.take(tick, logged_ms)
            except msgspec.DecodeError:
                self.malformed += 1  # the stream has written its dead letter
            else:
                self.ticks += 1
                self.nodes.add(record.key)
        return [one for one in final if _holds(self._range, one)]

    def end(self, log_ms: int) -> list[Usage]:
        """What is final because its node was silent until this log time."""
        return [one for one in self._again.end(log_ms) if _holds(self._range, one)]


class Written:
    """What was written of a partition, to find the keys of before that it does not have. Keys are kept as hashes."""

    def __init__(self, hours: Range, generation: int) -> None:
        self._range, self._generation = hours, generation
        self._keys: set[int] = set()
        self._windows: set[int] = set()

    def note(self, one: Usage) -> None:
        """A record is written."""
        self._keys.add(hash((one.key, one.end_ms)))
        self._windows.add(_window(one))

    def zero(self, one: Usage) -> Usage | None:
        """What stands in for a record of a window that was made again, if that has no record under its key."""
        key = hash((one.key, one.end_ms))
        if not _holds(self._range, one) or key in self._keys or _window(one) not in self._windows:
            return None
        self._keys.add(key)
        return msgspec.structs.replace(one, generation=self._generation, final=True, **dict.fromkeys(FIELDS, 0))


def _holds(hours: Range, one: "Usage | _WindowHead") -> bool:
    """Whether a record's whole window is in a time."""
    return hours.from_ms <= one.start_ms and one.end_ms <= hours.to_ms


def _window(one: Usage) -> int:
    return hash((one.cluster, one.node, one.gpu_uuid, one.start_ms, one.end_ms))


async def _replay(connection: Connection, hours: Range, policy: Accounting) -> Made:
    """Make each partition again, one after the other."""
    sender = Sender(connection, client_id="gpustream-replay", max_batch_bytes=512 * 1024)
    written = (HOURS.name, MINUTES.name)
    async with history.opened(connection, [ATTRIBUTED.name, *written]) as past, connecting(sender):
        await topic_admin.check(connection, TopicAccess((ATTRIBUTED.name, *written), written))
        ticks = await past.spans(ATTRIBUTED.name, hours.from_ms - BEFORE_MS)
        await history.refuse_what_is_gone(past, ATTRIBUTED, ticks, hours.from_ms, before_ms=BEFORE_MS, step_ms=HOUR_MS)
        before = await past.spans(HOURS.name, hours.from_ms) | await past.spans(MINUTES.name, hours.from_ms)
        made = Made()
        with history.progress("making usage again", {**ticks, **before}) as advanced:
            for tp, span in ticks.items():
                own = {one: its for one, its in before.items() if one.partition == tp.partition}
                await Partitioned(past, sender, hours, advanced).replay(tp, span, own, policy, made)
    return made


class Partitioned:
    """A partition that is made again."""

    def __init__(self, past: History, sender: Sender, hours: Range, advanced: Callable[[int], None]) -> None:
        self._past, self._writer, self._hours, self._advanced = past, history.Writer(sender), hours, advanced

    async def replay(
        self, tp: Partition, ticks: Span, before: Mapping[Partition, Span], policy: Accounting, made: Made
    ) -> None:
        """Write what its nodes had, and zeros under the keys that only the records of before have."""
        generation = 1 + await self._generation(before)
        nodes = NodesAgain(self._hours, policy._replace(generation=generation))
        written = Written(self._hours, generation)

        async def write(final: Sequence[Usage]) -> None:
            for one in final:
                written.note(one)
            made.hours += sum(one.end_ms - one.start_ms == HOUR_MS for one in final)
            made.minutes += sum(one.end_ms - one.start_ms == MINUTE_MS for one in final)
            await self._send(tp.partition, final)

        async for records in self._past.records({tp: ticks}, self._advanced):
            await write(nodes.take(records))
        await write(nodes.end(now_ms() - MINUTE_MS))
        async for records in self._past.records(before):
            zeros = [zero for _, one in history.decoded(records, _decode) if (zero := written.zero(one))]
            made.zeros += len(zeros)
            await self._send(tp.partition, zeros)
        await self._writer.settle()
        made.nodes, made.ticks = made.nodes + len(nodes.nodes), made.ticks + nodes.ticks
        made.malformed += nodes.malformed
        made.generation = max(made.generation, generation)

    async def _generation(self, before: Mapping[Partition, Span]) -> int:
        """The highest that the partition has of these hours."""
        highest = 0
        async for records in self._past.records(before, self._advanced):
            for _, one in history.decoded(records, _decode_head):
                if _holds(self._hours, one):
                    highest = max(highest, one.generation)
        return highest

    async def _send(self, partition: int, records: Sequence[Usage]) -> None:
        """Write records of hours and of minutes, each to its topic."""
        for one in records:
            topic = HOURS if one.end_ms - one.start_ms == HOUR_MS else MINUTES
            await self._writer.write(topic.name, msgspec.json.encode(one), one.key.encode(), partition)
