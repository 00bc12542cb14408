"""The life of a GPU: opened, read, cut into MIG devices, lost, back."""

from types import SimpleNamespace
from typing import Any

import pytest

from producers.node.cgroups import ProcessOwner
from producers.node.nvml import binding
from producers.node.nvml.binding import NvmlError
from producers.node.nvml.gpu import GpuReading, PhysicalGpu
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import GIB, FakeNvml, FakeProcessOwners, part, running

COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"


class Bench:
    def __init__(self) -> None:
        self.nvml, self.clock = FakeNvml(1), FakeClock()
        self.gpu = self.nvml.gpus[0]
        self.nvml.init()
        self.nvml.version_error = binding.NOT_SUPPORTED
        owners = FakeProcessOwners({7: ProcessOwner("1b6c", None, None)})
        self.physical = PhysicalGpu(self.nvml, 0, owners, list_every_s=10, clock=self.clock)

    def read(self) -> GpuReading:
        self.clock.now_s += 1
        return self.physical.read()

    def uuids(self) -> list[str]:
        return [device["uuid"] for device in self.read().devices]

    def call_count(self, function: str, uuid: str = "GPU-0") -> int:
        return self.nvml.call_counts[uuid, function]


def test_a_gpu_has_its_identity_and_its_metrics() -> None:
    bench = Bench()
    bench.gpu.answers[COMPUTE] = [running(7)]
    reading = bench.read()
    (device,) = reading.devices
    metrics = device.pop("metrics")
    assert device == {
        "uuid": "GPU-0",
        "compute_slices": 1,
        "index": 0,
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:0A:00.0",
        "minor": 0,
        "state": "ok",
        "processes": [{"pid": 7, "memory_used_bytes": GIB, "sm_utilization_ratio": 0.0, "pod_uid": "1b6c"}],
        "info": {"processes_visible": "true"},
    }
    assert metrics["gpu_utilization_ratio"] == 0.93
    assert reading.process_kinds == {7: "attributed"}
    assert (reading.lost, reading.errors) == (None, [])


def test_the_identity_is_queried_once() -> None:
    bench = Bench()
    bench.read()
    bench.read()
    for function in ("HandleByIndex", "UUID", "Name", "PciInfo", "MinorNumber"):
        assert bench.call_count(f"nvmlDeviceGet{function}") == 1


def test_a_pci_address_is_written_with_a_domain_of_eight_digits_in_upper_case() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetPciInfo"] = SimpleNamespace(domain=0xABCD1, bus=0xC1, device=0x1F)
    assert bench.read().devices[0]["pci_bus_id"] == "000ABCD1:C1:1F.0"


def test_only_the_uuid_of_the_identity_is_required() -> None:
    bench = Bench()
    for function in ("Name", "PciInfo", "MinorNumber"):
        bench.gpu.fail(f"nvmlDeviceGet{function}", binding.NOT_SUPPORTED)
    bench.gpu.fail("nvmlDeviceGetPciInfo", binding.UNKNOWN)
    reading = bench.read()
    assert {"model", "pci_bus_id", "minor"}.isdisjoint(reading.devices[0])
    assert reading.errors == [("nvmlDeviceGetPciInfo", "UNKNOWN")]


@pytest.mark.parametrize(("code", "name"), [(4, "NO_PERMISSION"), (15, "GPU_IS_LOST"), (999, "UNKNOWN")])
def test_a_gpu_that_can_not_be_opened_has_the_reason(code: int, name: str) -> None:
    bench = Bench()
    bench.gpu.open_error = code
    reading = bench.read()
    assert (reading.identity, list(reading.devices)) == ({}, [])
    assert str(reading.lost) == f"{name} (nvmlDeviceGetHandleByIndex)"
    assert reading.errors == [("nvmlDeviceGetHandleByIndex", name)]


def test_a_lost_gpu_gets_one_call_and_is_back_when_it_answers() -> None:
    bench = Bench()
    bench.read()
    bench.gpu.error = binding.GPU_IS_LOST
    for _ in range(3):
        bench.nvml.call_counts.clear()
        reading = bench.read()
        assert str(reading.lost) == "GPU_IS_LOST (nvmlDeviceGetUtilizationRates)"
        assert reading.identity["uuid"] == "GPU-0"
        assert bench.nvml.call_counts.total() == 1
        assert reading.errors == [("nvmlDeviceGetUtilizationRates", "GPU_IS_LOST")]
    bench.gpu.error = None
    assert bench.uuids() == ["GPU-0"]


