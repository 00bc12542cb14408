"""The reader, one promise at a time."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka.errors import IllegalStateError, KafkaConnectionError

from delivery.ledger import Partition, Slot
from tests.streams.desk import LABELS, OWNERS, TICKS, Desk, instant, meanwhile

# -- state before inputs


@instant
async def test_inputs_wait_until_every_state_topic_of_their_partition_is_learned() -> None:
    desk = Desk()
    desk.log(TICKS).append(3)
    desk.log(OWNERS).append(2)
    desk.log(LABELS).append(250)
    await desk.assign()
    await desk.turn(8)
    topics = [slot.tp for slot, _ in desk.delivered]
    assert topics[:252].count(TICKS) == 0
    assert desk.offsets(TICKS) == [0, 1, 2]


@instant
async def test_state_that_was_delivered_but_not_learned_still_holds_the_inputs() -> None:
    desk = Desk()
    desk.hold = lambda slot: slot.tp == LABELS
    desk.log(TICKS).append(1)
    desk.log(OWNERS).append(1)
    desk.log(LABELS).append(1)
    await desk.assign()
    await desk.turn(5)
    assert desk.offsets(TICKS) == []
    desk.reader.ledger.finish(*desk.slots(LABELS))
    await desk.turn(2)
    assert desk.offsets(TICKS) == [0]


@instant
async def test_state_that_comes_after_the_assignment_is_not_waited_for() -> None:
    desk = Desk()
    desk.log(TICKS).append(1)
    desk.log(OWNERS).append(1)
    await desk.assign()
    await desk.turn()
    desk.hold = lambda slot: slot.offset >= 1
    desk.log(OWNERS).append(5)
    await desk.turn(3)
    assert desk.offsets(TICKS) == [0]


@instant
async def test_state_that_ends_in_markers_holds_no_input_even_while_others_never_pause() -> None:
    desk = Desk(partitions=2)
    busy = Partition("ticks", 1)
    desk.log(OWNERS).append(2)
    desk.log(OWNERS).mark()
    desk.log(TICKS).append(1)
    await desk.assign()
    for _ in range(8):
        desk.log(busy).append(1)
        await desk.turn()
    assert desk.offsets(TICKS) == [0]
    assert len(desk.offsets(busy)) > 4


@instant
async def test_one_partitions_state_does_not_hold_another_partition() -> None:
    desk = Desk(partitions=2)
    desk.hold = lambda slot: slot.tp == OWNERS
    desk.log(OWNERS).append(1)
    desk.log(TICKS).append(1)
    desk.log(Partition("ticks", 1)).append(1)
    await desk.assign()
    await desk.turn(4)
    assert desk.offsets(TICKS) == []
    assert desk.offsets(Partition("ticks", 1)) == [0]


# -- what is held


@instant
async def test_one_record_that_is_held_stops_nothing_but_its_own_commit() -> None:
    desk = Desk()
    desk.hold = lambda slot: slot.offset == 5
    desk.log(TICKS).append(5000)
    await desk.assign()
    await desk.turn(60)
    assert len(desk.offsets(TICKS)) == 5000
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 5}
    assert desk.reader.ledger.held.total() == 1
    assert desk.reader.ledger.open_bytes == 10


@instant
async def test_inputs_stop_at_the_limit_of_open_bytes_and_go_on_at_half_of_it_while_state_flows() -> None:
    desk = Desk(max_open_bytes=1000)
    desk.hold = lambda slot: slot.tp == TICKS
    desk.log(TICKS).append(500)
    await desk.assign()
    await desk.turn(6)
    assert len(desk.offsets(TICKS)) == 100
    desk.log(OWNERS).append(1)
    await desk.turn(2)
    assert desk.offsets(OWNERS) == [0]
    finish(desk, desk.slots(TICKS)[:45])
    await desk.turn(2)
    assert len(desk.offsets(TICKS)) == 100
    finish(desk, desk.slots(TICKS)[45:51])
    await desk.turn(2)
    assert len(desk.offsets(TICKS)) == 200


def finish(desk: Desk, slots: list[Slot]) -> None:
    for slot in slots:
        desk.reader.ledger.finish(slot)


# -- what is missing in a log


@instant
async def test_a_hole_is_passed_over_and_counted_but_no_loss() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    desk.log(TICKS).compact(0)
    desk.log(TICKS).compact(4)
    await desk.assign()
    await desk.turn(5)
    assert desk.offsets(TICKS) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert len(desk.client.seeks) == 1
    assert (desk.reader.holes, desk.reader.lost) == (2, 0)


@instant
async def test_thousands_of_ends_of_transactions_are_passed_over_without_asking_or_reading_again() -> None:
    desk = Desk()
    for _ in range(3000):
        desk.log(TICKS).append(1)
        desk.log(TICKS).mark()
    asked_beginnings, beginnings = list[object](), desk.client.beginnings

    async def counted(tps: list[Partition]) -> Mapping[Partition, int]:
        asked_beginnings.append(tps)
        return await beginnings(tps)

    desk.client.beginnings = counted  # type: ignore[method-assign]
    await desk.assign()
    await desk.turn(31)
    assert len(desk.offsets(TICKS)) == 3000
    assert len(desk.client.seeks) == 1
    assert len(asked_beginnings) <= 32
    assert desk.reader.lost == 0


@instant
async def test_what_ends_in_the_end_of_a_transaction_is_read_and_committed_to_its_end() -> None:
    desk = Desk()
    desk.log(TICKS).append(3)
    desk.log(TICKS).mark()
    await desk.assign()
    await desk.turn(4)
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 4}
    assert desk.reader.lost == 0


@instant
async def test_what_is_no_record_is_not_committed_past_what_is_open() -> None:
    desk = Desk()
    desk.hold = lambda slot: slot.offset == 2
    desk.log(TICKS).append(3)
    desk.log(TICKS).mark()
    await desk.assign()
    await desk.turn(4)
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 2}


@instant
async def test_records_that_are_deleted_under_the_reader_are_counted_one_by_one() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    await desk.assign()
    await desk.turn(2)
    desk.log(TICKS).append(40)
    desk.log(TICKS).retain(35)
    await desk.turn(4)
    assert desk.offsets(TICKS) == [*range(10), *range(35, 50)]
    assert desk.reader.lost == 25


@instant
async def test_records_that_are_deleted_to_the_last_one_are_counted_without_another_one() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    await desk.assign()
    await desk.turn(2)
    desk.log(TICKS).append(7)
    desk.log(TICKS).retain(17)
    await desk.turn(3)
    assert desk.reader.lost == 7
    await desk.turn(3)
    assert desk.reader.lost == 7


@instant
async def test_a_hole_in_a_compacted_topic_is_believed_at_once() -> None:
    desk = Desk(compacted=frozenset({"owners"}))
    desk.log(OWNERS).append(50)
    for offset in range(0, 49, 2):
        desk.log(OWNERS).compact(offset)
    await desk.assign()
    await desk.turn(3)
    assert len(desk.offsets(OWNERS)) == 25
    assert len(desk.client.seeks) == 1


# -- logs that are not what they were


@instant
async def test_a_topic_that_is_created_again_under_the_reader_is_read_from_its_beginning() -> None:
    desk = Desk()
    desk.log(TICKS).append(50)
    await desk.assign()
    await desk.turn(2)
    await desk.reader.commit()
    desk.log(TICKS).recreate()
    await desk.turn(2)
    desk.log(TICKS).append(3)
    await desk.turn(6)
    assert desk.offsets(TICKS) == [*range(50), 0, 1, 2]
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 3}


@instant
async def test_state_whose_topic_is_created_again_under_the_reader_is_kept_and_its_new_log_learned_as_well() -> None:
    desk = Desk()
    desk.log(OWNERS).append(50)
    await desk.assign()
    await desk.turn(2)
    desk.log(OWNERS).recreate()
    await desk.turn(2)
    desk.log(OWNERS).append(3)
    await desk.turn(6)
    assert desk.offsets(OWNERS)[50:] == [0, 1, 2]
    assert desk.dropped[1:] == [frozenset()] * (len(desk.dropped) - 1)


@instant
async def test_a_commit_beyond_the_end_is_no_reason_to_skip_what_there_is() -> None:
    desk = Desk()
    desk.broker.committed[TICKS] = 1000
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    assert desk.offsets(TICKS) == [0, 1, 2, 3, 4]


@instant
async def test_a_commit_below_the_beginning_is_counted_as_lost_and_read_on_from_there() -> None:
    desk = Desk()
    desk.broker.committed[TICKS] = 3
    desk.log(TICKS).append(10)
    desk.log(TICKS).retain(7)
    await desk.assign()
    await desk.turn(2)
    assert desk.offsets(TICKS) == [7, 8, 9]
    assert desk.reader.lost == 4
    assert (desk.reader.torn, desk.reader.input_ends) == (frozenset({0}), {TICKS: 10})


# -- commits


@instant
async def test_nothing_is_committed_that_the_broker_already_has() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    assert await desk.reader.commit()
    assert not await desk.reader.commit()
    assert desk.client.asked_to_commit == [{TICKS: 5}]
    assert desk.told_committed == [{TICKS: 5}]


@instant
async def test_state_is_read_again_and_what_was_finished_of_it_is_known() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5)
    desk.hold = lambda slot: slot.offset == 3
    await desk.assign()
    await desk.turn(2)
    assert await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 0, OWNERS: 3}
    assert desk.told_committed == [{TICKS: 0}]

    another = Desk(broker=desk.broker)
    await another.assign()
    await another.turn(2)
    assert another.offsets(OWNERS) == [0, 1, 2, 3, 4]
    assert [another.reader.is_settled(slot) for slot in another.slots(OWNERS)] == [True, True, True, False, False]
    assert await another.reader.commit()
    assert desk.broker.committed == {TICKS: 0, OWNERS: 5}


@instant
async def test_an_input_without_a_commit_gets_it_at_the_start_so_that_its_lag_is_known() -> None:
    desk = Desk()
    await desk.assign()
    await desk.turn()
    assert await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 0}
    assert not await desk.reader.commit()


@instant
async def test_that_an_input_is_read_from_its_beginning_for_lack_of_a_commit_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "streams.reader")
    desk = Desk(partitions=2)
    desk.log(TICKS).append(3)
    desk.log(Partition("ticks", 1)).append(3)
    await desk.assign()
    await desk.turn(4)
    await desk.reader.commit()
    first = "ticks: no offset is committed in 2 partitions: reading them from the beginning"
    assert [message for message in caplog.messages if "is committed in" in message] == [first]

    another = Desk(broker=desk.broker)
    await another.assign()
    await another.turn(4)
    assert [message for message in caplog.messages if "is committed in" in message] == [first]


@instant
async def test_a_commit_of_state_is_never_set_back() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5)
    desk.broker.committed |= {TICKS: 0, OWNERS: 4}
    desk.hold = lambda slot: slot.offset == 2
    await desk.assign()
    await desk.turn(2)
    assert not await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 0, OWNERS: 4}


@instant
async def test_of_a_state_topic_that_was_created_again_nothing_is_finished() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5)
    desk.broker.committed[OWNERS] = 40
    await desk.assign()
    await desk.turn(2)
    assert not any(map(desk.reader.is_settled, desk.slots(OWNERS)))


@pytest.mark.parametrize("trouble", ["refused", "failed"])
def test_a_commit_that_fails_is_tried_again(trouble: str) -> None:
    @instant
    async def scenario() -> None:
        desk = Desk()
        desk.log(TICKS).append(5)
        await desk.assign()
        await desk.turn(2)
        desk.broker.commits = trouble
        assert not await desk.reader.commit()
        assert desk.told_committed == []
        desk.broker.commits = "taken"
        assert await desk.reader.commit()
        assert desk.broker.committed == {TICKS: 5}

    scenario()


@instant
async def test_two_who_commit_at_the_same_time_commit_once() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    assert await asyncio.gather(*(desk.reader.commit() for _ in range(5))) == [True] * 5
    assert desk.client.asked_to_commit == [{TICKS: 5}]


@instant
async def test_waiting_for_anothers_commit_gives_that_ones_result() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)

    async def again_and_again() -> bool:
        await desk.reader.commit()
        desk.reader.commits = {}
        return await desk.reader.commit()

    assert await asyncio.gather(*(again_and_again() for _ in range(3))) == [True] * 3


async def revoked_with_an_output_under_way(arrives_after_s: float, *, committing: bool = False) -> tuple[Desk, float]:
    """A reader whose one input waits for its output while the partitions go, and how long that took."""
    desk, loop = Desk(), asyncio.get_running_loop()
    desk.log(TICKS).append(2)
    desk.hold = lambda slot: slot.offset == 1
    await desk.assign()
    await desk.turn(2)
    if committing:
        desk.broker.commits = "unreachable"
        earlier = asyncio.create_task(desk.reader.commit())
        await asyncio.sleep(0.01)
        loop.call_later(0.5, setattr, desk.broker, "commits", "taken")
    output = asyncio.Future[int]()
    output.add_done_callback(lambda _: desk.reader.ledger.finish(desk.slots(TICKS)[1]))
    desk.outputs.append(output)
    loop.call_later(arrives_after_s, output.set_result, 0)
    began_s = loop.time()
    await desk.reader.revoked()
    took_s = loop.time() - began_s
    if committing:
        await earlier
    return desk, took_s


@instant
async def test_what_was_sent_and_arrives_within_a_second_is_committed_before_the_partitions_go() -> None:
    desk, _ = await revoked_with_an_output_under_way(0.9)
    assert desk.broker.committed == {TICKS: 2}


@instant
async def test_what_arrives_later_holds_a_revocation_for_a_second_only() -> None:
    desk, took_s = await revoked_with_an_output_under_way(60)
    assert took_s <= 1.1
    assert desk.broker.committed == {TICKS: 1}


@instant
async def test_the_last_commit_has_what_the_one_under_way_does_not() -> None:
    desk, _ = await revoked_with_an_output_under_way(0.1, committing=True)
    assert desk.broker.committed == {TICKS: 2}


@instant
async def test_a_commit_that_never_returns_holds_a_revocation_for_seconds_and_later_commits_not_at_all() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    desk.broker.commits = "hanging"
    began_s = asyncio.get_running_loop().time()
    await desk.reader.revoked()
    assert asyncio.get_running_loop().time() - began_s <= 5.1
    desk.broker.commits = "taken"
    await desk.assign()
    await desk.turn(2)
    assert await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 5}


@instant
async def test_a_commit_that_is_still_under_way_at_a_revocation_does_not_set_the_next_owner_back() -> None:
    desk = Desk()
    desk.log(TICKS).append(7)
    await desk.assign()
    await desk.turn(2)
    desk.broker.commits = "unreachable"
    await desk.reader.revoked()
    desk.broker.commits = "taken"
    desk.broker.committed[TICKS] = 1000  # by whoever has the partition now
    await desk.assign({OWNERS, LABELS})
    await asyncio.sleep(10)
    assert desk.broker.committed == {TICKS: 1000}


@instant
async def test_a_commit_that_swallows_its_cancellation_holds_nobody() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    commit = desk.client.commit

    async def stubborn(offsets: Any) -> bool:
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 60:
                    raise

    desk.client.commit = stubborn  # type: ignore[method-assign]
    await desk.reader.revoked()
    desk.client.commit = commit  # type: ignore[method-assign]
    await desk.assign()
    await desk.turn(2)
    assert await desk.reader.commit()
    await asyncio.sleep(60)


@instant
async def test_what_is_finished_is_committed_before_the_partitions_go() -> None:
    desk = Desk()
    desk.hold = lambda slot: slot.offset >= 3
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    await desk.reader.revoked()
    assert desk.broker.committed == {TICKS: 3}


@instant
async def test_a_commit_that_returns_in_another_epoch_says_nothing_of_this_one() -> None:
    desk = Desk()
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(2)
    slow = asyncio.Event()
    commit = desk.client.commit

    async def slowly(offsets: Any) -> bool:
        await slow.wait()
        return await commit(offsets)

    desk.client.commit = slowly  # type: ignore[method-assign]
    committing = asyncio.create_task(desk.reader.commit())
    await asyncio.sleep(0.01)
    await desk.assign()
    await desk.turn()
    slow.set()
    await committing
    assert desk.reader.commits == {}
    assert desk.told_committed == []


# -- assignments that change


@instant
async def test_an_empty_assignment_is_no_failure_and_reads_nothing() -> None:
    desk = Desk()
    desk.log(TICKS).append(1)
    await desk.assign(set())
    await desk.turn(3)
    assert desk.reader.ledger.ready
    assert desk.reader.ledger.positions() == {}
    await desk.reader.revoked()
    await desk.assign()
    await desk.turn(2)
    assert desk.offsets(TICKS) == [0]


@instant
async def test_nothing_is_read_in_the_middle_of_a_rebalance() -> None:
    desk = Desk()
    desk.log(TICKS).append(1)
    await desk.assign()
    desk.client.flow = False
    await desk.turn(3)
    assert desk.client.seeks == []
    assert desk.delivered == []


@pytest.mark.parametrize("call", ["committed", "beginnings", "ends", "times", "offsets_at"])
@pytest.mark.parametrize("error", [IllegalStateError("not assigned"), AssertionError(), KafkaConnectionError("away")])
def test_a_partition_lost_while_positions_are_set_is_no_failure(call: str, error: Exception) -> None:
    @instant
    async def scenario() -> None:
        desk = Desk()
        desk.log(TICKS).append(2)
        desk.log(OWNERS).append(1)
        await desk.assign()
        working = getattr(desk.client, call)

        async def lost_positions(*_args: Any) -> None:
            raise error

        setattr(desk.client, call, lost_positions)
        await desk.turn(3)
        assert not desk.reader.ledger.ready
        setattr(desk.client, call, working)
        await desk.turn(4)
        assert desk.offsets(TICKS) == [0, 1]

    scenario()


@pytest.mark.parametrize("call", ["committed", "beginnings", "ends", "times", "offsets_at"])
def test_positions_that_were_found_for_an_older_epoch_are_not_used(call: str) -> None:
    @instant
    async def scenario() -> None:
        desk = Desk(partitions=2)
        desk.log(TICKS).append(2)
        desk.log(OWNERS).append(1)
        await desk.assign()
        working, resumed = getattr(desk.client, call), asyncio.Event()

        async def slowly(*args: Any) -> Any:
            await resumed.wait()
            return await working(*args)

        setattr(desk.client, call, slowly)
        await meanwhile(desk.turn(), lambda: desk.assign({TICKS, OWNERS, LABELS}), resumed.set)
        assert not desk.reader.ledger.ready
        setattr(desk.client, call, working)
        await desk.turn(4)
        assert set(desk.reader.ledger.positions()) == {TICKS, OWNERS, LABELS}
        assert desk.offsets(TICKS) == [0, 1]

    scenario()


@instant
async def test_a_revocation_in_the_middle_of_a_fetch_makes_its_records_worthless() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    await desk.assign()
    await desk.turn()
    fetch, resumed = desk.client.fetch, asyncio.Event()

    async def slowly(active: Any, timeout_s: float) -> Any:
        records = await fetch(active, timeout_s)
        await resumed.wait()
        return records

    desk.client.fetch = slowly  # type: ignore[method-assign]
    await meanwhile(desk.turn(), desk.reader.revoked, lambda: desk.assign(set()), resumed.set)
    assert desk.delivered == []
    assert desk.reader.ledger.open_bytes == 0


@instant
async def test_slots_that_waited_for_room_while_the_epoch_ended_count_for_nothing() -> None:
    desk = Desk()
    desk.log(TICKS).append(10)
    await desk.assign()
    await desk.turn()
    desk.room.clear()
    await meanwhile(desk.turn(), desk.reader.revoked, desk.assign, desk.room.set)
    assert desk.offsets(TICKS) == list(range(10))
    await desk.turn()
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 0}
    await desk.turn()
    await desk.reader.commit()
    assert desk.broker.committed == {TICKS: 10}
    assert desk.offsets(TICKS) == [*range(10), *range(10)]


@instant
async def test_the_stage_forgets_at_every_end_of_an_epoch() -> None:
    desk = Desk()
    await desk.assign()
    await desk.turn()
    before = desk.forgotten
    await desk.reader.revoked()
    await desk.assign()
    assert desk.forgotten == before + 2


# -- what a process keeps


@instant
async def test_state_that_a_process_holds_is_read_on_and_not_again() -> None:
    desk = Desk()
    desk.log(OWNERS).append(5)
    await desk.assign()
    await desk.turn(3)
    await desk.reader.revoked()
    desk.log(OWNERS).append(2)
    await desk.assign()
    await desk.turn(3)
    assert desk.offsets(OWNERS) == [0, 1, 2, 3, 4, 5, 6]
    assert desk.dropped == [{0}, set()]


@instant
async def test_state_of_a_partition_that_went_is_dropped_and_read_again_when_it_comes_back() -> None:
    desk = Desk()
    desk.log(OWNERS).append(2)
    await desk.assign()
    await desk.turn(3)
    await desk.assign(set())
    await desk.turn()
    await desk.assign()
    await desk.turn(3)
    assert desk.dropped == [{0}, {0}, {0}]
    assert desk.offsets(OWNERS) == [0, 1, 0, 1]


@instant
async def test_state_that_was_delivered_but_not_learned_when_the_epoch_ended_is_read_again() -> None:
    desk = Desk()
    desk.hold = lambda slot: slot.offset >= 1
    desk.log(OWNERS).append(3)
    await desk.assign()
    await desk.turn(3)
    desk.hold = lambda _slot: False
    await desk.assign()
    await desk.turn(3)
    assert desk.offsets(OWNERS) == [0, 1, 2, 1, 2]


@instant
async def test_a_group_that_was_set_back_has_its_state_read_again() -> None:
    desk = Desk()
    desk.log(OWNERS).append(3)
    desk.log(TICKS).append(5)
    await desk.assign()
    await desk.turn(3)
    await desk.reader.revoked()
    desk.broker.committed[TICKS] = 2
    await desk.assign()
    await desk.turn(3)
    assert desk.dropped[-1] == {0}
    assert desk.offsets(OWNERS) == [0, 1, 2, 0, 1, 2]
    assert desk.offsets(TICKS) == [0, 1, 2, 3, 4, 2, 3, 4]
