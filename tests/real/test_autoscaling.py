"""Autoscalers of a real Kubernetes on values that come through a real Kafka: the three ways of docs/how-to/autoscaling.

The objects are those of k8s/examples, as a user applies them, except for names and addresses.
"""

import asyncio
import base64
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from sinks import http_server
from tests.eventually import eventually
from tests.real.autoscaling import Inference, api_service, outside_service
from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.kubernetes import (
    ApiServer,
    ControllerManager,
    Json,
    find_etcd,
    find_kube_apiserver,
    find_kube_controller_manager,
)
from tests.real.pipeline import Gpustream
from tests.real.process import HeldPort, Server, listens
from tests.real.servers import (
    KafkaServer,
    PrometheusServer,
    find_openssl,
    find_prometheus,
    find_prometheus_adapter,
)

EXAMPLES = Path(__file__).parents[2] / "k8s" / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "autoscaling" / "custom-metrics.md"
AGGREGATED = EXAMPLES.parent / "components" / "metrics-api-aggregated"
SERVICE = "gpustream/metrics-api"
USED = "gpu_utilization_ratio"
ADAPTER = "monitoring/prometheus-adapter"
Make = Callable[..., Gpustream]


def example(path: str) -> list[Json]:
    """The objects of a file of the examples."""
    return [document for document in yaml.safe_load_all((EXAMPLES / path).read_text()) if document]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the controllers that scale; the tests here have namespaces of their own in it."""
    need(find_etcd, find_kube_apiserver, find_kube_controller_manager, find_openssl)
    with ExitStack() as servers:
        api = servers.enter_context(ApiServer(tmp_path_factory.mktemp("kubernetes")))
        servers.enter_context(ControllerManager(tmp_path_factory.mktemp("controllers"), api))
        api.namespace("gpustream")
        api.create(outside_service(SERVICE))
        yield api


@pytest.fixture
def port() -> Iterator[int]:
    """Where the metrics are served."""
    held_port = HeldPort()
    yield held_port.number
    held_port.release()


@pytest.fixture
def sink(gpustream: Make, empty_kafka: KafkaServer, cluster: ApiServer, authority: Authority, port: int) -> Make:
    """Makes the sink with TLS and further options; it has the rights of k8s/."""
    for name in ("clusterrole", "clusterrolebinding"):
        (manifest,) = yaml.safe_load_all((AGGREGATED / f"{name}.yaml").read_text())
        assert cluster.apply(manifest).status in {200, 201}
    config = cluster.kubeconfig(token=cluster.service_account("gpustream", "metrics-api"))

    def make(*options: str) -> Gpustream:
        empty_kafka.create_ours({"gpu.attributed": 2})
        name = "metrics-api.gpustream.svc"
        serving = authority.sign(name, f"DNS:{name}", "DNS:localhost")
        addresses = ("--kafka", empty_kafka.address, "--metrics-listen", f"127.0.0.1:{port}")
        tls = ("--serving-cert", str(serving.certificate), "--serving-key", str(serving.key))
        return gpustream(name, "sink", "metrics-api", *addresses, *tls, "--kubeconfig", str(config), *options)

    return make


@asynccontextmanager
async def registered(cluster: ApiServer, service: str, authority: Authority, port: int) -> AsyncIterator[None]:
    """Both versions of the group are a Service's while inside."""
    ca = base64.b64encode(authority.ca.read_bytes()).decode()
    services = [api_service(version, service, port, ca=ca) for version in ("v1beta1", "v1beta2")]
    for api_object in services:
        cluster.create(api_object)
    try:
        await eventually(lambda: all(map(available, made_of(cluster))), "the APIServices are available", every_s=0.2)
        yield
    finally:
        for api_object in services:
            cluster.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{api_object['metadata']['name']}")


def made_of(cluster: ApiServer) -> list[Json]:
    """The APIServices of the group."""
    items = cluster.get("/apis/apiregistration.k8s.io/v1/apiservices")["items"]
    return [item for item in items if item["spec"].get("group") == "custom.metrics.k8s.io"]


def available(service: Json) -> bool:
    """Whether the API server reaches the server of an APIService."""
    conditions = service.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Available" and condition["status"] == "True" for condition in conditions)


