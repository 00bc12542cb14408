"""The metric catalogue: the guarantees and units of each profile."""

import re
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.topics.records import own_labels
from topics.catalogue import ALERT_FIRING, CATALOGUE, FAMILIES, FURTHER, HOLDERS, POD_INFO
from topics.metric import SCALED, Ratio, Series
from topics.profiles import PROFILES, ProfileName, with_unit_suffix

KEYS = """
ecc_corrected_aggregate_total ecc_uncorrected_aggregate_total retired_pages_single_bit_total
retired_pages_double_bit_total retired_pages_pending nvlink_crc_errors_total nvlink_replay_errors_total
nvlink_recovery_errors_total power_violation_seconds_total thermal_violation_seconds_total
sync_boost_violation_seconds_total board_limit_violation_seconds_total low_utilization_violation_seconds_total
reliability_violation_seconds_total
gpu_utilization_ratio memory_controller_utilization_ratio encoder_utilization_ratio decoder_utilization_ratio
memory_used_bytes memory_free_bytes memory_total_bytes memory_reserved_bytes power_watts power_limit_watts
energy_joules_total temperature_celsius memory_temperature_celsius graphics_clock_hz sm_clock_hz memory_clock_hz
pcie_tx_bytes_per_second pcie_rx_bytes_per_second pcie_replays_total ecc_corrected_volatile_total
ecc_uncorrected_volatile_total remapped_rows_correctable_total remapped_rows_uncorrectable_total row_remap_pending
row_remap_failure clock_event_reasons fan_speed_ratio performance_state gpu_utilization_mean_ratio
gpu_utilization_min_ratio gpu_utilization_max_ratio power_mean_watts power_min_watts power_max_watts
graphics_engine_active_ratio sm_active_ratio sm_occupancy_ratio tensor_active_ratio dram_active_ratio
fp64_active_ratio fp32_active_ratio fp16_active_ratio nvlink_tx_bytes_per_second nvlink_rx_bytes_per_second
"""

DEVICE_AND_HOLDER_LABELS = """
k8s_cluster_name k8s_node_name host_name gpu_vendor gpu_index gpu_uuid gpu_model gpu_mig_uuid gpu_mig_profile
service_name k8s_namespace_name k8s_pod_name k8s_container_name gpu UUID pci_bus_id device modelName GPU_I_PROFILE
GPU_I_ID hostname instance cluster container namespace pod uuid node container_name pod_name pod_namespace
"""

every_profile = pytest.mark.parametrize("profile", PROFILES)


def every_series(profile: ProfileName) -> list[Series | Ratio]:
    return [*chain.from_iterable(PROFILES[profile].series.values()), *PROFILES[profile].ratios]


def value(profile: ProfileName, key: str, raw: float) -> float:
    return PROFILES[profile].series[key][0].convert(raw)


def test_no_key_that_samples_have_had_is_removed() -> None:
    assert set(KEYS.split()) - set(CATALOGUE) == set()


def test_keys_are_in_base_units_and_end_with_them() -> None:
    for metric in CATALOGUE.values():
        stem = metric.key.removesuffix("_total")
        base = {"hertz": "hz"}.get(metric.unit, metric.unit)
        counted = {"errors", "rows", "pages", "replays", "bool", "state", "bitmask"}
        assert metric.unit in counted or stem.endswith(f"_{base}")
        assert (metric.kind == "counter") == metric.key.endswith("_total")


def test_every_row_has_a_description_and_its_source_in_nvml() -> None:
    for metric in CATALOGUE.values():
        assert metric.help.endswith(".")
        assert metric.nvml


def test_every_counter_describes_since_when_it_counts() -> None:
    counters = [metric for metric in CATALOGUE.values() if metric.kind == "counter"]
    assert counters
    assert [
        metric.key for metric in counters if not re.search(r"since the|in the GPU's life|never reset", metric.help)
    ] == []


@every_profile
def test_no_two_series_of_a_profile_have_one_name_and_one_set_of_labels(profile: ProfileName) -> None:
    identities = [(series.name, frozenset(series.labels)) for series in every_series(profile)]

    assert len(identities) == len(set(identities))


