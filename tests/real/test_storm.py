"""Everything that a cluster does to a pipeline, at once, and not one tick lost, doubled or given to the wrong pod."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from delivery import topic_admin
from delivery.connection import Connection
from delivery.sender import Sender
from tests.real.pipeline import Gpustream, Truth, differences, lag, read_all, stored
from tests.real.proxy import KillingProxy
from tests.real.servers import KafkaServer, PrometheusServer

STORM_S = float(os.environ.get("GPUSTREAM_STORM_SECONDS", "90"))
DRAIN_S = 120.0
CLUSTER = "storm"
NODES = 30
SINK_KILLS = 6
STOPPED_S = 16.0

Place = tuple[str, int, int]
"""A record's topic, partition and offset."""


@dataclass
class Storm:
    """The pipeline, and what is done to it."""

    kafka: KafkaServer
    prometheus: PrometheusServer
    gpustream: Callable[..., Gpustream]
    truth_file: Path
    proxy: KillingProxy = field(init=False)
    poisoned: set[Place] = field(default_factory=set)
    rebalances: int = 0

    def __post_init__(self) -> None:
        self.proxy = KillingProxy(self.prometheus.write_url)
        address = self.kafka.address
        self.fleet = self._process(
            "fleet", "produce", "simulated", "--cluster", CLUSTER, "--fleet", f"{NODES}x8", "--seed", "11",
            "--truth", str(self.truth_file),
        )  # fmt: skip
        self.first, self.second = (
            self._process(name, "stream", "attribution", "--instance-id", name) for name in ("worker-a", "worker-b")
        )
        self.third = self._process("worker-c", "stream", "attribution")
        self.sink = self._process("sink", "sink", "remote-write", "--url", self.proxy.url, "--instance-id", "sink-0")
        self.sender = Sender(Connection(address), client_id="poison")

    def _process(self, name: str, *arguments: str) -> Gpustream:
        return self.gpustream(name, *arguments, "--kafka", self.kafka.address)

    def processes(self) -> list[Gpustream]:
        return [self.fleet, self.first, self.second, self.third, self.sink]

    # -- what is done to it

    async def kill_the_sink_between_write_and_commit(self) -> None:
        killed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def kill() -> None:
            self.sink.kill9()
            loop.call_soon_threadsafe(killed.set)

        self.proxy.arm(kill)
        await asyncio.wait_for(killed.wait(), 60)
        await asyncio.to_thread(self.sink.start)

    async def kill_sinks(self) -> None:
        for _ in range(SINK_KILLS):
            await asyncio.sleep(STORM_S / (SINK_KILLS + 2))
            await self.kill_the_sink_between_write_and_commit()

    async def trouble_the_workers(self) -> None:
        await asyncio.sleep(0.12 * STORM_S)
        await asyncio.to_thread(self.first.kill9)
        await asyncio.to_thread(self.first.start)
        await asyncio.sleep(0.08 * STORM_S)
        self.second.sigstop()
        await asyncio.sleep(STOPPED_S)
        self.second.sigcont()
        await asyncio.sleep(0.1 * STORM_S)
        await asyncio.to_thread(self.third.start)
        await asyncio.sleep(0.05 * STORM_S)
        await asyncio.to_thread(self.third.stop)

    async def trouble_the_broker(self) -> None:
        await asyncio.sleep(0.72 * STORM_S)
        await asyncio.to_thread(self.kafka.kill9)
        await asyncio.sleep(2)
        await asyncio.to_thread(self.kafka.start)

    async def poison(self) -> None:
        """One record in a thousand of both inputs is none."""
        chance = random.Random(5)
        bodies = [
            b"",
            b"{",
            b'{"schema":1}',
            b"\xff\xfe",
            b"null",
            b'{"schema":1,"cluster":"storm","node":"","run_id":1}',
        ]
        while True:
            await asyncio.sleep(1000 / NODES / 2 / 4)
            topic, partition = chance.choice(["gpu.samples", "gpu.allocations"]), chance.randrange(4)
            sent = await self.sender.send(topic, chance.choice(bodies), key=b"storm/poison", partition=partition)
            self.poisoned.add((topic, partition, await sent))

    async def rage(self) -> None:
        """All of it, for the time of the storm at least."""
        poison = asyncio.create_task(self.poison())
        await asyncio.gather(
            asyncio.sleep(STORM_S), self.kill_sinks(), self.trouble_the_workers(), self.trouble_the_broker()
        )
        poison.cancel()

    def rebalances_of(self, worker: Gpustream) -> int:
        """How often partitions were taken from a worker since it started, by its own metric."""
        lines = (worker.get("/metrics") or "").splitlines()
        values = [line.split()[1] for line in lines if line.startswith("gpustream_attribution_rebalances_total ")]
        return int(float(values[0])) if values else 0

    async def drain(self) -> None:
        """Stop sampling, and wait until both groups have committed all there is."""
        await asyncio.to_thread(self.fleet.stop)
        address = self.kafka.address
        for _ in range(int(DRAIN_S)):
            attribution = await lag(address, "gpustream-attribution", ["gpu.samples"])
            if attribution + await lag(address, "gpustream-sink-remote-write", ["gpu.attributed"]) == 0:
                return
            await asyncio.sleep(1)
        pytest.fail(f"not drained in {DRAIN_S} s")


