"""Reads gpu.attributed and gpu.dead-letters as any consumer downstream would: from the end, in no group.

In:       records from the moment of :meth:`Tail.start`.
Out:      calls with each tick and each dead letter, in order per partition; a replay is passed on like any record.
On failure: an outage is waited out; a record that can't be decoded is logged and passed over.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer

from topics import attributed, dead_letters
from topics.attributed import AttributedSample
from topics.decoding import decoder

log = logging.getLogger(__name__)

Letter = tuple[bytes, ...]
"""Where the original of a dead letter stood, and who gave up: topic, partition, offset, stage."""

_FETCH_BYTES = 8 * 1024 * 1024
_FETCH_WAIT_MS = 100  # the embedded broker answers an empty fetch only when this is over, whatever arrives meanwhile
_LETTER_HEADERS = ("topic", "partition", "offset", "stage")


class Tail:
    """A reader of what comes out."""

    def __init__(
        self, kafka: str, on_tick: Callable[[AttributedSample], None], on_letter: Callable[[Letter], None]
    ) -> None:
        self._kafka = kafka
        self._on_tick = on_tick
        self._on_letter = on_letter
        self._decode = decoder(AttributedSample)
        self._consumer: Any = None

    async def start(self) -> None:
        """Stands at the end of every partition once it returns. Raises aiokafka's errors where that can't be had."""
        self._consumer = AIOKafkaConsumer(
            attributed.TOPIC.name,
            dead_letters.TOPIC.name,
            bootstrap_servers=self._kafka,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
            fetch_max_bytes=_FETCH_BYTES,
            max_partition_fetch_bytes=_FETCH_BYTES,
        )
        await self._consumer.start()
        partitions = self._consumer.assignment()
        await self._consumer.seek_to_end(*partitions)
        for partition in partitions:
            await self._consumer.position(partition)

    async def run(self) -> None:
        """Reads for ever; cancel it to stop."""
        while True:
            batches = await self._consumer.getmany(timeout_ms=1000)
            for partition, records in batches.items():
                take = self._tick if partition.topic == attributed.TOPIC.name else self._letter
                for record in records:
                    take(record)

    async def stop(self) -> None:
        """Closes the consumer."""
        if self._consumer is not None:
            await self._consumer.stop()

    def _tick(self, record: Any) -> None:
        try:
            tick = self._decode(record.value or b"")
        except msgspec.DecodeError as error:
            log.warning("not a tick: %s", error, extra={"partition": record.partition, "offset": record.offset})
        else:
            self._on_tick(tick)

    def _letter(self, record: Any) -> None:
        headers = dict(record.headers)
        self._on_letter(tuple(headers.get(name, b"") for name in _LETTER_HEADERS))
