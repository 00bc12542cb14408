"""Plans for encoding a tick, made once and used again: a node's ticks usually differ only in values and time."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import NamedTuple, Protocol, TypeVar

from sinks.remote_write.protobuf import VALUE_BYTES, timestamp, ts_width
from sinks.series.model import SampleGroup, SeriesSet


class Plan(Protocol):
    """How some sets are encoded together. ``numbers`` are those of the sets."""

    @property
    def numbers(self) -> tuple[int, ...]: ...


P = TypeVar("P", bound=Plan)


def planned(
    groups: Sequence[SampleGroup], key: Hashable, make: Callable[[tuple[SeriesSet, ...], int], P]
) -> Iterator[tuple[P, Sequence[SampleGroup]]]:
    """Each tick's groups with their plan: that of the node's last tick if it has the same sets, otherwise a new one.

    ``make`` gets the sets and the width of a timestamp in bytes. The plan is kept in the cache of the first set.
    """
    start = 0
    while start < len(groups):
        first, ts_ms, _ = groups[start]
        width = ts_width(ts_ms)
        plan: P | None = first.cache.get((key, width))
        tick = groups[start : start + len(plan.numbers)] if plan else ()
        same_sets = plan is not None and plan.numbers == tuple([group.series.number for group in tick])
        if plan is None or not same_sets or any(group.ts_ms != ts_ms for group in tick):
            tick = _tick_at(groups, start)
            plan = first.cache[key, width] = make(tuple([group.series for group in tick]), width)
        yield plan, tick
        start += len(tick)


def _tick_at(groups: Sequence[SampleGroup], start: int) -> Sequence[SampleGroup]:
    """The group at ``start`` and those behind it that are of the same tick."""
    first, end = groups[start], start + 1
    while first.series.node is not None and end < len(groups):
        if groups[end].ts_ms != first.ts_ms or groups[end].series.node != first.series.node:
            break
        end += 1
    return groups[start:end]


def samples(groups: Sequence[SampleGroup]) -> tuple[bytes, ...]:
    """The encoded value and timestamp of each series of a tick, without the tag of the value."""
    time = timestamp(groups[0].ts_ms)
    values = list(chain.from_iterable([group.values for group in groups]))
    alternating: list[float | bytes] = [time] * (2 * len(values))
    alternating[::2] = values
    packers = _packers(len(values), len(time))
    return packers.apart.unpack(packers.together.pack(*alternating))


class _Packers(NamedTuple):
    together: Struct
    apart: Struct


@lru_cache(maxsize=1024)
def _packers(count: int, time_bytes: int) -> _Packers:
    size = VALUE_BYTES - 1 + time_bytes
    return _Packers(Struct("<" + f"d{time_bytes}s" * count), Struct(f"{size}s" * count))
