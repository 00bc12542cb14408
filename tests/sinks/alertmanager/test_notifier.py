"""Alerts in the form that Alertmanager accepts."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sinks.alertmanager import postable, request
from tests.sinks.alerts import START_MS, alert
from topics.times import MAX_TIME_MS, epoch_ms, time_of

NOW = time_of(START_MS + 300_000)


def encoded(transition: Any, now: datetime = NOW, url: str | None = None) -> dict[str, Any]:
    """The one alert of a request, as it is on the wire."""
    (posted,) = json.loads(request([transition], now, 60.0, url).body)
    assert isinstance(posted, dict)
    return posted


def test_an_open_alert_ends_by_itself_after_four_resends() -> None:
    firing = alert()
    assert encoded(firing, url="https://grafana.example/d/gpu") == {
        "labels": {**firing.labels, "gpustream_fingerprint": firing.fingerprint},
        "annotations": firing.annotations,
        "startsAt": "2026-11-20T23:59:12.500000Z",
        "endsAt": "2026-11-21T00:08:12.500000Z",
        "generatorURL": "https://grafana.example/d/gpu",
    }


def test_a_resolved_alert_ends_when_it_did() -> None:
    posted = encoded(alert(ends_ms=START_MS + 60_000))
    assert posted["startsAt"] == "2026-11-20T23:59:12.500000Z"
    assert posted["endsAt"] == "2026-11-21T00:00:12.500000Z"
    assert "generatorURL" not in posted


def test_an_alert_without_labels_has_its_name_and_severity() -> None:
    posted_labels = encoded(alert(labels={}))["labels"]
    assert posted_labels == {
        "alertname": "GPUHeldIdle",
        "severity": "warning",
        "gpustream_fingerprint": alert().fingerprint,
    }


def test_two_alerts_with_the_same_labels_are_two() -> None:
    labels = {"alertname": "GPUHeldIdle", "k8s_pod_name": "bert-0"}
    assert (
        postable(alert("a", labels=labels), NOW, 60.0).labels != postable(alert("b", labels=labels), NOW, 60.0).labels
    )


@pytest.mark.parametrize("ends_ms", [START_MS + 3_600_000, START_MS - 3_600_000])
def test_a_resolved_alert_is_over_now_and_not_before_it_began_whatever_its_node_s_clock_says(ends_ms: int) -> None:
    posted = postable(alert(ends_ms=ends_ms), NOW, 60.0)
    assert posted.starts_at <= posted.ends_at <= NOW


@example(starts_ms=MAX_TIME_MS, lasted_ms=None, resend_s=60.0)
@given(
    starts_ms=st.integers(0, MAX_TIME_MS),
    lasted_ms=st.one_of(st.none(), st.integers(-(2**40), 2**40)),
    resend_s=st.floats(1, 9e4),
)
def test_alertmanager_finds_no_error_in_the_times(starts_ms: int, lasted_ms: int | None, resend_s: float) -> None:
    ends_ms = None if lasted_ms is None else min(max(0, starts_ms + lasted_ms), MAX_TIME_MS)
    posted = postable(alert(starts_ms=starts_ms, ends_ms=ends_ms), NOW, resend_s)
    assert posted.starts_at == min(time_of(starts_ms), NOW)
    assert posted.ends_at >= posted.starts_at
    if lasted_ms is None:
        assert posted.ends_at == NOW + timedelta(seconds=4 * resend_s)


def test_a_resolved_alert_of_a_node_whose_clock_was_ahead_is_over_now() -> None:
    ahead_ms = epoch_ms(NOW) + 8 * 3_600_000
    posted = postable(alert(starts_ms=ahead_ms, ends_ms=ahead_ms), NOW, 60.0)
    assert posted.ends_at <= NOW


def test_the_time_has_a_zone() -> None:
    assert postable(alert(), datetime.now(UTC), 60.0).ends_at.tzinfo is UTC
