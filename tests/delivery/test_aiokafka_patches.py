"""aiokafka creates no topic, and asks, compresses and closes as the patches say."""

import asyncio
import gc
import struct
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiokafka.admin.client
import aiokafka.client
import cramjam
import pytest
from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.consumer import fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import GroupAuthorizationFailedError, KafkaConnectionError
from aiokafka.protocol.admin import CreateTopicsRequest, CreateTopicsResponse_v3
from aiokafka.protocol.commit import OffsetFetchResponse_v3
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v4
from aiokafka.protocol.group import HeartbeatRequest, HeartbeatResponse_v1
from aiokafka.protocol.metadata import MetadataResponse_v5
from aiokafka.protocol.produce import ProduceRequest, ProduceResponse_v1
from aiokafka.record.default_records import (
    DefaultRecordBatch,
    DefaultRecordBatchBuilder,
    _DefaultRecordBatchBuilderPy,
)
from aiokafka.structs import OffsetAndMetadata

from delivery import aiokafka_patches
from delivery.quotas import Quotas
from tests.eventually import eventually

METADATA = 3
GZIP, LZ4, ZSTD = 1, 3, 4  # codecs of Kafka's record batch of version 2
RECORDS_AT = 61  # where its records begin


@pytest.mark.parametrize("module", [aiokafka.client, aiokafka.admin.client])
@pytest.mark.parametrize("names", [None, ["gpu.samples"]])
def test_a_metadata_request_forbids_the_creation_of_topics(module: object, names: list[str] | None) -> None:
    request = module.MetadataRequest(names).prepare({METADATA: (0, 12)})  # type: ignore[attr-defined]

    assert request.to_object() == {"topics": names, "allow_auto_topic_creation": False}


def test_a_batch_of_zstd_is_compressed_at_level_1() -> None:
    values = [bytes(f"{number * 7919}", "ascii") for number in range(1000)]
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=ZSTD, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=0,
        batch_size=1 << 20,
    )  # fmt: skip
    for offset, value in enumerate(values):
        assert builder.append(offset, timestamp=0, key=None, value=value, headers=[]) is not None
    batch = builder.build()
    records = bytes(batch[RECORDS_AT:])
    plain = bytes(cramjam.zstd.decompress(records))

    assert records == bytes(cramjam.zstd.compress(plain, level=1)) != bytes(cramjam.zstd.compress(plain, level=3))
    assert [record.value for record in DefaultRecordBatch(bytes(batch))] == values


def leaders(*of_partitions: int) -> MetadataResponse_v5:
    """Metadata of the topic "ticks" with these leaders."""
    partitions: list[Any] = [(0, number, leader, [1], [1], []) for number, leader in enumerate(of_partitions)]
    return MetadataResponse_v5(0, [(1, "k", 9092, None)], "c", 1, [(0, "ticks", False, partitions)])


@pytest.mark.parametrize(
    ("metadata", "topics", "pauses"),
    [
        pytest.param(leaders(1, 1), ["ticks"], [], id="all"),
        pytest.param(leaders(1, -1), ["ticks"], [0.25], id="a leader is missing"),
        pytest.param(leaders(1, -1), None, [0.25], id="a leader of any topic is missing"),
        pytest.param(leaders(1, 1), ["ticks", "tocks"], [0.25], id="a topic is missing"),
        pytest.param(None, ["ticks"], [0.1], id="no broker answers"),
    ],
)
async def test_a_client_waits_after_metadata_that_lack_a_leader_or_a_topic(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float], metadata: Any, topics: Any, pauses: list[float]
) -> None:
    async def ask(client: object, cluster: ClusterMetadata, topics: object) -> bool:
        if metadata is not None:
            cluster.update_metadata(metadata)
        return metadata is not None

    monkeypatch.setattr(aiokafka_patches, "_metadata_update", ask)
    client, cluster = SimpleNamespace(_retry_backoff=0.25), ClusterMetadata(metadata_max_age_ms=1000)

    assert await aiokafka.client.AIOKafkaClient._metadata_update(client, cluster, topics) is (metadata is not None)
    assert pauses_s == pauses


@pytest.mark.parametrize(("code", "pauses"), [(0, []), (6, [0.25]), (-1, [0.25])])
async def test_a_client_waits_after_a_fetch_that_a_broker_refuses(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float], code: int, pauses: list[float]
) -> None:
    response = FetchResponse_v4(0, [("ticks", [(0, 0, 10, 10, [], b""), (1, code, -1, -1, None, b"")])])
    monkeypatch.setattr(aiokafka_patches, "_send", AsyncMock(return_value=response))
    client, request = SimpleNamespace(_retry_backoff=0.25, _client_id="c"), FetchRequest(1, 1, 1, 0, [])

    assert await aiokafka.client.AIOKafkaClient.send(client, 1, request) is response
    assert pauses_s == pauses


