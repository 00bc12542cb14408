"""Ready-made alerts of the sinks' tests."""

import asyncio
from collections.abc import Sequence, Sized
from typing import Any

import msgspec
from cloudevents.core.base import BaseCloudEvent
from hypothesis import strategies as st
from msgspec.structs import replace

from sinks.consumer import Handler
from sinks.outcomes import Outcomes
from tests.sinks.records import ConsumedRecord
from topics.alerts import TOPIC, Alert, fingerprint, transition_id
from topics.reference import json_schema
from topics.times import epoch_ms, time_of

START_MS = 1_795_219_152_500


def alert(
    pod: str = "a", starts_ms: int = START_MS, ends_ms: int | None = None, *, name: str = "GPUHeldIdle", **fields: Any
) -> Alert:
    """An alert about a pod; one with an end is resolved."""
    end_fields = {} if ends_ms is None else {"ends_at": time_of(ends_ms), "resolved_because": "condition"}
    content: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "state": "firing" if ends_ms is None else "resolved",
        "fingerprint": fingerprint(name, "c1", "n1", "GPU-a", pod),
        "cluster": "c1",
        "node": "n1",
        "starts_at": time_of(starts_ms),
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


Writing = tuple[str, str]
"""An alert, by its pod, and what is written of it; ``again`` is the last record once more, as after a crash."""

writings = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["begins or ends", "severity", "figures", "again"])),
    min_size=1,
    max_size=30,
)


def written(writings: Sequence[Writing], start_ms: int) -> tuple[list[Alert], dict[str, list[Alert]]]:
    """Alerts as they are written, and those of each pod in order. What has ended does not change any more."""
    written_alerts, by_pod = list[Alert](), dict[str, list[Alert]]()
    for pod, what in writings:
        of_pod = by_pod.setdefault(pod, [])
        last = of_pod[-1] if of_pod else None
        if last is None or (not last.is_open and what == "begins or ends"):
            of_pod.append(alert(pod, start_ms if last is None else epoch_ms(last.starts_at) + 1000))
        elif last.is_open and what == "begins or ends":
            of_pod.append(replace(last, state="resolved", ends_at=time_of(epoch_ms(last.starts_at) + 500)))
        elif last.is_open and what == "severity":
            severity = "critical" if last.severity == "warning" else "warning"
            labels = {**last.labels, "severity": severity}
            of_pod.append(replace(last, severity=severity, labels=labels, revision=last.revision + 1))
        elif last.is_open and what == "figures":
            of_pod.append(replace(last, annotations={**last.annotations, "figure": str(len(of_pod))}))
        written_alerts.append(of_pod[-1])
    return written_alerts, by_pod


async def deliver_until(
    killed_at: float, requests: Sized, handler: Handler, outcomes: Outcomes, batch: Sequence[ConsumedRecord]
) -> int:
    """Deliver a batch step by step. With so many ``requests`` the sink is killed before the next commit.
    Returns the committed offset."""
    committed = batch[0].offset
    outcomes.read(len(batch))
    steps = handler.deliver(batch, asyncio.Event())
    try:
        async for offset in steps:
            if len(requests) >= killed_at:
                break
            committed = offset
    finally:
        await steps.aclose()
    return committed


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
