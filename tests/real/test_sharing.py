"""GPUs that pods share, from a node's drivers to Prometheus: at every tick the parts and the rest are the device.

A node plays a story (:mod:`tests.real.sharing`), once, on the stage of :mod:`tests.real.sharing_stage`; attribution;
and a sink with each of two naming profiles, into a Prometheus each.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from delivery import topic_admin
from tests.real.conftest import need
from tests.real.pipeline import read_all
from tests.real.resolver import find_compiler
from tests.real.servers import KafkaServer, PrometheusServer, Series, find_prometheus
from tests.real.sharing import GPUS, LATE_POD, NAMESPACE, Scene, Truth, mig_uuid, pod_uid
from tests.real.sharing_stage import BLIND, NODE, UNSEEN, play_all
from topics.attributed import AttributedDevice, AttributedSample
from topics.topic import decoder

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
class Played:
    """What came out: the scenes; the ticks of gpu.attributed in order, without torn ones and those in which a GPU did
    not answer in time, as on a busy machine; those of the node that sees no processes; and the receivers by naming
    profile."""

    scenes: Sequence[Scene]
    ticks: Sequence[AttributedSample]
    blind: Sequence[AttributedSample]
    receivers: Mapping[str, PrometheusServer]

    def truths(self, tick: AttributedSample) -> Mapping[str, Truth]:
        """The truth of each device of a tick when it was read."""
        scene = self.scene(tick)
        assert {device.uuid for device in tick.devices} == scene.devices.keys(), (tick.seq, scene.name)
        return {device.uuid: _as_known(scene.devices[device.uuid], device) for device in tick.devices}

    def scene(self, tick: AttributedSample) -> Scene:
        """The scene of a tick."""
        played = [
            device.metrics.get("pcie_replays_total")
            for device in tick.devices
            if device.mig is None and device.state == "ok"
        ]
        (number,) = set(played)
        return self.scenes[int(number or 0)]


def _as_known(truth: Truth, device: AttributedDevice) -> Truth:
    """The truth as far as it can be known while the API server's list lacks a pod."""
    unknown = any(holder.pod == LATE_POD and holder.pod_uid is None for holder in device.holders)
    return truth.without(LATE_POD) if unknown else truth


