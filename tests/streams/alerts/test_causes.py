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

Said = tuple[str, str, float, str | None]
"""The rule, the state, the minute, and why it ended."""

STEP_S = 30


def gpu_of_pod(busy: float, *, crashes: bool = False, memory: int = 70) -> Device:
    pod = holder(waiting="CrashLoopBackOff", restarts=7) if crashes else holder()
    return device(0, pod, busy=busy, memory_used_bytes=float(memory << 30), memory_total_bytes=float(80 << 30))


def ticks_of(*moments: tuple[float, Device]) -> list[Tick]:
    """A tick each half minute, until the minute of each moment."""
    found: list[Tick] = []
    for until, shown in moments:
        found += [tick(s, shown) for s in range(STEP_S * len(found), round(until * 60), STEP_S)]
    return found


def said(alerts: list[Alert]) -> list[Said]:
    start_s = tick(0).ts_ms / 1000
    return [
        (one.name, one.state, ((one.ends_at or one.starts_at).timestamp() - start_s) / 60, one.resolved_because)
        for one in alerts
    ]


def of(*moments: tuple[float, Device], rules: Rules = DEFAULTS) -> list[Said]:
    replay = Replay(rules)
    return said(
        [one for made in ticks_of(*moments) for one in replay.judge(made) if not one.revision or not one.is_open]
    )


IDLE, WORKS, CRASHES = gpu_of_pod(0.0), gpu_of_pod(0.9), gpu_of_pod(0.0, crashes=True)


def test_an_idle_pod_that_holds_memory_for_hours_is_one_alert() -> None:
    assert of((600, IDLE)) == [("GPUHeldIdle", "firing", 20.0, None)]


def test_a_pod_that_crashes_again_and_again_is_not_idle_too() -> None:
    assert of((120, CRASHES)) == [("GPUCrashLoop", "firing", 0.0, None)]


def test_an_idle_pod_that_begins_to_crash_changes_its_alert_in_that_tick() -> None:
    assert of((60, IDLE), (120, CRASHES)) == [
        ("GPUHeldIdle", "firing", 20.0, None),
        ("GPUCrashLoop", "firing", 60.0, None),
        ("GPUHeldIdle", "resolved", 60.0, "superseded"),
    ]


def test_what_waited_is_found_when_what_came_first_is_over() -> None:
    after = of((60, CRASHES), (120, IDLE))
    assert after == [
        ("GPUCrashLoop", "firing", 0.0, None),
        ("GPUCrashLoop", "resolved", 75.0, "condition"),
        ("GPUHeldIdle", "firing", 80.0, None),
    ]


def test_what_would_fire_soon_is_waited_for() -> None:
    silenced = msgspec.structs.replace(IDLE, holders=(holder(annotations={"gpustream.dev/alerts": "off"}),))
    late = overlay('[policies]\nlongest = "2h"')
    assert of((120, silenced), (200, IDLE), rules=late) == [("GPUHeldIdle", "firing", 135.0, None)]
    later = overlay('[rules.GPUHeldIdle]\nfor = "24h"')
    assert [name for name, *_ in of((200, IDLE), rules=later)] == ["GPUMemoryHoarded"]


@pytest.mark.parametrize("off", ["GPUHeldIdle", "GPUCrashLoop"])
def test_a_rule_that_is_off_hides_nothing(off: str) -> None:
    rules = overlay(f"[rules.{off}]\nenabled = false")
    found = {name for name, *_ in of((300, CRASHES), rules=rules)}
    assert found == ({"GPUCrashLoop"} if off == "GPUHeldIdle" else {"GPUHeldIdle"})


def test_two_rules_of_one_kind_both_fire() -> None:
    rules = overlay('[rules.Longer]\nkind = "held_idle"\nfor = "1h"\nseverity = "critical"')
    assert [name for name, *_ in of((120, IDLE), rules=rules)] == ["GPUHeldIdle", "Longer"]


def test_a_pod_that_works_six_minutes_an_hour_keeps_its_one_name() -> None:
    hours = [(66.0 * n + end, shown) for n in range(8) for end, shown in ((60.0, IDLE), (66.0, WORKS))]
    names = [name for name, state, *_ in of(*hours) if state == "firing"]
    assert names == ["GPUHeldIdle"] * 8


def test_the_others_on_a_shared_gpu_have_their_own_causes() -> None:
    crashes = holder("a", busy=0.0, waiting="CrashLoopBackOff", restarts=7)
    shared = device(0, crashes, holder("b", busy=0.0), busy=0.0)
    assert {name for name, *_ in of((60, shared))} == {"GPUCrashLoop", "GPUHeldIdle"}


def test_a_restart_at_any_tick_changes_nothing() -> None:
    moments = ((40, IDLE), (60, CRASHES), (140, WORKS), (160, IDLE), (170, WORKS), (200, IDLE), (210, CRASHES))
    ticks = ticks_of(*moments)
    state = machine.initial_state(ticks[0], LogPosition(0, ticks[0].ts_ms))
    written: list[list[str]] = []
    for again in (False, True):
        ids: list[str] = []
        now = state
        for number, made in enumerate(ticks):
            step = machine.step(now, made, LogPosition(number, made.ts_ms), DEFAULTS)
            ids += [transition_id(one) for one in step.alerts]
            now = msgspec.json.decode(msgspec.json.encode(step.state), type=NodeAlerts) if again else step.state
        written.append(ids)
    assert written[0] == written[1]
    assert len(written[0]) == len(set(written[0])) > 6
