"""Malformed input: each record ends where it should, and the stream goes on."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from delivery.aiokafka_patches import MAX_UNPACKED_BYTES
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import KafkaServer

GPU = "GPU-00000000-0000-0000-0000-000000000001"
HUGE = 12 * 1024 * 1024

Send = Callable[..., Awaitable[Any]]


def tick(node: str, seq: int = 1, **fields: Any) -> dict[str, Any]:
    """A tick of a node that names no snapshot."""
    device = {"uuid": GPU, "index": 0, "metrics": {"gpu_utilization_ratio": 0.5}}
    record = {"schema": 1, "cluster": "c", "node": node, "run_id": 1, "seq": seq, "ts_ms": 1_795_219_152_000 + seq}
    return {**record, "devices": [device], **fields}


def snapshot(node: str, *device_ids: str, pod: str = "p-0") -> dict[str, Any]:
    """A snapshot in which a pod holds these devices."""
    container = {"namespace": "ns", "pod": pod, "container": "c", "resource": "nvidia.com/gpu"}
    record = {"schema": 1, "cluster": "c", "node": node, "run_id": 1, "seq": 1, "ts_ms": 1_795_219_151_000}
    return {**record, "containers": [{**container, "device_ids": list(device_ids)}]}


@pytest.fixture
async def send(empty_kafka: KafkaServer) -> Any:
    """Sends a value, as JSON unless it is bytes, and waits until it is stored; larger than any producer of ours.

    The topic has its limit from the start: a broker applies an altered one some time after it has said that it is done.
    """
    await asyncio.to_thread(empty_kafka.create_topics, {"gpu.samples": 2}, {"max.message.bytes": str(HUGE)})
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    async with AIOKafkaProducer(bootstrap_servers=empty_kafka.address, max_request_size=HUGE, acks="all") as producer:

        async def store(topic: str, value: Any, node: str = "n") -> Any:
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            return await producer.send_and_wait(topic, body, f"c/{node}".encode())

        yield store


async def attributed_until(kafka: KafkaServer, node: str) -> list[Any]:
    """The records of gpu.attributed, once one of this node is there."""
    for _ in range(60):
        records = await read_all(kafka.address, "gpu.attributed")
        if any(json.loads(record.value)["node"] == node for record in records):
            return records
        await asyncio.sleep(0.5)
    pytest.fail(f"no record of {node}")


async def dead_lettered(stream: Gpustream, topic: str, records: int) -> dict[str, int]:
    """The outcomes of the other records of a topic, once it has so many dead letters and nothing is held; the metrics
    always add up."""

    def ends() -> Counter[str] | None:
        counts = assert_accounted(stream.get("/metrics") or "")["attribution", topic]
        return counts if counts["records_dead_lettered_total"] == records and not counts["records_held"] else None

    counts = await eventually(lambda: asyncio.to_thread(ends), f"{records} dead letters of {topic} counted")
    others = counts - Counter(received=counts["received"], records_dead_lettered_total=records)
    return {end.removeprefix("records_").removesuffix("_total"): count for end, count in others.items()}


MALFORMED = {
    "truncated JSON": b'{"schema": 1, "cluster": "c"',
    "wrong types": tick("n", run_id="one"),
    "NaN": json.dumps(tick("n")).replace("0.5", "NaN").encode(),
    "an empty node name": tick(""),
    "a node name with a newline": tick("a\nb"),
    "bytes that are not UTF-8": b'{"schema": 1, "cluster": "\xff\xfe"}',
    "another schema": tick("n", schema=2),
    "no value of JSON": b"null",
    "10 MB": tick("n", padding="x" * 10_000_000),
}


async def test_each_malformed_record_is_a_dead_letter_and_the_next_tick_is_attributed(
    empty_kafka: KafkaServer, send: Send, gpustream: Callable[..., Gpustream]
) -> None:
    places = {}
    for name, value in MALFORMED.items():
        stored = await send("gpu.samples", value)
        places["gpu.samples", stored.partition, stored.offset] = name
    for topic in ("gpu.allocations", "gpu.workloads"):
        stored = await send(topic, b"{")
        places[topic, stored.partition, stored.offset] = topic
    await send("gpu.samples", tick("n"))
    stream = gpustream("stream", "stream", "attribution", "--kafka", empty_kafka.address)
    await asyncio.to_thread(stream.start)
    await attributed_until(empty_kafka, "n")
    letters = {}
    for letter in await read_all(empty_kafka.address, "gpu.dead-letters"):
        headers = {key: value.decode() for key, value in letter.headers}
        letters[headers["topic"], int(headers["partition"]), int(headers["offset"])] = (letter, headers)

    assert letters.keys() == places.keys()
    for partition, name in places.items():
        letter, headers = letters[partition]
        assert headers["stage"] == "attribution", name
        assert headers["error"], name
        assert len(letter.value) == min(int(headers["length"]), 64 * 1024), name
    assert stream.returncode is None, stream.log_tail()
    assert await dead_lettered(stream, "gpu.samples", len(MALFORMED)) == {"delivered": 1}


async def test_a_batch_that_unpacks_to_more_than_anybody_wants_is_a_dead_letter_and_leaves_the_worker_up(
    empty_kafka: KafkaServer, send: Send, gpustream: Callable[..., Gpustream]
) -> None:
    size = 4 * MAX_UNPACKED_BYTES
    async with AIOKafkaProducer(
        bootstrap_servers=empty_kafka.address, max_request_size=2 * size, compression_type="zstd"
    ) as producer:
        bomb = await producer.send_and_wait("gpu.samples", bytes(size), b"c/n")
    await send("gpu.samples", tick("n"))
    stream = gpustream("stream", "stream", "attribution", "--kafka", empty_kafka.address)
    await asyncio.to_thread(stream.start)
    await attributed_until(empty_kafka, "n")
    (letter,) = await read_all(empty_kafka.address, "gpu.dead-letters")

    assert dict(letter.headers)["offset"] == str(bomb.offset).encode()
    assert letter.value.endswith(b"bytes when they are unpacked")
    assert stream.returncode is None, stream.log_tail()
    assert await dead_lettered(stream, "gpu.samples", 1) == {"delivered": 1}


async def test_an_unknown_device_id_costs_that_device_its_holder_and_nothing_else(
    empty_kafka: KafkaServer, send: Send, gpustream: Callable[..., Gpustream]
) -> None:
    pod = 'quo"ted\nand broken'
    await send("gpu.allocations", snapshot("n", "TPU-7", GPU, pod=pod))
    await send("gpu.samples", tick("n", allocations_seq=1))
    stream = gpustream("stream", "stream", "attribution", "--kafka", empty_kafka.address)
    await asyncio.to_thread(stream.start)
    (record,) = await attributed_until(empty_kafka, "n")
    (device,) = json.loads(record.value)["devices"]

    assert [holder["pod"] for holder in device["holders"]] == [pod]
    assert "gpustream_attribution_unknown_device_ids_total 1.0" in (stream.get("/metrics") or "")


async def test_a_tick_that_is_too_large_once_enriched_is_a_dead_letter_and_leaves_the_worker_up(
    empty_kafka: KafkaServer, send: Send, gpustream: Callable[..., Gpustream]
) -> None:
    pod = {"namespace": "ns", "name": "p-0", "uid": "u", "started_ms": 0, "labels": {"big": "x" * 200_000}}
    workloads = {"schema": 1, "cluster": "c", "node": "n", "epoch": 1, "seq": 1, "ts_ms": 1, "pods": [pod]}
    devices = [{"uuid": f"{GPU[:-2]}{i:02}", "model": "m" * 150_000} for i in range(20)]
    await send("gpu.workloads", workloads)
    await asyncio.sleep(2.2)  # by then what is logged counts for samples
    await send("gpu.allocations", snapshot("n", *(str(device["uuid"]) for device in devices)))
    large = await send("gpu.samples", tick("n", allocations_seq=1, devices=devices))
    await send("gpu.samples", tick("n", seq=2, allocations_seq=1))
    stream = gpustream("stream", "stream", "attribution", "--kafka", empty_kafka.address)
    await asyncio.to_thread(stream.start)
    (record,) = await attributed_until(empty_kafka, "n")
    (letter,) = await read_all(empty_kafka.address, "gpu.dead-letters")
    headers = {key: value.decode() for key, value in letter.headers}

    assert json.loads(record.value)["seq"] == 2
    assert (headers["topic"], int(headers["offset"])) == ("gpu.samples", large.offset)
    assert headers["error"].startswith("unsendable")
    assert stream.returncode is None, stream.log_tail()
    assert await dead_lettered(stream, "gpu.samples", 1) == {"delivered": 1}


async def test_a_node_whose_snapshots_never_come_does_not_delay_the_others(
    empty_kafka: KafkaServer, send: Send, gpustream: Callable[..., Gpustream]
) -> None:
    nodes = [f"n{i}" for i in range(199)]
    patient = gpustream("patient", "stream", "attribution", "--kafka", empty_kafka.address, "--grace", "1h")
    await asyncio.to_thread(patient.start)
    for node in nodes:
        await send("gpu.allocations", snapshot(node, GPU), node)
    await send("gpu.samples", tick("lost", allocations_seq=1), "lost")
    for node in nodes:
        await send("gpu.samples", tick(node, allocations_seq=1), node)

    async def attributed() -> set[tuple[str, str]]:
        records = [json.loads(record.value) for record in await read_all(empty_kafka.address, "gpu.attributed")]
        return {(record["node"], record["attribution"]) for record in records}

    async def all_but_the_lost() -> bool:
        return await attributed() == {(node, "exact") for node in nodes}

    await eventually(all_but_the_lost, "the others are attributed while one waits", every_s=0.5)
    await asyncio.to_thread(patient.stop)
    impatient = gpustream("impatient", "stream", "attribution", "--kafka", empty_kafka.address, "--grace", "1s")
    await asyncio.to_thread(impatient.start)
    await attributed_until(empty_kafka, "lost")
    assert await attributed() == {("lost", "none"), *((node, "exact") for node in nodes)}