@pytest.fixture(scope="module")
def played(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Plays the whole story, once for all tests."""
    need(find_compiler, find_prometheus)
    kafka.empty()
    directory = tmp_path_factory.mktemp("sharing")
    with ExitStack() as servers:
        receivers = {name: servers.enter_context(PrometheusServer(directory / name)) for name in PROFILES}
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        scenes, stage = play_all(servers, directory, kafka, receivers)
        records = sorted(asyncio.run(read_all(kafka.address, "gpu.attributed")), key=lambda record: record.offset)
        samples = [decoder(AttributedSample)(record.value) for record in records]
        ticks, blind = ([tick for tick in samples if tick.node == node] for node in (NODE, BLIND))
        assert [tick.seq for tick in ticks] == list(range(1, len(ticks) + 1))
        in_time = [tick for tick in ticks if all(device.state != "timeout" for device in tick.devices)]
        played = Played(scenes, [tick for tick in in_time if not stage.torn(tick)], blind, receivers)
        yield played


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


def _query(played: Played, profile: str, expr: str, tick: AttributedSample) -> list[Series]:
    """The answer at the time of a tick, without the GPU of the node that sees no processes."""
    series_list = played.receivers[profile].query(expr, tick.ts_ms)
    return [series for series in series_list if series.labels[PROFILES[profile].gpu] != UNSEEN]


def _close(expected: Mapping[Any, float]) -> Any:
    return pytest.approx(dict(expected), rel=1e-9, abs=1e-12)


def test_every_scene_is_in_some_ticks_and_each_gpu_answers_in_all(played: Played) -> None:
    assert {tick.attribution for tick in played.ticks} == {"exact"}
    for tick in played.ticks:
        lost_uuids = {uuid for uuid, truth in played.truths(tick).items() if truth.lost}
        assert {device.uuid: device.state for device in tick.devices if device.state != "ok"} == dict.fromkeys(
            lost_uuids, "lost"
        )
    scene_names = [played.scene(tick).name for tick in played.ticks]
    assert list(dict.fromkeys(scene_names)) == [scene.name for scene in played.scenes]


def test_each_device_is_held_by_the_pods_that_have_it_and_those_that_are_observed_there(played: Played) -> None:
    for tick in played.ticks:
        truths = played.truths(tick)
        pods_by_uuid = {device.uuid: {holder.pod for holder in device.holders} for device in tick.devices}
        assert pods_by_uuid == {uuid: truth.holders for uuid, truth in truths.items()}, played.scene(tick).name
        assert {device.uuid: device.conflict for device in tick.devices} == {
            uuid: truth.conflict for uuid, truth in truths.items()
        }
        observed = {holder.pod for device in tick.devices for holder in device.holders if holder.observed}
        assert observed == ({"claimer"} if truths[GPUS[1]].conflict else set())


def test_a_pod_is_known_by_its_uid_once_the_api_servers_list_has_it(played: Played) -> None:
    late_holders = [
        (played.scene(tick).name, holder.pod_uid)
        for tick in played.ticks
        for d in tick.devices
        for holder in d.holders
        if holder.pod == LATE_POD
    ]
    unknown = [uid is None for _, uid in late_holders]
    assert unknown == sorted(unknown, reverse=True)
    assert unknown[0]
    assert not unknown[-1]
    assert {uid for _, uid in late_holders} == {None, pod_uid(LATE_POD)}
    known_names = [name for name, uid in late_holders if uid is not None]
    assert "the API server's list has the pod" in known_names


def test_the_devices_of_a_gpu_that_is_cut_while_it_runs_come_and_go_with_the_next_tick(played: Played) -> None:
    parts_by_tick = [
        {device.uuid for device in tick.devices if device.mig and device.mig.parent_uuid == GPUS[5]}
        for tick in played.ticks
    ]
    assert [uuids for uuids, before in zip(parts_by_tick, [None, *parts_by_tick], strict=False) if uuids != before] == [
        set(),
        {mig_uuid(5, 1), mig_uuid(5, 2)},
        {mig_uuid(5, 1), mig_uuid(5, 3)},
    ]
    profiles = {device.uuid: device.mig.profile for tick in played.ticks for device in tick.devices if device.mig}
    assert profiles[mig_uuid(5, 2)] == "1g.10gb"
    assert profiles[mig_uuid(5, 3)] == "3g.40gb"


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_records_have_each_pods_part_and_the_rest(played: Played, quantity: str) -> None:
    for tick in played.ticks:
        for device in tick.devices:
            splits = played.truths(tick)[device.uuid].splits()
            parts = [(holder.pod, getattr(holder.parts, quantity, None)) for holder in device.holders]
            part_by_pod = {
                name: sum(part or 0 for pod, part in parts if pod == name) for name, part in parts if part is not None
            }
            unattributed = getattr(device.unattributed, quantity, None)
            location = (played.scene(tick).name, device.uuid)
            if quantity not in splits:
                assert (part_by_pod, unattributed) == ({}, None), location
            else:
                assert part_by_pod == _close(splits[quantity].parts), location
                expected = splits[quantity].rest
                assert unattributed == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-9)), (
                    location
                )


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_has_each_pods_part_and_the_rest_and_of_those_that_ended_nothing(
    played: Played, profile: str, quantity: str
) -> None:
    names = PROFILES[profile]
    for tick in played.ticks:
        truths = {_key(names, device): played.truths(tick)[device.uuid].splits() for device in tick.devices}
        splits = {key: quantities[quantity] for key, quantities in truths.items() if quantity in quantities}
        parts = _query(played, profile, f"gpu_pod_{quantity}", tick)
        assert {(_labelled(names, part), _pod(names, part)): part.value for part in parts} == _close(
            {(key, name): part for key, split in splits.items() for name, part in split.parts.items()}
        ), played.scene(tick).name
        rest_series = _query(played, profile, f"gpu_unattributed_{quantity}", tick)
        known_rest = {(key, None): split.rest for key, split in splits.items() if split.rest is not None}
        assert {
            (_labelled(names, series), _pod(names, series)): series.value for series in rest_series
        } == pytest.approx(known_rest, rel=1e-9, abs=1e-9)
        assert len(parts) == sum(len(split.parts) for split in splits.values())
        assert len(rest_series) == len(known_rest)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_devices_appear_once_and_name_a_pod_only_if_one_alone_holds_them(
    played: Played, profile: str, quantity: str
) -> None:
    names = PROFILES[profile]
    name, scale = names.device[quantity]
    for tick in played.ticks:
        truths = {_key(names, device): played.truths(tick)[device.uuid] for device in tick.devices}
        series = _query(played, profile, name, tick)
        known_truths = {key: truth for key, truth in truths.items() if quantity in truth.values()}
        assert {_labelled(names, value_series): value_series.value * scale for value_series in series} == _close(
            {key: truth.values()[quantity] for key, truth in known_truths.items()}
        )
        assert {_labelled(names, value_series): _pod(names, value_series) for value_series in series} == {
            key: next(iter(truth.holders)) if len(truth.holders) == 1 else None for key, truth in known_truths.items()
        }
        assert len(series) == len(known_truths)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("profile", PROFILES)
def test_in_promql_the_parts_and_the_rest_are_the_device_at_every_tick(
    played: Played, profile: str, quantity: str
) -> None:
    """What is held is there if all of its parts are known, and nothing else."""
    names = PROFILES[profile]
    by = f"({names.gpu}, {names.part})"
    query, scale = names.device[quantity]
    summed = f"sum by {by} (gpu_pod_{quantity}) + on {by} gpu_unattributed_{quantity}"
    compared = 0
    for tick in played.ticks:
        sums = {_labelled(names, series): series.value for series in _query(played, profile, summed, tick)}
        device = {_labelled(names, series): series.value * scale for series in _query(played, profile, query, tick)}
        splits = {
            _key(names, device): played.truths(tick)[device.uuid].splits().get(quantity) for device in tick.devices
        }
        measured = {key for key, split in splits.items() if split is not None and split.rest is not None}
        assert sums == _close({key: value for key, value in device.items() if key in measured})
        compared += len(sums)
    assert compared > 5 * len(played.ticks) / 2


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_has_which_devices_were_scaled_and_where_processes_contradict_the_kubelet(
    played: Played, profile: str
) -> None:
    names = PROFILES[profile]
    for tick in played.ticks:
        truths = {_key(names, device): played.truths(tick)[device.uuid] for device in tick.devices}
        scaled = _query(played, profile, "gpu_split_scaled", tick)
        expected = {key: float(truth.scaled) for key, truth in truths.items() if truth.splits()}
        assert {_labelled(names, series): series.value for series in scaled} == expected
        conflicts = _query(played, profile, "gpu_attribution_conflict", tick)
        assert {_labelled(names, conflict): conflict.labels["reason"] for conflict in conflicts} == {
            key: truth.conflict for key, truth in truths.items() if truth.conflict
        }
    assert {truth.scaled for scene in played.scenes for truth in scene.devices.values()} == {True, False}


def test_an_xid_error_is_reported_once_with_the_pods_that_held_the_device_and_counted_from_then_on(
    played: Played,
) -> None:
    events = [
        (tick, device, event) for tick in played.ticks for device in tick.devices for event in device.events or ()
    ]
    assert [(device.uuid, event.code, {holder.pod for holder in device.holders}) for _, device, event in events] == [
        (GPUS[4], 94, {"greedy-a", "greedy-b"}),
        (mig_uuid(6, 5), 31, {"mig-b", "mig-c"}),
    ]
    for tick in played.ticks:
        so_far = {(_key(OTEL, d), str(e.code)): 1.0 for t, d, e in events if t.seq <= tick.seq}
        devices_here = {_key(OTEL, device) for device in tick.devices}
        counted = _query(played, "otel", "gpu_xid_errors_total", tick)
        assert {(_labelled(OTEL, series), series.labels["xid"]): series.value for series in counted} == {
            key: count for key, count in so_far.items() if key[0] in devices_here
        }


@pytest.mark.parametrize(("profile", "metric"), [("otel", "gpu_sm_active"), ("dcgm", "DCGM_FI_PROF_SM_ACTIVE")])
def test_each_gpu_and_gpu_instance_has_its_own_activity(played: Played, profile: str, metric: str) -> None:
    """It takes two samples, and a tick leaves out what the driver is slow to say, as it is on a busy machine."""
    names, active_devices = PROFILES[profile], set[str]()
    for tick in played.ticks[1:]:
        truths = played.truths(tick)
        measured = [device for device in tick.devices if "sm_active_ratio" in device.metrics]
        if len(measured) == sum(device.state == "ok" for device in tick.devices):
            active_devices.add(played.scene(tick).name)
        active = {_key(names, device): truths[device.uuid].sm_active for device in measured}
        ratios = {_labelled(names, series): series.value for series in _query(played, profile, metric, tick)}
        expected = {key: percent / 100 for key, percent in active.items() if percent is not None}
        assert {key: ratios[key] for key in expected} == _close(expected), played.scene(tick).name
    assert active_devices == {scene.name for scene in played.scenes}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_info_of_a_device_is_one_series_as_long_as_the_device_exists(played: Played, profile: str) -> None:
    """Also while it is lost; and the same one, but that at first nobody knows whether processes can be seen, and that
    MIG is switched on."""
    names = PROFILES[profile]
    infos_by_device: dict[Key, set[frozenset[tuple[str, str]]]] = defaultdict(set)
    for tick in played.ticks:
        info = _query(played, profile, "gpu_info", tick)
        assert sorted(_labelled(names, series) for series in info) == sorted(
            _key(names, device) for device in tick.devices
        )
        assert {series.labels.get("processes_visible") for series in info} <= {"true", None}
        for series in info:
            infos_by_device[_labelled(names, series)].add(frozenset(series.labels.items()))
    assert {len(labels) for key, labels in infos_by_device.items() if key != (GPUS[5], "")} <= {1, 2}
    assert len(infos_by_device[GPUS[5], ""]) <= 3


def test_how_many_pods_hold_a_device_is_reported(played: Played) -> None:
    for tick in played.ticks:
        truths = {_key(OTEL, device): played.truths(tick)[device.uuid] for device in tick.devices}
        holders = {_labelled(OTEL, series): series.value for series in _query(played, "otel", "gpu_holders", tick)}
        assert holders == {key: len(truth.holders) for key, truth in truths.items() if not truth.lost}


def test_if_processes_can_not_be_seen_nothing_is_divided_and_that_is_reported(played: Played) -> None:
    assert len(played.blind) > len(played.scenes)
    for tick in played.blind:
        (device,) = tick.devices
        assert [(holder.pod, holder.parts) for holder in device.holders] == [("unseen-0", None), ("unseen-1", None)]
        assert (device.unattributed, device.conflict, device.split_scaled) == (None, None, False)
    all_series = played.receivers["otel"].query(f'{{gpu_uuid="{UNSEEN}",gpu_index="0"}}', played.blind[-1].ts_ms)
    names = {series.labels["__name__"] for series in all_series}
    assert {"gpu_memory_used", "gpu_info", "gpu_holders"} <= names
    assert not {name for name in names if name.startswith(("gpu_pod_", "gpu_unattributed", "gpu_split", "gpu_attrib"))}
    assert not [series for series in all_series if "k8s_pod_name" in series.labels]
    assert {series.labels["processes_visible"] for series in all_series if series.labels["__name__"] == "gpu_info"} == {
        "false"
    }
