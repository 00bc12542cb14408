"""GPUs that pods share, from a node's drivers to Prometheus: at every tick the parts and the rest are the device.

One node, told a story (:mod:`tests.real.sharing`) through a scripted NVML, a procfs of files and a kubelet;
attribution; and a sink with each of two naming profiles, into a Prometheus each. A scene begins in the quiet between
two ticks, and each GPU's PCIe replays count the scenes, so that each tick says which one it is of.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from tests.nvml.scripted import NO_INSTANCE, NoCompiler, Process, ScriptedNvml, library
from tests.producers.node.pod_resources import Server
from tests.producers.node.procfs import Procfs
from tests.real.conftest import need
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import KafkaServer, Missing, PrometheusServer, Series, find_java, find_kafka, find_prometheus
from tests.real.sharing import DRA_DEVICES, GPUS, LATE, NAMESPACE, Running, Scene, Truth, mig_uuid, pids, pod_uid, story
from topics import broker
from topics.attributed import AttributedDevice, AttributedSample
from topics.decoding import decoder
from topics.topic import node_key

pytestmark = pytest.mark.timeout(200)

CLUSTER, NODE = "sharing", "gpu-node-1"
TICKS = 2
QUIET_S = 0.2
WITHIN_S = 60.0
QUANTITIES = ("utilization_ratio", "memory_used_bytes", "power_watts")


class Names(NamedTuple):
    """What a naming profile calls the device's values, each with what it is multiplied by to be in base units, and the
    labels that say which device it is, and which pod's a part is."""

    device: Mapping[str, tuple[str, float]]
    gpu: str
    part: str
    namespace: str
    pod: str


OTEL = Names(
    {
        "utilization_ratio": ('gpu_utilization{gpu_task_type="compute"}', 1),
        "memory_used_bytes": ("gpu_memory_used", 1),
        "power_watts": ("gpu_power_draw", 1),
    },
    "gpu_uuid",
    "gpu_mig_uuid",
    "k8s_namespace_name",
    "k8s_pod_name",
)
DCGM = Names(
    {
        "utilization_ratio": ("DCGM_FI_DEV_GPU_UTIL", 0.01),
        "memory_used_bytes": ("DCGM_FI_DEV_FB_USED", 1 << 20),
        "power_watts": ("DCGM_FI_DEV_POWER_USAGE", 1),
    },
    "UUID",
    "GPU_I_ID",
    "namespace",
    "pod",
)
PROFILES = {"otel": OTEL, "dcgm": DCGM}

Key = tuple[str, str]
"""A device as its labels name it: the GPU, and the MIG device or its GPU instance, if it is one."""


@dataclass(frozen=True)
class Told:
    """What came out: the scenes, the ticks of gpu.attributed in order, and the receivers by naming profile."""

    scenes: Sequence[Scene]
    ticks: Sequence[AttributedSample]
    receivers: Mapping[str, PrometheusServer]

    def truths(self, tick: AttributedSample) -> Mapping[str, Truth]:
        """What was so on each device of a tick when it was read."""
        scene = self.scene(tick)
        assert {device.uuid for device in tick.devices} <= scene.devices.keys(), (tick.seq, scene.name)
        return {device.uuid: _as_known(scene.devices[device.uuid], device) for device in tick.devices}

    def scene(self, tick: AttributedSample) -> Scene:
        """Which scene a tick is of."""
        (number,) = {int(one.metrics["pcie_replays_total"] or 0) for one in tick.devices if one.mig is None}
        return self.scenes[number]


def _as_known(truth: Truth, device: AttributedDevice) -> Truth:
    """The truth as far as it can be known while the API server's list lacks a pod."""
    unknown = any(one.pod == LATE and one.pod_uid is None for one in device.holders)
    return truth.without(LATE) if unknown else truth


