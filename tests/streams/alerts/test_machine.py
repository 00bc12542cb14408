"""The alert machine: when a condition fires, when it is resolved, from ticks alone."""

from collections import Counter
from itertools import takewhile

import msgspec
import pytest
from hypothesis import given

from streams.alerts import machine, reports
from streams.alerts.machine import MAX_GAP_MS, REPEAT_MS, LogPosition
from streams.alerts.memory import NodeAlerts, decode, encode
from streams.alerts.reports import DELETE_MS, Step, finish_step
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.stories import SHORT_RULES, later, lives
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, gpu, holder, mig, overlay, tick
from topics.alerts import Alert, transition_id
from topics.attributed import AttributedEvent
from topics.times import epoch_ms, time_of
from topics.workloads import UnwellDevice

IDLE = device(0, holder(), busy=0.0)
ALMOST_IDLE = device(0, holder(), busy=0.005)
BUSY = device(0, holder(), busy=0.9)
UNKNOWN = device(0, holder())
HOT = device(0, busy=0.0, clock_event_reasons=0x40)
COOL = device(0, busy=0.0, clock_event_reasons=0)


class Life:
    """A node's state, and all alerts that were written for it."""

    def __init__(self, rules: Rules = SHORT_RULES) -> None:
        self.rules, self.state = rules, None
        self.written: list[Alert] = []
        self.repeated: list[Alert] = []
        self.deleted: list[str] = []

    state: NodeAlerts | None

    def step(self, next_tick: Tick) -> list[Alert]:
        """The alerts that are written at a tick."""
        position = LogPosition(next_tick.offset, next_tick.ts_ms)
        before = self.state or machine.initial_state(next_tick, position)
        return self.take(machine.step(before, next_tick, position, self.rules))

    def take(self, step: Step) -> list[Alert]:
        self.state = step.state
        self.written += step.alerts
        self.repeated += [alert for kind, _, alert in step.writes if isinstance(alert, Alert) and kind == "repeat"]
        self.deleted += [fingerprint for _, fingerprint, alert in step.writes if alert is None]
        return step.alerts

    def go(self, seconds: range, *devices: Device, interval_ms: int | None = None) -> list[tuple[int, str, str]]:
        """Equal ticks at these seconds; the alerts that were written, and at which second."""
        ticks = [(s, tick(s, *devices, interval_ms=interval_ms)) for s in seconds]
        return [(s, alert.name, alert.state) for s, moment in ticks for alert in self.step(moment)]


def second(at_s: float) -> object:
    return time_of(START_MS + round(at_s * 1000))


# -- firing


def test_a_condition_fires_in_the_tick_in_which_it_has_held_for_long_enough() -> None:
    life = Life()
    assert life.go(range(60), IDLE) == [(23, "GPUHeldIdle", "firing")]
    (alert,) = life.written
    assert (alert.starts_at, alert.ends_at, alert.value) == (second(23), None, 20.0)
    assert alert.labels["k8s_pod_name"] == "bert-0"


def test_a_pod_whose_uid_is_not_known_for_a_while_is_the_one_that_its_device_had() -> None:
    unnamed = device(0, holder(pod_uid=None), busy=0.0)
    life = Life()
    assert life.go(range(10), IDLE) == life.go(range(10, 20), unnamed) == []
    assert life.go(range(20, 30), IDLE) == [(23, "GPUHeldIdle", "firing")]
    assert life.go(range(30, 40), unnamed) == life.go(range(40, 60), IDLE) == []
    other = device(0, holder("bert-1", pod_uid=None), busy=0.0)
    assert life.go(range(60, 61), other) == [(60, "GPUHeldIdle", "resolved")], "it has another name"


