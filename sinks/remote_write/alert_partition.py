"""One partition of gpu.alerts on its way to the receiver: ``gpu_alert_firing``, and what became of each record.

In: records, in order; the time. Out: requests, dead letters, the offset after each batch.
A request holds at most one sample of a series, as those of gpu.attributed do and for the same reason.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple

from sinks import alerts
from sinks.alerts import Undecodable
from sinks.blocks import Group
from sinks.dead_letters import Record
from sinks.outcomes import Outcome
from sinks.remote_write.alert_series import AlertSeries, Change, Malformed, rounds
from sinks.remote_write.deliver import Fate
from sinks.remote_write.left_out import LEFT_OUT
from sinks.remote_write.partition import Shared, describe
from sinks.remote_write.policy import UNTIMELY
from topics.alerts import Alert


class _Read(NamedTuple):
    """A record and what it writes: a change, an error, or neither where it is a replay."""

    record: Record
    change: Change | None = None
    error: str = ""


class AlertPartition:
    """The handler of a partition. ``clock_s`` says the time of day."""

    def __init__(self, series: AlertSeries, shared: Shared, clock_s: Callable[[], float] = time.time) -> None:
        self._series = series
        self._shared = shared
        self._clock_s = clock_s

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was written before."""
        for record in records:
            try:
                self._series.recall(*_alert(record))
            except (Undecodable, Malformed):
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Write the alerts' starts and ends, batch by batch."""
        for batch in self._batches(records):
            fates = await self._write([read.change for read in batch if read.change], abandon)
            await self._finish(batch, fates, abandon)
            yield batch[-1].record.offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Write again what fires."""
        while due := self._series.due(self._now_ms()):
            for start in range(0, len(due), self._shared.max_samples):
                some = due[start : start + self._shared.max_samples]
                fates = await self._send([one.group for one in some], abandon)
                for repeat, fate in zip(some, fates, strict=True):
                    self._series.repeated(repeat)
                    self._count(fate)

    def forget(self) -> None:
        """The topic was made anew."""
        self._series.forget()

    def _batches(self, records: Sequence[Record]) -> Iterator[list[_Read]]:
        """Cut the records before an alert's second one. Made only when the last batch is settled."""
        batch: list[_Read] = []
        alerts: set[bytes | None] = set()
        for record in records:
            if record.key in alerts or len(batch) >= self._shared.max_samples:
                yield batch
                batch, alerts = [], set()
            batch.append(self._read(record))
            alerts.add(record.key)
        if batch:
            yield batch

    def _read(self, record: Record) -> _Read:
        try:
            fingerprint, alert = _alert(record)
            if self._series.is_replay(fingerprint, alert):
                return _Read(record)
            return _Read(record, self._series.change(fingerprint, alert, record.timestamp, self._now_ms()))
        except (Undecodable, Malformed) as error:
            return _Read(record, error=str(error))

    async def _write(self, changes: Sequence[Change], abandon: asyncio.Event) -> list[Fate]:
        """Write changes of different alerts, the earlier samples of each first."""
        fates = [Fate() for _ in changes]
        for samples in rounds(changes):
            for (number, _), fate in zip(
                samples, await self._send([group for _, group in samples], abandon), strict=True
            ):
                fates[number].refused += fate.refused
                fates[number].left_out += fate.left_out
        return fates

    async def _send(self, groups: Sequence[Group], abandon: asyncio.Event) -> list[Fate]:
        async with self._shared.slots:
            return await self._shared.deliverer.deliver([[group] for group in groups], abandon)

    async def _finish(self, batch: Sequence[_Read], fates: Sequence[Fate], abandon: asyncio.Event) -> None:
        """Settle a batch: dead letters first, so that nothing is counted that may be repeated."""
        of = dict(zip((read.record.offset for read in batch if read.change), fates, strict=True))
        ends = [(read, *_end(read, of.get(read.record.offset))) for read in batch]
        for read, outcome, why in ends:
            if outcome == "dead_lettered":
                await self._shared.letters.bury(read.record, why, abandon)
        for read, outcome, why in ends:
            if read.change is not None:
                self._series.settle(read.change)
                self._count(of[read.record.offset])
                self._count_end(read.change, outcome)
            self._shared.outcomes.finish(outcome, why)

    def _count(self, fate: Fate) -> None:
        reasons = [*(refusal.reason for _, refusal in fate.refused), *(LEFT_OUT for _ in fate.left_out)]
        for reason, samples in Counter(reasons).items():
            made = self._shared.instruments
            made.counter("gpustream_remote_write_alert_samples_refused_total", reason).inc(samples)

    def _count_end(self, change: Change, outcome: Outcome) -> None:
        if outcome == "delivered" and change.groups and change.groups[-1].values[0] != 1.0:
            self._shared.instruments.counter("gpustream_remote_write_markers_total").inc()

    def _now_ms(self) -> int:
        return int(self._clock_s() * 1000)


def _alert(record: Record) -> tuple[str, Alert | None]:
    """The fingerprint, and the alert: None where it was deleted. Raises Undecodable."""
    return (record.key or b"").decode("utf-8", "replace"), alerts.read(record)


def _end(read: _Read, fate: Fate | None) -> tuple[Outcome, str]:
    """What became of a record, and why. A sample between start and end that is refused for its time does not matter."""
    if read.error:
        return "dead_lettered", read.error
    if read.change is None or fate is None:
        return "duplicate", ""
    if not {refusal.reason for _, refusal in fate.refused} <= UNTIMELY:
        return "dead_lettered", describe(fate)
    reasons = [(group.ts_ms, refusal.reason) for group, refusal in fate.refused]
    reasons += [(group.ts_ms, LEFT_OUT) for group, _ in fate.left_out]
    late = [reason for ts_ms, reason in reasons if ts_ms == read.change.groups[-1].ts_ms]
    return ("dropped", late[0]) if late else ("delivered", "")
