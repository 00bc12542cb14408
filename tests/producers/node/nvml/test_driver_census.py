"""A census reports the GPUs that a new process would see, and harms nobody if it fails."""

import sys
import time
from collections.abc import Callable

import pytest

from producers.node.gpus import CheckIntervals
from producers.node.nvml.driver import LONGEST_REOPENING_S, Census, Reopening, parse_census
from tests.eventually import eventually
from tests.nvml.scripted import ScriptedNvml
from tests.producers.fakes import FakeClock

Environment = Callable[[ScriptedNvml], None]


@pytest.fixture
def inherit(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Let this process's children find the scripted NVML."""

    def give(nvml: ScriptedNvml) -> None:
        for name, value in nvml.environment().items():
            monkeypatch.setenv(name, value)

    return give


def child_command(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text]


async def test_it_reports_the_gpus_that_work(nvml: ScriptedNvml, inherit: Environment) -> None:
    inherit(nvml)
    nvml.gpus = 3
    nvml.lose(1)
    nvml.fail(2, "nvmlDeviceGetMemoryInfo", 3)
    census = Census()
    uuid = "GPU-5c41b7ed-0000-4000-8000-00000000000{}"
    assert await census.run() == frozenset({uuid.format(0), uuid.format(2)})
    nvml.gpus = 4
    nvml.recover(1)
    nvml.fail(0, "nvmlDeviceGetMemoryInfo", 16)
    assert await census.run() == frozenset(uuid.format(index) for index in (1, 2, 3))
    census.close()


async def test_a_gpu_in_mig_mode_works_though_only_some_may_know_its_memory(
    nvml: ScriptedNvml, inherit: Environment
) -> None:
    inherit(nvml)
    nvml.gpus = 1
    nvml.fail(0, "nvmlDeviceGetMemoryInfo", 4)  # NO_PERMISSION: nvml.h wants "appropriate privileges"
    census = Census()
    assert await census.run() == frozenset({"GPU-5c41b7ed-0000-4000-8000-000000000000"})
    census.close()


@pytest.mark.parametrize("state", ["absent", "mismatch"])
async def test_without_a_driver_it_reports_nothing_and_does_not_fail(
    nvml: ScriptedNvml, inherit: Environment, state: str
) -> None:
    inherit(nvml)
    nvml.driver("absent" if state == "absent" else "mismatch")
    census = Census()
    assert await census.run() is None
    census.close()


async def test_a_slow_child_is_ended_and_another_is_started_later() -> None:
    census = Census(within_s=0.2, command=child_command("import time; time.sleep(600)"))
    assert await census.run() is None
    child = census._child
    assert child is not None
    await eventually(lambda: child.poll() is not None)
    census._command = child_command("print('[\"GPU-0\"]')")
    census._within_s = 60
    assert await census.run() == frozenset({"GPU-0"})
    census.close()


async def test_no_second_child_is_started_beside_one_that_can_not_be_ended_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    census = Census(within_s=0.1, command=child_command("import time; time.sleep(600)"))
    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen.kill", lambda child: None)
        assert await census.run() is None
    child = census._child
    assert child is not None
    began_s = time.monotonic()
    assert await census.run() is None
    assert census._child is child
    assert time.monotonic() - began_s < 60
    assert await census.run() is None
    assert [f"(pid {child.pid})" in line for line in (*census.not_ready(), *caplog.messages)] == [True, True]
    census.close()
    assert child.wait(20) != 0
    assert census.not_ready() == []


async def test_a_child_that_can_not_be_started_changes_nothing() -> None:
    census = Census(command=["/nowhere/at-all"])
    assert await census.run() is None
    census.close()


@pytest.mark.parametrize("payload", [b"", b"{}", b"[1]", b'[""]', b'"GPU"', b"\xff", b"null", b"[" * 100])
def test_a_malformed_output_is_no_census(payload: bytes) -> None:
    assert parse_census(payload) is None


def test_a_list_of_uuids_is_a_census() -> None:
    assert parse_census(b'["GPU-1", "GPU-0"]\n') == frozenset({"GPU-0", "GPU-1"})
    assert parse_census(b"[]") == frozenset()


def test_there_is_no_reason_to_reopen_while_all_working_gpus_work_here() -> None:
    reopening = Reopening(40, FakeClock())
    assert reopening.reason(set(), set()) is None
    assert reopening.reason({"GPU-0"}, {"GPU-0", "GPU-1", None}) is None


def test_a_gpu_that_works_only_for_a_new_process_is_a_reason_to_reopen() -> None:
    reason = Reopening(40, FakeClock()).reason({"GPU-2", "GPU-1", "GPU-0"}, {"GPU-0"})
    assert reason == "GPU-1, GPU-2 would answer a new process, and not this one"


def test_after_each_reopening_in_vain_the_next_waits_twice_as_long() -> None:
    clock = FakeClock()
    reopening = Reopening(40, clock)
    began_s, tried_s = clock.now_s, []
    while clock.now_s < began_s + 6 * LONGEST_REOPENING_S:
        if reopening.reason({"GPU-1"}, set()):
            tried_s.append(clock.now_s - began_s)
        clock.now_s += 10
    assert tried_s[:5] == [0, 40, 120, 280, 600]
    assert tried_s[-1] - tried_s[-2] == LONGEST_REOPENING_S


def test_a_gpu_that_never_works_here_is_still_tried_after_two_months() -> None:
    clock = FakeClock()
    reopening = Reopening(CheckIntervals().census_s, clock)
    for _ in range(60 * 24):
        assert reopening.reason({"GPU-1"}, set())
        clock.now_s += LONGEST_REOPENING_S


def test_another_gpu_does_not_wait_for_that() -> None:
    reopening = Reopening(40, FakeClock())
    reopening.reason({"GPU-1"}, set())
    assert reopening.reason({"GPU-1", "GPU-2"}, set()) == "GPU-2 would answer a new process, and not this one"


def test_a_gpu_that_has_worked_since_is_tried_at_once() -> None:
    reopening = Reopening(40, FakeClock())
    assert reopening.reason({"GPU-1"}, set())
    reopening.worked("GPU-1")
    assert reopening.reason({"GPU-1"}, set())
