"""The app around the reader: its wiring, what its agent finishes with, and its end."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from delivery.ledger import Partition, Slot
from streams.reader.app import ReaderApp, ReaderSettings
from topics.sender import Unsendable

TP = Partition("ticks", 0)
STATE = Partition("owners", 0)


class Stage:
    def __init__(self) -> None:
        self.told: list[Mapping[Partition, int]] = []

    def forget(self) -> None:
        """Nothing is kept."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Nothing is kept."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing is kept."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        self.told.append(ends)


class Bench:
    """An app that never connects, and what it failed of."""

    def __init__(self, **options: Any) -> None:
        self.failed: list[str] = []
        self.stage = Stage()
        reads = ReaderSettings(group="g", kafka="127.0.0.1:1", inputs=("ticks",), states=("owners",), **options)
        self.app = ReaderApp(reads, self.stage, fail=self.failed.append)

    def agent(self, channel: Any = None, name: str = "agent") -> Any:
        """An agent on the batches, listening as it does once it has started."""

        @self.app.agent(self.app.batches if channel is None else channel, name=name)  # type: ignore[untyped-decorator]
        async def agent(batches: AsyncIterator[Any]) -> None:
            async for _ in batches:
                pass

        return aiter(agent.channel)

    def admit(self, offset: int = 0) -> Slot:
        ledger = self.app.reader.ledger
        if not ledger.ready:
            ledger.begin({TP: 0, STATE: 0})
        return ledger.admit(TP, offset, 10)

    def position(self) -> int | None:
        return self.app.reader.ledger.position(TP)

    def close(self) -> None:
        if self.app._consumer is not None:
            self.app._consumer._thread.thread_loop.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """An app that never connects."""
    bench = Bench()
    yield bench
    bench.close()


# -- finishing


async def test_a_record_without_output_is_finished(bench: Bench) -> None:
    bench.app.finish_when(bench.admit(), [])
    assert bench.position() == 1


async def test_a_record_is_finished_when_the_last_of_its_outputs_is_acknowledged(bench: Bench) -> None:
    outputs = [asyncio.Future[int]() for _ in range(3)]
    outputs[1].set_result(5)
    bench.app.finish_when(bench.admit(), outputs)
    outputs[2].set_result(6)
    await asyncio.sleep(0)
    assert bench.position() == 0
    outputs[0].set_result(7)
    await asyncio.sleep(0)
    assert bench.position() == 1


async def test_a_record_whose_outputs_are_all_acknowledged_is_finished_at_once(bench: Bench) -> None:
    output = asyncio.Future[int]()
    output.set_result(5)
    bench.app.finish_when(bench.admit(), [output, output])
    assert bench.position() == 1


@pytest.mark.parametrize("already", [True, False])
async def test_an_output_that_fails_ends_the_process_and_finishes_nothing(bench: Bench, already: bool) -> None:
    output = asyncio.Future[int]()
    if already:
        output.set_exception(Unsendable("too large"))
    bench.app.finish_when(bench.admit(), [output])
    if not already:
        output.cancel()
    await asyncio.sleep(0)
    assert "ticks" in bench.failed[0]
    assert bench.position() == 0


async def test_an_output_that_fails_in_an_older_epoch_ends_nothing(bench: Bench) -> None:
    output = asyncio.Future[int]()
    bench.app.finish_when(bench.admit(), [output])
    bench.app.reader.end_epoch()
    output.cancel()
    await asyncio.sleep(0)
    assert bench.failed == []


# -- wiring


def wired(bench: Bench) -> Bench:
    bench.listening = bench.agent()  # type: ignore[attr-defined]
    return bench


async def test_one_agent_on_the_batches_and_our_topics_are_what_is_wanted(bench: Bench) -> None:
    wired(bench).app._check_wiring()


async def test_an_app_without_an_agent_is_refused(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="0 agents"):
        bench.app._check_wiring()


async def test_an_agent_on_something_else_does_not_count(bench: Bench) -> None:
    listening = bench.agent(bench.app.channel())
    with pytest.raises(RuntimeError, match="0 agents"):
        bench.app._check_wiring()
    assert listening


async def test_two_agents_on_the_batches_are_refused(bench: Bench) -> None:
    another = wired(bench).agent(name="another")
    with pytest.raises(RuntimeError, match="2 agents"):
        bench.app._check_wiring()
    assert another


async def test_a_topic_that_nothing_reads_is_refused(bench: Bench) -> None:
    wired(bench).app.topics.add(bench.app.topic("others"))
    with pytest.raises(RuntimeError, match="others"):
        bench.app._check_wiring()


async def test_a_consumer_that_is_not_ours_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReaderApp, "consumer", object())
    with pytest.raises(TypeError, match="lossless"):
        wired(bench).app._check_wiring()


