"""The check of gpustream's pods in Kubernetes: what keeps them from running, what is wrong in their configuration."""

import difflib
from collections.abc import Iterator

from delivery.values import counted
from gpustream.cli import commands
from gpustream.doctor.kubernetes import (
    COMPONENT,
    OWNERS,
    component_of,
    last_termination,
    lease_of,
    statuses,
    timestamp_ms,
)
from gpustream.doctor.readers import ATTRIBUTION
from gpustream.doctor.situation import CheckResult, Cluster, Finding, Json, Situation

_NOT_READY_MS = 60_000
_LEASE_EXPIRED_MS = 60_000
_MAX_TEXT = 300


def pods(situation: Situation) -> CheckResult:
    """Checks what keeps gpustream's pods from running, and what is wrong in their configuration."""
    cluster = situation.cluster
    if cluster is None:
        return CheckResult("not asked (--kube)", looked=False)
    if cluster.error:
        next_step = "--kubeconfig says where the API server is; `kubectl get pods` with it must work"
        shown_by = f"namespace {cluster.namespace}"
        return CheckResult(
            "not known", [Finding("the Kubernetes API does not answer", cluster.error, shown_by, next_step)]
        )
    findings = [
        *(finding for pod in cluster.pods for finding in pod_findings(situation, cluster, pod)),
        *_missing_pods(situation, cluster),
        *_nodes_without_producer(cluster),
        *_unknown_variables(cluster),
        *(
            Finding(
                f"the service account {account} may not {', '.join(rights)}",
                "its Role or ClusterRole, or the binding of one, is missing or another version's",
                "the API server was asked by a SubjectAccessReview",
                "apply the Role, ClusterRole and bindings of k8s/base/cluster or of the chart again",
            )
            for account, rights in cluster.missing_rights.items()
            if rights
        ),
        *_lease_findings(situation, cluster),
    ]
    ready = sum(_condition(pod, "Ready").get("status") == "True" for pod in cluster.pods)
    refused_text = "".join(f"; this user may not see {kind}: {reason}" for kind, reason in cluster.refusals.items())
    return CheckResult(
        f"{ready} of {counted(len(cluster.pods), 'pod')} ready in {cluster.namespace}{refused_text}", findings
    )


def _condition(pod: Json, kind: str) -> Json:
    rows = (pod.get("status") or {}).get("conditions") or []
    return next((row for row in rows if row["type"] == kind), {})


_IMAGE_NEXT = "is the image's name right, is it in that registry, and does an imagePullSecret let this node have it?"

_WAITING_NEXT = {
    "ErrImagePull": _IMAGE_NEXT,
    "ImagePullBackOff": _IMAGE_NEXT,
    "InvalidImageName": "mend the image's name",
    "CreateContainerConfigError": "a Secret or ConfigMap that it names, or a key of one, is missing: make it",
    "CreateContainerError": "`kubectl describe pod` has the runtime's words",
    "RunContainerError": "`kubectl describe pod` has the runtime's words: is NVIDIA's container runtime on the node?",
}

_EXIT_CODES = {
    1: ("it failed", "its log has the sentence"),
    2: ("its options or variables are wrong", "its log lists every mistake: mend the arguments, or the ConfigMap"),
    70: ("it stopped itself to be restarted", "the last line of its log says why"),
    137: (
        "it was killed",
        "out of memory if the reason is OOMKilled: raise its limit; docs/operations/benchmarks.md has sizes",
    ),
}


