"""gpustream in a Kubernetes cluster: what keeps its pods from running, and what they were given wrong.

In:       a namespace, and how its API server is reached; in the check, what that said.
Out:      a :class:`Cluster`; findings. A question that this user may not ask is named, and the others are asked.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from delivery.kubernetes.client import Client, Unreachable, message
from delivery.kubernetes.credentials import ConfigError
from gpustream import command
from gpustream.command import counted
from gpustream.doctor.seen import Checked, Cluster, Finding, Json, Situation
from producers.cluster.config import LEASE_NAME
from producers.settings import GPU_RESOURCES

_OURS = {"labelSelector": "app.kubernetes.io/name=gpustream"}
_COMPONENT = "app.kubernetes.io/component"
_NEEDED = ("node", "attribution")
_OWNERS = ("daemonsets", "statefulsets", "deployments")
_PAGE = "500"
_LOG_LINES = "3"
_NOT_READY_MS = 60_000
_LEASE_MS = 60_000
_LONGEST = 300

CLUSTER_RIGHTS = (
    *(("", resource, verb) for resource in ("pods", "nodes", "namespaces") for verb in ("list", "watch")),
    *(("apps", resource, "get") for resource in ("replicasets", "deployments", "statefulsets", "daemonsets")),
    *(("batch", resource, "get") for resource in ("jobs", "cronjobs")),
)
"""What the cluster producer's service account must be allowed to do everywhere: group, resource, verb."""

LEASE_RIGHTS = tuple(("coordination.k8s.io", "leases", verb) for verb in ("create", "get", "update"))
"""And in its own namespace."""


# -- asking


