"""Which alerts are sent again."""

from sinks.alertmanager import RESOLVED_FOR_MS, ActiveAlerts
from sinks.alerts import key_of
from tests.sinks.alerts import START_MS, alert, alert_record


def test_what_is_open_is_due_for_ever_and_what_is_over_for_a_quarter_of_an_hour() -> None:
    active, over_ms = ActiveAlerts(), START_MS + 5_000
    active.put(alert("open"), START_MS)
    active.put(alert("over"), START_MS)
    active.put(alert("over", ends_ms=over_ms - 1_000_000), over_ms)
    both = [alert("open").fingerprint, alert("over").fingerprint]
    assert active.due(over_ms + RESOLVED_FOR_MS) == both
    assert active.states(both) == [alert("open"), alert("over", ends_ms=over_ms - 1_000_000)]
    assert active.count_open() == 1
    assert active.due(over_ms + RESOLVED_FOR_MS + 1) == both[:1]
    assert active.due(over_ms + 10 * 365 * 86_400_000) == both[:1]
    assert active.states(both) == [alert("open")]


def test_what_is_deleted_is_not_reported() -> None:
    active = ActiveAlerts()
    active.put(alert(), START_MS)
    active.remove(key_of(alert_record(b"", key=None)))
    active.remove(key_of(alert_record(b"", key=b"\xff")))
    assert active.count_open() == 1
    active.remove(key_of(alert_record(alert())))
    assert active.due(START_MS) == []


def test_an_alert_that_fires_again_is_reported_as_it_is_now() -> None:
    active = ActiveAlerts()
    active.put(alert(ends_ms=START_MS + 1), START_MS)
    active.put(alert(starts_ms=START_MS + 2), START_MS)
    assert active.states(active.due(START_MS)) == [alert(starts_ms=START_MS + 2)]
    active.clear()
    assert active.due(START_MS) == []


def test_an_alert_whose_severity_changes_ends_under_its_old_labels() -> None:
    active = ActiveAlerts()
    original, changed = (
        alert(),
        alert(severity="critical", labels={**alert().labels, "severity": "critical"}, revision=1),
    )
    active.put(original, START_MS)
    (end,) = active.renamed([changed])
    assert (end.labels, end.is_open, end.starts_at) == (original.labels, False, original.starts_at)
    assert active.renamed([alert(revision=1)]) == []


def test_an_alert_that_fires_again_under_other_labels_ends_under_the_old_ones_though_nothing_said_that_it_ended() -> (
    None
):
    active, again = ActiveAlerts(), alert(starts_ms=START_MS + 1, labels={"k8s_pod_name": "renamed"})
    active.put(alert(), START_MS)
    (end,) = active.renamed([again])
    assert (end.labels, end.is_open, end.starts_at) == (alert().labels, False, alert().starts_at)
