"""An alert's labels and annotations, from what was found. Pure.

In: a finding, its tick, and since when it has held. Out: labels (who and where, in OpenTelemetry's names), and the
words: a summary, a description with figures, the runbook.

Labels name a pod only if the alert is about one, or exactly one holds the device. A rule's own labels and
annotations go over these.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from delivery.values import duration_words
from streams.alerts.conditions.finding import Facts, Finding, sole_pod
from streams.alerts.memory import HeldBy, Memory, Seen
from streams.alerts.rules.rule import Kind, Rule
from streams.alerts.tick import Device, Tick
from streams.alerts.xids import of_text
from topics.alerts import Alert, AlertState
from topics.attributed import Holder

Described = tuple[dict[str, str], dict[str, str]]
"""An alert's labels and annotations."""

Pairs = Iterable[tuple[str, str | int | None]]

RUNBOOK = "docs/runbooks/{}.md"
MAX_VALUE_BYTES = 1024
"""Longer values are cut, at a character: receivers commonly refuse more than 2 KiB."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_MOST_NAMED = 8
"""Of pods or processes in a description."""


def describe(finding: Finding, tick: Tick, since_ms: int) -> Described:
    """The labels and annotations of what a tick shows to have held since a time."""
    facts, rule = finding.facts, finding.rule
    about_a_pod = finding.pod_uid or rule.kind == "held_idle" or sole_pod(facts.pods) is not None
    holders = facts.pods if about_a_pod else ()
    pairs = [*_device(finding), *_pod(holders), *_copied(rule, holders)]
    if rule.kind == "xid":
        pairs += [("xid", facts.text), ("xid_kind", of_text(finding.facts.text).kind)]
    summary, description, more = _WORDS[rule.kind](finding, tick, since_ms)
    return _labels(rule, tick.cluster, tick.node, pairs), _annotations(rule, summary, description, more)


def in_the_end(alert: Alert, held_ms: int) -> Alert:
    """A resolved alert. If it is about waste, its figures are of all the time for which it held."""
    share = alert.annotations.get("gpu_share")
    if share is None:
        return alert
    seconds = max(held_ms, 0) / 1000
    wasted = f"{seconds * float(share):.0f}"
    end = f"In the end it was {duration_words(max(held_ms, 0))}, {wasted} GPU-seconds."
    description = _clean(f"{alert.annotations['description']} {end}")
    annotations = {**alert.annotations, "description": description, "wasted_gpu_seconds": wasted}
    return msgspec.structs.replace(alert, value=seconds, annotations=annotations)


def silent(rule: Rule, state: AlertState, memory: Memory) -> Described:
    """Those of a node without ticks."""
    held = {(pod.namespace, pod.pod) for seen in memory.devices.values() for pod in seen.pods}
    summary = f"{state.node} has sent nothing for {duration_words(rule.for_ms)}"
    description = f"{summary}. It had {_count(memory.devices, 'GPU')}, held by {_count(held, 'pod')}."
    return _labels(rule, state.cluster, state.node, ()), _annotations(rule, summary, description, {})


# -- labels


def _labels(rule: Rule, cluster: str, node: str, pairs: Pairs) -> dict[str, str]:
    own: Pairs = (
        ("alertname", rule.name),
        ("severity", rule.severity),
        ("k8s_cluster_name", cluster),
        ("k8s_node_name", node),
    )
    texts = {name: _clean(str(value)) for name, value in (*own, *pairs) if value is not None}
    return {name: text for name, text in texts.items() if text} | rule.labels


def _clean(value: str) -> str:
    """A value that any receiver takes: valid UTF-8, not too long."""
    return value.encode("utf-8", "replace")[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


def _device(finding: Finding) -> Pairs:
    facts = finding.facts
    if not finding.device:
        return
    found: Device | Seen | None = facts.device or facts.seen
    parent = facts.device.mig.parent_uuid if facts.device is not None and facts.device.mig is not None else None
    yield "gpu_uuid", parent or finding.device
    if found is not None:
        yield "gpu_index", found.index
        yield "gpu_model", found.model
    if parent is not None and facts.device is not None and facts.device.mig is not None:
        yield "gpu_mig_uuid", finding.device
        yield "gpu_mig_profile", facts.device.mig.profile


def _pod(holders: Sequence[Holder]) -> Pairs:
    if not holders:
        return
    pod = holders[0]
    yield "k8s_namespace_name", pod.namespace
    yield "k8s_pod_name", pod.pod
    yield "k8s_pod_uid", pod.pod_uid
    if len(holders) == 1:
        yield "k8s_container_name", pod.container
    if pod.workload is not None:
        yield "k8s_workload_kind", pod.workload.kind
        yield "k8s_workload_name", pod.workload.name
    yield "k8s_job_name", pod.job
    yield "k8s_statefulset_name", pod.statefulset
    yield "k8s_deployment_name", pod.deployment


def _copied(rule: Rule, holders: Sequence[Holder]) -> Pairs:
    """The labels of the pod and of its namespace that the rule asks for."""
    for name in rule.copy_labels if holders else ():
        safe = _NOT_IN_A_NAME.sub("_", name)
        yield f"k8s_pod_label_{safe}", holders[0].labels.get(name)
        yield f"k8s_namespace_label_{safe}", holders[0].namespace_labels.get(name)


# -- words


def _annotations(rule: Rule, summary: str, description: str, more: Mapping[str, str]) -> dict[str, str]:
    runbook = RUNBOOK.format(_RUNBOOKS[rule.kind])
    found = {"summary": summary, "description": description, "runbook": runbook, **more}
    return {name: _clean(text) for name, text in found.items()} | rule.annotations


_Words = tuple[str, str, dict[str, str]]
"""A summary, a description, and further annotations."""


def _held_idle(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    pod, idle_ms = finding.facts.pods[0], max(tick.ts_ms - since_ms, 0)
    share = share_of(finding.facts)
    summary = f"{_name(pod)} holds {_where(finding, tick)} and has not used it for {duration_words(idle_ms)}"
    used = held_memory(finding.facts)
    if used is None:
        memory = "Whether it holds memory is not known."
    elif used < max(finding.rule.memory_held_bytes, 1):
        memory = "It holds no memory of the GPU."
    else:
        memory = f"It holds {used / (1 << 30):.1f} GiB of the GPU's memory."
    wasted = idle_ms / 1000 * share.ratio if share.ratio is not None else None
    parts = [
        f"{summary}.",
        f"Workload: {pod.workload.kind} {pod.workload.name}." if pod.workload is not None else "",
        memory,
        f"Wasted so far: {wasted:.0f} GPU-seconds ({share.how})." if wasted is not None else "",
    ]
    more = {} if wasted is None else {"gpu_share": f"{share.ratio:.4g}", "wasted_gpu_seconds": f"{wasted:.0f}"}
    return summary, " ".join(filter(None, parts)), more


def held_memory(facts: Facts) -> float | None:
    """How much of a device's memory a pod has: its part, else all of a device that it has alone."""
    parts = [h.parts.memory_used_bytes for h in facts.pods if h.parts and h.parts.memory_used_bytes is not None]
    if parts:
        return sum(parts)
    return facts.device.metrics.memory_used_bytes if facts.sharing == 1 and facts.device is not None else None


