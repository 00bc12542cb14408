"""One attempt over HTTP, whatever the receiver does with it."""

import asyncio
import base64
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sinks import receiver as module
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.policy import Answer
from sinks.remote_write.send import Client

TLS = Path(__file__).parent / "tls"

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def receiving(handle: Handle, tls: ssl.SSLContext | None = None, **options: Any) -> AsyncIterator[Client]:
    """A receiver with the handler of the test, and a client of it."""
    app = web.Application()
    app.router.add_post("/write", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}/write"
    client = Client(RemoteWriteSettings(kafka="none", url=url, **options))
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def answering(status: int, text: str = "", **headers: str) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return handle


async def test_a_request_says_what_the_specification_asks_for() -> None:
    requests: list[dict[str, str]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append(
            {name.lower(): value for name, value in request.headers.items()} | {"body": (await request.read()).decode()}
        )
        return web.Response(status=204)

    async with receiving(handle, headers=(("X-Scope-OrgID", "team"),)) as client:
        await client.post(b"one", "1.0")
        await client.post(b"two", "2.0")
    first, second = requests
    assert (first["body"], second["body"]) == ("one", "two")
    assert first["content-type"] == "application/x-protobuf"
    assert second["content-type"] == "application/x-protobuf;proto=io.prometheus.write.v2.Request"
    assert first["x-prometheus-remote-write-version"] == "0.1.0"
    assert second["x-prometheus-remote-write-version"] == "2.0.0"
    for headers in requests:
        assert headers["content-encoding"] == "snappy"
        assert headers["user-agent"].startswith("gpustream/")
        assert headers["x-scope-orgid"] == "team"


async def test_an_answer_is_status_text_count_and_how_long_to_wait() -> None:
    counted = answering(400, "bad", X_Prometheus_Remote_Write_Samples_Written="3", Retry_After="7")
    async with receiving(counted) as client:
        assert await client.post(b"", "2.0") == Answer(400, "bad", 3, 7.0)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100))
    async with receiving(answering(429, Retry_After=later)) as client:
        waits = (await client.post(b"", "1.0")).retry_after_s
        assert waits is not None
        assert 90 < waits <= 100
    async with receiving(answering(429, Retry_After="soon")) as client:
        assert (await client.post(b"", "1.0")).retry_after_s is None


async def test_a_redirect_is_not_followed() -> None:
    async with receiving(answering(302, Location="http://127.0.0.1:1/elsewhere")) as client:
        assert (await client.post(b"", "1.0")).status == 302


async def test_a_receiver_that_hangs_is_no_answer() -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with receiving(hang, request_timeout_s=0.05) as client:
        answer = await client.post(b"", "1.0")
    assert answer == Answer(0, "no answer within 0.05 s")


@pytest.mark.parametrize("status", [200, 400])
async def test_an_answer_that_is_cut_has_its_status_and_what_came_of_its_text(status: int) -> None:
    async def close(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"half")
        if request.transport is not None:
            request.transport.close()
        return response

    async with receiving(close) as client:
        assert await client.post(b"", "1.0") == Answer(status, "half")


async def test_an_answer_has_the_text_that_came_while_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = asyncio.timeout

    def stopped(seconds: float | None) -> asyncio.Timeout:
        """When the process goes on, the time for the text is over, and the text is there."""
        if seconds == module._TEXT_S:
            reading.set()
            assert written.wait(10)
        return timeout(seconds)

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 12\r\n\r\n")
            assert reading.wait(10)
            connection.sendall(b"out of order")
            written.set()
            connection.recv(1)

    reading, written = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        client = Client(RemoteWriteSettings(kafka="none", url=f"http://127.0.0.1:{server.getsockname()[1]}/write"))
        monkeypatch.setattr(module, "_TEXT_S", 0.0)
        monkeypatch.setattr(asyncio, "timeout", stopped)
        answer = await client.post(b"", "1.0")
        await client.close()
        await serving
    assert answer == Answer(400, "out of order")


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "of a later time"])
async def test_an_answer_whose_text_is_encoded_in_an_odd_way_has_its_status(coding: str) -> None:
    async with receiving(answering(200, "no gzip", Content_Encoding=coding)) as client:
        assert (await client.post(b"", "1.0")).status == 200


async def test_a_receiver_that_compresses_sends_its_text_as_it_is() -> None:
    async def handle(_: web.Request) -> web.Response:
        response = web.Response(status=400, text="out of order")
        response.enable_compression()
        return response

    async with receiving(handle) as client:
        assert await client.post(b"", "1.0") == Answer(400, "out of order")


async def test_a_receiver_that_is_not_there_is_no_answer() -> None:
    client = Client(RemoteWriteSettings(kafka="none", url="http://127.0.0.1:1/write"))
    try:
        answer = await client.post(b"", "1.0")
    finally:
        await client.close()
    assert answer.status == 0
    assert "127.0.0.1" in answer.text


async def test_an_endless_answer_is_cut() -> None:
    async with receiving(answering(400, "x" * 1_000_000)) as client:
        assert len((await client.post(b"", "1.0")).text) <= 16 * 1024


