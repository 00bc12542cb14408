"""On the event loop of the command, a kubelet that is stopped or killed delays nothing, and the process ends."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


SCENARIO = """
import asyncio, logging, sys, uvloop
from pathlib import Path
from producers.node import instruments
from producers.node.kubelet import Kubelet
from delivery.instruments import Instruments

logging.disable()  # so that standard error has no log lines

async def main():
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    kubelet = Kubelet(Path(sys.argv[1]), Instruments(instruments.INSTRUMENTS), deadline_s=60.0)
    while True:
        print(len(await kubelet.read(0.5) or ()), flush=True)
        if await asyncio.to_thread(sys.stdin.readline) == "end\\n":
            break
    if sys.argv[2] == "close":
        await kubelet.close()

uvloop.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a kubelet's socket, which does not exist yet."""
    return tmp_path / "kubelet.sock"


@pytest.mark.parametrize("end", ["close", "leave"])
def test_on_uvloop_a_stopped_kubelet_times_out_and_the_process_ends(path: Path, end: str) -> None:
    with kubelet_process(path, 3) as kubelet, scenario(path, end) as process:
        assert tick(process) == "3"
        kubelet.send_signal(signal.SIGSTOP)
        assert tick(process, "next") == "3"
        assert tick(process, "next") == "3"
        out, err = process.communicate("end\n", timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, "", "")


def test_on_uvloop_a_kubelet_that_is_killed_is_found_again(path: Path) -> None:
    with scenario(path, "close") as process:
        assert tick(process) == "0"
        with kubelet_process(path, 3):
            tick_until(process, "3")
        assert path.is_socket()
        assert tick(process, "next") == "3"
        with kubelet_process(path, 4):
            tick_until(process, "4")
        out, err = process.communicate("end\n", timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, "", "")


def tick_until(process: "subprocess.Popen[str]", answer: str) -> None:
    for _ in range(100):
        if tick(process, "next") == answer:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {answer}")


def tick(process: "subprocess.Popen[str]", line: str | None = None) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@contextlib.contextmanager
def scenario(path: Path, end: str) -> "Iterator[subprocess.Popen[str]]":
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", SCENARIO, str(path), end], cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def kubelet_process(path: Path, count: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "tests.producers.node.pod_resources", str(path), str(count)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
            yield process
        finally:
            process.kill()
