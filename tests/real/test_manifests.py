"""k8s/, rendered by kustomize and applied to an API server: server-side dry runs, roles, and what pods may do."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from gpustream.chart import COMPONENTS as COMPONENTS_OF_THE_CHART
from gpustream.cli import main
from gpustream.doctor import kubernetes as doctor
from tests.docs.page import ROOT, blocks
from tests.eventually import LIMIT_S, eventually_sync
from tests.k8s.manifests import K8S, README, WEBHOOK, Manifest, documents, environment
from tests.real import policies
from tests.real.conftest import need
from tests.real.kubernetes import ADMIN, ApiServer, Reply, find_etcd, find_kube_apiserver
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer, Missing, find_openssl, find_promtool, real_dir

KUSTOMIZE = "kustomize-5.8.2"
CUSTOM_RESOURCES = "crds-2"

CHART = K8S / "helm" / "gpustream"
HELM = "helm-4.3.1"
SITES = sorted(file.stem for file in (CHART / "ci").glob("*.yaml"))
SCALED_TOO = ["keda/parquet", "keda/usage", "keda/webhook"]
"""Components that go after the one of what they scale."""
COMPONENTS = [*sorted(folder.parent.name for folder in (K8S / "components").glob("*/kustomization.yaml")), *SCALED_TOO]
ACCOUNT = "system:serviceaccount:gpustream:cluster"
STRICT = "fieldManager=tests&force=true&fieldValidation=Strict"
BRIEFLY = os.environ | {"GOGC": "off"}
"""The environment of tools that end in half a second: to collect their garbage takes as long again."""


def find_kustomize() -> Path:
    """Kustomize itself, where ``make real-servers`` put it, or on PATH; raises :class:`Missing`."""
    path = shutil.which("kustomize", path=f"{real_dir() / KUSTOMIZE}{os.pathsep}{os.environ.get('PATH', '')}")
    if not path:
        raise Missing(f"no {KUSTOMIZE} in {real_dir()} and none on PATH: make real-servers")
    return Path(path)


def find_custom_resources() -> Path:
    """The definitions of KEDA's, the Prometheus operator's, Strimzi's and cert-manager's; raises :class:`Missing`."""
    folder = real_dir() / CUSTOM_RESOURCES
    if not folder.is_dir():
        raise Missing(f"no {CUSTOM_RESOURCES} in {real_dir()}: make real-servers")
    return folder


class Cluster:
    """The API server, asked as an administrator or with another's token."""

    def __init__(self, server: ApiServer) -> None:
        self._server, self.ask = server, server.request

    def apply(self, manifest: Manifest, *, dry: bool) -> Reply:
        """Apply an object as ``kubectl apply --server-side`` does, strictly validated."""
        path = (
            f"{self._server.collection(manifest)}/{manifest['metadata']['name']}?{STRICT}{'&dryRun=All' if dry else ''}"
        )
        return self.ask("PATCH", path, manifest, content_type="application/apply-patch+yaml")

    def may(self, user: str, **attributes: str) -> bool:
        """Whether a user may do something."""
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer.body["status"]["allowed"])


@pytest.fixture(scope="module")
def cluster(kube_api: ApiServer) -> Cluster:
    """The run's API server, where the namespaces of k8s/ are, and of the rest only what a test leaves there."""
    need(find_custom_resources)
    asked_cluster = Cluster(kube_api)
    for file in find_custom_resources().glob("*.yaml"):
        (definition,) = documents(file.read_text())
        assert asked_cluster.apply(definition, dry=False).status in {200, 201}
        eventually_sync(partial(established, asked_cluster, definition["metadata"]["name"]))
    for folder in ("base", "try"):
        (namespace,) = [manifest for manifest in render(K8S / folder) if manifest["kind"] == "Namespace"]
        if folder == "base":  # as components/dra has it: what is not there yet can't be seen by a dry run
            namespace["metadata"]["labels"]["resource.kubernetes.io/admin-access"] = "true"
        assert asked_cluster.apply(namespace, dry=False).status in {200, 201}
    return asked_cluster


def established(asked_cluster: Cluster, name: str) -> bool:
    """Whether the API server serves a custom resource."""
    answer = asked_cluster.ask("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    conditions = answer.body.get("status", {}).get("conditions") or []
    return any((condition["type"], condition["status"]) == ("Established", "True") for condition in conditions)


def render(folder: Path) -> list[Manifest]:
    """The objects that kustomize renders from a folder."""
    need(find_kustomize)
    build: list[str | Path] = [find_kustomize(), "build", folder]
    ran = subprocess.run(build, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=BRIEFLY)
    assert (ran.returncode, ran.stderr) == (0, "")
    return documents(ran.stdout)


Render = Callable[[Manifest], list[Manifest]]


@pytest.fixture
def overlay(tmp_path: Path) -> Render:
    """Renders a kustomization that lies beside k8s/."""
    numbers = count()

    def render_it(kustomization: Manifest) -> list[Manifest]:
        folder = tmp_path / f"overlay-{next(numbers)}"
        folder.mkdir()
        k8s = os.path.relpath(K8S, folder.resolve())
        text = yaml.safe_dump(kustomization).replace("- ../k8s/", f"- {k8s}/")
        (folder / "kustomization.yaml").write_text(text)
        for generator in kustomization.get("configMapGenerator", []):
            for file in generator.get("files", []):
                (folder / file).write_text("# of yours\n")
        return render(folder)

    return render_it


def with_components(*names: str) -> Manifest:
    """An overlay of the base with some components."""
    components = [f"../k8s/components/{name}" for name in names]
    return {"namespace": "gpustream", "resources": ["../k8s/base"], "components": components}


def examples(word: str) -> Iterator[Any]:
    """The YAML blocks of the README that have this word."""
    return (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if word in text)


TOGETHER = [name for name in COMPONENTS if name != "strimzi"]
"""All components that can be taken together: either strimzi or kafka-security gives a pod its login."""

OVERLAYS = {
    "base": {"resources": ["../k8s/base"]},
    "try": {"resources": ["../k8s/try"]},
    "production": {"resources": ["../k8s/overlays/production"]},
    "base with every component": with_components(*TOGETHER),
    "base with strimzi": with_components(
        "usage", "webhook", "parquet", "scrape", "metrics-api", "page", "reclaim", "strimzi"
    ),
    "base on GKE": with_components("gke", "critical-node"),
    "base on HAMi": with_components("hami"),
} | {
    f"example {number} of the README": kustomization
    for number, kustomization in enumerate(examples("kind: Kustomization"), 1)
}


@pytest.mark.parametrize("kustomization", OVERLAYS.values(), ids=list(OVERLAYS))
def test_every_object_is_accepted_strictly_and_without_a_warning(
    cluster: Cluster, overlay: Render, kustomization: Manifest
) -> None:
    manifests = overlay(kustomization)
    results = {
        f"{manifest['kind']}/{manifest['metadata']['name']}": cluster.apply(manifest, dry=True)
        for manifest in manifests
    }
    assert len(results) == len(manifests) >= 8
    assert {
        name: answer for name, answer in results.items() if answer.status not in {200, 201} or answer.warnings
    } == {}


def test_the_examples_of_autoscaling_are_accepted_strictly_too(cluster: Cluster) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}, dry=False)
    files = [file for file in (K8S / "examples").rglob("*.yaml") if file.name != "adapter.yaml"]
    manifests = [manifest for file in files for manifest in documents(file.read_text())]
    results = [cluster.apply(manifest, dry=True) for manifest in manifests]

    assert {manifest["kind"] for manifest in manifests} == {
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "TriggerAuthentication",
    }
    assert [(answer.status, answer.warnings) for answer in results] == [(201, [])] * len(manifests)


def test_the_server_refuses_an_unknown_field(cluster: Cluster) -> None:
    (daemon_set,) = [manifest for manifest in render(K8S / "base") if manifest["kind"] == "DaemonSet"]
    daemon_set["spec"]["template"]["spec"]["hostPid"] = True
    answer = cluster.apply(daemon_set, dry=True)
    assert answer.status in {400, 500}
    assert "hostPid" in answer.body["message"]


def test_every_reference_is_to_an_object_that_is_rendered() -> None:
    for folder in ("base", "try"):
        manifests = render(K8S / folder)
        maps = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ConfigMap"}
        assert all(re.fullmatch(r"(gpustream|alerts|remote-write|alertmanager)-[a-z0-9]{10}", name) for name in maps)
        assert set(config_maps_named_in(manifests)) == maps


