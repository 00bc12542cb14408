"""The records of an older version are read by the streams of this one, and this one's by the rules of that one.

``make upgrade`` does it with the older version's own processes. Its records and schemas are in ``upgrade_records``.
"""

import asyncio
import gzip
import json
import time
from collections import Counter
from typing import Any

from aiokafka import AIOKafkaProducer
from jsonschema import Draft202012Validator

from delivery import kafka_admin, topic_admin
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.pipeline import lag, read_all, running
from tests.real.servers import KafkaServer
from tests.real.upgrade import RECORDS
from topics.alerts import AlertState
from topics.topic import decoder

OLD: dict[str, list[dict[str, Any]]] = json.loads(gzip.decompress((RECORDS / "records.json.gz").read_bytes()))
NEW = "new"
OLD_SCHEMAS = {path.stem: json.loads(path.read_bytes()) for path in RECORDS.glob("gpu.*.json")}


async def write_old(kafka: KafkaServer, *topics: str) -> None:
    """Writes the older version's records of these topics as they were, logged as long one after the other."""
    later_ms = int(time.time() * 1000) - max(row["ts_ms"] for topic in topics for row in OLD[topic])
    async with kafka_admin.connect(kafka.connection) as admin:
        for topic in topics:
            await admin.alter(topic, {"message.timestamp.type": "CreateTime"})
        async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
            for topic in topics:
                for row in OLD[topic]:
                    value, key = row["value"] and row["value"].encode(), row["key"].encode()
                    await producer.send(topic, value, key, row["partition"], row["ts_ms"] + later_ms)
        for topic in topics:
            await admin.alter(topic, {"message.timestamp.type": "LogAppendTime"})


async def all_taken(kafka: KafkaServer) -> bool:
    return not await lag(kafka.address, "gpustream-attribution", ["gpu.samples"])


def holders_of(value: str | bytes) -> dict[tuple[str, int, str], list[tuple[str, str]]]:
    """Which pods hold each device of a tick."""
    tick = json.loads(value)
    return {
        (tick["node"], tick["seq"], device["uuid"]): [
            (holder["namespace"], holder["pod"]) for holder in device.get("holders") or []
        ]
        for device in tick["devices"]
    }


def tick_of(value: str | bytes) -> tuple[str, int]:
    """The node of a tick, and its number."""
    tick = json.loads(value)
    return tick["node"], tick["seq"]


async def test_each_version_reads_what_the_other_has_written(empty_kafka: KafkaServer) -> None:
    kafka = empty_kafka
    await topic_admin.create(kafka.connection, partitions=2, replication_factor=1)
    await write_old(kafka, "gpu.allocations", "gpu.workloads", "gpu.samples")
    fleet = SimulatedSettings(
        kafka=kafka.address, cluster=NEW, fleet="2x4", interval_s=0.1, pod_life_s=1.0, stop_after_ticks=10
    )
    async with running(Attribution(AttributionSettings(kafka=kafka.address))):
        await SimulatedFleet(fleet).run(asyncio.Event())
        await eventually(lambda: all_taken(kafka))
    live_values = [record.value for record in await read_all(kafka.address, "gpu.attributed")]
    of_old = [value for value in live_values if json.loads(value)["cluster"] != NEW]
    assert Counter(map(tick_of, of_old)) == Counter(tick_of(row["value"]) for row in OLD["gpu.samples"])
    assert {json.loads(value)["attribution"] for value in of_old} == {"exact"}
    assert await read_all(kafka.address, "gpu.dead-letters") == []
    now = [device_holders for value in of_old for device_holders in holders_of(value).items()]
    before = [device_holders for row in OLD["gpu.attributed"] for device_holders in holders_of(row["value"]).items()]
    assert sorted(now) == sorted(before)

    assert len(live_values) - len(of_old) == 20
    for topic, schema in OLD_SCHEMAS.items():
        validator = Draft202012Validator(_open(schema))
        for value in [record.value for record in await read_all(kafka.address, topic) if record.value is not None]:
            problems = list(validator.iter_errors(json.loads(value)))
            assert not problems, (topic, problems[0].message, list(problems[0].path))


def test_an_older_versions_state_of_the_alerts_can_be_read() -> None:
    values = [row["value"].encode() for row in OLD["gpu.alert-state"] if row["value"] is not None]
    assert [decoder(AlertState)(value) for value in values]


def _open(schema: Any) -> Any:
    """The schema as its reader takes it: fields that it does not know are ignored."""
    if isinstance(schema, dict):
        return {
            name: _open(part) for name, part in schema.items() if name != "additionalProperties" or part is not False
        }
    return [_open(part) for part in schema] if isinstance(schema, list) else schema
