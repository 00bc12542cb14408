"""Alerts of several GPUs, whatever the nodes of some workloads send: they are those of docs/reference/alerts.md."""

from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.node import Replay
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device, Tick
from tests.streams.alerts import group_oracle
from tests.streams.alerts.group_oracle import Transition, as_written
from tests.streams.alerts.oracle import OF_PODS
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, gpu, holder, overlay
from topics.attributed import Attribution, Holder, Workload

SOON_RULES = overlay("""
    [rules.GPUHeldIdle]
    for = "40s"
    grace = "10s"
    keep_firing_for = "15s"
    critical_after = "200s"
    [rules.GPUStalled]
    for = "30s"
    keep_firing_for = "15s"
    [rules.GPUCrashLoop]
    keep_firing_for = "20s"
    [rules.GPULost]
    keep_firing_for = "10s"
    [rules.GPUNotAnswering]
    for = "10s"
    keep_firing_for = "5s"
    [rules.GPUMissing]
    for = "25s"
    keep_firing_for = "0s"
""")
"""The shipped rules, with durations that a story may last."""

NODES = ("n0", "n1", "n2")
METRICS_OF: dict[str, dict[str, float]] = {
    "works": {"busy": 0.9, "power_watts": 600.0, "sm_active_ratio": 0.7},
    "idles": {"busy": 0.0, "power_watts": 70.0, "sm_active_ratio": 0.0},
    "stalls": {"busy": 1.0, "power_watts": 140.0, "sm_active_ratio": 0.1},
    "says nothing": {},
}


class Gpu(NamedTuple):
    """A GPU for some ticks: its behavior, and which of the node's pods hold it."""

    behavior: str
    state: str
    present: bool
    pods: tuple[int, ...]


class Moment(NamedTuple):
    """Some equal ticks of a node; ``crashes``: its first pod's container crashes."""

    node: int
    ticks: int
    step_s: float
    attribution: Attribution
    crashes: bool
    gpus: tuple[Gpu, ...]


def gpus(*pods: tuple[int, ...]) -> st.SearchStrategy[Gpu]:
    return st.builds(
        Gpu,
        behavior=st.sampled_from(["works", "idles", "idles", "stalls", "stalls", "stalls", "says nothing"]),
        state=st.sampled_from(["ok"] * 7 + ["lost", "timeout"]),
        present=st.integers(0, 7).map(bool),
        pods=st.sampled_from(pods),
    )


of_any = gpus((0,), (0,), (0,), (0,), (0,), (1,), (), (0, 1), (0, 3))
moments = st.builds(
    Moment,
    node=st.integers(0, 2),
    ticks=st.integers(1, 9),
    step_s=st.sampled_from([5.0, 10.0, 10.0, 35.0, 61.0, -3.0]),
    attribution=st.sampled_from(["exact"] * 6 + ["late", "none"]),
    crashes=st.integers(0, 5).map(lambda drawn: drawn == 0),
    gpus=st.tuples(of_any, of_any, gpus((0,), (0,), (2,))),
)
stories = st.lists(moments, min_size=2, max_size=14)


def pod_of(node: int, number: int, *, crashes: bool = False) -> Holder:
    """A pod of a node: 0 and 3 are of a job that is on all nodes, 2 is of no workload."""
    workload = (Workload("Job", "bert"), Workload("StatefulSet", "t5"), None, Workload("Job", "bert"))[number]
    state: dict[str, Any] = {"waiting": "CrashLoopBackOff", "restarts": 5} if crashes and not number else {}
    return holder(f"pod-{number}-{node}", workload=workload, **state)


def ticks_of(story: list[Moment]) -> list[Tick]:
    """The nodes' ticks, each with a clock of its own, in the order of their log."""
    ticks, now_ms = list[Tick](), [START_MS, START_MS + 2_000, START_MS - 4_000]
    for moment in story:
        for _ in range(moment.ticks):
            now_ms[moment.node] += round(1000 * moment.step_s)
            devices: list[Device] = []
            for index, gpu_now in enumerate(moment.gpus):
                held_pods = gpu_now.pods if moment.attribution != "none" else ()
                pods = [pod_of(moment.node, number, crashes=moment.crashes) for number in held_pods]
                metrics = METRICS_OF[gpu_now.behavior] | {"power_limit_watts": 700.0} if gpu_now.state == "ok" else {}
                if gpu_now.present:
                    uuid = gpu(8 * moment.node + index)
                    devices.append(device(index, *pods, uuid=uuid, state=gpu_now.state, **metrics))
            ticks.append(
                Tick(
                    schema=1, cluster="c", node=NODES[moment.node], run_id=1, seq=len(ticks), offset=len(ticks),
                    ts_ms=now_ms[moment.node], attribution=moment.attribution, devices=tuple(devices),
                )
            )  # fmt: skip
    return ticks


def transitions_of(rules: Rules, log: list[Tick], kinds: tuple[str, ...]) -> list[Transition]:
    """The records that the stream writes, except those about single GPUs."""
    replay = Replay(rules)
    return [
        as_written(number, alert)
        for number, tick in enumerate(log)
        for alert in replay.judge(tick)
        if rules.by_name[alert.name].kind in kinds
    ]


