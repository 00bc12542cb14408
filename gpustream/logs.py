"""Logs of the process: on standard error, structured, limited per subject, and never a secret.

In:       records of :mod:`logging`; the first argument of a message is its subject, the thing that it is about; what a
          caller gives in ``extra`` becomes a field.
Out:      ``12:00:01 WARNING sinks.remote_write: refused  status=400 node=a`` or one JSON object a line. To systemd's
          journal each line begins with its priority, ``<4>``, which the journal takes off: ``journalctl -p warning``.
State:    the messages of the last seconds, by text and subject, with the newest of each that was held back.
"""

import contextlib
import datetime as dt
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import orjson

from delivery.redaction import redact

REPEAT_S = 10.0
"""A message about one subject is written at most this often; then the newest that was held back is written."""

NOISE_S = 60.0
"""The same for messages of the Kafka libraries, which repeat them for as long as a broker is away."""

MAX_SUBJECTS = 64
"""At most this many subjects of one message have a line each in that time. Further ones share a line."""

MAX_SPELLS = 1024
_MAX_SUBJECT_CHARS = 200
_NOISY = ("aiokafka", "faust", "mode", "kafka", "asyncio", "aiohttp")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "held_back", "taskName"}
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def setup(log_format: Literal["text", "json"] = "text", level: int = logging.INFO) -> None:
    """Sends every record of the process to standard error. Safe to call again."""
    handler = LimitedHandler()
    handler.setFormatter(Json() if log_format == "json" else Text())
    # Faust logs the start and end of its inner services in the name of whoever started them.
    handler.addFilter(lambda record: record.levelno > logging.INFO or not record.getMessage().startswith("[^"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed in ``extra``, and how many messages of this kind were held back before it."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    held_back = getattr(record, "held_back", 0)
    return {**extra, "held_back": held_back} if held_back else extra


Message = tuple[str, int, str, float]
"""The kind of a record: its logger, level and format string, and how often it may be written, in seconds."""


@dataclass(slots=True)
class _QuietSpell:
    """The time after a message, ``written``, in which further ones of its subject are held back."""

    ends_s: float
    written: str
    held_back: int = 0
    newest: logging.LogRecord | None = None


class RateLimiter:
    """Decides which records are written at once, and which at the end of their quiet spell. ``now`` returns seconds.

    A record that is written has ``held_back``: how many of its kind were not, since the one before.
    """

    def __init__(self, every_s: float = REPEAT_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._spells: dict[tuple[Message, str], _QuietSpell] = {}
        self._subjects: Counter[Message] = Counter()
        self._crowded_out: list[logging.LogRecord] = []
        self._next_due_s = float("inf")

    @property
    def holds_back(self) -> bool:
        """Whether a record waits for the end of its quiet spell."""
        return bool(self._crowded_out) or any(spell.newest for spell in self._spells.values())

    def admit(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be written now. Call :meth:`due` before it."""
        every_s = NOISE_S if record.name.partition(".")[0] in _NOISY else self._every_s
        message = (record.name, record.levelno, str(record.msg), every_s)
        subject = str(record.args[0])[:_MAX_SUBJECT_CHARS] if isinstance(record.args, tuple) and record.args else ""
        if (message, subject) not in self._spells and self._subjects[message] >= MAX_SUBJECTS:
            subject = "and others"
        spell = self._spells.get((message, subject))
        if spell is None:
            self._open((message, subject), record)
            return True
        spell.newest, spell.held_back = record, spell.held_back + 1
        return False

    def due(self) -> Iterator[logging.LogRecord]:
        """The newest record that was held back in each quiet spell that is over."""
        crowded_out, self._crowded_out = self._crowded_out, []
        yield from crowded_out
        if self._now() < self._next_due_s:
            return
        for key in [key for key, spell in self._spells.items() if spell.ends_s <= self._now()]:
            if (newest := self._close(key)) is not None:
                self._open(key, newest)
                yield newest
        self._next_due_s = min((spell.ends_s for spell in self._spells.values()), default=float("inf"))

    def remaining(self) -> Iterator[logging.LogRecord]:
        """All records that are held back, for the end of the process, but not what a library only said twice."""
        for key, spell in list(self._spells.items()):
            newest = self._close(key)
            said_twice = spell.held_back == 1 and key[0][3] == NOISE_S
            if newest is not None and not (said_twice and newest.getMessage() == spell.written):
                yield newest
        yield from self._crowded_out

    def _open(self, key: tuple[Message, str], record: logging.LogRecord) -> None:
        if len(self._spells) >= MAX_SPELLS and (newest := self._close(next(iter(self._spells)))) is not None:
            self._crowded_out.append(newest)
        ends_s = self._now() + key[0][3]
        self._spells[key], self._next_due_s = _QuietSpell(ends_s, record.getMessage()), min(self._next_due_s, ends_s)
        self._subjects[key[0]] += 1

    def _close(self, key: tuple[Message, str]) -> logging.LogRecord | None:
        """Forgets a quiet spell. Returns its newest record, with the number of the others that were held back."""
        spell = self._spells.pop(key)
        self._subjects[key[0]] -= 1
        if not self._subjects[key[0]]:
            del self._subjects[key[0]]
        if spell.newest is not None:
            spell.newest.held_back = spell.held_back - 1
        return spell.newest


class Text(logging.Formatter):
    """A line for people: time, level, logger, message, fields, and the traceback under it."""

    def format(self, record: logging.LogRecord) -> str:
        clock = dt.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{clock} {record.levelname:<7} {record.name}: {record.getMessage()}"
        extra = "".join(f" {key}={value}" for key, value in fields(record).items())
        # what is in records and answers is not to be trusted: it must look like no other line, nor act on a terminal
        text = (line + ("  " + extra.lstrip() if extra else "")).replace("\n", "\n  ") + _traceback(self, record)
        return redact(_CONTROLS.sub(lambda control: f"\\x{ord(control[0]):02x}", text))


class Json(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, the fields, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        timestamp = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"ts": timestamp, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": redact(record.getMessage())}
        line |= {key: redact(value) if isinstance(value, str) else value for key, value in fields(record).items()}
        if traceback := _traceback(self, record):
            line["exception"] = redact(traceback.strip())
        try:
            return orjson.dumps(line, default=lambda value: redact(str(value)), option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:  # a name that is not UTF-8, or an integer of more than 64 bits
            texts = {key: redact(str(value)).encode("utf-8", "replace").decode() for key, value in line.items()}
            return orjson.dumps(texts).decode()


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at that moment, because a live view may have replaced it.

    A timer writes what the limiter holds back, because nothing else may ever be logged.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        logging.Handler.__init__(self)
        self._limiter = limiter or RateLimiter()
        self._timer: threading.Timer | None = None

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignored: there is only standard error."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, with its priority if standard error is the stream to the journal that systemd names, and
        not one that replaced it. Source of the priorities: sd-daemon(3) and systemd.exec(5)."""
        text = super().format(record)
        if journal := os.environ.get("JOURNAL_STREAM"):
            with contextlib.suppress(OSError, ValueError):  # a stream without a file
                written_to = os.fstat(self.stream.fileno())
                if journal == f"{written_to.st_dev}:{written_to.st_ino}":
                    priority = _PRIORITIES.get(record.levelno, _PRIORITIES[logging.INFO])
                    return "\n".join([f"<{priority}>{line}" for line in text.split("\n")])
        return text

    def emit(self, record: logging.LogRecord) -> None:
        """Writes what was held back until now, and this record, unless it is held back itself."""
        self._write(self._limiter.due())
        if self._limiter.admit(record):
            self._write([record])
        self._set_timer()

    def write_due(self) -> None:
        """Writes what was held back until now."""
        self.acquire()
        try:
            self._timer = None
            self._write(self._limiter.due())
            self._set_timer()
        finally:
            self.release()

    def close(self) -> None:
        """Writes all that is held back, because the process ends."""
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
            self._write(self._limiter.remaining())
        finally:
            self.release()
        super().close()

    def _write(self, records: Iterable[logging.LogRecord]) -> None:
        for record in records:
            super().emit(record)

    def _set_timer(self) -> None:
        if self._timer is None and self._limiter.holds_back:
            self._timer = threading.Timer(REPEAT_S, self.write_due)
            self._timer.daemon = True
            self._timer.start()