def config_maps_named_in(node: object) -> Iterator[str]:
    """The names of the ConfigMaps that pods take variables from."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key in {"configMapRef", "configMapKeyRef"}:
                yield value["name"]
            else:
                yield from config_maps_named_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from config_maps_named_in(value)


def test_in_a_namespace_of_another_name_the_roles_are_bound_to_the_account_that_is_there(overlay: Render) -> None:
    manifests = overlay(with_components(*TOGETHER) | {"namespace": "elsewhere"})
    assert {manifest["metadata"].get("namespace", "elsewhere") for manifest in manifests} == {"elsewhere"}
    subjects = [subject for manifest in manifests for subject in manifest.get("subjects", [])]
    assert [subject["namespace"] for subject in subjects] == ["elsewhere"] * 8
    services = [manifest["spec"]["service"] for manifest in manifests if manifest["kind"] == "APIService"]
    assert services == [{"namespace": "elsewhere", "name": "metrics-api", "port": 443}] * 2
    (namespace,) = [manifest for manifest in manifests if manifest["kind"] == "Namespace"]
    assert namespace["metadata"]["name"] == "elsewhere"


def test_the_readmes_overlay_changes_what_it_says(overlay: Render) -> None:
    (kustomization,) = examples("newName:")
    manifests = overlay(kustomization)
    pods = [manifest["spec"]["template"]["spec"] for manifest in manifests if "template" in manifest.get("spec", {})]
    assert {pod["containers"][0]["image"] for pod in pods} == {"registry.example.com/gpustream:0.1.0"}
    assert [pod["runtimeClassName"] for pod in pods if pod.get("hostPID")] == ["nvidia"]
    (reported,) = [
        manifest["data"]
        for manifest in manifests
        if manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"].startswith("gpustream")
    ]
    assert (reported["GPUSTREAM_CLUSTER"], reported["GPUSTREAM_LOG_FORMAT"]) == ("prod-us-east-1", "json")


def test_the_readmes_rules_and_webhook_are_where_the_pods_look_for_them(overlay: Render) -> None:
    (rules,), (webhook,) = examples("rules.toml"), examples("components/webhook\nconfigMapGenerator")
    manifests = overlay(
        {
            "resources": ["../k8s/base"],
            "namespace": "gpustream",
            "components": webhook["components"],
            "configMapGenerator": rules["configMapGenerator"] + webhook["configMapGenerator"],
        }
    )
    (of_rules,) = [name for name in names(manifests, "ConfigMap") if name.startswith("alert-rules-")]
    (of_webhook,) = [name for name in names(manifests, "ConfigMap") if name.startswith("webhook-")]
    pods = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]
        for manifest in manifests
        if manifest["kind"] == "StatefulSet"
    }
    volumes = [volume["configMap"]["name"] for volume in pods["alerts"]["spec"]["volumes"] if "configMap" in volume]
    assert volumes == [of_rules]
    assert of_webhook in config_maps_named_in(pods["webhook"])
    (alerts,) = [manifest for manifest in manifests if manifest["metadata"]["name"].startswith("alerts-")]
    assert alerts["data"]["GPUSTREAM_RULES"] == "/etc/gpustream/alert-rules/rules.toml"


def test_a_file_of_ones_own_is_mounted_where_its_option_looks_for_it(overlay: Render) -> None:
    (example,) = examples("GPUSTREAM_RELABEL")
    manifests = overlay({"resources": ["../k8s/base"], "namespace": "gpustream", **example})
    (pod,) = [pod["spec"] for pod in templates(manifests) if pod["spec"]["containers"][0]["name"] == "remote-write"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "relabel"]
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "relabel"]
    assert volume["configMap"]["name"] in names(manifests, "ConfigMap")
    assert f"GPUSTREAM_RELABEL={mount['mountPath']}/rules.yaml" in example["configMapGenerator"][1]["literals"]


def test_what_the_readme_says_of_replicas_argo_cd_and_flux_changes_these_objects_alone(overlay: Render) -> None:
    base = {"resources": ["../k8s/base"], "namespace": "gpustream"}
    (replicas,), (hook,), (forced,) = map(examples, ("replicas:\n", "argocd.argoproj.io", "kustomize.toolkit"))
    for patched in (hook, forced):
        changed = overlay(base | replicas | patched)
        unlike = [now for now, before in zip(changed, overlay(base), strict=True) if now != before]
        assert sorted(manifest["kind"] for manifest in unlike) == ["Job", "StatefulSet"]
        (job,) = [manifest for manifest in unlike if manifest["kind"] == "Job"]
        assert "ttlSecondsAfterFinished" not in job["spec"]
        assert (
            job["metadata"]["annotations"].items() <= yaml.safe_load(patched["patches"][0]["patch"])[1]["value"].items()
        )


def test_with_the_readmes_patches_every_pod_has_the_pull_secret_and_the_kubelets_folder_is_another(
    overlay: Render,
) -> None:
    (patched,) = examples("imagePullSecrets")
    pods = [pod["spec"] for pod in templates(overlay(with_components("usage", "page") | patched))]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "registry"}]] * 9
    folders = {volume["hostPath"]["path"] for pod in pods for volume in pod["volumes"] if "hostPath" in volume}
    assert folders == {f"/var/lib/k0s/kubelet/{name}" for name in ("pod-resources", "pods-api")}


def test_with_kafka_security_every_pod_of_ours_sees_the_secret_and_every_option_that_names_its_files(
    overlay: Render,
) -> None:
    (kustomization,) = examples("components/kafka-security")
    pods = [pod["spec"] for pod in templates(overlay(kustomization))]
    assert len(pods) == 7
    for pod in pods:
        (container,) = pod["containers"]
        (volume,) = [
            candidate for candidate in pod["volumes"] if candidate.get("secret", {}).get("secretName") == "kafka"
        ]
        (mount,) = [candidate for candidate in container["volumeMounts"] if candidate["name"] == volume["name"]]
        assert pod["securityContext"]["fsGroup"]
        assert any(source["configMapRef"]["name"].startswith("gpustream-") for source in container["envFrom"])
        files = [
            literal.partition("=")[2]
            for literal in kustomization["configMapGenerator"][0]["literals"]
            if "=/" in literal
        ]
        assert {str(Path(file).parent) for file in files} == {mount["mountPath"]}


def test_the_readmes_authentication_is_that_of_every_scaled_objects_kafka_trigger(
    cluster: Cluster, overlay: Render
) -> None:
    (authentication,), (hourly, patched) = examples("kind: TriggerAuthentication"), examples("kind: ScaledObject")
    assert cluster.apply(authentication, dry=True).status == 201
    scaled = [manifest for manifest in overlay(with_components("keda") | patched) if manifest["kind"] == "ScaledObject"]
    assert len(scaled) == 3
    for manifest in scaled:
        assert cluster.apply(manifest, dry=True).status == 201
        (trigger,) = [candidate for candidate in manifest["spec"]["triggers"] if candidate["type"] == "kafka"]
        assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    (parquet,) = [
        manifest
        for manifest in overlay(with_components("parquet", "keda/parquet") | hourly)
        if manifest["kind"] == "ScaledObject"
    ]
    assert cluster.apply(parquet, dry=True).status == 201
    assert [trigger["type"] for trigger in parquet["spec"]["triggers"]] == ["kafka", "cron"]


def test_with_strimzi_every_pod_logs_in_as_a_user_of_its_own_and_the_chart_has_the_same_topics_and_users(
    overlay: Render, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {
                "options": {"kafka": "kafka-kafka-bootstrap:9093"},
                "strimzi": {"topics": True, "users": True},
                **{name: {"enabled": True} for name in COMPONENTS_OF_THE_CHART if name != "topics"},
                "webhook": {"enabled": True, "secret": "webhook"},
            }
        )
    )
    based, charted = overlay(OVERLAYS["base with strimzi"]), chart(values)
    for manifests in (based, charted):
        users = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "KafkaUser"}
        logins = {}
        for manifest in (candidate for candidate in manifests if "template" in candidate.get("spec", {})):
            (volume,) = [
                candidate
                for candidate in manifest["spec"]["template"]["spec"]["volumes"]
                if candidate["name"] == "kafka"
            ]
            logins[manifest["metadata"]["name"]] = volume["projected"]["sources"][0]["secret"]["name"]
        assert logins == {name: f"gpustream-{name.removeprefix('gpustream-')}" for name in logins}
        assert set(logins.values()) == users
        assert not names(manifests, "Job")
    for kind in ("KafkaTopic", "KafkaUser"):
        of_overlay, other = (
            {manifest["metadata"]["name"]: manifest["spec"] for manifest in rendered if manifest["kind"] == kind}
            for rendered in (based, charted)
        )
        assert of_overlay == other
    of_overlay, other = (comparable(rendered)["StatefulSet", "attribution"] for rendered in (based, charted))
    assert of_overlay == other


def test_the_readmes_patch_gives_every_pod_the_address_of_a_kafka_by_strimzi_elsewhere(overlay: Render) -> None:
    (patch,) = examples("kafka-kafka-bootstrap.kafka")
    manifests = overlay(with_components("strimzi") | patch)
    (options,) = [manifest for manifest in manifests if "GPUSTREAM_KAFKA" in manifest.get("data", ())]
    assert options["data"]["GPUSTREAM_KAFKA"] == "kafka-kafka-bootstrap.kafka:9093"
    assert all(options["metadata"]["name"] in config_maps_named_in(pod) for pod in templates(manifests))


def test_openshift_picks_the_users_of_all_but_the_node_producer_whatever_other_components_add(overlay: Render) -> None:
    for pod in templates(overlay(with_components("webhook", "scrape", "metrics-api", "kafka-security", "openshift"))):
        context, name = pod["spec"]["securityContext"], pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if name == "node":
            assert (context["runAsUser"], context["seLinuxOptions"]) == (0, {"type": "spc_t"})
            assert pod["spec"]["serviceAccountName"] == "node"
        else:
            assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def templates(manifests: list[Manifest]) -> list[Manifest]:
    """The pod templates of rendered objects."""
    return [manifest["spec"]["template"] for manifest in manifests if "template" in manifest.get("spec", {})]


def config_maps_in(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """The data of the ConfigMaps, by name."""
    return {
        manifest["metadata"]["name"]: manifest.get("data", {})
        for manifest in manifests
        if manifest["kind"] == "ConfigMap"
    }


def names(manifests: list[Manifest], kind: str) -> list[str]:
    """The names of the objects of a kind."""
    return [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == kind]


def test_a_promtool_takes_the_readmes_scrape_configuration(tmp_path: Path) -> None:
    need(find_promtool)
    (configuration,) = examples("scrape_configs:")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    checked = subprocess.run(
        [find_promtool(), "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


# What the cluster producer may do


@pytest.fixture(scope="module")
def token(cluster: Cluster) -> str:
    """A token of the cluster producer's account, with the bindings of the base."""
    rights = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    for manifest in render(K8S / "base"):
        if manifest["kind"] in rights:
            assert cluster.apply(manifest, dry=False).status in {200, 201}
    path = "/api/v1/namespaces/gpustream/serviceaccounts/cluster/token"
    answer = cluster.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
    return str(answer.body["status"]["token"])


