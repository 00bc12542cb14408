"""GPUStalled: a GPU that says that it is busy, and does hardly any work."""

from typing import Any

import pytest

from streams.alerts.node import Replay
from streams.alerts.tick import Device
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, found, holder, mig, overlay, tick, verdict
from topics.alerts import Alert, milliseconds

ON = overlay("[rules.GPUStalled]\nenabled = true")
HUNG: dict[str, Any] = {
    "busy": 1.0, "power_watts": 140, "power_limit_watts": 700, "sm_active_ratio": 0.1, "tensor_active_ratio": 0.0,
}  # fmt: skip
WORKING = {**HUNG, "power_watts": 600, "sm_active_ratio": 0.9, "tensor_active_ratio": 0.4}


def hung(number: int = 0, **fields: Any) -> Device:
    return device(number, holder(), **{**HUNG, **fields})


@pytest.mark.parametrize(
    ("one", "holds"),
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
def test_it_holds_by_all_of_its_measures_and_is_not_known_without_them(one: Device, holds: bool | None) -> None:
    assert verdict(found(tick(0, one), of="GPUStalled", by=ON)) is holds


def test_a_mig_device_is_not_judged() -> None:
    assert not found(tick(0, mig(0, holder(), **HUNG)), of="GPUStalled", by=ON)


def test_it_is_on_unless_a_file_turns_it_off() -> None:
    assert DEFAULTS.of("stalled")
    assert not overlay("[rules.GPUStalled]\nenabled = false").of("stalled")
    own = overlay('[rules.HungJobs]\nkind = "stalled"').of("stalled")[-1]
    assert (own.name, own.enabled, own.for_ms) == ("HungJobs", True, 600_000)


def fired(*moments: tuple[range, list[Device]]) -> list[Alert]:
    replay = Replay(ON)
    told = [alert for seconds, devices in moments for s in seconds for alert in replay.take(tick(s, *devices))]
    return [alert for alert in told if alert.name == "GPUStalled"]


def test_a_job_that_hangs_for_ten_minutes_is_one_alert_with_its_gpus_inside() -> None:
    assert not fired((range(0, 600, 5), [hung(i) for i in range(8)]))
    alert, *more = fired((range(0, 605, 5), [hung(i) for i in range(8)]))
    assert not more
    assert (alert.idle, alert.held, alert.revision) == (8, 8, 0)
    assert alert.annotations["summary"] == "Job ml/bert: 8 of 8 GPUs stalled (for 10m)"
    assert "Wasted so far: 1.33 GPU-hours." in alert.annotations["description"]
    assert "idle" not in alert.annotations["description"].lower()


def test_it_is_no_alert_until_all_ranks_of_the_workload_stall_and_ends_when_one_works() -> None:
    working = [device(i, holder(), **WORKING) for i in range(1, 8)]
    assert not fired((range(0, 905, 5), [hung(), *working]))
    all_hung = [hung(i) for i in range(8)]
    one_works = [device(0, holder(), **WORKING), *all_hung[1:]]
    alert, *updates, end = fired(
        (range(0, 605, 5), [hung(), *working]), (range(605, 1210, 5), all_hung), (range(1210, 1600, 5), one_works)
    )
    assert (alert.idle, alert.held, milliseconds(alert.starts_at)) == (8, 8, START_MS + 1_205_000)
    assert (end.state, end.resolved_because, updates) == ("resolved", "condition", [])


def test_of_ranks_on_several_nodes_all_must_stall() -> None:
    def both(seconds: range, second: Device) -> list[Alert]:
        told: list[Alert] = []
        for s in seconds:
            told += replay.take(tick(s, hung(), node="a")) + replay.take(tick(s, second, node="b"))
        return [one for one in told if one.name == "GPUStalled"]

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


def test_the_alert_of_a_gpu_names_its_evidence() -> None:
    replay = Replay(ON, grouped=False)
    told = [alert for s in range(0, 605, 5) for alert in replay.take(tick(s, hung()))]
    (alert,) = [one for one in told if one.name == "GPUStalled"]
    words = "Utilization 100%, 140 of 700 W, SMs active 10%, tensor cores 0%."
    assert words in alert.annotations["description"]