def test_a_gpu_that_is_lost_while_it_is_opened_is_known_by_its_uuid() -> None:
    bench = Bench()
    bench.gpu.fail("nvmlDeviceGetMigMode", binding.GPU_IS_LOST)
    reading = bench.read()
    assert (reading.identity["uuid"], list(reading.devices)) == ("GPU-0", [])


def test_a_gpu_that_needs_a_reset_is_lost_and_gets_one_call() -> None:
    bench = Bench()
    bench.read()
    bench.gpu.error = binding.RESET_REQUIRED
    assert str(bench.read().lost).startswith("RESET_REQUIRED")
    bench.nvml.call_counts.clear()
    assert str(bench.read().lost).startswith("RESET_REQUIRED")
    assert bench.nvml.call_counts.total() == 1


@pytest.mark.parametrize("code", [binding.UNKNOWN, binding.TIMEOUT, binding.NO_PERMISSION])
def test_a_gpu_that_answers_every_call_with_an_error_is_lost_until_one_answers(code: int) -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-1"))
    assert bench.uuids() == ["GPU-0", "MIG-1"]
    bench.gpu.error = code
    for _ in range(2):
        reading = bench.read()
        assert (str(reading.lost), list(reading.devices)) == (f"{NvmlError(code)} (nvmlDeviceGetUtilizationRates)", [])
    bench.gpu.error = None
    bench.gpu.fail("nvmlDeviceGetUtilizationRates", code)
    assert bench.uuids() == ["GPU-0", "MIG-1"]


def test_a_mig_device_that_answers_every_call_with_an_error_is_no_loss_of_its_gpu() -> None:
    bench = Bench()
    bench.gpu.cut(mig_device := part("MIG-1"))
    mig_device.fail("nvmlDeviceGetMemoryInfo", binding.UNKNOWN)
    assert bench.uuids() == ["GPU-0", "MIG-1"]


def test_mig_devices_follow_their_gpu_with_their_own_values() -> None:
    bench = Bench()
    bench.gpu.cut(
        part("MIG-a", 1, "1g.10gb", 7),
        None,
        part("MIG-b", 5, "1c.3g.40gb"),
        part("MIG-c", 6, "1g.5gb+me"),
    )
    reading = bench.read()
    whole, first, second, third = reading.devices
    assert (whole["uuid"], "mig" in whole, "processes" in whole) == ("GPU-0", False, False)
    assert {key: first[key] for key in first if key not in ("metrics", "processes")} == {
        "uuid": "MIG-a",
        "compute_slices": 4,
        "index": 0,
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:0A:00.0",
        "minor": 0,
        "state": "ok",
        "mig": {
            "uuid": "MIG-a",
            "parent_uuid": "GPU-0",
            "gpu_instance": 1,
            "compute_instance": 0,
            "profile": "1g.10gb",
        },
        "info": {"mig_mode": "enabled", "processes_visible": "true"},
    }
    assert first["processes"] == [{"pid": 7, "memory_used_bytes": GIB, "pod_uid": "1b6c"}]
    assert first["metrics"] == {
        "memory_used_bytes": GIB,
        "memory_free_bytes": 8 * GIB,
        "memory_total_bytes": 10 * GIB,
        "memory_reserved_bytes": GIB,
    }
    assert (second["mig"]["profile"], third["mig"]["profile"]) == ("1c.3g.40gb", "1g.5gb+me")
    assert reading.errors == []


def test_a_gpu_without_mig_is_queried_for_it_once() -> None:
    bench = Bench()
    for _ in range(30):
        bench.read()
    assert bench.call_count("nvmlDeviceGetMigMode") == 1


def test_a_gpu_that_is_cut_is_noticed_at_the_next_listing_at_the_latest() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    assert bench.uuids() == ["GPU-0"]
    bench.gpu.cut(part("MIG-a"))
    listings = [bench.uuids() for _ in range(10)]
    assert listings[0] == ["GPU-0"]
    assert listings[-1] == ["GPU-0", "MIG-a"]