DRA = "/apis/resource.k8s.io/v1"
LISTED = ["/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces", f"{DRA}/resourceslices", f"{DRA}/resourceclaims"]
LISTED += [f"{DRA}/devicetaintrules"]
LEASES = "/apis/coordination.k8s.io/v1/namespaces/gpustream/leases"
REFUSED = [
    "/api/v1/secrets",
    "/api/v1/configmaps",
    "/api/v1/namespaces/gpustream/pods/node-x",
    "/api/v1/namespaces/gpustream/serviceaccounts/cluster",
    "/apis/apps/v1/deployments",
    "/apis/batch/v1/jobs",
    "/apis/ray.io/v1/namespaces/default/rayclusters/r",
    f"{DRA}/deviceclasses",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    LEASES,
    f"{LEASES}/another",
    "/apis/coordination.k8s.io/v1/namespaces/default/leases/gpustream-cluster",
]


@pytest.mark.parametrize("path", LISTED)
def test_the_cluster_producer_lists_and_watches_what_it_must(cluster: Cluster, token: str, path: str) -> None:
    resource = path.rsplit("/", 1)[1]
    absent = resource == "devicetaintrules"  # who has no right to it gets 403
    assert cluster.ask("GET", f"{path}?limit=1", token=token).status == (404 if absent else 200)
    group = "resource.k8s.io" if path.startswith("/apis/") else ""
    assert cluster.may(ACCOUNT, verb="watch", group=group, resource=resource)
    assert not cluster.may(ACCOUNT, verb="get", group=group, resource=resource, name="x")


@pytest.mark.parametrize(
    ("group", "kinds"),
    [("apps", ["replicasets", "deployments", "statefulsets", "daemonsets"]), ("batch", ["jobs", "cronjobs"])],
)
def test_the_cluster_producer_gets_owners_by_their_names(
    cluster: Cluster, token: str, group: str, kinds: list[str]
) -> None:
    for kind in kinds:
        assert cluster.ask("GET", f"/apis/{group}/v1/namespaces/default/{kind}/gone", token=token).status == 404
        assert not cluster.may(ACCOUNT, verb="list", group=group, resource=kind)


@pytest.mark.parametrize("path", REFUSED)
def test_the_cluster_producer_reads_nothing_else(cluster: Cluster, token: str, path: str) -> None:
    assert cluster.ask("GET", path, token=token).status == 403


@pytest.mark.parametrize("group", ["", "apps", "batch"])
@pytest.mark.parametrize("verb", ["create", "update", "patch", "delete", "deletecollection", "impersonate", "bind"])
def test_the_cluster_producer_changes_nothing(cluster: Cluster, token: str, group: str, verb: str) -> None:
    for resource in ("pods", "nodes", "namespaces", "jobs", "replicasets", "users"):
        assert not cluster.may(ACCOUNT, verb=verb, group=group, resource=resource)


def test_the_cluster_producer_makes_and_keeps_its_lease_and_does_nothing_else_to_any(
    cluster: Cluster, token: str
) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "gpustream-cluster"},
        "spec": {"holderIdentity": "cluster-0"},
    }
    path = f"{LEASES}/gpustream-cluster"
    cluster.ask("DELETE", path)
    created = cluster.ask("POST", LEASES, lease, token=token)
    assert created.status == 201
    updated = cluster.ask("PUT", path, created.body, token=token)
    assert (updated.status, cluster.ask("GET", path, token=token).status) == (200, 200)
    assert cluster.ask("DELETE", path, token=token).status == 403
    assert cluster.apply(lease | {"metadata": {"name": "another", "namespace": "gpustream"}}, dry=True).status == 201
    assert cluster.ask("PUT", f"{LEASES}/another", created.body, token=token).status == 403


OWNED = [("ReplicaSet", "Deployment"), ("Job", "CronJob"), ("StatefulSet",), ("DaemonSet",)]
"""Owner chains of GPU pods, from the pod upward."""


def owned_pod(api: ApiServer, chain: tuple[str, ...]) -> None:
    """A GPU pod on the node ``n``, with its owners."""
    name, reference = chain[0].lower(), None
    labels = {"app": name}
    container = {"name": "c", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"containers": [container], "restartPolicy": "Never" if "Job" in chain else "Always"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    for kind in reversed(chain):
        selector = {} if "Job" in kind else {"selector": {"matchLabels": labels}}
        created = api.create(
            {
                "apiVersion": "batch/v1" if "Job" in kind else "apps/v1",
                "kind": kind,
                "metadata": {"name": name, "ownerReferences": reference or []},
                "spec": {"schedule": "0 * * * *", "jobTemplate": {"spec": {"template": template}}}
                if kind == "CronJob"
                else {**selector, "template": template},
            }
        )
        reference = [{"controller": True, "uid": created["metadata"]["uid"], "name": name} | kind_of(created)]
    metadata = {"name": name, "labels": labels, "ownerReferences": reference}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "nodeName": "n"}})


def kind_of(manifest: Manifest) -> Manifest:
    """The fields of an object that are in a reference to it."""
    return {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}


