"""The manifests of k8s/, held against the command, the Compose file and one another: no Kubernetes needed."""

import dataclasses
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from delivery import values
from gpustream.chart import COMPONENTS
from gpustream.comparison import is_ours
from gpustream.doctor.kubernetes import CLUSTER_RIGHTS, LEASE_RIGHTS
from gpustream.serve import STOP_WITHIN_S
from producers.cluster import owners
from producers.cluster.component import PATHS
from producers.cluster.config import default_lease
from sinks import SINKS
from sinks.metrics_api.cluster import AUTHENTICATION
from sinks.metrics_api.custom_metrics import GROUP, VERSIONS
from sinks.reclaim.cluster import PLURALS
from sinks.reclaim.decide import KUEUE, SCALED, SUSPENDED
from sinks.settings import AlertmanagerSettings
from streams import STREAMS
from tests.command_line import parsed
from tests.docs.page import blocks
from tests.k8s.dashboard import rules as prometheus_rules
from tests.k8s.manifests import (
    K8S,
    OBJECTS,
    OURS,
    README,
    WORKLOADS,
    Manifest,
    Object,
    config_maps,
    environment,
    kustomizations,
    merged,
    the,
)
from tests.test_compose import SERVICES
from topics.topic import PARTITIONS

ROOT = K8S.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

