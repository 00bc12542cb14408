"""Each rule except GPUHeldIdle: it holds for its own condition, and for nothing else."""

from typing import Any

import pytest

from streams.alerts.conditions.evaluate import resolve_reason
from streams.alerts.memory import Memory
from streams.alerts.node import Replay
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import KINDS
from streams.alerts.tick import Device, Info, Process
from tests.streams.alerts.ticks import (
    DEFAULTS,
    GRACE_S,
    device,
    findings_in,
    gpu,
    holder,
    mig,
    overlay,
    tick,
    verdict,
)
from topics.alerts import Tracked
from topics.attributed import AttributedEvent, Holder
from topics.samples import Job

SEEN: dict[str, Any] = {"processes": (), "info": Info(processes_visible="true")}


def test_the_defaults_have_a_rule_of_every_kind() -> None:
    assert {rule.kind for rule in rules_file.defaults().values()} == set(KINDS)


def test_a_busy_node_has_nothing_to_say() -> None:
    pods = [device(i, holder(f"pod-{i}"), busy=0.9, clock_event_reasons=0x4, **SEEN) for i in range(8)]
    assert not [finding for finding in findings_in(tick(0, *pods), tick(GRACE_S, *pods)) if finding.holds]


@pytest.mark.parametrize(
    ("rule", "sample", "holds"),
    [
        ("GPUUsedUnallocated", device(0, busy=0.05), True),
        ("GPUUsedUnallocated", device(0, busy=0.04), False),
        ("GPUUsedUnallocated", device(0, sm_active_ratio=0.5), True),
        ("GPUUsedUnallocated", device(0, encoder_utilization_ratio=0.5), True),
        ("GPUUsedUnallocated", device(0, memory_used_bytes=1e9), None),
        ("GPUUsedUnallocated", device(0, holder(), busy=0.9), False),
        ("GPUUsedUnallocated", device(0, holder(observed=True), busy=0.9), True),
        ("GPUUsedUnallocated", device(0, holder(observed=True), holder("b"), busy=0.9), False),
        ("GPUUsedUnallocated", device(0, busy=0.9, jobs=(Job("4242"),)), False),
        ("GPUUsedUnallocated", device(0, busy=0.9, attribution="none"), None),
        ("GPUUsedUnallocated", device(0, busy=0.9, info=Info(mig_mode="enabled")), False),
        ("GPUUsedUnallocated", device(0, busy=0.9, info=Info(mig_mode="disabled")), True),
        ("GPUUsedUnallocated", device(0, busy=0.9, state="lost"), None),
        ("GPUAttributionConflict", device(0, conflict="no_pod", **SEEN), True),
        ("GPUAttributionConflict", device(0, conflict="unallocated_process", **SEEN), True),
        ("GPUAttributionConflict", device(0, conflict="what is not known yet", **SEEN), True),
        ("GPUAttributionConflict", device(0, **SEEN), False),
        ("GPUAttributionConflict", device(0), None),
        ("GPUAttributionConflict", device(0, attribution="none", **SEEN), None),
        ("GPUAttributionConflict", device(0, processes=(), info=Info(processes_visible="false")), None),
        ("GPUAttributionConflict", device(0, conflict="no_pod", **SEEN, state="timeout"), None),
        ("GPURowRemapFailure", device(0, row_remap_failure=1), True),
        ("GPURowRemapFailure", device(0, row_remap_failure=0), False),
        ("GPURowRemapFailure", device(0, row_remap_pending=1), False),
        ("GPURowRemapFailure", device(0), False),
        ("GPURowRemapFailure", device(0, row_remap_failure=1, state="lost"), None),
        ("GPURowRemapPending", device(0, row_remap_pending=1), True),
        ("GPURowRemapPending", device(0, retired_pages_pending=1), True),
        ("GPURowRemapPending", device(0, row_remap_pending=0, retired_pages_pending=0), False),
        ("GPURowRemapPending", device(0, row_remap_failure=1), False),
        ("GPURowRemapPending", device(0, state="timeout"), None),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0x20), True),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0x40), True),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0x41), True),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100), False),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0), False),
        ("GPUThermalSlowdown", device(0), False),
        ("GPUThermalSlowdown", device(0, state="lost"), None),
        ("GPUPowerBrake", device(0, clock_event_reasons=0x88), True),
        ("GPUPowerBrake", device(0, clock_event_reasons=0x7F), False),
        ("GPUPowerBrake", device(0), False),
        ("GPULost", device(0, state="lost"), True),
        ("GPULost", device(0, state="timeout"), None),
        ("GPULost", device(0), False),
        ("GPUNotAnswering", device(0, state="timeout"), True),
        ("GPUNotAnswering", device(0, state="lost"), False),
        ("GPUNotAnswering", device(0), False),
    ],
)
def test_a_rule_holds_for_what_it_is_about(rule: str, sample: Device, holds: bool | None) -> None:
    assert verdict(findings_in(tick(0, sample), rule_name=rule)) is holds


