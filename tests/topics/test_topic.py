"""Records are read so: null is absent, unknown fields are ignored, and there is only one kind of error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics import allocations, samples
from topics.samples import Sample
from topics.topic import MAX_MESSAGE_BYTES, decoder

EXAMPLE = samples.TOPIC.example
decode = decoder(Sample)


def sample(**fields: object) -> bytes:
    return msgspec.json.encode({**EXAMPLE, **fields})


def raw(extra: bytes) -> bytes:
    """The example with bytes put in before its end."""
    return sample()[:-1] + b"," + extra + b"}"


def refused(value: bytes) -> bool:
    """Whether it is refused with a DecodeError; any other error fails the test."""
    try:
        decode(value)
    except msgspec.DecodeError:
        return True
    return False


def test_null_means_the_same_as_absent() -> None:
    device = {"uuid": "GPU-1", "vendor": None, "state": None, "metrics": {"power_watts": None}, "processes": None}

    assert decode(sample(devices=None)) == decode(sample(devices=[]))
    assert decode(sample(devices=[device])).devices == decode(sample(devices=[{"uuid": "GPU-1"}])).devices


def test_null_lists_of_an_allocation_are_empty() -> None:
    container = {"namespace": "n", "pod": "p", "container": "c", "resource": None, "device_ids": None, "claims": None}
    record = {**allocations.TOPIC.example, "containers": [container]}

    (decoded,) = decoder(allocations.Allocations)(msgspec.json.encode(record)).containers
    assert (decoded.device_ids, decoded.claims) == ((), ())


def test_unknown_fields_are_ignored() -> None:
    assert decode(sample(later={"deep": [None, {"er": 1}]})) == decode(sample())


def test_a_zero_is_a_zero() -> None:
    (device,) = decode(sample(devices=[{"uuid": "a", "index": 0, "metrics": {"gpu_utilization_ratio": 0}}])).devices

    assert (device.index, device.metrics) == (0, {"gpu_utilization_ratio": 0})


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b'"text"',
        b'{"schema": 2}',
        sample()[:-1],
        sample() + b"x",
        raw(b'"cluster": null'),
        raw(b'"cluster": "\xff"'),
        raw(b'"seq": "1"'),
        raw(b'"later": ' + b"[" * 1_000_000 + b"]" * 1_000_000),
        raw(b'"seq": null, "later": ' + b"[" * 900 + b"]" * 900),
        raw(b'"devices": [{"uuid": "a", "metrics": {"power_watts": 1e400}}]'),
        raw(b'"devices": [{"uuid": "a", "metrics": {"power_watts": 1' + b"0" * 400 + b"}}]"),
        raw(b'"devices": [{"uuid": "a", "metrics": {"power_watts": NaN}}]'),
        raw(b'"devices": [{"uuid": "a", "metrics": {"power_watts": "1"}}]'),
        raw(b'"devices": [{"uuid": "a", "state": 1}]'),
        raw(b'"devices": [null]'),
    ],
    ids=lambda value: repr(value[-40:]),
)
def test_a_malformed_record_is_refused_with_a_decode_error(value: bytes) -> None:
    assert refused(value)


@given(st.binary())
def test_bytes_that_are_no_record_are_refused_with_a_decode_error(value: bytes) -> None:
    assert refused(value)


@given(index=st.integers(0, len(sample()) - 1), byte=st.integers(0, 255))
def test_a_record_with_a_changed_byte_is_read_or_refused_with_a_decode_error(index: int, byte: int) -> None:
    value = bytearray(sample())
    value[index] = byte

    assert refused(bytes(value)) or isinstance(decode(bytes(value)), Sample)


@pytest.mark.parametrize(("padding", "expected"), [(1, False), (MAX_MESSAGE_BYTES, True)])
def test_only_a_record_that_a_producer_may_write_is_read_again_for_its_nulls(padding: int, expected: bool) -> None:
    """A second reading makes objects of all that is in it."""
    assert refused(sample(devices=None, padding="x" * padding)) == expected
