"""GPUStraggler: which GPUs of a workload lag behind the others, by what its nodes report each five minutes."""

import itertools
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import msgspec
import pytest

from streams.alerts.node import Replay
from streams.alerts.stragglers import outliers
from tests.streams.alerts.ticks import START_MS, device, gpu, holder, overlay, tick
from topics.alerts import Alert, Limits, Rank
from topics.attributed import Workload
from topics.times import epoch_ms
from topics.workloads import MAINTENANCE

ON = overlay("[rules.GPUStraggler]\nenabled = true")
LIMITS = Limits(600_000, 600_000, 3, 3.5)
WORKS = {"busy": 1.0, "sm_active_ratio": 0.7, "tensor_active_ratio": 0.35, "sm_clock_hz": 1.98e9, "power_watts": 600.0}

MetricsOf = Callable[[int, int, float], dict[str, Any]]
"""The metrics of a GPU: of a node's number and the GPU's at a time."""


def rank(number: int, **changes: float | None) -> Rank:
    metrics: dict[str, float | None] = {
        "utilization": 1.0, "sm_active": 0.7, "tensor_active": 0.35, "sm_clock_hz": 1.98e9, "power_watts": 600.0,
        "throttled": 0.0, "violation": None,
    }  # fmt: skip
    return Rank(gpu(number), number, "bert-0", tuple((metrics | changes).values()))


def suspects(*ranks: Rank, kind: str = "Job") -> dict[str, str]:
    return outliers(ranks, LIMITS, kind)


PEERS = [rank(i) for i in range(1, 8)]


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        (rank(0, sm_clock_hz=1.2e9), "SM clock 1200 MHz (its peers SM clock 1980 MHz)"),
        (rank(0, throttled=0.8), "slowed down for 80% of the time (its peers slowed down for 0% of the time)"),
        (rank(0, utilization=0.6), "utilization 60% (its peers utilization 100%)"),
        (rank(0, tensor_active=0.5), "tensor cores 50% (its peers tensor cores 35%)"),
        (rank(0, sm_active=0.9), "SMs active 90% (its peers SMs active 70%)"),
        (rank(0, power_watts=350.0), "350 W (its peers 600 W)"),
        (rank(0, sm_clock_hz=1.9e9, power_watts=640.0, throttled=0.05), None),
        (rank(0, sm_clock_hz=2.4e9), None),
        (rank(0), None),
    ],
)
def test_a_rank_is_suspect_by_what_differs_from_its_peers(slow: Rank, text: str | None) -> None:
    assert suspects(slow, *PEERS) == ({gpu(0): text} if text else {})


def test_where_all_are_slow_nobody_is_and_two_gpus_have_no_outlier() -> None:
    assert not suspects(*[rank(i, sm_clock_hz=1.2e9, throttled=1.0) for i in range(8)])
    assert not suspects(rank(0, sm_clock_hz=1.2e9), rank(1))
    assert not suspects(rank(0, sm_clock_hz=1.2e9), rank(1), rank(2))
    assert suspects(rank(0, sm_clock_hz=1.2e9), rank(1), rank(2), rank(3))


def test_what_half_of_the_ranks_do_is_no_outlier() -> None:
    stages = [rank(i, tensor_active=0.5 if i % 2 else 0.2, utilization=0.9 if i % 2 else 0.6) for i in range(16)]
    assert not suspects(*stages)
    assert not suspects(*[rank(i, utilization=0.5) for i in range(6)], *[rank(i) for i in range(6, 16)])


def test_of_serving_replicas_only_the_state_of_the_gpu_itself_counts() -> None:
    assert not suspects(rank(0, utilization=0.3), *PEERS, kind="Deployment")
    assert suspects(rank(0, sm_clock_hz=1.2e9), *PEERS, kind="Deployment")
    others = [msgspec.structs.replace(peer, model="another") for peer in PEERS]
    assert not suspects(rank(0, utilization=0.3), *PEERS, *others, kind="Deployment")


def test_ranks_that_wait_for_one_that_works_are_not_suspect_by_their_clocks() -> None:
    idle = [rank(i, utilization=0.0, sm_clock_hz=0.3e9, power_watts=70.0) for i in range(7)]
    assert not suspects(*idle, rank(7))


