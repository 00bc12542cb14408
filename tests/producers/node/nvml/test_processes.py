"""The processes on a device: each once, with its memory, its utilization and its owner."""

import time
from typing import Any
from unittest.mock import patch

import pytest

from producers.node.cgroups import ProcessOwner
from producers.node.nvml import binding
from producers.node.nvml.calls import Calls, GpuLost
from producers.node.nvml.processes import DeviceProcesses, Processes
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import GIB, FakeNvml, FakeProcessOwners, busy, running

COMPUTE, GRAPHICS, MPS = (f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute"))
NEWER, OLDER = "nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization"
POD = ProcessOwner("1b6c", "9f2e", None)


class Bench:
    def __init__(self, owners: dict[int, ProcessOwner] | None = None, *, mig_enabled: bool = False) -> None:
        self.nvml, self.clock = FakeNvml(1), FakeClock()
        self.answers = self.nvml.gpus[0].answers
        self.nvml.init()
        self.calls = Calls(self.nvml)
        self.processes = Processes(
            self.calls, self.calls.open(0), FakeProcessOwners(owners), mig_enabled=mig_enabled, clock=self.clock
        )

    def read(self) -> DeviceProcesses:
        return self.processes.read()

    def fail(self, function: str, code: int) -> None:
        self.nvml.gpus[0].fail(function, code)

    def call_count(self, function: str) -> int:
        return self.nvml.call_counts["GPU-0", function]


def test_a_process_has_its_memory_its_utilization_and_its_owner() -> None:
    bench = Bench({7: POD, 8: ProcessOwner(None, None, "4711"), 9: ProcessOwner(None, None, None)})
    bench.answers[COMPUTE] = [running(7, 5 * GIB), running(8, 0), running(9, None)]
    bench.answers[MPS] = [running(10)]
    bench.answers[NEWER] = [busy(7, 90), busy(9, 100)]
    processes = bench.read()
    assert processes.rows == [
        {
            "pid": 7,
            "memory_used_bytes": 5 * GIB,
            "sm_utilization_ratio": 0.9,
            "pod_uid": "1b6c",
            "container_id": "9f2e",
        },
        {"pid": 8, "memory_used_bytes": 0, "sm_utilization_ratio": 0.0, "job_id": "4711"},
        {"pid": 9, "sm_utilization_ratio": 1.0},
        {"pid": 10, "memory_used_bytes": GIB, "sm_utilization_ratio": 0.0},
    ]
    assert processes.kinds == {7: "attributed", 8: "attributed", 9: "host", 10: "unseen"}


def test_a_process_that_is_in_two_lists_is_reported_once() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7, None), running(8, 5)]
    bench.answers[GRAPHICS] = [running(7, 5), running(8, 6), running(8, None)]
    rows = bench.read().rows or []
    assert [(row["pid"], row["memory_used_bytes"]) for row in rows] == [(7, 5), (8, 6)]


def test_a_device_without_processes_is_not_queried_for_their_utilization() -> None:
    bench = Bench()
    assert bench.read() == DeviceProcesses([], {})
    assert bench.call_count(NEWER) == 0


@pytest.mark.parametrize("raw", [-1, 2**64 - 1, 2**60])
def test_implausible_memory_is_left_out_and_counted(raw: int) -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7, raw)]
    assert bench.read().rows == [{"pid": 7, "sm_utilization_ratio": 0.0}]
    assert bench.calls.errors() == [("usedGpuMemory", "IMPLAUSIBLE")]


def test_an_implausible_utilization_is_left_out_and_counted() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.answers[NEWER] = [busy(7, 101)]
    assert bench.read().rows == [{"pid": 7, "memory_used_bytes": GIB}]
    assert bench.calls.errors() == [("smUtil", "IMPLAUSIBLE")]


def test_an_older_driver_is_read_by_its_older_calls() -> None:
    bench = Bench()
    for name in (COMPUTE, GRAPHICS, MPS, NEWER):
        bench.fail(name, binding.FUNCTION_NOT_FOUND)
    bench.answers["nvmlDeviceGetComputeRunningProcesses_v2"] = [running(7)]
    bench.answers[OLDER] = [busy(7, 50)]
    for _ in range(2):
        assert bench.read().rows == [{"pid": 7, "memory_used_bytes": GIB, "sm_utilization_ratio": 0.5}]
    assert [bench.call_count(name) for name in (COMPUTE, MPS, NEWER, OLDER)] == [1, 1, 1, 2]
    assert bench.calls.errors() == []


