"""Whatever is killed and however the ticks are batched, the same transitions are written, byte for byte."""

import functools
from collections.abc import Collection
from datetime import datetime
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts import groups, memory
from streams.alerts.component import ALERTS, GROUPS, MEMBERS, STATE, WORKLOADS
from streams.alerts.machine import FORGET_MS
from streams.alerts.tick import Tick
from streams.stage import ATTRIBUTED
from tests.clock import run
from tests.eventually import settle
from tests.streams.alerts.fakes import Broker, Worker
from tests.streams.alerts.stories import SHORT_RULES, lives
from tests.streams.alerts.ticks import START_MS, device, holder, tick
from tests.streams.fakes import Record
from topics.alerts import Alert, AlertGroup, AlertReport, transition_id
from topics.workloads import NodeWorkloads


async def undisturbed(ticks: list[Tick], *, grouped: bool = False) -> Broker:
    broker = Broker()
    worker = Worker(broker)
    await worker.start()
    for node_tick in ticks:
        broker.log(node_tick)
        await worker.live()
        await worker.read(MEMBERS, count=10**6 if grouped else 0)
    assert worker.failures == []
    return broker


async def disturbed(ticks: list[Tick], chance: Random, *, kills: float) -> Broker:
    """The same ticks in batches of any size, to workers that are killed or lose the partition, at any point: while they
    judge ticks, and while they make alerts of several GPUs of what is reported."""
    broker = Broker()
    logged = 0
    worker = await _another(broker)
    for _ in range(10_000):
        count = chance.randint(0, 6)
        for node_tick in ticks[logged : logged + count]:
            broker.log(node_tick)
            _repeat_some(broker, chance)
        logged = min(len(ticks), logged + count)
        await worker.read(count=chance.randint(1, 9))
        await _let_arrive(worker, chance)
        if chance.random() < 0.5:
            await worker.read(STATE)
        ends_after = chance.randint(0, 4) if chance.random() < kills / 2 else 10**6
        await worker.read(MEMBERS, count=chance.randint(0, 5), ends_after=ends_after)
        await _let_arrive(worker, chance)
        if chance.random() < 0.5:
            worker.commit()
        if chance.random() < kills or ends_after < 10**6:
            worker = await _after_a_disturbance(worker, broker, chance, killed=ends_after < 10**6)
        elif logged == len(ticks) and worker.position_read() == len(broker.logs["gpu.attributed"]):
            break
        assert worker.failures == []
    worker.sender.holding = False
    worker.sender.land()
    await settle()
    await worker.live()
    await worker.read(MEMBERS)
    return broker


async def _another(broker: Broker) -> Worker:
    worker = Worker(broker)
    worker.sender.holding = True
    await worker.start()
    await worker.read(GROUPS)
    return worker


async def _after_a_disturbance(worker: Worker, broker: Broker, chance: Random, *, killed: bool) -> Worker:
    if not killed and chance.random() < 0.3:
        # a rebalance, after which the partition is here again: what is read is taken after it
        in_hand = [worker.fetch(topic, chance.randint(0, 3)) for topic in (ATTRIBUTED, MEMBERS)]
        was_away = chance.random() < 0.5
        if was_away:
            worker.stage.drop(frozenset({0}))
            worker.state_read = 0
        await worker.start()
        for batch in in_hand:
            await worker.take(batch)
        await worker.read(GROUPS)
        return worker
    worker.kill(chance)
    await settle()
    return await _another(broker)


async def _let_arrive(worker: Worker, chance: Random) -> None:
    for _ in range(chance.randint(0, 4)):
        worker.sender.land(chance.randint(1, 3))
        await settle()


def _repeat_some(broker: Broker, chance: Random) -> None:
    """The attribution stream writes its last records again, as after a crash of its own."""
    log = broker.logs["gpu.attributed"]
    if chance.random() < 0.1:
        log.extend(log[-chance.randint(1, 5) :])


def transitions(broker: Broker, without: Collection[bytes | None] = ()) -> dict[str, bytes]:
    """Every transition by its identity, in order, but for some alerts; a repeat must be the same in every byte."""
    by_id: dict[str, bytes] = {}
    for record, alert in zip((r for r in broker.logs[ALERTS] if r.value), broker.alerts(), strict=True):
        if record.value is None or record.key in without:
            continue
        assert by_id.setdefault(transition_id(alert), record.value) == record.value
    return by_id


