"""The scrape sink as a component."""

import asyncio
import socket

import aiohttp
import pytest

from delivery.ledger import Partition
from delivery.positions import find_start
from delivery.values import Address
from sinks.consumer import Source
from sinks.http_server import ListenError
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink
from tests.sinks.records import ConsumedRecord, FakeGroup

NOWHERE = "127.0.0.1:1"


def test_every_error_of_the_settings_is_reported() -> None:
    errors = ScrapeSettings(kafka=NOWHERE, stale_after_s=0.0, session_timeout_s=0.5).errors()

    assert [error.split(":")[0] for error in errors] == ["--session-timeout", "--stale-after"]
    assert ScrapeSettings(kafka=NOWHERE).errors() == []


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sink = ScrapeSink(ScrapeSettings(kafka=NOWHERE, scrape_listen=Address("127.0.0.1", port)))

        message = rf"--scrape-listen: can't serve on 127\.0\.0\.1:{port}: Address already in use$"
        with pytest.raises(ListenError, match=message):
            await sink.run(asyncio.Event())


async def test_without_kafka_it_serves_what_it_has_and_says_why_it_is_not_ready() -> None:
    sink, stop = ScrapeSink(ScrapeSettings(kafka=NOWHERE, scrape_listen=Address("127.0.0.1", 0))), asyncio.Event()
    assert sink.not_ready() == ["not started"]
    running = asyncio.create_task(sink.run(stop))
    while sink.address is None:  # noqa: ASYNC110 - set by the sink once it listens
        await asyncio.sleep(0.01)

    async with aiohttp.ClientSession() as session, session.get("http://{}:{}/metrics".format(*sink.address)) as answer:
        assert (answer.status, await answer.text()) == (200, "")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert sink.not_ready()

    stop.set()
    await running


async def test_a_sink_that_starts_reads_back_nodes_that_are_read_once_in_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Source] = []

    class Reader:
        def __init__(self, _: object, sources: list[Source], *__: object) -> None:
            read.extend(sources)

        async def run(self, _: object) -> None:
            """Read nothing."""

    monkeypatch.setattr("sinks.scrape.sink.GroupReader", Reader)
    await asyncio.wait_for(ScrapeSink(ScrapeSettings(kafka=NOWHERE, scrape_listen=None)).run(asyncio.Event()), 20)
    ten_nodes = FakeGroup([ConsumedRecord(offset, b"", offset * 30_000) for offset in range(200)], group=200)
    tp = Partition(read[0].topic, 0)
    start = await find_start(ten_nodes, tp, "latest", read[0].recall, last_end=None)  # type: ignore[arg-type]
    assert start.position <= 190
