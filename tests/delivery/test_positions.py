"""Where a partition is to be read from."""

import asyncio
import time

import pytest

from delivery import positions
from delivery.ledger import Partition
from delivery.positions import WHOLE, Start
from tests.sinks.records import FakeGroup, Read

TP = Partition("gpu.attributed", 0)
LOG = [Read(offset, b"", offset * 1000) for offset in range(10, 200)]


async def find(
    consumer: FakeGroup, from_: str | float = "earliest", recall_s: float = 60, known: int | None = None
) -> Start:
    found = positions.find(consumer, TP, from_, recall_s, known=known)  # type: ignore[arg-type]
    return await asyncio.wait_for(found, 10)


async def test_a_new_group_starts_at_an_end_of_the_log_or_so_long_ago() -> None:
    consumer = FakeGroup(LOG, begin=10)
    now_s = time.time()
    recent = [Read(offset, b"", int((now_s - 200 + offset) * 1000)) for offset in range(10, 200)]
    assert await find(consumer, "earliest") == Start(10, 10, is_new=True)
    assert await find(consumer, "latest") == Start(200, 200, is_new=True)
    start = await find(FakeGroup(recent, begin=10), 60.0)
    assert start.is_new
    assert start.resume in {140, 141}


async def test_a_new_group_starts_at_the_end_where_all_is_older() -> None:
    assert await find(FakeGroup(LOG, begin=10), 60.0) == Start(200, 200, is_new=True)


async def test_a_new_group_starts_at_the_beginning_where_the_broker_knows_no_times() -> None:
    assert await find(FakeGroup(LOG, begin=10, by_time=False), 60.0) == Start(10, 10, is_new=True)


async def test_the_minute_before_the_last_finished_record_is_read_back() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10)) == Start(89, 150)


async def test_no_more_is_read_back_than_there_is() -> None:
    assert await find(FakeGroup(LOG, group=20, begin=10)) == Start(10, 20)


async def test_everything_is_read_back_where_the_broker_knows_no_times() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10, by_time=False)) == Start(10, 150)


async def test_a_topic_that_is_to_be_read_back_whole_is_read_from_its_beginning() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10), recall_s=WHOLE) == Start(10, 150)
    assert await find(FakeGroup(LOG, begin=10), "latest", recall_s=WHOLE) == Start(10, 200, is_new=True)
    assert await find(FakeGroup(LOG, group=150, begin=10), recall_s=WHOLE, known=150) == Start(150, 150, known=True)


async def test_nothing_is_read_back_where_the_last_assignment_ended_just_here() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10), known=150) == Start(150, 150, known=True)
    assert not (await find(FakeGroup(LOG, group=150, begin=10), known=149)).known


async def test_records_that_expired_unread_are_counted() -> None:
    assert await find(FakeGroup(LOG, group=4, begin=10)) == Start(10, 10, expired=6)


async def test_a_topic_made_anew_is_read_from_its_beginning() -> None:
    assert await find(FakeGroup(LOG, group=5000, begin=10)) == Start(10, 10)


async def test_an_offset_at_which_there_is_nothing_but_control_records_is_gone_past() -> None:
    class Controls(FakeGroup):
        async def times(self, offsets: dict[Partition, int]) -> dict[Partition, int | None]:
            return dict.fromkeys(offsets)

    assert await find(Controls(LOG, group=150, begin=10)) == Start(150, 150)


@pytest.mark.parametrize("recall_s", [0.0, 1.0])
async def test_the_last_finished_record_itself_is_read_back(recall_s: float) -> None:
    assert (await find(FakeGroup(LOG, group=150, begin=10), recall_s=recall_s)).position == 149 - int(recall_s)
