"""The cluster producer as it is deployed: what the API server knows of GPU pods is on gpu.workloads and on the ticks.

Two replicas with a Lease, as the service account of k8s/base with what the base and the custom-owners example grant it,
and no more; a stream; and nodes that tick. The API server has neither controllers nor kubelets: what those would write
the tests write.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import uuid4

import pytest
import yaml
from confluent_kafka import Consumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from delivery import topic_admin
from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.instruments import Instruments
from producers.cluster import instruments as own
from producers.cluster.lease import DURATION_S
from producers.cluster.objects import ANNOTATION_BOUNDS, LABEL_BOUNDS
from producers.cluster.owners import DEEPEST
from producers.cluster.reflector import HEALTHY_AFTER_S
from producers.publisher import INSTRUMENTS, NodePublisher
from tests.eventually import eventually_sync
from tests.k8s.manifests import K8S
from tests.real.conftest import need
from tests.real.kubernetes import ApiServer, Denied, Json, find_etcd, find_kube_apiserver
from tests.real.pipeline import Gpustream, sender_to
from tests.real.servers import KafkaServer, find_openssl
from tests.real.test_manifests import find_kustomize, render
from topics.attributed import AttributedSample, Holder, Workload
from topics.topic import decoder
from topics.workloads import NodeWorkloads, Pod

CLUSTER = "prod"
LEASE = "gpustream/gpustream-cluster"
RIGHTS = {"Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
WITHIN_S = 60.0
TAKEN_OVER_WITHIN_S = 15.0
NEAR_MS = 2_000
"""So near a change of a pod a tick may be booked to the one before or after it."""

KNOWN_MS = 4_000
"""After so long a new pod is surely known: its owners may take a second, and what is logged counts after two more."""

TICK_S = 0.25
LIFE_S = 7.0

DEPLOYED = ("ReplicaSet", "Deployment")

RAY = ("rayclusters", "rayjobs")
AWAY = (Denied, OSError, http.client.HTTPException)

P = TypeVar("P", bound=Gpustream)
R = TypeVar("R", bound=NodeWorkloads | AttributedSample)


class Record(NamedTuple, Generic[R]):
    """A record, and when the broker was given it."""

    value: R
    ts_ms: int


class Log(Generic[R]):
    """A topic, read from its beginning as it grows; a node's records are in their order."""

    def __init__(self, kafka: KafkaServer, topic: str, kind: type[R]) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": kafka.address, "group.id": "tests", "enable.auto.commit": False}
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(kafka.topics()[topic])])
        self._decode = decoder(kind)
        self._records: list[Record[R]] = []

    def close(self) -> None:
        self._consumer.close()

    def records(self) -> list[Record[R]]:
        """Everything so far."""
        while messages := self._consumer.consume(1000, timeout=0.05):
            for message in messages:
                assert message.error() is None, message.error()
                self._records.append(Record(self._decode(message.value()), message.timestamp()[1]))
        return self._records

    def of_node(self, node: str, cluster: str = CLUSTER) -> list[R]:
        """The records of a node."""
        return [value for value, _ in self.records() if (value.cluster, value.node) == (cluster, node)]


def comes(condition: Callable[[], object], within_s: float = WITHIN_S) -> bool:
    """Whether something comes in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


class Cluster:
    """The servers, the replicas and the stream."""

    def __init__(self, api: ApiServer, kafka: KafkaServer, directory: Path, stack: ExitStack) -> None:
        self.api, self.kafka, self._directory, self._stack = api, kafka, directory, stack
        self.workloads = Log(kafka, "gpu.workloads", NodeWorkloads)
        self.ticks = Log(kafka, "gpu.attributed", AttributedSample)
        stack.callback(self.workloads.close)
        stack.callback(self.ticks.close)
        self.replicas: dict[str, Gpustream] = {}
        self._numbers = count()

    def process(self, name: str, *arguments: str, kind: type[P] = Gpustream) -> P:  # type: ignore[assignment]
        """A `gpustream` process, not started."""
        process = kind(self._directory / name, *arguments, "--kafka", self.kafka.address)
        self._stack.callback(process.close)
        return process

    def replica(self) -> Gpustream:
        """One more replica of the producer."""
        identity = f"cluster-{next(self._numbers)}"
        config = self.api.kubeconfig(token=self.api.service_account("gpustream", "cluster"))
        options = ("--cluster", CLUSTER, "--lease", LEASE, "--identity", identity, "--node-labels", "rack")
        self.replicas[identity] = self.process(
            identity, "produce", "cluster", "--kubeconfig", str(config), *options
        ).start()
        return self.replicas[identity]

    def lease(self) -> Json:
        namespace, _, name = LEASE.partition("/")
        spec: Json = self.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")["spec"]
        return spec

    def leader(self) -> Gpustream:
        """The replica that leads."""
        eventually_sync(lambda: self.lease()["holderIdentity"] in self.replicas)
        return self.replicas[self.lease()["holderIdentity"]]

    def standby(self) -> Gpustream:
        """The other one that runs."""
        (other,) = [replica for replica in self.replicas.values() if replica.running and replica is not self.leader()]
        return other

    def node(self, name: str, **labels: str) -> str:
        """A new node, whose name it gives."""
        self.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        return name

    def reported(self, node: str) -> dict[str, Pod]:
        """The pods of a node's last record that run, by name."""
        records = self.workloads.of_node(node)
        return {pod.name: pod for pod in records[-1].pods if pod.ended_ms is None} if records else {}

    def settle(self) -> None:
        """Wait until each node's last record says what the API server says, with all their owners if they churn."""
        if not comes(lambda: self._pods_reported() == pods_of_nodes(self.api)):
            assert self._pods_reported() == pods_of_nodes(self.api)
        eventually_sync(lambda: {tuple(owner.kind for owner in pod.owners) for pod in self._churned()} <= {DEPLOYED})

    def _churned(self) -> Iterator[Pod]:
        last = {value.node: value for value, _ in self.workloads.records() if value.cluster == CLUSTER}
        return (pod for record in last.values() for pod in record.pods if pod.namespace == "churn")

    def _pods_reported(self) -> dict[str, set[tuple[str, ...]]]:
        last = {value.node: value for value, _ in self.workloads.records() if value.cluster == CLUSTER}
        there_now = {node["metadata"]["name"] for node in self.api.get("/api/v1/nodes")["items"]}
        return {
            node: {
                (pod.namespace, pod.name, pod.uid, pod.labels.get("app", ""))
                for pod in record.pods
                if pod.ended_ms is None
            }
            for node, record in last.items()
            if node in there_now or any(pod.ended_ms is None for pod in record.pods)
        }


