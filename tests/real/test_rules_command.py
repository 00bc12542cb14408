"""``gpustream rules test`` on a real Kafka: what was logged since a time is judged, and nothing before."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from delivery import topic_admin
from delivery.connection import Connection
from gpustream.cli import main
from streams.alerts.tick import Tick
from tests.real.servers import KafkaServer
from tests.streams.alerts.ticks import device, holder, tick
from topics.attributed import Workload

pytestmark = pytest.mark.real

RULES = '[rules.GPUHeldIdle]\nfor = "60s"\ngrace = "10s"\n'
PARTITIONS = 4
GAP_S = 3.0


def idle(node: str) -> Iterable[Tick]:
    """A pod that does nothing for two minutes."""
    pod = holder(f"pod-{node}", workload=Workload("Job", node))
    return [tick(i, device(0, pod, busy=0.0), node=node) for i in range(120)]


async def write(kafka: str, node: str, partition: int) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for idle_tick in idle(node):
            await producer.send("gpu.attributed", msgspec.json.encode(idle_tick), partition=partition)


def test_what_was_logged_since_a_time_is_judged_and_nothing_before(empty_kafka: KafkaServer, tmp_path: Path) -> None:
    kafka, path = empty_kafka.address, tmp_path / "rules.toml"
    path.write_text(RULES)
    asyncio.run(topic_admin.create(Connection(kafka), PARTITIONS, 1))
    asyncio.run(write(kafka, "old", 0))
    time.sleep(GAP_S)
    between_s = time.time()
    time.sleep(GAP_S)
    for node, partition in (("new", 0), ("other", 2)):
        asyncio.run(write(kafka, node, partition))

    def fired(start: str) -> list[tuple[str, str]]:
        result = CliRunner().invoke(main, ["rules", "test", str(path), "--kafka", kafka, "--from", start])
        assert result.exit_code == 0, result.stderr
        rows = [line.split("\t") for line in result.stdout.splitlines()[1:]]
        return sorted((row[4], row[5]) for row in rows)

    assert fired("earliest") == fired("1h") == [("GPUHeldIdle", f"c/{node} GPU 0") for node in ("new", "old", "other")]
    since = f"{time.time() - between_s:.3f}"
    assert fired(since) == [("GPUHeldIdle", f"c/{node} GPU 0") for node in ("new", "other")]
