"""The alert stream's worker: what it writes and in what order, what it finishes, when it says that a node is silent."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from delivery.ledger import Partition
from delivery.settings import DEAD_LETTERS
from streams.alerts import machine
from streams.alerts.component import ALERTS, GROUPS, MEMBERS, STATE, WORKLOADS
from streams.alerts.machine import FORGET_MS, LEAVING_MS
from streams.alerts.memory import NodeAlerts, decode, encode
from streams.alerts.node import NO_SAMPLES_S, PartitionNodes
from streams.alerts.reports import DELETE_MS, Step
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device
from streams.stage import ATTRIBUTED
from tests.eventually import settle
from tests.growth import kept
from tests.streams.alerts.fakes import Broker, Worker
from tests.streams.alerts.stories import later
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, holder, overlay, tick
from tests.streams.fakes import Record
from topics.alerts import AlertGroup
from topics.attributed import Workload
from topics.times import MAX_TIME_MS, time_of
from topics.workloads import NodeWorkloads

KEY = b"c/n"
COOL = device(0, busy=0.0, clock_event_reasons=0)
HOT = device(0, busy=0.0, clock_event_reasons=0x40)
SLOW_RULES = overlay('[rules.GPUThermalSlowdown]\nfor = "10m"\n[rules.NodeSilent]\nfor = "2m"')


def write(
    broker: Broker, seconds: range, sample: Device = COOL, *, node: str = "n", interval_ms: int | None = None
) -> None:
    for s in seconds:
        broker.log(tick(s, sample, node=node, interval_ms=interval_ms))


def states(broker: Broker) -> list[NodeAlerts]:
    return [decode(record.value) for record in broker.logs[STATE] if record.value is not None]


def alerts_written(broker: Broker) -> list[tuple[str, str]]:
    return [(alert.name, alert.state) for alert in broker.alerts()]


async def working(broker: Broker, rules: Rules = SLOW_RULES) -> Worker:
    worker = Worker(broker, rules)
    worker.clocks.started_ms = START_MS
    await worker.start()
    return worker


async def having_read(
    seconds: range, sample: Device = COOL, *, node: str = "n", interval_ms: int | None = None
) -> Worker:
    """A worker that has read these ticks of a node."""
    broker = Broker()
    write(broker, seconds, sample, node=node, interval_ms=interval_ms)
    worker = await working(broker)
    await worker.live()
    return worker


async def next_read(worker: Worker, seconds: range, sample: Device = COOL) -> None:
    """Ticks are written and read."""
    write(worker.broker, seconds, sample)
    await worker.live()


# -- what is written, and in what order


async def test_ticks_that_change_nothing_write_nothing() -> None:
    worker = await having_read(range(100))
    broker = worker.broker
    assert (len(broker.logs[STATE]), broker.logs[ALERTS]) == (1, [])
    assert worker.position() == 99
    assert worker.ledger.open_bytes == 0


async def test_the_alert_is_acknowledged_then_the_state_then_the_tick_is_finished() -> None:
    broker = Broker()
    write(broker, range(601), HOT)
    worker = await working(broker)
    await worker.read(count=600)
    worker.sender.holding = True
    await worker.read()
    assert [record.topic for record in worker.sender.flying] == [ALERTS]
    worker.sender.land()
    await settle()
    assert [record.topic for record in worker.sender.flying] == [STATE]
    write(broker, range(601, 605), HOT)
    await worker.read()
    assert worker.position() == 599
    worker.sender.land()
    await settle()
    assert worker.position() == 604
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing")]


async def test_what_changes_while_a_state_is_on_its_way_is_written_after_it() -> None:
    broker = Broker()
    worker = await working(broker)
    worker.sender.holding = True
    write(broker, range(1))
    await worker.read()
    write(broker, range(1, 30), HOT)
    await worker.read()
    assert len(worker.sender.flying) == 1
    worker.sender.land()
    await settle()
    worker.sender.land()
    await settle()
    assert [len(state.tracked) for state in states(broker)] == [0, 1]
    assert worker.position() == 29


async def test_while_a_state_is_on_its_way_nothing_that_it_replaces_counts_as_written() -> None:
    worker = await having_read(range(1))
    broker = worker.broker
    worker.sender.holding = True
    write(broker, range(1, 13), HOT)
    await worker.read()
    write(broker, range(13, 20))
    await worker.read()
    assert (len(worker.sender.flying), worker.position()) == (1, 0)
    for _ in range(2):
        worker.sender.land()
        await settle()
    assert [len(state.tracked) for state in states(broker)] == [0, 1, 0]
    assert worker.position() == 19


async def test_a_condition_that_ends_soon_is_never_written() -> None:
    worker = await having_read(range(1))
    broker = worker.broker
    for start in range(1, 100, 10):
        await next_read(worker, range(start, start + 5), HOT)
        assert worker.position() == start - 1
        await next_read(worker, range(start + 5, start + 10))
        assert worker.position() == start + 9
    assert [state.tracked for state in states(broker)] == [()]
    await next_read(worker, range(101, 113), HOT)
    assert [len(state.tracked) for state in states(broker)] == [0, 1]
    assert worker.position() == 112


async def test_an_alert_or_state_that_is_too_large_is_left_out_and_counted() -> None:
    broker = Broker()
    write(broker, range(700), HOT)
    worker = await working(broker)
    worker.sender.largest = 10
    await worker.live()
    assert (worker.total("unsendable_total", "alert"), worker.failures) == (1, [])
    assert worker.total("unsendable_total", "state") >= 2
    assert worker.position() == 699


async def test_nothing_is_kept_of_states_that_the_broker_refuses() -> None:
    worker, sizes = await working(Broker()), list[int]()
    worker.sender.largest = 10
    for start in range(0, 800, 20):
        await next_read(worker, range(start, start + 12), HOT)
        await next_read(worker, range(start + 12, start + 20))
        sizes.append(kept(worker.stage, without=[worker]))
    assert worker.total("unsendable_total", "state") > 40
    assert max(sizes[20:]) <= max(sizes[:20])


# -- replays


async def test_ticks_up_to_the_states_offset_are_replays() -> None:
    broker = (await having_read(range(601), HOT)).broker
    states_before = len(broker.logs[STATE])
    write(broker, range(601, 700), HOT)
    worker = await working(broker)
    await worker.live()
    assert worker.total("ticks_total", "replayed") == 601
    assert (len(broker.logs[STATE]), len(broker.logs[ALERTS])) == (states_before, 1)
    assert worker.position() == 699


async def test_the_first_tick_after_a_state_only_takes_over_its_time() -> None:
    first = await having_read(range(500), HOT)
    broker = first.broker
    first.commit()
    assert broker.committed == 499
    write(broker, range(500, 700), HOT)
    second = await working(broker)
    await second.live()
    assert second.total("ticks_total", "resumed") == 1
    (alert,) = broker.alerts()
    assert alert.value == 600.0


async def test_after_ticks_were_lost_the_gap_is_what_the_state_knows_of() -> None:
    first = await having_read(range(500), HOT)
    broker = first.broker
    first.commit()
    write(broker, range(500, 700), HOT)
    second = Worker(broker, SLOW_RULES)
    second.torn = frozenset({0})
    await second.start()
    await second.live()
    assert second.total("ticks_total", "resumed") == 0
    assert broker.alerts() == []


async def test_a_log_that_was_created_again_begins_its_offsets_again() -> None:
    broker = (await having_read(range(700), HOT)).broker
    broker.logs[ATTRIBUTED].clear()
    for s in range(1000, 1400):
        broker.log(later(tick(s, COOL), offset=s - 1000))
    worker = await working(broker)
    await worker.live()
    assert worker.total("ticks_total", "replayed") == 0
    last = states(broker)[-1]
    assert (last.generation, last.offset < 400) == (1, True)
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing"), ("GPUThermalSlowdown", "resolved")]


@pytest.mark.parametrize("restart", [False, True])
async def test_if_only_the_samples_topic_was_created_again_its_ticks_go_on(restart: bool) -> None:
    worker = await having_read(range(300), HOT)
    broker = worker.broker
    for s in range(300, 700):
        broker.log(later(tick(s, HOT), offset=s - 300))
    worker = await working(broker) if restart else worker
    await worker.live()
    assert worker.total("ticks_total", "new_log") == 1
    last = states(broker)[-1]
    assert (last.generation, last.offset < 400) == (1, True)
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing")]
    successor = await working(broker)
    await successor.live()
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing")]
    assert successor.total("ticks_total", "new_log") == 0


async def test_a_state_that_a_worker_wrote_after_it_had_lost_the_partition_begins_no_new_log() -> None:
    stopped = await having_read(range(300), HOT)
    broker = stopped.broker
    successor = await working(broker)
    write(broker, range(300, 640), HOT)
    await stopped.live()
    await successor.read(STATE)
    await successor.live()
    await next_read(successor, range(640, 1000), COOL)
    assert {state.generation for state in states(broker)} == {0}
    assert successor.total("ticks_total", "replayed") == 601
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing"), ("GPUThermalSlowdown", "resolved")]


async def test_an_older_state_that_another_worker_wrote_late_is_overwritten() -> None:
    worker = await having_read(range(700), HOT)
    broker = worker.broker
    older, newest = states(broker)[0], states(broker)[-1]
    broker.logs[STATE].append(Record(KEY, encode(older)))
    await worker.read(STATE)
    assert states(broker)[-1].tracked == newest.tracked
    await worker.read(STATE)
    states_before = len(broker.logs[STATE])
    await worker.wait(20)
    assert len(broker.logs[STATE]) == states_before


@pytest.mark.parametrize("count", [2, 3])
async def test_a_start_that_finds_an_older_state_before_the_latest_leaves_the_latest_as_the_last(count: int) -> None:
    first = await having_read(range(1))
    await next_read(first, range(1, 13), HOT)
    await next_read(first, range(13, 20))
    topic = first.broker.logs[STATE]
    older, old, latest = topic
    topic[:] = [old, older, latest]
    worker = Worker(first.broker, SLOW_RULES)
    worker.ledger.begin({Partition(STATE, 0): 0})
    await worker.read(STATE, count=count)
    await worker.read(STATE)
    assert topic[-1] == latest
    states_before = len(topic)
    await worker.read(STATE)
    assert len(topic) == states_before


async def test_a_deletion_that_another_worker_wrote_late_is_overwritten() -> None:
    worker = await having_read(range(700), HOT)
    topic = worker.broker.logs[STATE]
    latest = topic[-1].value
    topic.append(Record(KEY, None))
    await worker.read(STATE)
    assert topic[-1].value is not None
    assert decode(topic[-1].value).tracked == decode(latest or b"").tracked


@pytest.mark.parametrize("first", [True, False])
async def test_an_older_state_that_is_read_while_our_own_is_in_flight_is_overwritten_if_it_is_the_last(
    first: bool,
) -> None:
    worker = await having_read(range(1))
    broker = worker.broker
    older = broker.logs[STATE][0]
    worker.sender.holding = True
    write(broker, range(1, 13), HOT)
    await worker.read()
    (own_state,) = worker.sender.flying
    if first:
        broker.logs[STATE].append(older)
    worker.sender.land(acknowledge=False)
    if not first:
        broker.logs[STATE].append(older)
    await worker.read(STATE)
    worker.sender.holding = False
    own_state.acknowledged.set_result(2 if first else 1)
    await settle()
    assert [len(state.tracked) for state in states(broker)] == ([0, 0, 1] if first else [0, 1, 0, 1])


async def test_states_of_its_own_that_are_read_late_are_not_written_again() -> None:
    broker = Broker()
    worker = await working(broker)
    for start in range(0, 100, 20):
        write(broker, range(start, start + 12), HOT)
        write(broker, range(start + 12, start + 20))
        await worker.read(count=12)
        await worker.read()
    states_before = len(broker.logs[STATE])
    assert states_before > 4
    await worker.read(STATE)
    assert len(broker.logs[STATE]) == states_before


async def test_a_worker_that_read_its_successors_state_before_it_lost_the_partition_goes_on_from_that() -> None:
    stopped = await having_read(range(100))
    broker = stopped.broker
    write(broker, range(100, 160), HOT)
    successor = await working(broker)
    await successor.live()
    successor.commit()
    states_before = len(broker.logs[STATE])
    await stopped.read(STATE)
    assert len(broker.logs[STATE]) == states_before, "a later state is not overwritten"
    write(broker, range(160, 720), HOT)
    await stopped.start()
    await stopped.live()
    (fired,) = broker.alerts()
    assert (fired.name, fired.starts_at) == ("GPUThermalSlowdown", time_of(START_MS + 700_000))


# -- nodes without ticks


async def test_a_node_without_ticks_holds_back_no_commit_once_the_log_has_gone_on() -> None:
    worker = await having_read(range(3), node="dead")
    broker = worker.broker
    for s in range(3, 60):
        await next_read(worker, range(s, s + 1))
        assert worker.position() == (2 if s < 32 else len(broker.logs[ATTRIBUTED]) - 1)
    (silent,) = [state for state in states(broker) if state.silent]
    assert (silent.node, silent.last_ts_ms) == ("dead", START_MS + 2000)


async def test_a_node_that_is_read_every_minute_is_not_quiet_between_its_ticks_and_others_are() -> None:
    broker = Broker()
    for s in range(0, 600, 5):
        if s % 60 == 0:
            write(broker, range(s, s + 1), node="slow", interval_ms=60_000)
        if s < 300:
            write(broker, range(s, s + 1), node="fast", interval_ms=5_000)
        write(broker, range(s, s + 1), node="busy", interval_ms=5_000)
    worker = await working(broker)
    await worker.live()
    assert [(state.node, state.silent) for state in states(broker) if state.node != "busy"] == [
        ("slow", False),
        ("fast", False),
        ("fast", True),
    ]


async def test_a_node_without_ticks_holds_back_no_commit_once_the_partition_was_read_for_long() -> None:
    worker = await having_read(range(3))
    await worker.wait(20)
    assert worker.position() == 2
    await worker.wait(40)
    assert worker.position() == 3


async def test_a_node_is_not_reported_silent_before_its_ticks_were_read_again() -> None:
    """Its state is as old as the last change; what was logged since may be yet to come."""
    broker = Broker()
    for node in ("slow", "dead", "busy"):
        write(broker, range(1), node=node)
    first = await working(broker)
    await first.live()
    write(broker, range(1, 20), node="busy")
    write(broker, range(20, 21), node="dead")
    write(broker, range(20, 60), node="busy")
    write(broker, range(60, 61), node="slow")
    first.sender.holding = True
    await first.read()
    first.commit()
    second = await working(broker)
    await second.read(count=41)
    await second.live()
    assert second.total("ticks_total", "resumed") == 3
    assert {state.node for state in states(broker) if state.silent} == {"dead"}


async def test_a_rebalance_resets_what_is_known_of_silence() -> None:
    worker = await having_read(range(1))
    broker = worker.broker
    await worker.wait(20)
    await next_read(worker, range(20, 21))
    await worker.wait(20)
    await worker.start()
    await worker.wait(10)
    assert [state.silent for state in states(broker)] == [False]


async def test_the_first_tick_after_a_silence_is_judged_and_the_gap_known() -> None:
    worker = await having_read(range(400), HOT)
    broker = worker.broker
    await worker.wait(60)
    worker.commit()
    assert broker.committed == 400
    write(broker, range(450, 640), HOT)
    successor = await working(broker)
    await successor.live()
    assert successor.total("ticks_total", "resumed") == 0
    assert [alert.value for alert in broker.alerts()] == [600.0]


async def test_a_node_is_silent_when_its_partition_was_watched_without_a_break() -> None:
    worker = await having_read(range(3))
    broker = worker.broker
    await worker.wait(110)
    assert alerts_written(broker) == []
    await worker.wait(20)
    assert alerts_written(broker) == [("NodeSilent", "firing")]
    assert broker.alerts()[0].starts_at.timestamp() * 1000 == START_MS + 2000 + 120_000
    await worker.wait(600)
    await next_read(worker, range(800, 803))
    assert alerts_written(broker) == [("NodeSilent", "firing"), ("NodeSilent", "resolved")]


@pytest.mark.parametrize(("ahead_s", "shown_s"), [(-3600, 0), (-3600, -3600), (600, 600)])
async def test_a_node_is_found_silent_in_time_whatever_the_workers_clock_says(ahead_s: int, shown_s: int) -> None:
    """If acknowledgements do not show that it is behind, the time for which the log was read to its end counts."""
    worker = await having_read(range(3))
    worker.clocks.started_ms += ahead_s * 1000
    worker.sender.ahead_ms = worker.sender.differs_ms = shown_s * 1000
    await worker.wait(110)
    assert alerts_written(worker.broker) == []
    await worker.wait(20)
    assert alerts_written(worker.broker) == [("NodeSilent", "firing")]
    assert worker.broker.alerts()[0].starts_at.timestamp() * 1000 == START_MS + 2000 + 120_000


async def test_a_node_that_is_read_every_five_minutes_is_silent_after_three_of_them_also_for_the_next_worker() -> None:
    worker = await having_read(range(0, 900, 300), interval_ms=300_000)
    worker.clocks.started_ms += 600_000  # the last tick was logged then
    await worker.wait(400)
    worker.commit()
    successor = await working(worker.broker)
    successor.clocks.started_ms = worker.clocks.now_ms()
    await successor.live()
    await successor.wait(490)
    assert alerts_written(worker.broker) == []
    await successor.wait(20)
    assert alerts_written(worker.broker) == [("NodeSilent", "firing")]


async def test_nobody_is_silent_while_the_broker_does_not_answer_nor_right_after() -> None:
    worker = await having_read(range(3))
    broker = worker.broker
    await worker.wait(20)
    await worker.wait(600, asking=False)
    await worker.wait(25)
    assert alerts_written(broker) == []
    await next_read(worker, range(650, 660))
    await worker.wait(60)
    assert alerts_written(broker) == []


async def test_nobody_is_silent_while_what_was_logged_is_still_to_be_read() -> None:
    worker = await having_read(range(3))
    broker = worker.broker
    await worker.wait(60)
    write(broker, range(70, 400))
    await worker.wait(300)
    assert alerts_written(broker) == []
    await worker.live()
    await worker.wait(60)
    assert alerts_written(broker) == []
    await worker.wait(120)
    assert alerts_written(broker) == [("NodeSilent", "firing")]


async def test_nobody_is_silent_while_samples_wait_to_be_attributed() -> None:
    worker = await having_read(range(3))
    broker = worker.broker
    await worker.wait(600, samples_end=4)
    assert alerts_written(broker) == []
    broker.log(later(tick(600, COOL, node="other"), offset=3))
    await worker.live()
    await worker.wait(60, samples_end=4)
    assert alerts_written(broker) == [("NodeSilent", "firing")]


async def test_a_node_whose_last_sample_is_never_attributed_is_silent_when_no_sample_has_come_for_long() -> None:
    worker = await having_read(range(3))
    for samples_end in range(4, 10):  # another node of the partition sends what attribution dead-letters
        await worker.wait(300, samples_end=samples_end)
    assert alerts_written(worker.broker) == []
    await worker.wait(NO_SAMPLES_S, samples_end=10)
    assert alerts_written(worker.broker) == []
    await worker.wait(60, samples_end=10)
    assert alerts_written(worker.broker) == [("NodeSilent", "firing")]


async def test_the_alerts_of_a_silent_node_are_resolved_after_a_rebalance_too() -> None:
    worker = await having_read(range(3))
    broker = worker.broker
    await worker.wait(200, samples_end=3)
    await worker.read(STATE)
    worker.commit()
    await worker.start()
    worker.clocks.started_ms += FORGET_MS
    await worker.wait(60, samples_end=3)
    assert alerts_written(broker) == [("NodeSilent", "firing"), ("NodeSilent", "resolved")]


async def test_a_worker_finds_the_same_silence_as_the_one_before() -> None:
    first = await having_read(range(3))
    broker = first.broker
    await first.wait(200)
    first.commit()
    broker.logs[STATE].pop()  # it ended before the state that has the alert as written
    second = await working(broker)
    second.clocks.started_ms = START_MS + 500_000
    await second.wait(60)
    alert, repeated = broker.alerts()
    assert alert == repeated


@pytest.mark.parametrize("renamed", ["", '[rules.NodeGone]\nkind = "node_silent"\nfor = "2m"'])
async def test_alerts_of_a_silent_node_are_resolved_if_their_rule_is_removed_or_renamed(renamed: str) -> None:
    first = await having_read(range(700), HOT)
    broker = first.broker
    await first.wait(1000)
    first.commit()
    second = await working(broker, overlay(f"[rules.NodeSilent]\nenabled = false\n{renamed}"))
    second.clocks.started_ms = START_MS + 2_000_000
    await second.live()
    await second.wait(600)
    assert alerts_written(broker)[:3] == [
        ("GPUThermalSlowdown", "firing"), ("NodeSilent", "firing"), ("NodeSilent", "resolved")
    ]  # fmt: skip
    assert broker.alerts()[2].resolved_because == "rule_removed"
    assert alerts_written(broker)[3:] == ([("NodeGone", "firing")] if renamed else [])


async def test_a_node_that_never_comes_back_is_forgotten_and_its_alerts_are_resolved() -> None:
    worker = await having_read(range(700), HOT)
    broker = worker.broker
    await worker.wait(1000)
    worker.clocks.started_ms += FORGET_MS
    await worker.wait(60)
    assert alerts_written(broker)[2:] == [("GPUThermalSlowdown", "resolved"), ("NodeSilent", "resolved")]
    assert {alert.resolved_because for alert in broker.alerts()[2:]} == {"node_removed"}
    worker.clocks.started_ms += FORGET_MS + DELETE_MS
    await worker.wait(60)
    assert [record.value for record in broker.logs[ALERTS][4:]] == [None, None]
    assert broker.logs[STATE][-1] == Record(KEY, None)
    await worker.read(STATE)
    await next_read(worker, range(10_000, 10_003))
    assert states(broker)[-1].tracked == ()


async def test_nothing_is_kept_of_a_node_that_is_gone_and_whose_clock_was_years_ahead() -> None:
    worker, years_ms = await working(Broker(), DEFAULTS), 10 * 365 * 24 * 3_600_000
    for minute in range(60):
        idle = device(0, holder(), busy=0.0 if minute < 30 else 0.9, xids={"79": 1} if minute > 1 else None)
        read = tick(60 * minute, idle, interval_ms=60_000)
        worker.broker.log(msgspec.structs.replace(read, ts_ms=read.ts_ms + years_ms), logged_ms=read.ts_ms)
    for passed_ms in (3_600_000, FORGET_MS, DELETE_MS, DELETE_MS):
        for topic in (ATTRIBUTED, MEMBERS, GROUPS, STATE):
            await worker.read(topic)
        worker.clocks.started_ms += passed_ms
        await worker.wait(1000)
    assert {name for name, state in alerts_written(worker.broker)} == {"GPUXid", "GPUHeldIdle", "NodeSilent"}
    for topic in (ALERTS, GROUPS, STATE):
        assert not any({record.key: record.value for record in worker.broker.logs[topic]}.values())


def removal(broker: Broker, second: int, *, removed: bool) -> None:
    record = NodeWorkloads(schema=1, cluster="c", node="n", epoch=1, seq=1, ts_ms=1, removed=removed)
    broker.logs[WORKLOADS].append(Record(KEY, encode(record), START_MS + second * 1000))


async def test_a_node_that_was_removed_from_the_cluster_is_not_silent_and_its_alerts_are_resolved() -> None:
    broker = Broker()
    write(broker, range(700), HOT)
    worker = await working(broker)
    worker.clocks.started_ms = START_MS + 700_000
    removal(broker, 690, removed=True)
    await worker.live()
    await worker.read(WORKLOADS)
    await worker.wait(600)
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing"), ("GPUThermalSlowdown", "resolved")]
    last = broker.alerts()[-1]
    assert (last.resolved_because, last.ends_at) == ("node_removed", time_of(START_MS + 699_000))
    successor = await working(broker)
    successor.clocks.started_ms = START_MS + 10_000_000
    await successor.wait(600)
    assert len(broker.alerts()) == 2


@pytest.mark.parametrize("removed", [[], [True, False], [False]])
async def test_a_node_that_is_in_the_cluster_is_silent(removed: list[bool]) -> None:
    broker = Broker()
    write(broker, range(3))
    worker = await working(broker)
    for removed_node in removed:
        removal(broker, 1, removed=removed_node)
    await worker.live()
    await worker.read(WORKLOADS)
    await worker.wait(200)
    assert alerts_written(broker) == [("NodeSilent", "firing")]


async def test_a_node_that_sent_ticks_long_after_it_was_removed_is_silent_when_they_end() -> None:
    broker = Broker()
    write(broker, range(200))
    worker = await working(broker)
    worker.clocks.started_ms = START_MS + 200_000
    removal(broker, 1, removed=True)
    await worker.live()
    await worker.read(WORKLOADS)
    await worker.wait(200)
    assert alerts_written(broker) == [("NodeSilent", "firing")]


# -- what can't be used


@pytest.mark.parametrize("value", [b"{", None, b"[]", b'{"removed":7}', b"\xff", b"[" * 100_000, b'{"removed":null}'])
async def test_malformed_workloads_are_ignored(value: bytes | None) -> None:
    broker = Broker()
    broker.logs[WORKLOADS].append(Record(KEY, value))
    broker.logs[WORKLOADS].append(Record(None, value))
    worker = await working(broker)
    await worker.read(WORKLOADS)
    assert worker.failures == []
    assert worker.ledger.position(Partition(WORKLOADS, 0)) == 2
    assert broker.logs[DEAD_LETTERS] == []


async def test_records_that_are_no_tick_or_state_go_to_the_dead_letters_and_the_rest_goes_on() -> None:
    broker = Broker()
    bad = tick(1, COOL)
    broker.logs[ATTRIBUTED].append(Record(KEY, b"{"))
    broker.logs[ATTRIBUTED].append(Record(KEY, None))
    broker.logs[ATTRIBUTED].append(Record(b"c/other", encode(bad)))
    broker.logs[ATTRIBUTED].append(Record(KEY, encode(bad).replace(b'"ts_ms":', b'"ts_ms":%d' % MAX_TIME_MS)))
    broker.logs[STATE].append(Record(KEY, b"[]"))
    write(broker, range(2, 4))
    worker = await working(broker)
    await worker.live()
    errors = [record.value for record in broker.logs[DEAD_LETTERS]]
    assert len(errors) == 5
    assert worker.failures == []
    assert [worker.total("records_dead_lettered_total", ATTRIBUTED, reason) for reason in ("undecodable", "key")] == [
        3,
        1,
    ]
    assert worker.total("records_dead_lettered_total", STATE, "undecodable") == 1
    assert worker.position() == 5


async def test_a_node_without_its_state_begins_again() -> None:
    broker = (await having_read(range(700), HOT)).broker
    broker.logs[STATE].append(Record(KEY, None))
    broker.committed = 699
    worker = await working(broker)
    await worker.live()
    assert [tracked.alert for tracked in states(broker)[-1].tracked] == [None]


async def test_an_output_that_fails_ends_the_process() -> None:
    broker = Broker()
    write(broker, range(1))
    worker = await working(broker)
    worker.sender.holding = True
    await worker.read()
    worker.sender.flying[0].acknowledged.set_exception(RuntimeError("broken"))
    await settle()
    assert worker.failures == ["not written: RuntimeError('broken')"]


async def test_what_fails_or_is_acknowledged_in_an_older_epoch_changes_nothing() -> None:
    broker = Broker()
    write(broker, range(2))
    worker = await working(broker)
    worker.sender.holding = True
    await worker.read()
    await worker.start()
    worker.sender.land()
    await settle()
    assert worker.position() == 0
    await worker.read(ATTRIBUTED)
    worker.sender.land()
    await settle()
    assert worker.position() == 1
    assert worker.failures == []


async def test_ticks_wait_for_what_an_older_epoch_has_sent_and_go_on_from_there() -> None:
    broker = Broker()
    write(broker, range(601), HOT)
    worker = await working(broker)
    await worker.read(count=600)
    worker.sender.holding = True
    await worker.read()
    worker.sender.land()
    await settle()
    await worker.start()  # the state that says that it fires is on its way
    states_before = len(broker.logs[STATE])
    await worker.read(ATTRIBUTED)
    assert len(broker.logs[STATE]) == states_before + 1
    assert worker.total("ticks_total", "replayed") == 601
    assert alerts_written(broker) == [("GPUThermalSlowdown", "firing")]


# -- what it says of itself


async def test_it_says_what_fires_and_what_is_pending() -> None:
    broker = Broker()
    write(broker, range(700), HOT)
    write(broker, range(700, 720), HOT, node="other")
    worker = await working(broker)
    await worker.live()
    worker.stage.observe()
    assert [worker.total("firing", s) for s in ("info", "warning", "critical")] == [0, 1, 0]
    assert (worker.total("pending"), worker.total("nodes")) == (1, 2)
    assert worker.total("transitions_total", "GPUThermalSlowdown", "firing") == 1


# -- counters that go on rising


ERRORS = overlay("[rules.GPUEccUncorrectable]\nat_least = 9")


def rising(broker: Broker, seconds: range) -> None:
    """An error a second, three times out of four; then the counter begins again at zero."""
    for s in seconds:
        broker.log(tick(s, device(0, busy=0.0, ecc_uncorrected_volatile_total=s % 4)))


async def test_counters_that_go_on_rising_write_a_state_in_ten_seconds() -> None:
    broker = Broker()
    worker = await working(broker, overlay("[rules.GPUEccUncorrectable]\nenabled = false"))
    for s in range(600):
        rising(broker, range(s, s + 1))
        await worker.live()
        worker.commit()
        assert s - 10 <= broker.committed <= s
    assert 50 <= len(broker.logs[STATE]) <= 62


@pytest.mark.parametrize("killed", range(1, 15))
async def test_no_error_is_forgotten_by_a_worker_that_takes_over(killed: int) -> None:
    broker = Broker()
    worker = await working(broker, ERRORS)
    for s in range(15):
        rising(broker, range(s, s + 1))
        await worker.live()
        worker.commit()
        if s == killed:
            worker = await working(broker, ERRORS)
            await worker.live()
    assert [(alert.state, alert.value, alert.starts_at) for alert in broker.alerts()] == [
        ("firing", 9.0, time_of(tick(11).ts_ms))
    ]


# -- alerts of several GPUs

IDLE = device(0, holder(), busy=0.0)
SOON_RULES = Rules(overlay('[rules.GPUHeldIdle]\nfor = "20s"\ngrace = "0s"\nkeep_firing_for = "0s"').of("held_idle"))


async def grouping(seconds: int) -> Worker:
    """A worker that has read so many ticks of two nodes, whose pods are of one workload, and its own reports."""
    broker = Broker()
    for s in range(seconds):
        broker.log(tick(s, IDLE, node="n"))
        broker.log(tick(s, device(1, holder("bert-1"), busy=0.0), node="m"))
    worker = await working(broker, SOON_RULES)
    await worker.live()
    return worker


async def having_grouped() -> Worker:
    """A worker that has written a workload's group four times, once for each report."""
    worker = await grouping(30)
    for _ in range(4):
        await worker.read(MEMBERS, count=1)
    return worker


