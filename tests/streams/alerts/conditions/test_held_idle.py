"""GPUHeldIdle: it holds for a pod that does nothing with its device, and for no other."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.conditions.finding import Finding
from streams.alerts.node import Replay
from streams.alerts.tick import Device, Info, Process, Tick
from tests.streams.alerts.ticks import DEFAULTS, GRACE_S, device, findings_in, gpu, holder, mig, overlay, tick, verdict
from topics.attributed import Parts, holder_of_job
from topics.samples import Job

RULE = "GPUHeldIdle"
RATIOS = (
    "gpu_utilization_ratio",
    "gpu_utilization_max_ratio",
    "graphics_engine_active_ratio",
    "sm_active_ratio",
    "encoder_utilization_ratio",
    "decoder_utilization_ratio",
)


def judged(sample: Device, **fields: Any) -> list[Finding]:
    """The findings for a device that has been held for longer than the grace."""
    return findings_in(tick(0, sample), tick(GRACE_S + 1, sample, **fields), rule_name=RULE)


def in_the_end(*ticks: Tick) -> bool | None:
    """Whether the pod is idle by the last of these ticks; None if that is not known."""
    return verdict(findings_in(*ticks, rule_name=RULE))


def test_a_gpu_whose_pod_does_nothing_is_idle() -> None:
    (finding,) = judged(device(0, holder(), busy=0.0))
    assert (finding.holds, finding.device, finding.pod_uid, finding.key) == (True, gpu(0), "uid-bert-0", "")
    assert not finding.event


@pytest.mark.parametrize("name", RATIOS)
def test_work_by_any_measure_is_no_idleness(name: str) -> None:
    idle = dict.fromkeys(RATIOS, 0.0)
    assert verdict(judged(device(0, holder(), **idle))) is True
    assert verdict(judged(device(0, holder(), **{**idle, name: 0.01}))) is False


@pytest.mark.parametrize(
    ("metrics", "idle"),
    [
        ({}, None),
        ({"memory_used_bytes": 0.0, "power_watts": 60.0}, None),
        ({"encoder_utilization_ratio": 0.0, "decoder_utilization_ratio": 0.0}, None),
        ({"encoder_utilization_ratio": 0.5}, False),
        ({"gpu_utilization_ratio": 0.0}, True),
        ({"gpu_utilization_max_ratio": 0.0}, True),
        ({"graphics_engine_active_ratio": 0.0}, True),
        ({"sm_active_ratio": 0.0}, True),
        ({"gpu_utilization_ratio": 0.0, "sm_active_ratio": 0.2}, False),
        ({"gpu_utilization_ratio": 0.0099}, True),
        ({"gpu_utilization_ratio": 0.01}, False),
        ({"gpu_utilization_ratio": 1.02}, False),
    ],
)
def test_no_evidence_is_not_idleness(metrics: dict[str, float], idle: bool | None) -> None:
    assert verdict(judged(device(0, holder(), **metrics))) is idle


def test_a_mig_device_without_activity_never_fires() -> None:
    parent, part = device(0, info=Info(mig_mode="enabled")), mig(1, holder(), memory_used_bytes=0.0, processes=())
    findings = findings_in(tick(0, parent, part), tick(GRACE_S + 1, parent, part), rule_name=RULE)
    assert verdict(findings, "MIG-1") is None


def test_a_mig_device_with_engine_activity_is_judged_by_it() -> None:
    parent = device(0, info=Info(mig_mode="enabled"))
    for active, idle in ((0.0, True), (0.4, False)):
        part = mig(1, holder(), graphics_engine_active_ratio=active)
        assert (
            verdict(findings_in(tick(0, parent, part), tick(GRACE_S + 1, parent, part), rule_name=RULE), "MIG-1")
            is idle
        )


@pytest.mark.parametrize("state", ["lost", "timeout"])
def test_a_device_that_does_not_answer_says_nothing(state: str) -> None:
    well = device(0, holder(), busy=0.0)
    findings = findings_in(tick(0, well), tick(GRACE_S + 1, device(0, holder(), busy=0.0, state=state)), rule_name=RULE)
    assert verdict(findings) is None


def test_a_device_that_is_missing_says_nothing() -> None:
    assert verdict(findings_in(tick(0, device(0, holder(), busy=0.0)), tick(GRACE_S + 1), rule_name=RULE)) is None


def test_a_tick_without_a_snapshot_says_nothing_of_who_held_the_device_before() -> None:
    held_device = device(0, holder(), busy=0.0)
    (finding,) = findings_in(
        tick(0, held_device), tick(GRACE_S + 1, device(0, busy=0.0), attribution="none"), rule_name=RULE
    )
    assert (finding.holds, finding.pod_uid) == (None, "uid-bert-0")


def test_work_in_a_tick_without_a_snapshot_counts_whoever_did_it() -> None:
    held_device = device(0, holder(), busy=0.0)
    (finding,) = findings_in(
        tick(0, held_device), tick(GRACE_S + 1, device(0, busy=0.5), attribution="none"), rule_name=RULE
    )
    assert (finding.holds, finding.pod_uid) == (False, "uid-bert-0")


def test_a_gpu_that_nobody_holds_is_not_held_idle() -> None:
    assert not judged(device(0, busy=0.0))
    assert not judged(device(0, busy=0.0, jobs=(Job("4242"),)))


def test_a_pod_that_was_only_observed_on_a_device_does_not_hold_it() -> None:
    assert not judged(device(0, holder(observed=True), busy=0.0))


def test_the_use_of_the_pods_own_processes_is_work() -> None:
    own_process = Process(1, "uid-bert-0", 0.3)
    strange = Process(2, "uid-other", 0.3)
    assert verdict(judged(device(0, holder(), busy=0.0, processes=(own_process,)))) is False
    assert verdict(judged(device(0, holder(), busy=0.0, processes=(strange,)))) is True
    assert verdict(judged(device(0, holder(busy=0.3), busy=0.0))) is False


@pytest.mark.parametrize(
    ("parts", "unattributed", "busy", "idle"),
    [
        ((0.0, 0.5), 0.0, 0.5, {"a": True, "b": False}),
        ((0.0, 0.0), 0.0, 0.0, {"a": True, "b": True}),
        ((0.3, 0.5), 0.0, 0.8, {"a": False, "b": False}),
        ((0.0, 0.0), 0.9, 0.9, {"a": None, "b": None}),
        ((0.0, 0.5), 0.4, 0.9, {"a": None, "b": False}),
        ((0.0, 0.8), 0.1, 0.9, {"a": True, "b": False}),
        ((None, 0.5), 0.0, 0.5, {"a": None, "b": False}),
        ((None, None), None, 0.0, {"a": True, "b": True}),
        ((None, None), None, 0.5, {"a": None, "b": None}),
        ((0.009, 0.009), 0.0, 0.018, {"a": True, "b": True}),
        ((0.009, 0.009), None, 0.018, {"a": True, "b": True}),
        ((0.009, 0.009), None, 0.5, {"a": None, "b": None}),
        ((0.009, 0.0), 0.009, 0.018, {"a": True, "b": True}),
        ((0.009, None), None, 0.4, {"a": None, "b": None}),
        ((0.0, 0.5), 0.0, 0.9, {"a": True, "b": False}),
        ((0.0, 0.5), None, 0.9, {"a": None, "b": False}),
        ((0.5, 0.0), 0.0, 0.5, {"a": False, "b": True}),
    ],
    ids=[
        "one works",
        "none works",
        "both work",
        "nobody's work",
        "some is nobody's",
        "measured twice",
        "one is not known",
        "no parts, no work",
        "no parts, work",
        "each does nothing",
        "each does nothing, and that is all",
        "each does nothing, and somebody works",
        "what is nobody's is nothing",
        "all but one are known",
        "nothing is nobody's, whatever else the device measures",
        "nobody's is what the device does more",
        "the first one works",
    ],
)
def test_on_a_shared_device_each_pod_is_judged_by_its_own_part(
    parts: tuple[float | None, float | None], unattributed: float | None, busy: float, idle: dict[str, bool | None]
) -> None:
    pods = [holder(name, busy=part) for name, part in zip("ab", parts, strict=True)]
    findings = judged(device(0, *pods, busy=busy, unattributed=Parts(utilization_ratio=unattributed)))
    holds = {finding.pod_uid.removeprefix("uid-"): finding.holds for finding in findings}
    assert {name: holds.get(name, False) for name in "ab"} == idle


def test_an_idle_pod_beside_one_that_works_is_found_if_no_process_of_others_is_there() -> None:
    pods = [holder("a", busy=0.0), holder("b", busy=0.8)]
    own_process, unknown = Process(1, "uid-b", 0.8), Process(2, None, 0.0)
    for processes, holds in (((own_process,), True), ((own_process, unknown), None)):
        shared = device(0, *pods, busy=0.9, unattributed=Parts(utilization_ratio=0.1), processes=processes)
        holds_by_pod = {finding.pod_uid: finding.holds for finding in judged(shared)}
        assert holds_by_pod == {"uid-a": holds}
    replay = Replay(DEFAULTS)
    shared = device(0, *pods, busy=0.9, unattributed=Parts(utilization_ratio=0.1), processes=(own_process,))
    (alert,) = [alert for s in range(0, 3000, 10) for alert in replay.judge(tick(s, shared))]
    assert [gpu.pod for gpu in alert.gpus] == ["ml/a"]
    assert "1 of 2 GPUs idle, the other one works" in alert.annotations["summary"]


def test_an_idle_batch_job_beside_one_that_works_is_found_as_a_pod_is() -> None:
    jobs = [holder_of_job(Job(name)) for name in ("41", "42")]
    parts = [msgspec.structs.replace(job, parts=Parts(part)) for job, part in zip(jobs, (0.0, 0.8), strict=True)]
    processes = (Process(1, None, 0.0, job_id="41"), Process(2, None, 0.8, job_id="42"))
    shared = device(0, *parts, busy=0.9, unattributed=Parts(utilization_ratio=0.1), processes=processes)
    assert {finding.pod_uid: finding.holds for finding in judged(shared)} == {"41": True}

    alone = device(0, jobs[0], busy=0.0, processes=(Process(1, None, 0.3, job_id="41"),))
    assert verdict(judged(alone)) is False


def test_ten_pods_that_do_nothing_are_idle_though_the_device_they_share_is_not() -> None:
    pods = [holder(f"p{number}", busy=0.009) for number in range(10)]
    sample = device(0, *pods, busy=0.09, unattributed=Parts(utilization_ratio=0.0))
    replay = Replay(DEFAULTS, grouped=False)
    fired = [alert for s in range(0, 7200, 10) for alert in replay.judge(tick(s, sample))]
    assert [(alert.name, alert.state) for alert in fired] == [(RULE, "firing")] * 10
    assert {alert.labels["k8s_pod_name"] for alert in fired} == {f"p{number}" for number in range(10)}
    assert {alert.annotations["gpu_share"] for alert in fired} == {"0.1"}


def test_a_pod_on_a_shared_mig_device_without_parts_is_judged_by_the_whole_device() -> None:
    """NVML does not report what processes on a MIG device do; GPM reports what the device does."""
    parent, pods = device(0, info=Info(mig_mode="enabled")), (holder("a"), holder("b"))
    for active, idle in ((0.0, True), (0.4, None)):
        part = mig(1, *pods, graphics_engine_active_ratio=active)
        assert (
            verdict(findings_in(tick(0, parent, part), tick(GRACE_S + 1, parent, part), rule_name=RULE), "MIG-1")
            is idle
        )


def test_work_of_the_video_engines_of_a_shared_device_may_be_any_pods() -> None:
    pods = holder("a", busy=0.0), holder("b", busy=0.5)
    sample = device(0, *pods, busy=0.5, encoder_utilization_ratio=0.5, unattributed=Parts(utilization_ratio=0.0))
    assert [(finding.pod_uid, finding.holds) for finding in judged(sample)] == [("uid-a", None)]


def test_several_containers_of_a_pod_are_one_holder_with_the_sum_of_their_parts() -> None:
    main, side = holder(busy=0.5, container="main"), holder(busy=0.0, container="side")
    assert not judged(device(0, main, side, busy=0.5))
    main, side = holder(busy=0.0, container="main"), holder(busy=0.0, container="side")
    (finding,) = judged(device(0, main, side, busy=0.0))
    assert finding.holds is True
    assert finding.facts.sharing == 1


def test_a_pod_without_a_uid_is_distinguished_by_its_name() -> None:
    (finding,) = judged(device(0, holder(pod_uid=None), busy=0.0))
    assert (finding.pod_uid, finding.key) == ("", "ml/bert-0")


@pytest.mark.parametrize("uid", ["uid-bert-0", None])
def test_an_alert_goes_on_while_it_is_not_known_who_holds_the_device_and_ends_with_its_pod(uid: str | None) -> None:
    replay = Replay(DEFAULTS, grouped=False)
    held, free = device(0, holder(pod_uid=uid), busy=0.0), device(0, busy=0.0)
    ticks = [tick(s, held) for s in range(0, 4000, 10)]
    ticks += [tick(s, free, attribution="none") for s in range(4000, 6000, 10)]
    alerts = [alert for moment in [*ticks, tick(6000, free)] for alert in replay.judge(moment)]
    assert [(alert.state, alert.resolved_because) for alert in alerts] == [("firing", None), ("resolved", "pod_ended")]


def test_the_grace_begins_when_the_pod_gets_the_device() -> None:
    held_by_a, other = device(0, holder("a"), busy=0.0), device(0, holder("b"), busy=0.0)
    assert in_the_end(tick(0, held_by_a), tick(GRACE_S - 1, held_by_a)) is None
    assert in_the_end(tick(0, held_by_a), tick(GRACE_S, held_by_a)) is True
    assert in_the_end(tick(0, held_by_a), tick(GRACE_S, other)) is None
    (finding,) = findings_in(tick(0, held_by_a), tick(100, other), tick(100 + GRACE_S, other), rule_name=RULE)
    assert finding.since_ms == tick(100 + GRACE_S).ts_ms


def test_the_grace_of_a_pod_that_was_observed_before_begins_when_it_is_given_the_device() -> None:
    observed_device, given_it = device(0, holder(observed=True), busy=0.0), device(0, holder(), busy=0.0)
    assert in_the_end(tick(0, observed_device), tick(100, given_it), tick(GRACE_S, given_it)) is None
    assert in_the_end(tick(0, observed_device), tick(100, given_it), tick(100 + GRACE_S, given_it)) is True


def test_another_pod_of_the_same_name_has_a_grace_of_its_own() -> None:
    first, second = device(0, holder(), busy=0.0), device(0, holder(pod_uid="uid-new"), busy=0.0)
    assert in_the_end(tick(0, first), tick(GRACE_S, first), tick(GRACE_S + 1, second)) is None


def test_after_a_clock_was_set_back_the_grace_begins_again_and_no_later() -> None:
    idle, busy, back_s = device(0, holder(), busy=0.0), device(0, holder(), busy=0.9), -10 * 3600
    assert in_the_end(tick(0, idle), tick(back_s, idle), tick(back_s + GRACE_S - 1, idle)) is None
    assert in_the_end(tick(0, idle), tick(back_s, idle), tick(back_s + GRACE_S, idle)) is True
    assert in_the_end(tick(0, idle), tick(back_s, busy), tick(back_s + 1, busy)) is False


def test_a_clock_that_is_set_back_to_when_the_pod_had_the_device_already_changes_nothing() -> None:
    idle = device(0, holder(), busy=0.0)
    assert in_the_end(tick(0, idle), tick(2 * GRACE_S, idle), tick(GRACE_S, idle)) is True


@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({"annotations": {"gpustream.dev/alerts": "off"}}, False),
        ({"annotations": {"gpustream.dev/alerts": " OFF "}}, False),
        ({"annotations": {"gpustream.dev/alerts": "on"}, "namespace_labels": {"gpustream.dev/alerts": "off"}}, True),
        ({"namespace_labels": {"gpustream.dev/alerts": "off"}}, False),
        ({"annotations": {"gpustream.dev/alerts": "no"}}, True),
        ({"annotations": {"gpustream.dev/alerts": "no"}, "namespace_labels": {"gpustream.dev/alerts": "off"}}, False),
    ],
)
def test_a_pod_or_its_namespace_silences_what_is_about_the_pod(fields: dict[str, Any], idle: bool) -> None:
    assert verdict(judged(device(0, holder(**fields), busy=0.0))) is idle


@pytest.mark.parametrize(
    ("pod", "namespace", "for_s"),
    [
        (None, None, 900),
        ("2h", None, 7200),
        (None, "30m", 1800),
        ("2h", "30m", 7200),
        ("two hours", "30m", 1800),
        ("0", None, 900),
        ("-5m", None, 900),
        ("", None, 900),
        ("9999999999h", None, 900),
        ("1h30m", None, 5400),
    ],
)
def test_a_pod_or_its_namespace_sets_how_long_its_gpus_may_be_idle(
    pod: str | None, namespace: str | None, for_s: int
) -> None:
    key = "gpustream.dev/idle-after"
    annotations, labels = ({key: pod} if pod is not None else {}), ({key: namespace} if namespace is not None else {})
    (finding,) = judged(device(0, holder(annotations=annotations, namespace_labels=labels), busy=0.0))
    assert finding.rule.for_ms == for_s * 1000


@pytest.mark.parametrize(
    ("override", "matches"),
    [
        ('namespace = "ml"', True),
        ('namespace = "m*"', True),
        ('namespace = ["x", "m?"]', True),
        ('namespace = "ML"', False),
        ('namespace = "m"', False),
        ('workload_kind = "Job"', True),
        ('workload_kind = "Deployment"', False),
        ('workload = "be*"', True),
        ('pod_labels = { app = "vllm*" }', True),
        ('pod_labels = { app = "*", tier = "*" }', False),
        ('pod_labels = { tier = "*" }', False),
        ('namespace_labels = { team = "research" }', True),
        ('namespace_labels = { app = "vllm-0" }', False),
        ('namespace = "ml"\nworkload_kind = "Job"\npod_labels = { app = ["a", "vllm-0"] }', True),
        ('namespace = "ml"\nworkload_kind = "Pod"', False),
    ],
)
def test_an_override_applies_to_the_pods_that_match_all_of_it(override: str, matches: bool) -> None:
    by = overlay(f'[[rules.GPUHeldIdle.overrides]]\n{override}\nfor = "1h"\nseverity = "info"\n')
    sample = device(0, holder(labels={"app": "vllm-0"}, namespace_labels={"team": "research"}), busy=0.0)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name=RULE, by=by)
    assert (finding.rule.for_ms, finding.rule.severity) == ((3_600_000, "info") if matches else (900_000, "warning"))


def test_a_later_override_wins_over_an_earlier_one_and_the_pods_own_policy_over_all() -> None:
    by = overlay("""
        [[rules.GPUHeldIdle.overrides]]
        namespace = "*"
        for = "1h"
        severity = "info"
        [[rules.GPUHeldIdle.overrides]]
        namespace = "ml"
        for = "2h"
    """)
    sample = device(0, holder(), busy=0.0)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name=RULE, by=by)
    assert (finding.rule.for_ms, finding.rule.severity) == (7_200_000, "info")
    sample = device(0, holder(annotations={"gpustream.dev/idle-after": "3h"}), busy=0.0)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name=RULE, by=by)
    assert (finding.rule.for_ms, finding.rule.severity) == (10_800_000, "info")


def test_labels_and_annotations_of_an_override_are_added_to_the_rules() -> None:
    by = overlay("""
        [rules.GPUHeldIdle]
        labels = { team = "platform", pager = "no" }
        annotations = { runbook = "https://example.com/idle" }
        [[rules.GPUHeldIdle.overrides]]
        namespace = "*"
        labels = { tier = "research" }
        [[rules.GPUHeldIdle.overrides]]
        namespace = "ml"
        labels = { pager = "yes" }
        annotations = { dashboard = "https://example.com/ml" }
    """)
    sample = device(0, holder(), busy=0.0)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name=RULE, by=by)
    assert finding.rule.labels == {"team": "platform", "pager": "yes", "tier": "research"}
    assert finding.rule.annotations == {"runbook": "https://example.com/idle", "dashboard": "https://example.com/ml"}


def test_an_override_disables_a_rule_for_some_or_enables_it_for_some() -> None:
    samples = device(0, holder("a"), busy=0.0), device(1, holder("b", namespace="other"), busy=0.0)
    off = overlay('[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nenabled = false')
    on = overlay(
        '[rules.GPUHeldIdle]\nenabled = false\n[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nenabled = true'
    )
    for by, pod in ((off, "uid-b"), (on, "uid-a")):
        assert [f.pod_uid for f in findings_in(tick(0, *samples), tick(GRACE_S, *samples), rule_name=RULE, by=by)] == [
            pod
        ]


def test_what_counts_as_work_may_differ_by_namespace() -> None:
    by = overlay('[[rules.GPUHeldIdle.overrides]]\nnamespace = "ml"\nidle_below = 0.2')
    assert (
        verdict(findings_in(tick(0, d := device(0, holder(), busy=0.1)), tick(GRACE_S, d), rule_name=RULE, by=by))
        is True
    )
    other = device(0, holder(namespace="x"), busy=0.1)
    assert verdict(findings_in(tick(0, other), tick(GRACE_S, other), rule_name=RULE, by=by)) is False


ratios = st.none() | st.floats(0, 1)


@given(st.fixed_dictionaries(dict.fromkeys(RATIOS, ratios)), st.none() | st.floats(0, 1), st.floats(0, 1) | st.none())
def test_work_by_any_measure_is_never_idleness_and_without_a_measure_of_all_nothing_is(
    metrics: dict[str, float | None], part: float | None, own_use: float | None
) -> None:
    processes = (Process(1, "uid-bert-0", own_use),)
    findings = judged(device(0, holder(busy=part), processes=processes, **metrics))
    works = any(value is not None and value >= 0.01 for value in (*metrics.values(), part, own_use))
    measured = any(metrics[name] is not None for name in RATIOS[:4])
    assert verdict(findings) is (False if works else True if measured else None)


def test_a_policy_silences_for_no_longer_than_the_operator_lets_it() -> None:
    """Off counts for a day after the pod got the GPU; a time of ten years is a day, and says so."""
    off = device(0, holder(annotations={"gpustream.dev/alerts": "off"}), busy=0.0)
    day_s = 24 * 3600
    assert verdict(findings_in(tick(0, off), tick(day_s - 1, off), rule_name=RULE)) is False
    assert verdict(findings_in(tick(0, off), tick(day_s, off), rule_name=RULE)) is True
    years = device(0, holder(annotations={"gpustream.dev/idle-after": "3650d"}), busy=0.0)
    findings = findings_in(tick(0, years), tick(GRACE_S + 1, years))
    assert [finding.rule.for_ms for finding in findings if finding.rule.name == RULE] == [day_s * 1000]
    (text,) = [finding.facts.text for finding in findings if finding.rule.name == "GPUPolicyInvalid"]
    assert "1d is the most that counts here" in text
