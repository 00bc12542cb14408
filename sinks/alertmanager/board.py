"""What of one partition an Alertmanager is told again and again: open alerts, and those that ended lately."""

from collections.abc import Iterable
from typing import NamedTuple

from topics.alerts import Alert

RESOLVED_FOR_MS = 15 * 60_000
"""So long is told that an alert is over, as Prometheus does: an Alertmanager that was away then must learn of it."""


class _Entry(NamedTuple):
    alert: Alert
    written_ms: int


class Board:
    """The last state of each such alert."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def put(self, alert: Alert, written_ms: int) -> None:
        """An alert's state, and when the broker got it."""
        self._entries[alert.fingerprint] = _Entry(alert, written_ms)

    def remove(self, key: bytes | None) -> None:
        """The alert of a record's key is gone from the topic."""
        self._entries.pop((key or b"").decode("ascii", "replace"), None)

    def clear(self) -> None:
        """The topic was made anew."""
        self._entries.clear()

    def open(self) -> int:
        """How many are open."""
        return sum(entry.alert.is_open for entry in self._entries.values())

    def due(self, now_ms: int) -> list[str]:
        """The fingerprints of all that is to be told; what ended long ago is forgotten."""
        self._entries = {fp: entry for fp, entry in self._entries.items() if not _long_over(entry, now_ms)}
        return list(self._entries)

    def states(self, fingerprints: Iterable[str]) -> list[Alert]:
        """Their last states, of those that are still here."""
        return [self._entries[fp].alert for fp in fingerprints if fp in self._entries]


def _long_over(entry: _Entry, now_ms: int) -> bool:
    return not entry.alert.is_open and now_ms - entry.written_ms > RESOLVED_FOR_MS
