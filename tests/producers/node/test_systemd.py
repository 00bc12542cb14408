"""The systemd units run existing commands, with no more rights than they need."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import parsed

UNITS = Path(__file__).parents[3] / "producers" / "node" / "systemd"
NAMES = ("gpustream-node.service", "gpustream@.service")


class Unit(dict[str, list[str]]):
    """The directives of a unit, each with all its values."""

    def __init__(self, name: str) -> None:
        for line in (UNITS / name).read_text().splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                self.setdefault(key, []).append(value)


@pytest.mark.parametrize("name", NAMES)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    text = (UNITS / name).read_text()
    strict = configparser.ConfigParser(strict=False, interpolation=None)
    strict.optionxform = str  # type: ignore[assignment, method-assign]
    strict.read_string(text)
    assert strict.sections() == ["Unit", "Service", "Install"]
    if (analyze := shutil.which("systemd-analyze")) is not None:
        unit = tmp_path / name.replace("@.", "@alerts.")
        unit.write_text(text.replace("/opt/gpustream/bin/gpustream", "/bin/true"))
        process = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
        lines = [line for line in process.stderr.splitlines() if unit.name in line]
        assert (process.returncode, lines) == (0, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_has_no_more_rights_than_it_needs(name: str) -> None:
    unit = Unit(name)
    for switch in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelModules"):
        assert unit[switch] == ["yes"]
    assert (unit["ProtectSystem"], unit["CapabilityBoundingSet"]) == (["strict"], [""])
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert "User" not in unit


def test_the_node_producer_sees_nvmls_devices_and_the_processes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("gpustream-node.service")
    assert unit["DeviceAllow"] == ["char-nvidia* rw"]
    assert not {"PrivateDevices", "PrivateUsers", "PrivatePIDs"} & unit.keys()
    assert unit["ProtectProc"] == ["default"]
    for variable in " ".join(unit["Environment"]).split():
        monkeypatch.setenv(*variable.split("=", 1))
    monkeypatch.setenv("GPUSTREAM_KAFKA", "kafka:9092")
    with parsed(unit["ExecStart"][0].split()[1:]) as context:
        assert context.params["pod_resources_socket"] is None
        assert context.params["hpc_job_mapping_dir"] == Path("/run/gpu-jobs")


def test_the_driver_is_loaded_before_systemd_looks_up_its_devices() -> None:
    unit = Unit("gpustream-node.service")
    assert "modprobe@nvidia.service" in unit["Wants"][0].split()
    assert "modprobe@nvidia.service" in unit["After"][0].split()


@pytest.mark.parametrize("command", ["stream attribution", "stream usage", "sink remote-write --url http://p/w"])
def test_a_component_runs_with_its_environment_file(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    unit = Unit("gpustream@.service")
    monkeypatch.setenv("GPUSTREAM_KAFKA", "kafka:9092")
    monkeypatch.setenv("GPUSTREAM_INSTANCE_ID", "host-name")
    with parsed(unit["ExecStart"][0].replace("$COMMAND", command).split()[1:]) as context:
        assert context.params["instance_id"] == "host-name"