@pytest.fixture(scope="module")
def base_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API with what the base has, and nothing else."""
    need(find_etcd, find_kube_apiserver, find_openssl)
    with ApiServer(tmp_path_factory.mktemp("kubernetes")) as server:
        for manifest in render(K8S / "base"):
            assert server.apply(manifest).status == 201
        yield server


async def test_the_doctor_misses_no_right_that_the_base_grants(base_api: ApiServer) -> None:
    api = base_api
    labels = {"app.kubernetes.io/name": "gpustream", "app.kubernetes.io/component": "cluster"}
    metadata = {"name": "cluster-0", "namespace": "gpustream", "labels": labels}
    spec = {"serviceAccountName": "cluster", "containers": [{"name": "cluster", "image": "i"}]}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    observed = await doctor.inspect(api.kubeconfig(ADMIN), "gpustream")
    assert (observed.missing_rights, observed.refusals) == ({"cluster": []}, {})
    assert observed.leases == {"gpustream/gpustream-cluster": None}
    api.delete("/api/v1/namespaces/gpustream/pods/cluster-0")


def test_what_the_base_grants_is_enough_for_the_cluster_producer_and_all_of_it_is_used(
    base_api: ApiServer, empty_kafka: KafkaServer, gpustream: Callable[..., Gpustream]
) -> None:
    api = base_api
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}})
    for chain in OWNED:
        owned_pod(api, chain)
    empty_kafka.create_ours({"gpu.workloads": 1})
    kubeconfig = api.kubeconfig(token=api.service_account("gpustream", "cluster"))
    options = ["--kubeconfig", str(kubeconfig), "--lease", "gpustream/gpustream-cluster", "--identity", "cluster-0"]
    producer = gpustream("cluster", "produce", "cluster", "--kafka", empty_kafka.address, *options).start()

    def counted(metric: str) -> list[str]:
        return [line for line in (producer.get("/metrics") or "").splitlines() if line.startswith(metric)]

    expected = {f'kind="{kind}",result="ok"}} 1.0' for chain in OWNED for kind in chain}
    producer.wait_until(lambda: "gpustream_cluster_leading 1.0" in counted("gpustream_cluster_leading"))
    metric = "gpustream_cluster_owner_requests_total"
    producer.wait_until(lambda: {line.partition("{")[2] for line in counted(metric)} == expected)
    refused = [line for line in counted("gpustream_cluster_api_requests_total") if 'code="403"' in line]
    assert refused == []
    assert producer.get("/readyz") is not None
    lease = api.get("/apis/coordination.k8s.io/v1/namespaces/gpustream/leases/gpustream-cluster")
    assert lease["spec"]["holderIdentity"] == "cluster-0"
    producer.stop()
    api.delete("/apis/coordination.k8s.io/v1/namespaces/gpustream/leases/gpustream-cluster")


# What the pods may do


def pods_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    """A pod of each workload, as its controller would make it."""
    return {
        manifest["metadata"]["name"]: {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "pod-", **manifest["spec"]["template"]["metadata"]},
            "spec": manifest["spec"]["template"]["spec"],
        }
        for manifest in manifests
        if "template" in manifest.get("spec", {})
    }


def let_in(cluster: Cluster, namespace: str, pod: Manifest) -> tuple[bool, str]:
    """Whether a pod is admitted to a namespace, and the error if it is not."""
    answer = cluster.ask("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict", pod)
    return answer.status == 201, answer.body.get("message", "")


@pytest.mark.parametrize(("folder", "namespace"), [("base", "gpustream"), ("try", "gpustream-try")])
def test_the_namespace_lets_every_pod_in(cluster: Cluster, folder: str, namespace: str) -> None:
    outcomes = {name: let_in(cluster, namespace, pod) for name, pod in pods_of(render(K8S / folder)).items()}
    assert outcomes == dict.fromkeys(outcomes, (True, ""))
    assert outcomes


def test_a_node_producer_that_is_critical_to_its_node_is_let_in(cluster: Cluster, overlay: Render) -> None:
    manifests = overlay(with_components("critical-node"))
    (quota,) = [manifest for manifest in manifests if manifest["kind"] == "ResourceQuota"]
    assert cluster.apply(quota, dry=True).status == 201
    node = pods_of(manifests)["node"]
    assert node["spec"]["priorityClassName"] == "system-node-critical"
    assert let_in(cluster, "gpustream", node) == (True, "")


def test_all_but_the_node_producer_would_be_let_in_by_the_restricted_standard(
    cluster: Cluster, overlay: Render
) -> None:
    outcomes = {
        name: let_in(cluster, "gpustream-try", pod)
        for name, pod in pods_of(overlay(with_components("scrape", "kafka-security"))).items()
    }
    refused = {name: message for name, (admitted, message) in outcomes.items() if not admitted}
    assert refused.keys() == {"node"}
    assert "hostPID=true" in refused["node"]
    assert "hostPath" in refused["node"]


# What policies of admission want


@pytest.fixture(scope="module")
def policed(cluster: Cluster) -> Cluster:
    """The API server with the policies in force, and a namespace for pods that enforces the restricted standard."""
    restricted = {"name": policies.RELEASE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": restricted}, dry=False)
    class_of_pods = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "platform"}}
    cluster.apply(class_of_pods | {"value": 1000}, dry=False)
    for policy in policies.policies():
        assert cluster.apply(policy, dry=False).status in {200, 201}

    def in_force() -> bool:
        answers = [cluster.apply(manifest, dry=True) for manifest in bare()]
        return objections(answers) == policies.OF_PODS.keys() | policies.OF_OBJECTS.keys()

    eventually_sync(in_force)
    return cluster


def bare() -> list[Manifest]:
    """Objects that meet none of the policies."""
    metadata = {"name": "bare", "namespace": "default", "labels": {"app.kubernetes.io/instance": policies.RELEASE}}
    volumes = [{"name": "h", "hostPath": {"path": "/"}}, {"name": "t", "emptyDir": {}}]
    pod = {"containers": [{"name": "c", "image": "x:latest"}], "volumes": volumes}
    rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"type": "NodePort", "ports": [{"port": 80}]},
        },
    ]


def objections(answers: list[Reply]) -> set[str]:
    """What the policies warn of."""
    texts = [text for answer in answers for text in answer.warnings if "ValidatingAdmissionPolicy" in text]
    return {re.sub(r'".*', "", text.partition("binding")[2].partition(": ")[2]) for text in texts}


def test_with_the_values_of_a_strict_cluster_all_but_the_node_producer_meets_every_policy(policed: Cluster) -> None:
    manifests = chart(CHART / "ci" / "strict.yaml", release=policies.RELEASE)
    answers = {
        f"{manifest['kind']}/{manifest['metadata']['name']}": policed.apply(manifest, dry=True)
        for manifest in manifests
    }
    path = f"/api/v1/namespaces/{policies.RELEASE}/pods?dryRun=All&fieldValidation=Strict"
    answers |= {name: policed.ask("POST", path, pod) for name, pod in pods_of(manifests).items()}
    refused = {
        name: (answer.body.get("message"), answer.warnings)
        for name, answer in answers.items()
        if answer.status not in {200, 201} or answer.warnings
    }
    assert refused == {}
    several = {
        manifest["metadata"]["name"] for manifest in manifests if manifest.get("spec", {}).get("replicas", 1) > 1
    }
    assert several == set(names(manifests, "PodDisruptionBudget"))


# What every pod of every rendering is held to


def rights(manifest: Manifest) -> set[str]:
    """The rights of a pod that pods should not have, and the restrictions that it lacks."""
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    of_pod, of_container = pod["securityContext"], container["securityContext"]
    resources = {(kind, name) for kind in ("requests", "limits") for name in container["resources"].get(kind, {})}
    probes = {"startupProbe", "livenessProbe", "readinessProbe"} - container.keys()
    expected = {
        "root": of_pod.get("runAsNonRoot") is not True or of_pod.get("runAsUser") == 0,
        "no seccomp profile": of_pod.get("seccompProfile") != {"type": "RuntimeDefault"},
        "writable root": of_container.get("readOnlyRootFilesystem") is not True,
        "privileged": of_container.get("privileged") is True,
        "privilege escalation": of_container.get("allowPrivilegeEscalation") is not False,
        "capabilities": of_container.get("capabilities") != {"drop": ["ALL"]},
        "token": pod.get("automountServiceAccountToken") is not False,
        "variables of services": pod.get("enableServiceLinks") is not False,
        "unlimited": not {(kind, name) for kind in ("requests", "limits") for name in ("cpu", "memory")} <= resources,
        "no probes": bool(probes) and manifest["kind"] != "Job",
        "no time to stop": pod.get("terminationGracePeriodSeconds", 0) < 15,
        "hostPath": any("hostPath" in volume for volume in pod["volumes"]),
        **{key: value for key, value in pod.items() if key in {"hostPID", "hostIPC", "hostNetwork"}},
    }
    return {name for name, true in expected.items() if true}


NODE = {"root", "hostPID", "hostPath"}
OF_THE_TRY = {"kafka": {"writable root"}, "prometheus": {"no probes", "no time to stop"}}  # which are not ours
CUSTOM_METRICS = {"metrics-api": {"token"}}
GKE = {"node": NODE | {"privileged", "privilege escalation", "capabilities"}}
MORE_COMPONENTS = {
    "try": OF_THE_TRY,
    "base with every component": CUSTOM_METRICS | GKE | {"reclaim": {"token"}},
    "base with strimzi": {"reclaim": {"token"}},
    "base on GKE": GKE,
    "chart gke": GKE,
    "chart production": CUSTOM_METRICS,
    "chart strict": {"reclaim": {"token"}},
}
"""What a pod of one rendering may and of others not, and why: the node producer is said to need it by its manifest."""

OPTIONS = set(re.findall(r"`(GPUSTREAM_[A-Z_]+)`", (K8S.parent / "docs" / "reference" / "options.md").read_text()))


@pytest.mark.parametrize("name", [*OVERLAYS, *(f"chart {site}" for site in SITES)])
def test_no_pod_may_or_lacks_anything_and_every_variable_is_an_options(overlay: Render, name: str) -> None:
    site = name.removeprefix("chart ")
    manifests = overlay(OVERLAYS[name]) if name in OVERLAYS else chart(CHART / "ci" / f"{site}.yaml")
    maps = {"webhook": WEBHOOK} | config_maps_in(manifests)
    present, unknown = {}, set()
    for manifest in (candidate for candidate in manifests if "template" in candidate.get("spec", {})):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        present[container["name"]] = rights(manifest)
        unknown |= {name for name in environment(container, maps) if name.startswith("GPUSTREAM_")} - OPTIONS

    allowed = {"node": NODE, "cluster": {"token"}} | MORE_COMPONENTS.get(name, {})
    assert present == {component: allowed.get(component, set()) for component in present}
    assert unknown == set()


# The Helm chart


def find_helm() -> Path:
    """Helm itself, where ``make real-servers`` put it, or on PATH; raises :class:`Missing`."""
    path = shutil.which("helm", path=f"{real_dir() / HELM}{os.pathsep}{os.environ.get('PATH', '')}")
    if not path:
        raise Missing(f"no {HELM} in {real_dir()} and none on PATH: make real-servers")
    return Path(path)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart."""
    need(find_helm)
    command: list[str | Path] = [find_helm(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=BRIEFLY)


def chart(values: Path, release: str = "gpustream", source: Path = CHART) -> list[Manifest]:
    """The objects that Helm renders from the chart, or from a copy of it, with a file of values."""
    ran = helm("template", release, source, "--namespace", "gpustream", "--values", values)
    assert ran.returncode == 0, ran.stderr
    return [manifest for manifest in documents(ran.stdout) if manifest]


def test_with_the_values_of_the_page_about_kafka_a_component_has_a_user_of_its_own(tmp_path: Path) -> None:
    (values,) = blocks("how-to/kafka.md", "yaml", "A Kafka of another team")
    (tmp_path / "values.yaml").write_text(values.text)
    users = {}
    for pod in templates(chart(tmp_path / "values.yaml")):
        (container,) = pod["spec"]["containers"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        if user := variables.get("GPUSTREAM_KAFKA_USERNAME"):
            folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            file = variables["GPUSTREAM_KAFKA_PASSWORD_FILE"]
            (folder,) = [name for name, path in folders.items() if file == f"{path}/password"]
            (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == folder]
            users[user] = volume["secret"]["secretName"]
    assert users == {
        "gpustream-topics-create": "kafka-topics",
        "gpustream-stream-attribution": "kafka-attribution",
    }


def test_with_the_values_of_the_page_about_keda_the_metrics_api_has_the_pages_secrets_and_address(
    tmp_path: Path,
) -> None:
    (values,) = blocks("how-to/autoscaling/keda.md", "yaml")
    (commands,) = blocks("how-to/autoscaling/keda.md", "sh")
    (tmp_path / "values.yaml").write_text(f"options: {{kafka: kafka-0:9092}}\n{values.text}")
    manifests = chart(tmp_path / "values.yaml")
    (pod,) = [
        manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"].endswith("metrics-api")
    ]
    sources = [source for volume in pod["volumes"] for source in volume.get("projected", {}).get("sources", ())]
    made = re.findall(r"-n gpustream create secret \w+ (\S+)", commands.text)
    assert sorted(source["secret"]["name"] for source in sources) == sorted(made)
    page = (ROOT / "docs" / "how-to" / "autoscaling" / "keda.md").read_text()
    services = [name for name in names(manifests, "Service") if name.endswith("metrics-api")]
    assert re.findall(r"`(gpustream-metrics-api)\.gpustream\.svc`", page) == services


BACKGROUND = "propagationPolicy=Background"
HOOK = {"helm.sh/hook": "pre-install,pre-upgrade", "helm.sh/hook-delete-policy": "before-hook-creation"}


@pytest.mark.parametrize("site", SITES)
def test_the_chart_of_each_site_is_accepted_strictly_and_upgrades_to_another_image(
    cluster: Cluster, tmp_path: Path, site: str
) -> None:
    values = CHART / "ci" / f"{site}.yaml"
    checked = helm("lint", CHART, "--strict", "--values", values)
    assert checked.returncode == 0, checked.stdout
    newer = tmp_path / "newer.yaml"
    site_values = yaml.safe_load(values.read_text())
    newer.write_text(
        yaml.safe_dump(site_values | {"image": site_values.get("image", {}) | {"tag": "0.1.1", "digest": ""}})
    )
    refused = {}
    for version, file in (("installed", values), ("upgraded", newer)):
        for manifest in chart(file, release=site):
            if manifest["kind"] == "Job":  # which can't be changed: Helm deletes it before it makes the new one
                assert manifest["metadata"]["annotations"].items() >= HOOK.items()
                cluster.ask(
                    "DELETE", f"/apis/batch/v1/namespaces/gpustream/jobs/{manifest['metadata']['name']}?{BACKGROUND}"
                )
            answer = cluster.apply(manifest, dry=manifest["kind"] == "ClusterRoleBinding")
            if answer.status not in {200, 201} or answer.warnings:
                refused[f"{version} {manifest['kind']}/{manifest['metadata']['name']}"] = answer
    assert refused == {}


def test_a_version_with_a_commit_and_a_release_with_a_dot_are_accepted_too(cluster: Cluster, tmp_path: Path) -> None:
    """Flux makes the version 0.1.0+COMMIT of a chart in a Git repository."""
    copied = shutil.copytree(CHART, tmp_path / "gpustream")
    description = (copied / "Chart.yaml").read_text()
    (copied / "Chart.yaml").write_text(re.sub("(?m)(ersion: 0.1.0)$", r"\1+abcdef123456", description))
    values = values_of_a_site(tmp_path / "values.yaml", {"image": {"tag": "0.1.0"}})
    answers = [cluster.apply(manifest, dry=True) for manifest in chart(values, "team.ml", copied)]
    assert [answer for answer in answers if answer.status not in {200, 201} or answer.warnings] == []


@pytest.mark.parametrize("name", [*OVERLAYS, *(f"chart {site}" for site in SITES)])
def test_the_api_server_keeps_what_is_rendered_as_it_is(cluster: Cluster, overlay: Render, name: str) -> None:
    """Else each comparison with what is in Git finds a difference."""
    site = name.removeprefix("chart ")
    values = CHART / "ci" / f"{site}.yaml"
    for manifest in overlay(OVERLAYS[name]) if name in OVERLAYS else chart(values, release=f"kept-{site}"):
        kept = cluster.apply(manifest, dry=True).body
        if "namespace" not in kept["metadata"]:  # kustomize does not know that a DeviceClass is in none
            manifest["metadata"].pop("namespace", None)
        assert differing(manifest, kept) == [], f"{manifest['kind']}/{manifest['metadata']['name']}"


def differing(said: Any, kept: Any, path: str = "") -> list[str]:
    """Where an object lacks something of another one, or has something else; or what kind a part of it is, unsaid."""
    if isinstance(said, Mapping) and isinstance(kept, Mapping):
        kinds = dict.fromkeys(kept.keys() & {"kind"}, "(none)")
        return [
            found
            for key, value in {**kinds, **said}.items()
            for found in differing(value, kept.get(key, "(none)"), f"{path}.{key}")
        ]
    if isinstance(said, list) and isinstance(kept, list) and len(said) == len(kept):
        return [
            found
            for number, pair in enumerate(zip(said, kept, strict=True))
            for found in differing(*pair, f"{path}[{number}]")
        ]
    return [] if said == kept else [f"{path}: {said!r} is kept as {kept!r}"]


URL = "https://hooks.example.com/gpu-alerts"
SCALED = {"autoscaling": {"enabled": True}}
SAME = {
    "kafkaSecret": "kafka",
    "keda": {"enabled": True},
    "monitors": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "node": {"resourceQuota": True},
    "attribution": SCALED,
    "usage": {"enabled": True, **SCALED},
    "parquet": {"enabled": True, **SCALED},
    "alerts": {**SCALED, "rules": "# of yours\n"},
    "remoteWrite": {**SCALED, "secret": "remote-write"},
    "alertmanager": {"secret": "alertmanager"},
    "scrape": {"enabled": True},
    "page": {"enabled": True},
    "reclaim": {"enabled": True, "act": True},
    "metricsApi": {
        "enabled": True,
        "secret": "metrics-api",
        "tlsSecret": "metrics-api-tls",
        "aggregated": True,
        "certificate": {"enabled": True},
    },
    "webhook": {
        "enabled": True,
        **SCALED,
        "secret": "webhook",
        "options": {"url": URL, "secret-file": "/etc/gpustream/webhook/secret"},
    },
}
"""Values with which the chart is the base with these components, its rules and its webhook."""

TAKEN = [
    "usage",
    "parquet",
    "webhook",
    "scrape",
    "reclaim",
    "reclaim-act",
    "metrics-api",
    "metrics-api-aggregated",
    "page",
    "monitors",
    "network-policy",
    "keda",
    "kafka-security",
    "critical-node",
    *SCALED_TOO,
]
FILES = [
    {"name": "alert-rules", "files": ["rules.toml"]},
    {"name": "alerts", "behavior": "merge", "literals": ["GPUSTREAM_RULES=/etc/gpustream/alert-rules/rules.toml"]},
    {"name": "webhook", "literals": [f"GPUSTREAM_URL={URL}"]},
]


def test_the_chart_is_the_base_and_its_components(overlay: Render, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(SAME))
    based = comparable(overlay(with_components(*TAKEN) | {"configMapGenerator": FILES}))
    charted = comparable(chart(values))
    assert charted.keys() - based.keys() == {("Certificate", "metrics-api")}
    assert based.keys() - charted.keys() == {("Namespace", "")}
    assert {name: (charted[name], based[name]) for name in based if charted.get(name, based[name]) != based[name]} == {}


def comparable(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
    """What each object does, without names of a release or a hash, and with the environment as its process sees it.

    On purpose the chart takes no options from ConfigMaps, restarts pods for other rules by an annotation and not by a
    ConfigMap's name, wants the Secrets that it is given to be there, and makes the topics by a hook, which need not end
    by itself.
    """
    maps = {"webhook": WEBHOOK} | config_maps_in(manifests)
    comparable_objects = {}
    for manifest in (candidate for candidate in manifests if candidate["kind"] != "ConfigMap"):
        for pod in templates([manifest]):
            (container,) = pod["spec"]["containers"]
            container["env"] = environment(container, maps)
            container.pop("envFrom", None)
            pod["metadata"].pop("annotations", None)
            if manifest["kind"] == "Job":
                manifest["spec"].pop("ttlSecondsAfterFinished", None)
                del container["args"], container["env"]
        fields = {key: value for key, value in manifest.items() if key not in {"metadata", "apiVersion"}}
        comparable_objects[manifest["kind"], plain(manifest["metadata"]["name"])] = plain(fields)
    return comparable_objects


OF_A_RELEASE = {
    "app.kubernetes.io/instance",
    "optional",
    "imagePullPolicy",
    "GPUSTREAM_LEASE",
    "GPUSTREAM_CUSTOM_METRICS",
    "POD_NAMESPACE",
}


def plain(node: Any) -> Any:
    """A part of an object, without the fields that only name the release or the version of a ConfigMap."""
    if isinstance(node, Mapping):
        fields = {key: value for key, value in node.items() if key not in OF_A_RELEASE}
        return {
            key: plain(value) for key, value in fields.items() if (key, value) != ("automountServiceAccountToken", True)
        }
    if isinstance(node, list):
        return sorted((plain(value) for value in node), key=partial(json.dumps, sort_keys=True))
    if isinstance(node, str):
        return re.sub(r"^(alert-rules)-[a-z0-9]{10}$", "alerts-rules", node.removeprefix("gpustream-")).removeprefix(
            "gpustream"
        )
    return node


def test_the_chart_of_a_release_renders_as_the_folder_does(tmp_path: Path) -> None:
    subprocess.run([K8S.parent / ".ci" / "dist", tmp_path, "chart"], check=True)
    tree = subprocess.run(["git", "archive", "HEAD", "k8s"], cwd=K8S.parent, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], input=tree, cwd=tmp_path, check=True)
    (archive,), committed = tmp_path.glob("*.tgz"), tmp_path / "k8s" / "helm" / "gpustream"
    values = committed / "ci" / "production.yaml"
    packed, folder = (helm("template", "x", source, "--values", values) for source in (archive, committed))
    assert packed.returncode == 0, packed.stderr
    assert packed.stdout == folder.stdout


def test_a_value_or_an_option_that_there_is_not_is_refused() -> None:
    for bad_values in (
        "attribution.replica=3",
        "options.kafka-securty=ssl",
        "node.options.intervall=1s",
        "nodes.enabled=true",
    ):
        ran = helm("template", "gpustream", CHART, "--set", bad_values)
        assert ran.returncode != 0
        assert "additional properties" in ran.stderr


@pytest.mark.parametrize(
    "empty",
    ["image", "options", "defaults", "keda", "alerts", "node.enabled", "openshift", "image.repository",
     "node.kubeletDirectory", "cluster.serviceAccount", "attribution.autoscaling",
     "attribution.autoscaling.lagThreshold", "attribution.options", "defaults.autoscaling",
     "defaults.autoscaling.minReplicas", "strimzi.cluster", "page"],
)  # fmt: skip
def test_an_empty_value_that_the_chart_can_not_do_without_is_refused_by_its_name(empty: str) -> None:
    ran = helm("template", "gpustream", CHART, "--set", f"{empty}=null")
    assert ran.returncode != 0
    assert f"missing property '{empty.rpartition('.')[2]}'" in ran.stderr


def test_a_parent_chart_switches_it_on_and_off_by_the_usual_condition(tmp_path: Path) -> None:
    part = {"name": "gpustream", "version": "*", "condition": "gpustream.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [part]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    shutil.copytree(CHART, tmp_path / "charts" / "gpustream")
    for enabled in (True, False):
        values = values_of_a_site(tmp_path / "values.yaml", {"gpustream": {"enabled": enabled}})
        ran = helm("template", "p", tmp_path, "--values", values)
        assert ran.returncode == 0, ran.stderr
        assert bool(documents(ran.stdout)) is enabled
    alone = helm("template", "gpustream", CHART, "--set", "enabled=false")
    assert "at '/enabled': value must be true" in alone.stderr, "without a parent nothing looks at it"


def test_a_label_of_the_chart_that_the_site_sets_is_there_once_with_the_sites_value(tmp_path: Path) -> None:
    labels = {"helm.sh/chart": "ours", "app.kubernetes.io/managed-by": "argo", "app.kubernetes.io/version": "7"}
    values = values_of_a_site(tmp_path / "values.yaml", {"commonLabels": labels})
    manifests, text = chart(values), helm("template", "gpustream", CHART, "--values", values).stdout
    for manifest in manifests:
        assert manifest["metadata"]["labels"].items() >= labels.items()
    assert [text.count(name) for name in labels] == [len(manifests)] * len(labels)


@pytest.mark.parametrize(
    ("values", "nothing_is_scaled"),
    [
        ("keda.enabled=true", True),
        ("keda.enabled=true,webhook.autoscaling.enabled=true", True),
        ("keda.enabled=true,webhook.autoscaling.enabled=true,webhook.enabled=true", False),
        ("keda.enabled=true,alerts.autoscaling.enabled=true", False),
        ("keda.enabled=true,defaults.autoscaling.enabled=true", False),
    ],
)
def test_the_notes_say_if_keda_is_enabled_and_scales_nothing(values: str, nothing_is_scaled: bool) -> None:
    ran = helm("install", "gpustream", CHART, "--dry-run=client", "--set", values)
    assert ("nothing is scaled" in ran.stdout) == nothing_is_scaled, ran.stderr


@pytest.mark.parametrize(
    ("values", "said"), [("strimzi.users=true,strimzi.topics=true", True), ("openshift=true", False)]
)
def test_the_notes_say_if_the_pod_that_they_ask_may_not_read_every_topic(values: str, said: bool) -> None:
    ran = helm("install", "gpustream", CHART, "--dry-run=client", "--set", values)
    assert ("what `doctor` needs" in ran.stdout) == said, ran.stderr


def test_the_notes_name_brokers_that_are_a_list_as_the_option_takes_them() -> None:
    ran = helm("install", "gpustream", CHART, "--dry-run=client", "--set", "options.kafka={a:9092,b:9092}")
    assert "into the Kafka at a:9092,b:9092." in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("node.nodeSelector=null", "the GPUs of every node into the Kafka at kafka.kafka:9092."),
        ("node.nodeSelector=null,defaults.nodeSelector.a=b", 'the GPUs of every node with {"a":"b"} into'),
        ("node.enabled=false", "the GPUs of no node of this cluster into"),
        ("options.kafka=null", "into the Kafka of GPUSTREAM_KAFKA."),
        ("options.kafka=null,options.kafka-config=/etc/c", "into the Kafka of /etc/c."),
    ],
)
def test_the_notes_name_the_nodes_and_the_kafka_that_the_pods_have(values: str, said: str) -> None:
    ran = helm("install", "gpustream", CHART, "--dry-run=client", "--set", values)
    assert said in ran.stdout, ran.stderr


@pytest.mark.parametrize(("values", "said"), [("", True), (",attribution.enabled=false", False)])
def test_the_notes_miss_no_sink_where_only_producers_run(values: str, said: bool) -> None:
    ran = helm("install", "gpustream", CHART, "--dry-run=client", "--set", f"remoteWrite.enabled=false{values}")
    assert ("nothing brings the metrics" in ran.stdout) == said, ran.stderr


@pytest.mark.parametrize(("value", "folder"), [("dashboards", "grafana"), ("prometheusRule", "prometheus")])
def test_a_copy_of_the_chart_without_the_files_of_its_links_says_so(tmp_path: Path, value: str, folder: str) -> None:
    """Flux takes no links of a Git repository, and Git on Windows may not."""
    copied = shutil.copytree(CHART, tmp_path / "gpustream")
    shutil.rmtree(copied / "files" / folder)
    assert helm("template", "gpustream", copied).returncode == 0
    ran = helm("template", "gpustream", copied, "--set", f"{value}.enabled=true")
    assert ran.returncode != 0
    assert f"{value}.enabled: this copy of the chart has no files/{folder}" in ran.stderr


def test_every_account_of_the_chart_may_have_a_role_of_a_cloud(tmp_path: Path) -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::000000000000:role/gpustream"}
    account = {"enabled": True, "serviceAccount": {"annotations": annotations}}
    site = {"openshift": True, **dict.fromkeys(("node", "cluster", "reclaim"), account)}
    manifests = chart(
        values_of_a_site(tmp_path / "values.yaml", site | {"metricsApi": {**account, "aggregated": True}})
    )
    accounts = [manifest["metadata"] for manifest in manifests if manifest["kind"] == "ServiceAccount"]
    assert {account["name"]: account["annotations"] for account in accounts} == dict.fromkeys(
        ("gpustream-cluster", "gpustream-metrics-api", "gpustream-node", "gpustream-reclaim"), annotations
    )


def test_an_empty_list_or_map_of_values_is_none(tmp_path: Path) -> None:
    site: Manifest = {
        "commonLabels": None,
        "extraObjects": None,
        "defaults": {"extraArgs": None, "tolerations": None, "podLabels": None, "podSecurityContext": None},
        "node": {"nodeSelector": None, "tolerations": None, "podSecurityContext": None},
        "openshift": True,
        "cluster": {"serviceAccount": {"annotations": None}},
        "monitors": {"enabled": True, "labels": None},
        "prometheusRule": {"enabled": True, "labels": None},
        "dashboards": {"enabled": True, "labels": None},
    }
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", site))
    (node,) = templates([manifest for manifest in manifests if manifest["kind"] == "DaemonSet"])
    assert "nodeSelector" not in node["spec"]
    assert "tolerations" not in node["spec"]


def test_an_empty_value_takes_away_what_a_file_of_values_before_it_has(tmp_path: Path) -> None:
    kept: Manifest = {"attribution": {"resources": {"limits": {"memory": "2Gi"}}}}
    of_all: Manifest = {
        "options": {"topic-prefix": "gpus."},
        "commonLabels": {"team": "ml"},
        "defaults": {"podLabels": {"team": "ml"}},
        "attribution": {
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"operator": "Exists"}],
            "resources": {"limits": {"cpu": "2"}},
            "autoscaling": {"maxReplicas": 8},
            "options": {"grace": "20s", "compression": "none"},
        },
    }
    files = [
        values_of_a_site(tmp_path / f"{number}.yaml", site)
        for number, site in enumerate((kept, of_all, emptied(of_all)))
    ]
    without, layered = (
        helm("template", "gpustream", CHART, *(part for file in some for part in ("--values", file)))
        for some in (files[:1], files)
    )
    assert layered.returncode == 0, layered.stderr
    assert layered.stdout == without.stdout