def pod_findings(situation: Situation, cluster: Cluster, pod: Json) -> Iterator[Finding]:
    """Findings for a pod: one for what keeps it from starting, else one for each container."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    phase = status.get("phase", "Pending")
    describe = f"`kubectl -n {cluster.namespace} describe pod {name}`"
    if phase == "Succeeded" or pod["metadata"].get("deletionTimestamp"):
        return
    if phase == "Failed":
        cause = f"{status.get('reason', '')} {status.get('message', '')}".strip() or "its container ended"
        yield Finding(f"pod {name} has failed", cause, "phase Failed", describe)
        return
    scheduled = _condition(pod, "PodScheduled")
    if phase == "Pending" and scheduled.get("status") == "False":
        cause = f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
        next_step = f"give it room, or mend its nodeSelector, tolerations or volumes: {describe}"
        yield Finding(
            f"pod {name} is Pending: no node takes it", cause[:_MAX_TEXT], "condition PodScheduled", next_step
        )
        return
    findings = [finding for status in statuses(pod) for finding in _container_findings(situation, cluster, pod, status)]
    yield from findings
    ready = _condition(pod, "Ready")
    since_ms = timestamp_ms(ready.get("lastTransitionTime")) or situation.now_ms
    if not findings and ready.get("status") == "False" and situation.now_ms - since_ms > _NOT_READY_MS:
        cause = ready.get("message") or ready.get("reason") or "it does not say"
        next_step = (
            "its /readyz has the reasons: `kubectl -n {} port-forward {} 9401`, then `curl 127.0.0.1:9401/readyz`"
        )
        yield Finding(
            f"pod {name} is not ready since {situation.ago(since_ms)}",
            str(cause),
            "condition Ready",
            next_step.format(cluster.namespace, name),
        )


def _container_findings(situation: Situation, cluster: Cluster, pod: Json, status: Json) -> Iterator[Finding]:
    name, container = pod["metadata"]["name"], status["name"]
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _WAITING_NEXT:
        yield Finding(
            f"pod {name}: {reason}",
            message[:_MAX_TEXT] or reason,
            f"image {status.get('image')}",
            _WAITING_NEXT[reason],
        )
        return
    termination = last_termination(status)
    since_ms = timestamp_ms(termination.get("finishedAt")) or 0
    if (
        not termination
        or (reason != "CrashLoopBackOff" and since_ms < situation.since_ms)
        or not termination.get("exitCode")
    ):
        return
    code = termination["exitCode"]
    cause, next_step = _EXIT_CODES.get(code, ("it ended", "its log says more"))
    log = cluster.logs.get((name, container)) or termination.get("message") or ""
    shown_by = (
        f"exit code {code} ({termination.get('reason', '-')}), {counted(status.get('restartCount', 0), 'restart')}"
    )
    shown_by += f"; its last lines: {' / '.join(log.splitlines())[-_MAX_TEXT:]}" if log else ""
    verb = "is in CrashLoopBackOff" if reason == "CrashLoopBackOff" else "restarts"
    command = f"`kubectl -n {cluster.namespace} logs {name} -c {container} --previous`"
    yield Finding(f"pod {name} {verb}", cause, shown_by, f"{next_step}: {command}")


def _missing_pods(situation: Situation, cluster: Cluster) -> Iterator[Finding]:
    """Findings for owners without pods, and for required components that are missing.

    Of several clusters on one Kafka some have only producers, or only streams and sinks: what runs in another is not
    missing, unless there is nothing at all here, as with a wrong ``--namespace``.
    """
    if "pods" in cluster.refusals:
        return
    for owner in cluster.owners:
        name, status = f"{owner.get('kind') or 'workload'} {owner['metadata']['name']}", owner.get("status") or {}
        owned = [pod for pod in cluster.pods if component_of(pod) == component_of(owner)]
        desired = owner["spec"].get("replicas", status.get("desiredNumberScheduled", 0))
        create_errors = [
            row.get("message", "") for row in status.get("conditions") or [] if row["type"] == "ReplicaFailure"
        ]
        if desired and not owned:
            yield Finding(
                f"{name} has no pod, and wants {desired}",
                create_errors[0]
                if create_errors
                else "its controller could not make one: a quota, a policy, a priority class",
                f"0 of {desired} pods",
                f"`kubectl -n {cluster.namespace} get events --sort-by lastTimestamp` has the refusal",
            )
        elif not desired and component_of(owner) == "attribution":
            yield Finding(
                f"{name} is scaled to 0",
                "nothing is attributed, so nothing comes after it",
                "spec.replicas is 0",
                f"`kubectl -n {cluster.namespace} scale {name.replace(' ', '/').lower()} --replicas 1`",
            )
    present = {component_of(obj) for obj in (*cluster.owners, *cluster.pods)}
    evidence, groups = situation.evidence, situation.groups or ()
    running = {  # by what Kafka shows, in whatever cluster
        "node": evidence is not None and any(node.runs for node in evidence.nodes.values()),
        "attribution": any(group.name == ATTRIBUTION and group.members for group in groups),
    }
    for component, runs in running.items():
        if component not in present and not (present and runs) and not set(OWNERS) & cluster.refusals.keys():
            yield Finding(
                f"there is no {component} in namespace {cluster.namespace}",
                "it was never installed here, or is in another namespace",
                f"no pod, DaemonSet, StatefulSet or Deployment with the label {COMPONENT}={component}",
                "--namespace; docs/operations/README.md has the installation",
            )


def _nodes_without_producer(cluster: Cluster) -> Iterator[Finding]:
    """Findings for the nodes with GPUs that have no pod of the node producer, with the reason."""
    daemonsets = [daemonset for daemonset in cluster.owners if component_of(daemonset) == "node"]
    covered = {pod["spec"].get("nodeName") for pod in cluster.pods if component_of(pod) == "node"}
    for node in cluster.nodes:
        name = node["metadata"]["name"]
        if not daemonsets or name in covered or "pods" in cluster.refusals:
            continue
        reasons = [_unschedulable_reason(daemonset["spec"]["template"]["spec"], node) for daemonset in daemonsets]
        yield Finding(
            f"node {name} has GPUs, and no pod of the node producer",
            "; ".join(filter(None, reasons))
            or "the DaemonSet has not made one: its controller is behind, or a quota forbids it",
            f"{daemonsets[0]['metadata']['name']} has {counted(len(covered), 'pod')}",
            "its GPUs are not seen at all: mend the label, the DaemonSet's nodeSelector or its tolerations",
        )


def _unschedulable_reason(pod_spec: Json, node: Json) -> str:
    """Why a DaemonSet makes no pod for a node; empty if it should."""
    labels = node["metadata"].get("labels") or {}
    missing_labels = [
        f"{name}={value}" for name, value in (pod_spec.get("nodeSelector") or {}).items() if labels.get(name) != value
    ]
    if missing_labels:
        return f"the node has not the label {', '.join(missing_labels)} of the nodeSelector"
    taints = [
        taint
        for taint in node["spec"].get("taints") or []
        if taint["effect"] != "PreferNoSchedule"
        and not any(
            toleration.get("key", taint["key"]) == taint["key"]
            and (toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", ""))
            and toleration.get("effect", taint["effect"]) == taint["effect"]
            for toleration in pod_spec.get("tolerations") or []
        )
    ]
    return f"it does not tolerate {', '.join(taint['key'] for taint in taints)}" if taints else ""


def _unknown_variables(cluster: Cluster) -> Iterator[Finding]:
    """Findings for environment variables that look like an option's, and are not."""
    options = option_variables()
    sources: dict[str, str] = {}
    for pod in cluster.pods:
        for container in pod["spec"]["containers"]:
            sources |= {variable["name"]: f"{component_of(pod)}'s env" for variable in container.get("env") or []}
    for name, data in cluster.config_maps.items():
        sources |= dict.fromkeys(data, f"ConfigMap {name}")
    for name, source in sources.items():
        if name.startswith("GPUSTREAM_") and name not in options:
            similar = difflib.get_close_matches(name, options, n=1)
            yield Finding(
                f"{name} is no option",
                "it is misspelt, or an option of another version: nothing reads it",
                source,
                (f"did you mean {similar[0]}? " if similar else "") + "docs/reference/options.md has all options",
            )


def option_variables() -> frozenset[str]:
    """The environment variable of every option of every command."""
    params = [param for _, command in commands() for param in command.params]
    return frozenset(param.envvar for param in params if isinstance(param.envvar, str))


def _lease_findings(situation: Situation, cluster: Cluster) -> Iterator[Finding]:
    if "leases" in cluster.refusals:
        return
    producers = [pod for pod in cluster.pods if component_of(pod) == "cluster"]
    pod_names = {lease_of(pod, cluster.config_maps, cluster.namespace): pod["metadata"]["name"] for pod in producers}
    for lease, renewed_ms in cluster.leases.items():
        if renewed_ms is None or situation.now_ms - renewed_ms > _LEASE_EXPIRED_MS:
            yield Finding(
                f"no cluster producer holds the Lease {lease}",
                "none is ready, or it may not write the Lease, or the clocks of the nodes differ",
                "there is no Lease" if renewed_ms is None else f"it was renewed {situation.ago(renewed_ms)}",
                f"docs/runbooks/GpustreamNoLeader.md; the log of {pod_names[lease]} says what it waits for",
            )
