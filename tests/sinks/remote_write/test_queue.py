"""Which ticks go into a request, and when: by node, by partition, and after lost answers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write import partition as module
from sinks.remote_write import queue
from sinks.remote_write.partition import RemoteWritePartition
from sinks.remote_write.policy import Answer, Protocol
from sinks.remote_write.queue import MAX_AHEAD_MS, STUCK_AFTER_S
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.windows import Resolution
from tests.eventually import eventually
from tests.sinks.conftest import SERIES, device, sample
from tests.sinks.records import ConsumedRecord, record
from tests.sinks.remote_write.receivers import KINDS, Kind, Receiver
from tests.sinks.remote_write.test_partition import Setup
from tests.sinks.remote_write.wire import Sample, read_v1, unsnappy

NOW_MS = sample(0).ts_ms


def ticks(*names: str) -> list[ConsumedRecord]:
    """A tick of each node named, at offsets that follow one another."""
    return [record(sample(seq, node=node), offset=seq) for seq, node in enumerate(names, 1)]


def record_at(node: str, after_ms: int, offset: int = 1) -> ConsumedRecord:
    """A tick of a node so long after the first of all."""
    return record(sample(offset, node=node, ts_ms=NOW_MS + after_ms))


@dataclass
class HeldReceiver(Receiver):
    """Answers a request with a node of ``hold`` only after it was removed from there. ``requests_seen`` has the nodes
    and times of each request."""

    hold: set[str] = field(default_factory=set)
    requests_seen: list[list[tuple[str, int]]] = field(default_factory=list)

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Takes a request of 1.0."""
        samples = read_v1(unsnappy(body))
        ticks = list(dict.fromkeys((dict(sample.labels).get("host_name", "pod"), sample.ts_ms) for sample in samples))
        self.requests_seen.append(ticks)
        await eventually(lambda: not self.hold.intersection(node for node, _ in ticks), every_s=0.001)
        return await super().post(body, protocol)

    def nodes(self) -> list[set[str]]:
        """The nodes of each request."""
        return [{node for node, _ in ticks} for ticks in self.requests_seen]


async def given_to(partition: RemoteWritePartition, setup: Setup, *records: ConsumedRecord) -> list[int]:
    """The offsets that a handler returns for records in one call; then the queue has a turn."""
    setup.queue_s += 1.0
    steps = [step async for step in partition.deliver(records, setup.abandon)]
    await asyncio.sleep(0)
    return steps


async def test_ticks_of_all_nodes_and_partitions_go_together_and_then_several_of_each() -> None:
    setup = Setup(receiver := HeldReceiver())
    other = setup.partition()
    await given_to(other, setup, *ticks("x"))
    await setup.deliver(*ticks(*"ab" * 9))
    assert receiver.nodes() == [{"x", "a", "b"}, {"a", "b"}]
    assert [len(request) for request in receiver.requests_seen] == [3, 16]
    assert setup.ends() == {"delivered": 18}


async def test_a_very_large_tick_goes_alone_and_no_other_node_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "LARGE_BYTES", 5000)
    setup = Setup(receiver := HeldReceiver(hold={"large"}))
    large = sample(2, *[device(f"GPU-{number}") for number in range(9)], node="large")
    await given_to(setup.handler, setup, *ticks("a"), record(large), *ticks("a", "a", "b", "c")[2:])
    await eventually(lambda: len(receiver.stored) == 3 * len(SERIES))
    assert [nodes for nodes in receiver.nodes() if "large" in nodes] == [{"large"}]
    receiver.hold = set()
    await setup.deliver()
    await eventually(lambda: len(receiver.stored) == 12 * len(SERIES))


async def test_a_request_that_takes_long_to_make_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_CPU_S", 0.0)
    setup = Setup(receiver := HeldReceiver())
    await setup.deliver(*ticks(*"abab"))
    assert receiver.nodes() == [{"a"}, {"b"}, {"a"}, {"b"}]
    assert setup.ends() == {"delivered": 4}


