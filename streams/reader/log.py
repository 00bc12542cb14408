"""What the reader asks of the broker: offsets, log times, and where partitions end.

The group's consumer lives in Faust's consumer thread; a second one, of no group and short-lived, reads the log times of
single records.
"""

from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from streams.reader.ledger import Partition

_PEEK_S = 10.0


class BrokerLog:
    """The broker's answers, through the consumer thread ``thread`` of Faust's aiokafka driver."""

    def __init__(self, thread: Any, kafka: str, answered: Callable[[], None]) -> None:
        self._thread, self._kafka, self._answered = thread, kafka, answered

    async def committed(self, tp: Partition) -> int | None:
        """The group's committed offset."""
        offset: int | None = await self._ask("committed", _aio(tp))
        return offset

    async def beginnings(self, tps: list[Partition]) -> dict[Partition, int]:
        """The first offset of each partition."""
        return _ours(await self._ask("beginning_offsets", [_aio(tp) for tp in tps])) if tps else {}

    async def ends(self, tps: list[Partition]) -> dict[Partition, int]:
        """The offset after the last one of each partition."""
        return _ours(await self._ask("end_offsets", [_aio(tp) for tp in tps])) if tps else {}

    async def position(self, tp: Partition) -> int:
        """The next offset that the client will give, past whatever holds no record."""
        offset: int = await self._ask("position", _aio(tp))
        return offset

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """The first offset at or after a time; None: there is none, or the broker can't tell."""
        found = await self._ask("offsets_for_times", {_aio(tp): at for tp, at in times_ms.items()})
        return {Partition(*tp): at.offset if at is not None else None for tp, at in found.items()}

    async def times(self, offsets: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """The log time in ms of the record at each offset; None: it could not be read."""
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        consumer = AIOKafkaConsumer(bootstrap_servers=self._kafka.split(","), enable_auto_commit=False)
        await consumer.start()
        try:
            await _peek(consumer, offsets, times)
        finally:
            await consumer.stop()
        self._answered()
        return times

    async def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read on from these offsets."""

        async def seek(consumer: Any) -> None:
            for tp, offset in positions.items():
                consumer.seek(_aio(tp), offset)

        await self._thread.call_thread(seek, self._thread._ensure_consumer())  # noqa: SLF001 - faust has no other way

    async def commit(self, offsets: Mapping[Partition, int]) -> bool:
        """Commit; False where the group has moved on."""
        committed: bool = await self._thread.commit({_aio(tp): offset for tp, offset in offsets.items()})
        if committed:
            self._answered()
        return committed

    async def _ask(self, method: str, *args: Any) -> Any:
        answer = await self._thread.call_thread(getattr(self._thread._ensure_consumer(), method), *args)  # noqa: SLF001
        self._answered()
        return answer


async def _peek(
    consumer: AIOKafkaConsumer, offsets: Mapping[Partition, int], times: dict[Partition, int | None]
) -> None:
    waiting = {_aio(tp) for tp in offsets}
    consumer.assign(list(waiting))
    for tp, offset in offsets.items():
        consumer.seek(_aio(tp), offset)
    attempts = int(_PEEK_S)
    while waiting and attempts:
        attempts -= 1
        for tp, records in (await consumer.getmany(*waiting, timeout_ms=1000, max_records=len(waiting) * 4)).items():
            if records and tp in waiting:
                times[Partition(tp.topic, tp.partition)] = records[0].timestamp
                waiting.discard(tp)
                consumer.pause(tp)


def _aio(tp: Partition) -> TopicPartition:
    return TopicPartition(tp.topic, tp.partition)


def _ours(answer: Mapping[TopicPartition, int]) -> dict[Partition, int]:
    return {Partition(tp.topic, tp.partition): offset for tp, offset in answer.items()}
