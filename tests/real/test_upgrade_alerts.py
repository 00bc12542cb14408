"""Alerts that were open before there were alerts of workloads: the worker of this version goes on with them.

``alerts.json`` in ``upgrade_records`` has what the alert stream of 3a874de, the last commit without them, wrote to
gpu.alert-state and gpu.alerts when it was given the first part of :func:`story`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from streams.alerts.component import Alerts
from streams.settings import AlertSettings
from tests.eventually import eventually
from tests.real.pipeline import read_all, running
from tests.real.servers import KafkaServer
from topics.topic import node_key

RECORDS = Path(__file__).parent / "upgrade_records" / "alerts.json"
RULES = '[rules.GPUHeldIdle]\nfor = "1m"\ngrace = "10s"\n[rules.GPUThermalSlowdown]\nfor = "30s"\n'
START_MS = 1_795_300_000_000
STEP_MS = 10_000
BEFORE, OPEN = 40, 60  # the last tick that the older version read, and the last one before all is well


def story() -> list[dict[str, Any]]:
    """A job that holds two GPUs and does nothing with them, and a GPU that is hot; in the end both are resolved."""
    ticks = []
    for number in range(OPEN + 60):
        bad = number < OPEN
        pod: dict[str, Any] = {
            "namespace": "ml",
            "pod": "train-0",
            "pod_uid": "u-0",
            "container": "main",
            "resource": "nvidia.com/gpu",
        }
        pod |= {"workload": {"kind": "Job", "name": "train"}}
        metrics = {"gpu_utilization_ratio": 0.0 if bad else 0.9, "memory_used_bytes": 1 << 30}
        devices = [{"uuid": f"GPU-{n}", "index": n, "metrics": metrics, "holders": [pod]} for n in (0, 1)]
        hot = {"gpu_utilization_ratio": 0.9 if bad else 0.0, "clock_event_reasons": 0x40 if bad else 0}
        devices.append({"uuid": "GPU-2", "index": 2, "metrics": hot, "holders": []})
        tick = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": number + 1, "offset": number}
        tick |= {"ts_ms": START_MS + number * STEP_MS, "attribution": "exact", "node_labels": {}, "devices": devices}
        ticks.append(tick)
    return ticks


async def send(kafka: str, *ticks: dict[str, Any]) -> None:
    """Puts ticks onto gpu.attributed, in its only partition."""
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        for tick in ticks:
            await producer.send("gpu.attributed", json.dumps(tick).encode(), node_key("c", "n"), 0)


async def write_old(kafka: KafkaServer) -> list[dict[str, Any]]:
    """Writes the records of the older version; returns its alerts."""
    old = json.loads(RECORDS.read_text())
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for topic, rows in old.items():
            for row in rows:
                await producer.send(topic, row["value"].encode(), row["key"].encode(), 0)
    return [json.loads(row["value"]) for row in old["gpu.alerts"]]


async def test_open_alerts_of_the_previous_version_are_neither_lost_nor_doubled(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    kafka = empty_kafka
    (tmp_path / "rules.toml").write_text(RULES)
    await topic_admin.create(kafka.connection, partitions=1, replication_factor=1)
    old = await write_old(kafka)
    await send(kafka.address, *story()[:OPEN])

    async def alerts() -> list[dict[str, Any]]:
        records = await read_all(kafka.address, "gpu.alerts")
        decoded = [msgspec.json.decode(record.value) for record in records if record.value]  # what is over is deleted
        return decoded[len(old) :]

    def last_of(new_alerts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {alert["fingerprint"]: alert for alert in (*old, *new_alerts)}

    async with running(Alerts(AlertSettings(kafka=kafka.address, rules=tmp_path / "rules.toml"))):

        async def grouped() -> bool:
            all_alerts = await alerts()
            jobs = [alert for alert in all_alerts if len(alert.get("gpus", ())) == 2]
            return bool(jobs) and sum(alert["state"] == "resolved" for alert in all_alerts) == 2

        await eventually(grouped)
        new = await alerts()
        still = [alert for alert in last_of(new).values() if alert["state"] == "firing"]
        assert sorted((alert["name"], alert["starts_at"]) for alert in still) == sorted(
            {(alert["name"], alert["starts_at"]) for alert in old}
        )
        parts = [alert for alert in old if alert["name"] == "GPUHeldIdle"]
        (job,) = (alert for alert in still if alert["name"] == "GPUHeldIdle")
        assert len(parts) == len(job["gpus"]) == 2
        end_reasons = {alert["fingerprint"]: alert["resolved_because"] for alert in new if alert["state"] == "resolved"}
        assert end_reasons == {alert["fingerprint"]: "grouped" for alert in parts}

        await send(kafka.address, *story()[OPEN:])
        await eventually(lambda: _none_fires(alerts, last_of))
    all_alerts = [*old, *await alerts()]
    reported = [(alert["fingerprint"], alert["state"]) for alert in all_alerts if not alert.get("revision")]
    assert len(reported) == len(set(reported)) == 2 * len({alert["fingerprint"] for alert in all_alerts})
    assert await read_all(kafka.address, "gpu.dead-letters") == []


async def _none_fires(alerts: Any, last_of: Any) -> bool:
    return all(alert["state"] == "resolved" for alert in last_of(await alerts()).values())