def test_a_name_has_one_series_for_each_device_or_its_table_describes_them_together() -> None:
    shared: dict[str, dict[str, None]] = {}
    for profile in [name for name in PROFILES if name != "otel-suffixed"]:
        names_and_keys = [
            (series.name, key) for key, series_of_key in PROFILES[profile].series.items() for series in series_of_key
        ]
        names_and_keys += [(ratio.name, "") for ratio in PROFILES[profile].ratios]
        several = {name for name, count in Counter(name for name, _ in names_and_keys).items() if count > 1}
        for name, key in names_and_keys:
            if name in several:
                shared.setdefault(name, {})[key] = None

    assert {name: tuple(keys) for name, keys in shared.items()} == {
        name: family.keys for name, family in FAMILIES.items()
    }
    assert [name for name, family in FAMILIES.items() if (family.total is None) == (family.mean is None)] == []


@every_profile
def test_all_series_of_a_name_have_one_unit_and_are_of_one_kind(profile: ProfileName) -> None:
    units_and_kinds: dict[str, set[tuple[str, str]]] = {}
    for series in chain.from_iterable(PROFILES[profile].series.values()):
        units_and_kinds.setdefault(series.name, set()).add((series.unit, series.kind))
    for ratio in PROFILES[profile].ratios:
        units_and_kinds.setdefault(ratio.name, set()).add((ratio.unit, "gauge"))

    assert {name: kinds for name, kinds in units_and_kinds.items() if len(kinds) > 1} == {}


def stem(profile: ProfileName, series: Series | Ratio) -> str:
    """What ``otel`` calls a series of ``otel-suffixed``; any other by its own name."""
    return series.name.removesuffix(with_unit_suffix("", series.unit)) if profile == "otel-suffixed" else series.name


@every_profile
def test_only_the_label_of_its_family_distinguishes_the_series_of_a_name(profile: ProfileName) -> None:
    labels_by_stem: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for series in every_series(profile):
        pairs = [
            pair for pair in series.labels if pair[0] != getattr(FAMILIES.get(stem(profile, series)), "label", None)
        ]
        labels_by_stem.setdefault(series.name, set()).add(frozenset(pairs))

    assert {name: label_sets for name, label_sets in labels_by_stem.items() if len(label_sets) > 1} == {}


WHOLES = {
    "ecc_corrected_aggregate_total": {"ecc_corrected_volatile_total"},
    "ecc_uncorrected_aggregate_total": {"ecc_uncorrected_volatile_total"},
    "memory_total_bytes": {"memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"},
    "gpu_utilization_max_ratio": {"gpu_utilization_ratio", "gpu_utilization_mean_ratio", "gpu_utilization_min_ratio"},
    "power_max_watts": {"power_watts", "power_mean_watts", "power_min_watts"},
    "power_limit_watts": {"power_watts"},
    "nvlink_replay_errors_total": {"nvlink_crc_errors_total", "nvlink_recovery_errors_total"},
    "temperature_celsius": {"memory_temperature_celsius"},
    "sm_clock_hz": {"memory_clock_hz"},
}
"""For each key, those whose values are part of its value or are measured beside it: they must not be added up."""


@every_profile
def test_values_that_are_counted_twice_have_names_that_are_never_added_up(profile: ProfileName) -> None:
    names = {key: {series.name for series in series_of_key} for key, series_of_key in PROFILES[profile].series.items()}
    if profile == "otel-suffixed":
        del names["memory_clock_hz"]  # it has the name of the others, as in l9gpu's dashboards

    assert {(a, b) for a, parts in WHOLES.items() for b in parts if names.get(a, set()) & names.get(b, set())} == set()


@every_profile
def test_a_value_that_is_not_the_devices_has_a_name_that_no_value_of_it_has(profile: ProfileName) -> None:
    beside = [HOLDERS, POD_INFO, ALERT_FIRING, *FURTHER]

    assert not {info.name for info in beside} & {series.name for series in every_series(profile)}
    assert len({info.name for info in beside}) == len(beside)


def test_the_keys_that_mig_devices_have_beside_their_gpu_are_marked() -> None:
    """NVML answers a MIG device's handle with its memory, and GPM with what it measures of a GPU instance."""
    expected = {key for key, metric in CATALOGUE.items() if "GPM" in metric.nvml or "GetMemoryInfo" in metric.nvml}

    assert {key for key, metric in CATALOGUE.items() if metric.mig} == expected


