"""The node's GPUs through the real bindings, on a scripted NVML that fails as drivers do."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest

from delivery.instruments import Instruments
from producers.node import instruments as own
from producers.node.gpus import CheckIntervals, Gpus
from tests.eventually import eventually
from tests.nvml.scripted import Mig, Process, ScriptedNvml
from tests.producers.node.nvml.fake import FakeProcessOwners
from topics.catalogue import CATALOGUE
from topics.samples import Device

pytestmark = pytest.mark.slow

QUICK = CheckIntervals(retry_s=0.05, census_s=0.2, soon_s=0.1, list_s=0.1)
UUID = "GPU-5c41b7ed-0000-4000-8000-{:012}"
POWER = "nvmlDeviceGetPowerUsage"
GENEROUS_S = 30.0

CHILD = """
import asyncio, json, sys
from producers.node import instruments
from producers.node.gpus import Gpus
from tests.producers.node.nvml.fake import FakeProcessOwners
from delivery.instruments import Instruments

async def main():
    table = Instruments(instruments.INSTRUMENTS)
    gpus = Gpus(table, FakeProcessOwners())
    await gpus.open(float(sys.argv[1]))
    devices = await gpus.read(float(sys.argv[1]))
    counted = [[*one.labels.values(), one.value] for family in table.registry.collect()
               for one in family.samples if one.name == instruments.NVML_ERRORS]
    print(json.dumps([devices, counted, gpus.not_ready()]))
    gpus.close()

