"""The node producer as it runs: what it reads is sent with its time, whatever hangs or is away."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from producers import PRODUCERS, publisher
from producers.node import instruments as own
from producers.node.component import NodeProducer
from producers.node.config import NodeSettings
from producers.node.job_files import JobFiles, JobMapping
from producers.node.jobs import Evidence
from tests.eventually import LIMIT_S, eventually
from tests.nvml.scripted import Process, ScriptedNvml
from tests.producers.fakes import FakeSender, containers, devices
from tests.producers.node.procfs import Procfs
from topics.samples import Sample
from topics.topic import decoder


class FakeGpus:
    """Returns ``answer`` after ``takes_s``."""

    def __init__(self, answer: list[dict[str, Any]] | None = None, *, opens_in_s: float = 0.0) -> None:
        self.answer = devices() if answer is None else answer
        self.takes_s = 0.0
        self.reads = 0
        self.time_limits_s: set[float] = set()
        self.reasons: list[str] = []
        self.error: Exception | None = None
        self.closed = self.ran = False
        self.events: list[dict[str, Any]] = []
        self._opens_in_s, self._event = opens_in_s, asyncio.Event()

    def xid(self, code: int) -> None:
        """Let the first GPU report an XID error now."""
        self.events.append({"kind": "xid", "code": code, "ts_ms": time.time_ns() // 1_000_000})
        self._event.set()

    async def open(self, within_s: float) -> None:
        await asyncio.sleep(min(self._opens_in_s, within_s))

    async def read(self, within_s: float) -> list[dict[str, Any]]:
        self.reads += 1
        self.time_limits_s.add(within_s)
        await asyncio.sleep(self.takes_s)
        return self.answer

    def with_events(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return [{**devices[0], "events": events}, *devices[1:]] if events else list(devices)

    async def event(self) -> None:
        await self._event.wait()
        self._event.clear()

    async def run(self) -> None:
        self.ran = True
        await asyncio.Event().wait()

    def not_ready(self) -> list[str]:
        return self.reasons

    def fatal(self) -> Exception | None:
        return self.error

    def close(self) -> None:
        self.closed = True


class FakeKubelet:
    """Returns ``answer``."""

    def __init__(self, answer: list[dict[str, Any]] | None) -> None:
        self.answer = answer
        self.reasons: list[str] = []
        self.closed = False
        self.reads = 0

    async def run(self) -> None:
        """It has no Pods API."""

    async def read(self, within_s: float) -> list[dict[str, Any]] | None:
        self.reads += 1
        return self.answer

    def in_force(self, ts_ms: int) -> list[dict[str, Any]] | None:
        return self.answer

    def not_ready(self) -> list[str]:
        return self.reasons

    async def close(self) -> None:
        self.closed = True


class Bench:
    """A node producer with fake GPUs, a fake kubelet and a fake sender."""

    def __init__(self, *, prompt: bool = True, opens_in_s: float = 0.0, **changed: Any) -> None:
        self.sender = FakeSender(prompt=prompt)
        self.gpus, self.kubelet = FakeGpus(opens_in_s=opens_in_s), FakeKubelet(containers("bert-0"))
        self.stop = asyncio.Event()
        settings = NodeSettings(kafka="127.0.0.1:1", node="gpu-1", **{"interval_s": 0.1, **changed})
        fakes: dict[str, Any] = {"gpus": self.gpus, "kubelet": self.kubelet}
        self.component = NodeProducer(settings, sender=self.sender, **fakes)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run it until the condition holds, and stop it."""
        running = asyncio.create_task(self.component.run(self.stop))
        await eventually(lambda: condition() or running.done())
        self.stop.set()
        await asyncio.wait_for(running, LIMIT_S)

    @property
    def ticks(self) -> list[dict[str, Any]]:
        """The samples that were sent."""
        return self.sender.records("gpu.samples")

    def value(self, name: str, **labels: str) -> float:
        return self.component.registry.get_sample_value(name, labels) or 0.0


async def test_each_tick_has_what_was_read_and_names_its_snapshot() -> None:
    bench = Bench()
    await bench.until(lambda: len(bench.ticks) >= 3)

    assert [tick["seq"] for tick in bench.ticks] == list(range(1, len(bench.ticks) + 1))
    assert {tick["allocations_seq"] for tick in bench.ticks} == {1}
    assert {tick["run_id"] for tick in bench.ticks} == {bench.sender.records("gpu.allocations")[0]["run_id"]}
    assert all(tick["devices"] == devices() for tick in bench.ticks)
    assert bench.component.sampled() == [("gpu-1", bench.ticks[0]["run_id"], len(bench.ticks))]