def test_the_memory_has_a_temperature_and_a_clock_of_its_own_name() -> None:
    assert [series.name for series in PROFILES["otel"].series["memory_temperature_celsius"]] == [
        "gpu_memory_temperature"
    ]
    assert [series.name for series in PROFILES["otel"].series["memory_clock_hz"]] == ["gpu_memory_clock_frequency"]


@every_profile
def test_prometheus_accepts_all_names_and_labels(profile: ProfileName) -> None:
    for series in every_series(profile):
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", series.name)
        for name, text in series.labels:
            assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
            assert text
        assert list(series.labels) == sorted(set(series.labels))


@every_profile
def test_a_label_that_distinguishes_series_is_never_one_of_the_device_or_its_holder(profile: ProfileName) -> None:
    assert not own_labels(profile) & set(DEVICE_AND_HOLDER_LABELS.split())


def test_the_otel_profile_names_every_key() -> None:
    assert list(PROFILES["otel"].series) == list(CATALOGUE)


def test_the_otel_profile_has_no_unit_suffixes() -> None:
    names = {series.name for series in every_series("otel")}

    assert not [name for name in names if re.search(r"_(ratio|bytes|per_second|watts|celsius|MHz|mJ|joules)$", name)]
    assert all(name.startswith("gpu_") for name in names)


def test_the_otel_profile_distinguishes_its_series_by_these_labels() -> None:
    assert own_labels("otel") == {
        "gpu_task_type",
        "gpu_temperature_sensor",
        "gpu_clock_type",
        "gpu_interconnect_type",
        "gpu_interconnect_direction",
        "gpu_violation_cause",
        "gpu_ecc_error_type",
        "gpu_ecc_count_type",
        "gpu_throttle_cause",
    }


@pytest.mark.parametrize("profile", ["dcgm", "dcgm-4.9", "dcgm-legacy"])
def test_the_dcgm_profiles_distinguish_series_by_name_alone(profile: ProfileName) -> None:
    assert own_labels(profile) == frozenset()


@pytest.mark.parametrize(
    ("profile", "key", "raw", "expected"),
    [
        ("otel", "gpu_utilization_ratio", 0.57, 0.57),
        ("otel", "memory_used_bytes", 68719476736, 68719476736.0),
        ("otel", "sm_clock_hz", 1_410_000_000, 1410.0),
        ("otel", "energy_joules_total", 12.345, 12345.0),
        ("dcgm", "gpu_utilization_ratio", 0.57, 57.0),
        ("dcgm", "memory_used_bytes", 68719476736, 65536.0),
        ("dcgm", "memory_clock_hz", 2_619_000_000, 2619.0),
        ("dcgm", "energy_joules_total", 12.345, 12345.0),
        ("dcgm", "power_watts", 693.25, 693.25),
        ("dcgm-legacy", "memory_controller_utilization_ratio", 0.29, 29.0),
        ("dcgm-legacy", "memory_total_bytes", 85899345920, 81920.0),
        ("dcgm-legacy", "temperature_celsius", 0, 0.0),
    ],
)
def test_a_value_is_in_the_unit_of_its_profile(profile: ProfileName, key: str, raw: float, expected: float) -> None:
    assert value(profile, key, raw) == expected


@given(percent=st.integers(0, 100))
def test_a_whole_percentage_stays_whole(percent: int) -> None:
    assert value("dcgm", "gpu_utilization_ratio", percent / 100) == percent


@given(mhz=st.integers(0, 10_000))
def test_a_whole_number_of_megahertz_stays_whole(mhz: int) -> None:
    assert value("otel", "graphics_clock_hz", mhz * 1_000_000) == mhz


@given(mib=st.integers(0, 1 << 24))
def test_a_whole_number_of_mebibytes_stays_whole(mib: int) -> None:
    assert value("dcgm", "memory_free_bytes", mib << 20) == mib


