"""A simulated GPU keeps to the laws that a real one keeps to."""

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.simulated.fleet import Fleet, JsonDict, SimulatedNode
from producers.simulated.hardware import MODELS
from producers.simulated.physics import GPU_IDLE, POWER_CAP, REDRAW_MS
from producers.simulated.pods import STARTING_MS, TEMPLATES
from topics.catalogue import CATALOGUE

pytestmark = pytest.mark.slow

LIMITS = {model.name: model for model in MODELS}
RATIOS = [key for key in CATALOGUE if key.endswith("_ratio")]
COUNTERS = [key for key in CATALOGUE if key.endswith("_total")]
PROFILED = {key for key in CATALOGUE if key.endswith(("_active_ratio", "_occupancy_ratio"))}
"""The metrics that GPM reports of GPUs and GPU instances."""
SAMPLED = (("gpu_utilization", "ratio", "gpu_utilization_ratio"), ("power", "watts", "power_watts"))

nodes = st.builds(
    lambda seed, index, life: Fleet(5, 4, seed=seed, pod_life_s=life).node(index),
    st.integers(0, 1000),
    st.integers(0, 4),
    st.sampled_from([2.0, 30.0]),
)


def devices(node: SimulatedNode, times: range) -> list[list[JsonDict]]:
    """A list for each device of the node: the device at each of ``times``."""
    return [list(rows) for rows in zip(*(node.read(at_ms).devices for at_ms in times), strict=True)]


@given(nodes)
def test_every_value_is_of_the_catalogue_and_within_its_bounds(node: SimulatedNode) -> None:
    for rows in devices(node, range(0, 30_000, 700)):
        for device in rows:
            metrics, model = device["metrics"], LIMITS[device["model"]]
            assert metrics.keys() <= CATALOGUE.keys()
            assert all(value >= 0 for value in metrics.values())
            assert all(metrics[key] <= 1 for key in RATIOS if key in metrics)
            if "power_watts" in metrics:
                assert 0.9 * model.idle_watts < metrics["power_watts"] <= 1.05 * model.power_limit_watts
                assert 20 <= metrics["temperature_celsius"] <= 90
                assert metrics["graphics_clock_hz"] <= model.boost_mhz * 1_000_000


@given(nodes)
def test_memory_adds_up(node: SimulatedNode) -> None:
    for rows in devices(node, range(0, 30_000, 700)):
        for device in rows:
            metrics = device["metrics"]
            if "memory_total_bytes" in metrics:
                parts = [metrics[f"memory_{part}_bytes"] for part in ("used", "free", "reserved")]
                assert sum(parts) == metrics["memory_total_bytes"]
                assert sum(row["memory_used_bytes"] for row in device["processes"]) <= metrics["memory_used_bytes"]


@given(nodes)
def test_counters_never_go_back(node: SimulatedNode) -> None:
    for rows in devices(node, range(0, 30_000, 700)):
        for key in COUNTERS:
            values = [device["metrics"][key] for device in rows if key in device["metrics"]]
            assert values == sorted(values)


@given(nodes, st.integers(0, 20))
def test_energy_is_the_integral_of_power(node: SimulatedNode, redraw: int) -> None:
    """Also over a redraw, and over pods that come and go."""
    start_ms = redraw * REDRAW_MS
    for rows in devices(node, range(max(0, start_ms - 75), start_ms + 75)):
        if "power_watts" in rows[0]["metrics"]:
            power = [device["metrics"]["power_watts"] for device in rows]
            energy = [device["metrics"]["energy_joules_total"] for device in rows]
            assert energy[-1] - energy[0] == pytest.approx(sum(power[:-1]) / 1000, abs=0.003)
            assert all(after > before - 1e-9 for before, after in itertools.pairwise(energy))


@given(nodes)
def test_a_gpu_is_used_by_those_who_have_held_it_long_enough_to_start_and_by_nobody_else(node: SimulatedNode) -> None:
    before = node.read(0).holders
    for at_ms in range(STARTING_MS, 30_000, STARTING_MS):
        reading = node.read(at_ms)
        for device, holders, earlier in zip(reading.devices, reading.holders, before, strict=True):
            working = {row["pod_uid"] for row in device["processes"]}
            assert working == _uids(holders) & _uids(earlier)
            used = device["metrics"].get("gpu_utilization_ratio")
            if not working and used is not None:
                assert used == 0
                assert device["metrics"]["clock_event_reasons"] == GPU_IDLE
            elif used is not None:
                parts = sum(row["sm_utilization_ratio"] for row in device["processes"])
                assert used == pytest.approx(min(1.0, parts), abs=0.005)
        before = reading.holders


