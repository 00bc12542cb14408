"""The page as a component."""

import asyncio
import logging
import time
from dataclasses import replace

import msgspec
import pytest

from delivery.values import Address
from sinks.page.config import HOST_NAMES, PageSettings
from sinks.page.server import is_own
from sinks.page.sink import PageSink
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.sinks.page.ticks import alert, device, holder, hour, tick
from tests.sinks.records import ConsumedRecord

SETTINGS = PageSettings(kafka="127.0.0.1:1", page_listen=Address("127.0.0.1", 0))


def test_every_error_of_the_settings_is_reported() -> None:
    assert SETTINGS.errors() == []
    assert replace(SETTINGS, page_prefix="/a/b-c/").errors() == []
    (off,) = replace(SETTINGS, page_listen=None).errors()
    assert off.startswith("--page-listen: off is not possible")
    for prefix in ("", "gpus", "/gpus", "gpus/", "//", "/a b/", "/<x>/"):
        (wrong,) = replace(SETTINGS, page_prefix=prefix).errors()
        assert wrong.startswith("--page-prefix:")


@pytest.mark.parametrize("text", ["gpus.example.com", "GPUs.example.com:443", "a.example.com, gpus.example.com.,"])
def test_a_name_by_which_the_page_may_be_asked_for_is_the_same_however_it_is_written(text: str) -> None:
    names = HOST_NAMES.convert(text, None, None)
    assert all(is_own(header, names) for header in ("gpus.example.com", "gpus.example.com:443", "gpus.example.com."))
    assert not is_own("evil.example.com", names)


def test_an_empty_page_host_is_as_none() -> None:
    assert HOST_NAMES.convert("", None, None) == ()


def test_each_record_is_shown_a_duplicate_or_dropped() -> None:
    sink = PageSink(SETTINGS)
    record = ConsumedRecord(1, msgspec.json.encode(tick(1, device("GPU-a", holder("p-0"), used=0.5))))
    sink.handle("gpu.attributed", [record, record, record._replace(value=b"{"), record._replace(value=None)])
    fired = alert()
    alert_update = ConsumedRecord(0, msgspec.json.encode(fired), key=fired.fingerprint.encode())
    sink.handle(
        "gpu.alerts", [alert_update, alert_update._replace(key=b"0"), alert_update._replace(value=None, key=b"0")]
    )
    booked = ConsumedRecord(0, msgspec.json.encode(hour()), key=b"k")
    sink.handle("gpu.usage", [booked, booked, booked._replace(value=b"[]"), booked._replace(value=None)])
    no_slices = msgspec.json.encode({**msgspec.to_builtins(hour()), "of": 0})
    sink.handle("gpu.usage", [booked._replace(key=b"l", value=no_slices)])

    books = assert_accounted(sink.registry)["page", ""]
    assert {name: int(count) for name, count in books.items() if count} == {
        "received": 12,
        "records_delivered_total": 4,
        "records_duplicate_total": 3,
        "records_dropped_total": 5,
    }
    assert (len(sink.fleet.nodes), len(sink.fleet.alerts()), len(sink.fleet.usage())) == (1, 1, 1)


def test_the_alerts_of_a_log_that_is_gone_are_not_shown_any_more() -> None:
    sink, fired = PageSink(SETTINGS), alert()
    sink.handle("gpu.alerts", [ConsumedRecord(0, msgspec.json.encode(fired), key=fired.fingerprint.encode())])
    version = sink.fleet.alerts_version
    sink.begin_again("gpu.attributed")
    assert len(sink.fleet.alerts()) == 1
    sink.begin_again("gpu.alerts")
    assert sink.fleet.alerts() == []
    assert sink.fleet.alerts_version > version


def test_what_comes_after_all_was_read_is_not_silent_although_this_hosts_clock_is_ahead() -> None:
    sink, began_s = PageSink(SETTINGS), time.monotonic()
    records = [ConsumedRecord(seq, msgspec.json.encode(tick(seq, device("GPU-a")))) for seq in (1, 2)]
    sink.handle("gpu.attributed", records[:1])
    sink.fleet.expire(time.monotonic())
    assert not sink.fleet.nodes, "it may be as old as the clock says"

    sink.tail.read_to_end_s = began_s
    sink.handle("gpu.attributed", records[1:])
    sink.fleet.expire(began_s + 29)
    assert [node.silent for node in sink.fleet.nodes.values()] == [False]
    sink.fleet.expire(began_s + 31)
    assert [node.silent for node in sink.fleet.nodes.values()] == [True]


async def test_it_says_so_if_others_can_reach_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sinks.page.sink")
    for host, warnings in (("127.0.0.1", 0), ("0.0.0.0", 1)):  # noqa: S104 - for a moment
        sink, stop = PageSink(replace(SETTINGS, page_listen=Address(host, 0))), asyncio.Event()
        running = asyncio.create_task(sink.run(stop))
        await eventually(lambda sink=sink: sink.address, unless=running)  # type: ignore[misc]
        stop.set()
        await running
        assert len([entry for entry in caplog.records if "reverse proxy" in entry.getMessage()]) == warnings
