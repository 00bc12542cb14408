"""Every rule that is shipped, on whatever ticks a node may send: the alerts are those of docs/reference/alerts.md."""

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.node import Replay
from streams.alerts.rules.rule import KINDS
from streams.alerts.tick import Device, Info, Process, Tick
from tests.streams.alerts.oracle import Transition, transitions
from tests.streams.alerts.ticks import START_MS, device, gpu, holder, mig, overlay
from topics.alerts import Alert
from topics.attributed import AttributedEvent, Attribution, Holder, Parts
from topics.samples import Job
from topics.times import epoch_ms

RULES = overlay("""
    [rules.GPUHeldIdle]
    for = "30s"
    grace = "5s"
    keep_firing_for = "4s"
    [rules.GPUStalled]
    enabled = true
    for = "10s"
    keep_firing_for = "3s"
    [rules.GPUUnderused]
    enabled = true
    window = "5m"
    keep_firing_for = "10s"
    [rules.GPUMemoryHoarded]
    enabled = true
    for = "0s"
    window = "10m"
    used_below = 0.3
    keep_firing_for = "0s"
    [rules.GPUStraggler]
    enabled = false
    [rules.GPUCrashLoop]
    enabled = true
    keep_firing_for = "20s"
    [rules.GPUUsedUnallocated]
    for = "10s"
    keep_firing_for = "20s"
    [rules.GPUAttributionConflict]
    for = "10s"
    keep_firing_for = "5s"
    [rules.GPUEccUncorrectable]
    at_least = 3
    keep_firing_for = "30s"
    [rules.GPUNvlinkErrors]
    at_least = 6
    recoveries = 2
    keep_firing_for = "10s"
    [rules.GPUThermalSlowdown]
    for = "20s"
    keep_firing_for = "30s"
    [rules.GPUXid]
    keep_firing_for = "40s"
    [rules.GPUNotAnswering]
    for = "10s"
    keep_firing_for = "5s"
    [rules.GPUMissing]
    for = "15s"
    forget = "300s"
""")
"""The shipped rules, with durations that a story may last."""

POLICIES: tuple[dict[str, str], ...] = (
    {},
    {},
    {},
    {"gpustream.dev/alerts": "off"},
    {"gpustream.dev/alerts": "what"},
    {"gpustream.dev/idle-after": "10s"},
)
ODD_STEPS_S = (0.0, 7.0, 20.0, 59.0, 61.0, 130.0, 700.0, -3.0, -90.0, -4000.0)


class Gpu(NamedTuple):
    """What a device shows in a tick. Counters rise by ``errors``; -1: they begin again at zero."""

    present: bool
    state: str
    busy: float | None
    little: float | None
    memory: int | None
    video: float | None
    holders: tuple[Holder, ...]
    unattributed: float | None
    job: bool
    conflict: str | None
    visible: bool | None
    reasons: int | None
    remap: int | None
    errors: int | None
    xids: str
    counted: bool


class Moment(NamedTuple):
    """Some equal ticks; ``after_s`` is the time to the first of them, ``step_s`` that between them."""

    after_s: float
    step_s: float
    ticks: int
    attribution: Attribution
    restart: bool
    gpus: tuple[Gpu, ...]


def rarely(value: Any, otherwise: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).map(lambda drawn: value if drawn == 9 else otherwise)


