"""Which requests are answered, how, and which are refused."""

import asyncio
import gzip
import logging
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest
from yarl import URL

from sinks import http_server
from sinks.http_server import ListenError
from sinks.scrape import exposition, server
from sinks.scrape.exposition import TEXT, TEXT_1, Renderings
from sinks.scrape.server import serving
from tests.sinks.scrape.fleet import exposed, full_node, parsed
from tests.sinks.scrape.handler import groups_of

DEVICES = groups_of(full_node(), "otel", "otel")
ANY_PORT = ("127.0.0.1", 0)


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes


class Bench:
    """A server and a client that adds no headers of its own."""

    def __init__(self, address: tuple[str, int], client: aiohttp.ClientSession) -> None:
        self.url = "http://{}:{}".format(*address)
        self.client = client
        self.scrapes = 0

    async def ask(self, path: str | URL, method: str = "GET", **headers: str) -> Answer:
        """Asks for a path, or a whole address, with headers written with underscores."""
        request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        address = path if isinstance(path, URL) else self.url + path
        async with self.client.request(method, address, headers=request_headers) as answer:
            return Answer(answer.status, {**answer.headers}, await answer.read())


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """Serves the devices."""
    scrapes: list[None] = []
    renderings = Renderings(lambda: DEVICES)
    without = ("Accept", "Accept-Encoding", "User-Agent")
    async with (
        serving(renderings, ANY_PORT, lambda: scrapes.append(None)) as address,
        aiohttp.ClientSession(skip_auto_headers=without, auto_decompress=False) as client,
    ):
        new_bench = Bench(address, client)
        yield new_bench
        new_bench.scrapes = len(scrapes)


async def test_a_scraper_gets_the_format_it_asks_for() -> None:
    async with bench() as running:
        plain = await running.ask("/metrics")
        other = await running.ask(
            "/metrics", Accept="application/openmetrics-text;version=1.0.0,text/plain;version=1.0.0;q=0.5"
        )

    assert (plain.status, plain.headers["Content-Type"]) == (200, TEXT)
    assert plain.body.decode() == exposed(DEVICES)
    assert (other.status, other.headers["Content-Type"]) == (200, TEXT_1)
    assert other.body == plain.body
    assert running.scrapes == 2


@pytest.mark.parametrize("accept", ["nonsense", "application/openmetrics-text;version=banana", ";q=;;,", "image/png"])
async def test_a_bad_accept_header_gets_the_plain_text(accept: str) -> None:
    async with bench() as running:
        answer = await running.ask("/metrics", Accept=accept)

    assert (answer.status, answer.headers["Content-Type"]) == (200, TEXT)
    assert answer.body.decode() == exposed(DEVICES)


async def test_who_takes_gzip_gets_gzip() -> None:
    async with bench() as running:
        packed = await running.ask("/metrics", Accept_Encoding="gzip")
        plain = await running.ask("/metrics", Accept_Encoding="gzip;q=0")

    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body).decode() == exposed(DEVICES)
    assert "Content-Encoding" not in plain.headers
    assert plain.body.decode() == exposed(DEVICES)


async def test_names_in_the_query_pick_series() -> None:
    async with bench() as running:
        selected = await running.ask("/metrics?name[]=gpu_utilization&name[]=gpu_temperature&name[]=none")
        packed = await running.ask("/metrics?name[]=gpu_utilization", Accept_Encoding="gzip")

    all_lines = exposed(DEVICES).splitlines()
    expected = ("gpu_utilization{", "gpu_temperature{")
    assert [line for line in selected.body.decode().splitlines() if not line.startswith("#")] == sorted(
        (line for line in all_lines if line.startswith(expected)), key=lambda line: line.split("{")[0]
    )
    assert {family.name for family in parsed(gzip.decompress(packed.body).decode())} == {"gpu_utilization"}


@pytest.mark.parametrize("query", ["name[]=", "name[]", "%", "&&;=&=", "a=%ff", "a" * 5000])
async def test_no_query_is_an_error(query: str) -> None:
    async with bench() as running:
        answer = await running.ask(URL(f"{running.url}/metrics?{query}", encoded=True))

    assert (answer.status, answer.body.decode()) == (200, exposed(DEVICES))


async def test_half_sent_requests_are_closed_and_no_more_than_so_many_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.5)
    monkeypatch.setattr(http_server, "MAX_CLIENTS", 8)
    async with serving(Renderings(lambda: DEVICES), ANY_PORT, lambda: None) as address:
        open_ = [await asyncio.open_connection(*address) for _ in range(80)]
        for number, (_, writer) in enumerate(open_):
            writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow:"[: number + 1])
        await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in open_), return_exceptions=True), 20)
        for _, writer in open_:
            writer.close()
        async with aiohttp.ClientSession() as client, client.get("http://{}:{}/metrics".format(*address)) as answer:
            assert answer.status == 200


