"""Alerts of several GPUs: one for each workload or node, whatever nodes its GPUs are on and in any order."""

import itertools
from decimal import Decimal
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.prices import Price, Prices
from streams.alerts import groups
from streams.alerts.machine import LogPosition, initial_state, step
from streams.alerts.memory import NodeAlerts
from streams.alerts.node import Replay
from streams.alerts.rules.rule import Rules, Wording
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, gpu, holder, mig, overlay, tick
from topics.alerts import MEMBERS, Alert, AlertGroup, AlertReport, fingerprint, transition_id
from topics.attributed import AttributedEvent, Holder, Workload, holder_of_job
from topics.samples import Job
from topics.times import MAX_TIME_MS, epoch_ms, time_of
from topics.workloads import UnwellDevice

SOON_RULES = overlay("""
[rules.GPUHeldIdle]
for = "30s"
grace = "0s"
critical_after = "100s"
keep_firing_for = "0s"
[rules.GPUMissing]
for = "10s"
""")


def held_devices(count: int, pod: Holder, *, idle: int | None = None, first: int = 0) -> list[Device]:
    """GPUs of a pod; the first ``idle`` of them are idle."""
    quiet = count if idle is None else idle
    return [device(first + i, pod, busy=0.0 if i < quiet else 0.9, model="NVIDIA H100") for i in range(count)]


def fired(rules: Rules, *moments: tuple[range, str, list[Device]]) -> list[Alert]:
    """The alerts of ticks of nodes at some seconds."""
    replay = Replay(rules)
    return [
        alert
        for seconds, node, devices in moments
        for s in seconds
        for alert in replay.judge(tick(s, *devices, node=node))
    ]


def summary(alerts: list[Alert]) -> list[tuple[str, int, int | None, int | None]]:
    return [(alert.state, alert.revision, alert.idle, alert.held) for alert in alerts]


def test_an_idle_pod_of_eight_gpus_is_one_alert_with_its_gpus_inside() -> None:
    (alert,) = fired(SOON_RULES, (range(60), "n", held_devices(8, holder())))
    assert [(gpu_in_alert.uuid, gpu_in_alert.node, gpu_in_alert.index) for gpu_in_alert in alert.gpus] == [
        (gpu(i), "n", i) for i in range(8)
    ]
    assert (alert.idle, alert.held, alert.name) == (8, 8, "GPUHeldIdle")
    assert "8 of 8 GPUs idle" in alert.annotations["summary"]
    assert {name for name in alert.labels if name.startswith("gpu_")} == set()


def test_the_owner_of_a_batch_job_is_not_asked_to_annotate_a_pod() -> None:
    (alert,) = fired(SOON_RULES, (range(60), "n", held_devices(1, holder_of_job(Job("4242", "ana")))))
    assert alert.annotations["policy"] == "Give back what is not needed."
    assert not {"annotate", "pod"} & set(alert.annotations["description"].split())


def test_idle_gpus_beside_working_ones_have_another_text() -> None:
    (alert,) = fired(SOON_RULES, (range(60), "n", held_devices(8, holder(), idle=3)))
    assert "3 of 8 GPUs idle, the other 5 work" in alert.annotations["summary"]


def test_the_gpus_of_a_workload_are_counted_also_if_its_name_is_not_written_as_it_is() -> None:
    forged = holder(workload=Workload("Job", "<bert>\n"))
    (alert,) = fired(SOON_RULES, (range(60), "n", held_devices(8, forged, idle=3)))
    assert (alert.idle, alert.held, alert.labels["k8s_workload_name"]) == (3, 8, "(bert)?")


def test_a_gang_on_three_nodes_is_one_alert() -> None:
    pods = {f"n{i}": held_devices(8, holder(f"bert-{i}"), first=8 * i) for i in range(3)}
    replay = Replay(SOON_RULES)
    alerts = [
        alert
        for s in range(60)
        for node, devices in pods.items()
        for alert in replay.judge(tick(s, *devices, node=node))
    ]
    assert summary(alerts) == [("firing", 0, 8, 24), ("firing", 1, 16, 24), ("firing", 2, 24, 24)]
    assert len({(alert.fingerprint, alert.starts_at, tuple(alert.labels.items())) for alert in alerts}) == 1
    assert {gpu_in_alert.node for gpu_in_alert in alerts[-1].gpus} == set(pods)