API_VERSIONS = {
    "v1": {"Namespace", "ResourceQuota", "Service", "ServiceAccount"},
    "apps/v1": {"DaemonSet", "Deployment", "StatefulSet"},
    "batch/v1": {"Job"},
    "apiregistration.k8s.io/v1": {"APIService"},
    "kafka.strimzi.io/v1": {"KafkaTopic", "KafkaUser"},
    "keda.sh/v1alpha1": {"ScaledObject", "TriggerAuthentication"},
    "monitoring.coreos.com/v1": {"PodMonitor", "PrometheusRule", "ServiceMonitor"},
    "networking.k8s.io/v1": {"NetworkPolicy"},
    "policy/v1": {"PodDisruptionBudget"},
    "resource.k8s.io/v1": {"DeviceClass", "ResourceClaimTemplate"},
    "rbac.authorization.k8s.io/v1": {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"},
}
KNOWN_VARIABLES = {
    "node": {"NODE_NAME": "spec.nodeName", "NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"},
    "cluster": {"POD_NAME": "metadata.name"},
}
"""Those that are no option's: what a producer takes its own name from, and what NVIDIA's container runtime reads."""

MOUNTED = ("_FILE", "_CERT", "_KEY")
"""The ends of variables that name a file, which a Secret brings."""

of_workloads = pytest.mark.parametrize("thing", WORKLOADS, ids=str)
of_ours = pytest.mark.parametrize("thing", OURS, ids=str)
SERVING = [thing for thing in OURS if thing.kind != "Job"]
of_serving = pytest.mark.parametrize("thing", SERVING, ids=str)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether the labels have all that the selector names."""
    return selector.items() <= labels.items()


def labels_of(thing: Object) -> dict[str, str]:
    """The labels of its pods."""
    labels: dict[str, str] = thing.pod["metadata"]["labels"]
    return labels


def selected_by(selector: Mapping[str, str]) -> list[Object]:
    """The workloads whose pods a selector selects."""
    return [thing for thing in WORKLOADS if selects(selector, labels_of(thing))]


def ports_of(thing: Object) -> dict[str, int]:
    """The container's ports by name."""
    return {port["name"]: port["containerPort"] for port in thing.container.get("ports", [])}


def probes_of(thing: Object) -> dict[str, Manifest]:
    """The container's probes by their names in the manifest."""
    return {name: probe for name, probe in thing.container.items() if name.endswith("Probe")}


def port_of(listen: str) -> int:
    """The port of an address that every interface listens on."""
    address = values.listen(listen)
    assert address is not None
    assert address.host == "0.0.0.0"  # noqa: S104 - the kubelet asks from outside the pod
    return address.port


# Files


@pytest.mark.parametrize(
    ("folder", "kustomization"), kustomizations().items(), ids=lambda value: getattr(value, "name", "")
)
def test_a_kustomization_names_every_file_beside_it_and_no_other(folder: Path, kustomization: Manifest) -> None:
    present = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert present == {name for name in kustomization.get("resources", []) if name.endswith(".yaml")}
    assert {file.name for file in folder.glob("*.env")} == {
        name for generator in kustomization.get("configMapGenerator", []) for name in generator.get("envs", [])
    }
    assert {file.name for file in folder.glob("*.json")} == {
        name for generator in kustomization.get("configMapGenerator", []) for name in generator.get("files", [])
    }
    below = [folder / name for name in kustomization.get("resources", []) if not name.endswith(".yaml")]
    assert [path for path in below if not (path / "kustomization.yaml").is_file()] == []


def test_everything_is_part_of_the_base_of_the_try_an_overlay_or_a_component() -> None:
    named = {
        (folder / name).resolve()
        for folder, kustomization in kustomizations().items()
        for name in kustomization.get("resources", [])
    }
    tops = {folder for folder in kustomizations() if folder not in named}
    parts = {top: top.relative_to(K8S).parts[0] for top in tops}
    assert set(parts.values()) == {"try", "overlays", "components"}
    assert {top for top, part in parts.items() if part == "try"} == {K8S / "try"}
    manifests = {file for part in ("base", *parts.values()) for file in (K8S / part).rglob("*.yaml")}
    assert {file.parent for file in manifests} <= kustomizations().keys()


def test_there_is_one_object_in_a_file_and_the_file_has_the_name_of_its_kind() -> None:
    ours = [thing for thing in OBJECTS if "written by" not in thing.path.read_text()]
    assert ours
    assert [str(thing) for thing in ours if thing.path.name != f"{thing.kind.lower()}.yaml"] == []
    objects = Counter(thing.path for thing in OBJECTS)
    assert [str(thing) for thing in ours if objects[thing.path] > 1] == []


def test_api_versions_are_those_that_are_served_today() -> None:
    assert [str(thing) for thing in OBJECTS if thing.kind not in API_VERSIONS[thing.content["apiVersion"]]] == []


def test_a_namespace_is_named_by_a_components_objects_which_would_else_be_in_any() -> None:
    namespace = kustomizations()[K8S / "base"]["namespace"]
    in_none = {"APIService", "Namespace", "ClusterRole", "ClusterRoleBinding", "DeviceClass"}
    for thing in OBJECTS:
        is_named = thing.kind not in in_none and str(thing).startswith("components/")
        assert thing.content["metadata"].get("namespace") == (namespace if is_named else None), str(thing)


def test_the_base_is_the_whole_pipeline_of_a_cluster() -> None:
    commands = {" ".join(thing.container["args"][:2]) for thing in OURS if "base" in str(thing)}
    assert commands == {
        "topics create",
        "produce node",
        "produce cluster",
        "stream attribution",
        "stream alerts",
        "sink remote-write",
        "sink alertmanager",
    }


# What the containers run


def test_every_stream_and_sink_is_run_in_a_cluster_by_a_manifest_and_by_the_chart() -> None:
    commands = {*(f"stream {name}" for name in STREAMS), *(f"sink {name}" for name in SINKS)}
    assert commands - {" ".join(thing.container["args"][:2]) for thing in SERVING} == set()
    assert commands - set(COMPONENTS.values()) == set()


@of_ours
@pytest.mark.parametrize("maps", [config_maps(), merged()], ids=["base", "try"])
def test_every_container_is_a_command_line_that_is_right(
    thing: Object, maps: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = environment(thing.container, maps)
    (tmp_path / "file").write_text("mounted")
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / "file") if name.endswith(MOUNTED) else value)
    with parsed(list(thing.container["args"])) as context:
        options = {param.envvar for param in context.command.params}
    parameters = KNOWN_VARIABLES.get(thing.name, {})
    assert {name: variables[name] for name in parameters} == parameters
    of_others = maps["gpustream"].keys() if thing.kind == "Job" else set()
    assert variables.keys() - parameters.keys() - of_others <= options


