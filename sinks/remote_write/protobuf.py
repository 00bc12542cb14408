"""The few pieces of the protobuf wire format that remote write needs, and a sample, which 1.0 and 2.0 write alike.

Source: the protocol buffers encoding guide. A varint may be padded with continuation bytes: a timestamp is always
written in the same number of bytes, so that what surrounds it never moves.
"""

from functools import lru_cache

TS_WIDTH = 6
"""Bytes of a timestamp before 2109, in milliseconds; it is what any of our century takes anyway."""

TS_WIDTH_MAX = 9
"""Bytes of any timestamp."""

NAME = "__name__"
VALUE_BYTES = 9
"""Of a sample's value: its tag, and the double."""

_SAMPLES = 0x12
_VALUE = b"\x09"
_TIMESTAMP = b"\x10"
_SEVEN_BITS = 0x7F
_MORE = 0x80


def varint(number: int) -> bytes:
    """A number of 0 to 2**64 - 1 in as few bytes as it takes."""
    out = bytearray()
    while number > _SEVEN_BITS:
        out.append(number & _SEVEN_BITS | _MORE)
        number >>= 7
    out.append(number)
    return bytes(out)


def fixed_varint(number: int, width: int) -> bytes:
    """A number of less than 2**(7 * width) in just so many bytes."""
    out = bytearray(number >> shift & _SEVEN_BITS | _MORE for shift in range(0, 7 * width, 7))
    out[-1] &= _SEVEN_BITS
    return bytes(out)


def ts_width(ts_ms: int) -> int:
    """How many bytes a timestamp is written in."""
    return TS_WIDTH if ts_ms < 1 << 7 * TS_WIDTH else TS_WIDTH_MAX


def message(tag: int, payload: bytes) -> bytes:
    """A length-delimited field: a message, a string or packed numbers."""
    return bytes((tag,)) + varint(len(payload)) + payload


def text(tag: int, value: str) -> bytes:
    """A string field."""
    return message(tag, value.encode())


@lru_cache(maxsize=1024)
def timestamp(ts_ms: int) -> bytes:
    """A sample's second field."""
    return _TIMESTAMP + fixed_varint(ts_ms, ts_width(ts_ms))


def sample_head(width: int, more: int = 0) -> bytes:
    """What is before a sample's value, of which the timestamp is so wide: its tag, its length, the value's tag.

    ``more``: the bytes that come after the timestamp.
    """
    return bytes((_SAMPLES,)) + varint(VALUE_BYTES + 1 + width + more) + _VALUE