def test_of_a_gang_the_pods_that_work_are_counted_too() -> None:
    pods = {f"n{i}": held_devices(8, holder(f"bert-{i}"), first=8 * i, idle=8 * (i == 1)) for i in range(3)}
    (alert,) = fired(
        SOON_RULES, *[(range(s, s + 1), node, devices) for s in range(60) for node, devices in pods.items()]
    )
    assert "8 of 24 GPUs idle, the other 16 work" in alert.annotations["summary"]
    assert {gpu.node for gpu in alert.gpus} == {"n1"}


HeldStep = tuple[
    int, int, int
]  # which node, how many GPUs a pod of the gang holds there from now on, how many are idle
stories = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@given(stories, st.randoms(use_true_random=False))
def test_what_a_gang_holds_is_what_its_pods_hold_on_all_nodes_whatever_is_sent_or_read_again(
    story: list[HeldStep], chance: Random
) -> None:
    states: dict[str, NodeAlerts] = {}
    durable: dict[str, NodeAlerts] = {}
    log: list[AlertReport] = []
    group: AlertGroup | None = None
    gang = fingerprint("GPUHeldIdle", "c", "", key="workload/ml/Job/bert/")
    truth, offset = dict.fromkeys(("n0", "n1", "n2"), 0), 0
    for index, (number, count, idle) in enumerate(story):
        node, unsaved = f"n{number}", list[tuple[Tick, LogPosition]]()
        durable[node] = (
            states.get(node) or durable.get(node) or initial_state(tick(0, node=node), LogPosition(0, START_MS))
        )
        for s in range(index * 50, index * 50 + 50, 10):
            devices = held_devices(count, holder(f"bert-{node}"), idle=min(idle, count))
            log_tick = tick(s, *devices, *[device(i, busy=0.0) for i in range(count, 4)], node=node)
            unsaved.append((log_tick, LogPosition(s, log_tick.ts_ms)))
        runs = [unsaved[: chance.randint(0, 5)], unsaved] if chance.random() < 0.5 else [unsaved]  # killed in between
        for run in runs:
            state = durable[node]
            for log_tick, offset_read in run:
                after = step(state, log_tick, offset_read, SOON_RULES)
                state, log = after.state, [*log, *(report for report in after.reports if report.group == gang)]
            states[node] = msgspec.json.decode(msgspec.json.encode(state), type=NodeAlerts)
        truth[node] = count
        first_offset = chance.randint(0, offset)
        for report in (
            *log[first_offset:offset],
            *log[offset:],
        ):  # the group as it was written last, and the log from before
            before = group
            group = groups.step(group, report, first_offset, SOON_RULES).group
            assert first_offset >= offset or group is before
            first_offset += 1
        offset = len(log)
        assert group is None or {name: state.held for name, state in group.seen.items() if state.held} == {
            name: count for name, count in truth.items() if count
        }
        if group is not None and group.alert is not None and group.alert.is_open:
            assert group.alert.held == sum(truth.values())


def test_the_text_of_an_override_is_kept() -> None:
    rules = overlay("""
[rules.GPUHeldIdle]
for = "30s"
grace = "0s"
annotations = { description = "Ask the platform team." }
[[rules.GPUHeldIdle.overrides]]
namespace = "ml"
annotations = { summary = "ML holds what it does not use" }
""")
    alerts = fired(
        rules, (range(40), "n", held_devices(2, holder(), idle=1)), (range(40, 80), "n", held_devices(2, holder()))
    )
    assert summary(alerts) == [("firing", 0, 1, 2), ("firing", 1, 2, 2)]
    for alert in alerts:
        assert alert.annotations["summary"] == "ML holds what it does not use"
        assert alert.annotations["description"] == "Ask the platform team."