class Stage:
    """Where scenes are played."""

    def __init__(self, directory: Path, kafka: str) -> None:
        self.nvml = ScriptedNvml(directory / "nvml", gpus=8, log=True)
        self.procfs = Procfs(directory / "proc")
        self.kubelet = Server(directory / "kubelet.sock")
        self._kafka = kafka
        self._pods: Sequence[Mapping[str, Any]] | None = None
        self._told = 0
        self._alive: dict[int, Running] = {}

    def play(self, scene: Scene, number: int) -> None:
        """Everything says what the scene says; the API server first, but of the pods that it hears of later."""
        if scene.pods != self._pods:
            self._pods, self._told = scene.pods, self._told + 1
            asyncio.run(self._tell(scene.pods))
        self._wait_for_quiet()
        self._begin_and_end(pids([scene]))
        self.kubelet.reply = scene.kubelet
        with self.nvml.at_once():
            self._script(scene, number)

    def watched(self, ticks: int) -> None:
        """Waits until so many ticks more have been read."""
        self.kubelet.called(self.kubelet.calls + ticks)
        self._wait_for_quiet()

    def _wait_for_quiet(self) -> None:
        """Waits until the tick that asked the kubelet has been answered by the GPUs."""
        calls = -1
        while calls != (calls := self._calls()):
            time.sleep(QUIET_S)

    def _calls(self) -> int:
        return sum(not call.function.startswith("nvmlEvent") for call in self.nvml.calls())

    def _script(self, scene: Scene, number: int) -> None:
        for gpu, uuid in enumerate(GPUS):
            truth = scene.devices[uuid]
            self.nvml.set(gpu, memory_used=truth.memory, power_mw=truth.milliwatts, utilization_gpu=truth.busy or 0)
            self.nvml.set(gpu, pcie_replays=number, gpm_2=truth.sm_active or 0)
            if gpu in scene.migs:
                self.nvml.mig(gpu, scene.migs[gpu])
                active = {mig.gpu_instance: scene.devices[mig_uuid(gpu, mig.gpu_instance)] for mig in scene.migs[gpu]}
                self.nvml.set(gpu, **{f"gpm_2_gi{gi}": one.sm_active or 0 for gi, one in active.items()})
            self.nvml.processes(gpu, [_process(one, instance) for one, instance in scene.on(gpu)])
        for gpu, code, instance in scene.xids:
            self.nvml.xid(gpu, code, NO_INSTANCE if instance is None else instance)

    def _begin_and_end(self, alive: Mapping[int, Running]) -> None:
        for pid in self._alive.keys() - alive.keys():
            self.procfs.end(pid)
        for pid in alive.keys() - self._alive.keys():
            self.procfs.begin(pid, 1000 + pid, alive[pid].cgroup)
        self._alive = dict(alive)

    async def _tell(self, pods: Sequence[Mapping[str, Any]]) -> None:
        now = {"schema": 1, "cluster": CLUSTER, "node": NODE, "epoch": 1, "seq": self._told}
        record = {**now, "ts_ms": int(time.time() * 1000), "pods": pods, "dra_devices": DRA_DEVICES}
        producer = AIOKafkaProducer(bootstrap_servers=self._kafka)
        await producer.start()
        try:
            key = node_key(CLUSTER, NODE)
            await producer.send_and_wait("gpu.workloads", json.dumps(record).encode(), key=key)
        finally:
            await producer.stop()


def _process(one: Running, instance: int | None) -> Process:
    if instance is None:
        return Process(one.pid, one.memory, sm=one.busy)
    return Process(one.pid, one.memory, sm=one.busy, gpu_instance=instance, compute_instance=0)


