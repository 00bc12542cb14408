"""How time is booked: what time a tick counts for, what clocks may do, and when windows close."""

import sys
from typing import Any

import msgspec
import pytest

from gpustream.replay import PartitionReplay
from gpustream.usage.read import Range
from streams.usage.bookkeeper import Bookkeeper
from streams.usage.books import Accounting, decode, encode
from streams.usage.tick import CountedTick
from streams.usage.tick import decode as decode_tick
from tests.growth import kept
from tests.streams.usage.made import START_MS, BookkeeperHarness, gpu, holder, mig, tick
from topics.attributed import Workload
from topics.times import MAX_TIME_MS
from topics.usage import HOUR_MS, MINUTE_MS

A = holder("a")


def held_ms(harness: BookkeeperHarness, pod: str = "a", start_ms: int = 0) -> int:
    return harness.window(start_ms, MINUTE_MS)["GPU-a", "held", pod].device_ms


def seconds(first: int, last: int, *devices: Any, step: int = 1, **fields: Any) -> list[CountedTick]:
    return [tick(second * 1000, *devices, **fields) for second in range(first, last + 1, step)]


def test_the_example_of_the_page_is_counted_as_it_says() -> None:
    free, busy, idle = gpu("GPU-a", busy=0.0), gpu("GPU-a", A, busy=0.9), gpu("GPU-a", A, busy=0.0)
    harness = BookkeeperHarness().play(*seconds(0, 20, free), *seconds(21, 40, busy))
    for second in range(48, 61):
        harness.book(tick(second * 1000, idle, run_id=2))
    rows = harness.window(0, MINUTE_MS)
    assert {key: (row.device_ms, row.slice_ms, row.used_us, row.idle_ms) for key, row in rows.items()} == {
        ("GPU-a", "free", None): (20_000, 140_000, 0, 0),
        ("GPU-a", "held", "a"): (32_000, 224_000, 18_000_000, 12_000),
        ("GPU-a", "unobserved", None): (8_000, 56_000, 0, 0),
    }


def test_a_tick_stands_for_the_time_since_the_one_before_of_its_run() -> None:
    harness = BookkeeperHarness().play(*seconds(10, 70, gpu("GPU-a", A)))
    minute = harness.window(0, MINUTE_MS)
    assert (minute["GPU-a", "held", "a"].device_ms, minute["GPU-a", "unobserved", None].device_ms) == (50_000, 10_000)


def test_a_gap_of_more_than_three_intervals_is_unobserved() -> None:
    harness = BookkeeperHarness().play(
        tick(0, gpu("GPU-a", A)), tick(10_000, gpu("GPU-a", A)), *seconds(11, 60, gpu("GPU-a", A))
    )
    minute = harness.window(0, MINUTE_MS)
    assert (minute["GPU-a", "held", "a"].device_ms, minute["GPU-a", "unobserved", None].device_ms) == (53_000, 7_000)


def test_a_producer_that_does_not_say_its_interval_is_taken_to_have_ten_seconds() -> None:
    harness = BookkeeperHarness().play(
        *[tick(second, gpu("GPU-a", A), interval_ms=None) for second in (0, 25_000, 60_000)]
    )
    assert (held_ms(harness), harness.window(0, MINUTE_MS)["GPU-a", "unobserved", None].device_ms) == (55_000, 5_000)


def test_a_clock_that_was_set_back_counts_no_time_twice() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 30, gpu("GPU-a", A)))
    outcomes = [
        harness.book(tick(second * 1000, gpu("GPU-a", holder("b")), run_id=2, offset=10_000 + second)).outcome
        for second in range(11, 61)
    ]
    minute = harness.window(0, MINUTE_MS)
    assert (held_ms(harness), held_ms(harness, "b")) == (30_000, 30_000)
    assert sum(row.device_ms for row in minute.values()) == 60_000
    assert (outcomes[0], outcomes[1], outcomes[-1]) == ("behind", "behind", "booked")


def test_a_tick_that_is_a_minute_ahead_of_its_log_time_is_not_booked() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 10, gpu("GPU-a", A)))
    assert harness.book(tick(HOUR_MS, gpu("GPU-a", A)), START_MS + 11_000).outcome == "ahead"
    for second in range(12, 61):
        harness.book(tick(second * 1000, gpu("GPU-a", A), run_id=2, offset=50_000 + second))
    minute = harness.window(0, MINUTE_MS)
    assert (minute["GPU-a", "held", "a"].device_ms, minute["GPU-a", "unobserved", None].device_ms) == (58_000, 2_000)


