"""Logs are structured, not repeated, and hold no secret."""

import ast
import logging
import re
import sys
import threading
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import pytest

from gpustream import logs


def _record(message: str, *args: Any, level: int = logging.WARNING, **extra: Any) -> logging.LogRecord:
    record = logging.getLogger("sinks.remote_write").makeRecord(
        "sinks.remote_write", level, __file__, 1, message, args, None, extra=extra
    )
    record.created = 1_000_000_000.25
    return record


def test_a_line_of_text_ends_with_its_fields() -> None:
    line = logs.Text().format(_record("refused %s", "a tick", status=400, node="n-0"))

    assert line.endswith("WARNING sinks.remote_write: refused a tick  status=400 node=n-0")


def test_a_line_of_json_holds_the_fields() -> None:
    line = msgspec.json.decode(logs.Json().format(_record("refused", status=400, nodes={"n-0"})))

    assert line == {
        "ts": "2001-09-09T01:46:40.250+00:00",
        "level": "warning",
        "logger": "sinks.remote_write",
        "message": "refused",
        "status": 400,
        "nodes": "{'n-0'}",
    }


def test_what_json_can_not_hold_is_text_in_it() -> None:
    line = msgspec.json.decode(logs.Json().format(_record("refused %s", "\udcff", status=2**70)))

    assert (line["message"], line["status"]) == ("refused ?", str(2**70))


def test_a_traceback_is_kept_in_both_formats() -> None:
    record = _record("failed")
    try:
        raise ValueError("boom")
    except ValueError:
        record.exc_info = sys.exc_info()

    assert "ValueError: boom" in logs.Text().format(record)
    assert "ValueError: boom" in msgspec.json.decode(logs.Json().format(record))["exception"]


def test_a_line_to_the_journal_of_systemd_begins_with_its_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        monkeypatch.setattr(sys, "stderr", journal)
        handler = logs.LimitedHandler()
        handler.setFormatter(logs.Text())
        handler.emit(_record("to a file"))
        inode = (tmp_path / "journal").stat()
        for stream in (f"{inode.st_dev}:1", f"{inode.st_dev}:{inode.st_ino}"):
            monkeypatch.setenv("JOURNAL_STREAM", stream)
            handler.emit(_record("of %s", stream))
        handler.emit(_record("failed\nbadly", level=logging.ERROR))
        handler.close()
    starts = [line.split()[0][:3] for line in (tmp_path / "journal").read_text().splitlines()]
    assert [start if "<" in start else "" for start in starts] == ["", "", "<4>", "<3>", "<3>"]


