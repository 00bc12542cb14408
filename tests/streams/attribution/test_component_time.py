"""The joiner: what depends on time, and what the end of an epoch leaves behind."""

import asyncio
import time

import pytest

from delivery.ledger import Partition
from delivery.settings import DEAD_LETTERS
from delivery.watchdog import Pulse, StallDetector
from streams.attribution.component import ALLOCATIONS, SAMPLES, WORKLOADS, Attribution
from streams.settings import AttributionSettings
from tests.eventually import settle
from tests.streams.attribution.fakes import FakeApp, looking, until_sent
from tests.streams.attribution.records import LONG_AFTER_MS, container, gpu, pod, snapshot, tick, workloads
from tests.streams.fakes import Record

KEY = b"c/n"


# -- time


async def test_a_tick_whose_snapshot_never_comes_goes_when_the_end_has_been_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = FakeApp(grace_s=0.0)
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(tick(1, 2))
    await app.read(SAMPLES)

    async with looking(app, monkeypatch):
        app.joiner.ends(app.now_s(), {Partition(ALLOCATIONS, 0): 1})
        await asyncio.sleep(0.01)
        assert app.sender.sent == []
        assert app.ends_asked > 0

        await app.read(ALLOCATIONS)
        await until_sent(app, 1)

    assert app.sender.outputs()[0].attribution == "late"
    assert app.position(SAMPLES) == 1


def test_a_stream_whose_ticks_all_wait_for_a_long_grace_has_not_stalled() -> None:
    stream = Attribution(AttributionSettings(kafka="127.0.0.1:1", grace_s=180.0))
    detector = StallDetector(stream.make_worker({SAMPLES: 1})[1].deadlines)
    waiting = [Pulse(beat=s, progress=0, turns=s, working=True, ready=True, reachable=s) for s in range(200)]
    assert [reason for pulse in waiting if (reason := detector.check(pulse))] == []


async def test_an_end_that_was_asked_for_before_the_tick_was_read_does_not_release_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = FakeApp(grace_s=0.0)
    before_s = app.now_s() - 0.001
    app.log(tick(1, 1))
    await app.read(SAMPLES)

    async with looking(app, monkeypatch):
        app.joiner.ends(before_s, {Partition(ALLOCATIONS, 0): 0})
        await asyncio.sleep(0.01)

    assert app.sender.sent == []


async def test_the_end_of_another_partition_does_not_release_a_tick_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = FakeApp(grace_s=0.0)
    app.log(tick(1, 1))
    await app.read(SAMPLES)

    async with looking(app, monkeypatch):
        app.joiner.ends(app.now_s(), {Partition(ALLOCATIONS, 1): 0, Partition(WORKLOADS, 0): 0})
        await asyncio.sleep(0.01)

    assert app.sender.sent == []


# -- the workloads, in log time


def uids(app: FakeApp) -> list[str | None]:
    """The uid of the holder of the first GPU, by tick."""
    return [output.devices[0].holders[0].pod_uid for output in app.sender.outputs()]


async def test_a_tick_waits_until_the_broker_has_said_where_the_workloads_end_and_they_are_read_to_there() -> None:
    app = FakeApp()
    app.answering = False
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(workloads(1, pod("p")), timestamp=97_000)
    app.log(tick(1, 1), timestamp=100_000)
    await app.read(ALLOCATIONS, SAMPLES)
    assert app.ends_asked > 0

    app.joiner.ends(app.now_s(), {Partition(WORKLOADS, 0): 1, Partition(SAMPLES, 0): 1})
    await app.look()
    assert app.sender.sent == []

    await app.read(WORKLOADS)
    assert uids(app) == ["uid-p"]


async def test_one_answer_is_enough_for_a_backlog_that_is_read_later() -> None:
    app = FakeApp()
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(workloads(1, pod("p")), timestamp=1_000)
    for i in range(200):
        app.log(tick(i, 1), timestamp=10_000 + i * 1_000)
    await app.read(WORKLOADS, ALLOCATIONS)
    for _ in range(2):  # the second was asked for after the first had said where the samples end
        app.ask_ends()
        await settle()
    app.answering = False

    await app.read(SAMPLES)

    assert uids(app) == ["uid-p"] * 200


async def test_ticks_that_come_live_find_the_workloads_read() -> None:
    app = FakeApp()
    app.log(workloads(1, pod("p")), timestamp=1_000)
    app.log(snapshot(1, container("p", gpu(0))))
    await app.read(WORKLOADS, ALLOCATIONS)
    app.log(tick(0, 1), timestamp=9_000)
    await app.read(SAMPLES)
    for i in range(1, 6):
        app.ahead_s += 1.0
        app.log(tick(i, 1), timestamp=9_000 + i * 1_000)
        await app.joiner.handle(app.batch(SAMPLES))
        assert len(app.sender.sent) == i + 1
        app.ask_ends()  # as the app does every second
        await settle()


