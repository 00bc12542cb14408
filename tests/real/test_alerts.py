"""The alert stream on a real broker: killed again and again, it writes the same, and reports silent nodes."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka_event

from delivery import topic_admin
from streams.alerts import groups, machine, memory
from streams.alerts.machine import LogPosition
from streams.alerts.memory import NodeAlerts
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from tests.eventually import eventually
from tests.real.pipeline import Gpustream, lag, read_all, sender_to
from tests.real.servers import KafkaServer
from tests.sinks.alerts import assert_says
from tests.streams.alerts.ticks import START_MS, device, holder
from topics.alerts import Alert, AlertGroup, transition_id
from topics.attributed import Workload
from topics.samples import Event
from topics.times import epoch_ms, time_of
from topics.topic import node_key

NODES = 12
TICKS = 240
TICK_MS = 5_000
RATE_HZ = 12.0
LIMIT_S = 300.0
KILLS = 3
SILENT_MS = 5_000
DAY_MS = 24 * 3_600_000
BEGAN_MS = START_MS + ((time.time_ns() // 1_000_000 - START_MS) // DAY_MS - 1) * DAY_MS
"""When the ticks begin: lately, for alerts that ended a week ago are deleted; always at the same time of the day."""

RULES = """
[rules.GPUHeldIdle]
for = "1m"
keep_firing_for = "15s"
grace = "10s"
[rules.GPUThermalSlowdown]
for = "30s"
keep_firing_for = "10s"
[rules.GPUXid]
keep_firing_for = "1m"
[rules.NodeSilent]
for = "5s"
"""


def life(node: int) -> list[Tick]:
    """The ticks of a node: its pods come, work, idle and go; it grows hot, and has errors."""
    chance, ticks, xids = Random(node), list[Tick](), 0
    while len(ticks) < TICKS:
        job = Workload("Job", f"job-{node}")
        holders = [holder(f"pod-{node}-{chance.randint(0, 3)}", workload=job)] if chance.random() < 0.8 else []
        busy, hot, xid = chance.choice([0.0, 0.0, 0.9, None]), chance.random() < 0.3, chance.random() < 0.1
        for _ in range(chance.randint(1, 25)):
            at_ms = BEGAN_MS + len(ticks) * TICK_MS
            xids += xid
            fields: dict[str, Any] = {"events": (Event("xid", 79, at_ms),)} if xid else {}
            gpu = device(0, *holders, busy=busy, clock_event_reasons=0x40 * hot, xids={"79": xids}, **fields)
            ticks.append(_tick(node, len(ticks), at_ms, gpu))
    return ticks[:TICKS]


def _tick(node: int, number: int, at_ms: int, *devices: Any) -> Tick:
    return Tick(
        schema=1,
        cluster="c",
        node=f"node-{node}",
        run_id=1,
        seq=number + 1,
        ts_ms=at_ms,
        offset=number * NODES + node,
        attribution="exact",
        devices=devices,
    )


def expected(lives: list[list[Tick]], by: Rules) -> dict[str, bytes]:
    """Every transition by its identity, as one undisturbed worker writes it."""
    by_id: dict[str, bytes] = {}
    for ticks in lives:
        now: NodeAlerts | None = None
        groups_by_key: dict[str, AlertGroup] = {}
        for number, node_tick in enumerate(ticks):
            tick = msgspec.json.decode(msgspec.json.encode(node_tick), type=Tick)
            position = LogPosition(number, 0)
            step = machine.step(now or machine.initial_state(tick, position), tick, position, by)
            now = step.state
            alerts = [alert for _, _, alert in step.writes if isinstance(alert, Alert)]
            for report in step.reports:
                after = groups.step(groups_by_key.get(report.group), report, number, by)
                groups_by_key[report.group], alerts = after.group, [*alerts, *after.alerts]
            by_id |= {transition_id(alert): memory.encode(alert) for alert in alerts}
    return by_id


async def transitions_written(kafka: KafkaServer) -> tuple[dict[str, bytes], int]:
    """The transitions that are in gpu.alerts, each the same in every byte and a CloudEvent, and how many records there
    are."""
    records = [record for record in await read_all(kafka.address, "gpu.alerts") if record.value is not None]
    by_id: dict[str, bytes] = {}
    for record in records:
        alert = msgspec.json.decode(record.value, type=Alert)
        assert by_id.setdefault(transition_id(alert), record.value) == record.value
        event = from_kafka_event(KafkaMessage(dict(record.headers), record.key, record.value))
        assert_says(event, alert)
    return by_id, len(records)


async def send(kafka: KafkaServer, lives: list[list[Tick]]) -> None:
    """Write the ticks in their order, tick by tick of all nodes, at a steady rate; the broker has them all then."""
    async with sender_to(kafka.connection) as sender:
        futures = []
        for number in range(len(lives[0])):
            began_s = time.monotonic()
            for ticks in lives:
                value, key = msgspec.json.encode(ticks[number]), node_key(ticks[number].cluster, ticks[number].node)
                futures.append(await sender.send("gpu.attributed", value, key=key))
            await asyncio.sleep(max(0.0, 1 / RATE_HZ - (time.monotonic() - began_s)))
        await asyncio.gather(*futures)  # to stop does not wait for a broker that is slow


async def trouble(first: Gpustream, second: Gpustream, sending: "asyncio.Task[None]") -> None:
    """Kill a worker whenever it has come up, at least three times; let another join and leave."""
    kills = 0
    chance = Random(7)
    while kills < KILLS or not sending.done():
        await asyncio.sleep(chance.uniform(1.0, 4.0))
        await asyncio.to_thread(first.kill9)
        kills += 1
        await asyncio.to_thread(first.start)
        if kills % 2:
            await asyncio.to_thread(second.start)
        else:
            await asyncio.to_thread(second.stop)


def of_ticks(by_id: dict[str, bytes]) -> dict[str, bytes]:
    """The transitions that ticks alone bring about, without the log times of Kafka."""
    alerts = {key: msgspec.json.decode(value, type=Alert) for key, value in by_id.items()}
    return {
        key: memory.encode(msgspec.structs.replace(alert, confirmed_at=None))
        for key, alert in alerts.items()
        if alert.name != "NodeSilent"
    }


async def test_workers_that_are_killed_write_every_transition_as_one_that_is_not(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream], tmp_path: Path
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    lives = [life(node) for node in range(NODES)]
    undisturbed = expected(lives, rules_file.load(file))
    await topic_admin.create(empty_kafka.connection, partitions=4, replication_factor=1)
    command = ("stream", "alerts", "--kafka", empty_kafka.address, "--rules", str(file))
    first, second = gpustream("first", *command, "--instance-id", "first"), gpustream("second", *command)
    await asyncio.to_thread(first.start)

    sending = asyncio.create_task(send(empty_kafka, lives))
    await trouble(first, second, sending)
    await sending

    async def all_written() -> bool:
        return of_ticks((await transitions_written(empty_kafka))[0]).keys() >= undisturbed.keys()

    with contextlib.suppress(AssertionError):  # the next one says what is missing
        await eventually(all_written, within_s=LIMIT_S, every_s=1)
    assert undisturbed.keys() - of_ticks((await transitions_written(empty_kafka))[0]).keys() == set()
    assert of_ticks((await transitions_written(empty_kafka))[0]) == undisturbed
    assert Counter(alert.partition("/")[2].partition("/")[2] for alert in undisturbed)["resolved"] > NODES

    # -- the nodes have fallen silent

    async def all_silent() -> list[Alert]:
        alerts = [
            msgspec.json.decode(value, type=Alert) for value in (await transitions_written(empty_kafka))[0].values()
        ]
        silent = [alert for alert in alerts if alert.name == "NodeSilent"]
        return silent if len({alert.node for alert in silent}) == NODES else []

    silent = await eventually(all_silent, within_s=LIMIT_S, every_s=1)
    last_ms = lives[0][-1].ts_ms
    assert {alert.starts_at for alert in silent} == {time_of(last_ms + SILENT_MS)}
    assert len(silent) == NODES

    async def all_committed() -> bool:
        return await lag(empty_kafka.address, "gpustream-alerts", ["gpu.attributed"]) == 0

    await eventually(all_committed, within_s=LIMIT_S, every_s=1)

    # -- and come back, to a worker that knows them from their states alone

    await asyncio.to_thread(first.kill9)
    await asyncio.to_thread(first.start)
    returning = [[_tick(node, TICKS, last_ms + 60_000, *lives[node][-1].devices)] for node in range(NODES)]
    await send(empty_kafka, returning)

    async def all_back() -> list[Alert]:
        alerts = [
            msgspec.json.decode(value, type=Alert) for value in (await transitions_written(empty_kafka))[0].values()
        ]
        resolved = [alert for alert in alerts if alert.name == "NodeSilent" and alert.state == "resolved"]
        return resolved if len(resolved) == NODES else []

    resolved = await eventually(all_back, within_s=LIMIT_S, every_s=1)
    assert {(alert.resolved_because, epoch_ms(alert.ends_at or alert.starts_at)) for alert in resolved} == {
        ("ticks", last_ms + 60_000)
    }
    assert await read_all(empty_kafka.address, "gpu.dead-letters") == []
    by_key: dict[bytes, list[str]] = defaultdict(list)
    for record in await read_all(empty_kafka.address, "gpu.alerts"):
        by_key[record.key].append(transition_id(msgspec.json.decode(record.value, type=Alert)))
    assert all(len({transition.partition("/")[0] for transition in ids}) == 1 for ids in by_key.values())


async def test_of_a_gang_across_nodes_the_pods_that_work_are_counted_too(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream], tmp_path: Path
) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    await topic_admin.create(empty_kafka.connection, partitions=4, replication_factor=1)
    lives = [
        [
            _tick(node, number, BEGAN_MS + number * TICK_MS, device(0, holder(f"gang-{node}"), busy=0.9 * (node > 0)))
            for number in range(20)
        ]
        for node in range(3)
    ]
    await send(empty_kafka, lives)
    command = ("stream", "alerts", "--kafka", empty_kafka.address, "--rules", str(file))
    await asyncio.to_thread(gpustream("gang", *command).start)

    async def group_alerts() -> list[Alert]:
        alerts = [
            msgspec.json.decode(value, type=Alert) for value in (await transitions_written(empty_kafka))[0].values()
        ]
        return [alert for alert in alerts if alert.name == "GPUHeldIdle" and alert.held == 3]

    (alert, *_) = await eventually(group_alerts, every_s=0.2)
    assert [gpu.node for gpu in alert.gpus] == ["node-0"]
    assert "1 of 3 GPUs idle, the other 2 work" in alert.annotations["summary"]
