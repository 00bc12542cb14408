"""How the series of a tick are written, worked out once: a node's ticks differ in values and time alone, as a rule."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import NamedTuple, Protocol, TypeVar

from sinks.remote_write.protobuf import VALUE_BYTES, timestamp, ts_width
from sinks.series.model import SampleGroup, SeriesSet


class Plan(Protocol):
    """How some sets are written together."""

    @property
    def sets(self) -> tuple[SeriesSet, ...]: ...


P = TypeVar("P", bound=Plan)


def planned(
    groups: Sequence[SampleGroup], key: Hashable, made: Callable[[tuple[SeriesSet, ...], int], P]
) -> Iterator[tuple[P, Sequence[SampleGroup]]]:
    """The groups of each tick, and how they are written: as those that the node wrote last, if it has the same sets.

    ``made`` is given the sets and how many bytes a timestamp has; the plan is kept with the first of them.
    """
    start = 0
    while start < len(groups):
        first, ts_ms, _ = groups[start]
        width = ts_width(ts_ms)
        plan: P | None = first.cache.get((key, width))
        some = groups[start : start + len(plan.sets)] if plan else ()
        if plan is None or plan.sets != tuple([one.series for one in some]) or any(one.ts_ms != ts_ms for one in some):
            some = _of_one_tick(groups, start)
            plan = first.cache[key, width] = made(tuple([one.series for one in some]), width)
        yield plan, some
        start += len(some)


def _of_one_tick(groups: Sequence[SampleGroup], start: int) -> Sequence[SampleGroup]:
    """A group and those after it that are of the same tick of a node."""
    first, end = groups[start], start + 1
    while first.series.node is not None and end < len(groups):
        if groups[end].ts_ms != first.ts_ms or groups[end].series.node != first.series.node:
            break
        end += 1
    return groups[start:end]


def samples(groups: Sequence[SampleGroup]) -> tuple[bytes, ...]:
    """The value and the time of each series of a tick, from behind the value's tag."""
    time = timestamp(groups[0].ts_ms)
    values = list(chain.from_iterable([group.values for group in groups]))
    both: list[float | bytes] = [time] * (2 * len(values))
    both[::2] = values
    packers = _packers(len(values), len(time))
    return packers.apart.unpack(packers.together.pack(*both))


class _Packers(NamedTuple):
    together: Struct
    apart: Struct


@lru_cache(maxsize=1024)
def _packers(count: int, time_bytes: int) -> _Packers:
    size = VALUE_BYTES - 1 + time_bytes
    return _Packers(Struct("<" + f"d{time_bytes}s" * count), Struct(f"{size}s" * count))
