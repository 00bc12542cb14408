"""The parts of a trace, and how its tables are read. Pure, except that files are read.

In: a folder of CSV files, or of the archives that they are published in. Out: rows; then ticks, in the order of time.
On failure: a row that can't be used is left out and counted by its file and the reason. The first of each is named. If
a table lacks a column that is needed, it is not the trace's: :class:`NoTrace`.
"""

import contextlib
import csv
import io
import tarfile
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from producers.replay.config import path_of

R = TypeVar("R")
JsonDict = dict[str, Any]


class NoTrace(Exception):
    """The files are not those of the trace. The message says which one, and what it lacks."""

    exit_code = 1


class TraceTick(NamedTuple):
    """One reading of a node: devices as in gpu.samples, containers as in gpu.allocations."""

    ts_ms: int
    node: str
    devices: list[JsonDict]
    containers: list[JsonDict]


class Trace(NamedTuple):
    """A trace: each node's pods as in gpu.workloads, and the ticks from ``first_ms`` to ``last_ms`` in the order of
    time. Those of a node are ``interval_ms`` apart, or nearer."""

    pods: Mapping[str, list[JsonDict]]
    ticks: Iterator[TraceTick]
    interval_ms: int
    first_ms: int
    last_ms: int


@dataclass
class Rows:
    """The rows that were read and left out, by file and reason. ``first`` names the first one of each."""

    read: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def leave_out(self, file: str, line: int, refused: "Refused") -> None:
        """Count a row that is left out, and say what is wrong with it."""
        self.left_out[file, refused.reason] += 1
        self.first.setdefault((file, refused.reason), f"{file}, line {line}: {refused}")


class Refused(Exception):
    """A row can't be used: the reason to count by, and what is wrong with it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def table(folder: Path, file: str, columns: tuple[str, ...], parse: Callable[..., R], rows: Rows) -> Iterator[R]:
    """What ``parse`` makes of a row's line and these columns of it; it raises Refused for a row that it can't use.

    Raises NoTrace and OSError.
    """
    with _readable(file), ExitStack() as files:
        lines = csv.reader(text_of(folder, file, files))
        head = next(lines, [])
        if lacking := [name for name in columns if name not in head]:
            raise NoTrace(f"{file}: no column {', '.join(lacking)}; it has {', '.join(head)[:200] or 'nothing'}")
        places = [head.index(name) for name in columns]
        while True:
            try:
                row = next(lines)
                if len(row) != len(head):
                    raise Refused("fields", f"{len(row)} fields and not {len(head)}")
                parsed = parse(lines.line_num, *(row[place].strip() for place in places))
            except StopIteration:
                return
            except Refused as refused:
                rows.leave_out(file, lines.line_num, refused)
            except csv.Error as error:
                rows.leave_out(file, lines.line_num, Refused("fields", str(error)))
            else:
                rows.read[file] += 1
                yield parsed


@contextlib.contextmanager
def _readable(file: str) -> Iterator[None]:
    """Raise NoTrace if the file has no readable first line, or if its archive is damaged or was cut off."""
    try:
        yield
    except (csv.Error, EOFError, tarfile.TarError, zlib.error) as error:
        raise NoTrace(f"{file}: {error}") from error


def text_of(folder: Path, file: str, files: ExitStack) -> io.TextIOBase:
    """A file of a trace, out of its archive if it is in one. Raises NoTrace and OSError."""
    path = path_of(folder, file)
    if path is None:
        raise NoTrace(f"{folder} has no {file}")
    if path.suffix == ".csv":
        return files.enter_context(path.open(encoding="utf-8", errors="replace", newline=""))
    try:
        archive = files.enter_context(contextlib.closing(tarfile.open(path)))  # noqa: SIM115 - it is closed with these
        member = archive.extractfile(file)
    except (tarfile.TarError, KeyError) as error:
        raise NoTrace(f"{path}: {error}") from error
    if member is None:
        raise NoTrace(f"{path}: {file} is not a file in it")
    return io.TextIOWrapper(member, encoding="utf-8", errors="replace", newline="")


def number(column: str, text: str, most: float) -> float:
    """A number between 0 and ``most``. Raises Refused."""
    try:
        value = float(text)
    except ValueError:
        raise Refused(column, f"{column} {text[:40]!r} is not a number") from None
    if not 0 <= value <= most:
        raise Refused(column, f"{column} {text[:40]!r} is not between 0 and {most:g}")
    return value


def whole(column: str, text: str, most: int) -> int:
    """A whole number between 0 and ``most``, which may be written with ``.0``. Raises Refused."""
    value = number(column, text, most)
    if value != int(value):
        raise Refused(column, f"{column} {text[:40]!r} is not a whole number")
    return int(value)


def identity(*words: object) -> str:
    """A UUID that these words always give."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join(map(str, words))))
