"""Node producers -> Kafka (TLS, SCRAM) -> attribution -> remote write -> Prometheus, through an outage of Kafka.

``a`` has 2 GPUs and a kubelet; on GPU 0 one pod follows another every few ticks, in the quiet between two of them, and
each pod fills the GPU's memory by an amount of its own: what a tick read tells which pod held the GPU. ``b`` has 8
GPUs, no kubelet, and a buffer shorter than the outage. ``c`` is stopped in the outage, while its GPU hangs.
"""

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from delivery import topic_admin
from producers import publisher as names
from tests.eventually import eventually_sync
from tests.nvml.scripted import ScriptedNvml
from tests.producers.node import pod_resources
from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.pipeline import Gpustream, Stored, lag, read_all, stored
from tests.real.resolver import find_compiler
from tests.real.servers import KafkaServer, PrometheusServer, find_java, find_kafka, find_prometheus
from tests.real.soak import secured

CLUSTER = "nodes"
BEFORE_S, OUTAGE_S, STOP_AFTER_S = 8.0, 28.0, 6.0
SHORT_BUFFER_S = 8
PHASE_TICKS = 2
FEWEST_PODS = 4  # on a machine that is very busy a pod holds the GPU for more ticks
TICK_MS = 1000
QUIET_S = 0.25
GPU = "GPU-5c41b7ed-0000-4000-8000-{:012x}"
TURNING, STEADY = GPU.format(0), GPU.format(1)
BASE_BYTES, STEP_BYTES = 1 << 30, 1 << 20
NAMESPACE = "ml-team"


