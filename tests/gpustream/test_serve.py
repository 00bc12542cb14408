"""A component as a process: signals, exit codes, and an end that always comes."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from delivery.topic_admin import ContractMismatch, Mismatch
from delivery.values import Address
from gpustream import serve
from tests.eventually import LIMIT_S
from tests.gpustream.fakes import FakeComponent, FakeSettings

SETTINGS = FakeSettings("127.0.0.1:1", "c")

PROCESS = """
import asyncio, sys, threading, time
from gpustream import logs, serve
from delivery.values import Address

async def main(stop):
    print("up", flush=True)
    {body}
    return 0

logs.setup()
sys.exit(serve.run(main, stop_within_s={within}))
"""


def _process(body: str, within: float = 10.0) -> subprocess.Popen[str]:
    code = PROCESS.format(body=body, within=within)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.slow
def test_sigterm_stops_cleanly() -> None:
    process = _process("await stop.wait()")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0
    assert "signal=SIGTERM" in err


HANGS = ["await asyncio.sleep(3600)", "while True: time.sleep(0.1)", "while True: threading.Event().wait(0.1)"]
"""A signal that comes just before a system call does not end it: so each takes a part of a second only."""


@pytest.mark.parametrize("body", HANGS)
def test_a_stop_that_hangs_ends_with_70(body: str) -> None:
    process = _process(body, within=0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 70
    assert "not stopped in time" in err


@pytest.mark.slow
def test_a_task_that_will_not_end_does_not_keep_the_process() -> None:
    stubborn = """
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    task = asyncio.create_task(stubborn())
    await stop.wait()
    print("the end")
    return 3
    """
    process = _process(stubborn, within=3600)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_S)

    assert (process.returncode, out) == (3, "the end\n")


THREADS = [
    "threading.Thread(target=time.sleep, args=(3600,)).start()",
    "asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)",
]
"""One of a component's own, and one of the loop, as it has for the lookup of a name."""


@pytest.mark.slow
@pytest.mark.parametrize("output", ["print('the end')", "sys.stdout = open('/dev/full', 'w'); print('lost')"])
@pytest.mark.parametrize("start", THREADS)
def test_a_thread_that_will_not_end_does_not_keep_the_process(start: str, output: str) -> None:
    process = _process(f"{start}; {output}; return 3", within=3600)
    process.communicate(timeout=LIMIT_S)

    assert process.returncode == 3


def test_a_second_signal_ends_at_once() -> None:
    process = _process("await asyncio.sleep(3600)", within=3600)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)

    assert process.returncode == 70


def test_a_component_that_fails_is_exit_code_1() -> None:
    assert serve.serve(lambda: FakeComponent(SETTINGS, RuntimeError("boom")), None, lambda _: None) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_output_that_cannot_be_written_is_one_line(wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    error: Exception = OSError(errno.ENOSPC, "No space left on device", "truth.jsonl")
    if wrapped:
        error, error.__cause__ = Exception("simulated failed"), error

    assert serve.serve(lambda: FakeComponent(SETTINGS, error), None, lambda _: None) == 1
    assert caplog.messages[-1] == "can't write: No space left on device: truth.jsonl"
    assert caplog.records[-1].exc_info is None


def test_a_component_may_ask_to_be_restarted() -> None:
    class Restart(Exception):
        exit_code = 70

    assert serve.serve(lambda: FakeComponent(SETTINGS, Restart()), None, lambda _: None) == 70


def test_topics_that_are_missing_end_it_with_what_to_run(caplog: pytest.LogCaptureFixture) -> None:
    missing = ContractMismatch([Mismatch("gpu.samples", "the topic", "there", "missing")])
    assert serve.serve(lambda: FakeComponent(SETTINGS, missing), None, lambda _: None) == 1
    assert caplog.messages[-1].startswith("gpu.samples: the topic is missing, must be there\n`gpustream topics create`")


def test_a_port_in_use_is_exit_code_1_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])

        assert serve.serve(lambda: FakeComponent(SETTINGS), address, lambda _: None) == 1

    assert "can't listen on 127.0.0.1" in caplog.messages[-1]
    assert caplog.records[-1].exc_info is None


def test_a_component_serves_while_it_runs_and_stops_on_a_signal(port: int) -> None:
    component = FakeComponent(SETTINGS)
    answers: list[str] = []

    def ask() -> None:
        while not component.started.is_set():
            time.sleep(0.01)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            answers.append(answer.read().decode())
        os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=ask)
    client.start()
    code = serve.serve(lambda: component, Address("127.0.0.1", port), lambda _: None)
    client.join()

    assert code == 0
    assert "gpustream_build_info" in answers[0]


async def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with serve.stop_on_signals(asyncio.Event(), serve.Deadline(exit_process=lambda _: None)):
        assert signal.getsignal(signal.SIGTERM) is not before

    assert signal.getsignal(signal.SIGTERM) is before
