"""How much pods use their devices: running sums in steps of five minutes of the ticks' own time. Pure.

In: a device of a tick, the pods that hold it, and its sums before. Out: its sums now.

- A reading is of the time since the reading before it. If that is more than a minute and than three of the node's
  intervals, or the node's clock was set back, the time is a gap: it does not count as measured, nor as idle.
- A reading counts for the step of its tick.
- The figures by which ranks are compared are of the first tick in each five seconds.
- A pod's sums begin with the first tick in which it holds the device, and end with the first in which it does not.
  A pod that is only known by its processes does not hold it.
- If the clock is set back by more than a step, the sums begin again.

The sums of a pod on a device take 8 bytes for each step, whatever the interval of the ticks is.
"""

import struct
from typing import NamedTuple

import msgspec

from streams.alerts.tick import Device, Metrics, Tick
from topics.attributed import PodRef
from topics.idleness import IDLE_BELOW, part_of
from topics.samples import silent_after_ms

STEP_MS = 300_000
GAP_MS = 60_000
_FIGURES_MS = 5_000  # the interval of the ticks that figures are taken of
_UNITS_PER_MS = 10  # work is counted in tenths of a millisecond: a day of them is less than 32 bits
_MARK = struct.Struct("<II")
_MASK = 0xFFFFFFFF
_MOST_SECONDS = 1e12  # a counter of seconds that reads more, or less than zero, counts something else
_THROTTLE_REASONS = 0x8 | 0x20 | 0x40 | 0x80  # clock_event_reasons: hardware slowdown, temperature, power brake

FIGURES = ("utilization", "sm_active", "tensor_active", "sm_clock_hz", "power_watts", "throttled", "violation")
"""The figures by which ranks are compared: means over a step. ``throttled`` is the share of time in which the hardware,
the temperature or the power brake slowed the GPU down; ``violation`` is that in which the driver counted violations of
power or temperature."""

Figures = tuple[float | None, ...]  # one for each of these; None if a tick did not have it

_NO_FIGURES: Figures = (0.0,) * (len(FIGURES) + 1)


class UseNeeds(NamedTuple):
    """The sums that the rules need: over how many steps, and whether with the figures by which ranks are compared.
    ``windows`` are those that rules judge: the number of steps, and the use below which a pod hardly uses a device."""

    steps: int
    figures: bool
    windows: tuple[tuple[int, float], ...] = ()


