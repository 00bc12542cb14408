"""The app around the reader: its wiring, what its agent finishes with, and its end."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from delivery.group import MustRestart
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from delivery.settings import MemberSettings
from delivery.watchdog import Pulse, StallDetector
from streams.app import ReaderApp
from streams.reader import Reads

TP = Partition("ticks", 0)
STATE = Partition("owners", 0)


class Stage:
    def __init__(self) -> None:
        self.known_ends: list[Mapping[Partition, int]] = []

    def forget(self) -> None:
        """Nothing is kept."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Nothing is kept."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing is kept."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        self.known_ends.append(ends)


class Bench:
    """An app that never connects, and its failures."""

    def __init__(self, **options: Any) -> None:
        self.failed: list[str] = []
        self.stage = Stage()
        member = MemberSettings(group="g", kafka="127.0.0.1:1")
        reads = Reads(inputs=("ticks",), states=("owners",), **options)
        self.app = ReaderApp(member, reads, self.stage, fail=self.failed.append)

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


@pytest.fixture
async def bench() -> Bench:
    """An app that never connects."""
    return Bench()


# -- the watchdog


async def test_a_start_may_last_as_long_as_the_group_waits_for_a_member_that_was_killed() -> None:
    member = MemberSettings(group="g", kafka="127.0.0.1:1", session_timeout_s=300.0)
    app = ReaderApp(member, Reads(inputs=("ticks",), states=("owners",)), Stage())
    detector = StallDetector(app.deadlines)
    joining = [Pulse(beat=s, progress=0, turns=s, working=False, ready=False, reachable=s) for s in range(400)]
    assert [reason for pulse in joining if (reason := detector.check(pulse))] == []


@pytest.mark.parametrize("refusal", ["gpu.attributed partition 0: not enough replicas", None])
async def test_records_that_wait_because_kafka_refuses_what_was_made_of_them_are_no_stall(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refusal: str | None
) -> None:
    detector = StallDetector(bench.app.deadlines)
    monkeypatch.setattr(bench.app.sender, "refusal", lambda: refusal)
    bench.admit()
    reasons = []
    for _ in range(200):
        await ask(bench, 7)
        reasons.append(detector.check(bench.app._pulse()))
    assert any(reasons) == (refusal is None)


# -- finishing


@pytest.mark.parametrize("already", [True, False])
async def test_a_record_is_finished_when_its_output_is_acknowledged(bench: Bench, already: bool) -> None:
    output = asyncio.Future[int]()
    if already:
        output.set_result(7)
    bench.app.finish_when(bench.admit(), output)
    assert bench.position() == 0
    if not already:
        output.set_result(7)
    await asyncio.sleep(0)
    assert bench.position() == 1


@pytest.mark.parametrize("already", [True, False])
async def test_an_output_that_fails_ends_the_process_and_finishes_nothing(bench: Bench, already: bool) -> None:
    output = asyncio.Future[int]()
    if already:
        output.set_exception(Unsendable("too large"))
    bench.app.finish_when(bench.admit(), output)
    if not already:
        output.cancel()
    await asyncio.sleep(0)
    assert "ticks" in bench.failed[0]
    assert bench.position() == 0


async def test_an_output_that_fails_in_an_older_epoch_ends_nothing(bench: Bench) -> None:
    output = asyncio.Future[int]()
    bench.app.finish_when(bench.admit(), output)
    bench.app.reader.end_epoch()
    output.cancel()
    await asyncio.sleep(0)
    assert bench.failed == []


# -- wiring