def last(broker: Broker, topic: str) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for record in broker.logs[topic]}


def by_alert(by_id: dict[str, bytes]) -> dict[str, list[str]]:
    """The transitions of each alert, in order of first appearance."""
    lists: dict[str, list[str]] = {}
    for transition in by_id:
        lists.setdefault(transition.partition("/")[0], []).append(transition)
    return lists


@pytest.mark.slow
@given(lives(nodes=2, least=12), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
def test_any_batching_and_any_restart_give_the_same_transitions(ticks: list[Tick], seed: int, kills: float) -> None:
    """The order of nodes' reports differs, and so may alerts of several GPUs. These are compared with what one
    reading of the same reports gives."""
    straight, crooked = run(undisturbed(ticks)), run(disturbed(ticks, Random(seed), kills=kills))

    groups_found = {record.key for record in crooked.logs[MEMBERS]}
    expected, transitions_found = transitions(straight), transitions(crooked, without=groups_found)
    assert set(transitions_found) == set(expected)
    for identity, value in expected.items():
        assert transitions_found[identity] == value
    assert by_alert(transitions_found) == by_alert(expected)
    single_gpus = {key: value for key, value in last(crooked, ALERTS).items() if key not in groups_found}
    assert single_gpus == last(straight, ALERTS)

    assert reports(crooked) == reports(straight)
    alerts, states = read_once(crooked)
    assert {key: values_of(crooked, key) for key in alerts} == {
        key: list(dict.fromkeys(values)) for key, values in alerts.items()
    }
    assert {key: last(crooked, ALERTS)[key] for key in alerts} == {key: values[-1] for key, values in alerts.items()}
    assert last(crooked, GROUPS) == states


def reports(broker: Broker) -> dict[tuple[str, str], list[AlertReport]]:
    """What each node reported of each alert, each report once, wherever in the log its tick was."""
    by_owner: dict[tuple[str, str], dict[tuple[int, int], AlertReport]] = {}
    for record in broker.logs[MEMBERS]:
        report = groups.decode_report(record.value or b"")
        kept = by_owner.setdefault((report.group, report.node), {}).setdefault((report.position, report.phase), report)
        assert kept == report
    return {
        whose: [msgspec.structs.replace(report, position=0) for report in by_position.values()]
        for whose, by_position in by_owner.items()
    }


def read_once(broker: Broker) -> tuple[dict[bytes | None, list[bytes]], dict[bytes | None, bytes]]:
    """The alerts of several GPUs, and the groups, of a worker that reads all reports once, in order, and is never
    killed. Those that were sent again are among them: one about ranks may be of use only then."""
    alerts: dict[bytes | None, list[bytes]] = {}
    states: dict[bytes | None, AlertGroup] = {}
    for offset, record in enumerate(broker.logs[MEMBERS]):
        step = groups.step(states.get(record.key), groups.decode_report(record.value or b""), offset, SHORT_RULES)
        states[record.key] = step.group
        for alert in step.alerts:
            alerts.setdefault(record.key, []).append(memory.encode(alert))
    return alerts, {key: memory.encode(group) for key, group in states.items()}


def values_of(broker: Broker, key: bytes | None) -> list[bytes]:
    """The records of an alert, each once."""
    return list(dict.fromkeys([record.value for record in broker.logs[ALERTS] if record.key == key and record.value]))


def gang(second: int) -> list[Tick]:
    """Four nodes of a job: one GPU is throttled for a while, and all are hardly used, and then they are."""
    slow = {"sm_clock_hz": 1.1e9} if 300 < second < 1500 else {}
    working: dict[str, Any] = {"busy": 0.9 if second > 900 else 0.3, "sm_clock_hz": 1.9e9}
    return [
        msgspec.structs.replace(
            tick(second, device(n, holder(f"bert-{n}"), **working | (slow if n == 2 else {})), node=f"n{n}"),
            offset=second * 4 + n,
        )
        for n in range(4)
    ]


GANG = [moment for second in range(0, 2400, 30) for moment in gang(second)]


@functools.cache
def undisturbed_gang() -> Broker:
    return run(undisturbed(GANG, grouped=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_depends_on_sums_of_hours_and_on_other_nodes_is_the_same_after_any_restart(seed: int) -> None:
    straight = undisturbed_gang()
    crooked = run(disturbed(GANG, Random(seed), kills=0.1))

    def began_and_ended(broker: Broker) -> set[tuple[str, str, datetime, datetime | None]]:
        """Without updates: they are in the order in which the nodes' reports came."""
        firsts = [alert for alert in broker.alerts() if not alert.revision or not alert.is_open]
        return {(first.name, first.state, first.starts_at, first.ends_at) for first in firsts}

    expected = began_and_ended(straight)
    assert {transition[:2] for transition in expected} == {
        (name, state) for name in ("GPUStraggler", "GPUUnderused") for state in ("firing", "resolved")
    }
    assert len(expected) == 4
    assert began_and_ended(crooked) == expected
    lag = [
        [transition for transition in transitions(broker).values() if b"GPUStraggler" in transition]
        for broker in (straight, crooked)
    ]
    assert lag[0] == lag[1]


HOT = device(0, busy=0.0, clock_event_reasons=0x40)
HOT_TICKS = [tick(second, HOT) for second in range(130)]


async def of_a_node_without_ticks(reason: str) -> Worker:
    """A worker that has read the last tick of a node whose GPU has an alert, and soon finds the node silent."""
    broker = Broker()
    for hot_tick in HOT_TICKS:
        broker.log(hot_tick)
    removed = NodeWorkloads(schema=1, cluster="c", node="n", epoch=1, seq=1, ts_ms=1, removed=reason == "removed")
    broker.logs[WORKLOADS].append(Record(b"c/n", memory.encode(removed), START_MS + 130_000))
    worker = Worker(broker, SHORT_RULES)
    worker.clocks.started_ms = START_MS + (FORGET_MS if reason == "away for a day" else 130_000)
    await worker.start()
    await worker.read(WORKLOADS)
    await worker.live()
    worker.commit()
    return worker


async def acknowledged(worker: Worker, count: int) -> None:
    """Let time pass, and acknowledge so many of the records written then, one by one."""
    worker.sender.holding = True
    for _ in range(24):
        await worker.wait(5)
        while worker.sender.flying and count:
            worker.sender.land(1)
            count -= 1
            await settle()


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("end", ["killed", "killed, and the broker has one record more", "rebalanced"])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("reason", ["silent", "removed", "away for a day"])
async def test_whenever_a_worker_ends_the_alerts_of_a_silent_node_are_what_its_state_says(
    reason: str, after: int, end: str, comes_back: bool
) -> None:
    """It ends ``after`` so many acknowledgements. If the node ``comes_back``, its next tick is there before it can be
    found silent again."""
    first = second = await of_a_node_without_ticks(reason)
    broker = first.broker
    await acknowledged(first, after)
    if end != "rebalanced":
        for task in first.stage._write_tasks.running:
            task.cancel()
        first.sender.land(0 if end == "killed" else 1, acknowledge=False)
        await settle()
        second = Worker(broker, SHORT_RULES)
        second.clocks.started_ms = first.clocks.now_ms()
    await second.start()
    await second.read(WORKLOADS)
    if comes_back:
        broker.log(tick(131, HOT))
    await second.live()
    second.sender.holding = False
    second.sender.land()
    await settle()
    await second.live()
    await second.wait(0 if comes_back else 60)

    assert (first.failures, second.failures) == ([], [])
    assert transitions(broker)
    (state,) = [memory.decode(value) for value in last(broker, STATE).values() if value is not None]
    open_alerts = {tracked.alert.fingerprint: tracked.alert for tracked in state.tracked if tracked.alert is not None}
    assert open_alerts == {alert.fingerprint: alert for alert in latest(broker) if alert.is_open}
    names = {alert.name for alert in open_alerts.values()}
    if comes_back:
        assert "NodeSilent" not in names
    else:
        assert names == ({"GPUThermalSlowdown", "NodeSilent"} if reason == "silent" else set())


def latest(broker: Broker) -> list[Alert]:
    """The last record of each alert."""
    return list({alert.fingerprint: alert for alert in broker.alerts()}.values())
