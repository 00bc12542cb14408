"""How late the event loop was in the last minute."""

import asyncio

from delivery.lateness import LoopLateness
from tests.clock import run


def test_it_is_the_worst_of_the_last_minute() -> None:
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