asyncio.run(main())
"""


class Node:
    """GPUs on the scripted NVML."""

    def __init__(self, nvml: ScriptedNvml) -> None:
        self.nvml = nvml
        self.instruments = Instruments(own.INSTRUMENTS)
        self.gpus = Gpus(self.instruments, FakeProcessOwners(), intervals=QUICK)
        self.running: asyncio.Task[None] | None = None

    async def open(self, within_s: float = GENEROUS_S) -> None:
        await self.gpus.open(within_s)
        self.running = asyncio.create_task(self.gpus.run())

    async def read(self, within_s: float = GENEROUS_S) -> list[dict[str, Any]]:
        devices = self.gpus.with_events(await self.gpus.read(within_s))
        msgspec.convert(devices, list[Device])
        return devices

    async def complete(self) -> list[dict[str, Any]]:
        """A second tick, with the values that need a tick before them."""
        await self.read()
        await asyncio.sleep(0.15)
        return await self.read()

    async def states(self, within_s: float = GENEROUS_S) -> list[str]:
        return [device["state"] for device in await self.read(within_s)]

    async def until_states(self, states: list[str]) -> list[dict[str, Any]]:
        for _ in range(3000):
            devices = await self.read()
            if [device["state"] for device in devices] == states:
                return devices
            await asyncio.sleep(0.01)
        raise AssertionError(devices)

    def errors(self) -> dict[tuple[str, str], float]:
        families = self.instruments.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name == own.NVML_ERRORS]
        return {(sample.labels["call"], sample.labels["error"]): sample.value for sample in samples}

    def call_count(self, function: str, gpu: int) -> int:
        return sum(call.function == function and call.gpu == gpu for call in self.nvml.calls())


@pytest.fixture
async def node(nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    for name, value in nvml.environment().items():
        monkeypatch.setenv(name, value)  # for the census
    nvml.set(None, sample_period_us=10_000)  # so that each tick has new samples
    nvml.load()
    node = Node(nvml)
    yield node
    nvml.release()
    if node.running is not None:
        node.running.cancel()
        await asyncio.wait([node.running])
    await eventually(lambda: not node.gpus.busy)
    node.gpus.close()


def in_a_process(nvml: ScriptedNvml, within_s: float = GENEROUS_S) -> Any:
    """The devices, errors and reasons that a new process reports."""
    process = subprocess.run(
        [sys.executable, "-c", CHILD, str(within_s)],
        env=os.environ | nvml.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


async def test_all_gpus_have_all_keys_with_nvmls_values(node: Node) -> None:
    node.nvml.set(2, utilization_gpu=93, power_mw=412_345, temperature=-3)
    node.nvml.set(2, fan_speed=0, energy_mj=5_000, ecc_corrected_volatile=7)
    node.nvml.set(2, ecc_corrected_aggregate=1234, nvlink_replay_errors=3, throttled_power_ns=1_500_000_000)
    node.nvml.set(None, sample_period_us=1_000)
    await node.open()
    devices = await node.complete()
    for _ in range(100):  # a busy machine makes a call slow, which is then left out for some ticks
        if all(set(device["metrics"]) == set(CATALOGUE) for device in devices):
            break
        devices = await node.complete()
    assert [device["uuid"] for device in devices] == [UUID.format(index) for index in range(8)]
    assert all(set(device["metrics"]) == set(CATALOGUE) for device in devices)
    assert (devices[2]["index"], devices[2]["minor"], devices[2]["model"]) == (2, 2, "NVIDIA H100 80GB HBM3")
    assert devices[0]["pci_bus_id"] == "00000000:0A:00.0"
    metrics = devices[2]["metrics"]
    expected = {
        "gpu_utilization_ratio": 0.93,
        "power_watts": 412.345,
        "temperature_celsius": -3,
        "fan_speed_ratio": 0,
        "energy_joules_total": 5,
        "ecc_corrected_volatile_total": 7,
        "ecc_corrected_aggregate_total": 1234,
        "nvlink_replay_errors_total": 3,
        "power_violation_seconds_total": 1.5,
        "gpu_utilization_max_ratio": 0.93,
        "power_min_watts": 412.345,
        "graphics_engine_active_ratio": 0.0325,
        "nvlink_rx_bytes_per_second": 62.25 * (1 << 20),
        "nvlink_tx_bytes_per_second": 63.25 * (1 << 20),
    }
    assert {key: metrics[key] for key in expected} == expected
    assert 0 <= metrics["pcie_tx_bytes_per_second"] < 1e9
    assert node.errors() == {}
    assert node.gpus.not_ready() == []


LIMITS = ("max_power_limit_watts", "max_sm_clock_hz", "max_memory_clock_hz", "vgpu_licensed")
LINKS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")


async def test_maxima_license_and_links_are_reported_and_absent_if_nvml_does_not_give_them(
    node: Node,
) -> None:
    node.nvml.set(0, power_max_limit_mw=700_500, max_sm_clock_mhz=1755, max_memory_clock_mhz=1593, vgpu_licensed=1)
    node.nvml.set(0, gpm_supported=0, nvlink_tx_rate=4_000, nvlink_rx_rate=0)
    for refused in ("PowerManagementLimitConstraints", "MaxClockInfo"):
        node.nvml.fail(1, f"nvmlDeviceGet{refused}", 3)
    for field in (138, 139, 188):
        node.nvml.fail(1, f"field:{field}", 3)
    node.nvml.set(1, vgpu_supported=0, gpm_supported=0)
    await node.open()
    says, silent, *_ = (device["metrics"] for device in await node.complete())
    assert [says[key] for key in LIMITS] == [700.5, 1_755_000_000, 1_593_000_000, 1]
    assert says[LINKS[0]] == pytest.approx(4_000 * 1024, rel=0.2)
    assert says[LINKS[1]] == 0
    assert not silent.keys() & {*LIMITS, *LINKS}
    assert node.errors() == {}
    node.nvml.lose(0)
    devices = await node.until_states(["lost"] + ["ok"] * 7)
    assert devices[0]["metrics"] == {}


async def test_every_gpu_has_its_thread_and_none_is_the_loops(node: Node) -> None:
    await node.open()
    await node.read()
    await eventually(lambda: "nvmlEventSetCreate" in {call.function for call in node.nvml.calls()})
    calls = node.nvml.calls()
    assert threading.get_native_id() not in {call.thread for call in calls}
    (events,) = {call.thread for call in calls if call.function == "nvmlEventSetCreate"}
    calls = [call for call in calls if call.thread != events]
    threads = {index: {call.thread for call in calls if call.gpu == index} for index in range(8)}
    assert all(len(names) == 1 for names in threads.values())
    assert len(set.union(*threads.values())) == 8
    assert not any(call.function == "nvmlDeviceGetPcieThroughput" for call in calls)


async def test_a_gpu_that_is_lost_during_a_run_keeps_its_uuid(node: Node) -> None:
    await node.open()
    node.nvml.lose(3)
    devices = await node.until_states(["ok"] * 3 + ["lost"] + ["ok"] * 4)
    lost = devices[3]
    assert (lost["uuid"], lost["index"], lost["metrics"]) == (UUID.format(3), 3, {})
    assert lost["model"] == "NVIDIA H100 80GB HBM3"
    assert node.gpus.not_ready()[0].startswith(f"GPU 3 ({UUID.format(3)}) is lost: GPU_IS_LOST")
    node.nvml.recover(3)
    await node.until_states(["ok"] * 8)
    assert node.gpus.not_ready() == []


async def test_a_call_that_hangs_for_5_s_costs_only_its_own_value_and_is_not_made_twice(node: Node) -> None:
    await node.open()
    before = node.call_count(POWER, 5)
    node.nvml.hang(5, POWER, 5)
    for _ in range(3):
        devices = await node.read(1.5)
        assert [device["state"] for device in devices] == ["ok"] * 8
        assert [device["index"] for device in devices if "power_watts" not in device["metrics"]] == [5]
    assert node.call_count(POWER, 5) == before + 1
    node.nvml.set(5, power_mw=1_000)
    node.nvml.release()
    await eventually(lambda: not node.gpus.busy)
    await node.read()
    assert (await node.read())[5]["metrics"]["power_watts"] == 1


async def test_blank_and_absurd_values_are_left_out_and_counted(node: Node) -> None:
    blank = dict.fromkeys(("power_mw", "memory_temperature", "fan_speed"), 0xFFFFFFFF)
    blank |= dict.fromkeys(("energy_mj", "memory_used"), 2**64 - 1)
    node.nvml.set(0, **blank, utilization_gpu=255, temperature=-32768, sm_clock_mhz=4_000_000, performance_state=32)
    node.nvml.set(0, gpm_2="nan", gpm_3=101.5, gpm_5=250, gpm_60=1e12, sample_period_us=1_000)
    await node.open()
    metrics = (await node.complete())[0]["metrics"]
    absent = {
        "sm_active_ratio",
        "tensor_active_ratio",
        "nvlink_rx_bytes_per_second",
        *(f"gpu_utilization_{part}_ratio" for part in ("mean", "min", "max")),
        *(f"power_{part}_watts" for part in ("mean", "min", "max")),
        "power_watts",
        "gpu_utilization_ratio",
        "temperature_celsius",
        "energy_joules_total",
        "sm_clock_hz",
        "memory_used_bytes",
        "performance_state",
        "memory_temperature_celsius",
        "fan_speed_ratio",
    }
    assert set(CATALOGUE) - set(metrics) == absent
    assert -1 not in metrics.values()
    assert set(node.errors()) == {
        (POWER, "NO_VALUE"),
        ("nvmlDeviceGetUtilizationRates", "IMPLAUSIBLE"),
        ("nvmlDeviceGetTemperatureV", "IMPLAUSIBLE"),
        ("nvmlDeviceGetTotalEnergyConsumption", "NO_VALUE"),
        ("nvmlDeviceGetClockInfo", "IMPLAUSIBLE"),
        ("nvmlDeviceGetMemoryInfo", "IMPLAUSIBLE"),
        ("NVML_FI_DEV_MEMORY_TEMP", "IMPLAUSIBLE"),
        ("nvmlDeviceGetFanSpeed", "NO_VALUE"),
        ("NVML_GPM_METRIC_SM_UTIL", "IMPLAUSIBLE"),
        ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", "IMPLAUSIBLE"),
        ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", "IMPLAUSIBLE"),
        ("NVML_GPU_UTILIZATION_SAMPLES", "IMPLAUSIBLE"),
        ("NVML_TOTAL_POWER_SAMPLES", "IMPLAUSIBLE"),
    }
    assert metrics["sm_occupancy_ratio"] == 1


async def test_a_call_that_fails_leaves_out_its_value_on_that_gpu(node: Node) -> None:
    await node.open()
    node.nvml.fail(0, POWER, 999)
    first, second, *_ = await node.read()
    assert "power_watts" not in first["metrics"]
    assert "power_watts" in second["metrics"]
    assert node.errors() == {(POWER, "UNKNOWN"): 1}


async def test_processes_have_memory_and_utilization(node: Node) -> None:
    node.nvml.processes(0, [Process(41, 1 << 30, sm=90), Process(42, None), Process(43, 5, kind="graphics", sm=0)])
    node.nvml.empty_processes(succeed=True)
    await node.open()
    devices = await node.read()
    shares = {
        row["pid"]: (row.get("memory_used_bytes"), row["sm_utilization_ratio"]) for row in devices[0]["processes"]
    }
    assert shares == {41: (1 << 30, 0.9), 42: (None, 0.1), 43: (5, 0.0)}
    assert devices[1]["processes"] == []
    assert node.errors() == {}


async def test_a_gpu_that_is_added_is_noticed(node: Node) -> None:
    await node.open()
    node.nvml.gpus = 9
    devices = await node.until_states(["ok"] * 9)
    assert devices[8]["uuid"] == UUID.format(8)
    node.nvml.gpus = 8
    devices = await node.until_states(["ok"] * 8 + ["lost"])
    assert devices[8]["uuid"] == UUID.format(8)


async def test_a_gpu_that_another_replaced_is_lost_with_its_identity(node: Node) -> None:
    await node.open()
    before = (await node.read())[3]
    node.nvml.set(3, uuid="GPU-another")
    devices = await node.until_states(["ok"] * 4 + ["lost"] + ["ok"] * 4)
    assert (devices[3]["uuid"], devices[3]["index"], devices[3]["minor"]) == ("GPU-another", 3, 3)
    identity = {key: before[key] for key in ("uuid", "vendor", "model", "pci_bus_id", "info", "compute_slices")}
    assert devices[4] == {**identity, "state": "lost", "metrics": {}}
    node.nvml.set(3, uuid=None)
    node.nvml.gpus = 9
    devices = await node.until_states(["ok"] * 4 + ["lost"] + ["ok"] * 5)
    assert [devices[3]["uuid"], devices[4]["uuid"]] == [before["uuid"], "GPU-another"]


async def test_a_gpu_that_is_cut_again_is_noticed(node: Node) -> None:
    await node.open()
    node.nvml.mig(1, [Mig(1, 0), None, Mig(5, 0, "3g.40gb", 40 << 30, 2 << 30, "MIG-mine")])
    node.nvml.processes(1, [Process(11, 5, gpu_instance=5, compute_instance=0)])
    devices = await node.until_states(["ok"] * 10)
    whole, _, mine = devices[1:4]
    assert whole["uuid"] == UUID.format(1)
    assert "gpu_utilization_ratio" not in whole["metrics"]
    assert "power_watts" in whole["metrics"]
    assert mine["mig"] == {
        "uuid": "MIG-mine",
        "parent_uuid": UUID.format(1),
        "gpu_instance": 5,
        "compute_instance": 0,
        "profile": "3g.40gb",
    }
    assert (mine["index"], mine["minor"], mine["pci_bus_id"]) == (1, 1, whole["pci_bus_id"])
    assert mine["metrics"]["memory_used_bytes"] == 2 << 30
    assert mine["processes"] == [{"pid": 11, "memory_used_bytes": 5}]
    node.nvml.mig(1, [Mig(5, 0, "3g.40gb", uuid="MIG-other")])
    assert (await node.until_states(["ok"] * 9))[2]["uuid"] == "MIG-other"
    node.nvml.mig(1, None)
    assert "gpu_utilization_ratio" in (await node.until_states(["ok"] * 8))[1]["metrics"]
    assert node.errors() == {}


async def test_each_gpu_instance_has_its_own_activity_also_after_it_was_cut_again(node: Node) -> None:
    node.nvml.mig(1, [Mig(1), Mig(5, 0, "3g.40gb")])
    node.nvml.set(1, gpm_2_gi1=25, gpm_2_gi5=75.5)
    await node.open()
    ratios = [device["metrics"].get("sm_active_ratio") for device in (await node.complete())[:4]]
    assert ratios == [0.0225, 0.0325, 0.25, 0.755]
    node.nvml.mig(1, [Mig(5, 0, "3g.40gb", uuid="MIG-other")])
    await node.until_states(["ok"] * 9)
    devices = await node.complete()
    assert [device["metrics"]["sm_active_ratio"] for device in devices[1:3]] == [0.0325, 0.755]
    calls = Counter(call.function for call in node.nvml.calls())
    assert calls["nvmlGpmSampleAlloc"] - calls["nvmlGpmSampleFree"] == 2 * 9
    assert node.errors() == {}


async def test_of_eight_gpus_two_are_cut_and_change_while_the_others_stay_as_they_are(node: Node) -> None:
    """Each instance has its own memory, activity and processes, even if instances of two GPUs have the same numbers."""
    node.nvml.mig(2, [Mig(1, 0, "1g.10gb", used_bytes=21), Mig(2, 0, "1g.10gb", used_bytes=22)])
    node.nvml.processes(2, [Process(201, 1, gpu_instance=1, compute_instance=0)])
    node.nvml.set(2, gpm_2_gi1=21, gpm_2_gi2=22)
    node.nvml.processes(5, [Process(500, 5, sm=50)])
    await node.open()
    await node.until_states(["ok"] * 10)

    with node.nvml.at_once():
        node.nvml.mig(2, [None, Mig(2, 0, "1g.10gb", used_bytes=22), Mig(1, 0, "3g.40gb", used_bytes=23, uuid="MIG-n")])
        node.nvml.processes(2, [Process(202, 2, gpu_instance=2, compute_instance=0)])
        node.nvml.mig(5, [Mig(1, 0, "7g.80gb", used_bytes=51)])
        node.nvml.processes(5, [Process(501, 6, gpu_instance=1, compute_instance=0)])
        node.nvml.set(5, gpm_2_gi1=51)
    await node.until_states(["ok"] * 11)
    devices = await node.complete()

    assert [(device["index"], device["uuid"][:3]) for device in devices] == [
        *((0, "GPU"), (1, "GPU"), (2, "GPU"), (2, "MIG"), (2, "MIG"), (3, "GPU"), (4, "GPU"), (5, "GPU"), (5, "MIG")),
        *((6, "GPU"), (7, "GPU")),
    ]
    assert [_of_instance(device) for device in devices if device.get("mig")] == [
        ("1g.10gb", 22, 0.22, [202]),
        ("3g.40gb", 23, 0.21, []),
        ("7g.80gb", 51, 0.51, [501]),
    ]
    gpus = [device for device in devices if not device.get("mig")]
    uncut = [device["index"] not in (2, 5) for device in gpus]
    assert ["processes" in device for device in gpus] == uncut
    assert ["gpu_utilization_ratio" in device["metrics"] for device in gpus] == uncut
    assert node.errors() == {}


def _of_instance(device: dict[str, Any]) -> tuple[str, float, float, list[int]]:
    metrics = device["metrics"]
    pids = [process["pid"] for process in device["processes"]]
    return device["mig"]["profile"], metrics["memory_used_bytes"], metrics["sm_active_ratio"], pids


async def test_processes_that_together_use_more_than_the_gpu_are_reported_as_nvml_has_them(node: Node) -> None:
    """The node does not divide the GPU among them."""
    node.nvml.set(0, utilization_gpu=90, memory_used=40)
    node.nvml.processes(0, [Process(1, 30, sm=80), Process(2, 30, sm=71), Process(3, 1, sm=100, kind="graphics")])
    await node.open()
    device = (await node.read())[0]
    assert {row["pid"]: (row["memory_used_bytes"], row["sm_utilization_ratio"]) for row in device["processes"]} == {
        1: (30, 0.8),
        2: (30, 0.71),
        3: (1, 1.0),
    }
    assert (device["metrics"]["memory_used_bytes"], device["metrics"]["gpu_utilization_ratio"]) == (40, 0.9)
    assert node.errors() == {}


async def test_spikes_between_two_ticks_are_seen(node: Node) -> None:
    node.nvml.set(0, utilization_samples="0 0 0 100", power_samples_mw="100000 100000 500000", sample_period_us=1_000)
    await node.open()
    metrics = (await node.complete())[0]["metrics"]
    assert [metrics[f"gpu_utilization_{part}_ratio"] for part in ("min", "max")] == [0, 1]
    assert [metrics[f"power_{part}_watts"] for part in ("min", "max")] == [100, 500]
    assert metrics["gpu_utilization_mean_ratio"] == pytest.approx(0.25, abs=0.02)
    assert metrics["power_mean_watts"] == pytest.approx(233.3, abs=10)


async def test_a_driver_that_starts_later_works(node: Node) -> None:
    node.nvml.driver("absent")
    await node.open()
    assert await node.read() == []
    assert "no NVIDIA driver" in node.gpus.not_ready()[0]
    node.nvml.driver("ok")
    await node.until_states(["ok"] * 8)


async def test_ticks_go_on_while_an_init_hangs(node: Node) -> None:
    node.nvml.hang(None, "nvmlInit", 3600)
    await node.open(0.1)
    assert await node.read(0.1) == []
    node.nvml.release()
    await node.until_states(["ok"] * 8)
    assert Counter(call.function for call in node.nvml.calls())["nvmlInitWithFlags"] == 1


async def test_calls_that_find_another_driver_end_the_process(node: Node) -> None:
    await node.open()
    node.nvml.fail(None, "*", 18)
    assert set(await node.states()) == {"lost"}
    assert getattr(node.gpus.fatal(), "exit_code", None) == 70


def test_an_older_driver_gives_what_it_has_without_an_error(nvml_directory: Path) -> None:
    nvml = ScriptedNvml(nvml_directory, gpus=2, old=True)
    nvml.processes(0, [Process(41, 1 << 30, sm=90)])
    devices, errors, wrong = in_a_process(nvml)
    assert [device["state"] for device in devices] == ["ok", "ok"]
    gpm_and_samples = {metric.key for metric in CATALOGUE.values() if re.match("GPM|nvmlDeviceGetSamples", metric.nvml)}
    missing = set(CATALOGUE) - set(devices[0]["metrics"]) - gpm_and_samples
    assert missing <= {"memory_reserved_bytes", "pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"}
    assert "memory_reserved_bytes" in missing
    assert devices[0]["processes"] == [{"pid": 41, "memory_used_bytes": 1 << 30, "sm_utilization_ratio": 0.9}]
    assert (errors, wrong) == ([], [])


def test_a_process_ends_while_gpus_hang(nvml: ScriptedNvml) -> None:
    nvml.hang(2, "nvmlDeviceGetHandleByIndex", 3600)
    nvml.hang(4, POWER, 3600)
    devices, _, wrong = in_a_process(nvml, 2.0)
    assert [device["index"] for device in devices] == [0, 1, 3, 4, 5, 6, 7]
    assert [device["index"] for device in devices if "power_watts" not in device["metrics"]] == [4]
    assert any(POWER in text for text in wrong)


async def test_a_success_without_a_value_is_no_value_and_never_a_zero(node: Node) -> None:
    node.nvml.set(None, energy_mj=1_001_000_000, sample_period_us=1_000)
    await node.open()
    before = [(device["uuid"], device["metrics"].keys()) for device in await node.complete()]
    node.nvml.leave_empty(2, "*")
    for _ in range(3):
        devices = await node.complete()
        assert [device["state"] for device in devices] == ["ok"] * 8
        metrics = devices[2]["metrics"]
        assert not metrics.keys() & {"energy_joules_total", "memory_total_bytes", "power_watts", "temperature_celsius"}
        assert (devices[2]["uuid"], metrics) == (UUID.format(2), {})
    node.nvml.fail(2, "*", 0)
    assert [(device["uuid"], device["metrics"].keys()) for device in await node.complete()] == before


async def test_a_gpu_that_is_cut_and_answers_nothing_keeps_its_mig_devices(node: Node) -> None:
    node.nvml.mig(2, [Mig(1), Mig(5, 0, "3g.40gb")])
    await node.open()
    before = [(device["uuid"], device["metrics"].keys()) for device in await node.complete()]
    node.nvml.leave_empty(2, "*")
    for _ in range(3):
        devices = await node.complete()
        assert [device["uuid"] for device in devices] == [uuid for uuid, _ in before]
        assert [device["state"] for device in devices if device["index"] == 2] == ["ok", "timeout", "timeout"]
    node.nvml.fail(2, "*", 0)
    await node.complete()
    assert [(device["uuid"], device["metrics"].keys()) for device in await node.complete()] == before


async def test_a_gpu_whose_address_is_unknown_at_first_has_no_invented_one(node: Node) -> None:
    node.nvml.leave_empty(0, "nvmlDeviceGetPciInfo")
    node.nvml.leave_empty(0, "nvmlDeviceGetName")
    node.nvml.leave_empty(0, "nvmlDeviceGetMinorNumber")
    await node.open()
    first, second, *_ = await node.read()
    assert not {"pci_bus_id", "model", "minor"} & first.keys()
    assert {"pci_bus_id", "model", "minor"} <= second.keys()


async def test_three_ticks_of_not_supported_cost_only_their_values_and_are_logged(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.nvml.set(None, sample_period_us=1_000)
    await node.open()
    before = (await node.complete())[2]["metrics"].keys()
    node.nvml.fail(2, "nvmlDeviceGetFieldValues", 3)
    lost_keys: set[str] = set()
    for _ in range(3):
        lost_keys = before - (await node.complete())[2]["metrics"].keys()
    assert len(lost_keys) >= 13
    node.nvml.fail(2, "nvmlDeviceGetFieldValues", 0)
    assert [(await node.complete())[2]["metrics"].keys() == before for _ in range(4)][-1]
    reported = [text for text in caplog.messages if "NOT_SUPPORTED" in text]
    assert f"GPU 2 ({UUID.format(2)}): nvmlDeviceGetFieldValues answers NOT_SUPPORTED" in reported[0]
    assert all(sum(key in text for text in reported) == 1 for key in lost_keys)
    (back,) = [text for text in caplog.messages if text.endswith(" again")]
    assert all(key in back for key in lost_keys)


@pytest.mark.parametrize(
    ("call", "value_name"), [("nvmlGpmSampleGet", "sm_active_ratio"), ("nvmlDeviceGetMigMode", "mig")]
)
async def test_a_hang_is_counted_and_reported_by_the_call_that_hangs(node: Node, call: str, value_name: str) -> None:
    await node.open()
    await node.complete()
    node.nvml.hang(2, call, 3600)
    for _ in range(3):
        await node.read(1.0)
        await asyncio.sleep(0.15)
    assert node.gpus.left_out()[UUID.format(2)][value_name] == ((call, "TIMEOUT"),)
    assert {counted for counted, error in node.errors() if error == "TIMEOUT"} == {call}


def test_a_process_ends_while_the_driver_hangs(nvml: ScriptedNvml) -> None:
    nvml.hang(None, "nvmlInit", 3600)
    assert in_a_process(nvml, 0.2)[0] == []


def test_without_a_library_there_are_no_devices_and_the_reason_names_it() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CHILD, "5"], capture_output=True, text=True, timeout=100, check=False
    )
    devices, errors, wrong = json.loads(process.stdout)
    assert (devices, errors) == ([], [])
    assert "libnvidia-ml.so.1 is not found" in wrong[0]


async def test_xid_errors_are_in_the_next_tick_with_their_mig_device_and_survive_a_gpu_that_comes_back(
    node: Node,
) -> None:
    node.nvml.mig(1, [Mig(3), Mig(4)])
    await node.open()
    await node.read()
    await eventually(lambda: node.call_count("nvmlDeviceRegisterEvents", 7))
    node.nvml.xid(0, 79)
    node.nvml.xid(1, 31, 4, times=100)

    async def reported() -> list[dict[str, Any]]:
        for _ in range(3000):
            if devices := [device for device in await node.read() if "events" in device]:
                return devices
            await asyncio.sleep(0.01)
        raise AssertionError("no event came")

    devices = await reported()
    if len(devices) == 1:
        devices += await reported()
    assert [(device["uuid"][:3], device["index"], device["events"][0]["code"]) for device in devices] == [
        ("GPU", 0, 79),
        ("MIG", 1, 31),
    ]
    node.nvml.lose(0)
    states = await node.until_states(["lost", *["ok"] * 9])
    assert states[0]["xids"] == {"79": 1}
    node.nvml.recover(0)
    await node.until_states(["ok"] * 10)
    last: list[dict[str, Any]] = []
    for _ in range(300):  # events before the registration are lost
        node.nvml.xid(0, 79)
        await asyncio.sleep(0.1)
        if (last := await node.read())[0]["xids"]["79"] > 1:
            break
    assert last[0]["xids"]["79"] > 1


async def test_a_gpu_is_read_though_the_text_of_its_pci_address_is_garbage(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    function_of = pynvml._nvmlGetFunctionPointer

    def answer(handle: Any, pci: Any) -> int:
        code: int = function_of("nvmlDeviceGetPciInfo_v3")(handle, pci)
        pci._obj.busId = b"\xff"
        return code

    monkeypatch.setattr(
        pynvml,
        "_nvmlGetFunctionPointer",
        lambda symbol: answer if symbol == "nvmlDeviceGetPciInfo_v3" else function_of(symbol),
    )
    await node.open()
    devices = await node.read()
    assert [device["state"] for device in devices] == ["ok"] * 8
    assert [device["pci_bus_id"] for device in devices][:2] == ["00000000:0A:00.0", "00000000:0B:00.0"]
