"""The conditions: which of the rules hold in a node's tick. Pure.

In: the rules, a node's tick, and what is remembered of the node. Out: findings, and what is remembered now. A condition
is a function for each kind of rule, called with a device of the tick; the tables below say in which of its states.
"""

from collections.abc import Callable

from streams.alerts.conditions import faults, pods
from streams.alerts.conditions.faults import HW_POWER_BRAKE, HW_THERMAL, SW_THERMAL
from streams.alerts.conditions.finding import (
    NO_WINDOWS,
    Facts,
    Finding,
    View,
    is_silenced,
    uid_and_key,
    unseen,
    view_of,
)
from streams.alerts.memory import Memory, Seen, remember
from streams.alerts.rules.rule import WASTE, WINDOWED, Kind, Rule, Rules, has_policy, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import STEP_MS, mean_of, pod_name
from topics.alerts import Tracked
from topics.idleness import Work, work_of

Condition = Callable[[Rule, View, list[Finding]], None]  # adds to the findings what a rule finds on a device
_PLANS = 1000  # are remembered: a state is a text that a later version may have many of
BLIND_MS = 600_000  # for how long after a device went missing it is not known whether what was found on it still holds
_NOTHING, _UNSEEN = Memory(), Seen()

_VALUES: dict[Kind, tuple[str, ...]] = {
    "row_remap_failure": ("row_remap_failure",),
    "row_remap_pending": ("row_remap_pending", "retired_pages_pending"),
    "thermal_slowdown": ("clock_event_reasons",),
    "power_brake": ("clock_event_reasons",),
    "memory_hoarded": ("memory_total_bytes",),
}
"""The values of the tick that a kind is judged by."""


def evaluate(rules: Rules, tick: Tick, memory: Memory) -> tuple[list[Finding], Memory]:
    """What is found in a tick. The memory is the same object if nothing of it changed."""
    now = remember(memory, tick, rules.forget_ms, rules.use_needs)
    found: list[Finding] = []
    parents = {device.mig.parent_uuid for device in tick.devices if device.mig is not None}
    for device in tick.devices:
        work = work_of(device.metrics)
        conditions = _conditions(rules, device.state, _signs(rules, tick, device, now, work))
        if not conditions:
            continue
        view = view_of(rules, tick, device, (memory, now), work, parents)
        for condition, ruled in conditions:
            for rule in ruled:
                condition(rule, view, found)
    if len(now.devices) == len(tick.devices):
        return found, now
    present = {device.uuid for device in tick.devices}
    for uuid, seen in [(uuid, seen) for uuid, seen in now.devices.items() if uuid not in present]:
        kinds = () if is_gone(seen, tick.ts_ms) else (*_OK, "lost", "not_answering")
        for rule in [rule for kind in kinds for rule in rules.of(kind)]:
            found.extend(unseen(rule, uuid, seen))
        if seen.parent is None:  # of a MIG device its GPU is what is missing
            missing = [rules.in_force(rule, None) for rule in rules.of("missing")]
            found.extend(Finding(rule, uuid, facts=Facts(None, seen)) for rule in missing if rule is not None)
    return found, now


def is_gone(seen: Seen, now_ms: int) -> bool:
    """Whether a device has been missing for so long that nothing of it holds any more."""
    return bool(seen.missing_ms) and now_ms - seen.missing_ms > BLIND_MS


def resolve_reason(rules: Rules, tick: Tick, condition: Tracked, memory: Memory = _NOTHING) -> str:
    """Why what held is not found any more, as ``resolved_because`` has it."""
    rule = rules.by_name.get(condition.name)
    if rule is None:
        return "rule_removed"
    if condition.device and all(device.uuid != condition.device for device in tick.devices):
        return "device_removed"
    if not (condition.pod_uid or rule.kind in WASTE):
        return "condition"
    holders = [holder for device in tick.devices if condition.device in ("", device.uuid) for holder in device.holders]
    uid_or_name = condition.pod_uid or condition.key
    pod = next((holder for holder in holders if uid_or_name in uid_and_key(holder)), None)
    if pod is None:
        return "pod_ended"
    silenced = is_silenced(rules, pod, memory.devices.get(condition.device, _UNSEEN), tick)
    return "policy" if silenced or rules.in_force(rule, pod) is None else "condition"


