"""The embedded broker, as the Kafka clients of the product see it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from click.testing import CliRunner

from delivery.connection import Connection
from delivery.sender import Sender
from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker, EmbeddedBrokerError
from tests.eventually import LIMIT_S
from topics import TOPICS

TOPIC = "gpu.samples"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        broker.start(dict.fromkeys(TOPICS, 8) | {"in-group": 2, "limited": 1})
        yield broker


@pytest.fixture
async def producer(broker: EmbeddedBroker) -> AIOKafkaProducer:
    async with AIOKafkaProducer(bootstrap_servers=broker.address, acks="all", enable_idempotence=True) as producer:
        yield producer


def consumer_of(broker: EmbeddedBroker, *topics: str, group: str | None = None) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        *topics,
        bootstrap_servers=broker.address,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=2000,
        heartbeat_interval_ms=500,
    )


async def test_every_topic_is_there_with_its_partitions(broker: EmbeddedBroker) -> None:
    async with consumer_of(broker, *TOPICS) as consumer:
        assert {name: len(consumer.partitions_for_topic(name)) for name in TOPICS} == dict.fromkeys(TOPICS, 8)


async def test_an_admin_client_finds_the_controller_and_the_topics(broker: EmbeddedBroker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await admin.start()
    (topic,) = await admin.describe_topics([TOPIC])
    await admin.close()
    assert len(topic["partitions"]) == 8


async def test_a_record_keeps_its_partition_key_value_and_headers(
    broker: EmbeddedBroker, producer: AIOKafkaProducer
) -> None:
    sent = await producer.send_and_wait(TOPIC, b"value", key=b"key", partition=7, headers=[("stage", b"test")])
    async with consumer_of(broker) as consumer:
        consumer.assign([TopicPartition(TOPIC, 7)])
        record = await consumer.getone()
    assert (sent.offset, record.offset) == (0, 0)
    assert (record.key, record.value, record.headers) == (b"key", b"value", (("stage", b"test"),))


@pytest.mark.slow
async def test_a_group_goes_on_from_its_committed_offset(broker: EmbeddedBroker, producer: AIOKafkaProducer) -> None:
    partition = TopicPartition("in-group", 1)
    for value in (b"first", b"second"):
        await producer.send_and_wait("in-group", value, partition=1)
    for expected in (b"first", b"second"):
        async with consumer_of(broker, "in-group", group="readers") as consumer:
            record = await consumer.getone()
            assert record.value == expected
            await consumer.commit({partition: record.offset + 1})
    async with consumer_of(broker, group="readers") as consumer:
        assert await consumer.committed(partition) == 2


async def test_a_partition_keeps_its_last_five_mebibytes(broker: EmbeddedBroker, producer: AIOKafkaProducer) -> None:
    for _ in range(12):
        await producer.send_and_wait("limited", bytes(500_000), partition=0)
    partition = TopicPartition("limited", 0)
    async with consumer_of(broker) as consumer:
        consumer.assign([partition])
        first, end = await consumer.beginning_offsets([partition]), await consumer.end_offsets([partition])
    assert end[partition] - first[partition] == 10


async def test_its_acknowledgements_are_not_taken_for_a_clock(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender(Connection(broker.address), client_id="test")
    await sender.start()
    assert await (await sender.send(TOPIC, b"a", key=b"c/n")) >= 0
    await sender.stop()
    assert (sender.ahead_ms, caplog.messages) == (0, [])


async def test_there_are_no_offsets_by_time(broker: EmbeddedBroker, producer: AIOKafkaProducer) -> None:
    await producer.send_and_wait(TOPIC, b"timed", partition=3)
    partition = TopicPartition(TOPIC, 3)
    async with consumer_of(broker) as consumer:
        consumer.assign([partition])
        assert await consumer.offsets_for_times({partition: 0}) == {partition: None}


def test_it_listens_on_the_loopback_address_only(broker: EmbeddedBroker) -> None:
    host, port = broker.address.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_it_runs_from_its_start_until_it_is_stopped() -> None:
    broker = EmbeddedBroker()
    assert not broker.running
    broker.start({"one": 1})
    assert broker.running
    broker.stop()
    broker.stop()
    assert not broker.running


def test_a_child_that_ends_at_once_is_an_error_and_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    broker = EmbeddedBroker()
    with pytest.raises(EmbeddedBrokerError, match="ended with 1"):
        broker.start({"one": 1})
    assert not broker.running


def test_files_of_the_working_directory_are_not_taken_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with EmbeddedBroker() as broker:
        broker.start({"one": 1})
        assert broker.running


def test_a_child_that_nobody_waits_for_any_more_ends_without_a_word() -> None:
    command = [sys.executable, "-m", "gpustream.embedded", '{"one": 1}']
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.stderr, result.returncode) == (b"", 0)


def test_a_run_without_its_broker_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    result = CliRunner().invoke(main, ["run", "--simulate", "1x1"])
    assert result.exit_code == 1
    assert result.stderr == "the embedded broker did not start: its process ended with 1\n"


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os\n"
        "from gpustream.embedded import EmbeddedBroker\n"
        "broker = EmbeddedBroker()\n"
        "broker.start({'one': 1})\n"
        "print(broker._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    waited = subprocess.run(["tail", f"--pid={killed.stdout.strip()}", "-f", os.devnull], timeout=LIMIT_S, check=False)
    assert waited.returncode == 0
