"""Reads dead letters and their original records, and decides which of them may be sent again.

In:       gpu.dead-letters, in no group; the original record if a letter lacks a part of it, while its topic has it.
Out:      each letter, and whether it was sent again; whole records; the snapshots that ticks name.
"""

import contextlib
import re
import time
from collections.abc import AsyncIterator, Collection
from typing import NamedTuple

import msgspec

from delivery.ledger import Partition
from gpustream.history import History
from topics import allocations, samples
from topics import dead_letters as contract
from topics.dead_letters import MAX_KEY_BYTES, Cause
from topics.topic import decoder

RESUBMITTABLE = ("gpu.samples", "gpu.allocations", "gpu.workloads")
"""The topics that attribution reads. A record of another topic would have no effect, or a wrong one, if sent again."""

ALREADY_SENT = "it was sent again before"

_REFUSAL_REASONS = {
    "gpu.attributed": "every reader of gpu.attributed drops a tick that comes again as a replay",
    "gpu.alerts": "gpu.alerts keeps the last record of each key: this one would take the place of a newer one",
}
_ID = re.compile(r"([0-9]{1,9}):([0-9]{1,18})", re.ASCII)


class LetterId(NamedTuple):
    """The position of a letter in gpu.dead-letters."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def letter_id(text: str) -> LetterId:
    """Parses ``PARTITION:OFFSET``. Raises ValueError."""
    if not (match := _ID.fullmatch(text)):
        raise ValueError(
            f"{text[:80]!r} is not a letter: write PARTITION:OFFSET, as `gpustream dead-letters list` has it"
        )
    return LetterId(int(match[1]), int(match[2]))


class Letter(NamedTuple):
    """A dead letter as it was read. ``resubmitted``: it was sent again."""

    id: LetterId
    logged_ms: int
    key: bytes | None
    value: bytes
    cause: Cause
    resubmitted: bool = False

    @property
    def key_text(self) -> str:
        """The key of the record: in most topics it names a node, ``CLUSTER/NODE``."""
        return (self.key or b"").decode("utf-8", "replace")

    @property
    def is_whole(self) -> bool:
        """Whether the letter has the whole record. An empty value may stand for a record without one."""
        return self.key is not None and 0 < self.cause.length == len(self.value)


class LetterFilter(NamedTuple):
    """Selects the letters that match every field that is given."""

    topic: str | None = None
    stage: str | None = None
    reason: str | None = None
    key: str | None = None
    ids: Collection[LetterId] = ()

    def __contains__(self, letter: object) -> bool:
        if not isinstance(letter, Letter) or (self.ids and letter.id not in self.ids):
            return False
        expected = (self.topic, self.stage and _component(self.stage), self.reason, self.key)
        cause = letter.cause
        values = (cause.origin.topic, _component(cause.stage), cause.reason, letter.key_text)
        return all(wanted is None or wanted == value for wanted, value in zip(expected, values, strict=True))


def _component(stage: str) -> str:
    """The name of a component, however it is written: ``sink remote-write`` is ``remote-write`` or ``remote_write``."""
    return stage.removeprefix("sink ").replace("_", "-")


async def letters(reader: History, since_s: float) -> AsyncIterator[Letter]:
    """The letters of the last ``since_s``, in order per partition, each with whether it was sent again.

    The topic is read twice: a receipt comes after its letter, and letters may be too large to be kept.
    """
    spans = await reader.spans(contract.TOPIC.name, int((time.time() - since_s) * 1000))
    receipts: set[LetterId] = set()
    async for records in reader.records(spans):
        for record in records:
            if (offset := contract.resubmitted(record.headers)) is not None:
                receipts.add(LetterId(record.partition, offset))
    async for records in reader.records(spans):
        for record in records:
            if (cause := contract.cause(record.headers)) is not None:
                origin = cause.origin._replace(topic=reader.connection.unprefixed(cause.origin.topic))
                cause = cause._replace(origin=origin)
                position = LetterId(record.partition, record.offset)
                yield Letter(position, record.timestamp, record.key, record.value or b"", cause, position in receipts)


class Original(NamedTuple):
    """An original record: its whole key and value."""

    key: bytes | None
    value: bytes | None


async def original(reader: History, letter: Letter) -> Original | str:
    """The original record of a letter, read from its topic if the letter lacks a part; or why it can't be read."""
    if letter.is_whole:
        return Original(letter.key, letter.value)
    name, partition, offset = letter.cause.origin
    if partition not in range(reader.partitions.get(name, 0)):
        return f"{name} has no partition {partition} any more"
    record = await reader.record(Partition(name, partition), offset)
    missing_part = "its key" if letter.key is None else "a part of its value" if letter.value else "its value"
    if record is None:
        return f"the letter lacks {missing_part}, and {name} does not have the record any more"
    value, key = record.value or b"", record.key
    same_key = key == letter.key or (letter.key is None and len(key or b"") > MAX_KEY_BYTES)
    if not (same_key and len(value) == letter.cause.length and value.startswith(letter.value)):
        return f"the letter lacks {missing_part}, and another record stands at its place now: {name} was created again"
    if key is None and record.value is None:
        return "it has neither a key nor a value: there is nothing to send"
    return Original(key, record.value)