def test_without_a_snapshot_the_holders_are_unknown() -> None:
    sample = device(0, busy=0.9, conflict="no_pod", **SEEN)
    assert verdict(findings_in(tick(0, sample, attribution="none"), rule_name="GPUUsedUnallocated")) is None
    assert verdict(findings_in(tick(0, sample, attribution="none"), rule_name="GPUAttributionConflict")) is None


def test_the_gpu_of_mig_devices_is_not_unallocated() -> None:
    assert not findings_in(tick(0, device(0, busy=0.9), mig(1, holder())), rule_name="GPUUsedUnallocated")
    part = mig(1, graphics_engine_active_ratio=0.5)
    assert verdict(findings_in(tick(0, device(0), part), rule_name="GPUUsedUnallocated"), "MIG-1") is True


# -- counters


@pytest.mark.parametrize("name", ["ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total"])
def test_memory_errors_count_within_a_minute(name: str) -> None:
    values = [3, 3, 4, 4, 6, 0, 0, 2, 9, 5]
    ticks = [tick(i, device(0, **{name: value})) for i, value in enumerate(values)]
    counts = [
        [f.value for f in findings_in(*ticks[: i + 1], rule_name="GPUEccUncorrectable")] for i in range(len(ticks))
    ]
    assert counts == [[], [], [1], [1], [3], [3], [3], [5], [12], [17]]