class _Asking:
    """Asks the API server, and remembers what it refused."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.refused: dict[str, str] = {}

    async def get(self, what: str, path: str, params: Mapping[str, str] | None = None) -> Any:
        """An object; None if it was refused or is not there."""
        answer = await self._client.request("GET", path, params=params)
        if answer.status == 200:
            return json.loads(answer.body)
        if answer.status != 404:
            self.refused[what] = message(answer.body)
        return None

    async def items(self, what: str, path: str, params: Mapping[str, str]) -> list[Json]:
        """All objects of a list, page by page."""
        found: list[Json] = []
        page = {"limit": _PAGE, **params}
        while True:
            listed = await self.get(what, path, page) or {}
            found += listed.get("items") or []
            if not (token := listed.get("metadata", {}).get("continue")):
                return found
            page["continue"] = token

    async def log(self, namespace: str, pod: str, container: str) -> str:
        """The last lines of a container that ended; no text if nobody has them."""
        params = {"container": container, "previous": "true", "tailLines": _LOG_LINES}
        answer = await self._client.request("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", params=params)
        return answer.body.decode("utf-8", "replace").strip() if answer.status == 200 else ""

    async def may(self, account: str, namespace: str, right: tuple[str, str, str], within: str) -> bool:
        """Whether a service account may do something. Raises PermissionError if this user may not ask."""
        group, resource, verb = right
        spec = {
            "user": f"system:serviceaccount:{namespace}:{account}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
            "resourceAttributes": {"group": group, "resource": resource, "verb": verb, "namespace": within},
        }
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        answer = await self._client.request("POST", path, body=json.dumps(body).encode())
        if answer.status not in (200, 201):
            raise PermissionError(message(answer.body))
        return bool(json.loads(answer.body)["status"]["allowed"])


async def ask(kubeconfig: Path | None, namespace: str) -> Cluster:
    """What the API server says of gpustream in this namespace."""
    client = Client(kubeconfig)
    try:
        await client.start()
        return await _ask(_Asking(client), namespace)
    except (ConfigError, Unreachable) as error:
        return Cluster(namespace, error=str(error))
    finally:
        await client.close()


async def _ask(api: _Asking, namespace: str) -> Cluster:
    within = f"namespaces/{namespace}"
    pods = await api.items("pods", f"/api/v1/{within}/pods", _OURS)
    owners = [one for kind in _OWNERS for one in await api.items(kind, f"/apis/apps/v1/{within}/{kind}", _OURS)]
    nodes = []
    for node in await api.items("nodes", "/api/v1/nodes", {}):
        capacity, labels = node.get("status", {}).get("capacity") or {}, node["metadata"].get("labels") or {}
        has = any(name.startswith(GPU_RESOURCES) and amount != "0" for name, amount in capacity.items())
        nodes += [node] if has or labels.get("nvidia.com/gpu.present") == "true" else []
    names = dict.fromkeys(
        source["configMapRef"]["name"]
        for pod in pods
        for container in pod["spec"]["containers"]
        for source in container.get("envFrom", [])
        if "configMapRef" in source
    )
    maps = {name: await api.get(f"ConfigMap {name}", f"/api/v1/{within}/configmaps/{name}") for name in names}
    ended = [(pod["metadata"]["name"], one["name"]) for pod in pods for one in _statuses(pod) if _ended(one)]
    accounts = {
        pod["spec"].get("serviceAccountName", "default") for pod in pods if component_of(pod) == "cluster"
    }  # the only one that asks the API
    lease = None
    if accounts:
        lease = await api.get("leases", f"/apis/coordination.k8s.io/v1/{within}/leases/{LEASE_NAME}")
    return Cluster(
        namespace,
        pods=pods,
        nodes=nodes,
        owners=owners,
        config_maps={name: found.get("data") or {} for name, found in maps.items() if found is not None},
        lease_ms=_ms(lease["spec"].get("renewTime")) if lease else None,
        missing_rights={account: await _missing(api, namespace, account) for account in sorted(accounts)},
        logs={where: said for where in ended if (said := await api.log(namespace, *where))},
        refused=api.refused,
    )


async def _missing(api: _Asking, namespace: str, account: str) -> list[str]:
    rights = [(right, "") for right in CLUSTER_RIGHTS] + [(right, namespace) for right in LEASE_RIGHTS]
    try:
        return [
            f"{verb} {resource}{'.' * bool(group)}{group}"
            for (group, resource, verb), within in rights
            if not await api.may(account, namespace, (group, resource, verb), within)
        ]
    except PermissionError as error:
        api.refused["rights"] = str(error)
        return []


def _ms(time: str | None) -> int | None:
    return int(datetime.fromisoformat(time).timestamp() * 1000) if time else None


# -- the check


def pods(seen: Situation) -> Checked:
    """What keeps gpustream's pods from running, and what is wrong in what they were given."""
    cluster = seen.cluster
    if cluster is None:
        return Checked("not asked (--kube)", looked=False)
    if cluster.error:
        then = "--kubeconfig says where the API server is; `kubectl get pods` with it must work"
        asked = f"namespace {cluster.namespace}"
        return Checked("not known", [Finding("the Kubernetes API does not answer", cluster.error, asked, then)])
    found = [
        *(one for pod in cluster.pods for one in of_pod(seen, cluster, pod)),
        *_absent(cluster),
        *_uncovered(cluster),
        *_variables(cluster),
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
        *_lease(seen, cluster),
    ]
    ready = sum(_condition(pod, "Ready").get("status") == "True" for pod in cluster.pods)
    not_asked = "".join(f"; this user may not see {what}: {why}" for what, why in cluster.refused.items())
    return Checked(f"{ready} of {counted(len(cluster.pods), 'pod')} ready in {cluster.namespace}{not_asked}", found)


def component_of(thing: Json) -> str:
    """Which component a pod or its owner is."""
    return str((thing["metadata"].get("labels") or {}).get(_COMPONENT, ""))


def _statuses(pod: Json) -> list[Json]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _ended(status: Json) -> Json:
    """How a container ended the last time; empty if it never did."""
    found: Json = (
        (status.get("state") or {}).get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    )
    return found


def _condition(pod: Json, kind: str) -> Json:
    rows = (pod.get("status") or {}).get("conditions") or []
    return next((row for row in rows if row["type"] == kind), {})


_IMAGE = "is the image's name right, is it in that registry, and does an imagePullSecret let this node have it?"

_WAITING = {
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": "mend the image's name",
    "CreateContainerConfigError": "a Secret or ConfigMap that it names, or a key of one, is missing: make it",
    "CreateContainerError": "`kubectl describe pod` has the runtime's words",
    "RunContainerError": "`kubectl describe pod` has the runtime's words: is NVIDIA's container runtime on the node?",
}

_ENDS = {
    1: ("it failed", "its log has the sentence"),
    2: ("its options or variables are wrong", "its log lists every mistake: mend the arguments, or the ConfigMap"),
    70: ("it stopped itself to be restarted", "the last line of its log says why"),
    137: (
        "it was killed",
        "out of memory if the reason is OOMKilled: raise its limit; docs/operations/benchmarks.md has sizes",
    ),
}


