"""What pods did with their devices, as running sums in steps of five minutes of the ticks' own time. Pure.

In: a device of a tick, the pods that hold it, and its sums before. Out: its sums now.

- A reading is of the time since the reading before it. If that is more than a minute, or the node's clock was set back,
  the time is a gap: it is not measured, and is no zero.
- A reading counts for the step of its tick.
- The figures by which ranks are compared are of the first tick in each five seconds.
- A pod's sums begin with the first tick in which it holds the device, and end with the first in which it does not.
  A pod that only its processes show does not hold it.
- If the clock is set back by more than a step, they begin again.

Of a pod on a device the sums take 8 bytes a step, whatever the interval of the ticks is.
"""

import struct
from typing import NamedTuple

import msgspec

from streams.alerts.tick import Device, Metrics, Tick
from topics.attributed import PodRef
from topics.idleness import IDLE_BELOW, part_of

STEP_MS = 300_000
GAP_MS = 60_000
_FIGURES_MS = 5_000  # figures are of one tick in so long
_UNITS_PER_MS = 10  # work is counted in tenths of a millisecond: a day of them is less than 32 bits
_MARK = struct.Struct("<II")
_MASK = 0xFFFFFFFF
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # of clock_event_reasons: the hardware's slowdown, temperature, power brake

FIGURES = ("utilization", "sm_active", "tensor_active", "sm_clock_hz", "power_watts", "throttled", "violation")
"""What ranks are compared by: means of a step. ``throttled`` is the share of time with a reason for low clocks that is
no limit of power, ``violation`` that in which the driver counted violations of power or temperature."""

Figures = tuple[float | None, ...]  # one for each of these; None: it is not known of all the time

_NOTHING: Figures = (0.0,) * (len(FIGURES) + 1)


class UseNeeds(NamedTuple):
    """What the rules need: how many steps, whether the figures by which the ranks of a workload are compared, and which
    windows they judge: how many steps each has, and less than which use is hardly any."""

    steps: int
    figures: bool
    windows: tuple[tuple[int, float], ...] = ()


