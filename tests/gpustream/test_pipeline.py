"""A run in one process: the order of its start and end, and what fails."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from gpustream import pipeline
from gpustream.pipeline import Failed, Pipeline, Tail
from gpustream.tally import Run, Tally
from tests.eventually import eventually
from tests.producers.fakes import FakeClock

NODE = Run("c", "n-0", 1)


class Part:
    """A component that writes down when it starts and stops."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.registry = CollectorRegistry()
        self.reasons: list[str] = []
        self.error: Exception | None = None
        self.ends = False
        self.hangs = False
        self.drain_s = 4.0

    async def run(self, stop: asyncio.Event) -> None:
        """Waits for ``stop``."""
        self.log.append(f"{self.name} starts")
        if self.error:
            raise self.error
        if self.hangs:
            await asyncio.sleep(60)
        if not self.ends:
            await stop.wait()
        self.log.append(f"{self.name} stops")

    def not_ready(self) -> list[str]:
        """The reasons set by the test."""
        return self.reasons


SAMPLED = {NODE: 10}
"""What the producer sampled: ten ticks."""


class Eyes(Tail):
    """A tail that reads nothing."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def start(self) -> None:
        """Stands at the end."""
        self.log.append("tail stands at the end")

    async def run(self) -> None:
        """Reads."""
        await asyncio.sleep(60)

    async def stop(self) -> None:
        """Closes."""
        self.log.append("tail closes")


class PipelineOfFakes:
    """A pipeline of fakes whose sink takes every tick at once, unless the test says otherwise."""

    def __init__(self, attributed: int = 10) -> None:
        self.log: list[str] = []
        self.reasons: list[list[str]] = []
        self.source, self.stream, self.sink = (
            Part("producer", self.log),
            Part("stream", self.log),
            Part("sink", self.log),
        )
        self.tally = Tally(["sink"])
        for seq in range(1, attributed + 1):
            self.take(seq)
        self.pipeline = Pipeline(
            self.source, [self.stream], [self.sink], Eyes(self.log), self.reasons.append, self.behind
        )

    def behind(self) -> int:
        """How many ticks are not in the sink."""
        return self.tally.undelivered(SAMPLED)

    def take(self, seq: int) -> None:
        """The tick has come out of attribution and into the sink."""
        self.tally.attributed(NODE, seq, "exact")
        self.tally.sinks["sink"].outcome(*NODE, seq, "delivered")


async def test_it_starts_back_to_front_and_ends_front_to_back() -> None:
    fakes = PipelineOfFakes()
    await fakes.pipeline.run(asyncio.Event(), 0.0)

    assert fakes.log[:4] == ["tail stands at the end", "sink starts", "stream starts", "producer starts"]
    assert fakes.log[4] == "producer stops"
    assert set(fakes.log[5:7]) == {"stream stops", "sink stops"}
    assert fakes.log[7:] == ["tail closes"]


async def test_nothing_is_sampled_before_all_is_ready() -> None:
    fakes = PipelineOfFakes()
    fakes.sink.reasons = ["no assignment yet"]
    running = asyncio.create_task(fakes.pipeline.run(asyncio.Event(), 0.0))
    await eventually(lambda: bool(fakes.reasons))
    assert "producer starts" not in fakes.log
    assert fakes.reasons == [["sink: no assignment yet"]]

    fakes.sink.reasons = []
    await running
    assert "producer starts" in fakes.log


async def test_a_stop_before_all_is_ready_samples_nothing() -> None:
    fakes, stop = PipelineOfFakes(), asyncio.Event()
    fakes.sink.reasons = ["no assignment yet"]
    stop.set()
    await fakes.pipeline.run(stop, None)

    assert "producer starts" not in fakes.log


async def test_the_drain_waits_for_the_last_tick() -> None:
    fakes = PipelineOfFakes(attributed=9)
    running = asyncio.create_task(fakes.pipeline.run(asyncio.Event(), 0.0))
    await eventually(lambda: "producer stops" in fakes.log)
    assert "sink stops" not in fakes.log

    fakes.take(10)
    await running
    assert fakes.tally.undelivered(SAMPLED) == 0


async def test_the_drain_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PATIENCE_S", 0.05)
    fakes = PipelineOfFakes(attributed=7)
    await fakes.pipeline.run(asyncio.Event(), 0.0)

    assert fakes.tally.undelivered(SAMPLED) == 3


async def test_a_run_that_ends_by_itself_is_patient_until_it_is_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "DRAIN_S", 0.05)
    monkeypatch.setattr(pipeline, "STOPPED_BY_S", 0.1)
    fakes, stop = PipelineOfFakes(attributed=7), asyncio.Event()
    fakes.sink.hangs = True
    running = asyncio.create_task(fakes.pipeline.run(stop, 0.0))
    await eventually(lambda: "producer stops" in fakes.log)
    assert fakes.source.drain_s == pipeline.PATIENCE_S
    assert not (await asyncio.wait([running], timeout=0.3))[0]
    stop.set()
    await asyncio.wait_for(running, 10)
    assert fakes.tally.undelivered(SAMPLED) == 3


async def test_a_run_that_ends_by_itself_is_not_patient_with_a_sink_that_says_why_it_delivers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "DRAIN_S", 0.05)
    monkeypatch.setattr(pipeline, "PATIENCE_S", 3600.0)
    fakes = PipelineOfFakes(attributed=7)
    running = asyncio.create_task(fakes.pipeline.run(asyncio.Event(), 0.0))
    await eventually(lambda: "producer starts" in fakes.log)
    fakes.sink.reasons = ["the receiver does not accept"]
    await asyncio.wait_for(running, 60)
    assert fakes.tally.undelivered(SAMPLED) == 3


async def test_the_producer_of_a_run_that_is_asked_to_stop_is_not_patient() -> None:
    fakes, stop = PipelineOfFakes(), asyncio.Event()
    running = asyncio.create_task(fakes.pipeline.run(stop, None))
    await eventually(lambda: "producer starts" in fakes.log)
    stop.set()
    await running
    assert fakes.source.drain_s == 4.0


@pytest.mark.parametrize(("stopped", "undelivered"), [(False, 0), (True, 8)])
async def test_the_drain_goes_on_while_ticks_arrive_unless_it_was_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, undelivered: int
) -> None:
    drain, clock, stop = PipelineOfFakes(attributed=0), FakeClock(), asyncio.Event()
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(pipeline, "_CHECK_EVERY_S", 0.0)
    seqs, behind = iter(range(11)), drain.behind

    def behind_after_a_while() -> int:
        if seq := next(seqs):
            clock.now_s += 0.9 * (pipeline.DRAIN_S if stopped else pipeline.PATIENCE_S)
            drain.take(seq)
        elif stopped:
            stop.set()
        return behind()

    drain.pipeline.behind = behind_after_a_while
    await drain.pipeline.run(stop, 0.0)

    assert drain.tally.undelivered(SAMPLED) == undelivered


async def test_a_component_that_does_not_stop_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PATIENCE_S", 0.05)
    fakes = PipelineOfFakes()
    fakes.sink.hangs = True
    await fakes.pipeline.run(asyncio.Event(), 0.0)

    assert fakes.log[-1] == "tail closes"
    assert "sink stops" not in fakes.log


async def test_a_component_that_fails_ends_the_run_and_the_others_stop() -> None:
    fakes = PipelineOfFakes()
    fakes.stream.error = RuntimeError("boom")
    with pytest.raises(Failed, match="stream failed: boom"):
        await fakes.pipeline.run(asyncio.Event(), None)

    assert "sink stops" in fakes.log


async def test_a_component_that_ends_on_its_own_has_failed() -> None:
    fakes = PipelineOfFakes()
    fakes.sink.ends = True
    with pytest.raises(Failed, match="sink ended on its own"):
        await fakes.pipeline.run(asyncio.Event(), None)
