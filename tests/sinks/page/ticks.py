"""Ticks, alerts and hours of the page's tests."""

from typing import Any

import msgspec

from topics import alerts, usage
from topics.alerts import Alert
from topics.attributed import AttributedSample
from topics.topic import decoder
from topics.usage import Usage

START_MS = 1_795_219_200_000
decode = decoder(AttributedSample)


def holder(pod: str, team: str = "ml", **more: Any) -> dict[str, Any]:
    """A container that holds a device."""
    workload = {"kind": "Job", "name": pod.rpartition("-")[0] or pod}
    return {"namespace": "ml", "pod": pod, "pod_uid": pod, "workload": workload, "labels": {"team": team}} | more


def device(uuid: str, *holders: dict[str, Any], used: float | None = None, **more: Any) -> dict[str, Any]:
    """A device that is so much used, and who holds it."""
    metrics = {} if used is None else {"gpu_utilization_ratio": used, "memory_used_bytes": 2**30}
    return {"uuid": uuid, "index": 0, "model": "NVIDIA H100", "metrics": metrics, "holders": list(holders)} | more


def tick(seq: int, *devices: dict[str, Any], node: str = "n1", **more: Any) -> AttributedSample:
    """A tick of second ``seq``."""
    identity = {"cluster": "c1", "node": node, "run_id": 1, "seq": seq, "ts_ms": START_MS + seq * 1000, "offset": seq}
    content = {"schema": 1, **identity, "attribution": "exact", "devices": list(devices), **more}
    return decode(msgspec.json.encode(content))


def alert(**more: Any) -> Alert:
    """The example of gpu.alerts, a little different."""
    return msgspec.convert(msgspec.to_builtins(alerts.TOPIC.example) | more, Alert, strict=False)


def hour(**more: Any) -> Usage:
    """The example of gpu.usage, a little different."""
    return msgspec.convert(usage.HOURS.example | more, Usage)
