"""GPUStalled: a GPU that reports to be busy, and does hardly any work."""

from datetime import timedelta
from typing import Any

import pytest

from streams.alerts.node import Replay
from streams.alerts.tick import Device
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, findings_in, holder, mig, overlay, tick, verdict
from topics.alerts import Alert
from topics.times import epoch_ms

ON = overlay("[rules.GPUStalled]\nenabled = true")
HUNG: dict[str, Any] = {
    "busy": 1.0, "power_watts": 140, "power_limit_watts": 700, "sm_active_ratio": 0.1, "tensor_active_ratio": 0.0,
}  # fmt: skip
WORKING = {**HUNG, "power_watts": 600, "sm_active_ratio": 0.9, "tensor_active_ratio": 0.4}


def hung(number: int = 0, **fields: Any) -> Device:
    return device(number, holder(), **{**HUNG, **fields})


@pytest.mark.parametrize(
    ("sample", "holds"),
    [
        (hung(), True),
        (hung(busy=0.99), True),
        (hung(busy=0.98), False),
        (hung(power_watts=279), True),
        (hung(power_watts=280), False),
        (hung(sm_active_ratio=0.3), False),
        (hung(tensor_active_ratio=0.02), False),
        (hung(tensor_active_ratio=None), True),
        (hung(sm_active_ratio=None), True),
        (hung(sm_active_ratio=None, tensor_active_ratio=None), None),
        (hung(power_watts=None), None),
        (hung(power_limit_watts=None), None),
        (hung(busy=None), None),
        (hung(busy=None, power_watts=600), False),
        (hung(state="timeout"), None),
        (device(0, **HUNG), False),
        (device(0, holder(observed=True), **HUNG), False),
        (device(0, holder("a"), holder("b"), **HUNG), False),
        (device(0, holder(annotations={"gpustream.dev/alerts": "off"}), **HUNG), False),
    ],
)
def test_it_holds_by_all_of_its_measures_and_is_not_known_without_them(sample: Device, holds: bool | None) -> None:
    assert verdict(findings_in(tick(0, sample), rule_name="GPUStalled", by=ON)) is holds


def test_a_mig_device_is_not_judged() -> None:
    assert not findings_in(tick(0, mig(0, holder(), **HUNG)), rule_name="GPUStalled", by=ON)


def test_it_is_on_unless_a_file_turns_it_off() -> None:
    assert DEFAULTS.of("stalled")
    assert not overlay("[rules.GPUStalled]\nenabled = false").of("stalled")
    own_rule = overlay('[rules.HungJobs]\nkind = "stalled"').of("stalled")[-1]
    assert (own_rule.name, own_rule.enabled, own_rule.for_ms) == ("HungJobs", True, 600_000)


def fired(*moments: tuple[range, list[Device]]) -> list[Alert]:
    replay = Replay(ON)
    alerts = [alert for seconds, devices in moments for s in seconds for alert in replay.judge(tick(s, *devices))]
    return [alert for alert in alerts if alert.name == "GPUStalled"]


def test_a_job_that_hangs_for_ten_minutes_is_one_alert_with_its_gpus_inside() -> None:
    assert not fired((range(0, 600, 5), [hung(i) for i in range(8)]))
    alert, *rest = fired((range(0, 605, 5), [hung(i) for i in range(8)]))
    assert not rest
    assert (alert.idle, alert.held, alert.revision) == (8, 8, 0)
    assert alert.annotations["summary"] == "Job ml/bert: 8 of 8 GPUs stalled (since 2026-11-20 23:59 UTC)"
    assert "Wasted by 2026-11-21 00:09 UTC: 1.33 GPU-hours." in alert.annotations["description"]
    assert "idle" not in alert.annotations["description"].lower()


