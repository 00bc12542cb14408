"""A sender's promises, tested with a fake producer that lingers, batches, refuses and poisons as the real one does."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from aiokafka.errors import (
    InvalidTimestampError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RequestTimedOutError,
    UnknownError,
    for_code,
)
from aiokafka.structs import PartitionMetadata
from hypothesis import given
from hypothesis import strategies as st

from delivery import sender as module
from delivery.connection import Connection
from delivery.quotas import Quotas
from delivery.sender import Sender, Unsendable, not_sent
from tests.clock import run
from tests.delivery.fake_producer import Cluster, FakeProducer
from topics.topic import MAX_MESSAGE_BYTES

NOW_MS = 1_796_000_000_000
Scenario = Callable[[Sender, Cluster], Awaitable[None]]


def play(scenario: Scenario, cluster: Cluster | None = None) -> Cluster:
    """Run a scenario with a sender on a fake cluster, and stop the sender."""
    cluster = cluster or Cluster()

    async def main() -> None:
        sender = Sender(Connection("127.0.0.1:1"), client_id="test")
        await sender.start()
        await scenario(sender, cluster)
        await sender.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "producer", partial(FakeProducer, cluster))
        run(main())
    return cluster


async def outcome(future: "asyncio.Future[int]") -> int | str:
    try:
        return await future
    except Unsendable:
        return "unsendable"


async def send_all(sender: Sender, values: list[bytes], topic: str = "t") -> list[int | str]:
    futures = [await sender.send(topic, value) for value in values]
    return [await outcome(future) for future in futures]


def test_records_are_stored_in_the_order_of_their_sends_with_their_offsets() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        assert await send_all(sender, [b"a", b"b", b"c"]) == [0, 1, 2]
        assert cluster.log("t") == [b"a", b"b", b"c"]

    play(scenario)


@pytest.mark.parametrize(
    ("ahead_ms", "shown_ms"),
    [
        (1_800_000, 1_800_000 - 1000),
        (-3_600_000, -3_600_000),
        (0, 0),
        (500, 0),
        (None, 0),
        (NOW_MS - 1234, 0),  # a broker that has no clock
    ],
)
def test_an_acknowledgement_shows_by_how_much_this_clock_is_at_least_ahead_or_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ahead_ms: int | None, shown_ms: int
) -> None:
    """The broker gives a record its time between the sending and the acknowledgement, here a second later."""
    monkeypatch.setattr(module, "now_ms", lambda: NOW_MS)
    now_ms = None if ahead_ms is None else lambda: NOW_MS - ahead_ms
    cluster = Cluster(away=asyncio.Event(), now_ms=now_ms)

    async def scenario(sender: Sender, cluster: Cluster) -> None:
        assert sender.ahead_ms is None
        sent = await sender.send("t", b"a")
        await asyncio.sleep(1.0)
        assert cluster.away is not None
        cluster.away.set()
        await sent
        assert sender.ahead_ms == shown_ms

    play(scenario, cluster)
    differs = {1_799_000: ["1799 s ahead of"], -3_600_000: ["3600 s behind"]}.get(shown_ms, [])
    assert caplog.messages == [f"t: the clock here is {text} the brokers' clock" for text in differs]


def test_the_producer_is_idempotent_and_waits_for_every_replica() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        (producer,) = cluster.producers
        assert producer.settings["enable_idempotence"] is True
        assert producer.settings["acks"] == "all"

    play(scenario)


@pytest.mark.parametrize("refusal", [MessageSizeTooLargeError, InvalidTimestampError, for_code(87)])
def test_of_a_refused_batch_only_the_bad_record_is_unsendable_and_the_others_keep_their_order(
    refusal: type[Exception],
) -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"bad"] = refusal
        assert await send_all(sender, [b"a", b"bad", b"b", b"c"]) == [0, "unsendable", 1, 2]
        assert cluster.log("t") == [b"a", b"b", b"c"]

    play(scenario)


def test_records_that_are_refused_one_after_the_other_for_one_reason_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused |= {b"bad": InvalidTimestampError, b"large": MessageSizeTooLargeError}
        for value in (b"bad", b"bad", b"large", b"bad", b"good"):
            await send_all(sender, [value])

    play(scenario)
    lines = [message for message in caplog.messages if "replacing the producer" in message]
    assert len(lines) == 2
    assert "LogAppendTime" in lines[0]
    assert "max.message.bytes" in lines[1]


def test_a_record_that_always_gets_an_unexpected_error_is_unsendable_after_five_minutes() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"bad"] = UnknownError
        sent_s = asyncio.get_running_loop().time()
        assert await send_all(sender, [b"a", b"bad", b"b"]) == [0, "unsendable", 1]
        assert asyncio.get_running_loop().time() - sent_s == pytest.approx(300, rel=0.1)

    play(scenario)


def test_an_unexpected_error_that_passes_within_minutes_loses_nothing() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"a"] = UnknownError
        asyncio.get_running_loop().call_later(240, cluster.refused.clear)
        assert await send_all(sender, [b"a"]) == [0]

    play(scenario)


def test_an_unexpected_error_after_an_outage_loses_nothing() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.raised = [RequestTimedOutError() for _ in range(100)] + [UnknownError()]
        assert await send_all(sender, [b"a"]) == [0]

    play(scenario)


def test_an_error_is_reported_until_a_record_is_stored_also_if_nobody_waits_for_it_any_more() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.raised = [RequestTimedOutError() for _ in range(3)]
        waiting = asyncio.ensure_future(send_all(sender, [b"a"]))
        await asyncio.sleep(0.3)
        assert "RequestTimedOutError" in sender.not_ready()[0]
        waiting.cancel()
        await sender.ready()
        assert (sender.not_ready(), cluster.log("t")) == ([], [b"a"])

    play(scenario)


def test_who_waits_because_of_a_quota_of_kafka_is_not_ready_for_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        quotas = Quotas()
        monkeypatch.setattr("delivery.sender.QUOTAS", quotas)
        quotas.note("simulated", "ProduceRequest", 20.0)
        (reason,) = not_sent(sender, what="it", waited_s=31.0)
        assert reason.startswith("it has waited 31 s for Kafka: a quota of Kafka holds it up: raise its producer_byte")
        assert not_sent(sender, what="it", waited_s=1.0) == []

    play(scenario)


@pytest.mark.parametrize(
    ("refused", "leader", "cause"),
    [
        (
            {("t", 0): 19},
            1,
            "t partition 0: Kafka does not take a record while fewer of its replicas are in sync",
        ),
        (
            {("t", 0): 20},
            1,
            "t partition 0: Kafka does not take a record while fewer of its replicas are in sync",
        ),
        ({}, -1, "t partition 0 has no leader: `gpustream doctor` says more"),
        ({("other", 0): 19}, 1, None),
    ],
)
def test_why_kafka_does_not_take_what_waits_is_said(
    refused: dict[tuple[str, int], int], leader: int, cause: str | None
) -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        (producer,) = cluster.producers
        producer.client.refused = refused
        producer.client.cluster._partitions["t"] = {0: PartitionMetadata("t", 0, leader, [], [], None)}
        assert sender.refusal() is None  # nothing waits

        cluster.away = asyncio.Event()
        waiting = asyncio.ensure_future(send_all(sender, [b"a"]))
        await asyncio.sleep(31)
        refusal = sender.refusal() or ""
        assert refusal.startswith(cause or "")
        assert bool(refusal) == (cause is not None)
        (reason,) = not_sent(sender, what="it", waited_s=sender.waited_s())
        assert reason == "it has waited 31 s for Kafka" + (f": {refusal}" if refusal else "")
        cluster.away.set()
        await waiting

    play(scenario)


def test_a_record_that_kafka_does_not_acknowledge_is_a_reason_not_to_be_ready_after_half_a_minute() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.away = asyncio.Event()
        waiting = asyncio.ensure_future(send_all(sender, [b"a"]))
        await asyncio.sleep(31)
        assert not_sent(sender, what="it", waited_s=sender.waited_s()) == ["it has waited 31 s for Kafka"]
        cluster.away.set()
        await waiting
        assert not_sent(sender, what="it", waited_s=sender.waited_s()) == []

    play(scenario)


def test_a_good_record_after_a_refused_one_is_not_out_of_sequence() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"bad"] = MessageSizeTooLargeError
        assert await send_all(sender, [b"bad"]) == ["unsendable"]
        assert await send_all(sender, [b"good"]) == [0]

    play(scenario)


def test_two_refused_records_in_a_row_are_both_unsendable() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused |= {b"bad": MessageSizeTooLargeError, b"worse": MessageSizeTooLargeError}
        assert await send_all(sender, [b"bad", b"worse", b"good"]) == ["unsendable", "unsendable", 0]

    play(scenario)


def test_a_record_that_is_too_large_is_never_given_to_the_client() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        assert await send_all(sender, [bytes(MAX_MESSAGE_BYTES), b"good"]) == ["unsendable", 0]
        assert cluster.log("t") == [b"good"]
        assert len(cluster.producers) == 1

    play(scenario)


def test_a_partition_that_does_not_exist_is_unsendable_and_stalls_nothing() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        with pytest.raises(Unsendable):
            await (await sender.send("t", b"nowhere", partition=-1))
        assert await send_all(sender, [b"good"]) == [0]

    play(scenario)


def test_a_record_that_waits_long_for_room_is_sent_when_there_is_some() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.raised = [KafkaTimeoutError()]
        assert await send_all(sender, [b"a", b"b"]) == [0, 1]
        assert cluster.log("t") == [b"a", b"b"]

    play(scenario)


def test_a_lost_answer_is_sent_again_and_never_reordered() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.lost_answers = [RequestTimedOutError()]
        assert await send_all(sender, [b"a", b"b"]) == [2, 3]
        assert await send_all(sender, [b"c"]) == [4]
        assert cluster.log("t") == [b"a", b"b", b"a", b"b", b"c"]

    play(scenario)


def test_start_waits_for_a_broker_for_as_long_as_it_takes() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        assert await send_all(sender, [b"a"]) == [0]

    cluster = play(scenario, Cluster(failed_starts=20))
    assert len(cluster.producers) == 21
    assert cluster.open() == []


def test_a_start_that_is_cancelled_leaves_no_producer_behind() -> None:
    async def main() -> None:
        starting = asyncio.create_task(Sender(Connection("127.0.0.1:1"), client_id="test").start())
        await asyncio.sleep(0.005)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "producer", partial(FakeProducer, cluster))
        run(main())
    assert cluster.open() == []


def test_a_replacement_that_cannot_connect_keeps_trying_and_loses_nothing() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.lost_answers = [RequestTimedOutError()]
        cluster.failed_starts = 7
        assert await send_all(sender, [b"a"]) == [1]

    assert play(scenario).open() == []


def test_a_producer_whose_stop_hangs_is_not_waited_for() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"bad"] = MessageSizeTooLargeError
        cluster.stop_hangs = True
        assert await send_all(sender, [b"bad", b"good"]) == ["unsendable", 0]

    play(scenario)


def test_sends_wait_while_the_producer_is_replaced_and_keep_their_order() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.refused[b"bad"] = MessageSizeTooLargeError
        cluster.failed_starts = 3
        first = [await sender.send("t", value) for value in (b"a", b"bad", b"b")]
        await asyncio.sleep(0.1)
        assert cluster.log("t") == []
        later = [asyncio.create_task(sender.send("t", value)) for value in (b"c", b"d", b"e")]
        assert [await outcome(future) for future in first] == [0, "unsendable", 1]
        assert [await (await sending) for sending in later] == [2, 3, 4]
        assert cluster.log("t") == [b"a", b"b", b"c", b"d", b"e"]

    play(scenario)


def test_a_send_that_is_cancelled_while_it_waits_is_not_sent() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.lost_answers = [RequestTimedOutError()]
        cluster.failed_starts = 3
        first = await sender.send("t", b"a")
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(sender.send("t", b"cancelled"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        assert await first == 1
        assert await send_all(sender, [b"b"]) == [2]
        assert cluster.log("t") == [b"a", b"a", b"b"]

    play(scenario)


def test_a_future_that_its_owner_cancelled_disturbs_nobody() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        (await sender.send("t", b"a")).cancel()
        assert await send_all(sender, [b"b"]) == [1]

    play(scenario)


def test_an_outage_is_waited_for_and_everything_arrives_once_in_order() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.away = asyncio.Event()
        futures = [await sender.send("t", value) for value in (b"a", b"b")]
        await asyncio.sleep(600)
        assert not any(future.done() for future in futures)
        cluster.away.set()
        assert [await future for future in futures] == [0, 1]

    play(scenario)


def test_a_flush_waits_for_sent_records_and_no_longer_than_its_limit() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        sent = await sender.send("t", b"1", partition=0)
        await sender.flush(1.0)
        assert sent.done()
        cluster.away = asyncio.Event()
        waiting, began_s = await sender.send("t", b"2", partition=0), asyncio.get_running_loop().time()
        await sender.flush(1.0)
        assert not waiting.done()
        assert 1.0 <= asyncio.get_running_loop().time() - began_s < 2.0
        cluster.away.set()

    play(scenario)


def test_a_stop_waits_for_what_was_sent() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        sent = await sender.send("t", b"a")
        await sender.stop()
        assert await sent == 0

    play(scenario)


def test_a_stop_in_an_outage_waits_for_its_limit_and_cancels_the_remaining_sends() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.away = asyncio.Event()
        cluster.stop_hangs = True
        future = await sender.send("t", b"a")
        began_s = asyncio.get_running_loop().time()
        await sender.stop(timeout_s=1.0)
        assert asyncio.get_running_loop().time() - began_s < 6
        assert future.cancelled()

    play(scenario)


def test_a_stop_while_the_producer_is_replaced_ends_every_send_and_leaves_no_producer() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.lost_answers = [RequestTimedOutError()]
        cluster.failed_starts = 1_000_000
        first = await sender.send("t", b"a")
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(sender.send("t", b"b"))
        await asyncio.sleep(0.1)
        await sender.stop(timeout_s=1.0)
        assert first.cancelled()
        assert (await waiting).cancelled()
        producers = len(cluster.producers)
        await asyncio.sleep(60)
        assert len(cluster.producers) == producers, "it goes on connecting"

    assert play(scenario).open() == []


def test_a_send_after_the_stop_is_cancelled_and_does_not_connect() -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        await sender.stop()
        assert (await sender.send("t", b"a")).cancelled()
        await asyncio.sleep(10)
        assert len(cluster.producers) == 1

    play(scenario)


@given(
    records=st.lists(
        st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 0.0, 0.001, 0.03, 1.0])), max_size=25
    ),
    lost_answers=st.integers(0, 3),
    failed_starts=st.integers(0, 3),
    stop_hangs=st.booleans(),
)
def test_every_record_is_stored_in_order_or_unsendable(
    records: list[tuple[int, bool, float]], lost_answers: int, failed_starts: int, stop_hangs: bool
) -> None:
    async def scenario(sender: Sender, cluster: Cluster) -> None:
        cluster.lost_answers = [RequestTimedOutError()] * lost_answers
        cluster.failed_starts, cluster.stop_hangs = failed_starts, stop_hangs
        futures = []
        for number, (partition, refused, pause_s) in enumerate(records):
            value = b"%d" % number
            if refused:
                cluster.refused[value] = MessageSizeTooLargeError
            futures.append(await sender.send("t", value, partition=partition))
            await asyncio.sleep(pause_s)
        outcomes = [await outcome(future) for future in futures]
        assert [outcome == "unsendable" for outcome in outcomes] == [refused for _, refused, _ in records]
        for partition in (0, 1):
            first_seen = list(dict.fromkeys(cluster.log("t", partition)))
            assert first_seen == [
                b"%d" % n for n, (p, refused, _) in enumerate(records) if p == partition and not refused
            ]

    play(scenario)
