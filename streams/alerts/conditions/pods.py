"""Conditions about how pods use the devices that they hold. Pure."""

from collections.abc import Iterable

from delivery.policies import Policy
from streams.alerts.conditions.finding import (
    CONFLICTS,
    Facts,
    Finding,
    Pod,
    View,
    held_memory,
    is_silenced,
    sole_holder,
    uid_and_key,
    unknown_findings,
)
from streams.alerts.memory import DeviceMemory
from streams.alerts.rules.rule import Rule
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, Use, mean_of, pod_name
from topics.attributed import CRASH_LOOP
from topics.idleness import beside_parts, is_idle, part_of

IDLE_MS = 900_000  # a device that did no work for so long is idle, and not only underused


def held_idle(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A pod does no work on a device that it was given.
    Within the pod's grace there is no evidence: if a node's clock was set back, a firing alert goes on."""
    if not view.pods:
        if view.tick.attribution_of(view.device) == "none":
            holds = False if view.work.most >= rule.least_work else None
            unknown = unknown_findings(rule, view.device.uuid, view.remembered)
            findings.extend(finding._replace(holds=holds) for finding in unknown)
        return
    if len(view.pods) == 1 and view.work.most >= rule.most_work:
        return
    parts = [part_of(pod.holders) for pod in view.pods]
    if min([part or 0.0 for part in parts]) >= rule.most_work:
        return
    device = view.device
    uids_and_parts = [(pod.holders[0].pod_uid, part) for pod, part in zip(view.pods, parts, strict=True)]
    work_of_processes, rest = beside_parts(view.work, device.unattributed, device.processes, uids_and_parts)
    held_since_ms = {(held.namespace, held.pod, held.pod_uid): held.since_ms for held in view.remembered.pods}
    for pod, part, process_work in zip(view.pods, parts, work_of_processes, strict=True):
        holder = pod.holders[0]
        if holder.observed or (part is not None and part >= rule.most_work):
            continue
        if pod.policy.off and is_silenced(view.rules, holder, view.remembered, view.tick):
            continue
        effective_rule = view.rules.in_force(rule, holder, policy=pod.policy)
        idle = effective_rule is not None and is_idle(effective_rule.idle_below, view.work, part, process_work, rest)
        if effective_rule is None or idle is False:
            continue
        since_ms = held_since_ms.get((holder.namespace, holder.pod, holder.pod_uid), 0) + effective_rule.grace_ms
        holds = idle if view.tick.ts_ms >= since_ms else None
        uid, key = uid_and_key(holder)
        facts = Facts(device, None, pod.holders, len(view.pods))
        findings.append(Finding(effective_rule, device.uuid, uid, key, holds, since_ms, facts=facts))


def stalled(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A pod's GPU has a high utilization, draws little power, and its SMs and tensor cores do little work.

    So does a kernel that waits for its peers. MIG devices and shared GPUs are left out: a MIG device has no power
    reading of its own, and on a shared GPU it is not known whose kernel waits.
    """
    metrics = view.device.metrics
    if metrics.gpu_utilization_ratio is not None and metrics.gpu_utilization_ratio < rule.least_used:
        return
    holder = sole_holder(view)
    if view.device.mig is not None or holder is None or holder.observed:
        return
    effective_rule = view.rules.in_force(rule, holder)
    if effective_rule is None:
        return
    utilization, power, limit = metrics.gpu_utilization_ratio, metrics.power_watts, metrics.power_limit_watts
    is_working = utilization is not None and utilization < effective_rule.used_above
    is_working |= power is not None and bool(limit) and power >= effective_rule.power_below * (limit or 0)
    is_working |= (metrics.sm_active_ratio or 0.0) >= effective_rule.sm_active_below
    is_working |= (metrics.tensor_active_ratio or 0.0) >= effective_rule.tensor_active_below
    if is_working or is_silenced(view.rules, holder, view.remembered, view.tick):
        return
    activity = metrics.sm_active_ratio if metrics.sm_active_ratio is not None else metrics.tensor_active_ratio
    is_measured = utilization is not None and power is not None and bool(limit) and activity is not None
    findings.append(_pod_finding(effective_rule, view, view.pods[0], holds=True if is_measured else None))


def underused(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A pod hardly used a device in the window, but has worked lately: one that does no work at all is idle."""
    for effective_rule, pod, use, mean in _little_used_pods(rule, view):
        if view.tick.ts_ms - use.worked_ms < IDLE_MS:
            findings.append(_pod_finding(effective_rule, view, pod, value=mean))


def memory_hoarded(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A pod holds much of a device's memory, and hardly used the device in the window."""
    total = view.device.metrics.memory_total_bytes
    for effective_rule, pod, _, mean in _little_used_pods(rule, view) if total else ():
        used = held_memory(pod.holders, view.device, len(view.pods))
        if used is None or used >= effective_rule.memory_above * (total or 0.0):
            findings.append(_pod_finding(effective_rule, view, pod, value=mean, holds=None if used is None else True))


def _little_used_pods(rule: Rule, view: View) -> Iterable[tuple[Rule, Pod, Use, float]]:
    """The pods that had a device for all of a rule's window and hardly used it, each with its rule and its mean use."""
    for pod in view.pods:
        holder, name = pod.holders[0], pod_name(pod.holders[0])
        use = next((use for use in view.uses if use.pod == name and use.low), None)
        if use is None or holder.observed or (effective_rule := view.rules.in_force(rule, holder)) is None:
            continue
        mean = mean_of(use.marks, effective_rule.window_ms // STEP_MS)
        long_enough = held_whole_window(effective_rule, pod.policy, name, view.remembered, view.tick)
        silenced = pod.policy.off and is_silenced(view.rules, holder, view.remembered, view.tick)
        if mean is not None and mean < effective_rule.used_below and long_enough and not silenced:
            yield effective_rule, pod, use, mean


def held_whole_window(effective_rule: Rule, policy: Policy, pod: str, remembered: DeviceMemory, tick: Tick) -> bool:
    """Whether a pod has had a device for all of a rule's window, or for its ``idle-after`` if that is longer."""
    least_ms = max(effective_rule.window_ms, policy.idle_after_ms or 0)
    return any(pod_name(holding) == pod and tick.ts_ms - holding.since_ms >= least_ms for holding in remembered.pods)


def _pod_finding(
    effective_rule: Rule, view: View, pod: Pod, *, value: float | None = None, holds: bool | None = True, text: str = ""
) -> Finding:
    facts = Facts(view.device, None, pod.holders, len(view.pods), text=text)
    return Finding(effective_rule, view.device.uuid, *uid_and_key(pod.holders[0]), holds, value=value, facts=facts)


def crash_loop(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A container of a pod is in CrashLoopBackOff, and the pod keeps its device while the container waits."""
    for pod in view.pods:
        holder = pod.holders[0]
        if holder.waiting != CRASH_LOOP or holder.observed:
            continue
        effective_rule, restarts = view.rules.in_force(rule, holder), holder.restarts or 0
        if effective_rule is None or restarts < effective_rule.restarts:
            continue
        if not is_silenced(view.rules, holder, view.remembered, view.tick):
            findings.append(_pod_finding(effective_rule, view, pod, text=str(restarts)))


def used_unallocated(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A device works that neither the kubelet nor a batch system gave to anybody."""
    device = view.device
    if not view.whole or device.jobs or not all(holder.observed for holder in device.holders):
        return
    holders_known = view.tick.attribution_of(device) != "none"
    holds = True if view.work.most >= rule.used_above and holders_known else None
    if holders_known and view.work.measured and not holds:
        return
    if (effective_rule := view.rules.in_force(rule, None)) is not None:
        facts = Facts(device, None, device.holders)
        findings.append(Finding(effective_rule, device.uuid, holds=holds, value=view.work.most, facts=facts))


def attribution_conflict(rule: Rule, view: View, findings: list[Finding]) -> None:
    device = view.device
    unknown_holders = view.tick.attribution_of(device) == "none"
    no_evidence = device.processes is None or device.info.processes_visible == "false" or unknown_holders
    if not no_evidence and device.conflict is None:
        return
    effective_rule = view.rules.in_force(rule, sole_holder(view))
    if effective_rule is None:
        return
    if no_evidence:
        findings.extend(Finding(effective_rule, device.uuid, key=key, holds=None) for key in CONFLICTS)
    else:
        facts = Facts(device, None, device.holders)
        findings.append(Finding(effective_rule, device.uuid, key=device.conflict or "", facts=facts))


def policy_invalid(rule: Rule, view: View, findings: list[Finding]) -> None:
    """A pod's policy has errors. Each is reported once, on however many devices."""
    for pod in view.pods:
        for error in pod.policy.errors:
            uid, name = uid_and_key(pod.holders[0])
            key = f"{name} {error.name}".strip()
            effective_rule = view.rules.in_force(rule, pod.holders[0])
            if effective_rule is not None and (rule.name, uid, key) not in [
                (finding.rule.name, finding.pod_uid, finding.key) for finding in findings
            ]:
                facts = Facts(None, None, pod.holders, text=error.text)
                findings.append(Finding(effective_rule, "", uid, key, facts=facts))
