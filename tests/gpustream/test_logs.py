"""Logs are structured, not repeated, and hold no secret."""

import logging
import sys
from typing import Any

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


def test_a_traceback_is_kept_in_both_formats() -> None:
    record = _record("failed")
    try:
        raise ValueError("boom")
    except ValueError:
        record.exc_info = sys.exc_info()

    assert "ValueError: boom" in logs.Text().format(record)
    assert "ValueError: boom" in msgspec.json.decode(logs.Json().format(record))["exception"]


def test_an_event_class_is_written_once_per_period_with_the_number_held_back() -> None:
    now = [100.0]
    repeats = logs.Repeats(10.0, lambda: now[0])
    passed = [repeats.filter(_record("broker %s is away", n)) for n in range(4)]
    now[0] = 110.0
    later = _record("broker %s is away", 4)

    assert passed == [True, False, False, False]
    assert repeats.filter(later)
    assert logs.fields(later) == {"held_back": 3}


def test_a_library_repeats_itself_less_often() -> None:
    now = [100.0]
    repeats = logs.Repeats(10.0, lambda: now[0])
    record = logging.makeLogRecord({"name": "aiokafka.conn", "levelno": logging.ERROR, "msg": "no broker"})
    passed = [repeats.filter(record)]
    for now[0] in (110.0, 159.0, 160.0):
        passed.append(repeats.filter(record))

    assert passed == [True, False, False, True]


def test_another_event_class_is_not_held_back() -> None:
    repeats = logs.Repeats(10.0, lambda: 0.0)

    assert repeats.filter(_record("one"))
    assert repeats.filter(_record("two"))
    assert repeats.filter(_record("one", level=logging.ERROR))


def test_the_classes_remembered_are_bounded() -> None:
    repeats = logs.Repeats(10.0, lambda: 0.0)
    for n in range(5000):
        repeats.filter(_record(f"message {n}"))

    assert len(repeats._seen) <= 1024


@pytest.mark.parametrize(
    "text",
    [
        "POST https://user:s3cret@mimir/push failed",
        "{'Authorization': 'Bearer s3cretT0ken'}",
        "Authorization: Basic czNjcmV0OnM=",
        "authorization=s3cret",
        "password='s3cret'",
        "token: s3cret",
    ],
)
def test_secrets_are_never_written(text: str) -> None:
    for formatter in (logs.Text(), logs.Json()):
        line = formatter.format(_record("request failed: %s", text))
        assert "s3cret" not in line
        assert "czNjcmV0" not in line
        assert "***" in line


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
