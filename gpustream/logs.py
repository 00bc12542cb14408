"""Logs of the process: on standard error, structured, one line per event class at a time, and never a secret.

In:       records of :mod:`logging`; what a caller gives in ``extra`` becomes a field.
Out:      ``12:00:01 WARNING sinks.remote_write: refused  status=400 node=a`` or one JSON object a line.
State:    when each class of event was last written, and how many were held back since.
"""

import datetime as dt
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

import orjson

Format = Literal["text", "json"]

REPEAT_S = 10.0
"""An event class (logger, level, message before its arguments) is written at most this often."""

NOISE_S = 60.0
"""And that of a library, which repeats itself for as long as a broker is away, at most this often."""

_CLASSES = 1024
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
    handler = _StandardError()
    handler.setFormatter(Json() if log_format == "json" else Text())
    handler.addFilter(_is_news)
    handler.addFilter(Repeats())
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
    """What the caller gave in ``extra``, and how many records of this class were held back before it."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    held_back = getattr(record, "held_back", 0)
    return {**extra, "held_back": held_back} if held_back else extra


def _is_news(record: logging.LogRecord) -> bool:
    """Not the comings and goings of Faust's inner services, which it logs in the name of whoever started them."""
    return record.levelno > logging.INFO or not record.getMessage().startswith("[^")


class Repeats(logging.Filter):
    """Lets one record of an event class through per :data:`REPEAT_S`, with the number of those held back since."""

    def __init__(self, every_s: float = REPEAT_S, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._now = now
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        event = (record.name, record.levelno, str(record.msg))
        written, held_back = self._seen.pop(event, (float("-inf"), 0))
        now = self._now()
        every_s = NOISE_S if record.name.partition(".")[0] in _NOISY else self._every_s
        through = now - written >= every_s
        self._seen[event] = (now, 0) if through else (written, held_back + 1)
        if len(self._seen) > _CLASSES:
            self._seen.pop(next(iter(self._seen)))
        record.held_back = held_back
        return through


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


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is at that moment: a live view puts itself in between."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignored: there is only standard error."""
