"""The kubectl and Helm commands of the pages, on a real API server with controllers: install, upgrade and so on.

There is no kubelet. :class:`Nodes` stands in for one: pods run at once, and a Job's pod has worked on a real Kafka.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gpustream.chart import COMPONENTS
from gpustream.cli import main
from tests.docs.page import ROOT, blocks
from tests.eventually import LIMIT_S, eventually_sync
from tests.k8s.manifests import K8S, README, environment
from tests.real.conftest import need
from tests.real.kubernetes import (
    ADMIN,
    ApiServer,
    ControllerManager,
    Denied,
    Json,
    find_etcd,
    find_kube_apiserver,
    find_kube_controller_manager,
    find_kubectl,
)
from tests.real.servers import KafkaServer, find_openssl
from tests.real.test_manifests import BRIEFLY, find_helm
from topics import TOPICS

CONTROLLERS = (
    "deployment", "replicaset", "statefulset", "daemonset", "job", "namespace", "garbage-collector",
    "persistentvolumeclaim-protection",
)  # fmt: skip
NODE = "gpu-node-1"
SETS = "/apis/apps/v1/namespaces/gpustream/statefulsets"
ONE_BROKER = ("--set", "topics.options.partitions=4", "--set", "topics.options.replication-factor=1")
LEFT_JOB = "jobs/gpustream-topics"
"""What Helm leaves: the Job is a hook of the release, and no part of it."""


class Nodes:
    """Stands for the scheduler and one node's kubelet. It runs the command of a Job's pod here, with its variables."""

    def __init__(self, api: ApiServer) -> None:
        self.api, self.ran = api, list[str]()
        self._seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        labels = {"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"}
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": labels}})
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"pods": "200"}}
        api.patch(f"/api/v1/nodes/{NODE}", {"status": ready}, status=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(0.25):
            for pod in self.api.get("/api/v1/pods")["items"]:
                with contextlib.suppress(Denied):  # it is gone, or was changed meanwhile: the next turn
                    self._look_after(pod)

    def _look_after(self, pod: Json) -> None:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        if pod["metadata"].get("deletionTimestamp"):
            self.api.request("DELETE", path, {"gracePeriodSeconds": 0})
            return
        if pod["metadata"]["uid"] in self._seen:
            return
        if not pod["spec"].get("nodeName"):
            self.api.bind(namespace, name, NODE)
        (container,) = pod["spec"]["containers"]
        phase = "Running"
        if any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", [])):
            phase = self._run(namespace, container)
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        self.api.patch(path, {"status": {"phase": phase, "conditions": [ready]}}, status=True)
        self._seen.add(pod["metadata"]["uid"])

    def _run(self, namespace: str, container: Json) -> str:
        """Runs the command of a Job's pod, and reports its result."""
        maps = self.api.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]
        env = environment(
            container, {config_map["metadata"]["name"]: config_map.get("data", {}) for config_map in maps}
        )
        result = CliRunner().invoke(main, container["args"], env=env)
        self.ran.append(result.output)
        return "Succeeded" if result.exit_code == 0 else "Failed"


class Shell:
    """Runs lines of a page in a folder, with kubectl and Helm, and a cluster's administrator."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.folder = folder
        path = f"{find_kubectl().parent}{os.pathsep}{find_helm().parent}{os.pathsep}{os.environ['PATH']}"
        homes = {f"HELM_{kind}_HOME": str(folder / f"helm-{kind}") for kind in ("CACHE", "CONFIG", "DATA")}
        admin = {"HOME": str(folder), "KUBECONFIG": str(api.kubeconfig(ADMIN))}
        self.environment = {"PATH": path, "GOGC": BRIEFLY["GOGC"], **admin, **homes}

    def __call__(self, line: str, *arguments: str) -> str:
        command_words = [*shlex.split(line, comments=True), *arguments]
        ran = subprocess.run(
            command_words,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert ran.returncode == 0, (command_words, ran.stdout, ran.stderr)
        return ran.stdout


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """An API server of these tests' own, with the controllers that make pods and clean up, and a node."""
    need(find_etcd, find_kube_apiserver, find_kube_controller_manager, find_kubectl, find_helm, find_openssl)
    directory = tmp_path_factory.mktemp("installing")
    with ApiServer(directory / "api") as api, ControllerManager(directory / "cm", api, controllers=CONTROLLERS):
        new_nodes = Nodes(api)
        yield new_nodes
        new_nodes.close()