def pods_of_nodes(api: ApiServer) -> dict[str, set[tuple[str, ...]]]:
    """The GPU pods of each node as the API server has them."""
    by_node: dict[str, set[tuple[str, ...]]] = {
        node["metadata"]["name"]: set() for node in api.get("/api/v1/nodes")["items"]
    }
    for pod in api.get("/api/v1/pods")["items"]:
        meta, node = pod["metadata"], pod["spec"].get("nodeName")
        if node in by_node and has_gpus(pod["spec"]) and pod["status"]["phase"] not in {"Succeeded", "Failed"}:
            by_node[node].add((meta["namespace"], meta["name"], meta["uid"], meta.get("labels", {}).get("app", "")))
    return by_node


def has_gpus(spec: Json) -> bool:
    """Whether a pod's spec asks for GPUs."""
    containers = spec["containers"] + spec.get("initContainers", [])
    limits = [container.get("resources", {}).get("limits", {}) for container in containers]
    return "resourceClaims" in spec or any("nvidia.com/gpu" in limit for limit in limits)


def counted(process: Gpustream, metric: str, **labels: str) -> float:
    """The sum of a metric of a process over the labels that are not given."""
    families = text_string_to_metric_families(process.get("/metrics") or "")
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == metric and labels.items() <= sample.labels.items()
    )


@pytest.fixture(scope="module")
def cluster(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All of it, with two replicas of the producer."""
    need(find_etcd, find_kube_apiserver, find_openssl, find_kustomize)
    directory = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        options = ["--shutdown-watch-termination-grace-period=5s"]
        api = stack.enter_context(ApiServer(directory / "kubernetes", options=options))
        kafka.empty()
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        grant(api, directory)
        define(api, "ray.io", *RAY)
        define(api, "secret.example.com", "widgets")
        new_cluster = Cluster(api, kafka, directory, stack)
        stream: Gpustream = new_cluster.process("stream", "stream", "attribution").start()
        stack.callback(stream.stop)  # it leaves its group
        new_cluster.replica()
        new_cluster.replica()
        yield new_cluster


def grant(api: ApiServer, directory: Path) -> None:
    """Apply what the base and the custom-owners example let the producer do."""
    overlay = directory / "overlay"
    overlay.mkdir()
    paths = {name: os.path.relpath(K8S / name, overlay.resolve()) for name in ("base", "components/custom-owners")}
    kustomization = {"resources": [paths["base"]], "components": [paths["components/custom-owners"]]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    manifests = [manifest for manifest in render(overlay) if manifest["kind"] in RIGHTS]
    assert {manifest["kind"] for manifest in manifests} == RIGHTS
    for manifest in manifests:
        assert api.apply(manifest).status == 201


def define(api: ApiServer, group: str, *plurals: str) -> None:
    """Custom resources whose kinds are named RayCluster for rayclusters, and so on."""
    for plural in plurals:
        kind = KINDS[plural]
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"plural": plural, "singular": plural[:-1], "kind": kind}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
        metadata = {"name": f"{plural}.{group}"}
        crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        api.create({**crd, "metadata": metadata, "spec": spec})
        eventually_sync(lambda path=f"/apis/{group}/v1/{plural}": api.request("GET", path).status == 200)  # type: ignore[misc]


KINDS = {"rayclusters": "RayCluster", "rayjobs": "RayJob", "widgets": "Widget"}
API_VERSIONS = {
    "ReplicaSet": "apps/v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "Widget": "secret.example.com/v1",
}
"""The API version of every kind of owner here."""

CONTAINER = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}


class Owner(NamedTuple):
    """An object that was made."""

    kind: str
    name: str
    uid: str

    @property
    def reference(self) -> Json:
        """As the controller of something."""
        fields = {"apiVersion": API_VERSIONS[self.kind], "kind": self.kind, "name": self.name, "uid": self.uid}
        return {**fields, "controller": True}


def owner(api: ApiServer, namespace: str, kind: str, name: str, above: Owner | None = None) -> Owner:
    """An owner of pods, and what controls it."""
    metadata: Json = {"name": name, "namespace": namespace, "ownerReferences": [above.reference] if above else []}
    labels = {"app": name}
    pods = {"restartPolicy": "Never" if "Job" in kind else "Always", "containers": [CONTAINER]}
    template: Json = {"template": {"metadata": {"labels": labels}, "spec": pods}}
    specs: dict[str, Json] = {
        "Job": template,
        "CronJob": {"schedule": "0 * * * *", "jobTemplate": {"spec": template}},
        "RayCluster": {},
        "RayJob": {},
        "Widget": {},
    }
    spec = specs.get(kind, {**template, "selector": {"matchLabels": labels}})
    created = api.create({"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec})
    return Owner(kind, name, created["metadata"]["uid"])


def owners(api: ApiServer, namespace: str, name: str, *kinds: str) -> list[Owner]:
    """A chain of owners, from the top downward; it is given from the bottom upward."""
    chain: list[Owner] = []
    for level, kind in enumerate(kinds):
        chain.append(owner(api, namespace, kind, f"{name}-{level}", chain[-1] if chain else None))
    return chain[::-1]


def pod(api: ApiServer, namespace: str, name: str, node: str | None, above: Owner | None = None, **fields: Any) -> str:
    """A GPU pod that runs, whose uid it gives. ``labels`` and ``annotations`` go to its metadata, the rest to its
    spec."""
    metadata: Json = {key: fields.pop(key) for key in ("labels", "annotations") if key in fields}
    metadata |= {"name": name, "namespace": namespace, "ownerReferences": [above.reference] if above else []}
    spec = {"containers": [CONTAINER], **({"nodeName": node} if node else {}), **fields}
    created = api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    if node:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        api.patch(f"/api/v1/namespaces/{namespace}/pods/{name}", running(now), status=True)
    return str(created["metadata"]["uid"])


def running(since: str) -> Json:
    """What a kubelet says of a pod that it began to run."""
    return {"status": {"phase": "Running", "startTime": since}}


def delete_pod(api: ApiServer, namespace: str, name: str) -> None:
    api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")


def chain_of(reported: Pod) -> list[Owner]:
    """The owners of a pod in a record."""
    assert all(reported_owner.api_version == API_VERSIONS[reported_owner.kind] for reported_owner in reported.owners)
    return [
        Owner(reported_owner.kind, reported_owner.name, reported_owner.uid or "") for reported_owner in reported.owners
    ]


# -- nodes


class Node:
    """A node's producer in little: a tick of all GPUs now and then, and to which pod each is given."""

    def __init__(self, kafka: KafkaServer, name: str, gpus: int) -> None:
        self._kafka, self.name = kafka.address, name
        self.gpus = [f"GPU-{uuid4()}" for _ in range(gpus)]
        self.containers: list[Json] = []

    def give(self, *pods: tuple[str, str]) -> None:
        """The first GPU is the first pod's, and so on, as the kubelet says."""
        self.containers = [
            {
                "namespace": namespace,
                "pod": name,
                "container": "main",
                "resource": "nvidia.com/gpu",
                "device_ids": [uuid],
                "claims": [],
            }
            for uuid, (namespace, name) in zip(self.gpus, pods, strict=False)
        ]

    def tick(self) -> int:
        """One tick, in the log when it returns; its time."""
        return asyncio.run(self._ticks(lambda: False))

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """A tick each 0.5 s for as long as this is entered."""
        stop = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._ticks(lambda: not stop.is_set())))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    async def _ticks(self, goes_on: Callable[[], bool]) -> int:
        """At least one tick; the time of the last."""
        async with sender_to(Connection(self._kafka)) as sender:
            instruments, run_id = Instruments(INSTRUMENTS), now_ms()
            publisher = NodePublisher(sender, instruments, cluster=CLUSTER, node=self.name, run_id=run_id)
            sending = asyncio.create_task(publisher.run())
            ts_ms = self._publish(publisher)
            while goes_on():
                await asyncio.sleep(TICK_S)
                ts_ms = self._publish(publisher)
            assert await publisher.drain(20) == 0
            sending.cancel()
        return ts_ms

    def _publish(self, publisher: NodePublisher) -> int:
        ts_ms = now_ms()
        devices = [{"uuid": uuid, "index": index, "metrics": {}} for index, uuid in enumerate(self.gpus)]
        publisher.publish(ts_ms, devices, self.containers)
        return ts_ms