def of_pod(seen: Situation, cluster: Cluster, pod: Json) -> Iterator[Finding]:
    """What is wrong with a pod: one finding for what keeps it from starting, else one for each container."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    phase = status.get("phase", "Pending")
    see = f"`kubectl -n {cluster.namespace} describe pod {name}`"
    if phase == "Succeeded" or pod["metadata"].get("deletionTimestamp"):
        return
    if phase == "Failed":
        why = f"{status.get('reason', '')} {status.get('message', '')}".strip() or "its container ended"
        yield Finding(f"pod {name} has failed", why, "phase Failed", see)
        return
    scheduled = _condition(pod, "PodScheduled")
    if phase == "Pending" and scheduled.get("status") == "False":
        why = f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
        then = f"give it room, or mend its nodeSelector, tolerations or volumes: {see}"
        yield Finding(f"pod {name} is Pending: no node takes it", why[:_LONGEST], "condition PodScheduled", then)
        return
    found = [one for status in _statuses(pod) for one in _of_container(seen, cluster, pod, status)]
    yield from found
    ready = _condition(pod, "Ready")
    since_ms = _ms(ready.get("lastTransitionTime")) or seen.now_ms
    if not found and ready.get("status") == "False" and seen.now_ms - since_ms > _NOT_READY_MS:
        why = ready.get("message") or ready.get("reason") or "it does not say"
        then = "its /readyz has the reasons: `kubectl -n {} port-forward {} 9401`, then `curl 127.0.0.1:9401/readyz`"
        yield Finding(
            f"pod {name} is not ready since {seen.ago(since_ms)}",
            str(why),
            "condition Ready",
            then.format(cluster.namespace, name),
        )


def _of_container(seen: Situation, cluster: Cluster, pod: Json, status: Json) -> Iterator[Finding]:
    name, container = pod["metadata"]["name"], status["name"]
    waiting = (status.get("state") or {}).get("waiting") or {}
    reason, said = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _WAITING:
        yield Finding(
            f"pod {name}: {reason}", said[:_LONGEST] or reason, f"image {status.get('image')}", _WAITING[reason]
        )
        return
    end = _ended(status)
    since_ms = _ms(end.get("finishedAt")) or 0
    if not end or (reason != "CrashLoopBackOff" and since_ms < seen.since_ms) or not end.get("exitCode"):
        return
    code = end["exitCode"]
    cause, then = _ENDS.get(code, ("it ended", "its log says more"))
    log = cluster.logs.get((name, container)) or end.get("message") or ""
    shown = f"exit code {code} ({end.get('reason', '-')}), {counted(status.get('restartCount', 0), 'restart')}"
    shown += f"; its last lines: {' / '.join(log.splitlines())[-_LONGEST:]}" if log else ""
    what = "is in CrashLoopBackOff" if reason == "CrashLoopBackOff" else "restarts"
    command = f"`kubectl -n {cluster.namespace} logs {name} -c {container} --previous`"
    yield Finding(f"pod {name} {what}", cause, shown, f"{then}: {command}")


def _absent(cluster: Cluster) -> Iterator[Finding]:
    """Owners that have fewer pods than they want, and components that are not there at all."""
    if "pods" in cluster.refused:
        return
    for owner in cluster.owners:
        name, status = f"{owner.get('kind') or 'workload'} {owner['metadata']['name']}", owner.get("status") or {}
        mine = [pod for pod in cluster.pods if component_of(pod) == component_of(owner)]
        wanted = owner["spec"].get("replicas", status.get("desiredNumberScheduled", 0))
        refused = [row.get("message", "") for row in status.get("conditions") or [] if row["type"] == "ReplicaFailure"]
        if wanted and not mine:
            yield Finding(
                f"{name} has no pod, and wants {wanted}",
                refused[0] if refused else "its controller could not make one: a quota, a policy, a priority class",
                f"0 of {wanted} pods",
                f"`kubectl -n {cluster.namespace} get events --sort-by lastTimestamp` has the refusal",
            )
        elif not wanted and component_of(owner) == "attribution":
            yield Finding(
                f"{name} is scaled to 0",
                "nothing is attributed, so nothing comes after it",
                "spec.replicas is 0",
                f"`kubectl -n {cluster.namespace} scale {name.replace(' ', '/').lower()} --replicas 1`",
            )
    there = {component_of(one) for one in (*cluster.owners, *cluster.pods)}
    for component in _NEEDED:
        if component not in there and not set(_OWNERS) & cluster.refused.keys():
            yield Finding(
                f"there is no {component} in namespace {cluster.namespace}",
                "it was never installed here, or is in another namespace",
                f"no pod, DaemonSet, StatefulSet or Deployment with the label {_COMPONENT}={component}",
                "--namespace; docs/operations/README.md has the installation",
            )


def _uncovered(cluster: Cluster) -> Iterator[Finding]:
    """Nodes with GPUs on which no pod of the node producer is, and why."""
    sets = [one for one in cluster.owners if component_of(one) == "node"]
    covered = {pod["spec"].get("nodeName") for pod in cluster.pods if component_of(pod) == "node"}
    for node in cluster.nodes:
        name = node["metadata"]["name"]
        if not sets or name in covered or "pods" in cluster.refused:
            continue
        whys = [why for one in sets if (why := _kept_off(one["spec"]["template"]["spec"], node))]
        yield Finding(
            f"node {name} has GPUs, and no pod of the node producer",
            "; ".join(whys) or "the DaemonSet has not made one: its controller is behind, or a quota forbids it",
            f"{sets[0]['metadata']['name']} has {counted(len(covered), 'pod')}",
            "its GPUs are not seen at all: mend the label, the DaemonSet's nodeSelector or its tolerations",
        )


def _kept_off(pod: Json, node: Json) -> str:
    """Why a DaemonSet makes no pod for a node; no text if it should."""
    labels = node["metadata"].get("labels") or {}
    lacks = [f"{name}={value}" for name, value in (pod.get("nodeSelector") or {}).items() if labels.get(name) != value]
    if lacks:
        return f"the node has not the label {', '.join(lacks)} of the nodeSelector"
    taints = [
        taint
        for taint in node["spec"].get("taints") or []
        if taint["effect"] != "PreferNoSchedule"
        and not any(
            one.get("key", taint["key"]) == taint["key"]
            and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
            and one.get("effect", taint["effect"]) == taint["effect"]
            for one in pod.get("tolerations") or []
        )
    ]
    return f"it does not tolerate {', '.join(taint['key'] for taint in taints)}" if taints else ""


def _variables(cluster: Cluster) -> Iterator[Finding]:
    """Variables that look like an option's, and are none."""
    known = option_variables()
    given: dict[str, str] = {}
    for pod in cluster.pods:
        for container in pod["spec"]["containers"]:
            given |= {one["name"]: f"{component_of(pod)}'s env" for one in container.get("env") or []}
    for name, data in cluster.config_maps.items():
        given |= dict.fromkeys(data, f"ConfigMap {name}")
    for name, where in given.items():
        if name.startswith("GPUSTREAM_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            yield Finding(
                f"{name} is no option",
                "it is misspelt, or an option of another version: nothing reads it",
                where,
                (f"did you mean {close[0]}? " if close else "") + "docs/reference/options.md has all options",
            )


