"""What goes wrong in a fleet shows in all that NVML says of it, and the truth says what it is and since when."""

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


class Seen(NamedTuple):
    """A GPU at a time, and what its pod did."""

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
def seen(behaviour: Behaviour) -> tuple[Seen, ...]:
    """The GPUs of a behaviour every 5 s, in the first quarter of an hour of some fleets."""
    return tuple(one for of, one in _everything() if of == behaviour)


@cache
def _everything() -> list[tuple[Behaviour, Seen]]:
    found: list[tuple[Behaviour, Seen]] = []
    for seed in range(1, 6):
        fleet = Fleet(4, 8, seed=seed, behaviours=BEHAVIOURS)
        for node in (fleet.node(index) for index in (0, 2, 3)):
            for at_ms in range(0, 900_000, 5_000):
                found += _read(node, at_ms)
    return found


def _read(node: SimulatedNode, at_ms: int) -> Iterator[tuple[Behaviour, Seen]]:
    reading = node.read(at_ms)
    for device, labels, holders in zip(reading.devices, node.behaviours(at_ms), reading.holders, strict=True):
        behaviour = BY_APP.get(holders[0]["labels"]["app"]) if holders else None
        if behaviour is not None:
            (label,), (holder,) = labels, holders
            one = Seen(
                at_ms, node.name, device["uuid"], device["model"], label["behaviour"], label.get("cause", ""),
                label["since_ms"], holder["workload"]["name"], device["metrics"], device["processes"],
            )  # fmt: skip
            yield behaviour, one


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
    found = [one for one in seen("hung") if one.behaviour == "hung"]
    jobs = {one.workload for one in found}

    assert len(jobs) > 2
    for job in jobs:
        assert len({one.node for one in found if one.workload == job}) == 2
        assert len({one.uuid for one in found if one.workload == job}) == 6
        assert len({one.since_ms for one in found if one.workload == job}) == 1
    for one in (one for one in found if one.at_ms - one.since_ms > 60_000):
        metrics, limit = one.metrics, MODEL[one.model].power_limit_watts
        assert metrics["gpu_utilization_ratio"] == metrics["graphics_engine_active_ratio"] == 1
        assert metrics["power_watts"] < 0.25 * limit
        assert metrics["sm_active_ratio"] < 0.25
        assert metrics["tensor_active_ratio"] == metrics["dram_active_ratio"] == 0
        assert metrics["nvlink_tx_bytes_per_second"] == 0
        assert metrics["sm_clock_hz"] > 0.8 * metrics["max_sm_clock_hz"]
        assert metrics["clock_event_reasons"] == 0
        assert metrics["temperature_celsius"] < 50
        assert metrics["memory_used_bytes"] > 0.7 * metrics["memory_total_bytes"]
        assert one.processes[0]["sm_utilization_ratio"] == 1


def test_before_it_hangs_a_job_works() -> None:
    before = [one.metrics for one in seen("hung") if one.behaviour == "healthy"]
    steady = [metrics for metrics in before if metrics["gpu_utilization_ratio"] > 0.9]

    assert len(steady) > 0.8 * len(before)
    assert min(metrics["power_watts"] for metrics in steady) > 0.6 * 700
    assert min(metrics["tensor_active_ratio"] for metrics in steady) > 0.1


def _of_job(cause: str) -> tuple[list[Seen], list[Seen]]:
    """The straggler of a job, and those who wait for it, once that is settled and no checkpoint is written."""
    found = [
        one
        for one in seen("straggler")
        if one.cause == cause and one.at_ms - one.since_ms > 120_000 and one.metrics["gpu_utilization_ratio"] > 0.1
    ]
    slow = [one for one in found if one.behaviour == "straggler"]
    return slow, [one for one in found if one.behaviour == "waiting"]


def _median(key: str, found: list[Seen]) -> float:
    return statistics.median(one.metrics[key] for one in found)


@pytest.mark.parametrize("cause", ["clock", "thermal", "host"])
def test_those_who_wait_for_a_straggler_are_busy_and_do_less(cause: str) -> None:
    slow, waiting = _of_job(cause)
    well = [one for one in seen("straggler") if one.behaviour == "healthy"]

    for job in {one.workload for one in slow}:
        assert len({one.uuid for one in slow if one.workload == job}) == 1
        assert len({one.uuid for one in waiting if one.workload == job}) == 5
    assert {one.metrics["gpu_utilization_ratio"] for one in waiting} == {1}
    for key in ("tensor_active_ratio", "sm_active_ratio", "power_watts"):
        assert _median(key, waiting) < 0.95 * _median(key, well)
    assert _median("sm_clock_hz", waiting) == pytest.approx(_median("sm_clock_hz", well), rel=0.05)


@pytest.mark.parametrize("cause", ["clock", "thermal"])
def test_a_straggler_with_a_low_clock_computes_all_the_time_and_says_why_its_clock_is_low(cause: str) -> None:
    slow, waiting = _of_job(cause)

    assert _median("sm_clock_hz", slow) < 0.85 * _median("sm_clock_hz", waiting)
    assert _median("sm_active_ratio", slow) > _median("sm_active_ratio", waiting)
    assert _median("power_watts", slow) < _median("power_watts", waiting)
    reasons = Counter(one.metrics["clock_event_reasons"] for one in slow)
    assert reasons.most_common(1)[0][0] == {"clock": 0x2, "thermal": 0x20}[cause]


