"""Recorded ticks through the real rules and the state machine: what fires is true, and all that is true fires."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.node import Replay
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.stories import later
from tests.streams.alerts.ticks import DEFAULTS, device, holder, overlay, tick
from topics.alerts import Alert
from topics.times import epoch_ms

FOR_S, GRACE_S = 30, 10
RULES = overlay(f'[rules.GPUHeldIdle]\nfor = "{FOR_S}s"\ngrace = "{GRACE_S}s"')

moments = st.tuples(
    st.sampled_from(["a", "b", ""]),
    st.sampled_from([0.0, 0.0, 0.0, 0.9, None]),
    st.sampled_from(["ok", "ok", "ok", "ok", "lost", "timeout"]),
    st.integers(1, 25),
)
"""Who holds the GPU, how busy it is, whether it answers, and for how many seconds."""


def spread(story: Sequence[tuple[str, float | None, str, int]]) -> list[Tick]:
    """A tick a second."""
    devices = [sample for moment in story for sample in [_device(*moment[:3])] * moment[3]]
    return [tick(second, sample) for second, sample in enumerate(devices)]


def _device(pod: str, busy: float | None, state: str) -> Device:
    return device(0, *([holder(pod)] if pod else []), busy=busy if state == "ok" else None, state=state)


def transitions(ticks: Sequence[Tick]) -> list[Alert]:
    replay = Replay(RULES, grouped=False)
    return [alert for tick in ticks for alert in replay.judge(tick) if alert.name == "GPUHeldIdle"]


@given(st.lists(moments, max_size=30))
def test_no_gpu_is_reported_as_idle_that_worked_or_was_not_held_within_the_duration(
    story: list[tuple[str, float | None, str, int]],
) -> None:
    ticks = spread(story)
    for alert in transitions(ticks):
        if alert.state == "firing":
            fired_ms = epoch_ms(alert.starts_at)
            last = [moment.devices[0] for moment in ticks if fired_ms - FOR_S * 1000 <= moment.ts_ms <= fired_ms]
            assert len(last) == FOR_S + 1
            assert all(sample.metrics.gpu_utilization_ratio in (None, 0.0) for sample in last)
            assert last[-1].metrics.gpu_utilization_ratio == 0.0
            assert {h.pod for sample in last for h in sample.holders} == {alert.labels["k8s_pod_name"]}
            assert all(sample.holders for sample in last)


@given(st.lists(moments, max_size=30))
def test_every_firing_is_followed_by_at_most_one_resolved(story: list[tuple[str, float | None, str, int]]) -> None:
    states: dict[str, str] = {}
    for alert in transitions(spread(story)):
        assert states.get(alert.fingerprint, "resolved") != alert.state
        states[alert.fingerprint] = alert.state


@given(st.lists(moments, max_size=20), st.integers(0, 20))
def test_a_gpu_that_was_held_idle_for_long_enough_is_reported_whatever_was_before(
    story: list[tuple[str, float | None, str, int]], extra_s: int
) -> None:
    idle = ("new", 0.0, "ok", GRACE_S + FOR_S + 1 + extra_s)
    ticks = spread([*story, idle])
    (alert,) = [alert for alert in transitions(ticks) if alert.labels["k8s_pod_name"] == "new"]
    assert epoch_ms(alert.starts_at) == ticks[-1 - extra_s].ts_ms
    assert alert.value == FOR_S


def test_what_is_wrong_with_a_gpu_fires_once_and_is_resolved_once() -> None:
    faults = ("row_remap_failure", "row_remap_pending", "ecc_uncorrected_volatile_total")
    bad = device(0, busy=0.9, clock_event_reasons=0xE0, **dict.fromkeys(faults, 1))
    well = device(0, busy=0.0, clock_event_reasons=0, **dict.fromkeys(faults, 0))
    replay = Replay(DEFAULTS)
    ticks = [tick(0, well), *[tick(i, bad) for i in range(1, 200)]]
    ticks += [tick(i, device(0, busy=0.0)) for i in range(200, 210)]
    over = msgspec.structs.replace(well.metrics, ecc_uncorrected_volatile_total=1.0)
    ticks += [tick(i, msgspec.structs.replace(well, metrics=over)) for i in range(210, 4300)]
    transitions = [alert for tick in ticks for alert in replay.judge(tick)]
    names = [
        "GPUEccUncorrectable",
        "GPUPowerBrake",
        "GPURowRemapFailure",
        "GPURowRemapPending",
        "GPUThermalSlowdown",
        "GPUUsedUnallocated",
    ]
    for state in ("firing", "resolved"):
        assert sorted(alert.name for alert in transitions if alert.state == state) == names


def test_ticks_of_a_run_before_the_clock_was_set_back_that_are_read_again_are_repeats() -> None:
    before = [tick(second, device(0)) for second in range(100, 110)]
    after = [later(tick(second, device(0), run_id=2), offset=200 + second) for second in range(10)]
    replay = Replay(DEFAULTS)
    for moment in (*before, *after, *before, *after):
        replay.judge(moment)
    assert (replay.ticks, replay.repeats) == (20, 20)


def silent(*ticks: Tick, logged_s: Sequence[float] | None = None) -> list[tuple[str, str]]:
    """The alerts about silent nodes."""
    replay, alerts = Replay(DEFAULTS), list[Alert]()
    for number, moment in enumerate(ticks):
        numbered = msgspec.structs.replace(moment, offset=number, seq=number + 1)
        alerts += replay.judge(numbered, None if logged_s is None else tick(logged_s[number]).ts_ms)
    return [(alert.node, alert.state) for alert in [*alerts, *replay.end()] if alert.name == "NodeSilent"]


def each_second(node: str, *times: range) -> list[Tick]:
    return [tick(second, device(0), node=node) for time in times for second in time]


def test_a_clock_that_is_set_back_is_no_silence() -> None:
    assert silent(*each_second("n", range(3600, 3610), range(600))) == []
    assert silent(*each_second("n", range(3600, 3610), range(10)), *each_second("m", range(3600, 3620))) == []
    assert silent(*each_second("m", range(20)), *each_second("n", range(3600, 3610), range(20))) == []


def test_a_node_that_ended_before_the_others_is_silent_and_one_that_paused_was() -> None:
    assert silent(*each_second("n", range(10)), *each_second("m", range(300))) == [("n", "firing")]
    assert silent(*each_second("n", range(10), range(200, 210))) == [("n", "firing"), ("n", "resolved")]


def test_a_clock_that_is_set_and_a_log_that_stood_still_are_no_silence() -> None:
    own_node = [tick(second, device(0)) for second in [0, 1, 3600, 3601, 2, 3, 4]]
    assert silent(*own_node, logged_s=range(7)) == []
    assert silent(*each_second("n", range(4)), logged_s=[0, 1, 600, 601]) == []
    ahead = tick(3600, device(0), node="m")
    assert silent(*each_second("n", range(4)), ahead, logged_s=range(5)) == []
    assert silent(*each_second("n", range(2)), tick(300, device(0)), logged_s=[0, 1, 300]) == [
        ("n", "firing"),
        ("n", "resolved"),
    ]