async def test_a_workloads_alert_is_acknowledged_then_its_group_then_the_reports_are_finished() -> None:
    worker = await grouping(30)
    broker = worker.broker
    assert (len(broker.logs[MEMBERS]), broker.logs[ALERTS]) == (4, [])  # of each node what is held, then what is idle
    worker.sender.holding = True
    reading = asyncio.create_task(worker.read(MEMBERS))
    await settle()
    assert {record.topic for record in worker.sender.flying} == {ALERTS}
    worker.sender.land()
    await settle()
    assert {record.topic for record in worker.sender.flying} == {GROUPS}
    assert worker.ledger.position(Partition(MEMBERS, 0)) == 0
    worker.sender.holding = False
    worker.sender.land()
    await reading
    assert worker.ledger.position(Partition(MEMBERS, 0)) == 4
    assert [(a.state, a.revision, a.idle) for a in broker.alerts()] == [("firing", 0, 1), ("firing", 1, 2)]


async def test_another_worker_goes_on_with_a_workloads_alert_as_it_is_in_the_topic() -> None:
    first = await grouping(30)
    broker = first.broker
    await first.read(MEMBERS)
    for s in range(30, 35):
        broker.log(tick(s, device(0, holder(), busy=0.9), node="n"))
    await first.live()
    second = await working(broker, SOON_RULES)
    await second.read(GROUPS)
    await second.read(MEMBERS)
    assert [(a.state, a.revision, a.idle) for a in broker.alerts()] == [
        ("firing", 0, 1), ("firing", 1, 2), ("firing", 2, 1)
    ]  # fmt: skip


