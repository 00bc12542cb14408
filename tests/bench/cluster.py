"""What the cluster producer costs: memory and CPU at the start of a large cluster, and while its pods change.

    python -m tests.bench.cluster [PODS] [SECONDS]

An API server of our own, in a process of its own, serves 20 pods to a node, a fifth of them with GPUs, each 8.5 KB as
real ones are, to a producer that sends to Apache Kafka. CPU is user and system time of the whole producer, all threads,
from the start of its interpreter.
"""

import asyncio
import contextlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from delivery import topic_admin
from tests.bench.attribution import cpu_s
from tests.producers.cluster.api_server import ApiServer, kubeconfig
from tests.real.servers import KafkaServer

JsonDict = dict[str, Any]

PARTITIONS = 4
PER_NODE = 20
GPU_SHARE = 5
PODS, NODES, NAMESPACES = "/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces"
STAGES = 6
"""What the API server says of a pod's life: made and bound, running, changed, being deleted, over, gone."""

RATES = (
    (0, "none", "nothing changes"),
    (50, "lives", "50 changes/s of pods that come and go"),
    (50, "labels", "50 changes/s of GPU pods' labels"),
    (50 * STAGES, "lives", "50 pods/s, each made to gone"),
)

_FIELDS: JsonDict = {f"f:field-{number}": {".": {}, "f:name": {}, "f:value": {}} for number in range(46)}
_MANAGED = [
    {"manager": name, "operation": "Update", "time": "2026-03-01T12:00:00Z", "fieldsV1": {"f:spec": _FIELDS}}
    for name in ("kube-controller-manager", "kubelet")
]
_ENV = [{"name": f"VARIABLE_{number}", "value": f"value-of-the-variable-{number}"} for number in range(30)]
_CONDITIONS = [
    {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": "2026-03-01T12:00:01Z"}
    for kind in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
]
_KINDS = (
    ("apps/v1", "ReplicaSet", "replicasets", ("apps/v1", "Deployment", "deployments")),
    ("batch/v1", "Job", "jobs", ("batch/v1", "CronJob", "cronjobs")),
    ("apps/v1", "StatefulSet", "statefulsets", None),
    ("ray.io/v1", "RayCluster", "rayclusters", None),
)
"""Kinds of owners, with their plurals, and what is above each."""


def main(pods: int, seconds: int) -> None:
    """Prints a row for the start, and one for each rate of changes."""
    sys.stdout.write(f"{pods} pods of {len(_bytes(0, pods))} bytes on {pods // PER_NODE} nodes, {pods // GPU_SHARE}")
    sys.stdout.write(" of them with GPUs\n\n| | CPU | records sent | memory, MiB: now, peak |\n|---|---|---|---|\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        server = servers.enter_context(_child("serve", str(pods)))
        config = directory / "kubeconfig"
        config.write_text(kubeconfig(f"http://127.0.0.1:{int(_line(server))}", {"token": "t"}))
        producer = servers.enter_context(_child("produce", kafka.address, str(config)))
        began_s = time.monotonic()
        asyncio.run(_all_told(kafka.address, pods // PER_NODE))
        took_s = time.monotonic() - began_s
        _row(
            f"from the start until all nodes are reported ({took_s:.1f} s)",
            f"{cpu_s(producer.pid):.2f} s",
            asyncio.run(_sent(kafka.address)),
            producer,
        )
        for rate, kind, title in RATES:
            time.sleep(2)
            before = asyncio.run(_sent(kafka.address))
            share = _share(server, producer, f"{rate} {kind} {seconds}")
            sent = asyncio.run(_sent(kafka.address)) - before
            _row(f"{title}, for {seconds} s", f"{100 * share:.1f} % of a core", sent, producer)


def _share(server: "subprocess.Popen[str]", producer: "subprocess.Popen[str]", changes: str) -> float:
    """The share of a core that the producer takes while the API server lets pods change."""
    before_s, began_s = cpu_s(producer.pid), time.monotonic()
    assert server.stdin is not None
    server.stdin.write(f"{changes}\n")
    server.stdin.flush()
    _line(server)
    return (cpu_s(producer.pid) - before_s) / (time.monotonic() - began_s)


def _row(name: str, cpu: str, sent: int, producer: "subprocess.Popen[str]") -> None:
    status = Path(f"/proc/{producer.pid}/status").read_text().split("\n")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmRSS", "VmHWM"))}
    sys.stdout.write(f"| {name} | {cpu} | {sent} | {kib['VmRSS'] / 1024:.0f}, {kib['VmHWM'] / 1024:.0f} |\n")
    sys.stdout.flush()


async def _sent(kafka: str) -> int:
    """The records of gpu.workloads so far."""
    async with AIOKafkaConsumer(bootstrap_servers=kafka) as consumer:
        partitions = [TopicPartition("gpu.workloads", number) for number in range(PARTITIONS)]
        ends = await consumer.end_offsets(partitions)
    return sum(ends.values())


async def _all_told(kafka: str, nodes: int) -> None:
    """Return when every node has been reported."""
    async with AIOKafkaConsumer("gpu.workloads", bootstrap_servers=kafka, auto_offset_reset="earliest") as consumer:
        reported: set[bytes | None] = set()
        async with asyncio.timeout(120):
            while len(reported) < nodes:
                reported.add((await consumer.getone()).key)


@contextlib.contextmanager
def _child(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """This module, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.cluster", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.terminate()


def _line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def produce(kafka: str, config: str) -> None:
    """The producer, as the command runs it."""
    from gpustream import logs, serve
    from producers.cluster.component import ClusterProducer
    from producers.cluster.config import ClusterSettings

    logs.setup("text", logging.WARNING)
    settings = ClusterSettings(kafka=kafka, kubeconfig=Path(config), lease="default/bench", identity="bench")
    raise SystemExit(serve.serve(lambda: ClusterProducer(settings), None))


async def serve_pods(pods: int) -> None:
    """The API server: prints its port, then, for each line of a rate, a kind and seconds, lets pods change."""
    server = ApiServer()
    nodes = {f"node-{number:04}": {"metadata": _named(f"node-{number:04}")} for number in range(pods // PER_NODE)}
    server.objects = {NODES: nodes, NAMESPACES: {f"ns-{n}": {"metadata": _named(f"ns-{n}")} for n in range(20)}}
    server.objects["/apis/coordination.k8s.io/v1/namespaces/default/leases"] = {}
    server.objects[PODS] = {f"pod-{number}": _pod(number, pods) for number in range(pods)}
    _add_owners(server)
    async with server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            rate, kind, seconds = line.split()
            await _change(server, pods, int(rate), kind, int(seconds))
            sys.stdout.write("done\n")
            sys.stdout.flush()


async def _change(server: ApiServer, pods: int, rate: int, kind: str, seconds: int) -> None:
    """Let the API server say ``rate`` things a second: of new pods, each through all stages, or of GPU pods' labels."""
    began_s, chance = time.monotonic(), random.Random(1)
    for number in range(rate * seconds):
        await asyncio.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        if kind == "lives":
            life, stage = divmod(number, STAGES)
            _tell(server, pods + life + 1_000_000 * rate, stage, pods, chance)
        else:
            _relabel(server, GPU_SHARE * chance.randrange(pods // GPU_SHARE), number)
    await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))


def _relabel(server: ApiServer, number: int, value: int) -> None:
    pod = server.objects[PODS][f"pod-{number}"]
    labels = {**pod["metadata"]["labels"], "team": f"team-{value}"}
    server.put(PODS, {**pod, "metadata": {**pod["metadata"], "labels": labels}})


def _tell(server: ApiServer, number: int, stage: int, pods: int, chance: random.Random) -> None:
    pod = server.objects[PODS].get(f"pod-{number}") or _pod(number, pods)
    if stage == STAGES - 1:
        server.delete(PODS, f"pod-{number}")
        return
    phase = ("Pending", "Running", "Running", "Running", "Succeeded")[stage]
    metadata = {**pod["metadata"], "annotations": {"changed": str(chance.random())}}
    server.put(PODS, {**pod, "metadata": metadata, "status": {**pod["status"], "phase": phase}})


def _add_owners(server: ApiServer) -> None:
    """Every owner, what is above it, and the plural of the kind that is not built in."""
    rows = [{"name": "rayclusters", "kind": "RayCluster", "namespaced": True}]
    server.objects["/apis/ray.io"] = {"v1": {"metadata": {"name": "v1"}, "resources": rows}}
    for version, _, plural, above in _KINDS:
        for number in range(400):
            path = f"/apis/{version}/namespaces/ns-{number % 20}"
            owner = {"metadata": {**_named(f"{plural}-{number}"), "ownerReferences": None}}
            server.objects.setdefault(f"{path}/{plural}", {})[f"{plural}-{number}"] = owner
            if above is not None:
                upper = f"{above[2]}-{number}"
                owner["metadata"]["ownerReferences"] = [_reference(above[0], above[1], upper)]
                server.objects.setdefault(f"{path}/{above[2]}", {})[upper] = {"metadata": _named(upper)}


def _named(name: str) -> JsonDict:
    labels = {"topology.kubernetes.io/zone": "us-east-1a", "team": "research", "kubernetes.io/hostname": name}
    return {"name": name, "uid": f"uid-{name}", "labels": labels, "managedFields": _MANAGED}


def _reference(version: str, kind: str, name: str) -> JsonDict:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": f"uid-{name}", "controller": True}


def _pod(number: int, pods: int) -> JsonDict:
    """A pod; every fifth has GPUs, and every fifth of those an owner of its own kind."""
    gpu, group = number % GPU_SHARE == 0, number // GPU_SHARE
    version, kind, plural, _ = _KINDS[group % len(_KINDS)]
    owner = group % 400
    resources = {"cpu": "4", "memory": "16Gi", **({"nvidia.com/gpu": "1"} if gpu else {})}
    metadata = {
        "name": f"pod-{number}",
        "namespace": f"ns-{owner % 20}",
        "uid": f"0f12ab34-5c6d-7e8f-9a0b-{number:012x}",
        "creationTimestamp": "2026-03-01T12:00:00Z",
        "labels": {"app": f"app-{owner}", "team": "research", "pod-template-hash": "5d9c7b4f6", "part": str(number)},
        "annotations": {"kubernetes.io/config.source": "api", "changed": "0"},
        "ownerReferences": [_reference(version, kind, f"{plural}-{owner}")],
        "managedFields": _MANAGED,
    }
    container = {"name": "main", "image": "example/trainer:1", "env": _ENV, "resources": {"limits": resources}}
    spec = {"nodeName": f"node-{number // PER_NODE % (pods // PER_NODE):04}", "containers": [container], "priority": 0}
    statuses = [{"name": "main", "ready": True, "state": {"running": {"startedAt": "2026-03-01T12:00:01Z"}}}]
    status = {"phase": "Running", "startTime": "2026-03-01T12:00:00Z", "conditions": _CONDITIONS}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": spec,
        "status": {**status, "containerStatuses": statuses},
    }


def _bytes(number: int, pods: int) -> bytes:
    return json.dumps(_pod(number, pods)).encode()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        asyncio.run(serve_pods(int(arguments[1])))
    elif arguments[:1] == ["produce"]:
        produce(*arguments[1:])
    else:
        main(int(arguments[0]) if arguments else 10_000, int(arguments[1]) if len(arguments) > 1 else 30)
