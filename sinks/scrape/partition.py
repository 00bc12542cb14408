"""The latest tick of every node of a partition.

In:       records of gpu.attributed, in the order of their partition.
Out:      the series to show, and what became of each record.
State:    per node, the identity and the series of its last tick, and when it was heard of. A series that is missing
          from a node's last tick is not shown; nor is a node that was not heard of for ``stale_after``, nor a partition
          that was taken away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from delivery import replays
from delivery.dead_letters import DeadLetters, Record
from delivery.instruments import Instruments
from delivery.replays import Last
from sinks.outcomes import OnOutcome, Outcome, Outcomes
from sinks.series.model import SampleGroup, primaries
from sinks.series.translation import Cache, Key, Translator
from topics.attributed import TOPIC, AttributedSample
from topics.topic import decoder

VALUES = "gpustream_scrape_values_delivered_total"

_STEP = 50

_decode = decoder(AttributedSample)


@dataclass(slots=True)
class _ShownNode:
    """A node's last tick, as it is shown."""

    last: Last
    heard_s: float
    groups: dict[Key, SampleGroup]
    cache: Cache


class ScrapeShared(NamedTuple):
    """What all partitions of a sink use together."""

    translator: Translator
    stale_after_s: float
    outcomes: Outcomes
    instruments: Instruments
    letters: DeadLetters
    on_outcome: OnOutcome | None = None
    now_s: Callable[[], float] = time.monotonic


class ScrapePartition:
    """The handler of a partition."""

    def __init__(self, partition: int, shared: ScrapeShared) -> None:
        self.partition = partition
        self._shared = shared
        self._nodes: dict[tuple[str, str], _ShownNode] = {}
        self._abandon: asyncio.Event | None = None

    def series(self) -> Iterator[SampleGroup]:
        """What is to be shown now."""
        if self._abandon is not None and self._abandon.is_set():
            return
        oldest_s = self._shared.now_s() - self._shared.stale_after_s
        for key in [key for key, node in self._nodes.items() if node.heard_s <= oldest_s]:
            del self._nodes[key]
        for node in self._nodes.values():
            yield from node.groups.values()

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
                try:
                    sample = _decode(record.value or b"")
                except msgspec.DecodeError as error:
                    await self._shared.letters.bury(record, f"not a record of {TOPIC.name}: {error}", abandon)
                    self._shared.outcomes.finish("dead_lettered")
                else:
                    self._count(sample, self._apply(sample))
            yield step[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """The partition is still ours."""
        self._abandon = abandon

    def reset(self) -> None:
        """The topic was created again."""
        self._nodes.clear()

    def _apply(self, sample: AttributedSample) -> Outcome:
        """Show a tick instead of the node's last one; of devices with the same uuid, the first."""
        key = (sample.cluster, sample.node)
        before = self._nodes.get(key)
        last = before.last if before else None
        verdict = replays.verdict(last, sample)
        if verdict == "replay":
            return "duplicate"
        if verdict == "new_log":
            self._shared.outcomes.new_log(self.partition)
        cache = before.cache if before else {}
        groups: dict[Key, SampleGroup] = {}
        for of, group in zip(*self._shared.translator.translate(sample, cache), strict=True):
            groups.setdefault(of, group)
        self._nodes[key] = _ShownNode(replays.after(last, sample), self._shared.now_s(), groups, cache)
        return "delivered"

    def _count(self, sample: AttributedSample, outcome: Outcome) -> None:
        """Count a record by what became of it, and the values of metrics that are shown of it."""
        self._shared.outcomes.finish(outcome)
        if outcome == "delivered":
            shown = self._nodes[sample.cluster, sample.node].groups.values()
            self._shared.instruments.counter(VALUES).inc(primaries(shown))
        if self._shared.on_outcome is not None:
            self._shared.on_outcome(sample.cluster, sample.node, sample.run_id, sample.seq, outcome)
