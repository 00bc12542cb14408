"""The labels and annotations of the alert of a finding. Pure.

In: a finding, its tick, and since when it has held. Out: labels (the device, the node and the pod, in OpenTelemetry's
names), and annotations: a summary, a description with figures, the runbook.

Labels name a pod only if the alert is about one, or exactly one holds the device. A rule's labels are added to these
and replace none, so that a rule can't change which team an alert is for. A rule's annotations do replace these.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from delivery.values import counted, duration_words, printable
from streams.alerts.conditions.finding import Facts, Finding, held_memory, sole_pod
from streams.alerts.memory import DeviceMemory, Memory, PodMemory
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import OF_NODES, WASTE, WINDOWED, Kind, Rule, Wording
from streams.alerts.tick import Device, Tick
from streams.alerts.xids import of_text
from topics.alerts import Alert, AlertState
from topics.attributed import JOB, Holder, team_of
from topics.mig import model_slices, profile_slices
from topics.times import moment, rfc3339, time_of

Described = tuple[dict[str, str], dict[str, str]]  # an alert's labels and annotations
Pairs = Iterable[tuple[str, str | int | None]]
PLAIN = Wording()
MAX_VALUE_BYTES = 1024  # longer values are cut after a whole character: many receivers refuse more than 2 KiB
_INERT = str.maketrans("<>", "()")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_MAX_LISTED = 8  # of pods, nodes or processes in a description

_TEMPLATES: Mapping[Kind, tuple[str, str]] = {
    "stalled": ("{pod} keeps {where} busy, and hardly any work is done there",
                "{summary}, since {since}. {evidence}"),
    "underused": ("{pod} has used {where} for {value:.1%} of the {window} until {now}",
                  "{summary}. Give it less, or share the GPU."),
    "memory_hoarded": ("{pod} holds {memory} of the memory of {where}, used for {value:.1%} of the {window}"
                       " until {now}",
                       "{summary}. Nobody else can have that memory."),
    "straggler": ("{where} lags behind the other GPUs of its workload", "{summary}."),
    "crash_loop": ("{pod} holds {where}, and its containers crash again and again",
                   "{summary}: {text} restarts, and Kubernetes waits before the next one (CrashLoopBackOff)."),
    "used_unallocated": (
        "{where} works, and nobody was given it",
        "{summary}, since {since}. At {now} it was busy for {value:.0%} of the sample. {seen_there}",
    ),
    "attribution_conflict": ("{where} {conflict}", "{summary}, since {since}. {seen_there}"),
    "xid": ("XID {text} on {where}: {xid.meaning}", "{summary}. {times}{held_then} What to do: {xid.action}."),
    "ecc_uncorrectable": ("{where} had {value:.0f} {errors} that ECC could not correct within a minute",
                          "{summary}. {held} Results computed there may be wrong; the GPU needs a reset."),
    "row_remap_failure": ("{where} has a bad row of memory that could not be remapped",
                          "{summary}. {held} The GPU is to be replaced."),
    "row_remap_pending": ("{where} replaces bad memory at its next reset",
                          "{summary}. {held} Reset it when it is free."),
    "thermal_slowdown": ("{where} is slowed down by its temperature", "{summary}, since {since}. {slow}{held}"),
    "power_brake": ("{where} is slowed down by the power brake of its machine",
                    "{summary}, since {since}. {slow}{held}"),
    "nvlink_errors": ("{where} had {value:.0f} NVLink {errors} within a minute", "{summary}. {held}"),
    "lost": ("{where} is lost: NVML can't reach it any more",
             "{summary}. {held} The node needs a restart, and perhaps the GPU a technician."),
    "not_answering": ("{where} does not answer its driver", "{summary}, since {since}. {held}"),
    "missing": ("{where} is not there any more",
                "{summary}, since {since}. {held_last} At {now} the node reported {gpus}."),
    "policy_invalid": ("{pod} has a policy that is not followed as it is written", "{summary}: {text}."),
}  # fmt: skip
"""The summary and the description of each kind but two, with the fields of :func:`_template_fields`."""

_CONFLICT_TEXT = {
    "unallocated_process": "runs a process of a pod that the kubelet did not give it to",
    "no_pod": "is held by a pod, and runs a process that is in no pod",
}
_NVLINK_TEXT = {"crc": "CRC errors", "replay": "replays", "recovery": "recoveries"}
_SLOWDOWN_TEXT: Mapping[Kind, str] = {
    "thermal_slowdown": "At {now} it was at {value:.0f} °C. ",
    "power_brake": "At {now} it drew {value:.0f} W. ",
}


def describe(finding: Finding, tick: Tick, since_ms: int, wording: Wording = PLAIN) -> Described:
    """The labels and annotations of a finding in a tick that has held since ``since_ms``."""
    facts, rule = finding.facts, finding.rule
    label_pairs, more_annotations = list(_subject_labels(finding, wording.team_label)), dict[str, str]()
    fields: dict[str, Any] = {}
    if rule.kind == "held_idle":
        summary, description, more_annotations = _describe_held_idle(finding, tick, since_ms)
    else:
        fields = _template_fields(finding, tick, since_ms)
        summary = _TEMPLATES[rule.kind][0].format(**fields)
        description = _TEMPLATES[rule.kind][1].format(summary=summary, **fields)
    if rule.kind == "stalled":
        more_annotations = _waste_annotations(1.0, tick.ts_ms - since_ms)
        more_annotations["last_active"] = rfc3339(time_of(since_ms))
        more_annotations["evidence"] = fields["evidence"].removesuffix(".")
    elif rule.kind in (*WINDOWED, "crash_loop"):
        use = finding.value or 0.0
        share = share_of(facts, use).ratio
        window_ms = rule.window_ms if rule.kind in WINDOWED else 0
        if share is not None:
            more_annotations = _waste_annotations(share, tick.ts_ms - since_ms + window_ms)
        if window_ms:
            more_annotations |= {"window": duration_words(window_ms), "evidence": f"used for {use:.1%}"}
    if rule.kind in WASTE and wording.prices is not None and facts.device is not None:
        price = wording.prices.price_of(facts.device.model or "", tick.ts_ms, tick.node_labels)
        if price is not None:
            more_annotations["gpu_hour_price"] = str(price)
    if rule.kind == "nvlink_errors":
        label_pairs.append(("nvlink_error", finding.key))
    if rule.kind == "xid":
        xid = of_text(facts.text)
        label_pairs += [("xid", facts.text), ("xid_kind", xid.kind)]
        more_annotations = {"action": xid.action}
    # who holds a GPU that does not answer or is missing: the alert of its node names them, too
    more_annotations |= {"pods": fields["pods"]} if rule.kind in OF_NODES and fields["pods"] else {}
    more_annotations |= api_status(finding, tick)
    return _make_labels(rule, tick.cluster, tick.node, label_pairs), _make_annotations(
        rule, summary, description, more_annotations, wording
    )


def api_status(finding: Finding, tick: Tick) -> dict[str, str]:
    """The annotation with what the API server reports of a GPU that does not answer or is missing, and of its MIG
    devices; empty if nothing."""
    if not tick.unwell or finding.rule.kind not in OF_NODES:
        return {}
    ids = [finding.device, *[device.uuid for device in tick.mig_devices_of(finding.device)]]
    status = _join_names(str(device) for device in tick.unwell if device.device_id in ids)
    return {"api_status": clean(status)} if status else {}


def with_final_figures(alert: Alert, held_ms: int) -> Alert:
    """A resolved alert. If it is about waste, with its figures over all the time for which its condition held."""
    share = alert.annotations.get("gpu_share")
    if share is None:
        return alert
    seconds = max(held_ms, 0) / 1000
    wasted = f"{seconds * float(share):.0f}"
    final_sentence = f"In the end it was {duration_words(max(held_ms, 0))}, {wasted} GPU-seconds."
    description = clean(f"{alert.annotations['description']} {final_sentence}")
    annotations = {**alert.annotations, "description": description, "wasted_gpu_seconds": wasted}
    return msgspec.structs.replace(alert, value=seconds, annotations=annotations)


def describe_silence(rule: Rule, state: AlertState, memory: Memory, wording: Wording = PLAIN) -> Described:
    """The labels and annotations of the alert about a node without ticks."""
    holders = {_pod_text(pod): pod for remembered in memory.devices.values() for pod in remembered.pods}
    jobs = sum(pod.workload_kind == JOB for pod in holders.values())
    numbers = ((len(holders) - jobs, "pod"), (jobs, "job"))
    summary = f"{state.node} has sent nothing since {moment(time_of(state.last_ts_ms))}"
    held_by = f"held by {' and '.join([counted(number, noun) for number, noun in numbers if number]) or 'nobody'}"
    gpus = sum(remembered.parent is None for remembered in memory.devices.values())
    description = f"{summary}. It had {counted(gpus, 'GPU')}, {held_by}."
    return _make_labels(rule, state.cluster, state.node, ()), _make_annotations(rule, summary, description, {}, wording)


# -- labels


def _make_labels(rule: Rule, cluster: str, node: str, pairs: Pairs) -> dict[str, str]:
    own_pairs = [("alertname", rule.name), ("severity", rule.severity)]
    own_pairs += [("k8s_cluster_name", cluster), ("k8s_node_name", node)]
    texts = {name: clean(str(value)) for name, value in (*own_pairs, *pairs) if value is not None}
    return rule.labels | {name: text for name, text in texts.items() if text}


def clean(value: str) -> str:
    """A value that any receiver accepts, and shows as text: valid UTF-8, not too long, and without control characters.
    Chats find no links or mentions in it: tenants write owners' names and values of policies."""
    text = printable(value.translate(_INERT).replace("](", "] ("))
    return text.encode()[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


def _subject_labels(finding: Finding, team_label: str) -> Pairs:
    """The labels for the device and the pod that an alert is about, with the labels that the rule copies from the pod
    and its namespace."""
    facts = finding.facts
    source: Device | DeviceMemory | None = facts.device or facts.remembered
    mig = facts.device.mig if facts.device is not None else None
    if finding.device:
        yield "gpu_uuid", mig.parent_uuid if mig is not None else finding.device
        yield "gpu_index", source.index if source is not None else None
        yield "gpu_model", source.model if source is not None else None
        yield "gpu_mig_uuid", finding.device if mig is not None else None
        yield "gpu_mig_profile", mig.profile if mig is not None else None
    if not facts.pods or not (finding.pod_uid or finding.rule.kind in WASTE or sole_pod(facts.pods)):
        return
    pod = facts.pods[0]
    if pod.workload is not None and pod.workload.kind == JOB:
        yield "job_id", pod.pod
        yield "job_user", pod.labels.get("user")
        yield "job_partition", pod.labels.get("partition")
        yield "job_account", pod.labels.get("team")
        yield "team", pod.labels.get(team_label)
        return
    yield "k8s_namespace_name", pod.namespace
    yield "k8s_pod_name", pod.pod
    yield "k8s_pod_uid", pod.pod_uid
    yield "k8s_container_name", pod.container if len(facts.pods) == 1 else None
    yield "k8s_workload_kind", pod.workload.kind if pod.workload is not None else None
    yield "k8s_workload_name", pod.workload.name if pod.workload is not None else None
    yield "k8s_job_name", pod.job
    yield "k8s_statefulset_name", pod.statefulset
    yield "k8s_deployment_name", pod.deployment
    yield "team", team_of(pod.labels, pod.namespace_labels, team_label)
    for name in finding.rule.copy_labels:
        safe = _NOT_IN_A_NAME.sub("_", name)
        yield f"k8s_pod_label_{safe}", pod.labels.get(name)
        yield f"k8s_namespace_label_{safe}", pod.namespace_labels.get(name)


# -- annotations


def _make_annotations(
    rule: Rule, summary: str, description: str, more: Mapping[str, str], wording: Wording
) -> dict[str, str]:
    defaults = [default.name for default in rules_file.defaults().values() if default.kind == rule.kind]
    runbook = f"{wording.runbook_url}/{defaults[0] if defaults else rule.name}.md"
    texts = {"summary": summary, "description": description, "runbook": runbook, **more}
    return {name: clean(text) for name, text in texts.items()} | rule.annotations


def _describe_held_idle(finding: Finding, tick: Tick, since_ms: int) -> tuple[str, str, dict[str, str]]:
    """The summary, the description, and the annotations about the waste."""
    pod, idle_ms = finding.facts.pods[0], max(tick.ts_ms - since_ms, 0)
    share = share_of(finding.facts)
    since = moment(time_of(min(since_ms, tick.ts_ms)))
    summary = f"{_pod_text(pod)} holds {_device_text(finding, tick)} and has not used it since {since}"
    used_bytes = held_memory(finding.facts.pods, finding.facts.device, finding.facts.sharing)
    if used_bytes is None:
        memory = "Whether it holds memory is not known."
    elif used_bytes < max(finding.rule.memory_held_bytes, 1):
        memory = "It holds no memory of the GPU."
    else:
        memory = f"It holds {used_bytes / (1 << 30):.1f} GiB of the GPU's memory."
    workload = f"Workload: {pod.workload.kind} {pod.workload.name}." if pod.workload is not None else ""
    sentences, more_annotations = [f"{summary}.", workload, memory], dict[str, str]()
    if share.ratio is not None:
        more_annotations = _waste_annotations(share.ratio, idle_ms)
        wasted = more_annotations["wasted_gpu_seconds"]
        sentences.append(f"Wasted by {moment(time_of(tick.ts_ms))}: {wasted} GPU-seconds ({share.how}).")
    if since_ms > finding.since_ms:  # else it has not worked since its grace was over
        more_annotations["last_active"] = rfc3339(time_of(since_ms))
    return summary, " ".join(filter(None, sentences)), more_annotations


def _waste_annotations(share: float, lasted_ms: int) -> dict[str, str]:
    """The part of a GPU, by which its group's waste is computed, and the waste so far."""
    return {"gpu_share": f"{share:.12g}", "wasted_gpu_seconds": f"{share * max(lasted_ms, 0) / 1000:.0f}"}


def _template_fields(finding: Finding, tick: Tick, since_ms: int) -> dict[str, Any]:
    facts, value, now = finding.facts, finding.value, moment(time_of(tick.ts_ms))
    device, remembered = facts.device, facts.remembered or DeviceMemory()
    holders = _join_names(_pod_text(pod) for pod in facts.pods)
    processes = None if device is None else device.processes
    usage = (
        ("Given to", [_pod_text(pod) for pod in facts.pods if not pod.observed]),
        ("Seen there", [_pod_text(pod) for pod in facts.pods if pod.observed]),
        ("Processes", [str(process.pid) for process in processes or ()]),
    )
    usage_text = " ".join(f"{title}: {_join_names(names)}." for title, names in usage if names)
    no_usage = "Its processes are not known." if processes is None else "The driver lists no process there."
    last_holders = _join_names(_pod_text(pod) for pod in remembered.pods)
    total_bytes = device.metrics.memory_total_bytes if device is not None else None
    used_bytes = held_memory(facts.pods, device, facts.sharing)
    return {
        "where": _device_text(finding, tick),
        "value": value or 0,
        "text": facts.text,
        "pod": _pod_text(facts.pods[0]) if facts.pods else "",
        "since": moment(time_of(min(since_ms, tick.ts_ms))),
        "now": now,
        "held": f"Held by {holders}." if holders else "Nobody holds it.",
        "held_then": f"Held then by {holders}." if holders else "Nobody held it then.",
        "held_last": f"It was held by {last_holders}." if last_holders else "Nobody held it.",
        "seen_there": usage_text or no_usage,
        "pods": holders or last_holders,
        "gpus": counted(sum(device.mig is None for device in tick.devices), "GPU"),
        "conflict": _CONFLICT_TEXT.get(finding.key, f"has the conflict {finding.key[:80]!r}"),
        "errors": _NVLINK_TEXT.get(finding.key, "memory error" if value == 1 else "memory errors"),
        "evidence": _evidence(device) if device is not None else "",
        "slow": "" if value is None else _SLOWDOWN_TEXT.get(finding.rule.kind, "").format(value=value, now=now),
        "times": f"{value:.0f} times. " if value is not None and value > 1 else "",
        "xid": of_text(facts.text),
        "window": duration_words(finding.rule.window_ms),
        "memory": f"{used_bytes / total_bytes:.0%}" if used_bytes is not None and total_bytes else "much",
    }


def _evidence(device: Device) -> str:
    """The measures of a stalled GPU: ``Utilization 100%, 140 of 700 W, SMs active 8%, tensor cores 0%.``"""
    metrics = device.metrics
    measures = [
        (metrics.gpu_utilization_ratio, f"Utilization {metrics.gpu_utilization_ratio or 0:.0%}"),
        (metrics.power_watts, f"{metrics.power_watts or 0:.0f} of {metrics.power_limit_watts or 0:.0f} W"),
        (metrics.sm_active_ratio, f"SMs active {metrics.sm_active_ratio or 0:.0%}"),
        (metrics.tensor_active_ratio, f"tensor cores {metrics.tensor_active_ratio or 0:.0%}"),
    ]
    return f"{', '.join(text for value, text in measures if value is not None)}."


def _device_text(finding: Finding, tick: Tick) -> str:
    """``GPU 3 of gpu-node-1``, ``MIG 1g.10gb of GPU 3 of gpu-node-1``."""
    device = finding.facts.device
    source: Device | DeviceMemory | None = device or finding.facts.remembered
    gpu = f"GPU {finding.device if source is None or source.index is None else source.index} of {tick.node}"
    return f"MIG {device.mig.profile or device.uuid} of {gpu}" if device is not None and device.mig is not None else gpu


def _pod_text(pod: Holder | PodMemory) -> str:
    """``ml-team/bert-0``, or ``job 4242`` of a batch system."""
    kind = pod.workload_kind if isinstance(pod, PodMemory) else pod.workload and pod.workload.kind
    return f"job {pod.pod}" if kind == JOB else f"{pod.namespace}/{pod.pod}"


def _join_names(names: Iterable[str]) -> str:
    """Names as a list in a sentence, each once."""
    return listed(list(dict.fromkeys(names)))


def listed(texts: Sequence[str], separator: str = ", ") -> str:
    """Texts as a list in a sentence, and the number of the rest if there are many."""
    more = [f"{len(texts) - _MAX_LISTED} more"] if len(texts) > _MAX_LISTED else []
    return separator.join([*texts[:_MAX_LISTED], *more])


# -- the share of a GPU that a pod holds: waste is counted in seconds of a whole GPU


class Share(NamedTuple):
    """A share of a GPU (None if it is not known), and a text that explains it."""

    ratio: float | None
    how: str


def share_of(facts: Facts, use: float = 0.0) -> Share:
    """The share of a GPU that the pod of a finding holds and does not use. ``use`` is its part of the device's work.

    A MIG device has the compute slices of its profile (``1g.10gb``: 1 of an H100's 7). A device that was given to
    several pods is divided among them equally: no record has the share that each was promised.
    """
    device, ratio, explanations = facts.device, 1.0, list[str]()
    sharing = max(1, sum(not holders[0].observed for holders in device.pods)) if device is not None else 1
    if device is not None and device.mig is not None:
        mig_slices, slices = profile_slices(device.mig.profile), device.compute_slices or model_slices(device.model)
        if mig_slices is None:
            return Share(None, "")
        mig_slices = min(mig_slices, slices)
        ratio = mig_slices / slices
        explanations.append(f"{mig_slices} of {slices} compute slices")
    if sharing > 1:
        explanations.append(f"one of {sharing} pods on it, divided equally")
    return Share(ratio * max(1 / sharing - use, 0.0), "; ".join(explanations) or "a whole GPU")
