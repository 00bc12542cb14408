"""The output of the encoders, read back with the official messages."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write import encode_v1, encode_v2
from sinks.remote_write.encode_v1 import fixed_varint, varint
from sinks.series.model import STALE, Row, SampleGroup, SeriesSet
from tests.sinks.remote_write.wire import Sample, bits, messages, metadata_v2, read_v1, read_v2, starts_v2
from topics.metric import Labels

START_MS = 1_795_218_340_000


def joined_v1(groups: Sequence[SampleGroup]) -> bytes:
    return b"".join(encode_v1.pieces(groups))


ENCODERS: dict[str, Any] = {
    "1.0": (lambda: joined_v1, read_v1),
    "2.0": (lambda: encode_v2.Encoder().encode, read_v2),
}
protocols = pytest.mark.parametrize("protocol", list(ENCODERS))

DEVICE_NAMES = st.sampled_from(["UUID", "Z", "_", "a", "gpu", "gpu_index", "host_name", "instance", "zz"])
ROW_NAMES = st.sampled_from(["A_type", "__type", "gpu_task_type", "gpu_type", "zz_type"])
VALUES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30) | st.just("v" * 10_000)


def pairs(names: st.SearchStrategy[str]) -> st.SearchStrategy[Labels]:
    """Labels: sorted, each name once, none empty."""
    return st.dictionaries(names, VALUES, max_size=5).map(lambda mapping: tuple(sorted(mapping.items())))


ROWS = st.lists(
    st.builds(
        Row,
        st.sampled_from("abcdef"),
        pairs(ROW_NAMES),
        st.sampled_from(["gauge", "counter"]),
        VALUES,
        VALUES,
        since_start=st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda row: (row.name, row.labels),
)
TIMES = (
    st.sampled_from([1_795_219_152_000, 1_795_219_153_000])
    | st.integers(0, 2**63 - 1)
    | st.integers(1_600_000_000_000, 1_900_000_000_000)
)
NUMBERS = st.floats(width=64) | st.integers(0, 2**60) | st.sampled_from([0, 0.0, -0.0, math.inf, STALE])


@st.composite
def groups(draw: st.DrawFn) -> list[SampleGroup]:
    """Groups, several of which may be of one block, or of one tick of a node."""
    blocks = [SeriesSet(draw(pairs(DEVICE_NAMES)), tuple(draw(ROWS))) for _ in range(draw(st.integers(1, 3)))]
    for block in blocks:
        if node := draw(st.sampled_from(["", "n1", "n2"])):
            block.set_producer(0, ("c1", node))
    chosen = draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=8))
    return [SampleGroup(block, draw(TIMES), [draw(NUMBERS) for _ in block.rows]) for block in chosen]


def samples_of(groups: list[SampleGroup]) -> list[Sample]:
    """The samples that a receiver must read."""
    return [
        Sample(tuple(sorted((*block.labels, ("__name__", row.name), *row.labels))), ts_ms, bits(float(value)))
        for block, ts_ms, values in groups
        for row, value in zip(block.rows, values, strict=True)
    ]


@protocols
@given(groups=groups())
def test_a_receiver_reads_the_labels_sorted_and_each_value_to_the_bit(protocol: str, groups: list[SampleGroup]) -> None:
    encoder, read_back = ENCODERS[protocol]
    samples = read_back(encoder()(groups))
    assert sorted(samples) == sorted(samples_of(groups))
    for sample in samples:
        names = [name for name, _ in sample.labels]
        assert names == sorted(set(names))
        assert all(value for _, value in sample.labels)


@protocols
@given(first=groups(), second=groups())
def test_what_an_encoder_keeps_does_not_change_what_it_writes(
    protocol: str, first: list[SampleGroup], second: list[SampleGroup]
) -> None:
    encoder, read_back = ENCODERS[protocol]
    encode = encoder()
    for groups in (first, second, first):
        assert sorted(read_back(encode(groups))) == sorted(samples_of(groups))


@st.composite
def ticks_in_a_row(draw: st.DrawFn) -> list[SampleGroup]:
    """Ticks of two nodes, each later than the one before; several in a row may be of one node, with the same series."""
    nodes: list[list[SeriesSet]] = []
    for node in "ab":
        nodes.append([SeriesSet((("node", node), ("set", set_)), tuple(draw(ROWS))) for set_ in "12"])
        for series in nodes[-1]:
            series.set_producer(START_MS + draw(st.integers(-1, 60)), ("c1", node))
    runs = st.tuples(st.sampled_from(nodes), st.integers(1, 2), st.integers(1, 40))
    numbers = cycle(draw(st.lists(NUMBERS, min_size=1, max_size=9)))
    ticks = [
        of_node[:sets] for of_node, sets, count in draw(st.lists(runs, min_size=1, max_size=6)) for _ in range(count)
    ]
    return [
        SampleGroup(series, START_MS + second, [next(numbers) for _ in series.rows])
        for second, tick in enumerate(ticks)
        for series in tick
    ]


@protocols
@given(groups=ticks_in_a_row())
def test_ticks_of_a_node_in_a_row_are_read_series_by_series_the_older_samples_first(
    protocol: str, groups: list[SampleGroup]
) -> None:
    encoder, read_back = ENCODERS[protocol]
    encode = encoder()
    for _ in range(2):
        samples = read_back(encode(groups))
        assert sorted(samples) == sorted(samples_of(groups))
        for labels in {sample.labels for sample in samples}:
            times = [sample.ts_ms for sample in samples if sample.labels == labels]
            assert times == sorted(set(times))


@protocols
def test_a_series_of_ticks_in_a_row_is_written_once(protocol: str) -> None:
    message = {"1.0": ("write_v1", "WriteRequest"), "2.0": ("write_v2", "Request")}[protocol]
    series = SeriesSet((("gpu", "0"),), (Row("power"), Row("xids", kind="counter", since_start=True)))
    series.set_producer(START_MS, ("c1", "a"))
    body = ENCODERS[protocol][0]()([SampleGroup(series, START_MS + second, [second, 1]) for second in range(16)])

    read = getattr(messages(message[0]), message[1]).FromString(body).timeseries
    assert [[sample.timestamp for sample in one.samples] for one in read] == [[*range(START_MS, START_MS + 16)]] * 2
    if protocol == "2.0":
        assert [{sample.start_timestamp for sample in one.samples} for one in read] == [{0}, {START_MS}]
        assert [one.created_timestamp for one in read] == [0, START_MS]


@protocols
def test_ticks_that_are_not_later_than_the_one_before_are_series_of_their_own(protocol: str) -> None:
    encoder, read_back = ENCODERS[protocol]
    series = SeriesSet((("gpu", "0"),), (Row("power"),))
    request = [SampleGroup(series, START_MS + second, [second]) for second in (1, 1, 0, 2, 2)]
    assert read_back(encoder()(request)) == samples_of(request)


@protocols
def test_a_staleness_marker_keeps_its_bits(protocol: str) -> None:
    encoder, read_back = ENCODERS[protocol]
    marker = SampleGroup(SeriesSet((("gpu", "0"),), (Row("gpu_up"),)), 5, [STALE])
    assert [sample.bits for sample in read_back(encoder()([marker]))] == [0x7FF0000000000002]


@pytest.mark.slow
@protocols
def test_ten_thousand_label_values_have_room(protocol: str) -> None:
    encoder, read_back = ENCODERS[protocol]
    groups = [SampleGroup(SeriesSet((("pod", f"p{number}"),), (Row("up"),)), 1, [number]) for number in range(20_000)]
    assert read_back(encoder()(groups)) == samples_of(groups)


def test_2_0_says_type_help_and_unit_of_each_metric() -> None:
    rows = (Row("gpu_energy", kind="counter", help="Energy.", unit="joules"), Row("gpu_power", help="Power."))
    body = encode_v2.Encoder().encode([SampleGroup(SeriesSet((("gpu", "0"),), rows), 5, [1, 2])])
    assert metadata_v2(body) == {"gpu_energy": (1, "Energy.", "joules"), "gpu_power": (2, "Power.", "")}


def test_2_0_says_when_a_counter_began_on_the_sample_and_on_the_series() -> None:
    rows = (Row("gpu_xids", kind="counter", since_start=True), Row("gpu_power"), Row("gpu_energy", kind="counter"))
    series = SeriesSet((("gpu", "0"),), rows)
    series.set_producer(START_MS, ("c1", "n1"))
    body = encode_v2.Encoder().encode([SampleGroup(series, START_MS + 5, [1, 2, 3])])

    assert starts_v2(body) == {"gpu_xids": (START_MS, START_MS), "gpu_power": (0, 0), "gpu_energy": (0, 0)}
    assert read_v2(body) == samples_of([SampleGroup(series, START_MS + 5, [1, 2, 3])])


def test_a_counter_of_a_producer_that_has_begun_again_since_has_no_start() -> None:
    series = SeriesSet((("gpu", "0"),), (Row("gpu_xids", kind="counter", since_start=True),))
    series.set_producer(START_MS, ("c1", "n1"))

    assert starts_v2(encode_v2.Encoder().encode([SampleGroup(series, START_MS - 1, [1])])) == {"gpu_xids": (0, 0)}


def test_2_0_writes_each_string_once() -> None:
    block = SeriesSet((("host_name", "n1"), ("node", "n1")), (Row("a", help="n1"), Row("b", help="n1")))
    body = encode_v2.Encoder().encode([SampleGroup(block, 1, [1, 2]), SampleGroup(block, 2, [1, 2])])
    assert body.count(b"n1") == body.count(b"host_name") == 1


def test_an_encoder_starts_over_before_its_constant_symbols_are_too_many() -> None:
    encoder = encode_v2.Encoder()
    for number in range(3):
        rows = tuple(Row(f"m{number}_{row}") for row in range(5000))
        groups = [SampleGroup(SeriesSet((("gpu", "0"),), rows), 1, [1.0] * 5000)]
        assert read_v2(encoder.encode(groups)) == samples_of(groups)


def test_when_an_encoder_starts_over_nothing_is_kept_of_the_plans_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_v2, "_MAX_CONSTANTS", 10)
    encoder, known, entries = encode_v2.Encoder(), SeriesSet((("gpu", "0"),), (Row("up"),)), list[int]()
    for number in range(1, 101):
        other = SeriesSet(((f"label_{number}", "x"),), (Row("up"),))
        groups = [SampleGroup(series, number, [1.0]) for series in (known, other)]
        assert read_v2(encoder.encode(groups)) == samples_of(groups)
        entries.append(len(known.cache))
    assert max(entries[50:]) == max(entries[:50])


def test_the_plans_of_known_series_stay_and_are_no_more_when_the_shapes_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode_v2, "_MAX_SHAPES", 2)
    encoder = encode_v2.Encoder()
    known = [SeriesSet((("gpu", "0"),), tuple(Row(f"m{row}") for row in range(rows + 1))) for rows in range(5)]
    caches = []
    for ts_ms in range(1, 4):
        for groups in [[SampleGroup(series, ts_ms, [1.0] * len(series.rows))] for series in known]:
            assert read_v2(encoder.encode(groups)) == samples_of(groups)
        caches.append([dict(series.cache) for series in known])
    assert caches[1:] == caches[:1] * 2


@given(st.integers(0, 2**63 - 1))
def test_a_padded_varint_is_read_as_the_number(number: int) -> None:
    assert varint(number) == fixed_varint(number, len(varint(number)))
    group = [SampleGroup(SeriesSet((("gpu", "0"),), (Row("up"),)), number, [1])]
    assert read_v1(joined_v1(group))[0].ts_ms == number
