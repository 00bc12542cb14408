"""The Parquet sink: gpu.usage -> one file for each hour and partition, with each key once.

In: gpu.usage. Out: ``PATH/date=2026-11-22/usage-13-p7.parquet``, the records of partition 7 whose hour begins at 13:00
UTC; gpu.dead-letters; the offset before which all records are in files.
State: the files. A file is read, new records are merged into it, and it is written again as a whole. Of each key, the
record with the highest generation stays, and among those the highest revision. So records may be repeated, late, or
from a worker that has lost the partition without knowing it: the bytes of a file depend only on the set of records. A
file is written under a temporary name, synced to the disk, and renamed; then the offset is committed.
On failure: the sink waits for a full, missing or hanging disk, and Kafka keeps the records. Malformed records are
dead-lettered.
"""

import asyncio
import fcntl
import importlib
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import msgspec

from delivery.dead_letters import Abandoned, DeadLetters, Record, connecting
from delivery.instruments import Instrument, Instruments, named
from delivery.log_throttle import LogThrottle
from delivery.positions import NOTHING
from delivery.sender import Sender
from delivery.tasks import set_within
from sinks import outcomes
from sinks.consumer import GroupReader, Handler, Source
from sinks.outcomes import Outcome, Outcomes, Undecodable, decoded
from sinks.settings import ParquetSettings
from topics.times import MAX_TIME_MS, time_of
from topics.topic import decoder
from topics.usage import HOURS, Key, Usage

log = logging.getLogger(__name__)

COMPONENT = "parquet"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
        "gpustream_parquet_records_read_total",
        "gpustream_parquet_records_delivered_total",
        "gpustream_parquet_records_duplicate_total",
        "gpustream_parquet_records_dropped_total",
        "gpustream_parquet_records_dead_lettered_total",
        "gpustream_parquet_records_released_total",
        "gpustream_parquet_records_held",
        "gpustream_parquet_records_expired_total",
        "gpustream_parquet_new_logs_total",
        "gpustream_parquet_commits_total",
        "gpustream_parquet_partitions",
        "gpustream_parquet_lag_records",
        "gpustream_parquet_loop_late_seconds",
    ),
    Instrument("gpustream_parquet_files_written_total", "counter", "Files written, new or again."),
    Instrument("gpustream_parquet_failing", "gauge", "Whether a file can't be written at the moment."),
)

MAX_PENDING = 10_000
"""The most records of a partition that wait to be written: together with one file, that bounds the memory."""

_RETRY_S = 5.0
_HANGS_AFTER_S = 30.0
_LOCK_WITHIN_S = 2.0
_LOCK_EVERY_S = 0.02
_decode = decoder(Usage)

_INTEGERS = (
    "start_ms", "end_ms", "generation", "revision", "device_ms", "slice_ms", "of", "used_us", "idle_ms", "tensor_us",
    "energy_mj", "memory_byte_ms", "exact_ms", "late_ms", "none_ms",
)  # fmt: skip
_MAPS = ("labels", "node_labels")