def find_compiler() -> Path:
    """The scripted NVML library; raises :class:`Missing`."""
    try:
        return library()
    except NoCompiler as none:
        raise Missing(str(none)) from none


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The whole story, once."""
    need(find_compiler, find_java, find_kafka, find_prometheus)
    directory = tmp_path_factory.mktemp("sharing")
    with ExitStack() as servers:
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        receivers = {name: servers.enter_context(PrometheusServer(directory / name)) for name in PROFILES}
        asyncio.run(broker.create(kafka.address, partitions=4, replication_factor=1))
        scenes = _tell(servers, directory, kafka, receivers)
        records = sorted(asyncio.run(read_all(kafka.address, "gpu.attributed")), key=lambda one: one.offset)
        ticks = [decoder(AttributedSample)(one.value) for one in records]
        assert len(ticks) >= TICKS * len(scenes)
        assert all(len(tick.devices) >= len(GPUS) for tick in ticks)
        yield Told(scenes, ticks, receivers)


def _tell(
    servers: ExitStack, directory: Path, kafka: KafkaServer, receivers: Mapping[str, PrometheusServer]
) -> list[Scene]:
    def process(name: str, *arguments: str, **options: Any) -> Gpustream:
        gpustream = Gpustream(directory / name, *arguments, "--kafka", kafka.address, **options)
        return servers.enter_context(gpustream)

    process("stream", "stream", "attribution")
    for name, receiver in receivers.items():
        to = ("--url", receiver.write_url, "--group", name, "--from", "earliest")
        process(f"sink-{name}", "sink", "remote-write", *to, "--names", name)
    stage, scenes = Stage(directory, kafka.address), list[Scene]()
    stage.kubelet.start()
    servers.callback(stage.kubelet.stop)
    for number, scene in enumerate(story()):
        stage.play(scene, number)
        if not scenes:
            where = ("--pod-resources-socket", str(stage.kubelet.path), "--procfs", str(stage.procfs.root))
            options = ("--cluster", CLUSTER, "--node", NODE, *where)
            node = process("node", "produce", "node", *options, environment=stage.nvml.environment())
        scenes.append(scene)
        stage.watched(TICKS)
    node.stop()
    _wait(lambda: _behind(kafka.address, receivers) == 0)
    return scenes


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _behind(kafka: str, receivers: Mapping[str, PrometheusServer]) -> int:
    pairs = [("gpustream-attribution", "gpu.samples"), *((name, "gpu.attributed") for name in receivers)]
    return sum(asyncio.run(lag(kafka, group, [topic])) for group, topic in pairs)


def _key(names: Names, device: AttributedDevice) -> Key:
    if device.mig is None:
        return device.uuid, ""
    return device.mig.parent_uuid, device.uuid if names is OTEL else str(device.mig.gpu_instance)


def _labelled(names: Names, series: Series) -> Key:
    return series.labels[names.gpu], series.labels.get(names.part, "")


def _pod(names: Names, series: Series) -> str | None:
    """The pod that a series names, in the one namespace that there is."""
    name = series.labels.get(names.pod)
    assert (series.labels.get(names.namespace) == NAMESPACE) is (name is not None)
    return name


def _asked(told: Told, profile: str, expr: str, tick: AttributedSample) -> list[Series]:
    return told.receivers[profile].query(expr, tick.ts_ms)


def _close(expected: Mapping[Any, float]) -> Any:
    return pytest.approx(dict(expected), rel=1e-9, abs=1e-12)


def test_every_tick_is_there_and_every_scene_in_some(told: Told) -> None:
    seqs = [tick.seq for tick in told.ticks]
    assert seqs == list(range(1, len(seqs) + 1))
    assert [tick.attribution for tick in told.ticks] == ["exact"] * len(seqs)
    assert {device.state for tick in told.ticks for device in tick.devices} == {"ok"}
    seen = [told.scene(tick).name for tick in told.ticks]
    assert list(dict.fromkeys(seen)) == [scene.name for scene in told.scenes]


def test_each_device_is_held_by_the_pods_that_have_it_and_those_that_are_seen_there(told: Told) -> None:
    for tick in told.ticks:
        truths = told.truths(tick)
        found = {one.uuid: {holder.pod for holder in one.holders} for one in tick.devices}
        assert found == {uuid: truth.holders for uuid, truth in truths.items()}, told.scene(tick).name
        assert {one.uuid: one.conflict for one in tick.devices} == {uuid: one.conflict for uuid, one in truths.items()}
        observed = {holder.pod for one in tick.devices for holder in one.holders if holder.observed}
        assert observed == ({"claimer"} if truths[GPUS[1]].conflict else set())


def test_a_pod_is_known_by_its_uid_once_the_api_servers_list_has_it(told: Told) -> None:
    late = [
        (told.scene(tick).name, one.pod_uid)
        for tick in told.ticks
        for d in tick.devices
        for one in d.holders
        if one.pod == LATE
    ]
    unknown = [uid is None for _, uid in late]
    assert unknown == sorted(unknown, reverse=True)
    assert unknown[0]
    assert not unknown[-1]
    assert {uid for _, uid in late} == {None, pod_uid(LATE)}
    known = [name for name, uid in late if uid is not None]
    assert "the API server's list has the pod" in known


def test_the_devices_of_a_gpu_that_is_cut_while_it_runs_come_and_go(told: Told) -> None:
    """That a whole GPU was cut is noticed within 10 s, that a MIG device has gone at the next tick."""
    cut = {
        gpu: [[d.uuid for d in tick.devices if d.mig and d.mig.parent_uuid == GPUS[gpu]] for tick in told.ticks]
        for gpu in (5, 6)
    }
    assert {tuple(one) for one in cut[6][:-1]} == {(mig_uuid(6, 1), mig_uuid(6, 5))}
    stages = [[], [mig_uuid(5, 1), mig_uuid(5, 2)], [mig_uuid(5, 1), mig_uuid(5, 3)]]
    assert [one for one, before in zip(cut[5], [None, *cut[5]], strict=False) if one != before] == stages
    used = [told.scene(tick).name for tick, one in zip(told.ticks, cut[5], strict=True) if one == stages[2]]
    assert used[0] == "one is destroyed, and one of another profile is in its place"


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_records_have_each_pods_part_and_the_rest(told: Told, quantity: str) -> None:
    for tick in told.ticks:
        for device in tick.devices:
            splits = told.truths(tick)[device.uuid].splits()
            parts = [(one.pod, getattr(one.parts, quantity, None)) for one in device.holders]
            found = {
                name: sum(part or 0 for one, part in parts if one == name) for name, part in parts if part is not None
            }
            rest = getattr(device.unattributed, quantity, None)
            where = (told.scene(tick).name, device.uuid)
            if quantity not in splits:
                assert (found, rest) == ({}, None), where
            else:
                assert found == _close(splits[quantity].parts), where
                assert rest == pytest.approx(splits[quantity].rest, rel=1e-9, abs=1e-9), where


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_has_each_pods_part_and_the_rest_and_of_those_that_ended_nothing(
    told: Told, profile: str, quantity: str
) -> None:
    names = PROFILES[profile]
    for tick in told.ticks:
        truths = {_key(names, one): told.truths(tick)[one.uuid].splits() for one in tick.devices}
        splits = {key: found[quantity] for key, found in truths.items() if quantity in found}
        parts = _asked(told, profile, f"gpu_pod_{quantity}", tick)
        assert {(_labelled(names, one), _pod(names, one)): one.value for one in parts} == _close(
            {(key, name): part for key, split in splits.items() for name, part in split.parts.items()}
        ), told.scene(tick).name
        rest = _asked(told, profile, f"gpu_unattributed_{quantity}", tick)
        assert {(_labelled(names, one), _pod(names, one)): one.value for one in rest} == pytest.approx(
            {(key, None): split.rest for key, split in splits.items()}, rel=1e-9, abs=1e-9
        )
        assert len(parts) == sum(len(split.parts) for split in splits.values())
        assert len(rest) == len(splits)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_devices_appear_once_and_name_a_pod_only_where_one_alone_holds_them(
    told: Told, profile: str, quantity: str
) -> None:
    names = PROFILES[profile]
    name, scale = names.device[quantity]
    for tick in told.ticks:
        truths = {_key(names, one): told.truths(tick)[one.uuid] for one in tick.devices}
        series = _asked(told, profile, name, tick)
        known = {key: truth for key, truth in truths.items() if quantity in truth.values()}
        assert {_labelled(names, one): one.value * scale for one in series} == _close(
            {key: truth.values()[quantity] for key, truth in known.items()}
        )
        assert {_labelled(names, one): _pod(names, one) for one in series} == {
            key: next(iter(truth.holders)) if len(truth.holders) == 1 else None for key, truth in known.items()
        }
        assert len(series) == len(known)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_in_promql_the_parts_and_the_rest_are_the_device_at_every_tick(told: Told, profile: str, quantity: str) -> None:
    """What is held is there, and nothing else."""
    names = PROFILES[profile]
    by = f"({names.gpu}, {names.part})"
    whole, scale = names.device[quantity]
    summed = f"sum by {by} (gpu_pod_{quantity}) + on {by} gpu_unattributed_{quantity}"
    compared = 0
    for tick in told.ticks:
        sums = {_labelled(names, one): one.value for one in _asked(told, profile, summed, tick)}
        device = {_labelled(names, one): one.value * scale for one in _asked(told, profile, whole, tick)}
        held = {_key(names, one) for one in tick.devices if one.holders}
        assert sums == _close({key: value for key, value in device.items() if key in held})
        compared += len(sums)
    assert compared > 5 * len(told.ticks) / 2


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_is_told_what_was_scaled_and_where_the_processes_contradict(told: Told, profile: str) -> None:
    names = PROFILES[profile]
    for tick in told.ticks:
        truths = {_key(names, one): told.truths(tick)[one.uuid] for one in tick.devices}
        scaled = _asked(told, profile, "gpu_split_scaled", tick)
        expected = {key: float(truth.scaled) for key, truth in truths.items() if truth.splits()}
        assert {_labelled(names, one): one.value for one in scaled} == expected
        conflicts = _asked(told, profile, "gpu_attribution_conflict", tick)
        assert {_labelled(names, one): one.labels["reason"] for one in conflicts} == {
            key: truth.conflict for key, truth in truths.items() if truth.conflict
        }
    assert {one.scaled for scene in told.scenes for one in scene.devices.values()} == {True, False}


def test_an_xid_error_is_told_once_with_the_pods_that_held_the_device_and_counted_from_then_on(told: Told) -> None:
    events = [(tick, device, event) for tick in told.ticks for device in tick.devices for event in device.events or ()]
    assert [(device.uuid, event.code, {one.pod for one in device.holders}) for _, device, event in events] == [
        (GPUS[4], 94, {"greedy-a", "greedy-b"}),
        (mig_uuid(6, 5), 31, {"mig-b", "mig-c"}),
    ]
    for tick in told.ticks:
        so_far = {(_key(OTEL, d), str(e.code)): 1.0 for t, d, e in events if t.seq <= tick.seq}
        here = {_key(OTEL, device) for device in tick.devices}
        counted = _asked(told, "otel", "gpu_xid_errors_total", tick)
        assert {(_labelled(OTEL, one), one.labels["xid"]): one.value for one in counted} == {
            key: count for key, count in so_far.items() if key[0] in here
        }


@pytest.mark.parametrize(("profile", "metric"), [("otel", "gpu_sm_active"), ("dcgm", "DCGM_FI_PROF_SM_ACTIVE")])
def test_each_gpu_and_gpu_instance_has_its_own_activity(told: Told, profile: str, metric: str) -> None:
    names = PROFILES[profile]
    for tick in told.ticks[1:]:  # it takes two samples
        truths = told.truths(tick)
        active = {_key(names, one): truths[one.uuid].sm_active for one in tick.devices}
        found = {_labelled(names, one): one.value for one in _asked(told, profile, metric, tick)}
        expected = {key: one / 100 for key, one in active.items() if one is not None}
        assert {key: found[key] for key in expected} == _close(expected), told.scene(tick).name


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_device_is_is_one_series_as_long_as_it_is_there(told: Told, profile: str) -> None:
    for tick in told.ticks:
        info = _asked(told, profile, "gpu_info", tick)
        names = PROFILES[profile]
        assert sorted(_labelled(names, one) for one in info) == sorted(_key(names, one) for one in tick.devices)
        assert {one.labels.get("processes_visible") for one in info} <= {"true", None}
