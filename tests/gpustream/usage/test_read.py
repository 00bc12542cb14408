"""Where a time is looked for in Kafka, and what is said of a time that Kafka does not have any more."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from delivery.ledger import Partition
from gpustream.history import OnDeleted, Span
from gpustream.usage.read import MAX_AHEAD_MS, Plan, Range, plan, records
from tests.usage_records import START_MS, Read
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES

DAY_MS = 24 * HOUR_MS
NOW_MS = START_MS + 40 * DAY_MS
AHEAD = MAX_AHEAD_MS // MINUTE_MS


class FakePast:
    """Logs of one partition each: a record a minute from ``begins_ms`` until now, at the offset of its minute."""

    def __init__(self, begins_ms: Mapping[str, int], kept_ms: Mapping[str, int] | None = None) -> None:
        self.begins_ms, self.kept_ms = begins_ms, kept_ms or {}

    async def spans(self, topic: str, since_ms: int = 0) -> dict[Partition, Span]:
        """As History gives them."""
        begin, end = self.begins_ms[topic], NOW_MS
        return {Partition(topic, 0): Span(_offset(min(end, max(begin, since_ms))), _offset(end))}


def _offset(at_ms: int) -> int:
    return max(0, at_ms - START_MS) // MINUTE_MS


async def planned(time: Range, *, minutes_ms: int = START_MS, hours_ms: int = START_MS, **more: Any) -> Plan:
    log = FakePast({HOURS.name: hours_ms, MINUTES.name: minutes_ms}, **more)
    return await plan(log, time, NOW_MS)  # type: ignore[arg-type]


async def test_whole_hours_are_read_from_a_little_before_them_to_the_end() -> None:
    time = Range(NOW_MS - 2 * DAY_MS, NOW_MS - DAY_MS)
    result = await planned(time)
    assert result.spans == {Partition(HOURS.name, 0): Span(_offset(time.from_ms) - AHEAD, _offset(NOW_MS))}
    assert (result.range, result.notes) == (time, [])


async def test_both_ends_are_read_from_where_the_first_begins() -> None:
    time = Range(NOW_MS - DAY_MS - 10 * MINUTE_MS, NOW_MS - 10 * MINUTE_MS)
    result = await planned(time)
    assert result.spans[Partition(MINUTES.name, 0)].start == _offset(time.from_ms) - AHEAD
    assert result.range == time


@pytest.mark.parametrize("kept", [None, {MINUTES.name: 7 * DAY_MS}])
async def test_minutes_that_are_gone_cut_the_time_to_whole_hours_and_are_said(kept: dict[str, int] | None) -> None:
    time = Range(NOW_MS - 10 * DAY_MS + 20 * MINUTE_MS, NOW_MS - 15 * MINUTE_MS)
    result = await planned(time, minutes_ms=NOW_MS - 7 * DAY_MS, kept_ms=kept)
    assert result.range == Range(NOW_MS - 10 * DAY_MS + HOUR_MS, time.to_ms)
    (note,) = result.notes
    assert note.startswith("gpu.usage-minutes does not have 2026-12-20 00:20Z to 2026-12-20 01:00Z any more")


async def test_a_time_within_an_hour_whose_minutes_are_gone_can_not_be_answered() -> None:
    begin_ms = NOW_MS - 10 * DAY_MS
    result = await planned(Range(begin_ms + MINUTE_MS, begin_ms + 9 * MINUTE_MS), minutes_ms=NOW_MS - 7 * DAY_MS)
    assert not result.range.is_nonempty
    assert len(result.notes) == 1


async def test_a_time_around_an_hour_s_end_whose_minutes_are_gone_can_not_be_answered() -> None:
    end_ms = NOW_MS - 10 * DAY_MS
    time = Range(end_ms - 30 * MINUTE_MS, end_ms + 30 * MINUTE_MS)
    result = await planned(time, minutes_ms=NOW_MS - 7 * DAY_MS)
    assert (result.range.is_nonempty, len(result.notes)) == (False, 2)


async def test_a_partition_that_is_new_or_empty_is_not_taken_for_one_that_was_cut() -> None:
    time = Range(NOW_MS - 2 * DAY_MS - 30 * MINUTE_MS, NOW_MS)
    result = await planned(time, minutes_ms=NOW_MS - HOUR_MS, hours_ms=NOW_MS)
    assert (result.range, result.notes) == (time, [])


async def test_hours_that_may_be_gone_are_said() -> None:
    time = Range(NOW_MS - 38 * DAY_MS, NOW_MS)
    result = await planned(time, hours_ms=NOW_MS - 30 * DAY_MS, kept_ms={HOURS.name: 30 * DAY_MS})
    assert result.range == time
    assert "gpu.usage may not go back to 2026-11-22 00:00Z any more" in result.notes[0]
    assert (await planned(time, kept_ms={HOURS.name: -1})).notes == []


class ShrinkingPast(FakePast):
    """Logs of two partitions. Of each, some records are deleted before they are read, twice."""

    async def spans(self, topic: str, since_ms: int = 0) -> dict[Partition, Span]:
        (span,) = (await super().spans(topic, since_ms)).values()
        return {Partition(topic, number): span for number in (0, 1)}

    async def records(
        self, spans: Mapping[Partition, Span], _: object, *, on_deleted: OnDeleted
    ) -> AsyncIterator[Sequence[Read]]:
        for tp, span in spans.items():
            on_deleted(tp, span.start)
            yield []
            on_deleted(tp, span.start + 2)


async def test_what_is_deleted_while_it_is_read_is_said_once_for_a_topic() -> None:
    log: Any = ShrinkingPast({HOURS.name: START_MS, MINUTES.name: START_MS})
    result = await plan(log, Range(NOW_MS - DAY_MS, NOW_MS - MINUTE_MS), NOW_MS)
    assert result.notes == []
    assert [list(batch) async for batch in records(log, result)] == [[], []]
    assert result.notes == [
        f"records of {topic} were deleted while this was read: what only they had is not counted."
        for topic in (HOURS.name, MINUTES.name)
    ]
