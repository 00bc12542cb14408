"""Sends the samples of alerts and of usage, which are not part of ticks, and settles their records.

In: records, each with its samples. Out: requests, dead letters, outcomes.
State: none.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from delivery.dead_letters import Record
from sinks.outcomes import Outcome
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.policy import UNTIMELY
from sinks.remote_write.refusals import LEFT_OUT, Delivered
from sinks.series.model import STALE, SampleGroup, samples_of

END = (STALE,)
"""The values of a staleness marker for a single series."""


class Written(NamedTuple):
    """A record and its samples: groups of one series each, the earliest first.

    ``groups`` None: it has no samples, and ends as ``outcome``. ``settle`` is called when the samples were accepted, or
    refused for good.
    """

    record: Record
    groups: Sequence[SampleGroup] | None = None
    outcome: Outcome = "duplicate"
    why: str = ""
    settle: Callable[[], None] = lambda: None


class SampleWriter:
    """Writes samples. ``refused``: the name of the counter of refused samples."""

    def __init__(self, shared: RemoteWriteShared, refused: str) -> None:
        self._shared, self._refused = shared, refused

    async def finish(self, batch: Sequence[Written], abandon: asyncio.Event) -> None:
        """Write the samples of records of different series. A request has one sample of each, the earliest first.

        Dead letters are written before anything is counted, because an abandoned batch is repeated. Raises Abandoned.
        """
        results = [Delivered() for _ in batch]
        groups_and_results = [(written.groups or (), result) for written, result in zip(batch, results, strict=True)]
        for depth in range(max(len(groups) for groups, _ in groups_and_results)):
            turn = [(groups[depth], result) for groups, result in groups_and_results if depth < len(groups)]
            for (_, result), sent in zip(turn, await self.send([group for group, _ in turn], abandon), strict=True):
                result.refused += sent.refused
                result.found += sent.found
                result.left_out += sent.left_out
        outcomes = [_outcome(written, result) for written, result in zip(batch, results, strict=True)]
        for written, (outcome, why) in zip(batch, outcomes, strict=True):
            if outcome == "dead_lettered":
                await self._shared.letters.write(written.record, why, abandon)
        for written, result, (outcome, why) in zip(batch, results, outcomes, strict=True):
            written.settle()
            self.count(result)
            if outcome == "delivered" and written.groups and written.groups[-1].values is END:
                self._shared.instruments.counter("gpustream_remote_write_markers_total").inc()
            self._shared.outcomes.finish(outcome, why)

    async def send(self, groups: Sequence[SampleGroup], abandon: asyncio.Event) -> list[Delivered]:
        """Send samples of different series. Returns the result of each. Raises Abandoned."""
        async with self._shared.slots:
            return await self._shared.deliverer.deliver([[group] for group in groups], abandon)

    def count(self, result: Delivered) -> None:
        """Count the refused samples, which were reported, and leave their series out from now on."""
        self._shared.deliverer.leave_out(result)
        refused = [(group, refusal.reason) for group, refusal in result.refused]
        for group, reason in [*refused, *((group, LEFT_OUT) for group, _ in result.left_out)]:
            self._shared.instruments.counter(self._refused, reason).inc(len(group.values))


def _outcome(written: Written, result: Delivered) -> tuple[Outcome, str]:
    """The outcome of a record, and the reason. If samples were refused for their time, only the last time matters."""
    if written.groups is None:
        return written.outcome, written.why
    if not {refusal.reason for _, refusal in result.refused} <= UNTIMELY:
        return "dead_lettered", result.describe()
    missing = [(group, refusal.reason) for group, refusal in result.refused]
    missing += [(group, LEFT_OUT) for group, _ in result.left_out]
    if written.groups:
        ts_ms, values = written.groups[-1].ts_ms, written.groups[-1].values
        missing = [(group, reason) for group, reason in missing if group.ts_ms == ts_ms]
        if missing and samples_of(group for group, _ in missing) >= len(values):
            return "dropped", min(reason for _, reason in missing)
    return "delivered", ""
