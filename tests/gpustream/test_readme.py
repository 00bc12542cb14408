"""Every block of the README is true: shell blocks run, the sample could be had, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpustream.tally import RunSummary
from tests.command_line import parsed
from tests.eventually import LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
MAKE = [line for line in LINES if line.startswith("make")]
COMMANDS = [line for line in LINES if line.startswith(".venv/bin/gpustream")]
ELSEWHERE = [line for line in LINES if line.startswith("gpustream")]


def test_every_line_of_every_shell_block_is_tested() -> None:
    assert sorted(LINES) == sorted(MAKE + COMMANDS + ELSEWHERE)
    assert len(MAKE) >= 2
    assert len(COMMANDS) >= 1


@pytest.mark.parametrize("line", MAKE)
def test_make_knows_the_target(line: str) -> None:
    command = [*shlex.split(line, comments=True), "-n", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("line", COMMANDS)
def test_what_needs_no_server_runs_and_ends_as_the_sample_says(line: str) -> None:
    arguments = shlex.split(line.removeprefix(".venv/bin/gpustream"))
    free_ports = {"GPUSTREAM_LISTEN": "127.0.0.1:0", "GPUSTREAM_SCRAPE_LISTEN": "127.0.0.1:0"}
    result = subprocess.run(
        [sys.executable, "-m", "gpustream", *arguments],
        cwd=ROOT,
        env={**os.environ, **free_ports},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )

    assert result.returncode == 0, result.stderr
    assert _summary(result.stdout.splitlines()[-1]).ok


def test_the_sample_summary_is_one_that_could_be_had() -> None:
    (sample,) = [_summary(block) for kind, block in BLOCKS if kind == "json"]

    assert sample.ok
    assert sample.ticks == sample.attributed.exact
    assert sample.delivered == {"scrape": sample.samples}


def _summary(text: str) -> RunSummary:
    return msgspec.json.decode(text, type=RunSummary)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_needs_servers_is_a_command_line_that_is_right(line: str) -> None:
    assert parsed(shlex.split(line, comments=True)[1:]).params["kafka"] == "kafka-0:9092"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)

    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_it_fits_a_screen_or_two() -> None:
    assert len(README.splitlines()) <= 100