async def test_there_is_no_web_server_and_no_producer_of_fausts(bench: Bench) -> None:
    services = [type(service).__name__ for service in bench.app.boot_strategy.server()]
    assert bench.app.conf.web_enabled is False
    assert "Consumer" in services
    assert not {"Web", "Producer"} & set(services)


async def test_the_end_of_the_process_waits_for_no_thread_that_waits_for_a_broker(bench: Bench) -> None:
    thread = bench.app.consumer._thread
    assert thread.Worker(thread).daemon


async def test_partitions_are_given_out_by_the_co_partitioning_assignor(bench: Bench) -> None:
    assert bench.app.conf.table_standby_replicas == 1
    assert not bench.app.tables


async def test_a_member_with_an_instance_id_comes_back_under_its_own_url() -> None:
    benches = [Bench(instance_id="worker-3") for _ in range(2)]
    assert {str(bench.app.conf.canonical_url) for bench in benches} == {"http://worker-3:6066"}
    assert benches[0].app.conf.consumer_group_instance_id == "worker-3"


# -- batches


async def test_batches_are_neither_held_up_nor_dropped_by_fausts_flow_control(bench: Bench) -> None:
    listening = bench.agent()
    bench.app.flow_control.suspend()
    bench.app.flow_control.clear()
    await bench.app._deliver([(bench.admit(), "record")])
    bench.app.flow_control.resume()
    event = await asyncio.wait_for(anext(listening), 5)
    assert event.value[0][1] == "record"


async def test_delivering_waits_for_room(bench: Bench) -> None:
    listening = bench.agent()
    for _ in range(16):
        await bench.app._deliver([])
    waiting = asyncio.ensure_future(bench.app._deliver([]))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await anext(listening)
    await asyncio.wait_for(waiting, 5)


# -- asking for ends


class Ends:
    """A client that is only asked where partitions end."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[list[Partition]] = []

    async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
        self.asked.append(tps)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return dict.fromkeys(tps, self.answer)


async def test_the_stage_is_told_where_our_partitions_end(bench: Bench) -> None:
    bench.admit()
    await bench.app._ask_once(Ends(7))  # type: ignore[arg-type]
    assert bench.stage.told == [{TP: 7, STATE: 7}]


async def test_the_stage_is_told_where_watched_topics_end_of_the_numbers_that_are_read() -> None:
    bench = Bench(watched=("sources",))
    bench.admit()
    await bench.app._ask_once(Ends(7))  # type: ignore[arg-type]
    assert bench.stage.told == [{TP: 7, STATE: 7, Partition("sources", TP.partition): 7}]


async def test_without_partitions_the_broker_is_asked_all_the_same_but_the_stage_not_told(bench: Bench) -> None:
    client = Ends(7)
    await bench.app._ask_once(client)  # type: ignore[arg-type]
    assert client.asked == [[TP]]
    assert bench.stage.told == []


@pytest.mark.parametrize("error", [RuntimeError("away"), asyncio.CancelledError()])
async def test_a_broker_that_does_not_say_where_partitions_end_is_asked_again(
    bench: Bench, error: BaseException
) -> None:
    bench.admit()
    await bench.app._ask_once(Ends(error))  # type: ignore[arg-type]
    assert bench.stage.told == []


async def test_ends_that_were_asked_for_in_an_older_epoch_are_not_told(bench: Bench) -> None:
    bench.admit()

    class Rebalancing(Ends):
        async def ends(self, tps: list[Partition]) -> Mapping[Partition, int]:
            bench.app.reader.end_epoch()
            return await super().ends(tps)

    await bench.app._ask_once(Rebalancing(7))  # type: ignore[arg-type]
    assert bench.stage.told == []


# -- the end


@pytest.fixture
def waiting_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that finds no broker."""

    async def for_ever(self: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("topics.sender.Sender.start", for_ever)


async def test_a_stop_ends_a_start_that_waits_for_a_broker(bench: Bench, waiting_sender: None) -> None:
    stop = asyncio.Event()
    running = asyncio.ensure_future(bench.app.run(stop))
    await asyncio.sleep(0.05)
    assert not running.done()
    stop.set()
    await asyncio.wait_for(running, 8)
    assert bench.failed == []


async def test_a_start_that_fails_is_raised(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("topics.sender.Sender.start", fail)
    with pytest.raises(RuntimeError, match="no such thing"):
        await bench.app.run(asyncio.Event())


async def test_an_output_that_a_stop_cancels_is_no_failure(bench: Bench) -> None:
    output = asyncio.Future[int]()
    bench.app.finish_when(bench.admit(), [output])
    await bench.app._stop_all()
    output.cancel()
    await asyncio.sleep(0)
    assert bench.failed == []