@pytest.mark.parametrize("part", [b"x" * 100_000, b"x"], ids=["endless", "slow"])
async def test_an_answer_whose_text_does_not_end_has_its_status(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400)
        await response.prepare(request)
        while not ended.is_set():
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    ended = asyncio.Event()
    monkeypatch.setattr(module, "_TEXT_S", 0.1)
    async with receiving(handle, request_timeout_s=20.0) as client:
        answer = await asyncio.wait_for(client.post(b"", "1.0"), 10)
        ended.set()
    assert answer.status == 400
    assert answer.text.startswith("x")


async def test_an_answer_in_several_parts_is_read_to_its_end_or_to_a_limit() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400)
        await response.prepare(request)
        for part in (b"out of ", b"order ", b"x" * 100_000):
            await response.write(part)
            await asyncio.sleep(0.05)
        return response

    async with receiving(handle) as client:
        answer = await client.post(b"", "1.0")
    assert answer.text.startswith("out of order xxx")
    assert len(answer.text) == 16 * 1024


@pytest.mark.parametrize("count", ["9" * 5000, "\u00b2", "-1", "1.5", ""])
async def test_a_count_that_is_none_is_no_count(count: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nX-Prometheus-Remote-Write-Samples-Written: {count}\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/write"
        client = Client(RemoteWriteSettings(kafka="none", url=url))
        assert await client.post(b"", "2.0") == Answer(200, "", None, None)
        await client.close()


async def test_a_receiver_beyond_a_proxy_is_reached_through_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    requests: list[list[str]] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head.split("\r\n"))
        tunnel = head.startswith("CONNECT")
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            % (b"403 Forbidden" if tunnel else b"204 No Content")
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://gpu:secret@{address}")
        for scheme, answer in ("http", 204), ("https", 0):
            client = Client(RemoteWriteSettings(kafka="none", url=f"{scheme}://mimir.example/push"))
            replies = [await client.post(b"samples", "1.0") for _ in range(2)]
            await client.close()
            assert [reply.status for reply in replies] == [answer] * 2
    assert "403" in replies[0].text
    assert [request[0] for request in requests] == [
        *["POST http://mimir.example/push HTTP/1.1"] * 2,
        *["CONNECT mimir.example:443 HTTP/1.1"] * 2,
    ]
    basic = base64.b64encode(b"gpu:secret").decode()
    assert all(f"Proxy-Authorization: Basic {basic}" in request for request in requests)
    assert [line.message for line in caplog.records] == [f"mimir.example: reached through the proxy {address}"] * 2


async def test_a_token_that_changes_in_its_file_is_used(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.0)
    token, header_values = tmp_path / "token", []

    async def handle(request: web.Request) -> web.StreamResponse:
        header_values.append(request.headers.get("Authorization"))
        return web.Response(status=204)

    token.write_text("first\n")
    async with receiving(handle, bearer_token_file=token) as client:
        await client.post(b"", "1.0")
        token.write_text("the second\n")
        await client.post(b"", "1.0")
        token.unlink()
        answer = await client.post(b"", "1.0")
    assert header_values == ["Bearer first", "Bearer the second"]
    assert answer.status == 0
    assert "token" in answer.text


async def test_a_password_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    passwords: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        passwords.append(request.headers["Authorization"])
        return web.Response(status=204)

    async with receiving(handle, basic_auth_user="me", basic_auth_password_file=tmp_path / "password") as client:
        await client.post(b"", "1.0")
    assert passwords == ["Basic " + base64.b64encode(b"me:s3cret").decode()]


def serving_tls(*, ask_clients: bool = False) -> ssl.SSLContext:
    """The receiver's side of TLS; ``ask_clients``: only those with a certificate of the authority get in."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=TLS / "ca.pem")
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED if ask_clients else ssl.CERT_NONE
    return context


@pytest.mark.parametrize(
    ("trusted", "ask_clients", "cert", "status"),
    [
        ("ca.pem", False, False, 204),
        ("other.pem", False, False, 0),
        ("ca.pem", True, True, 204),
        ("ca.pem", True, False, 0),
    ],
    ids=["the authority is trusted", "it is not", "the client shows a certificate", "it shows none"],
)
async def test_both_sides_of_tls_are_checked(trusted: str, ask_clients: bool, cert: bool, status: int) -> None:
    client_files = {"tls_cert": TLS / "client.pem", "tls_key": TLS / "client.key"} if cert else {}
    receiver = receiving(answering(204), serving_tls(ask_clients=ask_clients), tls_ca=TLS / trusted, **client_files)
    async with receiver as client:
        answer = await client.post(b"body", "1.0")
    assert answer.status == status
    assert bool(answer.text) == (status == 0)


async def test_a_certificate_that_is_none_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nonsense")
    client = Client(RemoteWriteSettings(kafka="none", url="https://127.0.0.1:1/write", tls_ca=tmp_path / "ca"))
    try:
        answer = await client.post(b"", "1.0")
    finally:
        await client.close()
    assert answer.status == 0
    assert ssl.SSLError.__name__ in answer.text
