"""Records of the log: what can be used is used unharmed, and what can't is refused with its class of reason."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.attribution.component import decode
from streams.stage import Malformed
from tests.topics import records
from topics import allocations, samples, workloads
from topics.allocations import Allocations
from topics.samples import Sample
from topics.topic import MAX_MESSAGE_BYTES
from topics.workloads import NodeWorkloads

EXAMPLES: dict[str, dict[str, Any]] = {
    topic.name: topic.example for topic in (samples.TOPIC, allocations.TOPIC, workloads.TOPIC)
}
KEY = b"prod-us-east-1/gpu-node-1"


def encoded(topic: str, **changes: Any) -> bytes:
    """A topic's example with other fields; None leaves one out."""
    fields = {**EXAMPLES[topic], **changes}
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def reason(topic: str, value: bytes | None, key: bytes | None = KEY) -> str:
    """Why a record is refused."""
    with pytest.raises(Malformed) as refused:
        decode(topic, key, value)
    assert str(refused.value)
    assert len(str(refused.value)) < 1_000
    return refused.value.reason


every_topic = pytest.mark.parametrize("topic", EXAMPLES)


@every_topic
def test_the_example_of_the_topic_is_read(topic: str) -> None:
    record = decode(topic, KEY, encoded(topic))

    assert (record.cluster, record.node) == ("prod-us-east-1", "gpu-node-1")


@every_topic
def test_a_record_cut_short_anywhere_is_refused(topic: str) -> None:
    value = encoded(topic)

    for length in range(len(value)):
        assert reason(topic, value[:length]) == "undecodable"


@every_topic
@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"null",
        b"[]",
        b"1",
        b'""',
        b"{}",
        b"\x00\x01\x02",
        b"\xff\xfe{}",
        b'{"schema": 1, "cluster": "\xc3\x28"}',
        b"{" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"x": ' * 100_000 + b"1" + b"}" * 100_000,
        b'{"schema": 1} {"schema": 1}',
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_that_is_no_such_object_is_refused(topic: str, value: bytes | None) -> None:
    assert reason(topic, value) == "undecodable"


@every_topic
@pytest.mark.parametrize("field", ["schema", "cluster", "node", "ts_ms", "seq"])
def test_a_required_field_that_is_missing_or_null_is_refused(topic: str, field: str) -> None:
    assert reason(topic, encoded(topic, **{field: None})) == "undecodable"
    assert reason(topic, msgspec.json.encode({**EXAMPLES[topic], field: None})) == "undecodable"


@every_topic
@pytest.mark.parametrize("schema", [0, 2, "1", 1.5, True])
def test_another_schema_is_refused(topic: str, schema: object) -> None:
    assert reason(topic, encoded(topic, schema=schema)) == "undecodable"


@every_topic
@pytest.mark.parametrize("name", ["", "a/b", "/", "a\n", "\n", "a b", "é", "a\x00", "x" * 254, 7])
def test_a_name_outside_the_alphabet_is_refused_even_under_its_own_key(topic: str, name: object) -> None:
    assert reason(topic, encoded(topic, node=name), f"prod-us-east-1/{name}".encode()) == "undecodable"
    assert reason(topic, encoded(topic, cluster=name), f"{name}/gpu-node-1".encode()) == "undecodable"


@every_topic
@pytest.mark.parametrize(
    "number", [b"NaN", b"Infinity", b"-1", b"1.5", b'"1"', b"1e999", b"9" * 400, str(2**63).encode()]
)
def test_a_time_or_number_that_is_no_count_is_refused(topic: str, number: bytes) -> None:
    for field in ("ts_ms", "seq"):
        value = encoded(topic, **{field: 77_777}).replace(b"77777", number)
        assert number in value
        assert reason(topic, value) == "undecodable"


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b'"1"', b"true", b"9" * 400, b"[1]"])
def test_a_metric_that_is_no_finite_number_is_refused(number: bytes) -> None:
    devices = [{"uuid": "GPU-1", "metrics": {"power_watts": 77_777}}]
    value = encoded("gpu.samples", devices=devices).replace(b"77777", number)

    assert reason("gpu.samples", value) == "undecodable"


def test_the_code_of_an_event_that_no_float_can_hold_is_refused() -> None:
    events = [{"kind": "xid", "code": 77_777}]
    value = encoded("gpu.samples", devices=[{"uuid": "GPU-1", "events": events}]).replace(b"77777", b"9" * 400)

    assert reason("gpu.samples", value) == "undecodable"


