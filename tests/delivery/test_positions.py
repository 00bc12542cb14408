"""The position from which a partition is read."""

import asyncio
import time
from typing import Any, NamedTuple

import pytest

from delivery import positions
from delivery.ledger import Partition
from delivery.positions import NOTHING, STATE_WINDOW_MS, WHOLE_LOG, Back, ReadState, Start
from tests.sinks.records import ConsumedRecord, FakeGroup
from tests.streams.desk import LABELS, OWNERS, TICKS, Desk, instant

MINUTE_MS = 60_000
A_MINUTE = Back(60.0)
NOW_MS = 1_790_000_000_000
TP = Partition("gpu.attributed", 0)
AT_THE_END = Start(150, 150, 150, 150, 150)
LOG = [ConsumedRecord(offset, b"", offset * 1000) for offset in range(10, 200)]


async def find(
    consumer: FakeGroup,
    from_: str | float | Back = "earliest",
    recall: Back = A_MINUTE,
    known_offset: int | None = None,
) -> Start:
    start = positions.find_start(consumer, TP, from_, recall, last_end=known_offset)  # type: ignore[arg-type]
    return await asyncio.wait_for(start, 10)


async def test_a_new_group_starts_at_an_end_of_the_log_or_some_time_ago() -> None:
    consumer = FakeGroup(LOG, begin=10)
    now_s = time.time()
    recent = [ConsumedRecord(offset, b"", int((now_s - 200 + offset) * 1000)) for offset in range(10, 200)]
    assert await find(consumer, "earliest") == Start(10, 10, 10, 200, None)
    assert await find(consumer, "latest") == Start(10, 200, 200, 200, None)
    start = await find(FakeGroup(recent, begin=10), 60.0)
    assert start.committed is None
    assert start.resume in {140, 141}


class NewGroup:
    """A group before this process joins it, with its commits. ``member``: what an existing member has."""

    name = "g"

    def __init__(self, committed: dict[Any, int], member: dict[Any, int] | None) -> None:
        self.committed, self.member = dict(committed), member
        self.offsets = FakeGroup(LOG, begin=10)

    async def committed_offsets(self) -> dict[Any, int | None]:
        return dict.fromkeys([Partition("a", 0), Partition("a", 1), Partition("b", 0)]) | self.committed

    async def commit_before_join(self, offsets: dict[Any, int]) -> bool:
        self.committed |= offsets if self.member is None else self.member
        return self.member is None


@pytest.mark.parametrize(
    ("committed", "from_", "member", "expected", "log_text"),
    [
        ({}, "latest", None, {("a", 0): 200, ("a", 1): 200}, "a"),
        ({}, "earliest", None, {}, ""),
        ({("a", 0): 20}, "latest", None, {("a", 0): 20}, "a"),
        ({}, "latest", {("a", 0): 150}, {("a", 0): 150}, "a"),
        ({}, "latest", {}, {}, ""),
    ],
    ids=["new", "its beginning needs no commit", "begun", "a member begins it", "a member has not begun it"],
)
async def test_a_group_begins_in_all_partitions_of_a_topic_at_once_or_has_members(
    committed: dict[Any, int], from_: Any, member: dict[Any, int] | None, expected: dict[Any, int], log_text: str
) -> None:
    group = NewGroup(committed, member)
    assert await positions.commit_start(group, {"a": from_, "b": "earliest"}) == set(log_text)  # type: ignore[arg-type]
    assert group.committed == expected


@pytest.mark.parametrize(
    ("from_", "where"),
    [
        ("earliest", "at its beginning"),
        ("latest", "at its end"),
        (3600.0, "1h ago"),
        (Back(90.0, 5), "1m 30s ago"),
        (NOTHING, "at its end"),
    ],
)
async def test_where_a_group_begins_without_offsets_is_logged_and_nothing_of_the_topics_that_have_some(
    caplog: pytest.LogCaptureFixture, from_: Any, where: str
) -> None:
    caplog.set_level("INFO")
    group = NewGroup({("b", 0): 20}, None)
    await positions.commit_start(group, {"a": from_, "b": "latest", "c": "latest"})  # type: ignore[arg-type]
    await positions.commit_start(group, {"b": "latest"})  # type: ignore[arg-type]
    assert caplog.messages == [f"group g: it has no offsets yet, and begins in a {where}, in c at its end"]


async def test_a_new_group_starts_at_the_end_if_all_is_older() -> None:
    assert await find(FakeGroup(LOG, begin=10), 60.0) == Start(10, 200, 200, 200, None)


async def test_a_new_group_starts_at_the_beginning_if_the_broker_knows_no_times() -> None:
    assert await find(FakeGroup(LOG, begin=10, by_time=False), 60.0) == Start(10, 10, 10, 200, None)


async def test_the_minute_before_the_last_finished_record_is_read_back() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10)) == Start(10, 89, 150, 200, 150)