def emptied(values: Manifest) -> Manifest:
    """The same values, each of them empty."""
    return {name: emptied(value) if isinstance(value, dict) else None for name, value in values.items()}


def test_a_label_that_yaml_takes_for_a_switch_or_a_number_is_a_text(tmp_path: Path) -> None:
    site: Manifest = {
        "commonLabels": {"gpu": True},
        "defaults": {
            "nodeSelector": {"gpu": True, "rack": 2000000},
            "podLabels": {"of": 7},
            "podAnnotations": {"a": 1.5},
        },
        "dashboards": {"enabled": True, "labels": {"grafana_dashboard": 1}, "annotations": {"b": False}},
    }
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", site))
    labels = [manifest["metadata"]["labels"] for manifest in manifests]
    selectors = [pod["spec"]["nodeSelector"] for pod in templates(manifests)]
    assert all(isinstance(value, str) for texts in (*labels, *selectors) for value in texts.values())
    assert {"gpu": "true", "rack": "2000000"} in selectors


@pytest.mark.parametrize("site", ["gke", "eks"])
def test_nodes_that_lack_nvidias_label_are_found_by_another(site: str) -> None:
    (node,) = templates(
        [manifest for manifest in chart(CHART / "ci" / f"{site}.yaml") if manifest["kind"] == "DaemonSet"]
    )
    assert "nvidia.com/gpu.present" not in node["spec"]["nodeSelector"]