def test_work_of_a_moment_is_said_beside_since_when_gpus_are_idle() -> None:
    rules = overlay("[rules.GPUHeldIdle]\nfor = '5m'\ngrace = '0s'\nkeep_firing_for = '5m'\ncritical_after = '10m'")
    moments = [(range(0, 400, 10), 1), (range(400, 460, 10), 0), (range(460, 700, 10), 1)]
    alerts = fired(rules, *[(seconds, "n", held_devices(1, holder(), idle=idle)) for seconds, idle in moments])
    assert [alert.annotations["summary"].partition("idle ")[2] for alert in alerts] == [
        "(since 2026-11-20 23:59 UTC)",
        "(since 2026-11-20 23:59 UTC, with work until 2026-11-21 00:06 UTC)",
    ]


def test_growing_and_shrinking_are_updates_and_the_last_gpu_that_works_ends_it() -> None:
    alerts = fired(
        SOON_RULES,
        (range(40), "n", held_devices(4, holder(), idle=2)),
        (range(40, 80), "n", held_devices(4, holder(), idle=4)),
        (range(80, 90), "n", held_devices(4, holder(), idle=1)),
        (range(90, 95), "n", held_devices(4, holder(), idle=0)),
    )
    assert summary(alerts) == [
        ("firing", 0, 2, 4), ("firing", 1, 4, 4), ("firing", 2, 1, 4), ("resolved", 2, 1, 4)
    ]  # fmt: skip
    assert len({alert.fingerprint for alert in alerts}) == 1
    assert len({transition_id(alert) for alert in alerts}) == 4
    assert alerts[-1].resolved_because == "condition"


def test_it_is_a_warning_and_then_critical_in_one_rule() -> None:
    alerts = fired(SOON_RULES, (range(200), "n", held_devices(2, holder())))
    assert [(alert.severity, alert.labels["severity"], alert.revision) for alert in alerts] == [
        ("warning", "warning", 0), ("critical", "critical", 1)
    ]  # fmt: skip
    assert epoch_ms(alerts[0].starts_at) == START_MS + 30_000


