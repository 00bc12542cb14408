"""A thread waits for XID errors; only that thread hangs, fails or is late with the driver."""

import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator

import pytest

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml import binding
from producers.node.nvml.binding import NvmlError, NvmlEvent
from producers.node.nvml.events import UNSUPPORTED_EVERY_S, XID_EVENT, Events, Xid
from tests.eventually import eventually
from tests.producers.node.nvml.fake import FakeNvml

WAIT = "nvmlEventSetWait"
SUPPORTED = "nvmlDeviceGetSupportedEventTypes"


class Bench:
    def __init__(self, gpus: int = 2) -> None:
        self.nvml = FakeNvml(gpus)
        self.nvml.init()
        for gpu in self.nvml.gpus:
            gpu.answers[SUPPORTED] = XID_EVENT | 3
        self.reported: list[Xid] = []
        self.instruments = Instruments(names.INSTRUMENTS)
        self.ahead_s = 0.0
        self.events = Events(
            self.nvml,
            self.instruments,
            on_xid=self.on_xid,
            clock=lambda: time.monotonic() + self.ahead_s,
            wait_s=0.05,
        )

    def on_xid(self, xid: Xid) -> None:
        self.reported.append(xid)

    @property
    def errors(self) -> list[tuple[str, str]]:
        """The calls that were counted as failed, each with its error."""
        samples = [sample for family in self.instruments.registry.collect() for sample in family.samples]
        counted = [sample for sample in samples if sample.name == names.NVML_ERRORS]
        return [(sample.labels["call"], sample.labels["error"]) for sample in counted for _ in range(int(sample.value))]

    def add(self) -> None:
        self.events.resume()
        for index in range(len(self.nvml.gpus)):
            self.events.add(index, self.nvml.handle(index))

    async def watch(self) -> None:
        self.add()
        await eventually(lambda: all(self.nvml.call_counts[gpu.uuid, SUPPORTED] for gpu in self.nvml.gpus))
        await eventually(self.waiting)

    def waiting(self) -> bool:
        return bool(self.nvml.call_counts["", WAIT])

    async def renewed(self, sets: int) -> None:
        await eventually(lambda: self.nvml.call_counts["", "nvmlEventSetCreate"] == sets)
        before = self.nvml.call_counts["", WAIT]
        await eventually(lambda: self.nvml.call_counts["", WAIT] > before)

    def codes(self) -> list[tuple[int | None, int]]:
        return [(xid.gpu, xid.code) for xid in self.reported]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with closing(Bench()) as bench:
        yield bench


@contextlib.asynccontextmanager
async def closing(bench: Bench) -> AsyncIterator[Bench]:
    yield bench
    bench.nvml.release()
    ended = bench.events.close()
    await eventually(ended.is_set)


async def test_each_error_is_reported_with_its_gpu_its_code_and_the_time_when_it_was_seen(bench: Bench) -> None:
    await bench.watch()
    before_ms = time.time_ns() // 1_000_000
    bench.nvml.xid(bench.nvml.gpus[1], 79)
    bench.nvml.xid(bench.nvml.gpus[0], 31, 4)
    await eventually(lambda: len(bench.reported) == 2)
    assert bench.codes() == [(1, 79), (0, 31)]
    assert [xid.gpu_instance for xid in bench.reported] == [None, 4]
    assert all(before_ms <= xid.ts_ms <= time.time_ns() // 1_000_000 for xid in bench.reported)
    assert bench.errors == []


async def test_it_goes_on_waiting_after_an_error(bench: Bench) -> None:
    await bench.watch()
    for times in (1, 2, 3):
        bench.nvml.xid(bench.nvml.gpus[0], times)
        await eventually(lambda: len(bench.reported) == times)  # noqa: B023 - awaited here
    assert bench.codes() == [(0, 1), (0, 2), (0, 3)]


async def test_a_gpu_without_these_events_is_not_registered_and_not_counted(bench: Bench) -> None:
    del bench.nvml.gpus[0].answers[SUPPORTED]
    bench.nvml.gpus[1].answers[SUPPORTED] = 3
    bench.add()
    await eventually(lambda: all(bench.nvml.call_counts[gpu.uuid, SUPPORTED] for gpu in bench.nvml.gpus))
    assert bench.nvml.call_counts["", WAIT] == 0
    assert bench.nvml.sets[0].devices == []
    assert bench.errors == []
    assert set(bench.events.refusals()) == {0, 1}


async def test_a_gpu_that_had_no_events_for_a_moment_is_queried_again_and_reports_its_errors(
    bench: Bench,
) -> None:
    answer = bench.nvml.gpus[0].answers.pop(SUPPORTED)
    await bench.watch()
    assert bench.nvml.call_counts["GPU-0", SUPPORTED] == 1
    bench.nvml.gpus[0].answers[SUPPORTED] = answer
    bench.ahead_s = UNSUPPORTED_EVERY_S
    await eventually(lambda: bench.nvml.call_counts["GPU-0", SUPPORTED] == 2 and not bench.events.refusals())
    bench.nvml.xid(bench.nvml.gpus[0], 79)
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(0, 79)]
    assert bench.errors == []