def test_it_is_no_alert_until_all_ranks_of_the_workload_stall_and_ends_when_one_works() -> None:
    working = [device(i, holder(), **WORKING) for i in range(1, 8)]
    assert not fired((range(0, 905, 5), [hung(), *working]))
    all_hung = [hung(i) for i in range(8)]
    one_works = [device(0, holder(), **WORKING), *all_hung[1:]]
    alert, *updates, end = fired(
        (range(0, 605, 5), [hung(), *working]), (range(605, 1210, 5), all_hung), (range(1210, 1600, 5), one_works)
    )
    assert (alert.idle, alert.held, epoch_ms(alert.starts_at)) == (8, 8, START_MS + 1_205_000)
    assert (end.state, end.resolved_because, updates) == ("resolved", "condition", [])


def test_of_ranks_on_several_nodes_all_must_stall() -> None:
    def both(seconds: range, second: Device) -> list[Alert]:
        alerts: list[Alert] = []
        for s in seconds:
            alerts += replay.judge(tick(s, hung(), node="a")) + replay.judge(tick(s, second, node="b"))
        return [alert for alert in alerts if alert.name == "GPUStalled"]

    replay = Replay(ON)
    works = device(1, holder("bert-1"), **WORKING)
    assert not both(range(0, 900, 5), works)
    (alert,) = both(range(900, 1505, 5), device(1, holder("bert-1"), **HUNG))
    assert {gpu.node for gpu in alert.gpus} == {"a", "b"}
    assert "Evidence: " in alert.annotations["description"]
    assert "Utilization 100%, 140 of 700 W" in alert.annotations["evidence"]


def test_work_in_between_ends_what_is_pending_and_after_five_minutes_what_fires() -> None:
    works = [device(0, holder(), **WORKING)]
    assert not fired((range(0, 595, 5), [hung()]), (range(595, 600, 5), works), (range(600, 1195, 5), [hung()]))
    over = fired((range(0, 605, 5), [hung()]), (range(605, 910, 5), works))
    assert [(alert.state, alert.resolved_because) for alert in over] == [("firing", None), ("resolved", "condition")]


@pytest.mark.parametrize("uid", ["uid-bert-0", None])
def test_it_fires_on_while_it_is_not_known_who_holds_the_gpu(uid: str | None) -> None:
    replay = Replay(ON, grouped=False)
    ticks = [tick(s, device(0, holder(pod_uid=uid), **HUNG)) for s in range(0, 700, 10)]
    ticks += [tick(s, device(0, **HUNG), attribution="none") for s in range(700, 2000, 10)]
    alerts = [alert for moment in ticks for alert in replay.judge(moment)]
    assert [alert.state for alert in alerts if alert.name == "GPUStalled"] == ["firing"]


def test_the_alert_of_a_gpu_names_its_evidence() -> None:
    replay = Replay(ON, grouped=False)
    alerts = [alert for s in range(0, 605, 5) for alert in replay.judge(tick(s, hung()))]
    (alert,) = [alert for alert in alerts if alert.name == "GPUStalled"]
    text = "Utilization 100%, 140 of 700 W, SMs active 10%, tensor cores 0%."
    assert text in alert.annotations["description"]


def of_job(*moments: tuple[range, list[Device]]) -> dict[str, list[Alert]]:
    """The alerts of a job, by rule."""
    replay = Replay(DEFAULTS)
    alerts = [alert for seconds, devices in moments for s in seconds for alert in replay.judge(tick(s, *devices))]
    return {name: [alert for alert in alerts if alert.name == name] for name in ("GPUStalled", "GPUHeldIdle")}


def test_a_rank_that_is_idle_while_all_others_stall_does_not_hide_it_and_is_named_first() -> None:
    culprit = device(3, holder("bert-3"), **{**HUNG, "busy": 0.0, "sm_active_ratio": 0.0})
    alerts = of_job((range(0, 1205, 5), [hung(0), hung(1), hung(2), culprit]))
    stalled = alerts["GPUStalled"][0]
    assert (stalled.idle, stalled.held, epoch_ms(stalled.starts_at)) == (3, 4, START_MS + 1_200_000)
    summary = "Job ml/bert: 3 of 4 GPUs stalled, the other one is idle (since 2026-11-20 23:59 UTC)"
    assert stalled.annotations["summary"] == summary
    assert "Idle: GPU 3 of n (ml/bert-3). Look there first" in stalled.annotations["description"]
    assert not alerts["GPUHeldIdle"]


