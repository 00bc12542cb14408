"""What a sender promises, on Apache Kafka."""

import asyncio
import random
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer

from delivery import aiokafka_patches, clock, kafka_admin
from delivery import sender as sender_module
from delivery.quotas import Quotas
from delivery.sender import Sender, Unsendable
from delivery.settings import KafkaSettings
from tests.eventually import LIMIT_S, eventually
from tests.real.contents import batches, codecs, values
from tests.real.pipeline import read_all, sender_to
from tests.real.servers import KafkaServer


async def test_of_records_in_one_batch_only_the_one_that_the_topic_refuses_is_unsendable(kafka: KafkaServer) -> None:
    kafka.create_topics({"sender-small": 1}, {"max.message.bytes": "20000"})
    good = [b"%d" % number for number in range(40)]
    async with sender_to(kafka.connection) as sender:
        futures = []
        for number, value in enumerate(good):
            futures.append(await sender.send("sender-small", value))
            if number in (10, 11, 25):
                with_it = await sender.send("sender-small", random.randbytes(30_000))
                futures.append(with_it)
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        after = await (await sender.send("sender-small", b"after"))
    assert [type(outcome) for outcome in outcomes].count(Unsendable) == 3
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == list(range(40))
    assert after == 40
    assert await values(kafka.address, "sender-small") == {0: [*good, b"after"]}


async def test_a_record_that_kafka_finds_invalid_is_unsendable_and_stalls_nothing(kafka: KafkaServer) -> None:
    kafka.create_topics({"sender-compacted": 1}, {"cleanup.policy": "compact"})
    async with sender_to(kafka.connection) as sender:
        without_a_key = await sender.send("sender-compacted", b"bad")
        good = await sender.send("sender-compacted", b"good", key=b"k")
        with pytest.raises(Unsendable):
            await asyncio.wait_for(without_a_key, 120)
        assert await asyncio.wait_for(good, 120) == 0


async def test_why_kafka_does_not_store_what_waits_is_said_and_afterwards_it_is_stored(
    oldest_kafka: KafkaServer,
) -> None:
    oldest_kafka.create_topics({"sender-waits": 1}, {"min.insync.replicas": "2"})  # Kafka 4 asks for what there is
    async with sender_to(oldest_kafka.connection) as sender:
        sent = await sender.send("sender-waits", b"a")
        refusal = await eventually(sender.refusal)
        assert refusal.startswith(
            "sender-waits partition 0: Kafka does not take a record while fewer of its replicas are"
        )
        async with kafka_admin.connect(oldest_kafka.connection) as admin:
            await admin.alter("sender-waits", {"min.insync.replicas": "1"})
        assert await sent == 0
        assert sender.refusal() is None


async def test_a_record_without_a_value_is_stored_with_its_key(kafka: KafkaServer) -> None:
    kafka.create_topics({"sender-deleted": 1}, {"cleanup.policy": "compact"})
    async with sender_to(kafka.connection) as sender:
        await (await sender.send("sender-deleted", b"there", key=b"k"))
        await (await sender.send("sender-deleted", None, key=b"k"))
    records = await read_all(kafka.address, "sender-deleted")
    assert [(record.key, record.value) for record in records] == [(b"k", b"there"), (b"k", None)]


@pytest.mark.parametrize(("times", "shown_ms"), [("LogAppendTime", (1, 1_800_000)), ("CreateTime", (0, 0))])
async def test_an_acknowledgement_shows_how_the_clock_here_differs_if_the_broker_gives_records_their_time(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, times: str, shown_ms: tuple[int, int]
) -> None:
    kafka.create_topics({f"sender-{times}": 1}, {"message.timestamp.type": times})
    monkeypatch.setattr(sender_module, "now_ms", lambda: clock.now_ms() + 1_800_000)
    async with sender_to(kafka.connection) as sender:
        await (await sender.send(f"sender-{times}", b"there"))
        assert sender.ahead_ms is not None
        assert shown_ms[0] <= sender.ahead_ms <= shown_ms[1]


