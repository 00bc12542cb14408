"""A fleet is a function of its seed and of the time since its start, and its pods behave like Kubernetes'."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from producers.simulated.fleet import (
    LONGEST_LAG_MS,
    SHORTEST_LAG_MS,
    Fleet,
    KubeletLag,
    NodeReading,
    parse_size,
)
from producers.simulated.pods import TEMPLATES, SimulatedPod
from producers.simulated.schedule import REBIRTH_MS
from tests.producers.simulated.fleet_ticks import Tick, ticks
from topics import device_ids

pytestmark = pytest.mark.slow

START_MS = 1_795_218_340_000

fleets = st.builds(
    Fleet,
    nodes=st.integers(1, 4),
    gpus=st.sampled_from([1, 2, 4]),
    cluster=st.sampled_from(["default", "prod-1"]),
    seed=st.integers(0, 1000),
    pod_life_s=st.sampled_from([1.5, 20.0, 300.0]),
)


def relative(tick: Tick, start_ms: int) -> tuple[Any, ...]:
    """All of a tick, with its times counted from the start."""
    news = [(change.at_ms - start_ms, [{**pod, **_ages(pod, start_ms)} for pod in change.pods]) for change in tick.news]
    return (tick.node.name, tick.seq, tick.ts_ms - start_ms, _since(tick.reading, start_ms), news)


def _since(reading: NodeReading, start_ms: int) -> NodeReading:
    """A reading with the times of its events counted from the start."""
    return reading._replace(
        devices=[{**device, "events": _events_since_start(device, start_ms)} for device in reading.devices],
        at_events={at_ms - start_ms: containers for at_ms, containers in reading.at_events.items()},
    )


def _events_since_start(device: dict[str, Any], start_ms: int) -> list[dict[str, Any]]:
    return [{**event, "ts_ms": event["ts_ms"] - start_ms} for event in device.get("events", ())]


def _ages(pod: dict[str, Any], start_ms: int) -> dict[str, int]:
    return {key: pod[key] - start_ms for key in ("started_ms", "ended_ms") if key in pod}


def _pods(fleet: Fleet, until_ms: int) -> list[SimulatedPod]:
    """Every pod that starts before ``until_ms``."""
    return [pod for index in range(fleet.nodes) for pod in fleet.node(index)._schedule.advance(until_ms)]


@given(fleets, st.integers(10**12, 10**13))
def test_the_same_seed_is_the_same_fleet_whenever_it_starts(fleet: Fleet, start_ms: int) -> None:
    first = [relative(tick, START_MS) for tick in ticks(fleet, START_MS, 1000, 8)]
    second = [relative(tick, start_ms) for tick in ticks(fleet, start_ms, 1000, 8)]

    assert first == second


@given(fleets, st.lists(st.integers(0, 60_000), min_size=1, max_size=20))
def test_a_reading_does_not_depend_on_earlier_readings(fleet: Fleet, times: list[int]) -> None:
    node = fleet.node(0)
    answers = [(at_ms, node.read(at_ms)) for at_ms in sorted(times)]

    for at_ms, answer in answers:
        assert _without_events(fleet.node(0).read(at_ms)) == _without_events(answer)


def _without_events(reading: NodeReading) -> NodeReading:
    """What a reading has, whenever the one before it was made: all but its events."""
    devices = [{**device, "events": None} for device in reading.devices]
    return reading._replace(devices=devices, at_events={})


@given(fleets)
def test_another_cluster_or_seed_has_no_name_in_common(fleet: Fleet) -> None:
    others = [dataclasses.replace(fleet, cluster="elsewhere"), dataclasses.replace(fleet, seed=fleet.seed + 1)]
    identities = _identities(fleet)

    for other_fleet in others:
        assert not identities & _identities(other_fleet)


def _identities(fleet: Fleet) -> set[str]:
    pods = _pods(fleet, 20_000)
    uuids = {device.uuid for index in range(fleet.nodes) for device in fleet.node(index).machine.devices}
    return uuids | {pod.name for pod in pods} | {pod.uid for pod in pods}


@given(fleets)
@example(Fleet(4, 8, cluster="prod-1", seed=877, pod_life_s=1.5))  # a fleet in which random suffixes would collide
def test_no_unit_is_held_twice_and_no_name_is_two_pods_at_a_time(fleet: Fleet) -> None:
    pods = _pods(fleet, 200_000)
    by_unit: dict[str, list[SimulatedPod]] = {}
    by_name: dict[tuple[str, str], list[SimulatedPod]] = {}
    for pod in pods:
        by_name.setdefault((pod.namespace, pod.name), []).append(pod)
        for unit in (unit for container in pod.containers for unit in container.units):
            by_unit.setdefault(unit.device_id, []).append(pod)

    assert len({pod.uid for pod in pods}) == len(pods)
    assert all(before.end_ms <= after.start_ms for lives in by_unit.values() for before, after in _pairs(lives))
    for lives in by_name.values():
        assert all(
            after.start_ms - before.end_ms >= REBIRTH_MS[0] > 2 * LONGEST_LAG_MS for before, after in _pairs(lives)
        )


def _pairs(lives: list[SimulatedPod]) -> Sequence[tuple[SimulatedPod, SimulatedPod]]:
    return list(itertools.pairwise(sorted(lives, key=lambda pod: pod.start_ms)))


def test_a_fleet_has_every_kind_of_workload_and_of_node() -> None:
    pods = _pods(Fleet(5, 8, pod_life_s=30), 120_000)

    assert {pod.template.kind for pod in pods} == {template.kind for template in TEMPLATES}
    assert any(len(pod.containers) > 1 for pod in pods)
    assert any(pod.start_ms < 0 <= pod.end_ms for pod in pods)
    resources = {unit.resource for pod in pods for container in pod.containers for unit in container.units}
    assert {"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"} <= resources


def test_pods_are_named_and_owned_as_kubernetes_does_it() -> None:
    pods = {pod.template.kind: pod for pod in _pods(Fleet(5, 8, pod_life_s=30), 120_000)}
    named = {kind: ([owner["kind"] for owner in pod.owners], pod.name) for kind, pod in pods.items()}
    five, base = "[bcdfghjklmnpqrstvwxz2456789]{5}", "[a-z0-9-]+"

    assert {kind: owners for kind, (owners, _) in named.items()} == {
        "Deployment": ["ReplicaSet", "Deployment"],
        "Job": ["Job"],
        "CronJob": ["Job", "CronJob"],
        "StatefulSet": ["StatefulSet"],
        "DaemonSet": ["DaemonSet"],
        "RayCluster": ["RayCluster"],
        "Pod": [],
    }
    assert re.fullmatch(rf"{base}-[bcdf4-9]{{6,10}}-{five}", named["Deployment"][1])
    assert re.fullmatch(rf"{base}-{five}-{five}", named["Job"][1])
    assert re.fullmatch(rf"{base}-[0-9]{{8}}-{five}", named["CronJob"][1])
    assert re.fullmatch(rf"{base}-[0-9]+", named["StatefulSet"][1])
    assert pods["Pod"].workload == {"kind": "Pod", "name": pods["Pod"].name}
    assert pods["Job"].workload["kind"] == "Job"
    assert pods["CronJob"].workload["kind"] == "CronJob"


def test_a_stateful_pod_comes_back_under_its_name_with_another_uid() -> None:
    lives: dict[str, list[str]] = {}
    for pod in _pods(Fleet(2, 8, pod_life_s=5), 60_000):
        if pod.template.kind == "StatefulSet":
            lives.setdefault(pod.name, []).append(pod.uid)

    assert lives
    assert all(len(uids) == len(set(uids)) > 1 for uids in lives.values())


def test_pods_begin_and_end_off_the_ticks() -> None:
    pods = _pods(Fleet(2, 8, pod_life_s=5), 60_000)

    assert len({pod.start_ms % 1000 for pod in pods}) > len(pods) / 3
    assert len({pod.end_ms % 1000 for pod in pods}) > len(pods) / 3


def test_pods_live_about_as_long_as_the_setting_says() -> None:
    pods = [pod for pod in _pods(Fleet(20, 8, pod_life_s=10), 300_000) if pod.start_ms < 200_000]
    lives_s = [(pod.end_ms - pod.start_ms) / 1000 / pod.template.life for pod in pods]

    assert sum(lives_s) / len(lives_s) == pytest.approx(10, rel=0.15)


def test_the_kubelet_lags_within_its_bounds_and_never_goes_back() -> None:
    lag = KubeletLag("default", 1, 0)
    seen_times = [(at_ms, lag.seen_ms(at_ms)) for at_ms in range(0, 200_000, 7)]

    assert all(SHORTEST_LAG_MS - 1 <= at_ms - seen_ms <= LONGEST_LAG_MS + 1 for at_ms, seen_ms in seen_times)
    assert all(before[1] <= after[1] for before, after in itertools.pairwise(seen_times))
    lags_ms = [at_ms - seen_ms for at_ms, seen_ms in seen_times]
    assert max(lags_ms) - min(lags_ms) > 500


@given(fleets)
def test_the_kubelet_reports_what_was_true_a_moment_ago(fleet: Fleet) -> None:
    pods = _pods(fleet, 40_000)
    seen_ms = [KubeletLag(fleet.cluster, fleet.seed, index).seen_ms for index in range(fleet.nodes)]
    for tick in ticks(fleet, START_MS, 1000, 20):
        at_ms = tick.ts_ms - START_MS
        index = int(tick.node.name.removeprefix("sim-"))
        for time_ms, device_rows in ((at_ms, tick.reading.holders), (seen_ms[index](at_ms), tick.reading.reported)):
            alive = {pod.uid for pod in pods if pod.start_ms <= time_ms < pod.end_ms}
            assert {row["pod_uid"] for rows in device_rows for row in rows} <= alive


@given(fleets)
def test_the_containers_of_a_reading_agree_with_its_reported_holders(fleet: Fleet) -> None:
    for tick in ticks(fleet, START_MS, 1000, 5):
        resolved: dict[str, set[tuple[str, str, str]]] = {device["uuid"]: set() for device in tick.reading.devices}
        for row in tick.reading.containers:
            for device_id in row["device_ids"]:
                uuid = device_ids.parse(device_id).uuid
                assert uuid is not None
                resolved[uuid].add((row["namespace"], row["pod"], row["container"]))
        reported = [
            {(row["namespace"], row["pod"], row["container"]) for row in rows} for rows in tick.reading.reported
        ]
        assert list(resolved.values()) == reported
        assert all(
            len(rows) == len(containers) for rows, containers in zip(tick.reading.reported, reported, strict=True)
        )


def test_the_api_server_knows_a_pod_within_1500_ms_and_keeps_it_for_30_minutes_after_its_end() -> None:
    fleet = Fleet(1, 2, pod_life_s=60)
    node, pods = fleet.node(0), _pods(fleet, 4_000_000)
    changes = [change for at_ms in range(0, 4_000_000, 1000) for change in node.pod_changes(at_ms, START_MS)]
    first = {uid: at_ms for at_ms, rows in reversed(changes) for uid in (row["uid"] for row in rows)}
    ended = {row["uid"]: at_ms for at_ms, rows in reversed(changes) for row in rows if "ended_ms" in row}
    last = {uid: at_ms for at_ms, rows in changes for uid in (row["uid"] for row in rows)}
    lived = [pod for pod in pods if pod.start_ms > 0 and pod.end_ms < 2_000_000]

    assert len(lived) > 20
    for pod in lived:
        assert 0 <= first[pod.uid] - pod.start_ms <= 1500
        assert pod.end_ms <= ended[pod.uid] <= max(pod.end_ms, pod.start_ms) + 1500
        assert last[pod.uid] < pod.end_ms + 30 * 60_000 < 4_000_000
        assert last[pod.uid] > pod.end_ms + 25 * 60_000
    assert [at_ms for at_ms, _ in changes] == sorted({at_ms for at_ms, _ in changes})


@pytest.mark.parametrize("text", ["", "8", "0x8", "4x0", "4x17", "4x8x2", "-1x8", "4 x 8", "x"])
def test_a_fleet_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NODESxGPUS"):
        parse_size(text)


def test_a_fleet_is_nodes_by_gpus() -> None:
    assert parse_size("100x8") == (100, 8)


@given(fleets, st.sampled_from([100, 1000, 10_000]))
def test_ticks_come_in_order_and_each_node_keeps_its_phase(fleet: Fleet, interval_ms: int) -> None:
    all_ticks = list(ticks(fleet, START_MS, interval_ms, 3))
    phases = {tick.node.name: set[int]() for tick in all_ticks}
    for tick in all_ticks:
        phases[tick.node.name].add((tick.ts_ms - START_MS) % interval_ms)

    assert [tick.ts_ms for tick in all_ticks] == sorted(tick.ts_ms for tick in all_ticks)
    assert len(all_ticks) == 3 * fleet.nodes == sum(tick.seq for tick in all_ticks) / 2
    assert all(len(phase) == 1 for phase in phases.values())


def test_a_story_has_an_xid_error_and_a_lost_gpu_in_the_first_minute_and_is_otherwise_the_same_fleet() -> None:
    plain, with_story = Fleet(2, 8).node(0), Fleet(2, 8, story=True).node(0)
    events: list[tuple[int, int, int]] = []
    lost: dict[int, list[int]] = {}
    for second in range(1, 91):
        usual, reading = plain.read(second * 1000), with_story.read(second * 1000)
        assert reading.reported == usual.reported
        for device in reading.devices:
            events += [(second, device["index"], event["code"]) for event in device.get("events", ())]
            if device["state"] == "lost":
                lost.setdefault(device["index"], []).append(second)
                assert device["metrics"] == {}

    (first, _, page_fault), (second, falls, off_the_bus) = events
    assert (first, page_fault, second, off_the_bus) == (25, 31, 34, 79)
    assert lost == {falls: list(range(35, 75))}
    other_node = Fleet(2, 8, story=True).node(1).read(40_000)
    assert all(device["state"] == "ok" for device in other_node.devices)


@pytest.mark.parametrize(("gpus", "seed"), [(1, 10), (2, 7)])
def test_the_story_happens_also_if_no_gpu_works_at_its_time(gpus: int, seed: int) -> None:
    node = Fleet(1, gpus, seed=seed, story=True).node(0)
    devices = [device for second in range(1, 61) for device in node.read(second * 1000).devices]
    assert [event["code"] for device in devices for event in device.get("events", ())] == [31, 79]
    assert any(device["state"] == "lost" for device in devices)
