"""A directory in which a batch system's prolog names the jobs of each device, as in dcgm-exporter's job mapping.

In: files named by GPU index (``0``), by GPU index and GPU instance (``2.1``), or by UUID, with one job id per line; and
for each job a file in the subdirectory ``jobs``, with the lines ``user=``, ``partition=`` and ``account=``.
Out: the job ids by file name, the names of the files whose jobs are not known, and the user, partition and account of
each job. State: the content of each file, until it changes.
On failure: a file or line that can't be used is left out of that tick, counted by reason, and logged once. If reading
does not end in time, the last result stays in force.
"""

import asyncio
import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from delivery.instruments import Instruments
from delivery.log_throttle import LogThrottle
from producers.node import instruments as names
from producers.node.jobs import Job, as_name, file_name
from producers.node.worker import Worker

log = logging.getLogger(__name__)
MAX_JOBS = 64  # of one file: a tick has to fit in a record, whatever is in the files
LARGEST_FILE_BYTES = 64 * 1024
MAX_ENTRIES = 4096
SETTLED_AFTER_NS = 2_000_000_000  # a newer file is not cached: it may change again without a new ctime
_FILE_NAME = re.compile(r"[0-9]+(?:\.[0-9]+)?|(?:GPU|MIG)-[0-9a-fA-F-]+")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]{0,63}")
_JOB_KEYS = (b"user", b"partition", b"account")  # the keys of a job's own file

Reason = Literal["directory", "file", "line", "timeout"]


class Problem(NamedTuple):
    """Files or lines that were left out: the reason, the path, a text for people, and how many."""

    reason: Reason
    path: Path
    text: str
    times: int = 1

    def __str__(self) -> str:
        subject = "the directory of job files" if self.reason in ("directory", "timeout") else "the job file"
        return f"{subject} {self.path} is not used as it should be: {self.text}"


class JobLines(NamedTuple):
    """The content of a file: its job ids, each once, and how many lines were left out as invalid or too many."""

    job_ids: tuple[str, ...]
    left_out: int


class JobMapping(NamedTuple):
    """The content of the directory: the job ids by file name, the problems, the jobs that have their own file, and the
    names of the files that are there, but whose jobs are not known."""

    job_ids_by_file: dict[str, tuple[str, ...]]
    problems: list[Problem]
    jobs_by_id: Mapping[str, Job] = {}
    unknown_files: frozenset[str] = frozenset()


_NOT_READ = JobMapping({}, [])


def parse(content: bytes) -> JobLines:
    """The job ids of a file: one per line, without the blanks around it; empty lines are ignored. Never raises."""
    lines = [line for line in map(bytes.strip, content.split(b"\n")) if line]
    ids = list(filter(None, map(as_name, lines)))
    distinct = list(dict.fromkeys(ids))
    return JobLines(tuple(distinct[:MAX_JOBS]), len(lines) - len(ids) + len(distinct[MAX_JOBS:]))


class Directory:
    """Reads the files of ``directory``, and caches their content until they change. Blocks; for one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._cache: dict[str, tuple[tuple[int, ...], JobLines]] = {}
        self._jobs_by_id: dict[str, Job] = {}

    def read(self) -> JobMapping:
        job_ids_by_file: dict[str, tuple[str, ...]] = {}
        problems: list[Problem] = []
        try:
            with os.scandir(self._directory) as directory_entries:
                entries = list(islice(directory_entries, MAX_ENTRIES + 1))
        except OSError as error:
            self._cache.clear()
            self._jobs_by_id.clear()
            return JobMapping({}, [Problem("directory", self._directory, error.strerror or str(error))])
        if len(entries) > MAX_ENTRIES:
            problems.append(Problem("directory", self._directory, f"more than {MAX_ENTRIES} entries"))
        files = [entry for entry in entries[:MAX_ENTRIES] if _FILE_NAME.fullmatch(entry.name)]
        unknown_files: set[str] = set()
        for entry in files:
            path = self._directory / entry.name
            try:
                lines = self._read_lines(entry)
            except FileNotFoundError:  # the job ended just now
                continue
            except OSError as error:
                self._cache.pop(entry.name, None)
                unknown_files.add(entry.name)
                problems.append(Problem("file", path, error.strerror or str(error)))
                continue
            if lines.left_out:
                text = f"{lines.left_out} lines are not job ids, or beyond the first {MAX_JOBS}"
                problems.append(Problem("line", path, text, lines.left_out))
            if lines.job_ids:
                job_ids_by_file[entry.name] = lines.job_ids
            elif lines.left_out:
                unknown_files.add(entry.name)
        for name in self._cache.keys() - {entry.name for entry in files}:
            del self._cache[name]
        job_ids = {job_id for job_ids in job_ids_by_file.values() for job_id in job_ids}
        return JobMapping(job_ids_by_file, problems, self._read_jobs(job_ids), frozenset(unknown_files))

    def _read_jobs(self, job_ids: Collection[str]) -> dict[str, Job]:
        """Those of these jobs that have their own file, by id. It is written before the files of the job's GPUs, so it
        is read once. A value in it that can't be a name is None."""
        self._jobs_by_id = {job_id: job for job_id, job in self._jobs_by_id.items() if job_id in job_ids}
        for job_id in [job_id for job_id in job_ids if job_id not in self._jobs_by_id and _JOB.fullmatch(job_id)]:
            path = self._directory / "jobs" / job_id
            with contextlib.suppress(OSError):
                if path.is_file():
                    lines = reversed(_content(str(path)).split(b"\n"))  # the first one of a key counts
                    values = dict(line.strip().partition(b"=")[::2] for line in lines)
                    self._jobs_by_id[job_id] = Job(job_id, *(as_name(values.get(key, b"")) for key in _JOB_KEYS))
        return dict(self._jobs_by_id)

    def _read_lines(self, entry: "os.DirEntry[str]") -> JobLines:
        """The lines of a file. Raises OSError if it is no regular file, is too large or can't be read."""
        status = entry.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file")
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        cached = self._cache.get(entry.name)
        if cached is not None and cached[0] == identity:
            return cached[1]
        lines = parse(_content(entry.path))
        self._cache.pop(entry.name, None)
        if abs(time.time_ns() - status.st_ctime_ns) > SETTLED_AFTER_NS:
            self._cache[entry.name] = (identity, lines)
        return lines


