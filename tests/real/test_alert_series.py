"""gpu_alert_firing, between a real Kafka and a real Prometheus in its default configuration."""

import asyncio
import time
import uuid
from collections.abc import Iterable

import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from sinks.remote_write import alerts as alert_series
from sinks.remote_write.sink import RemoteWriteSink
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.remote_write_fleet import count, ends, running, sink
from tests.real.servers import KafkaServer, PrometheusServer
from tests.sinks.alerts import alert
from topics.alerts import Alert
from topics.times import epoch_ms

PARTITIONS = 2
EVERY_MS = 2_000
"""How often a firing alert is written again here, so that the test need not take minutes."""


@pytest.fixture
def alerts(empty_kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> KafkaServer:
    """Kafka with the topics that the sink uses."""
    monkeypatch.setattr(alert_series, "EVERY_MS", EVERY_MS)
    topics = ("gpu.attributed", "gpu.alerts", "gpu.usage")
    empty_kafka.create_ours({"gpu.dead-letters": 1, **dict.fromkeys(topics, PARTITIONS)})
    return empty_kafka


class Fleet:
    """Alerts in a cluster of the test's own."""

    def __init__(self) -> None:
        self.cluster = f"c-{uuid.uuid4().hex[:12]}"

    def alert(self, pod: str, starts_ms: int, ends_ms: int | None = None) -> Alert:
        labels = {"k8s_cluster_name": self.cluster, "k8s_pod_name": pod}
        return alert(pod, starts_ms, ends_ms, labels=labels)

    async def stored(self, prometheus: PrometheusServer) -> dict[str, list[tuple[int, float]]]:
        """The stored points by pod, staleness markers left out."""
        query = f'gpu_alert_firing{{k8s_cluster_name="{self.cluster}"}}[2h]'
        return {
            series.labels["k8s_pod_name"]: list(series.points)
            for series in await asyncio.to_thread(prometheus.query, query)
        }

    async def firing(self, prometheus: PrometheusServer, at_ms: int | None = None) -> list[str]:
        """The pods of the alerts that fire, as an instant query answers."""
        query = f'gpu_alert_firing{{k8s_cluster_name="{self.cluster}", alertname="GPUHeldIdle"}} == 1'
        return sorted(
            series.labels["k8s_pod_name"] for series in await asyncio.to_thread(prometheus.query, query, at_ms)
        )


async def write(kafka: KafkaServer, records: Iterable[Alert]) -> None:
    """Puts alerts onto gpu.alerts, by their fingerprints."""
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for record in records:
            await producer.send_and_wait("gpu.alerts", msgspec.json.encode(record), key=record.fingerprint.encode())


def finished(sink_: RemoteWriteSink) -> int:
    return sum(ends(sink_).values())


@pytest.mark.parametrize("protocol", ["1.0", "auto"])
async def test_an_alert_is_1_until_it_ends_through_a_restart_of_the_sink(
    alerts: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    fleet, start_ms = Fleet(), int(time.time() * 1000) - 20_000
    open_, over = fleet.alert("open", start_ms + 500), fleet.alert("over", start_ms, start_ms + 5_000)
    ending = fleet.alert("ending", start_ms + 1_000)
    await write(alerts, [fleet.alert("over", start_ms), over, open_, ending])

    first = sink(alerts, prometheus.write_url, protocol=protocol)
    async with running(first):
        await eventually(lambda: finished(first) == 4, "the alerts written")
        await asyncio.sleep(2 * EVERY_MS / 1000)
    assert ends(first) == {"delivered": 4}
    assert await fleet.firing(prometheus) == ["ending", "open"]
    before = await fleet.stored(prometheus)
    assert before["over"] == [(start_ms + n * EVERY_MS, 1.0) for n in range(3)]

    end_ms = int(time.time() * 1000) - 3_000
    await write(alerts, [fleet.alert("ending", epoch_ms(ending.starts_at), end_ms)])
    second = sink(alerts, prometheus.write_url, protocol=protocol)
    async with running(second):
        await eventually(lambda: finished(second) == 1, "the end written")
        await asyncio.sleep(2 * EVERY_MS / 1000)
    assert ends(second) == {"delivered": 1}
    assert_accounted(second.registry)
    assert count(second, "alert_samples_refused_total") == 0
    assert await fleet.firing(prometheus) == ["open"]

    stored = await fleet.stored(prometheus)
    assert {pod: points[: len(before[pod])] for pod, points in stored.items()} == before
    assert len(stored["open"]) > len(before["open"])
    assert {(ts_ms - start_ms - 500) % EVERY_MS for ts_ms, _ in stored["open"]} == {0}
    assert {value for points in stored.values() for _, value in points} == {1.0}
