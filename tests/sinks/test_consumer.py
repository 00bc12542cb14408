"""A member of a consumer group: how it handles its partitions as they come and go."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiokafka.errors import ConsumerStoppedError

from delivery.dead_letters import Abandoned, Record
from delivery.instruments import Instruments
from delivery.ledger import Partition
from delivery.positions import Back
from delivery.settings import MemberSettings
from delivery.topic_admin import Checked, TopicCheck
from delivery.watchdog import LoopLateness
from sinks import consumer as module
from sinks.consumer import Assignment, GroupReader, Source
from sinks.outcomes import Outcomes
from tests.eventually import eventually
from tests.sinks.records import ConsumedRecord, FakeGroup, outcome_instruments

SETTINGS = MemberSettings(kafka="127.0.0.1:1", group="g")
LOG = [ConsumedRecord(offset, b"", offset * 1000) for offset in range(4)]


class Handler:
    """Waits for ``go`` before it finishes a record, or for its partition to be taken away."""

    def __init__(self, patient: bool) -> None:
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.delivered: list[int] = []
        self._patient = patient

    def recall(self, record: Record) -> None:
        """Nothing to know."""

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        for record in records:
            self.started.set()
            if self._patient:
                await self.go.wait()
            elif await abandon.wait():
                raise Abandoned
            self.delivered.append(record.offset)
            yield record.offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Nothing to end."""

    def reset(self) -> None:
        """Nothing known."""


def reading(handler: Any, log: Sequence[ConsumedRecord] = LOG) -> tuple[GroupReader, FakeGroup]:
    """A reader that has one partition, with a client in memory."""
    counted = Outcomes("test", Instruments(outcome_instruments("test")))
    reader, client = (
        GroupReader(SETTINGS, [Source("gpu.attributed", lambda _: handler, "earliest", Back(1.0))], counted),
        FakeGroup(log),
    )
    reader._group = client  # type: ignore[assignment]
    reader.assigned({Partition("gpu.attributed", 0)})
    return reader, client


async def test_what_is_under_way_is_waited_for_and_committed_when_a_partition_is_revoked() -> None:
    handler = Handler(patient=True)
    reader, client = reading(handler)
    await asyncio.wait_for(handler.started.wait(), 10)
    leaving = asyncio.ensure_future(reader.revoked())
    await asyncio.sleep(0.01)
    assert not leaving.done()
    handler.go.set()
    await asyncio.wait_for(leaving, 10)
    assert handler.delivered == [0]
    assert client.group == 1


async def test_what_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.02)
    handler = Handler(patient=True)
    reader, client = reading(handler)
    await asyncio.wait_for(handler.started.wait(), 10)
    await asyncio.wait_for(reader.revoked(), 10)
    handler.go.set()
    await asyncio.sleep(0.01)
    assert handler.delivered == []
    assert client.group == 0


async def test_what_gives_up_by_itself_is_not_waited_for_longer() -> None:
    handler = Handler(patient=False)
    reader, client = reading(handler)
    await asyncio.wait_for(handler.started.wait(), 10)
    await asyncio.wait_for(reader.revoked(), 1)
    assert client.group == 0


async def test_a_handler_that_fails_ends_the_sink() -> None:
    class Failing(Handler):
        async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
            raise ZeroDivisionError
            yield 0

    reader, _ = reading(Failing(patient=True))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(reader._failure, 10)
    await reader.revoked()


