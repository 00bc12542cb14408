"""What of a tick is as a rule says. Pure.

In: the rules, a node's tick, and what is remembered of the node. Out: findings, and what is remembered now.

A finding says that a condition holds, or (``holds`` None) that nothing tells whether it does; what is not found does
not hold. Only a device whose state is ``ok`` says anything of itself; no evidence is not idleness.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from streams.alerts.memory import XID, HeldBy, Memory, Seen, increases, moving, remember, xid_base
from streams.alerts.policy import DEFAULT, Policy, policy_of
from streams.alerts.rule import Kind, Rule, Rules, Subject
from streams.alerts.tick import Device, Tick
from streams.alerts.xids import of_code
from topics.attributed import Holder

HW_THERMAL, SW_THERMAL, HW_POWER_BRAKE = 0x40, 0x20, 0x80
"""Bits of clock_event_reasons, as nvml.h has them."""

BLIND_MS = 600_000
"""For how long what was found on a device outlasts that the device is missing."""

CONFLICTS = ("unallocated_process", "no_pod")
"""What ``conflict`` of a device may be."""


class Facts(NamedTuple):
    """What a finding rests on: the device of the tick or, where the tick does not have it, of the inventory; the pods
    that it is about (one) or that hold the device; the rest by kind."""

    device: Device | None = None
    seen: Seen | None = None
    pods: tuple[Holder, ...] = ()
    sharing: int = 1
    text: str = ""


class Finding(NamedTuple):
    """A condition that holds, or of which there is no evidence (``holds`` None).

    Where ``holds`` is False, work was seen on a device of which it is not known who holds it now.

    It is told from others by the rule's name, ``device`` ("" is the node), ``pod_uid`` and ``key``. It can't have held
    before ``since_ms``. ``value`` is the figure that the rule judges; None: the seconds for which it has held. An
    ``event`` is a happening: it fires at once.
    """

    rule: Rule
    device: str = ""
    pod_uid: str = ""
    key: str = ""
    holds: bool | None = True
    since_ms: int = 0
    value: float | None = None
    event: bool = False
    facts: Facts = Facts()


class Pod(NamedTuple):
    """A pod that holds a device, by some of its containers, and what it wants."""

    holders: tuple[Holder, ...]
    policy: Policy


class View(NamedTuple):
    """A device of a tick, as it was remembered and as it is, and what of it says whether it works.

    ``work`` is the most that any measure of activity shows, ``measured`` whether one shows all of the device's.
    """

    rules: Rules
    tick: Tick
    device: Device
    before: Memory
    seen: Seen
    pods: tuple[Pod, ...]
    work: float
    measured: bool
    whole: bool


Judge = Callable[[Rule, View, list[Finding]], None]


def evaluate(rules: Rules, tick: Tick, memory: Memory) -> tuple[list[Finding], Memory]:
    """What is found in a tick. The memory is the same object where nothing of it changed."""
    now = remember(memory, tick, rules.forget_ms)
    found: list[Finding] = []
    parents = {device.mig.parent_uuid for device in tick.devices if device.mig is not None}
    for device in tick.devices:
        seen = now.devices[device.uuid]
        view = _view(rules, tick, device, memory, seen, parents)
        for judge, ruled in _judges(rules, device.state, moving(memory.devices.get(device.uuid), seen)):
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
    holders = [h for d in tick.devices if device in ("", d.uuid) for h in d.holders if _identity(h) == (pod_uid, key)]
    if not holders:
        holders = [h for d in tick.devices if device in ("", d.uuid) for h in d.holders if h.pod_uid == pod_uid]
    if not holders:
        return "pod_ended"
    return "policy" if policy_of(holders[0]).off or _ruled(rules, rule, holders[0]) is None else "condition"


# -- what a device shows


def _view(rules: Rules, tick: Tick, device: Device, before: Memory, seen: Seen, parents: set[str]) -> View:
    metrics = device.metrics
    main = (
        metrics.gpu_utilization_ratio,
        metrics.gpu_utilization_max_ratio,
        metrics.graphics_engine_active_ratio,
        metrics.sm_active_ratio,
    )
    known = [ratio for ratio in main if ratio is not None]
    whole = device.mig is not None or (device.uuid not in parents and device.info.mig_mode != "enabled")
    return View(
        rules, tick, device, before, seen, _by_pod(device.holders), max(*known, _video(device), 0.0), bool(known), whole
    )


def _video(device: Device) -> float:
    """How busy the encoder or the decoder is."""
    return max(device.metrics.encoder_utilization_ratio or 0.0, device.metrics.decoder_utilization_ratio or 0.0)


def _by_pod(holders: tuple[Holder, ...]) -> tuple[Pod, ...]:
    """The holders of each pod: a pod may have several containers on a device."""
    if len(holders) < 2:
        return (Pod(holders, policy_of(holders[0])),) if holders else ()
    pods: dict[tuple[str, str, str | None], list[Holder]] = {}
    for holder in holders:
        pods.setdefault((holder.namespace, holder.pod, holder.pod_uid), []).append(holder)
    return tuple([Pod(tuple(containers), policy_of(containers[0])) for containers in pods.values()])


def _identity(holder: Holder) -> tuple[str, str]:
    """A pod's uid and key in findings: its name is the key of one whose uid is not known."""
    return (holder.pod_uid, "") if holder.pod_uid else ("", f"{holder.namespace}/{holder.pod}")


