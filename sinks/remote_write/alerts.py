"""``gpu_alert_firing``: writes one partition of gpu.alerts, a series for each alert.

In: records, each alert's in the order of its states; the time. Out: requests, dead letters, offsets.
State, by fingerprint: the alert's last state, and the time of its series' last sample. It changes when samples are
settled.

Between start and end there is a sample each minute, at times that depend only on the start, so that every process
writes the same ones. A sample that is not later than the series' last one is left out. The end is a staleness marker;
if samples past the end were written, because the end was not known yet, it comes 1 ms after the last one. An earlier
process is assumed to have written its samples until the next record could be read. For the time in which no sink ran
there are only starts and ends. If a start or an end is far ahead of its record, the clock of its node is wrong: the
series starts or ends with the record, because receivers refuse what is of a time to come.

A request has at most one sample of a series, as for gpu.attributed and for the same reason. Relabelling rules may
change anything about a series except its fingerprint: without that, two alerts could have the same series.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from delivery.dead_letters import Record
from sinks.alerts import batches, key_of, read_alert
from sinks.outcomes import Undecodable
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.samples import END, SampleWriter, Written
from sinks.series.labels import MAX_LABELS, sanitised, sanitised_name
from sinks.series.model import Row, SampleGroup, SeriesSet
from sinks.series.relabel import NO_RELABELLING, Relabelling
from topics.alerts import Alert
from topics.catalogue import ALERT_FIRING
from topics.metric import Labels
from topics.times import epoch_ms

EVERY_MS = 60_000
"""The interval of a firing alert's samples: shorter than the lookback of an instant query."""

BACK_MS = 3_600_000
"""The greatest age of a sample between an alert's start and end: receivers commonly refuse older ones."""

_AHEAD_MS = 600_000
"""A time that is further ahead is not written: receivers commonly refuse it."""

_BEHIND_MS = 5_000
"""For this time after the broker has answered where a partition ends, it counts as read to its end."""

_ROWS = (Row(ALERT_FIRING.name, (), "gauge", ALERT_FIRING.help, primary=False),)
_ONE = (1.0,)


@dataclass(slots=True)
class _AlertState:
    """The last state of an alert. ``series`` None: it is resolved; little is kept of those, because they are many.

    ``starts_ms``: when its series starts; ``starts_at_ms``: when it starts itself, by its node's clock. ``last_ms``:
    the time of its series' last sample; None: an earlier process wrote it. ``updated_ms``: the time of the last update
    that an earlier process wrote; 0: there is none.
    """

    starts_ms: int
    starts_at_ms: int
    series: SeriesSet | None
    last_ms: int | None
    revision: int = 0
    values: tuple[float, ...] = _ONE
    updated_ms: int = 0