def option_variables() -> frozenset[str]:
    """The environment variable of every option of every command."""

    def of(one: click.Command) -> Iterator[str]:
        if isinstance(one, click.Group):
            ctx = click.Context(one)
            for name in one.list_commands(ctx):
                if (found := one.get_command(ctx, name)) is not None:
                    yield from of(found)
        yield from (param.envvar for param in one.params if isinstance(param.envvar, str))

    return frozenset(of(command.load("gpustream.cli:main")))


def _lease(seen: Situation, cluster: Cluster) -> Iterator[Finding]:
    running = [pod for pod in cluster.pods if component_of(pod) == "cluster"]
    variables = [
        one for pod in running for container in pod["spec"]["containers"] for one in container.get("env") or []
    ]
    named = any(one.get("name") == "GPUSTREAM_LEASE" for one in variables) or "leases" in cluster.refused
    late = cluster.lease_ms is None or seen.now_ms - cluster.lease_ms > _LEASE_MS
    if running and not named and late:
        shown = "there is no Lease" if cluster.lease_ms is None else f"it was renewed {seen.ago(cluster.lease_ms)}"
        yield Finding(
            f"no cluster producer holds the Lease {LEASE_NAME}",
            "none is ready, or it may not write the Lease, or the clocks of the nodes differ",
            shown,
            f"docs/runbooks/GpustreamNoLeader.md; the log of {running[0]['metadata']['name']} says what it waits for",
        )