def _used_unallocated(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    summary = f"{_where(finding, tick)} works, and no pod was given it"
    busy = f"It was busy for {finding.value or 0:.0%} of the last sample, and has been for {_long(tick, since_ms)}."
    return summary, f"{summary}. {busy} {_seen_there(finding)}", {}


def _conflict(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    what = {
        "unallocated_process": "runs a process of a pod that the kubelet did not give it to",
        "no_pod": "is held by a pod, and runs a process that is in no pod",
    }.get(finding.key, f"has the conflict {finding.key[:80]!r}")
    summary = f"{_where(finding, tick)} {what}"
    return summary, f"{summary}, for {_long(tick, since_ms)}. {_seen_there(finding)}", {}


def _seen_there(finding: Finding) -> str:
    """Who runs on a device, and who was given it."""
    device = finding.facts.device
    given = _listed(_name(h) for h in finding.facts.pods if not h.observed)
    seen = _listed(_name(h) for h in finding.facts.pods if h.observed)
    pids = _listed(str(p.pid) for p in device.processes or ()) if device is not None else ""
    texts = [f"Given to: {given}." if given else "", f"Seen there: {seen}." if seen else ""]
    return " ".join(filter(None, [*texts, f"Processes: {pids}." if pids else ""])) or "Its processes are not known."


def _xid(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    xid, held = of_text(finding.facts.text), _listed(_name(h) for h in finding.facts.pods)
    summary = f"XID {finding.facts.text} on {_where(finding, tick)}: {xid.meaning}"
    times = f"{finding.value:.0f} times. " if finding.value is not None and finding.value > 1 else ""
    holders = f"Held then by {held}. " if held else "No pod held it then. "
    return summary, f"{summary}. {times}{holders}What to do: {xid.action}.", {"action": xid.action}


def _ecc(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    errors = "memory error" if finding.value == 1 else "memory errors"
    what = f"{finding.value or 0:.0f} {errors} that ECC could not correct within a minute"
    summary = f"{_where(finding, tick)} had {what}"
    return summary, f"{summary}. {_held(finding)} Results computed there may be wrong; the GPU needs a reset.", {}


def _thermal(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    summary = f"{_where(finding, tick)} is slowed down by its temperature"
    at = f"It is at {finding.value:.0f} °C" if finding.value is not None else "It has been slow"
    return summary, f"{summary}. {at}, for {_long(tick, since_ms)}. {_held(finding)}", {}


def _brake(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    summary = f"{_where(finding, tick)} is slowed down by the power brake of its machine"
    at = f"It draws {finding.value:.0f} W" if finding.value is not None else "It has been slow"
    return summary, f"{summary}. {at}, for {_long(tick, since_ms)}. {_held(finding)}", {}


def _nvlink(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    what = {"crc": "CRC errors", "replay": "replays", "recovery": "recoveries"}[finding.key]
    summary = f"{_where(finding, tick)} had {finding.value or 0:.0f} NVLink {what} within a minute"
    return summary, f"{summary}. {_held(finding)}", {}


def _not_answering(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    summary = f"{_where(finding, tick)} does not answer its driver"
    return summary, f"{summary}, for {_long(tick, since_ms)}. {_held(finding)}", {}


def _missing(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    seen = finding.facts.seen or Seen()
    held = _listed(_name(pod) for pod in seen.pods)
    summary = f"{_where(finding, tick)} is not there any more"
    last = f"It was held by {held}." if held else "No pod held it."
    there = _count(tick.devices, "device")
    return summary, f"{summary}, since {_long(tick, since_ms)}. {last} The node reports {there} now.", {}


def _policy(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    summary = f"{_name(finding.facts.pods[0])} has a malformed policy, which is not followed"
    return summary, f"{summary}: {finding.facts.text}.", {}


_BROKEN: Mapping[Kind, tuple[str, str]] = {
    "row_remap_failure": ("has a bad row of memory that could not be remapped", "The GPU is to be replaced."),
    "row_remap_pending": ("replaces bad memory at its next reset", "Reset it when it is free."),
    "lost": (
        "is lost: NVML can't reach it any more",
        "The node needs a restart, and perhaps the GPU a technician.",
    ),
}
"""Of a GPU in whose description no figure is: what is wrong with it, and what it needs."""


def _broken(finding: Finding, tick: Tick, since_ms: int) -> _Words:
    what, needed = _BROKEN[finding.rule.kind]
    summary = f"{_where(finding, tick)} {what}"
    return summary, f"{summary}. {_held(finding)} {needed}", {}


_WORDS: Mapping[Kind, Callable[[Finding, Tick, int], _Words]] = {
    "held_idle": _held_idle,
    "used_unallocated": _used_unallocated,
    "attribution_conflict": _conflict,
    "xid": _xid,
    "ecc_uncorrectable": _ecc,
    "row_remap_failure": _broken,
    "row_remap_pending": _broken,
    "thermal_slowdown": _thermal,
    "power_brake": _brake,
    "nvlink_errors": _nvlink,
    "lost": _broken,
    "not_answering": _not_answering,
    "missing": _missing,
    "policy_invalid": _policy,
}

_RUNBOOKS: Mapping[Kind, str] = {
    "held_idle": "GPUHeldIdle",
    "used_unallocated": "GPUUsedUnallocated",
    "attribution_conflict": "GPUAttributionConflict",
    "xid": "GPUXid",
    "ecc_uncorrectable": "GPUEccUncorrectable",
    "row_remap_failure": "GPURowRemapFailure",
    "row_remap_pending": "GPURowRemapPending",
    "thermal_slowdown": "GPUThermalSlowdown",
    "power_brake": "GPUPowerBrake",
    "nvlink_errors": "GPUNvlinkErrors",
    "lost": "GPULost",
    "not_answering": "GPUNotAnswering",
    "missing": "GPUMissing",
    "node_silent": "NodeSilent",
    "policy_invalid": "GPUPolicyInvalid",
}


def _where(finding: Finding, tick: Tick) -> str:
    """``GPU 3 of gpu-node-1``, ``MIG 1g.10gb of GPU 3 of gpu-node-1``."""
    device = finding.facts.device
    found: Device | Seen | None = device or finding.facts.seen
    gpu = f"GPU {finding.device if found is None or found.index is None else found.index} of {tick.node}"
    return f"MIG {device.mig.profile or device.uuid} of {gpu}" if device is not None and device.mig is not None else gpu


def _held(finding: Finding) -> str:
    held = _listed(_name(h) for h in finding.facts.pods)
    return f"Held by {held}." if held else "No pod holds it."


def _name(pod: Holder | HeldBy) -> str:
    return f"{pod.namespace}/{pod.pod}"


def _listed(names: Iterable[str]) -> str:
    """Names, each once, at most so many."""
    found = list(dict.fromkeys(names))
    more = [f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return ", ".join(found[:_MOST_NAMED] + more)


def _count(things: Iterable[object], noun: str) -> str:
    count = sum(1 for _ in things)
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _long(tick: Tick, since_ms: int) -> str:
    return duration_words(max(tick.ts_ms - since_ms, 0))


# -- how much of a GPU a pod holds: what it wastes is counted in seconds of a whole one

_PROFILE = re.compile(r"(?:([1-8])c\.)?([1-8])g\.", re.ASCII)
_SLICES = 7
_SLICES_BY_MODEL = {"A30": 4}


class Share(NamedTuple):
    """A part of a GPU, None if it is not known, and how it was found."""

    ratio: float | None
    how: str


def share_of(facts: Facts) -> Share:
    """What of a GPU the pod of a finding holds.

    A MIG device is as many of its GPU's compute slices as its profile says (``1g.10gb``: 1 of 7; an A30 has 4). A
    device that several pods hold is divided among them equally, whatever each was promised: no record says more.
    """
    device, ratio, ways = facts.device, 1.0, list[str]()
    if device is not None and device.mig is not None:
        match = _PROFILE.match(device.mig.profile or "")
        if match is None:
            return Share(None, "")
        model = set(re.split(r"[^A-Za-z0-9]+", device.model or ""))
        slices = next((count for name, count in _SLICES_BY_MODEL.items() if name in model), _SLICES)
        own = min(int(match[1] or match[2]), slices)
        ratio = own / slices
        ways.append(f"{own} of {slices} compute slices")
    if facts.sharing > 1:
        ways.append(f"one of {facts.sharing} pods on it, divided equally")
    return Share(ratio / facts.sharing, "; ".join(ways) or "a whole GPU")
