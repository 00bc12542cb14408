"""A consumer group on Apache Kafka: transactions, deleted records, added partitions, instance ids."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import GroupLoadInProgressError
from aiokafka.protocol.group import HeartbeatRequest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka import TopicPartition as TheirPartition
from confluent_kafka.admin import NewPartitions

from delivery import aiokafka_patches
from delivery import group as group_module
from delivery.clients import OffsetClient
from delivery.dead_letters import Record
from delivery.group import ConsumerGroup, MustRestart
from delivery.instruments import Instruments
from delivery.ledger import Partition
from delivery.positions import WHOLE_LOG
from delivery.settings import MemberSettings
from sinks.consumer import GroupReader, Source
from sinks.outcomes import Outcomes
from streams.app import ReaderApp
from tests.eventually import eventually
from tests.real.contents import committed, ends, values
from tests.real.pipeline import sender_to
from tests.real.reader_process import Echo, echo_app
from tests.real.servers import KafkaServer
from tests.real.test_connect import Counting
from tests.sinks.records import outcome_instruments
from topics.topic import load_topics


def create(kafka: KafkaServer, name: str, partitions: int = 1) -> None:
    kafka.create_topics({f"{name}-{topic}": partitions for topic in ("in", "state", "out")})


@asynccontextmanager
async def running(app: ReaderApp) -> AsyncIterator["asyncio.Task[None]"]:
    """The app at work, until it has ended."""
    stop = asyncio.Event()
    task = asyncio.create_task(app.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task], timeout=15)


def transactions(kafka: KafkaServer, name: str) -> AIOKafkaProducer:
    """A producer of transactions."""
    return AIOKafkaProducer(bootstrap_servers=kafka.address, transactional_id=name, linger_ms=0)


async def send(kafka: KafkaServer, topic: str, count: int, size: int = 10) -> None:
    async with sender_to(kafka.connection) as sender:
        for future in [await sender.send(topic, bytes(size), partition=0) for _ in range(count)]:
            await future


async def test_what_is_aborted_is_not_read_and_what_is_open_holds_up_nothing_before_it(kafka: KafkaServer) -> None:
    name = "group-transactions"
    create(kafka, name)
    async with transactions(kafka, f"{name}-done") as done, transactions(kafka, f"{name}-open") as hanging:
        for number in range(200):
            await done.begin_transaction()
            await done.send(f"{name}-in", b"%d" % number, partition=0)
            await (done.abort_transaction() if number % 3 == 0 else done.commit_transaction())
        await done.begin_transaction()
        await done.send(f"{name}-state", b"state", partition=0)
        await done.commit_transaction()
        expected = [b"%d" % number for number in range(200) if number % 3]
        stable = (await ends(kafka.address, f"{name}-in"))[0]
        await hanging.begin_transaction()
        await hanging.send_and_wait(f"{name}-in", b"open", partition=0)
        app = echo_app(Echo(kafka=kafka.address, name=name))
        async with running(app):

            async def read_to_the_end() -> bool:
                return await committed(kafka.address, name, f"{name}-in") == {0: stable}

            await eventually(read_to_the_end)
            assert (await values(kafka.address, f"{name}-out"))[0] == expected
            assert app.reader.lost == 0
            tp = Partition(f"{name}-in", 0)
            assert await app.group.offsets.ends([tp]) == {tp: stable}
            assert app.not_ready() == []
            now_s = asyncio.get_running_loop().time()
            app.group.check_topics(now_s)
            (problem,) = app.group._partition_watch.problems(app.group.kafka_name, now_s + 100)
            assert f"partition 0: a transaction is open since offset {stable}, for 10" in problem
            await hanging.commit_transaction()

            async def read_what_was_open() -> bool:
                return (await values(kafka.address, f"{name}-out"))[0] == [*expected, b"open"]

            await eventually(read_what_was_open)


async def test_a_group_that_was_set_to_the_end_behind_an_open_transaction_reads_nothing_again(
    kafka: KafkaServer,
) -> None:
    name = "group-behind-a-transaction"
    create(kafka, name)

    async def has_read_to(offset: int) -> bool:
        return await committed(kafka.address, name, f"{name}-in") == {0: offset}

    await send(kafka, f"{name}-in", 50)
    async with running(echo_app(Echo(kafka=kafka.address, name=name))):
        await eventually(partial(has_read_to, 50))
    async with transactions(kafka, f"{name}-open") as hanging:
        await hanging.begin_transaction()
        await hanging.send_and_wait(f"{name}-in", b"open", partition=0)
        to_latest, admin = [ConsumerGroupTopicPartitions(name, [TheirPartition(f"{name}-in", 0, 51)])], kafka.admin()
        for committing in admin.alter_consumer_group_offsets(to_latest).values():
            await asyncio.to_thread(committing.result, 10)
        app = echo_app(Echo(kafka=kafka.address, name=name))
        async with running(app):
            await eventually(lambda: app.reader.ledger.ready)
            await hanging.abort_transaction()
            await send(kafka, f"{name}-in", 1)
            await eventually(partial(has_read_to, 53))
    assert len((await values(kafka.address, f"{name}-out"))[0]) == 51


async def test_records_that_are_deleted_under_a_live_reader_are_counted(kafka: KafkaServer) -> None:
    name = "group-deleted"
    create(kafka, name)
    await send(kafka, f"{name}-in", 50)
    app = echo_app(Echo(kafka=kafka.address, name=name))
    async with running(app):

        async def committed_all() -> bool:
            return await committed(kafka.address, name, f"{name}-in") == {0: 50}

        await eventually(committed_all)
        reads = app.reader.reads  # no room: it takes no inputs for now, and has fetched 8 MiB of them
        app.reader.reads = msgspec.structs.replace(reads, max_open_bytes=-1)
        await asyncio.sleep(1)
        await send(kafka, f"{name}-in", 1000, size=20_000)
        admin = kafka.admin()
        for deleted in admin.delete_records([TheirPartition(f"{name}-in", 0, 900)]).values():
            await asyncio.to_thread(deleted.result, 10)
        app.reader.reads = reads

        async def went_on() -> bool:
            return await committed(kafka.address, name, f"{name}-in") == {0: 1050}

        await eventually(went_on)
        values_out = (await values(kafka.address, f"{name}-out"))[0]
        assert len(values_out) + app.reader.lost == 1050
        assert app.reader.lost > 0


async def test_a_partition_that_is_added_ends_the_process_and_is_not_read(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "group-grown"
    create(kafka, name, partitions=2)
    monkeypatch.setattr(group_module, "_METADATA_MS", 1000)
    app = echo_app(Echo(kafka=kafka.address, name=name))
    async with running(app) as task:

        async def reads() -> bool:
            return not app.not_ready()

        await eventually(reads)
        admin = kafka.admin()
        for grown in admin.create_partitions([NewPartitions(f"{name}-in", 3)]).values():
            await asyncio.to_thread(grown.result, 10)
        with pytest.raises(MustRestart, match=f"{name}-in has 3 partitions, and had 2"):
            await asyncio.wait_for(task, 120)
    assert Partition(f"{name}-in", 2) not in app.reader.commits


class Reading:
    """A member with a fetch in flight when its partitions are revoked; it waits for the end of the fetch."""

    def __init__(self, kafka: KafkaServer, topic: str) -> None:
        settings = MemberSettings(group=topic, kafka=kafka.address)
        self.group = ConsumerGroup(settings, [topic], self, {topic: 2})
        self.ours: set[Partition] = set()
        self.let_go = 0

    def has(self, partitions: int) -> bool:
        return len(self.ours) == partitions

    async def revoked(self) -> None:
        self.let_go += len(await self.group.fetch(self.ours, 0.1)) == 0

    def assigned(self, tps: set[Partition]) -> None:
        self.ours = tps


async def test_a_fetch_ends_in_time_during_a_rebalance_so_that_the_reader_can_give_up_its_partitions(
    kafka: KafkaServer,
) -> None:
    topic = "group-fetching"
    kafka.create_topics({topic: 2})
    first, second = Reading(kafka, topic), Reading(kafka, topic)
    for member, partitions in ((first, 2), (second, 1)):
        await member.group.connect()
        member.group.join()
        await eventually(partial(member.has, partitions))
    await eventually(partial(first.has, 1))  # a rebalance ends for each member by itself
    assert first.let_go == 1
    for member in (first, second):
        await member.group.close()


async def test_of_two_processes_with_one_instance_id_the_older_ends_and_the_newer_goes_on(kafka: KafkaServer) -> None:
    name = "group-twins"
    create(kafka, name)
    echo = Echo(kafka=kafka.address, name=name, instance_id="worker-3", session_timeout_s=6.0)
    older = echo_app(echo)
    async with running(older) as first:

        async def reads(app: ReaderApp) -> bool:
            return not app.not_ready()

        await eventually(lambda: reads(older))
        newer = echo_app(echo)
        async with running(newer) as second:
            with pytest.raises(MustRestart, match="instance id worker-3"):
                await asyncio.wait_for(first, 120)
            await eventually(lambda: reads(newer))
            await asyncio.sleep(3)
            assert newer.reader.rebalances == 0
            assert not second.done()


async def test_a_member_whose_heartbeats_got_errors_for_a_while_stays_in_its_group(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.create_topics({"group-heartbeats": 1})
    settings = MemberSettings(kafka=kafka.address, group="group-heartbeats", session_timeout_s=6.0)
    member = Counting()
    reader = ConsumerGroup(settings, ["group-heartbeats"], member, {"group-heartbeats": 1})
    send, errors = aiokafka_patches._send, 0

    async def send_and_refuse(client: object, node_id: object, request: Any, **options: Any) -> Any:
        nonlocal errors
        response = await send(client, node_id, request, **options)
        if request.API_KEY == HeartbeatRequest.API_KEY and errors < 2:
            errors += 1
            response.error_code = GroupLoadInProgressError.errno
        return response

    monkeypatch.setattr(aiokafka_patches, "_send", send_and_refuse)
    await reader.connect()
    reader.join()
    try:
        await eventually(lambda: errors == 2 and member.assignments == 3 and reader.not_ready() == [])
    finally:
        await reader.close()


async def test_ends_are_answered_at_once_while_a_fetch_waits(kafka: KafkaServer) -> None:
    name = "group-prompt"
    create(kafka, name)
    offsets = OffsetClient(kafka.connection, client_id=name)
    await offsets.connect()
    app = echo_app(Echo(kafka=kafka.address, name=name))
    async with running(app):

        async def reads() -> bool:
            return not app.not_ready()

        await eventually(reads)
        loop, took_s = asyncio.get_running_loop(), []
        for _ in range(20):
            asked_s = loop.time()
            await app.group.offsets.ends([Partition(f"{name}-in", 0)])
            took_s.append(loop.time() - asked_s)
        assert sorted(took_s)[10] < 0.1  # behind a fetch it would wait for 0.2 s
    await offsets.close()


class Collector:
    """A sink's handler of a partition: finishes every record at once."""

    def __init__(self, collected: list[bytes]) -> None:
        self._collected = collected

    def recall(self, record: Record) -> None:
        """Nothing to know."""

    async def deliver(self, records: Sequence[Record], _: asyncio.Event) -> AsyncGenerator[int]:
        self._collected += [record.value or b"" for record in records]
        yield records[-1].offset + 1

    async def quiet(self, _: asyncio.Event) -> None:
        """Nothing is due."""

    def reset(self) -> None:
        """Nothing is known."""


