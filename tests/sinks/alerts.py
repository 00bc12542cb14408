"""Ready-made alerts of the sinks' tests."""

from typing import Any

import msgspec
from cloudevents.core.base import BaseCloudEvent

from tests.sinks.records import ConsumedRecord
from topics.alerts import TOPIC, Alert, fingerprint, time, transition_id
from topics.reference import json_schema

START_MS = 1_795_219_152_500


def alert(
    pod: str = "a", starts_ms: int = START_MS, ends_ms: int | None = None, *, name: str = "GPUHeldIdle", **fields: Any
) -> Alert:
    """An alert about a pod; one with an end is resolved."""
    end_fields = {} if ends_ms is None else {"ends_at": time(ends_ms), "resolved_because": "condition"}
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
        **end_fields,
        **fields,
    }
    return Alert(**content)


def alert_record(
    alert_or_bytes: Alert | bytes, offset: int = 0, *, at_ms: int | None = None, key: bytes | None = None
) -> ConsumedRecord:
    """A record of an alert, or of some bytes, logged when the state of the alert began."""
    if isinstance(alert_or_bytes, bytes):
        return ConsumedRecord(offset, alert_or_bytes, at_ms or START_MS, key, "gpu.alerts")
    began_ms = round((alert_or_bytes.ends_at or alert_or_bytes.starts_at).timestamp() * 1000)
    own_key = alert_or_bytes.fingerprint.encode() if key is None else key
    return ConsumedRecord(
        offset, msgspec.json.encode(alert_or_bytes), began_ms if at_ms is None else at_ms, own_key, "gpu.alerts"
    )


def deleted(of_alert: Alert, offset: int = 0, *, at_ms: int) -> ConsumedRecord:
    """The record that deletes an alert."""
    return ConsumedRecord(offset, None, at_ms, of_alert.fingerprint.encode(), "gpu.alerts")


def assert_says(event: BaseCloudEvent, of_alert: Alert) -> None:
    """Asserts that a CloudEvent, as the SDK reads it, is this alert's."""
    assert (event.get_specversion(), event.get_datacontenttype()) == ("1.0", "application/json")
    assert event.get_source() == f"urn:gpustream:{of_alert.cluster}/{of_alert.node}"
    assert event.get_id() == transition_id(of_alert)
    assert event.get_type() == f"gpustream.alert.{of_alert.state}"
    assert event.get_subject() == f"{of_alert.name}/{of_alert.fingerprint}"
    assert event.get_time() == (of_alert.ends_at or of_alert.starts_at)
    assert event.get_dataschema() == json_schema(TOPIC)["$id"]
    assert event.get_extension("partitionkey") == of_alert.fingerprint
    assert event.get_data() == msgspec.json.decode(msgspec.json.encode(of_alert))
