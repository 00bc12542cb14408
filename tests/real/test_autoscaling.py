"""Autoscalers of a real Kubernetes on values that come through a real Kafka: the three ways of docs/autoscaling.md.

The objects are those of k8s/examples, as a user applies them, but for names and addresses.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

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
from tests.real.process import HeldPort
from tests.real.servers import KafkaServer, find_openssl

EXAMPLES = Path(__file__).parents[2] / "k8s" / "examples"
SERVICE = "gpustream/gpustream-metrics-api"
USED = "gpu_utilization_ratio"
LABELS = {"app": "infer", "tier": "gpu"}
Make = Callable[..., Gpustream]


def example(path: str) -> list[Json]:
    """The objects of a file of the examples."""
    return [one for one in yaml.safe_load_all((EXAMPLES / path).read_text()) if one]


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
    held = HeldPort()
    yield held.number
    held.release()


@pytest.fixture
def sink(gpustream: Make, empty_kafka: KafkaServer, cluster: ApiServer, authority: Authority, port: int) -> Make:
    """Makes the sink with TLS and further options."""
    config = cluster.kubeconfig("admin")

    def make(*options: str) -> Gpustream:
        empty_kafka.create_ours({"gpu.attributed": 2})
        name = "gpustream-metrics-api.gpustream.svc"
        serving = authority.sign(name, f"DNS:{name}", "DNS:localhost")
        where = ("--kafka", empty_kafka.address, "--metrics-listen", f"127.0.0.1:{port}")
        tls = ("--serving-cert", str(serving.certificate), "--serving-key", str(serving.key))
        return gpustream(name, "sink", "metrics-api", *where, *tls, "--kubeconfig", str(config), *options)

    return make


@asynccontextmanager
async def registered(cluster: ApiServer, authority: Authority, port: int) -> AsyncIterator[None]:
    """Both versions of the group are the sink's while inside."""
    ca = base64.b64encode(authority.ca.read_bytes()).decode()
    made = [api_service(version, SERVICE, port, ca=ca) for version in ("v1beta1", "v1beta2")]
    for one in made:
        cluster.create(one)
    try:
        await eventually(lambda: all(map(available, made_of(cluster))), "the APIServices are available", every_s=0.2)
        yield
    finally:
        for one in made:
            cluster.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{one['metadata']['name']}")


def made_of(cluster: ApiServer) -> list[Json]:
    """The APIServices of the group."""
    items = cluster.get("/apis/apiregistration.k8s.io/v1/apiservices")["items"]
    return [one for one in items if one["spec"].get("group") == "custom.metrics.k8s.io"]


def available(one: Json) -> bool:
    """Whether the API server reaches what is behind an APIService."""
    conditions = one.get("status", {}).get("conditions", [])
    return any(found["type"] == "Available" and found["status"] == "True" for found in conditions)


async def test_an_autoscaler_scales_a_deployment_up_and_down_on_streamed_values(
    cluster: ApiServer, sink: Make, empty_kafka: KafkaServer, authority: Authority, port: int
) -> None:
    process = sink("--custom-metrics", SERVICE)
    await asyncio.to_thread(process.start)
    infer = Inference(cluster, empty_kafka, "gpu.attributed", namespace="aggregated", labels=LABELS)
    async with registered(cluster, authority, port), infer:
        (hpa,) = example("custom-metrics/hpa.yaml")
        hpa["metadata"]["namespace"] = "aggregated"
        hpa["spec"] |= {
            "minReplicas": 2,
            "maxReplicas": 6,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        }
        hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "100m"
        infer.load = 0.18
        assert cluster.apply(hpa).status == 201
        await infer.scaled_to(6)
        infer.load = 0.02
        await infer.scaled_to(2)
        status = infer.status(hpa["metadata"]["name"])
        assert status["currentMetrics"][0]["pods"]["current"]["averageValue"] == "20m"

        path = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/aggregated"
        one = cluster.get(f"{path}/deployments.apps/infer/{USED}")
        assert [item["value"] for item in one["items"]] == ["20m"]
        older = cluster.get(f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/aggregated/metrics/{USED}")
        assert [item["value"] for item in older["items"]] == ["20m"]
        assert cluster.request("GET", f"{path}/pods/*/{USED}", user="one").status == 403
    assert "error" not in process.log_tail().lower()