def holders(cluster: Cluster, node: Node) -> list[Holder | None]:
    """Who holds each GPU of a node now, as its tick says: it is joined with what was logged 2 s before it."""
    logged_ms = [ts_ms for value, ts_ms in cluster.workloads.records() if value.node == node.name]
    eventually_sync(lambda: now_ms() > max(logged_ms, default=0) + NEAR_MS)
    ts_ms = node.tick()
    eventually_sync(lambda: any(tick.ts_ms == ts_ms for tick in cluster.ticks.of_node(node.name)))
    (tick,) = [tick for tick in cluster.ticks.of_node(node.name) if tick.ts_ms == ts_ms]
    assert tick.attribution == "exact"
    return [device.holders[0] if device.holders else None for device in tick.devices]


# -- owners


CHAINS = {
    "deployment": ("Deployment", "ReplicaSet"),
    "cronjob": ("CronJob", "Job"),
    "job": ("Job",),
    "statefulset": ("StatefulSet",),
    "daemonset": ("DaemonSet",),
    "ray": ("RayCluster",),
    "rayjob": ("RayJob", "RayCluster"),
    "rayjob-of-jobs": ("RayJob", "Job"),
    "forbidden": ("Widget",),
    "half-forbidden": ("Widget", "StatefulSet"),
}
"""Owners from the top downward."""


@pytest.fixture(scope="module")
def owned(cluster: Cluster) -> dict[str, list[Owner]]:
    """A pod on the node ``owned`` for each chain, and one without; the owners by the pod's name, from it upward."""
    node, chains = cluster.node("owned"), dict[str, list[Owner]]()
    cluster.api.namespace("owned")
    pod(cluster.api, "owned", "bare", node)
    chains["bare"] = []
    for name, kinds in CHAINS.items():
        chains[name] = owners(cluster.api, "owned", name, *kinds)
        pod(cluster.api, "owned", name, node, chains[name][0])
    eventually_sync(lambda: set(cluster.reported("owned")) == set(chains))
    eventually_sync(
        lambda: all(len(cluster.reported("owned")[name].owners) >= len(chain) for name, chain in chains.items())
    )
    return chains


def test_a_pod_has_the_owners_that_it_has_up_to_the_top(cluster: Cluster, owned: dict[str, list[Owner]]) -> None:
    assert {name: chain_of(reported) for name, reported in cluster.reported("owned").items()} == owned