@pytest.mark.parametrize(
    ("reasons", "causes"),
    [
        (0x0, set()),
        (0x1, set()),
        (0x4, {"power_software"}),
        (0x10, {"syncboost"}),
        (0x20, {"temp_software"}),
        (0x40, {"temp_hardware"}),
        (0x8 | 0x80 | 0x100, set()),
        (0x1FF, {"power_software", "syncboost", "temp_software", "temp_hardware"}),
    ],
)
def test_the_causes_of_throttling_are_the_bits_that_are_set(reasons: int, causes: set[str]) -> None:
    bitmask, *rows = PROFILES["otel"].series["clock_event_reasons"]

    assert (bitmask.labels, bitmask.convert(reasons)) == ((), float(reasons))
    assert {row.labels[0][1] for row in rows if row.convert(reasons) == 1.0} == causes
    assert {row.convert(reasons) for row in rows} <= {0.0, 1.0}


def test_the_percentage_of_memory_in_use_is_0_to_100() -> None:
    (share,) = [ratio for ratio in PROFILES["otel"].ratios if ratio.name == "gpu_memory_used_percent"]

    assert (share.numerators, share.denominators) == (("memory_used_bytes",), ("memory_total_bytes",))
    assert [share.compute(used, 64) for used in (64, 0, 16)] == [100.0, 0.0, 25.0]
    assert share.compute(1, 0) is None


def test_dcgms_share_of_memory_is_of_the_unreserved_memory_and_0_to_1() -> None:
    (share,) = [ratio for ratio in PROFILES["dcgm"].ratios if ratio.name == "DCGM_FI_DEV_FB_USED_PERCENT"]

    assert (share.numerators, {*share.denominators}) == (
        ("memory_used_bytes",),
        {"memory_used_bytes", "memory_free_bytes"},
    )
    assert share.compute(30, 40) == 0.75


def test_dcgms_nvlink_bandwidth_is_that_of_both_directions() -> None:
    nvlink_keys = {"nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"}
    names = {"dcgm": "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "dcgm-4.9": "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"}
    found_both = {
        ratio.name: ratio.compute(4e9)
        for profile in PROFILES.values()
        for ratio in profile.ratios
        if nvlink_keys == {*ratio.keys}
    }

    assert found_both == {names["dcgm"]: 4000.0, names["dcgm-4.9"]: 4e9, "dcgm_nvlink_bandwidth_total": 4000.0}


@every_profile
def test_derived_series_are_computed_from_keys_of_the_catalogue(profile: ProfileName) -> None:
    assert {key for ratio in PROFILES[profile].ratios for key in ratio.keys} <= set(CATALOGUE)


@pytest.mark.parametrize("key", ["graphics_clock_hz", "gpu_utilization_max_ratio", "power_mean_watts"])
def test_a_key_that_dcgm_has_no_field_for_is_absent_there(key: str) -> None:
    assert key not in PROFILES["dcgm"].series
    assert key not in PROFILES["dcgm-4.9"].series


RENAMED = {
    "DCGM_FI_DEV_SM_CLOCK": ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 1e6),
    "DCGM_FI_DEV_MEMORY_TEMP": ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 1),
    "DCGM_FI_DEV_GPU_TEMP": ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 1),
    "DCGM_FI_DEV_POWER_USAGE": ("DCGM_FI_DEV_BOARD_POWER_WATTS", 1),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 1e-3),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 1),
    "DCGM_FI_DEV_GPU_UTIL": ("DCGM_FI_DEV_GPU_UTIL_RATIO", 1e-2),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("DCGM_FI_DEV_MEMORY_UTIL_RATIO", 1e-2),
    "DCGM_FI_DEV_ENC_UTIL": ("DCGM_FI_DEV_ENC_UTIL_RATIO", 1e-2),
    "DCGM_FI_DEV_DEC_UTIL": ("DCGM_FI_DEV_DEC_UTIL_RATIO", 1e-2),
    "DCGM_FI_DEV_FB_FREE": ("DCGM_FI_DEV_FB_FREE_BYTES", 1 << 20),
    "DCGM_FI_DEV_FB_USED": ("DCGM_FI_DEV_FB_USED_BYTES", 1 << 20),
    "DCGM_FI_DEV_FB_RESERVED": ("DCGM_FI_DEV_FB_RESERVED_BYTES", 1 << 20),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 1),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL", 1),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("DCGM_FI_DEV_ROW_REMAP_FAILED", 1),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("DCGM_FI_PROF_DRAM_UTIL_RATIO", 1),
}
"""Of the 23 default fields that dcgm-exporter 4.9 renames: those of the catalogue, and how much its unit is smaller.
The others are the last XID error, the driver's version, which is a label, and NVLink's throughput (MB/s, now bytes/s).
"""