def test_a_run_whose_first_tick_is_ahead_stands_for_no_time_before_it() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 10, gpu("GPU-a", A)))
    harness.book(tick(HOUR_MS, gpu("GPU-a", holder("b")), run_id=2, offset=50_000), START_MS + 11_000)
    for second in range(12, 61):
        harness.book(
            tick(second * 1000, gpu("GPU-a", holder("b")), run_id=2, seq=40_000 + second, offset=50_000 + second)
        )
    assert (held_ms(harness), held_ms(harness, "b")) == (10_000, 48_000)


def test_no_time_is_counted_of_two_runs_whose_ticks_come_in_turn() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 20, gpu("GPU-a", A)))
    for second in range(21, 61):
        harness.book(tick(second * 1000, gpu("GPU-a", A), run_id=1 + second % 2))
    minute = harness.window(0, MINUTE_MS)
    assert (held_ms(harness), minute["GPU-a", "unobserved", None].device_ms) == (20_000, 40_000)


def test_a_tick_that_was_read_before_is_not_booked_again() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 30, gpu("GPU-a", A)))
    assert harness.book(tick(20_000, gpu("GPU-a", A))).outcome == "replayed"
    assert held_ms(harness.play(*seconds(31, 60, gpu("GPU-a", A)))) == 60_000


def test_a_tick_of_an_earlier_run_that_was_read_before_changes_nothing() -> None:
    first, second = seconds(0, 20, gpu("GPU-a", A)), seconds(21, 30, gpu("GPU-a", A), run_id=2)
    harness = BookkeeperHarness().play(*first, *second)
    assert [harness.book(counted).outcome for counted in (*first, *second)] == ["replayed"] * 31
    harness.play(*seconds(31, 60, gpu("GPU-a", A), run_id=2))
    assert held_ms(harness) == 59_000  # the first tick of a run stands for no time


def test_the_books_after_a_tick_are_later_ones_also_if_the_offsets_of_the_log_began_again() -> None:
    harness, ticks = BookkeeperHarness(), seconds(0, 20, gpu("GPU-a", A))
    orders = []
    for counted in (*ticks, *[tick(s * 1000, gpu("GPU-a", A), offset=s - 21) for s in range(21, 31)]):
        harness.book(counted)
        orders.append(harness.keeper.books.order)
    assert orders == sorted(set(orders))


def test_a_tick_is_divided_where_a_minute_begins_and_its_parts_sum() -> None:
    energy = [{"energy_joules_total": joules} for joules in (1.0, 1.007)]
    first, second = (tick(59_000 + n * 2000, gpu("GPU-a", A, metrics=energy[n], busy=0.3333333)) for n in range(2))
    harness = BookkeeperHarness().play(first, second, *seconds(62, 120, gpu("GPU-a", A, metrics=energy[1], busy=0)))
    first_minute, second_minute = (harness.window(start, MINUTE_MS)["GPU-a", "held", "a"] for start in (0, MINUTE_MS))
    assert (first_minute.device_ms, second_minute.device_ms, first_minute.energy_mj + second_minute.energy_mj) == (
        1000,
        60_000,
        7,
    )
    assert first_minute.used_us + second_minute.used_us == 2000 * 333_333 // 1000


def test_a_gpu_is_in_the_books_of_the_whole_hour_in_which_it_comes_or_goes() -> None:
    harness = BookkeeperHarness().play(
        *seconds(600, 610, gpu("GPU-a", A), gpu("GPU-b")), *seconds(611, 4900, gpu("GPU-a", A))
    )
    hour = harness.window()
    of_b = {category: row.device_ms for (uuid, category, _), row in hour.items() if uuid == "GPU-b"}
    assert of_b == {"free": 10_000, "unobserved": HOUR_MS - 10_000}
    assert hour["GPU-a", "unobserved", None].device_ms == 600_000
    assert {row.uuid for row in harness.window(HOUR_MS, MINUTE_MS).values()} == {"GPU-a"}
    assert all(row.final for row in hour.values())