def test_what_is_above_a_kind_that_may_not_be_read_is_not_known_and_that_is_logged_once(
    cluster: Cluster, owned: dict[str, list[Owner]]
) -> None:
    hidden = owners(cluster.api, "owned", "hidden", "RayJob", "Widget")
    pod(cluster.api, "owned", "hidden", "owned", hidden[0])
    eventually_sync(lambda: "hidden" in cluster.reported("owned"))
    cluster.settle()
    assert chain_of(cluster.reported("owned")["hidden"]) == hidden[:1]
    for process in cluster.replicas.values():
        eventually_sync(lambda p=process: counted(p, own.OWNER_REQUESTS, kind="Widget", result="forbidden") >= 1)  # type: ignore[misc]
        lines = process.log.read_text().splitlines()
        assert len([line for line in lines if "Widget of secret.example.com/v1: not to be read" in line]) == 1


TOPS = {
    "bare": ("Pod", "bare"),
    "deployment": ("Deployment", "deployment-0"),
    "cronjob": ("CronJob", "cronjob-0"),
    "job": ("Job", "job-0"),
    "statefulset": ("StatefulSet", "statefulset-0"),
    "daemonset": ("DaemonSet", "daemonset-0"),
    "ray": ("RayCluster", "ray-0"),
    "rayjob": ("RayJob", "rayjob-0"),
    "rayjob-of-jobs": ("RayJob", "rayjob-of-jobs-0"),
    "forbidden": ("Widget", "forbidden-0"),
    "half-forbidden": ("Widget", "half-forbidden-0"),
}
NAMED = {
    "deployment": (None, None, "deployment-0"),
    "cronjob": ("cronjob-1", None, None),
    "job": ("job-0", None, None),
    "statefulset": (None, "statefulset-0", None),
    "rayjob-of-jobs": ("rayjob-of-jobs-1", None, None),
    "half-forbidden": (None, "half-forbidden-1", None),
}
"""The Job, StatefulSet and Deployment of the pods that have one of them."""


def test_a_tick_names_the_workload_of_each_of_them(cluster: Cluster, owned: dict[str, list[Owner]]) -> None:
    node, names = Node(cluster.kafka, "owned", len(owned)), list(owned)
    node.give(*(("owned", name) for name in names))
    uids = {name: reported.uid for name, reported in cluster.reported("owned").items()}
    holder_by_pod = dict(zip(names, holders(cluster, node), strict=True))
    assert {name: (holder.pod, holder.pod_uid) for name, holder in holder_by_pod.items() if holder} == {
        name: (name, uids[name]) for name in names
    }
    assert {name: holder.workload for name, holder in holder_by_pod.items() if holder} == {
        name: Workload(*top) for name, top in TOPS.items()
    }
    assert {
        name: (holder.job, holder.statefulset, holder.deployment) for name, holder in holder_by_pod.items() if holder
    } == {name: NAMED.get(name, (None, None, None)) for name in names}


def test_a_chain_ends_at_an_owner_that_is_gone_at_a_loop_and_at_the_deepest_level(cluster: Cluster) -> None:
    api, node = cluster.api, cluster.node("ends")
    api.namespace("ends")
    missing_owner = Owner("ReplicaSet", "gone", str(uuid4()))
    another = Owner("RayJob", owner(api, "ends", "RayJob", "another").name, str(uuid4()))
    below = owner(api, "ends", "RayCluster", "below", another)
    deep = owners(api, "ends", "deep", *["RayJob", "RayCluster"] * DEEPEST)
    loop = owners(api, "ends", "loop", "RayJob", "RayCluster")
    path = f"/apis/ray.io/v1/namespaces/ends/rayjobs/{loop[1].name}"
    api.patch(path, {"metadata": {"ownerReferences": [loop[0].reference]}})
    expected = {"gone": [missing_owner], "another": [below, another], "deep": deep[:DEEPEST], "loop": loop}
    for name, chain in expected.items():
        pod(api, "ends", name, node, chain[0])
    eventually_sync(
        lambda: all(len(reported.owners) >= len(expected[name]) for name, reported in cluster.reported("ends").items())
    )
    cluster.settle()
    assert {name: chain_of(reported) for name, reported in cluster.reported("ends").items()} == expected
    complete = {name: reported.owners_complete for name, reported in cluster.reported("ends").items()}
    assert complete == {"gone": True, "another": True, "deep": False, "loop": False}
    assert counted(cluster.leader(), own.OWNER_REQUESTS, kind="ReplicaSet", result="gone") == 1
    assert counted(cluster.leader(), own.OWNER_REQUESTS, kind="RayJob", result="gone") == 1


# -- labels, annotations, devices


def test_of_labels_and_annotations_what_is_allowed_is_reported_and_follows_every_change(cluster: Cluster) -> None:
    api, node = cluster.api, Node(cluster.kafka, "labelled", 1)
    labels = {"topology.kubernetes.io/zone": "z", "nvidia.com/gpu.product": "H100", "rack": "r1", "other": "x"}
    cluster.node("labelled", **labels)
    namespace = {"name": "labelled", "labels": {"team": "research", "gpustream.dev/tier": "gold", "other": "x"}}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": namespace})
    labels_set = {"app": "bert", "app.kubernetes.io/part-of": "nlp", "kueue.x-k8s.io/queue-name": "q", "other": "x"}
    notes = {"gpustream.dev/note": "ünïcode \"' \\", "kubectl.kubernetes.io/last-applied-configuration": "{}"}
    pod(api, "labelled", "bert", "labelled", labels=labels_set, annotations=notes)
    eventually_sync(lambda: "bert" in cluster.reported("labelled"))
    reported = cluster.reported("labelled")["bert"]
    assert reported.labels == {"app": "bert", "app.kubernetes.io/part-of": "nlp", "kueue.x-k8s.io/queue-name": "q"}
    assert reported.annotations == {"gpustream.dev/note": "ünïcode \"' \\"}
    assert reported.namespace_labels == {"team": "research", "gpustream.dev/tier": "gold"}
    labels_kept = {name: label for name, label in labels.items() if name != "other"}
    assert cluster.workloads.of_node("labelled")[-1].node_labels == labels_kept

    node.give(("labelled", "bert"))
    (holder,) = holders(cluster, node)
    assert holder is not None
    assert (holder.labels, holder.annotations, holder.namespace_labels) == (
        reported.labels,
        reported.annotations,
        reported.namespace_labels,
    )
    api.patch("/api/v1/namespaces/labelled/pods/bert", {"metadata": {"labels": {"app": "gpt", "team": "a"}}})
    eventually_sync(lambda: cluster.reported("labelled")["bert"].labels["app"] == "gpt")
    api.patch("/api/v1/namespaces/labelled", {"metadata": {"labels": {"team": "product"}}})
    eventually_sync(lambda: cluster.reported("labelled")["bert"].namespace_labels["team"] == "product")
    api.patch("/api/v1/nodes/labelled", {"metadata": {"labels": {"rack": None}}})
    eventually_sync(lambda: "rack" not in cluster.workloads.of_node("labelled")[-1].node_labels)
    assert [tick.node_labels for tick in cluster.ticks.of_node("labelled")] == [labels_kept]
    (holder,) = holders(cluster, node)
    assert holder is not None
    assert (holder.labels["app"], holder.labels["team"], holder.namespace_labels["team"]) == ("gpt", "a", "product")
    assert "rack" not in cluster.ticks.of_node("labelled")[-1].node_labels


