"""What a node may go through, drawn by hypothesis, under rules whose durations are short."""

from typing import NamedTuple

import msgspec
from hypothesis import strategies as st

from streams.alerts.memory import COUNTERS
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.ticks import START_MS, device, holder, overlay
from topics.attributed import AttributedEvent, Attribution

SHORT_RULES = overlay(
    """
    [rules.GPUHeldIdle]
    for = "20s"
    keep_firing_for = "5s"
    grace = "3s"
    [rules.GPUUsedUnallocated]
    for = "8s"
    keep_firing_for = "0s"
    [rules.GPUXid]
    keep_firing_for = "30s"
    [rules.GPUThermalSlowdown]
    for = "100s"
    keep_firing_for = "15s"
    [rules.NodeSilent]
    for = "60s"
    [rules.GPUEccUncorrectable]
    at_least = 3
    keep_firing_for = "10s"
    [rules.GPUUnderused]
    enabled = true
    window = "5m"
    used_below = 0.5
    keep_firing_for = "20s"
    [rules.GPUStraggler]
    enabled = true
    for = "5m"
    keep_firing_for = "0s"
    [rules.GPUStalled]
    enabled = true
    for = "20s"
    power_below = 1.0
    sm_active_below = 1.0
    [rules.GPUNvlinkErrors]
    at_least = 5
    recoveries = 2
    keep_firing_for = "20s"
    """
)

STEPS_S = (1.0, 1.0, 1.0, 2.0, 7.0, 15.0, 30.0, 59.0, 61.0, 150.0, -3.0, 90_000.0)


class Step(NamedTuple):
    """What a tick shows, so long after the one before."""

    after_s: float
    busy: float | None
    pod: str | None
    attribution: Attribution
    xid: bool
    hot: bool
    present: bool
    errors: int


steps = st.builds(
    Step,
    after_s=st.sampled_from(STEPS_S),
    busy=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.9, None]),
    pod=st.sampled_from(["a", "a", "a", "b", None]),
    attribution=st.sampled_from(["exact", "exact", "exact", "late", "none"]),
    xid=st.integers(0, 9).map(lambda i: i == 0),
    hot=st.booleans(),
    present=st.integers(0, 9).map(lambda i: i != 0),
    errors=st.sampled_from([0, 0, 0, 1, 2, 4, -1]),
)
"""``errors``: by how much the counters rise; -1: they begin again at zero."""


@st.composite
def lives(draw: st.DrawFn, nodes: int = 1, least: int = 1) -> list[Tick]:
    """The ticks of some nodes, in the order in which they are logged; a story repeats a step now and then."""
    drawn = draw(st.lists(st.tuples(st.integers(0, nodes - 1), steps, st.integers(1, 8)), min_size=least, max_size=40))
    times_ms = [START_MS] * nodes
    xids, errors = [0] * nodes, [3] * nodes
    ticks: list[Tick] = []
    for node, step, times in drawn:
        for _ in range(times):
            times_ms[node] += round(step.after_s * 1000)
            xids[node] += step.xid
            errors[node] = 0 if step.errors < 0 else errors[node] + step.errors
            ticks.append(_tick(step, node, times_ms[node], xids[node], errors[node], len(ticks)))
    return ticks


def _tick(step: Step, node: int, ts_ms: int, xids: int, errors: int, offset: int) -> Tick:
    devices: list[Device] = []
    if step.present:
        holders = (holder(step.pod),) if step.pod and step.attribution != "none" else ()
        event_fields = {"events": (AttributedEvent("xid", 79, ts_ms),)} if step.xid else {}
        reasons = 0x40 if step.hot else 0
        xid_fields = {"xids": {"79": xids}} if xids else {}
        counters = dict.fromkeys(COUNTERS, errors)
        devices.append(
            device(0, *holders, busy=step.busy, clock_event_reasons=reasons, **event_fields, **xid_fields, **counters)
        )
    devices.append(device(1, busy=0.5 if step.hot else 0.0))
    return Tick(
        schema=1,
        cluster="c",
        node=f"n{node}",
        run_id=1,
        seq=offset,
        ts_ms=ts_ms,
        offset=offset,
        attribution=step.attribution,
        devices=tuple(devices),
    )


def later(tick: Tick, **changes: int) -> Tick:
    """The tick with another time or offset."""
    return msgspec.structs.replace(tick, **changes)
