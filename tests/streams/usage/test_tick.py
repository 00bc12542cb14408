"""Whatever gpu.attributed may hold is read and counted, or refused with one kind of error."""

from contextlib import suppress

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.usage import books as bookkeeping
from streams.usage.bookkeeper import Bookkeeper
from streams.usage.books import Accounting, Books
from streams.usage.tick import decode
from tests.streams.usage.made import START_MS, gpu, holder, tick
from tests.topics import records
from topics.attributed import TOPIC, AttributedSample
from topics.topic import decoder
from topics.usage import Usage


@given(st.lists(records.records_of(TOPIC), min_size=1, max_size=4))
def test_every_record_that_the_topic_allows_is_counted(given_records: list[records.Json]) -> None:
    keeper = Bookkeeper(Books(schema=1, cluster="c", node="n"), Accounting())
    for number, record in enumerate(given_records):
        value = records.encoded(record | {"run_id": 1, "seq": number + 1, "offset": number + 1})
        sample = decode(value)
        assert [device.uuid for device in sample.devices] == [
            device.uuid for device in decoder(AttributedSample)(value).devices
        ]
        with suppress(msgspec.DecodeError):
            keeper.book(sample, sample.ts_ms)
    last = tick(0, gpu("GPU-a", holder("a")), run_id=2, offset=10)
    usage_records = keeper.book(last, START_MS).records + keeper.close_silent(START_MS + 10**9)
    for usage_record in usage_records:
        assert msgspec.json.decode(bookkeeping.encode(usage_record), type=Usage) == usage_record
    assert bookkeeping.decode(bookkeeping.encode(keeper.books)) == keeper.books


def test_null_means_what_absent_means() -> None:
    bare = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": 1, "ts_ms": 1, "offset": 1}
    bare |= {"attribution": "exact"}
    nulls = {"uuid": "GPU-a", "metrics": None, "state": None, "holders": None, "info": None, "processes": None}
    with_nulls, other = (
        decode(msgspec.json.encode(bare | {"devices": [device]})) for device in (nulls, {"uuid": "GPU-a"})
    )
    assert with_nulls.devices == other.devices


def test_what_is_not_counted_may_be_anything_beside_a_null_too() -> None:
    bare = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": 1, "ts_ms": 1, "offset": 1}
    bare |= {"attribution": "exact", "devices": [{"uuid": "GPU-a", "state": None, "events": "of a later version"}]}
    (device,) = decode(msgspec.json.encode(bare)).devices
    assert (device.uuid, device.state) == ("GPU-a", "ok")


def test_an_interval_of_an_age_counts_as_an_hour() -> None:
    keeper = Bookkeeper(Books(schema=1, cluster="c", node="n"), Accounting())
    for number, at_ms in enumerate((0, 10**12)):
        sample = tick(at_ms, gpu("GPU-a"), interval_ms=2**62, seq=number + 1, offset=number + 1)
        keeper.book(sample, sample.ts_ms)
    assert keeper.books.booked_ms == START_MS + 10**12