async def test_a_node_whose_last_tick_was_refused_goes_alone_until_one_is_accepted() -> None:
    setup = Setup(receiver := HeldReceiver())
    for seq, ts_ms in enumerate((9000, 1000, 2000, 3000, 10_000, 11_000), 1):
        times_ms = {"back": ts_ms} | dict.fromkeys("abc", 1000 * seq)
        samples = [sample(seq, node=node, ts_ms=at_ms) for node, at_ms in times_ms.items()]
        await setup.deliver(*[record(one, offset=4 * seq + number) for number, one in enumerate(samples)])
    assert setup.ends() == {"delivered": 6 * 3 + 3, "dropped": 3}
    shared = [nodes for nodes in receiver.nodes() if "back" in nodes and len(nodes) > 1]
    assert shared[0] == shared[1] == shared[-1] == {"back", "a", "b", "c"}
    alone = [nodes for nodes in receiver.nodes() if nodes == {"back"}]
    assert len(alone) == len(["found out", "refused", "refused", "accepted"])


@pytest.mark.parametrize(
    ("after", "ended"),
    [([device(pod="q")], len(SERIES) + len(["gpu_pod_info"])), ([device(pod="p"), device("GPU-b")], 0)],
)
async def test_a_tick_of_other_series_goes_alone(after: list[dict[str, Any]], ended: int) -> None:
    setup = Setup(receiver := HeldReceiver())
    devices = [device(pod="p")], [device(pod="p")], [device(pod="p")], after, after, after
    await setup.deliver(*[record(sample(seq, *of_tick)) for seq, of_tick in enumerate(devices, 1)])
    times = [len({ts_ms for _, ts_ms in request}) for request in receiver.requests_seen]
    assert times == [1, 2, 1, 2]
    assert setup.receiver.markers() == ended


async def test_a_node_of_which_something_is_left_out_sends_one_tick_at_a_time() -> None:
    refuse = HeldReceiver(
        lambda received_sample: "too long" if dict(received_sample.labels)["__name__"] == "gpu_temperature" else None
    )
    setup = Setup(refuse)
    await setup.deliver(*ticks("a", "a", "a", "a"))
    assert {len(request) for request in refuse.requests_seen} == {1}
    assert setup.ends() == {"dead_lettered": 1, "delivered": 3}


async def test_a_node_whose_request_hangs_holds_up_no_other_and_is_not_passed() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"a"}))
    setup.counted.read(6)
    assert await given_to(setup.handler, setup, *ticks("a")) == []
    await eventually(lambda: receiver.nodes() == [{"a"}])
    assert await given_to(setup.handler, setup, *ticks("a", "a", "b", "b", "c")[1:]) == []
    await eventually(lambda: len(receiver.stored) == 2 * len(SERIES))
    assert await given_to(setup.handler, setup) == []
    assert setup.ends() == {}
    receiver.hold = set()
    await eventually(lambda: len(receiver.stored) == 3 * len(SERIES))
    await eventually(lambda: [len(points) for points in receiver.stored.values()].count(2) == 2 * len(SERIES))
    assert await given_to(setup.handler, setup) == [6]
    assert setup.ends() == {"delivered": 5}


async def test_an_error_that_nobody_expects_in_a_request_is_raised_to_those_that_read() -> None:
    class Broken(Receiver):
        async def post(self, body: bytes, protocol: Protocol) -> Answer:
            raise RuntimeError("a defect")

    setup = Setup(Broken())
    await given_to(setup.handler, setup, *ticks("a"))
    await eventually(lambda: setup.queue.failure is not None)
    with pytest.raises(RuntimeError, match="a defect"):
        await given_to(setup.handler, setup)


async def test_partitions_advance_together() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"slow"}))
    ahead, further = setup.partition(), setup.partition()
    await given_to(setup.handler, setup, record_at("slow", 0))
    for other in (ahead, further):
        await other.quiet(setup.abandon)
    await eventually(lambda: receiver.nodes() == [{"slow"}])
    await given_to(ahead, setup, record_at("near", MAX_AHEAD_MS))
    await given_to(further, setup, record_at("far", MAX_AHEAD_MS + 1))
    await eventually(lambda: {"near"} in receiver.nodes())
    assert {"far"} not in receiver.nodes()
    receiver.hold = set()
    await eventually(lambda: len(receiver.stored) == 2 * len(SERIES))
    await setup.handler.quiet(setup.abandon)
    await eventually(lambda: {"far"} in receiver.nodes())


