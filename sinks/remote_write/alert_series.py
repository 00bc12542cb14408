"""``gpu_alert_firing``: a series for each alert, 1 from start to end, and which samples of it are to be written.

In: alerts, each in the order of its states, and the time. Out: samples, in the order of their times.
State, by fingerprint: the last state, and the time of the series' last sample; it changes when samples are settled.
Between start and end there is a sample a minute, at times that follow from the start alone, so that whoever writes them
writes the same ones. A sample that is not after the series' last is left out. The end is a staleness marker; where the
series was written past it, as nobody had said yet that the alert was over, it comes 1 ms after the last sample.
An earlier life has written what it knew of up to when the next record was there to be read; for the time in which no
sink ran, there are no samples but starts and ends.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sinks.blocks import Block, Group, Row
from sinks.labels import MAX_LABELS
from sinks.remote_write.series import STALE
from sinks.tenants import MAX_NAME, Labels, sanitised
from topics.alerts import Alert, milliseconds
from topics.catalogue import ALERT_FIRING

EVERY_MS = 60_000
"""So often is a firing alert written again: within what an instant query looks back."""

BACK_MS = 3_600_000
"""Samples between an alert's start and its end are written only where they are younger than that: receivers commonly
refuse older ones."""

_BEHIND_MS = 5_000
"""A partition counts as read to its end for so long after the broker said so."""

_ROWS = (Row(ALERT_FIRING.name, (), "gauge", ALERT_FIRING.help, primary=False),)
_ONE = (1.0,)
_END = (STALE,)
_FIRST = ("alertname", "severity", "fingerprint")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Malformed(Exception):
    """No alert that could be a series."""


@dataclass(slots=True)
class _Known:
    """An alert as it was last: ``block`` is None where it is over, and little is kept of those, which are many.

    ``last_ms`` is the time of its series' last sample; None: an earlier life wrote it.
    """

    starts_ms: int
    block: Block | None
    last_ms: int | None

    @property
    def open(self) -> bool:
        """Whether it fires."""
        return self.block is not None


class Change(NamedTuple):
    """What a record writes: samples of one series, of which the last is the transition itself."""

    fingerprint: str
    alert: Alert | None
    groups: list[Group]


class Repeat(NamedTuple):
    """That an alert still fires."""

    fingerprint: str
    group: Group


class AlertSeries:
    """The alerts of one partition."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._known: dict[str, _Known] = {}

    def is_replay(self, fingerprint: str, alert: Alert | None) -> bool:
        """Whether this state, or a later one, was settled before. None: the alert was deleted."""
        known = self._known.get(fingerprint)
        if known is None:
            return alert is None
        if alert is None:
            return False
        return (milliseconds(alert.starts_at), not alert.is_open) <= (known.starts_ms, not known.open)

    def change(self, fingerprint: str, alert: Alert | None, written_ms: int, now_ms: int) -> Change:
        """What a record writes that was appended at a time. Raises :class:`Malformed`."""
        known = self._known.get(fingerprint)
        if alert is None:
            return Change(fingerprint, None, _deleted(known, written_ms, now_ms))
        starts_ms, ends_ms = _times(alert)
        goes_on = known is not None and known.open and known.starts_ms == starts_ms
        block = known.block if known is not None and known.block is not None and goes_on else self._block(alert)
        last_ms = _last(known, written_ms, now_ms) if known else -1
        if ends_ms is None:
            return Change(fingerprint, alert, [Group(block, starts_ms, _ONE)] if starts_ms > last_ms else [])
        points = [] if goes_on else [starts_ms]
        points += _between(starts_ms, max(last_ms, now_ms - BACK_MS), min(ends_ms, now_ms + 1))
        groups = [Group(block, ts_ms, _ONE) for ts_ms in points if ts_ms > last_ms]
        last_ms = groups[-1].ts_ms if groups else last_ms
        return Change(fingerprint, alert, [*groups, Group(block, max(ends_ms, last_ms + 1), _END)])

    def settle(self, change: Change) -> None:
        """What a record writes was written, or refused for good."""
        fingerprint, alert, groups = change
        if alert is None:
            self._known.pop(fingerprint, None)
            return
        known = self._known.get(fingerprint)
        block = None
        if alert.is_open:
            block = groups[-1].block if groups else self._block(alert)
        last_ms = groups[-1].ts_ms if groups else known.last_ms if known else None
        self._known[fingerprint] = _Known(milliseconds(alert.starts_at), block, last_ms)

    def recall(self, fingerprint: str, alert: Alert | None) -> None:
        """A state that an earlier life settled: know it, and write nothing. Raises :class:`Malformed`."""
        if alert is None:
            self._known.pop(fingerprint, None)
        elif not self.is_replay(fingerprint, alert):
            starts_ms, ends_ms = _times(alert)
            self._known[fingerprint] = _Known(starts_ms, self._block(alert) if ends_ms is None else None, ends_ms)

    def _block(self, alert: Alert) -> Block:
        return Block(labels(alert, self._max_labels), _ROWS, "alert")

    def due(self, now_ms: int) -> list[Repeat]:
        """The next sample of each firing alert that has one by now; there may be more when these are settled."""
        return [
            Repeat(fingerprint, Group(known.block, ts_ms, _ONE))
            for fingerprint, known in self._known.items()
            if known.block is not None and (ts_ms := _next(known, now_ms)) is not None
        ]

    def repeated(self, repeat: Repeat) -> None:
        """A firing alert was written again, or that was refused for good."""
        self._known[repeat.fingerprint].last_ms = repeat.group.ts_ms

    def forget(self) -> None:
        """The topic was made anew."""
        self._known.clear()