def test_an_alert_of_idle_gpus_gives_way_to_that_of_the_others_that_stall_and_comes_back_after_it() -> None:
    culprit = device(3, holder("bert-3"), **{**HUNG, "busy": 0.0, "sm_active_ratio": 0.0})
    works = [device(i, holder(f"bert-{i}"), **WORKING) for i in range(3)]
    stalls = [device(i, holder(f"bert-{i}"), **HUNG) for i in range(3)]
    alerts = of_job(
        (range(0, 1205, 5), [*works, culprit]),
        (range(1205, 1810, 5), [*stalls, culprit]),
        (range(1810, 5400, 30), [*works, culprit]),
    )
    first, over, second_idle = alerts["GPUHeldIdle"]
    begin, *_, end = alerts["GPUStalled"]
    assert (first.state, over.state, second_idle.state) == ("firing", "resolved", "firing")
    assert (over.resolved_because, over.ends_at) == ("superseded", begin.starts_at)
    assert end.ends_at is not None
    assert timedelta() < second_idle.starts_at - end.ends_at < timedelta(hours=1)
    for alert in (first, second_idle):
        assert "1 of 4 GPUs idle, the other 3 work" in alert.annotations["summary"]


def test_ranks_that_wait_for_one_that_crashes_again_and_again_name_it() -> None:
    crashes = holder("bert-3", waiting="CrashLoopBackOff", restarts=7)
    stalls = [hung(0), hung(1), device(3, crashes, busy=0.0, sm_active_ratio=0.0)]
    alerts = of_job((range(0, 605, 5), stalls))
    (stalled,) = alerts["GPUStalled"]
    assert ": 2 of 3 GPUs stalled, the other one crashes again and again" in stalled.annotations["summary"]
    assert "Crashed: GPU 3 of n (ml/bert-3). Look there first" in stalled.annotations["description"]
    idle = [device(i, holder(f"bert-{i}"), busy=0.0) for i in range(2)]
    (idle_alert,) = of_job((range(0, 1205, 5), [*idle, device(3, crashes, busy=0.0)]))["GPUHeldIdle"]
    assert ": 2 of 3 GPUs idle, the other one crashes again and again" in idle_alert.annotations["summary"]


def test_idle_ranks_alone_or_beside_one_that_works_are_no_stall() -> None:
    idle = [device(i, holder(), busy=0.0, sm_active_ratio=0.0) for i in range(1, 4)]
    assert not of_job((range(0, 1805, 5), [device(0, holder(), busy=0.0), *idle]))["GPUStalled"]
    mostly_idle = of_job((range(0, 1805, 5), [hung(0), *idle[:2]]))
    assert not mostly_idle["GPUStalled"]
    assert "2 of 3 GPUs idle, the other one stalls " in mostly_idle["GPUHeldIdle"][-1].annotations["summary"]
    beside = of_job((range(0, 1805, 5), [hung(0), *idle[:2], device(3, holder(), **WORKING)]))
    assert not beside["GPUStalled"]
    assert ", of the other 2: 1 stalls, 1 works " in beside["GPUHeldIdle"][-1].annotations["summary"]


def test_it_ends_when_the_idle_rank_works_again_or_the_others_are_idle_too() -> None:
    culprit = device(3, holder(), busy=0.0, sm_active_ratio=0.0)
    some_hung = [hung(i) for i in range(3)]
    hang = (range(0, 1205, 5), [*some_hung, culprit])
    works = of_job(hang, (range(1205, 1600, 5), [*some_hung, device(3, holder(), **WORKING)]))["GPUStalled"]
    assert [work.state for work in works] == ["firing", "resolved"]
    idle = [device(i, holder(), busy=0.0, sm_active_ratio=0.0) for i in range(4)]
    stalled_alerts = of_job(hang, (range(1205, 1600, 5), idle))["GPUStalled"]
    assert [alert.state for alert in stalled_alerts][-1] == "resolved"
