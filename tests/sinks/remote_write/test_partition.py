"""Each record of a partition has exactly one outcome."""

import asyncio
import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned
from sinks.outcomes import Outcome
from sinks.remote_write.nodes import OpenSeries
from sinks.remote_write.partition import RemoteWritePartition
from sinks.remote_write.policy import Answer, Protocol
from sinks.remote_write.queue import Queue
from sinks.series.model import SeriesSet
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.translation import Translator
from sinks.series.windows import Resolution
from tests.eventually import eventually
from tests.growth import kept
from tests.sinks.conftest import KEYS, SERIES, device, sample
from tests.sinks.records import ConsumedRecord, encoded, record
from tests.sinks.remote_write.receivers import KINDS, STALE_BITS, Kind, Receiver, of_every_kind
from tests.sinks.remote_write.setup import SharedSetup
from tests.sinks.remote_write.wire import Sample
from topics.profiles import PROFILES

PER_DEVICE = len(SERIES)


class Setup(SharedSetup):
    """A partition's handler between records and a receiver, with all its counters."""

    def __init__(
        self,
        *of_all: Any,
        resolution: Resolution | None = None,
        relabelling: Relabelling | None = None,
        **options_of_all: Any,
    ) -> None:
        super().__init__(*of_all, **options_of_all, on_outcome=self._record_outcome, clock_s=lambda: self.now_s)
        self.resolution = resolution
        self.translator = Translator([PROFILES["otel"]], relabelling=relabelling or Relabelling())
        self.now_s = self.queue_s = 0.0
        self.outcomes: list[tuple[str, int, Outcome]] = []
        self.steps: list[int] = []
        deliverer, max_samples = self.shared.deliverer, self.shared.max_samples
        self.queue = Queue(deliverer, at_once=2, max_samples=max_samples, clock_s=lambda: self.queue_s)
        self.handler = self.partition()

    def partition(self) -> RemoteWritePartition:
        """The handler of another partition."""
        series = OpenSeries(self.translator, self.resolution)
        return RemoteWritePartition(0, series, self.shared, self.queue)

    def _record_outcome(self, _cluster: str, node: str, _run: int, seq: int, outcome: Outcome) -> None:
        self.outcomes.append((node, seq, outcome))

    async def deliver_some(self, *records: ConsumedRecord) -> int | None:
        """Gives the handler records and time; returns the last offset that it reports for now."""
        self.counted.read(len(records))
        last: int | None = None
        for _ in range(20):
            async for step in self.handler.deliver(records, self.abandon):
                last = step
            records = ()
            self.queue_s += 1.0
            await asyncio.sleep(0)
        return last

    async def deliver(self, *records: ConsumedRecord) -> None:
        """Gives the handler records, and calls it until it has finished them."""
        self.counted.read(len(records))
        unfinished: Sequence[ConsumedRecord] = records
        try:
            while unfinished:
                async for step in self.handler.deliver(records, self.abandon):
                    self.steps.append(step)
                    unfinished = [logged for logged in unfinished if logged.offset >= step]
                if unfinished and self.abandon.is_set():
                    raise Abandoned
                records = ()
                self.queue_s += 1.0
                await asyncio.sleep(0)
        finally:
            self.counted.release(len(unfinished))

    def balanced(self) -> bool:
        remaining = self.count("records_released_total") + self.count("records_held")
        return self.count("records_read_total") == sum(self.ends().values()) + remaining


def name(received_sample: Sample) -> str:
    return dict(received_sample.labels)["__name__"]


async def test_what_is_accepted_is_delivered_with_its_values() -> None:
    setup = Setup()
    await setup.deliver(*(record(sample(seq)) for seq in (1, 2, 3)))
    assert setup.ends() == {"delivered": 3}
    assert setup.count("values_delivered_total") == 3 * len(KEYS)
    assert setup.outcomes == [("n1", 1, "delivered"), ("n1", 2, "delivered"), ("n1", 3, "delivered")]
    assert len(setup.receiver.values()["gpu_utilization"]) == 3


