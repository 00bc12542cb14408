"""Conditions about what is wrong with a device, whoever holds it. Pure."""

from collections.abc import Iterable

from streams.alerts.conditions.finding import (
    NVLINK_ERRORS,
    Facts,
    Finding,
    View,
    is_silenced,
    of_device,
    sole_pod,
    unseen,
)
from streams.alerts.memory import XID, within
from streams.alerts.rules.rule import Rule
from streams.alerts.xids import code_of, of_code
from topics.attributed import Holder

HW_THERMAL, SW_THERMAL, HW_POWER_BRAKE = 0x40, 0x20, 0x80  # bits of clock_event_reasons, as nvml.h has them


def xid(rule: Rule, view: View, found: list[Finding]) -> None:
    """The XID errors since the last tick, by code; those of programs by the pod that alone held the device then.

    The producer counts them; errors that it does not count are counted by their events. In the first tick of a node
    the earlier errors of the producer's run are left out: it is not known when they came.
    """
    device, memory = view.device, view.before
    if not device.xids and not device.events:
        return
    events = [str(event.code) for event in device.events or () if event.kind == "xid" and event.code is not None]
    remembered = memory.devices.get(device.uuid) if memory.run_id == view.tick.run_id else None
    counts: dict[str, float] = {}
    for text, total in device.xids.items():
        count = remembered.counts.get(XID + text) if remembered is not None else None
        before = count.value if count is not None else 0.0 if memory.run_id else total - events.count(text)
        counts[text] = total - before if total >= before else total
    for text in events:
        counts.setdefault(text, float(events.count(text)))
    for text, errors in counts.items():
        code = code_of(text)
        kind = of_code(code).kind
        for holders, times in _held_then(view, text, errors, by_pod=kind == "application") if errors > 0 else ():
            pod = sole_pod(holders)
            ruled = view.rules.in_force(rule, pod, xid=code)
            own = pod if kind == "application" else None
            if ruled is None or (own is not None and is_silenced(view.rules, own, view.seen, view.tick)):
                continue
            ruled, uid = ruled.with_severity(kind), (own.pod_uid or "") if own is not None else ""
            facts = Facts(device, None, holders, text=text)
            found.append(Finding(ruled, device.uuid, uid, text, value=times, event=True, facts=facts))


def _held_then(view: View, code: str, count: float, *, by_pod: bool) -> Iterable[tuple[tuple[Holder, ...], float]]:
    """Who held the device when errors of a code came, and how many errors.

    That is one group with all holders. With ``by_pod`` each pod that held the device alone, and has a known uid, is a
    group, and all others are one. Errors without an event came at the tick's time.
    """
    now = view.device.holders
    events = [event for event in view.device.events or () if event.kind == "xid" and str(event.code) == code]
    times = [(event.held_by(now), 1.0) for event in events]
    times += [(now, count - len(events))] if count > len(events) else []
    groups: dict[str | None, tuple[dict[tuple[str | None, ...], Holder], float]] = {}
    for holders, errors in times:
        pod = sole_pod(holders) if by_pod else None
        uid = None if pod is None else pod.pod_uid
        held, before = groups.get(uid, ({}, 0.0))
        held |= {(one.namespace, one.pod, one.pod_uid, one.container): one for one in holders}
        groups[uid] = (held, before + errors)
    return [(tuple(held.values()), errors) for held, errors in groups.values()]


def ecc_uncorrectable(rule: Rule, view: View, found: list[Finding]) -> None:
    """One error is in the volatile and in the aggregate count."""
    count = _errors(view, "ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total")
    if count >= rule.at_least:
        of_device(rule, view, found, value=count)


def nvlink_errors(rule: Rule, view: View, found: list[Finding]) -> None:
    for key in NVLINK_ERRORS:
        count = _errors(view, f"nvlink_{key}_errors_total")
        if count >= (rule.recoveries if key == "recovery" else rule.at_least):
            of_device(rule, view, found, value=count, key=key)


def _errors(view: View, *names: str) -> float:
    """The most errors that any of these counters had within the last minute."""
    return max([within(view.windows.get(name), view.tick.ts_ms) for name in names])


def row_remap_failure(rule: Rule, view: View, found: list[Finding]) -> None:
    if view.device.metrics.row_remap_failure:
        of_device(rule, view, found, value=view.device.metrics.row_remap_failure)


def row_remap_pending(rule: Rule, view: View, found: list[Finding]) -> None:
    metrics = view.device.metrics
    if metrics.row_remap_pending or metrics.retired_pages_pending:
        of_device(rule, view, found, value=1.0)


def thermal_slowdown(rule: Rule, view: View, found: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & (HW_THERMAL | SW_THERMAL):
        of_device(rule, view, found, value=view.device.metrics.temperature_celsius)


def power_brake(rule: Rule, view: View, found: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & HW_POWER_BRAKE:
        of_device(rule, view, found, value=view.device.metrics.power_watts)


def lost(rule: Rule, view: View, found: list[Finding]) -> None:
    of_device(rule, view, found, holds=True if view.device.state == "lost" else None)


def not_answering(rule: Rule, view: View, found: list[Finding]) -> None:
    if view.device.state == "timeout":
        of_device(rule, view, found)


def blind(rule: Rule, view: View, found: list[Finding]) -> None:
    """A device that does not answer says nothing."""
    found.extend(unseen(rule, view.device.uuid, view.seen))