def _uids(holders: Iterable[JsonDict]) -> set[str]:
    return {holder["pod_uid"] for holder in holders}


@given(nodes)
def test_a_process_works_only_on_a_device_that_its_pod_was_reported_to_hold(node: SimulatedNode) -> None:
    for at_ms in range(0, 60_000, 700):
        reading = node.read(at_ms)
        for device, reported in zip(reading.devices, reading.reported, strict=True):
            assert {row["pod_uid"] for row in device["processes"]} <= _uids(reported)


def test_a_gpu_in_mig_mode_has_no_utilization_and_leaves_memory_to_its_instances() -> None:
    node = Fleet(4, 2).node(3)
    gpu, *instances, whole_gpu = node.read(5_000).devices

    assert {"gpu_utilization_ratio", "encoder_utilization_ratio", "memory_used_bytes"} & gpu["metrics"].keys() == set()
    assert {"power_watts", "energy_joules_total", "temperature_celsius"} <= gpu["metrics"].keys()
    assert [row["mig"]["profile"] for row in instances] == ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]
    memory_keys = {f"memory_{part}_bytes" for part in ("used", "free", "total", "reserved")}
    for row in instances:
        assert row["metrics"].keys() == memory_keys | PROFILED
        assert (row["index"], row["pci_bus_id"], row["minor"]) == (gpu["index"], gpu["pci_bus_id"], gpu["minor"])
        assert (row["mig"]["parent_uuid"], row["mig"]["uuid"]) == (gpu["uuid"], row["uuid"])
    assert "gpu_utilization_ratio" in whole_gpu["metrics"]


@given(nodes)
def test_the_drivers_samples_go_up_and_down_around_its_reading(node: SimulatedNode) -> None:
    for rows in devices(node, range(0, 30_000, 700)):
        for stem, unit, key in SAMPLED:
            for metrics in (device["metrics"] for device in rows):
                if key in metrics:
                    least, mean, most = (metrics[f"{stem}_{part}_{unit}"] for part in ("min", "mean", "max"))
                    assert least <= mean == pytest.approx(metrics[key], abs=0.001)
                    assert mean <= most
                else:
                    assert f"{stem}_mean_{unit}" not in metrics


def test_spikes_of_a_second_are_seen() -> None:
    gaps = [
        device["metrics"]["gpu_utilization_max_ratio"] - device["metrics"]["gpu_utilization_ratio"]
        for rows in devices(Fleet(1, 8).node(0), range(0, 60_000, 1_000))
        for device in rows
    ]

    assert min(gaps) == pytest.approx(0, abs=1e-9)
    assert max(gaps) > 0.1


def test_hopper_and_later_have_gpm_and_whole_gpus_with_nvlink_have_its_metrics() -> None:
    links = {"nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"}
    links |= {f"nvlink_{kind}_errors_total" for kind in ("crc", "replay", "recovery")}
    for index in range(8):
        for device in Fleet(8, 2).node(index).read(20_000).devices:
            hopper = "H100" in device["model"]
            profiled = (PROFILED | links) & device["metrics"].keys()
            cut = device["info"].get("mig_mode") == "enabled"
            linked = LIMITS[device["model"]].nvlink_bytes_per_second > 0 and not cut and "mig" not in device
            assert profiled == (PROFILED if hopper else set()) | (links if linked else set())


def test_a_few_nodes_have_every_metric_of_the_catalogue() -> None:
    all_metrics = [device["metrics"] for index in range(4) for device in Fleet(4, 8).node(index).read(60_000).devices]

    assert set().union(*all_metrics) == CATALOGUE.keys()
    assert all(
        metrics["max_sm_clock_hz"] >= metrics["sm_clock_hz"] for metrics in all_metrics if "sm_clock_hz" in metrics
    )


@given(nodes)
def test_a_cause_that_lowers_the_clocks_counts_for_how_long_it_does(node: SimulatedNode) -> None:
    causes = {"power_violation_seconds_total": POWER_CAP, "low_utilization_violation_seconds_total": GPU_IDLE}
    counted = expected = 0.0
    for rows in devices(node, range(0, 8_000, 100)):
        for before, after in itertools.pairwise(device["metrics"] for device in rows):
            for key, reason in causes.items():
                if key in before and int(before["clock_event_reasons"]) & reason:
                    assert 0 <= after[key] - before[key] <= 0.1 + 1e-9
                    counted += after[key] - before[key]
                    expected += 0.1
    assert counted == pytest.approx(expected, rel=0.1, abs=2)


def test_older_gpus_retire_pages_and_newer_ones_remap_rows() -> None:
    for index in range(10):
        for device in Fleet(10, 2).node(index).read(5_000).devices:
            retires = {key.split("_")[0] for key in device["metrics"] if key.startswith(("retired", "remapped"))}
            if "gpu_utilization_ratio" in device["metrics"]:
                assert retires == {"retired" if device["model"] == "Tesla T4" else "remapped"}


