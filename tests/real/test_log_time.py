"""Workers that fall seconds behind name the same pods as one that reads the same logs later, and all that are known."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from delivery.connection import Connection
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import KafkaServer
from tests.streams.attribution.records import container, gpu, pod, snapshot, tick, workloads
from topics.attributed import AttributedSample
from topics.topic import node_key
from topics.workloads import Owner, Pod

NODES = [f"node-{i}" for i in range(12)]
WRITE_S, EVERY_S, STOPPED_S = 7.0, 0.1, 7.0
POD_LIFE_TICKS = 14
TOLD_AFTER_S = 1.5
GROUP, REPLAY = "gpustream-attribution", "replayed"


class Writer:
    """Writes the nodes' records: on each node one pod after the other, which the API server reports a little later."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer, self._random = producer, Random(1)
        self._later: list[asyncio.Task[None]] = []
        self._reported: dict[str, list[Pod]] = {}

    async def run(self) -> None:
        """For some seconds, and until all is reported."""
        for node in NODES:
            await self._send("gpu.workloads", node, workloads(1, node=node))
        await asyncio.sleep(2.2)
        for seq in range(1, int(WRITE_S / EVERY_S)):
            await asyncio.gather(*(self._tick(index, node, seq) for index, node in enumerate(NODES)))
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*self._later)

    async def _tick(self, index: int, node: str, seq: int) -> None:
        number = 1 + (seq + index) // POD_LIFE_TICKS
        if seq == 1 or (seq + index) % POD_LIFE_TICKS == 0:
            name = f"{node}-pod-{number}"
            await self._send("gpu.allocations", node, snapshot(number, container(name, gpu(0)), ts_ms=1, node=node))
            self._later.append(asyncio.create_task(self._tell(node, name, number)))
        await self._send("gpu.samples", node, tick(seq, number, ts_ms=1, node=node))

    async def _tell(self, node: str, name: str, number: int) -> None:
        await asyncio.sleep(self._random.uniform(0, TOLD_AFTER_S))
        pods = self._reported.setdefault(node, [])
        pods.append(pod(name, owners=(Owner("batch/v1", "Job", f"job-{number}"),)))
        await self._send("gpu.workloads", node, workloads(1 + len(pods), *pods, node=node))

    async def _send(self, topic: str, node: str, record: msgspec.Struct) -> None:
        await self._producer.send_and_wait(topic, msgspec.json.encode(record), key=node_key("c", node))


async def wait_for_all(kafka: str, workers: list[Gpustream]) -> None:
    """Write for some seconds. For most of them the workers are stopped, but for less than their session."""
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        writing = asyncio.create_task(Writer(producer).run())
        await asyncio.sleep(2.6)
        for worker in workers:
            worker.sigstop()
        await asyncio.sleep(STOPPED_S)
        for worker in workers:
            worker.sigcont()
        await writing


async def attributed(kafka: str, group: str) -> list[Any]:
    """The records of gpu.attributed, once a group has read everything."""

    async def all_read() -> bool:
        return not await lag(kafka, group, ["gpu.samples"])

    await eventually(all_read, every_s=0.2)
    return await read_all(kafka, "gpu.attributed")


async def replayed(kafka: str) -> list[Any]:
    """The same once another group has read it from the beginning."""
    stop, replay_stream = asyncio.Event(), Attribution(AttributionSettings(kafka=kafka, group=REPLAY))
    running = asyncio.create_task(replay_stream.run(stop))
    try:
        return await attributed(kafka, REPLAY)
    finally:
        stop.set()
        await running


def by_offset(records: list[Any]) -> dict[tuple[int, int], bytes]:
    """The records by partition and offset of their sample; asserts that repeats are equal."""
    by_place: dict[tuple[int, int], bytes] = {}
    for record in records:
        source = (record.partition, msgspec.json.decode(record.value, type=AttributedSample).offset)
        assert by_place.setdefault(source, record.value) == record.value
    return by_place


def test_workers_that_are_stopped_for_seconds_name_every_pod_and_a_replay_gives_the_same_bytes(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    kafka = empty_kafka.address
    asyncio.run(topic_admin.create(Connection(kafka), partitions=4, replication_factor=1))
    command = ("stream", "attribution", "--kafka", kafka)
    with Gpustream(tmp_path / "one", *command) as first_worker, Gpustream(tmp_path / "other", *command) as other:
        asyncio.run(wait_for_all(kafka, [first_worker, other]))
        live = asyncio.run(attributed(kafka, GROUP))

    samples = [msgspec.json.decode(value, type=AttributedSample) for value in by_offset(live).values()]
    assert len(samples) == len(NODES) * (int(WRITE_S / EVERY_S) - 1)
    assert {sample.attribution for sample in samples} == {"exact"}
    holders = [sample.devices[0].holders[0] for sample in samples]
    assert {holder.pod for holder in holders if holder.pod_uid != f"uid-{holder.pod}"} == set()
    assert {holder.pod for holder in holders if holder.job is None or holder.pod_unknown} == set()

    both = asyncio.run(replayed(kafka))
    assert by_offset(both) == by_offset(live)
    assert len(both) == len(live) + len(samples)
