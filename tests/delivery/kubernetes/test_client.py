"""The client of the API server: its credentials, and the results of requests."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.instruments import Instruments
from delivery.kubernetes import client as module
from delivery.kubernetes import credentials
from delivery.kubernetes.client import LARGEST_ERROR_BYTES, Client, LineSplitter, Unreachable
from delivery.kubernetes.credentials import ConfigError
from producers.cluster import instruments as names
from tests.eventually import LIMIT_S, eventually
from tests.producers.cluster.api_server import ApiServer, Reply, Request, answers, hang, kubeconfig, streams
from tests.producers.fakes import value

Open = Callable[..., Awaitable[Client]]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(objects={"/things": {}}) as running:
        yield running


@pytest.fixture
def config(server: ApiServer, tmp_path: Path) -> Path:
    """A kubeconfig for the server, of a user without credentials."""
    path = tmp_path / "config"
    path.write_text(kubeconfig(server.url, {}))
    return path


@pytest.fixture
async def connect(config: Path, tmp_path: Path) -> AsyncIterator[Open]:
    """Starts a client, with the kubeconfig unless the test gives another."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(path: Path | None = config, **settings: Any) -> Client:
            api = Client(path, service_account=tmp_path / "account", **settings)
            await api.start()
            stack.push_async_callback(api.close)
            return api

        yield start


# -- requests