def test_one_memory_error_in_each_ten_seconds_reaches_three_within_a_minute() -> None:
    by = overlay("[rules.GPUEccUncorrectable]\nat_least = 3")
    ticks = [tick(i, device(0, ecc_uncorrected_volatile_total=i // 10)) for i in range(31)]
    assert not findings_in(*ticks[:30], rule_name="GPUEccUncorrectable", by=by)
    assert findings_in(*ticks, rule_name="GPUEccUncorrectable", by=by)
    slow = [tick(35 * i, device(0, ecc_uncorrected_volatile_total=i)) for i in range(20)]
    assert not any(findings_in(*slow[:i], rule_name="GPUEccUncorrectable", by=by) for i in range(1, 20))


def test_a_memory_error_is_in_both_counts_and_counts_once() -> None:
    both = ("ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total")
    ticks = [tick(i, device(0, **dict.fromkeys(both, i))) for i in range(2)]
    assert [f.value for f in findings_in(*ticks, rule_name="GPUEccUncorrectable")] == [1]


def test_memory_errors_are_of_the_device_and_a_tick_without_the_counter_loses_none() -> None:
    ticks = [tick(0, device(0, ecc_uncorrected_volatile_total=1)), tick(1, device(0)), tick(2, device(0, state="lost"))]
    (finding,) = findings_in(
        *ticks, tick(3, device(0, ecc_uncorrected_volatile_total=2)), rule_name="GPUEccUncorrectable"
    )
    assert (finding.event, finding.pod_uid, finding.value) == (False, "", 1)


def test_a_device_that_does_not_answer_says_nothing_of_its_errors() -> None:
    bad = tick(0, device(0, ecc_uncorrected_volatile_total=0)), tick(1, device(0, ecc_uncorrected_volatile_total=1))
    for without_counter in (tick(2, device(0, state="lost")), tick(2)):
        assert [f.holds for f in findings_in(*bad, without_counter, rule_name="GPUEccUncorrectable")] == [None]
        assert [f.holds for f in findings_in(*bad, without_counter, rule_name="GPUNvlinkErrors")] == [None] * 3


def test_a_counter_that_appears_later_is_not_an_error() -> None:
    assert not findings_in(
        tick(0, device(0)), tick(1, device(0, ecc_uncorrected_volatile_total=7)), rule_name="GPUEccUncorrectable"
    )


def test_errors_between_two_runs_of_the_producer_count() -> None:
    before, after = device(0, ecc_uncorrected_volatile_total=1), device(0, ecc_uncorrected_volatile_total=2)
    assert findings_in(tick(0, before), tick(1, after, run_id=2), rule_name="GPUEccUncorrectable")


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([0, 50, 99], [False, False, False]),
        ([0, 50, 100], [False, False, True]),
        ([1000, 1000, 1100], [False, False, True]),
        ([1000, 99, 100], [False, False, True]),
        ([0, 100, 100, 100], [False, True, True, True]),
        ([0, 200, 200, None, 200], [False, True, True, True, True]),
    ],
)
def test_nvlink_errors_are_too_many_within_a_minute(values: list[int | None], holds: list[bool]) -> None:
    ticks = [tick(i, device(0, nvlink_crc_errors_total=value)) for i, value in enumerate(values)]
    assert [bool(findings_in(*ticks[: i + 1], rule_name="GPUNvlinkErrors")) for i in range(len(ticks))] == holds


def test_nvlink_errors_that_trickle_are_not_too_many_and_many_after_a_calm_are() -> None:
    slow = [tick(30 * i, device(0, nvlink_replay_errors_total=20 * i)) for i in range(20)]
    assert not any(findings_in(*slow[:i], rule_name="GPUNvlinkErrors") for i in range(1, 20))
    calm = [tick(i, device(0, nvlink_replay_errors_total=5)) for i in range(0, 300, 30)]
    burst = [tick(300 + i, device(0, nvlink_replay_errors_total=5 + 40 * (i + 1))) for i in range(3)]
    assert [bool(findings_in(*calm, *burst[:i], rule_name="GPUNvlinkErrors")) for i in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    over = tick(400, device(0, nvlink_replay_errors_total=125)), tick(401, device(0, nvlink_replay_errors_total=125))
    assert not findings_in(*calm, *burst, *over, rule_name="GPUNvlinkErrors")


@pytest.mark.parametrize("begins_s", range(0, 70, 7))
def test_a_burst_of_nvlink_errors_is_seen_wherever_it_lies(begins_s: int) -> None:
    """A few errors before it open no window that would cut it in two."""
    values = [1 + 16 * max(0, min(10, i - begins_s)) for i in range(90)]
    ticks = [tick(i, device(0, nvlink_crc_errors_total=value)) for i, value in enumerate([0, *values])]
    assert any(findings_in(*ticks[:i], rule_name="GPUNvlinkErrors") for i in range(begins_s, len(ticks)))


def test_one_recovery_of_an_nvlink_is_enough() -> None:
    ticks = [tick(i, device(0, nvlink_recovery_errors_total=i // 2)) for i in range(3)]
    assert not findings_in(*ticks[:2], rule_name="GPUNvlinkErrors")
    (finding,) = findings_in(*ticks, rule_name="GPUNvlinkErrors")
    assert (finding.key, finding.value, finding.event) == ("recovery", 1, False)


# -- XID errors


def codes(*ticks: Any, by: Any = DEFAULTS) -> dict[str, float | None]:
    """The XID errors of the last tick, by code."""
    return {finding.key: finding.value for finding in findings_in(*ticks, rule_name="GPUXid", by=by)}


def event(code: int | None, kind: str = "xid") -> AttributedEvent:
    return AttributedEvent(kind, code)


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([{}], {}),
        ([{"xids": {"79": 2}}], {}),
        ([{"xids": {"79": 2}, "events": (event(79),)}], {"79": 1}),
        ([{"events": (event(79), event(79), event(13))}], {"79": 2, "13": 1}),
        ([{}, {"xids": {"79": 1}, "events": (event(79),)}], {"79": 1}),
        ([{}, {"xids": {"79": 3}, "events": (event(79),)}], {"79": 3}),
        ([{"xids": {"79": 1}}, {"xids": {"79": 1}}], {}),
        ([{"xids": {"79": 1}}, {"xids": {"79": 1, "13": 2}}], {"13": 2}),
        ([{}, {"xids": {"79": 1}}, {"xids": {"79": 1}}], {}),
        ([{}, {"events": (event(None), event(79, "other"))}], {}),
        ([{}, {"xids": {"what": 1, "²": 1, "9" * 30: 1}}], {"what": 1, "²": 1, "9" * 30: 1}),
        ([{"state": "lost", "xids": {"79": 1}, "events": (event(79),)}], {"79": 1}),
        ([{"state": "timeout"}, {"state": "timeout", "xids": {"79": 1}}], {"79": 1}),
    ],
)
def test_each_xid_error_is_found_in_one_tick(ticks: list[dict[str, Any]], expected: dict[str, float]) -> None:
    assert codes(*[tick(i, device(0, **fields)) for i, fields in enumerate(ticks)]) == expected


def test_a_new_run_of_the_producer_counts_from_nothing() -> None:
    sample = device(0, xids={"79": 1})
    assert codes(tick(0, device(0)), tick(1, sample), tick(2, sample, run_id=2)) == {"79": 1}
    assert codes(tick(0, device(0)), tick(1, sample), tick(2, sample, run_id=2), tick(3, sample, run_id=2)) == {}
    assert codes(tick(0, sample), tick(1, device(0), run_id=2), tick(2, sample, run_id=2)) == {"79": 1}


def test_a_clock_that_is_set_back_brings_no_xid_error_again() -> None:
    """That begins a new run, and the producer goes on counting."""
    before, sample = tick(60, device(0, xids={"79": 1}, events=(event(79),))), device(0, xids={"79": 1})
    assert codes(before, tick(0, sample, run_id=2)) == {}
    assert codes(before, tick(0, sample, run_id=2), tick(1, device(0, xids={"79": 2}), run_id=2)) == {"79": 1}
    assert codes(before, tick(0, device(0, xids={"79": 2}, events=(event(79),)), run_id=2)) == {"79": 1}


def test_a_device_that_comes_later_had_its_errors_since() -> None:
    assert codes(tick(0, device(0)), tick(1, device(0), device(1, xids={"79": 1}))) == {"79": 1}


def test_a_mig_device_that_is_made_again_has_no_error_again() -> None:
    """It has the same UUID, and the producer goes on counting its errors."""
    before, gone = (tick(0, device(0)), tick(1, device(0), mig(1, xids={"13": 1}))), tick(2, device(0))
    assert codes(*before) == {"13": 1}
    assert codes(*before, gone, tick(3, device(0), mig(1, xids={"13": 1}))) == {}
    assert codes(*before, gone, tick(3, device(0), mig(1, xids={"13": 2}))) == {"13": 1}
    assert codes(*before, gone, tick(3, device(0), mig(1, xids={"13": 1}), run_id=2)) == {"13": 1}, "of its new run"


@pytest.mark.parametrize(
    ("code", "severity", "pod_uid"),
    [
        (79, "critical", ""),
        (48, "critical", ""),
        (31, "info", "uid-bert-0"),
        (13, "info", "uid-bert-0"),
        (38, "warning", ""),
        (63, "info", ""),
        (9999, "warning", ""),
    ],
)
def test_program_errors_are_distinguished_from_hardware_errors(code: int, severity: str, pod_uid: str) -> None:
    (finding,) = findings_in(tick(0, device(0, holder(), events=(event(code),))), rule_name="GPUXid")
    assert (finding.rule.severity, finding.pod_uid, finding.event) == (severity, pod_uid, True)


def test_a_program_error_on_a_shared_device_is_attributed_to_no_pod() -> None:
    (finding,) = findings_in(tick(0, device(0, holder("a"), holder("b"), events=(event(31),))), rule_name="GPUXid")
    assert finding.pod_uid == ""


def happened(code: int, *holders: Holder) -> AttributedEvent:
    """An XID error while other pods held the device than at the time of the tick."""
    return AttributedEvent("xid", code, holders=holders)


def test_an_error_is_attributed_to_the_pod_that_held_the_device_at_its_time() -> None:
    sample = device(0, holder("came-later"), events=(happened(31, holder()), happened(31, holder())), xids={"31": 2})
    (finding,) = findings_in(tick(0, device(0)), tick(1, sample), rule_name="GPUXid")
    assert (finding.pod_uid, finding.value, [pod.pod for pod in finding.facts.pods]) == ("uid-bert-0", 2.0, ["bert-0"])

    nobodys = device(0, holder("came-later"), events=(happened(31),))
    (finding,) = findings_in(tick(0, device(0)), tick(1, nobodys), rule_name="GPUXid")
    assert (finding.pod_uid, finding.facts.pods) == ("", ())


def test_program_errors_in_one_tick_are_attributed_each_to_its_own_pod() -> None:
    events = (happened(31, holder("a")), event(31), happened(31, holder("b"), holder("c")), happened(31))
    sample = device(0, holder("now"), events=events, xids={"31": 6})
    findings = findings_in(tick(0, device(0)), tick(1, sample), rule_name="GPUXid")

    assert {f.pod_uid: f.value for f in findings} == {"uid-a": 1.0, "uid-now": 3.0, "": 2.0}


def test_errors_of_hardware_in_one_tick_are_one_finding_with_all_who_held_the_device() -> None:
    sample = device(0, holder("now"), events=(happened(79, holder("a")), event(79)), xids={"79": 2})
    (finding,) = findings_in(tick(0, device(0)), tick(1, sample), rule_name="GPUXid")

    assert (finding.pod_uid, finding.value) == ("", 2.0)
    assert [pod.pod for pod in finding.facts.pods] == ["a", "now"]


def test_a_pod_without_an_error_does_not_silence_the_error_of_the_previous_holder() -> None:
    silent = holder("quiet", annotations={"gpustream.dev/alerts": "off"})
    sample = device(0, silent, events=(happened(31, holder()),))
    assert [f.pod_uid for f in findings_in(tick(0, sample), rule_name="GPUXid")] == ["uid-bert-0"]
    other = device(0, holder(), events=(happened(31, silent),))
    assert findings_in(tick(0, other), rule_name="GPUXid") == []


def test_a_pod_silences_its_program_errors_and_never_hardware_errors() -> None:
    quiet = holder(annotations={"gpustream.dev/alerts": "off"})
    assert codes(tick(0, device(0, quiet, events=(event(31), event(79))))) == {"79": 1}


def test_an_override_by_code_sets_the_severity_of_that_code() -> None:
    by = overlay('[[rules.GPUXid.overrides]]\nxid = [31, 63]\nseverity = "critical"\n')
    sample = device(0, holder(), events=(event(31), event(13)))
    assert {f.key: f.rule.severity for f in findings_in(tick(0, sample), rule_name="GPUXid", by=by)} == {
        "31": "critical",
        "13": "info",
    }
    off = overlay("[[rules.GPUXid.overrides]]\nxid = 31\nenabled = false\n")
    assert codes(tick(0, sample), by=off) == {"13": 1}


# -- what is there no more


def test_a_gpu_of_the_inventory_that_is_not_in_the_tick_is_missing() -> None:
    ticks = [tick(0, device(0), device(1, holder()))]
    assert not findings_in(*ticks, rule_name="GPUMissing")
    (finding,) = findings_in(*ticks, tick(1, device(0)), rule_name="GPUMissing")
    assert (finding.device, finding.holds) == (gpu(1), True)
    assert not findings_in(*ticks, tick(1, device(0)), tick(2, device(0), device(1)), rule_name="GPUMissing")


def test_a_gpu_is_missing_also_from_a_tick_that_has_another_one_twice() -> None:
    findings = findings_in(tick(0, device(0), device(1)), tick(1, device(0), device(0)), rule_name="GPUMissing")
    assert verdict(findings, gpu(1)) is True


def test_every_gpu_of_a_node_that_reports_none_is_missing() -> None:
    assert {f.device for f in findings_in(tick(0, device(0), device(1)), tick(1), rule_name="GPUMissing")} == {
        gpu(0),
        gpu(1),
    }


def test_a_gpu_that_is_lost_is_not_missing() -> None:
    assert not findings_in(tick(0, device(0)), tick(1, device(0, state="lost")), rule_name="GPUMissing")


def test_a_gpu_that_has_another_in_its_place_is_not_missing() -> None:
    new = device(0, uuid="GPU-new")
    assert not findings_in(tick(0, device(0)), tick(1, new), rule_name="GPUMissing")
    assert findings_in(
        tick(0, device(0, pci_bus_id=None)), tick(1, device(0, uuid="GPU-new", pci_bus_id=None)), rule_name="GPUMissing"
    )


def test_a_gpu_that_has_long_been_missing_is_forgotten() -> None:
    week = 7 * 86_400
    ticks = [tick(0, device(0), device(1)), tick(1, device(0))]
    assert findings_in(*ticks, tick(week, device(0)), rule_name="GPUMissing")
    assert not findings_in(*ticks, tick(week + 1, device(0)), rule_name="GPUMissing")


def test_a_condition_of_a_device_survives_while_the_device_is_missing_for_a_while() -> None:
    ticks = [tick(0, device(0, holder(), row_remap_pending=1)), tick(1)]
    assert verdict(findings_in(*ticks, tick(601), rule_name="GPURowRemapPending")) is None
    assert verdict(findings_in(*ticks, tick(602), rule_name="GPURowRemapPending")) is False


def test_mig_devices_that_were_taken_down_are_not_missing() -> None:
    cut = tick(0, device(0), mig(1, holder()), mig(2))
    assert not findings_in(cut, tick(1, device(0), mig(1, holder())), rule_name="GPUMissing")
    assert {f.device for f in findings_in(cut, tick(1), rule_name="GPUMissing")} == {gpu(0)}
    assert {f.device for f in findings_in(cut, tick(1, mig(1), mig(2)), rule_name="GPUMissing")} == {gpu(0)}


@pytest.mark.parametrize(("state", "rule"), [("lost", "GPULost"), ("timeout", "GPUNotAnswering")])
def test_a_gpu_that_does_not_answer_is_one_finding_with_the_pods_of_its_mig_devices(state: str, rule: str) -> None:
    parts = [mig(1, holder("a"), state=state), mig(2, holder("b"), state=state)]
    (finding,) = findings_in(tick(0, device(0, state=state), *parts, device(1)), rule_name=rule)
    assert (finding.device, [pod.pod for pod in finding.facts.pods]) == (gpu(0), ["a", "b"])


def test_a_mig_device_that_does_not_answer_while_its_gpu_does_is_a_finding() -> None:
    (finding,) = findings_in(tick(0, device(0), mig(1, state="timeout"), mig(2)), rule_name="GPUNotAnswering")
    assert finding.device == "MIG-1"


def test_a_mig_device_whose_gpu_is_lost_says_nothing_until_that_returns() -> None:
    cut = tick(0, device(0), mig(1, holder(), row_remap_pending=1))
    lost_gpu = tick(1, device(0, state="lost"))
    assert verdict(findings_in(cut, lost_gpu, rule_name="GPURowRemapPending"), "MIG-1") is None
    assert verdict(findings_in(cut, lost_gpu, tick(2, device(0)), rule_name="GPURowRemapPending"), "MIG-1") is False


# -- policies, overrides, reasons


def test_a_malformed_policy_is_reported_once_a_pod_and_annotation() -> None:
    bad = {"gpustream.dev/alerts": "maybe", "gpustream.dev/idle-after": "soon"}
    pod = holder(annotations=bad)
    findings = findings_in(tick(0, device(0, pod, busy=0.9), device(1, pod, busy=0.9)), rule_name="GPUPolicyInvalid")
    assert {(f.device, f.pod_uid, f.key) for f in findings} == {("", "uid-bert-0", name) for name in bad}
    assert len(findings) == 2
    assert not findings_in(
        tick(0, device(0, holder(annotations={"gpustream.dev/alerts": "on"}))), rule_name="GPUPolicyInvalid"
    )


def test_an_override_goes_by_the_one_pod_that_holds_a_device() -> None:
    by = overlay('[[rules.GPURowRemapPending.overrides]]\nnamespace = "ml"\nseverity = "critical"\n')
    for pods, severity in (((holder(),), "critical"), ((holder("a"), holder("b")), "warning"), ((), "warning")):
        (finding,) = findings_in(tick(0, device(0, *pods, row_remap_pending=1)), rule_name="GPURowRemapPending", by=by)
        assert finding.rule.severity == severity


@pytest.mark.parametrize(
    ("text", "after", "reason"),
    [
        ("", tick(1, device(0, holder(), busy=0.9)), "condition"),
        ("", tick(1, device(0, busy=0.0)), "pod_ended"),
        ("", tick(1, device(0, holder("other"), busy=0.0)), "pod_ended"),
        ("", tick(1, device(0, holder(annotations={"gpustream.dev/alerts": "off"}), busy=0.0)), "policy"),
        ("", tick(1, device(9, uuid="new", pci_bus_id="00000000:00:00.0")), "device_removed"),
        ("[rules.GPUHeldIdle]\nenabled = false", tick(1, device(0, holder(), busy=0.0)), "rule_removed"),
        (
            '[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nenabled = false',
            tick(1, device(0, holder(), busy=0.0)),
            "policy",
        ),
    ],
)
def test_why_a_pods_gpu_is_not_idle_any_more(text: str, after: Any, reason: str) -> None:
    idle = Tracked(name="GPUHeldIdle", device=gpu(0), pod_uid="uid-bert-0", since_ms=0)
    assert resolve_reason(overlay(text), after, idle, Memory()) == reason


def test_a_pod_without_a_uid_ends_when_its_name_is_gone() -> None:
    for pod, reason in ((holder(pod_uid=None), "condition"), (holder("b", pod_uid=None), "pod_ended")):
        after = tick(1, device(0, pod, busy=0.9))
        idle = Tracked(name="GPUHeldIdle", device=gpu(0), key="ml/bert-0", since_ms=0)
        assert resolve_reason(DEFAULTS, after, idle, Memory()) == reason


def test_a_condition_of_a_device_ends_whoever_holds_the_device() -> None:
    lost = Tracked(name="GPULost", device=gpu(0), since_ms=0)
    assert resolve_reason(DEFAULTS, tick(1, device(0)), lost, Memory()) == "condition"


def test_processes_are_no_evidence_of_their_own_for_a_conflict() -> None:
    sample = device(0, holder(), processes=(Process(1, "uid-x"),), info=Info(processes_visible="true"))
    assert verdict(findings_in(tick(0, sample), rule_name="GPUAttributionConflict")) is False


def test_a_missing_value_ends_no_condition() -> None:
    """If a driver does not report a value for a while, the GPU need not be healthy."""
    faults = {"clock_event_reasons": 0xC0, "row_remap_failure": 1, "row_remap_pending": 1}
    replay = Replay(DEFAULTS)
    bad, blind = device(0, busy=0.9, **faults), device(0, busy=0.9)
    alerts = [alert for s in range(100) for alert in replay.judge(tick(s, bad))]
    during = [alert for s in range(100, 2000, 10) for alert in replay.judge(tick(s, blind))]
    well = device(0, busy=0.9, **dict.fromkeys(faults, 0))
    after = [alert for s in range(2000, 2400, 10) for alert in replay.judge(tick(s, well))]
    names = {"GPURowRemapFailure", "GPURowRemapPending", "GPUThermalSlowdown", "GPUPowerBrake"}
    assert {alert.name for alert in alerts} >= names
    assert not names & {alert.name for alert in during}
    assert names <= {alert.name for alert in after if alert.state == "resolved"}
