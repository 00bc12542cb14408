"""What scales to no pod: how many pods KEDA wants, by the offsets that our consumer groups really commit."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.eventually import eventually
from tests.k8s.manifests import OBJECTS, Manifest
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer
from tests.sinks.alerts import alert
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS

PARTITIONS = 4
ASK_S = 10.0
SCALED = {manifest.name: manifest.content["spec"] for manifest in OBJECTS if manifest.kind == "ScaledObject"}


def lag_of(committed: int, end: int, trigger: Manifest) -> int:
    """KEDA's lag of a partition. Of one without a committed offset it knows nothing, and guesses."""
    if committed < 0:
        if trigger.get("scaleToZeroOnInvalidOffset") == "true":
            return 0  # never wakes up
        return 1 if trigger.get("offsetResetPolicy", "latest") == "latest" else end  # may never sleep
    return end - committed


def replicas(kafka: KafkaServer, spec: Manifest) -> int:
    """How many pods KEDA and its HorizontalPodAutoscaler want for a ScaledObject with a Kafka trigger alone."""
    (trigger,) = [candidate["metadata"] for candidate in spec["triggers"]]
    topic = trigger["topic"]
    tps = [TopicPartition(topic, number) for number in range(kafka.topics()[topic])]
    asking = Consumer({"bootstrap.servers": kafka.address, "group.id": trigger["consumerGroup"]})  # it joins nothing
    try:
        committed = asking.committed(tps, timeout=ASK_S)
        ends = [asking.get_watermark_offsets(tp, timeout=ASK_S)[1] for tp in tps]
    finally:
        asking.close()
    lag = sum(lag_of(tp.offset, end, trigger) for tp, end in zip(committed, ends, strict=True))
    if lag <= int(trigger.get("activationLagThreshold", "0")):
        return int(spec["minReplicaCount"])
    return max(1, min(math.ceil(lag / int(trigger["lagThreshold"])), len(tps), int(spec["maxReplicaCount"])))


async def write(kafka: KafkaServer, topic: str, values: list[tuple[bytes, bytes | None]]) -> None:
    """Writes records, all into one partition: the others stay empty."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for key, value in values:
            await producer.send_and_wait(topic, value, key=key, partition=1)


ALERTS = [alert(f"pod-{number}") for number in range(3)]
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "webhook": ("--url", "{url}", "--unsigned", "--from", "latest"),
    "parquet": ("--path", "{path}", "--write-every", "50ms"),
}
RECORDS: dict[str, list[tuple[bytes, bytes | None]]] = {
    "webhook": [(alert.fingerprint.encode(), msgspec.json.encode(alert)) for alert in ALERTS],
    "parquet": [(b"k", msgspec.json.encode(usage(start_ms=START_MS + number * HOUR_MS))) for number in range(3)],
}


@pytest.mark.parametrize("name", ["webhook", "parquet"])
async def test_a_sink_without_work_is_scaled_to_no_pod_and_a_record_starts_one(
    empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream], receiver: str, tmp_path: Path, name: str
) -> None:
    spec: Any = SCALED[name]
    topic = spec["triggers"][0]["metadata"]["topic"]
    empty_kafka.create_ours({topic: PARTITIONS, "gpu.dead-letters": 1})
    first, second, third = RECORDS[name]
    await write(empty_kafka, topic, [first])

    async def wants(pods: int) -> bool:
        try:
            return await asyncio.to_thread(replicas, empty_kafka, spec) == pods
        except KafkaException:  # a broker that has just begun does not know its groups yet
            return False

    await eventually(lambda: wants(1), "a group that has never committed is started, to say where it begins")
    arguments = [argument.format(url=receiver, path=tmp_path) for argument in ARGUMENTS[name]]
    sink = gpustream(name, "sink", name, "--kafka", empty_kafka.address, *arguments)
    await asyncio.to_thread(sink.start)
    await eventually(lambda: wants(0), "nothing is left to do")
    await asyncio.to_thread(sink.stop)
    assert await wants(0), "it sleeps"
    await write(empty_kafka, topic, [second, third])
    assert await wants(1), "a record wakes it"
    await asyncio.to_thread(sink.start)
    await eventually(lambda: wants(0), "it has done its work")
    await asyncio.to_thread(sink.stop)