class Turnover:
    """The pod on GPU 0: a new one every few ticks, sometimes none; changed by a thread."""

    def __init__(self, directory: Path) -> None:
        self.nvml = ScriptedNvml(directory / "nvml", gpus=2, log=True)
        self.socket = directory / "kubelet.sock"
        self.kubelet = pod_resources.Server(self.socket)
        self.pods: list[str | None] = []
        self.turned_ms: list[float] = []
        self._stop = threading.Event()
        self._turn()

    def held_by(self, value: float) -> str | None:
        """The pod that fills that much of GPU 0's memory."""
        return self.pods[(int(value) - BASE_BYTES) // STEP_BYTES]

    def torn(self, ts_ms: int, read_ms: int) -> bool:
        """Whether GPU 0 went to another pod about when a tick of that time was read, ``read_ms`` being the GPU's time.

        A busy machine makes that possible: the GPU or the kubelet answers too late for its tick.
        """
        return any(read_ms - TICK_MS <= at_ms <= ts_ms + TICK_MS for at_ms in self.turned_ms)

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Changes the pod while inside."""
        self.kubelet.start()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self.kubelet.stop()

    def _run(self) -> None:
        while not self._stop.is_set():
            calls = self.kubelet.calls
            while self.kubelet.calls < calls + PHASE_TICKS and not self._stop.wait(0.01):
                pass
            self._wait_for_quiet()
            self._turn()

    def _wait_for_quiet(self) -> None:
        """Waits until the tick that asked the kubelet has been answered by the GPUs."""
        calls = -1
        while calls != (calls := len(self.nvml.calls())) and not self._stop.wait(QUIET_S):
            pass

    def _turn(self) -> None:
        number = len(self.pods)
        pod = f"bert-{number}" if number % 5 != 3 else None
        self.pods.append(pod)
        self.turned_ms.append(time.time() * 1000)
        on_turning = {TURNING: pod} if pod else {}
        self.kubelet.reply = pod_resources.pods_on({**on_turning, STEADY: "trainer"})
        self.nvml.set(0, memory_used=BASE_BYTES + number * STEP_BYTES)


class Stop(NamedTuple):
    """How a process ended after it was asked to stop."""

    took_s: float
    code: int | None


@dataclass
class Outcome:
    """The results: the ticks of gpu.attributed by node, in order, and the samples in Prometheus."""

    turnover: Turnover
    caught_up_ms: float = 0.0
    made: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    stops: dict[str, Stop] = field(default_factory=dict)
    ticks: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    memory: dict[tuple[str, str, int], Stored] = field(default_factory=dict)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Outcome]:
    """Runs the whole pipeline, once for all tests."""
    need(find_compiler, find_java, find_kafka, find_prometheus)
    directory = tmp_path_factory.mktemp("node")
    with ExitStack() as servers:
        kafka = servers.enter_context(KafkaServer(directory / "kafka", authority=authority))
        prometheus = servers.enter_context(PrometheusServer(directory / "prometheus"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        yield _run(servers, directory, kafka, secured([kafka], authority.ca, directory), prometheus)


def _run(
    servers: ExitStack, directory: Path, kafka: KafkaServer, kafka_options: list[str], prometheus: PrometheusServer
) -> Outcome:
    def process(name: str, *arguments: str, **options: Any) -> Gpustream:
        gpustream = Gpustream(directory / name, *arguments, *kafka_options, **options)
        return servers.enter_context(gpustream)

    def node(name: str, nvml: ScriptedNvml, socket: str, *arguments: str) -> Gpustream:
        options = ("--cluster", CLUSTER, "--node", name, "--pod-resources-socket", socket, *arguments)
        return process(f"node-{name}", "produce", "node", *options, environment=nvml.environment())

    outcome = Outcome(Turnover(directory))
    hanging = ScriptedNvml(directory / "nvml-c", gpus=1)
    process("stream", "stream", "attribution")
    process("sink", "sink", "remote-write", "--url", prometheus.write_url, "--from", "earliest")
    with outcome.turnover.turning():
        a = node("a", outcome.turnover.nvml, str(outcome.turnover.socket))
        b = node("b", ScriptedNvml(directory / "nvml-b"), "off", "--buffer", f"{SHORT_BUFFER_S}s")
        c = node("c", hanging, "off")
        time.sleep(BEFORE_S)
        kafka.kill9()
        time.sleep(STOP_AFTER_S)
        hanging.hang(None, "*", 3600)
        time.sleep(2)
        _stop(outcome, "c", c)
        time.sleep(OUTAGE_S - STOP_AFTER_S - 2 - outcome.stops["c"].took_s)
        kafka.start()
        eventually_sync(lambda: all(_metric(producer, names.HELD) <= 1 for producer in (a, b)))
        outcome.caught_up_ms = time.time() * 1000
        time.sleep(3)
        for name, producer in (("a", a), ("b", b)):
            outcome.made[name], outcome.dropped[name] = _metric(producer, names.MADE), _metric(producer, names.DROPPED)
            _stop(outcome, name, producer)
    eventually_sync(lambda: _behind(kafka.address) == 0)
    for record in sorted(asyncio.run(read_all(kafka.address, "gpu.attributed")), key=lambda r: (r.partition, r.offset)):
        tick = json.loads(record.value)
        outcome.ticks[tick["node"]].append(tick)
    stored_memory = stored(prometheus, "gpu_memory_used", CLUSTER, "10m")
    outcome.memory = {(node, uuid, ts_ms): value for (_, node, uuid, ts_ms), value in stored_memory.items()}
    return outcome


def _stop(outcome: Outcome, name: str, process: Gpustream) -> None:
    begin_s = time.monotonic()
    process.stop()
    outcome.stops[name] = Stop(time.monotonic() - begin_s, process.returncode)


def _behind(kafka: str) -> int:
    pairs = (("gpustream-attribution", "gpu.samples"), ("gpustream-sink-remote-write", "gpu.attributed"))
    return sum(asyncio.run(lag(kafka, group, [topic])) for group, topic in pairs)


def _metric(process: Gpustream, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = (process.get("/metrics") or f"{name} inf").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def test_an_outage_of_kafka_loses_no_tick_that_the_buffer_holds(outcome: Outcome) -> None:
    seqs = [tick["seq"] for tick in outcome.ticks["a"]]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) >= outcome.made["a"] > OUTAGE_S
    assert outcome.dropped["a"] == 0
    assert {tick["attribution"] for tick in outcome.ticks["a"]} == {"exact"}


def test_each_tick_is_booked_to_the_pod_that_held_the_gpu_when_it_was_read(outcome: Outcome) -> None:
    booked: dict[str | None, int] = defaultdict(int)
    torn = 0
    for tick in outcome.ticks["a"]:
        devices = {device["uuid"]: device for device in tick["devices"]}
        assert _holders(devices[STEADY]) == ["trainer"], tick["seq"]
        held_by = outcome.turnover.held_by(devices[TURNING]["metrics"]["memory_used_bytes"])
        booked[held_by] += 1
        if _holders(devices[TURNING]) != ([held_by] if held_by else []):
            read_ms = devices[TURNING].get("read_ms") or tick["ts_ms"]
            assert outcome.turnover.torn(tick["ts_ms"], read_ms), tick["seq"]
            torn += 1
    assert torn < len(outcome.ticks["a"]) / 10
    assert booked.keys() >= set(outcome.turnover.pods[:-2])
    assert len(booked) > FEWEST_PODS


def _holders(device: dict[str, Any]) -> list[str]:
    return [holder["pod"] for holder in device.get("holders", [])]


@pytest.mark.parametrize("node", ["a", "b"])
def test_prometheus_has_each_of_those_ticks_at_its_time_under_its_pod(outcome: Outcome, node: str) -> None:
    expected = {
        (node, device["uuid"], tick["ts_ms"]): _expected(device)
        for tick in outcome.ticks[node]
        for device in tick["devices"]
    }
    assert {point: value for point, value in outcome.memory.items() if point[0] == node} == expected
    assert len(expected) > 2 * SHORT_BUFFER_S


def _expected(device: dict[str, Any]) -> Stored:
    holders = _holders(device)
    return Stored(device["metrics"]["memory_used_bytes"], (NAMESPACE, holders[0]) if holders else None)


def test_beyond_the_buffer_the_oldest_ticks_are_lost_and_counted_exactly(outcome: Outcome) -> None:
    """Ticks that the Kafka client already has are kept, and one more that waits for room in it."""
    ticks = {tick["seq"]: tick for tick in outcome.ticks["b"]}
    lost_ticks = sorted(set(range(1, max(ticks) + 1)) - ticks.keys())
    assert list(ticks) == sorted(ticks)
    assert len(outcome.ticks["b"]) == len(ticks)
    assert max(ticks) >= outcome.made["b"]
    assert len(lost_ticks) == outcome.dropped["b"] > 10
    assert lost_ticks[-1] - lost_ticks[0] + 1 <= len(lost_ticks) + 1
    last_lost_ms = ticks[lost_ticks[-1] + 1]["ts_ms"] - 1000
    assert last_lost_ms < outcome.caught_up_ms - SHORT_BUFFER_S * 1000


def test_a_node_without_a_kubelet_has_no_holders(outcome: Outcome) -> None:
    for tick in outcome.ticks["b"]:
        assert tick["attribution"] == "none"
        assert [_holders(device) for device in tick["devices"]] == [[]] * 8


@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_a_node_that_is_asked_to_stop_is_gone_within_10_s(outcome: Outcome, node: str) -> None:
    """The last of them in the outage, with a GPU that hangs."""
    assert outcome.stops[node].took_s < 10
    assert outcome.stops[node].code == 0
