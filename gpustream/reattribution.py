"""``gpustream replay --into PREFIX``: attributes again what gpu.samples still has, into topics of another prefix.

In:       gpu.samples of a time, gpu.allocations and gpu.workloads from before it to where they end, in no group.
Out:      gpu.attributed of that prefix: in each partition the ticks in the order of their samples. A record is, byte
          for byte, the one that the stream wrote, unless that was marked late or none, and the snapshot came after all.
State:    none. What the target has already is not written again, so one that was killed is run again and goes on.
On failure: what Kafka does not have any more, and a target that has something else, are refused with the reason.
"""

import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from delivery.connection import Connection
from delivery.dead_letters import connecting
from delivery.kafka_admin import BrokerError
from delivery.ledger import Partition
from delivery.positions import STATE_WINDOW_MS
from delivery.sender import Sender
from gpustream import history
from gpustream.history import History, Span
from gpustream.usage.read import Range
from streams.attribution import join
from streams.attribution.attribute import Joined
from streams.attribution.component import decode
from streams.attribution.log_time import Watermark
from streams.stage import Malformed
from topics import allocations, attributed, samples, workloads
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.topic import UInt, decoder, node_key
from topics.workloads import NodeWorkloads

_STATES = (allocations.TOPIC.name, workloads.TOPIC.name)
_PRUNE_AT_MARKS = 64
_READ_TO_THE_END = msgspec.structs.replace(join.NEW, allocations_read_s=math.inf, watermark_ms=math.inf)
"""A node of which all snapshots and workloads have been read: none of its ticks waits."""


class _OfSample(msgspec.Struct, frozen=True):
    """What of a record of gpu.attributed says of which sample it is."""

    offset: UInt


_decode_offset = decoder(_OfSample)


class JoinedAgain:
    """The nodes of one partition. Pure. Give it all snapshots and workloads first, then the samples in their order."""

    def __init__(self) -> None:
        self._states: dict[bytes, join.NodeState] = {}
        self._watermark = Watermark()
        self.malformed = 0

    @property
    def nodes(self) -> int:
        """Of how many nodes there was a record."""
        return len(self._states)

    def learn(self, topic: str, record: Any) -> None:
        """A record of gpu.allocations or gpu.workloads. One that is malformed has its dead letter already."""
        try:
            decoded = decode(topic, record.key, record.value)
        except Malformed:
            return
        if isinstance(decoded, NodeWorkloads):
            logged_ms = self._watermark.workloads_read(record.offset, record.timestamp)
            self._step(record.key, join.LoggedWorkloads(decoded, logged_ms))
        elif not isinstance(decoded, Sample):
            self._step(record.key, decoded)

    def attribute(self, record: Any) -> AttributedSample | None:
        """What becomes of a record of gpu.samples; None if it is malformed."""
        try:
            decoded = decode(samples.TOPIC.name, record.key, record.value)
        except Malformed:
            decoded = None
        if not isinstance(decoded, Sample):
            self.malformed += 1
            return None
        (joined,) = self._step(record.key, join.PendingTick(decoded, record.offset, 0.0, record.timestamp, math.inf))
        if len(self._states[record.key].marks) > _PRUNE_AT_MARKS:
            self._step(record.key, join.Committed(record.offset))
        sample: AttributedSample = joined.sample
        return sample

    def _step(self, key: bytes, record: join.Record) -> Sequence[Joined]:
        self._states[key], joined = join.step(self._states.get(key, _READ_TO_THE_END), record, 0.0)
        return joined


@dataclass
class Reattributed:
    """What has been read and written so far. ``there`` were ticks that the target had already."""

    nodes: int = 0
    exact: int = 0
    late: int = 0
    none: int = 0
    there: int = 0
    malformed: int = 0


