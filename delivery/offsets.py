"""Asks a broker where logs begin and end, and where a time is in them, over a connection of its own.

A broker answers the requests of a connection one after the other: behind a fetch that waits for records, each of these
would wait too. Where a log ends is its last stable offset: what comes after it is of transactions that are still open,
and can't be read yet.
"""

from collections.abc import Mapping
from typing import Any

from aiokafka import TopicPartition

from delivery.clients import close, connected
from delivery.ledger import Partition

_PEEKS = 10
_PEEK_BACK = 8
_PEEK_BYTES = 256 << 10
_NO_GROUP: dict[str, Any] = {"group_id": None, "auto_offset_reset": "earliest"}


class OffsetClient:
    """Where logs begin and end. Methods raise KafkaError where the broker does not answer."""

    def __init__(self, kafka: str, *, client_id: str) -> None:
        self._kafka, self._client_id = kafka, client_id
        self._consumer: Any = None

    async def connect(self) -> None:
        """Connect, for as long as that takes; cancel to give up."""
        self._consumer = await connected(self._kafka, client_id=f"{self._client_id}-offsets", **_NO_GROUP)

    async def close(self) -> None:
        """Let go of the connection."""
        if self._consumer is not None:
            await close(self._consumer)

    async def beginnings(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The first offset of each partition."""
        return ours(await self._consumer.beginning_offsets([theirs(tp) for tp in tps])) if tps else {}

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        """The offset after the last one of each partition that can be read."""
        return ours(await self._consumer.end_offsets([theirs(tp) for tp in tps])) if tps else {}

    async def offsets_at(self, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The first offset at or after a time; None: there is none, or the broker can't tell."""
        return await offsets_at(self._consumer, times_ms)

    async def times(self, offsets: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
        """The log time in ms of the last record up to each offset, or of the next one; None: none could be read.

        At the offset itself may be what no reader is given, such as the end of a transaction, so the records shortly
        before it are read as well, by a consumer that lives no longer than this.
        """
        times: dict[Partition, int | None] = dict.fromkeys(offsets)
        peeking = await connected(
            self._kafka,
            client_id=f"{self._client_id}-peek",
            max_partition_fetch_bytes=_PEEK_BYTES,
            **_NO_GROUP,
        )
        try:
            await _peek(peeking, offsets, times)
        finally:
            await close(peeking)
        return times


async def offsets_at(consumer: Any, times_ms: Mapping[Partition, int]) -> Mapping[Partition, int | None]:
    """What a client says is the first offset at or after a time; None: there is none, or the broker can't tell."""
    found = await consumer.offsets_for_times({theirs(tp): at for tp, at in times_ms.items()})
    return {Partition(*tp): at.offset if at is not None else None for tp, at in found.items()}


async def _peek(consumer: Any, offsets: Mapping[Partition, int], times: dict[Partition, int | None]) -> None:
    waiting = {theirs(tp): offset for tp, offset in offsets.items()}
    consumer.assign(list(waiting))
    for tp, offset in waiting.items():
        consumer.seek(tp, max(0, offset - _PEEK_BACK))
    for _ in range(_PEEKS):
        if not waiting:
            return
        for tp, records in (await consumer.getmany(*waiting, timeout_ms=1000)).items():
            for record in records:
                if record.offset <= waiting[tp] or times[Partition(*tp)] is None:
                    times[Partition(*tp)] = record.timestamp
        for tp in [tp for tp, offset in waiting.items() if await consumer.position(tp) > offset]:
            del waiting[tp]
            consumer.pause(tp)


def theirs(tp: Partition) -> TopicPartition:
    """A partition as the client knows it."""
    return TopicPartition(*tp)


def ours(answer: Mapping[Any, int]) -> dict[Partition, int]:
    """A client's answer, by partitions of ours."""
    return {Partition(*tp): offset for tp, offset in answer.items()}