async def test_what_does_not_move_for_a_minute_is_not_waited_for() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"slow"}))
    other = setup.partition()
    await given_to(setup.handler, setup, record_at("slow", 0))
    await given_to(other, setup, record_at("far", MAX_AHEAD_MS + 1))
    setup.queue_s += STUCK_AFTER_S
    await given_to(other, setup)
    await eventually(lambda: {"far"} in receiver.nodes())


async def test_a_backlog_waits_for_partitions_that_are_not_opened_and_what_was_logged_just_now_does_not() -> None:
    setup = Setup(receiver := HeldReceiver())
    opening, other = setup.partition(), setup.partition()
    await given_to(setup.handler, setup, record_at("live", 0)._replace(timestamp=int(time.time() * 1000)))
    await eventually(lambda: receiver.nodes() == [{"live"}])
    await given_to(other, setup, record_at("old", 0))
    await asyncio.sleep(0)
    assert receiver.nodes() == [{"live"}]
    await opening.quiet(setup.abandon)
    await eventually(lambda: receiver.nodes() == [{"live"}, {"old"}])


async def test_a_live_node_whose_clock_is_hours_behind_holds_up_nobody() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"behind"}))
    other = setup.partition()
    now_ms = int(time.time() * 1000)
    await given_to(setup.handler, setup, record_at("behind", -7_200_000, 8_000)._replace(timestamp=now_ms))
    await given_to(other, setup, record_at("good", 0)._replace(timestamp=now_ms))
    await eventually(lambda: {"good"} in receiver.nodes())


async def test_no_more_is_read_than_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_RECORDS", 10)
    setup = Setup(receiver := HeldReceiver(hold={"a"}))
    await given_to(setup.handler, setup, *ticks(*"a" * 9))
    full = asyncio.ensure_future(given_to(setup.handler, setup, *ticks(*"a" * 20)[9:]))
    await eventually(lambda: receiver.requests_seen)
    assert not full.done()
    receiver.hold = set()
    assert (await full, await given_to(setup.handler, setup)) == ([2], [21])


async def test_what_is_under_way_when_the_partition_goes_is_waited_for_and_nothing_else_is_sent() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"a"}))
    setup.counted.read(2)
    await given_to(setup.handler, setup, *ticks("a", "a"))
    setup.abandon.set()
    leaving = asyncio.ensure_future(given_to(setup.handler, setup))
    await eventually(lambda: receiver.requests_seen)
    receiver.hold = set()
    assert await leaving == [2]
    assert len(receiver.requests_seen) == 1
    assert setup.ends() == {"delivered": 1}


async def test_windows_that_another_owner_gets_leave_room_when_the_partition_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(receiver := HeldReceiver(hold={"a"}), resolution=Resolution(1_000))
    setup.counted.read(5)
    first, second, *others = ticks("a", "a", "a", "a")
    await given_to(setup.handler, setup, first, second, *others)
    await eventually(lambda: receiver.requests_seen)
    setup.abandon.set()
    receiver.hold = set()
    assert await given_to(setup.handler, setup) == [2]
    monkeypatch.setattr(module, "AHEAD_RECORDS", 2)
    setup.abandon = asyncio.Event()
    coming_back = asyncio.ensure_future(given_to(setup.handler, setup, second))
    await eventually(coming_back.done)


