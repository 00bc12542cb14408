"""A trace is sent whole, in order, at the pace of ``--speed``, and no tick before its pods."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from producers import PRODUCERS
from producers import publisher as names
from producers.replay import component as own
from producers.replay.component import TraceReplay
from producers.replay.config import ReplaySettings
from producers.replay.trace import NoTrace
from tests.eventually import eventually
from tests.producers.fakes import FakeSender
from tests.producers.replay import trace_files


def settings(folder: Path, **changed: Any) -> ReplaySettings:
    return ReplaySettings(kafka="127.0.0.1:1", cluster="trace", trace=("alibaba-gpu-2023", folder), **changed)


async def at_once(_: float) -> None:
    """A sleep that takes no time."""
    await asyncio.sleep(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pods = [trace_files.pod(f"p-{number}", 1, 500, 60 * number, 60 * number + 600) for number in range(40)]
    return trace_files.gpu_2023(tmp_path, ["n-0,1,1,4,T4", "n-1,1,1,4,T4", "n-2,1,1,4,T4"], [*pods, "broken"])


async def test_all_ticks_of_a_node_are_sent_in_order_after_all_pods(folder: Path) -> None:
    sender = FakeSender(prompt=True)
    component = TraceReplay(settings(folder, interval_s=10.0), sender=sender, sleep=at_once)
    async with asyncio.timeout(30):
        await component.run(asyncio.Event())
    ticks = sender.records("gpu.samples")

    assert len(ticks) > 500
    assert component.registry.get_sample_value(names.SENT) == len(ticks)
    for node in {tick["node"] for tick in ticks}:
        numbered = [(tick["seq"], tick["ts_ms"]) for tick in ticks if tick["node"] == node]
        assert [seq for seq, _ in numbered] == list(range(1, len(numbered) + 1))
        assert numbered == sorted(numbered)
    topics = [event.topic for event in sender.events]
    assert topics.index("gpu.samples") > max(n for n, topic in enumerate(topics) if topic == "gpu.workloads")
    pod_names = {pod["name"] for record in sender.records("gpu.workloads") for pod in record["pods"]}
    assert pod_names == {row["pod"] for record in sender.records("gpu.allocations") for row in record["containers"]}
    left_out = {"file": trace_files.PODS, "reason": "fields"}
    assert component.registry.get_sample_value(own.LEFT_OUT, left_out) == 1
    assert component.registry.get_sample_value(own.READ, {"file": trace_files.PODS}) == 40
    assert {tick["interval_ms"] for tick in ticks} == {10_000}
    assert sender.stopped


async def test_a_broker_that_is_away_is_waited_for_and_nothing_is_dropped(folder: Path) -> None:
    sender = FakeSender()
    component = TraceReplay(settings(folder, interval_s=1.0), sender=sender, sleep=at_once)
    running = asyncio.create_task(component.run(asyncio.Event()))
    async with asyncio.timeout(30):
        while not running.done():
            assert sender.waiting <= 3 * names.MAX_IN_FLIGHT
            sender.acknowledge(7)
            await asyncio.sleep(0)
    await running

    ticks = len(sender.records("gpu.samples"))
    assert ticks > 2000
    assert component.registry.get_sample_value(names.SENT) == component.registry.get_sample_value(names.MADE) == ticks


async def test_a_speed_is_kept(folder: Path) -> None:
    time_s = [0.0]

    async def sleep(seconds: float) -> None:
        time_s[0] += seconds
        await asyncio.sleep(0)

    chosen = settings(folder, speed=60.0)
    component = TraceReplay(chosen, sender=FakeSender(prompt=True), clock_s=lambda: time_s[0], sleep=sleep)
    async with asyncio.timeout(30):
        await component.run(asyncio.Event())

    assert time_s[0] == pytest.approx(own.KNOWN_S + (39 * 60 + 600) / 60)


async def test_it_stops_in_the_middle(folder: Path) -> None:
    sender, stop = FakeSender(prompt=True), asyncio.Event()

    async def first_at_once(seconds: float) -> None:
        await asyncio.sleep(0 if seconds == own.KNOWN_S else seconds)

    component = TraceReplay(settings(folder, speed=1.0), sender=sender, sleep=first_at_once)
    running = asyncio.create_task(component.run(stop))
    async with asyncio.timeout(30):
        await eventually(lambda: sender.records("gpu.samples"))
        stop.set()
        await running

    assert len(sender.records("gpu.samples")) == 1


async def test_files_of_another_trace_end_it_with_an_error_that_names_the_columns(folder: Path) -> None:
    (folder / "csv" / trace_files.NODES).write_text("a,b\n1,2\n")
    with pytest.raises(NoTrace, match="no column sn, gpu, model; it has a, b"):
        await TraceReplay(settings(folder), sender=FakeSender(prompt=True)).run(asyncio.Event())


def test_an_interval_is_refused_for_a_trace_with_readings_of_its_own(tmp_path: Path) -> None:
    genai = ReplaySettings(kafka="127.0.0.1:1", trace=("alibaba-genai", tmp_path), interval_s=5.0)

    assert genai.errors() == ["--interval: alibaba-genai has readings of its own"]
    assert settings(tmp_path, interval_s=0.5).errors() == [
        "--interval: 0.5 s is too short; the trace counts in seconds"
    ]
    assert settings(tmp_path, interval_s=5.0).errors() == []
    assert settings(tmp_path).speed == math.inf


def test_it_is_the_producer_that_the_registry_names() -> None:
    assert PRODUCERS["replay"].component == f"{TraceReplay.__module__}:{TraceReplay.__qualname__}"