async def test_derived_series_and_markers_are_no_delivered_values() -> None:
    setup = Setup()
    metrics = {"memory_used_bytes": 1, "memory_total_bytes": 4, "clock_event_reasons": 4}
    await setup.deliver(
        record(sample(1, device(pod="a", metrics=metrics))), record(sample(2, device("GPU-z", pod="b")))
    )
    assert setup.count("values_delivered_total") == 3 + len(KEYS)
    assert setup.count("markers_total") == setup.receiver.markers() > 0


async def test_a_request_holds_one_tick_of_a_node_and_ends_when_full() -> None:
    setup = Setup(max_samples=2 * len(KEYS))
    nodes = "a", "b", "a", "c", "d", "e"
    await setup.deliver(*(record(sample(number, node=node)) for number, node in enumerate(nodes, 1)))
    assert setup.receiver.sizes == [2 * len(SERIES)] * 3


async def test_a_replay_is_dropped_as_a_duplicate_even_within_a_batch() -> None:
    setup = Setup()
    await setup.deliver(record(sample(1)), record(sample(2)), record(sample(2), offset=3), record(sample(1), offset=4))
    assert setup.ends() == {"delivered": 2, "duplicate": 2}
    assert setup.receiver.requests == 2


async def test_what_was_recalled_is_not_sent_again() -> None:
    setup = Setup()
    setup.handler.recall(record(sample(1, device(pod="a"))))
    setup.handler.recall(record(b"nonsense", offset=2))
    await setup.deliver(record(sample(1, device(pod="a")), offset=3), record(sample(2, device(pod="b")), offset=4))
    assert setup.ends() == {"delivered": 1, "duplicate": 1}
    assert setup.receiver.markers() == len(SERIES) + len(["gpu_pod_info"])


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema":2}',
        encoded(sample(1)).replace(b"GPU-a", b"\xff"),
        encoded(sample(1)).replace(b"GPU-a", b"\\ud800"),
        encoded(sample(1)).replace(b"1.0", b"1" + b"0" * 400, 1),
        b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_a_malformed_record_is_dead_lettered_before_its_offset_is_passed(bad: bytes) -> None:
    setup = Setup()
    await setup.deliver(record(bad, offset=7), record(sample(8)))
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    ((topic, value, headers),) = setup.sender.sent
    assert (topic, value, headers["offset"], headers["stage"]) == ("gpu.dead-letters", bad, b"7", b"sink remote-write")


