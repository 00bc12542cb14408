"""Events about misspelt annotations, by two replicas of the cluster producer, on a real API server with RBAC."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import yaml

from producers.cluster.policy_events import REASON
from tests.eventually import eventually_sync
from tests.k8s.manifests import K8S
from tests.real.kubernetes import ApiServer, Json
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer

SPACE = "misspelt"
LIMITS = {"limits": {"nvidia.com/gpu": "1"}}


def gpu_pod(api: ApiServer, name: str, node: str, annotations: Json) -> None:
    """A pod with a GPU, on a node."""
    container = {"name": "main", "image": "x", "resources": LIMITS}
    metadata = {"name": name, "namespace": SPACE, "annotations": annotations}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
    api.bind(SPACE, name, node)


def events(api: ApiServer) -> list[tuple[str, str]]:
    """Each Event about annotations: its pod, and its message."""
    items: list[dict[str, Any]] = api.get(f"/api/v1/namespaces/{SPACE}/events")["items"]
    return sorted((item["involvedObject"]["name"], item["message"]) for item in items if item["reason"] == REASON)


async def test_a_misspelt_annotation_is_named_once_on_its_pod_whoever_leads_and_whatever_restarts(
    empty_kafka: KafkaServer, kube_api: ApiServer, gpustream: Callable[..., Gpustream]
) -> None:
    await asyncio.to_thread(_play, empty_kafka, kube_api, gpustream)


def _play(kafka: KafkaServer, api: ApiServer, gpustream: Callable[..., Gpustream]) -> None:
    kafka.create_ours({"gpu.workloads": 2})
    node = f"misspelt-{os.getpid()}"
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    note = {"gpustream.dev/recliam": "scale"}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE, "annotations": note}})
    gpu_pod(api, "a", node, {"gpustream.dev/idel-after": "2h", "gpustream.dev/idle-after": "10d"})
    token = api.service_account("gpustream", "events")
    for file in ("base/cluster/clusterrole", "base/cluster/role", "components/policy-events/clusterrole"):
        role = yaml.safe_load((K8S / f"{file}.yaml").read_text())
        api.grant("gpustream:events", *role["rules"], namespace="gpustream" if role["kind"] == "Role" else None)
    config = str(api.kubeconfig(token=token))
    lease = ("--lease", "gpustream/gpustream-cluster")

    def replica(name: str) -> Gpustream:
        options = ("--kafka", kafka.address, "--kubeconfig", config, *lease, "--identity", name, "--policy-events")
        return gpustream(name, "produce", "cluster", "--cluster", "events", *options)

    first, second = replica("first"), replica("second")
    first.start()
    second.start()
    expected = [
        ("a", "namespace misspelt: the annotation gpustream.dev/recliam is not known, and nobody reads it: did you mean"
         " gpustream.dev/reclaim?"),
        ("a", "the annotation gpustream.dev/idel-after is not known, and nobody reads it: did you mean"
         " gpustream.dev/idle-after?"),
        ("a", "the annotation gpustream.dev/idle-after is '10d', and 1d is the most that counts here"),
    ]  # fmt: skip
    eventually_sync(lambda: events(api) == expected, "the tenant is notified")
    first.stop()
    first.restart()
    api.patch(f"/api/v1/namespaces/{SPACE}/pods/a", {"metadata": {"labels": {"changed": "yes"}}})
    gpu_pod(api, "b", node, {"gpustream.dev/alerts": "nope"})
    second.stop()  # whoever of them leads now, the other one does next
    eventually_sync(lambda: ("b", "the annotation gpustream.dev/alerts is 'nope': write on or off") in events(api), "b")
    assert [event for event in events(api) if event[0] == "a"] == expected
