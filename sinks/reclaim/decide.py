"""What is to be done about a firing alert, and why not. Pure.

In: an alert as it was last written, the annotations of its namespace, its pods and the objects above them, as the API
server has them. Out: a :class:`WorkloadChange`, or an :class:`Objection`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from delivery.policies import opted_out
from topics.actions import Action, ActionKind, Target
from topics.alerts import Alert, milliseconds

Json = dict[str, Any]

BY = "gpustream.dev/reclaimed-by"
"""On an object that was changed: the action's id. It is how a change that was made is known from one that was not."""

WHY = "gpustream.dev/reclaimed"
"""And why, and how it is undone."""

UNDONE = "gpustream.dev/reclaim-undone"
"""On an object that was given back: the action's id."""

SCALED = (("apps", "Deployment"), ("apps", "StatefulSet"))
SUSPENDED = (("batch", "Job"), ("jobset.x-k8s.io", "JobSet"))
KUEUE = "kueue.x-k8s.io"

_LONGEST_WHY = 500


class Watched(NamedTuple):
    """An alert that fires, and what is known of its course, by the log's times.

    ``fired_ms``: since when it fires. ``whole_ms``: since when all GPUs of the workload are in it, and ``revision`` is
    the alert's then; None if some work, or if that is not known. ``written_ms``: when it was last written.
    """

    alert: Alert
    fired_ms: int
    whole_ms: int | None
    revision: int
    written_ms: int


class Firing(NamedTuple):
    """An alert by which something is decided. ``since_ms``: since when it fires as it must; None: it does not.

    ``partly``: the namespace lets it be done although some of the workload's GPUs work.
    """

    alert: Alert
    since_ms: int | None
    partly: bool
    written_ms: int


class Facts(NamedTuple):
    """What the API server has: the pods of an alert by name (None: gone), and what is above them.

    ``owners`` are the objects above each pod, its own controller first, each as an object, or only as the reference
    that another has to it. ``workload``: the Workload by which Kueue queues one of them.
    """

    namespace: Json
    pods: Mapping[str, Json | None]
    owners: Mapping[str, Sequence[Json]]
    workload: Json | None = None


class Objection(NamedTuple):
    """Why nothing is done: a word and a sentence."""

    reason: str
    message: str


class WorkloadChange(NamedTuple):
    """What to change: the object as it is now, and what to merge into its spec; None: an Event about it.

    ``replicas`` is how many it has, if they are taken.
    """

    object: Json
    spec: Json | None
    replicas: int | None = None

    @property
    def target(self) -> Target:
        """The object's identity."""
        return target_of(self.object)


def target_of(one: Json) -> Target:
    """The identity of an object."""
    meta = one["metadata"]
    return Target(api_version=one["apiVersion"], kind=one["kind"], name=meta["name"], uid=meta["uid"])


def group_kind(one: Json) -> tuple[str, str]:
    """Its API group and kind."""
    return one["apiVersion"].rpartition("/")[0], one["kind"]


def pods_of(alert: Alert) -> list[str]:
    """The names of the pods that an alert is about, of its own namespace."""
    namespace, own = alert.labels.get("k8s_namespace_name"), alert.labels.get("k8s_pod_name")
    named = {gpu.pod for gpu in alert.gpus if gpu.pod} or ({f"{namespace}/{own}"} if own else set())
    return sorted(name.partition("/")[2] for name in named if name.partition("/")[0] == namespace)


def works_partly(alert: Alert) -> bool:
    """Whether some of the workload's GPUs work, or that is not known."""
    return alert.idle is None or alert.held is None or alert.idle < alert.held