async def test_what_an_earlier_life_dead_lettered_is_skipped_when_it_is_recalled() -> None:
    setup = Setup()
    setup.handler.recall(record(b"{", offset=1))
    setup.handler.recall(record(b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}", offset=2))
    await setup.deliver(record(sample(3), offset=3))
    assert setup.ends() == {"delivered": 1}


async def test_null_means_absent() -> None:
    setup = Setup()
    written_record = msgspec.json.decode(encoded(sample(1)))
    await setup.deliver(record(msgspec.json.encode({**written_record, "node_labels": None}), offset=1))
    assert setup.ends() == {"delivered": 1}


async def test_a_record_waits_for_its_dead_letter_to_be_acknowledged() -> None:
    setup = Setup()
    setup.sender.away = True
    delivering = asyncio.ensure_future(setup.deliver(record(b"{", offset=1)))
    done, _ = await asyncio.wait([delivering], timeout=0.05)
    assert not done
    assert setup.steps == []
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    assert setup.ends() == {}
    assert setup.balanced()


@of_every_kind
async def test_a_tick_of_which_a_value_is_refused_is_dead_lettered_and_the_rest_delivered(kind: Kind) -> None:
    refuse = Receiver(
        lambda received_sample: "label too long" if name(received_sample) == "gpu_temperature" else None,
        kind=kind,
    )
    setup = Setup(refuse, kind.protocol)
    original = record(sample(1, device(pod="a")))
    await setup.deliver(original)
    ((_, value, headers),) = setup.sender.sent
    assert value == original.value
    assert headers["error"].startswith(b"rejected: label too long: gpu_temperature{")
    assert b'k8s_pod_name="a"' in headers["error"]
    assert setup.ends() == {"dead_lettered": 1}
    assert setup.count("values_delivered_total") == len(KEYS) - 1
    assert setup.count("values_refused_total") == 1
    assert set(setup.receiver.stored) == {
        key for key in setup.receiver.stored if dict(key)["__name__"] != "gpu_temperature"
    }


@of_every_kind
async def test_a_clock_that_steps_back_is_dropped_by_reason_until_it_is_past(kind: Kind) -> None:
    setup = Setup(Receiver(kind=kind), kind.protocol)
    ticks = [sample(seq, ts_ms=ts_ms) for seq, ts_ms in enumerate((5000, 6000, 3000, 6000, 7000), 1)]
    await setup.deliver(
        *map(record, [*ticks[:3], sample(4, device(metrics={"temperature_celsius": 9}), ts_ms=6000), ticks[4]])
    )
    # of the fourth, gpu_holders is in: 2.0 says so, and one that speaks 1.0 does not
    counted = kind.protocol == "2.0" and not kind.counts_all
    reasons = {"out_of_order": 1} if counted else {"out_of_order": 1, "duplicate": 1}
    assert setup.ends() == {"delivered": 5 - len(reasons), "dropped": len(reasons)}
    for reason, number in reasons.items():
        dropped = setup.instruments.registry.get_sample_value(
            "gpustream_remote_write_records_dropped_total", {"reason": reason}
        )
        assert dropped == number
    assert setup.count("values_refused_total") == len(KEYS) + 1
    assert [ts_ms for ts_ms, _ in setup.receiver.values()["gpu_utilization"]] == [5000, 6000, 7000]


async def test_of_a_clock_that_stands_still_the_values_that_changed_are_missing_and_no_tick() -> None:
    setup = Setup(Receiver(), "2.0")
    metrics = {"memory_total_bytes": 80, "temperature_celsius": 40, "gpu_utilization_ratio": 0.5}
    await setup.deliver(
        *[
            record(sample(seq, device(metrics={**metrics, "gpu_utilization_ratio": seq / 100}), ts_ms=5000, run_id=seq))
            for seq in range(1, 63)
        ]
    )
    assert setup.ends() == {"delivered": 62}
    refused = setup.instruments.registry.get_sample_value(
        "gpustream_remote_write_values_refused_total", {"reason": "duplicate"}
    )
    assert (refused, setup.count("values_delivered_total")) == (61, 62 * 3 - 61)


async def test_a_tick_without_devices_is_delivered_and_ends_the_series() -> None:
    setup = Setup()
    empty = json.loads(encoded(sample(2))) | {"devices": []}
    await setup.deliver(record(sample(1)), record(json.dumps(empty).encode(), offset=2))
    assert setup.ends() == {"delivered": 2}
    assert setup.receiver.markers() == len(SERIES)


async def test_a_silent_node_is_ended_once_and_late_data_still_fits() -> None:
    setup = Setup()
    await setup.deliver(record(sample(1)))
    await setup.handler.quiet(setup.abandon)
    await setup.handler.quiet(setup.abandon)
    assert setup.receiver.markers() == len(SERIES) == setup.count("markers_total")
    await setup.deliver(record(sample(2)))
    assert setup.ends() == {"delivered": 2}


class SlowReceiver(Receiver):
    """Answers one request only when ``answer`` is set."""

    answer: asyncio.Event | None = None

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        waits_for, self.answer = self.answer, None
        if waits_for is not None:
            await waits_for.wait()
        return await super().post(body, protocol)


async def test_a_silent_node_is_ended_while_ticks_of_others_are_in_flight() -> None:
    def ended_nodes() -> set[str]:
        return {dict(key)["host_name"] for key, points in receiver.stored.items() if points[-1][1] == STALE_BITS}

    receiver = SlowReceiver()
    setup = Setup(receiver)
    await setup.deliver(record(sample(1, node="silent")), record(sample(2, node="live")))
    answer = receiver.answer = asyncio.Event()
    assert await setup.deliver_some(record(sample(3, node="live")), record(sample(4, node="live"))) is None
    await setup.handler.quiet(setup.abandon)
    assert ended_nodes() == {"silent"}
    answer.set()
    assert await setup.deliver_some() == 5
    await setup.handler.quiet(setup.abandon)
    assert ended_nodes() == {"silent", "live"}


async def test_a_topic_that_was_created_again_has_no_replays() -> None:
    setup = Setup()
    await setup.deliver(record(sample(5)))
    setup.handler.reset()
    await setup.deliver(record(sample(1, ts_ms=2**41)))
    assert setup.ends() == {"delivered": 2}


@pytest.fixture
def _without_gc() -> Iterator[None]:
    """What is in a cycle stays, as it does for hours in a process that looks for cycles so seldom."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_gc")
async def test_a_partition_that_comes_back_to_another_handler_has_the_series_of_its_nodes() -> None:
    rules = "- {source_labels: [k8s_pod_name], target_label: pod}"
    setup = Setup(relabelling=Relabelling([load(rules, "rules.yml")]))
    ticks = [record(sample(number)) for number in range(1, 5)]
    await setup.deliver(*ticks[:2])
    setup.abandon.set()
    await setup.deliver_some()

    setup.abandon = asyncio.Event()
    setup.handler = setup.partition()
    for read in ticks[:2]:
        setup.handler.recall(read)
    await setup.deliver(*ticks[2:])
    assert [len(points) for points in setup.receiver.stored.values()] == [4] * PER_DEVICE
    assert setup.count("samples_withheld_total") == 0


class Away(Receiver):
    """Is away from this request on."""

    away_from = math.inf

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        if self.requests < self.away_from:
            return await super().post(body, protocol)
        self.requests += 1
        await asyncio.sleep(0)
        return Answer(503)


@pytest.mark.usefixtures("_without_gc")
async def test_a_partition_that_is_revoked_while_its_markers_are_refused_does_not_stay() -> None:
    nodes = [record(sample(1, node=node)) for node in "abcd"]
    setup, later = Setup(receiver := Away()), Setup(receiver)
    await setup.deliver(*nodes)
    await later.deliver(*[record(sample(2, node=node)) for node in "abcd"])
    receiver.away_from = receiver.requests + 1
    ending = asyncio.ensure_future(setup.handler.quiet(setup.abandon))
    await eventually(lambda: receiver.requests > receiver.away_from + len(["both", "halves"]))
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await ending
    revoked, setup.handler = weakref.ref(setup.handler), setup.partition()
    del ending
    await asyncio.sleep(0)
    assert revoked() is None


@pytest.mark.usefixtures("_without_gc")
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=["1.0", "2.0"])
async def test_series_that_have_ended_are_not_kept(kind: Kind) -> None:
    def known_sets() -> int:
        return sum(type(known) is SeriesSet for known in gc.get_objects())

    setup = Setup(Receiver(kind=kind), kind.protocol)
    before = known_sets()
    for number in range(1, 601):
        await setup.deliver(record(sample(number, device(pod=f"pod-{number // 2}"))))
    assert known_sets() - before < 100


async def test_labels_from_hell_are_written_as_they_are_or_cut() -> None:
    setup = Setup()
    model = 'a"b\\c\nd\te\0 ' + "é" * 10_000
    await setup.deliver(record(sample(1, device(model=model, pod=""))))
    (labels,) = {dict(key)["gpu_model"] for key in setup.receiver.stored}
    assert model.startswith(labels)
    assert len(labels.encode()) in {1023, 1024}
    assert not any("k8s_pod_name" in dict(key) for key in setup.receiver.stored)


Refused = Callable[[Sample], str | None]
REASONS = (None, "label too long", "out of order sample", "too old sample")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["good", "good", "replay", "bad"])), max_size=12),
    st.sets(st.tuples(st.sampled_from("abc"), st.sampled_from(["gpu_utilization", "gpu_temperature"]))),
    st.sampled_from(KINDS),
    st.integers(1, 30),
)
def test_every_record_ends_in_exactly_one_way_and_every_good_sample_is_stored_once(
    plan: Sequence[tuple[str, str]], refused: set[tuple[str, str]], kind: Kind, max_samples: int
) -> None:
    def refuse(received_sample: Sample) -> str | None:
        labels = dict(received_sample.labels)
        return "label too long" if (labels["host_name"], labels["__name__"]) in refused else None

    async def play() -> Setup:
        setup = Setup(Receiver(refuse, kind=kind), kind.protocol, max_samples)
        await setup.deliver(*records)
        return setup

    records: list[ConsumedRecord] = []
    good: list[tuple[str, int]] = []
    for offset, (node, event) in enumerate(plan, 1):
        last = max((seq for of_node, seq in good if of_node == node), default=None)
        if event == "good" or (event == "replay" and last is None):
            good.append((node, offset))
            records.append(record(sample(offset, node=node)))
        else:
            replay: Any = sample(last or 0, node=node)
            records.append(record(replay, offset) if event == "replay" else record(b"{", offset))
    setup = asyncio.run(play())
    assert setup.balanced()
    assert setup.count("records_held") == setup.count("records_released_total") == 0
    stored = {
        (dict(key)["host_name"], dict(key)["__name__"], ts_ms)
        for key, points in setup.receiver.stored.items()
        for ts_ms, _ in points
    }
    assert stored == {
        (node, metric, sample(seq).ts_ms)
        for node, seq in good
        for metric in ("gpu_utilization", "gpu_temperature", "gpu_memory_used", "gpu_holders")
        if (node, metric) not in refused
    }
    outcomes = [(node, seq) for node, seq, outcome in setup.outcomes if outcome != "duplicate"]
    assert sorted(outcomes) == sorted(good)


# -- windows

WINDOWS = Resolution(10_000)


def in_windows(stale_after_s: float = 60.0) -> Setup:
    return Setup(resolution=WINDOWS, stale_after_s=stale_after_s)


def seconds(*numbers: int, node: str = "n1", interval_ms: int | None = None) -> list[ConsumedRecord]:
    """Ticks that begin with second 2 of a window of ten."""
    return [record(sample(number, node=node, interval_ms=interval_ms)) for number in numbers]


async def test_what_is_in_a_window_that_is_not_over_is_not_finished() -> None:
    setup = in_windows()
    assert await setup.deliver_some(*seconds(1, 2, 3)) is None
    await setup.handler.quiet(setup.abandon)
    assert await setup.deliver_some() is None
    assert (setup.receiver.requests, setup.ends()) == (0, {})

    assert await setup.deliver_some(*seconds(*range(4, 10))) == 8
    assert [value for _, value in setup.receiver.values()["gpu_utilization"]] == [1.0]
    assert setup.ends() == {"delivered": 7}
    assert [seq for _, seq, _ in setup.outcomes] == [*range(1, 8)]
    assert setup.balanced()


@pytest.mark.parametrize("resolution", [None, WINDOWS])
async def test_other_work_goes_on_while_a_large_batch_is_taken_in(
    resolution: Resolution | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(resolution=resolution)
    monkeypatch.setattr(setup.shared.turns, "next", turn := AsyncMock())
    async for _ in setup.handler.deliver(seconds(*range(1, 251)), setup.abandon):
        pass
    assert turn.await_count == 250


async def test_a_window_has_the_aggregates_of_all_its_ticks() -> None:
    setup = Setup(resolution=Resolution(10_000, ("max",)))
    used = {n: 0.9 if n == 2 else 0.1 for n in range(1, 10)}
    ticks = [sample(n, device(metrics={"gpu_utilization_ratio": ratio})) for n, ratio in used.items()]
    await setup.deliver_some(*map(record, ticks))
    values = setup.receiver.values()
    assert [[value for _, value in values[f"gpu_utilization{suffix}"]] for suffix in ("", "_max")] == [[0.1], [0.9]]


async def test_a_node_that_is_behind_holds_back_what_may_be_committed_and_nothing_else() -> None:
    setup = in_windows()
    slow, *fast = seconds(1, node="slow"), *(tick for n in range(2, 30) for tick in seconds(n, node="fast"))
    assert await setup.deliver_some(*slow, *fast) is None
    assert len(setup.receiver.values()["gpu_utilization"]) == 3
    assert setup.count("records_held") == 29


async def test_the_window_of_a_node_that_is_silent_is_sent_and_then_its_series_end() -> None:
    setup = in_windows(stale_after_s=0.0)
    await setup.deliver_some(*seconds(1, 2, 3))
    await setup.handler.quiet(setup.abandon)
    assert await setup.deliver_some() == 4
    await setup.handler.quiet(setup.abandon)

    ts_ms = sample(3).ts_ms
    assert setup.receiver.values()["gpu_utilization"] == [(ts_ms, 1.0)]
    assert setup.receiver.markers() == len(SERIES)
    assert {points[-1][0] for points in setup.receiver.stored.values()} == {ts_ms + 1}


async def test_in_a_backlog_the_window_of_a_dead_node_is_sent_when_the_others_have_logged_for_long() -> None:
    setup = in_windows(stale_after_s=60.0)
    dead, *others = [*seconds(1, node="dead"), *seconds(*range(2, 100), node="alive")]
    assert await setup.deliver_some(dead, *others[:60]) is None
    assert await setup.deliver_some(*others[60:]) == 98
    assert setup.count("records_held") == 2
    assert ("dead", 1, "delivered") in setup.outcomes


@pytest.mark.parametrize(("stale_after_s", "interval_ms"), [(3600.0, 1000), (60.0, 600_000)])
async def test_however_late_a_node_counts_as_silent_its_window_holds_nothing_back_for_more_than_two_minutes(
    stale_after_s: float, interval_ms: int
) -> None:
    setup = in_windows(stale_after_s)
    (away,) = seconds(1, node="away", interval_ms=interval_ms)
    others = seconds(*range(2, 200), node="alive")
    assert await setup.deliver_some(away, *others[:120]) is None
    assert await setup.deliver_some(*others[120:]) == 198
    assert ("away", 1, "delivered") in setup.outcomes
    await setup.handler.quiet(setup.abandon)
    assert setup.receiver.markers() == 0


async def test_the_window_of_a_node_that_is_seldom_read_stays_open_between_its_ticks() -> None:
    setup, seldom = in_windows(stale_after_s=2.0), (1, 5, 9)
    for number in range(1, 40):
        node, interval_ms = ("seldom", 4000) if number in seldom else ("often", 1000)
        await setup.deliver_some(*seconds(number, node=node, interval_ms=interval_ms))
    written = {at_ms for key, points in setup.receiver.stored.items() if "seldom" in str(key) for at_ms, _ in points}
    assert written == {sample(5).ts_ms, sample(9).ts_ms}, "the last tick of each window"


async def test_a_time_in_which_nothing_was_logged_closes_no_window() -> None:
    setup = in_windows(stale_after_s=60.0)
    before, after = seconds(1, 2, 3), [record._replace(timestamp=3_600_000) for record in seconds(4, 5, 9)]
    await setup.deliver_some(*before, *[record._replace(key=b"c1/other") for record in seconds(3, node="other")])
    await setup.deliver_some(*after)
    assert [at_ms for at_ms, _ in setup.receiver.values()["gpu_utilization"]] == [sample(5).ts_ms]


async def test_a_successor_writes_the_same_window_again_and_none_is_lost() -> None:
    uninterrupted = in_windows()
    await uninterrupted.deliver_some(*seconds(*range(1, 40)))
    for crash in range(1, 40):
        setup = in_windows()
        committed = await setup.deliver_some(*seconds(*range(1, crash + 1))) or 1
        setup.handler = setup.partition()
        for read in seconds(*range(1, committed)):
            setup.handler.recall(read)
        await setup.deliver_some(*seconds(*range(committed, 40)))
        assert setup.receiver.stored == uninterrupted.receiver.stored


async def test_a_partition_that_comes_back_begins_its_windows_again() -> None:
    uninterrupted, setup = in_windows(), in_windows()
    await uninterrupted.deliver_some(*seconds(*range(1, 30)))
    committed = await setup.deliver_some(*seconds(*range(1, 13))) or 1
    setup.abandon.set()
    assert await setup.deliver_some() is None
    setup.abandon = asyncio.Event()
    await setup.deliver_some(*seconds(*range(committed, 30)))
    assert setup.receiver.stored == uninterrupted.receiver.stored


async def test_replays_and_what_is_no_record_do_not_disturb_a_window() -> None:
    setup = in_windows()
    ticks = [*seconds(1, 2, 3), record(sample(2), offset=4), record(b"nonsense", offset=5)]
    later = [record(sample(number), offset=number + 2) for number in range(4, 12)]
    await setup.deliver_some(*ticks, *later)
    assert setup.ends() == {"delivered": 7, "duplicate": 1, "dead_lettered": 1}
    assert [value for _, value in setup.receiver.values()["gpu_utilization"]] == [1.0]


async def test_a_window_that_is_refused_leaves_one_dead_letter_and_ends_all_of_its_records() -> None:
    setup = Setup(
        Receiver(refuse=lambda received_sample: "bad" if name(received_sample) == "gpu_temperature" else None),
        resolution=WINDOWS,
    )
    await setup.deliver_some(*seconds(*range(1, 12)))
    assert setup.ends() == {"delivered": 6, "dead_lettered": 1}
    assert len(setup.sender.sent) == 1
    assert len(setup.receiver.values()["gpu_utilization"]) == 1
    assert setup.balanced()


async def test_more_windows_than_a_partition_may_have_ahead_wait_and_none_is_stuck() -> None:
    setup = in_windows()
    nodes = [f"n{number}" for number in range(300)]
    ticks = [sample(n, node=node) for n in range(1, 22) for node in nodes]
    records = [record(tick, offset=n)._replace(timestamp=tick.ts_ms) for n, tick in enumerate(ticks, 1)]
    for start in range(0, len(records), 250):
        await setup.deliver_some(*records[start : start + 250])
    assert len(setup.receiver.values()["gpu_utilization"]) == 2 * len(nodes)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    pods=st.lists(st.sampled_from([None, "a", "b"]), min_size=24, max_size=24),
    cut=st.integers(0, 24),
)
def test_whatever_the_batches_and_the_restart_the_receiver_has_the_same(
    lengths: list[int], pods: list[str | None], cut: int
) -> None:
    async def play() -> None:
        ticks = [record(sample(n, device(pod=pod))) for n, pod in enumerate(pods, 1)]
        uninterrupted, setup = (
            Setup(resolution=Resolution(5_000, ("max",))),
            Setup(resolution=Resolution(5_000, ("max",))),
        )
        await uninterrupted.deliver_some(*ticks)
        position, done_until = 1, 0
        for length in lengths * 24:
            batch, done_until = ticks[done_until : min(cut, done_until + length)], done_until + length
            if not batch:
                break
            position = await setup.deliver_some(*batch) or position
        setup.handler = setup.partition()
        for read in ticks[: position - 1]:
            setup.handler.recall(read)
        await setup.deliver_some(*ticks[position - 1 :])
        assert setup.receiver.stored == uninterrupted.receiver.stored

    asyncio.run(play())


@pytest.mark.parametrize("resolution", [None, Resolution(15_000)])
async def test_nothing_is_kept_of_nodes_that_are_gone(
    resolution: Resolution | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.remote_write.nodes._FORGET_AFTER_S", -1.0)
    setup, sizes = Setup(resolution=resolution), list[int]()
    for seq in range(1, 21):
        await setup.deliver_some(record(sample(seq, node=f"n{seq}")))
        for _ in range(2):  # the first one closes the node's window
            await setup.handler.quiet(setup.abandon)
            await setup.deliver_some()
        sizes.append(kept(setup.handler, without=[setup, setup.receiver, setup.outcomes]))
    assert setup.ends() == {"delivered": 20}
    assert max(sizes[10:]) <= max(sizes[5:10])
