"""Samples that alerts and usage write on their own, beside those of ticks: sent, and what became of their records.

In: records, each with its samples. Out: requests, dead letters, outcomes. State: none.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from delivery.dead_letters import Record
from sinks.outcomes import Outcome
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.policy import UNTIMELY
from sinks.remote_write.refusals import LEFT_OUT, Delivered
from sinks.series.model import STALE, SampleGroup

END = (STALE,)
"""The values that end a series."""


class Written(NamedTuple):
    """A record and the samples that it writes, of one series each time, the earliest first.

    ``groups`` None: it writes nothing, and ``outcome`` says what becomes of it. ``settle`` is called when the samples
    were written, or refused for good.
    """

    record: Record
    groups: Sequence[SampleGroup] | None = None
    outcome: Outcome = "duplicate"
    why: str = ""
    settle: Callable[[], None] = lambda: None


class SampleWriter:
    """Writes samples; ``refused`` is the name of the counter of those that the receiver refuses."""

    def __init__(self, shared: RemoteWriteShared, refused: str) -> None:
        self._shared, self._refused = shared, refused

    async def finish(self, batch: Sequence[Written], abandon: asyncio.Event) -> None:
        """Write what records of different series say: the earliest sample of each first, as a request has one of each.

        Dead letters are written before anything is counted, so that nothing is counted that may be repeated.
        Raises Abandoned.
        """
        results = [None if one.groups is None else Delivered() for one in batch]
        for depth in range(max(len(one.groups or ()) for one in batch)):
            some = [number for number, one in enumerate(batch) if depth < len(one.groups or ())]
            groups = [(batch[number].groups or ())[depth] for number in some]
            for number, sent in zip(some, await self.send(groups, abandon), strict=True):
                if (result := results[number]) is not None:
                    result.refused += sent.refused
                    result.left_out += sent.left_out
        ends = [_outcome(one, result) for one, result in zip(batch, results, strict=True)]
        for one, (outcome, why) in zip(batch, ends, strict=True):
            if outcome == "dead_lettered":
                await self._shared.letters.write(one.record, why, abandon)
        for one, result, (outcome, why) in zip(batch, results, ends, strict=True):
            if result is not None:
                one.settle()
                self.count(result)
            if outcome == "delivered" and one.groups and one.groups[-1].values is END:
                self._shared.instruments.counter("gpustream_remote_write_markers_total").inc()
            self._shared.outcomes.finish(outcome, why)

    async def send(self, groups: Sequence[SampleGroup], abandon: asyncio.Event) -> list[Delivered]:
        """Send samples of different series; what became of each. Raises Abandoned."""
        async with self._shared.slots:
            return await self._shared.deliverer.deliver([[group] for group in groups], abandon)

    def count(self, result: Delivered) -> None:
        """Count what was refused."""
        refused = [(group, refusal.reason) for group, refusal in result.refused]
        for group, reason in [*refused, *((group, LEFT_OUT) for group, _ in result.left_out)]:
            self._shared.instruments.counter(self._refused, reason).inc(len(group.values))


def _outcome(one: Written, result: Delivered | None) -> tuple[Outcome, str]:
    """What became of a record, and why. Only its last sample matters if others were refused for their time."""
    if result is None:
        return one.outcome, one.why
    if not {refusal.reason for _, refusal in result.refused} <= UNTIMELY:
        return "dead_lettered", result.describe()
    reasons = [(group.ts_ms, refusal.reason) for group, refusal in result.refused]
    reasons += [(group.ts_ms, LEFT_OUT) for group, _ in result.left_out]
    last = [reason for ts_ms, reason in reasons if one.groups and ts_ms == one.groups[-1].ts_ms]
    return ("dropped", min(last)) if last else ("delivered", "")
