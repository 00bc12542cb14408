"""Logs of the process: on standard error, structured, limited per subject, and never a secret.

In:       records of :mod:`logging`; the first argument of a message is its subject, the thing that it is about; what a
          caller gives in ``extra`` becomes a field.
Out:      ``12:00:01 WARNING sinks.remote_write: refused  status=400 node=a`` or one JSON object a line.
State:    the messages of the last seconds by what they say and of which subject, and the newest that was held back.
"""

import datetime as dt
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import orjson

Format = Literal["text", "json"]

REPEAT_S = 10.0
"""A message about one subject is written at most this often; at the end of that time the newest that was held back."""

NOISE_S = 60.0
"""And that of a library, which repeats itself for as long as a broker is away, at most this often."""

MOST_SUBJECTS = 64
"""At most this many subjects of one message have a line each in that time. Further ones share a line."""

MOST_WINDOWS = 1024
_LONGEST_SUBJECT = 200
_NOISY = ("aiokafka", "faust", "mode", "kafka", "asyncio", "aiohttp")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "held_back", "taskName"}
_SECRETS = (
    (re.compile(r"(://)[^/@\s]+@"), r"\1***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"(?i)\b(authorization)(['\"]?\s*[:=]\s*['\"]?)[^'\",}]+"), r"\1\2***"),
    (re.compile(r"(?i)\b(password|token|secret)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",]+"), r"\1\2***"),
)


def setup(log_format: Format = "text", level: int = logging.INFO) -> None:
    """Sends every record of the process to standard error. Safe to call again."""
    handler = LimitedHandler()
    handler.setFormatter(Json() if log_format == "json" else Text())
    # Faust logs the start and end of its inner services in the name of whoever started them.
    handler.addFilter(lambda record: record.levelno > logging.INFO or not record.getMessage().startswith("[^"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def redact(text: str) -> str:
    """The text without passwords in URLs, credentials in headers, and values of what is called a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave in ``extra``, and how many of these messages were held back before it."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    held_back = getattr(record, "held_back", 0)
    return {**extra, "held_back": held_back} if held_back else extra


Message = tuple[str, int, str, float]
"""What a record says: its logger, level and text before its arguments, and how often that may be written."""


@dataclass(slots=True)
class _QuietSpell:
    """The time after a message was written in which further ones of its subject are held back."""

    ends_s: float
    held_back: int = 0
    newest: logging.LogRecord | None = None


class RateLimiter:
    """Which records are written at once, and which at the end of their window. ``now`` gives seconds.

    A record that is written has ``held_back``: how many of its kind were not, since the one before.
    """

    def __init__(self, every_s: float = REPEAT_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._quiet_spells: dict[tuple[Message, str], _QuietSpell] = {}
        self._subjects: Counter[Message] = Counter()
        self._crowded_out: list[logging.LogRecord] = []
        self._look_s = float("inf")

    @property
    def holds_back(self) -> bool:
        """Whether something waits for the end of its window."""
        return bool(self._crowded_out) or any(window.newest for window in self._quiet_spells.values())

    def admit(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be written now. Call :meth:`due` before it."""
        every_s = NOISE_S if record.name.partition(".")[0] in _NOISY else self._every_s
        message = (record.name, record.levelno, str(record.msg), every_s)
        subject = str(record.args[0])[:_LONGEST_SUBJECT] if isinstance(record.args, tuple) and record.args else ""
        if (message, subject) not in self._quiet_spells and self._subjects[message] >= MOST_SUBJECTS:
            subject = "and others"
        window = self._quiet_spells.get((message, subject))
        if window is None:
            self._open((message, subject))
            return True
        window.newest, window.held_back = record, window.held_back + 1
        return False

    def due(self) -> Iterator[logging.LogRecord]:
        """The newest record that was held back in each window that is over."""
        crowded_out, self._crowded_out = self._crowded_out, []
        yield from crowded_out
        if self._now() < self._look_s:
            return
        for key in [key for key, window in self._quiet_spells.items() if window.ends_s <= self._now()]:
            if (newest := self._close(key)) is not None:
                self._open(key)
                yield newest
        self._look_s = min((window.ends_s for window in self._quiet_spells.values()), default=float("inf"))

    def rest(self) -> Iterator[logging.LogRecord]:
        """All that is held back, because the process ends."""
        for key in list(self._quiet_spells):
            if (newest := self._close(key)) is not None:
                yield newest
        yield from self._crowded_out

    def _open(self, key: tuple[Message, str]) -> None:
        if (
            len(self._quiet_spells) >= MOST_WINDOWS
            and (newest := self._close(next(iter(self._quiet_spells)))) is not None
        ):
            self._crowded_out.append(newest)
        ends_s = self._now() + key[0][3]
        self._quiet_spells[key], self._look_s = _QuietSpell(ends_s), min(self._look_s, ends_s)
        self._subjects[key[0]] += 1

    def _close(self, key: tuple[Message, str]) -> logging.LogRecord | None:
        """Forget a window; gives its newest record, which says how many others there were."""
        window = self._quiet_spells.pop(key)
        self._subjects[key[0]] -= 1
        if not self._subjects[key[0]]:
            del self._subjects[key[0]]
        if window.newest is not None:
            window.newest.held_back = window.held_back - 1
        return window.newest


class Text(logging.Formatter):
    """A line for people: time, level, logger, message, fields, and the traceback under it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        at = dt.datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{at} {record.levelname:<7} {record.name}: {record.getMessage()}"
        extra = "".join(f" {key}={value}" for key, value in fields(record).items())
        return redact(line + ("  " + extra.lstrip() if extra else "") + _traceback(self, record))


class Json(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, the fields, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        at = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"ts": at, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": redact(record.getMessage())}
        line |= {key: redact(value) if isinstance(value, str) else value for key, value in fields(record).items()}
        if traceback := _traceback(self, record):
            line["exception"] = redact(traceback.strip())
        return orjson.dumps(line, default=lambda value: redact(str(value)), option=orjson.OPT_NON_STR_KEYS).decode()


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at that moment, because a live view may have replaced it.

    What the limiter holds back is written by a timer, because nothing else may ever be logged.
    """

    def __init__(self, limiter: RateLimiter | None = None) -> None:
        logging.Handler.__init__(self)
        self._limiter = limiter or RateLimiter()
        self._timer: threading.Timer | None = None

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignored: there is only standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write what was held back until now, and this record, unless it is held back itself."""
        self._write(self._limiter.due())
        if self._limiter.admit(record):
            self._write([record])
        self._set_timer()

    def write_due(self) -> None:
        """Write what was held back until now."""
        self.acquire()
        try:
            self._timer = None
            self._write(self._limiter.due())
            self._set_timer()
        finally:
            self.release()

    def close(self) -> None:
        """Write all that is held back, because the process ends."""
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
            self._write(self._limiter.rest())
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
