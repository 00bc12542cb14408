"""Whatever is killed and however the ticks are batched, the same records are written, byte for byte."""

import asyncio
from random import Random
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delivery.instruments import Instruments
from streams.stage import _MANY_WRITES, ATTRIBUTED
from streams.usage.books import Accounting
from streams.usage.component import INSTRUMENTS, KEEP_S, NO_SAMPLES_S, UsageWorker
from tests.clock import run
from tests.eventually import eventually, settle
from tests.growth import kept
from tests.streams.alerts.fakes import Broker, Worker
from tests.streams.fakes import Record
from tests.streams.usage.made import START_MS, gpu, holder
from topics.topic import node_key
from topics.usage import HOURS, MINUTE_MS, MINUTES, STATE


class UsageOf(Worker):
    reads = (ATTRIBUTED, STATE.name, ())

    def make(self, rules: Any) -> None:
        self.instruments = Instruments(INSTRUMENTS)
        self.stage = UsageWorker(self.instruments, Accounting(), partitions=1, clocks=self.clocks)

    def count(self, name: str, *labels: str) -> float:
        row = next(row for row in INSTRUMENTS if row.name == f"gpustream_usage_{name}")
        value = self.instruments.registry.get_sample_value(row.name, dict(zip(row.labels, labels, strict=True)))
        return value or 0.0


