"""A directory in which a batch system's prolog names the jobs of each device, as in dcgm-exporter's job mapping.

In: files named by GPU index (``0``), by GPU index and GPU instance (``2.1``), or by UUID, a job id a line; and a file
of each job in the folder ``jobs``: ``user=``, ``partition=`` and ``account=``, one a line.
Out: the ids by file name, and the user, partition and account of each job. State: the content of each file, until it
changes.
On failure: what can't be read is left out of that tick, counted by reason, and logged once. If reading does not end in
time, what was read last stays in force.
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
from typing import Literal, NamedTuple

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.jobs import Job, as_name
from producers.node.worker import Worker

log = logging.getLogger(__name__)
MOST_JOBS = 64  # of one file: a tick has to fit in a record, whatever is in the files
LARGEST_FILE_BYTES = 64 * 1024
MOST_ENTRIES = 4096
SETTLED_AFTER_NS = 2_000_000_000  # a file may change within this without a new time of change: file clocks are coarse
_LOG_AGAIN_S = 60.0
_NAME = re.compile(r"[0-9]+(?:\.[0-9]+)?|(?:GPU|MIG)-[0-9a-fA-F-]+")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+.-]{0,63}")
_SAID = ("user", "partition", "account")  # of a job, in its own file

Reason = Literal["directory", "file", "line", "timeout"]
Jobs = Mapping[str, tuple[str, ...]]


class Problem(NamedTuple):
    """What was left out: why, of which file or directory, in words, and how often."""

    reason: Reason
    path: Path
    text: str
    times: int = 1

    def __str__(self) -> str:
        what = "the directory of job files" if self.reason in ("directory", "timeout") else "the job file"
        return f"{what} {self.path} is not used as it should be: {self.text}"


class JobLines(NamedTuple):
    """What a file says: job ids, each once, and how many lines are none or too many."""

    jobs: tuple[str, ...]
    left_out: int


class JobMapping(NamedTuple):
    """What the directory says: job ids by file name, what is wrong, and whose the jobs are that have a file."""

    jobs: dict[str, tuple[str, ...]]
    problems: list[Problem]
    owners: Mapping[str, Job] = {}


def parse(content: bytes) -> JobLines:
    """The job ids of a file: one a line, without the blanks around it; empty lines say nothing. Never raises."""
    lines = [line for line in map(bytes.strip, content.split(b"\n")) if line]
    ids = list(filter(None, map(as_name, lines)))
    distinct = list(dict.fromkeys(ids))
    return JobLines(tuple(distinct[:MOST_JOBS]), len(lines) - len(ids) + len(distinct[MOST_JOBS:]))


def owner(job_id: str, content: bytes) -> Job:
    """What a job's own file says of it. Never raises; what can't be a name is as if it were not there."""
    lines = dict(line.strip().partition(b"=")[::2] for line in reversed(content.split(b"\n")))  # the first one counts
    return Job(job_id, *(as_name(lines.get(name.encode(), b"")) for name in _SAID))


class Directory:
    """Reads the files of ``directory`` that were changed since; for one thread, and blocking."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, tuple[tuple[int, ...], JobLines]] = {}
        self._known: dict[str, Job] = {}

    def look(self) -> JobMapping:
        jobs: dict[str, tuple[str, ...]] = {}
        problems: list[Problem] = []
        try:
            with os.scandir(self._directory) as listed:
                entries = list(islice(listed, MOST_ENTRIES + 1))
        except OSError as error:
            self._read.clear()
            self._known.clear()
            return JobMapping({}, [Problem("directory", self._directory, error.strerror or str(error))])
        if len(entries) > MOST_ENTRIES:
            problems.append(Problem("directory", self._directory, f"more than {MOST_ENTRIES} entries"))
        files = [entry for entry in entries[:MOST_ENTRIES] if _NAME.fullmatch(entry.name)]
        for entry in files:
            path = self._directory / entry.name
            try:
                lines = self._lines(entry)
            except FileNotFoundError:  # the job ended just now
                continue
            except OSError as error:
                self._read.pop(entry.name, None)
                problems.append(Problem("file", path, error.strerror or str(error)))
                continue
            if lines.left_out:
                text = f"{lines.left_out} lines are not job ids, or beyond the first {MOST_JOBS}"
                problems.append(Problem("line", path, text, lines.left_out))
            if lines.jobs:
                jobs[entry.name] = lines.jobs
        for name in self._read.keys() - {entry.name for entry in files}:
            del self._read[name]
        return JobMapping(jobs, problems, self._owners({one for ids in jobs.values() for one in ids}))

    def _owners(self, jobs: Collection[str]) -> dict[str, Job]:
        """Whose these jobs are, of those that have a file of their own, which is written before those of their GPUs."""
        self._known = {job_id: job for job_id, job in self._known.items() if job_id in jobs}
        for job_id in [one for one in jobs if one not in self._known and _JOB.fullmatch(one)]:
            path = self._directory / "jobs" / job_id
            with contextlib.suppress(OSError):
                if path.is_file():
                    self._known[job_id] = owner(job_id, _content(str(path)))
        return dict(self._known)

    def _lines(self, entry: "os.DirEntry[str]") -> JobLines:
        """What a file says. Raises OSError if it is none, is too large or can't be read."""
        now = entry.stat()
        if not stat.S_ISREG(now.st_mode):
            raise OSError("it is not a file")
        identity = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        known = self._read.get(entry.name)
        if known is not None and known[0] == identity:
            return known[1]
        lines = parse(_content(entry.path))
        self._read.pop(entry.name, None)
        if abs(time.time_ns() - now.st_ctime_ns) > SETTLED_AFTER_NS:
            self._read[entry.name] = (identity, lines)
        return lines


