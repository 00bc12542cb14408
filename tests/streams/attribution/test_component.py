"""The joiner: what it sends, in which order, and when a record counts as finished."""

import asyncio

import pytest

from delivery.ledger import Partition
from delivery.sender import Unsendable
from streams.attribution import join
from streams.attribution.component import ALLOCATIONS, OUTPUT, SAMPLES, WORKLOADS
from tests.eventually import settle
from tests.streams.attribution.fakes import FakeApp, looking
from tests.streams.attribution.records import container, gpu, snapshot, tick
from tests.streams.fakes import Record
from topics.topic import MAX_MESSAGE_BYTES

KEY = b"c/n"


# -- what is sent


async def test_a_tick_goes_to_the_partition_that_it_came_from_with_its_offset_log_time_and_key() -> None:
    app = FakeApp()
    app.log(snapshot(1, container("p", gpu(0))), partition=3)
    for i in range(3):
        app.log(tick(i, 1), partition=3, timestamp=1000 + i)

    await app.read(ALLOCATIONS, SAMPLES, partition=3)

    assert [(s.topic, s.key, s.partition) for s in app.sender.sent] == [(OUTPUT, KEY, 3)] * 3
    outputs = app.sender.outputs()
    assert [(output.seq, output.offset, output.logged_ms) for output in outputs] == [(i, i, 1000 + i) for i in range(3)]
    assert {output.attribution for output in outputs} == {"exact"}
    assert [h.pod for h in app.sender.outputs()[0].devices[0].holders] == ["p"]


async def test_a_tick_is_finished_only_when_its_output_is_acknowledged() -> None:
    app = FakeApp()
    app.sender.holding = True
    app.log(tick(1, None))
    app.log(tick(2, None))
    await app.read(SAMPLES)
    assert app.position(SAMPLES) == 0

    app.sender.sent[1].acknowledged.set_result(1)
    await settle()
    assert app.position(SAMPLES) == 0

    app.sender.sent[0].acknowledged.set_result(0)
    await settle()
    assert app.position(SAMPLES) == 2
    assert app.total("ticks_total", "none") == 2


async def test_a_tick_that_waits_is_not_finished_and_those_of_other_nodes_go_on() -> None:
    app = FakeApp(grace_s=1e6)
    for i in range(50):
        app.log(tick(i, 1, node="stuck"))
        app.log(tick(i, None, node="fine"))

    await app.read(SAMPLES)

    assert [output.node for output in app.sender.outputs()] == ["fine"] * 50
    assert (app.position(SAMPLES), app.ledger.held.total()) == (0, 50)


