"""``gpustream devices`` on a scripted NVML and a kubelet's socket: what is there, who has it, what is left out."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gpustream import devices
from gpustream.cli import main
from gpustream.devices import NothingToShow, describe, only, place_containers, read_twice
from producers.node.config import NodeSettings
from tests.nvml.scripted import Mig, Process, ScriptedNvml
from tests.producers.node import pod_resources
from topics.catalogue import CATALOGUE

pytestmark = pytest.mark.slow

UUID = "GPU-5c41b7ed-0000-4000-8000-{:012}"
MIG = "MIG-5c41b7ed-0001-5000-8000-{:06}000000"
MIG_RESOURCE = "nvidia.com/mig-1g.10gb"
POD = "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10"
POWER = "nvmlDeviceGetPowerUsage"
INTERVAL_S = 2
"""Generous: a GPU has 80 % of it to answer in."""


class Machine:
    """A machine of 4 GPUs, and the command on it, in this process."""

    def __init__(self, nvml: ScriptedNvml, directory: Path) -> None:
        self.nvml = nvml
        self.nvml.gpus = 4
        self.nvml.set(None, sample_period_us=1_000)
        self.procfs = directory / "proc"
        self.procfs.mkdir()
        self.socket: str = "off"

    def run(self, *options: str) -> Result:
        command = ["devices", "--node", "gpu-node-1", "--procfs", str(self.procfs), "--interval", str(INTERVAL_S)]
        self.nvml.load()
        return CliRunner().invoke(main, [*command, *options], env={"GPUSTREAM_POD_RESOURCES_SOCKET": self.socket})

    def report(self, *options: str) -> dict[str, Any]:
        result = self.run("--format", "json", *options)
        assert (result.exit_code, result.stderr) == (0, "")
        (line,) = result.stdout.splitlines()
        report: dict[str, Any] = json.loads(line)
        return report

    def begin(self, pid: int, cgroup: str) -> None:
        """A process."""
        folder = self.procfs / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S {' '.join(map(str, range(4, 30)))}\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")


@pytest.fixture
def machine(nvml: ScriptedNvml, tmp_path: Path) -> Machine:
    return Machine(nvml, tmp_path)


def alone(nvml: ScriptedNvml | None, *options: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own, which loads its own library."""
    command = [sys.executable, "-m", "gpustream", "devices", "--pod-resources-socket", "off", *options]
    environment = {**os.environ, **(nvml.environment() if nvml else {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def _left_out(device: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    return {
        unread["what"]: [(tried["call"], tried["error"]) for tried in unread["tried"]] for unread in device["left_out"]
    }


def _text(report: dict[str, Any]) -> str:
    """The report for people, its lines not broken."""
    return " ".join(devices.text(report).split())


def test_every_key_of_a_device_has_a_value_or_a_reason(machine: Machine) -> None:
    """Also those that need two readings."""
    machine.nvml.fail(0, POWER, 4)
    machine.nvml.fail(0, "nvmlDeviceGetFanSpeed", 3)
    machine.nvml.set(0, utilization_gpu=93, temperature=-32768)
    machine.nvml.set(1, gpm_supported=0)
    report = machine.report()
    assert (report["schema"], report["node"], report["interval_s"]) == (1, "gpu-node-1", INTERVAL_S)
    for device in report["devices"]:
        assert device["metrics"].keys() | _left_out(device).keys() >= set(CATALOGUE)
        assert device["metrics"].keys().isdisjoint(_left_out(device))
    assert "no kubelet is asked" in _text(report)
    first, second, third, _ = report["devices"]
    assert first["metrics"]["gpu_utilization_ratio"] == 0.93
    assert _left_out(first) == {
        "power_watts": [(POWER, "NO_PERMISSION")],
        "fan_speed_ratio": [("nvmlDeviceGetFanSpeed", "NOT_SUPPORTED")],
        "temperature_celsius": [("nvmlDeviceGetTemperatureV", "IMPLAUSIBLE")],
    }
    assert _left_out(second)["sm_active_ratio"] == [("nvmlGpmQueryDeviceSupport", "NOT_SUPPORTED")]
    assert third["left_out"] == []
    assert {"sm_active_ratio", "gpu_utilization_max_ratio", "pcie_tx_bytes_per_second"} <= third["metrics"].keys()


def test_an_older_driver_has_no_such_symbols_and_that_is_said(nvml_directory: Path) -> None:
    result = alone(ScriptedNvml(nvml_directory, gpus=1, old=True), "--format", "json", "--interval", str(INTERVAL_S))
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    (device,) = report["devices"]
    assert _left_out(device)["memory_reserved_bytes"][-1][1] in ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH")
    assert _left_out(device)["sm_active_ratio"] == [("nvmlGpmQueryDeviceSupport", "FUNCTION_NOT_FOUND")]
    assert "no such symbol in this driver" in devices.text(report)


def test_holders_are_found_by_every_form_of_id_and_what_is_on_no_device_is_said(
    machine: Machine, tmp_path: Path
) -> None:
    machine.nvml.mig(1, [Mig(1), Mig(5, 0, "3g.40gb", 40 << 30)])
    answer = pod_resources.answer(
        pod_resources.pod("bert-0", pod_resources.container(gpus=[UUID.format(0) + "::0", UUID.format(0) + "::1"])),
        pod_resources.pod("bert-1", pod_resources.container(gpus=[UUID.format(0) + "::2"])),
        pod_resources.pod("mig", pod_resources.container("main", **{MIG_RESOURCE: [MIG.format(1)]})),
        pod_resources.pod("gke", pod_resources.container(gpus=["nvidia1/gi5"])),
        pod_resources.pod("hami", pod_resources.container(gpus=[UUID.format(3) + "-4"])),
        pod_resources.pod("odd", pod_resources.container(gpus=["huh", pod_resources.GPU_A])),
        pod_resources.pod("dra", pod_resources.claiming("main", "gpu", ("gpu.nvidia.com", "gpu-node-1", "gpu-0"))),
    )
    machine.socket = str(tmp_path / "kubelet.sock")
    with pod_resources.serving(Path(machine.socket), answer):
        report = machine.report()
    holders = {
        device["uuid"]: [
            (holder["pod"], holder["resource"], holder["device_id"], holder["hami_slot"])
            for holder in device["holders"]
        ]
        for device in report["devices"]
    }
    assert holders == {
        UUID.format(0): [
            ("bert-0", "nvidia.com/gpu", UUID.format(0) + "::0", False),
            ("bert-0", "nvidia.com/gpu", UUID.format(0) + "::1", False),
            ("bert-1", "nvidia.com/gpu", UUID.format(0) + "::2", False),
        ],
        UUID.format(1): [],
        MIG.format(1): [("mig", MIG_RESOURCE, MIG.format(1), False)],
        MIG.format(5): [("gke", "nvidia.com/gpu", "nvidia1/gi5", False)],
        UUID.format(2): [],
        UUID.format(3): [("hami", "nvidia.com/gpu", UUID.format(3) + "-4", True)],
    }
    unplaced = {(holder["pod"], holder["device_id"], holder["why"]) for holder in report["unplaced"]}
    assert unplaced == {
        ("odd", "huh", "unknown_form"),
        ("odd", pod_resources.GPU_A, "no_such_device"),
        ("dra", None, "claim"),
    }
    claim = {"claim": "gpu", "namespace": "ml-team", "driver": "gpu.nvidia.com", "pool": "gpu-node-1"}
    assert [holder["claim"] for holder in report["unplaced"] if holder["claim"]] == [{**claim, "device": "gpu-0"}]
    assert report["kubelet"] == {"socket": machine.socket, "containers": 7, "trouble": None}
    text = _text(report)
    assert f"bert-0/main has nvidia.com/gpu {UUID.format(0)}::0, {UUID.format(0)}::1" in text
    assert "a slot of HAMi's: the pod's annotation names the GPU" in text
    assert "on no device: huh of ml-team/odd/main: the id is of no known form" in text
    assert "gpu.nvidia.com/gpu-node-1/gpu-0 of ml-team/dra/main: a claim" in text


def test_mig_devices_stand_below_their_gpu_with_profile_instances_memory_and_what_they_lack(machine: Machine) -> None:
    machine.nvml.mig(1, [Mig(1), Mig(2), Mig(5, 0, "3g.40gb", 40 << 30, 2 << 30)])
    report = machine.report()
    lines = devices.text(report).splitlines()
    slices = [device for device in report["devices"] if device.get("mig")]
    assert [device["mig"]["profile"] for device in slices] == ["1g.10gb", "1g.10gb", "3g.40gb"]
    assert slices[2]["mig"] == {
        "uuid": MIG.format(5),
        "parent_uuid": UUID.format(1),
        "gpu_instance": 5,
        "compute_instance": 0,
        "profile": "3g.40gb",
    }
    assert slices[2]["metrics"]["memory_used_bytes"] == 2 << 30
    titles = [line for line in lines if "GPU" in line and line.endswith(", ok")]
    assert [line.partition(":")[0] for line in titles] == [
        "GPU 0",
        "GPU 1",
        "  GPU 1 MIG 1/0",
        "  GPU 1 MIG 2/0",
        "  GPU 1 MIG 5/0",
        "GPU 2",
        "GPU 3",
    ]
    assert sum("as of GPU 1 MIG 1/0" in line for line in lines) == 2


def test_without_a_kubelet_it_says_so_and_shows_the_processes_with_pod_and_job(
    machine: Machine, tmp_path: Path
) -> None:
    machine.socket = str(tmp_path / "nowhere.sock")
    machine.nvml.processes(0, [Process(41, 3 << 30, sm=90), Process(42, None, sm=0), Process(43, 5)])
    machine.begin(41, f"/kubepods/burstable/pod{POD}/{'ab' * 32}")
    machine.begin(42, "/system.slice/slurmstepd.scope/job_4242/step_0/user/task_0")
    report = machine.report()
    assert report["kubelet"]["containers"] is None
    assert "the socket is not there" in report["kubelet"]["trouble"]
    first = report["devices"][0]
    assert [(row["pid"], row.get("pod_uid"), row.get("job_id")) for row in first["processes"]] == [
        (41, POD, None),
        (42, None, "4242"),
        (43, None, None),
    ]
    assert [job["id"] for job in first["jobs"]] == ["4242"]
    text = _text(report)
    assert f"41, 3 GiB, 90 %, pod {POD}" in text
    assert "42, memory not known, 0 %, job 4242" in text
    assert "43, 0 GiB, 10 %, of no pod or job that can be seen" in text
    assert "the socket is not there" in text


def test_gpus_that_are_lost_hang_or_can_not_be_opened_are_shown_with_the_call_and_the_error(nvml: ScriptedNvml) -> None:
    nvml.gpus = 4
    nvml.fail(0, "nvmlDeviceGetHandleByIndex", 4)
    nvml.fail(1, "nvmlDeviceGetUtilizationRates", 15)
    nvml.hang(2, "nvmlDeviceGetHandleByIndex", 3600)
    nvml.hang(3, POWER, 3600)
    nvml.load()
    settings = NodeSettings(kafka="", node="gpu-node-1", interval_s=INTERVAL_S, pod_resources_socket=None)
    report = asyncio.run(read_twice(settings, open_within_s=3))
    assert report["unopened"] == [
        {"place": 0, "call": "nvmlDeviceGetHandleByIndex", "error": "NO_PERMISSION"},
        {"place": 2, "call": "nvmlDeviceGetHandleByIndex", "error": "TIMEOUT"},
    ]
    assert [(device["state"], device["refusal"], device["left_out"]) for device in report["devices"]] == [
        ("lost", {"call": "nvmlDeviceGetUtilizationRates", "error": "GPU_IS_LOST"}, []),
        ("ok", None, [{"what": "power_watts", "tried": [{"call": POWER, "error": "TIMEOUT"}]}]),
    ]
    text = _text(report)
    assert text.startswith("not well: GPU 1 lost, GPU at 0 can't be opened, GPU at 2 can't be opened node gpu-node-1:")
    assert "GPU 1: NVIDIA H100 80GB HBM3, lost why lost (nvmlDeviceGetUtilizationRates)" in text
    assert "GPU at 2 can't be opened: no answer in time (nvmlDeviceGetHandleByIndex)" in text


def test_one_device_is_shown_by_its_index_or_its_uuid_and_a_gpu_with_its_mig_devices(machine: Machine) -> None:
    machine.nvml.mig(1, [Mig(1), Mig(5, 0, "3g.40gb")])
    gpu = machine.report("--device", "1")
    assert [device["uuid"] for device in gpu["devices"]] == [UUID.format(1), MIG.format(1), MIG.format(5)]
    result = machine.run("--device", MIG.format(5).replace("b7ed", "B7ED"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.partition(":")[0] for line in result.stdout.splitlines() if line.endswith(", ok")] == [
        "  GPU 1 MIG 5/0"
    ]
    assert max(map(len, result.stdout.splitlines())) <= devices.WIDTH
    with pytest.raises(NothingToShow, match=f"no device '17' here, by index or UUID: there are 1 {UUID.format(1)}, "):
        only(gpu, "17")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_driver_that_is_not_loaded_is_one_sentence_and_exit_code_1(machine: Machine, form: str) -> None:
    machine.nvml.driver("absent")
    result = machine.run("--format", form)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("no NVIDIA driver: its library is there")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_library_it_is_said_what_is_missing() -> None:
    result = alone(None)
    assert (result.returncode, result.stdout) == (1, "")
    assert "libnvidia-ml.so.1 is not found" in result.stderr


def test_a_driver_without_gpus_is_one_sentence_too(machine: Machine) -> None:
    machine.nvml.gpus = 0
    result = machine.run()
    assert (result.exit_code, result.stderr) == (1, "the NVIDIA driver has no GPU\n")


def test_an_interval_that_is_too_short_to_read_a_gpu_in_is_an_error(machine: Machine) -> None:
    result = machine.run("--interval", "50ms")
    assert result.exit_code == 2
    assert "the least is 100ms" in result.stderr


def test_job_files_that_can_not_be_read_are_reported(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0").write_text("4242\n")
    (tmp_path / "jobs" / "1").mkdir()
    (tmp_path / "jobs" / "jobs").mkdir()
    (tmp_path / "jobs" / "jobs" / "4242").write_text("user=ada\npartition=gpu\naccount=ml\n")
    report = machine.report("--hpc-job-mapping-dir", str(tmp_path / "jobs"))
    assert report["devices"][0]["jobs"] == [{"id": "4242", "user": "ada", "partition": "gpu", "account": "ml"}]
    (trouble,) = report["job_files"]["troubles"]
    assert "it is not a file" in trouble


DEVICE = {"uuid": UUID.format(0), "index": 0, "vendor": "nvidia", "state": "ok", "metrics": {}}
REPORT = {
    "node": "gpu-node-1",
    "interval_s": 1.0,
    "kubelet": {"socket": None, "containers": None, "trouble": None},
    "job_files": {"directory": None, "troubles": []},
    "devices": [],
    "unopened": [],
    "unplaced": [],
}


@given(st.lists(st.text(), max_size=4))
def test_whatever_a_kubelet_calls_a_device_it_is_on_one_or_on_none(device_ids: list[str]) -> None:
    container = {"namespace": "ml-team", "pod": "p", "container": "c", "resource": "r", "device_ids": device_ids}
    _, unplaced = place_containers([container], [DEVICE])
    assert [row["device_id"] for row in unplaced] == device_ids
    text = devices.text({**REPORT, "unplaced": unplaced})
    assert all(letter.isprintable() for line in text.split("\n") for letter in line)
    assert max(map(len, text.split("\n"))) <= devices.WIDTH


def test_a_device_that_is_wanted_of_none_is_not_there() -> None:
    with pytest.raises(NothingToShow, match="there are none"):
        only(REPORT, "0")


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("gpu_utilization_ratio", 0.93, "93 %"),
        ("gpu_utilization_ratio", 0.935, "93.5 %"),
        ("memory_used_bytes", 68719476736, "64 GiB"),
        ("sm_clock_hz", 1_980_000_000, "1980 MHz"),
        ("clock_event_reasons", 4, "0x4"),
        ("row_remap_pending", 1, "yes"),
        ("ecc_corrected_volatile_total", 0, "0"),
        ("pcie_tx_bytes_per_second", 1.5 * (1 << 20), "1.5 MiB/s"),
        ("temperature_celsius", -3, "-3 C"),
    ],
)
def test_values_are_written_with_units_that_people_use(key: str, value: float, written: str) -> None:
    assert devices.amount(key, value) == written


def test_many_processes_are_counted_and_the_first_are_shown() -> None:
    processes = [{"pid": pid} for pid in range(100, 120)]
    device = {**DEVICE, "holders": [], "refusal": None, "left_out": [], "processes": processes}
    lines = devices.text({**REPORT, "devices": [device]}).splitlines()
    assert sum("process" in line for line in lines if "memory not known" in line) == devices.MAX_PROCESSES
    assert any("and 12 more" in line for line in lines)


def test_no_line_is_too_long_however_long_names_are() -> None:
    names = {"namespace": "n" * 63, "pod": "p" * 253, "container": "c" * 63, "resource": "r" * 63, "hami_slot": True}
    holders = [{**names, "device_id": "d" * 300}]
    device = {**DEVICE, "model": "m" * 96, "holders": holders, "refusal": {"call": "c" * 120, "error": "E" * 80}}
    report = {**REPORT, "node": "n" * 253, "devices": [{**device, "state": "lost", "left_out": []}]}
    assert max(map(len, devices.text(report).splitlines())) <= devices.WIDTH


def test_a_value_too_long_for_a_column_has_a_line_of_its_own() -> None:
    metrics = {"gpu_utilization_ratio": 1, "low_utilization_violation_seconds_total": 1e12, "power_watts": 5}
    device = {**DEVICE, "metrics": metrics, "holders": [], "refusal": None, "left_out": []}
    lines = devices.text({**REPORT, "devices": [device]}).splitlines()
    assert "    low_utilization_violation_seconds_total 1000000000000 s" in lines
    assert max(map(len, lines)) <= devices.WIDTH


def test_the_form_of_the_report_is_that_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "node.md").read_text()
    section = page.split("## What would be sampled here")[1].split("\n## ")[0]
    for field in ("schema", *REPORT, "holders", "refusal", "left_out", *devices._UNPLACED_REASONS):
        assert f"`{field}`" in section


def test_gpus_that_are_lost_or_hang_come_first_with_their_mig_devices() -> None:
    states = {"GPU-a": "ok", "GPU-b": "timeout", "GPU-c": "lost"}
    gpus = [{"uuid": uuid, "state": state} for uuid, state in states.items()]
    part = {"uuid": "MIG-b", "state": "ok", "mig": {"parent_uuid": "GPU-b"}}
    described = describe([gpus[0], gpus[1], part, gpus[2]], {}, {}, {})
    assert [row["uuid"] for row in described] == ["GPU-b", "MIG-b", "GPU-c", "GPU-a"]
