"""A partition's hours in files: each key once, the same bytes whatever happens, nothing lost on a bad disk."""

import asyncio
import errno
import fcntl
import os
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned, DeadLetters
from delivery.instruments import Instruments
from sinks import parquet
from sinks.outcomes import Outcomes
from sinks.parquet import COMPONENT, INSTRUMENTS, Disk, HourFiles, ParquetPartition
from tests.eventually import eventually
from tests.sinks.records import FakeSender
from tests.usage_records import START_MS, Read, read, usage
from topics.usage import HOUR_MS, Key, Usage

FILE = Path("date=2026-11-20", "usage-00-p7.parquet")


class Setup:
    """A partition and its collaborators."""

    def __init__(self, path: Path, write_every_s: float = 0.0) -> None:
        instruments = Instruments(INSTRUMENTS)
        self.path, self.registry, self.sender, self.disk = path, instruments.registry, FakeSender(), Disk(instruments)
        self.outcomes = Outcomes(COMPONENT, instruments)
        letters = DeadLetters(self.sender, "sink parquet")  # type: ignore[arg-type]
        self.partition = ParquetPartition(HourFiles(path, 7), write_every_s, self.disk, letters, self.outcomes)
        self.abandon = asyncio.Event()

    async def deliver(self, *records: Read) -> list[int]:
        """Delivers records, counted as an assignment does; gives the offsets after each step."""
        self.outcomes.read(len(records))
        return [offset async for offset in self.partition.deliver(records, self.abandon)]

    def ends(self) -> dict[str, int]:
        """How many records ended in which way, or are held."""
        names = ("records_delivered_total", "records_duplicate_total", "records_dead_lettered_total", "records_held")
        counts = {name: self.registry.get_sample_value(f"gpustream_parquet_{name}") or 0 for name in names}
        return {name.removeprefix("records_").removesuffix("_total"): int(n) for name, n in counts.items() if n}

    def files(self) -> list[Path]:
        """The files that readers see."""
        return sorted(path.relative_to(self.path) for path in self.path.rglob("*.parquet"))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the files, as pyarrow reads them."""
        return [row for file in self.files() for row in pq.ParquetFile(self.path / file).read().to_pylist()]


def logged(*records: Usage | bytes) -> list[Read]:
    return [read(value, offset) for offset, value in enumerate(records)]


async def test_a_record_is_a_row_of_its_hours_file_with_all_its_fields(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    record = usage(
        "ml", workload={"kind": "Job", "name": "bert"}, team="vision", labels={"b": "2", "a": "1"}, memory_byte_ms=2**62
    )
    assert await setup.deliver(*logged(record)) == [1]
    assert setup.files() == [FILE]
    (row,) = setup.rows()
    assert row.pop("start").timestamp() * 1000 == START_MS
    assert (row.pop("workload_kind"), row.pop("workload_name")) == ("Job", "bert")
    assert (row.pop("labels"), row.pop("node_labels")) == ([("a", "1"), ("b", "2")], [])
    assert row == {name: getattr(record, name) for name in row}
    assert row.keys() == set(Usage.__struct_fields__) - {"schema", "workload", "labels", "node_labels"}


async def test_duckdb_reads_the_directory_with_its_dates(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    days = [usage("ml", start_ms=START_MS + day * 24 * HOUR_MS) for day in range(2)]
    await setup.deliver(*logged(*days, usage("ml", gpu_uuid="GPU-2")))
    query = "SELECT date, sum(device_ms) FROM read_parquet(?, hive_partitioning = true) GROUP BY date ORDER BY date"
    rows = duckdb.execute(query, [f"{tmp_path}/*/*.parquet"]).fetchall()
    assert [(str(date), ms) for date, ms in rows] == [("2026-11-20", 2 * HOUR_MS), ("2026-11-21", HOUR_MS)]


async def test_of_a_key_the_highest_generation_and_revision_stays(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    orders = [(0, 1), (0, 3), (0, 2), (1, 1), (0, 9), (1, 2), (1, 2)]
    for offset, (generation, revision) in enumerate(orders):
        await setup.deliver(read(usage("ml", generation=generation, revision=revision), offset))
    assert [(row["generation"], row["revision"]) for row in setup.rows()] == [(1, 2)]
    assert setup.ends() == {"delivered": 4, "duplicate": 3}


async def test_an_empty_field_and_one_that_is_not_there_are_the_same_key_as_in_kafka(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for revision, uid in enumerate((None, "", None)):
        await setup.deliver(read(usage("ml", pod_uid=uid, revision=revision), revision))
    assert [row["revision"] for row in setup.rows()] == [2]


async def test_windows_that_begin_within_an_hour_are_rows_of_their_own(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    await setup.deliver(*logged(*(usage("ml", start_ms=START_MS + begin) for begin in (0, HOUR_MS // 2))))
    assert [row["start_ms"] for row in setup.rows()] == [START_MS, START_MS + HOUR_MS // 2]


async def test_records_are_held_and_written_together(tmp_path: Path) -> None:
    setup = Setup(tmp_path, write_every_s=3600)
    assert await setup.deliver(*logged(usage("a"), usage("b"))) == []
    assert setup.ends() == {"held": 2}
    setup.abandon.set()
    assert await setup.deliver() == [2]
    assert setup.ends() == {"delivered": 2}
    assert setup.registry.get_sample_value("gpustream_parquet_files_written_total") == 1


async def test_no_more_is_held_than_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_PENDING", 10)
    setup = Setup(tmp_path, write_every_s=3600)
    assert await setup.deliver(*logged(*(usage(f"ns-{number}") for number in range(25)))) == [10, 20]
    assert setup.ends() == {"delivered": 20, "held": 5}


async def test_what_was_held_when_the_partition_went_away_is_not_written(tmp_path: Path) -> None:
    setup = Setup(tmp_path, write_every_s=3600)
    await setup.deliver(*logged(usage("a")))
    setup.outcomes.release(1)
    setup.abandon, setup.partition._write_every_s = asyncio.Event(), 0.0
    assert await setup.deliver(read(usage("b"), 5)) == [6]
    assert [row["namespace"] for row in setup.rows()] == ["b"]


async def test_an_hour_that_no_calendar_has_is_a_dead_letter(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    assert await setup.deliver(*logged(usage("ml", start_ms=10**18), usage("ml", start_ms=2**62), usage("ml"))) == [3]
    assert setup.ends() == {"delivered": 1, "dead_lettered": 2}


@pytest.mark.parametrize("value", [b"{", b"{}", usage("ml")])
async def test_a_malformed_record_is_a_dead_letter(tmp_path: Path, value: bytes | Usage) -> None:
    setup = Setup(tmp_path)
    assert await setup.deliver(read(value, 0)._replace(key=b"another"), read(usage("ml"), 1)) == [2]
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    assert len(setup.sender.sent) == 1


async def test_a_deletion_says_nothing(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    assert await setup.deliver(read(usage("ml"))._replace(value=None)) == [1]
    assert setup.ends() == {"duplicate": 1}
    assert setup.rows() == []


async def test_a_disk_that_fails_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    path = tmp_path / "path"
    path.write_text("no directory")
    setup = Setup(path)
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
    await eventually(lambda: setup.disk.failing is not None)
    path.unlink()
    assert await asyncio.wait_for(delivering, 20) == [1]
    assert (setup.disk.failing, setup.ends()) == (None, {"delivered": 1})


async def test_a_process_that_stopped_while_it_wrote_is_reported_and_does_not_hold_up_a_partition_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_LOCK_WITHIN_S", 0.01)
    setup = Setup(tmp_path)
    with (tmp_path / ".p7.lock").open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
        failing = await eventually(lambda: setup.disk.failing)
        setup.abandon.set()
        with pytest.raises(Abandoned):
            await asyncio.wait_for(delivering, 20)
    assert "another process has locked it" in failing
    assert ".p7.lock" in failing


async def test_a_disk_that_fails_does_not_hold_up_a_partition_that_leaves(tmp_path: Path) -> None:
    (tmp_path / "path").write_text("no directory")
    setup = Setup(tmp_path / "path")
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
    await eventually(lambda: setup.disk.failing is not None)
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await asyncio.wait_for(delivering, 20)


async def test_a_disk_that_hangs_is_reported_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_HANGS_AFTER_S", 0.01)
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    hangs = tmp_path / FILE.with_name(f".{FILE.name}.tmp")
    hangs.parent.mkdir()
    os.mkfifo(hangs)
    setup = Setup(tmp_path)
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
    failing = await eventually(lambda: setup.disk.failing, unless=delivering)
    reader = os.open(hangs, os.O_RDONLY | os.O_NONBLOCK)  # whoever writes goes on
    hangs.unlink()
    assert await delivering == [1]
    os.close(reader)
    assert "the disk has not answered" in failing
    assert (setup.disk.failing, setup.ends()) == (None, {"delivered": 1})


async def test_it_fails_while_one_file_can_not_be_written_whatever_becomes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 60.0)
    broken = tmp_path / FILE
    broken.parent.mkdir()
    broken.write_bytes(b"no file of Parquet")
    setup = Setup(tmp_path)
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
    await eventually(lambda: setup.disk.failing is not None)
    files = HourFiles(tmp_path, 8)
    assert await setup.disk.merge(files, START_MS, [usage("ml")], asyncio.Event()) == 1
    assert str(broken) in (setup.disk.failing or "")
    assert setup.registry.get_sample_value("gpustream_parquet_failing") == 1
    setup.abandon.set()
    await asyncio.gather(delivering, return_exceptions=True)
    assert setup.disk.failing is None
    assert setup.registry.get_sample_value("gpustream_parquet_failing") == 0


def test_a_file_counts_as_written_when_its_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    synced, fsync = list[os.stat_result](), os.fsync

    def fail_first(handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            synced.append(status)
            if len(synced) == 1:
                raise OSError(errno.EIO, "the disk is bad")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_first)
    assert asyncio.run(Setup(tmp_path).deliver(*logged(usage("ml")))) == [1]
    directories = [(tmp_path / FILE).parent.stat(), tmp_path.stat()]
    assert [status.st_ino for status in synced[1:]] == [status.st_ino for status in directories]


ROW: dict[str, Any] = {name: [getattr(usage("ml"), name)] for name in (*Key._fields, "generation", "revision")}


@pytest.mark.parametrize(
    "columns",
    [
        {"other": [1]},
        {**ROW, "generation": ["high"]},
        {**ROW, "generation": pa.array([None], pa.int64())},
        {**ROW, "node": [7]},
        {**ROW, "start": ["2026-11-20"]},
    ],
    ids=["others", "texts", "null", "numbers", "start"],
)
async def test_a_file_of_that_name_with_other_columns_is_waited_for_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any]
) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    (tmp_path / FILE).parent.mkdir()
    pq.write_table(pa.table(columns), tmp_path / FILE)
    before = (tmp_path / FILE).read_bytes()
    setup = Setup(tmp_path)
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("ml"))))
    await eventually(lambda: setup.disk.failing, unless=delivering)
    assert str(tmp_path / FILE) in (setup.disk.failing or "")
    assert (tmp_path / FILE).read_bytes() == before
    (tmp_path / FILE).unlink()
    assert await delivering == [1]
    assert (setup.disk.failing, setup.ends()) == (None, {"delivered": 1})


def test_a_column_that_a_later_version_has_written_stays(tmp_path: Path) -> None:
    files = HourFiles(tmp_path, 7)
    files.merge(START_MS, [usage("ml")])
    pq.write_table(pq.ParquetFile(tmp_path / FILE).read().add_column(0, "carbon_mg", [[5]]), tmp_path / FILE)
    assert files.merge(START_MS, [usage("web")]) == 1
    table = pq.ParquetFile(tmp_path / FILE).read()
    assert dict(zip(table["namespace"].to_pylist(), table["carbon_mg"].to_pylist(), strict=True)) == {
        "ml": 5,
        "web": None,
    }
    assert table.column_names[-1] == "carbon_mg"


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: content[:4] + bytes(60) + content[64:],
        lambda content: content.replace(b"namespace-a", b"namespace-\xff"),
    ],
    ids=["page", "text"],
)
async def test_a_file_that_a_bad_disk_has_damaged_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    await Setup(tmp_path).deliver(*logged(usage("namespace-a")))
    pq.write_table(pq.ParquetFile(tmp_path / FILE).read(), tmp_path / FILE, compression="none", use_dictionary=False)
    (tmp_path / FILE).write_bytes(damaged((tmp_path / FILE).read_bytes()))
    await assert_waits_for_another_file(tmp_path)


async def test_a_value_that_a_bad_disk_made_another_is_found_by_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_RETRY_S", 0.01)
    await Setup(tmp_path).deliver(*logged(usage("namespace-a")))
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content.replace(b"namespace-a", b"namespace-b"))
    assert pq.read_table(tmp_path / FILE, partitioning=None)["namespace"].to_pylist() == ["namespace-b"]
    await assert_waits_for_another_file(tmp_path)


async def assert_waits_for_another_file(tmp_path: Path) -> None:
    """Asserts that the sink names a file that can't be used, and goes on when it is gone."""
    setup = Setup(tmp_path)
    delivering = asyncio.ensure_future(setup.deliver(*logged(usage("b"))))
    await eventually(lambda: setup.disk.failing, unless=delivering)
    assert str(tmp_path / FILE) in (setup.disk.failing or "")
    (tmp_path / FILE).unlink()
    assert await delivering == [1]


