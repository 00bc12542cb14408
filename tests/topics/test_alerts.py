"""The fingerprints of alerts, the ids of their transitions, and their times."""

import msgspec
from cloudevents.core.bindings import kafka
from hypothesis import given
from hypothesis import strategies as st

from tests.sinks.alerts import assert_says
from topics.alerts import TOPIC, Alert, fingerprint, kafka_headers, transition_id
from topics.times import MAX_TIME_MS, epoch_ms, time_of

ALERT = msgspec.convert(TOPIC.example, Alert)


@given(st.integers(0, MAX_TIME_MS))
def test_a_time_is_read_back_to_the_millisecond_that_was_written(ms: int) -> None:
    alert = msgspec.structs.replace(ALERT, starts_at=time_of(ms))

    assert epoch_ms(msgspec.json.decode(msgspec.json.encode(alert), type=Alert).starts_at) == ms


def test_a_transition_is_distinguished_by_fingerprint_start_and_state() -> None:
    assert transition_id(ALERT) == "6da51de3be07d817/1795219152500/firing"


def test_the_example_has_its_own_fingerprint() -> None:
    about = (ALERT.labels["gpu_uuid"], "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10")

    assert ALERT.fingerprint == fingerprint(ALERT.name, ALERT.cluster, ALERT.node, *about)


def test_a_fingerprint_distinguishes_which_field_a_value_stands_in() -> None:
    fields = ("GPUXid", "c", "n")
    prints = {fingerprint(*fields, *more) for more in ((), ("x",), ("", "x"), ("", "", "x"), ("x", "x"))}

    assert len(prints) == 5
    assert all(len(digest) == 16 for digest in prints)


def test_the_example_has_the_fingerprint_of_its_subject() -> None:
    uuid, pod_uid = "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b", "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10"

    assert ALERT.fingerprint == fingerprint(ALERT.name, ALERT.cluster, ALERT.node, uuid, pod_uid)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["firing", "resolved", "acknowledged"]))
def test_a_record_is_a_cloud_event_to_the_official_sdk(name: str, state: str) -> None:
    ends_at = time_of(1_795_219_999_001) if state == "resolved" else None
    alert = msgspec.structs.replace(ALERT, name=name, state=state, ends_at=ends_at)
    headers, key = dict(kafka_headers(alert)), alert.fingerprint.encode()

    event = kafka.from_kafka_event(kafka.KafkaMessage(headers, key, msgspec.json.encode(alert)))

    assert_says(event, alert)
    assert kafka.to_binary_event(event).headers == headers
