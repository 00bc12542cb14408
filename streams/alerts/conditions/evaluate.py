"""Evaluates the rules on a node's tick, and returns the conditions that hold. Pure.

In: the rules, a node's tick, and the memory of the node. Out: findings, and the next memory. Each kind of rule has a
check, a function that is called with a device of the tick; the tables below say in which states of the device.
"""

from collections.abc import Callable

import msgspec

from delivery.policies import NO_POLICY
from streams.alerts.conditions import faults, pods
from streams.alerts.conditions.faults import HW_POWER_BRAKE, HW_THERMAL, SW_THERMAL
from streams.alerts.conditions.finding import (
    NO_WINDOWS,
    Facts,
    Finding,
    Pod,
    View,
    is_silenced,
    uid_and_key,
    unknown_findings,
)
from streams.alerts.memory import DeviceMemory, Memory, remember
from streams.alerts.rules.rule import WASTE, WINDOWED, Kind, Rule, Rules, has_policy, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import STEP_MS, mean_of, pod_name
from topics.alerts import Tracked
from topics.idleness import Work, work_of

Check = Callable[[Rule, View, list[Finding]], None]  # adds a rule's findings on a device to the list
_MAX_PLANS = 1000  # cached at most: a state is any text, of which a later version may have many
BLIND_MS = 600_000  # for so long after a device went missing, its conditions have no evidence; then they do not hold
_EMPTY_DEVICE = DeviceMemory()

_JUDGED_METRICS: dict[Kind, tuple[str, ...]] = {
    "row_remap_failure": ("row_remap_failure",),
    "row_remap_pending": ("row_remap_pending", "retired_pages_pending"),
    "thermal_slowdown": ("clock_event_reasons",),
    "power_brake": ("clock_event_reasons",),
    "memory_hoarded": ("memory_total_bytes",),
}
"""The metrics without which there is no evidence of a kind."""


def evaluate(rules: Rules, tick: Tick, memory: Memory) -> tuple[list[Finding], Memory]:
    """The findings of a tick, and the memory after it; the same object if nothing changed."""
    memory_now = remember(memory, tick, rules.forget_ms, rules.use_needs)
    findings: list[Finding] = []
    parents = {device.mig.parent_uuid for device in tick.devices if device.mig is not None}
    for device in tick.devices:
        work = work_of(device.metrics)
        signs = _signs_of(rules, tick, device, memory_now, work)
        checks = _checks_for(rules, device.state, signs)
        if not checks:
            continue
        holding_pods = tuple(
            [
                Pod(holders, policy_of(holders[0], rules.bounds) if signs & _HAS_POLICY else NO_POLICY)
                for holders in device.pods
            ]
        )
        remembered, windows = memory_now.devices[device.uuid], memory_now.windows.get(device.uuid, NO_WINDOWS)
        uses, is_divided = memory_now.uses.get(device.uuid, ()), device.info.mig_mode == "enabled"
        whole = device.mig is not None or not (is_divided or device.uuid in parents)
        view = View(rules, tick, device, memory, remembered, windows, uses, holding_pods, work, whole)
        for check, kind_rules in checks:
            for rule in kind_rules:
                check(rule, view, findings)
    present = {device.uuid for device in tick.devices}
    for uuid, remembered in memory_now.devices.items():
        if uuid in present:
            continue
        kinds = () if is_gone(remembered, tick.ts_ms) else (*_OK_CHECKS, "lost", "not_answering")
        for rule in [rule for kind in kinds for rule in rules.of(kind)]:
            findings.extend(unknown_findings(rule, uuid, remembered))
        if remembered.parent is None:  # a MIG device that is missing is no finding: its GPU is, which has its pods
            parts = [part for part in memory_now.devices.values() if part.parent == uuid]
            pods_of_all = tuple([pod for part in (remembered, *parts) for pod in part.pods])
            facts = Facts(None, msgspec.structs.replace(remembered, pods=pods_of_all))
            missing = [rules.in_force(rule, None) for rule in rules.of("missing")]
            findings.extend(Finding(rule, uuid, facts=facts) for rule in missing if rule is not None)
    return findings, memory_now


def is_gone(remembered: DeviceMemory, now_ms: int) -> bool:
    """Whether a device has been missing for so long that no condition of it holds any more."""
    return bool(remembered.missing_ms) and now_ms - remembered.missing_ms > BLIND_MS


