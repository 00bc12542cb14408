"""What sinks of gpu.alerts have in common: reading a record, and knowing which transitions are news."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from delivery.dead_letters import Record
from sinks.outcomes import Undecodable, decoded
from topics.alerts import MAX_TIME_MS, TOPIC, Alert, milliseconds
from topics.topic import decoder

T = TypeVar("T")

_decode = decoder(Alert)


def key_of(record: Record) -> str:
    """The key of a record: the fingerprint of its alert, also of one that is deleted."""
    return (record.key or b"").decode("utf-8", "replace")


def read(record: Record) -> Alert | None:
    """The alert in a record; None for a tombstone, of an alert that is long over. Raises Undecodable."""
    if record.value is None:
        return None
    alert = decoded(record, _decode, TOPIC.name)
    if record.key != alert.fingerprint.encode():
        raise Undecodable(f"not a record of {TOPIC.name}: its key is not its fingerprint")
    if not alert.is_open and alert.ends_at is None:
        raise Undecodable(f"not a record of {TOPIC.name}: resolved, without ends_at")
    if any(at is not None and not 0 <= milliseconds(at) <= MAX_TIME_MS for at in (alert.starts_at, alert.ends_at)):
        raise Undecodable(f"not a record of {TOPIC.name}: of a time before 1970 or after 9999")
    return alert


def batches(items: Iterable[T], most: int, key: Callable[[T], object]) -> Iterator[list[T]]:
    """At most so many at a time, and of each key but None only one: the next waits until this one is settled."""
    some: list[T] = []
    keys: set[object] = set()
    for item in items:
        its = key(item)
        if its in keys or len(some) == most:
            yield some
            some, keys = [], set()
        some.append(item)
        if its is not None:
            keys.add(its)
    if some:
        yield some


class Transitions:
    """The newest transition or update of each alert of a partition, so that one that is written again is no news.

    Open alerts are written again daily, and after a crash. An alert that is over does not fire again with the
    ``starts_at`` that it had; when it fires again, its ``starts_at`` is another, by whichever clock its node then has.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, bool, int]] = {}

    def is_news(self, alert: Alert) -> bool:
        """Whether this is a transition or an update that is not known, nor one before a known one."""
        starts_ms, was_open, revision = self._last.get(alert.fingerprint, (None, False, 0))
        return starts_ms != milliseconds(alert.starts_at) or (
            was_open and (not alert.is_open or alert.revision > revision)
        )

    def is_last(self, alert: Alert) -> bool:
        """Whether this is the open alert that is known, perhaps with newer figures."""
        return self._last.get(alert.fingerprint) == (milliseconds(alert.starts_at), alert.is_open, alert.revision)

    def learn(self, record: Record, alert: Alert | None) -> None:
        """Know what a record says, in place of what was before. None: its alert is gone from the topic."""
        if alert is None:
            self._last.pop(key_of(record), None)
        else:
            self._last[alert.fingerprint] = milliseconds(alert.starts_at), alert.is_open, alert.revision

    def clear(self) -> None:
        """The topic was created again."""
        self._last.clear()
