"""The directory with the jobs of each device: its files apply at once, whatever else is in it."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.instruments import Instruments
from producers.node import instruments as own
from producers.node import job_files
from producers.node.job_files import (
    LARGEST_FILE_BYTES,
    MAX_JOBS,
    Directory,
    JobFiles,
    JobLines,
    JobMapping,
    Problem,
    parse,
)
from tests.producers.fakes import FakeClock

ROOT = Path(__file__).parents[3]
WITHIN_S = 30.0


@pytest.mark.parametrize(
    ("content", "jobs"),
    [
        (b"12345\n", ("12345",)),
        (b"12345", ("12345",)),
        (b"1\n2\n", ("1", "2")),
        (b"\n  1\t\r\n\r\n \n2  ", ("1", "2")),
        (b"2\n1\n2\n", ("2", "1")),
        (b"job-1.batch@site", ("job-1.batch@site",)),
        ("zoë/1".encode(), ("zoë/1",)),
        (b"a" * 256, ("a" * 256,)),
        (b"", ()),
        (b" \n\n", ()),
    ],
)
def test_each_line_is_a_job_id_without_the_blanks_around_it(content: bytes, jobs: tuple[str, ...]) -> None:
    assert parse(content) == JobLines(jobs, 0)


@pytest.mark.parametrize("line", [b"a" * 257, b"a\0b", b"\x1b[31m7", b"\xff\xfe7", b"\x00", b"7\x7f"])
def test_a_line_that_is_no_job_id_is_left_out_and_the_others_are_not(line: bytes) -> None:
    assert parse(b"7\n" + line + b"\n8\n") == JobLines(("7", "8"), 1)


def test_a_file_has_no_more_jobs_than_fit() -> None:
    lines = parse(b"\n".join(b"%d" % number for number in range(MAX_JOBS + 3)))
    assert len(lines.job_ids) == MAX_JOBS
    assert lines.left_out == 3


@given(st.binary())
def test_any_content_can_be_read(content: bytes) -> None:
    jobs, left_out = parse(content)
    assert left_out >= 0
    assert len(set(jobs)) == len(jobs) <= MAX_JOBS
    assert all(job.isprintable() and job.encode() in content for job in jobs)


def test_files_are_named_by_gpu_or_by_gpu_and_instance_and_others_are_not_read(tmp_path: Path) -> None:
    for name in ("0", "12", "2.1"):
        (tmp_path / name).write_text(f"job-{name}\n")
    for name in ("1.2.3", "a", ".0", "0.", "-1", "+1", "0.tmp", "1e5", "٣", ".gitkeep", "0~"):
        (tmp_path / name).write_text("no\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "3").write_text("")

    assert Directory(tmp_path).read() == JobMapping({"0": ("job-0",), "12": ("job-12",), "2.1": ("job-2.1",)}, [])


def test_a_change_of_the_directory_is_in_the_next_reading(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    assert directory.read().job_ids_by_file == {}
    (tmp_path / "0").write_text("1\n")
    assert directory.read().job_ids_by_file == {"0": ("1",)}
    (tmp_path / "0").write_text("2\n")
    assert directory.read().job_ids_by_file == {"0": ("2",)}
    (tmp_path / "new").write_text("3\n")
    (tmp_path / "new").replace(tmp_path / "0")
    assert directory.read().job_ids_by_file == {"0": ("3",)}
    (tmp_path / "0").unlink()
    assert directory.read().job_ids_by_file == {}


def counting_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    content = job_files._content

    def counted(path: str) -> bytes:
        read.append(Path(path).name)
        return content(path)

    monkeypatch.setattr(job_files, "_content", counted)
    return read


def test_a_file_that_does_not_change_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "SETTLED_AFTER_NS", -1)  # every file is old enough
    read = counting_reads(monkeypatch)
    directory = Directory(tmp_path)
    (tmp_path / "0").write_text("1\n")
    (tmp_path / "1").write_text("2\n")
    for _ in range(3):
        assert directory.read().job_ids_by_file == {"0": ("1",), "1": ("2",)}
    (tmp_path / "0").write_text("12\n")
    assert directory.read().job_ids_by_file == {"0": ("12",), "1": ("2",)}
    assert sorted(read) == ["0", "0", "1"]

    (tmp_path / "0").unlink()
    directory.read()
    assert set(directory._cache) == {"1"}


def test_a_file_that_has_just_changed_is_read_again_because_it_may_change_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "SETTLED_AFTER_NS", 2**62)  # no file is ever old enough
    read = counting_reads(monkeypatch)
    directory = Directory(tmp_path)
    (tmp_path / "0").write_text("1\n")
    directory.read()
    directory.read()
    assert read == ["0", "0"]


def unreadable(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def too_large(path: Path) -> None:
    path.write_bytes(b"1\n" * LARGEST_FILE_BYTES)


@pytest.mark.parametrize("spoil", [unreadable, pipe, too_large])
def test_a_file_that_can_not_be_read_is_reported_and_the_others_are_read(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    (tmp_path / "0").write_text("1\n")
    spoil(tmp_path / "1")
    mapping = Directory(tmp_path).read()
    assert mapping.job_ids_by_file == {"0": ("1",)}
    assert [(problem.reason, problem.path) for problem in mapping.problems] == [("file", tmp_path / "1")]
    assert mapping.unknown_files == {"1"}


def test_of_a_file_without_any_valid_line_the_jobs_are_not_known(tmp_path: Path) -> None:
    for name, content in (("0", b"\xff\n"), ("1", b"\xff\n7\n"), ("2", b"\n")):
        (tmp_path / name).write_bytes(content)
    mapping = Directory(tmp_path).read()
    assert (mapping.job_ids_by_file, mapping.unknown_files) == ({"1": ("7",)}, frozenset({"0"}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1\n")
    (tmp_path / "0").chmod(0)
    (problem,) = Directory(tmp_path).read().problems
    assert problem.reason == "file"


def test_a_file_that_becomes_a_pipe_before_it_is_read_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0")
    assert job_files._content(str(tmp_path / "0")) == b""


def test_a_job_that_ends_while_its_file_is_read_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0").write_text("1\n")

    def missing(path: str) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(job_files, "_content", missing)
    assert Directory(tmp_path).read() == JobMapping({}, [])


def test_a_missing_directory_is_reported_and_used_when_it_appears(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "jobs")
    (problem,) = directory.read().problems
    assert (problem.reason, problem.path) == ("directory", tmp_path / "jobs")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0").write_text("1\n")
    assert directory.read() == JobMapping({"0": ("1",)}, [])


def test_a_directory_of_too_many_entries_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_files, "MAX_ENTRIES", 2)
    for name in "012":
        (tmp_path / name).write_text("1\n")
    mapping = Directory(tmp_path).read()
    assert len(mapping.job_ids_by_file) == 2
    assert [problem.reason for problem in mapping.problems] == ["directory"]


class Bench:
    """The job files of a directory, as the component reads them."""

    def __init__(self, directory: Path | None, look: Callable[[], JobMapping] | None = None) -> None:
        self.clock = FakeClock()
        self._instruments = Instruments(own.INSTRUMENTS)
        self.files = JobFiles(directory, self._instruments, read_directory=look, clock=self.clock)

    def errors(self, reason: str) -> float:
        return self._instruments.registry.get_sample_value(own.JOB_FILE_ERRORS, {"reason": reason}) or 0.0


async def test_without_a_directory_there_are_no_jobs_and_no_thread() -> None:
    before = threading.active_count()
    bench = Bench(None)
    assert await bench.files.read(WITHIN_S) == {}
    assert threading.active_count() == before
    bench.files.close()


async def test_each_reading_has_the_current_contents_of_the_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "0").write_text("1\n")
    assert await bench.files.read(WITHIN_S) == {"0": ("1",)}
    (tmp_path / "0").unlink()
    assert await bench.files.read(WITHIN_S) == {}
    bench.files.close()


async def test_files_that_are_left_out_are_counted_each_time_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "0").write_bytes(b"1\na\0b\n\xff\n")
    (tmp_path / "1").mkdir()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert await bench.files.read(WITHIN_S) == {"0": ("1",)}
            bench.clock.now_s += 100.0
    assert (bench.errors("line"), bench.errors("file"), bench.errors("directory")) == (6, 3, 0)
    assert sorted(str(tmp_path / name) in caplog.text for name in "01") == [True, True]
    assert len(caplog.records) == 2
    bench.files.close()


async def test_a_directory_that_appears_and_disappears_is_logged_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path / "jobs")

    async def comes_and_goes() -> None:
        await bench.files.read(WITHIN_S)
        (tmp_path / "jobs").mkdir()
        await bench.files.read(WITHIN_S)
        (tmp_path / "jobs").rmdir()

    for _ in range(3):
        await comes_and_goes()
    assert len(caplog.records) == 1
    bench.clock.now_s += 60.0
    await comes_and_goes()
    assert len(caplog.records) == 2
    assert bench.errors("directory") == 4
    bench.files.close()


async def test_while_a_file_system_hangs_the_last_jobs_stay_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    hangs.set()
    jobs = iter(["1", "2", "3"])

    def look() -> JobMapping:
        hangs.wait(WITHIN_S)
        return JobMapping({"0": (next(jobs),)}, [])

    bench = Bench(tmp_path, look)
    assert await bench.files.read(WITHIN_S) == {"0": ("1",)}
    hangs.clear()
    for _ in range(3):
        assert await bench.files.read(0.01) == {"0": ("1",)}
    assert bench.errors("timeout") == 3
    assert len(caplog.records) == 1
    hangs.set()
    async with asyncio.timeout(WITHIN_S):
        while await bench.files.read(WITHIN_S) != {"0": ("3",)}:
            pass
    assert bench.errors("timeout") == 3
    bench.files.close()


async def test_files_that_were_never_read_do_not_say_that_a_gpu_has_no_job(tmp_path: Path) -> None:
    hangs = threading.Event()
    mappings = iter([
        JobMapping({}, [Problem("directory", tmp_path, "stale file handle")]),
        JobMapping({"0": ("1",)}, []),
        JobMapping({"0": ("1",)}, []),
    ])  # fmt: skip

    def look() -> JobMapping:
        hangs.wait(WITHIN_S)
        return next(mappings)

    bench = Bench(tmp_path, look)
    assert (await bench.files.read(0.01), bench.files.were_read()) == ({}, None)
    hangs.set()
    assert (await bench.files.read(WITHIN_S), bench.files.were_read()) == ({}, False)
    hangs.clear()
    assert (await bench.files.read(0.01), bench.files.were_read()) == ({}, False)
    hangs.set()
    assert (await bench.files.read(WITHIN_S), bench.files.were_read()) == ({"0": ("1",)}, True)
    hangs.clear()
    assert (await bench.files.read(0.01), bench.files.were_read()) == ({"0": ("1",)}, True)
    hangs.set()
    bench.files.close()


async def test_a_reading_that_is_given_up_goes_on_and_counts(tmp_path: Path) -> None:
    hangs = threading.Event()
    reads = 0

    def look() -> JobMapping:
        nonlocal reads
        reads += 1
        hangs.wait(WITHIN_S)
        return JobMapping({"0": (str(reads),)}, [])

    bench = Bench(tmp_path, look)
    reading = asyncio.create_task(bench.files.read(WITHIN_S))
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    hangs.set()
    assert await bench.files.read(WITHIN_S) in ({"0": ("1",)}, {"0": ("2",)})
    bench.files.close()