async def test_outputs_keep_the_order_of_each_nodes_ticks_whatever_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FakeApp(grace_s=0.0)
    app.sender.turns = 5
    for i in range(60):
        for node in ("a", "b"):
            app.log(tick(i, 1 + i // 10, node=node), partition=i % 2)
            if i % 20 == 0:
                app.log(snapshot(1 + i // 10, node=node), partition=i % 2)

    async with looking(app, monkeypatch):
        taking = [
            asyncio.create_task(app.joiner.handle(batch))
            for _ in range(12)
            for partition in (0, 1)
            for batch in (app.batch(SAMPLES, partition, 7), app.batch(ALLOCATIONS, partition, 1))
        ]
        while len(app.sender.sent) < 120 and not app.failures:
            app.joiner.ends(app.now_s(), {tp: len(log) for tp, log in app.logs.items() if tp.topic == ALLOCATIONS})
            await asyncio.sleep(0.001)
        await asyncio.gather(*taking)

    for node, partition in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        seqs = [output.seq for output in app.sender.outputs() if output.node == node and output.seq % 2 == partition]
        assert seqs == list(range(partition, 60, 2))
    assert app.failures == []


async def test_a_node_that_another_partitioner_placed_is_counted_once_and_read_all_the_same() -> None:
    app = FakeApp(partitions=4)
    for partition in range(4):
        app.log(tick(1, None), partition=partition)
        app.log(tick(2, None), partition=partition)
        await app.read(SAMPLES, partition=partition)

    assert app.total("misplaced_nodes_total") == 3
    assert len(app.sender.outputs()) == 8


# -- what can't be used


async def test_records_that_cannot_be_decoded_go_to_the_dead_letters_and_the_rest_goes_on() -> None:
    app = FakeApp()
    app.log(tick(1, None))
    app.logs[Partition(SAMPLES, 0)].append(Record(KEY, b"{broken"))
    app.logs[Partition(SAMPLES, 0)].append(Record(None, None))
    app.log(tick(2, None))

    await app.read(SAMPLES)

    assert [output.seq for output in app.sender.outputs()] == [1, 2]
    first, second = app.sender.letters()
    assert (first.value, first.key, second.value, second.key) == (b"{broken", KEY, b"", None)
    assert (first.headers["topic"], first.headers["partition"], first.headers["offset"]) == (b"gpu.samples", b"0", b"1")
    assert app.position(SAMPLES) == 4
    assert app.total("records_dead_lettered_total", SAMPLES, "undecodable") == 2


@pytest.mark.parametrize("topic", [SAMPLES, ALLOCATIONS, WORKLOADS])
async def test_a_bad_record_is_finished_only_when_its_letter_is_acknowledged(topic: str) -> None:
    app = FakeApp()
    app.sender.holding = True
    app.logs[Partition(topic, 0)].append(Record(KEY, b"?"))
    await app.read(topic)
    assert app.position(topic) == 0

    app.sender.letters()[0].acknowledged.set_result(0)
    await settle()
    assert app.position(topic) == 1


@pytest.mark.parametrize("topic", [ALLOCATIONS, WORKLOADS])
async def test_a_bad_record_of_a_state_that_is_read_again_gets_no_second_letter(topic: str) -> None:
    app, tp = FakeApp(), Partition(topic, 0)
    app.logs[tp] += [Record(KEY, b"old"), Record(KEY, b"new")]
    app.settled[tp] = 1
    await app.read(topic)

    assert [letter.value for letter in app.sender.letters()] == [b"new"]
    assert app.position(topic) == 2


async def test_a_tick_whose_output_is_too_large_is_dead_lettered_with_its_own_bytes() -> None:
    app = FakeApp()
    app.sender.largest, app.sender.holding = 100, True
    app.log(tick(1, None))
    await app.read(SAMPLES)

    letter = app.sender.letters()[0]
    assert letter.value == app.logs[Partition(SAMPLES, 0)][0].value
    assert (letter.headers["offset"], letter.headers["error"]) == (b"0", b"unsendable: too large")
    assert app.position(SAMPLES) == 0

    letter.acknowledged.set_result(0)
    await settle()
    assert app.position(SAMPLES) == 1
    assert app.total("records_dead_lettered_total", SAMPLES, "unsendable") == 1
    assert app.total("ticks_total", "none") == 0


async def test_a_letter_that_the_broker_refuses_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = FakeApp()
    app.sender.holding = True
    app.logs[Partition(SAMPLES, 0)].append(Record(KEY, b"{"))
    await app.read(SAMPLES)

    app.sender.letters()[0].acknowledged.set_exception(Unsendable("refused"))
    await settle()
    assert (app.position(SAMPLES), app.failures) == (1, [])
    assert "gpu.samples partition 0: not even the dead letter of offset 0 could be sent: refused" in caplog.text


async def test_a_letter_is_never_larger_than_what_can_be_sent() -> None:
    app = FakeApp()
    app.logs[Partition(SAMPLES, 0)].append(Record(KEY, b"x" * 10_000_000))

    await app.read(SAMPLES)

    letter = app.sender.letters()[0]
    assert len(letter.value) + sum(map(len, letter.headers.values())) < MAX_MESSAGE_BYTES
    assert letter.headers["length"] == b"10000000"


async def test_a_sender_that_fails_ends_the_process_and_raises_nothing() -> None:
    app = FakeApp()
    app.sender.broken = True
    app.log(tick(1, None))

    await app.read(SAMPLES)

    assert len(app.failures) == 1
    assert app.position(SAMPLES) == 0


async def test_a_failure_names_its_record_with_the_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app, step = FakeApp(), join.step

    def failing(state: join.NodeState, record: join.Record, grace_s: float) -> object:
        if isinstance(record, join.PendingTick) and record.sample.seq == 3:
            raise KeyError("unexpected")
        return step(state, record, grace_s)

    monkeypatch.setattr(join, "step", failing)
    for seq in (1, 2, 3):
        app.log(tick(seq, None), partition=2)

    await app.read(SAMPLES, partition=2)

    assert len(app.failures) == 1
    assert caplog.text.endswith("\ngpu.samples, partition 2, offset 2\n")


async def test_an_output_that_is_not_acknowledged_ends_the_process() -> None:
    app = FakeApp()
    app.sender.holding = True
    app.log(tick(1, None))
    await app.read(SAMPLES)

    app.sender.sent[0].acknowledged.set_exception(OSError("gone"))
    await settle()

    assert len(app.failures) == 1
    assert app.position(SAMPLES) == 0
