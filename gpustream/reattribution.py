"""``gpustream replay --into PREFIX``: attributes again what gpu.samples still has, into topics of another prefix.

In:       gpu.samples of a time, gpu.allocations and gpu.workloads from before it to where they end, in no group.
Out:      gpu.attributed of that prefix: in each partition the ticks in the order of their samples. Each record has the
          bytes of the stream's. It differs only if that was marked late or none, and the snapshot came after all.
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


class _SampleOffset(msgspec.Struct, frozen=True):
    """The field of a record of gpu.attributed that identifies its sample."""

    offset: UInt


_decode_offset = decoder(_SampleOffset)


class PartitionJoin:
    """The join of one partition. Pure. Feed it all snapshots and workloads first, then the samples in their order."""

    def __init__(self) -> None:
        self._states: dict[bytes, join.NodeState] = {}
        self._watermark = Watermark()
        self.malformed = 0

    def learn(self, topic: str, record: Any) -> None:
        """Adds a record of gpu.allocations or gpu.workloads. Skips a malformed one, which has its dead letter."""
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
        """The attributed sample of a record of gpu.samples; None if it is malformed."""
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
class ReattributionTotals:
    """How much has been read and written so far. ``nodes`` counts those with ticks, ``existing`` the ticks that the
    target had already."""

    nodes: int = 0
    exact: int = 0
    late: int = 0
    none: int = 0
    existing: int = 0
    malformed: int = 0


async def reattribute(connection: Connection, into: str, time_range: Range) -> ReattributionTotals:
    """Attributes the samples of a time again, one partition after the other. Raises BrokerError."""
    target = dataclasses.replace(connection, topic_prefix=into)
    sender = Sender(target, client_id="gpustream-replay")
    totals = ReattributionTotals()
    async with (
        history.opened(connection, [samples.TOPIC.name, *_STATES]) as reader,
        history.opened(target, [samples.TOPIC.name, attributed.TOPIC.name]) as target_reader,
    ):
        source_partitions = reader.partitions[samples.TOPIC.name]
        target_partitions = target_reader.partitions[attributed.TOPIC.name]
        if source_partitions != target_partitions:
            raise BrokerError(
                f"{into}{attributed.TOPIC.name} has {target_partitions} partitions, and {samples.TOPIC.name} has"
                f" {source_partitions}: a tick goes into the partition that its sample came from."
                " Give --into a new prefix, or make its empty topics again: `gpustream topics create"
                f" --topic-prefix {into} --partitions {source_partitions} --recreate-empty`"
            )
        if any(start < end for start, end in (await target_reader.spans(samples.TOPIC.name)).values()):
            raise BrokerError(
                f"{into}{samples.TOPIC.name} has records, so {into!r} is a pipeline of its own: give --into a new"
                " prefix"
            )
        first = await reader.spans(samples.TOPIC.name, time_range.from_ms)
        await history.check_retention(reader, samples.TOPIC, first, time_range.from_ms)
        after = await reader.spans(samples.TOPIC.name, time_range.to_ms)
        ticks = {tp: Span(span.start, max(span.start, after[tp].start)) for tp, span in first.items()}
        state_spans: dict[str, dict[Partition, Span]] = {}
        for topic in _STATES:  # from ten minutes before the time, or all of it where there was nothing since
            all_records = await reader.spans(topic)
            recent = await reader.spans(topic, time_range.from_ms - STATE_WINDOW_MS)
            state_spans[topic] = {tp: span if span.start < span.end else all_records[tp] for tp, span in recent.items()}
        all_spans = ticks | {tp: span for spans in state_spans.values() for tp, span in spans.items()}
        async with connecting(sender):
            with history.progress("attributing again", all_spans) as advanced:
                for tp, span in ticks.items():
                    partition_join = PartitionJoin()
                    for topic in _STATES:
                        state = Partition(topic, tp.partition)
                        async for records in reader.records({state: state_spans[topic][state]}, advanced):
                            for record in records:
                                partition_join.learn(topic, record)
                    all_ticks = reader.records({tp: span}, advanced, on_deleted=history.refuse_deleted)
                    await _write(all_ticks, target_reader, sender, partition_join, totals)
    return totals


async def _write(
    ticks: AsyncIterator[Sequence[Any]],
    target_reader: History,
    sender: Sender,
    partition_join: PartitionJoin,
    totals: ReattributionTotals,
) -> None:
    """Attributes a partition's samples again, and writes the ticks that the target does not have."""
    encode, writer = msgspec.json.Encoder().encode, history.Writer(sender)
    written, nodes = None, set[bytes]()
    async for records in ticks:
        for record in records:
            if written is None:
                written = await _written_span(target_reader, Partition(attributed.TOPIC.name, record.partition))
                if 0 < written.end < record.offset:
                    raise BrokerError(
                        f"partition {record.partition} of the target ends with an earlier sample ({written.end - 1}),"
                        f" and this time begins with {record.offset}: the ticks between would be missing. Give --from"
                        " as it was given before, or where that time ended; or --into another prefix"
                    )
            if (sample := partition_join.attribute(record)) is None:
                continue
            nodes.add(record.key)
            if sample.offset < written.start:
                raise BrokerError(
                    f"partition {record.partition} of the target begins with a later sample ({written.start}) than this"
                    f" time does ({sample.offset}): give --into another prefix, or --from as it was given before"
                )
            if sample.offset < written.end:
                totals.existing += 1
                continue
            setattr(totals, sample.attribution, getattr(totals, sample.attribution) + 1)
            key = node_key(sample.cluster, sample.node)
            await writer.write(attributed.TOPIC.name, encode(sample), key, record.partition)
    await writer.settle()
    totals.nodes, totals.malformed = totals.nodes + len(nodes), totals.malformed + partition_join.malformed


async def _written_span(target_reader: History, tp: Partition) -> Span:
    """The offsets of the samples whose ticks the target has already: the first, and the one after the last."""
    begin, end = (await target_reader.spans(tp.topic))[tp]
    if begin == end:
        return Span(0, 0)
    ends = [await target_reader.record(tp, offset) for offset in (begin, end - 1)]
    try:
        first, last = (_decode_offset(record.value or b"").offset for record in ends if record is not None)
    except (msgspec.DecodeError, ValueError):
        raise BrokerError(
            f"{tp.topic} partition {tp.partition} of the target has what is no tick: another --into"
        ) from None
    return Span(first, last + 1)