async def test_what_a_killed_worker_left_is_no_file_and_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / FILE.with_name(f".{FILE.name}.tmp")
    leftover.parent.mkdir()
    leftover.write_bytes(b"half a file")
    setup = Setup(tmp_path)
    assert setup.rows() == []
    await setup.deliver(*logged(usage("ml")))
    assert len(setup.rows()) == 1
    assert not leftover.exists()


LOG = [
    usage(
        f"ns-{number % 2}", gpu_uuid=f"GPU-{number % 3}", generation=generation, revision=revision, device_ms=revision
    )
    for number in range(6)
    for generation in range(2)
    for revision in range(1, 3)
]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3))
def test_files_have_the_same_bytes_whatever_the_batches_the_workers_and_what_came_twice(
    tmp_path_factory: pytest.TempPathFactory, seed: int, workers: int
) -> None:
    chance, directory = random.Random(seed), tmp_path_factory.mktemp("some")
    log = logged(*LOG)
    asyncio.run(Setup(tmp_path := tmp_path_factory.mktemp("whole")).deliver(*log))

    async def by_several() -> None:
        setups = [Setup(directory) for _ in range(workers)]
        begin, last = 0, len(log)
        while begin < last:
            end = min(last, begin + chance.randint(1, 6))
            await chance.choice(setups).deliver(*log[max(0, begin - chance.randint(0, 4)) : end])
            begin = end

    asyncio.run(by_several())
    assert (directory / FILE).read_bytes() == (tmp_path / FILE).read_bytes()


def test_two_workers_at_once_lose_none_of_each_others_rows(tmp_path: Path) -> None:
    halves: Sequence[Sequence[Usage]] = [[usage(f"ns-{half}-{n}") for n in range(20)] for half in range(2)]

    async def work(records: Sequence[Usage]) -> None:
        setup = Setup(tmp_path)
        for record in records:
            await setup.deliver(read(record))

    async def both() -> None:
        await asyncio.gather(*map(work, halves))

    asyncio.run(both())
    assert len(Setup(tmp_path).rows()) == 40
