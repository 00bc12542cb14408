"""The JSON Schemas for other readers: fresh, and in agreement with our own reader."""

import functools
import subprocess
import sys
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topics import records
from topics import reference
from topics.topic import Topic, decoder, load_topics

TOPICS = [topic for topic in load_topics().values() if topic.record is not None]

every_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def validator(topic: Topic) -> jsonschema.Draft202012Validator:
    return _validator(topic.name)


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(msgspec.json.decode((reference.SCHEMAS / f"{name}.json").read_bytes()))


def accepted(topic: Topic, record: Any) -> bool:
    """Whether our own reader accepts it."""
    assert topic.record is not None
    try:
        decoder(topic.record)(msgspec.json.encode(record))
    except msgspec.DecodeError:
        return False
    return True


def test_the_tree_has_the_schema_of_every_record_and_no_other() -> None:
    assert {path.name for path in reference.SCHEMAS.iterdir()} == {f"{topic.name}.json" for topic in TOPICS}


@every_topic
def test_a_schema_is_valid_json_schema(topic: Topic) -> None:
    assert jsonschema.Draft202012Validator.check_schema(reference.json_schema(topic)) is None


@every_topic
def test_the_example_is_a_record(topic: Topic) -> None:
    assert validator(topic).is_valid(topic.example)
    assert accepted(topic, topic.example)


@every_topic
@given(data=st.data())
def test_every_record_that_the_type_allows_fits_its_schema_and_is_read_back(topic: Topic, data: st.DataObject) -> None:
    record = data.draw(records.records_of(topic))

    validator(topic).validate(record)
    assert topic.record is not None
    decoded = decoder(topic.record)(records.encoded(record))
    encoded = msgspec.json.encode(decoded)
    assert decoder(topic.record)(encoded) == decoded
    assert validator(topic).is_valid(msgspec.json.decode(encoded))


@every_topic
def test_a_record_without_a_required_field_is_refused_by_schema_and_reader_alike(topic: Topic) -> None:
    assert topic.record is not None
    required = [field.name for field in msgspec.structs.fields(topic.record) if field.required]

    assert {"schema", "cluster"} | ({"node"} if topic.name != "gpu.actions" else set()) <= set(required)
    for name in required:
        for record in ({**topic.example, name: None}, {k: v for k, v in topic.example.items() if k != name}):
            assert (validator(topic).is_valid(record), accepted(topic, record)) == (False, False)


@every_topic
@pytest.mark.parametrize(
    "fields",
    [
        {"schema": 2},
        {"cluster": ""},
        {"cluster": "a/b"},
        {"node": "n" * 254},
        {"node": "ünode"},
    ],
    ids=str,
)
def test_a_field_outside_its_bounds_is_refused_by_schema_and_reader_alike(topic: Topic, fields: dict[str, Any]) -> None:
    if fields.keys() <= topic.example.keys():  # an action has no node
        record = {**topic.example, **fields}
        assert (validator(topic).is_valid(record), accepted(topic, record)) == (False, False)


@pytest.mark.parametrize(
    ("topic", "field"),
    [(topic, field) for topic in TOPICS for field in ("ts_ms", "last_ts_ms") if field in topic.example],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("value", [-1, 1.5, "1", 2**63])
def test_a_time_outside_its_bounds_is_refused_by_schema_and_reader_alike(topic: Topic, field: str, value: Any) -> None:
    record = {**topic.example, field: value}

    assert (validator(topic).is_valid(record), accepted(topic, record)) == (False, False)


def test_a_pattern_of_a_schema_uses_no_anchor_that_ecma_262_lacks() -> None:
    schemas = {path.name: text for path, text in reference.files().items() if path.suffix == ".json"}
    assert schemas
    assert not [name for name, text in schemas.items() if r"\\A" in text or r"\\Z" in text]


def test_the_command_reports_that_nothing_is_stale() -> None:
    command = [sys.executable, "-m", "topics.reference", "--check"]

    assert subprocess.run(command, check=False, cwd=reference.SCHEMAS.parent.parent).returncode == 0
