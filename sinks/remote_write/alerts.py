"""``gpu_alert_firing``: one partition of gpu.alerts on its way to the receiver, a series for each alert.

In: records, each alert's in the order of its states; the time. Out: requests, dead letters, offsets.
State, by fingerprint: the last state, and the time of the series' last sample; it changes when samples are settled.
Between start and end there is a sample a minute, at times that follow from the start alone, so that every life of the
sink writes the same ones. A sample that is not after the series' last is left out. The end is a staleness marker; if
the series was written past it, because its end was not known yet, the marker comes 1 ms after the last sample.
An earlier life has written what it knew of up to when the next record was there to be read. For the time in which no
sink ran, there are no samples but starts and ends.
A request holds at most one sample of a series, as those of gpu.attributed do and for the same reason.
Rules of relabelling may do anything to a series but take its fingerprint away, without which two alerts could be one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from delivery.dead_letters import Record
from sinks.alerts import batches, key_of, read
from sinks.outcomes import Undecodable
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.samples import END, SampleWriter, Written
from sinks.series.labels import MAX_LABELS, sanitised, sanitised_name
from sinks.series.model import Row, SampleGroup, SeriesSet
from sinks.series.relabel import Relabelling
from topics.alerts import Alert, milliseconds
from topics.catalogue import ALERT_FIRING
from topics.metric import Labels

EVERY_MS = 60_000
"""So often is a firing alert written again: within what an instant query looks back."""

BACK_MS = 3_600_000
"""Samples between an alert's start and its end are written only if they are younger than that: receivers commonly
refuse older ones."""

_BEHIND_MS = 5_000
"""A partition counts as read to its end for so long after the broker said so."""

_AS_THEY_ARE = Relabelling()
_ROWS = (Row(ALERT_FIRING.name, (), "gauge", ALERT_FIRING.help, primary=False),)
_ONE = (1.0,)
_FIRST = ("alertname", "severity", "fingerprint")


@dataclass(slots=True)
class _AlertState:
    """An alert as it was last: ``series`` is None if it is over, and little is kept of those, which are many.

    ``last_ms`` is the time of its series' last sample; None: an earlier life wrote it.
    """

    starts_ms: int
    series: SeriesSet | None
    last_ms: int | None
    revision: int = 0
    values: tuple[float, ...] = _ONE


class Change(NamedTuple):
    """What a record writes: samples of one series, of which the last is the transition itself."""

    fingerprint: str
    alert: Alert | None
    groups: list[SampleGroup]


class Repeat(NamedTuple):
    """That an alert still fires."""

    fingerprint: str
    group: SampleGroup


class AlertSeries:
    """The alerts of one partition."""

    def __init__(self, max_labels: int = MAX_LABELS, relabelling: Relabelling = _AS_THEY_ARE) -> None:
        self._max_labels, self._relabelling = max_labels - relabelling.more_labels, relabelling
        self._known: dict[str, _AlertState] = {}

    def is_replay(self, fingerprint: str, alert: Alert | None) -> bool:
        """Whether this state, or a later one, was settled before. None: the alert was deleted."""
        known = self._known.get(fingerprint)
        if known is None:
            return alert is None
        if alert is None:
            return False
        order = (milliseconds(alert.starts_at), not alert.is_open, alert.revision)
        return order <= (known.starts_ms, known.series is None, known.revision)

    def change(self, fingerprint: str, alert: Alert | None, written_ms: int, now_ms: int) -> Change:
        """What a record writes that was appended at a time."""
        known = self._known.get(fingerprint)
        if alert is None:
            if known is None or known.series is None:
                return Change(fingerprint, None, [])
            deleted_ms = max(written_ms, _last(known, written_ms, now_ms) + 1)
            return Change(fingerprint, None, _written([SampleGroup(known.series, deleted_ms, END)]))
        starts_ms, ends_ms = _times(alert)
        going_on = known.series if known is not None and known.starts_ms == starts_ms else None
        series = going_on or self._series_of(alert)
        last_ms = _last(known, written_ms, now_ms) if known else -1
        if ends_ms is None and going_on is not None:  # an update
            at_ms, series = max(last_ms + 1, min(written_ms, now_ms)), self._series_of(alert)
            renamed = going_on.labels != series.labels
            ends = [SampleGroup(going_on, at_ms, END)] if renamed else []
            return Change(fingerprint, alert, _written([*ends, SampleGroup(series, at_ms, _values(alert))]))
        if ends_ms is None:
            groups = [SampleGroup(series, starts_ms, _values(alert))] if starts_ms > last_ms else []
            return Change(fingerprint, alert, _written(groups))
        points = [] if going_on else [starts_ms]
        points += _between(starts_ms, max(last_ms, now_ms - BACK_MS), min(ends_ms, now_ms + 1))
        values = known.values if going_on and known is not None else _values(alert)
        groups = [SampleGroup(series, ts_ms, values) for ts_ms in points if ts_ms > last_ms]
        last_ms = groups[-1].ts_ms if groups else last_ms
        return Change(fingerprint, alert, _written([*groups, SampleGroup(series, max(ends_ms, last_ms + 1), END)]))

    def settle(self, change: Change) -> None:
        """What a record writes was written, or refused for good."""
        fingerprint, alert, groups = change
        if alert is None:
            self._known.pop(fingerprint, None)
            return
        known = self._known.get(fingerprint)
        series = None
        if alert.is_open:
            series = groups[-1].series if groups else self._series_of(alert)
        last_ms = groups[-1].ts_ms if groups else known.last_ms if known else None
        starts_ms = milliseconds(alert.starts_at)
        self._known[fingerprint] = _AlertState(starts_ms, series, last_ms, alert.revision, _values(alert))

    def recall(self, fingerprint: str, alert: Alert | None) -> None:
        """A state that an earlier life settled: know it, and write nothing."""
        if alert is None:
            self._known.pop(fingerprint, None)
        elif not self.is_replay(fingerprint, alert):
            starts_ms, ends_ms = _times(alert)
            series = self._series_of(alert) if ends_ms is None else None
            self._known[fingerprint] = _AlertState(starts_ms, series, ends_ms, alert.revision, _values(alert))

    def due(self, now_ms: int) -> list[Repeat]:
        """The next sample of each firing alert that has one by now; there may be more when these are settled."""
        due = []
        for fingerprint, known in self._known.items():
            if known.series is None or not known.series.rows:
                continue
            times: Sequence[int] = [_floor(known.starts_ms, now_ms)] if now_ms >= known.starts_ms else []
            if known.last_ms is not None:
                times = _between(known.starts_ms, max(known.last_ms, now_ms - BACK_MS), now_ms + 1)
            due += [Repeat(fingerprint, SampleGroup(known.series, ts_ms, known.values)) for ts_ms in times[:1]]
        return due

    def repeated(self, repeat: Repeat) -> None:
        """A firing alert was written again, or that was refused for good."""
        self._known[repeat.fingerprint].last_ms = repeat.group.ts_ms

    def clear(self) -> None:
        """The topic was created again."""
        self._known.clear()

    def _series_of(self, alert: Alert) -> SeriesSet:
        made = self._relabelling.relabel(SeriesSet(labels(alert, self._max_labels), _ROWS, "alert")).series
        if "fingerprint" in dict(made.labels):
            return made
        return SeriesSet(tuple(sorted([*made.labels, ("fingerprint", alert.fingerprint)])), made.rows, "alert")


def _written(groups: list[SampleGroup]) -> list[SampleGroup]:
    """Those of which a rule of relabelling has left something."""
    return [group for group in groups if group.series.rows]


def labels(alert: Alert, most: int = MAX_LABELS) -> Labels:
    """The labels of an alert's series, sorted by name, at most ``most`` with its name, each name once.

    With the fingerprint, no two alerts have the same. A name that no series may have is made one.
    """
    given = [("alertname", alert.name), ("severity", alert.severity), ("fingerprint", alert.fingerprint)]
    named = {name: value for name, value in given if value}
    for name, value in alert.labels.items():
        own = sanitised_name(name)
        if not own or own[0].isdigit() or own.startswith("__"):
            own = f"label_{own}"
        if own not in named and value:
            named[own] = value
    kept = list(named.items())[: max(len(_FIRST), most - 1)]
    return tuple(sorted((name, sanitised(value)) for name, value in kept))


def _values(alert: Alert) -> tuple[float, ...]:
    """Of how many GPUs it is true; 1 if it is not about GPUs."""
    return (float(len(alert.gpus)),) if alert.gpus else _ONE


def _times(alert: Alert) -> tuple[int, int | None]:
    """When it began, and when it ended: None while it fires."""
    starts_ms = milliseconds(alert.starts_at)
    return starts_ms, None if alert.is_open or alert.ends_at is None else max(starts_ms, milliseconds(alert.ends_at))


def _last(known: _AlertState, written_ms: int, now_ms: int) -> int:
    """The time of a series' last sample: the latest that an earlier life can have written before it read the record."""
    if known.last_ms is not None:
        return known.last_ms
    return _floor(known.starts_ms, max(known.starts_ms, min(now_ms, written_ms + _BEHIND_MS)))


