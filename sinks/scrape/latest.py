"""The latest tick of every node of a partition.

In:       records of gpu.attributed, in the order of their partition.
Out:      the devices to show, and what became of each record.
State:    per node, the identity and the devices of its last tick, and when it was heard of. A series that is missing
          from a node's last tick is not shown; nor is a node that was not heard of for ``stale_after``, nor a partition
          that was taken away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sinks.blocks import Layouts, Measured, holders
from sinks.dead_letters import DeadLetters, Record
from sinks.device_series import Further, MadeOf, further, made
from sinks.labels import MAX_LABELS, LabelSet, Seen, labels, place, seen
from sinks.outcomes import Outcome, Outcomes
from sinks.scrape.families import Device, lines
from topics import replays
from topics.attributed import TOPIC, AttributedSample
from topics.decoding import decoder
from topics.instruments import Instruments
from topics.metric import Profile
from topics.replays import Last

OnOutcome = Callable[[str, str, int, int, Outcome], None]
"""Told the cluster, node, run_id and seq of each tick, and what became of it."""

VALUES = "gpustream_scrape_values_delivered_total"

_STEP = 50

_decode = decoder(AttributedSample)


class _Known(NamedTuple):
    """A device, or what it has beside its metrics, as it was last labelled, and what is shown of it."""

    seen: Seen | MadeOf
    device: Device


_KnownBy = dict[str | tuple[str, ...], _Known]
"""By a device's uuid, or by the key of what is beside its metrics."""


@dataclass(slots=True)
class _Node:
    """A node's last tick, as it is shown."""

    last: Last
    heard_s: float
    known: _KnownBy


class Shared(NamedTuple):
    """What all partitions of a sink use together."""

    names: Profile
    label_set: LabelSet
    stale_after_s: float
    outcomes: Outcomes
    instruments: Instruments
    letters: DeadLetters
    max_labels: int = MAX_LABELS
    on_outcome: OnOutcome | None = None
    now_s: Callable[[], float] = time.monotonic


class LatestOfPartition:
    """The handler of a partition."""

    def __init__(self, partition: int, shared: Shared) -> None:
        self.partition = partition
        self._shared = shared
        self._layouts = Layouts(shared.names)
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._abandon: asyncio.Event | None = None

    def devices(self) -> Iterator[Device]:
        """What is to be shown now."""
        if self._abandon is not None and self._abandon.is_set():
            return
        oldest_s = self._shared.now_s() - self._shared.stale_after_s
        for key in [key for key, node in self._nodes.items() if node.heard_s <= oldest_s]:
            del self._nodes[key]
        for node in self._nodes.values():
            yield from (known.device for known in node.known.values())

    def recall(self, records: Sequence[Record]) -> None:
        """Show what was shown before."""
        for record in records:
            try:
                self._apply(_decode(record.value or b""))
            except msgspec.DecodeError:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Show the records, some at a time."""
        self._abandon = abandon
        for start in range(0, len(records), _STEP):
            step = records[start : start + _STEP]
            for record in step:
                await self._take(record, abandon)
            yield step[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """The partition is still ours."""
        self._abandon = abandon

    def forget(self) -> None:
        """The topic was made anew."""
        self._nodes.clear()

    async def _take(self, record: Record, abandon: asyncio.Event) -> None:
        sample: AttributedSample | None = None
        outcome: Outcome = "dead_lettered"
        try:
            sample = _decode(record.value or b"")
            outcome = self._apply(sample)
        except msgspec.DecodeError as error:
            await self._shared.letters.bury(record, f"not a record of {TOPIC.name}: {error}", abandon)
        self._finish(sample, outcome)

    def _apply(self, sample: AttributedSample) -> Outcome:
        """Shows a tick instead of the node's last one."""
        key = (sample.cluster, sample.node)
        before = self._nodes.get(key)
        last = before.last if before else None
        verdict = replays.verdict(last, sample)
        if verdict == "replay":
            return "duplicate"
        if verdict == "new_log":
            self._shared.outcomes.new_log(self.partition)
        known = self._shown(sample, before.known if before else {})
        self._nodes[key] = _Node(replays.after(last, sample), self._shared.now_s(), known)
        return "delivered"

    def _shown(self, sample: AttributedSample, before: _KnownBy) -> _KnownBy:
        """What a tick shows: its devices, of those with the same uuid the first, and what is beside their metrics."""
        where, shown = place(sample), _KnownBy()
        for device in sample.devices:
            if device.uuid not in shown:
                measured = self._layouts.measure(device.metrics, holders(device, sample.attribution))
                shown[device.uuid] = self._device(seen(where, device), measured, before.get(device.uuid))
        for one in further(self._shared.label_set, where, sample):
            if one.key not in shown:
                shown[one.key] = self._beside(one, before.get(one.key))
        return shown

    def _device(self, now: Seen, measured: Measured, before: _Known | None) -> _Known:
        if before is not None and before.seen == now and before.device.lines.rows is measured.rows:
            return _Known(now, Device(before.device.lines, measured.values))
        pairs = labels(self._shared.label_set, now, self._shared.max_labels)
        return _Known(now, Device(lines(pairs, measured.rows), measured.values))

    def _beside(self, one: Further, before: _Known | None) -> _Known:
        if before is not None and before.seen == one.of:
            return _Known(one.of, Device(before.device.lines, one.values))
        return _Known(one.of, Device(lines(*made(self._shared.label_set, one.of, self._shared.max_labels)), one.values))

    def _finish(self, sample: AttributedSample | None, outcome: Outcome) -> None:
        self._shared.outcomes.finish(outcome)
        if sample is None:
            return
        if outcome == "delivered":
            self._shared.instruments.counter(VALUES).inc(self._values(sample))
        if self._shared.on_outcome is not None:
            self._shared.on_outcome(sample.cluster, sample.node, sample.run_id, sample.seq, outcome)

    def _values(self, sample: AttributedSample) -> int:
        """Values of ``metrics`` among what is shown of a tick."""
        shown = self._nodes[sample.cluster, sample.node].known.values()
        return sum(row.primary for known in shown for row in known.device.lines.rows)
