"""Decides what to do about a firing alert. Pure.

In: the last record of an alert; its namespace, its pods and their owners, as the API server has them. Out: a
:class:`WorkloadChange`, or an :class:`Objection` if nothing is to be done.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from delivery.kubernetes.events import warning
from delivery.policies import opted_out
from topics.actions import Action, ActionKind, Target
from topics.alerts import Alert
from topics.times import epoch_ms

Json = dict[str, Any]

RECLAIMED_BY = "gpustream.dev/reclaimed-by"
"""The annotation of a changed object with the id of the action. It shows whether a change was made."""

EXPLANATION = "gpustream.dev/reclaimed"
"""The annotation of a changed object with the reason, and how to undo the change."""

UNDONE = "gpustream.dev/reclaim-undone"
"""The annotation of an object whose change was undone, with the id of the action."""

SCALED = (("apps", "Deployment"), ("apps", "StatefulSet"))
SUSPENDED = (("batch", "Job"), ("jobset.x-k8s.io", "JobSet"))
KUEUE = "kueue.x-k8s.io"

_OVER = ("Complete", "Completed", "Failed", "Finished")  # the conditions of Jobs, JobSets and Workloads at their end
_MAX_SUMMARY = 500


class Watched(NamedTuple):
    """A firing alert, and since when. Times are those of the log.

    ``fired_ms``: since when it fires. ``whole_ms``: since when all GPUs of the workload are in it; None if some of them
    work, or if that is not known. ``revision``: that of the alert at ``whole_ms``. ``written_ms``: when its last record
    was written.
    """

    alert: Alert
    fired_ms: int
    whole_ms: int | None
    revision: int
    written_ms: int


class Firing(NamedTuple):
    """An alert to decide about. ``since_ms``: since when it fires as the namespace requires; None if it does not.

    ``partly``: the namespace allows actions although some GPUs of the workload work. ``until_s``: it may be acted on
    until then, by the clock that never steps back; after that it may be resolved.
    """

    alert: Alert
    since_ms: int | None
    partly: bool
    written_ms: int
    until_s: float


class Facts(NamedTuple):
    """The objects of an alert at the API server: its namespace, its pods by name (None: deleted), and their owners.

    ``owners``: the owners of each pod up to the top, its controller first; of a kind that is not read, only the
    reference to it. ``workload``: Kueue's Workload that queues one of them.
    """

    namespace: Json
    pods: Mapping[str, Json | None]
    owners: Mapping[str, Sequence[Json]]
    workload: Json | None = None


class Objection(NamedTuple):
    """Why nothing is done: the reason in one word, and a sentence."""

    reason: str
    message: str


class WorkloadChange(NamedTuple):
    """A change: the object as it is now, and what to merge into its spec. ``spec`` None: write an Event about it.

    ``replicas``: the replicas that it has before it is scaled to 0.
    """

    object: Json
    spec: Json | None
    replicas: int | None = None

    @property
    def target(self) -> Target:
        """The object's identity."""
        obj, meta = self.object, self.object["metadata"]
        return Target(api_version=obj["apiVersion"], kind=obj["kind"], name=meta["name"], uid=meta["uid"])


def group_kind(obj: Json) -> tuple[str, str]:
    """The API group and kind of an object."""
    return obj["apiVersion"].rpartition("/")[0], obj["kind"]


def pods_of(alert: Alert) -> list[str]:
    """The names of an alert's pods that are in its namespace."""
    namespace, pod = alert.labels.get("k8s_namespace_name"), alert.labels.get("k8s_pod_name")
    names = {gpu.pod for gpu in alert.gpus if gpu.pod} or ({f"{namespace}/{pod}"} if pod else set())
    return sorted(name.partition("/")[2] for name in names if name.partition("/")[0] == namespace)


def subject(alert: Alert) -> str:
    """What an alert is about, for people: its workload or, if it has none, its pod."""
    labels = alert.labels
    if name := labels.get("k8s_workload_name"):
        return f"{labels.get('k8s_workload_kind', 'workload')} {name}"
    return f"pod {labels['k8s_pod_name']}" if "k8s_pod_name" in labels else f"what {alert.name} is about"


def works_partly(alert: Alert) -> bool:
    """Whether some GPUs of the workload work, or may work."""
    return alert.idle is None or alert.held is None or alert.idle < alert.held


