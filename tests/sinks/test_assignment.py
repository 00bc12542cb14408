"""One partition, from when it is assigned to when it is taken away."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from unittest.mock import AsyncMock

import pytest
from aiokafka.errors import UnknownError

from delivery.dead_letters import Abandoned, Record
from delivery.instruments import Instruments
from delivery.ledger import Partition
from delivery.positions import Back
from delivery.tasks import Turns
from sinks import consumer
from sinks.consumer import Assignment, Handler
from sinks.outcomes import Outcomes
from tests.eventually import eventually
from tests.sinks.records import ConsumedRecord, FakeGroup, outcome_instruments

TP = Partition("gpu.attributed", 0)
LOG = [ConsumedRecord(offset, str(offset).encode(), offset * 1000) for offset in range(10)]


class FakeHandler:
    """Finishes two records a step, and remembers."""

    def __init__(self, counted: Outcomes, before: Callable[[int], None] = lambda _: None) -> None:
        self.recalled: list[int] = []
        self.delivered: list[int] = []
        self.forgotten = 0
        self.quiet_after: list[list[int]] = []
        self._counted = counted
        self._before = before

    def recall(self, record: Record) -> None:
        self.recalled.append(record.offset)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        for start in range(0, len(records), 2):
            batch = records[start : start + 2]
            self._before(batch[0].offset)
            if abandon.is_set():
                raise Abandoned
            self.delivered += [logged.offset for logged in batch]
            for _ in batch:
                self._counted.finish("delivered")
            yield batch[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        self.quiet_after.append(list(self.delivered))

    def reset(self) -> None:
        self.forgotten += 1


class Setup:
    """An assignment and its collaborators."""

    def __init__(self, consumer: FakeGroup, assignment: Assignment | None = None) -> None:
        self.instruments = Instruments(outcome_instruments("test"))
        self.counted = Outcomes("test", self.instruments)
        self.consumer = consumer
        self.before: Callable[[int], None] = lambda _: None
        self.turns = Turns()
        self.handler = FakeHandler(self.counted, lambda offset: self.before(offset))
        self.assignment = self.assign(self.handler, assignment)

    def assign(self, handler: Handler, kept: Assignment | None = None) -> Assignment:
        """Another assignment of the partition, with the handler."""
        return Assignment(self.consumer, TP, handler, self.counted, kept, turns=self.turns)  # type: ignore[arg-type]

    async def read(self) -> None:
        """Runs until all is read, then revokes the partition."""
        running = asyncio.ensure_future(self.assignment.run("earliest", Back(2.0)))
        polled = asyncio.ensure_future(self.consumer.polled.wait())
        await asyncio.wait((running, polled), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.01)
        self.assignment.abandon.set()
        polled.cancel()
        await asyncio.wait_for(running, 10)

    def count(self, name: str) -> float:
        return self.instruments.registry.get_sample_value(f"gpustream_test_records_{name}") or 0.0

    def balanced(self) -> bool:
        finished = sum(self.count(f"{name}_total") for name in ("delivered", "released"))
        return self.count("read_total") == finished + self.count("held")


async def test_each_step_is_committed_before_the_next() -> None:
    setup = Setup(FakeGroup(LOG))
    commits_seen: list[tuple[int, list[int]]] = []
    setup.before = lambda offset: commits_seen.append((offset, list(setup.consumer.commits)))
    await setup.read()
    assert setup.handler.delivered == list(range(10))
    assert commits_seen == [(0, [0]), (2, [0, 2]), (4, [0, 2, 4]), (6, [0, 2, 4, 6]), (8, [0, 2, 4, 6, 8])]
    assert setup.consumer.group == 10
    assert setup.balanced()


async def test_a_new_group_commits_where_it_starts_so_that_latest_means_once() -> None:
    setup = Setup(FakeGroup([], begin=7))
    await setup.read()
    assert setup.consumer.commits == [7]


async def test_a_group_whose_offset_is_no_longer_in_the_log_commits_where_it_goes_on() -> None:
    setup = Setup(FakeGroup([], begin=17, group=5))
    await setup.read()
    assert setup.consumer.commits == [17]
    assert setup.count("expired_total") == 12


async def test_a_group_whose_offset_is_past_the_end_reads_all_of_the_log_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(FakeGroup(LOG, group=12))
    await setup.read()
    assert setup.handler.delivered == list(range(10))
    (message,) = caplog.messages
    assert message.endswith(
        "offset 12 is not in the log: the topic was created again, or a broker has lost its last records; reading on"
        " from 0"
    )


async def test_heartbeats_go_on_while_a_large_batch_is_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(FakeGroup([ConsumedRecord(offset, b"", 1000) for offset in range(100)], group=100))
    monkeypatch.setattr(setup.turns, "next", turn := AsyncMock())
    await setup.read()
    assert (turn.await_count, len(setup.handler.recalled)) == (100, 100)


async def test_what_was_finished_lately_is_recalled_and_not_delivered() -> None:
    setup = Setup(FakeGroup(LOG, group=6))
    await setup.read()
    assert setup.handler.recalled == [3, 4, 5]
    assert setup.handler.delivered == [6, 7, 8, 9]
    assert setup.count("read_total") == 4


async def test_a_partition_whose_first_record_waits_for_its_receiver_is_read_back() -> None:
    setup = Setup(FakeGroup(LOG, group=6))
    positions: list[int | None] = []
    setup.before = lambda _: positions.append(setup.assignment.next)
    await setup.read()
    assert positions == [6, 8]


async def test_what_is_not_finished_when_it_is_abandoned_is_given_back() -> None:
    setup = Setup(FakeGroup(LOG))
    setup.before = lambda offset: setup.assignment.abandon.set() if offset == 4 else None
    with pytest.raises(Abandoned):
        await setup.assignment.run("earliest", Back(2.0))
    assert setup.consumer.group == 4
    assert (setup.count("delivered_total"), setup.count("released_total"), setup.count("held")) == (4, 6, 0)


async def test_after_the_end_nothing_is_committed() -> None:
    setup = Setup(FakeGroup(LOG))
    setup.before = lambda offset: setup.assignment.close() if offset == 4 else None
    with pytest.raises(Abandoned):
        await setup.assignment.run("earliest", Back(2.0))
    assert setup.consumer.commits == [0, 2, 4]
    assert setup.balanced()


async def test_a_commit_that_is_refused_ends_it_and_is_counted() -> None:
    class Refusing(FakeGroup):
        async def commit(self, offsets: dict[object, int]) -> bool:
            return not self.commits and await super().commit(offsets)

    setup = Setup(Refusing(LOG))
    with pytest.raises(Abandoned):
        await setup.assignment.run("earliest", Back(2.0))
    assert setup.instruments.registry.get_sample_value("gpustream_test_commits_total", {"result": "failed"}) == 1
    assert setup.count("delivered_total") == 2
    assert setup.count("released_total") == 8


async def test_a_commit_that_fails_is_tried_again_and_nothing_is_delivered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(FakeGroup):
        errors = 3

        async def commit(self, offsets: dict[object, int]) -> bool:
            if self.commits and self.errors:
                self.errors -= 1
                raise UnknownError
            return await super().commit(offsets)

    monkeypatch.setattr(consumer, "_RETRY_S", 0.01)
    setup = Setup(Failing(LOG))
    await setup.read()
    assert setup.handler.delivered == list(range(10))
    assert setup.consumer.commits == [0, 2, 4, 6, 8, 10]
    assert setup.instruments.registry.get_sample_value("gpustream_test_commits_total", {"result": "failed"}) == 3


async def test_a_commit_that_fails_after_the_partition_is_revoked_is_not_tried_again() -> None:
    class Failing(FakeGroup):
        async def commit(self, offsets: dict[object, int]) -> bool:
            setup.assignment.abandon.set()
            raise UnknownError

    setup = Setup(Failing(LOG))
    with pytest.raises(Abandoned):
        await setup.assignment.run("earliest", Back(2.0))


async def test_a_broker_that_is_away_at_the_start_is_waited_for() -> None:
    setup = Setup(FakeGroup(LOG, away=1))
    await setup.read()
    assert setup.handler.delivered == list(range(10))


async def test_an_assignment_that_follows_unchanged_keeps_its_handler() -> None:
    first = Setup(FakeGroup(LOG))
    await first.read()
    second = Setup(first.consumer, assignment=first.assignment)
    first.consumer.log = [*LOG, ConsumedRecord(10, b"10")]
    first.consumer.polled.clear()
    await second.read()
    assert first.handler.delivered == list(range(11))
    assert second.handler.delivered == second.handler.recalled == []


async def test_a_topic_that_is_created_again_is_delivered_from_its_start(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(FakeGroup(LOG))

    def recreate(offset: int) -> None:
        if offset == 8:
            setup.consumer.log, setup.consumer.at = LOG[:3], 0

    setup.before = recreate
    await setup.read()
    assert setup.handler.forgotten == 1
    assert setup.handler.delivered == [*range(10), 0, 1, 2]
    assert [text for text in caplog.messages if "a broker has lost its last records" in text] == caplog.messages
    assert len(caplog.messages) == 1


async def test_records_that_retention_removed_before_they_were_read_are_counted() -> None:
    setup = Setup(FakeGroup(LOG))

    def expire(offset: int) -> None:
        if offset == 8:
            setup.consumer.log, setup.consumer.begin = [*LOG, ConsumedRecord(15, b"")], 14

    setup.before = expire
    await setup.read()
    assert setup.count("expired_total") == 4


async def test_holes_of_control_records_are_no_loss() -> None:
    setup = Setup(FakeGroup([*LOG, ConsumedRecord(12, b"")]))
    await setup.read()
    assert setup.count("expired_total") == 0
    assert setup.consumer.group == 13


async def test_a_partition_is_quiet_if_all_of_it_is_read_and_only_then() -> None:
    read_whole, behind = Setup(FakeGroup(LOG, group=10)), Setup(FakeGroup(LOG, group=4))
    await read_whole.read()
    await behind.read()
    assert read_whole.handler.quiet_after == [[]]
    assert behind.handler.quiet_after == [[4, 5, 6, 7, 8, 9]]


async def test_a_partition_is_not_quiet_because_the_broker_is() -> None:
    setup = Setup(FakeGroup(LOG, group=10, fresh=False))
    await setup.read()
    assert setup.handler.quiet_after == []


async def test_a_partition_is_quiet_if_only_an_open_transaction_follows() -> None:
    setup = Setup(FakeGroup(LOG, group=4, stable=8))
    await setup.read()
    assert setup.handler.delivered == [4, 5, 6, 7]
    assert setup.handler.quiet_after == [[4, 5, 6, 7]]
    assert setup.assignment.lag() == 0


async def test_the_lag_is_not_known_before_the_broker_has_reported_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(FakeGroup(LOG, group=4))
    assert setup.assignment.lag() is None
    await setup.read()
    assert setup.assignment.lag() == 0
    monkeypatch.setattr(setup.consumer, "end", lambda _: None)
    assert setup.assignment.lag() is None


async def test_the_end_of_a_transaction_is_committed_and_the_partition_is_quiet_after_it() -> None:
    setup = Setup(FakeGroup(LOG, group=4, stable=11))
    await setup.read()
    assert setup.consumer.group == 11
    assert setup.handler.quiet_after == [[4, 5, 6, 7, 8, 9]]
    assert setup.count("expired_total") == 0


async def test_records_that_are_deleted_to_the_last_one_are_counted_without_another_one() -> None:
    setup = Setup(FakeGroup(LOG))

    def delete(offset: int) -> None:
        if offset == 8:
            setup.consumer.begin = setup.consumer.stable = 17

    setup.before = delete
    await setup.read()
    assert setup.count("expired_total") == 7


class SlowHandler(FakeHandler):
    """Keeps its records, and finishes all of them when ``ready``."""

    def __init__(self, counted: Outcomes) -> None:
        super().__init__(counted)
        self.kept: list[int] = []
        self.ready = asyncio.Event()
        self.asked = 0

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        self.kept += [record.offset for record in records]
        self.asked += 1
        if self.ready.is_set() and self.kept:
            for _ in self.kept:
                self._counted.finish("delivered")
            self.delivered, self.kept = [*self.delivered, *self.kept], []
            yield self.delivered[-1] + 1


async def test_a_handler_may_keep_records_and_is_given_others_meanwhile() -> None:
    setup = Setup(FakeGroup(LOG[:5]))
    setup.handler = slow = SlowHandler(setup.counted)
    setup.assignment = setup.assign(slow)
    running = asyncio.ensure_future(setup.assignment.run("earliest", Back(2.0)))
    await eventually(lambda: slow.asked > 3)
    assert (slow.kept, setup.count("held"), setup.consumer.commits) == ([0, 1, 2, 3, 4], 5, [0])
    assert slow.quiet_after == [[]]
    assert setup.assignment.busy
    setup.consumer.log = LOG
    await eventually(lambda: len(slow.kept) == 10)
    slow.ready.set()
    await eventually(lambda: setup.consumer.group == 10)
    assert setup.count("held") == 0
    setup.assignment.abandon.set()
    await asyncio.wait_for(running, 10)
    assert setup.balanced()


async def test_the_end_of_a_transaction_that_is_passed_while_records_are_unfinished_is_committed_after_them() -> None:
    setup = Setup(FakeGroup(LOG, stable=11))
    setup.handler = slow = SlowHandler(setup.counted)
    setup.assignment = setup.assign(slow)
    running = asyncio.ensure_future(setup.assignment.run("earliest", Back(2.0)))
    await eventually(lambda: setup.consumer.at == 11 and slow.asked > 3)
    assert setup.consumer.commits == [0]
    slow.ready.set()
    await eventually(lambda: setup.consumer.group == 11)
    assert setup.consumer.commits == [0, 10, 11]
    setup.assignment.abandon.set()
    await asyncio.wait_for(running, 10)


@pytest.mark.parametrize("finishes", [False, True])
async def test_what_a_handler_keeps_is_given_back_at_the_end_unless_it_finishes_it_then(finishes: bool) -> None:
    setup = Setup(FakeGroup(LOG))
    setup.handler = slow = SlowHandler(setup.counted)
    setup.assignment = setup.assign(slow)
    running = asyncio.ensure_future(setup.assignment.run("earliest", Back(2.0)))
    await eventually(lambda: len(slow.kept) == 10)
    if finishes:
        slow.ready.set()
    setup.assignment.abandon.set()
    await asyncio.gather(running, return_exceptions=True)
    assert setup.consumer.group == (10 if finishes else 0)
    assert setup.count("released_total") == (0 if finishes else 10)
    assert setup.balanced()


async def test_a_log_that_begins_again_is_read_from_there_by_the_next_owner_too_if_nothing_was_finished() -> None:
    setup = Setup(FakeGroup(LOG))
    setup.handler = slow = SlowHandler(setup.counted)
    setup.assignment = setup.assign(slow)
    slow.ready.set()
    running = asyncio.ensure_future(setup.assignment.run("earliest", Back(2.0)))
    await eventually(lambda: setup.consumer.group == 10)
    slow.ready.clear()
    setup.consumer.log, setup.consumer.at = LOG[:3], 0
    await eventually(lambda: slow.kept == [0, 1, 2])
    assert setup.assignment.lag() == 3
    setup.assignment.abandon.set()
    await asyncio.wait_for(running, 10)

    setup.consumer.log = [*LOG, ConsumedRecord(10, b"10"), ConsumedRecord(11, b"11")]
    setup.consumer.polled.clear()
    next_owner = Setup(setup.consumer)
    await next_owner.read()
    assert next_owner.handler.delivered == list(range(12))
