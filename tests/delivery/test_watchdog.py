"""A watchdog ends a process that hangs, and not one that only seems to hang."""

import asyncio
import threading

import msgspec
import pytest

from delivery.watchdog import Deadlines, LoopLateness, Pulse, StallDetector, Watchdog
from tests.clock import run

DEADLINES = Deadlines(start=120, beat=60, progress=90)
IDLE = Pulse(beat=0, progress=0, turns=0, working=False, ready=True, reachable=0)


class SimulatedProcess:
    """A process as the detector sees it, with one check a second."""

    def __init__(self) -> None:
        self.detector = StallDetector(DEADLINES)
        self.pulse = IDLE

    def run(self, seconds: int, **stands_still: object) -> str | None:
        """Check once a second, with all counters moving except the given ones. Returns the first verdict, if any."""
        for _ in range(seconds):
            moves = {name: getattr(self.pulse, name) + 1 for name in ("beat", "progress", "turns", "reachable")}
            self.pulse = msgspec.structs.replace(self.pulse, **(moves | stands_still))
            if verdict := self.detector.check(self.pulse):
                return verdict
        return None


def test_a_process_that_works_is_never_ended() -> None:
    assert SimulatedProcess().run(100_000, working=True) is None


def test_an_idle_process_is_never_ended() -> None:
    assert SimulatedProcess().run(100_000, working=False, progress=0) is None


def test_an_event_loop_that_hangs_ends_the_process() -> None:
    process = SimulatedProcess()
    assert process.run(60, beat=0, turns=0, progress=0, reachable=0) is None
    assert "event loop" in str(process.run(1, beat=0, turns=0, progress=0, reachable=0))


def test_records_that_are_never_finished_end_the_process() -> None:
    process = SimulatedProcess()
    assert process.run(90, working=True, progress=0) is None
    assert "none was finished" in str(process.run(2, working=True, progress=0))


def test_a_broker_that_is_away_ends_nothing() -> None:
    assert SimulatedProcess().run(100_000, working=True, progress=0, reachable=0) is None
    assert SimulatedProcess().run(100_000, ready=False, progress=0, turns=0, reachable=0) is None


def test_a_reader_that_never_gets_ready_ends_the_process() -> None:
    process = SimulatedProcess()
    assert process.run(120, ready=False, progress=0) is None
    assert "not ready" in str(process.run(2, ready=False, progress=0))


def test_state_that_takes_long_to_read_ends_nothing_while_it_is_read() -> None:
    assert SimulatedProcess().run(10_000, ready=False, working=True) is None


def test_a_reader_that_no_longer_polls_ends_the_process_even_with_nothing_open() -> None:
    process = SimulatedProcess()
    assert process.run(90, turns=0, progress=0) is None
    assert "looked for" in str(process.run(2, turns=0, progress=0))


def test_a_wait_that_ends_in_time_starts_the_count_again() -> None:
    process = SimulatedProcess()
    for _ in range(10):
        assert process.run(80, working=True, progress=process.pulse.progress) is None
        assert process.run(1, working=True) is None


def test_a_process_that_was_suspended_has_not_stalled() -> None:
    process = SimulatedProcess()
    process.run(10, working=True)
    suspended = process.pulse  # for hours, but without a check: the next check is a second later
    assert process.detector.check(suspended) is None
    assert process.run(10, working=True) is None


def test_the_first_check_has_nothing_to_compare_with() -> None:
    assert StallDetector(Deadlines(start=0, beat=0, progress=0)).check(IDLE) is None


@pytest.mark.slow
def test_a_watchdog_whose_check_fails_ends_the_process() -> None:
    reasons: list[str] = []
    process_ended = threading.Event()

    def fail(reason: str) -> None:
        reasons.append(reason)
        process_ended.set()

    def broken() -> Pulse:
        raise RuntimeError("dictionary changed size during iteration")

    Watchdog(broken, DEADLINES, fail=fail).start()
    assert process_ended.wait(10)
    assert "dictionary changed size" in reasons[0]


def test_a_watchdog_that_is_stopped_ends_nothing() -> None:
    reasons: list[str] = []
    watchdog = Watchdog(lambda: IDLE, Deadlines(start=0, beat=0, progress=0), fail=reasons.append)
    watchdog.stop()
    watchdog.run()
    assert reasons == []


# -- how late the event loop was in the last minute


def test_the_lateness_is_the_worst_of_the_last_minute() -> None:
    lateness = LoopLateness()
    assert lateness.worst_s() == 0.0
    for now_s, late_s in ((0.0, 0.5), (10.0, 3.0), (20.0, 0.1), (50.0, 1.0)):
        lateness.note(now_s, late_s)
    assert lateness.worst_s() == 3.0
    lateness.note(71.0, 0.2)
    assert lateness.worst_s() == 1.0
    lateness.note(140.0, 0.0)
    assert lateness.worst_s() == 0.0


def test_a_loop_with_nothing_else_to_do_is_not_late() -> None:
    async def watch_a_while() -> float:
        lateness = LoopLateness()
        watching = asyncio.create_task(lateness.watch())
        await asyncio.sleep(5)
        watching.cancel()
        return lateness.worst_s()

    assert run(watch_a_while()) < 1e-6
