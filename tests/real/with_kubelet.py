"""The node producer beside a real kubelet, and processes of containers that run: `make kubelet` runs this.

Pods come and go on a node of four GPUs. The device plugin gives their containers GPUs, of which each process fills the
memory by an amount of its own: what a tick read tells which pod held the GPU. Then all of ``k8s/base`` is installed
there. The GPUs are scripted, and all the rest is as in a cluster: the API server, controllers, the scheduler, the
kubelet, containerd, runc, control groups, and Kafka.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from delivery import topic_admin
from tests.eventually import eventually_sync
from tests.k8s.manifests import K8S, documents
from tests.nvml.scripted import ScriptedNvml
from tests.real.conftest import need
from tests.real.kubelet import (
    GPU,
    HOST,
    IMAGE,
    NAME,
    SLEEPER,
    DraDriver,
    Forwarder,
    Node,
    Scheduler,
    find_kubelet,
    gpustream,
    service_address,
)
from tests.real.kubernetes import (
    ApiServer,
    ControllerManager,
    Json,
    find_etcd,
    find_kube_apiserver,
    find_kube_controller_manager,
)
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.resolver import find_compiler
from tests.real.servers import (
    AlertmanagerServer,
    KafkaServer,
    PrometheusServer,
    find_alertmanager,
    find_java,
    find_kafka,
    find_openssl,
    find_prometheus,
)
from tests.real.test_manifests import find_kustomize
from tests.test_dockerfile import ROOT

pytestmark = pytest.mark.real

CLUSTER, NAMESPACE = "kubelet", "ml"
GPUS = [f"GPU-5c41b7ed-0000-4000-8000-{number:012x}" for number in range(4)]
BASE_BYTES, STEP_BYTES = 1 << 30, 1 << 20
PODS = 24
KNOWN_AFTER_S = 3.0
"""From then on a tick of a node has the uids of its pods: docs/guarantees.md."""

LAST_TICKS_S = 3.0
SLACK_MS = 1500
"""A GPU and the kubelet are read up to a tick after its time, and the script changes some time after a process."""


@dataclass
class Pod:
    """A pod, and when in milliseconds: it was created, its process was seen, and that and the pod were gone."""

    name: str
    number: int
    created_ms: float
    uid: str = ""
    gpus: list[int] = field(default_factory=list)
    began_ms: float = 0.0
    ended_ms: float = 0.0
    gone_ms: float = 0.0


class Tenants:
    """Pods that come and go, by a thread, and what their processes do to the GPUs."""

    def __init__(self, node: Node, nvml: ScriptedNvml, seed: int) -> None:
        self.node, self.nvml, self.random = node, nvml, random.Random(seed)
        self.pods: list[Pod] = []
        self._live: list[Pod] = []
        for gpu in range(len(GPUS)):
            self._free(gpu)

    def run(self) -> None:
        """Run :data:`PODS` pods, each as long as it likes: some end by themselves, some are deleted."""
        while len(self.pods) < PODS or self._live:
            if len(self.pods) < PODS and self._free_gpus() and self.random.random() < 0.05:
                self._create()
            for pod in self._live[:]:
                self._follow(pod)
            time.sleep(0.02)

    def _free_gpus(self) -> int:
        return len(GPUS) - sum(max(1, len(pod.gpus)) for pod in self._live)

    def _create(self) -> None:
        number = len(self.pods)
        pod = Pod(f"train-{number}", number, time.time() * 1000)
        lasts_s = self.random.choice((2, 4, 8))
        command = f"sleep {lasts_s}" if number % 2 else SLEEPER
        gpus = 1 if self._free_gpus() < 2 else self.random.choice((1, 2))
        pod.gpus = [-1] * gpus
        pod.uid = self.node.run(pod.name, gpus=gpus, command=command)
        if not number % 2:
            threading.Timer(lasts_s + 3, self.node.delete, (pod.name,)).start()
        self.pods.append(pod)
        self._live.append(pod)

    def _follow(self, pod: Pod) -> None:
        processes = {pid: uuids for pid, uuids in self.node.processes(pod.uid).items() if uuids}
        now_ms = time.time() * 1000
        if processes and not pod.began_ms:
            pod.began_ms, pod.gpus = now_ms, [GPUS.index(uuid) for uuid in next(iter(processes.values()))]
            with self.nvml.at_once():
                for gpu in pod.gpus:
                    held_bytes = BASE_BYTES + pod.number * STEP_BYTES
                    self.nvml.set(gpu, memory_used=held_bytes, utilization_gpu=50)
                    self.nvml.processes(gpu, [(min(processes), held_bytes)])
        if pod.began_ms and not processes and not pod.ended_ms:
            pod.ended_ms = now_ms
            for gpu in pod.gpus:
                self._free(gpu)
        if pod.ended_ms and pod.name not in self.node.listed():
            pod.gone_ms = now_ms
            self._live.remove(pod)

    def _free(self, gpu: int) -> None:
        with self.nvml.at_once():
            self.nvml.set(gpu, memory_used=0, utilization_gpu=0)
            self.nvml.processes(gpu, [])


@dataclass
class Outcome:
    """What ran, and the records of gpu.attributed."""

    pods: list[Pod]
    ticks: list[Json]


@pytest.fixture(scope="module", params=["pods-api", "pod-resources"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Runs it all, once with the kubelet's Pods API and once without."""
    need(find_compiler, find_java, find_kafka, find_openssl, find_etcd, find_kube_apiserver, find_kubelet)
    directory = tmp_path_factory.mktemp("kubelet")
    with ExitStack() as servers:
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        api = servers.enter_context(ApiServer(directory / "api"))
        nvml = ScriptedNvml(directory / "nvml", gpus=len(GPUS))
        node = servers.enter_context(Node(directory / "node", api, GPUS, nvml.environment(), "PodsAPI"))
        api.namespace(NAMESPACE)
        asyncio.run(topic_admin.create(kafka.connection, partitions=1, replication_factor=1))
        tenants = Tenants(node, nvml, seed=1)
        options = ["--kafka", kafka.address]
        sockets = ["--pod-resources-socket", str(node.pod_resources)]
        sockets += ["--pods-api-socket", str(node.pods_api) if request.param == "pods-api" else "off"]
        for name, arguments, environment in (
            ("attribution", ["stream", "attribution"], {}),
            ("cluster", ["produce", "cluster", "--cluster", CLUSTER, "--kubeconfig", str(api.kubeconfig("admin"))], {}),
            ("node", ["produce", "node", "--cluster", CLUSTER, "--node", "gpu-node-1", *sockets], nvml.environment()),
        ):
            servers.enter_context(Gpustream(directory / name, *arguments, *options, environment=environment))
        eventually_sync(lambda: asyncio.run(read_all(kafka.address, "gpu.workloads")), "the node is known")
        time.sleep(KNOWN_AFTER_S)
        tenants.run()
        time.sleep(LAST_TICKS_S)
        eventually_sync(lambda: asyncio.run(lag(kafka.address, "gpustream-attribution", ["gpu.samples"])) == 0)
        records = asyncio.run(read_all(kafka.address, "gpu.attributed"))
    return Outcome(tenants.pods, [json.loads(record.value) for record in records])