class _Event(msgspec.Struct, frozen=True):
    allocations_seq: int | None = None


class _DeviceEvents(msgspec.Struct, frozen=True):
    events: tuple[_Event, ...] | None = None


class _NamedSnapshots(msgspec.Struct, frozen=True):
    """The fields of a tick or a snapshot that identify it and the snapshots that it names."""

    run_id: int
    seq: int
    allocations_seq: int | None = None
    devices: tuple[_DeviceEvents, ...] = ()


class Snapshots:
    """Finds the snapshots that ticks name. Each partition of gpu.allocations is read once, at its first use."""

    def __init__(self, reader: History) -> None:
        self._reader = reader
        self._offsets: dict[int, dict[tuple[bytes | None, int, int], int]] = {}
        self._returned: set[tuple[int, int]] = set()
        self._decode = decoder(_NamedSnapshots)

    async def named_by(self, letter: Letter, record: Original) -> list[Original]:
        """The snapshots that a tick and its events name, if the topic has them and they were not returned before."""
        if letter.cause.origin.topic != samples.TOPIC.name:
            return []
        try:
            tick = self._decode(record.value or b"")
        except msgspec.DecodeError:
            return []
        partition = letter.cause.origin.partition
        events = [event.allocations_seq for device in tick.devices for event in device.events or ()]
        snapshots = []
        for seq in sorted({seq for seq in (tick.allocations_seq, *events) if seq is not None}):
            offset = (await self._offsets_of(partition)).get((record.key, tick.run_id, seq))
            if offset is None or (partition, offset) in self._returned:
                continue
            self._returned.add((partition, offset))
            snapshot = await self._reader.record(Partition(allocations.TOPIC.name, partition), offset)
            if snapshot is not None:
                snapshots.append(Original(snapshot.key, snapshot.value))
        return snapshots

    async def _offsets_of(self, partition: int) -> dict[tuple[bytes | None, int, int], int]:
        """The offsets of a partition's snapshots, by key, run and seq."""
        if partition not in self._offsets:
            self._offsets[partition] = offsets = {}
            tp = Partition(allocations.TOPIC.name, partition)
            async for records in self._reader.records({tp: (await self._reader.spans(tp.topic))[tp]}):
                for record in records:
                    with contextlib.suppress(msgspec.DecodeError):
                        snapshot = self._decode(record.value or b"")
                        offsets[record.key, snapshot.run_id, snapshot.seq] = record.offset
        return self._offsets[partition]


def refusal_reason(letter: Letter) -> str | None:
    """Why a letter must not be sent again; None if it may."""
    if letter.resubmitted:
        return ALREADY_SENT
    name = letter.cause.origin.topic
    if name not in RESUBMITTABLE:
        return _REFUSAL_REASONS.get(name, f"{name} is not a topic that attribution reads")
    return None
