"""Notices what happens to a reader's topics without an error: deletion, hanging transactions, silent partitions.

In: what the Kafka client knows. Out: the topics that may be another log now, and reasons why partitions are not read.
State: the topics that were seen and are missing, and for each partition since when it cannot be read.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from aiokafka import TopicPartition

from delivery.ledger import Partition

log = logging.getLogger(__name__)

_HANGING_TRANSACTION_S = 60.0
_UNANSWERED_S = 60.0


class TopicWatch:
    """Watches the topics of these names. ``seen`` are those that were there, ``missing`` those that were and are not.

    A topic that was missing for a moment only may have been deleted and created again. The client would go on at its
    offset in the old log, and skip what the new one has before that. So a topic is ``missing`` until whoever reads it
    has found out which log it is, and removes it.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.seen: set[str] = set()
        self.missing: set[str] = set()
        self._names = names

    def note(self, cluster: Any) -> None:
        """Note which topics are in new metadata, and which are not. Call it before anything is fetched with them."""
        present = {name for name in self._names if cluster.partitions_for_topic(name)}
        for name in self.seen - self.missing - cluster.unauthorized_topics - present:
            log.warning("%s: deleted; waiting for it", name)
            self.missing.add(name)
        self.seen |= present


def other_partitions(consumer: Any, tps: Iterable[TopicPartition]) -> str | None:
    """Which topic has another number of partitions by now than these are, as a part of a sentence; None if none has.
    A topic that is missing has none."""
    for topic, expected in Counter(tp.topic for tp in tps).items():
        count = len(consumer.partitions_for_topic(topic) or ())
        if count not in (0, expected):
            return f"{topic} has {count} partitions, and had {expected}"
    return None


class PartitionWatch:
    """Since when partitions have a transaction open, or are not answered for. Times are of a clock in seconds."""

    def __init__(self) -> None:
        self._open: dict[Partition, tuple[int, float]] = {}
        self._unanswered_since_s: dict[Partition, float] = {}

    def clear(self) -> None:
        """Forget all partitions: others are assigned."""
        self._open.clear()
        self._unanswered_since_s.clear()

    def note(
        self, tp: Partition, now_s: float, *, answered: bool, fetched: bool, stable: int | None, end: int | None
    ) -> None:
        """Note whether a broker answers for a partition, and where its readable records and all of them end.

        ``fetched``: records of it wait for the reader, so the broker is not asked for more.
        """
        if answered or fetched:
            self._unanswered_since_s.pop(tp, None)
        else:
            self._unanswered_since_s.setdefault(tp, now_s)
        if end is None or stable is None or stable >= end:
            self._open.pop(tp, None)
        elif answered and self._open.get(tp, (-1, 0))[0] != stable:
            self._open[tp] = stable, now_s

    def problems(self, name: Callable[[Partition], str], now_s: float) -> list[str]:
        """What has lasted too long, each with the ``name`` of its partition."""
        hanging = [
            f"{name(tp)}: a transaction is open since offset {offset}, for {now_s - since_s:.0f} s now, and nothing"
            " after it can be read: `gpustream doctor` says how to end it"
            for tp, (offset, since_s) in sorted(self._open.items())
            if now_s - since_s >= _HANGING_TRANSACTION_S
        ]
        unanswered = [
            f"{name(tp)}: no answer for {now_s - since_s:.0f} s: `gpustream doctor` says if it has no leader"
            for tp, since_s in sorted(self._unanswered_since_s.items())
            if now_s - since_s >= _UNANSWERED_S
        ]
        return [*hanging, *unanswered]
