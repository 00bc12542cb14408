"""From Hopper on, each NVLink counts its own errors, and their sum is reported."""

import math

import pytest

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue
from producers.node.nvml.calls import Calls, GpuLost
from producers.node.nvml.metrics import Metrics
from producers.node.nvml.sources import HOPPER, LINK_COUNT, MAX_LINKS
from tests.producers.node.nvml.fake import FakeNvml

AMPERE, BLACKWELL, UNKNOWN = 7, 10, 0xFFFFFFFF
REPLAY, RECOVERY, CRC, RECOVERIES = 161, 162, 163, 215
KEYS = {
    REPLAY: "nvlink_replay_errors_total",
    RECOVERY: "nvlink_recovery_errors_total",
    RECOVERIES: "nvlink_recovery_errors_total",
    CRC: "nvlink_crc_errors_total",
}
OF_ALL = {38: 20, 52: 30, 59: 40}


class Bench:
    """A GPU with links. Its fields for all links have other values than the sum of the links."""

    def __init__(self, *, architecture: int = HOPPER, links: int = 3) -> None:
        self.nvml = FakeNvml(1)
        self.gpu = self.nvml.gpus[0]
        self.gpu.answers["nvmlDeviceGetArchitecture"] = architecture
        self.gpu.fields |= {number: FieldValue(0, raw) for number, raw in OF_ALL.items()}
        self.gpu.fields[LINK_COUNT] = FieldValue(0, links, 32)
        self.nvml.init()
        self.calls = Calls(self.nvml)
        self.metrics = Metrics(self.calls, self.calls.open(0))

    def count(self, field: int, *of_links: float | int | None) -> None:
        """Set the count of each link; None: the link is down."""
        for link, raw in enumerate(of_links):
            down = FieldValue(binding.NOT_SUPPORTED)
            self.gpu.fields[field, link] = down if raw is None else FieldValue(0, raw)

    def values(self) -> dict[str, float]:
        values = self.metrics.read().values
        return {key: values[key] for key in sorted(set(KEYS.values())) if key in values}


@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL, UNKNOWN])
def test_the_counts_of_the_links_are_added_up_and_the_fields_for_all_are_not_used(architecture: int) -> None:
    bench = Bench(architecture=architecture)
    bench.count(REPLAY, 1, 2, 4)
    bench.count(RECOVERY, 0, 0, 0)
    bench.count(CRC, 0, 8, 0)
    reported = {KEYS[REPLAY]: 7, KEYS[RECOVERY]: 0, KEYS[CRC]: 8}
    assert [bench.values(), bench.values()] == [reported, reported]
    assert bench.calls.errors() == []


@pytest.mark.parametrize("error", [None, binding.NOT_SUPPORTED, binding.FUNCTION_NOT_FOUND])
def test_an_older_gpu_counts_for_all_links_in_the_call_for_fields(error: int | None) -> None:
    bench = Bench(architecture=AMPERE)
    if error is not None:
        bench.gpu.fail("nvmlDeviceGetArchitecture", error)
    bench.count(CRC, 1, 1, 1)
    reported = {KEYS[CRC]: 20, KEYS[REPLAY]: 30, KEYS[RECOVERY]: 40}
    assert bench.values() == reported
    bench.nvml.call_counts.clear()
    assert bench.values() == reported
    assert bench.nvml.call_counts["GPU-0", "nvmlDeviceGetFieldValues"] == 1
    assert bench.nvml.call_counts["GPU-0", "nvmlDeviceGetArchitecture"] == 0


def test_blackwell_reports_recoveries_by_another_field_and_no_other_errors() -> None:
    bench = Bench(architecture=BLACKWELL)
    bench.count(RECOVERIES, 1, 0, 1)
    assert bench.values() == {KEYS[RECOVERY]: 2}
    bench.nvml.call_counts.clear()
    assert bench.values() == {KEYS[RECOVERY]: 2}
    assert bench.nvml.call_counts["GPU-0", f"field {(CRC, 0)}"] == 0
    assert bench.calls.errors() == []


