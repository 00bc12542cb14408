"""The scrape sink as a component."""

import asyncio
import socket

import aiohttp
import pytest

from delivery.values import Address
from sinks.http_server import ListenError
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink

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
