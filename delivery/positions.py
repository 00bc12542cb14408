"""Where a partition is to be read from: the first unfinished record, and how far before it to read back."""

import math
import time
from typing import Any, Literal, NamedTuple

From = Literal["earliest", "latest"] | float
"""Where a group without offsets starts: at an end of the log, or so many seconds ago."""

WHOLE = math.inf
"""Read back the whole log: of a compacted topic, whose older records are as true as its newest."""

_FETCH_MS = 1000
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


class Positions:
    """Finds the start of one partition. Raises KafkaError where the broker does not answer: ask again."""

    def __init__(self, consumer: Any, tp: Any) -> None:
        self._consumer = consumer
        self._tp = tp

    async def find(self, from_: From, recall_s: float, *, known: int | None = None) -> Start:
        """Where to start. ``known`` is where the last assignment of this reader ended, if it had the partition."""
        committed: int | None = await self._consumer.committed(self._tp)
        if committed is not None and committed == known:
            return Start(committed, committed, known=True)
        begin = (await self._consumer.beginning_offsets([self._tp]))[self._tp]
        end = (await self._consumer.end_offsets([self._tp]))[self._tp]
        if committed is None:
            first = await self.first(from_, begin, end)
            return Start(begin if recall_s == WHOLE else first, first, is_new=True)
        if committed > end:  # the topic was made anew
            return Start(begin, begin)
        if committed <= begin:
            return Start(begin, begin, expired=begin - committed)
        return Start(await self._before(committed, begin, recall_s), committed)

    async def first(self, from_: From, begin: int, end: int) -> int:
        """Where a reader without offsets starts, between the ends of the log."""
        if from_ == "earliest":
            return begin
        if from_ == "latest":
            return end
        found = await self._at(int((time.time() - float(from_)) * 1000))
        if found is None:  # all is older, or this broker does not know offsets by time
            return begin if await self._at(_ANY_TIME_MS) is None else end
        return found

    async def _before(self, committed: int, begin: int, recall_s: float) -> int:
        """The first record of the time before the last finished one."""
        if recall_s == WHOLE:
            return begin
        finished_ms = await self._time_of(committed - 1)
        if finished_ms is None:
            return committed
        found = await self._at(max(_ANY_TIME_MS, finished_ms - int(recall_s * 1000)))
        return begin if found is None else max(begin, min(found, committed))

    async def _time_of(self, offset: int) -> int | None:
        """When the record was appended; None where there is none, but control records, to the end."""
        self._consumer.seek(self._tp, offset)
        while True:
            batch = await self._consumer.getmany(self._tp, timeout_ms=_FETCH_MS, max_records=1)
            if records := batch.get(self._tp):
                return int(records[0].timestamp)
            if await self._consumer.position(self._tp) > offset:
                return None

    async def _at(self, ts_ms: int) -> int | None:
        """The first offset at or after a time, or None."""
        found = (await self._consumer.offsets_for_times({self._tp: ts_ms}))[self._tp]
        return None if found is None else int(found.offset)