def test_a_new_mig_device_in_an_empty_slot_is_reported_at_once() -> None:
    """A pod may run on it immediately."""
    bench = Bench()
    first, second = part("MIG-a"), part("MIG-b", 2)
    bench.gpu.cut(first, None, None)
    assert bench.uuids() == ["GPU-0", "MIG-a"]
    bench.gpu.cut(first, None, second)
    assert bench.uuids() == ["GPU-0", "MIG-a", "MIG-b"]
    first.error = second.error = binding.INVALID_ARGUMENT
    bench.gpu.cut(None, None, None)
    assert bench.uuids() == ["GPU-0"]
    bench.gpu.cut(None, part("MIG-c", 3), None)
    assert bench.uuids() == ["GPU-0", "MIG-c"]
    listings = bench.call_count("nvmlDeviceGetMigMode")
    assert [bench.read().errors for _ in range(5)] == [[]] * 5
    assert bench.call_count("nvmlDeviceGetMigMode") == listings


@pytest.mark.parametrize("code", [binding.NOT_SUPPORTED, binding.INVALID_ARGUMENT])
def test_a_gpu_that_stops_answering_a_call_is_listed_at_once(code: int) -> None:
    """Otherwise processes on its MIG devices would look like its own until the next listing."""
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    bench.read()
    bench.gpu.cut(part("MIG-a", 1, "1g.10gb", 7))
    bench.gpu.answers[COMPUTE] = [running(7)]
    bench.gpu.fail("nvmlDeviceGetUtilizationRates", code)
    reading = bench.read()
    assert [(device["uuid"], "processes" in device) for device in reading.devices] == [
        ("GPU-0", False),
        ("MIG-a", True),
    ]
    assert "memory_used_bytes" in reading.devices[0]["metrics"]
    listings = bench.call_count("nvmlDeviceGetMigMode")
    bench.read()
    assert bench.call_count("nvmlDeviceGetMigMode") == listings


def test_a_gpu_that_is_not_cut_is_not_listed_again_if_it_stops_supporting_a_call() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    bench.read()
    bench.gpu.fail("nvmlDeviceGetFanSpeed", binding.NOT_SUPPORTED)
    for _ in range(5):
        assert bench.read().errors == []
    assert bench.call_count("nvmlDeviceGetMigMode") == 2


def test_a_stale_handle_is_noticed_at_once() -> None:
    bench = Bench()
    old, new = part("MIG-a"), part("MIG-b")
    bench.gpu.cut(old)
    bench.read()
    old.error = binding.INVALID_ARGUMENT
    bench.gpu.cut(new)
    assert bench.uuids() == ["GPU-0", "MIG-b"]


def test_handles_are_those_of_the_newest_listing_even_if_the_layout_is_the_same() -> None:
    bench = Bench()
    old = part("MIG-a", 1, "1g.10gb", 7)
    bench.gpu.cut(old)
    bench.read()
    old.error = binding.INVALID_ARGUMENT
    bench.gpu.cut(part("MIG-a", 1, "1g.10gb", 8))
    device = bench.read().devices[1]
    assert (device["uuid"], device["processes"][0]["pid"]) == ("MIG-a", 8)
    assert device["metrics"]["memory_used_bytes"] == GIB


def test_a_handle_that_now_is_another_devices_is_noticed_at_once() -> None:
    bench = Bench()
    slot = part("MIG-a")
    bench.gpu.cut(slot)
    bench.read()
    slot.uuid = "MIG-z"
    assert bench.uuids() == ["GPU-0", "MIG-z"]


def test_an_instance_of_the_same_ids_and_another_profile_is_another() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a", 1, "1g.10gb"))
    bench.read()
    bench.gpu.cut(part("MIG-a", 1, "1g.20gb"))
    profiles = [bench.read().devices[1]["mig"]["profile"] for _ in range(11)]
    assert (profiles[0], profiles[-1]) == ("1g.10gb", "1g.20gb")


def test_an_instance_that_was_created_again_is_not_profiled_from_an_older_sample() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 40, (1, 2): 60})
    old = part("MIG-a")
    bench.gpu.cut(old)
    bench.read()
    assert "sm_active_ratio" in bench.read().devices[1]["metrics"]
    old.error = binding.INVALID_ARGUMENT
    bench.gpu.cut(part("MIG-a"))
    ratios = [bench.read().devices[1]["metrics"].get("sm_active_ratio") for _ in range(2)]
    assert ratios == [None, 0.6]