def log(broker: Broker, at_ms: int, *devices: Any, node: str = "n", **fields: Any) -> None:
    """A tick so many milliseconds after the start, logged at once."""
    ts_ms = START_MS + at_ms
    record = {"schema": 1, "cluster": "c", "node": node, "run_id": 1, "seq": at_ms // 100 + 1, "ts_ms": ts_ms}
    record |= {"interval_ms": 5000, "offset": len(broker.logs[ATTRIBUTED]), "logged_ms": ts_ms, "attribution": "exact"}
    record |= {"devices": list(devices)} | fields
    broker.logs[ATTRIBUTED].append(Record(node_key("c", node), msgspec.json.encode(record), ts_ms))


def log_steadily(broker: Broker, start_s: int, end_s: int) -> None:
    """A tick of one GPU every 5 s, from ``start_s`` on and before ``end_s``."""
    for at_s in range(start_s, end_s, 5):
        log(broker, at_s * 1000, gpu("GPU-a"))


def story(chance: Random) -> Broker:
    """Two nodes with an outage each, one of them for good, and a third that ticks to the end."""
    broker = Broker()
    ends = {"n": 95, "m": 30, "k": 130}
    for minute in range(130):
        for second in range(0, 60, 30):
            at_ms = (minute * 60 + second) * 1000
            for node, end in ends.items():
                if minute < end and not (node == "n" and 40 <= minute < 67):
                    pods = [holder(f"{node}-{minute // 7}"), holder("b", 0.1)][: chance.randint(0, 2)]
                    log(broker, at_ms + chance.randint(0, 9), gpu(f"GPU-{node}", *pods), node=node)
    return broker


async def test_a_failure_names_its_record_with_the_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    log_steadily(broker, 0, 10)
    worker = UsageOf(broker)
    await worker.start()
    monkeypatch.setattr(worker.stage, "handle_record", Mock(side_effect=KeyError("unexpected")))
    await worker.live()

    assert worker.failures[0] == "booking failed: KeyError('unexpected')"
    assert "\ngpu.attributed, partition 0, offset 0\n" in caplog.text


async def test_no_more_is_read_while_many_nodes_are_written() -> None:
    broker = Broker()
    for number in range(_MANY_WRITES + 50):  # each new, and in the middle of an hour
        log(broker, 2 * MINUTE_MS, gpu(f"GPU-{number}"), node=f"n{number}")
    worker = UsageOf(broker)
    worker.sender.holding = True
    await worker.start()
    reading = asyncio.create_task(worker.read(count=len(broker.logs[ATTRIBUTED])))
    await eventually(lambda: len(worker.stage._write_tasks.running) == _MANY_WRITES)
    await settle()
    assert worker.count("ticks_total", "opened") == _MANY_WRITES

    worker.sender.holding = False
    worker.sender.land()
    await reading
    await worker.live()
    assert worker.count("ticks_total", "opened") == _MANY_WRITES + 50
    assert worker.count("written_total", "state") == _MANY_WRITES + 50
    assert worker.failures == []


def copied(broker: Broker) -> Broker:
    copy = Broker()
    copy.logs[ATTRIBUTED] = list(broker.logs[ATTRIBUTED])
    return copy


async def undisturbed(broker: Broker) -> Broker:
    worker = UsageOf(broker)
    await worker.start()
    await worker.live()
    assert worker.failures == []
    return broker


async def disturbed(broker: Broker, chance: Random) -> Broker:
    """The same ticks in batches of any size, to workers that are killed or lose the partition, at any point."""
    worker = await _another(broker)
    for _ in range(10_000):
        await worker.read(count=chance.randint(1, 120))
        for _ in range(chance.randint(0, 6)):
            worker.sender.land(chance.randint(1, 40))
            await settle()
        if chance.random() < 0.5:
            await worker.read(STATE.name)
        if chance.random() < 0.5:
            worker.commit()
        assert worker.failures == []
        if chance.random() < 0.1:  # a rebalance that leaves the partition here
            await worker.start()
        elif chance.random() < 0.2:
            worker.kill(chance)
            await settle()
            worker = await _another(broker)
        elif worker.position_read() == len(broker.logs[ATTRIBUTED]):
            break
    worker.sender.holding = False
    worker.sender.land()
    await settle()
    await worker.live()
    return broker


async def _another(broker: Broker) -> UsageOf:
    worker = UsageOf(broker)
    worker.sender.holding = True
    await worker.start()
    return worker


def revisions(broker: Broker, topic: str) -> dict[tuple[Any, int], bytes]:
    """Every record by its key and revision; written again it must be the same in every byte."""
    by_revision: dict[tuple[Any, int], bytes] = {}
    for record in broker.logs[topic]:
        assert record.value is not None
        revision = msgspec.json.decode(record.value)["revision"]
        assert by_revision.setdefault((record.key, revision), record.value) == record.value
    return by_revision


def counted(broker: Broker, topic: str) -> dict[Any, bytes]:
    """The record of each key that counts."""
    return {
        key: value for (key, _), value in sorted(revisions(broker, topic).items(), key=lambda revision: revision[0][1])
    }


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_any_batching_and_any_restart_give_the_same_records(seed: int) -> None:
    records = story(Random(seed))
    straight = run(undisturbed(copied(records)))
    crooked = run(disturbed(copied(records), Random(seed)))

    for topic in (MINUTES.name, HOURS.name):
        of_straight, other = revisions(straight, topic), revisions(crooked, topic)
        assert {key: of_straight[key] for key in of_straight.keys() & other.keys()} == {
            key: other[key] for key in of_straight.keys() & other
        }
        assert counted(crooked, topic) == counted(straight, topic)
    assert counted(straight, HOURS.name)


def test_a_commit_never_passes_a_tick_that_no_books_hold() -> None:
    async def lived() -> tuple[int, int, int]:
        broker = Broker()
        log_steadily(broker, 0, 61)
        worker = UsageOf(broker)
        await worker.start()
        await worker.read(count=12)
        before = worker.position()
        worker.sender.holding = True
        await worker.read()
        unacknowledged = worker.position()
        worker.sender.holding = False
        worker.sender.land()
        await settle()
        return before, unacknowledged, worker.position()

    assert run(lived()) == (0, 0, 13)


def test_a_node_without_ticks_holds_back_no_commit_and_is_closed_by_the_clock_when_all_was_read() -> None:
    async def lived() -> tuple[int, set[bytes | None], list[bool]]:
        broker = Broker()
        log_steadily(broker, 0, 31)
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + 30_000
        await worker.start()
        await worker.live()
        await worker.wait(KEEP_S + 5, samples_end=7)
        position = worker.position()
        early_keys = {log.key for log in broker.logs[MINUTES.name]}
        await worker.wait(85 * 60, samples_end=7)
        return (
            position,
            early_keys,
            [msgspec.json.decode(log.value)["final"] for log in broker.logs[HOURS.name] if log.value],
        )

    position, early_keys, finals = run(lived())
    assert (position, early_keys) == (7, set())
    assert finals[-1]


def test_a_node_that_was_silent_before_a_rebalance_is_closed_by_the_clock_after_it() -> None:
    async def lived() -> list[bool]:
        broker = Broker()
        log_steadily(broker, 0, 31)
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + 30_000
        await worker.start()
        await worker.live()
        await worker.wait(KEEP_S + 5, samples_end=7)
        await worker.read(STATE.name)
        worker.commit()
        await worker.start()
        await worker.wait(85 * 60, samples_end=7)
        return [msgspec.json.decode(log.value)["final"] for log in broker.logs[HOURS.name] if log.value]

    assert run(lived())[-1:] == [True]


@pytest.mark.parametrize("ahead_s", [-3600, 0, 1800])
def test_every_tick_is_booked_and_a_silent_node_closed_in_time_whatever_the_workers_clock_says(ahead_s: int) -> None:
    async def lived() -> tuple[float, float, list[int]]:
        broker = Broker()
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + ahead_s * 1000
        worker.sender.differs_ms = ahead_s * 1000
        await worker.start()
        for start_s in range(0, 300, 5):
            log_steadily(broker, start_s, start_s + 5)
            await worker.live()
            await worker.wait(5, samples_end=len(broker.logs[ATTRIBUTED]))
        booked, unbooked_s = worker.count("ticks_total", "booked"), worker.count("unbooked_seconds_total")
        finals: list[int] = []
        for minute in range(30):
            await worker.wait(60, samples_end=60)
            if not finals and b'"final":true' in (broker.logs[MINUTES.name][-1].value or b""):
                finals.append(minute)
        return booked, unbooked_s, finals

    booked, unbooked_s, finals = run(lived())
    assert (booked, unbooked_s) == (59, 0)
    assert finals == [20]


def test_the_clock_closes_nothing_while_samples_wait_to_be_attributed() -> None:
    async def lived() -> list[Record]:
        broker = Broker()
        log_steadily(broker, 0, 31)
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + 30_000
        await worker.start()
        await worker.live()
        await worker.wait(85 * 60, samples_end=8)
        return broker.logs[MINUTES.name]

    assert run(lived()) == []


def test_a_last_sample_that_is_never_attributed_delays_the_close_by_as_long_as_samples_are_kept() -> None:
    async def lived() -> tuple[int, list[bool]]:
        broker = Broker()
        log_steadily(broker, 0, 31)
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + 30_000
        await worker.start()
        await worker.live()
        await worker.wait(NO_SAMPLES_S - 60, samples_end=8)
        early = len(broker.logs[HOURS.name])
        await worker.wait(120, samples_end=8)
        return early, [msgspec.json.decode(log.value)["final"] for log in broker.logs[HOURS.name] if log.value]

    assert run(lived()) == (0, [True, True])


def test_books_that_another_worker_wrote_late_are_overwritten() -> None:
    async def lived() -> tuple[bytes | None, bytes | None]:
        broker = Broker()
        log_steadily(broker, 0, 61)
        worker = UsageOf(broker)
        await worker.start()
        await worker.live()
        first = broker.logs[STATE.name][0]
        log_steadily(broker, 65, 121)
        await worker.live()
        own_books = broker.logs[STATE.name][-1].value
        broker.logs[STATE.name].append(first)
        await worker.read(STATE.name)
        await worker.wait(1)
        return own_books, broker.logs[STATE.name][-1].value

    own_books, last_one = run(lived())
    assert last_one == own_books


async def test_nothing_is_kept_of_books_that_the_broker_refuses() -> None:
    broker, sizes = Broker(), list[int]()
    worker = UsageOf(broker)
    worker.sender.largest = 10
    await worker.start()
    for minute in range(30):
        log_steadily(broker, minute * 60, minute * 60 + 60)
        await worker.live()
        sizes.append(kept(worker.stage, without=[worker]))
    assert worker.count("unsendable_total", "state") == 29
    assert worker.position() == len(broker.logs[ATTRIBUTED])
    assert max(sizes[25:]) <= max(sizes[21:25])  # after 20 minutes the first is final


async def test_after_a_rebalance_a_worker_goes_on_from_the_books_that_the_broker_refused() -> None:
    broker = Broker()
    worker = UsageOf(broker)
    worker.sender.largest = 400  # the records of minutes and hours are smaller
    await worker.start()
    for start_s in range(0, 400, 50):
        log_steadily(broker, start_s, start_s + 50)
        await worker.live()
        worker.commit()
        await worker.start()
    assert not broker.logs[STATE.name]
    assert counted(broker, HOURS.name) == counted(await undisturbed(copied(broker)), HOURS.name)


def test_a_worker_that_read_its_successors_books_before_it_lost_the_partition_goes_on_from_those() -> None:
    async def lived() -> Broker:
        broker = Broker()
        log_steadily(broker, 0, 70)
        stopped, successor = UsageOf(broker), UsageOf(broker)
        await stopped.start()
        await stopped.live()
        log_steadily(broker, 70, 200)
        await successor.start()
        await successor.live()
        successor.commit()
        await stopped.read(STATE.name)
        log_steadily(broker, 200, 300)
        await stopped.start()
        await stopped.live()
        return broker

    broker = run(lived())
    assert counted(broker, MINUTES.name) == counted(run(undisturbed(copied(broker))), MINUTES.name)


def test_the_clock_closes_nothing_while_ticks_that_were_read_wait_for_earlier_writes() -> None:
    async def lived() -> Broker:
        broker = Broker()
        log_steadily(broker, 0, 66)
        worker = UsageOf(broker)
        worker.clocks.started_ms = START_MS + 1_800_000
        await worker.start()
        await worker.live()
        log_steadily(broker, 70, 1800)
        worker.sender.holding = True
        await worker.read(ATTRIBUTED, count=20)
        await worker.start()
        handling = asyncio.create_task(worker.stage.handle(worker.fetch(ATTRIBUTED)))
        await worker.wait(60)
        assert not handling.done()
        worker.sender.holding = False
        worker.sender.land()
        await handling
        await settle()
        return broker

    broker = run(lived())
    assert counted(broker, MINUTES.name) == counted(run(undisturbed(copied(broker))), MINUTES.name)


def test_a_record_that_is_no_tick_is_a_dead_letter_and_the_rest_is_booked() -> None:
    async def lived() -> tuple[int, float, float]:
        broker = Broker()
        log(broker, 0, gpu("GPU-a"))
        broker.logs[ATTRIBUTED].append(Record(b"c/n", b"{", START_MS))
        log(broker, 5000, gpu("GPU-a", holder("a", labels=["team"])))
        log(broker, 6000, gpu("GPU-a", holder("a", labels=None)))
        worker = UsageOf(broker)
        await worker.start()
        await worker.live()
        booked = worker.count("ticks_total", "booked") + worker.count("ticks_total", "opened")
        return len(broker.logs["gpu.dead-letters"]), booked, worker.count("records_read_total", ATTRIBUTED)

    assert run(lived())[:2] == (2, 2)


def _without_accounts(books: Any) -> None:
    books["accounts"].clear()


def _without_gpus(books: Any) -> None:
    books["meters"].clear()


def _with_a_short_row(books: Any) -> None:
    next(iter(books["hours"][0]["rows"].values())).pop()


def _with_a_short_row_of_a_minute(books: Any) -> None:
    next(iter(books["hours"][0]["minutes"][0]["rows"].values())).pop()


def _with_an_amount_below_zero(books: Any) -> None:
    next(iter(books["hours"][0]["rows"].values()))[0] = -60_000


def _with_an_amount_of_a_minute_that_no_reader_takes(books: Any) -> None:
    next(iter(books["hours"][0]["minutes"][0]["rows"].values()))[0] = 2**63


def _with_slices_below_zero(books: Any) -> None:
    books["hours"][0]["of"] = dict.fromkeys(books["hours"][0]["of"], -1)


def _with_labels_that_are_none(books: Any) -> None:
    next(iter(books["accounts"].values()))["labels"] = ["team"]


@pytest.mark.parametrize(
    "spoil",
    [
        _without_accounts,
        _without_gpus,
        _with_a_short_row,
        _with_a_short_row_of_a_minute,
        _with_an_amount_below_zero,
        _with_an_amount_of_a_minute_that_no_reader_takes,
        _with_slices_below_zero,
        _with_labels_that_are_none,
    ],
)
def test_books_of_which_no_record_can_be_made_are_a_dead_letter_and_the_node_is_booked_anew(spoil: Any) -> None:
    async def lived() -> tuple[list[str], int, int, float]:
        broker = Broker()
        log_steadily(broker, 0, 130)
        worker = UsageOf(broker)
        await worker.start()
        await worker.live()
        record = broker.logs[STATE.name].pop()
        books = msgspec.json.decode(record.value or b"")
        spoil(books)
        broker.logs[STATE.name] = [record._replace(value=msgspec.json.encode(books))]
        log_steadily(broker, 130, 260)
        restarted = UsageOf(broker)
        await restarted.start()
        await restarted.live()
        letters = len(broker.logs["gpu.dead-letters"])
        return restarted.failures, letters, restarted.position_read(), restarted.count("ticks_total", "booked")

    failures, letters, position, booked = run(lived())
    assert (failures, letters, position) == ([], 1, 52)
    assert booked == 51