class Use(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much a pod used a device until ``at_ms``, its last reading.

    ``ms`` is the time measured in all, and ``work`` the work in it. ``marks`` has both as they were at the start of
    each of the last steps, the last of which is ``step``. ``worked_ms`` is the last tick in which the pod worked.
    ``sums`` has the sum of each figure in this step (of ``violation`` the seconds) and, last, the number of ticks.
    ``violation_s`` is the last reading of the counters of violations. ``low``: in some window that ended with the last
    step the pod hardly used the device.
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


Uses = tuple[Use, ...]  # of one device, for each of its pods


def update_uses(device: Device, pods: tuple[PodRef, ...], before: Uses, tick: Tick, needs: UseNeeds) -> Uses:
    """The sums of a device after a tick; the same object if the tick has no reading of it."""
    if tick.attribution_of(device) == "none" or device.state in ("lost", "timeout"):
        return before
    if len(pods) == 1:
        if device.holders and device.holders[0].observed:
            return ()
        metrics, name = device.metrics, pod_name(pods[0])
        use_before = (
            before[0] if before and before[0].pod == name else next((use for use in before if use.pod == name), None)
        )
        use = _update_use(use_before, name, activity(metrics), metrics if needs.figures else None, tick, needs)
        return () if use is None else before if use is use_before and len(before) == 1 else (use,)
    use_by_pod = {use.pod: use for use in before}
    uses: list[Use] = []
    for holders in device.pods:
        if not holders[0].observed:
            name, share = pod_name(holders[0]), part_of(holders)
            use = _update_use(use_by_pod.get(name), name, share, None, tick, needs)
            if use is not None:
                uses.append(use)
    return tuple(uses)


def pod_name(pod: PodRef) -> str:
    """The name of a pod in the sums: its uid or, if that is not known, its namespace and name."""
    return pod.pod_uid or f"{pod.namespace}/{pod.pod}"


def activity(metrics: Metrics) -> float | None:
    """The greatest of a device's ratios of activity that are means over the tick; None if it has none of them."""
    utilization, engine = metrics.gpu_utilization_ratio, metrics.graphics_engine_active_ratio
    sms = metrics.sm_active_ratio
    if utilization is None and engine is None and sms is None:
        return None
    most = utilization or 0.0
    for other in (engine, sms, metrics.encoder_utilization_ratio, metrics.decoder_utilization_ratio):
        if other is not None and other > most:
            most = other
    return most


def _update_use(
    before: Use | None, pod: str, share: float | None, metrics: Metrics | None, tick: Tick, needs: UseNeeds
) -> Use | None:
    """The sums of a pod after a tick. ``share`` is its reading, if any. The first reading measures no time."""
    if share is None:
        return before
    if not 0.0 <= share <= 1.0:  # a producer may write any number
        share = min(max(share, 0.0), 1.0)
    now_ms = tick.ts_ms
    step = now_ms // STEP_MS
    if before is None or step < before.step - 1:
        worked_ms = now_ms if share >= IDLE_BELOW else 0
        return Use(pod, now_ms, step, 0, 0, worked_ms, _MARK.pack(0, 0), (), _violation_seconds(metrics))
    passed_ms = now_ms - before.at_ms
    is_gap = passed_ms > GAP_MS and passed_ms > silent_after_ms(tick.interval_ms, GAP_MS)
    if passed_ms < 0 or is_gap:
        passed_ms = 0
    marks, sums, low, violation_s = before.marks, before.sums, before.low, before.violation_s
    if step > before.step:
        mark = _MARK.pack(before.ms & _MASK, before.work & _MASK)
        marks = (marks + mark * min(step - before.step, needs.steps + 1))[-_MARK.size * (needs.steps + 1) :]
        means = [(mean_of(marks, steps), below) for steps, below in needs.windows]
        sums, low = (), any(mean is not None and mean < below for mean, below in means)
    if metrics is not None and now_ms // _FIGURES_MS != before.at_ms // _FIGURES_MS:
        violation_s = _violation_seconds(metrics)
        sums = _add_figures(sums, metrics, violation_s - before.violation_s)
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


def _violation_seconds(metrics: Metrics | None) -> float:
    if metrics is None:
        return 0.0
    seconds = (metrics.power_violation_seconds_total or 0.0, metrics.thermal_violation_seconds_total or 0.0)
    return sum([total for total in seconds if 0.0 <= total <= _MOST_SECONDS])


def _add_figures(sums: Figures, metrics: Metrics, violation_s: float) -> Figures:
    """The sums with the figures of a tick, and one tick more."""
    utilization, sm_active, tensor_active, clock, power, throttled, violation, ticks = sums or _NO_FIGURES
    utilization_now, sm_active_now = metrics.gpu_utilization_ratio, metrics.sm_active_ratio
    tensor_active_now, clock_now = metrics.tensor_active_ratio, metrics.sm_clock_hz
    power_now, reasons = metrics.power_watts, metrics.clock_event_reasons
    has_violations = metrics.power_violation_seconds_total is not None
    return (
        None if utilization is None or utilization_now is None else utilization + utilization_now,
        None if sm_active is None or sm_active_now is None else sm_active + sm_active_now,
        None if tensor_active is None or tensor_active_now is None else tensor_active + tensor_active_now,
        None if clock is None or clock_now is None else clock + clock_now,
        None if power is None or power_now is None else power + power_now,
        None if throttled is None or reasons is None else throttled + bool(int(reasons) & _THROTTLE_REASONS),
        None if violation is None or not has_violations else violation + max(violation_s, 0.0),
        (ticks or 0.0) + 1,
    )


# -- means


def mean_of(marks: bytes, steps: int) -> float | None:
    """The mean use in the last whole steps, by the marks of their sums; None if there are fewer steps, or if less than
    half of the time was measured."""
    start_offset = len(marks) - _MARK.size * (steps + 1)
    if start_offset < 0:
        return None
    start_ms, start_work = _MARK.unpack_from(marks, start_offset)
    end_ms, end_work = _MARK.unpack_from(marks, len(marks) - _MARK.size)
    measured_ms: int = (end_ms - start_ms) & _MASK
    work: int = (end_work - start_work) & _MASK
    if measured_ms * 2 < steps * STEP_MS:
        return None
    return work / _UNITS_PER_MS / measured_ms


def means_of_closed_step(before: Uses, after: Uses, interval_ms: int | None = None) -> Figures | None:
    """The means of the figures in the step that a tick has ended; None unless one pod held the device alone, and half
    of the step or more was measured. Steps may lie between if the node's interval is that long."""
    if len(before) != 1 or len(after) != 1 or after[0].step <= before[0].step or after[0].pod != before[0].pod:
        return None
    if after[0].step > before[0].step + 1 and after[0].at_ms - before[0].at_ms > silent_after_ms(interval_ms, 0):
        return None
    measured_ms = (before[0].ms - _MARK.unpack_from(before[0].marks, len(before[0].marks) - _MARK.size)[0]) & _MASK
    if not before[0].sums or measured_ms * 2 < STEP_MS:
        return None
    *sums, violated_s, ticks = before[0].sums
    means = [None if total is None else total / (ticks or 1.0) for total in sums]
    return (*means, None if violated_s is None else min(violated_s * 1000 / measured_ms, 1.0))