def test_metrics_that_dcgm_exporter_renamed_have_both_names_and_both_units() -> None:
    names: dict[str, Any] = {
        old.name: (new.name, pytest.approx(new.convert(1 << 40) / old.convert(1 << 40)))
        for key, (old, *_) in PROFILES["dcgm"].series.items()
        for new in PROFILES["dcgm-4.9"].series.get(key, ())[:1]
        if old.name in RENAMED
    }

    assert names == RENAMED
    assert len(RENAMED) + 3 == 23


def test_the_units_of_the_newer_dcgm_are_base_units() -> None:
    scaled = {series.unit for series in every_series("dcgm-4.9")} & {*SCALED.values(), "megabytes_per_second"}

    assert scaled == set()


def test_the_suffixed_names_are_those_of_otel_with_their_unit() -> None:
    """Names as l9gpu's dashboards and alerts use them."""
    expected_names = """
        gpu_utilization_ratio gpu_memory_utilization_ratio gpu_memory_used_percent gpu_memory_used_bytes
        gpu_memory_free_bytes gpu_memory_total_bytes gpu_temperature_celsius gpu_power_draw_watts gpu_power_state
        gpu_power_utilization_ratio gpu_fan_speed_ratio gpu_clock_frequency_MHz gpu_encode_utilization_ratio
        gpu_decode_utilization_ratio gpu_pcie_throughput_bytes_per_second gpu_pcie_replay_count gpu_ecc_errors
        gpu_interconnect_throughput_bytes_per_second gpu_row_remap_count gpu_throttle_reason gpu_energy_consumption_mJ
        gpu_sm_active_ratio gpu_sm_occupancy_ratio gpu_dram_active_ratio gpu_gr_engine_active_ratio
        gpu_pipe_tensor_active_ratio gpu_pipe_fp64_active_ratio gpu_pipe_fp32_active_ratio gpu_pipe_fp16_active_ratio
    """

    assert set(expected_names.split()) <= {series.name for series in every_series("otel-suffixed")}
    assert len(every_series("otel-suffixed")) == len(every_series("otel"))
    clocks = {series.labels for series in every_series("otel-suffixed") if series.name == "gpu_clock_frequency_MHz"}
    assert clocks == {(("gpu_clock_type", kind),) for kind in ("graphics", "sm", "memory")}


@every_profile
def test_every_series_has_its_unit_and_its_help_names_it_too(profile: ProfileName) -> None:
    plain = {"bool", "bitmask", "state", "code"}
    for series in every_series(profile):
        assert series.unit
        assert series.help
        assert series.unit in plain or series.help.endswith(f" Unit: {series.unit.replace('_', ' ')}.")


@every_profile
def test_a_name_has_one_help(profile: ProfileName) -> None:
    helps = {(series.name, series.help) for series in every_series(profile)}

    assert len({name for name, _ in helps}) == len(helps)


@pytest.mark.parametrize("profile", ["otel", "dcgm", "dcgm-legacy"])
@pytest.mark.parametrize("millijoules", [0, 1, 8_326_156, 536_656_080, 67_112_749_835, 8_715_350_726_942])
def test_energy_is_the_whole_number_of_millijoules_that_the_driver_counted(
    profile: ProfileName, millijoules: int
) -> None:
    (series,) = PROFILES[profile].series["energy_joules_total"]
    assert series.convert(millijoules / 1000) == millijoules


@given(st.floats(allow_nan=False))
@example(1.7e308)
@example(2.0**52 / 1000)
@example(0.0005)
@example(0.0015)
def test_a_value_of_any_size_becomes_a_whole_number_of_small_units(value: float) -> None:
    (series,) = PROFILES["otel"].series["energy_joules_total"]
    assert series.convert(value) == round(value * 1000, 0)