def test_a_state_that_is_no_word_is_refused() -> None:
    assert reason("gpu.samples", encoded("gpu.samples", devices=[{"uuid": "GPU-1", "state": 1}])) == "undecodable"


@every_topic
def test_a_record_of_ten_megabytes_is_refused_by_its_size(topic: str) -> None:
    padding = "x" * 10 * 1024 * 1024

    assert reason(topic, encoded(topic, padding=padding)) == "oversized"


@every_topic
def test_a_record_of_the_largest_size_is_read(topic: str) -> None:
    padding = "x" * (MAX_MESSAGE_BYTES - len(encoded(topic, padding="")))

    assert len(encoded(topic, padding=padding)) == MAX_MESSAGE_BYTES
    assert decode(topic, KEY, encoded(topic, padding=padding)).node == "gpu-node-1"
    assert reason(topic, encoded(topic, padding=padding + "x")) == "oversized"


@every_topic
@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"gpu-node-1",
        b"prod-us-east-1/gpu-node-2",
        b"prod-us-east-1/gpu-node-1\n",
        b"Prod-us-east-1/gpu-node-1",
        b"\xff\xfe",
        b"k" * 1_000_000,
    ],
    ids=lambda key: repr(key)[:20],
)
def test_a_key_that_is_not_the_cluster_and_node_is_refused(topic: str, key: bytes | None) -> None:
    assert reason(topic, encoded(topic), key) == "key"


@every_topic
def test_a_deep_field_that_is_not_known_is_passed_over(topic: str) -> None:
    deep: Any = {"a": 1}
    for _ in range(50):
        deep = {"a": [deep]}

    assert decode(topic, KEY, encoded(topic, later=deep)) == decode(topic, KEY, encoded(topic))


def test_names_that_kubernetes_would_not_take_pass_through_unharmed() -> None:
    strange = 'a\nb"c\\d\t{}\u2028é\U0001f600\x00'
    container = {"namespace": strange, "pod": strange, "container": strange, "device_ids": [strange]}

    record = decode("gpu.allocations", KEY, encoded("gpu.allocations", containers=[container]))

    assert isinstance(record, Allocations)
    decoded = msgspec.json.decode(msgspec.json.encode(record))["containers"][0]
    assert (decoded["namespace"], decoded["pod"], decoded["container"], decoded["device_ids"]) == (
        strange,
        strange,
        strange,
        [strange],
    )


def test_half_of_a_surrogate_pair_never_becomes_a_record_that_cannot_be_written() -> None:
    for half in (b"\\ud800", b"\\udc00", b"\\ud800x", b"\\ud800\\u0041"):
        value = encoded("gpu.samples", devices=[{"uuid": "HERE"}]).replace(b"HERE", half)
        assert reason("gpu.samples", value) == "undecodable"


def test_null_is_the_same_as_absent_in_what_is_not_required() -> None:
    nulls = dict.fromkeys(["containers"])
    value = msgspec.json.encode({**EXAMPLES["gpu.allocations"], **nulls})

    assert decode("gpu.allocations", KEY, value) == decode("gpu.allocations", KEY, encoded("gpu.allocations", **nulls))


TYPES = {"gpu.samples": Sample, "gpu.allocations": Allocations, "gpu.workloads": NodeWorkloads}


@every_topic
@given(data=st.data())
def test_whatever_the_contract_takes_is_read_and_can_be_written(topic: str, data: st.DataObject) -> None:
    spec = {t.name: t for t in (samples.TOPIC, allocations.TOPIC, workloads.TOPIC)}[topic]
    fields = data.draw(records.records_of(spec))

    record = decode(topic, f"{fields['cluster']}/{fields['node']}".encode(), records.encoded(fields))

    assert isinstance(record, TYPES[topic])
    assert msgspec.json.decode(msgspec.json.encode(record), type=TYPES[topic]) == record


@every_topic
@given(value=st.binary(max_size=200), index=st.integers(0, 2_000))
def test_bytes_put_anywhere_are_read_or_refused_and_nothing_else(topic: str, value: bytes, index: int) -> None:
    original = encoded(topic)

    try:
        record = decode(topic, KEY, original[:index] + value + original[index + len(value) :])
    except Malformed:
        return
    assert msgspec.json.decode(msgspec.json.encode(record), type=TYPES[topic]) == record
