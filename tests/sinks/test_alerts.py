"""What sinks make of records of gpu.alerts."""

import json
from typing import Any

import msgspec
import pytest

from sinks.alerts import Transitions, read_alert
from sinks.outcomes import Undecodable
from tests.sinks.alerts import START_MS, alert, alert_record, deleted
from tests.sinks.records import Read
from topics.alerts import TOPIC


def test_the_topic_s_own_example_is_read() -> None:
    value = msgspec.json.encode(TOPIC.example)
    one = read_alert(alert_record(value, key=TOPIC.example["fingerprint"].encode()))
    assert one is not None
    assert one.name == "GPUHeldIdle"


def test_a_tombstone_is_no_alert_and_no_error() -> None:
    assert read_alert(deleted(alert(), at_ms=1)) is None


def test_what_is_not_known_of_an_alert_may_be_null() -> None:
    value = json.dumps({**json.loads(msgspec.json.encode(alert())), "value": None, "ends_at": None, "later": 1})
    assert read_alert(alert_record(value.encode(), key=alert().fingerprint.encode())) == alert(value=None)


BAD: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"{nonsense",
    "not UTF-8": b'{"name": "\xff"}',
    "too deep": b"[" * 100_000,
    "a list": b"[]",
    "another schema": {"schema": 2},
    "no state": {"state": None},
    "a state that is no word": {"state": 1},
    "no fingerprint": {"fingerprint": "GPUHeldIdle"},
    "no time": {"starts_at": "yesterday"},
    "a time without a zone": {"starts_at": "2026-11-20T23:59:12.5"},
    "labels that are no text": {"labels": {"gpu_index": 0}},
    "resolved without an end": {"state": "resolved"},
    "before 1970": {"starts_at": "0001-01-01T00:00:00Z"},
    "after 9999": {"starts_at": "9999-12-31T23:59:59-05:00"},
    "ended before 1970": {"state": "resolved", "ends_at": "1969-12-31T23:59:59Z"},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_is_no_alert_is_undecodable(bad: bytes | dict[str, Any]) -> None:
    good = json.loads(msgspec.json.encode(alert()))
    value = bad if isinstance(bad, bytes) else json.dumps({**good, **bad}).encode()
    with pytest.raises(Undecodable, match=r"not a record of gpu\.alerts"):
        read_alert(alert_record(value, key=alert().fingerprint.encode()))


@pytest.mark.parametrize("key", [b"", b"0123456789abcdef", b"\xff"])
def test_an_alert_under_another_key_is_undecodable(key: bytes) -> None:
    with pytest.raises(Undecodable, match="key"):
        read_alert(alert_record(alert(), key=key))


def test_a_transition_is_news_once() -> None:
    known, firing, over = Transitions(), alert(), alert(ends_ms=START_MS + 5)
    for one in (firing, over):
        assert known.is_news(one)
        known.update(alert_record(one), one)
        assert not known.is_news(one)
    assert not known.is_news(firing), "it is over, and does not fire again with the same start"


@pytest.mark.parametrize("starts_ms", [START_MS + 60_000, START_MS - 60_000])
def test_an_alert_that_fires_again_is_news_by_whichever_clock(starts_ms: int) -> None:
    known = Transitions()
    over = alert(ends_ms=START_MS + 5)
    known.update(alert_record(over), over)
    assert known.is_news(alert(starts_ms=starts_ms))


def test_alerts_are_distinguished_and_what_is_deleted_is_forgotten() -> None:
    known, one, other = Transitions(), alert("a"), alert("b")
    known.update(alert_record(one), one)
    assert known.is_news(other)
    known.update(deleted(other, at_ms=START_MS), None)
    assert not known.is_news(one)
    known.update(deleted(one, at_ms=START_MS), None)
    assert known.is_news(one)
    known.update(alert_record(one), one)
    for key in (None, b"\xff"):
        known.update(Read(0, None, key=key), None)
    assert not known.is_news(one)
    known.clear()
    assert known.is_news(alert("a"))


def test_an_update_is_news_once_and_none_after_the_end() -> None:
    known = Transitions()
    first, update, end = alert(), alert(revision=1), alert(ends_ms=START_MS + 1, revision=1)
    for one in (first, update, end):
        assert known.is_news(one)
        known.update(alert_record(one), one)
        assert not known.is_news(one)
    assert not any(known.is_news(one) for one in (first, update))
