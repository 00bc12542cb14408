"""``make gpu`` on a scripted NVML, with an nvidia-smi that says the same, something else, or nothing."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.comparison import Outcome, compare
from tests.gpu.nvidia_smi import FIELDS, Failed, NvidiaSmi, Sample, parsed
from tests.nvml.scripted import ScriptedNvml

pytestmark = pytest.mark.slow

UUID = "GPU-5c41b7ed-0000-4000-8000-{:012}"

SMI = """import sys
rows = {rows!r}
unknown = "clocks_event_reasons.active"
if sys.argv[1] == "-L":
    print("\\n".join("GPU %d: NVIDIA H100 80GB HBM3 (UUID: %s)" % (n, uuid) for n, uuid in enumerate(rows)))
else:
    names = sys.argv[1].removeprefix("--query-gpu=").split(",")
    if unknown in names:
        sys.exit('Field "%s" is not a valid field to query.' % unknown)
    for uuid, values in rows.items():
        print(", ".join([uuid, *(values.get(name, "[N/A]") for name in names[1:])]))
"""


def said_of(gpu: int) -> dict[str, str]:
    """What nvidia-smi says of a scripted GPU: the defaults of nvml.c."""
    return {
        "utilization.gpu": str(40 + 7 * gpu),
        "utilization.memory": str(20 + 5 * gpu),
        "utilization.encoder": str(gpu),
        "utilization.decoder": str(1 + gpu),
        "memory.total": "81920",
        "memory.reserved": "600",
        "memory.used": str((4 + gpu) * 1024),
        "memory.free": str(81920 - 600 - (4 + gpu) * 1024),
        "power.draw": f"{300 + 10 * gpu}.00",
        "enforced.power.limit": "700.00",
        "power.max_limit": "750.00",
        "temperature.gpu": str(40 + gpu),
        "temperature.memory": str(50 + gpu),
        "fan.speed": str(30 + gpu),
        "pstate": "P0",
        "clocks.current.graphics": str(1980 - gpu),
        "clocks.current.sm": str(1965 - gpu),
        "clocks.current.memory": "2619",
        "clocks.max.sm": "1980",
        "clocks.max.memory": "2620",
        "ecc.errors.corrected.volatile.total": str(gpu),
        "ecc.errors.uncorrected.volatile.total": "0",
        "ecc.errors.corrected.aggregate.total": str(10 + gpu),
        "ecc.errors.uncorrected.aggregate.total": "1",
        "retired_pages.single_bit_ecc.count": "0",
        "retired_pages.double_bit.count": "0",
        "retired_pages.pending": "No",
    }


def fake_smi(directory: Path, rows: dict[str, dict[str, str]]) -> None:
    directory.mkdir(exist_ok=True)
    program, answers = directory / "nvidia-smi", directory / "answers.py"
    answers.write_text(SMI.format(rows=rows))
    program.write_text(f'#!/bin/sh\nexec {shlex.join((sys.executable, str(answers)))} "$@"\n')
    program.chmod(0o755)


def make_gpu(tmp_path: Path, seconds: str, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", seconds, str(tmp_path / "out")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def compared(
    tmp_path: Path, environment: dict[str, str], verdict: str
) -> "tuple[subprocess.CompletedProcess[str], str]":
    """What it ends with, and its report, once that matches the verdict, a pattern; or else the last ones.

    On a busy machine few answers of nvidia-smi come on both sides of a tick: then it runs for longer.
    """
    for seconds in ("2", "8", "32"):
        completed = make_gpu(tmp_path, seconds, environment)
        report = (tmp_path / "out" / "report.md").read_text()
        if re.search(verdict, report):
            break
    return completed, report


@pytest.fixture
def machine(nvml: ScriptedNvml, tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with GPUs, and nvidia-smi first on its PATH."""
    nvml.gpus = 2
    return nvml.environment() | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_a_node_and_an_nvidia_smi_of_one_opinion_are_a_report_and_fixtures(
    machine: dict[str, str], tmp_path: Path
) -> None:
    fake_smi(tmp_path / "bin", {UUID.format(gpu): said_of(gpu) for gpu in range(2)})
    completed, report = compared(tmp_path, machine, r"\*\*Of one opinion about all 27 values\.\*\*")
    assert (completed.returncode, completed.stderr) == (0, ""), completed.stdout + completed.stderr
    assert "**Of one opinion about all 27 values.**" in report
    ticks = [json.loads(line) for line in (tmp_path / "out" / "ticks.jsonl").read_text().splitlines()]
    assert {device["uuid"] for tick in ticks for device in tick["devices"]} == {UUID.format(0), UUID.format(1)}
    answers = json.loads((tmp_path / "out" / "nvml.json").read_text())
    assert answers[UUID.format(1)]["nvmlDeviceGetPowerUsage"]["answer"] == 310_000
    assert answers[UUID.format(0)]["nvmlDeviceGetUtilizationRates"]["answer"] == {"gpu": 40, "memory": 20}


