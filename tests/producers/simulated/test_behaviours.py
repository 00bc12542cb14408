"""A behaviour changes all that NVML reports of its GPUs, and the truth says which behaviour it is, and since when."""

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from producers.simulated.behaviours import (
    BEHAVIOURS,
    SYNCHRONOUS,
    Behaviour,
    Role,
    Round,
    Story,
    attempts,
    behaviour_names,
)
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from producers.simulated.fleet import Fleet, SimulatedNode
from producers.simulated.hardware import MODELS
from producers.simulated.physics import SLOWDOWN_CELSIUS
from producers.simulated.pods import CAST
from tests.producers.fakes import FakeSender
from tests.producers.simulated.test_component import run

pytestmark = pytest.mark.slow

HOUR_MS = 3_600_000
BY_APP = {template.name: behaviour for behaviour, template in CAST.items()}
MODEL = {model.name: model for model in MODELS}


class ObservedGpu(NamedTuple):
    """A GPU at one time, and what its pod did."""

    at_ms: int
    node: str
    uuid: str
    model: str
    behaviour: str
    cause: str
    since_ms: int
    workload: str
    metrics: dict[str, float]
    processes: list[dict[str, Any]]


@cache
def observed(behaviour: Behaviour) -> tuple[ObservedGpu, ...]:
    """The GPUs of a behaviour every 5 s, in the first quarter of an hour of some fleets."""
    return tuple(gpu for story_behaviour, gpu in _everything() if story_behaviour == behaviour)


@cache
def _everything() -> list[tuple[Behaviour, ObservedGpu]]:
    observed_gpus: list[tuple[Behaviour, ObservedGpu]] = []
    for seed in (3, 4, 5):
        fleet = Fleet(4, 8, seed=seed, behaviours=BEHAVIOURS)
        for node in (fleet.node(index) for index in (0, 2, 3)):
            for at_ms in range(0, 900_000, 5_000):
                observed_gpus += _read(node, at_ms)
    return observed_gpus


def _read(node: SimulatedNode, at_ms: int) -> Iterator[tuple[Behaviour, ObservedGpu]]:
    reading = node.read(at_ms)
    for device, labels, holders in zip(reading.devices, node.behaviours(at_ms), reading.holders, strict=True):
        behaviour = BY_APP.get(holders[0]["labels"]["app"]) if holders else None
        if behaviour is not None:
            (label,), (holder,) = labels, holders
            gpu = ObservedGpu(
                at_ms, node.name, device["uuid"], device["model"], label["behaviour"], label.get("cause", ""),
                label["since_ms"], holder["workload"]["name"], device["metrics"], device["processes"],
            )  # fmt: skip
            yield behaviour, gpu


def test_every_ten_nodes_have_each_behaviour_once_on_gpus_that_nobody_else_gets() -> None:
    fleet = Fleet(23, 8, pod_life_s=3600, behaviours=BEHAVIOURS)
    roles = set()
    for index in range(23):
        lives: dict[str, list[tuple[int, int]]] = {}
        for pod in fleet.node(index)._schedule.advance(12 * HOUR_MS):
            roles |= {pod.story.role} if pod.story is not None else set()
            for unit in (unit for container in pod.containers for unit in container.units):
                lives.setdefault(unit.device_id, []).append((pod.start_ms, pod.end_ms))
        assert all(a[1] <= b[0] for spans in lives.values() for a, b in itertools.pairwise(sorted(spans)))

    assert Counter(role.behaviour for role in roles if role.worker == 0) == dict.fromkeys(BEHAVIOURS, 3)
    assert {role.block for role in roles if role.behaviour in SYNCHRONOUS and role.worker == 1} == {0, 1}


def test_all_ranks_of_a_job_on_several_nodes_hang_at_the_same_time_and_look_busy() -> None:
    hung = [gpu for gpu in observed("hung") if gpu.behaviour == "hung"]
    jobs = {gpu.workload for gpu in hung}

    assert len(jobs) > 2
    for job in jobs:
        assert len({gpu.node for gpu in hung if gpu.workload == job}) == 2
        assert len({gpu.uuid for gpu in hung if gpu.workload == job}) == 6
        assert len({gpu.since_ms for gpu in hung if gpu.workload == job}) == 1
    for gpu in (gpu for gpu in hung if gpu.at_ms - gpu.since_ms > 60_000):
        metrics, limit = gpu.metrics, MODEL[gpu.model].power_limit_watts
        assert metrics["gpu_utilization_ratio"] == metrics["graphics_engine_active_ratio"] == 1
        assert metrics["power_watts"] < 0.25 * limit
        assert metrics["sm_active_ratio"] < 0.25
        assert metrics["tensor_active_ratio"] == metrics["dram_active_ratio"] == 0
        assert metrics["nvlink_tx_bytes_per_second"] == 0
        assert metrics["sm_clock_hz"] > 0.8 * metrics["max_sm_clock_hz"]
        assert metrics["clock_event_reasons"] == 0
        assert metrics["temperature_celsius"] < 50
        assert metrics["memory_used_bytes"] > 0.7 * metrics["memory_total_bytes"]
        assert gpu.processes[0]["sm_utilization_ratio"] == 1


