"""What the Kubernetes API says of gpustream's pods, and what of it an operator has to know."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpustream.doctor.evidence import Evidence, NodeName, SampledRun
from gpustream.doctor.pods import option_variables, pods
from gpustream.doctor.situation import Cluster, Finding, Group, Json, Situation

NOW_MS = 1_795_219_752_000
LONG_AGO, JUST_NOW = "2026-11-01T00:00:00Z", "2026-11-21T00:08:00Z"
GPUS = {"nvidia.com/gpu": "8"}
LEASE = "gpustream/gpustream-cluster"


def pod(component: str = "attribution", *, node: str | None = "n", **status: Any) -> Json:
    """A pod that is well, except for what is said of its status."""
    well = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": LONG_AGO}],
        "containerStatuses": [container()],
    }
    labels = {"app.kubernetes.io/component": component}
    spec = {"nodeName": node, "containers": [{"name": "c", "env": [{"name": "GPUSTREAM_KAFKA", "value": "k:9092"}]}]}
    return {"metadata": {"name": f"{component}-0", "labels": labels}, "spec": spec, "status": well | status}


def container(reason: str = "", message: str = "", **status: Any) -> Json:
    waits = {"state": {"waiting": {"reason": reason, "message": message}}} if reason else {"state": {"running": {}}}
    return {"name": "c", "image": "gpustream:1", "restartCount": 0, **waits, **status}


def ended(code: int, reason: str = "Error", finished_at: str = JUST_NOW, restarts: int = 7, waits: str = "") -> Json:
    last = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": finished_at}}
    return container(waits, lastState=last, restartCount=restarts)


def unready(kind: str, message: str, **fields: str) -> Json:
    return {"type": kind, "status": "False", "message": message, "lastTransitionTime": LONG_AGO, **fields}


def daemon_set(**spec: Any) -> Json:
    labels = {"app.kubernetes.io/component": "node"}
    status = {"desiredNumberScheduled": 1}
    template = {"spec": spec}
    return {"metadata": {"name": "node", "labels": labels}, "spec": {"template": template}, "status": status}


def stateful_set(replicas: int, *conditions: Json) -> Json:
    labels = {"app.kubernetes.io/component": "attribution"}
    spec = {"replicas": replicas, "template": {"spec": {}}}
    status = {"conditions": list(conditions)}
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "attribution", "labels": labels},
        "spec": spec,
        "status": status,
    }


def machine(name: str, labels: Json | None = None, taints: Sequence[Json] = (), **capacity: str) -> Json:
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints)},
        "status": {"capacity": capacity or GPUS},
    }


def cluster(*attribution: Json, **fields: Any) -> Cluster:
    """A namespace in which all is well, except for what is given."""
    return Cluster(
        **{
            "namespace": "gpustream",
            "pods": [pod("node"), *(attribution or (pod(),)), *fields.pop("more", ())],
            "owners": [daemon_set(), stateful_set(1)],
            "nodes": [machine("n")],
            **fields,
        }
    )


def look(observed: Cluster) -> Sequence[Finding]:
    return pods(Situation(NOW_MS - 600_000, NOW_MS, cluster=observed)).findings


SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}

BROKEN: dict[str, tuple[Callable[[], Cluster], str]] = {
    "no such image": (
        lambda: cluster(
            pod(phase="Pending", containerStatuses=[container("ImagePullBackOff", "not found: gpustream:9")])
        ),
        "attribution-0: ImagePullBackOff | not found: gpustream:9 | imagePullSecret",
    ),
    "a missing Secret": (
        lambda: cluster(
            pod(
                phase="Pending", containerStatuses=[container("CreateContainerConfigError", 'secret "kafka" not found')]
            )
        ),
        'CreateContainerConfigError | secret "kafka" not found | Secret or ConfigMap',
    ),
    "no room": (
        lambda: cluster(
            pod(
                phase="Pending",
                conditions=[SCHEDULED | {"message": "0/3 nodes: Insufficient cpu"}],
                containerStatuses=[],
            )
        ),
        "Pending: no node takes it | Insufficient cpu | describe pod attribution-0",
    ),
    "wrong options": (
        lambda: cluster(
            pod(containerStatuses=[ended(2, waits="CrashLoopBackOff")]),
            logs={("attribution-0", "c"): "2 mistakes:\n  No such option '--graze'"},
        ),
        "is in CrashLoopBackOff | options or variables are wrong | exit code 2 | No such option '--graze' | --previous",
    ),
    "it stops itself": (
        lambda: cluster(pod(containerStatuses=[ended(70)])),
        "attribution-0 restarts | stopped itself | exit code 70 (Error), 7 restarts",
    ),
    "out of memory": (
        lambda: cluster(pod(containerStatuses=[ended(137, "OOMKilled")])),
        "restarts | was killed | 137 (OOMKilled) | raise its limit",
    ),
    "not ready": (
        lambda: cluster(pod(conditions=[unready("Ready", "containers with unready status: [c]")])),
        "not ready since | unready status | port-forward attribution-0 9401",
    ),
    "evicted": (
        lambda: cluster(pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory")),
        "has failed | Evicted The node was low on resource",
    ),
    "no attribution": (
        lambda: cluster(pods=[pod("node")], owners=[daemon_set()]),
        "there is no attribution in namespace gpustream | never installed | --namespace",
    ),
    "scaled to zero": (
        lambda: cluster(pods=[pod("node")], owners=[daemon_set(), stateful_set(0)]),
        "StatefulSet attribution is scaled to 0 | nothing is attributed | scale statefulset/attribution --replicas 1",
    ),
    "a quota": (
        lambda: cluster(
            pods=[pod("node")],
            owners=[daemon_set(), stateful_set(2, {"type": "ReplicaFailure", "message": "exceeded quota: pods=0"})],
        ),
        "StatefulSet attribution has no pod, and wants 2 | exceeded quota | get events",
    ),
    "a taint": (
        lambda: cluster(nodes=[machine("n"), machine("m", taints=[{"key": "dedicated", "effect": "NoSchedule"}])]),
        "node m has GPUs, and no pod of the node producer | does not tolerate dedicated",
    ),
    "a label": (
        lambda: cluster(
            owners=[daemon_set(nodeSelector={"nvidia.com/gpu.present": "true"}), stateful_set(1)],
            nodes=[machine("n", {"nvidia.com/gpu.present": "true"}), machine("m")],
        ),
        "node m has GPUs | has not the label nvidia.com/gpu.present=true of the nodeSelector",
    ),
    "a variable": (
        lambda: cluster(config_maps={"gpustream": {"GPUSTREAM_TOPICPREFIX": "prod.", "OTHER": "x"}}),
        "GPUSTREAM_TOPICPREFIX is no option | misspelt | ConfigMap gpustream | GPUSTREAM_TOPIC_PREFIX?",
    ),
    "missing RBAC": (
        lambda: cluster(
            more=[pod("cluster")],
            missing_rights={"cluster": ["list pods", "update leases.x"]},
            leases={LEASE: NOW_MS - 5000},
        ),
        "the service account cluster may not list pods, update leases.x | Role | k8s/base/cluster",
    ),
    "no Lease": (
        lambda: cluster(more=[pod("cluster")], leases={LEASE: NOW_MS - 600_000}),
        "no cluster producer holds the Lease gpustream/gpustream-cluster | renewed 10m ago | cluster-0",
    ),
    "no API": (
        lambda: Cluster("gpustream", error="connection refused"),
        "the Kubernetes API does not answer | connection refused | --kubeconfig",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_wrong_with_the_pods_is_one_finding_with_its_cause(how: str) -> None:
    make, parts = BROKEN[how]
    (finding,) = look(make())
    text = "\n".join((finding.finding, finding.cause, finding.evidence, finding.next))
    assert [part for part in parts.split(" | ") if part not in text] == [], text


@pytest.mark.parametrize(
    "observed",
    [
        cluster(),
        cluster(pod(containerStatuses=[ended(1, finished_at=LONG_AGO)])),
        cluster(pod(containerStatuses=[ended(0)])),
        cluster(more=[pod("topics", phase="Succeeded", conditions=[unready("Ready", "PodCompleted")])]),
        cluster(nodes=[machine("n"), machine("cpu", None, (), cpu="4")][:1]),
        cluster(
            owners=[daemon_set(tolerations=[{"operator": "Exists"}]), stateful_set(1)],
            nodes=[machine("n", taints=[{"key": "x", "effect": "NoExecute"}])],
        ),
    ],
    ids=["all well", "restarted long ago", "ended well", "a Job that is done", "no GPUs", "a taint that is tolerated"],
)
def test_what_is_no_trouble_is_not_found(observed: Cluster) -> None:
    assert look(observed) == []


def test_a_component_that_runs_in_another_cluster_is_not_missing_here() -> None:
    evidence = Evidence({})
    evidence.nodes[NodeName("other", "n")].runs[1] = SampledRun()
    elsewhere = Situation(
        0, NOW_MS, groups=[Group("gpustream-attribution", "Stable", 2, (), {}, {})], evidence=evidence
    )
    producers_only = cluster(pods=[pod("node")], owners=[daemon_set()])
    streams_only = cluster(pods=[pod()], owners=[stateful_set(1)], nodes=[])

    assert pods(elsewhere._replace(cluster=producers_only)).findings == []
    assert pods(elsewhere._replace(cluster=streams_only)).findings == []
    assert len(pods(elsewhere._replace(cluster=Cluster("nowhere"))).findings) == 2


def test_what_this_user_may_not_see_is_named_and_is_no_finding() -> None:
    forbidden = cluster(nodes=[], refusals={"nodes": "nodes is forbidden"})
    checked = pods(Situation(0, NOW_MS, cluster=forbidden))

    assert not checked.findings
    assert "this user may not see nodes: nodes is forbidden" in checked.summary


def test_every_option_has_its_variable_and_nothing_else_has() -> None:
    variables = option_variables()

    assert {"GPUSTREAM_KAFKA", "GPUSTREAM_GRACE", "GPUSTREAM_URL", "GPUSTREAM_LISTEN", "GPUSTREAM_RULES"} <= variables
    assert "GPUSTREAM_TOPICPREFIX" not in variables