def copy_chart(folder: Path) -> Path:
    """The chart where the pages have it, in a folder, for an API server that has no version; gives its Chart.yaml."""
    chart = shutil.copytree(K8S / "helm", folder / "k8s" / "helm") / "gpustream" / "Chart.yaml"
    chart.write_text(re.sub("^kubeVersion:.*$", "", chart.read_text(), flags=re.MULTILINE))
    return chart


def lines(page: str, section: str | None = None) -> list[str]:
    """The lines for kubectl and Helm in a page's shell blocks."""
    section_blocks = blocks(page, "sh", section, indented=True)
    commands = [line.strip() for block in section_blocks for line in block.text.splitlines()]
    return [line for line in commands if line.startswith(("helm", "kubectl"))]


def own_objects(api: ApiServer) -> set[str]:
    """The objects of gpustream in the cluster, by kind and name."""
    kinds = {
        "/api/v1": ("namespaces/gpustream/pods", "namespaces/gpustream/configmaps", "namespaces/gpustream/services"),
        "/apis/apps/v1": ("statefulsets", "deployments", "daemonsets", "replicasets"),
        "/apis/batch/v1": ("jobs",),
        "/apis/policy/v1": ("poddisruptionbudgets",),
        "/apis/rbac.authorization.k8s.io/v1": ("clusterroles", "clusterrolebindings", "roles", "rolebindings"),
        "/apis/coordination.k8s.io/v1": ("namespaces/gpustream/leases",),
    }
    names = {
        f"{path.split('/')[-1]}/{item['metadata']['name']}"
        for root, paths in kinds.items()
        for path in paths
        for item in api.get(f"{root}/{path}")["items"]
    }
    return {name for name in names if "gpustream" in name}


def test_helm_and_kubectl_do_what_the_page_of_operations_says(
    nodes: Nodes, empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    api = nodes.api
    create, admit, install, pods, upgrade, rollout, rollback, secret, uninstall, delete = lines("operations/README.md")
    shell, ran = Shell(api, tmp_path), len(nodes.ran)
    chart = copy_chart(tmp_path)
    shell(create)
    shell(admit)
    shell(install.replace("kafka-0:9092", empty_kafka.address), *ONE_BROKER)
    assert set(TOPICS) <= set(empty_kafka.topics()), nodes.ran
    by_default = yaml.safe_load((K8S / "helm" / "gpustream" / "values.yaml").read_text())
    run = {
        re.sub("([A-Z])", r"-\1", name).lower()
        for name in COMPONENTS
        if name != "topics" and by_default[name]["enabled"]
    }
    eventually_sync(lambda: components(api) == run)
    assert {"gpustream-attribution-0", "gpustream-attribution-1"} <= {
        line.split()[0] for line in shell(pods).splitlines()
    }

    version = yaml.safe_load(chart.read_text())["appVersion"]
    chart.write_text(chart.read_text().replace(version, "9.9.9"))
    for line, tag in ((upgrade, "9.9.9"), (rollback, version)):
        shell(line)
        assert "complete" in shell(rollout)
        eventually_sync(partial(runs, api, f"registry.example.com/gpustream:{tag}"))
    assert len(nodes.ran) == ran + 2, "the Job of topics runs at the install and at the upgrade"

    (tmp_path / "password").write_text("p")
    (tmp_path / "ca.crt").write_text("c")
    shell(f"bash -c {shlex.quote(secret)}")
    assert api.get("/api/v1/namespaces/gpustream/secrets/kafka")["data"].keys() == {"password", "ca.crt"}
    shell("kubectl -n gpustream scale statefulset/gpustream-attribution --replicas 3")
    shell(upgrade, "--force-conflicts")
    shell(rollout)
    assert api.get(f"{SETS}/gpustream-attribution")["spec"]["replicas"] == 2, "the README of the manifests says so"
    shell(uninstall)
    eventually_sync(
        lambda: {name for name in own_objects(api) if not name.startswith("pods/gpustream-topics")} == {LEFT_JOB}
    )
    assert LEFT_JOB.partition("/")[2] in (ROOT / "docs" / "operations" / "README.md").read_text()
    shell(delete)
    assert api.request("GET", "/api/v1/namespaces/gpustream").status == 404
    assert own_objects(api) == set()


def test_the_volume_of_the_parquet_files_grows_by_the_lines_of_the_page_while_its_pod_runs_on(
    nodes: Nodes, tmp_path: Path
) -> None:
    api, shell = nodes.api, Shell(nodes.api, tmp_path)
    copy_chart(tmp_path)
    storage = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "grows"}}
    api.create(storage | {"provisioner": "example.com/disks", "allowVolumeExpansion": True})
    shell("kubectl create namespace gpustream")
    values = "topics.enabled=false,parquet.enabled=true,parquet.storage.className=grows"
    shell("helm install gpustream k8s/helm/gpustream --namespace gpustream", "--set", values)
    eventually_sync(lambda: "parquet" in components(api))
    claim = "/api/v1/namespaces/gpustream/persistentvolumeclaims/files-gpustream-parquet-0"
    api.patch(claim, {"status": {"phase": "Bound", "capacity": {"storage": "10Gi"}}}, status=True)
    pod = api.get("/api/v1/namespaces/gpustream/pods/gpustream-parquet-0")["metadata"]["uid"]

    grow, orphan, upgrade = lines("how-to/chargeback.md", "Files that you keep")
    with pytest.raises(AssertionError, match="are forbidden"):
        shell(upgrade)
    for line in (grow, orphan, upgrade):
        shell(line)
    assert api.get(claim)["spec"]["resources"]["requests"] == {"storage": "50Gi"}
    (template,) = api.get(f"{SETS}/gpustream-parquet")["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"] == {"storage": "50Gi"}
    eventually_sync(lambda: api.get(f"{SETS}/gpustream-parquet").get("status", {}).get("updatedReplicas") == 1)
    assert api.get("/api/v1/namespaces/gpustream/pods/gpustream-parquet-0")["metadata"]["uid"] == pod
    shell("helm uninstall gpustream --namespace gpustream")
    shell("kubectl delete namespace gpustream")


