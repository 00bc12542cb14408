"""How sinks read records of gpu.alerts."""

import json
from typing import Any

import msgspec
import pytest

from sinks.alerts import Transitions, read_alert
from sinks.outcomes import Undecodable
from tests.sinks.alerts import START_MS, alert, alert_record, deleted
from tests.sinks.records import ConsumedRecord
from topics.alerts import TOPIC


def test_the_topic_s_own_example_is_read() -> None:
    value = msgspec.json.encode(TOPIC.example)
    read_back = read_alert(alert_record(value, key=TOPIC.example["fingerprint"].encode()))
    assert read_back is not None
    assert read_back.name == "GPUHeldIdle"


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
    transitions, firing, over = Transitions(), alert(), alert(ends_ms=START_MS + 5)
    for transition in (firing, over):
        assert transitions.is_news(transition)
        transitions.update(alert_record(transition), transition)
        assert not transitions.is_news(transition)
    assert not transitions.is_news(firing), "it is over, and does not fire again with the same start"


def test_transitions_that_are_written_again_after_a_crash_are_no_news_any_of_them() -> None:
    transitions, all_of_them = Transitions(), (alert(), alert(revision=1), alert(ends_ms=START_MS + 5, revision=1))
    for transition in all_of_them:
        transitions.update(alert_record(transition), transition)
    for transition in all_of_them:
        assert not transitions.is_news(transition)
        transitions.update(alert_record(transition), transition)


@pytest.mark.parametrize("starts_ms", [START_MS + 60_000, START_MS - 60_000])
def test_an_alert_that_fires_again_is_news_by_whichever_clock(starts_ms: int) -> None:
    transitions = Transitions()
    over = alert(ends_ms=START_MS + 5)
    transitions.update(alert_record(over), over)
    assert transitions.is_news(alert(starts_ms=starts_ms))


def test_alerts_are_distinguished_and_what_is_deleted_is_forgotten() -> None:
    transitions, first, other = Transitions(), alert("a"), alert("b")
    transitions.update(alert_record(first), first)
    assert transitions.is_news(other)
    transitions.update(deleted(other, at_ms=START_MS), None)
    assert not transitions.is_news(first)
    transitions.update(deleted(first, at_ms=START_MS), None)
    assert transitions.is_news(first)
    transitions.update(alert_record(first), first)
    for key in (None, b"\xff"):
        transitions.update(ConsumedRecord(0, None, key=key), None)
    assert not transitions.is_news(first)
    transitions.clear()
    assert transitions.is_news(alert("a"))


def test_an_update_is_news_once_and_none_after_the_end() -> None:
    transitions = Transitions()
    first, update, end = alert(), alert(revision=1), alert(ends_ms=START_MS + 1, revision=1)
    for transition in (first, update, end):
        assert transitions.is_news(transition)
        transitions.update(alert_record(transition), transition)
        assert not transitions.is_news(transition)
    assert not any(transitions.is_news(transition) for transition in (first, update))
