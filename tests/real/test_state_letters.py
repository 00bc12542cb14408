"""What is malformed in a state topic, which every start reads again, is dead-lettered once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from delivery.connection import Connection
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.pipeline import read_all, running
from tests.real.servers import KafkaServer

RECORDS_EACH = 20
STATES = ("gpu.allocations", "gpu.workloads")


@asynccontextmanager
async def workers(kafka: str, count: int, failures: list[str]) -> AsyncIterator[None]:
    """So many workers of one group, once all of them have learned their state."""
    streams = [Attribution(AttributionSettings(kafka=kafka), fail=failures.append) for _ in range(count)]
    async with running(*streams):
        await eventually(lambda: not any(stream.not_ready() for stream in streams))
        yield


async def write(kafka: str) -> None:
    """Write what is no state to each state topic."""
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for topic in STATES:
            await asyncio.gather(*[await producer.send(topic, b"{", key=b"c/n%d" % n) for n in range(RECORDS_EACH)])


async def test_restarts_and_rebalances_write_no_letter_again(empty_kafka: KafkaServer) -> None:
    kafka, failures = empty_kafka.address, list[str]()

    async def all_are_there() -> bool:
        return len(await read_all(kafka, "gpu.dead-letters")) >= 4 * RECORDS_EACH

    await topic_admin.create(Connection(kafka), partitions=4, replication_factor=1)
    await write(kafka)
    counts = []
    async with workers(kafka, 1, failures):
        counts.append(len(await read_all(kafka, "gpu.dead-letters")))
    async with workers(kafka, 1, failures):
        async with workers(kafka, 1, failures):
            counts.append(len(await read_all(kafka, "gpu.dead-letters")))
            # before one of them leaves: who loses a partition may have read a record and not finished it
            await write(kafka)
            await eventually(all_are_there)
        counts.append(len(await read_all(kafka, "gpu.dead-letters")))
    async with workers(kafka, 2, failures):
        counts.append(len(await read_all(kafka, "gpu.dead-letters")))

    assert failures == []
    assert counts == [2 * RECORDS_EACH, 2 * RECORDS_EACH, 4 * RECORDS_EACH, 4 * RECORDS_EACH]
