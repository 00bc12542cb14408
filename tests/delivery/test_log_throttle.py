"""What is logged again and again is logged once a minute."""

from delivery.log_throttle import LogThrottle


def test_the_same_message_is_due_again_after_a_minute_and_not_before() -> None:
    now_s = 0.0
    throttle = LogThrottle(lambda: now_s)
    assert [throttle.is_due("no broker"), throttle.is_due("no broker")] == [True, False]
    now_s = 59.9
    assert not throttle.is_due("no broker")
    now_s = 60.0
    assert [throttle.is_due("no broker"), throttle.is_due("no broker")] == [True, False]


def test_another_message_is_due_at_once() -> None:
    throttle = LogThrottle(lambda: 0.0)
    assert [throttle.is_due(message) for message in ("no broker", "no topic", "no broker")] == [True, True, False]