def _ruled(
    rules: Rules, rule: Rule, pod: Holder | None, *, xid: int | None = None, policy: Policy = DEFAULT
) -> Rule | None:
    """The rule as it is for a pod; None: it is disabled there."""
    if not rule.overrides and policy.idle_after_ms is None:
        return rule
    if pod is None:
        return rules.resolved(rule, Subject(xid=xid, labels=rule.label_names.read({}, {})))
    kind, workload = (pod.workload.kind, pod.workload.name) if pod.workload is not None else (None, None)
    labels = rule.label_names.read(pod.labels, pod.namespace_labels)
    return rules.resolved(rule, Subject(pod.namespace, kind, workload, labels, xid, policy.idle_after_ms))


def _sole(view: View) -> Holder | None:
    """The one pod that holds the device."""
    return view.pods[0].holders[0] if len(view.pods) == 1 else None


# -- who holds it, and what they do


def _held_idle(rule: Rule, view: View, found: list[Finding]) -> None:
    if not view.pods:
        if view.tick.attribution == "none":
            holds = False if view.work >= rule.least_work else None
            found.extend(one._replace(holds=holds) for one in _unseen(rule, view.device.uuid, view.seen))
        return
    if len(view.pods) == 1 and view.work >= rule.most_work:
        return
    for pod in view.pods:
        holder = pod.holders[0]
        if holder.observed or pod.policy.off:
            continue
        ruled = _ruled(view.rules, rule, holder, policy=pod.policy)
        idle = False if ruled is None else _idle(ruled.idle_below, view, pod)
        if ruled is None or idle is False:
            continue
        since_ms = _since(view.seen.pods, holder) + ruled.grace_ms
        if view.tick.ts_ms >= since_ms:
            uid, key = _identity(holder)
            facts = Facts(view.device, None, pod.holders, len(view.pods))
            found.append(Finding(ruled, view.device.uuid, uid, key, idle, since_ms, facts=facts))


def _idle(below: float, view: View, pod: Pod) -> bool | None:
    """Whether a pod does nothing with a device; None: nothing tells."""
    own = _part(pod)
    if len(view.pods) > 1:
        return _idle_share(below, view, own)
    if view.work >= below or (own or 0.0) >= below or _processes(view.device, pod.holders[0]) >= below:
        return False
    return True if view.measured else None


def _idle_share(below: float, view: View, own: float | None) -> bool | None:
    """Of a shared device a pod's own part counts. Where work was done that is in no other pod's part, it may be its."""
    if own is None:
        return None
    if own >= below:
        return False
    if view.work < below:
        return True if view.measured else None
    rest = view.device.unattributed.utilization_ratio if view.device.unattributed is not None else None
    others = any((_part(other) or 0.0) >= below for other in view.pods)
    return True if others and (rest or 0.0) < below and _video(view.device) < below else None


def _part(pod: Pod) -> float | None:
    """A pod's part of a device's utilization."""
    parts = [holder.parts for holder in pod.holders if holder.parts is not None]
    known = [part.utilization_ratio for part in parts if part.utilization_ratio is not None]
    return sum(known) if known else None


def _processes(device: Device, pod: Holder) -> float:
    """What a pod's processes use of a device, by their own figures."""
    if not device.processes or pod.pod_uid is None:
        return 0.0
    return sum([p.sm_utilization_ratio or 0.0 for p in device.processes if p.pod_uid == pod.pod_uid])


def _since(pods: Iterable[HeldBy], pod: Holder) -> int:
    """The first tick in which the pod held the device."""
    for held in pods:
        if held.pod_uid == pod.pod_uid and held.pod == pod.pod and held.namespace == pod.namespace:
            return held.since_ms
    return 0


