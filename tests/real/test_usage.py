"""The usage stream as processes that are killed, on a real Kafka: its sums are those of gpu.attributed, to the last
millisecond."""

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from streams import STREAMS
from tests.eventually import eventually
from tests.real.pipeline import Gpustream, read_all, sender_to, usage_of
from tests.real.servers import KafkaServer
from tests.usage_sums import UsageSums
from topics.topic import node_key
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

NODES, PARTITIONS, STEP_MS = 6, 3, 10_000
TICKS = 90 * 60_000 // STEP_MS
KILLS = 5
LIMIT_S = 120.0


def story(start_ms: int) -> list[dict[str, Any]]:
    """Ticks of an hour and a half of the nodes' time, in the order of their log; some come twice, some are missing."""
    chance, ticks = Random(3), list[dict[str, Any]]()
    for number in range(TICKS):
        for node in range(NODES):
            if chance.random() < 0.02 and number:
                continue
            pods = [f"pod-{node}-{number // 40}", f"other-{node}"][: chance.choice([0, 1, 1, 2])]
            holders = [{"namespace": "ml", "pod": pod, "pod_uid": f"uid-{pod}", "container": "main"} for pod in pods]
            state = "lost" if chance.random() < 0.02 else "ok"
            metrics = {"gpu_utilization_ratio": chance.choice([0.0, 0.5, 1.0]), "energy_joules_total": number * 1.5}
            device = {"uuid": f"GPU-{node}", "model": "H100", "compute_slices": 7, "holders": holders, "state": state}
            device["metrics"] = metrics if state == "ok" else {}
            at_ms = start_ms + number * STEP_MS
            tick = {"schema": 1, "cluster": "c", "node": f"n{node}", "run_id": 1, "seq": number + 1, "ts_ms": at_ms}
            tick |= {"interval_ms": STEP_MS, "offset": len(ticks), "logged_ms": at_ms, "attribution": "exact"}
            ticks.append(tick | {"devices": [device]})
            if chance.random() < 0.01:
                ticks.append(ticks[-1])
    return ticks


async def send(kafka: KafkaServer, ticks: list[dict[str, Any]]) -> None:
    async with sender_to(kafka.connection) as sender:
        for start in range(0, len(ticks), 60):
            began_s = time.monotonic()
            for tick in ticks[start : start + 60]:
                partition = int(tick["node"][1:]) % PARTITIONS
                value, key = msgspec.json.encode(tick), node_key("c", tick["node"])
                await sender.send("gpu.attributed", value, key=key, partition=partition)
            await asyncio.sleep(max(0.0, 0.1 - (time.monotonic() - began_s)))


async def test_workers_that_are_killed_count_what_integer_sums_over_gpu_attributed_do(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream]
) -> None:
    uses = STREAMS["usage"].uses
    topics = dict.fromkeys((*uses.reads, *uses.writes, *uses.describes), PARTITIONS)
    empty_kafka.create_ours(topics)
    start_ms = (time.time_ns() // 1_000_000 // HOUR_MS + 2) * HOUR_MS
    ticks, chance = story(start_ms), Random(7)
    command = ("stream", "usage", "--kafka", empty_kafka.address)
    first, second = gpustream("first", *command, "--instance-id", "first"), gpustream("second", *command)
    await asyncio.to_thread(first.start)

    share = -(-len(ticks) // KILLS)
    for number in range(KILLS):
        sending = asyncio.create_task(send(empty_kafka, ticks[share * number : share * (number + 1)]))
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        await asyncio.to_thread(first.kill9)
        if number == 1:
            await asyncio.to_thread(second.start)
        elif number == 3:
            await asyncio.to_thread(second.stop)
        await asyncio.to_thread(first.start)
        await sending

    async def hour_is_final() -> list[Usage]:
        records = [
            record
            for record in (await usage_of(empty_kafka.address, HOURS.name)).values()
            if record.start_ms == start_ms
        ]
        return records if len({record.uuid for record in records if record.final}) == NODES else []

    hours = await eventually(hour_is_final, within_s=LIMIT_S, every_s=1)
    end_ms, sums = start_ms + HOUR_MS, UsageSums()
    minutes = [
        record for record in (await usage_of(empty_kafka.address, MINUTES.name)).values() if record.end_ms <= end_ms
    ]
    for tick in ticks:
        sums.add(tick, tick["logged_ms"])
    for records, lasts_ms in ((hours, HOUR_MS), (minutes, MINUTE_MS)):
        assert sums.differences(records, lasts_ms, end_ms) == []
        assert sum(record.energy_mj for record in records) == NODES * (HOUR_MS // STEP_MS) * 1500
    assert await read_all(empty_kafka.address, "gpu.dead-letters") == []
