"""Findings: the conditions that hold in a tick; and the view of a device by which they are found. Pure.

A finding says that a condition holds or, if ``holds`` is None, that there is no evidence. A condition without a finding
does not hold. Only a device whose state is ``ok`` gives evidence about itself; a device without evidence is not idle.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from delivery.policies import Policy
from streams.alerts.memory import DeviceMemory, ErrorWindows, Memory, PodMemory
from streams.alerts.rules.rule import WASTE, Rule, Rules, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import Uses
from topics.attributed import Holder, by_pod
from topics.idleness import Work

CONFLICTS = ("unallocated_process", "no_pod")  # the values of a device's ``conflict``
NVLINK_ERRORS = ("crc", "replay", "recovery")  # the errors that an NVLink counts
_KEYS_BY_KIND = {
    "attribution_conflict": CONFLICTS,
    "nvlink_errors": NVLINK_ERRORS,
}  # the keys of a kind's findings; for others only ""


class Facts(NamedTuple):
    """The evidence of a finding, for the texts of its alert.

    ``device`` is the device of the tick, or ``remembered`` the one of the memory if the tick does not have it. ``pods``
    are the holders of the pod that it is about, or of all pods that hold the device. ``sharing`` is the number of pods
    that share the device. ``text`` is by kind: an XID code, a number of restarts, an error in a policy.
    """

    device: Device | None = None
    remembered: DeviceMemory | None = None
    pods: tuple[Holder, ...] = ()
    sharing: int = 1
    text: str = ""


class Finding(NamedTuple):
    """A condition that holds, or (``holds`` None) of which there is no evidence.

    ``holds`` is False if a device works while it is not known who holds it: no pod on it is idle.

    A condition is identified by the rule's name, ``device`` ("" for the node), ``pod_uid`` and ``key``. It can't have
    held before ``since_ms``. ``value`` is the figure that the rule judges, None for the seconds for which it has held.
    An ``event`` fires at once.
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


class Pod(msgspec.Struct, frozen=True, gc=False):
    """A pod that holds a device, by some of its containers, and its policy about alerts."""

    holders: tuple[Holder, ...]
    policy: Policy


class View(msgspec.Struct, frozen=True, gc=False):
    """A device of a tick, with the node's memory before the tick, the device's memory after it, and its work.
    ``whole``: it is not a GPU that is divided into MIG devices."""

    rules: Rules
    tick: Tick
    device: Device
    memory_before: Memory
    remembered: DeviceMemory
    windows: ErrorWindows
    uses: Uses
    pods: tuple[Pod, ...]
    work: Work
    whole: bool


NO_WINDOWS: ErrorWindows = {}


def uid_and_key(pod: Holder | PodMemory) -> tuple[str, str]:
    """The ``pod_uid`` and the ``key`` of findings about a pod: the key is its name if its uid is not known, else ""."""
    return (pod.pod_uid, "") if pod.pod_uid else ("", f"{pod.namespace}/{pod.pod}")


def sole_holder(view: View) -> Holder | None:
    """A holder of the pod that holds the device alone; None if several pods hold it, or none."""
    return view.pods[0].holders[0] if len(view.pods) == 1 else None


def sole_pod(holders: Sequence[Holder]) -> Holder | None:
    """The first of some holders, if all are of one pod; else None."""
    return holders[0] if len(by_pod(holders)) == 1 else None


def all_holders(view: View) -> tuple[Holder, ...]:
    """The holders of a device and of its MIG devices."""
    if view.whole:
        return view.device.holders
    parts = view.tick.mig_devices_of(view.device.uuid)
    return (*view.device.holders, *[holder for part in parts for holder in part.holders])


def is_silenced(rules: Rules, holder: Holder, remembered: DeviceMemory, tick: Tick) -> bool:
    """Whether a pod's policy switches off the alerts about its use of a device.
    A policy counts for a limited time after the pod got the device."""
    if not policy_of(holder).off:
        return False
    name = (holder.pod_uid, holder.pod, holder.namespace)
    holding_since = [pod.since_ms for pod in remembered.pods if (pod.pod_uid, pod.pod, pod.namespace) == name]
    longest_ms = rules.bounds.longest(holder.namespace)
    return not holding_since or any(tick.ts_ms - since_ms < longest_ms for since_ms in holding_since)


def held_memory(pods: Sequence[Holder], device: Device | None, sharing: int) -> float | None:
    """The bytes of a device's memory that a pod has: the sum of its parts, or all if it has the device alone."""
    readings = [holder.parts.memory_used_bytes for holder in pods if holder.parts is not None]
    used_bytes = [reading for reading in readings if reading is not None]
    if used_bytes:
        return sum(used_bytes)
    return device.metrics.memory_used_bytes if sharing == 1 and device is not None else None


def add_device_finding(
    rule: Rule,
    view: View,
    findings: list[Finding],
    *,
    holds: bool | None = True,
    value: float | None = None,
    key: str = "",
) -> None:
    """Add a finding about a device as such, whichever pod holds it."""
    holders = all_holders(view)
    effective_rule = view.rules.in_force(rule, sole_pod(holders))
    if effective_rule is not None:
        facts = Facts(view.device, None, holders)
        findings.append(Finding(effective_rule, view.device.uuid, key=key, holds=holds, value=value, facts=facts))


def unknown_findings(rule: Rule, uuid: str, remembered: DeviceMemory) -> list[Finding]:
    """Findings without evidence, one for each condition that a rule may have found on a device before."""
    if rule.kind in WASTE:
        return [Finding(rule, uuid, *uid_and_key(pod), holds=None) for pod in remembered.pods if not pod.observed]
    return [Finding(rule, uuid, key=key, holds=None) for key in _KEYS_BY_KIND.get(rule.kind, ("",))]
