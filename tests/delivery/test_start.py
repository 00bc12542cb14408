"""Where reading begins."""

from delivery import start
from delivery.start import STATE_WINDOW_MS, Held, Start
from tests.streams.desk import LABELS, OWNERS, TICKS, Desk, instant

MINUTE_MS = 60_000
NOW_MS = 1_790_000_000_000


async def find(desk: Desk, held: Held | None = None, *compacted: str) -> Start:
    desk.client.assign(desk.broker.all())
    return await start.find(desk.client, [TICKS], [OWNERS, LABELS], held or Held(), frozenset(compacted))


def fill(desk: Desk, *, minutes: int, until_ms: int = NOW_MS) -> None:
    """A state record a minute, up to a time; offset i is the i-th."""
    for ago in reversed(range(minutes)):
        desk.log(OWNERS).append(timestamp=until_ms - ago * MINUTE_MS)


@instant
async def test_a_new_group_begins_at_the_beginning_of_the_inputs() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.log(TICKS).retain(4)
    found = await find(desk)
    assert found.positions == {TICKS: 4, OWNERS: 0, LABELS: 0}
    assert found.lost == {}


@instant
async def test_inputs_begin_at_what_was_committed() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 7
    assert (await find(desk)).positions[TICKS] == 7


@instant
async def test_a_commit_of_zero_is_a_position_like_any_other() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 0
    assert (await find(desk)).positions[TICKS] == 0


@instant
async def test_a_commit_at_the_end_is_not_lost() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.broker.committed[TICKS] = 10
    found = await find(desk)
    assert found.positions[TICKS] == 10
    assert found.lost == {}


@instant
async def test_a_commit_that_the_log_does_not_have_is_lost_and_read_from_the_beginning() -> None:
    for committed in (3, 11):
        desk = Desk()
        desk.log(TICKS).append(10)
        desk.log(TICKS).retain(4)
        desk.broker.committed[TICKS] = committed
        found = await find(desk)
        assert found.positions[TICKS] == 4
        assert found.lost == {TICKS: committed}


@instant
async def test_state_is_read_from_ten_minutes_before_the_next_input() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(timestamp=NOW_MS - 30 * MINUTE_MS)
    found = await find(desk)
    assert desk.log(OWNERS).records[found.positions[OWNERS]].timestamp == NOW_MS - 30 * MINUTE_MS - STATE_WINDOW_MS
    assert found.state_ends == {OWNERS: 60, LABELS: 0}
    assert found.fresh == {0}


@instant
async def test_state_whose_newest_record_is_older_than_the_input_is_read_from_ten_minutes_before_that() -> None:
    desk = Desk()
    fill(desk, minutes=60, until_ms=NOW_MS - 300 * MINUTE_MS)
    desk.log(TICKS).append(timestamp=NOW_MS)
    found = await find(desk)
    assert found.positions[OWNERS] == 60 - 1 - 10


@instant
async def test_without_waiting_inputs_state_is_read_from_ten_minutes_before_its_newest_record() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(5)
    desk.broker.committed[TICKS] = 5
    assert (await find(desk)).positions[OWNERS] == 60 - 1 - 10


@instant
async def test_state_younger_than_ten_minutes_is_read_from_its_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=8)
    desk.log(OWNERS).retain(2)
    assert (await find(desk)).positions[OWNERS] == 2


@instant
async def test_compacted_state_is_read_whole_and_the_rest_as_ever() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(LABELS).append(3, timestamp=0)
    desk.log(LABELS).retain(1)
    desk.log(TICKS).append(timestamp=NOW_MS)
    found = await find(desk, None, LABELS.topic)
    assert (found.positions[LABELS], found.positions[OWNERS]) == (1, 60 - 1 - 10)


@instant
async def test_compacted_state_that_is_held_is_read_on_from_where_it_was() -> None:
    desk = Desk()
    desk.log(LABELS).append(9)
    found = await find(desk, Held({LABELS: 4, OWNERS: 0}), LABELS.topic)
    assert (found.positions[LABELS], found.fresh) == (4, frozenset())


@instant
async def test_records_without_times_have_their_state_read_from_the_beginning() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5, timestamp=-1)
    desk.log(TICKS).append(timestamp=NOW_MS)
    assert (await find(desk)).positions[OWNERS] == 0


@instant
async def test_a_broker_that_cannot_find_offsets_by_time_has_its_state_read_from_the_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.client._first_since = lambda _tp, _at_ms: None  # type: ignore[assignment]
    assert (await find(desk)).positions[OWNERS] == 0


@instant
async def test_state_whose_newest_record_cannot_be_read_is_read_from_the_beginning() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).mark()
    assert (await find(desk)).positions[OWNERS] == 0


@instant
async def test_empty_state_begins_where_its_log_does() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).retain(60)
    found = await find(desk)
    assert found.positions[OWNERS] == 60
    assert found.state_ends[OWNERS] == 60


@instant
async def test_state_that_is_held_is_read_on() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    found = await find(desk, Held({OWNERS: 55, LABELS: 0}, {TICKS: 0}))
    assert found.positions[OWNERS] == 55
    assert found.fresh == frozenset()


@instant
async def test_where_one_state_topic_of_a_partition_is_not_held_all_of_it_is_read_anew() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    found = await find(desk, Held({OWNERS: 55}))
    assert found.positions[OWNERS] == 60 - 1 - 10
    assert found.fresh == {0}


@instant
async def test_held_state_that_the_log_no_longer_reaches_is_read_anew() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(OWNERS).retain(30)
    found = await find(desk, Held({OWNERS: 20, LABELS: 0}))
    assert found.positions[OWNERS] == 60 - 1 - 10
    assert found.fresh == {0}


@instant
async def test_held_state_stays_where_the_log_is_another_one_which_is_read_as_well() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    found = await find(desk, Held({OWNERS: 61, LABELS: 0}))
    assert found.positions[OWNERS] == 60 - 1 - 10
    assert found.positions[LABELS] == 0
    assert found.fresh == frozenset()


@instant
async def test_a_group_that_was_set_back_makes_held_state_useless() -> None:
    desk = Desk()
    fill(desk, minutes=60)
    desk.log(TICKS).append(50, timestamp=NOW_MS)
    desk.broker.committed[TICKS] = 10
    held = Held({OWNERS: 60, LABELS: 0}, {TICKS: 11})
    assert (await find(desk, held)).fresh == {0}
    desk.broker.committed[TICKS] = 11
    assert (await find(desk, held)).fresh == frozenset()


@instant
async def test_without_an_assignment_there_is_nowhere_to_begin() -> None:
    desk = Desk()
    assert await start.find(desk.client, [], [], Held({OWNERS: 3})) == Start({}, {}, {}, frozenset(), {}, {})
