"""The truth about a simulated fleet: who held each device, whatever the kubelet said.

In: a reading, and the numbers that its sample went out with. Out: JSON lines, one per device.
"""

import orjson

from producers.simulated.node import JsonDict, Reading


def rows(reading: Reading, *, cluster: str, node: str, run_id: int, seq: int, ts_ms: int) -> list[JsonDict]:
    """One row per device: ``holders`` held it when it was read, ``reported`` is what the snapshot in force said, and
    the two metrics are as they were sent (None: NVML has none)."""
    tick = {"cluster": cluster, "node": node, "run_id": run_id, "seq": seq, "ts_ms": ts_ms}
    return [
        {
            **tick,
            "uuid": device["uuid"],
            "holders": holders,
            "reported": reported,
            "utilization_ratio": device["metrics"].get("gpu_utilization_ratio"),
            "memory_used_bytes": device["metrics"].get("memory_used_bytes"),
        }
        for device, holders, reported in zip(reading.devices, reading.holders, reading.reported, strict=True)
    ]


def lines(rows: list[JsonDict]) -> bytes:
    """The rows as JSON lines."""
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