async def test_a_group_is_written_once_a_report_and_again_after_what_a_worker_wrote_late() -> None:
    worker = await having_grouped()
    groups = worker.broker.logs[GROUPS]
    late_group = groups[0]
    await worker.read(GROUPS)
    assert len(groups) == 4
    groups.append(late_group)
    await worker.read(GROUPS)
    assert len(groups) == 6
    assert groups[-1] == groups[3]


async def test_a_group_is_later_than_those_before_the_topic_of_reports_was_created_again() -> None:
    first = await grouping(30)
    broker = first.broker
    await first.read(MEMBERS)
    broker.logs[MEMBERS] = []
    for s in range(30, 35):
        broker.log(tick(s, device(0, holder(), busy=0.9), node="n"))
    await first.live()
    await first.start()
    await first.read(MEMBERS)
    groups_before = len(broker.logs[GROUPS])
    second = await working(broker, SOON_RULES)
    await second.read(GROUPS)
    assert len(broker.logs[GROUPS]) == groups_before
    broker.log(tick(36, device(1, holder("bert-1"), busy=0.9), node="m"))
    await second.live()
    await second.read(MEMBERS)
    assert [(alert.state, alert.revision, alert.idle) for alert in broker.alerts()] == [
        ("firing", 0, 1), ("firing", 1, 2), ("firing", 2, 1), ("resolved", 2, 1)
    ]  # fmt: skip


