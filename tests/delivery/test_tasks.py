"""Tasks and events: waiting ends in time, work ends with a stop, parts end together."""

import asyncio

import pytest

from delivery.tasks import TURN_S, Turns, running, set_within, until_stopped


async def test_waiting_reports_whether_the_event_was_set_in_time() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)

    assert await set_within(event, 60.0)
    assert await set_within(event, 0.0)
    assert not await set_within(asyncio.Event(), 0.0)


async def test_work_that_ends_is_waited_for() -> None:
    calls = []

    async def work() -> None:
        await asyncio.sleep(0)
        calls.append("work")

    assert await until_stopped(asyncio.Event(), work())
    assert calls == ["work"]


async def test_a_stop_ends_work_that_hangs_and_lets_it_clean_up() -> None:
    stop, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("put away")

    asyncio.get_running_loop().call_soon(stop.set)
    assert not await until_stopped(stop, work())
    assert ended == ["put away"]


async def test_an_exception_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await until_stopped(asyncio.Event(), work())


async def test_an_exception_of_a_nested_part_is_raised_and_the_others_are_cancelled() -> None:
    first, cancelled = ValueError("first"), asyncio.Event()

    async def fails() -> None:
        raise ExceptionGroup("all", [ExceptionGroup("inner", [first, KeyError()]), OSError()])

    async def lasts() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ValueError, match="first"):
        async with running(lasts(), fails()):
            await asyncio.Event().wait()
    assert cancelled.is_set()


async def test_the_parts_end_with_the_block_that_they_run_beside() -> None:
    async with running(asyncio.Event().wait()):  # type: ignore[arg-type]
        await asyncio.sleep(0)


async def test_tasks_with_much_to_do_let_the_loop_serve_others_between_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s, piece_s, turns, done = 0.0, 0.001, Turns(), list[str]()
    monkeypatch.setattr("delivery.tasks.time.monotonic", lambda: clock_s)

    async def work(name: str, pieces: int) -> None:
        nonlocal clock_s
        for _ in range(pieces):
            await turns.next()
            clock_s += piece_s
        done.append(name)

    workers = [asyncio.create_task(work(name, pieces)) for name, pieces in (("long", 300), ("a", 3), ("b", 3))]
    longest_s = 0.0
    while not all(worker.done() for worker in workers):
        before_s = clock_s
        await asyncio.sleep(0)
        longest_s = max(longest_s, clock_s - before_s)

    assert longest_s <= TURN_S + piece_s
    assert done == ["long", "a", "b"]
    assert clock_s == pytest.approx(306 * piece_s)
