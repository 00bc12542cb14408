"""What is found in a tick, and how a device of it is seen. Pure.

A finding says that a condition holds, or (``holds`` None) that it is not known whether it does; what is not found
does not hold. Only a device whose state is ``ok`` says anything of itself; no evidence is not idleness.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from delivery.policies import Policy
from streams.alerts.memory import HeldBy, Memory, Seen, Windows
from streams.alerts.rules.rule import WASTE, Rule, Rules, policy_of
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import Uses
from topics.attributed import Holder, by_pod
from topics.idleness import Work

CONFLICTS = ("unallocated_process", "no_pod")  # what conflict of a device may be
NVLINK_ERRORS = ("crc", "replay", "recovery")  # the kinds of errors that an NVLink counts
_KEYS = {"attribution_conflict": CONFLICTS, "nvlink_errors": NVLINK_ERRORS}  # of a kind's findings; else only ""


class Facts(NamedTuple):
    """What a finding rests on: the device of the tick or, if the tick does not have it, of the inventory (``seen``);
    the pod that it is about, or the pods that hold the device; the rest by kind."""

    device: Device | None = None
    seen: Seen | None = None
    pods: tuple[Holder, ...] = ()
    sharing: int = 1
    text: str = ""


class Finding(NamedTuple):
    """A condition that holds, or of which there is no evidence (``holds`` None).

    If ``holds`` is False, work was seen on a device, and it is not known who holds it now.

    It is identified by the rule's name, ``device`` ("" is the node), ``pod_uid`` and ``key``. It can't have held
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


class Pod(msgspec.Struct, frozen=True, gc=False):
    """A pod that holds a device, by some of its containers, and what it wants."""

    holders: tuple[Holder, ...]
    policy: Policy


class View(msgspec.Struct, frozen=True, gc=False):
    """A device of a tick, what was remembered of it before and is now, and how much it works."""

    rules: Rules
    tick: Tick
    device: Device
    before: Memory
    seen: Seen
    windows: Windows
    uses: Uses
    pods: tuple[Pod, ...]
    work: Work
    whole: bool


def view_of(
    rules: Rules, tick: Tick, device: Device, memories: tuple[Memory, Memory], work: Work, parents: set[str]
) -> View:
    """How a device of a tick is seen; ``memories`` are the one before the tick and the one now, ``parents`` the GPUs
    that have MIG devices."""
    before, now = memories
    whole = device.mig is not None or (device.uuid not in parents and device.info.mig_mode != "enabled")
    holding = tuple([Pod(one, policy_of(one[0], rules.bounds)) for one in device.pods])
    seen, windows = now.devices[device.uuid], now.windows.get(device.uuid, NO_WINDOWS)
    uses = now.uses.get(device.uuid, ())
    return View(rules, tick, device, before, seen, windows, uses, holding, work, whole)


NO_WINDOWS: Windows = {}


def uid_and_key(pod: Holder | HeldBy) -> tuple[str, str]:
    """What identifies a pod in findings: its uid, or its name as the key if the uid is not known."""
    return (pod.pod_uid, "") if pod.pod_uid else ("", f"{pod.namespace}/{pod.pod}")


def sole(view: View) -> Holder | None:
    return view.pods[0].holders[0] if len(view.pods) == 1 else None


def sole_pod(holders: Sequence[Holder]) -> Holder | None:
    """The one pod of these holders, by any of its containers."""
    return holders[0] if len(by_pod(holders)) == 1 else None


def is_silenced(rules: Rules, holder: Holder, seen: Seen, tick: Tick) -> bool:
    """Whether a pod's policy silences what is about its doing on a device: that counts for so long after it got it."""
    if not policy_of(holder).off:
        return False
    name = (holder.pod_uid, holder.pod, holder.namespace)
    held = [pod.since_ms for pod in seen.pods if (pod.pod_uid, pod.pod, pod.namespace) == name]
    longest_ms = rules.bounds.longest(holder.namespace)
    return not held or any(tick.ts_ms - since_ms < longest_ms for since_ms in held)


def held_memory(pods: Sequence[Holder], device: Device | None, sharing: int) -> float | None:
    """How much of a device's memory a pod has: its part, else all of a device that it has alone."""
    parts = [one.parts.memory_used_bytes for one in pods if one.parts and one.parts.memory_used_bytes is not None]
    if parts:
        return sum(parts)
    return device.metrics.memory_used_bytes if sharing == 1 and device is not None else None


def of_device(
    rule: Rule,
    view: View,
    found: list[Finding],
    *,
    holds: bool | None = True,
    value: float | None = None,
    key: str = "",
) -> None:
    """A finding about a device, whoever holds it."""
    ruled = view.rules.in_force(rule, sole(view))
    if ruled is not None:
        facts = Facts(view.device, None, view.device.holders)
        found.append(Finding(ruled, view.device.uuid, key=key, holds=holds, value=value, facts=facts))


def unseen(rule: Rule, uuid: str, seen: Seen) -> list[Finding]:
    """No evidence, of everything that a rule may have found on a device."""
    if rule.kind in WASTE:
        return [Finding(rule, uuid, *uid_and_key(pod), holds=None) for pod in seen.pods if not pod.observed]
    return [Finding(rule, uuid, key=key, holds=None) for key in _KEYS.get(rule.kind, ("",))]
