"""The simulated fleet as it runs: what it sends is what it counts, and what the truth says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from producers import PRODUCERS
from producers import publisher as names
from producers.simulated import component as own
from producers.simulated.component import FleetClock, SimulatedFleet
from producers.simulated.config import SimulatedSettings
from tests.producers.fakes import FakeSender
from topics.allocations import Allocations
from topics.samples import Sample
from topics.topic import decoder
from topics.workloads import NodeWorkloads

RECORDS: dict[str, type[msgspec.Struct]] = {
    "gpu.samples": Sample,
    "gpu.allocations": Allocations,
    "gpu.workloads": NodeWorkloads,
}


def settings(**changed: Any) -> SimulatedSettings:
    chosen = {"fleet": "5x4", "cluster": "prod-1", "interval_s": 0.02, "stop_after_ticks": 4, "pod_life_s": 0.5}
    return SimulatedSettings(kafka="127.0.0.1:1", **{**chosen, **changed})


async def run(component: SimulatedFleet, stop: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(30):
        await component.run(stop or asyncio.Event())


def truth_of(path: Path) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """The rows of a truth file by tick."""
    rows_by_tick: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        rows_by_tick.setdefault((row["node"], row["run_id"], row["seq"]), []).append(row)
    return rows_by_tick


async def test_the_truth_is_what_was_sent(tmp_path: Path) -> None:
    sender, path = FakeSender(prompt=True), tmp_path / "truth.jsonl"
    component = SimulatedFleet(settings(truth=path), sender=sender)
    await run(component)
    truth = truth_of(path)
    sent = {(tick["node"], tick["run_id"], tick["seq"]): tick for tick in sender.records("gpu.samples")}

    assert sent.keys() == truth.keys()
    assert len(sent) == 20
    for tick, rows in truth.items():
        assert {(row["cluster"], row["ts_ms"]) for row in rows} == {(sent[tick]["cluster"], sent[tick]["ts_ms"])}
        expected = [
            (device["uuid"], device["metrics"].get("gpu_utilization_ratio"), device["metrics"].get("memory_used_bytes"))
            for device in sent[tick]["devices"]
        ]
        assert [(row["uuid"], row["utilization_ratio"], row["memory_used_bytes"]) for row in rows] == expected
    assert component.registry.get_sample_value(own.TRUTHS) == sum(map(len, truth.values()))


async def test_the_truth_begins_a_line_of_its_own_after_one_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    path.write_text('{"whole":1}\n{"cut":')
    await run(SimulatedFleet(settings(truth=path), sender=FakeSender(prompt=True)))
    whole, cut, *rows = path.read_text().splitlines()
    assert (whole, cut) == ('{"whole":1}', '{"cut":')
    assert all(json.loads(row)["seq"] for row in rows)


async def test_reported_is_what_the_named_snapshot_says(tmp_path: Path) -> None:
    sender, path = FakeSender(prompt=True), tmp_path / "truth.jsonl"
    await run(SimulatedFleet(settings(truth=path, interval_s=0.1, stop_after_ticks=8), sender=sender))
    containers = {
        (snapshot["node"], snapshot["run_id"], snapshot["seq"]): {
            (row["namespace"], row["pod"], row["container"]) for row in snapshot["containers"]
        }
        for snapshot in sender.records("gpu.allocations")
    }
    ticks = {(tick["node"], tick["run_id"], tick["seq"]): tick for tick in sender.records("gpu.samples")}

    assert len(containers) > 5
    for (node, run_id, seq), rows in truth_of(path).items():
        named = (node, run_id, ticks[node, run_id, seq]["allocations_seq"])
        reported = {
            (holder["namespace"], holder["pod"], holder["container"]) for row in rows for holder in row["reported"]
        }
        assert reported == containers[named]


async def test_what_it_sends_is_what_readers_decode_and_all_of_a_node_has_one_key() -> None:
    sender = FakeSender(prompt=True)
    await run(SimulatedFleet(settings(), sender=sender))
    decoded = [(event, decoder(RECORDS[event.topic])(json.dumps(event.record).encode())) for event in sender.events]

    assert {event.topic for event, _ in decoded} == RECORDS.keys()
    assert all(event.key == f"prod-1/{event.record['node']}".encode() for event, _ in decoded)


async def test_every_pod_that_a_snapshot_names_is_known_to_the_api_server_or_soon_will_be() -> None:
    sender = FakeSender(prompt=True)
    await run(SimulatedFleet(settings(pod_life_s=300.0), sender=sender))
    named = {
        (row["namespace"], row["pod"])
        for snapshot in sender.records("gpu.allocations")
        for row in snapshot["containers"]
    }
    known_pods = {
        (pod["namespace"], pod["name"]) for record in sender.records("gpu.workloads") for pod in record["pods"]
    }

    assert len(named) >= 5
    assert len(named - known_pods) <= 2
    assert {record["epoch"] for record in sender.records("gpu.workloads")} == {
        sender.records("gpu.samples")[0]["run_id"]
    }


async def test_it_counts_its_ticks_and_the_values_in_them() -> None:
    sender = FakeSender(prompt=True)
    component = SimulatedFleet(settings(), sender=sender)
    await run(component)
    ticks = sender.records("gpu.samples")

    assert component.sampled() == [(f"sim-{n:04d}", ticks[0]["run_id"], 4) for n in range(5)]
    assert component.sampled_values == sum(len(d["metrics"]) for tick in ticks for d in tick["devices"])
    assert component.registry.get_sample_value(names.MADE) == component.registry.get_sample_value(names.SENT) == 20
    assert component.registry.get_sample_value(names.VALUES) == component.sampled_values


async def test_a_clock_that_steps_back_starts_a_new_run_of_every_node() -> None:
    wall = [1_000_000.0]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    clock = FleetClock(lambda: wall[0] + loop.time() - began_s, loop.time)
    sender, stop = FakeSender(prompt=True), asyncio.Event()
    component = SimulatedFleet(settings(stop_after_ticks=None), sender=sender, clock=clock)
    running = asyncio.create_task(run(component, stop))
    for total, step_s in ((10, 3600.0), (20, 0.0)):
        while sum(seq for _, _, seq in component.sampled()) < total:  # noqa: ASYNC110 - real time passes
            await asyncio.sleep(0.005)
        wall[0] -= step_s
    stop.set()
    await running

    assert len(component.sampled()) == 10
    assert {record["run_id"] for record in sender.records("gpu.allocations")} == {
        run for _, run, _ in component.sampled()
    }


async def test_a_tick_that_is_late_by_almost_an_interval_is_of_the_same_run_as_the_next_one() -> None:
    late = iter([0.0] * 3 + [0.0099] * 9)  # the process pauses from before its first tick until the second is due
    last = [0.0099]

    def monotonic_s() -> float:
        last[0] += 0.0001
        return next(late, last[0])

    component = SimulatedFleet(
        settings(fleet="1x1", interval_s=0.005, stop_after_ticks=5),
        sender=FakeSender(prompt=True),
        clock=FleetClock(monotonic_s=monotonic_s),
    )
    await run(component, asyncio.Event())
    assert [seq for _, _, seq in component.sampled()] == [5]


async def test_a_stop_ends_it_and_leaves_nothing_unsent() -> None:
    sender, stop = FakeSender(prompt=True), asyncio.Event()
    component = SimulatedFleet(settings(stop_after_ticks=None), sender=sender)
    running = asyncio.create_task(run(component, stop))
    while not sender.records("gpu.samples"):  # noqa: ASYNC110 - real time passes
        await asyncio.sleep(0.005)
    stop.set()
    await running

    assert sender.stopped
    assert len(sender.records("gpu.samples", "acknowledged")) == sum(seq for _, _, seq in component.sampled())


async def test_it_stops_though_kafka_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.simulated.component.DRAIN_S", 0.01)
    sender = FakeSender()
    component = SimulatedFleet(settings(stop_after_ticks=2), sender=sender)
    await run(component)

    assert sender.stopped
    assert component.registry.get_sample_value(names.DROPPED, {"reason": "stopped"}) == 10
    assert component.registry.get_sample_value(names.HELD) == 0


async def test_it_is_ready_once_kafka_has_answered() -> None:
    sender = FakeSender(prompt=True)
    component = SimulatedFleet(settings(), sender=sender)

    assert component.not_ready() == ["no Kafka broker has answered at 127.0.0.1:1 yet"]
    await run(component)
    assert component.not_ready() == []


async def test_a_truth_that_cannot_be_written_ends_it(tmp_path: Path) -> None:
    sender = FakeSender(prompt=True)
    with pytest.raises(IsADirectoryError):
        await run(SimulatedFleet(settings(truth=tmp_path), sender=sender))

    assert sender.stopped


async def test_a_truth_on_a_full_disk_ends_it_and_is_named() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{full}'"):
        await run(SimulatedFleet(settings(truth=full), sender=FakeSender(prompt=True)))


async def test_a_sender_that_fails_ends_it_with_its_own_error() -> None:
    class Broken(FakeSender):
        async def start(self) -> None:
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        await run(SimulatedFleet(settings(stop_after_ticks=None), sender=Broken()))


async def test_a_process_that_was_suspended_skips_ticks_and_counts_them() -> None:
    jump = [0.0]
    loop = asyncio.get_running_loop()
    clock = FleetClock(lambda: loop.time() + jump[0], lambda: loop.time() + jump[0])
    sender, stop = FakeSender(prompt=True), asyncio.Event()
    component = SimulatedFleet(settings(stop_after_ticks=None), sender=sender, clock=clock)
    running = asyncio.create_task(run(component, stop))
    while not sender.records("gpu.samples"):  # noqa: ASYNC110 - real time passes
        await asyncio.sleep(0.005)
    jump[0] = 2.0
    while (component.registry.get_sample_value(own.MISSED) or 0) < 5 * 90:  # noqa: ASYNC110 - real time passes
        await asyncio.sleep(0.005)
    stop.set()
    await running


def test_every_error_in_the_settings_is_reported() -> None:
    wrong = settings(fleet="8", cluster="a/b", interval_s=0.0, buffer_s=0.0)

    assert [error.split(":")[0].split(" ")[0] for error in wrong.errors()] == [
        "--buffer",
        "--interval",
        "fleet",
        "cluster",
    ]
    assert settings().errors() == []


def test_a_truth_that_cannot_be_written_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (error,) = settings(truth=tmp_path / "missing" / "truth.jsonl").errors()

    assert error.startswith(f"--truth: {tmp_path}/missing/truth.jsonl can't be written")
    for odd in (tmp_path / ("x" * 300), tmp_path / ("x" * 300) / "truth.jsonl", Path(__file__) / "truth.jsonl"):
        (error,) = settings(truth=odd).errors()
        assert "can't be written" in error
    assert settings(truth=tmp_path / "truth.jsonl").errors() == []


def test_the_registry_names_it() -> None:
    assert PRODUCERS["simulated"].component == f"{SimulatedFleet.__module__}:{SimulatedFleet.__qualname__}"