def test_an_instance_that_can_not_be_listed_is_left_out_and_counted() -> None:
    bench = Bench()
    bad = part("MIG-bad")
    bad.error = binding.UNKNOWN
    bench.gpu.cut(bad, part("MIG-a"))
    reading = bench.read()
    assert [device["uuid"] for device in reading.devices] == ["GPU-0", "MIG-a"]
    assert reading.errors == [("nvmlDeviceGetUUID", "UNKNOWN")]


def test_a_mig_device_that_can_not_be_listed_again_is_a_timeout_until_it_answers() -> None:
    bench = Bench()
    listed = part("MIG-a")
    bench.gpu.cut(listed)
    bench.read()
    listed.error = binding.UNKNOWN
    readings = [bench.read() for _ in range(12)]
    assert [[device["state"] for device in reading.devices] for reading in readings] == [["ok", "timeout"]] * 12
    listed.error = None
    assert [device["state"] for device in bench.read().devices] == ["ok", "ok"]


@pytest.mark.parametrize("code", [binding.NO_PERMISSION, binding.NOT_SUPPORTED])
@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetName", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"]
)
def test_what_a_mig_device_is_stays_if_a_later_listing_does_not_say_it(function: str, code: int) -> None:
    bench = Bench()
    bench.gpu.profiled({(1, 2): 60})
    listed = part("MIG-a", 1, "1g.10gb")
    bench.gpu.cut(listed)
    bench.read()
    before = bench.read().devices[1]
    listed.fail(function, code)
    assert [bench.read().devices[1] for _ in range(12)] == [before] * 12


def test_a_mig_device_that_has_another_slot_stays_what_it_is_if_the_listing_does_not_say_it() -> None:
    bench = Bench()
    destroyed, moved = part("MIG-a"), part("MIG-b", 2, "2g.20gb")
    bench.gpu.cut(destroyed, moved)
    before = bench.read().devices[2]["mig"]
    bench.gpu.cut(moved, None)
    destroyed.error = binding.NOT_FOUND
    moved.fail("nvmlDeviceGetName", binding.UNKNOWN)
    moved.fail("nvmlDeviceGetGpuInstanceId", binding.UNKNOWN)
    _, device = bench.read().devices
    assert device["mig"] == before


def test_a_listing_that_fails_keeps_the_layout_and_is_counted() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"))
    bench.read()
    bench.gpu.fail("nvmlDeviceGetMigMode", binding.UNKNOWN)
    readings = [bench.read() for _ in range(12)]
    assert {len(reading.devices) for reading in readings} == {2}
    assert [error for reading in readings for error in reading.errors] == [("nvmlDeviceGetMigMode", "UNKNOWN")]


def test_supported_calls_are_tried_again_when_the_layout_changes() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    rates = "nvmlDeviceGetUtilizationRates"
    rates_answer = bench.gpu.answers[rates]
    assert "gpu_utilization_ratio" in bench.read().devices[0]["metrics"]
    bench.gpu.cut(part("MIG-a"))
    bench.gpu.fail(rates, binding.INVALID_ARGUMENT)
    readings = [bench.read() for _ in range(20)]
    assert "gpu_utilization_ratio" not in readings[-1].devices[0]["metrics"]
    assert readings[-1].errors == []
    bench.gpu.answers |= {"nvmlDeviceGetMigMode": [0, 0], rates: rates_answer}
    devices = [bench.read() for _ in range(11)][-1].devices
    assert [device["uuid"] for device in devices] == ["GPU-0"]
    assert "gpu_utilization_ratio" in devices[0]["metrics"]


def test_supported_calls_are_not_tried_again_while_the_layout_is_unchanged() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"))
    for _ in range(30):
        bench.read()
    assert bench.call_count("nvmlDeviceGetPowerUsage", "MIG-a") == 1
    assert bench.call_count("nvmlDeviceGetMaxMigDeviceCount") == 3


def test_a_mig_device_that_reports_the_gpu_as_lost_is_believed() -> None:
    bench = Bench()
    cut = part("MIG-a")
    bench.gpu.cut(cut)
    bench.read()
    cut.fail("nvmlDeviceGetMemoryInfo", binding.GPU_IS_LOST)
    assert str(bench.read().lost) == "GPU_IS_LOST (nvmlDeviceGetMemoryInfo)"


def test_a_gpu_that_is_lost_while_it_is_read_has_no_processes_in_that_tick() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a", 1, "1g.10gb", 7), last := part("MIG-b", 2))
    assert bench.read().process_kinds == {7: "attributed"}
    last.fail("nvmlDeviceGetMemoryInfo", binding.GPU_IS_LOST)
    reading = bench.read()
    assert (list(reading.devices), reading.process_kinds) == ([], {})


