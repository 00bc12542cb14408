"""Receivers that refuse: how many requests that costs, what is delivered nevertheless, and how the rest is reported."""

import asyncio
import itertools
import logging
import zlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned
from sinks.remote_write.policy import Answer, Protocol, Refusal
from sinks.remote_write.refusals import BUDGET, GROWS_EVERY_S, LEFT_OUT_S, Delivered, RequestSize
from sinks.series.model import Row, SampleGroup, SeriesSet
from tests.eventually import eventually
from tests.sinks.conftest import SERIES, device, sample
from tests.sinks.records import ConsumedRecord, record
from tests.sinks.remote_write.receivers import KINDS, Kind, Receiver, Refuse, of_every_kind
from tests.sinks.remote_write.test_partition import Setup
from tests.sinks.remote_write.wire import Sample
from topics.catalogue import CATALOGUE

NODES, GPUS = 4, 2
METRICS = dict.fromkeys(list(CATALOGUE)[:27], 1.0)

PER_RECORD = BUDGET + 26
"""The most requests for a record of which something is refused, but for those that find it among the others."""


def tick(seq: int, node: int = 0, gpus: int = GPUS, team: Callable[[int], str] = lambda _: "ml") -> ConsumedRecord:
    """A tick of a node, each GPU held by a pod of a team."""
    devices = [
        {**device(f"GPU-{node}-{gpu}", metrics=METRICS), "index": gpu, "holders": [holder(team(gpu), node, gpu)]}
        for gpu in range(gpus)
    ]
    return record(sample(seq, *devices, node=f"n{node}"), offset=seq * NODES + node)


def holder(team: str, node: int, gpu: int) -> dict[str, object]:
    return {"namespace": team, "pod": f"pod-{node}-{gpu}", "container": "main"}


def fleet(seq: int) -> list[ConsumedRecord]:
    """A tick of each node; every fourth GPU is held by a team that some tests refuse."""
    return [tick(seq, node, team=lambda gpu: "over" if gpu % 4 == 0 else "ml") for node in range(NODES)]


def label(received_sample: Sample, name: str) -> str:
    return dict(received_sample.labels).get(name, "")


def scattered(received_sample: Sample) -> int:
    """A pseudo-random number of a series, the same in every run."""
    return zlib.crc32(repr(sorted(received_sample.labels)).encode())


REFUSALS: dict[str, Refuse] = {
    "one series": lambda received_sample: (
        "bad"
        if label(received_sample, "gpu_uuid") == "GPU-3-1" and "power_draw" in str(received_sample.labels)
        else None
    ),
    "one tenant": lambda received_sample: (
        "tenant over" if label(received_sample, "k8s_namespace_name") == "over" else None
    ),
    "one in a hundred": lambda received_sample: "bad" if scattered(received_sample) % 100 == 1 else None,
    "every second one": lambda received_sample: "bad" if scattered(received_sample) % 2 == 0 else None,
    "a metric of each GPU": lambda received_sample: (
        "bad" if label(received_sample, "__name__") == "gpu_temperature" else None
    ),
    "all of one node": lambda received_sample: "bad" if label(received_sample, "host_name") == "n2" else None,
}


def series_of(records: Sequence[ConsumedRecord]) -> set[frozenset[tuple[str, str]]]:
    """The series of these records, in a receiver that accepts everything."""

    async def all_of() -> Setup:
        setup = Setup(Receiver(), max_samples=10_000)
        await setup.deliver(*records)
        return setup

    return set(asyncio.run(all_of()).receiver.stored)


async def warm(setup: Setup) -> None:
    """Let the receiver accept something first."""
    await setup.deliver(tick(0, node=NODES))
    setup.receiver.requests = 0