class Log:
    """A limiter between a test's clock and what it lets through."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.limiter = logs.RateLimiter(10.0, lambda: self.now_s)
        self.written: list[tuple[str, int]] = []

    def say(self, record: logging.LogRecord) -> None:
        self.pass_s(0.0)
        if self.limiter.admit(record):
            self._write(record)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for record in self.limiter.due():
            self._write(record)

    def _write(self, record: logging.LogRecord) -> None:
        self.written.append((record.getMessage(), logs.fields(record).get("held_back", 0)))


def test_a_message_about_one_subject_is_written_once_per_window_and_the_newest_of_the_others_at_its_end() -> None:
    log = Log()
    for n in range(4):
        log.say(_record("%s: not accepted: try %d", "mimir", n))
    assert log.written == [("mimir: not accepted: try 0", 0)]

    log.pass_s(10.0)
    assert log.written[1:] == [("mimir: not accepted: try 3", 2)]
    log.say(_record("%s: not accepted: try %d", "mimir", 4))
    log.pass_s(10.0)
    log.pass_s(10.0)
    log.say(_record("%s: not accepted: try %d", "mimir", 5))
    assert log.written[2:] == [("mimir: not accepted: try 4", 0), ("mimir: not accepted: try 5", 0)]


def test_each_subject_has_its_line() -> None:
    log = Log()
    for kind in ("Job", "RayCluster", "Notebook", "TrainJob"):
        log.say(_record("%s: not to be read", kind))
        log.say(_record("%s: not to be read", kind))
    log.say(_record("%s: to be read", "Job"))
    log.say(_record("%s: not to be read", "Job", level=logging.ERROR))

    kinds = ("Job", "RayCluster", "Notebook", "TrainJob")
    assert [text for text, _ in log.written[:4]] == [f"{kind}: not to be read" for kind in kinds]
    assert len(log.written) == 6


def test_subjects_without_number_share_a_line_that_counts_them() -> None:
    log = Log()
    for n in range(10_000):
        log.say(_record("%s: unknown device id", f"node-{n}"))
    assert len(log.written) == logs.MAX_SUBJECTS + 1

    log.pass_s(10.0)
    assert log.written[-1] == ("node-9999: unknown device id", 10_000 - logs.MAX_SUBJECTS - 2)


def test_a_library_repeats_itself_less_often() -> None:
    log = Log()
    noise = {"name": "aiokafka.conn", "levelno": logging.ERROR, "msg": "no broker"}
    for _ in range(3):
        log.say(logging.makeLogRecord(noise))
        log.pass_s(29.9)
    assert len(log.written) == 2


def test_what_is_remembered_is_bounded_and_nothing_held_back_is_lost_by_that() -> None:
    log = Log()
    for n in range(5000):
        log.say(_record(f"message {n}"))
        log.say(_record(f"message {n}"))
    assert len(log.limiter._spells) == logs.MAX_SPELLS

    written = [text for text, _ in log.written] + [record.getMessage() for record in log.limiter.remaining()]
    assert written.count("message 0") == written.count("message 4999") == 2


def test_what_is_held_back_is_written_by_a_timer_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "REPEAT_S", 0.02)
    handler = logs.LimitedHandler(logs.RateLimiter(0.01))
    written = threading.Event()
    monkeypatch.setattr(handler, "flush", lambda: written.set())
    handler.handle(_record("%s: one", "a"))
    written.clear()
    handler.handle(_record("%s: two", "a"))
    assert written.wait(30.0)
    handler.handle(_record("%s: three", "b"))
    handler.handle(_record("%s: three", "b"))
    handler.close()

    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == ["a: one", "a: two", "b: three", "b: three"]


def test_what_a_library_says_twice_is_written_once_if_the_process_ends() -> None:
    limiter = logs.RateLimiter()
    twice, again, other = (
        logging.LogRecord(name, logging.ERROR, "", 0, "no broker at %s", (port,), None)
        for name, port in (("aiokafka", 1), ("aiokafka", 2), ("gpustream", 1))
    )

    for record in (twice, twice, again, again, again, other, other):
        limiter.admit(record)

    assert list(limiter.remaining()) == [again, other]


def test_a_messages_subject_is_one_argument() -> None:
    """What comes before a colon or parenthesis names the thing, and things differ only in the first argument."""
    several = []
    for package in ("gpustream", "producers", "streams", "sinks", "delivery", "topics"):
        for path in Path(package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "log." in text else ():
                if _is_log_call(node) and node.args and isinstance(node.args[0], ast.Constant):
                    head = re.split("[:(]", str(node.args[0].value))[0]
                    if head.count("%s") > 1:
                        several.append(f"{path}:{node.lineno}: {node.args[0].value!r}")
                elif _is_log_call(node):
                    several.append(f"{path}:{node.lineno}: not a constant text")

    assert not several, "\n".join(several)


def _is_log_call(node: ast.AST) -> TypeGuard[ast.Call]:
    called = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(called, ast.Attribute)
        and called.attr in ("debug", "info", "warning", "error", "exception", "critical")
        and ast.unparse(called.value) in ("log", "self._log")
    )


@pytest.mark.parametrize(
    "text",
    [
        "POST https://user:s3cret@mimir/push failed",
        "the proxy http://user:my@s3cret@proxy:3128 refuses",
        "{'Authorization': 'Bearer s3cretT0ken'}",
        "Authorization: Basic czNjcmV0OnM=",
        "authorization=s3cret",
        "password='s3cret'",
        'password="my s3cret"',
        "token: s3cret",
        "https://mimir/push?access_token=s3cret",
        '{"client_secret": "s3cret"}',
        r'{"error": "{\"password\": \"my s3cret\"}"}',
        r'{"error": "{\"authorization\": \"Negotiate s3cret\"}"}',
        "API key: s3cret",
    ],
)
def test_secrets_are_never_written(text: str) -> None:
    for formatter in (logs.Text(), logs.Json()):
        line = formatter.format(_record("request failed: %s", text))
        assert "s3cret" not in line
        assert "czNjcmV0" not in line
        assert "***" in line


def test_a_text_that_is_not_to_be_trusted_looks_like_no_other_line_and_does_nothing_to_a_terminal() -> None:
    text = logs.Text().format(_record("refused: %s", "a\n12:00:00 INFO all is well\r\x1b]0;title\x07\x9b2J"))

    assert [line.startswith(" ") for line in text.split("\n")] == [False, True]
    assert text.replace("\n", "").isprintable()
    assert "\\x1b]0;title\\x07" in text


def test_setup_sends_records_to_the_standard_error_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.setup("json")
        logging.getLogger("gpustream").info("started", extra={"component": "fake"})
        logging.getLogger("aiokafka.consumer").info("noise")
        logging.getLogger("abc").info("[^-Consumer]: Starting...")
        root.handlers[0].flush()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)

    lines = capsys.readouterr().err.splitlines()
    assert [msgspec.json.decode(line)["component"] for line in lines] == ["fake"]
