"""Conditions about faults of a device, whichever pod holds it. Pure."""

from collections.abc import Iterable

from streams.alerts.conditions.finding import (
    NVLINK_ERRORS,
    Facts,
    Finding,
    View,
    add_device_finding,
    all_holders,
    is_silenced,
    sole_pod,
    unknown_findings,
)
from streams.alerts.memory import XID, errors_in_window
from streams.alerts.rules.rule import Rule
from streams.alerts.xids import code_of, of_code
from topics.attributed import Holder

HW_THERMAL, SW_THERMAL, HW_POWER_BRAKE = 0x40, 0x20, 0x80  # bits of clock_event_reasons, as nvml.h has them


def xid(rule: Rule, view: View, findings: list[Finding]) -> None:
    """The XID errors since the last tick, by code. Those of programs are also by the pod that held the device alone.

    The producer counts them; errors that it does not count are counted by their events. In the first tick of a node,
    and in that of a run, earlier errors are left out: it is not known when they came, and a producer whose clock is set
    back begins a run and goes on counting.
    """
    device, memory = view.device, view.memory_before
    if not device.xids and not device.events:
        return
    events = [str(event.code) for event in device.events or () if event.kind == "xid" and event.code is not None]
    last_counts = memory.xid_counts(device.uuid, view.tick.run_id)
    is_first = not memory.run_id or (memory.run_id != view.tick.run_id and view.tick.seq <= 1)
    counts: dict[str, float] = {}
    for code, total in device.xids.items():
        count = last_counts.get(XID + code)
        last_total = count.value if count is not None else total - events.count(code) if is_first else 0.0
        counts[code] = total - last_total if total >= last_total else total
    for code in events:
        counts.setdefault(code, float(events.count(code)))
    for code, errors in counts.items():
        number = code_of(code)
        kind = of_code(number).kind
        if errors <= 0:
            continue
        for holders, times in _errors_by_holders(view, code, errors, by_pod=kind == "application"):
            sole = sole_pod(holders)
            effective_rule = view.rules.in_force(rule, sole, xid=number)
            pod = sole if kind == "application" else None
            if effective_rule is None or (pod is not None and is_silenced(view.rules, pod, view.remembered, view.tick)):
                continue
            effective_rule, uid = effective_rule.with_severity(kind), (pod.pod_uid or "") if pod is not None else ""
            facts = Facts(device, None, holders if view.whole else all_holders(view), text=code)
            findings.append(Finding(effective_rule, device.uuid, uid, code, value=times, event=True, facts=facts))


def _errors_by_holders(
    view: View, code: str, count: float, *, by_pod: bool
) -> Iterable[tuple[tuple[Holder, ...], float]]:
    """The holders of the device when errors of a code came, and the number of errors.

    Without ``by_pod`` that is one group with all holders, those of its MIG devices among them. With it each pod that
    held the device alone, and has a known uid, is a group, and all others are one. Errors without an event came at the
    tick's time.
    """
    holders_now = view.device.holders if by_pod else all_holders(view)
    events = [event for event in view.device.events or () if event.kind == "xid" and str(event.code) == code]
    occurrences = [(event.held_by(holders_now), 1.0) for event in events]
    occurrences += [(holders_now, count - len(events))] if count > len(events) else []
    groups: dict[str | None, tuple[dict[tuple[str | None, ...], Holder], float]] = {}
    for holders, errors in occurrences:
        pod = sole_pod(holders) if by_pod else None
        uid = None if pod is None else pod.pod_uid
        holder_by_key, total = groups.get(uid, ({}, 0.0))
        holder_by_key |= {
            (holder.namespace, holder.pod, holder.pod_uid, holder.container): holder for holder in holders
        }
        groups[uid] = (holder_by_key, total + errors)
    return [(tuple(holder_by_key.values()), total) for holder_by_key, total in groups.values()]


def ecc_uncorrectable(rule: Rule, view: View, findings: list[Finding]) -> None:
    """The same errors are in the volatile and in the aggregate counter: only the greater number counts."""
    count = _max_errors(view, "ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total")
    if count >= rule.at_least:
        add_device_finding(rule, view, findings, value=count)


def nvlink_errors(rule: Rule, view: View, findings: list[Finding]) -> None:
    for key in NVLINK_ERRORS:
        count = _max_errors(view, f"nvlink_{key}_errors_total")
        if count >= (rule.recoveries if key == "recovery" else rule.at_least):
            add_device_finding(rule, view, findings, value=count, key=key)


def _max_errors(view: View, *names: str) -> float:
    """The greatest number of errors within the last minute, of some counters."""
    return max([errors_in_window(view.windows.get(name), view.tick.ts_ms) for name in names])


def row_remap_failure(rule: Rule, view: View, findings: list[Finding]) -> None:
    if view.device.metrics.row_remap_failure:
        add_device_finding(rule, view, findings, value=view.device.metrics.row_remap_failure)


def row_remap_pending(rule: Rule, view: View, findings: list[Finding]) -> None:
    metrics = view.device.metrics
    if metrics.row_remap_pending or metrics.retired_pages_pending:
        add_device_finding(rule, view, findings, value=1.0)


def thermal_slowdown(rule: Rule, view: View, findings: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & (HW_THERMAL | SW_THERMAL):
        add_device_finding(rule, view, findings, value=view.device.metrics.temperature_celsius)


def power_brake(rule: Rule, view: View, findings: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & HW_POWER_BRAKE:
        add_device_finding(rule, view, findings, value=view.device.metrics.power_watts)


def lost(rule: Rule, view: View, findings: list[Finding]) -> None:
    _add_silent_gpu(rule, view, findings, holds=True if view.device.state == "lost" else None)


def not_answering(rule: Rule, view: View, findings: list[Finding]) -> None:
    if view.device.state == "timeout":
        _add_silent_gpu(rule, view, findings)


def _add_silent_gpu(rule: Rule, view: View, findings: list[Finding], *, holds: bool | None = True) -> None:
    """Add a finding about a device that does not answer. A MIG device whose GPU is in the same state is no finding: its
    GPU is."""
    mig, state = view.device.mig, view.device.state
    if mig is None or all(gpu.uuid != mig.parent_uuid or gpu.state != state for gpu in view.tick.devices):
        add_device_finding(rule, view, findings, holds=holds)


def no_evidence(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A device that does not answer gives no evidence."""
    findings.extend(unknown_findings(rule, view.device.uuid, view.remembered))