def test_noise_makes_no_suspects_and_hides_none() -> None:
    random = Random(3)

    def noisy(number: int, **changes: float) -> Rank:
        figures = {"utilization": 0.95, "sm_active": 0.6, "tensor_active": 0.3, "power_watts": 580.0} | changes
        return rank(
            number,
            **{name: value * random.uniform(0.93, 1.05) for name, value in figures.items()},
            sm_clock_hz=changes.get("sm_clock_hz", 1.8e9) * random.uniform(0.97, 1.03),
        )

    for _ in range(200):
        assert not suspects(*[noisy(i) for i in range(64)])
        assert set(suspects(noisy(0, utilization=0.5), *[noisy(i) for i in range(1, 64)])) == {gpu(0)}


WAITS = {"utilization": 1.0, "sm_active": 0.12, "tensor_active": 0.0, "power_watts": 220.0}  # in a collective's kernel
STARVES = {"utilization": 0.0, "sm_active": 0.0, "tensor_active": 0.0, "power_watts": 110.0}  # for its host
COMPUTES = {"utilization": 1.0, "sm_active": 0.7, "tensor_active": 0.35, "power_watts": 600.0}


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize(
    ("longer", "slow_does", "clock", "is_seen"),
    [
        (1.15, COMPUTES, 1.15, True),
        (1.30, STARVES, 1.0, True),
        (1.50, COMPUTES, 1.0, True),
        (1.10, COMPUTES, 1.0, False),
        (1.15, STARVES, 1.0, False),
        (2.00, WAITS, 1.0, False),
    ],
    ids=["a low clock", "a slow host", "more to do", "a tenth slower", "a host hardly slower", "a slow network"],
)
def test_a_rank_whose_steps_take_longer_is_found_among_few_and_many_ranks(
    longer: float, slow_does: dict[str, float], clock: float, is_seen: bool, ranks: int
) -> None:
    """``longer``: by which factor the slow rank's step is. While it does more than the others, they wait."""
    random = Random(7)

    def metrics_of(work: dict[str, float], extra: dict[str, float], clock: float) -> dict[str, float]:
        means = {name: (work[name] + (longer - 1) * extra[name]) / longer for name in work}
        noisy = {name: min(value * random.gauss(1, 0.02), 1.0 if value <= 1 else 1e4) for name, value in means.items()}
        return {**noisy, "sm_clock_hz": 1.98e9 / clock * random.gauss(1, 0.008)}

    slow = rank(0, **metrics_of(COMPUTES, slow_does, clock))
    others = [rank(i, **metrics_of(COMPUTES, WAITS, 1.0)) for i in range(1, ranks)]
    assert set(suspects(slow, *others)) == ({gpu(0)} if is_seen else set())


# -- through the reports of nodes


def fired(
    metrics_of: MetricsOf, minutes: Iterable[int], *, nodes: int = 2, kind: str = "Job", rules: Any = ON
) -> list[Alert]:
    replay = Replay(rules)
    alerts: list[Alert] = []
    for second in (60 * minute + s for minute in minutes for s in range(0, 60, 20)):
        for n in range(nodes):
            pod = holder(f"bert-{n}", workload=Workload(kind, "bert"))
            devices = [device(i, pod, uuid=gpu(n * 8 + i), **WORKS | metrics_of(n, i, second / 60)) for i in range(8)]
            alerts += replay.judge(tick(second, *devices, node=f"n{n}"))
    return [alert for alert in alerts if alert.name == "GPUStraggler"]


def test_a_throttled_gpu_of_a_job_on_several_nodes_is_one_alert_that_names_the_measure() -> None:
    def hot(n: int, i: int, _: float) -> dict[str, Any]:
        return {"sm_clock_hz": 1.2e9} if (n, i) == (1, 3) else {}

    alert, *rest = fired(hot, range(25))
    assert not rest
    assert [(gpu_in_alert.node, gpu_in_alert.index, gpu_in_alert.pod) for gpu_in_alert in alert.gpus] == [
        ("n1", 3, "ml/bert-1")
    ]
    assert (alert.idle, alert.held, alert.labels["k8s_workload_name"]) == (1, 16, "bert")
    assert alert.annotations["summary"] == "Job ml/bert: 1 of 16 GPUs suspect (since 2026-11-21 00:00 UTC)"
    evidence = "GPU 3 of n1: SM clock 1200 MHz (its peers SM clock 1980 MHz)"
    assert alert.annotations["evidence"] == evidence
    assert f"Evidence: {evidence}." in alert.annotations["description"]