def _floor(starts_ms: int, ts_ms: int) -> int:
    """The time of a sample at or before a time."""
    return ts_ms - (ts_ms - starts_ms) % EVERY_MS


def _between(starts_ms: int, after_ms: int, before_ms: int) -> Sequence[int]:
    """The times of the samples after the first one, after a time and before another."""
    return range(max(starts_ms, _floor(starts_ms, after_ms)) + EVERY_MS, before_ms, EVERY_MS)


class AlertPartition:
    """The handler of a partition. ``clock_s`` says the time of day."""

    def __init__(
        self, series: AlertSeries, shared: RemoteWriteShared, clock_s: Callable[[], float] = time.time
    ) -> None:
        self._series, self._max_samples, self._clock_s = series, shared.max_samples, clock_s
        self._writer = SampleWriter(shared, "gpustream_remote_write_alert_samples_refused_total")

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was written before."""
        for record in records:
            try:
                self._series.recall(key_of(record), read(record))
            except Undecodable:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Write the alerts' starts and ends, batch by batch."""
        for some in batches(records, self._max_samples, key=lambda record: record.key):
            await self._writer.finish([self._read(record) for record in some], abandon)
            yield some[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Write again what fires."""
        while due := self._series.due(self._now_ms()):
            for start in range(0, len(due), self._max_samples):
                some = due[start : start + self._max_samples]
                delivered = await self._writer.send([one.group for one in some], abandon)
                for repeat, result in zip(some, delivered, strict=True):
                    self._series.repeated(repeat)
                    self._writer.count(result)

    def reset(self) -> None:
        """The topic was created again."""
        self._series.clear()

    def _read(self, record: Record) -> Written:
        try:
            fingerprint, alert = key_of(record), read(record)
        except Undecodable as error:
            return Written(record, None, "dead_lettered", str(error))
        if self._series.is_replay(fingerprint, alert):
            return Written(record)
        change = self._series.change(fingerprint, alert, record.timestamp, self._now_ms())
        return Written(record, change.groups, settle=partial(self._series.settle, change))

    def _now_ms(self) -> int:
        return int(self._clock_s() * 1000)