@given(nodes)
def test_a_busy_gpu_is_profiled_as_busy(node: SimulatedNode) -> None:
    for rows in devices(node, range(0, 30_000, 700)):
        for device in rows:
            metrics = device["metrics"]
            if "sm_active_ratio" in metrics:
                engine = metrics["graphics_engine_active_ratio"]
                assert engine == metrics.get("gpu_utilization_ratio", engine)
                assert max(metrics[key] for key in PROFILED) == engine
                assert (engine == 0) == (metrics["sm_active_ratio"] == 0)


def test_a_mig_device_has_the_same_info_as_its_gpu() -> None:
    gpu, *instances, whole_gpu = Fleet(4, 2).node(3).read(5_000).devices
    versions = {"serial", "driver_version", "cuda_version", "vbios_version", "mig_mode"}

    assert versions <= gpu["info"].keys() <= versions | {"processes_visible"}
    assert (gpu["info"]["mig_mode"], whole_gpu["info"]["mig_mode"]) == ("enabled", "disabled")
    assert gpu["info"]["serial"] != whole_gpu["info"]["serial"]
    for row in instances:
        assert {**row["info"], "processes_visible": "true"} == {**gpu["info"], "processes_visible": "true"}


def test_processes_are_visible_from_the_first_one_on() -> None:
    values = set()
    for rows in devices(Fleet(4, 8, pod_life_s=5).node(1), range(0, 60_000, 1_000)):
        visible_now = False
        for device in rows:
            visible_now |= bool(device["processes"])
            assert device["info"].get("processes_visible") == ("true" if visible_now else None)
            values.add(visible_now)

    assert values == {True, False}


def test_an_xid_error_is_reported_once_with_its_time_and_counted_from_then_on() -> None:
    node = Fleet(4, 8).node(3)
    for gpu in node._gpus:
        gpu._fragile = True
    events_by_uuid: dict[str, list[JsonDict]] = {}
    for at_ms in range(0, 1_000_000, 5_000):
        for device in node.read(at_ms, 10**12).devices:
            events = events_by_uuid.setdefault(device["uuid"], [])
            for event in device.get("events", ()):
                assert event["kind"] == "xid"
                assert at_ms - 5_000 < event["ts_ms"] - 10**12 <= at_ms
                events.append(event)
            assert device.get("xids", {}) == Counter(str(event["code"]) for event in events)

    assert {uuid[:3] for uuid, events in events_by_uuid.items() if events} == {"GPU", "MIG"}


def test_the_snapshot_of_an_xid_error_is_that_of_a_reading_at_the_same_time() -> None:
    node, times, snapshots = Fleet(4, 8, pod_life_s=20.0).node(3), list[int](), list[list[JsonDict]]()
    for gpu in node._gpus:
        gpu._fragile = True
    for at_ms in range(0, 1_000_000, 5_000):
        for ts_ms, containers in sorted(node.read(at_ms, 10**12).at_events.items()):
            times.append(ts_ms - 10**12)
            snapshots.append(containers)
    again = Fleet(4, 8, pod_life_s=20.0).node(3)

    assert len(times) > 5
    assert [again.read(at_ms, 10**12).containers for at_ms in times] == snapshots


def test_most_gpus_never_have_an_xid_error() -> None:
    gpus = [gpu for index in range(20) for gpu in Fleet(20, 8).node(index)._gpus]

    assert 0 < sum(gpu._fragile for gpu in gpus) < len(gpus) / 8


def test_busy_idle_and_bursty_pods_and_unheld_gpus_are_distinguished() -> None:
    utilizations: dict[str, set[float]] = {"": set()}
    for index in (0, 2, 4):
        node = Fleet(5, 8).node(index)
        for at_ms in range(0, 120_000, 1000):
            reading = node.read(at_ms)
            for device, holders in zip(reading.devices, reading.holders, strict=True):
                kinds = {_activity(holder["labels"]["app"]) for holder in holders} or {""}
                utilizations.setdefault(kinds.pop(), set()).add(device["metrics"]["gpu_utilization_ratio"])

    assert utilizations.keys() == {"", "busy", "idle", "bursty", "serving"}
    assert utilizations[""] == {0}
    assert max(utilizations["busy"]) > 0.9
    assert max(utilizations["idle"]) <= 0.05
    assert min(utilizations["bursty"]) < 0.05 < 0.7 < max(utilizations["bursty"])


def _activity(app: str) -> str:
    return next(template.activity for template in TEMPLATES if template.name == app)