@cache
def _pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, which are an extra."""
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


@cache
def _schema() -> Any:
    """The columns: the fields of a record, the workload as two of them, and the start of the hour as a timestamp."""
    pa, _ = _pyarrow()
    kinds = dict.fromkeys(_INTEGERS, pa.int64()) | dict.fromkeys(_MAPS, pa.map_(pa.string(), pa.string()))
    kinds |= {"final": pa.bool_()}
    names = [name for name in Usage.__struct_fields__ if name not in ("schema", "workload")]
    names[names.index("team") : 0] = ["workload_kind", "workload_name"]
    columns = [pa.field("start", pa.timestamp("ms", tz="UTC"))]
    return pa.schema([*columns, *(pa.field(name, kinds.get(name, pa.string())) for name in names)])


_ORDER = ("generation", "revision")
"""The columns by which the record of a key that stays is found."""


class HourFiles:
    """The files of a partition, below a path. The methods block; call them on a thread."""

    def __init__(self, root: Path, partition: int) -> None:
        self._root, self._partition = root, partition

    def merge(self, start_ms: int, records: Iterable[Usage]) -> int:
        """Merge records of an hour, one for each key, into its file. Returns how many of them are new to the file.

        A record is not new if its key is there with the same or a higher generation and revision. Raises OSError, and
        ArrowInvalid if the file can't be read, or is not one of this sink.
        """
        pa, pq = _pyarrow()
        start = time_of(start_ms)
        file = self._root / f"date={start:%Y-%m-%d}" / f"usage-{start:%H}-p{self._partition}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        with (self._root / f".p{self._partition}.lock").open("w") as lock:
            _lock(lock)  # a worker that does not know that it has lost the partition may merge, too
            old = _read(file)
            orders = list(zip(*(old[name].to_pylist() for name in _ORDER), strict=True))
            fields = zip(*(old[name].to_pylist() for name in Key._fields), strict=True)
            keys = [Key._make("" if field is None else field for field in row) for row in fields]  # as Kafka has them
            known, new_rows = dict(zip(keys, orders, strict=True)), {}
            for record in records:
                key = record.key
                if record.order > known.get(key, (-1, -1)):
                    row = msgspec.structs.asdict(record)
                    workload = row.pop("workload")
                    row |= {"workload_kind": workload and workload.kind, "workload_name": workload and workload.name}
                    row |= {name: sorted(row[name].items()) for name in _MAPS}
                    new_rows[key] = {"start": time_of(record.start_ms), **row}
            if new_rows:
                kept = old.filter(pa.array([key not in new_rows for key in keys], pa.bool_()))
                new = pa.Table.from_pylist(list(new_rows.values()), _schema())
                merged = pa.concat_tables([kept, new], promote_options="default")
                merged = merged.sort_by([(name, "ascending") for name in Key._fields]).combine_chunks()
                names = _schema().names  # a later version may have written others
                others = [index for index, name in enumerate(merged.column_names) if name not in names]
                table = merged.select([*map(merged.column_names.index, names), *others])
                temporary = file.with_name(f".{file.name}.tmp")
                with temporary.open("wb") as out:
                    pq.write_table(table, out, compression="zstd", write_page_checksum=True)
                    out.flush()
                    os.fsync(out.fileno())
                temporary.replace(file)
            self._sync(file.parent)  # without new rows, too: whoever renamed the file may not have come to it
        return len(new_rows)

    def _sync(self, day: Path) -> None:
        """Sync the directory of a day, so that a file that was renamed there stays if the machine ends."""
        for directory in (day, self._root):
            handle = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _lock(file: TextIO) -> None:
    """Lock a file. Raises BlockingIOError if another process keeps it locked: one that was stopped does so for ever."""
    ends_s = time.monotonic() + _LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > ends_s:
                text = "another process has locked it, and is slow or stopped: see `fuser`"
                raise BlockingIOError(error.errno, text, file.name) from None
            time.sleep(_LOCK_EVERY_S)
        else:
            return


def _read(file: Path) -> Any:
    """The rows of a file with all columns; none if it is not there. Raises ArrowInvalid, which names the file.

    The texts are checked, too: after a fault of the disk they may be no UTF-8.
    """
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(file, partitioning=None, page_checksum_verification=True)
        table.validate(full=True)
        rows = pa.concat_tables([_schema().empty_table(), table], promote_options="default")
    except FileNotFoundError:
        return _schema().empty_table()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise pa.ArrowInvalid(f"{file} can't be read: {error}") from error
    missing = [
        name  # each is there once, as it is written, and records can be ordered by what is in it
        for name in (*Key._fields, *_ORDER)
        if [field.type for field in table.schema if field.name == name] != [_schema().field(name).type]
        or (name in _ORDER and table[name].null_count)
    ]
    if missing:
        raise pa.ArrowInvalid(f"{file} is no file of this sink: it lacks the columns {', '.join(missing)}")
    return rows


class Disk:
    """Merges with retries. All partitions share it."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._log_throttle = LogThrottle()
        self._retried: dict[object, str] = {}
        instruments.gauge("gpustream_parquet_failing").set_function(lambda: bool(self._retried))

    @property
    def failing(self) -> str | None:
        """Why a file can't be written now; None if none is being retried."""
        return next(reversed(self._retried.values()), None)

    async def merge(self, files: HourFiles, start_ms: int, records: Iterable[Usage], abandon: asyncio.Event) -> int:
        """Call :meth:`HourFiles.merge` until it succeeds. Raises Abandoned."""
        merge = object()
        hangs = f"the disk has not answered for {_HANGS_AFTER_S:.0f} s"
        hanging = asyncio.get_running_loop().call_later(_HANGS_AFTER_S, self._report, merge, hangs)
        try:
            while True:
                try:
                    new = await asyncio.to_thread(files.merge, start_ms, records)
                except (OSError, _pyarrow()[0].ArrowException) as error:
                    hanging.cancel()
                    self._report(merge, f"{type(error).__name__}: {error}")
                    if await set_within(abandon, _RETRY_S):
                        raise Abandoned from error
                else:
                    self._instruments.counter("gpustream_parquet_files_written_total").inc(new > 0)
                    return new
        finally:
            hanging.cancel()
            self._retried.pop(merge, None)

    def _report(self, merge: object, failing: str) -> None:
        """Say in the log and to ``failing`` why a merge has not succeeded yet."""
        self._retried[merge] = failing
        if self._log_throttle.is_due(failing):
            log.warning("a file can't be written: %s; trying again", failing)