def test_where_they_disagree_the_report_says_about_what_and_it_fails(machine: dict[str, str], tmp_path: Path) -> None:
    rows = {UUID.format(gpu): said_of(gpu) for gpu in range(2)}
    rows[UUID.format(1)] |= {"temperature.gpu": "77", "fan.speed": "[N/A]"}
    fake_smi(tmp_path / "bin", rows)
    both = r"\*\*Not of one opinion: (?=.*fan_speed_ratio)(.*temperature_celsius.*)\.\*\*"
    completed, report = compared(tmp_path, machine, both)
    assert completed.returncode == 1
    (disagreeing,) = re.findall(both, report)
    assert {"temperature_celsius", "fan_speed_ratio"} <= set(disagreeing.split(", "))  # and others, on a busy machine
    assert "41, 77" in report


def test_without_nvidia_smi_or_without_a_gpu_it_says_what_is_missing(
    nvml: ScriptedNvml, machine: dict[str, str], tmp_path: Path
) -> None:
    completed = make_gpu(tmp_path, "2", nvml.environment() | {"PATH": "/nonexistent"})
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "nvidia-smi is not on PATH" in completed.stderr
    fake_smi(tmp_path / "bin", {})
    nvml.driver("absent")
    completed = make_gpu(tmp_path, "2", machine)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "there is no GPU to read: no NVIDIA driver" in completed.stderr
    assert not (tmp_path / "out").exists()


def test_what_nvidia_smi_prints_is_in_the_catalogues_units_and_what_it_does_not_know_is_absent() -> None:
    keys = ("memory_used_bytes", "performance_state", "clock_event_reasons", "power_watts", "fan_speed_ratio")
    printed = "GPU-1, 1024, P8, 0x0000000000000005, 70.12, [N/A]\nGPU-2, garbage, [Unknown Error], 0x0, 1, 30\n"
    assert parsed(printed, {key: FIELDS[key] for key in keys}) == {
        "GPU-1": dict(zip(keys, (1 << 30, 8.0, 5.0, 70.12, None), strict=True)),
        "GPU-2": dict(zip(keys, (None, None, 0.0, 1.0, 0.3), strict=True)),
    }


def test_an_nvidia_smi_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="does not run"):
        NvidiaSmi(str(tmp_path / "none")).sample()


def _tick(ts_ms: int, watts: float | None) -> dict[str, Any]:
    metrics = {} if watts is None else {"power_watts": watts}
    return {"ts_ms": ts_ms, "devices": [{"uuid": "GPU-1", "state": "ok", "metrics": metrics}]}


def _answer(at_ms: int, watts: float | None) -> Sample:
    return Sample(at_ms - 10, at_ms, {"GPU-1": {"power_watts": watts}})


def test_a_value_between_what_nvidia_smi_said_before_and_after_agrees() -> None:
    ticks = [_tick(1000, 150), _tick(2000, 201), _tick(9000, 5)]
    samples = [_answer(500, 100), _answer(1500, 200), _answer(2500, 200)]
    (outcome,) = compare(ticks, samples).values()
    assert outcome == Outcome(2, 1, outcome.worst, (201, 200))
    assert outcome.worst == pytest.approx(0.99)


def test_a_value_that_only_one_of_the_two_has_is_counted() -> None:
    ticks = [_tick(1000, None), _tick(2000, 5)]
    outcome = compare(ticks, [_answer(500, 100), _answer(1400, 100), _answer(1900, None), _answer(2500, None)])[
        "power_watts"
    ]
    assert (outcome.only_smi, outcome.compared + outcome.only_node) == (1, 1)
