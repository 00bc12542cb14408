"""For how long quotas hold a process up is logged, once a minute, and is a reason for `/readyz` while it lasts."""

import pytest

from delivery.quotas import Quotas


def test_what_adds_up_to_a_second_is_logged_once_a_minute_and_nothing_less(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    quotas = Quotas(lambda: now_s)
    quotas.note("c", "ProduceRequest", 0.0)
    quotas.note("c", "ProduceRequest", 0.9)
    assert (caplog.messages, quotas.problem()) == ([], None)

    quotas.note("c", "ProduceRequest", 0.5)
    quotas.note("c", "ProduceRequest", 30.0)
    now_s = 60.0
    quotas.note("c", "ProduceRequest", 2.0)

    text = "a quota of Kafka holds it up: raise its producer_byte_rate or request_percentage"
    assert caplog.messages == [
        f"client c: {text} (1.4 s since this was last logged)",
        f"client c: {text} (32.0 s since this was last logged)",
    ]
    assert quotas.problem() == text


def test_each_client_and_each_kind_of_quota_has_a_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    quotas = Quotas(lambda: 0.0)
    for client_id in ("a", "b"):
        for request in ("ProduceRequest", "FetchRequest", "HeartbeatRequest", "MetadataRequest"):
            quotas.note(client_id, request, 1.0)

    assert len(caplog.messages) == len(set(caplog.messages)) == 2 * 3


def test_a_process_that_was_not_held_up_for_a_minute_has_no_problem_any_more() -> None:
    now_s = 0.0
    quotas = Quotas(lambda: now_s)
    quotas.note("c", "FetchRequest", 1.0)
    now_s = 59.9
    assert quotas.problem() is not None
    now_s = 60.0
    assert quotas.problem() is None