class AlertSeries:
    """The alerts of one partition."""

    def __init__(self, max_labels: int = MAX_LABELS, relabelling: Relabelling = NO_RELABELLING) -> None:
        self._max_labels, self._relabelling = max_labels - relabelling.more_labels, relabelling
        self._alerts: dict[str, _AlertState] = {}

    def is_replay(self, fingerprint: str, alert: Alert | None, written_ms: int) -> bool:
        """Whether this state or a later one was settled before. None: the alert was deleted."""
        last = self._alerts.get(fingerprint)
        if last is None:
            return alert is None
        if alert is None:
            return False
        order = (*self._starts_of(fingerprint, alert, written_ms), not alert.is_open, alert.revision)
        return order <= (last.starts_ms, last.starts_at_ms, last.series is None, last.revision)

    def change(self, fingerprint: str, alert: Alert | None, written_ms: int, now_ms: int) -> list[SampleGroup]:
        """The samples of a record that was appended at ``written_ms``; the last one is the transition itself.

        Those that relabelling has dropped have no rows.
        """
        last = self._alerts.get(fingerprint)
        if alert is None:
            if last is None or last.series is None:
                return []
            deleted_ms = max(written_ms, _last_ms(last, written_ms, now_ms) + 1)
            return [SampleGroup(last.series, deleted_ms, END)]
        starts_ms, starts_at_ms = self._starts_of(fingerprint, alert, written_ms)
        ends_ms = _ends_ms(alert, starts_ms, written_ms)
        current = last.series if last is not None and last.starts_at_ms == starts_at_ms else None
        series = current or self._series_of(alert)
        last_ms = _last_ms(last, written_ms, now_ms) if last else -1
        if ends_ms is None and current is not None:  # an update
            at_ms, series = max(last_ms + 1, min(written_ms, now_ms)), self._series_of(alert)
            renamed = current.labels != series.labels
            ends = [SampleGroup(current, at_ms, END)] if renamed else []
            return [*ends, SampleGroup(series, at_ms, _values(alert))]
        if ends_ms is None:
            return [SampleGroup(series, starts_ms, _values(alert))] if starts_ms > last_ms else []
        points = [] if current else [starts_ms]
        points += _between(starts_ms, max(last_ms, now_ms - BACK_MS), min(ends_ms, now_ms + 1))
        values = last.values if current and last is not None else _values(alert)
        groups = [SampleGroup(series, ts_ms, values) for ts_ms in points if ts_ms > last_ms]
        last_ms = groups[-1].ts_ms if groups else last_ms
        return [*groups, SampleGroup(series, max(ends_ms, last_ms + 1), END)]

    def settle(self, fingerprint: str, alert: Alert | None, written_ms: int, groups: Sequence[SampleGroup]) -> None:
        """Note that the samples of a record were accepted, or refused for good."""
        if alert is None:
            self._alerts.pop(fingerprint, None)
            return
        last = self._alerts.get(fingerprint)
        series = None
        if alert.is_open:
            series = groups[-1].series if groups else self._series_of(alert)
        last_ms = groups[-1].ts_ms if groups else last.last_ms if last else None
        starts = self._starts_of(fingerprint, alert, written_ms)
        self._alerts[fingerprint] = _AlertState(*starts, series, last_ms, alert.revision, _values(alert))

    def recall(self, fingerprint: str, alert: Alert | None, written_ms: int) -> None:
        """Restore a state that an earlier process has settled, from a record of ``written_ms``. Writes nothing."""
        if alert is None:
            self._alerts.pop(fingerprint, None)
        elif not self.is_replay(fingerprint, alert, written_ms):
            starts = self._starts_of(fingerprint, alert, written_ms)
            ends_ms = _ends_ms(alert, starts[0], written_ms)
            series = self._series_of(alert) if ends_ms is None else None
            updated_ms = written_ms if alert.revision and ends_ms is None else 0
            self._alerts[fingerprint] = _AlertState(
                *starts, series, ends_ms, alert.revision, _values(alert), updated_ms
            )

    def due(self, now_ms: int) -> list[tuple[str, SampleGroup]]:
        """The next sample of each firing alert for which one is due, with its fingerprint. Further ones may be due when
        these are settled."""
        due = []
        for fingerprint, state in self._alerts.items():
            if state.series is None or not state.series.rows:
                continue
            latest_ms = _floor(state.starts_ms, now_ms)
            times: Sequence[int] = [latest_ms] if latest_ms >= max(state.starts_ms, state.updated_ms) else []
            if (last_ms := _own_last_ms(state, now_ms)) is not None:
                times = _between(state.starts_ms, max(last_ms, now_ms - BACK_MS), now_ms + 1)
            due += [(fingerprint, SampleGroup(state.series, ts_ms, state.values)) for ts_ms in times[:1]]
        return due

    def repeated(self, fingerprint: str, ts_ms: int) -> None:
        """Note that a further sample was accepted, or refused for good."""
        state = self._alerts[fingerprint]
        state.last_ms = _last_ms(state, ts_ms, ts_ms) if state.last_ms is None else ts_ms

    def clear(self) -> None:
        """Forget everything: the topic was recreated."""
        self._alerts.clear()

    def _starts_of(self, fingerprint: str, alert: Alert, written_ms: int) -> tuple[int, int]:
        """When the series of an alert starts, and when the alert does by its node's clock."""
        last, starts_at_ms = self._alerts.get(fingerprint), epoch_ms(alert.starts_at)
        if last is not None and last.starts_at_ms == starts_at_ms:
            return last.starts_ms, starts_at_ms
        return _not_ahead(starts_at_ms, written_ms), starts_at_ms

    def _series_of(self, alert: Alert) -> SeriesSet:
        series = self._relabelling.relabel(SeriesSet(labels(alert, self._max_labels), _ROWS, "alert")).series
        if "fingerprint" in dict(series.labels):
            return series
        return SeriesSet(tuple(sorted([*series.labels, ("fingerprint", alert.fingerprint)])), series.rows, "alert")