def test_the_minutes_before_a_gpu_came_are_as_final_as_those_of_the_others() -> None:
    a, b = gpu("GPU-a", A), gpu("GPU-b")
    ticks = [tick(s * 1000, *([a] if s <= 1800 else [a, b]), interval_ms=10_000) for s in range(0, 1811, 10)]
    harness = BookkeeperHarness().play(*ticks)
    minutes = [row for row in harness.written if row.uuid == "GPU-b" and row.end_ms - row.start_ms == MINUTE_MS]
    assert [(row.start_ms - START_MS, row.revision, row.final) for row in minutes] == [
        (n * MINUTE_MS, int(n < 10), n < 10) for n in range(30)
    ]


@pytest.mark.parametrize(
    ("model", "info", "slices"),
    [("NVIDIA A30", {"mig_mode": "disabled"}, 4), ("H100", {"mig_mode": "disabled"}, 7), ("H100", {}, 1)],
)
def test_a_gpu_whose_slices_are_not_reported_has_those_of_its_model_if_it_can_be_cut(
    model: str, info: dict[str, str], slices: int
) -> None:
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", A, model=model, info=info, compute_slices=None)))
    row = harness.window(0, MINUTE_MS)["GPU-a", "held", "a"]
    assert (row.of, row.slice_ms) == (slices, 60_000 * slices)


def test_a_gpu_that_has_mig_devices_can_be_cut_though_its_tick_says_no_more_of_it() -> None:
    devices = gpu(compute_slices=None), mig("MIG-1", "3g.40gb", A), mig("MIG-2", "3g.40gb", holder("b"))
    window = BookkeeperHarness().play(*seconds(0, 60, *devices)).window(0, MINUTE_MS)

    assert {key[:2]: (row.of, row.slice_ms) for key, row in window.items() if row.device_ms} == {
        ("MIG-1", "held"): (7, 3 * MINUTE_MS),
        ("MIG-2", "held"): (7, 3 * MINUTE_MS),
        ("GPU-a", "free"): (7, MINUTE_MS),
    }


def test_a_device_that_does_not_answer_is_lost_whoever_holds_it() -> None:
    harness = BookkeeperHarness().play(
        *seconds(0, 29, gpu("GPU-a", A)), *seconds(30, 60, gpu("GPU-a", A, state="lost"))
    )
    assert (held_ms(harness), harness.window(0, MINUTE_MS)["GPU-a", "lost", None].slice_ms) == (29_000, 31_000 * 7)


def test_the_time_of_a_device_whose_holders_are_not_known_rests_on_nothing() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", A), gpu("GPU-b", attribution="none")))
    rows = harness.window(0, MINUTE_MS)
    assert {key: (row.exact_ms, row.none_ms) for key, row in rows.items()} == {
        ("GPU-a", "held", "a"): (60_000, 0),
        ("GPU-b", "free", None): (0, 60_000),
    }


def test_a_mig_device_that_a_tick_has_twice_counts_once() -> None:
    twice = [mig("MIG-1", "1g.10gb", A)] * 2
    window = BookkeeperHarness().play(*seconds(0, 60, gpu(), *twice)).window(0, MINUTE_MS)
    device_and_slice_ms = {key[:2]: (row.device_ms, row.slice_ms) for key, row in window.items() if row.device_ms}
    assert device_and_slice_ms == {
        ("MIG-1", "held"): (MINUTE_MS, MINUTE_MS),
        ("GPU-a", "free"): (MINUTE_MS, 6 * MINUTE_MS),
    }


def test_slices_that_were_not_cut_are_free_and_mig_on_and_off_within_a_minute_sums() -> None:
    cut = [gpu("GPU-a"), mig("MIG-1", "1c.3g.40gb", A), mig("MIG-2", "2g.20gb")]
    harness = BookkeeperHarness().play(*seconds(0, 30, gpu("GPU-a", A)), *seconds(31, 60, *cut))
    minute = harness.window(0, MINUTE_MS)
    assert {key: row.slice_ms for key, row in minute.items()} == {
        ("GPU-a", "held", "a"): 30_000 * 7,
        ("MIG-1", "held", "a"): 30_000,
        ("MIG-2", "free", None): 30_000 * 2,
        ("GPU-a", "free", None): 30_000 * 4,
    }
    assert {row.gpu_uuid for row in minute.values()} == {"GPU-a"}


