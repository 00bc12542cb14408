"""Conditions about what pods do with the devices that they hold. Pure."""

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
    sole,
    uid_and_key,
    unseen,
)
from streams.alerts.memory import Seen
from streams.alerts.rules.rule import Rule
from streams.alerts.tick import Tick
from streams.alerts.uses import STEP_MS, Use, mean_of, pod_name
from topics.attributed import CRASH_LOOP
from topics.idleness import is_idle, part_of, rest_of, work_by_pod

IDLE_MS = 900_000  # a device that did nothing for so long is idle, and not only underused


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
    if min([part or 0.0 for part in parts]) >= rule.most_work:
        return
    ran, rest = work_by_pod(view.device.processes or ()), None
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
        held = [one for one in view.seen.pods if one.pod == holder.pod and one.namespace == holder.namespace]
        since_ms = next((one.since_ms for one in held if one.pod_uid == holder.pod_uid), 0) + ruled.grace_ms
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
        long_enough = held_long(ruled, pod.policy, name, view.seen, view.tick)
        silenced = pod.policy.off and is_silenced(view.rules, holder, view.seen, view.tick)
        if mean is not None and mean < ruled.used_below and long_enough and not silenced:
            yield ruled, pod, use, mean


def held_long(ruled: Rule, policy: Policy, pod: str, seen: Seen, tick: Tick) -> bool:
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
        for mistake in pod.policy.errors:
            uid, name = uid_and_key(pod.holders[0])
            key = f"{name} {mistake.name}".strip()
            ruled = view.rules.in_force(rule, pod.holders[0])
            if ruled is not None and (rule.name, uid, key) not in [(f.rule.name, f.pod_uid, f.key) for f in found]:
                found.append(Finding(ruled, "", uid, key, facts=Facts(None, None, pod.holders, text=mistake.text)))