async def test_a_client_keeps_which_partitions_a_broker_does_not_store_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = SimpleNamespace(_client_id="c")

    async def answer(**codes: int) -> dict[tuple[str, int], int]:
        response = ProduceResponse_v1([(topic, [(1, code, 0)]) for topic, code in codes.items()], 0)
        monkeypatch.setattr(aiokafka_patches, "_send", AsyncMock(return_value=response))
        await aiokafka.client.AIOKafkaClient.send(client, 1, ProduceRequest(None, -1, 1000, []))
        refused: dict[tuple[str, int], int] = client.refused
        return refused

    assert await answer(ticks=19, alerts=19) == {("ticks", 1): 19, ("alerts", 1): 19}
    assert await answer(ticks=0) == {("alerts", 1): 19}
    assert await answer(alerts=0) == {}


@pytest.mark.parametrize(
    ("request_", "response", "quotas"),
    [
        (FetchRequest(1, 1, 1, 0, []), FetchResponse_v4(2500, []), "consumer_byte_rate or request_percentage"),
        (HeartbeatRequest("g", 1, "m"), HeartbeatResponse_v1(1000, 0), "request_percentage"),
        (
            CreateTopicsRequest([], 1000, False),
            CreateTopicsResponse_v3(1000, []),
            "controller_mutation_rate or request_percentage",
        ),
    ],
)
async def test_a_broker_that_holds_a_client_up_by_a_quota_is_logged_with_the_quota(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request_: Any, response: Any, quotas: str
) -> None:
    monkeypatch.setattr(aiokafka_patches, "QUOTAS", Quotas())
    monkeypatch.setattr(aiokafka_patches, "_send", AsyncMock(return_value=response))

    await aiokafka.client.AIOKafkaClient.send(SimpleNamespace(_client_id="gpustream-usage"), 1, request_)

    expected = f"client gpustream-usage: a quota of Kafka holds it up: raise its {quotas} ("
    assert [message.startswith(expected) for message in caplog.messages] == [True]


def coordinator_with(send: AsyncMock) -> Any:
    """A member of the group "g", whose requests to its coordinators, 1 and then 2, are sent by ``send``."""
    client = Mock(
        send=send,
        coordinator_lookup=AsyncMock(return_value=2),
        ready=AsyncMock(),
        force_metadata_update=AsyncMock(),
    )
    coordinator: Any = GroupCoordinator(client, SubscriptionState(), group_id="g", retry_backoff_ms=1)
    coordinator.coordinator_id = 1
    return coordinator


async def commits_by(*answers: OffsetFetchResponse_v3) -> Any:
    """The group's commits, by these answers."""
    coordinator = coordinator_with(AsyncMock(side_effect=answers))
    try:
        return await coordinator.fetch_committed_offsets([TopicPartition("ticks", 0)])
    finally:
        await coordinator.close()


@pytest.mark.parametrize("code", [14, 15, 16])
async def test_a_commit_that_the_coordinator_can_not_give_yet_is_requested_again(
    pauses_s: list[float], code: int
) -> None:
    commits = await commits_by(
        OffsetFetchResponse_v3(0, [], code), OffsetFetchResponse_v3(0, [("ticks", [(0, 7, "", 0)])], 0)
    )
    assert commits == {TopicPartition("ticks", 0): OffsetAndMetadata(7, "")}
    assert max(pauses_s) == 0.5


async def test_whoever_may_not_read_the_group_gets_an_error_and_not_that_there_is_no_commit(
    pauses_s: list[float],
) -> None:
    with pytest.raises(GroupAuthorizationFailedError, match="g"):
        await commits_by(OffsetFetchResponse_v3(0, [], 30))


async def test_the_error_of_a_commit_for_which_nobody_waits_any_more_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered = asyncio.Event()

    async def send(*_: Any, **__: Any) -> None:
        await answered.wait()
        raise KafkaConnectionError

    coordinator = coordinator_with(AsyncMock(side_effect=send))
    offsets = {TopicPartition("ticks", 0): OffsetAndMetadata(7, "")}
    committing = asyncio.ensure_future(coordinator.commit_offsets(None, offsets))
    await eventually(lambda: coordinator._client.send.called, every_s=0)
    committing.cancel()
    await asyncio.wait([committing])
    answered.set()
    await eventually(lambda: coordinator.coordinator_id is None, every_s=0)
    await coordinator.close()
    gc.collect()

    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_a_connection_that_a_broker_ended_is_closed_before_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker.append(writer)
        _, api, _, correlation_id = struct.unpack(">ihhi", await reader.readexactly(12))
        writer.write(struct.pack(">iihihhh", 16, correlation_id, 0, 1, api, 0, 0))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        client: Any = aiokafka.client.AIOKafkaClient(bootstrap_servers=f"{host}:{port}")
        brokers: list[Any] = [SimpleNamespace(host=host, port=port), None]  # then it is missing from the metadata, too
        monkeypatch.setattr(client.cluster, "broker_metadata", lambda node_id: brokers.pop(0))
        connection = await client._get_conn(0)
        reader, transport = connection._reader, connection._writer.transport
        del connection
        broker[0].close()
        await eventually(reader.at_eof, every_s=0)  # only until then: aiokafka itself sees it next
        assert await client._get_conn(0) is None
        assert transport.is_closing()
        await client.close()