@pytest.mark.parametrize(
    ("split", "expected"), [("used", {"a": 45_000, "b": 15_000}), ("equal", {"a": 30_000, "b": 30_000})]
)
def test_a_shared_device_is_divided_by_the_policy(split: Any, expected: dict[str, int]) -> None:
    both = gpu("GPU-a", holder("a", 0.6), holder("b", 0.1), busy=0.8)
    harness = BookkeeperHarness(Accounting(split=split)).play(*seconds(0, 60, both))
    minute = harness.window(0, MINUTE_MS)
    assert {pod: held_ms(harness, pod) for pod in "ab"} == expected
    used = {pod: minute["GPU-a", "held", pod].used_us for pod in "ab"}
    assert used == {"a": 39_000_000, "b": 9_000_000}
    assert {row.policy for row in minute.values()} == {split}


def test_a_pod_that_was_not_given_the_device_is_charged_what_it_used() -> None:
    both = gpu("GPU-a", holder("a", 0.2), holder("b", 0.1, observed=True), busy=0.3)
    harness = BookkeeperHarness().play(*seconds(0, 60, both))
    assert (held_ms(harness, "a"), held_ms(harness, "b")) == (54_000, 6_000)


def test_a_pod_that_holds_a_device_and_does_nothing_with_it_is_idle_in_that_tick() -> None:
    idle, busy = gpu("GPU-a", A, busy=0.0), gpu("GPU-a", A, busy=0.2)
    harness = BookkeeperHarness().play(*seconds(0, 20, idle), *seconds(21, 40, busy), *seconds(41, 60, idle))
    assert harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].idle_ms == 40_000


def test_a_batch_job_that_does_nothing_beside_one_that_works_is_idle() -> None:
    used = {"41": 0.0, "42": 0.8}
    processes = [{"pid": int(job), "job_id": job, "sm_utilization_ratio": part} for job, part in used.items()]
    jobs = [holder(job, part, pod_uid=job) for job, part in used.items()]
    shared = gpu("GPU-a", *jobs, busy=0.9, unattributed={"utilization_ratio": 0.1}, processes=processes)
    minute = BookkeeperHarness().play(*seconds(0, 61, shared)).window(lasts_ms=MINUTE_MS)
    rows = [minute["GPU-a", "held", job] for job in used]
    assert [row.idle_ms == row.device_ms for row in rows] == [True, False]


def test_the_energy_is_that_of_the_counter_and_a_counter_that_was_reset_counts_from_zero() -> None:
    counter = [100.0 + second * 0.25 for second in range(31)] + [second * 0.5 for second in range(30)]
    ticks = [
        tick(second * 1000, gpu("GPU-a", A, metrics={"energy_joules_total": joules, "power_watts": 999}))
        for second, joules in enumerate(counter)
    ]
    harness = BookkeeperHarness().play(*ticks)
    assert harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].energy_mj == 7_500 + 14_500


def test_without_a_counter_the_energy_is_computed_from_the_power() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", A, metrics={"power_watts": 250.5})))
    assert harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].energy_mj == 15_030_000


def test_energy_that_was_drawn_in_a_gap_is_unattributed() -> None:
    def drew(joules: float) -> Any:
        return gpu("GPU-a", A, metrics={"energy_joules_total": joules})

    harness = BookkeeperHarness().play(
        *[tick(ms, drew(ms / 1000)) for ms in (0, 1000, 11_000, 12_000)], *seconds(13, 60, drew(12))
    )
    minute = harness.window(0, MINUTE_MS)
    assert (minute["GPU-a", "held", "a"].energy_mj, minute["GPU-a", "unobserved", None].energy_mj) == (5_000, 7_000)


@pytest.mark.parametrize(("ends_s", "first_s"), [(3590, 3610), (3590, 3700), (3590, 7300), (3600, 3630), (10, 7210)])
def test_energy_that_was_drawn_in_a_gap_adds_up_over_the_hours(ends_s: int, first_s: int) -> None:
    def drew(second: int) -> Any:
        return gpu("GPU-a", A, metrics={"energy_joules_total": 300.0 * second})

    harness, stop_s = BookkeeperHarness(), 3 * 3600
    for second in (*range(0, ends_s + 1, 10), *range(first_s, stop_s + 1, 10)):
        harness.book(tick(second * 1000, drew(second), interval_ms=10_000, run_id=1 if second <= ends_s else 2))
    hours = [row for key, row in harness.records.items() if key[0] == HOUR_MS]
    assert sum(row.energy_mj for row in hours) == 300_000 * stop_s