def running(api: ApiServer) -> list[Json]:
    return [pod for pod in api.get("/api/v1/namespaces/gpustream/pods")["items"] if pod["status"]["phase"] == "Running"]


def runs(api: ApiServer, image: str) -> bool:
    """Whether all pods are of this image."""
    return {pod["spec"]["containers"][0]["image"] for pod in running(api)} == {image}


def components(api: ApiServer) -> set[str]:
    """The components of the running pods."""
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in running(api)}


def test_kustomize_and_kubectl_do_what_the_readme_of_the_manifests_says(
    nodes: Nodes, empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    api = nodes.api
    namespace, secret, apply, wait, pods = lines("../k8s/README.md", "Deploy")
    (scale,) = lines("../k8s/README.md", "Upgrade")
    shell = Shell(api, tmp_path)
    shutil.copytree(K8S, tmp_path / "k8s")
    kustomization = yaml.safe_load(blocks("../k8s/README.md", "yaml", "Deploy")[0].text)
    kustomization["configMapGenerator"][0]["literals"][0] = f"GPUSTREAM_KAFKA={empty_kafka.address}"
    patch = {"op": "replace", "path": "/spec/template/spec/containers/0/args/5", "value": "1"}
    kustomization["patches"] = [{"target": {"kind": "Job"}, "patch": yaml.safe_dump([patch])}]
    folder = tmp_path / "my-cluster"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (tmp_path / "token").write_text("t")
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    api.create(runtime | {"handler": "nvidia"})  # as NVIDIA's operator does
    for line in (namespace, secret, apply, wait):
        shell(line)
    assert set(TOPICS) <= set(empty_kafka.topics()), nodes.ran
    base = {path.name for path in (K8S / "base").iterdir() if path.is_dir()} - {"namespace", "topics"}
    eventually_sync(lambda: components(api) == base)
    assert "attribution-0" in shell(pods)

    kustomization["images"][0]["newTag"] = "9.9.9"
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (delete,) = re.findall(r"`(kubectl [^`]* delete job topics)`", README)
    for line in (delete, apply, wait):
        shell(line)
    image = f"{kustomization['images'][0]['newName']}:9.9.9"
    eventually_sync(partial(runs, api, image))
    shell(scale)
    eventually_sync(lambda: not {"attribution-0", "alerts-0"} & {pod["metadata"]["name"] for pod in running(api)})