def resolve_reason(rules: Rules, tick: Tick, condition: Tracked, memory: Memory) -> str:
    """Why a condition does not hold any more, as a value of ``resolved_because``."""
    rule = rules.by_name.get(condition.name)
    if rule is None:
        return "rule_removed"
    if rule.kind == "node_silent":
        return "ticks"
    if condition.device and all(device.uuid != condition.device for device in tick.devices):
        return "device_removed"
    if not (condition.pod_uid or rule.kind in WASTE) or not tick.knows_holders(condition.device):
        return "condition"
    holders = [holder for device in tick.devices if condition.device in ("", device.uuid) for holder in device.holders]
    uid_or_name = condition.pod_uid or condition.key
    pod = next((holder for holder in holders if uid_or_name in uid_and_key(holder)), None)
    if pod is None:
        return "pod_ended"
    silenced = is_silenced(rules, pod, memory.devices.get(condition.device, _EMPTY_DEVICE), tick)
    return "policy" if silenced or rules.in_force(rule, pod) is None else "condition"


def is_known_not_to_hold(rules: Rules, tick: Tick, condition: Tracked, memory: Memory) -> bool:
    """Whether a condition without a finding in a tick does not hold. Else there is no evidence, and it may still hold.

    There is no evidence about a pod if the tick has no holders. There is none of a condition if the tick has none of
    the metrics that it needs, or if a window is incomplete because a clock was set back. A pod that has ended or is
    silenced, and a device that is gone, need no evidence. An XID error is an event, so a tick without it is
    evidence, with holders or without.
    """
    rule = rules.by_name.get(condition.name)
    device = next((device for device in tick.devices if device.uuid == condition.device), None)
    remembered = memory.devices.get(condition.device)
    is_missing = device is None and condition.device  # a condition of a node is of no device
    if rule is None or (is_missing and (remembered is None or is_gone(remembered, tick.ts_ms))):
        return True
    about_pod = condition.pod_uid or rule.kind in (*WASTE, "policy_invalid")
    if about_pod and rule.kind != "xid" and not tick.knows_holders(condition.device):
        return False
    if rule.kind in WINDOWED:
        pod, remembered = condition.pod_uid or condition.key, remembered or _EMPTY_DEVICE
        holders = [holder for holder in device.holders if pod_name(holder) == pod] if device is not None else []
        judged_holders = [
            holder for holder in holders if not holder.observed and not is_silenced(rules, holder, remembered, tick)
        ]
        if device is not None and not judged_holders:
            return True
        use = next((use for use in memory.uses.get(condition.device, ()) if use.pod == pod), None)
        if use is not None and mean_of(use.marks, rule.window_ms // STEP_MS) is None:
            return False
        for holder in judged_holders:
            effective_rule, policy = rules.in_force(rule, holder), policy_of(holder, rules.bounds)
            if effective_rule is None:
                continue
            if not pods.held_whole_window(effective_rule, policy, pod, remembered, tick):
                return False
    metrics = _JUDGED_METRICS.get(rule.kind, ())
    return not metrics or device is None or any(getattr(device.metrics, metric) is not None for metric in metrics)


# -- the checks of a device, by its state

_ALWAYS_CHECKS: dict[Kind, Check] = {"xid": faults.xid, "policy_invalid": pods.policy_invalid}
_OK_CHECKS: dict[Kind, Check] = {
    "held_idle": pods.held_idle,
    "stalled": pods.stalled,
    "underused": pods.underused,
    "memory_hoarded": pods.memory_hoarded,
    "crash_loop": pods.crash_loop,
    "used_unallocated": pods.used_unallocated,
    "attribution_conflict": pods.attribution_conflict,
    "ecc_uncorrectable": faults.ecc_uncorrectable,
    "row_remap_failure": faults.row_remap_failure,
    "row_remap_pending": faults.row_remap_pending,
    "thermal_slowdown": faults.thermal_slowdown,
    "power_brake": faults.power_brake,
    "nvlink_errors": faults.nvlink_errors,
}
_NO_EVIDENCE_CHECKS = _ALWAYS_CHECKS | dict.fromkeys(_OK_CHECKS, faults.no_evidence) | {"lost": faults.lost}
_CHECKS_BY_STATE: dict[str, dict[Kind, Check]] = {
    "ok": _ALWAYS_CHECKS | _OK_CHECKS,
    "lost": _NO_EVIDENCE_CHECKS,
    "timeout": _NO_EVIDENCE_CHECKS | {"not_answering": faults.not_answering},
}
_UNKNOWN_STATE_CHECKS = _ALWAYS_CHECKS | _OK_CHECKS | dict.fromkeys(("lost", "not_answering"), faults.no_evidence)
"""The checks of a device in a state of a later version: its values are judged; it is unknown whether it answers."""

_HAS_ERRORS, _HAS_FAULT, _HAS_XIDS, _LITTLE_USED, _CONTAINER_WAITS = (1 << bit for bit in range(5))
_HAS_POLICY, _MAY_BE_IDLE, _FULLY_USED, _USED_UNALLOCATED, _MAY_CONFLICT = (1 << bit for bit in range(5, 10))
_REQUIRED_SIGN: dict[Kind, int] = {
    "held_idle": _MAY_BE_IDLE,
    "stalled": _FULLY_USED,
    "used_unallocated": _USED_UNALLOCATED,
    "attribution_conflict": _MAY_CONFLICT,
    "ecc_uncorrectable": _HAS_ERRORS,
    "nvlink_errors": _HAS_ERRORS,
    "row_remap_failure": _HAS_FAULT,
    "row_remap_pending": _HAS_FAULT,
    "thermal_slowdown": _HAS_FAULT,
    "power_brake": _HAS_FAULT,
    "xid": _HAS_XIDS,
    "underused": _LITTLE_USED,
    "memory_hoarded": _LITTLE_USED,
    "crash_loop": _CONTAINER_WAITS,
    "policy_invalid": _HAS_POLICY,
}
"""The sign without which a kind can't hold on a device that answers. Most devices have none, and need no check."""


def _signs_of(rules: Rules, tick: Tick, device: Device, memory: Memory, work: Work) -> int:
    """The signs of a device, as bits: cheap tests that show which checks can't find anything."""
    metrics, holders, utilization = device.metrics, device.holders, device.metrics.gpu_utilization_ratio
    signs = _MAY_BE_IDLE | _USED_UNALLOCATED | _MAY_CONFLICT if tick.attribution_of(device) == "none" else 0
    slowdown = int(metrics.clock_event_reasons or 0) & (HW_THERMAL | SW_THERMAL | HW_POWER_BRAKE)
    if slowdown or metrics.row_remap_failure or metrics.row_remap_pending or metrics.retired_pages_pending:
        signs |= _HAS_FAULT
    if device.xids or device.events:
        signs |= _HAS_XIDS
    if device.conflict is not None or device.processes is None or device.info.processes_visible == "false":
        signs |= _MAY_CONFLICT
    for window in memory.windows.get(device.uuid, NO_WINDOWS).values():
        signs |= _HAS_ERRORS if window.errors else 0
    for use in memory.uses.get(device.uuid, ()):
        signs |= _LITTLE_USED if use.low else 0
    for holder in holders:
        signs |= (_HAS_POLICY if has_policy(holder) else 0) | (_CONTAINER_WAITS if holder.waiting is not None else 0)
    if holders and (len(holders) > 1 or work.most < rules.max_idle_work):
        signs |= _MAY_BE_IDLE
    if holders and (utilization is None or utilization >= rules.min_stalled_utilization):
        signs |= _FULLY_USED
    is_partitioned = device.mig is None and device.info.mig_mode == "enabled"
    may_work = work.most >= rules.unallocated_work or not work.measured
    if not is_partitioned and (not holders or holders[0].observed) and may_work:
        signs |= _USED_UNALLOCATED
    return signs


def _checks_for(rules: Rules, state: str, signs: int) -> list[tuple[Check, tuple[Rule, ...]]]:
    """The checks for a device in a state with some signs, each with its rules."""
    checks: list[tuple[Check, tuple[Rule, ...]]] | None = rules.plan.get((state, signs))
    if checks is None:
        checks_of_state = _CHECKS_BY_STATE.get(state, _UNKNOWN_STATE_CHECKS)
        check_by_kind = {
            kind: check
            for kind, check in checks_of_state.items()
            if check is faults.no_evidence or kind not in _REQUIRED_SIGN or signs & _REQUIRED_SIGN[kind]
        }
        checks = [(check, rules.by_kind[kind]) for kind, check in check_by_kind.items() if kind in rules.by_kind]
        if len(rules.plan) < _MAX_PLANS:
            rules.plan[state, signs] = checks
    return checks
