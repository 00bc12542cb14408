"""What KEDA itself does with the ScaledObjects of k8s/, a real Kafka and the metrics API: `make keda` runs this."""

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import yaml
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, TopicPartition

from tests.eventually import eventually
from tests.k8s.manifests import K8S, Manifest, documents
from tests.real.autoscaling import Inference
from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.keda import find_keda, keda
from tests.real.kubernetes import (
    ApiServer,
    ControllerManager,
    Denied,
    Json,
    find_etcd,
    find_kube_apiserver,
    find_kube_controller_manager,
)
from tests.real.pipeline import Gpustream
from tests.real.process import HeldPort
from tests.real.servers import KafkaServer, find_openssl
from tests.real.test_manifests import find_kustomize

pytestmark = pytest.mark.real

PARTITIONS = 32
COMPONENTS = ["keda", "usage", "keda/usage", "webhook", "keda/webhook", "parquet", "keda/parquet"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[ApiServer]:
    """An API server with the controllers that scale Deployments, and with KEDA."""
    need(find_etcd, find_kube_apiserver, find_kube_controller_manager, find_openssl, find_keda)
    with ExitStack() as servers:
        api = servers.enter_context(ApiServer(tmp_path_factory.mktemp("kubernetes")))
        servers.enter_context(ControllerManager(tmp_path_factory.mktemp("controllers"), api))
        servers.enter_context(keda(tmp_path_factory.mktemp("keda"), api, authority))
        yield api


def quick(scaled: Manifest) -> Manifest:
    """A ScaledObject that looks every second, and waits for nothing."""
    spec = scaled["spec"]
    spec |= {"pollingInterval": 1, "cooldownPeriod": 1}
    if "initialCooldownPeriod" in spec:
        spec["initialCooldownPeriod"] = 1
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    spec.setdefault("advanced", {})["horizontalPodAutoscalerConfig"] = {"behavior": behavior}
    return scaled


async def apply(cluster: ApiServer, manifest: Manifest) -> None:
    """Applies an object, once KEDA's admission knows what it refers to."""
    await eventually(lambda: cluster.apply(manifest).status in {200, 201}, f"{manifest['metadata']['name']} is taken")


async def write(kafka: KafkaServer, topic: str, records: int) -> None:
    """Writes records into the first partition."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, linger_ms=50) as producer:
        await asyncio.gather(*[await producer.send(topic, b"{}", key=b"k", partition=0) for _ in range(records)])


def commit(kafka: KafkaServer, group: str, topic: str, first: int = 0) -> None:
    """Commits as a group of ours does: every partition at its start, and the first one here."""
    consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": group})
    offsets = [TopicPartition(topic, number, first if number == 0 else 0) for number in range(PARTITIONS)]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()


def rendered(folder: Path, kafka: KafkaServer) -> list[Manifest]:
    """The objects of the base with all that KEDA scales, as the README says to write it."""
    k8s = os.path.relpath(K8S, folder.resolve())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "gpustream",
        "resources": [f"{k8s}/base"],
        "components": [f"{k8s}/components/{name}" for name in COMPONENTS],
        "configMapGenerator": [
            {"name": "gpustream", "behavior": "merge", "literals": [f"GPUSTREAM_KAFKA={kafka.address}"]},
            {"name": "webhook", "literals": ["GPUSTREAM_URL=https://hooks.example.com"]},
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    ran = subprocess.run([find_kustomize(), "build", folder], capture_output=True, text=True, check=True)
    return documents(ran.stdout)


async def test_streams_and_sinks_have_the_pods_that_their_lag_asks_for(
    cluster: ApiServer, empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    topics = ("gpu.samples", "gpu.attributed", "gpu.alerts", "gpu.usage")
    empty_kafka.create_ours(dict.fromkeys(topics, PARTITIONS))
    commit(empty_kafka, "gpustream-attribution", "gpu.samples")
    for group in ("alerts", "usage", "sink-remote-write"):
        commit(empty_kafka, f"gpustream-{group}", "gpu.attributed")
    commit(empty_kafka, "gpustream-sink-webhook", "gpu.alerts")
    commit(empty_kafka, "gpustream-sink-parquet", "gpu.usage")

    cluster.namespace("gpustream")
    manifests = rendered(tmp_path, empty_kafka)
    for kind in ("ConfigMap", "StatefulSet", "ScaledObject"):
        for manifest in (manifest for manifest in manifests if manifest["kind"] == kind):
            await apply(cluster, quick(manifest) if kind == "ScaledObject" else manifest)

    def pods(name: str) -> int:
        found: int = cluster.get(f"/apis/apps/v1/namespaces/gpustream/statefulsets/{name}")["spec"]["replicas"]
        return found

    def has(name: str, expected: int) -> bool:
        return pods(name) == expected

    names = ("attribution", "alerts", "remote-write", "usage", "webhook", "parquet")
    await eventually(lambda: [pods(name) for name in names] == [2, 2, 2, 2, 0, 0], "nothing is left to do")
    await write(empty_kafka, "gpu.attributed", 25_000)
    await write(empty_kafka, "gpu.samples", 65_000)
    await eventually(lambda: pods("attribution") == 4, "a pod for each 20,000 records")
    assert pods("remote-write") == 2, "more pods would not help a sink whose receiver is away"
    advanced = count(1)

    def has_three() -> bool:
        commit(empty_kafka, "gpustream-sink-remote-write", "gpu.attributed", next(advanced))
        return pods("remote-write") == 3

    await eventually(has_three, "a pod for each 10,000 records, once the sink gets on", every_s=0.3)
    for name, topic in (("webhook", "gpu.alerts"), ("parquet", "gpu.usage")):
        await write(empty_kafka, topic, 3)
        await eventually(partial(has, name, 1), f"a record wakes {name}")
        commit(empty_kafka, f"gpustream-sink-{name}", topic, 3)
        await eventually(partial(has, name, 0), f"{name} sleeps again")
    assert [pods(name) for name in ("alerts", "usage")] == [2, 2]


def conditions(cluster: ApiServer, namespace: str, name: str) -> dict[str, str]:
    """The conditions of a ScaledObject."""
    scaled: Json = cluster.get(f"/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects/{name}")
    return {condition["type"]: condition["status"] for condition in scaled.get("status", {}).get("conditions", [])}


async def test_a_deployment_is_scaled_on_its_gpus_and_keeps_its_pods_while_there_is_no_answer(
    cluster: ApiServer,
    gpustream: Callable[..., Gpustream],
    empty_kafka: KafkaServer,
    authority: Authority,
    tmp_path: Path,
) -> None:
    empty_kafka.create_ours({"gpu.attributed": 2})
    held_port = HeldPort()
    serving = authority.sign("metrics-api.gpustream.svc", "DNS:localhost")
    (tmp_path / "token").write_text("of-the-tests\n")
    files = (
        ("--serving-cert", serving.certificate),
        ("--serving-key", serving.key),
        ("--client-token-file", tmp_path / "token"),
    )
    options = [word for name, file in files for word in (name, str(file))]
    address = f"127.0.0.1:{held_port.number}"
    sink = gpustream(
        "api", "sink", "metrics-api", "--kafka", empty_kafka.address, "--metrics-listen", address, *options
    )
    await asyncio.to_thread(sink.start)
    async with Inference(cluster, empty_kafka, "ml", "infer") as infer:
        infer.load = 0.25
        token = {
            "metadata": {"name": "gpustream-metrics-api", "namespace": "ml"},
            "stringData": {"token": "of-the-tests"},
        }
        cluster.create({"apiVersion": "v1", "kind": "Secret"} | token)
        examples = K8S / "examples" / "keda"
        await apply(cluster, yaml.safe_load((examples / "triggerauthentication.yaml").read_text()))
        scaled = quick(yaml.safe_load((examples / "scaledobject-metrics-api.yaml").read_text()))
        trigger = scaled["spec"]["triggers"][0]["metadata"]
        trigger["url"] = trigger["url"].replace("metrics-api.gpustream.svc", f"localhost:{held_port.number}")
        await apply(cluster, scaled)
        await infer.scaled_to(1)
        infer.load = 0.9
        await infer.scaled_to(8)
        infer.load = 0.6
    # no ticks come any more: after 30 s the answer is 404
    await eventually(lambda: conditions(cluster, "ml", "infer-metrics-api").get("Fallback") == "True", every_s=0.5)
    assert cluster.get("/apis/apps/v1/namespaces/ml/deployments/infer")["spec"]["replicas"] == 8
    held_port.release()


def test_keda_refuses_what_can_not_work(cluster: ApiServer) -> None:
    target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "nothing"}
    trigger = {"type": "cpu", "metricType": "AverageValue", "metadata": {"value": "700m"}}
    scaled = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "wrong", "namespace": "default"},
        "spec": {"scaleTargetRef": target, "triggers": [trigger]},
    }
    with pytest.raises(Denied, match="admission webhook"):
        cluster.create(scaled)