async def test_only_events_that_a_gpu_has_are_registered(bench: Bench) -> None:
    del bench.nvml.gpus[0].answers[SUPPORTED]
    await bench.watch()
    assert [device.uuid for device in bench.nvml.sets[0].devices] == ["GPU-1"]


async def test_a_gpu_that_can_not_be_queried_is_counted_and_the_others_are_waited_for(bench: Bench) -> None:
    bench.nvml.gpus[0].fail(SUPPORTED, binding.UNKNOWN)
    await bench.watch()
    bench.nvml.xid(bench.nvml.gpus[1], 13)
    await eventually(lambda: bench.reported)
    assert bench.errors == [(SUPPORTED, "UNKNOWN")]


async def test_an_event_of_an_unknown_gpu_is_reported_without_a_gpu(bench: Bench) -> None:
    await bench.watch()
    bench.nvml.sets[0].reported.put(NvmlEvent(4711, XID_EVENT, 13))
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(None, 13)]


async def test_other_events_are_not_reported(bench: Bench) -> None:
    await bench.watch()
    bench.nvml.sets[0].reported.put(NvmlEvent(id(bench.nvml.gpus[0]), 1, 5))
    bench.nvml.xid(bench.nvml.gpus[0], 13)
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(0, 13)]


@pytest.mark.slow
async def test_a_set_that_fails_is_created_again_and_counted(bench: Bench) -> None:
    await bench.watch()
    bench.nvml.gpus[0].error = binding.GPU_IS_LOST
    bench.nvml.sets[0].reported.put(NvmlError(binding.GPU_IS_LOST))
    await bench.renewed(2)
    bench.nvml.xid(bench.nvml.gpus[1], 79)
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(1, 79)]
    assert bench.errors == [(WAIT, "GPU_IS_LOST")]
    assert len(bench.nvml.sets) == 1


@pytest.mark.slow
async def test_after_an_error_that_is_not_nvmls_it_waits_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.watch()
    bench.nvml.sets[0].reported.put(OverflowError("a handle that is no address"))
    await eventually(lambda: bench.errors == [(WAIT, "UNKNOWN")])
    await bench.renewed(2)
    bench.nvml.xid(bench.nvml.gpus[1], 79)
    await eventually(lambda: bench.codes() == [(1, 79)])
    assert [record.message for record in caplog.records] == [f"{WAIT} failed; it is tried again"]
    assert len(bench.nvml.sets) == 1


@pytest.mark.slow
async def test_an_xid_error_queued_behind_the_event_of_a_loss_is_reported(bench: Bench) -> None:
    await bench.watch()
    lost = bench.nvml.gpus[0]
    lost.error = binding.GPU_IS_LOST
    waited_on = bench.nvml.sets[0].reported
    hang = bench.nvml.hang(None, WAIT)
    await eventually(hang.started.is_set)
    for reported in (
        NvmlError(binding.GPU_IS_LOST),
        NvmlEvent(id(lost), XID_EVENT, 79),
        NvmlError(binding.GPU_IS_LOST),
    ):
        waited_on.put(reported)
    bench.nvml.release()
    await bench.renewed(2)
    assert bench.codes() == [(0, 79)]
    assert bench.errors == [(WAIT, "GPU_IS_LOST")]


