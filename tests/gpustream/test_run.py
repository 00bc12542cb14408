"""``gpustream run`` as it is: a fleet or this machine's GPUs, the embedded broker, the stream, the sink."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from gpustream.cli import main
from gpustream.run import STORY_RULES
from streams.alerts.rules import rules_file
from tests.eventually import LIMIT_S, eventually_sync
from tests.nvml.scripted import ScriptedNvml

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "gpustream", "run"]
COMMAND = [*RUN, "--simulate", "2x4", "--interval", "250ms"]


def _options(port: int, *more: str) -> list[str]:
    return [*COMMAND, "--listen", "off", "--page-listen", "off", "--scrape-listen", f"127.0.0.1:{port}", *more]


def test_a_short_run_loses_nothing_and_says_so_in_one_object(port: int, tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    result = subprocess.run(
        _options(port, "--duration", "3s", "--summary", "json", "--truth", str(truth)),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )

    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    summary = msgspec.json.decode(line)
    assert summary["ticks"] == summary["attributed"]["exact"] >= 16
    assert summary["delivered"] == {"scrape": summary["samples"]}
    assert (summary["lost"], summary["dropped"], summary["dead_lettered"]) == (0, 0, 0)
    assert truth.read_text().count("\n") > summary["ticks"]
    assert "the page is at" not in result.stderr


def test_it_serves_a_page_and_says_where_and_ctrl_c_drains_and_shows_people_the_summary(port: int) -> None:
    more = ("--page-listen", "127.0.0.1:0", "--log-format", "json")
    process = subprocess.Popen(_options(port, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        announced = next(line for line in process.stderr or () if "the page is at" in line)
        url = str(msgspec.json.decode(announced)["message"]).rpartition(" ")[2]
        with urllib.request.urlopen(url) as answer:  # noqa: S310 - it is http
            assert b"<title>gpustream</title>" in answer.read()
        _scraped(port)
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0, err
    assert out.splitlines()[-1].split() == ["lost", "0"]


def _scraped(port: int) -> str:
    """The first scrape that shows a pod: the fleet's nodes come one after the other, and not each GPU is held."""

    def scrape() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                text: str = answer.read().decode()
        except OSError:
            return ""
        return text if "k8s_pod_name" in text else ""

    return eventually_sync(scrape)


def test_a_broker_that_dies_ends_the_run_soon(port: int) -> None:
    process = subprocess.Popen(_options(port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _scraped(port)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)

    assert len(children) == 1
    assert process.returncode == 1
    assert "the embedded broker ended" in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_summary_that_cannot_be_written_is_one_sentence_and_exit_code_1(port: int, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            _options(port, "--duration", "1s"),
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )

    assert result.returncode == 1
    assert result.stderr.endswith("CRITICAL gpustream.serve: can't write: No space left on device\n")


def test_a_port_in_use_is_one_sentence_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = subprocess.run(
            _options(listener.getsockname()[1]), capture_output=True, text=True, check=False, timeout=LIMIT_S
        )

    assert result.returncode == 1
    assert "can't serve on 127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_fleet_it_is_the_gpus_the_processes_and_the_alerts_of_this_machine(
    port: int, nvml: ScriptedNvml, tmp_path: Path
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    nvml.gpus = 2
    nvml.processes(0, [(process.pid, 1 << 30)])
    nvml.set(0, utilization_gpu=93)
    nvml.set(1, row_remap_failure=1)
    expected = (f"{nvml.gpus} GPUs (1 held)", ", 1 alert, ", f"busiest pid {process.pid}")
    options = ["--interval", "250ms", "--node", "workstation", "--listen", "off"]
    addresses = ["--scrape-listen", f"127.0.0.1:{port}", "--pod-resources-socket", "/no/such/kubelet.sock"]
    with (tmp_path / "stderr").open("w+") as stderr:
        run = subprocess.Popen(
            [*RUN, *options, *addresses],
            env=os.environ | nvml.environment(),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        lines = list(takewhile(lambda line: not all(part in line for part in expected), run.stdout or ()))
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=LIMIT_S)
    process.communicate(b"\n")

    assert run.returncode == 0, (tmp_path / "stderr").read_text()
    assert all("too little CPU" in line for line in [*lines, *out.splitlines()] if "not ready" in line)
    assert out.splitlines()[-1].split() == ["lost", "0"]


def test_a_machine_without_a_driver_gets_a_sentence_that_says_what_to_do() -> None:
    result = subprocess.run(RUN, env=os.environ | {"LD_LIBRARY_PATH": ""}, capture_output=True, text=True, check=False)

    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    assert result.returncode == 2
    assert "no NVIDIA driver" in result.stderr
    assert "--simulate 4x8" in result.stderr


def test_the_embedded_broker_takes_no_login() -> None:
    result = CliRunner().invoke(main, ["run", "--simulate", "1x1", "--kafka-security", "ssl"])

    assert result.exit_code == 2
    assert "--kafka-security: it is of no use without --kafka or --kafka-config" in result.stderr


def test_the_rules_of_the_story_are_the_defaults_but_soon() -> None:
    reported, usual = (rules_file.load(path) for path in (STORY_RULES, None))
    changed = {new.name: (new, old) for new, old in zip(reported.rules, usual.rules, strict=True) if new != old}

    assert list(changed) == ["GPUHeldIdle"]
    assert changed["GPUHeldIdle"][0].for_ms == 20_000