def test_a_gpu_that_is_slow_for_two_steps_is_found_however_late_in_a_step_its_first_tick_is() -> None:
    """Of the first step, which ends after 348 s, the next tick comes 37 s later, of the second one 12 s later."""
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 1200, 55):
        slow = [{"sm_clock_hz": 1.2e9}, *[dict[str, Any]()] * 7]
        alerts += replay.judge(
            tick(second, *[device(i, holder(), **WORKS | rank_metrics) for i, rank_metrics in enumerate(slow)])
        )
    (alert,) = alerts
    assert epoch_ms(alert.starts_at) == START_MS + 660_000
    assert alert.annotations["summary"] == "Job ml/bert: 1 of 8 GPUs suspect (since 2026-11-21 00:00 UTC)"


@pytest.mark.parametrize("minutes", [5, 10, 15])
def test_a_slow_gpu_is_found_however_seldom_its_node_is_read(minutes: int) -> None:
    replay, alerts = Replay(ON), list[Alert]()
    for second in range(0, 7200, minutes * 60):
        devices = [device(i, holder(), **WORKS | ({"sm_clock_hz": 1.2e9} if i == 2 else {})) for i in range(8)]
        alerts += replay.judge(tick(second, *devices, interval_ms=minutes * 60_000))
    assert [(alert.state, epoch_ms(alert.starts_at) - START_MS) for alert in alerts] == [("firing", minutes * 180_000)]


def test_a_gpu_that_lags_for_the_rules_critical_after_makes_its_alert_critical() -> None:
    replay, alerts = Replay(overlay('[rules.GPUStraggler]\ncritical_after = "30m"')), list[Alert]()
    for second in range(0, 3600, 60):
        devices = [device(i, holder(), **WORKS | ({"sm_clock_hz": 1.2e9} if i == 2 else {})) for i in range(8)]
        alerts += replay.judge(tick(second, *devices))
    assert [(alert.state, alert.severity, alert.labels["severity"], alert.revision) for alert in alerts] == [
        ("firing", "warning", "warning", 0),
        ("firing", "critical", "critical", 1),
    ]


def test_a_slow_host_is_named_if_all_gpus_of_its_node_lag() -> None:
    alert, *rest = fired(lambda n, _i, _m: {"busy": 0.55} if n == 2 else {}, range(25), nodes=4)
    last = rest[-1] if rest else alert
    assert {gpu_in_alert.node for gpu_in_alert in last.gpus} == {"n2"}
    assert len(last.gpus) == 8
    assert "utilization 55% (its peers utilization 100%), as all of n2" in last.annotations["evidence"]


def test_a_short_lag_is_no_alert_and_one_that_is_over_is_resolved() -> None:
    def slow(until_minute: float) -> MetricsOf:
        return lambda n, i, minute: {"sm_clock_hz": 1.2e9} if (n, i) == (0, 0) and minute < until_minute else {}

    assert not fired(slow(5), range(40))
    alert, end = fired(slow(25), range(60))
    assert (alert.state, end.state, end.resolved_because) == ("firing", "resolved", "condition")
    assert end.starts_at == alert.starts_at
    assert [gpu_in_alert.pod for gpu_in_alert in alert.gpus] == ["ml/bert-0"]


def test_of_two_gpus_that_lag_the_one_that_keeps_up_again_leaves_the_alert() -> None:
    def slow(n: int, i: int, minute: float) -> dict[str, Any]:
        return {"sm_clock_hz": 1.2e9} if (n, i) == (0, 0) or ((n, i) == (1, 7) and minute < 25) else {}

    alerts = fired(slow, range(60))
    gpus = [[(gpu_in_alert.node, gpu_in_alert.index) for gpu_in_alert in alert.gpus] for alert in alerts]
    assert gpus == [[("n0", 0), ("n1", 7)], [("n0", 0)]]


