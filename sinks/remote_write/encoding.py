"""What remote write 1.0 and 2.0 encode alike: fields of protobuf, samples, and a node's ticks by a plan.

A node's ticks usually differ only in values and time, so the plan for encoding one is made once and used again.

Source: the protocol buffers encoding guide. A varint may be padded with continuation bytes. Timestamps are padded to
the same number of bytes, so that the bytes around them never move.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import TypeVar

from sinks.series.model import SampleGroup, SeriesSet

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


# -- ticks


Plan = TypeVar("Plan")


def planned(
    groups: Sequence[SampleGroup],
    key: Hashable,
    make: Callable[[list[SeriesSet], int], Plan],
    *,
    basis: object = None,
) -> Iterator[tuple[Plan, Sequence[SampleGroup]]]:
    """Each tick's groups with the plan for encoding its sets: that of the node's last tick, or a new one if that had
    other sets.

    ``make`` gets the sets and the width of a timestamp in bytes. The plan is kept in the cache of the first set, with
    the numbers of all, as long as ``basis`` is the same object.
    """
    start = 0
    while start < len(groups):
        first, ts_ms, _ = groups[start]
        width = ts_width(ts_ms)
        plan: Plan | None
        numbers, made_on, plan = first.cache.get((key, width), ((), None, None))
        tick = groups[start : start + len(numbers)]
        same_sets = numbers == tuple([group.series.number for group in tick])
        if plan is None or made_on is not basis or not same_sets or any(group.ts_ms != ts_ms for group in tick):
            end = start + 1
            while first.node is not None and end < len(groups):
                if (groups[end].ts_ms, groups[end].series.node) != (ts_ms, first.node):
                    break
                end += 1
            tick = groups[start:end]
            plan = make([group.series for group in tick], width)
            first.cache[key, width] = tuple([group.series.number for group in tick]), basis, plan
        yield plan, tick
        start += len(tick)


def samples(groups: Sequence[SampleGroup]) -> tuple[bytes, ...]:
    """The encoded value and timestamp of each series of a tick, without the tag of the value."""
    time = timestamp(groups[0].ts_ms)
    values = list(chain.from_iterable([group.values for group in groups]))
    alternating: list[float | bytes] = [time] * (2 * len(values))
    alternating[::2] = values
    together, apart = _packers(len(values), len(time))
    return apart.unpack(together.pack(*alternating))


@lru_cache(maxsize=1024)
def _packers(count: int, time_bytes: int) -> tuple[Struct, Struct]:
    """What writes so many values, each with its time, one after the other; and what splits the result again."""
    size = VALUE_BYTES - 1 + time_bytes
    return Struct("<" + f"d{time_bytes}s" * count), Struct(f"{size}s" * count)