def test_before_it_hangs_a_job_works() -> None:
    before = [gpu.metrics for gpu in observed("hung") if gpu.behaviour == "healthy"]
    steady = [metrics for metrics in before if metrics["gpu_utilization_ratio"] > 0.9]

    assert len(steady) > 0.8 * len(before)
    assert min(metrics["power_watts"] for metrics in steady) > 0.6 * 700
    assert min(metrics["tensor_active_ratio"] for metrics in steady) > 0.1


def _slow_and_waiting(cause: str) -> tuple[list[ObservedGpu], list[ObservedGpu]]:
    """The stragglers, and the GPUs that wait for them: after two minutes, and while no checkpoint is written."""
    settled = [
        gpu
        for gpu in observed("straggler")
        if gpu.cause == cause and gpu.at_ms - gpu.since_ms > 120_000 and gpu.metrics["gpu_utilization_ratio"] > 0.1
    ]
    slow = [gpu for gpu in settled if gpu.behaviour == "straggler"]
    return slow, [gpu for gpu in settled if gpu.behaviour == "waiting"]


def _median(key: str, gpus: list[ObservedGpu]) -> float:
    return statistics.median(gpu.metrics[key] for gpu in gpus)


@pytest.mark.parametrize("cause", ["clock", "thermal", "host"])
def test_those_who_wait_for_a_straggler_are_busy_and_do_less(cause: str) -> None:
    slow, waiting = _slow_and_waiting(cause)
    well = [gpu for gpu in observed("straggler") if gpu.behaviour == "healthy"]

    for job in {gpu.workload for gpu in slow}:
        assert len({gpu.uuid for gpu in slow if gpu.workload == job}) == 1
        assert len({gpu.uuid for gpu in waiting if gpu.workload == job}) == 5
    assert {gpu.metrics["gpu_utilization_ratio"] for gpu in waiting} == {1}
    for key in ("tensor_active_ratio", "sm_active_ratio", "power_watts"):
        assert _median(key, waiting) < 0.95 * _median(key, well)
    assert _median("sm_clock_hz", waiting) == pytest.approx(_median("sm_clock_hz", well), rel=0.05)


@pytest.mark.parametrize("cause", ["clock", "thermal"])
def test_a_straggler_with_a_low_clock_computes_all_the_time_and_says_why_its_clock_is_low(cause: str) -> None:
    slow, waiting = _slow_and_waiting(cause)

    assert _median("sm_clock_hz", slow) < 0.85 * _median("sm_clock_hz", waiting)
    assert _median("sm_active_ratio", slow) > _median("sm_active_ratio", waiting)
    assert _median("power_watts", slow) < _median("power_watts", waiting)
    reasons = Counter(gpu.metrics["clock_event_reasons"] for gpu in slow)
    assert reasons.most_common(1)[0][0] == {"clock": 0x2, "thermal": 0x20}[cause]


def test_a_straggler_with_a_slow_host_has_gaps() -> None:
    slow, waiting = _slow_and_waiting("host")

    assert _median("gpu_utilization_ratio", slow) < 0.9
    assert _median("sm_clock_hz", slow) == pytest.approx(_median("sm_clock_hz", waiting), rel=0.05)
    assert _median("sm_active_ratio", slow) < _median("sm_active_ratio", waiting)


@pytest.mark.parametrize("behaviour", ["throttled", "straggler"])
def test_heat_lowers_the_clock_counts_as_a_violation_and_shows_in_the_temperature(behaviour: Behaviour) -> None:
    slowed_down = [gpu for gpu in observed(behaviour) if gpu.cause == "thermal" and gpu.behaviour == behaviour]
    by_gpu: dict[tuple[str, str], list[ObservedGpu]] = {}
    for gpu in slowed_down:
        by_gpu.setdefault((gpu.uuid, gpu.workload), []).append(gpu)

    assert by_gpu
    for rows in by_gpu.values():
        for before, after in itertools.pairwise(rows):
            metrics = before.metrics
            slowed = int(metrics["clock_event_reasons"]) & 0x20
            counted = after.metrics["thermal_violation_seconds_total"] - metrics["thermal_violation_seconds_total"]
            if metrics["temperature_celsius"] > SLOWDOWN_CELSIUS and metrics["gpu_utilization_ratio"] > 0.1:
                assert slowed
                assert metrics["sm_clock_hz"] < 0.85 * metrics["max_sm_clock_hz"]
                assert counted == pytest.approx(5, abs=1 if after.metrics["gpu_utilization_ratio"] < 0.1 else 0.01)
            if metrics["temperature_celsius"] < SLOWDOWN_CELSIUS - 1:
                assert not slowed
                assert metrics["sm_clock_hz"] > 0.85 * metrics["max_sm_clock_hz"]