async def test_a_driver_without_events_is_queried_once_and_not_counted(bench: Bench) -> None:
    bench.nvml.events_error = binding.FUNCTION_NOT_FOUND
    bench.add()
    await eventually(lambda: not bench.events.busy)
    assert bench.nvml.call_counts["", "nvmlEventSetCreate"] == 1
    assert bench.errors == []


@pytest.mark.slow
async def test_a_pause_frees_the_set_and_it_can_start_again(bench: Bench) -> None:
    await bench.watch()
    bench.events.pause()
    await eventually(lambda: not bench.events.busy)
    assert bench.nvml.sets == []
    bench.nvml.init()
    bench.add()
    await bench.renewed(2)
    bench.nvml.xid(bench.nvml.gpus[0], 13)
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(0, 13)]


async def test_a_pause_just_after_a_wait_that_has_ended_with_an_error_frees_the_set_too() -> None:
    class PausingBench(Bench):
        def on_xid(self, xid: Xid) -> None:
            super().on_xid(xid)
            self.events.pause()
            assert self.events.busy

    async with closing(PausingBench()) as bench:
        await bench.watch()
        bench.nvml.xid(bench.nvml.gpus[0], 13)
        await eventually(lambda: bench.reported and not bench.events.busy)
        assert bench.nvml.sets == []


@pytest.mark.parametrize("call", [WAIT, "nvmlEventSetCreate"])
async def test_a_call_that_hangs_is_reported_and_logged_once_as_is_its_return(
    bench: Bench, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hang = bench.nvml.hang(None, call)
    bench.add()
    await eventually(hang.started.is_set)
    bench.ahead_s = 3600.0
    (reason,) = bench.events.not_ready()
    assert re.fullmatch(rf".* {call} has not returned for 3[0-9]+ s; XID errors are not seen", reason)
    bench.events.log_hang()
    bench.events.log_hang()
    bench.nvml.release()
    await eventually(lambda: not bench.events.not_ready())
    bench.events.log_hang()
    bench.events.log_hang()
    reported, returned = caplog.messages
    assert "XID errors are not seen" in reported
    assert returned.endswith("has returned: XID errors are seen again")


async def test_a_watch_that_works_for_long_is_not_reported(bench: Bench) -> None:
    await bench.watch()
    bench.ahead_s = 3600.0
    await eventually(lambda: not bench.events.not_ready())


async def test_a_wait_that_hangs_does_not_delay_the_end() -> None:
    bench = Bench()
    hang = bench.nvml.hang(None, WAIT)
    bench.add()
    await eventually(hang.started.is_set)
    ended = bench.events.close()
    assert bench.events.busy
    assert not ended.is_set()
    bench.nvml.release()
    await eventually(ended.is_set)


async def test_without_gpus_nothing_is_called() -> None:
    async with closing(Bench(0)) as bench:
        bench.add()
        assert not bench.events.busy
        assert bench.nvml.call_counts.total() == 1


async def test_while_it_is_paused_no_gpu_is_added(bench: Bench) -> None:
    bench.events.add(0, bench.nvml.handle(0))
    assert not bench.events.busy


async def test_a_gpu_that_is_added_again_is_registered_once(bench: Bench) -> None:
    await bench.watch()
    bench.add()
    bench.nvml.xid(bench.nvml.gpus[0], 13)
    await eventually(lambda: bench.reported)
    assert bench.nvml.call_counts["GPU-0", "nvmlDeviceRegisterEvents"] == 1


async def test_a_gpu_that_appears_later_is_registered_too(bench: Bench) -> None:
    bench.events.resume()
    bench.events.add(0, bench.nvml.handle(0))
    await eventually(bench.waiting)
    bench.events.add(1, bench.nvml.handle(1))
    await eventually(lambda: bench.nvml.call_counts["GPU-1", "nvmlDeviceRegisterEvents"])
    bench.nvml.xid(bench.nvml.gpus[1], 13)
    await eventually(lambda: bench.reported)
    assert bench.codes() == [(1, 13)]
