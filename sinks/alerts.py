"""Shared by the sinks of gpu.alerts: reading a record, and finding out which transitions are new."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from delivery.dead_letters import Record
from sinks.outcomes import Undecodable, decoded
from topics.alerts import TOPIC, Alert
from topics.times import MAX_TIME_MS, epoch_ms
from topics.topic import decoder

T = TypeVar("T")

_decode = decoder(Alert)


def key_of(record: Record) -> str:
    """The key of a record: the fingerprint of its alert, also in a tombstone."""
    return (record.key or b"").decode("utf-8", "replace")


def read_alert(record: Record) -> Alert | None:
    """The alert of a record; None for a tombstone, which deletes an alert long after its end. Raises Undecodable."""
    if record.value is None:
        return None
    alert = decoded(record, _decode, TOPIC.name)
    if record.key != alert.fingerprint.encode():
        raise Undecodable(f"not a record of {TOPIC.name}: its key is not its fingerprint")
    if not alert.is_open and alert.ends_at is None:
        raise Undecodable(f"not a record of {TOPIC.name}: resolved, without ends_at")
    if any(time is not None and not 0 <= epoch_ms(time) <= MAX_TIME_MS for time in (alert.starts_at, alert.ends_at)):
        raise Undecodable(f"not a record of {TOPIC.name}: of a time before 1970 or after 9999")
    return alert


def batches(items: Iterable[T], max_items: int, key: Callable[[T], object]) -> Iterator[list[T]]:
    """Items in batches of at most ``max_items``, each key at most once in a batch. The key None may repeat."""
    batch: list[T] = []
    keys: set[object] = set()
    for item in items:
        item_key = key(item)
        if item_key in keys or len(batch) == max_items:
            yield batch
            batch, keys = [], set()
        batch.append(item)
        if item_key is not None:
            keys.add(item_key)
    if batch:
        yield batch


class Transitions:
    """The newest transition or update of each alert of a partition, to tell new ones from repetitions.

    Open alerts are written again daily, and after a crash. A resolved alert that fires again has another ``starts_at``,
    by whatever clock its node has then.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, bool, int]] = {}

    def is_news(self, alert: Alert) -> bool:
        """Whether this is a transition or an update that is newer than the known one."""
        starts_ms, was_open, revision = self._last.get(alert.fingerprint, (None, False, 0))
        return starts_ms != epoch_ms(alert.starts_at) or (was_open and (not alert.is_open or alert.revision > revision))

    def is_last(self, alert: Alert) -> bool:
        """Whether this is the known transition or update again, perhaps with newer figures."""
        return self._last.get(alert.fingerprint) == (epoch_ms(alert.starts_at), alert.is_open, alert.revision)

    def update(self, record: Record, alert: Alert | None) -> None:
        """Set the newest state by a record, unless it repeats an earlier one. None: its alert was deleted."""
        if alert is None:
            self._last.pop(key_of(record), None)
        elif self.is_news(alert):
            self._last[alert.fingerprint] = epoch_ms(alert.starts_at), alert.is_open, alert.revision

    def clear(self) -> None:
        """Forget everything: the topic was recreated."""
        self._last.clear()
