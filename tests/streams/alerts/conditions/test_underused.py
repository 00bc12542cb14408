"""GPUUnderused and GPUMemoryHoarded: what a pod did with its GPU in a window. GPUCrashLoop: the pod that holds it."""

from typing import Any

import msgspec
import pytest

from streams.alerts.node import Replay
from tests.streams.alerts.ticks import START_MS, device, findings_in, holder, overlay, tick, verdict
from topics.alerts import Alert
from topics.attributed import Holder, Parts
from topics.times import epoch_ms

ON = overlay("""
    [rules.GPUUnderused]
    enabled = true
    window = "30m"
    keep_firing_for = "15m"
    [rules.GPUMemoryHoarded]
    enabled = true
    window = "15m"
    [rules.GPUCrashLoop]
    enabled = true
""")
GIB = 1 << 30


def fired(name: str, busy: dict[int, float], minutes: int, *, pod: Holder | None = None, **fields: Any) -> list[Alert]:
    """The alerts for a GPU whose utilization changes at these minutes of a cycle of 14."""
    replay, alerts, share = Replay(ON), list[Alert](), 0.0
    for second in range(0, minutes * 60, 10):
        share = busy.get(second // 60 % 14, share) if second % 60 == 0 else share
        alerts += replay.judge(tick(second, device(0, pod or holder(), busy=share, **fields)))
    return [alert for alert in alerts if alert.name == name]


def test_a_notebook_with_a_cell_each_14_minutes_is_underused_and_never_idle() -> None:
    assert not fired("GPUHeldIdle", {0: 0.6, 1: 0.0}, 120)
    alert, *rest = fired("GPUUnderused", {0: 0.6, 1: 0.0}, 120)
    assert not rest
    assert epoch_ms(alert.starts_at) - START_MS == 42 * 60_000  # with the next cell: until then it might be idle
    assert alert.annotations["summary"] == "Job ml/bert: 1 of 1 GPU underused (in the 30m until 2026-11-21 00:41 UTC)"
    assert alert.annotations["evidence"].startswith("GPU 0 of n: used for ")
    assert float(alert.annotations["wasted_gpu_hours"]) == pytest.approx(0.7 * 0.94, abs=0.03)


@pytest.mark.parametrize(
    ("busy", "is_found"),
    [({0: 0.0}, False), ({0: 0.05}, True), ({0: 0.09}, True), ({0: 0.11}, False), ({0: 0.9}, False)],
)
def test_what_does_nothing_at_all_is_idle_and_what_is_used_for_a_tenth_is_used(
    busy: dict[int, float], is_found: bool
) -> None:
    assert bool(fired("GPUUnderused", busy, 45)) is is_found


def test_pods_that_share_a_gpu_waste_together_what_they_leave_of_it() -> None:
    pods = [holder(f"pod-{number}", busy=0.09, workload=None) for number in range(10)]
    shared = device(0, *pods, busy=0.9, unattributed=Parts(utilization_ratio=0.0))
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 2700, 10):
        alerts += replay.judge(tick(second, shared))
    assert len(alerts) == 10
    assert sum(float(alert.annotations["gpu_share"]) for alert in alerts) == pytest.approx(1 - 0.9)


def test_it_is_resolved_when_the_window_has_enough_work() -> None:
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 7200, 10):
        alerts += replay.judge(tick(second, device(0, holder(), busy=0.03 if second < 3600 else 0.95)))
    alert, end = [candidate for candidate in alerts if candidate.name == "GPUUnderused"]
    assert (alert.state, end.state, end.resolved_because) == ("firing", "resolved", "condition")


def test_it_ends_with_its_pod_though_another_one_holds_the_gpu_then() -> None:
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 5400, 10):
        pod = holder("first") if second < 3600 else holder("second")
        alerts += replay.judge(tick(second, device(0, pod, busy=0.03)))
    alert, end = [candidate for candidate in alerts if candidate.name == "GPUUnderused"][:2]
    assert (alert.gpus[0].pod, end.state, end.resolved_because) == ("ml/first", "resolved", "pod_ended")
    assert end.ends_at is not None
    assert epoch_ms(end.ends_at) - START_MS == 3_600_000


