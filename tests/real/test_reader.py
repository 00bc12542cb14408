"""The reader in its consumer group, on Apache Kafka: members come, go and are killed, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from delivery.sender import Sender
from tests.eventually import eventually
from tests.real.contents import committed, ends, values
from tests.real.reader_process import Echo, EchoProcess, echo_app
from tests.real.servers import KafkaServer

PARTITIONS = 4

Start = Callable[..., EchoProcess]


@pytest.fixture
def start(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts processes that copy what they read: ``start(name, instance_id=...)``."""
    with ExitStack() as processes:

        def start(name: str, **options: object) -> EchoProcess:
            echo = Echo(kafka=kafka.address, name=name, **options)  # type: ignore[arg-type]
            return processes.enter_context(EchoProcess(tmp_path_factory.mktemp(name), echo))

        yield start


def create(kafka: KafkaServer, name: str) -> None:
    kafka.create_topics({f"{name}-{topic}": PARTITIONS for topic in ("in", "state", "out")})


@asynccontextmanager
async def producing(kafka: KafkaServer, name: str, *, every_s: float = 0.005) -> AsyncIterator[list[bytes]]:
    """Sends values one after the other while inside; yields those sent. The state has a record per partition."""
    sender = Sender(kafka.connection, client_id="test")
    await sender.start()
    sent_values: list[bytes] = []
    acknowledged: list[asyncio.Future[int]] = []

    async def produce() -> None:
        for number in range(1_000_000):
            acknowledged.append(await sender.send(f"{name}-in", b"%d" % number, partition=number % PARTITIONS))
            sent_values.append(b"%d" % number)
            await asyncio.sleep(every_s)

    acknowledged += [
        await sender.send(f"{name}-state", b"state", partition=partition) for partition in range(PARTITIONS)
    ]
    task = asyncio.create_task(produce())
    try:
        yield sent_values
    finally:
        task.cancel()
        await asyncio.wait([task])
        await asyncio.gather(*acknowledged)
        await sender.stop()


async def check(kafka: KafkaServer, name: str, sent_values: list[bytes]) -> None:
    """Asserts that all is committed, and that every value was copied in the order of sending, apart from repeats."""

    async def all_committed() -> bool:
        end = await ends(kafka.address, f"{name}-in", PARTITIONS)
        return await committed(kafka.address, name, f"{name}-in", PARTITIONS) == end

    assert sent_values
    await eventually(all_committed)
    values_by_partition = await values(kafka.address, f"{name}-out", PARTITIONS)
    for partition, partition_values in values_by_partition.items():
        assert list(dict.fromkeys(partition_values)) == [
            value for value in sent_values if int(value) % PARTITIONS == partition
        ]


async def test_a_backlog_goes_through_once_and_all_is_committed(kafka: KafkaServer) -> None:
    create(kafka, "reader-alone")
    async with producing(kafka, "reader-alone", every_s=0) as sent_values:
        await eventually(lambda: asyncio.sleep(0, len(sent_values) > 3000))
    app, stop = echo_app(Echo(kafka=kafka.address, name="reader-alone")), asyncio.Event()
    running = asyncio.create_task(app.run(stop))
    try:
        await check(kafka, "reader-alone", sent_values)
        assert app.reader.holes == 0
        assert app.reader.ledger.open_bytes == 0
    finally:
        stop.set()
        await running
    partition_values = await values(kafka.address, "reader-alone-out", PARTITIONS)
    assert sum(map(len, partition_values.values())) == len(sent_values)


async def test_members_that_join_leave_and_are_killed_lose_nothing(kafka: KafkaServer, start: Start) -> None:
    create(kafka, "reader-group")
    async with producing(kafka, "reader-group") as sent_values:
        first = await asyncio.to_thread(start, "reader-group", session_timeout_s=6.0)
        second = await asyncio.to_thread(start, "reader-group", session_timeout_s=6.0)
        await asyncio.sleep(1)
        await asyncio.to_thread(second.stop)
        await asyncio.sleep(1)
        await asyncio.to_thread(second.start)
        await asyncio.sleep(1)
        await asyncio.to_thread(first.kill9)
        await asyncio.sleep(1)
    await check(kafka, "reader-group", sent_values)
    assert second.running


async def test_no_web_server_listens(kafka: KafkaServer, start: Start) -> None:
    create(kafka, "reader-web")
    process = await asyncio.to_thread(start, "reader-web")
    assert process.listening_ports() == set()


async def test_a_member_with_an_instance_id_is_back_long_before_its_session_ends(
    kafka: KafkaServer, start: Start
) -> None:
    create(kafka, "reader-static")
    async with producing(kafka, "reader-static") as sent_values:
        process = await asyncio.to_thread(start, "reader-static", instance_id="one", session_timeout_s=60.0)
        await asyncio.sleep(1)
        await asyncio.to_thread(process.kill9)
        await asyncio.to_thread(process.start)
        sent_before = len(sent_values)

        async def goes_on() -> bool:
            values_by_partition = await values(kafka.address, "reader-static-out", PARTITIONS)
            return any(
                int(value) > sent_before
                for partition_values in values_by_partition.values()
                for value in partition_values
            )

        await eventually(goes_on)
    await check(kafka, "reader-static", sent_values)


async def test_a_member_with_an_instance_id_hands_over_when_it_is_stopped_if_it_is_to_leave(
    kafka: KafkaServer, start: Start
) -> None:
    create(kafka, "reader-leaves")
    async with producing(kafka, "reader-leaves") as sent_values:
        stays, leaves = [
            await asyncio.to_thread(
                start, "reader-leaves", instance_id=name, session_timeout_s=900.0, leave_on_stop=True
            )
            for name in ("stays", "leaves")
        ]
        await asyncio.sleep(1)
        await asyncio.to_thread(leaves.stop)
    await check(kafka, "reader-leaves", sent_values)
    await asyncio.to_thread(stays.stop)  # or the group would have a member for as long as its session


async def test_a_process_that_is_asked_to_stop_ends_in_good_order(kafka: KafkaServer, start: Start) -> None:
    create(kafka, "reader-stop")
    process = await asyncio.to_thread(start, "reader-stop")
    await asyncio.to_thread(process.stop)
    assert process.exit_code == 0, process.log_tail()


async def test_a_stop_while_the_broker_is_away_ends_in_good_order_too(
    start_kafka: Callable[..., KafkaServer], tmp_path: Path
) -> None:
    broker = await asyncio.to_thread(start_kafka)
    create(broker, "outage")
    process = EchoProcess(tmp_path, Echo(kafka=broker.address, name="outage"))
    await asyncio.to_thread(process.start)
    try:
        async with producing(broker, "outage"):
            await asyncio.sleep(1)
        await asyncio.to_thread(broker.kill9)
        await asyncio.to_thread(process.stop)
        assert process.exit_code == 0, process.log_tail()
    finally:
        process.close()