def metered(joules: float) -> Any:
    return gpu("GPU-a", A, metrics={"energy_joules_total": joules})


def test_the_energy_of_a_tick_after_a_silence_is_the_same_whether_the_silence_was_closed_or_not() -> None:
    harness = BookkeeperHarness().play(tick(10_000, metered(0.0)), tick(1_510_000, metered(957_230.0)))
    harness.silent(3 * HOUR_MS)
    minute = harness.window(25 * MINUTE_MS, MINUTE_MS)
    assert minute["GPU-a", "held", "a"].energy_mj == 957_230_000 * 3 // 1_500
    assert sum(row.energy_mj for row in harness.window().values()) == 957_230_000


def test_the_energy_of_minutes_that_were_closed_before_their_ticks_came_is_unobserved() -> None:
    harness = BookkeeperHarness().play(tick(0, metered(0.0)))
    for second in range(1, 1560):
        harness.book(tick(second * 1000, metered(300.0 * second)), START_MS + 1_560_000)
    harness.silent(3 * HOUR_MS)
    energy_mj = {category: row.energy_mj for (_, category, _), row in harness.window().items()}
    assert sum(energy_mj.values()) == 1559 * 300_000
    assert energy_mj["unobserved"] == 360 * 300_000


def test_a_replay_divides_energy_as_it_was_live_though_the_clock_was_behind_the_log() -> None:
    lag_ms, ticks = 30 * MINUTE_MS, list[tuple[CountedTick, int]]()
    for second in (*range(0, 100, 10), *range(7300, 7400, 30), *range(7500, 12_000, 10)):
        counted = tick(second * 1000, metered(301.7 * second), interval_ms=10_000, run_id=second // 100)
        ticks.append((counted, counted.ts_ms + lag_ms))
    live, replay = BookkeeperHarness(), BookkeeperHarness(Accounting(live=False))
    for counted, logged_ms in ticks:
        live.book(counted, logged_ms)
        replay.book(counted, logged_ms)
    assert live.window(2 * HOUR_MS) == replay.window(2 * HOUR_MS)
    for minute in range(120, 180):
        assert live.window(minute * MINUTE_MS, MINUTE_MS) == replay.window(minute * MINUTE_MS, MINUTE_MS)


def test_a_minute_is_written_when_it_is_over_and_final_twenty_minutes_later() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", A)))
    assert [(row.revision, row.final) for row in harness.written if row.end_ms - row.start_ms == MINUTE_MS] == [
        (0, False)
    ]
    harness.play(*seconds(61, 21 * 60 - 1, gpu("GPU-a", A)))
    assert not harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].final
    harness.play(tick(21 * MINUTE_MS, gpu("GPU-a", A)))
    last = harness.window(0, MINUTE_MS)["GPU-a", "held", "a"]
    assert (last.revision, last.device_ms, last.final) == (1, 60_000, True)


def test_an_hour_grows_once_a_minute() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 185, gpu("GPU-a", A)))
    hours = [row for row in harness.written if row.end_ms - row.start_ms == HOUR_MS]
    assert [(row.revision, row.device_ms, row.final) for row in hours] == [
        (0, 60_000, False), (1, 120_000, False), (2, 180_000, False),
    ]  # fmt: skip


def test_a_node_that_is_silent_is_closed_by_the_time_of_the_log() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 90, gpu("GPU-a", A)))
    harness.silent(21 * MINUTE_MS)
    assert not harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].final
    harness.silent(22 * MINUTE_MS)
    minute = harness.window(MINUTE_MS, MINUTE_MS)
    assert (held_ms(harness, start_ms=MINUTE_MS), minute["GPU-a", "unobserved", None].device_ms) == (30_000, 30_000)
    harness.silent(HOUR_MS + 20 * MINUTE_MS)
    hour = harness.window()
    assert (hour["GPU-a", "held", "a"].device_ms, hour["GPU-a", "unobserved", None].device_ms) == (90_000, 3_510_000)
    assert all(row.final for row in hour.values())
    assert harness.keeper.books.hours == []


