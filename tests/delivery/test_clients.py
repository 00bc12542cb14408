"""Clients come from one module and leave no connection open; every consumer reads only committed records."""

import asyncio
import contextlib
import gc
import re
import struct
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, RequestTimedOutError, TransactionalIdAuthorizationFailed

import delivery.clients
from delivery import opening
from delivery.clients import explain
from delivery.connection import Connection
from delivery.quotas import Quotas

ROOT = Path(delivery.clients.__file__).parents[1]
METADATA = 3
PACKAGES = ("delivery", "docs/consumers", "gpustream", "producers", "sinks", "streams", "topics")


def test_every_client_is_imported_from_the_module_that_ensures_that() -> None:
    sources = [
        path
        for folder in ("delivery", "gpustream", "producers", "sinks", "streams", "topics")
        for path in (ROOT / folder).rglob("*.py")
    ]
    imports = [
        (path, line)
        for path in sources
        for line in path.read_text().splitlines()
        if line.startswith("from aiokafka") and re.search(r"AIOKafka(Consumer|Producer|Admin)", line)
    ]

    assert {path.relative_to(ROOT).as_posix() for path, _ in imports} == {"delivery/clients.py"}


def test_every_consumer_reads_committed_records_except_those_that_look_what_can_not_be_read_yet() -> None:
    levels_by_path = {
        path.relative_to(ROOT).as_posix(): re.findall(r'"?isolation_level"?(?:=|: )"(\w+)"', path.read_text())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: levels for path, levels in levels_by_path.items() if levels} == {
        "delivery/clients.py": ["read_committed", "read_uncommitted"],
        "delivery/kafka_admin.py": ["read_uncommitted"],
        "gpustream/doctor/gather.py": ["read_uncommitted"],
        "docs/consumers/gpu_hours.py": ["read_committed"],
    }


async def test_a_batch_that_may_be_stored_already_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = delivery.clients.producer(Connection("127.0.0.1:1"))
    accumulator = producer._message_accumulator
    batch = accumulator._append_batch(accumulator.create_builder(), TopicPartition("gpu.samples", 0))
    created_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: created_s + 86_400)
    assert not batch.expired()
    await producer.stop()


async def test_a_producer_waits_for_room_in_a_partition_for_as_long_as_it_takes() -> None:
    producer = delivery.clients.producer(Connection("127.0.0.1:1"), request_timeout_ms=10, max_batch_size=1000)
    producer.client._wait_on_metadata, producer._partition = AsyncMock(), lambda *_: 0
    await producer.send("t", b"a" * 900)
    full = asyncio.create_task(producer.send("t", b"b" * 900))
    ended, _ = await asyncio.wait([full], timeout=0.1)
    assert not ended, full.exception()
    full.cancel()
    await asyncio.wait([full])
    await delivery.clients.close(producer)


class HalfABroker:
    """Accepts connections and reports its API versions, but never answers for metadata."""

    def __init__(self) -> None:
        self.metadata_requested, self.ended = asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size, _, _, correlation_id = struct.unpack(">ihhi", await reader.readexactly(12))
        await reader.readexactly(size - 8)
        writer.write(struct.pack(">iihihhh", 16, correlation_id, 0, 1, METADATA, 0, 4))
        await reader.readexactly(1)
        self.metadata_requested.set()
        await reader.read()
        self.ended.set()
        writer.close()


@pytest.fixture
async def half_broker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[HalfABroker, Connection]]:
    broker = HalfABroker()
    async with await asyncio.start_server(broker.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        connection = Connection(f"{host}:{port}")
        known_broker = opening._Broker()
        known_broker.opened()  # so that no greeting is sent to it
        monkeypatch.setattr(opening, "_brokers", {(connection, host, port): known_broker})
        yield broker, connection


@pytest.mark.parametrize("make", [delivery.clients.consumer, delivery.clients.producer])
async def test_a_client_that_is_cancelled_while_it_bootstraps_leaves_no_connection_open(
    half_broker: tuple[HalfABroker, Connection], make: Callable[[Connection], Any]
) -> None:
    broker, connection = half_broker
    starting = asyncio.create_task(delivery.clients.start_client(lambda: make(connection), connection))
    await broker.metadata_requested.wait()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        starting.cancel()
        await asyncio.wait([starting])
        await broker.ended.wait()
        gc.collect()
    assert [str(warning.message) for warning in warned if "AIOKafkaConnection" in str(warning.message)] == []


async def test_a_client_that_may_not_use_its_transactional_id_is_not_started_again() -> None:
    refused = AsyncMock(side_effect=[TransactionalIdAuthorizationFailed("t"), None])
    client = SimpleNamespace(start=refused, stop=AsyncMock())
    with pytest.raises(TransactionalIdAuthorizationFailed):
        await delivery.clients.start_client(lambda: client, Connection("k:1"), backoff_s=(0.0,))
    client.stop.assert_awaited_once()


async def test_a_client_whose_stop_takes_too_long_leaves_no_connection_open_and_opens_none(
    half_broker: tuple[HalfABroker, Connection], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker, connection = half_broker
    client = delivery.clients.consumer(connection)
    starting = asyncio.create_task(client.start())
    await broker.metadata_requested.wait()
    monkeypatch.setattr(delivery.clients, "_CLOSE_TIMEOUT_S", 0)
    monkeypatch.setattr(client, "stop", asyncio.Event().wait)
    await delivery.clients.close(client)
    await broker.ended.wait()
    with pytest.raises(KafkaConnectionError):
        await starting
    caplog.clear()
    with pytest.raises(KafkaConnectionError):
        await client.start()
    assert caplog.text == "", "what goes on in it is nobody's trouble"
    monkeypatch.undo()
    await client.stop()


async def test_a_client_stops_though_its_fetcher_swallows_a_cancellation() -> None:
    async def fetch() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    fetching = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    client = SimpleNamespace(_fetcher=SimpleNamespace(_fetch_task=fetching), stop=AsyncMock())
    await delivery.clients.close(client)
    assert fetching.done()
    client.stop.assert_awaited_once_with()


async def test_a_client_whose_closing_is_cancelled_is_stopped_nevertheless() -> None:
    cancelled, over, stop = asyncio.Event(), asyncio.Event(), AsyncMock()

    async def fetch() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            cancelled.set()

    fetching = asyncio.create_task(fetch())
    await asyncio.sleep(0)
    client = SimpleNamespace(_fetcher=SimpleNamespace(_fetch_task=fetching), stop=stop)
    closing = asyncio.create_task(delivery.clients.close(client))
    await cancelled.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    over.set()
    stop.assert_awaited_once_with()


async def test_a_command_that_looks_up_offsets_gives_up_a_broker_that_does_not_answer() -> None:
    client = delivery.clients.OffsetClient(Connection("127.0.0.1:1"), client_id="c", connect_within_s=0.01)
    async with asyncio.timeout(60):
        for lookup in (client.connect(), client.times({}), client.log_ends([])):
            with pytest.raises(KafkaConnectionError, match="no answer within 0 s"):
                await lookup
    await client.close()


def test_a_broker_that_does_not_answer_because_of_a_quota_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery.clients, "QUOTAS", quotas := Quotas())
    silent = "no Kafka broker answers at k:1 (RequestTimedOutError): "
    assert explain(RequestTimedOutError(), Connection("k:1")) == f"{silent}is one up there, for clients?"
    quotas.note("gpustream-topics", "CreateTopicsRequest", 200.0)
    expected = f"{silent}a quota of Kafka holds it up: raise its controller_mutation_rate or request_percentage"
    assert explain(RequestTimedOutError(), Connection("k:1")) == expected
