"""The ticks that a node keeps while Kafka is away."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.records import MIN_COMPRESSED_BYTES, PLAIN_TICKS, RetryBuffer, WaitingTick


def _tick(size: int, at_s: float = 0.0) -> WaitingTick:
    return WaitingTick(b"x" * size, (), at_s)


@given(st.lists(st.integers(1, 50)), st.integers(1, 200), st.integers(0, 100))
def test_the_oldest_ticks_are_dropped_and_no_more_than_needed(sizes: list[int], max_bytes: int, in_flight: int) -> None:
    buffer = RetryBuffer(max_bytes=max_bytes, max_age_s=1.0)
    buffer.in_flight_bytes = in_flight
    ticks = [_tick(size) for size in sizes]
    dropped_ticks = [dropped for tick in ticks for dropped in buffer.push(tick)]
    left_ticks = [buffer.pop() for _ in range(len(buffer))]

    assert dropped_ticks + left_ticks == ticks
    assert sum(len(tick.value) for tick in left_ticks) + in_flight <= max_bytes or len(left_ticks) <= 1
    assert buffer.bytes == 0


def test_a_buffer_with_room_drops_nothing() -> None:
    buffer = RetryBuffer(max_bytes=20, max_age_s=1.0)

    assert [buffer.push(_tick(10)), buffer.push(_tick(10))] == [[], []]
    assert len(buffer) == 2


def test_only_ticks_that_are_too_old_are_dropped() -> None:
    buffer = RetryBuffer(max_bytes=100, max_age_s=10.0)
    old, young = _tick(1, at_s=0.0), _tick(1, at_s=5.0)
    assert buffer.push(old) + buffer.push(young) == []

    assert buffer.expire(10.0) == []
    assert buffer.expire(10.1) == [old]
    assert buffer.head() is young


def _text(number: int, size: int = 2_000) -> WaitingTick:
    """A tick that compression makes smaller."""
    return WaitingTick(f"{number:09}".encode() * (size // 9), (), float(number))


def test_the_newest_ticks_are_uncompressed_and_those_that_wait_longer_are_compressed() -> None:
    buffer = RetryBuffer(max_bytes=10_000_000, max_age_s=1_000.0)
    ticks = [_text(number) for number in range(PLAIN_TICKS + 10)]
    dropped_ticks = [dropped for tick in ticks for dropped in buffer.push(tick)]
    plain_bytes = sum(len(tick.value) for tick in ticks[-PLAIN_TICKS:])

    assert not dropped_ticks
    assert plain_bytes < buffer.bytes < plain_bytes + 10 * 200
    assert (buffer.head() or ticks[0]).compressed
    popped = [buffer.pop() for _ in ticks]
    assert [(tick.value, tick.made_at_s, tick.compressed) for tick in popped] == [
        (tick.value, tick.made_at_s, False) for tick in ticks
    ]
    assert popped[-1] is ticks[-1]
    assert buffer.bytes == 0


def test_a_small_buffer_compresses_before_it_drops() -> None:
    buffer = RetryBuffer(max_bytes=5_000, max_age_s=1_000.0)
    dropped_ticks = [dropped for number in range(10) for dropped in buffer.push(_text(number))]

    assert not dropped_ticks
    assert buffer.bytes <= 5_000 < 10 * len(_text(0).value)


@given(
    st.lists(st.one_of(st.integers(1, 3_000), st.none()), max_size=60),
    st.integers(1, 30_000),
    st.floats(0.0, 1.0),
)
def test_ticks_come_out_once_in_order_and_unchanged_or_are_dropped(
    steps: list[int | None], max_bytes: int, share_of_zeros: float
) -> None:
    buffer, pushed, popped = RetryBuffer(max_bytes=max_bytes, max_age_s=1.0), list[bytes](), list[bytes]()
    dropped_ticks = 0
    for number, size in enumerate(steps):
        if size is not None:
            zeros = int(size * share_of_zeros)
            pushed.append(bytes(zeros) + number.to_bytes(2) * (size - zeros))
            dropped_ticks += len(buffer.push(WaitingTick(pushed[-1], (), 0.0)))
        elif len(buffer):
            popped.append(buffer.pop().value)
        assert len(buffer) <= 1 or buffer.bytes <= max_bytes
    popped += [buffer.pop().value for _ in range(len(buffer))]

    remaining = iter(pushed)
    assert all(value in remaining for value in popped), "in order"
    assert len(popped) + dropped_ticks == len(pushed)


def test_the_capacity_is_the_number_of_ticks_that_fit() -> None:
    buffer = RetryBuffer(max_bytes=100_000, max_age_s=1_000.0)
    ticks = [WaitingTick(Random(number).randbytes(100).hex().encode() * 10, (), 0.0) for number in range(1_000)]
    fits = buffer.capacity(ticks[0].value)
    dropped = [len(buffer.push(tick)) for tick in ticks]

    assert fits > 100_000 // 2_000
    assert dropped.index(1) == pytest.approx(fits, rel=0.1)
    assert RetryBuffer(max_bytes=10, max_age_s=1.0).capacity(b"x" * MIN_COMPRESSED_BYTES) == 1