@pytest.mark.slow
def test_an_aiokafka_without_what_is_changed_is_refused_at_the_start_with_its_version_and_what_is_missing() -> None:
    changes = (
        "aiokafka.admin.client.MetadataRequest = dict.fromkeys",
        "AIOKafkaClient._get_conn = lambda self, node: None",
        "del GroupCoordinator._do_commit_offsets",
        "MessageAccumulator.__init__ = lambda self: None",
    )
    program = f"""
import aiokafka.admin.client
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.producer.message_accumulator import MessageAccumulator

for change in {changes!r}:
    exec(change)
try:
    import delivery.clients
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()

    assert said == (
        f"aiokafka {aiokafka.__version__} does not have"
        " aiokafka.admin.client.MetadataRequest(topics, allow_auto_topic_creation) and"
        " AIOKafkaClient._get_conn(self, node_id, group, no_hint) and"
        " GroupCoordinator._do_commit_offsets(self, assignment, offsets) and"
        " MessageAccumulator._batch_ttl, which gpustream changes: aiokafka 0.14.0 is the one to install"
    )


class NotUtf8(str):
    """The name of a header, as a client of another language may write it."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xff" + super().encode(encoding, errors)


def written(first: int, names: list[str], codec: int = 0, producer_id: int = -1) -> bytes:
    """A batch from this offset on: a record for each name, which its header has. Transactional if it has a producer."""
    builder = _DefaultRecordBatchBuilderPy(2, codec, int(producer_id >= 0), producer_id, 0, 0, 1 << 20)
    for offset, name in enumerate(names):
        assert builder.append(offset, 1, b"k", str(offset).encode(), [(name, b"v")]) is not None
    batch = builder.build()
    struct.pack_into(">q", batch, 0, first)
    return bytes(batch)


@pytest.mark.parametrize("codec", [0, ZSTD])
def test_a_header_whose_name_is_no_utf_8_ends_no_reader(codec: int) -> None:
    tp = TopicPartition("gpu.samples", 0)
    fetched = b"".join(
        (
            written(10, ["a", "b"], codec),
            written(12, ["aborted"], codec, producer_id=7),
            written(13, ["c", NotUtf8("d"), "e"], codec),
            written(16, ["aborted"], codec, producer_id=7),
            written(17, ["f", NotUtf8("g")], codec),
        )
    )
    unread = fetcher.PartitionRecords(
        tp, fetcher.MemoryRecords(fetched), [(7, 12)], 11, None, None, True, fetcher.READ_COMMITTED
    )
    names = [(record.offset, record.value, *dict(record.headers), unread.next_fetch_offset) for record in unread]
    assert names == [
        (11, b"1", "b", 12), (13, b"0", "c", 14), (14, b"1", "\ufffdd", 15), (15, b"2", "e", 16),
        (17, b"0", "f", 18), (18, b"1", "\ufffdg", 19),
    ]  # fmt: skip
    assert unread.next_fetch_offset == 19


@cache
def large(first: int, codec: int) -> bytes:
    """A batch of two records that is larger than anybody wants to have when it is unpacked."""
    builder = _DefaultRecordBatchBuilderPy(2, codec, 0, -1, 0, 0, 1 << 30)
    for offset in range(2):
        assert builder.append(offset, 1, b"k", bytes(aiokafka_patches.MAX_UNPACKED_BYTES // 2), []) is not None
    batch = builder.build()
    struct.pack_into(">q", batch, 0, first)
    return bytes(batch)


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
@pytest.mark.parametrize("name", ["b", NotUtf8("b")], ids=["utf-8", "no utf-8"])
def test_a_malformed_record_takes_the_place_of_a_batch_that_becomes_too_large(codec: int, name: str) -> None:
    parts = (written(10, ["a"], codec), large(11, codec), written(13, ["x", name], codec), large(15, codec))
    unread = fetcher.PartitionRecords(
        TopicPartition("gpu.samples", 0), fetcher.MemoryRecords(b"".join(parts)), [], 10, None, None, True, None
    )
    values = [(record.offset, record.key, record.value, unread.next_fetch_offset) for record in unread]

    assert values == [
        (10, b"k", b"0", 11),
        (12, None, b"offsets 11 to 12: more than 33554432 bytes when they are unpacked", 13),
        (13, b"k", b"0", 14), (14, b"k", b"1", 15),
        (16, None, b"offsets 15 to 16: more than 33554432 bytes when they are unpacked", 17),
    ]  # fmt: skip
    assert unread.next_fetch_offset == 17