def test_counters_begin_again_after_a_loss() -> None:
    bench = Bench()
    counted = binding.FieldValue(0, 1000, 64, 0)
    bench.gpu.fields |= {197: counted, 198: counted}
    bench.read()
    assert bench.read().devices[0]["metrics"]["pcie_tx_bytes_per_second"] == 0
    bench.gpu.error = binding.GPU_IS_LOST
    bench.read()
    bench.gpu.error = None
    assert "pcie_tx_bytes_per_second" not in bench.read().devices[0]["metrics"]


def test_the_current_call_can_be_seen_from_outside() -> None:
    bench = Bench()
    current_calls: list[str] = []

    def slow() -> Any:
        current_calls.append(bench.physical.calls.current_call)
        return NvmlError(binding.NOT_SUPPORTED)

    bench.gpu.answers["nvmlDeviceGetFanSpeed"] = slow
    bench.read()
    assert current_calls == ["nvmlDeviceGetFanSpeed"]


def test_a_device_with_nothing_but_a_uuid_is_a_device() -> None:
    bench = Bench()
    bench.gpu.answers.clear()
    bench.gpu.fields.clear()
    assert bench.read().devices == [
        {"uuid": "GPU-0", "index": 0, "vendor": "nvidia", "compute_slices": 1, "state": "ok", "metrics": {}}
    ]


def test_gpm_is_read_of_the_gpu_and_of_each_gpu_instance_through_the_gpu() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a", 1), None, part("MIG-b", 5))
    bench.gpu.profiled({2: 80, (1, 2): 20, (5, 2): 60, (5, 1): 7})
    bench.read()
    whole, a, b = (device["metrics"] for device in bench.read().devices)
    assert [metrics["sm_active_ratio"] for metrics in (whole, a, b)] == [0.8, 0.2, 0.6]
    assert b["graphics_engine_active_ratio"] == 0.07
    assert "graphics_engine_active_ratio" not in a
    assert len(bench.nvml.lent) == 6


def test_gpms_values_of_a_gpu_instance_are_no_compute_instances_own_if_there_are_several() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a", 1), part("MIG-b", 1), part("MIG-c", 2))
    bench.gpu.profiled({2: 80, (1, 2): 20, (2, 2): 60})
    bench.read()
    ratios = [device["metrics"].get("sm_active_ratio") for device in bench.read().devices]
    assert ratios == [0.8, None, None, 0.6]


def test_the_buffers_of_gpm_are_freed_when_the_layout_changes_and_on_close() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 0]
    bench.gpu.profiled({2: 80, (1, 2): 20})
    bench.read()
    assert len(bench.nvml.lent) == 2
    bench.gpu.cut(part("MIG-a", 1))
    bench.clock.now_s += 10
    bench.read()
    assert len(bench.nvml.lent) == 4
    assert bench.call_count("nvmlGpmSampleFree", "") == 2
    bench.physical.release()
    bench.physical.release()
    assert bench.nvml.lent == []
    bench.read()
    assert bench.read().devices[1]["metrics"]["sm_active_ratio"] == 0.2
    assert len(bench.nvml.lent) == 4


def test_mig_devices_that_stay_have_no_gap_when_another_comes_or_goes() -> None:
    """Values that need the previous tick are in every tick: another pod's device is no reason for a gap."""
    bench = Bench()
    bench.gpu.profiled({(1, 2): 10, (2, 2): 20, 2: 80})
    first, second = part("MIG-a", 1), part("MIG-b", 2)
    bench.gpu.cut(first, None)
    bench.read()
    active = []
    for parts in ((first, second), (first, second), (first, None)):
        if parts[1] is None:
            second.error = binding.INVALID_ARGUMENT
        bench.gpu.cut(*parts)
        active.append([device["metrics"].get("sm_active_ratio") for device in bench.read().devices])
    assert active == [[0.8, 0.1, None], [0.8, 0.1, 0.2], [0.8, 0.1]]
    assert len(bench.nvml.lent) == 4
    bench.physical.release()
    assert bench.nvml.lent == []