@pytest.mark.slow
@of_every_kind
@pytest.mark.parametrize("refused", sorted(REFUSALS))
def test_the_rest_is_delivered_and_what_is_refused_costs_its_budget_once(refused: str, kind: Kind) -> None:
    refuse, ticks = REFUSALS[refused], 5
    sent = series_of(fleet(1))
    expected = {key for key in sent if refuse(Sample(tuple(key), 0, 0)) is None}
    assert expected < sent

    async def play() -> None:
        setup = Setup(Receiver(refuse, kind=kind), kind.protocol, max_samples=10_000)
        await warm(setup)
        costs = []
        for seq in range(1, ticks + 1):
            before = setup.receiver.requests
            await setup.deliver(*fleet(seq))
            costs.append(setup.receiver.requests - before)
        assert max(costs) <= NODES * (PER_RECORD + 2)
        assert costs[-1] == 1, "what is refused is known by then, and left out"
        refused_records = setup.count("records_dead_lettered_total")
        assert sum(costs) <= refused_records * PER_RECORD + ticks * (2 * NODES + 1)
        assert set(setup.receiver.stored) >= expected
        finished = setup.count("records_delivered_total") + setup.count("records_dropped_total")
        assert finished == 1 + ticks * NODES - refused_records
        assert setup.balanced()
        values = [setup.count(f"values_{end}_total") for end in ("delivered", "refused", "left_out")]
        assert sum(values) == 27 * GPUS * (1 + ticks * NODES)
        assert setup.transmitter.failing is None

    asyncio.run(play())


async def test_a_series_that_is_refused_is_named_once_left_out_for_ten_minutes_and_then_tried_again() -> None:
    receiver = Receiver(
        lambda received_sample: "label too long" if label(received_sample, "__name__") == "gpu_temperature" else None
    )
    setup = Setup(receiver)
    await setup.deliver(*(tick(seq, gpus=1) for seq in range(1, 4)))
    ((_, _, headers),) = setup.sender.sent
    assert headers["error"].startswith(b"rejected: label too long: gpu_temperature{")
    assert headers["error"].endswith(b"}")
    assert setup.ends() == {"dead_lettered": 1, "delivered": 2}
    assert setup.count("values_refused_total") == 1
    assert setup.count("values_left_out_total") == 2
    assert setup.count("series_left_out") == 1

    setup.now_s = LEFT_OUT_S - 1
    await setup.deliver(tick(4, gpus=1))
    assert len(setup.sender.sent) == 1

    setup.now_s = LEFT_OUT_S
    await setup.deliver(tick(5, gpus=1))
    assert len(setup.sender.sent) == 2
    setup.receiver.refuse = lambda _: None
    setup.now_s = 2 * LEFT_OUT_S
    await setup.deliver(tick(6, gpus=1))
    assert setup.count("series_left_out") == 0
    assert len(setup.receiver.values()["gpu_temperature"]) == 1
    assert setup.balanced()