def test_a_condition_that_ends_before_its_duration_never_fires() -> None:
    life = Life()
    for start in range(0, 200, 20):
        assert life.go(range(start, start + 19), IDLE) == []
        assert life.go(range(start + 19, start + 20), BUSY) == []
    assert life.state is not None
    assert life.state.tracked == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('for = "30m"', []),
        ('severity = "info"', []),
        ('labels = { pager = "no" }', []),
        ('for = "20s"\ncritical_after = "30s"', [(40, "firing", "critical", None)]),
        ("idle_below = 0.001", [(45, "resolved", "warning", "condition")]),
        ("enabled = false", [(40, "resolved", "warning", "rule_removed")]),
        ('[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nenabled = false', [(40, "resolved", "warning", "policy")]),
        ('[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nseverity = "info"', []),
    ],
)
def test_an_alert_that_fires_goes_on_or_ends_by_a_new_file_of_rules(
    text: str, expected: list[tuple[int, str, str, str | None]]
) -> None:
    life = Life()
    life.go(range(40), IDLE)
    life.rules = overlay(f'[rules.GPUHeldIdle]\nkeep_firing_for = "5s"\ngrace = "3s"\n{text}')
    written = [(s, alert) for s in range(40, 60) for alert in life.step(tick(s, ALMOST_IDLE))]
    assert [(s, alert.state, alert.severity, alert.resolved_because) for s, alert in written] == expected


def test_without_evidence_a_pending_condition_neither_fires_nor_ends() -> None:
    life = Life()
    life.go(range(20), IDLE)
    assert life.go(range(20, 40), UNKNOWN) == []
    assert life.go(range(40, 41), IDLE) == [(40, "GPUHeldIdle", "firing")]