async def test_some_records_are_read_back_however_old_they_are() -> None:
    seldom = [ConsumedRecord(offset, b"", offset * 600_000) for offset in range(10, 200)]
    assert (await find(FakeGroup(seldom, group=150, begin=10), recall=Back(60.0, 5))).position == 145
    assert (await find(FakeGroup(seldom, group=150, begin=148), recall=Back(60.0, 5))).position == 148
    assert (await find(FakeGroup(LOG, group=150, begin=10), recall=Back(60.0, 5))).position == 89
    assert (await find(FakeGroup(seldom, begin=10), Back(60.0, 5))).position == 195
    assert (await find(FakeGroup(seldom, begin=10), Back(60.0, 500))).position == 10


async def test_no_more_is_read_back_than_the_log_has() -> None:
    assert await find(FakeGroup(LOG, group=20, begin=10)) == Start(10, 10, 20, 200, 20)


async def test_everything_is_read_back_if_the_broker_knows_no_times() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10, by_time=False)) == Start(10, 10, 150, 200, 150)


async def test_a_topic_that_is_to_be_read_back_whole_is_read_from_its_beginning() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10), recall=WHOLE_LOG) == Start(10, 10, 150, 200, 150)
    assert await find(FakeGroup(LOG, begin=10), "latest", recall=WHOLE_LOG) == Start(10, 10, 200, 200, None)
    assert await find(FakeGroup(LOG, group=150, begin=10), recall=WHOLE_LOG, known_offset=150) == AT_THE_END


async def test_nothing_is_read_back_if_the_last_assignment_ended_exactly_at_the_commit() -> None:
    assert await find(FakeGroup(LOG, group=150, begin=10), known_offset=150) == AT_THE_END
    assert (await find(FakeGroup(LOG, group=150, begin=10), known_offset=149)).position == 89


async def test_records_that_expired_unread_are_counted() -> None:
    start = await find(FakeGroup(LOG, group=4, begin=10))
    assert (start.position, start.resume, start.expired) == (10, 10, 6)


async def test_a_topic_created_again_is_read_from_its_beginning() -> None:
    start = await find(FakeGroup(LOG, group=5000, begin=10))
    assert (start.position, start.resume, start.expired) == (10, 10, 0)


async def test_a_commit_behind_an_open_transaction_is_in_the_log() -> None:
    assert (await find(FakeGroup(LOG, group=200, begin=10, stable=150))).resume == 200
    assert (await find(FakeGroup(LOG, group=201, begin=10, stable=150))).resume == 10


async def test_an_offset_with_nothing_but_control_records_is_skipped() -> None:
    class Controls(FakeGroup):
        async def times(self, offsets: dict[Partition, int]) -> dict[Partition, int | None]:
            return dict.fromkeys(offsets)

    assert await find(Controls(LOG, group=150, begin=10)) == Start(10, 150, 150, 200, 150)


@pytest.mark.parametrize("recall_s", [0.0, 1.0])
async def test_the_last_finished_record_itself_is_read_back(recall_s: float) -> None:
    assert (await find(FakeGroup(LOG, group=150, begin=10), recall=Back(recall_s))).position == 149 - int(recall_s)


# -- with state


class FoundStart(NamedTuple):
    """The positions at which a stream starts, as its reader uses them."""

    positions: dict[Partition, int]
    lost_offsets: dict[Partition, int | None]
    state_ends: dict[Partition, int]
    fresh: frozenset[int]


def client(desk: Desk) -> Any:
    """The desk's client, which answers as a group does."""
    return desk.client


async def find_all(desk: Desk, held_state: ReadState | None = None, *compacted: str) -> FoundStart:
    desk.client.assign(desk.broker.all())
    finding = positions.find_start_with_state(
        client(desk), [TICKS], [OWNERS, LABELS], held_state or ReadState(), frozenset(compacted)
    )
    starts, fresh = await finding
    return FoundStart(
        {tp: start.position for tp, start in starts.items()},
        {TICKS: starts[TICKS].committed} if starts[TICKS].is_torn else {},
        {tp: starts[tp].end for tp in (OWNERS, LABELS)},
        fresh,
    )


def fill(desk: Desk, *, minutes: int, until_ms: int = NOW_MS) -> None:
    """A state record a minute, up to a time; offset i is the i-th."""
    for ago in reversed(range(minutes)):
        desk.log(OWNERS).append(timestamp=until_ms - ago * MINUTE_MS)


@instant
async def test_a_new_group_begins_at_the_beginning_of_the_inputs() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.log(TICKS).retain(4)
    start = await find_all(desk)
    assert start.positions == {TICKS: 4, OWNERS: 0, LABELS: 0}
    assert start.lost_offsets == {}


@instant
async def test_inputs_begin_at_the_committed_offset() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 7
    assert (await find_all(desk)).positions[TICKS] == 7


@instant
async def test_a_commit_of_zero_is_a_position_like_any_other() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 0
    assert (await find_all(desk)).positions[TICKS] == 0


@instant
async def test_a_commit_at_the_end_is_not_lost() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 10
    start = await find_all(desk)
    assert start.positions[TICKS] == 10
    assert start.lost_offsets == {}


