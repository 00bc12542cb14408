"""What sinks of gpu.alerts have in common: reading a record, and knowing which transitions are news."""

from typing import NamedTuple

import msgspec

from delivery.dead_letters import Record
from topics.alerts import MAX_TIME_MS, TOPIC, Alert, milliseconds
from topics.topic import decoder

_decode = decoder(Alert)


class Undecodable(ValueError):
    """The record is none of gpu.alerts: dead-letter it."""


def read(record: Record) -> Alert | None:
    """The alert in a record; None for a tombstone, of an alert that is long over. Raises Undecodable."""
    if record.value is None:
        return None
    try:
        alert = _decode(record.value)
    except msgspec.DecodeError as error:
        raise Undecodable(f"not a record of {TOPIC.name}: {error}") from error
    if record.key != alert.fingerprint.encode():
        raise Undecodable(f"not a record of {TOPIC.name}: its key is not its fingerprint")
    if not alert.is_open and alert.ends_at is None:
        raise Undecodable(f"not a record of {TOPIC.name}: resolved, without ends_at")
    if any(at is not None and not 0 <= milliseconds(at) <= MAX_TIME_MS for at in (alert.starts_at, alert.ends_at)):
        raise Undecodable(f"not a record of {TOPIC.name}: of a time before 1970 or after 9999")
    return alert


class _Last(NamedTuple):
    starts_ms: int
    resolved: bool


class Transitions:
    """The newest transition of each alert of a partition, so that one that is written again is no news.

    Open alerts are written again daily, and after a crash. An alert that is over does not fire again with the
    ``starts_at`` that it had; when it fires again, its ``starts_at`` is another, by whichever clock its node then has.
    """

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def is_news(self, alert: Alert) -> bool:
        """Whether this is a transition that is not known, nor one before a known one."""
        last = self._last.get(alert.fingerprint)
        if last is None or last.starts_ms != milliseconds(alert.starts_at):
            return True
        return not alert.is_open and not last.resolved

    def learn(self, alert: Alert) -> None:
        """Know it, in place of the ones before."""
        self._last[alert.fingerprint] = _Last(milliseconds(alert.starts_at), not alert.is_open)

    def remove(self, key: bytes | None) -> None:
        """The alert of a record's key is gone from the topic."""
        self._last.pop((key or b"").decode("ascii", "replace"), None)

    def clear(self) -> None:
        """The topic was created again."""
        self._last.clear()