def test_a_straggler_with_a_slow_host_has_gaps() -> None:
    slow, waiting = _of_job("host")

    assert _median("gpu_utilization_ratio", slow) < 0.9
    assert _median("sm_clock_hz", slow) == pytest.approx(_median("sm_clock_hz", waiting), rel=0.05)
    assert _median("sm_active_ratio", slow) < _median("sm_active_ratio", waiting)


@pytest.mark.parametrize("behaviour", ["throttled", "straggler"])
def test_heat_lowers_the_clock_counts_as_a_violation_and_shows_in_the_temperature(behaviour: Behaviour) -> None:
    found = [one for one in seen(behaviour) if one.cause == "thermal" and one.behaviour == behaviour]
    by_gpu: dict[tuple[str, str], list[Seen]] = {}
    for one in found:
        by_gpu.setdefault((one.uuid, one.workload), []).append(one)

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
    braked = [one for one in seen("throttled") if one.cause == "power-brake" and one.behaviour == "throttled"]
    braked = [one for one in braked if one.at_ms - one.since_ms > 1_000]
    well = [one for one in seen("throttled") if one.behaviour == "healthy" and one.at_ms - one.since_ms > 20_000]

    assert {int(one.metrics["clock_event_reasons"]) & ~0x1 for one in braked} == {0x88}
    assert max(one.metrics["sm_clock_hz"] / one.metrics["max_sm_clock_hz"] for one in braked) <= 0.5
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
    found = [one for one in seen(behaviour) if one.at_ms - one.since_ms > 15_000]

    assert use[0] <= statistics.mean(one.metrics["gpu_utilization_ratio"] for one in found) <= use[1]
    assert min(one.metrics["memory_used_bytes"] / one.metrics["memory_total_bytes"] for one in found) > memory


def test_a_notebook_runs_a_cell_every_fourteen_minutes() -> None:
    story = Story(Role("notebook", 0, 1), Round(0, 0, 0, 8 * HOUR_MS, "", 0, 0.5, 0.3))
    ages = range(5_000, 6 * HOUR_MS, 1_000)
    works = [ms for ms in ages if (doing := story.doing(0, ms, ms, 0.5)) is not None and doing.use > 0.01]
    begins = [after for before, after in itertools.pairwise(works) if after - before > 1_000]

    assert len(begins) == 25
    assert {b - a for a, b in itertools.pairwise(begins)} == {14 * 60_000}
    assert 20 <= len(works) / len(begins) <= 60


def test_a_pod_that_fails_again_and_again_holds_its_gpu_and_is_started_later_each_time() -> None:
    found = seen("crash-loop")
    idle = [one for one in found if not one.processes]

    assert len(idle) > 0.7 * len(found)
    assert {one.metrics["gpu_utilization_ratio"] for one in idle} == {0}
    assert max(one.metrics["memory_used_bytes"] for one in idle) < 64 * 1024 * 1024
    begins = [one.start_ms for one in itertools.islice(attempts(), 8)]
    assert [(b - a) // 1000 for a, b in itertools.pairwise(begins)] == [35, 45, 65, 105, 185, 325, 325]


def test_the_api_server_says_of_a_pod_that_fails_again_and_again_why_it_waits() -> None:
    node = Fleet(4, 8, behaviours=("crash-loop",)).node(2)
    news = [
        pod for known in node.pod_changes(1_200_000, 0) for pod in known.pods if pod["labels"]["app"] == "caption-api"
    ]
    said = [state for state, _ in itertools.groupby((pod.get("waiting"), pod.get("restarts")) for pod in news)]
    waits = [int(restarts or 0) for why, restarts in said if why == "CrashLoopBackOff"]

    assert len(waits) > 4
    assert waits == list(range(waits[0], waits[0] + len(waits)))
    assert all((before == (None, None)) != (after == (None, None)) for before, after in itertools.pairwise(said))


async def test_the_truth_says_what_each_pod_did_with_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    settings = SimulatedSettings(
        kafka="127.0.0.1:1", fleet="4x8", interval_s=0.02, stop_after_ticks=2, behaviours=BEHAVIOURS, truth=path
    )
    await run(SimulatedFleet(settings, sender=FakeSender(prompt=True)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    for row in rows:
        held = {(one["namespace"], one["pod"], one["pod_uid"]) for one in row["holders"]}
        assert {(one["namespace"], one["pod"], one["pod_uid"]) for one in row["behaviours"]} == held
        assert all(one["since_ms"] <= row["ts_ms"] for one in row["behaviours"])
    found = {one["behaviour"] for row in rows for one in row["behaviours"]}
    assert {"healthy", "loader-bound", "notebook", "hoarder", "crash-loop", "underused"} <= found


def test_a_fleet_without_room_for_a_behaviour_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--behaviours hung: 1x1 has no GPUs for that; a fleet of 4x8 has for all"):
        Fleet(1, 1, behaviours=("hung",))
    with pytest.raises(ValueError, match=r"'broken' is no behaviour: write some of hung, .*, or all"):
        behaviour_names("hung,broken")
    assert behaviour_names("all") == BEHAVIOURS
    assert behaviour_names("underused, hung") == ("hung", "underused")