@instant
async def test_a_commit_that_the_log_does_not_have_is_lost_and_read_from_the_beginning() -> None:
    for committed in (3, 11):
        desk = Desk()
        desk.log(TICKS).append(10)
        desk.log(TICKS).retain(4)
        desk.broker.committed[TICKS] = committed
        start = await find_all(desk)
        assert start.positions[TICKS] == 4
        assert start.lost_offsets == {TICKS: committed}


@instant
async def test_state_is_read_from_ten_minutes_before_the_next_input() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(timestamp=NOW_MS - 30 * MINUTE_MS)
    start = await find_all(desk)
    assert desk.log(OWNERS).records[start.positions[OWNERS]].timestamp == NOW_MS - 30 * MINUTE_MS - STATE_WINDOW_MS
    assert start.state_ends == {OWNERS: 60, LABELS: 0}
    assert start.fresh == {0}


@instant
async def test_state_whose_newest_record_is_older_than_the_input_is_read_from_ten_minutes_before_that() -> None:
    desk = Desk()
    fill(desk, minutes=60, until_ms=NOW_MS - 300 * MINUTE_MS)
    desk.log(TICKS).append(timestamp=NOW_MS)
    start = await find_all(desk)
    assert start.positions[OWNERS] == 60 - 1 - 10


@instant
async def test_without_waiting_inputs_state_is_read_from_ten_minutes_before_its_newest_record() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(5)
    desk.broker.committed[TICKS] = 5
    assert (await find_all(desk)).positions[OWNERS] == 60 - 1 - 10


@instant
async def test_state_younger_than_ten_minutes_is_read_from_its_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=8)
    desk.log(OWNERS).retain(2)
    assert (await find_all(desk)).positions[OWNERS] == 2


@instant
async def test_compacted_state_is_read_whole_and_other_state_as_usual() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(LABELS).append(2, timestamp=0)
    desk.log(LABELS).append(timestamp=NOW_MS)
    desk.log(LABELS).retain(1)
    desk.log(TICKS).append(timestamp=NOW_MS)
    start = await find_all(desk, None, LABELS.topic)
    assert (start.positions[LABELS], start.positions[OWNERS]) == (1, 60 - 1 - 10)


@instant
async def test_compacted_state_that_is_held_is_read_on_from_its_last_position() -> None:
    desk = Desk()
    desk.log(LABELS).append(9)
    start = await find_all(desk, ReadState({LABELS: 4, OWNERS: 0}), LABELS.topic)
    assert (start.positions[LABELS], start.fresh) == (4, frozenset())


@instant
async def test_records_without_times_have_their_state_read_from_the_beginning() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5, timestamp=-1)
    desk.log(TICKS).append(timestamp=NOW_MS)
    assert (await find_all(desk)).positions[OWNERS] == 0


@instant
async def test_a_broker_that_cannot_find_offsets_by_time_has_its_state_read_from_the_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.client._first_since = lambda _tp, _at_ms: None  # type: ignore[assignment]
    assert (await find_all(desk)).positions[OWNERS] == 0


@instant
async def test_state_whose_newest_record_cannot_be_read_is_read_from_the_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).mark()
    assert (await find_all(desk)).positions[OWNERS] == 0


@instant
async def test_empty_state_begins_at_the_beginning_of_its_log() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).retain(60)
    start = await find_all(desk)
    assert start.positions[OWNERS] == 60
    assert start.state_ends[OWNERS] == 60


@instant
async def test_state_that_is_held_is_read_on() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    start = await find_all(desk, ReadState({OWNERS: 55, LABELS: 0}, {TICKS: 0}))
    assert start.positions[OWNERS] == 55
    assert start.fresh == frozenset()


@instant
async def test_if_one_state_topic_of_a_partition_is_not_held_all_of_it_is_read_again() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    start = await find_all(desk, ReadState({OWNERS: 55}))
    assert start.positions[OWNERS] == 60 - 1 - 10
    assert start.fresh == {0}


@instant
async def test_held_state_that_the_log_no_longer_reaches_is_read_again() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).retain(30)
    start = await find_all(desk, ReadState({OWNERS: 20, LABELS: 0}))
    assert start.positions[OWNERS] == 60 - 1 - 10
    assert start.fresh == {0}


@instant
async def test_held_state_stays_if_the_log_is_another_one_which_is_read_as_well() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    start = await find_all(desk, ReadState({OWNERS: 61, LABELS: 0}))
    assert start.positions[OWNERS] == 60 - 1 - 10
    assert start.positions[LABELS] == 0
    assert start.fresh == frozenset()


@instant
async def test_a_group_that_was_set_back_makes_held_state_useless() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(50, timestamp=NOW_MS)
    desk.broker.committed[TICKS] = 10
    held_state = ReadState({OWNERS: 60, LABELS: 0}, {TICKS: 11})
    assert (await find_all(desk, held_state)).fresh == {0}
    desk.broker.committed[TICKS] = 11
    assert (await find_all(desk, held_state)).fresh == frozenset()


@instant
async def test_without_an_assignment_there_are_no_positions() -> None:
    desk = Desk()
    assert await positions.find_start_with_state(client(desk), [], [], ReadState({OWNERS: 3})) == ({}, frozenset())