def decide(kind: ActionKind, firing: Firing, facts: Facts, *, idle_ms: int) -> WorkloadChange | Objection:
    """What is to be done. ``idle_ms``: for how long the alert has fired as it must."""
    inherited = facts.namespace["metadata"].get("labels") or {}
    inherited = {**inherited, **(facts.namespace["metadata"].get("annotations") or {})}
    if not facts.pods:
        return Objection("no_owner", "the alert names no pod")
    for name, pod in facts.pods.items():
        if (refusal := _unfit(name, pod, firing.written_ms)) is not None:
            return refusal
        for one in (pod, *facts.owners[name]):
            meta = one["metadata"] if one is not None else {}
            why = opted_out(meta.get("annotations") or {}, inherited, idle_ms) if one is not None else None
            if one is not None and why is not None:
                return Objection("opted_out", f"{one['kind']} {meta['name']} is left alone: {why}")
    chains = list(facts.owners.values())
    if not all(chains):
        pod_name = next(name for name, chain in facts.owners.items() if not chain)
        return Objection("no_owner", f"pod {pod_name} has no owner that would start it again: only a person may end it")
    if len({chain[-1]["metadata"]["uid"] for chain in chains}) > 1:
        return Objection("several_owners", "the pods of the alert have several owners")
    plan = _plan(kind, chains, facts.workload)
    if isinstance(plan, Objection) or firing.partly:
        return plan
    count = (plan.object.get("status") or {}).get({"scale": "replicas", "suspend": "active"}.get(kind, ""))
    if isinstance(count, int) and count > len(chains):  # one may be on a node that sends no ticks
        message = f"{_named(plan.object)} has {count} pods, and the alert is about {len(chains)}"
        return Objection("partly", f"{message}: what the others do is not known")
    return plan


def _unfit(name: str, pod: Json | None, written_ms: int) -> Objection | None:
    """Why a pod is not, or no longer, what the alert is about."""
    if pod is None:
        return Objection("changed", f"pod {name} is not there any more")
    if pod["metadata"].get("deletionTimestamp") or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return Objection("changed", f"pod {name} has ended")
    if milliseconds(datetime.fromisoformat(pod["metadata"]["creationTimestamp"])) > written_ms:
        return Objection("changed", f"pod {name} was made after the alert was written: it is another pod")
    return None


def _plan(kind: ActionKind, chains: Sequence[Sequence[Json]], workload: Json | None) -> WorkloadChange | Objection:
    top = chains[0][-1]
    if kind == "event":
        return WorkloadChange(top, None)
    if kind == "deactivate":
        if workload is None:
            return Objection("unsupported", f"{_named(top)} is not queued by Kueue")
        return _change(workload, {"active": False}, is_done=workload["spec"].get("active") is False)
    wanted = SCALED if kind == "scale" else SUSPENDED
    found = {chain[i]["metadata"]["uid"]: chain for chain in chains for i in range(len(chain)) if _is(chain[i], wanted)}
    if not found:
        return Objection("unsupported", f"{_named(top)} can't be {'scaled' if kind == 'scale' else 'suspended'}")
    if kind == "suspend" and workload is not None:
        return Objection("managed", f"{_named(top)} is queued by Kueue, which would resume it: opt in to deactivate")
    chain = next(iter(found.values()))
    at = max(i for i in range(len(chain)) if _is(chain[i], wanted))
    one, above = chain[at], chain[at + 1 :]
    if above and group_kind(above[0]) != ("batch", "CronJob"):
        return Objection("managed", f"{_named(one)} belongs to {_named(above[0])}, which may undo what is changed")
    if len({c[at]["metadata"]["uid"] for c in chains if len(c) > at}) > 1:
        return Objection("several_owners", f"the pods of the alert belong to several of {one['kind']}")
    if kind == "scale":
        replicas = one["spec"].get("replicas", 1)
        return _change(one, {"replicas": 0}, is_done=replicas == 0, replicas=replicas)
    return _change(one, {"suspend": True}, is_done=one["spec"].get("suspend") is True)


def _is(one: Json, kinds: Sequence[tuple[str, str]]) -> bool:
    return group_kind(one) in kinds and "spec" in one


