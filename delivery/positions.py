"""Where a sink reads a partition from: the first unfinished record, and how far before it to read back."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple

from delivery.ledger import Partition
from delivery.start import Log

From = Literal["earliest", "latest"] | float
"""Where a group without offsets starts: at an end of the log, or so many seconds ago."""

WHOLE = math.inf
"""Read back the whole log: of a compacted topic, whose older records are as true as its newest."""

OffsetsAt = Callable[[Mapping[Partition, int]], Awaitable[Mapping[Partition, int | None]]]
"""Asks for the first offset at or after a time in ms; None: there is none, or the broker can't tell."""

_ANY_TIME_MS = 1


class Start(NamedTuple):
    """``resume`` is the first unfinished record's offset, ``position`` where to read from to recall what was before.

    ``is_new``: the group had no offset here. ``known``: it is where the last assignment ended. ``expired``: so many
    unfinished records were gone.
    """

    position: int
    resume: int
    is_new: bool = False
    known: bool = False
    expired: int = 0


async def find(log: Log, tp: Partition, from_: From, recall_s: float, *, known: int | None = None) -> Start:
    """Where to start. ``known`` is where the last assignment of this reader ended, if it had the partition.

    Raises KafkaError where the broker does not answer: ask again.
    """
    committed = await log.committed(tp)
    if committed is not None and committed == known:
        return Start(committed, committed, known=True)
    begin, end = (await log.beginnings([tp]))[tp], (await log.ends([tp]))[tp]
    if committed is None:
        resume = await first(log.offsets_at, tp, from_, begin, end)
        return Start(begin if recall_s == WHOLE else resume, resume, is_new=True)
    if committed > end:  # the topic was made anew
        return Start(begin, begin)
    if committed <= begin:
        return Start(begin, begin, expired=begin - committed)
    return Start(await _before(log, tp, committed, begin, recall_s), committed)


async def first(offsets_at: OffsetsAt, tp: Partition, from_: From, begin: int, end: int) -> int:
    """Where a reader starts that has no offset, between the ends of the log."""
    if from_ == "earliest":
        return begin
    if from_ == "latest":
        return end
    found = await _at(offsets_at, tp, int((time.time() - float(from_)) * 1000))
    if found is None:  # all is older, or this broker does not know offsets by time
        return begin if await _at(offsets_at, tp, _ANY_TIME_MS) is None else end
    return found


async def _before(log: Log, tp: Partition, committed: int, begin: int, recall_s: float) -> int:
    """The first record of the time before the last finished one."""
    if recall_s == WHOLE:
        return begin
    finished_ms = (await log.times({tp: committed - 1}))[tp]
    if finished_ms is None:  # nothing but what no reader is given
        return committed
    found = await _at(log.offsets_at, tp, max(_ANY_TIME_MS, finished_ms - int(recall_s * 1000)))
    return begin if found is None else max(begin, min(found, committed))


async def _at(offsets_at: OffsetsAt, tp: Partition, ts_ms: int) -> int | None:
    """The first offset at or after a time, or None."""
    return (await offsets_at({tp: ts_ms}))[tp]