async def test_a_request_that_comes_byte_by_byte_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)
    async with serving(Renderings(lambda: DEVICES), ANY_PORT, lambda: None) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        closed = asyncio.ensure_future(reader.read())
        while not closed.done():
            writer.write(b"x")
            await asyncio.wait((closed,), timeout=0.02)
        assert closed.exception() is not None or closed.result() == b""
        writer.close()


async def test_a_client_that_does_not_take_the_answer_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.2)
    monkeypatch.setattr(exposition, "exposition", lambda *_, **__: [bytes(32 << 20)])
    async with serving(Renderings(lambda: DEVICES), ANY_PORT, lambda: None) as address:
        reader, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.5)  # the answer is larger than what the sockets hold, and nobody reads
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(32 << 20), 10)
        writer.close()
    assert [entry for entry in caplog.records if entry.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_clients_that_do_not_take_their_answers_take_no_memory(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Each asks for something else, so that no two share a rendering."""
    size, clients = 8 << 20, 24
    monkeypatch.setattr(exposition, "exposition", lambda *_, **__: [bytes(size)])
    tracemalloc.start()
    try:
        async with serving(Renderings(lambda: DEVICES), ANY_PORT, lambda: None) as address:
            opened = [await asyncio.open_connection(*address, limit=1024) for _ in range(clients)]
            for number, (_, writer) in enumerate(opened):
                request = f"GET /metrics?name[]=x{number} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: {encoding}\r\n\r\n"
                writer.write(request.encode())
            await asyncio.gather(*(reader.readline() for reader, _ in opened))  # the answer begins
            held_bytes, _ = tracemalloc.get_traced_memory()
            for _, writer in opened:
                writer.transport.abort()
    finally:
        tracemalloc.stop()
    assert held_bytes < 3 * size


async def test_a_client_that_asks_and_leaves_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    class Endless(Renderings):
        """Never renders anything."""

        async def compressed(self, *_: Any, **__: Any) -> bytes:
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return b""

    async with serving(Endless(list), ANY_PORT, lambda: None) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await waits.wait()
        writer.close()
        await asyncio.wait_for(ended.wait(), 10)
    assert [entry for entry in caplog.records if entry.levelno > logging.DEBUG] == []


async def test_head_says_what_get_would_be_without_rendering_it() -> None:
    async with bench() as running:
        answer = await running.ask("/metrics", "HEAD")

    assert (answer.status, answer.headers["Content-Type"], answer.body) == (200, TEXT, b"")
    assert running.scrapes == 0


async def test_the_root_leads_to_the_metrics() -> None:
    async with bench() as running:
        page, head = await running.ask("/"), await running.ask("/", "HEAD")

    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b'<a href="/metrics">' in page.body
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("path", ["/metric", "/metrics/", "/..%2fetc/passwd", "/healthz"])
async def test_any_other_path_says_where_the_metrics_are(path: str) -> None:
    async with bench() as running:
        answer = await running.ask(path)

    assert (answer.status, answer.body) == (404, b"/metrics is here\n")


@pytest.mark.parametrize("path", ["/", "/metrics"])
@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
async def test_nothing_can_be_written(path: str, method: str) -> None:
    async with bench() as running:
        answer = await running.ask(path, method)

    assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD")


async def test_a_scrape_that_stopping_overtakes_gets_an_answer_that_says_so_and_delays_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, go = threading.Event(), threading.Event()

    render = exposition.exposition

    def held_encode(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        started.set()
        assert go.wait(30)
        return render(*args, **kwargs)

    monkeypatch.setattr(exposition, "exposition", held_encode)
    async with aiohttp.ClientSession() as client:
        async with serving(Renderings(lambda: DEVICES), ANY_PORT, lambda: None) as address:
            scrape = asyncio.create_task(client.get("http://{}:{}/metrics".format(*address)))
            await asyncio.to_thread(started.wait, 30)
            asyncio.get_running_loop().call_later(0.1, go.set)
        answer = await asyncio.wait_for(scrape, 30)
        assert (answer.status, await answer.text()) == (503, "stopping\n")


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(ANY_PORT) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=rf"--scrape-listen: can't serve on 127\.0\.0\.1:{port}: .*in use"):
            async with serving(Renderings(list), ("127.0.0.1", port), lambda: None):
                pytest.fail("it serves")