def test_a_node_that_is_read_every_half_hour_is_not_silent_between_its_ticks() -> None:
    harness = BookkeeperHarness()
    for minute in range(4 * 60 + 31):
        if minute % 30 == 0:
            harness.book(tick(minute * MINUTE_MS, gpu("GPU-a", A), interval_ms=30 * MINUTE_MS))
        harness.silent(minute * MINUTE_MS)
    for hour in range(4):
        assert {key: row.device_ms for key, row in harness.window(hour * HOUR_MS).items() if row.device_ms} == {
            ("GPU-a", "held", "a"): HOUR_MS
        }
    harness.silent(6 * HOUR_MS + 30 * MINUTE_MS)
    assert harness.window(4 * HOUR_MS)["GPU-a", "unobserved", None].device_ms == 30 * MINUTE_MS


def test_a_tick_that_comes_after_its_window_was_closed_is_booked_by_a_replay_only() -> None:
    late_ticks, live, replay = (
        seconds(91, 4900, gpu("GPU-a", A)),
        BookkeeperHarness(),
        BookkeeperHarness(Accounting(generation=1, live=False)),
    )
    for harness in (live, replay):
        harness.play(*seconds(0, 90, gpu("GPU-a", A)))
        for late_tick in late_ticks:
            harness.book(late_tick, START_MS + 2 * HOUR_MS)
    assert live.window()["GPU-a", "held", "a"].device_ms == 90_000
    assert {key: row.device_ms for key, row in replay.window().items()} == {("GPU-a", "held", "a"): HOUR_MS}


def test_a_replay_writes_whole_hours_only_each_with_its_minutes() -> None:
    replay = PartitionReplay(Range(START_MS + HOUR_MS, START_MS + 3 * HOUR_MS), Accounting(generation=3))
    ticks = seconds(0, 3 * 3600, gpu("GPU-a", A), step=2)
    records = [row for counted_tick in ticks for row in replay.book(counted_tick, counted_tick.ts_ms)] + replay.end(0)
    assert {row.start_ms // HOUR_MS * HOUR_MS - START_MS for row in records} == {HOUR_MS}
    assert [row.end_ms - row.start_ms for row in records].count(MINUTE_MS) == 60
    assert {(row.generation, row.final) for row in records} == {(3, True)}


@pytest.mark.parametrize("away_s", [1300, 3000, 5003])
def test_a_replay_divides_energy_that_was_drawn_in_a_silence_as_it_was_live(away_s: int) -> None:
    ticks = [
        tick(second * 1000, gpu("GPU-a", A, metrics={"energy_joules_total": 301.7 * second}), interval_ms=10_000)
        for second in (*range(0, 1001, 10), *range(1001 + away_s, 13_000, 10))
    ]
    harness = BookkeeperHarness().play(*ticks)
    replay = PartitionReplay(Range(START_MS, MAX_TIME_MS), Accounting(generation=1))
    records = [row for counted_tick in ticks for row in replay.book(counted_tick, counted_tick.ts_ms)]
    energy_by_window = {(row.end_ms, *row.key): row.energy_mj for row in records}
    live = {(row.end_ms, *row.key): row.energy_mj for row in harness.written if row.final}
    assert len(energy_by_window) > 60
    assert {key: live[key] for key in energy_by_window} == energy_by_window


def test_the_team_is_the_pods_before_the_namespaces() -> None:
    spaces: Any = {"namespace_labels": {"team": "space"}}
    first, second = holder("a", labels={"team": "own"}, **spaces), holder("b", **spaces)
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", first), gpu("GPU-b", second)))
    minute = harness.window(0, MINUTE_MS)
    assert (minute["GPU-a", "held", "a"].team, minute["GPU-b", "held", "b"].team) == ("own", "space")


def test_a_row_names_the_workload_of_its_holder() -> None:
    held = holder("a", workload={"kind": "Job", "name": "train"})
    harness = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", held)))
    assert harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].workload == Workload("Job", "train")


def test_labels_that_change_are_those_of_the_last_tick_and_the_time_is_one_row() -> None:
    first, second = (gpu("GPU-a", holder("a", labels={"team": team})) for team in ("x", "y"))
    harness = BookkeeperHarness().play(*seconds(0, 30, first), *seconds(31, 60, second))
    assert (harness.window(0, MINUTE_MS)["GPU-a", "held", "a"].team, held_ms(harness)) == ("y", 60_000)


