"""gpu.actions: the headers, and the ids of actions."""

import msgspec
import pytest
from cloudevents.core.bindings import kafka

from tests.sinks.alerts import START_MS, alert
from topics.actions import KINDS, TOPIC, Action, action_id, kafka_headers

ACTION = msgspec.convert(TOPIC.example, Action)


@pytest.mark.parametrize("state", ["planned", "done", "undone", "refused"])
def test_a_record_is_a_cloud_event_to_the_official_sdk(state: str) -> None:
    action = msgspec.structs.replace(ACTION, state=state)
    headers = dict(kafka_headers(action))

    event = kafka.from_kafka_event(kafka.KafkaMessage(headers, b"prod-us-east-1", msgspec.json.encode(action)))

    assert event.get_type() == f"gpustream.action.{state}"
    assert event.get_id() == "3f5a0c8e9b1d2c47/" + state + "/1795233552500"
    assert event.get_subject() == "ml-team/3f5a0c8e9b1d2c47"
    assert event.get_time() == action.at
    assert event.get_dataschema() == "urn:gpustream:gpu.actions:1"
    assert kafka.to_binary_event(event).headers == headers


def test_a_firing_has_one_action_of_each_kind_and_the_next_one_has_others() -> None:
    ids = {action_id(alert("a", starts_ms), kind) for starts_ms in (START_MS, START_MS + 1) for kind in (*KINDS, None)}
    assert len(ids) == 2 * (len(KINDS) + 1)
    assert action_id(alert("a"), "scale") == action_id(msgspec.structs.replace(alert("a"), revision=7), "scale")