ratios = st.sampled_from([0.0, 0.0, 0.0, 0.004, 0.009, 0.3, 0.9, None])
pods = st.builds(
    lambda name, part, policy, observed, named, restarts: holder(
        name,
        busy=part,
        annotations=policy,
        observed=observed,
        pod_uid=f"uid-{name}" if named else None,
        waiting=("CrashLoopBackOff" if restarts else None),
        restarts=restarts,
    ),
    st.sampled_from("ab"),
    ratios,
    st.sampled_from(POLICIES),
    rarely(True, False),
    rarely(False, True),
    st.sampled_from([None, None, None, 2, 3, 7]),
)
gpus = st.builds(
    Gpu,
    present=rarely(False, True),
    state=st.sampled_from(["ok"] * 6 + ["lost", "timeout"]),
    busy=ratios | st.just(1.0),
    little=st.sampled_from([0.0, 0.1, 0.5, None]),
    memory=st.sampled_from([1, 1, 5, None]),
    video=st.sampled_from([None, None, 0.0, 0.4]),
    holders=st.lists(pods, max_size=2, unique_by=lambda pod: pod.pod).map(tuple),
    unattributed=ratios,
    job=rarely(True, False),
    conflict=st.sampled_from([None, None, "no_pod", "unallocated_process"]),
    visible=st.sampled_from([True, True, True, False, None]),
    reasons=st.sampled_from([0, 0, None, 0x40, 0x20, 0x80, 0xC4]),
    remap=st.sampled_from([0, 0, None, 1]),
    errors=st.sampled_from([0, 0, 0, 1, 1, 2, -1, None]),
    xids=st.sampled_from(["", "", "", "", "79", "13"]),
    counted=st.booleans(),
)
moments = st.builds(
    Moment,
    after_s=st.just(1.0) | st.sampled_from(ODD_STEPS_S),
    step_s=st.sampled_from([1.0, 1.0, 4.0, 10.0, 35.0]),
    ticks=st.integers(1, 14),
    attribution=st.sampled_from(["exact", "exact", "exact", "exact", "late", "none"]),
    restart=rarely(True, False),
    gpus=st.tuples(gpus, gpus, gpus),
)


def calm(held: tuple[Holder, ...]) -> st.SearchStrategy[Gpu]:
    """A GPU that the same pods hold for long."""
    return st.builds(
        Gpu,
        present=rarely(False, True),
        state=rarely("timeout", "ok"),
        busy=st.sampled_from([0.0, 0.004, 0.02, 0.06, 0.3, 1.0, 1.0, None]),
        little=st.sampled_from([0.0, 0.0, 0.01, 0.5, None]),
        memory=st.sampled_from([1, 5, 5, 5, None]),
        video=rarely(0.4, 0.0),
        holders=rarely((), held),
        unattributed=st.sampled_from([0.1, 0.1, 0.1, 0.9, None]),
        job=st.just(False),
        conflict=st.none(),
        visible=st.just(True),
        reasons=st.none(),
        remap=st.none(),
        errors=st.none(),
        xids=st.just(""),
        counted=st.just(False),
    )


lives = st.lists(pods, min_size=1, max_size=2, unique_by=lambda pod: pod.pod).flatmap(
    lambda held: st.lists(
        st.builds(
            Moment,
            after_s=st.just(30.0) | st.sampled_from(ODD_STEPS_S),
            step_s=st.sampled_from([15.0, 30.0, 45.0, 58.0]),
            ticks=st.integers(5, 20),
            attribution=st.sampled_from(["exact"] * 7 + ["none"]),
            restart=st.just(False),
            gpus=st.tuples(*(calm((holder,)) for holder in (held[0], held[-1])), calm(tuple(held))),
        ),
        min_size=2,
        max_size=5,
    )
)
"""Stories in which pods keep their GPUs for up to an hour."""


def ticks_of(story: list[Moment]) -> list[Tick]:
    """Two GPUs, of which the second is in MIG mode, and its MIG device."""
    ticks: list[Tick] = []
    at_ms, run_id = START_MS, 1
    counters, xids = [5] * 3, [dict[str, int]() for _ in range(3)]
    for moment in story:
        if moment.restart:
            run_id, xids = run_id + 1, [{} for _ in range(3)]
        for number in range(moment.ticks):
            at_ms += round(1000 * (moment.step_s if number else moment.after_s))
            devices: list[Device] = []
            for index, gpu_now in enumerate(moment.gpus):
                if gpu_now.errors is not None:
                    counters[index] = 0 if gpu_now.errors < 0 else counters[index] + gpu_now.errors
                if gpu_now.xids and not number:
                    xids[index] = {**xids[index], gpu_now.xids: xids[index].get(gpu_now.xids, 0) + 1}
                devices += _device(index, gpu_now, moment, counters[index], xids[index], first=not number)
            ticks.append(
                Tick(
                    schema=1, cluster="c", node="n", run_id=run_id, seq=len(ticks), ts_ms=at_ms, offset=len(ticks),
                    attribution=moment.attribution, devices=tuple(devices),
                )
            )  # fmt: skip
    return ticks