def decide(kind: ActionKind, firing: Firing, facts: Facts, *, idle_ms: int) -> WorkloadChange | Objection:
    """Decide about an action of this kind. ``idle_ms``: for how long the alert has fired as it must."""
    inherited = facts.namespace["metadata"].get("labels") or {}
    inherited = {**inherited, **(facts.namespace["metadata"].get("annotations") or {})}
    if not facts.pods:
        return Objection("no_owner", f"{subject(firing.alert)}: the alert names no pod")
    for name, pod in facts.pods.items():
        if (changed := _change_of_pod(name, pod, firing)) is not None:
            return Objection("changed", changed)
        for obj in filter(None, (pod, *facts.owners[name], facts.workload)):
            template = (obj.get("spec") or {}).get("template") or {}  # it may not have made its pods by that yet
            for part in (obj, template):
                annotations = (part.get("metadata") or {}).get("annotations") or {}
                if (reason := opted_out(annotations, inherited, idle_ms)) is not None:
                    return Objection("opted_out", f"{_named(obj)} is left alone: {reason}")
    chains = list(facts.owners.values())
    if not all(chains):
        pod_name = next(name for name, chain in facts.owners.items() if not chain)
        return Objection("no_owner", f"pod {pod_name} has no owner that would start it again: only a person may end it")
    if len({chain[-1]["metadata"]["uid"] for chain in chains}) > 1:
        return Objection("several_owners", f"{subject(firing.alert)}: the pods of the alert have several owners")
    change = _workload_change(kind, chains, facts.workload)
    if isinstance(change, Objection) or firing.partly or kind == "event":
        return change
    return _unknown_pods(chains) or change


def _unknown_pods(chains: Sequence[Sequence[Json]]) -> Objection | None:
    """An objection if an owner has pods that are not in the alert: they may be on a node that sends no ticks."""
    alerted = Counter(obj["metadata"]["uid"] for chain in chains for obj in chain)
    for obj in (obj for chain in chains for obj in reversed(chain)):
        status, uid = obj.get("status") or {}, obj["metadata"]["uid"]
        count = status.get("active" if obj["kind"] == "Job" else "replicas")
        if isinstance(count, int) and count > alerted[uid]:
            message = f"{_named(obj)} has {count} pods, and the alert is about {alerted[uid]}"
            return Objection("partly", f"{message}: what the others do is not known")
    return None


def _change_of_pod(name: str, pod: Json | None, firing: Firing) -> str | None:
    """How a pod has changed since its alert was written; None if it has not. A pod never moves to another node."""
    alert = firing.alert
    if pod is None:
        return f"pod {name} is not there any more"
    if pod["metadata"].get("deletionTimestamp") or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return f"pod {name} has ended"
    # without "partly" all pods have been in the alert since it counts; it may be renewed by what another node reports
    known_ms = firing.written_ms if firing.partly or firing.since_ms is None else firing.since_ms
    if epoch_ms(datetime.fromisoformat(pod["metadata"]["creationTimestamp"])) > known_ms:
        return f"pod {name} was made after the alert was about it: it is another pod"
    uid = alert.labels.get("k8s_pod_uid") if alert.labels.get("k8s_pod_name") == name else None
    if uid not in (None, pod["metadata"]["uid"]):
        return f"pod {name} has another uid than the alert's: it is another pod"
    nodes = {gpu.node for gpu in alert.gpus if gpu.pod and gpu.pod.partition("/")[2] == name} or {alert.node}
    node = pod.get("spec", {}).get("nodeName")
    if node is not None and node not in nodes:
        return f"pod {name} is on node {node}, and the alert's was on {', '.join(sorted(nodes))}: it is another pod"
    return None


def _workload_change(
    kind: ActionKind, chains: Sequence[Sequence[Json]], workload: Json | None
) -> WorkloadChange | Objection:
    """The change of the pods' owner that an action of this kind makes, or why it can't be made."""
    top = chains[0][-1]
    if kind == "event":
        return WorkloadChange(top, None)
    if kind == "deactivate":
        if workload is None or "spec" not in workload:
            return Objection("unsupported", f"{_named(top)} is not queued by Kueue")
        return _unless_over(workload, {"active": False}, is_done=workload["spec"].get("active") is False)
    kinds = SCALED if kind == "scale" else SUSPENDED
    chain_by_uid = {obj["metadata"]["uid"]: chain for chain in chains for obj in chain if _is_of(obj, kinds)}
    if not chain_by_uid:
        return Objection("unsupported", f"{_named(top)} can't be {'scaled' if kind == 'scale' else 'suspended'}")
    if kind == "suspend" and workload is not None:
        return Objection("managed", f"{_named(top)} is queued by Kueue, which would resume it: opt in to deactivate")
    chain = next(iter(chain_by_uid.values()))
    level = max(level for level, obj in enumerate(chain) if _is_of(obj, kinds))
    obj, above = chain[level], chain[level + 1 :]
    if above and group_kind(above[0]) != ("batch", "CronJob"):
        return Objection("managed", f"{_named(obj)} belongs to {_named(above[0])}, which may undo what is changed")
    if len({chain[level]["metadata"]["uid"] for chain in chains if len(chain) > level}) > 1:
        return Objection("several_owners", f"the pods of the alert belong to several of {obj['kind']}")
    if kind == "scale":
        claims = obj["spec"].get("persistentVolumeClaimRetentionPolicy") or {}
        if claims.get("whenScaled") == "Delete" and obj["spec"].get("volumeClaimTemplates"):
            return Objection("unsupported", f"{_named(obj)} would lose its volumes: whenScaled of its claims is Delete")
        replicas = obj["spec"].get("replicas", 1)
        return _unless_over(obj, {"replicas": 0}, is_done=replicas == 0, replicas=replicas)
    return _unless_over(obj, {"suspend": True}, is_done=obj["spec"].get("suspend") is True)


