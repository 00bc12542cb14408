"""Dead letters keep the beginning of a record, and are always small enough to be sent."""

import pytest

from topics.dead_letters import MAX_KEY_BYTES, MAX_VALUE_BYTES, RESUBMITTED, Origin, cause, letter, resubmitted

ORIGIN = Origin("gpu.samples", 3, 40)


def test_a_dead_letter_has_the_position_of_its_record_the_component_and_the_reason() -> None:
    dead = letter(b"c/n", b"{", ORIGIN, stage="attribution", error="truncated", at_ms=7)

    assert (dead.key, dead.value) == (b"c/n", b"{")
    assert dict(dead.headers) == {
        "topic": b"gpu.samples",
        "partition": b"3",
        "offset": b"40",
        "stage": b"attribution",
        "error": b"truncated",
        "length": b"1",
        "at_ms": b"7",
    }


def test_a_long_value_is_cut_to_64_kib_and_its_length_is_reported() -> None:
    dead = letter(None, b"x" * 1_000_000, ORIGIN, stage="s", error="e", at_ms=0)

    assert dead.value == b"x" * MAX_VALUE_BYTES
    assert dict(dead.headers)["length"] == b"1000000"


@pytest.mark.parametrize(("length", "is_kept"), [(MAX_KEY_BYTES, True), (MAX_KEY_BYTES + 1, False), (4_000_000, False)])
def test_an_overlong_key_is_left_out(length: int, is_kept: bool) -> None:
    dead = letter(b"k" * length, b"", ORIGIN, stage="s", error="e", at_ms=0)

    assert dead.key == (b"k" * length if is_kept else None)


def test_no_value_is_an_empty_one() -> None:
    assert letter(None, None, ORIGIN, stage="s", error="e", at_ms=0).value == b""


def test_an_error_is_bounded_and_always_utf_8() -> None:
    error = dict(letter(None, b"", ORIGIN, stage="s", error="\ud800" + "e" * 5000, at_ms=0).headers)["error"]

    assert len(error) <= 1000
    assert error.decode().startswith("?e")


@pytest.mark.parametrize("value", [None, b"", b"x", b"9" * 5000, b"\xb2"])
def test_a_record_with_any_headers_is_a_letter_a_receipt_or_neither(value: bytes | None) -> None:
    headers = letter(None, b"", ORIGIN, stage="s", error="e", at_ms=0).headers

    assert cause([*headers, ("trace", value)]) is not None
    assert cause([*headers, ("offset", value)]) is None
    assert resubmitted([*headers, (RESUBMITTED, value)]) is None