def test_the_topics_are_made_with_the_prefix_and_the_kafka_that_all_others_have() -> None:
    maps = config_maps()
    maps["gpustream"] |= {"GPUSTREAM_TOPIC_PREFIX": "team-a.", "GPUSTREAM_KAFKA_SECURITY": "ssl"}
    assert {thing.kind for thing in OURS} >= {"Job", "DaemonSet", "StatefulSet"}
    for thing in OURS:
        assert maps["gpustream"].items() <= environment(thing.container, maps).items(), thing


def test_the_command_line_of_the_try_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTREAM_KAFKA", merged()["gpustream"]["GPUSTREAM_KAFKA"])
    (patch,) = [patch for patch in kustomizations()[K8S / "try"]["patches"] if patch["target"].get("name") == "topics"]
    ((operation),) = yaml.safe_load(patch["patch"])
    with parsed(list(operation["value"])) as context:
        assert context.params["replication_factor"] == 1


@pytest.mark.parametrize("thing", [thing for thing in OURS if list(thing.path.parent.glob("*.env"))], ids=str)
def test_what_an_environment_file_shows_commented_out_is_an_option_too(
    thing: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for file in thing.path.parent.glob("*.env") for line in file.read_text().splitlines()]
    suggested = dict(line.removeprefix("# ").split("=", 1) for line in lines if line.startswith("# GPUSTREAM_"))
    for name, value in environment(thing.container, config_maps()).items():
        monkeypatch.setenv(name, value)
    options = {param.envvar for param in parsed(list(thing.container["args"])).command.params}
    assert suggested
    assert set(suggested) <= options
    mounts = [mount["mountPath"] for mount in thing.container["volumeMounts"]]
    assert {str(Path(value).parent) for name, value in suggested.items() if value.startswith("/")} <= set(mounts)


@of_ours
def test_all_of_gpustream_is_one_image_of_this_version(thing: Object) -> None:
    assert thing.container["image"] == f"gpustream:{VERSION}"
    assert "command" not in thing.container  # the image's entry point


@of_serving
def test_it_is_asked_where_it_listens(thing: Object) -> None:
    variables = environment(thing.container, config_maps())
    ports = {"metrics": port_of(variables["GPUSTREAM_LISTEN"])}
    if "GPUSTREAM_SCRAPE_LISTEN" in variables:
        ports["gpus"] = port_of(variables["GPUSTREAM_SCRAPE_LISTEN"])
    if "GPUSTREAM_METRICS_LISTEN" in variables:
        ports["api"] = port_of(variables["GPUSTREAM_METRICS_LISTEN"])
    if "GPUSTREAM_PAGE_LISTEN" in variables:
        ports["page"] = port_of(variables["GPUSTREAM_PAGE_LISTEN"])
    assert ports_of(thing) == ports
    probed = {name: (probe["httpGet"]["path"], probe["httpGet"]["port"]) for name, probe in probes_of(thing).items()}
    assert probed == {
        "startupProbe": ("/healthz", "metrics"),
        "livenessProbe": ("/healthz", "metrics"),
        "readinessProbe": ("/readyz", "metrics"),
    }


@of_ours
def test_it_has_the_time_that_a_stop_takes(thing: Object) -> None:
    assert thing.pod["spec"]["terminationGracePeriodSeconds"] >= STOP_WITHIN_S + 3


@pytest.mark.parametrize(
    "name",
    ["attribution", "alerts", "remote-write", "alertmanager", "webhook", "usage", "parquet", "scrape", "reclaim"],
)
def test_the_members_of_a_group_have_names_that_last(name: str) -> None:
    member = the("StatefulSet", name)
    assert environment(member.container, config_maps())["GPUSTREAM_INSTANCE_ID"] == "metadata.name"


# How the parts fit


@pytest.mark.parametrize("thing", [thing for thing in WORKLOADS if thing.kind != "Job"], ids=str)
def test_a_workload_selects_its_own_pods_and_no_others(thing: Object) -> None:
    selector = thing.content["spec"]["selector"]["matchLabels"]
    assert selected_by(selector) == [thing]
    spread = thing.pod["spec"].get("topologySpreadConstraints", [])
    assert [constraint["labelSelector"]["matchLabels"] for constraint in spread] == [selector] * len(spread)


