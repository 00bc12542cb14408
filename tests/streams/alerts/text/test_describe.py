"""The text of an alert: its subject, its figures, and what to do."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.conditions.evaluate import evaluate
from streams.alerts.conditions.finding import Facts, Finding
from streams.alerts.memory import Memory, NodeAlerts, remember
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import KINDS, Rules
from streams.alerts.text import describe as module
from streams.alerts.text.describe import MAX_VALUE_BYTES, Described, describe, describe_silence, share_of
from streams.alerts.tick import Device, Info, Process, Tick
from tests.streams.alerts.ticks import DEFAULTS, GRACE_S, START_MS, device, findings_in, gpu, holder, mig, overlay, tick
from topics.alerts import RUNBOOKS
from topics.attributed import AttributedEvent, Parts, Workload, holder_of_job
from topics.samples import Job
from topics.workloads import UnwellDevice

ROOT = Path(__file__).parents[4]


def description_of(rule: str, *ticks: Tick, since_s: float = 0.0, by: Rules = DEFAULTS) -> Described:
    """The labels and annotations of the one finding of a rule."""
    (finding,) = [finding for finding in findings_in(*ticks, rule_name=rule, by=by) if finding.holds]
    return describe(finding, ticks[-1], START_MS + round(since_s * 1000))


def idle(sample: Device, *, seconds: float = 1200.0, by: Rules = DEFAULTS) -> Described:
    """The description of a device that has been idle for so long."""
    return description_of("GPUHeldIdle", tick(0, sample), tick(GRACE_S + seconds, sample), since_s=GRACE_S, by=by)


def test_an_idle_job_is_reported_by_its_id_user_partition_and_account() -> None:
    job = holder_of_job(Job("4242", "ana", "gpu", "vision"))
    labels, annotations = idle(device(3, job, busy=0.0))
    names = {name: value for name, value in labels.items() if name.startswith(("job_", "k8s_"))}
    expected = {"k8s_cluster_name": "c", "k8s_node_name": "n"}
    assert names == expected | {
        "job_id": "4242", "job_user": "ana", "job_partition": "gpu", "job_account": "vision",
    }  # fmt: skip
    assert annotations["summary"] == "job 4242 holds GPU 3 of n and has not used it since 2026-11-21 00:04 UTC"


@pytest.mark.parametrize(
    ("rule", "text"), [("GPULost", "Held by job 4242."), ("GPUMissing", "It was held by job 4242.")]
)
def test_a_job_that_held_a_lost_gpu_is_named_as_a_job_and_not_as_a_pod(rule: str, text: str) -> None:
    job = holder_of_job(Job("4242", partition="default"))
    now = [device(0, job, state="lost")] if rule == "GPULost" else []
    _, annotations = description_of(rule, tick(0, device(0, job), device(1)), tick(600, *now, device(1)))
    assert text in annotations["description"]


@pytest.mark.parametrize("rule", ["GPULost", "GPUMissing"])
def test_of_a_gpu_that_nobody_held_no_pod_is_spoken_of_for_it_may_be_of_a_batch_node(rule: str) -> None:
    now = [device(0, state="lost", jobs=())] if rule == "GPULost" else []
    _, annotations = description_of(rule, tick(0, device(0, jobs=()), device(1)), tick(600, *now, device(1)))
    assert "pod" not in annotations["description"]


@pytest.mark.parametrize("rule", ["GPULost", "GPUMissing"])
def test_a_lost_gpu_is_shown_as_the_api_server_has_it(rule: str) -> None:
    lost_devices = [device(0, state="lost")] if rule == "GPULost" else []
    unwell = (
        UnwellDevice(gpu(0), health="Unhealthy", message="XID 79"),
        UnwellDevice(gpu(0), taint="gpu.nvidia.com/lost:NoExecute"),
        UnwellDevice(gpu(1), health="Unhealthy"),
    )
    now = msgspec.structs.replace(tick(600, *lost_devices, device(1)), unwell=unwell)
    _, annotations = description_of(rule, tick(0, device(0), device(1)), now)
    status = "Unhealthy: XID 79, taint gpu.nvidia.com/lost:NoExecute"
    assert annotations["api_status"] == status


def test_a_lost_gpu_is_shown_as_the_api_server_has_its_mig_devices() -> None:
    unwell = (UnwellDevice("MIG-1", health="Unhealthy"), UnwellDevice("MIG-2", health="Unhealthy"))
    lost_devices = device(0, state="lost"), mig(1, state="lost"), mig(2, state="lost"), mig(3, state="lost")
    _, annotations = description_of("GPULost", msgspec.structs.replace(tick(0, *lost_devices), unwell=unwell))
    assert annotations["api_status"] == "Unhealthy"


def test_a_lost_gpu_of_which_the_api_server_says_nothing_has_no_status() -> None:
    _, annotations = description_of("GPULost", tick(0, device(0, state="lost")))
    assert "api_status" not in annotations


def test_an_idle_gpu_is_reported_by_who_holds_it() -> None:
    labels, annotations = idle(device(3, holder(job="bert"), busy=0.0, model="NVIDIA H100", memory_used_bytes=3 << 30))
    assert labels == {
        "alertname": "GPUHeldIdle",
        "severity": "warning",
        "k8s_cluster_name": "c",
        "k8s_node_name": "n",
        "gpu_uuid": gpu(3),
        "gpu_index": "3",
        "gpu_model": "NVIDIA H100",
        "k8s_namespace_name": "ml",
        "k8s_pod_name": "bert-0",
        "k8s_pod_uid": "uid-bert-0",
        "k8s_container_name": "main",
        "k8s_workload_kind": "Job",
        "k8s_workload_name": "bert",
        "k8s_job_name": "bert",
    }
    assert annotations == {
        "summary": "ml/bert-0 holds GPU 3 of n and has not used it since 2026-11-21 00:04 UTC",
        "description": (
            "ml/bert-0 holds GPU 3 of n and has not used it since 2026-11-21 00:04 UTC. Workload: Job bert. "
            "It holds 3.0 GiB of the GPU's memory. Wasted by 2026-11-21 00:24 UTC: 1200 GPU-seconds (a whole GPU)."
        ),
        "runbook": f"{RUNBOOKS}/GPUHeldIdle.md",
        "gpu_share": "1",
        "wasted_gpu_seconds": "1200",
    }


def test_memory_of_a_shared_device_is_attributed_to_no_pod_if_its_part_is_not_known() -> None:
    a, b = (holder(name, parts=Parts(utilization_ratio=busy)) for name, busy in (("a", 0.0), ("b", 0.9)))
    sample = device(0, a, b, busy=0.9, memory_used_bytes=9e9, unattributed=Parts(utilization_ratio=0.0))
    assert "Whether it holds memory is not known." in idle(sample)[1]["description"]


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (device(0, holder(), busy=0.0, memory_used_bytes=0.0), "It holds no memory of the GPU."),
        (device(0, holder(), busy=0.0, memory_used_bytes=5e6), "It holds no memory of the GPU."),
        (device(0, holder(), busy=0.0, memory_used_bytes=1 << 26), "It holds 0.1 GiB of the GPU's memory."),
        (device(0, holder(), busy=0.0), "Whether it holds memory is not known."),
        (device(0, holder(busy=0.0), busy=0.0, memory_used_bytes=9e9), "It holds 1.0 GiB of the GPU's memory."),
    ],
)
def test_the_text_says_whether_memory_is_held(sample: Device, text: str) -> None:
    assert text in idle(sample)[1]["description"]


@pytest.mark.parametrize(
    ("profile", "model", "pods", "ratio", "advice"),
    [
        (None, "NVIDIA H100", 1, 1.0, "a whole GPU"),
        (None, "NVIDIA H100", 4, 0.25, "one of 4 pods on it, divided equally"),
        ("1g.10gb", "NVIDIA H100", 1, 1 / 7, "1 of 7 compute slices"),
        ("3g.40gb", "NVIDIA H100", 1, 3 / 7, "3 of 7 compute slices"),
        ("7g.80gb", "NVIDIA H100", 1, 1.0, "7 of 7 compute slices"),
        ("1g.10gb+me", "NVIDIA H100", 1, 1 / 7, "1 of 7 compute slices"),
        ("1c.3g.40gb", "NVIDIA A100", 1, 1 / 7, "1 of 7 compute slices"),
        ("2g.12gb", "NVIDIA A30", 1, 0.5, "2 of 4 compute slices"),
        ("1g.5gb", "NVIDIA A300X", 1, 1 / 7, "1 of 7 compute slices"),
        ("1g.24gb", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 1, 0.25, "1 of 4 compute slices"),
        ("3g.40gb", None, 3, 1 / 7, "3 of 7 compute slices; one of 3 pods on it, divided equally"),
        ("what", "NVIDIA H100", 1, None, ""),
        ("", "NVIDIA H100", 2, None, ""),
    ],
)
def test_a_slice_wastes_its_part_of_a_gpu(
    profile: str | None, model: str | None, pods: int, ratio: float | None, advice: str
) -> None:
    holders = [holder(f"pod-{i}", busy=0.0) for i in range(pods)]
    make: dict[str, Any] = {"busy": 0.0, "model": model, "unattributed": Parts(utilization_ratio=0.0)}
    sample = device(0, *holders, **make) if profile is None else mig(1, *holders, profile=profile, **make)
    finding = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name="GPUHeldIdle")[0]
    assert share_of(finding.facts) == (ratio if ratio is None else pytest.approx(ratio), advice)
    _, annotations = describe(finding, tick(GRACE_S + 700), START_MS + GRACE_S * 1000)
    assert ("Wasted by " in annotations["description"]) is (ratio is not None)
    assert annotations.get("wasted_gpu_seconds") == (None if ratio is None else f"{700 * ratio:.0f}")


def test_a_pod_wastes_all_of_a_gpu_on_which_another_one_runs_that_was_not_given_it() -> None:
    sample = device(0, holder("host", busy=0.0), holder("guest", busy=0.0, observed=True), busy=0.0)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name="GPUHeldIdle")
    assert share_of(finding.facts) == (1.0, "a whole GPU")


def test_a_slice_is_a_part_of_as_many_as_its_record_says() -> None:
    sample = mig(1, holder(busy=0.0), busy=0.0, compute_slices=2)
    (finding,) = findings_in(tick(0, sample), tick(GRACE_S, sample), rule_name="GPUHeldIdle")
    assert share_of(finding.facts) == (0.5, "1 of 2 compute slices")


def test_a_mig_device_is_named_by_its_gpu() -> None:
    labels, annotations = idle(mig(1, holder(), busy=0.0))
    names = ("gpu_uuid", "gpu_mig_uuid", "gpu_mig_profile", "gpu_index")
    assert [labels[name] for name in names] == [gpu(0), "MIG-1", "1g.10gb", "0"]
    assert "MIG 1g.10gb of GPU 0 of n" in annotations["summary"]


def test_several_containers_of_a_pod_are_not_named() -> None:
    labels, _ = idle(device(0, holder(container="a"), holder(container="b"), busy=0.0))
    assert "k8s_container_name" not in labels
    assert labels["k8s_pod_name"] == "bert-0"


def test_of_a_shared_device_the_alert_names_the_pod_that_it_is_about() -> None:
    sample = device(
        0, holder("a", busy=0.9), holder("b", busy=0.0), busy=0.9, unattributed=Parts(utilization_ratio=0.0)
    )
    assert idle(sample)[0]["k8s_pod_name"] == "b"


def test_an_alert_about_a_device_names_a_pod_only_if_it_holds_it_alone() -> None:
    for pods, name in (((holder(),), "bert-0"), ((holder("a"), holder("b")), None), ((), None)):
        labels, _ = description_of("GPURowRemapPending", tick(0, device(0, *pods, row_remap_pending=1)))
        assert labels.get("k8s_pod_name") == name


def test_labels_that_a_rule_asks_for_are_copied_from_the_pod_and_its_namespace() -> None:
    by = overlay('[rules.GPUHeldIdle]\ncopy_labels = ["team", "app.kubernetes.io/name", "none"]')
    pod = holder(labels={"team": "a", "app.kubernetes.io/name": "x", "other": "y"}, namespace_labels={"team": "b"})
    labels, _ = idle(device(0, pod, busy=0.0), by=by)
    assert {name: value for name, value in labels.items() if "label" in name} == {
        "k8s_pod_label_team": "a",
        "k8s_pod_label_app_kubernetes_io_name": "x",
        "k8s_namespace_label_team": "b",
    }


def test_a_rules_own_labels_and_annotations_win() -> None:
    by = overlay('[rules.GPUHeldIdle]\nlabels = { team = "p" }\nannotations = { summary = "s", dashboard = "d" }')
    labels, annotations = idle(device(0, holder(), busy=0.0), by=by)
    assert labels["team"] == "p"
    assert (annotations["summary"], annotations["dashboard"]) == ("s", "d")
    assert annotations["runbook"] == f"{RUNBOOKS}/GPUHeldIdle.md"


def test_a_rule_of_another_name_has_the_runbook_of_its_kind() -> None:
    by = overlay('[rules.Mine]\nkind = "held_idle"')
    labels, annotations = description_of("Mine", tick(0, d := device(0, holder(), busy=0.0)), tick(GRACE_S, d), by=by)
    assert (labels["alertname"], annotations["runbook"]) == ("Mine", f"{RUNBOOKS}/GPUHeldIdle.md")


@pytest.mark.parametrize(
    ("rule", "ticks", "texts"),
    [
        (
            "GPUUsedUnallocated",
            [tick(0, device(0, holder("x", observed=True), busy=0.5, processes=(Process(42), Process(43))))],
            ["GPU 0 of n works, and nobody was given it", "50%", "Seen there: ml/x.", "Processes: 42, 43."],
        ),
        ("GPUUsedUnallocated", [tick(0, device(0, busy=0.5))], ["Its processes are not known."]),
        ("GPUUsedUnallocated", [tick(0, device(0, busy=0.5, processes=()))], ["The driver lists no process there."]),
        (
            "GPUAttributionConflict",
            [
                tick(
                    0,
                    device(
                        0,
                        holder("a"),
                        holder("b", observed=True),
                        conflict="unallocated_process",
                        processes=(),
                        info=Info(processes_visible="true"),
                    ),
                )
            ],
            ["did not give it to", "Given to: ml/a.", "Seen there: ml/b."],
        ),
        (
            "GPUXid",
            [tick(0, device(0, events=(AttributedEvent("xid", 79),)))],
            ["XID 79 on GPU 0 of n: ", "Nobody held it then."],
        ),
        (
            "GPUXid",
            [tick(0, device(0, holder(), xids={"31": 3}, events=(AttributedEvent("xid", 31),) * 3))],
            ["XID 31", "3 times.", "Held then by ml/bert-0.", "What to do: debug the program"],
        ),
        (
            "GPUXid",
            [tick(0, device(0, holder(), events=(AttributedEvent("xid", 79, holders=(holder("before"),)),)))],
            ["XID 79", "Held then by ml/before."],
        ),
        (
            "GPUXid",
            [tick(0, device(0, events=(AttributedEvent("xid", 7777),)))],
            ["XID 7777", "NVIDIA's XID catalogue"],
        ),
        (
            "GPUEccUncorrectable",
            [tick(i, device(0, ecc_uncorrected_volatile_total=2 * i)) for i in (0, 1)],
            ["had 2 memory errors that ECC could not correct", "Nobody holds it."],
        ),
        ("GPURowRemapFailure", [tick(0, device(0, holder(), row_remap_failure=1))], ["Held by ml/bert-0.", "replaced"]),
        ("GPURowRemapPending", [tick(0, device(0, row_remap_pending=1))], ["next reset"]),
        (
            "GPUThermalSlowdown",
            [tick(90, device(0, clock_event_reasons=0x40, temperature_celsius=91))],
            ["since 2026-11-20 23:59 UTC. At 2026-11-21 00:00 UTC it was at 91 °C."],
        ),
        ("GPUPowerBrake", [tick(0, device(0, clock_event_reasons=0x80, power_watts=100))], ["it drew 100 W."]),
        (
            "GPUNvlinkErrors",
            [tick(i, device(0, nvlink_crc_errors_total=500 * i)) for i in (0, 1)],
            ["had 500 NVLink CRC errors within a minute"],
        ),
        ("GPULost", [tick(0, device(0, state="lost"))], ["is lost"]),
        ("GPUNotAnswering", [tick(75, device(0, state="timeout"))], ["its driver, since 2026-11-20 23:59 UTC."]),
        (
            "GPUMissing",
            [tick(0, device(0), device(1, holder())), tick(60, device(0))],
            ["is not there any more, since 2026-11-20 23:59 UTC.", "held by ml/bert-0.", "reported 1 GPU."],
        ),
        (
            "GPUPolicyInvalid",
            [tick(0, device(0, holder(annotations={"gpustream.dev/idle-after": "2 hours"})))],
            [
                "ml/bert-0 has a policy that is not followed as it is written",
                "the annotation gpustream.dev/idle-after is malformed: '2 hours'",
            ],
        ),
    ],
)
def test_an_alert_describes_what_is_wrong(rule: str, ticks: list[Tick], texts: list[str]) -> None:
    _, annotations = description_of(rule, *ticks)
    for part in texts:
        assert part in annotations["description"]


@pytest.mark.parametrize(
    ("rule", "sample"),
    [
        ("GPURowRemapPending", device(0, row_remap_pending=1)),
        ("GPUThermalSlowdown", device(0, clock_event_reasons=0x40)),
        ("GPULost", device(0, state="lost")),
        ("GPUXid", device(0, events=(AttributedEvent("xid", 79),))),
        ("GPUXid", device(0, events=(AttributedEvent("xid", 31),))),
    ],
)
def test_a_gpu_with_a_fault_is_held_by_the_pods_of_its_mig_devices(rule: str, sample: Device) -> None:
    parts = [mig(1, holder("a"), state=sample.state), mig(2, holder("b"), state=sample.state), device(1, holder("c"))]
    _, annotations = description_of(rule, tick(0, sample, *parts))
    assert "ml/a, ml/b." in annotations["description"]


def test_a_missing_gpu_was_held_by_the_pods_of_its_mig_devices() -> None:
    before = tick(0, device(0), mig(1, holder("a")), mig(2, holder("b")), mig(3), device(1, holder("c")))
    _, annotations = description_of("GPUMissing", before, tick(75, device(1, holder("c"))))
    assert "It was held by ml/a, ml/b." in annotations["description"]


def test_a_silent_node_is_described_by_what_it_had() -> None:
    memory = remember(Memory(), tick(0, device(0, holder("a")), device(1, holder("a")), device(2)), 1)
    (rule,) = DEFAULTS.of("node_silent")
    state = NodeAlerts(schema=1, cluster="c", node="n", offset=0, position=0, last_ts_ms=START_MS, logged_ms=START_MS)
    labels, annotations = describe_silence(rule, state, memory)
    assert labels == {
        "alertname": "NodeSilent",
        "severity": "critical",
        "k8s_cluster_name": "c",
        "k8s_node_name": "n",
    }
    assert annotations["description"] == "n has sent nothing since 2026-11-20 23:59 UTC. It had 3 GPUs, held by 1 pod."


def test_a_silent_node_without_pods_was_held_by_none() -> None:
    memory = remember(Memory(), tick(0, device(0)), 1)
    (rule,) = DEFAULTS.of("node_silent")
    state = NodeAlerts(schema=1, cluster="c", node="n", offset=0, position=0, last_ts_ms=START_MS, logged_ms=START_MS)
    assert "It had 1 GPU, held by nobody." in describe_silence(rule, state, memory)[1]["description"]


def test_a_silent_node_that_jobs_held_says_so() -> None:
    jobs = [device(i, holder_of_job(Job(str(i)))) for i in range(2)]
    memory = remember(Memory(), tick(0, *jobs, device(2, holder("a"))), 1)
    (rule,) = DEFAULTS.of("node_silent")
    state = NodeAlerts(schema=1, cluster="c", node="n", offset=0, position=0, last_ts_ms=START_MS, logged_ms=START_MS)
    assert "It had 3 GPUs, held by 1 pod and 2 jobs." in describe_silence(rule, state, memory)[1]["description"]


def test_the_mig_devices_of_a_silent_node_are_no_further_gpus() -> None:
    memory = remember(Memory(), tick(0, device(0), mig(1), mig(2, holder("a"))), 1)
    (rule,) = DEFAULTS.of("node_silent")
    state = NodeAlerts(schema=1, cluster="c", node="n", offset=0, position=0, last_ts_ms=START_MS, logged_ms=START_MS)
    assert "It had 1 GPU, held by 1 pod." in describe_silence(rule, state, memory)[1]["description"]


def test_every_kind_has_its_sentences() -> None:
    with_their_own_functions = {"held_idle", "node_silent"}
    assert set(KINDS) - with_their_own_functions == set(module._TEMPLATES)


def test_the_runbook_of_every_rule_is_there() -> None:
    for rule in rules_file.defaults().values():
        text = (ROOT / "docs" / "runbooks" / f"{rule.name}.md").read_text()
        assert text.startswith(f"# {rule.name}\n")


@given(st.text(max_size=400), st.text(max_size=20))
def test_whatever_names_there_are_labels_are_utf_8_of_bounded_length(name: str, label: str) -> None:
    by = overlay('[rules.GPUHeldIdle]\ncopy_labels = ["team"]')
    pod = holder(namespace=name * 9, labels={"team": label}, workload=Workload(name, label))
    labels, annotations = idle(device(0, pod, busy=0.0, model=name), by=by)
    for key, value in (*labels.items(), *annotations.items()):
        assert re.fullmatch(r"[a-z_][a-z0-9_]*", key)
        assert 0 < len(value.encode()) <= MAX_VALUE_BYTES


def test_what_a_tenant_writes_is_no_link_no_mention_and_no_new_line_in_an_alert() -> None:
    forged = Workload("<!channel>\n[Log in](https://x.example)", "<https://x.example|again>\x1b[31m\u202e")
    labels, annotations = idle(device(0, holder(workload=forged), busy=0.0))
    policy = holder(annotations={"gpustream.dev/alerts": "<https://x.example|Renew your login>"})
    _, about_policy = description_of("GPUPolicyInvalid", tick(0, device(0, policy)))
    for text in (*labels.values(), *annotations.values(), *about_policy.values()):
        assert text.isprintable()
        assert not set("<>") & set(text)
        assert "](" not in text
    assert labels["k8s_workload_kind"] == "(!channel)?[Log in] (https://x.example)"
    assert (
        "is '(https://x.example|Renew your login)': write on or off"
        in about_policy["summary"] + about_policy["description"]
    )


def test_a_replay_says_the_same() -> None:
    sample = device(0, holder(), busy=0.0, xids={"31": 1}, events=(AttributedEvent("xid", 31),))
    said_twice = []
    for _ in range(2):
        findings, _ = evaluate(DEFAULTS, tick(0, sample), Memory())
        said_twice.append([describe(finding, tick(0, sample), START_MS) for finding in findings])
    assert said_twice[0] == said_twice[1]


def test_a_rules_own_labels_never_replace_those_of_the_workload() -> None:
    by = overlay('[rules.GPUHeldIdle]\nlabels = { team = "platform", floor = "2" }')
    (idle,) = by.of("held_idle")
    for labels, team in (({"team": "ml"}, "ml"), ({}, "platform")):
        facts = Facts(device(0), None, (holder(labels=labels),))
        described, _ = describe(Finding(idle, gpu(), "uid-bert-0", facts=facts), tick(0, device(0)), 0)
        assert (described["team"], described["floor"]) == (team, "2")
