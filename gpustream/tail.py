"""Reads what comes out as any consumer downstream would: gpu.attributed, gpu.alerts, gpu.dead-letters, in no group.

In:       records from the moment of :meth:`Tail.start`; of gpu.alerts, all.
Out:      calls with each tick, each record of an alert and each dead letter, in order per partition; a replay is passed
on like any record.
On failure: an outage is waited out; a record that can't be decoded is logged and passed over.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from delivery.clients import AIOKafkaConsumer
from topics import alerts, attributed, dead_letters
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
        self,
        kafka: str,
        on_tick: Callable[[AttributedSample], None],
        on_alert: Callable[[Any], object],
        on_letter: Callable[[Letter], None],
    ) -> None:
        self._kafka = kafka
        self._on_tick = on_tick
        self._on_letter = on_letter
        self._takers = {
            attributed.TOPIC.name: self._tick,
            alerts.TOPIC.name: on_alert,
            dead_letters.TOPIC.name: self._letter,
        }
        self._decode = decoder(AttributedSample)
        self._consumer: Any = None

    async def start(self) -> None:
        """Stands at the end of every partition once it returns. Raises aiokafka's errors where that can't be had."""
        self._consumer = AIOKafkaConsumer(
            *self._takers,
            bootstrap_servers=self._kafka,
            enable_auto_commit=False,
            auto_offset_reset="latest",
            isolation_level="read_committed",
            fetch_max_wait_ms=_FETCH_WAIT_MS,
            fetch_max_bytes=_FETCH_BYTES,
            max_partition_fetch_bytes=_FETCH_BYTES,
        )
        await self._consumer.start()
        partitions = self._consumer.assignment()
        whole = [partition for partition in partitions if partition.topic == alerts.TOPIC.name]
        await self._consumer.seek_to_end(*(partitions - set(whole)))
        await self._consumer.seek_to_beginning(*whole)
        for partition in partitions:
            await self._consumer.position(partition)

    async def run(self) -> None:
        """Reads for ever; cancel it to stop."""
        while True:
            batches = await self._consumer.getmany(timeout_ms=1000)
            for partition, records in batches.items():
                for record in records:
                    self._takers[partition.topic](record)

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