def _content(path: str) -> bytes:
    """The content of a file. Does not block if it has become a pipe. Raises OSError, also if it is too large."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise OSError(f"it has more than {LARGEST_FILE_BYTES // 1024} KiB")
    return content


class JobFiles:
    """Reads a directory on a thread of its own, so that a file system that hangs delays no tick. ``directory`` None:
    there are no job files. ``read_directory`` and ``clock`` are for tests."""

    def __init__(
        self,
        directory: Path | None,
        instruments: Instruments,
        *,
        read_directory: Callable[[], JobMapping] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._instruments = directory, instruments
        self._read_directory = read_directory or (None if directory is None else Directory(directory).read)
        self._worker = None if self._read_directory is None else Worker("job-files")
        self._reading: asyncio.Future[JobMapping] | None = None
        self._mapping = _NOT_READ  # the result of the last reading that has ended
        self._problems: Mapping[tuple[Reason, Path], Problem] = {}
        self._throttle = LogThrottle(clock)

    async def read(self, within_s: float) -> Mapping[str, tuple[str, ...]]:
        """The job ids by file name; after ``within_s`` those that were read last."""
        if self._worker is None or self._read_directory is None or self._directory is None:
            return {}
        self._accept()
        if self._reading is None:
            self._reading = self._worker.submit(self._read_directory)
        await asyncio.wait([self._reading], timeout=within_s)
        if not self._accept():
            self._report([Problem("timeout", self._directory, "reading it takes too long")])
        return self._mapping.job_ids_by_file

    def enriched(self, job: Job) -> Job:
        """The job with the values of its own file. They win over those of its processes, because root wrote them."""
        described = self._mapping.jobs_by_id.get(job.id)
        if described is None:
            return job
        return Job(job.id, *(new or old for new, old in zip(described[1:], job[1:], strict=True)))

    def were_read(self) -> bool | None:
        """Whether the last reading that has ended could list the job files; None before the first one has ended."""
        if self._directory is None:
            return False
        if self._mapping is _NOT_READ:
            return None
        return all(problem.reason != "directory" for problem in self._mapping.problems)

    def cover(self, device: Mapping[str, Any]) -> bool:
        """Whether the files that were read name every job of a device. They do not if its own file can't be used, or if
        its index, which is the name of that file, is not known."""
        name = file_name(device)
        return name is not None and self._mapping.unknown_files.isdisjoint((name, device.get("uuid")))

    def troubles(self) -> list[str]:
        """The problems of the last reading, as texts for people."""
        return [str(problem) for problem in self._problems.values()]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _accept(self) -> bool:
        """If the reading has ended, put its result into force; returns whether it has."""
        if self._reading is None or not self._reading.done():
            return False
        self._mapping, self._reading = self._reading.result(), None
        self._report(self._mapping.problems)
        return True

    def _report(self, problems: list[Problem]) -> None:
        """Count every problem, and log each new one. One that comes and goes is logged at most once a minute."""
        for problem in problems:
            self._instruments.counter(names.JOB_FILE_ERRORS, problem.reason).inc(problem.times)
            key = (problem.reason, problem.path)
            if key not in self._problems and self._throttle.is_due(key):
                log.warning("%s", problem)
        self._problems = {(problem.reason, problem.path): problem for problem in problems}