def test_after_a_minute_without_evidence_a_pending_condition_begins_again() -> None:
    life = Life()
    life.go(range(20), IDLE)
    life.go(range(20, 20 + MAX_GAP_MS // 1000), UNKNOWN)
    assert life.go(range(80, 120), IDLE) == [(100, "GPUHeldIdle", "firing")]


def test_after_a_minute_without_a_tick_a_pending_condition_begins_again() -> None:
    life = Life()
    life.go(range(20), IDLE)
    assert life.go(range(80, 120), IDLE) == [(100, "GPUHeldIdle", "firing")]
    life = Life()
    life.go(range(20), IDLE)
    assert life.go(range(79, 80), IDLE) == [(79, "GPUHeldIdle", "firing")]


def test_a_node_that_is_read_every_five_minutes_has_alerts_like_any_other() -> None:
    life = Life(DEFAULTS)
    assert life.go(range(0, 3600, 300), IDLE, interval_ms=300_000) == [(1200, "GPUHeldIdle", "firing")]
    life = Life(DEFAULTS)
    life.go(range(0, 900, 300), IDLE, interval_ms=300_000)
    assert life.go(range(2100, 2700, 300), IDLE, interval_ms=300_000) == [], "it was not read for four intervals"


def test_after_a_clock_was_set_back_a_pending_condition_begins_again() -> None:
    life = Life()
    life.go(range(1000, 1090), HOT)
    assert life.go(range(500, 630), HOT) == [(600, "GPUThermalSlowdown", "firing")]


def test_after_a_clock_was_set_back_by_hours_an_idle_gpu_fires_after_its_grace_and_duration() -> None:
    life = Life()
    life.go(range(36_000, 36_010), IDLE)
    assert life.go(range(120), IDLE) == [(23, "GPUHeldIdle", "firing")]


def test_a_firing_alert_survives_a_clock_set_back_by_hours_and_ends_when_the_pod_works_or_is_gone() -> None:
    for end in (BUSY, device(0, busy=0.0)):
        life = Life()
        life.go(range(36_000, 36_030), IDLE)
        assert [alert.state for alert in life.written] == ["firing"]
        assert life.go(range(120), IDLE) == []
        assert [state for _, _, state in life.go(range(120, 150), end)] == ["resolved"]


@pytest.mark.parametrize("by_s", [61, 540, 7200])
def test_a_clock_that_is_set_ahead_and_back_prolongs_nothing_and_ends_nothing_that_holds(
    by_s: int,
) -> None:
    life = Life()
    assert life.go(range(10), IDLE) == []
    assert life.go(range(10 + by_s, 20 + by_s), IDLE) == []
    assert life.go(range(20, 60), IDLE) == [(40, "GPUHeldIdle", "firing")]
    assert life.go(range(60 + by_s, 70 + by_s), IDLE) == []
    assert life.go(range(70, 80), IDLE) == []
    assert [state for _, _, state in life.go(range(80, 90), BUSY)] == ["resolved"]


@pytest.mark.parametrize("by_s", [61, 540, 7200])
def test_while_a_clock_stands_still_nothing_fires_and_after_it_every_duration_begins_again(by_s: int) -> None:
    life = Life()
    assert life.go(range(10), IDLE) == []
    assert [alerts for _ in range(by_s) if (alerts := life.step(tick(9, IDLE)))] == []
    assert life.go(range(9 + by_s, 60 + by_s), IDLE) == [(29 + by_s, "GPUHeldIdle", "firing")]


def test_an_event_fires_at_once_and_lasts_for_a_while_after_the_last_of_its_kind() -> None:
    life = Life()
    life.go(range(1), device(0))
    life.step(tick(1, device(0, events=(AttributedEvent("xid", 79, START_MS),), xids={"79": 1})))
    assert [(a.name, a.starts_at) for a in life.written] == [("GPUXid", second(1))]
    end = life.go(range(2, 300), device(0, xids={"79": 1}))
    assert [state for _, _, state in end] == ["resolved"]
    assert end[0][0] > 30


# -- being resolved


def test_a_firing_condition_is_resolved_when_it_has_not_held_for_long_enough() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert life.go(range(30, 60), BUSY) == [(35, "GPUHeldIdle", "resolved")]
    fired, resolved = life.written
    assert (resolved.ends_at, resolved.resolved_because) == (second(35), "condition")
    same = {"state": "firing", "ends_at": None, "resolved_because": None}
    figures = {"value": fired.value, "annotations": fired.annotations}
    assert msgspec.structs.replace(resolved, **same, **figures) == fired


def test_a_resolved_alert_says_how_much_was_wasted() -> None:
    life = Life()
    life.go(range(30), IDLE)
    life.go(range(30, 60), BUSY)
    fired, resolved = life.written
    assert (fired.value, fired.annotations["wasted_gpu_seconds"]) == (20.0, "20")
    assert (resolved.value, resolved.annotations["wasted_gpu_seconds"]) == (27.0, "27")
    assert resolved.annotations["description"].endswith("In the end it was 27s, 27 GPU-seconds.")


def test_flapping_neither_resolves_nor_fires_again() -> None:
    life = Life()
    life.go(range(30), IDLE)
    for start in range(30, 90, 5):
        assert life.go(range(start, start + 4), BUSY) == []
        assert life.go(range(start + 4, start + 5), IDLE) == []


def test_without_evidence_a_firing_condition_fires_on() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert life.go(range(30, 600), UNKNOWN) == []
    assert life.go(range(600, 606), BUSY) == [(605, "GPUHeldIdle", "resolved")]


def test_a_pod_that_ends_resolves_its_alert_at_once() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert life.go(range(30, 31), device(0, busy=0.0)) == [(30, "GPUHeldIdle", "resolved")]
    assert life.written[-1].resolved_because == "pod_ended"


def test_a_pod_that_a_late_tick_lacks_has_not_ended_for_certain() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert [life.step(tick(s, device(0, busy=0.0), attribution="late")) for s in range(30, 34)] == [[]] * 4
    assert life.go(range(34, 60), IDLE) == []


def test_a_device_whose_holders_are_not_known_ends_no_pod_though_those_of_others_are() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert life.go(range(30, 60), device(0, busy=0.0, attribution="none")) == []
    assert life.go(range(60, 61), device(0, busy=0.0)) == [(60, "GPUHeldIdle", "resolved")]


def test_a_tick_that_does_not_say_who_holds_what_ends_no_pod() -> None:
    life = Life()
    life.go(range(30), IDLE)
    for s in range(30, 90):
        assert life.step(tick(s, device(0, busy=0.0), attribution="none")) == []
    assert life.go(range(90, 120), IDLE) == []


@pytest.mark.parametrize("attribution", ["exact", "none"])
def test_an_xid_error_of_a_pod_resolves_whether_or_not_it_is_known_who_holds_what(attribution: str) -> None:
    life = Life()
    life.go(range(1), device(0, holder()))
    life.step(tick(1, device(0, holder(), events=(AttributedEvent("xid", 13, START_MS),), xids={"13": 1})))
    assert [(alert.name, alert.labels["k8s_pod_name"]) for alert in life.written] == [("GPUXid", "bert-0")]
    holders = (holder(),) if attribution == "exact" else ()
    for s in range(2, 300):
        life.step(tick(s, device(0, *holders, xids={"13": 1}), attribution=attribution))
    assert [(alert.state, alert.resolved_because) for alert in life.written[1:]] == [("resolved", "condition")]


def test_the_alert_of_a_pod_ends_with_its_device_whether_or_not_it_is_known_who_holds_what() -> None:
    idle_mig = mig(1, holder(), graphics_engine_active_ratio=0.0)
    for before, after, resolved_s in (
        ((device(0), idle_mig), (device(0),), 65),  # removed, and 5 s of keep_firing_for
        ((IDLE, device(1)), (device(1),), 60 + 601 + 5),  # missing for more than ten minutes
    ):
        life = Life()
        life.go(range(60), *before)
        resolved = [
            (at_s, alert.resolved_because)
            for at_s in range(60, 700)
            for alert in life.step(tick(at_s, *after, attribution="none"))
            if alert.name == "GPUHeldIdle"
        ]
        assert resolved == [(resolved_s, "device_removed")]


def test_the_alert_of_a_pod_ends_with_its_device_also_if_it_went_while_the_clock_was_ahead() -> None:
    life = Life()
    life.go(range(60), IDLE, device(1))
    life.step(later(tick(40 * 86_400, device(1)), seq=61, offset=60))
    assert (666, "GPUHeldIdle", "resolved") in life.go(range(60, 700), device(1))


def test_a_pods_own_policy_resolves_its_alert_at_once() -> None:
    life = Life()
    life.go(range(30), IDLE)
    off = holder(annotations={"gpustream.dev/alerts": "off"})
    assert life.go(range(30, 31), device(0, off, busy=0.0)) == [(30, "GPUHeldIdle", "resolved")]
    assert life.written[-1].resolved_because == "policy"


def test_removing_a_rule_resolves_its_alerts_at_the_next_tick_and_ends_what_is_pending() -> None:
    life = Life()
    life.go(range(30), IDLE)
    life.rules = overlay("[rules.GPUHeldIdle]\nenabled = false")
    assert life.go(range(30, 31), IDLE) == [(30, "GPUHeldIdle", "resolved")]
    assert life.written[-1].resolved_because == "rule_removed"
    assert life.state is not None
    assert life.state.tracked == ()


def test_an_alert_that_fires_again_is_another_one_even_if_the_clock_was_set_back() -> None:
    life = Life()
    life.go(range(1000, 1130), HOT)
    life.go(range(1130, 1150), COOL)
    life.go(range(870, 1001), HOT)
    first, end, second_firing = life.written
    assert first.fingerprint == second_firing.fingerprint
    assert end.ends_at is not None
    assert second_firing.starts_at > end.ends_at > first.starts_at


# -- writing again, and deleting


def test_what_the_api_server_says_of_a_lost_gpu_later_is_written_once() -> None:
    life, lost_gpu = Life(), device(0, state="lost")
    life.go(range(30), lost_gpu)
    (alert,) = life.written
    assert (alert.name, "api_status" in alert.annotations) == ("GPULost", False)
    for at_s in range(30, 40):
        unwell = (UnwellDevice(gpu(0), health="Unhealthy"),) if at_s != 35 else ()
        life.step(msgspec.structs.replace(tick(at_s, lost_gpu), unwell=unwell))
    (_, later) = life.written
    assert (later.state, later.annotations["api_status"], later.revision) == ("firing", "Unhealthy", 1)
    assert later.fingerprint == alert.fingerprint
    assert life.repeated == []


def test_an_open_alert_is_written_again_every_day_and_is_the_same_with_evidence_and_without() -> None:
    life = Life()
    life.go(range(101), HOT)
    day_s = REPEAT_MS // 1000
    assert life.go(range(120, 2 * day_s, 60), HOT) == life.go(range(2 * day_s, 3 * day_s, 60), UNKNOWN) == []
    assert life.repeated == life.written * 2


def test_a_resolved_alert_is_deleted_after_a_week_unless_it_fired_again() -> None:
    life = Life()
    life.go(range(101), HOT)
    life.go(range(101, 130), COOL)
    week_s = DELETE_MS // 1000
    life.go(range(150, week_s, 3600), COOL)
    assert life.deleted == []
    life.go(range(week_s + 60, week_s + 200, 60), COOL)
    assert life.deleted == [life.written[0].fingerprint]
    assert life.state is not None
    assert life.state.resolved == {}
    life.go(range(week_s + 200, week_s + 310), HOT)
    assert life.state.resolved == {}


# -- nodes without ticks


def test_a_silent_nodes_alert_starts_a_rules_duration_after_its_last_tick_and_once() -> None:
    life = Life()
    life.go(range(3), HOT)
    assert life.state is not None
    for _ in range(2):
        life.take(machine.announce(machine.fire_node_silent(life.state, SHORT_RULES, 60_000)))
    (alert,) = life.written
    assert (alert.name, alert.starts_at, alert.state) == ("NodeSilent", second(62), "firing")


def test_a_node_that_is_seldom_read_is_silent_after_three_of_its_intervals() -> None:
    life = Life()
    life.go(range(0, 200, 100), BUSY, interval_ms=100_000)
    assert life.state is not None
    assert machine.fire_node_silent(life.state, SHORT_RULES, 299_999) is life.state
    life.take(machine.announce(machine.fire_node_silent(life.state, SHORT_RULES, 300_000)))
    (alert,) = life.written
    assert (alert.name, alert.starts_at, alert.value) == ("NodeSilent", second(400), 300.0)


def test_the_next_tick_resolves_a_silent_nodes_alert() -> None:
    life = Life()
    life.go(range(3), BUSY)
    assert life.state is not None
    life.take(machine.announce(machine.fire_node_silent(life.state, SHORT_RULES, 60_000)))
    assert life.go(range(300, 301), BUSY) == [(300, "NodeSilent", "resolved")]
    assert life.written[-1].resolved_because == "ticks"


def test_a_silent_nodes_alert_fires_on_for_its_rules_time_and_goes_on_if_the_node_is_silent_again() -> None:
    life = Life(overlay('[rules.NodeSilent]\nfor = "60s"\nkeep_firing_for = "5m"'))

    def silent_for(lasted_ms: int) -> list[Alert]:
        assert life.state is not None
        return life.take(machine.announce(machine.fire_node_silent(life.state, life.rules, lasted_ms)))

    life.go(range(3), BUSY)
    silent_for(60_000)
    assert life.go(range(100, 110), BUSY) == []
    assert silent_for(59_000) == []
    assert silent_for(200_000) == []
    assert life.go(range(320, 700), BUSY) == [(620, "NodeSilent", "resolved")]
    assert life.written[-1].resolved_because == "ticks"


def test_a_node_that_is_silent_for_the_rules_critical_after_is_critical() -> None:
    life = Life(overlay('[rules.NodeSilent]\nfor = "60s"\nseverity = "warning"\ncritical_after = "1h"'))
    life.go(range(3), BUSY)
    for lasted_ms in (60_000, 3_599_000, 3_600_000, 3_601_000):
        assert life.state is not None
        life.take(machine.announce(machine.fire_node_silent(life.state, life.rules, lasted_ms)))
    described = [(alert.severity, alert.labels["severity"], alert.revision, alert.starts_at) for alert in life.written]
    assert described == [("warning", "warning", 0, second(62)), ("critical", "critical", 1, second(62))]


def test_a_rule_about_silent_nodes_may_wait_for_longer_than_a_day() -> None:
    life, hour_ms = Life(overlay('[rules.NodeSilent]\nfor = "2d"')), 3_600_000
    life.go(range(3), BUSY)
    for hours in (24, 47, 48, 71, 72):
        assert life.state is not None
        now_ms = life.state.logged_ms + hours * hour_ms
        life.take(machine.step_without_tick(life.state, life.rules, now_ms=now_ms, removed_ms=None))
        life.take(machine.announce(life.state))
    assert [alert.resolved_because for alert in life.written] == [None, "node_removed"]
    assert life.written[0].starts_at == second(2 + 2 * 86_400)
    assert life.written[1].ends_at == second(2 + 3 * 86_400)


def test_a_gpu_that_is_forgotten_before_its_alert_would_fire_is_forgotten_that_long_after_it() -> None:
    life = Life(overlay('[rules.GPUMissing]\nfor = "2m"\nforget = "1m"\nkeep_firing_for = "0s"'))
    life.go(range(3), device(0), device(1))
    assert life.go(range(3, 300), device(0)) == [(123, "GPUMissing", "firing"), (183, "GPUMissing", "resolved")]


def test_a_delayed_tick_resolves_a_silent_nodes_alert_no_earlier_than_it_started() -> None:
    life = Life()
    life.go(range(3), BUSY)
    assert life.state is not None
    life.take(machine.announce(machine.fire_node_silent(life.state, SHORT_RULES, 60_000)))
    life.go(range(3, 5), BUSY)
    assert life.written[-1].ends_at == life.written[0].starts_at


def test_a_node_that_is_gone_has_its_alerts_resolved_and_in_the_end_nothing_left() -> None:
    life = Life()
    life.go(range(30), IDLE)
    assert life.state is not None
    life.take(machine.announce(machine.retire(life.state, START_MS + 86_400_000)))
    assert [a.resolved_because for a in life.written if a.state == "resolved"] == ["node_removed"]
    assert not machine.is_over(life.state)
    assert life.take(machine.announce(machine.retire(life.state, START_MS + 86_400_000))) == []
    life.take(finish_step(life.state, [], START_MS + 86_400_000 + DELETE_MS))
    assert life.deleted == [life.written[0].fingerprint]
    assert machine.is_over(life.state)


def test_of_a_node_in_maintenance_nothing_fires_and_what_fired_or_was_pending_has_ended() -> None:
    def maintained(plain: Tick) -> Tick:
        return msgspec.structs.replace(plain, node_labels={"gpustream.dev/maintenance": "new disks"})

    life, hot = Life(), device(1, clock_event_reasons=0x40)
    assert life.go(range(30), IDLE, hot) == [(23, "GPUHeldIdle", "firing")]
    (end,) = life.step(maintained(tick(30, IDLE, hot)))
    assert (end.state, end.resolved_because) == ("resolved", "maintenance")
    assert [life.step(maintained(tick(s, IDLE))) for s in range(31, 100)] == [[]] * 69
    assert life.state is not None
    assert machine.fire_node_silent(life.state, SHORT_RULES, 3_600_000) is life.state
    assert life.go(range(100, 130), IDLE, hot) == [(120, "GPUHeldIdle", "firing")]


# -- what must hold of every story


@given(lives())
def test_every_firing_is_followed_by_at_most_one_resolved_of_its_fingerprint(ticks: list[Tick]) -> None:
    life = Life()
    for node_tick in ticks:
        life.step(node_tick)

    assert max(Counter(map(transition_id, life.written)).values(), default=1) == 1
    open_alerts: dict[str, Alert] = {}
    for alert in life.written:
        before = open_alerts.pop(alert.fingerprint, None)
        assert (before is None) == (alert.state == "firing" and not alert.revision)
        if alert.is_open:
            open_alerts[alert.fingerprint] = alert
        if before is not None:
            assert alert.starts_at == before.starts_at
            assert {**alert.labels, "severity": ""} == {**before.labels, "severity": ""}
        if alert.ends_at is not None or not alert.is_open:
            assert alert.ends_at is not None
            assert alert.ends_at >= alert.starts_at
    assert life.state is not None
    still_open = [entry.alert for entry in life.state.tracked if entry.alert is not None]
    assert {transition_id(alert) for alert in still_open} == {transition_id(alert) for alert in open_alerts.values()}


def _since(ms: int, ticks: list[Tick]) -> list[Tick]:
    """The last ticks, all of them after a time; before a clock was set back, others may be of later times."""
    return list(takewhile(lambda tick: tick.ts_ms > ms, reversed(ticks)))


@given(lives())
def test_no_gpu_that_worked_within_the_duration_is_held_idle(ticks: list[Tick]) -> None:
    life = Life()
    (rule,) = [rule for rule in SHORT_RULES.rules if rule.name == "GPUHeldIdle"]
    fired_ms = set[int]()
    for i, node_tick in enumerate(ticks):
        for alert in life.step(node_tick):
            starts_ms = epoch_ms(alert.starts_at)
            if alert.name != "GPUHeldIdle" or alert.state != "firing" or starts_ms in fired_ms:
                continue  # an open alert is written again after a day, and when it becomes critical
            fired_ms.add(starts_ms)
            since_ms = starts_ms - rule.for_ms
            run = _since(since_ms, ticks[: i + 1])
            worked = [t for t in run for d in t.devices if d.uuid == gpu(0) and (d.metrics.gpu_utilization_ratio or 0)]
            assert worked == []


@given(lives())
def test_a_state_that_was_written_and_read_goes_on_in_the_same_way(ticks: list[Tick]) -> None:
    life, reborn = Life(), Life()
    for node_tick in ticks:
        life.step(node_tick)
        if reborn.state is not None:
            reborn.state = decode(encode(reborn.state))
        reborn.step(node_tick)
        assert reborn.state == life.state
    for uninterrupted, restarted in zip(life.written, reborn.written, strict=True):
        assert encode(uninterrupted) == encode(restarted)


# -- bounds


def test_pods_that_come_and_go_with_errors_of_their_own_make_no_state_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MOST_POD_EVENTS", 10)
    monkeypatch.setattr(reports, "MOST_RESOLVED", 20)
    life, wrong, sizes = Life(DEFAULTS), {"gpustream.dev/alerts": "never"}, set[tuple[bool, bool]]()
    for s in range(0, 7200, 10):
        pod, events = holder(f"p{s // 20}", annotations=wrong), (AttributedEvent("xid", 31),)
        state = "lost" if s >= 7000 else "ok"
        life.step(tick(s, device(0, pod, busy=0.9, events=events, xids={"31": s + 1}), device(1, state=state)))
        assert life.state is not None
        sizes.add((len(life.state.tracked) <= 10 + 4, len(life.state.resolved) <= 20))
        assert state == "ok" or "GPULost" in {condition.name for condition in life.state.tracked}
    assert sizes == {(True, True)}
    names = Counter(alert.name for alert in life.written if alert.state == "firing")
    assert (names["GPULost"], names["GPUPolicyInvalid"]) == (1, 360)
    assert 20 < names["GPUXid"] < 360
    resolved = [alert.fingerprint for alert in life.written if alert.state == "resolved"]
    assert life.state is not None
    assert sorted(life.deleted) == sorted(set(resolved) - life.state.resolved.keys())