def _used_unallocated(rule: Rule, view: View, found: list[Finding]) -> None:
    """Work on a device that neither the kubelet nor a batch system gave to anybody."""
    device = view.device
    if not view.whole or device.jobs or not all(holder.observed for holder in device.holders):
        return
    holds = True if view.work >= rule.used_above and view.tick.attribution != "none" else None
    if view.tick.attribution != "none" and view.measured and not holds:
        return
    if (ruled := _ruled(view.rules, rule, None)) is not None:
        facts = Facts(device, None, device.holders)
        found.append(Finding(ruled, device.uuid, holds=holds, value=view.work, facts=facts))


def _attribution_conflict(rule: Rule, view: View, found: list[Finding]) -> None:
    device = view.device
    blind = device.processes is None or device.info.processes_visible == "false" or view.tick.attribution == "none"
    if not blind and device.conflict is None:
        return
    ruled = _ruled(view.rules, rule, _sole(view))
    if ruled is None:
        return
    if blind:
        found.extend(Finding(ruled, device.uuid, key=key, holds=None) for key in CONFLICTS)
    else:
        facts = Facts(device, None, device.holders)
        found.append(Finding(ruled, device.uuid, key=device.conflict or "", facts=facts))


def _policy_invalid(rule: Rule, view: View, found: list[Finding]) -> None:
    """Each mistake of a pod once, whatever devices it holds."""
    for pod in view.pods:
        for mistake in pod.policy.mistakes:
            uid, name = _identity(pod.holders[0])
            key = f"{name} {mistake.name}".strip()
            ruled = _ruled(view.rules, rule, pod.holders[0])
            if ruled is not None and (rule.name, uid, key) not in [(f.rule.name, f.pod_uid, f.key) for f in found]:
                found.append(Finding(ruled, "", uid, key, facts=Facts(None, None, pod.holders, text=mistake.text)))


# -- what is wrong with it


def _xid(rule: Rule, view: View, found: list[Finding]) -> None:
    device = view.device
    if not device.xids and not device.events:
        return
    for code, count in _xid_counts(view):
        _xid_of(rule, view, code, count, found)


def _xid_counts(view: View) -> Iterable[tuple[str, float]]:
    """How many XID errors of each code there are to tell: counted by the producer, else by events."""
    device, before = view.device, view.before
    remembered = before.devices.get(device.uuid) if before.run_id == view.tick.run_id else None
    for code, total in device.xids.items():
        yield code, increases(remembered, XID + code, total, base=xid_base(before, view.tick, device, code))
    events = [str(event.code) for event in device.events or () if event.kind == "xid" and event.code is not None]
    for code in dict.fromkeys(events):
        if code not in device.xids:
            yield code, float(events.count(code))


def _xid_of(rule: Rule, view: View, code: str, count: float, found: list[Finding]) -> None:
    if count <= 0:
        return
    number = int(code) if code.isascii() and code.isdigit() and len(code) < 7 else None
    pod, xid = _sole(view), of_code(number)
    ruled = _ruled(view.rules, rule, pod, xid=number)
    if ruled is None:
        return
    own = xid.kind == "application" and pod is not None
    if own and pod is not None and policy_of(pod).off:
        return
    found.append(
        Finding(
            ruled.with_severity(xid.kind),
            view.device.uuid,
            (pod.pod_uid or "") if own and pod is not None else "",
            code,
            value=count,
            event=True,
            facts=Facts(view.device, None, view.device.holders, text=code),
        )
    )


def _counter(view: View, names: Sequence[str]) -> float:
    """The most that any of these counters has risen."""
    seen, metrics = view.before.devices.get(view.device.uuid), view.device.metrics
    if seen is None:
        return 0.0
    return max(
        [increases(seen, name, value) for name in names if (value := getattr(metrics, name)) is not None], default=0.0
    )


def _ecc_uncorrectable(rule: Rule, view: View, found: list[Finding]) -> None:
    count = _counter(view, ("ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total"))
    if count >= rule.at_least:
        _device(rule, view, found, value=count, event=True)


def _nvlink_errors(rule: Rule, view: View, found: list[Finding]) -> None:
    recoveries = _counter(view, ("nvlink_recovery_errors_total",))
    if recoveries >= rule.recoveries:
        _device(rule, view, found, value=recoveries, event=True, key="recovery")
    for key in ("crc", "replay"):
        count = _counter(view, (f"nvlink_{key}_errors_total",))
        if count >= rule.at_least:
            _device(rule, view, found, value=count, key=key)


def _row_remap_failure(rule: Rule, view: View, found: list[Finding]) -> None:
    if view.device.metrics.row_remap_failure:
        _device(rule, view, found, value=view.device.metrics.row_remap_failure)


def _row_remap_pending(rule: Rule, view: View, found: list[Finding]) -> None:
    metrics = view.device.metrics
    if metrics.row_remap_pending or metrics.retired_pages_pending:
        _device(rule, view, found, value=1.0)