def _change(one: Json, spec: Json, *, is_done: bool, replicas: int | None = None) -> WorkloadChange | Objection:
    conditions = one.get("status", {}).get("conditions") or ()
    if is_done or any(c["type"] in ("Complete", "Failed", "Finished") and c["status"] == "True" for c in conditions):
        return Objection("already", f"{_named(one)} has ended, or somebody stopped it already")
    if one["metadata"].get("deletionTimestamp"):
        return Objection("changed", f"{_named(one)} is being deleted")
    return WorkloadChange(one, spec, replicas)


def _named(one: Json) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def patch(plan: WorkloadChange, action: str, summary: str) -> Json:
    """What is merged into the object: it is refused (409) if the object is another, or was changed, since."""
    meta = plan.object["metadata"]
    why = f"{summary[:_LONGEST_WHY]}; to undo it: gpustream reclaim undo {action}"
    return {
        "metadata": {
            "uid": meta["uid"],
            "resourceVersion": meta["resourceVersion"],
            "annotations": {BY: action, WHY: why, UNDONE: None},
        },
        "spec": plan.spec,
    }


def is_done(one: Json | None, action: str) -> bool:
    """Whether an object is as an action has left it, or was given back after that."""
    annotations = (one["metadata"].get("annotations") or {}) if one is not None else {}
    return action in (annotations.get(BY), annotations.get(UNDONE))


def event_name(action: str, uid: str) -> str:
    """The name of an action's Event about an object: the same each time, so that it is there once."""
    return f"gpustream.{action}.{uid}"


def event(alert: Alert, action: str, about: Json, namespace: str, text: str, now: str) -> Json:
    """A Kubernetes Event about an object."""
    meta = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event_name(action, meta["uid"]), "namespace": namespace},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": meta["name"],
            "namespace": namespace,
            "uid": meta["uid"],
        },
        "type": "Warning",
        "reason": alert.name,
        "action": "Reclaim",
        "message": text[:1024],
        "source": {"component": "gpustream"},
        "reportingComponent": "gpustream.dev/reclaim",
        "reportingInstance": "gpustream",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def unpatch(action: Action, one: Json | None) -> Json | Objection:
    """What is merged into an object to undo an action, if nobody changed it since."""
    if action.target is None or action.action not in ("scale", "suspend", "deactivate"):
        return Objection("unsupported", "there is nothing to undo: nothing was changed")
    name = f"{action.target.kind} {action.namespace}/{action.target.name}"
    if one is None:
        return Objection("changed", f"{name} is not there any more")
    meta = one["metadata"]
    annotations = meta.get("annotations") or {}
    if annotations.get(BY) != action.id:
        return Objection("changed", f"{name} does not have {BY}: {action.id} any more: somebody else changed it since")
    if action.generation is not None and meta.get("generation") != action.generation:
        return Objection("changed", f"somebody changed {name} since: look at it, and change it yourself")
    spec = {"scale": {"replicas": action.replicas}, "suspend": {"suspend": False}, "deactivate": {"active": True}}
    return {
        "metadata": {
            "uid": meta["uid"],
            "resourceVersion": meta["resourceVersion"],
            "annotations": {BY: None, WHY: None, UNDONE: action.id},
        },
        "spec": spec[action.action],
    }


def was_undone(one: Json | None, action: str) -> bool:
    """Whether an action was undone, although that may not have been written down."""
    return one is not None and (one["metadata"].get("annotations") or {}).get(UNDONE) == action


def due_ms(after_ms: int | None, least_ms: int, from_ms: int) -> int:
    """When an action is due: as long after as the namespace says, and not before the operator's least."""
    return from_ms + max(after_ms or 0, least_ms)


def words(action: str, target: Target, namespace: str) -> str:
    """What an action does, for people."""
    what = {"event": "an Event about", "scale": "scale to 0", "suspend": "suspend", "deactivate": "deactivate"}
    return f"{what[action]} {target.kind} {namespace}/{target.name}"