async def test_a_group_that_was_written_again_before_a_later_one_was_read_is_followed_by_the_later_one() -> None:
    first = await having_grouped()
    groups = first.broker.logs[GROUPS]
    latest = groups[3]
    groups[:] = [groups[1], groups[0], latest]
    first.commit()
    second = await working(first.broker, SOON_RULES)
    await second.read(GROUPS, count=2)
    assert len(groups) == 4
    await second.read(GROUPS)
    assert groups[-1] == latest


async def test_a_start_writes_no_group_again_whose_latest_is_the_last_in_the_topic() -> None:
    first = await having_grouped()
    groups = first.broker.logs[GROUPS]
    groups[:] = [groups[1], groups[0], groups[3]]
    first.commit()
    for _ in range(5):
        successor = await working(first.broker, SOON_RULES)
        await successor.read(GROUPS)
    assert len(groups) == 3


async def test_reports_that_were_read_before_the_partition_went_are_left_to_its_next_worker() -> None:
    first = await grouping(30)
    broker = first.broker
    await first.read(MEMBERS)
    for node, pod, number in (("n", "bert-0", 0), ("m", "bert-1", 1)):
        broker.log(tick(30, device(number, holder(pod), busy=0.9), node=node))
    await first.live()
    in_hand = first.fetch(MEMBERS)
    first.ledger.forget()
    first.stage.forget()
    first.stage.drop(frozenset({0}))
    await first.take(in_hand)
    second = await working(broker, SOON_RULES)
    await second.read(GROUPS)
    await second.read(MEMBERS)
    assert alerts_written(broker)[-1] == ("GPUHeldIdle", "resolved")


