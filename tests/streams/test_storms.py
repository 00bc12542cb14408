"""Whatever the group, the broker and the processes do, nothing is lost and nothing unfinished is committed."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.clock import run
from tests.streams.simulation import INPUT, STATES, World

NUMBERS = st.integers(0, 1)
SHARES = st.lists(NUMBERS, min_size=2, max_size=2)
TOPIC = st.sampled_from([INPUT, *STATES])
OFFSETS = st.integers(0, 40)


class Storm:
    """The possible events. Each one is a method, and its strategy draws the arguments."""

    OPERATIONS = st.one_of(
        st.tuples(st.just("produce"), NUMBERS, st.integers(1, 30)),
        st.tuples(st.just("produce_state"), NUMBERS, st.integers(1, 12)),
        st.tuples(st.just("mark"), TOPIC, NUMBERS),
        st.tuples(st.just("compact"), TOPIC, NUMBERS, OFFSETS),
        st.tuples(st.just("retain"), TOPIC, NUMBERS, OFFSETS),
        st.tuples(st.just("rebalance"), SHARES),
        st.tuples(st.just("overlap"), SHARES),
        st.tuples(st.just("seek_again"), NUMBERS),
        st.just(("join",)),
        st.tuples(st.just("kill"), NUMBERS),
        st.tuples(st.just("commits"), st.sampled_from(["taken", "refused", "failed", "hanging", "unreachable"])),
        st.tuples(st.just("away"), st.booleans()),
        st.tuples(st.just("slow"), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.05, 0.31, 1.0, 7.0])),
    )

    def __init__(self, world: World) -> None:
        self.world = world

    async def produce(self, number: int, count: int) -> None:
        self.world.log(INPUT, number).append(count)

    async def produce_state(self, number: int, count: int) -> None:
        for topic in STATES:
            self.world.log(topic, number).append(self.world.chance.randint(0, count))

    async def mark(self, topic: str, number: int) -> None:
        self.world.log(topic, number).mark()

    async def compact(self, topic: str, number: int, offset: int) -> None:
        self.world.log(topic, number).compact(offset)

    async def retain(self, topic: str, number: int, begin: int) -> None:
        self.world.log(topic, number).retain(begin)

    async def rebalance(self, shares: list[int]) -> None:
        await self.world.rebalance(shares)

    async def overlap(self, shares: list[int]) -> None:
        rebalancing = asyncio.create_task(self.world.rebalance(shares))
        await asyncio.sleep(self.world.chance.choice((0, 0.01, 0.3)))
        await self.seek_again(0)
        await rebalancing

    async def seek_again(self, index: int) -> None:
        for process in self.world.processes[index:]:
            process.reader.end_epoch()

    async def join(self) -> None:
        if len(self.world.processes) < 3:
            self.world.join()

    async def kill(self, index: int) -> None:
        self.world.kill(index)

    async def commits(self, commits: str) -> None:
        self.world.broker.commits = commits

    async def away(self, away: bool) -> None:
        self.world.broker.away = away

    async def slow(self, slow: bool) -> None:
        self.world.slow = slow

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def weather(seed: int, operations: list[tuple[Any, ...]]) -> None:
    world = World(seed)
    world.join()
    world.log(INPUT, 0).append(12)
    world.log(STATES[0], 0).append(3)
    await world.rebalance()
    storm = Storm(world)
    for name, *arguments in operations:
        await getattr(storm, name)(*arguments)
    await world.settle()
    world.check_settled()


@given(seed=st.integers(0, 2**32), operations=st.lists(Storm.OPERATIONS, min_size=3, max_size=40))
def test_no_storm_loses_a_record_or_commits_past_an_unfinished_one(
    seed: int, operations: list[tuple[Any, ...]]
) -> None:
    run(weather(seed, operations))