def _device(index: int, gpu_now: Gpu, moment: Moment, count: int, xids: dict[str, int], *, first: bool) -> list[Device]:
    if not gpu_now.present:
        return []
    holders = tuple(pod for pod in gpu_now.holders if moment.attribution != "none" or pod.observed)
    metrics: dict[str, Any] = {}
    if gpu_now.state == "ok":
        activity = (
            {"busy": gpu_now.busy} if index == 0 else {"graphics_engine_active_ratio": gpu_now.busy if index else None}
        )
        metrics = {
            **(activity if index != 1 else {}),
            "encoder_utilization_ratio": gpu_now.video,
            "memory_used_bytes": None if gpu_now.memory is None else gpu_now.memory << 30,
            "memory_total_bytes": 8 << 30 if gpu_now.visible else (1 << 30) * 3 // 2,
            "clock_event_reasons": gpu_now.reasons,
            "row_remap_failure": gpu_now.remap,
            "row_remap_pending": gpu_now.remap,
        }
        if index == 0:
            metrics |= {"sm_active_ratio": gpu_now.little, "tensor_active_ratio": gpu_now.little}
            metrics |= {
                "power_watts": None if gpu_now.unattributed is None else 700 * gpu_now.unattributed,
                "power_limit_watts": 700.0,
            }
        if gpu_now.errors is not None:
            metrics |= {"ecc_uncorrected_volatile_total": count, "ecc_uncorrected_aggregate_total": count // 2}
            metrics |= {f"nvlink_{name}_errors_total": count for name in ("crc", "replay", "recovery")}
    fields: dict[str, Any] = {
        "state": gpu_now.state,
        "conflict": gpu_now.conflict,
        "processes": None if gpu_now.visible is None else (Process(1, "uid-a", 0.0),),
        "info": Info(processes_visible=str(gpu_now.visible).lower(), mig_mode="enabled" if index else None),
        "unattributed": Parts(utilization_ratio=gpu_now.unattributed),
        "jobs": (Job("1"),) if gpu_now.job else None,
        "events": (AttributedEvent("xid", int(gpu_now.xids)),) if gpu_now.xids and first else None,
        "xids": xids if gpu_now.counted else {},
    }
    if index == 2:
        return [mig(1, *holders, parent=1, **metrics, **fields)]
    return [device(index, *holders, **metrics, **fields)]


def transitions_of(ticks: list[Tick]) -> list[Transition]:
    replay = Replay(RULES, grouped=False)
    alerts = [alert for tick in ticks for alert in replay.judge(tick)] + replay.end()
    return [_transition(alert) for alert in alerts]


def _transition(alert: Alert) -> Transition:
    counted = alert.state == "firing" and alert.name in ("GPUEccUncorrectable", "GPUNvlinkErrors")
    time = alert.starts_at if alert.ends_at is None else alert.ends_at
    return Transition(alert.name, alert.fingerprint, alert.state, epoch_ms(time), alert.value if counted else None)


@given(st.lists(moments, min_size=1, max_size=8))
def test_the_alerts_of_every_rule_are_those_that_the_page_promises(story: list[Moment]) -> None:
    ticks = ticks_of(story)
    assert sorted(transitions_of(ticks), key=str) == sorted(transitions(RULES, ticks), key=str)


@given(lives)
def test_what_pods_do_with_gpus_for_long_is_judged_as_the_page_promises(story: list[Moment]) -> None:
    ticks = ticks_of(story)
    assert sorted(transitions_of(ticks), key=str) == sorted(transitions(RULES, ticks), key=str)


def test_the_rules_are_of_every_kind_that_is_about_one_gpu() -> None:
    assert {rule.kind for rule in RULES.rules} == set(KINDS) - {"straggler"}
    assert {gpu(0), gpu(1)} == {sample.uuid for sample in (device(0), device(1))}