def test_labels_that_change_with_each_tick_cost_the_books_an_account_a_minute_and_the_last_of_each_counts() -> None:
    harness = BookkeeperHarness()
    for second in range(1200):
        harness.book(tick(second * 1000, gpu("GPU-a", holder("a", labels={"step": f"{second}"}))))
    assert len(harness.keeper.books.accounts) <= 20 + 1
    labels = [harness.window(minute * 60_000, MINUTE_MS)["GPU-a", "held", "a"].labels for minute in range(19)]
    assert labels == [{"step": f"{60 * minute + 60}"} for minute in range(19)]
    assert {held_ms(harness, start_ms=minute * 60_000) for minute in range(19)} == {60_000}


def test_pods_with_large_labels_that_come_and_go_leave_room_in_the_books_and_keep_their_teams() -> None:
    harness, large = BookkeeperHarness(), {f"app.kubernetes.io/{number}": "x" * 60 for number in range(100)}
    for second in range(0, 3600, 5):
        labels = {"team": "own"} if second % 20 == 0 else {**large, "team": "own"}  # of some they come later
        pod = holder(f"p{second // 10}", labels=labels, namespace_labels={"team": "space", "tier": "1"})
        harness.book(tick(second * 1000, gpu("GPU-a", pod), interval_ms=5000))
        if second == 1800:
            harness.keeper = Bookkeeper(decode(encode(harness.keeper.books)), harness.policy)
    assert len(encode(harness.keeper.books)) < 1_300_000
    rows = [row for (_, category, _), row in harness.window().items() if category == "held"]
    assert {row.team for row in rows} == {"own"}
    assert sum(row.device_ms for row in rows) == 3595_000 // MINUTE_MS * MINUTE_MS
    assert (len(rows[0].labels), len(rows[-1].labels)) == (101, 1)


def test_malformed_labels_are_refused_and_nothing_is_booked() -> None:
    harness = BookkeeperHarness().play(tick(0, gpu("GPU-a", A)))
    with pytest.raises(msgspec.DecodeError):
        harness.book(tick(1000, gpu("GPU-a", holder("a", labels=[1]))))
    assert held_ms(harness.play(*seconds(2, 60, gpu("GPU-a", A)))) == 60_000


def test_malformed_labels_of_the_node_are_refused_and_nothing_is_booked() -> None:
    harness = BookkeeperHarness().play(tick(0, gpu("GPU-a", A)))
    with pytest.raises(msgspec.DecodeError):
        harness.book(tick(1000, gpu("GPU-a", A), node_labels=[1]))
    assert held_ms(harness.play(*seconds(2, 60, gpu("GPU-a", A)))) == 60_000


@pytest.mark.parametrize("field", ["labels", "namespace_labels", "workload", "node_labels"])
def test_labels_and_workloads_that_are_no_utf_8_are_refused_like_all_that_is_malformed(field: str) -> None:
    fields: dict[str, Any] = {field: {"kind": "Job", "name": "MARK"}}
    good = tick(0, gpu("GPU-a", A), **fields) if field == "node_labels" else tick(0, gpu("GPU-a", A | fields))
    bad = decode_tick(msgspec.json.encode(good).replace(b"MARK", b"\xff"))
    with pytest.raises(msgspec.DecodeError):
        BookkeeperHarness().book(bad)


@pytest.mark.parametrize(
    "ahead_ms", [pytest.param(3_600_000, id="ahead of the log"), pytest.param(-86_400_000, id="set back by a day")]
)
def test_while_a_clock_is_wrong_the_books_do_not_grow_with_the_pods_that_come_and_go(ahead_ms: int) -> None:
    harness = BookkeeperHarness().play(tick(0, gpu("GPU-a", A)))
    accounts = dict(harness.keeper.books.accounts)
    for second in range(1, 20):
        wrong = tick(second * 1000, gpu("GPU-a", holder(f"pod-{second}")), run_id=2, ts_ms=START_MS + ahead_ms + second)
        assert harness.book(wrong, START_MS + second * 1000).outcome in ("ahead", "behind")
    assert harness.keeper.books.accounts == accounts


