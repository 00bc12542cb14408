"""From ticks to Alertmanager, with the product's own processes: killed or away in turn, they send each alert once."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from delivery import topic_admin
from delivery.clock import now_ms
from delivery.sender import Sender
from streams.alerts.rules import rules_file
from streams.alerts.tick import Tick
from streams.alerts.tick import decode as decode_tick
from tests.eventually import eventually, eventually_sync
from tests.real.pipeline import Gpustream, read_all
from tests.real.servers import AlertmanagerServer, KafkaServer
from tests.real.test_alert_sinks import alertmanager_sink, hook, notified
from tests.real.test_alerts import expected, of_ticks, transitions_written
from tests.streams.attribution.records import CLUSTER, container, gpu, pod, snapshot, workloads
from topics.alerts import Alert
from topics.samples import Device, Sample
from topics.topic import node_key
from topics.workloads import Owner

RULES = """
[rules.GPUHeldIdle]
for = "3s"
grace = "1s"
keep_firing_for = "500ms"
"""
PODS = ("stays", "works", "ends", "later", "busy")
"""Each with a GPU of its own. All but the last two are idle at first, and "busy" never is."""

EVERY_S = 0.2
AWAY_S = 20.0
RESEND = "15s"
"""What nobody sends again ends after four times that: longer than a sink takes to come back on a busy machine."""


class Node:
    """A node whose pods hold and use GPUs as the test says; it ticks while it is entered."""

    def __init__(self, sender: Sender) -> None:
        self.run_id = now_ms()
        self.working = {"later", "busy"}
        self.ticks = 0
        self._sender, self._snapshots = sender, 0

    async def run(self, *pods: str) -> None:
        """From the next tick on these pods run, and the others have ended: kubelet and API server say so."""
        seq = self._snapshots + 1
        containers = [container(name, gpu(number)) for number, name in enumerate(PODS) if name in pods]
        lives = [
            pod(name, ended=None if name in pods else now_ms(), owners=(Owner("batch/v1", "Job", f"train-{name}"),))
            for name in PODS
        ]
        await self._acknowledged("gpu.workloads", workloads(seq, *lives, ts_ms=now_ms(), epoch=self.run_id))
        await self._acknowledged("gpu.allocations", snapshot(seq, *containers, run_id=self.run_id, ts_ms=now_ms()))
        self._snapshots = seq

    async def tick(self) -> None:
        """One tick, now."""
        self.ticks += 1
        tick = Sample(
            schema=1,
            cluster=CLUSTER,
            node="n",
            run_id=self.run_id,
            seq=self.ticks,
            ts_ms=now_ms(),
            allocations_seq=self._snapshots,
            devices=tuple([self._device(number, pod) for number, pod in enumerate(PODS)]),
        )
        await self._acknowledged("gpu.samples", tick)

    def _device(self, number: int, name: str) -> Device:
        busy = 0.9 if name in self.working else 0.0
        return Device(gpu(number), index=number, metrics={"gpu_utilization_ratio": busy})

    async def _acknowledged(self, topic: str, record: msgspec.Struct) -> None:
        await (await self._sender.send(topic, msgspec.json.encode(record), key=node_key(CLUSTER, "n")))


@asynccontextmanager
async def ticking(kafka: KafkaServer) -> AsyncIterator[Node]:
    """A node that ticks."""
    sender = Sender(kafka.connection, client_id="node")
    await sender.start()
    node, over = Node(sender), asyncio.Event()
    await node.run(*PODS)

    async def tick_on() -> None:
        while not over.is_set():
            await node.tick()
            await asyncio.sleep(EVERY_S)

    running = asyncio.create_task(tick_on())
    try:
        yield node
    finally:
        over.set()
        await running
        await sender.stop()


def workloads_firing(manager: AlertmanagerServer) -> list[str]:
    """The pods that Alertmanager shows as idle, once for each alert; each has a workload of its own."""
    labels = [alert["labels"] for alert in manager.alerts()]
    assert {(alert_labels["alertname"], alert_labels["k8s_workload_kind"]) for alert_labels in labels} <= {
        ("GPUHeldIdle", "Job")
    }
    return sorted(alert_labels["k8s_workload_name"].removeprefix("train-") for alert_labels in labels)


async def start(*processes: Gpustream) -> None:
    """Starts processes at once."""
    await asyncio.gather(*[asyncio.to_thread(process.start) for process in processes])


async def kill_and_start(*processes: Gpustream) -> None:
    """Kills processes with SIGKILL, and starts others, which take over."""
    for process in processes:
        await asyncio.to_thread(process.kill9)
    await start(*processes)


def pod_of(alert: Alert) -> str:
    """The pod whose job an alert is about."""
    return alert.labels["k8s_workload_name"].removeprefix("train-")


async def fired(kafka: KafkaServer, name: str) -> bool:
    """Whether gpu.alerts has an alert about the pod."""
    values = (await transitions_written(kafka))[0].values()
    return name in {pod_of(msgspec.json.decode(value, type=Alert)) for value in values}


async def attributed(kafka: KafkaServer, ticks: int) -> list[Tick]:
    """All ticks of gpu.attributed when there are so many."""
    values = [record.value for record in await read_all(kafka.address, "gpu.attributed")]
    return [decode_tick(value) for value in values] if len(values) >= ticks else []


async def test_an_idle_gpu_is_reported_once_whoever_is_killed_or_away_until_its_pod_works_or_ends(
    empty_kafka: KafkaServer,
    start_alertmanager: Callable[..., AlertmanagerServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    kafka, file = empty_kafka, tmp_path / "rules.toml"
    file.write_text(RULES)
    await topic_admin.create(kafka.connection, partitions=3, replication_factor=1)
    to = ("--kafka", kafka.address)
    attribution = gpustream("attribution", "stream", "attribution", *to)
    worker = gpustream("worker", "stream", "alerts", *to, "--rules", str(file), "--instance-id", "worker")
    async with hook() as notifications, ticking(kafka) as node:
        manager = await asyncio.to_thread(start_alertmanager, webhook=notifications.url)
        sink = alertmanager_sink(gpustream, kafka, "sink", manager.url, resend=RESEND)
        await start(attribution, worker, sink)
        await asyncio.to_thread(
            eventually_sync, lambda: workloads_firing(manager) == ["ends", "stays", "works"], "three GPUs are idle"
        )

        # -- killed while they fire

        await kill_and_start(worker, sink)
        assert workloads_firing(manager) == ["ends", "stays", "works"]

        # -- killed before and after two of them end

        node.working.add("works")
        await node.run("stays", "works", "later", "busy")
        await kill_and_start(worker, sink)
        await asyncio.to_thread(
            eventually_sync, lambda: workloads_firing(manager) == ["stays"], "one works, and one has ended"
        )
        await kill_and_start(worker, sink)
        reported = {"stays": ["firing"], "works": ["firing", "resolved"], "ends": ["firing", "resolved"], "busy": []}
        await eventually(
            lambda: {job: notified(notifications, job) for job in reported} == reported, "each is notified once"
        )

        # -- Alertmanager is away, and knows nothing when it is back

        await asyncio.to_thread(manager.kill9)
        back_s = time.monotonic() + AWAY_S
        node.working.discard("later")
        await eventually(lambda: fired(kafka, "later"), every_s=1)
        await kill_and_start(worker)
        await asyncio.sleep(max(0.0, back_s - time.monotonic()))
        await asyncio.to_thread(manager.start)
        await asyncio.to_thread(
            eventually_sync,
            lambda: workloads_firing(manager) == ["later", "stays"],
            "what began while it was away is there, and no more",
        )

    ticks = await eventually(lambda: attributed(kafka, node.ticks), every_s=1)
    alerts_by_id, _ = await transitions_written(kafka)
    assert of_ticks(alerts_by_id) == expected([ticks], rules_file.load(file)), (
        "as one worker writes it that nothing happens to"
    )
    alerts = [msgspec.json.decode(value, type=Alert) for value in alerts_by_id.values()]
    assert sorted((pod_of(alert), alert.state, alert.resolved_because) for alert in alerts) == [
        ("ends", "firing", None),
        ("ends", "resolved", "pod_ended"),
        ("later", "firing", None),
        ("stays", "firing", None),
        ("works", "firing", None),
        ("works", "resolved", "condition"),
    ]
    assert await read_all(kafka.address, "gpu.dead-letters") == []