def confirmed(*moments: tuple[range, str, list[Device]]) -> list[tuple[int, int | None]]:
    """When an idle gang's alert is written after it fires, and until when all of it is known, in seconds."""
    states: dict[str, NodeAlerts] = {}
    group: AlertGroup | None = None
    log: list[tuple[int, int | None]] = []
    for offset, (s, node, devices) in enumerate(
        sorted(
            [(s, node, devices) for seconds, node, devices in moments for s in seconds], key=lambda moment: moment[0]
        )
    ):
        before = states.get(node) or initial_state(tick(0, node=node), LogPosition(0, START_MS))
        after = step(before, tick(s, *devices, node=node), LogPosition(offset, START_MS + s * 1000), SOON_RULES)
        states[node] = after.state
        for number, report in enumerate(report for report in after.reports if report.alerts):
            stepped = groups.step(group, report, 10 * offset + number, SOON_RULES)
            group = stepped.group
            log += [
                (s, (epoch_ms(alert.confirmed_at) - START_MS) // 1000 if alert.confirmed_at else None)
                for alert in stepped.alerts
                if s > 200
            ]
    return log


def test_while_a_node_is_silent_the_alert_of_its_gang_says_until_when_all_of_it_is_known() -> None:
    n0, n1 = ([device(i, holder(f"bert-{i}"), busy=0.0)] for i in range(2))
    ticks = confirmed((range(0, 8000, 20), "n0", n0), (range(0, 8000, 20), "n1", n1))
    assert ticks == [(3700, 100), (3700, 3700), (7300, 3700), (7300, 7300)]
    assert confirmed((range(0, 1000, 20), "n0", n0), (range(0, 8000, 20), "n1", n1))[-1] == (7300, 100)


def test_a_gpu_of_which_nothing_is_known_is_not_reported_as_idle_again() -> None:
    pod = holder()
    idle, unknown = [device(0, pod, busy=0.0)], [device(0, pod, state="timeout")]
    assert confirmed((range(0, 1000, 20), "n", idle), (range(1000, 8000, 20), "n", unknown)) == []
    assert confirmed((range(0, 8000, 20), "n", idle))[-1] == (7300, 7300)


def test_the_alert_says_what_is_wasted_what_it_costs_and_who_owns_it() -> None:
    prices = Prices("EUR", (Price("nvidia h100*", Decimal("3.60"), 0, 2**62, ()),))
    rules = msgspec.structs.replace(SOON_RULES, wording=Wording("https://wiki.example.org/gpu", "squad", prices))
    pod = holder(labels={"squad": "vision"})
    first, last = fired(
        rules,
        (range(1), "n", held_devices(2, pod, idle=0)),
        (range(1, 50), "n", held_devices(2, pod)),
        (range(50, 51), "n", held_devices(2, pod, idle=0)),
    )
    assert first.labels["team"] == "vision"
    assert (first.annotations["cost"], first.annotations["currency"]) == ("0.06", "EUR")
    assert last.annotations["wasted_gpu_seconds"] == "98"
    assert first.annotations["runbook"] == "https://wiki.example.org/gpu/GPUHeldIdle.md"
    assert first.annotations["last_active"] == f"{time_of(START_MS + 1000):%Y-%m-%dT%H:%M:%SZ}"
    assert "gpustream.dev/idle-after" in first.annotations["policy"]


def test_a_gpu_that_never_worked_is_not_said_to_have_worked_until_the_first_tick_after_its_grace() -> None:
    rules = overlay('[rules.GPUHeldIdle]\nfor = "30s"\ngrace = "5s"')
    (alert,) = fired(rules, (range(0, 60, 2), "n", held_devices(1, holder())))
    assert "last_active" not in alert.annotations
    assert "None has worked since its grace was over." in alert.annotations["description"]


def test_gpus_that_go_at_once_are_one_alert_of_the_node_and_one_that_goes_alone_is_its_own() -> None:
    eight = [device(i) for i in range(8)]
    all_gone = fired(SOON_RULES, (range(5), "n", eight), (range(5, 30), "n", []), (range(30, 70), "n", eight))
    assert [(alert.name, alert.state, len(alert.gpus)) for alert in all_gone] == [
        ("GPUMissing", "firing", 8), ("GPUMissing", "resolved", 8)
    ]  # fmt: skip
    assert "8 GPUs of n are not there any more" in all_gone[0].annotations["summary"]
    one_gone = fired(SOON_RULES, (range(5), "n", eight), (range(5, 30), "n", eight[1:]))
    assert [(alert.labels["gpu_uuid"], alert.gpus) for alert in one_gone] == [(gpu(0), ())]
    failed = device(1, events=(AttributedEvent("xid", 79, START_MS),), xids={"79": 1})
    two_gone = fired(SOON_RULES, (range(1), "n", [eight[0], failed, *eight[2:]]), (range(1, 30), "n", eight[2:]))
    assert [(alert.name, len(alert.gpus)) for alert in two_gone] == [("GPUXid", 0), ("GPUMissing", 2)]


@pytest.mark.parametrize("rule", ["GPUMissing", "GPULost"])
def test_the_alert_of_a_nodes_gpus_names_all_pods_that_held_them(rule: str) -> None:
    shared, parts = device(1, holder("a"), holder("b")), [device(2), mig(1, holder("c"), parent=2)]
    gone = [] if rule == "GPUMissing" else [device(i, *shared.holders[: 2 * (i == 1)], state="lost") for i in (1, 2)]
    gone += [] if rule == "GPUMissing" else [mig(1, holder("c"), parent=2, state="lost")]
    (alert,) = fired(SOON_RULES, (range(5), "n", [device(0), shared, *parts]), (range(5, 30), "n", [device(0), *gone]))
    assert "GPU 1 of n (ml/a, ml/b); GPU 2 of n (ml/c)." in alert.annotations["description"]
    assert alert.annotations["pods"] == "ml/a, ml/b, ml/c"


def test_the_alert_of_a_nodes_gpus_says_of_each_what_the_api_server_does() -> None:
    healthy, lost = [[device(i, state=state) for i in range(3)] for state in ("ok", "lost")]
    unwell = (
        UnwellDevice(gpu(0), health="Unhealthy"),
        UnwellDevice(gpu(2), taint="gpu.nvidia.com/lost:NoExecute"),
    )
    ticks = [tick(s, *(lost if s >= 5 else healthy)) for s in range(30)]
    replay = Replay(SOON_RULES)
    alerts = [alert for lost_tick in ticks for alert in replay.judge(msgspec.structs.replace(lost_tick, unwell=unwell))]
    assert [(alert.name, len(alert.gpus)) for alert in alerts] == [("GPULost", 3)]
    assert alerts[0].annotations["api_status"] == (
        "GPU 0 of n: Unhealthy; GPU 2 of n: taint gpu.nvidia.com/lost:NoExecute"
    )


def test_what_the_api_server_says_later_of_a_nodes_gpu_is_in_the_alert_of_the_node() -> None:
    healthy, lost = [[device(i, state=state) for i in range(2)] for state in ("ok", "lost")]
    replay = Replay(SOON_RULES)
    alerts = []
    for s in range(200):
        unwell = (UnwellDevice(gpu(1), health="Unhealthy"),) if s >= 30 else ()
        judged_tick = msgspec.structs.replace(tick(s, *(lost if s >= 5 else healthy)), unwell=unwell)
        alerts += replay.judge(judged_tick)
    assert "api_status" not in alerts[0].annotations
    assert alerts[-1].annotations["api_status"] == "GPU 1 of n: Unhealthy"


WORKS: dict[str, Any] = {"busy": 0.9, "power_watts": 600.0, "sm_active_ratio": 0.7}
IDLES: dict[str, Any] = {"busy": 0.0, "power_watts": 70.0, "sm_active_ratio": 0.0}
HANGS: dict[str, Any] = {"busy": 1.0, "power_watts": 140.0, "sm_active_ratio": 0.1}


def ranks(pod: Holder, *metrics: dict[str, Any]) -> list[Device]:
    """GPUs of a pod, and what each does."""
    return [device(i, pod, power_limit_watts=700.0, **rank_metrics) for i, rank_metrics in enumerate(metrics)]


def test_a_rank_that_is_idle_while_the_others_hang_is_one_of_them_in_a_pod_without_a_workload_too() -> None:
    bare = holder("debug", workload=None)
    alerts = fired(DEFAULTS, *[(range(s, s + 1), "n", ranks(bare, IDLES, *[HANGS] * 3)) for s in range(0, 1800, 30)])
    (stalled,) = [alert for alert in alerts if alert.name == "GPUStalled"]
    assert summary([stalled]) == [("firing", 0, 3, 4)]
    assert "3 of 4 GPUs stalled, the other one is idle" in stalled.annotations["summary"]


def test_two_ranks_that_idle_on_one_gpu_while_the_others_hang_count_as_two_gpus_that_the_workload_holds() -> None:
    shared = device(2, holder("bert-1"), holder("bert-2"), power_limit_watts=700.0, **IDLES)
    devices = [*ranks(holder(), HANGS, HANGS), shared]
    alerts = fired(DEFAULTS, *[(range(s, s + 1), "n", devices) for s in range(0, 1800, 30)])
    (stalled,) = [alert for alert in alerts if alert.name == "GPUStalled"]
    assert summary([stalled]) == [("firing", 0, 2, 4)]
    assert "2 of 4 shares of GPUs stalled, the other 2 are idle" in stalled.annotations["summary"]


def test_a_gpu_on_which_four_pods_idle_is_not_said_to_be_four_gpus() -> None:
    shared = device(0, *[holder(f"bert-{number}") for number in range(4)], busy=0.0)
    (alert,) = fired(SOON_RULES, (range(60), "n", [shared]))
    assert (alert.idle, alert.held, alert.annotations["gpu_share"]) == (4, 4, "1")
    assert "4 of 4 shares of GPUs idle" in alert.annotations["summary"]


def test_a_job_that_hangs_and_grows_for_a_while_hangs_again_when_it_has_shrunk() -> None:
    """The resolved alert keeps its GPUs, and ends when the job has grown."""
    hangs, grown = [*ranks(holder(), *[HANGS] * 4), device(4)], ranks(holder(), *[HANGS] * 4, WORKS)
    story = [(1200, hangs), (600, grown), (600, hangs)]
    moments = [devices for seconds, devices in story for _ in range(seconds // 30)]
    alerts = fired(DEFAULTS, *[(range(30 * i, 30 * i + 1), "n", devices) for i, devices in enumerate(moments)])
    stalled = [alert for alert in alerts if alert.name == "GPUStalled"]
    assert summary(stalled) == [("firing", 0, 4, 4), ("resolved", 0, 4, 4), ("firing", 0, 4, 4)]
    assert stalled[1].ends_at == time_of(START_MS + 1_200_000)
    assert stalled[2].starts_at > stalled[1].ends_at


def test_a_job_that_hung_on_three_nodes_and_works_again_is_not_reported_idle() -> None:
    """The nodes' ticks are apart: they report one after the other that the job works."""
    replay, alerts = Replay(DEFAULTS), list[Alert]()
    for s in range(0, 5400, 30):
        for n in range(3):
            metrics = WORKS if not 600 <= s < 3000 else IDLES if n == 1 else HANGS
            rank = device(0, holder(f"bert-{n}"), uuid=gpu(n), power_limit_watts=700.0, **metrics)
            alerts += replay.judge(tick(s + n * 7, rank, node=f"n{n}"))
    transitions = [(alert.name, alert.state) for alert in alerts if alert.name != "GPUStraggler"]
    assert transitions == [("GPUStalled", "firing"), ("GPUStalled", "resolved")]


def test_a_driver_that_is_away_for_a_moment_changes_nothing_of_a_workload() -> None:
    idle, away = held_devices(8, holder(), idle=2), list[Device]()
    alerts = fired(SOON_RULES, (range(60), "n", idle), (range(60, 65), "n", away), (range(65, 90), "n", idle))
    assert summary(alerts) == [("firing", 0, 2, 8)]
    alerts = fired(SOON_RULES, (range(60), "n", idle), (range(60, 700, 30), "n", away))
    assert [entry for entry in summary(alerts) if entry[0] == "resolved"] == [("resolved", 0, 2, 8)]


def test_kinds_of_nvlink_errors_are_distinguished_by_a_label() -> None:
    counters = ("nvlink_crc_errors_total", "nvlink_replay_errors_total")
    alerts = fired(
        DEFAULTS,
        (range(1), "n", [device(0, **dict.fromkeys(counters, 0))]),
        (range(1, 3), "n", [device(0, **dict.fromkeys(counters, 900))]),
    )
    assert sorted(alert.labels["nvlink_error"] for alert in alerts) == ["crc", "replay"]


# -- whatever is read again


def reports() -> list[AlertReport]:
    """The reports of three nodes whose pods idle, work and idle again."""
    sent: list[AlertReport] = []
    states: dict[str, NodeAlerts] = {}
    story = [(range(40), 4), (range(40, 45), 1), (range(45, 90), 3), (range(90, 95), 0), (range(95, 140), 2)]
    for (seconds, idle), node in itertools.product(story, ("n0", "n1", "n2")):
        for s in seconds:
            node_tick = tick(s, *held_devices(4, holder(f"bert-{node}"), idle=idle), node=node)
            position = LogPosition(node_tick.offset, node_tick.ts_ms)
            after = step(states.get(node) or initial_state(node_tick, position), node_tick, position, SOON_RULES)
            states[node] = after.state
            sent += after.reports
    return sent


def test_a_report_that_is_read_again_changes_nothing_and_gives_the_same_bytes() -> None:
    log = [*reports()]
    encoded: list[bytes] = []
    group: AlertGroup | None = None
    for offset, report in enumerate(log):
        durable = group
        after = groups.step(group, report, offset, SOON_RULES)
        group = msgspec.json.decode(msgspec.json.encode(after.group), type=AlertGroup)
        encoded += [msgspec.json.encode(alert) for alert in after.alerts]
        repeated = groups.step(durable, report, offset, SOON_RULES)
        assert [msgspec.json.encode(alert) for alert in repeated.alerts] == [
            msgspec.json.encode(alert) for alert in after.alerts
        ]
        durable_offset = offset // 2
        assert groups.step(group, log[durable_offset], durable_offset, SOON_RULES).alerts == ()
    assert len(encoded) >= sum(1 for report in log if report.alerts)


def test_reports_that_a_node_sends_again_after_a_crash_change_nothing_whatever_they_contain() -> None:
    log = [report for report in reports() if report.node == "n1"]
    alerts_once: list[Alert] = []
    group: AlertGroup | None = None
    for offset, report in enumerate(log):
        after = groups.step(group, report, offset, SOON_RULES)
        group, alerts_once = after.group, [*alerts_once, *after.alerts]
    alerts_again: list[Alert] = []
    group = None
    for offset, report in enumerate([report_again for end in range(1, len(log) + 1) for report_again in log[:end]]):
        after = groups.step(group, report, offset, SOON_RULES)
        group, alerts_again = after.group, [*alerts_again, *after.alerts]
    assert alerts_again == alerts_once


@pytest.mark.parametrize("workload", [None, Workload("Pod", "alone")])
def test_what_a_pod_without_owners_holds_is_reported_from_its_first_alert_until_it_ends(
    workload: Workload | None,
) -> None:
    alone = holder("alone", workload=workload)
    state, reports = initial_state(tick(0), LogPosition(0, START_MS)), list[tuple[int, AlertReport]]()
    for s in range(60):
        devices = held_devices(4, alone, idle=0 if s < 10 else 2) if s < 50 else [device(i, busy=0.0) for i in range(4)]
        after = step(state, tick(s, *devices), LogPosition(s, START_MS + s * 1000), SOON_RULES)
        state, reports = after.state, [*reports, *((s, report) for report in after.reports)]
    own_group = [(s, r.held, len(r.alerts)) for s, r in reports if r.alerts or r.group == reports[0][1].group]
    assert own_group == [(40, 4, 2), (50, 0, 2)]
    assert {s for s, _ in reports} == {40, 50}
    assert not state.holdings


# -- from the version before


def test_the_first_tick_of_a_node_with_a_state_of_the_previous_version_reports_what_is_held() -> None:
    devices = held_devices(4, holder(), idle=0)
    state = step(
        initial_state(tick(0, *devices), LogPosition(0, START_MS)),
        tick(0, *devices),
        LogPosition(0, START_MS),
        SOON_RULES,
    ).state
    old = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(state, holdings=None)), type=NodeAlerts)
    after = step(old, tick(1, *devices), LogPosition(1, START_MS + 1000), SOON_RULES)
    assert {(report.node, report.held, report.alerts) for report in after.reports} == {("n", 4, ())}
    assert step(after.state, tick(2, *devices), LogPosition(2, START_MS + 2000), SOON_RULES).reports == []


def test_an_open_alert_of_the_previous_version_ends_and_that_of_its_workload_goes_on_since_then() -> None:
    devices = held_devices(1, holder())
    position = LogPosition(0, START_MS)
    state = initial_state(tick(0, *devices), position)
    for s in range(40):
        state = step(state, tick(s, *devices), LogPosition(s, START_MS + s * 1000), SOON_RULES).state
    (tracked,) = state.tracked
    old = msgspec.structs.replace(state, tracked=(msgspec.structs.replace(tracked, scope=None),))
    after = step(old, tick(40, *devices), LogPosition(40, START_MS + 40_000), SOON_RULES)
    (end,) = [w.alert for w in after.writes if isinstance(w.alert, Alert)]
    assert (end.state, end.resolved_because) == ("resolved", "grouped")
    assert end.fingerprint == fingerprint("GPUHeldIdle", "c", "n", gpu(), "uid-bert-0")
    (report,) = [report for report in after.reports if report.alerts]
    alert = groups.step(None, report, 0, SOON_RULES).alerts[0]
    assert (alert.state, alert.starts_at) == ("firing", end.starts_at)


def test_a_report_with_times_after_9999_has_the_last_one_that_there_is() -> None:
    report = groups.decode_report(msgspec.json.encode(MEMBERS.example | {"ts_ms": 2**63 - 1, "logged_ms": 2**63 - 1}))
    (alert,) = groups.step(None, report, 0, DEFAULTS).alerts
    assert (alert.state, alert.confirmed_at) == ("firing", time_of(MAX_TIME_MS))


# -- MIG devices


def idle_mig(number: int, pod: Holder, **fields: Any) -> Device:
    return mig(number, pod, graphics_engine_active_ratio=0.0, model="NVIDIA H100", **fields)


def test_idle_mig_devices_are_no_idle_gpus() -> None:
    """They are named once for each pod, in whatever order they are on the GPU."""
    parts = [idle_mig(number, holder("bert-0" if number % 2 else "bert-1")) for number in range(5)]
    (alert,) = fired(SOON_RULES, (range(60), "n", [device(0), *parts]))
    names = "3 MIG devices of GPU 0 of n (ml/bert-1); 2 MIG devices of GPU 0 of n (ml/bert-0)"
    assert f"Idle: {names}." in alert.annotations["description"]


def test_a_workload_that_idles_on_a_gpu_and_on_mig_devices_is_said_to_hold_both() -> None:
    parts = [idle_mig(1, holder()), idle_mig(2, holder())]
    (alert,) = fired(SOON_RULES, (range(60), "n", [device(0), *parts, device(1, holder(), busy=0.0)]))
    assert "3 of 3 GPUs and MIG devices idle" in alert.annotations["summary"]
    assert "Idle: 2 MIG devices of GPU 0 of n (ml/bert-0); GPU 1 of n (ml/bert-0)." in alert.annotations["description"]
    assert alert.annotations["gpu_share"] == "1.286", "a GPU and two of seven slices"


def test_a_mig_device_that_idles_beside_a_gpu_that_stalls_is_named_as_such() -> None:
    hung = {"busy": 1.0, "power_watts": 140.0, "power_limit_watts": 700.0, "sm_active_ratio": 0.1}
    devices = [device(0), idle_mig(1, holder()), device(1, holder(), **hung)]
    alerts = fired(SOON_RULES, (range(0, 700, 10), "n", devices))
    (stalled,) = [alert for alert in alerts if alert.name == "GPUStalled"]
    assert "1 of 2 GPUs and MIG devices stalled, the other one is idle" in stalled.annotations["summary"]
    assert "Idle: 1 MIG device of GPU 0 of n (ml/bert-0)." in stalled.annotations["description"]


def test_the_evidence_of_mig_devices_says_of_which_one_it_is() -> None:
    rules = overlay('[rules.GPUHeldIdle]\nenabled = false\n[rules.GPUUnderused]\nwindow = "10m"')
    active = {0: 0.02, 1: 0.02, 2: 0.03}
    devices = [mig(number, holder(), graphics_engine_active_ratio=active[number]) for number in active]
    alerts = [
        alert
        for replay in [Replay(rules)]
        for s in range(0, 1200, 30)
        for alert in replay.judge(tick(s, device(0), *devices, interval_ms=30_000))
    ]
    assert alerts[0].annotations["evidence"] == "; ".join(
        f"MIG-{number} of GPU 0 of n: used for {active[number]:.1%}" for number in active
    )


def test_mig_devices_that_do_not_answer_are_no_gpus_that_do_not() -> None:
    parts = [mig(1, holder("a"), state="timeout"), mig(2, holder("b"), state="timeout")]
    for whole, summary_text in (
        (device(1), "2 MIG devices of n do not answer their driver"),
        (device(1, state="timeout"), "1 GPU and 2 MIG devices of n do not answer their driver"),
    ):
        (alert,) = fired(overlay(""), (range(70), "n", [device(0), whole, *parts]))
        assert alert.annotations["summary"] == summary_text
        assert (
            "1 MIG device of GPU 0 of n (ml/a); 1 MIG device of GPU 0 of n (ml/b)" in alert.annotations["description"]
        )


def test_all_slices_of_a_gpu_waste_no_more_than_the_gpu() -> None:
    parts = [idle_mig(number, holder()) for number in range(7)]
    replay, busy = Replay(SOON_RULES), [device(0), *[mig(part, holder(), busy=0.9) for part in range(7)]]
    for s in range(0, 360_000, 1800):
        replay.judge(tick(s, device(0), *parts, interval_ms=1_800_000))
    (resolved,) = replay.judge(tick(360_000, *busy, interval_ms=1_800_000))
    assert (resolved.state, resolved.annotations["wasted_gpu_seconds"]) == ("resolved", "360000")
    assert resolved.annotations["wasted_gpu_hours"] == "100.00"