async def test_the_end_of_the_workloads_is_asked_for_before_a_tick_has_to_wait_for_it() -> None:
    app = FakeApp()
    app.log(tick(1, None), timestamp=10_000)
    await app.read(SAMPLES)
    for i in range(20):
        app.ahead_s += 0.3
        asked_before = app.ends_asked
        app.log(tick(2 + i, None), timestamp=10_300 + i * 300)
        await app.joiner.handle(app.batch(SAMPLES))
        await settle()
        assert (len(app.sender.sent), app.ends_asked - asked_before <= 1) == (2 + i, True)

    assert 5 <= app.ends_asked <= 12


async def test_a_tick_waits_for_its_pod_until_what_was_logged_two_seconds_later_is_read() -> None:
    app = FakeApp()
    app.log(workloads(1), timestamp=1_000)
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(tick(1, 1), timestamp=10_000)
    await app.read(WORKLOADS, ALLOCATIONS, SAMPLES)
    app.ahead_s = 2.4
    await app.look()
    assert app.sender.sent == []

    app.log(workloads(2, pod("p")), timestamp=12_000)
    app.log(workloads(3, pod("p", uid="other")), timestamp=12_001)
    await app.read(WORKLOADS)
    assert uids(app) == ["uid-p"]


async def test_a_tick_goes_without_its_pod_once_an_end_that_was_asked_for_later_is_read() -> None:
    app = FakeApp()
    app.log(workloads(1), timestamp=1_000)
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(tick(1, 1), timestamp=10_000)
    await app.read(WORKLOADS, ALLOCATIONS, SAMPLES)
    app.ahead_s = 2.6
    await app.look()
    await app.look()

    assert uids(app) == [None]
    assert app.sender.outputs()[0].devices[0].holders[0].pod_unknown


async def test_a_record_that_was_logged_before_what_was_taken_as_read_is_counted() -> None:
    app = FakeApp()
    app.log(tick(1, None), timestamp=100_000)
    await app.read(SAMPLES)
    app.log(workloads(1), timestamp=99_000)
    app.log(workloads(2), timestamp=100_000)
    await app.read(WORKLOADS)

    assert app.total("misordered_workloads_total") == 1