async def test_a_malformed_report_is_dead_lettered_and_holds_nothing_up() -> None:
    worker = await grouping(30)
    worker.broker.logs[MEMBERS].insert(0, Record(b"x", b"no report"))
    await worker.read(MEMBERS)
    assert len(worker.broker.logs[DEAD_LETTERS]) == 1
    assert worker.broker.alerts()[-1].idle == 2


async def read_spoiled_reports(kind: str, key: str, text: str) -> Worker:
    """A worker that has read its reports, after a label or annotation of the alerts of one node became this text."""
    worker = await grouping(30)
    for index, record in enumerate(worker.broker.logs[MEMBERS]):
        report = msgspec.json.decode(record.value or b"")
        for part in report.get("alerts", []) if report["node"] == "m" else []:
            part[kind][key] = text
        worker.broker.logs[MEMBERS][index] = record._replace(value=msgspec.json.encode(report))
    await worker.read(MEMBERS)
    return worker


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("gpu_share", "half"),
        ("gpu_share", "nan"),
        ("gpu_hour_price", "much"),
        ("last_active", "2026-11-20 23:44"),
        ("since", "yesterday"),
    ],
)
async def test_a_report_whose_figures_are_none_is_dead_lettered_and_ends_no_worker(key: str, text: str) -> None:
    worker = await read_spoiled_reports("annotations", key, text)
    assert worker.failures == []
    assert len(worker.broker.logs[DEAD_LETTERS]) == 1
    assert worker.broker.alerts()[-1].idle == 1