def test_it_fires_on_while_a_clock_that_was_set_back_shows_less_than_a_window() -> None:
    short_window = overlay('[rules.GPUUnderused]\nwindow = "10m"\nkeep_firing_for = "1m"')
    replay, alerts = Replay(short_window), list[Alert]()
    in_a_step = 200 - 3600 - START_MS // 1000 % 300  # two steps have ended 400 s later
    for number, second in enumerate((*range(0, 7200, 10), *range(in_a_step, in_a_step + 590, 10))):
        sample_tick = tick(second, device(0, holder(), busy=0.05))
        alerts += replay.judge(msgspec.structs.replace(sample_tick, seq=number + 1, offset=number))
    assert [alert.state for alert in alerts if alert.name == "GPUUnderused"] == ["firing"]


def test_what_a_pod_did_before_it_was_given_the_gpu_does_not_count() -> None:
    by = overlay('[rules.GPUUnderused]\nwindow = "10m"\n[rules.GPUHeldIdle]\nenabled = false')
    replay, alerts = Replay(by), list[Alert]()
    for second in range(0, 1200, 10):
        pod = holder(observed=second < 60)
        alerts += replay.judge(tick(second, device(0, pod, busy=0.9 if second < 60 else 0.0)))
    assert "GPUUnderused" not in {alert.name for alert in alerts}


def test_it_ends_at_once_for_a_pod_that_got_the_gpu_again_and_is_silenced() -> None:
    replay, alerts = Replay(overlay('[rules.GPUUnderused]\nwindow = "10m"')), list[Alert]()
    only_seen = msgspec.structs.replace(holder(), observed=True)
    silenced = holder(annotations={"gpustream.dev/alerts": "off"})
    for second in range(0, 7220, 10):
        pod = holder() if second < 7200 else only_seen if second == 7200 else silenced
        alerts += replay.judge(tick(second, device(0, pod, busy=0.05)))
    states = [(alert.state, alert.resolved_because) for alert in alerts if alert.name == "GPUUnderused"]
    assert states == [("firing", None), ("resolved", "policy")]


@pytest.mark.parametrize("annotations", [{"gpustream.dev/alerts": "off"}, {"gpustream.dev/idle-after": "2h"}])
def test_a_pod_can_say_that_it_is_meant_so(annotations: dict[str, str]) -> None:
    assert not fired("GPUUnderused", {0: 0.05}, 60, pod=holder(annotations=annotations))


@pytest.mark.parametrize(
    ("used", "total", "is_found"), [(60, 80, True), (40, 80, True), (39, 80, False), (60, None, False)]
)
def test_memory_is_hoarded_from_half_of_it_on(used: int, total: int | None, is_found: bool) -> None:
    memory: dict[str, Any] = {"memory_used_bytes": used * GIB, "memory_total_bytes": total * GIB if total else None}
    assert bool(fired("GPUMemoryHoarded", {0: 0.02}, 30, **memory)) is is_found
    assert not fired("GPUMemoryHoarded", {0: 0.3}, 30, **memory)


@pytest.mark.parametrize(
    ("waiting", "restarts", "holds"),
    [("CrashLoopBackOff", 3, True), ("CrashLoopBackOff", 2, False), ("ImagePullBackOff", 9, False), (None, 9, False)],
)
def test_a_container_that_crashes_again_and_again_holds_its_gpus(
    waiting: str | None, restarts: int, holds: bool
) -> None:
    pod = holder(waiting=waiting, restarts=restarts)
    assert verdict(findings_in(tick(0, device(0, pod, busy=0.0)), rule_name="GPUCrashLoop", by=ON)) is holds


def test_a_crash_loop_is_one_alert_of_the_workload_while_its_container_runs_now_and_then() -> None:
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 3600, 10):
        crashes = holder(waiting="CrashLoopBackOff" if second % 300 > 40 else None, restarts=4 + second // 300)
        alerts += replay.judge(tick(second, *[device(i, crashes, busy=0.0) for i in range(4)]))
    (alert,) = [candidate for candidate in alerts if candidate.name == "GPUCrashLoop"]
    assert (alert.held, alert.idle) == (4, 4)
    text = "Job ml/bert: 4 of 4 GPUs held by containers that crash again and again"
    assert alert.annotations["summary"] == f"{text} (since 2026-11-21 00:00 UTC)"