async def test_a_broker_that_is_killed_in_mid_stream_loses_nothing_and_keeps_the_order(
    start_kafka: Callable[..., KafkaServer],
) -> None:
    broker = await asyncio.to_thread(start_kafka)
    broker.create_topics({"sender-outage": 2})
    async with sender_to(broker.connection) as sender:
        futures = []

        async def stream() -> None:
            for number in range(3000):
                futures.append(await sender.send("sender-outage", b"%d" % number, partition=number % 2))
                await asyncio.sleep(0.001)

        streaming = asyncio.create_task(stream())
        await asyncio.sleep(1)
        await asyncio.to_thread(broker.kill9)
        await asyncio.sleep(1)
        await asyncio.to_thread(broker.start)
        await streaming
        await asyncio.gather(*futures)
    values_by_partition = await values(broker.address, "sender-outage", partitions=2)
    for partition, stored in values_by_partition.items():
        assert list(dict.fromkeys(stored)) == [b"%d" % number for number in range(3000) if number % 2 == partition]


async def test_a_quota_slows_a_sender_down_and_is_named_in_its_log(
    kafka: KafkaServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiokafka_patches, "QUOTAS", Quotas())
    kafka.create_topics({"sender-quota": 2})
    await asyncio.to_thread(kafka.set_quotas, "sender-quota", producer_byte_rate=25_000)
    sent = [number.to_bytes(4, "big") + random.randbytes(50_000) for number in range(8)]
    sender = Sender(kafka.connection, client_id="sender-quota")
    await sender.start()
    async with asyncio.timeout(LIMIT_S):
        for number in range(0, 8, 2):
            await asyncio.gather(*[await sender.send("sender-quota", sent[number + n], partition=n) for n in (0, 1)])
    await sender.stop()

    assert await values(kafka.address, "sender-quota", partitions=2) == {0: sent[::2], 1: sent[1::2]}
    (line,) = [message for message in caplog.messages if "quota of Kafka" in message]
    assert "client sender-quota: a quota of Kafka holds it up: raise its producer_byte_rate" in line


@pytest.mark.parametrize("compression", ["zstd", "lz4", "gzip", "none"])
async def test_what_is_sent_is_compressed_as_the_settings_say_and_every_client_reads_it(
    kafka: KafkaServer, compression: str
) -> None:
    topic, values_sent = f"sender-{compression}", [b"%d " % number * 1000 for number in range(50)]
    kafka.create_topics({topic: 1})
    settings = KafkaSettings(kafka=kafka.address, compression=compression)  # type: ignore[arg-type]
    async with sender_to(settings.connection()) as sender:
        await asyncio.gather(*[await sender.send(topic, value) for value in values_sent])

    assert codecs(kafka, topic) == {compression}
    assert await values(kafka.address, topic) == {0: values_sent}
    assert await asyncio.to_thread(by_librdkafka, kafka, topic, len(values_sent)) == values_sent


async def test_what_many_nodes_send_at_once_is_few_batches_since_a_partition_has_one_in_flight(
    kafka: KafkaServer,
) -> None:
    kafka.create_topics({"sender-nodes": 1})
    async with sender_to(kafka.connection) as sender:
        sent = [sender.send("sender-nodes", random.randbytes(17_000)) for _ in range(24)]
        await asyncio.gather(*await asyncio.gather(*sent))

    assert len(batches(kafka, "sender-nodes")) <= 2


def by_librdkafka(kafka: KafkaServer, topic: str, count: int) -> list[bytes | None]:
    """What kcat and ClickHouse would read, whose client it is."""
    settings = {"bootstrap.servers": kafka.address, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        return [message.value() for message in consumer.consume(count, timeout=LIMIT_S)]
    finally:
        consumer.close()
