"""Records as large as Kafka's topics take, and one that is larger once it is attributed: each ends, others go on."""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import msgspec
from aiohttp import web
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.pipeline import lag, read_all, running
from tests.real.servers import KafkaServer, PrometheusServer
from tests.real.test_remote_write import Forward, receiver
from topics.topic import MAX_MESSAGE_BYTES, node_key

DEVICES = 2300
LARGE_REQUEST = 20_000
"""Bytes of a request, compressed, that only so many devices take."""

ROOM = 64
"""Bytes that attribution adds to such a tick, at least."""

CLUSTER = "sizes"
OTHERS = [f"node-{number}" for number in range(5)]


def tick(node: str, seq: int, ts_ms: int, devices: int = 1, size: int = 0) -> bytes:
    """A node's tick, of so many bytes if ``size`` is given: what its devices are makes it so large."""

    def encoded(serial: int, last: int) -> bytes:
        device_list: list[dict[str, Any]] = [
            {"uuid": f"GPU-{node}-{number}", "index": number, "info": {"serial": "0" * serial}}
            for number in range(devices)
        ]
        device_list[-1]["info"]["serial"] += "0" * last
        for device in device_list:
            device["metrics"] = {"gpu_utilization_ratio": seq / 1000}
        header = {"schema": 1, "cluster": CLUSTER, "node": node, "run_id": 1, "seq": seq, "ts_ms": ts_ms}
        return msgspec.json.encode({**header, "devices": device_list})

    padding, remainder = divmod(max(0, size - len(encoded(0, 0))), devices)
    return encoded(padding, remainder)


async def test_a_record_near_the_limit_arrives_and_one_that_grows_past_it_is_a_dead_letter_and_no_other_node_waits(
    empty_kafka: KafkaServer, prometheus: PrometheusServer
) -> None:
    await topic_admin.create(empty_kafka.connection, partitions=1, replication_factor=1)
    now_ms = int(time.time() * 1000)
    ticks = [(node, tick(node, 1, now_ms - 3000)) for node in OTHERS]
    ticks += [("large", tick("large", 1, now_ms - 4000, DEVICES, MAX_MESSAGE_BYTES * 15 // 16))]
    ticks += [(node, tick(node, 2, now_ms - 2000)) for node in OTHERS]
    ticks += [("large", tick("large", 2, now_ms - 2000, DEVICES, MAX_MESSAGE_BYTES - ROOM))]
    ticks += [(node, tick(node, 3, now_ms - 1000)) for node in [*OTHERS, "large"]]
    async with AIOKafkaProducer(
        bootstrap_servers=empty_kafka.address, max_request_size=2 * MAX_MESSAGE_BYTES, compression_type="zstd"
    ) as producer:
        for node, value in ticks:
            await producer.send_and_wait("gpu.samples", value, key=node_key(CLUSTER, node))
    outcomes: Counter[str] = Counter()

    async def committed() -> bool:
        return await lag(empty_kafka.address, "gpustream-attribution", ["gpu.samples"]) == 0

    async def others_are_stored() -> bool:
        selector = f'gpu_utilization{{k8s_cluster_name="{CLUSTER}",k8s_node_name!="large"}}[1m]'
        return sum(len(series.points) for series in await asyncio.to_thread(prometheus.query, selector)) == 3 * len(
            OTHERS
        )

    async def hold_what_is_large(request: web.Request, forward: Forward) -> web.StreamResponse:
        if (request.content_length or 0) > LARGE_REQUEST:
            held_sizes.append(request.content_length or 0)
            await eventually(others_are_stored, "the ticks of all other nodes, while the large one is under way")
        return await forward()

    held_sizes: list[int] = []
    async with receiver(prometheus, hold_what_is_large) as url:
        settings = RemoteWriteSettings(kafka=empty_kafka.address, url=url, from_="earliest")
        sink = RemoteWriteSink(
            settings, lambda _c, node, _run, seq, outcome: outcomes.update([f"{node} {seq} {outcome}"])
        )
        stream = Attribution(AttributionSettings(kafka=empty_kafka.address))
        async with running(stream, sink):
            await eventually(lambda: outcomes.total() == len(ticks) - 1, "all ticks but one have arrived")
            await eventually(committed, "all is committed")
    assert held_sizes
    arrived = [(node, seq) for node in OTHERS for seq in (1, 2, 3)] + [("large", 1), ("large", 3)]
    attributed = [json.loads(record.value) for record in await read_all(empty_kafka.address, "gpu.attributed")]
    assert (
        sorted([(sample["node"], sample["seq"]) for sample in attributed], key=lambda key: (key[0] == "large", key[0]))
        == arrived
    )
    assert outcomes == Counter(f"{node} {seq} delivered" for node, seq in arrived)
    (letter,) = await read_all(empty_kafka.address, "gpu.dead-letters")
    headers = {name: value.decode() for name, value in letter.headers}
    assert (headers["stage"], headers["offset"], letter.key) == ("attribution", "11", node_key(CLUSTER, "large"))
    assert headers["error"].startswith("unsendable: ")
    books = assert_accounted(stream.registry)["attribution", "gpu.samples"]
    assert (books["records_delivered_total"], books["records_dead_lettered_total"]) == (len(ticks) - 1, 1)
    for node, at_ms, devices in (("large", now_ms - 4000, DEVICES), ("large", now_ms - 500, 1), ("node-4", now_ms, 1)):
        selector = f'{{k8s_cluster_name="{CLUSTER}",k8s_node_name="{node}"}}'
        (series,) = await asyncio.to_thread(prometheus.query, f"count(gpu_utilization{selector})", at_ms)
        assert series.points[0][1] == devices
