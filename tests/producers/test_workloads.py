"""A node's workloads are sent when they change, and again now and then while they do not."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers import publisher as names
from producers.publisher import LARGEST_VALUE_BYTES, RESEND_S
from producers.records import WorkloadsContent
from producers.workloads import MAX_IN_FLIGHT, WorkloadsPublisher
from tests.eventually import settle
from tests.producers.fakes import FakeClock, FakeSender, instruments, running, value

WORKLOADS = "gpu.workloads"


def _pods(*pods: str) -> list[dict[str, Any]]:
    return [{"namespace": "ml", "name": pod, "uid": f"uid-{pod}"} for pod in pods]


class Bench:
    """A publisher with a fake clock and a fake broker."""

    def __init__(self, *, prompt: bool = True) -> None:
        self.clock = FakeClock()
        self.sender = FakeSender(self.clock, prompt=prompt)
        self.instruments = instruments()
        self.publisher = WorkloadsPublisher(self.sender, self.instruments, cluster="prod", epoch=5, clock=self.clock)

    def publish(self, node: str, *pods: str, ts_ms: int = 1) -> int | None:
        return self.publisher.publish(ts_ms, node, WorkloadsContent({"zone": "a"}, _pods(*pods)))

    def sent(self) -> list[tuple[str, int, list[str]]]:
        records = self.sender.records(WORKLOADS)
        return [(record["node"], record["seq"], [pod["name"] for pod in record["pods"]]) for record in records]

    def dropped(self, reason: str) -> float:
        return value(self.instruments, names.WORKLOADS_DROPPED, reason=reason)


async def test_a_node_is_sent_when_it_changes_and_only_then() -> None:
    async with running(Bench()) as bench:
        assert [bench.publish("n1", "a"), bench.publish("n1", "a"), bench.publish("n2", "a")] == [1, None, 1]
        await settle()
        assert bench.publish("n1", "a", "b") == 2
        await settle()

    assert bench.sent() == [("n1", 1, ["a"]), ("n2", 1, ["a"]), ("n1", 2, ["a", "b"])]
    assert {event.key for event in bench.sender.events} == {b"prod/n1", b"prod/n2"}
    assert {record["epoch"] for record in bench.sender.records(WORKLOADS)} == {5}


async def test_only_the_newest_record_of_a_node_waits_for_the_broker() -> None:
    async with running(Bench(prompt=False)) as bench:
        for number in range(MAX_IN_FLIGHT):
            bench.publish(f"n{number}", "a")
        await settle(2 * MAX_IN_FLIGHT)
        for pod in "bcd":
            bench.publish("n0", pod)
        await settle()
        bench.sender.prompt = True
        bench.sender.acknowledge()
        assert await bench.publisher.drain(30.0) == 0

    assert bench.sent()[MAX_IN_FLIGHT:] == [("n0", 4, ["d"])]
    assert bench.dropped("superseded") == 2


_NODES = st.sampled_from(["n1", "n2"])
_ENDS = st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(1, 3), max_size=3)  # None: it runs
_STEPS = st.one_of(
    st.tuples(st.just("publish"), _NODES, _ENDS),
    st.tuples(st.just("forget"), _NODES, st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.0, RESEND_S / 2, RESEND_S]), st.none()),
    st.tuples(st.just("acknowledge"), st.none(), st.none()),
)


@given(st.lists(_STEPS, max_size=20))
def test_a_reader_knows_all_that_was_published_whatever_was_sent_of_it(steps: list[tuple[str, Any, Any]]) -> None:
    async def scenario(bench: Bench) -> dict[str, dict[str, Any]]:
        published: dict[str, dict[str, Any]] = {}
        for kind, argument, ends in steps:
            if kind == "publish":
                rows = [
                    pod if ends[pod["name"]] is None else {**pod, "ended_ms": ends[pod["name"]]} for pod in _pods(*ends)
                ]
                bench.publisher.publish(1, argument, WorkloadsContent({}, rows))
                published[argument] = {row["uid"]: row for row in rows}
            elif kind == "forget":
                bench.publisher.forget(argument)
            elif kind == "wait":
                bench.clock.now_s += argument
                await settle()
            else:
                bench.sender.acknowledge()
        bench.sender.prompt = True
        bench.sender.acknowledge()
        assert await bench.publisher.drain(30.0) == 0
        return published

    async def story() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        async with running(Bench(prompt=False)) as bench:
            return await scenario(bench), bench.sender.records(WORKLOADS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producers.workloads.CHECK_S", 0.0)
        published, records = asyncio.run(story())
    known: dict[str, dict[str, Any]] = {}
    last_seqs: dict[str, int] = {}
    for record in records:
        assert record["seq"] > last_seqs.get(record["node"], 0)
        last_seqs[record["node"]] = record["seq"]
        ended = {uid: pod for uid, pod in known.get(record["node"], {}).items() if "ended_ms" in pod}
        known[record["node"]] = ended | {pod["uid"]: pod for pod in record["pods"]}
    for node, pods in published.items():
        assert pods.items() <= known[node].items()
        assert all("ended_ms" in pod for uid, pod in known[node].items() if uid not in pods)


async def test_a_node_that_does_not_change_is_sent_again_after_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.workloads.CHECK_S", 0.0)
    async with running(Bench()) as bench:
        bench.publish("n1", "a", ts_ms=7)
        await settle()
        bench.clock.now_s += RESEND_S
        await settle()
    first, again = bench.sender.records(WORKLOADS)

    assert again == {**first, "seq": 2}


def _ended(*pods: str, at_ms: int = 5) -> list[dict[str, Any]]:
    return [{**pod, "ended_ms": at_ms} for pod in _pods(*pods)]


async def test_an_ended_pod_is_in_the_record_that_ends_it_and_in_those_of_every_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("producers.workloads.CHECK_S", 0.0)
    async with running(Bench()) as bench:
        for number in range(60):  # a change every 10 s, so that five minutes never pass without one
            ended = ["a"] if number > 0 else []
            running_now = [f"p{number}", *(() if ended else ["a"])]
            bench.publisher.publish(number, "n1", WorkloadsContent({}, [*_pods(*running_now), *_ended(*ended)]))
            await settle()
            bench.clock.now_s += 10.0
            await settle()

    with_a = [number for number, (_, _, pods) in enumerate(bench.sent()) if "a" in pods]
    assert with_a == [0, 1, 30, 61]
    assert [seq for _, seq, _ in bench.sent()] == sorted({seq for _, seq, _ in bench.sent()})


async def test_a_later_change_of_an_ended_pod_is_sent() -> None:
    async with running(Bench()) as bench:
        for at_ms in (5, 5, 4):
            bench.publisher.publish(1, "n1", WorkloadsContent({}, _ended("a", at_ms=at_ms)))
            await settle()

    assert [record["pods"][0]["ended_ms"] for record in bench.sender.records(WORKLOADS)] == [5, 4]


async def test_no_end_is_lost_to_a_broker_that_is_away() -> None:
    async with running(Bench(prompt=False)) as bench:
        for number in range(MAX_IN_FLIGHT):
            bench.publish(f"n{number}", "a")
        await settle(2 * MAX_IN_FLIGHT)
        for ended in ("a", "ab", "abc"):
            bench.publisher.publish(1, "n0", WorkloadsContent({}, [*_pods("d"), *_ended(*ended)]))
            await settle()
        bench.sender.prompt = True
        bench.sender.acknowledge()
        assert await bench.publisher.drain(30.0) == 0

    assert bench.sent()[MAX_IN_FLIGHT:] == [("n0", 4, ["a", "b", "c", "d"])]


@pytest.mark.parametrize("pods", [200, 400])
async def test_the_cost_of_short_pods_grows_linearly_with_their_number(pods: int) -> None:
    async with running(Bench()) as bench:
        ended_pods: list[str] = []
        for number in range(pods):
            pod = f"pod-{number}"
            for row in (_pods(pod), _ended(pod)):
                bench.publisher.publish(number, "n1", WorkloadsContent({}, [*row, *_ended(*ended_pods)]))
                await settle(2)
            ended_pods.append(pod)

    size = sum(len(json.dumps(record)) for record in bench.sender.records(WORKLOADS))
    assert size < 500 * pods


async def test_the_last_record_of_a_forgotten_node_is_sent_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.workloads.CHECK_S", 0.0)
    async with running(Bench()) as bench:
        bench.publish("n1", "a")
        bench.publish("n2", "a")
        await settle()
        bench.publish("n1")
        bench.publisher.forget("n1")
        await settle()
        bench.publisher.forget("n2")
        bench.clock.now_s += RESEND_S
        await settle()

    assert bench.sent() == [("n1", 1, ["a"]), ("n2", 1, ["a"]), ("n1", 2, [])]


async def test_a_node_that_comes_back_continues_after_its_last_number() -> None:
    async with running(Bench()) as bench:
        for pod in "abc":
            bench.publish("n1", pod)
        await settle()
        bench.publisher.forget("n1")

        assert [bench.publish("n1", "c"), bench.publish("n1", "d"), bench.publish("n3", "a")] == [4, 5, 4]


async def test_a_node_that_comes_back_before_its_last_record_was_sent_is_not_forgotten() -> None:
    async with running(Bench()) as bench:
        bench.publish("n1", "a")
        bench.publisher.forget("n1")
        bench.publish("n1", "b")
        await settle()

        assert (bench.publish("n1", "b"), bench.publish("n1", "c")) == (None, 3)


async def test_the_time_without_an_acknowledgement_is_reported() -> None:
    async with running(Bench(prompt=False)) as bench:
        bench.clock.now_s += 50
        assert bench.publisher.waited_s() == 0
        bench.publish("n1", "a")
        bench.publish("n2", "a")
        bench.clock.now_s += 10
        assert bench.publisher.waited_s() == 10

        await settle()
        bench.sender.acknowledge(1)
        await settle()
        assert bench.publisher.waited_s() == 0
        bench.clock.now_s += 5
        assert bench.publisher.waited_s() == 5
        bench.sender.acknowledge()
        await settle()
        assert bench.publisher.waited_s() == 0


async def test_an_unsendable_record_is_counted_and_the_next_is_sent() -> None:
    async with running(Bench(prompt=False)) as bench:
        bench.publish("n1", "a" * LARGEST_VALUE_BYTES)
        await settle()
        bench.publish("n1", "\ud800")
        bench.publish("n1", "a")
        await settle()
        bench.sender.refuse()
        await settle()
        bench.publish("n1", "b")
        await settle()
        bench.sender.acknowledge()
        assert await bench.publisher.drain(30.0) == 0

    assert [bench.dropped(reason) for reason in ("too_large", "unencodable", "refused")] == [1, 1, 1]
    assert value(bench.instruments, names.WORKLOADS) == 1


async def test_a_drain_returns_the_number_of_records_that_it_left() -> None:
    async with running(Bench(prompt=False)) as bench:
        bench.publish("n1", "a")
        await settle()

        assert await bench.publisher.drain(0.0) == 1


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(ValueError, match="node 'a/b'"):
        Bench().publish("a/b", "a")
