"""The fleet's time goes on evenly, whatever the machine's clock does."""

from producers.simulated.component import FleetClock


class Times:
    """The two clocks of a machine, in seconds."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_000.0, 50.0

    def clock(self) -> FleetClock:
        return FleetClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def go(self, seconds: float, step_s: float = 0.0) -> None:
        self.wall_s += seconds + step_s
        self.monotonic_s += seconds


def test_it_counts_from_its_start() -> None:
    times = Times()
    clock = times.clock()
    times.go(2.5)

    assert (clock.elapsed_ms(), clock.start_ms) == (2_500, 1_000_000)


def test_a_small_drift_is_ignored() -> None:
    times = Times()
    clock = times.clock()
    times.go(10.0, step_s=-0.9)

    assert (clock.elapsed_ms(), clock.start_ms) == (10_000, 1_000_000)


def test_if_the_machines_clock_steps_the_fleets_times_step_with_it() -> None:
    times = Times()
    clock = times.clock()
    times.go(10.0, step_s=-60.0)

    assert (clock.elapsed_ms(), clock.start_ms) == (10_000, 940_000)


def test_a_process_that_pauses_between_reading_the_two_clocks_sees_no_step() -> None:
    now_s = [0.0]

    def wall_s() -> float:
        now_s[0] += 5.0
        return 1_000_000.0 + now_s[0]

    clock = FleetClock(wall_s, lambda: now_s[0])
    start_ms = clock.start_ms
    times = [clock.start_ms + clock.elapsed_ms() for _ in range(5)]
    assert clock.start_ms == start_ms
    assert times == sorted(set(times))