def test_a_power_brake_halves_the_clock_at_once() -> None:
    braked = [gpu for gpu in observed("throttled") if gpu.cause == "power-brake" and gpu.behaviour == "throttled"]
    braked = [gpu for gpu in braked if gpu.at_ms - gpu.since_ms > 1_000]
    well = [gpu for gpu in observed("throttled") if gpu.behaviour == "healthy" and gpu.at_ms - gpu.since_ms > 20_000]

    assert {int(gpu.metrics["clock_event_reasons"]) & ~0x1 for gpu in braked} == {0x88}
    assert max(gpu.metrics["sm_clock_hz"] / gpu.metrics["max_sm_clock_hz"] for gpu in braked) <= 0.5
    assert _median("power_watts", braked) < 0.6 * _median("power_watts", well)


@pytest.mark.parametrize(
    ("behaviour", "use", "memory"),
    [
        ("loader-bound", (0.15, 0.35), 0.9),
        ("notebook", (0.0, 0.08), 0.3),
        ("hoarder", (0.0, 0.01), 0.88),
        ("underused", (0.03, 0.07), 0.25),
    ],
)
def test_what_is_hardly_used_has_its_memory_all_the_time(
    behaviour: Behaviour, use: tuple[float, float], memory: float
) -> None:
    settled = [gpu for gpu in observed(behaviour) if gpu.at_ms - gpu.since_ms > 15_000]

    assert use[0] <= statistics.mean(gpu.metrics["gpu_utilization_ratio"] for gpu in settled) <= use[1]
    assert min(gpu.metrics["memory_used_bytes"] / gpu.metrics["memory_total_bytes"] for gpu in settled) > memory


def test_a_notebook_runs_a_cell_every_fourteen_minutes() -> None:
    story = Story(Role("notebook", 0, 1), Round(0, 0, 0, 8 * HOUR_MS, "", 0, 0.5, 0.3))
    ages = range(5_000, 6 * HOUR_MS, 1_000)
    works = [ms for ms in ages if (doing := story.doing(0, ms, ms, 0.5)) is not None and doing.use > 0.01]
    begins = [after for before, after in itertools.pairwise(works) if after - before > 1_000]

    assert len(begins) == 25
    assert {b - a for a, b in itertools.pairwise(begins)} == {14 * 60_000}
    assert 20 <= len(works) / len(begins) <= 60


def test_a_pod_that_fails_again_and_again_holds_its_gpu_and_is_started_later_each_time() -> None:
    in_crash_loop = observed("crash-loop")
    idle = [gpu for gpu in in_crash_loop if not gpu.processes]

    assert len(idle) > 0.7 * len(in_crash_loop)
    assert {gpu.metrics["gpu_utilization_ratio"] for gpu in idle} == {0}
    assert max(gpu.metrics["memory_used_bytes"] for gpu in idle) < 64 * 1024 * 1024
    begins = [gpu.start_ms for gpu in itertools.islice(attempts(), 8)]
    assert [(b - a) // 1000 for a, b in itertools.pairwise(begins)] == [35, 45, 65, 105, 185, 325, 325]


def test_the_api_server_reports_why_a_pod_that_fails_again_and_again_waits() -> None:
    node = Fleet(4, 8, behaviours=("crash-loop",)).node(2)
    news = [
        pod for change in node.pod_changes(1_200_000, 0) for pod in change.pods if pod["labels"]["app"] == "caption-api"
    ]
    states = [state for state, _ in itertools.groupby((pod.get("waiting"), pod.get("restarts")) for pod in news)]
    waits = [int(restarts or 0) for reason, restarts in states if reason == "CrashLoopBackOff"]

    assert len(waits) > 4
    assert waits == list(range(waits[0], waits[0] + len(waits)))
    assert all((before == (None, None)) != (after == (None, None)) for before, after in itertools.pairwise(states))


async def test_the_truth_says_what_each_pod_did_with_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    settings = SimulatedSettings(
        kafka="127.0.0.1:1", fleet="4x8", interval_s=0.02, stop_after_ticks=2, behaviours=BEHAVIOURS, truth=path
    )
    await run(SimulatedFleet(settings, sender=FakeSender(prompt=True)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    for row in rows:
        holders = {(holder["namespace"], holder["pod"], holder["pod_uid"]) for holder in row["holders"]}
        assert {(label["namespace"], label["pod"], label["pod_uid"]) for label in row["behaviours"]} == holders
        assert all(label["since_ms"] <= row["ts_ms"] for label in row["behaviours"])
    behaviours = {label["behaviour"] for row in rows for label in row["behaviours"]}
    assert {"healthy", "loader-bound", "notebook", "hoarder", "crash-loop", "underused"} <= behaviours


def test_a_fleet_without_room_for_a_behaviour_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--behaviours hung: 1x1 has no GPUs for that; a fleet of 4x8 has for all"):
        Fleet(1, 1, behaviours=("hung",))
    with pytest.raises(ValueError, match=r"'broken' is no behaviour: write some of hung, .*, or all"):
        behaviour_names("hung,broken")
    assert behaviour_names("all") == BEHAVIOURS
    assert behaviour_names("underused, hung") == ("hung", "underused")
