"""The GPUs of a node: one that fails does not disturb the others, and each is reported as long as the process runs."""

import asyncio
import contextlib
import gc
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from delivery.instruments import Instruments
from gpustream.logs import RateLimiter
from producers.node import gpus
from producers.node import instruments as own
from producers.node.cgroups import ProcessOwner
from producers.node.gpus import CheckIntervals, Gpus
from producers.node.nvml import binding, reader
from producers.node.nvml.binding import NvmlError
from producers.node.nvml.driver import LONGEST_REOPENING_S, DriverReplaced
from producers.node.nvml.events import RETRY_EVERY_S, XID_EVENT
from tests.eventually import LIMIT_S, eventually
from tests.producers.fakes import FakeClock
from tests.producers.node.nvml.fake import FakeCensus, FakeDevice, FakeNvml, FakeProcessOwners, part, running
from topics.samples import Device

QUICK = CheckIntervals(retry_s=0.01, census_s=0.05, soon_s=0.01, list_s=0.01, xid_wait_s=0.02)
NEVER = CheckIntervals(retry_s=3600, census_s=3600, soon_s=3600, xid_wait_s=0.02)
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
POWER = "nvmlDeviceGetPowerUsage"

Devices = list[dict[str, Any]]


def log_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages that the producer logged. asyncio may log the end of an earlier test's thread: it is left out."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("producers.")]


class Bench:
    """GPUs, the fake machine that they are in, and the metrics. ``stopped_clock``: time is what the test sets."""

    def __init__(
        self,
        gpus: int = 3,
        *,
        intervals: CheckIntervals = NEVER,
        nvml: FakeNvml | None = None,
        stopped_clock: bool = False,
        interval_s: float = 1.0,
    ) -> None:
        self.nvml, self.clock, self.owners = nvml or FakeNvml(gpus), FakeClock(), FakeProcessOwners()
        self.census = FakeCensus(lambda: [gpu.uuid for gpu in self.nvml.gpus if gpu.error is None])
        self.instruments = Instruments(own.INSTRUMENTS)
        census: Any = self.census
        self.gpus = Gpus(
            self.instruments,
            self.owners,
            interval_s=interval_s,
            nvml=self.nvml,
            census=census,
            intervals=intervals,
            clock=self.clock if stopped_clock else time.monotonic,
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> Devices:
        await self.gpus.open(30)
        return await self.read()

    async def read(self, within_s: float = 30) -> Devices:
        return self.gpus.with_events(await self.gpus.read(within_s))

    async def states(self, within_s: float = 30) -> dict[str, str]:
        return {device["uuid"]: device["state"] for device in await self.read(within_s)}

    def run(self) -> None:
        self.tasks.append(asyncio.create_task(self.gpus.run()))

    async def until_idle(self) -> None:
        """Wait until every call to a GPU has returned."""
        await eventually(lambda: not self.gpus.busy)

    async def until_states(self, expected: dict[str, str], within_s: float = 30) -> None:
        """Tick until the devices are in these states."""
        for _ in range(3000):
            if (last := await self.states(within_s)) == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(last)

    def value(self, name: str, **labels: str) -> float:
        return self.instruments.registry.get_sample_value(name, labels) or 0.0

    async def close(self) -> None:
        self.nvml.release()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.gpus.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with opened(Bench()) as bench:
        yield bench


@pytest.fixture
async def quick() -> AsyncIterator[Bench]:
    async with opened(Bench(intervals=QUICK)) as bench:
        yield bench


@contextlib.asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[Bench]:
    yield bench
    await bench.close()


OK = {"GPU-0": "ok", "GPU-1": "ok", "GPU-2": "ok"}


async def test_a_driver_that_does_not_report_its_version_is_used_all_the_same(bench: Bench) -> None:
    bench.nvml.version_error = binding.FUNCTION_NOT_FOUND
    await bench.open()
    assert await bench.states() == OK


async def test_all_gpus_are_valid_devices_in_the_order_of_their_index(bench: Bench) -> None:
    devices = await bench.open()
    assert [(device["uuid"], device["index"], device["state"]) for device in devices] == [
        (f"GPU-{index}", index, "ok") for index in range(3)
    ]
    for device in devices:
        decoded = msgspec.convert(device, Device)
        assert decoded.metrics["power_watts"] == 250.123
    assert bench.gpus.not_ready() == []
    assert bench.value(own.GPUS, state="ok") == 3
    assert bench.value(own.OPENED) == 1
    assert bench.value(f"{own.READ_SECONDS}_count") == 6


async def test_no_call_is_made_on_the_loops_thread_and_each_gpu_has_a_thread_of_its_own(bench: Bench) -> None:
    await bench.open()
    await eventually(lambda: bench.nvml.threads == {"nvml-driver", "nvml-events", "nvml-0", "nvml-1", "nvml-2"})
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("nvml-"))


async def test_it_is_not_ready_before_it_is_opened() -> None:
    async with opened(Bench()) as bench:
        assert bench.gpus.not_ready() == ["the NVIDIA driver has not been asked yet"]
        assert await bench.read() == []


@pytest.mark.slow
async def test_a_gpu_that_hangs_is_a_timeout_and_the_others_are_on_time(bench: Bench) -> None:
    await bench.open()
    hang = bench.nvml.hang("GPU-1", "*")
    for within_s in (0.2, 0.7):
        async with asyncio.timeout(15):
            devices = await bench.read(within_s)
    assert [device["state"] for device in devices] == ["ok", "timeout", "ok"]
    assert devices[1] == {
        "uuid": "GPU-1",
        "index": 1,
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:0A:00.0",
        "minor": 1,
        "info": {"driver_version": "580.0"},
        "compute_slices": 1,
        "state": "timeout",
        "metrics": {},
    }
    assert bench.value(own.GPUS, state="timeout") == 1
    hang.end.set()
    await bench.until_states(OK)