async def test_a_record_without_a_log_time_has_that_of_its_reading() -> None:
    app = FakeApp()
    app.log(workloads(1, pod("p")), timestamp=-1)
    app.log(snapshot(1, container("p", gpu(0))))
    app.log(tick(1, 1), timestamp=time.time_ns() // 1_000_000 + 3_600_000)
    await app.read(WORKLOADS, ALLOCATIONS, SAMPLES)

    assert uids(app) == ["uid-p"]


# -- epochs


async def test_a_batch_of_an_epoch_that_is_over_does_nothing() -> None:
    app = FakeApp()
    app.log(tick(1, None))
    app.logs[Partition(SAMPLES, 0)].append(Record(KEY, b"?"))
    stale = app.batch(SAMPLES)
    app.begin({})

    await app.joiner.handle(stale)

    assert app.sender.sent == []
    assert (app.total("records_released_total", SAMPLES), app.total("records_held", SAMPLES)) == (2, 0)


async def test_an_epoch_that_ends_while_the_sender_has_no_room_ends_the_batch() -> None:
    app = FakeApp()
    app.log(workloads(1, node="other"), timestamp=LONG_AFTER_MS)
    await app.read(WORKLOADS)
    for i in range(3):
        app.log(tick(i, None))
    app.sender.room.clear()
    taking = asyncio.create_task(app.joiner.handle(app.batch(SAMPLES)))
    await settle()
    app.begin({Partition(SAMPLES, 0): 0})
    app.sender.room.set()
    await taking
    assert app.position(SAMPLES) == 0

    await app.read(SAMPLES)
    assert [output.seq for output in app.sender.outputs()] == [0, 0, 1, 2]
    assert app.position(SAMPLES) == 3


async def test_an_acknowledgement_of_an_epoch_that_is_over_finishes_nothing() -> None:
    app = FakeApp()
    app.sender.holding = True
    app.log(tick(1, None))
    await app.read(SAMPLES)
    app.begin({Partition(SAMPLES, 0): 0})
    await app.read(SAMPLES)

    app.sender.sent[0].acknowledged.set_result(0)
    await settle()
    assert app.position(SAMPLES) == 0

    app.sender.sent[1].acknowledged.set_result(1)
    await settle()
    assert app.position(SAMPLES) == 1
    assert app.total("ticks_total", "none") == 1


async def test_a_tick_that_waited_when_the_epoch_ended_goes_once_when_it_is_read_again() -> None:
    app = FakeApp(grace_s=1e6)
    app.log(tick(1, 1))
    app.log(tick(2, 1))
    await app.read(SAMPLES)
    app.begin({Partition(SAMPLES, 0): 0})
    assert not app.joiner._partitions[0].slots
    app.log(snapshot(1))
    await app.read(ALLOCATIONS)
    assert app.sender.sent == []

    await app.read(SAMPLES)
    assert [output.seq for output in app.sender.outputs()] == [1, 2]
    assert app.position(SAMPLES) == 2


async def test_an_end_asked_in_an_epoch_that_is_over_lets_nothing_go(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FakeApp(grace_s=0.0)
    app.log(tick(1, 1))
    await app.read(SAMPLES)
    app.joiner.ends(app.now_s(), {Partition(ALLOCATIONS, 0): 0})
    app.begin({Partition(SAMPLES, 0): 0})
    await app.read(SAMPLES)

    async with looking(app, monkeypatch):
        await asyncio.sleep(0.01)

    assert app.sender.sent == []


async def test_a_worker_that_has_lost_all_partitions_reports_no_lag() -> None:
    app = FakeApp()
    app.joiner.ends(0.0, {Partition(SAMPLES, 0): 7})
    assert app.total("lag_records", SAMPLES) == 7

    app.joiner.ends(1.0, {})
    assert app.total("lag_records", SAMPLES) == 0


async def test_state_that_is_kept_is_used_after_a_rebalance_and_state_that_is_dropped_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = FakeApp(grace_s=0.0)
    for partition in (0, 1):
        app.log(snapshot(1, container("p", gpu(0))), partition=partition)
        await app.read(ALLOCATIONS, partition=partition)
        app.log(tick(1, 1), partition=partition)
    app.begin({})
    app.joiner.drop(frozenset({1}))
    await app.read(SAMPLES, partition=0)
    await app.read(SAMPLES, partition=1)
    assert [s.partition for s in app.sender.sent] == [0]

    async with looking(app, monkeypatch):
        app.joiner.ends(app.now_s(), {Partition(ALLOCATIONS, 1): 1})
        await until_sent(app, 2)
    assert [output.attribution for output in app.sender.outputs()] == ["exact", "none"]


async def test_the_metrics_show_what_is_held_open_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FakeApp(grace_s=1e6)
    app.log(tick(1, 1, node="a"))
    app.log(tick(1, 1, node="b"))
    await app.read(SAMPLES)

    async with looking(app, monkeypatch):
        await asyncio.sleep(0.01)

    assert (app.total("pending_ticks"), app.total("nodes")) == (2, 2)
    assert app.total("open_bytes") == app.ledger.open_bytes > 0


async def test_snapshots_behind_the_committed_ticks_are_forgotten_and_those_ahead_kept() -> None:
    app = FakeApp()
    for seq in range(1, 6):
        app.log(snapshot(seq, container(f"p{seq}", gpu(0))))
        app.log(tick(seq, seq, ts_ms=seq * 1000))
    await app.read(ALLOCATIONS, SAMPLES)

    app.joiner.committed({Partition(SAMPLES, 0): 3})
    state = app.joiner._partitions[0].states[KEY]
    assert [seq for _, seq in state.snapshots] == [3, 4, 5]

    app.begin({Partition(SAMPLES, 0): 3})
    await app.read(SAMPLES)
    assert [(output.seq, output.attribution) for output in app.sender.outputs()[5:]] == [(4, "exact"), (5, "exact")]


async def test_nothing_of_a_large_fleet_is_left_waiting_when_all_of_it_is_finished() -> None:
    app = FakeApp(grace_s=1e6)
    for i in range(200):
        app.log(tick(1, 1, node=f"n{i}"))
        app.log(snapshot(1, node=f"n{i}"))
    await app.read(SAMPLES, ALLOCATIONS)

    assert sorted(output.node for output in app.sender.outputs()) == sorted(f"n{i}" for i in range(200))
    assert app.position(SAMPLES) == 200
    assert not any(partition.waiting or partition.slots for partition in app.joiner._partitions.values())
    assert [record for record in app.sender.sent if record.topic == DEAD_LETTERS] == []


# -- nodes that are gone


async def test_a_node_that_nothing_was_heard_of_for_two_days_is_forgotten() -> None:
    app = FakeApp()
    app.log(snapshot(1, container("p", gpu(0)), node="gone"))
    for hours in (0, 47, 49):
        app.ahead_s = hours * 3600
        app.log(snapshot(1, container("p", gpu(0)), node="there"))
        assert app.nodes() == (set() if not hours else {b"c/gone", b"c/there"})
        await app.read(ALLOCATIONS)
    assert app.nodes() == {b"c/there"}


async def test_a_node_whose_record_was_logged_days_later_makes_no_other_node_forgotten() -> None:
    app = FakeApp()
    app.log(snapshot(1, container("p", gpu(0))), timestamp=0)
    app.log(snapshot(1, container("p", gpu(0)), node="ahead"), timestamp=72 * 3_600_000)
    await app.read(ALLOCATIONS)
    app.log(tick(1, 1), timestamp=10_000)
    app.log(workloads(1), timestamp=20_000)
    await app.read(WORKLOADS, SAMPLES)

    assert [output.attribution for output in app.sender.outputs()] == ["exact"]


async def test_a_node_with_a_tick_that_waits_is_not_forgotten() -> None:
    app = FakeApp()
    app.log(tick(1, 7, node="waits"))
    await app.read(SAMPLES)
    app.ahead_s = 100 * 3600
    app.log(snapshot(1, container("p", gpu(0)), node="there"))
    await app.read(ALLOCATIONS)

    assert app.nodes() == {b"c/waits", b"c/there"}
