"""``gpustream replay`` on a real Kafka: the same records under a higher generation, whatever becomes of the process."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import TopicPartition as TheirPartition

from tests.eventually import eventually
from tests.gpustream.test_replay import START_MS, Read, live, tick
from tests.real.pipeline import read_all
from tests.real.servers import KafkaServer
from topics.topic import decoder
from topics.usage import HOUR_MS, HOURS, MINUTES, Usage

PARTITIONS = 2
NODES = 4
TIME = ("--from", "2026-11-21T00:00", "--to", "2026-11-21T03:00")
assert START_MS == 1_795_215_600_000  # 2026-11-20 23:00 UTC


@pytest.fixture
def usage_kafka(empty_kafka: KafkaServer) -> KafkaServer:
    """Kafka with the topics of usage."""
    empty_kafka.create_ours(dict.fromkeys(("gpu.attributed", HOURS.name, MINUTES.name), PARTITIONS))
    return empty_kafka


def log_of(node: int, hours: int) -> Iterator[Read]:
    """A node's ticks, whose pods come and go."""
    chance = random.Random(node)
    for seq in range(1, hours * 180):
        pod = chance.choice(["a", "b", None])
        yield tick(node, seq, seq * 20_000 + node * 100, pod, chance.random(), 50)


async def write(kafka: KafkaServer, ticks: Sequence[Read], records: Sequence[Usage]) -> None:
    """Puts ticks and records of usage into the partitions of their nodes."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, linger_ms=20) as producer:
        for sample in ticks:
            partition = int(sample.key[-1:]) % PARTITIONS
            await producer.send("gpu.attributed", sample.value, key=sample.key, partition=partition)
        for record in records:
            topic = HOURS if record.end_ms - record.start_ms == HOUR_MS else MINUTES
            value, partition = msgspec.json.encode(record), int(record.node[-1]) % PARTITIONS
            await producer.send(topic.name, value, key=record.key.encode(), partition=partition)


async def counting(kafka: KafkaServer) -> dict[bytes, Usage]:
    """The records that count, by topic and key."""
    newest: dict[bytes, Usage] = {}
    for topic in (HOURS.name, MINUTES.name):
        for record in await read_all(kafka.address, topic):
            usage, key = decoder(Usage)(record.value), topic.encode() + record.key
            if key not in newest or newest[key].order < usage.order:
                newest[key] = usage
    return newest


def replay(kafka: KafkaServer, *time: str) -> "subprocess.CompletedProcess[str]":
    arguments = ("-m", "gpustream", "replay", "--kafka", kafka.address, *time)
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120)


async def test_usage_is_written_again_under_a_higher_generation_and_wrong_records_become_zero(
    usage_kafka: KafkaServer,
) -> None:
    ticks = [tick for node in range(NODES) for tick in log_of(node, 6)]
    final = [usage for usage in live(ticks, START_MS + 12 * HOUR_MS) if usage.final]
    wrong_usage = [
        msgspec.structs.replace(usage, pod="wrong", pod_uid="w") for usage in final if usage.category == "held"
    ]
    await write(usage_kafka, ticks, [*final[::2], *wrong_usage])  # half of it was never written
    first_replay = await asyncio.to_thread(replay, usage_kafka, *TIME)
    assert first_replay.returncode == 0, first_replay.stderr
    assert "4 nodes" in first_replay.stdout
    assert "generation 1" in first_replay.stdout

    inside = _within(final)
    by_key = {usage.key: usage for usage in (await counting(usage_kafka)).values() if usage.generation}
    expected = [msgspec.structs.replace(usage, generation=1) for usage in inside]
    written_usage = sorted(
        msgspec.json.encode(usage) for usage in await _all(usage_kafka) if usage.generation and usage.pod != "wrong"
    )
    assert written_usage == sorted(map(msgspec.json.encode, expected))
    zeros = [usage for usage in by_key.values() if usage.pod == "wrong"]
    assert len(zeros) == len({usage.key for usage in _within(wrong_usage)})
    assert {usage.slice_ms + usage.device_ms + usage.used_us for usage in zeros} == {0}

    last = await asyncio.to_thread(replay, usage_kafka, *TIME)
    assert "generation 2" in last.stdout
    answer = await asyncio.to_thread(_usage, usage_kafka)
    held_ms: dict[str, int] = {}
    for usage in inside:
        if usage.category == "held" and usage.end_ms - usage.start_ms == HOUR_MS:
            held_ms[f"{usage.namespace}/{usage.pod}"] = (
                held_ms.get(f"{usage.namespace}/{usage.pod}", 0) + usage.device_ms
            )
    assert {row["by"]: row["held_ms"] for row in answer["rows"]} == held_ms


def _within(records: Sequence[Usage]) -> list[Usage]:
    return [
        usage for usage in records if usage.start_ms >= START_MS + HOUR_MS and usage.end_ms <= START_MS + 4 * HOUR_MS
    ]


async def _all(kafka: KafkaServer) -> list[Usage]:
    rows = [*await read_all(kafka.address, HOURS.name), *await read_all(kafka.address, MINUTES.name)]
    return [decoder(Usage)(record.value) for record in rows]


def _usage(kafka: KafkaServer) -> dict[str, list[dict[str, int | str]]]:
    """What `gpustream usage` answers."""
    arguments = ("-m", "gpustream", "usage", "--kafka", kafka.address, "--by", "pod", "--format", "json", *TIME)
    completed = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    answer: dict[str, list[dict[str, int | str]]] = json.loads(completed.stdout)
    return answer


async def test_a_replay_that_was_killed_is_run_again(usage_kafka: KafkaServer) -> None:
    ticks = [tick for node in range(NODES) for tick in log_of(node, 6)]
    final = [usage for usage in live(ticks, START_MS + 12 * HOUR_MS) if usage.final]
    await write(usage_kafka, ticks, final)
    before = {key: msgspec.structs.replace(usage, generation=0) for key, usage in (await counting(usage_kafka)).items()}
    arguments = ("-m", "gpustream", "replay", "--kafka", usage_kafka.address, *TIME)
    killed = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    await eventually(lambda: _grown(usage_kafka, len(final)), "something written again")
    if killed.returncode is None:
        killed.kill()
    await killed.wait()
    second_replay = await asyncio.to_thread(replay, usage_kafka, *TIME)
    assert second_replay.returncode == 0, second_replay.stderr
    after = await counting(usage_kafka)
    assert {key: msgspec.structs.replace(usage, generation=0) for key, usage in after.items()} == before
    assert {usage.generation for usage in _within(list(after.values()))} <= {1, 2}


async def _grown(kafka: KafkaServer, records: int) -> bool:
    return len(await _all(kafka)) > records


async def test_an_hour_in_which_gpu_attributed_was_created_again_is_left_as_it_was_booked(
    usage_kafka: KafkaServer,
) -> None:
    ticks = [tick for node in range(NODES) for tick in log_of(node, 6)]
    final = [usage for usage in live(ticks, START_MS + 12 * HOUR_MS) if usage.final]
    await write(usage_kafka, [tick for tick in ticks if tick.timestamp >= START_MS + HOUR_MS * 3 // 2], final)
    before = await counting(usage_kafka)
    replayed = await asyncio.to_thread(replay, usage_kafka, *TIME)
    assert replayed.returncode == 0, replayed.stderr
    assert "4 hours of nodes left as before: gpu.attributed has a part" in replayed.stderr
    after = await counting(usage_kafka)
    assert {key: msgspec.structs.replace(usage, generation=0) for key, usage in after.items()} == before
    made_again = {usage.start_ms // HOUR_MS * HOUR_MS - START_MS for usage in after.values() if usage.generation}
    assert made_again == {2 * HOUR_MS, 3 * HOUR_MS}


async def test_what_kafka_no_longer_has_is_refused_with_the_reason(usage_kafka: KafkaServer) -> None:
    await write(usage_kafka, [tick for node in range(NODES) for tick in log_of(node, 1)], [])
    admin = usage_kafka.admin()
    for deleted in admin.delete_records([TheirPartition("gpu.attributed", 0, 20)]).values():
        await asyncio.to_thread(deleted.result, 10)
    refused = await asyncio.to_thread(replay, usage_kafka, *TIME)
    assert refused.returncode == 1
    assert "gpu.attributed has nothing before" in refused.stderr
    assert "so --from can be" in refused.stderr
    assert await _all(usage_kafka) == []