async def test_an_autoscaler_scales_a_deployment_up_and_down_on_streamed_values(
    cluster: ApiServer, sink: Make, empty_kafka: KafkaServer, authority: Authority, port: int
) -> None:
    process = sink("--custom-metrics", SERVICE)
    await asyncio.to_thread(process.start)
    infer = Inference(cluster, empty_kafka, "aggregated", "infer")
    async with registered(cluster, SERVICE, authority, port), infer:
        (hpa,) = example("custom-metrics/hpa.yaml")
        hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "100m"
        infer.load = 0.18
        infer.autoscale(hpa)
        await infer.scaled_to(6)
        infer.load = 0.02
        await infer.scaled_to(2)
        await eventually(lambda: current(infer) == {"averageValue": "20m"}, every_s=0.2)

        path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/aggregated"
        deployment = cluster.get(f"{path}/deployments.apps/infer/{USED}")
        assert [item["value"] for item in deployment["items"]] == ["20m"]
        older = cluster.get(f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/aggregated/metrics/{USED}")
        assert [item["value"] for item in older["items"]] == ["20m"]
        assert cluster.request("GET", f"{path}/pods/*/{USED}", user="one").status == 403
    assert "error" not in process.log_tail().lower()


def current(infer: Inference) -> Json:
    """The value that the autoscaler uses."""
    (metric,) = infer.status().get("currentMetrics") or [{}]
    current_values: Json = metric.get(metric.get("type", "").lower(), {}).get("current", {})
    return current_values


@pytest.mark.parametrize("option", ["--client-ca", "--client-names"])
async def test_what_the_apiservice_says_of_a_front_proxy_that_is_not_taken_is_on_the_page(
    cluster: ApiServer, sink: Make, authority: Authority, port: int, tmp_path: Path, option: str
) -> None:
    others = {"--client-ca": str(Authority(tmp_path / "other").ca), "--client-names": "somebody-else"}
    process = sink("--custom-metrics", SERVICE, option, others[option])
    await asyncio.to_thread(process.start)
    ca = base64.b64encode(authority.ca.read_bytes()).decode()
    service = api_service("v1beta2", SERVICE, port, ca=ca)
    cluster.create(service)
    try:
        said = await eventually(lambda: failed_discovery(cluster), "the API server has asked", every_s=0.2)
    finally:
        cluster.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{service['metadata']['name']}")
    (row,) = [line for line in PAGE.read_text().splitlines() if "front proxy is not of" in line]
    texts, codes = re.findall(r"`([^`.]+)(?:\.\.\.)?`", row), re.findall(r"\b\d{3}\b", row)
    assert said.endswith(tuple(codes)) or any(text in said for text in texts), row


def failed_discovery(cluster: ApiServer) -> str | None:
    """Why the API server got no answer from the server of the APIService; None if it has not asked yet."""
    conditions = [condition for made in made_of(cluster) for condition in made.get("status", {}).get("conditions", [])]
    messages = [condition["message"] for condition in conditions if condition["reason"] == "FailedDiscoveryCheck"]
    return messages[0] if messages else None


async def test_it_does_not_start_where_another_server_has_the_group(cluster: ApiServer, sink: Make) -> None:
    cluster.create(api_service("v1beta1", ADAPTER, 443, ca=""))
    try:
        process = sink("--custom-metrics", SERVICE)
        process.begin()
        await eventually(lambda: process.returncode is not None, every_s=0.1)
    finally:
        cluster.delete("/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.custom.metrics.k8s.io")

    assert process.returncode == 1
    assert f"belongs to the Service {ADAPTER} (APIService v1beta1.custom.metrics.k8s.io)" in process.log_tail()


class Keda:
    """KEDA's metrics-api scaler, as its source makes the request and reads the answer."""

    def __init__(self, trigger: Json, token: str, ca: Path, port: int) -> None:
        metadata = trigger["metadata"]
        self.path = metadata["url"].partition(".svc")[2]
        self.location = metadata["valueLocation"]
        self.headers = {"User-Agent": "Go-http-client/1.1", "Accept-Encoding": "gzip"}
        if metadata.get("authMode") == "bearer":
            self.headers["Authorization"] = f"Bearer {token}"
        self.url = f"https://localhost:{port}{self.path}"
        self.tls = ssl.create_default_context(cafile=str(ca))

    async def value(self) -> float:
        """The number at ``valueLocation``, whose dots lead downward; KeyError or an error of HTTP if there is none."""
        connector = aiohttp.TCPConnector(ssl=self.tls)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get(self.url, headers=self.headers, raise_for_status=True) as answer,
        ):
            answer_value = json.loads(await answer.read())
        for part in self.location.split("."):
            answer_value = answer_value[part]
        assert isinstance(answer_value, int | float)
        return answer_value


