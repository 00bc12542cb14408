"""Ready-made alerts of the sinks' tests."""

from typing import Any

import msgspec
from cloudevents.core.base import BaseCloudEvent

from tests.sinks.records import Read
from topics.alerts import TOPIC, Alert, fingerprint, time, transition_id
from topics.reference import json_schema

START_MS = 1_795_219_152_500


def alert(
    pod: str = "a", starts_ms: int = START_MS, ends_ms: int | None = None, *, name: str = "GPUHeldIdle", **more: Any
) -> Alert:
    """An alert about a pod; one with an end is resolved."""
    ended = {} if ends_ms is None else {"ends_at": time(ends_ms), "resolved_because": "condition"}
    content: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "state": "firing" if ends_ms is None else "resolved",
        "fingerprint": fingerprint(name, "c1", "n1", "GPU-a", pod),
        "cluster": "c1",
        "node": "n1",
        "starts_at": time(starts_ms),
        "severity": "warning",
        "value": 900.0,
        "labels": {"alertname": name, "severity": "warning", "k8s_node_name": "n1", "k8s_pod_name": pod},
        "annotations": {"summary": f"ml/{pod} holds GPU 0 of n1 and has not used it for 15m"},
        **ended,
        **more,
    }
    return Alert(**content)


def alert_record(of: Alert | bytes, offset: int = 0, *, at_ms: int | None = None, key: bytes | None = None) -> Read:
    """A record of an alert, appended when its state began, or of some bytes."""
    if isinstance(of, bytes):
        return Read(offset, of, at_ms or START_MS, key, "gpu.alerts")
    began_ms = round((of.ends_at or of.starts_at).timestamp() * 1000)
    own = of.fingerprint.encode() if key is None else key
    return Read(offset, msgspec.json.encode(of), began_ms if at_ms is None else at_ms, own, "gpu.alerts")


def deleted(of: Alert, offset: int = 0, *, at_ms: int) -> Read:
    """The record that deletes an alert."""
    return Read(offset, None, at_ms, of.fingerprint.encode(), "gpu.alerts")


def assert_says(event: BaseCloudEvent, of: Alert) -> None:
    """A CloudEvent, as their SDK has read it, is this alert's."""
    assert (event.get_specversion(), event.get_datacontenttype()) == ("1.0", "application/json")
    assert event.get_source() == f"urn:gpustream:{of.cluster}/{of.node}"
    assert event.get_id() == transition_id(of)
    assert event.get_type() == f"gpustream.alert.{of.state}"
    assert event.get_subject() == f"{of.name}/{of.fingerprint}"
    assert event.get_time() == (of.ends_at or of.starts_at)
    assert event.get_dataschema() == json_schema(TOPIC)["$id"]
    assert event.get_extension("partitionkey") == of.fingerprint
    assert event.get_data() == msgspec.json.decode(msgspec.json.encode(of))