def test_however_much_a_tenant_writes_a_bounded_part_is_reported_and_nobody_else_loses_anything(
    cluster: Cluster,
) -> None:
    api, node = cluster.api, cluster.node("flooded")
    api.namespace("flooded")
    cut = counted(cluster.leader(), own.CUT)
    labels = {f"app.kubernetes.io/l-{number:05}": "x" for number in range(10_000)}
    pod(api, "flooded", "labels", node, labels=labels)
    eventually_sync(lambda: counted(cluster.leader(), own.CUT) == cut + 10_000 - LABEL_BOUNDS.entries)
    pod(api, "flooded", "note", node, annotations={"gpustream.dev/note": "ü" * 100_000}, labels={"app": "note"})
    eventually_sync(lambda: counted(cluster.leader(), own.CUT) == cut + 10_000 - LABEL_BOUNDS.entries + 1)
    pod(api, "flooded", "after", node, labels={"app": "after"})
    eventually_sync(lambda: set(cluster.reported("flooded")) == {"labels", "note", "after"})
    reported = cluster.reported("flooded")
    assert list(reported["labels"].labels) == sorted(labels)[: LABEL_BOUNDS.entries]
    assert reported["note"].annotations == {"gpustream.dev/note": "ü" * (ANNOTATION_BOUNDS.value_bytes // 2)}
    assert (reported["note"].labels, reported["after"].labels) == ({"app": "note"}, {"app": "after"})
    delete_pod(api, "flooded", "labels")
    cluster.settle()


def test_only_gpu_pods_that_a_node_has_are_reported_from_the_binding_to_the_end(cluster: Cluster) -> None:
    api, node = cluster.api, cluster.node("bound")
    api.namespace("bound")
    pod(api, "bound", "pending", None)
    pod(api, "bound", "no-gpu", node, containers=[{"name": "main", "image": "x"}])
    sidecar = {**CONTAINER, "name": "sidecar", "restartPolicy": "Always"}
    plain = [{"name": "main", "image": "x"}]
    pod(api, "bound", "sidecar", node, containers=plain, initContainers=[sidecar])
    eventually_sync(lambda: set(cluster.reported("bound")) == {"sidecar"})
    cluster.settle()
    api.bind("bound", "pending", node)
    eventually_sync(lambda: set(cluster.reported("bound")) == {"sidecar", "pending"})
    end_state = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-02T03:04:05Z"}}
    status = {"phase": "Succeeded", "startTime": "2026-01-02T03:00:00Z"}
    containers = [{"name": "main", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": end_state}]
    api.patch(
        "/api/v1/namespaces/bound/pods/pending", {"status": {**status, "containerStatuses": containers}}, status=True
    )
    eventually_sync(lambda: set(cluster.reported("bound")) == {"sidecar"})
    (over,) = [pod for pod in cluster.workloads.of_node("bound")[-1].pods if pod.ended_ms is not None]
    assert (over.name, over.phase, over.started_ms, over.ended_ms) == (
        "pending",
        "Succeeded",
        1_767_322_800_000,
        1_767_323_045_000,
    )


def test_a_node_that_is_removed_has_a_last_record_in_which_its_pods_ended(cluster: Cluster) -> None:
    api, node = cluster.api, cluster.node("removed")
    api.namespace("removed")
    uid = pod(api, "removed", "p", node)
    eventually_sync(lambda: "p" in cluster.reported("removed"))
    before_ms = now_ms()
    api.delete("/api/v1/nodes/removed")
    eventually_sync(lambda: not cluster.reported("removed"))
    (ended_pod,) = cluster.workloads.of_node("removed")[-1].pods
    assert ended_pod.uid == uid
    assert ended_pod.ended_ms is not None
    assert before_ms <= ended_pod.ended_ms <= now_ms()
    records = len(cluster.workloads.of_node("removed"))
    delete_pod(api, "removed", "p")
    cluster.node("removed")
    eventually_sync(lambda: len(cluster.workloads.of_node("removed")) > records)
    cluster.settle()  # the node may be known before the pod's end is
    last_record = cluster.workloads.of_node("removed")[-1]
    assert [pod.ended_ms is None for pod in last_record.pods if pod.uid == uid] in ([], [False])
    seqs = [record.seq for record in cluster.workloads.of_node("removed")]
    assert seqs == sorted(set(seqs))


def test_the_devices_of_resource_claims_are_reported_with_their_uuids_and_a_tick_names_their_pod(
    cluster: Cluster,
) -> None:
    api, node = cluster.api, Node(cluster.kafka, "dra", 2)
    api.namespace("dra")
    cluster.node("dra")
    publish(cluster, "gpu.nvidia.com", node.gpus)
    publish(cluster, "nic.example.com", ["NIC-1"])
    claims = [{"name": "gpu", "resourceClaimName": "one-gpu"}]
    plain = [{"name": "main", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}]
    uid = pod(api, "dra", "claims", "dra", containers=plain, resourceClaims=claims)
    eventually_sync(lambda: "claims" in cluster.reported("dra") and cluster.workloads.of_node("dra")[-1].dra_devices)
    cluster.settle()
    reported = cluster.workloads.of_node("dra")[-1].dra_devices
    assert [(device.driver, device.pool, device.device, device.uuid) for device in reported] == [
        ("gpu.nvidia.com", "dra", f"gpu-{index}", uuid) for index, uuid in enumerate(node.gpus)
    ]
    claim = {"claim": "one-gpu", "namespace": "dra", "driver": "gpu.nvidia.com", "pool": "dra", "device": "gpu-1"}
    node.containers = [
        {
            "namespace": "dra",
            "pod": "claims",
            "container": "main",
            "resource": None,
            "device_ids": [],
            "claims": [claim],
        }
    ]
    monitored_by(cluster, "dra", "gpu-0")
    node.containers.append(
        {**node.containers[0], "pod": "monitor", "claims": [claim | {"claim": "monitor", "device": "gpu-0"}]}
    )
    free, held_device = holders(cluster, node)
    assert free is None
    assert held_device is not None
    assert (held_device.pod, held_device.pod_uid) == ("claims", uid)
    before = len(cluster.workloads.of_node("dra"))
    api.delete("/apis/resource.k8s.io/v1/resourceslices/dra-gpu.nvidia.com")
    publish(cluster, "gpu.nvidia.com", node.gpus[:1])  # until the driver is back, what it had published counts
    eventually_sync(lambda: len(cluster.workloads.of_node("dra")[-1].dra_devices or ()) == 1)
    assert min(len(workloads.dra_devices or ()) for workloads in cluster.workloads.of_node("dra")[before:]) == 1
    assert set(cluster.reported("dra")) == {"claims", "monitor"}


def publish(cluster: Cluster, driver: str, uuids: Sequence[str]) -> None:
    """The only slice of a driver's pool on the node ``dra``."""
    devices = [
        {"name": f"gpu-{index}", "attributes": {"uuid": {"string": uuid}, "index": {"int": index}}}
        for index, uuid in enumerate(uuids)
    ]
    pool = {"name": "dra", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": "dra", "pool": pool, "devices": devices}
    slice_of = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    cluster.api.create({**slice_of, "metadata": {"name": f"dra-{driver}"}, "spec": spec})


def monitored_by(cluster: Cluster, node: str, device: str) -> None:
    """A pod ``monitor`` and a claim of that name, which has a device only to look at it, as the scheduler writes it."""
    api = cluster.api
    api.patch("/api/v1/namespaces/dra", {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}})
    exactly = {"deviceClassName": "gpu.nvidia.com", "adminAccess": True, "allocationMode": "All"}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
    metadata = {"name": "monitor", "namespace": "dra"}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    api.create({**claim, "metadata": metadata, "spec": spec})
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": node, "device": device, "adminAccess": True}
    path = "/apis/resource.k8s.io/v1/namespaces/dra/resourceclaims/monitor"
    api.patch(path, {"status": {"allocation": {"devices": {"results": [result]}}}}, status=True)
    plain = [{"name": "main", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}]
    claims = [{"name": "gpu", "resourceClaimName": "monitor"}]
    pod(api, "dra", "monitor", node, containers=plain, resourceClaims=claims)
    eventually_sync(lambda: "monitor" in cluster.reported(node) and cluster.workloads.of_node(node)[-1].admin_claims)


# -- an API server that goes away


class Churn:
    """Pods of some nodes that come, change and go, whether the API server is there or not."""

    def __init__(self, api: ApiServer, namespace: str, nodes: Sequence[str]) -> None:
        self._api, self._namespace, self._nodes = api, namespace, nodes
        self._deployment = owner(api, namespace, "Deployment", "top")
        self.done = 0

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Goes on for as long as this is entered."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def goes_on(self) -> None:
        """Wait for some more changes."""
        enough = self.done + 10
        eventually_sync(lambda: self.done > enough)

    def turn(self, times: int) -> None:
        """So many changes of each kind."""
        for _ in range(times):
            self._change()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(0.02):
            with contextlib.suppress(*AWAY):
                self._change()

    def _change(self) -> None:
        """Pod n is made, with its owner, n-1 gets another label, and n-5 goes; an answer that was lost does no harm."""
        number = self.done = self.done + 1
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        node = self._nodes[number % len(self._nodes)]
        with contextlib.suppress(Denied):
            above = owner(self._api, self._namespace, "ReplicaSet", f"p-{number}", self._deployment)
            pod(self._api, self._namespace, f"p-{number}", node, above, labels={"app": "new"})
        with contextlib.suppress(Denied):
            self._api.patch(f"{path}/p-{number - 1}", {"metadata": {"labels": {"app": f"changed-{number}"}}})
        with contextlib.suppress(Denied):
            delete_pod(self._api, self._namespace, f"p-{number - 5}")


@pytest.fixture(scope="module")
def churn(cluster: Cluster) -> Churn:
    """Changes on four nodes."""
    cluster.api.namespace("churn")
    return Churn(cluster.api, "churn", [cluster.node(f"churn-{number}") for number in range(4)])


def restart_while_pods_change(cluster: Cluster, churn: Churn, end: Callable[[], None]) -> None:
    """Nothing is lost, and the watches were begun again."""
    restarts = {replica: counted(replica, own.RESTARTS, resource="pods") for replica in cluster.replicas.values()}
    with churn.going():
        churn.goes_on()
        end()
        cluster.api.start()
        churn.goes_on()
    cluster.settle()
    assert len(pods_of_nodes(cluster.api)["churn-1"]) >= 1
    for replica, before in restarts.items():
        assert counted(replica, own.RESTARTS, resource="pods") > before
        eventually_sync(replica.ready)


def test_nothing_is_lost_while_pods_change_and_the_api_server_is_started_again(cluster: Cluster, churn: Churn) -> None:
    restart_while_pods_change(cluster, churn, cluster.api.stop)


# -- pods that come back


class Life(NamedTuple):
    """A pod under its name: its uid, and from when to when it was there."""

    uid: str
    began_ms: int
    ended_ms: int


def test_the_ticks_of_a_pod_that_comes_back_under_its_name_are_booked_to_the_right_uid(cluster: Cluster) -> None:
    """Ticks near a change do not count. After the last pod, which its kubelet still lists, no other has them. The
    kubelet says the same before and after a change, or nothing for a while."""
    api, node = cluster.api, Node(cluster.kafka, "returning", 1)
    api.namespace("returning")
    cluster.node("returning")
    controller = owner(api, "returning", "StatefulSet", "web")
    lives: list[Life] = []
    with node.ticking():
        for away_s in (0.0, 1.2, 0.0):
            began_ms = now_ms()
            uid = pod(api, "returning", "web-0", "returning", controller, labels={"app": "web"})
            node.give(("returning", "web-0"))
            time.sleep(LIFE_S)
            delete_pod(api, "returning", "web-0")
            lives.append(Life(uid, began_ms, now_ms()))
            if away_s:
                node.give()
                time.sleep(away_s)
        time.sleep(NEAR_MS / 1000 + 2 * TICK_S)
    ended_ms = lives[-1].ended_ms + NEAR_MS
    eventually_sync(lambda: cluster.ticks.of_node("returning")[-1].ts_ms > ended_ms)
    booked = [
        (life, tick.devices[0].holders[0])
        for tick in cluster.ticks.of_node("returning")
        for life in lives
        if life.began_ms + KNOWN_MS <= tick.ts_ms <= life.ended_ms - NEAR_MS
    ]
    assert len(booked) >= len(lives) * (LIFE_S - (KNOWN_MS + NEAR_MS) / 1000) / TICK_S / 2
    assert {life.uid: {holder.pod_uid for booked_life, holder in booked if booked_life is life} for life in lives} == {
        life.uid: {life.uid} for life in lives
    }
    described = {(holder.statefulset, holder.workload, tuple(holder.labels.items())) for _, holder in booked}
    assert described == {("web", Workload("StatefulSet", "web"), (("app", "web"),))}
    near = [tick for tick in cluster.ticks.of_node("returning") if tick.ts_ms >= lives[0].began_ms]
    uids = {holder.pod_uid for tick in near for holder in tick.devices[0].holders}
    assert uids - {None} == {life.uid for life in lives}
    after = [tick.devices[0].holders[0] for tick in near if tick.ts_ms > ended_ms]
    assert {(holder.pod, holder.pod_uid) for holder in after} <= {("web-0", lives[-1].uid), ("web-0", None)}


# -- an API server that is killed; not soon after it was stopped: a watch that fails again soon waits longer each time


def test_nothing_is_lost_while_pods_change_and_the_api_server_is_killed(cluster: Cluster, churn: Churn) -> None:
    restart_while_pods_change(cluster, churn, cluster.api.kill9)


# -- who leads


def epochs(cluster: Cluster, node: str) -> list[int]:
    """The epochs of a node's records, in the log's order."""
    return [record.epoch for record in cluster.workloads.of_node(node)]


def since(cluster: Cluster, epoch: int) -> list[Record[NodeWorkloads]]:
    """The records of later epochs."""
    return [record for record in cluster.workloads.records() if record.value.epoch > epoch]


def epoch_now(cluster: Cluster) -> int:
    """The highest epoch that was reported."""
    return max(value.epoch for value, _ in cluster.workloads.records())


def test_a_leader_that_is_killed_is_followed_within_15_s_without_a_node_missing(cluster: Cluster, churn: Churn) -> None:
    churn.turn(5)
    cluster.settle()
    leader, before = cluster.leader(), epoch_now(cluster)
    killed_ms = now_ms()
    leader.kill9()
    cluster.replicas = {name: replica for name, replica in cluster.replicas.items() if replica is not leader}
    churn.turn(5)
    eventually_sync(lambda: {value.node for value, _ in since(cluster, before)} >= pods_of_nodes(cluster.api).keys())
    cluster.settle()
    reported = since(cluster, before)
    assert len({value.epoch for value, _ in reported}) == 1
    assert min(ts_ms for _, ts_ms in reported) - killed_ms < TAKEN_OVER_WITHIN_S * 1000
    cluster.replica()


def test_nothing_is_lost_where_the_changes_meanwhile_were_compacted_away(cluster: Cluster, churn: Churn) -> None:
    replicas = list(cluster.replicas.values())
    churn.turn(8)
    cluster.settle()
    expired = [counted(replica, own.RESTARTS, resource="pods", reason="expired") for replica in replicas]
    for replica in replicas:
        replica.sigstop()
    churn.turn(8)
    cluster.api.delete(f"/api/v1/nodes/{cluster.node('short-lived')}")
    cluster.api.etcd.compact()
    cluster.api.kill9()
    cluster.api.start()
    for replica in replicas:
        replica.sigcont()
    cluster.settle()
    for running, before in zip(replicas, expired, strict=True):
        eventually_sync(
            lambda r=running, before=before: counted(r, own.RESTARTS, resource="pods", reason="expired") > before  # type: ignore[misc]
        )
    churn.turn(3)
    cluster.settle()


def test_a_leader_that_is_paused_past_its_lease_reports_nothing_that_a_reader_takes(
    cluster: Cluster, churn: Churn
) -> None:
    api, node = cluster.api, Node(cluster.kafka, "paused", 1)
    api.namespace("paused")
    cluster.node("paused")
    node.give(("paused", "web-0"))
    old = pod(api, "paused", "web-0", "paused", labels={"app": "old"})
    churn.turn(5)
    cluster.settle()
    (holder,) = holders(cluster, node)
    assert holder is not None
    assert holder.pod_uid == old

    paused, standby, before = cluster.leader(), cluster.standby(), epoch_now(cluster)
    paused.sigstop()
    eventually_sync(lambda: counted(standby, own.LEADING) == 1)
    delete_pod(api, "paused", "web-0")
    new = pod(api, "paused", "web-0", "paused", labels={"app": "new"})
    churn.turn(20)
    cluster.settle()
    with churn.going():
        paused.sigcont()
        eventually_sync(lambda: counted(paused, own.TRANSITIONS, to="standby") >= 1)
        assert "no longer leading" in paused.log.read_text()
        churn.goes_on()
    cluster.settle()
    assert cluster.leader() is standby
    assert {value.epoch for value, _ in since(cluster, before)} == {epoch_now(cluster)}
    assert all(max(epochs(cluster, name)) == epoch_now(cluster) for name in pods_of_nodes(api))
    time.sleep(NEAR_MS / 1000)
    (holder,) = holders(cluster, node)
    assert holder is not None
    assert (holder.pod_uid, holder.labels) == (new, {"app": "new"})


def ended_pods(cluster: Cluster, epoch: int = 0) -> dict[tuple[str, str], int]:
    """When each pod ended this hour that was reported since an epoch, by node and uid, on the nodes that are there."""
    nodes, hour_ms = pods_of_nodes(cluster.api).keys(), 3_600_000
    return {
        (value.node, pod.uid): pod.ended_ms
        for value, _ in since(cluster, epoch)
        for pod in value.pods
        if value.node in nodes and value.cluster == CLUSTER
        if pod.ended_ms is not None and pod.ended_ms > now_ms() - hour_ms
    }


def test_a_clean_stop_hands_over_at_once_with_the_pods_that_ended_before_the_next_leader_started(
    cluster: Cluster, churn: Churn
) -> None:
    churn.turn(5)
    cluster.settle()
    leader, other = cluster.leader(), cluster.standby()
    other.stop()
    cluster.replicas = {name: replica for name, replica in cluster.replicas.items() if replica is not other}
    ended_then = ended_pods(cluster)
    assert ended_then
    cluster.replica()
    before, began_ms = epoch_now(cluster), now_ms()
    leader.stop()
    cluster.replicas = {name: replica for name, replica in cluster.replicas.items() if replica is not leader}
    assert leader.returncode == 0
    eventually_sync(lambda: {value.node for value, _ in since(cluster, before)} >= pods_of_nodes(cluster.api).keys())
    assert min(ts_ms for _, ts_ms in since(cluster, before)) - began_ms < DURATION_S * 1000 / 2
    cluster.settle()
    assert ended_pods(cluster, before).items() >= ended_then.items()


# -- its token


ACCOUNT = "/api/v1/namespaces/gpustream/serviceaccounts/cluster"


class Starting(Gpustream):
    """A process that is not waited for until it is ready."""

    def ready(self) -> bool:
        return self.get("/healthz") is not None


def token(api: ApiServer, **fields: Any) -> str:
    """A projected token of the producer's account."""
    answer = api.request("POST", f"{ACCOUNT}/token", {"spec": {"expirationSeconds": 3600, **fields}})
    assert answer.status == 201
    return str(answer.body["status"]["token"])


def expired(api: ApiServer, token: str) -> str:
    """That token, as it would be an hour after its end."""
    head, body, _ = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    for name in ("exp", "iat", "nbf"):
        claims[name] -= 7200
    signed = f"{head}.{encoded(json.dumps(claims).encode())}"
    signing: list[str | Path] = [str(find_openssl()), "dgst", "-sha256", "-sign", api.directory / "sa.key"]
    signature = subprocess.run(signing, input=signed.encode(), check=True, capture_output=True).stdout
    return f"{signed}.{encoded(signature)}"


def encoded(text: bytes) -> str:
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def test_an_expired_token_is_reported_and_one_that_rotates_is_followed(cluster: Cluster) -> None:
    api, node, file = cluster.api, cluster.node("rotating"), cluster.api.directory / "token"
    secret = {"apiVersion": "v1", "kind": "Secret"}
    api.namespace("rotating")
    pod(api, "rotating", "first", node)
    file.write_text(expired(api, token(api)))
    config = str(api.kubeconfig(tokenFile=str(file)))
    arguments = ("produce", "cluster", "--cluster", "rotating", "--lease", "off", "--kubeconfig", config)
    producer = cluster.process("rotating", *arguments, kind=Starting)
    producer.start()
    eventually_sync(
        lambda: "pods: the list is not complete yet: our credentials are not accepted (401)" in producer.why_not()
    )

    created = api.create({**secret, "metadata": {"name": "bound", "namespace": "gpustream"}})
    file.write_text(token(api, boundObjectRef={**secret, "name": "bound", "uid": created["metadata"]["uid"]}))
    eventually_sync(lambda: cluster.workloads.of_node(node, "rotating"))
    eventually_sync(lambda: not producer.why_not())
    time.sleep(HEALTHY_AFTER_S)  # from then on a watch that fails is begun again at once
    denied, fresh = counted(producer, own.API_REQUESTS, code="401"), token(api)
    api.delete("/api/v1/namespaces/gpustream/secrets/bound")  # and with it the token, which the server has in memory
    api.kill9()
    file.write_text(fresh + "\n")
    api.start()
    chain = owners(api, "rotating", "last", "Deployment", "ReplicaSet")
    uid = pod(api, "rotating", "last", node, chain[0])
    eventually_sync(lambda: any(pod.uid == uid for pod in cluster.workloads.of_node(node, "rotating")[-1].pods))
    eventually_sync(
        lambda: [chain_of(pod) for pod in cluster.workloads.of_node(node, "rotating")[-1].pods] == [[], chain]
    )
    assert counted(producer, own.API_REQUESTS, code="401") > denied
    producer.stop()
    assert producer.returncode == 0
