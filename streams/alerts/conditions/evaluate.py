"""Evaluates the rules on a node's tick. Pure.

In: the rules, a node's tick, and what is remembered of the node. Out: findings, and what is remembered now.
"""

from streams.alerts.conditions import faults, holders
from streams.alerts.conditions.finding import Condition, Facts, Finding, View, identity, in_force, unseen, view_of
from streams.alerts.memory import Memory, remember
from streams.alerts.rules.policy import policy_of
from streams.alerts.rules.rule import Kind, Rule, Rules
from streams.alerts.tick import Tick

BLIND_MS = 600_000
"""For how long after a device went missing it is not known whether what was found on it still holds."""


def evaluate(rules: Rules, tick: Tick, memory: Memory) -> tuple[list[Finding], Memory]:
    """What is found in a tick. The memory is the same object if nothing of it changed."""
    now = remember(memory, tick, rules.forget_ms)
    found: list[Finding] = []
    parents = {device.mig.parent_uuid for device in tick.devices if device.mig is not None}
    for device in tick.devices:
        view = view_of(rules, tick, device, memory, now, parents)
        counted = any(window.errors for window in view.windows.values())
        for judge, ruled in _judges(rules, device.state, counted):
            for rule in ruled:
                judge(rule, view, found)
    if len(now.devices) != len(tick.devices):
        _missing(rules, tick, now, found)
    return found, now


def because(rules: Rules, tick: Tick, *, name: str, device: str, pod_uid: str, key: str) -> str:
    """Why what held is not found any more, as ``resolved_because`` has it."""
    rule = next((rule for rule in rules.rules if rule.name == name), None)
    if rule is None:
        return "rule_removed"
    if device and all(one.uuid != device for one in tick.devices):
        return "device_removed"
    if not (pod_uid or rule.kind == "held_idle"):
        return "condition"
    holders = [holder for one in tick.devices if device in ("", one.uuid) for holder in one.holders]
    uid_or_name = pod_uid or key
    pod = next((holder for holder in holders if uid_or_name in identity(holder)), None)
    if pod is None:
        return "pod_ended"
    return "policy" if policy_of(pod).off or in_force(rules, rule, pod) is None else "condition"


def is_known(rules: Rules, tick: Tick, *, name: str, device: str, pod_uid: str) -> bool:
    """Whether a condition that was not found in a tick is known not to hold.

    It is not known if the condition is about a pod and the tick does not say who holds what, or if the tick has none of
    the values that the condition is judged by.
    """
    rule = next((rule for rule in rules.rules if rule.name == name), None)
    if rule is None:
        return True
    if tick.attribution == "none" and (pod_uid or rule.kind in ("held_idle", "policy_invalid")):
        return False
    values = _VALUES.get(rule.kind, ())
    found = next((one for one in tick.devices if one.uuid == device), None)
    return not values or found is None or any(getattr(found.metrics, value) is not None for value in values)


_VALUES: dict[Kind, tuple[str, ...]] = {
    "row_remap_failure": ("row_remap_failure",),
    "row_remap_pending": ("row_remap_pending", "retired_pages_pending"),
    "thermal_slowdown": ("clock_event_reasons",),
    "power_brake": ("clock_event_reasons",),
}
"""The values of the tick that a kind is judged by."""


def _blind(rule: Rule, view: View, found: list[Finding]) -> None:
    """A device that does not answer says nothing."""
    found.extend(unseen(rule, view.device.uuid, view.seen))


def _missing(rules: Rules, tick: Tick, memory: Memory, found: list[Finding]) -> None:
    """The devices of the inventory that the tick does not have. Of a MIG device its GPU is what is missing."""
    present = {device.uuid for device in tick.devices}
    for uuid, seen in memory.devices.items():
        if uuid in present:
            continue
        for kind in (*_BLIND, "lost", "not_answering") if tick.ts_ms - seen.missing_ms <= BLIND_MS else ():
            for rule in rules.of(kind):
                found.extend(unseen(rule, uuid, seen))
        if seen.parent is None:
            ruled = [in_force(rules, rule, None) for rule in rules.of("missing")]
            found.extend(Finding(rule, uuid, facts=Facts(None, seen)) for rule in ruled if rule is not None)


_ALWAYS: dict[Kind, Condition] = {"xid": faults.xid, "policy_invalid": holders.policy_invalid}
_OK: dict[Kind, Condition] = {
    "held_idle": holders.held_idle,
    "used_unallocated": holders.used_unallocated,
    "attribution_conflict": holders.attribution_conflict,
    "ecc_uncorrectable": faults.ecc_uncorrectable,
    "row_remap_failure": faults.row_remap_failure,
    "row_remap_pending": faults.row_remap_pending,
    "thermal_slowdown": faults.thermal_slowdown,
    "power_brake": faults.power_brake,
    "nvlink_errors": faults.nvlink_errors,
}
_COUNTED: tuple[Kind, ...] = ("ecc_uncorrectable", "nvlink_errors")
_BLIND: tuple[Kind, ...] = tuple(_OK)
_BY_STATE: dict[str, dict[Kind, Condition]] = {
    "ok": _ALWAYS | _OK,
    "lost": _ALWAYS | dict.fromkeys(_BLIND, _blind) | {"lost": faults.lost},
    "timeout": _ALWAYS | dict.fromkeys(_BLIND, _blind) | {"lost": faults.lost, "not_answering": faults.not_answering},
}

_UNKNOWN_STATE = _ALWAYS | _OK | dict.fromkeys(("lost", "not_answering"), _blind)
"""Of a device in a state that a later version knows: its values are judged, and whether it works is not known."""


def _judges(rules: Rules, state: str, counted: bool) -> list[tuple[Condition, tuple[Rule, ...]]]:
    """What judges a device in a state, and by which rules; ``counted``: it has had errors within a minute."""
    state = state if state in _BY_STATE else ""
    judges: list[tuple[Condition, tuple[Rule, ...]]] | None = rules.plan.get((state, counted))
    if judges is None:
        quiet = _COUNTED if not counted and state in ("ok", "") else ()
        kinds = {kind: judge for kind, judge in _BY_STATE.get(state, _UNKNOWN_STATE).items() if kind not in quiet}
        judges = [(judge, rules.by_kind[kind]) for kind, judge in kinds.items() if kind in rules.by_kind]
        rules.plan[state, counted] = judges
    return judges