@pytest.mark.parametrize("index", ["\N{SUPERSCRIPT TWO}", "9" * 5000], ids=["superscript", "long"])
async def test_a_report_of_a_gpu_whose_index_is_none_counts_like_any_other(index: str) -> None:
    worker = await read_spoiled_reports("labels", "gpu_index", index)
    assert worker.failures == []
    assert worker.broker.alerts()[-1].idle == 2


@pytest.mark.parametrize("changes", [{"price": "much"}, {"last_active": "yesterday"}])
async def test_a_group_whose_figures_are_none_is_dead_lettered_and_ends_no_worker(changes: dict[str, str]) -> None:
    worker = await grouping(30)
    await worker.read(MEMBERS)
    record = worker.broker.logs[GROUPS].pop()
    group = msgspec.json.decode(record.value or b"")
    group["members"][0] |= changes
    worker.broker.logs[GROUPS] = [record._replace(value=msgspec.json.encode(group))]
    worker.broker.log(tick(30, device(0, holder(), busy=0.9), node="n"))
    restarted = await working(worker.broker, SOON_RULES)
    await restarted.read(GROUPS)
    await restarted.live()
    await restarted.read(MEMBERS)
    assert restarted.failures == []
    assert len(worker.broker.logs[DEAD_LETTERS]) == 1


