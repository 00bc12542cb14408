"""The HTTP server of the sinks: whom it answers, and what it logs of its clients."""

import asyncio
import gzip
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import SO_LINGER, SOL_SOCKET

import pytest
from aiohttp import web

from sinks import http_server
from sinks.http_server import listening


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 20))


async def _failing(_: web.Request) -> web.Response:
    raise ValueError("a fault of ours")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serves while inside; gives a connection."""
    routes = [web.get("/endless", _endless), web.get("/failing", _failing)]
    async with listening(routes, ("127.0.0.1", 0), option="--listen") as address:
        reader, writer = await asyncio.open_connection(*address, limit=1024)
        yield reader, writer
        writer.close()


@pytest.mark.parametrize(
    "request_",
    [
        "GET /endless HTTP/9.9\r\nHost: x\r\n\r\n",
        "GET /endless HTTP/1.1\r\n\r\n",
        "GET /endless HTTP/1.1\r\nHost: x\r\n: no name\r\n\r\n",
        f"GET /{'a' * 20_000} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://[::1/endless HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /endless HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnone",
    ],
)
async def test_a_request_that_is_none_is_answered_and_not_logged(
    request_: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (reader, writer):
        writer.write(request_.encode())
        answer = await reader.read(1024)
        writer.write_eof()
        while await reader.read(1024):
            continue

    assert answer.split()[1] in (b"400", b"405")
    assert [entry for entry in caplog.records if entry.levelno > logging.DEBUG] == []


@pytest.mark.parametrize(("request_", "status"), [(b"POST /", b"200"), (b"GET /", b"405"), (b"POST /none", b"404")])
@pytest.mark.parametrize("expected", [b"100-continue", b"more", b"\xff\x96"])
async def test_a_client_is_answered_whatever_it_expects_before_it_sends_a_body(
    expected: bytes, request_: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(_: web.Request) -> web.Response:
        return web.Response(text="done")

    async with listening([web.post("/", work)], ("127.0.0.1", 0), option="--listen") as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request_ + b" HTTP/1.1\r\nHost: x\r\nExpect: " + expected + b"\r\nContent-Length: 4\r\n\r\n")
        assert (await reader.readline()).split()[1] == status
        writer.close()
    assert [entry for entry in caplog.records if entry.levelno > logging.DEBUG] == []


async def test_a_client_of_http_1_0_that_keeps_its_connection_is_told_where_an_answer_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def streamed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"done")
        return response

    monkeypatch.setattr(http_server, "IDLE_S", 3600.0)
    async with listening([web.get("/", streamed)], ("127.0.0.1", 0), option="--listen") as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"\r\n\r\ndone")
        writer.close()


async def test_a_body_that_becomes_large_when_it_is_unpacked_stays_packed() -> None:
    async def size(request: web.Request) -> web.Response:
        return web.Response(text=f"{len(await request.read())} bytes")

    bomb = gzip.compress(bytes(100 << 20))
    async with listening([web.post("/", size)], ("127.0.0.1", 0), option="--listen") as address:
        reader, writer = await asyncio.open_connection(*address)
        headers = f"Host: x\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n"
        writer.write(f"POST / HTTP/1.1\r\n{headers}\r\n".encode() + bomb)
        assert (await reader.read()).endswith(f"\r\n{len(bomb)} bytes".encode())
        writer.close()


async def test_a_client_that_breaks_off_within_an_answer_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(1024)
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    assert [entry for entry in caplog.records if entry.levelno > logging.DEBUG] == []


async def test_a_fault_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (reader, writer):
        writer.write(b"GET /failing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"500"

    (entry,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert "a fault of ours" in str(entry.exc_info)


@pytest.mark.parametrize(("max_headers", "status"), [(http_server.MAX_HEADERS, b"400"), (512, b"404")])
async def test_only_a_server_that_expects_a_header_for_each_group_of_a_user_takes_hundreds(
    max_headers: int, status: bytes
) -> None:
    async with listening([], ("127.0.0.1", 0), option="--listen", max_headers=max_headers) as address:
        reader, writer = await asyncio.open_connection(*address)
        groups = "".join([f"X-Remote-Group: {number}\r\n" for number in range(400)])
        writer.write(f"GET /none HTTP/1.1\r\nHost: x\r\n{groups}\r\n".encode())

        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_clients_that_ask_nothing_make_room_for_new_ones_and_one_that_waits_for_its_answer_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "MAX_CLIENTS", 4)
    started, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        started.set()
        await may_answer.wait()
        return web.Response(text="done")

    async def fast(_: web.Request) -> web.Response:
        return web.Response(text="fast")

    request = "GET /{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    routes = [web.get("/slow", slow), web.get("/fast", fast)]
    async with listening(routes, ("127.0.0.1", 0), option="--listen") as address:
        waiting = await asyncio.open_connection(*address)
        waiting[1].write(request.format("slow").encode())
        await started.wait()
        held = [await asyncio.open_connection(*address) for _ in range(12)]
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request.format("fast").encode())
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"fast")
        may_answer.set()
        assert (await asyncio.wait_for(waiting[0].read(), 10)).endswith(b"done")
        for _, opened in (waiting, (reader, writer), *held):
            opened.close()


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])  # noqa: S104 - for a moment
async def test_every_interface_is_of_ipv4_and_ipv6(everywhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening([], (everywhere, 0), option="--listen") as (_, port):
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"404"
            writer.close()

    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)  # the kernel has no IPv6
    async with listening([], (everywhere, 0), option="--listen") as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with pytest.raises(OSError, match="failed"):
            await asyncio.open_connection("::1", port)
