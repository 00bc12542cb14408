"""The labels and annotations of an alert of several GPUs, from its parts. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple

from streams.alerts.rules.rule import ALL_GPUS_KINDS, Kind, Rule, Rules
from topics.alerts import Alert, AlertGpu, AlertGroup, AlertReport, Member, Scope, moment, time

_OF_DEVICE = ("gpu_uuid", "gpu_index", "gpu_model", "gpu_mig_uuid", "gpu_mig_profile", "k8s_container_name")
_OF_POD = ("k8s_pod_name", "k8s_pod_uid")
_NOT_OF: dict[Scope, tuple[str, ...]] = {
    "workload": (*_OF_DEVICE, *_OF_POD, "k8s_node_name"),
    "pod": _OF_DEVICE,
    "node": (*_OF_DEVICE, *_OF_POD),
}
_MOST_NAMED = 8  # of pods or nodes in a description
_HOUR_S = 3600

_OF_NODE: dict[Kind, tuple[str, str]] = {
    "missing": ("is not there any more", "are not there any more"),
    "lost": ("is lost: NVML can't reach it any more", "are lost: NVML can't reach them any more"),
    "not_answering": ("does not answer its driver", "do not answer their driver"),
}
POLICY = (
    "Give back what is not needed. If a pod is to keep idle GPUs, annotate it, or its namespace, with"
    ' gpustream.dev/idle-after: "2h", or gpustream.dev/alerts: "off".'
)


class OfPods(NamedTuple):
    """What GPUs of pods are, what a tenant can do, and what comes before the time since which they are that."""

    state: str
    policy: str
    since: str = ""
    never: str = ""


class OfOthers(NamedTuple):
    """What another rule says of a GPU, of one and of several, and how a sentence about such GPUs begins."""

    one: str
    several: str
    named: str


_OTHERS_DO: dict[Kind, OfOthers] = {
    "crash_loop": OfOthers("crashes again and again", "crash again and again", "Crashed"),
    "held_idle": OfOthers("is idle", "are idle", "Idle"),
    "stalled": OfOthers("stalls", "stall", "Stalled"),
}

_SWITCH = ' If that is meant, annotate the pod, or its namespace, with gpustream.dev/alerts: "off".'
_OF_PODS: dict[Kind, OfPods] = {
    "held_idle": OfPods("idle", POLICY, "The last work was at", "None has worked since the grace of its pod was over."),
    "stalled": OfPods(
        "stalled",
        "Utilization is full, and hardly any work is done: look where the processes wait, and start them again."
        f"{_SWITCH}",
    ),
    "underused": OfPods("underused", f"Use fewer or smaller GPUs, share them, or look what they wait for.{_SWITCH}"),
    "memory_hoarded": OfPods(
        "hardly used, with their memory held",
        f"Free the memory, or use a smaller GPU or a part of one.{_SWITCH}",
    ),
    "straggler": OfPods(
        "suspect",
        "The others of the workload may wait for them: look at the GPU, its node and its links, and run the workload"
        " without them.",
    ),
    "crash_loop": OfPods(
        "held by containers that crash again and again",
        f"Read the logs of the last run, and scale the workload down until it is mended.{_SWITCH}",
    ),
}


def labels_of(part: Alert, scope: Scope) -> dict[str, str]:
    """The labels of an alert, from those of its first part: what is of one device or pod alone is left out."""
    left_out = set(_NOT_OF[scope])
    if scope == "node":
        left_out |= {name for name in part.labels if name.startswith("k8s_") and name not in _PLACE}
    return {name: value for name, value in part.labels.items() if name not in left_out}


_PLACE = ("k8s_cluster_name", "k8s_node_name")


def grouped(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> tuple[dict[str, str], float | None]:
    """The annotations of an alert, and its value: for how long its condition has held of any of its GPUs."""
    rule, members = rules.by_name.get(alert.name), group.members
    own = _own(rule, alert) if rule is not None else {}
    value = max([member.seconds for member in members if member.seconds is not None], default=alert.value)
    if not alert.is_open:
        figures, words = _waste(members, rules, "In the end")
        description = f"{alert.annotations.get('description', '')} {words}".strip()
        found = {**alert.annotations, **figures, "description": description}
    elif report.scope == "node":
        kind = rule.kind if rule is not None else "missing"
        state = _OF_NODE.get(kind, ("has a fault", "have a fault"))[len(alert.gpus) > 1]
        summary = f"{_count(len(alert.gpus), 'GPU')} of {alert.node} {state}"
        cause = "They went at one time, so the cause is likely one: the driver, its module, or the machine."
        found = {**alert.annotations, "summary": summary, "description": f"{summary}: {_places(alert.gpus)}. {cause}"}
    else:
        found = _of_pods(alert, group, report, rules)
    return {**found, **own}, value


def _of_pods(alert: Alert, group: AlertGroup, report: AlertReport, rules: Rules) -> dict[str, str]:
    """The annotations of an alert about what pods do with their GPUs."""
    rule, going = rules.by_name.get(alert.name), [member for member in group.members if member.ended_ms is None]
    figures, wasted = _waste(group.members, rules, f"Wasted by {moment(time(report.ts_ms))}")
    worked = max([member.last_active for member in going if member.last_active is not None], default=None)
    idle, held = alert.idle or 0, max(alert.held or 0, alert.idle or 0)
    state, policy, since, never = _OF_PODS[rule.kind if rule is not None and rule.kind in _OF_PODS else "held_idle"]
    noun = "MIG device" if all(gpu.uuid.startswith("MIG-") for gpu in alert.gpus) else "GPU"
    others: dict[Kind, list[AlertGpu]] = {kind: [] for kind in _OTHERS_DO}
    for one in [one for one in group.others if one.gpu not in alert.gpus]:
        others.setdefault(kind_of(one, rule, rules), []).append(one.gpu)
    work = _others_do(others, rule, held - idle)
    culprits = [f"{_OTHERS_DO[kind].named}: {_places(some)}." for kind, some in others.items() if some]
    culprits += ["Look there first: the others may wait for it."] if culprits else []
    held_since = [member.since for member in going if member.since is not None]
    when = _since(going, rule, alert.annotations.get("window"))
    summary = f"{_whose(alert.labels)}: {idle} of {_count(held, noun)} {state}{work}{when}"
    evidence = _listed(list(dict.fromkeys(f"{_place(m)}: {m.evidence}" for m in going if m.evidence)), "; ")
    sentences = [
        f"{summary}. {state.partition(',')[0].capitalize()}: {_places(alert.gpus)}.",
        *(culprits if rule is not None and rule.kind in ALL_GPUS_KINDS else []),
        f"Evidence: {evidence}." if evidence else "",
        wasted,
        never if not worked else f"{since} {worked}." if since else "",
        policy,
    ]
    return {
        **{name: text for name, text in alert.annotations.items() if name not in ("last_active", "gpu_hour_price")},
        "summary": summary,
        "description": " ".join(filter(None, sentences)),
        "pods": _listed(sorted({gpu.pod for gpu in alert.gpus if gpu.pod})),
        "policy": policy,
        **figures,
        **({"evidence": evidence} if evidence else {}),
        **({"last_active": worked} if worked else {}),
        **({"since": f"{min(held_since):%Y-%m-%dT%H:%M:%SZ}"} if held_since else {}),
    }


def _since(members: Sequence[Member], rule: Rule | None, window: str | None) -> str:
    """Since when it is so of the GPUs, as the summary says it, and until when some worked in between for a moment."""
    times = [time(one.starts_ms) if window else one.since for one in members]
    known = [at for at in times if at is not None]
    if not known:
        return ""
    since = f"in the {window} until" if window else "since"
    first = "the first " if len({moment(at) for at in known}) > 1 else ""
    worked = [at for one in members if one.last_active and (at := datetime.fromisoformat(one.last_active)) > max(known)]
    says_work = rule is not None and rule.kind in ("held_idle", *ALL_GPUS_KINDS)
    between = f", with work until {moment(max(worked))}" if worked and says_work else ""
    return f" ({first}{since} {moment(min(known))}{between})"


def kind_of(other: Member, rule: Rule | None, rules: Rules) -> Kind:
    """What another rule says of a GPU. An earlier version kept no name, and knew these two kinds."""
    if other.name is not None and other.name in rules.by_name:
        return rules.by_name[other.name].kind
    return "held_idle" if rule is not None and rule.kind in ALL_GPUS_KINDS else "stalled"


def _others_do(others: Mapping[Kind, Sequence[AlertGpu]], rule: Rule | None, count: int) -> str:
    """What the GPUs of the workload do that an alert is not about, if that is known."""
    if count <= 0 or (rule is not None and rule.kind not in ("held_idle", *ALL_GPUS_KINDS)):
        return ""
    known = [(len(some), _OTHERS_DO[kind]) for kind, some in others.items() if some]
    working = count - sum(some for some, _ in known)
    known += [(working, OfOthers("works", "work", ""))] if working > 0 else []
    if len(known) == 1:
        return f", the other {count} {known[0][1].several}" if count > 1 else f", the other one {known[0][1].one}"
    return f", of the other {count}: " + ", ".join(f"{n} {do.one if n == 1 else do.several}" for n, do in known)


def _own(rule: Rule, alert: Alert) -> dict[str, str]:
    """The annotations of a rule and, of its overrides, those that the alert began with."""
    theirs = [one for override in rule.overrides for one in override.changes.get("annotations", {}).items()]
    return rule.annotations | {name: text for name, text in theirs if alert.annotations.get(name) == text}


def _whose(labels: Mapping[str, str]) -> str:
    """``Job ml-team/bert``, ``Pod ml-team/bert-0``, or ``Job 4242`` of a batch system."""
    if "job_id" in labels:
        return f"Job {labels['job_id']}"
    kind = labels.get("k8s_workload_kind", "Pod")
    name = labels.get("k8s_workload_name") or labels.get("k8s_pod_name")
    return f"{kind} {labels.get('k8s_namespace_name')}/{name}"


def _waste(members: Sequence[Member], rules: Rules, when: str) -> tuple[dict[str, str], str]:
    """What was wasted, as annotations and as a sentence; nothing if it is not known of any part."""
    known = [(member, (member.seconds or 0) + member.before_s) for member in members if member.share is not None]
    if not known:
        return {}, ""
    seconds = sum(time_s * (member.share or 0) for member, time_s in known)
    going = sum(member.share or 0 for member, _ in known if member.ended_ms is None)
    figures = {"wasted_gpu_seconds": f"{seconds:.0f}", "wasted_gpu_hours": f"{seconds / _HOUR_S:.2f}"}
    figures |= {"gpu_share": f"{going:.4g}"} if going else {}
    words = f"{when}: {figures['wasted_gpu_hours']} GPU-hours"
    priced = [(member, time_s) for member, time_s in known if member.price is not None]
    if priced and rules.wording.currency:
        hours = [Decimal(repr(time_s * (m.share or 0) / _HOUR_S)) * Decimal(m.price or "0") for m, time_s in priced]
        figures |= {"cost": f"{sum(hours):.2f}", "currency": rules.wording.currency}
        words += f", {figures['cost']} {figures['currency']}"
    return figures, f"{words}."


def _places(gpus: Iterable[AlertGpu]) -> str:
    """``GPU 0, 1 of gpu-node-1 (ml/bert-0)``, for each node and pod."""
    found = []
    for (node, pod), some in groupby(gpus, key=lambda gpu: (gpu.node, gpu.pod)):
        indices = sorted({gpu.index for gpu in some if gpu.index is not None})
        numbers = f"GPU {', '.join(map(str, indices))} of " if indices else ""
        found.append(f"{numbers}{node}{f' ({pod})' if pod else ''}")
    return _listed(found, "; ")


def _place(member: Member) -> str:
    return f"GPU {member.gpu.uuid if member.gpu.index is None else member.gpu.index} of {member.gpu.node}"


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return between.join([*names[:_MOST_NAMED], *more])


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
