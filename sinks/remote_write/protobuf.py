"""The parts of the protobuf wire format that remote write needs; and a sample, which 1.0 and 2.0 encode alike.

Source: the protocol buffers encoding guide. A varint may be padded with continuation bytes. Timestamps are padded to
the same number of bytes, so that the bytes around them never move.
"""

from functools import lru_cache

TS_WIDTH = 6
"""The bytes of a timestamp in milliseconds before the year 2109; without padding it takes as many now."""

TS_WIDTH_MAX = 9
"""The bytes of any timestamp."""

NAME = "__name__"
VALUE_BYTES = 9
"""The bytes of a sample's value: its tag and the double."""

_SAMPLES = 0x12
_VALUE = b"\x09"
_TIMESTAMP = b"\x10"
_SEVEN_BITS = 0x7F
_MORE = 0x80


def varint(number: int) -> bytes:
    """A number from 0 to 2**64 - 1 in as few bytes as possible."""
    out = bytearray()
    while number > _SEVEN_BITS:
        out.append(number & _SEVEN_BITS | _MORE)
        number >>= 7
    out.append(number)
    return bytes(out)


def fixed_varint(number: int, width: int) -> bytes:
    """A number below 2**(7 * width) in exactly ``width`` bytes."""
    out = bytearray(number >> shift & _SEVEN_BITS | _MORE for shift in range(0, 7 * width, 7))
    out[-1] &= _SEVEN_BITS
    return bytes(out)


def ts_width(ts_ms: int) -> int:
    """The number of bytes of a timestamp."""
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
    """The bytes before a sample's value: the sample's tag, its length, the value's tag.

    ``width``: the bytes of its timestamp; ``more``: the bytes behind the timestamp.
    """
    return bytes((_SAMPLES,)) + varint(VALUE_BYTES + 1 + width + more) + _VALUE
