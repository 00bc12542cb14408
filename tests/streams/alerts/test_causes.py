"""One cause, one alert: what a pod does with a device is reported by the first rule that says why."""

import msgspec
import pytest

from streams.alerts import machine
from streams.alerts.machine import LogPosition
from streams.alerts.memory import NodeAlerts
from streams.alerts.node import Replay
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.ticks import DEFAULTS, device, holder, overlay, tick
from topics.alerts import Alert, transition_id

Event = tuple[str, str, float, str | None]
"""The rule, the state, the minute, and why it ended."""

STEP_S = 30


def gpu_of_pod(busy: float, *, crashes: bool = False, memory: int = 70) -> Device:
    pod = holder(waiting="CrashLoopBackOff", restarts=7) if crashes else holder()
    return device(0, pod, busy=busy, memory_used_bytes=float(memory << 30), memory_total_bytes=float(80 << 30))


def ticks_of(*moments: tuple[float, Device]) -> list[Tick]:
    """A tick each half minute, until the minute of each moment."""
    ticks: list[Tick] = []
    for end_minute, sample in moments:
        ticks += [tick(s, sample) for s in range(STEP_S * len(ticks), round(end_minute * 60), STEP_S)]
    return ticks


def events(alerts: list[Alert]) -> list[Event]:
    start_s = tick(0).ts_ms / 1000
    return [
        (
            alert.name,
            alert.state,
            ((alert.ends_at or alert.starts_at).timestamp() - start_s) / 60,
            alert.resolved_because,
        )
        for alert in alerts
    ]


def events_of(*moments: tuple[float, Device], rules: Rules = DEFAULTS) -> list[Event]:
    replay = Replay(rules)
    return events(
        [
            alert
            for moment in ticks_of(*moments)
            for alert in replay.judge(moment)
            if not alert.revision or not alert.is_open
        ]
    )


IDLE, WORKS, CRASHES = gpu_of_pod(0.0), gpu_of_pod(0.9), gpu_of_pod(0.0, crashes=True)


def test_an_idle_pod_that_holds_memory_for_hours_is_one_alert() -> None:
    assert events_of((600, IDLE)) == [("GPUHeldIdle", "firing", 20.0, None)]


def test_a_pod_that_crashes_again_and_again_is_not_idle_too() -> None:
    assert events_of((120, CRASHES)) == [("GPUCrashLoop", "firing", 0.0, None)]


def test_an_idle_pod_that_begins_to_crash_changes_its_alert_in_that_tick() -> None:
    assert events_of((60, IDLE), (120, CRASHES)) == [
        ("GPUHeldIdle", "firing", 20.0, None),
        ("GPUCrashLoop", "firing", 60.0, None),
        ("GPUHeldIdle", "resolved", 60.0, "superseded"),
    ]


def test_what_waited_is_found_when_what_came_first_is_over() -> None:
    after = events_of((60, CRASHES), (120, IDLE))
    assert after == [
        ("GPUCrashLoop", "firing", 0.0, None),
        ("GPUCrashLoop", "resolved", 75.0, "condition"),
        ("GPUHeldIdle", "firing", 80.0, None),
    ]


def test_what_would_fire_soon_is_waited_for() -> None:
    silenced = msgspec.structs.replace(IDLE, holders=(holder(annotations={"gpustream.dev/alerts": "off"}),))
    rules = overlay('[policies]\nlongest = "2h"')
    assert events_of((120, silenced), (200, IDLE), rules=rules) == [("GPUHeldIdle", "firing", 135.0, None)]
    later = overlay('[rules.GPUHeldIdle]\nfor = "24h"')
    assert [name for name, *_ in events_of((200, IDLE), rules=later)] == ["GPUMemoryHoarded"]


@pytest.mark.parametrize("off", ["GPUHeldIdle", "GPUCrashLoop"])
def test_a_rule_that_is_off_hides_nothing(off: str) -> None:
    rules = overlay(f"[rules.{off}]\nenabled = false")
    names = {name for name, *_ in events_of((300, CRASHES), rules=rules)}
    assert names == ({"GPUCrashLoop"} if off == "GPUHeldIdle" else {"GPUHeldIdle"})


@pytest.mark.parametrize(("minutes", "fired"), [(60, ["GPUHeldIdle", "Other"]), (12, ["Other", "GPUHeldIdle"])])
def test_two_rules_of_one_kind_both_fire_and_do_not_wait_for_each_other(minutes: int, fired: list[str]) -> None:
    rules = overlay(f'[rules.Other]\nkind = "held_idle"\nfor = "{minutes}m"\nseverity = "critical"')
    assert [name for name, *_ in events_of((120, IDLE), rules=rules)] == fired


def test_a_pod_that_works_six_minutes_an_hour_keeps_its_one_name() -> None:
    hours = [(66.0 * n + end, sample) for n in range(8) for end, sample in ((60.0, IDLE), (66.0, WORKS))]
    names = [name for name, state, *_ in events_of(*hours) if state == "firing"]
    assert names == ["GPUHeldIdle"] * 8


def test_the_others_on_a_shared_gpu_have_their_own_causes() -> None:
    crashes = holder("a", busy=0.0, waiting="CrashLoopBackOff", restarts=7)
    shared = device(0, crashes, holder("b", busy=0.0), busy=0.0)
    assert {name for name, *_ in events_of((60, shared))} == {"GPUCrashLoop", "GPUHeldIdle"}


def test_a_restart_at_any_tick_changes_nothing() -> None:
    moments = ((40, IDLE), (60, CRASHES), (140, WORKS), (160, IDLE), (170, WORKS), (200, IDLE), (210, CRASHES))
    ticks = ticks_of(*moments)
    state = machine.initial_state(ticks[0], LogPosition(0, ticks[0].ts_ms))
    written_ids: list[list[str]] = []
    for restarts in (False, True):
        ids: list[str] = []
        node_state = state
        for number, moment in enumerate(ticks):
            step = machine.step(node_state, moment, LogPosition(number, moment.ts_ms), DEFAULTS)
            ids += [transition_id(alert) for alert in step.alerts]
            node_state = (
                msgspec.json.decode(msgspec.json.encode(step.state), type=NodeAlerts) if restarts else step.state
            )
        written_ids.append(ids)
    assert written_ids[0] == written_ids[1]
    assert len(written_ids[0]) == len(set(written_ids[0])) > 6