async def test_keda_reads_what_the_holders_of_a_workload_use_together(
    cluster: ApiServer, sink: Make, empty_kafka: KafkaServer, authority: Authority, port: int, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of-the-tests\n")
    process = sink("--client-token-file", str(tmp_path / "token"), "--client-ca", str(authority.ca))
    await asyncio.to_thread(process.start)
    (scaled,) = example("keda/scaledobject-metrics-api.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    keda = Keda(trigger, "of-the-tests", authority.ca, port)
    with pytest.raises(aiohttp.ClientResponseError, match="404"):
        await keda.value()
    async with Inference(cluster, empty_kafka, "ml", "infer") as infer:
        infer.load = 0.25
        await eventually(lambda: scaler_has(keda, 0.5), every_s=0.1)
    assert cluster.get("/apis/apps/v1/namespaces/ml/deployments/infer")["spec"]["replicas"] == 2

    with pytest.raises(aiohttp.ClientResponseError, match="401"):
        await Keda(trigger, "wrong", authority.ca, port).value()
    certificate = authority.sign("keda")
    keda.headers.pop("Authorization")
    keda.tls.load_cert_chain(certificate.certificate, certificate.key)
    assert await keda.value() == 0.5


async def scaler_has(keda: Keda, value: float) -> bool:
    """Whether KEDA gets that value."""
    with suppress(aiohttp.ClientResponseError):
        return await keda.value() == value
    return False


class Adapter(Server):
    """prometheus-adapter with the configuration of the example."""

    def __init__(self, directory: Path, api: ApiServer, prometheus: PrometheusServer, authority: Authority) -> None:
        super().__init__(directory)
        self.api, self.prometheus = api, prometheus
        self.serving = authority.sign("adapter", "DNS:prometheus-adapter.monitoring.svc")

    def command(self) -> Sequence[str]:
        """The adapter in the foreground; Prometheus is asked every second which metrics there are."""
        config = self.api.kubeconfig("admin")
        return [
            str(find_prometheus_adapter()),
            f"--secure-port={self.ports[0].number}",
            f"--tls-cert-file={self.serving.certificate}",
            f"--tls-private-key-file={self.serving.key}",
            f"--prometheus-url={self.prometheus.url}",
            f"--config={EXAMPLES / 'prometheus-adapter' / 'adapter.yaml'}",
            "--metrics-relist-interval=1s",
            "--metrics-max-age=1m",
            *(f"--{config_name}-kubeconfig={config}" for config_name in ("lister", "authentication", "authorization")),
        ]

    def ready(self) -> bool:
        """Whether it serves."""
        return listens(self.ports[0].number)


class Classical(PrometheusServer):
    """A Prometheus that scrapes the sink and the pods' labels, with the rule of the example, both every ``every_s``."""

    def __init__(self, directory: Path, targets: Sequence[str], namespace: str, *, every_s: int = 1) -> None:
        super().__init__(directory)
        self.targets, self.namespace, self.every_s = list(targets), namespace, every_s

    def prepare(self) -> None:
        """Writes the configuration."""
        (rules,) = example("prometheus-adapter/rules.yml")
        rules["groups"][0]["interval"] = f"{self.every_s}s"
        rules["groups"][0]["rules"][0]["labels"]["namespace"] = self.namespace
        (self.directory / "rules.yml").write_text(json.dumps(rules))
        jobs = [{"job_name": "gpus", "honor_labels": True, "static_configs": [{"targets": self.targets}]}]
        content = {
            "global": {"scrape_interval": f"{self.every_s}s", "scrape_timeout": "1s"},
            "rule_files": ["rules.yml"],
        }
        (self.directory / "prometheus.yml").write_text(json.dumps({**content, "scrape_configs": jobs}))


@asynccontextmanager
async def pod_labels(infer: Inference) -> AsyncIterator[str]:
    """Serves the pods' labels as kube-state-metrics does; yields the address to scrape."""

    async def metrics(_: web.Request) -> web.Response:
        labels = [f'namespace="{infer.namespace}",pod="{pod}",label_app="{infer.name}"' for pod in infer.pods]
        return web.Response(text="".join(f"kube_pod_labels{{{label_text}}} 1\n" for label_text in labels))

    async with http_server.listening([web.get("/metrics", metrics)], ("127.0.0.1", 0), option="--metrics-listen") as (
        host,
        port,
    ):
        yield f"{host}:{port}"


def of_keda(namespace: str, name: str) -> str:
    """The query of KEDA's prometheus scaler, which wants one number, of another Deployment."""
    (scaled,) = example("keda/scaledobject-prometheus.yaml")
    query: str = scaled["spec"]["triggers"][0]["metadata"]["query"]
    return query.replace('"ml"', f'"{namespace}"').replace('"infer"', f'"{name}"')


def own_uses(cluster: ApiServer, namespace: str) -> dict[str, str]:
    """What the adapter says of each pod."""
    path = f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/pods/*/dcgm_gpu_utilization"
    items = cluster.request("GET", path).body.get("items", [])
    return {item["describedObject"]["name"]: item["value"] for item in items}


async def test_through_prometheus_an_autoscaler_and_keda_see_what_pods_use_also_on_shared_gpus(
    cluster: ApiServer, gpustream: Make, empty_kafka: KafkaServer, authority: Authority, port: int, tmp_path: Path
) -> None:
    need(find_prometheus, find_prometheus_adapter)
    empty_kafka.create_ours({"gpu.attributed": 2, "gpu.dead-letters": 1})
    names = {"legacy": ("--names", "dcgm-legacy", "--labels", "dcgm", "--parts-by-pod"), "otel": ("--names", "otel")}
    held_port = HeldPort()
    ports = {"legacy": port, "otel": held_port.number}
    test = Inference(cluster, empty_kafka, "classical", "cuda-test")
    async with AsyncExitStack() as servers:
        servers.callback(held_port.release)
        for name, named in names.items():
            options = ("--kafka", empty_kafka.address, "--group", name, "--scrape-listen", f"127.0.0.1:{ports[name]}")
            await asyncio.to_thread(gpustream(name, "sink", "scrape", *options, *named).start)
        await servers.enter_async_context(test)
        test.load = 0.3
        labels = await servers.enter_async_context(pod_labels(test))
        targets = (*(f"127.0.0.1:{sink_port}" for sink_port in ports.values()), labels)
        prometheus = servers.enter_context(Classical(tmp_path / "prometheus", targets, "classical"))
        await eventually(lambda: prometheus.query("cuda_test_gpu_avg"), every_s=0.2)
        await eventually(
            lambda: [series.value for series in prometheus.query(of_keda("classical", "cuda-test"))] == [0.6]
        )
        adapter = servers.enter_context(Adapter(tmp_path / "adapter", cluster, prometheus, authority))
        cluster.namespace("monitoring")
        cluster.create(outside_service(ADAPTER))
        cluster.create(outside_service("classical/cuda-test"))
        await servers.enter_async_context(registered(cluster, ADAPTER, authority, adapter.ports[0].number))
        await eventually(
            lambda: own_uses(cluster, "classical") == dict.fromkeys(test.pods, "30"), "each pod's own use", every_s=0.2
        )
        (hpa,) = example("prometheus-adapter/hpa.yaml")
        hpa["spec"]["metrics"][0]["object"]["target"]["value"] = "15"
        test.autoscale(hpa)
        await test.scaled_to(6)
        six_pods = [pytest.approx(6 * 0.3)]  # three of them share a GPU
        await eventually(
            lambda: [series.value for series in prometheus.query(of_keda("classical", "cuda-test"))] == six_pods
        )
        test.load = 0.03
        await test.scaled_to(2)
        await eventually(lambda: current(test) == {"value": "3"}, every_s=0.2)
