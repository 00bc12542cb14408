"""A node with many MIG devices survives an outage of Kafka that is as long as its buffer promises."""

import asyncio
import functools
import hashlib
import itertools
from random import Random
from typing import Any

import pytest

from delivery.sender import Headers
from producers import publisher as names
from producers.publisher import NodePublisher
from producers.records import Numbering, RetryBuffer
from tests.eventually import settle
from tests.producers.fakes import (
    CLUSTER,
    DROP_REASONS,
    NODE,
    FakeClock,
    FakeSender,
    containers,
    instruments,
    value,
)

pytestmark = pytest.mark.slow

OUTAGE_S = 900
GPUS, PARTS = 8, 7
MEMORY = tuple(f"memory_{state}_bytes" for state in ("used", "free", "total", "reserved"))
METRICS = (
    *(f"{activity}_active_ratio" for activity in ("graphics_engine", "sm", "tensor", "dram", "fp64", "fp32", "fp16")),
    "sm_occupancy_ratio",
)


class HashingSender(FakeSender):
    """Keeps only a hash of each sample, and acknowledges it at once."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.sent: list[str] = []
        self._offset = itertools.count()

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[int]:
        if topic == "gpu.samples":
            self.sent.append(hashlib.sha256(value or b"").hexdigest())
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(next(self._offset))
        return future


def cut_devices(chance: Random) -> list[dict[str, Any]]:
    """The devices of a tick: 8 GPUs that are each cut into 7 MIG devices, with random values."""
    devices = []
    for gpu, part in itertools.product(range(GPUS), range(PARTS + 1)):
        device, process = cut_device(gpu, part)
        metrics = {key: round(chance.random(), 4) for key in METRICS}
        metrics |= {key: chance.randrange(1 << 34) for key in MEMORY}
        processes = [{**process, "memory_used_bytes": chance.randrange(1 << 33)}] if part else []
        devices.append({**device, "metrics": metrics, "processes": processes})
    return devices


@functools.cache
def cut_device(gpu: int, part: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What does not change of a GPU, which is part 0, or of a MIG device; and of its process."""
    uuid = f"{'MIG' if part else 'GPU'}-5c41b7ed-{gpu:04x}-5000-8000-{part:012x}"
    mig = {"uuid": uuid, "parent_uuid": f"GPU-5c41b7ed-{gpu:04x}-5000-8000-{0:012x}", "gpu_instance": part}
    process = {
        "pid": 4_000 + 10 * gpu + part,
        "pod_uid": f"1b6c0f0e-8a1d-4f0b-9d55-{gpu:06x}{part:06x}",
        "container_id": hashlib.sha256(uuid.encode()).hexdigest(),
    }
    device = {
        "uuid": uuid,
        "index": gpu,
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{gpu:02X}:00.0",
        "minor": gpu,
        "info": {"serial": "1650023000000", "driver_version": "580.95.05", "cuda_version": "13.0"},
        "state": "ok",
    }
    return {**device, "mig": {**mig, "profile": "1g.10gb"}} if part else device, process


async def test_fifteen_minutes_of_a_node_of_56_mig_devices_wait_and_are_sent_in_order() -> None:
    clock, metrics, chance = FakeClock(), instruments(), Random(1)
    sender = HashingSender(clock)
    publisher = NodePublisher(sender, metrics, cluster=CLUSTER, node=NODE, run_id=1, buffer=RetryBuffer(), clock=clock)
    running, numbering = asyncio.create_task(publisher.run()), Numbering(cluster=CLUSTER, node=NODE, run_id=1)
    read, sizes, most_held = list[str](), list[int](), 0.0
    for second in range(OUTAGE_S + 10):
        if second == 5:
            sender.taking.clear()
            await settle()
        tick = 1_000 * second, cut_devices(chance), containers("a")
        publisher.publish(*tick)
        encoded = numbering.step(*tick).value or b""
        read.append(hashlib.sha256(encoded).hexdigest())
        sizes.append(len(encoded))
        clock.now_s += 1.0
        await settle(2)
        most_held = max(most_held, value(metrics, names.BUFFERED))
        if second == OUTAGE_S + 4:
            sender.taking.set()
            await settle(5 * OUTAGE_S)
    assert await publisher.drain(30.0) == 0
    running.cancel()

    assert min(sizes) > 55_000
    assert value(metrics, names.SENT) == len(read) == OUTAGE_S + 10
    assert sender.sent == read
    assert sum(value(metrics, names.DROPPED, reason=reason) for reason in DROP_REASONS) == 0
    assert most_held < RetryBuffer().max_bytes
    assert publisher.capacity.ticks > OUTAGE_S
    assert publisher.capacity.tick_bytes == pytest.approx(sizes[-1], rel=0.1)