def test_what_a_tick_ahead_says_of_a_gpu_counts_no_more_than_after_a_restart() -> None:
    harness, new = BookkeeperHarness().play(tick(0, gpu("GPU-a", A))), gpu("GPU-b", A, compute_slices=None)
    ahead = tick(200_000, gpu("GPU-a", A), gpu("GPU-b", A, compute_slices=4))
    assert harness.book(ahead, START_MS + 1000).outcome == "ahead"
    restarted = BookkeeperHarness()
    restarted.keeper = Bookkeeper(decode(encode(harness.keeper.books)), restarted.policy)
    for either in (harness, restarted):
        for second in range(2, 61):
            either.book(tick(second * 1000, gpu("GPU-a", A), new, run_id=2, offset=10_000 + second))
        assert held_ms(either) == 58_000
    assert harness.window() == restarted.window()


def test_while_a_clock_is_ahead_nothing_is_kept_of_mig_devices_that_are_gone() -> None:
    harness, sizes = BookkeeperHarness(), list[int]()
    for second in range(100):
        device = mig(f"MIG-{second}", "1g.10gb", holder(f"pod-{second}"))
        ahead = tick(second * 1000, gpu("GPU-a"), device)
        assert harness.book(ahead, START_MS + second * 1000 - 120_000).outcome == "ahead"
        sizes.append(kept(harness.keeper))
    assert max(sizes[50:]) <= max(sizes[10:50])


def test_gpus_that_were_replaced_are_forgotten_after_a_day() -> None:
    harness, sizes = BookkeeperHarness(), list[int]()
    for hour in range(120):
        joules = {"energy_joules_total": 3600.0 * hour}
        harness.play(*seconds(3600 * hour, 3600 * hour + 3599, gpu(f"GPU-{hour}", A, metrics=joules), step=600))
        sizes.append(len(harness.keeper.books.meters))
    assert max(sizes[:60]) == max(sizes[60:]) < 48
    assert harness.keeper._slices.keys() == harness.keeper.books.meters.keys()


def test_a_gpu_that_was_missing_for_a_day_has_what_it_drew_meanwhile() -> None:
    def meter(uuid: str, joules: float) -> Any:
        return gpu(uuid, A, metrics={"energy_joules_total": joules})

    harness = BookkeeperHarness().play(*seconds(0, 60, meter("GPU-a", 0.0), meter("GPU-b", 0.0)))
    harness.play(*seconds(61, 24 * 3600 - 1, meter("GPU-b", 0.0), step=60))
    harness.play(*seconds(24 * 3600, 24 * 3600 + 60, meter("GPU-a", 5.0), meter("GPU-b", 0.0)))
    hours = [row for (lasts_ms, *_), row in harness.records.items() if lasts_ms == HOUR_MS and row.uuid == "GPU-a"]
    assert sum(row.energy_mj for row in hours) == 5000


def test_books_are_read_back_as_they_were_written() -> None:
    harness = BookkeeperHarness().play(*seconds(0, 3700, gpu("GPU-a", A), gpu("GPU-b", holder("b")), step=5))
    assert encode(decode(encode(harness.keeper.books))) == encode(harness.keeper.books)
    restored = Bookkeeper(decode(encode(harness.keeper.books)), harness.policy)
    last = tick(3720_000, gpu("GPU-a", A))
    assert restored.book(last, last.ts_ms).records == harness.keeper.book(last, last.ts_ms).records


def test_books_do_not_keep_the_record_alive_that_they_were_read_from() -> None:
    harness = BookkeeperHarness()
    harness.play(*seconds(0, 3700, gpu("GPU-a", holder("a", labels={"app": "a"})), node_labels={"zone": "a"}, step=5))
    value = encode(harness.keeper.books)
    references = sys.getrefcount(value)
    books = decode(value)
    assert sys.getrefcount(value) == references
    assert encode(books) == value


def test_the_labels_of_a_pod_with_several_gpus_are_kept_once() -> None:
    a = holder("a", labels={"app": "a"})
    books = BookkeeperHarness().play(*seconds(0, 60, gpu("GPU-a", a), gpu("GPU-b", a))).keeper.books
    first, second = [account for account in books.accounts.values() if account.category == "held"]
    assert first.labels is second.labels
    assert first.labels == msgspec.Raw(b'{"app":"a"}')