async def test_a_partition_that_comes_back_to_another_handler_has_its_series_while_an_old_request_hangs() -> None:
    rules = "- {source_labels: [k8s_pod_name], target_label: pod}"
    setup = Setup(receiver := HeldReceiver(), relabelling=Relabelling([load(rules, "rules.yml")]))
    first, second, third = ticks("a", "a", "a")
    await setup.deliver(first)
    receiver.hold = {"a"}
    await given_to(setup.handler, setup, second)
    await eventually(lambda: len(receiver.requests_seen) == 2)

    setup.abandon.set()
    setup.abandon, setup.handler = asyncio.Event(), setup.partition()
    setup.handler.recall(first)
    await given_to(setup.handler, setup, second)
    receiver.hold = set()
    await setup.deliver(third)
    assert setup.count("samples_withheld_total") == 0
    assert [len(points) for points in receiver.stored.values()] == [3] * len(SERIES)


async def test_what_was_finished_before_one_that_was_not_is_counted_once_when_the_partition_comes_back() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"a"}))
    setup.counted.read(2)
    await given_to(setup.handler, setup, *ticks("a"))
    await eventually(lambda: receiver.requests_seen)
    await given_to(setup.handler, setup, *ticks("a", "b")[1:])
    await eventually(lambda: len(receiver.stored) == len(SERIES))
    setup.abandon.set()
    setup.counted.release(2)
    receiver.hold, setup.abandon = set(), asyncio.Event()
    await setup.deliver(*ticks("a", "b"))
    assert receiver.nodes().count({"b"}) == 1
    assert setup.ends() == {"delivered": 2}
    assert setup.balanced()


async def test_a_topic_that_was_created_again_is_sent_from_its_beginning() -> None:
    setup = Setup(receiver := HeldReceiver(hold={"a"}))
    setup.counted.read(1)
    await given_to(setup.handler, setup, *ticks("a"))
    await eventually(lambda: receiver.requests_seen)
    setup.handler.reset()
    setup.counted.release(1)
    receiver.hold = set()
    await setup.deliver(record_at("a", 5000, offset=1), record_at("a", 6000, offset=2))
    assert setup.ends() == {"delivered": 2}
    assert setup.balanced()


class Crash(Receiver):
    """Loses answers according to ``plan``, and hangs at the end of it: then ``crashed`` is set."""

    def __init__(self, plan: Sequence[str], *, kind: Kind) -> None:
        super().__init__(kind=kind)
        self.plan, self.crashed = list(plan), asyncio.Event()

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Accepts a request or not, and answers or not."""
        step = self.plan.pop(0) if self.plan else "good"
        if step == "away":
            return Answer(503)
        answer = await super().post(body, protocol)
        if step == "killed":
            self.crashed.set()
            await asyncio.Event().wait()
        return Answer(0, "reset by peer") if step == "lost" else answer


STEPS = st.sampled_from(["good", "good", "lost", "away", "killed"])


@given(
    st.lists(st.sampled_from("aab"), min_size=1, max_size=20),
    st.lists(STEPS, max_size=12),
    st.sampled_from(KINDS),
    st.integers(5, 60),
)
def test_whatever_answers_are_lost_and_whenever_it_is_killed_all_is_in_and_counts_as_delivered(
    nodes: list[str], plan: list[str], kind: Kind, max_samples: int
) -> None:
    async def play() -> None:
        receiver = Crash(plan, kind=kind)
        records = ticks(*nodes)
        while records:
            receiver.crashed.clear()
            setup = Setup(receiver, kind.protocol, max_samples)
            life = asyncio.ensure_future(setup.deliver(*records))
            killed = asyncio.ensure_future(receiver.crashed.wait())
            await asyncio.wait((life, killed), return_when=asyncio.FIRST_COMPLETED)
            killed.cancel()
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await setup.queue.close()
            assert set(setup.ends()) <= {"delivered"}
            assert setup.balanced()
            records = [remaining for remaining in records if remaining.offset >= max(setup.steps, default=0)]
        stored = {(host(series), ts_ms) for series, points in receiver.stored.items() for ts_ms, _ in points}
        assert stored == {(node, sample(seq).ts_ms) for seq, node in enumerate(nodes, 1)}
        assert len({len(points) for series, points in receiver.stored.items() if host(series) == "a"}) <= 1

    def host(series: frozenset[tuple[str, str]]) -> str:
        return dict(Sample(tuple(series), 0, 0).labels)["host_name"]

    asyncio.run(play())