async def test_a_partition_that_is_assigned_while_the_group_closes_ends_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ClosingGroup(FakeGroup):
        """Assigns its partition when it is joined and again when it closes, and then fetches nothing more."""

        def __init__(self, _: MemberSettings, __: Sequence[str], reader: GroupReader, ___: object) -> None:
            super().__init__(LOG)
            self.failed, self.lateness, self.connect = asyncio.Future[None](), LoopLateness(), AsyncMock()
            self.committed_offsets = AsyncMock(return_value={})
            self.join = partial(reader.assigned, {Partition("gpu.attributed", 0)})

        async def close(self) -> None:
            self.fetch = AsyncMock(side_effect=ConsumerStoppedError)  # type: ignore[method-assign]
            self.join()
            await asyncio.sleep(0.05)

    monkeypatch.setattr(module, "ConsumerGroup", ClosingGroup)
    monkeypatch.setattr(TopicCheck, "wait", AsyncMock(return_value=Checked({})))
    handler, stop = Handler(patient=False), asyncio.Event()
    counted = Outcomes("test", Instruments(outcome_instruments("test")))
    source = Source("gpu.attributed", lambda _: handler, "earliest", Back(1.0))
    reader = GroupReader(SETTINGS, [source], counted)
    running = asyncio.ensure_future(reader.run(stop))
    await asyncio.wait_for(handler.started.wait(), 10)
    stop.set()
    await asyncio.wait_for(running, 10)
    assert reader._failure.cancelled()  # a failure that nobody awaits would be logged as never retrieved


async def test_each_topic_is_read_as_it_is_to_be_by_a_handler_of_its_own() -> None:
    handlers: list[tuple[str, int]] = []

    def source(topic: str, recall_s: float) -> Source:
        return Source(topic, lambda number: handlers.append((topic, number)) or Handler(True), "latest", Back(recall_s))  # type: ignore[func-returns-value]

    outcomes = Outcomes("test", Instruments(outcome_instruments("test")))
    reader = GroupReader(SETTINGS, [source("a", 1.0), source("b", 2.0)], outcomes)
    reader._group = FakeGroup(LOG)  # type: ignore[assignment]
    runs: list[tuple[str, float]] = []

    async def run(assignment: Assignment, _: object, recall: Back, **__: object) -> None:
        runs.append((assignment.tp.topic, recall.seconds))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Assignment, "run", run)
        reader.assigned({Partition("a", 0), Partition("b", 0), Partition("b", 1)})
        await asyncio.sleep(0)
        await reader.revoked()
    assert handlers == [("a", 0), ("b", 0), ("b", 1)]
    assert runs == [("a", 1.0), ("b", 2.0), ("b", 2.0)]


async def test_a_reader_without_a_broker_says_so_and_stops_when_asked() -> None:
    counted = Outcomes("test", Instruments(outcome_instruments("test")))
    source = Source("gpu.attributed", lambda _: Handler(patient=True), "earliest", Back(1.0))
    reader = GroupReader(SETTINGS, [source], counted)
    stop = asyncio.Event()
    running = asyncio.ensure_future(reader.run(stop))
    await eventually(
        lambda: (
            reader.not_ready()
            == ["no Kafka broker answers at 127.0.0.1:1 (KafkaConnectionError): is one up there, for clients?"]
        )
    )
    stop.set()
    await asyncio.wait_for(running, 8)


async def test_a_sink_is_not_ready_while_no_dead_letter_can_be_written() -> None:
    reader, group = reading(Handler(patient=True))
    reader._letters = AsyncMock(not_ready=lambda: ["gpu.dead-letters: not acknowledged"])
    group.not_ready, group.connection = list, SETTINGS.connection()  # type: ignore[attr-defined]
    await eventually(lambda: reader.not_ready() == ["gpu.dead-letters: not acknowledged"])
    await reader.revoked()


@pytest.mark.parametrize(("committed", "start"), [((), "latest"), (("gpu.attributed",), "earliest")])
async def test_a_partition_that_was_added_to_a_topic_that_the_group_reads_is_read_from_its_beginning(
    committed: tuple[str, ...], start: str
) -> None:
    counted = Outcomes("test", Instruments(outcome_instruments("test")))
    source = Source("gpu.attributed", lambda _: Handler(patient=True), "latest", Back(1.0))
    reader = GroupReader(SETTINGS, [source], counted)
    reader._group, reader._started_topics = FakeGroup(LOG), frozenset(committed)  # type: ignore[assignment]
    starts: list[object] = []

    async def run(_: Assignment, from_: object, recall: Back, **__: object) -> None:
        starts.append(from_)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Assignment, "run", run)
        reader.assigned({Partition("gpu.attributed", 7)})
        await asyncio.sleep(0)
        await reader.revoked()
    assert starts == [start]
