"""The labels and annotations of an alert of several GPUs, from its parts. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import chain
from typing import NamedTuple

from delivery.values import counted
from streams.alerts.rules.rule import ALL_GPUS_KINDS, Kind, Rule, Rules
from streams.alerts.text.describe import clean, listed
from topics.alerts import Alert, AlertGpu, AlertGroup, AlertReport, Member, Scope
from topics.times import moment, rfc3339, time_of

_DEVICE_LABELS = ("gpu_uuid", "gpu_index", "gpu_model", "gpu_mig_uuid", "gpu_mig_profile", "k8s_container_name")
_POD_LABELS = ("k8s_pod_name", "k8s_pod_uid")
_OMITTED_LABELS: dict[Scope, tuple[str, ...]] = {
    "workload": (*_DEVICE_LABELS, *_POD_LABELS, "k8s_node_name"),
    "pod": _DEVICE_LABELS,
    "node": (*_DEVICE_LABELS, *_POD_LABELS),
}
_HOUR_S = 3600

_NODE_TEXTS: dict[Kind, tuple[str, str]] = {
    "missing": ("is not there any more", "are not there any more"),
    "lost": ("is lost: NVML can't reach it any more", "are lost: NVML can't reach them any more"),
    "not_answering": ("does not answer its driver", "do not answer their driver"),
}


class PodTexts(NamedTuple):
    """The texts of a kind: the state of its GPUs, what the owner of the pods can do, how a pod may say that it is meant
    so, what precedes the time since which there is no work, and what is written if none has since the grace."""

    state: str
    advice: str
    opt_out: str = ""
    since: str = ""
    never_worked: str = ""


class OtherKindTexts(NamedTuple):
    """The state of GPUs by another rule, as the end of a sentence about one and about several GPUs; and the prefix of a
    list of such GPUs."""

    singular: str
    plural: str
    prefix: str


_OTHER_KIND_TEXTS: dict[Kind, OtherKindTexts] = {
    "crash_loop": OtherKindTexts("crashes again and again", "crash again and again", "Crashed"),
    "held_idle": OtherKindTexts("is idle", "are idle", "Idle"),
    "stalled": OtherKindTexts("stalls", "stall", "Stalled"),
}

_HOW_TO_SWITCH_OFF = ' If that is meant, annotate the pod, or its namespace, with gpustream.dev/alerts: "off".'
_POD_TEXTS: dict[Kind, PodTexts] = {
    "held_idle": PodTexts(
        "idle",
        "Give back what is not needed.",
        " If a pod is to keep idle GPUs, annotate it, or its namespace, with"
        ' gpustream.dev/idle-after: "2h", or gpustream.dev/alerts: "off".',
        "No work there since",
        "None has worked since its grace was over.",
    ),
    "stalled": PodTexts(
        "stalled",
        "Utilization is full, and hardly any work is done: look where the processes wait, and start them again.",
        _HOW_TO_SWITCH_OFF,
    ),
    "underused": PodTexts(
        "underused", "Use fewer or smaller GPUs, share them, or look what they wait for.", _HOW_TO_SWITCH_OFF
    ),
    "memory_hoarded": PodTexts(
        "hardly used, with their memory held",
        "Free the memory, or use a smaller GPU or a part of one.",
        _HOW_TO_SWITCH_OFF,
    ),
    "straggler": PodTexts(
        "suspect",
        "The others of the workload may wait for them: look at the GPU, its node and its links, and run the workload"
        " without them.",
    ),
    "crash_loop": PodTexts(
        "held by containers that crash again and again",
        "Read the logs of the last run, and scale the workload down until it is mended.",
        _HOW_TO_SWITCH_OFF,
    ),
}


def group_labels(part: Alert, scope: Scope) -> dict[str, str]:
    """The labels of a group's alert: those of its first part, without what names a single device or pod."""
    omitted = set(_OMITTED_LABELS[scope])
    if scope == "node":
        location = ("k8s_cluster_name", "k8s_node_name")
        omitted |= {name for name in part.labels if name.startswith("k8s_") and name not in location}
    return {name: value for name, value in part.labels.items() if name not in omitted}


def describe_group(
    alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules
) -> tuple[dict[str, str], float | None]:
    """The annotations of a group's alert, and its value: the longest time for which a GPU's condition has held, in
    seconds."""
    rule, members = rules.by_name.get(alert.name), group.members
    rule_annotations = dict(rule.annotations) if rule is not None else {}
    for override in rule.overrides if rule is not None else ():  # of these the annotations that it got when it fired
        changes = override.changes.get("annotations", {})
        rule_annotations |= {name: text for name, text in changes.items() if alert.annotations.get(name) == text}
    value = max([member.seconds for member in members if member.seconds is not None], default=alert.value)
    if not alert.is_open:
        figures, waste_text = _waste_figures(members, rules, "In the end")
        description = f"{alert.annotations.get('description', '')} {waste_text}".strip()
        annotations = {**alert.annotations, **figures, "description": description}
    elif report.scope == "node":
        kind = rule.kind if rule is not None else "missing"
        state = _NODE_TEXTS.get(kind, ("has a fault", "have a fault"))[len(alert.gpus) > 1]
        migs = sum(map(_is_mig, alert.gpus))
        numbers = [(len(alert.gpus) - migs, "GPU"), (migs, "MIG device")]
        gpus = " and ".join(counted(number, noun) for number, noun in numbers if number)
        summary = f"{gpus} of {alert.node} {state}"
        cause = "They went at one time, so the cause is likely one: the driver, its module, or the machine."
        annotations = {
            **{name: text for name, text in alert.annotations.items() if name != "api_status"},
            "summary": summary,
            "description": f"{summary}: {_gpus_text(alert.gpus)}. {cause}",
            **({"pods": pods} if (pods := _pods_text(alert.gpus)) else {}),
            **({"api_status": clean(status)} if (status := _evidence_text(group.firing_members)) else {}),
        }
    else:
        annotations = _describe_pods(alert, group, report, rules)
    return {**annotations, **rule_annotations}, value