async def test_sent_records_are_valid() -> None:
    bench = Bench()
    await bench.until(lambda: len(bench.ticks) >= 1)

    assert decoder(Sample)(orjson.dumps(bench.ticks[0])).node == "gpu-1"


async def test_without_a_kubelet_no_snapshot_is_named() -> None:
    bench = Bench()
    bench.kubelet.answer = None
    await bench.until(lambda: len(bench.ticks) >= 1)

    assert bench.ticks[0].get("allocations_seq") is None
    assert bench.sender.records("gpu.allocations") == []


async def test_a_node_whose_gpus_are_gone_still_ticks() -> None:
    bench = Bench()
    bench.gpus.answer = []
    await bench.until(lambda: len(bench.ticks) >= 2)

    assert bench.ticks[0]["devices"] == []


@pytest.mark.parametrize(("interval_s", "limit_s"), [(0.1, 0.08), (10.0, 8.0), (3600.0, 10.0)])
async def test_gpus_and_kubelet_have_four_fifths_of_the_interval_and_ten_seconds_at_most(
    interval_s: float, limit_s: float
) -> None:
    bench = Bench(interval_s=interval_s)
    running = asyncio.create_task(bench.component.run(bench.stop))
    await eventually(lambda: bench.gpus.time_limits_s)
    assert list(bench.gpus.time_limits_s) == [pytest.approx(limit_s)]
    bench.stop.set()
    await asyncio.wait_for(running, LIMIT_S)


async def test_the_first_tick_waits_for_the_driver() -> None:
    bench = Bench(opens_in_s=0.3)
    await bench.until(lambda: len(bench.ticks) >= 1)

    assert bench.gpus.ran
    assert bench.ticks[0]["devices"] == devices()


async def test_a_stop_does_not_wait_for_a_driver_that_hangs() -> None:
    bench = Bench(opens_in_s=3600.0)
    asyncio.get_running_loop().call_later(0.1, bench.stop.set)
    await bench.until(lambda: False)

    assert bench.gpus.closed
    assert bench.kubelet.closed
    assert bench.ticks == []


async def test_a_stop_does_not_wait_for_a_reading_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.node.component.LAST_TICK_WITHIN_S", 0.1)
    bench = Bench(interval_s=3600.0)
    bench.gpus.takes_s = 3600.0
    asyncio.get_running_loop().call_later(0.1, bench.stop.set)
    await bench.until(lambda: False)

    assert bench.sender.stopped


@pytest.mark.parametrize(
    ("buffer_size", "level", "text"),
    [
        (16 << 20, "INFO", r"the buffer of 16 MiB holds about (\d+[dhms] ?)+ at \d+ bytes a tick$"),
        (2 << 30, "INFO", r"the buffer of 2048 MiB holds about (\d+[dhms] ?)+ at \d+ bytes a tick$"),
        (2_000, "WARNING", r"holds about \ds at .*: give --buffer-size \d+MiB, as --buffer wants 15m$"),
    ],
)
async def test_the_first_tick_logs_once_how_long_the_buffer_lasts(
    buffer_size: int, level: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "producers.node.component")
    bench = Bench(buffer_size=buffer_size)
    await bench.until(lambda: len(bench.ticks) >= 3)

    (record,) = [record for record in caplog.records if "buffer" in record.getMessage()]
    assert record.levelname == level
    assert re.search(text, record.getMessage())
    lasts_s = bench.value(own.BUFFER_SECONDS)
    assert lasts_s == 900.0 if level == "INFO" else 0 < lasts_s < 10


