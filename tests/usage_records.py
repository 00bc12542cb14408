"""Records of gpu.usage and gpu.usage-minutes, for tests of their readers."""

from typing import Any, NamedTuple

import msgspec

from topics.usage import HOUR_MS, HOURS, Usage

START_MS = 1_795_132_800_000
"""2026-11-20 00:00 UTC."""

_ZEROS = ("used_us", "idle_ms", "tensor_us", "energy_mj", "memory_byte_ms", "exact_ms", "late_ms", "none_ms")


def usage(namespace: str | None = None, pod: str | None = None, **more: Any) -> Usage:
    """The usage of a whole GPU in an hour: held by a pod, or free without one."""
    is_held = namespace is not None
    fields: dict[str, Any] = {
        "schema": 1,
        "cluster": "c1",
        "node": "n1",
        "gpu_uuid": "GPU-1",
        "start_ms": START_MS,
        "end_ms": more.get("start_ms", START_MS) + HOUR_MS,
        "category": "held" if is_held else "free",
        "generation": 0,
        "revision": 1,
        "final": True,
        "policy": "used",
        "model": "NVIDIA H100 80GB HBM3",
        "device_ms": HOUR_MS,
        "of": 1,
        **dict.fromkeys(_ZEROS, 0),
        **(
            {"namespace": namespace, "pod": pod or f"{namespace}-0", "pod_uid": "u", "container": "main"}
            if is_held
            else {}
        ),
        **more,
    }
    fields = {"uuid": fields["gpu_uuid"], "slice_ms": fields["device_ms"] * fields["of"], **fields}
    return msgspec.convert(fields, Usage)


class Read(NamedTuple):
    """A record as the Kafka client returns it."""

    topic: str
    offset: int
    key: bytes | None
    value: bytes | None
    partition: int = 0
    timestamp: int = 0


def read(record: Usage | bytes, offset: int = 0, topic: str = HOURS.name) -> Read:
    """A record of a topic of usage; ``record`` may be malformed bytes."""
    if isinstance(record, bytes):
        return Read(topic, offset, b"c1/n1", record)
    return Read(topic, offset, record.key.encode(), msgspec.json.encode(record))
