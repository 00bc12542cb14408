"""A node's ticks reach the log in order, each after the snapshot that it names, whatever the broker does."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.instruments import Instruments
from producers import publisher as names
from producers.publisher import (
    LARGEST_VALUE_BYTES,
    MAX_IN_FLIGHT,
    RESEND_S,
    NodePublisher,
)
from producers.records import RetryBuffer
from tests.eventually import eventually, settle
from tests.producers.fakes import (
    CLUSTER,
    DROP_REASONS,
    NODE,
    FakeClock,
    FakeSender,
    containers,
    devices,
    instruments,
    running,
    value,
)

SAMPLES, ALLOCATIONS = "gpu.samples", "gpu.allocations"


class Bench:
    """A publisher with a fake clock and a fake broker."""

    def __init__(self, *, prompt: bool = False, buffer: RetryBuffer | None = None) -> None:
        self.clock = FakeClock()
        self.sender = FakeSender(self.clock, prompt=prompt)
        self.instruments: Instruments = instruments()
        self.ts_ms = 1_000
        self.publisher = NodePublisher(
            self.sender,
            self.instruments,
            cluster=CLUSTER,
            node=NODE,
            run_id=1_000,
            buffer=buffer,
            clock=self.clock,
        )

    def publish(self, *pods: str, kubelet: bool = True) -> int:
        self.ts_ms += 1_000
        return self.publisher.publish(self.ts_ms, devices(), containers(*pods) if kubelet else None)

    def count(self, name: str, **labels: str) -> float:
        return value(self.instruments, name, **labels)

    def dropped(self) -> dict[str, float]:
        counts = {reason: self.count(names.DROPPED, reason=reason) for reason in DROP_REASONS}
        return {reason: count for reason, count in counts.items() if count}

    def seqs(self, outcome: str = "sent") -> list[int]:
        return [record["seq"] for record in self.sender.records(SAMPLES, outcome)]


async def test_while_no_record_is_accepted_only_the_oldest_ticks_are_dropped() -> None:
    async with running(Bench(prompt=True, buffer=RetryBuffer(max_age_s=5.0))) as bench:
        bench.sender.taking.clear()
        await settle()
        for _ in range(20):
            bench.publish()
            await settle()
            bench.clock.now_s += 1.0
        bench.sender.taking.set()
        await settle()

    assert bench.seqs() == list(range(16, 21))
    assert bench.dropped() == {"buffer_age": 15}


async def test_the_snapshot_is_acknowledged_before_the_first_sample_that_names_it_is_sent() -> None:
    async with running(Bench()) as bench:
        bench.publish("a")
        await settle()
        assert [(event.outcome, event.topic) for event in bench.sender.events] == [("sent", ALLOCATIONS)]

        bench.sender.acknowledge()
        await settle()

    assert [(event.outcome, event.topic) for event in bench.sender.events] == [
        ("sent", ALLOCATIONS),
        ("acknowledged", ALLOCATIONS),
        ("sent", SAMPLES),
    ]
    assert {event.key for event in bench.sender.events} == {b"prod/gpu-1"}


async def test_the_snapshots_that_events_name_are_acknowledged_before_the_sample_too() -> None:
    async with running(Bench(prompt=True)) as bench:
        bench.publish("old")
        await settle()
        event = {"kind": "xid", "code": 31, "ts_ms": bench.ts_ms + 500}
        containers_at = {event["ts_ms"]: containers("between")}
        with_event = [{**devices()[0], "events": [event]}]
        bench.publisher.publish(bench.ts_ms + 1_000, with_event, containers("new"), containers_at.get)
        await settle()

    acknowledged = [
        (event.topic, event.record["seq"]) for event in bench.sender.events if event.outcome == "acknowledged"
    ]
    assert acknowledged == [(ALLOCATIONS, 1), (SAMPLES, 1), (ALLOCATIONS, 2), (ALLOCATIONS, 3), (SAMPLES, 2)]
    (sample,) = bench.sender.records(SAMPLES)[1:]
    assert sample["allocations_seq"] == 3
    assert sample["devices"][0]["events"] == [{**event, "allocations_seq": 2}]


async def test_a_node_without_a_kubelet_sends_samples_alone() -> None:
    async with running(Bench(prompt=True)) as bench:
        bench.publish(kubelet=False)
        await settle()

    assert [record["allocations_seq"] for record in bench.sender.records(SAMPLES)] == [None]
    assert bench.sender.records(ALLOCATIONS) == []


async def test_a_node_without_a_kubelet_goes_on_after_five_minutes_without_a_tick() -> None:
    async with running(Bench(prompt=True)) as bench:
        for _ in range(3):
            bench.publish(kubelet=False)
            await settle()
            bench.clock.now_s += RESEND_S

    assert bench.seqs() == [1, 2, 3]


async def test_samples_are_pipelined_up_to_a_limit() -> None:
    async with running(Bench()) as bench:
        for _ in range(MAX_IN_FLIGHT + 10):
            bench.publish(kubelet=False)
        await settle(MAX_IN_FLIGHT + 20)
        assert bench.seqs() == list(range(1, MAX_IN_FLIGHT + 1))

        bench.sender.acknowledge(3)
        await settle()
        assert bench.seqs() == list(range(1, MAX_IN_FLIGHT + 4))
        assert bench.publisher.held == MAX_IN_FLIGHT + 7


async def test_an_overflow_drops_the_oldest_unsent_and_leaves_a_gap() -> None:
    size = len(Bench().publisher._numbering.step(9_000, devices(), None).value or b"")
    async with running(Bench(buffer=RetryBuffer(max_bytes=(MAX_IN_FLIGHT + 5) * (size + 1)))) as bench:
        for _ in range(MAX_IN_FLIGHT + 20):
            bench.publish(kubelet=False)
            await settle(2)
        bench.sender.prompt = True
        bench.sender.acknowledge()
        await settle(100)

    sent = bench.seqs("acknowledged")
    lost = set(range(1, MAX_IN_FLIGHT + 21)) - set(sent)
    assert sent == sorted(sent)
    assert len(lost) == bench.dropped()["buffer_full"] > 10
    assert lost == set(range(MAX_IN_FLIGHT + 1, MAX_IN_FLIGHT + 1 + len(lost)))
    assert bench.count(names.HELD) == bench.count(names.BUFFERED) == 0


async def test_acknowledged_ticks_make_room_for_others() -> None:
    async with running(Bench(prompt=True, buffer=RetryBuffer(max_bytes=1_000))) as bench:
        for _ in range(50):
            bench.publish(kubelet=False)
            bench.publish(kubelet=False)
            await settle(5)

    assert bench.seqs("acknowledged") == list(range(1, 101))


async def test_ticks_that_waited_for_too_long_are_dropped_before_they_are_sent() -> None:
    bench = Bench(prompt=True, buffer=RetryBuffer(max_age_s=60.0))
    bench.publish(kubelet=False)
    bench.clock.now_s += 61.0
    bench.publish(kubelet=False)
    async with running(bench):
        await settle()

    assert bench.seqs() == [2]
    assert bench.dropped() == {"buffer_age": 1}


async def test_a_refused_tick_is_counted_and_the_others_go_on() -> None:
    async with running(Bench()) as bench:
        for _ in range(3):
            bench.publish(kubelet=False)
        await settle()
        bench.sender.acknowledge(1)
        bench.sender.refuse(1)
        bench.sender.acknowledge(1)
        await settle()

    assert bench.seqs("acknowledged") == [1, 3]
    assert bench.dropped() == {"refused": 1}
    assert bench.count(names.SENT) == 2


async def test_a_tick_larger_than_a_message_is_refused_before_it_is_sent() -> None:
    async with running(Bench(prompt=True)) as bench:
        large = [{"uuid": "GPU-0", "metrics": {}, "model": "x" * LARGEST_VALUE_BYTES}]
        assert bench.publisher.publish(2_000, large, None) == 1
        assert bench.publisher.publish(3_000, [{"uuid": "\ud800"}], None) == 2
        assert bench.publisher.publish(4_000, devices(), None) == 3
        await settle()

    assert bench.seqs() == [3]
    assert bench.dropped() == {"too_large": 1, "unencodable": 1}


async def test_lists_of_processes_that_have_no_room_are_counted() -> None:
    async with running(Bench(prompt=True)) as bench:
        crowded = [{"uuid": "GPU-0", "metrics": {}, "processes": [{"pid": pid} for pid in range(400_000)]}]
        bench.publisher.publish(2_000, crowded, None)
        await settle()

    assert (bench.seqs(), bench.dropped(), bench.count(names.CROWDED)) == ([1], {}, 1)


@pytest.mark.parametrize("cause", ["refused", "too_large"])
async def test_samples_go_without_a_snapshot_that_can_never_be_sent(cause: str) -> None:
    async with running(Bench()) as bench:
        bench.publish("a" if cause == "refused" else "a" * LARGEST_VALUE_BYTES)
        await settle()
        bench.sender.refuse(cause == "refused")
        bench.sender.prompt = True
        bench.sender.acknowledge()
        await settle()

    assert bench.seqs("acknowledged") == [1]
    assert bench.count(names.SNAPSHOTS_DROPPED, reason=cause) == 1


async def test_a_snapshot_in_use_is_sent_again_unchanged_after_five_minutes() -> None:
    async with running(Bench(prompt=True)) as bench:
        for _ in range(5):
            bench.publish("a")
            await settle()
            bench.clock.now_s += RESEND_S / 2
    first, *repeats = bench.sender.records(ALLOCATIONS)

    assert repeats == [first, first]
    assert bench.seqs() == [1, 2, 3, 4, 5]


async def test_a_snapshot_is_sent_again_while_no_tick_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RESEND_S", 0.01)
    async with running(Bench(prompt=True)) as bench:
        bench.publish("a")
        await eventually(lambda: len(bench.sender.records(ALLOCATIONS)) > 2)
    first, *repeats = bench.sender.records(ALLOCATIONS)
    assert repeats == [first] * len(repeats)
    assert bench.seqs() == [1]


async def test_after_an_outage_the_snapshot_comes_before_the_samples_that_name_it() -> None:
    async with running(Bench()) as bench:
        for _ in range(MAX_IN_FLIGHT + 1):
            bench.publish("a")
        await settle()
        bench.sender.acknowledge()
        await settle(2 * MAX_IN_FLIGHT)
        bench.clock.now_s += RESEND_S
        before = len(bench.sender.events)
        bench.sender.prompt = True
        bench.sender.acknowledge()
        await settle()

    after = [(event.outcome, event.topic) for event in bench.sender.events[before:]]
    assert after[-4:] == [
        ("sent", ALLOCATIONS),
        ("acknowledged", ALLOCATIONS),
        ("sent", SAMPLES),
        ("acknowledged", SAMPLES),
    ]


async def test_ticks_of_several_runs_are_sent_in_the_order_of_their_runs() -> None:
    async with running(Bench(prompt=True)) as bench:
        bench.publish("a")
        bench.publish("a")
        bench.ts_ms = 0
        bench.publish("a")
        await settle()

    runs = [(record["run_id"], record["seq"]) for record in bench.sender.records(SAMPLES)]
    assert runs == [(1_000, 1), (1_000, 2), (1_001, 1)]
    assert [(record["run_id"], record["seq"]) for record in bench.sender.records(ALLOCATIONS)] == [
        (1_000, 1),
        (1_001, 1),
    ]
    assert bench.publisher.sampled() == [(NODE, 1_000, 2), (NODE, 1_001, 1)]
    assert bench.count(names.RUNS) == 2


async def test_a_drain_waits_for_the_broker() -> None:
    async with running(Bench()) as bench:
        bench.publish("a")
        draining = asyncio.create_task(bench.publisher.drain(60.0))
        await settle()
        assert not draining.done()
        bench.sender.prompt = True
        bench.sender.acknowledge()

        assert await draining == 0
    assert bench.dropped() == {}


async def test_a_tick_that_is_published_just_before_a_drain_is_sent() -> None:
    async with running(Bench(prompt=True)) as bench:
        bench.publish("a")
        assert await bench.publisher.drain(60.0) == 0
    assert bench.seqs() == [1]


async def test_ticks_left_after_a_drain_are_dropped_and_counted() -> None:
    async with running(Bench()) as bench:
        for _ in range(MAX_IN_FLIGHT + 3):
            bench.publish(kubelet=False)
        await settle(2 * MAX_IN_FLIGHT)
        assert bench.count(names.HELD) == bench.count(names.MADE) == MAX_IN_FLIGHT + 3
        assert bench.count(names.BUFFERED) > 0
        assert bench.count(names.VALUES) == bench.publisher.sampled_values > 0

        assert await bench.publisher.drain(0.0) == MAX_IN_FLIGHT + 3
    assert bench.dropped() == {"stopped": MAX_IN_FLIGHT + 3}
    assert bench.count(names.HELD) == bench.count(names.BUFFERED) == 0


async def test_the_time_that_the_oldest_tick_has_waited_is_reported() -> None:
    async with running(Bench()) as bench:
        assert bench.publisher.waited_s() == 0.0
        bench.publish(kubelet=False)
        await settle()
        bench.clock.now_s += 31.0

        assert bench.publisher.waited_s() == 31.0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from([None, (), ("a",), ("b",), ("a", "b")])),
        st.tuples(st.just("acknowledge"), st.integers(1, 8)),
        st.tuples(st.just("refuse"), st.just(1)),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 100.0, RESEND_S])),
        st.tuples(st.just("step back"), st.just(None)),
    ),
    max_size=60,
)


@given(STEPS, st.integers(300, 5_000))
def test_whatever_the_broker_does_every_tick_is_accounted_for_and_follows_its_snapshot(
    steps: list[tuple[str, Any]], max_bytes: int
) -> None:
    asyncio.run(_run_steps(steps, max_bytes))


async def _run_steps(steps: list[tuple[str, Any]], max_bytes: int) -> None:
    bench = Bench(buffer=RetryBuffer(max_bytes=max_bytes, max_age_s=600.0))
    published: list[tuple[int, int]] = []
    async with running(bench):
        for step, argument in steps:
            _apply(bench, published, step, argument)
            await settle(4)
        bench.sender.prompt = True
        bench.sender.acknowledge()
        assert await bench.publisher.drain(30.0) == 0
    _check(bench, published)


def _apply(bench: Bench, published: list[tuple[int, int]], step: str, argument: Any) -> None:
    match step:
        case "publish":
            seq = bench.publish(*(argument or ()), kubelet=argument is not None)
            published.append((bench.publisher.run_id, seq))
        case "acknowledge":
            bench.sender.acknowledge(argument)
        case "refuse":
            bench.sender.refuse(argument)
        case "pass":
            bench.clock.now_s += argument
        case "step back":
            bench.ts_ms = max(0, bench.ts_ms - 10_000)


def _check(bench: Bench, published: list[tuple[int, int]]) -> None:
    sent = [(record["run_id"], record["seq"]) for record in bench.sender.records(SAMPLES)]
    assert [tick for tick in published if tick in set(sent)] == sent
    assert len(published) == len(set(published)) == bench.count(names.MADE)
    assert bench.count(names.MADE) == bench.count(names.SENT) + sum(bench.dropped().values())
    assert bench.count(names.SENT) == len(bench.sender.records(SAMPLES, "acknowledged"))
    settled: dict[tuple[int, int], float] = {}
    last: tuple[int, int] | None = None
    handed_over: dict[tuple[int, int], float] = {}
    for event in bench.sender.events:
        record = event.record
        if event.topic == ALLOCATIONS and event.outcome == "sent":
            handed_over[record["run_id"], record["seq"]] = event.at_s
        elif event.topic == ALLOCATIONS:
            last = (record["run_id"], record["seq"])
            settled[last] = handed_over[last]
        elif event.outcome == "sent" and record["allocations_seq"] is not None:
            named = (record["run_id"], record["allocations_seq"])
            assert named in settled
            assert event.at_s - settled[named] < RESEND_S
            assert last is not None