@pytest.mark.parametrize("thing", [thing for thing in OBJECTS if thing.kind == "PodDisruptionBudget"], ids=str)
def test_a_disruption_budget_is_for_one_workload_of_several_pods_and_lets_nodes_be_drained(thing: Object) -> None:
    (workload,) = selected_by(thing.content["spec"]["selector"]["matchLabels"])
    assert workload.content["spec"]["replicas"] > 1
    assert thing.content["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("thing", [thing for thing in OBJECTS if thing.kind == "Service"], ids=str)
def test_a_service_has_ports_of_one_workload(thing: Object) -> None:
    (workload,) = selected_by(thing.content["spec"]["selector"])
    ports = {port["targetPort"]: port["port"] for port in thing.content["spec"]["ports"]}
    assert ports == {name: 443 if name == "api" else port for name, port in ports_of(workload).items()}


def test_a_service_says_what_its_ports_speak_so_that_a_mesh_need_not_guess() -> None:
    services = [thing for thing in OBJECTS if thing.kind == "Service" and not str(thing).startswith("try/")]
    ports = [port for thing in services for port in thing.content["spec"]["ports"]]
    protocols = {"metrics": "http", "gpus": "http", "page": "http", "api": "https"}
    assert {port["name"]: port["appProtocol"] for port in ports} == protocols


@pytest.mark.parametrize("thing", [thing for thing in WORKLOADS if thing.kind == "StatefulSet"], ids=str)
def test_a_stateful_set_is_governed_by_a_headless_service_beside_it(thing: Object) -> None:
    service = the("Service", thing.content["spec"]["serviceName"])
    assert service.path.parent == thing.path.parent
    assert service.content["spec"]["clusterIP"] == "None"
    assert selected_by(service.content["spec"]["selector"]) == [thing]


@pytest.mark.parametrize("thing", [thing for thing in OBJECTS if thing.kind == "ScaledObject"], ids=str)
def test_what_is_scaled_is_scaled_on_the_lag_of_its_own_group_up_to_the_partitions(thing: Object) -> None:
    spec = thing.content["spec"]
    scaled = the(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    (lag,) = [trigger["metadata"] for trigger in spec["triggers"] if trigger["type"] == "kafka"]
    folder, name = scaled.container["args"]
    registered = {"stream": STREAMS, "sink": SINKS}[folder][name]
    group = next(
        field.default for field in dataclasses.fields(resolve_name(registered.settings)) if field.name == "group"
    )
    assert lag["consumerGroup"] == group
    assert lag["topic"] == registered.reads[0]
    assert lag["bootstrapServersFromEnv"] in environment(scaled.container, config_maps())
    assert spec["maxReplicaCount"] == (1 if thing.name == "parquet" else PARTITIONS)
    always = thing.name not in {"webhook", "parquet"}
    assert spec["minReplicaCount"] == (scaled.content["spec"]["replicas"] if always else 0)
    assert {trigger["type"] for trigger in spec["triggers"]} == {"kafka"} | ({"cpu"} if always else set())


def test_the_monitors_scrape_every_port_of_every_pod_of_ours() -> None:
    pods, gpus = the("PodMonitor", "gpustream").content["spec"], the("ServiceMonitor", "gpus").content["spec"]
    assert selected_by(pods["selector"]["matchLabels"]) == OURS
    (scraped,) = [
        thing
        for thing in OBJECTS
        if thing.kind == "Service" and selects(gpus["selector"]["matchLabels"], thing.content["metadata"]["labels"])
    ]
    scraped_ports = {endpoint["port"] for endpoint in (*pods["podMetricsEndpoints"], *gpus["endpoints"])}
    assert scraped_ports == {name for thing in OURS for name in ports_of(thing)} - {
        "api",
        "page",
    }  # they have no metrics of Prometheus
    assert {endpoint["port"] for endpoint in gpus["endpoints"]} <= {
        port["name"] for port in scraped.content["spec"]["ports"]
    }


def test_flux_leaves_what_looks_like_its_variables_as_it_is() -> None:
    """Of a Kustomization with `postBuild` it replaces them, and empties those that it does not know."""
    folders = {
        file.parent
        for folder in kustomizations()
        for file in folder.iterdir()
        if "${" in (file.read_text() if file.is_file() else "")
    }
    assert folders == {K8S / "components" / "dashboards"}
    options = kustomizations()[K8S / "components" / "dashboards"]["generatorOptions"]
    assert options["annotations"] == {"kustomize.toolkit.fluxcd.io/substitute": "disabled"}


def test_the_alert_that_one_of_ours_is_down_looks_at_the_job_that_the_monitor_gives_it() -> None:
    (down,) = [rule["expr"] for rule in prometheus_rules() if rule.get("alert") == "GpustreamDown"]
    (jobs,) = re.findall('up{job=~"(.*)"} == 0', down)
    (endpoint,) = the("PodMonitor", "gpustream").content["spec"]["podMetricsEndpoints"]
    (job,) = [rule for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
    assert all(re.fullmatch(jobs, job.get("replacement", "$1").replace("$1", thing.name)) for thing in OURS)


def test_compare_takes_what_is_scraped_as_the_monitor_and_the_pages_say_for_ours() -> None:
    (endpoint,) = the("ServiceMonitor", "gpus").content["spec"]["endpoints"]
    (job,) = [rule["replacement"] for rule in endpoint["relabelings"] if rule["targetLabel"] == "job"]
    pages = [
        config["job_name"]
        for page in ("prometheus", "workstation", "opencost")
        for block in blocks(f"how-to/{page}.md", "yaml", indented=True)
        for config in (yaml.safe_load(textwrap.dedent(block.text)) or {}).get("scrape_configs", ())
        if config["job_name"] != "opencost"
    ]
    assert len(pages) == 3
    assert all(is_ours({"__name__": "DCGM_FI_DEV_GPU_UTIL", "job": name}) for name in (job, *pages))


def test_the_kafka_of_the_try_is_that_of_the_compose_file_but_for_where_it_listens() -> None:
    kafka = the("StatefulSet", "kafka").container
    assert kafka["image"] == SERVICES["kafka"]["image"]
    kubernetes, compose = environment(kafka, {}), {k: str(v) for k, v in SERVICES["kafka"]["environment"].items()}
    differ = {name for name in kubernetes.keys() | compose.keys() if kubernetes.get(name) != compose.get(name)}
    assert {name for name in differ if "LISTENER" not in name} == {"KAFKA_HEAP_OPTS"}
    assert merged()["gpustream"]["GPUSTREAM_KAFKA"] in kubernetes["KAFKA_ADVERTISED_LISTENERS"]


def test_the_prometheus_of_the_try_is_that_of_the_compose_file_and_takes_what_is_written() -> None:
    prometheus = the("Deployment", "prometheus").container
    assert prometheus["image"] == SERVICES["prometheus"]["image"]
    assert "--web.enable-remote-write-receiver" in prometheus["args"]
    assert merged()["remote-write"]["GPUSTREAM_URL"] == "http://prometheus:9090/api/v1/write"


# What the pods may


@of_workloads
def test_no_pod_has_more_rights_than_it_needs(thing: Object) -> None:
    pod, container = thing.pod["spec"], thing.container["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] == (thing.name != "node")
    assert (pod["securityContext"]["runAsUser"] > 0) == (thing.name != "node")
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert container["allowPrivilegeEscalation"] is False
    assert container.get("readOnlyRootFilesystem", False) == (thing.name != "kafka")
    assert container.keys() <= {"capabilities", "allowPrivilegeEscalation", "readOnlyRootFilesystem"}


@of_workloads
def test_only_the_node_producer_sees_anything_of_its_node(thing: Object) -> None:
    pod = thing.pod["spec"]
    host = {key: value for key, value in pod.items() if key.startswith("host")}
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    if thing.name == "node":
        assert (host, paths) == ({"hostPID": True}, ["/var/lib/kubelet/pod-resources", "/var/lib/kubelet/pods-api"])
    else:
        assert (host, paths) == ({}, [])


def test_the_kubelets_folders_are_mounted_where_its_sockets_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSTREAM_KAFKA", "kafka:9092")
    node = the("DaemonSet", "node")
    mounts = {mount["name"]: mount for mount in node.container["volumeMounts"]}
    with parsed(list(node.container["args"])) as context:
        for volume, option in (("pod-resources", "pod_resources_socket"), ("pods-api", "pods_api_socket")):
            assert str(context.params[option].parent) == mounts[volume]["mountPath"]
            assert mounts[volume]["readOnly"] is True


def test_where_a_variable_gives_nobody_gpus_the_component_and_the_values_of_eks_mount_them() -> None:
    (patch,) = kustomizations()[K8S / "components" / "nvidia-volume-mount"]["patches"]
    mount, volume = (operation["value"] for operation in yaml.safe_load(patch["patch"]))
    eks = yaml.safe_load((K8S / "helm" / "gpustream" / "ci" / "eks.yaml").read_text())
    assert (eks["node"]["extraVolumeMounts"], eks["node"]["extraVolumes"]) == ([mount], [volume])
    assert (volume["hostPath"]["path"], mount["mountPath"]) == ("/dev/null", "/var/run/nvidia-container-devices/all")
    assert eks["selinux"], "Bottlerocket enforces it"


@of_workloads
def test_only_who_asks_the_api_server_has_a_token_and_nobody_has_variables_of_services(thing: Object) -> None:
    asks = thing.name in {"cluster", "reclaim"}
    assert thing.pod["spec"].get("automountServiceAccountToken", True) == asks
    assert thing.pod["spec"].get("serviceAccountName") == (thing.name if asks else None)
    assert thing.pod["spec"]["enableServiceLinks"] is False


@of_workloads
def test_every_container_says_what_it_needs_and_at_most_takes(thing: Object) -> None:
    resources = thing.container["resources"]
    assert {kind: set(amounts) for kind, amounts in resources.items()} == {
        "requests": {"cpu", "memory"},
        "limits": {"cpu", "memory"},
    }
    assert not any("nvidia.com" in str(amounts) for amounts in resources.values())


@of_workloads
def test_every_mount_is_of_a_volume_and_every_volume_is_mounted(thing: Object) -> None:
    volumes = {volume["name"] for volume in thing.pod["spec"].get("volumes", [])}
    claimed = {claim["metadata"]["name"] for claim in thing.content["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in thing.container["volumeMounts"]} == volumes | claimed


def test_the_credentials_of_remote_write_are_where_the_environment_file_says() -> None:
    sink = the("StatefulSet", "remote-write")
    (mount,) = [mount for mount in sink.container["volumeMounts"] if mount["name"] == "credentials"]
    (volume,) = [volume for volume in sink.pod["spec"]["volumes"] if volume["name"] == "credentials"]
    assert volume["secret"]["optional"] is True
    assert sink.pod["spec"]["securityContext"]["fsGroup"] == sink.pod["spec"]["securityContext"]["runAsGroup"]
    text = (K8S / "base" / "remote-write" / "remote-write.env").read_text()
    assert f"_FILE={mount['mountPath']}/" in text


def rules(*names: str) -> set[tuple[str, str, str, str]]:
    """The rules of roles, one by one: group, resource, verb, and the only object that may be meant."""
    return {
        (group, resource, verb, only)
        for thing in OBJECTS
        if thing.kind in {"ClusterRole", "Role"} and thing.name in names
        for rule in thing.content["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for only in rule.get("resourceNames", [""])
    }


def test_the_cluster_producer_reads_and_writes_nothing_but_its_lease() -> None:
    everything = rules("gpustream-cluster", "gpustream-cluster-custom-owners", "cluster")
    lease = {rule for rule in everything if rule[0] == "coordination.k8s.io"}
    assert lease == {
        ("coordination.k8s.io", "leases", "create", ""),
        ("coordination.k8s.io", "leases", "get", "gpustream-cluster"),
        ("coordination.k8s.io", "leases", "update", "gpustream-cluster"),
    }
    assert {verb for _, _, verb, _ in everything - lease} == {"get", "list", "watch"}
    assert not any("*" in part or part == "secrets" for rule in everything for part in rule)


def test_the_rules_are_for_what_the_cluster_producer_asks() -> None:
    watched = {group_and_resource(path) for path in PATHS.values()}
    assert rules("gpustream-cluster") == {
        (*resource, verb, "") for resource in watched for verb in ("list", "watch")
    } | {
        (api_version.rpartition("/")[0], resource.plural, "get", "")
        for (api_version, kind), resource in owners._BUILT_IN.items()
        if kind not in ABOVE_FEW
    }
    lease = default_lease().rpartition("/")[2]
    assert {only for *_, only in rules("cluster") if only} == {lease}


def test_the_doctor_asks_for_each_right_of_the_cluster_producer() -> None:
    assert {(*right, "") for right in CLUSTER_RIGHTS} == rules("gpustream-cluster")
    assert set(LEASE_RIGHTS) == {tuple(right) for *right, _ in rules("cluster")}


ABOVE_FEW = {"Pod"}
"""An owner that only stands between others, such as a LeaderWorkerSet's workers: in the component."""


@pytest.mark.parametrize(
    "chain",
    [
        "apps/replicasets apps/deployments serving.knative.dev/revisions serving.knative.dev/configurations"
        " serving.knative.dev/services serving.kserve.io/inferenceservices",
        "apps/statefulsets kubeflow.org/notebooks",
        "/replicationcontrollers apps.openshift.io/deploymentconfigs",
        "/pods sparkoperator.k8s.io/sparkapplications sparkoperator.k8s.io/scheduledsparkapplications",
        "apps/statefulsets /pods leaderworkerset.x-k8s.io/leaderworkersets",
        "batch/jobs jobset.x-k8s.io/jobsets trainer.kubeflow.org/trainjobs",
        "ray.io/rayclusters ray.io/rayjobs workload.codeflare.dev/appwrappers kueue.x-k8s.io/workloads",
    ],
)
def test_with_the_component_chains_of_common_controllers_are_read_to_their_tops(chain: str) -> None:
    allowed = {rule[:3] for rule in rules("gpustream-cluster", "gpustream-cluster-custom-owners")}
    links = [tuple(link.split("/")) for link in chain.split(" ")]

    assert {(*link, "get") for link in links} <= allowed
    assert len(links) <= owners.DEEPEST


def group_and_resource(path: str) -> tuple[str, str]:
    """What ``/api/v1/pods`` and ``/apis/apps/v1/deployments`` are to a role."""
    *_, group, _, resource = path.removeprefix("/apis").replace("/api/", "//").split("/")
    return group, resource


def test_the_network_policy_lets_in_who_scrapes_any_port_that_is_there_to_be_scraped() -> None:
    policy = the("NetworkPolicy", "gpustream").content["spec"]
    assert selected_by(policy["podSelector"]["matchLabels"]) == OURS
    ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert ports == {name for thing in OURS for name in ports_of(thing)} - {"page"}  # it asks nobody who one is


def test_with_the_component_the_cluster_producer_writes_events_and_nothing_else() -> None:
    assert rules("gpustream-cluster-policy-events") == {("", "events", "create", "")}


@pytest.mark.parametrize(
    "name",
    ["gpustream-cluster", "gpustream-cluster-custom-owners", "gpustream-cluster-policy-events", "cluster"],
)
def test_every_role_is_bound_to_the_cluster_producer(name: str) -> None:
    (thing,) = [
        thing for thing in OBJECTS if thing.kind.endswith("Binding") and thing.content["roleRef"]["name"] == name
    ]
    role = thing.content["roleRef"]
    assert the(role["kind"], role["name"]).path.parent == thing.path.parent
    (subject,) = thing.content["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": the("ServiceAccount", "cluster").name}  # kustomize says where


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table below a heading of the README, without their back ticks."""
    lines = README.split(f"\n## {heading}\n", 1)[1].split("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows[2:]]


def test_the_custom_metrics_are_those_of_the_service_and_their_deployment_may_ask_what_it_asks() -> None:
    things = [thing for thing in OBJECTS if thing.kind == "APIService"]
    services = [thing.content["spec"]["service"] for thing in things]
    service = the("Service", "metrics-api")
    (api,) = [port["port"] for port in service.content["spec"]["ports"] if port["name"] == "api"]
    patched = kustomizations()[K8S / "components" / "metrics-api-aggregated"]["patches"][0]["patch"]
    values = {operation["path"].rpartition("/")[2]: operation["value"] for operation in yaml.safe_load(patched)}
    namespace = service.content["metadata"]["namespace"]

    assert sorted(thing.content["spec"]["version"] for thing in things) == sorted(VERSIONS)
    assert {thing.content["spec"]["group"] for thing in things} == {GROUP}
    assert services == [{"namespace": namespace, "name": "metrics-api", "port": api}] * 2
    assert values["-"] == {"name": "GPUSTREAM_CUSTOM_METRICS", "value": f"$(POD_NAMESPACE)/{service.name}"}
    assert values["serviceAccountName"] == the("ServiceAccount", "metrics-api").name
    (binding,) = [
        binding
        for binding in OBJECTS
        if binding.kind == "ClusterRoleBinding" and binding.name == "gpustream-metrics-api"
    ]
    assert binding.content["subjects"] == [{"kind": "ServiceAccount", "name": "metrics-api", "namespace": namespace}]
    assert rules("gpustream-metrics-api") == {
        ("", "pods", "list", ""),
        ("apiregistration.k8s.io", "apiservices", "list", ""),
        ("", "configmaps", "get", AUTHENTICATION.rpartition("/")[2]),
    }


def test_the_reclaim_sink_reads_what_it_looks_at_and_changes_nothing_without_its_second_role() -> None:
    read, act = rules("gpustream-reclaim"), rules("gpustream-reclaim-act")
    looked_at = {(group, plural, "get", "") for (group, _), plural in PLURALS.items()}
    assert read == looked_at | {("", "namespaces", "get", ""), ("kueue.x-k8s.io", "workloads", "list", "")}
    changed = {(group, PLURALS[group, kind], "patch", "") for group, kind in (*SCALED, *SUSPENDED, (KUEUE, "Workload"))}
    assert act == changed | {("", "events", "create", ""), ("", "events", "get", "")}
    for name in ("gpustream-reclaim", "gpustream-reclaim-act"):
        (binding,) = [binding for binding in OBJECTS if binding.kind == "ClusterRoleBinding" and binding.name == name]
        assert binding.content["subjects"] == [{"kind": "ServiceAccount", "name": "reclaim", "namespace": "gpustream"}]


def test_the_alertmanager_sinks_user_may_read_the_group_of_each_of_several_alertmanagers() -> None:
    (addresses,) = [
        literal.removeprefix("GPUSTREAM_URL=").split()
        for generator in kustomizations()[K8S / "overlays" / "production"]["configMapGenerator"]
        if generator["name"] == "alertmanager"
        for literal in generator["literals"]
    ]
    settings = AlertmanagerSettings(kafka="kafka:9092", urls=tuple(addresses))
    of_user = the("KafkaUser", "gpustream-alertmanager").content["spec"]["authorization"]["acls"]
    of_chart = json.loads((K8S / "helm/gpustream/files/kafka.json").read_text())["acls"]["sink alertmanager"]
    for acls in ([acl["resource"] for acl in of_user], of_chart):
        (acl,) = [acl for acl in acls if acl["type"] == "group"]
        groups = {settings.group_of(url) for url in settings.urls}
        assert len(groups) == 2
        assert acl["patternType"] == "prefix"
        assert all(group.startswith(acl["name"]) for group in groups)


def test_the_readme_gives_a_reason_for_every_rule_and_for_no_other() -> None:
    reported = set()
    for group, resources, verbs, reason in table("What the cluster producer may do"):
        assert reason
        reported |= {
            ("" if group == "core" else group, resource, verb.split(" ")[0])
            for resource in resources.split(", ")
            for verb in verbs.split(", ")
        }
    assert reported == {rule[:3] for rule in rules("gpustream-cluster", "cluster")}


def test_the_readme_says_when_to_take_each_component() -> None:
    assert {row[0] for row in table("The components")} == {path.parent.name for path in K8S.glob("components/*/*.yaml")}


def test_every_variable_that_the_readme_names_is_an_options() -> None:
    options = (ROOT / "docs" / "reference" / "options.md").read_text()
    assert {name for name in re.findall(r"GPUSTREAM_[A-Z_]+", README) if f"`{name}`" not in options} == set()


def test_the_readme_says_what_every_file_is_for() -> None:
    reported = {row[0] for row in table("What each file is for")}
    assert reported == {str(thing) for thing in OBJECTS} | {
        str(file.relative_to(K8S)) for file in (*K8S.rglob("*.env"), *K8S.glob("components/*/kustomization.yaml"))
    }
