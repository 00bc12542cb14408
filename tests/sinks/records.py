"""Kafka's side of the sinks' tests: records as they are read, and a client that has a log in memory."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from aiokafka.errors import KafkaConnectionError

from topics.attributed import AttributedSample
from topics.dead_letters import Headers


class Read(NamedTuple):
    """A record as the client gives it."""

    offset: int
    value: bytes | None
    timestamp: int = 0
    key: bytes | None = b"c1/n1"
    topic: str = "gpu.attributed"
    partition: int = 0


def record(of: AttributedSample | bytes, offset: int | None = None) -> Read:
    """A record of a tick, at the tick's own offset, or of some bytes."""
    value = of if isinstance(of, bytes) else msgspec.json.encode(of)
    at = offset if offset is not None else of.offset if isinstance(of, AttributedSample) else 0
    return Read(at, value, at * 1000)


@dataclass
class FakeSender:
    """Has every record at once, or, while ``away``, none."""

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


class Found(NamedTuple):
    """An offset by time."""

    offset: int


@dataclass
class FakeConsumer:
    """One partition's log and its group's offset. ``by_time``: the broker finds offsets by time."""

    log: Sequence[Read]
    group: int | None = None
    begin: int = 0
    by_time: bool = True
    away: int = 0
    commits: list[int] = field(default_factory=list)
    at: int = 0
    polled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.log[-1].offset + 1 if self.log else self.begin

    async def committed(self, _: Any) -> int | None:
        """The group's offset."""
        if self.away:
            self.away -= 1
            raise KafkaConnectionError("away")
        return self.group

    async def beginning_offsets(self, tps: Sequence[Any]) -> dict[Any, int]:
        """Where the log begins."""
        return dict.fromkeys(tps, self.begin)

    async def end_offsets(self, tps: Sequence[Any]) -> dict[Any, int]:
        """Where it ends."""
        return dict.fromkeys(tps, self.end)

    async def offsets_for_times(self, times: dict[Any, int]) -> dict[Any, Found | None]:
        """The first record at or after a time."""
        return {tp: self._since(ts_ms) for tp, ts_ms in times.items()}

    def _since(self, ts_ms: int) -> Found | None:
        found = [one.offset for one in self.log if one.timestamp >= ts_ms and one.offset >= self.begin]
        return Found(found[0]) if found and self.by_time else None

    def seek(self, _: Any, offset: int) -> None:
        """Goes to an offset."""
        self.at = offset

    async def position(self, _: Any) -> int:
        """The next offset."""
        return self.at

    def highwater(self, _: Any) -> int:
        """Where the log ends."""
        return self.end

    def last_poll_timestamp(self, _: Any) -> int:
        """Just now."""
        return 2**62

    async def getmany(self, tp: Any, *, timeout_ms: int, max_records: int) -> dict[Any, list[Read]]:
        """The next records, at most so many."""
        await asyncio.sleep(0)
        some = [one for one in self.log if one.offset >= max(self.at, self.begin)][:max_records]
        if some:
            self.at = some[-1].offset + 1
        else:
            self.polled.set()
            await asyncio.sleep(0.001)
        return {tp: some} if some else {}

    async def commit(self, offsets: dict[Any, int]) -> None:
        """Commits."""
        (self.group,) = offsets.values()
        self.commits.append(self.group)