@pytest.fixture
def no_broker_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender and a group that need no broker to be connected."""

    async def at_once(self: Any) -> None:
        """Connected."""

    monkeypatch.setattr("delivery.sender.Sender.start", at_once)
    monkeypatch.setattr("delivery.group.ConsumerGroup.connect", at_once)
    monkeypatch.setattr("delivery.group.ConsumerGroup.join", lambda self: None)


async def run_briefly(bench: Bench) -> None:
    """Run until stopped, which it is at once after it has started."""
    stop = asyncio.Event()
    running = asyncio.ensure_future(bench.app.run(stop))
    await asyncio.wait([running], timeout=0.1)
    stop.set()
    await asyncio.wait_for(running, 8)


async def test_an_app_with_one_agent_on_the_batches_runs_and_is_given_them(
    bench: Bench, no_broker_needed: None
) -> None:
    received: list[Any] = []

    @bench.app.agent(bench.app.batches)  # type: ignore[untyped-decorator]
    async def agent(batches: AsyncIterator[Any]) -> None:
        async for batch in batches:
            received.append(batch)
            stop.set()

    stop = asyncio.Event()
    running = asyncio.ensure_future(bench.app.run(stop))
    while not bench.app.batches.readers():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    await bench.app.reader.deliver([(bench.admit(), "record")])
    await asyncio.wait_for(running, 8)
    assert [[record for _, record in batch] for batch in received] == [["record"]]
    assert bench.failed == []


async def test_an_app_without_an_agent_is_refused(bench: Bench, no_broker_needed: None) -> None:
    with pytest.raises(RuntimeError, match="0 agents"):
        await run_briefly(bench)


async def test_an_agent_on_something_else_does_not_count(bench: Bench, no_broker_needed: None) -> None:
    bench.app.agent(bench.app.channel())(ignore)
    with pytest.raises(RuntimeError, match="0 agents"):
        await run_briefly(bench)


async def test_two_agents_on_the_batches_are_refused(bench: Bench, no_broker_needed: None) -> None:
    for name in ("one", "another"):
        bench.app.agent(bench.app.batches, name=name)(ignore)
    with pytest.raises(RuntimeError, match="2 agents"):
        await run_briefly(bench)


async def test_a_topic_that_is_subscribed_to_is_refused(bench: Bench, no_broker_needed: None) -> None:
    bench.app.agent(bench.app.batches)(ignore)
    bench.app.topics.add(bench.app.topic("others"))
    with pytest.raises(RuntimeError, match="others"):
        await run_briefly(bench)


async def ignore(batches: AsyncIterator[Any]) -> None:
    async for _ in batches:
        pass


async def test_faust_starts_agents_and_neither_a_client_of_kafka_nor_a_web_server(bench: Bench) -> None:
    assert [type(service).__name__ for service in bench.app.boot_strategy.server()] == ["AgentManager"]


async def test_a_group_that_must_be_started_again_ends_the_run_with_its_reason(
    bench: Bench, no_broker_needed: None
) -> None:
    bench.app.agent(bench.app.batches)(ignore)
    bench.app.group._fail("other partitions")
    with pytest.raises(MustRestart, match="other partitions"):
        await bench.app.run(asyncio.Event())
    assert bench.failed == []


@pytest.mark.parametrize("error", [KeyError("ticks"), asyncio.CancelledError()])
async def test_whatever_fails_in_the_reader_ends_the_process(
    bench: Bench, no_broker_needed: None, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def turn() -> None:
        raise error

    bench.app.agent(bench.app.batches)(ignore)
    monkeypatch.setattr(bench.app.reader, "turn", turn)
    await run_briefly(bench)
    assert bench.failed[0].startswith(("the reader failed: KeyError", "the reader was cancelled"))


# -- batches


async def test_batches_are_neither_held_up_nor_dropped_by_fausts_flow_control(bench: Bench) -> None:
    listening = bench.agent()
    bench.app.flow_control.suspend()
    bench.app.flow_control.clear()
    await bench.app.reader.deliver([(bench.admit(), "record")])
    bench.app.flow_control.resume()
    event = await asyncio.wait_for(anext(listening), 5)
    assert event.value[0][1] == "record"


async def test_delivering_waits_for_room(bench: Bench) -> None:
    listening = bench.agent()
    for _ in range(2):
        await bench.app.reader.deliver([])
    waiting = asyncio.ensure_future(bench.app.reader.deliver([]))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await anext(listening)
    await asyncio.wait_for(waiting, 5)


# -- asking for ends


async def ask(bench: Bench, answer: Any, meanwhile: Any = lambda: None) -> list[list[Partition]]:
    """Ask a broker that answers so once; returns what it was asked for."""
    asked_for: list[list[Partition]] = []

    async def ends(tps: list[Partition]) -> dict[Partition, int]:
        asked_for.append(tps)
        meanwhile()
        if isinstance(answer, BaseException):
            raise answer
        return dict.fromkeys(tps, answer)

    bench.app.group.offsets.ends = ends  # type: ignore[method-assign]
    bench.app.ask_ends()
    asking = asyncio.create_task(bench.app.loops.ask_for_ends())
    while not asked_for:
        assert not asking.done(), asking.exception()
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    return asked_for


async def test_the_stage_learns_where_our_partitions_end(bench: Bench) -> None:
    bench.admit()
    await ask(bench, 7)
    assert bench.stage.known_ends == [{TP: 7, STATE: 7}]


async def test_the_stage_learns_where_watched_topics_end_of_the_numbers_that_are_read() -> None:
    bench = Bench(watched=("sources",))
    bench.admit()
    await ask(bench, 7)
    assert bench.stage.known_ends == [{TP: 7, STATE: 7, Partition("sources", TP.partition): 7}]


async def test_before_an_assignment_the_broker_is_asked_all_the_same_but_the_stage_learns_nothing(bench: Bench) -> None:
    assert await ask(bench, 7) == [[TP]]
    assert bench.stage.known_ends == []


async def test_the_stage_learns_that_a_rebalance_has_left_it_no_partition(bench: Bench) -> None:
    bench.app.reader.ledger.begin({})
    assert await ask(bench, 7) == [[TP]]
    assert bench.stage.known_ends == [{}]


@pytest.mark.parametrize("error", [RuntimeError("away"), asyncio.CancelledError()])
async def test_a_broker_that_does_not_say_where_partitions_end_is_asked_again(
    bench: Bench, error: BaseException
) -> None:
    bench.admit()
    await ask(bench, error)
    assert bench.stage.known_ends == []


async def test_ends_that_were_asked_for_in_an_older_epoch_are_not_reported(bench: Bench) -> None:
    bench.admit()

    await ask(bench, 7, meanwhile=bench.app.reader.end_epoch)
    assert bench.stage.known_ends == []


# -- the end


@pytest.fixture
def waiting_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that finds no broker."""

    async def for_ever(self: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("delivery.sender.Sender.start", for_ever)


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

    monkeypatch.setattr("delivery.sender.Sender.start", fail)
    with pytest.raises(RuntimeError, match="no such thing"):
        await bench.app.run(asyncio.Event())


async def test_an_output_that_a_stop_cancels_is_no_failure(bench: Bench) -> None:
    output = asyncio.Future[int]()
    bench.app.finish_when(bench.admit(), output)
    await bench.app.close()
    output.cancel()
    await asyncio.sleep(0)
    assert bench.failed == []


async def test_what_the_broker_takes_while_the_app_stops_is_finished_before_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, committed = asyncio.Future[int](), list[int | None]()
    bench.app.finish_when(bench.admit(), output)

    async def flush(timeout_s: float) -> None:
        if not output.done():
            output.set_result(7)
        await asyncio.sleep(0)

    async def commit() -> bool:
        committed.append(bench.position())
        return True

    monkeypatch.setattr(bench.app.sender, "flush", flush)
    monkeypatch.setattr(bench.app.reader, "commit", commit)
    await bench.app.close()
    assert committed == [1]