async def reattribute(connection: Connection, into: str, asked: Range) -> Reattributed:
    """Attribute the samples of a time again, one partition after the other. Raises BrokerError."""
    target = dataclasses.replace(connection, topic_prefix=into)
    sender = Sender(target, client_id="gpustream-replay", max_batch_bytes=512 * 1024)
    done = Reattributed()
    async with (
        history.opened(connection, [samples.TOPIC.name, *_STATES]) as past,
        history.opened(target, [samples.TOPIC.name, attributed.TOPIC.name]) as theirs,
    ):
        here, there = past.partitions[samples.TOPIC.name], theirs.partitions[attributed.TOPIC.name]
        if here != there:
            raise BrokerError(
                f"{into}{attributed.TOPIC.name} has {there} partitions, and {samples.TOPIC.name} has {here}: a tick"
                f" goes into the partition that its sample came from. Run `gpustream topics create --topic-prefix"
                f" {into} --partitions {here}`"
            )
        if any(start < end for start, end in (await theirs.spans(samples.TOPIC.name)).values()):
            raise BrokerError(
                f"{into}{samples.TOPIC.name} has records, so {into!r} is a pipeline of its own: give --into a new"
                " prefix"
            )
        first = await past.spans(samples.TOPIC.name, asked.from_ms)
        await history.refuse_what_is_gone(past, samples.TOPIC, first, asked.from_ms)
        after = await past.spans(samples.TOPIC.name, asked.to_ms)
        ticks = {tp: Span(span.start, max(span.start, after[tp].start)) for tp, span in first.items()}
        known: dict[str, dict[Partition, Span]] = {}
        for topic in _STATES:  # from ten minutes before the time, or all of it where there was nothing since
            whole, since = await past.spans(topic), await past.spans(topic, asked.from_ms - STATE_WINDOW_MS)
            known[topic] = {tp: span if span.start < span.end else whole[tp] for tp, span in since.items()}
        every = ticks | {tp: span for spans in known.values() for tp, span in spans.items()}
        async with connecting(sender):
            with history.progress("attributing again", every) as advanced:
                for tp, span in ticks.items():
                    again = JoinedAgain()
                    for topic in _STATES:
                        state = Partition(topic, tp.partition)
                        async for records in past.records({state: known[topic][state]}, advanced):
                            for record in records:
                                again.learn(topic, record)
                    await _write(past.records({tp: span}, advanced), theirs, sender, again, done)
    return done


async def _write(
    ticks: AsyncIterator[Sequence[Any]], theirs: History, sender: Sender, again: JoinedAgain, done: Reattributed
) -> None:
    """Write what becomes of a partition's samples, after those that the target has."""
    encode, writer = msgspec.json.Encoder().encode, history.Writer(sender)
    there: Span | None = None
    async for records in ticks:
        for record in records:
            if there is None:
                there = await _there(theirs, Partition(attributed.TOPIC.name, record.partition))
            if (made := again.attribute(record)) is None:
                continue
            if made.offset < there.start:
                raise BrokerError(
                    f"partition {record.partition} of the target begins with a later sample ({there.start}) than this"
                    f" time does ({made.offset}): give --into another prefix, or --from as it was given before"
                )
            if made.offset < there.end:
                done.there += 1
                continue
            setattr(done, made.attribution, getattr(done, made.attribution) + 1)
            key = node_key(made.cluster, made.node)
            await writer.write(attributed.TOPIC.name, encode(made), key, record.partition)
    await writer.settle()
    done.nodes, done.malformed = done.nodes + again.nodes, done.malformed + again.malformed


async def _there(theirs: History, tp: Partition) -> Span:
    """The samples of which the target has the ticks: from the first one's offset to the one after the last."""
    begin, end = (await theirs.spans(tp.topic))[tp]
    if begin == end:
        return Span(0, 0)
    ends = [await theirs.record(tp, at) for at in (begin, end - 1)]
    try:
        first, last = (_decode_offset(one.value or b"").offset for one in ends if one is not None)
    except (msgspec.DecodeError, ValueError):
        raise BrokerError(
            f"{tp.topic} partition {tp.partition} of the target has what is no tick: another --into"
        ) from None
    return Span(first, last + 1)