@given(stories)
def test_alerts_of_workloads_and_nodes_are_those_that_the_page_promises(story: list[Moment]) -> None:
    log = ticks_of(story)
    transitions = transitions_of(SOON_RULES, log, (*OF_PODS, *group_oracle.AT_ONE_TIME))
    assert sorted(transitions, key=str) == sorted(group_oracle.alerts(SOON_RULES, log), key=str)


# -- stragglers

PEERS = msgspec.structs.replace(DEFAULTS, rules=DEFAULTS.of("straggler"))
FIGURES: dict[str, float] = {
    "busy": 0.98, "sm_active_ratio": 0.7, "tensor_active_ratio": 0.35, "sm_clock_hz": 1.98e9, "power_watts": 600.0,
    "clock_event_reasons": 0.0,
}  # fmt: skip
UNLIKE: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {}, {"sm_clock_hz": 1.6e9}, {"sm_clock_hz": 1.8e9}, {"clock_event_reasons": 0x20},
    {"clock_event_reasons": 0x4}, {"violates": 0.3}, {"busy": 0.7}, {"busy": 0.1}, {"sm_active_ratio": 0.9},
    {"tensor_active_ratio": 0.5}, {"power_watts": 400.0}, {"sm_clock_hz": None}, {"state": "timeout"},
)  # fmt: skip


class Stretch(NamedTuple):
    """Some minutes of a node: the metrics in which each of its GPUs differs, and how many GPUs the job holds."""

    node: int
    minutes: int
    held_gpus: int
    repeats: bool
    attribution: Attribution
    unlike: tuple[dict[str, Any], ...]


stretches = st.builds(
    Stretch,
    node=st.integers(0, 2),
    minutes=st.sampled_from([3, 5, 11, 16, 26]),
    held_gpus=st.sampled_from([3, 3, 3, 3, 3, 2, 0]),
    repeats=st.booleans(),
    attribution=st.sampled_from(["exact"] * 8 + ["none"]),
    unlike=st.tuples(*[st.sampled_from(UNLIKE)] * 3),
)
runs = st.tuples(
    st.sampled_from(["Job", "Job", "Deployment"]),
    st.sampled_from([30, 20, 55]),
    st.tuples(*[st.integers(0, 59)] * 3),
    st.lists(stretches, min_size=3, max_size=9),
)
"""The workload's kind, the seconds from a tick to the next, by how many the nodes' ticks are apart, and what each
node does in turn. The last of that lasts until the others end, too."""


def ticks_of_a_run(kind: str, step_s: int, apart_s: tuple[int, ...], story: list[Stretch]) -> list[Tick]:
    ticks, violated_s = list[Tick](), dict[str, float]()
    last_s = max(60 * sum(stretch.minutes for stretch in story if stretch.node == node) for node in range(3))
    for node in range(3):
        own = [stretch for stretch in story if stretch.node == node] or [Stretch(node, 1, 3, False, "exact", ({},) * 3)]
        own[-1] = own[-1]._replace(minutes=last_s // 60)
        begins_s, pod = apart_s[node], 0
        for stretch in own:
            pod += stretch.repeats
            pod_holder = holder(f"bert-{node}-{pod}", workload=Workload(kind, "bert"))
            ends_s = min(begins_s + 60 * stretch.minutes, last_s)
            for now_s in range(begins_s, ends_s, step_s):
                devices: list[Device] = []
                for index, unlike in enumerate(stretch.unlike):
                    uuid = gpu(8 * node + index)
                    violated_s[uuid] = violated_s.get(uuid, 0.0) + unlike.get("violates", 0.0) * step_s
                    metrics = {**FIGURES, "power_violation_seconds_total": violated_s[uuid], **unlike}
                    pods = [pod_holder] if index < stretch.held_gpus and stretch.attribution != "none" else []
                    state = metrics.pop("state", "ok")
                    metrics.pop("violates", None)
                    devices.append(device(index, *pods, uuid=uuid, state=state, **(metrics if state == "ok" else {})))
                ts_ms = START_MS + 1000 * now_s
                ticks.append(
                    Tick(
                        schema=1, cluster="c", node=NODES[node], run_id=1, seq=now_s, offset=now_s, ts_ms=ts_ms,
                        attribution=stretch.attribution, devices=tuple(devices),
                    )
                )  # fmt: skip
            begins_s += -(-max(ends_s - begins_s, 0) // step_s) * step_s
    return sorted(ticks, key=lambda tick: tick.ts_ms)


@given(runs)
def test_gpus_that_lag_behind_their_peers_are_those_that_the_page_promises(
    run: tuple[str, int, tuple[int, ...], list[Stretch]],
) -> None:
    log = ticks_of_a_run(*run)
    assert sorted(transitions_of(PEERS, log, ("straggler",)), key=str) == sorted(
        group_oracle.alerts(PEERS, log), key=str
    )