def test_a_driver_without_versions_of_its_lists_is_read_by_the_first_ones() -> None:
    bench = Bench()
    for kind in ("Compute", "Graphics", "MPSCompute"):
        for version in ("_v3", "_v2"):
            bench.fail(f"nvmlDeviceGet{kind}RunningProcesses{version}", binding.FUNCTION_NOT_FOUND)
    bench.answers["nvmlDeviceGetComputeRunningProcesses"] = [running(7)]
    assert [row["pid"] for row in bench.read().rows or ()] == [7]
    assert bench.calls.errors() == []


def test_if_no_list_is_supported_the_processes_are_unknown() -> None:
    bench = Bench()
    for name in (COMPUTE, GRAPHICS, MPS):
        bench.fail(name, binding.NOT_SUPPORTED)
    assert bench.read() == DeviceProcesses(None, {})


def test_if_one_list_fails_the_others_are_not_used_alone() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.fail(GRAPHICS, binding.NO_PERMISSION)
    assert bench.read() == DeviceProcesses(None, {})
    assert bench.calls.errors() == [(GRAPHICS, "NO_PERMISSION")]


@pytest.mark.parametrize("code", [binding.NOT_SUPPORTED, binding.INVALID_ARGUMENT])
def test_a_mig_device_that_refuses_its_list_of_compute_processes_at_first_is_not_said_to_have_none(code: int) -> None:
    bench = Bench(mig_enabled=True)
    bench.fail(COMPUTE, code)
    assert [bench.read().rows for _ in range(30)] == [None] * 30
    bench.answers[COMPUTE] = [running(7)]
    assert [row["pid"] for row in [bench.read().rows for _ in range(64)][-1] or ()] == [7]


def test_a_list_that_is_not_found_is_no_empty_one() -> None:
    bench = Bench()
    bench.fail(COMPUTE, binding.NOT_FOUND)
    assert bench.read().rows is None
    assert bench.calls.errors() == [(COMPUTE, "NOT_FOUND")]


def test_a_list_that_grew_is_requested_once_more() -> None:
    bench = Bench()
    answers: list[Any] = [binding.NvmlError(binding.INSUFFICIENT_SIZE), [running(7)]]
    bench.answers[COMPUTE] = lambda: answers.pop(0)
    assert bench.read().kinds == {7: "unseen"}
    bench.fail(COMPUTE, binding.INSUFFICIENT_SIZE)
    assert bench.read().rows is None
    assert bench.calls.errors() == [(COMPUTE, "INSUFFICIENT_SIZE")]
    assert bench.call_count(COMPUTE) == 4


def test_no_new_sample_means_no_utilization() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.answers[NEWER] = [busy(7, 50)]
    assert _utilizations(bench) == [0.5]
    bench.fail(NEWER, binding.NOT_FOUND)
    bench.clock.now_s += 0.5
    assert _utilizations(bench) == [0.5]  # within the sample period: no sample has been taken yet
    bench.clock.now_s += 0.5
    assert _utilizations(bench) == [0.0]
    assert bench.calls.errors() == []


def test_only_samples_after_the_newest_one_are_requested() -> None:
    bench = Bench()
    since_times_us = []

    def since(last_us: int) -> list[Any]:
        since_times_us.append(last_us)
        return [busy(7, 50, 300), busy(7, 10, 200), busy(8, 20, 250)]

    bench.answers[COMPUTE] = [running(7), running(8)]
    bench.answers[NEWER] = since
    assert _utilizations(bench) == [0.5, 0.2]
    bench.read()
    assert since_times_us == [0, 300]


def test_a_sample_from_the_future_does_not_hide_those_of_the_present() -> None:
    bench = Bench()
    since_times_us = []
    now_us = time.time_ns() // 1000

    def since(last_us: int) -> list[Any]:
        since_times_us.append(last_us)
        return [busy(7, 50, 2**64 - 1), busy(8, 5, now_us)]

    bench.answers[COMPUTE] = [running(7), running(8)]
    bench.answers[NEWER] = since
    assert _utilizations(bench) == [0.0, 0.05]
    bench.read()
    assert since_times_us == [0, now_us]


def kept_by_driver(bench: Bench, sample: Any) -> list[Any]:
    """The samples of process 7 that the driver has, of which it gives those that are newer than asked for."""
    samples = [sample]

    def since(last_us: int) -> list[Any]:
        return [sample for sample in samples if sample.timeStamp > last_us]

    bench.answers[COMPUTE] = [running(7)]
    bench.answers[NEWER] = since
    return samples


