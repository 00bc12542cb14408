"""The conditions: which of the rules hold in a node's tick. Pure.

In: the rules, a node's tick, and what is remembered of the node. Out: findings, and what is remembered now. A condition
is a function for each kind of rule, called with a device of the tick; the tables below say in which of its states.
"""

from collections.abc import Callable, Iterable

from delivery.policies import Policy
from streams.alerts.conditions.finding import (
    CONFLICTS,
    NO_WINDOWS,
    NVLINK_ERRORS,
    Facts,
    Finding,
    Pod,
    View,
    held_memory,
    of_device,
    sole,
    sole_pod,
    uid_and_key,
    unseen,
    view_of,
)
from streams.alerts.memory import XID, Memory, Seen, remember, within
from streams.alerts.rules.rule import WASTE, WINDOWED, Kind, Rule, Rules, has_policy, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import STEP_MS, Use, mean_of, pod_name
from streams.alerts.xids import code_of, of_code
from topics.alerts import Tracked
from topics.attributed import CRASH_LOOP, Holder
from topics.idleness import Work, is_idle, part_of, ran_of, rest_of, work_of

Condition = Callable[[Rule, View, list[Finding]], None]  # adds to the findings what a rule finds on a device
_PLANS = 1000  # are remembered: a state is a text that a later version may have many of
BLIND_MS = 600_000  # for how long after a device went missing it is not known whether what was found on it still holds
HW_THERMAL, SW_THERMAL, HW_POWER_BRAKE = 0x40, 0x20, 0x80  # bits of clock_event_reasons, as nvml.h has them

IDLE_MS = 900_000  # a device that did nothing for so long is idle, and not only underused

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
    now = remember(memory, tick, rules.forget_ms, rules.wanted)
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


def because(rules: Rules, tick: Tick, one: Tracked, memory: Memory = _NOTHING) -> str:
    """Why what held is not found any more, as ``resolved_because`` has it."""
    rule = rules.by_name.get(one.name)
    if rule is None:
        return "rule_removed"
    if one.device and all(device.uuid != one.device for device in tick.devices):
        return "device_removed"
    if not (one.pod_uid or rule.kind in WASTE):
        return "condition"
    holders = [holder for device in tick.devices if one.device in ("", device.uuid) for holder in device.holders]
    uid_or_name = one.pod_uid or one.key
    pod = next((holder for holder in holders if uid_or_name in uid_and_key(holder)), None)
    if pod is None:
        return "pod_ended"
    silenced = is_silenced(rules, pod, memory.devices.get(one.device, _UNSEEN), tick)
    return "policy" if silenced or rules.in_force(rule, pod) is None else "condition"


def is_silenced(rules: Rules, holder: Holder, seen: Seen, tick: Tick) -> bool:
    """Whether a pod's policy silences what is about its doing on a device: that counts for so long after it got it."""
    if not policy_of(holder).off:
        return False
    name = (holder.pod_uid, holder.pod, holder.namespace)
    held = [pod.since_ms for pod in seen.pods if (pod.pod_uid, pod.pod, pod.namespace) == name]
    longest_ms = rules.bounds.longest(holder.namespace)
    return not held or any(tick.ts_ms - since_ms < longest_ms for since_ms in held)


