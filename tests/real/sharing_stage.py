"""Where the story of :mod:`tests.real.sharing` is played: a scripted NVML, a procfs of files, a kubelet; and all that
makes series of it.

Each GPU's PCIe replays count the scenes, so that each tick says which one it is of. A tick that may have been read
while a scene changed does not count. Beside the node another one sees no processes: two pods share its GPU, and nobody
knows how.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer

from tests.eventually import eventually_sync
from tests.nvml.scripted import NO_INSTANCE, Process, ScriptedNvml
from tests.producers.node.pod_resources import Server, answer, container, pod, serving
from tests.producers.node.procfs import Procfs
from tests.real.accounting import books
from tests.real.pipeline import Gpustream, lag
from tests.real.servers import KafkaServer, PrometheusServer
from tests.real.sharing import DRA_DEVICES, GPUS, Running, Scene, mig_uuid, pids, story
from topics.attributed import AttributedSample
from topics.topic import node_key

CLUSTER, NODE, BLIND = "sharing", "gpu-node-1", "gpu-node-2"
UNSEEN = "GPU-b11d0000-0000-4000-8000-000000000000"
"""The GPU of the node that sees no processes."""
KNOWN_S = 2.2
"""After so long what was logged of pods counts for samples."""


class Stage:
    """Where scenes are played."""

    def __init__(self, directory: Path, kafka: str) -> None:
        self.nvml = ScriptedNvml(directory / "nvml", gpus=8)
        self.procfs = Procfs(directory / "proc")
        self.kubelet = Server(directory / "kubelet.sock")
        self.node: Gpustream | None = None
        self._changes: list[tuple[int, float]] = []
        self._kafka = kafka
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._reports = 0
        self._alive: dict[int, Running] = {}

    def play(self, scene: Scene, number: int) -> None:
        """Sets everything to the scene; the API server reports new pods before, and ended pods afterwards."""
        pods = {pod["uid"]: pod for pod in scene.pods}
        if not pods.keys() <= self._pods.keys():
            self._report({**self._pods, **pods})
            time.sleep(KNOWN_S)
        changed_at = self._last_seq()
        self._begin_and_end(pids([scene]))
        self.kubelet.reply = scene.kubelet
        with self.nvml.at_once():
            self._script(scene, number)
        self._changes.append((changed_at, time.time() * 1000))
        if not self._pods.keys() <= pods.keys():
            self._report(pods)

    def raise_xids(self, scene: Scene) -> None:
        """Lets the scene's XID errors happen, once it has been watched: so no tick that has them is torn."""
        for gpu, code, instance in scene.xids:
            self.nvml.xid(gpu, code, NO_INSTANCE if instance is None else instance)
        if scene.xids:
            self.watched()

    def torn(self, tick: AttributedSample) -> bool:
        """Whether a tick may have been read while a scene changed: it was not made before, and began before the end."""
        return any(seq < tick.seq and tick.ts_ms <= ended_ms for seq, ended_ms in self._changes)

    def watched(self) -> None:
        """Waits for three more ticks: the first of them may have begun before, and in one a GPU may answer too late."""
        enough = self._last_seq() + 3
        eventually_sync(lambda: self._last_seq() >= enough, f"{enough} ticks", every_s=0.2)

    def _last_seq(self) -> int:
        """The sequence number of the last tick of the node."""
        if self.node is None:
            return 0
        get = partial(self.node.get, "/metrics")
        return books(eventually_sync(get))["producer", ""]["received"]

    def _script(self, scene: Scene, number: int) -> None:
        for gpu, uuid in enumerate(GPUS):
            truth = scene.devices[uuid]
            self.nvml.set(gpu, memory_used=truth.memory, power_mw=truth.milliwatts, utilization_gpu=truth.busy or 0)
            self.nvml.set(gpu, pcie_replays=number, gpm_2=truth.sm_active or 0)
            (self.nvml.lose if truth.lost else self.nvml.recover)(gpu)
            if gpu in scene.migs:
                self.nvml.mig(gpu, scene.migs[gpu])
                active = {mig.gpu_instance: scene.devices[mig_uuid(gpu, mig.gpu_instance)] for mig in scene.migs[gpu]}
                self.nvml.set(gpu, **{f"gpm_2_gi{gi}": instance.sm_active or 0 for gi, instance in active.items()})
            self.nvml.processes(gpu, [_process(process, instance) for process, instance in scene.on(gpu)])

    def _begin_and_end(self, alive: Mapping[int, Running]) -> None:
        for pid in self._alive.keys() - alive.keys():
            self.procfs.end(pid)
        for pid in alive.keys() - self._alive.keys():
            self.procfs.begin(pid, 1000 + pid, alive[pid].cgroup, alive[pid].comm)
        self._alive = dict(alive)

    def _report(self, pods: dict[str, Mapping[str, Any]]) -> None:
        self._pods, self._reports = pods, self._reports + 1
        now = {"schema": 1, "cluster": CLUSTER, "node": NODE, "epoch": 1, "seq": self._reports}
        content = {"pods": list(pods.values()), "dra_devices": DRA_DEVICES}
        asyncio.run(self._send({**now, "ts_ms": int(time.time() * 1000), **content}))

    async def _send(self, record: Mapping[str, Any]) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self._kafka) as producer:
            key = node_key(CLUSTER, NODE)
            await producer.send_and_wait("gpu.workloads", json.dumps(record).encode(), key=key)