def _thermal_slowdown(rule: Rule, view: View, found: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & (HW_THERMAL | SW_THERMAL):
        _device(rule, view, found, value=view.device.metrics.temperature_celsius)


def _power_brake(rule: Rule, view: View, found: list[Finding]) -> None:
    reasons = view.device.metrics.clock_event_reasons
    if reasons and int(reasons) & HW_POWER_BRAKE:
        _device(rule, view, found, value=view.device.metrics.power_watts)


def _lost(rule: Rule, view: View, found: list[Finding]) -> None:
    _device(rule, view, found, holds=True if view.device.state == "lost" else None)


def _not_answering(rule: Rule, view: View, found: list[Finding]) -> None:
    if view.device.state == "timeout":
        _device(rule, view, found)


def _device(
    rule: Rule,
    view: View,
    found: list[Finding],
    *,
    holds: bool | None = True,
    value: float | None = None,
    event: bool = False,
    key: str = "",
) -> None:
    """A finding about a device, whoever holds it."""
    ruled = _ruled(view.rules, rule, _sole(view))
    if ruled is not None:
        facts = Facts(view.device, None, view.device.holders)
        found.append(Finding(ruled, view.device.uuid, key=key, holds=holds, value=value, event=event, facts=facts))


# -- what can't be said


def _blind(rule: Rule, view: View, found: list[Finding]) -> None:
    """A device that does not answer says nothing."""
    found.extend(_unseen(rule, view.device.uuid, view.seen))


def _unseen(rule: Rule, uuid: str, seen: Seen) -> list[Finding]:
    """No evidence, of everything that a rule may have found on a device."""
    if rule.kind == "held_idle":
        pods = [pod for pod in seen.pods if not pod.observed]
        ids = [(pod.pod_uid, "") if pod.pod_uid else ("", f"{pod.namespace}/{pod.pod}") for pod in pods]
        return [Finding(rule, uuid, uid, key, holds=None) for uid, key in ids]
    keys = CONFLICTS if rule.kind == "attribution_conflict" else ("",)
    return [Finding(rule, uuid, key=key, holds=None) for key in keys]


def _missing(rules: Rules, tick: Tick, memory: Memory, found: list[Finding]) -> None:
    """The devices of the inventory that the tick does not have. Of a MIG device its GPU is what is missing."""
    present = {device.uuid for device in tick.devices}
    for uuid, seen in memory.devices.items():
        if uuid in present:
            continue
        for kind in (*_BLIND, "lost", "not_answering") if tick.ts_ms - seen.missing_ms <= BLIND_MS else ():
            for rule in rules.of(kind):
                found.extend(_unseen(rule, uuid, seen))
        if seen.parent is None:
            ruled = [_ruled(rules, rule, None) for rule in rules.of("missing")]
            found.extend(Finding(rule, uuid, facts=Facts(None, seen)) for rule in ruled if rule is not None)


_ALWAYS: dict[Kind, Judge] = {"xid": _xid, "policy_invalid": _policy_invalid}
_OK: dict[Kind, Judge] = {
    "held_idle": _held_idle,
    "used_unallocated": _used_unallocated,
    "attribution_conflict": _attribution_conflict,
    "ecc_uncorrectable": _ecc_uncorrectable,
    "row_remap_failure": _row_remap_failure,
    "row_remap_pending": _row_remap_pending,
    "thermal_slowdown": _thermal_slowdown,
    "power_brake": _power_brake,
    "nvlink_errors": _nvlink_errors,
}
_COUNTED: tuple[Kind, ...] = ("ecc_uncorrectable", "nvlink_errors")
_BLIND: tuple[Kind, ...] = tuple(kind for kind in _OK if kind not in _COUNTED)
_BY_STATE: dict[str, dict[Kind, Judge]] = {
    "ok": _ALWAYS | _OK,
    "lost": _ALWAYS | dict.fromkeys(_BLIND, _blind) | {"lost": _lost},
    "timeout": _ALWAYS | dict.fromkeys(_BLIND, _blind) | {"lost": _lost, "not_answering": _not_answering},
}


def _judges(rules: Rules, state: str, counted: bool) -> list[tuple[Judge, tuple[Rule, ...]]]:
    """What judges a device in a state, and by which rules; ``counted``: a counter of it has risen."""
    judges: list[tuple[Judge, tuple[Rule, ...]]] | None = rules.plan.get((state, counted))
    if judges is None:
        kinds = {kind: judge for kind, judge in _BY_STATE[state].items() if counted or kind not in _COUNTED}
        judges = [(judge, rules.by_kind[kind]) for kind, judge in kinds.items() if kind in rules.by_kind]
        rules.plan[state, counted] = judges
    return judges