def is_known(rules: Rules, tick: Tick, one: Tracked, memory: Memory = _NOTHING) -> bool:
    """Whether a condition that was not found in a tick is known not to hold.

    It is not known if the condition is about a pod and the tick does not say who holds what, if the tick has none of
    the values that the condition is judged by, or if a window is not over: a clock was set back.
    """
    rule = rules.by_name.get(one.name)
    if rule is None:
        return True
    if tick.attribution == "none" and (one.pod_uid or rule.kind in (*WASTE, "policy_invalid")):
        return False
    found = next((device for device in tick.devices if device.uuid == one.device), None)
    if rule.kind in WINDOWED:
        name, seen = one.pod_uid or one.key, memory.devices.get(one.device, _UNSEEN)
        use = next((use for use in memory.uses.get(one.device, ()) if use.pod == name), None)
        if use is not None and mean_of(use, rule.window_ms // STEP_MS) is None:
            return False
        for holder in [holder for holder in found.holders if pod_name(holder) == name] if found is not None else ():
            is_judged = not holder.observed and not is_silenced(rules, holder, seen, tick)
            ruled = rules.in_force(rule, holder) if is_judged else None
            if ruled is not None and not _held_long(ruled, policy_of(holder, rules.bounds), name, seen, tick):
                return False
    values = _VALUES.get(rule.kind, ())
    return not values or found is None or any(getattr(found.metrics, value) is not None for value in values)


# -- who holds a device, and what they do with it


def held_idle(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod that does nothing with a device that it was given.
    It is not known within the pod's grace: after a node's clock was set back, an alert that fires goes on."""
    if not view.pods:
        if view.tick.attribution == "none":
            holds = False if view.work.most >= rule.least_work else None
            found.extend(one._replace(holds=holds) for one in unseen(rule, view.device.uuid, view.seen))
        return
    if len(view.pods) == 1 and view.work.most >= rule.most_work:
        return
    parts = [part_of([holder.parts for holder in pod.holders]) for pod in view.pods]
    ran, rest = ran_of(view.device.processes or ()), None
    if len(parts) > 1:
        strangers = not ran.keys() <= {pod.holders[0].pod_uid for pod in view.pods} - {None}
        rest = rest_of(view.device.unattributed, view.work, parts, strangers=strangers)
    for pod, part in zip(view.pods, parts, strict=True):
        holder = pod.holders[0]
        if holder.observed or (part is not None and part >= rule.most_work):
            continue
        if pod.policy.off and is_silenced(view.rules, holder, view.seen, view.tick):
            continue
        ruled = view.rules.in_force(rule, holder, policy=pod.policy)
        done = ran.get(holder.pod_uid, 0.0) if holder.pod_uid is not None else 0.0
        idle = False if ruled is None else is_idle(ruled.idle_below, view.work, part, done, rest)
        if ruled is None or idle is False:
            continue
        name = (holder.pod_uid, holder.pod, holder.namespace)
        held = [one for one in view.seen.pods if (one.pod_uid, one.pod, one.namespace) == name]
        since_ms = (held[0].since_ms if held else 0) + ruled.grace_ms
        holds = idle if view.tick.ts_ms >= since_ms else None
        uid, key = uid_and_key(holder)
        facts = Facts(view.device, None, pod.holders, len(view.pods))
        found.append(Finding(ruled, view.device.uuid, uid, key, holds, since_ms, facts=facts))


def stalled(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod's GPU that is busy by its utilization, draws little power, and whose SMs and tensor cores do little.

    A kernel that waits for its peers is such work. A MIG device has no power of its own, and of pods that share a GPU
    it is not known whose kernel waits: of both nothing is found.
    """
    metrics = view.device.metrics
    if metrics.gpu_utilization_ratio is not None and metrics.gpu_utilization_ratio < rule.least_used:
        return
    holder = sole(view)
    if view.device.mig is not None or holder is None or holder.observed:
        return
    ruled = view.rules.in_force(rule, holder)
    if ruled is None:
        return
    used, power, limit = metrics.gpu_utilization_ratio, metrics.power_watts, metrics.power_limit_watts
    works = used is not None and used < ruled.used_above
    works |= power is not None and bool(limit) and power >= ruled.power_below * (limit or 0)
    works |= (metrics.sm_active_ratio or 0.0) >= ruled.sm_active_below
    works |= (metrics.tensor_active_ratio or 0.0) >= ruled.tensor_active_below
    if works or is_silenced(view.rules, holder, view.seen, view.tick):
        return
    activity = metrics.sm_active_ratio if metrics.sm_active_ratio is not None else metrics.tensor_active_ratio
    known = used is not None and power is not None and bool(limit) and activity is not None
    uid, key = uid_and_key(holder)
    facts = Facts(view.device, None, view.pods[0].holders)
    found.append(Finding(ruled, view.device.uuid, uid, key, True if known else None, facts=facts))


def underused(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod that hardly used a device in the window, and does work now and then: what does nothing at all is idle."""
    for ruled, pod, use, mean in _hardly_used(rule, view):
        if view.tick.ts_ms - use.worked_ms < IDLE_MS:
            found.append(_of_pod(ruled, view, pod, value=mean))


def memory_hoarded(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod that holds much of a device's memory, and hardly used the device in the window."""
    total = view.device.metrics.memory_total_bytes
    for ruled, pod, _, mean in _hardly_used(rule, view) if total else ():
        held = held_memory(pod.holders, view.device, len(view.pods))
        if held is None or held >= ruled.memory_above * (total or 0.0):
            found.append(_of_pod(ruled, view, pod, value=mean, holds=None if held is None else True))


def _hardly_used(rule: Rule, view: View) -> Iterable[tuple[Rule, Pod, Use, float]]:
    """The pods that had a device for all of a rule's window and hardly used it in that, each with how much."""
    for pod in view.pods:
        holder, name = pod.holders[0], pod_name(pod.holders[0])
        use = next((one for one in view.uses if one.pod == name and one.low), None)
        if use is None or holder.observed or (ruled := view.rules.in_force(rule, holder)) is None:
            continue
        mean = mean_of(use, ruled.window_ms // STEP_MS)
        long_enough = _held_long(ruled, pod.policy, name, view.seen, view.tick)
        silenced = pod.policy.off and is_silenced(view.rules, holder, view.seen, view.tick)
        if mean is not None and mean < ruled.used_below and long_enough and not silenced:
            yield ruled, pod, use, mean


def _held_long(ruled: Rule, policy: Policy, pod: str, seen: Seen, tick: Tick) -> bool:
    """Whether a pod has had a device for all of a rule's window, or for its ``idle-after`` if that is longer."""
    least_ms = max(ruled.window_ms, policy.idle_after_ms or 0)
    return any(pod_name(one) == pod and tick.ts_ms - one.since_ms >= least_ms for one in seen.pods)


def _of_pod(
    ruled: Rule, view: View, pod: Pod, *, value: float | None = None, holds: bool | None = True, text: str = ""
) -> Finding:
    facts = Facts(view.device, None, pod.holders, len(view.pods), text=text)
    return Finding(ruled, view.device.uuid, *uid_and_key(pod.holders[0]), holds, value=value, facts=facts)


def crash_loop(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod of which a container crashes again and again, and that keeps its device while it waits."""
    for pod in view.pods:
        holder = pod.holders[0]
        if holder.waiting != CRASH_LOOP or holder.observed:
            continue
        ruled, restarts = view.rules.in_force(rule, holder), holder.restarts or 0
        if ruled is None or restarts < ruled.restarts or is_silenced(view.rules, holder, view.seen, view.tick):
            continue
        found.append(_of_pod(ruled, view, pod, text=str(restarts)))


def used_unallocated(rule: Rule, view: View, found: list[Finding]) -> None:
    """Work on a device that neither the kubelet nor a batch system gave to anybody."""
    device = view.device
    if not view.whole or device.jobs or not all(holder.observed for holder in device.holders):
        return
    holds = True if view.work.most >= rule.used_above and view.tick.attribution != "none" else None
    if view.tick.attribution != "none" and view.work.measured and not holds:
        return
    if (ruled := view.rules.in_force(rule, None)) is not None:
        facts = Facts(device, None, device.holders)
        found.append(Finding(ruled, device.uuid, holds=holds, value=view.work.most, facts=facts))


def attribution_conflict(rule: Rule, view: View, found: list[Finding]) -> None:
    device = view.device
    blind = device.processes is None or device.info.processes_visible == "false" or view.tick.attribution == "none"
    if not blind and device.conflict is None:
        return
    ruled = view.rules.in_force(rule, sole(view))
    if ruled is None:
        return
    if blind:
        found.extend(Finding(ruled, device.uuid, key=key, holds=None) for key in CONFLICTS)
    else:
        facts = Facts(device, None, device.holders)
        found.append(Finding(ruled, device.uuid, key=device.conflict or "", facts=facts))


def policy_invalid(rule: Rule, view: View, found: list[Finding]) -> None:
    """Each mistake of a pod once, whatever devices it holds."""
    for pod in view.pods:
        for mistake in pod.policy.mistakes:
            uid, name = uid_and_key(pod.holders[0])
            key = f"{name} {mistake.name}".strip()
            ruled = view.rules.in_force(rule, pod.holders[0])
            if ruled is not None and (rule.name, uid, key) not in [(f.rule.name, f.pod_uid, f.key) for f in found]:
                found.append(Finding(ruled, "", uid, key, facts=Facts(None, None, pod.holders, text=mistake.text)))


# -- what is wrong with a device


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


# -- which conditions judge a device, by its state

_ALWAYS: dict[Kind, Condition] = {"xid": xid, "policy_invalid": policy_invalid}
_OK: dict[Kind, Condition] = {
    "held_idle": held_idle,
    "stalled": stalled,
    "underused": underused,
    "memory_hoarded": memory_hoarded,
    "crash_loop": crash_loop,
    "used_unallocated": used_unallocated,
    "attribution_conflict": attribution_conflict,
    "ecc_uncorrectable": ecc_uncorrectable,
    "row_remap_failure": row_remap_failure,
    "row_remap_pending": row_remap_pending,
    "thermal_slowdown": thermal_slowdown,
    "power_brake": power_brake,
    "nvlink_errors": nvlink_errors,
}
_BLIND = _ALWAYS | dict.fromkeys(_OK, blind) | {"lost": lost}
_BY_STATE: dict[str, dict[Kind, Condition]] = {
    "ok": _ALWAYS | _OK,
    "lost": _BLIND,
    "timeout": _BLIND | {"not_answering": not_answering},
}
_UNKNOWN_STATE = _ALWAYS | _OK | dict.fromkeys(("lost", "not_answering"), blind)
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
            kind: one for kind, one in judges.items() if one is blind or kind not in _BY_SIGN or signs & _BY_SIGN[kind]
        }
        found = [(one, rules.by_kind[kind]) for kind, one in kinds.items() if kind in rules.by_kind]
        if len(rules.plan) < _PLANS:
            rules.plan[state, signs] = found
    return found