def _is_of(obj: Json, kinds: Sequence[tuple[str, str]]) -> bool:
    return group_kind(obj) in kinds and "spec" in obj


def is_over(obj: Json) -> bool:
    """Whether an object has ended, by its conditions."""
    conditions = obj.get("status", {}).get("conditions") or ()
    return any(condition["type"] in _OVER and condition["status"] == "True" for condition in conditions)


def _unless_over(obj: Json, spec: Json, *, is_done: bool, replicas: int | None = None) -> WorkloadChange | Objection:
    """The change of an object, unless it has ended, is being deleted, or has what the change would make."""
    if is_done or is_over(obj):
        return Objection("already", f"{_named(obj)} has ended, or somebody stopped it already")
    if obj["metadata"].get("deletionTimestamp"):
        return Objection("changed", f"{_named(obj)} is being deleted")
    return WorkloadChange(obj, spec, replicas)


def _named(obj: Json) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"


def patch(change: WorkloadChange, action: str, summary: str) -> Json:
    """The merge patch of a change. The API server refuses it (409) if the object was replaced or changed since."""
    explanation = f"{summary[:_MAX_SUMMARY]}; to undo it: gpustream reclaim undo {action}"
    return _merge(change.object, {RECLAIMED_BY: action, EXPLANATION: explanation, UNDONE: None}, change.spec)


def _merge(obj: Json, annotations: Json, spec: object) -> Json:
    """A merge patch of an object as it is now."""
    meta = obj["metadata"]
    of_object = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"], "annotations": annotations}
    return {"metadata": of_object, "spec": spec}


def is_done(obj: Json | None, action: str) -> bool:
    """Whether an action has changed an object, even if that was undone later."""
    annotations = (obj["metadata"].get("annotations") or {}) if obj is not None else {}
    return action in (annotations.get(RECLAIMED_BY), annotations.get(UNDONE))


def changed_by(action: str, facts: Facts) -> bool:
    """Whether one of the objects shows that an action has changed it."""
    objects = [obj for chain in facts.owners.values() for obj in chain]
    return any(is_done(obj, action) for obj in (*objects, facts.workload))


def event_name(action: str, uid: str) -> str:
    """The name of an action's Event about an object. It is always the same, so there is only one."""
    return f"gpustream.{action}.{uid}"


def event(alert: Alert, action: str, about: Json, namespace: str, text: str, now: datetime) -> Json:
    """A Kubernetes Event about an object."""
    meta = about["metadata"]
    reference = {"apiVersion": about["apiVersion"], "kind": about["kind"], "name": meta["name"], "uid": meta["uid"]}
    of_object, name = {**reference, "namespace": namespace}, event_name(action, meta["uid"])
    content = warning(name, of_object, now, reason=alert.name, text=text, controller="reclaim")
    return content | {"action": "Reclaim"}


def unpatch(action: Action, obj: Json | None) -> Json | Objection:
    """The merge patch that undoes an action, if nobody has changed the object since."""
    if action.target is None or action.action not in ("scale", "suspend", "deactivate"):
        return Objection("unsupported", "there is nothing to undo: nothing was changed")
    name = f"{action.target.kind} {action.namespace}/{action.target.name}"
    if obj is None:
        return Objection("changed", f"{name} is not there any more")
    meta = obj["metadata"]
    annotations = meta.get("annotations") or {}
    if annotations.get(RECLAIMED_BY) != action.id:
        return Objection(
            "changed",
            f"{name} does not have {RECLAIMED_BY}: {action.id}: it was not done, or somebody changed it since",
        )
    if action.generation is not None and meta.get("generation") != action.generation:
        return Objection("changed", f"somebody changed {name} since: look at it, and change it yourself")
    specs = {"scale": {"replicas": action.replicas}, "suspend": {"suspend": False}, "deactivate": {"active": True}}
    return _merge(obj, {RECLAIMED_BY: None, EXPLANATION: None, UNDONE: action.id}, specs[action.action])


def was_undone(obj: Json | None, action: str) -> bool:
    """Whether the object shows that an action was undone."""
    return obj is not None and (obj["metadata"].get("annotations") or {}).get(UNDONE) == action


def describe(action: str, target: Target, namespace: str) -> str:
    """What an action does, for people."""
    verbs = {"event": "an Event about", "scale": "scale to 0", "suspend": "suspend", "deactivate": "deactivate"}
    return f"{verbs.get(action, action)} {target.kind} {namespace}/{target.name}"