def labels(alert: Alert, max_labels: int = MAX_LABELS) -> Labels:
    """The labels of an alert's series, sorted by name, each name once, at most ``max_labels`` with the series' name.

    The fingerprint makes them unique. A name that is not valid for a series is changed into one that is.
    """
    pairs = [("alertname", alert.name), ("severity", alert.severity), ("fingerprint", alert.fingerprint)]
    by_name = {name: value for name, value in pairs if value}
    for name, value in alert.labels.items():
        own = sanitised_name(name)
        if not own or own[0].isdigit() or own.startswith("__"):
            own = f"label_{own}"
        if own not in by_name and value:
            by_name[own] = value
    kept = list(by_name.items())[: max(len(pairs), max_labels - 1)]
    return tuple(sorted((name, sanitised(value)) for name, value in kept))


def _values(alert: Alert) -> tuple[float, ...]:
    """The number of the alert's GPUs; 1 if it is not about GPUs."""
    return (float(len(alert.gpus)),) if alert.gpus else _ONE


def _ends_ms(alert: Alert, starts_ms: int, written_ms: int) -> int | None:
    """When the series of an alert ends; None while it fires."""
    if alert.is_open or alert.ends_at is None:
        return None
    return max(starts_ms, _not_ahead(epoch_ms(alert.ends_at), written_ms))


def _not_ahead(at_ms: int, written_ms: int) -> int:
    """A time, or that of its record if it is far ahead of this."""
    return written_ms if 0 <= written_ms < at_ms - _AHEAD_MS else at_ms


def _own_last_ms(state: _AlertState, now_ms: int) -> int | None:
    """The time of a series' last sample, if it is known. One that is far ahead of now was refused: this clock was."""
    return state.last_ms if state.last_ms is None or state.last_ms <= now_ms + _AHEAD_MS else None


def _last_ms(state: _AlertState, written_ms: int, now_ms: int) -> int:
    """The time of a series' last sample; if an earlier process wrote it, the latest that it can have."""
    if (last_ms := _own_last_ms(state, now_ms)) is not None:
        return last_ms
    latest_ms = _floor(state.starts_ms, max(state.starts_ms, min(now_ms, written_ms + _BEHIND_MS)))
    return max(state.updated_ms, latest_ms + state.revision)  # each update may be 1 ms after the sample before it


def _floor(starts_ms: int, ts_ms: int) -> int:
    """The time of the last sample at or before ``ts_ms``."""
    return ts_ms - (ts_ms - starts_ms) % EVERY_MS


def _between(starts_ms: int, after_ms: int, before_ms: int) -> Sequence[int]:
    """The times of the samples between two times, without the first sample of the alert."""
    return range(max(starts_ms, _floor(starts_ms, after_ms)) + EVERY_MS, before_ms, EVERY_MS)


class AlertPartition:
    """The handler of a partition. ``clock_s``: the time of day."""

    def __init__(
        self, series: AlertSeries, shared: RemoteWriteShared, clock_s: Callable[[], float] = time.time
    ) -> None:
        self._series, self._max_samples, self._clock_s = series, shared.max_samples, clock_s
        self._writer = SampleWriter(shared, "gpustream_remote_write_alert_samples_refused_total")

    def recall(self, record: Record) -> None:
        """Restore an alert from a record that was written before."""
        with contextlib.suppress(Undecodable):  # its dead letter has been written before
            self._series.recall(key_of(record), read_alert(record), record.timestamp)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Write the alerts' starts and ends, batch by batch."""
        for batch in batches(records, self._max_samples, key=lambda record: record.key):
            await self._writer.finish([self._read(record) for record in batch], abandon)
            yield batch[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Write the due samples of firing alerts."""
        while due := self._series.due(self._now_ms()):
            for start in range(0, len(due), self._max_samples):
                batch = due[start : start + self._max_samples]
                results = await self._writer.send([group for _, group in batch], abandon)
                for (fingerprint, group), result in zip(batch, results, strict=True):
                    self._series.repeated(fingerprint, group.ts_ms)
                    self._writer.count(result)

    def reset(self) -> None:
        self._series.clear()

    def _read(self, record: Record) -> Written:
        try:
            fingerprint, alert = key_of(record), read_alert(record)
        except Undecodable as error:
            return Written(record, None, "dead_lettered", str(error))
        if self._series.is_replay(fingerprint, alert, record.timestamp):
            return Written(record)
        samples = self._series.change(fingerprint, alert, record.timestamp, self._now_ms())
        groups = [group for group in samples if group.series.rows]
        return Written(
            record, groups, settle=partial(self._series.settle, fingerprint, alert, record.timestamp, groups)
        )

    def _now_ms(self) -> int:
        return int(self._clock_s() * 1000)