def test_a_mig_device_that_is_no_longer_alone_in_its_instance_has_no_activity_of_its_own() -> None:
    bench = Bench()
    bench.gpu.profiled({(1, 2): 10})
    first, second = part("MIG-a", 1), part("MIG-b", 1)
    bench.gpu.cut(first, None)
    assert [bench.read().devices[1]["metrics"].get("sm_active_ratio") for _ in range(2)] == [None, 0.1]
    bench.gpu.cut(first, second)
    for _ in range(2):
        assert ["sm_active_ratio" in device["metrics"] for device in bench.read().devices[1:]] == [False, False]
    assert len(bench.nvml.lent) == 2


def test_the_buffers_of_gpm_stay_while_a_gpu_is_lost() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    bench.read()
    bench.gpu.error = binding.GPU_IS_LOST
    bench.read()
    bench.gpu.error = None
    assert "sm_active_ratio" not in bench.read().devices[0]["metrics"]
    assert bench.read().devices[0]["metrics"]["sm_active_ratio"] == 0.8
    assert (len(bench.nvml.lent), bench.call_count("nvmlGpmSampleAlloc", "")) == (2, 2)


def test_a_buffer_that_can_not_be_freed_is_counted() -> None:
    bench = Bench()
    bench.gpu.profiled({2: 80})
    bench.read()
    bench.nvml.free_error = binding.UNINITIALIZED
    bench.physical.release()
    assert bench.read().errors == [("nvmlGpmSampleFree", "UNINITIALIZED")] * 2


def test_the_info_of_a_gpu_is_queried_once_and_reported_each_tick() -> None:
    bench = Bench()
    bench.nvml.system_answers = {
        "nvmlSystemGetDriverVersion": "580.95.05",
        "nvmlSystemGetCudaDriverVersion_v2": 12080,
    }
    bench.gpu.answers["nvmlDeviceGetSerial"] = "1650023012345"
    bench.gpu.answers["nvmlDeviceGetVbiosVersion"] = "96.00.74.00.01"
    bench.gpu.answers["nvmlDeviceGetMigMode"] = [0, 1]
    expected = {
        "serial": "1650023012345",
        "driver_version": "580.95.05",
        "cuda_version": "12.8",
        "vbios_version": "96.00.74.00.01",
        "mig_mode": "disabled",
    }
    assert [bench.read().devices[0]["info"] for _ in range(2)] == [expected, expected]
    assert bench.call_count("nvmlDeviceGetSerial") == 1
    bench.gpu.cut(part("MIG-a"))
    bench.clock.now_s += 10
    assert [device["info"] for device in bench.read().devices] == [{**expected, "mig_mode": "enabled"}] * 2


def test_processes_are_visible_once_one_of_them_was_in_procfs() -> None:
    """A process that has ended is not in procfs either; and without processes the last state stays."""
    bench = Bench()
    infos = [bench.read().devices[0].get("info")]
    for pids in ((8, 9), (), (8, 7), (), (8,)):
        bench.gpu.answers[COMPUTE] = [running(pid) for pid in pids]
        infos.append(bench.read().devices[0].get("info"))
    hidden, visible = {"processes_visible": "false"}, {"processes_visible": "true"}
    assert infos == [None, hidden, hidden, visible, visible, visible]


def test_processes_visible_on_one_mig_device_are_visible_on_the_others_of_its_gpu() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a", 1, "1g.10gb", 7), part("MIG-b", 2))
    assert {device["info"]["processes_visible"] for device in bench.read().devices} == {"true"}


def test_a_mig_mode_that_is_refused_for_a_while_keeps_the_mig_devices_and_is_queried_again() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"))
    bench.read()
    mode = bench.gpu.answers["nvmlDeviceGetMigMode"]
    bench.gpu.fail("nvmlDeviceGetMigMode", binding.NOT_SUPPORTED)
    assert {tuple(bench.uuids()) for _ in range(30)} == {("GPU-0", "MIG-a")}
    bench.gpu.answers["nvmlDeviceGetMigMode"] = mode
    bench.gpu.cut(part("MIG-a"), part("MIG-b", 2))
    assert [bench.uuids() for _ in range(60)][-1] == ["GPU-0", "MIG-a", "MIG-b"]


@pytest.mark.parametrize("function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount"])
def test_a_gpu_that_was_cut_is_not_said_to_be_uncuttable_while_it_refuses_its_mig_mode(function: str) -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"), None, None, None)
    bench.read()
    bench.gpu.fail(function, binding.NOT_SUPPORTED)
    slices = {tuple(device["compute_slices"] for device in bench.read().devices) for _ in range(30)}
    assert slices == {(4, 4)}


