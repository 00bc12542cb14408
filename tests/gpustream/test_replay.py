"""What a replay makes of a part of the log is what the stream made of all of it."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpustream.replay import (
    BEFORE_MS,
    SETTLED_MS,
    SETTLED_MS_OF_SAMPLES,
    PartitionReplay,
    WrittenKeys,
    attributable_time,
    final_hours,
    replay,
)
from gpustream.usage.command import parse_time
from gpustream.usage.read import Range
from streams.usage.bookkeeper import Bookkeeper
from streams.usage.books import Accounting, Books
from streams.usage.tick import decode
from topics.usage import HOUR_MS, Usage

START_MS = 1_795_215_600_000


class Read(NamedTuple):
    """A record of gpu.attributed, as the client gives it."""

    key: bytes
    value: bytes
    timestamp: int


def tick(node: int, seq: int, at_ms: int, pod: str | None, busy: float, late_ms: int) -> Read:
    """A tick so many milliseconds after the start, that came so much later to the log."""
    holder = {"namespace": "ml", "pod": pod, "pod_uid": f"uid-{pod}", "container": "main", "labels": {"team": "a"}}
    device = {"uuid": f"GPU-{node}", "model": "H100", "metrics": {"gpu_utilization_ratio": busy, "power_watts": 300.5}}
    record = {"schema": 1, "cluster": "c", "node": f"n-{node}", "run_id": 1, "seq": seq, "ts_ms": START_MS + at_ms}
    record |= {"interval_ms": 20_000, "offset": seq, "logged_ms": START_MS + at_ms + late_ms, "attribution": "exact"}
    record |= {"devices": [{**device, "holders": [holder] if pod else []}]}
    return Read(f"c/n-{node}".encode(), msgspec.json.encode(record), START_MS + at_ms + late_ms)


def live(records: Sequence[Read], until_ms: int) -> list[Usage]:
    """What the stream has made of them when the log has come to a time."""
    keepers: dict[bytes, Bookkeeper] = {}
    usages: list[Usage] = []
    for record in records:
        tick = decode(record.value)
        books = Books(schema=1, cluster=tick.cluster, node=tick.node)
        usages += keepers.setdefault(record.key, Bookkeeper(books, Accounting())).book(tick, record.timestamp).records
    return usages + [usage for keeper in keepers.values() for usage in keeper.close_silent(until_ms)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([20_000, 20_000, 19_999, 45_000, 61_000, 700_000]),
        st.sampled_from(["a", "b", None]),
        st.floats(0, 1),
        st.sampled_from([0, 500, 90_000]),
    ),
    min_size=30,
    max_size=90,
)


def ticks(node: int, steps: Sequence[tuple[int, str | None, float, int]]) -> Iterator[Read]:
    at_ms = node * 7_000
    for seq, (step_ms, pod, busy, late_ms) in enumerate(steps, 1):
        at_ms += step_ms
        yield tick(node, seq, at_ms, pod, busy, late_ms)


@given(nodes=st.lists(STEPS, min_size=1, max_size=2), first=st.integers(1, 4))
def test_a_replay_gives_the_same_bytes_but_for_the_generation(nodes: list[Any], first: int) -> None:
    log = [record for node, steps in enumerate(nodes) for record in _by_log_time(ticks(node, steps))]
    until_ms = max(record.timestamp for record in log) + 2 * HOUR_MS
    hours = Range(START_MS + first * HOUR_MS, START_MS + (first + 2) * HOUR_MS)
    again = PartitionReplay(hours, Accounting(generation=3))
    replayed = again.add([record for record in log if record.timestamp >= hours.from_ms - BEFORE_MS])
    replayed += again.end(until_ms)
    expected = [
        record
        for record in live(log, until_ms)
        if record.final and record.start_ms >= hours.from_ms and record.end_ms <= hours.to_ms
    ]

    assert _bytes(replayed) == _bytes([msgspec.structs.replace(record, generation=3) for record in expected])


def _by_log_time(records: Iterator[Read]) -> list[Read]:
    """A node's records in the order of its ticks; the log never goes back."""
    logged_ms, in_log_order = 0, list[Read]()
    for record in records:
        logged_ms = max(logged_ms, record.timestamp)
        value = record.value.replace(b'"logged_ms":%d' % record.timestamp, b'"logged_ms":%d' % logged_ms)
        in_log_order.append(record._replace(timestamp=logged_ms, value=value))
    return in_log_order


def _bytes(records: Sequence[Usage]) -> list[bytes]:
    return sorted(map(msgspec.json.encode, records))


def test_what_is_no_tick_is_counted_and_left_out() -> None:
    again = PartitionReplay(Range(START_MS, START_MS + HOUR_MS), Accounting(generation=1))
    assert again.add([Read(b"c/n", b"{", 0), tick(0, 1, 0, "a", 0.5, 0)]) == []
    assert (again.malformed, again.ticks, again.nodes) == (1, 1, {b"c/n-0"})