class ParquetPartition(Handler):
    """The handler of a partition: collects records for a while, then writes those of each hour together. It restores
    nothing from the log, because the files have what was finished."""

    def __init__(
        self, files: HourFiles, write_every_s: float, disk: Disk, letters: DeadLetters, outcomes: Outcomes
    ) -> None:
        self._files, self._write_every_s = files, write_every_s
        self._disk, self._letters, self._outcomes = disk, letters, outcomes
        self._abandon: asyncio.Event | None = None
        self._hours: dict[int, dict[bytes, Usage]] = {}
        self._pending = self._dead_lettered = self._next_offset = 0
        self._since_s = math.inf

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Collect records, and write them if they are many or old, or if the partition is being revoked."""
        if abandon is not self._abandon:  # the partition was revoked since, and its pending records were released
            self.reset()
            self._abandon = abandon
        now_s = asyncio.get_running_loop().time()
        for record in records:
            try:
                usage = decoded(record, _decode, HOURS.name) if record.value is not None else None
                if usage is not None and usage.key.encode() != record.key:
                    raise Undecodable(f"not a record of {HOURS.name}: its key is another")
                if usage is not None and usage.start_ms > MAX_TIME_MS:
                    raise Undecodable(f"not a record of {HOURS.name}: of a time after 9999")
            except Undecodable as error:
                await self._letters.write(record, str(error), abandon)
                self._dead_lettered, usage = self._dead_lettered + 1, None
            if usage is not None:
                hour = self._hours.setdefault(usage.start_ms, {})
                pending = hour.get(record.key or b"")
                if pending is None or usage.order > pending.order:
                    hour[record.key or b""] = usage
            self._pending, self._next_offset = self._pending + 1, record.offset + 1
            self._since_s = min(self._since_s, now_s)
            if self._pending >= MAX_PENDING:
                yield await self._write(abandon)
        is_due = now_s - self._since_s >= self._write_every_s
        if self._pending and (is_due or abandon.is_set() or not self._hours):
            yield await self._write(abandon)

    def reset(self) -> None:
        """Forget the pending records."""
        self._hours = {}
        self._pending = self._dead_lettered = self._next_offset = 0
        self._since_s = math.inf

    async def _write(self, abandon: asyncio.Event) -> int:
        """Write the pending records. Returns the offset after them. Raises Abandoned."""
        new = 0
        for start_ms, records in self._hours.items():
            new += await self._disk.merge(self._files, start_ms, records.values(), abandon)
        counts: dict[Outcome, int] = {"delivered": new, "dead_lettered": self._dead_lettered}
        counts["duplicate"] = self._pending - new - self._dead_lettered
        for outcome, count in counts.items():
            for _ in range(count):
                self._outcomes.finish(outcome)
        next_offset = self._next_offset
        self.reset()
        return next_offset


class ParquetSink:
    """The component: :meth:`run` it until it is to stop. ``settings`` must be free of errors."""

    name = "parquet"

    def __init__(self, settings: ParquetSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._disk = Disk(self._instruments)
        self._reader: GroupReader | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Write files until ``stop``; returns within 8 s of it. Raises what a retry can't mend."""
        settings, sender = self.settings, Sender(self.settings.connection(), client_id=self.settings.group)
        outcomes, letters = Outcomes(COMPONENT, self._instruments), DeadLetters(sender, "sink parquet")
        shared = (settings.write_every_s, self._disk, letters, outcomes)

        def handler(number: int) -> ParquetPartition:
            return ParquetPartition(HourFiles(settings.path, number), *shared)

        source = Source(HOURS.name, handler, settings.from_, NOTHING)
        self._reader = GroupReader(settings, [source], outcomes, letters)
        async with connecting(sender):
            await self._reader.run(stop)

    def not_ready(self) -> list[str]:
        """Why files are not written; empty when they are."""
        if self._reader is None:
            return ["not started"]
        failing = self._disk.failing
        return [*self._reader.not_ready(), *([f"a file can't be written: {failing}"] if failing else [])]