def test_a_clock_that_is_set_back_does_not_make_busy_processes_idle() -> None:
    bench = Bench()
    now_us, hour_us = time.time_ns() // 1000, 3_600_000_000
    samples = kept_by_driver(bench, busy(7, 50, now_us))
    assert _utilizations(bench) == [0.5]
    samples[:] = [busy(7, 80, now_us - hour_us)]
    bench.clock.now_s += 1
    with patch.object(time, "time_ns", lambda: (now_us - hour_us) * 1000):
        assert _utilizations(bench) == [0.8]


def test_a_clock_that_is_set_back_a_little_does_not_make_busy_processes_idle() -> None:
    bench = Bench()
    now_us = time.time_ns() // 1000
    samples = kept_by_driver(bench, busy(7, 50, now_us))
    assert _utilizations(bench) == [0.5]
    utilizations = []
    for at_us in range(now_us - 29_999_999, now_us + 9_000_000, 1_000_000):
        samples.append(busy(7, 80, at_us))
        bench.clock.now_s += 1
        with patch.object(time, "time_ns", lambda: at_us * 1000):  # noqa: B023 - it is called in this round
            utilizations += _utilizations(bench)
    assert set(utilizations) == {0.8}


def test_samples_with_times_since_boot_are_read_as_well() -> None:
    bench = Bench()
    since_times_us = []

    def since(last_us: int) -> list[Any]:
        since_times_us.append(last_us)
        return [busy(7, 10 * len(since_times_us), 1_000_000 * len(since_times_us))]

    bench.answers[COMPUTE] = [running(7)]
    bench.answers[NEWER] = since
    assert [_utilizations(bench), _utilizations(bench)] == [[0.1], [0.2]]
    assert since_times_us == [0, 1_000_000]


def test_samples_older_than_requested_are_not_taken_for_new_ones() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7), running(8)]
    bench.answers[NEWER] = [busy(7, 90, 100), busy(8, 50, 200)]
    bench.read()
    bench.clock.now_s += 1
    bench.answers[NEWER] = [busy(7, 90, 100), busy(8, 20, 300)]
    assert _utilizations(bench) == [0.0, 0.2]


def test_garbage_about_processes_that_are_not_on_the_device_is_no_error() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.answers[NEWER] = [busy(0, 2**31), busy(99, 4_000_000_000, 2), busy(7, 10, 3)]
    assert _utilizations(bench) == [0.1]
    assert bench.calls.errors() == []


def test_if_the_utilization_can_not_be_read_the_processes_are_reported_without_it() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.fail(NEWER, binding.UNKNOWN)
    assert bench.read().rows == [{"pid": 7, "memory_used_bytes": GIB}]
    assert bench.calls.errors() == [(NEWER, "UNKNOWN")]
    bench.fail(NEWER, binding.NOT_SUPPORTED)
    bench.fail(OLDER, binding.NOT_SUPPORTED)
    assert bench.read().rows == [{"pid": 7, "memory_used_bytes": GIB}]
    assert bench.calls.errors() == []


def test_an_invalid_argument_means_not_supported_only_for_a_mig_device() -> None:
    whole, mig_device = Bench(), Bench(mig_enabled=True)
    for bench in (whole, mig_device):
        bench.answers[COMPUTE] = [running(7)]
        bench.fail(NEWER, binding.INVALID_ARGUMENT)
        bench.fail(OLDER, binding.INVALID_ARGUMENT)
        bench.read()
        bench.read()
    assert (whole.call_count(NEWER), mig_device.call_count(NEWER), mig_device.call_count(OLDER)) == (2, 1, 1)


def test_a_lost_device_is_raised() -> None:
    bench = Bench()
    bench.nvml.gpus[0].error = binding.GPU_IS_LOST
    with pytest.raises(GpuLost):
        bench.read()


def _utilizations(bench: Bench) -> list[float | None]:
    return [row.get("sm_utilization_ratio") for row in bench.read().rows or []]


def test_a_list_that_is_refused_for_a_while_leaves_no_processes_and_later_all_are_back() -> None:
    bench = Bench()
    bench.answers[COMPUTE] = [running(7)]
    bench.answers[MPS] = [running(8)]
    before = bench.read().rows
    processes = bench.answers[COMPUTE]
    bench.fail(COMPUTE, binding.NOT_SUPPORTED)
    assert [bench.read().rows for _ in range(3)] == [None] * 3
    bench.answers[COMPUTE] = processes
    assert any(bench.read().rows == before for _ in range(4))
