"""What a real broker holds: the values of a topic, and a group's commits."""

from aiokafka import AIOKafkaConsumer, TopicPartition


async def values(address: str, topic: str, partitions: int = 1) -> dict[int, list[bytes]]:
    """Every value of a topic, by partition, in order."""
    consumer = AIOKafkaConsumer(bootstrap_servers=address, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        found: dict[int, list[bytes]] = {tp.partition: [] for tp in tps}
        await consumer.seek_to_beginning(*tps)
        for tp in tps:
            while await consumer.position(tp) < ends[tp]:
                for record in (await consumer.getmany(tp, timeout_ms=500)).get(tp, ()):
                    found[tp.partition].append(bytes(record.value))
        return found
    finally:
        await consumer.stop()


async def ends(address: str, topic: str, partitions: int = 1) -> dict[int, int]:
    """Where each partition ends."""
    consumer = AIOKafkaConsumer(bootstrap_servers=address, enable_auto_commit=False)
    await consumer.start()
    try:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        return {tp.partition: offset for tp, offset in (await consumer.end_offsets(tps)).items()}
    finally:
        await consumer.stop()


async def committed(address: str, group: str, topic: str, partitions: int = 1) -> dict[int, int]:
    """What a group has committed, by partition; 0 where it has not."""
    consumer = AIOKafkaConsumer(bootstrap_servers=address, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        tps = [TopicPartition(topic, number) for number in range(partitions)]
        consumer.assign(tps)
        return {tp.partition: await consumer.committed(tp) or 0 for tp in tps}
    finally:
        await consumer.stop()