def _content(path: str) -> bytes:
    """The content of a file, which may have become a pipe meanwhile. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise OSError(f"it has more than {LARGEST_FILE_BYTES // 1024} KiB")
    return content


class JobFiles:
    """Reads a directory on a thread of its own, so that a file system that hangs holds up no tick. None: there is none.
    ``look`` and ``clock`` are for tests."""

    def __init__(
        self,
        directory: Path | None,
        instruments: Instruments,
        *,
        look: Callable[[], JobMapping] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._instruments, self._clock = directory, instruments, clock
        self._look = look or (None if directory is None else Directory(directory).look)
        self._worker = None if self._look is None else Worker("job-files")
        self._reading: asyncio.Future[JobMapping] | None = None
        self._jobs: Jobs = {}
        self._owners: Mapping[str, Job] = {}
        self._problems: Mapping[tuple[Reason, Path], Problem] = {}
        self._logged_s: dict[tuple[Reason, Path], float] = {}

    async def read(self, within_s: float) -> Jobs:
        """The job ids by the name of the device's file; after ``within_s`` those that were read last."""
        if self._worker is None or self._look is None or self._directory is None:
            return {}
        self._take()
        if self._reading is None:
            self._reading = self._worker.submit(self._look)
        await asyncio.wait([self._reading], timeout=within_s)
        if not self._take():
            self._report([Problem("timeout", self._directory, "reading it takes too long")])
        return self._jobs

    def owner(self, known: Job) -> Job:
        """A job with what its own file says of it, which root wrote, before what its processes show."""
        said = self._owners.get(known.id)
        return (
            known
            if said is None
            else Job(known.id, *(by or then for by, then in zip(said[1:], known[1:], strict=True)))
        )

    def are_read(self) -> bool:
        """Whether the files say of each GPU which jobs it has."""
        return self._directory is not None and not any(reason == "directory" for reason, _ in self._problems)

    def troubles(self) -> list[str]:
        """What is wrong with what was read last, for people."""
        return [str(problem) for problem in self._problems.values()]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _take(self) -> bool:
        """Put into force what was read, if that has ended."""
        if self._reading is None or not self._reading.done():
            return False
        found, self._reading = self._reading.result(), None
        self._jobs, self._owners = found.jobs, found.owners
        self._report(found.problems)
        return True

    def _report(self, problems: list[Problem]) -> None:
        """Count every problem, and log each that is new; one that comes and goes, once a minute."""
        now_s = self._clock()
        for problem in problems:
            self._instruments.counter(names.JOB_FILE_ERRORS, problem.reason).inc(problem.times)
            which = (problem.reason, problem.path)
            if which not in self._problems and now_s - self._logged_s.get(which, float("-inf")) >= _LOG_AGAIN_S:
                self._logged_s[which] = now_s
                log.warning("%s", problem)
        self._problems = {(problem.reason, problem.path): problem for problem in problems}
        self._logged_s = {
            which: logged_s
            for which, logged_s in self._logged_s.items()
            if which in self._problems or now_s - logged_s < _LOG_AGAIN_S
        }