def readings(outcome: Outcome) -> Iterator[tuple[Json, Json, Pod | None]]:
    """Each reading of a GPU with its tick, and the pod whose process filled the GPU's memory."""
    for tick in outcome.ticks:
        for device in tick["devices"]:
            used = device["metrics"]["memory_used_bytes"]
            yield tick, device, outcome.pods[(int(used) - BASE_BYTES) // STEP_BYTES] if used else None


def holders(device: Json) -> list[Any]:
    return [holder.get("pod_uid") for holder in device.get("holders", [])]


def test_every_tick_is_exact(outcome: Outcome) -> None:
    assert Counter(tick["attribution"] for tick in outcome.ticks).keys() == {"exact"}


def test_a_gpu_whose_memory_a_pod_fills_is_that_pods(outcome: Outcome) -> None:
    wrong, right = [], 0
    for tick, device, pod in readings(outcome):
        if pod is None or pod.ended_ms - SLACK_MS <= tick["ts_ms"] <= pod.ended_ms + SLACK_MS:
            continue
        if holders(device) == [pod.uid]:
            right += 1
        else:
            wrong.append((tick["seq"], tick["ts_ms"], device["uuid"], pod, device.get("holders")))
    assert not wrong
    assert right > 2 * PODS


def test_a_gpu_that_nobody_uses_is_at_most_that_of_a_pod_that_begins_or_ends(outcome: Outcome) -> None:
    pods = {pod.name: pod for pod in outcome.pods}
    for tick, device, user in readings(outcome):
        for holder in device.get("holders", []) if user is None else ():
            pod = pods[holder["pod"]]
            assert pod.created_ms - SLACK_MS <= tick["ts_ms"] <= pod.gone_ms + SLACK_MS, (pod, tick["ts_ms"])


def test_a_process_is_never_in_another_pod_than_its_gpu(outcome: Outcome) -> None:
    assert not [(tick["seq"], device) for tick, device, _ in readings(outcome) if device.get("conflict")]


def test_the_kubelet_lists_a_pod_until_after_its_end(outcome: Outcome) -> None:
    """So the readings of a process's last moments have its pod."""
    assert all(pod.created_ms < pod.began_ms < pod.ended_ms < pod.gone_ms for pod in outcome.pods)


# -- all that the manifests install


@dataclass
class Installed:
    """A cluster with all of ``k8s/base`` on its node, and a Deployment that holds two of the GPUs."""

    api: ApiServer
    node: Node
    nvml: ScriptedNvml
    kafka: KafkaServer
    prometheus: PrometheusServer

    def pods(self, namespace: str) -> list[Json]:
        """The pods of a namespace."""
        items: list[Json] = self.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return items

    def containers(self) -> dict[str, Json]:
        """What the kubelet says of gpustream's containers, by pod."""
        return {
            pod["metadata"]["name"]: status
            for pod in self.pods("gpustream")
            for status in pod["status"].get("containerStatuses", [])
            if pod["status"]["phase"] != "Succeeded"
        }

    def all_ready(self) -> bool:
        """Whether all that is to run does, and is ready."""
        containers = self.containers()
        return len(containers) == len(RUNNING) + 1 and all(status["ready"] for status in containers.values())

    def last_tick(self) -> Json:
        """The newest record of gpu.attributed."""
        tick: Json = json.loads(asyncio.run(read_all(self.kafka.address, "gpu.attributed"))[-1].value)
        return tick

    def train(self) -> Json:
        """The Deployment's pod, once it runs."""
        return eventually_sync(
            lambda: next((pod for pod in self.pods(NAMESPACE) if pod["status"]["phase"] == "Running"), None)
        )


RUNNING = ["alertmanager", "alerts", "attribution", "cluster", "node", "remote-write"]
"""What ``k8s/base`` keeps running: here one of each, but for the cluster producer."""

CONTROLLERS = (
    *("daemonset", "deployment", "replicaset", "statefulset", "job", "garbage-collector", "namespace"),
    *("node-lifecycle", "serviceaccount", "root-ca-certificate-publisher", "ttl-after-finished"),
)
TRAIN = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "train", "namespace": NAMESPACE},
    "spec": {
        "selector": {"matchLabels": {"app": "train"}},
        "template": {
            "metadata": {"labels": {"app": "train"}},
            "spec": {
                "terminationGracePeriodSeconds": 2,
                "containers": [
                    {
                        "name": "main",
                        "image": IMAGE,
                        "imagePullPolicy": "Never",
                        "resources": {"limits": {GPU: "2"}},
                    }
                ],
            },
        },
    },
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Applies the manifests to a cluster of one node, and waits until all pods are ready."""
    need(find_compiler, find_java, find_kafka, find_openssl, find_etcd, find_kube_apiserver, find_kubelet)
    need(find_kube_controller_manager, find_prometheus, find_alertmanager, find_kustomize)
    directory = tmp_path_factory.mktemp("installed")
    with ExitStack() as servers:
        kafka = KafkaServer(directory / "kafka")
        ports = [port.number for port in kafka.ports]
        inside, controller, outside = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", f"{HOST}:{ports[4]}"
        kafka.settings |= {
            "listeners": f"PLAINTEXT://{inside},CONTROLLER://{controller},PODS://0.0.0.0:{ports[4]}",
            "advertised.listeners": f"PLAINTEXT://{inside},PODS://{outside}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PODS:PLAINTEXT",
        }
        servers.enter_context(kafka)
        prometheus = servers.enter_context(PrometheusServer(directory / "prometheus"))
        alertmanager = servers.enter_context(AlertmanagerServer(directory / "alertmanager"))
        receivers = [
            servers.enter_context(Forwarder(server.ports[0].number)).url for server in (prometheus, alertmanager)
        ]
        api = servers.enter_context(ApiServer(directory / "api", service_accounts=True))
        servers.enter_context(service_address(api))
        servers.enter_context(ControllerManager(directory / "controllers", api, controllers=CONTROLLERS))
        servers.enter_context(Scheduler(directory / "scheduler", api))
        nvml = ScriptedNvml(directory / "nvml", gpus=len(GPUS))
        node = servers.enter_context(Node(directory / "machine", api, GPUS, nvml.environment(), "PodsAPI"))
        node.containerd.add(gpustream(directory / "gpustream.tar", packages(directory / "packages")))
        for manifest in rendered(directory, nvml, outside, *receivers):
            answer = api.apply(manifest)
            assert answer.status in {200, 201}, answer.body
        api.namespace(NAMESPACE)
        api.create(TRAIN)
        installed = Installed(api, node, nvml, kafka, prometheus)
        eventually_sync(installed.all_ready, "all pods are ready")
        yield installed


def packages(folder: Path) -> Path:
    """What gpustream needs to run, and itself, installed into a folder as the Dockerfile does into its image."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}  # it downloads
    for what in (["--require-hashes", "-r", str(ROOT / "requirements-run.lock")], ["--no-build-isolation", str(ROOT)]):
        subprocess.run([*pip, "--no-deps", *what], env=environment, check=True)
    return folder


