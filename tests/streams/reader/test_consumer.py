"""What stands between the reader and Faust's consumer: nothing of Faust's may fail an ordinary rebalance."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, ConsumerStoppedError, IllegalStateError, KafkaConnectionError

from delivery.ledger import Partition
from streams.reader.consumer import LosslessConsumer, ThreadClient

MINE, THEIRS = Partition("ticks", 0), Partition("ticks", 1)


class FakeConsumer:
    """The client in the thread: an assignment, and what was committed. No offsets are an error, as in the real one."""

    def __init__(self, *assigned: Partition, error: Exception | None = None) -> None:
        self.assigned, self.error = assigned, error
        self.committed: dict[TopicPartition, int] = {}
        self.sought: dict[TopicPartition, int] = {}

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(*tp) for tp in self.assigned}

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        if not offsets:
            raise ValueError(offsets)
        if self.error is not None:
            raise self.error
        self.committed |= offsets

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if tp not in self.assignment():
            raise IllegalStateError(f"{tp} is not assigned")
        self.sought[tp] = offset


def client_of(consumer: FakeConsumer) -> tuple[ThreadClient, list[None]]:
    async def call_thread(function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await function(*args)

    answers: list[None] = []
    thread = SimpleNamespace(_ensure_consumer=lambda: consumer, call_thread=call_thread)
    return ThreadClient(SimpleNamespace(_thread=thread, answered=lambda: answers.append(None))), answers  # type: ignore[arg-type]


async def test_a_commit_reaches_the_broker_and_counts_as_its_answer() -> None:
    consumer = FakeConsumer(MINE)
    client, answers = client_of(consumer)
    assert await client.commit({MINE: 5})
    assert consumer.committed == {TopicPartition("ticks", 0): 5}
    assert len(answers) == 1


async def test_a_commit_of_partitions_that_are_all_gone_is_no_failure() -> None:
    consumer = FakeConsumer()
    assert not await client_of(consumer)[0].commit({MINE: 5})
    assert consumer.committed == {}


async def test_of_a_commit_only_what_is_still_ours_is_committed() -> None:
    consumer = FakeConsumer(MINE)
    assert not await client_of(consumer)[0].commit({MINE: 5, THEIRS: 6})
    assert consumer.committed == {TopicPartition("ticks", 0): 5}


@pytest.mark.parametrize("error", [CommitFailedError("the group has already rebalanced"), IllegalStateError("gone")])
async def test_a_commit_after_the_group_has_moved_on_is_no_failure(error: Exception) -> None:
    assert not await client_of(FakeConsumer(MINE, error=error))[0].commit({MINE: 5})


async def test_a_commit_that_the_broker_refuses_is_told() -> None:
    with pytest.raises(KafkaConnectionError):
        await client_of(FakeConsumer(MINE, error=KafkaConnectionError("away")))[0].commit({MINE: 5})


async def test_every_position_is_sought_and_a_partition_that_is_gone_is_told() -> None:
    consumer = FakeConsumer(MINE)
    client, _ = client_of(consumer)
    await client.seek({MINE: 0})
    assert consumer.sought == {TopicPartition("ticks", 0): 0}
    with pytest.raises(IllegalStateError):
        await client.seek({MINE: 0, THEIRS: 3})


# -- the loop


class Loop:
    """What the drain loop sees of itself; turns raise one error after the other, then everything is to stop."""

    consumer_stopped_errors = (ConsumerStoppedError,)

    def __init__(self, *errors: BaseException | None, stopping: bool = False) -> None:
        self.errors = list(errors)
        self.failed: list[str] = []
        self.fail = self.failed.append
        self.should_stop = False
        self.app = SimpleNamespace(should_stop=stopping)
        self.reader = self

    async def turn(self) -> None:
        error = self.errors.pop(0) if self.errors else None
        self.should_stop = not self.errors and error is None
        if error is not None:
            raise error

    async def run(self) -> None:
        await LosslessConsumer._drain_messages(self, SimpleNamespace(should_stop=False))  # type: ignore[arg-type]


async def test_the_loop_turns_until_it_is_to_stop() -> None:
    loop = Loop(None, None, None)
    await loop.run()
    assert loop.should_stop
    assert loop.failed == []


async def test_whatever_fails_in_the_loop_ends_the_process() -> None:
    loop = Loop(KeyError("ticks"))
    await loop.run()
    assert "KeyError" in loop.failed[0]


async def test_a_loop_that_is_cancelled_from_within_ends_the_process_and_does_not_just_stop_reading() -> None:
    loop = Loop(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await loop.run()
    assert loop.failed == ["the reader was cancelled"]


async def test_a_loop_that_is_cancelled_by_a_stop_is_no_failure() -> None:
    loop = Loop(asyncio.CancelledError(), stopping=True)
    with pytest.raises(asyncio.CancelledError):
        await loop.run()
    assert loop.failed == []


async def test_a_consumer_that_stops_with_the_app_is_no_failure() -> None:
    loop = Loop(ConsumerStoppedError(), stopping=True)
    await loop.run()
    assert loop.failed == []


async def test_a_consumer_that_stops_by_itself_is_a_failure() -> None:
    with pytest.raises(ConsumerStoppedError):
        await Loop(ConsumerStoppedError()).run()