class Use(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a pod did with a device until ``at_ms``, its last reading.

    ``ms`` were measured in all, and ``work`` is what it did in them. ``marks``: both as they were at the beginning of
    each of the last steps, the last of which is ``step``. ``worked_ms``: the last tick in which it worked. ``sums``: of
    each figure and, last, of how many ticks, since the step began; of ``violation`` the seconds. ``violation_s``: what
    the counters of violations were then. ``low``: whether it was hardly used in some window that has just ended.
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
    low: bool = False


Uses = tuple[Use, ...]  # of a device, one for each of its pods


def uses_of(device: Device, pods: tuple[PodRef, ...], before: Uses, tick: Tick, needs: UseNeeds) -> Uses:
    """The sums of a device after a tick; the same object if the tick says nothing of it."""
    if tick.attribution == "none" or device.state != "ok":
        return before
    if len(pods) == 1:
        if device.holders and device.holders[0].observed:
            return ()
        metrics, name = device.metrics, pod_name(pods[0])
        known = (
            before[0] if before and before[0].pod == name else next((one for one in before if one.pod == name), None)
        )
        use = _read(known, name, activity(metrics), metrics if needs.figures else None, tick.ts_ms, needs)
        return () if use is None else before if use is known and len(before) == 1 else (use,)
    known_by, found = {use.pod: use for use in before}, list[Use]()
    for some in device.pods:
        if not some[0].observed:
            name, share = pod_name(some[0]), part_of([one.parts for one in some])
            use = _read(known_by.get(name), name, share, None, tick.ts_ms, needs)
            if use is not None:
                found.append(use)
    return tuple(found)


def pod_name(pod: PodRef) -> str:
    """By what a pod is known here: its uid or, if that is not known, its name."""
    return pod.pod_uid or f"{pod.namespace}/{pod.pod}"


def activity(metrics: Metrics) -> float | None:
    """How much a device works, by its means: a peak within a tick says nothing of the tick. None: it is not known."""
    used, engine, sms = metrics.gpu_utilization_ratio, metrics.graphics_engine_active_ratio, metrics.sm_active_ratio
    if used is None and engine is None and sms is None:
        return None
    most = used or 0.0
    for other in (engine, sms, metrics.encoder_utilization_ratio, metrics.decoder_utilization_ratio):
        if other is not None and other > most:
            most = other
    return most


def _read(
    before: Use | None, pod: str, share: float | None, metrics: Metrics | None, now_ms: int, needs: UseNeeds
) -> Use | None:
    """The sums of a pod after a reading, if there is one. The first is of no time."""
    if share is None:
        return before
    step = now_ms // STEP_MS
    if before is None or step < before.step - 1:
        worked_ms = now_ms if share >= IDLE_BELOW else 0
        return Use(pod, now_ms, step, 0, 0, worked_ms, _MARK.pack(0, 0), (), _violations_s(metrics))
    passed_ms = now_ms - before.at_ms
    if not 0 < passed_ms <= GAP_MS:
        passed_ms = 0
    marks, sums, low, violation_s = before.marks, before.sums, before.low, before.violation_s
    if step > before.step:
        mark = _MARK.pack(before.ms & _MASK, before.work & _MASK)
        marks = (marks + mark * min(step - before.step, needs.steps + 1))[-_MARK.size * (needs.steps + 1) :]
        means = [(_mean(marks, steps), below) for steps, below in needs.windows]
        sums, low = (), any(mean is not None and mean < below for mean, below in means)
    if metrics is not None and now_ms // _FIGURES_MS != before.at_ms // _FIGURES_MS:
        violation_s = _violations_s(metrics)
        sums = _added(sums, metrics, violation_s - before.violation_s)
    return Use(
        pod,
        now_ms,
        max(before.step, step),
        before.ms + passed_ms,
        before.work + int(share * passed_ms * _UNITS_PER_MS + 0.5),
        now_ms if share >= IDLE_BELOW else before.worked_ms,
        marks,
        sums,
        violation_s,
        low,
    )


def _violations_s(metrics: Metrics | None) -> float:
    if metrics is None:
        return 0.0
    return (metrics.power_violation_seconds_total or 0.0) + (metrics.thermal_violation_seconds_total or 0.0)


def _added(sums: Figures, metrics: Metrics, violation_s: float) -> Figures:
    """The sums with the figures of a tick, and one tick more."""
    used, sms, tensors, clock, power, slowed, violated, ticks = sums or _NOTHING
    used_now, sms_now, tensors_now = metrics.gpu_utilization_ratio, metrics.sm_active_ratio, metrics.tensor_active_ratio
    clock_now, power_now, reasons = metrics.sm_clock_hz, metrics.power_watts, metrics.clock_event_reasons
    is_counted = metrics.power_violation_seconds_total is not None
    return (
        None if used is None or used_now is None else used + used_now,
        None if sms is None or sms_now is None else sms + sms_now,
        None if tensors is None or tensors_now is None else tensors + tensors_now,
        None if clock is None or clock_now is None else clock + clock_now,
        None if power is None or power_now is None else power + power_now,
        None if slowed is None or reasons is None else slowed + bool(int(reasons) & _SLOWED),
        None if violated is None or not is_counted else violated + max(violation_s, 0.0),
        (ticks or 0.0) + 1,
    )


# -- what they say


def mean_of(use: Use, steps: int) -> float | None:
    """How much the pod did in the last whole steps; None if it has not so many, or less than half was measured."""
    return _mean(use.marks, steps)


def _mean(marks: bytes, steps: int) -> float | None:
    began_at = len(marks) - _MARK.size * (steps + 1)
    if began_at < 0:
        return None
    began_ms, began = _MARK.unpack_from(marks, began_at)
    ended_ms, ended = _MARK.unpack_from(marks, len(marks) - _MARK.size)
    measured_ms: int = (ended_ms - began_ms) & _MASK
    work: int = (ended - began) & _MASK
    if measured_ms * 2 < steps * STEP_MS:
        return None
    return work / _UNITS_PER_MS / measured_ms


def means_of_closed_step(before: Uses, after: Uses) -> Figures | None:
    """The means of the figures in the step that a tick has ended, if one pod held the device in half of it or more."""
    if len(before) != 1 or len(after) != 1 or after[0].step != before[0].step + 1 or after[0].pod != before[0].pod:
        return None
    measured_ms = (before[0].ms - _MARK.unpack_from(before[0].marks, len(before[0].marks) - _MARK.size)[0]) & _MASK
    if not before[0].sums or measured_ms * 2 < STEP_MS:
        return None
    *sums, violated_s, ticks = before[0].sums
    means = [None if one is None else one / (ticks or 1.0) for one in sums]
    return (*means, None if violated_s is None else min(violated_s * 1000 / measured_ms, 1.0))
