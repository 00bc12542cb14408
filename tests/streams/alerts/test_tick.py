"""What of a record is decoded: whatever the contract allows is a tick, and can be judged."""

from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from streams.alerts.node import Replay
from streams.alerts.tick import Metrics, decode
from tests.streams.alerts.ticks import DEFAULTS
from tests.topics import records
from topics import attributed
from topics.catalogue import CATALOGUE
from topics.times import MAX_TIME_MS

metrics = st.dictionaries(
    st.sampled_from(Metrics.__struct_fields__),
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
)


def changed(record: dict[str, Any], values: list[dict[str, Any]], i: int) -> bytes:
    """A record as one of a node's, some time after the last, with metrics that rules look at."""
    devices = [{**device, "metrics": values[n % len(values)]} for n, device in enumerate(record.get("devices") or ())]
    position = {"cluster": "c", "node": "n", "ts_ms": i * 100_000, "offset": i}
    return records.encoded({**record, **position, "devices": devices})


@given(st.lists(records.records_of(attributed.TOPIC), max_size=4), st.lists(metrics, min_size=1, max_size=3))
def test_whatever_the_contract_allows_is_judged(story: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    replay = Replay(DEFAULTS)
    for i, record in enumerate(story):
        for alert in replay.judge(decode(changed(record, values, i))):
            assert msgspec.json.decode(msgspec.json.encode(alert), type=type(alert)) == alert
    replay.end()


@given(records.records_of(attributed.TOPIC))
def test_a_record_means_the_same_as_to_any_other_reader(record: dict[str, Any]) -> None:
    expected = msgspec.convert(_without_nulls(record), attributed.AttributedSample)
    assume(expected.ts_ms <= MAX_TIME_MS)
    decoded = decode(records.encoded(record))
    assert (decoded.node, decoded.ts_ms, decoded.offset, len(decoded.devices)) == (
        expected.node,
        expected.ts_ms,
        expected.offset,
        len(expected.devices),
    )
    for actual_device, expected_device in zip(decoded.devices, expected.devices, strict=True):
        assert (actual_device.uuid, actual_device.holders, actual_device.events, actual_device.xids) == (
            expected_device.uuid,
            expected_device.holders,
            expected_device.events,
            expected_device.xids,
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def test_every_metric_that_rules_look_at_is_in_the_catalogue() -> None:
    assert set(Metrics.__struct_fields__) <= set(CATALOGUE)


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b"null", b"\xff", b'{"schema": 2}', b'{"schema": 1}', b"[" * 100_000]
)
def test_what_is_no_record_is_an_error_of_one_kind(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(value)