def _process(process: Running, instance: int | None) -> Process:
    if instance is None:
        return Process(process.pid, process.memory, sm=process.busy)
    return Process(process.pid, process.memory, sm=process.busy, gpu_instance=instance, compute_instance=0)


def play_all(
    servers: ExitStack, directory: Path, kafka: KafkaServer, receivers: Mapping[str, PrometheusServer]
) -> tuple[Sequence[Scene], Stage]:
    """Plays the whole story, with a sink for each receiver, named as its naming profile; gives the scenes and the stage
    when all of it has been delivered."""

    def process(name: str, *arguments: str, **options: Any) -> Gpustream:
        gpustream = Gpustream(directory / name, *arguments, "--kafka", kafka.address, **options)
        servers.enter_context(gpustream)
        servers.callback(gpustream.stop)  # it leaves its group
        return gpustream

    def node(name: str, nvml: ScriptedNvml, kubelet: Server, procfs: Path) -> Gpustream:
        paths = ("--pod-resources-socket", str(kubelet.path), "--procfs", str(procfs))
        options = ("--cluster", CLUSTER, "--node", name, *paths)
        return process(f"node-{name}", "produce", "node", *options, environment=nvml.environment())

    process("stream", "stream", "attribution")
    for name, receiver in receivers.items():
        to = ("--url", receiver.write_url, "--group", name, "--from", "earliest")
        process(f"sink-{name}", "sink", "remote-write", *to, "--names", name)
    stage, scenes = Stage(directory, kafka.address), list[Scene]()
    empty_procfs = Procfs(directory / "nobody")
    kubelet = servers.enter_context(serving(directory / "blind.sock", SHARED_BLINDLY))
    blind = node(BLIND, _blind(directory / "nvml-blind"), kubelet, empty_procfs.root)
    stage.kubelet.start()
    servers.callback(stage.kubelet.stop)
    for number, scene in enumerate(story()):
        stage.play(scene, number)
        if stage.node is None:
            stage.node = node(NODE, stage.nvml, stage.kubelet, stage.procfs.root)
        scenes.append(scene)
        stage.watched()
        stage.raise_xids(scene)
    for producer in filter(None, (blind, stage.node)):
        producer.stop()
    eventually_sync(lambda: _behind(kafka.address, receivers) == 0)
    return scenes, stage


SHARED_BLINDLY = answer(*(pod(f"unseen-{n}", container(gpus=[f"{UNSEEN}::{n}"])) for n in range(2)))


def _blind(directory: Path) -> ScriptedNvml:
    nvml = ScriptedNvml(directory, gpus=1)
    nvml.set(0, uuid=UNSEEN, memory_used=30 << 30)
    nvml.processes(0, [Process(901, 10 << 30, sm=40), Process(902, 5 << 30, sm=40)])
    return nvml


def _behind(kafka: str, receivers: Mapping[str, PrometheusServer]) -> int:
    pairs = [("gpustream-attribution", "gpu.samples"), *((name, "gpu.attributed") for name in receivers)]
    return sum(asyncio.run(lag(kafka, group, [topic])) for group, topic in pairs)