def test_a_gpu_in_mig_mode_that_does_not_report_its_slots_is_not_said_to_be_uncuttable() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"))
    bench.gpu.fail("nvmlDeviceGetMaxMigDeviceCount", binding.NOT_SUPPORTED)
    assert "compute_slices" not in bench.read().devices[0]


def test_info_that_a_gpu_refuses_at_first_is_queried_again() -> None:
    bench = Bench()
    model = bench.gpu.answers["nvmlDeviceGetName"]
    bench.gpu.fail("nvmlDeviceGetName", binding.UNKNOWN)
    assert "model" not in bench.read().devices[0]
    bench.gpu.answers["nvmlDeviceGetName"] = model
    devices = [bench.read().devices[0] for _ in range(700)]
    assert devices[-1]["model"] == model
    assert bench.call_count("nvmlDeviceGetName") == 2


def test_what_a_gpu_is_that_was_lost_when_it_was_opened_is_known_as_soon_as_it_is_back() -> None:
    bench = Bench()
    answers = bench.gpu.answers
    bench.gpu.answers = dict.fromkeys([*answers, "nvmlDeviceGetFieldValues"], NvmlError(binding.RESET_REQUIRED))
    for _ in range(30):
        assert str(bench.read().lost).startswith("RESET_REQUIRED")
    bench.gpu.answers = answers
    (device,) = bench.read().devices
    assert [device[key] for key in ("model", "pci_bus_id", "minor")] == [
        "NVIDIA H100 80GB HBM3",
        "00000000:0A:00.0",
        0,
    ]


def test_info_that_a_gpu_refuses_at_first_is_later_that_of_its_mig_devices_too() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"))
    model = bench.gpu.answers["nvmlDeviceGetName"]
    bench.gpu.fail("nvmlDeviceGetName", binding.UNKNOWN)
    assert "model" not in bench.read().devices[1]
    bench.gpu.answers["nvmlDeviceGetName"] = model
    devices = [bench.read().devices for _ in range(700)][-1]
    assert [device["model"] for device in devices] == [model, model]


def test_info_of_a_gpu_stays_though_it_is_refused_later() -> None:
    bench = Bench()
    bench.gpu.answers["nvmlDeviceGetSerial"] = "7"
    bench.read()
    bench.gpu.fail("nvmlDeviceGetSerial", binding.NOT_SUPPORTED)
    bench.gpu.fail("nvmlDeviceGetName", binding.NOT_SUPPORTED)
    device = [bench.read().devices[0] for _ in range(700)][-1]
    assert bench.call_count("nvmlDeviceGetSerial") == 2
    assert (device["info"]["serial"], "model" in device) == ("7", True)


def test_a_gpu_that_was_cut_has_slices_when_mig_is_off_and_the_driver_no_longer_reports_them() -> None:
    bench = Bench()
    bench.gpu.cut(*[part("MIG-a")] * 7)
    cut = bench.read().devices[0]["compute_slices"]
    bench.gpu.answers |= {"nvmlDeviceGetMigMode": [0, 0], "nvmlDeviceGetMaxMigDeviceCount": 0}
    bench.clock.now_s += 60

    assert (cut, bench.read().devices[0]["compute_slices"]) == (7, 7)


def test_a_driver_that_reports_no_slices_while_mig_is_off_leaves_them_unknown() -> None:
    bench = Bench()
    bench.gpu.answers |= {"nvmlDeviceGetMigMode": [0, 0], "nvmlDeviceGetMaxMigDeviceCount": 0}

    assert "compute_slices" not in bench.read().devices[0]


def test_an_impossible_number_of_mig_slots_leaves_the_layout_as_it_was() -> None:
    bench = Bench()
    bench.gpu.cut(part("MIG-a"), None)
    assert bench.uuids() == ["GPU-0", "MIG-a"]
    bench.gpu.answers["nvmlDeviceGetMaxMigDeviceCount"] = 1_000_000
    bench.clock.now_s += 10
    reading = bench.read()
    assert [(device["uuid"], device["compute_slices"]) for device in reading.devices] == [("GPU-0", 2), ("MIG-a", 2)]
    assert reading.errors == [("nvmlDeviceGetMaxMigDeviceCount", "NO_VALUE")]
    assert bench.call_count("nvmlDeviceGetMigDeviceHandleByIndex") < 100