def _describe_pods(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> dict[str, str]:
    """The annotations of an alert about how pods use their GPUs."""
    rule, firing_members = rules.by_name.get(alert.name), group.firing_members
    figures, waste_text = _waste_figures(group.members, rules, f"Wasted by {moment(time_of(report.ts_ms))}")
    last_active = max([member.last_active for member in firing_members if member.last_active is not None], default=None)
    kind: Kind = rule.kind if rule is not None and rule.kind in _POD_TEXTS else "held_idle"
    state, advice, opt_out, since, never_worked = _POD_TEXTS[kind]
    policy = advice if "job_id" in alert.labels else f"{advice}{opt_out}"  # a batch job can't be annotated
    gpus_by_kind: dict[Kind, list[AlertGpu]] = {kind: [] for kind in _OTHER_KIND_TEXTS}
    for other in [other for other in group.others if other.gpu not in alert.gpus]:
        gpus_by_kind.setdefault(kind_of_other(other, rule, rules), []).append(other.gpu)
    culprits = [f"{_OTHER_KIND_TEXTS[key].prefix}: {_gpus_text(gpus)}." for key, gpus in gpus_by_kind.items() if gpus]
    culprits += ["Look there first: the others may wait for it."] if culprits else []
    held_since = [member.since for member in firing_members if member.since is not None]
    summary = _summary(alert, rule, state, firing_members, gpus_by_kind)
    evidence = _evidence_text(firing_members)
    sentences = [
        f"{summary}. {state.partition(',')[0].capitalize()}: {_gpus_text(alert.gpus)}.",
        *(culprits if rule is not None and rule.kind in ALL_GPUS_KINDS else []),
        f"Evidence: {evidence}." if evidence else "",
        waste_text,
        never_worked if not last_active else f"{since} {last_active}." if since else "",
        policy,
    ]
    return {
        **{name: text for name, text in alert.annotations.items() if name not in ("last_active", "gpu_hour_price")},
        "summary": summary,
        "description": " ".join(filter(None, sentences)),
        "pods": _pods_text(alert.gpus),
        "policy": policy,
        **figures,
        **({"evidence": evidence} if evidence else {}),
        **({"last_active": last_active} if last_active else {}),
        **({"since": rfc3339(min(held_since))} if held_since else {}),
    }


def _summary(
    alert: Alert,
    rule: Rule | None,
    state: str,
    members: Sequence[Member],
    gpus_by_kind: Mapping[Kind, Sequence[AlertGpu]],
) -> str:
    """``Job ml-team/bert: 2 of 8 GPUs idle, the other 6 work (since ...)``, or ``Job 4242`` of a batch system."""
    labels, idle, held = alert.labels, alert.idle or 0, max(alert.held or 0, alert.idle or 0)
    kind, name = labels.get("k8s_workload_kind", "Pod"), labels.get("k8s_workload_name") or labels.get("k8s_pod_name")
    owner = f"Job {labels['job_id']}" if "job_id" in labels else f"{kind} {labels.get('k8s_namespace_name')}/{name}"
    known_gpus = [*alert.gpus, *chain.from_iterable(gpus_by_kind.values())]
    migs = sum(map(_is_mig, known_gpus))
    gpus = counted(held, "MIG device" if migs else "GPU")
    if 0 < migs < len(known_gpus):
        gpus = f"{held} GPUs and MIG devices"
    if len({gpu.uuid for gpu in known_gpus}) < len(known_gpus):  # one that pods share counts once for each of them
        gpus = f"{held} shares of GPUs"
    others = _others_text(gpus_by_kind, rule, held - idle)
    when = _since_text(members, rule, alert.annotations.get("window"))
    return f"{owner}: {idle} of {gpus} {state}{others}{when}"


def _evidence_text(members: Iterable[Member]) -> str:
    """``GPU 0 of gpu-node-1: ...; MIG-5c1b... of GPU 1 of ...``, for each part that has evidence; empty if none has."""
    texts: list[str] = []
    for gpu, evidence in [(part.gpu, part.evidence) for part in members if part.evidence]:
        name = f"GPU {gpu.uuid if gpu.index is None else gpu.index} of {gpu.node}"
        texts.append(f"{gpu.uuid} of {name}: {evidence}" if _is_mig(gpu) else f"{name}: {evidence}")
    return listed(list(dict.fromkeys(texts)), "; ")


def _since_text(members: Sequence[Member], rule: Rule | None, window: str | None) -> str:
    """The end of the summary: since when the condition holds, and until when some GPU worked for a moment meanwhile."""
    starts = [time_of(member.starts_ms) if window else member.since for member in members]
    known_starts = [start for start in starts if start is not None]
    if not known_starts:
        return ""
    since = f"in the {window} until" if window else "since"
    first = "the first " if len(set(map(moment, known_starts))) > 1 else ""
    last_active = [datetime.fromisoformat(member.last_active) for member in members if member.last_active]
    active_since = [active for active in last_active if active > max(known_starts)]
    shows_work = rule is not None and rule.kind in ("held_idle", *ALL_GPUS_KINDS)
    work_text = f", with work until {moment(max(active_since))}" if active_since and shows_work else ""
    return f" ({first}{since} {moment(min(known_starts))}{work_text})"


def kind_of_other(other: Member, rule: Rule | None, rules: Rules) -> Kind:
    """The kind of the rule of an alert about another GPU. An earlier version kept no name, and had two such kinds."""
    if other.name is not None and other.name in rules.by_name:
        return rules.by_name[other.name].kind
    return "held_idle" if rule is not None and rule.kind in ALL_GPUS_KINDS else "stalled"


def _others_text(gpus_by_kind: Mapping[Kind, Sequence[AlertGpu]], rule: Rule | None, count: int) -> str:
    """What the other ``count`` GPUs of the workload do, for the summary; empty if that is not known."""
    if count <= 0 or (rule is not None and rule.kind not in ("held_idle", *ALL_GPUS_KINDS)):
        return ""
    states = [(len(gpus), _OTHER_KIND_TEXTS[kind]) for kind, gpus in gpus_by_kind.items() if gpus]
    working = count - sum(gpu_count for gpu_count, _ in states)
    states += [(working, OtherKindTexts("works", "work", ""))] if working > 0 else []
    if len(states) == 1:
        texts = states[0][1]
        return f", the other {count} {texts.plural}" if count > 1 else f", the other one {texts.singular}"
    numbers = [f"{number} {texts.singular if number == 1 else texts.plural}" for number, texts in states]
    return f", of the other {count}: {', '.join(numbers)}"


def _waste_figures(members: Sequence[Member], rules: Rules, prefix: str) -> tuple[dict[str, str], str]:
    """The GPU time wasted and its cost, as annotations and as a sentence; empty if no part has a share of a GPU."""
    shared = [member for member in members if member.share is not None]
    seconds_by_member = [(member, (member.seconds or 0) + member.before_s) for member in shared]
    if not seconds_by_member:
        return {}, ""
    seconds = sum(time_s * (member.share or 0) for member, time_s in seconds_by_member)
    firing_share = sum(member.share or 0 for member, _ in seconds_by_member if member.ended_ms is None)
    figures = {"wasted_gpu_seconds": f"{seconds:.0f}", "wasted_gpu_hours": f"{seconds / _HOUR_S:.2f}"}
    figures |= {"gpu_share": f"{firing_share:.4g}"} if firing_share else {}
    text = f"{prefix}: {figures['wasted_gpu_hours']} GPU-hours"
    priced = [(member, time_s) for member, time_s in seconds_by_member if member.price is not None]
    if priced and rules.wording.currency:
        cost = Decimal(0)
        for member, time_s in priced:
            cost += Decimal(repr(time_s * (member.share or 0) / _HOUR_S)) * Decimal(member.price or "0")
        figures |= {"cost": f"{cost:.2f}", "currency": rules.wording.currency}
        text += f", {figures['cost']} {figures['currency']}"
    return figures, f"{text}."


def _is_mig(gpu: AlertGpu) -> bool:
    return gpu.uuid.startswith("MIG-")


def _pods_text(gpus: Iterable[AlertGpu]) -> str:
    return listed(sorted({gpu.pod for gpu in gpus if gpu.pod}))


def _gpus_text(gpus: Iterable[AlertGpu]) -> str:
    """``GPU 0, 1 of gpu-node-1 (ml/bert-0)``, ``2 MIG devices of GPU 0 of ...``, for each node and pod."""
    gpus_by_pod: dict[tuple[str, str | None, bool], list[AlertGpu]] = {}
    for gpu in gpus:
        gpus_by_pod.setdefault((gpu.node, gpu.pod, _is_mig(gpu)), []).append(gpu)
    texts = []
    for (node, pod, are_mig), gpus_there in gpus_by_pod.items():
        indices = sorted({gpu.index for gpu in gpus_there if gpu.index is not None})
        parts = f"{counted(len(gpus_there), 'MIG device')} of " if are_mig else ""
        numbers = f"GPU {', '.join(map(str, indices))} of " if indices else ""
        texts.append(f"{parts}{numbers}{node}{f' ({pod})' if pod else ''}")
    return listed(texts, "; ")
