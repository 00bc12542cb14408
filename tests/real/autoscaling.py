"""Helpers for tests of autoscalers: a Deployment whose pods run without kubelets, and the ticks of their GPUs."""

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from aiokafka import AIOKafkaProducer

from tests.eventually import eventually
from tests.real.kubernetes import ApiServer, Json
from tests.real.servers import KafkaServer
from topics.attributed import TOPIC

CLUSTER = "default"
NODE = "n1"
TICK_S = 0.25


def deployment(namespace: str, name: str, replicas: int) -> Json:
    """A Deployment of pods with the label app=NAME."""
    labels = {"app": name}
    containers = [{"name": "main", "image": "example.invalid/main"}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
        },
    }


def api_service(version: str, service: str, port: int, *, ca: str, priority: int = 100) -> Json:
    """The APIService that gives a version of custom.metrics.k8s.io to a Service, ``NAMESPACE/NAME``."""
    namespace, _, name = service.partition("/")
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": priority,
            "caBundle": ca,
            "service": {"namespace": namespace, "name": name, "port": port},
        },
    }


def outside_service(service: str) -> Json:
    """A Service of that ``NAMESPACE/NAME`` that leads to this machine."""
    namespace, _, name = service.partition("/")
    spec = {"type": "ExternalName", "externalName": "localhost"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


class Inference:
    """A Deployment and its GPUs: every pod runs as soon as it is there.

    ``load`` is what each pod makes of its GPU, from its next tick on. With ``shared`` every second pod is on one GPU
    with others.
    """

    def __init__(self, api: ApiServer, kafka: KafkaServer, namespace: str, name: str, *, shared: bool = True) -> None:
        self.api, self.kafka, self.namespace, self.name, self.shared = api, kafka, namespace, name, shared
        self.load = 0.0
        self.pods: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Inference":
        self.api.namespace(self.namespace)
        self.api.create(deployment(self.namespace, self.name, 2))
        self._task = asyncio.create_task(self._run())
        await self.scaled_to(2)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def scaled_to(self, replicas: int) -> None:
        """Waits until that many pods hold a GPU."""
        await eventually(lambda: len(self.pods) == replicas, f"{replicas} pods", unless=self._task, every_s=0.05)

    def autoscale(self, hpa: Json) -> None:
        """Creates the autoscaler of an example, which scales it from 2 to 6 pods, and down again at once."""
        quick = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        content = {**hpa, "metadata": {"name": self.name, "namespace": self.namespace}}
        content["spec"] = {**hpa["spec"], "minReplicas": 2, "maxReplicas": 6, "behavior": quick}
        assert content["spec"]["scaleTargetRef"]["name"] == self.name
        assert self.api.apply(content).status == 201

    def status(self) -> Json:
        """The status of the autoscaler."""
        path = f"/apis/autoscaling/v2/namespaces/{self.namespace}/horizontalpodautoscalers/{self.name}"
        autoscaler: Json = self.api.get(path)
        status: Json = autoscaler.get("status", {})
        return status

    async def _run(self) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.kafka.address) as producer:
            started_ms, seq = int(time.time() * 1000), 0
            while True:
                pods = await asyncio.to_thread(self._running)
                seq += 1
                content = self._tick(pods, started_ms, seq)
                await producer.send_and_wait(TOPIC.name, json.dumps(content).encode(), f"{CLUSTER}/{NODE}".encode())
                self.pods = pods
                await asyncio.sleep(TICK_S)

    def _running(self) -> list[str]:
        """The pods that are not about to end; each runs from now on."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        running_pods = [pod for pod in self.api.get(path)["items"] if "deletionTimestamp" not in pod["metadata"]]
        for pod in running_pods:
            if pod["status"].get("phase") != "Running":
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
                content = {"status": {"phase": "Running", "startTime": now, "conditions": [ready]}}
                self.api.patch(f"{path}/{pod['metadata']['name']}", content, status=True)
        return sorted(pod["metadata"]["name"] for pod in running_pods)

    def _tick(self, pods: list[str], run_id: int, seq: int) -> Json:
        alone, together = (pods[0::2], pods[1::2]) if self.shared else (pods, [])
        devices: list[dict[str, Any]] = [
            {"uuid": f"GPU-{pod}", "metrics": {"gpu_utilization_ratio": self.load}, "holders": [self._holder(pod)]}
            for pod in alone
        ]
        if together:
            parts = {"utilization_ratio": self.load}
            holders = [self._holder(pod, parts=parts if len(together) > 1 else None) for pod in together]
            used = round(self.load * len(together), 6)
            devices.append({"uuid": "GPU-shared", "metrics": {"gpu_utilization_ratio": used}, "holders": holders})
        return {
            "schema": 1,
            "cluster": CLUSTER,
            "node": NODE,
            "run_id": run_id,
            "seq": seq,
            "ts_ms": int(time.time() * 1000),
            "offset": seq,
            "attribution": "exact",
            "devices": [{"index": number, "model": "NVIDIA L4"} | device for number, device in enumerate(devices)],
        }

    def _holder(self, pod: str, **fields: Any) -> dict[str, Any]:
        workload = {"kind": "Deployment", "name": self.name}
        holder = {"namespace": self.namespace, "pod": pod, "container": "main"}
        return {**holder, "workload": workload, "deployment": self.name, **fields}