def rendered(folder: Path, nvml: ScriptedNvml, kafka: str, prometheus: str, alertmanager: str) -> list[Json]:
    """The objects of the base, one replica of each, with the scripted NVML in place of what NVIDIA's runtime brings."""
    environment = nvml.environment()
    script = Path(environment["NVML_SCRIPT"])
    places = {"nvml": environment["LD_LIBRARY_PATH"].partition(":")[0], "script": str(script.parent)}
    template = "/spec/template/spec"
    node_patch: list[Json] = []
    for name, path in places.items():
        volume, mount = {"name": name, "hostPath": {"path": path}}, {"name": name, "mountPath": f"/{name}"}
        node_patch.append({"op": "add", "path": f"{template}/volumes/-", "value": volume})
        node_patch.append({"op": "add", "path": f"{template}/containers/0/volumeMounts/-", "value": mount})
    for name, path in (("LD_LIBRARY_PATH", "/nvml"), ("NVML_SCRIPT", f"/script/{script.name}")):
        value = {"name": name, "value": path}
        node_patch.append({"op": "add", "path": f"{template}/containers/0/env/-", "value": value})
    arguments = ["topics", "create", "--partitions", "2", "--replication-factor", "1"]
    topics_patch = [{"op": "replace", "path": f"{template}/containers/0/args", "value": arguments}]
    urls = {"remote-write": f"{prometheus}/api/v1/write", "alertmanager": alertmanager}
    settings = {"gpustream": f"GPUSTREAM_KAFKA={kafka}"} | {name: f"GPUSTREAM_URL={url}" for name, url in urls.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "gpustream",
        "resources": [f"{os.path.relpath(K8S, folder.resolve())}/base"],
        "configMapGenerator": [
            {"name": name, "behavior": "merge", "literals": [literal]} for name, literal in settings.items()
        ],
        "replicas": [{"name": name, "count": 1} for name in RUNNING if name not in {"cluster", "node"}],
        "patches": [
            {"target": {"kind": "DaemonSet"}, "patch": yaml.safe_dump(node_patch)},
            {"target": {"kind": "Job"}, "patch": yaml.safe_dump(topics_patch)},
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    ran = subprocess.run([find_kustomize(), "build", folder], capture_output=True, text=True, check=True)
    return documents(ran.stdout)


def in_prometheus(installed: Installed) -> dict[str, tuple[str | None, str | None, float]]:
    """The pod and the workload of each GPU, and how much of its memory is used, in what is newest."""
    return {
        series.labels["gpu_uuid"]: (
            series.labels.get("k8s_pod_name"),
            series.labels.get("k8s_workload_name"),
            series.points[0][1],
        )
        for series in installed.prometheus.query("gpu_memory_used")
    }


def test_the_gpus_of_a_pod_are_its_own_in_prometheus_and_its_deployments(installed: Installed) -> None:
    pod = installed.train()["metadata"]
    held = next(filter(None, installed.node.processes(pod["uid"]).values()))
    with installed.nvml.at_once():
        for number, uuid in enumerate(GPUS):
            installed.nvml.set(number, memory_used=BASE_BYTES if uuid in held else 0)
    expected = {uuid: (pod["name"], "train", float(BASE_BYTES)) if uuid in held else (None, None, 0.0) for uuid in GPUS}
    assert len(held) == 2
    eventually_sync(lambda: in_prometheus(installed) == expected, "Prometheus has each GPU under its pod")


def test_the_producer_finds_the_pod_of_a_process_on_a_gpu_that_the_pod_was_not_given(installed: Installed) -> None:
    """By the host's process ids and control groups, out of a container that has neither."""
    pod = installed.train()["metadata"]
    pid, held = next((pid, uuids) for pid, uuids in installed.node.processes(pod["uid"]).items() if uuids)
    other = next(number for number, uuid in enumerate(GPUS) if uuid not in held)
    installed.nvml.processes(other, [(pid, BASE_BYTES)])

    def found() -> bool:
        last = installed.last_tick()
        device = next(device for device in last["devices"] if device["uuid"] == GPUS[other])
        holders = [(holder["pod"], holder.get("observed")) for holder in device.get("holders", [])]
        return device.get("conflict") == "unallocated_process" and holders == [(pod["name"], True)]

    try:
        eventually_sync(found, "the reading says whose process it is")
    finally:
        installed.nvml.processes(other, [])


def test_a_pod_with_a_resource_claim_holds_the_device_that_the_scheduler_chose(installed: Installed) -> None:
    api, name, driver = installed.api, "one-gpu", "gpu.nvidia.com"
    uuid = GPUS[-1]
    resource = {"apiVersion": "resource.k8s.io/v1"}
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    api.create({**resource, "kind": "DeviceClass", "metadata": {"name": driver}, "spec": {"selectors": [selector]}})
    pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": "gpu-3", "attributes": {"uuid": {"string": uuid}}}]
    of_slice = {"driver": driver, "nodeName": NAME, "pool": pool, "devices": devices}
    api.create({**resource, "kind": "ResourceSlice", "metadata": {"name": "gpu-3"}, "spec": of_slice})
    request = {"name": "gpu", "exactly": {"deviceClassName": driver}}
    metadata = {"name": name, "namespace": NAMESPACE}
    claim = {"devices": {"requests": [request]}}
    api.create({**resource, "kind": "ResourceClaim", "metadata": metadata, "spec": claim})

    def chosen(namespace: str, claim: str) -> tuple[str, str]:
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{claim}"
        (result,) = api.get(path)["status"]["allocation"]["devices"]["results"]
        return result["pool"], result["device"]

    container = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
    }

    def held() -> bool:
        last = installed.last_tick()
        device = next(device for device in last["devices"] if device["uuid"] == uuid)
        return [holder["pod"] for holder in device.get("holders", [])] == [name]

    with DraDriver(installed.node.folder, driver, chosen):
        api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        eventually_sync(held, "the pod holds the GPU of its claim")
        installed.node.delete(name)
        eventually_sync(lambda: not held(), "nobody holds it any more")


def test_a_kubelet_that_starts_again_changes_nobodys_gpus(installed: Installed) -> None:
    pod = installed.train()["metadata"]
    listed = installed.node.listed()[pod["name"]]
    installed.node.restart_kubelet()
    eventually_sync(lambda: installed.node.listed().get(pod["name"]) == listed, "the kubelet knows its pods again")
    since_ms = time.time() * 1000

    def again() -> bool:
        last = installed.last_tick()
        holders = {one["uuid"]: [holder["pod"] for holder in one.get("holders", [])] for one in last["devices"]}
        held = {uuid: [pod["name"]] if uuid in listed else [] for uuid in GPUS}
        return last["ts_ms"] > since_ms and last["attribution"] == "exact" and holders == held

    eventually_sync(again, "ticks are attributed exactly again")


@pytest.mark.parametrize("component", RUNNING)
def test_a_pod_that_is_deleted_ends_in_good_order(installed: Installed, component: str) -> None:
    name = next(name for name in installed.containers() if name.startswith(component))
    codes: list[int] = []

    def gone() -> bool:
        status = installed.containers().get(name, {})
        codes.extend([status["state"]["terminated"]["exitCode"]] if "terminated" in status.get("state", {}) else [])
        uids = [pod["metadata"]["uid"] for pod in installed.pods("gpustream") if pod["metadata"]["name"] == name]
        return uid not in uids

    uid = next(pod["metadata"]["uid"] for pod in installed.pods("gpustream") if pod["metadata"]["name"] == name)
    installed.node.delete(name, "gpustream")
    eventually_sync(gone, f"{name} is gone", every_s=0.01)
    assert set(codes) <= {0}
    eventually_sync(installed.all_ready, "all pods are ready again")


def test_nothing_was_restarted(installed: Installed) -> None:
    assert {
        name: status["restartCount"] for name, status in installed.containers().items() if status["restartCount"]
    } == {}
