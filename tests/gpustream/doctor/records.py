"""Records of the topics, as the doctor reads them."""

from typing import Any, NamedTuple

import msgspec

from topics import dead_letters, samples
from topics.dead_letters import Origin
from topics.topic import SCHEMA

NOW_MS = 1_795_219_752_000
SINCE_MS = NOW_MS - 600_000
RUN = SINCE_MS - 1000


class Record(NamedTuple):
    """A record as a Kafka client gives it."""

    topic: str
    value: bytes | None
    partition: int = 0
    offset: int = 0
    timestamp: int = NOW_MS
    key: bytes | None = b"c/n"
    headers: Any = ()


def sample(
    seq: int, *, at_ms: int | None = None, delay_ms: int = 0, offset: int | None = None, **fields: Any
) -> Record:
    """A tick of a second of the last ten minutes, or of any time; by default its offset is its seq."""
    ts_ms = SINCE_MS + seq * 1000 if at_ms is None else at_ms
    value = _of_node(fields) | {"seq": seq, "ts_ms": ts_ms, "allocations_seq": fields.get("named", 1)}
    value["interval_ms"] = fields.get("interval_ms")
    value["devices"] = fields.get("devices", [])
    record_offset = seq if offset is None else offset
    return Record(samples.TOPIC.name, msgspec.json.encode(value), offset=record_offset, timestamp=ts_ms + delay_ms)


def attributed(seq: int, attribution: str = "exact", **fields: Any) -> Record:
    """The same tick, attributed."""
    value = _of_node(fields) | {"seq": seq, "ts_ms": SINCE_MS + seq * 1000, "offset": seq, "attribution": attribution}
    return Record("gpu.attributed", msgspec.json.encode(value))


def snapshot(seq: int = 1, **fields: Any) -> Record:
    """A snapshot of the node."""
    value = _of_node(fields) | {"seq": seq, "ts_ms": SINCE_MS, "containers": fields.get("containers", [])}
    return Record("gpu.allocations", msgspec.json.encode(value))


def workloads(cluster: str = "c", *, removed: bool = False, epoch: int = 0, dra_devices: Any = ()) -> Record:
    """What the API server knows of the node."""
    value = {"schema": SCHEMA, "cluster": cluster, "node": "n", "removed": removed, "epoch": epoch}
    value["dra_devices"] = dra_devices
    return Record("gpu.workloads", msgspec.json.encode(value))


def letter(record: Record, offset: int = 0, error: str = "undecodable: no seq") -> Record:
    """The dead letter of a record."""
    origin = Origin(record.topic, record.partition, record.offset)
    dead_letter = dead_letters.letter(record.key, record.value, origin, stage="attribution", error=error, at_ms=1)
    return Record(
        dead_letters.TOPIC.name, dead_letter.value, offset=offset, key=dead_letter.key, headers=dead_letter.headers
    )


def receipt(record: Record) -> Record:
    """The receipt of a dead letter that was sent again."""
    return record._replace(value=None, offset=record.offset + 1, headers=dead_letters.receipt(record.offset))


def _of_node(fields: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "cluster": "c", "node": fields.get("node", "n"), "run_id": fields.get("run_id", RUN)}
