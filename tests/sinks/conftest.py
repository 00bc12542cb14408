"""Ready-made records of the sinks' tests."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from sinks.series.tick import SeriesTick, decode

KEYS = ("gpu_utilization_ratio", "memory_used_bytes", "temperature_celsius")
SERIES = (*KEYS, "gpu_holders")
"""What a device writes: a series for each of its keys, and how many pods hold it."""

MakeSample = Callable[..., SeriesTick]


def device(uuid: str = "GPU-a", pod: str | None = None, **fields: Any) -> dict[str, Any]:
    """A device as it is in a record, held by that pod."""
    holders = [{"namespace": "ml", "pod": pod, "container": "main"}] if pod else []
    metrics = {key: 1.0 + number for number, key in enumerate(KEYS)}
    return {"uuid": uuid, "index": 0, "metrics": metrics, "holders": holders, **fields}


def sample(seq: int, *devices: dict[str, Any], node: str = "n1", ts_ms: int | None = None, **fields: Any) -> SeriesTick:
    """A tick, decoded as a sink would; its time is second ``seq``, its offset ``seq``."""
    content = {
        "schema": 1,
        "cluster": "c1",
        "node": node,
        "run_id": 1,
        "seq": seq,
        "ts_ms": 1_795_219_152_000 + seq * 1000 if ts_ms is None else ts_ms,
        "offset": seq,
        "attribution": "exact",
        "devices": list(devices or (device(),)),
        **fields,
    }
    return decode(json.dumps(content).encode())


@pytest.fixture
def make_sample() -> MakeSample:
    """Makes ticks."""
    return sample