async def test_each_series_is_left_out_for_ten_minutes_of_its_own() -> None:
    names, refused = ("gpu_temperature", "gpu_power_draw", "gpu_memory_used"), set[str]()
    setup = Setup(Receiver(lambda received_sample: "bad" if label(received_sample, "__name__") in refused else None))
    for number, name in enumerate(names):
        refused.add(name)
        setup.now_s = 100.0 * number
        await setup.deliver(tick(number, gpus=1))
    refused.clear()
    for number in range(3):
        setup.now_s = LEFT_OUT_S + 100 * number
        await setup.deliver(tick(3 + number, gpus=1))
    written = setup.receiver.values()
    seqs = [[(ts_ms - sample(0).ts_ms) // 1000 for ts_ms, _ in written[name]] for name in names]
    assert seqs == [[3, 4, 5], [0, 4, 5], [0, 1, 5]]


@pytest.mark.parametrize(("series", "more"), [(3, ""), (5, " and 2 more series")])
def test_a_dead_letter_names_three_series_and_how_many_more_there_are(series: int, more: str) -> None:
    rows = tuple(Row(f"m{number}") for number in range(series))
    group = SampleGroup(SeriesSet((("node", "a"),), rows), 5, [1.0] * series)
    text = Delivered(refused=[(group, Refusal("rejected", "too long"))]).describe()
    assert text == f'rejected: too long: m0{{node="a"}}, m1{{node="a"}}, m2{{node="a"}}{more}'


async def test_a_record_of_which_all_is_left_out_is_dropped_and_costs_nothing() -> None:
    setup = Setup(Receiver(lambda received_sample: "bad" if label(received_sample, "k8s_node_name") == "n1" else None))
    await setup.deliver(tick(0), tick(1, node=1))
    before = setup.receiver.requests
    await setup.deliver(tick(2, node=1))
    assert setup.receiver.requests == before
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1, "dropped": 1}
    reasons = {"reason": "left_out"}
    assert setup.instruments.registry.get_sample_value("gpustream_remote_write_records_dropped_total", reasons) == 1
    assert setup.outcomes[-1] == ("n1", 2, "dropped")


async def test_a_pod_that_goes_while_its_series_are_left_out_leaves_no_marker_of_them() -> None:
    setup = Setup(
        Receiver(lambda received_sample: "bad" if label(received_sample, "k8s_namespace_name") == "over" else None)
    )
    await setup.deliver(tick(1, gpus=2, team=lambda gpu: ("ml", "over")[gpu]))
    before = setup.receiver.requests
    await setup.deliver(tick(2, gpus=2))
    assert setup.receiver.requests == before + 1
    assert not any(dict(key).get("k8s_namespace_name") == "over" for key in setup.receiver.stored)


@pytest.mark.parametrize(("protocol", "status"), [("1.0", 400), ("1.0", 429), ("2.0", 400)])
async def test_a_limit_of_series_keeps_those_that_are_there_and_leaves_out_the_new_ones(
    protocol: Protocol, status: int
) -> None:
    receiver = Receiver(kind=Kind(protocol, partial=True))
    setup = Setup(receiver, protocol, max_samples=10_000)
    await setup.deliver(*(tick(1, node) for node in range(3)))
    known_series = set(receiver.stored)
    receiver.status = status
    receiver.refuse = lambda received_sample: (
        None if received_sample.series in known_series else "per-user series limit of 9 exceeded"
    )
    receiver.requests = 0
    await setup.deliver(*fleet(2)[:3], *fleet(2)[3:])
    assert receiver.requests <= 3 * (PER_RECORD + 4)
    receiver.requests = 0
    for seq in range(3, 7):
        await setup.deliver(*(tick(seq, node) for node in range(NODES)))
    assert all(len(receiver.stored[key]) >= 5 for key in known_series)
    assert {headers["error"][:12] for _, _, headers in setup.sender.sent} == {b"series_limit"}
    receiver.requests = 0
    await setup.deliver(*(tick(7, node) for node in range(NODES)))
    assert receiver.requests == 1


ALWAYS = {
    "400": Answer(400, "user x: unknown tenant"),
    "400 counted": Answer(400, "no", written=0),
    "400 that counts what it refuses": Answer(400, "label names exceed the limit", written=10**6),
    "401": Answer(401, "who are you"),
    "403": Answer(403, "ingestion is disabled"),
    "404": Answer(404, "page not found"),
    "410": Answer(410, "gone"),
    "413": Answer(413, "too large"),
    "422": Answer(422, "per-user series limit of 0 exceeded"),
}


@pytest.mark.parametrize("protocol", ["1.0", "2.0", "auto"])
@pytest.mark.parametrize("always", sorted(ALWAYS))
async def test_a_receiver_that_refuses_everything_is_asked_twice_and_then_waited_for(
    always: str, protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(Receiver(always=ALWAYS[always]), protocol, max_samples=10_000, probe_s=60.0)
    delivering = asyncio.ensure_future(setup.deliver(*fleet(1)))
    failing = setup.instruments.registry.get_sample_value
    await eventually(lambda: failing("gpustream_remote_write_receiver_failing") == 1)
    await asyncio.sleep(0.05)
    assert setup.receiver.requests <= 2
    assert setup.receiver.sizes[1:] in ([], [1])
    assert ALWAYS[always].text in (setup.transmitter.failing or "")
    assert sum(ALWAYS[always].text in line.message for line in caplog.records) == 1
    assert ("look at the path of --url" in caplog.text) == (always == "404")
    assert (setup.ends(), setup.steps, setup.sender.sent) == ({}, [], [])
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    assert setup.balanced()


async def test_a_process_that_has_only_what_is_there_already_and_what_is_refused_finds_out_which_is_which() -> None:
    receiver = Receiver(REFUSALS["all of one node"])
    before, after = Setup(receiver), Setup(receiver)
    await before.deliver(record(sample(1)), record(sample(2)))
    await asyncio.wait_for(after.deliver(record(sample(1)), record(sample(3, node="n2"))), 10)
    assert after.ends() == {"delivered": 1, "dead_lettered": 1}


class LosesText(Receiver):
    """The text of its first refusal is lost."""

    lost = False

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        answer = await super().post(body, protocol)
        if self.lost or answer.status != 400:
            return answer
        self.lost = True
        return answer._replace(text="")


@of_every_kind
async def test_of_a_tick_that_is_there_already_nothing_is_left_out_if_the_text_that_says_so_is_lost(kind: Kind) -> None:
    receiver = LosesText(kind=kind)
    before, after = Setup(receiver, kind.protocol), Setup(receiver, kind.protocol)
    await before.deliver(tick(1), tick(2))
    await after.deliver(tick(1), tick(3))
    assert receiver.lost
    assert after.ends() == {"delivered": 2}
    assert after.count("series_left_out") == 0


async def test_ticks_that_the_receiver_kept_of_a_refused_request_are_delivered() -> None:
    setup = Setup(Receiver(REFUSALS["all of one node"], kind=Kind("1.0", partial=True)), max_samples=10_000)
    await setup.deliver(tick(0))
    later = tick(1), tick(1, node=2), tick(2)
    far = 100_000  # so far that no earlier process can have sent them
    await setup.deliver(*[read._replace(offset=far + read.offset) for read in later])
    assert setup.ends() == {"delivered": 3, "dead_lettered": 1}


async def test_a_series_is_not_left_out_before_its_dead_letter_is_there() -> None:
    setup = Setup(Receiver(REFUSALS["all of one node"]))
    await warm(setup)
    setup.sender.away = True
    delivering = asyncio.ensure_future(setup.deliver(record(sample(1, node="n2"))))
    await eventually(lambda: setup.receiver.requests >= len(SERIES))
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    setup.sender.away, setup.abandon = False, asyncio.Event()
    await setup.deliver(record(sample(1, node="n2")))
    assert setup.ends()["dead_lettered"] == len(setup.sender.sent) == 1


@of_every_kind
async def test_what_was_kept_while_everything_was_refused_is_delivered_when_it_is_over(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    setup = Setup(Receiver(kind=kind), kind.protocol, max_samples=10_000)
    await setup.deliver(*fleet(1))
    setup.receiver.refuse = lambda _: "no tenant"
    delivering = asyncio.ensure_future(setup.deliver(*fleet(2), *fleet(3)))
    await eventually(lambda: setup.receiver.requests > 50)
    assert max(setup.receiver.sizes[2:]) < 40, "a series, or what was accepted of a GPU"
    setup.receiver.refuse = lambda _: None
    await asyncio.wait_for(delivering, 20)
    assert setup.ends() == {"delivered": 3 * NODES}
    assert setup.sender.sent == []
    assert all(len(points) == 3 for points in setup.receiver.stored.values())
    assert [line.message for line in caplog.records][-1] == "the receiver accepts again"


async def test_a_receiver_that_begins_to_refuse_everything_in_the_middle_dead_letters_nothing() -> None:
    setup = Setup()
    await warm(setup)

    def later(received_sample: Sample) -> str | None:
        if setup.receiver.requests > 9:
            return "no tenant"
        return "bad" if label(received_sample, "__name__") == "gpu_temperature" else None

    setup.receiver.refuse = later
    delivering = asyncio.ensure_future(setup.deliver(tick(1)))
    await eventually(lambda: setup.transmitter.failing is not None)
    assert setup.sender.sent == []
    setup.receiver.refuse = lambda _: None
    await asyncio.wait_for(delivering, 20)
    assert setup.ends() == {"delivered": 2}
    assert setup.count("series_left_out") == 0


async def test_of_many_partitions_that_wait_one_asks_at_a_time() -> None:
    setup = Setup(Receiver(always=Answer(403, "disabled")), probe_s=0.05)
    groups = [
        SampleGroup(SeriesSet((("node", str(node)),), (Row("up"), Row("down"))), 5, [1.0, 0.0]) for node in range(20)
    ]
    waiting = [asyncio.ensure_future(setup.transmitter.send([group], setup.abandon)) for group in groups]
    await eventually(lambda: setup.receiver.requests >= 4)
    assert setup.receiver.sizes == [2] + [1] * (setup.receiver.requests - 1)
    setup.receiver.always = None
    assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [None] * 20
    assert len(setup.receiver.stored) == 40


@pytest.mark.parametrize("most", [1, 7, 100, 1500])
@of_every_kind
async def test_what_is_too_large_is_halved_and_the_size_is_remembered(most: int, kind: Kind) -> None:
    setup = Setup(Receiver(most=most, kind=kind), kind.protocol, max_samples=10_000)
    await setup.deliver(*fleet(1))
    samples = sum(len(points) for points in setup.receiver.stored.values())
    assert setup.ends() == {"delivered": NODES}
    assert setup.receiver.requests <= 2 * samples / most + 20
    setup.receiver.sizes.clear()
    await setup.deliver(*fleet(2))
    assert max(setup.receiver.sizes) <= most
    assert len(setup.receiver.sizes) <= 2 * samples / most + 1
    assert setup.ends() == {"delivered": 2 * NODES}


async def test_bursts_that_the_receiver_never_takes_are_sent_in_smaller_requests() -> None:
    """Mimir answers 429 to a request above the tenant's burst, as it does to one that only comes too early."""
    limit = "the tenant exceeded the ingestion burst size limit, set to 100, with 380 items"
    setup = Setup(Receiver(most=100, too_large=Answer(429, limit, retry_after_s=3)), max_samples=10_000)
    await setup.deliver(*fleet(1))
    assert setup.ends() == {"delivered": NODES}
    setup.receiver.sizes.clear()
    await setup.deliver(*fleet(2))
    assert max(setup.receiver.sizes) <= 100
    assert setup.ends() == {"delivered": 2 * NODES}


async def test_requests_grow_again_a_tenth_a_minute() -> None:
    setup = Setup(Receiver(most=50), max_samples=10_000)
    largest = []
    for seq in range(1, 25):
        setup.receiver.sizes.clear()
        await setup.deliver(*fleet(seq))
        largest.append(max(setup.receiver.sizes))
        setup.receiver.most = 10_000
        setup.now_s += GROWS_EVERY_S
    grown = [later / earlier for earlier, later in itertools.pairwise(largest[1:])]
    assert all(1 <= growth <= 1.12 for growth in grown)
    assert largest[-1] > 4 * largest[1]


def test_only_requests_of_nearly_the_size_let_it_grow() -> None:
    size = RequestSize()
    size.too_large(200, now_s=0.0)
    size.accepted(89, GROWS_EVERY_S)
    assert size.samples == 100
    size.accepted(90, GROWS_EVERY_S)
    assert size.samples == 110


Bad = set[tuple[int, int]]


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 27))), st.sampled_from(KINDS))
def test_whatever_is_refused_is_found_out_within_the_budget_of_each_record(bad: Bad, kind: Kind) -> None:
    async def play() -> None:
        setup = Setup(Receiver(refuse, kind=kind), kind.protocol, max_samples=10_000)
        await warm(setup)
        for seq in range(1, 30):
            setup.receiver.requests = 0
            await setup.deliver(tick(seq))
            assert setup.receiver.requests <= PER_RECORD + 3
        assert setup.receiver.requests <= 1
        assert setup.balanced()
        values = [setup.count(f"values_{end}_total") for end in ("delivered", "refused", "left_out")]
        assert sum(values) == 30 * 27 * GPUS

    def refuse(received_sample: Sample) -> str | None:
        named = [
            *label(received_sample, "gpu_uuid").split("-")[1:],
            str(names.setdefault(label(received_sample, "__name__"), len(names))),
        ]
        return "bad" if len(named) == 3 and named[0] == "0" and (int(named[1]), int(named[2])) in bad else None

    names: dict[str, int] = {}
    asyncio.run(play())