def test_an_hour_that_is_not_final_is_not_written() -> None:
    again = PartitionReplay(Range(START_MS, START_MS + HOUR_MS), Accounting(generation=1))
    steps = [tick(0, seq, seq * 20_000, "a", 0.5, 0) for seq in range(181)]
    assert again.add(steps) + again.end(START_MS + HOUR_MS) == []
    assert len(again.end(START_MS + 2 * HOUR_MS)) >= 61


def test_what_came_after_a_silence_of_the_log_is_booked_by_a_replay() -> None:
    log = [tick(0, seq, seq * 20_000, "a", 0.5, 0 if seq < 30 else HOUR_MS) for seq in range(400)]
    until_ms = START_MS + 6 * HOUR_MS
    again = PartitionReplay(Range(START_MS, START_MS + HOUR_MS), Accounting(generation=1))
    records = again.add(log) + again.end(until_ms)
    hours = {
        name: [
            record.device_ms
            for record in usages
            if record.final and record.category == "held" and record.start_ms == START_MS
        ]
        for name, usages in (("live", live(log, until_ms)), ("again", records))
    }
    assert max(hours["live"]) < HOUR_MS / 2
    assert max(hours["again"]) == HOUR_MS


def test_an_hour_in_which_the_log_was_created_again_is_left_as_it_was_booked() -> None:
    log = [tick(0, seq, seq * 20_000, "a", 0.5, 0) for seq in range(1, 5 * 180)]
    left, hours = log[int(1.5 * 180) :], Range(START_MS + HOUR_MS, START_MS + 3 * HOUR_MS)

    def hours_made_again(observed_ms: int | None) -> set[int]:
        replayed = PartitionReplay(hours, Accounting(generation=1), {("c", "n-0"): observed_ms} if observed_ms else {})
        records = [*replayed.add(left), *replayed.end(START_MS + 12 * HOUR_MS)]
        assert len(replayed.partial) == 2 - len({record.start_ms // HOUR_MS for record in records})
        return {(record.start_ms - START_MS) // HOUR_MS for record in records}

    assert hours_made_again(START_MS + HOUR_MS) == {2}
    assert hours_made_again(left[0].timestamp - 3 * 20_000) == {1, 2}, "the first tick stands for three intervals"
    assert hours_made_again(None) == {1, 2}, "nothing was booked"


def test_a_key_that_a_window_had_and_has_no_more_is_zero_once() -> None:
    hours = Range(START_MS, START_MS + HOUR_MS)
    (new, *_) = live([tick(0, 1, 0, "a", 0.5, 0), tick(0, 2, 20_000, "a", 0.5, 0)], START_MS + 3 * HOUR_MS)
    old = msgspec.structs.replace(new, category="held", pod="gone", used_us=7)
    written = WrittenKeys(hours, generation=2)
    written.note(new)
    zero = written.zero(old)

    assert zero is not None
    assert (zero.key, zero.generation, zero.final, zero.used_us, zero.slice_ms) == (old.key, 2, True, 0, 0)
    assert written.zero(old) is None
    assert written.zero(new) is None
    assert written.zero(msgspec.structs.replace(old, node="another", pod="x")) is None
    later = {"start_ms": START_MS + HOUR_MS, "end_ms": START_MS + 2 * HOUR_MS}
    assert written.zero(msgspec.structs.replace(old, pod="x", **later)) is None


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        ("3h", None, (-3, 0)),
        ("3h", "2h", (-3, -1)),
        ("150m", "90m", (-3, -1)),
        ("2d", "0m", (-48, 0)),
    ],
)
def test_whole_hours_are_made_again_up_to_the_last_that_is_final(
    first: str, last: str | None, expected: tuple[int, int]
) -> None:
    now_ms = START_MS + SETTLED_MS
    replayed = final_hours(parse_time(first), parse_time(last) if last else None, now_ms)
    offset_ms = SETTLED_MS // HOUR_MS * HOUR_MS
    assert replayed == Range(*(START_MS + offset_ms + hours * HOUR_MS for hours in expected))


def test_samples_are_attributed_again_up_to_those_that_are_settled() -> None:
    latest_ms = START_MS - SETTLED_MS_OF_SAMPLES
    assert attributable_time(parse_time("2h"), None, START_MS) == Range(START_MS - 2 * HOUR_MS, latest_ms)
    assert attributable_time(parse_time("2h"), parse_time("1h"), START_MS) == Range(
        START_MS - 2 * HOUR_MS, START_MS - HOUR_MS
    )
    with pytest.raises(ValueError, match="there is no time between it and --to"):
        attributable_time(parse_time("1h"), parse_time("2h"), START_MS)


def test_the_pipelines_own_prefix_is_no_target() -> None:
    arguments = ["--kafka", "127.0.0.1:1", "--topic-prefix", "a.", "--from", "1h", "--into", "a."]
    refused = CliRunner().invoke(replay, arguments)
    assert refused.exit_code == 2
    assert "--into: it is the prefix of the pipeline itself" in refused.output


def test_a_time_without_a_final_hour_is_refused_with_the_last_one() -> None:
    with pytest.raises(ValueError, match="no hour in that time is final: the last that is ended at 2026-11-2"):
        final_hours(parse_time("0m"), None, START_MS + SETTLED_MS)