@pytest.mark.parametrize("answer", [FieldValue(0, 0, 32), FieldValue(binding.NOT_SUPPORTED)])
def test_a_gpu_without_links_has_no_errors_rather_than_none_counted(answer: FieldValue) -> None:
    bench = Bench()
    bench.gpu.fields[LINK_COUNT] = answer
    assert bench.values() == {}
    bench.nvml.call_counts.clear()
    assert bench.values() == {}
    assert bench.nvml.call_counts["GPU-0", f"field {LINK_COUNT}"] == 0
    assert bench.calls.errors() == []


def test_links_that_never_came_up_have_no_errors_rather_than_none_counted() -> None:
    bench = Bench()
    assert bench.values() == {}
    assert bench.calls.errors() == []


def test_a_link_that_goes_down_does_not_lower_the_sum() -> None:
    bench = Bench()
    bench.count(REPLAY, 1, 2, None)
    assert bench.values() == {KEYS[REPLAY]: 3}
    bench.count(REPLAY, 1, None, 5)
    assert bench.values() == {KEYS[REPLAY]: 8}
    bench.count(REPLAY, None, None, None)
    assert bench.values() == {KEYS[REPLAY]: 8}


def test_a_reset_removes_the_counts_of_links_that_are_down() -> None:
    bench = Bench()
    bench.count(REPLAY, 1, 2, 4)
    bench.values()
    bench.metrics.forget_counts()
    bench.count(REPLAY, 0, None, 0)
    assert bench.values() == {KEYS[REPLAY]: 0}


def test_if_a_link_fails_there_is_no_sum_in_that_tick_and_it_is_counted() -> None:
    bench = Bench()
    bench.count(REPLAY, 1, 2, 4)
    bench.values()
    bench.gpu.fields[REPLAY, 1] = FieldValue(binding.UNKNOWN)
    assert bench.values() == {}
    assert bench.calls.errors() == [("NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY", "UNKNOWN")]
    bench.count(REPLAY, 1, 2, 5)
    assert bench.values() == {KEYS[REPLAY]: 8}


@pytest.mark.parametrize("raw", [-1, 2**64 - 1, 2**63 - 16, 10**13])
def test_an_implausible_count_of_a_link_leaves_out_the_sum_and_is_counted(raw: int) -> None:
    bench = Bench()
    bench.count(CRC, 1, raw, 4)
    assert bench.values() == {}
    assert bench.calls.errors() == [("NVML_FI_DEV_NVLINK_ERROR_DL_CRC", "IMPLAUSIBLE")]
    bench.count(CRC, 1, None, 4)
    assert bench.values() == ({KEYS[CRC]: 5} if raw != 10**13 else {})


def test_a_link_may_report_that_the_gpu_is_lost() -> None:
    bench = Bench()
    bench.gpu.fields[REPLAY, 0] = FieldValue(binding.GPU_IS_LOST)
    with pytest.raises(GpuLost, match="GPU_IS_LOST"):
        bench.values()


def test_a_driver_that_does_not_know_the_field_may_fail_the_whole_call() -> None:
    bench = Bench()
    bench.count(CRC, 1, 1, 1)

    def answer(fields: list[object]) -> binding.NvmlError | None:
        return binding.NvmlError(binding.INVALID_ARGUMENT) if (RECOVERIES, 0) in fields else None

    bench.gpu.answers["nvmlDeviceGetFieldValues"] = answer
    assert bench.values() == {KEYS[CRC]: 3}
    assert bench.calls.errors() == []


def test_however_many_links_a_gpu_claims_no_more_than_a_limit_are_queried() -> None:
    bench = Bench(links=10**6)
    bench.count(CRC, 1)
    assert bench.values() == {KEYS[CRC]: 1}
    queries = [name for _, name in bench.nvml.call_counts if name.startswith(f"field ({CRC},")]
    assert len(queries) == MAX_LINKS


@pytest.mark.parametrize("number", [FieldValue(0, math.nan, 0), FieldValue(0, -5, 32)])
def test_an_impossible_number_of_links_leaves_out_their_errors_and_nothing_else(number: FieldValue) -> None:
    bench = Bench()
    bench.gpu.fields[LINK_COUNT] = number
    assert bench.metrics.read().values["power_watts"] == 250.123
    assert bench.values() == {}
    assert {error for _, error in bench.calls.errors()} == {"NO_VALUE"}