@asynccontextmanager
async def raging(storm: Storm) -> AsyncIterator[Storm]:
    """The storm has passed and all is drained; the processes are stopped in good order at the end."""
    await topic_admin.create(storm.kafka.connection, partitions=4, replication_factor=1)
    await storm.sender.start()
    try:
        for process in (storm.first, storm.second, storm.sink, storm.fleet):
            await asyncio.to_thread(process.start)
        await storm.rage()
        await storm.drain()
        storm.rebalances = await asyncio.to_thread(storm.rebalances_of, storm.first)
        yield storm
    finally:
        await storm.sender.stop()
        for process in storm.processes():
            await asyncio.to_thread(process.stop)
        storm.proxy.close()


@pytest.mark.timeout(STORM_S * 2 + DRAIN_S * 2)
async def test_a_storm_loses_nothing_and_books_every_tick_to_its_pod(
    start_kafka: Callable[..., KafkaServer],
    start_prometheus: Callable[..., PrometheusServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    prometheus = start_prometheus()
    async with raging(Storm(start_kafka(), prometheus, gpustream, tmp_path / "truth.jsonl")) as storm:
        truth = Truth.read(storm.truth_file)
        attributed = await read_all(storm.kafka.address, "gpu.attributed")
        letters = await read_all(storm.kafka.address, "gpu.dead-letters")
    window = f"{int(STORM_S + 2 * DRAIN_S)}s"

    print(  # noqa: T201 - what was done, for whoever reads the run
        f"{len(truth.ticks)} ticks sampled, {len(attributed)} records attributed, {len(letters)} dead letters, "
        f"{storm.proxy.kills} kills between write and commit, {storm.rebalances} rebalances seen by worker-a"
    )
    assert storm.proxy.kills >= 5
    assert storm.rebalances >= 2
    assert len(truth.ticks) > NODES * STORM_S * 0.8
    assert {_place(record.headers) for record in letters} >= storm.poisoned
    assert _first_occurrences_out_of_order(attributed) == []
    for metric, value in (("gpu_memory_used", "memory_used_bytes"), ("gpu_utilization", "utilization_ratio")):
        found = await asyncio.to_thread(stored, prometheus, metric, CLUSTER, window)
        wrong = differences(truth.points(value), found, value)
        assert wrong == [], f"{metric}: {len(wrong)} of {len(found)}: {wrong[:10]}"


def _place(headers: list[tuple[str, bytes]]) -> Place:
    named = {name: value.decode() for name, value in headers}
    return named["topic"], int(named["partition"]), int(named["offset"])


def _first_occurrences_out_of_order(records: list[object]) -> list[tuple[str, int]]:
    """The ticks of a node that were first seen after a later one of the same run."""
    newest: dict[tuple[str, int], int] = {}
    seen: set[tuple[str, int, int]] = set()
    wrong = []
    for tick in (json.loads(record.value) for record in records):  # type: ignore[attr-defined]
        run, seq = (tick["node"], tick["run_id"]), tick["seq"]
        if (*run, seq) not in seen and seq < newest.get(run, 0):
            wrong.append((tick["node"], seq))
        seen.add((*run, seq))
        newest[run] = max(seq, newest.get(run, 0))
    return wrong
