"""Ticks of the metrics API's tests."""

from typing import Any

from sinks.metrics_api.holdings import HoldingsTick, decode
from tests.sinks.conftest import sample
from tests.sinks.records import encoded


def holder(pod: str, namespace: str = "ml", **more: Any) -> dict[str, Any]:
    """A container that holds a device."""
    return {"namespace": namespace, "pod": pod, "container": "main", **more}


def of_deployment(pod: str, name: str = "infer", **more: Any) -> dict[str, Any]:
    """A container of a Deployment's pod."""
    return holder(pod, workload={"kind": "Deployment", "name": name}, deployment=name, **more)


def device(uuid: str, *holders: dict[str, Any], used: float | None = None, **more: Any) -> dict[str, Any]:
    """A device that is so much used, and who holds it."""
    metrics = {} if used is None else {"gpu_utilization_ratio": used}
    return {
        "uuid": uuid,
        "index": 0,
        "model": "NVIDIA H100 80GB HBM3",
        "metrics": metrics,
        "holders": list(holders),
    } | more


def tick(seq: int, *devices: dict[str, Any], node: str = "n1", **more: Any) -> HoldingsTick:
    """A tick as the sink decodes it."""
    return decode(encoded(sample(seq, *(devices or (device("GPU-none"),)), node=node, **more)))