def values_of_a_site(path: Path, values: Manifest) -> Path:
    """A file of values."""
    path.write_text(yaml.safe_dump(values))
    return path


def test_everything_that_a_site_says_is_in_its_pods(tmp_path: Path) -> None:
    digest = "sha256:" + "1" * 64
    site: Manifest = {
        "image": {"digest": digest, "pullSecrets": [{"name": "registry"}]},
        "options": {"kafka": "k:9092", "listen": "0.0.0.0:9555", "parts-by-pod": True},
        "commonLabels": {"team": "ml"},
        "commonAnnotations": {"owner": "ml", "helm.sh/hook-delete-policy": "hook-failed"},
        "kafkaSecret": "mine",
        "node": {"kubeletDirectory": "/var/lib/k0s/kubelet"},
        "scrape": {"enabled": True, "options": {"scrape-listen": "0.0.0.0:9999"}},
        "monitors": {"enabled": True, "honorLabels": False},
        "remoteWrite": {
            "options": {"header": ["A: b", "C: d"], "parts-by-pod": False},
            "secret": "tokens",
            "serviceAccountName": "writer",
            "resources": {"limits": {"cpu": "3"}},
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "high",
            "extraArgs": ["--grace=1s"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraEnvFrom": [{"secretRef": {"name": "more"}}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "podLabels": {"l": "1"},
            "podAnnotations": {"a": "2"},
            "extraPodSpec": {
                "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["kafka-0"]}],
                "topologySpreadConstraints": [],
            },
            "revisionHistoryLimit": 0,
        },
    }
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", site))
    assert {manifest["metadata"]["labels"]["team"] for manifest in manifests} == {"ml"}
    assert {manifest["metadata"]["annotations"]["owner"] for manifest in manifests} == {"ml"}
    (job,) = [manifest for manifest in manifests if manifest["kind"] == "Job"]
    assert job["metadata"]["annotations"].items() >= HOOK.items(), "what it is belongs to the chart"
    limits = {
        manifest["metadata"]["name"]: manifest["spec"].get("revisionHistoryLimit")
        for manifest in manifests
        if "template" in manifest.get("spec", {})
    }
    assert {name for name, limit in limits.items() if limit == 0} == {"gpustream-remote-write"}
    for pod in (template["spec"] for template in templates(manifests)):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["containers"][0]["image"] == f"gpustream@{digest}"
        assert {"name": "kafka", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod["volumes"]

    by_name = {pod["spec"]["containers"][0]["name"]: pod for pod in templates(manifests)}
    pod, values = by_name["remote-write"]["spec"], site["remoteWrite"]
    (container,) = pod["containers"]
    env = environment({"env": container["env"]}, {})
    assert (env["GPUSTREAM_HEADER"], env["GPUSTREAM_PARTS_BY_POD"], env["A"]) == ("A: b\nC: d", "false", "b")
    assert container["args"] == ["sink", "remote-write", "--grace=1s"]
    assert container["envFrom"] == values["extraEnvFrom"]
    assert container["resources"] == values["resources"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9555}]
    assert {name: pod[name] for name in pod.keys() & values.keys()} == {
        name: values[name]
        for name in ("serviceAccountName", "nodeSelector", "tolerations", "affinity", "priorityClassName")
    }
    assert {name: pod[name] for name in values["extraPodSpec"]} == values["extraPodSpec"]
    assert {"name": "v", "emptyDir": {}} in pod["volumes"]
    assert {"name": "credentials", "secret": {"secretName": "tokens", "defaultMode": 0o440}} in pod["volumes"]
    metadata = by_name["remote-write"]["metadata"]
    assert (metadata["labels"]["l"], metadata["annotations"]) == ("1", {"a": "2"})
    assert {"name": "gpus", "containerPort": 9999} in by_name["scrape"]["spec"]["containers"][0]["ports"]
    paths = {volume["hostPath"]["path"] for volume in by_name["node"]["spec"]["volumes"] if "hostPath" in volume}
    assert {str(Path(path).parent) for path in paths} == {"/var/lib/k0s/kubelet"}
    (monitor,) = [manifest for manifest in manifests if manifest["kind"] == "ServiceMonitor"]
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is False


def test_pods_of_alerts_restart_when_their_rules_change_and_no_others(tmp_path: Path) -> None:
    """They read the file at their start only."""
    by_rules = [
        {pod["spec"]["containers"][0]["name"]: pod for pod in templates(chart(values_of_a_site(tmp_path / "v", site)))}
        for site in ({"alerts": {"rules": "# one\n"}}, {"alerts": {"rules": "# two\n"}})
    ]
    one, two = by_rules
    assert {name for name in one if one[name] != two[name]} == {"alerts"}


def test_the_text_of_the_rules_is_in_their_file_to_its_last_byte(tmp_path: Path) -> None:
    for text in ("# one\n", "# two", 'a = "<b> & c"\n\n'):
        values = values_of_a_site(tmp_path / "values.yaml", {"alerts": {"rules": text}})
        (rules,) = config_maps_in(chart(values)).values()
        assert rules == {"rules.toml": text}


def test_a_variable_that_a_site_sets_itself_takes_the_place_of_the_charts(tmp_path: Path) -> None:
    """By default Helm 4 applies on the server's side, and that refuses a variable that is there twice."""
    secret = {"secretKeyRef": {"name": "receiver", "key": "url"}}
    site: Manifest = {
        "node": {"extraEnv": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]},
        "attribution": {"options": {"instance-id": "only"}},
        "remoteWrite": {"extraEnv": [{"name": "GPUSTREAM_URL", "valueFrom": secret}]},
    }
    variables = {
        pod["spec"]["containers"][0]["name"]: pod["spec"]["containers"][0]["env"]
        for pod in templates(chart(values_of_a_site(tmp_path / "values.yaml", site)))
    }
    for name, env in variables.items():
        assert len({variable["name"] for variable in env}) == len(env), name
    assert {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"} in variables["node"]
    assert {"name": "GPUSTREAM_INSTANCE_ID", "value": "only"} in variables["attribution"]
    assert {"name": "GPUSTREAM_URL", "valueFrom": secret} in variables["remote-write"]


@pytest.mark.parametrize(("lease", "namespaces"), [("fleet/leader", ["fleet"] * 2), ("off", [])])
def test_the_cluster_producer_may_keep_the_lease_that_its_option_names(
    tmp_path: Path, lease: str, namespaces: list[str]
) -> None:
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", {"cluster": {"options": {"lease": lease}}}))
    of_lease = [manifest for manifest in manifests if manifest["kind"] in {"Role", "RoleBinding"}]
    assert [manifest["metadata"]["namespace"] for manifest in of_lease] == namespaces
    named = [
        name for manifest in of_lease for rule in manifest.get("rules", ()) for name in rule.get("resourceNames", ())
    ]
    assert named == ["leader"] * (len(namespaces) // 2)
    subjects = [subject for manifest in of_lease for subject in manifest.get("subjects", ())]
    assert {subject["namespace"] for subject in subjects} <= {"gpustream"}


def test_a_list_and_a_large_number_are_what_the_options_take(tmp_path: Path) -> None:
    """KEDA reads the brokers from the pod, too, and needs commas."""
    site = {
        "options": {"kafka": ["a:9092", "b:9092"]},
        "cluster": {"options": {"pod-labels": ["app", "team"]}},
        "alertmanager": {"options": {"url": ["http://a", "http://b"]}},
        "remoteWrite": {"options": {"max-labels": 2_000_000, "header": ["A: b, c", "D: e"], "parts-by-pod": True}},
        "attribution": {"options": {"grace": 90.5}},
    }
    env_by_pod = {
        pod["spec"]["containers"][0]["name"]: environment({"env": pod["spec"]["containers"][0]["env"]}, {})
        for pod in templates(chart(values_of_a_site(tmp_path / "values.yaml", site)))
    }
    assert {env["GPUSTREAM_KAFKA"] for env in env_by_pod.values()} == {"a:9092,b:9092"}
    assert env_by_pod["cluster"]["GPUSTREAM_POD_LABELS"] == "app,team"
    assert env_by_pod["alertmanager"]["GPUSTREAM_URL"] == "http://a\nhttp://b"
    writes = env_by_pod["remote-write"]
    assert (writes["GPUSTREAM_MAX_LABELS"], writes["GPUSTREAM_PARTS_BY_POD"]) == ("2000000", "true")
    assert (writes["GPUSTREAM_HEADER"], env_by_pod["attribution"]["GPUSTREAM_GRACE"]) == ("A: b, c\nD: e", "90.5")


def test_a_name_or_an_amount_that_looks_like_a_number_is_still_a_text(tmp_path: Path) -> None:
    """A namespace may be called 1234, and a pod may have a whole core."""
    autoscaling = {"enabled": True, "targetCPU": "1"}
    switches = ("keda", "reclaim", "monitors", "networkPolicy", "metricsApi", "page", "prometheusRule", "dashboards")
    site = {switch: {"enabled": True} for switch in switches} | {"defaults": {"autoscaling": autoscaling}}
    values = values_of_a_site(tmp_path / "values.yaml", site)
    ran = helm("template", "2026", CHART, "--namespace", "1234", "--values", values)
    assert ran.returncode == 0, ran.stderr
    manifests = [manifest for manifest in documents(ran.stdout) if manifest]
    metadata = [manifest["metadata"] for manifest in manifests]
    triggers = [
        trigger["metadata"]
        for manifest in manifests
        if manifest["kind"] == "ScaledObject"
        for trigger in manifest["spec"]["triggers"]
    ]
    subjects = [subject for manifest in manifests for subject in manifest.get("subjects", ())]
    texts = [fields["namespace"] for fields in (*metadata, *subjects) if "namespace" in fields]
    texts += [text for fields in metadata for text in fields["labels"].values()]
    texts += [text for trigger in triggers for text in trigger.values()]
    assert {"1234", "2026", "1"} <= set(map(str, texts))
    assert {type(text) for text in texts} == {str}


def test_a_name_of_the_sites_that_looks_like_a_number_is_still_a_text(tmp_path: Path) -> None:
    site: Manifest = {
        "kafkaSecret": "1234",
        "keda": {"enabled": True, "authentication": "1234"},
        "monitors": {"enabled": True, "interval": "1234"},
        "strimzi": {"topics": True, "users": True, "cluster": "1234"},
        "defaults": {"autoscaling": {"enabled": True}, "secret": "1234", "serviceAccountName": "1234"},
        "node": {"priorityClassName": "1234", "runtimeClassName": "1234", "resourceQuota": True},
        "remoteWrite": {"options": {"group": 2_000_000}},
        "usage": {"enabled": True},
        "parquet": {"enabled": True, "storage": {"className": "1234"}},
        "metricsApi": {"enabled": True, "tlsSecret": "1234", "aggregated": True, "certificate": {"enabled": True}},
    }
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", site))
    assert "1234" in scalars(manifests)
    assert 1234 not in scalars(manifests)
    (scaled,) = [
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == ("ScaledObject", "gpustream-remote-write")
    ]
    assert scaled["spec"]["triggers"][0]["metadata"]["consumerGroup"] == "2000000"


def scalars(node: object) -> set[object]:
    """The texts, numbers and switches of an object, at any depth."""
    if isinstance(node, Mapping):
        return scalars(list(node.values()))
    if isinstance(node, list):
        return {scalar for part in node for scalar in scalars(part)}
    return {node}


def test_a_prefix_of_a_component_reaches_its_pods_its_trigger_and_its_rights(tmp_path: Path) -> None:
    values = {
        "options": {"topic-prefix": "prod."},
        "keda": {"enabled": True},
        "strimzi": {"topics": True, "users": True},
        "attribution": {"options": {"topic-prefix": "wide."}, **SCALED},
        "alerts": SCALED,
    }
    manifest_by_name = {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in chart(values_of_a_site(tmp_path / "v.yaml", values))
    }
    for name, prefix in (("attribution", "wide."), ("alerts", "prod.")):
        full = f"gpustream-{name}"
        trigger = manifest_by_name["ScaledObject", full]["spec"]["triggers"][0]["metadata"]
        rights = manifest_by_name["KafkaUser", full]["spec"]["authorization"]["acls"]
        (container,) = manifest_by_name["StatefulSet", full]["spec"]["template"]["spec"]["containers"]
        assert (trigger["consumerGroup"], trigger["topic"][: len(prefix)]) == (f"{prefix}gpustream-{name}", prefix)
        assert {rule["resource"]["name"].startswith(prefix) for rule in rights} == {True}
        assert {"name": "GPUSTREAM_TOPIC_PREFIX", "value": prefix} in container["env"]
    keda = manifest_by_name["KafkaUser", "gpustream-keda"]["spec"]["authorization"]["acls"]
    expected = {f"{prefix}{name}" for prefix in ("prod.", "wide.") for name in ("gpu.", "gpustream-")}
    assert {rule["resource"]["name"] for rule in keda} == expected


def test_only_options_that_take_several_values_take_a_list_and_the_chart_knows_which_are_lines() -> None:
    """For the others, a list would become one value, which the process refuses."""
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (lines,) = re.findall(r"has \$option \(list ([^)]*)\)", helpers)
    repeatable = set()
    for command_words in COMPONENTS_OF_THE_CHART.values():
        repeatable |= {
            option.opts[0].removeprefix("--")
            for option in command_of(command_words).params
            if isinstance(option, click.Option) and option.multiple
        }
    assert set(re.findall(r'"([^"]+)"', lines)) == repeatable
    ran = helm("template", "gpustream", CHART, "--set", "remoteWrite.options.url={http://a,http://b}")
    assert ran.returncode != 0
    assert "/remoteWrite/options/url" in ran.stderr


def test_the_alert_rules_of_the_files_of_values_are_rules(tmp_path: Path) -> None:
    texts = [
        yaml.safe_load((CHART / "ci" / f"{site}.yaml").read_text()).get("alerts", {}).get("rules") for site in SITES
    ]
    assert any(texts)
    for text in filter(None, texts):
        (tmp_path / "rules.toml").write_text(text)
        ran = CliRunner().invoke(main, ["rules", "check", str(tmp_path / "rules.toml")])
        assert ran.exit_code == 0, ran.output


def command_of(command_words: str) -> click.Command:
    """The command of a component."""
    command: click.Command = main
    for word in command_words.split():
        if isinstance(command, click.Group):
            below = command.get_command(click.Context(command), word)
            assert below is not None
            command = below
    return command


def test_a_network_policy_with_peers_lets_the_api_server_ask_the_metrics_api(tmp_path: Path) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    site = {"networkPolicy": {"enabled": True, "from": peers}, "metricsApi": {"enabled": True}}
    manifests = chart(values_of_a_site(tmp_path / "values.yaml", site))
    (policy,) = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    assert policy["spec"]["ingress"] == [
        {"ports": [{"port": "metrics"}, {"port": "gpus"}], "from": peers},
        {"ports": [{"port": "api"}]},
    ]


SWITCHES = {
    "monitors.enabled": {"PodMonitor"},
    "prometheusRule.enabled": {"PrometheusRule"},
    "dashboards.enabled": {"ConfigMap"},
    "networkPolicy.enabled": {"NetworkPolicy"},
    "defaults.autoscaling.enabled": {"HorizontalPodAutoscaler"},
    "defaults.autoscaling.enabled,keda.enabled": {"ScaledObject"},
    "strimzi.topics": {"KafkaTopic"},
    "strimzi.topics,strimzi.users": {"KafkaTopic", "KafkaUser"},
    "metricsApi.enabled,metricsApi.certificate.enabled": {"Certificate"},
    "metricsApi.enabled,metricsApi.aggregated": {"APIService"},
    "node.resourceQuota": {"ResourceQuota"},
}


@pytest.mark.parametrize(("switches", "kinds"), SWITCHES.items(), ids=list(SWITCHES))
def test_each_switch_brings_its_objects_and_no_other_kind(tmp_path: Path, switches: str, kinds: set[str]) -> None:
    values: Manifest = {}
    for switch in switches.split(","):
        *path, last = switch.split(".")
        part = values
        for word in path:
            part = part.setdefault(word, {})
        part[last] = True
    before = {manifest["kind"] for manifest in chart(values_of_a_site(tmp_path / "none.yaml", {}))}
    after = {manifest["kind"] for manifest in chart(values_of_a_site(tmp_path / "values.yaml", values))}
    assert after - before == kinds


@pytest.mark.parametrize(
    ("bad_value", "reason"),
    [
        ("strimzi.users=true", "strimzi.users needs strimzi.topics"),
        ("keda.enabled=true,options.kafka-security=ssl", "keda.enabled needs keda.authentication"),
        ("keda.enabled=true,options.kafka-config=client.properties", "keda.enabled needs keda.authentication"),
        ("keda.enabled=true,options.kafka=null", "keda.enabled needs options.kafka"),
        ("options.listen=127.0.0.1:9401", "must be 0.0.0.0:PORT"),
        ("node.resources.limit.cpu=1", "additional properties 'limit' not allowed"),
        ("image.digest=sha256:12", "does not match pattern"),
        ("remoteWrite.options.protocol=3", "value must be one of"),
        ("options.cluster=false", "at '/options/cluster': got boolean"),  # a YAML "no"
        ("cluster.options.lease=false", "at '/cluster/options/lease': got boolean"),  # a YAML "off"
        ("keda.pollingInterval=0", "at '/keda/pollingInterval': minimum"),
        ("node.kubeletDirectory=var/lib/kubelet", "at '/node/kubeletDirectory'"),
        (r"commonLabels.app\.kubernetes\.io/name=x", "commonLabels: app.kubernetes.io/name is set by the chart"),
        (r"node.podLabels.app\.kubernetes\.io/component=x", "podLabels of node: app.kubernetes.io/component is set by"),
        (
            "defaults.autoscaling.enabled=true,usage.enabled=true,usage.autoscaling.maxReplicas=1",
            "usage.autoscaling: min",
        ),
        ("node.extraEnv[0].name=A,node.extraEnv[0].value=1", "at '/node/extraEnv/0/value': got number"),
        ("node.tolerations[0].key=a,node.tolerations[0].value=true", "at '/node/tolerations/0/value': got boolean"),
        ("reclaim.namespaces[0]=", "at '/reclaim/namespaces/0': minLength"),
        ("defaults.extraPodSpec.tolerations=null", "additional properties 'tolerations' not allowed"),
    ],
)
def test_a_value_that_can_not_work_is_refused_with_the_reason(bad_value: str, reason: str) -> None:
    ran = helm("template", "gpustream", CHART, "--set", bad_value)
    assert ran.returncode != 0
    assert reason in ran.stderr
