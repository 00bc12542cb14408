"""Conditions of who holds a device, and what they do with it. Pure."""

from streams.alerts.conditions.finding import (
    CONFLICTS,
    Facts,
    Finding,
    Pod,
    View,
    identity,
    in_force,
    sole,
    unseen,
    video,
)
from streams.alerts.rules.rule import Rule


def held_idle(rule: Rule, view: View, found: list[Finding]) -> None:
    """A pod's grace is no evidence: of one that is firing already, the node's clock was set back."""
    if not view.pods:
        if view.tick.attribution == "none":
            holds = False if view.work >= rule.least_work else None
            found.extend(one._replace(holds=holds) for one in unseen(rule, view.device.uuid, view.seen))
        return
    if len(view.pods) == 1 and view.work >= rule.most_work:
        return
    for pod in view.pods:
        holder = pod.holders[0]
        if holder.observed or pod.policy.off:
            continue
        ruled = in_force(view.rules, rule, holder, policy=pod.policy)
        idle = False if ruled is None else _idle(ruled.idle_below, view, pod)
        if ruled is None or idle is False:
            continue
        name = (holder.pod_uid, holder.pod, holder.namespace)
        held = [one for one in view.seen.pods if (one.pod_uid, one.pod, one.namespace) == name]
        since_ms = (held[0].since_ms if held else 0) + ruled.grace_ms
        holds = idle if view.tick.ts_ms >= since_ms else None
        uid, key = identity(holder)
        facts = Facts(view.device, None, pod.holders, len(view.pods))
        found.append(Finding(ruled, view.device.uuid, uid, key, holds, since_ms, facts=facts))


def _idle(below: float, view: View, pod: Pod) -> bool | None:
    """Whether a pod does nothing with a device; None: it is not known.

    A pod is judged by its own part of the device's work, whoever shares the device, and by what its processes do. The
    parts of all pods and the rest, which is nobody's, are the device's work. The rest may be the pod's own, and so is
    all that the device does if its part is not known.
    """
    device, part, uid = view.device, _part(pod), pod.holders[0].pod_uid
    if (part or 0.0) >= below:
        return False
    processes = [one for one in device.processes or () if uid is not None and one.pod_uid == uid]
    if sum([one.sm_utilization_ratio or 0.0 for one in processes]) >= below:
        return False
    if view.work < below:
        return True if view.measured else None
    if len(view.pods) == 1:
        return False
    rest = device.unattributed.utilization_ratio if device.unattributed is not None else None
    if rest is None:
        rest = max(0.0, view.work - sum([_part(one) or 0.0 for one in view.pods]))
    return True if part is not None and rest < below and video(device) < below else None


def _part(pod: Pod) -> float | None:
    """A pod's part of a device's utilization."""
    parts = [holder.parts for holder in pod.holders if holder.parts is not None]
    known = [part.utilization_ratio for part in parts if part.utilization_ratio is not None]
    return sum(known) if known else None


def used_unallocated(rule: Rule, view: View, found: list[Finding]) -> None:
    """Work on a device that neither the kubelet nor a batch system gave to anybody."""
    device = view.device
    if not view.whole or device.jobs or not all(holder.observed for holder in device.holders):
        return
    holds = True if view.work >= rule.used_above and view.tick.attribution != "none" else None
    if view.tick.attribution != "none" and view.measured and not holds:
        return
    if (ruled := in_force(view.rules, rule, None)) is not None:
        facts = Facts(device, None, device.holders)
        found.append(Finding(ruled, device.uuid, holds=holds, value=view.work, facts=facts))


def attribution_conflict(rule: Rule, view: View, found: list[Finding]) -> None:
    device = view.device
    blind = device.processes is None or device.info.processes_visible == "false" or view.tick.attribution == "none"
    if not blind and device.conflict is None:
        return
    ruled = in_force(view.rules, rule, sole(view))
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
            uid, name = identity(pod.holders[0])
            key = f"{name} {mistake.name}".strip()
            ruled = in_force(view.rules, rule, pod.holders[0])
            if ruled is not None and (rule.name, uid, key) not in [(f.rule.name, f.pod_uid, f.key) for f in found]:
                found.append(Finding(ruled, "", uid, key, facts=Facts(None, None, pod.holders, text=mistake.text)))
