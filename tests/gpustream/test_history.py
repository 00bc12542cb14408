"""Commands that follow a topic, with a client in memory: what happens when it becomes another one."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import BrokerError, BrokerUnavailable, TopicDescription
from delivery.ledger import Partition
from delivery.sender import Sender, Unsendable
from gpustream import history
from gpustream.history import History, Span, refuse_deleted
from tests.delivery.fake_producer import Cluster, FakeProducer
from tests.delivery.test_tail import ALERTS, TICKS, Kafka

SPANS = {Partition(topic, 0): Span(0, 3) for topic in (TICKS, ALERTS)}


async def test_the_log_of_a_topic_that_was_missing_for_a_moment_is_followed_from_its_start() -> None:
    """The new log has more records than the old one had, before the client notices that it is another one."""
    kafka = Kafka()

    def recreate() -> None:
        kafka.get_metadata(ALERTS)
        kafka.logs[TICKS] = [f"new {number}" for number in range(5)]
        kafka.logs[ALERTS].append("one more")
        kafka.get_metadata(TICKS, ALERTS)

    kafka.during_a_poll = recreate
    values: list[str] = []
    async with asyncio.timeout(60):
        async for records in History(Connection("127.0.0.1:1"), kafka, {TICKS: 1, ALERTS: 1}).after(SPANS):
            values += [record.value for record in records]
            if "new 4" in values:
                break
    assert values == ["one more", *kafka.logs[TICKS]]


@pytest.mark.parametrize("count", [1, 3])
async def test_who_follows_a_topic_that_has_other_partitions_ends_with_that(count: int) -> None:
    kafka = Kafka()
    kafka.partitions = count
    following = History(Connection("127.0.0.1:1"), kafka, {ALERTS: 2}).after(
        {Partition(ALERTS, number): Span(0, 3) for number in range(2)}
    )
    with pytest.raises(BrokerError, match=f"gpu.alerts has {count} partitions, and had 2 before: run this again"):
        await asyncio.wait_for(anext(following), 60)


class Log:
    """The log of a partition, and the client that reads it two records at a time. Each record is its offset's text.

    ``meanwhile`` happens after so many polls. As Kafka's does, a client that is outside of the log goes to its begin.
    """

    def __init__(self, end: int, missing: Sequence[int] = (), polls: int = 1) -> None:
        self.begin, self.end, self.missing, self._position = 0, end, frozenset(missing), 0
        self.meanwhile: Callable[[], None] = lambda: None
        self._polls, self.is_there, self.answers = polls, True, True
        self._client = self.cluster = self
        self.unauthorized_topics: frozenset[str] = frozenset()

    def truncate(self) -> None:
        """What retention does: nothing before offset 4 is left."""
        self.begin = 4

    def recreate(self) -> None:
        """Another log under the same name, with one record."""
        self.begin, self.end = 0, 1

    def delete(self) -> None:
        """No broker knows the topic any more."""
        self.is_there = False

    def fall_silent(self) -> None:
        """The client looks for the begin of the log, and no broker answers."""
        self.answers = False

    def assign(self, _: Sequence[TopicPartition]) -> None:
        """It has one partition."""

    pause = assign

    def seek(self, _: TopicPartition, offset: int) -> None:
        self._position = offset

    async def position(self, _: TopicPartition) -> int:
        if not self.answers:
            await asyncio.Event().wait()
        return self._position

    def partitions_for_topic(self, _: str) -> set[int]:
        return {0} if self.is_there else set()

    async def beginning_offsets(self, tps: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(tps, self.begin)

    async def getmany(self, tp: TopicPartition, **_: object) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        if self._polls == 0:
            self.meanwhile()
        self._polls -= 1
        if not (self.is_there and self.answers):
            return {}
        if not self.begin <= self._position <= self.end:
            self._position = self.begin
        offsets = range(self._position, min(self._position + 2, self.end))
        self._position = offsets.stop
        records = [SimpleNamespace(offset=n, value=str(n)) for n in offsets if n not in self.missing]
        return {tp: records} if records else {}


async def read(log: Log, **options: history.OnDeleted) -> tuple[list[int], int]:
    """The offsets of the records that are read of the first seven offsets, and the progress that is reported."""
    progress: list[int] = []
    offsets: list[int] = []
    reader = History(Connection("127.0.0.1:1"), log, {ALERTS: 1})
    async with asyncio.timeout(60):
        async for records in reader.records({Partition(ALERTS, 0): Span(0, 7)}, progress.append, **options):
            offsets += [record.offset for record in records]
    return offsets, sum(progress)


@given(missing=st.sets(st.integers(0, 8)), options=st.sampled_from([{}, {"on_deleted": refuse_deleted}]))
def test_what_compaction_and_transactions_left_of_a_log_is_read(
    missing: set[int], options: dict[str, history.OnDeleted]
) -> None:
    offsets, progress = asyncio.run(read(Log(9, sorted(missing)), **options))
    assert (offsets, progress) == ([offset for offset in range(7) if offset not in missing], 7)


async def test_what_retention_deletes_before_it_is_read_is_left_out_and_said() -> None:
    said: list[tuple[Partition, int]] = []
    for options in ({}, {"on_deleted": lambda tp, offset: said.append((tp, offset))}):
        log = Log(9)
        log.meanwhile = log.truncate
        assert await read(log, **options) == ([0, 1, 4, 5, 6], 7)
    assert said == [(Partition(ALERTS, 0), 2)]


@pytest.mark.parametrize("left", [4, 9])
async def test_a_reader_of_all_records_ends_if_retention_deletes_some_before_it_reads_them(left: int) -> None:
    log = Log(9)
    log.meanwhile = lambda: setattr(log, "begin", left)
    with pytest.raises(BrokerError, match=r"gpu.alerts partition 0: records from offset 2 on were deleted before"):
        await read(log, on_deleted=refuse_deleted)


async def test_a_reader_of_all_records_goes_on_if_retention_deletes_what_it_has_read() -> None:
    log = Log(9, polls=2)
    log.meanwhile = log.truncate
    assert await read(log, on_deleted=refuse_deleted) == ([*range(7)], 7)


@pytest.mark.parametrize("options", [{}, {"on_deleted": refuse_deleted}])
async def test_who_reads_a_topic_that_is_created_again_is_given_no_record_of_the_new_one(
    options: dict[str, history.OnDeleted],
) -> None:
    log = Log(9, polls=2)
    log.meanwhile = log.recreate
    with pytest.raises(BrokerError, match=r"^gpu.alerts was deleted and created again while it was read: run this"):
        await read(log, **options)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (Log.delete, "gpu.alerts was deleted while it was read: run this again when it is back"),
        (Log.fall_silent, "127.0.0.1:1: no record for 0 s at gpu.alerts partition 0 offset 2"),
    ],
)
async def test_who_waits_for_records_in_vain_is_told_why(
    trouble: Callable[[Log], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    log = Log(9)
    log.meanwhile = lambda: trouble(log)
    with pytest.raises(BrokerError, match=f"^{reason}$"):
        await read(log)


async def test_a_broker_that_goes_away_before_the_client_connects_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def inspect(*_: object) -> tuple[dict[str, TopicDescription], None]:
        return {ALERTS: TopicDescription(1)}, None

    monkeypatch.setattr(topic_admin, "inspect", inspect)
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1\b"):
        async with asyncio.timeout(60), history.opened(Connection("127.0.0.1:1"), [ALERTS]):
            pass


def test_a_record_that_can_not_be_decoded_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    records = [SimpleNamespace(topic="gpu.actions", partition=3, offset=n, value=v) for n, v in enumerate((b"1", b"{"))]
    log = logging.getLogger("of.a.command")
    assert [value for _, value in history.decoded(records, msgspec.json.Decoder(int).decode, log)] == [1]
    (logged,) = caplog.records
    assert logged.getMessage().startswith("gpu.actions: a record is left out: ")
    assert (vars(logged)["partition"], vars(logged)["offset"]) == (3, 1)


class BusySender(Sender):
    """It takes a first record. The next one has to wait until the caller asks for the first."""

    def __init__(self) -> None:
        super().__init__(Connection("127.0.0.1:1"), client_id="c")
        self.values: list[bytes | None] = []
        self.first = asyncio.get_running_loop().create_future()

    async def send(self, topic: str, value: bytes | None, **_: Any) -> asyncio.Future[int]:
        if self.values and not self.first.done():
            try:
                await asyncio.Event().wait()
            finally:
                self.first.set_result(0)
        self.values.append(value)
        return self.first


async def write(sender: Sender, *values: bytes) -> None:
    """Writes records, and waits until they are acknowledged."""
    writer = history.Writer(sender)
    async with asyncio.timeout(60):
        for value in values:
            await writer.write(ALERTS, value, b"key", 0)
        await writer.settle()


async def test_a_record_waits_while_earlier_ones_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    sender = BusySender()
    await write(sender, b"a", b"b")
    assert sender.values == [b"a", b"b"]


async def test_a_broker_that_takes_no_record_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    with pytest.raises(BrokerUnavailable, match=r"^Kafka has taken no record for 0 s: no Kafka broker has answered at"):
        await write(Sender(Connection("127.0.0.1:1"), client_id="c"), b"a")


async def test_a_broker_that_acknowledges_no_record_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = asyncio.Event()
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    monkeypatch.setattr("delivery.sender.producer", partial(FakeProducer, Cluster(away=away)))
    sender = Sender(Connection("127.0.0.1:1"), client_id="c")
    await sender.start()
    with pytest.raises(BrokerUnavailable, match=r"^Kafka has taken no record for 0 s: run this again when it takes"):
        await write(sender, b"a")
    away.set()
    await sender.stop()


async def test_a_record_that_is_refused_is_a_sentence() -> None:
    sender = BusySender()
    sender.first.set_exception(Unsendable("the record is larger than the topic takes"))
    with pytest.raises(BrokerError, match=r"^Kafka has refused a record: the record is larger than the topic takes$"):
        await write(sender, b"a")