async def test_the_alert_of_a_workload_that_was_resolved_a_week_ago_is_deleted() -> None:
    worker = await grouping(30)
    for node, pod, number in (("n", "bert-0", 0), ("m", "bert-1", 1)):
        worker.broker.log(tick(30, device(number, holder(pod), busy=0.9), node=node))
    await worker.live()
    await worker.read(MEMBERS)
    assert alerts_written(worker.broker)[-1] == ("GPUHeldIdle", "resolved")
    worker.clocks.started_ms += DELETE_MS + 60_000
    worker.stage.check_partition(0)
    await settle()
    assert worker.broker.logs[ALERTS][-1].value is None
    group = msgspec.json.decode(worker.broker.logs[GROUPS][-1].value or b"", type=AlertGroup)
    assert (group.alert, group.members) == (None, ())
    assert {node: node_state.held for node, node_state in group.seen.items()} == {"n": 1, "m": 1}
    for node, number in (("n", 0), ("m", 1)):
        worker.broker.log(tick(31, device(number, busy=0.9), node=node))
    await worker.live()
    await worker.read(MEMBERS)
    worker.stage.check_partition(0)
    await settle()
    assert worker.broker.logs[GROUPS][-1].value is None


async def test_an_alert_that_fires_again_when_it_is_a_week_old_is_not_deleted() -> None:
    worker = await grouping(30)
    for at_s, busy in ((30, 0.9), *((at_s, 0.0) for at_s in range(31, 61))):
        for node, pod, number in (("n", "bert-0", 0), ("m", "bert-1", 1)):
            worker.broker.log(tick(at_s, device(number, holder(pod), busy=busy), node=node))
    await worker.live()
    reports = worker.fetch(MEMBERS)
    await worker.take(reports[:-2])
    assert alerts_written(worker.broker)[-1] == ("GPUHeldIdle", "resolved")
    worker.clocks.started_ms += DELETE_MS + 120_000
    worker.sender.holding = True
    firing = asyncio.create_task(worker.stage.handle(reports[-2:]))
    await settle()
    worker.stage.check_partition(0)
    await settle()
    worker.sender.holding = False
    while not firing.done():
        worker.sender.land()
        await settle()
    worker.stage.check_partition(0)
    await settle()
    assert alerts_written(worker.broker)[-1][1] == "firing"
    assert worker.broker.logs[ALERTS][-1].value is not None
    group = msgspec.json.decode(worker.broker.logs[GROUPS][-1].value or b"", type=AlertGroup)
    assert group.alert is not None
    assert group.alert.state == "firing"