async def test_a_hanging_call_is_counted_when_it_returns_and_its_answer_is_not_of_that_tick(
    bench: Bench,
) -> None:
    await bench.open()
    hang = bench.nvml.hang("GPU-1", POWER)
    assert (await bench.states(0.05))["GPU-1"] == "timeout"
    before = bench.value(f"{own.READ_SECONDS}_count")
    hang.end.set()
    await eventually(lambda: bench.value(f"{own.READ_SECONDS}_count") == before + 1)
    assert await bench.states() == OK


async def let_hang(bench: Bench, uuid: str) -> None:
    """Let every call to a GPU hang, until all the threads that it may have wait. On a busy machine some reads end
    before they leave a call to its thread, and a thread may not have made its call yet."""

    def reasons_with(*parts: str) -> list[str]:
        return [reason for reason in bench.gpus.not_ready() if all(part in reason for part in parts)]

    bench.nvml.hang(uuid, "*")
    async with asyncio.timeout(LIMIT_S):
        while len(reasons_with(f"({uuid}): nvmlDevice")) < reader.MAX_ABANDONED:
            await bench.read(0.05)
            bench.clock.now_s += 40
    await eventually(lambda: reasons_with(f"({uuid}) has not answered", "(nvmlDevice"))


@pytest.mark.parametrize("interval_s", [1.0, 3600.0])
async def test_a_hang_is_reported_with_its_time_and_the_call_and_logged_once(
    interval_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(Bench(stopped_clock=True, interval_s=interval_s)) as bench:
        await bench.open()
        caplog.set_level(logging.INFO)
        await let_hang(bench, "GPU-1")
        title = "GPU 1 (GPU-1) has not answered"
        (silent,) = [reason for reason in bench.gpus.not_ready() if reason.startswith(title)]
        assert silent.startswith(f"{title} for 40 s (nvmlDevice")
        for _ in range(3):
            await bench.read(0.05)
        assert caplog.messages.count(silent) == 1
        bench.nvml.release()
        await bench.until_idle()
        assert caplog.messages.count("GPU 1 (GPU-1) has returned") == 1
        await bench.until_states(OK)


async def test_a_gpu_that_hangs_keeps_no_more_than_a_few_threads_and_none_when_it_returns() -> None:
    async with opened(Bench(stopped_clock=True)) as bench:
        await bench.open()

        def threads() -> list[str]:
            return [thread.name for thread in threading.enumerate() if thread.name == "nvml-1"]

        others = len(threads()) - 1
        await let_hang(bench, "GPU-1")
        for _ in range(20):
            await bench.read(0.01)
            bench.clock.now_s += 40
        assert len(threads()) - others == 1 + reader.MAX_ABANDONED
        bench.nvml.release()
        await bench.until_states(OK)
        await eventually(lambda: len(threads()) - others == 1)


async def test_a_call_that_hangs_is_left_out_and_the_rest_of_its_gpu_is_read_in_the_same_tick(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    before = (await bench.open())[1]["metrics"]
    caplog.set_level(logging.INFO)
    hang = bench.nvml.hang("GPU-1", POWER)
    for _ in range(3):
        device = (await bench.read(0.8))[1]
        assert device["state"] == "ok"
        assert device["metrics"] == {key: value for key, value in before.items() if key != "power_watts"}
    (reason,) = bench.gpus.not_ready()
    assert reason.startswith(f"GPU 1 (GPU-1): {POWER} has not returned for ")
    assert bench.nvml.call_counts["GPU-1", POWER] == 3  # opened, read, and the one that hangs
    assert bench.gpus.left_out()["GPU-1"]["power_watts"] == ((POWER, "TIMEOUT"),)
    hang.end.set()
    bench.nvml.release()
    await bench.until_idle()
    await bench.read()
    assert (await bench.read())[1]["metrics"] == before
    assert bench.gpus.not_ready() == []
    reported = [text for text in caplog.messages if POWER in text]
    assert reported == [
        f"GPU 1 (GPU-1): {POWER} has not returned for 0.2 s; what it gives is left out until it is quick again",
        f"GPU 1 (GPU-1): {POWER} is quick again",
    ]


async def test_without_a_thread_for_the_rest_a_gpu_with_a_slow_call_is_a_timeout_and_the_others_go_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.open()

    def no_more(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    hang = bench.nvml.hang("GPU-1", POWER)
    with monkeypatch.context() as patched:
        patched.setattr(reader, "Worker", no_more)
        assert await bench.states(0.5) == OK | {"GPU-1": "timeout"}
    assert "GPU 1 (GPU-1): its slow call holds up the others: can't start new thread" in caplog.messages
    assert await bench.states(0.8) == OK
    hang.end.set()


async def test_a_call_that_is_slow_each_time_is_made_less_and_less_often_and_costs_only_its_value(
    bench: Bench,
) -> None:
    await bench.open()
    bench.nvml.delays_s["GPU-1", POWER] = 0.4
    before = bench.nvml.call_counts["GPU-1", POWER]
    for _ in range(20):
        device = (await bench.read(0.6))[1]
        assert (device["state"], "power_watts" in device["metrics"]) == ("ok", False)
        assert "temperature_celsius" in device["metrics"]
        await bench.until_idle()
    assert bench.nvml.call_counts["GPU-1", POWER] - before < 8
    assert "and is left out until it is quick again" in bench.gpus.not_ready()[0]


async def test_of_a_gpu_of_which_many_calls_are_slow_a_few_are_named_and_the_others_counted(bench: Bench) -> None:
    await bench.open()
    calls = [call for uuid, call in bench.nvml.call_counts if uuid == "GPU-1"]
    bench.nvml.delays_s |= {("GPU-1", call): 0.25 for call in calls}

    async def are_many_slow() -> bool:
        await bench.read(0.3)
        return len(bench.gpus.not_ready()) > reader.MAX_ABANDONED

    await eventually(are_many_slow)
    *named, others = bench.gpus.not_ready()
    assert len(named) == reader.MAX_ABANDONED
    assert re.fullmatch(r"GPU 1 \(GPU-1\): also [0-9]+ calls?, slow and left out", others)


async def test_a_gpu_that_is_slow_to_read_is_in_each_tick_with_the_time_when_it_was_read(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its calls takes some time, and none takes long."""
    await bench.open()
    caplog.set_level(logging.INFO)
    bench.nvml.delays_s["GPU-1", "*"] = 0.006
    assert (await bench.states(0.1))["GPU-1"] == "timeout"
    for _ in range(3):
        await bench.until_idle()
        before_ms = time.time_ns() // 1_000_000
        first, late, _ = await bench.read(0.1)
        assert msgspec.convert(late, Device).state == "ok"
        assert late["metrics"].keys() == first["metrics"].keys()
        assert before_ms - 10_000 < late["read_ms"] < before_ms
        assert "read_ms" not in first
    (reason,) = bench.gpus.not_ready()
    assert "GPU 1 (GPU-1) takes " in reason
    (reported,) = log_messages(caplog)
    assert "GPU 1 (GPU-1): it takes " in reported
    bench.nvml.delays_s.clear()
    await bench.until_idle()
    assert "read_ms" not in (await bench.read())[1]
    assert bench.gpus.not_ready() == []


async def test_a_gpu_whose_quick_reading_comes_too_late_for_its_tick_is_not_called_slow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_QUICK_S", 60.0)
    await bench.open()
    bench.nvml.delays_s["GPU-1", "*"] = 0.006
    assert (await bench.states(0.1))["GPU-1"] == "timeout"
    await bench.until_idle()
    await bench.read(0.1)
    (reason,) = [reason for reason in bench.gpus.not_ready() if "(GPU-1)" in reason]  # others may be late, too
    assert "GPU 1 (GPU-1) was read too late" in reason
    assert "too little CPU" in reason


async def test_a_gpu_that_is_late_in_every_other_tick_is_not_logged_each_time(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The log limits the lines about one subject, which must not have the time that the reading took in it."""
    await bench.open()
    for delay_s in (0.006, 0.007, 0.008):
        bench.nvml.delays_s["GPU-1", "*"] = delay_s
        assert (await bench.states(0.1))["GPU-1"] == "timeout"
        await bench.until_idle()
        await bench.read(0.1)
        bench.nvml.delays_s.clear()
        await bench.until_idle()
        await bench.read()
    limiter = RateLimiter(every_s=3600.0)
    late = [record for record in caplog.records if "too late" in record.getMessage() or "takes" in record.getMessage()]
    assert len(late) == 3
    assert [limiter.admit(record) for record in late] == [True, False, False]


@pytest.mark.slow
async def test_a_reading_that_spans_ticks_ends_in_one_of_them_and_is_reported_once(bench: Bench) -> None:
    await bench.open()
    bench.nvml.delays_s["GPU-1", "*"] = 0.008
    readings = [next(device for device in await bench.read(0.1) if device["uuid"] == "GPU-1") for _ in range(12)]
    times = [reading["read_ms"] for reading in readings if reading["state"] == "ok"]
    assert {reading["state"] for reading in readings} == {"ok", "timeout"}
    assert sorted(set(times)) == times


@pytest.mark.slow
async def test_the_mig_devices_of_a_gpu_that_hangs_or_is_lost_are_reported_too(bench: Bench) -> None:
    gpu = bench.nvml.gpus[1]
    gpu.cut(part("MIG-a", 1, "1g.10gb", 7))
    assert (await bench.open())[2]["mig"]["parent_uuid"] == "GPU-1"
    gpu.error = binding.GPU_IS_LOST
    assert await bench.states() == {"GPU-0": "ok", "GPU-1": "lost", "MIG-a": "lost", "GPU-2": "ok"}
    assert bench.value(own.GPUS, state="lost") == 2
    lost = (await bench.read())[2]
    assert (lost["mig"]["uuid"], lost["metrics"], "processes" in lost) == ("MIG-a", {}, False)
    gpu.error = None
    bench.nvml.hang("GPU-1", "nvmlDeviceGetMigMode")
    bench.nvml.hang("MIG-a", "nvmlDeviceGetUUID")
    assert await bench.states(0.8) == {"GPU-0": "ok", "GPU-1": "ok", "MIG-a": "timeout", "GPU-2": "ok"}
    for uuid in ("GPU-1", "MIG-a"):
        bench.nvml.hang(uuid, "*")
    await bench.read(0.2)
    assert await bench.states(0.7) == {"GPU-0": "ok", "GPU-1": "timeout", "MIG-a": "timeout", "GPU-2": "ok"}


async def test_a_lost_gpu_keeps_its_identity_and_is_back_when_it_answers(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.open()
    caplog.set_level(logging.INFO)
    bench.nvml.gpus[2].error = binding.GPU_IS_LOST
    for _ in range(3):
        assert await bench.states() == OK | {"GPU-2": "lost"}
    expected = "GPU 2 (GPU-2) is lost: GPU_IS_LOST (nvmlDeviceGetUtilizationRates)"
    assert [reason.partition(" (for ")[0] for reason in bench.gpus.not_ready()] == [expected]
    assert bench.value(own.NVML_ERRORS, call="nvmlDeviceGetUtilizationRates", error="GPU_IS_LOST") == 3
    bench.nvml.gpus[2].error = None
    assert await bench.states() == OK
    assert log_messages(caplog) == [expected, "GPU 2 (GPU-2) answers again"]
    assert bench.gpus.not_ready() == []


@pytest.mark.parametrize(("code", "name"), [(4, "NO_PERMISSION"), (15, "GPU_IS_LOST"), (999, "UNKNOWN")])
async def test_a_gpu_that_can_not_be_opened_is_left_out_counted_and_reported(
    bench: Bench, code: int, name: str
) -> None:
    bench.nvml.gpus[1].open_error = code
    await bench.open()
    assert await bench.states() == {"GPU-0": "ok", "GPU-2": "ok"}
    assert bench.value(own.NVML_ERRORS, call="nvmlDeviceGetHandleByIndex", error=name) == 1
    expected = f"GPU 1 can't be opened: {name} (nvmlDeviceGetHandleByIndex)"
    assert [reason.partition(" (for ")[0] for reason in bench.gpus.not_ready()] == [expected]
    assert bench.nvml.call_counts["GPU-1", "nvmlDeviceGetHandleByIndex"] == 1


@pytest.mark.slow
async def test_a_gpu_that_hangs_while_it_is_opened_delays_no_other_and_is_used_when_it_returns(bench: Bench) -> None:
    hang = bench.nvml.hang("GPU-1", "nvmlDeviceGetHandleByIndex")
    await bench.gpus.open(0.2)
    assert await bench.states(0.7) == {"GPU-0": "ok", "GPU-2": "ok"}
    hang.end.set()
    await bench.until_states(OK)


async def test_two_gpus_of_one_uuid_are_one(bench: Bench) -> None:
    bench.nvml.gpus[2].uuid = "GPU-0"
    await bench.open()
    assert await bench.states() == {"GPU-0": "ok", "GPU-1": "ok"}
    assert "it has the UUID of GPU 0" in bench.gpus.not_ready()[0]


async def test_a_second_gpu_of_one_uuid_does_not_decide_what_the_first_one_lacks(bench: Bench) -> None:
    bench.nvml.gpus[1].uuid = "GPU-0"
    bench.nvml.gpus[1].fail(POWER, binding.NO_PERMISSION)
    first = (await bench.open())[0]
    assert "power_watts" in first["metrics"]
    assert "power_watts" not in bench.gpus.left_out()["GPU-0"]


async def test_a_bug_in_reading_a_gpu_is_reported_and_delays_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.open()
    bench.nvml.gpus[1].answers["nvmlDeviceGetRemappedRows"] = ()
    for _ in range(3):
        assert await bench.states() == OK | {"GPU-1": "lost"}
    assert "IndexError" in bench.gpus.not_ready()[0]
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_bug_in_reading_a_gpu_that_was_lost_is_the_reason_from_then_on(bench: Bench) -> None:
    await bench.open()
    bench.nvml.gpus[1].error = binding.GPU_IS_LOST
    await bench.read()
    bench.nvml.gpus[1].error = None
    bench.nvml.gpus[1].answers["nvmlDeviceGetRemappedRows"] = ()
    await bench.read()
    ((_, _, failed_call),) = bench.gpus.unreadable()
    assert failed_call.error.startswith("IndexError")


async def test_each_process_is_counted_once_by_its_kind(bench: Bench) -> None:
    bench.owners.owners = {
        1: ProcessOwner("pod", None, None),
        2: ProcessOwner(None, None, "job"),
        3: ProcessOwner(None, None, None),
    }
    bench.nvml.gpus[0].answers[COMPUTE] = [running(1), running(2), running(3)]
    bench.nvml.gpus[1].answers[COMPUTE] = [running(1), running(4)]
    await bench.open()
    kinds = ("attributed", "host", "unseen")
    assert [bench.value(own.PROCESSES, kind=kind) for kind in kinds] == [2, 1, 1]
    bench.nvml.gpus[0].answers[COMPUTE] = bench.nvml.gpus[1].answers[COMPUTE] = []
    await bench.read()
    assert [bench.value(own.PROCESSES, kind=kind) for kind in kinds] == [0, 0, 0]


async def test_errors_are_counted_by_call_and_error(bench: Bench) -> None:
    await bench.open()
    bench.nvml.gpus[0].fail(POWER, binding.UNKNOWN)
    bench.nvml.gpus[1].answers["nvmlDeviceGetFanSpeed"] = 0xFFFFFFFF
    await bench.read()
    await bench.read()
    assert bench.value(own.NVML_ERRORS, call=POWER, error="UNKNOWN") == 2
    assert bench.value(own.NVML_ERRORS, call="nvmlDeviceGetFanSpeed", error="IMPLAUSIBLE") == 2


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        (binding.LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not found"),
        (binding.DRIVER_NOT_LOADED, "kernel module is not loaded"),
        (binding.LIB_RM_VERSION_MISMATCH, "of different versions"),
        (binding.NO_PERMISSION, "NO_PERMISSION"),
        (77, "CODE_77"),
    ],
)
async def test_a_driver_that_starts_later_works_and_until_then_it_is_reported_once(
    quick: Bench, caplog: pytest.LogCaptureFixture, code: int, reported: str
) -> None:
    caplog.set_level(logging.INFO)
    quick.nvml.driver_error = code
    assert await quick.open() == []
    assert reported in quick.gpus.not_ready()[0]
    quick.run()
    await eventually(lambda: quick.nvml.inits > 3)
    assert await quick.read() == []
    quick.nvml.driver_error = None
    await quick.until_states(OK)
    assert quick.gpus.not_ready() == []
    assert quick.gpus.fatal() is None
    assert len(log_messages(caplog)) == 2
    assert log_messages(caplog)[1] == "NVIDIA driver 580.0 with 3 GPUs"


async def test_a_driver_without_gpus_is_reported() -> None:
    async with opened(Bench(0)) as bench:
        assert await bench.open() == []
        assert bench.gpus.not_ready() == ["the NVIDIA driver has no GPU"]


async def test_an_init_that_does_not_return_is_reported_and_there_is_no_second_one_beside_it() -> None:
    async with opened(Bench(intervals=QUICK, stopped_clock=True)) as bench:
        hang = bench.nvml.hang(None, "nvmlInit")
        await bench.gpus.open(0.05)
        bench.run()
        bench.clock.now_s += 40
        assert await bench.read(0.05) == []
        assert bench.gpus.not_ready() == ["the NVIDIA driver does not answer: nvmlInit has not returned for 40 s"]
        await asyncio.sleep(0.1)
        assert bench.nvml.call_counts["", "nvmlInit"] == 1
        hang.end.set()
        await bench.until_states(OK)


async def test_a_new_gpu_that_a_new_process_sees_is_read_after_opening_again(
    quick: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await quick.open()
    quick.run()
    await eventually(lambda: len(quick.census.times) > 2)
    assert quick.nvml.inits == 1
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    await quick.until_states(OK | {"GPU-new": "ok"})
    assert (quick.nvml.inits, quick.nvml.shutdowns) == (2, 1)
    assert quick.value(own.OPENED) == 2
    again = log_messages(caplog)[-1]
    assert again.endswith("opened again: GPU-new would answer a new process, and not this one")


async def test_no_census_runs_before_gpus_were_read_however_long_the_interval_is(quick: Bench) -> None:
    """Otherwise GPUs that no tick has read yet would not count as working, and NVML would be opened again for them."""
    await quick.open()
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    quick.run()
    await eventually(lambda: quick.nvml.inits == 2)
    census_count = len(quick.census.times)
    await eventually(lambda: len(quick.census.times) > census_count + 5)
    assert quick.nvml.inits == 2
    assert await quick.states() == OK | {"GPU-new": "ok"}


async def test_the_buffers_of_nvml_are_freed_before_it_is_opened_again(quick: Bench) -> None:
    for gpu in quick.nvml.gpus:
        gpu.profiled({2: 80})
    await quick.open()
    before = list(quick.nvml.lent)
    quick.run()
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    await quick.until_states(OK | {"GPU-new": "ok"})
    assert (len(before), quick.nvml.lent_at_shutdown) == (6, [0])
    assert len(quick.nvml.lent) == 6
    assert not set(before) & set(quick.nvml.lent)


async def test_while_freeing_hangs_nvml_is_not_opened_again(quick: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "QUIET_WITHIN_S", 0.1)
    quick.nvml.gpus[0].profiled({2: 80})
    await quick.open()
    hang = quick.nvml.hang(None, "nvmlGpmSampleFree")
    quick.run()
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    await eventually(hang.started.is_set)
    looked = len(quick.census.times)
    await eventually(lambda: len(quick.census.times) > looked + 2)
    assert quick.nvml.shutdowns == 0
    quick.nvml.release()
    await quick.until_states(OK | {"GPU-new": "ok"})


async def test_a_gpu_that_has_disappeared_is_reported_as_lost(quick: Bench) -> None:
    await quick.open()
    quick.run()
    removed_gpu = quick.nvml.gpus.pop(1)
    removed_gpu.error = binding.GPU_IS_LOST
    await quick.until_states(OK | {"GPU-1": "lost"})
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    await quick.until_states(OK | {"GPU-1": "lost", "GPU-new": "ok"})
    assert quick.gpus.not_ready() == ["GPU 1 (GPU-1) is lost: the driver does not open it any more"]
    assert [device.get("index") for device in await quick.read()] == [0, 1, None, 2]  # index 1 now is GPU-2's
    removed_gpu.error = None
    quick.nvml.gpus.insert(1, removed_gpu)
    await quick.until_states(OK | {"GPU-new": "ok"})
    assert quick.gpus.not_ready() == []


async def test_of_two_lost_gpus_that_had_one_index_only_the_later_one_has_it(quick: Bench) -> None:
    await quick.open()
    quick.run()
    states = dict(OK)
    for lost, new in (("GPU-1", "GPU-a"), ("GPU-2", "GPU-b")):
        quick.nvml.gpus.pop(1).error = binding.GPU_IS_LOST  # GPU-2 had taken over the index of GPU-1 by then
        quick.nvml.gpus.append(FakeDevice(new))
        states |= {lost: "lost", new: "ok"}
        await quick.until_states(states)
    quick.nvml.gpus[:] = [FakeDevice("GPU-c")]
    await quick.until_states({**dict.fromkeys(states, "lost"), "GPU-c": "ok"})
    indexes = {device["uuid"]: device.get("index") for device in await quick.read()}
    assert indexes == {"GPU-c": 0, "GPU-0": None, "GPU-1": None, "GPU-2": None, "GPU-a": 1, "GPU-b": 2}


async def test_a_gpu_that_vanishes_is_lost_with_its_identity_reported_once_and_back_when_it_comes_back(
    quick: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    quick.nvml.gpus[2].answers["nvmlDeviceGetSerial"] = "1650922"
    before = (await quick.open())[2]
    caplog.set_level(logging.INFO)
    quick.run()
    removed_gpu = quick.nvml.gpus.pop()
    quick.nvml.gpus.append(FakeDevice("GPU-a"))
    quick.nvml.gpus[2].answers["nvmlDeviceGetMinorNumber"] = 7
    await quick.until_states({"GPU-0": "ok", "GPU-1": "ok", "GPU-2": "lost", "GPU-a": "ok"})
    quick.nvml.gpus.append(FakeDevice("GPU-b"))
    await quick.until_states({"GPU-0": "ok", "GPU-1": "ok", "GPU-2": "lost", "GPU-a": "ok", "GPU-b": "ok"})
    (lost,) = [device for device in await quick.read() if device["uuid"] == "GPU-2"]
    identity = {
        key: before[key] for key in ("uuid", "vendor", "model", "pci_bus_id", "minor", "info", "compute_slices")
    }
    assert lost == {**identity, "state": "lost", "metrics": {}}
    reported = [record for record in caplog.records if "GPU-2" in record.getMessage()]
    assert [record.getMessage() for record in reported] == [
        "GPU 2 (GPU-2) is lost: the driver does not open it any more"
    ]
    assert {key: getattr(reported[0], key) for key in ("gpu_uuid", "pci_bus_id", "serial")} == {
        "gpu_uuid": "GPU-2",
        "pci_bus_id": "00000000:0A:00.0",
        "serial": "1650922",
    }
    quick.nvml.gpus.insert(2, removed_gpu)
    await quick.until_states({"GPU-0": "ok", "GPU-1": "ok", "GPU-2": "ok", "GPU-a": "ok", "GPU-b": "ok"})
    assert caplog.messages[-1] == "GPU 2 (GPU-2) is back"


async def test_two_gpus_that_are_lost_at_once_have_a_line_each(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.open()
    for gpu in bench.nvml.gpus[:2]:
        gpu.error = binding.GPU_IS_LOST
    limiter = RateLimiter()
    await bench.read()
    lines = [record.getMessage().partition(" is lost")[0] for record in caplog.records if limiter.admit(record)]
    assert lines == ["GPU 0 (GPU-0)", "GPU 1 (GPU-1)"]


async def test_a_mig_device_of_a_gpu_that_is_cut_again_is_not_missing_and_those_of_a_missing_gpu_are(
    quick: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    quick.nvml.gpus[1].cut(part("MIG-a"), part("MIG-b", 2))
    await quick.open()
    quick.nvml.gpus[1].cut(part("MIG-c", 3))
    await quick.until_states({**OK, "MIG-c": "ok"})
    assert caplog.records == []
    quick.nvml.gpus[1].error = binding.GPU_IS_LOST
    quick.nvml.gpus.pop(1)
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    quick.run()
    await quick.until_states({**OK, "GPU-1": "lost", "MIG-c": "lost", "GPU-new": "ok"})


async def test_a_gpu_that_can_not_be_opened_again_stays_in_the_ticks_and_is_reported_once(quick: Bench) -> None:
    await quick.open()
    quick.nvml.gpus[1].error = binding.GPU_IS_LOST
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    quick.run()
    await quick.until_states(OK | {"GPU-1": "lost", "GPU-new": "ok"})
    lost = [line for line in quick.gpus.not_ready() if line.startswith("GPU 1 ")]
    assert lost == ["GPU 1 (GPU-1) is lost: the driver does not open it any more"]
    quick.nvml.gpus[1].error = None
    await quick.until_states(OK | {"GPU-new": "ok"})


async def test_a_lost_gpu_that_gives_only_its_uuid_when_it_is_opened_again_keeps_its_identity_and_mig_devices(
    quick: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lost_gpu = quick.nvml.gpus[1]
    lost_gpu.cut(part("MIG-a"))
    before = {device["uuid"]: device for device in await quick.open()}
    answers = lost_gpu.answers
    lost_gpu.answers = dict.fromkeys([*answers, "nvmlDeviceGetFieldValues"], NvmlError(binding.UNKNOWN))
    quick.nvml.gpus.insert(0, FakeDevice("GPU-new"))
    caplog.set_level(logging.INFO)
    quick.census.look = lambda: ["GPU-new", "GPU-0", "GPU-2"]
    quick.run()
    await quick.until_states({**OK, "GPU-1": "lost", "MIG-a": "lost", "GPU-new": "ok"})
    devices = {device["uuid"]: device for device in await quick.read()}
    for uuid in ("GPU-1", "MIG-a"):
        kept = {key: value for key, value in before[uuid].items() if key != "processes"}
        assert devices[uuid] == {**kept, "index": 2, "state": "lost", "metrics": {}}
    assert "GPU 1 (GPU-1) is back" not in caplog.messages
    lost_gpu.answers = answers
    await quick.until_states({**OK, "MIG-a": "ok", "GPU-new": "ok"})


async def test_a_driver_that_was_reloaded_is_opened_again(quick: Bench) -> None:
    await quick.open()
    for gpu in quick.nvml.gpus:
        gpu.error = binding.UNINITIALIZED
    assert set((await quick.states()).values()) == {"lost"}
    for gpu in quick.nvml.gpus:
        gpu.fail("nvmlDeviceGetUtilizationRates", binding.DRIVER_NOT_LOADED)
        gpu.error = None
    assert set((await quick.states()).values()) == {"lost"}
    fresh = [FakeDevice(gpu.uuid) for gpu in quick.nvml.gpus]
    quick.nvml.gpus = fresh
    quick.run()
    await quick.until_states(OK)
    assert quick.value(own.OPENED) == 2


async def test_opening_again_is_retried_until_it_works(quick: Bench) -> None:
    quick.census.look = lambda: [*OK, "GPU-new"]
    await quick.open()
    quick.nvml.driver_error = binding.DRIVER_NOT_LOADED
    quick.run()
    await quick.until_states(dict.fromkeys(OK, "lost"))
    assert len(quick.gpus.not_ready()) == 4
    quick.nvml.driver_error = None
    await quick.until_states(OK)


async def test_while_nvml_is_opened_again_no_gpu_is_called_and_all_are_timeouts(quick: Bench) -> None:
    quick.census.look = lambda: ["GPU-new"]
    await quick.open()
    hang = quick.nvml.hang(None, "nvmlInit")
    quick.run()
    await eventually(hang.started.is_set)
    before = quick.nvml.call_counts.total()
    assert await quick.states(0.1) == dict.fromkeys(OK, "timeout")
    await asyncio.sleep(0.1)
    assert quick.nvml.call_counts.total() == before
    reading = asyncio.create_task(quick.states())
    await asyncio.sleep(0.05)
    hang.end.set()
    assert await reading == OK


async def test_a_tick_in_which_nvml_is_opened_again_uses_no_old_handle(quick: Bench) -> None:
    quick.census.look = lambda: ["GPU-new"]
    await quick.open()
    slow = quick.nvml.hang("GPU-0", POWER)
    reading = asyncio.create_task(quick.states())
    await eventually(slow.started.is_set)
    opening = quick.nvml.hang(None, "nvmlInit")
    quick.run()
    await eventually(lambda: quick.gpus._is_opening)
    quick.nvml.call_counts.clear()
    slow.end.set()
    assert await reading == OK | {"GPU-1": "timeout", "GPU-2": "timeout"}
    await eventually(opening.started.is_set)
    assert {uuid for uuid, _ in quick.nvml.call_counts} == {"", "GPU-0"}
    opening.end.set()
    await quick.until_states(OK)


async def test_a_gpu_that_hangs_while_nvml_is_opened_again_is_a_timeout_and_not_lost(quick: Bench) -> None:
    await quick.open()
    hang = quick.nvml.hang("GPU-1", "nvmlDeviceGetHandleByIndex")
    quick.nvml.gpus.append(FakeDevice("GPU-new"))
    quick.run()
    await eventually(lambda: quick.value(own.OPENED) == 2)
    await quick.until_states(OK | {"GPU-1": "timeout", "GPU-new": "ok"}, 0.7)
    assert hang.started.is_set()
    hang.end.set()
    await quick.until_states(OK | {"GPU-new": "ok"})


async def test_nvml_is_not_opened_again_while_a_gpu_hangs() -> None:
    async with opened(Bench(intervals=QUICK, stopped_clock=True)) as bench:
        bench.census.look = lambda: ["GPU-new"]
        await bench.open()
        hang = bench.nvml.hang("GPU-1", POWER)
        await bench.read(0.05)
        bench.clock.now_s += 100
        bench.run()
        for _ in range(5):
            census_count = len(bench.census.times)
            bench.clock.now_s += 100
            await eventually(lambda: len(bench.census.times) > census_count)  # noqa: B023 - awaited in the loop
            assert await bench.states(0.7) == OK
        assert bench.nvml.shutdowns == 0
        hang.end.set()
        await bench.until_states(OK)


async def test_nvml_is_opened_again_at_the_next_census_after_a_long_hang() -> None:
    async with opened(Bench(intervals=QUICK, stopped_clock=True)) as bench:
        bench.census.look = lambda: ["GPU-new"]
        await bench.open()
        hang = bench.nvml.hang("GPU-1", POWER)
        await bench.read(0.05)
        bench.clock.now_s += 100
        bench.run()
        for _ in range(20):
            census_count = len(bench.census.times)
            bench.clock.now_s += LONGEST_REOPENING_S
            await eventually(lambda: len(bench.census.times) > census_count)  # noqa: B023 - awaited in the loop
        assert bench.value(own.OPENED) == 1
        hang.end.set()
        await eventually(lambda: bench.value(own.OPENED) == 2)


async def test_a_loss_causes_a_census_soon_but_not_at_once() -> None:
    intervals = replace(NEVER, soon_s=0.3)
    async with opened(Bench(intervals=intervals)) as bench:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await bench.open()
        bench.run()
        bench.nvml.gpus[0].error = binding.GPU_IS_LOST
        await bench.read()
        await eventually(lambda: bench.census.times)
        assert loop.time() - began_s > 0.2


async def test_a_gpu_that_stays_lost_causes_no_more_censuses_than_the_others() -> None:
    intervals = replace(NEVER, soon_s=0.01)
    async with opened(Bench(intervals=intervals)) as bench:
        await bench.open()
        bench.run()
        bench.nvml.gpus[0].error = binding.GPU_IS_LOST
        await bench.read()
        await eventually(lambda: bench.census.times)
        for _ in range(20):
            await bench.read()
            await asyncio.sleep(0.01)
        assert len(bench.census.times) == 1


async def test_a_library_of_another_driver_needs_a_new_process(quick: Bench) -> None:
    await quick.open()
    quick.nvml.gpus[0].error = binding.LIB_RM_VERSION_MISMATCH
    assert (await quick.states())["GPU-0"] == "lost"
    fatal = quick.gpus.fatal()
    assert isinstance(fatal, DriverReplaced)
    assert fatal.exit_code == 70
    assert "must be started again" in str(fatal)
    assert str(fatal) in quick.gpus.not_ready()


async def test_an_init_that_finds_another_driver_than_before_needs_a_new_process(quick: Bench) -> None:
    quick.census.look = lambda: ["GPU-new"]
    await quick.open()
    quick.nvml.driver_error = binding.LIB_RM_VERSION_MISMATCH
    quick.run()
    await eventually(lambda: quick.gpus.fatal() is not None)


async def test_closing_does_not_wait_for_hanging_calls(bench: Bench) -> None:
    await bench.open()
    bench.nvml.hang("GPU-1", POWER)
    await bench.read(0.05)
    bench.gpus.close()
    assert bench.nvml.shutdowns == 0


async def test_closing_detaches_from_a_driver_that_nobody_uses_any_more(bench: Bench) -> None:
    await bench.open()
    bench.gpus.close()
    await eventually(lambda: bench.nvml.shutdowns == 1)
    assert bench.census.closed


async def test_closing_while_the_driver_hangs_makes_no_call() -> None:
    bench = Bench()
    hang = bench.nvml.hang(None, "nvmlInit")
    await bench.gpus.open(0.05)
    await eventually(hang.started.is_set)
    bench.gpus.close()
    hang.end.set()
    await asyncio.sleep(0.05)
    gc.collect()
    assert bench.nvml.shutdowns == 0


async def test_a_bug_in_opening_is_raised_by_run() -> None:
    class Faulty(FakeNvml):
        def init(self) -> None:
            raise ZeroDivisionError

    async with opened(Bench(nvml=Faulty(1))) as bench:
        await bench.gpus.open(30)
        with pytest.raises(ZeroDivisionError):
            await bench.gpus.run()


def _with_events(bench: Bench) -> None:
    for gpu in bench.nvml.gpus:
        gpu.answers["nvmlDeviceGetSupportedEventTypes"] = XID_EVENT


async def _registered(bench: Bench) -> None:
    await eventually(lambda: bench.nvml.sets and len(bench.nvml.sets[0].devices) == len(bench.nvml.gpus))


async def test_an_xid_error_is_in_the_next_tick_of_a_lost_gpu_too(bench: Bench) -> None:
    _with_events(bench)
    await bench.open()
    await _registered(bench)
    bench.nvml.gpus[1].error = binding.GPU_IS_LOST
    bench.nvml.xid(bench.nvml.gpus[1], 79)
    await eventually(lambda: bench.value(own.XIDS, of="device") == 1)
    devices = await bench.read()
    assert [(device["state"], device.get("xids")) for device in devices] == [
        ("ok", None),
        ("lost", {"79": 1}),
        ("ok", None),
    ]
    assert [event["code"] for event in devices[1]["events"]] == [79]
    assert "events" not in (await bench.read())[1]


async def test_events_that_hang_delay_neither_the_ticks_nor_the_end(bench: Bench) -> None:
    _with_events(bench)
    hang = bench.nvml.hang(None, "nvmlEventSetWait")
    await bench.open()
    await eventually(hang.started.is_set)
    for _ in range(3):
        assert await bench.states() == OK
    bench.gpus.close()
    assert bench.nvml.shutdowns == 0


@pytest.mark.slow
async def test_events_are_registered_again_when_nvml_was_opened_again(quick: Bench) -> None:
    _with_events(quick)
    await quick.open()
    await _registered(quick)
    quick.nvml.gpus.append(FakeDevice("GPU-3"))
    _with_events(quick)
    quick.run()
    await quick.until_states({**OK, "GPU-3": "ok"})
    await _registered(quick)
    quick.nvml.xid(quick.nvml.gpus[3], 31)
    await eventually(lambda: quick.value(own.XIDS, of="device") == 1)
    assert (await quick.read())[3]["xids"] == {"31": 1}
    assert len(quick.nvml.sets) == 1


@pytest.mark.slow
async def test_a_gpu_that_can_not_be_read_has_the_call_and_the_reason_and_a_working_one_the_values_that_it_lacks(
    bench: Bench,
) -> None:
    bench.nvml.gpus.append(FakeDevice("GPU-3"))
    bench.nvml.gpus[3].open_error = binding.NO_PERMISSION
    await bench.open()
    assert bench.gpus.count == 4
    assert set(bench.gpus.left_out()) == set(OK)
    bench.nvml.gpus[0].error = binding.GPU_IS_LOST
    hang = bench.nvml.hang("GPU-1", "*")
    await bench.read(0.2)
    await bench.read(0.8)
    silent = bench.gpus.unreadable()[1].failed_call.call
    assert bench.gpus.unreadable() == [
        (0, "GPU-0", ("nvmlDeviceGetUtilizationRates", "GPU_IS_LOST")),
        (1, "GPU-1", (silent, "TIMEOUT")),
        (3, None, ("nvmlDeviceGetHandleByIndex", "NO_PERMISSION")),
    ]
    assert "GPU-1" not in bench.gpus.left_out()
    bench.nvml.gpus[0].error = None
    hang.end.set()
    await bench.until_states(OK)
    assert [refusal.gpu_index for refusal in bench.gpus.unreadable()] == [3]


async def test_a_gpu_that_reports_no_xid_errors_leaves_them_out_until_it_does() -> None:
    async with opened(Bench(stopped_clock=True)) as bench:
        _with_events(bench)
        bench.nvml.gpus[1].fail("nvmlDeviceGetSupportedEventTypes", binding.NO_PERMISSION)
        bench.nvml.gpus[2].answers["nvmlDeviceGetSupportedEventTypes"] = 0
        await bench.open()

        def silent() -> dict[str, Any]:
            return {uuid: left_out["xids"] for uuid, left_out in bench.gpus.left_out().items() if "xids" in left_out}

        types = "nvmlDeviceGetSupportedEventTypes"
        silent_gpus = {"GPU-1": ((types, "NO_PERMISSION"),), "GPU-2": ((types, "NOT_SUPPORTED"),)}
        await eventually(lambda: silent() == silent_gpus)
        _with_events(bench)
        bench.clock.now_s += RETRY_EVERY_S
        await eventually(lambda: silent() == {"GPU-2": silent_gpus["GPU-2"]})


async def test_without_sets_of_events_no_gpu_reports_xid_errors(bench: Bench) -> None:
    bench.nvml.events_error = binding.FUNCTION_NOT_FOUND
    await bench.open()
    cause = ("nvmlEventSetCreate", "FUNCTION_NOT_FOUND")
    await eventually(lambda: {left_out.get("xids") for left_out in bench.gpus.left_out().values()} == {(cause,)})