@pytest.mark.slow
async def test_a_request_is_answered_whatever_its_status(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(answers(429, "slow down", Retry_After="7"))
    answer = await api.request("GET", "/things", params={"limit": "1"})
    assert (answer.status, answer.retry_after_s) == (429, 7.0)
    assert b"slow down" in answer.body
    answer = await api.request("PUT", "/things/x", body=b'{"metadata": {"name": "x"}}', headers={"Accept": "a/b"})
    assert answer.status == 404
    first, second = server.requests
    assert (first.method, first.params) == ("GET", {"limit": "1"})
    assert "authorization" not in first.headers
    assert first.headers["user-agent"].startswith("gpustream/")
    assert (second.method, second.body) == ("PUT", b'{"metadata": {"name": "x"}}')
    assert (second.headers["content-type"], second.headers["accept"]) == ("application/json", "a/b")


@pytest.mark.slow
async def test_what_is_for_other_hosts_in_the_environment_is_not_used_for_this_one(
    server: ApiServer, connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    (tmp_path / "netrc").write_text("default login someone password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    api = await connect()
    assert (await api.request("GET", "/things")).status == 200
    assert "authorization" not in server.requests[0].headers


async def test_an_api_server_beyond_a_proxy_is_reached_through_it(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    path = tmp_path / "elsewhere"
    path.write_text(kubeconfig("https://10.96.0.1:6443", {}))
    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as running:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}")
        with pytest.raises(Unreachable, match="502"):
            await (await connect(path)).request("GET", "/api")
        assert heads == [b"CONNECT 10.96.0.1:6443 HTTP/1.1\r\n"]


@pytest.mark.parametrize("where", ["https_proxy", "proxy-url"])
async def test_a_proxy_for_socks_is_reported_in_a_sentence(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    proxy, text = "socks5://user:secret@proxy.example:1080", kubeconfig("https://10.96.0.1:6443", {})
    if where == "https_proxy":
        monkeypatch.setenv(where, proxy)
    else:
        text = text.replace('"server"', f'"proxy-url": "{proxy}", "server"')
    (tmp_path / "elsewhere").write_text(text)
    with pytest.raises(ConfigError, match=f"(?i){where}.* socks5 proxy") as raised:
        await connect(tmp_path / "elsewhere")
    assert "secret" not in str(raised.value)


async def test_a_redirect_is_not_followed(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(answers(302, Location=f"{server.url}/things"))
    assert (await api.request("GET", "/x")).status == 302
    assert len(server.requests) == 1


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "²", "Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_a_retry_after_that_is_no_number_of_seconds_is_none(server: ApiServer, connect: Open, text: str) -> None:
    api = await connect()
    server.next(answers(503, Retry_After=text))
    assert (await api.request("GET", "/things")).retry_after_s is None


@pytest.mark.parametrize("text", ["86400", "99999999", "9" * 400])
async def test_of_a_retry_after_two_minutes_count_at_most(server: ApiServer, connect: Open, text: str) -> None:
    api = await connect()
    server.next(answers(503, Retry_After=text))
    assert (await api.request("GET", "/things")).retry_after_s == 120.0


async def test_requests_are_counted_by_their_status_or_by_the_reason_for_none(server: ApiServer, connect: Open) -> None:
    instruments = Instruments(names.INSTRUMENTS)
    api = await connect(requests=partial(instruments.counter, names.API_REQUESTS))
    await api.request("GET", "/things")
    await api.request("GET", "/nothing")
    await server.stop()
    with pytest.raises(Unreachable):
        await api.request("GET", "/things")
    assert [value(instruments, names.API_REQUESTS, code=code) for code in ("200", "404", "connection")] == [1, 1, 1]


async def test_an_unreachable_server_is_distinguished_from_a_silent_one(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(hang, streams(b"half", ends_with="hang"))
    for _ in range(2):
        with pytest.raises(Unreachable) as silence:
            await api.request("GET", "/things", timeout_s=0.3)
        assert silence.value.reason == "timeout"
    await server.stop()
    with pytest.raises(Unreachable, match=str(server.port)) as unreachable:
        await api.request("GET", "/things")
    assert unreachable.value.reason == "connection"


async def test_a_server_that_takes_no_connection_is_not_said_to_have_been_silent_for_as_long_as_a_stream_may(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_WITHIN_S", 0.2)
    path = tmp_path / "full"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(2):  # the queue is full, and the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        path.write_text(kubeconfig(f"http://127.0.0.1:{full.getsockname()[1]}", {}))
        api = await connect(path)
        with pytest.raises(Unreachable, match=r"^no connection in time") as error:
            async with api.stream("/things", {}):
                pass
    assert error.value.reason == "timeout"


async def test_a_request_whose_connections_are_replaced_meanwhile_is_unreachable(connect: Open) -> None:
    api = await connect()
    assert api._connection is not None
    await api._connection.close()
    with pytest.raises(Unreachable, match="the certificates have changed") as error:
        await api.request("GET", "/things")
    assert error.value.reason == "connection"


async def test_an_incomplete_answer_is_no_answer(server: ApiServer, connect: Open) -> None:
    api = await connect()

    async def half(request: Request, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        reply.reset()

    async def no_http(request: Request, reply: Reply) -> None:
        await reply.raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    server.next(half, streams(b"x", ends_with="reset"), no_http)
    for _ in range(3):
        with pytest.raises(Unreachable) as error:
            await api.request("GET", "/things")
        assert error.value.reason == "connection"


async def test_a_server_without_tls_at_an_https_address_is_a_tls_error(connect: Open, tmp_path: Path) -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as serving:
        (tmp_path / "https").write_text(kubeconfig(f"https://127.0.0.1:{port(serving)}", {"token": "t"}))
        api = await connect(tmp_path / "https")
        with pytest.raises(Unreachable) as error:
            await api.request("GET", "/things")
    assert error.value.reason == "tls"


def port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def test_an_answer_without_an_end_is_cut(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(streams(b"x" * 1001), streams(b"x" * 1000))
    with pytest.raises(Unreachable) as error:
        await api.request("GET", "/things", largest_bytes=1000)
    assert error.value.reason == "cut"
    assert len((await api.request("GET", "/things", largest_bytes=1000)).body) == 1000


# -- streams


async def lines(api: Client, cap: int = 100, **settings: Any) -> list[bytes | None]:
    async with api.stream("/things", {"watch": "1"}, **settings) as stream:
        return [line async for line in stream.lines(cap)]


async def test_a_stream_is_read_line_by_line(server: ApiServer, connect: Open) -> None:
    server.next(streams(b"on", b"e\n\ntwo\nth", b"ree\n"))
    assert await lines(await connect()) == [b"one", b"two", b"three"]


async def test_a_line_over_the_cap_is_dropped_and_the_next_one_is_not(server: ApiServer, connect: Open) -> None:
    server.next(streams(b"x" * 60, b"x" * 60 + b"\nnext\n" + b"y" * 100 + b"\n" + b"z" * 101 + b"\n"))
    assert await lines(await connect()) == [None, b"next", b"y" * 100, None]


@pytest.mark.parametrize("piece", [b"one\nhalf", b"one\n" + b"x" * 200])
async def test_a_stream_that_ends_in_a_line_is_cut(server: ApiServer, connect: Open, piece: bytes) -> None:
    api = await connect()
    server.next(streams(piece))
    async with api.stream("/things", {}) as stream:
        reading = stream.lines(100)
        assert await anext(reading) == b"one"
        with pytest.raises(Unreachable) as error:
            await anext(reading)
    assert error.value.reason == "cut"


async def test_a_stream_that_is_silent_for_too_long_is_over(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(streams(b"one\n", ends_with="hang"), hang)
    for _ in range(2):
        with pytest.raises(Unreachable) as error:
            await lines(api, silence_s=0.3)
        assert error.value.reason == "timeout"


@pytest.mark.parametrize("piece", [b"\n", b" "])
async def test_a_stream_without_a_whole_line_for_too_long_is_over(
    server: ApiServer, connect: Open, piece: bytes
) -> None:
    async def drips(_: Request, reply: Reply) -> None:
        await reply.begin()
        while True:
            await reply.piece(piece)
            await asyncio.sleep(0.05)

    api = await connect()
    server.next(drips)
    with pytest.raises(Unreachable) as error:
        await lines(api, silence_s=0.3)
    assert error.value.reason == "timeout"


async def test_a_refused_stream_has_its_status_and_the_beginning_of_its_body(server: ApiServer, connect: Open) -> None:
    api = await connect()
    server.next(answers(403, "x" * 200_000, Retry_After="3"))
    async with api.stream("/things", {}) as stream:
        assert (stream.status, stream.retry_after_s) == (403, 3.0)
        assert len(await stream.error_body()) == LARGEST_ERROR_BYTES


async def test_an_exception_while_reading_a_stream_is_not_wrapped(server: ApiServer, connect: Open) -> None:
    api = await connect()
    with pytest.raises(ValueError, match="mine"):
        async with api.stream("/things", {"watch": "1"}):
            raise ValueError("mine")


@given(st.lists(st.binary(max_size=12)), st.integers(1, 8))
def test_lines_are_the_same_however_they_are_cut_into_pieces(parts: list[bytes], size: int) -> None:
    content = b"\n".join(parts) + b"\n"
    splitter = LineSplitter(cap=10)
    pieces = [content[n : n + size] for n in range(0, len(content), size)]
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    assert lines == [line if len(line) <= 10 else None for line in content.split(b"\n") if line]
    assert not splitter.size


# -- credentials


async def accepted(api: Client) -> bool:
    return (await api.request("GET", "/things")).status == 200


async def test_a_token_file_is_read_again_and_stripped(server: ApiServer, connect: Open, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    (tmp_path / "config").write_text(kubeconfig(server.url, {"tokenFile": "token"}))
    server.tokens = {"one"}
    api = await connect(refresh_s=0.1)
    assert await accepted(api)
    token.write_text("two\n\n")
    server.tokens = {"two"}
    await eventually(lambda: accepted(api))


async def test_a_401_makes_the_client_read_its_credentials_again(
    server: ApiServer, connect: Open, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    (tmp_path / "config").write_text(kubeconfig(server.url, {"tokenFile": "token"}))
    server.tokens = {"two"}
    api = await connect(refresh_s=3600.0)
    token.write_text("two")
    assert not await accepted(api)
    await eventually(lambda: accepted(api))


async def test_a_token_whose_file_disappeared_is_kept(
    server: ApiServer, connect: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    (tmp_path / "config").write_text(kubeconfig(server.url, {"tokenFile": "token"}))
    server.tokens = {"one"}
    api = await connect(refresh_s=0.05)
    token.unlink()
    await asyncio.sleep(0.5)
    assert await accepted(api)
    reported = [record for record in caplog.records if record.name == module.__name__]
    assert len(reported) == 1, "once, and not at every attempt"
    assert "stay what they were" in reported[0].getMessage()


async def test_certificates_that_can_not_be_read_for_a_while_do_not_end_the_renewal_of_the_token(
    server: ApiServer, connect: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> tuple[bytes | None, ...]:
        raise PermissionError(13, "Permission denied")

    token = tmp_path / "token"
    token.write_text("one")
    (tmp_path / "config").write_text(kubeconfig(server.url, {"tokenFile": "token"}))
    api = await connect(refresh_s=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(credentials, "_stamp", fail)
        await eventually(lambda: "Permission denied" in caplog.text)
    token.write_text("two")
    server.tokens = {"two"}
    await eventually(lambda: accepted(api))


async def test_a_login_command_gives_the_token_and_is_run_again_after_a_401(
    server: ApiServer, connect: Open, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    status = '{"token": "%s", "expirationTimestamp": "2099-01-01T00:00:00Z"}'
    answer = f'{{"apiVersion": "v1", "kind": "ExecCredential", "status": {status}}}'
    code = f"print('{answer}' % open({str(token)!r}).read())"
    command = {"apiVersion": "v1", "command": sys.executable, "args": ["-c", code]}
    (tmp_path / "config").write_text(kubeconfig(server.url, {"exec": command}))
    server.tokens = {"one"}
    api = await connect(refresh_s=3600.0)
    assert await accepted(api)
    server.tokens = {"two"}
    token.write_text("two")
    assert not await accepted(api)
    await eventually(lambda: accepted(api))


async def test_a_token_that_is_no_valid_header_is_reported(server: ApiServer, connect: Open, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(kubeconfig(server.url, {"token": "one\r\nX-Other: 1"}))
    api = await connect()
    with pytest.raises(Unreachable, match="header"):
        await api.request("GET", "/things")
    assert server.requests == []


# -- configuration


async def test_without_a_cluster_and_a_kubeconfig_the_error_says_what_to_do(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--kubeconfig") as error:
        await connect(None)
    assert error.value.exit_code == 1


async def test_kubeconfigs_are_searched_in_the_same_places_as_by_kubectl(
    server: ApiServer, connect: Open, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(tmp_path / "nowhere"), str(config)]))
    assert await accepted(await connect(None))
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    (tmp_path / "config").rename(tmp_path / ".kube" / "config")
    assert await accepted(await connect(None))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [",
        "[]",
        "{}",
        "current-context: nothing",
        kubeconfig("", {}),
        kubeconfig("http://127.0.0.1", {}).replace('"clusters"', '"crowds"'),
        kubeconfig("http://127.0.0.1", {}).replace('"server"', '"waiter"'),
        kubeconfig("http://127.0.0.1", {}).replace('"server"', '"proxy-url": {"http": "p"}, "server"'),
        kubeconfig("https://127.0.0.1", {"client-certificate": "/nowhere"}),
        kubeconfig("https://127.0.0.1", {"client-certificate-data": "bm9uZQ==", "client-key-data": "bm9uZQ=="}),
        kubeconfig("http://127.0.0.1", {"tokenFile": "/nowhere"}),
        kubeconfig("http://127.0.0.1", {"exec": {"apiVersion": "v1", "command": "/nowhere"}}),
        kubeconfig("http://127.0.0.1", {"exec": {"apiVersion": "v1", "command": "false"}}),
        kubeconfig("http://127.0.0.1", {"exec": {"apiVersion": "v1", "command": "echo", "args": ["no JSON"]}}),
        "\x00",
    ],
)
async def test_a_malformed_kubeconfig_is_reported_in_a_sentence(connect: Open, tmp_path: Path, text: str) -> None:
    (tmp_path / "none").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path / "none")):
        await connect(tmp_path / "none")


async def test_a_missing_kubeconfig_is_reported(connect: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no kubeconfig at .*/nowhere"):
        await connect(tmp_path / "nowhere")


async def test_an_account_without_a_certificate_authority_is_reported(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("t")
    with pytest.raises(ConfigError, match=r"service account in .*account"):
        await connect(None)
    (account / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"service account in .*account"):
        await connect(None)


# -- its environment


@pytest.mark.slow
def test_the_kubernetes_library_is_loaded_only_when_it_is_needed() -> None:
    code = (
        "import sys, delivery.kubernetes.client, producers.cluster.reflector, producers.cluster.lease;"
        "sys.exit('kubernetes_asyncio' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


@pytest.mark.slow
async def test_it_works_on_uvloop_and_leaves_nothing_open(server: ApiServer, tmp_path: Path) -> None:
    login = '{"apiVersion": "v1", "kind": "ExecCredential", "status": {"token": "one"}}'
    command = {"apiVersion": "v1", "command": "echo", "args": [login]}
    (tmp_path / "config").write_text(kubeconfig(server.url, {"exec": command}))
    server.tokens = {"one"}
    code = (
        "import asyncio, pathlib, sys, uvloop\n"
        "from delivery.kubernetes.client import Client\n"
        "async def main():\n"
        "    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is slow\n"
        "    api = Client(pathlib.Path(sys.argv[1]))\n"
        "    await api.start()\n"
        "    print((await api.request('GET', '/things')).status)\n"
        "    async with api.stream('/things', {'watch': '1', 'sendInitialEvents': 'true'}) as stream:\n"
        "        print((await anext(stream.lines(10_000))).decode())\n"
        "    await api.close()\n"
        "uvloop.run(main())\n"
    )
    command_line = [sys.executable, "-W", "error", "-X", "dev", "-c", code, str(tmp_path / "config")]
    process = await asyncio.to_thread(
        partial(subprocess.run, command_line, capture_output=True, text=True, timeout=LIMIT_S)
    )
    assert process.stdout.startswith('200\n{"type": "BOOKMARK"'), process.stderr
    assert process.stderr == ""


@pytest.mark.slow
def test_a_user_without_a_name_and_a_home_can_use_a_client() -> None:
    code = (
        "import asyncio, pwd\n"
        "from delivery.kubernetes.client import Client\n"
        "from delivery.kubernetes.credentials import ConfigError\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "try: asyncio.run(Client(None).start())\n"
        "except ConfigError as error: print(error)\n"
    )
    environment = {name: os.environ[name] for name in ("PATH",)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert "no way to the Kubernetes API" in result.stdout, result.stderr
