"""A reading names the values that each device lacks, the calls that failed, and why."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue
from producers.node.nvml.calls import LeftOut
from producers.node.nvml.gpu import PhysicalGpu
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import FakeNvml, FakeProcessOwners, part, running

COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
POWER, POWER_FIELD = "nvmlDeviceGetPowerUsage", "NVML_FI_DEV_POWER_AVERAGE"


class Bench:
    """A GPU that is read once a second."""

    def __init__(self) -> None:
        self.nvml, self.clock = FakeNvml(1), FakeClock()
        self.gpu = self.nvml.gpus[0]
        self.nvml.init()
        self.physical = PhysicalGpu(self.nvml, 0, FakeProcessOwners(), list_every_s=0, clock=self.clock)

    def left_out(self, uuid: str = "GPU-0") -> LeftOut:
        self.clock.now_s += 1
        self.physical.read()
        return self.physical.left_out()[uuid]


def _calls(failed_calls: Iterable[Any]) -> list[tuple[str, str]]:
    return [(failed_call.call, failed_call.error) for failed_call in failed_calls]


def test_before_it_is_opened_nothing_is_left_out() -> None:
    assert Bench().physical.left_out() == {}


def test_a_key_that_has_a_value_is_not_left_out_and_one_that_has_none_is() -> None:
    bench = Bench()
    metrics = bench.physical.read().devices[0]["metrics"]
    left_out = bench.physical.left_out()["GPU-0"]
    assert "power_watts" not in left_out
    assert metrics.keys().isdisjoint(left_out)
    assert _calls(left_out["sm_active_ratio"]) == [("nvmlGpmQueryDeviceSupport", "NOT_SUPPORTED")]


def test_a_key_that_no_source_supports_names_all_of_them_as_long_as_it_lasts() -> None:
    bench = Bench()
    bench.gpu.fail(POWER, binding.FUNCTION_NOT_FOUND)
    bench.gpu.fields[185] = FieldValue(binding.NOT_SUPPORTED)
    expected = [(POWER, "FUNCTION_NOT_FOUND"), (POWER_FIELD, "NOT_SUPPORTED")]
    for _ in range(3):
        assert _calls(bench.left_out()["power_watts"]) == expected


def test_an_unsupported_source_does_not_count_if_the_next_one_gives_the_value() -> None:
    bench = Bench()
    bench.gpu.fail(POWER, binding.NOT_SUPPORTED)
    bench.gpu.fields[185] = FieldValue(0, 250_000, 32)
    assert "power_watts" not in bench.left_out()


@pytest.mark.parametrize(("code", "name"), [(4, "NO_PERMISSION"), (999, "UNKNOWN"), (10, "TIMEOUT")])
def test_a_value_that_failed_once_is_left_out_once(code: int, name: str) -> None:
    bench = Bench()
    bench.gpu.fail(POWER, code)
    assert _calls(bench.left_out()["power_watts"]) == [(POWER, name)]
    bench.gpu.answers[POWER] = 1_000
    assert "power_watts" not in bench.left_out()


def test_an_implausible_value_and_an_unknown_one_are_distinguished() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetFanSpeed"] = 0xFFFFFFFF
    bench.gpu.answers["nvmlDeviceGetPerformanceState"] = 32
    bench.gpu.answers["nvmlDeviceGetMemoryInfo"] = SimpleNamespace(total=10, reserved=1, free=9, used=11)
    bench.gpu.fields[82] = FieldValue(binding.NO_PERMISSION)
    left_out = bench.left_out()
    assert _calls(left_out["fan_speed_ratio"]) == [("nvmlDeviceGetFanSpeed", "IMPLAUSIBLE")]
    assert _calls(left_out["performance_state"]) == [("nvmlDeviceGetPerformanceState", "NO_VALUE")]
    assert _calls(left_out["memory_used_bytes"]) == [("nvmlDeviceGetMemoryInfo", "IMPLAUSIBLE")]
    assert _calls(left_out["memory_temperature_celsius"]) == [("NVML_FI_DEV_MEMORY_TEMP", "NO_PERMISSION")]


def test_gpm_that_the_driver_lacks_is_distinguished_from_gpm_that_the_gpu_lacks() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlGpmQueryDeviceSupport", binding.FUNCTION_NOT_FOUND)
    for _ in range(2):
        assert _calls(bench.left_out()["sm_active_ratio"]) == [("nvmlGpmQueryDeviceSupport", "FUNCTION_NOT_FOUND")]


def test_what_a_field_gives_in_place_of_gpm_names_the_call_that_found_no_gpm() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlGpmQueryDeviceSupport", binding.FUNCTION_NOT_FOUND)
    bench.gpu.fields[197] = FieldValue(binding.NOT_SUPPORTED)
    for _ in range(2):
        assert _calls(bench.left_out()["pcie_tx_bytes_per_second"]) == [
            ("nvmlGpmQueryDeviceSupport", "FUNCTION_NOT_FOUND"),
            ("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", "NOT_SUPPORTED"),
        ]


def test_a_metric_of_gpm_that_a_model_does_not_have_is_left_out_by_its_name() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 50})
    assert _calls(bench.left_out()["sm_active_ratio"]) == [
        ("NVML_GPM_METRIC_SM_UTIL", "NO_VALUE")
    ]  # only the first sample yet
    left_out = bench.left_out()
    assert "sm_active_ratio" not in left_out
    assert _calls(left_out["fp64_active_ratio"]) == [("NVML_GPM_METRIC_FP64_UTIL", "NOT_SUPPORTED")]


def test_processes_that_can_not_be_listed_are_left_out_and_their_utilization_only_if_there_are_some() -> None:
    bench = Bench()
    utilization = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
    for function in utilization:
        bench.gpu.fail(function, binding.NOT_SUPPORTED)
    assert "processes.sm_utilization_ratio" not in bench.left_out()
    bench.gpu.answers[COMPUTE] = [running(1)]
    for _ in range(2):
        expected = [(function, "NOT_SUPPORTED") for function in utilization]
        assert _calls(bench.left_out()["processes.sm_utilization_ratio"]) == expected
    bench.gpu.fail(COMPUTE, binding.NO_PERMISSION)
    left_out = bench.left_out()
    assert _calls(left_out["processes"]) == [(COMPUTE, "NO_PERMISSION")]
    assert "processes.sm_utilization_ratio" not in left_out
    bench.gpu.answers[COMPUTE] = []
    assert "processes" not in bench.left_out()
    graphics = COMPUTE.replace("Compute", "Graphics")
    bench.gpu.fail(graphics, binding.UNKNOWN)
    assert _calls(bench.left_out()["processes"]) == [(graphics, "UNKNOWN")]


def test_parts_of_the_identity_and_the_mig_mode_are_left_out_too() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetMinorNumber", binding.NO_PERMISSION)
    bench.nvml.system_answers["nvmlSystemGetCudaDriverVersion_v2"] = 13000
    left_out = bench.left_out()
    assert _calls(left_out["minor"]) == [("nvmlDeviceGetMinorNumber", "NO_PERMISSION")]
    assert _calls(left_out["info.serial"]) == [("nvmlDeviceGetSerial", "NOT_SUPPORTED")]
    assert _calls(left_out["mig"]) == [("nvmlDeviceGetMigMode", "NOT_SUPPORTED")]
    assert "info.cuda_version" not in left_out


def test_a_mig_mode_that_answers_again_is_no_longer_left_out() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetMigMode", binding.UNKNOWN)
    assert _calls(bench.left_out()["mig"]) == [("nvmlDeviceGetMigMode", "UNKNOWN")]
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    assert "mig" not in bench.left_out()


def test_a_mig_device_has_its_own_list_and_names_values_that_only_its_instance_has() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    bench.gpu.cut(part("MIG-a", 1), part("MIG-b", 1), part("MIG-c", 2))
    assert "memory_used_bytes" not in bench.left_out("MIG-a")
    shared = _calls(bench.left_out("MIG-b")["sm_active_ratio"])
    assert shared == [("nvmlGpmMetricsGet", "SHARED_INSTANCE")]
    assert _calls(bench.left_out("MIG-c")["sm_active_ratio"]) == [("NVML_GPM_METRIC_SM_UTIL", "NOT_SUPPORTED")]
    assert _calls(bench.left_out("MIG-c")["power_watts"])[0] == (POWER, "NOT_SUPPORTED")
    assert set(bench.physical.left_out()) == {"GPU-0", "MIG-a", "MIG-b", "MIG-c"}
