"""What a node keeps while Kafka is away."""

from hypothesis import given
from hypothesis import strategies as st

from producers.ring import Ring, Waiting


def _tick(size: int, at_s: float = 0.0) -> Waiting:
    return Waiting(b"x" * size, (), at_s)


@given(st.lists(st.integers(1, 50)), st.integers(1, 200), st.integers(0, 100))
def test_the_oldest_give_way_and_no_more_than_needed(sizes: list[int], max_bytes: int, in_flight: int) -> None:
    ring = Ring(max_bytes=max_bytes, max_age_s=1.0)
    ring.in_flight_bytes = in_flight
    ticks = [_tick(size) for size in sizes]
    gone = [dropped.tick for tick in ticks for dropped in ring.push(tick)]
    kept = [ring.pop() for _ in range(len(ring))]

    assert gone + kept == ticks
    assert sum(len(tick.value) for tick in kept) + in_flight <= max_bytes or len(kept) <= 1
    assert ring.bytes == 0


def test_a_buffer_with_room_drops_nothing() -> None:
    ring = Ring(max_bytes=20, max_age_s=1.0)

    assert [list(ring.push(_tick(10))), list(ring.push(_tick(10)))] == [[], []]
    assert len(ring) == 2


def test_what_is_too_old_goes_and_what_is_not_stays() -> None:
    ring = Ring(max_bytes=100, max_age_s=10.0)
    old, young = _tick(1, at_s=0.0), _tick(1, at_s=5.0)
    assert not [*ring.push(old), *ring.push(young)]

    assert list(ring.expire(10.0)) == []
    assert [(dropped.tick, dropped.reason) for dropped in ring.expire(10.1)] == [(old, "buffer_age")]
    assert ring.head() is young