def is_known_not_to_hold(rules: Rules, tick: Tick, condition: Tracked, memory: Memory = _NOTHING) -> bool:
    """Whether a condition that was not found in a tick is known not to hold.

    It is not known if the condition is about a pod and the tick does not say who holds what, if the tick has none of
    the values that the condition is judged by, or if a window is not over: a clock was set back. That does not matter
    for a pod that is gone or silenced.
    """
    rule = rules.by_name.get(condition.name)
    if rule is None:
        return True
    if tick.attribution == "none" and (condition.pod_uid or rule.kind in (*WASTE, "policy_invalid")):
        return False
    found = next((device for device in tick.devices if device.uuid == condition.device), None)
    if rule.kind in WINDOWED:
        name, seen = condition.pod_uid or condition.key, memory.devices.get(condition.device, _UNSEEN)
        holders = [holder for holder in found.holders if pod_name(holder) == name] if found is not None else []
        judged = [
            condition
            for condition in holders
            if not condition.observed and not is_silenced(rules, condition, seen, tick)
        ]
        if found is not None and not judged:
            return True
        use = next((use for use in memory.uses.get(condition.device, ()) if use.pod == name), None)
        if use is not None and mean_of(use, rule.window_ms // STEP_MS) is None:
            return False
        for holder in judged:
            ruled = rules.in_force(rule, holder)
            if ruled is not None and not pods.held_long(ruled, policy_of(holder, rules.bounds), name, seen, tick):
                return False
    values = _VALUES.get(rule.kind, ())
    return not values or found is None or any(getattr(found.metrics, value) is not None for value in values)


# -- which conditions judge a device, by its state

_ALWAYS: dict[Kind, Condition] = {"xid": faults.xid, "policy_invalid": pods.policy_invalid}
_OK: dict[Kind, Condition] = {
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
_BLIND = _ALWAYS | dict.fromkeys(_OK, faults.blind) | {"lost": faults.lost}
_BY_STATE: dict[str, dict[Kind, Condition]] = {
    "ok": _ALWAYS | _OK,
    "lost": _BLIND,
    "timeout": _BLIND | {"not_answering": faults.not_answering},
}
_UNKNOWN_STATE = _ALWAYS | _OK | dict.fromkeys(("lost", "not_answering"), faults.blind)
"""For a device in a state of a later version: its values are judged, and it is not known whether it answers."""

_ERRORS, _VALUED, _XIDS, _LOW, _WAITS, _POLICY, _IDLE, _FULL, _UNGIVEN, _CONFLICT = (1 << at for at in range(10))
_BY_SIGN: dict[Kind, int] = {
    "held_idle": _IDLE,
    "stalled": _FULL,
    "used_unallocated": _UNGIVEN,
    "attribution_conflict": _CONFLICT,
    "ecc_uncorrectable": _ERRORS,
    "nvlink_errors": _ERRORS,
    "row_remap_failure": _VALUED,
    "row_remap_pending": _VALUED,
    "thermal_slowdown": _VALUED,
    "power_brake": _VALUED,
    "xid": _XIDS,
    "underused": _LOW,
    "memory_hoarded": _LOW,
    "crash_loop": _WAITS,
    "policy_invalid": _POLICY,
}
"""Of each kind that judges a device that answers: the sign without which it does not hold. Most devices show none."""


def _signs(rules: Rules, tick: Tick, device: Device, now: Memory, work: Work) -> int:
    """The signs that a device shows."""
    metrics, holders, used = device.metrics, device.holders, device.metrics.gpu_utilization_ratio
    signs = _IDLE | _UNGIVEN | _CONFLICT if tick.attribution == "none" else 0
    slow = int(metrics.clock_event_reasons or 0) & (HW_THERMAL | SW_THERMAL | HW_POWER_BRAKE)
    if slow or metrics.row_remap_failure or metrics.row_remap_pending or metrics.retired_pages_pending:
        signs |= _VALUED
    if device.xids or device.events:
        signs |= _XIDS
    if device.conflict is not None or device.processes is None or device.info.processes_visible == "false":
        signs |= _CONFLICT
    for window in now.windows.get(device.uuid, NO_WINDOWS).values():
        signs |= _ERRORS if window.errors else 0
    for use in now.uses.get(device.uuid, ()):
        signs |= _LOW if use.low else 0
    for holder in holders:
        signs |= (_POLICY if has_policy(holder) else 0) | (_WAITS if holder.waiting is not None else 0)
    if holders and (len(holders) > 1 or work.most < rules.busy):
        signs |= _IDLE
    if holders and (used is None or used >= rules.full):
        signs |= _FULL
    cut = device.mig is None and device.info.mig_mode == "enabled"
    if not cut and (not holders or holders[0].observed) and (work.most >= rules.ungiven or not work.measured):
        signs |= _UNGIVEN
    return signs


def _conditions(rules: Rules, state: str, signs: int) -> list[tuple[Condition, tuple[Rule, ...]]]:
    """What judges a device in a state that shows some signs, and by which rules."""
    found: list[tuple[Condition, tuple[Rule, ...]]] | None = rules.plan.get((state, signs))
    if found is None:
        judges = _BY_STATE.get(state, _UNKNOWN_STATE)
        kinds = {
            kind: one
            for kind, one in judges.items()
            if one is faults.blind or kind not in _BY_SIGN or signs & _BY_SIGN[kind]
        }
        found = [(one, rules.by_kind[kind]) for kind, one in kinds.items() if kind in rules.by_kind]
        if len(rules.plan) < _PLANS:
            rules.plan[state, signs] = found
    return found