@pytest.mark.parametrize("hangs", [False, True])
async def test_events_since_the_last_tick_are_in_one_more_tick_at_the_stop(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.node.component.LAST_TICK_WITHIN_S", 0.1)
    bench = Bench(interval_s=3600.0)
    running = asyncio.create_task(bench.until(lambda: bench.stop.is_set()))
    while not bench.ticks:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    bench.gpus.takes_s = 0.2 if hangs else 0.0
    bench.gpus.xid(79)
    bench.stop.set()
    await running

    first, last = bench.ticks
    assert "events" not in first["devices"][0]
    assert [(event["code"], event["allocations_seq"]) for event in last["devices"][0]["events"]] == [(79, 1)]
    assert last["run_id"] == first["run_id"]


@pytest.mark.slow
async def test_an_event_during_a_reading_is_not_lost_by_a_stop() -> None:
    bench = Bench(interval_s=2.0)
    bench.gpus.takes_s = 0.3
    running = asyncio.create_task(bench.until(lambda: bench.stop.is_set()))
    while bench.gpus.reads < 2:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    bench.gpus.xid(31)
    bench.stop.set()
    await running

    assert [event["code"] for tick in bench.ticks for event in tick["devices"][0].get("events", ())] == [31]


async def test_an_event_makes_the_kubelet_be_read_at_once() -> None:
    bench = Bench(interval_s=3600.0)

    def read_again() -> bool:
        if bench.ticks and bench.kubelet.reads == 1:
            bench.gpus.xid(31)
        return bench.kubelet.reads > 1

    await bench.until(read_again)
    assert bench.gpus.reads == 2, "one tick at the start, and one at the stop"


@pytest.mark.slow
async def test_a_tick_that_would_be_an_interval_late_is_never_read_and_counted() -> None:
    bench = Bench()
    bench.gpus.takes_s = 0.35
    await bench.until(lambda: len(bench.ticks) >= 2)

    assert bench.value(own.MISSED) >= 2
    assert [tick["seq"] for tick in bench.ticks][:2] == [1, 2]


async def test_ticks_that_kafka_has_not_acknowledged_at_the_stop_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.node.component.DRAIN_S", 0.1)
    bench = Bench(prompt=False)
    await bench.until(lambda: bench.gpus.reads >= 3)

    tick_count = bench.value(publisher.MADE)
    assert tick_count >= 2
    assert bench.value(publisher.DROPPED, reason="stopped") == tick_count
    assert bench.sender.stopped


async def test_an_error_that_only_a_new_process_can_mend_ends_it_after_the_drain() -> None:
    class Mismatch(Exception):
        exit_code = 70

    bench = Bench()

    def fails() -> bool:
        if len(bench.ticks) >= 2:
            bench.gpus.error = Mismatch("the library is older than the driver")
        return False

    with pytest.raises(Mismatch):
        await bench.until(fails)
    assert bench.value(publisher.SENT) == bench.value(publisher.MADE) >= 2


async def test_everything_that_is_missing_is_reported() -> None:
    bench = Bench()
    bench.gpus.reasons = ["no NVIDIA driver"]
    bench.kubelet.reasons = ["no kubelet at /run/kubelet.sock"]

    assert bench.component.not_ready() == [
        "no NVIDIA driver",
        "no kubelet at /run/kubelet.sock",
        "no Kafka broker has answered at 127.0.0.1:1 yet",
    ]
    bench.gpus.reasons = bench.kubelet.reasons = []
    await bench.until(lambda: len(bench.ticks) >= 1)
    assert bench.component.not_ready() == []


async def test_a_device_has_the_jobs_of_its_file_until_they_end(tmp_path: Path) -> None:
    bench = Bench(hpc_job_mapping_dir=tmp_path)
    bench.gpus.answer = [{**devices()[0], "index": index} for index in (0, 1)]
    (tmp_path / "1").write_text("7\n8\n")

    def ended() -> bool:
        if bench.ticks:
            (tmp_path / "1").unlink(missing_ok=True)
        return bool(bench.ticks) and "jobs" not in bench.ticks[-1]["devices"][1]

    await bench.until(ended)
    assert [device.get("jobs") for device in bench.ticks[0]["devices"]] == [None, [{"id": "7"}, {"id": "8"}]]
    assert "jobs" not in bench.ticks[-1]["devices"][1]


@pytest.mark.parametrize("spoiled", ["1", "GPU-1"])
async def test_a_gpu_whose_job_file_can_not_be_used_is_not_said_to_have_no_job(tmp_path: Path, spoiled: str) -> None:
    bench = Bench(hpc_job_mapping_dir=tmp_path, pod_resources_socket=None)
    bench.gpus.answer = [{**devices()[0], "uuid": f"GPU-{index}", "index": index} for index in (0, 1)]
    (tmp_path / spoiled).mkdir()
    await bench.until(lambda: len(bench.ticks) > 0)
    assert [device.get("jobs") for device in bench.ticks[0]["devices"]] == [[], None]


async def test_a_lost_gpu_without_an_index_is_not_said_to_have_no_job(tmp_path: Path) -> None:
    bench = Bench(hpc_job_mapping_dir=tmp_path, pod_resources_socket=None)
    bench.gpus.answer = [{**devices()[0], "index": 0}, {"uuid": "GPU-1", "state": "lost", "metrics": {}}]
    await bench.until(lambda: len(bench.ticks) > 0)
    assert [device.get("jobs") for device in bench.ticks[0]["devices"]] == [[], None]


async def test_without_files_a_gpu_whose_processes_are_not_known_is_not_said_to_have_no_job() -> None:
    bench = Bench(pod_resources_socket=None)
    bench.component._process_owners.jobs.learn("7", Evidence(from_cgroup=True))
    silent = {"uuid": "GPU-1", "index": 1, "state": "timeout", "metrics": {}}
    bench.gpus.answer = [{**devices()[0], "index": 0, "processes": []}, silent]
    await bench.until(lambda: len(bench.ticks) > 0)
    assert [device.get("jobs") for device in bench.ticks[0]["devices"]] == [[], None]


async def test_before_the_job_files_were_read_no_gpu_is_said_to_have_no_job(tmp_path: Path) -> None:
    bench = Bench(hpc_job_mapping_dir=tmp_path, pod_resources_socket=None)
    bench.component._process_owners.jobs.learn("7", Evidence(from_cgroup=True))
    bench.gpus.answer = [{**devices()[0], "index": 0, "processes": []}]
    ticked = threading.Event()

    def read_slowly() -> JobMapping:
        ticked.wait(LIMIT_S)
        return JobMapping({}, [])

    bench.component._job_files = JobFiles(tmp_path, bench.component._instruments, read_directory=read_slowly)

    def both() -> bool:
        if bench.ticks:
            ticked.set()
        return bool(bench.ticks) and jobs_in(bench.ticks[-1]) == [[]]

    await bench.until(both)
    assert jobs_in(bench.ticks[0]) == [None]


async def test_a_process_of_a_job_gives_its_gpu_the_job_its_user_and_its_partition(
    tmp_path: Path, nvml: ScriptedNvml
) -> None:
    procfs, files = Procfs(tmp_path / "proc"), tmp_path / "jobs"
    batch = b"SLURM_JOB_ID=7\0SLURM_JOB_USER=carol\0SLURM_JOB_PARTITION=gpu\0"
    procfs.begin(42, 1000, "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", environ=batch)
    procfs.begin(43, 1000, "0::/user.slice\n", environ=batch.replace(b"=7", b"=8"))
    files.mkdir()
    (files / "1").write_text("7\n9\n")
    nvml.load()
    nvml.gpus = 3
    nvml.processes(0, [Process(42, 1 << 30)])
    nvml.processes(1, [Process(43, 1 << 30)])
    settings = NodeSettings(kafka="127.0.0.1:1", node="gpu-1", procfs=procfs.root, hpc_job_mapping_dir=files)
    sender, stop = FakeSender(prompt=True), asyncio.Event()
    kubelet: Any = FakeKubelet(None)
    running = asyncio.create_task(NodeProducer(settings, sender=sender, kubelet=kubelet).run(stop))
    carols = [{"id": job_id, "user": "carol", "partition": "gpu"} for job_id in "78"]
    expected = [carols[:1], [carols[0], {"id": "9"}, carols[1]], None]
    async with asyncio.timeout(60):
        while expected not in (jobs_in(tick) for tick in sender.records("gpu.samples")):
            assert not running.done()
            await asyncio.sleep(0.01)
        stop.set()
        await running


def jobs_in(tick: dict[str, Any]) -> list[Any]:
    return [device.get("jobs") for device in tick["devices"]]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"interval_s": 0.05}, "--interval"),
        ({"interval_s": float("nan")}, "--interval"),
        ({"buffer_s": 0.0}, "--buffer"),
        ({"buffer_size": 0}, "--buffer-size"),
        ({"resource_prefixes": ("",)}, "--resource-prefixes"),
    ],
)
def test_impossible_settings_are_errors(changed: dict[str, Any], word: str) -> None:
    (error,) = NodeSettings(kafka="127.0.0.1:1", node="gpu-1", **changed).errors()

    assert word in error


@pytest.mark.slow
def test_it_is_registered_and_loads_nothing_heavy() -> None:
    assert PRODUCERS["node"].component == f"{NodeProducer.__module__}:{NodeProducer.__qualname__}"
    code = (
        "import sys, gpustream.cli, gpustream.serve, gpustream.logs, producers.node.component\n"
        "print({name.partition('.')[0] for name in sys.modules})"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"faust", "mode", "kubernetes_asyncio", "confluent_kafka", "aiohttp", "rich", "uvloop"}

    assert {name for name in heavy if f"'{name}'" in process.stdout} == set()
