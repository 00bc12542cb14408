"""Remote write 1.0: groups of samples -> a WriteRequest, before snappy. And what 2.0 encodes as 1.0 does. Pure.

A node's ticks usually differ only in values and time, so the plan for encoding one is made once and used again. A
device's labels are encoded once. Each of its series consists of slices of those bytes with the row's name and labels
between them; the bytes behind the row's labels are shared by many series. As long as a node's tick has the sets of its
last one, it is encoded by joining these bytes with the new values between them. If several such ticks follow one
another in a request, as in a backlog, each series is written once, with a sample of each tick.

Source: the protocol buffers encoding guide, and the message definitions of prometheus/prompb: WriteRequest{1
timeseries}, TimeSeries{1 labels, 2 samples}, Label{1 name, 2 value}, Sample{1 double value, 2 int64 timestamp}. A
varint may be padded with continuation bytes. Timestamps are padded to the same number of bytes, so that the bytes
around them never move.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from struct import Struct
from typing import NamedTuple, TypeVar

from sinks.series.model import Rows, SampleGroup, SeriesSet

TS_WIDTH = 6
"""The bytes of a timestamp in milliseconds before the year 2109; without padding it takes as many now."""

TS_WIDTH_MAX = 9
"""The bytes of any timestamp."""

NAME = "__name__"
VALUE_BYTES = 9
"""The bytes of a sample's value: its tag and the double."""

_SERIES = b"\x0a"
_LABEL = 0x0A
_FIRST = 0x0A
_SECOND = 0x12
_SAMPLES = 0x12
_VALUE = b"\x09"
_TIMESTAMP = b"\x10"
_SEVEN_BITS = 0x7F
_MORE = 0x80


# -- fields


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


def sample_bytes(width: int, more: int = 0) -> int:
    """The bytes of a sample, with its tag and length; the arguments are those of :func:`sample_head`."""
    return len(sample_head(width, more)) - 1 + VALUE_BYTES + 1 + width + more


# -- ticks


Plan = TypeVar("Plan")

Tick = Sequence[SampleGroup]
"""All groups of a node at one time."""


def planned(
    groups: Sequence[SampleGroup],
    key: Hashable,
    make: Callable[[list[SeriesSet], int], Plan],
    *,
    basis: object = None,
) -> Iterator[tuple[Plan, Tick]]:
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


def runs(planned_ticks: Iterable[tuple[Plan, Tick]]) -> Iterator[tuple[Plan, list[Tick]]]:
    """Ticks in a row that have the same plan, each later than the one before. Their series are written once."""
    run: list[tuple[Plan, Tick]] = []
    for plan, tick in planned_ticks:
        if run and (plan is not run[-1][0] or tick[0].ts_ms <= run[-1][1][0].ts_ms):
            yield run[0][0], [earlier for _, earlier in run]
            run = []
        run.append((plan, tick))
    if run:
        yield run[0][0], [earlier for _, earlier in run]


def samples(groups: Tick, behind: bytes = b"") -> tuple[bytes, ...]:
    """The encoded value and timestamp of each series of a tick, without the tag of the value, and what is ``behind``
    them."""
    time = timestamp(groups[0].ts_ms) + behind
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


# -- series


class _Parts(NamedTuple):
    """The parts of some series: the bytes that are a series' own, those up to the sample's value, which many series
    share, and the length of the series with one sample."""

    heads: Sequence[bytes]
    tails: Sequence[bytes]
    sizes: Sequence[int]


def pieces(groups: Sequence[SampleGroup]) -> Iterator[bytes]:
    """The uncompressed request with these groups: one piece for ticks in a row that have the same series."""

    def plan_of(sets: Sequence[SeriesSet], width: int) -> _Parts:
        parts = zip(*[_parts(series, width) for series in sets], strict=True)
        heads, tails, sizes = [list(chain.from_iterable(kind)) for kind in parts]
        return _Parts(heads, tails, sizes)

    for (heads, tails, sizes), ticks in runs(planned(groups, "v1", plan_of)):
        width, next_sample = ts_width(ticks[0][0].ts_ms), b""
        if len(ticks) > 1:
            next_sample = sample_head(width)
            more = (len(ticks) - 1) * sample_bytes(width)
            heads = [
                _series_start(size + more) + head[len(_series_start(size)) :]
                for head, size in zip(heads, sizes, strict=True)
            ]
        step = 2 + len(ticks)
        parts = [b""] * (step * len(heads))
        parts[::step], parts[1::step] = heads, tails
        for number, tick in enumerate(ticks, 2):
            parts[number::step] = samples(tick, next_sample if number < step - 1 else b"")
        yield b"".join(parts)


def _parts(series: SeriesSet, width: int) -> _Parts:
    """The parts of each row, which the set keeps."""
    kept: _Parts | None = series.cache.get((_parts, width))
    if kept is not None:
        return kept
    encoded = [label(name, value) for name, value in series.labels]
    ends = list(accumulate(map(len, encoded), initial=0))
    blob, sample = b"".join(encoded), sample_head(width)
    rest = len(blob) + sample_bytes(width)
    tails: dict[int, bytes] = {}
    row_heads = _row_heads(series.rows, tuple([name for name, _ in series.labels]), rest)
    heads: list[bytes] = []
    for head, own, last, _ in row_heads:
        if last not in tails:
            tails[last] = blob[ends[last] :] + sample
        start = 0
        for before, row_label in own:  # the device's labels, with those of the row in sorted order among them
            head += blob[start : ends[before]] + row_label
            start = ends[before]
        heads.append(head)
    kept = _Parts(tuple(heads), tuple([tails[row.last] for row in row_heads]), tuple([row.size for row in row_heads]))
    series.cache[_parts, width] = kept
    return kept


class _RowHead(NamedTuple):
    """The bytes of a row before the device's labels; its own labels among them, sorted and encoded, each with the
    number of the device's labels that sort before it; the last such number; and the length of the series."""

    head: bytes
    own: tuple[tuple[int, bytes], ...]
    last: int
    size: int


@lru_cache(maxsize=4096)
def _row_heads(rows: Rows, names: tuple[str, ...], rest: int) -> list[_RowHead]:
    """How each row begins if the device's labels, of these names, and the sample take ``rest`` bytes."""
    heads = []
    for row in rows:
        pairs = sorted(((NAME, row.name), *row.labels))
        own = [(bisect_left(names, name), label(name, value)) for name, value in pairs]
        first = [encoded for before, encoded in own if not before]
        size = rest + sum([len(encoded) for _, encoded in own])
        head = _shared(b"".join((_series_start(size), *first)))
        heads.append(_RowHead(head, tuple(own[len(first) :]), own[-1][0], size))
    return heads


@lru_cache(maxsize=4096)
def _series_start(size: int) -> bytes:
    """The tag of a series and its length."""
    return _SERIES + varint(size)


_shared = lru_cache(maxsize=65536)(bytes)
"""Equal bytes as one object: those of a row recur on most devices, and far fewer objects are fetched from memory."""


@lru_cache(maxsize=65536)
def label(name: str, value: str) -> bytes:
    """An encoded label."""
    return message(_LABEL, text(_FIRST, name) + text(_SECOND, value))
