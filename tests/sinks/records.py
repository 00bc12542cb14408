"""Kafka's side of the sinks' tests: records as they are read, and a client that has a log in memory."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from aiokafka.errors import KafkaConnectionError

from delivery.instruments import Instrument, named
from sinks import outcomes
from sinks.series.tick import SeriesTick
from topics.attributed import AttributedSample
from topics.dead_letters import Headers
from topics.topic import node_key


def outcome_instruments(component: str) -> tuple[Instrument, ...]:
    """The instruments of the outcomes of a sink of this name."""
    return named(outcomes.COMMON, *(f"gpustream_{component}_{row.name}" for row in outcomes.COMMON))


class ConsumedRecord(NamedTuple):
    """A record as the client gives it."""

    offset: int
    value: bytes | None
    timestamp: int = 0
    key: bytes | None = b"c1/n1"
    topic: str = "gpu.attributed"
    partition: int = 0


def record(of_tick: SeriesTick | AttributedSample | bytes, offset: int | None = None) -> ConsumedRecord:
    """A record of a tick, at the tick's own offset, or of some bytes."""
    value = (
        of_tick
        if isinstance(of_tick, bytes)
        else encoded(of_tick)
        if isinstance(of_tick, SeriesTick)
        else msgspec.json.encode(of_tick)
    )
    record_offset = (
        offset if offset is not None else of_tick.offset if isinstance(of_tick, SeriesTick | AttributedSample) else 0
    )
    key = node_key(of_tick.cluster, of_tick.node) if isinstance(of_tick, SeriesTick | AttributedSample) else b"c1/n1"
    return ConsumedRecord(record_offset, value, record_offset * 1000, key)


def encoded(tick: SeriesTick) -> bytes:
    """The record of a tick."""
    content = msgspec.to_builtins(msgspec.structs.replace(tick, devices=()))
    content["devices"] = devices = []
    for reading in tick.devices:
        measured = msgspec.to_builtins(reading)
        device, parts = measured.pop("device"), measured.pop("parts")
        present = {name: value for name, value in device.items() if value is not None} | measured
        for holder, part in zip(present["holders"], parts, strict=False):
            holder["parts"] = part
        devices.append(present)
    return msgspec.json.encode(content)


@dataclass
class FakeSender:
    """Accepts every record at once, or, while ``away``, none."""

    sent: list[tuple[str, bytes, dict[str, bytes]]] = field(default_factory=list)
    away: bool = False

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, headers: Headers | None = None
    ) -> "asyncio.Future[int]":
        """Takes a record."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not self.away:
            self.sent.append((topic, value, dict(headers or ())))
            future.set_result(len(self.sent))
        return future


@dataclass
class FakeGroup:
    """A group with one partition: its log, and the offset committed. ``by_time``: the broker finds offsets by time."""

    log: Sequence[ConsumedRecord]
    group: int | None = None
    begin: int = 0
    by_time: bool = True
    away: int = 0
    stable: int | None = None
    fresh: bool = True
    commits: list[int] = field(default_factory=list)
    at: int = 0
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = "g"

    @property
    def offsets(self) -> "FakeGroup":
        """Begins to ask where the log begins and ends."""
        return self

    def kafka_name(self, tp: object) -> str:
        """The name of its partition."""
        return str(tp)

    def end(self, _: object = None) -> int:
        """The offset after the last record that can be read."""
        if self.stable is not None:
            return self.stable
        return self.log[-1].offset + 1 if self.log else self.begin

    async def committed(self, _: object) -> int | None:
        """The group's offset."""
        if self.away:
            self.away -= 1
            raise KafkaConnectionError("away")
        return self.group

    async def beginnings(self, tps: Sequence[Any]) -> dict[Any, int]:
        """Where the log begins."""
        return dict.fromkeys(tps, self.begin)

    async def ends(self, tps: Sequence[Any]) -> dict[Any, int]:
        """Where it ends."""
        return dict.fromkeys(tps, self.end())

    async def log_ends(self, tps: Sequence[Any]) -> dict[Any, int]:
        """Where it ends, with what an open transaction hides."""
        return dict.fromkeys(tps, self.log[-1].offset + 1 if self.log else self.begin)

    async def offsets_at(self, times_ms: dict[Any, int]) -> dict[Any, int | None]:
        """The first record at or after a time."""
        return {tp: self._since(ts_ms) for tp, ts_ms in times_ms.items()}

    def _since(self, ts_ms: int) -> int | None:
        offsets = [logged.offset for logged in self.log if logged.timestamp >= ts_ms and logged.offset >= self.begin]
        return offsets[0] if offsets and self.by_time else None

    async def times(self, offsets: dict[Any, int]) -> dict[Any, int | None]:
        """When the last record up to an offset was logged."""
        return {
            tp: max((logged.timestamp for logged in self.log if self.begin <= logged.offset <= offset), default=None)
            for tp, offset in offsets.items()
        }

    def seek(self, positions: dict[Any, int]) -> None:
        """Goes to an offset."""
        (self.at,) = positions.values()

    async def positions(self, tps: Sequence[Any]) -> dict[Any, int]:
        """The next offset."""
        return dict.fromkeys(tps, max(self.at, self.begin))

    def is_read_to_end(self, _: object, position: int) -> bool:
        """Whether there is nothing more."""
        return self.fresh and position >= self.end()

    async def fetch(self, tps: set[Any], timeout_s: float, max_records: int) -> dict[Any, list[ConsumedRecord]]:
        """The next records, at most so many."""
        await asyncio.sleep(0)
        batch = [logged for logged in self.log if max(self.at, self.begin) <= logged.offset < self.end()][:max_records]
        if batch:
            self.at = batch[-1].offset + 1
        else:
            self.at = max(self.at, self.end())
            self.polled.set()
            await asyncio.sleep(0.001)
        return dict.fromkeys(tps, batch) if batch else {}

    async def commit(self, offsets: dict[Any, int]) -> bool:
        """Commits."""
        (self.group,) = offsets.values()
        self.commits.append(self.group)
        return True
