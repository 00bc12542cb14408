"""The contents of a real broker: the values of a topic, their compression, and a group's commits."""

import struct

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.real.servers import KafkaServer

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
"""By their number in the attributes of a batch."""


async def values(address: str, topic: str, partitions: int = 1) -> dict[int, list[bytes]]:
    """Every value of a topic, by partition, in order."""
    async with AIOKafkaConsumer(
        bootstrap_servers=address, enable_auto_commit=False, auto_offset_reset="earliest"
    ) as consumer:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        values_by_partition: dict[int, list[bytes]] = {tp.partition: [] for tp in tps}
        await consumer.seek_to_beginning(*tps)
        for tp in tps:
            while await consumer.position(tp) < ends[tp]:
                for record in (await consumer.getmany(tp, timeout_ms=500)).get(tp, ()):
                    values_by_partition[tp.partition].append(bytes(record.value))
        return values_by_partition


async def ends(address: str, topic: str, partitions: int = 1) -> dict[int, int]:
    """Where each partition ends."""
    async with AIOKafkaConsumer(bootstrap_servers=address, enable_auto_commit=False) as consumer:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        return {tp.partition: offset for tp, offset in (await consumer.end_offsets(tps)).items()}


async def committed(address: str, group: str, topic: str, partitions: int = 1) -> dict[int, int]:
    """The committed offsets of a group, by partition; 0 if there is none."""
    async with AIOKafkaConsumer(bootstrap_servers=address, group_id=group, enable_auto_commit=False) as consumer:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        consumer.assign(tps)
        return {tp.partition: await consumer.committed(tp) or 0 for tp in tps}


def batches(kafka: KafkaServer, topic: str) -> list[tuple[str, int]]:
    """How each batch of a topic is compressed on the broker's disk, and how many records it has."""
    found = []
    for segment in (kafka.directory / "data").glob(f"{topic}-[0-9]*/*.log"):
        log, position = segment.read_bytes(), 0
        while position < len(log):
            length, attributes, records = struct.unpack_from(">8xi9xh34xi", log, position)
            found.append((CODECS[attributes & 7], records))
            position += 12 + length
    return found


def codecs(kafka: KafkaServer, topic: str) -> set[str]:
    """How the batches of a topic are compressed on the broker's disk."""
    return {codec for codec, _ in batches(kafka, topic)}