@pytest.mark.parametrize("workload", [Workload("Job", "bert"), None])
def test_a_job_or_pod_that_ends_ends_its_alert(workload: Workload | None) -> None:
    replay = Replay(ON)
    alerts: list[Alert] = []
    for second in range(0, 1800, 20):
        pods = [holder(workload=workload)] if second < 1500 else []
        devices = [device(i, *pods, **WORKS | ({"sm_clock_hz": 1.2e9} if i == 2 else {})) for i in range(8)]
        alerts += replay.judge(tick(second, *devices))
    alert, end = [candidate for candidate in alerts if candidate.name == "GPUStraggler"]
    assert (alert.state, end.state, end.resolved_because) == ("firing", "resolved", "pod_ended")


@pytest.mark.parametrize("reason", ["maintenance", "policy"])
def test_a_lag_is_over_when_its_node_is_in_maintenance_or_its_pods_have_silenced_it(reason: str) -> None:
    replay, alerts = Replay(ON), list[Alert]()
    for second, n in itertools.product(range(0, 1800, 20), range(3)):
        since_then, labels = second >= 1000 and n == 2, dict[str, str]()
        off = {"gpustream.dev/alerts": "off"} if since_then and reason == "policy" else {}
        if since_then and reason == "maintenance":
            labels[MAINTENANCE] = "new disks"
        slow = {"sm_clock_hz": 1.2e9} if n == 2 else {}
        pod = holder(f"bert-{n}", annotations=off)
        devices = [device(i, pod, uuid=gpu(4 * n + i), **WORKS | (slow if i == 0 else {})) for i in range(4)]
        moment = tick(second, *devices, node=f"n{n}")
        alerts += replay.judge(msgspec.structs.replace(moment, node_labels=labels))
    ends = [(alert.state, alert.resolved_because) for alert in alerts if alert.name == "GPUStraggler"]
    assert ends == [("firing", None), ("resolved", reason)]


def test_a_pod_can_say_that_it_is_meant_so() -> None:
    replay = Replay(ON)
    off = holder(annotations={"gpustream.dev/alerts": "off"})
    for second in range(0, 1800, 20):
        devices = [device(i, off, **WORKS | ({"sm_clock_hz": 1.2e9} if i == 2 else {})) for i in range(8)]
        assert not [alert for alert in replay.judge(tick(second, *devices)) if alert.name == "GPUStraggler"]


def test_without_the_rule_its_alert_ends_within_five_minutes_and_another_name_is_another_alert() -> None:
    replay = Replay(ON)
    alerts: list[Alert] = []
    for second in range(0, 3600, 20):
        if second == 1500:
            replay._rules = overlay('[rules.GPUStraggler]\nenabled = false\n[rules.Laggards]\nkind = "straggler"')
        devices = [device(i, holder(), **WORKS | ({"sm_clock_hz": 1.2e9} if i == 2 else {})) for i in range(8)]
        alerts += replay.judge(tick(second, *devices))
    first, end, other = [alert for alert in alerts if alert.name in ("GPUStraggler", "Laggards")]
    assert (first.name, end.resolved_because, other.name) == ("GPUStraggler", "rule_removed", "Laggards")
    assert end.ends_at is not None
    assert end.ends_at < other.starts_at


def test_a_suspect_that_goes_idle_is_reported_as_idle_and_not_compared_any_more() -> None:
    def first_stops(n: int, i: int, minute: float) -> dict[str, Any]:
        lags = {"sm_clock_hz": 1.2e9} if minute < 30 else {"busy": 0.0, "sm_active_ratio": 0.0, "power_watts": 90.0}
        return lags if (n, i) == (0, 0) else {}

    begin, end = fired(first_stops, range(120))
    assert (begin.state, end.state, end.resolved_because) == ("firing", "resolved", "superseded")
    assert 45 * 60_000 <= epoch_ms(end.ends_at or begin.starts_at) - START_MS < 47 * 60_000
