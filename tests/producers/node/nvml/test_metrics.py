"""A device is queried for what it supports, and the values that it can't give are left out."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.node.nvml import binding, table
from producers.node.nvml.binding import FieldValue, NvmlError
from producers.node.nvml.calls import Calls, GpuLost
from producers.node.nvml.metrics import Metrics
from producers.node.nvml.sources import Profiling
from producers.node.nvml.table import TABLE
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import GIB, FakeNvml, memory
from topics.catalogue import CATALOGUE

BROKEN = binding.UNKNOWN
POWER, AVERAGE = "nvmlDeviceGetPowerUsage", 185
SAMPLED_POWER, UTILIZATION = 0, 1


class Bench:
    """A device, and the machine that it is in."""

    def __init__(self, *, mig_enabled: bool = False) -> None:
        self.nvml, self.clock = FakeNvml(1), FakeClock()
        self._sampled_us = 10**15
        self.gpu = self.nvml.gpus[0]
        self.nvml.init()
        self.calls = Calls(self.nvml)
        handle = self.calls.open(0)
        profiling = Profiling(self.calls, handle, clock=self.clock)
        self.metrics = Metrics(self.calls, handle, mig_enabled=mig_enabled, profiling=profiling, clock=self.clock)

    def keep(self, kind: int, *raw: float) -> None:
        """Let the driver take samples of this kind."""
        self._sampled_us += 1_000_000
        self.gpu.samples[kind] = [FieldValue(0, value, 32, self._sampled_us + n) for n, value in enumerate(raw)]

    def values(self) -> dict[str, float]:
        return self.metrics.read().values

    def call_count(self, function: str) -> int:
        return self.nvml.call_counts["GPU-0", function]

    def counters(self, tx: int, rx: int, *, bits: int = 64, at_us: int = 0) -> None:
        """Set the PCIe counters."""
        self.gpu.fields |= {197: FieldValue(0, tx, bits, at_us), 198: FieldValue(0, rx, bits, at_us)}


def test_every_key_of_the_catalogue_comes_in_base_units() -> None:
    bench = Bench()
    bench.gpu.profiled({1: 93.5, 2: 80, 3: 40, 5: 70.25, 10: 55, 11: 0, 12: 12.5, 13: 6.25, 20: 4, 21: 1, 60: 3, 61: 2})
    bench.keep(UTILIZATION, 1)
    bench.keep(SAMPLED_POWER, 1)
    bench.values()
    bench.clock.now_s += 2
    bench.keep(UTILIZATION, 93, 0, 57)
    bench.keep(SAMPLED_POWER, 250_500, 749_500)
    values = bench.values()
    assert values == {
        "ecc_corrected_aggregate_total": 21,
        "ecc_uncorrected_aggregate_total": 1,
        "retired_pages_single_bit_total": 5,
        "retired_pages_double_bit_total": 1,
        "retired_pages_pending": 0,
        "nvlink_crc_errors_total": 2,
        "nvlink_replay_errors_total": 3,
        "nvlink_recovery_errors_total": 4,
        "power_violation_seconds_total": 74,
        "thermal_violation_seconds_total": 75,
        "sync_boost_violation_seconds_total": 76,
        "board_limit_violation_seconds_total": 77,
        "low_utilization_violation_seconds_total": 78,
        "reliability_violation_seconds_total": 79,
        "gpu_utilization_mean_ratio": 0.5,
        "gpu_utilization_min_ratio": 0,
        "gpu_utilization_max_ratio": 0.93,
        "power_mean_watts": 500,
        "power_min_watts": 250.5,
        "power_max_watts": 749.5,
        "graphics_engine_active_ratio": 0.935,
        "sm_active_ratio": 0.8,
        "sm_occupancy_ratio": 0.4,
        "tensor_active_ratio": 0.7025,
        "dram_active_ratio": 0.55,
        "fp64_active_ratio": 0,
        "fp32_active_ratio": 0.125,
        "fp16_active_ratio": 0.0625,
        "nvlink_tx_bytes_per_second": 2 << 20,
        "nvlink_rx_bytes_per_second": 3 << 20,
        "gpu_utilization_ratio": 0.93,
        "memory_controller_utilization_ratio": 0.4,
        "encoder_utilization_ratio": 0,
        "decoder_utilization_ratio": 0.07,
        "memory_used_bytes": 4 * GIB,
        "memory_free_bytes": 75 * GIB,
        "memory_total_bytes": 80 * GIB,
        "memory_reserved_bytes": GIB,
        "power_watts": 250.123,
        "power_limit_watts": 700,
        "max_power_limit_watts": 750,
        "energy_joules_total": 1.5,
        "temperature_celsius": 41,
        "memory_temperature_celsius": 55,
        "fan_speed_ratio": 1.05,
        "performance_state": 0,
        "graphics_clock_hz": 1_980_000_000,
        "sm_clock_hz": 1_965_000_000,
        "memory_clock_hz": 2_619_000_000,
        "max_sm_clock_hz": 1_980_000_000,
        "max_memory_clock_hz": 2_620_000_000,
        "clock_event_reasons": 4,
        "pcie_tx_bytes_per_second": 4 << 20,
        "pcie_rx_bytes_per_second": 1 << 20,
        "pcie_replays_total": 3,
        "ecc_corrected_volatile_total": 11,
        "ecc_uncorrected_volatile_total": 0,
        "remapped_rows_correctable_total": 1,
        "remapped_rows_uncorrectable_total": 2,
        "row_remap_pending": 0,
        "row_remap_failure": 1,
        "vgpu_licensed": 1,
    }
    assert sorted(values) == sorted(CATALOGUE)
    assert bench.calls.errors() == []


def test_a_call_with_several_keys_is_made_once_a_tick() -> None:
    bench = Bench()
    bench.values()
    bench.nvml.call_counts.clear()
    bench.values()
    bench.values()
    for function in ("UtilizationRates", "MemoryInfo", "RemappedRows", "FieldValues"):
        assert bench.call_count(f"nvmlDeviceGet{function}") == 2


@pytest.mark.parametrize("code", [3, 13, 25, 26])
def test_an_unsupported_call_is_made_once_and_not_counted(code: int) -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetFanSpeed", code)
    bench.gpu.fail("nvmlDeviceGetRemappedRows", code)
    assert "fan_speed_ratio" not in bench.values()
    assert "fan_speed_ratio" not in bench.values()
    assert bench.call_count("nvmlDeviceGetFanSpeed") == 1
    assert bench.call_count("nvmlDeviceGetRemappedRows") == 1
    assert [bench.call_count(f"field {number}") for number in (82, 142)] == [2, 1]
    assert bench.calls.errors() == []


@pytest.mark.parametrize(
    ("newer", "key", "value"),
    [
        ("nvmlDeviceGetTemperatureV", "temperature_celsius", 42),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clock_event_reasons", 8),
        (POWER, "power_watts", 199),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts", 300),
        ("nvmlDeviceGetPowerManagementLimitConstraints", "max_power_limit_watts", 310),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_joules_total", 9),
        ("nvmlDeviceGetPcieReplayCounter", "pcie_replays_total", 5),
        (("nvmlDeviceGetTotalEccErrors", 0, 0), "ecc_corrected_volatile_total", 6),
        (("nvmlDeviceGetTotalEccErrors", 1, 0), "ecc_uncorrected_volatile_total", 7),
        ("nvmlDeviceGetRemappedRows", "remapped_rows_uncorrectable_total", 8),
    ],
)
def test_the_next_source_answers_in_the_same_tick_if_the_first_is_not_supported(
    newer: Any, key: str, value: float
) -> None:
    bench = Bench()
    raw = {185: 199_000, 188: 310_000, 190: 300_000, 83: 9_000, 94: 5, 3: 6, 4: 7, 142: 1, 143: 8, 144: 0, 145: 0}
    bench.gpu.fields |= {number: FieldValue(0, raw_value) for number, raw_value in raw.items()}
    bench.gpu.fail(newer, binding.FUNCTION_NOT_FOUND)
    assert [bench.values()[key], bench.values()[key]] == [value, value]
    assert bench.calls.errors() == []


def test_an_older_driver_reports_the_memory_without_the_reserved_part() -> None:
    bench = Bench()
    older = memory(5 * GIB, reserved=0)
    bench.gpu.answers["nvmlDeviceGetMemoryInfo"] = lambda *version: NvmlError(13) if version else older
    values = bench.values()
    assert values["memory_used_bytes"] == 5 * GIB
    assert "memory_reserved_bytes" not in values


def test_an_error_leaves_out_that_value_once_is_counted_and_no_other_source_is_used() -> None:
    bench = Bench()
    bench.gpu.fields[AVERAGE] = FieldValue(0, 1)
    bench.gpu.fail(POWER, BROKEN)
    assert "power_watts" not in bench.values()
    assert bench.calls.errors() == [(POWER, "UNKNOWN")]
    bench.gpu.answers[POWER] = 100_000
    assert bench.values()["power_watts"] == 100
    assert bench.calls.errors() == []


def test_an_invalid_argument_is_an_error_of_a_gpu_and_not_supported_of_a_mig_device_that_never_answered() -> None:
    whole, mig_device = Bench(), Bench(mig_enabled=True)
    for bench in (whole, mig_device):
        bench.values()
        for function in ("nvmlDeviceGetFanSpeed", POWER):
            bench.gpu.fail(function, binding.INVALID_ARGUMENT)
    fresh = Metrics(mig_device.calls, mig_device.calls.open(0), mig_enabled=True)
    for _ in range(2):
        whole.values()
        fresh.read()
        mig_device.values()
    assert whole.calls.errors() == [(POWER, "INVALID_ARGUMENT"), ("nvmlDeviceGetFanSpeed", "INVALID_ARGUMENT")] * 2
    assert len(mig_device.calls.errors()) == 4
    assert mig_device.call_count(POWER) == 1 + 1 + 2


def test_a_field_that_fails_leaves_out_only_itself() -> None:
    bench = Bench()
    bench.counters(0, 0)
    bench.values()
    bench.clock.now_s += 1
    bench.gpu.fields[82] = FieldValue(BROKEN)
    assert "memory_temperature_celsius" not in (values := bench.values())
    assert "pcie_tx_bytes_per_second" in values
    assert bench.calls.errors() == [("NVML_FI_DEV_MEMORY_TEMP", "UNKNOWN")]


def test_a_field_that_an_older_driver_does_not_know_leaves_the_others_in_place() -> None:
    bench = Bench()

    def older(fields: list[int]) -> NvmlError | None:
        return NvmlError(binding.INVALID_ARGUMENT) if {197, 198} & set(fields) else None

    bench.gpu.answers["nvmlDeviceGetFieldValues"] = older
    assert bench.values()["memory_temperature_celsius"] == 55
    before = bench.call_count("nvmlDeviceGetFieldValues")
    assert bench.values()["memory_temperature_celsius"] == 55
    assert bench.call_count("nvmlDeviceGetFieldValues") == before + 1
    assert bench.calls.errors() == []


def test_without_the_call_for_fields_there_are_none_and_it_is_not_made_again() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetFieldValues", binding.FUNCTION_NOT_FOUND)
    assert "memory_temperature_celsius" not in bench.values()
    bench.nvml.call_counts.clear()
    bench.values()
    assert bench.call_count("nvmlDeviceGetFieldValues") == 0


def test_a_call_for_fields_that_fails_is_counted_once() -> None:
    bench = Bench()
    bench.values()
    bench.gpu.fail("nvmlDeviceGetFieldValues", BROKEN)
    assert "memory_temperature_celsius" not in bench.values()
    assert bench.calls.errors() == [("nvmlDeviceGetFieldValues", "UNKNOWN")]


@pytest.mark.parametrize("raw", [0xFFFFFFFF, -1, 0x7FFFFFF0, 10**9])
def test_a_blank_or_absurd_value_is_left_out_and_counted(raw: int) -> None:
    bench = Bench()
    bench.gpu.answers[POWER] = raw
    assert "power_watts" not in bench.values()
    assert bench.calls.errors() == [(POWER, "IMPLAUSIBLE")]


def test_a_performance_state_that_the_device_does_not_know_is_no_value_and_no_error() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetPerformanceState"] = 32
    assert "performance_state" not in bench.values()
    assert bench.calls.errors() == []


def test_a_part_of_the_memory_that_is_larger_than_the_total_is_left_out() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMemoryInfo"] = memory(81 * GIB, reserved=0)
    values = bench.values()
    assert "memory_used_bytes" not in values
    assert values["memory_total_bytes"] == 80 * GIB
    assert ("nvmlDeviceGetMemoryInfo", "IMPLAUSIBLE") in bench.calls.errors()


def test_pcie_rates_need_two_readings_and_a_counter_that_wraps_runs_on() -> None:
    bench = Bench()
    bench.counters(2**32 - 1000, 0, bits=32)
    assert "pcie_tx_bytes_per_second" not in bench.values()
    bench.clock.now_s += 1
    bench.counters(1000, 0, bits=32)
    values = bench.values()
    assert (values["pcie_tx_bytes_per_second"], values["pcie_rx_bytes_per_second"]) == (2000, 0)


def test_nvlink_traffic_is_counted_by_its_own_field_if_there_is_no_gpm() -> None:
    bench = Bench()
    sent, received = (138, table.ALL_LINKS), (139, table.ALL_LINKS)
    keys = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
    bench.gpu.fields |= {sent: FieldValue(0, 5_000), received: FieldValue(0, 7_000)}
    assert not bench.values().keys() & set(keys)
    bench.clock.now_s += 2
    bench.gpu.fields |= {sent: FieldValue(0, 5_200), received: FieldValue(0, 7_020)}
    values = bench.values()
    assert [values[key] for key in keys] == [100 * 1024, 10 * 1024]
    assert bench.calls.errors() == []


def test_a_counter_that_begins_again_gives_no_rate() -> None:
    bench = Bench()
    bench.counters(10**15, 0)
    bench.values()
    bench.clock.now_s += 1
    bench.counters(5, 10)
    values = bench.values()
    assert "pcie_tx_bytes_per_second" not in values
    assert values["pcie_rx_bytes_per_second"] == 10
    assert bench.calls.errors() == [("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "IMPLAUSIBLE")]


def test_a_counter_that_the_driver_repeats_is_not_taken_for_no_traffic() -> None:
    bench = Bench()
    bench.counters(0, 0, at_us=10**15)
    bench.values()
    bench.clock.now_s += 1
    assert "pcie_tx_bytes_per_second" not in bench.values()
    bench.clock.now_s += 1
    bench.counters(4000, 0, at_us=10**15 + 2_000_000)
    assert bench.values()["pcie_tx_bytes_per_second"] == 2000


def test_counters_that_are_forgotten_give_no_rate_at_first() -> None:
    bench = Bench()
    bench.counters(0, 0)
    bench.values()
    bench.metrics.forget_counts()
    bench.clock.now_s += 1
    assert "pcie_tx_bytes_per_second" not in bench.values()


@pytest.mark.parametrize("raw", [1.5, -1, 2**64 - 1])
def test_a_value_that_is_no_counter_gives_no_rate(raw: float) -> None:
    bench = Bench()
    bench.gpu.fields[197] = FieldValue(0, raw, 64)
    assert "pcie_tx_bytes_per_second" not in bench.values()
    assert bench.calls.errors() == [("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "IMPLAUSIBLE")]


@pytest.mark.parametrize("code", [1, 9, 15, 18, 28])
def test_a_lost_device_gets_no_further_calls(code: int) -> None:
    bench = Bench()
    bench.values()
    bench.nvml.call_counts.clear()
    bench.gpu.error = code
    with pytest.raises(GpuLost):
        bench.values()
    assert bench.nvml.call_counts.total() == 1


def test_a_field_may_report_that_the_device_is_lost() -> None:
    bench = Bench()
    bench.gpu.fields[82] = FieldValue(binding.GPU_IS_LOST)
    with pytest.raises(GpuLost, match="GPU_IS_LOST"):
        bench.values()


def test_a_lost_device_that_needs_a_reset_is_lost_still() -> None:
    bench = Bench()
    bench.values()
    bench.gpu.error = binding.RESET_REQUIRED
    with pytest.raises(GpuLost, match="RESET_REQUIRED"):
        bench.metrics.probe()


def test_a_lost_device_is_probed_with_one_call() -> None:
    bench = Bench()
    bench.values()
    bench.nvml.call_counts.clear()
    bench.metrics.probe()
    assert bench.nvml.call_counts.total() == 1
    bench.gpu.fail("nvmlDeviceGetUtilizationRates", BROKEN)
    bench.metrics.probe()


def test_gpm_needs_two_samples_more_than_100_ms_apart() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    assert "sm_active_ratio" not in bench.values()
    bench.clock.now_s += 0.0999
    assert "sm_active_ratio" not in bench.values()
    assert bench.call_count("nvmlGpmSampleGet") == 1
    bench.clock.now_s += 0.05
    assert bench.values()["sm_active_ratio"] == 0.8
    assert [newer - older for older, newer in bench.nvml.windows] == [1]
    assert bench.calls.errors() == []


def test_a_late_sample_of_gpm_is_not_compared_with_one_soon_after_it() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    take = bench.gpu.answers["nvmlGpmSampleGet"]

    def take_late(sample: Any) -> Any:
        bench.clock.now_s += 0.95
        bench.gpu.answers["nvmlGpmSampleGet"] = take
        return take(sample)

    bench.gpu.answers["nvmlGpmSampleGet"] = take_late
    bench.values()
    bench.clock.now_s += 0.05
    assert "sm_active_ratio" not in bench.values()
    assert bench.call_count("nvmlGpmSampleGet") == 1
    bench.clock.now_s += 1
    assert bench.values()["sm_active_ratio"] == 0.8


def test_gpm_that_is_an_invalid_argument_for_a_mig_device_is_not_tried_again() -> None:
    whole, mig_device = Bench(), Bench(mig_enabled=True)
    for bench in (whole, mig_device):
        bench.gpu.profiled({2: 80})
        bench.gpu.fail("nvmlGpmMetricsGet", binding.INVALID_ARGUMENT)
        for _ in range(4):
            bench.values()
            bench.clock.now_s += 1
    assert [bench.call_count("nvmlGpmMetricsGet") for bench in (whole, mig_device)] == [3, 1]
    assert whole.calls.errors() == [("nvmlGpmMetricsGet", "INVALID_ARGUMENT")] * 3
    assert mig_device.calls.errors() == []


def test_gpm_measures_from_one_tick_to_the_next_with_two_buffers() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    for _ in range(5):
        bench.values()
        bench.clock.now_s += 1
    assert len(bench.nvml.windows) == 4
    assert all(newer == older + 1 for older, newer in bench.nvml.windows)
    assert len(bench.nvml.lent) == 2
    assert bench.call_count("nvmlGpmQueryDeviceSupport") == 1


@pytest.mark.parametrize("answer", [NvmlError(3), NvmlError(13), SimpleNamespace(isSupportedDevice=0)])
def test_a_device_without_gpm_is_queried_once_and_gets_no_buffers(answer: Any) -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    bench.gpu.answers["nvmlGpmQueryDeviceSupport"] = answer
    for _ in range(3):
        assert "sm_active_ratio" not in bench.values()
        bench.clock.now_s += 1
    assert bench.call_count("nvmlGpmQueryDeviceSupport") == 1
    assert (bench.nvml.lent, bench.calls.errors()) == ([], [])


def test_each_metric_of_gpm_fails_alone() -> None:
    bench = Bench()
    bench.gpu.profiled({1: 50, 2: 80, 3: math.nan, 10: 150, 12: -1, 13: 101})
    bench.gpu.gpm[2] = FieldValue(BROKEN)
    bench.values()
    bench.clock.now_s += 1
    values = bench.values()
    assert {key: values.get(key) for key in ("graphics_engine_active_ratio", "fp16_active_ratio")} == {
        "graphics_engine_active_ratio": 0.5,
        "fp16_active_ratio": 1.0,  # GPM may measure a little over 100 %
    }
    absent = {"sm_active_ratio", "sm_occupancy_ratio", "dram_active_ratio", "fp32_active_ratio", "fp64_active_ratio"}
    assert not absent & set(values)
    assert bench.calls.errors() == [
        ("NVML_GPM_METRIC_SM_UTIL", "UNKNOWN"),
        ("NVML_GPM_METRIC_SM_OCCUPANCY", "IMPLAUSIBLE"),
        ("NVML_GPM_METRIC_DRAM_BW_UTIL", "IMPLAUSIBLE"),
        ("NVML_GPM_METRIC_FP32_UTIL", "IMPLAUSIBLE"),
    ]


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_gpm_that_fails_is_counted_and_goes_on_afterwards(function: str) -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    good = bench.gpu.answers.get(function)
    bench.values()
    bench.clock.now_s += 1
    bench.gpu.fail(function, BROKEN)
    assert "sm_active_ratio" not in bench.values()
    assert bench.calls.errors() == [(function, "UNKNOWN")]
    bench.gpu.answers[function] = good
    bench.clock.now_s += 1
    assert bench.values()["sm_active_ratio"] == 0.8


def test_samples_of_gpm_before_and_after_a_loss_are_not_compared() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    bench.values()
    bench.metrics.forget_counts()
    bench.clock.now_s += 1
    assert "sm_active_ratio" not in bench.values()
    bench.clock.now_s += 1
    assert "sm_active_ratio" in bench.values()
    assert len(bench.nvml.windows) == 1


@pytest.mark.parametrize("has_counters", [True, False])
def test_the_pcie_traffic_is_gpms_also_beside_counters_that_have_wrapped_several_times(has_counters: bool) -> None:
    bench = Bench()
    bench.gpu.profiled({20: 20_000, 21: 50_000})
    for seconds in range(2):
        if has_counters:
            tx, rx = (seconds * rate_mib * (1 << 20) % 2**32 for rate_mib in (20_000, 50_000))
            bench.counters(tx, rx, bits=32)
        values = bench.values()
        bench.clock.now_s += 1
    assert (values["pcie_tx_bytes_per_second"], values["pcie_rx_bytes_per_second"]) == (20_000 << 20, 50_000 << 20)


def test_the_first_samples_reach_further_back_than_a_tick_and_are_left_out() -> None:
    bench = Bench()
    bench.keep(UTILIZATION, 100)
    assert "gpu_utilization_max_ratio" not in bench.values()
    bench.keep(UTILIZATION, 10, 20)
    assert bench.values()["gpu_utilization_max_ratio"] == 0.2


def test_samples_are_reported_once_and_without_a_new_one_there_is_no_value_and_no_error() -> None:
    bench = Bench()
    bench.keep(UTILIZATION, 1)
    bench.values()
    bench.keep(UTILIZATION, 10)
    assert bench.values()["gpu_utilization_mean_ratio"] == 0.1
    assert "gpu_utilization_mean_ratio" not in bench.values()
    assert bench.calls.errors() == []


def test_samples_that_a_device_does_not_keep_are_requested_once() -> None:
    bench = Bench()
    bench.values()
    bench.values()
    assert bench.call_count("nvmlDeviceGetSamples") == 2  # one for each kind
    assert bench.calls.errors() == []


def test_samples_that_can_not_be_read_are_counted() -> None:
    bench = Bench()
    bench.gpu.fail(("nvmlDeviceGetSamples", SAMPLED_POWER), BROKEN)
    bench.values()
    assert bench.calls.errors() == [("NVML_TOTAL_POWER_SAMPLES", "UNKNOWN")]


def test_an_implausible_sample_is_left_out_and_counted() -> None:
    bench = Bench()
    bench.keep(UTILIZATION, 1)
    bench.values()
    bench.keep(UTILIZATION, 50, 255, 0xFFFFFFFF, 70)
    values = bench.values()
    spread = [values[f"gpu_utilization_{part}_ratio"] for part in ("min", "mean", "max")]
    assert spread == [0.5, pytest.approx(0.6), 0.7]
    assert bench.calls.errors() == [("NVML_GPU_UTILIZATION_SAMPLES", "IMPLAUSIBLE")] * 2
    bench.keep(UTILIZATION, 255)
    assert "gpu_utilization_max_ratio" not in bench.values()


def test_a_sample_of_the_far_future_does_not_exclude_those_that_follow() -> None:
    bench = Bench()
    bench.keep(UTILIZATION, 1)
    bench.values()
    bench.gpu.samples[UTILIZATION] = [FieldValue(0, 50, 32, 10**17)]
    assert "gpu_utilization_max_ratio" not in bench.values()
    bench.keep(UTILIZATION, 70)
    assert bench.values()["gpu_utilization_max_ratio"] == 0.7


def test_samples_from_before_a_loss_do_not_count() -> None:
    bench = Bench()
    bench.keep(UTILIZATION, 1)
    bench.values()
    bench.metrics.forget_counts()
    bench.keep(UTILIZATION, 90)
    assert "gpu_utilization_max_ratio" not in bench.values()


ANSWER = st.one_of(
    st.integers(-(2**31), 2**64), st.floats(), st.sampled_from([NvmlError(code) for code in range(1, 31)])
)


@given(st.lists(ANSWER, min_size=40, max_size=40))
def test_whatever_a_device_answers_its_values_are_within_their_limits(answers: list[Any]) -> None:
    bench = Bench()
    for function, answer in zip([POWER, "nvmlDeviceGetFanSpeed", *bench.gpu.answers], answers, strict=False):
        if isinstance(bench.gpu.answers.get(function), int) or isinstance(answer, NvmlError):
            bench.gpu.answers[function] = answer
    limits = {row.key: row.limits for row in TABLE}
    try:
        values = bench.values()
    except GpuLost:
        return
    assert all(limits[key].low <= value <= limits[key].high for key, value in values.items())


ENERGY, ECC = "nvmlDeviceGetTotalEnergyConsumption", ("nvmlDeviceGetTotalEccErrors", 0, 0)


def test_calls_that_are_unsupported_for_a_while_have_values_again_soon_after() -> None:
    bench = Bench()
    before = bench.values()
    refusing = {name: value for name, value in bench.gpu.answers.items() if name != "nvmlDeviceGetMigMode"}
    bench.gpu.answers = dict.fromkeys(refusing, NvmlError(binding.NOT_SUPPORTED))
    fields, bench.gpu.fields = bench.gpu.fields, {}
    for _ in range(3):
        assert bench.values() == {}
    bench.gpu.answers, bench.gpu.fields = refusing, fields
    back = [len(bench.values()) for _ in range(4)]
    assert back[-1] == len(before)
    assert bench.calls.errors() == []


def test_keys_that_disappear_or_come_back_are_reported_once_with_their_call() -> None:
    bench = Bench()
    bench.values()
    assert bench.metrics.availability_change() is None
    bench.gpu.fail("nvmlDeviceGetFanSpeed", binding.UNKNOWN)  # for a moment
    assert "fan_speed_ratio" not in bench.values()
    assert bench.metrics.availability_change() is None
    bench.gpu.answers["nvmlDeviceGetFanSpeed"] = 30
    answer = bench.gpu.answers["nvmlDeviceGetRemappedRows"]
    bench.gpu.fail("nvmlDeviceGetRemappedRows", binding.NOT_SUPPORTED)
    bench.values()
    change = bench.metrics.availability_change()
    assert change is not None
    assert set(change.lost) == {
        "remapped_rows_correctable_total",
        "remapped_rows_uncorrectable_total",
        "row_remap_pending",
        "row_remap_failure",
    }
    assert {failed_call.error for failed_call in change.lost.values()} == {"NOT_SUPPORTED"}
    for _ in range(5):
        bench.values()
        assert bench.metrics.availability_change() is None
    bench.gpu.answers["nvmlDeviceGetRemappedRows"] = answer
    changes = []
    for _ in range(8):
        bench.values()
        changes.append(bench.metrics.availability_change())
    (back,) = [change for change in changes if change is not None]
    assert (back.lost, back.regained) == ({}, sorted(change.lost))


def test_a_source_that_never_answered_is_tried_again_but_seldom() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetFanSpeed", binding.NOT_SUPPORTED)
    for _ in range(60):
        bench.values()
    assert bench.call_count("nvmlDeviceGetFanSpeed") == 1
    bench.gpu.answers["nvmlDeviceGetFanSpeed"] = 30
    assert any("fan_speed_ratio" in bench.values() for _ in range(10))
    assert bench.metrics.availability_change() is None


def test_a_source_that_answered_once_is_tried_less_and_less_often_while_it_refuses() -> None:
    bench = Bench()
    bench.values()
    bench.gpu.fail("nvmlDeviceGetFanSpeed", binding.NOT_SUPPORTED)
    before = bench.call_count("nvmlDeviceGetFanSpeed")
    for _ in range(1000):
        bench.values()
    assert bench.call_count("nvmlDeviceGetFanSpeed") - before < 30


def test_gpm_that_is_refused_for_a_while_is_read_again() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})

    def values() -> dict[str, float]:
        bench.clock.now_s += 1
        return bench.values()

    values()
    assert "sm_active_ratio" in values()
    answer = bench.gpu.answers["nvmlGpmSampleGet"]
    bench.gpu.fail("nvmlGpmSampleGet", binding.NOT_SUPPORTED)
    assert "sm_active_ratio" not in values()
    bench.gpu.answers["nvmlGpmSampleGet"] = answer
    assert any("sm_active_ratio" in values() for _ in range(3))


@pytest.mark.parametrize("call", [ENERGY, ECC])
def test_a_counter_that_is_zero_for_a_tick_is_absent_in_it(call: Any) -> None:
    bench = Bench()
    key = "energy_joules_total" if call == ENERGY else "ecc_corrected_volatile_total"
    values = []
    for raw in (1_001_000_000, 0, 1_001_500_000):
        bench.gpu.answers[call] = raw
        values.append(bench.values().get(key))
        bench.clock.now_s += 1
    assert [value is None for value in values] == [False, True, False]
    function = call if isinstance(call, str) else call[0]
    assert bench.calls.errors() == [(function, "IMPLAUSIBLE")]


def test_a_counter_that_was_cleared_is_reported_as_0_after_a_while() -> None:
    bench = Bench()
    bench.values()
    bench.gpu.answers[ECC] = 0
    values = []
    for _ in range(12):
        values.append(bench.values().get("ecc_corrected_volatile_total"))
        bench.clock.now_s += 1
    assert values == [None] * 10 + [0, 0]


def test_counters_that_start_again_are_reported_at_once_and_so_is_a_zero_beside_them() -> None:
    bench = Bench()
    bench.values()
    bench.gpu.answers |= {ENERGY: 35, ECC: 0}
    first, second = bench.values(), bench.values()
    assert first["energy_joules_total"] == 0.035
    assert second["ecc_corrected_volatile_total"] == 0


def test_after_a_loss_a_counter_may_be_zero_at_once() -> None:
    bench = Bench()
    bench.values()
    bench.metrics.forget_counts()
    bench.gpu.answers[ECC] = 0
    assert bench.values()["ecc_corrected_volatile_total"] == 0


def test_a_byte_counter_that_is_zero_for_a_tick_makes_no_rate_and_spoils_none() -> None:
    bench = Bench()
    rates = []
    for tx in (5_000_000, 5_001_000, 0, 5_003_000, 5_004_000):
        bench.counters(tx, 0)
        rates.append(bench.values().get("pcie_tx_bytes_per_second"))
        bench.clock.now_s += 1
    assert rates == [None, 1000, None, 1000, 1000]


def test_memory_may_be_used_to_the_last_byte() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=80 * GIB, reserved=0, free=0, used=80 * GIB)
    assert bench.values()["memory_used_bytes"] == 80 * GIB


@pytest.mark.parametrize(
    ("call", "answer", "absent"),
    [
        (
            "nvmlDeviceGetMemoryInfo",
            SimpleNamespace(total=0, reserved=0, free=0, used=0),
            {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"},
        ),
        ("nvmlDeviceGetEnforcedPowerLimit", 0, {"power_limit_watts"}),
    ],
)
def test_a_size_or_a_limit_of_zero_is_implausible(call: str, answer: Any, absent: set[str]) -> None:
    bench = Bench()
    before = bench.values().keys()
    bench.gpu.answers[call] = answer
    assert before - bench.values().keys() == absent
    assert (call, "IMPLAUSIBLE") in bench.calls.errors()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 3, 13, 999])), min_size=1, max_size=40))
def test_whatever_is_refused_and_for_how_long_all_values_are_back_soon_after_it_ends(
    refused: list[tuple[int, int]],
) -> None:
    bench = Bench()
    functions = [POWER, "nvmlDeviceGetFanSpeed", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetFieldValues"]
    answers = {function: bench.gpu.answers.get(function) for function in functions}
    before = bench.values().keys()
    for index, code in refused:
        bench.gpu.answers[functions[index]] = NvmlError(code) if code else answers[functions[index]]
        bench.values()
    bench.gpu.answers |= answers
    assert any(bench.values().keys() == before for _ in range(2 * len(refused) + 2))
