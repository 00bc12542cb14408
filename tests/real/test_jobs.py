"""A batch job goes the whole way as a pod does: from the ticks of a node without a kubelet to alerts and to usage."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from delivery import topic_admin
from delivery.sender import Sender
from tests.eventually import eventually
from tests.real.pipeline import Gpustream, read_all, usage_of
from tests.real.servers import KafkaServer
from topics.topic import node_key
from topics.usage import MINUTES, Usage

STEP_MS = 10_000
TICKS = 300
ENDED = 240  # the tick with which the job has ended
JOB = {"id": "4242", "user": "ana", "partition": "gpu", "account": "vision"}


def ticks(start_ms: int) -> list[dict[str, Any]]:
    """Fifty minutes of a node with two GPUs: a job holds one and does nothing with it, and nobody has the other."""
    found = []
    for number in range(TICKS):
        metrics = {"gpu_utilization_ratio": 0.0, "memory_used_bytes": 0}
        jobs: list[list[dict[str, str]]] = [[JOB] if number < ENDED else [], []]
        devices = [
            {
                "uuid": f"GPU-{index}",
                "index": index,
                "compute_slices": 1,
                "metrics": metrics,
                "processes": [],
                "jobs": of,
            }
            for index, of in enumerate(jobs)
        ]
        tick = {"schema": 1, "cluster": "hpc", "node": "n0", "run_id": start_ms, "seq": number + 1}
        found.append(tick | {"ts_ms": start_ms + number * STEP_MS, "interval_ms": STEP_MS, "devices": devices})
    return found


async def test_an_idle_job_is_alerted_and_its_time_is_booked_to_it(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream]
) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=1, replication_factor=1)
    streams = [
        gpustream(name, "stream", name, "--kafka", empty_kafka.address) for name in ("attribution", "alerts", "usage")
    ]
    await asyncio.gather(*(asyncio.to_thread(stream.start) for stream in streams))
    sender = Sender(empty_kafka.connection, client_id="ticks")
    await sender.start()
    start_ms = time.time_ns() // 1_000_000 - TICKS * STEP_MS
    for tick in ticks(start_ms):
        await sender.send("gpu.samples", msgspec.json.encode(tick), key=node_key("hpc", "n0"))
    await sender.stop()

    async def has_ended() -> list[dict[str, Any]]:
        found = [msgspec.json.decode(one.value) for one in await read_all(empty_kafka.address, "gpu.alerts")]
        return found if any(one["state"] == "resolved" for one in found) else []

    alerts = await eventually(has_ended, within_s=60, every_s=0.5)
    assert {alert["name"] for alert in alerts} == {"GPUHeldIdle"}
    about = {name: value for name, value in alerts[-1]["labels"].items() if name.startswith(("job_", "k8s_pod"))}
    assert about == {"job_id": "4242", "job_user": "ana", "job_partition": "gpu", "job_account": "vision"}

    async def is_booked() -> list[Usage]:
        minutes = [
            one for one in (await usage_of(empty_kafka.address, MINUTES.name)).values() if one.category == "held"
        ]
        return minutes if len(minutes) >= 30 else []

    minutes = await eventually(is_booked, within_s=60, every_s=0.5)
    assert {(one.gpu_uuid, one.namespace, one.pod, one.team) for one in minutes} == {("GPU-0", "gpu", "4242", "vision")}
    assert {(one.workload.kind, one.workload.name) for one in minutes if one.workload} == {("SlurmJob", "4242")}
    assert sum(one.exact_ms for one in minutes) == sum(one.device_ms for one in minutes)
    assert await read_all(empty_kafka.address, "gpu.dead-letters") == []
