"""Alerts of several GPUs, whatever the nodes of some workloads send: they are those of docs/reference/alerts.md."""

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.node import Replay
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Device, Tick
from tests.streams.alerts import group_oracle
from tests.streams.alerts.group_oracle import Written, as_written
from tests.streams.alerts.oracle import OF_PODS
from tests.streams.alerts.ticks import START_MS, device, gpu, holder, overlay
from topics.attributed import Attribution, Holder, Workload

SOON = overlay("""
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
DOES: dict[str, dict[str, float]] = {
    "works": {"busy": 0.9, "power_watts": 600.0, "sm_active_ratio": 0.7},
    "idles": {"busy": 0.0, "power_watts": 70.0, "sm_active_ratio": 0.0},
    "stalls": {"busy": 1.0, "power_watts": 140.0, "sm_active_ratio": 0.1},
    "says nothing": {},
}


class Gpu(NamedTuple):
    """What a GPU does for a while. ``pods``: which of the node's pods hold it."""

    does: str
    state: str
    present: bool
    pods: tuple[int, ...]


class Moment(NamedTuple):
    """Some ticks of a node that are alike; ``crashes``: its first pod's container does."""

    node: int
    ticks: int
    step_s: float
    attribution: Attribution
    crashes: bool
    gpus: tuple[Gpu, ...]


def gpus(*pods: tuple[int, ...]) -> st.SearchStrategy[Gpu]:
    return st.builds(
        Gpu,
        does=st.sampled_from(["works", "idles", "idles", "stalls", "stalls", "stalls", "says nothing"]),
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
    found, now_ms = list[Tick](), [START_MS, START_MS + 2_000, START_MS - 4_000]
    for moment in story:
        for _ in range(moment.ticks):
            now_ms[moment.node] += round(1000 * moment.step_s)
            shown: list[Device] = []
            for place, one in enumerate(moment.gpus):
                held = one.pods if moment.attribution != "none" else ()
                pods = [pod_of(moment.node, number, crashes=moment.crashes) for number in held]
                metrics = DOES[one.does] | {"power_limit_watts": 700.0} if one.state == "ok" else {}
                if one.present:
                    uuid = gpu(8 * moment.node + place)
                    shown.append(device(place, *pods, uuid=uuid, state=one.state, **metrics))
            found.append(
                Tick(
                    schema=1, cluster="c", node=NODES[moment.node], run_id=1, seq=len(found), offset=len(found),
                    ts_ms=now_ms[moment.node], attribution=moment.attribution, devices=tuple(shown),
                )
            )  # fmt: skip
    return found


def written(rules: Rules, log: list[Tick], kinds: tuple[str, ...]) -> list[Written]:
    """What the stream writes, but for what is about single GPUs only."""
    replay = Replay(rules)
    return [
        as_written(number, alert)
        for number, tick in enumerate(log)
        for alert in replay.take(tick)
        if rules.by_name[alert.name].kind in kinds
    ]


@given(stories)
def test_alerts_of_workloads_and_nodes_are_those_that_the_page_promises(story: list[Moment]) -> None:
    log = ticks_of(story)
    found = written(SOON, log, (*OF_PODS, *group_oracle.AT_ONE_TIME))
    assert sorted(found, key=str) == sorted(group_oracle.alerts(SOON, log), key=str)
