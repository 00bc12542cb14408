"""A producer ends when it is told to, and says first what went wrong first."""

import asyncio

import pytest

from producers.stopping import first_failure, first_of


async def test_work_that_ends_is_waited_for() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("work")

    await first_of(asyncio.Event(), work())
    assert done == ["work"]


async def test_a_stop_ends_work_that_hangs_and_what_it_has_to_put_away_is_put_away() -> None:
    stop, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("put away")

    asyncio.get_running_loop().call_soon(stop.set)
    await first_of(stop, work())
    assert ended == ["put away"]


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await first_of(asyncio.Event(), work())


def test_the_first_failure_is_found_in_groups_of_groups() -> None:
    first = ValueError("first")
    failures = ExceptionGroup("all", [ExceptionGroup("inner", [first, KeyError()]), OSError()])

    assert first_failure(failures) is first