def labels(alert: Alert, most: int = MAX_LABELS) -> Labels:
    """The labels of an alert's series, sorted by name, at most ``most`` with its name, each name once.

    With the fingerprint, no two alerts have the same. A name that no series may have is made one.
    """
    given = [("alertname", alert.name), ("severity", alert.severity), ("fingerprint", alert.fingerprint)]
    named = {name: value for name, value in given if value}
    for name, value in alert.labels.items():
        if (own := _label_name(name)) not in named and value:
            named[own] = sanitised(value)
    kept = list(named.items())[: max(len(_FIRST), most - 1)]
    return tuple(sorted((name, sanitised(value)) for name, value in kept))


def _label_name(name: str) -> str:
    text = _NOT_IN_A_NAME.sub("_", name)[:MAX_NAME]
    return f"label_{text}" if not text or text[0].isdigit() or text.startswith("__") else text


def _times(alert: Alert) -> tuple[int, int | None]:
    """When it began, and when it ended: None while it fires."""
    starts_ms = milliseconds(alert.starts_at)
    if starts_ms < 0:
        raise Malformed(f"starts_at is {alert.starts_at}")
    if alert.is_open:
        return starts_ms, None
    if alert.ends_at is None:
        raise Malformed("resolved, and has no ends_at")
    return starts_ms, max(starts_ms, milliseconds(alert.ends_at))


def _deleted(known: _Known | None, written_ms: int, now_ms: int) -> list[Group]:
    if known is None or known.block is None:
        return []
    return [Group(known.block, max(written_ms, _last(known, written_ms, now_ms) + 1), _END)]


def _last(known: _Known, written_ms: int, now_ms: int) -> int:
    """The time of a series' last sample: the latest that an earlier life can have written before it read the record."""
    if known.last_ms is not None:
        return known.last_ms
    return _floor(known.starts_ms, max(known.starts_ms, min(now_ms, written_ms + _BEHIND_MS)))


def _floor(starts_ms: int, ts_ms: int) -> int:
    """The time of a sample at or before a time."""
    return ts_ms - (ts_ms - starts_ms) % EVERY_MS


def _next(known: _Known, now_ms: int) -> int | None:
    latest = _floor(known.starts_ms, now_ms)
    if known.last_ms is None:
        return latest if latest >= known.starts_ms else None
    return next(_between(known.starts_ms, max(known.last_ms, now_ms - BACK_MS), now_ms + 1), None)


def _between(starts_ms: int, after_ms: int, before_ms: int) -> Iterator[int]:
    """The times of the samples after the first one, after a time and before another."""
    return iter(range(max(starts_ms, _floor(starts_ms, after_ms)) + EVERY_MS, before_ms, EVERY_MS))


def rounds(changes: Sequence[Change]) -> Iterator[list[tuple[int, Group]]]:
    """The samples of changes of different alerts, at most one of each series at a time, with the change's number."""
    for depth in range(max((len(change.groups) for change in changes), default=0)):
        yield [(number, one.groups[depth]) for number, one in enumerate(changes) if depth < len(one.groups)]
