"""A Kubernetes Event about an object, as the API server accepts it. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from topics.times import rfc3339

_LONGEST_MESSAGE = 1024  # the API server refuses a longer one


def warning(
    name: str, about: Mapping[str, str], now: datetime, *, reason: str, text: str, controller: str
) -> dict[str, Any]:
    """An Event. ``about`` is the object: its apiVersion, kind, name, namespace and uid. ``now`` is in UTC."""
    timestamp = rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about["namespace"]},
        "involvedObject": about,
        "type": "Warning",
        "reason": reason,
        "message": text[:_LONGEST_MESSAGE],
        "source": {"component": "gpustream"},
        "reportingComponent": f"gpustream.dev/{controller}",
        "reportingInstance": "gpustream",
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }
