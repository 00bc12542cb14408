"""What pods did with their devices, as running sums in steps of five minutes of the ticks' own time. Pure.

In: a device of a tick, the pods that hold it, and its sums before. Out: its sums now.

- A reading is of the time since the reading before it. If that is more than a minute, or the node's clock was set back,
  the time is a gap: it is not measured, and is no zero.
- A reading counts for the step of its tick.
- A pod's sums begin with the first tick in which it holds the device, and end with the first in which it does not.
- If the clock is set back by more than a step, they begin again.

Of a pod on a device the sums take 8 bytes a step, whatever the interval of the ticks is.
"""

import struct
from typing import NamedTuple

import msgspec

from streams.alerts.tick import Device, Metrics, Tick
from topics.attributed import OfPod, by_pod
from topics.idleness import IDLE_BELOW, part_of

STEP_MS = 300_000
GAP_MS = 60_000
_UNITS_PER_MS = 10  # work is counted in tenths of a millisecond: a day of them is less than 32 bits
_MARK = struct.Struct("<II")
_MASK = 0xFFFFFFFF
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # of clock_event_reasons: the hardware's slowdown, temperature, power brake

FIGURES = ("utilization", "sm_active", "tensor_active", "sm_clock_hz", "power_watts", "throttled", "violation")
"""What ranks are compared by: means of a step. ``throttled`` is the share of time with a reason for low clocks that is
no limit of power, ``violation`` that in which the driver counted violations of power or temperature."""

Figures = tuple[float | None, ...]  # one for each of these; None: it is not known of all the time

_NOTHING: Figures = (0.0,) * (len(FIGURES) + 1)


class Wanted(NamedTuple):
    """What the rules need: how many steps, and whether the figures, by which the ranks of a workload are compared."""

    steps: int
    figures: bool


class Use(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a pod did with a device until ``at_ms``, its last reading.

    ``ms`` were measured in all, and ``work`` is what it did in them. ``marks``: both as they were at the beginning of
    each of the last steps, the last of which is ``step``. ``worked_ms``: the last tick in which it worked. ``sums``:
    each figure times its milliseconds and, last, these milliseconds, since the step began. ``violation_s``: what the
    counters of violations were last.
    """

    pod: str
    at_ms: int
    step: int
    ms: int
    work: int
    worked_ms: int
    marks: bytes
    sums: Figures = ()
    violation_s: float = 0.0


Uses = tuple[Use, ...]  # of a device, one for each of its pods


def uses_of(device: Device, pods: tuple[OfPod, ...], before: Uses, tick: Tick, wanted: Wanted) -> Uses:
    """The sums of a device after a tick; the same object if the tick says nothing of it."""
    if tick.attribution == "none" or device.state != "ok":
        return before
    known = {use.pod: use for use in before}
    if len(pods) == 1:
        shares = {pod_name(pods[0]): activity(device.metrics)}
    else:
        held = by_pod(device.holders).items()
        shares = {pod_name(pod): part_of([one.parts for one in holders]) for pod, holders in held}
    metrics = device.metrics if wanted.figures and len(pods) == 1 else None
    found = [_read(known.get(pod), pod, share, metrics, tick.ts_ms, wanted) for pod, share in shares.items()]
    now = tuple([use for use in found if use is not None])
    return before if now == before else now


def pod_name(pod: OfPod) -> str:
    """By what a pod is known here: its uid or, if that is not known, its name."""
    return pod.pod_uid or f"{pod.namespace}/{pod.pod}"


def activity(metrics: Metrics) -> float | None:
    """How much a device works, by its means: a peak within a tick says nothing of the tick. None: it is not known."""
    main = [
        ratio
        for ratio in (metrics.gpu_utilization_ratio, metrics.graphics_engine_active_ratio, metrics.sm_active_ratio)
        if ratio is not None
    ]
    if not main:
        return None
    return max(*main, metrics.encoder_utilization_ratio or 0.0, metrics.decoder_utilization_ratio or 0.0)


def _read(
    before: Use | None, pod: str, share: float | None, metrics: Metrics | None, now_ms: int, wanted: Wanted
) -> Use | None:
    """The sums of a pod after a reading, if there is one. The first is of no time."""
    if share is None:
        return before
    step, violation_s = now_ms // STEP_MS, 0.0
    if metrics is not None:
        violation_s = (metrics.power_violation_seconds_total or 0.0) + (metrics.thermal_violation_seconds_total or 0.0)
    if before is None or step < before.step - 1:
        worked_ms = now_ms if share >= IDLE_BELOW else 0
        return Use(pod, now_ms, step, 0, 0, worked_ms, _MARK.pack(0, 0), (), violation_s)
    passed_ms = now_ms - before.at_ms
    if not 0 < passed_ms <= GAP_MS:
        passed_ms = 0
    marks, sums = before.marks, before.sums
    if step > before.step:
        mark = _MARK.pack(before.ms & _MASK, before.work & _MASK)
        marks = (marks + mark * min(step - before.step, wanted.steps + 1))[-_MARK.size * (wanted.steps + 1) :]
        sums = ()
    if metrics is not None and passed_ms:
        sums = _added(sums, metrics, max(violation_s - before.violation_s, 0.0) * 1000, passed_ms)
    return Use(
        pod,
        now_ms,
        max(step, before.step),
        before.ms + passed_ms,
        before.work + round(share * passed_ms * _UNITS_PER_MS),
        now_ms if share >= IDLE_BELOW else before.worked_ms,
        marks,
        sums,
        violation_s,
    )


def _added(sums: Figures, metrics: Metrics, violation_ms: float, ms: int) -> Figures:
    """The sums with the figures of a tick, which are of so many milliseconds."""
    reasons = metrics.clock_event_reasons
    figures = (
        metrics.gpu_utilization_ratio,
        metrics.sm_active_ratio,
        metrics.tensor_active_ratio,
        metrics.sm_clock_hz,
        metrics.power_watts,
        None if reasons is None else 1.0 if int(reasons) & _SLOWED else 0.0,
        None if metrics.power_violation_seconds_total is None else violation_ms / ms,
    )
    before = sums or _NOTHING
    added = [
        None if one is None or total is None else total + one * ms
        for total, one in zip(before, figures, strict=False)
    ]  # fmt: skip
    return (*added, (before[-1] or 0.0) + ms)


# -- what they say


def mean_of(use: Use, steps: int) -> float | None:
    """How much the pod did in the last whole steps; None if it has not so many, or less than half was measured."""
    count = len(use.marks) // _MARK.size
    if count <= steps:
        return None
    began_ms, began = _MARK.unpack_from(use.marks, (count - 1 - steps) * _MARK.size)
    ended_ms, ended = _MARK.unpack_from(use.marks, (count - 1) * _MARK.size)
    measured_ms: int = (ended_ms - began_ms) & _MASK
    work: int = (ended - began) & _MASK
    if measured_ms * 2 < steps * STEP_MS:
        return None
    return work / _UNITS_PER_MS / measured_ms


def closed(before: Uses, after: Uses) -> Figures | None:
    """The means of the figures in the step that a tick has ended, if one pod held the device in half of it or more."""
    if len(before) != 1 or len(after) != 1 or after[0].step != before[0].step + 1 or after[0].pod != before[0].pod:
        return None
    *sums, ms = before[0].sums or (0.0,)
    if ms is None or ms * 2 < STEP_MS:
        return None
    return tuple([None if one is None else one / ms for one in sums])