@asynccontextmanager
async def sink(kafka: KafkaServer, name: str, collected: list[bytes]) -> AsyncIterator[GroupReader]:
    """A sink that starts at the end of the log."""
    settings = MemberSettings(kafka=kafka.address, topic_prefix=f"{name}.", group="sink")
    source = Source("gpu.attributed", lambda _: Collector(collected), "latest", WHOLE_LOG)
    reader = GroupReader(settings, [source], Outcomes("test", Instruments(outcome_instruments("test"))))
    stop = asyncio.Event()
    task = asyncio.create_task(reader.run(stop))
    try:
        yield reader
    finally:
        stop.set()
        await task


async def test_a_process_that_ends_before_it_has_committed_all_partitions_makes_no_old_record_news(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also, a partition that is added later is read from its beginning."""
    name = "group-begins"
    topic = f"{name}.gpu.attributed"
    for created, partitions in ((topic, 3), (f"{name}.gpu.dead-letters", 1)):
        kafka.create_topics({created: partitions}, load_topics()[created.removeprefix(f"{name}.")].settings())

    async def write(value: bytes, partitions: Sequence[int]) -> None:
        async with sender_to(kafka.connection) as sender:
            for future in [await sender.send(topic, value, partition=number) for number in partitions]:
                await future

    async def first_only(group: ConsumerGroup, offsets: Mapping[Partition, int]) -> bool:
        if {tp.partition for tp in offsets} != {0}:
            await asyncio.Event().wait()
        return await commit(group, offsets)

    commit, collected = ConsumerGroup.commit, list[bytes]()
    await write(b"old", range(3))
    with monkeypatch.context() as patched:
        patched.setattr(ConsumerGroup, "commit", first_only)
        async with sink(kafka, name, collected) as reader:
            await eventually(lambda: all(reason.endswith("partitions 1, 2") for reason in reader.not_ready()))
    async with sink(kafka, name, collected) as reader:
        await eventually(lambda: not reader.not_ready())
        await write(b"new", range(3))
        await eventually(lambda: collected.count(b"new") == 3)
    assert collected == [b"new"] * 3
    admin = kafka.admin()
    for grown in admin.create_partitions([NewPartitions(topic, 4)]).values():
        await asyncio.to_thread(grown.result, 10)
    await write(b"added", [3])
    async with sink(kafka, name, collected):
        await eventually(lambda: b"added" in collected)
