"""From a change of load to the autoscaler's decision: custom metrics from the sink, beside scrape, rule and adapter.

    python -m tests.bench.autoscaling [SECONDS [ROUNDS]]

A real API server with its controllers. The autoscaler looks every SECONDS (1), and as often Prometheus scrapes and
evaluates the rule; a node ticks four times a second. Decided: when the Deployment has other replicas in its spec. Each
round is a change up and one down, at no fixed place in the period.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

from tests.eventually import eventually
from tests.real.autoscaling import Inference, outside_service
from tests.real.certificates import Authority
from tests.real.kubernetes import ApiServer, ControllerManager
from tests.real.pipeline import Gpustream
from tests.real.process import HeldPort
from tests.real.servers import KafkaServer
from tests.real.test_autoscaling import ADAPTER, SERVICE, Adapter, Classical, example, pod_labels, registered


class Bench:
    """The servers that both ways share."""

    def __init__(self, directory: Path, servers: ExitStack, every_s: int) -> None:
        self.directory, self.servers, self.every_s = directory, servers, every_s
        self.authority = Authority(directory / "authority")
        self.kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        self.kafka.create_ours({"gpu.attributed": 2, "gpu.dead-letters": 1})
        self.api = servers.enter_context(ApiServer(directory / "kubernetes"))
        servers.enter_context(ControllerManager(directory / "controllers", self.api, period_s=every_s))
        for service in (SERVICE, ADAPTER):
            self.api.namespace(service.partition("/")[0])
            self.api.create(outside_service(service))

    def start(self, *arguments: str) -> None:
        """Starts a sink."""
        process = Gpustream(self.directory / arguments[1], *arguments, "--kafka", self.kafka.address)
        self.servers.enter_context(process)

    @asynccontextmanager
    async def aggregated(self) -> AsyncIterator[Inference]:
        """A Deployment that is scaled by custom metrics from the sink."""
        port = HeldPort().number
        name = "metrics-api.gpustream.svc"
        serving = self.authority.sign(name, f"DNS:{name}")
        tls = ("--serving-cert", str(serving.certificate), "--serving-key", str(serving.key))
        access = ("--kubeconfig", str(self.api.kubeconfig("admin")), "--custom-metrics", SERVICE)
        self.start("sink", "metrics-api", "--metrics-listen", f"127.0.0.1:{port}", *tls, *access)
        async with (
            registered(self.api, SERVICE, self.authority, port),
            Inference(self.api, self.kafka, "aggregated", "infer", shared=False) as infer,
        ):
            (hpa,) = example("custom-metrics/hpa.yaml")
            infer.load = 0.6
            infer.autoscale(hpa)
            yield infer

    @asynccontextmanager
    async def classical(self) -> AsyncIterator[Inference]:
        """A Deployment that is scaled by scrape, rule and prometheus-adapter."""
        port = HeldPort().number
        self.start(
            "sink", "scrape", "--names", "dcgm-legacy", "--labels", "dcgm", "--scrape-listen", f"127.0.0.1:{port}"
        )
        test = Inference(self.api, self.kafka, "classical", "cuda-test", shared=False)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(test)
            test.load = 0.5
            targets = (f"127.0.0.1:{port}", await stack.enter_async_context(pod_labels(test)))
            prometheus = stack.enter_context(
                Classical(self.directory / "prometheus", targets, "classical", every_s=self.every_s)
            )
            await eventually(lambda: prometheus.query("cuda_test_gpu_avg"), every_s=0.2)
            adapter = stack.enter_context(Adapter(self.directory / "adapter", self.api, prometheus, self.authority))
            self.api.create(outside_service("classical/cuda-test"))
            await stack.enter_async_context(registered(self.api, ADAPTER, self.authority, adapter.ports[0].number))
            (hpa,) = example("prometheus-adapter/hpa.yaml")
            test.autoscale(hpa)
            yield test


async def decisions_s(infer: Inference, every_s: int, rounds: int) -> list[float]:
    """How long each decision took: up to 6 pods with twice the target and more, down to 2 with less than half of it."""
    await eventually(lambda: infer.status().get("currentMetrics"), every_s=0.2)
    delays_s = []
    for number in range(2 * rounds):
        await asyncio.sleep(3 + 2 * every_s + random.random() * every_s)
        infer.load = 0.1 if number % 2 else 1.0
        since_s = time.monotonic()
        await eventually(partial(differs, infer, 6 if number % 2 else 2), every_s=0.05)
        delays_s.append(time.monotonic() - since_s)
        await infer.scaled_to(2 if number % 2 else 6)
    return delays_s


def differs(infer: Inference, replicas: int) -> bool:
    """Whether the Deployment is to have another number of replicas."""
    path = f"/apis/apps/v1/namespaces/{infer.namespace}/deployments/{infer.name}"
    return bool(infer.api.get(path)["spec"]["replicas"] != replicas)


async def measure(every_s: int, rounds: int) -> None:
    """Prints a row for each way."""
    sys.stdout.write("| way | decisions | median s | longest s |\n|---|---|---|---|\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        bench = await asyncio.to_thread(Bench, directory, servers, every_s)
        ways = {"custom metrics from gpustream": bench.aggregated, "scrape, rule, prometheus-adapter": bench.classical}
        for name, way in ways.items():
            async with way() as infer:
                took = sorted(await decisions_s(infer, every_s, rounds))
            sys.stdout.write(f"| {name} | {len(took)} | {median(took):.1f} | {took[-1]:.1f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    asyncio.run(measure(*arguments, *(1, 6)[len(arguments) :]))