async def test_a_node_that_left_holds_nothing_of_a_workload() -> None:
    worker = await grouping(10)
    worker.broker.logs[WORKLOADS].append(
        Record(b"c/m", msgspec.json.encode({"removed": True}), START_MS + LEAVING_MS + 20_000)
    )
    await worker.read(WORKLOADS)
    await worker.wait(80)
    await worker.read(MEMBERS)
    (group,) = [
        msgspec.json.decode(log_record.value or b"", type=AlertGroup) for log_record in worker.broker.logs[GROUPS][-1:]
    ]
    assert {node: node_state.held for node, node_state in group.seen.items()} == {"n": 1, "m": 0}


async def alerts_of_a_pod_without_workload(gpus_at: Callable[[int], list[Device]], seconds: range) -> list[str]:
    """The transitions of what is reported of a pod's GPUs by the default rules. Groups are looked at all the time."""
    worker = await working(Broker(), DEFAULTS)
    for s in seconds:
        worker.broker.log(tick(s, *gpus_at(s)))
        worker.clocks.at_s = s
        for topic in (ATTRIBUTED, STATE, MEMBERS):
            await worker.read(topic)
        worker.stage.check_partition(0)
        await settle()
        await worker.read(GROUPS)
    return [f"{alert.name} {alert.resolved_because or alert.state}" for alert in worker.broker.alerts()]


async def test_the_gpus_of_a_pod_without_workload_are_compared_over_several_steps() -> None:
    pod = holder(workload=None)

    def one_is_slow(_: int) -> list[Device]:
        return [device(i, pod, busy=0.98, sm_clock_hz=1.2e9 if i == 2 else 1.9e9) for i in range(6)]

    assert await alerts_of_a_pod_without_workload(one_is_slow, range(0, 1200, 30)) == ["GPUStraggler firing"]


async def test_gpus_of_a_pod_without_workload_that_stall_while_one_is_idle_are_one_alert() -> None:
    pod, stalls = holder(workload=None), {"power_watts": 140.0, "power_limit_watts": 700.0, "sm_active_ratio": 0.1}

    def others_stall_later(second: int) -> list[Device]:
        busy = 1.0 if second > 1300 else 0.9
        return [device(0, pod, busy=0.0), *[device(i, pod, busy=busy, **stalls) for i in (1, 2)]]

    assert await alerts_of_a_pod_without_workload(others_stall_later, range(0, 2100, 30)) == [
        "GPUHeldIdle firing", "GPUStalled firing", "GPUHeldIdle superseded"
    ]  # fmt: skip


async def test_the_policies_of_pods_are_counted_as_of_the_last_tick_of_their_node() -> None:
    broker = Broker()
    policy = {"gpustream.dev/idle-after": "2h"}
    annotated, silenced = holder("a", annotations=policy), holder("b", namespace_labels={"gpustream.dev/alerts": "off"})
    broker.log(tick(0, device(0, annotated), device(1, annotated), device(2, silenced), device(3, holder("c"))))
    worker = await working(broker)
    await worker.live()
    assert worker.total("policies", "ml", "gpustream.dev/idle-after") == 1
    assert worker.total("policies", "ml", "gpustream.dev/alerts") == 1
    await next_read(worker, range(1, 2), device(0, annotated))
    assert worker.total("policies", "ml", "gpustream.dev/idle-after") == 1
    assert worker.total("policies", "ml", "gpustream.dev/alerts") == 0
    worker.stage.observe()
    gone = {"k8s_namespace_name": "ml", "policy": "gpustream.dev/alerts"}
    assert worker.instruments.registry.get_sample_value("gpustream_alerts_policies", gone) is None


async def test_nothing_is_kept_of_workloads_that_have_ended() -> None:
    worker, sizes = await working(Broker(), DEFAULTS), list[int]()
    for job in range(40):
        owner = Workload("Job", f"job-{job}")
        worker.broker.log(tick(5 * job, device(0, holder(f"pod-{job}", workload=owner), busy=0.9)))
        for topic in (ATTRIBUTED, MEMBERS, GROUPS, STATE):
            await worker.read(topic)
        await worker.wait(5)
        sizes.append(kept(worker.stage, without=[worker]))
    assert max(sizes[30:]) <= max(sizes[10:20])


def test_that_a_node_was_removed_is_forgotten_after_a_day() -> None:
    partition, sizes = PartitionNodes(0), list[int]()
    for hour in range(96):
        partition.note_removal(b"c/node-%d" % hour, b'{"removed": true}', START_MS + hour * 3_600_000)
        sizes.append(kept(partition))
    assert max(sizes[48:]) <= max(sizes[:48])


async def test_a_node_that_has_left_is_judged_once_a_minute_until_its_alerts_are_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged, step_without_tick = list[str](), machine.step_without_tick

    def counted(state: NodeAlerts, *rules: Rules, **times: int | None) -> Step:
        judged.append(state.node)
        return step_without_tick(state, *rules, **times)  # type: ignore[arg-type]

    worker = await having_read(range(700), HOT)
    await worker.wait(1000)
    worker.clocks.started_ms += FORGET_MS
    await worker.wait(60)
    assert len(worker.stage._partitions[0].nodes) == 1
    monkeypatch.setattr(machine, "step_without_tick", counted)
    await worker.wait(600)
    assert 10 <= len(judged) <= 11
    worker.clocks.started_ms += DELETE_MS
    await worker.wait(60)
    assert len(worker.stage._partitions[0].nodes) == 0
